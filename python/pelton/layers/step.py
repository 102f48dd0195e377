"""What one forward pass works on: the inputs of a step, the KV caches, and memory for what layers compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .weight import Place

__all__ = ["Step", "Workspace"]


class Workspace:
    """Named buffers that all layers share, as each name is free again when the layer is done.

    A buffer has room for `max_rows` rows from the start (on the CPU untouched memory costs nothing), so that its
    address never changes and a recorded graph may be replayed.
    """

    def __init__(self, max_rows: int, place: Place) -> None:
        self.max_rows = max_rows
        self.place = place
        self._buffers: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        self._rows = 0

    def rows(self, name: str, rows: int, *shape: int) -> Tensor:
        """The first `rows` rows of the buffer `name`, [rows, *shape]; a name always has the same shape."""
        if rows != self._rows:  # a step has one number of rows: keep the views of the last one
            self._views.clear()
            self._rows = rows
        view = self._views.get(name)
        if view is None:
            buffer = self._buffers.get(name)
            if buffer is None:
                buffer = self._buffers[name] = self._make(self.max_rows, *shape, dtype=self.place.dtype)
            view = self._views[name] = buffer[:rows]
        return view

    def flat(self, name: str, size: int) -> Tensor:
        """A float32 buffer of at least `size` elements, for an operator's partial results.

        Growing it gives the name new memory; the old stays, for graphs that recorded with it.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[name] = self._make(size, dtype=torch.float32)
        return buffer

    def _make(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):  # a tensor of that mode could not be written to outside of it
            return self.place.empty(*shape, dtype=dtype)

    def num_bytes(self) -> int:
        """Bytes of all buffers made so far."""
        return sum(math.prod(buffer.shape) * buffer.itemsize for buffer in self._buffers.values())


@dataclass(frozen=True)
class Step:
    """The inputs of one forward pass over T tokens of S sequences.

    `ids`, `positions`, `slot_mapping` int64 [T] (slot -1: a padded row), `query_start_loc` int32 [S + 1], `seq_lens`
    int32 [S] (0: a padded row), `block_tables` int32 [S, max_blocks]. `logits_rows` int64: the rows of which logits
    are wanted, None for all. `kv_caches`: key and value cache of each layer. `logits` [rows, vocab_size]: memory for
    as many rows of logits as most steps have.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor | None
    kv_caches: Sequence[tuple[Tensor, Tensor]]
    workspace: Workspace
    logits: Tensor

    def logits_buffer(self, rows: int, vocab_size: int) -> Tensor:
        """Memory for `rows` rows of logits."""
        if rows <= self.logits.shape[0]:
            return self.logits[:rows]
        return self.logits.new_empty((rows, vocab_size))

    def buffer(self, name: str, *shape: int) -> Tensor:
        """The workspace's buffer `name` with one row a token."""
        return self.workspace.rows(name, self.ids.shape[0], *shape)
