"""Prefill on Hopper (TMA and wgmma) against float64: its tiles, its work order, its copies of paged keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernel_checks import DEVICE, on_gpu, without_sm90
from pelton import ops

NAN = float("nan")
UNUSED_BLOCK = -7  # what block tables hold where nothing may look


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(without_sm90()), reason=without_sm90() or "-")]


@dataclass(frozen=True)
class Case:
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    soft_cap: float = 0.0
    query_scale: float = 1.0


class Batch:
    """A case's tensors. Blocks lie in random order; every slot without a token and all of ``out`` hold NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator(DEVICE).manual_seed(sum(case.seq_lens) + case.head_size)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(case.dtype)

        shape = (case.kv_heads, case.head_size)
        self.query = random(sum(case.query_lens), case.heads, case.head_size) * case.query_scale
        self.keys = [random(length, *shape) for length in case.seq_lens]
        self.values = [random(length, *shape) for length in case.seq_lens]
        self.out = torch.full_like(self.query, NAN)
        self.starts = torch.tensor((0, *case.query_lens), device=DEVICE).cumsum(0).int()
        self.lengths = torch.tensor(case.seq_lens, device=DEVICE).int()
        blocks = [-(-length // case.block_size) for length in case.seq_lens]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(0), device="cpu") + 1
        self.tables = torch.full(
            (len(blocks), max(1, *blocks)), UNUSED_BLOCK, dtype=torch.int32, device=DEVICE
        )
        cache_shape = (sum(blocks) + 3, case.kv_heads, case.block_size, case.head_size)
        self.key_cache = torch.full(cache_shape, NAN, dtype=case.dtype, device=DEVICE)
        self.value_cache = self.key_cache.clone()
        for sequence, ids in enumerate(order[: sum(blocks)].to(DEVICE).split(blocks)):
            self.tables[sequence, : len(ids)] = ids
            for cache, tensors in ((self.key_cache, self.keys), (self.value_cache, self.values)):
                slots = torch.full((len(ids) * case.block_size, *shape), NAN, dtype=case.dtype, device=DEVICE)
                slots[: case.seq_lens[sequence]] = tensors[sequence]
                cache[ids] = slots.view(len(ids), case.block_size, *shape).transpose(1, 2)

    def run(self) -> Tensor:
        return ops.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.starts,
            self.lengths,
            self.tables,
            self.case.head_size**-0.5,
            self.case.window,
            self.case.soft_cap,
            out=self.out,
        )

    def expected(self, magnitudes: bool = False) -> Tensor:
        """float64, by the definition; of the values' magnitudes if asked."""
        case, outs, row = self.case, [], 0
        for keys, values, queries in zip(self.keys, self.values, case.query_lens, strict=True):
            group = case.heads // case.kv_heads
            k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
            query = self.query[row : row + queries].double()
            row += queries
            scores = torch.einsum("qhd,khd->hqk", query, k) * case.head_size**-0.5
            if case.soft_cap:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            position = torch.arange(len(k) - queries, len(k), device=DEVICE).unsqueeze(1)
            key = torch.arange(len(k), device=DEVICE)
            hidden = key > position
            if case.window:
                hidden |= key <= position - case.window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v.abs() if magnitudes else v))
        return torch.cat(outs)

    def check(self, rows: slice = slice(None)) -> None:
        """Scores and sums are float32; weights are rounded to half precision, and so is the result."""
        got, want = self.run()[rows].double(), self.expected()[rows]
        unit = torch.finfo(self.case.dtype).eps / 2
        allowed = 2e-5 + 1.05 * unit * (want.abs() + self.expected(magnitudes=True)[rows])
        wrong = ~((got - want).abs() <= allowed)
        assert not wrong.any(), (
            f"{self.case}: {wrong.sum()} of {wrong.numel()} elements are off, by up to "
            f"{(got - want).abs().max()}; the first at {wrong.nonzero()[0].tolist()}"
        )


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ((17,), (17,)),
        ((32,), (32,)),
        ((128,), (128,)),
        ((129,), (129,)),
        ((1000,), (1000,)),
        ((37,), (500,)),  # a chunk of a longer prompt
        ((300, 20, 64, 129), (300, 50, 1000, 131)),
        ((20, 0, 200), (20, 9, 2000)),
        ((48,), (9000,)),
    ],
)
def test_lengths(
    head_size: int, block_size: int, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> None:
    Batch(Case(query_lens, seq_lens, head_size=head_size, block_size=block_size)).check()


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 385])
def test_edges_of_tiles(head_size: int, length: int) -> None:
    queries = tuple(sorted({1, min(20, length), length // 2 + 1, length}))
    Batch(Case(queries, (length,) * len(queries), head_size=head_size)).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [96, 192, 256])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (100, 0.0), (0, 30.0)])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_wide_heads(
    dtype: torch.dtype, head_size: int, window: int, soft_cap: float, block_size: int
) -> None:
    case = Case((300, 20, 129), (300, 700, 131), head_size=head_size, block_size=block_size, dtype=dtype)
    Batch(Case(**{**case.__dict__, "window": window, "soft_cap": soft_cap})).check()


