"""Version and dependencies of a wheel, from its plan: the dynamic-metadata provider that `pyproject.toml` names.

Providers are not told about config settings, so the backend says here what it is building before it calls
scikit-build-core. torch is never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BuildError
from .plan import Plan
from .project import load_project
from .table import load_table

__all__ = ["Distribution", "Provider", "building", "distribution_of_sdist", "distribution_of_wheel"]


@dataclass(frozen=True)
class Distribution:
    """What the metadata of an archive says that is not static."""

    version: str
    dependencies: tuple[str, ...]


_current: ContextVar[Distribution | None] = ContextVar("current", default=None)


@contextmanager
def building(distribution: Distribution) -> Iterator[None]:
    """Within this context the provider answers for `distribution`."""
    token = _current.set(distribution)
    try:
        yield
    finally:
        _current.reset(token)


def distribution_of_wheel(root: Path, plan: Plan) -> Distribution:
    """The plan's version with its label; the project's dependencies and the plan's. Raises ProjectError."""
    return Distribution(plan.wheel_version, (*plan.requires, *load_project(root).dependencies))


def distribution_of_sdist(root: Path, version: str) -> Distribution:
    """An sdist has no profile, hence no label, and only the dependencies that all wheels share."""
    floor = load_table(root).library.torch
    return Distribution(version, (f"torch>={floor}", *load_project(root).dependencies))


class Provider:
    """See the specification of dynamic-metadata 0.3."""

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        """Raises BuildError when scikit-build-core was called past our backend."""
        if settings:
            raise BuildError(
                f"pyproject.toml: tool.dynamic-metadata: unknown keys {', '.join(sorted(settings))}"
            )
        current = _current.get()
        if current is None:
            raise BuildError(
                "the build backend is pelton_build.backend; do not call scikit_build_core.build directly"
            )
        return {"version": current.version, "dependencies": list(current.dependencies)}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """The dependencies of a wheel may be more than those of the sdist it is built from."""
        return {"dependencies": True}
