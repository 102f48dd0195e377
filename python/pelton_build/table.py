"""The kernel table `kernels/kernels.toml`: the one list of sources, what they belong to, and what they need.

    [library]                       # the shared library that the sources make
    name = "pelton"                 # libpelton.so, and the prefix of its definitions
    package = "pelton"              # the Python package it goes into
    cxx-standard = 20
    torch = "2.10"                  # oldest torch that it runs with
    torch-headers = ">=2.13"        # torch versions whose headers it compiles with
    torch-package = "torch==2.13.0" # build requirement when no such torch is at hand
    oldest = { cuda = "sm_80" }     # oldest arch that the kernels can be compiled for
    environment = ["PELTON_LIBRARY"]  # variables of the package itself, which are no build settings

    [feature.marlin]
    summary = "..."
    backends = ["cuda"]             # backends that can give it
    environment = "PELTON_ENABLE_MARLIN"
    definitions = ["..."]           # for all device code of a build that has it

    [family.norm]
    summary = "RMS normalization"
    feature = "..."                 # only when a feature brings the family; a list: when any of them does
    op = ["norm/op.cpp"]            # operators: host compiler, torch's headers, no ISA flags;
                                    # { path = "...", backends = ["cpu"] } for those of some backends only
    cpu = ["norm/cpu.cpp"]          # device code of each backend
    cuda = ["norm/gpu.cu", { path = "norm/sm90.cu", archs = ["sm_90a"], toolkit = ">=12.8" }]
    rocm = ["norm/gpu.cu"]
    host = ["host/module.cpp"]      # Python extension, built once for each host Python
    definitions = ["..."]           # for all sources of the family
    # CPU instructions beyond target.arch that the family runs only after it has asked the CPU; iced-x86's names
    run-time = { x86-64-v4 = ["AVX512_VNNI"] }
    support = true                  # the others need it; it is nothing by itself
    # GPU kernels that may spill registers; archs: when only some need it
    local-memory = [{ kernel = "decode_kernel", archs = ["sm_80"], bytes = 64, reason = "..." }]
    matrix = ["gfx90a", "gfx1100"]  # AMD GPUs for which the family's code has to hold matrix instructions
    instead = { cuda = "torch's own product" }  # what does the family's work where it has no source

Paths are relative to the table's folder. A family with device code is built for the backends that it has
sources for; for every other one `instead` has to say what does its work there, so that a hole is not taken for
a decision. A family without device code, or with `support = true`, supports the others: it is built when any of
them is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from .arch import BACKENDS, ArchError, check_archs
from .errors import TableError
from .plan import Backend, LocalMemory
from .toml import parse_toml, read_text
from .values import Version, VersionRange, check_requirement, did_you_mean

__all__ = [
    "FILE",
    "Family",
    "FeatureEntry",
    "KernelTable",
    "Library",
    "Source",
    "load_table",
    "parse_table",
]

FOLDER = "kernels"
FILE = f"{FOLDER}/kernels.toml"

BUILD_VARIABLES = ("PELTON_PROFILE", "PELTON_TARGET_DEVICE", "PELTON_TORCH_DIR", "PELTON_VERSION", "MAX_JOBS")
"""Environment variables that `settings` and `version` read, whatever the table says."""

_SUFFIXES = {
    "op": (".cpp",),
    "host": (".cpp",),
    "cpu": (".cpp",),
    "cuda": (".cu", ".cpp"),
    "rocm": (".cu", ".hip", ".cpp"),
}


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
    oldest: Mapping[Backend, str] = field(default_factory=dict)
    """By backend: the oldest arch that the kernels can be compiled for."""


@dataclass(frozen=True)
class FeatureEntry:
    """A feature that a profile, the command line or the environment can switch."""

    name: str
    summary: str
    backends: tuple[Backend, ...]
    environment: str
    """Name of the environment variable that switches it; empty for none."""
    definitions: tuple[str, ...] = ()
    """What all device code of a build with it is compiled with."""


@dataclass(frozen=True)
class Source:
    """One file of a family, for one backend."""

    path: str
    archs: tuple[str, ...] = ()
    """The only archs it is for; empty for all."""
    toolkit: VersionRange = field(default_factory=VersionRange)
    """Versions of the backend's toolkit (of the host compiler, for the CPU) that can compile it."""
    definitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """The features of which any brings this file, besides those of the family; empty: it needs none."""
    backends: tuple[Backend, ...] = ()
    """The only backends it is for; empty for all (device code: for that of its list)."""


