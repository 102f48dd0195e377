"""The version of a source tree: tags, archives, source distributions, dirty trees."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from pelton_build.project import ProjectSettings
from pelton_build.values import join_label
from pelton_build.version import (
    ARCHIVE_FILE,
    SDIST_FILE,
    SourceVersion,
    Tag,
    VersionError,
    source_version,
    version_from_archive,
    version_from_commit,
)

SETTINGS = ProjectSettings("0.1.0", ())
COMMIT = "1a2b3c4d5e6f708192a3b4c5d6e7f80912345678"
G = COMMIT[:10]


@pytest.mark.parametrize(
    ("tag", "distance", "dirty", "expected"),
    [
        ("v0.3.0", 0, False, "0.3.0"),
        ("v0.3.0", 4, False, f"0.3.1.dev4+g{G}"),
        ("v0.3.0", 0, True, f"0.3.1.dev0+g{G}.dirty"),
        ("v0.3.0", 4, True, f"0.3.1.dev4+g{G}.dirty"),
        ("v1.2", 0, False, "1.2.0"),
        ("v0.3.0rc1", 0, False, "0.3.0rc1"),
        ("v0.3.0rc1", 2, False, f"0.3.0rc2.dev2+g{G}"),
        (None, 7, False, f"0.1.0.dev7+g{G}"),
        (None, 7, True, f"0.1.0.dev7+g{G}.dirty"),
    ],
)
def test_version_of_a_commit(tag: str | None, distance: int, dirty: bool, expected: str) -> None:
    parsed = None if tag is None else Tag.parse(tag)
    assert version_from_commit(parsed, distance, COMMIT, dirty, "0.1.0") == expected


@pytest.mark.parametrize("name", ["v0.3", "0.3.0", "v0.3.0", "v10.20.30", "v1.0.0a1", "v1.0.0rc12"])
def test_tags_of_versions(name: str) -> None:
    tag = Tag.parse(name)
    assert tag is not None
    assert Version(str(tag)) == Version(name)


@pytest.mark.parametrize(
    "name", ["", "v", "v1", "v1.x", "v1.2.3-rc1", "release-1.2.3", "v1.2.3.4", "v1.2.3dev1", "nightly"]
)
def test_other_tags(name: str) -> None:
    assert Tag.parse(name) is None


@given(
    release=st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    stage=st.sampled_from(["", "a1", "b2", "rc3"]),
    distance=st.integers(0, 500),
    dirty=st.booleans(),
)
def test_versions_grow(release: tuple[int, int, int], stage: str, distance: int, dirty: bool) -> None:
    tag = Tag.parse("v" + ".".join(map(str, release)) + stage)
    assert tag is not None
    text = version_from_commit(tag, distance, COMMIT, dirty, "0.1.0")
    version = Version(text)
    assert str(version) == text, "not in normal form"
    assert version >= Version(str(tag))
    assert (version == Version(str(tag))) == (distance == 0 and not dirty)
    assert Version(version_from_commit(tag, distance + 1, COMMIT, dirty, "0.1.0")) > version
    labelled = join_label(text, "cpu.avx2")
    assert labelled.count("+") == 1
    assert Version(labelled).public == version.public
    assert (Version(labelled).local or "").startswith("cpu.avx2")


def archive(**entries: str) -> str:
    values = {"commit": COMMIT, "time": "1790000000", "describe": "", "refs": "", **entries}
    return "".join(f"{key}: {value}\n" for key, value in values.items())


@pytest.mark.parametrize(
    ("text", "version", "warned"),
    [
        (archive(describe="v0.3.0"), "0.3.0", False),
        (archive(describe="v0.3.0-5-g1a2b3c4"), f"0.3.1.dev5+g{G}", False),
        (archive(describe="v0.3.0-5-g1a2b"), f"0.3.1.dev5+g{G}", False),
        (
            archive(describe="%(describe:tags=true)", refs="HEAD -> main, tag: v0.3.0, tag: nightly"),
            "0.3.0",
            False,
        ),
        (archive(describe="%(describe:tags=true)", refs="tag: v0.3.0rc1, tag: v0.3.0"), "0.3.0", False),
        (archive(), f"0.1.0.dev0+g{G}", True),
        (archive(describe="v0.x", refs="HEAD"), f"0.1.0.dev0+g{G}", True),
    ],
)
def test_archives(text: str, version: str, warned: bool) -> None:
    found = version_from_archive(text, "0.1.0")
    assert found is not None
    assert (found.version, found.epoch, found.commit) == (version, 1790000000, COMMIT)
    assert bool(found.warnings) == warned
    assert all("PELTON_VERSION" in warning for warning in found.warnings)


def test_an_archive_file_that_was_not_filled_in() -> None:
    root = Path(__file__).resolve().parents[2]
    template = root / ARCHIVE_FILE
    if not template.is_file():
        template_text = "commit: $Format:%H$\ntime: $Format:%ct$\n"  # a source distribution has none
    else:
        template_text = template.read_text(encoding="utf-8")
    assert version_from_archive(template_text, "0.1.0") is None


class Repository:
    """A git repository in a folder, with the commands the tests need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main")
        (folder / "kernels").mkdir()
        self.commit("first")

    def git(self, *arguments: str) -> str:
        identity = [
            "-c",
            "user.name=T",
            "-c",
            "user.email=t@example.org",
            "-c",
            "commit.gpgsign=false",
            "-c",
            "tag.gpgsign=false",
        ]
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "GIT_AUTHOR_DATE": "2026-05-01T12:00:00Z",
            "GIT_COMMITTER_DATE": "2026-05-01T12:00:00Z",
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        done = subprocess.run(
            ["git", *identity, *arguments],
            cwd=self.folder,
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    def commit(self, text: str) -> str:
        (self.folder / "kernels" / "file").write_text(text, encoding="utf-8")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", text)
        return self.git("rev-parse", "HEAD")

    def version(self, **environ: str) -> SourceVersion:
        path = os.environ["PATH"]
        return source_version(self.folder, {"PATH": path, **environ}, SETTINGS)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_git_before_the_first_tag(repository: Repository) -> None:
    head = repository.commit("second")
    found = repository.version()
    assert found == SourceVersion(f"0.1.0.dev2+g{head[:10]}", 1777636800, head, "git")


def test_git_with_tags(repository: Repository) -> None:
    repository.git("tag", "v0.2.0")
    repository.commit("second")
    repository.git("tag", "-a", "-m", "x", "v0.3.0")
    repository.git("tag", "nightly")
    repository.git("tag", "v9-experiment")
    assert repository.version().version == "0.3.0"
    head = repository.commit("third")
    assert repository.version().version == f"0.3.1.dev1+g{head[:10]}"
    repository.git("tag", "v0.4.x")
    assert repository.version().version == f"0.3.1.dev1+g{head[:10]}", "a tag that is no version counts"


def test_the_highest_of_two_tags_on_one_commit(repository: Repository) -> None:
    for name in ("v0.3.0rc1", "v0.3.0", "v0.2.9"):
        repository.git("tag", name)
    assert repository.version().version == "0.3.0"


@pytest.mark.parametrize(
    ("path", "dirty"),
    [("kernels/file", True), ("kernels/new.cpp", True), ("notes.txt", False), ("a b/x", False)],
)
def test_which_changes_make_a_tree_dirty(repository: Repository, path: str, dirty: bool) -> None:
    repository.git("tag", "v0.3.0")
    file = repository.folder / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("changed", encoding="utf-8")
    version = repository.version().version
    assert version.endswith(".dirty") == dirty
    assert version == repository.version().version


def test_short_commits_of_a_users_configuration(repository: Repository) -> None:
    """Git shows as many digits as `core.abbrev` says, from four on."""
    repository.git("tag", "v0.3.0")
    head = repository.commit("second")
    repository.git("config", "core.abbrev", "4")
    assert repository.version().version == f"0.3.1.dev1+g{head[:10]}"


def test_a_damaged_index_is_not_taken_for_an_unchanged_tree(repository: Repository) -> None:
    repository.git("tag", "v0.3.0")
    (repository.folder / ".git" / "index").write_bytes(b"damaged")
    assert repository.version().version.endswith(".dirty")


@pytest.mark.parametrize("file", [SDIST_FILE, ARCHIVE_FILE])
def test_damaged_files_are_one_message(tmp_path: Path, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\xff")
    with pytest.raises(VersionError, match=f"{re.escape(file)}: damaged"):
        source_version(tmp_path, {}, SETTINGS)


def test_other_modification_times_are_no_change(repository: Repository) -> None:
    repository.git("tag", "v0.3.0")
    text = (repository.folder / "kernels" / "file").read_text(encoding="utf-8")
    (repository.folder / "kernels" / "file").write_text(text, encoding="utf-8")
    os.utime(repository.folder / "kernels" / "file", (1, 1))
    assert repository.version().version == "0.3.0"


def test_a_shallow_clone_warns(repository: Repository, tmp_path: Path) -> None:
    repository.git("tag", "v0.3.0")
    repository.commit("second")
    clone = tmp_path / "clone"
    repository.git("clone", "-q", "--depth", "1", "--no-tags", f"file://{repository.folder}", str(clone))
    path = os.environ["PATH"]
    found = source_version(clone, {"PATH": path}, SETTINGS)
    assert found.version.startswith("0.1.0.dev1+g")
    assert "shallow" in found.warnings[0]
    assert "PELTON_VERSION" in found.warnings[0]


def test_a_folder_inside_of_another_repository_does_not_take_its_tags(repository: Repository) -> None:
    repository.git("tag", "v7.0.0")
    inner = repository.folder / "third_party" / "pelton"
    inner.mkdir(parents=True)
    found = source_version(inner, {"PATH": os.environ["PATH"]}, SETTINGS)
    assert found.version == "0.1.0"
    assert "PELTON_VERSION" in found.warnings[0]


def test_variables_of_another_repository_do_not_count(repository: Repository, tmp_path: Path) -> None:
    other = Repository(tmp_path / "other")
    other.git("tag", "v7.0.0")
    repository.git("tag", "v0.3.0")
    assert (
        repository.version(GIT_DIR=str(other.folder / ".git"), GIT_WORK_TREE=str(other.folder)).version
        == "0.3.0"
    )


def test_without_a_git_program(repository: Repository) -> None:
    found = source_version(repository.folder, {"PATH": "/nonexistent"}, SETTINGS)
    assert found.version == "0.1.0"
    assert found.warnings


def test_a_repository_without_commits(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert source_version(tmp_path, {"PATH": os.environ["PATH"]}, SETTINGS).version == "0.1.0"


def test_git_archive(repository: Repository, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ARCHIVE_FILE).is_file():
        pytest.skip("a source distribution has no file for git archive")
    for name in (ARCHIVE_FILE, ".gitattributes"):
        (repository.folder / name).write_bytes((root / name).read_bytes())
    repository.commit("with the archive's file")
    repository.git("tag", "v0.3.0")
    out = tmp_path / "archive.tar"
    repository.git("archive", "--output", str(out), "v0.3.0")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "xf", str(out), "-C", str(unpacked)], check=True)
    found = source_version(unpacked, {"PATH": "/nonexistent"}, SETTINGS)
    assert (found.version, found.epoch) == ("0.3.0", 1777636800)
    assert found.commit == repository.git("rev-parse", "HEAD")


def test_a_source_distribution_says_exactly_its_version(repository: Repository) -> None:
    repository.git("tag", "v0.3.0")
    repository.commit("second")
    made = repository.version()
    file = repository.folder / SDIST_FILE
    file.parent.mkdir(parents=True)
    file.write_text(made.to_json(), encoding="utf-8")
    repository.git("tag", "v0.9.0")
    found = repository.version()
    assert (found.version, found.epoch, found.commit) == (made.version, made.epoch, made.commit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"version": "1.0", "epoch": "x", "commit": ""}),
        json.dumps({"version": "a b", "epoch": 1, "commit": ""}),
    ],
)
def test_a_damaged_source_distribution(tmp_path: Path, text: str) -> None:
    file = tmp_path / SDIST_FILE
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(VersionError, match=r"_source\.json"):
        source_version(tmp_path, {}, SETTINGS)


def test_the_variable_wins(repository: Repository) -> None:
    repository.git("tag", "v0.3.0")
    found = repository.version(PELTON_VERSION=" 1.5.0rc2 ")
    assert (found.version, found.origin, found.epoch) == ("1.5.0rc2", "PELTON_VERSION", 1777636800)


@pytest.mark.parametrize("text", ["v1.0", "1.0-rc1", "abc", "1.0+A", "1.0+a+b", "1.0 dev"])
def test_a_bad_variable(tmp_path: Path, text: str) -> None:
    with pytest.raises(VersionError, match="PELTON_VERSION"):
        source_version(tmp_path, {"PELTON_VERSION": text}, SETTINGS)
