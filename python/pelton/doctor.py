"""`pelton doctor`: what is wrong with an installation, or could be, and what to do about it.

One small check for each thing that goes wrong in practice, in three groups: `build` (what a build from source would
need here), `import` (whether the installed build fits and loads), `run` (what an engine needs). A check looks, and says
what it saw, why that matters and what to do; it changes nothing. One fault is one error: a check whose answer follows
from another's says so in a note. Everything works without a GPU, without torch and without the library. Whatever may
hang or crash (drivers, tools, torch, the library itself) runs in another process, with a time limit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from . import _environment, guard
from ._gpus import Gpu, fit
from .errors import PeltonError

__all__ = ["CHECKS", "Context", "Finding", "classify_load_error", "examine", "report"]

Status = Literal["ok", "note", "warning", "error"]
LIMIT = 5.0
"""Seconds that a tool has to answer in."""
LOAD_LIMIT = 180.0
"""Seconds that torch and the library have to load in."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    group: str
    check: str
    status: Status
    saw: str
    why: str = ""
    """Why it matters; empty when all is well."""
    do: str = ""
    """What helps; empty when nothing has to be done."""


@dataclass(frozen=True)
class Context:
    """What the checks look at."""

    machine: guard.Machine
    build: Mapping[str, Any]
    """The build info; without `profile` in a source tree that was not built."""
    environ: Mapping[str, str]
    root: Path = Path("/")
    folders: tuple[Path, ...] = ()
    """Of the package."""
    path: tuple[Path, ...] = ()
    """Where this Python looks for packages."""
    damage: str = ""
    """Why the build info cannot be read."""

    @property
    def backend(self) -> str:
        return str(self.build.get("backend", ""))

    @property
    def index(self) -> str:
        return self.environ.get("PELTON_INDEX", "")

    @functools.cached_property
    def misfits(self) -> tuple[guard.Misfit, ...]:
        """Everything in which the build and the machine do not fit."""
        return tuple(guard.misfits(self.build, self.machine, self.index)) if self.build.get("profile") else ()

    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the kind that the build is for."""
        return tuple(gpu for gpu in self.machine.gpus or () if gpu.backend == self.backend)


Check = Callable[[Context], Iterator[Finding]]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(group: str, name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = (group, function)
        return function

    return add


def _said(command: Sequence[str], environ: Mapping[str, str], limit: float = LIMIT) -> tuple[int | None, str]:
    """Exit status and text of a program: None when it cannot be run, or gave no answer (the text says which)."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that what it starts ends with it
        )
    except OSError as error:
        return None, error.strerror or str(error)
    with process:
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None, f"no answer within {limit:.0f} s"
    return process.returncode, text.strip()


def _first_line(text: str) -> str:
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "")


# --- build ---


def _version_of(command: Sequence[str], environ: Mapping[str, str], pattern: str) -> tuple[str, str]:
    """Version and path of a program; empty when there is none, or it says nothing understandable."""
    path = shutil.which(command[0], path=environ.get("PATH"))
    if path is None:
        return "", ""
    _, text = _said([path, *command[1:]], environ)
    match = re.search(pattern, text)
    return (match[1] if match else ""), path


@check("build", "cmake")
def check_cmake(at: Context) -> Iterator[Finding]:
    version, path = _version_of(["cmake", "--version"], at.environ, r"cmake version ([\d.]+)")
    if version and guard.numbers(version) >= (3, 28, 0):
        yield Finding("build", "cmake", "ok", f"CMake {version} ({path})")
        return
    saw = f"CMake {version} ({path})" if path else "no CMake"
    why = "a build from source needs 3.28; builds with isolation install it by themselves"
    yield Finding(
        "build", "cmake", "note", saw, why, 'pip install "cmake>=3.28" ninja, when you build without'
    )


