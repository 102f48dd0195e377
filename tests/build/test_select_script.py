"""The one-file command on the index: made of a wheel, run by a Python that has nothing installed."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pelton_build.cmake import profiles_of
from pelton_build.errors import BuildError
from pelton_build.index import build_index
from pelton_build.select_script import entry_point, select_script
from wheel_factory import WheelParts, make_wheel, unlabelled

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "pelton.select_wheel:main"
SCRIPTS = "[console_scripts]\npelton = pelton.cli:main\npelton-select = pelton.select_wheel:main\n"


def wheel_with_command(**info: Any) -> WheelParts:
    """A wheel without label that holds the package's own modules."""
    modules = {f"pelton/{path.name}": path.read_bytes() for path in (ROOT / "python" / "pelton").glob("*.py")}
    files = {**modules, "pelton-0.1.0.dist-info/entry_points.txt": SCRIPTS.encode()}
    return unlabelled().but(files=files).with_info(profiles=profiles_of(ROOT), **info)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SCRIPTS, ENTRY),
        ("[console_scripts]\npelton = pelton.cli:main\n", ""),
        ("[console_scripts]\nmypelton-select = a:b\n", ""),
        ("", ""),
    ],
)
def test_entry_point(text: str, found: str) -> None:
    assert entry_point(text, "pelton") == found


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    path = folder / "pelton-select.py"
    wheel = make_wheel(folder, wheel_with_command())
    path.write_text(select_script(wheel, "pelton", "0.1.0", ENTRY, "3.11", "https://example.test/whl"))
    return path


def run(script: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """In isolated mode and without site-packages: nothing but the standard library."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("PELTON_", "PYTHON")) and "VISIBLE" not in k
    }
    return subprocess.run(
        [sys.executable, "-I", "-S", str(script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=script.parent,
        env={**clean, **environ},
    )


HOSTS = {
    "cuda-sm90": 'driver = "13.0"\n[[gpu]]\narch = "sm_90"\n',
    "cuda-sm80": 'driver = "13.0"\n[[gpu]]\narch = "sm_89"\n',
    "rocm-gfx90a": 'driver = ""\n[[gpu]]\narch = "gfx90a"\n',
    "rocm-gfx1100": 'driver = ""\n[[gpu]]\narch = "gfx1100"\n',
    "cpu-avx512": 'driver = ""\n[cpu]\nlevel = "x86-64-v4"\n',
    "cpu-avx2": 'driver = ""\n[cpu]\nlevel = "x86-64-v3"\n',
    "": 'driver = ""\n[cpu]\nlevel = "x86-64-v2"\n',
}


@pytest.mark.parametrize("profile", HOSTS)
def test_choice(profile: str, script: Path, tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(HOSTS[profile])
    done = run(script, "--json", PELTON_HOST=str(tmp_path / "machine.toml"))
    assert done.returncode == (0 if profile else 3), done.stderr
    answer = json.loads(done.stdout)
    assert answer["profile"] == (profile or None)
    if profile:
        assert answer["index_url"] == f"https://example.test/whl/p/{profile}/simple/"


def test_the_address_can_be_another(script: Path) -> None:
    told = run(script, "--json", PELTON_INDEX="https://mirror.test")
    assert json.loads(told.stdout)["index_url"].startswith("https://mirror.test/p/"), told.stderr
    assert run(script, "--jsn").returncode == 2


def test_an_old_python_is_told_so(script: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer.py"
    newer.write_text(script.read_text().replace("< (3, 11)", "< (99, 0)"))
    done = run(newer)
    assert done.returncode == 1
    assert "pelton-select needs Python 3.11 or newer" in done.stderr and "Traceback" not in done.stderr


def test_it_holds_what_it_needs_and_is_small(script: Path) -> None:
    """Runners hand it over as one argument of a process, which may have 128 KiB; a real build info takes more."""
    text = script.read_text()
    assert len(text) < 80_000
    data = text.partition('MODULES = """\\\n')[2].partition('"""')[0]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(data))) as archive:
        names = set(archive.namelist())
    needed = {
        "__init__.py",
        "select_wheel.py",
        "guard.py",
        "_gpus.py",
        "_ask_driver.py",
        "host.py",
        "_host_py.py",
        "_build_info.json",
    }
    assert {f"pelton/{name}" for name in needed} <= names
    assert "pelton/llm.py" not in names and "pelton/ops.py" not in names


def test_equal_wheels_make_equal_files(script: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, wheel_with_command())
    again = select_script(wheel, "pelton", "0.1.0", ENTRY, "3.11", "https://example.test/whl")
    assert again == script.read_text()
    with pytest.raises(BuildError, match="not a readable wheel"):
        select_script(tmp_path / "none.whl", "pelton", "0.1.0", ENTRY, "3.11", "")


def test_the_index_has_it(tmp_path: Path) -> None:
    pytest.importorskip("elftools", reason="the audit's libraries are not installed")
    pytest.importorskip("iced_x86", reason="the audit's libraries are not installed")
    site = tmp_path / "site"
    wheel = make_wheel(tmp_path / "dist", wheel_with_command())
    report = build_index([wheel], site, baseline="cpu-avx2", url="https://example.test/whl/")
    assert "pelton-select.py" in report.written
    made = (site / "pelton-select.py").read_text()
    assert "INDEX = 'https://example.test/whl'" in made
    assert "pipx run https://example.test/whl/pelton-select.py" in (site / "index.html").read_text()
    again = build_index([wheel], site, baseline="cpu-avx2", url="https://example.test/whl/")
    assert (again.written, again.removed) == ((), ())
    without = make_wheel(tmp_path / "without", unlabelled())
    later = build_index([without], site, baseline="cpu-avx2")
    assert "pelton-select.py" in later.removed
    assert "pelton-select" not in (site / "index.html").read_text()
