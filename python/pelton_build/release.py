"""A release: what it needs to be true, the order in which it is made, and how it is told.

`make_release` goes through it and has `nox -s release` do what needs environments and compilers (`Workshop`):

1. `tree_problems`: the tree is the commit's, and its tag is the version's;
2. `unbuildable`: every profile can be built on this machine, or leaving some out was asked for;
3. each wheel is built and audited, unless a whole one of these very sources is there, and variant wheels are made of
   the same builds, and the source distribution;
4. `contradictions`: no index holds a file of one of these names with other bytes already;
5. the index is made, each wheel installed from it and tried, and one built a second time elsewhere;
6. `table`, `notes`: what was made, for a terminal and for release notes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .cmake import source_digest
from .errors import BuildError
from .plan import Plan
from .planning import make_plan, project_root, write_atomically
from .profile import profile_names
from .project import load_project
from .settings import VERSION, environment
from .version import Tag, clone_problem, project_version, tags_of

__all__ = [
    "Facts",
    "Item",
    "Options",
    "ReleaseError",
    "Row",
    "Workshop",
    "as_json",
    "contradictions",
    "is_fresh",
    "items_of",
    "main",
    "make_release",
    "notes",
    "published",
    "sha256",
    "table",
    "tree_problems",
    "unbuildable",
]

logger = logging.getLogger(__name__)


class ReleaseError(BuildError):
    """The release stops; nothing was published."""


@dataclass(frozen=True)
class Item:
    """One wheel that a release is to have."""

    title: str
    place: str  # where the index has it: p/cpu-avx2/simple
    settings: Mapping[str, str]  # of its build
    plan: Plan | str  # a text is why there is no plan


@dataclass(frozen=True)
class Row:
    """One wheel of the release."""

    profile: str  # or another title
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
    elif tagged and Tag.parse(f"v{version}") is not None:
        problems.append(f"no tag was named; this source is version {version}: --tag v{version}")
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
    pages = sorted([*site.glob("p/*/simple/*/index.json"), *site.glob("simple/*/index.json")])
    if not pages and (site / "index.html").exists():
        raise ReleaseError(
            f"{site}: has no index.json of the project, which tells what is published; give the folder of a whole index"
        )
    for page in pages:
        try:
            for file in json.loads(page.read_text(encoding="utf-8"))["files"]:
                held[str(file["filename"])] = str(file["hashes"]["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ReleaseError(
                f"{page}: not a page of an index ({error}); give the folder of a whole index, or make it again: nox -s index"
            ) from None
    return held


def check_asked(index: Path | None, environ: Mapping[str, str], *, rehearsal: bool) -> None:
    """Raises ReleaseError when an index that was named is none, or when a variable hides what the tree is."""
    if index is not None and not (index / "index.html").is_file():
        raise ReleaseError(
            f"--index {index}: no index is there (it has no index.html); name the folder of the published one, or leave "
            "--index out for the first release"
        )
    if VERSION in environ and not rehearsal:
        raise ReleaseError(
            f"{VERSION} is set ({environ[VERSION]!r}): a release takes its version from the tag and sees whether the tree "
            "is clean; unset it"
        )


def contradictions(files: Iterable[tuple[str, str]], held: Mapping[str, str]) -> tuple[str, ...]:
    """Files (name, SHA-256) whose names are taken by other bytes: installers that locked the old hash would refuse the
    new file."""
    return tuple(
        f"{name}: the index holds it with SHA-256 {held[name][:16]}..., this one is {digest[:16]}...; "
        "a file that was published never changes: raise the version"
        for name, digest in files
        if held.get(name, digest) != digest
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
class Facts:
    """What is known of wheels, kept over interruptions; a wheel is known by its SHA-256."""

    path: Path

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            known = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(digest): dict(facts) for digest, facts in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):  # a cache: without it the work is done again
            return {}

    def seconds(self, digest: str) -> float | None:
        """How long the wheel took to build."""
        seconds = self._read().get(digest, {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    def rebuilt_by(self, digest: str) -> str | None:
        """Who made the same bytes in a second build."""
        words = self._read().get(digest, {}).get("rebuilt_by")
        return words if isinstance(words, str) else None

    def add(self, digest: str, **facts: float | str) -> None:
        known = self._read()
        known[digest] = {**known.get(digest, {}), **facts}
        write_atomically(self.path, json.dumps(known, indent=1) + "\n")


def items_of(root: Path) -> list[Item]:
    """The wheels of a release: one for each profile, and the baseline's without label for the main index."""
    wanted = [(name, f"p/{name}/simple", {"profile": name}) for name in profile_names(root)]
    if baseline := load_project(root).baseline_profile:
        # Packed in the build folder of the labelled one, where that is left.
        plain = {"profile": baseline, "label": "off", "cmake.fresh": "false"}
        wanted.append((f"{baseline} without label", "simple", plain))
    items = []
    for title, place, settings in wanted:
        plan: Plan | str
        try:
            plan = make_plan(root, settings)
        except BuildError as error:
            plan = str(error)
        items.append(Item(title, place, settings, plan))
    return items


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_fresh(root: Path, wheel: Path, package: str) -> bool:
    """Whether the wheel is there, whole, and was made from the sources as they are."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = json.loads(archive.read(f"{package}/_build_info.json"))
            fresh = bool(info["source_digest"] == source_digest(root))
            return fresh and archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, TypeError, ValueError):
        return False


# --- in order -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What the release is asked to be."""

    index: Path  # the published one
    tag: str | None = None
    dry_run: bool = False  # a rehearsal: the commit needs no tag
    skip_unbuildable: bool = False


