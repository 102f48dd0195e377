"""The audit: a finished wheel against what it says of itself.

A wheel carries its build info (``<package>/_build_info.json``: profile, label, archs, floors, the whole plan).  The
audit opens the file that would be published and looks, with no help from the build that made it, whether this is
true: names, RECORD, symbol versions, libraries, instructions, paths.  Nothing is extracted to disk under a name from
the wheel, nothing in it is run.

Each check is one function over an :class:`OpenedWheel`, yields a :class:`Finding` for everything that is wrong, and
raises :class:`CannotRun` when this machine lacks what the check needs, so that a report always says which checks did
not run and why.  Instructions are classified by the CPUID features that `iced-x86` gives for each of them.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import email.message
import email.parser
import email.policy
import getpass
import hashlib
import importlib.util
import io
import json
import logging
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pelton_build.errors import BuildError
from pelton_build.settings import environment

__all__ = [
    "CHECKS",
    "AuditError",
    "AuditReport",
    "CheckResult",
    "Finding",
    "OpenedWheel",
    "audit_wheel",
    "main",
]

logger = logging.getLogger(__name__)

MAX_UNPACKED = 4 << 30  # bytes; more than any profile's budget, less than what fills a machine
MAX_RATIO = 1000  # deflate cannot exceed 1032:1, real libraries stay below 20:1
BUILD_INFO = "_build_info.json"

# Shared objects that every glibc machine has, and what the user's torch brings.  libstdc++ is linked statically.
SYSTEM_LIBRARIES = frozenset(
    {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
        "libgcc_s.so.1",
        "ld-linux-x86-64.so.2",
    }
)
TORCH_LIBRARIES = frozenset({"libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so"})

# manylinux policy: the newest symbol versions of the compiler's libraries that go with a glibc.
COMPILER_LIMITS: Mapping[tuple[int, int], Mapping[str, str]] = {
    (2, 17): {"GLIBCXX": "3.4.19", "CXXABI": "1.3.7", "GCC": "4.8.0"},
    (2, 28): {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"},
    (2, 34): {"GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "7.0.0"},
}

# x86-64 psABI levels as CPUID features in iced-x86's names; each level has what the one before it has.
_BASELINE = frozenset(
    {
        *(
            "INTEL8086",
            "INTEL8086_ONLY",
            "INTEL186",
            "INTEL286",
            "INTEL386",
            "INTEL486",
            "X64",
            "MULTIBYTENOP",
        ),
        *(
            "FPU",
            "FPU287",
            "FPU387",
            "MMX",
            "SSE",
            "SSE2",
            "FXSR",
            "CMOV",
            "CX8",
            "CPUID",
            "TSC",
            "SYSCALL",
            "PAUSE",
        ),
        *("CET_IBT", "CET_SS"),  # encoded as no-operations, for CPUs that lack them
    }
)
LEVELS: Mapping[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset({"SSE3", "SSSE3", "SSE4_1", "SSE4_2", "POPCNT", "CMPXCHG16B"}),
    "x86-64-v3": frozenset({"AVX", "AVX2", "BMI1", "BMI2", "F16C", "FMA", "LZCNT", "MOVBE"}),
    "x86-64-v4": frozenset({"AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL"}),
}
# Instructions above the baseline that baseline code may hold all the same: GCC writes `rep bsf`, which is `tzcnt`
# where that exists and `bsf` elsewhere; `xgetbv` is what the CPU probe runs after CPUID has said that it may.
_ALWAYS = ("TZCNT_", "XGETBV")


class AuditError(BuildError):
    """A wheel that cannot be audited: unreadable, truncated, hostile, without build info."""


class CannotRun(Exception):
    """A check that this machine cannot run; the text says what is missing."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: in which file of the wheel, what was found there, what was needed."""

    check: str
    file: str
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{self.check}: {self.file}: found {self.found}; needed {self.needed}"


@dataclass(frozen=True)
class CheckResult:
    """What one check gave: findings, or the reason why it could not run."""

    name: str
    summary: str
    findings: tuple[Finding, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class AuditReport:
    """All checks of one wheel."""

    wheel: str
    results: tuple[CheckResult, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for result in self.results for finding in result.findings)

    @property
    def skipped(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.skipped)

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        return {
            "wheel": self.wheel,
            "ok": self.ok,
            "checks": [
                {
                    "check": r.name,
                    "summary": r.summary,
                    "skipped": r.skipped or None,
                    "findings": [{"file": f.file, "found": f.found, "needed": f.needed} for f in r.findings],
                }
                for r in self.results
            ],
        }


@dataclass(frozen=True)
class Code:
    """An executable section: its address and bytes."""

    address: int
    data: bytes


@dataclass(frozen=True)
class Binary:
    """What the audit wants to know of one ELF file."""

    name: str
    machine: str
    needed: tuple[str, ...]
    run_paths: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]  # (library, symbol version) that the file needs
    undefined: frozenset[str]
    defined: frozenset[str]
    stack_flags: int | None  # of PT_GNU_STACK; None: the header is missing, and the kernel then takes RWX
    debug_sections: tuple[str, ...]
    code: tuple[Code, ...]


