"""The package index: static files, derived from the finished wheels alone.

Layout below the output folder; every link is relative, so the folder works on any static host and below any path::

    wheels/<hash>/<wheel>, <wheel>.metadata            each wheel once, with its METADATA beside it (PEP 658, 714)
    wheels/<hash>/<project>-<version>-variants.json    for which machine each variant wheel of a version is
    p/<profile>/simple/<project>/index.html, .json     one index for each profile (PEP 503, 691, 700)
    p/<profile>.<features>/simple/...                  a wheel built with another feature set has an index of its own
    simple/...                                         the baseline profile's wheels without label, for a machine
                                                       nothing is known of, and the variant wheels
    index.html                                         helps a person to choose (front_page)
    <project>-select.py                                chooses for a machine before anything is installed (select_script)

Installers take the highest local version label, so one index never holds two labels of one version.  Nothing is
written unless every wheel passed: the names agree, the audit passes, no two wheels contradict each other.

Writing is incremental, and safe to interrupt and to serve from at the same time: files are made under another name and
renamed, first the wheels, then the pages that link to them; what no page links to any more goes last.  A wheel lies in
a folder named after its bytes, so a rebuilt one never replaces what an old page still promises.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import fcntl
import hashlib
import html
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pelton_build import audit
from pelton_build.errors import BuildError
from pelton_build.features import feature_mark
from pelton_build.front_page import MainIndex, Offer, Release, front_page
from pelton_build.planning import project_root
from pelton_build.profile import profile_names
from pelton_build.project import load_project
from pelton_build.select_script import entry_point, file_name, select_script
from pelton_build.toml import parse_toml, read_text
from pelton_build.values import did_you_mean
from pelton_build.variants import (
    FILE as VARIANT,
)
from pelton_build.variants import (
    Properties,
    document_text,
    read_variant,
    same_properties,
    split_file_name,
)

__all__ = ["IndexBuildError", "IndexReport", "WheelEntry", "build_index", "main", "plan_pages", "read_wheel"]

logger = logging.getLogger(__name__)

STATE = ".index-state.json"  # a cache of what was read from unchanged wheels; deleting it only costs time
LOCK = ".index-lock"
STATE_FORMAT = 2
PARALLEL_FROM = 24  # wheels to be read; a process takes half a second to start
MOST_PROCESSES = 16
CLOCK_SKEW = 300  # seconds that a wheel's time may lie ahead of the clock


class IndexBuildError(BuildError):
    """The wheels do not make a sound index; the index on disk is as it was."""


@dataclass(frozen=True)
class WheelEntry:
    """One wheel as the index describes it."""

    file_name: str
    project: str  # normalized name
    version: str  # with the label
    profile: str
    place: str  # the index it is on: the profile, and what its feature set adds to the label; "" for simple/
    sha256: str
    size: int  # bytes
    upload_time: str  # UTC, ISO 8601: when the file was written
    metadata_sha256: str
    requires_python: str
    summary: str  # of the profile
    backend: str
    archs: tuple[str, ...]
    source: str = ""  # digest of what it was built from
    variant: str = ""  # label of a variant wheel
    properties: Properties = field(default_factory=dict)  # what a variant wheel needs of a machine
    select: str = ""  # what its command <project>-select runs, module:function
    yanked: str | None = None  # the reason

    @property
    def location(self) -> str:
        """Where the wheel lies below the output folder."""
        return f"wheels/{self.sha256[:16]}/{self.file_name}"

    @property
    def public_version(self) -> str:
        return self.version.partition("+")[0]


@dataclass(frozen=True)
class IndexReport:
    """What a run did: paths relative to the output folder."""

    out: Path
    wheels: tuple[WheelEntry, ...]
    written: tuple[str, ...]
    removed: tuple[str, ...]
    places: Mapping[str, tuple[str, ...]]  # folder of an index -> its files
    notes: tuple[str, ...] = ()


# --- reading ---


def read_wheel(path: Path) -> tuple[WheelEntry, bytes]:
    """The entry of one wheel and its METADATA.  Raises IndexBuildError when it fails its audit, AuditError when it is
    no wheel of ours."""
    from packaging.utils import canonicalize_name

    report = audit.audit_wheel(path, only=set(audit.CHECKS) - {"auditwheel"})
    if not report.ok:
        first = "; ".join(str(finding) for finding in report.findings[:3])
        more = f" and {len(report.findings) - 3} more" if len(report.findings) > 3 else ""
        raise IndexBuildError(f"{path}: fails its audit: {first}{more}")
    for result in report.skipped:
        logger.warning("%s: check %s could not run: %s", path.name, result.name, result.skipped)
    with audit.OpenedWheel(path) as wheel:
        metadata = wheel.read(f"{wheel.dist_info}/METADATA")
        claims = wheel.claims
        features, changed = wheel.info.get("features", {}), wheel.info.get("changed_features")
        summary, backend = str(wheel.info.get("summary", "")), str(wheel.info.get("backend", ""))
        archs = tuple(map(str, wheel.info.get("archs", ())))
        requires_python = str(wheel.metadata.get("Requires-Python", ""))
        name = canonicalize_name(str(wheel.metadata["Name"]))
        version = str(wheel.metadata["Version"])
        source = str(wheel.info.get("source_digest", ""))
        variant = split_file_name(path.name)[1]
        properties: Properties = {}
        if variant:
            properties = read_variant(wheel.read(f"{wheel.dist_info}/{VARIANT}"), variant, str(path))
        scripts = f"{wheel.dist_info}/entry_points.txt"
        listed = wheel.read(scripts).decode(errors="replace") if scripts in wheel.names else ""
    if changed is not None and not (
        isinstance(changed, list) and all(isinstance(name, str) and name in features for name in changed)
    ):
        raise IndexBuildError(
            f"{path}: changed_features of its build info is {changed!r}, which are no features of it"
        )
    if not re.fullmatch(r"[a-z0-9]+([.-][a-z0-9]+)*", claims.profile):  # it becomes a folder's name
        raise IndexBuildError(f"{path}: profile {claims.profile!r} is no name of a profile")
    status = path.stat()
    if status.st_mtime > time.time() + CLOCK_SKEW:
        raise IndexBuildError(
            f"{path}: its time, {_utc(status.st_mtime)}, lies in the future; set this machine's clock, or touch the file"
        )
    entry = WheelEntry(
        file_name=path.name,
        project=name,
        version=version,
        profile=claims.profile,
        place=place_of(claims.profile, claims.label, features, changed),
        sha256=_sha256_file(path),
        size=status.st_size,
        upload_time=_utc(status.st_mtime),
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
        requires_python=requires_python,
        summary=summary,
        backend=backend,
        archs=archs,
        source=source,
        variant=variant,
        properties=properties,
        select=entry_point(listed, name),
    )
    return entry, metadata


def read_wheels(paths: Sequence[Path]) -> Iterator[tuple[WheelEntry, bytes]]:
    """`read_wheel` of each, in order; of many in several processes, as an audit takes from some milliseconds to
    seconds."""
    cores = len(os.sched_getaffinity(0))
    if len(paths) < PARALLEL_FROM or cores < 2:
        yield from map(read_wheel, paths)
        return
    context = multiprocessing.get_context("spawn")  # a fork would take along locks of this process's threads
    with concurrent.futures.ProcessPoolExecutor(min(cores, MOST_PROCESSES), mp_context=context) as pool:
        try:
            yield from pool.map(read_wheel, paths, chunksize=4)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def place_of(
    profile: str, label: str, features: Mapping[str, bool], changed: Sequence[str] | None = None
) -> str:
    """The index that a wheel is on: ``cpu-avx2``, or ``cpu-avx2.fastmath`` when its features differ from the profile's;
    "" stands for ``simple/``, where the wheels without label are.

    A wheel of an older build does not say which were changed. Then the last segments of its label do (``fastmath`` on,
    ``nomarlin`` off), which is wrong where the profile's own label ends like one.
    """
    if not label:
        return ""
    if changed is not None:
        return ".".join([profile, *sorted(feature_mark(name, features[name]) for name in changed)])
    marks = {re.sub(r"[^a-z0-9]", "", feature.lower()) for feature in features}
    marks |= {f"no{mark}" for mark in marks}
    segments = label.split(".")
    ends: list[str] = []
    while len(segments) > 1 and segments[-1] in marks:
        ends.insert(0, segments.pop())
    return ".".join([profile, *ends])


def _utc(seconds: float) -> str:
    latest = 253_402_300_799  # the last that Python can say, in the year 9999
    return datetime.datetime.fromtimestamp(min(int(seconds), latest), datetime.UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )


def _sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- deciding ---


def plan_pages(entries: Iterable[WheelEntry], baseline: str) -> dict[str, tuple[WheelEntry, ...]]:
    """Which wheels each index holds: folder of the index -> entries, oldest version first.

    Raises IndexBuildError when two labels of one version would be on one index, or variant wheels would be there that
    do not belong together.
    """
    from packaging.version import Version

    pages: dict[str, list[WheelEntry]] = {}
    for entry in entries:
        if entry.place:
            pages.setdefault(f"p/{entry.place}/simple", []).append(entry)
        elif entry.profile == baseline or entry.variant:
            pages.setdefault("simple", []).append(entry)
        else:
            raise IndexBuildError(
                f"{entry.file_name}: a wheel of profile {entry.profile} without label; on simple/ it would go to every "
                f"machine, and only those of the baseline profile {baseline} may; build it with its label"
            )
    for page, held in pages.items():
        by_version: dict[tuple[str, str], WheelEntry] = {}
        for entry in held:
            if entry.variant:
                continue
            other = by_version.setdefault((entry.project, entry.public_version), entry)
            if other.profile != entry.profile:
                raise IndexBuildError(
                    f"{page}/: {other.file_name} is of profile {other.profile}, {entry.file_name} of {entry.profile}, and "
                    "one index is for one kind of machine; remove one or rename a profile"
                )
            if other.version != entry.version:
                raise IndexBuildError(
                    f"{page}/: {other.file_name} and {entry.file_name} are two labels of version "
                    f"{entry.public_version}, and installers would take the higher one on every machine; remove one"
                )
    _check_variants(pages.get("simple", ()))
    return {
        page: tuple(sorted(held, key=lambda e: (e.project, Version(e.version), e.file_name)))
        for page, held in sorted(pages.items())
    }


def _check_variants(entries: Iterable[WheelEntry]) -> None:
    """Raises IndexBuildError for variant wheels that installers could not choose rightly among."""
    by_version: dict[tuple[str, str], list[WheelEntry]] = {}
    for entry in entries:
        by_version.setdefault((entry.project, entry.version), []).append(entry)
    for (_, version), held in by_version.items():
        variants = [entry for entry in held if entry.variant]
        plain = next((entry for entry in held if not entry.variant), None)
        if not variants:
            continue
        if plain is None:
            raise IndexBuildError(
                f"{variants[0].file_name}: simple/ has no wheel of version {version} without variant label, and installers "
                "that know nothing of variants would take an older version; add the baseline profile's"
            )
        for entry in variants:
            if entry.source != plain.source:
                raise IndexBuildError(
                    f"{entry.file_name} was not built from the sources of {plain.file_name}; build both again"
                )
        if alike := same_properties((entry.variant, entry.properties) for entry in variants):
            raise IndexBuildError(
                f"simple/: variants {' and '.join(alike)} of version {version} are for the same machines; remove one"
            )


@dataclass(frozen=True)
class Document:
    """A file of an index beside its wheels: the variants of one version."""

    project: str
    file_name: str
    text: str
    upload_time: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def location(self) -> str:
        """Where it lies below the output folder: named after its content, as an older page may still link to another."""
        return f"wheels/{self.sha256[:16]}/{self.file_name}"


def documents_of(entries: Iterable[WheelEntry]) -> tuple[Document, ...]:
    """The variants.json of each version that has variant wheels."""
    by_version: dict[tuple[str, str], list[WheelEntry]] = {}
    for entry in entries:
        if entry.variant:
            by_version.setdefault((entry.project, entry.version), []).append(entry)
    return tuple(
        Document(
            project=project,
            file_name=f"{'-'.join(held[0].file_name.split('-')[:2])}-variants.json",
            text=document_text({entry.variant: entry.properties for entry in held}),
            upload_time=max(entry.upload_time for entry in held),
        )
        for (project, _), held in by_version.items()
    )


def apply_yanks(entries: Sequence[WheelEntry], yanks: Mapping[str, str]) -> list[WheelEntry]:
    """Mark the wheels that the yank file names, by version (with or without label) or file name (PEP 592)."""
    known = {key for entry in entries for key in (entry.version, entry.public_version, entry.file_name)}
    for key in yanks:
        if key not in known:
            versions = ", ".join(sorted({entry.public_version for entry in entries}))
            raise IndexBuildError(
                f"yanked.{key}: neither a version nor a file of this index, which holds {versions}; mend or remove the line"
            )
    marked = []
    for entry in entries:
        reasons = [
            yanks[key] for key in (entry.file_name, entry.version, entry.public_version) if key in yanks
        ]
        marked.append(replace(entry, yanked=reasons[0]) if reasons else entry)
    return marked


def read_yanks(path: Path) -> dict[str, str]:
    """The yank file: one table ``[yanked]`` of version or file name = reason.  Raises IndexBuildError."""
    data = parse_toml(read_text(path, str(path), IndexBuildError), str(path), IndexBuildError)
    table = data.pop("yanked", {})
    if data or not isinstance(table, dict):
        raise IndexBuildError(
            f'{path}: one table [yanked] with lines such as "0.2.0" = "reason" is all it may hold'
        )
    for key, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            quoted = ", and write the version in quotes" if isinstance(reason, dict) else ""
            raise IndexBuildError(f"{path}: yanked.{key}: say why, as text{quoted}")
    return table


# --- pages ---


def link(entry: WheelEntry | Document, page: str) -> str:
    """Relative URL of the file from the project page of the index `page`; the plus sign is escaped, as some stores
    read it as a blank."""
    up = "../" * (page.count("/") + 2)
    return f"{up}{urllib.parse.quote(entry.location)}"


def project_html(
    page: str, project: str, entries: Sequence[WheelEntry], documents: Sequence[Document] = ()
) -> str:
    """PEP 503 page of one project, with the attributes of PEP 592, 658 and 714.

    The metadata's attribute has its new name alone: pip before 23.1 reads the old one and then refuses a project that
    was asked for in another spelling; without it, it takes the wheel itself.
    """
    lines = []
    for entry in entries:
        attributes = {
            "href": f"{link(entry, page)}#sha256={entry.sha256}",
            "data-core-metadata": f"sha256={entry.metadata_sha256}",
        }
        if entry.requires_python:
            attributes["data-requires-python"] = entry.requires_python
        if entry.yanked is not None:
            attributes["data-yanked"] = entry.yanked
        text = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
        lines.append(f"    <a {text}>{html.escape(entry.file_name)}</a><br>")
    for document in documents:
        href = html.escape(f"{link(document, page)}#sha256={document.sha256}")
        lines.append(f'    <a href="{href}">{html.escape(document.file_name)}</a><br>')
    return _page(f"Links for {project}", lines)


def project_json(
    page: str, project: str, entries: Sequence[WheelEntry], documents: Sequence[Document] = ()
) -> str:
    """PEP 691 document of one project, API version 1.1 (PEP 700)."""
    files = []
    for entry in entries:
        description: dict[str, Any] = {
            "filename": entry.file_name,
            "url": link(entry, page),
            "hashes": {"sha256": entry.sha256},
            "size": entry.size,
            "upload-time": entry.upload_time,
            "core-metadata": {"sha256": entry.metadata_sha256},
            "yanked": False if entry.yanked is None else entry.yanked,
        }
        if entry.requires_python:
            description["requires-python"] = entry.requires_python
        files.append(description)
    for beside in documents:
        files.append(
            {
                "filename": beside.file_name,
                "url": link(beside, page),
                "hashes": {"sha256": beside.sha256},
                "size": len(beside.text.encode()),
                "upload-time": beside.upload_time,
            }
        )
    document = {
        "meta": {"api-version": "1.1"},
        "name": project,
        "versions": list(dict.fromkeys(entry.version for entry in entries)),
        "files": files,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def root_html(projects: Sequence[str]) -> str:
    """PEP 503 page that lists the projects of an index."""
    return _page("Simple index", [f'    <a href="{p}/">{p}</a><br>' for p in projects])


def root_json(projects: Sequence[str]) -> str:
    """PEP 691 document that lists the projects of an index."""
    document = {"meta": {"api-version": "1.1"}, "projects": [{"name": project} for project in projects]}
    return json.dumps(document, indent=1) + "\n"


def _page(title: str, lines: Iterable[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "  <head>",
            '    <meta charset="utf-8">',
            '    <meta name="pypi:repository-version" content="1.1">',
            f"    <title>{html.escape(title)}</title>",
            "  </head>",
            "  <body>",
            f"    <h1>{html.escape(title)}</h1>",
            *lines,
            "  </body>",
            "</html>",
            "",
        ]
    )


def pages_of(plan: Mapping[str, Sequence[WheelEntry]]) -> dict[str, str]:
    """All pages: path relative to the output folder -> text.  What a page links to comes before it."""
    beside: dict[str, str] = {}
    projects: dict[str, str] = {}
    roots: dict[str, str] = {}
    for page, entries in plan.items():
        names = sorted({entry.project for entry in entries})
        for name in names:
            held = [entry for entry in entries if entry.project == name]
            documents = documents_of(held)
            for document in documents:
                beside[document.location] = document.text
            projects[f"{page}/{name}/index.json"] = project_json(page, name, held, documents)
            projects[f"{page}/{name}/index.html"] = project_html(page, name, held, documents)
        roots[f"{page}/index.json"] = root_json(names)
        roots[f"{page}/index.html"] = root_html(names)
    return {**beside, **projects, **roots}


def offers_of(plan: Mapping[str, Sequence[WheelEntry]]) -> list[Offer]:
    """What the front page offers: each profile's index once."""
    offers = []
    for page, held in plan.items():
        if not page.startswith("p/"):
            continue
        latest = held[-1]
        releases = tuple(
            Release(
                e.file_name,
                e.version,
                urllib.parse.quote(e.location),
                e.size,
                e.sha256,
                e.requires_python,
                e.yanked,
            )
            for e in held
        )
        offers.append(Offer(latest.place, latest.summary, latest.backend, latest.archs, releases))
    return offers


