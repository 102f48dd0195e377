"""embedding: rows of a table, and nothing outside of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import DTYPES, assert_margins_untouched, cpu_kernels, gpu_kernels, guarded, with_row_stride
from pelton import ops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "hidden_size"), [(0, 5, 8), (1, 1, 1), (7, 5, 33), (600, 90, 576), (3, 5, 0)]
)
def test_shapes(num_tokens: int, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(vocab_size, hidden_size).to(dtype)
    ids = torch.randint(0, vocab_size, (num_tokens,))
    assert torch.equal(ops.embedding(ids, weight), weight[ids])


def test_first_and_last_row_and_repeats() -> None:
    weight = torch.randn(4, 6)
    ids = torch.tensor([3, 0, 3, 3, 0])
    assert torch.equal(ops.embedding(ids, weight), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 9).to(dtype)
    out = with_row_stride(torch.zeros(4, 9, dtype=dtype))
    ids = torch.tensor([4, 1, 1, 0])
    assert ops.embedding(ids, with_row_stride(weight), out=out) is out
    assert torch.equal(out, weight[ids])
    assert out.as_strided((4, 5), (14, 1), 9).isnan().all(), "the gap between rows was written"


def test_bits_are_kept() -> None:
    weight = torch.tensor([[float("nan"), float("inf")], [-0.0, 1e-45]])
    got = ops.embedding(torch.tensor([1, 0]), weight)
    assert torch.equal(got.view(torch.int32), weight[[1, 0]].view(torch.int32))


OUT_OF_RANGE = [-1, 5, 128, 2**31, 2**40, -(2**63), 2**63 - 1]


@cpu_kernels
@pytest.mark.parametrize("bad", OUT_OF_RANGE)
def test_an_id_out_of_range_writes_nothing(bad: int) -> None:
    out = torch.full((3, 2), 7.0)
    with pytest.raises(RuntimeError, match=rf"^embedding: ids\[2\] is {bad}, outside of \[0, 5\)$"):
        ops.embedding(torch.tensor([0, 1, bad]), torch.zeros(5, 2), out=out)
    assert (out == 7).all()
    assert torch.equal(ops.embedding(torch.tensor([1]), torch.ones(5, 2)), torch.ones(1, 2))


@gpu_kernels
@pytest.mark.parametrize("hidden_size", [2, 16, 33])
@pytest.mark.parametrize("bad", OUT_OF_RANGE)
def test_an_id_out_of_range_gives_zeros(bad: int, hidden_size: int) -> None:
    weight, _ = guarded(torch.randn(5, hidden_size))
    out, buffer = guarded(torch.full((3, hidden_size), 7.0))
    ops.embedding(torch.tensor([4, bad, 1]), weight, out=out)
    assert torch.equal(out[[0, 2]], weight[[4, 1]])
    assert (out[1] == 0).all()
    assert_margins_untouched(buffer)


def test_an_empty_table() -> None:
    assert ops.embedding(torch.empty(0, dtype=torch.int64), torch.zeros(0, 2)).shape == (0, 2)


@gpu_kernels
def test_ids_without_a_table_give_zeros() -> None:
    assert (ops.embedding(torch.tensor([0]), torch.zeros(0, 2), out=torch.ones(1, 2)) == 0).all()


@cpu_kernels
def test_ids_without_a_table() -> None:
    with pytest.raises(RuntimeError, match=r"^embedding: ids\[0\] is 0, outside of \[0, 0\)$"):
        ops.embedding(torch.tensor([0]), torch.zeros(0, 2))


IDS, W = torch.tensor([0, 1]), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("ids", "weight", "out", "message"),
    [
        (IDS.int(), W, W[:2], "ids must be Long, found Int"),
        (IDS.view(1, 2), W, W[:2], r"ids must have shape \[any\], found \[1, 2\]"),
        (torch.zeros(4, dtype=torch.int64)[::2], W, W[:2], "ids must be contiguous"),
        (IDS, W[0], W[:2], r"weight must be \[vocab_size, hidden_size\], found \[4\]"),
        (IDS, W.int(), W[:2].int(), "dtype must be float32, float16 or bfloat16, found Int"),
        (IDS, W, W[:2].half(), "dtypes must be equal, found Float and Half"),
        (IDS, W, torch.zeros(3, 4), r"out must have shape \[2, 4\], found \[3, 4\]"),
        (IDS, W, torch.zeros(8), r"out must have shape \[2, 4\], found \[8\]"),
        (IDS, torch.zeros(4, 5).t(), W[:2], "weight's last dimension must be contiguous"),
    ],
)
def test_errors(ids: Tensor, weight: Tensor, out: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=r"^embedding: " + message):
        ops.embedding(ids, weight, out=out)
