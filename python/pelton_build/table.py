"""The kernel table `kernels/kernels.toml`: the one list of sources, what they belong to, and what they need.

    [library]                       # the shared library that the sources make
    name = "pelton"                 # libpelton.so, and the prefix of its definitions
    package = "pelton"              # the Python package it goes into
    cxx-standard = 20
    torch = "2.10"                  # oldest torch that it runs with
    torch-headers = ">=2.13"        # torch versions whose headers it compiles with
    torch-package = "torch==2.13.0" # build requirement when no such torch is at hand
    environment = ["PELTON_LIBRARY"]  # variables of the package itself, which are no build settings

    [feature.marlin]
    summary = "..."
    backends = ["cuda"]             # backends that can give it
    environment = "PELTON_ENABLE_MARLIN"

    [family.norm]
    summary = "RMS normalization"
    feature = "..."                 # only when a feature brings the family
    op = ["norm/op.cpp"]            # operators: host compiler, torch's headers, no ISA flags
    cpu = ["norm/cpu.cpp"]          # device code of each backend
    cuda = ["norm/gpu.cu", { path = "norm/sm90.cu", archs = ["sm_90a"], toolkit = ">=12.8" }]
    rocm = ["norm/gpu.cu"]
    host = ["host/module.cpp"]      # Python extension, built once for each host Python
    definitions = ["..."]           # for all sources of the family

Paths are relative to the table's folder. A family with device code is built for the backends that it has
sources for. A family without device code supports the others: it is built when any of them is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from .arch import BACKENDS, ArchError, check_archs
from .errors import TableError
from .plan import Backend
from .values import Version, VersionRange, did_you_mean

__all__ = ["FILE", "Family", "FeatureEntry", "KernelTable", "Library", "Source", "load_table", "parse_table"]

FOLDER = "kernels"
FILE = f"{FOLDER}/kernels.toml"


@dataclass(frozen=True)
class Library:
    """The shared library that the sources make."""

    name: str
    package: str
    cxx_standard: int
    torch: Version
    torch_headers: VersionRange
    torch_package: str
    environment: tuple[str, ...]


@dataclass(frozen=True)
class FeatureEntry:
    """A feature that a profile, the command line or the environment can switch."""

    name: str
    summary: str
    backends: tuple[Backend, ...]
    environment: str
    """Name of the environment variable that switches it; empty for none."""


@dataclass(frozen=True)
class Source:
    """One file of a family, for one backend."""

    path: str
    archs: tuple[str, ...] = ()
    """The only archs it is for; empty for all."""
    toolkit: VersionRange = field(default_factory=VersionRange)
    """Versions of the backend's toolkit (of the host compiler, for the CPU) that can compile it."""
    definitions: tuple[str, ...] = ()
    feature: str = ""
    """The feature that brings this file, besides that of the family."""


@dataclass(frozen=True)
class Family:
    """The sources of one family of operators."""

    name: str
    summary: str
    feature: str
    op: tuple[Source, ...]
    host: tuple[Source, ...]
    device: Mapping[Backend, tuple[Source, ...]]
    definitions: tuple[str, ...]

    @property
    def supports(self) -> bool:
        """Whether the family has no device code: what other families call or go with, nothing by itself."""
        return not any(self.device.values())


@dataclass(frozen=True)
class KernelTable:
    """The whole table."""

    library: Library
    features: Mapping[str, FeatureEntry]
    families: tuple[Family, ...]