@pytest.mark.parametrize("heads", [8, 64])
def test_small_and_large_tiles_of_head_size_64(heads: int) -> None:
    Batch(Case((1000, 700), (1000, 2000), heads=heads, kv_heads=8, head_size=64)).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(1, 1), (4, 4), (32, 8), (8, 1), (7, 1), (14, 2), (15, 3), (64, 1), (96, 1), (20, 4), (6, 2)],
)
def test_groups(dtype: torch.dtype, head_size: int, heads: int, kv_heads: int) -> None:
    case = Case((150, 20), (333, 700), heads=heads, kv_heads=kv_heads, head_size=head_size, dtype=dtype)
    Batch(case).check()


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 1, 2, 16, 63, 127, 128, 129, 400, 5000])
def test_window_and_soft_cap(head_size: int, soft_cap: float, window: int) -> None:
    scale = 3.0 if soft_cap else 1.0
    case = Case((150, 20, 500), (333, 700, 500), head_size=head_size, query_scale=scale)
    Batch(Case(**{**case.__dict__, "window": window, "soft_cap": soft_cap})).check()


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_flat_and_peaked_weights(head_size: int, scale: float) -> None:
    Batch(Case((400,), (1500,), head_size=head_size, query_scale=scale)).check()


def test_growing_scores() -> None:
    """Each key scores far above all before it, which the running maximum must follow."""
    batch = Batch(Case((300,), (2000,), heads=4, kv_heads=4))
    ramp = torch.linspace(-60, 60, 2000, device=DEVICE).to(torch.bfloat16)
    for direction in (1, -1):
        batch.query.zero_()[..., 0] = 40.0 * direction
        keys = torch.zeros_like(batch.keys[0])
        keys[..., 0] = ramp.unsqueeze(1)
        batch.keys[0].copy_(keys)
        slots = keys.view(-1, 16, 4, 128).transpose(1, 2)
        batch.key_cache[batch.tables[0, :125].long()] = slots
        batch.check()


