"""What stops a release before anything is published, how it goes on after an interruption, how its wheels are told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import plan_cases
import small_project
from pelton_build.__main__ import main
from pelton_build.errors import BuildError
from pelton_build.plan import Feature, Plan
from pelton_build.release import (
    Facts,
    Options,
    ReleaseError,
    Row,
    as_json,
    contradictions,
    items_of,
    make_release,
    notes,
    published,
    sha256,
    table,
    tree_problems,
    unbuildable,
)
from release_bench import Bench, small_wheel

ROW = Row(
    "cpu-avx2", "p-1.0+cpu.avx2-py3-none-any.whl", 1_234_567, "a" * 64, ("x86-64-v3",), 61.4, "computes"
)


@pytest.mark.parametrize(
    ("version", "tag", "tagged", "said"),
    [
        ("0.3.0", "v0.3.0", True, []),
        ("0.3.0rc1", "v0.3.0rc1", True, []),
        ("0.3.0", "v0.3", True, []),  # one version in two spellings
        ("0.3.1.dev4+g1a2b3c4d5e", None, False, []),  # a rehearsal
        ("0.3.1.dev4+g1a2b3c4d5e", None, True, ["no tag", "0.3.1.dev4", "--dry-run"]),
        ("0.3.0", None, True, ["no tag was named", "--tag v0.3.0"]),
        ("0.3.1.dev4+g1a2b3c4d5e", "v0.3.0", True, ["v0.3.0", "0.3.1.dev4", "check out"]),
        ("0.3.1.dev4+g1a2b3c4d5e", "v0.3.0", False, ["v0.3.0", "0.3.1.dev4"]),
        ("0.3.1.dev4+g1a2b3c4d5e.dirty", None, False, ["no commit holds", ".dirty", "git status"]),
        ("0.3.1.dev4+g1a2b3c4d5e.dirty", "v0.3.0", True, ["no commit holds", "v0.3.0"]),
        ("0.3.0", "0.3.0", True, ["'0.3.0'", "v0.3.0"]),
        ("0.3.0", "nightly", True, ["'nightly'", "v0.3.0"]),
        ("0.3.0", "", True, ["''"]),
    ],
)
def test_the_tree_is_the_tag(version: str, tag: str | None, tagged: bool, said: list[str]) -> None:
    problems = tree_problems(version, tag, tagged=tagged)
    assert bool(problems) == bool(said)
    for text in said:
        assert text in "; ".join(problems)


def test_every_profile_has_a_plan_or_a_reason(tmp_path: Path) -> None:
    tree = plan_cases.copy_tree(tmp_path / "tree")
    (tree / "build_profiles" / "broken.toml").write_text("summary = 3\n", encoding="utf-8")
    items = items_of(tree)
    plans = {item.title: item.plan for item in items}
    profiles = {path.stem for path in (tree / "build_profiles").glob("*.toml")}
    assert set(plans) == {*profiles, "cpu-avx2 without label"}
    assert (items[-1].title, items[-1].place) == ("cpu-avx2 without label", "simple")
    assert isinstance(items[-1].plan, Plan) and items[-1].plan.label == ""
    assert isinstance(plans["cpu-avx2"], Plan) and plans["cpu-avx2"].label == "cpu.avx2"
    reasons = unbuildable(plans)
    assert "build_profiles/broken.toml" in reasons["broken"]
    assert "summary" in reasons["broken"]
    able = replace(plans["cpu-avx2"], problems=())
    unable = replace(able, problems=("no g++", "no torch"))
    assert unbuildable({"a": able, "b": unable}) == {"b": "no g++; no torch"}
    feature = Feature("awq", not able.features[0].enabled, "PELTON_ENABLE_AWQ", changed=True)
    switched = unbuildable({"a": replace(able, features=(feature,))})["a"]
    assert "awq (PELTON_ENABLE_AWQ)" in switched


def index_page(site: Path, place: str, files: dict[str, str]) -> None:
    page = site / place / "p" / "index.json"
    page.parent.mkdir(parents=True)
    page.write_text(
        json.dumps(
            {"files": [{"filename": name, "hashes": {"sha256": digest}} for name, digest in files.items()]}
        )
    )


def test_a_published_file_never_changes(tmp_path: Path) -> None:
    assert published(tmp_path / "none") == {}
    index_page(tmp_path, "p/cpu-avx2/simple", {ROW.file: "a" * 64, "old.whl": "c" * 64})
    index_page(tmp_path, "simple", {"other.whl": "d" * 64})
    held = published(tmp_path)
    assert held == {ROW.file: "a" * 64, "old.whl": "c" * 64, "other.whl": "d" * 64}
    assert contradictions([(ROW.file, "a" * 64)], held) == ()
    (said,) = contradictions([(ROW.file, "b" * 64), ("new.whl", "a" * 64)], held)
    assert said.startswith(ROW.file)
    assert "aaaa" in said
    assert "bbbb" in said
    assert "raise the version" in said


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    index_page(tmp_path, "simple", {})
    page = tmp_path / "simple" / "p" / "index.json"
    for text in ("", "{}", "[]", '{"files": [{}]}', '{"files": 3}'):
        page.write_text(text)
        with pytest.raises(ReleaseError, match=r"simple/p/index\.json"):
            published(tmp_path)


def test_the_wheels_are_told() -> None:
    other = replace(
        ROW, profile="cuda-sm90", archs=("sm_90a",), seconds=None, tried="refuses: no | GPU\nhere"
    )
    left_out = {"rocm-gfx90a": "no clang"}
    text = table([ROW, other], left_out)
    for part in (ROW.file, "1.2 MB", "a" * 64, "61 s", "was whole", "x86-64-v3", "left out   no clang"):
        assert part in text
    markdown = notes("1.0", [ROW, other], left_out)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "- `rocm-gfx90a` was left out: no clang" in markdown
    assert json.loads(as_json([ROW]))[0]["sha256"] == "a" * 64


def test_facts_survive_interruptions_and_damage(tmp_path: Path) -> None:
    facts = Facts(tmp_path / "deep" / "facts.json")
    assert facts.seconds("a") is None
    facts.add("a", seconds=12.3)
    facts.add("b", seconds=5)
    facts.add("a", rebuilt_by="nobody")
    assert (facts.seconds("a"), facts.seconds("b"), facts.seconds("c")) == (12.3, 5.0, None)
    assert (facts.rebuilt_by("a"), facts.rebuilt_by("b")) == ("nobody", None)
    for text in ("{", "[]", "3", '{"a": 3}'):
        facts.path.write_text(text)
        assert (facts.seconds("a"), facts.rebuilt_by("a")) == (None, None)
    facts.add("c", seconds=1)
    assert facts.seconds("c") == 1.0


def git(tree: Path, *arguments: str) -> None:
    options = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *options, *arguments], cwd=tree, check=True, capture_output=True)


def commit(tree: Path) -> None:
    """Everything in a repository, at a version."""
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all"), ("tag", "v0.3.0")):
        git(tree, *arguments)


def commit_again(tree: Path) -> None:
    """The same version of changed sources."""
    for arguments in (
        ("add", "python", "build_profiles"),
        ("commit", "-q", "-m", "more"),
        ("tag", "-f", "v0.3.0"),
    ):
        git(tree, *arguments)


def test_the_command_prints_the_version_or_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = plan_cases.copy_tree(tmp_path / "tree")

    def said(*arguments: str) -> str:
        status = main(["release", "--root", str(tree), *arguments])
        printed = capsys.readouterr()
        assert bool(printed.err) == bool(status), printed
        return printed.err or printed.out

    assert "is no git clone, so nothing shows" in said("--tag", "v0.3.0")
    assert "is no git clone" in said("--dry-run")
    commit(tree)
    assert said("--tag", "v0.3.0") == said("--dry-run") == "0.3.0\n"
    assert "v0.3.1" in said("--tag", "v0.3.1")
    assert "this commit has no tag 'v0.3' (it has v0.3.0)" in said("--tag", "v0.3")
    assert "--tag v0.3.0" in said()
    with monkeypatch.context() as patch:
        patch.setenv("PELTON_VERSION", "7.7.7")
        assert "PELTON_VERSION is set ('7.7.7')" in said("--tag", "v7.7.7")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert "git does not tell the commit" in said("--tag", "v0.3.0")
    for option in ("assume-unchanged", "skip-worktree"):
        git(tree, "update-index", f"--{option}", "noxfile.py")
        assert "git is told not to look at noxfile.py; undo it" in said("--tag", "v0.3.0")
        git(tree, "update-index", f"--no-{option}", "noxfile.py")
    (tree / "noxfile.py").write_text("changed")
    assert "no commit holds" in said("--dry-run")
    assert main(["release", "--root", str(tmp_path / "none")]) == 1
    assert "no project is there" in capsys.readouterr().err


# --- all of it, with a workshop that compiles nothing ---------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with two profiles that every machine with a compiler can build, at a version."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    pytest.importorskip("elftools", reason="pyelftools is not installed")
    pytest.importorskip("iced_x86", reason="iced-x86 is not installed")
    for name in [*os.environ]:
        if name.startswith(small_project.SWITCHES):
            monkeypatch.delenv(name)
    tree = plan_cases.copy_tree(tmp_path / "tree")
    for profile in (tree / "build_profiles").glob("*.toml"):
        if not profile.stem.startswith("cpu-"):
            profile.unlink()
    (tree / "CMakeLists.txt").touch()
    commit(tree)
    return tree


def state(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


TITLES = ["cpu-avx2", "cpu-avx512", "cpu-avx2 without label"]
REHEARSAL = Options(Path("nowhere"), dry_run=True)


def test_a_release_is_made_in_order_and_kept(tree: Path) -> None:
    first = Bench(tree)
    work = make_release(tree, Options(tree / "site", tag="v0.3.0"), first)
    assert first.done == [*(f"build {title}" for title in TITLES), "index", f"rebuild {TITLES[-1]}"]
    rows = json.loads((work / "wheels.json").read_text())
    assert [row["profile"] for row in rows] == TITLES
    assert [row["file"].partition("-py3")[0] for row in rows] == [
        "pelton-0.3.0+cpu.avx2",
        "pelton-0.3.0+cpu.avx512",
        "pelton-0.3.0",
    ]
    text = (work / "notes.md").read_text()
    assert all(row["sha256"] in text for row in rows)
    assert "built a second time elsewhere, by somebody else: the same bytes" in text
    assert "Source distribution: `pelton.tar.gz`" in text
    variants = [path.name for path in tree.glob("dist/simple/*-cpu_avx*.whl")]
    assert len(variants) == 2 and all(name in text for name in variants)
    assert all(list((work / "site").glob(f"wheels/*/{name}")) for name in variants)
    second = Bench(tree)
    make_release(tree, Options(tree / "site", tag="v0.3.0"), second)
    assert second.done == ["index"]
    assert (work / "notes.md").read_text() == text
    (tree / "python" / "pelton_build" / "new.py").touch()  # other sources: nothing of the old wheels is taken
    commit_again(tree)
    third = Bench(tree)
    make_release(tree, Options(tree / "elsewhere", tag="v0.3.0"), third)
    assert third.done == first.done


def test_a_release_that_was_killed_goes_on_where_it_was(tree: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), str(plan_cases.ROOT / "python")])
    process = subprocess.Popen(
        [sys.executable, "-m", "release_bench", str(tree)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tree / "begun").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (first,) = tree.glob("dist/*/*.whl")
    stamp = first.stat().st_mtime_ns
    bench = Bench(tree)
    make_release(tree, REHEARSAL, bench)
    assert bench.done[:2] == ["build cpu-avx512", "build cpu-avx2 without label"]
    assert first.stat().st_mtime_ns == stamp
    assert len([*tree.glob("dist/cpu-*/*.whl")]) == 2


@pytest.mark.parametrize("damage", ["half", "zeros in a member"])
def test_a_damaged_wheel_is_built_again(tree: Path, damage: str) -> None:
    make_release(tree, REHEARSAL, Bench(tree))
    (wheel,) = tree.glob("dist/cpu-avx512/*.whl")
    whole = wheel.read_bytes()
    if damage == "half":
        wheel.write_bytes(whole[: len(whole) // 2])
    else:
        with zipfile.ZipFile(wheel) as archive:
            member = next(m for m in archive.infolist() if m.filename.endswith(".so") or m.file_size > 100)
        start = member.header_offset + 30 + len(member.filename)
        count = min(16, member.compress_size)
        wheel.write_bytes(whole[:start] + bytes(count) + whole[start + count :])
    bench = Bench(tree)
    make_release(tree, REHEARSAL, bench)
    assert bench.done == ["build cpu-avx512", "index"]
    assert wheel.read_bytes() == whole


def refused(tree: Path, bench: Bench, options: Options = REHEARSAL) -> str:
    """Why the release stopped; neither index nor notes have changed."""
    work = tree / "build" / "release"
    before = state(work / "site"), state(options.index), sorted(work.glob("notes.md"))
    with pytest.raises(BuildError) as caught:
        make_release(tree, options, bench)
    assert (state(work / "site"), state(options.index), sorted(work.glob("notes.md"))) == before
    return str(caught.value)


def test_a_wheel_over_its_budget_stops_the_release(tree: Path) -> None:
    bench = Bench(tree, size_budget=1000)
    said = refused(tree, bench)
    assert "1000 bytes" in said and "pelton-0.3.0+cpu.avx2-" in said
    assert bench.done == ["build cpu-avx2"]
    assert [*tree.glob("dist/*/*.whl")] == []


def test_an_index_that_holds_other_bytes_stops_the_release(tree: Path) -> None:
    work = make_release(tree, REHEARSAL, Bench(tree))
    site = tree / "published"
    shutil.copytree(work / "site", site)
    (tree / "python" / "pelton_build" / "new.py").touch()
    commit_again(tree)
    bench = Bench(tree)
    said = refused(tree, bench, Options(site, dry_run=True))
    assert said.count("raise the version") == 3
    plain = tree / "dist" / "simple" / "pelton-0.3.0-py3-none-manylinux_2_28_x86_64.whl"
    assert "pelton-0.3.0+cpu.avx2-" in said and sha256(plain)[:16] in said
    assert "index" not in bench.done


def test_a_profile_that_cannot_be_built_stops_the_release_or_is_left_out(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(plan_cases.ROOT / "build_profiles" / "cuda-sm90.toml", tree / "build_profiles")
    commit_again(tree)
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    bench = Bench(tree)
    said = refused(tree, bench)
    assert "cuda-sm90: CUDA_HOME=/nonexistent" in said and "--skip-unbuildable" in said
    assert bench.done == []
    work = make_release(tree, replace(REHEARSAL, skip_unbuildable=True), bench)
    assert [row["profile"] for row in json.loads((work / "wheels.json").read_text())] == TITLES
    assert "- `cuda-sm90` was left out: CUDA_HOME=/nonexistent" in (work / "notes.md").read_text()


def test_a_step_that_fails_leaves_no_notes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ReleaseError("this step failed")

    for step in ("make_variants", "make_sdist", "make_index", "try_wheels", "rebuild"):
        bench = Bench(tree)
        with monkeypatch.context() as patch:
            patch.setattr(bench, step, fails)
            with pytest.raises(ReleaseError, match="this step failed"):
                make_release(tree, REHEARSAL, bench)
        assert not (tree / "build" / "release" / "notes.md").exists()
        assert bool([done for done in bench.done if done.startswith("build")]) == (step == "make_variants")


# --- the command as people call it ----------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> small_project.Project:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    pytest.importorskip("nox", reason="nox is not installed")
    for name in [*os.environ]:
        if name.startswith(small_project.SWITCHES):
            monkeypatch.delenv(name)
    return small_project.Project(tmp_path / "project")


def released(project: small_project.Project, *arguments: str, **environ: str) -> str:
    """What a release that is refused says. Nothing was installed, built or made."""
    ignored = ("PYTHONPATH", "NOXSESSION")
    clean = {name: value for name, value in os.environ.items() if name not in ignored}
    done = subprocess.run(
        [sys.executable, "-m", "nox", "--non-interactive", "-s", "release", "--", *arguments],
        cwd=project.folder, env={**clean, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "Traceback" not in said
    assert "pip install" not in said
    assert not (project.folder / "build").exists()
    return said


def change(project: small_project.Project) -> None:
    (project.folder / "README.md").write_text("changed")


def fake_wheels(project: small_project.Project) -> None:
    """Wheels that look fresh, so that nothing has to be built; the published index has other ones."""
    site: dict[str, str] = {}
    bench = Bench(project.folder)
    for item in items_of(project.folder):
        assert isinstance(item.plan, Plan)
        small_wheel(project.folder, item.plan, bench.place_of(item.plan))
        site[item.plan.wheel_name] = "0" * 64
    index_page(project.folder / "site", "simple", site)


def nothing(project: small_project.Project) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "arguments", "environ", "said"),
    [
        (change, ["--tag", "v0.3.0"], {}, "the tree has changes that no commit holds"),
        (nothing, ["--tag", "v0.4.0"], {}, "tag 'v0.4.0' stands for version 0.4.0, but this source is 0.3.0"),
        (nothing, ["--dry-run"], {"CUDA_HOME": "/nonexistent"}, "cuda-sm80: CUDA_HOME=/nonexistent: there is no"),
        (fake_wheels, ["--tag", "v0.3.0", "--skip-unbuildable"], {}, "a file that was published never changes"),
        (change, ["--tag", "v0.3.0"], {"PELTON_VERSION": "0.3.0"}, "PELTON_VERSION is set ('0.3.0')"),
        (nothing, ["--tag", "v0.3.0", "--index", "nowhere"], {}, "--index nowhere: no index is there"),
    ],
    ids=["dirty", "other tag", "unbuildable", "other bytes", "version given", "no index"],
)  # fmt: skip
def test_the_session_stops(
    project: small_project.Project,
    prepare: Callable[[small_project.Project], None],
    arguments: list[str],
    environ: dict[str, str],
    said: str,
) -> None:
    prepare(project)
    assert said in released(project, *arguments, **environ)
