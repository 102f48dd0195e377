"""Real builds of a small wheel for AMD GPUs, without an AMD GPU and without AMD's packages: Debian's clang and HIP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pelton_build import audit
from pelton_build.toolchain import probe_rocm
from plan_cases import ROOT, script
from small_project import MISSING, Project, digest

ROCM = probe_rocm(os.environ)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.skipif(
        ROCM.tool is None,
        reason=f"no HIP compiler ({ROCM.problem or ', '.join(ROCM.looked)}); see docs/rocm.md",
    ),
]

PROFILE = {"profile": "rocm-gfx1100"}
RUNTIME = """
void **__hipRegisterFatBinary(const void *data) { static void *handle; return &handle; }
void __hipUnregisterFatBinary(void **handle) {}
void __hipRegisterFunction(void **handle, const void *f, char *d, const char *n, unsigned t, void *a, void *b, void *c, void *e, int *w) {}
int __hipPushCallConfiguration() { return 0; }
int __hipPopCallConfiguration() { return 0; }
int hipLaunchKernel() { return 0; }
int hipGetDevice(int *device) { return 0; }
int hipDeviceGetAttribute(int *value) { return 0; }
int hipGetLastError(void) { return 0; }
const char *hipGetErrorString(int error) { return "an error"; }
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("plain") / "project", ("common", "embedding"))


@pytest.fixture(scope="module")
def wheel(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project.wheel(tmp_path_factory.mktemp("wheel"), PROFILE)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def said_by(*command: str | Path, **environ: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PELTON_")}
    done = subprocess.run(
        [*map(str, command)], check=False, capture_output=True, text=True, env={**clean, **environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_library_is_tied_to_no_rocm(installed: Path) -> None:
    library = installed / "pelton/libpelton.so"
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", said_by("readelf", "-d", library)))
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "hip" in name or "hsa" in name or "stdc++" in name]
    symbols = said_by("objdump", "-T", library)
    hip = {line.split()[-1] for line in symbols.splitlines() if "*UND*" in line and "hip" in line.split()[-1]}
    listed = (ROOT / "cmake/hip-symbols.txt").read_text().splitlines()
    assert {"__hipRegisterFatBinary", "hipLaunchKernel"} <= hip <= set(listed)
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", symbols)}
    assert versions and max(versions) <= (2, 28)


def test_the_audit_finds_what_was_planned(wheel: Path) -> None:
    for module, name in (("elftools", "pyelftools"), ("iced_x86", "iced-x86")):
        pytest.importorskip(module, reason=f"{name} is not installed")
    report = audit.audit_wheel(wheel, only=set(audit.CHECKS) - {"auditwheel", "local"})
    assert report.findings == ()
    assert {(use.family, use.source, use.arch) for use in report.kernels} == {
        ("embedding", "embedding/gpu.cu", "gfx1100")
    }


def test_what_the_wheel_says(wheel: Path, installed: Path) -> None:
    assert wheel.name == "pelton-0.3.0+rocm.gfx1100-py3-none-manylinux_2_28_x86_64.whl"
    info = json.loads((installed / "pelton/_build_info.json").read_text())
    assert (info["backend"], info["archs"], info["state"]) == ("rocm", ["gfx1100"], "wheel")
    assert ROCM.tool is not None and info["toolchain"]["rocm"] == f"hip-clang {ROCM.tool.version}"
    (bill,) = installed.glob("*.dist-info/sboms/*.json")
    parts = {part["name"] for part in json.loads(bill.read_text())["components"]}
    assert {"hip", "rocm-device-libs", "torch", "libstdc++"} <= parts


def test_it_can_be_imported_without_a_gpu_and_without_rocm(installed: Path) -> None:
    program = (
        "import pelton, torch\nfrom pelton import ops\n"
        "try:\n    ops.embedding(torch.zeros(1, dtype=torch.int64), torch.zeros(2, 4))\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    said = said_by(sys.executable, "-c", program, PYTHONPATH=str(installed))
    assert said.startswith("HardwareMismatch ") and "an AMD GPU that runs gfx1100" in said


def test_the_library_loads_with_whatever_runtime_torch_has(installed: Path, tmp_path: Path) -> None:
    """A stand-in for the runtime, loaded where only its loader sees it, as torch does."""
    source = tmp_path / "runtime.c"
    source.write_text(RUNTIME)
    runtime = tmp_path / "libamdhip64.so.7"
    said_by("gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{runtime.name}", "-o", runtime, source)
    library = installed / "pelton/libpelton.so"
    program = (
        "import ctypes, os, sys, torch\nfrom pelton import _library\n"
        "ctypes.CDLL(sys.argv[1], mode=os.RTLD_LOCAL)\n_library.load()\nprint(torch.ops.pelton.backend())\n"
    )
    environ = {"PYTHONPATH": str(installed), "PELTON_LIBRARY": str(library)}
    assert said_by(sys.executable, "-c", program, runtime, **environ) == "rocm\n"


def test_an_nvcc_on_path_and_odd_folders_change_nothing(
    project: Project, wheel: Path, tmp_path: Path
) -> None:
    odd = project.copy(tmp_path / "Größe & co's (1)" / "src")
    temporary = tmp_path / "t t"
    temporary.mkdir()
    for name in ("nvcc", "hipconfig"):
        script(tmp_path / "bin" / name, f"echo {name} >> '{tmp_path}/called'; echo nvidia")
    environ = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HIP_PLATFORM": "nvidia",
        "HIPFLAGS": "-DX",
        "TMPDIR": str(temporary),
        "LC_ALL": "C",
    }
    made = odd.wheel(tmp_path / "out", PROFILE, **environ)
    assert digest(made) == digest(wheel)
    with zipfile.ZipFile(made) as archive:
        content = archive.read("pelton/libpelton.so")
    for private in ("co's", str(tmp_path), f"{Path.home()}/", "/usr/include"):
        assert private.encode() not in content


@pytest.mark.parametrize("arch", ["gfx942", "gfx1101"])
def test_adding_hardware_is_adding_a_file(project: Project, tmp_path: Path, arch: str) -> None:
    copy = project.copy(tmp_path / "src")
    text = (copy.folder / "build_profiles/rocm-gfx1100.toml").read_text()
    (copy.folder / f"build_profiles/rocm-{arch}.toml").write_text(text.replace("gfx1100", arch))
    made = copy.wheel(tmp_path / "out", {"profile": f"rocm-{arch}"})
    assert f"+rocm.{arch}." in made.name
    pytest.importorskip("elftools", reason="pyelftools is not installed")
    report = audit.audit_wheel(made, only={"archs", "amdgpu", "needed"})
    assert report.findings == ()
    assert {use.arch for use in report.kernels} == {arch}
