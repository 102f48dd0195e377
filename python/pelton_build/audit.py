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
import dataclasses
import getpass
import hashlib
import io
import json
import logging
import re
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from pelton_build.audit_cuda import (
    KernelUse,
    check_archs,
    check_cuobjdump,
    check_local_memory,
    demangled,
    kernel_uses,
)
from pelton_build.audit_input import (
    AuditError,
    CannotRun,
    Finding,
    NothingThere,
    OpenedWheel,
    require,
)
from pelton_build.audit_isa import LEVELS, allowed_features, cpu_features
from pelton_build.audit_rocm import check_code_objects
from pelton_build.audit_sbom import check_sbom
from pelton_build.errors import BuildError
from pelton_build.fatbin import FatbinError
from pelton_build.settings import environment
from pelton_build.variants import FILE as VARIANT
from pelton_build.variants import VariantError, properties_of, read_variant, split_file_name, variant_label

if TYPE_CHECKING:
    from rich.console import Console

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

MODULES = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in (
        "audit",
        "audit_cuda",
        "audit_input",
        "audit_isa",
        "audit_rocm",
        "audit_sbom",
        "fatbin",
        "hipfat",
        "sbom",
        "variants",
    )
)
"""The files that decide what passes."""

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
# Those that every torch has.  A library that needs libtorch_cuda or a GPU's runtime does not load on other machines.
TORCH_LIBRARIES = frozenset({"libtorch.so", "libtorch_cpu.so"})

