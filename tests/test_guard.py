"""The guard: every kind of machine a build does not fit, decided over values and then in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton import guard
from pelton._gpus import Answer, Gpu, amd_gpus, ask_nvidia, ask_rocminfo, fit, visible
from pelton.errors import HardwareMismatch, InvalidValueError
from pelton.guard import LEVELS, Machine, described_machine, find_mismatch, level_features

V3, V4 = level_features("x86-64-v3"), level_features("x86-64-v4")
PROFILES = [
    {"profile": "cpu-avx2", "backend": "cpu", "archs": ["x86-64-v3"]},
    {"profile": "cpu-avx512", "backend": "cpu", "archs": ["x86-64-v4"]},
    {"profile": "cuda-sm80", "backend": "cuda", "archs": ["sm_80", "compute_80"]},
    {"profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"]},
    {"profile": "rocm-gfx90a", "backend": "rocm", "archs": ["gfx90a"]},
    {"profile": "rocm-gfx1100", "backend": "rocm", "archs": ["gfx1100"]},
]
AVX512: dict[str, Any] = {
    "profile": "cpu-avx512",
    "backend": "cpu",
    "archs": ["x86-64-v4"],
    "glibc": "2.28",
    "torch_floor": "2.10",
    "profiles": PROFILES,
}
AVX2 = {**AVX512, "profile": "cpu-avx2", "archs": ["x86-64-v3"]}
SM90 = {
    **AVX512,
    "profile": "cuda-sm90",
    "backend": "cuda",
    "archs": ["sm_90a"],
    "minimum_driver": "13.0",
    "minimum_driver_ptx": "",
}
SM80 = {**SM90, "profile": "cuda-sm80", "archs": ["sm_80", "compute_80"], "minimum_driver_ptx": "13.1"}
GFX90A = {**AVX512, "profile": "rocm-gfx90a", "backend": "rocm", "archs": ["gfx90a"]}
GFX1100 = {**GFX90A, "profile": "rocm-gfx1100", "archs": ["gfx1100"]}
H200, A100, A10, T4 = Gpu("sm_90", "H200"), Gpu("sm_80", "A100"), Gpu("sm_86", "A10"), Gpu("sm_75", "T4")
B200, MI210, RX = Gpu("sm_100", "B200"), Gpu("gfx90a", "MI210"), Gpu("gfx1100", "RX 7900")
MACHINE = Machine("linux", "x86_64", "2.36", V4, frozenset(), "2.13.0+cpu")


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(MACHINE, **changes)


def gpu_machine(*gpus: Gpu, driver: str = "13.1", **changes: Any) -> Machine:
    """A machine with a driver, GPUs, and a torch that can use them."""
    amd = any(gpu.backend == "rocm" for gpu in gpus)
    torch = {"torch_rocm": "6.4"} if amd else {"torch": "2.12.0", "torch_cuda": "13.0"}
    return machine(**{"gpus": gpus, "driver": "" if amd else driver, **torch, **changes})


FITS = [
    (AVX512, machine()),
    (AVX2, machine()),
    (AVX2, machine(flags=V3)),
    (AVX2, machine(glibc="2.28", torch="2.10")),
    (AVX2, machine(torch="2.10.0a0+git1234")),
    (SM90, gpu_machine(H200, flags=level_features("x86-64"))),
    (SM90, gpu_machine(H200, driver="13.0")),
    (SM90, gpu_machine(H200, driver="14.2")),
    (SM90, gpu_machine(H200, H200)),
    (SM90, gpu_machine(H200, T4)),  # said in a warning
    (SM90, gpu_machine(T4, H200)),
    (SM90, machine(torch_cuda="13.0")),  # a driver that gives no answer is no mismatch
    (SM80, gpu_machine(A100)),
    (SM80, gpu_machine(A10, driver="13.0")),  # machine code: no PTX to compile
    (SM80, gpu_machine(B200, driver="13.1")),  # PTX
    (GFX90A, gpu_machine(MI210)),
]


@pytest.mark.parametrize(("info", "host"), FITS)
def test_fits(info: Mapping[str, Any], host: Machine) -> None:
    assert find_mismatch(info, host) is None


MISMATCHES = {
    # what is wrong: build, machine, found, needed, install
    "AVX2 machine": (AVX512, machine(flags=V3), "without avx512bw", "x86-64-v4", "/p/cpu-avx2/simple/ pelton"),
    "AVX-512 not enabled": (
        AVX512,
        machine(flags=V3, off=V4 - V3),
        "with avx512bw, avx512cd, avx512dq, avx512f, avx512vl not enabled by the operating system",
        "x86-64-v4",
        "/p/cpu-avx2/simple/ pelton",
    ),
    "one extension missing": (AVX512, machine(flags=V4 - {"avx512vl"}), "without avx512vl", "x86-64-v4", "/p/cpu-avx2/"),
    "old CPU": (AVX2, machine(flags=level_features("x86-64-v2")), "a CPU with x86-64-v2", "x86-64-v3", "no build fits"),
    "AVX not enabled": (
        AVX2,
        machine(flags=V3 - {"avx", "avx2", "fma", "f16c"}, off=frozenset({"avx", "avx2", "fma", "f16c"})),
        "avx, avx2, f16c, fma not enabled",
        "x86-64-v3",
        "no build fits",
    ),
    "no torch": (AVX2, machine(torch=None), "no torch", "torch 2.10", 'pip install "torch>=2.10"'),
    "old torch": (AVX2, machine(torch="2.9.1+cu128"), "torch 2.9.1+cu128", "torch 2.10", 'pip install --upgrade "torch>=2.10"'),
    "old glibc": (AVX2, machine(glibc="2.17"), "glibc 2.17", "glibc 2.28", "newer Linux"),
    "musl": (AVX2, machine(glibc=None), "not glibc", "glibc 2.28", "newer Linux"),
    "no driver": (SM90, gpu_machine(driver=""), "no NVIDIA driver", "sm_90a", "/p/cpu-avx512/simple/ pelton"),
    "no driver, and why": (
        SM90, gpu_machine(driver="", gpu_note="libcuda.so.1 is not there"), "no NVIDIA driver (libcuda.so.1 is not there)", "sm_90a", "/p/cpu-avx512/"),
    "no GPU, old CPU": (SM90, gpu_machine(flags=level_features("x86-64-v2")), "no NVIDIA GPU", "sm_90a", "no build fits"),
    "the driver refuses": (SM90, gpu_machine(gpu_note="cuInit answers 803"), "no NVIDIA GPU (cuInit answers 803)", "sm_90a", "/p/cpu-avx512/"),
    "a card of another maker": (SM90, gpu_machine(MI210), "no NVIDIA driver", "sm_90a", "/p/rocm-gfx90a/simple/ pelton"),
    "an older card": (SM90, gpu_machine(A100), "GPU 0, A100 (sm_80)", "sm_90a", "/p/cuda-sm80/simple/ pelton"),
    "a card that no build is for": (SM90, gpu_machine(T4), "GPU 0, T4 (sm_75)", "sm_90a", "/p/cpu-avx512/simple/ pelton"),
    "a newer card, and no PTX": (SM90, gpu_machine(B200), "GPU 0, B200 (sm_100)", "sm_90a", "/p/cuda-sm80/simple/ pelton"),
    "two cards, none of them covered": (SM90, gpu_machine(T4, A100), "GPU 0, T4 (sm_75)", "sm_90a", "/p/cuda-sm80/"),
    "old driver": (SM90, gpu_machine(H200, driver="12.8"), "driver for CUDA 12.8", "CUDA 13.0 or newer (version 580 or newer)", "install an NVIDIA driver"),
    "driver too old for the PTX": (SM80, gpu_machine(B200, driver="13.0"), "driver for CUDA 13.0 with GPU 0, B200 (sm_100)", "CUDA 13.1", "install an NVIDIA driver"),
    "torch for CPUs": (
        SM90, gpu_machine(H200, torch="2.13.0+cpu", torch_cuda=None), "torch 2.13.0+cpu, a build without CUDA", "torch 2.10 or newer, built for CUDA", "pip install --force-reinstall"),
    "torch for AMD": (SM90, gpu_machine(H200, torch_cuda=None, torch_rocm="6.4"), "without CUDA", "built for CUDA", "pip install"),
    "torch for CPUs, and a driver that gives no answer": (SM90, machine(), "torch 2.13.0+cpu", "built for CUDA", "pip install"),
    "old torch with CUDA": (SM90, gpu_machine(H200, torch="2.9.1"), "torch 2.9.1", "torch 2.10", "--upgrade"),
    "no AMD GPU, and what NVIDIA's driver says of itself": (
        GFX90A, gpu_machine(gpus=(), gpu_note="libcuda.so.1 is not there"), "no AMD GPU (the kernel's AMD driver lists none in /sys/class/kfd)", "gfx90a", "/p/cpu-avx512/"),
    "no AMD GPU": (GFX90A, gpu_machine(H200), "no AMD GPU", "gfx90a", "/p/cuda-sm90/simple/ pelton"),
    "a neighbour of AMD's GPUs that is covered by nothing": (
        GFX90A, gpu_machine(Gpu("gfx942", "MI300X")), "GPU 0, MI300X (gfx942)", "gfx90a", "no build is for gfx942, and code for its neighbours does not run on it; to build one from source, see docs/new-gpu.md"),
    "an AMD GPU that another build is for": (
        GFX90A, gpu_machine(RX), "GPU 0, RX 7900 (gfx1100)", "gfx90a", "/p/rocm-gfx1100/simple/ pelton"),
    "gfx1101 with the build for gfx1100": (
        GFX1100, gpu_machine(Gpu("gfx1101", "RX 7800 XT")), "GPU 0, RX 7800 XT (gfx1101)", "gfx1100", "/p/cpu-avx512/simple/ pelton"),
    "gfx1030 with the build for gfx1100": (GFX1100, gpu_machine(Gpu("gfx1030")), "GPU 0, gfx1030", "gfx1100", "no build is for gfx1030"),
    "torch without ROCm": (GFX90A, gpu_machine(MI210, torch_rocm=None), "without ROCm", "built for ROCm", "pip install"),
    "ARM": (AVX2, machine(machine="aarch64"), "linux on aarch64", "linux on x86_64", "x86-64 processor"),
    "macOS": (AVX2, machine(system="darwin"), "darwin on x86_64", "linux on x86_64", "Linux machine"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(case: str) -> None:
    info, host, found, needed, install = MISMATCHES[case]
    error = find_mismatch(info, host)
    assert isinstance(error, HardwareMismatch)
    assert found in error.found and needed in error.needed and install in error.install
    for part in (info["profile"], error.found, error.needed, error.install):
        assert part in str(error)


@pytest.mark.parametrize(
    ("info", "host", "topics"),
    [
        (AVX2, machine(), []),
        (AVX512, machine(flags=V3, torch=None, glibc="2.17"), ["machine", "machine", "torch"]),
        (SM90, gpu_machine(driver=""), ["gpu"]),
        (SM90, gpu_machine(driver="", torch="2.9.0+cpu", torch_cuda=None), ["torch", "gpu", "torch"]),
        (SM90, gpu_machine(T4, driver="12.4", torch=None, torch_cuda=None), ["torch", "gpu"]),
        (SM90, machine(system="darwin", torch=None), ["machine"]),
    ],
)
def test_everything_that_does_not_fit_is_told_once(
    info: Mapping[str, Any], host: Machine, topics: list[str]
) -> None:
    found = list(guard.misfits(info, host))
    assert [misfit.topic for misfit in found] == topics
    assert len({misfit.found for misfit in found}) == len(found)
    first = find_mismatch(info, host)
    assert (first.found if first else None) == (found[0].found if found else None)


@pytest.mark.parametrize(
    ("info", "gpus", "visible", "uncovered", "hint"),
    [
        (SM90, (H200, H200), None, [], ""),
        (SM90, (H200, T4), None, [1], "CUDA_VISIBLE_DEVICES=0 hides the others"),
        (SM90, (T4, H200, A100, H200), None, [0, 2], "CUDA_VISIBLE_DEVICES=1,3 hides the others"),
        (SM90, (T4, H200), "3,5", [0], "CUDA_VISIBLE_DEVICES=5 hides the others"),
        (SM90, (T4, H200), "GPU-a,GPU-b", [0], "CUDA_VISIBLE_DEVICES=GPU-b hides the others"),
        (SM80, (A100, T4, B200), None, [1], "CUDA_VISIBLE_DEVICES=0,2 hides the others"),
        (GFX90A, (RX, MI210), None, [0], "HIP_VISIBLE_DEVICES=1 hides the others"),
        (AVX2, (T4,), None, [], ""),
    ],
)
def test_a_covered_and_an_uncovered_gpu_together(
    info: Mapping[str, Any], gpus: tuple[Gpu, ...], visible: str | None, uncovered: list[int], hint: str
) -> None:
    host = gpu_machine(*gpus)
    assert guard.uncovered_gpus(info, host) == uncovered
    assert find_mismatch(info, host) is None or info is AVX2
    if uncovered:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert guard.hiding(info, host, environ) == hint


@pytest.mark.parametrize(
    ("archs", "gpu", "arch"),
    [
        (["sm_80"], "sm_80", "sm_80"),
        (["sm_80"], "sm_89", "sm_80"),
        (["sm_80"], "sm_90", None),
        (["sm_86"], "sm_80", None),
        (["sm_80", "compute_80"], "sm_86", "sm_80"),
        (["sm_80", "compute_80"], "sm_120", "compute_80"),
        (["sm_80", "sm_86"], "sm_89", "sm_86"),
        (["sm_90a"], "sm_90", "sm_90a"),
        (["sm_90a"], "sm_100", None),
        (["compute_90a"], "sm_100", None),
        (["compute_90"], "sm_89", None),
        (["sm_100f"], "sm_103", "sm_100f"),
        (["sm_100f"], "sm_120", None),
        (["sm_90a"], "gfx90a", None),
        (["gfx90a"], "gfx90a", "gfx90a"),
        (["gfx90a:xnack-"], "gfx90a", "gfx90a:xnack-"),
        (["gfx90a"], "gfx942", None),
        (["x86-64-v3"], "sm_90", None),
    ],
)
def test_what_runs_on_a_gpu(archs: list[str], gpu: str, arch: str | None) -> None:
    best = fit(archs, Gpu(gpu))
    assert (best and best[1]) == arch


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["H200", "T4", "A100", "MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["T4", "MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, ["A100", "H200", "MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, ["T4", "MI210"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "9" * 5000}, ["MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "\u0661"}, ["MI210"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-12ab"}, ["H200", "T4", "A100", "MI210"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["H200", "T4", "A100"]),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, ["H200", "T4", "A100", "MI210"]),
    ],
)
def test_visible_gpus(environ: Mapping[str, str], names: list[str]) -> None:
    assert [gpu.name for gpu in visible([H200, T4, A100, MI210], environ)] == names


def test_amd_gpus_of_the_kernel_driver(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for index, version in enumerate((0, 90010, 110000, 100306)):
        (nodes / str(index)).mkdir(parents=True)
        (nodes / str(index) / "properties").write_text(f"simd_count 440\ngfx_target_version {version}\n")
    assert [gpu.arch for gpu in amd_gpus(tmp_path)] == ["gfx90a", "gfx1100", "gfx1036"]
    assert amd_gpus(tmp_path / "none") == ()


ROCMINFO = """#!/bin/sh
[ -n "$ROCR_VISIBLE_DEVICES$HIP_VISIBLE_DEVICES" ] && exit 1
echo "ROCk module is loaded"
printf "*******\\nAgent 1\\n*******\\n  Name:                    AMD EPYC 7763\\n  Device Type:             CPU\\n"
printf "*******\\nAgent 2\\n*******\\n  Name:                    gfx90a\\n  Marketing Name:          AMD Instinct MI210\\n"
printf "  Device Type:             GPU\\n  ISA Info:\\n    ISA 1\\n      Name:                    amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-\\n"
printf "*******\\nAgent 3\\n*******\\n  Name:                    gfx1101\\n  Device Type:             GPU\\n"
"""


def test_amd_gpus_of_rocminfo(tmp_path: Path) -> None:
    program = tmp_path / "rocminfo"
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ROCR_VISIBLE_DEVICES": "1"}
    assert ask_rocminfo(environ) == ()
    for text, gpus in (
        (ROCMINFO, (Gpu("gfx90a", "AMD Instinct MI210"), Gpu("gfx1101", "AMD GPU"))),
        ("#!/bin/sh\necho ROCk module is NOT loaded; exit 1\n", ()),
        ("#!/bin/sh\nexec sleep 60\n", ()),
        ("no program", ()),
    ):
        program.write_text(text)
        program.chmod(0o755)
        assert ask_rocminfo(environ, limit=1.0) == gpus


def test_the_command_names_the_index_when_it_is_known() -> None:
    error = find_mismatch(SM90, gpu_machine(A100), "https://wheels.example/pelton")
    assert (
        error is not None and "--index-url https://wheels.example/pelton/p/cuda-sm80/simple/" in error.install
    )
    error = find_mismatch(AVX512, machine(flags=V3), "https://wheels.example/pelton/")
    assert error is not None
    assert error.install.endswith("--index-url https://wheels.example/pelton/p/cpu-avx2/simple/ pelton")


def test_error_travels_between_processes() -> None:
    error = find_mismatch(AVX512, machine(torch=None))
    assert error is not None
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.found, copy.needed, copy.install) == (
        str(error),
        error.found,
        error.needed,
        error.install,
    )


def test_levels_of_flags() -> None:
    for level in LEVELS:
        assert machine(flags=level_features(level)).level == level
    assert machine(flags=V4 - {"popcnt"}).level == "x86-64"


DESCRIBED = {
    # text of the file -> what differs from the real machine
    "": {},
    'glibc = "2.31"\ntorch = "2.12"': {"glibc": "2.31", "torch": "2.12"},
    'glibc = ""\ntorch = ""': {"glibc": None, "torch": None},
    'torch = "2.11.0+cu130"': {"torch": "2.11.0+cu130", "torch_cuda": "13.0"},
    'torch = "2.11.0+rocm6.4"': {"torch": "2.11.0+rocm6.4", "torch_rocm": "6.4"},
    'torch = "2.13.0a0+git1234abc"': {"torch": "2.13.0a0+git1234abc"},
    'torch = "2.14.0.dev20261001+cu130"': {"torch": "2.14.0.dev20261001+cu130", "torch_cuda": "13.0"},
    'torch = "2.12.0"\ntorch-rocm = "6.4.43482-0f2d60242"\nrocm = "6.4.1-83"': {
        "torch": "2.12.0",
        "torch_rocm": "6.4.43482-0f2d60242",
        "rocm": "6.4.1-83",
    },
    'torch = "2.12.0"\ntorch-cuda = "12.8"': {"torch": "2.12.0", "torch_cuda": "12.8"},
    # torch's own word of its platform, `+cpu`, is not that of the machine that is described
    'torch-cuda = ""\ntorch-rocm = "6.4"\nrocm = "7.0"': {
        "torch": "2.13.0",
        "torch_rocm": "6.4",
        "rocm": "7.0",
    },
    'torch = "2.12.0+cu130"\ntorch-cuda = "13.0"': {"torch": "2.12.0+cu130", "torch_cuda": "13.0"},
    'torch = "2.12.0+rocm6.4.1"\ntorch-rocm = "6.4"': {"torch": "2.12.0+rocm6.4.1", "torch_rocm": "6.4"},
    'torch = "2.12.0+cpu"\ntorch-cuda = ""': {"torch": "2.12.0+cpu"},
    'driver = "13.0"': {"driver": "13.0", "gpus": ()},
    'driver = ""': {"driver": "", "gpus": ()},
    "gpu = []": {"gpus": ()},
    'driver = "12.8"\n[[gpu]]\narch = "sm_90"\nname = "H200"\nmemory = "141 GiB"\ncount = 2\n[[gpu]]\narch = "sm_75"': {
        "driver": "12.8",
        "gpus": (Gpu("sm_90", "H200", 141 << 30), Gpu("sm_90", "H200", 141 << 30), Gpu("sm_75")),
    },
    '[[gpu]]\narch = "gfx90a"': {"gpus": (Gpu("gfx90a"),)},
    'system = "darwin"\nmachine = "arm64"': {"system": "darwin", "machine": "arm64"},
    '[cpu]\nlevel = "x86-64-v3"': {"flags": V3},
    '[cpu]\nlevel = "x86-64-v3"\nwith = ["avx512f"]': {"flags": V3 | {"avx512f"}},
    '[cpu]\nwithout = ["lzcnt", "avx512f"]': {"flags": V4 - {"abm", "avx512f"}},
    '[cpu]\nenabled = ["avx"]': {"flags": V3, "off": V4 - V3},
    '[cpu]\nlevel = "x86-64-v3"\nenabled = []': {
        "flags": V3 - {"avx", "avx2", "fma", "f16c"},
        "off": frozenset({"avx", "avx2", "fma", "f16c"}),
    },
}


@pytest.mark.parametrize("text", DESCRIBED)
def test_described_machine(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    assert described_machine(path, MACHINE) == machine(**DESCRIBED[text])


WRONG = {
    "glib = '2.31'": "unknown key 'glib'.*'glibc'",
    "glibc = 2.31": "glibc: expected text",
    "[cpu]\nlevels = 'x86-64-v3'": "unknown key 'cpu.levels'.*'level'",
    "[cpu]\nlevel = 'x86-64-v5'": "unknown 'x86-64-v5'",
    "[cpu]\nwith = ['avx512']": "cpu.with: unknown 'avx512'",
    "[cpu]\nwith = 'avx2'": "expected a list",
    "[cpu]\nenabled = ['avx2']": "cpu.enabled: unknown 'avx2'",
    "cpu = 3": "expected a table",
    "torch = '2.13.0+cpu'\ntorch-cuda = '13.0'": r"torch-cuda is '13.0', and torch '2.13.0\+cpu' is built for no CUDA",
    "torch = '2.13.0+cu128'\ntorch-cuda = '13.0'": "is built for CUDA 12.8",
    "torch = '2.13.0+cu130'\ntorch-cuda = ''": "torch-cuda is '', and torch .* is built for CUDA 13.0",
    "torch = '2.13.0+cu130'\ntorch-rocm = '6.4'": "torch-rocm is '6.4', .* is built for no ROCm",
    "torch = ''\ntorch-rocm = '6.4'": "torch-rocm is '6.4', and there is no torch",
    "torch-cuda = '13.0'\ntorch-rocm = '6.4'": "are both given",
    "torch-cuda = 'yes'": "torch-cuda: expected a version of CUDA",
    "torch = 'newest'": "torch: expected a version",
    "glibc = 'new'": "glibc: expected a version",
    "rocm = 'yes'": "rocm: expected a version",
    "glibc = '2.28junk'": "glibc: expected a version .*'2.28junk'",
    f"glibc = '2.{'9' * 5000}'": r"glibc: expected a version .*9\.\.\.'$",
    f"torch = '{'9' * 5000}.0'": r"torch: expected a version .*9\.\.\.'$",
    f"torch = '2.12.0+cu{'9' * 5000}'": "torch: expected a version",
    f"torch = '2.12'\ntorch-cuda = '13.{'9' * 5000}'": "torch-cuda: expected a version",
    f"driver = '13.{'9' * 5000}'": r"driver: expected .*9\.\.\.'$",
    "torch = '2.13.0; rm'": "torch: expected a version",
    "torch = '2.13.0\u0661'": "torch: expected a version",
    'rocm = "7.0\\u001b[31m"': r"rocm: expected a version .*'7\.0\\x1b",
    "driver = '1\u0663.0'": "driver: expected the CUDA version",
    "system = ''": "system: expected a name such as 'linux', found ''",
    "machine = 'x86 64'": "machine: expected a name such as 'x86_64', found 'x86 64'",
    'machine = "x86_64\\n"': "machine: expected a name",
    "[[gpu]]\narch = 'sm_9\u0660'": r"gpu\[0\].arch: expected a GPU's arch",
    "[[gpu]]\narch = 'sm_90'\nmemory = '8\u0660 GiB'": "memory: expected a size",
    '[[gpu]]\narch = "sm_90"\nname = "H\\u001b[31m200"': r"gpu\[0\].name: expected text of printable",
    "driver = '580.65'": "driver: expected the CUDA version",
    "driver = '13'": "driver: expected the CUDA version",
    "driver = 13.0": "driver: expected text",
    "gpu = 3": r"gpu: expected tables \[\[gpu\]\]",
    "gpu = [3]": "expected tables",
    "[gpu]\narch = 'sm_90'": "expected tables",
    "[[gpu]]\nname = 'H200'": r"gpu\[0\].arch: expected a GPU's arch.*None",
    "[[gpu]]\narch = '9.0'": r"gpu\[0\].arch.*'9.0'",
    "[[gpu]]\narch = 'sm_90'\nmemroy = '80 GiB'": r"unknown key 'gpu\[0\].memroy'.*'memory'",
    "[[gpu]]\narch = 'sm_90'\nmemory = 80": r"memory: expected a size",
    "[[gpu]]\narch = 'sm_90'\ncount = 0": r"count: expected a number",
    "[[gpu]]\narch = 'sm_90'\nname = 3": r"name: expected text",
    "[cpu": "cannot be read",
    "x = " + "[" * 5000: "cannot be read",
    "x = " + "9" * 5000: "cannot be read",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_description(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match=WRONG[text]) as caught:
        described_machine(path, MACHINE)
    assert str(path) in str(caught.value)


KEYS = st.sampled_from(
    [
        "glibc",
        "torch",
        "torch-cuda",
        "system",
        "cpu",
        "cpu.level",
        "cpu.with",
        "cpu.enabled",
        "driver",
        "gpu",
        "x",
    ]
)
VALUES = st.one_of(
    st.text(max_size=8).map(json.dumps),
    st.integers().map(str),
    st.sampled_from(
        ['"x86-64-v3"', '["avx2", "abm"]', '["avx"]', "[1]", "[]", "{}", "true", "1.5", "[[", '"13.0"', '""']
    ),
    st.sampled_from(
        ['[{arch="sm_90"}]', '[{arch="sm_75", count=3}, {arch="gfx90a"}]', '[{arch="sm_90", count=true}]']
    ),
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=4))
def test_any_description_is_a_machine_or_one_clear_error(lines: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text("".join(f"{key} = {value}\n" for key, value in lines))
        try:
            described = described_machine(path, MACHINE)
        except InvalidValueError as error:
            assert str(path) in str(error)
        else:
            assert not described.flags & described.off
            for info in (AVX512, SM90, SM80, GFX90A):
                find_mismatch(info, described)
                guard.uncovered_gpus(info, described)


def test_missing_description(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="cannot be read"):
        described_machine(tmp_path / "none.toml", MACHINE)


def test_a_described_machine_is_a_file(tmp_path: Path) -> None:
    """Reading a pipe or a device may never end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(InvalidValueError, match="is not a file"):
            described_machine(path, MACHINE)


