"""The doctor: each check over machines made for it, errors of the dynamic linker, and the whole on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pelton import doctor
from pelton._gpus import Gpu
from pelton.doctor import CHECKS, Context, Finding, classify_load_error, run_checks
from pelton.guard import Machine, level_features

V3, V4 = level_features("x86-64-v3"), level_features("x86-64-v4")
H200, T4 = Gpu("sm_90", "H200", 141 << 30), Gpu("sm_75", "T4", 16 << 30)
PROFILES: list[dict[str, Any]] = [
    {"profile": "cpu-avx2", "backend": "cpu", "archs": ["x86-64-v3"]},
    {"profile": "cpu-avx512", "backend": "cpu", "archs": ["x86-64-v4"]},
    {"profile": "cuda-sm80", "backend": "cuda", "archs": ["sm_80", "compute_80"]},
    {"profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"]},
    {"profile": "rocm-gfx90a", "backend": "rocm", "archs": ["gfx90a"]},
]
AVX2: dict[str, Any] = {
    "version": "0.1.0+cpu.avx2", "profile": "cpu-avx2", "backend": "cpu", "archs": ["x86-64-v3"],
    "glibc": "2.28", "torch_floor": "2.10", "profiles": PROFILES,
}  # fmt: skip
AVX512 = {**AVX2, "profile": "cpu-avx512", "archs": ["x86-64-v4"]}
SM90 = {
    **AVX2,
    "version": "0.1.0+cu130.sm90",
    "profile": "cuda-sm90",
    "backend": "cuda",
    "archs": ["sm_90a"],
    "minimum_driver": "13.0",
}
SM80 = {**SM90, "profile": "cuda-sm80", "archs": ["sm_80", "compute_80"]}
GFX90A = {**AVX2, "profile": "rocm-gfx90a", "backend": "rocm", "archs": ["gfx90a"]}


def machine(**changes: Any) -> Machine:
    known: dict[str, Any] = {
        "glibc": "2.36",
        "flags": V3,
        "off": frozenset(),
        "torch": "2.12.0",
        "driver": "",
        "gpus": (),
    }
    return Machine("linux", "x86_64", **{**known, **changes})


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def look(name: str, at: Context) -> list[Finding]:
    return list(CHECKS[name][1](at))


def context(
    tmp_path: Path, build: Mapping[str, Any] = AVX2, host: Machine | None = None, **environ: str
) -> Context:
    """A machine with nothing on PATH but what the test puts into tmp_path/bin."""
    return Context(
        host or machine(),
        build,
        {"PATH": f"{tmp_path}/bin", "HOME": str(tmp_path), **environ},
        root=tmp_path,
        folders=(tmp_path / "site" / "pelton",),
    )


CASES: dict[str, tuple[str, Mapping[str, Any], Machine, Mapping[str, str], str, str]] = {
    # check, build, machine, environment, status, what it saw
    "no cmake": ("cmake", AVX2, machine(), {}, "note", "no CMake"),
    "no compiler": ("compiler", AVX2, machine(), {}, "note", "no g++"),
    "CXX that leads nowhere": ("compiler", AVX2, machine(), {"CXX": "/none/g++"}, "note", "no /none/g++"),
    "no CUDA toolkit": ("cuda toolkit", AVX2, machine(), {}, "ok", "no CUDA toolkit"),
    "CUDA_HOME that leads nowhere": ("cuda toolkit", AVX2, machine(), {"CUDA_HOME": "/none"}, "warning", "CUDA_HOME=/none: no nvcc there"),
    "ROCM_PATH that leads nowhere": ("rocm", AVX2, machine(), {"ROCM_PATH": "/none"}, "warning", "ROCM_PATH=/none"),
    "not built": ("build", {}, machine(), {}, "error", "no build"),
    "fits": ("machine", AVX2, machine(), {}, "ok", "glibc 2.36"),
    "a CPU of another level": ("machine", AVX512, machine(), {}, "error", "a CPU with x86-64-v3, without avx512bw"),
    "old glibc": ("machine", AVX2, machine(glibc="2.17"), {}, "error", "glibc 2.17"),
    "old torch": ("torch", AVX2, machine(torch="2.9.1"), {}, "error", "torch 2.9.1"),
    "no torch": ("torch", AVX2, machine(torch=None), {}, "error", "no torch"),
    "no torch and no build": ("torch", {}, machine(torch=None), {}, "error", "no torch"),
    "torch for CPUs": ("torch", AVX2, machine(), {}, "ok", "torch 2.12.0 for CPUs"),
    "torch for CPUs with a GPU build": ("torch", SM90, machine(driver="13.0", gpus=(H200,)), {}, "error", "a build without CUDA"),
    "torch for a newer CUDA than the driver's": (
        "torch", SM90, machine(torch_cuda="14.0", driver="13.0", gpus=(H200,)), {}, "error", "for CUDA 14.0, an NVIDIA driver for CUDA 13.0"),
    "CPU build beside a GPU": ("gpu", AVX2, machine(torch_cuda="13.0", driver="13.0", gpus=(H200,)), {}, "note", "H200"),
    "CPU build beside AMD's GPU that nothing is for": ("gpu", AVX2, machine(gpus=(Gpu("gfx942", "MI300X"),)), {}, "note", "MI300X (gfx942)"),
    "AMD's GPU of another build": ("gpu", GFX90A, machine(torch_rocm="6.4", gpus=(Gpu("gfx1101"),)), {}, "error", "GPU 0, gfx1101"),
    "AMD's GPU": ("gpu", GFX90A, machine(torch_rocm="6.4", gpus=(Gpu("gfx90a", "MI210"),)), {}, "ok", "0: MI210 (gfx90a)"),
    "no driver": ("gpu", SM90, machine(torch_cuda="13.0", gpu_note="libcuda.so.1 is not there"), {}, "error", "no NVIDIA driver (libcuda.so.1 is not there)"),
    "an old driver": ("gpu", SM90, machine(torch_cuda="12.8", driver="12.8", gpus=(H200,)), {}, "error", "driver for CUDA 12.8"),
    "the only GPU is not covered": ("gpu", SM90, machine(torch_cuda="13.0", driver="13.0", gpus=(T4,)), {}, "error", "GPU 0, T4 (sm_75); NVIDIA driver for CUDA 13.0"),
    "a misspelt variable": ("variables", AVX2, machine(), {"PELTON_HSOT": "x"}, "warning", "PELTON_HSOT=x: no variable of pelton's (did you mean 'PELTON_HOST'?)"),
    "a described machine": ("variables", AVX2, machine(), {"PELTON_HOST": "x.toml"}, "note", "PELTON_HOST=x.toml"),
    "no variable": ("variables", AVX2, machine(), {}, "ok", "none"),
    "a GPU that another build is made for": (
        "gpu speed", SM80, machine(torch_cuda="13.0", driver="13.1", gpus=(H200,)), {}, "note", "GPU 0, H200 (sm_90), runs this build's code for compute_80"),
    "a GPU that another build is made for, which its driver does not run": (
        "gpu speed", {**SM80, "profiles": [{**p, "minimum_driver": "13.2"} for p in PROFILES]},
        machine(torch_cuda="13.0", driver="13.1", gpus=(H200,)), {}, "ok", "no build is nearer"),
    "a GPU that this build is made for": ("gpu speed", SM90, machine(torch_cuda="13.0", driver="13.1", gpus=(H200,)), {}, "ok", "no build is nearer"),
    "features": ("features", {**AVX2, "label": "cpu.avx2", "features": {"awq": True, "fast-math": False}}, machine(), {}, "ok", "on: awq; off: fast-math"),
    "a feature that was switched off": (
        "features", {**AVX2, "label": "cpu.avx2.noawq", "features": {"awq": False, "gptq": True}}, machine(), {}, "note", "on: gptq; off: awq"),
    "one GPU": ("nccl", SM90, machine(driver="13.0", gpus=(H200,)), {}, "ok", "fewer than two GPUs"),
    "GPU build": ("torch", SM90, machine(torch_cuda="13.0", driver="13.0", gpus=(H200,)), {}, "ok", "for CUDA 13.0"),
    "no GPU, CPU build": ("gpu", AVX2, machine(), {}, "ok", "no GPU driver"),
    "no GPU, GPU build": ("gpu", SM90, machine(driver="13.0"), {}, "error", "no NVIDIA GPU; NVIDIA driver for CUDA 13.0"),
    "a GPU of unknown memory": ("gpu", SM90, machine(driver="13.0", gpus=(Gpu("sm_90", "H200", 0),)), {}, "ok", "0: H200 (sm_90); NVIDIA driver for CUDA 13.0"),
    "a GPU": ("gpu", SM90, machine(driver="13.0", gpus=(H200,)), {}, "ok", "0: H200 (sm_90), 141 GiB; NVIDIA driver for CUDA 13.0"),
    "a driver that hangs": ("gpu", SM90, machine(driver=None, gpus=None, gpu_note="no answer within 20 s"), {}, "warning", "no answer"),
    "a driver that fails": ("gpu", SM90, machine(driver="13.0", gpu_note="cuInit answers 803"), {}, "error", "cuInit answers 803"),
    "no nvidia-smi": ("nvidia-smi", SM90, machine(), {}, "ok", "not on PATH"),
    "a faster build": ("cpu speed", AVX2, machine(flags=V4), {}, "note", "a CPU with x86-64-v4, a build for x86-64-v3"),
    "too many threads": ("cpu speed", AVX2, machine(), {"OMP_NUM_THREADS": "4000"}, "warning", "OMP_NUM_THREADS=4000"),
    "as it should be": ("cpu speed", AVX2, machine(), {}, "ok", "cores, x86-64-v3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_check(case: str, tmp_path: Path) -> None:
    name, build, host, environ, status, saw = CASES[case]
    finding = look(name, context(tmp_path, build, host, **environ))[0]
    assert (finding.status, saw in finding.saw) == (status, True), finding
    if status != "ok":
        assert finding.why and finding.do


def test_every_check_has_a_case() -> None:
    apart = {
        "python records",
        "python packages",
        "host module",
        "library",
        "memory",
    }  # have tests of their own
    assert {name for name, *_ in CASES.values()} == set(CHECKS) - apart


def test_two_cards_of_which_one_is_covered(tmp_path: Path) -> None:
    findings = look("gpu", context(tmp_path, SM90, machine(driver="13.0", gpus=(H200, T4))))
    assert [finding.status for finding in findings] == ["ok", "warning"]
    assert "GPU 1, T4 (sm_75)" in findings[1].saw and "CUDA_VISIBLE_DEVICES" in findings[1].do


FAULTS: dict[str, tuple[Mapping[str, Any], Machine, list[str]]] = {
    # build, machine, the checks that say error
    "nothing": (AVX2, machine(), []),
    "no driver": (SM90, machine(torch_cuda="13.0"), ["gpu"]),
    "a card that is not covered": (SM90, machine(torch_cuda="13.0", driver="13.0", gpus=(T4,)), ["gpu"]),
    "an old driver": (SM90, machine(torch_cuda="12.8", driver="12.8", gpus=(H200,)), ["gpu"]),
    "no torch": (AVX2, machine(torch=None), ["torch"]),
    "another CPU": (AVX512, machine(), ["machine"]),
    "no torch and no driver": (SM90, machine(torch=None), ["torch", "gpu"]),
    "not built": ({}, machine(), ["build"]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_one_fault_is_one_error(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, host, checks = FAULTS[case]
    if not checks:  # a build that fits would be loaded
        monkeypatch.delitem(CHECKS, "library")
    findings = run_checks(context(tmp_path, build, host))
    assert [finding.check for finding in findings if finding.status == "error"] == checks
    for finding in findings:
        assert not finding.saw.startswith("the check itself failed"), finding
        assert finding.status == "ok" or (finding.why and finding.do), finding


def test_a_source_tree_that_hides_a_build(tmp_path: Path) -> None:
    installed = tmp_path / "lib"
    (installed / "pelton").mkdir(parents=True)
    (installed / "pelton/_build_info.json").touch()
    at = replace(context(tmp_path, {}), path=(tmp_path / "site", installed))
    (finding,) = look("build", at)
    assert finding.status == "error" and f"hides the build in {installed}" in finding.why
    assert "another folder" in finding.do
    (finding,) = look("build", replace(at, damage="_build_info.json: damaged"))
    assert (finding.status, finding.saw, finding.do) == (
        "error",
        "_build_info.json: damaged",
        "install pelton again",
    )


def test_packages_that_another_installation_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "site" / "pelton-0.1.0.dist-info"
    folder.mkdir(parents=True)
    needs = [
        "torch>=99",
        "hypothesis>=6",
        "pytest>=8,<8.0.1",
        "no-such-package>=1",
        'absent; extra == "server"',
    ]
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pelton\nVersion: 0.1.0\n{lines}")
    findings = look("python packages", context(tmp_path))
    assert [finding.status for finding in findings] == ["warning", "warning"]
    assert (
        findings[0].saw == f"pytest {pytest.__version__}"
        and findings[0].do == 'pip install "pytest<8.0.1,>=8"'
    )
    assert findings[1].saw == "no no-such-package"


def test_rocm_of_a_distribution(tmp_path: Path) -> None:
    (tmp_path / "usr/include/hip").mkdir(parents=True)
    header = "#define HIP_VERSION_MAJOR 5\n#define HIP_VERSION_MINOR 2\n"
    (tmp_path / "usr/include/hip/hip_version.h").write_text(header)
    (finding,) = look("rocm", context(tmp_path))
    assert finding.saw == f"ROCm 5.2 ({tmp_path}/usr), no compiler for it on PATH"
    clang = program(tmp_path / "bin", "clang++-19", "true")
    (tmp_path / "opt/rocm/.info").mkdir(parents=True)
    (tmp_path / "opt/rocm/.info/version").write_text("6.4.1-83\n")
    (finding,) = look("rocm", context(tmp_path))
    assert finding.saw == f"ROCm 6.4.1 ({tmp_path}/opt/rocm), {clang}"


TWO = machine(driver="13.0", gpus=(H200, H200), torch_cuda="13.0")


@pytest.mark.parametrize(
    ("said", "environ", "shared", "status", "saw"),
    [
        ((0, "nccl 2.27.3"), {}, 16 << 30, ["ok"], "NCCL 2.27.3 in torch 2.12.0"),
        ((1, "Traceback\nAssertionError: a build without it"), {}, 16 << 30, ["warning"], "torch 2.12.0 has no NCCL (AssertionError: a build without it)"),
        ((None, "no answer within 180 s"), {}, 16 << 30, ["warning"], "has no NCCL (no answer within 180 s)"),
        ((0, "nccl 2.27.3"), {}, 64 << 20, ["warning"], "64 MiB of shared memory"),
        ((0, "nccl 2.27.3"), {"LD_LIBRARY_PATH": "/none:{}/nccl"}, 16 << 30, ["warning"], "another library first: {}/nccl/libnccl.so.2"),
        ((0, "nccl 2.27.3"), {"LD_PRELOAD": "/x/libnccl.so"}, 16 << 30, ["warning"], "another library first: /x/libnccl.so"),
        ((0, "nccl 2.27.3"), {"NCCL_SOCKET_IFNAME": "ib0"}, 16 << 30, ["warning"], "NCCL_SOCKET_IFNAME=ib0; there are eth0, lo"),
        ((0, "nccl 2.27.3"), {"NCCL_SOCKET_IFNAME": "eth"}, 16 << 30, ["ok"], "NCCL 2.27.3"),
        ((0, "nccl 2.27.3"), {"NCCL_SOCKET_IFNAME": "^docker"}, 16 << 30, ["ok"], "NCCL 2.27.3"),
    ],
)  # fmt: skip
def test_nccl(
    said: tuple[int | None, str],
    environ: Mapping[str, str],
    shared: int,
    status: list[str],
    saw: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("nccl/libnccl.so.2", "sys/class/net/eth0", "sys/class/net/lo"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    state = os.statvfs_result((4096, 4096, shared // 4096, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: state)
    monkeypatch.setattr(doctor, "_said", lambda command, environ, limit: said)
    given = {name: value.format(tmp_path) for name, value in environ.items()}
    findings = look("nccl", context(tmp_path, SM90, TWO, **given))
    assert [finding.status for finding in findings] == status
    assert saw.format(tmp_path) in findings[0].saw
    assert findings[0].status == "ok" or (findings[0].why and findings[0].do)


def test_nccl_is_not_asked_of_a_torch_that_does_not_fit(tmp_path: Path) -> None:
    host = machine(driver="13.0", gpus=(H200, H200))
    assert look("nccl", context(tmp_path, SM90, host))[-1].do == "see the check 'torch'"


def test_nccl_of_the_installed_torch(tmp_path: Path) -> None:
    """The question itself, to the torch of the tests: it has NCCL or says in one line that it has none."""
    torch = pytest.importorskip("torch")
    host = machine(driver="13.0", gpus=(H200, H200), torch_cuda="13.0", torch=torch.__version__)
    at = Context(host, SM90, dict(os.environ))
    finding = look("nccl", at)[-1]
    there = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    assert (
        (finding.status == "ok" or "/dev/shm" in finding.saw)
        if there
        else "a build without it" in finding.saw
    )


def test_two_toolkits(tmp_path: Path) -> None:
    program(tmp_path / "bin", "nvcc", 'echo "Cuda compilation tools, release 12.0, V12.0.140"')
    program(tmp_path / "cuda/bin", "nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"')
    (finding,) = look("cuda toolkit", context(tmp_path, CUDA_HOME=str(tmp_path / "cuda")))
    assert finding.status == "warning"
    assert "13.0 from CUDA_HOME" in finding.saw and "12.0 from PATH" in finding.saw
    (finding,) = look("cuda toolkit", context(tmp_path))
    assert finding.status == "ok" and "12.0" in finding.saw
    program(tmp_path / "bin", "nvcc", "echo no licence; exit 1")
    findings = look("cuda toolkit", context(tmp_path))
    assert findings[0].status == "warning"
    assert findings[0].saw == f"{tmp_path}/bin/nvcc (PATH) does not say its version"


@pytest.mark.parametrize(
    ("script", "status", "saw"),
    [
        ("echo 'GPU 0: H200 (UUID: GPU-1)'; echo 'GPU 1: H200 (UUID: GPU-2)'", "ok", "lists 2 GPUs"),
        ("echo No devices were found", "note", "No devices were found"),
        ("echo NVIDIA-SMI has failed; exit 9", "note", "NVIDIA-SMI has failed"),
        ("echo '[N/A]'", "note", "[N/A]"),
        ("exit 127", "note", "ends with status 127"),
        ("exec sleep 60", "note", "no answer within 1 s"),
        ("sleep 60; true", "note", "no answer within 1 s"),
    ],
)
def test_nvidia_smi(
    script: str, status: str, saw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "bin", "nvidia-smi", script)
    said = doctor._said
    monkeypatch.setattr(doctor, "_said", lambda command, environ: said(command, environ, 1.0))
    environ = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    (finding,) = look("nvidia-smi", context(tmp_path, PATH=environ))
    assert (finding.status, saw in finding.saw) == (status, True), finding


def test_wsl(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    (finding,) = look("gpu", context(tmp_path, SM90))
    assert finding.status == "error" and finding.saw == "WSL without the Windows driver"
    assert "install NVIDIA's driver in Windows" in finding.do
    (finding,) = look("gpu", context(tmp_path, AVX2))
    assert finding.status == "note" and finding.saw == "WSL without the Windows driver"
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    (finding,) = look("gpu", context(tmp_path, SM90))
    assert "usr/lib/wsl/lib/libcuda.so.1" in finding.saw
    library = "/usr/lib/wsl/lib/libcuda.so.1"
    host = machine(driver="13.0", gpus=(H200,), driver_library=library, torch_cuda="13.0")
    (finding,) = look("gpu", context(tmp_path, SM90, host))
    assert finding.status == "ok" and f"(WSL, {library})" in finding.saw


def test_two_records(tmp_path: Path) -> None:
    for version in ("0.1.0+cpu.avx2", "0.1.0+cu130.sm90"):
        folder = tmp_path / "site" / f"pelton-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pelton\nVersion: {version}\n")
        (finding,) = look("python records", context(tmp_path))
        two = version.endswith("sm90")
        assert finding.status == ("warning" if two else "ok")
        assert version in finding.saw
    assert "0.1.0+cpu.avx2" in finding.saw and "empty folder" in finding.do


LOAD_ERRORS = [
    # a process's end, its last words; part of why, part of what to do
    (
        1,
        "OSError: libfoo.so.1: cannot open shared object file: No such file or directory",
        "is missing",
        "install",
    ),
    (1, "OSError: libtorch_cpu.so: cannot open shared object file", "torch's libraries", "torch"),
    (
        1,
        "OSError: /lib/libc.so.6: version `GLIBC_2.38' not found (required by libpelton.so)",
        "C library",
        "newer Linux",
    ),
    (1, "OSError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found", "libstdc++", "LD_LIBRARY_PATH"),
    (1, "OSError: libpelton.so: undefined symbol: aoti_torch_get_current_stream", "older", "--upgrade"),
    (1, "OSError: libpelton.so: undefined symbol: _ZN3c105ErrorC2E", "another torch", "published wheel"),
    (1, "OSError: libpelton.so: undefined symbol: something_else", "another version", "again"),
    (1, "OSError: libpelton.so: wrong ELF class: ELFCLASS32", "another processor", "again"),
    (1, "OSError: libpelton.so: file too short", "damaged", "again"),
    (1, "ModuleNotFoundError: No module named 'torch'", "torch is not installed", "pip install"),
    (1, "pelton.errors.HardwareMismatch: this build ...", "does not fit", "machine"),
    (1, "pelton.errors.LibraryError: PELTON_LIBRARY is 'x', which is not a file", "not there", "install"),
    (1, "something new", "not known", "report"),
    (-signal.SIGILL, "", "SIGILL", "this CPU"),
    (-signal.SIGSEGV, "", "SIGSEGV", "report"),
    (-signal.SIGKILL, "", "killed", "memory"),
    (None, "no answer within 180 s", "no answer", "answer"),
]


@pytest.mark.parametrize(("status", "text", "why", "do"), LOAD_ERRORS)
def test_load_errors_are_classified(status: int | None, text: str, why: str, do: str) -> None:
    told = classify_load_error(status, text)
    assert why in told[0] and do in told[1]


def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    broken = tmp_path / "libpelton.so"
    broken.write_bytes(b"\x7fELF")
    source = Path(doctor.__file__).parent
    at = Context(machine(), {}, {**os.environ, "PELTON_LIBRARY": str(broken)}, folders=(source,))
    (finding,) = look("library", at)
    assert finding.status == "error" and "damaged" in finding.why, finding


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(at: Context) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "CHECKS", {"cmake": ("build", fail)})
    (finding,) = run_checks(context(tmp_path))
    assert finding.status == "warning" and "RuntimeError: boom" in finding.saw


@pytest.mark.parametrize(
    ("text", "saw"),
    [
        ("", ""),
        ('torch = ""\n', "no torch"),
        ('driver = "13.0"\n[[gpu]]\narch = "sm_90"\nname = "H200"\ncount = 8\n', "7: H200 (sm_90)"),
        ("[[gpu]]\narch = 9\n", "gpu[0].arch"),
        ("[cpu\n", "cannot be read"),
    ],
)
def test_the_command(text: str, saw: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    environ = {**os.environ, "PELTON_HOST": str(path)}
    package = os.pathsep.join([str(Path(doctor.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pelton", "doctor", "--json"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**environ, "PYTHONPATH": package},
        cwd=tmp_path,
    )
    told = json.loads(done.stdout)
    assert done.returncode == int(not told["ok"]), done.stderr
    assert saw in " ".join(finding["saw"] for finding in told["findings"])
    assert told["ok"] == all(finding["status"] != "error" for finding in told["findings"])
    for finding in told["findings"]:
        assert set(finding) == {"group", "check", "status", "saw", "why", "do"}
        assert finding["group"] in ("build", "import", "run")


def test_text_for_a_person() -> None:
    findings = [
        Finding("build", "cmake", "ok", "CMake 4.1.0"),
        Finding("run", "memory", "warning", "1.0 GiB free", "weights have to fit", "end other programs"),
    ]
    text = doctor.report(findings, as_json=False)
    assert re.search(r"^ok +build: cmake: CMake 4\.1\.0$", text, re.M)
    assert re.search(r"^WARNING +run: memory: 1\.0 GiB free$", text, re.M)
    assert "do:  end other programs" in text and text.endswith("2 checks: 1 warning")
