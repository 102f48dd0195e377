"""Switches: command line over environment, contradictions, unknown names, and what is not used."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_cases
from pelton_build.errors import ChoiceError
from pelton_build.settings import Choices, ConfigSettings, pass_through, read_choices, scrubbed


def choices(config: ConfigSettings | None = None, **environ: str) -> Choices:
    return read_choices(config, environ, plan_cases.table())


def shown(made: Choices) -> dict[str, tuple[str, str]]:
    settings = [made.profile, made.device, made.jobs, made.torch_dir, made.label, *made.features.values()]
    return {setting.name: (setting.value, setting.origin) for setting in settings if setting is not None}


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        ({}, {}, {}),
        ({"profile": "a"}, {}, {"profile": ("a", "-C profile=")}),
        ({}, {"PELTON_PROFILE": "a"}, {"profile": ("a", "PELTON_PROFILE")}),
        ({"profile": "a"}, {"PELTON_PROFILE": "b"}, {"profile": ("a", "-C profile=")}),
        ({"profile": ["a", "a"]}, {}, {"profile": ("a", "-C profile=")}),
        ({"profile": " a "}, {}, {"profile": ("a", "-C profile=")}),
        ({}, {"PELTON_PROFILE": ""}, {}),
        ({}, {"PELTON_PROFILE": "  \t"}, {}),
        ({}, {"PELTON_PROFILE": " a"}, {"profile": ("a", "PELTON_PROFILE")}),
        ({}, {"PELTON_TARGET_DEVICE": "CPU"}, {"target-device": ("cpu", "PELTON_TARGET_DEVICE")}),
        ({"feature.marlin": "off"}, {}, {"feature.marlin": ("off", "-C feature.marlin=")}),
        ({"feature.marlin": "NO"}, {}, {"feature.marlin": ("off", "-C feature.marlin=")}),
        ({"feature.marlin": True}, {}, {"feature.marlin": ("on", "-C feature.marlin=")}),
        ({}, {"PELTON_ENABLE_MARLIN": "yes"}, {"feature.marlin": ("on", "PELTON_ENABLE_MARLIN")}),
        ({}, {"PELTON_ENABLE_MARLIN": "0"}, {"feature.marlin": ("off", "PELTON_ENABLE_MARLIN")}),
        ({}, {"USE_FAST_MATH": "1"}, {"feature.fast-math": ("on", "USE_FAST_MATH")}),
        ({}, {"USE_FAST_MATH": ""}, {}),
        ({"feature.awq": "on"}, {"PELTON_ENABLE_AWQ": "0"}, {"feature.awq": ("on", "-C feature.awq=")}),
        ({}, {"MAX_JOBS": " 4 "}, {"jobs": ("4", "MAX_JOBS")}),
        ({"jobs": "2"}, {"MAX_JOBS": "4"}, {"jobs": ("2", "-C jobs=")}),
        ({"label": "off"}, {}, {"label": ("off", "-C label=")}),
        ({}, {"PELTON_TORCH_DIR": "/t"}, {"torch-dir": ("/t", "PELTON_TORCH_DIR")}),
        ({"cmake.build-type": "Debug", "build-dir": "b", "skbuild.logging.level": "INFO"}, {}, {}),
        ({}, {"PELTON_LIBRARY": "x.so", "PELTON_VERSION": "1.0"}, {}),
    ],
)  # fmt: skip
def test_merged(
    config: ConfigSettings, environ: dict[str, str], expected: dict[str, tuple[str, str]]
) -> None:
    assert shown(choices(config, **environ)) == expected


def test_what_lost_is_kept() -> None:
    made = choices(
        {"profile": "cpu-avx2", "feature.awq": "on"},
        PELTON_PROFILE="cpu-avx512",
        PELTON_ENABLE_AWQ="0",
        SKBUILD_CMAKE_ARGS="-DPELTON_PROFILE=cuda-sm90 -DX=1",
        CMAKE_ARGS="-DPELTON_PROFILE:STRING=cuda-sm80",
    )
    assert made.profile is not None
    assert made.profile.overridden == (
        "cpu-avx512 (PELTON_PROFILE)",
        "cuda-sm80 (CMAKE_ARGS, never used)",
        "cuda-sm90 (SKBUILD_CMAKE_ARGS, never used)",
    )
    assert made.features["awq"].overridden == ("off (PELTON_ENABLE_AWQ)",)


@pytest.mark.parametrize(
    ("config", "environ", "message"),
    [
        ({"profil": "x"}, {}, "-C profil: unknown setting 'profil'; did you mean '-C profile'?"),
        ({"Profile": "x"}, {}, "did you mean '-C profile'?"),
        ({"--global-option": "x"}, {}, "unknown setting '--global-option'"),
        ({"cmak.define.X": "x"}, {}, "unknown setting 'cmak.define.X'"),
        ({"profile": ["a", "b"]}, {}, "-C profile is given 2 times with different values: 'a', 'b'"),
        ({"profile": ""}, {}, "-C profile=: the value is empty"),
        ({"feature.marln": "on"}, {}, "unknown feature 'marln'; did you mean 'marlin'?"),
        ({"feature.": "on"}, {}, "unknown feature ''"),
        ({"feature": "marlin"}, {}, "unknown setting 'feature'"),
        ({"feature.marlin": "of"}, {}, "-C feature.marlin: 'of' is neither on nor off; did you mean 'off'?"),
        ({"feature.marlin": ["on", "off"]}, {}, "with different values: 'on', 'off'"),
        ({"feature.marlin": ""}, {}, "the value is empty"),
        ({"jobs": "0"}, {}, "-C jobs: '0' is no number of jobs"),
        ({"feature.awq": "maybe"}, {}, "-C feature.awq: 'maybe' is neither on nor off; allowed: on,"),
        ({"archs": "sm_90"}, {}, "-C archs: unknown setting 'archs'; what is built for which hardware is said by the profile"),
        ({"label": "cu130"}, {}, "-C label: 'cu130' is neither on nor off"),
        ({"cmake.define.PELTON_PROFILE": "x"}, {}, "PELTON_PROFILE follows from the plan; say it with -C profile=NAME"),
        ({"cmake.args": ["-DX=1", "-DPELTON_PROFILE=x"]}, {}, "-C cmake.args: PELTON_PROFILE follows from the plan"),
        ({"cmake.define.CMAKE_CUDA_ARCHITECTURES": "80"}, {}, "CMAKE_CUDA_ARCHITECTURES follows from the plan"),
        ({"cmake.define.CMAKE_CUDA_COMPILER": "/x/nvcc"}, {}, "-C cmake.define.CMAKE_CUDA_COMPILER: the plan says which compiler it is; set the variable CUDACXX"),
        ({"cmake.define.CMAKE_CXX_COMPILER:STRING": "g++"}, {}, "set the variable CXX"),
        ({"skbuild.cmake.define.CMAKE_CUDA_HOST_COMPILER": "g++"}, {}, "set the variable CXX"),
        ({"cmake.define.CMAKE_HIP_COMPILER": "hipcc"}, {}, "set the variable HIPCXX"),
        ({"cmake.args": "-DCMAKE_HIP_COMPILER=hipcc"}, {}, "-C cmake.args: the plan says which compiler it is"),
        ({"cmake.args": ["-G Ninja", "-DNONSENSE=1"]}, {}, "-C cmake.args: NONSENSE is no definition that this build reads"),
        ({"cmake.define.CMAKE_CXX_COMPILER_LAUNCER": "ccache"}, {}, "did you mean 'CMAKE_CXX_COMPILER_LAUNCHER'?"),
        ({"cmake.define.CMAKE_CXX_FLAGS": "-march=native"}, {}, "CMAKE_CXX_FLAGS follows from the plan"),
        ({"wheel.tags": "py3-none-any"}, {}, "-C wheel.tags: the wheel's tag follows from the plan"),
        ({"skbuild.wheel.py-api": "cp312"}, {}, "-C skbuild.wheel.py-api: the wheel's tag follows from the plan"),
        ({}, {"PELTON_TARGET_DEVICE": "gpu"}, "did you mean cuda or rocm? allowed: cpu, cuda, rocm"),
        ({}, {"PELTON_TARGET_DEVICE": "cdua"}, "did you mean 'cuda'?"),
        ({}, {"PELTON_ENABLE_MARLN": "1"}, "PELTON_ENABLE_MARLN is unknown; did you mean 'PELTON_ENABLE_MARLIN'?"),
        ({}, {"PELTON_PROFIL": "x"}, "did you mean 'PELTON_PROFILE'?"),
        ({}, {"PELTON_ENABLE_MARLIN": "2"}, "PELTON_ENABLE_MARLIN: '2' is neither on nor off"),
        ({}, {"USE_FAST_MATH": "fast"}, "USE_FAST_MATH: 'fast' is neither on nor off"),
        ({}, {"MAX_JOBS": "0"}, "MAX_JOBS: '0' is no number of jobs"),
        ({}, {"MAX_JOBS": "-2"}, "MAX_JOBS: '-2' is no number of jobs"),
        ({}, {"MAX_JOBS": "many"}, "MAX_JOBS: 'many' is no number of jobs"),
        ({}, {"MAX_JOBS": "2.5"}, "MAX_JOBS: '2.5' is no number of jobs"),
        ({}, {"MAX_JOBS": "٣"}, "is no number of jobs"),
        # A value that loses has to be sound too.
        ({"jobs": "2"}, {"MAX_JOBS": "x"}, "MAX_JOBS: 'x' is no number of jobs"),
        ({"feature.marlin": "on"}, {"PELTON_ENABLE_MARLIN": "x"}, "PELTON_ENABLE_MARLIN: 'x' is neither on nor off"),
    ],
)  # fmt: skip
def test_refuses(config: ConfigSettings, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ChoiceError) as caught:
        choices(config, **environ)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("TORCH_CUDA_ARCH_LIST", "key target.arch"),
        ("PYTORCH_ROCM_ARCH", "key target.arch"),
        ("CUDAARCHS", "key target.arch"),
        ("CXXFLAGS", "compiler flags follow from the profile"),
        ("CMAKE_ARGS", "-C cmake.define.NAME=VALUE"),
        ("SKBUILD_CMAKE_ARGS", "-C cmake.define.NAME=VALUE"),
        ("SKBUILD_BUILD_DIR", "-C build.dir=VALUE"),
        ("CMAKE_BUILD_PARALLEL_LEVEL", "set MAX_JOBS"),
        ("CUDAHOSTCXX", "set CXX"),
        ("NVCC_CCBIN", "set CXX"),
        ("NVCC_APPEND_FLAGS", "compiler flags follow from the profile"),
        ("DESTDIR", "the build says this itself"),
        ("CMAKE_GENERATOR", "the build says this itself"),
        ("CMAKE_INSTALL_MODE", "the build says this itself"),
        ("CMAKE_TOOLCHAIN_FILE", "the build says this itself"),
        ("LD_RUN_PATH", "the build says this itself"),
    ],
)
def test_variable_that_is_not_used_is_named_and_dropped(name: str, says: str) -> None:
    made = choices(None, **{name: "some value"})
    assert len(made.notes) == 1
    assert made.notes[0].startswith(f"{name}=some value is not used: ") and says in made.notes[0]
    assert shown(made) == {}
    assert scrubbed({name: "x", "PATH": "p"}) == {"PATH": "p"}


def test_variables_without_meaning_here_are_let_be() -> None:
    made = choices(None, HOME="/h", MAKEFLAGS="-j4", VLLM_TARGET_DEVICE="cuda")
    assert made == Choices()


def test_what_the_wrapped_backend_gets() -> None:
    given = {"profile": "a", "feature.awq": "on", "jobs": "1", "cmake.build-type": "Debug", "build-dir": "b"}
    assert pass_through(given) == {"cmake.build-type": "Debug", "build-dir": "b"}
    assert pass_through(None) == {}


words = st.sampled_from(("", " ", "on", "off", "yes", "0", "2", "cpu", "x", " on "))


@given(
    st.dictionaries(
        st.sampled_from(("profile", "feature.awq", "jobs", "cmake.x", "y")), st.lists(words, max_size=2)
    )
)
def test_any_config_settings_give_choices_or_one_line(config: dict[str, list[str]]) -> None:
    try:
        made = choices(config)
    except ChoiceError as error:
        assert "\n" not in str(error)
    else:
        awq = made.features.get("awq")
        assert awq is None or awq.value in ("on", "off")
        assert "y" not in config


def test_only_one_module_reads_the_environment() -> None:
    readers = []
    for path in sorted((plan_cases.ROOT / "python/pelton_build").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "os.environ",
                "os.getenv",
                "os.environb",
            ):
                readers.append(path.name)
    assert set(readers) == {"settings.py"}
