"""rms_norm and fused_add_rms_norm against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import DTYPES, assert_rounded, field_cases, on_gpu, with_row_stride
from pelton import ops

EPS = 1e-6
NAN, INF = float("nan"), float("inf")


def reference(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return ops.reference.rms_norm(x.double(), weight.double(), eps)


@pytest.fixture(scope="module")
def cases() -> dict[str, Tensor]:
    return field_cases()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 15, 16, 17, 28, 64, 576, 4097])
def test_every_width(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    assert_rounded(ops.rms_norm(x, weight, EPS), reference(x, weight), rtol=2e-6)


@pytest.mark.parametrize(
    "shape", [(40,), (1, 40), (2, 3, 40), (2, 1, 3, 40), (200, 576), (0, 40), (2, 0, 40)]
)
def test_every_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    assert_rounded(ops.rms_norm(x, weight, EPS), reference(x, weight), rtol=2e-6)


@on_gpu
@pytest.mark.parametrize("width", [4104, 8192])
def test_more_rows_than_a_cache_holds(width: int) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(2**27 // (2 * width) + 1, width).bfloat16(), torch.randn(width).bfloat16()
    got = ops.rms_norm(x, weight, EPS)
    for rows in (slice(0, 99), slice(-99, None)):
        assert_rounded(got[rows], reference(x[rows], weight), rtol=2e-6)


def test_width_zero_does_nothing() -> None:
    assert ops.rms_norm(torch.empty(3, 0), torch.empty(0), EPS).shape == (3, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, 37).to(dtype), torch.randn(37).to(dtype)
    out = with_row_stride(torch.zeros_like(x))
    assert ops.rms_norm(with_row_stride(x), weight, EPS, out=out) is out
    assert_rounded(out, reference(x, weight), rtol=2e-6)
    gap = out.as_strided((12, 5), (42, 1), 37)
    assert gap.isnan().all(), "the gap between rows was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_heads_of_a_qkv_buffer(num_tokens: int, num_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv, weight = torch.randn(num_tokens, 6, 20).to(dtype), torch.randn(20).to(dtype)
    want = qkv.double()
    want[:, 1 : 1 + num_heads] = reference(qkv[:, 1 : 1 + num_heads], weight)
    before = qkv.clone()
    heads = qkv[:, 1 : 1 + num_heads]
    assert ops.rms_norm(heads, weight, EPS, out=heads) is heads
    assert_rounded(qkv, want, rtol=2e-6)
    assert torch.equal(qkv[:, 0], before[:, 0])
    assert torch.equal(qkv[:, 1 + num_heads :], before[:, 1 + num_heads :])


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, 16).transpose(0, 1),
        torch.randn(2, 3, 5, 16)[:, :, :4],
        torch.randn(4, 16).expand(3, 4, 16),
        torch.randn(4, 1, 16).expand(4, 3, 16),
        torch.randn(5, 1, 4, 1, 20)[::2, :, ::3, :, :16],
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)
def test_rows_of_two_strides(x: Tensor) -> None:
    weight = torch.randn(16)
    assert_rounded(ops.rms_norm(x, weight, EPS, out=torch.empty(x.shape)), reference(x, weight), rtol=2e-6)


def test_one_row_for_all() -> None:
    row, weight = torch.randn(33), torch.randn(33)
    x = row.expand(6, 33)
    out = torch.empty(6, 33)
    ops.rms_norm(x, weight, EPS, out=out)
    assert_rounded(out, reference(x, weight), rtol=2e-6)


def test_in_place() -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    want = reference(x, weight)
    ops.rms_norm(x, weight, EPS, out=x)
    assert_rounded(x, want, rtol=2e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("column", [0, 16, 32])
def test_a_bad_row_touches_no_other(bad: float, dtype: torch.dtype, column: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    clean = ops.rms_norm(x, weight, EPS)
    x[2, column] = bad
    got = ops.rms_norm(x, weight, EPS)
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])
    assert_rounded(got[2], reference(x[2], weight))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 60000.0),
        (torch.float16, 6e-8),
        (torch.bfloat16, 3e38),
        (torch.bfloat16, 1e25),
        (torch.float32, 3e38),
        (torch.float32, 1e-30),
    ],
)
def test_extreme_magnitudes(dtype: torch.dtype, value: float) -> None:
    x = torch.full((2, 100), value).to(dtype)
    x[:, ::2] *= -1
    weight = torch.linspace(0.5, 2, 100).to(dtype)
    got = ops.rms_norm(x, weight, EPS)
    assert got.isfinite().all()
    assert_rounded(got, reference(x, weight), rtol=2e-6)


@pytest.mark.parametrize(
    "name", ["fp16_large", "bf16_1e15", "bf16_width_4097", "fp32_width_1", "fp32_width_28"]
)
def test_cases_from_the_field(cases: dict[str, Tensor], name: str) -> None:
    got = ops.rms_norm(cases[f"{name}.x"], cases[f"{name}.weight"], EPS)
    assert got.isfinite().all()
    assert_rounded(got, cases[f"{name}.out"].double(), rtol=2e-6)


def test_a_row_of_zeros_gives_zeros(cases: dict[str, Tensor]) -> None:
    x, weight = cases["fp16_large.x"], cases["fp16_large.weight"]
    zeros = (x == 0).all(dim=1)
    assert zeros.any()
    assert (ops.rms_norm(x, weight, EPS)[zeros] == 0).all()


def test_fused_case_from_the_field(cases: dict[str, Tensor]) -> None:
    x, residual = cases["fp16_fused_add.x"].clone(), cases["fp16_fused_add.residual"].clone()
    ops.fused_add_rms_norm(x, residual, cases["fp16_fused_add.weight"], EPS)
    assert_rounded(residual, cases["fp16_fused_add.new_residual"].double())
    # The sum is rounded to fp16 before it is normalized: one more rounding in the output.
    assert_rounded(x, cases["fp16_fused_add.out"].double(), rtol=2**-11 + 2e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 28), (2, 3, 37), (1, 576), (0, 16), (150, 576)])
@pytest.mark.parametrize("strided", [False, True])
def test_fused_add(shape: tuple[int, ...], dtype: torch.dtype, strided: bool) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    total = x.double() + residual.double()
    if strided:
        x, residual = with_row_stride(x), with_row_stride(residual, padding=9)
    ops.fused_add_rms_norm(x, residual, weight, EPS)
    assert_rounded(residual, total)
    assert_rounded(x, reference(residual, weight), rtol=2e-6)


def test_fused_add_with_a_bad_row() -> None:
    x, residual, weight = torch.randn(4, 33), torch.randn(4, 33), torch.randn(33)
    clean_x, clean_residual = x.clone(), residual.clone()
    ops.fused_add_rms_norm(clean_x, clean_residual, weight, EPS)
    x[1, 32] = NAN
    ops.fused_add_rms_norm(x, residual, weight, EPS)
    assert x[1].isnan().all()
    others = [0, 2, 3]
    assert torch.equal(x[others], clean_x[others])
    assert torch.equal(residual[others], clean_residual[others])


X = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (torch.zeros(4, 8), X, X[0]),
            r"^rms_norm: out must have the shape of x, found \[4, 8\] and \[4, 16\]$",
        ),
        ((torch.zeros(2, 2, 16), X, X[0]), r"^rms_norm: out must have the shape of x"),
        ((X.half(), X, X[0]), "^rms_norm: dtypes must be equal, found Float and Half$"),
        ((X, X, X[0].half()), "^rms_norm: dtypes must be equal, found Float and Half$"),
        (
            (X.double(), X.double(), X[0].double()),
            "^rms_norm: dtype must be float32, float16 or bfloat16, found",
        ),
        ((X, X, torch.zeros(8)), "^rms_norm: weight must be contiguous with the 16 elements"),
        ((X, X, torch.zeros(32)[::2]), "^rms_norm: weight must be contiguous with the 16 elements"),
        (
            (X, torch.zeros(16, 4).t(), X[0]),
            "^rms_norm: x's last dimension must be contiguous, its stride is 4$",
        ),
        (
            (torch.zeros(2, 3, 4, 16), torch.zeros(4, 3, 2, 16).transpose(0, 2), X[0]),
            r"^rms_norm: x's leading dimensions must collapse into rows of at most two strides, "
            r"found shape \[2, 3, 4, 16\]; make it contiguous$",
        ),
        ((torch.tensor(1.0), torch.tensor(1.0), X[0]), "^rms_norm: x must have at least one dimension$"),
    ],
)
def test_errors(arguments: tuple[Tensor, Tensor, Tensor], message: str) -> None:
    out, x, weight = arguments
    with pytest.raises(RuntimeError, match=message):
        ops.rms_norm(x, weight, EPS, out=out)


def test_fused_errors() -> None:
    with pytest.raises(RuntimeError, match=r"^fused_add_rms_norm: residual must have the shape of x"):
        ops.fused_add_rms_norm(X, torch.zeros(4, 8), X[0], EPS)
    with pytest.raises(RuntimeError, match=r"^fused_add_rms_norm: dtypes must be equal"):
        ops.fused_add_rms_norm(X, X.bfloat16(), X[0], EPS)
    with pytest.raises(RuntimeError, match=r"^fused_add_rms_norm: weight must be contiguous"):
        ops.fused_add_rms_norm(X, X.clone(), torch.zeros(15), EPS)
