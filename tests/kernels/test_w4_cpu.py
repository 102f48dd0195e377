"""quant_linear and pack_quant_weight against float64, over the shapes at which the kernel changes its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernel_checks import DTYPES, random_quantized, with_row_stride
from pelton import ops

if ops.backend() != "cpu" or not hasattr(torch.ops.pelton, "quant_linear"):
    pytest.skip("for a library of CPU kernels with the feature awq or gptq", allow_module_level=True)

P = ops.quant_panel_width()
BITS = (4, 8)
# Rows around the tile heights of both instruction sets and both ways, and past one block of rows.
ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 15, 29, 95, 96, 97, 200)


@pytest.fixture(params=[False, True], ids=["without-vnni", "with-vnni"])
def vnni(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both dot products, where this CPU has both."""
    torch.ops.pelton.quant_allow_vnni(True)
    if request.param and not torch.ops.pelton.quant_uses_vnni():
        pytest.skip("this CPU has no VNNI for the library's instruction set")
    torch.ops.pelton.quant_allow_vnni(request.param)
    yield
    torch.ops.pelton.quant_allow_vnni(True)


@pytest.fixture(params=[False, True], ids=["without-amx", "with-amx"])
def amx(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways for many rows of bfloat16, where this CPU has both."""
    torch.ops.pelton.cpu_allow_amx(True)
    if request.param and not torch.ops.pelton.cpu_uses_amx():
        pytest.skip("this CPU or this library has no AMX")
    torch.ops.pelton.cpu_allow_amx(request.param)
    yield
    torch.ops.pelton.cpu_allow_amx(True)


@dataclass
class Case:
    """A random quantized weight, its packed parts and its values in float64."""

    bits: int
    group_size: int
    out_features: int
    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    values: Tensor  # [out_features, in_features]
    largest: Tensor  # [out_features]: the largest q could be, times the largest scale

    def __call__(
        self, x: Tensor, int8: bool, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return ops.quant_linear(
            x,
            self.packed,
            self.scales,
            bits=self.bits,
            group_size=self.group_size,
            out_features=self.out_features,
            zeros=self.zeros,
            order=self.order,
            bias=bias,
            int8=int8,
            out=out,
        )


def make(
    out_features: int,
    in_features: int,
    bits: int = 4,
    group_size: int = 128,
    zeros: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    order: Tensor | None = None,
) -> Case:
    inputs = in_features if order is None else len(order)
    groups = 1 if group_size == -1 else -(-inputs // group_size)
    groups = groups if inputs else 0
    q, scales, zero = random_quantized(out_features, in_features, bits, groups, zeros, scale_dtype)
    group = torch.arange(inputs) // (max(1, inputs) if group_size == -1 else group_size)
    if order is not None:
        there = order >= 0
        group = group[there][order[there].argsort()]
    values = (q.double() - zero.t().double()[:, group]) * scales.t().double()[:, group]
    return Case(
        bits,
        group_size,
        out_features,
        ops.pack_quant_weight(q, bits, order),
        ops.pack_quant_groups(scales),
        ops.pack_quant_groups(zero) if zeros else None,
        order,
        values,
        scales.double().amax(0) * (1 << bits) if groups else torch.zeros(out_features, dtype=torch.float64),
    )


def rounded(x: Tensor, order: Tensor | None) -> Tensor:
    """x in float64 as the int8 way sees it: 8 bits and a scale for 32 inputs, in the weight's order."""
    wide = x.float()
    if order is None:
        order = torch.arange(x.shape[-1])
    order = torch.nn.functional.pad(order, (0, -len(order) % 32), value=-1)
    columns = torch.where(order < 0, 0.0, wide[..., order.clamp(min=0).long()])
    parts = columns.unflatten(-1, (len(order) // 32, 32))
    most = parts.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # `127 / most` would round twice
    values = (parts * torch.where(most > 0, inverse, 0.0)).round()
    back = (values.double() * (most * (1 / 127)).double()).flatten(-2)
    result = torch.zeros(x.shape, dtype=torch.float64)
    result[..., order[order >= 0].long()] = back[..., order >= 0]
    return result


def assert_product(case: Case, got: Tensor, x: Tensor, int8: bool, bias: Tensor | None = None) -> None:
    """Sums in float32 are off by some units of the sum of magnitudes of what is summed; then one rounding.

    In fp32 the zero point is subtracted from sums (few rows), so magnitudes are those of q times the scale.
    """
    seen = rounded(x, case.order) if int8 else x.double()
    want = seen @ case.values.t()
    magnitude = seen.abs().sum(-1, keepdim=True) * case.largest
    allowed = magnitude * (8 + x.shape[-1] ** 0.5) * 2.0**-24
    if bias is not None:
        want, allowed = want + bias.double(), allowed + bias.double().abs() * 2.0**-23
    if got.dtype is not torch.float32:
        allowed = allowed + want.abs() * torch.finfo(got.dtype).eps / 2 + 1e-7
    assert got.shape == want.shape
    excess = ((got.double() - want).abs() - allowed).max() if got.numel() else torch.tensor(0.0)
    assert excess <= 0, f"off by {excess:.3g} more than allowed"


def check(case: Case, x: Tensor, int8: bool, bias: Tensor | None = None) -> None:
    assert_product(case, case(x, int8, bias), x, int8, bias)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 1), (P, 3), (P - 1, 32), (P + 1, 33), (3 * P + 5, 70), (0, 4), (4, 0)])
