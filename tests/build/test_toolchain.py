"""Probes, against programs, folders and files made for the test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pelton_build.plan import Tool
from pelton_build.toolchain import (
    Probe,
    probe_cores,
    probe_cuda,
    probe_cxx,
    probe_memory,
    probe_pythons,
    probe_rocm,
    probe_torch,
    run_limited,
)
from plan_cases import script

GCC = 'case "$*" in *-dump*version*) echo {0};; *) echo "g++ (Distribution 9.9) {0}";; esac'
CLANG = 'echo "Distribution clang version {0} (x)"'
NVCC = """case "$*" in
  *--version*) echo "Cuda compilation tools, release {0}, V{0}.88";;
  *--dryrun*) echo '#$ TOP={1}/bin/..' >&2;;
esac"""
PATH = "/usr/bin:/bin"


def nvcc(top: Path, version: str = "13.0", headers: str | None = "13000", limit: str = "15") -> Path:
    """A CUDA toolkit in `top`."""
    if headers is not None:
        (top / "include/crt").mkdir(parents=True)
        (top / "include/cuda.h").write_text(f"// x\n#define CUDA_VERSION {headers}\n")
        (top / "include/crt/host_config.h").write_text(
            f"#if defined(__GNUC__)\n#if __GNUC__ > {limit}\n#error\n#if (__clang_major__ >= 21) || 0\n"
        )
    return script(top / "bin/nvcc", NVCC.format(version, top))


# --- asking programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("exit 0", ""),
        ("exit 9", "ends with status 9"),
        ("echo broken driver; exit 9", "ends with status 9 (broken driver)"),
        ("echo first >&2; echo second >&2; exit 1", "ends with status 1 (first)"),
        ("kill -SEGV $$", "is killed by signal 11"),
        ("sleep 600", "gives no answer within 0.5 s"),
        ("sleep 600 & wait", "gives no answer within 0.5 s"),
        # A child that outlives its parent holds the pipe open.
        ("sleep 600 & exit 0", "gives no answer within 0.5 s"),
    ],
)
def test_a_program_has_a_time_limit(tmp_path: Path, body: str, problem: str) -> None:
    started = time.monotonic()
    ran = run_limited([str(script(tmp_path / "tool", body))], {"PATH": PATH}, limit=0.5)
    assert ran.problem == problem
    assert time.monotonic() - started < 60  # not the 600 s that they would take


@pytest.mark.parametrize("name", ["missing", "folder", "text", "nul\0"])
def test_a_program_that_cannot_be_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("not a program")
    assert "cannot be run" in run_limited([str(tmp_path / name)], {}).problem


def test_output_that_is_no_text(tmp_path: Path) -> None:
    ran = run_limited([str(script(tmp_path / "tool", r"printf '\377ok\n'"))], {"PATH": PATH})
    assert ran.problem == "" and ran.out.endswith("ok\n")


# --- host compiler ---------------------------------------------------------------------------------------------------


def test_compilers_on_path_in_order(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert probe_cxx({"PATH": ""}).looked == ("g++ on PATH", "c++ on PATH", "clang++ on PATH")
    clang = script(tmp_path / "clang++", CLANG.format("19.1.7"))
    assert probe_cxx(environ).tool == Tool("cxx", "clang", str(clang), "19.1.7", "PATH")
    cxx = script(tmp_path / "c++", GCC.format("13.2.0"))
    assert probe_cxx(environ).tool == Tool("cxx", "gcc", str(cxx), "13.2.0", "PATH")
    gxx = script(tmp_path / "g++", GCC.format("14.2.0"))
    assert probe_cxx(environ).tool == Tool("cxx", "gcc", str(gxx), "14.2.0", "PATH")
    # CXX wins, by name or by path.
    for value in ("clang++", str(clang), f" {clang} "):
        assert probe_cxx({**environ, "CXX": value}).tool == Tool("cxx", "clang", str(clang), "19.1.7", "CXX")
    assert probe_cxx({**environ, "CXX": ""}).tool == probe_cxx(environ).tool


def test_a_broken_compiler_on_path_is_passed_over(tmp_path: Path) -> None:
    broken = script(tmp_path / "g++", "echo libmpc.so.3: cannot open >&2; exit 127")
    script(tmp_path / "clang++", CLANG.format("18.1"))
    probe = probe_cxx({"PATH": str(tmp_path)})
    assert probe.tool is not None and probe.tool.name == "clang"
    assert probe.looked[0] == f"{broken}, which ends with status 127 (libmpc.so.3: cannot open)"


def test_a_compiler_in_a_folder_with_blanks(tmp_path: Path) -> None:
    path = script(tmp_path / "a b'c/g++", GCC.format("12.2.0"))
    probe = probe_cxx({"PATH": "", "CXX": str(path)})
    assert probe.tool is not None and probe.tool.path == str(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/nonexistent", "CXX=/nonexistent: there is no such program"),
        ("ccache g++", "CXX=ccache g++: name one program without arguments, such as CXX=g++; for a launcher"),
        ("g++ -m32", "name one program without arguments, such as CXX=g++; for a launcher"),
        (
            "{0}/gcc",
            "/gcc is the compiler of C and does not link the C++ library; set CXX to that of C++, such as g++",
        ),
        ("x86_64-linux-gnu-gcc-12", "such as x86_64-linux-gnu-g++-12"),
        ("clang-19", "such as clang++-19"),
        ("g++ -m32 'x", "there is no such program"),
        ("tool", "is neither gcc nor clang (it says 'a tool 1.0')"),
        ("failing", "ends with status 3"),
    ],
)
def test_unusable_cxx_is_an_error(tmp_path: Path, value: str, message: str) -> None:
    script(tmp_path / "tool", "echo a tool 1.0")
    script(tmp_path / "failing", "exit 3")
    for name in ("g++", "gcc", "x86_64-linux-gnu-gcc-12", "clang-19"):
        script(tmp_path / name, GCC.format("12.2.0"))
    probe = probe_cxx({"PATH": str(tmp_path), "CXX": value.format(tmp_path)})
    assert probe.tool is None
    assert message in probe.problem and probe.problem.startswith("CXX=")


# --- CUDA ------------------------------------------------------------------------------------------------------------


def test_cuda_is_found_in_the_documented_order(tmp_path: Path) -> None:
    """P38: compiler and headers are of one toolkit, whichever way it is found."""
    versions = {
        "cudacxx": "12.1",
        "home": "12.2",
        "path": "12.3",
        "onpath": "12.4",
        "usr/local/cuda": "12.5",
        "usr/local/cuda-12.10": "12.10",
        "usr/local/cuda-12.9": "12.9",
    }
    for name, version in versions.items():
        major, minor = version.split(".")
        nvcc(tmp_path / name, version, str(int(major) * 1000 + int(minor) * 10))
    environ = {
        "CUDACXX": str(tmp_path / "cudacxx/bin/nvcc"),
        "CUDA_HOME": str(tmp_path / "home"),
        "CUDA_PATH": str(tmp_path / "path"),
        "PATH": f"{tmp_path / 'onpath/bin'}:{PATH}",
    }
    expected = list(versions.items())
    origins = [
        "CUDACXX",
        "CUDA_HOME",
        "CUDA_PATH",
        "PATH",
        *(str(tmp_path / name) for name, _ in expected[4:]),
    ]
    for origin, (name, version) in zip(origins, expected, strict=True):
        probe = probe_cuda(environ, tmp_path)
        tool = probe.tool
        assert tool is not None and not probe.problem
        assert (tool.origin, tool.version) == (origin, f"{version}.88")
        assert (tool.root, tool.headers_version, tool.host_limit) == (str(tmp_path / name), version, "15")
        remaining = len(origins) - origins.index(origin) - 1
        assert len(probe.others) == remaining
        environ.pop(origin, None)
        if origin == "PATH":
            environ["PATH"] = PATH
        elif origin not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
            (tmp_path / name / "bin/nvcc").unlink()
    assert probe_cuda({"PATH": PATH}, tmp_path).tool is None


def test_a_wrapper_leads_to_the_real_toolkit(tmp_path: Path) -> None:
    real = nvcc(tmp_path / "cuda-13.0")
    script(tmp_path / "bin/nvcc", f'exec {real} "$@"')
    tool = probe_cuda({"PATH": f"{tmp_path / 'bin'}:{PATH}"}, tmp_path).tool
    assert tool is not None
    assert (tool.root, tool.headers_version) == (str(tmp_path / "cuda-13.0"), "13.0")


def test_a_wrapper_that_fails_says_what_the_compiler_said(tmp_path: Path) -> None:
    script(
        tmp_path / "bin/nvcc",
        'case "$*" in *--version*) echo "release 13.0, V13.0.88";; *) echo "nvcc fatal: no TMPDIR" >&2; exit 1;; esac',
    )
    probe = probe_cuda({"CUDACXX": str(tmp_path / "bin/nvcc"), "PATH": PATH}, tmp_path)
    assert probe.tool is None
    assert "nvcc fatal: no TMPDIR" in probe.problem


def test_variables_that_are_not_used_do_not_reach_a_wrapper(tmp_path: Path) -> None:
    real = nvcc(tmp_path / "cuda-13.0")
    script(tmp_path / "bin/nvcc", f'[ -z "$NVCC_APPEND_FLAGS$NVCC_CCBIN" ] || exit 1; exec {real} "$@"')
    environ = {
        "PATH": f"{tmp_path / 'bin'}:{PATH}",
        "NVCC_APPEND_FLAGS": "--nosuch",
        "NVCC_CCBIN": "/nonexistent",
    }
    tool = probe_cuda(environ, tmp_path).tool
    assert tool is not None and tool.headers_version == "13.0"


def test_a_link_leads_to_the_real_toolkit(tmp_path: Path) -> None:
    nvcc(tmp_path / "usr/local/cuda-13.0")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    probe = probe_cuda({"PATH": PATH}, tmp_path)
    assert probe.tool is not None and probe.tool.root == str(tmp_path / "usr/local/cuda-13.0")
    assert probe.others == ()  # two ways to one toolkit


@pytest.mark.parametrize("folder", ["lib64", f"targets/{os.uname().machine}-linux/lib", "lib"])
def test_the_runtime_to_link_in(tmp_path: Path, folder: str) -> None:
    nvcc(tmp_path)
    environ = {"CUDA_HOME": str(tmp_path), "PATH": PATH}
    tool = probe_cuda(environ, tmp_path).tool
    assert tool is not None and tool.runtime == "" and tool.clang_limit == "20"
    library = tmp_path / folder / "libcudart_static.a"
    library.parent.mkdir(parents=True)
    library.touch()
    tool = probe_cuda(environ, tmp_path).tool
    assert tool is not None and tool.runtime == str(library)


def test_the_compiler_of_the_package_index_comes_last(tmp_path: Path) -> None:
    site = tmp_path / "env/site-packages"
    nvcc(site / "nvidia/cu13")
    (site / "nvidia/cudnn").mkdir()
    tool = probe_cuda({"PATH": PATH}, tmp_path, [tmp_path / "other", site]).tool
    assert tool is not None
    assert (tool.origin, tool.root) == ("the build environment", str(site / "nvidia/cu13"))
    nvcc(tmp_path / "usr/local/cuda")
    probe = probe_cuda({"PATH": PATH}, tmp_path, [site])
    assert probe.tool is not None and probe.tool.root == str(tmp_path / "usr/local/cuda")
    assert [other.root for other in probe.others] == [str(site / "nvidia/cu13")]


def test_toolkit_without_headers(tmp_path: Path) -> None:
    nvcc(tmp_path, headers=None)
    tool = probe_cuda({"PATH": f"{tmp_path / 'bin'}:{PATH}"}, tmp_path).tool
    assert tool is not None and tool.version == "13.0.88" and tool.headers_version == ""


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CUDA_HOME", "/nonexistent", "CUDA_HOME=/nonexistent: there is no such folder"),
        ("CUDA_HOME", "{0}/empty", "holds no bin/nvcc"),
        ("CUDA_PATH", "/nonexistent", "CUDA_PATH=/nonexistent: there is no such folder"),
        ("CUDACXX", "/nonexistent", "CUDACXX=/nonexistent: there is no such program"),
        ("CUDACXX", "{0}/good/bin/nvcc -v", "name one program without arguments"),
        ("CUDACXX", "/bin/echo", "does not tell its CUDA version"),
        ("CUDA_HOME", "{0}/broken", "ends with status 1 (no)"),
    ],
)
def test_unusable_cuda_variable_is_an_error(tmp_path: Path, variable: str, value: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    nvcc(tmp_path / "good")
    script(tmp_path / "broken/bin/nvcc", "echo no; exit 1")
    environ = {"PATH": f"{tmp_path / 'good/bin'}:{PATH}", variable: value.format(tmp_path)}
    probe = probe_cuda(environ, tmp_path)
    assert probe.tool is None
    assert message in probe.problem and probe.problem.startswith(f"{variable}=")
    # Not even when a stronger variable is sound.
    if variable != "CUDACXX":
        assert (
            probe_cuda({**environ, "CUDACXX": str(tmp_path / "good/bin/nvcc")}, tmp_path).problem
            == probe.problem
        )


@pytest.mark.parametrize(
    ("variable", "language", "probe"),
    [("CUDACXX", "CUDA", probe_cuda), ("HIPCXX", "HIP", probe_rocm)],
)
def test_a_launcher_is_named_for_the_language(
    tmp_path: Path, variable: str, language: str, probe: Callable[..., Probe]
) -> None:
    compiler = script(tmp_path / "bin/compiler", "true")
    script(tmp_path / "bin/ccache", "true")
    environ = {"PATH": str(compiler.parent), variable: "ccache compiler"}
    problem = probe(environ, tmp_path).problem
    assert f"{variable}=compiler; for a launcher" in problem
    assert f"-C cmake.define.CMAKE_{language}_COMPILER_LAUNCHER=ccache" in problem


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMake runs in another folder, where they would lead elsewhere."""
    nvcc(tmp_path / "cuda")
    monkeypatch.chdir(tmp_path)
    tool = probe_cuda({"PATH": PATH, "CUDACXX": "cuda/bin/nvcc"}, tmp_path).tool
    assert tool is not None and tool.path == str(tmp_path / "cuda/bin/nvcc")
    for variable, value in (("CUDA_HOME", "cuda"), ("CUDA_PATH", "./cuda")):
        problem = probe_cuda({"PATH": PATH, variable: value}, tmp_path).problem
        assert problem.startswith(
            f"{variable}={value}: is no whole path, and the build runs in other folders"
        )
    problem = probe_rocm({"PATH": PATH, "ROCM_HOME": "cuda"}, tmp_path).problem
    assert problem.startswith("ROCM_HOME=cuda: is no whole path")


