"""gptq_gemm, gptq_dequantize and gptq_shuffle against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernel_checks import assert_rounded, with_row_stride
from pelton import ops

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.pelton, "gptq_gemm"), reason="for a library of GPU kernels with the feature gptq"
)

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Weights:
    """A random layer."""

    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None
    bits: int
    group_size: int

    @classmethod
    def make(
        cls,
        rows: int,
        columns: int,
        group_size: int = 32,
        bits: int = 4,
        symmetric: bool = False,
        dtype: torch.dtype = torch.float16,
        groups: int | None = None,
    ) -> Weights:
        fields = 32 // bits
        if groups is None:
            groups = 1 if group_size == -1 else -(-rows // group_size)

        def words(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()

        scales = (torch.rand(groups, columns) / 64 + 1 / 256).to(dtype)
        zeros = None if symmetric else words(groups, columns // fields)
        return cls(words(rows // fields, columns), scales, zeros, bits, group_size)

    def check(
        self,
        x: Tensor,
        *,
        g_idx: Tensor | None = None,
        order: Tensor | None = None,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """gptq_gemm against float64; gives its result."""
        named = {"bits": self.bits, "group_size": self.group_size, "qzeros": self.qzeros}
        index = {"g_idx": g_idx, "order": order}
        got = ops.gptq_gemm(x, self.qweight, self.scales, **named, **index, bias=bias, out=out)  # type: ignore[arg-type]
        weight = torch.zeros(x.shape[-1], self.scales.shape[1], dtype=torch.float64)
        ops.reference.gptq_dequantize(self.qweight, self.scales, **named, **index, out=weight)  # type: ignore[arg-type]
        want = x.double() @ weight
        largest = (x.double().abs() @ weight.abs()).max().item() if want.numel() else 0.0
        want = want if bias is None else want + bias.double()
        assert_rounded(got, want, rtol=2e-6, atol=2e-6 * largest)
        return got


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "group_size"),
    [(1, 576, 72, 128), (9, 96, 32, 32), (35, 64, 136, -1), (3, 1032, 8, 64)],
)
def test_sizes(
    target: None, tokens: int, rows: int, columns: int, group_size: int, bits: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    weights = Weights.make(rows, columns, group_size, bits, dtype=dtype)
    weights.check(torch.randn(tokens, rows).to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_and_another_dtype_of_scales(target: None, bits: int) -> None:
    torch.manual_seed(bits)
    weights = Weights.make(128, 40, 64, bits, symmetric=True, dtype=torch.bfloat16)
    weights.check(torch.randn(2, 3, 128).half(), bias=torch.randn(40).half())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tokens", [1, 6])
def test_rows_further_apart(target: None, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = Weights.make(160, 40, dtype=dtype)
    out = with_row_stride(torch.zeros(tokens, 40, dtype=dtype))
    weights.check(with_row_stride(torch.randn(tokens, 160).to(dtype)), out=out)
    gap = out.as_strided((tokens, 5), (45, 1), 40)
    assert gap[:-1].isnan().all(), "the gap between rows was written"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [3, 6, 33])
def test_any_number_of_outputs(bits: int, columns: int) -> None:
    torch.manual_seed(columns)
    weights = Weights.make(64, columns, 16, bits, symmetric=True)
    weights.check(torch.randn(5, 64).half(), bias=torch.randn(columns).half())


@pytest.mark.parametrize("bits", [4, 8])
def test_any_mapping_to_groups(bits: int) -> None:
    torch.manual_seed(bits)
    weights = Weights.make(128, 24, 32, bits, groups=7)
    g_idx = torch.randint(0, 7, (128,), dtype=torch.int32)
    weights.check(torch.randn(6, 128).half(), g_idx=g_idx)


def test_a_group_that_does_not_exist_counts_as_zeros() -> None:
    torch.manual_seed(0)
    weights = Weights.make(64, 8)
    g_idx = torch.zeros(64, dtype=torch.int32)
    g_idx[::3], g_idx[1::3] = -1, 2
    weights.check(torch.randn(2, 64).half(), g_idx=g_idx)


@pytest.mark.parametrize("bits", [4, 8])
def test_order(target: None, bits: int) -> None:
    """Sorted by group and padded, as for groups of unequal sizes."""
    torch.manual_seed(bits)
    weights = Weights.make(128, 40, 32, bits)
    order = torch.full((128,), -1, dtype=torch.int32)
    order[: 3 * 32].copy_(torch.randperm(96))
    order[127] = 100  # there is no such input
    x = torch.randn(3, 96).bfloat16()
    weights.check(x, order=order)


@pytest.mark.parametrize("bits", [4, 8])
def test_shuffled_rows_give_the_same_product(bits: int) -> None:
    torch.manual_seed(bits)
    weights = Weights.make(128, 16, 32, bits)
    g_idx = torch.randperm(128).int() // 32
    x = torch.randn(4, 128).half()
    want = weights.check(x, g_idx=g_idx)
    order = torch.argsort(g_idx, stable=True).int()
    shuffled = ops.gptq_shuffle(weights.qweight, order, bits=bits)
    assert torch.equal(shuffled, ops.reference.gptq_shuffle(weights.qweight, order, bits=bits))
    weights.qweight = shuffled
    torch.testing.assert_close(weights.check(x, order=order), want, rtol=2e-3, atol=2e-3)


def test_shuffle_leaves_out_rows_that_do_not_exist() -> None:
    qweight = Weights.make(16, 5).qweight
    order = torch.tensor([3, -1, 16, 0, 15, 15, 2, 1], dtype=torch.int32)
    got = ops.gptq_shuffle(qweight, order, bits=4)
    assert torch.equal(got, ops.reference.gptq_shuffle(qweight, order, bits=4))
    assert (got >> 4 & 0xFF == 0).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(bits)
    weights = Weights.make(72, 264, 32, bits, dtype=dtype)
    named = {"bits": bits, "group_size": 32, "qzeros": weights.qzeros}
    order = torch.randperm(72).int()
    for index in ({}, {"order": order}, {"g_idx": order // 24}):
        got = ops.gptq_dequantize(weights.qweight, weights.scales, **named, **index, dtype=dtype)  # type: ignore[arg-type]
        want = ops.reference.gptq_dequantize(
            weights.qweight,
            weights.scales,
            **named,
            **index,
            dtype=torch.float64,  # type: ignore[arg-type]
        )
        assert_rounded(got, want)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    weights = Weights.make(64, 8)
    assert weights.check(torch.zeros(shape).half()).shape == (*shape[:-1], 8)


def test_no_inputs() -> None:
    empty = torch.zeros(0, 8, dtype=torch.int32)
    bias = torch.randn(8).half()
    got = ops.gptq_gemm(
        torch.zeros(2, 0).half(), empty, bias[:0].view(0, 8), bits=4, group_size=32, bias=bias
    )
    assert torch.equal(got, bias.expand(2, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_touches_no_other(target: None, bad: float) -> None:
    torch.manual_seed(0)
    weights, x = Weights.make(96, 32), torch.randn(12, 96).half()
    clean = weights.check(x)
    x[5, 40] = bad
    named = {"bits": 4, "group_size": 32}
    got = ops.gptq_gemm(x, weights.qweight, weights.scales, qzeros=weights.qzeros, **named)  # type: ignore[arg-type]
    others = [i for i in range(12) if i != 5]
    assert torch.equal(got[others], clean[others])
    assert not got[5].isfinite().any()


X, OUT = torch.zeros(2, 64).half(), torch.zeros(2, 16).half()
QWEIGHT, SCALES = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(2, 16).half()
QZEROS, INDEX = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits must be 4 or 8, found 3"),
        ({"group_size": 0}, "group_size must be positive, or -1 for one group, found 0"),
        ({"x": X.float(), "out": OUT.float()}, "x must be float16 or bfloat16, found Float"),
        ({"out": OUT.bfloat16()}, "dtypes must be equal, found Half and BFloat16"),
        ({"out": torch.zeros(3, 16).half()}, r"out must have the leading dimensions of x, found \[3, 16\]"),
        (
            {"qweight": QWEIGHT[:7]},
            r"qweight must have the 64 inputs of x in 8 rows of words, found \[7, 16\]",
        ),
        ({"qweight": QWEIGHT.long()}, "qweight must be Int, found Long"),
        ({"scales": SCALES.float()}, "scales must be float16 or bfloat16, found Float"),
        ({"scales": SCALES[:1]}, r"scales must be contiguous, \[2, 16\], found \[1, 16\]"),
        ({"qzeros": QZEROS[:1]}, r"qzeros must have shape \[2, 2\], found \[1, 2\]"),
        ({"g_idx": INDEX[:8]}, r"g_idx must have shape \[64\], found \[8\]"),
        ({"order": INDEX[:8]}, r"order must have shape \[64\], found \[8\]"),
        ({"bias": torch.zeros(8).half()}, "bias must be contiguous with the 16 features of out"),
    ],
)
def test_errors(changes: dict[str, object], message: str) -> None:
    arguments = {"x": X, "qweight": QWEIGHT, "scales": SCALES, "qzeros": QZEROS, "bits": 4, "group_size": 32}
    with pytest.raises(RuntimeError, match=f"^gptq_gemm: {message}"):
        ops.gptq_gemm(**(arguments | {"out": OUT} | changes))  # type: ignore[arg-type]


def test_errors_of_the_others() -> None:
    with pytest.raises(
        RuntimeError, match=r"^gptq_dequantize: out must be float16 or bfloat16, found Float$"
    ):
        ops.gptq_dequantize(QWEIGHT, SCALES, bits=4, group_size=32, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"^gptq_shuffle: order must have shape"):
        ops.gptq_shuffle(QWEIGHT, INDEX[:60], bits=4)


def test_contract() -> None:
    zeros = torch.zeros(2, 2, dtype=torch.int32)
    calls = {
        "gptq_gemm": (OUT.clone(), X, QWEIGHT, zeros, SCALES, None, INDEX, OUT[0].clone(), 4, 32),
        "gptq_dequantize": (torch.zeros(64, 16).half(), QWEIGHT, zeros, SCALES, INDEX, None, 4, 32),
        "gptq_shuffle": (torch.zeros_like(QWEIGHT), QWEIGHT, INDEX, 4),
    }
    for name, arguments in calls.items():
        result = torch.library.opcheck(getattr(torch.ops.pelton, name).default, arguments)
        assert set(result.values()) == {"SUCCESS"}