@check("build", "compiler")
def check_compiler(at: Context) -> Iterator[Finding]:
    name = at.environ.get("CXX", "").strip() or "g++"
    version, path = _version_of([name, "-dumpfullversion"], at.environ, r"(\d+(?:\.\d+)*)")
    if version and (guard.numbers(version)[0] >= 12 or "clang" in name):
        yield Finding("build", "compiler", "ok", f"{Path(path).name} {version} ({path})")
        return
    saw = f"{name} {version or 'of unknown version'} ({path})" if path else f"no {name}"
    do = "install g++ 12 or newer (Debian: apt-get install g++), or set CXX"
    yield Finding("build", "compiler", "note", saw, "a build from source needs g++ 12 or clang 17", do)


@check("build", "cuda toolkit")
def check_cuda_toolkit(at: Context) -> Iterator[Finding]:
    """Compiler and headers of two toolkits do not fit together."""
    seen: dict[str, str] = {}
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        value = at.environ.get(variable, "").strip()
        if not value:
            continue
        program = Path(value) if variable == "CUDACXX" else Path(value) / "bin" / "nvcc"
        version = _version_of([str(program), "--version"], at.environ, r"release ([\d.]+)")[0]
        if version:
            seen[variable] = version
        else:
            why = "a variable that leads nowhere makes tools disagree about which CUDA there is"
            do = f"let {variable} name a toolkit, or unset it"
            yield Finding("build", "cuda toolkit", "warning", f"{variable}={value}: no nvcc there", why, do)
    places = [("nvcc", "PATH"), (str(at.root / "usr/local/cuda/bin/nvcc"), "the usual folder")]
    asked: set[str] = set()
    for command, place in places:
        version, path = _version_of([command, "--version"], at.environ, r"release ([\d.]+)")
        real = os.path.realpath(path)
        if real in asked:
            continue
        asked.add(real)
        if version:
            seen[f"{place} ({path})"] = version
        elif path:
            saw = f"{path} ({place}) does not say its version"
            why = "a build passes it over, and tools that do not may fail"
            yield Finding(
                "build", "cuda toolkit", "warning", saw, why, "install that toolkit again, or remove it"
            )
    text = ", ".join(f"{version} from {where}" for where, version in seen.items())
    if len(set(seen.values())) > 1:
        why = "compiler and headers of two toolkits do not fit together"
        do = "let CUDA_HOME, CUDACXX and PATH name one toolkit; `nox -s plan` says which one a build takes"
        yield Finding("build", "cuda toolkit", "warning", f"several: {text}", why, do)
    elif seen:
        yield Finding("build", "cuda toolkit", "ok", text)
    else:
        why = "only building GPU wheels needs it; a build can install the compiler by itself"
        yield Finding("build", "cuda toolkit", "ok", "no CUDA toolkit", why)


@check("build", "rocm")
def check_rocm(at: Context) -> Iterator[Finding]:
    """HIP's headers and a clang for AMD GPUs: of a ROCm release, or of the distribution."""
    named = [(name, value) for name in _ROCM_FOLDERS if (value := at.environ.get(name, "").strip())]
    for variable, value in named:
        if not _rocm_version(Path(value)):
            do = f"let {variable} name a ROCm installation, or unset it"
            yield Finding(
                "build", "rocm", "warning", f"{variable}={value}: no ROCm there", "builds for AMD use it", do
            )
    folders = [*(Path(value) for _, value in named), at.root / "opt/rocm", at.root / "usr"]
    found = [f"ROCm {version} ({folder})" for folder in folders if (version := _rocm_version(folder))]
    names = ("amdclang++", "hipcc", *(f"clang++-{number}" for number in range(22, 16, -1)))
    compilers = [path for name in names if (path := shutil.which(name, path=at.environ.get("PATH")))]
    if found:
        with_ = f", {compilers[0]}" if compilers else ", no compiler for it on PATH"
        yield Finding("build", "rocm", "ok", found[0] + with_)
    else:
        yield Finding("build", "rocm", "ok", "no ROCm", "only building wheels for AMD GPUs needs it")


_ROCM_FOLDERS = ("ROCM_PATH", "ROCM_HOME")


