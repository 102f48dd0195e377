"""What `pyproject.toml` says to this tool, in its table `[tool.pelton-build]`.

[tool.pelton-build]
fallback-version = "0.1.0"       # of a source that has neither a git tag nor a release file
dependencies = ["numpy>=2"]      # of every wheel; the profile's own (torch among them) come on top
baseline-profile = "cpu-avx2"    # whose wheels the main index holds
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .toml import parse_toml, read_text
from .values import check_requirement, did_you_mean

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
    license: str = ""
    """The key `project.license`, an SPDX expression."""


def load_project(root: Path) -> ProjectSettings:
    """The settings of the project at `root`. Raises ProjectError."""
    return parse_project(read_text(root / FILE, FILE, ProjectError))


def parse_project(text: str) -> ProjectSettings:
    """The settings in `text`, a whole `pyproject.toml`. Raises ProjectError naming the key."""
    data = parse_toml(text, FILE, ProjectError)
    tool = data.get("tool", {})
    table = tool.get(TABLE) if isinstance(tool, dict) else None
    if not isinstance(table, dict):
        raise ProjectError(f"{FILE}: missing table [tool.{TABLE}]")
    known = ("fallback-version", "dependencies", "baseline-profile")
    for key in table:
        if key not in known:
            raise ProjectError(f"{FILE}: unknown key 'tool.{TABLE}.{key}'{did_you_mean(key, known)}")
    version, dependencies = table.get("fallback-version"), table.get("dependencies", [])
    if not isinstance(version, str) or not re.fullmatch(r"\d+\.\d+\.\d+", version, re.ASCII):
        raise ProjectError(
            f"{FILE}: tool.{TABLE}.fallback-version: expected text such as '0.1.0', found {version!r}"
        )
    if not isinstance(dependencies, list) or not all(isinstance(item, str) for item in dependencies):
        raise ProjectError(f"{FILE}: tool.{TABLE}.dependencies: expected a list of texts")
    for dependency in dependencies:
        try:
            check_requirement(dependency)
        except ValueError as error:
            raise ProjectError(f"{FILE}: tool.{TABLE}.dependencies: {error}") from None
    baseline = table.get("baseline-profile", "")
    if not isinstance(baseline, str):
        raise ProjectError(
            f"{FILE}: tool.{TABLE}.baseline-profile: expected a profile's name, found {baseline!r}"
        )
    project = data.get("project", {})
    license = project.get("license", "") if isinstance(project, dict) else ""
    return ProjectSettings(
        version, tuple(dependencies), baseline, license if isinstance(license, str) else ""
    )
