"""Element-wise and cache operators on a GPU beside torch, eager and compiled, and the copy ceiling.

    python benchmarks/gpu_ops.py
    python benchmarks/gpu_ops.py --only 'rms_norm|silu' --no-compile --json results.json
    python benchmarks/gpu_ops.py --overhead                     # what a call costs the host

Times are medians of `triton.testing.do_bench` in microseconds, the second-level cache flushed before each call;
"graph" is the operator replayed in a CUDA graph of twenty calls over the same tensors (no flush), as decode steps
run it. TB/s counts what must be read once and written once; "of ceiling" is its part of the speed of a copy of 1 GiB,
"copy" the time of a copy that moves as many bytes, both measured in the same run. "torch" is the operator's reference in eager mode (for reshape_and_cache and embedding one
call of torch's own), "compiled" the same function through torch.compile.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from gpu_timing import graph_us, median_us
from torch import Tensor

from pelton import ops

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    op: str
    shape: str
    num_bytes: int  # that must be read or written
    pelton: Call
    torch: Callable[..., object]  # called, and compiled, with `tensors`
    tensors: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    op: str
    shape: str
    pelton_us: float
    graph_us: float
    torch_us: float
    compiled_us: float | None
    copy_us: float
    tb_per_s: float
    of_ceiling: float


def num_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def norms(dtype: torch.dtype) -> Iterator[Case]:
    shapes = [(1, 4096), (16, 4096), (64, 8192), (256, 2048), (1024, 4096), (4096, 4096), (32768, 8192)]
    shapes += [(32768, 1024), (32768 * 32, 128), (4096, 5120), (4096, 16384), (2048, 65536), (4096, 4097)]
    for rows, width in shapes:
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
        out, residual = torch.empty_like(x), torch.randn(rows, width).to(dtype)
        yield Case(
            "rms_norm",
            f"{rows}x{width}",
            num_bytes(x, out, weight),
            lambda x=x, weight=weight, out=out: ops.rms_norm(x, weight, 1e-6, out=out),
            rms_norm,
            (x, weight),
        )
        if width in (128, 4097):
            continue
        yield Case(
            "fused_add_rms_norm",
            f"{rows}x{width}",
            2 * num_bytes(x, residual) + num_bytes(weight),
            lambda x=x, r=residual, weight=weight: ops.fused_add_rms_norm(x, r, weight, 1e-6),
            lambda x, r, weight: ops.reference.fused_add_rms_norm(x, r, weight, 1e-6),
            (x.clone(), residual.clone(), weight),
        )


def gelu_tanh(x: Tensor) -> Tensor:
    return ops.reference.gelu_and_mul(x, "tanh")


def activations(dtype: torch.dtype) -> Iterator[Case]:
    shapes = [(1, 28672), (16, 28672), (64, 11008 * 2), (512, 28672), (32768, 8192), (32768, 1536 * 2)]
    for rows, width in shapes:
        x = torch.randn(rows, width).to(dtype)
        out = torch.empty(rows, width // 2).to(dtype)
        for name, call, reference in (
            ("silu_and_mul", lambda x=x, out=out: ops.silu_and_mul(x, out=out), ops.reference.silu_and_mul),
            (
                "gelu_and_mul none",
                lambda x=x, out=out: ops.gelu_and_mul(x, out=out),
                ops.reference.gelu_and_mul,
            ),
            ("gelu_and_mul tanh", lambda x=x, out=out: ops.gelu_and_mul(x, "tanh", out=out), gelu_tanh),
        ):
            yield Case(name, f"{rows}x{width}", num_bytes(x, out), call, reference, (x,))


def rotary(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, kv_heads, size, rotary_dim, interleaved in (
        (1, 32, 8, 128, 128, False),
        (64, 32, 8, 128, 128, False),
        (1024, 32, 8, 128, 128, False),
        (32768, 32, 8, 128, 128, False),
        (32768, 32, 8, 128, 128, True),
        (32768, 9, 3, 64, 64, False),
        (32768, 32, 32, 80, 32, False),
    ):
        # As in the engine: views of one buffer, whose values stay where they are.
        qkv = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
        query, key = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        positions, table = torch.randint(0, 8192, (tokens,)), torch.randn(8192, rotary_dim)
        moved = 2 * tokens * (heads + kv_heads) * rotary_dim * qkv.element_size()
        yield Case(
            "rotary_embedding",
            f"{tokens}x{heads}+{kv_heads}x{size}" + (f"/{rotary_dim}" if rotary_dim != size else "")
            + (" pairs" if interleaved else ""),
            moved + num_bytes(positions) + 4 * tokens * rotary_dim,
            lambda q=query, k=key, p=positions, t=table, i=interleaved: ops.rotary_embedding(q, k, p, t, i),
            lambda q, k, p, t, i=interleaved: ops.reference.rotary_embedding(q, k, p, t, i),
            (query.clone(), key.clone(), positions, table),
        )  # fmt: skip


def write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    blocks, offsets = slots // key_cache.shape[2], slots % key_cache.shape[2]
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


def caches(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, size, block_size in (
        (1, 8, 128, 16),
        (64, 8, 128, 16),
        (1024, 8, 128, 16),
        (32768, 8, 128, 16),
        (32768, 3, 64, 16),
        (131072, 8, 128, 16),
    ):
        qkv = torch.randn(tokens, 6 * heads, size).to(dtype)
        key, value = qkv[:, 4 * heads : 5 * heads], qkv[:, 5 * heads :]
        cache = torch.zeros(max(tokens, 4096) // block_size + 1, heads, block_size, size, dtype=dtype)
        # Blocks anywhere, a block's tokens together; the decode batch has one token a block.
        blocks = torch.randperm(cache.shape[0])
        slots = blocks[:tokens] * block_size
        if tokens > cache.shape[0]:
            slots = (blocks[: tokens // block_size, None] * block_size + torch.arange(block_size)).flatten()
        tensors = (key, value, cache, torch.zeros_like(cache), slots)
        yield Case(
            "reshape_and_cache",
            f"{tokens}x{heads}x{size}",
            2 * num_bytes(key, value) + num_bytes(slots),
            lambda tensors=tensors: ops.reshape_and_cache(*tensors),
            write,
            tensors,
        )
    for pairs in (1, 16, 256):
        cache = torch.zeros(2048, 8, 16, 128, dtype=dtype)
        tensors = (cache, torch.zeros_like(cache), torch.randperm(2048)[: 2 * pairs].view(-1, 2))
        yield Case(
            "copy_blocks",
            f"{pairs} of {cache[0].numel() * cache.element_size() // 1024} KiB",
            4 * pairs * num_bytes(cache[0]),
            lambda tensors=tensors: ops.copy_blocks(*tensors),
            lambda k, v, m: (k.index_copy_(0, m[:, 1], k[m[:, 0]]), v.index_copy_(0, m[:, 1], v[m[:, 0]])),
            tensors,
        )
    for pairs in (16, 256):
        cache = torch.zeros(2048, 8, 16, 128, dtype=dtype)
        host = torch.zeros(256, 8, 16, 128, dtype=dtype, device="cpu", pin_memory=True)
        mapping = torch.stack([torch.randperm(2048)[:pairs], torch.randperm(256)[:pairs]], dim=1)
        for name, src, dst, rows in (
            ("to host, list there", cache, host, mapping.cpu()),
            ("to host, list on GPU", cache, host, mapping),
            ("from host, list there", host, cache, mapping.flip(1).contiguous().cpu()),
            ("from host, list on GPU", host, cache, mapping.flip(1).contiguous()),
        ):
            pairs_as_list = rows.tolist()
            yield Case(
                "swap_blocks",
                f"{pairs} {name}",
                pairs * num_bytes(cache[0]),
                lambda s=src, d=dst, r=rows: ops.swap_blocks(s, d, r),
                lambda s, d, r: [d[j].copy_(s[i], non_blocking=True) for i, j in r],
                (src, dst, pairs_as_list),
            )


def embeddings(dtype: torch.dtype) -> Iterator[Case]:
    weight = torch.randn(128256, 4096).to(dtype)
    for tokens in (1, 64, 32768):
        ids = torch.randint(0, weight.shape[0], (tokens,))
        out = torch.empty(tokens, weight.shape[1]).to(dtype)
        yield Case(
            "embedding",
            f"{tokens}x{weight.shape[1]}",
            2 * num_bytes(out) + num_bytes(ids),
            lambda ids=ids, out=out: ops.embedding(ids, weight, out=out),
            F.embedding,
            (ids, weight),
        )


GROUPS = (norms, activations, rotary, caches, embeddings)


def measure(case: Case, ceiling: float, compile: bool) -> Result:
    compiled_us = None
    if compile and case.op not in ("copy_blocks", "swap_blocks"):
        torch._dynamo.reset()
        compiled = torch.compile(case.torch, dynamic=False)
        compiled_us = median_us(lambda: compiled(*case.tensors))
    pelton_us = median_us(case.pelton)
    tb_per_s = case.num_bytes / pelton_us / 1e6
    return Result(
        op=case.op,
        shape=case.shape,
        pelton_us=pelton_us,
        graph_us=graph_us(case.pelton),
        torch_us=median_us(lambda: case.torch(*case.tensors)),
        compiled_us=compiled_us,
        copy_us=copy_us(case.num_bytes),
        tb_per_s=tb_per_s,
        of_ceiling=tb_per_s / ceiling,
    )


@functools.cache
def copy_us(moved: int) -> float:
    """Of a plain copy that reads and writes `moved` bytes together."""
    source = torch.randint(-128, 127, (max(1, moved // 2),), dtype=torch.int8)
    target = torch.empty_like(source)
    return median_us(lambda: target.copy_(source))


@torch.inference_mode()
def host_us(call: Call, calls: int = 300, rounds: int = 15) -> float:
    """What one call costs the host while the queue of launches is not full."""
    torch.set_default_device(None)  # it is a mode, which costs each call several microseconds
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    torch.set_default_device("cuda")
    return 1e6 * statistics.median(times)


def overheads() -> dict[str, float]:
    """Microseconds of the host a call, in inference mode: through torch.ops and through pelton.ops."""
    raw = torch.ops.pelton
    x, weight, out = (torch.randn(1, 4096).bfloat16() for _ in range(3))
    weight, half = weight[0].clone(), torch.empty(1, 2048).bfloat16()
    qkv = torch.randn(1, 48, 128).bfloat16()
    query, key, value = qkv[:, :32], qkv[:, 32:40], qkv[:, 40:]
    positions, table = torch.zeros(1, dtype=torch.int64), torch.randn(64, 128)
    cache, cache_of_values = torch.zeros(8, 8, 16, 128).bfloat16(), torch.zeros(8, 8, 16, 128).bfloat16()
    none = x[:0]
    no_tokens = (query[:0], key[:0], positions[:0], table, False)
    no_keys = (key[:0], value[:0], cache, cache_of_values, positions[:0])
    calls: dict[str, Call] = {
        "empty Python function": lambda: None,
        "torch: x.fill_(0)": lambda: x.fill_(0),
        "torch: torch.add(x, x, out=out)": lambda: torch.add(x, x, out=out),
        "backend (no tensor, no launch)": raw.backend.default,
        "rms_norm of no rows (no launch)": lambda: raw.rms_norm.default(none, none, weight, 1e-6),
        "rotary_embedding of no tokens (no launch)": lambda: raw.rotary_embedding.default(*no_tokens),
        "reshape_and_cache of no tokens (no launch)": lambda: raw.reshape_and_cache.default(*no_keys),
        "rms_norm": lambda: raw.rms_norm.default(out, x, weight, 1e-6),
        "fused_add_rms_norm": lambda: raw.fused_add_rms_norm.default(x, out, weight, 1e-6),
        "silu_and_mul": lambda: raw.silu_and_mul.default(half, x),
        "rotary_embedding": lambda: raw.rotary_embedding.default(query, key, positions, table, False),
        "reshape_and_cache": lambda: raw.reshape_and_cache.default(
            key, value, cache, cache_of_values, positions
        ),
        "embedding": lambda: raw.embedding.default(out, positions, x),
        "ops.rms_norm with out": lambda: ops.rms_norm(x, weight, 1e-6, out=out),
        "ops.rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
    }
    return {name: host_us(call) for name, call in calls.items()}


def machine() -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver_and_runtime": f"CUDA {torch.version.cuda}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose 'op shape' matches")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out: it takes the longest"
    )
    parser.add_argument(
        "--overhead", action="store_true", help="what a call costs the host, and nothing else"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    options = parser.parse_args()
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": machine() | {"dtype": options.dtype}}
    print(report["machine"])
    if options.overhead:
        report["host_us"] = overheads()
        for name, us in report["host_us"].items():
            print(f"{name:42} {us:6.2f} µs")
    else:
        ceiling = 2**31 / copy_us(2**31) / 1e6
        print(f"copy ceiling {ceiling:.2f} TB/s")
        print(
            f"{'op':20} {'shape':24} {'pelton':>8} {'graph':>8} {'torch':>8} {'compiled':>8} {'copy':>8} {'TB/s':>6} ceiling"
        )
        results = []
        for group in GROUPS:
            for case in group(getattr(torch, options.dtype)):
                if not re.search(options.only, f"{case.op} {case.shape}"):
                    continue
                r = measure(case, ceiling, not options.no_compile)
                results.append(asdict(r))
                compiled = f"{r.compiled_us:8.1f}" if r.compiled_us else " " * 8
                slower = "  SLOWER" if r.compiled_us and r.pelton_us > 1.01 * r.compiled_us else ""
                print(
                    f"{r.op:20} {r.shape:24} {r.pelton_us:8.1f} {r.graph_us:8.1f} {r.torch_us:8.1f} {compiled} {r.copy_us:8.1f} "
                    f"{r.tb_per_s:6.2f} {r.of_ceiling:6.0%}{slower}",
                    flush=True,
                )
        report |= {"copy_ceiling_tb_per_s": ceiling, "results": results}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
