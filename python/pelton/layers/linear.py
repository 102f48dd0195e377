"""Linear projection, one or several side by side in one weight."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ops
from .weight import Place, Weight

if TYPE_CHECKING:
    from ..loader import CheckpointTensor

__all__ = ["Linear"]

#: On the CPU the product is ours and reads packed weights. On GPUs it is torch's, on weights as they come.
_PACKED = ops.backend() == "cpu"


class Linear:
    """``x W^T + b``, where W stacks the projections `parts` (Hugging Face name -> output features).

    Several projections of the same input (query, key, value; gate, up) make one product: the input is read once. The
    rows of a checkpoint are collected in plain layout until all parts are there; where weights are packed, the plain
    copy goes then.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], place: Place, *, bias: bool = False
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(parts.values())
        self.parts = dict(parts)
        self.place = place
        self.weight: Tensor  # set when the weights are loaded: packed, or [in_features, out_features]
        self.bias: Tensor | None = None
        self._has_bias = bias
        self._plain: Tensor | None = None
        self._missing = len(parts)

    def weights(self) -> dict[str, Weight]:
        places: dict[str, Weight] = {}
        first = 0
        for name, features in self.parts.items():
            rows = slice(first, first + features)
            places[f"{name}.weight"] = Weight((features, self.in_features), partial(self._load_weight, rows))
            if self._has_bias:
                places[f"{name}.bias"] = Weight((features,), partial(self._load_bias, rows))
            first += features
        return places

    def _load_weight(self, rows: slice, source: CheckpointTensor) -> None:
        if self._plain is None:
            shape = (self.out_features, self.in_features)
            self._plain = _temporary(shape, self.place.dtype) if _PACKED else self.place.empty(*shape)
        source.load(out=self._plain[rows])
        self._missing -= 1
        if self._missing == 0:
            self.take(self._plain)
            self._plain = None

    def _load_bias(self, rows: slice, source: CheckpointTensor) -> None:
        if self.bias is None:
            self.bias = self.place.empty(self.out_features)
        source.load(out=self.bias[rows])

    def take(self, weight: Tensor) -> None:
        """Compute with `weight` [out_features, in_features], without a copy unless weights are packed."""
        self.weight = ops.pack_linear_weight(weight) if _PACKED else weight.t()

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """``x`` [T, in_features] -> `out` [T, out_features]."""
        if _PACKED:
            return ops.linear(x, self.weight, self.bias, out_features=self.out_features, out=out)
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)


def _temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that goes back to the system when the tensor does: from the heap, holes would stay between the weights."""
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
