"""What a release needs to be true, and how it is told: decisions over plain values, no effects.

`nox -s release` gathers the values, builds, and stops where one of these functions says so:

1. `tree_problems`: the tree is the commit's, and its tag is the version's;
2. `unbuildable`: every profile can be built on this machine, or leaving some out was asked for;
3. `contradictions`: no index holds a file of one of these names with other bytes already;
4. `table`, `notes`: what was made, for a terminal and for release notes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import BuildError
from .plan import Plan
from .planning import make_plan, project_root, project_version, write_atomically
from .profile import profile_names
from .settings import environment
from .version import Tag

__all__ = [
    "ReleaseError",
    "Row",
    "Times",
    "as_json",
    "contradictions",
    "main",
    "notes",
    "plans_of",
    "published",
    "table",
    "tree_problems",
    "unbuildable",
]


class ReleaseError(BuildError):
    """The release stops; nothing was published."""


@dataclass(frozen=True)
class Row:
    """One wheel of the release."""

    profile: str
    file: str
    size: int  # bytes
    sha256: str
    archs: tuple[str, ...]
    seconds: float | None  # of its build; None when a whole wheel was found and nothing had to be built
    tried: str  # what was run with it on this machine, or why nothing was


def tree_problems(version: str, tag: str | None, *, tagged: bool) -> tuple[str, ...]:
    """Why this tree is not the one to release; empty when it is.

    `version` is the source's, without label; `tag` the one that the release is made for. A rehearsal (`tagged`
    false) needs no tag, but a clean tree.
    """
    problems = []
    if version.endswith(".dirty"):
        problems.append(
            f"the tree has changes that no commit holds (its version is {version}); commit or remove them: git status"
        )
    if tag is not None:
        parsed = Tag.parse(tag)
        if parsed is None or not tag.startswith("v"):
            problems.append(f"tag {tag!r}: expected v and a version, such as v0.3.0 or v0.3.0rc1")
        elif str(parsed) != version:
            problems.append(
                f"tag {tag!r} stands for version {parsed}, but this source is {version}; check out the tagged commit"
            )
    elif tagged:
        problems.append(
            f"this commit has no tag of a version (the source is {version}); tag it (git tag v...), or rehearse: --dry-run"
        )
    return tuple(problems)


def unbuildable(plans: Mapping[str, Plan | str]) -> dict[str, str]:
    """Profile -> why it cannot be built here. A value that is text is why there is no plan."""
    reasons = {}
    for name, plan in plans.items():
        if isinstance(plan, str):
            reasons[name] = plan
        elif switched := [feature for feature in plan.features if feature.changed]:
            said = ", ".join(f"{feature.name} ({feature.origin})" for feature in switched)
            reasons[name] = (
                f"a release is what the profile says, and here it is switched: {said}; take that back"
            )
        elif plan.problems:
            reasons[name] = "; ".join(plan.problems)
    return reasons


def published(site: Path) -> dict[str, str]:
    """File name -> SHA-256 of all that the index at `site` holds; empty when there is none. Raises ReleaseError."""
    held: dict[str, str] = {}
    for page in sorted([*site.glob("p/*/simple/*/index.json"), *site.glob("simple/*/index.json")]):
        try:
            for file in json.loads(page.read_text(encoding="utf-8"))["files"]:
                held[str(file["filename"])] = str(file["hashes"]["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReleaseError(
                f"{page}: not a page of an index ({error}); give the folder of a whole index, or make it again: nox -s index"
            ) from None
    return held


def contradictions(rows: Iterable[Row], held: Mapping[str, str]) -> tuple[str, ...]:
    """Wheels whose names are taken by other bytes: installers that locked the old hash would refuse the new file."""
    return tuple(
        f"{row.file}: the index holds it with SHA-256 {held[row.file][:16]}..., this one is {row.sha256[:16]}...; "
        "a file that was published never changes: raise the version"
        for row in rows
        if held.get(row.file, row.sha256) != row.sha256
    )


def _cells(row: Row) -> tuple[str, ...]:
    seconds = "was whole" if row.seconds is None else f"{row.seconds:.0f} s"
    return (
        row.profile,
        row.file,
        f"{row.size / 1e6:.1f} MB",
        row.sha256,
        " ".join(row.archs),
        seconds,
        row.tried,
    )


_HEAD = ("profile", "file", "size", "SHA-256", "archs", "build", "tried")


def table(rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """The wheels for a terminal: a block for each, since names and hashes are long."""
    lines = []
    for row in rows:
        profile, *cells = _cells(row)
        lines.append(profile)
        lines += [f"  {name.ljust(10)} {cell}" for name, cell in zip(_HEAD[1:], cells, strict=True)]
    lines += [f"{name}\n  left out   {reason}" for name, reason in left_out.items()]
    return "\n".join(lines) + "\n"


def notes(version: str, rows: Sequence[Row], left_out: Mapping[str, str]) -> str:
    """The wheels as Markdown, for release notes."""
    lines = [f"## Wheels of {version}", "", _markdown(_HEAD), _markdown(["---"] * len(_HEAD))]
    for row in rows:
        profile, file, size, sha256, *rest = _cells(row)
        lines.append(_markdown([f"`{profile}`", f"`{file}`", size, f"`{sha256}`", *rest]))
    lines += ["", *(f"- `{name}` was left out: {reason}" for name, reason in left_out.items())]
    return "\n".join(lines).rstrip() + "\n"


def _markdown(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


@dataclass
class Times:
    """Seconds that each wheel took to build, kept over interruptions; a wheel is known by its SHA-256."""

    path: Path

    def read(self) -> dict[str, Any]:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # figures for the table: without them it says "was whole"
            return {}
        return known if isinstance(known, dict) else {}

    def get(self, sha256: str) -> float | None:
        seconds = self.read().get(sha256)
        return float(seconds) if isinstance(seconds, int | float) else None

    def add(self, sha256: str, seconds: float) -> None:
        write_atomically(self.path, json.dumps({**self.read(), sha256: round(seconds, 1)}, indent=1) + "\n")


def plans_of(root: Path) -> dict[str, Plan | str]:
    """The plan of every profile, or why there is none."""
    plans: dict[str, Plan | str] = {}
    for name in profile_names(root):
        try:
            plans[name] = make_plan(root, {"profile": name})
        except BuildError as error:
            plans[name] = str(error)
    return plans


def as_json(rows: Sequence[Row]) -> str:
    """The rows for tools."""
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


def main(arguments: Sequence[str]) -> int:
    """The subcommand `release`: print the version to release, or say why this tree is not it."""
    parser = argparse.ArgumentParser(
        prog="release",
        description="Check the tree and the tag, and print the version; nox -s release builds.",
    )
    parser.add_argument("--root", type=Path, default=project_root(), help="the project's folder")
    parser.add_argument("--tag", help="the tag that the release is made for, such as v0.3.0")
    parser.add_argument("--dry-run", action="store_true", help="a rehearsal: the commit needs no tag")
    options = parser.parse_args(arguments)
    version = project_version(options.root.resolve(), environment())
    if problems := tree_problems(version, options.tag, tagged=not options.dry_run):
        raise ReleaseError("; ".join(problems))
    sys.stdout.write(f"{version}\n")
    return 0