# --- ROCm ------------------------------------------------------------------------------------------------------------


HIP_CLANG = """case "$*" in
  *--version*) echo "AMD clang version {0} (x)"; echo "InstalledDir: {1}";;
  *--print-supported-cpus*) printf 'Available CPUs for this target:\\n\\n\\tgfx90a\\n\\tgfx1100\\n' >&2;;
  *ld.lld*) echo {1}/ld.lld;;
esac"""


def hip_clang(path: Path, version: str = "19.0.0", lld: bool = True) -> Path:
    if lld:
        script(path.parent / "ld.lld", "true")
    return script(path, HIP_CLANG.format(version, path.parent))


def device_libs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "ocml.bc").touch()
    return folder


def rocm(top: Path, version: str, hip: str = "6 4", clang: str = "19.0.0") -> Path:
    major, minor = hip.split()
    (top / "include/hip").mkdir(parents=True)
    (top / "include/hip/hip_version.h").write_text(
        f"#define HIP_VERSION_MAJOR {major}\n#define HIP_VERSION_MINOR {minor}\n"
    )
    if version:
        (top / ".info").mkdir()
        (top / ".info/version").write_text(f"{version}-47\n")
        device_libs(top / "amdgcn/bitcode")
    return hip_clang(top / "lib/llvm/bin/clang++", clang)


