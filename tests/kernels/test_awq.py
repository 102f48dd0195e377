"""awq_gemm and awq_dequantize against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import assert_rounded, with_row_stride
from pelton import ops

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.pelton, "awq_gemm"), reason="for a library of GPU kernels with the feature awq"
)

HALVES = (torch.float16, torch.bfloat16)


def layer(
    rows: int, columns: int, group_size: int, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Random qweight, qzeros and scales."""
    groups = 1 if group_size == -1 else -(-rows // group_size)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()

    scales = (torch.rand(groups, columns) / 64 + 1 / 256).to(dtype)
    return words(rows, columns // 8), words(groups, columns // 8), scales


def check(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    group_size: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    got = ops.awq_gemm(x, *weights, group_size=group_size, bias=bias, out=out)
    weight = ops.reference.awq_dequantize(*weights, group_size=group_size, dtype=torch.float64)
    want = x.double() @ weight
    largest = (x.double().abs() @ weight.abs()).max().item() if want.numel() else 0.0
    want = want if bias is None else want + bias.double()
    assert_rounded(got, want, rtol=2e-6, atol=2e-6 * largest)
    return got


def test_the_order_of_a_word() -> None:
    qweight, zero = torch.tensor([[0x76543210]], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    got = ops.awq_dequantize(qweight, zero, torch.ones(1, 8).half(), group_size=-1)
    assert got.tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group_size"),
    [(1, 576, 72, 128), (9, 96, 136, 32), (19, 33, 8, -1), (2, 1030, 16, 64)],
)
def test_sizes(
    target: None, tokens: int, rows: int, columns: int, group_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    check(torch.randn(tokens, rows).to(dtype), layer(rows, columns, group_size, dtype), group_size)


def test_another_dtype_of_scales(target: None) -> None:
    torch.manual_seed(0)
    check(torch.randn(2, 3, 64).bfloat16(), layer(64, 40, 32), 32, bias=torch.randn(40).bfloat16())


def test_groups_of_any_size() -> None:
    torch.manual_seed(0)
    check(torch.randn(5, 72).half(), layer(72, 40, 24), 24, bias=torch.randn(40).half())


def test_rows_further_apart(target: None) -> None:
    torch.manual_seed(0)
    out = with_row_stride(torch.zeros(6, 40).half())
    check(with_row_stride(torch.randn(6, 160).half()), layer(160, 40, 32), 32, out=out)
    assert out.as_strided((5, 5), (45, 1), 40).isnan().all(), "the gap between rows was written"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_dequantize(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = layer(72, 264, 32, dtype)
    want = ops.reference.awq_dequantize(*weights, group_size=32, dtype=torch.float64)
    assert_rounded(ops.awq_dequantize(*weights, group_size=32, dtype=dtype), want)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    assert check(torch.zeros(shape).half(), layer(64, 8, 32), 32).shape == (*shape[:-1], 8)


X, OUT = torch.zeros(2, 64).half(), torch.zeros(2, 16).half()
QWEIGHT, QZEROS = torch.zeros(64, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
SCALES = torch.zeros(2, 16).half()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": -2}, "group_size must be positive, or -1 for one group, found -2"),
        ({"x": X.float(), "out": OUT.float()}, "x must be float16 or bfloat16, found Float"),
        ({"out": OUT.bfloat16()}, "dtypes must be equal, found Half and BFloat16"),
        ({"out": torch.zeros(3, 16).half()}, r"out must have the leading dimensions of x, found \[3, 16\]"),
        ({"out": torch.zeros(2, 12).half()}, "the outputs must be a multiple of 8, found 12"),
        ({"qweight": QWEIGHT[:60]}, r"qweight must have shape \[64, 2\], found \[60, 2\]"),
        ({"qweight": QWEIGHT.long()}, "qweight must be Int, found Long"),
        ({"scales": SCALES.float()}, "scales must be float16 or bfloat16, found Float"),
        ({"scales": SCALES[:1]}, r"scales must be contiguous, \[2, 16\], found \[1, 16\]"),
        ({"qzeros": QZEROS[:1]}, r"qzeros must have shape \[2, 2\], found \[1, 2\]"),
        ({"bias": torch.zeros(8).half()}, "bias must be contiguous with the 16 features of out"),
    ],
)
def test_errors(changes: dict[str, object], message: str) -> None:
    arguments = {"x": X, "qweight": QWEIGHT, "qzeros": QZEROS, "scales": SCALES, "group_size": 32, "out": OUT}
    with pytest.raises(RuntimeError, match=f"^awq_gemm: {message}"):
        ops.awq_gemm(**(arguments | changes))  # type: ignore[arg-type]


def test_contract() -> None:
    calls = {
        "awq_gemm": (OUT.clone(), X, QWEIGHT, QZEROS, SCALES, OUT[0].clone(), 32),
        "awq_dequantize": (torch.zeros(64, 16).half(), QWEIGHT, QZEROS, SCALES, 32),
    }
    for name, arguments in calls.items():
        result = torch.library.opcheck(getattr(torch.ops.pelton, name).default, arguments)
        assert set(result.values()) == {"SUCCESS"}
