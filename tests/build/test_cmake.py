"""The plan as CMake reads it, the request beside it, and what a wheel says of itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plan_cases
from pelton_build import cmake
from pelton_build.errors import PlanError
from pelton_build.plan import HostPython, Plan, Setting, Tool, TorchHeaders
from pelton_build.profile import load_profile, profile_names
from pelton_build.resolve import resolve
from pelton_build.settings import Choices
from pelton_build.table import load_table
from pelton_build.toolchain import Probe, Toolchain
from pelton_build.version import SourceVersion

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "1a2b3c4d5e6f708192a3b4c5d6e7f80912345678"
CHOICES = Choices(
    profile=Setting("profile", "cpu-avx2", "-C profile=", ("cpu-avx512 (PELTON_PROFILE)",)),
    features={"marlin": Setting("feature.marlin", "off", "PELTON_ENABLE_MARLIN")},
    jobs=Setting("jobs", "3", "MAX_JOBS"),
    notes=("CXXFLAGS=-O1 is not used",),
)
REQUEST = cmake.Request(
    "editable",
    CHOICES,
    SourceVersion("0.3.0", 1790000000, COMMIT, "git", ("shallow",)),
    {"CXX": "/opt/my gcc/g++"},
)


def plan(folder: str = "/home/some one/torch") -> Plan:
    toolchain = Toolchain(
        cxx=Probe(Tool("cxx", "gcc", "/usr/bin/g++", "12.2.0", "PATH")),
        torch=(TorchHeaders(folder, "2.13.0", "PELTON_TORCH_DIR"),),
        pythons=(
            HostPython(
                "/home/some one/bin/python3.12",
                "3.12",
                "/home/some one/include",
                ".cpython-312-x86_64-linux-gnu.so",
            ),
        ),
        memory=8 << 30,
    )
    return resolve(load_profile(ROOT, "cpu-avx2"), Choices(), load_table(ROOT), toolchain, "0.3.0")


def read_by_cmake(tmp_path: Path, values: list[str]) -> list[list[str]]:
    """What CMake makes of quoted values: the items of each."""
    lines = [f"set(V{index} {value})" for index, value in enumerate(values)]
    lines += [
        f'foreach(item IN LISTS V{index})\n  file(APPEND "out" "{index}|${{item}}\x01")\nendforeach()'
        for index in range(len(values))
    ]
    (tmp_path / "out").write_text("", encoding="utf-8")
    (tmp_path / "script.cmake").write_text("\n".join(lines), encoding="utf-8")
    subprocess.run(["cmake", "-P", "script.cmake"], cwd=tmp_path, check=True)
    made: list[list[str]] = [[] for _ in values]
    for item in (tmp_path / "out").read_text(encoding="utf-8").split("\x01")[:-1]:
        index, _, text = item.partition("|")
        made[int(index)].append(text)
    return made


HARD = [
    "plain", "two words", "it's", 'a "quoted" name', "(1)", "$HOME ${HOME} $<TARGET:x>", "#no comment", "back\\slash",
    "Größe", "]", "]]", "]=]", "]==]", "a;b", "@x@", "tab\there", "-DX=\"y z\"", "~", "&", "|", "*", "%",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_reads_what_was_quoted(tmp_path: Path) -> None:
    assert read_by_cmake(tmp_path, [cmake.quote([text]) for text in HARD]) == [[text] for text in HARD]
    listed = [text for text in HARD if "]" not in text] + ["[a]", "x[1][2]"]
    assert read_by_cmake(tmp_path, [cmake.quote(listed), cmake.quote([]), cmake.quote("")]) == [
        listed,
        [],
        [],
    ]


@pytest.mark.parametrize("values", [["[a;b]"], ["a", "]"], ["[", "b"], ["a", "]["]])
def test_what_cannot_be_quoted_is_refused(values: list[str]) -> None:
    with pytest.raises(PlanError, match="cannot be handed to CMake"):
        cmake.quote(values)


@given(st.text(alphabet="]=[;a \n\\", max_size=12))
def test_a_bracket_argument_ends_where_it_should(text: str) -> None:
    try:
        quoted = cmake.quote(text)
    except PlanError:
        return
    mark = quoted[: quoted.index("[", 1) + 1]
    end = "]" + mark[1:-1] + "]"
    assert quoted.endswith(end)
    assert quoted.index(end, len(mark)) == len(quoted) - len(end)


def test_a_request_survives_the_file(tmp_path: Path) -> None:
    cmake.write_request(tmp_path, REQUEST)
    assert cmake.read_request(tmp_path) == REQUEST


@pytest.mark.parametrize("cut", [0, 1, 40, 200, -1, -3])
def test_a_half_written_request_counts_as_none(tmp_path: Path, cut: int) -> None:
    cmake.request_file(tmp_path).write_text(REQUEST.to_json().rstrip()[:cut], encoding="utf-8")
    assert cmake.read_request(tmp_path) is None


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["state", "choices", "version", "tools", "profile", "features"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_any_other_json_is_no_request(data: object) -> None:
    with pytest.raises(ValueError, match="not a build request"):
        cmake.Request.from_json(json.dumps(data))


def test_sources_compiled_alike_are_one_group() -> None:
    made = plan()
    groups = cmake._groups(source for source in made.sources if source.role != "host")
    assert sorted(s.path for group in groups for s in group) == sorted(
        s.path for s in made.sources if s.role != "host"
    )
    assert len({(g[0].role, g[0].flags, g[0].definitions) for g in groups}) == len(groups)
    for group in groups:
        assert len({(s.role, s.language, s.archs, s.flags, s.definitions) for s in group}) == 1


def test_gpu_sources_have_their_archs_and_names(tmp_path: Path) -> None:
    made = plan_cases.plan_for(plan_cases.CUDA.replace('"sm_90a"', '"sm_90a", "compute_90"'))
    found = cmake.variables(dataclasses.replace(made, host_pythons=()), REQUEST, ROOT, tmp_path, [])
    assert found["LANGUAGES"] == cmake.quote(["CXX", "CUDA"])
    assert found["CUDA_COMPILER"] == cmake.quote("/opt/cuda/bin/nvcc")
    assert found["CUDA_RUNTIME"] == cmake.quote("/opt/cuda/lib64/libcudart_static.a")
    groups = {found[f"GROUP_{i}_ROLE"]: i for i in range(len(found["GROUPS"].strip("[=]").split(";")))}
    gpu, op = groups[cmake.quote("gpu")], groups[cmake.quote("op")]
    assert found[f"GROUP_{gpu}_ARCHS"] == cmake.quote(["80-real", "90a-real", "90-virtual"])
    assert found[f"GROUP_{gpu}_NAMES"] == cmake.quote(["common/gpu.cu", "norm/gpu.cu"])
    assert found[f"GROUP_{gpu}_DEFINITIONS"] == cmake.quote(["LIB_GPU=1"])
    assert found[f"GROUP_{op}_ARCHS"] == cmake.quote([])
    cpu = cmake.variables(dataclasses.replace(plan(), host_pythons=()), REQUEST, ROOT, tmp_path, [])
    assert cpu["LANGUAGES"] == cmake.quote(["CXX"])
    assert cpu["CUDA_COMPILER"] == cpu["CUDA_RUNTIME"] == cmake.quote("")


def test_variables_are_all_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cmake, "_pybind11_include", lambda: "/home/some one/pybind11/include")
    made = cmake.variables(plan(), REQUEST, ROOT, tmp_path, [])
    for name in made:
        assert name == "VARIABLES" or name in made["VARIABLES"]
    assert made["GLIBC_FLOOR"] == "[=[]=]", "an editable build has no floor"
    assert made["HOST_0_SOABI"] == "[=[cpython-312-x86_64-linux-gnu]=]"
    assert "/home/some one/torch=torch" in made["HIDDEN_FOLDERS"]
    assert "/home/some one/include=python3.12" in made["HIDDEN_FOLDERS"]


def test_build_info_holds_no_path(tmp_path: Path) -> None:
    request = dataclasses.replace(REQUEST, state="wheel")
    text = json.dumps(cmake.build_info(plan(), request, ROOT, "4.1.0"))
    assert "some one" not in text
    assert "/usr" not in text
    assert "/opt" not in text
    assert str(ROOT) not in text
    info = json.loads(text)
    assert info["version"] == "0.3.0+cpu.avx2"
    assert info["toolchain"]["cxx"] == "gcc 12.2.0"
    assert info["toolchain"]["torch-headers"] == "2.13.0"
    assert info["torch_floor"] == "2.10"
    assert info["commit"] == COMMIT
    assert info["host_pythons"] == ["3.12"]
    assert info["source_digest"].startswith("sha256:")


def tree(folder: Path) -> Path:
    for name in (
        "CMakeLists.txt",
        "pyproject.toml",
        "build_profiles/a.toml",
        "build_profiles/b.toml",
        "kernels/x/op.cpp",
        "python/pelton/m.py",
        "cmake/A.cmake",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    return folder


def test_the_digest_is_of_what_the_wheel_is_made_from(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    digest = cmake.source_digest(one)
    assert digest == cmake.source_digest(two)
    for name in ("docs/x.md", "tests/test_x.py", "kernels/x/.op.cpp.swp", "python/pelton/__pycache__/m.pyc"):
        (two / name).parent.mkdir(parents=True, exist_ok=True)
        (two / name).write_text("other", encoding="utf-8")
    assert digest == cmake.source_digest(two)
    for name in (
        "CMakeLists.txt",
        "build_profiles/a.toml",
        "kernels/x/op.cpp",
        "kernels/x/new.h",
        "python/pelton/m.py",
    ):
        changed = tree(tmp_path / name.replace("/", "_"))
        (changed / name).write_text("other", encoding="utf-8")
        assert digest != cmake.source_digest(changed), name


def test_what_the_build_environment_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without isolation nobody installs what the build asks for."""
    lacking = dataclasses.replace(plan(), build_requires=("cuda-toolkit[nvcc]==13.0.2", "torch==2.13.0"))
    monkeypatch.setattr(cmake, "plan_of", lambda root, request: (lacking, request))
    with pytest.raises(
        PlanError, match=r"lacks .*: cuda-toolkit\[nvcc\]==13\.0\.2, torch==2\.13\.0; install it"
    ):
        cmake.write_plan(ROOT, "cpu-avx2", tmp_path, "4.1.0")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_with_problems_is_refused() -> None:
    broken = dataclasses.replace(plan(), problems=("no compiler", "no headers"))
    with pytest.raises(PlanError, match="'cpu-avx2' cannot be built here: no compiler; no headers"):
        cmake.refuse_problems(broken)


def test_profiles_to_recommend_are_those_that_there_are_wheels_for() -> None:
    others = cmake.profiles_of(ROOT)
    assert [other["profile"] for other in others] == list(profile_names(ROOT))