def test_packed_layout(shape: tuple[int, int], bits: int) -> None:
    q = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
    packed = ops.pack_quant_weight(q, bits)
    assert torch.equal(packed, ops.reference.pack_quant_weight(q, bits))
    assert torch.equal(packed, ops.pack_quant_weight(q.t().contiguous().t(), bits))  # any strides
    order = torch.full((-(-shape[1] // 32) * 32 + 32,), -1, dtype=torch.int32)
    order[: shape[1]] = torch.randperm(shape[1], dtype=torch.int32)
    assert torch.equal(ops.pack_quant_weight(q, bits, order), ops.reference.pack_quant_weight(q, bits, order))


@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows(rows: int, int8: bool, bits: int) -> None:
    case = make(2 * P + 7, 576, bits, zeros=rows % 2 == 0)
    check(case, torch.randn(rows, 576), int8)


# Around blocks, groups and pieces; short last groups.
@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize(
    "in_features", [1, 2, 7, 31, 32, 33, 64, 255, 257, 383, 385, 511, 513, 576, 1100, 4097]
)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_every_depth(in_features: int, rows: int) -> None:
    for index, group_size in enumerate((32, 64, 128, -1, 160)):
        case = make(P + 3, in_features, group_size=group_size, zeros=index % 2 == 0)
        for int8 in (False, True):
            check(case, torch.randn(rows, in_features), int8)


@pytest.mark.parametrize("out_features", [1, P - 1, P, P + 1, 2 * P, 7 * P + 5])
@pytest.mark.parametrize("rows", [1, 9, 100])
@pytest.mark.parametrize("int8", [False, True])
def test_every_width(out_features: int, rows: int, int8: bool) -> None:
    case = make(out_features, 96, group_size=32)
    check(case, torch.randn(rows, 96), int8, torch.randn(out_features))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 37])
def test_every_dtype(dtype: torch.dtype, scale_dtype: torch.dtype, rows: int) -> None:
    for bits in BITS:
        case = make(P + 9, 600, bits, zeros=True, scale_dtype=scale_dtype)
        for bias_dtype in (dtype, torch.float32):
            check(case, torch.randn(rows, 600).to(dtype), rows == 3, torch.randn(P + 9).to(bias_dtype))


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("in_features", [1, 33, 96, 512, 576, 1100])
@pytest.mark.parametrize("rows", [8, 17, 50, 300])
def test_bfloat16(rows: int, in_features: int, zeros: bool, bits: int) -> None:
    for group_size in (32, 96, 128, -1):
        case = make(2 * P + 3, in_features, bits, group_size, zeros, torch.bfloat16)
        x, bias = torch.randn(rows, in_features).bfloat16(), torch.randn(2 * P + 3).bfloat16()
        check(case, x, False, bias)
        # In int8, too, unless AMX does it; then it is exact.
        got = case(x, True, bias)
        assert_product(case, got, x, not torch.ops.pelton.cpu_uses_amx(), bias)


@pytest.mark.usefixtures("amx")
def test_bfloat16_in_another_order() -> None:
    order = torch.full((224,), -1, dtype=torch.int32)
    order[torch.randperm(224)[:150].sort().values] = torch.randperm(150, dtype=torch.int32)
    case, x = make(P + 1, 150, group_size=32, zeros=True, order=order), torch.randn(40, 150).bfloat16()
    out = with_row_stride(torch.zeros(40, P + 1).bfloat16())
    assert_product(case, case(with_row_stride(x), False, out=out), x, False)
    assert out.as_strided((40, 5), (P + 6, 1), P + 1).isnan().all(), "the gap between rows was written"


@pytest.mark.usefixtures("vnni")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 8])
def test_largest_values_do_not_overflow(bits: int, rows: int) -> None:
    """All products of a block at their largest: sums of the ways in 16 bits must hold them."""
    most = (1 << bits) - 1
    q = torch.full((P, 64), most, dtype=torch.uint8)
    scales, zeros = torch.ones(2, P), torch.zeros(2, P, dtype=torch.uint8)
    for sign in (1.0, -1.0):
        got = ops.quant_linear(
            torch.full((rows, 64), sign * 127.0),
            ops.pack_quant_weight(q, bits),
            ops.pack_quant_groups(scales),
            zeros=ops.pack_quant_groups(zeros),
            bits=bits,
            group_size=32,
            out_features=P,
            int8=True,
        )
        torch.testing.assert_close(got, torch.full((rows, P), sign * 127.0 * most * 64))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 20, 200])
