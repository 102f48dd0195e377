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
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "docs")]

import tables  # noqa: E402

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
        ("profiles", tables.profiles),
        ("profile-keys", tables.profile_keys),
        ("features", tables.features),
        ("families", tables.families),
    ):
        app.add_directive(name, directive(markdown))
