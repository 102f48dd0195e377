"""From a step plan to logits: persistent inputs, the KV cache, and recorded forward passes for decoding.

A step in which every request computes one token and wants its logits is a decode step. On the CPU it is a replay of a
recorded forward pass (see `cpu_graph.py`), one per batch size of `graph_batch_sizes`; a batch between two sizes is
padded with rows of slot -1 and length 0, which no kernel reads or writes for. All other steps run as they come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import ops
from .config import EngineConfig, ModelConfig
from .cpu_graph import CpuGraph
from .errors import CapacityError
from .layers import Step, Workspace
from .loader import check_num_layers, load_weights, open_checkpoint
from .memory import available_memory, format_bytes, plan_kv_cache
from .models import build_model

if TYPE_CHECKING:
    from .scheduler import ScheduledRequest, StepPlan

__all__ = ["Runner", "graph_batch_sizes"]

logger = logging.getLogger(__name__)

_MAX_GRAPH_BATCH = 256


def graph_batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The batch sizes that decoding is recorded for, the last one at least `max_batch` (or 256).

    Each size up to 8, where a padded row would cost most, then multiples of 4 and, from 64 on, of 16.
    """
    sizes = [*range(1, 8), *range(8, 64, 4), *range(64, _MAX_GRAPH_BATCH + 1, 16)]
    enough = next((index for index, size in enumerate(sizes) if size >= max_batch), len(sizes) - 1)
    return tuple(sizes[: enough + 1])


