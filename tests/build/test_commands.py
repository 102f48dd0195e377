"""The commands as people call them: one message, a status, no traceback; and a new profile with no other edit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import plan_cases
from pelton_build import schema
from pelton_build.__main__ import COMMANDS, main
from pelton_build.matrix import matrix
from pelton_build.plan import Plan
from pelton_build.planning import write_atomically
from pelton_build.presets import FILE as PRESETS
from pelton_build.profile import parse_profile, profile_names
from pelton_build.settings import PREFIX

SM89 = """\
#:schema ./profile.schema.json
summary = "NVIDIA Ada: L4, L40S, RTX 4090"

[target]
backend = "cuda"
arch = ["sm_89"]

[toolchain]
cuda = ">=12.8,<14"
cuda-package = "13.0.2"

[wheel]
label = "cu{cuda_major_minor}.sm89"
size-budget = "200 MiB"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the deciding half, in an environment that says nothing."""
    for name in [*os.environ]:
        if name.startswith((PREFIX, "SKBUILD_")) or name in (
            "CXX",
            "CUDACXX",
            "CUDA_HOME",
            "CUDA_PATH",
            "MAX_JOBS",
        ):
            monkeypatch.delenv(name)
    return plan_cases.copy_tree(tmp_path / "tree")


def run(tree: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([arguments[0], "--root", str(tree), *arguments[1:]])
    out, err = capsys.readouterr()
    return status, out, err


def plan(tree: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Plan:
    status, out, err = run(tree, capsys, "plan", *arguments, "--json")
    assert status == 0, err
    return Plan.from_json(out)


def nox(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NOXSESSION")}
    return subprocess.run(
        [sys.executable, "-m", "nox", "--non-interactive", *arguments],
        cwd=tree,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- switches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["-C", "profile=cpu_avx2"], {}, "did you mean 'cpu-avx2'"),
        (["-C", "profil=cpu-avx2"], {}, "did you mean '-C profile'"),
        (["-C", "feature.marlin=of", "-C", "profile=cpu-avx2"], {}, "did you mean 'off'"),
        (["-C", "profile=cpu-avx2", "-C", "profile=cpu-avx512"], {}, "'cpu-avx2', 'cpu-avx512'"),
        (["-C", "feature.marlin=on", "-C", "profile=cpu-avx2"], {}, "it is a feature of cuda"),
        (
            ["rocm-gfx1100", "--feature", "marlin=on"],
            {},
            "it is a feature of cuda, and the profile's backend is rocm",
        ),
        (["cpu-avx2"], {"PELTON_TARGET_DEVICE": "gpu"}, "allowed: cpu, cuda, rocm"),
        ([], {"PELTON_TARGET_DEVICE": "cpu", "PELTON_PROFILE": "cuda-sm90"}, "contradict each other"),
        (["cpu-avx2"], {"PELTON_ENABLE_MARLN": "1"}, "did you mean 'PELTON_ENABLE_MARLIN'"),
        (["cpu-avx2"], {"PELTON_ENABLE_MARLIN": "yes"}, "feature 'marlin' is on (PELTON_ENABLE_MARLIN)"),
        (["cpu-avx2"], {"MAX_JOBS": "0"}, "MAX_JOBS: '0' is no number of jobs"),
        (["cpu-avx2"], {"CXX": "/nonexistent"}, "CXX=/nonexistent: there is no such program"),
        (["cuda-sm90"], {"CUDA_HOME": "/nonexistent"}, "CUDA_HOME=/nonexistent: there is no such folder"),
        (["cpu-avx2"], {"PELTON_TORCH_DIR": "/nonexistent"}, "PELTON_TORCH_DIR=/nonexistent: holds no torch"),
        (["cpu-avx2", "--feature", "marlin"], {}, "--feature marlin: write NAME=on or NAME=off"),
        (["cpu-avx2", "--feature", "marln=on"], {}, "did you mean 'marlin'"),
        (["cpu-avx2", "-C", "profile=cpu-avx512"], {}, "keep one"),
        (["cpu_avx2"], {}, "did you mean 'cpu-avx2'"),
        ([""], {}, "the profile's name is empty"),
        (["cpu-avx2", "--wrong"], {}, "unrecognized arguments: --wrong"),
        (["cpu-avx2", "cpu-avx512"], {}, "unrecognized arguments: cpu-avx512"),
    ],
)
def test_one_message_and_a_status(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environ: dict[str, str],
    message: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    status, out, err = run(tree, capsys, "plan", *arguments)
    assert status != 0 and out == ""
    assert message in err and "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith(("error: ", "plan: error: "))]) == 1


@pytest.mark.parametrize(
    ("arguments", "environ", "profile", "origin"),
    [
        (["-C", "profile=cpu-avx2"], {"PELTON_PROFILE": "cpu-avx512"}, "cpu-avx2", "-C profile="),
        (["cpu-avx2"], {"SKBUILD_CMAKE_ARGS": "-DPELTON_PROFILE=cuda-sm90"}, "cpu-avx2", "-C profile="),
        ([], {"PELTON_PROFILE": " cpu-avx2"}, "cpu-avx2", "PELTON_PROFILE"),
        (["rocm-gfx1100"], {"PYTORCH_ROCM_ARCH": "gfx942"}, "rocm-gfx1100", "-C profile="),
    ],
)
def test_where_the_profile_came_from(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environ: dict[str, str],
    profile: str,
    origin: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    made = plan(tree, capsys, *arguments)
    assert made.profile == profile
    assert made.settings[0].origin == origin
    lost = " ".join((*made.settings[0].overridden, *made.notes))
    assert ("PELTON_PROFILE" in environ and environ["PELTON_PROFILE"].strip() == profile) or all(
        name in lost for name in environ
    )


@pytest.mark.parametrize("value", ["", "  "])
def test_empty_variable_is_unset(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    for name in (
        "PELTON_PROFILE",
        "PELTON_TARGET_DEVICE",
        "PELTON_ENABLE_MARLIN",
        "USE_FAST_MATH",
        "MAX_JOBS",
    ):
        monkeypatch.setenv(name, value)
    made = plan(tree, capsys)
    assert made.settings[0].origin.startswith("detected: ")
    assert not any(feature.changed for feature in made.features)
    assert made.backend == "cpu" or made.tools


def test_arch_variables_do_not_change_the_plan(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan(tree, capsys, "cuda-sm90")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    after = plan(tree, capsys, "cuda-sm90")
    assert (after.archs, after.label, after.sources) == (before.archs, before.label, before.sources)
    added = set(after.notes) - set(before.notes)
    assert added == {
        "TORCH_CUDA_ARCH_LIST=8.0 9.0a is not used: the archs stand in build_profiles/cuda-sm90.toml, key target.arch"
    }


def test_gpu_profiles_plan_with_every_family_in_or_out(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cuda-sm80", "cuda-sm90", "rocm-gfx90a", "rocm-gfx1100"):
        made = plan(tree, capsys, name)
        families = {source.family for source in (*made.sources, *made.excluded)}
        assert families == {family.name for family in plan_cases.real_table().families}
        assert all(source.reason for source in made.excluded)


# --- other subcommands -----------------------------------------------------------------------------------------------


def test_subcommands_are_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["paln"]) == 1
    assert "did you mean 'plan'" in capsys.readouterr().err
    for name in ("plan", "matrix", "schema", "presets", "cmake"):  # those that need nothing installed
        assert main([name, "--help"]) == 0, capsys.readouterr().err


def test_schema_is_fresh() -> None:
    """Run `nox -s schema` when this fails."""
    text = (plan_cases.ROOT / schema.FILE).read_text()
    assert json.loads(text) == schema.schema(plan_cases.real_table())
    assert main(["schema", "--check"]) == 0


def test_schema_documents_every_key() -> None:
    made = schema.schema(plan_cases.real_table())
    jsonschema.Draft7Validator.check_schema(made)

    def walk(node: dict[str, object], where: str) -> None:
        properties = node.get("properties")
        if isinstance(properties, dict):
            for key, entry in properties.items():
                assert entry.get("description"), f"{where}.{key} has no docstring"
                walk(entry, f"{where}.{key}")

    walk(made, "profile")


@pytest.mark.parametrize("name", profile_names(plan_cases.ROOT))
def test_profiles_are_valid_by_the_schema(name: str) -> None:
    import tomllib

    data = tomllib.loads((plan_cases.ROOT / f"build_profiles/{name}.toml").read_text())
    jsonschema.validate(data, schema.schema(plan_cases.real_table()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('["sm_89"]', '["sm_93"]'),
        ('["sm_89"]', "[]"),
        ('["sm_89"]', '["sm_89", "sm_89"]'),
        ('["sm_89"]', '["gfx90a"]'),
        ('["sm_89"]', '"sm_89"'),
        ('"200 MiB"', '"200 MB"'),
        ('"cuda"', '"gpu"'),
        ("[toolchain]", "[toolchains]"),
        ('">=12.8,<14"', '"12.8"'),
        ('summary = "NVIDIA Ada: L4, L40S, RTX 4090"', ""),
        ("[wheel]", "[features]\nmarln = true\n[wheel]"),
    ],
)
def test_schema_and_reader_refuse_the_same(old: str, new: str) -> None:
    import tomllib

    from pelton_build.errors import ProfileError
    from pelton_build.features import check_profile_features

    text = SM89.replace(old, new, 1)
    assert text != SM89
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), schema.schema(plan_cases.real_table()))
    with pytest.raises(ProfileError):
        check_profile_features(parse_profile("test", "test.toml", text), plan_cases.real_table())


def test_presets_are_not_written_over_foreign_ones(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / PRESETS).write_text('{"version": 6, "configurePresets": [{"name": "mine"}]}')
    status, _, err = run(tree, capsys, "presets")
    assert status == 1 and "was not written by this tool" in err
    assert "mine" in (tree / PRESETS).read_text()


def test_two_profiles_with_one_label_are_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tree / "build_profiles"
    shutil.copy(folder / "cuda-sm90.toml", folder / "cuda-x.toml")
    for command in (["matrix"], ["plan", "cuda-x"], ["plan", "cuda-sm90"]):
        status, out, err = run(tree, capsys, *command)
        assert status == 1 and not out
        assert (
            "build_profiles/cuda-x.toml" in err and "build_profiles/cuda-sm90.toml" in err and "label" in err
        )
    assert run(tree, capsys, "plan", "cpu-avx2")[0] == 0  # which has a name of its own


def test_a_broken_profile_stops_the_matrix_but_not_the_others(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "build_profiles/mine.toml").write_text("summary = 1")
    status, out, err = run(tree, capsys, "matrix")
    assert status == 1 and out == "" and "build_profiles/mine.toml: " in err
    assert plan(tree, capsys, "cpu-avx2").profile == "cpu-avx2"
    listed = nox(tree, "-l")
    assert listed.returncode == 0
    assert re.search(r"build-mine .*cannot be built: build_profiles/mine\.toml: ", listed.stdout)
    assert "build-cpu-avx2" in listed.stdout


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    write_atomically(path, "one\n")
    stamp = path.stat().st_mtime_ns
    write_atomically(path, "one\n")
    assert path.stat().st_mtime_ns == stamp
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udc80")
    assert path.read_text() == "one\n" and [*path.parent.iterdir()] == [path]


# --- a new profile: one file, no other edit --------------------------------------------------------------------------


def documented(tree: Path) -> str:
    """The documentation's table of profiles, of the files in this tree."""
    program = "import sys; sys.path[:0] = sys.argv[1:]; import tables; print(*tables.profiles(), sep=chr(10))"
    folders = (str(tree / "docs"), str(tree / "python"))
    done = subprocess.run(
        [sys.executable, "-c", program, *folders], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_dropping_in_a_profile_is_enough(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {
        path: path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    rows = matrix(tree)["include"]
    (tree / "build_profiles/cuda-sm89.toml").write_text(SM89)

    listed = nox(tree, "-l")
    assert listed.returncode == 0, listed.stderr
    assert re.search(r"build-cuda-sm89 \[build,\s?build-cuda\] -> .*NVIDIA Ada", listed.stdout)
    tagged = nox(tree, "-l", "-t", "build-cuda")
    assert re.search(r"^\* build-cuda-sm89", tagged.stdout, re.MULTILINE)

    made = plan(tree, capsys, "cuda-sm89")
    assert (made.archs, made.label) == (("sm_89",), "cu130.sm89")

    printed = nox(tree, "-s", "matrix")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.count("\n") == 1
    added = [row for row in json.loads(printed.stdout)["include"] if row not in rows]
    assert [row["profile"] for row in added] == ["cuda-sm89"]
    assert added[0]["session"] == "build-cuda-sm89" and added[0]["runner"] == "ubuntu-24.04"

    assert nox(tree, "-s", "presets").returncode == 0
    presets = json.loads((tree / PRESETS).read_text())
    names = {preset["name"] for preset in presets["configurePresets"] if not preset.get("hidden")}
    assert names == set(profile_names(tree)) and "cuda-sm89" in names

    assert "cuda-sm89" not in documented(plan_cases.ROOT)
    assert "| `cuda-sm89` | NVIDIA Ada: L4, L40S, RTX 4090 | `sm_89` |" in documented(tree)

    checked = nox(tree, "-s", "schema", "--", "--check")
    assert checked.returncode == 0, checked.stderr
    after = {path: path.read_bytes() for path in before}
    assert after == before  # nothing that was there had to change
    ignored = (plan_cases.ROOT / ".gitignore").read_text().splitlines()
    assert PRESETS in ignored


def test_nox_says_one_thing_and_fails(tree: Path) -> None:
    text = (tree / "build_profiles/cuda-sm90.toml").read_text()
    (tree / "build_profiles/mine.toml").write_text(
        re.sub(r"^arch = .*$", 'arch = ["sm_90A"]', text, flags=re.MULTILINE)
    )
    done = nox(tree, "-s", "plan", "--", "mine")
    assert done.returncode != 0
    assert (
        done.stderr.count(
            "build_profiles/mine.toml: target.arch: unknown cuda arch 'sm_90A'; did you mean 'sm_90a'?"
        )
        == 1
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert nox(tree, "-s", "plan", "--", "cuda-sm90", "--feature", "marlin=off").returncode == 0
