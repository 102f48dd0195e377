"""CPU graphs: a forward pass recorded once, then run again by one call (the idea of CUDA graphs).

The recorded kernels read their inputs from the tensors they were recorded with, so new values are written into the
same memory. Nothing between the kernels is recorded: whatever a recorded function does beside calling operators of
`torch.ops.pelton` is done once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from . import _library

__all__ = ["CpuGraph"]


class CpuGraph:
    """A recorded function; `output` is the tensor it gave, which each replay fills anew."""

    def __init__(self, graph: int, output: Tensor) -> None:
        self.output = output
        self._graph = graph
        self._replay = torch.ops.pelton.cpu_graph_replay.default
        self._finalizer = weakref.finalize(self, torch.ops.pelton.cpu_graph_free, graph)

    @classmethod
    def capture(cls, function: Callable[[], Tensor]) -> CpuGraph:
        """Run `function` and record the kernels it runs on this thread; an error ends the recording."""
        _library.load()
        torch.ops.pelton.cpu_graph_begin()
        try:
            output = function()
            return cls(torch.ops.pelton.cpu_graph_end(), output)
        except BaseException:
            torch.ops.pelton.cpu_graph_abort()
            raise

    def replay(self) -> Tensor:
        """Run the kernels again; gives `output`."""
        self._replay(self._graph)
        return self.output

    @property
    def num_steps(self) -> int:
        """How many kernels were recorded."""
        return int(torch.ops.pelton.cpu_graph_num_steps(self._graph))

    def free(self) -> None:
        """Give the recording up, and with it the memory that it alone holds. More than one call does no harm."""
        self._finalizer()