def test_rocm_is_found_in_the_documented_order(tmp_path: Path) -> None:
    rocm(tmp_path / "home", "7.0.1")
    rocm(tmp_path / "other", "7.1.0")
    rocm(tmp_path / "opt/rocm", "6.4.1")
    rocm(tmp_path / "opt/rocm-6.2.0", "6.2.0")
    environ = {"PATH": PATH, "ROCM_PATH": str(tmp_path / "home"), "ROCM_HOME": str(tmp_path / "other")}
    tool = probe_rocm(environ, tmp_path).tool
    assert tool is not None
    assert (tool.version, tool.origin, tool.root) == ("7.0.1", "ROCM_PATH", str(tmp_path / "home"))
    assert tool.device_libs == str(tmp_path / "home/amdgcn/bitcode") and tool.archs == ("gfx90a", "gfx1100")
    del environ["ROCM_PATH"]
    tool = probe_rocm(environ, tmp_path).tool
    assert tool is not None and (tool.version, tool.origin) == ("7.1.0", "ROCM_HOME")
    del environ["ROCM_HOME"]
    probe = probe_rocm(environ, tmp_path)
    assert probe.tool is not None and probe.tool.version == "6.4.1"
    assert [other.version for other in probe.others] == ["6.2.0"]
    assert probe_rocm({"PATH": PATH}, tmp_path / "home").tool is None


