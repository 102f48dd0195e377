"""The project's version and the time of its source, without the label of a profile.

Looked for in this order, the first that says something is taken:

1. `PELTON_VERSION`, for packagers who know better;
2. `python/pelton_build/_source.json`, which the backend writes into every source distribution;
3. git: `vX.Y.Z` on the commit is `X.Y.Z`; N commits later it is `X.Y.(Z+1).devN+g<commit>`; before the first tag it
   is `<fallback>.devN+g<commit>`. Changed files add `.dirty` to the local part, and never a date, so that one tree
   has one version whenever it is built;
4. `.git_archival.txt`, which `git archive` fills in;
5. `fallback-version` of `[tool.pelton-build]` in `pyproject.toml`, with a warning.

The time is the commit's (`SOURCE_DATE_EPOCH` of whoever calls wins over it in the backend), so that archives of
one commit are equal byte for byte.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .project import ProjectSettings, load_project
from .settings import environment

__all__ = [
    "ARCHIVE_FILE",
    "SDIST_FILE",
    "SourceVersion",
    "Tag",
    "VersionError",
    "clone_problem",
    "project_version",
    "source_version",
    "tags_of",
    "version_from_archive",
    "version_from_commit",
]

ARCHIVE_FILE = ".git_archival.txt"
SDIST_FILE = "python/pelton_build/_source.json"
VARIABLE = "PELTON_VERSION"

logger = logging.getLogger(__name__)

DEFAULT_EPOCH = 1_767_225_600  # 2026-01-01, for a source that says nothing of its time
ABBREVIATION = 10  # digits of a commit in a version

# Folders whose files go into a wheel: a file in them that git does not know changes the wheel.
PACKAGED = ("build_profiles/", "cmake/", "kernels/", "python/")

_TAG = re.compile(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(?:(a|b|rc)(\d{1,9}))?", re.ASCII)
_DESCRIBED = re.compile(r"(?P<tag>.+?)(?:-(?P<distance>\d+)-g(?P<commit>[0-9a-f]{4,64}))?", re.ASCII)
_VERSION = re.compile(
    r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?", re.ASCII
)
# Set while git runs a hook of some repository; they would make git look at that one.
_REPOSITORY_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_CEILING_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)


class VersionError(BuildError):
    """A version was stated and is not one, or the file that states it is damaged."""


@dataclass(frozen=True)
class SourceVersion:
    """What is known of a source tree. Equal trees have equal values."""

    version: str
    """PEP 440, in normal form, without the label: `0.3.0`, `0.3.1.dev4+g1a2b3c4d5e.dirty`."""
    epoch: int
    """Seconds since 1970 of the commit."""
    commit: str
    """The whole commit; empty when not known."""
    origin: str
    """Where the version was found."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        state = {"version": self.version, "epoch": self.epoch, "commit": self.commit}
        return json.dumps(state, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True, order=True)
class Tag:
    """The version that a tag names."""

    release: tuple[int, int, int]
    stage: tuple[str, int] = ("z", 0)
    """`a`, `b` or `rc` with its number; `z` sorts a final release behind them."""

    @classmethod
    def parse(cls, text: str) -> Tag | None:
        """None when `text` is no tag of a version."""
        match = _TAG.fullmatch(text.strip())
        if match is None:
            return None
        major, minor, patch, stage, number = match.groups()
        release = (int(major), int(minor), int(patch or 0))
        return cls(release, (stage, int(number))) if stage else cls(release)

    def __str__(self) -> str:
        stage, number = self.stage
        return ".".join(map(str, self.release)) + ("" if stage == "z" else f"{stage}{number}")

    def next(self) -> str:
        """The version that work after this tag leads to."""
        major, minor, patch = self.release
        stage, number = self.stage
        return (
            f"{major}.{minor}.{patch + 1}" if stage == "z" else f"{major}.{minor}.{patch}{stage}{number + 1}"
        )


