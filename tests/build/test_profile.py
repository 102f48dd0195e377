"""Profiles: the strict schema, its errors, and the six that there are."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_cases
from pelton_build.errors import ProfileError
from pelton_build.features import check_profile_features
from pelton_build.profile import FOLDER, Ci, load_profile, parse_profile, profile_names
from pelton_build.values import Version, VersionRange

REQUIRED = ("cpu-avx2", "cpu-avx512", "cuda-sm80", "cuda-sm90", "rocm-gfx1100", "rocm-gfx90a")


def refusal(text: str, name: str = "test") -> str:
    with pytest.raises(ProfileError) as caught:
        plan_cases.profile(text, name)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"build_profiles/{name}.toml: ")
    return message


def test_the_required_profiles_are_there() -> None:
    assert set(REQUIRED) <= set(profile_names(plan_cases.ROOT))


@pytest.mark.parametrize("name", profile_names(plan_cases.ROOT))
def test_profile_is_sound(name: str) -> None:
    profile = plan_cases.real_profile(name)
    assert profile.name == name and profile.file == f"{FOLDER}/{name}.toml"
    check_profile_features(profile, plan_cases.real_table())
    first = (plan_cases.ROOT / profile.file).read_text().splitlines()[0]
    assert first == "#:schema ./profile.schema.json"


def test_labels_differ() -> None:
    """Two profiles of one label would make two wheels of one name."""
    labels = [plan_cases.real_profile(name).wheel.label for name in profile_names(plan_cases.ROOT)]
    assert len(set(labels)) == len(labels)


def test_all_keys_are_read() -> None:
    profile = plan_cases.profile(
        plan_cases.CUDA.replace(
            'cuda = ">=12.8,<14"', 'cuda = ">=12.8,<14"\ncuda-package = "13.0.2"\ngcc = ">=12"'
        )
        + 'glibc = "2.34"\nrequires = ["x>=1"]\n[features]\nawq = true\n[variant]\nnvidia = { sm_arch = ["80_real", "90_real"] }\n'
        + '[ci]\nrunner = "r"\ncontainer = "c@sha256:'
        + "0" * 64
        + '"\npackages = ["clang-19"]\nrun = false\ntimeout-minutes = 5\n'
    )
    assert profile.target.arch == ("sm_80", "sm_90a")
    assert profile.toolchain.cuda == VersionRange.parse(">=12.8,<14")
    assert profile.toolchain.cuda_package == Version((13, 0, 2))
    assert profile.toolchain.gcc == VersionRange.parse(">=12")
    assert (profile.wheel.glibc, profile.wheel.requires) == (Version((2, 34)), ("x>=1",))
    assert profile.features == {"awq": True}
    assert profile.variant == {"nvidia": {"sm_arch": ("80_real", "90_real")}}
    assert profile.ci == Ci("r", "c@sha256:" + "0" * 64, ("clang-19",), False, 5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # P29: names of archs. The key is named in each.
        ('["x86-64-v3"]', '["avx2"]', "target.arch: unknown cpu arch 'avx2'; did you mean 'x86-64-v3'?"),
        ('["x86-64-v3"]', '"x86-64-v3"', 'target.arch: expected a list, such as ["x86-64-v3"], found text'),
        ('["x86-64-v3"]', "[]", "target.arch: names no hardware; give at least one"),
        ('["x86-64-v3"]', "[3]", "target.arch[0]: expected text, found a number 3"),
        ('["x86-64-v3"]', '["sm_90"]', "target.arch: 'sm_90' is an arch of backend cuda"),
        ('["x86-64-v3"]', '["x86-64-v3", "x86-64-v3"]', "'x86-64-v3' is listed twice"),
        ('label = "', 'requires = ["numpy >="]\nlabel = "', "wheel.requires: 'numpy >=' is not a requirement"),
        ('summary = "', 'summary = "\\u001b[31m', "summary: say in one line"),
        # Unknown and missing keys and values.
        ('backend = "cpu"', 'backend = "gpu"', "target.backend: unknown value 'gpu'"),
        ('backend = "cpu"', 'backend = "CUDA"', "did you mean 'cuda'?"),
        ('backend = "cpu"', "backend = 1", "target.backend: unknown value 1; known: cpu, cuda, rocm"),
        ('backend = "cpu"', 'backend = "cpu"\nsystem = "windows"', "target.system: unknown value 'windows'"),
        ('backend = "cpu"', 'backend = "cpu"\nmachine = "aarch64"', "target.machine: the archs x86-64-v3 are of x86_64"),
        ('backend = "cpu"', 'backend = "cpu"\narchs = []', "unknown key 'target.archs'; did you mean 'target.arch'?"),
        ('backend = "cpu"', 'backend = "cpu"\nlabel = "x"', "unknown key 'target.label'; did you mean 'wheel.label'?"),
        ("[wheel]", "[wheels]", "unknown key 'wheels'; did you mean 'wheel'?"),
        ('summary = "a CPU"', 'summry = "a CPU"', "unknown key 'summry'; did you mean 'summary'?"),
        ('summary = "a CPU"', "", "missing key 'summary'"),
        ('summary = "a CPU"', 'summary = " "', "summary: say in one line which hardware"),
        ('summary = "a CPU"', "summary = 1", "summary: expected text, found a number 1"),
        ('"5 MiB"', '"5 MiB"\n[ci]\nlabel = "x"', "unknown key 'ci.label'; did you mean 'wheel.label'?"),
        ('label = "cpu.test"', "", "missing key 'wheel.label'"),
        ("size-budget", "size_budget", "unknown key 'wheel.size_budget'; did you mean 'wheel.size-budget'?"),
        # Malformed values.
        ('"5 MiB"', '"5 MB"', "wheel.size-budget: size '5 MB' has no unit"),
        ('"5 MiB"', "5", "wheel.size-budget: expected text such as '200 MiB', found a number 5"),
        ('"cpu.test"', '"CPU"', "wheel.label: 'CPU' is not a local version label"),
        ('"cpu.test"', '"cpu.{x}"', "wheel.label: unknown field '{x}'"),
        ('"cpu.test"', '"cpu{cuda_major}"', "wheel.label: '{cuda_major}' is for backend cuda"),
        ('"cpu.test"', '"cpu.{"', "wheel.label: 'cpu.{' is not a local version label"),
        ('"5 MiB"', '"5 MiB"\nglibc = "2"', "wheel.glibc: write major and minor version"),
        ('"5 MiB"', '"5 MiB"\nglibc = "2.99"', "wheel.glibc: wheels are for a glibc from 2.17 to 2.45, found '2.99'"),
        ('"5 MiB"', '"5 MiB"\nglibc = "2.5"', "wheel.glibc: wheels are for a glibc from 2.17 to 2.45, found '2.5'"),
        ('"5 MiB"', '"5 MiB"\n[variant]\nx86_64 = { level = ["v4"] }', "variant.x86_64.level: target.arch is x86-64-v3, so that it has to be ['v3'], found ['v4']"),
        ('"5 MiB"', '"5 MiB"\n[toolchain]\ngcc = ""', "toolchain.gcc: is empty; write it as '>=12.8,<14', or leave the key out"),
        ('"5 MiB"', '"5 MiB"\nrequires = "x"', 'wheel.requires: expected a list, such as ["x"]'),
        ('"5 MiB"', '"5 MiB"\n[toolchain]\ngcc = "12"', "toolchain.gcc: '12' has no operator; write e.g. '>=12'"),
        ('"5 MiB"', '"5 MiB"\n[toolchain]\ngcc = ">=13,<12"', "toolchain.gcc: no version satisfies"),
        ('"5 MiB"', '"5 MiB"\n[toolchain]\ncuda = ">=12"', "toolchain.cuda: only for backend cuda"),
        ('"5 MiB"', '"5 MiB"\n[toolchain]\nrocm = ">=6"', "toolchain.rocm: only for backend rocm"),
        ('"5 MiB"', '"5 MiB"\n[features]\nawq = "on"', "features.awq: expected true or false, found text 'on'"),
        ('"5 MiB"', '"5 MiB"\n[variant]\nx86-64 = { level = ["v3"] }', "unknown namespace 'variant.x86-64'; did you mean 'x86_64'?"),
        ('"5 MiB"', '"5 MiB"\n[variant]\nx86_64 = { levels = ["v3"] }', "unknown key 'variant.x86_64.levels'; did you mean 'level'?"),
        ('"5 MiB"', '"5 MiB"\n[variant]\nx = 1', "variant.x: expected a table"),
        ('"5 MiB"', '"5 MiB"\n[ci]\ntimeout-minutes = 0', "ci.timeout-minutes: must be at least 1"),
        ('"5 MiB"', '"5 MiB"\n[ci]\ntimeout-minutes = true', "ci.timeout-minutes: expected a whole number"),
        ('"5 MiB"', '"5 MiB"\n[ci]\nrunner = ""', "ci.runner: expected the name of a runner"),
        ('"5 MiB"', '"5 MiB"\n[ci]\nrunner = "ubuntu\\n24.04"', "such as 'ubuntu-24.04', found 'ubuntu\\n24.04'"),
        ('"5 MiB"', '"5 MiB"\n[ci]\ncontainer = "debian:12"', "ci.container: 'debian:12' can be another image"),
        ('"5 MiB"', '"5 MiB"\n[ci]\npackages = ["a; b"]', "ci.packages: 'a; b' is no name"),
        ('[target]\nbackend = "cpu"\narch = ["x86-64-v3"]', "target = 1", "target: expected a table, found a number 1"),
        ("[target]", "[target", "not valid TOML"),
    ],
)  # fmt: skip
def test_refuses(old: str, new: str, message: str) -> None:
    assert old in plan_cases.CPU
    assert message in refusal(plan_cases.CPU.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('">=12.8,<14"', '">=12.8"\ncuda-package = "12.9.1"', "package indexes have the compiler from CUDA 13.0 on, found 12.9.1"),
        ('">=12.8,<14"', '">=13"\ncuda-package = "12.9"', "toolchain.cuda-package: 12.9 is not in toolchain.cuda '>=13'"),
        ('"sm_80", "sm_90a"', '"sm_101"', None),
        ('">=12.8,<14"', '" "', "toolchain.cuda: is empty"),
        ("[wheel]", '[variant]\nnvidia = { sm_arch = ["80_real", "90_real"] }\n[wheel]', None),
        ("[wheel]", '[variant]\nnvidia = { cuda_version_lower_bound = ["13.0"] }\n[wheel]', None),
        ("[wheel]", '[variant]\nnvidia = { sm_arch = ["90_real"] }\n[wheel]', "variant.nvidia.sm_arch: target.arch is sm_80, sm_90a, so that it has to be ['80_real', '90_real']"),
        ("[wheel]", '[variant]\nnvidia = { sm_arch = ["80_virtual", "90_real"] }\n[wheel]', "found ['80_virtual', '90_real']"),
        ("[wheel]", '[variant]\namd = { gfx_arch = ["gfx90a"] }\n[wheel]', "variant.amd.gfx_arch: target.arch is sm_80, sm_90a, so that it has to be []"),
        ('"sm_80", "sm_90a"', '"sm_93"', "target.arch: unknown cuda arch 'sm_93'; did you mean 'sm_90'?"),
        ('">=12.8,<14"', '"<12"', "target.arch: 'sm_90a' is not known to any nvcc of toolchain.cuda '<12'"),
    ],
)  # fmt: skip
def test_cuda(old: str, new: str, message: str | None) -> None:
    text = plan_cases.CUDA.replace(old, new, 1)
    assert text != plan_cases.CUDA
    if message is None:
        plan_cases.profile(text)
    else:
        assert message in refusal(text)


@pytest.mark.parametrize("name", ["CPU", "cpu_avx2", "cpu--x", "-cpu", "cpu avx2", "cpü", "a.b"])
def test_refuses_names(name: str) -> None:
    assert "rename the file to " in refusal(plan_cases.CPU, name)
    suggested = re.search(r"rename the file to (.*)\.toml", refusal(plan_cases.CPU, name))
    assert suggested is not None
    plan_cases.profile(plan_cases.CPU, suggested[1])


@pytest.mark.parametrize("name", ["cpu_avx2", "CPU-AVX2", "cpu-avx2 ", "cpu-avx-2"])
def test_unknown_profile_names_the_nearest(name: str) -> None:
    with pytest.raises(ProfileError, match="did you mean 'cpu-avx2'"):
        load_profile(plan_cases.ROOT, name)


@pytest.mark.parametrize(
    "name", ["", "../pyproject", "/etc/passwd", "cpu-avx2.toml/..", "x\0y", "profile.schema"]
)
def test_unknown_profile(name: str) -> None:
    with pytest.raises(ProfileError, match="unknown profile"):
        load_profile(plan_cases.ROOT, name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8 text"),
        (b"a = \x00", "not valid TOML"),
        (b"a = " + b"[" * 5000, "not valid TOML: nested too deeply"),
        (b"a = " + b"9" * 5000, "not valid TOML: Exceeds the limit"),
        (b"a = 2026-02-31", "not valid TOML"),
        (b"", "missing key 'summary'"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / FOLDER / "test.toml"
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=re.escape(message)):
        load_profile(tmp_path, "test")


def test_byte_order_mark_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "test.toml").write_text("\ufeff" + plan_cases.CPU, encoding="utf-8")
    (tmp_path / FOLDER / ".#test.toml").write_text("an editor's")
    assert profile_names(tmp_path) == ("test",)
    assert load_profile(tmp_path, "test").summary == "a CPU"


def test_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="build_profiles/ holds no profile"):
        load_profile(tmp_path, "cpu-avx2")


def test_features_must_be_declared() -> None:
    profile = plan_cases.profile(plan_cases.CPU + "[features]\nmarln = true\n")
    with pytest.raises(
        ProfileError, match=r"features\.marln: unknown feature 'marln'; did you mean 'marlin'"
    ):
        check_profile_features(profile, plan_cases.table())


toml_values = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-9, 9),
        st.sampled_from(("", "cpu", "sm_90", ">=1", "5 MiB", "2.28", "x.y")),
    ),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


def as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


@given(
    st.sampled_from(("target", "toolchain", "features", "wheel", "variant", "ci", "other")),
    st.sampled_from(
        ("backend", "arch", "cuda", "gcc", "label", "size-budget", "glibc", "requires", "runner", "x")
    ),
    toml_values,
)
def test_any_key_and_value_gives_a_profile_or_one_line(section: str, key: str, value: object) -> None:
    base = {"target": {}, "wheel": {}}
    lines = {
        "target": {"backend": '"cpu"', "arch": '["x86-64-v3"]'},
        "wheel": {"label": '"cpu"', "size-budget": '"5 MiB"'},
    }
    lines.setdefault(section, base.get(section, {}))[key] = as_toml(value)
    text = 'summary = "s"\n' + "".join(
        f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for name, entries in lines.items()
    )
    try:
        parse_profile("test", "build_profiles/test.toml", text)
    except ProfileError as error:
        assert str(error).startswith("build_profiles/test.toml: ") and "\n" not in str(error)
        assert key in str(error) or section in str(error)


def test_pipe_instead_of_a_file(tmp_path: Path) -> None:
    """Opening one would wait for a writer without end."""
    (tmp_path / FOLDER).mkdir()
    os.mkfifo(tmp_path / FOLDER / "test.toml")
    with pytest.raises(ProfileError, match="not a regular file"):
        load_profile(tmp_path, "test")


def test_file_with_a_mark_and_foreign_line_ends(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    text = "\ufeff" + plan_cases.CPU.replace("\n", "\r\n")
    (tmp_path / FOLDER / "test.toml").write_bytes(text.encode())
    assert load_profile(tmp_path, "test").target == plan_cases.profile(plan_cases.CPU).target
