"""The PEP 517 backend as a front end sees it: refusals, metadata, environment. Real builds: test_wheels.py."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest

from pelton_build import backend
from pelton_build.errors import BuildError, ChoiceError
from pelton_build.metadata import Distribution, Provider, building
from pelton_build.values import Size

ROOT = Path(__file__).resolve().parents[2]
HOOK = (
    "import json, sys; sys.path.insert(0, 'python'); from pelton_build import backend; "
    "print(json.dumps(getattr(backend, sys.argv[1])(*json.loads(sys.argv[2]))))"
)
NEEDS_SKBUILD = pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None, reason="needs scikit-build-core"
)
SWITCHES = ("CMAKE_", "MAX_JOBS", "PELTON_", "SKBUILD", "USE_FAST_MATH", "SOURCE_DATE_EPOCH")


def hook(name: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a hook the way front ends do: in a process of its own, in the project's folder."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(SWITCHES)}
    return subprocess.run(
        [sys.executable, "-c", HOOK, name, json.dumps(arguments)],
        cwd=ROOT,
        env={**clean, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one message of a refusal."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]


@pytest.mark.parametrize(
    ("settings", "environ", "words"),
    [
        ({"profile": "cpu_avx2"}, {}, ["cpu_avx2", "'cpu-avx2'"]),
        ({"profil": "cpu-avx2"}, {}, ["profil", "-C profile"]),
        ({"feature.marlin": "of", "profile": "cpu-avx2"}, {}, ["feature.marlin", "'of'", "off"]),
        ({"profile": ["cpu-avx2", "cpu-avx512"]}, {}, ["'cpu-avx2'", "'cpu-avx512'"]),
        ({"feature.marlin": "on", "profile": "cpu-avx2"}, {}, ["marlin", "cuda"]),
        ({"feature.marlni": "on"}, {}, ["marlni", "marlin"]),
        ({"cmake.define.PELTON_PROFILE": "cuda-sm90"}, {}, ["PELTON_PROFILE", "-C profile"]),
        ({}, {"PELTON_TARGET_DEVICE": "gpu"}, ["PELTON_TARGET_DEVICE", "gpu", "cuda"]),
        ({}, {"PELTON_TARGET_DEVICE": "cpu", "PELTON_PROFILE": "cuda-sm90"}, ["cpu", "cuda-sm90"]),
        (
            {"profile": "cpu-avx2"},
            {"PELTON_ENABLE_MARLN": "1"},
            ["PELTON_ENABLE_MARLN", "PELTON_ENABLE_MARLIN"],
        ),
        ({"profile": "cpu-avx2"}, {"PELTON_VERSION": "one"}, ["PELTON_VERSION", "one"]),
        (
            {"profile": "cpu-avx2"},
            {"SOURCE_DATE_EPOCH": "-5"},
            ["SOURCE_DATE_EPOCH", "seconds since 1970", "-5"],
        ),
        ({"profile": "cpu-avx2"}, {"SOURCE_DATE_EPOCH": "4354819200000"}, ["SOURCE_DATE_EPOCH", "2106"]),
        (
            {"profile": "cuda-sm90"},
            {"CUDA_HOME": "/nonexistent"},
            ["CUDA_HOME=/nonexistent", "no such folder"],
        ),
        (
            {"profile": "rocm-gfx90a"},
            {"ROCM_PATH": "/nonexistent"},
            ["ROCM_PATH=/nonexistent", "no such folder"],
        ),
        ({"profile": "cpu-avx2", "build-dir": "build/{wheel_tag}"}, {}, ["build-dir", "placeholders"]),
        ({"profile": "cpu-avx2", "editable.rebuild": "yep"}, {}, ["editable.rebuild", "yep"]),
    ],
)
def test_refusals(settings: dict[str, object], environ: dict[str, str], words: list[str]) -> None:
    message = refused(hook("get_requires_for_build_wheel", settings, **environ))
    for word in words:
        assert word in message


def test_a_source_distribution_refuses_unknown_settings_too(tmp_path: Path) -> None:
    assert "-C profile" in refused(hook("build_sdist", str(tmp_path), {"profil": "x"}))
    assert list(tmp_path.iterdir()) == []


def metadata(tmp_path: Path, state: str, settings: dict[str, object], **environ: str) -> tuple[str, str, str]:
    """Version and WHEEL file of what a hook prepares, and stderr."""
    done = hook(f"prepare_metadata_for_build_{state}", str(tmp_path), settings, **environ)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / json.loads(done.stdout.splitlines()[-1])
    version = Parser().parsestr((folder / "METADATA").read_text(encoding="utf-8"))["Version"]
    return version, (folder / "WHEEL").read_text(encoding="utf-8"), done.stderr


@NEEDS_SKBUILD
@pytest.mark.parametrize(
    ("settings", "environ", "label"),
    [
        ({"profile": "cpu-avx2"}, {}, "cpu.avx2"),
        ({"profile": ["cpu-avx2", "cpu-avx2"]}, {}, "cpu.avx2"),
        ({"profile": "cpu-avx2"}, {"PELTON_PROFILE": "cpu-avx512"}, "cpu.avx2"),
        ({"profile": "cpu-avx2"}, {"SKBUILD_CMAKE_ARGS": "-DPELTON_PROFILE=cuda-sm90"}, "cpu.avx2"),
        ({"profile": "cpu-avx2"}, {"PELTON_ENABLE_MARLIN": ""}, "cpu.avx2"),
        ({"profile": "cpu-avx2", "cmake.build-type": "RelWithDebInfo"}, {}, "cpu.avx2"),
        ({}, {"PELTON_PROFILE": " cpu-avx512"}, "cpu.avx512"),
        ({"profile": "cpu-avx2", "label": "off"}, {}, ""),
    ],
)
def test_the_label_follows_the_profile(
    tmp_path: Path, settings: dict[str, object], environ: dict[str, str], label: str
) -> None:
    version, wheel, _ = metadata(tmp_path, "wheel", settings, PELTON_VERSION="0.3.0", **environ)
    assert version == (f"0.3.0+{label}" if label else "0.3.0")
    assert "Tag: py3-none-manylinux_2_28_x86_64\n" in wheel


@NEEDS_SKBUILD
def test_an_editable_wheel_promises_no_glibc(tmp_path: Path) -> None:
    _, wheel, _ = metadata(tmp_path, "editable", {"profile": "cpu-avx2"}, PELTON_VERSION="0.3.0")
    assert "Tag: py3-none-linux_x86_64\n" in wheel


@NEEDS_SKBUILD
def test_a_mark_of_a_dirty_tree_stays_in_the_one_local_part(tmp_path: Path) -> None:
    environ = {"PELTON_VERSION": "0.3.1.dev4+g1a2b3c4d5e.dirty"}
    version, _, _ = metadata(tmp_path, "wheel", {"profile": "cpu-avx2"}, **environ)
    assert version == "0.3.1.dev4+cpu.avx2.g1a2b3c4d5e.dirty"


def test_the_provider_answers_only_within_a_build() -> None:
    provider = Provider()
    with pytest.raises(BuildError, match=r"pelton_build\.backend"):
        provider.dynamic_metadata({}, {})
    with building(Distribution("1.0+x", ("torch>=2",))):
        assert provider.dynamic_metadata({}, {}) == {"version": "1.0+x", "dependencies": ["torch>=2"]}
        with pytest.raises(BuildError, match="vresion"):
            provider.dynamic_metadata({"vresion": 1}, {})
    with pytest.raises(BuildError):
        provider.dynamic_metadata({}, {})


def test_a_rebuild_with_tools_that_will_be_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first hook, when the wrapped backend is installed and not imported yet: torch would come next."""
    package = tmp_path / "pip-build-env-x" / "overlay" / "scikit_build_core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "scikit_build_core"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(ChoiceError, match="--no-build-isolation"):
        backend._check_rebuild({"editable.rebuild": "true"})
    backend._check_rebuild({"editable.rebuild": "false"})