def newest_of(plan: Mapping[str, Sequence[WheelEntry]]) -> WheelEntry | None:
    """The newest wheel of simple/ that is neither yanked nor a variant."""
    plain = [entry for entry in plan.get("simple", ()) if entry.yanked is None and not entry.variant]
    return plain[-1] if plain else None


def main_index_of(plan: Mapping[str, Sequence[WheelEntry]]) -> MainIndex | None:
    """What the front page says of simple/."""
    newest = newest_of(plan)
    if newest is None:
        return None
    held = [entry for entry in plan["simple"] if entry.yanked is None]
    return MainIndex(
        version=newest.version,
        variants=tuple(entry.profile for entry in held if entry.variant and entry.version == newest.version),
        script=file_name(newest.project) if newest.select else "",
    )


# --- writing ---


@dataclass
class _Writer:
    """Writes below one folder, each file whole or not at all, and remembers what changed."""

    out: Path
    written: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def data(self, name: str, data: bytes) -> None:
        path = self.out / name
        if path.is_file() and path.read_bytes() == data:
            return
        with self._replacing(path) as temporary:
            temporary.write_bytes(data)
        self.written.append(name)

    def copy(self, name: str, source: Path, entry: WheelEntry) -> None:
        """Copy a wheel, unless a file of its size and time is there; the copy must have the hash that was promised."""
        path = self.out / name
        status = source.stat()
        if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (
            entry.size,
            status.st_mtime_ns,
        ):
            return
        with self._replacing(path) as temporary:
            temporary.write_bytes(source.read_bytes())
            if _sha256_file(temporary) != entry.sha256:
                raise IndexBuildError(f"{source}: changed while the index was made; run it again")
            os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.written.append(name)

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        try:
            yield temporary
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def remove_others(self, keep: set[str]) -> None:
        """Remove files and empty folders of ours that no page links to any more."""
        for path in self.out.glob("*-select.py"):
            if path.name not in keep:
                path.unlink()
                self.removed.append(path.name)
        for top in ("p", "simple", "wheels"):
            folder = self.out / top
            for path in sorted(folder.rglob("*"), reverse=True):
                name = path.relative_to(self.out).as_posix()
                if path.is_dir() and not path.is_symlink():
                    with contextlib.suppress(OSError):  # not empty
                        path.rmdir()
                elif name not in keep:
                    path.unlink()
                    self.removed.append(name)
            with contextlib.suppress(OSError):
                folder.rmdir()


