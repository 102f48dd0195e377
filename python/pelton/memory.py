"""Bytes: reading and writing sizes, the memory of this machine and its GPUs, and how much of it the KV cache gets."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import CapacityError, InvalidValueError

__all__ = [
    "GpuMemory",
    "KvCachePlan",
    "available_memory",
    "format_bytes",
    "parse_bytes",
    "plan_gpu_kv_cache",
    "plan_kv_cache",
]

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

#: share of the free memory that the KV cache takes when nobody says how much
DEFAULT_SHARE = 0.25
#: share of the free memory that it takes at most, so that one sequence of max_model_len fits
HIGHEST_SHARE = 0.8
#: on a GPU, blocks beyond what `max_num_seqs` sequences use serve the prefix cache; more than this would only cost
#: bookkeeping
MOST_SPARE_BLOCKS = 1 << 16


def parse_bytes(value: float | str, name: str) -> int:
    """Bytes of a number or a text like "2GiB", "512 MiB" or "1.5GB"; `name` is the parameter in the error."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            size = float(match[1]) * _UNITS[match[2].lower()]
            if math.isfinite(size):
                return int(size)
    elif not isinstance(value, bool) and (isinstance(value, int) or _is_whole(value)):
        return int(value)
    raise InvalidValueError(
        f'{name} must be a number of bytes or a size like "2GiB" or "512MiB", found {value!r}'
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def format_bytes(count: int) -> str:
    """A size for people: "1.50 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: what the machine has free, or the control group's limit leaves.

    `root` is where proc and sys are found (for tests). 1. MemAvailable of /proc/meminfo, else the free pages of
    sysconf. 2. The memory limit of control groups version 2, else version 1, less what is used already.
    """
    free = _meminfo(root) or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit_file, usage_file in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _number_in(root / limit_file), _number_in(root / usage_file)
        if limit is not None and usage is not None:
            return max(0, min(free, limit - usage))
    return free


def _meminfo(root: Path) -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


@dataclass(frozen=True)
class KvCachePlan:
    """How large the KV cache is, and why: `num_blocks` blocks (the null block is one) of `bytes_per_block`."""

    num_blocks: int
    bytes_per_block: int
    reason: str

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_kv_cache(
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_memory: int | None,
    available: int,
) -> KvCachePlan:
    """Decide the number of KV blocks.

    1. `kv_cache_memory` is taken as it is. 2. Else a quarter of the available memory, more (up to four fifths) when
    one sequence of `max_model_len` needs it, and never more than `max_num_seqs` such sequences can use.

    Raises:
        CapacityError: one sequence of `max_model_len` does not fit, or `kv_cache_memory` is more than there is.
    """
    blocks_per_sequence = -(-max_model_len // block_size)
    needed = (blocks_per_sequence + 1) * bytes_per_block
    if kv_cache_memory is not None:
        if kv_cache_memory > available:
            raise CapacityError(
                f"kv_cache_memory is {kv_cache_memory} bytes ({format_bytes(kv_cache_memory)}), and {available} "
                f"({format_bytes(max(0, available))}) are free beside the weights: lower it"
            )
        budget, reason = kv_cache_memory, "kv_cache_memory"
    else:
        share = max(int(available * DEFAULT_SHARE), min(needed, int(available * HIGHEST_SHARE)))
        most = (max_num_seqs * blocks_per_sequence + 1) * bytes_per_block
        budget = min(share, most)
        reason = f"{max_num_seqs} sequences of {max_model_len} tokens" if budget == most else "free memory"
    num_blocks = budget // bytes_per_block
    if num_blocks <= blocks_per_sequence:
        fits = max(0, num_blocks - 1) * block_size
        shorter = f"lower max_model_len to {fits} or less" if fits else "lower max_model_len and block_size"
        if kv_cache_memory is not None:
            found = f"kv_cache_memory is {budget} bytes ({format_bytes(budget)}): give at least {needed}, or"
        else:
            found = (
                f"{budget} bytes ({format_bytes(budget)}) can be had of the {available} bytes that are free:"
            )
        raise CapacityError(
            f"KV budget too small for one sequence: max_model_len={max_model_len} needs {needed} bytes "
            f"({format_bytes(needed)}), {found} {shorter}"
        )
    return KvCachePlan(num_blocks, bytes_per_block, reason)


@dataclass(frozen=True)
class GpuMemory:
    """Who takes how many bytes of a GPU, measured or (before anything is loaded) computed.

    `others` are other processes and what the driver and torch take for themselves.
    """

    device: str
    total: int
    utilization: float
    others: int
    weights: int
    activations: int = 0
    graphs: int = 0

    @property
    def limit(self) -> int:
        """What `gpu_memory_utilization` allows in all."""
        return int(self.total * self.utilization)

    @property
    def used(self) -> int:
        return self.others + self.weights + self.activations + self.graphs

    @property
    def left(self) -> int:
        """What the KV cache may take."""
        return self.limit - self.used

    def describe(self, kv_cache: int) -> str:
        """The sum, term by term, for messages."""
        terms = [("weights", self.weights), ("KV cache", kv_cache)]
        terms += [("activations", self.activations), ("CUDA graphs", self.graphs)]
        terms.append(("other processes and the CUDA context", self.others))
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms if size)
        return (
            f"{parts}: {format_bytes(self.used + kv_cache)} together; {self.device} has {format_bytes(self.total)}, of "
            f"which gpu_memory_utilization={self.utilization:g} allows {format_bytes(self.limit)}"
        )


def plan_gpu_kv_cache(
    memory: GpuMemory,
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_memory: int | None,
    reserve: int = 0,
) -> KvCachePlan:
    """Decide the number of KV blocks on a GPU.

    1. `kv_cache_memory` is taken as it is, if the GPU has it. 2. Else everything that `memory.left` says, less
    `reserve` (what allocating in pieces loses), and no more than `max_num_seqs` sequences of `max_model_len` and a
    good prefix cache can use.

    Raises:
        CapacityError: one sequence of `max_model_len` does not fit; the message has the sum and what to lower.
    """
    blocks_per_sequence = -(-max_model_len // block_size)
    needed = (blocks_per_sequence + 1) * bytes_per_block
    if kv_cache_memory is not None:
        budget, reason = kv_cache_memory, "kv_cache_memory"
        if kv_cache_memory > memory.total - memory.used:
            raise CapacityError(
                f"out of GPU memory: {memory.describe(kv_cache_memory)}. What helps: lower kv_cache_memory to "
                f"{format_bytes(max(0, memory.total - memory.used))} or less"
                + (", or max_num_batched_tokens or max_num_seqs (activations)" if memory.activations else "")
            )
    else:
        budget, reason = max(0, memory.left - reserve), f"gpu_memory_utilization={memory.utilization:g}"
    num_blocks = budget // bytes_per_block
    if num_blocks <= blocks_per_sequence:
        fits = max(0, num_blocks - 1) * block_size
        advice = f"lower max_model_len to {fits} or less" if fits else "lower max_model_len"
        if kv_cache_memory is not None:
            raise CapacityError(
                f"KV budget too small for one sequence: max_model_len={max_model_len} needs {needed} bytes "
                f"({format_bytes(needed)}), kv_cache_memory is {budget} bytes ({format_bytes(budget)}): give at least "
                f"{needed}, or {advice}"
            )
        helps = [advice] if memory.left > 0 else []
        if memory.activations:
            helps.append("lower max_num_batched_tokens or max_num_seqs (activations)")
        if memory.graphs:
            helps.append("set enforce_eager=True (no CUDA graphs)")
        if memory.utilization < 0.95:
            helps.append("raise gpu_memory_utilization")
        if memory.others > memory.total // 8:
            helps.append("end other processes on this GPU")
        helps.append("use a smaller model or dtype")
        what = f"max_model_len={max_model_len} needs a KV cache of {needed} bytes ({format_bytes(needed)})"
        if memory.left <= 0:
            what = "nothing is left for the KV cache"
        raise CapacityError(
            f"out of GPU memory: {what}. {memory.describe(needed)}. What helps: {', '.join(helps)}"
        )
    most = max(max_num_seqs * blocks_per_sequence, MOST_SPARE_BLOCKS, blocks_per_sequence) + 1
    if kv_cache_memory is None and num_blocks > most:
        num_blocks, reason = most, f"{max_num_seqs} sequences of {max_model_len} tokens"
    return KvCachePlan(num_blocks, bytes_per_block, reason)
