"""What installers make of the index: several versions of pip, and uv with and without wheel variants, on loopback.

The installers come from the package index that pip is configured for, into build/installers, once. All else is served
by these tests: the index of small wheels, and an index that stands for a public registry, with stand-ins for torch and
numpy and a wheel of this project without label.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pelton_build.cmake import profiles_of, source_digest
from pelton_build.index import build_index, find_wheels
from pelton_build.profile import load_profile, profile_names
from pelton_build.serve import serving
from pelton_build.variants import make_variant
from wheel_factory import WheelParts, cuda, labelled, make_wheel, rocm, unlabelled

pytest.importorskip(
    "elftools", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)
pytest.importorskip(
    "iced_x86", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)
pytestmark = [pytest.mark.network, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ["pip==23.0.1"] if sys.version_info < (3, 12) else []  # later Pythons do not run it
PIPS = [*OLDEST, "pip==23.*", "pip==24.*", "pip==25.*", "pip"]
ENDS = (PIPS[0], PIPS[-1])  # those that try everything
UV = "uv==0.13.9"  # wheel variants are a preview that changes: the version that they were tried with


def environment(**changes: str) -> dict[str, str]:
    """Nothing of this machine's configuration of pip and uv, and no proxy for loopback."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PIP_", "UV_", "NV_", "PELTON_", "PYTHONPATH", "VIRTUAL_ENV"))
    }
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    uv = {"UV_NO_CONFIG": "1", "UV_NO_CACHE": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": "copy"}
    return {**kept, **own, **uv, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **changes}


def run(*command: object, **changes: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, check=False, capture_output=True, text=True, env=environment(**changes))


def installer(requirement: str, *options: str) -> Path:
    """The folder that an installer is in."""
    folder = ROOT / "build" / "installers" / requirement.replace("==", "-").replace("*", "x")
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--target",
            str(folder),
            *options,
            requirement,
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{requirement} cannot be had: {done.stderr}"
        (folder / "done").touch()
    return folder


@dataclass
class Machine:
    """A virtual environment to install into, and both indexes."""

    folder: Path
    site: str
    registry: str

    def __post_init__(self) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(self.folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def pip(self, version: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        path = str(installer(version, "--no-deps"))
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments, PYTHONPATH=path)

    def installed(self) -> str:
        """What is installed of the project: its version, as metadata and build info say it, and its profile."""
        (info,) = self.packages.glob("pelton-*.dist-info")
        build = json.loads((self.packages / "pelton" / "_build_info.json").read_text())
        assert info.name == f"pelton-{build['version']}.dist-info"
        return f"{build['version']} {build['profile']}"


def stand_in(folder: Path, name: str, version: str) -> None:
    """A wheel without content in a simple index."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        n: base64.urlsafe_b64encode(hashlib.sha256(t.encode()).digest()).rstrip(b"=").decode()
        for n, t in files.items()
    }
    files[f"{info}/RECORD"] = (
        "".join(f"{n},sha256={digests[n]},{len(t)}\n" for n, t in files.items()) + f"{info}/RECORD,,\n"
    )
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)


def plain_page(folder: Path) -> None:
    """The least that an index has to say."""
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n")


def variant_of(profile: str, folder: Path, scratch: Path) -> None:
    """The variant wheel of a profile, with the properties that its file says."""
    found = load_profile(ROOT, profile)
    parts = {"cuda": cuda, "rocm": rocm}.get(found.target.backend, WheelParts)()
    plan = {**parts.info["plan"], "variant": found.variant}
    parts = parts.but(version="0.2.0").with_info(profile=profile, label="", version="0.2.0", plan=plan)
    make_variant(make_wheel(scratch / profile, parts), folder)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of the site and of the registry."""
    folder = tmp_path_factory.mktemp("indexes")
    dist, registry = folder / "dist", folder / "registry" / "simple"
    for version in ("0.1.0", "0.2.0", "0.3.0"):
        make_wheel(dist, unlabelled(version))
        make_wheel(dist, labelled("cpu-avx2", "cpu.avx2", version=version))
    make_wheel(dist, labelled("cpu-avx2", "cpu.avx2.fastmath", version="0.2.0"))
    make_wheel(dist, labelled("cpu-avx512", "cpu.avx512", version="0.2.0", archs=("x86-64-v4",)))
    hopper = cuda().but(version="0.2.0+cu130.sm90")
    make_wheel(dist, hopper.with_info(version="0.2.0+cu130.sm90"))
    for profile in profile_names(ROOT):
        variant_of(profile, dist, folder / "scratch")
    build_index(find_wheels([dist]), folder / "site", baseline="cpu-avx2", yanks={"0.3.0": "wrong results"})
    stand_in(registry / "torch", "torch", "2.13.0")
    stand_in(registry / "numpy", "numpy", "2.2.0")
    make_wheel(registry / "pelton", unlabelled("0.2.0"))
    for project in registry.iterdir():
        plain_page(project)
    with serving(folder / "site") as site, serving(folder / "registry") as public:
        yield site, f"{public}/simple/"


@pytest.fixture
def machine(indexes: tuple[str, str], tmp_path: Path) -> Machine:
    return Machine(tmp_path / "venv", *indexes)


INSTALLS = {
    # index below the site, requirement, what is installed then
    "baseline": ("simple/", "pelton", "0.2.0 cpu-avx2"),
    "baseline, another spelling": ("simple", "Pelton", "0.2.0 cpu-avx2"),
    "an older one": ("simple/", "pelton==0.1.0", "0.1.0 cpu-avx2"),
    "profile": ("p/cpu-avx512/simple/", "pelton", "0.2.0+cpu.avx512 cpu-avx512"),
    "profile, as pelton-select says": ("p/cuda-sm90/simple/", "pelton==0.2.0", "0.2.0+cu130.sm90 cuda-sm90"),
    "profile, as the front page says": ("p/cuda-sm90/simple/", "pelton==0.2.0+cu130.sm90", "0.2.0+cu130.sm90 cuda-sm90"),
    "profile, older": ("p/cpu-avx2/simple", "pelton==0.1.0", "0.1.0+cpu.avx2 cpu-avx2"),
    "feature set": ("p/cpu-avx2.fastmath/simple/", "pelton==0.2.0", "0.2.0+cpu.avx2.fastmath cpu-avx2"),
    "a yanked one": ("simple/", "pelton==0.3.0", "0.3.0 cpu-avx2"),
}  # fmt: skip


FEW = ("baseline", "profile, as pelton-select says", "feature set", "a yanked one")


@pytest.mark.parametrize("version", PIPS)
def test_pip(version: str, indexes: tuple[str, str], tmp_path: Path) -> None:
    """The registry has a wheel without label of the version, too."""
    wrong = {}
    for number, case in enumerate(INSTALLS if version in ENDS else FEW):
        index, requirement, expected = INSTALLS[case]
        machine = Machine(tmp_path / str(number), *indexes)
        sources = ("-i", machine.registry, "--extra-index-url", f"{machine.site}/{index}")
        done = machine.pip(version, "install", "-q", "--only-binary", ":all:", *sources, requirement)
        found = machine.installed() if done.returncode == 0 else done.stderr
        if found != expected:
            wrong[case] = found
        if case == "a yanked one":
            assert "wrong results" in done.stdout + done.stderr, "the reason is not shown"
    assert wrong == {}
    check = machine.pip(version, "check")
    assert check.returncode == 0, check.stdout


RESTRICTIONS = [
    ("--python-version", "3.10"),
    ("--platform", "musllinux_1_2_x86_64"),
    ("--platform", "manylinux_2_17_x86_64"),
    ("--platform", "manylinux_2_28_aarch64"),
]


@pytest.mark.parametrize("version", ENDS)
def test_pip_takes_nothing_where_nothing_fits(version: str, machine: Machine, tmp_path: Path) -> None:
    for number, restriction in enumerate(RESTRICTIONS):
        got = tmp_path / f"got{number}"
        options = ("--no-deps", "--only-binary", ":all:", "-d", got, "-i", f"{machine.site}/simple/")
        done = machine.pip(version, "download", *options, *restriction, "pelton")
        assert done.returncode != 0
        assert "No matching distribution" in done.stderr
        assert not list(got.glob("*"))


# --- uv ---


def uv(
    machine: Machine, *arguments: object, within: tuple[str, ...] = (), **changes: str
) -> subprocess.CompletedProcess[str]:
    return run(*within, installer(UV) / "bin" / "uv", *arguments, **changes)


@pytest.mark.parametrize("case", INSTALLS)
def test_uv(case: str, machine: Machine) -> None:
    index, requirement, expected = INSTALLS[case]
    sources = ("--default-index", machine.registry, "--index", f"{machine.site}/{index}")
    done = uv(
        machine, "pip", "install", "--python", machine.python, "--only-binary", ":all:", *sources, requirement
    )
    assert done.returncode == 0, done.stderr
    assert machine.installed() == expected


def test_uv_locks_with_the_index_alone(machine: Machine, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        f"""[project]
name = "user"
version = "1"
requires-python = ">=3.11"
dependencies = ["pelton"]
[[tool.uv.index]]
name = "pelton"
url = "{machine.site}/p/cpu-avx2/simple/"
[[tool.uv.index]]
name = "registry"
url = "{machine.registry}"
default = true
"""
    )
    done = run(
        installer(UV) / "bin" / "uv",
        "lock",
        "--project",
        project,
        "--python",
        machine.python,
        UV_NO_CONFIG="0",
    )
    assert done.returncode == 0, done.stderr
    lock = (project / "uv.lock").read_text()
    assert 'version = "0.2.0+cpu.avx2"' in lock
    (wheel,) = [line for line in lock.splitlines() if "pelton-0.2.0%2Bcpu.avx2-" in line]
    assert "sha256:" in wheel


def gpu(driver: str, capability: str) -> dict[str, str]:
    """The variables by which uv believes that there is a GPU."""
    return {
        "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION": driver,
        "NV_VARIANT_PROVIDER_FORCE_SM_ARCH": capability,
    }


V2 = "fpu cmov cx8 fxsr mmx sse sse2 syscall nx lm pni cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"
V3 = f"{V2} avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
HOSTS: dict[str, tuple[str, dict[str, str], str]] = {
    # flags of the CPU, GPU, the profile whose variant is taken
    "Hopper": (V3, gpu("13.0", "9.0"), "cuda-sm90"),
    "Hopper, a later driver": (V4, gpu("13.2", "9.0"), "cuda-sm90"),
    "Ampere": (V3, gpu("13.0", "8.0"), "cuda-sm80"),
    "Ada": (V4, gpu("13.0", "8.9"), "cuda-sm80"),
    "newer than any build: PTX": (V3, gpu("13.0", "12.0"), "cuda-sm80"),
    "newer, by a minor": (V3, gpu("13.0", "10.3"), "cuda-sm80"),
    "an old card": (V3, gpu("13.0", "7.5"), "cpu-avx2"),
    "an old driver": (V4, gpu("12.8", "9.0"), "cpu-avx512"),
    "AVX-512": (V4, {}, "cpu-avx512"),
    "AVX2": (V3, {}, "cpu-avx2"),
    "older": (V2, {}, "cpu-avx2"),  # the wheel without variant label; its guard says what is needed
}


@pytest.fixture(scope="module")
def with_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, ...]]]:
    """What to start a program with, so that it finds a CPU with these flags: uv reads /proc/cpuinfo."""
    folder = tmp_path_factory.mktemp("cpu")
    made = {}
    for name, flags in (("v2", V2), ("v3", V3), ("v4", V4)):
        (folder / name).write_text(f"processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: {flags}\n\n")
        mount = f'mount --bind {folder / name} /proc/cpuinfo && exec "$@"'
        made[flags] = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
    if shutil.which("unshare") is None or run(*made[V3], "true").returncode != 0:
        pytest.skip(
            "this system lets no program have a /proc/cpuinfo of its own (unshare --map-root-user --mount)"
        )
    yield made


