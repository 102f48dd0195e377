"""A place that a tensor of a checkpoint goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..loader import CheckpointTensor

__all__ = ["Layer", "Place", "Weight", "weights_of"]


@dataclass(frozen=True)
class Place:
    """What a model's tensors are made of, and where they lie."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that is not filled."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class Weight:
    """The shape that is expected, and what to do with the tensor. Memory is taken when `load` runs, not before."""

    shape: tuple[int, ...]
    load: Callable[[CheckpointTensor], None]


class Layer(Protocol):
    """Whatever has parameters."""

    def weights(self) -> dict[str, Weight]: ...


def weights_of(layers: Iterable[Layer]) -> dict[str, Weight]:
    """The places of all `layers`, by Hugging Face name."""
    return {name: weight for layer in layers for name, weight in layer.weights().items()}
