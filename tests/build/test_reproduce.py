"""A second build elsewhere: what differs is named, and who builds is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import small_project
from pelton_build import reproduce as reproducing
from pelton_build.reproduce import (
    Builder,
    ReproduceError,
    build_elsewhere,
    copy_tree,
    differences,
    other_user,
    reproduce,
    settings_of,
)
from pelton_build.wheel_info import WheelError


def archive(path: Path, members: dict[str, bytes], **attributes: object) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, (2026, 5, 1, 12, 0, 0))
            for key, value in attributes.items():
                setattr(info, key, value)
            made.writestr(info, content)
    return path


MEMBERS = {"p/a.py": b"a = 1\n", "p/lib.so": b"\x7fELF" + bytes(100), "p/b.txt": b"b"}


@pytest.mark.parametrize(
    ("members", "attributes", "said"),
    [
        (MEMBERS, {}, []),
        ({**MEMBERS, "p/a.py": b"a = 2\n"}, {}, ["p/a.py: differs from byte 4 on (6 bytes): b'a = 1"]),
        ({**MEMBERS, "p/a.py": b"a = 1\nb"}, {}, ["p/a.py: differs from byte 6 on (6 and 7 bytes)"]),
        ({**MEMBERS, "p/c": b""}, {}, ["p/c: only in the second"]),
        ({k: v for k, v in MEMBERS.items() if k != "p/b.txt"}, {}, ["p/b.txt: only in the first"]),
        (dict(reversed(MEMBERS.items())), {}, ["the members stand in another order"]),
        (MEMBERS, {"external_attr": 0o644 << 16}, [f"{name}: external_attr" for name in MEMBERS]),
        (MEMBERS, {"date_time": (2026, 5, 2, 0, 0, 0)}, [f"{name}: date_time" for name in MEMBERS]),
        (MEMBERS, {"compress_type": zipfile.ZIP_DEFLATED}, [f"{name}: compress_type" for name in MEMBERS]),
    ],
)
def test_the_members_that_differ_are_named(
    tmp_path: Path, members: dict[str, bytes], attributes: dict[str, object], said: list[str]
) -> None:
    first = archive(tmp_path / "first.whl", MEMBERS)
    second = archive(tmp_path / "second.whl", members, **attributes)
    found = differences(first, second)
    assert len(found) == len(said)
    for line, text in zip(found, said, strict=True):
        assert line.startswith(text)


def test_bytes_around_the_members(tmp_path: Path) -> None:
    first, second = archive(tmp_path / "first.whl", MEMBERS), archive(tmp_path / "second.whl", MEMBERS)
    with zipfile.ZipFile(second, "a") as made:
        made.comment = b"built by me"
    assert differences(first, second) == ("the members are the same, the archives around them are not",)


def test_the_section_of_a_binary_is_named(tmp_path: Path) -> None:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="pyelftools is not installed")
    binary = Path(sys.executable).resolve()
    content = bytearray(binary.read_bytes())
    with binary.open("rb") as file:
        section = elffile.ELFFile(file).get_section_by_name(".rodata")
        at = section["sh_offset"] + 1
    first = archive(tmp_path / "first.whl", {"p/x.so": bytes(content)})
    content[at] ^= 1
    (said,) = differences(first, archive(tmp_path / "second.whl", {"p/x.so": bytes(content)}))
    assert said.startswith(f"p/x.so: differs from byte {at} on, in section .rodata ({len(content)} bytes)")


def test_no_wheel_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"PK")
    with pytest.raises(WheelError, match=r"x\.whl: not a readable wheel \("):
        settings_of(path)
    with pytest.raises(WheelError, match=r"x\.whl: not a readable wheel \(No such file"):
        settings_of(tmp_path / "none" / "x.whl")
    info = "p/_build_info.json"
    for content, said in {
        "": "not a readable wheel",
        "[]": "has no profile",
        '{"profile": "p", "label": 3}': "has no label",
        '{"profile": "p", "label": ""}': "has no plan",
    }.items():
        with pytest.raises(WheelError, match=said):
            settings_of(archive(path, {**MEMBERS, info: content.encode()}))
    good = b'{"profile": "p", "label": "", "plan": {}}'
    assert settings_of(archive(path, {**MEMBERS, info: good})) == {"profile": "p", "label": "off"}
    with pytest.raises(WheelError, match=r"has the build infos p/_build_info\.json, q/_build_info\.json"):
        settings_of(archive(path, {**MEMBERS, info: good, "q/_build_info.json": good}))
    with pytest.raises(WheelError, match=r"has no _build_info\.json; name a wheel that nox -s"):
        settings_of(archive(path, {**MEMBERS, "a/b/_build_info.json": good}))


def test_only_root_becomes_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert other_user(sys.executable) == Builder((), "this user, since only root can become another one")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_becomes_somebody_who_can_run_this_python(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="build is not installed")
    builder = other_user(sys.executable)
    if not builder.command:
        pytest.skip(builder.words)
    program = (sys.executable, "-c", "import os; print(os.getuid(), os.access('/root', os.W_OK))")
    said = subprocess.run([*builder.command, *program], check=True, capture_output=True, text=True).stdout
    assert said.split() == ["65534", "False"]
    assert builder.words.startswith("user 65534")


def test_a_user_who_cannot_run_this_python_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/setpriv")
    missing = str(tmp_path / "python")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 126))
    assert other_user(missing) == Builder((), f"this user, since user 65534 cannot run {missing}")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no setpriv" in other_user(missing).words


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    folder = tmp_path / "tree"
    folder.mkdir()

    def git(*arguments: str) -> str:
        options = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *options, *arguments], cwd=folder, check=True, capture_output=True, text=True
        )
        return done.stdout

    git("init", "-q")
    return git


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_copy_is_the_work_tree_as_it_is(tmp_path: Path, repository: Callable[..., str]) -> None:
    tree, copy = tmp_path / "tree", tmp_path / "copy of it"
    for name in ("kept", "changed", "deleted", "ünïcode name"):
        (tree / name).write_text(name)
    (tree / ".gitignore").write_text("ignored\n")
    repository("add", "-A")
    repository("commit", "-q", "-m", "all")
    repository("tag", "v1.0.0")
    (tree / "changed").write_text("anew")
    (tree / "deleted").unlink()
    (tree / "new folder").mkdir()
    (tree / "new folder" / "new").write_text("new")
    (tree / "ignored").write_text("")
    copy_tree(tree, copy)
    there = {
        str(p.relative_to(copy)): p.read_text()
        for p in copy.rglob("*")
        if p.is_file() and ".git" not in p.parts
    }
    assert there == {
        "kept": "kept",
        "changed": "anew",
        "ünïcode name": "ünïcode name",
        "new folder/new": "new",
        ".gitignore": "ignored\n",
    }
    status = subprocess.run(
        ["git", "-C", str(copy), "describe", "--tags", "--dirty"], check=True, capture_output=True, text=True
    )
    assert status.stdout == "v1.0.0-dirty\n"


def test_a_folder_without_repository(tmp_path: Path) -> None:
    with pytest.raises(ReproduceError, match="no git repository"):
        copy_tree(tmp_path, tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.skipif(bool(small_project.MISSING), reason=f"needs {', '.join(small_project.MISSING)}")
def test_a_wheel_is_made_again_and_a_forged_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("build", reason="build is not installed")
    project = small_project.Project(tmp_path / "project")
    wheel = project.wheel(tmp_path / "out")
    for name in [*os.environ]:
        if name.startswith(small_project.SWITCHES):
            monkeypatch.delenv(name)
    kept: list[tuple[Path, Builder]] = []

    def once(root: Path, settings: Mapping[str, str], place: Path) -> tuple[Path, Builder]:
        """The second build, kept for the next comparison."""
        if not kept:
            made, builder = build_elsewhere(root, settings, place)
            kept.append((Path(shutil.copy(made, tmp_path)), builder))
        return kept[0]

    monkeypatch.setattr(reproducing, "build_elsewhere", once)
    assert reproduce(project.folder, wheel) == kept[0][1].words
    with zipfile.ZipFile(wheel) as made:
        members = {name: made.read(name) for name in made.namelist()}
    forged = tmp_path / "forged" / wheel.name
    forged.parent.mkdir()
    archive(forged, {**members, "pelton/__init__.py": b"import os\n"})
    with pytest.raises(ReproduceError, match=r"has other bytes:\n(  .*\n)*  pelton/__init__\.py: differs"):
        reproduce(project.folder, forged)
    older = wheel.rename(tmp_path / wheel.name.replace("0.3.0", "0.2.0"))
    with pytest.raises(ReproduceError, match=r"these sources make pelton-0\.3\.0"):
        reproduce(project.folder, older)