class Workshop(Protocol):
    """What needs environments and compilers. Each raises what it likes when it fails, and the release stops."""

    def place_of(self, plan: Plan) -> Path:
        """Where the plan's wheel is put."""

    def build(self, item: Item) -> None:
        """Build and audit the wheel; only one that passes gets to its place."""

    def make_variants(self, items: Sequence[Item], wheels: Sequence[Path]) -> list[Path]:
        """Make the variant wheels, of the same builds."""

    def make_sdist(self) -> Path:
        """Make the source distribution."""

    def make_index(self, wheels: Sequence[Path], site: Path) -> None:
        """Make the index of the wheels in the folder `site`."""

    def try_wheels(self, site: Path, items: Sequence[Item]) -> list[str]:
        """Install each wheel from the index and run it; what came of it."""

    def rebuild(self, item: Item, wheel: Path) -> str:
        """Build the wheel a second time elsewhere and compare; who did it."""


def _told(path: Path) -> str:
    return f"`{path.name}`, {path.stat().st_size / 1e6:.1f} MB, SHA-256 `{sha256(path)}`"


def _refuse_changed(wheels: Iterable[Path], held: Mapping[str, str]) -> None:
    if wrong := contradictions([(wheel.name, sha256(wheel)) for wheel in wheels], held):
        raise ReleaseError("; ".join(wrong))


def checked_version(root: Path, tag: str | None, *, rehearsal: bool) -> str:
    """The version to release.  Raises ReleaseError when this tree is not the one to release."""
    environ = environment()
    if problem := clone_problem(root, environ):
        raise ReleaseError(problem)
    version = project_version(root, environ)
    if problems := tree_problems(version, tag, tagged=not rehearsal):
        raise ReleaseError("; ".join(problems))
    if tag is not None and tag not in (tags := tags_of(root, environ)):
        has = f"it has {', '.join(tags)}" if tags else "it has none"
        raise ReleaseError(
            f"this commit has no tag {tag!r} ({has}); check out the tagged commit, or fetch its tags"
        )
    return version


def make_release(root: Path, options: Options, workshop: Workshop) -> Path:
    """Make all wheels, their index and the notes; the folder of index and notes. Nothing is published.

    Raises ReleaseError, at the first thing that does not hold.
    """
    work = root / "build" / "release"
    version = checked_version(root, options.tag, rehearsal=options.dry_run)
    items, held = items_of(root), published(options.index)
    left_out = unbuildable({item.title: item.plan for item in items})
    if left_out and not options.skip_unbuildable:
        reasons = "".join(f"\n  {title}: {reason}" for title, reason in left_out.items())
        raise ReleaseError(
            f"this machine cannot build{reasons}\ninstall what is missing, or leave them out: --skip-unbuildable"
        )
    items = [item for item in items if item.title not in left_out]
    if not items:
        raise ReleaseError("no profile can be built on this machine")
    facts, rows, wheels = Facts(work / "facts.json"), [], []
    for item in items:
        assert isinstance(item.plan, Plan)
        wheel = workshop.place_of(item.plan)
        if is_fresh(root, wheel, item.plan.package):
            logger.info("%s is whole and of these sources", wheel.name)
        else:
            start = time.monotonic()
            workshop.build(item)
            facts.add(sha256(wheel), seconds=round(time.monotonic() - start, 1))
        digest, size = sha256(wheel), wheel.stat().st_size
        rows.append(
            Row(item.title, wheel.name, size, digest, item.plan.archs, facts.seconds(digest), tried="")
        )
        wheels.append(wheel)
    _refuse_changed(wheels, held)
    variants = workshop.make_variants(items, wheels)
    _refuse_changed(variants, held)
    sdist = workshop.make_sdist()
    workshop.make_index([*wheels, *variants], work / "site")
    tried = workshop.try_wheels(work / "site", items)
    rows = [replace(row, tried=words) for row, words in zip(rows, tried, strict=True)]
    # The last item is the one that most machines get.
    rebuilt_by = facts.rebuilt_by(rows[-1].sha256)
    if rebuilt_by is None:
        rebuilt_by = workshop.rebuild(items[-1], wheels[-1])
        facts.add(rows[-1].sha256, rebuilt_by=rebuilt_by)
    again = f"`{rows[-1].file}` was built a second time elsewhere, by {rebuilt_by}: the same bytes."
    more = [f"Source distribution: {_told(sdist)}"]
    if variants:
        more += [
            "Variant wheels (experimental), of the same builds:",
            "\n".join(f"- {_told(v)}" for v in variants),
        ]
    text = "\n\n".join([notes(version, rows, left_out).rstrip(), again, *more])
    write_atomically(work / "notes.md", f"{text}\n")
    write_atomically(work / "wheels.json", as_json(rows))
    logger.info("the wheels:\n%s%s", table(rows, left_out), again.replace("`", ""))
    return work


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
    root = options.root.resolve()
    if not (root / "pyproject.toml").is_file():
        raise ReleaseError(f"--root {options.root}: no project is there (it has no pyproject.toml)")
    check_asked(None, environment(), rehearsal=options.dry_run)
    version = checked_version(root, options.tag, rehearsal=options.dry_run)
    sys.stdout.write(f"{version}\n")
    return 0
