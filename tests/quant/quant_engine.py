"""Running the engine on quantized models: with the library's kernels, or without any."""

from __future__ import annotations

import pytest

import pelton.quant.checkpoint as checkpoint
import pelton.runner as runner
from pelton.quant.methods import Choice

ALL = frozenset({"awq", "gptq", "marlin"})
needs_kernels = pytest.mark.skipif(
    not checkpoint.built_features() & {"awq", "gptq"},
    reason="this library has no kernels for quantized weights",
)


def reference_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantize every layer when it is loaded, whatever kernels there are."""
    monkeypatch.setattr(checkpoint, "choose", lambda *_: Choice("dequantize", "the test wants it"))
    monkeypatch.setattr(runner, "built_features", lambda: ALL)
