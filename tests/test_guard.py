"""The guard: every kind of machine a build does not fit, decided over values and then in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
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
from pelton.errors import HardwareMismatch, InvalidValueError
from pelton.guard import LEVELS, Machine, described_machine, find_mismatch, level_features

V3, V4 = level_features("x86-64-v3"), level_features("x86-64-v4")
PROFILES = [
    {"profile": "cpu-avx2", "backend": "cpu", "archs": ["x86-64-v3"]},
    {"profile": "cpu-avx512", "backend": "cpu", "archs": ["x86-64-v4"]},
    {"profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"]},
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
CUDA = {**AVX512, "profile": "cuda-sm90", "backend": "cuda", "archs": ["sm_90a"]}
MACHINE = Machine("linux", "x86_64", "2.36", V4, frozenset(), "2.13.0+cpu")


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(MACHINE, **changes)


FITS = [
    (AVX512, machine()),
    (AVX2, machine()),
    (AVX2, machine(flags=V3)),
    (AVX2, machine(glibc="2.28", torch="2.10")),
    (AVX2, machine(torch="2.10.0a0+git1234")),
    (CUDA, machine(flags=level_features("x86-64"))),
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


def test_the_command_names_the_index_when_it_is_known() -> None:
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


KEYS = st.sampled_from(["glibc", "torch", "system", "cpu", "cpu.level", "cpu.with", "cpu.enabled", "x"])
VALUES = st.one_of(
    st.text(max_size=8).map(json.dumps),
    st.integers().map(str),
    st.sampled_from(['"x86-64-v3"', '["avx2", "abm"]', '["avx"]', "[1]", "[]", "{}", "true", "1.5", "[["]),
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
            find_mismatch(AVX512, described)


def test_missing_description(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="cannot be read"):
        described_machine(tmp_path / "none.toml", MACHINE)


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
