"""Sampling on a GPU beside torch: one token per row, by what cuts the distribution and how it is spread.

    python benchmarks/gpu_sampling.py
    python benchmarks/gpu_sampling.py --rows 1,64 --vocab 128256 --only 'top_p' --json results.json

Times are medians of `triton.testing.do_bench` in microseconds, the second-level cache flushed before each call;
"graph" is the same operator replayed in a CUDA graph of twenty calls (no flush), as the engine's decode steps run.
"peaked" logits have a spread like a language model's (a few tokens matter), "flat" ones are standard normal
(top_p = 0.9 keeps tens of thousands). torch's side is what engines without a kernel do: softmax, sort, cumulative
sum, masks, multinomial; for top_k alone topk in place of the sort. "reads" is the time to read the logits once at
4.28 TB/s, the copy ceiling of an H200.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import graph_us, median_us
from torch import Tensor

from pelton import ops

CEILING = 4.28e12
SPREADS = {"peaked": 4.0, "flat": 1.0}
CASES: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_k_2000_top_p": {"temperature": 0.8, "top_k": 2000, "top_p": 0.9},
}


def with_pelton(logits: Tensor, options: dict[str, float]) -> Callable[[], Tensor]:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    workspace = torch.empty(ops.sample_workspace_size(rows, vocab), device="cuda")
    if not options:
        return lambda: ops.greedy_sample(logits, out=out, workspace=workspace)
    tensors = {
        name: torch.full(
            (rows,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device="cuda"
        )
        for name, value in options.items()
    }
    seeds, positions = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    return lambda: ops.sample(
        logits, seeds=seeds, positions=positions, out=out, workspace=workspace, **tensors
    )


def with_torch(logits: Tensor, options: dict[str, float]) -> Callable[[], Tensor]:
    if not options:
        return lambda: logits.argmax(-1)

    def call() -> Tensor:
        x = logits / options["temperature"]
        if "top_k" in options and "top_p" not in options:
            values, ids = x.topk(int(options["top_k"]), dim=-1)
            return ids.gather(1, values.softmax(-1).multinomial(1)).squeeze(1)
        if "top_k" in options or "top_p" in options:
            values, ids = x.sort(dim=-1, descending=True)
            if "top_k" in options:
                values[:, int(options["top_k"]) :] = float("-inf")
            probabilities = values.softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            probabilities[before > options["top_p"]] = 0
            return ids.gather(1, probabilities.multinomial(1)).squeeze(1)
        probabilities = x.softmax(-1)
        if "min_p" in options:
            floor = options["min_p"] * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        return probabilities.multinomial(1).squeeze(1)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,64,256", help="numbers of rows")
    parser.add_argument("--vocab", default="32000,128256,151936", help="sizes of the vocabulary")
    parser.add_argument("--only", default="", help="regular expression over case/spread")
    parser.add_argument("--no-torch", action="store_true", help="time the operators alone")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    results: list[dict[str, Any]] = []
    print(f"{'case':28}{'rows':>5}{'vocab':>8}{'pelton':>9}{'graph':>8}{'torch':>10}{'reads':>8}")
    for vocab in map(int, arguments.vocab.split(",")):
        for rows in map(int, arguments.rows.split(",")):
            for spread, factor in SPREADS.items():
                torch.manual_seed(0)
                logits = torch.randn(rows, vocab, device="cuda") * factor
                if spread == "flat" and vocab != 128256 and "flat" not in arguments.only:
                    continue
                for case, options in CASES.items():
                    name = f"{case}/{spread}"
                    if not re.search(arguments.only, name) or (spread == "flat" and "top_p" not in options):
                        continue
                    call = with_pelton(logits, options)
                    result: dict[str, Any] = {"case": name, "rows": rows, "vocab": vocab}
                    result["pelton_us"] = round(median_us(call, warmup=10, rep=40), 1)
                    result["graph_us"] = round(graph_us(call), 1)
                    result["torch_us"] = None
                    if not arguments.no_torch:
                        result["torch_us"] = round(
                            median_us(with_torch(logits, options), warmup=10, rep=40), 1
                        )
                    result["reads_us"] = round(1e6 * logits.numel() * 4 / CEILING, 1)
                    results.append(result)
                    print(
                        f"{name:28}{rows:5}{vocab:8}{result['pelton_us']:9}{result['graph_us']:8}"
                        f"{result['torch_us'] or '-':>10}{result['reads_us']:8}",
                        flush=True,
                    )
    if arguments.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "method": "do_bench median, warmup 10, rep 40",
        }
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
