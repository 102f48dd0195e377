"""Memory beside the heap."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["own_pages"]


def own_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pages of their own, which take memory only once they are written and go back to the system when the
    tensor does.

    On the heap, what is needed for a moment would leave holes between what stays: loading a model makes many of both.
    """
    size = max(1, math.prod(shape) * dtype.itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