@dataclass(frozen=True)
class Claims:
    """What a wheel says of itself in its build info, as far as the audit compares it."""

    version: str  # with the label: 0.1.0+cpu.avx2
    label: str
    profile: str
    backend: str
    archs: tuple[str, ...]
    glibc: str  # "2.28"
    torch_floor: str  # "2.10"
    library: str  # file name of the library in the package
    host_pythons: tuple[str, ...]  # "3.11": Pythons that a module was built for
    size_budget: int  # bytes

    @classmethod
    def read(cls, info: Mapping[str, Any], where: str, library: str) -> Claims:
        """The claims in a build info; `library` is the library's name when the build info gives none.

        Raises :class:`AuditError` naming the key that is missing or of another type."""

        def get(key: str, kind: type) -> Any:
            value = info.get(key)
            if not isinstance(value, kind):
                raise AuditError(f"{where}: key {key!r} is missing or not of type {kind.__name__}")
            return value

        return cls(
            version=get("version", str),
            label=get("label", str),
            profile=get("profile", str),
            backend=get("backend", str),
            archs=tuple(map(str, get("archs", list))),
            glibc=get("glibc", str),
            torch_floor=get("torch_floor", str),
            library=str(info.get("library", library)),
            host_pythons=tuple(map(str, get("host_pythons", list))),
            size_budget=get("size_budget", int),
        )


class OpenedWheel:
    """A wheel read for the audit: members, metadata, build info, ELF files; each read once, when first wanted.

    Raises :class:`AuditError` at once for a file that is no wheel or that is made to harm whoever opens it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.zip = zipfile.ZipFile(path)
        except Exception as error:  # a damaged file makes zipfile raise whatever its parser meets
            raise AuditError(f"{path}: not a readable wheel ({error}); build it again") from error
        self.infos = self.zip.infolist()
        self.names = [info.filename for info in self.infos]
        total = sum(info.file_size for info in self.infos)
        if total > MAX_UNPACKED:
            self.zip.close()
            raise AuditError(f"{path}: unpacks to {total} bytes, the limit is {MAX_UNPACKED}")
        for info in self.infos:
            bad = unsafe_name(info.orig_filename)
            if bad:
                self.zip.close()
                raise AuditError(f"{path}: member {info.orig_filename!r}: {bad}")
            if info.file_size > MAX_RATIO * max(info.compress_size, 1):
                self.zip.close()
                raise AuditError(f"{path}: member {info.filename} is compressed more than {MAX_RATIO}:1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.zip.close()

    def read(self, name: str) -> bytes:
        """The bytes of one member; an :class:`AuditError` names a member that is damaged."""
        try:
            return self.zip.read(name)
        except Exception as error:  # a damaged stream makes the codecs raise whatever they meet
            raise AuditError(f"{self.path}: member {name} cannot be read ({error})") from error

    def files(self) -> Iterator[str]:
        return (name for name in self.names if not name.endswith("/"))

    @cached_property
    def dist_info(self) -> str:
        """The wheel's one ``.dist-info`` folder."""
        found = sorted(
            {name.split("/")[0] for name in self.names if name.split("/")[0].endswith(".dist-info")}
        )
        if len(found) != 1:
            raise AuditError(
                f"{self.path}: {len(found)} .dist-info folders ({', '.join(found)}); needed: one"
            )
        return found[0]

    @cached_property
    def metadata(self) -> email.message.EmailMessage:
        return self._message("METADATA")

    @cached_property
    def wheel(self) -> email.message.EmailMessage:
        return self._message("WHEEL")

    def _message(self, name: str) -> email.message.EmailMessage:
        data = self.read(f"{self.dist_info}/{name}")
        parser = email.parser.BytesParser(policy=email.policy.compat32)
        return parser.parsebytes(data)  # type: ignore[return-value]

    @cached_property
    def info_path(self) -> str:
        found = [
            name for name in self.names if PurePosixPath(name).name == BUILD_INFO and name.count("/") == 1
        ]
        if len(found) != 1:
            raise AuditError(
                f"{self.path}: {len(found)} files named {BUILD_INFO}; needed: one, in the package. "
                "Only wheels that this project's build backend made can be audited"
            )
        return found[0]

    @property
    def package(self) -> str:
        return self.info_path.split("/")[0]

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """The build info; every key that the checks use is there and of its type."""
        try:
            info = json.loads(self.read(self.info_path))
        except ValueError as error:
            raise AuditError(f"{self.path}: {self.info_path} is not JSON ({error})") from error
        if not isinstance(info, dict):
            raise AuditError(f"{self.path}: {self.info_path} is not a JSON object")
        return info

    @cached_property
    def claims(self) -> Claims:
        """What the wheel says of itself."""
        return Claims.read(self.info, f"{self.path}: {self.info_path}", f"lib{self.package}.so")

    @cached_property
    def binaries(self) -> tuple[Binary, ...]:
        """All ELF files.  Raises :class:`AuditError` for one that cannot be parsed."""
        require("elftools", "pyelftools")
        found = []
        for name in self.files():
            data = self.read(name)
            if data.startswith(b"\x7fELF"):
                try:
                    found.append(read_binary(name, data))
                except AuditError as error:
                    raise AuditError(f"{self.path}: {error}") from error
        return tuple(found)


