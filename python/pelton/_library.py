"""Finding and loading the kernel library, once per process.

1. ``PELTON_LIBRARY``, when set, names the library's file: the override for kernel authors.
   The guard is not asked then, because the installed build info describes another file.
2. Else the guard compares the installed build with this machine, so that a library for
   another CPU is an error and not an illegal instruction.
3. Then ``libpelton.so`` is looked for in every folder of ``pelton.__path__``.
4. A library with code for AMD GPUs gets to see torch's HIP runtime first (``_hip``).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["LIBRARY_NAME", "find", "load", "operators", "overridden"]

LIBRARY_NAME = "libpelton.so"

_logger = logging.getLogger(__name__)
_lock = threading.Lock()
_loaded: Path | None = None


def find(override: str | None, folders: Iterable[str]) -> Path:
    """The library's file: ``override`` if given, else ``libpelton.so`` in the first folder that has it.

    Raises:
        LibraryError: the file does not exist.
    """
    from .errors import LibraryError

    if override:
        path = Path(override)
        if not path.is_file():
            raise LibraryError(
                f"PELTON_LIBRARY is {override!r}, which is not a file; set it to a built {LIBRARY_NAME} or unset it"
            )
        return path.resolve()
    searched = [Path(folder) for folder in folders]
    for folder in searched:
        if (folder / LIBRARY_NAME).is_file():
            return folder / LIBRARY_NAME
    raise LibraryError(
        f"the kernel library {LIBRARY_NAME} is not in {', '.join(map(str, searched))}: "
        "this is a source tree that was not built. Install a wheel, or build with 'pip install -e .'"
    )


def overridden() -> bool:
    """Whether ``PELTON_LIBRARY`` names the library, so that the build info does not describe it."""
    return bool(os.environ.get("PELTON_LIBRARY"))


def load() -> Path:
    """Loads the kernel library and its fake kernels; later calls return at once.

    Returns the path of the loaded library.

    Raises:
        LibraryError: no library was found, it does not fit this machine, or it cannot be loaded.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
    return _loaded


def operators() -> Any:
    """``torch.ops.pelton``, with the library loaded.

    A build for GPUs on a machine that it does not fit gives a stand-in, of which every operator raises what the guard
    found: modules that use operators can be imported there, for what needs none.

    Raises:
        LibraryError: as :func:`load`; for a build for CPUs also when it does not fit this machine.
    """
    from . import build_info
    from .errors import HardwareMismatch

    try:
        load()
    except HardwareMismatch as mismatch:
        if build_info.backend == "cpu":
            raise
        return _Refusing(mismatch)
    import torch

    return torch.ops.pelton


class _Refusing:
    """In the place of operators that cannot run here."""

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python and libraries ask of any object
            raise AttributeError(name)
        raise self._reason.with_traceback(None)


def _load() -> Path:
    import pelton

    from . import _hip

    override = os.environ.get("PELTON_LIBRARY")
    if not override:
        from . import guard

        guard.check()
    path = find(override, pelton.__path__)

    import torch

    if _hip.needs_runtime(path):
        runtime = _hip.expose_runtime(Path(torch.__file__).parent, torch.__version__)
        _logger.debug("HIP runtime %s", runtime)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        from .errors import LibraryError

        raise LibraryError(
            f"the kernel library {path} cannot be loaded with torch {torch.__version__}: {error}"
        ) from error
    from . import _fakes

    _fakes.register()
    _logger.debug("loaded %s", path)
    return path
