"""What `pyproject.toml` says to this tool, in its table `[tool.pelton-build]`.

[tool.pelton-build]
fallback-version = "0.1.0"       # of a source that has neither a git tag nor a release file
dependencies = ["numpy>=2"]      # of every wheel; the profile's own (torch among them) come on top
baseline-profile = "cpu-avx2"    # whose wheels the main index holds
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BuildError
from .values import did_you_mean

__all__ = ["FILE", "ProjectError", "ProjectSettings", "load_project", "parse_project"]

FILE = "pyproject.toml"
TABLE = "pelton-build"


class ProjectError(BuildError):
    """The tool's table in `pyproject.toml` is missing or says something that the tool does not understand."""


@dataclass(frozen=True)
class ProjectSettings:
    """The table's keys."""

    fallback_version: str
    dependencies: tuple[str, ...]
    baseline_profile: str = ""


def load_project(root: Path) -> ProjectSettings:
    """The settings of the project at `root`. Raises ProjectError."""
    try:
        return parse_project((root / FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProjectError(f"{FILE}: cannot be read ({error})") from None


def parse_project(text: str) -> ProjectSettings:
    """The settings in `text`, a whole `pyproject.toml`. Raises ProjectError naming the key."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProjectError(f"{FILE}: not valid TOML: {error}") from None
    table = data.get("tool", {}).get(TABLE)
    if not isinstance(table, dict):
        raise ProjectError(f"{FILE}: missing table [tool.{TABLE}]")
    known = ("fallback-version", "dependencies", "baseline-profile")
    for key in table:
        if key not in known:
            raise ProjectError(f"{FILE}: unknown key 'tool.{TABLE}.{key}'{did_you_mean(key, known)}")
    version, dependencies = table.get("fallback-version"), table.get("dependencies", [])
    if not isinstance(version, str) or not version:
        raise ProjectError(f"{FILE}: tool.{TABLE}.fallback-version: expected text such as '0.1.0'")
    if not isinstance(dependencies, list) or not all(isinstance(item, str) for item in dependencies):
        raise ProjectError(f"{FILE}: tool.{TABLE}.dependencies: expected a list of texts")
    baseline = table.get("baseline-profile", "")
    if not isinstance(baseline, str):
        raise ProjectError(
            f"{FILE}: tool.{TABLE}.baseline-profile: expected a profile's name, found {baseline!r}"
        )
    return ProjectSettings(version, tuple(dependencies), baseline)
