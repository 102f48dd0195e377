"""A place that a tensor of a checkpoint goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..loader import CheckpointTensor

__all__ = ["Weight"]


@dataclass(frozen=True)
class Weight:
    """The shape that is expected, and what to do with the tensor. Memory is taken when `load` runs, not before."""

    shape: tuple[int, ...]
    load: Callable[[CheckpointTensor], None]
