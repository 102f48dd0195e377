"""Real builds of a small copy of the project: same bytes anywhere, interruptions, source distributions, rebuilds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_project import MISSING, PROFILE, Project, digest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("plain") / "project")


@pytest.fixture(scope="module")
def wheel(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project.wheel(tmp_path_factory.mktemp("wheel"))


def test_name_and_content(wheel: Path) -> None:
    assert wheel.name == "pelton-0.3.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl"
    assert wheel.stat().st_size < 5 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = json.loads(archive.read("pelton/_build_info.json"))
        modes = {member.external_attr >> 16 & 0o777 for member in archive.infolist()}
    assert {"pelton/libpelton.so", "pelton/_built.py", "pelton/__init__.py"} <= set(names)
    assert not [name for name in names if "pelton_build" in name or "test" in name or "_host." in name]
    assert modes <= {0o644, 0o755}
    assert info["version"] == "0.3.0+cpu.avx2"
    assert info["state"] == "wheel"


def test_without_label_only_what_says_the_version_differs(
    project: Project, wheel: Path, tmp_path: Path
) -> None:
    """One configuration after the other in one folder, as `nox -s variants` does it: nothing is compiled twice."""
    settings = {**PROFILE, "label": "off", "cmake.fresh": "false"}
    made = project.wheel(tmp_path, settings)
    assert made.name == "pelton-0.3.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(made) as plain, zipfile.ZipFile(wheel) as labelled:
        info = json.loads(plain.read("pelton/_build_info.json"))
        assert (info["version"], info["label"]) == ("0.3.0", "")
        assert "Version: 0.3.0\n" in plain.read("pelton-0.3.0.dist-info/METADATA").decode()
        names = {name for name in plain.namelist() if ".dist-info/" not in name}
        assert names == {name for name in labelled.namelist() if ".dist-info/" not in name}
        assert {n for n in names if plain.read(n) != labelled.read(n)} == {"pelton/_build_info.json"}


def test_the_glibc_floor_is_real(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract("pelton/libpelton.so", tmp_path))
    symbols = subprocess.run(
        ["objdump", "-T", str(library)], check=True, capture_output=True, text=True
    ).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", symbols)}
    assert versions
    assert max(versions) <= (2, 28)
    assert "GLIBCXX" not in symbols
    header = subprocess.run(
        ["readelf", "-d", str(library)], check=True, capture_output=True, text=True
    ).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", header))
    allowed = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1", "libtorch_cpu.so"}  # fmt: skip
    assert needed <= allowed
    assert "libtorch_cpu.so" in needed
    assert "RPATH" not in header
    assert "RUNPATH" not in header


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def test_odd_surroundings_make_the_same_bytes(project: Project, wheel: Path, tmp_path: Path) -> None:
    with umask(0o077):
        odd = project.copy(tmp_path / "Größe & co's (1)" / "src")
        temporary, home = odd.folder / "a b", tmp_path / "other home"
        temporary.mkdir()
        home.mkdir()
        environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "TMPDIR": str(temporary), "HOME": str(home)}
        made = odd.wheel(tmp_path / "out 1", **environ)
    assert digest(made) == digest(wheel)
    assert made.stat().st_mode & 0o777 == 0o644


def test_a_symlinked_checkout_makes_the_same_bytes(project: Project, wheel: Path, tmp_path: Path) -> None:
    real = project.copy(tmp_path / "real-folder")
    link = tmp_path / "link-to-it"
    link.symlink_to(real.folder)
    real.folder = link
    with umask(0o000):
        made = real.wheel(tmp_path / "out", PWD=str(link))
    assert digest(made) == digest(wheel)
    with zipfile.ZipFile(made) as archive:
        for name in archive.namelist():
            content = archive.read(name)
            for private in (
                b"real-folder",
                b"link-to-it",
                str(tmp_path).encode(),
                str(Path(sys.prefix)).encode(),
            ):
                assert private not in content, name


def test_a_dirty_tree_makes_the_same_bytes_whenever_it_is_built(project: Project, tmp_path: Path) -> None:
    dirty = project.copy(tmp_path / "dirty")
    with (dirty.folder / "README.md").open("a", encoding="utf-8") as stream:
        stream.write("x\n")
    first = dirty.wheel(tmp_path / "o1")
    for path in dirty.folder.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            os.utime(path, (1_900_000_000, 1_900_000_000))
    second = dirty.wheel(tmp_path / "o2")
    assert first.name == second.name
    assert digest(first) == digest(second)
    assert re.fullmatch(r"pelton-0\.3\.1\.dev0\+cpu\.avx2\.g[0-9a-f]{10}\.dirty-.*", first.name)


def test_through_the_source_distribution(project: Project, wheel: Path, tmp_path: Path) -> None:
    with umask(0o077):
        name = project.build("build_sdist", str(tmp_path), {})
        again = project.build("build_sdist", str(tmp_path / "again"), {})
    assert name == again == "pelton-0.3.0.tar.gz"
    assert digest(tmp_path / name) == digest(tmp_path / "again" / again)
    with tarfile.open(tmp_path / name) as archive:
        assert {member.mode for member in archive.getmembers() if member.isfile()} <= {0o644, 0o755}
        assert {member.uid for member in archive.getmembers()} == {0}
        archive.extractall(tmp_path / "unpacked")  # our own archive; Python before 3.11.4 knows no filter
    unpacked = object.__new__(Project)
    unpacked.folder = tmp_path / "unpacked" / "pelton-0.3.0"
    for needed in (
        "noxfile.py",
        "README.md",
        "LICENSE",
        "cmake/PeltonPlan.cmake",
        "kernels/kernels.toml",
        "build_profiles/cpu-avx2.toml",
        "python/pelton_build/backend.py",
    ):
        assert (unpacked.folder / needed).is_file(), needed
    made = unpacked.wheel(tmp_path / "out")
    assert made.name == wheel.name
    assert digest(made) == digest(wheel)


def test_the_build_after_an_interrupted_one(project: Project, wheel: Path, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "interrupted")
    folder = copy.folder / "build" / "cpu-avx2" / "wheel"
    out = tmp_path / "out"
    process = copy.start("build_wheel", str(out), PROFILE)
    deadline = time.monotonic() + 300
    while not list(folder.rglob("*.o")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(out.glob("*.whl")) == []
    for path in [
        *folder.rglob("*.o"),
        folder / "CMakeCache.txt",
        folder / "pelton_plan.cmake",
        folder / ".ninja_deps",
    ]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if path.exists() else b"")
    assert digest(copy.wheel(out)) == digest(wheel)


def test_a_full_device(project: Project, tmp_path: Path) -> None:
    """Without a small device at hand, the limit is what is raised."""
    copy = project.copy(tmp_path / "full")
    file = copy.folder / "python" / "pelton_build" / "backend.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('Size.parse("64 MiB")', 'Size.parse("900 TiB")'), encoding="utf-8")
    process = copy.start("build_wheel", str(tmp_path / "out"), PROFILE)
    said, _ = process.communicate()
    assert process.returncode == 1
    assert [line for line in said.splitlines() if line.startswith("error: no space left")]
    assert "Traceback" not in said
    assert list(tmp_path.glob("out/*")) == []


class Editable:
    """An editable installation of a project in a folder of its own."""

    def __init__(self, project: Project, folder: Path) -> None:
        self.project, self.site = project, folder
        name = project.build(
            "build_editable", str(folder / "wheels"), {**PROFILE, "editable.rebuild": "true"}
        )
        with zipfile.ZipFile(folder / "wheels" / name) as archive:
            archive.extractall(folder)

    def run(self, program: str, **environ: str) -> subprocess.CompletedProcess[str]:
        preface = (
            "import site, sys\n"
            "sys.modules.pop('_editable_skbc_pelton', None)  # of an installation in this environment\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]\n"
            f"site.addsitedir({str(self.site)!r})\n"
        )
        tools = str(Path(sys.executable).parent)
        return subprocess.run(
            [sys.executable, "-c", preface + program],
            cwd=self.site,
            env={
                **os.environ,
                "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": "",
                **environ,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def library(self, **environ: str) -> str:
        """The library's digest after an import."""
        done = self.run(
            "import pelton\nfrom pelton import build_info\nprint(build_info.find_file('libpelton.so'))",
            **environ,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 1, "the rebuild wrote into the program's output"
        return digest(Path(lines[0]))


def test_an_editable_installation_follows_its_sources(project: Project, tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "editable")
    installed = Editable(copy, tmp_path / "site")
    before = installed.library()
    assert installed.library() == before

    kernel = copy.folder / "kernels" / "norm" / "cpu.cpp"
    with kernel.open("a", encoding="utf-8") as stream:
        stream.write(
            'extern "C" __attribute__((visibility("default"))) int pelton_test_mark() { return 7; }\n'
        )
    touched = installed.library(DESTDIR=str(tmp_path / "elsewhere"), LD_RUN_PATH="/elsewhere")
    assert not (tmp_path / "elsewhere").exists()
    assert touched != before, "a kernel was changed"

    profile = copy.folder / "build_profiles" / "cpu-avx2.toml"
    original = profile.read_text(encoding="utf-8")
    wider = original.replace("x86-64-v3", "x86-64-v4").replace('["v3"]', '["v4"]')
    profile.write_text(wider, encoding="utf-8")
    wide = installed.library()
    assert wide != touched, "the profile was changed"
    profile.write_text(original, encoding="utf-8")
    assert installed.library() == touched

    table = copy.folder / "kernels" / "kernels.toml"
    table.write_text(
        table.read_text(encoding="utf-8")
        .replace('torch = "2.10"', 'torch = "2.10"\ncxx-standard = 23')
        .replace("cxx-standard = 20\n", ""),
        encoding="utf-8",
    )
    done = installed.run("import pelton; print(pelton.build_info.plan['cxx_standard'])")
    assert done.stdout == "23\n", done.stderr

    profile.write_text(original.replace("[target]", "[taregt]"), encoding="utf-8")
    done = installed.run("import pelton")
    assert done.returncode == 1
    assert "LibraryError: this editable installation of pelton could not be rebuilt" in done.stderr
    assert "taregt" in done.stdout + done.stderr