def _rocm_version(folder: Path) -> str:
    """Of the release in a folder; that of HIP where the release does not say; empty when there is none."""
    for name, pattern in (
        (".info/version", r"^(\d[\d.]*)"),
        ("include/hip/hip_version.h", r"HIP_VERSION_MAJOR\s+(\d+)[\s\S]*?HIP_VERSION_MINOR\s+(\d+)"),
    ):
        with contextlib.suppress(OSError):
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            if match := re.search(pattern, text):
                return ".".join(match.groups())
    return ""


@check("build", "python records")
def check_records(at: Context) -> Iterator[Finding]:
    """Installed records of pelton: pip leaves a second one in a --target folder, and tools then name the wrong one."""
    records = sorted(
        {
            f"{found.version} ({getattr(found, '_path', '')})"
            for found in importlib.metadata.distributions(path=list(map(str, _record_folders(at))))
            if (found.metadata["Name"] or "").lower() == "pelton"
        }
    )
    if len(records) > 1:
        why = "pip replaces nothing in a --target folder: the files are one version's, the records of two"
        do = "install into an empty folder or a new virtual environment"
        yield Finding(
            "build", "python records", "warning", f"{len(records)} records: {', '.join(records)}", why, do
        )
    else:
        yield Finding("build", "python records", "ok", records[0] if records else "no record: a source tree")


def _record_folders(at: Context) -> Iterator[Path]:
    yield from dict.fromkeys(folder.parent for folder in at.folders)


