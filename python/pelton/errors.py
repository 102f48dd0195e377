"""The errors of Pelton: one base class, one clear message each.

A message names what is wrong (the parameter, the file, the limit), what was found, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CapacityError",
    "CheckpointError",
    "HardwareMismatch",
    "InvalidValueError",
    "LibraryError",
    "MissingFeature",
    "ModelOutputError",
    "PeltonError",
    "PromptError",
    "TokenizerError",
    "UnknownOptionError",
    "UnsupportedError",
    "did_you_mean",
]


class PeltonError(Exception):
    """Base class of every error that Pelton raises on purpose."""


class InvalidValueError(PeltonError, ValueError):
    """A parameter has a value that it cannot have."""


class UnknownOptionError(InvalidValueError, TypeError):
    """An option with this name does not exist (the message gives the nearest, or says where it lives)."""


class PromptError(InvalidValueError):
    """A prompt cannot be run: empty, too long, or with token ids outside of the vocabulary."""


class CapacityError(InvalidValueError):
    """The memory that was given is too small for what was asked."""


class UnsupportedError(PeltonError, ValueError):
    """A model architecture or feature that Pelton does not implement."""


class MissingFeature(UnsupportedError):
    """The installed build lacks a feature that the model needs: which one, its profile, and the command that helps."""

    def __init__(self, what: str, *, feature: str, profile: str, install: str) -> None:
        super().__init__(f"{what}. What helps: {install}")
        self.what, self.feature, self.profile, self.install = what, feature, profile, install

    def __reduce__(self) -> tuple[object, ...]:
        return _missing_feature, (self.what, self.feature, self.profile, self.install)


def _missing_feature(what: str, feature: str, profile: str, install: str) -> MissingFeature:
    return MissingFeature(what, feature=feature, profile=profile, install=install)


class CheckpointError(PeltonError, ValueError):
    """A model file or folder is missing, damaged, incomplete or unsafe."""


class TokenizerError(PeltonError, ValueError):
    """The model has no tokenizer or chat template, or it cannot be used."""


class LibraryError(PeltonError, ImportError):
    """The compiled library is missing, or was not made for this machine."""


class HardwareMismatch(LibraryError):
    """The installed build is for another machine: what was found, what it needs, and the command that helps."""

    def __init__(self, what: str, *, found: str, needed: str, install: str) -> None:
        super().__init__(f"{what}: found {found}; needed {needed}. What helps: {install}")
        self.what, self.found, self.needed, self.install = what, found, needed, install

    def __reduce__(self) -> tuple[object, ...]:
        return _hardware_mismatch, (self.what, self.found, self.needed, self.install)


def _hardware_mismatch(what: str, found: str, needed: str, install: str) -> HardwareMismatch:
    return HardwareMismatch(what, found=found, needed=needed, install=install)


class ModelOutputError(PeltonError, ArithmeticError):
    """The model computed something that no token can be chosen from (NaN or infinity)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the known name nearest to `name`, or ``""`` if none is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
