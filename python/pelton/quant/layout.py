"""What a parser says of the tensors of a linear layer in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from .canonical import QuantizedWeight, Scheme

__all__ = ["FLOATS", "INTS", "Parser", "TensorSpec", "check_groups", "check_scales"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTS = (torch.int32,)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a layer must have: its shape and dtypes.

    `early`: it is small, and its values are checked before any memory for weights is taken. `fill` is what stands
    for it in a model of random numbers: "words" (any bits), "zeros", "scales", "groups" (consecutive), "shape".
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    early: bool
    fill: str


class Parser(Protocol):
    """A module of this package that reads one format."""

    MARK: str  # the suffix by which a quantized layer of this format is known

    @staticmethod
    def specs(scheme: Scheme, out_features: int, in_features: int, where: str) -> dict[str, TensorSpec]:
        """The tensors of a layer by suffix. Raises CheckpointError for sizes that cannot be packed."""

    @staticmethod
    def optional(scheme: Scheme) -> tuple[str, ...]:
        """Those of them that a file may lack."""

    @staticmethod
    def check(scheme: Scheme, suffix: str, tensor: Tensor, spec: TensorSpec, where: str) -> None:
        """Refuse wrong values of an early tensor. Raises CheckpointError."""

    @staticmethod
    def parse(scheme: Scheme, tensors: Mapping[str, Tensor], q: Tensor) -> QuantizedWeight:
        """The canonical form, with the numbers written to `q` uint8 [N, K]."""


def check_scales(scales: Tensor, where: str) -> None:
    low, high = torch.aminmax(
        scales
    )  # of NaN and anything it is NaN; and no memory is taken for each element
    if not (low.isfinite() and high.isfinite()):
        bad = int((~scales.isfinite()).sum())
        raise CheckpointError(
            f"{where}: {bad} of {scales.numel()} scales are NaN or infinite, expected finite numbers; the file is "
            "damaged, or the quantization failed"
        )


def check_groups(g_idx: Tensor, groups: int, where: str) -> None:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"{where}: group indices from {low} to {high}, expected 0 to {groups - 1} ({groups} groups of scales); the "
            "file is damaged"
        )