@check("build", "python packages")
def check_packages(at: Context) -> Iterator[Finding]:
    """What the installed record requires and other installations have replaced. Torch has a check of its own."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        saw = "not looked at: the package packaging is not installed"
        yield Finding(
            "build", "python packages", "note", saw, "Transformers needs it too", "pip install packaging"
        )
        return
    record = next(
        iter(importlib.metadata.distributions(name="pelton", path=list(map(str, _record_folders(at))))), None
    )
    if record is None:
        return
    checked, problems = 0, []
    for text in record.requires or []:
        wanted = Requirement(text)
        if wanted.name == "torch" or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        checked += 1
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append((f"no {wanted.name}", str(wanted)))
        else:
            if not wanted.specifier.contains(version, prereleases=True):
                problems.append((f"{wanted.name} {version}", str(wanted)))
    for saw, needed in problems:
        why = f"pelton needs {needed}; another installation has replaced or removed it"
        yield Finding("build", "python packages", "warning", saw, why, f'pip install "{needed}"')
    if not problems:
        yield Finding("build", "python packages", "ok", f"{checked} requirements are met")


# --- import ---


@check("import", "build")
def check_build(at: Context) -> Iterator[Finding]:
    if at.damage:
        why = "nothing says what this build is for"
        yield Finding("import", "build", "error", at.damage, why, "install pelton again")
        return
    if at.build.get("profile"):
        saw = f"pelton {at.build['version']}, profile {at.build['profile']}"
        yield Finding("import", "build", "ok", saw)
        return
    why = "a source tree has no kernels"
    do = "install a wheel, or build with 'pip install -e .'"
    hidden = next(
        (p for p in at.path if p / "pelton" not in at.folders and (p / "pelton/_build_info.json").is_file()),
        None,
    )
    if hidden is not None:
        why += f", and it hides the build in {hidden}"
        do = "start Python in another folder, so that the installed build is imported"
    yield Finding("import", "build", "error", f"no build in {', '.join(map(str, at.folders))}", why, do)


@check("import", "variables")
def check_variables(at: Context) -> Iterator[Finding]:
    """Misspelt variables, and those that replace the build or the machine."""
    strange = _environment.unknown(at.environ)
    for name, hint in strange.items():
        saw = f"{name}={at.environ[name]}: no variable of pelton's{hint}"
        yield Finding(
            "import", "variables", "warning", saw, "it has no effect", "correct its name, or unset it"
        )
    replaced = [name for name in ("PELTON_HOST", "PELTON_LIBRARY") if at.environ.get(name, "").strip()]
    if replaced:
        saw = ", ".join(f"{name}={at.environ[name]}" for name in replaced)
        why = "a described machine or another library stands in for the real one, in this report too"
        yield Finding(
            "import", "variables", "note", saw, why, f"unset {' and '.join(replaced)} when that is not wanted"
        )
    elif not strange:
        yield Finding("import", "variables", "ok", "none that replaces build or machine")


def _of_guard(at: Context, check: str, topic: str) -> Iterator[Finding]:
    """What the guard says to a topic, each fault once."""
    for misfit in at.misfits:
        if misfit.topic == topic:
            why = f"this build needs {misfit.needed}"
            yield Finding(CHECKS[check][0], check, "error", misfit.found, why, misfit.install)


@check("import", "machine")
def check_machine(at: Context) -> Iterator[Finding]:
    """System, C library and CPU."""
    if not at.build.get("profile"):
        return
    faults = list(_of_guard(at, "machine", "machine"))
    yield from faults or [Finding("import", "machine", "ok", guard.describe(at.machine))]


@check("import", "torch")
def check_torch(at: Context) -> Iterator[Finding]:
    machine = at.machine
    faults = list(_of_guard(at, "torch", "torch"))
    if faults:
        yield from faults
        return
    if machine.torch is None:  # without a build
        why, do = "the engine computes with it", 'pip install "torch>=2.10"'
        yield Finding("import", "torch", "error", "no torch", why, do)
        return
    builds = [f"{n} {v}" for n, v in (("CUDA", machine.torch_cuda), ("ROCm", machine.torch_rocm)) if v]
    saw = f"torch {machine.torch} for {' and '.join(builds) or 'CPUs'}"
    newer = guard.numbers(machine.torch_cuda or "0")[0] > guard.numbers(machine.driver or "999")[0]
    if newer and at.backend == "cuda" and machine.driver:
        saw += f", an NVIDIA driver for CUDA {machine.driver}"
        do = "install a newer driver, or a torch for the driver's CUDA"
        yield Finding("import", "torch", "error", saw, "torch itself does not run with this driver", do)
    else:
        yield Finding("import", "torch", "ok", saw)


@check("import", "host module")
def check_host_module(at: Context) -> Iterator[Finding]:
    from . import host

    if host.implementation == "extension":
        yield Finding("import", "host module", "ok", "the compiled one")
    else:
        why = "its twin in Python does the same, slower"
        status: Status = "note" if at.build.get("profile") else "ok"
        yield Finding(
            "import", "host module", status, host.reason, why, "use a Python that the wheel is built for"
        )


@check("import", "library")
def check_library(at: Context) -> Iterator[Finding]:
    if not at.environ.get("PELTON_LIBRARY"):
        if not at.build.get("profile"):
            return
        if at.misfits:
            topics = sorted({misfit.topic for misfit in at.misfits})
            why = "the guard keeps a library from a machine that it is not for"
            do = f"see {' and '.join(f'the check {topic!r}' for topic in topics)}"
            yield Finding("import", "library", "note", "not loaded: the build does not fit", why, do)
            return
    code = "from pelton import _library; print(_library.load())"
    path = os.pathsep.join(
        [*dict.fromkeys(str(folder.parent) for folder in at.folders), at.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-c", code]
    status, text = _said(command, {**at.environ, "PYTHONPATH": path.rstrip(os.pathsep)}, LOAD_LIMIT)
    if status == 0:
        yield Finding("import", "library", "ok", f"loads: {text.splitlines()[-1] if text else ''}")
        return
    why, do = classify_load_error(status, text)
    saw = text.splitlines()[-1][:400] if text else f"ended with status {status}"
    yield Finding("import", "library", "error", saw, why, do)


# What the dynamic linker says, what it means, what helps.
_LOAD_ERRORS: tuple[tuple[str, str, str], ...] = (
    (r"HardwareMismatch", "the build does not fit this machine", "see the check 'machine'"),
    (r"ModuleNotFoundError.*torch", "torch is not installed", 'pip install "torch>=2.10"'),
    (
        r"GLIBC_[\d.]+' not found",
        "this system's C library is older than the one that the library was linked for",
        "use a newer Linux distribution, or install the published wheel, which needs glibc 2.28",
    ),
    (
        r"(GLIBCXX|CXXABI)_[\d.]+' not found",
        "another, older libstdc++ was loaded before",
        "remove the folder with the older libstdc++ from LD_LIBRARY_PATH",
    ),
    (
        r"libtorch[\w.]*: cannot open shared object file",
        "torch's libraries were not found",
        "torch is damaged or not the one that is imported: install it again",
    ),
    (
        r"cannot open shared object file",
        "a shared library that the library needs is missing",
        "install the system package that has it, or the published wheel, which needs none",
    ),
    (
        r"undefined symbol: (aoti_|torch_)",
        "this torch is older than the one that the library was linked for",
        'pip install --upgrade "torch>=2.10"',
    ),
    (
        r"undefined symbol: \S*(at|c10|torch)\S*",
        "the library was built against another torch",
        "install the published wheel, or build again with the installed torch",
    ),
    (r"undefined symbol", "the library was linked with another version of a library", "install pelton again"),
    (
        r"wrong ELF class|invalid ELF header|file too short|cannot execute",
        "the library's file is damaged, or for another processor",
        "install pelton again, for this machine",
    ),
    (r"failed to map|Cannot allocate memory", "there is not enough memory", "see the check 'memory'"),
    (
        r"is not a file|is not in",
        "the library is not there",
        "install a wheel, or build with 'pip install -e .'",
    ),
)


def classify_load_error(status: int | None, text: str) -> tuple[str, str]:
    """Why the library did not load, and what helps, from a process's end and last words."""
    if status is None:
        return text, "see whether the file system and drivers of this machine answer"
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        if name == "SIGILL":
            return (
                "the processor lacks an instruction of the library (SIGILL)",
                "install the build for this CPU",
            )
        if name == "SIGKILL":
            return "the process was killed: memory ran out, perhaps", "see the check 'memory'"
        return f"the process crashed ({name})", "report it, with the output of pelton doctor --json"
    for pattern, why, do in _LOAD_ERRORS:
        if re.search(pattern, text):
            return why, do
    return (
        "it failed for a reason that is not known here",
        "report it, with the output of pelton doctor --json",
    )