def build_index(
    wheels: Iterable[Path], out: Path, *, baseline: str, yanks: Mapping[str, str] | None = None, url: str = ""
) -> IndexReport:
    """Make or update the index of `wheels` in the folder `out`.

    Args:
        wheels: wheel files; the same wheel twice is fine, two different files of one name are not.
        baseline: the profile whose wheels are on ``simple/``.
        yanks: version or file name -> reason (PEP 592).
        url: the index's address, for the commands of the front page; all links are relative without it too.

    Raises:
        IndexBuildError, AuditError: nothing was written.
    """
    paths = sorted(set(wheels))
    for path in paths:
        if not path.is_file():  # a pipe would keep the reader waiting
            raise IndexBuildError(f"{path}: not a file; remove it")
    if not paths:
        raise IndexBuildError("no wheels to index; build one first: nox -s build-<profile>")
    if out.exists() and not out.is_dir():
        raise IndexBuildError(f"{out}: not a folder")
    foreign = (
        []
        if not out.is_dir() or (out / STATE).exists()
        else [p.name for p in out.iterdir() if not p.name.startswith((".index-", "..index-"))]
    )
    if foreign:
        raise IndexBuildError(
            f"{out}: holds other files ({', '.join(sorted(foreign)[:3])}); choose an empty folder"
        )
    try:
        return _build_index(paths, out, baseline, yanks or {}, url)
    except OSError as error:
        raise IndexBuildError(f"{error.filename or out}: {error.strerror or error}") from error