def test_rocm_of_a_distribution(tmp_path: Path) -> None:
    """The newest clang++ with a number wins over one without, which is the distribution's oldest."""
    rocm(tmp_path / "usr", "", hip="5 2")
    libs = device_libs(tmp_path / "usr/lib" / f"{os.uname().machine}-linux-gnu" / "amdgcn/bitcode")
    hip_clang(tmp_path / "bin/clang++", "14.0.6")
    hip_clang(tmp_path / "bin/clang++-18", "18.1.8")
    clang = hip_clang(tmp_path / "bin/clang++-19", "19.1.7")
    tool = probe_rocm({"PATH": f"{tmp_path / 'bin'}:{PATH}"}, tmp_path).tool
    assert tool is not None
    assert (tool.path, tool.version, tool.root) == (str(clang), "5.2", str(tmp_path / "usr"))
    assert tool.device_libs == str(libs)


def test_hipcc_is_asked_for_its_clang(tmp_path: Path) -> None:
    """CMake compiles HIP with clang alone, and an nvcc on PATH must not turn hipcc into NVIDIA's."""
    clang = rocm(tmp_path / "rocm", "6.4.1")
    (tmp_path / "rocm/bin").mkdir()
    wrapper = script(
        tmp_path / "bin/hipcc",
        f'if [ "$HIP_PLATFORM" != amd ]; then echo "nvcc: NVIDIA (R) Cuda compiler driver"; else\n'
        f'echo "HIP version: 6.4"; echo "AMD clang version 19.0.0"; echo "InstalledDir: {clang.parent}"; fi',
    )
    nvcc(tmp_path / "cuda")
    environ = {"PATH": f"{wrapper.parent}:{tmp_path / 'cuda/bin'}:{PATH}", "HIP_PLATFORM": "nvidia"}
    tool = probe_rocm(environ, tmp_path).tool
    assert tool is not None and (tool.path, tool.version, tool.origin) == (str(clang), "6.4.1", "PATH")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda top: hip_clang(top / "lib/llvm/bin/clang++", "16.0.0"), "is clang 16.0.0; 17 is the oldest"),
        (lambda top: (top / "lib/llvm/bin/ld.lld").unlink(), "has no ld.lld, which links code for GPUs"),
        (lambda top: (top / "amdgcn/bitcode/ocml.bc").unlink(), "has no device libraries (amdgcn/bitcode/ocml.bc)"),
        (lambda top: (top / "include/hip/hip_version.h").unlink() or (top / ".info/version").unlink(), "has no HIP headers"),
        (lambda top: script(top / "lib/llvm/bin/clang++", CLANG.format("19.0.0")), "has no AMDGPU backend"),
        (lambda top: script(top / "lib/llvm/bin/clang++", "echo gcc"), "is no clang"),
    ],
)  # fmt: skip
def test_half_a_rocm_says_what_is_missing(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    rocm(tmp_path / "rocm", "6.4.1")
    spoil(tmp_path / "rocm")
    probe = probe_rocm({"PATH": PATH, "ROCM_PATH": str(tmp_path / "rocm")}, tmp_path)
    assert message in probe.problem and probe.problem.startswith("ROCM_PATH=")


def test_unusable_rocm_path(tmp_path: Path) -> None:
    probe = probe_rocm({"PATH": PATH, "ROCM_PATH": "/nonexistent"}, tmp_path)
    assert probe.problem.startswith("ROCM_PATH=/nonexistent: there is no such folder")


# --- torch -----------------------------------------------------------------------------------------------------------


def torch(folder: Path, version: str = "2.13.0+cpu") -> Path:
    (folder / "include/torch/csrc/stable").mkdir(parents=True)
    (folder / "include/torch/csrc/stable/library.h").touch()
    (folder / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n"
    )
    return folder


def test_torch_order(tmp_path: Path) -> None:
    named = torch(tmp_path / "named/torch")
    torch(tmp_path / "env/torch", "2.14.1")
    torch(tmp_path / "build/torch", "2.15.0a0+git12")
    (tmp_path / "none").mkdir()
    into, build = [tmp_path / "none", tmp_path / "env"], [tmp_path / "build", tmp_path / "env"]
    found, problem = probe_torch(None, into, build)
    assert not problem
    assert [(headers.version, headers.origin) for headers in found] == [
        ("2.14.1", "the environment that is installed into"),
        ("2.15.0", "the build environment"),
    ]
    for wanted in (named, named.parent):
        found, problem = probe_torch(str(wanted), into, build)
        assert not problem and found[0].path == str(named) and found[0].origin == "PELTON_TORCH_DIR"


def test_torch_folder_that_is_none(tmp_path: Path) -> None:
    for name in ("nonexistent", "."):
        found, problem = probe_torch(str(tmp_path / name), [], [])
        assert found == ()
        assert problem.startswith(f"PELTON_TORCH_DIR={tmp_path / name}: holds no torch package with headers")
    # A folder of this name on the path is not torch.
    (tmp_path / "torch").mkdir()
    assert probe_torch(None, [tmp_path], []) == ((), "")


# --- Pythons ---------------------------------------------------------------------------------------------------------

FAKE_PYTHON = """echo '{{"name": "{name}", "version": [3, {minor}], "path": "{path}", "include": "{include}",
"suffix": ".s{minor}.so", "debug": {debug}, "threads": {threads}}}'"""


def python(program: Path, minor: int, **changes: str) -> Path:
    values = {
        "name": "cpython",
        "include": "/i",
        "debug": "false",
        "threads": "false",
        "path": str(program),
        **changes,
    }
    return script(program, FAKE_PYTHON.format(minor=minor, **values))


def test_pythons_one_of_each_version_and_why_others_are_not(tmp_path: Path) -> None:
    running = python(tmp_path / "venv/python", 12, path="/usr/bin/python3.12")
    folder = tmp_path / "bin"
    python(folder / "python3.11", 11)
    python(folder / "python3.12", 12)
    python(folder / "python3.13", 13, include="")
    python(folder / "python3.14", 14, threads="true")
    python(folder / "python3.15", 15, debug="true")
    python(folder / "python3.16", 16, name="pypy")
    script(folder / "python3.17", "exit 127")
    script(folder / "python3.18", "echo nonsense")
    python(folder / "python3", 10)
    found, out = probe_pythons({"PATH": str(folder)}, tmp_path, str(running))
    assert [(p.version, p.path, p.include, p.suffix) for p in found] == [
        ("3.11", str(folder / "python3.11"), "/i", ".s11.so"),
        ("3.12", "/usr/bin/python3.12", "/i", ".s12.so"),
    ]
    assert [reason.removeprefix(f"Python {folder}/python").partition(", so")[0] for reason in out] == [
        "3.13 has no headers (install its development package)",
        "3.14 is free-threaded",
        "3.15 is a debug build",
        "3.16 is pypy, not CPython",
        "3.17 ends with status 127",
        "3.18 gives no sensible answer",
    ]


def test_pythons_of_pyenv_and_of_build_images(tmp_path: Path) -> None:
    pyenv = tmp_path / "pyenv"
    script(pyenv / "shims/python3.13", "exit 127")  # not switched on
    python(pyenv / "versions/3.13.1/bin/python3.13", 13)
    python(tmp_path / "opt/python/cp314-cp314/bin/python", 14)
    found, out = probe_pythons({"PATH": str(pyenv / "shims")}, tmp_path, "/nonexistent")
    assert [p.version for p in found] == ["3.13", "3.14"]
    assert len(out) == 1 and "/nonexistent" in out[0]


def test_the_running_python_is_asked_for_real() -> None:
    found, out = probe_pythons({"PATH": ""}, Path("/nonexistent"))
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert [p.version for p in found] == [version] or (len(out) == 1 and version in out[0] + sys.version)
    for entry in found:
        assert (Path(entry.include) / "Python.h").is_file() and entry.suffix.endswith(".so")


# --- cores and memory ------------------------------------------------------------------------------------------------


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({}, (8, "affinity")),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, (8, "affinity")),
        ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, (2, "cgroup quota")),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, (2, "cgroup quota")),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, (1, "cgroup quota")),
        ({"sys/fs/cgroup/cpu.max": "1600000 100000\n"}, (8, "affinity")),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, (8, "affinity")),
        # The tightest of the group and those above it.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000",
            },
            (3, "cgroup quota"),
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/other\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            },
            (4, "cgroup quota"),
        ),
        (
            {"proc/self/cgroup": "4:cpu:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"},
            (8, "affinity"),
        ),
    ],
)
def test_cores(tmp_path: Path, contents: dict[str, str], cores: tuple[int, str]) -> None:
    assert probe_cores(files(tmp_path, contents), affinity=8) == cores


