"""The runner: the same logits however the work is cut into steps, recorded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_driver import DATA, DEVICE, ON_GPU, Driver, cpu_only
from pelton import ops, runner
from pelton.config import EngineConfig, load_model_config
from pelton.cpu_graph import CpuGraph
from pelton.errors import CapacityError, InvalidValueError
from pelton.layers import Place, Workspace
from pelton.runner import Runner, graph_batch_sizes
from pelton.scheduler import StepPlan

MODELS = ["llama-rope", "llama-h80-7to1", "qwen3-h192-tied"]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + 13 * seed + 5) % 96 for i in range(length)]


def driver(model: str = "llama-rope", **options: Any) -> Driver:
    return Driver(DATA / model, **({"dtype": "float32"} | options))


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("block_size", [8, 32])
def test_chunked_prefill_equals_one_step(model: str, block_size: int) -> None:
    it = driver(model, block_size=block_size)
    expected = it.all_logits(prompt(70))
    for chunk in (1, 3, 8, 33, 69):
        close(it.all_logits(prompt(70), chunk=chunk), expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_equals_alone(model: str, dtype: str) -> None:
    """Prompts, chunks and decoding in one step, each sequence as if it ran by itself."""
    it = driver(model, dtype=dtype)
    lengths = [21, 1, 33, 16, 5]
    alone = [it.all_logits(prompt(length, seed)) for seed, length in enumerate(lengths)]
    sequences = [it.sequence(prompt(length, seed)) for seed, length in enumerate(lengths)]
    rows: list[list[torch.Tensor]] = [[] for _ in lengths]
    takes = [(5, 1, 30, 1, 2), (1, 0, 1, 15, 1), (1, 0, 1, 0, 1), (14, 0, 1, 0, 1)]
    for counts in takes:
        parts = [(s, n, n) for s, n in zip(sequences, counts, strict=True) if n]
        logits = it.step(*parts).split([n for n in counts if n])
        for index, piece in zip([i for i, n in enumerate(counts) if n], logits, strict=True):
            rows[index].append(piece)
    for found, expected in zip(rows, alone, strict=True):
        close(torch.cat(found), expected, 1e-4 if dtype == "float32" else 0.15)


@cpu_only
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_equals_eager(model: str, dtype: str) -> None:
    recorded, eager = (
        driver(model, dtype=dtype, enforce_eager=flag, max_num_seqs=9) for flag in (False, True)
    )
    for batch in (1, 2, 3, 8):  # sizes without padding: bit for bit
        prompts = [prompt(4 + 3 * seed, seed) for seed in range(batch)]
        tokens, logits = recorded.greedy(prompts, 12)
        eager_tokens, eager_logits = eager.greedy(prompts, 12)
        assert tokens == eager_tokens
        torch.testing.assert_close(logits, eager_logits, atol=0, rtol=0)
    assert sorted(recorded.runner._graphs) == [1, 2, 3, 8]
    assert not eager.runner._graphs
    prompts = [prompt(4 + 3 * seed, seed) for seed in range(9)]
    padded, logits = recorded.greedy(prompts, 12)
    assert sorted(recorded.runner._graphs)[-1] == 12
    assert padded == [recorded.greedy([p], 12)[0][0] for p in prompts] or dtype == "bfloat16"
    close(logits, eager.greedy(prompts, 12)[1], 1e-4 if dtype == "float32" else 0.1)


@cpu_only
def test_a_recorded_step_does_no_more_than_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    it = driver()
    expected = it.greedy([prompt(9)], 6)
    for name in ops.__all__:  # a replay does not come here
        if name not in ("reference", "linear_panel_width"):
            monkeypatch.delattr(ops, name)
    sequence = it.sequence(prompt(9)[:1])
    it.step((sequence, 1, 1))
    monkeypatch.undo()
    assert it.greedy([prompt(9)], 6) == (expected[0], pytest.approx(expected[1]))


def test_padded_rows_touch_nothing() -> None:
    it = driver(max_num_seqs=9)
    sequences = [it.sequence(prompt(7, seed)) for seed in range(9)]
    it.step(*((s, 6, 0) for s in sequences))
    for _, (key_cache, value_cache) in enumerate(it.runner.kv_caches):
        key_cache[:, :, -1] += 3.0  # also where nobody wrote yet, so that stray zeros show
        value_cache[0] += 2.0
    before = [(k.clone(), v.clone()) for k, v in it.runner.kv_caches]
    logits = it.step(*((s, 1, 1) for s in sequences))  # nine rows of twelve, or of sixteen on a GPU
    padded = 16 if ON_GPU else 12
    assert it.runner._decode_inputs.slots[9:padded].tolist() == [-1] * (padded - 9)
    assert tuple(logits.shape) == (9, 96) and logits.isfinite().all()
    for (key, value), (old_key, old_value) in zip(it.runner.kv_caches, before, strict=True):
        for sequence in sequences:
            block = sequence.block_ids[0]
            assert not torch.equal(key[block, :, 6], old_key[block, :, 6])
            key[block, :, 6], value[block, :, 6] = old_key[block, :, 6], old_value[block, :, 6]
        assert torch.equal(key, old_key) and torch.equal(value, old_value)


def test_garbage_of_finished_sequences_does_not_matter() -> None:
    """Rows that are padding in a smaller batch hold what the larger one left, NaN included."""
    it = driver(max_num_seqs=12)
    expected = it.greedy([prompt(5, seed) for seed in range(9)], 5)
    it.greedy([prompt(30, seed) for seed in range(12)], 3)
    for buffer in it.runner._workspace._buffers.values():
        buffer.fill_(float("nan"))
    found = it.greedy([prompt(5, seed) for seed in range(9)], 5)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])


def test_rows_of_logits_come_in_the_order_of_the_plan() -> None:
    it = driver()
    expected = it.all_logits(prompt(20))
    first, second, third = (it.sequence(prompt(20)) for _ in range(3))
    logits = it.step((first, 9, 0), (second, 7, 2), (third, 12, 1))
    close(logits, expected[[5, 6, 11]])
    close(it.step((second, 1, 1), (first, 1, 0)), expected[[7]])  # one token without logits is no decode step
    assert tuple(it.step((first, 2, 0)).shape) == (0, 96)
    assert tuple(it.runner.execute(StepPlan(())).shape) == (0, 96)


def test_logits_are_float32_for_every_dtype() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        it = driver(dtype=dtype)
        sequence = it.sequence(prompt(3))
        assert it.step((sequence, 2, 1)).dtype == it.step((sequence, 1, 1)).dtype == torch.float32


def test_block_copies_come_before_the_step() -> None:
    it = driver(block_size=8)
    expected = it.all_logits(prompt(12))
    first = it.sequence(prompt(12))
    it.step((first, 10, 0))
    second = it.sequence(prompt(12))
    second.num_computed_tokens = 10
    second.block_ids = [first.block_ids[0], it.free.pop()]
    copies = ((first.block_ids[1], second.block_ids[1]),)
    close(it.step((second, 2, 2), copies=copies), expected[10:])


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=1, max_size=30))
def test_block_tables_follow_the_lists(tables: list[list[int]]) -> None:
    block_tables = runner._BlockTables(2, 8, torch.device("cpu"))
    for number, table in enumerate(tables):
        block_tables.set(number % 2, table)
        assert block_tables.tensor[number % 2, : len(table)].tolist() == table


def test_block_list_changed_in_place_is_seen() -> None:
    tables = runner._BlockTables(1, 8, torch.device("cpu"))
    blocks = [3, 4, 5]
    tables.set(0, blocks)
    blocks[1] = 9  # a shared block was copied for this sequence
    tables.set(0, blocks)
    blocks.append(2)
    tables.set(0, blocks)
    assert tables.tensor[0, :4].tolist() == [3, 9, 5, 2]


@given(st.integers(1, 1500), st.booleans())
def test_graph_batch_sizes(max_batch: int, on_gpu: bool) -> None:
    sizes = graph_batch_sizes(max_batch, on_gpu)
    largest = 1024 if on_gpu else 256
    assert list(sizes) == sorted(set(sizes)) and sizes[0] == 1
    assert sizes[-1] >= min(max_batch, largest)
    for batch in range(1, min(max_batch, largest) + 1):
        size = next(size for size in sizes if size >= batch)
        assert size == batch or size - batch <= max(7 if on_gpu else 3, size // 4)


@cpu_only
def test_graphs_are_freed_with_the_runner() -> None:
    it = driver()
    it.greedy([prompt(3)], 3)
    graph = it.runner._graphs[1]
    assert graph.num_steps > 10
    number = graph._graph
    it.runner.close()
    it.runner.close()
    with pytest.raises(RuntimeError, match=f"no graph {number}"):
        torch.ops.pelton.cpu_graph_num_steps(number)
    tokens = it.greedy([prompt(3)], 3)[0]  # recorded again
    number = it.runner._graphs[1]._graph
    del it.runner, graph
    with pytest.raises(RuntimeError, match=f"no graph {number}"):
        torch.ops.pelton.cpu_graph_replay(number)
    assert tokens == driver(enforce_eager=True).greedy([prompt(3)], 3)[0]


@cpu_only
def test_an_error_ends_the_recording() -> None:
    x, weight, out = torch.randn(2, 8), torch.randn(8), torch.empty(2, 8)

    def fails() -> torch.Tensor:
        ops.rms_norm(x, weight, 1e-5, out=out)
        raise KeyError("stop")

    with pytest.raises(KeyError):
        CpuGraph.capture(fails)
    graph = CpuGraph.capture(lambda: ops.rms_norm(x, weight, 1e-5, out=out))
    assert graph.num_steps == 1
    x *= -1
    expected = ops.rms_norm(x, weight, 1e-5)
    assert graph.replay() is graph.output
    assert torch.equal(out, expected)


def test_workspace_keeps_its_memory() -> None:
    workspace = Workspace(8, Place(torch.float32, DEVICE))
    first = workspace.rows("a", 8, 4)
    second = workspace.rows("a", 3, 4)
    assert first.data_ptr() == second.data_ptr() == workspace.rows("a", 8, 4).data_ptr()
    assert tuple(second.shape) == (3, 4)
    assert workspace.rows("b", 3, 4).data_ptr() != first.data_ptr()
    assert workspace.flat("c", 10).numel() == 10
    assert workspace.flat("c", 5).numel() == 10
    assert workspace.flat("c", 20).numel() == 20
    assert workspace.num_bytes() == 4 * (8 * 4 * 2 + 20)


def make(**options: Any) -> Runner:
    model = DATA / "llama-rope"
    return Runner(EngineConfig(model=model, **options), load_model_config(model))


def test_kv_cache_is_sized_by_the_budget() -> None:
    bytes_per_block = 2 * 2 * 2 * 64 * 2 * 16  # layers, keys and values, heads, size, bf16, tokens
    it = make(kv_cache_memory=40 * bytes_per_block + 5)
    assert (it.num_blocks, it.block_size, it.vocab_size) == (40, 16, 96)
    assert tuple(it.kv_caches[1][0].shape) == (40, 2, 16, 64)
    assert it.kv_caches[0][0].data_ptr() % 64 == 0 and it.kv_caches[0][0].dtype == torch.bfloat16
    if not ON_GPU:
        assert make(max_num_seqs=3, block_size=32).num_blocks == 3 * 8 + 1


def test_budget_and_length_are_checked_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    needed = 17 * 2 * 2 * 2 * 64 * 2 * 16
    with pytest.raises(
        CapacityError, match=rf"max_model_len=256 needs {needed} bytes .*kv_cache_memory is 1024 "
    ):
        make(kv_cache_memory="1KiB")
    with pytest.raises(InvalidValueError, match="max_model_len=300 is more than the 256 positions"):
        make(max_model_len=300)


def test_inputs_are_no_larger_than_the_cache() -> None:
    runner = make(kv_cache_memory="1MiB", max_num_batched_tokens=10**15, max_num_seqs=10**15)
    slots = (runner.num_blocks - 1) * runner.block_size
    assert runner._inputs.ids.numel() <= max(slots, 256)


@pytest.mark.parametrize("tokens", [1, 3])
def test_more_sequences_than_batched_tokens(tokens: int) -> None:
    it = driver(max_num_batched_tokens=tokens, max_num_seqs=8)
    expected = driver().all_logits(prompt(9))
    close(it.all_logits(prompt(9), chunk=tokens), expected)


@cpu_only  # a GPU's kernels cannot raise: such ids read as zeros there, and the engine refuses them before
def test_id_outside_the_vocabulary_leaves_the_runner_usable() -> None:
    it = driver()
    expected = it.greedy([prompt(5)], 4)[0]
    with pytest.raises(RuntimeError, match="embedding"):
        it.all_logits([5, 96])
    bad = it.sequence([5, -1])
    it.step((bad, 1, 1))
    with pytest.raises(RuntimeError, match="embedding"):
        it.step((bad, 1, 1))  # in a replay
    assert it.greedy([prompt(5)], 4)[0] == expected


def test_runner_reads_a_path_or_a_text() -> None:
    model = DATA / "llama-rope"
    for name in (model, str(model), Path(str(model))):
        assert (
            Runner(EngineConfig(model=name, kv_cache_memory="2MiB"), load_model_config(name)).num_blocks > 16
        )
