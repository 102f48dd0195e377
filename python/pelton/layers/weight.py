"""A place that a tensor of a checkpoint goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..loader import CheckpointTensor
    from ..quant.checkpoint import Quantization

__all__ = ["FLOATS", "Layer", "Place", "Weight", "weights_of"]


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Place:
    """What a model's tensors are made of, and where they lie; how its linear layers are quantized, if they are."""

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that is not filled."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class Weight:
    """The shape that is expected, and what to do with the tensor. Memory is taken when `load` runs, not before.

    Attributes:
        dtypes: what the tensor may be stored in.
        asked_by: who expects this, for the error.
        early: small, and loaded before all others, because `load` checks its values.
        owner: weights of one owner are loaded one after the other.
        num_bytes: what is kept of it in the end; None: its elements in the model's dtype.
        fill: writes stand-ins for a model of random numbers; None: the usual ones.
    """

    shape: tuple[int, ...]
    load: Callable[[CheckpointTensor], None]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    asked_by: str = "the config"
    early: bool = False
    owner: object = None
    num_bytes: int | None = None
    fill: Callable[[Tensor, torch.Generator], None] | None = None


class Layer(Protocol):
    """Whatever has parameters."""

    def weights(self) -> dict[str, Weight]: ...


def weights_of(layers: Iterable[Layer]) -> dict[str, Weight]:
    """The places of all `layers`, by Hugging Face name."""
    return {name: weight for layer in layers for name, weight in layer.weights().items()}
