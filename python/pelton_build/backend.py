"""The PEP 517 backend: resolves the profile, then has scikit-build-core do the building.

Each hook reads the switches (`settings`), makes the plan, and calls scikit-build-core's hook of the same name with

- `cmake.define.PELTON_PROFILE`, the one definition that CMake gets;
- `build-dir`: `build/<profile>/wheel` or `build/<profile>/editable`;
- `cmake.fresh`: wheels are always configured anew, editable builds continue where they were;
- `wheel.tags`: the wheel is linked for the tag's glibc, so that it is named right from the start.

Config settings of scikit-build-core pass through; unknown ones are refused with the nearest name. An error is one
message and exit status 1. An archive appears under its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from . import cmake, glibc, sbom
from .errors import BuildError, ChoiceError
from .metadata import Distribution, building, distribution_of_sdist, distribution_of_wheel
from .plan import Plan
from .planning import write_atomically
from .profile import load_profile
from .project import load_project
from .settings import ConfigSettings, environment, pass_through, read_choices, replace_environment, scrubbed
from .table import load_table
from .values import Size, parse_switch
from .version import SourceVersion, source_version

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LEAST_SPACE = Size.parse("64 MiB")
"""Free space below which a build is not begun, and a failed one is put down to it."""

# Folders that isolated builds of pip, uv and build use and remove.
_ISOLATED = ("pip-build-env-", "builds-v0", "build-env-")


def _utf8(hook: Callable[P, T]) -> Callable[P, T]:
    """The hook, run by a Python that takes file names for UTF-8.

    In an ASCII locale Python may not, and then no file that names a folder with other letters in it can be written.
    The mode is set when Python starts, so the hook gets a process of its own where it is needed.
    """

    @functools.wraps(hook)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        if sys.getfilesystemencoding() == "utf-8":
            return hook(*arguments, **named)
        with tempfile.TemporaryDirectory(prefix="pelton-") as folder:
            answer = Path(folder) / "answer.json"
            call = json.dumps([hook.__name__, arguments, named, str(answer)])
            path = os.pathsep.join(dict.fromkeys(entry for entry in sys.path if entry))
            environ = {**environment(), "PYTHONUTF8": "1", "PYTHONPATH": path}
            command = [sys.executable, "-X", "utf8", "-m", __name__, call]
            if subprocess.run(command, env=environ, check=False).returncode != 0:
                raise SystemExit(1)
            result: T = json.loads(answer.read_text(encoding="ascii"))
            return result

    return run


# --- the hooks --------------------------------------------------------------------------------------------------------


@_utf8
def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    """What to install before a wheel is built."""
    with _messages():
        return _requires("wheel", config_settings)


@_utf8
def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    """What to install before an editable wheel is built."""
    with _messages():
        return _requires("editable", config_settings)


@_utf8
def get_requires_for_build_sdist(config_settings: ConfigSettings | None = None) -> list[str]:
    """What to install before a source distribution is made."""
    with _messages():
        root, settings = Path.cwd(), _checked(Path.cwd(), config_settings)
        with building(_sdist(root, _source(root))):
            requires: list[str] = _wrapped("get_requires_for_build_sdist")(settings)
            return requires


@_utf8
def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: ConfigSettings | None = None
) -> str:
    """Write the wheel's metadata; returns the name of its folder."""
    with _messages():
        return _prepare("wheel", metadata_directory, config_settings)


@_utf8
def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: ConfigSettings | None = None
) -> str:
    """Write the editable wheel's metadata; returns the name of its folder."""
    with _messages():
        return _prepare("editable", metadata_directory, config_settings)


