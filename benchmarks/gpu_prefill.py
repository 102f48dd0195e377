"""Prefill attention over the paged cache on a GPU, beside torch's kernels and what others reach.

    python benchmarks/gpu_prefill.py [--json FILE] [--rounds N] [CASE ...]

A case is operations over time: two products of 2 x head size operations for each pair of a query and a key it sees.
`anchor` is the best of FlashAttention-3, FlashInfer and cuDNN on an H200, measured apart. `flash` and `cudnn` are
torch's own attention in this run, on the same keys and values laid out contiguously, without pages, which only whole
prompts of one length allow. The implementations run in turns, so that the GPU's clock is the same for all of them; the
L2 cache is emptied before each call; times are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pelton import ops

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Case:
    queries: tuple[int, ...]
    context: tuple[int, ...] = ()  # positions before the queries; none when empty
    anchor: float | None = None  # TFLOP/s
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    window: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def lengths(self) -> list[int]:
        return [q + c for q, c in zip(self.queries, self.context or (0,) * len(self.queries), strict=True)]

    @property
    def name(self) -> str:
        q, contexts = self.queries, sorted(set(self.context))
        text = f"h{self.head_size} " + (f"{len(q)}x{q[0]}" if len(set(q)) == 1 else f"{len(q)} to {max(q)}")
        if contexts:
            text += f" on {contexts[-1]}" if len(contexts) == 1 else f" on up to {contexts[-1]}"
        if (self.heads, self.kv_heads) != (32, 8):
            text += f" {self.heads}/{self.kv_heads}"
        for label, value, usual in (("page", self.block_size, 16), ("window", self.window, 0)):
            text += f" {label}={value}" if value != usual else ""
        return text + (f" {str(self.dtype).removeprefix('torch.')}" if self.dtype != torch.bfloat16 else "")

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, in all sequences."""
        total = 0
        for queries, length in zip(self.queries, self.lengths, strict=True):
            seen = torch.arange(length - queries + 1, length + 1, device="cpu")
            total += int(seen.clamp(max=self.window or length).sum())
        return total


MIXED = (4000, 1, 700, 64, 1, 2500, 1, 300)
CASES = [
    Case((1024,), anchor=250),
    Case((4096,), anchor=527),
    Case((16384,), anchor=599),
    Case((1024,), anchor=168, head_size=64),
    Case((4096,), anchor=377, head_size=64),
    Case((16384,), anchor=472, head_size=64),
    Case((512,)),
    Case((2048,)),
    Case((8192,)),
    Case((1024,) * 8),
    Case((256,) * 32),
    Case((512,), (7680,)),
    Case((2048,), (30720,)),
    Case((2048,) * 4, (6144,) * 4),
    Case(MIXED, (0, 900, 1300, 9000, 30, 0, 7000, 0)),
    Case((4096,), kv_heads=32),
    Case((4096,), kv_heads=1),
    Case((4096,), heads=28, kv_heads=4),
    Case((4096,), block_size=8),
    Case((4096,), block_size=64),
    Case((16384,), window=4096),
    Case((4096,), dtype=torch.float16),
    Case((4096,), head_size=96),
    Case((4096,), head_size=256),
]


def times(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds, the median of each; in every round each runs once, in a new order."""
    cache = torch.empty(256 << 20, dtype=torch.int8)
    found: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        events = []
        for name in random.sample(list(functions), len(functions)):
            cache.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            functions[name]()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            found[name].append(begin.elapsed_time(end))
    return {name: median(values) for name, values in found.items()}


def measure(case: Case, rounds: int) -> dict[str, object]:
    blocks = [-(-n // case.block_size) for n in case.lengths]
    shape = (sum(blocks), case.kv_heads, case.block_size, case.head_size)
    key_cache, value_cache = (torch.randn(shape, dtype=case.dtype) for _ in range(2))
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, ids in zip(tables, torch.randperm(sum(blocks), dtype=torch.int32).split(blocks), strict=True):
        row[: len(ids)] = ids
    query = torch.randn(sum(case.queries), case.heads, case.head_size, dtype=case.dtype)
    starts = torch.tensor((0, *case.queries)).cumsum(0).int()
    seq_lens = torch.tensor(case.lengths, dtype=torch.int32)
    out = torch.empty_like(query)
    size = ops.paged_attention_workspace_size(len(query), case.heads, case.head_size)
    workspace = torch.empty(size, dtype=torch.float32)

    def pelton() -> None:
        ops.paged_attention(
            query,
            key_cache,
            value_cache,
            starts,
            seq_lens,
            tables,
            case.head_size**-0.5,
            case.window,
            out=out,
            workspace=workspace,
        )

    functions: dict[str, Callable[[], object]] = {"pelton": pelton}
    if not case.context and not case.window and len(set(case.queries)) == 1:
        length = case.queries[0]
        q = query.view(len(blocks), length, case.heads, case.head_size).transpose(1, 2)
        k, v = (
            cache[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()
            for cache in (key_cache, value_cache)
        )

        def sdpa(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )

        pelton()
        want = sdpa(SDPBackend.FLASH_ATTENTION).transpose(1, 2).reshape(out.shape)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        for name, backend in BACKENDS.items():
            functions[name] = lambda backend=backend: sdpa(backend)
    found = times(functions, rounds)
    operations = 4 * case.head_size * case.heads * case.pairs
    row: dict[str, object] = {"case": case.name, "us": round(1e3 * found["pelton"], 1), "anchor": case.anchor}
    return row | {name: round(operations / time * 1e-9) for name, time in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=30, help="calls of each implementation (default: 30)")
    parser.add_argument("cases", nargs="*", help="parts of the names of the cases to run (default: all)")
    arguments = parser.parse_args()
    if ops.backend() != "cuda":
        sys.exit(f"the loaded library's kernels are for {ops.backend()}; this benchmark needs CUDA")
    torch.set_default_device("cuda")
    rows = []
    print(f"{'TFLOP/s':44}{'us':>10}{'pelton':>8}{'anchor':>8}{'cudnn':>8}{'flash':>8}")
    for case in CASES:
        if arguments.cases and not any(part in case.name for part in arguments.cases):
            continue
        row = measure(case, arguments.rounds)
        rows.append(row | {"shape": asdict(case) | {"dtype": str(case.dtype)}})
        columns = "".join(f"{row.get(name) or '':>8}" for name in ("pelton", "anchor", "cudnn", "flash"))
        print(f"{row['case']:44}{row['us']:>10}{columns}", flush=True)
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
