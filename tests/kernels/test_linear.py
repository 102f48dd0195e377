"""linear and pack_linear_weight against float64, over the shapes at which the kernel changes its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernel_checks import DTYPES, with_row_stride
from pelton import ops

if ops.backend() != "cpu":
    pytest.skip(
        "for a library of CPU kernels: elsewhere torch's own product is used", allow_module_level=True
    )

P = ops.linear_panel_width()
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[False, True], ids=["without-amx", "with-amx"])
def amx(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to multiply bfloat16 with bfloat16, where this CPU has both."""
    torch.ops.pelton.cpu_allow_amx(True)
    if request.param and not torch.ops.pelton.cpu_uses_amx():
        pytest.skip("this CPU or this library has no AMX")
    torch.ops.pelton.cpu_allow_amx(request.param)
    yield
    torch.ops.pelton.cpu_allow_amx(True)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = x.double() @ weight.double().t()
    return result if bias is None else result + bias.double()


def assert_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The float32 sum of K products is off by at most K units of the sum of their magnitudes; then one rounding."""
    want = reference(x, weight, bias)
    magnitude = reference(x.abs(), weight.abs(), None if bias is None else bias.abs())
    allowed = magnitude * (4 + x.shape[-1] ** 0.5) * 2.0**-24
    if got.dtype is not torch.float32:
        allowed += want.abs() * torch.finfo(got.dtype).eps / 2 + 1e-7
    assert got.shape == want.shape
    excess = ((got.double() - want).abs() - allowed).max() if got.numel() else torch.tensor(0.0)
    assert excess <= 0, f"off by {excess:.3g} more than allowed"


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Tensor) -> Tensor:
    return ops.linear(x, ops.pack_linear_weight(weight), bias, out_features=weight.shape[0], **kwargs)


@pytest.mark.parametrize("shape", [(1, 1), (P, 3), (P - 1, 8), (P + 1, 8), (3 * P + 5, 33), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_layout(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = ops.pack_linear_weight(weight)
    assert packed.dtype is dtype
    assert torch.equal(packed, ops.reference.pack_linear_weight(weight))


def test_packs_strided_rows() -> None:
    weight = torch.randn(2 * P + 3, 21)
    assert torch.equal(ops.pack_linear_weight(with_row_stride(weight)), ops.pack_linear_weight(weight))


# Rows around the tile heights of both instruction sets, and past one block of rows.
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 14, 15, 28, 29, 95, 96, 97, 168, 169, 350])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 131).to(dtype), torch.randn(2 * P + 7, 131).to(dtype)
    assert_product(run(x, weight), x, weight)


# Around the depth of a piece, several pieces, and sums that wait while more of x is read.
@pytest.mark.parametrize(
    "in_features", [1, 2, 3, 4, 5, 7, 31, 255, 256, 257, 383, 385, 576, 4095, 4097, 9000]
)
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_every_depth(in_features: int, rows: int) -> None:
    torch.manual_seed(in_features)
    x, weight = torch.randn(rows, in_features), torch.randn(P + 3, in_features)
    assert_product(run(x, weight), x, weight)


@pytest.mark.parametrize("out_features", [1, P - 1, P, P + 1, 2 * P, 7 * P + 5, 40 * P])
@pytest.mark.parametrize("rows", [1, 9, 100])
def test_every_width(out_features: int, rows: int) -> None:
    torch.manual_seed(out_features)
    x, weight, bias = torch.randn(rows, 65), torch.randn(out_features, 65), torch.randn(out_features)
    assert_product(run(x, weight, bias), x, weight, bias)


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("in_features", [1, 2, 31, 32, 33, 511, 512, 513, 1100])
@pytest.mark.parametrize("rows", [8, 17, 32, 300])
def test_every_depth_in_bfloat16(in_features: int, rows: int) -> None:
    torch.manual_seed(in_features)
    x, weight = torch.randn(rows, in_features).bfloat16(), torch.randn(2 * P + 3, in_features).bfloat16()
    bias = torch.randn(2 * P + 3).bfloat16()
    out = with_row_stride(torch.zeros(rows, 2 * P + 3).bfloat16())
    assert_product(run(with_row_stride(x), weight, bias, out=out), x, weight, bias)
    assert out.as_strided((rows, 5), (2 * P + 8, 1), 2 * P + 3).isnan().all(), "the gap was written"


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("bad", [NAN, INF])
def test_bad_values_in_bfloat16_reach_what_they_should(bad: float) -> None:
    x, weight = torch.randn(20, 100).bfloat16(), torch.randn(P + 3, 100).bfloat16()
    x[19, 99] = weight[P, 0] = bad
    got = run(x, weight)
    assert not got[19].isfinite().any()
    assert not got[:, P].isfinite().any()
    assert got[:19, :P].isfinite().all()
    assert got[:19, P + 1 :].isfinite().all()


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 37])
def test_every_pair_of_dtypes(x_dtype: torch.dtype, weight_dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 600).to(x_dtype), torch.randn(P + 9, 600).to(weight_dtype)
    for bias_dtype in {x_dtype, weight_dtype, torch.float32}:
        bias = torch.randn(P + 9).to(bias_dtype)
        got = run(x, weight, bias)
        assert got.dtype is x_dtype
        assert_product(got, x, weight, bias)


def test_sums_do_not_overflow_in_half_precision() -> None:
    x, weight = torch.full((2, 300), 200.0).half(), torch.full((P, 300), 200.0).half()
    weight[:, ::2] = -200.0  # 12,000,000 in between, 0 at the end
    assert torch.equal(run(x, weight), torch.zeros(2, P).half())


@pytest.mark.parametrize("rows", [1, 2, 20, 200])
def test_strided_rows(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 70), torch.randn(P + 2, 70)
    out = with_row_stride(torch.zeros(rows, P + 2))
    assert run(with_row_stride(x), weight, out=out) is out
    assert_product(out, x, weight)
    gap = out.as_strided((rows, 5), (P + 7, 1), P + 2)
    assert gap.isnan().all(), "the gap between rows was written"


@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (0, 40), (2, 0, 40)])
def test_every_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(P + 1, 40), torch.randn(P + 1)
    assert_product(run(x, weight, bias), x, weight, bias)


def test_without_features() -> None:
    bias = torch.randn(5)
    assert torch.equal(run(torch.empty(3, 0), torch.empty(5, 0), bias), bias.expand(3, 5))
    assert run(torch.randn(3, 4), torch.empty(0, 4)).shape == (3, 0)


@pytest.mark.parametrize("rows", [1, 4, 50])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_values_reach_what_they_should(rows: int, bad: float) -> None:
    """As in a plain product: a bad x spoils its row, a bad weight its column, and nothing else."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 300), torch.randn(P + 3, 300)
    want = reference(x, weight)
    x[rows - 1, 299] = bad
    got = run(x, weight)
    torch.testing.assert_close(got[: rows - 1].double(), want[: rows - 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[rows - 1].double(), reference(x, weight)[rows - 1], equal_nan=True)
    assert not got[rows - 1].isfinite().any()
    x[rows - 1, 299] = 1.0
    want = reference(x, weight)
    weight[P, 0] = bad
    got = run(x, weight)
    others = [c for c in range(P + 3) if c != P]
    torch.testing.assert_close(got[:, others].double(), want[:, others], rtol=1e-4, atol=1e-4)
    assert not got[:, P].isfinite().any()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "out_features"), [(1, 50 * P), (40, 9 * P + 1), (400, 3)])
