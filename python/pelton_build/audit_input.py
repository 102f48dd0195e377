"""A wheel as the audit reads it: members, metadata, build info, ELF files.

Nothing is extracted to disk under a name from the wheel, nothing in it is run. A file that is no wheel, or that is made
to harm whoever opens it, is refused at once.
"""

from __future__ import annotations

import email.message
import email.parser
import email.policy
import importlib.util
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Self

from pelton_build import fatbin, hipfat
from pelton_build.errors import BuildError

__all__ = [
    "AuditError",
    "Binary",
    "CannotRun",
    "Claims",
    "Code",
    "Finding",
    "NothingThere",
    "OpenedWheel",
    "require",
]

MAX_UNPACKED = 4 << 30  # bytes; more than any profile's budget, less than what fills a machine
KEPT = 512 << 20  # bytes; what a smaller wheel unpacks to is read once and kept while it is open
MAX_RATIO = 1000  # deflate cannot exceed 1032:1, real libraries stay below 20:1
BUILD_INFO = "_build_info.json"


class AuditError(BuildError):
    """A wheel that cannot be audited: unreadable, truncated, hostile, without build info."""


class CannotRun(Exception):
    """A check that this machine cannot run; the text says what is missing."""


class NothingThere(Exception):
    """A check of what this wheel rightly does not have; the text says what."""


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
    data: Mapping[str, bytes]  # sections with device code and what registers it, by name


DEVICE_SECTIONS = (
    fatbin.SECTION,
    fatbin.REGISTRATION,
    fatbin.LINKED_SECTION,
    hipfat.SECTION,
    hipfat.REGISTRATION,
)


@dataclass(frozen=True)
class PlannedSource:
    """A source file that the plan says is compiled."""

    path: str
    family: str
    role: str
    """`op`, `cpu`, `gpu` or `host`."""
    archs: tuple[str, ...]
    support: bool
    """Whether its family is nothing by itself, so that it need not hold any kernel."""


@dataclass(frozen=True)
class Allowance:
    """Local memory that the plan allows a kernel."""

    family: str
    kernel: str
    """The function's name, without namespaces and template arguments."""
    archs: tuple[str, ...]
    """The archs that it is for; none: all."""
    bytes: int


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
    sources: tuple[PlannedSource, ...]
    local_memory: tuple[Allowance, ...]
    run_time: tuple[str, ...]
    """CPU instructions that the library runs only after asking the CPU."""
    matrix: tuple[tuple[str, tuple[str, ...]], ...]
    """Families that have to hold matrix instructions for some AMD GPUs, with these."""

    @classmethod
    def read(cls, info: Mapping[str, Any], where: str, library: str) -> Claims:
        """The claims in a build info; `library` is the library's name when the build info gives none.

        Raises :class:`AuditError` naming the key that is missing or of another type."""

        def get(key: str, kind: type) -> Any:
            value = info.get(key)
            if not isinstance(value, kind):
                raise AuditError(f"{where}: key {key!r} is missing or not of type {kind.__name__}")
            return value

        plan = info.get("plan", {})
        try:
            sources = tuple(
                PlannedSource(
                    path=str(source["path"]),
                    family=str(source["family"]),
                    role=str(source["role"]),
                    archs=tuple(map(str, source["archs"])),
                    support=bool(source.get("support", False)),
                )
                for source in plan.get("sources", [])
            )
            allowances = tuple(
                Allowance(str(a["family"]), str(a["kernel"]), tuple(map(str, a["archs"])), int(a["bytes"]))
                for a in plan.get("local_memory", [])
            )
            run_time = tuple(map(str, plan.get("run_time", [])))
            matrix = tuple(
                (str(family), tuple(map(str, archs)))
                for family, archs in sorted(plan.get("matrix", {}).items())
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AuditError(f"{where}: key 'plan' is not a plan of this build ({error!r})") from None
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
            sources=sources,
            local_memory=allowances,
            run_time=run_time,
            matrix=matrix,
        )


class OpenedWheel:
    """A wheel read for the audit: members, metadata, build info, ELF files; each read once, when first wanted.

    Raises :class:`AuditError` at once for a file that is no wheel or that is made to harm whoever opens it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise AuditError(f"{path}: not a file; name a wheel")
        try:
            self.zip = zipfile.ZipFile(path)
        except Exception as error:  # a damaged file makes zipfile raise whatever its parser meets
            raise AuditError(f"{path}: not a readable wheel ({error}); build it again") from error
        self.infos = self.zip.infolist()
        self.names = [info.filename for info in self.infos]
        self.members: dict[str, bytes] = {}  # what was read, as far as the wheel fits into memory
        self.total = total = sum(info.file_size for info in self.infos)
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
        if name in self.members:
            return self.members[name]
        try:
            data = self.zip.read(name)
        except Exception as error:  # a damaged stream makes the codecs raise whatever they meet
            raise AuditError(f"{self.path}: member {name} cannot be read ({error})") from error
        if self.total <= KEPT:
            self.members[name] = data
        return data

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
        except (ValueError, RecursionError) as error:
            raise AuditError(f"{self.path}: {self.info_path} is not JSON ({error})") from error
        if not isinstance(info, dict):
            raise AuditError(f"{self.path}: {self.info_path} is not a JSON object")
        try:
            json.dumps(info, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise AuditError(f"{self.path}: {self.info_path} holds half characters (surrogates)") from None
        if not isinstance(info.get("toolchain", {}), dict):
            raise AuditError(f"{self.path}: {self.info_path}: toolchain is not an object")
        for key in ("glibc", "torch_floor"):
            if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})*|", str(info.get(key, "")), re.ASCII):
                raise AuditError(f"{self.path}: {self.info_path}: {key} is no version, found {info[key]!r}")
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

    @cached_property
    def library(self) -> Binary | None:
        """The library of all kernels; None when it is missing or no ELF file."""
        name = f"{self.package}/{self.claims.library}"
        return next((binary for binary in self.binaries if binary.name == name), None)

    @cached_property
    def device_code(self) -> tuple[tuple[fatbin.Image, ...], ...]:
        """The library's device code: its fat binaries (AMD's: bundles), each as its images.

        Raises FatbinError for damaged device code, CannotRun when what unpacks it is not installed."""
        data = self.library.data if self.library is not None else {}
        if self.claims.backend == "rocm":
            sources = (source.path for source in self.claims.sources if source.role == "gpu")
            return hipfat.read_bundles(data.get(hipfat.SECTION, b""), sources)
        section = data.get(fatbin.SECTION, b"")
        try:
            return fatbin.read_fatbin(section)
        except ImportError as error:
            raise CannotRun(f"{str(error.name).partition('.')[0]} is not installed here") from None


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


@lru_cache(maxsize=16)
def read_binary(name: str, data: bytes) -> Binary:
    """Parse one ELF file.  Raises :class:`AuditError` when it is damaged.

    The last ones are kept: wheels of one build have the same binaries.
    """
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
    device: dict[str, bytes] = {}
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
            elif section.name in DEVICE_SECTIONS:
                device[section.name] = section.data()
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
        data=device,
    )
