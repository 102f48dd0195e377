"""The guard: does the installed build fit this machine?  Asked once, before the library is loaded.

A library for another CPU ends the process with an illegal instruction, and one for another glibc or torch fails with a
linker's riddle.  So the build info of the installed wheel is compared with the machine first, in this order:

1. the operating system and processor family,
2. the C library's version,
3. the CPU's instruction sets, as CPUID tells them and the operating system has enabled them,
4. torch: there, and not older than what the library was linked for,
5. for GPU builds the driver: there, with a GPU that is visible, and new enough for the runtime in the library,
6. the GPUs: an arch of the build runs on one of them,
7. torch: a build for this kind of GPU.

The first mismatch is raised as :class:`~pelton.errors.HardwareMismatch`, which says what the build is for (``needed``),
what is there (``found``) and the command that helps (``install``). A GPU build is imported all the same, for what needs
no GPU: there it is raised by the first operator. Of several GPUs those that the build does not run on are named in a
warning; :func:`check_gpu` refuses them one by one, which the engine asks of the GPU that it is to run on.

The driver is asked in another process (`_ask_driver.py`), because asking it here would break CUDA in forks of this
process, and fix CUDA_VISIBLE_DEVICES for good. A driver that gives no answer is no mismatch.

``PELTON_HOST`` may name a TOML file that describes a machine, which is then believed instead of the real one; what
the file leaves out is taken from the real one.  ``docs/install.md`` has an example.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ._gpus import Answer, Gpu, amd_gpus, ask_nvidia, ask_rocminfo, fit, visible
from .errors import HardwareMismatch, InvalidValueError, did_you_mean

__all__ = [
    "LEVELS",
    "Machine",
    "Misfit",
    "best_cpu_profile",
    "best_gpu_profile",
    "check",
    "check_gpu",
    "checked_address",
    "describe",
    "driver_is_older",
    "find_mismatch",
    "hiding",
    "index_address",
    "install_command",
    "misfits",
    "numbers",
    "this_machine",
    "uncovered_gpus",
]

logger = logging.getLogger(__name__)

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
    torch_cuda: str | None = None
    """CUDA version that torch was built with; None for a build without CUDA."""
    torch_rocm: str | None = None
    """ROCm version that torch was built with; None for a build without ROCm."""
    driver: str | None = None
    """CUDA version that the NVIDIA driver supports; empty when there is no driver, None when it is not known."""
    gpus: tuple[Gpu, ...] | None = None
    """The GPUs that a program sees, in their order; None when it is not known."""
    rocm: str | None = None
    """Version of ROCm; None when there is none, or it is not known."""
    gpu_note: str = ""
    """What went wrong when the driver was asked."""
    driver_library: str = ""
    """The driver's library; empty when there is none, or the machine is described."""

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
    info, machine = build_info.as_dict(), this_machine(gpus=build_info.backend != "cpu")
    mismatch = find_mismatch(info, machine, index_address())
    if mismatch is not None:
        raise mismatch
    for index in uncovered_gpus(info, machine):
        gpu = (machine.gpus or ())[index]
        logger.warning(
            "pelton does not run on GPU %d, %s: this build (profile %s) is for %s; %s",
            index,
            gpu,
            info["profile"],
            ", ".join(info["archs"]),
            hiding(info, machine, os.environ),
        )


def index_address() -> str:
    """The address that `PELTON_INDEX` gives to commands that install; "" when it is not set."""
    return os.environ.get("PELTON_INDEX", "")


# An index's address: a scheme, a host (or none for a file) and a path, without what a shell or an installer would read
# otherwise. The index's builder has the same.
ADDRESS = re.compile(
    r"((?i:https?)://([A-Za-z0-9._~%+:-]+@)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:[0-9]{1,5})?"
    r"|(?i:file)://(localhost)?(?=/))(/[A-Za-z0-9._~%@+,=:-]*)*"
)


