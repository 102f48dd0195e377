"""Which profile this machine is, when nobody says.

1. A GPU that is found, with a profile for it that can be built here: its family has sources in the kernel
   table, and a toolkit that the profile allows is on this machine or can be installed. Exact archs come
   before compatible ones, compatible ones before PTX.
2. Otherwise the CPU: of the profiles whose level it has, that of the highest level.
3. A CPU whose flags cannot be read counts as the lowest level that a profile is for.

Profiles of equal rank are taken by name. A profile that is passed over says why. The flags are those that
Linux shows in /proc/cpuinfo: it hides those of registers that it does not save, so that they are true of
CPU and system.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .arch import cpu_flags_of, known_archs
from .errors import DetectionError
from .profile import Profile
from .table import KernelTable
from .toolchain import Toolchain, run_limited
from .values import Version, VersionRange

__all__ = ["Detection", "Gpu", "Hardware", "detect", "probe_hardware"]

LIMIT = 5.0
"""Seconds that the driver, and then nvidia-smi, has to answer in."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine."""

    backend: Literal["cuda", "rocm"]
    arch: str
    """`sm_90`, `gfx90a`."""
    name: str


@dataclass(frozen=True)
class Hardware:
    """What this machine computes with."""

    gpus: tuple[Gpu, ...] = ()
    cpu_flags: frozenset[str] | None = None
    """Flags of /proc/cpuinfo; None when they cannot be read."""
    cpu_name: str = ""
    notes: tuple[str, ...] = ()
    """What a driver or tool said instead of an answer."""


@dataclass(frozen=True)
class Detection:
    """The profile found, and what was passed over."""

    profile: Profile
    reason: str
    rejected: tuple[tuple[str, str], ...]
    """Name and reason of each other profile that was weighed, those of other CPU levels included."""


# --- the machine --------------------------------------------------------------------------------------------

# Runs in a process of its own: a broken driver may hang or crash whoever loads it.
_ASK_DRIVER = """\
import ctypes
for name in ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"):
    try:
        cuda = ctypes.CDLL(name)
        break
    except OSError:
        pass
else:
    raise SystemExit(0)
status = cuda.cuInit(0)
if status:
    raise SystemExit(0 if status == 100 else f"cuInit answers {status}")
count = ctypes.c_int()
status = cuda.cuDeviceGetCount(ctypes.byref(count))
if status:
    raise SystemExit(f"cuDeviceGetCount answers {status}")
for index in range(count.value):
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    cuda.cuDeviceGetName(name, 255, device)
    print(f"{major.value}.{minor.value}, {name.value.decode(errors='replace')}")
"""


def probe_hardware(
    environ: Mapping[str, str], root: Path = Path("/"), python: str = sys.executable
) -> Hardware:
    """This machine's GPUs and CPU. Asks drivers in other processes and with a time limit. Raises nothing."""
    gpus, notes = _nvidia(environ, python)
    flags, name = _cpu(root)
    return Hardware((*gpus, *_amd(root)), flags, name, notes)