def test_strided_rows(rows: int, int8: bool) -> None:
    case, x = make(P + 2, 70, group_size=32), torch.randn(rows, 70)
    out = with_row_stride(torch.zeros(rows, P + 2))
    assert case(with_row_stride(x), int8, out=out) is out
    assert_product(case, out, x, int8)
    gap = out.as_strided((rows, 5), (P + 7, 1), P + 2)
    assert gap.isnan().all(), "the gap between rows was written"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (0, 40), (2, 0, 40)])
def test_every_shape(shape: tuple[int, ...], int8: bool) -> None:
    check(make(P + 1, 40), torch.randn(shape), int8, torch.randn(P + 1))


@pytest.mark.parametrize("int8", [False, True])
def test_without_features(int8: bool) -> None:
    bias = torch.randn(5)
    assert torch.equal(make(5, 0)(torch.empty(3, 0), int8, bias), bias.expand(3, 5))
    assert make(0, 4)(torch.randn(3, 4), int8).shape == (3, 0)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 30])
def test_inputs_in_another_order(rows: int, int8: bool) -> None:
    """With gaps, as groups that are not whole blocks have them."""
    order = torch.full((224,), -1, dtype=torch.int32)
    places = torch.randperm(224)[:150].sort().values
    order[places] = torch.randperm(150, dtype=torch.int32)
    check(make(P + 1, 150, group_size=32, zeros=True, order=order), torch.randn(rows, 150), int8)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 50])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_input_spoils_its_row_alone(rows: int, bad: float, int8: bool) -> None:
    case, x = make(P + 3, 300), torch.randn(rows, 300)
    want = case(x, int8)
    x[rows - 1, 299] = bad
    got = case(x, int8)
    torch.testing.assert_close(got[: rows - 1], want[: rows - 1], rtol=1e-4, atol=1e-4)
    assert not got[rows - 1].isfinite().any()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-38, 1e30])
def test_magnitudes(scale: float, int8: bool) -> None:
    case, x = make(P, 64), torch.randn(3, 64)
    torch.testing.assert_close(case(x * scale, int8), case(x, int8) * scale, rtol=1e-3, atol=1e-37)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "out_features"), [(1, 50 * P), (40, 9 * P + 1), (400, 3)])
def test_every_number_of_threads(threads: int, rows: int, out_features: int) -> None:
    case, x = make(out_features, 200), torch.randn(rows, 200)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for int8 in (False, True):
            check(case, x, int8)
    finally:
        torch.set_num_threads(before)


def test_calls_do_not_take_each_others_inputs() -> None:
    """Threads keep converted rows for the tasks of one call."""
    case = make(40 * P, 256)
    for seed in range(5):
        torch.manual_seed(seed)
        check(case, torch.randn(2, 256), int8=True)
        check(case, torch.randn(2, 256), int8=False)


