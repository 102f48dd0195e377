"""Token embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .. import ops
from .weight import Place, Weight

if TYPE_CHECKING:
    from ..loader import CheckpointTensor

__all__ = ["Embedding"]


class Embedding:
    """Rows of a table [vocab_size, hidden_size]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Place) -> None:
        self.name = name
        self.shape = (vocab_size, hidden_size)
        self.place = place
        self.weight: Tensor  # set when the weights are loaded

    def weights(self) -> dict[str, Weight]:
        return {f"{self.name}.weight": Weight(self.shape, self._load)}

    def _load(self, source: CheckpointTensor) -> None:
        self.weight = self.place.empty(*self.shape)
        source.load(out=self.weight)

    def __call__(self, ids: Tensor, out: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight, out=out)
