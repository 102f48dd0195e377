"""The resolver: a table for every decision, and that a plan is a pure function of what goes in."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plan_cases
from pelton_build.errors import BuildError, ChoiceError, PlanError, ProfileError, ToolchainError
from pelton_build.plan import Plan, Setting, TorchHeaders
from pelton_build.profile import profile_names
from pelton_build.resolve import resolve, torch_target
from pelton_build.settings import Choices
from pelton_build.table import parse_table
from pelton_build.toolchain import Probe, Toolchain
from pelton_build.values import Version
from plan_cases import BARE, CPU, CUDA, FULL, GCC, HIP, NVCC, PROFILES, ROCM, TORCH, plan_for, with_tool

AWQ_ON = Choices(features={"awq": Setting("feature.awq", "on", "-C feature.awq=")})
FEATURES = "[features]\nawq = {0}\nmarlin = {1}\n"


def included(plan: Plan) -> dict[str, tuple[str, str]]:
    return {source.path: (source.role, source.language) for source in plan.sources}


def refusal(
    kind: type[BuildError], text: str, toolchain: Toolchain = FULL, choices: Choices | None = None
) -> str:
    with pytest.raises(kind) as caught:
        plan_for(text, choices, toolchain)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            CPU,
            {
                "common/op.cpp": ("op", "CXX"),
                "common/graph.cpp": ("op", "CXX"),
                "norm/op.cpp": ("op", "CXX"),
                "norm/cpu.cpp": ("cpu", "CXX"),
                "sampling/op.cpp": ("op", "CXX"),
                "sampling/cpu.cpp": ("cpu", "CXX"),
                "host/module.cpp": ("host", "CXX"),
            },
        ),
        (
            CPU + FEATURES.format("true", "false"),
            {
                "common/op.cpp": ("op", "CXX"),
                "common/graph.cpp": ("op", "CXX"),
                "norm/op.cpp": ("op", "CXX"),
                "norm/cpu.cpp": ("cpu", "CXX"),
                "sampling/op.cpp": ("op", "CXX"),
                "sampling/cpu.cpp": ("cpu", "CXX"),
                "awq/op.cpp": ("op", "CXX"),
                "awq/cpu.cpp": ("cpu", "CXX"),
                "quant/cpu/op.cpp": ("op", "CXX"),
                "quant/cpu/cpu.cpp": ("cpu", "CXX"),
                "host/module.cpp": ("host", "CXX"),
            },
        ),
        (
            CUDA + FEATURES.format("true", "true"),
            {
                "common/op.cpp": ("op", "CXX"),
                "common/gpu.cu": ("gpu", "CUDA"),
                "norm/op.cpp": ("op", "CXX"),
                "norm/gpu.cu": ("gpu", "CUDA"),
                "awq/op.cpp": ("op", "CXX"),
                "awq/gpu.cu": ("gpu", "CUDA"),
                "marlin/op.cpp": ("op", "CXX"),
                "marlin/gpu.cu": ("gpu", "CUDA"),
                "marlin/sm90.cu": ("gpu", "CUDA"),
                "host/module.cpp": ("host", "CXX"),
            },
        ),
        (
            ROCM,
            {
                "common/op.cpp": ("op", "CXX"),
                "norm/op.cpp": ("op", "CXX"),
                "norm/gpu.cu": ("gpu", "HIP"),
                "host/module.cpp": ("host", "CXX"),
            },
        ),
    ],
)
def test_sources_in(text: str, expected: dict[str, tuple[str, str]]) -> None:
    assert included(plan_for(text)) == expected


def test_every_source_is_in_or_out_with_a_reason() -> None:
    table = plan_cases.table()
    every = {
        source.path
        for family in table.families
        for source in (*family.op, *family.host, *(s for sources in family.device.values() for s in sources))
    }
    for text in PROFILES.values():
        plan = plan_for(text)
        paths = [source.path for source in (*plan.sources, *plan.excluded)]
        assert set(paths) == every
        assert all(source.reason for source in (*plan.sources, *plan.excluded))
        assert not {source.path for source in plan.sources} & {source.path for source in plan.excluded}


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        (CPU, "norm/gpu.cu", "for backend cuda, and this plan is for cpu"),
        (CPU, "awq/cpu.cpp", "feature awq is off"),
        (CPU, "quant/cpu/cpu.cpp", "features awq and gptq are off"),
        (CUDA + FEATURES.format("true", "true"), "quant/cpu/op.cpp", "not needed for cuda: awq and marlin do it"),
        (CPU + FEATURES.format("false", "false"), "marlin/gpu.cu", "for backend cuda, and this plan is for cpu"),
        (CUDA, "sampling/op.cpp", "not needed for cuda: torch does it"),
        (CUDA, "common/graph.cpp", "for backend cpu, and this plan is for cuda"),
        (ROCM, "common/gpu.cu", "for backend cuda, and this plan is for rocm"),
        (CUDA, "marlin/sm90.cu", "feature marlin is off"),
        (CUDA.replace(', "sm_90a"', "") + FEATURES.format("false", "true"), "marlin/sm90.cu",
         "for sm_90a alone, and target.arch is sm_80"),
    ],
)  # fmt: skip
def test_reason_for_being_out(text: str, path: str, reason: str) -> None:
    assert {source.path: source.reason for source in plan_for(text).excluded}[path] == reason


@pytest.mark.parametrize(
    ("features", "brought"),
    [("awq", "feature awq"), ("gptq", "feature gptq"), ("gptq awq", "feature awq, gptq"), ("", "")],
)
def test_any_feature_of_a_list_brings_the_family(features: str, brought: str) -> None:
    text = CPU + "[features]\n" + "".join(f"{name} = true\n" for name in features.split())
    reasons = {source.path: source.reason for source in plan_for(text).sources}
    if brought:
        assert reasons["quant/cpu/cpu.cpp"].endswith(brought)
    else:
        assert "quant/cpu/cpu.cpp" not in reasons


def test_what_a_feature_defines_reaches_all_device_code_and_nothing_else() -> None:
    for text, state in ((CUDA, "on"), (CUDA, "off"), (ROCM, "on")):
        switch = Setting("feature.fast-math", state, "USE_FAST_MATH")
        plan = plan_for(text, Choices(features={"fast-math": switch}))
        for source in plan.sources:
            expected = source.role == "gpu" and state == "on"
            assert ("LIB_FAST_MATH=1" in source.definitions) is expected, source.path
        assert plan.label.endswith(".fastmath") is (state == "on")


def test_a_feature_that_only_defines_something_needs_device_code() -> None:
    table = plan_cases.TABLE.replace('["cuda", "rocm"]', '["cuda", "rocm", "cpu"]')
    table = table.replace('cpu = ["norm', 'host = ["norm').replace('cpu = ["samp', 'host = ["samp')
    table = table.replace('cpu = ["awq', 'host = ["awq').replace('cpu = ["quant', 'host = ["quant')
    profile = plan_cases.profile(CPU + "[features]\nfast-math = true\n")
    with pytest.raises(PlanError, match=r"no family of kernels\.toml implements it for backend cpu yet"):
        resolve(profile, Choices(), parse_table(re.sub("(?m)^run-time.*", "", table)), FULL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CPU, ()),
        (CPU + "[features]\ngptq = true\n", ("AVX_VNNI",)),
        (CPU.replace("v3", "v4") + "[features]\nawq = true\n", ("AVX512_VNNI",)),
        (CUDA + "[features]\nawq = true\n", ()),
    ],
)
def test_instructions_behind_a_question_to_the_cpu(text: str, expected: tuple[str, ...]) -> None:
    plan = plan_for(text)
    assert plan.run_time == expected
    assert plan.public()["run_time"] == list(expected)


def test_archs_whose_code_has_to_hold_matrix_instructions() -> None:
    text = plan_cases.TABLE.replace("[family.norm]", "[family.norm]\nmatrix = ['gfx90a', 'gfx1100']")
    for profile, expected in (
        (ROCM, {"norm": ("gfx90a",)}),
        (ROCM.replace("gfx90a", "gfx1030"), {}),
        (CUDA, {}),
    ):
        plan = resolve(plan_cases.profile(profile), Choices(), parse_table(text), FULL)
        assert plan.matrix == expected
        assert plan.public()["matrix"] == {family: list(archs) for family, archs in expected.items()}


def test_source_that_needs_a_newer_toolkit_is_out() -> None:
    table = parse_table(plan_cases.TABLE.replace('toolkit = ">=12.8"', 'toolkit = ">=13.1"'))
    profile = plan_cases.profile(CUDA + FEATURES.format("false", "true"))
    plan = resolve(profile, Choices(), table, FULL)
    assert {s.path: s.reason for s in plan.excluded}["marlin/sm90.cu"] == "needs nvcc >=13.1, found 13.0.88"


def test_archs_flags_and_definitions() -> None:
    cpu = {source.path: source for source in plan_for(CPU + FEATURES.format("true", "false")).sources}
    assert cpu["norm/cpu.cpp"].flags == ("-march=x86-64-v3",)
    assert cpu["norm/op.cpp"].flags == () and cpu["norm/op.cpp"].archs == ()
    assert cpu["norm/op.cpp"].definitions == ("TORCH_TARGET_VERSION=0x020a000000000000ULL",)
    assert cpu["awq/cpu.cpp"].definitions == ("AWQ=1",)
    assert cpu["awq/op.cpp"].definitions[-1] == "AWQ=1"
    cuda = {source.path: source for source in plan_for(CUDA + FEATURES.format("false", "true")).sources}
    assert cuda["marlin/gpu.cu"].archs == ("sm_80", "sm_90a")
    assert cuda["marlin/sm90.cu"].archs == ("sm_90a",)
    assert cuda["marlin/sm90.cu"].definitions == ("M=1", "LIB_GPU=1", "LIB_HAS_SM90=1")
    assert cuda["marlin/gpu.cu"].definitions == ("LIB_GPU=1", "LIB_HAS_SM90=1")
    assert cuda["marlin/op.cpp"].definitions[1:] == ("LIB_GPU=1", "LIB_HAS_SM90=1")
    assert cuda["norm/gpu.cu"].definitions == ("LIB_GPU=1",), "only the family that has the file"
    assert cuda["marlin/sm90.cu"].reason == "cuda code for sm_90a, feature marlin"
    without = plan_for(CUDA.replace(', "sm_90a"', "") + FEATURES.format("false", "true")).sources
    assert not [d for source in without for d in source.definitions if "HAS" in d]
    rocm = {source.path: source for source in plan_for(ROCM).sources}
    assert rocm["norm/gpu.cu"].definitions == ("LIB_GPU=1", "LIB_ROCM=1")


def test_a_family_without_source_for_the_backend_is_an_error_unless_something_does_its_work() -> None:
    text = plan_cases.TABLE.replace('cuda = "torch does it", ', "")
    plan = resolve(plan_cases.profile(CUDA), Choices(), parse_table(text), FULL)
    assert plan.problems == (
        "kernels.toml: no cuda source for sampling; add it to [family.sampling], or say there with instead.cuda "
        "what does the work",
    )
    assert {s.path: s.reason for s in plan.excluded}["sampling/op.cpp"] == "no cuda source in kernels.toml"
    assert resolve(plan_cases.profile(CPU), Choices(), parse_table(text), FULL).problems == ()


@pytest.mark.parametrize(
    ("version", "value"), [("2.10", "0x020a000000000000ULL"), ("2.13.1", "0x020d010000000000ULL")]
)
def test_torch_target(version: str, value: str) -> None:
    assert torch_target(Version.parse(version)) == value


def test_nothing_to_build_for_a_backend() -> None:
    table = parse_table(
        plan_cases.TABLE[: plan_cases.TABLE.index("[family.common]")] + "[family.norm]\ncpu = ['a.cpp']\n"
    )
    plan = resolve(plan_cases.profile(CUDA), Choices(), table, FULL)
    assert plan.sources == ()
    assert [source.reason for source in plan.excluded] == ["for backend cpu, and this plan is for cuda"]
    assert plan.problems == ("kernels.toml has no source for backend cuda yet, so there is nothing to build",)


def test_support_is_out_when_nothing_needs_it() -> None:
    table = parse_table(
        plan_cases.TABLE[: plan_cases.TABLE.index("[family.common]")]
        + "[family.common]\nop = ['c.cpp']\n[family.norm]\ncpu = ['a.cpp']\n[family.host]\nhost = ['h.cpp']\n"
    )
    plan = resolve(plan_cases.profile(CUDA), Choices(), table, FULL)
    assert plan.sources == ()
    assert [source.reason for source in plan.excluded] == [
        "supports other families, and none is in for backend cuda",
        "for backend cpu, and this plan is for cuda",
        "supports other families, and none is in for backend cuda",
    ]
    assert [s.path for s in resolve(plan_cases.profile(CPU), Choices(), table, FULL).sources] == [
        "c.cpp",
        "a.cpp",
        "h.cpp",
    ]


# --- features and label ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen", "label"),
    [
        (CPU, {}, "cpu.test"),
        (CPU, {"awq": "off"}, "cpu.test"),
        (CPU, {"awq": "on"}, "cpu.test.awq"),
        (CPU + FEATURES.format("true", "false"), {"awq": "on"}, "cpu.test"),
        (CPU + FEATURES.format("true", "false"), {"awq": "off"}, "cpu.test.noawq"),
        (CUDA, {"awq": "on", "marlin": "on"}, "cu130.test.awq.marlin"),
        (CUDA + FEATURES.format("true", "false"), {"awq": "off", "marlin": "on"}, "cu130.test.marlin.noawq"),
    ],
)
def test_a_changed_feature_set_changes_the_label(text: str, chosen: dict[str, str], label: str) -> None:
    features = {name: Setting(f"feature.{name}", value, "test") for name, value in chosen.items()}
    plan = plan_for(text, Choices(features=features))
    assert plan.label == label
    assert plan.wheel_version == f"0.1.0+{label}"
    assert plan.wheel_name == f"pack-0.1.0+{label}-py3-none-manylinux_2_28_x86_64.whl"


NO_LABEL = Setting("label", "off", "-C label=")


@pytest.mark.parametrize("version", ["0.1.0", "0.3.1.dev2+g12ab.dirty"])
def test_a_wheel_without_label(version: str) -> None:
    """The version alone tells it from the wheel with the label: all else of the plan is the same."""
    with_label, plan = plan_for(CPU, version=version), plan_for(CPU, Choices(label=NO_LABEL), version=version)
    assert plan.label == ""
    assert plan.wheel_version == plan.version == version
    assert plan.wheel_name == f"pack-{version}-py3-none-manylinux_2_28_x86_64.whl"
    assert NO_LABEL in plan.settings
    same = {"label": with_label.label, "wheel_version": with_label.wheel_version, "settings": ()}
    assert replace(plan, **same) == replace(with_label, settings=())
    assert plan_for(CPU, Choices(label=Setting("label", "on", "-C label="))).label == "cpu.test"


def test_a_changed_feature_set_keeps_its_label() -> None:
    features = {"awq": Setting("feature.awq", "off", "USE_IT")}
    text = CPU + FEATURES.format("true", "false")
    said = refusal(ChoiceError, text, choices=Choices(label=NO_LABEL, features=features))
    assert "-C label=off: the features differ from the profile's (awq=off)" in said


def test_dirty_version_has_one_plus() -> None:
    assert plan_for(CPU, version="0.3.1.dev2+g12ab.dirty").wheel_version == "0.3.1.dev2+cpu.test.g12ab.dirty"


def test_where_a_feature_came_from() -> None:
    chosen = {"awq": Setting("feature.awq", "off", "-C feature.awq=", ("on (PELTON_ENABLE_AWQ)",))}
    plan = plan_for(CPU + "[features]\nawq = true\n", Choices(features=chosen))
    awq, marlin, *_ = plan.features
    assert (awq.enabled, awq.origin, awq.changed) == (False, "-C feature.awq=", True)
    assert awq.overridden == ("on (PELTON_ENABLE_AWQ)", "on (build_profiles/test.toml)")
    assert (marlin.enabled, marlin.origin, marlin.changed) == (False, "default", False)


@pytest.mark.parametrize(
    ("text", "feature", "message"),
    [
        (CPU, "marlin", "it is a feature of cuda, and the profile's backend is cpu"),
        (CPU, "fast-math", "it is a feature of cuda and rocm"),
        (CUDA, "gptq", "no family of kernels.toml implements it for backend cuda yet"),
        (ROCM, "awq", "it is a feature of cpu and cuda"),
    ],
)
def test_feature_that_cannot_be_had(text: str, feature: str, message: str) -> None:
    chosen = {feature: Setting(f"feature.{feature}", "on", "USE_IT")}
    said = refusal(PlanError, text, choices=Choices(features=chosen))
    assert message in said and f"feature {feature!r} is on (USE_IT)" in said
    assert "build_profiles/test.toml" in refusal(PlanError, text + f"[features]\n{feature} = true\n")
    plan_for(text, Choices(features={feature: Setting(f"feature.{feature}", "off", "USE_IT")}))


def test_profile_with_an_undeclared_feature() -> None:
    assert "did you mean 'marlin'?" in refusal(ProfileError, CPU + "[features]\nmarln = false\n")


# --- choices ---------------------------------------------------------------------------------------------------------


def test_provenance_of_the_profile() -> None:
    chosen = Setting("profile", "test", "-C profile=", ("cuda-sm90 (PELTON_PROFILE)",))
    plan = plan_for(CPU, Choices(profile=chosen, device=Setting("d", "cuda", "PELTON_TARGET_DEVICE")))
    assert plan.settings[0] == Setting(
        "profile", "test", "-C profile=", ("cuda-sm90 (PELTON_PROFILE)", "cuda (PELTON_TARGET_DEVICE)")
    )


def test_two_variables_that_contradict_each_other() -> None:
    choices = Choices(
        profile=Setting("profile", "test", "PELTON_PROFILE"),
        device=Setting("d", "cpu", "PELTON_TARGET_DEVICE"),
    )
    said = refusal(ChoiceError, CUDA, choices=choices)
    assert "PELTON_PROFILE=test (backend cuda) and PELTON_TARGET_DEVICE=cpu" in said
    plan_for(CPU, choices)


def test_notes_name_the_profile() -> None:
    plan = plan_for(CPU, Choices(notes=("X is not used: see <profile>, key target.arch",)))
    assert plan.notes == ("X is not used: see build_profiles/test.toml, key target.arch",)


# --- toolchain -------------------------------------------------------------------------------------------------------


def test_a_bare_machine_can_plan_and_says_what_is_missing() -> None:
    for text, missing in ((CPU, "no C++ compiler"), (CUDA, "no CUDA compiler"), (ROCM, "no ROCm compiler")):
        plan = plan_for(text, toolchain=BARE)
        assert plan.sources
        assert any(missing in problem for problem in plan.problems)
        assert any("no CPython with headers" in note for note in plan.notes)
        assert plan.torch == TorchHeaders(
            "", "", "build requirement, no such torch found here", "torch==2.13.0"
        )
        assert "torch==2.13.0" in plan.build_requires
    assert plan_for(CPU).problems == plan_for(CUDA).problems == ()
    assert plan_for(CPU).build_requires == ()


def test_rocm_is_planned() -> None:
    plan = plan_for(ROCM)
    (source,) = (source for source in plan.sources if source.role == "gpu")
    assert (source.path, source.language, source.archs) == ("norm/gpu.cu", "HIP", ("gfx90a",))
    assert {"LIB_GPU=1", "LIB_ROCM=1"} <= set(source.definitions)
    assert plan.problems == ()


def test_a_hip_compiler_that_does_not_know_the_gpu() -> None:
    old = with_tool(FULL, rocm=Probe(replace(HIP, archs=("gfx906", "gfx1030"))))
    said = refusal(ToolchainError, ROCM, old)
    assert "target.arch: 'gfx90a' is not known to hip-clang of ROCm 6.4.1" in said and "HIPCXX" in said
    assert (
        plan_for(ROCM, toolchain=with_tool(FULL, rocm=Probe(replace(HIP, archs=("gfx90a",))))).problems == ()
    )


@pytest.mark.parametrize(
    ("archs", "version", "expected"),
    [
        ('"sm_90a"', "13.1.20", ("13.0", "")),
        ('"sm_80", "compute_80"', "13.1.20", ("13.0", "13.1")),
        ('"sm_80", "compute_80"', "12.8.93", ("12.0", "12.8")),
    ],
)
def test_the_driver_that_a_wheel_needs(archs: str, version: str, expected: tuple[str, str]) -> None:
    """Machine code runs with every driver of the toolkit's major version; PTX needs one as new as the toolkit."""
    nvcc = replace(NVCC, version=version, headers_version=".".join(version.split(".")[:2]))
    plan = plan_for(CUDA.replace('"sm_80", "sm_90a"', archs), toolchain=with_tool(FULL, cuda=Probe(nvcc)))
    assert (plan.minimum_driver, plan.minimum_driver_ptx) == expected
    public = plan.public()
    assert (public["minimum_driver"], public["minimum_driver_ptx"]) == expected
    assert (plan_for(CPU).minimum_driver, plan_for(CPU).minimum_driver_ptx) == ("", "")