# --- run ---


@check("run", "gpu")
def check_gpus(at: Context) -> Iterator[Finding]:
    machine, under_wsl = at.machine, _under_wsl(at.root)
    parts = [part for part in ("WSL" if under_wsl else "", machine.driver_library) if part]
    where = f" ({', '.join(parts)})" if parts else ""
    driver = f"NVIDIA driver for CUDA {machine.driver}{where}" if machine.driver else ""
    faults = list(_of_guard(at, "gpu", "gpu"))
    if under_wsl and not machine.driver and not machine.gpus:
        yield from _wsl_without_driver(at, "error" if faults else "note")
    elif faults:
        yield from (replace(fault, saw=f"{fault.saw}{'; ' if driver else ''}{driver}") for fault in faults)
    elif machine.gpu_note and machine.driver is None and at.backend != "rocm":
        do = "see what nvidia-smi and dmesg say; restart the machine or install the driver again"
        yield Finding("run", "gpu", "warning", machine.gpu_note, "no CUDA program will run", do)
    elif not machine.gpus:
        note = f" ({machine.gpu_note})" if machine.gpu_note and machine.driver else ""
        yield Finding("run", "gpu", "ok", f"no GPU; {driver or f'no GPU driver{where}'}{note}")
    else:
        yield _cards(at, f"; {driver}" if driver else "")
        for index in guard.uncovered_gpus(at.build, machine) if at.build.get("profile") else ():
            gpu = at.gpus()[index]
            why = f"this build is for {', '.join(at.build['archs'])}"
            do = f"{guard.hiding(at.build, machine, at.environ)}, or choose another with device='cuda:N'"
            yield Finding("run", "gpu", "warning", f"pelton does not run on GPU {index}, {gpu}", why, do)


