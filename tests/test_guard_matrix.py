"""Every build on every kind of machine, each pair in a process of its own: it fits, or one error says all; no signal.

The expectations below are written by hand, one line a machine; the guard is not asked for them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pelton import guard

PROFILES: list[dict[str, Any]] = [
    {"profile": "cpu-avx2", "backend": "cpu", "archs": ["x86-64-v3"]},
    {"profile": "cpu-avx512", "backend": "cpu", "archs": ["x86-64-v4"]},
    {"profile": "cuda-sm80", "backend": "cuda", "archs": ["sm_80", "compute_80"]},
    {"profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"]},
    {"profile": "rocm-gfx90a", "backend": "rocm", "archs": ["gfx90a"]},
    {"profile": "rocm-gfx1100", "backend": "rocm", "archs": ["gfx1100"]},
]
BUILDS = {
    str(profile["profile"]): {
        **profile,
        "version": f"0.1.0+{profile['profile'].replace('-', '.')}",
        "glibc": "2.28",
        "torch_floor": "2.10",
        "minimum_driver": "13.0" if profile["backend"] == "cuda" else "",
        "minimum_driver_ptx": "13.1" if profile["profile"] == "cuda-sm80" else "",
        "profiles": PROFILES,
    }
    for profile in PROFILES
}
CPUS, CUDA, ROCM = ["cpu-avx2", "cpu-avx512"], ["cuda-sm80", "cuda-sm90"], ["rocm-gfx90a", "rocm-gfx1100"]

V3, V4 = '[cpu]\nlevel = "x86-64-v3"\n', '[cpu]\nlevel = "x86-64-v4"\n'
CUDA_TORCH = 'glibc = "2.36"\ntorch = "2.12.0+cu130"\n'
ROCM_TORCH = 'glibc = "2.36"\ntorch = "2.12.0+rocm6.4"\n'
CPU_TORCH = 'glibc = "2.36"\ntorch = "2.13.0+cpu"\n'


def cards(*archs: str) -> str:
    return "".join(f'[[gpu]]\narch = "{arch}"\n' for arch in archs)


@dataclass(frozen=True)
class Host:
    """A machine, the builds that run on it, and what the others have to say."""

    text: str
    fits: tuple[str, ...] = ()
    install: str = ""
    """Part of what every other build says that helps."""
    found: str = ""
    """Part of what every other build says that it found."""
    error: str = ""
    """Part of the error where the description is no machine."""


def wheel(profile: str) -> str:
    return f"/p/{profile}/simple/ pelton"


HOSTS = {
    "H200": Host(CUDA_TORCH + 'driver = "13.1"\n' + V4 + cards("sm_90"), (*CPUS, *CUDA), wheel("cuda-sm90"), "no AMD GPU"),
    "H200, AVX2": Host(CUDA_TORCH + 'driver = "13.1"\n' + V3 + cards("sm_90"), ("cpu-avx2", *CUDA), wheel("cuda-sm90")),
    "eight H200": Host(CUDA_TORCH + 'driver = "13.1"\n' + V4 + cards(*["sm_90"] * 8), (*CPUS, *CUDA), wheel("cuda-sm90")),
    "A100": Host(CUDA_TORCH + 'driver = "13.0"\n' + V4 + cards("sm_80"), (*CPUS, "cuda-sm80"), wheel("cuda-sm80")),
    "RTX 4090": Host(CUDA_TORCH + 'driver = "13.0"\n' + V3 + cards("sm_89"), ("cpu-avx2", "cuda-sm80"), wheel("cuda-sm80")),
    "B200": Host(CUDA_TORCH + 'driver = "13.1"\n' + V4 + cards("sm_100"), (*CPUS, "cuda-sm80"), wheel("cuda-sm80")),
    "RTX 5090 on an older CPU": Host(CUDA_TORCH + 'driver = "13.1"\n[cpu]\nlevel = "x86-64-v2"\n' + cards("sm_120"), ("cuda-sm80",), wheel("cuda-sm80")),
    "B200, a driver too old for its PTX": Host(CUDA_TORCH + 'driver = "13.0"\n' + V4 + cards("sm_100"), tuple(CPUS)),
    "H200, an old driver": Host(CUDA_TORCH + 'driver = "12.4"\n' + V4 + cards("sm_90"), tuple(CPUS)),
    "T4": Host(CUDA_TORCH + 'driver = "13.1"\n' + V4 + cards("sm_75"), tuple(CPUS), wheel("cpu-avx512")),
    "T4 and H200": Host(CUDA_TORCH + 'driver = "13.1"\n' + V4 + cards("sm_75", "sm_90"), (*CPUS, *CUDA), wheel("cuda-sm90")),
    "no NVIDIA driver": Host(CUDA_TORCH + 'driver = ""\n' + V4, tuple(CPUS), wheel("cpu-avx512"), "no "),
    "a driver without GPU": Host(CUDA_TORCH + 'driver = "13.0"\n' + V3, ("cpu-avx2",), wheel("cpu-avx2")),
    "H200, torch for CPUs": Host(CPU_TORCH + 'driver = "13.1"\n' + V4 + cards("sm_90"), tuple(CPUS)),
    "MI210": Host(ROCM_TORCH + 'driver = ""\n' + V4 + cards("gfx90a"), (*CPUS, "rocm-gfx90a"), wheel("rocm-gfx90a")),
    "RX 7900 XTX": Host(ROCM_TORCH + 'driver = ""\n' + V3 + cards("gfx1100"), ("cpu-avx2", "rocm-gfx1100"), wheel("rocm-gfx1100")),
    "MI300X": Host(ROCM_TORCH + 'driver = ""\n' + V4 + cards("gfx942"), tuple(CPUS), wheel("cpu-avx512")),
    "RX 7800 XT": Host(ROCM_TORCH + 'driver = ""\n' + V4 + cards("gfx1101"), tuple(CPUS), wheel("cpu-avx512")),
    "RX 6800": Host(ROCM_TORCH + 'driver = ""\n' + V3 + cards("gfx1030"), ("cpu-avx2",), wheel("cpu-avx2")),
    "MI210, torch for CPUs": Host(CPU_TORCH + 'driver = ""\n' + V4 + cards("gfx90a"), tuple(CPUS)),
    "H200 and MI210": Host(CUDA_TORCH + 'driver = "13.1"\n' + V4 + cards("sm_90", "gfx90a"), (*CPUS, *CUDA)),
    "AVX-512": Host(CPU_TORCH + "driver = ''\n" + V4, tuple(CPUS), wheel("cpu-avx512")),
    "AVX2": Host(CPU_TORCH + "driver = ''\n" + V3, ("cpu-avx2",), wheel("cpu-avx2")),
    "AVX-512 that is not enabled": Host(CPU_TORCH + "driver = ''\n" + V4 + 'enabled = ["avx"]\n', ("cpu-avx2",), wheel("cpu-avx2")),
    "nothing enabled": Host(CPU_TORCH + "driver = ''\n" + V4 + "enabled = []\n", (), "no build fits this machine"),
    "AVX-512 without one extension": Host(CPU_TORCH + "driver = ''\n" + V4 + 'without = ["avx512vl"]\n', ("cpu-avx2",), wheel("cpu-avx2")),
    "AVX2 without FMA": Host(CPU_TORCH + "driver = ''\n" + V3 + 'without = ["fma"]\n', (), "no build fits this machine"),
    "an old CPU": Host(CPU_TORCH + "driver = ''\n[cpu]\nlevel = 'x86-64-v2'\n", (), "no build fits this machine"),
    "the oldest CPU": Host(CPU_TORCH + "driver = ''\n[cpu]\nlevel = 'x86-64'\n", (), "no build fits this machine"),
    "old torch": Host('glibc = "2.36"\ntorch = "2.9.1+cu128"\ndriver = "13.1"\n' + V4 + cards("sm_90"), (), 'pip install --upgrade "torch>=2.10"', "torch 2.9.1"),
    "no torch": Host('glibc = "2.36"\ntorch = ""\ndriver = "13.1"\n' + V4 + cards("sm_90"), (), 'pip install "torch>=2.10"', "no torch"),
    "old glibc": Host('glibc = "2.17"\ntorch = "2.12.0+cu130"\ndriver = "13.1"\n' + V4 + cards("sm_90"), (), "newer Linux", "glibc 2.17"),
    "musl": Host('glibc = ""\ntorch = "2.12.0+cu130"\ndriver = "13.1"\n' + V4 + cards("sm_90"), (), "newer Linux", "not glibc"),
    "macOS": Host('system = "darwin"\nmachine = "arm64"\n', (), "Linux machine", "darwin on arm64"),
    "ARM": Host('machine = "aarch64"\n', (), "x86-64 processor", "linux on aarch64"),
    "no TOML": Host("[cpu\n", error="cannot be read"),
    "an unknown key": Host('glib = "2.28"\n', error="'glibc'"),
    "a contradiction": Host('torch = "2.13.0+cpu"\ntorch-cuda = "13.0"\n', error="built for no CUDA"),
}  # fmt: skip

# Forks for each machine: the package is imported once, and still every pair has a process of its own. The library is
# loaded once for each build that fits, for real.
SCRIPT = """
import json, os, sys
from pathlib import Path
import pelton
from pelton import _library, build_info, guard
from pelton.errors import HardwareMismatch, PeltonError
folder, load = Path(sys.argv[1]), set(sys.argv[2].split(","))
def tell(name):
    os.environ["PELTON_HOST"] = str(folder / f"{name}.toml")
    try:
        guard.check()
        if name in load:
            _library.load()
            from pelton import ops
            ops.backend()
    except HardwareMismatch as error:
        return {"found": error.found, "needed": error.needed, "install": error.install, "text": str(error)}
    except PeltonError as error:
        return {"error": str(error)}
    return {}