def _build_index(
    paths: Sequence[Path], out: Path, baseline: str, yanks: Mapping[str, str], url: str
) -> IndexReport:
    _refuse_foreign(out)
    state = _read_state(out)
    entries: dict[str, WheelEntry] = {}
    metadata: dict[str, bytes] = {}
    sources: dict[str, Path] = {}
    new_state: dict[str, Any] = {}
    keys = {path: _cache_key(path) for path in paths}
    read: dict[Path, tuple[WheelEntry, bytes]] = {}
    for path in paths:
        cached = state.get(path.name)
        if cached is not None and cached["key"] == keys[path] and (known := _from_cache(cached, out)):
            read[path] = known
    new = [path for path in paths if path not in read]
    read.update(zip(new, read_wheels(new), strict=True))
    for path in paths:
        entry, text = read[path]
        other = entries.get(path.name)
        if other is not None and other.sha256 != entry.sha256:
            raise IndexBuildError(
                f"{sources[path.name]} and {path}: two different wheels of one name; remove one"
            )
        entries.setdefault(path.name, entry)
        sources.setdefault(path.name, path)
        metadata.setdefault(path.name, text)
        new_state.setdefault(path.name, {"key": keys[path], "entry": asdict(entry)})

    plan = plan_pages(apply_yanks(list(entries.values()), yanks), baseline)
    pages = pages_of(plan)
    pages["index.html"] = front_page(
        next(iter(entries.values())).project, offers_of(plan), baseline, url, main_index_of(plan)
    )

    newest = newest_of(plan)
    if newest is not None and newest.select:
        oldest = re.search(r"(\d+\.\d+)", newest.requires_python)
        pages[file_name(newest.project)] = select_script(
            sources[newest.file_name],
            newest.project,
            newest.version,
            newest.select,
            oldest[1] if oldest else "3.11",
            url.rstrip("/"),
        )

    made = {name: page.encode() for name, page in pages.items()}  # before anything is written
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        writer = _Writer(out)
        writer.data(STATE, _state_bytes(state))  # marks the folder as ours before anything else is in it
        for name, entry in entries.items():
            writer.copy(entry.location, sources[name], entry)
            writer.data(f"{entry.location}.metadata", metadata[name])
        for name, data in made.items():
            writer.data(name, data)
        wheel_files = {
            f"{entry.location}{suffix}" for entry in entries.values() for suffix in ("", ".metadata")
        }
        writer.remove_others(set(made) | wheel_files)
        writer.data(STATE, _state_bytes(new_state))
    notes = []
    if "simple" not in plan:
        notes.append(
            f"no wheel of the baseline profile {baseline} without label, so there is no simple/; build it with "
            f"nox -s build-{baseline} -- -C label=off"
        )
    return IndexReport(
        out=out,
        wheels=tuple(entries.values()),
        written=tuple(name for name in writer.written if name != STATE),
        removed=tuple(writer.removed),
        places={page: tuple(entry.file_name for entry in held) for page, held in plan.items()},
        notes=tuple(notes),
    )