def _wsl_without_driver(at: Context, status: Status) -> Iterator[Finding]:
    library = at.root / "usr/lib/wsl/lib/libcuda.so.1"
    there = library.exists()
    saw = f"WSL, the driver {library} does not answer" if there else "WSL without the Windows driver"
    why = "under WSL the GPU's driver is that of Windows"
    do = "install NVIDIA's driver in Windows, then restart WSL (wsl --shutdown); install no driver in Linux"
    yield Finding("run", "gpu", status, saw, why, do)


def _cards(at: Context, driver: str) -> Finding:
    """The cards that there are; for a build for CPUs with the build that would use them."""
    gpus = at.machine.gpus or ()
    sizes = [f", {gpu.memory >> 30} GiB" if gpu.memory else "" for gpu in gpus]  # 0: not known
    saw = ", ".join(f"{i}: {gpu}{sizes[i]}" for i, gpu in enumerate(gpus)) + driver
    if at.backend != "cpu":
        return Finding("run", "gpu", "ok", saw)
    why = "the installed build of pelton is for CPUs: it leaves the GPU alone"
    best = guard.best_gpu_profile(at.build, at.machine)
    if best is not None:
        return Finding("run", "gpu", "note", saw, why, guard.install_command(best, at.index))
    archs = ", ".join(dict.fromkeys(gpu.arch for gpu in gpus))
    return Finding(
        "run", "gpu", "note", saw, why, f"no build is for {archs}; to build one, see docs/new-gpu.md"
    )


@check("run", "gpu speed")
def check_gpu_speed(at: Context) -> Iterator[Finding]:
    """A GPU that runs code for an older one, where another build has code for it."""
    slower = []
    for index, gpu in enumerate(at.gpus()):
        own = fit(map(str, at.build["archs"]), gpu)
        others = [
            (best[0], str(other["profile"]))
            for other in at.build.get("profiles", ())
            if (best := fit(map(str, other["archs"]), gpu)) is not None
            and not guard.driver_is_older(at.machine.driver, str(other.get("minimum_driver", "")))
        ]
        if own is not None and others and min(others)[0] < own[0]:
            slower.append((index, gpu, own[1], min(others)[1]))
    for index, gpu, arch, profile in slower:
        saw = f"GPU {index}, {gpu}, runs this build's code for {arch}"
        why = f"profile {profile} is made for it, and faster"
        yield Finding("run", "gpu speed", "note", saw, why, guard.install_command(profile, at.index))
    if not slower and at.gpus():
        yield Finding("run", "gpu speed", "ok", "no build is nearer to the GPUs than this one")


@check("run", "features")
def check_features(at: Context) -> Iterator[Finding]:
    """Features that this build lacks and its profile's own build has: the label says so."""
    features = at.build.get("features", {})
    if not features:
        return
    marks = str(at.build.get("label", "")).split(".")
    lacking = [name for name in features if f"no{name.replace('-', '')}" in marks]
    saw = "; ".join(
        f"{word}: {', '.join(names)}"
        for word, names in (
            ("on", [name for name, on in features.items() if on]),
            ("off", [name for name, on in features.items() if not on]),
        )
        if names
    )
    if lacking:
        why = f"models that need {' or '.join(lacking)} are refused; the profile's own build has it"
        do = guard.install_command(str(at.build["profile"]), at.index)
        yield Finding("run", "features", "note", saw, why, do)
    else:
        yield Finding("run", "features", "ok", saw)


NCCL_SHARED = 1 << 30
"""Shared memory below which NCCL between GPUs of one machine may fail."""


