"""The HIP runtime for a library that is linked with none, so that one wheel serves every ROCm.

The library registers its GPU code with the runtime while it is loaded, and has to meet the very runtime that torch uses.
torch's own libraries load that one where no other library sees it. So, before the kernel library is loaded, the runtime
that is mapped into this process is opened again with its symbols made visible; nothing new is loaded:

1. ``libamdhip64*.so*`` in the folder of torch's libraries, as torch's wheels bring it;
2. else any that is mapped, as a torch that was built against a system's ROCm has it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["expose_runtime", "mapped_runtimes", "needs_runtime"]

_logger = logging.getLogger(__name__)

RUNTIME = "libamdhip64"
_REGISTERS = b"__hipRegisterFatBinary\0"


def needs_runtime(library: Path) -> bool:
    """Whether the library has code for AMD GPUs, which it registers when it is loaded."""
    with library.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(_REGISTERS) >= 0


def mapped_runtimes(maps: Iterable[str]) -> list[str]:
    """The HIP runtimes among the files of ``/proc/self/maps``, each once, in their order."""
    found: dict[str, None] = {}
    for line in maps:
        words = line.rstrip("\n").split(maxsplit=5)
        if len(words) == 6:
            name = words[5].rpartition("/")[2]
            if name.startswith(RUNTIME) and ".so" in name and not name.endswith(" (deleted)"):
                found[words[5]] = None
    return list(found)


def expose_runtime(torch_folder: Path, torch_version: str) -> str:
    """Makes the runtime's symbols visible to libraries that are loaded from now on; returns its file.

    Raises:
        LibraryError: no runtime is mapped into this process, or it cannot be opened again.
    """
    from .errors import LibraryError

    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        runtimes = mapped_runtimes(maps)
    if not runtimes:
        raise LibraryError(
            f"this build of pelton is for AMD GPUs and uses the HIP runtime that torch loads, but {RUNTIME}.so (of any "
            f"version) is not among the libraries of this process: torch {torch_version} in {torch_folder} is not built "
            "for ROCm. Install a torch for ROCm, or the pelton wheel for this machine ('pelton doctor' names it)"
        )
    inside = [path for path in runtimes if Path(path).is_relative_to(torch_folder)]
    path = (inside or runtimes)[0]
    try:
        ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
    except OSError as error:
        raise LibraryError(
            f"the HIP runtime {path} that torch has loaded cannot be opened again: {error}"
        ) from None
    if len(runtimes) > 1:
        _logger.warning(
            "%d HIP runtimes are loaded (%s); taking %s", len(runtimes), ", ".join(runtimes), path
        )
    return path