# --- space and wholeness ---


def test_a_full_device_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAST_SPACE", Size(1 << 60))
    with pytest.raises(BuildError, match="no space left") as caught:
        backend._refuse_full([tmp_path / "not" / "made" / "yet"])
    assert str(tmp_path) in str(caught.value)


def test_a_device_that_becomes_full_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, backend._messages():
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: no space left on the device of /some/file")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_tree_that_cannot_be_written_to_is_one_message(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop, backend._messages():
        raise OSError(number, "no", "/some/file")
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: /some/file: no; ") and "-C build-dir=FOLDER" in said


def test_other_system_errors_keep_their_trace() -> None:
    with pytest.raises(OSError, match="broken"), backend._messages():
        raise OSError(errno.EIO, "broken", "/some/file")


def test_archives_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError), backend._whole(out) as folder:
        (folder / "half.whl").write_bytes(b"half")
        raise RuntimeError
    assert list(out.iterdir()) == []
    old = os.umask(0o077)
    try:
        with backend._whole(out) as folder:
            (folder / "whole.whl").write_bytes(b"whole")
    finally:
        os.umask(old)
    assert [path.name for path in out.iterdir()] == ["whole.whl"]
    assert (out / "whole.whl").stat().st_mode & 0o777 == 0o644


def test_two_builds_of_one_folder_wait_for_each_other(tmp_path: Path) -> None:
    program = (
        "import sys, time; sys.path.insert(0, 'python'); from pathlib import Path; from pelton_build import backend\n"
        f"with backend._alone(Path({str(tmp_path / 'wheel')!r})):\n"
        "    print('in', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == "in\n"
    second = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert second.stderr is not None
    assert second.stdout is not None
    assert "waiting for another build" in second.stderr.readline()
    first.kill()  # a build that dies holds nothing
    first.wait()
    assert second.stdout.readline() == "in\n"
    second.communicate("")
    first.stdin.close()
    first.stdout.close()
