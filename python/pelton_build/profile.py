"""A build profile: what is true of a kind of machine. One TOML file each, whose name is the profile's name.

The dataclasses below are the schema: their fields are the only keys, the strings under the fields are the
documentation, and `schema.py` makes the editors' JSON schema from both.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .arch import BACKENDS, ArchError, check_archs, check_cuda_archs_for
from .errors import ProfileError
from .toml import parse_toml, read_text
from .values import Size, Version, VersionRange, check_label, check_requirement, did_you_mean, nearest

__all__ = [
    "FOLDER",
    "LABEL_FIELDS",
    "Ci",
    "Profile",
    "Target",
    "ToolchainNeeds",
    "Wheel",
    "load_profile",
    "parse_profile",
    "profile_names",
]

FOLDER = "build_profiles"
"""Folder of the profiles, relative to the project."""

LABEL_FIELDS = ("cuda_major", "cuda_major_minor")
"""What `wheel.label` may name in braces; filled from the CUDA toolkit that the plan takes."""

_OLDEST_GLIBC, _NEWEST_GLIBC = (2, 17), (2, 45)
_FIRST_PACKAGE = Version((13, 0))

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*", re.ASCII)
_SYSTEMS = ("linux",)
_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Target:
    """The hardware that the wheel is for."""

    backend: Literal["cpu", "cuda", "rocm"]
    """What computes: `cpu`, `cuda` (NVIDIA) or `rocm` (AMD)."""
    arch: tuple[str, ...]
    """Hardware names of the backend. cuda: `sm_90`, `sm_90a` (machine code), `compute_90` (PTX); rocm:
    `gfx90a`, `gfx1100`; cpu: exactly one of `x86-64-v2`, `x86-64-v3`, `x86-64-v4`."""
    system: Literal["linux"] = "linux"
    """Operating system of the machine."""
    machine: Literal["x86_64", "aarch64"] = "x86_64"
    """Processor family of the machine, as `uname -m` names it."""


@dataclass(frozen=True)
class ToolchainNeeds:
    """Versions of compilers and toolkits that this profile is known to build with."""

    gcc: VersionRange = field(default_factory=VersionRange)
    """Versions of gcc, such as `>=12`."""
    clang: VersionRange = field(default_factory=VersionRange)
    """Versions of clang as host compiler, such as `>=17`."""
    cuda: VersionRange = field(default_factory=VersionRange)
    """Versions of the CUDA toolkit, such as `>=12.8,<14`. For backend cuda only."""
    rocm: VersionRange = field(default_factory=VersionRange)
    """Versions of ROCm, such as `>=6,<8`. For backend rocm only."""
    cuda_package: Version | None = None
    """Version of the CUDA compiler to install into the build environment from the package index on a machine
    that has none, such as `13.0.2`. For backend cuda only; without it such a machine cannot
    build the profile."""


@dataclass(frozen=True)
class Wheel:
    """The wheel that is made."""

    label: str
    """Local version label, small letters and digits in parts with points between: `cpu.avx2` makes
    `0.1.0+cpu.avx2`. `{cuda_major}` and `{cuda_major_minor}` stand for the toolkit's version."""
    size_budget: Size
    """Most that the wheel file may have, such as `5 MiB`."""
    glibc: Version = field(default_factory=lambda: Version((2, 28)))
    """Oldest glibc that the wheel runs with."""
    requires: tuple[str, ...] = ()
    """Requirements of this profile's wheel besides those of the project, as `name>=1,<2`."""


@dataclass(frozen=True)
class Ci:
    """Where the profile is built and tested in continuous integration."""

    runner: str = "ubuntu-24.04"
    """Name of the runner."""
    container: str = ""
    """Image to build in, with its digest; empty for the runner itself, where releases are built by cibuildwheel."""
    packages: tuple[str, ...] = ()
    """Packages of the image's distribution (apt-get) that the build needs, such as a compiler for AMD GPUs."""
    run: bool = True
    """Whether the runner has the hardware to run the wheel's tests, not only to build and audit it."""
    timeout_minutes: int = 60
    """Longest time that the job may take."""


