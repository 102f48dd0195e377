"""How the GPU benchmarks take times."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from triton.testing import do_bench

__all__ = ["graph_us", "median_us"]


def median_us(call: Callable[[], object], warmup: int = 20, rep: int = 80) -> float:
    """Microseconds of a call, with the L2 cache flushed before each; `warmup` and `rep` in milliseconds."""
    return 1e3 * float(do_bench(call, warmup=warmup, rep=rep, return_mode="median"))


def graph_us(call: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of a call among `calls` in a CUDA graph: without the host, and with a warm L2 cache."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(15):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times) / calls