def test_cuda_compiler_from_the_package_index() -> None:
    text = CUDA.replace("[wheel]", 'cuda-package = "13.0.2"\n[wheel]')
    plan = plan_for(text, toolchain=with_tool(FULL, cuda=Probe()))
    assert plan.problems == ()
    assert plan.build_requires == (
        "cuda-toolkit[nvcc,cudart,cccl]==13.0.2",
        "nvidia-nvvm==13.0.*",
        "nvidia-cuda-crt==13.0.*",
    )
    assert plan.label == "cu130.test"
    assert plan_for(text).build_requires == ()


@pytest.mark.parametrize(
    ("text", "toolchain", "message"),
    [
        (
            CUDA,
            with_tool(
                FULL, cuda=Probe(replace(NVCC, version="12.0.140", headers_version=""), others=(NVCC,))
            ),
            "toolchain.cuda: found nvcc 12.0.140 (/opt/cuda/bin/nvcc, from PATH, no headers beside it), needed "
            ">=12.8,<14; also seen: nvcc 13.0.88 (/opt/cuda/bin/nvcc, from PATH); set CUDA_HOME",
        ),
        (CUDA, with_tool(FULL, cuda=Probe(replace(NVCC, version="14.1"))), "needed >=12.8,<14"),
        (
            CUDA,
            with_tool(FULL, cuda=Probe(replace(NVCC, version="12.0", origin="CUDACXX"))),
            "; set CUDACXX to",
        ),
        (CUDA, with_tool(FULL, cuda=Probe(replace(NVCC, version=""))), "nvcc of unknown version"),
        (CUDA, with_tool(FULL, cuda=Probe(replace(NVCC, headers_version="12.8"))), "are of two versions"),
        (CUDA, with_tool(FULL, cuda=Probe(replace(NVCC, headers_version=""))), "is not a whole toolkit"),
        (
            CUDA,
            with_tool(FULL, cuda=Probe(replace(NVCC, runtime=""))),
            "has no libcudart_static.a in /opt/cuda; install the runtime's development files, or set CUDA_HOME",
        ),
        (
            CUDA,
            with_tool(FULL, cxx=Probe(replace(GCC, name="clang", version="21.1.0"))),
            "clang 21.1.0 (/usr/bin/g++, from PATH) is too new for nvcc 13.0.88, which accepts clang up to 20; install "
            "clang-20 and set CXX=clang++-20",
        ),
        (
            CUDA,
            with_tool(FULL, cuda=Probe(problem="CUDA_HOME=/x: no such folder")),
            "CUDA_HOME=/x: no such folder",
        ),
        (
            CUDA,
            with_tool(FULL, cxx=Probe(replace(GCC, version="16.1.0"))),
            "accepts gcc up to 15; install g++-15",
        ),
        (
            ROCM,
            with_tool(FULL, rocm=Probe(replace(HIP, version="5.2"))),
            "toolchain.rocm: found hip-clang 5.2",
        ),
        (CPU, with_tool(FULL, cxx=Probe(problem="CXX=/x: there is no such program")), "CXX=/x"),
        (
            CPU + '[toolchain]\ngcc = ">=13"\n',
            FULL,
            "toolchain.gcc: found gcc 12.2.0 (/usr/bin/g++, from PATH), needed >=13",
        ),
        (CPU, with_tool(FULL, cxx=Probe(replace(GCC, version=""))), "gcc of unknown version"),
        (CPU, replace(FULL, torch_problem="PELTON_TORCH_DIR=/x: holds no torch"), "PELTON_TORCH_DIR=/x"),
        (
            CPU,
            replace(FULL, torch=(replace(TORCH, version="2.11.0", origin="PELTON_TORCH_DIR"),)),
            "torch 2.11.0 (/env/torch, from PELTON_TORCH_DIR): headers of torch >=2.13 are needed",
        ),
    ],
)
def test_tools_that_will_not_do(text: str, toolchain: Toolchain, message: str) -> None:
    assert message in refusal(ToolchainError, text, toolchain)


