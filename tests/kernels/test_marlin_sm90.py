"""marlin_gemm of many tokens on a GPU of compute capability 9.0: every shape and way of cutting that it may choose."""

from __future__ import annotations

import pytest
import torch

from kernel_checks import with_row_stride, without_sm90
from pelton import ops


def missing() -> str:
    return without_sm90() or ("" if hasattr(torch.ops.pelton, "marlin_gemm") else "the library has no marlin")


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (64, 6144, 4096),  # 128 outputs x 64 tokens, cut
        (64, 28672, 1024),  # 384 x 64
        (128, 8192, 4096),  # 128 x 128, cut
        (256, 8192, 4096),  # 128 x 128, whole
        (1024, 6144, 1024),  # 192 x 128 or 128 x 256, whole
        (1024, 4096, 4096),  # 128 x 256
        (33, 64, 64),  # one tile
        (300, 200, 1000),  # nothing is a whole tile
        (2100, 6272, 576),  # token tiles that are no multiple of what lies beside each other
        (70, 130, 8192),  # many parts of few outputs
        # shapes that are chosen on the few multiprocessors of the emulation
        (64, 3072, 128),  # 384 x 64
        (260, 1000, 192),  # 128 x 256
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group_size", "zeros"), [(128, False), (32, True), (-1, True)])
def test_products(m: int, n: int, k: int, dtype: torch.dtype, group_size: int, zeros: bool) -> None:
    torch.manual_seed(m + n + k)
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    groups = 1 if group_size == -1 else -(-k // group_size)
    scales = (torch.rand(groups, n) * 0.02 + 0.001).to(dtype)
    zero = (
        torch.randint(0, 16, (groups, n), dtype=torch.uint8) if zeros else torch.full((groups, n), 8).byte()
    )
    group = torch.arange(k) // (k if group_size == -1 else group_size)
    values = (q.double() - zero.t().double()[:, group]) * scales.t().double()[:, group]
    x, bias = torch.randn(m, k).to(dtype), torch.randn(n).to(dtype)
    packed, packed_scales = ops.marlin_repack(q, 4), ops.marlin_pack_scales(scales)
    workspace = torch.zeros(ops.marlin_workspace_size(m, n, k, True))

    def product(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return ops.marlin_gemm(
            x,
            packed,
            packed_scales,
            bits=4,
            group_size=group_size,
            out_features=n,
            zeros=ops.marlin_pack_scales(zero) if zeros else None,
            bias=bias,
            out=out,
            workspace=workspace,
        )

    got = product(x)
    want = x.double() @ values.t() + bias.double()
    # No further from float64 than a product in torch with the dequantized weights.
    torch_error = (torch.addmm(bias, x, values.to(dtype).t()).double() - want).norm()
    assert (got.double() - want).norm() <= 1.05 * torch_error
    eps = torch.finfo(dtype).eps
    bound = (
        want.abs() * eps / 2 * 1.01 + (x.double().abs() @ values.abs().t()) * (eps / 2 + 2.0**-20) + 2.0**-24
    )
    assert bool((got.double() - want).abs().le(bound).all())
    assert torch.equal(product(x), got)
    strided = with_row_stride(torch.zeros(m, n, dtype=dtype), 3)
    assert torch.equal(product(with_row_stride(x, 8), strided), got)
    assert not workspace[:1024].any()  # the counters
