"""Access to an emulated build: guarded buffers, and the small kernels of ``cases.cu``.

A guarded buffer lies between pages that nobody can access, at one end or the other, so that any access past it is
seen, also one that the compiler's hooks do not report.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Cases", "emulated_folder", "guarded"]


def emulated_folder() -> Path | None:
    """The folder of the emulated build that PELTON_LIBRARY names; None when it names none."""
    path = os.environ.get("PELTON_LIBRARY", "")
    folder = Path(path).parent
    return folder if path and (folder / "emulation_cases.so").is_file() else None


@contextmanager
def guarded(library: ctypes.CDLL, name: str, values: Tensor, at_end: bool) -> Iterator[Tensor]:
    """A copy of ``values``, contiguous, that ends (or begins) where memory does."""
    library.pelton_emulation_allocate.restype = ctypes.c_void_p
    library.pelton_emulation_allocate.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    library.pelton_emulation_release.argtypes = [ctypes.c_void_p]
    size = values.numel() * values.element_size()
    address = library.pelton_emulation_allocate(name.encode(), size, int(at_end))
    try:
        memory = (ctypes.c_char * size).from_address(address)
        copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel()).view(values.shape)
        copy.copy_(values)
        yield copy
    finally:
        library.pelton_emulation_release(address)


class Cases:
    """The kernels of ``cases.cu``, by name."""

    def __init__(self, folder: Path) -> None:
        self.library = ctypes.CDLL(str(folder / "emulation_cases.so"))
        self.library.run_case.restype = ctypes.c_char_p
        self.library.run_case.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]

    def run(self, name: str, values: Tensor, size: int | None = None, at_end: bool = True) -> Tensor:
        """What the kernel makes of ``values`` (fp32), ``size`` zeros before. Raises RuntimeError with its error."""
        size = values.numel() if size is None else size
        with (
            guarded(self.library, "in", values, at_end) as given,
            guarded(self.library, "out", torch.zeros(size), at_end) as made,
        ):
            error = self.library.run_case(name.encode(), given.data_ptr(), made.data_ptr(), values.numel())
            if error is not None:
                raise RuntimeError(error.decode())
            return made.clone()
