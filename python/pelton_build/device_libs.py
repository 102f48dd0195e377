"""ROCm's device libraries for GPUs that are newer than they are.

    python -m pelton_build device-libs --clang PROGRAM --libs FOLDER --out FOLDER ARCH...

The compiler wants one file of bitcode for each kind of GPU, which holds a single constant: the GPU's number. A
distribution's device libraries (those of Debian 12 are of ROCm 5.2) lack it for GPUs that came later, while everything
else in them serves. The output is a folder of links to what is there and of the files that were missing, each made by the
compiler that will read it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import ToolchainError
from .settings import environment, scrubbed
from .toolchain import run_limited

__all__ = ["complete", "isa_file", "isa_version", "main"]

_SOURCE = '__attribute__((weak, visibility("protected"), address_space(4))) const int __oclc_ISA_version = {version};\n'
_NAME = re.compile(r"gfx(\d+)(\d)([0-9a-f])", re.ASCII)


def isa_version(arch: str) -> int:
    """The number that device libraries know a GPU by: 9010 for gfx90a, 11000 for gfx1100, 11501 for gfx1151."""
    match = _NAME.fullmatch(arch)
    assert match is not None, arch
    return int(match[1]) * 1000 + int(match[2]) * 100 + int(match[3], 16)


def isa_file(arch: str) -> str:
    return f"oclc_isa_version_{arch.removeprefix('gfx')}.bc"


def complete(clang: str, libs: Path, out: Path, archs: Sequence[str]) -> tuple[str, ...]:
    """Fill `out` with `libs` and what they lack for `archs`; returns the names of the files made.

    Raises ToolchainError when there is nothing to complete, or the compiler cannot do it.
    """
    there = sorted(libs.glob("*.bc"))
    if not there:
        raise ToolchainError(f"{libs} holds no device libraries (*.bc); install rocm-device-libs")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in there:
        (out / path.name).symlink_to(path.resolve())
    made: list[str] = []
    for arch in dict.fromkeys(name.partition(":")[0] for name in archs):
        if not (out / isa_file(arch)).exists():
            _make(clang, out / isa_file(arch), isa_version(arch))
            made.append(isa_file(arch))
    return tuple(made)


def _make(clang: str, path: Path, version: int) -> None:
    options = ("-x", "c", "--target=amdgcn-amd-amdhsa", "-nogpulib", "-c", "-emit-llvm", "-O1")
    with tempfile.TemporaryDirectory() as folder:  # without a path of its own: the bitcode names its source
        made = Path(folder) / path.name
        # No code object version: the file is linked into those of every version.
        command = [clang, *options, "-Xclang", "-mcode-object-version=none", "-o", str(made), "-"]
        said = run_limited(command, scrubbed(environment()), 60.0, _SOURCE.format(version=version))
        if said.problem:
            raise ToolchainError(f"{clang} cannot make {path.name}: {said.problem}")
        shutil.copyfile(made, path)


def main(arguments: Sequence[str]) -> int:
    """The subcommand `device-libs`."""
    parser = argparse.ArgumentParser(
        prog="device-libs", description="Complete ROCm's device libraries for GPUs newer than they are."
    )
    parser.add_argument("--clang", required=True, help="the compiler that will read them")
    parser.add_argument("--libs", type=Path, required=True, help="the folder of the device libraries")
    parser.add_argument("--out", type=Path, required=True, help="the folder to fill")
    parser.add_argument("archs", nargs="+", metavar="ARCH")
    options = parser.parse_args(arguments)
    made = complete(options.clang, options.libs, options.out, options.archs)
    if made:
        sys.stdout.write(f"-- Device libraries of {options.libs}: made {', '.join(made)}\n")
    return 0
