"""Every operator beside torch and the machine's ceilings, in one process.

    python benchmarks/ops.py                                  # all, float32
    python benchmarks/ops.py --only 'linear|attention' --dtype bfloat16 --json results.json

A sample calls one side often enough to last a millisecond; the two sides take turns, so that a change in
the machine's speed meets both. Times are medians over the samples, ratios medians over the pairs. Calls
go around several copies of their big operands (weights, caches), as a model's layers do, so that these
come from memory and not from the second-level cache.

Threads wait for each other at the end of a call, which on a machine that is busy with something else takes
longer than the call: use --threads 1 there. Times are CPU time then, without the waiting.

The ceilings are measured in the same run: reading and copying a large buffer, and the fastest float32
product of two matrices that torch manages. "of ceiling" is the part of the nearer one: bytes that must
move against the reading speed, or multiplications against the product's.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pelton import ops

Call = Callable[[int], object]  # takes the number of the copy to use

SAMPLE_SECONDS = 1e-3
FOOTPRINT = 96 << 20  # bytes of big operands to go around
SMOLLM2 = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}


@dataclass(frozen=True)
class Case:
    op: str
    shape: str
    pelton: Call
    torch: Call
    copies: int
    num_bytes: int  # that must be read or written
    flops: int = 0


@dataclass(frozen=True)
class Result:
    op: str
    shape: str
    pelton_us: float
    torch_us: float
    speedup: float
    gb_per_s: float
    gflops: float
    of_ceiling: float


@dataclass(frozen=True)
class Ceilings:
    read_gb_per_s: float
    copy_gb_per_s: float
    product_gflops: float


def copies_of(num_bytes: int) -> int:
    return max(1, min(16, FOOTPRINT // max(1, num_bytes)))


def elements(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 576), (32, 576), (512, 576), (512, 4096)):
        x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
        weight, out = torch.randn(width).to(dtype), torch.empty(rows, width, dtype=dtype)

        def add_norm(_: int, x: Tensor = x, r: Tensor = residual, w: Tensor = weight) -> None:
            F.rms_norm(r.add_(x), (x.shape[1],), w, 1e-5)

        yield Case(
            "rms_norm",
            f"{rows}x{width}",
            lambda _, x=x, w=weight, o=out: ops.rms_norm(x, w, 1e-5, out=o),
            lambda _, x=x, w=weight: F.rms_norm(x, (x.shape[1],), w, 1e-5),
            1,
            elements(x, out),
        )
        x2 = x * 1e-6  # stays small although it is added again and again
        yield Case(
            "fused_add_rms_norm",
            f"{rows}x{width}",
            lambda _, x=x2, r=residual, w=weight: ops.fused_add_rms_norm(x, r, w, 1e-5),
            add_norm,
            1,
            2 * elements(x, residual),
        )


def activation_cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 1536), (32, 1536), (512, 1536)):
        x, out = torch.randn(rows, 2 * width).to(dtype), torch.empty(rows, width, dtype=dtype)
        yield Case(
            "silu_and_mul",
            f"{rows}x{width}",
            lambda _, x=x, o=out: ops.silu_and_mul(x, out=o),
            lambda _, x=x, w=width: F.silu(x[:, :w]) * x[:, w:],
            1,
            elements(x, out),
        )
        yield Case(
            "gelu_and_mul",
            f"{rows}x{width}",
            lambda _, x=x, o=out: ops.gelu_and_mul(x, "tanh", out=o),
            lambda _, x=x, w=width: F.gelu(x[:, :w], approximate="tanh") * x[:, w:],
            1,
            elements(x, out),
        )


def rotary_cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in (1, 32, 512):
        query, key = torch.randn(tokens, 9, 64).to(dtype), torch.randn(tokens, 3, 64).to(dtype)
        positions, table = torch.arange(tokens), torch.rand(2048, 64)

        def rotate(
            _: int, q: Tensor = query, k: Tensor = key, p: Tensor = positions, t: Tensor = table
        ) -> None:
            half = t[p].to(q.dtype)
            cos, sin = (x.repeat(1, 2).unsqueeze(1) for x in half.chunk(2, dim=1))
            for x in (q, k):
                first, second = x.chunk(2, dim=-1)
                _ = x * cos + torch.cat((-second, first), dim=-1) * sin

        yield Case(
            "rotary_embedding",
            f"{tokens}x(9+3)x64",
            lambda _, q=query, k=key, p=positions, t=table: ops.rotary_embedding(q, k, p, t),
            rotate,
            1,
            2 * elements(query, key),
        )


def cache_cases(dtype: torch.dtype) -> Iterator[Case]:
    blocks, block_size, heads, size = 512, 16, 3, 64
    for tokens in (1, 32, 512):
        key, value = torch.randn(tokens, heads, size).to(dtype), torch.randn(tokens, heads, size).to(dtype)
        caches = [torch.zeros(blocks, heads, block_size, size, dtype=dtype) for _ in range(2)]
        slots = torch.randperm(blocks * block_size)[:tokens]

        def scatter(
            _: int, k: Tensor = key, v: Tensor = value, c: list[Tensor] = caches, s: Tensor = slots
        ) -> None:
            c[0][s // block_size, :, s % block_size] = k
            c[1][s // block_size, :, s % block_size] = v

        yield Case(
            "reshape_and_cache",
            f"{tokens} tokens",
            lambda _, k=key, v=value, c=caches, s=slots: ops.reshape_and_cache(k, v, c[0], c[1], s),
            scatter,
            1,
            2 * elements(key, value),
        )
    pairs = torch.randperm(blocks)[:64].view(32, 2)

    def copy(_: int) -> None:
        for cache in caches:
            cache[pairs[:, 1]] = cache[pairs[:, 0]]

    moved = 2 * 32 * heads * block_size * size * key.element_size()
    yield Case("copy_blocks", "32 blocks", lambda _: ops.copy_blocks(*caches, pairs), copy, 1, 2 * moved)
    yield Case(
        "swap_blocks",
        "32 blocks",
        lambda _: ops.swap_blocks(caches[0], caches[1], pairs),
        lambda _: caches[1].index_put_((pairs[:, 1],), caches[0][pairs[:, 0]]),
        1,
        moved,
    )


def embedding_cases(dtype: torch.dtype) -> Iterator[Case]:
    weight = torch.randn(49152, 576).to(dtype)
    for tokens in (1, 32, 512):
        ids, out = torch.randint(0, 49152, (tokens,)), torch.empty(tokens, 576, dtype=dtype)
        yield Case(
            "embedding",
            f"{tokens} of 49152x576",
            lambda _, i=ids, o=out: ops.embedding(i, weight, out=o),
            lambda _, i=ids: F.embedding(i, weight),
            1,
            2 * elements(out),
        )


def linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """``dtype`` is the weight's; x is float32, as in an engine that computes in float32. torch gets x in ``dtype``."""
    for name, (out_features, in_features) in (SMOLLM2 | {"4096": (4096, 4096)}).items():
        one = torch.randn(out_features, in_features).to(dtype)
        weights = [one.clone() for _ in range(copies_of(elements(one)))]
        packed = [ops.pack_linear_weight(w) for w in weights]
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512):
            if rows * out_features > 128 * 49152:
                continue
            x, out = torch.randn(rows, in_features), torch.empty(rows, out_features)
            x_narrow = x.to(dtype)
            yield Case(
                "linear",
                f"{name} {out_features}x{in_features} M={rows}",
                lambda i, x=x, p=packed, o=out: ops.linear(x, p[i], out_features=o.shape[1], out=o),
                lambda i, x=x_narrow, w=weights: F.linear(x, w[i]),
                len(weights),
                elements(weights[0], x, out),
                2 * rows * out_features * in_features,
            )


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """torch gets keys and values that lie in order, one tensor a batch: it has no paged cache."""
    for name, batch, queries, context, heads, kv_heads, size in (
        ("decode", 1, 1, 512, 9, 3, 64),
        ("decode", 1, 1, 2048, 9, 3, 64),
        ("decode", 32, 1, 256, 9, 3, 64),
        ("decode", 1, 1, 8192, 32, 8, 128),
        ("decode", 8, 1, 1024, 32, 8, 128),
        ("prefill", 1, 128, 128, 9, 3, 64),
        ("prefill", 1, 2048, 2048, 9, 3, 64),
        ("prefill", 1, 1024, 1024, 32, 8, 128),
        ("chunk", 1, 256, 2048, 9, 3, 64),
    ):
        block_size = 16
        num_blocks = batch * -(-context // block_size)
        shape = (num_blocks + 1, kv_heads, block_size, size)
        one = torch.randn(shape).to(dtype)
        copies = copies_of(2 * elements(one))
        keys, values = [one.clone() for _ in range(copies)], [one.clone() for _ in range(copies)]
        plain = [torch.randn(batch, kv_heads, context, size).to(dtype) for _ in range(2 * copies)]
        tables = (torch.randperm(num_blocks) + 1).int().view(batch, -1)
        starts = torch.arange(0, batch * queries + 1, queries).int()
        lengths = torch.full((batch,), context).int()
        query = torch.randn(batch * queries, heads, size).to(dtype)
        query_plain = torch.randn(batch, heads, queries, size).to(dtype)
        out = torch.empty_like(query)
        workspace = torch.empty(ops.paged_attention_workspace_size(batch * queries, heads, size))
        hidden = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        mask = hidden if 1 < queries < context else None

        def paged(
            i: int,
            q: Tensor = query,
            k: list[Tensor] = keys,
            v: list[Tensor] = values,
            indices: tuple[Tensor, Tensor, Tensor] = (starts, lengths, tables),
            o: Tensor = out,
            w: Tensor = workspace,
        ) -> None:
            ops.paged_attention(q, k[i], v[i], *indices, q.shape[2] ** -0.5, out=o, workspace=w)

        def contiguous(
            i: int,
            q: Tensor = query_plain,
            kv: list[Tensor] = plain,
            mask: Tensor | None = mask,
            causal: bool = queries == context,
        ) -> None:
            F.scaled_dot_product_attention(
                q, kv[2 * i], kv[2 * i + 1], attn_mask=mask, is_causal=causal, enable_gqa=True
            )

        pairs = sum(range(context - queries + 1, context + 1))
        yield Case(
            f"attention {name}",
            f"{batch}x{queries} of {context}, {heads}/{kv_heads}x{size}",
            paged,
            contiguous,
            copies,
            2 * batch * context * kv_heads * size * query.element_size() + 2 * elements(query),
            4 * batch * pairs * heads * size,
        )


GROUPS = (
    norm_cases,
    rotary_cases,
    activation_cases,
    cache_cases,
    embedding_cases,
    linear_cases,
    attention_cases,
)


def seconds_of(call: Call, numbers: Iterator[int], repeats: int) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(repeats):
        call(next(numbers))
    return max(1e-9, clock() - start) / repeats


def measure(case: Case, seconds: float, ceilings: Ceilings) -> Result:
    numbers = itertools.cycle(range(case.copies))
    sides = (case.pelton, case.torch)
    repeats = []
    for call in sides:
        seconds_of(call, numbers, 2)
        once = min(seconds_of(call, numbers, 1) for _ in range(5))
        repeats.append(max(1, round(SAMPLE_SECONDS / once)))
    samples: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[0]) < 3:
        for call, count, times in zip(sides, repeats, samples, strict=True):
            times.append(seconds_of(call, numbers, count))
    mine = statistics.median(samples[0])
    gb_per_s, gflops = case.num_bytes / mine / 1e9, case.flops / mine / 1e9
    return Result(
        op=case.op,
        shape=case.shape,
        pelton_us=mine * 1e6,
        torch_us=statistics.median(samples[1]) * 1e6,
        speedup=statistics.median(t / p for p, t in zip(*samples, strict=True)),
        gb_per_s=gb_per_s,
        gflops=gflops,
        of_ceiling=max(gb_per_s / ceilings.read_gb_per_s, gflops / ceilings.product_gflops),
    )


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 26)
    target = torch.empty_like(source)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def best(function: Callable[[], object]) -> float:
        function()
        return min(seconds_of(lambda _: function(), itertools.repeat(0), 1) for _ in range(7))

    num_bytes = elements(source)
    return Ceilings(
        read_gb_per_s=num_bytes / best(source.sum) / 1e9,
        copy_gb_per_s=2 * num_bytes / best(lambda: target.copy_(source)) / 1e9,
        product_gflops=2 * 1024**3 / best(lambda: a @ b) / 1e9,
    )


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor()