def load_table(root: Path) -> KernelTable:
    """The kernel table of the project at `root`. Raises TableError."""
    try:
        text = (root / FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{FILE}: cannot be read ({error})") from None
    table = parse_table(text)
    for family in table.families:
        for source in (*family.op, *family.host, *(s for sources in family.device.values() for s in sources)):
            if not (root / FOLDER / source.path).is_file():
                raise TableError(
                    f"{FILE}: family.{family.name}: source {source.path!r} does not exist in {FOLDER}/"
                )
    return table


def parse_table(text: str) -> KernelTable:
    """The kernel table in `text`. Raises TableError naming the entry, the key and what is wrong."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{FILE}: not valid TOML: {error}") from None
    _only(data, "", ("library", "feature", "family"))
    features = {name: _feature(name, entry) for name, entry in _tables(data, "feature").items()}
    variables = [f.environment for f in features.values() if f.environment]
    if len(set(variables)) != len(variables):
        raise TableError(
            f"{FILE}: two features have one environment variable: {', '.join(sorted(variables))}"
        )
    families = tuple(_family(name, entry, features) for name, entry in _tables(data, "family").items())
    return KernelTable(_library(data.get("library")), features, families)


def _tables(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise TableError(f"{FILE}: {key}: expected tables [{key}.NAME]")
    return value


def _only(entry: object, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise TableError(f"{FILE}: {where}: expected a table")
    for key in entry:
        if key not in known:
            dot = f"{where}." if where else ""
            raise TableError(f"{FILE}: unknown key {dot + key!r}{did_you_mean(key, known)}")


def _text(entry: Mapping[str, Any], where: str, key: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise TableError(
            f"{FILE}: {where}.{key}: expected text" + ("" if key in entry else ", the key is missing")
        )
    return value


def _texts(entry: Mapping[str, Any], where: str, key: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise TableError(f"{FILE}: {where}.{key}: expected a list of texts, found {value!r}")
    return tuple(value)


def _range(entry: Mapping[str, Any], where: str, key: str) -> VersionRange:
    try:
        return VersionRange.parse(_text(entry, where, key, ""))
    except ValueError as error:
        raise TableError(f"{FILE}: {where}.{key}: {error}") from None


def _library(entry: object) -> Library:
    where = "library"
    if entry is None:
        raise TableError(f"{FILE}: missing table [library]")
    _only(
        entry,
        where,
        ("name", "package", "cxx-standard", "torch", "torch-headers", "torch-package", "environment"),
    )
    entry = cast("dict[str, Any]", entry)
    standard = entry.get("cxx-standard", 20)
    if standard not in (17, 20, 23, 26):
        raise TableError(f"{FILE}: library.cxx-standard: expected 17, 20, 23 or 26, found {standard!r}")
    try:
        torch = Version.parse(_text(entry, where, "torch"))
    except ValueError as error:
        raise TableError(f"{FILE}: library.torch: {error}") from None
    return Library(
        name=_text(entry, where, "name"),
        package=_text(entry, where, "package"),
        cxx_standard=standard,
        torch=torch,
        torch_headers=_range(entry, where, "torch-headers"),
        torch_package=_text(entry, where, "torch-package", "torch"),
        environment=_texts(entry, where, "environment"),
    )


def _feature(name: str, entry: object) -> FeatureEntry:
    where = f"feature.{name}"
    _only(entry, where, ("summary", "backends", "environment"))
    entry = cast("dict[str, Any]", entry)
    backends = _texts(entry, where, "backends")
    for backend in backends:
        if backend not in BACKENDS:
            raise TableError(
                f"{FILE}: {where}.backends: unknown backend {backend!r}{did_you_mean(backend, BACKENDS)}"
            )
    return FeatureEntry(
        name,
        _text(entry, where, "summary", ""),
        cast("tuple[Backend, ...]", backends),
        _text(entry, where, "environment", ""),
    )


def _family(name: str, entry: object, features: Mapping[str, FeatureEntry]) -> Family:
    where = f"family.{name}"
    _only(entry, where, ("summary", "feature", "op", "host", "cpu", "cuda", "rocm", "definitions"))
    entry = cast("dict[str, Any]", entry)
    feature = _known_feature(entry, where, features)
    device = {
        backend: _sources(entry, where, backend, features) for backend in BACKENDS if entry.get(backend)
    }
    family = Family(
        name=name,
        summary=_text(entry, where, "summary", ""),
        feature=feature,
        op=_sources(entry, where, "op", features),
        host=_sources(entry, where, "host", features),
        device=cast("Mapping[Backend, tuple[Source, ...]]", device),
        definitions=_texts(entry, where, "definitions"),
    )
    if not (family.op or family.host or family.device):
        raise TableError(f"{FILE}: {where}: has no source")
    return family


def _known_feature(entry: Mapping[str, Any], where: str, features: Mapping[str, FeatureEntry]) -> str:
    feature = _text(entry, where, "feature", "")
    if feature and feature not in features:
        raise TableError(
            f"{FILE}: {where}.feature: unknown feature {feature!r}{did_you_mean(feature, features)}"
        )
    return feature


def _sources(
    entry: Mapping[str, Any], where: str, key: str, features: Mapping[str, FeatureEntry]
) -> tuple[Source, ...]:
    items = entry.get(key, [])
    if not isinstance(items, list):
        raise TableError(f"{FILE}: {where}.{key}: expected a list of sources, found {items!r}")
    sources: list[Source] = []
    for index, item in enumerate(items):
        at = f"{where}.{key}[{index}]"
        if isinstance(item, str):
            item = {"path": item}
        _only(item, at, ("path", "archs", "toolkit", "definitions", "feature"))
        path = _text(item, at, "path")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise TableError(f"{FILE}: {at}: {path!r} must be a path below {FOLDER}/ with forward slashes")
        if any(path == source.path for source in sources):
            raise TableError(f"{FILE}: {at}: {path!r} is listed twice")
        archs = _texts(item, at, "archs")
        if archs and key in BACKENDS:
            try:
                for arch in archs:
                    check_archs(key, [arch])
            except ArchError as error:
                raise TableError(f"{FILE}: {at}.archs: {error}") from None
        elif archs:
            raise TableError(f"{FILE}: {at}.archs: only device code has archs")
        sources.append(
            Source(
                path,
                archs,
                _range(item, at, "toolkit"),
                _texts(item, at, "definitions"),
                _known_feature(item, at, features),
            )
        )
    return tuple(sources)
