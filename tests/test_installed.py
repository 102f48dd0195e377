"""The installed package as a user has it, on machines that are odd: what its commands say, and that they end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pelton import guard

PROFILES = [
    {"profile": "cpu-avx2", "backend": "cpu", "archs": ["x86-64-v3"]},
    {"profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"]},
]
VERSIONS = {"cpu-avx2": "0.1.0+cpu.avx2", "cuda-sm90": "0.1.0+cu130.sm90"}
DRIVER = """
#include <stdio.h>
int cuDriverGetVersion(int *v) { *v = 13010; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }
int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "H200"); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = 141ull << 30; return 0; }
"""


def install(folder: Path, profile: str) -> Path:
    """The package with a build info, and without a library; a folder for PYTHONPATH."""
    package = folder / "pelton"
    package.mkdir(parents=True, exist_ok=True)
    for path in Path(guard.__file__).parent.glob("*.py"):
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    version = VERSIONS[profile]
    own = next(entry for entry in PROFILES if entry["profile"] == profile)
    floors = {"glibc": "2.28", "torch_floor": "2.10", "minimum_driver": "13.0"}
    info = {**own, **floors, "version": version, "state": "wheel", "profiles": PROFILES}
    (package / "_build_info.json").write_text(json.dumps(info))
    record = folder / f"pelton-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pelton\nVersion: {version}\n")
    return folder


def run(
    installed: Path, *arguments: str, within: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """A Python with this package, and without its own site-packages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PELTON_") and "VISIBLE" not in k}
    return subprocess.run(
        [*within, sys.executable, "-S", *arguments],
        check=False, capture_output=True, text=True, cwd=installed, timeout=60,
        env={**clean, "PYTHONPATH": str(installed), **environ},
    )  # fmt: skip


def doctor(installed: Path, **options: Any) -> dict[str, dict[str, str]]:
    """The doctor's findings by check; of several of one check the last."""
    done = run(installed, "-m", "pelton", "doctor", "--json", **options)
    told = json.loads(done.stdout)
    assert done.returncode == int(not told["ok"]), done.stderr
    return {finding["check"]: finding for finding in told["findings"]}


def test_two_installations_in_one_target_folder(tmp_path: Path) -> None:
    """pip replaces nothing there: the files are what was written last, and records of both remain."""
    for profile in ("cpu-avx2", "cuda-sm90"):
        install(tmp_path, profile)
        done = run(tmp_path, "-m", "pelton", "info", "--json")
        info = json.loads(done.stdout)
        assert info["build"]["profile"] == profile and info["version"] == VERSIONS[profile]
        version = run(tmp_path, "-c", "import pelton; print(pelton.__version__)").stdout.strip()
        assert version == VERSIONS[profile]
    finding = doctor(tmp_path)["python records"]
    assert finding["status"] == "warning" and "empty folder" in finding["do"]
    assert all(version in finding["saw"] for version in VERSIONS.values())


@pytest.mark.parametrize("script", ["exec sleep 600", "exit 127"])
def test_nothing_but_the_doctor_asks_nvidia_smi(script: str, tmp_path: Path) -> None:
    installed = install(tmp_path / "site", "cuda-sm90")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho called >> "{tmp_path}/log"\n{script}\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    host = tmp_path / "machine.toml"
    host.write_text('driver = ""\n[cpu]\nlevel = "x86-64-v3"\n')
    load = "import pelton; from pelton import guard; print(guard.this_machine(gpus=True).driver)"
    assert run(installed, "-c", load, PATH=path).returncode == 0
    select = run(installed, "-m", "pelton.select_wheel", "--profile-only", PATH=path, PELTON_HOST=str(host))
    assert select.stdout.strip() == "cpu-avx2", select.stderr
    assert not (tmp_path / "log").exists()
    finding = doctor(installed, PATH=path)["nvidia-smi"]
    assert finding["status"] == "note"
    assert ("no answer within 5 s" if "sleep" in script else "ends with status 127") in finding["saw"]
    assert (tmp_path / "log").read_text() == "called\n"


def test_wsl_has_its_driver_in_a_folder_of_its_own(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    installed = install(tmp_path / "site", "cuda-sm90")
    (tmp_path / "cuda.c").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(tmp_path / "cuda.c")]
    subprocess.run(command, check=True)
    (tmp_path / "version").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    (tmp_path / "layer").mkdir()
    mounts = (
        f"cd {tmp_path}; mount -t tmpfs t layer; mkdir -p layer/upper/wsl/lib layer/work; "
        '[ -z "$NO_DRIVER" ] && cp libcuda.so.1 layer/upper/wsl/lib/; '
        "mount -t overlay o -o lowerdir=/usr/lib,upperdir=layer/upper,workdir=layer/work /usr/lib && "
        'mount --bind version /proc/version && exec "$@"'
    )
    within = ("unshare", "--map-root-user", "--mount", "sh", "-c", mounts, "sh")
    if shutil.which("unshare") is None or run(tmp_path, "-c", "", within=within).returncode != 0:
        pytest.skip("this system lets no program have folders of its own (unshare, overlay)")
    select = run(installed, "-m", "pelton.select_wheel", "--profile-only", within=within)
    assert select.stdout.strip() == "cuda-sm90", select.stderr
    finding = doctor(installed, within=within)["gpu"]
    assert "WSL, /usr/lib/wsl/lib/libcuda.so.1" in finding["saw"] and "H200" in finding["saw"]
    finding = doctor(installed, within=within, NO_DRIVER="1")["gpu"]
    assert finding["status"] == "error" and finding["saw"] == "WSL without the Windows driver"
    assert "install NVIDIA's driver in Windows" in finding["do"]