def test_tools_of_other_backends_do_not_matter() -> None:
    broken = Probe(problem="unusable")
    plan_for(CPU, toolchain=with_tool(FULL, cuda=broken, rocm=broken))
    plan_for(CUDA, toolchain=with_tool(FULL, rocm=broken))
    # nvcc's limit is for gcc under nvcc.
    plan_for(CPU, toolchain=with_tool(FULL, cxx=Probe(replace(GCC, version="16.1.0"))))


@pytest.mark.parametrize(("version", "ok"), [("13.0.88", False), ("12.9.1", True)])
def test_arch_that_was_renamed(version: str, ok: bool) -> None:
    text = CUDA.replace('"sm_80", "sm_90a"', '"sm_101"')
    nvcc = Probe(replace(NVCC, version=version, headers_version=version[:4]))
    if ok:
        plan_for(text, toolchain=with_tool(FULL, cuda=nvcc))
    else:
        assert "'sm_110' (renamed)" in refusal(ProfileError, text, with_tool(FULL, cuda=nvcc))
    # Without a compiler nobody knows yet.
    plan_for(text, toolchain=BARE)


def test_torch_that_is_too_old_is_passed_over_with_a_line() -> None:
    old = replace(TORCH, version="2.11.0", path="/old")
    plan = plan_for(CPU, toolchain=replace(FULL, torch=(old, TORCH)))
    assert plan.torch == TORCH
    assert plan.notes[0].startswith(
        "torch 2.11.0 (/old, from the build environment): headers of torch >=2.13 are needed"
    )