@pytest.mark.parametrize("case", HOSTS)
def test_uv_chooses_the_variant(case: str, machine: Machine, with_cpu: dict[str, tuple[str, ...]]) -> None:
    flags, card, profile = HOSTS[case]
    options = ("--python", machine.python, "--no-deps", "--preview-features", "wheel-variants")
    done = uv(
        machine, "pip", "install", *options, "--index", f"{machine.site}/simple/", "pelton", within=with_cpu[flags], **card
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert machine.installed() == f"0.2.0 {profile}"
    is_variant = bool(list(machine.packages.glob("pelton-*.dist-info/variant.json")))
    assert is_variant == (case != "older")


def test_uv_without_the_preview_takes_the_baseline(machine: Machine) -> None:
    options = ("--python", machine.python, "--no-deps", "--index", f"{machine.site}/simple/")
    done = uv(machine, "pip", "install", *options, "pelton", **gpu("13.0", "9.0"))
    assert done.returncode == 0, done.stderr
    assert machine.installed() == "0.2.0 cpu-avx2"
    assert not list(machine.packages.glob("pelton-*.dist-info/variant.json"))


# --- the command that chooses, before anything is installed ---


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of pelton-select.py."""
    folder = tmp_path_factory.mktemp("script")
    modules = {f"pelton/{path.name}": path.read_bytes() for path in (ROOT / "python" / "pelton").glob("*.py")}
    scripts = b"[console_scripts]\npelton-select = pelton.select_wheel:main\n"
    parts = unlabelled().but(files={**modules, "pelton-0.1.0.dist-info/entry_points.txt": scripts})
    wheel = make_wheel(folder / "dist", parts.with_info(profiles=profiles_of(ROOT)))
    build_index([wheel], folder / "site", baseline="cpu-avx2")
    with serving(folder / "site") as site:
        yield f"{site}/pelton-select.py"


@pytest.mark.parametrize("runner", ["uv", "pipx"])
def test_a_runner_starts_the_command(runner: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text('driver = ""\n[[gpu]]\narch = "gfx90a"\n')
    changes = {"PELTON_HOST": str(tmp_path / "machine.toml"), "PIPX_HOME": str(tmp_path / "pipx")}
    if runner == "uv":
        command = (installer(UV) / "bin" / "uv", "run", "--no-project", "--python", sys.executable)
    else:
        changes["PYTHONPATH"] = str(installer("pipx"))
        command = (sys.executable, "-m", "pipx", "run")
    done = run(*command, script, "--profile-only", **changes)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["rocm-gfx90a"]), done.stderr


# --- a real wheel ---


def test_a_real_wheel_says_which_one_this_machine_needs(tmp_path: Path) -> None:
    """Installed without torch; from dist/, when the wheel there is what the sources make."""
    digest = source_digest(ROOT)
    fresh = []
    for path in sorted(ROOT.glob("dist/cpu-*/*.whl")):
        with zipfile.ZipFile(path) as archive:
            info = json.loads(archive.read("pelton/_build_info.json"))
        if info["source_digest"] == digest:
            fresh.append((path, info))
    if not fresh:
        pytest.skip("no fresh wheel in dist/; build one: nox -s build-cpu-avx2")
    path, info = fresh[-1]
    build_index([path], tmp_path / "site", baseline="cpu-avx2")
    with serving(tmp_path / "site") as site:
        machine = Machine(tmp_path / "venv", site, "")
        options = ("--no-deps", "-q", "-i", f"{site}/p/{info['profile']}/simple/")
        done = machine.pip("pip", "install", *options, "pelton")
        assert done.returncode == 0, done.stderr
    assert machine.installed() == f"{info['version']} {info['profile']}"
    said = run(machine.folder / "bin" / "pelton-select", "--json", PELTON_INDEX="https://example.test")
    assert said.returncode in (0, 3), said.stderr
    answer = json.loads(said.stdout)
    assert {c["profile"] for c in answer["candidates"]} == set(profile_names(ROOT))
    told = run(machine.folder / "bin" / "pelton", "info", "--json")
    assert json.loads(told.stdout)["build"]["profile"] == info["profile"], told.stderr
