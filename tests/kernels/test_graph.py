"""CPU graphs: capture records steps, replay reads the tensors anew."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from kernel_checks import cpu_kernels
from layer import Layer
from pelton import ops

pytestmark = cpu_kernels
graphs = torch.ops.pelton


@contextmanager
def captured() -> Iterator[list[int]]:
    """Captures what its body runs; the list then holds the graph, which is freed by the test."""
    holder: list[int] = []
    graphs.cpu_graph_begin()
    try:
        yield holder
    except BaseException:
        graphs.cpu_graph_abort()
        raise
    holder.append(graphs.cpu_graph_end())


def test_replay_sees_changed_inputs() -> None:
    recorded, plain = Layer(), Layer()
    with captured() as graph:
        recorded.run()
    plain.run()
    assert graphs.cpu_graph_num_steps(graph[0]) == 9
    for _ in range(2):
        recorded.change_inputs()
        plain.change_inputs()
        graphs.cpu_graph_replay(graph[0])
        plain.run()
        for got, want in zip(recorded.state(), plain.state(), strict=True):
            assert torch.equal(got, want)
    graphs.cpu_graph_free(graph[0])


def test_replay_equals_the_reference() -> None:
    recorded, plain = Layer(), Layer()
    with captured() as graph:
        recorded.run()
    plain.run(ops.reference)
    recorded.change_inputs()
    plain.change_inputs()
    graphs.cpu_graph_replay(graph[0])
    plain.run(ops.reference)
    for got, want in zip(recorded.state(), plain.state(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    graphs.cpu_graph_free(graph[0])


@pytest.mark.parametrize(
    ("break_input", "message"),
    [
        (lambda layer: layer.ids.fill_(10), r"^embedding: ids\[0\] is 10, outside of \[0, 10\)$"),
        (
            lambda layer: layer.positions.fill_(20),
            r"^rotary_embedding: positions\[0\] is 20, outside of \[0, 20\)$",
        ),
        (
            lambda layer: layer.slots.fill_(16),
            r"^reshape_and_cache: slot_mapping\[0\] is 16, but the cache has 16 slots$",
        ),
        (
            lambda layer: layer.mapping.fill_(-1),
            r"^copy_blocks: source block -1 of pair 0 is outside of \[0, 4\)$",
        ),
    ],
)
def test_replay_checks_changed_values(break_input: Callable[[Layer], object], message: str) -> None:
    layer = Layer()
    with captured() as graph:
        layer.run()
    break_input(layer)
    with pytest.raises(RuntimeError, match=message):
        graphs.cpu_graph_replay(graph[0])
    layer.change_inputs()
    graphs.cpu_graph_replay(graph[0])  # and goes on
    graphs.cpu_graph_free(graph[0])


def test_a_step_that_failed_is_not_recorded() -> None:
    graphs.cpu_graph_begin()
    with pytest.raises(RuntimeError, match=r"^embedding: "):
        ops.embedding(torch.tensor([5]), torch.zeros(5, 2))
    graph = graphs.cpu_graph_end()
    assert graphs.cpu_graph_num_steps(graph) == 0
    graphs.cpu_graph_replay(graph)
    graphs.cpu_graph_free(graph)


def test_a_graph_keeps_the_memory_it_uses() -> None:
    x, weight = torch.randn(64, 512), torch.ones(512)
    out = torch.empty_like(x)
    with captured() as graph:
        ops.rms_norm(x.clone(), weight.clone(), 1e-5, out=out)
    want = out.clone()
    gc.collect()
    garbage = [torch.full((64, 512), float("nan")) for _ in range(20)]
    out.zero_()
    graphs.cpu_graph_replay(graph[0])
    assert torch.equal(out, want)
    del garbage
    graphs.cpu_graph_free(graph[0])


def test_abort_drops_the_capture() -> None:
    graphs.cpu_graph_begin()
    ops.rms_norm(torch.zeros(1, 4), torch.zeros(4), 1e-5)
    graphs.cpu_graph_abort()
    with pytest.raises(RuntimeError, match=r"^cpu_graph_end: no capture was begun on this thread$"):
        graphs.cpu_graph_end()
    graphs.cpu_graph_abort()  # harmless without a capture


def test_capture_is_per_thread() -> None:
    with captured() as graph:
        thread = threading.Thread(target=lambda: ops.rms_norm(torch.zeros(1, 4), torch.zeros(4), 1e-5))
        thread.start()
        thread.join()
    assert graphs.cpu_graph_num_steps(graph[0]) == 0
    graphs.cpu_graph_free(graph[0])


def test_misuse() -> None:
    graphs.cpu_graph_begin()
    try:
        with pytest.raises(
            RuntimeError, match=r"^cpu_graph_begin: this thread is capturing a graph already$"
        ):
            graphs.cpu_graph_begin()
        with pytest.raises(RuntimeError, match=r"^cpu_graph_replay: not while capturing$"):
            graphs.cpu_graph_replay(1)
    finally:
        graphs.cpu_graph_abort()
    with captured() as graph:
        pass
    graphs.cpu_graph_free(graph[0])
    for call in (graphs.cpu_graph_replay, graphs.cpu_graph_num_steps, graphs.cpu_graph_free):
        with pytest.raises(RuntimeError, match=f": there is no graph {graph[0]}$"):
            call(graph[0])
