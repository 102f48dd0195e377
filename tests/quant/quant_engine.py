"""Running the engine on quantized models: with the library's kernels, or without any."""

from __future__ import annotations

import pytest
import torch

import pelton.quant.checkpoint as checkpoint
import pelton.runner as runner
from pelton.layers.linear import PlainLinear
from pelton.quant.canonical import QuantizedWeight
from pelton.quant.methods import METHODS, Choice

ALL = frozenset({"awq", "gptq", "marlin"})
needs_kernels = pytest.mark.skipif(
    not checkpoint.built_features() & {"awq", "gptq"},
    reason="this library has no kernels for quantized weights",
)


class DequantizedLinear(PlainLinear):
    """Weights that are dequantized when they are loaded, and then like any other."""

    @classmethod
    def pack(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> DequantizedLinear:
        return cls(weight.dequantize(dtype))

    @staticmethod
    def num_bytes(out_features: int, in_features: int, groups: int, bits: int, itemsize: int) -> int:
        return out_features * in_features * itemsize


def reference_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantize every layer, whatever kernels there are."""
    monkeypatch.setitem(METHODS, "dequantize", DequantizedLinear)
    monkeypatch.setattr(checkpoint, "choose", lambda *_: Choice("dequantize", "the test wants it"))
    monkeypatch.setattr(runner, "built_features", lambda: ALL)
