"""The errors of the build: one base class, one message that says what, where, and what to do."""

from __future__ import annotations

__all__ = [
    "BuildError",
    "ChoiceError",
    "DetectionError",
    "PlanError",
    "ProfileError",
    "TableError",
    "ToolchainError",
]


class BuildError(Exception):
    """Base of every error that a user of the build can cause or mend. `str(error)` is the whole message."""


class ProfileError(BuildError):
    """A profile file is missing, unreadable or says something that the schema does not know."""


class TableError(BuildError):
    """`kernels.toml` or the project file says something that the tool does not understand."""


class ChoiceError(BuildError):
    """A switch on the command line or in the environment is unknown, malformed or contradicts another one."""


class ToolchainError(BuildError):
    """A compiler, toolkit or header set is unusable, or not of a version that the profile allows."""


class DetectionError(BuildError):
    """No profile was named, and none fits what was found on this machine."""


class PlanError(BuildError):
    """The profile and the choices are each valid, but what they ask for together cannot be built."""