def unsafe_name(name: str) -> str:
    """Why a member's name must not be in a wheel; empty for a good one."""
    parts = name.split("/")
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "an absolute path"
    if ".." in parts:
        return "a path that leaves the wheel"
    if "\\" in name or "\0" in name or any(ord(c) < 32 for c in name):
        return "a backslash or control character in its name"
    return ""


def require(module: str, distribution: str) -> None:
    """Raise :class:`CannotRun` when a library that a check needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise CannotRun(f"{distribution} is not installed here")


def read_binary(name: str, data: bytes) -> Binary:
    """Parse one ELF file.  Raises :class:`AuditError` when it is damaged."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection
    from elftools.elf.sections import SymbolTableSection

    needed: list[str] = []
    run_paths: list[str] = []
    versions: list[tuple[str, str]] = []
    undefined: set[str] = set()
    defined: set[str] = set()
    code: list[Code] = []
    debug: list[str] = []
    stack: int | None = None
    try:
        elf = ELFFile(io.BytesIO(data))
        for segment in elf.iter_segments():
            if segment["p_type"] == "PT_GNU_STACK":
                stack = int(segment["p_flags"])
        for section in elf.iter_sections():
            if isinstance(section, DynamicSection):
                for tag in section.iter_tags():
                    kind = str(tag.entry.d_tag).removeprefix("DT_")
                    if kind == "NEEDED":
                        needed.append(str(getattr(tag, "needed")))  # noqa: B009
                    elif kind in ("RPATH", "RUNPATH"):
                        run_paths.append(f"{kind} {getattr(tag, kind.lower())}")
            elif isinstance(section, GNUVerNeedSection):
                for library, entries in section.iter_versions():
                    versions += [(str(library.name), str(entry.name)) for entry in entries]
            elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                for symbol in section.iter_symbols():
                    if symbol.name:
                        (undefined if symbol["st_shndx"] == "SHN_UNDEF" else defined).add(symbol.name)
            elif section.name.startswith((".debug_", ".zdebug_")):
                debug.append(section.name)
            if section["sh_flags"] & 4 and section["sh_type"] == "SHT_PROGBITS":  # SHF_EXECINSTR
                code.append(Code(int(section["sh_addr"]), section.data()))
        machine = str(elf["e_machine"])
    except Exception as error:  # a damaged file makes the parser raise whatever it meets
        raise AuditError(f"{name}: a damaged ELF file ({error})") from error
    return Binary(
        name=name,
        machine=machine,
        needed=tuple(needed),
        run_paths=tuple(run_paths),
        versions=tuple(versions),
        undefined=frozenset(undefined),
        defined=frozenset(defined),
        stack_flags=stack,
        debug_sections=tuple(debug),
        code=tuple(code),
    )


# --- the checks: name, then the file as the wheel names it ---


Check = Callable[[OpenedWheel], Iterable[Finding]]
CHECKS: dict[str, tuple[Check, str]] = {}


def check(name: str, summary: str) -> Callable[[Check], Check]:
    """Add a function to :data:`CHECKS`."""

    def add(function: Check) -> Check:
        CHECKS[name] = (function, summary)
        return function

    return add


