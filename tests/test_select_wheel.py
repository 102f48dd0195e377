"""`pelton-select`: the build for every kind of machine, what it says, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pelton import guard, select_wheel
from pelton._gpus import Gpu
from pelton.errors import InvalidValueError
from pelton.guard import Machine, find_mismatch, level_features
from pelton.select_wheel import as_json, choose, commands, render

V2, V3, V4 = (level_features(f"x86-64-v{n}") for n in (2, 3, 4))
PROFILES: list[dict[str, Any]] = [
    {"profile": "cpu-avx2", "summary": "any CPU", "backend": "cpu", "archs": ["x86-64-v3"]},
    {"profile": "cpu-avx512", "summary": "", "backend": "cpu", "archs": ["x86-64-v4"]},
    {"profile": "cuda-sm80", "backend": "cuda", "archs": ["sm_80", "compute_80"], "minimum_driver": "13.0"},
    {"profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"], "minimum_driver": "13.0"},
    {"profile": "rocm-gfx1100", "backend": "rocm", "archs": ["gfx1100"], "minimum_driver": ""},
    {"profile": "rocm-gfx90a", "backend": "rocm", "archs": ["gfx90a"], "minimum_driver": ""},
]
INFO: dict[str, Any] = {
    **PROFILES[0],
    "glibc": "2.28",
    "torch_floor": "2.10",
    "version": "0.1.0",
    "label": "",
    "profiles": PROFILES,
}
MACHINE = Machine("linux", "x86_64", "2.36", V3, frozenset(), None)
H200, A100, B200, T4 = (
    Gpu("sm_90", "H200"),
    Gpu("sm_80", "A100"),
    Gpu("sm_100", "B200"),
    Gpu("sm_75", "T4"),
)
MI210, RX = Gpu("gfx90a", "MI210"), Gpu("gfx1100", "RX 7900")


def machine(*gpus: Gpu, **changes: Any) -> Machine:
    """A machine with these GPUs and a driver that is new enough."""
    nvidia = any(gpu.backend == "cuda" for gpu in gpus)
    return dataclasses.replace(MACHINE, **{"gpus": gpus, "driver": "13.1" if nvidia else "", **changes})


CHOICES: dict[str, tuple[Machine, str | None, str]] = {
    # what is told, as a part of the answer
    "AVX2": (machine(), "cpu-avx2", "cpu-avx512: needs a CPU with x86-64-v4"),
    "AVX-512": (machine(flags=V4), "cpu-avx512", "cpu-avx2: fits, but less well"),
    "AVX-512 not enabled": (machine(off=V4 - V3), "cpu-avx2", "not enabled by the operating system"),
    "without torch": (machine(torch=None), "cpu-avx2", ""),
    "with an old torch": (machine(torch="1.13"), "cpu-avx2", ""),
    "Hopper": (machine(H200, torch="2.12", torch_cuda="13.0"), "cuda-sm90", "cuda-sm80: fits, but less well"),
    "Hopper, torch for CPUs": (machine(H200, torch="2.12+cpu"), "cuda-sm90", "Note: torch 2.12+cpu is a build without CUDA"),
    "Hopper, no torch": (machine(H200), "cuda-sm90", "Note: there is no torch: install torch 2.10 or newer, built for CUDA"),
    "Ampere": (machine(A100, flags=V4), "cuda-sm80", "cuda-sm90: needs an NVIDIA GPU that runs sm_90a"),
    "Ada": (machine(Gpu("sm_89", "L4")), "cuda-sm80", ""),
    "newer than any build": (machine(B200), "cuda-sm80", ""),  # by PTX
    "too old": (machine(T4), "cpu-avx2", "Note: no build is for T4 (sm_75)."),
    "an old card first": (machine(T4, H200), "cuda-sm90", "Note: it does not run on GPU 0, T4 (sm_75)."),
    "two kinds, the first one counts": (machine(A100, H200), "cuda-sm80", ""),
    "two kinds, the other way round": (machine(H200, A100), "cuda-sm90", "Note: it does not run on GPU 1, A100"),
    "an old driver": (machine(H200, driver="12.8"), "cpu-avx2", "Note: cuda-sm90 is for a GPU of this machine, but needs an NVIDIA driver for CUDA 13.0"),
    "a driver and no GPU": (machine(driver="13.0"), "cpu-avx2", "no NVIDIA GPU"),
    "a driver that does not answer": (
        machine(gpus=None, driver=None, gpu_note="no answer within 20 s", flags=V4), "cpu-avx512", "a GPU may be there all the same: no answer within 20 s"),
    "no driver": (machine(driver="", gpu_note="libcuda.so.1 is not there"), "cpu-avx2", "no NVIDIA driver (libcuda.so.1 is not there)"),
    "CDNA": (machine(MI210), "rocm-gfx90a", "Note: there is no torch: install torch 2.10 or newer, built for ROCm"),
    "RDNA": (machine(RX, torch="2.12", torch_rocm="6.4"), "rocm-gfx1100", "rocm-gfx90a: needs an AMD GPU"),
    "another AMD card": (machine(Gpu("gfx942", "MI300X")), "cpu-avx2", "no build is for MI300X (gfx942)"),
    "both makers": (machine(RX, H200), "rocm-gfx1100", "it does not run on GPU 1, H200"),
    "an old CPU with a good card": (machine(H200, flags=V2), "cuda-sm90", "cpu-avx2: needs a CPU with x86-64-v3"),
    "an old CPU": (machine(flags=V2), None, "No build of pelton fits this machine"),
    "old glibc": (machine(H200, glibc="2.17"), None, "needs glibc 2.28 or newer; found glibc 2.17"),
    "musl": (machine(glibc=None), None, "a C library that is not glibc"),
    "ARM": (machine(machine="aarch64"), None, "found linux on aarch64"),
    "macOS": (machine(system="darwin"), None, "found darwin on x86_64"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case: str) -> None:
    host, profile, told = CHOICES[case]
    choice = choose(INFO, host)
    assert (choice.best.profile if choice.best else None) == profile
    assert told in render(choice, "0.1.0", "")
    assert {c.profile for c in choice.candidates} == {p["profile"] for p in PROFILES}
    assert all(c.reason for c in choice.candidates if choice.best is None)


@pytest.mark.parametrize("case", CHOICES)
def test_the_guard_accepts_what_is_recommended(case: str) -> None:
    host, profile, _ = CHOICES[case]
    if profile is None:
        return
    build = {**INFO, "minimum_driver_ptx": "", **next(p for p in PROFILES if p["profile"] == profile)}
    torch = {"torch": "2.10", "torch_cuda": "13.0", "torch_rocm": "6.4"}
    assert find_mismatch(build, dataclasses.replace(host, **torch)) is None


def test_the_order_of_the_profiles_does_not_matter() -> None:
    for host, profile, _ in CHOICES.values():
        best = choose({**INFO, "profiles": PROFILES[::-1]}, host).best
        assert (best.profile if best else None) == profile


@pytest.mark.parametrize(
    ("version", "index", "pip"),
    [
        (
            "0.1.0+cu130.sm90",
            "https://example.test/whl/",
            'pip install --extra-index-url https://example.test/whl/p/cuda-sm90/simple/ "pelton==0.1.0"',
        ),
        ("0.1.0", "", 'pip install --extra-index-url INDEX/p/cuda-sm90/simple/ "pelton==0.1.0"'),
    ],
)
def test_commands(version: str, index: str, pip: str) -> None:
    made = commands("cuda-sm90", version, index)
    assert made["pip"] == pip
    assert made["uv"] == pip.replace("pip install --extra-index-url", "uv pip install --index")
    assert made["index_url"] in pip


def test_for_machines() -> None:
    told = as_json(choose(INFO, machine(H200)), "0.1.0", "https://example.test")
    assert told["profile"] == "cuda-sm90"
    assert told["index_url"] == "https://example.test/p/cuda-sm90/simple/"
    assert [c["profile"] for c in told["candidates"] if not c["reason"]] == [
        "cuda-sm90",
        "cuda-sm80",
        "cpu-avx2",
    ]
    nothing = as_json(choose(INFO, machine(flags=V2)), "0.1.0", "")
    assert nothing["profile"] is nothing["index_url"] is nothing["pip"] is None
    assert all(c["reason"] for c in nothing["candidates"])


def test_a_build_info_that_knows_nothing_of_drivers() -> None:
    old = [{k: v for k, v in p.items() if k in ("profile", "backend", "archs")} for p in PROFILES]
    best = choose({**INFO, "profiles": old}, machine(H200, driver="12.0")).best
    assert best is not None and best.profile == "cuda-sm90"


# --- the command ---

HOSTS: dict[str, tuple[str, int, str]] = {
    # machine.toml, exit code, profile or message
    "Hopper": ('driver = "13.0"\n[[gpu]]\narch = "sm_90"\nname = "H200"\n', 0, "cuda-sm90"),
    "Ampere": ('driver = "13.0"\n[[gpu]]\narch = "sm_86"\n', 0, "cuda-sm80"),
    "AMD": ('driver = ""\n[[gpu]]\narch = "gfx1100"\ncount = 2\n', 0, "rocm-gfx1100"),
    "AVX-512": ('driver = ""\n[cpu]\nlevel = "x86-64-v4"\n', 0, "cpu-avx512"),
    "AVX2": ('driver = ""\n[cpu]\nlevel = "x86-64-v3"\n', 0, "cpu-avx2"),
    "old": ('driver = ""\n[cpu]\nlevel = "x86-64-v2"\n', 3, ""),
    "ARM": ('machine = "aarch64"\ndriver = ""\n', 3, ""),
    "no machine": ("[[gpu]]\narch = 9\n", 1, "gpu[0].arch"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as in an environment without torch, and without the library: a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    package = folder / "pelton"
    package.mkdir()
    for path in Path(guard.__file__).parent.glob("*.py"):
        (package / path.name).symlink_to(path)
    (package / "_build_info.json").write_text(json.dumps({**INFO, "state": "wheel"}))
    return folder


def run(installed: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PELTON_") and "VISIBLE" not in k}
    # -S: without site-packages, so that nothing but the standard library can be imported.
    program = "import sys; from pelton.select_wheel import main; code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=installed,
        env={**clean, "PYTHONPATH": str(installed), **environ},
    )


@pytest.mark.parametrize("case", HOSTS)
def test_command(case: str, installed: Path, tmp_path: Path) -> None:
    text, code, told = HOSTS[case]
    host = tmp_path / "machine.toml"
    host.write_text(text)
    done = run(installed, "--json", PELTON_HOST=str(host), PELTON_INDEX="https://example.test/whl")
    assert done.returncode == code, done.stderr
    if code == 1:
        assert told in done.stderr and "Traceback" not in done.stderr and not done.stdout
        return
    answer = json.loads(done.stdout)
    assert answer["profile"] == (told or None)
    if told:
        assert f"https://example.test/whl/p/{told}/simple/" in answer["pip"]
    assert run(installed, PELTON_HOST=str(host)).returncode == code
    name = run(installed, "--profile-only", PELTON_HOST=str(host))
    assert (name.returncode, name.stdout.strip()) == (code, told)


def test_on_this_very_machine(installed: Path) -> None:
    done = run(installed, "--json")
    assert done.returncode in (0, 3), done.stderr
    real = choose(INFO, guard.real_machine(gpus=True))
    assert json.loads(done.stdout)["profile"] == (real.best.profile if real.best else None)


@pytest.mark.parametrize("arguments", [("--jsn",), ("--json", "--profile-only")])
def test_wrong_usage(arguments: tuple[str, ...], installed: Path) -> None:
    done = run(installed, *arguments)
    assert done.returncode == 2 and not done.stdout
    assert arguments[-1] in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("form", [(), ("--json",), ("--profile-only",)])
def test_a_full_disk(form: tuple[str, ...], installed: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pelton.select_wheel", *form],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=installed,
            env={**os.environ, "PYTHONPATH": str(installed)},
        )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "RuntimeWarning" not in line]
    assert any("error: the answer cannot be written: No space left" in line for line in lines)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


ADDRESSES = {
    "https://example.test": True,
    "https://example.test/": True,
    "http://127.0.0.1:8080/whl": True,
    "http://[::1]:8080/whl/": True,
    "HTTPS://user:pass%20word@example.test/~a/b@c": True,
    "file:///srv/index": True,
    "file://localhost/srv/a%20b": True,
    "http://[::1": False,
    "https://": False,
    "https:///whl": False,
    "https://example.test:port": False,
    "example.test/whl": False,
    "ftp://example.test": False,
    "file:": False,
    "file://": False,
    "file://example.test/whl": False,
    "https://example.test/a b": False,
    " https://example.test": False,
    "https://example.test/\n": False,
    "https://example.test/;rm": False,
    "https://example.test/$(id)": False,
    "https://example.test/`id`": False,
    "https://example.test/'": False,
    "https://example.test/?a=b": False,
    "https://example.test/#a": False,
    "https://example.test/\u0661": False,
    "-https://example.test": False,
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses(address: str) -> None:
    if ADDRESSES[address]:
        assert guard.checked_address(address, "--index") == address
        words = shlex.split(commands("cpu-avx2", "0.1.0", address)["pip"])
        assert words[3] == f"{address.rstrip('/')}/p/cpu-avx2/simple/"
    else:
        with pytest.raises(InvalidValueError, match=r"^--index: expected the index's address"):
            guard.checked_address(address, "--index")


def test_the_builder_of_the_index_takes_the_same_addresses() -> None:
    index = pytest.importorskip("pelton_build.index", reason="the builder is not installed")
    assert index.ADDRESS.pattern == guard.ADDRESS.pattern


def test_a_wrong_address_is_named(installed: Path) -> None:
    for told, done in {
        "--index": run(installed, "--index", "https://a b", PELTON_INDEX="https://example.test"),
        "PELTON_INDEX": run(installed, PELTON_INDEX="https://example.test/;id"),
    }.items():
        assert done.returncode == 1 and not done.stdout
        assert done.stderr.startswith(f"error: {told}: expected the index's address")


def test_in_a_source_tree(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pelton import build_info

    monkeypatch.setattr(build_info, "path", None)
    assert select_wheel.main([]) == 1
    assert "install a wheel" in capsys.readouterr().err
