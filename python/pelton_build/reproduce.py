"""Build a wheel a second time, elsewhere and as somebody else, and compare: `python -m pelton_build reproduce WHEEL`.

The second build gets a copy of the tree in another folder, and another HOME, TMPDIR, time zone, locale, umask and user
name. It runs as another user where root can become one that reaches this Python:

1. as user 65534, which owns nothing;
2. as the same with the one right to read every file, when Python lies in a folder that is closed to others;
3. as this user, which is said with the reason.

Nothing else is installed for it: compilers and headers are those of the environment that this runs in.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .planning import make_plan, project_root, write_atomically
from .settings import environment
from .wheel_info import read_build_info

__all__ = ["Builder", "ReproduceError", "build_elsewhere", "differences", "main", "other_user"]

NOBODY = "65534"
SETPRIV = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
READ_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
ELSEWHERE = {
    "USER": "somebody",
    "LOGNAME": "somebody",
    "TZ": "Pacific/Chatham",
    "LC_ALL": "C",
    "LANGUAGE": "",
}
UMASK = 0o077

logger = logging.getLogger(__name__)


class ReproduceError(BuildError):
    """The second build failed, or made other bytes."""


@dataclass(frozen=True)
class Builder:
    """Who builds: a command to run the build with, and who that is, in words."""

    command: tuple[str, ...]
    words: str


def other_user(python: str) -> Builder:
    """Another user than this one who can run `python`, else this one and why."""
    if os.geteuid() != 0:
        return Builder((), "this user, since only root can become another one")
    if shutil.which(SETPRIV[0]) is None:
        return Builder((), "this user, since there is no setpriv to become another one with")
    # What a build does: it imports, and starts this Python again.
    program = "import subprocess, sys, build; subprocess.run([sys.executable, '-c', ''], check=True)"
    for more, words in (((), ""), (READ_ALL, ", who may read every file")):
        command = (*SETPRIV, *more)
        tried = subprocess.run([*command, python, "-c", program], check=False, capture_output=True, cwd="/")
        if tried.returncode == 0:
            return Builder(command, f"user {NOBODY}{words}")
    return Builder((), f"this user, since user {NOBODY} cannot run {python}")


def copy_tree(root: Path, copy: Path) -> None:
    """A clone of the repository, its files as they are in the work tree now."""
    if not (root / ".git").exists():
        raise ReproduceError(f"{root}: no git repository, so there is nothing to copy for a second build")
    _run(["git", "clone", "-q", "--no-hardlinks", str(root), str(copy)])
    listed = _run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    ).stdout
    for name in filter(None, listed.split("\0")):
        (copy / name).unlink(missing_ok=True)
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy / name)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ReproduceError(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
    return done


def build_elsewhere(root: Path, settings: Mapping[str, str], place: Path) -> tuple[Path, Builder]:
    """Build with these config settings from a copy of `root` in the new folder `place`; the wheel and who built it."""
    copy, home, temporary, out = (place / name for name in ("copied tree", "home", "tmp", "made"))
    for folder in (home, temporary, out):
        folder.mkdir()
    copy_tree(root, copy)
    builder = other_user(sys.executable)
    if builder.command:
        place.chmod(0o755)
        _run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(place)])
    logger.info("building again in %s, as %s", place, builder.words)
    environ = {**environment(), **ELSEWHERE, "HOME": str(home), "TMPDIR": str(temporary)}
    environ.pop("PYTHONPATH", None)  # the copy brings its own build backend
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    command = [*builder.command, *build, *(f"-C{k}={v}" for k, v in settings.items()), str(copy)]
    if subprocess.run(command, env=environ, cwd=place, umask=UMASK, check=False).returncode != 0:
        raise ReproduceError(
            f"{settings['profile']}: the second build failed, its messages stand above; it lies in {place}"
        )
    (wheel,) = out.glob("*.whl")
    return wheel, builder


def differences(first: Path, second: Path) -> tuple[str, ...]:
    """What differs between two wheels, a line for each member; empty when they are the same bytes."""
    if first.read_bytes() == second.read_bytes():
        return ()
    found = []
    with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
        names_a, names_b = a.namelist(), b.namelist()
        found += [f"{name}: only in the first" for name in names_a if name not in names_b]
        found += [f"{name}: only in the second" for name in names_b if name not in names_a]
        for name in names_a:
            if name in names_b:
                told = _content(a.read(name), b.read(name)) or _attributes(a.getinfo(name), b.getinfo(name))
                found += [f"{name}: {told}"] if told else []
        if not found and names_a != names_b:
            found.append("the members stand in another order")
    return tuple(found or ["the members are the same, the archives around them are not"])


def _content(a: bytes, b: bytes) -> str:
    """How two contents differ; empty when they do not."""
    if a == b:
        return ""
    shared = min(len(a), len(b))
    at = next((i for i in range(shared) if a[i] != b[i]), shared)
    sizes = f"{len(a)} bytes" if len(a) == len(b) else f"{len(a)} and {len(b)} bytes"
    section = _section(a, at)
    around = slice(max(at - 16, 0), at + 32)
    return f"differs from byte {at} on{section} ({sizes}): {a[around]!r}, {b[around]!r}"


def _section(content: bytes, offset: int) -> str:
    """The section of a binary that the offset lies in, where pyelftools is there to tell."""
    if not content.startswith(b"\x7fELF"):
        return ""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError:
        return ""
    for section in ELFFile(io.BytesIO(content)).iter_sections():
        start, size = section["sh_offset"], section["sh_size"]
        if section["sh_type"] != "SHT_NOBITS" and start <= offset < start + size:
            return f", in section {section.name}"
    return ""


def _attributes(a: zipfile.ZipInfo, b: zipfile.ZipInfo) -> str:
    """How the entries of one content differ; empty when they do not."""
    attributes = (
        "date_time",
        "external_attr",
        "compress_type",
        "create_system",
        "flag_bits",
        "extra",
        "comment",
    )
    return ", ".join(
        f"{name} {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in attributes
        if getattr(a, name) != getattr(b, name)
    )


def settings_of(wheel: Path) -> dict[str, str]:
    """The config settings that make the wheel again, from its build info.  Raises WheelError."""
    info = read_build_info(wheel)
    return {"profile": info["profile"], **({} if info["label"] else {"label": "off"})}


def reproduce(root: Path, wheel: Path) -> str:
    """Build the wheel again and compare; who built it, in words. Raises ReproduceError with what differs."""
    settings = settings_of(wheel)
    makes = make_plan(root, settings).wheel_name
    if makes != wheel.name:
        raise ReproduceError(
            f"{wheel.name}: these sources make {makes}; check out what the wheel was made of"
        )
    place = Path(tempfile.mkdtemp(prefix="pelton again "))
    again, builder = build_elsewhere(root, settings, place)
    if found := differences(wheel, again):
        shown = "".join(f"\n  {line}" for line in found)
        raise ReproduceError(f"{wheel.name}: a second build, {again}, has other bytes:{shown}")
    shutil.rmtree(place)
    return builder.words


def main(arguments: Sequence[str]) -> int:
    """The subcommand `reproduce`."""
    parser = argparse.ArgumentParser(
        prog="reproduce", description="Build wheels again elsewhere, as somebody else, and compare the bytes."
    )
    parser.add_argument("--root", type=Path, default=project_root(), help="the project's folder")
    parser.add_argument("--report", type=Path, help="a JSON file to write: SHA-256 and builder of each wheel")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    options = parser.parse_args(arguments)
    report = {}
    for wheel in options.wheels:
        words = reproduce(options.root.resolve(), wheel.resolve())
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        logger.info(
            "%s: twice the same bytes, SHA-256 %s; the second build was by %s", wheel.name, digest, words
        )
        report[wheel.name] = {"sha256": digest, "builder": words}
    if options.report:
        write_atomically(options.report, json.dumps(report, indent=1) + "\n")
    return 0
