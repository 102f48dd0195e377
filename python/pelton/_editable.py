"""The rebuild of an editable installation, when the package is imported.

The build installs an empty module `_built` into the package. An editable installation that was made with
`-C editable.rebuild=true` brings everything that it built up to date before it lets that module be imported; in any
other installation it is just empty, and in a source tree that was never built it is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator

__all__ = ["rebuild"]

MARKER = "pelton._built"

# Would install what is rebuilt somewhere else, so that the old library stayed, or compile or link it in another way.
_DROPPED = (
    "CMAKE_INSTALL_MODE",
    "DESTDIR",
    "LD_RUN_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
)


def rebuild() -> None:
    """Bring an editable installation up to date.

    Raises LibraryError when that fails; the compiler's or build's own message has been shown then.
    """
    try:
        with _without(_DROPPED):
            importlib.import_module(MARKER)
    except ModuleNotFoundError as error:
        if error.name != MARKER:
            raise
    except Exception as error:
        # CalledProcessError of the build, by its name, so that nobody else pays for importing subprocess.
        if type(error).__name__ == "CalledProcessError":
            problem = (
                "the build failed; its message stands above. Mend the sources or the profile and import again; where it "
                "says that a compiler was killed, memory ran out: import again with less running, or install with "
                "MAX_JOBS=1. Install again if the build folder was removed or the source was moved"
            )
        elif isinstance(error, FileNotFoundError):
            problem = (
                f"the build tool {error.filename or 'cmake'} is not on PATH; activate the environment that pelton was "
                "installed into"
            )
        elif isinstance(error, OSError):
            problem = (
                f"{error.filename or 'its build folder'}: {error.strerror or error}. Import it as the user who installed "
                "it and where the sources can be written to, or install a wheel"
            )
        else:
            raise
        from pelton.errors import LibraryError

        raise LibraryError(f"this editable installation of pelton could not be rebuilt: {problem}") from None


@contextlib.contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """Within this context these environment variables are not set."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