@dataclass(frozen=True)
class Family:
    """The sources of one family of operators."""

    name: str
    summary: str
    features: tuple[str, ...]
    """The features of which any brings the family; empty: it needs none."""
    op: tuple[Source, ...]
    host: tuple[Source, ...]
    device: Mapping[Backend, tuple[Source, ...]]
    definitions: tuple[str, ...]
    support: bool = False
    instead: Mapping[Backend, str] = field(default_factory=dict)
    """What does the family's work on a backend that it has no source for."""
    local_memory: tuple[LocalMemory, ...] = ()
    """The GPU kernels that may use local memory."""
    matrix: tuple[str, ...] = ()
    """AMD GPUs for which its code holds matrix instructions (MFMA, WMMA)."""
    run_time: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By CPU arch: the instructions beyond it that the family's code runs only after asking the CPU."""

    @property
    def supports(self) -> bool:
        """Whether other families call it or go with it, and it is nothing by itself."""
        return self.support or not any(self.device.values())


@dataclass(frozen=True)
class KernelTable:
    """The whole table."""

    library: Library
    features: Mapping[str, FeatureEntry]
    families: tuple[Family, ...]


def load_table(root: Path) -> KernelTable:
    """The kernel table of the project at `root`. Raises TableError."""
    table = parse_table(read_text(root / FILE, FILE, TableError))
    for family in table.families:
        for source in (*family.op, *family.host, *(s for sources in family.device.values() for s in sources)):
            if not (root / FOLDER / source.path).is_file():
                raise TableError(
                    f"{FILE}: family.{family.name}: source {source.path!r} does not exist in {FOLDER}/"
                )
    return table


def parse_table(text: str) -> KernelTable:
    """The kernel table in `text`. Raises TableError naming the entry, the key and what is wrong."""
    data = parse_toml(text, FILE, TableError)
    _only(data, "", ("library", "feature", "family"))
    features = {name: _feature(name, entry) for name, entry in _tables(data, "feature").items()}
    library = _library(data.get("library"))
    variables = [*library.environment, *(f.environment for f in features.values() if f.environment)]
    if repeated := sorted({name for name in variables if variables.count(name) > 1}):
        raise TableError(f"{FILE}: environment variable {repeated[0]} has two meanings; name each once")
    marks: dict[str, str] = {}
    for name in features:
        other = marks.setdefault(name.replace("-", ""), name)
        if other != name:
            raise TableError(f"{FILE}: features {other!r} and {name!r} make one label; rename one")
    families = tuple(_family(name, entry, features) for name, entry in _tables(data, "family").items())
    return KernelTable(library, features, families)


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
        (
            "name",
            "package",
            "cxx-standard",
            "torch",
            "torch-headers",
            "torch-package",
            "environment",
            "oldest",
        ),
    )
    entry = cast("dict[str, Any]", entry)
    standard = entry.get("cxx-standard", 20)
    if standard not in (17, 20, 23, 26):
        raise TableError(f"{FILE}: library.cxx-standard: expected 17, 20, 23 or 26, found {standard!r}")
    try:
        torch = Version.parse(_text(entry, where, "torch"))
    except ValueError as error:
        raise TableError(f"{FILE}: library.torch: {error}") from None
    package = _text(entry, where, "torch-package", "torch")
    try:
        check_requirement(package)
    except ValueError as error:
        raise TableError(f"{FILE}: library.torch-package: {error}") from None
    return Library(
        name=_identifier(entry, where, "name"),
        package=_identifier(entry, where, "package"),
        cxx_standard=standard,
        torch=torch,
        torch_headers=_range(entry, where, "torch-headers"),
        torch_package=package,
        environment=tuple(_variable(name, where) for name in _texts(entry, where, "environment")),
        oldest=_oldest(entry.get("oldest", {})),
    )


def _oldest(table: object) -> Mapping[Backend, str]:
    where = "library.oldest"
    _only(table, where, ("cuda",))  # AMD's names have no order, and a CPU profile has one level
    made = cast("Mapping[Backend, str]", table)
    for backend, arch in made.items():
        try:
            check_archs(backend, [arch])
        except ArchError as error:
            raise TableError(f"{FILE}: {where}.{backend}: {error}") from None
    return made