@check("name", "file name, metadata and build info name one distribution, version, label and tag")
def check_name(wheel: OpenedWheel) -> Iterator[Finding]:
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
    from packaging.version import InvalidVersion, Version

    def finding(file: str, found: object, needed: object) -> Finding:
        return Finding("name", file, str(found), str(needed))

    claims = wheel.claims
    try:
        name, version, build, tags = parse_wheel_filename(wheel.path.name)
    except InvalidWheelFilename as error:
        yield finding(wheel.path.name, error, "a wheel's file name")
        return
    if build:
        yield finding(wheel.path.name, f"build tag {build[0]}{build[1]}", "no build tag")
    stated = str(wheel.metadata.get("Version", ""))
    for file, text in ((f"{wheel.dist_info}/METADATA", stated), (wheel.info_path, claims.version)):
        try:
            same = Version(text) == version
        except InvalidVersion:
            same = False
        if not same:
            yield finding(file, f"version {text or '(none)'}", f"version {version}, as in the file name")
    metadata_name = canonicalize_name(str(wheel.metadata.get("Name", "")))
    if metadata_name != name:
        yield finding(f"{wheel.dist_info}/METADATA", f"name {metadata_name or '(none)'}", f"name {name}")
    stem = wheel.path.name.rsplit("-", 3)[0]
    if wheel.dist_info != f"{stem}.dist-info":
        yield finding(wheel.dist_info, wheel.dist_info, f"{stem}.dist-info")
    local = version.local or ""
    if local != claims.label and not local.startswith(f"{claims.label}."):
        yield finding(
            wheel.path.name, f"label {local or '(none)'}", f"label {claims.label}, as in the build info"
        )
    in_name = {str(tag) for tag in tags}
    in_wheel = {str(tag) for tag in wheel.wheel.get_all("Tag", [])}
    if in_name != in_wheel:
        yield finding(
            f"{wheel.dist_info}/WHEEL", ", ".join(sorted(in_wheel)) or "(none)", ", ".join(sorted(in_name))
        )
    expected = f"py3-none-manylinux_{claims.glibc.replace('.', '_')}_x86_64"
    if expected not in in_name:
        yield finding(wheel.path.name, ", ".join(sorted(in_name)), f"{expected}, as the build info says")
    if str(wheel.wheel.get("Root-Is-Purelib", "")).lower() != "false":
        found = f"Root-Is-Purelib: {wheel.wheel.get('Root-Is-Purelib')}"
        yield finding(f"{wheel.dist_info}/WHEEL", found, "false: the wheel holds machine code")


@check("metadata", "Requires-Python, the torch floor and the license are stated")
def check_metadata(wheel: OpenedWheel) -> Iterator[Finding]:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    file = f"{wheel.dist_info}/METADATA"
    if not wheel.metadata.get("Requires-Python"):
        yield Finding("metadata", file, "no Requires-Python", "Requires-Python")
    floor = wheel.claims.torch_floor
    seen = ""
    for text in wheel.metadata.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(str(text))
        except InvalidRequirement as error:
            yield Finding("metadata", file, f"Requires-Dist: {text} ({error})", "a requirement")
            continue
        if canonicalize_name(requirement.name) == "torch" and requirement.marker is None:
            seen = str(requirement.specifier)
            if f">={floor}" in {str(clause) for clause in requirement.specifier}:
                break
    else:
        yield Finding(
            "metadata", file, f"torch{seen}" if seen else "no torch in Requires-Dist", f"torch>={floor}"
        )
    if not any(
        PurePosixPath(name).name == "LICENSE" for name in wheel.names if name.startswith(wheel.dist_info)
    ):
        yield Finding("metadata", wheel.dist_info, "no LICENSE", "the license file")


@check("contents", "the library and one module for each Python that the plan names, and no other binary")
def check_contents(wheel: OpenedWheel) -> Iterator[Finding]:
    claims = wheel.claims
    expected = {f"{wheel.package}/{claims.library}"}
    for python in claims.host_pythons:
        tag = "".join(python.split("."))
        names = [name for name in wheel.files() if f"/{HOST_MODULE}cpython-{tag}-" in f"/{name}"]
        expected |= set(names[:1]) or {f"{wheel.package}/{HOST_MODULE}cpython-{tag}-x86_64-linux-gnu.so"}
    present = {binary.name for binary in wheel.binaries}
    for name in sorted(expected - present):
        yield Finding("contents", name, "missing or no ELF file", "the file that the plan names")
    for name in sorted(present - expected):
        yield Finding("contents", name, "a binary that is not in the plan", " ".join(sorted(expected)))
    for name in wheel.files():
        if re.search(r"\.so(\.|$)|\.pyd$|\.dylib$|\.a$|\.o$", name) and name not in present:
            yield Finding("contents", name, "a library's name, no ELF file", "an ELF file")


