"""The tables of the documentation that are lists elsewhere: read from there, as lines of Markdown."""

from __future__ import annotations

from pathlib import Path

from pelton_build.profile import load_profile, profile_names
from pelton_build.schema import schema
from pelton_build.table import load_table

ROOT = Path(__file__).resolve().parents[1]


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def profiles() -> list[str]:
    """The table of all profiles."""
    lines = [row("profile", "hardware", "archs", "label", "features"), row(*["---"] * 5)]
    for name in profile_names(ROOT):
        profile = load_profile(ROOT, name)
        features = ", ".join(feature for feature, on in profile.features.items() if on) or "none"
        archs = " ".join(f"`{arch}`" for arch in profile.target.arch)
        lines.append(row(f"`{name}`", profile.summary, archs, f"`{profile.wheel.label}`", features))
    return lines


def profile_keys() -> list[str]:
    """All keys of a profile, from the schema that editors use."""
    lines = [row("key", "meaning"), row("---", "---")]
    for key, about in schema(load_table(ROOT))["properties"].items():
        lines.append(row(f"`{key}`", about.get("description", "")))
        # Features have a table of their own.
        for inner, said in about.get("properties", {}).items() if key != "features" else ():
            lines.append(row(f"`{key}.{inner}`", said.get("description", "")))
    return lines


def features() -> list[str]:
    """The optional features and who can switch them how."""
    lines = [row("feature", "what it brings", "backends", "environment"), row(*["---"] * 4)]
    for name, feature in load_table(ROOT).features.items():
        lines.append(
            row(f"`{name}`", feature.summary, ", ".join(feature.backends), f"`{feature.environment}`")
        )
    return lines


def families() -> list[str]:
    """The kernel families: the features that bring them, and who has device code."""
    lines = [row("family", "what it computes", "device code for", "with feature"), row(*["---"] * 4)]
    for family in load_table(ROOT).families:
        backends = ", ".join(backend for backend, sources in family.device.items() if sources)
        lines.append(row(f"`{family.name}`", family.summary, backends, " or ".join(family.features)))
    return lines
