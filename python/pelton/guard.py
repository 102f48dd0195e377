"""The guard: does the installed build fit this machine?  Asked once, before the library is loaded.

A library for another CPU ends the process with an illegal instruction, and one for another glibc or torch fails with a
linker's riddle.  So the build info of the installed wheel is compared with the machine first, in this order:

1. the operating system and processor family,
2. the C library's version,
3. the CPU's instruction sets, as CPUID tells them and the operating system has enabled them,
4. torch: there, and not older than what the library was linked for.

The first mismatch is raised as :class:`~pelton.errors.HardwareMismatch`, which says what the build is for (``needed``),
what is there (``found``) and the command that helps (``install``).

``PELTON_HOST`` may name a TOML file that describes a machine, which is then believed instead of the real one; what
the file leaves out is taken from the real one.  ``docs/install.md`` has an example.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import HardwareMismatch, InvalidValueError, did_you_mean

__all__ = ["LEVELS", "Machine", "check", "describe", "find_mismatch", "this_machine"]

# x86-64 psABI micro-architecture levels, in Linux's names of the flags; each level has what the one before it has.
LEVELS: Mapping[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset({"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"}),
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
}
# Names from compilers and manuals for what Linux calls otherwise.
ALIASES: Mapping[str, str] = {"sse3": "pni", "lzcnt": "abm", "lahf": "lahf_lm", "cmpxchg16b": "cx16"}
# The registers that the operating system has to save before an instruction set can be used.
REGISTERS: Mapping[str, str] = {
    **dict.fromkeys(("avx", "avx2", "f16c", "fma", "vaes", "vpclmulqdq", "avx_vnni"), "avx"),
    **dict.fromkeys(LEVELS["x86-64-v4"], "avx512"),
    **dict.fromkeys(("avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512_vbmi2", "avx512vbmi"), "avx512"),
    **dict.fromkeys(("amx_bf16", "amx_int8", "amx_tile"), "amx"),
}


@dataclass(frozen=True)
class Machine:
    """What the guard wants to know of a machine."""

    system: str
    """`linux`."""
    machine: str
    """Processor family as `uname -m` names it: `x86_64`."""
    glibc: str | None
    """Version of the GNU C library; None for another C library."""
    flags: frozenset[str]
    """Instruction sets that can be used, in Linux's names."""
    off: frozenset[str]
    """Instruction sets that the processor has and the operating system has not enabled."""
    torch: str | None
    """Version of the installed torch; None when there is none."""

    @property
    def level(self) -> str:
        """The highest psABI level that can be used."""
        best = "x86-64"
        for name, features in LEVELS.items():
            if not features <= self.flags:
                break
            best = name
        return best


def level_features(level: str) -> frozenset[str]:
    """All instruction sets of a level, those of the lower ones included."""
    names = list(LEVELS)
    return frozenset().union(*(LEVELS[name] for name in names[: names.index(level) + 1]))


def check() -> None:
    """Compare the installed build with this machine.

    Raises:
        HardwareMismatch: the build does not fit.
        InvalidValueError: `PELTON_HOST` does not describe a machine.
    """
    from . import build_info

    if build_info.path is None:  # a source tree that was not built: the loader says so
        return
    mismatch = find_mismatch(build_info.as_dict(), this_machine(), os.environ.get("PELTON_INDEX", ""))
    if mismatch is not None:
        raise mismatch


def find_mismatch(info: Mapping[str, Any], machine: Machine, index: str = "") -> HardwareMismatch | None:
    """The first thing in which a build (its build info) and a machine do not fit; None when they fit.

    Args:
        info: the content of `_build_info.json`.
        index: address of the index that the build came from, for the command that helps.
    """
    profile = str(info["profile"])
    what = f"this build of pelton (profile {profile})"

    def mismatch(found: str, needed: str, install: str) -> HardwareMismatch:
        return HardwareMismatch(
            f"{what} does not fit this machine", found=found, needed=needed, install=install
        )

    if machine.system != "linux" or machine.machine != "x86_64":
        found = f"{machine.system} on {machine.machine}"
        return mismatch(
            found, "linux on x86_64", "no build for this system: use a Linux machine with an x86-64 processor"
        )
    glibc = str(info["glibc"])
    if machine.glibc is None or _numbers(machine.glibc) < _numbers(glibc):
        found = f"glibc {machine.glibc}" if machine.glibc else "a C library that is not glibc"
        install = "use a newer Linux distribution (Debian 10, Ubuntu 20.04, RHEL 8 or later), or build from source on this one"
        return mismatch(found, f"glibc {glibc} or newer", install)
    if info["backend"] == "cpu":
        for level in info["archs"]:
            missing = level_features(level) - machine.flags
            if missing:
                return mismatch(
                    _describe_cpu(machine, missing), f"a CPU with {level}", _other_build(info, machine, index)
                )
    floor = str(info["torch_floor"])
    if machine.torch is None:
        return mismatch("no torch", f"torch {floor} or newer", f'pip install "torch>={floor}"')
    if _numbers(machine.torch) < _numbers(floor):
        return mismatch(
            f"torch {machine.torch}", f"torch {floor} or newer", f'pip install --upgrade "torch>={floor}"'
        )
    return None