def _identifier(entry: Mapping[str, Any], where: str, key: str) -> str:
    value = _text(entry, where, key)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", value, re.ASCII):
        raise TableError(
            f"{FILE}: {where}.{key}: {value!r} is no such name: small letters, digits and underscores only"
        )
    return value


def _variable(name: str, where: str) -> str:
    if name in BUILD_VARIABLES:
        raise TableError(
            f"{FILE}: {where}.environment: {name} is a switch of the build itself; choose another name"
        )
    if not re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name, re.ASCII):
        raise TableError(
            f"{FILE}: {where}.environment: {name!r} is no name for one of our variables: capital letters and "
            "digits in words with underscores between, such as PELTON_ENABLE_MARLIN"
        )
    return name


def _feature(name: str, entry: object) -> FeatureEntry:
    where = f"feature.{name}"
    _only(entry, where, ("summary", "backends", "environment", "definitions"))
    entry = cast("dict[str, Any]", entry)
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name, re.ASCII):
        raise TableError(
            f"{FILE}: {where}: {name!r} is no name: small letters, digits and single dashes only"
        )
    backends = _backends(entry, where)
    if not backends:
        raise TableError(f"{FILE}: {where}.backends: name at least one of {', '.join(BACKENDS)}")
    return FeatureEntry(
        name,
        _text(entry, where, "summary", ""),
        backends,
        _variable(variable, where) if (variable := _text(entry, where, "environment", "")) else "",
        _texts(entry, where, "definitions"),
    )


def _family(name: str, entry: object, features: Mapping[str, FeatureEntry]) -> Family:
    where = f"family.{name}"
    known = (
        "summary",
        "feature",
        "op",
        "host",
        *BACKENDS,
        "definitions",
        "support",
        "instead",
        "local-memory",
        "matrix",
        "run-time",
    )
    _only(entry, where, known)
    entry = cast("dict[str, Any]", entry)
    device = {backend: _sources(entry, where, backend, features) for backend in BACKENDS if backend in entry}
    family = Family(
        name=name,
        summary=_text(entry, where, "summary", ""),
        features=_known_features(entry, where, features),
        op=_sources(entry, where, "op", features),
        host=_sources(entry, where, "host", features),
        device=cast("Mapping[Backend, tuple[Source, ...]]", device),
        definitions=_texts(entry, where, "definitions"),
        support=_flag(entry, where, "support"),
        instead=_instead(entry, where),
        local_memory=_local_memory(entry, name),
        matrix=_matrix(entry, where),
        run_time=_run_time(entry, where),
    )
    if not (family.op or family.host or family.device):
        raise TableError(f"{FILE}: {where}: has no source")
    return family