@pytest.mark.parametrize("count", [33, 70, 300])
def test_many_sequences(count: int) -> None:
    """More than a warp holds, of very different lengths."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 600, (count,), generator=generator, device="cpu").tolist()
    queries = [
        max(1, int(n * f)) for n, f in zip(lengths, torch.rand(count, device="cpu").tolist(), strict=True)
    ]
    Batch(Case(tuple(queries), tuple(lengths), heads=4, kv_heads=1)).check()


@pytest.mark.parametrize("head_size", [64, 128])
def test_queries_in_a_qkv_buffer_and_out_with_gaps(head_size: int) -> None:
    batch = Batch(Case((200, 30), (200, 300), heads=6, kv_heads=2, head_size=head_size))
    buffer = torch.full((230, 10, head_size), NAN, dtype=torch.bfloat16)
    view = buffer[:, 2:8]
    view.copy_(batch.query)
    batch.query = view
    gaps = torch.full((230, 8, head_size + 8), 7.0, dtype=torch.bfloat16)
    batch.out = gaps[:, 1:7, :head_size]
    batch.check()
    assert (gaps[:, [0, 7]] == 7).all()
    assert (gaps[:, :, head_size:] == 7).all()


def test_strides_that_copies_cannot_take() -> None:
    """Heads that do not begin at 16 bytes: another kernel does the work."""
    batch = Batch(Case((200,), (200,), head_size=64))
    wide = torch.full((200, 8, 67), NAN, dtype=torch.bfloat16)
    wide[..., :64].copy_(batch.query)
    batch.query = wide[..., :64]
    batch.check()


def test_only_rows_of_sequences_are_written() -> None:
    batch = Batch(Case((100, 50), (100, 80)))
    batch.query = torch.cat([batch.query, torch.full((200, 8, 128), NAN, dtype=torch.bfloat16)])
    batch.out = torch.full_like(batch.query, 3.0)
    batch.lengths[1] = 0
    batch.check(slice(0, 100))
    assert (batch.out[100:] == 3).all()


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("window", [0, 30])
def test_what_a_query_does_not_see_has_no_part_in_it(bad: float, head_size: int, window: int) -> None:
    """Keys and values after it or before its window, in the same tile."""
    batch = Batch(Case((300, 40), (400, 90), head_size=head_size, window=window))
    clean = Batch(batch.case)
    for sequence, position in ((0, 399), (0, 150), (1, 10)):
        block = batch.tables[sequence, position // 16]
        batch.key_cache[block, 0, position % 16] = bad
        batch.value_cache[block, 1, position % 16, 3] = bad
    got, want = batch.run(), clean.run()
    positions = torch.cat([torch.arange(100, 400), torch.arange(50, 90)])
    sequence = torch.tensor([0] * 300 + [1] * 40)
    sees = torch.zeros(340, dtype=torch.bool)
    for s, p in ((0, 399), (0, 150), (1, 10)):
        sees |= (sequence == s) & (positions >= p) & ((positions < p + window) if window else True)
    torch.testing.assert_close(got[~sees], want[~sees], rtol=2e-2, atol=2e-2)
    assert not got[sees][:, 4:, 3].isfinite().any()


@pytest.mark.parametrize("block", [-1, 2**31 - 1, -(2**31)])
def test_blocks_out_of_range_are_not_read(block: int) -> None:
    batch = Batch(Case((200, 100), (200, 300)))
    batch.tables[0, 3] = block
    batch.check(slice(200, 300))
    assert batch.out[:200].isfinite().all()


def test_values_that_make_no_sense_are_left_out() -> None:
    batch = Batch(Case((100, 100, 100), (100, 100, 100)))
    batch.lengths[0] = 10**6  # beyond the block table
    batch.lengths[1] = 50  # fewer positions than queries
    batch.check(slice(200, 300))
    assert batch.out[:200].isnan().all()


def test_results_are_the_same_each_time() -> None:
    batch = Batch(Case((700, 100, 33), (2500, 300, 33), heads=32, kv_heads=8))
    first = batch.run().clone()
    for _ in range(20):
        assert torch.equal(batch.run(), first)


@on_gpu
def test_a_graph_reads_changed_lengths() -> None:
    first, second = Batch(Case((400, 30), (600, 30))), Batch(Case((50, 380), (200, 430)))
    blocks = max(len(first.key_cache), len(second.key_cache))
    held = Batch(first.case)
    held.key_cache = torch.full((blocks, *first.key_cache.shape[1:]), NAN, dtype=torch.bfloat16)
    held.value_cache = held.key_cache.clone()
    held.tables = torch.full((2, 40), UNUSED_BLOCK, dtype=torch.int32)

    def fill(batch: Batch) -> None:
        held.key_cache[: len(batch.key_cache)] = batch.key_cache
        held.value_cache[: len(batch.value_cache)] = batch.value_cache
        held.tables[:, : batch.tables.shape[1]] = batch.tables
        held.query.copy_(batch.query)
        held.starts.copy_(batch.starts)
        held.lengths.copy_(batch.lengths)

    fill(first)
    held.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run()
    for batch in (first, second, first):
        fill(batch)
        held.out.fill_(NAN)
        graph.replay()
        torch.testing.assert_close(held.out, batch.run(), rtol=0, atol=0)