@check("run", "nccl")
def check_nccl(at: Context) -> Iterator[Finding]:
    """What several GPUs talk through: the library in torch, another one before it, shared memory, the network."""
    name = "RCCL" if at.backend == "rocm" else "NCCL"
    if len(at.gpus()) < 2:
        yield Finding("run", "nccl", "ok", f"fewer than two GPUs: {name} is not used")
        return
    problems = [*_nccl_surroundings(at)]
    yield from problems
    if any(misfit.topic == "torch" for misfit in at.misfits):
        yield Finding("run", "nccl", "note", "not asked for", f"torch brings {name}", "see the check 'torch'")
        return
    status, text = _said([sys.executable, "-c", _ASK_NCCL], at.environ, LOAD_LIMIT)
    if status == 0 and (match := re.search(r"^nccl (\d[\d.]*)$", text, re.MULTILINE)):
        if not problems:
            yield Finding("run", "nccl", "ok", f"{name} {match[1]} in torch {at.machine.torch}")
        return
    said = text if status is None else (text.splitlines() or [f"ended with status {status}"])[-1][:400]
    saw = f"torch {at.machine.torch} has no {name} ({said})"
    do = "install a torch for the GPUs of this machine, with what it depends on (pip check)"
    yield Finding("run", "nccl", "warning", saw, "GPUs cannot work on one model without it", do)


_ASK_NCCL = """
import torch, torch.distributed as distributed
assert distributed.is_available() and distributed.is_nccl_available(), "a build without it"
print("nccl", ".".join(map(str, torch.cuda.nccl.version())))
"""


def _nccl_surroundings(at: Context) -> Iterator[Finding]:
    libraries = [Path(name) for name in re.split(r"[: ]", at.environ.get("LD_PRELOAD", "")) if "nccl" in name]
    folders = [Path(entry) for entry in at.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]
    libraries += [path for folder in folders for path in sorted(folder.glob("lib[nr]ccl.so*"))[:1]]
    if libraries:
        why = "it is loaded instead of the one that torch was built with: crashes, hangs, undefined symbols"
        do = "remove it from LD_LIBRARY_PATH and LD_PRELOAD"
        yield Finding("run", "nccl", "warning", f"another library first: {libraries[0]}", why, do)
    try:
        state = os.statvfs(at.root / "dev/shm")
        shared = state.f_blocks * state.f_frsize
    except OSError:
        shared = 0
    if shared < NCCL_SHARED:
        why = "GPUs of one machine exchange data through it; containers have 64 MiB unless told otherwise"
        do = "start the container with --shm-size=8g or --ipc=host"
        yield Finding("run", "nccl", "warning", f"{shared >> 20} MiB of shared memory (/dev/shm)", why, do)
    wanted = at.environ.get("NCCL_SOCKET_IFNAME", "")
    try:
        there = [path.name for path in (at.root / "sys/class/net").iterdir()]
    except OSError:
        there = []
    names = [name for name in wanted.lstrip("=").split(",") if name] if not wanted.startswith("^") else []
    if names and there and not any(have.startswith(name) for name in names for have in there):
        saw = f"NCCL_SOCKET_IFNAME={wanted}; there are {', '.join(sorted(there))}"
        do = "let it name one of them, or unset it"
        yield Finding(
            "run", "nccl", "warning", saw, "no such network interface: processes do not find one another", do
        )


def _under_wsl(root: Path) -> bool:
    try:
        return "microsoft" in (root / "proc/version").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


@check("run", "nvidia-smi")
def check_nvidia_smi(at: Context) -> Iterator[Finding]:
    path = shutil.which("nvidia-smi", path=at.environ.get("PATH"))
    if path is None:
        yield Finding("run", "nvidia-smi", "ok", "not on PATH; nothing needs it")
        return
    status, text = _said([path, "-L"], at.environ)
    if status == 0 and re.search(r"^GPU \d+:", text, re.MULTILINE):
        yield Finding(
            "run", "nvidia-smi", "ok", f"lists {len(re.findall(r'^GPU [0-9]+:', text, re.MULTILINE))} GPUs"
        )
        return
    saw = f"{path}: {text if status is None else _first_line(text) or f'ends with status {status}'}"
    why = "it is NVIDIA's own word on driver and cards; pelton does not need it"
    yield Finding("run", "nvidia-smi", "note", saw, why, "mind it when a GPU is not found")


