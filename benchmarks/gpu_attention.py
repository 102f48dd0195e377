"""Decode attention over the paged cache on a GPU, beside what others reach.

    python benchmarks/gpu_attention.py [--json FILE] [--repeat MILLISECONDS] [CASE ...]

A case is bytes over time: keys and values are read once each. Times are medians of `triton.testing.do_bench`, which
empties the L2 cache before each call. `anchor` is FlashInfer 0.5.3 on an H200 (the better of its two kernels, measured
apart); `sdpa` is torch's own attention in this run on the same keys and values laid out contiguously, without pages,
which only sequences of one length allow.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_timing import median_us
from torch import Tensor

from pelton import ops

COPY_CEILING = 4.28  # TB/s, device-to-device copy on an H200


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    batch: int
    context: int
    anchor: float | None = None  # µs
    dtype: torch.dtype = torch.bfloat16
    head_size: int = 128
    block_size: int = 16
    window: int = 0
    ragged: bool = False  # lengths between 1 and `context`

    @property
    def name(self) -> str:
        text = f"{self.heads}/{self.kv_heads} {self.batch}x{self.context}"
        if self.dtype is not torch.bfloat16:
            text += f" {str(self.dtype).removeprefix('torch.')}"
        for label, value, usual in (
            ("head", self.head_size, 128),
            ("page", self.block_size, 16),
            ("window", self.window, 0),
        ):
            if value != usual:
                text += f" {label}={value}"
        return text + (" ragged" if self.ragged else "")

    def lengths(self) -> list[int]:
        choice = random.Random(self.batch)
        return [choice.randint(1, self.context) if self.ragged else self.context for _ in range(self.batch)]


CASES = [
    Case(32, 8, 1, 4096, 18.0),
    Case(32, 8, 1, 32768, 53.3),
    Case(32, 8, 8, 2048, 35.3),
    Case(32, 8, 64, 2048, 142.7),
    Case(32, 8, 256, 1024, 274.5),
    Case(32, 32, 1, 32768, 139.9),
    Case(32, 32, 8, 2048, 79.9),
    Case(32, 32, 64, 2048, 497.6),
    Case(32, 8, 1, 128),
    Case(32, 8, 64, 2048, dtype=torch.float16),
    Case(32, 8, 64, 2048, block_size=32),
    Case(32, 8, 64, 2048, block_size=8),
    Case(32, 8, 64, 2048, head_size=64),
    Case(32, 8, 64, 2048, head_size=96),
    Case(32, 8, 64, 2048, head_size=256),
    Case(32, 8, 64, 8192, window=1024),
    Case(32, 8, 64, 4096, ragged=True),
    Case(32, 8, 256, 2048, ragged=True),
    Case(32, 2, 64, 4096),
    Case(32, 8, 8, 2048, dtype=torch.float32),
]


def measure(case: Case, repeat: int) -> dict[str, object]:
    lengths = case.lengths()
    blocks = [-(-n // case.block_size) for n in lengths]
    shape = (sum(blocks), case.kv_heads, case.block_size, case.head_size)
    key_cache, value_cache = (torch.randn(shape, dtype=case.dtype) for _ in range(2))
    order = torch.randperm(sum(blocks), dtype=torch.int32)
    tables = torch.zeros(case.batch, max(blocks), dtype=torch.int32)
    used = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[used : used + count]
        used += count
    query = torch.randn(case.batch, case.heads, case.head_size, dtype=case.dtype)
    starts = torch.arange(case.batch + 1, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    out = torch.empty_like(query)
    workspace = torch.empty(ops.paged_attention_workspace_size(case.batch, case.heads, case.head_size))

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

    visible = sum(min(n, case.window) if case.window else n for n in lengths)
    num_bytes = 2 * visible * case.kv_heads * case.head_size * query.itemsize
    time = median_us(pelton, rep=repeat)
    row: dict[str, object] = {
        "case": case.name,
        "us": round(time, 1),
        "TB/s": round(num_bytes / time * 1e-6, 2),
        "of_copy": round(num_bytes / time * 1e-6 / COPY_CEILING, 3),
        "anchor_us": case.anchor,
        "sdpa_us": None,
    }
    if not case.ragged and not case.window:

        def contiguous(cache: Tensor) -> Tensor:  # [batch, kv_heads, context, head_size]
            pages = cache[tables.long()].transpose(1, 2).flatten(2, 3)
            return pages[:, :, : case.context].contiguous()

        keys, values = contiguous(key_cache), contiguous(value_cache)
        q = query.unsqueeze(2)
        want = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        torch.testing.assert_close(out, want.squeeze(2), rtol=2e-2, atol=2e-2)
        row["sdpa_us"] = round(
            median_us(
                lambda: torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True),
                rep=repeat,
            ),
            1,
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeat", type=int, default=80, help="milliseconds a case (default: 80)")
    parser.add_argument("cases", nargs="*", help="parts of the names of the cases to run (default: all)")
    arguments = parser.parse_args()
    if ops.backend() != "cuda":
        sys.exit(f"the loaded library's kernels are for {ops.backend()}; this benchmark needs CUDA")
    torch.set_default_device("cuda")
    chosen = [c for c in CASES if not arguments.cases or any(part in c.name for part in arguments.cases)]
    rows = []
    print(f"{'case':36}{'us':>9}{'TB/s':>7}{'of copy':>9}{'anchor':>9}{'sdpa':>9}")
    for case in chosen:
        row = measure(case, arguments.repeat)
        rows.append(row | {"shape": asdict(case) | {"dtype": str(case.dtype)}})
        print(
            f"{row['case']:36}{row['us']:9.1f}{row['TB/s']:7.2f}{row['of_copy']:9.3f}"
            f"{row['anchor_us'] or '':>9}{row['sdpa_us'] or '':>9}"
        )
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
