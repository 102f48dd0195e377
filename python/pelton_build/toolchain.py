"""What this machine has to build with, found by probing and returned as plain values.

Nothing is imported and nothing is guessed from names: programs are asked, with a time limit each, and
headers are read. A probe that fails is a value too; only `resolve` decides whether the plan minds.

The order in which a tool is taken; a variable that is set and unusable is an error, whatever else would do:

- C++ compiler: `CXX`; then `g++`, `c++`, `clang++` on PATH.
- CUDA: `CUDACXX` (a program); `CUDA_HOME`, `CUDA_PATH` (folders with bin/nvcc); `nvcc` on PATH;
  /usr/local/cuda, /opt/cuda, /usr/local/cuda-* from the newest on; the packages of the build environment.
  Headers and runtime are those of the toolkit that the program belongs to.
- ROCm: `HIPCXX` (a program); `ROCM_PATH`, `ROCM_HOME`, `HIP_PATH` (folders); `amdclang++` or `hipcc` on PATH;
  /opt/rocm, /opt/rocm-* from the newest on; the newest clang++ on PATH beside HIP headers in /usr. Of hipcc the clang++
  is taken that it runs. Device libraries are those of the toolkit, else the distribution's.
- torch headers: `PELTON_TORCH_DIR`; the environment that is being installed into; the build environment.
- Pythons for the host extension: the running one; `python3.N` on PATH; those of pyenv; /opt/python.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .plan import HostPython, Tool, TorchHeaders
from .settings import TORCH_DIR, Choices, scrubbed

__all__ = [
    "Probe",
    "Ran",
    "Toolchain",
    "probe_cuda",
    "probe_cxx",
    "probe_pythons",
    "probe_rocm",
    "probe_toolchain",
    "probe_torch",
    "run_limited",
]

LIMIT = 10.0
"""Seconds that a program has to answer in."""

OLDEST_PYTHON = (3, 11)
OLDEST_HIP_CLANG = 17


@dataclass(frozen=True)
class Probe:
    """The outcome of looking for one kind of tool."""

    tool: Tool | None = None
    """What is taken, by the documented order."""
    problem: str = ""
    """Why looking was ended with an error: a variable is set and unusable. A whole message."""
    others: tuple[Tool, ...] = ()
    """What else was seen and not taken."""
    looked: tuple[str, ...] = ()
    """Where was looked, in order, with what was wrong there."""


@dataclass(frozen=True)
class Toolchain:
    """This machine as a place to build. The default: an x86-64 Linux with one core and nothing installed."""

    system: str = "linux"
    machine: str = "x86_64"
    cxx: Probe = field(default_factory=Probe)
    cuda: Probe = field(default_factory=Probe)
    rocm: Probe = field(default_factory=Probe)
    torch: tuple[TorchHeaders, ...] = ()
    """Torch packages with headers, in the order of preference."""
    torch_problem: str = ""
    """Why the folder that the user named cannot be used. A whole message."""
    pythons: tuple[HostPython, ...] = ()
    pythons_out: tuple[str, ...] = ()
    """Pythons that were seen and cannot be built for, each with the reason."""
    cores: int = 1
    cores_origin: str = "assumed"
    memory: int = 2 << 30
    """Bytes available."""
    memory_origin: str = "assumed"


def probe_toolchain(environ: Mapping[str, str], choices: Choices, root: Path = Path("/")) -> Toolchain:
    """This machine as it is now. `root` is the file system's root, for tests. Raises nothing."""
    cores, cores_origin = probe_cores(root)
    memory, memory_origin = probe_memory(root)
    wanted = choices.torch_dir.value if choices.torch_dir is not None else None
    torch, torch_problem = probe_torch(wanted, _package_folders(), [Path(entry or ".") for entry in sys.path])
    pythons, pythons_out = probe_pythons(environ, root)
    machine = os.uname().machine if hasattr(os, "uname") else "unknown"
    return Toolchain(
        system=sys.platform,
        machine={"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower()),
        cxx=probe_cxx(environ),
        cuda=probe_cuda(environ, root, [Path(entry or ".") for entry in sys.path]),
        rocm=probe_rocm(environ, root),
        torch=torch,
        torch_problem=torch_problem,
        pythons=pythons,
        pythons_out=pythons_out,
        cores=cores,
        cores_origin=cores_origin,
        memory=memory,
        memory_origin=memory_origin,
    )


# --- asking programs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a program answered."""

    out: str = ""
    err: str = ""
    problem: str = ""
    """Why the answer does not count, as half a sentence; empty when the program ended with 0."""


def run_limited(
    command: Sequence[str], environ: Mapping[str, str], limit: float = LIMIT, text: str = ""
) -> Ran:
    """Run a program with nothing to read but `text`, for at most `limit` seconds; then it and its children
    are killed. Raises nothing."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "LC_ALL": "C"},
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, ValueError) as error:
        return Ran(problem=f"cannot be run ({getattr(error, 'strerror', None) or error})")
    try:
        out, err = process.communicate(text, timeout=limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return Ran(problem=f"gives no answer within {limit:g} s")
    if process.returncode != 0:
        said = (err.strip() or out.strip()).splitlines()
        code = process.returncode
        how = f"ends with status {code}" if code > 0 else f"is killed by signal {-code}"
        return Ran(out, err, how + (f" ({said[0][:200]})" if said else ""))
    return Ran(out, err)


def _is_program(path: Path) -> bool:
    """Whether this process may run it. Asked for its effective rights: a process that may read what its user may not
    (see `reproduce`) would be answered for the user."""
    effective = os.access in os.supports_effective_ids
    return _is_file(path) and os.access(path, os.X_OK, effective_ids=effective)


def _is_file(path: Path) -> bool:
    """Whether there is a file that this user may see; PATH can lead into other users' folders."""
    try:
        return path.is_file()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _inside(folder: Path) -> list[Path]:
    """What lies in a folder, sorted; nothing where this user may not look."""
    try:
        return sorted(folder.glob("*"))
    except OSError:
        return []


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environ.get("PATH", ""))


