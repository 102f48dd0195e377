"""silu_and_mul and gelu_and_mul against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_checks import DTYPES, assert_rounded, field_cases, with_row_stride
from pelton import ops

NAN, INF = float("nan"), float("inf")


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu_erf(x: Tensor) -> Tensor:
    # Through erfc: 1 + erf loses every digit of the negative tail, in float64 too.
    return 0.5 * x * torch.special.erfc(-x * 0.5**0.5)


def gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


def gelu_tanh_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    return ops.gelu_and_mul(x, "tanh", out=out)


ACTIVATIONS = [
    pytest.param(ops.silu_and_mul, silu, id="silu"),
    pytest.param(ops.gelu_and_mul, gelu_erf, id="gelu_erf"),
    pytest.param(gelu_tanh_and_mul, gelu_tanh, id="gelu_tanh"),
]
Op = Callable[..., Tensor]
Function = Callable[[Tensor], Tensor]
activations = pytest.mark.parametrize(("op", "function"), ACTIVATIONS)


def reference(x: Tensor, function: Function) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return function(gate) * up


@activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 14), (2, 3, 34), (1, 3072), (0, 8), (3, 0), (40, 1030)])
def test_every_shape(op: Op, function: Function, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(dtype)
    assert_rounded(op(x), reference(x, function), rtol=2e-6)


@activations
def test_rows_are_split_anywhere(op: Op, function: Function) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2 * 5003)  # threads begin and end in the middle of rows
    assert_rounded(op(x), reference(x, function), rtol=2e-6)


@activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(op: Op, function: Function, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 46).to(dtype)
    out = with_row_stride(torch.zeros(5, 23, dtype=dtype))
    assert op(with_row_stride(x), out=out) is out
    assert_rounded(out, reference(x, function), rtol=2e-6)
    assert out.as_strided((5, 5), (28, 1), 23).isnan().all(), "the gap between rows was written"


@activations
def test_relative_precision_everywhere(op: Op, function: Function) -> None:
    """A few units in the last place, the negative tail included where it is a normal number."""
    x = torch.cat(
        [torch.linspace(-30, 30, 200_001), torch.logspace(-30, 4, 2001), -torch.logspace(-30, 4, 2001)]
    )
    want = function(x.double())
    got = op(torch.cat([x, torch.ones_like(x)]))
    # A result below 2e-36 may become 0, because the exponential has no denormals.
    exponent_rounding = 60 if op is gelu_tanh_and_mul else 1  # u is rounded, and e^-2u magnifies that
    rtol = 5e-7 * exponent_rounding
    assert ((got.double() - want).abs() <= rtol * want.abs() + 2e-36).all()


@activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_values(op: Op, function: Function, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-1e4, -200, -89, 1e4, 200, 89, largest, -largest, 0.0, -0.0], dtype=dtype)
    got = op(torch.cat([gate, torch.ones_like(gate)]))
    want = torch.where(gate > 0, gate, torch.zeros_like(gate))
    assert_rounded(got, want.double(), atol=1e-35)


@activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_as_torch_has_them(op: Op, function: Function, dtype: torch.dtype) -> None:
    gate = torch.tensor([INF, -INF, NAN, 1.0, 1.0, -1e4], dtype=dtype)
    up = torch.tensor([1.0, 1.0, 1.0, INF, NAN, INF], dtype=dtype)
    got = op(torch.cat([gate, up]))
    assert got[0] == INF
    assert got[1].isnan()  # -inf * 0
    assert got[2].isnan()
    assert got[3] == INF
    assert got[4].isnan()
    assert got[5].isnan()  # 0 * inf


@activations
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [0, 16, 32, 40])
def test_a_bad_value_touches_no_other(op: Op, function: Function, bad: float, column: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 66)
    clean = op(x)
    x[1, column] = bad
    got = op(x)
    untouched = torch.ones_like(got, dtype=torch.bool)
    untouched[1, column % 33] = False
    assert torch.equal(got[untouched], clean[untouched])


@pytest.mark.parametrize(
    ("name", "op"),
    [("silu", ops.silu_and_mul), ("gelu_erf", ops.gelu_and_mul), ("gelu_tanh", gelu_tanh_and_mul)],
)
def test_cases_from_the_field(name: str, op: Op) -> None:
    cases = field_cases()
    assert_rounded(op(cases["silu.x"]), cases[f"{name}.out"].double(), rtol=1e-6, atol=1e-7)


X = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (
            X,
            torch.zeros(4, 16),
            r"^silu_and_mul: out must have the shape of x with half of its last dimension",
        ),
        (
            torch.zeros(4, 15),
            torch.zeros(4, 7),
            r"^silu_and_mul: out must have the shape .*\[4, 7\] and x \[4, 15\]$",
        ),
        (X, torch.zeros(2, 2, 8), "^silu_and_mul: out must have the shape of x"),
        (X, torch.zeros(4, 8).half(), "^silu_and_mul: dtypes must be equal"),
        (
            X.long(),
            torch.zeros(4, 8).long(),
            "^silu_and_mul: dtype must be float32, float16 or bfloat16, found Long",
        ),
        (torch.zeros(16, 4).t(), torch.zeros(4, 8), "^silu_and_mul: x's last dimension must be contiguous"),
        (X, torch.zeros(8, 4).t(), "^silu_and_mul: out's last dimension must be contiguous"),
    ],
)
def test_errors(x: Tensor, out: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.silu_and_mul(x, out=out)


def test_an_odd_last_dimension_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"^silu_and_mul: out must have the shape of x with half"):
        ops.silu_and_mul(torch.zeros(4, 15))


@pytest.mark.parametrize("approximate", ["erf", "", "Tanh"])
def test_unknown_approximation(approximate: str) -> None:
    with pytest.raises(
        RuntimeError, match=f'^gelu_and_mul: approximate must be "none" or "tanh", found "{approximate}"$'
    ):
        ops.gelu_and_mul(X, approximate)
