"""Products with 4-bit weights on the CPU beside 16-bit ones, in one process.

    python benchmarks/cpu_quant.py --threads 1 --rows 1 32 512 --json results.json
    python benchmarks/cpu_quant.py --bits 8 --no-vnni

Four ways to compute the same layer take turns: quant_linear with activations in int8 and in fp32, linear with
bfloat16 weights, and torch's bfloat16 product. Activations are bfloat16. Calls go around several copies of the
weights, as a model's layers do. Times are medians (CPU time with one thread), ratios medians over the pairs; GB/s
counts the quantized weights and scales against the reading speed of the same run. Whole models beside llama.cpp:
benchmarks/engine.py --dtype int4.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from ops import SAMPLE_SECONDS, SMOLLM2, copies_of, elements, machine, measure_ceilings, seconds_of
from rich.console import Console
from rich.table import Table

from pelton import ops

WAYS = ("int8", "fp32", "linear bf16", "torch bf16")
SHAPES = {**SMOLLM2, "4096": (4096, 4096), "down 8B": (4096, 14336)}


def ways(
    out_features: int, in_features: int, rows: int, bits: int, group_size: int
) -> tuple[list[Callable[[int], object]], int]:
    """A call of each way, and the bytes of the quantized weight."""
    q = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8)
    groups = -(-in_features // group_size)
    scales = ops.pack_quant_groups((torch.rand(groups, out_features) * 0.01).half())
    first = ops.pack_quant_weight(q, bits)
    packed = [first.clone() for _ in range(copies_of(elements(first)))]
    plain = torch.randn(out_features, in_features).bfloat16()
    plains = [plain.clone() for _ in range(copies_of(elements(plain)))]
    panels = [ops.pack_linear_weight(w) for w in plains]
    x, out = torch.randn(rows, in_features).bfloat16(), torch.empty(rows, out_features).bfloat16()

    def quantized(int8: bool) -> Callable[[int], object]:
        return lambda i: ops.quant_linear(
            x,
            packed[i % len(packed)],
            scales,
            bits=bits,
            group_size=group_size,
            out_features=out_features,
            int8=int8,
            out=out,
        )

    return [
        quantized(True),
        quantized(False),
        lambda i: ops.linear(x, panels[i % len(panels)], out_features=out_features, out=out),
        lambda i: F.linear(x, plains[i % len(plains)]),
    ], elements(first, scales)


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 32, 512])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--no-vnni", action="store_true", help="as on a CPU without these instructions")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.ops.pelton.quant_allow_vnni(not options.no_vnni)
    console, ceilings = Console(), measure_ceilings()
    host = machine() | {"bits": options.bits, "vnni": bool(torch.ops.pelton.quant_uses_vnni())}
    console.print(", ".join(f"{key} {value}" for key, value in host.items()))
    console.print(
        f"ceilings: read {ceilings.read_gb_per_s:.1f} GB/s, product {ceilings.product_gflops:.0f} GFLOP/s"
    )
    table = Table(
        "layer", "rows", *(f"{way} us" for way in WAYS), "GB/s", "GFLOP/s", "linear / int8", "torch / int8"
    )
    results = []
    for name, rows in itertools.product(options.shapes, options.rows):
        out_features, in_features = SHAPES[name]
        if rows * out_features > 512 * 14336:
            continue
        calls, num_bytes = ways(out_features, in_features, rows, options.bits, options.group_size)
        counts, samples = [], []
        numbers = itertools.count()
        for call in calls:
            seconds_of(call, numbers, 1)
            counts.append(max(1, round(SAMPLE_SECONDS / min(seconds_of(call, numbers, 1) for _ in range(3)))))
        for _ in range(options.samples):
            samples.append([seconds_of(call, numbers, n) for call, n in zip(calls, counts, strict=True)])
        times = [statistics.median(column) for column in zip(*samples, strict=True)]
        ratios = [statistics.median(s[way] / s[0] for s in samples) for way in (2, 3)]
        flops = 2 * rows * out_features * in_features
        result = {
            "layer": name,
            "shape": [out_features, in_features],
            "rows": rows,
            "us": dict(zip(WAYS, (round(t * 1e6, 2) for t in times), strict=True)),
            "gb_per_s": round(num_bytes / times[0] / 1e9, 2),
            "gflops": round(flops / times[0] / 1e9, 1),
            "linear_by_int8": round(ratios[0], 3),
            "torch_by_int8": round(ratios[1], 3),
        }
        results.append(result)
        table.add_row(
            f"{name} {out_features}x{in_features}",
            str(rows),
            *(f"{t * 1e6:.1f}" for t in times),
            f"{result['gb_per_s']:.1f}",
            f"{result['gflops']:.0f}",
            *(f"{r:.2f} x" for r in ratios),
        )
    console.print(table)
    if options.json:
        report = {"machine": host, "ceilings": vars(ceilings), "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