@_utf8
def build_wheel(
    wheel_directory: str, config_settings: ConfigSettings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of the profile; returns its file name."""
    with _messages():
        return _build("wheel", wheel_directory, config_settings, metadata_directory)


@_utf8
def build_editable(
    wheel_directory: str, config_settings: ConfigSettings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the library in `build/<profile>/editable` and a wheel that leads there; returns its file name."""
    with _messages():
        return _build("editable", wheel_directory, config_settings, metadata_directory)


@_utf8
def build_sdist(sdist_directory: str, config_settings: ConfigSettings | None = None) -> str:
    """Make the source distribution, which has no label; returns its file name."""
    with _messages():
        root, settings = Path.cwd(), _checked(Path.cwd(), config_settings)
        source = _source(root)
        _set_environment(source)
        write_atomically(root / "build" / "sdist" / "source.json", source.to_json())
        hook = _wrapped("build_sdist")
        with building(_sdist(root, source)), _whole(Path(sdist_directory)) as folder:
            return str(hook(str(folder), settings))


# --- what they share --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """One wheel to be built."""

    plan: Plan
    request: cmake.Request
    distribution: Distribution
    build_dir: Path
    settings: Mapping[str, Any]
    """For scikit-build-core."""


def _wrapped(hook: str) -> Callable[..., Any]:
    """scikit-build-core's hook; imported late, so that a refusal needs nothing installed."""
    import scikit_build_core.build

    function: Callable[..., Any] = getattr(scikit_build_core.build, hook)
    return function


def _source(root: Path) -> SourceVersion:
    source = source_version(root, environment(), load_project(root))
    for warning in source.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    return source


def _sdist(root: Path, source: SourceVersion) -> Distribution:
    return distribution_of_sdist(root, source.version)


def _checked(root: Path, config_settings: ConfigSettings | None) -> dict[str, object]:
    """scikit-build-core's own config settings. Raises ChoiceError when there is an unknown one."""
    read_choices(config_settings, environment(), load_table(root))
    return pass_through(config_settings)


def _job(state: str, config_settings: ConfigSettings | None) -> _Job:
    """What is to be built. Raises BuildError."""
    root, environ = Path.cwd(), environment()
    choices = read_choices(config_settings, environ, load_table(root))
    tools = {name: environ[name] for name in cmake.TOOL_VARIABLES if environ.get(name, "").strip()}
    if choices.profile is not None:
        load_profile(root, choices.profile.value)  # a misspelt name is answered before anything is probed
    plan, request = cmake.plan_of(root, cmake.Request(state, choices, _source(root), tools))
    given = pass_through(config_settings)
    _check_rebuild(given)
    build_dir = _build_dir(plan, state, given)
    settings: dict[str, Any] = {"cmake.fresh": "true" if state == "wheel" else "false", **given}
    settings["build-dir"] = str(build_dir)
    settings["cmake.define.PELTON_PROFILE"] = plan.profile
    if state == "wheel":
        settings["wheel.tags"] = f"py3-none-{plan.platform_tag}"
    return _Job(plan, request, distribution_of_wheel(root, plan), build_dir, settings)


def _build_dir(plan: Plan, state: str, given: dict[str, object]) -> Path:
    stated = given.pop("skbuild.build-dir", given.pop("build-dir", None))
    if stated is None:
        return Path("build", plan.profile, state)
    if not isinstance(stated, str) or not stated or "{" in stated:
        raise ChoiceError(f"-C build-dir={stated}: name one folder, without placeholders")
    return Path(stated)


def _check_rebuild(given: Mapping[str, object]) -> None:
    """Raises ChoiceError when a rebuild on import is wanted of an installation whose build tools will be gone."""
    wanted = given.get("editable.rebuild", given.get("skbuild.editable.rebuild", "false"))
    try:
        rebuild = parse_switch(str(wanted))
    except ValueError as error:
        raise ChoiceError(f"-C editable.rebuild: {error}") from None
    # Looked for and not imported: asked first of all, before the front end installs what a build needs.
    tools = importlib.util.find_spec("scikit_build_core")
    where = str(tools.origin) if tools is not None else str(shutil.which("cmake") or "")
    if rebuild and any(mark in where for mark in _ISOLATED):
        raise ChoiceError(
            "-C editable.rebuild=true needs the build tools whenever pelton is imported, and those of an isolated "
            "build are removed; install the dependency group 'build' and torch, then use pip install "
            "--no-build-isolation -C editable.rebuild=true -e ."
        )


def _requires(state: str, config_settings: ConfigSettings | None) -> list[str]:
    job = _job(state, config_settings)
    cmake.refuse_problems(job.plan)
    _set_environment(job.request.version)
    with building(job.distribution):
        requires: list[str] = _wrapped(f"get_requires_for_build_{state}")(dict(job.settings))
    if state == "wheel":
        requires.append(sbom.REQUIREMENT)
        if glibc.needs_stubs(job.plan.glibc):
            requires.append(glibc.REQUIREMENT)
    return [*requires, *job.plan.build_requires]


def _prepare(state: str, metadata_directory: str, config_settings: ConfigSettings | None) -> str:
    job = _job(state, config_settings)
    _set_environment(job.request.version)
    with building(job.distribution):
        hook = _wrapped(f"prepare_metadata_for_build_{state}")
        return str(hook(metadata_directory, dict(job.settings)))


def _build(
    state: str, wheel_directory: str, config_settings: ConfigSettings | None, metadata_directory: str | None
) -> str:
    job = _job(state, config_settings)
    cmake.refuse_problems(job.plan)
    _set_environment(job.request.version, job.plan.jobs.count)
    root = Path.cwd()
    folders = [root, Path(wheel_directory), Path(tempfile.gettempdir())]
    _refuse_full(folders)
    hook = _wrapped(f"build_{state}")
    with _alone(job.build_dir), building(job.distribution), _whole(Path(wheel_directory)) as folder:
        cmake.write_request(job.build_dir, job.request)
        try:
            return str(hook(str(folder), dict(job.settings), metadata_directory))
        except SystemExit:
            _refuse_full(folders)
            raise


def _set_environment(source: SourceVersion, jobs: int | None = None) -> None:
    """Make this process, which is this one build's, and its children see what the plan says and nothing else.

    Variables that would change the build behind the plan's back go; the plan has a line for each.
    """
    clean = scrubbed(environment())
    epoch = clean.setdefault("SOURCE_DATE_EPOCH", str(source.epoch))
    if not re.fullmatch(r"[0-9]{1,10}", epoch) or int(epoch) >= 1 << 32:
        raise BuildError(
            f"SOURCE_DATE_EPOCH: expected seconds since 1970, up to the year 2106, found {epoch[:40]!r}; unset it"
        )
    if jobs is not None:
        clean["CMAKE_BUILD_PARALLEL_LEVEL"] = str(jobs)
    replace_environment(clean)


# --- errors, space, and one build at a time ---------------------------------------------------------------------------


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    """Errors of ours as one message and exit status 1."""
    try:
        yield
    except BuildError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"no space left on the device of {error.filename or Path.cwd()}; free some and build again")
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and error.filename:
            _fail(
                f"{Path(str(error.filename)).absolute()}: {error.strerror}; build in a folder that this user may "
                "write to, named with -C build-dir=FOLDER, or copy the source to one"
            )
        raise


