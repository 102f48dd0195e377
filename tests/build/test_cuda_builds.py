"""Real builds of a small CUDA wheel, without a GPU: with this machine's nvcc, or with that of the package index."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pelton_build import audit
from pelton_build.plan import Tool
from pelton_build.toolchain import probe_cuda
from plan_cases import real_profile, script
from small_project import MISSING, Project, digest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

PROFILE = {"profile": "cuda-sm90"}
NVCC = probe_cuda(os.environ).tool
PACKAGES = ("cuda-toolkit[nvcc,cudart,cccl]==13.0.2", "nvidia-nvvm==13.0.*", "nvidia-cuda-crt==13.0.*")
VARIABLES = ("CUDACXX", "CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Way:
    """A way to a CUDA compiler: a command to build in, and variables."""

    within: Sequence[str] = ()
    environ: dict[str, str] = field(default_factory=dict)


def install_compiler(folder: Path) -> Path:
    """The compiler of the package index, in `folder`; as in the build environment of an isolated build."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the package index does not give the CUDA compiler: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_compiler(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> Way:
    """This machine's toolkit when the profile takes it, else that of the package index."""
    if NVCC is not None and NVCC.version in real_profile("cuda-sm90").toolchain.cuda and NVCC.runtime:
        return Way()
    return Way(environ={"PYTHONPATH": str(request.getfixturevalue("packages"))})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("plain") / "project")


@pytest.fixture(scope="module")
def wheel(project: Project, way: Way, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project.wheel(tmp_path_factory.mktemp("wheel"), PROFILE, way.within, **way.environ)


def read_info(wheel: Path) -> dict[str, object]:
    with zipfile.ZipFile(wheel) as archive:
        info: dict[str, object] = json.loads(archive.read("pelton/_build_info.json"))
    return info


def library_of(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("pelton/libpelton.so", folder))


def said_by(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def test_what_the_wheel_says(wheel: Path) -> None:
    assert re.fullmatch(r"pelton-0\.3\.0\+cu1[23][0-9]\.sm90-py3-none-manylinux_2_28_x86_64\.whl", wheel.name)
    info = read_info(wheel)
    assert (info["backend"], info["archs"], info["state"]) == ("cuda", ["sm_90a"], "wheel")
    toolchain = info["toolchain"]
    assert isinstance(toolchain, dict)
    release = str(toolchain["cuda"]).removeprefix("nvcc ").split(".")
    assert info["minimum_driver"] == f"{release[0]}.0" and info["minimum_driver_ptx"] == ""
    assert f"cu{release[0]}{release[1]}." in wheel.name


def test_the_library_needs_neither_a_cuda_library_nor_a_new_glibc(wheel: Path, tmp_path: Path) -> None:
    library = library_of(wheel, tmp_path)
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", said_by("readelf", "-d", library)))
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "cuda" in name or "cudart" in name or "stdc++" in name]
    symbols = said_by("objdump", "-T", library)
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", symbols)}
    assert versions and max(versions) <= (2, 28)
    assert " .nv_fatbin" in said_by("objdump", "-h", library)
    exported = [line.split()[-1] for line in symbols.splitlines() if " g " in line and "*UND*" not in line]
    assert not [name for name in exported if "cuda" in name.lower()], "the runtime stays inside"


def test_the_audit_finds_what_was_planned(wheel: Path) -> None:
    """Names in the device code, archs, bill of materials: what a build really makes, and not only made-up wheels."""
    for module, name in (
        ("elftools", "pyelftools"),
        ("iced_x86", "iced-x86"),
        ("zstandard", "zstandard"),
        ("lz4", "lz4"),
    ):
        pytest.importorskip(module, reason=f"{name} is not installed")
    report = audit.audit_wheel(wheel, only=set(audit.CHECKS) - {"auditwheel", "local"})
    assert report.findings == ()
    assert {(use.family, use.source, use.arch) for use in report.kernels} == {
        ("norm", "norm/gpu.cu", "sm_90a"),
        ("norm", "norm/gpu_fused.cu", "sm_90a"),
    }
    assert all(0 < use.registers <= 255 for use in report.kernels)


def test_the_library_loads_on_a_machine_without_gpu(wheel: Path, tmp_path: Path) -> None:
    library = library_of(wheel, tmp_path)
    program = f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.pelton.backend())"
    assert said_by(sys.executable, "-c", program) == "cuda\n"


def test_odd_surroundings_and_a_launcher_make_the_same_bytes(
    project: Project, way: Way, wheel: Path, tmp_path: Path
) -> None:
    """P41; a launcher such as ccache is handed every compiler, and CUDA's too."""
    odd = project.copy(tmp_path / "Größe, & co's (1)" / "src")
    temporary = tmp_path / "Größe & co's (2)" / "a b"
    temporary.mkdir(parents=True)
    launcher = script(tmp_path / "launcher", f'echo "$1" >> {tmp_path}/launched; exec "$@"')
    settings = {
        **PROFILE,
        "cmake.define.CMAKE_CXX_COMPILER_LAUNCHER": str(launcher),
        "cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER": str(launcher),
    }
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "TMPDIR": str(temporary), **way.environ}
    made = odd.wheel(tmp_path / "out", settings, way.within, **environ)
    assert digest(made) == digest(wheel)
    programs = {Path(line).name for line in (tmp_path / "launched").read_text().splitlines()}
    assert "nvcc" in programs and any(name.endswith("g++") for name in programs), programs
    content = library_of(made, tmp_path).read_bytes()
    for private in ("co's", str(tmp_path), sys.prefix, f"{Path.home()}/"):
        assert private.encode() not in content