@pytest.mark.parametrize(
    ("archs", "old"),
    [('"sm_75", "sm_90a"', "sm_75"), ('"sm_80", "compute_75"', "compute_75"), ('"sm_80", "sm_100a"', "")],
)
def test_an_arch_that_the_kernels_are_not_written_for(archs: str, old: str) -> None:
    table = parse_table(plan_cases.TABLE.replace("[library]", "[library]\noldest = { cuda = 'sm_80' }"))
    profile = plan_cases.profile(CUDA.replace('"sm_80", "sm_90a"', archs).replace(">=12.8,<14", ">=12.9,<13"))
    toolchain = with_tool(FULL, cuda=Probe(replace(NVCC, version="12.9.1", headers_version="12.9")))
    if old:
        with pytest.raises(
            ProfileError, match=rf"target\.arch: '{old}' is older than 'sm_80', which the kernels need"
        ):
            resolve(profile, Choices(), table, toolchain)
    else:
        assert resolve(profile, Choices(), table, toolchain).problems == ()


def test_a_broken_compiler_that_is_passed_over_is_noted() -> None:
    broken = ("/usr/bin/nvcc, which ends with status 1 (no licence)", "nvcc on PATH")
    toolchain = with_tool(FULL, cuda=Probe(NVCC, looked=broken), cxx=Probe(GCC, looked=("g++ on PATH",)))
    (note,) = plan_for(CUDA, toolchain=toolchain).notes
    assert note == f"{broken[0]}; passed over for {NVCC.path}"
    assert plan_for(CPU, toolchain=toolchain).notes == ()


