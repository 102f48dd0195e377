"""Quantized checkpoints: one parser a format, one form inside, one packing a backend."""

from __future__ import annotations

from .canonical import QuantizedWeight, Scheme

__all__ = ["QuantizedWeight", "Scheme"]