def version_from_commit(tag: Tag | None, distance: int, commit: str, dirty: bool, fallback: str) -> str:
    """The version of a commit that lies `distance` commits behind `tag`, or behind the first commit without one."""
    if tag is not None and distance == 0 and not dirty:
        return str(tag)
    base = fallback if tag is None else tag.next()
    local = [f"g{commit[:ABBREVIATION]}"] if commit else []
    local += ["dirty"] if dirty else []
    return f"{base}.dev{distance}" + (f"+{'.'.join(local)}" if local else "")


def version_from_archive(text: str, fallback: str) -> SourceVersion | None:
    """What `git archive` wrote into its file; None when that was never filled in."""
    entries = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    commit, time = entries.get("commit", ""), entries.get("time", "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit, re.ASCII):
        return None
    epoch = int(time) if time.isdecimal() else DEFAULT_EPOCH
    described = _DESCRIBED.fullmatch(entries.get("describe", "").strip() or "-")
    tag = Tag.parse(described["tag"]) if described else None
    if described is not None and tag is not None:
        version = version_from_commit(tag, int(described["distance"] or 0), commit, False, fallback)
        return SourceVersion(version, epoch, commit, ARCHIVE_FILE)
    # A git that knows no %(describe) still lists the tags of the very commit.
    names = [name.strip().removeprefix("tag: ") for name in entries.get("refs", "").split(",")]
    tags = [found for name in names if name.startswith("v") and (found := Tag.parse(name))]
    if tags:
        return SourceVersion(str(max(tags)), epoch, commit, ARCHIVE_FILE)
    version = version_from_commit(None, 0, commit, False, fallback)
    warning = f"{ARCHIVE_FILE} names no tag, so the version is taken as {version}; set {VARIABLE} to state it"
    return SourceVersion(version, epoch, commit, ARCHIVE_FILE, (warning,))


def source_version(root: Path, environ: Mapping[str, str], settings: ProjectSettings) -> SourceVersion:
    """The version of the source tree at `root`.

    Raises VersionError when `PELTON_VERSION` is no version or the file of a source distribution is damaged.
    """
    fallback = settings.fallback_version
    found = (
        _from_sdist(root / SDIST_FILE)
        or _from_git(root, environ, fallback)
        or _from_archive(root / ARCHIVE_FILE, fallback)
        or SourceVersion(
            fallback,
            DEFAULT_EPOCH,
            "",
            "pyproject.toml, fallback-version",
            (
                f"neither git nor a release file tells the version, so it is taken as {fallback}; "
                f"set {VARIABLE} to state it, or build from a git clone",
            ),
        )
    )
    stated = environ.get(VARIABLE, "").strip()
    if not stated:
        return found
    if not _VERSION.fullmatch(stated) or len(stated) > 100:
        raise VersionError(
            f"{VARIABLE}: {stated[:100]!r} is not a version in normal form; write e.g. 0.3.0 or 0.3.1.dev4"
        )
    return SourceVersion(stated, found.epoch, found.commit, VARIABLE)


def _from_sdist(path: Path) -> SourceVersion | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        version, epoch, commit = str(state["version"]), int(state["epoch"]), str(state["commit"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VersionError(f"{SDIST_FILE}: damaged ({error}); unpack the source distribution again") from None
    if not _VERSION.fullmatch(version):
        raise VersionError(
            f"{SDIST_FILE}: {version!r} is not a version; unpack the source distribution again"
        )
    return SourceVersion(version, epoch, commit, SDIST_FILE)


def _from_archive(path: Path, fallback: str) -> SourceVersion | None:
    try:
        return version_from_archive(path.read_text(encoding="utf-8"), fallback)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise VersionError(f"{ARCHIVE_FILE}: damaged ({error}); unpack the archive again") from None


def _from_git(root: Path, environ: Mapping[str, str], fallback: str) -> SourceVersion | None:
    # A tree that was unpacked into some other project's clone must not take that project's tags.
    if not (root / ".git").exists():
        return None
    git = _Git(root, environ)
    commit = git("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    if commit is None:
        return None
    tag, distance = _nearest_tag(git)
    warnings = []
    if tag is None:
        distance = int(git("rev-list", "--count", "HEAD") or 0)
    if git("rev-parse", "--is-shallow-repository") == "true" and (tag is None or distance):
        warnings.append(
            "this clone is shallow, so the version counts only the commits that are here; "
            f"run 'git fetch --unshallow --tags' or set {VARIABLE}"
        )
    version = version_from_commit(tag, distance, commit, _is_dirty(git), fallback)
    epoch = int(git("show", "--no-patch", "--format=%ct", "HEAD") or DEFAULT_EPOCH)
    return SourceVersion(version, epoch, commit, "git", tuple(warnings))


class _Git:
    """Runs git on one clone; an answer is its output, None when it failed or git is not installed."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root = root
        self.environ = {name: value for name, value in environ.items() if name not in _REPOSITORY_VARIABLES}
        self.environ |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}

    def __call__(self, *arguments: str) -> str | None:
        # The clone may belong to another user (a container's volume); its build code is being run already, so
        # that reading its commits is no further risk. No program that its configuration names is started.
        command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *arguments]
        try:
            result = subprocess.run(
                command,
                cwd=self.root,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip("\n") if result.returncode == 0 else None


def _nearest_tag(git: _Git) -> tuple[Tag | None, int]:
    """The highest version among the tags of the nearest tagged commit, and the commits since. Other tags do not count."""
    excluded: list[str] = []
    for _ in range(20):
        described = git("describe", "--tags", "--long", "--match", "v[0-9]*", *excluded)
        match = _DESCRIBED.fullmatch(described or "")
        if match is None or match["distance"] is None:
            return None, 0
        names = (git("tag", "--points-at", f"{match['tag']}^{{commit}}") or "").split("\n")
        tags = [tag for name in names if name.startswith("v") and (tag := Tag.parse(name))]
        if tags:
            return max(tags), int(match["distance"])
        excluded += ["--exclude", match["tag"]]
    return None, 0


def _is_dirty(git: _Git) -> bool:
    status = git("status", "--porcelain=v1", "-z", "--untracked-files=normal", "--no-renames")
    if status is None:  # a damaged index: what has changed cannot be told, so nothing is promised
        return True
    return any(_counts(entry) for entry in status.split("\0") if entry)


def _counts(entry: str) -> bool:
    """Whether a line of `git status` means that a wheel from this tree is not the commit's."""
    return not entry.startswith("??") or entry[3:].startswith(PACKAGED)


def clone_problem(root: Path, environ: Mapping[str, str]) -> str:
    """Why `root` cannot be shown to be a commit's tree; empty when it can."""
    if not (root / ".git").exists():
        return f"{root} is no git clone, so nothing shows which commit it is and whether it is clean"
    git = _Git(root, environ)
    if git("rev-parse", "--verify", "--quiet", "HEAD^{commit}") is None:
        return f"git does not tell the commit of {root}; install git, or clone again"
    # Lower case: --assume-unchanged; S: --skip-worktree.
    lines = (git("ls-files", "-v") or "").split("\n")
    if hidden := [line[2:] for line in lines if line[:1].islower() or line[:1] == "S"]:
        return (
            f"git is told not to look at {', '.join(hidden[:3])}; undo it: git update-index --no-assume-unchanged "
            "--no-skip-worktree FILE"
        )
    return ""


def tags_of(root: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The tags on the commit that is checked out."""
    return tuple((_Git(root, environ)("tag", "--points-at", "HEAD") or "").split())


def project_version(root: Path, environ: Mapping[str, str] | None = None) -> str:
    """The version alone, warnings logged. Raises VersionError and ProjectError."""
    found = source_version(root, environment() if environ is None else environ, load_project(root))
    for warning in found.warnings:
        logger.warning("warning: %s", warning)
    return found.version