def test_another_machine() -> None:
    plan = plan_for(CPU, toolchain=replace(FULL, system="darwin", machine="aarch64"))
    assert plan.problems == (
        "this machine is darwin on aarch64, and the profile is for linux on x86_64; build it on such a machine",
    )


# --- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores", "memory", "count", "gpu_count"),
    [
        (CPU, 8, 16 << 30, 8, 8),
        (CPU, 64, 4 << 30, 8, 8),
        (CPU, 2, 64 << 30, 2, 2),
        (CPU, 8, 1 << 20, 1, 1),
        (CUDA, 8, 4 << 30, 8, 4),
        (CUDA, 8, 3 << 29, 3, 1),
    ],
)
def test_jobs(text: str, cores: int, memory: int, count: int, gpu_count: int) -> None:
    jobs = plan_for(text, toolchain=replace(FULL, cores=cores, memory=memory)).jobs
    assert (jobs.count, jobs.gpu_count) == (count, gpu_count)
    assert f"{cores} cores (affinity)" in jobs.arithmetic and f"= {count}" in jobs.arithmetic


def test_max_jobs_wins_and_the_arithmetic_stays() -> None:
    plan = plan_for(CUDA, Choices(jobs=Setting("jobs", "32", "MAX_JOBS")))
    assert (plan.jobs.count, plan.jobs.gpu_count) == (32, 32)
    assert plan.jobs.arithmetic.startswith("32 (MAX_JOBS); calculated: min(8 cores")
    assert plan.jobs.arithmetic.endswith("32 jobs may need 32.0 GiB")
    assert {s.name: s for s in plan.settings}["jobs"].origin == "MAX_JOBS"