@pytest.mark.parametrize(
    ("driver", "profile"), [("11.0", None), ("13.0", "cuda-sm90"), (None, "cuda-sm90"), ("", None)]
)
def test_no_build_is_recommended_that_the_driver_is_too_old_for(
    driver: str | None, profile: str | None
) -> None:
    profiles = [
        {**other, "minimum_driver": "13.0"} if other["backend"] == "cuda" else other for other in PROFILES
    ]
    at = dataclasses.replace(MACHINE, gpus=(H200,), driver=driver)
    assert guard.best_gpu_profile({**AVX512, "profiles": profiles}, at) == profile


def test_the_real_machine_is_seen() -> None:
    real = guard.real_machine()
    assert real.system == "linux"
    assert real.glibc
    assert real.torch
    assert "sse2" in real.flags
    assert not real.flags & real.off


# In a process of its own, over the installed build: whatever the described machine, the end is a Python exception with
# its fields, or a library that works; never a signal.
SCRIPT = """
import json, sys
import pelton
from pelton.errors import HardwareMismatch, PeltonError
try:
    import pelton._library
    pelton._library.load()
except HardwareMismatch as error:
    print(json.dumps({"found": error.found, "needed": error.needed, "install": error.install}))
except PeltonError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"loaded": True}))
"""
LEVEL_TABLE = {level: f'[cpu]\nlevel = "{level}"\n' for level in LEVELS}
HOSTS = {
    **LEVEL_TABLE,
    "avx512 not enabled": '[cpu]\nlevel = "x86-64-v4"\nenabled = ["avx"]\n',
    "nothing enabled": '[cpu]\nlevel = "x86-64-v4"\nenabled = []\n',
    "one extension less": '[cpu]\nlevel = "x86-64-v4"\nwithout = ["avx512bw", "fma"]\n',
    "old torch": 'torch = "2.9.1"\n',
    "no torch": 'torch = ""\n',
    "old glibc": 'glibc = "2.17"\n',
    "no glibc": 'glibc = ""\n',
    "another system": 'system = "darwin"\nmachine = "arm64"\n',
    "no file of this kind": "[cpu\n",
}


