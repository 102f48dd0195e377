"""From a step plan to logits: persistent inputs, the KV cache, and recorded forward passes for decoding.

A step in which every request computes one token and wants its logits is a decode step. It is a replay of a recorded
forward pass (see `cpu_graph.py` and `cuda_graph.py`), one per batch size of `graph_batch_sizes`; a batch between two
sizes is padded with rows of slot -1 and length 0, which no kernel reads or writes for. All other steps run as they
come.

On a GPU everything a step reads is there before it starts: the host fills pinned memory, one copy sends it, and the
host goes on. The memory is written again only when that copy is done.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import build_info, guard, ops
from .config import EngineConfig, ModelConfig
from .cpu_graph import CpuGraph
from .cuda_graph import CudaGraph
from .device import choose_device
from .errors import CapacityError, InvalidValueError
from .layers import Place, Step, Workspace
from .loader import Checkpoint, check_num_layers, dummy_checkpoint, load_weights, open_checkpoint
from .memory import GpuMemory, KvCachePlan, available_memory, format_bytes, plan_gpu_kv_cache, plan_kv_cache
from .models import build_model
from .pages import own_pages
from .quant.checkpoint import Quantization, built_features, check_unquantized
from .quant.methods import Target

if TYPE_CHECKING:
    from .layers import Weight
    from .scheduler import ScheduledRequest, StepPlan

__all__ = ["Runner", "graph_batch_sizes"]

logger = logging.getLogger(__name__)

_MAX_CPU_GRAPH = 256
_MAX_GPU_GRAPH = 1024
_MANY_CHANGES = 32  # rows of block tables: from here on one copy of all rows is cheaper than one a row
_ALLOCATION = 2 << 20  # torch takes GPU memory in multiples of this


def graph_batch_sizes(max_batch: int, on_gpu: bool = False) -> tuple[int, ...]:
    """The batch sizes that decoding is recorded for, the last one at least `max_batch` (or the largest there is).

    On the CPU each size up to 8, where a padded row would cost most, then multiples of 4 and, from 64 on, of 16, up
    to 256. On a GPU, where a few padded rows cost little and a recording takes memory, powers of two up to 8, then
    multiples of 8 and, from 256 on, of 32, up to 1024.
    """
    if on_gpu:
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_GPU_GRAPH + 1, 32)]
    else:
        sizes = [*range(1, 8), *range(8, 64, 4), *range(64, _MAX_CPU_GRAPH + 1, 16)]
    enough = next((index for index, size in enumerate(sizes) if size >= max_batch), len(sizes) - 1)
    return tuple(sizes[: enough + 1])


class _Inputs:
    """The inputs of one kind of step: host tensors that numpy fills, and their twins on the device.

    All lie in one piece of memory, which `send` copies. On the CPU the twins are the host's tensors themselves.
    """

    def __init__(self, max_tokens: int, max_seqs: int, device: torch.device) -> None:
        fields = {
            "ids": (torch.int64, max_tokens),
            "positions": (torch.int64, max_tokens),
            "slots": (torch.int64, max_tokens),
            "rows": (torch.int64, max_tokens),
            "seq_lens": (torch.int32, max_seqs),
            "query_start_loc": (torch.int32, max_seqs + 1),
        }
        num_bytes = sum(dtype.itemsize * count for dtype, count in fields.values())
        on_gpu = device.type != "cpu"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros_like(self._host, device=device) if on_gpu else self._host
        ends = list(itertools.accumulate(dtype.itemsize * count for dtype, count in fields.values()))
        places = {
            name: (slice(end - dtype.itemsize * count, end), dtype)
            for end, (name, (dtype, count)) in zip(ends, fields.items(), strict=True)
        }
        on_device = {name: self._device[place].view(dtype) for name, (place, dtype) in places.items()}
        host = {name: self._host[place].view(dtype).numpy() for name, (place, dtype) in places.items()}
        self.ids, self.positions, self.slots = (on_device[name] for name in ("ids", "positions", "slots"))
        self.rows, self.seq_lens = on_device["rows"], on_device["seq_lens"]
        self.query_start_loc = on_device["query_start_loc"]
        self.np_ids, self.np_positions, self.np_slots = (host[name] for name in ("ids", "positions", "slots"))
        self.np_rows, self.np_seq_lens = host["rows"], host["seq_lens"]
        self.np_query_start_loc = host["query_start_loc"]

    def pad(self, first: int, last: int) -> None:
        """Make rows of no sequence of these rows of a decode step."""
        self.np_ids[first:last] = 0
        self.np_positions[first:last] = 0
        self.np_slots[first:last] = -1
        self.np_seq_lens[first:last] = 0

    def send(self) -> None:
        """Start the copy to the device."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class _BlockTables:
    """The block tables [max_seqs, max_blocks] on the host and on the device; what changed is sent."""

    def __init__(self, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        on_gpu = device.type != "cpu"
        self._host = torch.zeros((max_seqs, max_blocks), dtype=torch.int32, pin_memory=on_gpu)
        self.tensor = torch.zeros_like(self._host, device=device) if on_gpu else self._host
        self.np = self._host.numpy()
        self._rows: list[list[int]] = [[] for _ in range(max_seqs)]
        self._changes: list[tuple[int, int, int]] = []

    def set(self, row: int, block_ids: list[int]) -> None:
        """Write a sequence's block table. Most steps find it as the last one left it."""
        known = self._rows[row]
        if known == block_ids:
            return
        count, same = len(block_ids), len(known)
        if not (count > same and block_ids[:same] == known):  # unless it grew
            same = 0
        self.np[row, same:count] = block_ids[same:]
        self._rows[row] = block_ids.copy()
        self._changes.append((row, same, count))

    def send(self) -> None:
        """Start the copies of what changed to the device."""
        if self.tensor is not self._host:
            if len(self._changes) > _MANY_CHANGES:
                rows = 1 + max(row for row, _, _ in self._changes)
                self.tensor[:rows].copy_(self._host[:rows], non_blocking=True)
            else:
                for row, first, last in self._changes:
                    self.tensor[row, first:last].copy_(self._host[row, first:last], non_blocking=True)
        self._changes.clear()


class Runner:
    """Owns the model, the KV cache and the inputs of a step.

    Raises:
        CheckpointError, UnsupportedError: the model cannot be read (see `loader.py`).
        InvalidValueError, HardwareMismatch: the device cannot be used (see `device.py`).
        CapacityError: the weights, or the KV cache of one sequence, do not fit.
    """

    def __init__(self, engine_config: EngineConfig, model_config: ModelConfig) -> None:
        self.model_config = model_config
        profile = build_info.profile if build_info.backend == ops.backend() else ""
        self.device = torch.device(
            choose_device(engine_config.device, ops.backend(), profile, torch.cuda.device_count)
        )
        self.on_gpu = self.device.type != "cpu"
        if self.on_gpu:
            guard.check_gpu(self.device.index)
        checkpoint = None if engine_config.load_format == "dummy" else open_checkpoint(engine_config.model)
        config = engine_config.resolve(model_config)
        assert config.max_model_len is not None
        dtype_name = config.dtype
        if dtype_name == "auto":
            dtype_name = checkpoint.dtype if checkpoint else "bfloat16"
        self.dtype: torch.dtype = getattr(torch, dtype_name)
        self.block_size = config.block_size
        self.vocab_size = model_config.vocab_size
        self.max_model_len = config.max_model_len
        with self._on_device():
            self._set_up(config, checkpoint)

    def _set_up(self, config: EngineConfig, checkpoint: Checkpoint | None) -> None:
        model_config, max_model_len = self.model_config, self.max_model_len
        # Before anything is made that grows with the config's numbers: they may be wrong.
        if checkpoint is not None:
            check_num_layers(checkpoint, model_config.num_layers)
        sizes: dict[str, Any] = {
            "bytes_per_block": model_config.kv_bytes_per_token(self.dtype.itemsize) * config.block_size,
            "block_size": config.block_size,
            "max_model_len": max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "kv_cache_memory": config.kv_cache_bytes,
        }
        reserve = 2 * model_config.num_layers * _ALLOCATION

        def plan_on_gpu(memory: GpuMemory) -> KvCachePlan:
            return plan_gpu_kv_cache(memory, reserve=reserve, **sizes)

        memory = self._gpu_memory(config) if self.on_gpu else None
        available = 0 if memory else available_memory()
        if memory:
            plan_on_gpu(memory)
        else:
            plan_kv_cache(available=available, **sizes)
        tied = model_config.tie_word_embeddings and not (
            checkpoint is not None and any(name.startswith("lm_head.") for name in checkpoint.tensors)
        )
        place = Place(self.dtype, self.device, self._quantization(config, checkpoint))
        self.model = build_model(model_config, place, max_model_len, tied=tied)
        weights = self.model.weights()
        weight_bytes = sum(
            math.prod(weight.shape) * self.dtype.itemsize if weight.num_bytes is None else weight.num_bytes
            for weight in weights.values()
        )
        if memory:
            memory = dataclasses.replace(memory, weights=weight_bytes)
            self.kv_plan: KvCachePlan = plan_on_gpu(memory)  # more than there will be in the end
        else:
            if weight_bytes > available:
                raise CapacityError(
                    f"{config.model}: the weights take {weight_bytes} bytes ({format_bytes(weight_bytes)}) as "
                    f"{str(self.dtype).removeprefix('torch.')}, and {available} ({format_bytes(available)}) are "
                    "free: use a smaller model or dtype"
                )
            self.kv_plan = plan_kv_cache(available=available - weight_bytes, **sizes)
        checkpoint = checkpoint or dummy_checkpoint(config.model, weights)
        with torch.no_grad():
            if memory:
                self._fill_gpu(config, checkpoint, weights, memory, plan_on_gpu)
            else:
                self._load(config, checkpoint, weights)
                self.kv_caches = self._allocate_kv_caches(self.num_blocks)
                self._make_inputs(config)
        logger.info(
            "KV cache: %d blocks of %d tokens, %s (%s)",
            self.num_blocks,
            self.block_size,
            format_bytes(self.kv_plan.num_bytes),
            self.kv_plan.reason,
        )

    def _quantization(self, config: EngineConfig, checkpoint: Checkpoint | None) -> Quantization | None:
        found = self.model_config.quantization
        if config.int8_activations and (found is None or self.on_gpu):
            where = f"{config.model} is not quantized" if found is None else f"the device is {self.device}"
            raise InvalidValueError(
                f"int8_activations=True is for quantized weights on the CPU, and {where}; leave it out"
            )
        if found is None:
            if checkpoint:
                check_unquantized(checkpoint.tensors, str(checkpoint.path))
            return None
        capability = torch.cuda.get_device_capability(self.device) if self.on_gpu else None
        dtype = str(self.dtype).removeprefix("torch.")
        target = Target(ops.backend(), built_features(), dtype, capability, config.int8_activations)
        return Quantization(found, checkpoint.tensors if checkpoint else None, target, config.quantization)

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the host goes on."""
        return self.on_gpu

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the null block included."""
        return self.kv_plan.num_blocks

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the GPU torch's current one, and products of float32 exact even if the process asks for TF32."""
        if not self.on_gpu:
            yield
            return
        products = torch.backends.cuda.matmul
        with torch.cuda.device(self.device):
            if self.dtype != torch.float32 or products.fp32_precision != "tf32":
                yield
                return
            products.fp32_precision = "ieee"
            try:
                yield
            finally:
                products.fp32_precision = "tf32"

    def _make_inputs(self, config: EngineConfig) -> None:
        # A sequence has a block at least, and a token a slot of its own: no step is larger than the cache.
        num_blocks = self.num_blocks - 1
        max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
        may_record = not config.enforce_eager and ops.backend() != "emulation"
        self._graph_sizes = graph_batch_sizes(max_seqs, self.on_gpu) if may_record else ()
        max_rows = max(
            min(config.max_num_batched_tokens, num_blocks * self.block_size), *self._graph_sizes, 1
        )
        max_seqs = max(max_seqs, *self._graph_sizes, 1)
        place = Place(self.dtype, self.device)
        self._inputs = _Inputs(max_rows, max_seqs, self.device)
        self._decode_inputs = _Inputs(max_seqs, max_seqs, self.device)
        self._tables = _BlockTables(max_seqs, -(-self.max_model_len // self.block_size), self.device)
        # query_start_loc of decode steps
        self._one_token_each = torch.arange(max_seqs + 1, dtype=torch.int32, device=self.device)
        self._workspace = Workspace(max_rows, place)
        self._logits = place.empty(min(max_seqs, _MAX_GPU_GRAPH), self.vocab_size)
        self._graphs: dict[int, CpuGraph | CudaGraph] = {}
        self._sent = torch.cuda.Event() if self.on_gpu else None

    def _load(self, config: EngineConfig, checkpoint: Checkpoint, weights: dict[str, Weight]) -> None:
        tied = self.model_config.tie_word_embeddings
        load_weights(checkpoint, weights, tied=tied, progress=config.progress, device=self.device)

    def _allocate_kv_caches(self, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
        config = self.model_config
        shape = (num_blocks, config.num_kv_heads, self.block_size, config.head_dim)

        def make() -> Tensor:
            if self.on_gpu:
                return torch.zeros(shape, dtype=self.dtype, device=self.device)
            return own_pages(shape, self.dtype)

        return [(make(), make()) for _ in range(config.num_layers)]

    # --- memory of a GPU ---

    def _gpu_memory(self, config: EngineConfig) -> GpuMemory:
        """Who uses the GPU before anything is loaded."""
        gc.collect()  # a runner that nobody holds any more may still have its memory
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        utilization = float(config.gpu_memory_utilization)
        return GpuMemory(str(self.device), total, utilization, others=total - free, weights=0)

    def _fill_gpu(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        weights: dict[str, Weight],
        memory: GpuMemory,
        plan: Callable[[GpuMemory], KvCachePlan],
    ) -> None:
        """Load, then measure what a step and its graphs take, give the KV cache the rest, and record the graphs."""
        with _telling_what_to_lower(memory, 0, "loading the weights"):
            self._load(config, checkpoint, weights)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        # Other processes may have given memory back meanwhile.
        used = _used_memory(self.device)
        memory = dataclasses.replace(memory, weights=max(used - memory.others, memory.weights))
        with _telling_what_to_lower(memory, 0, "running the largest step"):
            self._make_inputs(config)
            self.kv_caches = self._allocate_kv_caches(1)
            self._run_largest_step()
        used, before = _used_memory(self.device), used
        memory = dataclasses.replace(memory, activations=max(used - before, 0))
        with _telling_what_to_lower(memory, 0, "recording CUDA graphs"):
            memory = dataclasses.replace(memory, graphs=self._measure_graphs())
        self.kv_plan = plan(memory)
        with _telling_what_to_lower(memory, self.kv_plan.num_bytes, "taking the KV cache"):
            self.kv_caches = self._allocate_kv_caches(self.num_blocks)
        with _telling_what_to_lower(memory, self.kv_plan.num_bytes, "recording CUDA graphs"):
            self._record_all(self._graph_sizes)
        logger.info("GPU memory: %s", memory.describe(self.kv_plan.num_bytes))

    def _run_largest_step(self) -> None:
        """As many tokens and rows of logits as a step may have, none of which has a place in the cache."""
        inputs, workspace = self._inputs, self._workspace
        inputs.np_slots[:] = -1
        inputs.np_query_start_loc[1:] = workspace.max_rows
        inputs.send()
        num_seqs = inputs.seq_lens.shape[0]
        rows = inputs.rows[: min(num_seqs, workspace.max_rows)]
        step = self._step(inputs, workspace.max_rows, num_seqs, inputs.query_start_loc, rows)
        logits = self.model(step).float()
        logits.sub_(logits.amax(-1, keepdim=True))  # what sampling takes beside them
        torch.cuda.synchronize()

    def _measure_graphs(self) -> int:
        """Bytes that all graphs will take: the first of them has the shared pool, and the others are alike."""
        taken = []
        used = _used_memory(self.device)
        for size in self._graph_sizes[::-1][:2]:
            self._record_all([size], forget=False)
            now = _used_memory(self.device)
            taken.append(max(0, now - used))
            used = now
        self._forget_graphs()
        return sum(taken) + max(0, len(self._graph_sizes) - 2) * (taken[-1] if taken else 0)

    def _record_all(self, sizes: Sequence[int], forget: bool = True) -> None:
        """Record decode steps in which all rows are padding, the largest first, as it decides how large the pool is."""
        if forget:
            self._forget_graphs()
        for size in sorted(sizes, reverse=True):
            self._decode_inputs.pad(0, size)
            self._decode_inputs.send()
            self._record(size)
        torch.cuda.synchronize()

    def _forget_graphs(self) -> None:
        self.close()
        torch.cuda.empty_cache()

    # --- steps ---

    @torch.no_grad()
    def execute(self, plan: StepPlan, tokens: Tensor | None = None) -> Tensor:
        """Run the step: float32 logits [sum of num_logits, vocab_size], in the order of the plan.

        The logits are on the device, in the runner's own memory, valid until the next step. On a GPU they are there
        when the device has come to them: the host does not wait.

        Args:
            tokens: int64 on the device, the one new token of each request, where the host does not know it yet.
        """
        with self._on_device():
            if plan.block_copies:
                copies = torch.tensor(plan.block_copies, dtype=torch.int64, device=self.device)
                for key_cache, value_cache in self.kv_caches:
                    ops.copy_blocks(key_cache, value_cache, copies)
            scheduled = plan.scheduled
            if not scheduled:
                return torch.empty((0, self.vocab_size), device=self.device)
            if self._sent is not None:
                self._sent.synchronize()  # the last step's inputs may still be on their way
            if tokens is not None or all(item.num_new_tokens == item.num_logits == 1 for item in scheduled):
                return self._decode(scheduled, tokens)
            return self._run(scheduled)

    def _send(self, inputs: _Inputs) -> None:
        inputs.send()
        self._tables.send()
        if self._sent is not None:
            self._sent.record()

    def _decode(self, scheduled: Sequence[ScheduledRequest], known_tokens: Tensor | None) -> Tensor:
        batch = len(scheduled)
        size = next((size for size in self._graph_sizes if size >= batch), batch)
        inputs, tables = self._decode_inputs, self._tables
        block_size = self.block_size
        tokens, positions, slots, lengths = [], [], [], []
        for row, item in enumerate(scheduled):
            request = item.request
            position = request.num_computed_tokens
            block_ids = request.block_ids
            tokens.append(request.token_ids[position] if known_tokens is None else 0)
            positions.append(position)
            slots.append(block_ids[position // block_size] * block_size + position % block_size)
            lengths.append(position + 1)
            tables.set(row, block_ids)
        inputs.np_ids[:batch] = tokens
        inputs.np_positions[:batch] = positions
        inputs.np_slots[:batch] = slots
        inputs.np_seq_lens[:batch] = lengths
        inputs.pad(batch, size)
        self._send(inputs)
        if known_tokens is not None:
            inputs.ids[:batch].copy_(known_tokens)

        graph = self._graphs.get(size)
        if graph is not None:
            logits = graph.replay()
        elif self._graph_sizes and size <= self._graph_sizes[-1]:
            logits = self._record(size).output
        else:
            logits = self.model(self._decode_step(size))
        return (logits if size == batch else logits[:batch]).float()

    def _record(self, size: int) -> CpuGraph | CudaGraph:
        """Run the decode step of `size` rows on the inputs as they are, and keep it."""
        step = self._decode_step(size)
        graph: CpuGraph | CudaGraph
        if self.on_gpu:
            if not self._graphs:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            graph = CudaGraph.capture(lambda: self.model(step), self._stream, self._pool)
        else:
            graph = CpuGraph.capture(lambda: self.model(step))
        self._graphs[size] = graph
        return graph

    def _run(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        inputs, tables = self._inputs, self._tables
        block_size = self.block_size
        first = num_logits = 0
        for row, item in enumerate(scheduled):
            request, count = item.request, item.num_new_tokens
            start, last = request.num_computed_tokens, first + count
            tables.set(row, request.block_ids)
            positions = inputs.np_positions[first:last]
            positions[:] = np.arange(start, start + count)
            inputs.np_ids[first:last] = request.token_ids[start : start + count]
            blocks, offsets = np.divmod(positions, block_size)
            inputs.np_slots[first:last] = tables.np[row, blocks].astype(np.int64) * block_size + offsets
            inputs.np_seq_lens[row] = start + count
            inputs.np_query_start_loc[row + 1] = last
            inputs.np_rows[num_logits : num_logits + item.num_logits] = np.arange(
                last - item.num_logits, last
            )
            first, num_logits = last, num_logits + item.num_logits
        inputs.np_query_start_loc[0] = 0
        self._send(inputs)
        step = self._step(inputs, first, len(scheduled), inputs.query_start_loc, inputs.rows[:num_logits])
        return self.model(step).float()

    def _decode_step(self, size: int) -> Step:
        return self._step(self._decode_inputs, size, size, self._one_token_each, None)

    def _step(
        self, inputs: _Inputs, num_tokens: int, num_seqs: int, query_start_loc: Tensor, rows: Tensor | None
    ) -> Step:
        return Step(
            ids=inputs.ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            slot_mapping=inputs.slots[:num_tokens],
            query_start_loc=query_start_loc[: num_seqs + 1],
            seq_lens=inputs.seq_lens[:num_seqs],
            block_tables=self._tables.tensor[:num_seqs],
            logits_rows=rows,
            kv_caches=self.kv_caches,
            workspace=self._workspace,
            logits=self._logits,
        )

    def close(self) -> None:
        """Give up the recorded graphs; the runner can go on, and records them again."""
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()


def _used_memory(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@contextmanager
def _telling_what_to_lower(memory: GpuMemory, kv_cache: int, doing: str) -> Iterator[None]:
    """Make one message of running out of GPU memory: the sum, and the settings that change it."""
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        text = str(error).lower()
        if not isinstance(error, torch.OutOfMemoryError) and not (
            "out of memory" in text or "alloc_failed" in text
        ):
            raise
        raise CapacityError(
            f"out of GPU memory while {doing}: {memory.describe(kv_cache)}. What helps: lower max_num_batched_tokens or "
            "max_num_seqs (activations), set enforce_eager=True (no CUDA graphs), lower gpu_memory_utilization or set "
            "kv_cache_memory (KV cache), end other processes on this GPU, or use a smaller model or dtype"
        ) from error
