"""CUDA graphs: a forward pass recorded once, then started again by one call (see `cpu_graph.py` for the idea)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["CudaGraph"]


class CudaGraph:
    """A recorded function; `output` is the tensor it gave, which each replay fills anew."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.output = output
        self._graph: torch.cuda.CUDAGraph | None = graph

    @classmethod
    def capture(
        cls, function: Callable[[], Tensor], stream: torch.cuda.Stream, pool: tuple[int, int]
    ) -> CudaGraph:
        """Run `function`, and record what it starts on `stream`; an error ends the recording.

        It runs once before, so that what libraries do at their first call (load code, take memory) stays out of the
        recording. Graphs of one `pool` share the memory they compute in, so only one of them may run at a time.
        """
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            function()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = function()
            except BaseException:
                with contextlib.suppress(
                    RuntimeError
                ):  # the recording is void; the first error is the one to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)
        graph.replay()
        return cls(graph, output)

    def replay(self) -> Tensor:
        """Start the recorded kernels on the current stream; gives `output`."""
        if self._graph is None:
            raise RuntimeError("this CUDA graph was freed")
        self._graph.replay()
        return self.output

    def free(self) -> None:
        """Give the recording up. More than one call does no harm."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