def _nvidia(environ: Mapping[str, str], python: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    notes = []
    for what, command in (
        ("the NVIDIA driver", [python, "-I", "-S", "-c", _ASK_DRIVER]),
        ("nvidia-smi", ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader"]),
    ):
        said = run_limited(command, environ, LIMIT)
        if said.problem:
            if "cannot be run" not in said.problem:
                notes.append(f"{what} {said.problem}")
            continue
        gpus = [
            Gpu("cuda", f"sm_{match[1]}{match[2]}", (match[3] or "").strip() or "NVIDIA GPU")
            for line in said.out.splitlines()
            if (match := re.fullmatch(r"\s*(\d+)\.(\d)\s*(?:,(.*))?", line))
        ]
        if gpus:
            return tuple(gpus), ()
        if said.out.strip():
            notes.append(f"{what} says {said.out.strip().splitlines()[0][:200]!r}")
    return (), tuple(notes)


def _amd(root: Path) -> tuple[Gpu, ...]:
    """The kernel driver's list: major * 10000 + minor * 100 + stepping, the stepping as a hexadecimal
    digit."""
    gpus = []
    nodes = root / "sys/class/kfd/kfd/topology/nodes"

    def number(path: Path) -> int:
        return int(path.name) if path.name.isdecimal() else sys.maxsize

    for node in sorted(nodes.glob("*"), key=number):
        try:
            text = (node / "properties").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        version = int(match[1]) if match else 0
        if version:
            arch = f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
            gpus.append(Gpu("rocm", arch, "AMD GPU"))
    return tuple(gpus)


def _cpu(root: Path) -> tuple[frozenset[str] | None, str]:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, ""
    # Processors may differ; a program can be moved to any of them.
    flags = [frozenset(match.split()) for match in re.findall(r"^flags\s*:(.*)$", text, re.MULTILINE)]
    name = re.search(r"^model name\s*:\s*(.*?)\s*$", text, re.MULTILINE)
    return (frozenset.intersection(*flags) if flags else None), (name[1] if name else "")


# --- the choice ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """How well a profile fits: smaller ranks first."""

    rank: tuple[int, int]
    reason: str


def detect(
    hardware: Hardware,
    profiles: Sequence[Profile],
    table: KernelTable,
    toolchain: Toolchain,
    device: str | None = None,
    unreadable: tuple[tuple[str, str], ...] = (),
) -> Detection:
    """The profile for `hardware`, of backend `device` when that is named.

    Raises DetectionError listing every profile with the reason why it is not the one.
    """
    fits: list[tuple[_Fit, Profile]] = []
    rejected = [*unreadable]
    for profile in sorted(profiles, key=lambda profile: profile.name):
        if device is not None and profile.target.backend != device:
            continue
        fit = _fit(profile, hardware, table, toolchain)
        if isinstance(fit, _Fit):
            fits.append((fit, profile))
        else:
            rejected.append((profile.name, fit))
    if not fits:
        wanted = f" for backend {device}" if device is not None else ""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(rejected)) or "there is none"
        raise DetectionError(
            f"no profile{wanted} fits this machine ({reasons}); name one with -C profile=NAME"
        )
    fits.sort(key=lambda pair: (pair[0].rank, pair[1].name))
    best, profile = fits[0]
    passed = [(other.name, f"fits too, {profile.name} comes first") for _, other in fits[1:]]
    return Detection(profile, best.reason, tuple(sorted([*rejected, *passed])))


def _fit(profile: Profile, hardware: Hardware, table: KernelTable, toolchain: Toolchain) -> _Fit | str:
    if profile.target.system != toolchain.system or profile.target.machine != toolchain.machine:
        return f"for {profile.target.system} on {profile.target.machine}"
    if profile.target.backend == "cpu":
        return _fit_cpu(profile, hardware)
    return _fit_gpu(profile, hardware, table, toolchain)


def _fit_cpu(profile: Profile, hardware: Hardware) -> _Fit | str:
    levels, level = known_archs("cpu"), profile.target.arch[0]
    height = levels.index(level)
    if hardware.cpu_flags is None:
        return _Fit((100, height), "the CPU's flags cannot be read, so the lowest level is taken")
    missing = sorted(cpu_flags_of(level) - hardware.cpu_flags)
    if missing:
        return f"the CPU has no {', '.join(missing)}"
    return _Fit((100, -height), f"CPU {hardware.cpu_name} has {level}".replace("  ", " "))


def _fit_gpu(profile: Profile, hardware: Hardware, table: KernelTable, toolchain: Toolchain) -> _Fit | str:
    backend = profile.target.backend
    gpus = [gpu for gpu in hardware.gpus if gpu.backend == backend]
    if not gpus:
        return "no such GPU"
    ranks = [
        (rank, index, gpu, arch)
        for index, gpu in enumerate(gpus)
        for arch in profile.target.arch
        if (rank := _runs(arch, gpu.arch)) is not None
    ]
    if not ranks:
        found = ", ".join(dict.fromkeys(gpu.arch for gpu in gpus))
        return f"for {', '.join(profile.target.arch)}, found {found}"
    if not any(backend in family.device and not family.supports for family in table.families):
        return f"kernels.toml has no source for backend {backend} yet"
    why = _no_toolkit(profile, toolchain)
    if why:
        return why
    rank, _, gpu, arch = min(ranks, key=lambda entry: entry[:2])
    return _Fit((0, rank), f"{gpu.name} ({gpu.arch}) runs {arch}")


def _runs(arch: str, gpu: str) -> int | None:
    """How far `arch` is from `gpu` (0: made for it); None when it does not run there."""
    if gpu.startswith("gfx"):
        return 0 if arch.split(":")[0] == gpu else None
    match = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
    assert match is not None
    kind, number, suffix, have = match[1], int(match[2]), match[3], int(gpu.removeprefix("sm_"))
    if number > have or (suffix == "a" and number != have):
        return None
    if (kind == "sm" or suffix == "f") and number // 10 != have // 10:
        return None
    return have - number + (1000 if kind == "compute" else 0)


def _no_toolkit(profile: Profile, toolchain: Toolchain) -> str:
    """Why the profile's toolkit cannot be had here; empty when it can."""
    cuda = profile.target.backend == "cuda"
    probe = toolchain.cuda if cuda else toolchain.rocm
    allowed: VersionRange = profile.toolchain.cuda if cuda else profile.toolchain.rocm
    what = "CUDA" if cuda else "ROCm"
    if probe.problem:
        return probe.problem
    if probe.tool is not None:
        fits = bool(probe.tool.version) and Version.parse(probe.tool.version) in allowed
        return "" if fits else f"found {what} {probe.tool.version}, needed {allowed}"
    return "" if cuda and profile.toolchain.cuda_package is not None else f"no {what} compiler found"