@pytest.mark.parametrize("case", HOSTS)
def test_no_machine_ends_in_a_signal(case: str, tmp_path: Path) -> None:
    from pelton import build_info

    info = build_info.as_dict()
    if build_info.path is None:
        pytest.skip("pelton is imported from a source tree without a build; run nox -s tests")
    path = tmp_path / "machine.toml"
    path.write_text(HOSTS[case])
    environment = {k: v for k, v in os.environ.items() if k not in ("PELTON_LIBRARY", "PELTON_INDEX")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        check=False,
        capture_output=True,
        text=True,
        env={**environment, "PELTON_HOST": str(path)},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    try:
        expected = find_mismatch(info, described_machine(path, guard.real_machine()))
    except InvalidValueError:
        assert str(path) in told["error"]
        return
    if expected is None:
        real = find_mismatch(info, guard.real_machine())
        assert real is None, "this build does not fit the machine that the tests run on"
        assert told == {"loaded": True}
    else:
        assert told == {"found": expected.found, "needed": expected.needed, "install": expected.install}


# The same over builds for GPUs: the package with a build info of its own, and the library of the tests.
GPU_SCRIPT = """
import json, logging, sys
logging.basicConfig(format="%(message)s", stream=sys.stderr)
import pelton
from pelton.errors import HardwareMismatch, PeltonError
from pelton import LLM, SamplingParams
SamplingParams(temperature=0.5)
from pelton import guard
told = {}
try:
    from pelton import ops
except HardwareMismatch:
    raise SystemExit("a build for GPUs has to be imported everywhere")
except PeltonError as error:
    print(json.dumps({"error": str(error)}))
    raise SystemExit
try:
    ops.backend()
except HardwareMismatch as error:
    told = {"found": error.found, "needed": error.needed, "install": error.install}
    try:
        ops.rms_norm(None, None, 1e-5, out=0)
    except HardwareMismatch as again:
        assert str(again) == str(error)
for index in (0, 1):
    try:
        guard.check_gpu(index)
    except PeltonError as error:
        told[f"gpu {index}"] = str(error)
print(json.dumps(told))
"""
CUDA_TORCH = 'torch = "2.12.0"\ntorch-cuda = "13.0"\n'
H200_TABLE = '[[gpu]]\narch = "sm_90"\nname = "H200"\n'
T4_TABLE = '[[gpu]]\narch = "sm_75"\nname = "T4"\n'
GPU_HOSTS = {
    # what the machine is: build, description, CUDA_VISIBLE_DEVICES, what is told, what is warned of
    "H200": (SM90, CUDA_TORCH + 'driver = "13.0"\n' + H200_TABLE, None, {"gpu 1": "a GPU number 1"}, ""),
    "H200 and T4": (
        SM90, CUDA_TORCH + H200_TABLE + T4_TABLE, None, {"gpu 1": "GPU 1, T4 (sm_75); it runs on GPU 0, H200 (sm_90)"},
        "pelton does not run on GPU 1, T4 (sm_75): this build (profile cuda-sm90) is for sm_90a; CUDA_VISIBLE_DEVICES=0 hides the others"),
    "H200 and T4, of which one is visible": (SM90, CUDA_TORCH + H200_TABLE + T4_TABLE, "0", {"gpu 1": "number 1"}, ""),
    "T4 alone is visible": (SM90, CUDA_TORCH + H200_TABLE + T4_TABLE, "1", {"found": "GPU 0, T4 (sm_75)"}, ""),
    "none is visible": (SM90, CUDA_TORCH + H200_TABLE, "", {"found": "no visible NVIDIA GPU (CUDA_VISIBLE_DEVICES=)"}, ""),
    "no driver": (SM90, CUDA_TORCH + 'driver = ""\n', None, {"found": "no NVIDIA driver"}, ""),
    "a driver without GPU": (SM90, CUDA_TORCH + 'driver = "13.0"\n', None, {"found": "no NVIDIA GPU"}, ""),
    "an old driver": (SM90, CUDA_TORCH + 'driver = "12.4"\n' + H200_TABLE, None, {"found": "CUDA 12.4"}, ""),
    "an old driver, and a card that a new one would not help": (
        SM90, CUDA_TORCH + 'driver = "12.4"\n' + T4_TABLE, None, {"found": "GPU 0, T4 (sm_75)"}, ""),
    "torch for CPUs": (SM90, 'torch = "2.13.0+cpu"\n' + H200_TABLE, None, {"found": "torch 2.13.0+cpu"}, ""),
    "old torch": (SM90, 'torch = "2.9.0+cu128"\n' + H200_TABLE, None, {"found": "torch 2.9.0+cu128"}, ""),
    "old glibc": (SM90, 'glibc = "2.17"\n' + CUDA_TORCH + H200_TABLE, None, {"found": "glibc 2.17"}, ""),
    "H200 with the build for A100": (SM80, CUDA_TORCH + 'driver = "13.1"\n' + H200_TABLE, None, {"gpu 1": "number 1"}, ""),
    "the same, and a driver that is too old for PTX": (SM80, CUDA_TORCH + 'driver = "13.0"\n' + H200_TABLE, None, {"found": "CUDA 13.0 with GPU 0"}, ""),
    "NVIDIA with the build for AMD": (GFX90A, CUDA_TORCH + H200_TABLE, None, {"found": "no AMD GPU"}, ""),
    "no machine": (SM90, "[[gpu]]\narch = 9\n", None, {"error": "gpu[0].arch"}, ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Path:
    """The library that the tests run with."""
    from pelton import _library

    return _library.load()


@pytest.mark.parametrize("case", GPU_HOSTS)
def test_no_machine_ends_in_a_signal_with_a_gpu_build(case: str, library: Path, tmp_path: Path) -> None:
    info, text, shown, expected, warned = GPU_HOSTS[case]
    package = tmp_path / "path" / "pelton"
    package.mkdir(parents=True)
    source = Path(guard.__file__).parent
    for path in source.iterdir():
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / "libpelton.so").symlink_to(library)
    made = {**info, "version": "0.1.0+test", "label": "test", "state": "wheel", "features": {}}
    (package / "_build_info.json").write_text(json.dumps(made))
    (tmp_path / "machine.toml").write_text(text)
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith("PELTON_") and "VISIBLE_DEVICES" not in k
    }
    environ |= {"PELTON_HOST": str(tmp_path / "machine.toml"), "PYTHONPATH": str(package.parent)}
    if shown is not None:
        environ["CUDA_VISIBLE_DEVICES"] = shown
    done = subprocess.run(
        [sys.executable, "-c", GPU_SCRIPT],
        check=False,
        capture_output=True,
        text=True,
        env=environ,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for key, value in expected.items():
        assert value in told.get(key, ""), told
    if "found" in expected:
        assert told["needed"] and told["install"]
    else:
        assert "found" not in told
    assert warned in done.stderr and bool(warned) == ("does not run on" in done.stderr)


# --- asking the driver: a library that answers as NVIDIA's does ---

DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int count(void) {
  const char *shown = getenv("CUDA_VISIBLE_DEVICES");
  return !shown ? 2 : strcmp(shown, "1") ? 0 : 1;
}
int cuDriverGetVersion(int *v) { *v = 13010; return getenv("NO_VERSION") != 0; }
int cuInit(unsigned flags) {
  FILE *log = fopen(getenv("LOG"), "w");
  fprintf(log, "%d", getpid());
  fclose(log);
  if (getenv("HANG")) sleep(60);
  if (getenv("CRASH")) abort();
  if (getenv("NOISE")) puts("a driver that talks");
  return getenv("STATUS") ? atoi(getenv("STATUS")) : 0;
}
int cuDeviceGetCount(int *n) { *n = count(); return 0; }
int cuDeviceGet(int *d, int i) { *d = count() == 1 ? 1 : i; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? (d ? 7 : 9) : (d ? 5 : 0); return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "%s", d ? "T4" : "H200"); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = d ? 16ull << 30 : 141ull << 30; return 0; }
int cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_SOMETHING"; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, check=True, cwd=folder)
    return folder


BOTH = (Gpu("sm_90", "H200", 141 << 30), Gpu("sm_75", "T4", 16 << 30))


@pytest.mark.parametrize(
    ("environ", "answer"),
    [
        ({}, Answer("13.1", BOTH)),
        ({"CUDA_VISIBLE_DEVICES": "1"}, Answer("13.1", BOTH[1:])),
        ({"CUDA_VISIBLE_DEVICES": ""}, Answer("13.1")),
        ({"STATUS": "100"}, Answer("13.1")),
        ({"STATUS": "803"}, Answer("13.1", (), "cuInit answers 803 (CUDA_ERROR_SOMETHING)")),
        ({"NO_VERSION": "1"}, Answer("", (), "the driver does not tell its version")),
    ],
)
def test_the_driver_is_asked(
    environ: Mapping[str, str], answer: Answer, driver: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    asked = ask_nvidia({**os.environ, "LD_LIBRARY_PATH": str(driver), "LOG": str(log), **environ})
    assert asked == dataclasses.replace(answer, library=str(driver / "libcuda.so.1"))
    if "NO_VERSION" not in environ:
        assert int(log.read_text()) != os.getpid(), "CUDA must not be initialized in the process that asks"


@pytest.mark.parametrize(
    ("environ", "limit", "note"),
    [({"HANG": "1"}, 1.0, "no answer within 1 s"), ({"CRASH": "1"}, 20.0, "cannot be asked"), ({"NOISE": "1"}, 20.0, "cannot be asked")],
)  # fmt: skip
def test_a_driver_that_hangs_or_crashes_is_no_answer(
    environ: Mapping[str, str], limit: float, note: str, driver: Path, tmp_path: Path
) -> None:
    settings = {**os.environ, "LD_LIBRARY_PATH": str(driver), "LOG": str(tmp_path / "log"), **environ}
    answer = ask_nvidia(settings, limit)
    assert answer.driver is None and note in answer.note
    assert find_mismatch(SM90, machine(torch_cuda="13.0", driver=answer.driver)) is None


def import_with(environ: Mapping[str, str]) -> str:
    """What importing the package says on stderr."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PELTON_")}
    path = os.pathsep.join([str(Path(guard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import pelton"],
        check=True, capture_output=True, text=True, env={**clean, "PYTHONPATH": path, **environ},
    )  # fmt: skip
    return done.stderr


def test_a_misspelt_variable_is_told_when_the_package_is_imported() -> None:
    assert import_with({"PELTON_INDEX": "https://wheels.example", "PELTON_PROFILE": "cpu-avx2"}) == ""
    said = import_with({"PELTON_HSOT": "machine.toml", "PELTON_OTHER": ""})
    assert said.splitlines() == [
        "environment variable PELTON_HSOT is unknown to pelton and has no effect (did you mean 'PELTON_HOST'?)",
        "environment variable PELTON_OTHER is unknown to pelton and has no effect",
    ]


def test_torch_is_known_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('this torch must not be imported')")
    (package / "version.py").write_text(
        "__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    (tmp_path / "torch-2.11.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
    )
    other = tmp_path / "behind" / "torch-9.9.dist-info"  # the record of a torch that is not imported
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    script = "from pelton import guard; m = guard.real_machine(); print(m.torch, m.torch_cuda, m.torch_rocm)"
    path = [str(tmp_path), str(other.parent), str(Path(guard.__file__).parents[1])]
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {path}; {script}"],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.split() == ["2.11.0", "13.0", "None"], done.stderr
        shutil.rmtree(tmp_path / "torch-2.11.0.dist-info", ignore_errors=True)  # a torch that nothing records
