"""What stops a release, and how its wheels are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import plan_cases
from pelton_build.__main__ import main
from pelton_build.plan import Feature, Plan
from pelton_build.release import (
    ReleaseError,
    Row,
    Times,
    as_json,
    contradictions,
    notes,
    plans_of,
    published,
    table,
    tree_problems,
    unbuildable,
)

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
    plans = plans_of(tree)
    assert set(plans) == {path.stem for path in (tree / "build_profiles").glob("*.toml")}
    assert isinstance(plans["cpu-avx2"], Plan)
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
    assert contradictions([ROW], held) == ()
    (said,) = contradictions([replace(ROW, sha256="b" * 64), replace(ROW, file="new.whl")], held)
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


def test_build_times_survive_interruptions_and_damage(tmp_path: Path) -> None:
    times = Times(tmp_path / "deep" / "times.json")
    assert times.get("a") is None
    times.add("a", 12.34)
    times.add("b", 5)
    assert (times.get("a"), times.get("b"), times.get("c")) == (12.3, 5.0, None)
    times.path.write_text("{")
    assert times.get("a") is None
    times.add("c", 1)
    assert times.get("c") == 1.0


def test_the_command_prints_the_version_or_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = plan_cases.copy_tree(tmp_path / "tree")
    monkeypatch.setenv("PELTON_VERSION", "0.3.0")
    assert main(["release", "--root", str(tree), "--tag", "v0.3.0"]) == 0
    assert capsys.readouterr().out == "0.3.0\n"
    assert main(["release", "--root", str(tree), "--tag", "v0.3.1"]) == 1
    assert "v0.3.1" in capsys.readouterr().err
    assert main(["release", "--root", str(tree)]) == 1
    assert "--dry-run" in capsys.readouterr().err