@check("record", "RECORD lists every file once, with its true hash and size")
def check_record(wheel: OpenedWheel) -> Iterator[Finding]:
    record = f"{wheel.dist_info}/RECORD"
    if record not in wheel.names:
        yield Finding("record", record, "missing", "RECORD")
        return
    try:
        rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
    except (UnicodeDecodeError, csv.Error) as error:
        yield Finding("record", record, f"not readable ({error})", "UTF-8 CSV")
        return
    listed = Counter(row[0] for row in rows if row)
    members = Counter(wheel.files())
    for name, count in listed.items():
        if count > 1:
            yield Finding("record", name, f"listed {count} times", "once")
        if name not in members:
            yield Finding("record", name, "listed, not in the wheel", "no entry")
    for name in members - listed:
        yield Finding("record", name, "not listed in RECORD", "an entry")
    for row in rows:
        if len(row) != 3:
            if row:
                yield Finding("record", row[0], f"{len(row)} fields", "path, hash, size")
            continue
        name, stated, size = row
        if name == record:
            if stated or size:
                yield Finding("record", name, "RECORD hashes itself", "empty hash and size")
            continue
        if name not in members:
            continue
        data = wheel.read(name)
        algorithm, _, digest = stated.partition("=")
        if algorithm not in ("sha256", "sha384", "sha512"):
            yield Finding("record", name, f"hash {stated or '(none)'}", "sha256 or stronger")
            continue
        true = base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()
        if digest != true:
            yield Finding(
                "record", name, f"{algorithm}={digest}", f"{algorithm}={true}, of the file in the wheel"
            )
        if size != str(len(data)):
            yield Finding("record", name, f"size {size or '(none)'}", f"size {len(data)}")


@check(
    "modes", "regular files of mode 0644 or 0755 only, each name once, nothing beside package and dist-info"
)
def check_modes(wheel: OpenedWheel) -> Iterator[Finding]:
    allowed_roots = {wheel.package, wheel.dist_info}
    folded: dict[str, str] = {}
    for info in wheel.infos:
        name = info.filename
        mode = info.external_attr >> 16
        needed = "0755 folder" if name.endswith("/") else "regular file, mode 0644 or 0755"
        kind = stat.S_IFMT(mode)
        good_kind = kind in ((0, stat.S_IFDIR) if name.endswith("/") else (0, stat.S_IFREG))
        good_bits = stat.S_IMODE(mode) in ((0o755,) if name.endswith("/") else (0o644, 0o755))
        if not good_kind or not good_bits:
            yield Finding("modes", name, f"mode {stat.S_IMODE(mode):04o}, {_kind_name(kind)}", needed)
        other = folded.setdefault(name.casefold(), name)
        if other is not name:
            yield Finding(
                "modes", name, f"the same name as {other}", "names that differ in more than letter case"
            )
        if name.split("/")[0] not in allowed_roots:
            yield Finding(
                "modes", name, "outside the package", f"a file below {' or '.join(sorted(allowed_roots))}"
            )


def _kind_name(kind: int) -> str:
    return {0: "no kind", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symbolic link"}.get(
        kind, f"kind {kind:o}"
    )


@check("floors", "no symbol version above the glibc floor and the compiler libraries that go with it")
def check_floors(wheel: OpenedWheel) -> Iterator[Finding]:
    floor = _numbers(wheel.claims.glibc)
    limits = COMPILER_LIMITS[
        max((known for known in COMPILER_LIMITS if known <= floor), default=min(COMPILER_LIMITS))
    ]
    limits = {"GLIBC": wheel.claims.glibc, **limits}
    for binary in wheel.binaries:
        for library, version in sorted(set(binary.versions)):
            prefix, _, number = version.partition("_")
            if prefix not in limits or not re.fullmatch(r"[0-9.]+", number):
                if prefix == "GLIBC":  # GLIBC_PRIVATE, GLIBC_ABI_DT_RELR: both bind the file to newer systems
                    yield Finding(
                        "floors", binary.name, f"{version} of {library}", f"GLIBC_{limits['GLIBC']} or older"
                    )
                continue
            if _numbers(number) > _numbers(limits[prefix]):
                yield Finding(
                    "floors", binary.name, f"{version} of {library}", f"{prefix}_{limits[prefix]} or older"
                )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part)


