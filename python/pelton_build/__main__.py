"""`python -m pelton_build SUBCOMMAND ...`: one message and a non-zero exit when something is wrong, no
traceback."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from .errors import BuildError
from .values import did_you_mean

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "plan": ("planning", "print what a build would do, and why"),
    "matrix": ("matrix", "print the CI matrix as JSON"),
    "schema": ("schema", "write the profiles' JSON schema"),
    "presets": ("presets", "write CMake presets, one for each profile"),
    "cmake": ("cmake", "write the plan as a CMake file"),
    "glibc": ("glibc", "make the stubs to link for an older glibc with"),
    "hipify": ("hipify", "make a HIP source of a CUDA source"),
    "device-libs": ("device_libs", "complete ROCm's device libraries for newer GPUs"),
    "hip-headers": ("hip_headers", "compile the GPU sources with the headers of other HIP versions"),
    "emulation": ("emulation", "write the plan of the emulated library as a CMake file"),
    "repair": ("repair", "check that auditwheel has nothing to repair in wheels"),
    "audit": ("audit", "check finished wheels against their plans"),
    "reproduce": ("reproduce", "build wheels a second time elsewhere, and compare the bytes"),
    "release": ("release", "check the tree and the tag of a release"),
    "variants": ("variants", "make variant wheels of finished wheels"),
    "index": ("index", "make the static package index from wheels"),
}
"""Subcommand: the module whose `main(arguments)` runs it, and what it does. Imported only when it is
called."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        return _run(arguments)
    except BuildError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except SystemExit as stop:  # argparse has printed its message
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else _fail(str(stop.code))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name.ljust(width)}  {about}" for name, (_, about) in COMMANDS.items()]
        sys.stdout.write("\n".join(["usage: python -m pelton_build SUBCOMMAND ...", "", *lines, ""]))
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        raise BuildError(f"unknown subcommand {name!r}{did_you_mean(name, COMMANDS)}")
    try:
        module = importlib.import_module(f"{__package__}.{COMMANDS[name][0]}")
    except ModuleNotFoundError as error:
        raise BuildError(f"subcommand {name!r} needs the Python module {error.name!r}; install it") from None
    result: int | None = module.main(arguments[1:])
    return result or 0


def _fail(message: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
