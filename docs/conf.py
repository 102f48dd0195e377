"""The documentation site: `nox -s docs`. What is a list elsewhere (profiles, their keys, features) is read, not copied."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from pelton_build.profile import load_profile, profile_names  # noqa: E402
from pelton_build.schema import schema  # noqa: E402
from pelton_build.table import load_table  # noqa: E402
from pelton_build.version import project_version  # noqa: E402

project = "Pelton"
author = "the Pelton developers"
copyright = "the Pelton developers"
release = version = project_version(ROOT)

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"Pelton {release.partition('+')[0]}"
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp"
nitpicky = True
# A lexer that does not know a word of a transcript must not stop the build.
suppress_warnings = ["misc.highlighting_failure"]


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


def directive(markdown: Callable[[], list[str]]) -> type[SphinxDirective]:
    """A directive that stands for lines of Markdown."""

    class Made(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            node = nodes.container()
            self.state.nested_parse(StringList(markdown(), ""), self.content_offset, node)
            return node.children

    return Made


def setup(app: Sphinx) -> None:
    for name, markdown in (
        ("profiles", profiles),
        ("profile-keys", profile_keys),
        ("features", features),
        ("families", families),
    ):
        app.add_directive(name, directive(markdown))