@check("auditwheel", "auditwheel finds the same glibc floor")
def check_auditwheel(wheel: OpenedWheel) -> Iterator[Finding]:
    require("auditwheel", "auditwheel")
    result = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel.path)],
        check=False,
        capture_output=True,
        text=True,
    )
    try:
        tag = str(json.loads(result.stdout)["sym_tag"])
    except (ValueError, KeyError, TypeError):
        said = (result.stderr or result.stdout).strip().splitlines()
        raise CannotRun(f"auditwheel gave no answer: {said[-1] if said else result.returncode}") from None
    match = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    if match is None or (int(match[1]), int(match[2])) > _numbers(wheel.claims.glibc):
        needed = f"manylinux_{wheel.claims.glibc.replace('.', '_')} or older"
        yield Finding("auditwheel", wheel.path.name, f"symbols of {tag}", needed)


@check("needed", "shared libraries needed: only the system's basic ones and torch's own")
def check_needed(wheel: OpenedWheel) -> Iterator[Finding]:
    for binary in wheel.binaries:
        is_host = PurePosixPath(binary.name).name.startswith(HOST_MODULE)
        allowed = SYSTEM_LIBRARIES if is_host else SYSTEM_LIBRARIES | TORCH_LIBRARIES
        for library in binary.needed:
            if library not in allowed:
                kind = "a system library" if is_host else "a system library or torch's own"
                yield Finding(
                    "needed", binary.name, f"needs {library}", f"{kind}: {' '.join(sorted(allowed))}"
                )


@check("rpath", "no RPATH or RUNPATH")
def check_rpath(wheel: OpenedWheel) -> Iterator[Finding]:
    for binary in wheel.binaries:
        for path in binary.run_paths:
            yield Finding("rpath", binary.name, path, "none: torch's libraries are loaded before ours")


@check("abi", "the library uses torch through its stable C interface alone, and no Python symbol")
def check_abi(wheel: OpenedWheel) -> Iterator[Finding]:
    for binary in wheel.binaries:
        if PurePosixPath(binary.name).name.startswith(HOST_MODULE):
            continue
        for symbol in sorted(binary.undefined):
            if re.match(r"_?Py[A-Z_]", symbol):
                yield Finding(
                    "abi", binary.name, f"Python symbol {symbol}", "none: one library for every Python"
                )
            elif re.match(r"_ZN?K?(2at|3c10|5torch|6caffe2)", symbol) or re.match(
                r"_ZT[VIS]N?(2at|3c10|5torch)", symbol
            ):
                yield Finding(
                    "abi",
                    binary.name,
                    f"torch C++ symbol {symbol}",
                    "aoti_torch_* and torch_* only (the stable ABI)",
                )


HOST_MODULE = "_host."
_HOST_NAME = re.compile(r"_host\.(cpython-(\d)(\d+)(t?)(d?)-x86_64-linux-gnu|abi3)\.so")


@check(
    "python", "each per-Python module is named after the Python it was built for; no other per-Python file"
)
def check_python(wheel: OpenedWheel) -> Iterator[Finding]:
    for binary in wheel.binaries:
        name = PurePosixPath(binary.name).name
        if not name.startswith(HOST_MODULE):
            if re.search(r"\.(cpython-|cp3|pypy|abi3)", name) or "PyInit_" in "".join(binary.defined):
                yield Finding("python", binary.name, "a per-Python binary", f"only {HOST_MODULE}*.so is one")
            continue
        if not _HOST_NAME.fullmatch(name):
            yield Finding("python", binary.name, name, "_host.cpython-3XX-x86_64-linux-gnu.so")
            continue
        if f"PyInit_{HOST_MODULE[:-1]}" not in binary.defined:
            yield Finding("python", binary.name, "no module initialization function", "PyInit__host")
        built_for = host_module_python(wheel.read(binary.name))
        suffix = name[len(HOST_MODULE) : -len(".so")]
        if built_for != suffix:
            yield Finding(
                "python", binary.name, f"built for {built_for or 'an unknown Python'}", f"built for {suffix}"
            )


def host_module_python(data: bytes) -> str:
    """The SOABI tag that the build wrote into a ``_host`` module; empty when there is none."""
    match = re.search(rb"PELTON_HOST_SOABI=([A-Za-z0-9_.-]+)", data)
    return match[1].decode() if match else ""


