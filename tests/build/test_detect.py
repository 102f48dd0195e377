"""Detection: which profile a machine is, what it says when a driver misbehaves, and that it always ends."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import plan_cases
from pelton_build import detect as module
from pelton_build.arch import cpu_flags_of
from pelton_build.detect import Gpu, Hardware, detect, probe_hardware
from pelton_build.errors import DetectionError
from pelton_build.profile import Profile
from pelton_build.toolchain import Probe, Toolchain
from plan_cases import BARE, CPU, CUDA, FULL, NVCC, ROCM, script

V3, V4 = cpu_flags_of("x86-64-v3"), cpu_flags_of("x86-64-v4")
H100, A100, RTX3090 = (
    Gpu("cuda", "sm_90", "H100"),
    Gpu("cuda", "sm_80", "A100"),
    Gpu("cuda", "sm_86", "RTX 3090"),
)
B200, MI210, RX7900 = (
    Gpu("cuda", "sm_100", "B200"),
    Gpu("rocm", "gfx90a", "MI210"),
    Gpu("rocm", "gfx1100", "RX"),
)


def cuda(name: str, *archs: str) -> Profile:
    listed = ", ".join(f'"{arch}"' for arch in archs)
    return plan_cases.profile(CUDA.replace('"sm_80", "sm_90a"', listed), name)


PROFILES = (
    plan_cases.profile(CPU, "cpu-avx2"),
    plan_cases.profile(CPU.replace("v3", "v4"), "cpu-avx512"),
    cuda("cuda-sm80", "sm_80"),
    cuda("cuda-sm90", "sm_90a"),
    plan_cases.profile(ROCM, "rocm-gfx90a"),
    plan_cases.profile(ROCM.replace("gfx90a", "gfx1100"), "rocm-gfx1100"),
)
PTX = cuda("cuda-ptx", "compute_80")


@pytest.mark.parametrize(
    ("hardware", "toolchain", "device", "more", "name"),
    [
        (Hardware(cpu_flags=V3), FULL, None, (), "cpu-avx2"),
        (Hardware(cpu_flags=V4), FULL, None, (), "cpu-avx512"),
        (Hardware(cpu_flags=V4 - {"avx512vl"}), FULL, None, (), "cpu-avx2"),
        (Hardware(cpu_flags=None), FULL, None, (), "cpu-avx2"),
        (Hardware((H100,), V4), FULL, None, (), "cuda-sm90"),
        (Hardware((A100,), V4), FULL, None, (), "cuda-sm80"),
        (Hardware((RTX3090,), V4), FULL, None, (), "cuda-sm80"),
        (Hardware((RTX3090, H100), V4), FULL, None, (), "cuda-sm90"),
        (Hardware((B200,), V4), FULL, None, (), "cpu-avx512"),
        (Hardware((B200,), V4), FULL, None, (PTX,), "cuda-ptx"),
        (Hardware((H100,), V4), FULL, None, (PTX,), "cuda-sm90"),
        (Hardware((MI210,), V4), FULL, None, (), "rocm-gfx90a"),
        (Hardware((RX7900,), V4), FULL, None, (), "rocm-gfx1100"),
        (Hardware((H100,), V4), FULL, "cpu", (), "cpu-avx512"),
        (Hardware((H100, MI210), V4), FULL, "rocm", (), "rocm-gfx90a"),
        # A GPU without a toolkit that can be had is no reason for its profile.
        (Hardware((H100,), V4), BARE, None, (), "cpu-avx512"),
        (
            Hardware((H100,), V4),
            replace(FULL, cuda=Probe(replace(NVCC, version="12.0"))),
            None,
            (),
            "cpu-avx512",
        ),
        (Hardware((H100,), V4), replace(FULL, cuda=Probe(problem="CUDA_HOME=/x")), None, (), "cpu-avx512"),
        (Hardware((MI210,), V3), BARE, None, (), "cpu-avx2"),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch,
    hardware: Hardware,
    toolchain: Toolchain,
    device: str | None,
    more: tuple[Profile, ...],
    name: str,
) -> None:
    found = detect(hardware, (*PROFILES, *more), plan_cases.table(), toolchain, device)
    assert found.profile.name == name
    assert found.reason
    weighed = {profile.name for profile in (*PROFILES, *more) if device in (None, profile.target.backend)}
    assert {other for other, reason in found.rejected if reason} == weighed - {name}
    # The order of the profiles does not matter.
    assert detect(hardware, (*more, *PROFILES[::-1]), plan_cases.table(), toolchain, device) == found


def test_a_backend_without_sources_is_passed_over() -> None:
    table = plan_cases.table()
    no_cuda = replace(
        table, families=tuple(replace(f, device={"cpu": f.device.get("cpu", ())}) for f in table.families)
    )
    found = detect(Hardware((H100,), V3), PROFILES, no_cuda, FULL)
    assert found.profile.name == "cpu-avx2"
    assert dict(found.rejected)["cuda-sm90"] == "kernels.toml has no source for backend cuda yet"


def test_package_index_counts_as_a_toolkit() -> None:
    text = CUDA.replace("[wheel]", 'cuda-package = "13.0.2"\n[wheel]').replace('"sm_80", ', "")
    found = detect(Hardware((H100,), V3), [plan_cases.profile(text)], plan_cases.table(), BARE)
    assert found.profile.name == "test"


@pytest.mark.parametrize(
    ("hardware", "device", "message"),
    [
        (Hardware(cpu_flags=frozenset({"sse2"})), "cpu", "cpu-avx2: the CPU has no abm, avx, avx2"),
        (
            Hardware(cpu_flags=V4),
            "cuda",
            "no profile for backend cuda fits this machine (cuda-sm80: no such GPU; ",
        ),
        (Hardware((B200,), V4), "cuda", "cuda-sm90: for sm_90a, found sm_100"),
    ],
)
def test_no_profile_fits(hardware: Hardware, device: str, message: str) -> None:
    with pytest.raises(DetectionError) as caught:
        detect(hardware, PROFILES, plan_cases.table(), FULL, device)
    assert message in str(caught.value) and "name one with -C profile=NAME" in str(caught.value)


def test_a_broken_profile_does_not_stop_detection() -> None:
    broken = ("mine", "build_profiles/mine.toml: not valid TOML")
    found = detect(Hardware(cpu_flags=V3), PROFILES, plan_cases.table(), FULL, None, (broken,))
    assert found.profile.name == "cpu-avx2" and broken in found.rejected


def test_another_operating_system() -> None:
    with pytest.raises(DetectionError, match="for linux on x86_64"):
        detect(Hardware(cpu_flags=V4), PROFILES, plan_cases.table(), replace(FULL, system="darwin"))


# --- the machine -----------------------------------------------------------------------------------------------------


def hardware(tmp_path: Path, smi: str | None = None) -> Hardware:
    """This process's probe on a machine whose files are those below `tmp_path`, without an NVIDIA driver."""
    if smi is not None:
        script(tmp_path / "bin/nvidia-smi", smi)
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    # An interpreter that finds no driver, wherever the tests run.
    silent = script(tmp_path / "no-driver", "exit 0")
    return probe_hardware(environ, tmp_path, str(silent))


