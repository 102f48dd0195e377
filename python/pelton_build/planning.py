"""From the project's folder to a plan: reads the files, the switches and this machine, then decides.

The order in which a profile is chosen:
1. named on the command line (`-C profile=NAME`, `plan NAME`),
2. `PELTON_PROFILE`,
3. what this machine is (see `detect`), within `PELTON_TARGET_DEVICE` when that is set.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .detect import detect, probe_hardware
from .errors import BuildError, ChoiceError
from .plan import Plan, Setting, render
from .profile import Profile, check_own_label, load_profile, profile_names
from .project import load_project
from .resolve import resolve
from .settings import Choices, ConfigSettings, environment, read_choices, split_setting
from .table import KernelTable, load_table
from .toolchain import Toolchain, probe_toolchain
from .version import source_version

__all__ = ["choose_profile", "main", "make_plan", "project_root", "project_version", "write_atomically"]

logger = logging.getLogger(__name__)


def project_root() -> Path:
    """The folder of the project that this package lies in."""
    return Path(__file__).resolve().parents[2]


def project_version(root: Path, environ: Mapping[str, str]) -> str:
    """The project's version without label. Raises ProjectError, VersionError."""
    return source_version(root, environ, load_project(root)).version


def make_plan(
    root: Path,
    config_settings: ConfigSettings | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    version: str | None = None,
) -> Plan:
    """The plan of the project at `root` on this machine.

    `config_settings` are those of a PEP 517 front end, `environ` is this process's by default.
    Raises BuildError.
    """
    environ = environment() if environ is None else environ
    table = load_table(root)
    choices = read_choices(config_settings, environ, table)
    if choices.profile is not None:
        # Before anything is probed: a misspelt name is answered at once.
        load_profile(root, choices.profile.value)
    toolchain = probe_toolchain(environ, choices)
    profile, choices = choose_profile(root, choices, table, toolchain, environ)
    return resolve(profile, choices, table, toolchain, version or project_version(root, environ))


def choose_profile(
    root: Path, choices: Choices, table: KernelTable, toolchain: Toolchain, environ: Mapping[str, str]
) -> tuple[Profile, Choices]:
    """The profile chosen or detected, and the choices with it filled in. Raises DetectionError,
    ProfileError."""
    if choices.profile is not None:
        profile = load_profile(root, choices.profile.value)
        check_own_label(root, profile)
        return profile, choices
    profiles: list[Profile] = []
    broken: list[tuple[str, str]] = []
    for name in profile_names(root):
        try:
            profiles.append(load_profile(root, name))
        except BuildError as error:
            broken.append((name, str(error)))
    device = choices.device.value if choices.device is not None else None
    hardware = probe_hardware(environ)
    found = detect(hardware, profiles, table, toolchain, device, tuple(broken))
    lost = tuple(f"{name} ({reason})" for name, reason in found.rejected)
    check_own_label(root, found.profile)
    setting = Setting("profile", found.profile.name, f"detected: {found.reason}", lost)
    notes = (*choices.notes, *hardware.notes)
    return found.profile, dataclasses.replace(choices, profile=setting, notes=notes)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all; a file that already says so keeps its time stamp."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def settings_of(profile: str | None, features: Sequence[str], settings: Sequence[str]) -> ConfigSettings:
    """Command line options as the config settings that a front end would make of them. Raises ChoiceError."""
    made: dict[str, list[str]] = {}
    if profile is not None:
        made.setdefault("profile", []).append(profile)
    for text in features:
        key, value = split_setting("--feature ", text, "NAME=on or NAME=off")
        made.setdefault(f"feature.{key}", []).append(value)
    for text in settings:
        key, value = split_setting("-C ", text, "KEY=VALUE")
        made.setdefault(key, []).append(value)
    return made


def main(arguments: Sequence[str]) -> int:
    """The subcommand `plan`."""
    parser = argparse.ArgumentParser(prog="plan", description="Print what a build would do, and why.")
    parser.add_argument(
        "profile",
        nargs="?",
        help="a file of build_profiles/ without .toml; else the environment or this machine decides",
    )
    parser.add_argument(
        "--feature", action="append", default=[], metavar="NAME=on|off", help="switch a feature"
    )
    parser.add_argument(
        "-C", "--config-setting", action="append", default=[], metavar="KEY=VALUE", help="as pip's -C"
    )
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")
    parser.add_argument("--root", type=Path, default=project_root(), help="the project's folder")
    options = parser.parse_args(arguments)
    if options.profile is not None and not options.profile.strip():
        raise ChoiceError("the profile's name is empty; leave it out to have this machine detected")
    chosen = settings_of(options.profile, options.feature, options.config_setting)
    plan = make_plan(options.root.resolve(), chosen)
    sys.stdout.write(plan.to_json() if options.json else render(plan))
    return 0