@check("run", "memory")
def check_memory(at: Context) -> Iterator[Finding]:
    from .memory import available_memory

    free = available_memory()
    if free < 2 << 30:
        why = "weights and KV cache have to fit into it"
        yield Finding(
            "run",
            "memory",
            "warning",
            f"{free / 2**30:.1f} GiB free",
            why,
            "end other programs; lower kv_cache_memory",
        )
    else:
        yield Finding("run", "memory", "ok", f"{free / 2**30:.1f} GiB free")


@check("run", "cpu speed")
def check_cpu_speed(at: Context) -> Iterator[Finding]:
    """A build for a lower level than the CPU has, and settings that take its cores away."""
    levels = list(guard.LEVELS)
    if at.backend == "cpu":
        built = max(levels.index(arch) for arch in at.build["archs"])
        better = guard.best_cpu_profile(at.build, at.machine)
        if better is not None and better != at.build["profile"] and built < levels.index(at.machine.level):
            saw = f"a CPU with {at.machine.level}, a build for {', '.join(at.build['archs'])}"
            do = guard.install_command(better, at.index)
            yield Finding("run", "cpu speed", "note", saw, "another build would be faster here", do)
            return
    threads, cores = at.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    if threads.isdecimal() and int(threads) > cores:
        why = "more threads than cores wait for one another"
        do = "unset OMP_NUM_THREADS, or lower it"
        yield Finding("run", "cpu speed", "warning", f"OMP_NUM_THREADS={threads} on {cores} cores", why, do)
    else:
        yield Finding("run", "cpu speed", "ok", f"{cores} cores, {at.machine.level}")


# --- the whole ---


def examine() -> list[Finding]:
    """Run every check on this machine; one that fails itself is a finding too."""
    import pelton

    build: Mapping[str, Any] = {}
    damage = ""
    try:
        from . import build_info

        build = build_info.as_dict() if build_info.path is not None else {}
    except PeltonError as error:
        damage = str(error)
    findings: list[Finding] = []
    try:
        machine = guard.this_machine(gpus=True)
    except PeltonError as error:
        why = "the rest of this report is of the real machine"
        findings.append(
            Finding("import", "variables", "error", str(error), why, "mend the file, or unset PELTON_HOST")
        )
        machine = guard.real_machine(gpus=True)
    at = Context(
        machine,
        build,
        dict(os.environ),
        folders=tuple(map(Path, pelton.__path__)),
        path=tuple(Path(entry) for entry in sys.path if entry),
        damage=damage,
    )
    return [*findings, *run_checks(at)]


def run_checks(at: Context) -> list[Finding]:
    findings: list[Finding] = []
    for name, (group, function) in CHECKS.items():
        try:
            findings += function(at)
        except Exception as error:  # a doctor that falls ill itself helps nobody
            saw = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(group, name, "warning", saw, "", "report it"))
    return findings


def report(findings: Sequence[Finding], as_json: bool) -> str:
    """The findings as text for a person, or as JSON."""
    ok = not any(finding.status == "error" for finding in findings)
    if as_json:
        return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=2)
    marks = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.status]:<8} {finding.group}: {finding.check}: {finding.saw}")
        lines += [f"{'':<9}why: {finding.why}"] if finding.why and finding.status != "ok" else []
        lines += [f"{'':<9}do:  {finding.do}"] if finding.do and finding.status != "ok" else []
    counts = [
        f"{n} {word}"
        for word in ("error", "warning", "note")
        if (n := sum(f.status == word for f in findings))
    ]
    return "\n".join(
        [*lines, f"{len(findings)} checks" + (f": {', '.join(counts)}" if counts else ", all well")]
    )
