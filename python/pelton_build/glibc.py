"""A folder to link in for an older glibc than this machine's: `python -m pelton_build glibc 2.28 x86_64 FOLDER`.

zig (PyPI `ziglang`) can write stub libraries of any glibc version. GNU ld, given `-L FOLDER`, binds every symbol to
the version that it had there, and a symbol that this glibc lacks is a link error. Nothing of zig is in the result:
only the linker reads the stubs. (Compiling with zig is no way: exceptions then abort Python.)
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import BuildError
from .settings import environment
from .values import Version

__all__ = ["REQUIREMENT", "GlibcError", "machine_glibc", "main", "make_stubs", "needs_stubs"]

REQUIREMENT = "ziglang>=0.15,<0.18"

# Names that -l asks for, and the stub that answers. libc itself is a linker script, see below.
_LINKS = {
    "libdl.so": "libdl.so.2",
    "libm.so": "libm.so.6",
    "libpthread.so": "libpthread.so.0",
    "librt.so": "librt.so.1",
}
# Plain names, which ld then looks for in its own folders, ours first: no path of this machine in the file.
_LIBC_SCRIPT = "GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( {loader} ) )\n"
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}

logger = logging.getLogger(__name__)


class GlibcError(BuildError):
    """The wheel cannot be linked for its glibc floor on this machine."""


def machine_glibc() -> Version | None:
    """This machine's glibc; None for another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return Version.parse(version) if name == "glibc" else None
    except (ValueError, OSError, AttributeError):
        return None


def needs_stubs(floor: str) -> bool:
    """Whether linking for glibc `floor` needs stubs here. Raises GlibcError where no such wheel can be made."""
    here, wanted = machine_glibc(), Version.parse(floor)
    if here is None:
        raise GlibcError(
            f"the wheel is for glibc {floor}, and this machine has another C library; build it on a distribution "
            "with glibc (Debian, Ubuntu, Fedora, a manylinux image), or install with 'pip install -e .'"
        )
    if here.key < wanted.key:
        raise GlibcError(
            f"the wheel is for glibc {floor} and newer, and this machine has {here}; build it on a newer system or "
            "lower wheel.glibc in the profile"
        )
    return here.key > wanted.key


def make_stubs(floor: str, machine: str, folder: Path) -> None:
    """Fill `folder` with the stubs of glibc `floor`, all or nothing; it is left alone when it is there already.

    Raises GlibcError when zig is not installed or does not know that glibc.
    """
    if (folder / "libc.so").is_file():
        return
    if importlib.util.find_spec("ziglang") is None:
        raise GlibcError(
            f"linking for glibc {floor} needs the stub libraries of the package ziglang, which is not installed in "
            f"the build environment; install '{REQUIREMENT}', or build with isolation"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="glibc-", dir=folder.parent) as temporary:
        work, made = Path(temporary), Path(temporary) / "made"
        made.mkdir()
        for stub in _zig_stubs(floor, machine, work):
            shutil.copyfile(stub, made / stub.name)
        for link, target in _LINKS.items():
            (made / link).symlink_to(target)
        loader = _LOADERS[machine]
        (made / "libld.so.2").rename(made / loader)
        (made / "libc.so").write_text(_LIBC_SCRIPT.format(loader=loader), encoding="ascii")
        shutil.rmtree(folder, ignore_errors=True)  # half-made by an older version of this tool
        made.rename(folder)


def _zig_stubs(floor: str, machine: str, work: Path) -> list[Path]:
    """Have zig link something, which makes it write its stubs, and return those."""
    (work / "empty.c").write_text("int pelton_empty(void) { return 0; }\n", encoding="ascii")
    environ = {
        **environment(),
        "ZIG_GLOBAL_CACHE_DIR": str(work / "cache"),
        "ZIG_LOCAL_CACHE_DIR": str(work / "local"),
    }
    command = [sys.executable, "-X", "utf8", "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{floor}"]
    command += ["-shared", "-fPIC", "-nostdlib", "-lc", "empty.c", "-o", "empty.so"]
    try:
        result = subprocess.run(
            command,
            cwd=work,
            env=environ,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise GlibcError(f"zig cannot be run ({error}); install '{REQUIREMENT}' again") from None
    stubs = sorted(path for path in work.rglob("lib*.so.*") if path.is_file())
    names = {path.name for path in stubs}
    missing = sorted({"libc.so.6", "libld.so.2", *_LINKS.values()} - names)
    if result.returncode != 0 or missing:
        said = result.stderr.strip().splitlines()
        raise GlibcError(
            f"zig made no stubs of glibc {floor} for {machine} ("
            + (said[0] if said else f"missing: {', '.join(missing)}")
            + f"); check wheel.glibc of the profile, or install '{REQUIREMENT}'"
        )
    return stubs


def main(arguments: Sequence[str]) -> int:
    """The subcommand `glibc`."""
    floor, machine, folder = arguments
    make_stubs(floor, machine, Path(folder))
    return 0