@pytest.mark.parametrize(
    ("smi", "note"),
    [
        ("echo No devices were found", "nvidia-smi says 'No devices were found'"),
        ("echo NVIDIA-SMI has failed; exit 9", "nvidia-smi ends with status 9 (NVIDIA-SMI has failed)"),
        ("echo '[N/A]'", "nvidia-smi says '[N/A]'"),
        ("exit 127", "nvidia-smi ends with status 127"),
        ("sleep 600", "nvidia-smi gives no answer within 0.5 s"),
        ("exit 0", None),
        (None, None),
    ],
)
def test_nvidia_smi_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smi: str | None, note: str | None
) -> None:
    """P33: no GPU, what the tool said, and never longer than the limit."""
    monkeypatch.setattr(module, "LIMIT", 0.5)
    found = hardware(tmp_path, smi)
    assert found.gpus == ()
    assert found.notes == ((note,) if note else ())


def test_nvidia_smi_that_answers(tmp_path: Path) -> None:
    found = hardware(tmp_path, "echo '9.0, NVIDIA H100 80GB HBM3'; echo '12.0'")
    assert found.gpus == (Gpu("cuda", "sm_90", "NVIDIA H100 80GB HBM3"), Gpu("cuda", "sm_120", "NVIDIA GPU"))


def test_driver_comes_before_nvidia_smi_and_may_crash(tmp_path: Path) -> None:
    script(tmp_path / "bin/nvidia-smi", "echo '8.0, from smi'")
    environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    works = script(tmp_path / "works", "echo '9.0, from the driver'")
    crashes = script(tmp_path / "crashes", "kill -SEGV $$")
    assert probe_hardware(environ, tmp_path, str(works)).gpus == (Gpu("cuda", "sm_90", "from the driver"),)
    assert probe_hardware(environ, tmp_path, str(crashes)).gpus == (Gpu("cuda", "sm_80", "from smi"),)


def test_the_real_question_to_the_driver_ends_without_a_traceback(tmp_path: Path) -> None:
    found = probe_hardware({"PATH": ""}, tmp_path, sys.executable)
    assert all("Traceback" not in note for note in found.notes)


def test_amd_gpus_are_read_from_the_kernel(tmp_path: Path) -> None:
    versions = ["0", "90010", "110000", "90402", "100306"]
    for number, version in enumerate(versions):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n")
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/9").mkdir()
    assert [gpu.arch for gpu in hardware(tmp_path).gpus] == ["gfx90a", "gfx1100", "gfx942", "gfx1036"]


def test_cpu_flags_are_those_that_all_processors_have(tmp_path: Path) -> None:
    assert hardware(tmp_path).cpu_flags is None
    (tmp_path / "proc").mkdir()
    processor = "processor : {0}\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: {1}\n\n"
    (tmp_path / "proc/cpuinfo").write_text(
        processor.format(0, "sse2 avx avx2") + processor.format(1, "sse2 avx")
    )
    found = hardware(tmp_path)
    assert found.cpu_flags == {"sse2", "avx"} and found.cpu_name == "A CPU @ 2 GHz"
    (tmp_path / "proc/cpuinfo").write_text("Processor: ARM\nFeatures: neon\n")
    assert hardware(tmp_path).cpu_flags is None