# manylinux policy: the newest symbol versions of the compiler's libraries that go with a glibc.
COMPILER_LIMITS: Mapping[tuple[int, int], Mapping[str, str]] = {
    (2, 17): {"GLIBCXX": "3.4.19", "CXXABI": "1.3.7", "GCC": "4.8.0"},
    (2, 28): {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"},
    (2, 34): {"GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "7.0.0"},
}


@dataclass(frozen=True)
class CheckResult:
    """What one check gave: findings, or the reason why it could not run, or what is not there to be checked."""

    name: str
    summary: str
    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    nothing: str = ""


@dataclass(frozen=True)
class AuditReport:
    """All checks of one wheel."""

    wheel: str
    results: tuple[CheckResult, ...]
    kernels: tuple[KernelUse, ...] = ()
    """What each GPU kernel takes, as far as the device code can be read."""

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
                    "nothing": r.nothing or None,
                    "findings": [{"file": f.file, "found": f.found, "needed": f.needed} for f in r.findings],
                }
                for r in self.results
            ],
            "kernels": [dataclasses.asdict(use) for use in self.kernels],
        }


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
    plain, _ = split_file_name(wheel.path.name)
    try:
        name, version, build, tags = parse_wheel_filename(plain)
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
    stem = plain.rsplit("-", 3)[0]
    if wheel.dist_info != f"{stem}.dist-info":
        yield finding(wheel.dist_info, wheel.dist_info, f"{stem}.dist-info")
    local = version.local or ""
    # Behind the label, or instead of one, stands what the version of the source has there.
    own = r"g[0-9a-f]+(\.dirty)?|dirty"
    if claims.label:
        agrees = local == claims.label or local.startswith(f"{claims.label}.")
    else:
        agrees = not local or re.fullmatch(own, local) is not None
    if not agrees:
        yield finding(
            wheel.path.name,
            f"label {local or '(none)'}",
            f"label {claims.label or '(none)'}, as in the build info",
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


@check("variant", "a variant wheel, and no other, says what hardware it is for: what the profile says")
def check_variant(wheel: OpenedWheel) -> Iterator[Finding]:
    _, label = split_file_name(wheel.path.name)
    file = f"{wheel.dist_info}/{VARIANT}"
    there = file in wheel.names
    if there != bool(label):
        needed = (
            "none: the file's name has no variant label" if there else f"the properties of variant {label}"
        )
        yield Finding("variant", file, "properties" if there else "none", needed)
    if not there and not label:
        raise NothingThere("no variant wheel")
    if not there or not label:
        return
    expected = variant_label(wheel.claims.profile)
    if label != expected:
        yield Finding("variant", wheel.path.name, f"variant label {label}", f"{expected}, after the profile")
    try:
        found = read_variant(wheel.read(file), label, file)
    except VariantError as error:
        yield Finding("variant", file, "another content", str(error))
        return
    plan = wheel.info.get("plan", {})
    needed_properties = properties_of(plan.get("variant", {}))
    if found != needed_properties:
        yield Finding("variant", file, str(found), f"{needed_properties}, as the build info says")
    if wheel.claims.label:
        yield Finding(
            "variant", wheel.path.name, f"label {wheel.claims.label}", "no label in a variant wheel's version"
        )


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


@check("operators", "each family of the plan registers its operators, and no other source does")
def check_operators(wheel: OpenedWheel) -> Iterator[Finding]:
    """torch keeps the source file of each registration: its name stands in the library."""
    if wheel.library is None:
        return
    families: dict[str, list[str]] = {}
    for source in wheel.claims.sources:
        if source.role == "op":
            families.setdefault(source.family, []).append(source.path)
    data = wheel.read(wheel.library.name)
    found = {match[1].decode() for match in re.finditer(rb"/kernels/([\w./+-]+\.cpp)\0", data)}
    for family, paths in families.items():
        if not found & set(paths):
            needed = f"registrations from {' or '.join(paths)}"
            yield Finding("operators", wheel.library.name, f"no operator of family {family}", needed)
    planned = {source.path for source in wheel.claims.sources}
    for path in sorted(found - planned):
        yield Finding("operators", wheel.library.name, f"operators of {path}", "sources of the plan alone")


check("archs", "device code of each kernel family: exactly the plan's archs, every kernel for each of them")(
    check_archs
)
check(
    "local",
    "no GPU kernel spills registers or keeps arrays in memory, unless the plan allows it with a reason",
)(check_local_memory)
check(
    "amdgpu",
    "AMD code objects: the version that every ROCm loads, the arch's wave, its memory a block, matrix instructions",
)(check_code_objects)
check("cuobjdump", "cuobjdump lists the same device code")(check_cuobjdump)


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


@check(
    "torch-abi", "torch-abi-audit finds the stable interface alone, and nothing newer than the torch floor"
)
def check_torch_abi(wheel: OpenedWheel) -> Iterator[Finding]:
    require("torch_abi_audit", "torch-abi-audit")
    from torch_abi_audit.demangle import demangle_symbol
    from torch_abi_audit.torch_abi import classify_symbols

    floor = wheel.claims.torch_floor
    for binary in wheel.binaries:
        verdict = classify_symbols([demangle_symbol(symbol) for symbol in sorted(binary.undefined)])
        for symbol in verdict.unstable_symbols:
            yield Finding("torch-abi", binary.name, f"{symbol} of torch", "torch's stable interface alone")
        for symbol in verdict.unknown_shim_symbols:
            needed = f"functions that torch {floor} is known to have"
            yield Finding("torch-abi", binary.name, f"{symbol}, in no torch that is known", needed)
        least = verdict.min_torch_version
        if least is not None and _numbers(least) > (*_numbers(floor), 0, 0, 0)[:3]:
            newer = ", ".join(verdict.version_defining_symbols)
            yield Finding("torch-abi", binary.name, f"{newer} of torch {least}", f"torch {floor} or older")


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
        asked = () if is_host else wheel.claims.run_time
        yield from _judge_isa(binary.name, used, levels, asked)


def _judge_isa(
    name: str, used: Mapping[str, tuple[int, str]], levels: Sequence[str], asked: Sequence[str]
) -> Iterator[Finding]:
    """`asked`: what the plan says is run only after asking the CPU."""
    allowed = allowed_features(levels) | set(asked)
    needed = f"{' and '.join(levels)} at most" + (
        f", and behind a question to the CPU {', '.join(asked)}" if asked else ""
    )
    for feature in asked:
        if feature not in used:
            yield Finding(
                "isa", name, f"no instruction of {feature}", "it, as the plan says that some code asks for it"
            )
    for feature, (count, example) in sorted(used.items()):
        if feature not in allowed:
            yield Finding("isa", name, f"{count} instructions of {feature}, first {example}", needed)
    for arch in levels:
        own = LEVELS[arch.split("+")[0]]
        if own and not own & set(used):
            yield Finding("isa", name, f"no instruction of {arch}", f"code for {arch}, as the profile says")


check("sbom", "the bill of materials lists what is linked or compiled into the binaries, and nothing else")(
    check_sbom
)


@check("paths", "no path of the build machine and no user name in any file")
def check_paths(wheel: OpenedWheel) -> Iterator[Finding]:
    private = private_patterns()
    for name in wheel.files():
        data = wheel.read(name)
        suffixes = (".py", ".pyi", ".md", ".txt", ".toml")
        is_text = PurePosixPath(name).suffix in suffixes or name.endswith("METADATA")
        patterns = (*private, _HOME_PATH if is_text else _BUILD_PATH)
        for found in _matches(data, patterns):
            needed = "no path or name of the machine that built it"
            yield Finding("paths", name, repr(found.decode(errors="replace")), needed)


def _matches(data: bytes, patterns: tuple[re.Pattern[bytes], ...]) -> tuple[bytes, ...]:
    """What the patterns find, each once; remembered by the data's digest, as wheels share most of their files."""
    key = (hashlib.sha256(data).digest(), patterns)
    seen = _seen()
    if key not in seen:
        seen[key] = tuple(sorted({match[0] for pattern in patterns for match in pattern.finditer(data)}))
    return seen[key]


@cache
def _seen() -> dict[tuple[bytes, tuple[re.Pattern[bytes], ...]], tuple[bytes, ...]]:
    return {}


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
            findings: list[Finding] = []
            skipped = nothing = ""
            try:
                findings.extend(function(wheel))
            except CannotRun as reason:
                skipped = str(reason)
            except NothingThere as reason:
                nothing = str(reason)
            results.append(CheckResult(name, summary, tuple(findings), skipped, nothing))
        kernels: tuple[KernelUse, ...] = ()
        with contextlib.suppress(CannotRun, FatbinError):  # the check `archs` says so
            kernels = kernel_uses(wheel)
    return AuditReport(path.name, tuple(results), kernels)


def render(report: AuditReport, every_kernel: bool = False) -> None:
    """Print a report as a table for a person."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"audit of {report.wheel}", title_justify="left", show_lines=False)
    for column in ("check", "result", "what it looks at, what it found"):
        table.add_column(column, overflow="fold")
    for result in report.results:
        if result.findings:
            outcome = Text("failed", style="red")
            lines = [f"{f.file}: found {f.found}; needed {f.needed}" for f in result.findings[:SHOWN]]
            if len(result.findings) > SHOWN:
                lines.append(f"and {len(result.findings) - SHOWN} more (--json shows all)")
        elif result.skipped:
            outcome = Text("could not run", style="yellow")
            lines = [result.skipped]
        elif result.nothing:
            outcome = Text("not there", style="dim")
            lines = [result.nothing]
        else:
            outcome = Text("passed", style="green")
            lines = [result.summary]
        table.add_row(result.name, outcome, Text("\n".join(lines)))
    console.print(table)
    if report.kernels:
        render_kernels(console, report.kernels, every_kernel)
    verdict = "passed" if report.ok else f"failed: {len(report.findings)} findings"
    if report.skipped:
        verdict += f"; could not run: {', '.join(result.name for result in report.skipped)}"
    console.print(Text(f"{report.wheel}: {verdict}", style="green" if report.ok else "red"), soft_wrap=True)


SHOWN = 12  # findings of one check in the table


def render_kernels(console: Console, uses: Sequence[KernelUse], every: bool) -> None:
    """Print what the GPU kernels take: a line for each source and arch, or for each kernel."""
    from rich.table import Table

    title = "GPU kernels: the most that one takes; registers, bytes of local memory a thread, of shared memory a block"
    table = Table(title=title, title_justify="left")
    for column in (
        "family",
        "source",
        "arch",
        "kernel" if every else "kernels",
        "regs",
        "shared",
        "local",
        "loads/stores",
    ):
        table.add_column(column, overflow="fold")
    names = demangled(use.kernel for use in uses) if every else {}
    groups: dict[tuple[str, ...], list[KernelUse]] = {}
    for use in uses:
        key = (use.family, use.source, use.arch, *([names[use.kernel]] if every else []))
        groups.setdefault(key, []).append(use)
    for (family, source, arch, *kernel), group in groups.items():
        most = [str(max(getattr(use, key) for use in group)) for key in ("registers", "shared", "local")]
        moved = f"{max(use.loads for use in group)}/{max(use.stores for use in group)}"
        table.add_row(family, source, arch, *(kernel or [str(len(group))]), *most, moved)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m pelton_build.audit WHEEL...``; exit code 0 only when every check passed or could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m pelton_build.audit",
        description="Compare finished wheels with what they say of themselves.",
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.add_argument("--kernels", action="store_true", help="list every GPU kernel, not only each source")
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
            render(report, options.kernels)
    if options.json:
        sys.stdout.write(json.dumps([report.to_json() for report in reports], indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