# --- as a whole ------------------------------------------------------------------------------------------------------

toolchains = st.builds(
    Toolchain,
    cxx=st.sampled_from((Probe(), Probe(GCC), Probe(problem="CXX=x: no"))),
    cuda=st.sampled_from((Probe(), Probe(NVCC), Probe(replace(NVCC, version="12.0")))),
    rocm=st.sampled_from((Probe(), Probe(HIP))),
    torch=st.sampled_from(((), (TORCH,))),
    pythons=st.sampled_from(((), (plan_cases.PYTHON,))),
    cores=st.integers(1, 256),
    memory=st.integers(0, 1 << 42),
)


@given(st.sampled_from(sorted(PROFILES)), toolchains, st.sampled_from((Choices(), AWQ_ON)))
def test_equal_inputs_make_equal_plans_and_json_brings_them_back(
    name: str, toolchain: Toolchain, choices: Choices
) -> None:
    try:
        plan = plan_for(PROFILES[name], choices, toolchain)
    except BuildError as error:
        with pytest.raises(type(error), match=r"(?s).*"):
            plan_for(PROFILES[name], choices, toolchain)
        return
    assert plan == plan_for(PROFILES[name], choices, toolchain)
    assert plan.to_json() == plan_for(PROFILES[name], choices, toolchain).to_json()
    assert Plan.from_json(plan.to_json()) == plan
    assert 1 <= plan.jobs.gpu_count <= plan.jobs.count <= toolchain.cores or plan.jobs.count == 1


@pytest.mark.parametrize("name", profile_names(plan_cases.ROOT))
@pytest.mark.parametrize("toolchain", [BARE, FULL], ids=["bare", "full"])
def test_real_profiles(name: str, toolchain: Toolchain) -> None:
    profile, table = plan_cases.real_profile(name), plan_cases.real_table()
    plan = resolve(profile, Choices(), table, toolchain, "0.1.0")
    on = {feature.name for feature in plan.features if feature.enabled}
    built = {
        family.name
        for family in table.families
        if profile.target.backend in family.device and (not family.features or on & set(family.features))
    }
    assert built <= {source.family for source in plan.sources}
    assert plan.backend == name.split("-")[0]
    assert plan.platform_tag == "manylinux_2_28_x86_64"
