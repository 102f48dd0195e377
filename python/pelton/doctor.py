"""`pelton doctor`: what is wrong with an installation, or could be, and what to do about it.

One small check for each thing that goes wrong in practice, in three groups: `build` (what a build from source would
need here), `import` (whether the installed build fits and loads), `run` (what an engine needs). A check looks, and says
what it saw, why that matters and what to do; it changes nothing. Everything works without a GPU, without torch and
without the library. Whatever may hang or crash (drivers, tools, the library itself) runs in another process, with a
time limit.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from . import guard
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

    @property
    def backend(self) -> str:
        return str(self.build.get("backend", ""))


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
    version, path = _version_of(["nvcc", "--version"], at.environ, r"release ([\d.]+)")
    if version:
        seen[f"PATH ({path})"] = version
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
    path = Path(at.environ.get("ROCM_PATH", "").strip() or at.root / "opt/rocm")
    try:
        version = (path / ".info/version").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        version = ""
    if at.environ.get("ROCM_PATH", "").strip() and not version:
        do = "let ROCM_PATH name a ROCm installation, or unset it"
        yield Finding(
            "build", "rocm", "warning", f"ROCM_PATH={path}: no ROCm there", "builds for AMD use it", do
        )
    else:
        yield Finding("build", "rocm", "ok", f"ROCm {version} ({path})" if version else "no ROCm")


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


# --- import ---


@check("import", "build")
def check_build(at: Context) -> Iterator[Finding]:
    if not at.build.get("profile"):
        why = "a source tree has no kernels"
        do = "install a wheel, or build with 'pip install -e .'"
        yield Finding("import", "build", "error", f"no build in {', '.join(map(str, at.folders))}", why, do)
        return
    yield Finding("import", "build", "ok", f"pelton {at.build['version']}, profile {at.build['profile']}")


@check("import", "machine")
def check_machine(at: Context) -> Iterator[Finding]:
    if not at.build.get("profile"):
        return
    mismatch = guard.find_mismatch(at.build, at.machine, at.environ.get("PELTON_INDEX", ""))
    if mismatch is None:
        yield Finding("import", "machine", "ok", guard.describe(at.machine))
    else:
        yield Finding(
            "import", "machine", "error", mismatch.found, f"needed: {mismatch.needed}", mismatch.install
        )


@check("import", "torch")
def check_torch(at: Context) -> Iterator[Finding]:
    machine = at.machine
    if machine.torch is None:
        why, do = "the engine computes with it", 'pip install "torch>=2.10"'
        yield Finding("import", "torch", "error", "no torch", why, do)
        return
    builds = [f"{n} {v}" for n, v in (("CUDA", machine.torch_cuda), ("ROCm", machine.torch_rocm)) if v]
    saw = f"torch {machine.torch} for {' and '.join(builds) or 'CPUs'}"
    if at.backend == "cpu" and builds and machine.gpus:
        why = "the installed build of pelton is for CPUs: it leaves the GPU alone"
        yield Finding(
            "import", "torch", "note", f"{saw}, {machine.gpus[0]}", why, "install a GPU build of pelton"
        )
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
    if not at.build.get("profile") and not at.environ.get("PELTON_LIBRARY"):
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
    machine = at.machine
    under_wsl = _under_wsl(at.root)
    if under_wsl and not machine.driver:
        library = at.root / "usr/lib/wsl/lib/libcuda.so.1"
        saw = (
            "WSL without the Windows driver"
            if not library.exists()
            else f"WSL, the driver {library} does not answer"
        )
        why = "under WSL the GPU's driver is that of Windows"
        do = "install NVIDIA's driver in Windows, then restart WSL (wsl --shutdown); install no driver in Linux"
        yield Finding("run", "gpu", "warning" if at.backend == "cuda" else "note", saw, why, do)
        return
    parts = [part for part in ("WSL" if under_wsl else "", machine.driver_library) if part]
    where = f" ({', '.join(parts)})" if parts else ""
    if machine.gpu_note and machine.driver is None:
        do = "see what nvidia-smi and dmesg say; restart the machine or install the driver again"
        yield Finding("run", "gpu", "warning", machine.gpu_note, "no CUDA program will run", do)
    elif not machine.gpus:
        note = f" ({machine.gpu_note})" if machine.gpu_note and machine.driver else ""
        status: Status = "ok" if at.backend in ("", "cpu") else "error"
        driver = (
            f"an NVIDIA driver for CUDA {machine.driver}{where}"
            if machine.driver
            else f"no GPU driver{where}"
        )
        yield Finding(
            "run", "gpu", status, f"no GPU; {driver}{note}", "" if status == "ok" else "a GPU build needs one"
        )
    else:
        sizes = [f", {gpu.memory >> 30} GiB" if gpu.memory else "" for gpu in machine.gpus]  # 0: not known
        cards = ", ".join(f"{i}: {gpu}{sizes[i]}" for i, gpu in enumerate(machine.gpus))
        driver = f"; NVIDIA driver for CUDA {machine.driver}{where}" if machine.driver else ""
        yield Finding("run", "gpu", "ok", cards + driver)
    if at.build.get("profile"):
        for index in guard.uncovered_gpus(at.build, machine):
            gpu = (machine.gpus or ())[index]
            why = f"this build is for {', '.join(at.build['archs'])}"
            do = "hide it with CUDA_VISIBLE_DEVICES, or choose another with device='cuda:N'"
            yield Finding("run", "gpu", "warning", f"pelton does not run on GPU {index}, {gpu}", why, do)


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
            do = f"install profile {better}: pip install --force-reinstall --no-deps --index-url INDEX/p/{better}/simple/ pelton"
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

    folders = tuple(map(Path, pelton.__path__))
    findings: list[Finding] = []
    try:
        from . import build_info

        build: Mapping[str, Any] = build_info.as_dict() if build_info.path is not None else {}
    except PeltonError as error:
        findings.append(Finding("import", "build", "error", str(error), "", "install pelton again"))
        build = {}
    try:
        machine = guard.this_machine(gpus=True)
    except PeltonError as error:
        findings.append(
            Finding("import", "machine", "error", str(error), "", "mend the file, or unset PELTON_HOST")
        )
        return findings
    at = Context(machine, build, dict(os.environ), folders=folders)
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