def machine() -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # of the last minute: above 1, two threads wait for each other
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "library": "avx512" if ops.linear_panel_width() == 32 else "avx2",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose 'op shape' matches")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="threads of both sides (default: torch's)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of sampling a case (default: 0.3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    console = Console()
    ceilings = measure_ceilings()
    host = machine() | {"dtype": options.dtype}
    console.print(", ".join(f"{key} {value}" for key, value in host.items()))
    console.print(
        f"ceilings: read {ceilings.read_gb_per_s:.1f} GB/s, copy {ceilings.copy_gb_per_s:.1f} GB/s, "
        f"float32 product {ceilings.product_gflops:.0f} GFLOP/s"
    )
    results = []
    for group in GROUPS:
        for case in group(getattr(torch, options.dtype)):
            if re.search(options.only, f"{case.op} {case.shape}"):
                with console.status(f"{case.op} {case.shape}"):
                    results.append(measure(case, options.seconds, ceilings))
    table = Table("op", "shape")
    for heading in ("pelton µs", "torch µs", "torch / pelton", "GB/s", "GFLOP/s", "of ceiling"):
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(
            r.op,
            r.shape,
            f"{r.pelton_us:.1f}",
            f"{r.torch_us:.1f}",
            f"[{'green' if r.speedup >= 1 else 'red'}]{r.speedup:.2f}[/]",
            f"{r.gb_per_s:.1f}",
            f"{r.gflops:.0f}" if r.gflops else "",
            f"{r.of_ceiling:.0%}",
        )
    console.print(table)
    if options.json:
        report = {"machine": host, "ceilings": asdict(ceilings), "results": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