@check(
    "isa",
    "instructions: up to the profile's level in the library and really of it; baseline x86-64 before the guard",
)
def check_isa(wheel: OpenedWheel) -> Iterator[Finding]:
    require("iced_x86", "iced-x86")
    for binary in wheel.binaries:
        if binary.machine != "EM_X86_64":
            yield Finding("isa", binary.name, f"machine {binary.machine}", "EM_X86_64")
            continue
        is_host = PurePosixPath(binary.name).name.startswith(HOST_MODULE)
        levels = ["x86-64"] if is_host or wheel.claims.backend != "cpu" else list(wheel.claims.archs)
        used = cpu_features(binary.code)
        yield from _judge_isa(binary.name, used, levels)


def allowed_features(levels: Sequence[str]) -> frozenset[str]:
    """CPUID features (iced-x86's names) that code for any of the levels may use.

    An arch is a psABI level, with single extensions after a plus sign: ``x86-64-v4+avx512_bf16``.
    Raises :class:`CannotRun` for a level that is not known here.
    """
    allowed = set(_BASELINE)
    for arch in levels:
        level, *extensions = arch.split("+")
        if level not in LEVELS:
            raise CannotRun(f"the instructions of {level} are not known to the audit")
        for name, features in LEVELS.items():
            allowed |= features
            if name == level:
                break
        allowed |= {extension.upper() for extension in extensions}
    return frozenset(allowed)


def _judge_isa(name: str, used: Mapping[str, tuple[int, str]], levels: Sequence[str]) -> Iterator[Finding]:
    allowed = allowed_features(levels)
    needed = f"{' and '.join(levels)} at most"
    for feature, (count, example) in sorted(used.items()):
        if feature not in allowed:
            yield Finding("isa", name, f"{count} instructions of {feature}, first {example}", needed)
    for arch in levels:
        own = LEVELS[arch.split("+")[0]]
        if own and not own & set(used):
            yield Finding("isa", name, f"no instruction of {arch}", f"code for {arch}, as the profile says")


def cpu_features(code: Iterable[Code]) -> dict[str, tuple[int, str]]:
    """CPUID features that the instructions need: count and first example of each; ``(not decodable)`` is one too."""
    import iced_x86

    names = {value: key for key, value in vars(iced_x86.CpuidFeature).items() if isinstance(value, int)}
    codes = {value: key for key, value in vars(iced_x86.Code).items() if isinstance(value, int)}
    by_code: dict[int, tuple[str, ...]] = {}
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for section in code:
        for instruction in iced_x86.Decoder(64, section.data, ip=section.address):
            features = by_code.get(instruction.code)
            if features is None:
                name = codes.get(instruction.code, "")
                if instruction.code == iced_x86.Code.INVALID:
                    features = ("(not decodable)",)
                elif name.startswith(_ALWAYS):
                    features = ()
                else:
                    features = tuple(names[f] for f in instruction.cpuid_features())
                by_code[instruction.code] = features
            for feature in features:
                counts[feature] += 1
                if feature not in examples:
                    examples[feature] = f"{instruction} at {instruction.ip:#x}"
    return {feature: (count, examples[feature]) for feature, count in counts.items()}


@check("paths", "no path of the build machine and no user name in any file")
def check_paths(wheel: OpenedWheel) -> Iterator[Finding]:
    private = private_patterns()
    for name in wheel.files():
        data = wheel.read(name)
        suffixes = (".py", ".pyi", ".md", ".txt", ".toml")
        is_text = PurePosixPath(name).suffix in suffixes or name.endswith("METADATA")
        patterns = (*private, _HOME_PATH if is_text else _BUILD_PATH)
        for found in sorted({match[0] for pattern in patterns for match in pattern.finditer(data)}):
            needed = "no path or name of the machine that built it"
            yield Finding("paths", name, repr(found.decode(errors="replace")), needed)


# Where a path of its own begins: not inside of a longer one (a home /build is no reason to refuse tests/build), but
# behind an option of the compiler.
_BEGIN = rb"(?:(?<![\w.~-])|(?<=-[IL]))"
_HOME_PATH = re.compile(_BEGIN + rb"/(?:home|Users|root)/[\w.@+-][^\s\"'`:;,()<>\x00-\x1f]{1,200}")
_BUILD_PATH = re.compile(
    _BEGIN + rb"/(?:home|Users|root|tmp|var/tmp|var/folders|work|workspace|builds?|src|mnt|srv|opt|io|project"
    rb"|github|__w|private|data|usr/src|usr/local|usr/include|usr/lib/gcc)/[^\s\"'\x00-\x1f\x7f-\xff]{2,200}"
)