def test_a_touched_kernel_is_one_object(project: Project, wheel: Path) -> None:
    folder = project.folder / "build" / "cuda-sm90" / "wheel"

    def compiled() -> list[str]:
        # The ninja that built: another version takes its log for stale.
        ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "ninja"
        said = said_by(ninja, "-C", folder, "-n", "-v")
        return re.findall(r" -x cu -c (?:\S*/)?(kernels/\S+|\S+\.cu) ", said)

    assert compiled() == []
    for name, count in (("norm/gpu.cu", 1), ("norm/norm.h", 2), ("common/gpu.cuh", 3)):
        path = project.folder / "kernels" / name
        stat = path.stat()
        os.utime(path)
        assert len(compiled()) == count, name
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_ninja_by_hand_compiles_without_nvccs_variables(project: Project, wheel: Path) -> None:
    folder = project.folder / "build" / "cuda-sm90" / "wheel"
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "ninja"
    commands = said_by(ninja, "-C", folder, "-t", "commands").splitlines()
    compiled = [line for line in commands if " -x cu " in line]
    assert compiled
    for line in compiled:
        for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"):
            assert f"--unset={name}" in line.partition(" -x cu ")[0], line


def test_a_folder_for_temporary_files_that_nvcc_cannot_use(
    project: Project, way: Way, tmp_path: Path
) -> None:
    temporary = tmp_path / "a,b"
    temporary.mkdir()
    environ = {**way.environ, "TMPDIR": str(temporary)}
    process = project.start("build_wheel", str(tmp_path / "out"), PROFILE, within=way.within, **environ)
    said, _ = process.communicate()
    assert process.returncode == 1
    assert f"error: nvcc cannot work with ',' in the path of temporary files: {temporary}" in said
    assert "CUDA compiler" not in said


FAKE_GCC = (
    'case "$*" in *-dump*version*) echo 96.1.0;; *) exec /usr/bin/g++ -U__GNUC__ -D__GNUC__=96 "$@";; esac'
)


def test_a_host_compiler_that_nvcc_refuses(project: Project, way: Way, tmp_path: Path) -> None:
    """P39: before the first kernel is compiled."""
    for name in ("g++", "c++", "gcc", "cc"):
        script(tmp_path / "fake" / name, FAKE_GCC)
    environ = {**way.environ, "PATH": f"{tmp_path / 'fake'}:{os.environ['PATH']}", "CXX": ""}
    process = project.start("build_wheel", str(tmp_path / "out"), PROFILE, within=way.within, **environ)
    said, _ = process.communicate()
    assert process.returncode == 1
    (message,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(
        r"gcc 96\.1\.0 .* is too new for nvcc .*, which accepts gcc up to (\d+); install g\+\+-\1", message
    )
    assert list(tmp_path.glob("out/*")) == []


def hidden(tool: Tool) -> tuple[str, ...]:
    """A command that runs another one where this toolkit is not to be seen."""
    hide = [Path(tool.root).resolve()]
    programs = ("nvcc", "ptxas", "cudafe++", "fatbinary", "nvlink", "bin2c")
    files = [Path(entry) / name for entry in os.environ["PATH"].split(os.pathsep) for name in programs]
    mounts = [f'mount -t tmpfs none "{folder}"' for folder in hide]
    mounts += [
        f'mount --bind /dev/null "{path}"'
        for path in files
        if path.is_file() and not path.resolve().is_relative_to(hide[0])
    ]
    command = ("unshare", "--mount", "sh", "-ec", "; ".join([*mounts, 'exec "$@"']), "sh")
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("hiding the toolkit needs unshare and its rights")
    return command


@pytest.mark.network
def test_without_a_toolkit_the_compiler_comes_from_the_package_index(
    project: Project, wheel: Path, packages: Path, tmp_path: Path
) -> None:
    if NVCC is None:
        pytest.skip("this machine has none: the other tests have taken that of the package index")
    within = hidden(NVCC)
    environ = dict.fromkeys(VARIABLES, "")
    copy = project.copy(tmp_path / "copy")
    asked = copy.build("get_requires_for_build_wheel", PROFILE, within=within, **environ)
    for requirement in PACKAGES:
        assert requirement in asked
    with_packages = {**environ, "PYTHONPATH": str(packages)}
    assert "nvidia" not in copy.build("get_requires_for_build_wheel", PROFILE, within=within, **with_packages)
    made = copy.wheel(tmp_path / "out", PROFILE, within, **with_packages)
    ours, theirs = read_info(made), read_info(wheel)
    assert "build environment" in (copy.folder / "build/cuda-sm90/wheel/pelton_plan.json").read_text()
    if ours["toolchain"] == theirs["toolchain"]:
        assert digest(made) == digest(wheel), "the same compiler, the same bytes"
    else:
        assert library_of(made, tmp_path).stat().st_size > 0