def checked_address(address: str, told: str) -> str:
    """`address` when it can be an index's, or is empty.

    Args:
        told: what gave it, for the error: `--index`.

    Raises:
        InvalidValueError: it can be none.
    """
    if address and not ADDRESS.fullmatch(address):
        raise InvalidValueError(
            f"{told}: expected the index's address, such as https://HOST/PATH, found {_shown(address)}"
        )
    return address


def check_gpu(index: int) -> None:
    """Compare the installed build with one GPU, by its number as torch counts them.

    Raises:
        HardwareMismatch: the build does not run on it.
        InvalidValueError: `PELTON_HOST` does not describe a machine.
    """
    from . import build_info

    # PELTON_LIBRARY: the build info describes another library than the one that is used.
    if build_info.path is None or build_info.backend == "cpu" or os.environ.get("PELTON_LIBRARY"):
        return
    info, machine = build_info.as_dict(), this_machine(gpus=True)
    wrong = (misfit for misfit in misfits(info, machine, index_address()) if misfit.topic == "torch")
    misfit = _gpu_misfit(info, machine, index, index_address()) or next(wrong, None)
    if misfit is not None:
        raise misfit.error(build_info.profile)


@dataclass(frozen=True)
class Misfit:
    """One thing in which a build and a machine do not fit."""

    topic: Literal["machine", "torch", "gpu"]
    """What has to change: the machine or the build for its CPU, the installed torch, or GPU and driver."""
    found: str
    needed: str
    install: str

    def error(self, profile: str) -> HardwareMismatch:
        return HardwareMismatch(
            f"this build of pelton (profile {profile}) does not fit this machine",
            found=self.found,
            needed=self.needed,
            install=self.install,
        )


def find_mismatch(info: Mapping[str, Any], machine: Machine, index: str = "") -> HardwareMismatch | None:
    """The first thing in which a build (its build info) and a machine do not fit; None when they fit.

    Args:
        info: the content of `_build_info.json`.
        index: address of the index that the build came from, for the command that helps.
    """
    misfit = next(misfits(info, machine, index), None)
    return None if misfit is None else misfit.error(str(info["profile"]))


def misfits(info: Mapping[str, Any], machine: Machine, index: str = "") -> Iterator[Misfit]:
    """All things in which a build and a machine do not fit, each once, the first to be mended first."""
    if machine.system != "linux" or machine.machine != "x86_64":
        install = "no build for this system: use a Linux machine with an x86-64 processor"
        yield Misfit("machine", f"{machine.system} on {machine.machine}", "linux on x86_64", install)
        return
    glibc = str(info["glibc"])
    if machine.glibc is None or numbers(machine.glibc) < numbers(glibc):
        found = f"glibc {machine.glibc}" if machine.glibc else "a C library that is not glibc"
        install = "use a newer Linux distribution (Debian 10, Ubuntu 20.04, RHEL 8 or later), or build from source on this one"
        yield Misfit("machine", found, f"glibc {glibc} or newer", install)
    if info["backend"] == "cpu":
        missing = frozenset().union(*(level_features(level) for level in info["archs"])) - machine.flags
        if missing:
            needed = f"a CPU with {_either(info['archs'])}"
            yield Misfit(
                "machine", _describe_cpu(machine, missing), needed, _other_build(info, machine, index)
            )
    floor = str(info["torch_floor"])
    if machine.torch is None:
        yield Misfit("torch", "no torch", f"torch {floor} or newer", f'pip install "torch>={floor}"')
    elif numbers(machine.torch) < numbers(floor):
        install = f'pip install --upgrade "torch>={floor}"'
        yield Misfit("torch", f"torch {machine.torch}", f"torch {floor} or newer", install)
    if info["backend"] == "cpu":
        return
    gpu = _gpu_misfit(info, machine, None, index)
    if gpu is not None:
        yield gpu
    kind = "ROCm" if info["backend"] == "rocm" else "CUDA"
    if machine.torch is not None and not (machine.torch_rocm if kind == "ROCm" else machine.torch_cuda):
        yield Misfit(
            "torch",
            f"torch {machine.torch}, a build without {kind}",
            f"torch {floor} or newer, built for {kind}",
            f'pip install --force-reinstall "torch>={floor}"   (from an index with builds for {kind})',
        )


