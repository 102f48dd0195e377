"""marlin_repack and marlin_gemm against float64, over the shapes at which the kernels change their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernel_checks import (
    DEVICE,
    assert_margins_untouched,
    guarded,
    on_gpu,
    random_quantized,
    with_row_stride,
    without_sm90,
)
from pelton import ops
from pelton import ops_reference as reference

if not hasattr(torch.ops.pelton, "marlin_gemm"):
    pytest.skip("for a library with the feature marlin", allow_module_level=True)

BITS = (4, 8)
HALVES = (torch.float16, torch.bfloat16)
EMULATED = DEVICE == "cpu"
WGMMA = not without_sm90()
WGMMA_TOKENS = 33


@dataclass
class Case:
    """A random quantized weight, its packed parts and its values in float64."""

    bits: int
    group_size: int
    out_features: int
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    values: Tensor  # [out_features, in_features], of the inputs of x

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        return ops.marlin_gemm(
            x,
            self.packed,
            self.scales,
            bits=self.bits,
            group_size=self.group_size,
            out_features=self.out_features,
            zeros=self.zeros,
            perm=self.perm,
            bias=bias,
            out=out,
            workspace=workspace,
        )


def make(
    out_features: int,
    in_features: int,
    bits: int = 4,
    group_size: int = 128,
    zeros: bool = False,
    permuted: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Case:
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    q, scales, zero = random_quantized(out_features, in_features, bits, groups, zeros, dtype)
    # Inputs are sorted by group in the packed weight: input k of it is input perm[k] of x.
    perm = torch.randperm(in_features).int() if permuted else None
    group = torch.arange(in_features) // (in_features if group_size == -1 else group_size)
    if perm is not None:
        group = group[perm.long().argsort()]
    values = (q.double() - zero.t().double()[:, group]) * scales.t().double()[:, group]
    return Case(
        bits,
        group_size,
        out_features,
        ops.marlin_repack(q, bits, perm),
        ops.marlin_pack_scales(scales),
        ops.marlin_pack_scales(zero) if zeros else None,
        perm,
        values,
    )


def assert_product(got: Tensor, x: Tensor, case: Case, bias: Tensor | None = None) -> None:
    """Float32 sums of exact products, rounded once: half a unit in the last place, and the sums' own error.

    Where wgmma computes, scaled weights are rounded to the dtype, as dequantized ones are.
    """
    want = x.double() @ case.values.t()
    size = x.double().abs() @ case.values.abs().t()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    bound = want.abs() * torch.finfo(got.dtype).eps / 2 * 1.01 + size * 2.0**-20 + 2.0**-24
    if WGMMA and case.bits == 4 and x.shape[0] >= WGMMA_TOKENS:
        bound += size * torch.finfo(got.dtype).eps / 2 * 1.01
    assert got.shape == want.shape
    assert bool((got.double() - want).abs().le(bound).all()), float(
        ((got.double() - want).abs() / bound).max()
    )


def random_input(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("permuted", [False, True], ids=["plain", "permuted"])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (1, 1), (40, 100), (130, 192), (576, 65)])
def test_repack(n: int, k: int, bits: int, permuted: bool) -> None:
    q = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    perm = torch.randperm(k).int() if permuted else None
    packed = ops.marlin_repack(q, bits, perm)
    assert packed.shape == (-(-n // 64), -(-k // 64), 128 * bits)
    assert torch.equal(packed, reference.marlin_repack(q, bits, perm))
    kept = q & ((1 << bits) - 1)
    assert torch.equal(
        reference.marlin_unpack(packed, bits, n, k), kept if perm is None else kept[:, perm.long()]
    )


@pytest.mark.parametrize("bits", BITS)
def test_repack_by_the_definition_of_the_layout(bits: int) -> None:
    """kernels/quant/marlin/layout.h, read word by word."""
    q = torch.randint(0, 1 << bits, (128, 128), dtype=torch.uint8)
    words = ops.marlin_repack(q, bits).cpu().view(2, 2, 4, bits // 4, 32, 4)
    for row_tile, input_tile, slab, lane, step in ((0, 0, 0, 0, 0), (1, 0, 3, 31, 3), (0, 1, 2, 13, 1)):
        for i in range(4):
            for half in range(2):
                row = 64 * row_tile + 16 * slab + lane // 4 + 8 * (i % 2)
                k = 64 * input_tile + 16 * step + 2 * (lane % 4) + 8 * (i // 2) + half
                if bits == 4:
                    word = int(words[row_tile, input_tile, slab, 0, lane, step])
                    field = word >> (4 * (i + 4 * half)) & 15
                else:
                    word = int(words[row_tile, input_tile, slab, step // 2, lane, step % 2 * 2 + i // 2])
                    field = word >> (8 * (2 * (i % 2) + half)) & 255
                assert field == int(q[row, k])


def test_repack_leaves_out_inputs_that_are_not_there() -> None:
    q = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    perm = torch.arange(64).int()
    perm[3], perm[60] = -1, 64
    unpacked = reference.marlin_unpack(ops.marlin_repack(q, 4, perm), 4, 64, 64)
    q[:, 3] = q[:, 60] = 0
    assert torch.equal(unpacked, q)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, -1])
def test_groups(group_size: int, zeros: bool, bits: int, dtype: torch.dtype) -> None:
    case = make(72, 328, bits, group_size, zeros, dtype=dtype)
    for m in (3, 20):
        x = random_input(m, 328, dtype=dtype)
        assert_product(case(x), x, case)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 130, 300])
def test_tokens(m: int, bits: int, dtype: torch.dtype) -> None:
    n, k = (136, 192) if EMULATED else (576, 1600)
    if EMULATED and m > 130:
        n, k = 64, 64
    case = make(n, k, bits, 64, True, dtype=dtype)
    x, bias = random_input(m, k, dtype=dtype), random_input(n, dtype=dtype)
    assert_product(case(x), x, case)
    assert_product(case(x, bias), x, case, bias)


@pytest.mark.parametrize("m", [1, 20, 70])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(1, 1, -1), (1, 64, 32), (64, 8, -1), (65, 63, 32), (40, 100, 32), (576, 72, 64), (127, 200, 128)],
)
def test_odd_shapes(n: int, k: int, group_size: int, m: int) -> None:
    case = make(n, k, 4, group_size, True)
    x = random_input(m, k)
    assert_product(case(x), x, case)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [1, 11])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (40, 2048),  # few outputs: inputs are split between blocks
        (600, 136),  # more slabs of outputs a block than are summed at once
    ],
)
def test_few_tokens(n: int, k: int, m: int, dtype: torch.dtype, bits: int) -> None:
    case = make(n, k, bits, 128, True, dtype=dtype)
    x, bias = random_input(m, k, dtype=dtype), random_input(n, dtype=dtype)
    assert_product(case(x, bias), x, case, bias)


SHAPES = [(4096, 4096, 128), (576, 1536, 64), (14336, 512, 128), (256, 14336, -1), (320, 11008, 32)]


@on_gpu
@pytest.mark.parametrize("m", [1, 7, 16, 30, 64, 100, 256, 513])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
@pytest.mark.parametrize("bits", BITS)
def test_large(n: int, k: int, group_size: int, m: int, bits: int) -> None:
    case = make(n, k, bits, group_size, zeros=m % 2 == 0)
    x = random_input(m, k)
    assert_product(case(x), x, case)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("m", [2, 18])
def test_permuted(m: int, bits: int) -> None:
    case = make(72, 136, bits, 32, True, permuted=True)
    x = random_input(m, 136)
    assert_product(case(x), x, case)


@pytest.mark.parametrize("k", [128, 136])
@pytest.mark.parametrize("padding", [3, 8])
def test_strides(padding: int, k: int) -> None:
    case = make(72, k, 4, 64)
    x = with_row_stride(random_input(5, k), padding)
    wide = torch.full((5, 200), 7.0, dtype=torch.float16)
    for first in (8, 9):  # columns of a wider buffer, pairs aligned or not
        out = wide[:, first : first + 72]
        case(x, out=out)
        assert_product(out, x, case)
        assert bool((wide[:, :first] == 7).all()) and bool((wide[:, first + 72 :] == 7).all())
        wide.fill_(7)


def test_unaligned_input() -> None:
    case = make(72, 128, 4, 64)
    x = random_input(3 * 128 + 1)[1:].view(3, 128)
    assert_product(case(x), x, case)


def test_leading_dimensions() -> None:
    case = make(72, 128, 4, 64)
    x = random_input(2, 3, 128)
    got = case(x)
    assert got.shape == (2, 3, 72)
    assert_product(got, x, case)


def test_no_tokens() -> None:
    case = make(72, 128, 4, 64)
    assert case(random_input(0, 128)).shape == (0, 72)


def test_writes_nothing_else() -> None:
    case = make(72, 128, 4, 64)
    for m in (3, 20):
        x = random_input(m, 128)
        out, buffer = guarded(torch.zeros(m, 72, dtype=torch.float16))
        case(x, out=out)
        assert_product(out, x, case)
        assert_margins_untouched(buffer)


def test_one_workspace_for_all_calls() -> None:
    """Its counters are zero again after each call, whatever the sums left behind them."""
    shapes = [(136, 192, 3), (64, 512, 17), (200, 64, 70), (136, 192, 3)]
    size = max(ops.marlin_workspace_size(m, n, k) for n, k, m in shapes)
    workspace = torch.zeros(size)
    for n, k, m in shapes:
        case, x = make(n, k, 4, 64), random_input(m, k)
        assert_product(case(x, workspace=workspace), x, case)
        assert bool((workspace[:1024].view(torch.int32) == 0).all())


def test_same_result_every_time() -> None:
    n, k = (136, 256) if EMULATED else (640, 4096)
    case = make(n, k, 4, 64)
    for m in (1, 16, 64):
        x = random_input(m, k)
        first = case(x)
        for _ in range(1 if EMULATED else 20):
            assert torch.equal(case(x), first)


def test_not_finite() -> None:
    """NaN and infinity stay in their rows."""
    case = make(72, 128, 4, 64)
    x = random_input(5, 128)
    x[1, 5], x[3, 77] = float("nan"), float("inf")
    got = case(x)
    assert bool(got[1].isnan().all())
    assert not bool(got[3].isfinite().any())
    rest = [0, 2, 4]
    assert_product(got[rest], x[rest], case)


def test_reference() -> None:
    case = make(72, 136, 4, 32, True, permuted=True)
    x = random_input(3, 136).double()
    got = reference.marlin_gemm(
        x,
        case.packed,
        case.scales,
        bits=4,
        group_size=32,
        out_features=72,
        zeros=case.zeros,
        perm=case.perm,
    )
    torch.testing.assert_close(got, x @ case.values.t())


def test_opcheck() -> None:
    case = make(72, 128, 4, 64, True)
    q = torch.randint(0, 16, (72, 128), dtype=torch.uint8)
    torch.library.opcheck(torch.ops.pelton.marlin_repack, (torch.empty_like(case.packed), q, None, 4))
    x = random_input(3, 128)
    workspace = torch.zeros(ops.marlin_workspace_size(3, 72, 128))
    out = torch.empty(3, 72, dtype=x.dtype)
    torch.library.opcheck(
        torch.ops.pelton.marlin_gemm,
        (out, x, case.packed, case.scales, case.zeros, None, None, workspace, 4, 64),
        # The workspace's rest is scratch, which need not be the same after two calls.
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def changed(**values: object) -> Callable[[], object]:
    """A call with valid arguments but these."""
    case = make(72, 128, 4, 64, True)
    arguments: dict[str, object] = {
        "out": torch.empty(3, 72, dtype=torch.float16),
        "x": random_input(3, 128),
        "weight": case.packed,
        "scales": case.scales,
        "zeros": case.zeros,
        "perm": None,
        "bias": None,
        "workspace": torch.zeros(ops.marlin_workspace_size(3, 72, 128)),
        "bits": 4,
        "group_size": 64,
    }
    assert set(values) <= set(arguments)
    return lambda: torch.ops.pelton.marlin_gemm(*{**arguments, **values}.values())


REFUSED = [
    ({"bits": 3}, "bits must be 4 or 8, found 3"),
    ({"x": torch.zeros(3, 128)}, "x must be float16 or bfloat16, found Float"),
    ({"x": torch.zeros(3, 128, dtype=torch.bfloat16)}, "dtypes must be equal, found BFloat16 and Half"),
    ({"x": torch.zeros(4, 128, dtype=torch.float16)}, r"out must have the leading dimensions of x"),
    ({"x": torch.zeros(3, 0, dtype=torch.float16)}, r"x must have inputs, found \[3, 0\]"),
    ({"group_size": 48}, "group_size must be a multiple of 32, or -1 for one group, found 48"),
    ({"group_size": 0}, "group_size must be a multiple of 32"),
    ({"weight": torch.zeros(2, 3, 512, dtype=torch.int32)}, "weight must"),
    ({"weight": torch.zeros(2, 2, 512, dtype=torch.float32)}, "weight must"),
    ({"scales": torch.zeros(2, 1, 64, dtype=torch.float16)}, "scales must"),
    ({"scales": torch.zeros(2, 2, 64)}, "scales must"),
    ({"zeros": torch.zeros(2, 2, 64, dtype=torch.int32)}, "zeros must"),
    ({"perm": torch.zeros(127, dtype=torch.int32)}, "perm must"),
    ({"perm": torch.zeros(128, dtype=torch.int64)}, "perm must"),
    ({"bias": torch.zeros(71, dtype=torch.float16)}, "bias must"),
    ({"bias": torch.zeros(72)}, "bias must"),
    ({"workspace": torch.zeros(10)}, r"workspace must have at least \d+ elements .* found 10"),
    ({"workspace": torch.zeros(10, dtype=torch.float16)}, "workspace must"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^marlin_gemm: {message}"):
        changed(**values)()


@pytest.mark.parametrize(
    ("out", "q", "bits", "message"),
    [
        ((1, 1, 512), torch.zeros(64, 64, dtype=torch.uint8), 5, "bits must be 4 or 8, found 5"),
        ((1, 1, 512), torch.zeros(64, 64, dtype=torch.int32), 4, "q must"),
        ((1, 1, 512), torch.zeros(64, dtype=torch.uint8), 4, "q must"),
        ((1, 2, 512), torch.zeros(64, 64, dtype=torch.uint8), 4, "out must"),
        ((1, 1, 512), torch.zeros(64, 64, dtype=torch.uint8), 8, "out must"),
    ],
)
def test_repack_refused(out: tuple[int, ...], q: Tensor, bits: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^marlin_repack: {message}"):
        torch.ops.pelton.marlin_repack(torch.empty(out, dtype=torch.int32), q, None, bits)


@on_gpu
def test_graph() -> None:
    """A captured product follows its input."""
    case = make(576, 1600, 4, 64, permuted=True)
    x = random_input(5, 1600)
    workspace = torch.zeros(ops.marlin_workspace_size(5, 576, 1600))
    out = case(x, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case(x, out=out, workspace=workspace)
    for _ in range(3):
        x.copy_(random_input(5, 1600))
        graph.replay()
        assert_product(out, x, case)