@dataclass(frozen=True)
class Profile:
    """One kind of machine."""

    name: str
    file: str
    """Where it was read, relative to the project, with forward slashes."""
    summary: str
    """The hardware in words that its owners use, one line."""
    target: Target
    wheel: Wheel
    toolchain: ToolchainNeeds = field(default_factory=ToolchainNeeds)
    features: Mapping[str, bool] = field(default_factory=dict)
    """Features on or off; the names are those of the kernel table, one that is not named is off."""
    variant: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Wheel-variant properties for installers that select by hardware: namespace, key, values."""
    ci: Ci = field(default_factory=Ci)


# Not keys of the file: they follow from where it lies.
DERIVED = ("name", "file")


def profile_names(root: Path) -> tuple[str, ...]:
    """Names of the profiles of the project at `root`, sorted. Files that editors hide (`.x.toml`) do not
    count."""
    folder = root / FOLDER
    return tuple(sorted(path.stem for path in folder.glob("*.toml") if not path.name.startswith(".")))


def load_profile(root: Path, name: str) -> Profile:
    """The profile `name` of the project at `root`. Raises ProfileError naming the file, the key and the
    way out."""
    names = profile_names(root)
    if name not in names:
        known = did_you_mean(name, names) if names else f"; {FOLDER}/ holds no profile"
        raise ProfileError(f"unknown profile {name!r}{known}")
    shown = f"{FOLDER}/{name}.toml"
    return parse_profile(name, shown, read_text(root / shown, shown, ProfileError))


def parse_profile(name: str, shown: str, text: str) -> Profile:
    """The profile that `text`, the content of file `shown`, describes. Raises ProfileError."""
    if not _NAME.fullmatch(name):
        suggestion = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "my-machine"
        raise ProfileError(
            f"{shown}: {name!r} is no name for a profile: small letters, digits and single dashes only; "
            f"rename the file to {suggestion}.toml"
        )
    data = parse_toml(text, shown, ProfileError)
    profile = _read(Profile, data, shown, "", {"name": name, "file": shown})
    assert isinstance(profile, Profile)
    _check(profile)
    return profile


def key_of(field_name: str) -> str:
    """The TOML key of a dataclass field."""
    return field_name.replace("_", "-")


def _read(cls: type, data: Any, shown: str, where: str, given: Mapping[str, object] | None = None) -> object:
    """The table `data` as the dataclass `cls`: unknown keys, missing keys and wrong types are errors."""
    given = given or {}
    if not isinstance(data, dict):
        raise ProfileError(f"{shown}: {where}: expected a table, found {_found(data)}")
    hints = typing.get_type_hints(cls)
    fields = {key_of(f.name): f for f in dataclasses.fields(cls) if f.name not in given}
    dot = f"{where}." if where else ""
    for key in data:
        if key not in fields:
            raise ProfileError(f"{shown}: unknown key {dot + key!r}{_elsewhere(key, list(fields), dot)}")
    values: dict[str, object] = dict(given)
    for key, entry in fields.items():
        if key in data:
            values[entry.name] = _value(hints[entry.name], data[key], shown, dot + key)
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise ProfileError(f"{shown}: missing {_missing(hints[entry.name], dot + key)}")
    return cls(**values)


def _missing(kind: Any, name: str) -> str:
    return f"table [{name}]" if dataclasses.is_dataclass(kind) else f"key {name!r}"


def _elsewhere(key: str, here: list[str], dot: str) -> str:
    """The nearest key of this table, else the same key in another table, else the list of keys."""
    close = nearest(key, here)
    if close is not None:
        return f"; did you mean {dot + close!r}? known: {', '.join(dot + name for name in here)}"
    for table, kind in typing.get_type_hints(Profile).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found = nearest(key, [key_of(f.name) for f in dataclasses.fields(kind)], 0.8)
            if found is not None:
                return f"; did you mean '{table}.{found}'?"
    return f"; known: {', '.join(dot + name for name in here)}"


_KINDS = {str: "text", bool: "true or false", int: "a whole number"}


def _value(kind: Any, data: Any, shown: str, where: str) -> object:
    def wrong(expected: str) -> ProfileError:
        return ProfileError(f"{shown}: {where}: expected {expected}, found {_found(data)}")

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _value(next(a for a in arguments if a is not types.NoneType), data, shown, where)
    if (
        isinstance(kind, type)
        and dataclasses.is_dataclass(kind)
        and kind not in (VersionRange, Version, Size)
    ):
        return _read(kind, data, shown, where)
    if kind in (VersionRange, Version, Size):
        if not isinstance(data, str):
            raise wrong(f"text such as '{_EXAMPLES[kind]}'")
        if not data.strip():
            raise ProfileError(
                f"{shown}: {where}: is empty; write it as '{_EXAMPLES[kind]}', or leave the key out"
            )
        try:
            return kind.parse(data)
        except ValueError as error:
            raise ProfileError(f"{shown}: {where}: {error}") from None
    if origin is tuple:
        if not isinstance(data, list):
            raise wrong(f'a list, such as ["{data}"]' if isinstance(data, str) else "a list")
        return tuple(
            _value(arguments[0], item, shown, f"{where}[{index}]") for index, item in enumerate(data)
        )
    if origin is Mapping:
        if not isinstance(data, dict):
            raise wrong("a table")
        return {key: _value(arguments[1], item, shown, f"{where}.{key}") for key, item in data.items()}
    if origin is Literal:
        if data not in arguments or not isinstance(data, str):
            hint = (
                did_you_mean(data, arguments) if isinstance(data, str) else f"; known: {', '.join(arguments)}"
            )
            raise ProfileError(f"{shown}: {where}: unknown value {data!r}{hint}")
        return data
    if type(data) is not kind:
        raise wrong(_KINDS[kind])
    return data


_EXAMPLES = {VersionRange: ">=12.8,<14", Version: "2.28", Size: "200 MiB"}


def _found(data: Any) -> str:
    names = {
        str: "text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "a table",
    }
    return f"{names.get(type(data), 'a ' + type(data).__name__)}" + (
        "" if isinstance(data, dict) else f" {data!r}"
    )


def _check(profile: Profile) -> None:
    """What the types alone cannot say. Raises ProfileError."""
    shown, target, needs, wheel = profile.file, profile.target, profile.toolchain, profile.wheel
    if not profile.summary.strip() or not profile.summary.isprintable():
        raise ProfileError(
            f"{shown}: summary: say in one line which hardware this is for, found {profile.summary!r}"
        )
    assert target.backend in BACKENDS and target.system in _SYSTEMS and target.machine in _MACHINES
    try:
        check_archs(target.backend, target.arch)
        if target.backend == "cuda":
            check_cuda_archs_for(target.arch, needs.cuda, None)
    except ArchError as error:
        raise ProfileError(f"{shown}: target.arch: {error}") from None
    if target.backend == "cpu" and target.machine != "x86_64":
        raise ProfileError(
            f"{shown}: target.machine: the archs {', '.join(target.arch)} are of x86_64, found "
            f"{target.machine!r}"
        )
    for key, backend, given in (
        ("cuda", "cuda", needs.cuda.clauses),
        ("cuda-package", "cuda", needs.cuda_package),
        ("rocm", "rocm", needs.rocm.clauses),
    ):
        if given and target.backend != backend:
            raise ProfileError(
                f"{shown}: toolchain.{key}: only for backend {backend}, and target.backend is "
                f"{target.backend!r}; remove it"
            )
    if needs.cuda_package is not None and needs.cuda_package not in needs.cuda:
        raise ProfileError(
            f"{shown}: toolchain.cuda-package: {needs.cuda_package} is not in toolchain.cuda "
            f"{str(needs.cuda)!r}"
        )
    if needs.cuda_package is not None and needs.cuda_package < _FIRST_PACKAGE:
        raise ProfileError(
            f"{shown}: toolchain.cuda-package: package indexes have the compiler from CUDA {_FIRST_PACKAGE} on, found "
            f"{needs.cuda_package}; name a newer one, or remove the key"
        )
    _check_label(profile)
    for requirement in wheel.requires:
        try:
            check_requirement(requirement)
        except ValueError as error:
            raise ProfileError(f"{shown}: wheel.requires: {error}") from None
    if len(wheel.glibc.parts) != 2:
        raise ProfileError(
            f"{shown}: wheel.glibc: write major and minor version, such as '2.28', found '{wheel.glibc}'"
        )
    if not _OLDEST_GLIBC <= wheel.glibc.parts <= _NEWEST_GLIBC:
        oldest, newest = (".".join(map(str, parts)) for parts in (_OLDEST_GLIBC, _NEWEST_GLIBC))
        raise ProfileError(
            f"{shown}: wheel.glibc: wheels are for a glibc from {oldest} to {newest}, found '{wheel.glibc}'"
        )
    _check_variant(profile)
    if profile.ci.timeout_minutes < 1:
        raise ProfileError(
            f"{shown}: ci.timeout-minutes: must be at least 1, found {profile.ci.timeout_minutes}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", profile.ci.runner):
        raise ProfileError(
            f"{shown}: ci.runner: expected the name of a runner such as 'ubuntu-24.04', found {profile.ci.runner!r}"
        )
    if profile.ci.container and not re.search(r"@sha256:[0-9a-f]{64}$", profile.ci.container):
        raise ProfileError(
            f"{shown}: ci.container: {profile.ci.container!r} can be another image tomorrow; name it with its digest, "
            "as name@sha256:..."
        )
    for package in profile.ci.packages:
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package):
            raise ProfileError(f"{shown}: ci.packages: {package!r} is no name of a package")


def _check_variant(profile: Profile) -> None:
    """Whether the hardware by which installers choose is that of target.arch, and said as they know it."""
    for namespace, keys in profile.variant.items():
        if namespace not in VARIANT_KEYS:
            raise ProfileError(
                f"{profile.file}: unknown namespace 'variant.{namespace}'{did_you_mean(namespace, VARIANT_KEYS)}"
            )
        for key in keys:
            if key not in VARIANT_KEYS[namespace]:
                hint = did_you_mean(key, VARIANT_KEYS[namespace])
                raise ProfileError(f"{profile.file}: unknown key 'variant.{namespace}.{key}'{hint}")
    for namespace, key, make in _VARIANT_ARCHS:
        given = profile.variant.get(namespace, {}).get(key)
        if given is None:
            continue
        wanted = tuple(made for arch in profile.target.arch if (made := make(arch)))
        if set(given) != set(wanted):
            raise ProfileError(
                f"{profile.file}: variant.{namespace}.{key}: target.arch is {', '.join(profile.target.arch)}, so that "
                f"it has to be {list(wanted)}, found {list(given)}"
            )


def _nvidia_arch(arch: str) -> str:
    match = re.fullmatch(r"(sm|compute)_(\d+)[af]?", arch)
    return f"{match[2]}_{'real' if match[1] == 'sm' else 'virtual'}" if match else ""


# What installers can ask a machine, by namespace.
VARIANT_KEYS: Mapping[str, tuple[str, ...]] = {
    "nvidia": ("sm_arch", "cuda_version_lower_bound", "cuda_version_upper_bound"),
    "amd": ("gfx_arch",),
    "x86_64": ("level",),
}
# Namespace and key of a variant property that names archs, and how an arch of the profile is written there.
_VARIANT_ARCHS = (
    ("nvidia", "sm_arch", _nvidia_arch),
    ("amd", "gfx_arch", lambda arch: arch.partition(":")[0] if arch.startswith("gfx") else ""),
    ("x86_64", "level", lambda arch: arch.removeprefix("x86-64-") if arch.startswith("x86-64-") else ""),
)


def check_own_label(root: Path, profile: Profile) -> None:
    """Raises ProfileError when another profile of the project has the same label."""
    for name in profile_names(root):
        try:
            other = load_profile(root, name)
        except ProfileError:
            continue  # a broken profile makes no wheel
        if other.name != profile.name and other.wheel.label == profile.wheel.label:
            raise ProfileError(
                f"{profile.file}: wheel.label: {profile.wheel.label!r} is the label of {other.file}, too, so that two "
                "different wheels would have one name; give each profile its own"
            )


def _check_label(profile: Profile) -> None:
    shown, label = profile.file, profile.wheel.label
    fields = re.findall(r"\{([^{}]*)\}", label)
    for name in fields:
        if name not in LABEL_FIELDS:
            raise ProfileError(
                f"{shown}: wheel.label: unknown field '{{{name}}}'{did_you_mean(name, LABEL_FIELDS)}"
            )
    if fields and profile.target.backend != "cuda":
        raise ProfileError(
            f"{shown}: wheel.label: '{{{fields[0]}}}' is for backend cuda, and target.backend is "
            f"{profile.target.backend!r}"
        )
    try:
        check_label(re.sub(r"\{[a-z_]+\}", "0", label))
    except ValueError:
        raise ProfileError(
            f"{shown}: wheel.label: {label!r} is not a local version label: small letters and digits, in "
            "parts with points between them, such as 'cpu.avx2'"
        ) from None