# NVIDIA's drivers by the first CUDA version of a major one that they support.
_DRIVERS: Mapping[int, int] = {11: 450, 12: 525, 13: 580}


def _gpu_misfit(info: Mapping[str, Any], machine: Machine, number: int | None, index: str) -> Misfit | None:
    """The first thing in which a GPU build does not fit driver and GPU; None when both fit.

    Args:
        number: the GPU's; None: the first one that the build runs on, if there is any.
    """
    other = _other_build(info, machine, index)
    if machine.driver == "" and info["backend"] != "rocm":
        why = f" ({machine.gpu_note})" if machine.gpu_note else ""
        return Misfit("gpu", f"no NVIDIA driver{why}", _wanted(info), other)
    if machine.gpus is None:  # not known, which is no mismatch
        return None
    wrong = _card_mismatch(info, machine, number)
    if wrong is None:
        return None
    found, needed, install = wrong
    return Misfit("gpu", found, needed, install or f"{other}{_own_build(info, machine, number)}")


def _wanted(info: Mapping[str, Any]) -> str:
    maker = "AMD" if info["backend"] == "rocm" else "NVIDIA"
    return f"an {maker} GPU that runs {_either(info['archs'])}"


def _own_build(info: Mapping[str, Any], machine: Machine, number: int | None) -> str:
    """What else there is for a GPU of AMD's that no build is for: code for a neighbour does not run on it."""
    gpus = [gpu for gpu in machine.gpus or () if gpu.backend == info["backend"] == "rocm"]
    if not gpus:
        return ""
    gpu = gpus[number or 0]
    if any(fit(map(str, other["archs"]), gpu) for other in info.get("profiles", ())):
        return ""
    return f"   (no build is for {gpu.arch}, and code for its neighbours does not run on it; to build one from source, see docs/new-gpu.md)"


def _card_mismatch(
    info: Mapping[str, Any], machine: Machine, number: int | None
) -> tuple[str, str, str] | None:
    """Found, needed and what helps (empty: another build) when the build does not run on GPU `number`."""
    archs, rocm = [str(arch) for arch in info["archs"]], info["backend"] == "rocm"
    maker, wanted = "AMD" if rocm else "NVIDIA", _wanted(info)
    gpus = [gpu for gpu in machine.gpus or () if gpu.backend == info["backend"]]
    if not gpus:
        if machine.gpu_note and not rocm:  # what NVIDIA's driver said
            return f"no {maker} GPU ({machine.gpu_note})", wanted, ""
        variable = next((name for name in _HIDING[rocm] if name in os.environ), "")
        if variable:
            found = f"no visible {maker} GPU ({variable}={os.environ[variable]})"
            return found, wanted, f"unset {variable}, or let it name a GPU"
        listed = " (the kernel's AMD driver lists none in /sys/class/kfd)" if rocm else ""
        return f"no {maker} GPU{listed}", wanted, ""
    if number is None:
        number = next((i for i, gpu in enumerate(gpus) if fit(archs, gpu) is not None), 0)
    if number >= len(gpus):
        return f"{len(gpus)} GPUs", f"a GPU number {number}", f"use a number from 0 to {len(gpus) - 1}"
    gpu, driver = gpus[number], None if rocm else machine.driver
    least = str(info.get("minimum_driver", ""))
    best = fit(archs, gpu)
    if best is None:  # before the driver: a newer one would not help
        others = [f"GPU {i}, {other}" for i, other in enumerate(gpus) if fit(archs, other) is not None]
        if others:
            found = f"GPU {number}, {gpu}; it runs on {', '.join(others)}"
            return found, wanted, hiding(info, machine, os.environ)
        return f"GPU {number}, {gpu}", wanted, ""
    if driver_is_older(driver, least):
        return f"an NVIDIA driver for CUDA {driver}", _driver(least), f"install {_driver(least)}"
    least = str(info.get("minimum_driver_ptx", ""))
    if best[1].startswith("compute_") and driver_is_older(driver, least):
        found = f"an NVIDIA driver for CUDA {driver} with GPU {number}, {gpu}"
        return (
            found,
            f"{_driver(least)}: it compiles the build's PTX for this GPU",
            f"install {_driver(least)}",
        )
    return None