def _fail(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    raise SystemExit(1)


def _refuse_full(folders: list[Path]) -> None:
    """Raises BuildError when a folder that is written to lies on a full device."""
    for folder in folders:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < LEAST_SPACE.bytes:
            raise BuildError(
                f"no space left: {folder} has {Size(free).human()} free, and a build needs at least {LEAST_SPACE}; "
                "free some, or set TMPDIR if it is the folder for temporary files"
            )


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to write archives to; they are moved to `folder` when the context ends well."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pelton-", dir=folder) as temporary:
        yield Path(temporary)
        for path in Path(temporary).iterdir():
            path.chmod(0o644)
            path.replace(folder / path.name)


@contextlib.contextmanager
def _alone(build_dir: Path) -> Iterator[None]:
    """Wait until no other build uses the folder. The lock is the kernel's: a build that is killed leaves none."""
    build_dir.mkdir(parents=True, exist_ok=True)
    path = build_dir.parent / f".{build_dir.name}.lock"
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"waiting for another build in {build_dir}\n")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _answer(call: str) -> None:
    """The other half of `_utf8`."""

    def text(value: Any) -> Any:
        return os.fsdecode(os.fsencode(value)) if isinstance(value, str) else value

    name, arguments, named, answer = json.loads(call)
    result = globals()[name](*map(text, arguments), **{key: text(value) for key, value in named.items()})
    Path(text(answer)).write_text(json.dumps(result), encoding="ascii")


if __name__ == "__main__":
    _answer(sys.argv[1])