def _flag(entry: Mapping[str, Any], where: str, key: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise TableError(f"{FILE}: {where}.{key}: expected true or false, found {value!r}")
    return value


def _instead(entry: Mapping[str, Any], where: str) -> Mapping[Backend, str]:
    table = entry.get("instead", {})
    _only(table, f"{where}.instead", BACKENDS)
    for backend in table:
        _text(table, f"{where}.instead", backend)
        if backend in entry:
            raise TableError(
                f"{FILE}: {where}.instead.{backend}: the family has {backend} sources; remove one of the two"
            )
    return cast("Mapping[Backend, str]", table)


def _matrix(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    archs = _texts(entry, where, "matrix")
    if archs:
        if "rocm" not in entry:
            raise TableError(f"{FILE}: {where}.matrix: the family has no rocm source")
        try:
            check_archs("rocm", archs)
        except ArchError as error:
            raise TableError(f"{FILE}: {where}.matrix: {error}") from None
    return archs


def _run_time(entry: Mapping[str, Any], where: str) -> Mapping[str, tuple[str, ...]]:
    table = entry.get("run-time", {})
    at = f"{where}.run-time"
    if not isinstance(table, dict):
        raise TableError(f"{FILE}: {at}: expected {{ ARCH = [INSTRUCTIONS, ...] }}, found {table!r}")
    if table and "cpu" not in entry:
        raise TableError(f"{FILE}: {at}: the family has no cpu source that could ask the CPU")
    made = {}
    for arch in table:
        try:
            check_archs("cpu", [arch])
        except ArchError as error:
            raise TableError(f"{FILE}: {at}: {error}") from None
        made[arch] = _texts(table, at, arch)
        for name in made[arch]:
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name, re.ASCII):
                raise TableError(
                    f"{FILE}: {at}.{arch}: {name!r} is no name of instructions: iced-x86's, such as 'AVX512_VNNI'"
                )
    return made


def _local_memory(entry: Mapping[str, Any], family: str) -> tuple[LocalMemory, ...]:
    items = entry.get("local-memory", [])
    where = f"family.{family}.local-memory"
    if not isinstance(items, list):
        raise TableError(
            f"{FILE}: {where}: expected a list of {{ kernel, archs, bytes, reason }}, found {items!r}"
        )
    allowances: list[LocalMemory] = []
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        _only(item, at, ("kernel", "archs", "bytes", "reason"))
        kernel, most, archs = _text(item, at, "kernel"), item.get("bytes"), _texts(item, at, "archs")
        for arch in archs:
            try:
                check_archs("rocm" if arch.startswith("gfx") else "cuda", [arch])
            except ArchError as error:
                raise TableError(f"{FILE}: {at}.archs: {error}") from None
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise TableError(f"{FILE}: {at}.bytes: expected a number of bytes, found {most!r}")
        for other in allowances:
            if other.kernel == kernel and (not archs or not other.archs or set(archs) & set(other.archs)):
                raise TableError(f"{FILE}: {at}: kernel {kernel!r} is listed twice for one arch")
        allowances.append(LocalMemory(family, kernel, archs, most, _text(item, at, "reason")))
    return tuple(allowances)


def _backends(entry: Mapping[str, Any], where: str) -> tuple[Backend, ...]:
    backends = _texts(entry, where, "backends")
    for backend in backends:
        if backend not in BACKENDS:
            raise TableError(
                f"{FILE}: {where}.backends: unknown backend {backend!r}{did_you_mean(backend, BACKENDS)}"
            )
    return cast("tuple[Backend, ...]", backends)


def _known_features(
    entry: Mapping[str, Any], where: str, features: Mapping[str, FeatureEntry]
) -> tuple[str, ...]:
    value = entry.get("feature", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise TableError(f"{FILE}: {where}.feature: expected a feature or a list of them, found {value!r}")
    if "feature" in entry and not names:
        raise TableError(f"{FILE}: {where}.feature: lists no feature; leave the key out")
    for index, name in enumerate(names):
        if name not in features:
            raise TableError(
                f"{FILE}: {where}.feature: unknown feature {name!r}{did_you_mean(name, features)}"
            )
        if name in names[:index]:
            raise TableError(f"{FILE}: {where}.feature: {name!r} is listed twice")
    return tuple(names)


def _sources(
    entry: Mapping[str, Any], where: str, key: str, features: Mapping[str, FeatureEntry]
) -> tuple[Source, ...]:
    items = entry.get(key, [])
    if not isinstance(items, list):
        raise TableError(f"{FILE}: {where}.{key}: expected a list of sources, found {items!r}")
    if key in entry and not items:
        raise TableError(f"{FILE}: {where}.{key}: lists no source; leave the key out")
    sources: list[Source] = []
    for index, item in enumerate(items):
        at = f"{where}.{key}[{index}]"
        if isinstance(item, str):
            item = {"path": item}
        _only(item, at, ("path", "archs", "toolkit", "definitions", "feature", "backends"))
        path = _text(item, at, "path")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise TableError(f"{FILE}: {at}: {path!r} must be a path below {FOLDER}/ with forward slashes")
        if path != str(PurePosixPath(path)):  # one spelling, so that a source that is listed twice is seen
            raise TableError(f"{FILE}: {at}: write {path!r} as {str(PurePosixPath(path))!r}")
        if not path.endswith(_SUFFIXES[key]):
            raise TableError(
                f"{FILE}: {at}: {path!r} is no source of kind {key}; expected a file {' or '.join(_SUFFIXES[key])}"
            )
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
        backends = _backends(item, at)
        if backends and key != "op":
            raise TableError(f"{FILE}: {at}.backends: only operators are told apart by backend")
        sources.append(
            Source(
                path,
                archs,
                _range(item, at, "toolkit"),
                _texts(item, at, "definitions"),
                _known_features(item, at, features),
                backends,
            )
        )
    return tuple(sources)