class _Inputs:
    """The persistent input tensors of a step, and numpy views that fill them without torch."""

    def __init__(self, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        self.ids = tensor(max_tokens, dtype=torch.int64)
        self.positions = tensor(max_tokens, dtype=torch.int64)
        self.slots = tensor(max_tokens, dtype=torch.int64)
        self.seq_lens = tensor(max_seqs, dtype=torch.int32)
        self.query_start_loc = tensor(max_seqs + 1, dtype=torch.int32)
        self.block_tables = tensor(max_seqs, max_blocks, dtype=torch.int32)
        self.one_token_each = torch.arange(max_seqs + 1, dtype=torch.int32)  # query_start_loc of decode steps
        self.np_ids, self.np_positions, self.np_slots = (
            t.numpy() for t in (self.ids, self.positions, self.slots)
        )
        self.np_seq_lens, self.np_query_start_loc = self.seq_lens.numpy(), self.query_start_loc.numpy()
        self.np_block_tables = self.block_tables.numpy()
        self._rows: list[list[int]] = [[] for _ in range(max_seqs)]

    def set_blocks(self, row: int, block_ids: list[int]) -> None:
        """Write a sequence's block table. Most steps find it as the last one left it."""
        known = self._rows[row]
        if known == block_ids:
            return
        count, same = len(block_ids), len(known)
        if count > same and block_ids[:same] == known:  # it grew
            self.np_block_tables[row, same:count] = block_ids[same:]
        else:
            self.np_block_tables[row, :count] = block_ids
        self._rows[row] = block_ids.copy()


class Runner:
    """Owns the model, the KV cache and the inputs of a step.

    Raises:
        CheckpointError, UnsupportedError: the model cannot be read (see `loader.py`).
        CapacityError: the weights, or the KV cache of one sequence, do not fit.
    """

    def __init__(self, engine_config: EngineConfig, model_config: ModelConfig) -> None:
        self.model_config = model_config
        checkpoint = open_checkpoint(engine_config.model)
        config = engine_config.resolve(model_config)
        assert config.max_model_len is not None
        dtype_name = checkpoint.dtype if config.dtype == "auto" else config.dtype
        self.dtype: torch.dtype = getattr(torch, dtype_name)
        self.block_size = config.block_size
        self.vocab_size = model_config.vocab_size
        self.max_model_len = config.max_model_len

        # Before anything is made that grows with the config's numbers: they may be wrong.
        check_num_layers(checkpoint, model_config.num_layers)
        available = available_memory()
        plan_cache = partial(
            plan_kv_cache,
            bytes_per_block=model_config.kv_bytes_per_token(self.dtype.itemsize) * config.block_size,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_cache_memory=config.kv_cache_bytes,
        )
        plan_cache(available=available)
        tied = model_config.tie_word_embeddings and "lm_head.weight" not in checkpoint.tensors
        self.model = build_model(model_config, self.dtype, config.max_model_len, tied=tied)
        weights = self.model.weights()
        weight_bytes = sum(math.prod(weight.shape) for weight in weights.values()) * self.dtype.itemsize
        if weight_bytes > available:
            raise CapacityError(
                f"{config.model}: the weights take {weight_bytes} bytes ({format_bytes(weight_bytes)}) as "
                f"{dtype_name}, and {available} ({format_bytes(available)}) are free: use a smaller model or dtype"
            )
        self.kv_plan = plan_cache(available=available - weight_bytes)
        self.num_blocks = self.kv_plan.num_blocks
        with torch.no_grad():
            load_weights(checkpoint, weights, tied=model_config.tie_word_embeddings, progress=config.progress)
            self.kv_caches = self._allocate_kv_caches()
        logger.info(
            "KV cache: %d blocks of %d tokens, %s (%s)",
            self.num_blocks,
            self.block_size,
            format_bytes(self.kv_plan.num_bytes),
            self.kv_plan.reason,
        )

        # A sequence has a block at least, and a token a slot of its own: no step is larger than the cache.
        num_blocks = self.num_blocks - 1
        max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
        self._graph_sizes = () if config.enforce_eager else graph_batch_sizes(max_seqs)
        max_rows = max(
            min(config.max_num_batched_tokens, num_blocks * self.block_size), *self._graph_sizes, 1
        )
        max_seqs = max(max_seqs, *self._graph_sizes, 1)
        self._inputs = _Inputs(max_rows, max_seqs, -(-config.max_model_len // config.block_size))
        self._workspace = Workspace(max_rows, self.dtype)
        self._graphs: dict[int, CpuGraph] = {}

    def _allocate_kv_caches(self) -> list[tuple[Tensor, Tensor]]:
        config = self.model_config
        shape = (self.num_blocks, config.num_kv_heads, self.block_size, config.head_dim)
        return [
            (_lazy_zeros(shape, self.dtype), _lazy_zeros(shape, self.dtype)) for _ in range(config.num_layers)
        ]

    @torch.no_grad()
    def execute(self, plan: StepPlan) -> Tensor:
        """Run the step: float32 logits [sum of num_logits, vocab_size], in the order of the plan.

        The logits are the runner's own memory, valid until the next step.
        """
        if plan.block_copies:
            copies = torch.tensor(plan.block_copies, dtype=torch.int64)
            for key_cache, value_cache in self.kv_caches:
                ops.copy_blocks(key_cache, value_cache, copies)
        scheduled = plan.scheduled
        if not scheduled:
            return torch.empty((0, self.vocab_size))
        for item in scheduled:
            if item.num_new_tokens != 1 or item.num_logits != 1:
                return self._run(scheduled)
        return self._decode(scheduled)

    def _decode(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        batch = len(scheduled)
        size = next((size for size in self._graph_sizes if size >= batch), batch)
        inputs = self._inputs
        block_size = self.block_size
        tokens, positions, slots, lengths = [], [], [], []
        for row, item in enumerate(scheduled):
            request = item.request
            position = request.num_computed_tokens
            block_ids = request.block_ids
            tokens.append(request.token_ids[position])
            positions.append(position)
            slots.append(block_ids[position // block_size] * block_size + position % block_size)
            lengths.append(position + 1)
            inputs.set_blocks(row, block_ids)
        inputs.np_ids[:batch] = tokens
        inputs.np_positions[:batch] = positions
        inputs.np_slots[:batch] = slots
        inputs.np_seq_lens[:batch] = lengths
        if size > batch:
            inputs.np_ids[batch:size] = 0
            inputs.np_positions[batch:size] = 0
            inputs.np_slots[batch:size] = -1
            inputs.np_seq_lens[batch:size] = 0

        graph = self._graphs.get(size)
        if graph is not None:
            logits = graph.replay()
        elif self._graph_sizes and size <= self._graph_sizes[-1]:
            step = self._step(size, size, inputs.one_token_each, None)
            graph = self._graphs[size] = CpuGraph.capture(lambda: self.model(step))
            logits = graph.output
        else:
            logits = self.model(self._step(size, size, inputs.one_token_each, None))
        return (logits if size == batch else logits[:batch]).float()

    def _run(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        inputs = self._inputs
        block_size = self.block_size
        first = num_logits = 0
        rows = np.empty(sum(item.num_logits for item in scheduled), dtype=np.int64)
        for row, item in enumerate(scheduled):
            request, count = item.request, item.num_new_tokens
            start, last = request.num_computed_tokens, first + count
            inputs.set_blocks(row, request.block_ids)
            positions = inputs.np_positions[first:last]
            positions[:] = np.arange(start, start + count)
            inputs.np_ids[first:last] = request.token_ids[start : start + count]
            blocks, offsets = np.divmod(positions, block_size)
            inputs.np_slots[first:last] = (
                inputs.np_block_tables[row, blocks].astype(np.int64) * block_size + offsets
            )
            inputs.np_seq_lens[row] = start + count
            inputs.np_query_start_loc[row + 1] = last
            rows[num_logits : num_logits + item.num_logits] = np.arange(last - item.num_logits, last)
            first, num_logits = last, num_logits + item.num_logits
        step = self._step(first, len(scheduled), inputs.query_start_loc, torch.from_numpy(rows))
        return self.model(step).float()

    def _step(self, num_tokens: int, num_seqs: int, query_start_loc: Tensor, rows: Tensor | None) -> Step:
        inputs = self._inputs
        return Step(
            ids=inputs.ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            slot_mapping=inputs.slots[:num_tokens],
            query_start_loc=query_start_loc[: num_seqs + 1],
            seq_lens=inputs.seq_lens[:num_seqs],
            block_tables=inputs.block_tables[:num_seqs],
            logits_rows=rows,
            kv_caches=self.kv_caches,
            workspace=self._workspace,
        )

    def close(self) -> None:
        """Give up the recorded graphs; the runner can go on, and records them again."""
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written (torch.zeros writes them), aligned to cache lines."""
    line = 64
    memory = np.zeros(math.prod(shape) * dtype.itemsize + line, dtype=np.uint8)
    start = -memory.ctypes.data % line
    return torch.from_numpy(memory[start : start + memory.nbytes - line]).view(dtype).view(shape)