def _refuse_foreign(out: Path) -> None:
    """Raises IndexBuildError for links and pipes where the index has files and folders of its own: what they lead to is
    somebody else's."""
    for name in (LOCK, STATE, "index.html", "p", "simple", "wheels"):
        path, is_folder = out / name, name in ("p", "simple", "wheels")
        if path.is_symlink() or (path.exists() and not (path.is_dir() if is_folder else path.is_file())):
            kind = "folder" if is_folder else "file"
            raise IndexBuildError(
                f"{path}: not the {kind} that an index has; remove it, or choose an empty folder"
            )


def _cache_key(path: Path) -> list[int]:
    """What changes when the file does: written, replaced or touched."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _from_cache(cached: Mapping[str, Any], out: Path) -> tuple[WheelEntry, bytes] | None:
    """Entry and METADATA of a wheel that was read before; None when the index no longer has its METADATA whole."""
    entry = _cached_entry(cached)
    try:
        text = (out / f"{entry.location}.metadata").read_bytes()
    except OSError:
        return None
    return (entry, text) if hashlib.sha256(text).hexdigest() == entry.metadata_sha256 else None


def _cached_entry(cached: Mapping[str, Any]) -> WheelEntry:
    return WheelEntry(**{**cached["entry"], "archs": tuple(cached["entry"]["archs"])})


def _code_digest() -> str:
    """Identifies the code that judged a cached wheel, so that a stricter audit looks at all of them again."""
    digest = hashlib.sha256()
    for module in (*audit.MODULES, __file__):
        digest.update(Path(module).read_bytes())
    return digest.hexdigest()


def _state_bytes(wheels: Mapping[str, Any]) -> bytes:
    return json.dumps({"format": STATE_FORMAT, "code": _code_digest(), "wheels": wheels}, indent=1).encode()


def _read_state(out: Path) -> dict[str, Any]:
    """The cache; empty when it is missing, damaged or made by other code."""
    try:
        state = json.loads((out / STATE).read_bytes())
        if state["format"] != STATE_FORMAT or state["code"] != _code_digest():
            return {}
        wheels = state["wheels"]
        for cached in wheels.values():
            _cached_entry(cached)
            _ = cached["key"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return dict(wheels)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One writer at a time."""
    with (out / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise IndexBuildError(f"{out}: another run writes this index; wait for it") from error
        yield


# --- command line ---


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m pelton_build.index``: the index of all wheels below a folder; exit code 0 when it was made."""
    parser = argparse.ArgumentParser(
        prog="python -m pelton_build.index",
        description="Make the static package index of the finished wheels.",
    )
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL_OR_FOLDER", help="default: dist")
    parser.add_argument("--out", type=Path, default=Path("site"), help="folder of the index (default: site)")
    parser.add_argument(
        "--baseline", default="", help="profile of simple/ (default: the project's baseline profile)"
    )
    parser.add_argument(
        "--url", default="", help="the address that it will have, for the front page's commands"
    )
    parser.add_argument(
        "--yank",
        type=Path,
        help="TOML file of yanked wheels (default: the project's yanked.toml if it is there)",
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        root = project_root()
        own = root / "yanked.toml"
        yank = options.yank or (own if own.exists() or own.is_symlink() else None)
        baseline = options.baseline or load_project(root).baseline_profile
        known = profile_names(root)
        if baseline not in known:  # or an index would lose its simple/ to a misspelt name
            raise IndexBuildError(f"unknown baseline profile {baseline!r}{did_you_mean(baseline, known)}")
        report = build_index(
            find_wheels(options.wheels or [Path("dist")], options.out),
            options.out,
            baseline=baseline,
            yanks=read_yanks(yank) if yank else None,
            url=checked_url(options.url),
        )
    except BuildError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    render(report)
    return 0


# What `pelton-select` takes for an address, too: pelton.guard has the same.
ADDRESS = re.compile(
    r"((?i:https?)://([A-Za-z0-9._~%+:-]+@)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:[0-9]{1,5})?"
    r"|(?i:file)://(localhost)?(?=/))(/[A-Za-z0-9._~%@+,=:-]*)*"
)


def checked_url(url: str) -> str:
    """`url` when it can be an index's address.  Raises IndexBuildError."""
    if url and not ADDRESS.fullmatch(url):
        raise IndexBuildError(f"--url {url!r}: give the index's address, such as https://HOST/PATH")
    return url


def find_wheels(places: Sequence[Path], out: Path | None = None) -> list[Path]:
    """The wheels among files and below folders, links followed.

    Args:
        out: folder of the index: its own copies are no wheels to be indexed, or none would ever go again.

    Raises IndexBuildError for a place that is not there, not readable, or in `out`.
    """
    try:
        own = None if out is None else out.resolve()
        for place in places:
            place.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise IndexBuildError(f"{error}; remove the link") from None

    def unreadable(error: OSError) -> None:
        raise IndexBuildError(
            f"{error.filename}: {error.strerror}; make it readable, or name the wheels one by one"
        )

    def below(place: Path) -> Iterator[Path]:
        seen: set[Path] = set()  # links may lead in a circle
        for folder, folders, names in os.walk(place, onerror=unreadable, followlinks=True):
            real = Path(folder).resolve()
            if real == own or real in seen:
                folders.clear()
                continue
            seen.add(real)
            yield from (Path(folder) / name for name in (*folders, *names) if name.lower().endswith(".whl"))

    found: list[Path] = []
    for place in places:
        if own is not None and place.resolve().is_relative_to(own):
            raise IndexBuildError(
                f"{place}: lies in the index's own folder {out}; name the folder of the wheels, or another --out"
            )
        if place.is_dir():
            found += sorted(below(place))
        elif place.suffix.lower() == ".whl" and place.is_file():
            found.append(place)
        else:
            raise IndexBuildError(
                f"{place}: neither a folder nor a wheel; build one first: nox -s build-<profile>"
            )
    for path in found:
        if path.suffix != ".whl":
            raise IndexBuildError(f"{path}: installers know wheels by .whl in small letters; rename it")
    return found


def render(report: IndexReport) -> None:
    """Print what was made as a table for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"index in {report.out}", title_justify="left")
    for column in ("index", "wheels"):
        table.add_column(column, overflow="fold")
    for place, names in report.places.items():
        table.add_row(f"{place}/", "\n".join(names))
    console.print(table)
    console.print(f"{len(report.written)} files written, {len(report.removed)} removed", highlight=False)
    for note in report.notes:
        console.print(note, style="yellow", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
