"""Products with quantized weights on a GPU, beside cuBLAS with 16-bit weights in the same run.

    python benchmarks/gpu_quant.py
    python benchmarks/gpu_quant.py --shape 4096x6144 --tokens 1,16,64 --json results.json
    python benchmarks/gpu_quant.py --bits 8 --group-size 32 --zeros --dtype bfloat16

Times are medians of `triton.testing.do_bench` in microseconds, the second-level cache flushed before each call. `pelton`
is `marlin_gemm`, `cublas` torch's product with the same weights dequantized. The anchors, measured apart on an H200,
are vLLM 0.33's Marlin and CUTLASS 4.2's mixed-type GEMM (4 bit, group 128, symmetric); each ratio is another's time
over ours, so that more than 1 means that ours is shorter. `error` is the largest difference from the product in
float64 over the largest result, of both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu_timing import median_us
from torch import Tensor

from pelton import ops

TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
#: K x N: tokens: microseconds
MARLIN: dict[tuple[int, int], dict[int, float]] = {
    (4096, 6144): {1: 14.6, 16: 15.3, 64: 25.2, 1024: 145.1},
    (4096, 28672): {1: 36.9, 16: 36.2, 64: 53.6, 256: 174.0, 4096: 2756.9},
    (14336, 4096): {1: 27.5, 16: 27.8, 64: 41.2, 1024: 320.3},
    (8192, 8192): {1: 23.5, 16: 23.4, 64: 44.6, 4096: 1504.2},
}
CUTLASS: dict[tuple[int, int], dict[int, float]] = {
    (4096, 6144): {16: 32.4, 64: 34.8, 128: 37.2, 256: 43.5, 1024: 105.4, 4096: 314.3},
    (4096, 28672): {16: 53.7, 64: 65.7, 128: 68.1, 256: 104.8, 1024: 346.5, 4096: 1553.8},
    (8192, 8192): {16: 53.8, 64: 59.0, 128: 66.0, 256: 76.9, 1024: 196.1, 4096: 841.0},
    (14336, 4096): {16: 86.2, 64: 86.6, 128: 93.9, 256: 106.8, 1024: 168.7, 4096: 738.6},
}


@dataclass(frozen=True)
class Options:
    bits: int
    group_size: int
    zeros: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    in_features: int
    out_features: int
    tokens: int
    pelton_us: float
    cublas_us: float
    marlin_us: float | None
    cutlass_us: float | None
    weight_tb_per_s: float  # of the packed weights
    tflops: float
    pelton_error: float
    cublas_error: float

    @property
    def ratios(self) -> dict[str, float | None]:
        """Others' times over ours."""
        others = {"cublas": self.cublas_us, "marlin": self.marlin_us, "cutlass": self.cutlass_us}
        return {name: None if us is None else us / self.pelton_us for name, us in others.items()}


