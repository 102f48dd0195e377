"""CPU graphs: capture records steps, replay reads the tensors anew."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pelton import ops

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


def table(max_position: int, rotary_dim: int) -> Tensor:
    return torch.rand(max_position, rotary_dim)


class Layer:
    """All ops of these families in one step over fixed tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.ids = torch.tensor([1, 2, 3])
        self.positions = torch.tensor([0, 1, 2])
        self.slots = torch.tensor([4, 5, -1])
        self.mapping = torch.tensor([[1, 2]])
        self.weight, self.embeddings = torch.randn(64), torch.randn(10, 64)
        self.cos_sin = table(20, 16)
        self.hidden, self.normed, self.residual = (torch.zeros(3, 64) for _ in range(3))
        self.gated, self.gelu = torch.zeros(3, 32), torch.zeros(3, 32)
        self.key_cache, self.value_cache, self.host = (torch.zeros(4, 2, 4, 16) for _ in range(3))

    def run(self, kernels: object = ops) -> None:
        k = kernels
        k.embedding(self.ids, self.embeddings, out=self.hidden)  # type: ignore[attr-defined]
        k.rms_norm(self.hidden, self.weight, 1e-5, out=self.normed)  # type: ignore[attr-defined]
        query, key = self.normed.view(3, 4, 16)[:, :2], self.normed.view(3, 4, 16)[:, 2:]
        k.rotary_embedding(query, key, self.positions, self.cos_sin)  # type: ignore[attr-defined]
        k.reshape_and_cache(key, query, self.key_cache, self.value_cache, self.slots)  # type: ignore[attr-defined]
        k.copy_blocks(self.key_cache, self.value_cache, self.mapping)  # type: ignore[attr-defined]
        k.swap_blocks(self.key_cache, self.host, self.mapping)  # type: ignore[attr-defined]
        k.fused_add_rms_norm(self.hidden, self.residual, self.weight, 1e-5)  # type: ignore[attr-defined]
        k.silu_and_mul(self.hidden, out=self.gated)  # type: ignore[attr-defined]
        k.gelu_and_mul(self.hidden, out=self.gelu)  # type: ignore[attr-defined]

    def change_inputs(self) -> None:
        self.ids.copy_(torch.tensor([9, 0, 9]))
        self.positions.copy_(torch.tensor([19, 0, 7]))
        self.slots.copy_(torch.tensor([-1, 15, 8]))
        self.mapping.copy_(torch.tensor([[2, 0]]))
        self.embeddings.mul_(0.5).add_(0.1)

    def state(self) -> list[Tensor]:
        names = ("hidden", "normed", "residual", "gated", "gelu", "key_cache", "value_cache", "host")
        return [getattr(self, name).clone() for name in names]


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