MEMINFO = {"proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n"}


@pytest.mark.parametrize(
    ("contents", "memory"),
    [
        ({}, (2 << 30, "assumed")),
        (MEMINFO, (8 << 30, "free")),
        ({**MEMINFO, "sys/fs/cgroup/memory.max": "max"}, (8 << 30, "free")),
        (
            {
                **MEMINFO,
                "sys/fs/cgroup/memory.max": str(4 << 30),
                "sys/fs/cgroup/memory.current": str(1 << 30),
            },
            (3 << 30, "free in the cgroup"),
        ),
        (
            {
                **MEMINFO,
                "sys/fs/cgroup/memory.max": str(4 << 30),
                "sys/fs/cgroup/memory.current": str(3 << 30),
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {1 << 30}\n",
            },
            (2 << 30, "free in the cgroup"),
        ),
        (
            {**MEMINFO, "sys/fs/cgroup/memory.max": "1", "sys/fs/cgroup/memory.current": "5"},
            (0, "free in the cgroup"),
        ),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "3:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 << 30),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0",
            },
            (2 << 30, "free in the cgroup"),
        ),
    ],
)
def test_memory(tmp_path: Path, contents: dict[str, str], memory: tuple[int, str]) -> None:
    assert probe_memory(files(tmp_path, contents)) == memory


def test_this_machine_has_cores_and_memory() -> None:
    cores, _ = probe_cores()
    memory, _ = probe_memory()
    assert 1 <= cores <= (os.cpu_count() or 1)
    assert memory > 0