def _program(variable: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The one program that a variable names, as (path, "") or ("", problem)."""
    value = environ[variable].strip()
    if path := _which(value, environ):
        return str(Path(path).absolute()), ""  # CMake runs in another folder
    try:
        words = shlex.split(value)
    except ValueError:
        words = [value]
    if len(words) > 1:
        programs = [word for word in words if not word.startswith("-")] or words
        one = next((word for word in reversed(programs) if _which(word, environ)), programs[-1])
        language = {"CUDACXX": "CUDA", "HIPCXX": "HIP"}.get(variable, "CXX")
        hint = (
            f"; for a launcher such as ccache use -C cmake.define.CMAKE_{language}_COMPILER_LAUNCHER=ccache"
        )
        return (
            "",
            f"{variable}={value}: name one program without arguments, such as {variable}={one}{hint}",
        )
    return "", f"{variable}={value}: there is no such program; set {variable} to one that exists or unset it"


def _version_in(text: str) -> str:
    """The first version number in `text`, empty when there is none."""
    match = re.search(r"\d+(?:\.\d+){0,3}", text)
    return match[0] if match else ""


# --- host compiler ------------------------------------------------------------------------------------------


_C_DRIVER = re.compile(r"(?:.*-)?(gcc|clang|cc)(?:-[\d.]+)?", re.ASCII)
"""Names of programs that compile C++ files too, and then link without its library."""


def probe_cxx(environ: Mapping[str, str]) -> Probe:
    """The C++ compiler."""
    if environ.get("CXX", "").strip():
        path, problem = _program("CXX", environ)
        if problem:
            return Probe(problem=problem)
        if match := _C_DRIVER.fullmatch(Path(path).name):
            cxx = Path(path).name.replace(match[1], {"gcc": "g++", "clang": "clang++", "cc": "c++"}[match[1]])
            return Probe(
                problem=f"CXX={environ['CXX']}: {path} is the compiler of C and does not link the C++ library; "
                f"set CXX to that of C++, such as {cxx}"
            )
        tool, why = _cxx(path, "CXX", environ)
        return Probe(
            tool, f"CXX={environ['CXX']}: {path} {why}; set CXX to a C++ compiler or unset it" if why else ""
        )
    looked = []
    for name in ("g++", "c++", "clang++"):
        found = _which(name, environ)
        if found is None:
            looked.append(f"{name} on PATH")
            continue
        tool, why = _cxx(found, "PATH", environ)
        if tool is not None:
            return Probe(tool, looked=tuple(looked))
        looked.append(f"{found}, which {why}")
    return Probe(looked=tuple(looked))


def _cxx(path: str, origin: str, environ: Mapping[str, str]) -> tuple[Tool | None, str]:
    """The compiler at `path`, or why it is none."""
    said = run_limited([path, "--version"], environ)
    if said.problem:
        return None, said.problem
    if "clang" in said.out:
        version = _version_in(said.out.partition("version")[2])
        return (
            (Tool("cxx", "clang", path, version, origin), "")
            if version
            else (None, "does not tell its version")
        )
    # Asked for the number alone: the first line of --version is the distributor's.
    number = run_limited([path, "-dumpfullversion", "-dumpversion"], environ)
    version = number.out.strip() if not number.problem else ""
    if not re.fullmatch(r"\d+(\.\d+){0,3}", version):
        return None, f"is neither gcc nor clang (it says {(said.out.splitlines() or [''])[0][:100]!r})"
    return Tool("cxx", "gcc", path, version, origin), ""


# --- CUDA ---------------------------------------------------------------------------------------------------


def probe_cuda(
    environ: Mapping[str, str], root: Path = Path("/"), build_environment: Iterable[Path] = ()
) -> Probe:
    """The CUDA toolkit. `build_environment`: folders of Python packages, in which the compiler that a package
    index has lies as nvidia/cu13."""
    packages = [
        top for folder in build_environment for top in _inside(folder / "nvidia") if top.name.startswith("cu")
    ]
    return _toolkit(
        environ,
        program_variable="CUDACXX",
        folder_variables=("CUDA_HOME", "CUDA_PATH"),
        inside=("bin/nvcc",),
        on_path=("nvcc",),
        folders=_folders(root, ("usr/local/cuda", "opt/cuda"), "usr/local/cuda-*"),
        packages=packages,
        ask=_cuda,
    )


def _cuda(path: str, origin: str, environ: Mapping[str, str]) -> tuple[Tool | None, str]:
    environ = scrubbed(environ)
    said = run_limited([path, "--version"], environ)
    if said.problem:
        return None, said.problem
    match = re.search(r"release (\d+\.\d+)(?:, V(\d+(?:\.\d+){1,3}))?", said.out)
    if match is None:
        return None, "does not tell its CUDA version"
    top, why = _cuda_root(path, environ)
    if why:
        return None, why
    version, gcc, clang = _cuda_headers(top)
    return Tool(
        "cuda",
        "nvcc",
        path,
        match[2] or match[1],
        origin,
        root=str(top or ""),
        headers_version=version,
        host_limit=gcc,
        clang_limit=clang,
        runtime=str(_cuda_runtime(top) or ""),
    ), ""


def _cuda_root(path: str, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The toolkit of a compiler: where its file lies, or, for a wrapper script, where the real one says it
    lies; and why it cannot say so, when it fails."""
    for top in (Path(path).resolve().parent.parent, Path(path).parent.parent):
        if _cuda_header(top, "cuda.h") is not None:
            return top, ""
    said = run_limited([path, "--dryrun", "-x", "cu", os.devnull], environ)
    match = re.search(r"^#\$ (?:TOP|_HERE_)=(.+)$", said.err, re.MULTILINE)
    if match is None:
        return None, said.problem and f"{said.problem} when it is asked for its folder"
    here = Path(os.path.normpath(match[1].strip()))
    return (here.parent if here.name == "bin" else here), ""


def _cuda_header(top: Path, name: str) -> Path | None:
    for folder in ("include", f"targets/{os.uname().machine}-linux/include"):
        if _is_file(top / folder / name):
            return top / folder / name
    return None


def _cuda_runtime(top: Path | None) -> Path | None:
    """The runtime to link in whole. In packages it lies in lib, where nvcc itself does not look."""
    folders = ("lib64", f"targets/{os.uname().machine}-linux/lib", "lib")
    paths = [top / folder / "libcudart_static.a" for folder in folders] if top is not None else []
    return next((path for path in paths if _is_file(path)), None)


def _cuda_headers(top: Path | None) -> tuple[str, str, str]:
    """Version of a toolkit's headers, and the newest gcc and clang that they let through."""
    if top is None:
        return "", "", ""
    version = gcc = clang = ""
    if (header := _cuda_header(top, "cuda.h")) and (
        match := _search(header, r"^#define\s+CUDA_VERSION\s+(\d+)")
    ):
        version = f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    if header := _cuda_header(top, "crt/host_config.h"):
        if match := _search(header, r"__GNUC__\s*>\s*(\d+)"):
            gcc = match[1]
        if match := _search(header, r"__clang_major__\s*>=\s*(\d+)"):
            clang = str(int(match[1]) - 1)
    return version, gcc, clang


def _search(path: Path, pattern: str) -> re.Match[str] | None:
    try:
        return re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None


# --- ROCm ---------------------------------------------------------------------------------------------------


def probe_rocm(environ: Mapping[str, str], root: Path = Path("/")) -> Probe:
    """The ROCm compiler and toolkit."""
    inside = ("lib/llvm/bin/clang++", "llvm/bin/clang++", "bin/amdclang++", "bin/hipcc")
    probe = _toolkit(
        environ,
        program_variable="HIPCXX",
        folder_variables=("ROCM_PATH", "ROCM_HOME", "HIP_PATH"),
        inside=inside,
        on_path=("amdclang++", "hipcc"),
        folders=_folders(root, ("opt/rocm",), "opt/rocm-*"),
        ask=lambda path, origin, env: _rocm(path, origin, env, root),
    )
    if probe.tool is not None or probe.problem or not _is_file(_hip_header(root / "usr")):
        return probe
    # A distribution's ROCm: HIP headers in /usr and a clang++ with the AMDGPU backend, the newest one.
    for name in (*(f"clang++-{number}" for number in range(40, OLDEST_HIP_CLANG - 1, -1)), "clang++"):
        path = _which(name, environ)
        if path is not None:
            tool, why = _rocm(path, "PATH", environ, root)
            if tool is not None:
                return Probe(tool, others=probe.others, looked=probe.looked)
            probe = Probe(others=probe.others, looked=(*probe.looked, f"{path}, which {why}"))
    if not probe.looked or "clang++" not in " ".join(probe.looked):
        probe = Probe(
            others=probe.others, looked=(*probe.looked, f"clang++-{OLDEST_HIP_CLANG} or newer on PATH")
        )
    return probe


def _rocm(path: str, origin: str, environ: Mapping[str, str], root: Path) -> tuple[Tool | None, str]:
    environ = {**scrubbed(environ), "HIP_PLATFORM": "amd"}  # an nvcc on PATH turns hipcc into NVIDIA's
    said = run_limited([path, "--version"], environ)
    if said.problem:
        return None, said.problem
    given, program = path, Path(path)
    if program.name.startswith("hipcc"):
        match = re.search(r"^InstalledDir: *(.+)$", said.out, re.MULTILINE)
        program = Path(match[1].strip()) / "clang++" if match else program
        if match is None or not _is_file(program):
            return None, "does not say which clang++ it runs"
        path = str(program)
    if "clang" not in said.out:
        return None, "is no clang"
    clang = _version_in(said.out.partition("clang version")[2])
    if clang and int(clang.partition(".")[0]) < OLDEST_HIP_CLANG:
        return (
            None,
            f"is clang {clang}; {OLDEST_HIP_CLANG} is the oldest that makes code for every ROCm from 6 on",
        )
    archs = _hip_archs(path, environ)
    if not archs:
        return None, "has no AMDGPU backend"
    linker = run_limited([path, "-print-prog-name=ld.lld"], environ).out.strip()
    if not (linker and _which(linker, environ)):
        return None, "has no ld.lld, which links code for GPUs; install lld"
    for top in (*program.resolve().parents, *program.parents, *Path(given).parents, root / "usr"):
        version = _rocm_version(top)
        if version:
            libs = _device_libs(program, top, root)
            if libs is None:
                return None, "has no device libraries (amdgcn/bitcode/ocml.bc); install rocm-device-libs"
            return (
                Tool(
                    "rocm",
                    "hip-clang",
                    path,
                    version,
                    origin,
                    str(top),
                    version,
                    device_libs=str(libs),
                    archs=archs,
                ),
                "",
            )
    return None, "has no HIP headers in its folder or above"


def _hip_archs(path: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a clang++ knows; none when it has no such backend."""
    command = [path, "--target=amdgcn-amd-amdhsa", "-nogpulib", "--print-supported-cpus"]
    said = run_limited(command, environ)
    return tuple(re.findall(r"^\s*(gfx\w+)\s*$", f"{said.out}\n{said.err}", re.MULTILINE))


def _device_libs(program: Path, top: Path, root: Path) -> Path | None:
    """The folder of the device libraries: in the toolkit, beside the compiler, of the distribution."""
    folders = [top / "amdgcn/bitcode", top / "lib/amdgcn/bitcode"]
    compiler = program.resolve().parent.parent
    folders += [path / "lib/amdgcn/bitcode" for path in reversed(_inside(compiler / "lib/clang"))]
    folders += [compiler / "amdgcn/bitcode"]
    folders += [
        root / f"usr/lib/{os.uname().machine}-linux-gnu/amdgcn/bitcode",
        root / "usr/lib64/amdgcn/bitcode",
    ]
    return next((folder for folder in folders if _is_file(folder / "ocml.bc")), None)


def _rocm_version(top: Path) -> str:
    """Version of the ROCm release in `top`; that of HIP when the release does not say."""
    with contextlib.suppress(OSError):
        version = _version_in((top / ".info/version").read_text(encoding="utf-8", errors="replace"))
        if version:
            return version
    header = _hip_header(top)
    parts = [_search(header, rf"^#define\s+HIP_VERSION_{part}\s+(\d+)") for part in ("MAJOR", "MINOR")]
    return ".".join(part[1] for part in parts if part is not None) if all(parts) else ""


def _hip_header(top: Path) -> Path:
    return top / "include/hip/hip_version.h"


# --- what toolkits have in common ---------------------------------------------------------------------------

_Ask = Callable[[str, str, Mapping[str, str]], tuple[Tool | None, str]]


def _folders(root: Path, first: Iterable[str], pattern: str) -> list[Path]:
    def newest(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", path.name)[:4])

    return [*(root / name for name in first), *sorted(root.glob(pattern), key=newest, reverse=True)]


def _toolkit(
    environ: Mapping[str, str],
    *,
    program_variable: str,
    folder_variables: Sequence[str],
    inside: Sequence[str],
    on_path: Sequence[str],
    folders: Sequence[Path],
    ask: _Ask,
    packages: Sequence[Path] = (),
) -> Probe:
    """The first toolkit in the documented order that answers; all that are set by variables have to."""
    found: list[Tool] = []
    looked: list[str] = []
    if environ.get(program_variable, "").strip():
        path, problem = _program(program_variable, environ)
        if problem:
            return Probe(problem=problem)
        tool, why = ask(path, program_variable, environ)
        if tool is None:
            return Probe(
                problem=f"{program_variable}={environ[program_variable]}: {path} {why}; correct or unset it"
            )
        found.append(tool)
    for variable in folder_variables:
        value = environ.get(variable, "").strip()
        if not value:
            continue
        path, problem = _in_folder(Path(value), inside)
        if not Path(value).is_absolute():
            problem = "is no whole path, and the build runs in other folders"
        if problem:
            return Probe(problem=f"{variable}={value}: {problem}; correct or unset it")
        tool, why = ask(path, variable, environ)
        if tool is None:
            return Probe(problem=f"{variable}={value}: {path} {why}; correct or unset it")
        found.append(tool)
    places = [(_which(name, environ), f"{name} on PATH", "PATH") for name in on_path]
    places += [(_in_folder(folder, inside)[0] or None, str(folder), str(folder)) for folder in folders]
    places += [
        (path, str(folder), "the build environment")
        for folder in packages
        if (path := _in_folder(folder, inside)[0])
    ]
    for program, place, origin in places:
        if program is None:
            looked.append(place)
            continue
        tool, why = ask(program, origin, environ)
        if tool is None:
            looked.append(f"{program}, which {why}")
        else:
            found.append(tool)
    if not found:
        return Probe(looked=tuple(dict.fromkeys(looked)))
    return Probe(found[0], others=tuple(_distinct(found)[1:]), looked=tuple(looked))


def _in_folder(folder: Path, inside: Sequence[str]) -> tuple[str, str]:
    """The compiler in a toolkit's folder, as (path, "") or ("", problem)."""
    if not _is_folder(folder):
        return "", "there is no such folder"
    for name in inside:
        path = folder / name
        if _is_program(path):
            return str(path), ""
    return "", f"holds no {' or '.join(inside)}"


def _distinct(tools: Iterable[Tool]) -> list[Tool]:
    """Each toolkit once, however many ways lead to it."""
    kept: dict[str, Tool] = {}
    for tool in tools:
        kept.setdefault(os.path.realpath(tool.root or tool.path), tool)
    return list(kept.values())


# --- torch --------------------------------------------------------------------------------------------------


def _package_folders() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def probe_torch(
    wanted: str | None, installed_into: Iterable[Path], build_environment: Iterable[Path]
) -> tuple[tuple[TorchHeaders, ...], str]:
    """Torch packages with headers in the order of preference, and the problem with the folder that the
    user named."""
    found: dict[str, TorchHeaders] = {}
    if wanted is not None:
        for folder in (Path(wanted), Path(wanted) / "torch"):
            headers = _torch_in(folder, TORCH_DIR)
            if headers is not None:
                found[headers.path] = headers
                break
        else:
            return (), (
                f"{TORCH_DIR}={wanted}: holds no torch package with headers (version.py and "
                "include/torch/csrc/stable/library.h); name the folder of the torch package"
            )
    for folders, origin in (
        (installed_into, "the environment that is installed into"),
        (build_environment, "the build environment"),
    ):
        for folder in folders:
            headers = _torch_in(folder / "torch", origin)
            if headers is not None:
                found.setdefault(headers.path, headers)
    return tuple(found.values()), ""


def _torch_in(folder: Path, origin: str) -> TorchHeaders | None:
    if not _is_file(folder / "include/torch/csrc/stable/library.h"):
        return None
    match = _search(folder / "version.py", r"^__version__\s*(?::\s*\w+\s*)?=\s*['\"](\d+(?:\.\d+){1,2})")
    return TorchHeaders(str(folder.resolve()), match[1], origin) if match else None


# --- Pythons ------------------------------------------------------------------------------------------------

_ASK_PYTHON = """\
import json, os, sys, sysconfig
paths = [sysconfig.get_path("include"), sysconfig.get_config_var("INCLUDEPY")]
print(json.dumps({
    "name": sys.implementation.name,
    "version": list(sys.version_info[:2]),
    "path": getattr(sys, "_base_executable", None) or sys.executable,
    "include": next((p for p in paths if p and os.path.isfile(os.path.join(p, "Python.h"))), ""),
    "suffix": sysconfig.get_config_var("EXT_SUFFIX") or "",
    "debug": bool(sysconfig.get_config_var("Py_DEBUG")),
    "threads": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
}))
"""


def probe_pythons(
    environ: Mapping[str, str], root: Path = Path("/"), running: str = sys.executable
) -> tuple[tuple[HostPython, ...], tuple[str, ...]]:
    """CPythons that an extension can be built for, one of each version, and why others are left out."""
    found: dict[tuple[int, int], HostPython] = {}
    out: dict[str, str] = {}
    asked: set[str] = set()
    for path in _python_programs(environ, root, running):
        real = os.path.realpath(path)
        if real in asked:
            continue
        asked.add(real)
        said = run_limited([path, "-I", "-S", "-c", _ASK_PYTHON], environ)
        try:
            data = json.loads(said.out) if not said.problem else None
            version = (int(data["version"][0]), int(data["version"][1])) if data else (0, 0)
        except (ValueError, KeyError, TypeError):
            data, said = None, Ran(problem="gives no sensible answer")
        if data is None:
            out[path] = f"Python {path} {said.problem}, so no host extension is built for it"
            continue
        why = _python_out(data, version)
        if why:
            out[path] = f"Python {path} {why}, so no host extension is built for it"
        elif version >= OLDEST_PYTHON and version not in found:
            found[version] = HostPython(
                data["path"], f"{version[0]}.{version[1]}", data["include"], data["suffix"]
            )
            asked.add(os.path.realpath(data["path"]))
    have = {python.path for python in found.values()}
    return (
        tuple(found[version] for version in sorted(found)),
        tuple(reason for path, reason in sorted(out.items()) if path not in have),
    )


def _python_out(data: Mapping[str, object], version: tuple[int, int]) -> str:
    if version < OLDEST_PYTHON:
        return ""  # not worth a line
    if data["name"] != "cpython":
        return f"is {data['name']}, not CPython"
    if data["debug"]:
        return "is a debug build"
    if data["threads"]:
        return "is free-threaded"
    if not data["include"]:
        return "has no headers (install its development package)"
    return "" if data["suffix"] else "does not tell the suffix of its extensions"


def _python_programs(environ: Mapping[str, str], root: Path, running: str) -> Iterator[str]:
    """Programs that may be a Python, in the order of preference."""
    yield running
    minors = range(OLDEST_PYTHON[1], OLDEST_PYTHON[1] + 15)
    folders = [Path(entry) for entry in environ.get("PATH", "").split(os.pathsep) if entry]
    # A shim of pyenv only runs the versions that are switched on; those that are installed lie beside it.
    shims = [
        folder for folder in folders if folder.name == "shims" and _is_folder(folder.parent / "versions")
    ]
    pyenv = dict.fromkeys(
        [
            *([Path(environ["PYENV_ROOT"])] if environ.get("PYENV_ROOT") else []),
            *(folder.parent for folder in shims),
        ]
    )
    folders = [folder for folder in folders if folder not in shims]
    folders += [folder / "bin" for top in pyenv for folder in _inside(top / "versions")]
    for folder in folders:
        for name in (*(f"python3.{minor}" for minor in minors), "python3"):
            if _is_program(folder / name):
                yield str(folder / name)
    yield from (str(path) for path in sorted((root / "opt/python").glob("cp3*-cp3*/bin/python")))


# --- cores and memory ---------------------------------------------------------------------------------------


def probe_cores(root: Path = Path("/"), affinity: int | None = None) -> tuple[int, str]:
    """Cores that this process may use: those of the affinity mask, or fewer by a cgroup's quota."""
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    best, origin = affinity, "affinity"
    for folder in _cgroups(root, "cpu"):
        quota = None
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            limit, period = (folder / "cpu.max").read_text().split()
            quota = int(limit) / int(period) if limit != "max" else None
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            limit_us = int((folder / "cpu.cfs_quota_us").read_text())
            quota = limit_us / int((folder / "cpu.cfs_period_us").read_text()) if limit_us > 0 else quota
        if quota is not None and max(1, int(quota)) < best:
            best, origin = max(1, int(quota)), "cgroup quota"
    return best, origin


def probe_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that are free for a build: the system's, or fewer by a cgroup's limit."""
    best, origin = 2 << 30, "assumed"
    match = _search(root / "proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    if match is not None:
        best, origin = int(match[1]) << 10, "free"
    for folder in _cgroups(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                free = int((folder / limit_name).read_text()) - int((folder / usage_name).read_text())
                # File cache counts as used and can be had back at once.
                cached = _search(folder / "memory.stat", r"^(?:total_)?inactive_file (\d+)")
                free = max(0, free + (int(cached[1]) if cached else 0))
                if free < best:
                    best, origin = free, "free in the cgroup"
    return best, origin


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and those above it, of both versions of cgroups."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/"]
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = base if not controllers else base / controller
        relative = Path(name.lstrip("/"))
        if ".." in relative.parts:
            relative = Path()
        for folder in (relative, *relative.parents):
            yield top / folder