def uncovered_gpus(info: Mapping[str, Any], machine: Machine) -> list[int]:
    """Numbers of the visible GPUs that a GPU build does not run on."""
    if info["backend"] == "cpu":
        return []
    gpus = [gpu for gpu in machine.gpus or () if gpu.backend == info["backend"]]
    return [index for index, gpu in enumerate(gpus) if fit(map(str, info["archs"]), gpu) is None]


def hiding(info: Mapping[str, Any], machine: Machine, environ: Mapping[str, str]) -> str:
    """How to hide the GPUs that a build does not run on."""
    variable = "HIP_VISIBLE_DEVICES" if info["backend"] == "rocm" else "CUDA_VISIBLE_DEVICES"
    gpus = [gpu for gpu in machine.gpus or () if gpu.backend == info["backend"]]
    bad = set(uncovered_gpus(info, machine))
    names = [name.strip() for name in environ.get(variable, "").split(",")]
    if len(names) != len(gpus):
        names = [str(index) for index in range(len(gpus))]
    good = [name for index, name in enumerate(names) if index not in bad]
    return f"{variable}={','.join(good)} hides the others"


# Variables that hide GPUs, without and with ROCm.
_HIDING = (("CUDA_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))


def _driver(least: str) -> str:
    number = _DRIVERS.get(numbers(least)[0]) if numbers(least)[1] == 0 else None
    return f"an NVIDIA driver for CUDA {least} or newer" + (f" (version {number} or newer)" if number else "")


def _either(archs: Sequence[str]) -> str:
    return " or ".join(archs)


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
    """The command that installs the best build for this machine, by what the build info knows of the others.

    1. Of the builds for the first GPU that there is one for, the one whose arch is nearest to it.
    2. Of the builds for this CPU, the one of the highest level.
    """
    best = best_gpu_profile(info, machine) or best_cpu_profile(info, machine)
    if best is None:
        return (
            "no build fits this machine: pelton needs a CPU with AVX2 and FMA, enabled by the operating system "
            "(x86-64-v3), or a GPU of one of its profiles"
        )
    return install_command(best, index)


def install_command(profile: str, index: str = "") -> str:
    """The command that replaces the installed build by that of another profile."""
    address = shlex.quote(f"{index.rstrip('/') or 'INDEX'}/p/{profile}/simple/")
    command = f"pip install --force-reinstall --no-deps --index-url {address} pelton"
    return command if index else f"{command}   (INDEX: the address that pelton was installed from)"


def best_gpu_profile(info: Mapping[str, Any], machine: Machine) -> str | None:
    """Of the other profiles for the first GPU that there is one for, the one whose arch is nearest to it."""
    for gpu in machine.gpus or ():
        if gpu.backend == "cuda" and machine.driver == "":
            continue
        fitting = [
            (best[0], str(other["profile"]))
            for other in info.get("profiles", ())
            if other["backend"] == gpu.backend and other["profile"] != info["profile"]
            if gpu.backend != "cuda"
            or not driver_is_older(machine.driver, str(other.get("minimum_driver", "")))
            if (best := fit(map(str, other["archs"]), gpu)) is not None
        ]
        if fitting:
            return min(fitting)[1]
    return None


def driver_is_older(driver: str | None, least: str) -> bool:
    """Whether a driver, by the CUDA version that it supports, is known to be older than a build needs."""
    return bool(driver and least and numbers(driver) < numbers(least))


def best_cpu_profile(info: Mapping[str, Any], machine: Machine) -> str | None:
    """Of the profiles for CPUs that a build info names, the one of the highest level that the machine has."""
    order = list(LEVELS)
    fitting = [
        (max(order.index(level) for level in other["archs"]), str(other["profile"]))
        for other in info.get("profiles", ())
        if other["backend"] == "cpu"
        and all(level_features(level) <= machine.flags for level in other["archs"])
    ]
    return max(fitting)[1] if fitting else None


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    match = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", version)
    parts = tuple(map(int, match[0].split("."))) if match else (0,)
    return (*parts, 0, 0, 0)[:3]


# --- the machine ---


def this_machine(gpus: bool = False) -> Machine:
    """The machine that `PELTON_HOST` describes, else the real one; `gpus`: with its GPUs, which takes a moment."""
    path = os.environ.get("PELTON_HOST", "").strip()
    if not path:
        return real_machine(gpus)
    described = described_machine(Path(path), real_machine(), os.environ)
    if gpus and described.gpus is None and described.driver is None:  # the file says nothing of them
        return _with_gpus(described)
    return described


def real_machine(gpus: bool = False) -> Machine:
    """The machine that this process runs on."""
    from . import host

    cpu = host.cpu_features()
    torch, builds = _torch()
    machine = Machine(
        system=sys.platform,
        machine=platform.machine(),
        glibc=_glibc(),
        flags=frozenset(cpu["flags"]),
        off=frozenset(cpu["off"]),
        torch=torch,
        torch_cuda=builds.get("cuda"),
        torch_rocm=builds.get("hip"),
    )
    return _with_gpus(machine) if gpus else machine


def _with_gpus(machine: Machine) -> Machine:
    answer = _ask_nvidia(tuple(os.environ.get(name) for name in _NVIDIA_VARIABLES))
    amd = visible(amd_gpus() or ask_rocminfo(os.environ), os.environ)
    known = answer.driver is not None or amd
    return replace(
        machine,
        driver=answer.driver,
        gpus=(*answer.gpus, *amd) if known else None,
        rocm=_rocm_version(),
        gpu_note=answer.note,
        driver_library=answer.library,
    )


# What the driver's answer depends on.
_NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")


@functools.lru_cache(maxsize=4)
def _ask_nvidia(environ: tuple[str | None, ...]) -> Answer:
    """The answer, asked for once: it takes some tenths of a second."""
    return ask_nvidia(os.environ)


def _rocm_version(file: Path = Path("/opt/rocm/.info/version")) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _glibc() -> str | None:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError, AttributeError):
        return None
    return version if name == "glibc" else None


def _torch() -> tuple[str | None, Mapping[str, str]]:
    """The version of torch, and of the platforms that it was built for (`cuda`, `hip`); None when it is not there.

    Without importing it, which takes a second.
    """
    if "torch" in sys.modules:
        return _torch_says(sys.modules["torch"])
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None, {}
    try:
        text = (Path(spec.origin or "").parent / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    pattern = r"""^(cuda|hip)\b[^=]*= *['"]([^'"]+)['"]"""
    builds = dict(re.findall(pattern, text, re.MULTILINE))
    # What is recorded beside it: another folder's record is of another torch.
    beside = [str(Path(spec.origin or "").parents[1])] if spec.origin else []
    for record in importlib.metadata.distributions(name="torch", path=beside):
        return record.version, builds
    own = re.search(r"""^__version__\b[^=]*= *['"](\d[^'"]*)['"]""", text, re.MULTILINE)
    return (own[1], builds) if own else (None, {})


def _torch_says(torch: Any) -> tuple[str, Mapping[str, str]]:
    builds = {name: getattr(torch.version, name, None) for name in ("cuda", "hip")}
    return str(torch.__version__), {name: str(value) for name, value in builds.items() if value}


_HOST_KEYS = (
    "cpu",
    "driver",
    "glibc",
    "gpu",
    "machine",
    "rocm",
    "system",
    "torch",
    "torch-cuda",
    "torch-rocm",
)
_GPU_KEYS = ("arch", "count", "memory", "name")
_CPU_KEYS = ("enabled", "level", "with", "without")


def described_machine(path: Path, real: Machine, environ: Mapping[str, str] | None = None) -> Machine:
    """The machine that a TOML file describes; what it leaves out is `real`'s.

    Args:
        environ: variables that hide GPUs, such as CUDA_VISIBLE_DEVICES.

    Raises:
        InvalidValueError: the file cannot be read, or names a key, level, arch, instruction set or state that is
            unknown.
    """

    def wrong(text: str) -> InvalidValueError:
        return InvalidValueError(f"PELTON_HOST: {path}: {text}")

    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise wrong("is not a file; name a TOML file that describes a machine, or unset PELTON_HOST")
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
    changes |= {key: text(data, key) or None for key in ("glibc", "rocm") if key in data}
    for key, value in changes.items():
        if key in ("glibc", "rocm") and value and not _VERSIONS[key].fullmatch(value):
            raise wrong(f"{key}: expected a version such as '2.28', or '' for none; found {_shown(value)}")
        if key in ("system", "machine") and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value):
            example = {"system": "linux", "machine": "x86_64"}[key]
            raise wrong(f"{key}: expected a name such as {example!r}, found {_shown(value)}")
    changes |= _described_torch(data, real, text, wrong)
    if "driver" in data:
        changes |= {"driver": _described_driver(text(data, "driver"), wrong), "gpus": (), "gpu_note": ""}
    if "gpu" in data:
        changes.setdefault("driver", None)
        changes |= {"gpus": visible(_described_gpus(data["gpu"], wrong), environ or {}), "gpu_note": ""}
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


_NUMBERS = r"[0-9]{1,4}(\.[0-9]{1,6}){1,3}"
_MADE = r"([-+.][0-9A-Za-z]{1,32}){0,4}"  # ROCm's versions end so: 6.4.43482-0f2d60242
# The versions that a description may hold, as `numbers` reads them.
_VERSIONS: Mapping[str, re.Pattern[str]] = {
    "glibc": re.compile(_NUMBERS),
    "rocm": re.compile(_NUMBERS + _MADE),
    "torch": re.compile(
        rf"{_NUMBERS}((a|b|rc)[0-9]{{1,4}})?(\.post[0-9]{{1,4}})?(\.dev[0-9]{{1,8}})?"
        r"(\+[0-9A-Za-z]{1,32}([._-][0-9A-Za-z]{1,32}){0,4})?"
    ),
    "torch-cuda": re.compile(_NUMBERS),
    "torch-rocm": re.compile(_NUMBERS + _MADE),
}


def _shown(value: str) -> str:
    """A value in an error, which may be of any length."""
    return repr(value if len(value) <= 80 else f"{value[:60]}...")


_PLATFORMS = (("torch-cuda", "torch_cuda", "CUDA"), ("torch-rocm", "torch_rocm", "ROCm"))


def _described_torch(
    data: Mapping[str, Any],
    real: Machine,
    text: Callable[[Mapping[str, Any], str], str],
    wrong: Callable[[str], InvalidValueError],
) -> dict[str, str | None]:
    """What the keys `torch`, `torch-cuda` and `torch-rocm` say. Refuses what contradicts itself."""
    if not any(key in data for key in ("torch", "torch-cuda", "torch-rocm")):
        return {}
    version = text(data, "torch") if "torch" in data else (real.torch or "").partition("+")[0]
    if version and "torch" in data and not _VERSIONS["torch"].fullmatch(version):
        raise wrong(
            f"torch: expected a version such as '2.12.0+cu130', or '' for none; found {_shown(version)}"
        )
    builds = {field: text(data, key) or None for key, field, _ in _PLATFORMS if key in data}
    told = _torch_builds(version or None)
    for key, field, name in _PLATFORMS:
        given = builds.get(field)
        if given and not _VERSIONS[key].fullmatch(given):
            raise wrong(
                f"{key}: expected a version of {name} such as '13.0', or '' for none; found {_shown(given)}"
            )
        if field in builds and field in told and numbers(given or "")[:2] != numbers(told[field] or "")[:2]:
            made = f"{name} {told[field]}" if told[field] else f"no {name}"
            found = f"torch {version!r} is built for {made}" if version else "there is no torch"
            raise wrong(f"{key} is {given or ''!r}, and {found}; correct one of them")
    if all(builds.get(field) for _, field, _ in _PLATFORMS):
        raise wrong(
            "torch-cuda and torch-rocm are both given: a torch is built for one of them; leave one out"
        )
    return {"torch": version or None, **told, **builds}


def _torch_builds(version: str | None) -> Mapping[str, str | None]:
    """What the end of a version says of the platform that torch was built for: `2.12.0+cu130`."""
    end = (version or "+cpu").partition("+")[2]
    if match := re.fullmatch(r"cu([0-9]{1,4})([0-9])", end):
        return {"torch_cuda": f"{match[1]}.{match[2]}", "torch_rocm": None}
    if match := re.fullmatch(r"rocm([0-9.]+)", end):
        return {"torch_cuda": None, "torch_rocm": match[1]}
    return {"torch_cuda": None, "torch_rocm": None} if end == "cpu" else {}


def _described_driver(text: str, wrong: Callable[[str], InvalidValueError]) -> str:
    if text and not re.fullmatch(r"[0-9]{1,2}\.[0-9]{1,2}", text):
        raise wrong(
            f"driver: expected the CUDA version that the driver supports, such as '13.0' (nvidia-smi shows it), or "
            f"'' for no driver; found {_shown(text)}"
        )
    return text


def _described_gpus(entries: object, wrong: Callable[[str], InvalidValueError]) -> list[Gpu]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise wrong(f"gpu: expected tables [[gpu]], found {entries!r}")
    gpus: list[Gpu] = []
    for index, entry in enumerate(entries):
        where = f"gpu[{index}]"
        for key in entry:
            if key not in _GPU_KEYS:
                known = f"{did_you_mean(key, _GPU_KEYS)}; known: {', '.join(_GPU_KEYS)}"
                raise wrong(f"unknown key {where + '.' + key!r}{known}")
        arch, name, count = entry.get("arch"), entry.get("name", ""), entry.get("count", 1)
        if not isinstance(arch, str) or not re.fullmatch(r"sm_[0-9]{2,3}|gfx[0-9a-f]{3,4}", arch):
            raise wrong(f"{where}.arch: expected a GPU's arch such as 'sm_90' or 'gfx90a', found {arch!r}")
        if not isinstance(name, str) or not name.isprintable() or len(name) > 200:  # it is shown to a person
            found = _shown(name) if isinstance(name, str) else repr(name)
            raise wrong(f"{where}.name: expected text of printable characters, found {found}")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1024:
            raise wrong(f"{where}.count: expected a number from 1 to 1024, found {count!r}")
        memory = re.fullmatch(r"([0-9]{1,6}) ?([MGT])iB", str(entry.get("memory", "0 GiB")))
        if memory is None:
            raise wrong(f"{where}.memory: expected a size such as '80 GiB', found {entry['memory']!r}")
        size = int(memory[1]) << {"M": 20, "G": 30, "T": 40}[memory[2]]
        gpus += [Gpu(arch, name, size)] * count
    return gpus


def describe(machine: Machine) -> str:
    """One line for a person."""
    parts = [
        f"{machine.system} {machine.machine}",
        f"glibc {machine.glibc or 'none'}",
        f"CPU {machine.level}",
        f"torch {machine.torch or 'none'}",
    ]
    if machine.driver:
        parts.append(f"NVIDIA driver for CUDA {machine.driver}")
    parts += [f"GPU {index}: {gpu}" for index, gpu in enumerate(machine.gpus or ())]
    return ", ".join(parts)