@pytest.mark.parametrize("int8", [False, True])
def test_replay_sees_changed_inputs(int8: bool) -> None:
    case, x, out = make(P, 48), torch.randn(2, 48), torch.empty(2, P)
    torch.ops.pelton.cpu_graph_begin()
    case(x, int8, out=out)
    graph = torch.ops.pelton.cpu_graph_end()
    x.copy_(torch.randn(2, 48))
    torch.ops.pelton.cpu_graph_replay(graph)
    torch.ops.pelton.cpu_graph_free(graph)
    assert_product(case, out, x, int8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_reference(bits: int, int8: bool, zeros: bool) -> None:
    case, x = make(P + 1, 100, bits, group_size=64, zeros=zeros), torch.randn(4, 100)
    want = ops.reference.quant_linear(
        x,
        case.packed,
        case.scales,
        bits=bits,
        group_size=64,
        out_features=P + 1,
        zeros=case.zeros,
        int8=int8,
    )
    torch.testing.assert_close(case(x, int8), want, rtol=1e-4, atol=2e-3 if bits == 4 else 3e-2)


@pytest.mark.parametrize("bias", [None, torch.randn(P + 1)])
def test_opcheck(bias: Tensor | None) -> None:
    case = make(P + 1, 64, zeros=True)
    arguments = (torch.empty(3, P + 1), torch.randn(3, 64), case.packed, case.scales, case.zeros, None, bias)
    result = torch.library.opcheck(torch.ops.pelton.quant_linear.default, (*arguments, 4, 128, True))
    assert set(result.values()) == {"SUCCESS"}
    arguments = (torch.empty_like(case.packed), torch.randint(0, 16, (P + 1, 64), dtype=torch.uint8), None, 4)
    result = torch.library.opcheck(torch.ops.pelton.pack_quant_weight.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


X = torch.randn(2, 64)
CASE = make(P + 1, 64, group_size=32, zeros=True)
Q = torch.zeros(P, 64, dtype=torch.uint8)


def call(x: Tensor = X, **changes: object) -> Tensor:
    arguments = {
        "packed_weight": CASE.packed,
        "scales": CASE.scales,
        "zeros": CASE.zeros,
        "bits": 4,
        "group_size": 32,
        "out_features": P + 1,
    }
    return ops.quant_linear(x, **{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: call(X[:, :32]),
            r"quant_linear: packed_weight must have shape \[2, 1, .*\], found \[2, 2, ",
        ),
        (
            lambda: call(out_features=P),
            r"quant_linear: packed_weight must have shape \[1, 2, .* found \[2, 2, ",
        ),
        (
            lambda: call(packed_weight=CASE.packed.char()),
            "quant_linear: packed_weight must be Byte, found Char",
        ),
        (lambda: call(packed_weight=CASE.packed[:, ::2]), "quant_linear: packed_weight must have shape"),
        (lambda: call(bits=8), "quant_linear: packed_weight must have shape"),
        (lambda: call(bits=3), "quant_linear: bits must be 4 or 8, found 3"),
        (lambda: call(group_size=48), "quant_linear: group_size must be -1 or a multiple of 32, found 48"),
        (lambda: call(group_size=0), "quant_linear: group_size must be -1 or a multiple of 32, found 0"),
        (lambda: call(group_size=64), rf"quant_linear: scales .* \[2, 1, {P}\], found \[2, 2, {P}\]"),
        (lambda: call(scales=CASE.scales.double()), "quant_linear: dtype must be float32"),
        (lambda: call(zeros=CASE.zeros[:1]), r"quant_linear: zeros must have shape \[2, 2, "),
        (lambda: call(zeros=CASE.zeros.int()), "quant_linear: zeros must be Byte, found Int"),
        (lambda: call(order=torch.zeros(64)), "quant_linear: order must be Int, found Float"),
        (lambda: call(order=torch.zeros(60).int()), "order must have a multiple of 32 entries, found 60"),
        (lambda: call(bias=torch.zeros(P)), rf"quant_linear: bias .* {P + 1} features .* found \[{P}\]"),
        (lambda: call(out=torch.zeros(3, P + 1)), "quant_linear: out must have the leading dimensions of x"),
        (lambda: call(out=torch.zeros(2, P + 1).half()), "quant_linear: dtypes must be equal"),
        (lambda: call(X.t()), "quant_linear: x's last dimension must be contiguous"),
        (lambda: call(X.double()), "quant_linear: dtype must be float32"),
        (lambda: ops.pack_quant_weight(Q.int(), 4), r"pack_quant_weight: q must be uint8 .* found Int \["),
        (lambda: ops.pack_quant_weight(Q, 5), "pack_quant_weight: bits must be 4 or 8, found 5"),
        (
            lambda: torch.ops.pelton.pack_quant_weight(torch.empty(1, 2, 3, dtype=torch.uint8), Q, None, 4),
            "pack_quant_weight: packed must have shape",
        ),
    ],
)
def test_errors(wrong: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        wrong()