def _describe_cpu(machine: Machine, missing: frozenset[str]) -> str:
    absent = sorted(missing - machine.off)
    disabled = sorted(missing & machine.off)
    parts = [f"a CPU with {machine.level}"]
    if absent:
        parts.append(f"without {', '.join(absent)}")
    if disabled:
        parts.append(f"with {', '.join(disabled)} not enabled by the operating system")
    return ", ".join(parts)


def _other_build(info: Mapping[str, Any], machine: Machine, index: str) -> str:
    """The command that installs the best CPU build for this machine, by what the build info knows of the others."""
    order = list(LEVELS)
    fitting = [
        (max(order.index(level) for level in other["archs"]), str(other["profile"]))
        for other in info.get("profiles", ())
        if other["backend"] == "cpu"
        and all(level_features(level) <= machine.flags for level in other["archs"])
    ]
    if not fitting:
        return "no build fits this CPU: pelton needs one with AVX2 and FMA, enabled by the operating system (x86-64-v3)"
    address = index.rstrip("/") or "INDEX"
    command = (
        f"pip install --force-reinstall --no-deps --index-url {address}/p/{max(fitting)[1]}/simple/ pelton"
    )
    return command if index else f"{command}   (INDEX: the address that pelton was installed from)"


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(map(int, match[0].split("."))) if match else (0,)
    return (*numbers, 0, 0, 0)[:3]


# --- the machine ---


def this_machine() -> Machine:
    """The machine that `PELTON_HOST` describes, else the real one."""
    path = os.environ.get("PELTON_HOST", "").strip()
    return described_machine(Path(path), real_machine()) if path else real_machine()


def real_machine() -> Machine:
    """The machine that this process runs on."""
    from . import host

    cpu = host.cpu_features()
    return Machine(
        system=sys.platform,
        machine=platform.machine(),
        glibc=_glibc(),
        flags=frozenset(cpu["flags"]),
        off=frozenset(cpu["off"]),
        torch=_torch_version(),
    )


def _glibc() -> str | None:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError, AttributeError):
        return None
    return version if name == "glibc" else None


def _torch_version() -> str | None:
    """The version of torch without importing it, which takes a second; None when it is not installed."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return str(torch.__version__)


_HOST_KEYS = ("cpu", "glibc", "machine", "system", "torch")
_CPU_KEYS = ("enabled", "level", "with", "without")


def described_machine(path: Path, real: Machine) -> Machine:
    """The machine that a TOML file describes; what it leaves out is `real`'s.

    Raises:
        InvalidValueError: the file cannot be read, or names a key, level, instruction set or state that is unknown.
    """

    def wrong(text: str) -> InvalidValueError:
        return InvalidValueError(f"PELTON_HOST: {path}: {text}")

    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(f"cannot be read ({error})") from None

    def text(table: Mapping[str, Any], key: str) -> str:
        if not isinstance(table[key], str):
            raise wrong(f"{key}: expected text, found {table[key]!r}")
        return str(table[key])

    def names(table: Mapping[str, Any], key: str, known: Sequence[str]) -> frozenset[str]:
        value = table.get(key, [])
        if not isinstance(value, list):
            raise wrong(f"cpu.{key}: expected a list, found {value!r}")
        for name in value:
            if name not in known:
                raise wrong(
                    f"cpu.{key}: unknown {name!r}{did_you_mean(str(name), known)}; known: {', '.join(known)}"
                )
        return frozenset(ALIASES.get(name, name) for name in value)

    for key in data:
        if key not in _HOST_KEYS:
            raise wrong(f"unknown key {key!r}{did_you_mean(key, _HOST_KEYS)}; known: {', '.join(_HOST_KEYS)}")
    changes: dict[str, Any] = {key: text(data, key) for key in ("system", "machine") if key in data}
    # An empty text says that there is none.
    changes |= {key: text(data, key) or None for key in ("glibc", "torch") if key in data}
    machine = replace(real, **changes)
    cpu = data.get("cpu", {})
    if not isinstance(cpu, dict):
        raise wrong(f"cpu: expected a table, found {cpu!r}")
    for key in cpu:
        if key not in _CPU_KEYS:
            raise wrong(
                f"unknown key 'cpu.{key}'{did_you_mean(key, _CPU_KEYS)}; known: {', '.join(_CPU_KEYS)}"
            )
    known = sorted({*level_features("x86-64-v4"), *REGISTERS, *ALIASES})
    flags, off = machine.flags, machine.off
    if "level" in cpu:
        level = text(cpu, "level")
        if level not in LEVELS:
            raise wrong(
                f"cpu.level: unknown {level!r}{did_you_mean(level, LEVELS)}; known: {', '.join(LEVELS)}"
            )
        flags, off = level_features(level), frozenset()
    flags = (flags | names(cpu, "with", known)) - names(cpu, "without", known)
    if "enabled" in cpu:
        enabled = names(cpu, "enabled", sorted(set(REGISTERS.values())))
        has = flags | off
        flags = frozenset(flag for flag in has if flag not in REGISTERS or REGISTERS[flag] in enabled)
        off = has - flags
    return replace(machine, flags=flags, off=off - names(cpu, "without", known))


def describe(machine: Machine) -> str:
    """One line for a person."""
    return (
        f"{machine.system} {machine.machine}, glibc {machine.glibc or 'none'}, CPU {machine.level}, "
        f"torch {machine.torch or 'none'}"
    )