class Weight:
    """A random quantized weight: packed, in 16 bits, and a few of its outputs in float64."""

    def __init__(self, in_features: int, out_features: int, options: Options) -> None:
        torch.manual_seed(0)
        self.options, self.out_features = options, out_features
        size = in_features if options.group_size == -1 else options.group_size
        groups = -(-in_features // size)
        q = torch.randint(0, 1 << options.bits, (out_features, in_features), dtype=torch.uint8)
        scales = (torch.rand(groups, out_features) / in_features**0.5 / (1 << options.bits)).to(options.dtype)
        zeros = torch.randint(0, 1 << options.bits, (groups, out_features), dtype=torch.uint8)
        if not options.zeros:
            zeros.fill_(1 << (options.bits - 1))
        self.packed, self.scales = ops.marlin_repack(q, options.bits), ops.marlin_pack_scales(scales)
        self.zeros = ops.marlin_pack_scales(zeros) if options.zeros else None
        group = torch.arange(in_features) // size
        self.plain = torch.empty(out_features, in_features, dtype=options.dtype)
        for first in range(0, out_features, 1024):
            rows = slice(first, first + 1024)
            self.plain[rows] = (q[rows].float() - zeros[:, rows].t().float()[:, group]) * scales[
                :, rows
            ].t().float()[:, group]
        few = slice(0, 512)
        self.exact = (q[few].double() - zeros[:, few].t().double()[:, group]) * scales[:, few].t().double()[
            :, group
        ]


def measure(weight: Weight, tokens: int) -> Result:
    options = weight.options
    out_features, in_features = weight.plain.shape
    x = torch.randn(tokens, in_features).to(options.dtype)
    out, plain_out = (torch.empty(tokens, out_features, dtype=options.dtype) for _ in range(2))
    size = ops.marlin_workspace_size(tokens, out_features, in_features, False)
    workspace = torch.zeros(size, dtype=torch.float32)

    def pelton() -> Tensor:
        return ops.marlin_gemm(
            x,
            weight.packed,
            weight.scales,
            bits=options.bits,
            group_size=options.group_size,
            out_features=out_features,
            zeros=weight.zeros,
            out=out,
            workspace=workspace,
        )

    def cublas() -> Tensor:
        return torch.mm(x, weight.plain.t(), out=plain_out)

    want = x[:512].double() @ weight.exact.t()

    def error(got: Tensor) -> float:
        return float((got[:512, : want.shape[1]].double() - want).abs().max() / want.abs().max())

    errors = error(pelton()), error(cublas())
    pelton_us, cublas_us = median_us(pelton), median_us(cublas)
    usual = options == Options(4, 128, False, options.dtype)
    shape = (in_features, out_features)
    return Result(
        in_features,
        out_features,
        tokens,
        pelton_us,
        cublas_us,
        MARLIN.get(shape, {}).get(tokens) if usual else None,
        CUTLASS.get(shape, {}).get(tokens) if usual else None,
        weight.packed.numel() * 4 / pelton_us * 1e-6,
        2 * tokens * in_features * out_features / pelton_us * 1e-6,
        *errors,
    )


def shape_of(text: str) -> tuple[int, int]:
    in_features, _, out_features = text.partition("x")
    return int(in_features), int(out_features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--shape", type=shape_of, action="append", help="KxN; may be given several times")
    parser.add_argument(
        "--tokens",
        type=lambda text: tuple(map(int, text.split(","))),
        default=TOKENS,
        help="numbers of tokens, with commas between (default: %(default)s)",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group-size", type=int, default=128, help="inputs of a group, -1: all")
    parser.add_argument("--zeros", action="store_true", help="with zero points")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    arguments = parser.parse_args()
    if ops.backend() != "cuda" or not hasattr(torch.ops.pelton, "marlin_gemm"):
        sys.exit(f"this benchmark needs a CUDA library with the feature marlin; this one is {ops.backend()}")
    torch.set_default_device("cuda")
    options = Options(arguments.bits, arguments.group_size, arguments.zeros, getattr(torch, arguments.dtype))
    print(
        f"{'K x N':>12}{'tokens':>8}{'pelton':>9}{'TB/s':>7}{'TFLOP/s':>9}{'cublas':>9}{'/cublas':>9}"
        f"{'/marlin':>9}{'/cutlass':>9}{'error':>10}{'cublas':>10}"
    )
    results: list[Result] = []
    for in_features, out_features in arguments.shape or list(MARLIN):
        weight = Weight(in_features, out_features, options)
        for tokens in arguments.tokens:
            r = measure(weight, tokens)
            results.append(r)
            ratios = "".join(f"{'' if v is None else format(v, '.2f'):>9}" for v in r.ratios.values())
            print(
                f"{f'{r.in_features}x{r.out_features}':>12}{r.tokens:>8}{r.pelton_us:>9.1f}{r.weight_tb_per_s:>7.2f}"
                f"{r.tflops:>9.1f}{r.cublas_us:>9.1f}{ratios}{r.pelton_error:>10.1e}{r.cublas_error:>10.1e}",
                flush=True,
            )
    if arguments.json:
        document = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "options": asdict(options) | {"dtype": arguments.dtype},
            "results": [asdict(r) | {"ratios": r.ratios} for r in results],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