def test_every_number_of_threads(threads: int, rows: int, out_features: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 200), torch.randn(out_features, 200)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_product(run(x, weight), x, weight)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_row_does_not_depend_on_its_company(rows: int) -> None:
    """Nor on the number of threads; rounding may differ between ways, values may not."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 576), torch.randn(4 * P, 576)
    together, alone = run(x, weight)[:rows], run(x[:rows], weight)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)


def test_replay_sees_changed_inputs() -> None:
    x, weight, out = torch.randn(2, 48), torch.randn(P, 48), torch.empty(2, P)
    packed = ops.pack_linear_weight(weight)
    torch.ops.pelton.cpu_graph_begin()
    ops.linear(x, packed, out_features=P, out=out)
    graph = torch.ops.pelton.cpu_graph_end()
    x.copy_(torch.randn(2, 48))
    torch.ops.pelton.cpu_graph_replay(graph)
    torch.ops.pelton.cpu_graph_free(graph)
    assert_product(out, x, weight)


@pytest.mark.parametrize("bias", [None, torch.randn(P + 1)])
def test_opcheck(bias: Tensor | None) -> None:
    packed = ops.pack_linear_weight(torch.randn(P + 1, 12))
    arguments = (torch.empty(3, P + 1), torch.randn(3, 12), packed, bias)
    assert set(torch.library.opcheck(torch.ops.pelton.linear.default, arguments).values()) == {"SUCCESS"}
    arguments = (torch.empty(2, 12, P), torch.randn(P + 1, 12))
    result = torch.library.opcheck(torch.ops.pelton.pack_linear_weight.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


X, PACKED = torch.randn(2, 12), ops.pack_linear_weight(torch.randn(P + 1, 12))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(X[:, :11], PACKED, out_features=P + 1), r"linear: .* 11 .* 12$"),
        (lambda: ops.linear(X, PACKED, out_features=P), rf"linear: out has {P} features .* 2 panels"),
        (lambda: ops.linear(X, PACKED, out_features=2 * P + 1), "linear: out has"),
        (
            lambda: ops.linear(X, PACKED[0], out_features=P),
            "linear: packed_weight must be what pack_linear_weight",
        ),
        (lambda: ops.linear(X, PACKED[..., :8], out_features=P + 1), "linear: packed_weight must be what"),
        (
            lambda: ops.linear(X, PACKED, torch.zeros(P), out_features=P + 1),
            rf"linear: bias .* {P + 1} features",
        ),
        (
            lambda: ops.linear(X.t(), PACKED, out_features=P + 1),
            "linear: x's last dimension must be contiguous",
        ),
        (lambda: ops.linear(X.double(), PACKED, out_features=P + 1), "linear: dtype must be float32"),
        (lambda: ops.linear(X, PACKED.int(), out_features=P + 1), "linear: dtype must be float32"),
        (
            lambda: ops.linear(X, PACKED, out_features=P + 1, out=torch.empty(2, P + 1).half()),
            "linear: dtypes must be equal",
        ),
        (
            lambda: ops.linear(X, PACKED, out_features=P + 1, out=torch.empty(3, P + 1)),
            "linear: out must have the leading dimensions of x",
        ),
        (lambda: ops.pack_linear_weight(torch.randn(12, 4).t()), "pack_linear_weight: weight must be"),
        (lambda: ops.pack_linear_weight(torch.randn(4, 4).double()), "pack_linear_weight: dtype must be"),
    ],
)
def test_errors(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
