"""RMS normalization of hidden states and of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops
from .weight import Place, Weight

if TYPE_CHECKING:
    from ..loader import CheckpointTensor

__all__ = ["HeadNorm", "RMSNorm"]


class RMSNorm:
    """``x / rms(x) * weight`` (Zhang and Sennrich, 2019)."""

    def __init__(self, name: str, size: int, eps: float, place: Place) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.place = place
        self.weight: Tensor  # [size], set when the weights are loaded

    def weights(self) -> dict[str, Weight]:
        return {f"{self.name}.weight": Weight((self.size,), self._load)}

    def _load(self, source: CheckpointTensor) -> None:
        self.weight = self.place.empty(self.size)
        source.load(out=self.weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, out=out)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x``; gives the normalized residual, in the memory of `x`."""
        ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return x


class HeadNorm(RMSNorm):
    """RMS normalization of each head of ``x`` [T, num_heads, head_size], in place (Qwen3's query and key norm)."""

    def heads(self, x: Tensor) -> None:
        ops.rms_norm(x, self.weight, self.eps, out=x)
