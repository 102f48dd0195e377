#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2026.10.20"]
# ///
"""Everything that is done to the project: `nox -l` lists it, `nox -s NAME -- ARGUMENTS` does it.

The sessions `build-NAME` are made from the files of build_profiles/; a new file is a new session.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(
    0, str(ROOT / "python")
)  # pelton_build decides everything; it needs the standard library alone

from pelton_build.__main__ import main as pelton_build  # noqa: E402
from pelton_build.errors import BuildError  # noqa: E402
from pelton_build.profile import load_profile, profile_names  # noqa: E402

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True


def tool(session: nox.Session, *arguments: str) -> None:
    """Run a subcommand of pelton_build; it has said what is wrong when it fails."""
    if pelton_build([*arguments]) != 0:
        session.error(f"{arguments[0]} failed, see the message above")


# --- decisions: need neither an environment nor a compiler -----------------------------------------------------------


@nox.session(venv_backend="none", tags=["decide"])
def plan(session: nox.Session) -> None:
    """Print what a build would do and why: -- [PROFILE] [--feature marlin=off] [--json]."""
    tool(session, "plan", *session.posargs)


@nox.session(venv_backend="none", tags=["decide"])
def matrix(session: nox.Session) -> None:
    """Print the CI matrix of all profiles as JSON."""
    tool(session, "matrix", *session.posargs)


@nox.session(venv_backend="none", tags=["decide"])
def presets(session: nox.Session) -> None:
    """Write CMakeUserPresets.json, one preset for each profile."""
    tool(session, "presets", *session.posargs)


@nox.session(venv_backend="none", tags=["decide"])
def schema(session: nox.Session) -> None:
    """Write the profiles' JSON schema for editors; -- --check only compares."""
    tool(session, "schema", *session.posargs)


# --- wheels: one session for each profile ----------------------------------------------------------------------------


def build(session: nox.Session, name: str) -> None:
    """Build, repair and audit the wheel of profile `name` into dist/NAME/."""
    session.error("the build backend is not there yet")


def _build_session(name: str) -> None:
    try:
        profile = load_profile(ROOT, name)
        tags, about = ["build", f"build-{profile.target.backend}"], profile.summary
    except BuildError as error:  # `nox -l` and the other profiles go on; the session itself says it again
        tags, about = ["build"], f"cannot be built: {error}"

    def run(session: nox.Session) -> None:
        build(session, name)

    run.__doc__ = f"Build the {name} wheel. {about}"
    nox.session(run, name=f"build-{name}", tags=tags)


for _name in profile_names(ROOT):
    _build_session(_name)


if __name__ == "__main__":
    nox.main()