for path in sorted(folder.glob("*.toml")):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as file:
            json.dump(tell(path.stem), file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    print(json.dumps([path.stem, os.waitstatus_to_exitcode(status), json.loads(text) if text else None]))
"""


@pytest.fixture(scope="module")
def library() -> Path:
    """The library that the tests run with, whatever the build info beside it says."""
    from pelton import _library

    return _library.load()


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_on_every_machine(build: str, library: Path, tmp_path: Path) -> None:
    info, package, hosts = BUILDS[build], tmp_path / "path" / "pelton", tmp_path / "hosts"
    package.mkdir(parents=True)
    hosts.mkdir()
    for path in Path(guard.__file__).parent.iterdir():
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            (package / path.name).symlink_to(path)
    (package / "libpelton.so").symlink_to(library)
    (package / "_build_info.json").write_text(json.dumps(info))
    for number, host in enumerate(HOSTS.values()):
        (hosts / f"{number}.toml").write_text(host.text)
    loaded = next((number for number, host in enumerate(HOSTS.values()) if build in host.fits), -1)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PELTON_") and "VISIBLE" not in k}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hosts), str(loaded)],
        check=False, capture_output=True, text=True, env={**environ, "PYTHONPATH": str(package.parent)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = {name: (status, said) for name, status, said in map(json.loads, done.stdout.splitlines())}
    assert len(told) == len(HOSTS)
    for number, (name, host) in enumerate(HOSTS.items()):
        status, said = told[str(number)]
        assert status == 0, f"{name}: ended by {signal.Signals(-status).name if status < 0 else status}"
        if host.error:
            assert host.error in said["error"], name
        elif build in host.fits:
            assert said == {}, name
        else:
            assert said.get("found") and said["needed"] and said["install"], (name, said)
            assert all(said[key] in said["text"] for key in ("found", "needed", "install"))
            assert build in said["text"]
            about = said["needed"]
            if "torch" not in about and "driver" not in about:  # those are mended without another build
                assert host.install in said["install"], (name, said)
            assert host.found in said["found"] or "driver" in said["found"] + about or "torch" in about, (
                name,
                said,
            )


def test_the_machines_are_of_every_kind(tmp_path: Path) -> None:
    """Every build fits somewhere and does not elsewhere; every kind of misfit is there."""
    real = guard.Machine("linux", "x86_64", "2.36", frozenset(), frozenset(), None)
    topics, path = set(), tmp_path / "machine.toml"
    for build, info in BUILDS.items():
        machines = [host for host in HOSTS.values() if not host.error]
        assert 0 < sum(build in host.fits for host in machines) < len(machines)
        for host in machines:
            path.write_text(host.text)
            topics |= {misfit.topic for misfit in guard.misfits(info, guard.described_machine(path, real))}
    assert topics == {"machine", "torch", "gpu"}
