"""Which features a build has: the command line over the environment over the profile, and what that makes
of the label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .errors import PlanError, ProfileError
from .plan import Backend, Feature, Setting
from .profile import Profile
from .table import KernelTable
from .values import did_you_mean

__all__ = ["can_give", "check_profile_features", "feature_label", "resolve_features"]


def check_profile_features(profile: Profile, table: KernelTable) -> None:
    """Raises ProfileError when the profile names a feature that the kernel table does not declare."""
    for name in profile.features:
        if name not in table.features:
            raise ProfileError(
                f"{profile.file}: features.{name}: unknown feature "
                f"{name!r}{did_you_mean(name, table.features)}"
            )


def can_give(name: str, backend: Backend, table: KernelTable) -> str:
    """Why `backend` cannot give feature `name`, as half a sentence; empty when it can."""
    entry = table.features[name]
    if backend not in entry.backends:
        owners = " and ".join(entry.backends) or "no backend"
        return f"it is a feature of {owners}, and the profile's backend is {backend}"
    if entry.definitions and any(backend in family.device for family in table.families):
        return ""
    for family in table.families:
        for source in (*family.op, *family.device.get(backend, ())):
            if name in (*family.features, *source.features) and backend in family.device:
                return ""
    return f"no family of kernels.toml implements it for backend {backend} yet"


def resolve_features(
    profile: Profile, chosen: Mapping[str, Setting], table: KernelTable
) -> tuple[Feature, ...]:
    """The state of every declared feature, in the table's order.

    Raises ProfileError for a feature that is not declared, PlanError for one that is
    asked for and cannot be had.
    """
    check_profile_features(profile, table)
    states: list[Feature] = []
    for name in table.features:
        default = profile.features.get(name, False)
        from_profile = f"{profile.file}" if name in profile.features else "default"
        choice = chosen.get(name)
        if choice is None:
            state = Feature(name, default, from_profile)
        else:
            enabled = choice.value == "on"
            lost = choice.overridden
            if enabled != default:
                lost = (*lost, f"{'on' if default else 'off'} ({from_profile})")
            state = Feature(name, enabled, choice.origin, enabled != default, lost)
        why_not = can_give(name, profile.target.backend, table) if state.enabled else ""
        if why_not:
            raise PlanError(
                f"feature {name!r} is on ({state.origin}) for profile {profile.name!r}, but {why_not}; "
                f"switch it off with feature.{name}=off or choose another profile"
            )
        states.append(state)
    return tuple(states)


def feature_label(features: Iterable[Feature]) -> str:
    """What a changed feature set adds to the label: `.fastmath` for one switched on, `.noawq` for one
    switched off."""
    parts = [feature_mark(feature.name, feature.enabled) for feature in features if feature.changed]
    return "".join(f".{part}" for part in sorted(parts))


def feature_mark(name: str, enabled: bool) -> str:
    """What one changed feature is called in a label: `fastmath`, `noawq`."""
    return ("" if enabled else "no") + re.sub(r"[^a-z0-9]", "", name.lower())
