"""What the tests of profiles and plans share: a copy of the deciding half of the tree, and machines as values."""

from __future__ import annotations

import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

from pelton_build.plan import HostPython, Plan, Tool, TorchHeaders
from pelton_build.profile import Profile, load_profile, parse_profile
from pelton_build.resolve import resolve
from pelton_build.settings import Choices
from pelton_build.table import KernelTable, load_table, parse_table
from pelton_build.toolchain import Probe, Toolchain

ROOT = Path(__file__).resolve().parents[2]

GCC = Tool("cxx", "gcc", "/usr/bin/g++", "12.2.0", "PATH")
NVCC = Tool(
    "cuda",
    "nvcc",
    "/opt/cuda/bin/nvcc",
    "13.0.88",
    "PATH",
    root="/opt/cuda",
    headers_version="13.0",
    host_limit="15",
    clang_limit="20",
    runtime="/opt/cuda/lib64/libcudart_static.a",
)
HIP = Tool("rocm", "hip-clang", "/opt/rocm/llvm/bin/clang++", "6.4.1", "/opt/rocm", "/opt/rocm", "6.4.1")
TORCH = TorchHeaders("/env/torch", "2.13.0", "the build environment")
PYTHON = HostPython(
    "/usr/bin/python3.11", "3.11", "/usr/include/python3.11", ".cpython-311-x86_64-linux-gnu.so"
)

BARE = Toolchain()
"""A machine with nothing on it."""
FULL = Toolchain(
    cxx=Probe(GCC),
    cuda=Probe(NVCC),
    rocm=Probe(HIP),
    torch=(TORCH,),
    pythons=(PYTHON,),
    cores=8,
    cores_origin="affinity",
    memory=16 << 30,
    memory_origin="free",
)
"""A machine with everything on it."""

TABLE = """
[library]
name = "lib"
package = "pack"
torch = "2.10"
torch-headers = ">=2.13"
torch-package = "torch==2.13.0"
environment = ["PELTON_LIBRARY"]

[feature.awq]
summary = "four bits"
backends = ["cpu", "cuda"]
environment = "PELTON_ENABLE_AWQ"

[feature.marlin]
summary = "four bits on tensor cores"
backends = ["cuda"]
environment = "PELTON_ENABLE_MARLIN"

[feature.gptq]
backends = ["cpu", "cuda"]

[feature.fast-math]
backends = ["cuda", "rocm"]
definitions = ["LIB_FAST_MATH=1"]
environment = "USE_FAST_MATH"

[family.common]
support = true
op = ["common/op.cpp", { path = "common/graph.cpp", backends = ["cpu"] }]
cuda = ["common/gpu.cu"]

[family.norm]
op = ["norm/op.cpp"]
cpu = ["norm/cpu.cpp"]
cuda = ["norm/gpu.cu"]
rocm = ["norm/gpu.cu"]

[family.sampling]
op = ["sampling/op.cpp"]
cpu = ["sampling/cpu.cpp"]
instead = { cuda = "torch does it", rocm = "torch does it" }

[family.awq]
feature = "awq"
definitions = ["AWQ=1"]
op = ["awq/op.cpp"]
cpu = ["awq/cpu.cpp"]
cuda = ["awq/gpu.cu"]

[family.four-bit]
feature = ["awq", "gptq"]
op = [{ path = "quant/cpu/op.cpp", backends = ["cpu"] }]
cpu = ["quant/cpu/cpu.cpp"]
run-time = { x86-64-v3 = ["AVX_VNNI"], x86-64-v4 = ["AVX512_VNNI"] }
instead = { cuda = "awq and marlin do it" }

[family.marlin]
feature = "marlin"
op = ["marlin/op.cpp"]
cuda = [
    "marlin/gpu.cu",
    { path = "marlin/sm90.cu", archs = ["sm_90a"], toolkit = ">=12.8", definitions = ["M=1"] },
]

[family.host]
host = ["host/module.cpp"]
"""
"""A kernel table with one of everything."""

CPU = """
summary = "a CPU"
[target]
backend = "cpu"
arch = ["x86-64-v3"]
[wheel]
label = "cpu.test"
size-budget = "5 MiB"
"""
CUDA = """
summary = "a GPU"
[target]
backend = "cuda"
arch = ["sm_80", "sm_90a"]
[toolchain]
cuda = ">=12.8,<14"
[wheel]
label = "cu{cuda_major_minor}.test"
size-budget = "200 MiB"
"""
ROCM = """
summary = "another GPU"
[target]
backend = "rocm"
arch = ["gfx90a"]
[toolchain]
rocm = ">=6,<8"
[wheel]
label = "rocm.test"
size-budget = "200 MiB"
"""
PROFILES = {"cpu": CPU, "cuda": CUDA, "rocm": ROCM}


def table() -> KernelTable:
    return parse_table(TABLE)


def profile(text: str, name: str = "test") -> Profile:
    return parse_profile(name, f"build_profiles/{name}.toml", text)


def plan_for(
    text: str, choices: Choices | None = None, toolchain: Toolchain = FULL, version: str = "0.1.0"
) -> Plan:
    return resolve(profile(text), choices or Choices(), table(), toolchain, version)


def with_tool(toolchain: Toolchain, **probes: Probe) -> Toolchain:
    return replace(toolchain, **probes)


def copy_tree(target: Path) -> Path:
    """The deciding half of the project, with empty kernel sources."""
    for name in ("build_profiles", "python/pelton_build"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "docs").mkdir()
    for name in ("noxfile.py", "pyproject.toml", "docs/tables.py"):
        shutil.copy(ROOT / name, target / name)
    (target / "kernels").mkdir()
    shutil.copy(ROOT / "kernels/kernels.toml", target / "kernels/kernels.toml")
    for source in re.findall(r'"([\w/]+\.(?:cpp|cu))"', (ROOT / "kernels/kernels.toml").read_text()):
        path = target / "kernels" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return target


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return path


def real_profile(name: str) -> Profile:
    return load_profile(ROOT, name)


def real_table() -> KernelTable:
    return load_table(ROOT)