def private_patterns() -> tuple[re.Pattern[bytes], ...]:
    """What names this machine: its checkout, home and temporary folder, and absolute paths with the user's name."""
    checkout = str(Path(__file__).resolve().parents[2])
    paths = {checkout, str(Path.cwd()), environment().get("PWD", ""), str(Path.home()), tempfile.gettempdir()}
    # Folders of one short name, such as /tmp and /root, stand in many harmless texts; the patterns above know them.
    patterns = [_BEGIN + re.escape(path.encode()) + rb"(?![\w-])" for path in sorted(paths) if len(path) > 5]
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        patterns.append(_BEGIN + rb"(?:/[\w.+@-]+)*/" + re.escape(getpass.getuser().encode()) + rb"/")
    return tuple(map(re.compile, patterns))


@check("size", "the file is within the profile's size budget")
def check_size(wheel: OpenedWheel) -> Iterator[Finding]:
    size = wheel.path.stat().st_size
    if size > wheel.claims.size_budget:
        yield Finding("size", wheel.path.name, f"{size} bytes", f"at most {wheel.claims.size_budget} bytes")


@check("stack", "no executable stack")
def check_stack(wheel: OpenedWheel) -> Iterator[Finding]:
    for binary in wheel.binaries:
        if binary.stack_flags is None:
            yield Finding("stack", binary.name, "no PT_GNU_STACK header", "a PT_GNU_STACK header without X")
        elif binary.stack_flags & 1:
            yield Finding("stack", binary.name, "an executable stack (RWE)", "RW")


@check("stripped", "no debug sections")
def check_stripped(wheel: OpenedWheel) -> Iterator[Finding]:
    for binary in wheel.binaries:
        if binary.debug_sections:
            yield Finding("stripped", binary.name, " ".join(binary.debug_sections), "a stripped file")


# --- running them ---


def audit_wheel(path: Path, only: Collection[str] | None = None) -> AuditReport:
    """Run every check, or those named in `only`, on one wheel.

    Raises:
        AuditError: the file cannot be audited at all (unreadable, truncated, hostile, no build info).
    """
    results = []
    with OpenedWheel(path) as wheel:
        _ = wheel.claims, wheel.metadata, wheel.wheel
        for name, (function, summary) in CHECKS.items():
            if only is not None and name not in only:
                continue
            try:
                results.append(CheckResult(name, summary, findings=tuple(function(wheel))))
            except CannotRun as reason:
                results.append(CheckResult(name, summary, skipped=str(reason)))
    return AuditReport(path.name, tuple(results))


def render(report: AuditReport) -> None:
    """Print a report as a table for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"audit of {report.wheel}", title_justify="left", show_lines=False)
    for column in ("check", "result", "what it looks at, what it found"):
        table.add_column(column, overflow="fold")
    for result in report.results:
        if result.skipped:
            outcome = Text("could not run", style="yellow")
            lines = [result.skipped]
        elif result.findings:
            outcome = Text("failed", style="red")
            lines = [f"{f.file}: found {f.found}; needed {f.needed}" for f in result.findings[:SHOWN]]
            if len(result.findings) > SHOWN:
                lines.append(f"and {len(result.findings) - SHOWN} more (--json shows all)")
        else:
            outcome = Text("passed", style="green")
            lines = [result.summary]
        table.add_row(result.name, outcome, Text("\n".join(lines)))
    console.print(table)
    verdict = "passed" if report.ok else f"failed: {len(report.findings)} findings"
    if report.skipped:
        verdict += f"; could not run: {', '.join(result.name for result in report.skipped)}"
    console.print(Text(f"{report.wheel}: {verdict}", style="green" if report.ok else "red"), soft_wrap=True)


SHOWN = 12  # findings of one check in the table


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m pelton_build.audit WHEEL...``; exit code 0 only when every check passed or could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m pelton_build.audit",
        description="Compare finished wheels with what they say of themselves.",
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument("--strict", action="store_true", help="a check that could not run counts as failed")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    reports = []
    failed = False
    for path in options.wheels:
        try:
            report = audit_wheel(path)
        except BuildError as error:
            sys.stderr.write(f"error: {error}\n")
            failed = True
            continue
        reports.append(report)
        failed |= not report.ok or (options.strict and bool(report.skipped))
        if not options.json:
            render(report)
    if options.json:
        sys.stdout.write(json.dumps([report.to_json() for report in reports], indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
