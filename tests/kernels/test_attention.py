"""paged_attention against float64: batches of sequences in a scattered cache whose unused slots hold NaN."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kernel_checks import DEVICE, DTYPES, cpu_kernels, gpu_kernels, on_gpu
from pelton import ops

NAN = float("nan")
UNUSED_BLOCK = -7  # what block tables hold where nothing may look
ON_CPU = ops.backend() == "cpu"
WIDTHS = (torch.float32, torch.bfloat16)  # GPUs have kernels for half precision that are quite others


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Batch:
    """The tensors of one call; ``keys`` and ``values`` of each sequence are [length, num_kv_heads, head_size]."""

    query: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    query_lens: tuple[int, ...]
    block_size: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0

    @property
    def seq_lens(self) -> tuple[int, ...]:
        return tuple(len(k) for k in self.keys)

    def indices(self) -> tuple[Tensor, Tensor]:
        starts = torch.tensor((0, *self.query_lens)).cumsum(0)
        return starts.int(), torch.tensor(self.seq_lens, dtype=torch.int32)

    def cache(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Key cache, value cache and block tables; blocks in random order, NaN in every slot without a token."""
        per_sequence = [-(-length // self.block_size) for length in self.seq_lens]
        order = iter(
            (
                torch.randperm(
                    sum(per_sequence) + 2, generator=torch.Generator().manual_seed(seed), device="cpu"
                )
                + 1
            ).tolist()
        )
        heads, head_size = self.keys[0].shape[1:]
        shape = (sum(per_sequence) + 3, heads, self.block_size, head_size)
        caches = [torch.full(shape, NAN, dtype=self.keys[0].dtype) for _ in range(2)]
        tables = torch.full(
            (len(per_sequence), max(1, *per_sequence)), UNUSED_BLOCK, dtype=torch.int32, device="cpu"
        )
        for sequence, num_blocks in enumerate(per_sequence):
            for entry in range(num_blocks):
                block = tables[sequence, entry] = next(order)
                positions = slice(entry * self.block_size, (entry + 1) * self.block_size)
                for cache, tensors in zip(caches, (self.keys, self.values), strict=True):
                    part = tensors[sequence][positions]
                    cache[block, :, : len(part)] = part.transpose(0, 1)
        return caches[0], caches[1], tables.to(caches[0].device)

    def run(self, out: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
        key_cache, value_cache, tables = self.cache()
        query_start_loc, seq_lens = self.indices()
        return ops.paged_attention(
            self.query,
            key_cache,
            value_cache,
            query_start_loc,
            seq_lens,
            tables,
            self.scale,
            self.window,
            self.soft_cap,
            out=out,
            workspace=workspace,
        )

    @threads(1)  # many small products: more threads would only wait for each other
    def expected(self, of_values: Sequence[Tensor] | None = None) -> Tensor:
        """float64, by the definition, for each query alone, so that nothing hidden can have a part in it."""
        out = torch.full(self.query.shape, NAN, dtype=torch.float64, device="cpu")
        query, row = self.query.cpu(), 0
        of_sequences = zip(self.keys, of_values or self.values, self.query_lens, strict=True)
        for keys, values, num_queries in ((k.cpu(), v.cpu(), n) for k, v, n in of_sequences):
            group = self.query.shape[1] // keys.shape[1]
            for position in range(len(keys) - num_queries, len(keys)):
                first = max(0, position - self.window + 1) if self.window else 0
                if len(keys):
                    k = keys[first : position + 1].double().repeat_interleave(group, dim=1)
                    v = values[first : position + 1].double().repeat_interleave(group, dim=1)
                    scores = torch.einsum("hd,phd->hp", query[row].double(), k) * self.scale
                    if self.soft_cap:
                        scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                    out[row] = torch.einsum("hp,phd->hd", scores.softmax(-1), v)
                row += 1
        return out


def batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Batch:
    generator = torch.Generator().manual_seed(sum(seq_lens) + head_size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(DEVICE, dtype)

    return Batch(
        query=random(sum(query_lens), heads, head_size),
        keys=tuple(random(n, kv_heads, head_size) for n in seq_lens),
        values=tuple(random(n, kv_heads, head_size) for n in seq_lens),
        query_lens=tuple(query_lens),
        block_size=block_size,
        scale=head_size**-0.5,
        window=window,
        soft_cap=soft_cap,
    )


def assert_attention(got: Tensor, want: Tensor, rtol: float = 4e-6, atol: float | Tensor = 4e-6) -> None:
    """``got`` is ``want`` (float64) but for float32 arithmetic and the rounding to the dtype of ``got``."""
    if got.dtype is not torch.float32:
        rtol += torch.finfo(got.dtype).eps / 2
    got, want = got.double().cpu(), want.cpu()
    assert got.shape == want.shape
    close = ((got - want).abs() <= atol + rtol * want.abs()) | (got == want) | (got.isnan() & want.isnan())
    assert close.all(), (
        f"off by {(got - want).abs()[~close].max()} in {(~close).sum()} of {close.numel()} elements"
    )


def rounding_of_weights(data: Batch, dtype: torch.dtype) -> float | Tensor:
    """What a result may be off by where weights are rounded to half precision, as matrix instructions take them.

    Each is off by the unit roundoff at most, and the result by as much of the sum of weight times absolute value.
    """
    if ON_CPU or dtype is torch.float32:
        return 0.0
    absolute = [v.abs().where(v.isfinite(), 0.0) for v in data.values]
    return torch.finfo(dtype).eps / 2 * data.expected(absolute)


def check(data: Batch, got: Tensor | None = None, atol: float = 4e-6) -> None:
    """``got`` is the attention of ``data``."""
    got = data.run() if got is None else got
    assert_attention(got, data.expected(), atol=atol + rounding_of_weights(data, got.dtype))


# ---------------------------------------------------------------- cases of the field

FILES = sorted((Path(__file__).parents[1] / "data").glob("attention-*.safetensors"))


def field_cases() -> Iterator[tuple[Path, str]]:
    for path in FILES:
        with safe_open(path, "pt") as file:
            yield from ((path, name) for name in json.loads(file.metadata()["cases"]))


def test_the_files_are_there() -> None:
    assert len(FILES) == 2
    assert len(list(field_cases())) == 9


@pytest.mark.parametrize(("path", "name"), list(field_cases()), ids=lambda x: x if isinstance(x, str) else "")
def test_field_case(path: Path, name: str) -> None:
    with safe_open(path, "pt", device=DEVICE) as file:
        case = json.loads(file.metadata()["cases"])[name]
        query, keys, values, want = (file.get_tensor(f"{name}.{part}") for part in ("q", "k", "v", "out"))
    lengths = case["seq_lens"]
    data = Batch(
        query=query,
        keys=keys.split(lengths),
        values=values.split(lengths),
        query_lens=tuple(case["query_lens"]),
        block_size=case["block_size"],
        scale=case["scale"],
        window=case["window"],
        soft_cap=case["softcap"],
    )
    # Scores of 1e5 carry float32 errors of 1e-2, which is what a weight is then off by.
    atol = 2e-2 if name == "h64_huge_logits" else 1e-5
    if ON_CPU:
        assert_attention(data.run(), want.double(), atol=atol)
    else:
        check(data, atol=atol)
    wide = replace(
        data,
        query=query.float(),
        keys=[k.float() for k in data.keys],
        values=[v.float() for v in data.values],
    )
    assert_attention(wide.run(), want.double(), atol=atol)


# ---------------------------------------------------------------- shapes

MIXED = ((1, 5, 1, 20, 3), (1, 5, 33, 47, 100))


@pytest.mark.parametrize("head_size", [1, 3, 8, 32, 40, 48, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_size(head_size: int, dtype: torch.dtype) -> None:
    data = batch(*MIXED, head_size=head_size, dtype=dtype)
    check(data)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("query_len", [1, 7, 40])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_block_edge(block_size: int, query_len: int, dtype: torch.dtype) -> None:
    edges = {block_size, 64, 128}
    lengths = sorted({n + d for n in edges for d in (-1, 0, 1) if n + d >= query_len})
    data = batch([query_len] * len(lengths), lengths, block_size=block_size, dtype=dtype)
    check(data)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33])
@pytest.mark.parametrize("query_lens", [(1, 4, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_group(kv_heads: int, group: int, query_lens: tuple[int, ...], dtype: torch.dtype) -> None:
    data = batch(query_lens, (70, 9, 3), heads=kv_heads * group, kv_heads=kv_heads, head_size=48, dtype=dtype)
    check(data)


@pytest.mark.parametrize("heads", [70, 150])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_more_heads_than_a_tile(heads: int, dtype: torch.dtype) -> None:
    data = batch((2, 1), (20, 80), heads=heads, kv_heads=1, head_size=32, dtype=dtype)
    check(data)


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 63, 64, 65, 99, 100, 1000])
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_every_window(window: int, block_size: int, dtype: torch.dtype) -> None:
    data = batch((1, 60, 5, 1), (100, 100, 100, 9), block_size=block_size, window=window, dtype=dtype)
    check(data)


@pytest.mark.parametrize("soft_cap", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_soft_cap(soft_cap: float, window: int, dtype: torch.dtype) -> None:
    data = batch(*MIXED, soft_cap=soft_cap, window=window, dtype=dtype)
    data = replace(data, query=data.query * 10)
    check(data, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, 200])
def test_a_prompt_in_chunks_is_the_prompt_at_once(chunk: int) -> None:
    whole = batch((200,), (200,), heads=6, kv_heads=2)
    want = whole.expected()
    assert_attention(whole.run(), want)
    for first in range(0, 200, chunk):
        last = min(first + chunk, 200)
        part = replace(
            whole,
            query=whole.query[first:last],
            keys=(whole.keys[0][:last],),
            values=(whole.values[0][:last],),
            query_lens=(last - first,),
        )
        assert_attention(part.run(), want[first:last])


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("most_queries", [1, 9, 40])
def test_many_sequences(most_queries: int, dtype: torch.dtype) -> None:
    choice = random.Random(most_queries)
    lengths = [choice.randrange(90) for _ in range(60)]
    queries = [min(n, choice.randint(0, most_queries)) for n in lengths]
    data = batch(queries, lengths, heads=6, kv_heads=3, head_size=32, block_size=8, dtype=dtype)
    check(data)


def test_the_cache_may_be_narrower_than_the_query() -> None:
    data = batch(*MIXED, dtype=torch.bfloat16)
    data = replace(data, query=data.query.float())
    got = data.run()
    assert got.dtype is torch.float32
    assert_attention(got, data.expected())


@pytest.mark.parametrize(("query_lens", "seq_lens"), [((), ()), ((0,), (0,)), ((0, 0), (5, 0))])
def test_nothing_to_do(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
    starts = torch.tensor((0, *query_lens)).cumsum(0).int()
    cache = torch.full((2, 2, 8, 16), NAN)
    tables = torch.full((len(seq_lens), 1), UNUSED_BLOCK, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    out = ops.paged_attention(torch.empty(0, 4, 16), cache, cache, starts, lengths, tables, 1.0)
    assert out.shape == (0, 4, 16)


# ---------------------------------------------------------------- strides, padding, bad values


@pytest.mark.parametrize("query_len", [1, 9, 40])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_strided_heads(query_len: int, dtype: torch.dtype) -> None:
    """Query as a view of a qkv buffer, out with gaps that stay as they are."""
    data = batch((query_len, query_len), (50, 90), heads=6, kv_heads=2, head_size=32, dtype=dtype)
    qkv = torch.full((2 * query_len, 10, 37), NAN, dtype=dtype)
    view = qkv[:, 2:8, :32]
    view.copy_(data.query)
    buffer = torch.full((2 * query_len, 7, 40), 7.0, dtype=dtype)
    out = buffer[:, :6, :32]
    assert replace(data, query=view).run(out=out) is out
    check(data, out)
    assert (buffer[:, 6] == 7).all()
    assert (buffer[:, :, 32:] == 7).all()


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_rows_of_length_0_are_neither_read_nor_written(dtype: torch.dtype) -> None:
    data = batch((1, 2, 1), (40, 0, 7), dtype=dtype)
    data.query[1:3] = NAN
    out = torch.full_like(data.query, 3.0)
    data.run(out=out)
    assert (out[1:3] == 3).all()
    out[1:3] = NAN  # which is what the reference has there
    check(data, out)


@pytest.mark.parametrize("query_len", [4, 40])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_rows_past_the_last_sequence_are_not_written(query_len: int, dtype: torch.dtype) -> None:
    data = batch((1, query_len), (40, 47), dtype=dtype)
    padded = replace(data, query=torch.cat([data.query, torch.full((3, 4, 64), NAN, dtype=dtype)]))
    out = torch.full_like(padded.query, 3.0)
    padded.run(out=out)
    check(data, out[:-3])
    assert (out[-3:] == 3).all()


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("query_len", [1, 3, 40])
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_what_a_query_does_not_see_has_no_part_in_it(
    bad: float, window: int, query_len: int, dtype: torch.dtype
) -> None:
    """Keys and values after it, before its window, or of another sequence; also when they are not finite."""
    data = batch((query_len, query_len, 5), (80, 70, 20), window=window, dtype=dtype)
    data.values[0][-1] = bad
    data.keys[0][-1, 0] = bad
    data.values[1][58, 1, 3] = bad
    check(data)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_huge_scores(dtype: torch.dtype) -> None:
    """Scores of 1e6 with a clear winner: the softmax is a choice, and nothing overflows."""
    data = batch((1, 20), (100, 50), kv_heads=2, head_size=64, dtype=dtype)
    keys = tuple(torch.zeros_like(k) for k in data.keys)
    for k in keys:
        k[:, :, 0] = torch.linspace(-1e3, 1e3, len(k), dtype=dtype).unsqueeze(1)
    query = torch.zeros_like(data.query)
    query[..., 0] = 8e3
    data = replace(data, query=query, keys=keys)
    got = data.run()
    assert got.isfinite().all()
    check(data, got)


def test_equal_scores_far_below_zero() -> None:
    data = batch((1, 20), (100, 50))
    data = replace(
        data, query=torch.full_like(data.query, -1e4), keys=tuple(torch.ones_like(k) for k in data.keys)
    )
    check(data)


# ---------------------------------------------------------------- split over the context


@cpu_kernels
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [((1,), (2500,)), ((1, 1, 1), (3000, 3, 900)), ((90,), (1200,)), ((1, 60, 1), (700, 800, 65))],
)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (300, 0.0), (0, 10.0)])
def test_split_over_the_context(
    num_threads: int, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], window: int, soft_cap: float
) -> None:
    data = batch(query_lens, seq_lens, heads=6, kv_heads=2, head_size=32, window=window, soft_cap=soft_cap)
    want = data.expected()
    with threads(num_threads):
        size = ops.paged_attention_workspace_size(data.query.shape[0], 6, 32)
        assert (size > 0) == (num_threads > 1)
        for floats in {size, size // 3, 0}:  # a smaller one splits less
            workspace = torch.full((floats + 50,), NAN)
            assert_attention(data.run(workspace=workspace[:floats]), want)
            assert workspace[floats:].isnan().all(), "written past the workspace"
            if floats == size and window == 0 and size:
                assert not workspace.isnan().all(), "the workspace was not used: nothing was split"


@cpu_kernels
def test_the_workspace_grows_with_threads_and_not_with_the_context() -> None:
    with threads(2):
        two = ops.paged_attention_workspace_size(1, 8, 64)
    with threads(4):
        assert ops.paged_attention_workspace_size(1, 8, 64) == 2 * two


@gpu_kernels
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [((1,), (2500,)), ((1, 1, 1), (1500, 3, 900)), ((1, 3, 1), (700, 800, 65)), ((2, 20), (900, 400))],
)
@pytest.mark.parametrize(("heads", "head_size"), [(6, 64), (2, 128), (24, 72), (4, 192)])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (300, 0.0), (0, 10.0)])
def test_split_over_the_context_on_gpus(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    heads: int,
    head_size: int,
    window: int,
    soft_cap: float,
) -> None:
    if ops.backend() == "emulation":  # few multiprocessors, and slow
        seq_lens = tuple(max(n // 4, 3) for n in seq_lens)
    data = batch(
        query_lens,
        seq_lens,
        heads=heads,
        kv_heads=2,
        head_size=head_size,
        dtype=torch.bfloat16,
        window=window,
        soft_cap=soft_cap,
    )
    size = ops.paged_attention_workspace_size(data.query.shape[0], heads, head_size)
    for floats in {size, size // 3, 0}:  # a smaller one splits less
        workspace = torch.full((floats + 50,), NAN)
        got = data.run(workspace=workspace[:floats])
        check(data, got)
        assert workspace[floats:].isnan().all(), "written past the workspace"
        if floats == size and len(query_lens) == 1:
            assert not workspace.isnan().all(), "the workspace was not used: nothing was split"
        again = data.run(workspace=workspace[:floats].fill_(NAN))
        assert (got == again).all(), "not the same bits twice"


@gpu_kernels
def test_the_workspace_grows_neither_with_the_batch_nor_with_the_context() -> None:
    assert ops.paged_attention_workspace_size(1, 8, 64) == ops.paged_attention_workspace_size(1000, 8, 64)


# ---------------------------------------------------------------- graphs, contract, errors


@cpu_kernels
def test_replay_reads_changed_lengths() -> None:
    first, second = batch((1, 1), (1900, 20), heads=6), batch((1, 1), (33, 1500), heads=6)
    key_cache, value_cache = torch.full((260, 2, 16, 64), NAN), torch.full((260, 2, 16, 64), NAN)
    tables = torch.full((2, 125), UNUSED_BLOCK, dtype=torch.int32)
    query, out = first.query.clone(), torch.empty_like(first.query)
    starts, lengths = first.indices()
    workspace = torch.empty(ops.paged_attention_workspace_size(2, 6, 64))

    def fill(data: Batch) -> None:
        keys, values, data_tables = data.cache()
        key_cache[: len(keys)], value_cache[: len(values)] = keys, values
        tables.fill_(UNUSED_BLOCK)[:, : data_tables.shape[1]] = data_tables
        query.copy_(data.query)
        lengths.copy_(data.indices()[1])

    fill(first)
    torch.ops.pelton.cpu_graph_begin()
    ops.paged_attention(
        query, key_cache, value_cache, starts, lengths, tables, first.scale, out=out, workspace=workspace
    )
    graph = torch.ops.pelton.cpu_graph_end()
    assert_attention(out, first.expected())
    fill(second)
    torch.ops.pelton.cpu_graph_replay(graph)
    assert_attention(out, second.expected())
    lengths.zero_()  # nothing but padding
    torch.ops.pelton.cpu_graph_replay(graph)
    assert_attention(out, second.expected())
    lengths.copy_(torch.tensor([1, 125 * 16 + 1]))
    with pytest.raises(RuntimeError, match=r"^paged_attention: seq_lens\[1\] is 2001, .* 2000 positions$"):
        torch.ops.pelton.cpu_graph_replay(graph)
    torch.ops.pelton.cpu_graph_free(graph)


@on_gpu
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
def test_a_cuda_graph_reads_changed_lengths(dtype: torch.dtype) -> None:
    first = batch((1, 1), (1900, 20), heads=6, dtype=dtype)
    second = batch((1, 1), (33, 1500), heads=6, dtype=dtype)
    key_cache = torch.full((260, 2, 16, 64), NAN, dtype=dtype)
    value_cache = torch.full_like(key_cache, NAN)
    tables = torch.full((2, 125), UNUSED_BLOCK, dtype=torch.int32)
    query, out = first.query.clone(), torch.empty_like(first.query)
    starts, lengths = first.indices()
    workspace = torch.empty(ops.paged_attention_workspace_size(2, 6, 64))

    def fill(data: Batch) -> None:
        keys, values, data_tables = data.cache()
        key_cache[: len(keys)], value_cache[: len(values)] = keys, values
        tables.fill_(UNUSED_BLOCK)[:, : data_tables.shape[1]] = data_tables
        query.copy_(data.query)
        lengths.copy_(data.indices()[1])

    def call() -> None:
        ops.paged_attention(
            query, key_cache, value_cache, starts, lengths, tables, first.scale, out=out, workspace=workspace
        )

    fill(first)
    call()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for data in (second, first, second):
        fill(data)
        out.fill_(NAN)
        graph.replay()
        check(data, out)
    lengths.zero_()  # nothing but padding
    graph.replay()
    check(second, out)


def small_call(**changes: object) -> tuple[object, ...]:
    arguments: dict[str, object] = {
        "out": torch.empty(3, 4, 16),
        "query": torch.randn(3, 4, 16),
        "key_cache": torch.randn(5, 2, 8, 16),
        "value_cache": torch.randn(5, 2, 8, 16),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([9, 2], dtype=torch.int32),
        "block_tables": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "workspace": torch.empty(5000),
        "scale": 0.25,
        "sliding_window": 0,
        "soft_cap": 0.0,
    }
    assert changes.keys() <= arguments.keys()
    return tuple((arguments | changes).values())


def test_opcheck() -> None:
    result = torch.library.opcheck(torch.ops.pelton.paged_attention.default, small_call())
    assert set(result.values()) == {"SUCCESS"}


def ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_VALUES: list[tuple[dict[str, object], str]] = [
    ({"seq_lens": ints(17, 2)}, r"seq_lens\[0\] is 17, block_tables holds at most 16 positions"),
    ({"seq_lens": ints(-1, 2)}, r"seq_lens\[0\] is -1"),
    ({"seq_lens": ints(2**31 - 1, 2)}, r"seq_lens\[0\] is 2147483647"),
    ({"seq_lens": ints(9, 1)}, "sequence 1 has 2 queries and only 1 positions"),
    ({"block_tables": ints([1, 5], [3, 4])}, r"block_tables\[0\]\[1\] is not one of the 5 blocks"),
    ({"block_tables": ints([1, 2], [-1, 4])}, r"block_tables\[1\]\[0\] is not one of the 5 blocks"),
    ({"block_tables": ints([2**31 - 1, 2], [3, 4])}, r"block_tables\[0\]\[0\] is not one"),
    ({"query_start_loc": ints(0, 1, 4)}, "query_start_loc must grow from 0 to at most 3"),
    ({"query_start_loc": ints(0, 2, 1)}, "query_start_loc must grow"),
    ({"query_start_loc": ints(-1, 1, 3)}, "query_start_loc must grow"),
]


@cpu_kernels
@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_bad_values(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=r"^paged_attention: .*" + message):
        torch.ops.pelton.paged_attention(*small_call(**changes))


@gpu_kernels
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("changes", [changes for changes, _ in BAD_VALUES], ids=str)
def test_bad_values_are_left_out(changes: dict[str, object], dtype: torch.dtype) -> None:
    """A sequence whose values make no sense leaves its rows as they are, or reads nothing where they lie."""
    for value in changes.values():
        assert isinstance(value, Tensor)
    fill = {
        "out": torch.full((3, 4, 16), 3.0, dtype=dtype),
        "query": torch.randn(3, 4, 16, dtype=dtype),
        "key_cache": torch.randn(5, 2, 8, 16, dtype=dtype),
        "value_cache": torch.randn(5, 2, 8, 16, dtype=dtype),
    }
    arguments = small_call(**fill, **changes)
    torch.ops.pelton.paged_attention(*arguments)
    out = fill["out"]
    assert out.isfinite().all()
    if "seq_lens" in changes:  # the other sequence is as ever
        good = slice(1, 3) if changes["seq_lens"][1] == 2 else slice(0, 1)  # type: ignore[index]
        bad = slice(0, 1) if good.start else slice(1, 3)
        assert (out[bad] == 3).all()
        assert (out[good] != 3).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": ints(0, 1)}, r"query_start_loc must have shape \[3\], found \[2\]"),
        ({"query_start_loc": torch.tensor([0, 1, 3])}, "query_start_loc must be Int, found Long"),
        ({"seq_lens": torch.tensor([9, 2])}, "seq_lens must be Int, found Long"),
        ({"block_tables": torch.ones(2, 2)}, r"block_tables must be int32, \[2, max_blocks\]"),
        ({"block_tables": ints([1, 2])}, r"block_tables must be int32, \[2, max_blocks\]"),
        (
            {"query": torch.randn(3, 3, 16), "out": torch.empty(3, 3, 16)},
            "the 3 heads of query must be a multiple",
        ),
        ({"query": torch.randn(3, 4, 8), "out": torch.empty(3, 4, 8)}, "caches must be contiguous"),
        ({"query": torch.randn(3, 64)}, r"query must be \[num_tokens, num_heads, head_size\]"),
        ({"out": torch.empty(3, 4, 15)}, "out must have the shape of query"),
        ({"out": torch.zeros(3, 4, 16, dtype=torch.float16)}, "dtypes must be equal"),
        ({"value_cache": torch.randn(5, 2, 8, 16).half()}, "dtypes must be equal"),
        ({"value_cache": torch.randn(4, 2, 8, 16)}, "value_cache must have the shape of key_cache"),
        ({"key_cache": torch.randn(5, 2, 16, 8).transpose(2, 3)}, "caches must be contiguous"),
        ({"workspace": torch.zeros(50, dtype=torch.float64)}, "workspace must be contiguous float32"),
        ({"sliding_window": -1}, "sliding_window must be 0"),
        ({"soft_cap": -1.0}, "soft_cap must be 0"),
    ],
)
def test_errors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=r"^paged_attention: .*" + message):
        torch.ops.pelton.paged_attention(*small_call(**changes))


def test_head_size_beyond_the_limit() -> None:
    wide = torch.randn(3, 4, 264)
    cache = torch.randn(5, 2, 8, 264)
    changes = {"out": torch.empty_like(wide), "query": wide, "key_cache": cache, "value_cache": cache}
    with pytest.raises(RuntimeError, match=r"^paged_attention: head_size must be 1 to 256, found 264$"):
        torch.ops.pelton.paged_attention(*small_call(**changes))


def test_blocks_outside_of_the_window_are_not_looked_up() -> None:
    """An engine may free them, and their entries then hold anything."""
    data = batch((1, 1), (100, 40), window=20)
    key_cache, value_cache, tables = data.cache()
    tables[0, :5] = UNUSED_BLOCK
    tables[1, 0] = 10**9
    starts, lengths = data.indices()
    got = ops.paged_attention(data.query, key_cache, value_cache, starts, lengths, tables, data.scale, 20)
    assert_attention(got, data.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_reference(dtype: torch.dtype) -> None:
    data = batch(*MIXED, dtype=dtype, window=30, soft_cap=20.0)
    key_cache, value_cache, tables = data.cache()
    starts, lengths = data.indices()
    function: Callable[..., Tensor] = ops.reference.paged_attention
    want = function(
        data.query.double(),
        key_cache.double().nan_to_num(),
        value_cache.double().nan_to_num(),
        starts,
        lengths,
        tables.clamp(min=0),
        data.scale,
        30,
        20.0,
    )
    assert_attention(data.run(), want, atol=1e-5 + rounding_of_weights(data, dtype))
