"""The plan: what is built from which sources, how, and why. Data alone; `resolve` makes it, CMake carries
it out.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from .values import Size

__all__ = [
    "Backend",
    "ExcludedSource",
    "Feature",
    "HostPython",
    "Jobs",
    "Language",
    "LocalMemory",
    "Plan",
    "PlannedSource",
    "Role",
    "Setting",
    "Tool",
    "TorchHeaders",
    "render",
]

Backend = Literal["cpu", "cuda", "rocm"]
Language = Literal["CXX", "CUDA", "HIP"]
Role = Literal["op", "cpu", "gpu", "host"]

FORMAT = 1  # of the JSON form; raised when a reader of the old one would misunderstand the new one


@dataclass(frozen=True)
class Setting:
    """A setting with the place that its value came from."""

    name: str
    """What is set: `profile`, `feature.marlin`, `jobs`, `torch-dir`."""
    value: str
    """The value in force."""
    origin: str
    """Where it was said, in words a user can act on: `-C profile=`, `PELTON_PROFILE`, `detected: ...`."""
    overridden: tuple[str, ...] = ()
    """What lost against it, each as `value (origin)`, strongest first."""


@dataclass(frozen=True)
class Feature:
    """A declared feature and whether this build has it."""

    name: str
    enabled: bool
    origin: str
    """Where the value came from."""
    changed: bool = False
    """Whether the value differs from the profile's, so that the label has to say so."""
    overridden: tuple[str, ...] = ()
    """What lost against it, each as `value (origin)`."""


@dataclass(frozen=True)
class PlannedSource:
    """A source file that is compiled."""

    path: str
    """Relative to `Plan.kernels`, with forward slashes."""
    family: str
    """The entry of the kernel table that it belongs to."""
    role: Role
    """`op`: operator (host compiler, torch's headers, no ISA flags); `cpu`: device code for the CPU; `gpu`:
    device code for a GPU (CUDA, or HIP after hipify); `host`: the Python extension, once
    for each host Python."""
    language: Language
    """CMake's name of the language."""
    archs: tuple[str, ...]
    """The archs of the profile that this file is compiled for; none for `op` and `host`."""
    flags: tuple[str, ...]
    """Compiler flags of this file alone, arch flags included."""
    definitions: tuple[str, ...]
    """Preprocessor definitions of this file alone, `NAME=VALUE` without `-D`."""
    reason: str
    """Why it is in."""
    support: bool = False
    """Whether its family supports others and is nothing by itself."""


@dataclass(frozen=True)
class ExcludedSource:
    """A source file of the kernel table that is not compiled."""

    path: str
    family: str
    role: Role
    reason: str
    """Why it is out."""


@dataclass(frozen=True)
class LocalMemory:
    """Local memory that a GPU kernel may use: for spilled registers, or arrays that are indexed at run time."""

    family: str
    kernel: str
    """The function's name, without namespaces and template arguments."""
    archs: tuple[str, ...]
    """The archs that it is for; none: all."""
    bytes: int
    """Most that a thread may use."""
    reason: str
    """Why it is worth it."""


@dataclass(frozen=True)
class Tool:
    """A compiler or toolkit that was found."""

    kind: str
    """`cxx`, `cuda` or `rocm`."""
    name: str
    """`gcc`, `clang`, `nvcc`, `hip-clang`."""
    path: str
    """The program; empty when it comes from the package index."""
    version: str
    """As the program itself says; empty when it says nothing understandable."""
    origin: str
    """The variable, folder or search that it came from."""
    root: str = ""
    """Toolkit folder that program and headers belong to; empty for host compilers."""
    headers_version: str = ""
    """Version of the headers in `root`."""
    host_limit: str = ""
    """Newest major version of gcc that this nvcc accepts; empty when not known."""
    clang_limit: str = ""
    """The same for clang."""
    runtime: str = ""
    """The CUDA runtime to link in, a static library; empty for other tools."""
    device_libs: str = ""
    """The folder of ROCm's device libraries; empty for other tools."""
    archs: tuple[str, ...] = ()
    """GPUs that this HIP compiler knows; empty when it does not say."""


@dataclass(frozen=True)
class TorchHeaders:
    """Where torch's headers come from."""

    path: str
    """The folder of the torch package (headers in `include/`); empty when torch is a build requirement
    that is not installed yet."""
    version: str
    origin: str
    requirement: str = ""
    """The build requirement that brings the headers, when nothing on this machine does."""


@dataclass(frozen=True)
class HostPython:
    """A CPython that the host extension is built for."""

    path: str
    version: str
    """Major and minor version, `3.12`."""
    include: str
    """The folder with Python.h."""
    suffix: str
    """The extension's suffix, `.cpython-312-x86_64-linux-gnu.so`."""


@dataclass(frozen=True)
class Jobs:
    """How many compiler processes run at once, and why."""

    count: int
    arithmetic: str
    """The whole calculation in one line."""
    cores: int
    memory: int
    """Bytes available for the build."""
    memory_per_job: int
    """Bytes estimated for the most demanding kind of source in the plan."""
    gpu_count: int
    """Jobs of GPU compilers at once, which need more memory each; equal to `count` when there are none."""


@dataclass(frozen=True)
class Plan:
    """Everything that a build needs to know. Equal inputs make equal plans."""

    profile: str
    summary: str
    profile_file: str
    """Relative to the project."""
    backend: Backend
    archs: tuple[str, ...]
    system: str
    machine: str
    package: str
    """The Python package that the library goes into."""
    library: str
    """The library's name without `lib` and suffix."""
    kernels: str
    """The folder of the sources, relative to the project."""
    version: str
    """The project's version without the label."""
    label: str
    """Local version label, feature changes included."""
    wheel_version: str
    """Version and label in one."""
    platform_tag: str
    glibc: str
    """The glibc floor."""
    size_budget: int
    """Most bytes that the wheel may have."""
    requires: tuple[str, ...]
    """Requirements that the wheel of this profile has besides those of the project: the torch floor first."""
    torch_floor: str
    """Oldest torch that the library runs with."""
    minimum_driver: str
    """CUDA version that the driver has to support (what `cuDriverGetVersion` says), such as `13.0`; empty for
    other backends."""
    minimum_driver_ptx: str
    """The same where the driver has to compile the wheel's PTX; empty when there is none in it."""
    cxx_standard: int
    features: tuple[Feature, ...]
    settings: tuple[Setting, ...]
    sources: tuple[PlannedSource, ...]
    excluded: tuple[ExcludedSource, ...]
    tools: tuple[Tool, ...]
    torch: TorchHeaders
    host_pythons: tuple[HostPython, ...]
    build_requires: tuple[str, ...]
    """What has to be installed into the build environment because this machine lacks it."""
    jobs: Jobs
    variant: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Wheel-variant properties: namespace, key, values."""
    local_memory: tuple[LocalMemory, ...] = ()
    """The GPU kernels that may use local memory; the audit allows it to no other."""
    matrix: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Families whose code has to hold matrix instructions for some AMD GPUs of the plan, with these."""
    run_time: tuple[str, ...] = ()
    """CPU instructions beyond the archs that are run only after asking the CPU; the audit allows them."""
    notes: tuple[str, ...] = ()
    """What a user should know: variables that are not used, and the like."""
    problems: tuple[str, ...] = ()
    """Why this plan cannot be built on this machine; empty when it can."""

    @property
    def wheel_name(self) -> str:
        return f"{self.package}-{self.wheel_version}-py3-none-{self.platform_tag}.whl"

    def tool(self, kind: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.kind == kind), None)

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back to an equal plan."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises ValueError when `text` is not a plan of this format."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a plan: {error}") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"not a plan of format {FORMAT}; make it again with this version of the tool")
        plan = _load(cls, data, "plan")
        assert isinstance(plan, cls)
        return plan

    def public(self) -> dict[str, Any]:
        """What the wheel may say about its plan: nothing that depends on this machine's folders, cores or
        memory."""
        return {
            "profile": self.profile,
            "summary": self.summary,
            "backend": self.backend,
            "archs": list(self.archs),
            "version": self.wheel_version,
            "label": self.label,
            "platform_tag": self.platform_tag,
            "glibc": self.glibc,
            "size_budget": self.size_budget,
            "torch_floor": self.torch_floor,
            "minimum_driver": self.minimum_driver,
            "minimum_driver_ptx": self.minimum_driver_ptx,
            "cxx_standard": self.cxx_standard,
            "requires": list(self.requires),
            "features": {feature.name: feature.enabled for feature in self.features},
            "sources": [
                {
                    "path": source.path,
                    "family": source.family,
                    "role": source.role,
                    "archs": list(source.archs),
                    "flags": list(source.flags),
                    "definitions": list(source.definitions),
                    "support": source.support,
                }
                for source in self.sources
            ],
            "local_memory": [dataclasses.asdict(allowance) for allowance in self.local_memory],
            "matrix": {family: list(archs) for family, archs in self.matrix.items()},
            "run_time": list(self.run_time),
            "variant": {
                space: {key: list(values) for key, values in keys.items()}
                for space, keys in self.variant.items()
            },
            "excluded": [dataclasses.asdict(source) for source in self.excluded],
            "tools": {tool.kind: f"{tool.name} {tool.version}" for tool in self.tools},
            "torch_headers": self.torch.version,
            "host_pythons": [python.version for python in self.host_pythons],
        }


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _load(kind: Any, value: Any, where: str) -> Any:
    """`value` of a JSON file as the annotated type `kind`. Raises ValueError naming the place."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object")
        names = {field.name for field in dataclasses.fields(kind)}
        if value.keys() != names:
            raise ValueError(f"{where}: keys missing or unknown: {', '.join(sorted(value.keys() ^ names))}")
        hints = _hints(kind)
        return kind(**{name: _load(hints[name], value[name], f"{where}.{name}") for name in sorted(names)})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where}: expected a list")
        return tuple(_load(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object")
        return {key: _load(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where}: {value!r} is none of {', '.join(map(repr, arguments))}")
        return value
    if origin is types.UnionType:
        if value is None:
            return None
        return _load(next(a for a in arguments if a is not types.NoneType), value, where)
    if type(value) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, found {value!r}")
    return value


def _table(rows: Iterable[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Rows in aligned columns; the last column is as long as it likes."""
    kept = list(rows)
    if not kept:
        return []
    widths = [max(len(row[i]) for row in kept) for i in range(len(kept[0]) - 1)]
    return [
        (
            indent
            + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        ).rstrip()
        for row in kept
    ]


def render(plan: Plan) -> str:
    """The plan as text for a person."""
    lines = [f"{plan.profile}: {plan.summary}", f"  {plan.wheel_name}", ""]
    lines += _table(
        [
            ("backend", f"{plan.backend}, {', '.join(plan.archs)}"),
            ("glibc", f"{plan.glibc} ({plan.platform_tag})"),
            ("size budget", str(Size(plan.size_budget))),
            ("requires", ", ".join(plan.requires)),
            ("C++ standard", str(plan.cxx_standard)),
            ("jobs", plan.jobs.arithmetic),
        ]
    )
    lines += ["", "Settings"]
    for line, setting in zip(
        _table((s.name, s.value, s.origin) for s in plan.settings), plan.settings, strict=True
    ):
        lines += [line, *(f"    not used: {lost}" for lost in setting.overridden)]
    lines += ["", "Features"]
    rows = [(f.name, "on" if f.enabled else "off", f.origin) for f in plan.features]
    for line, feature in zip(_table(rows), plan.features, strict=True):
        lines += [line, *(f"    not used: {lost}" for lost in feature.overridden)]
    lines += ["", "Toolchain"]
    tools = [
        (
            tool.kind,
            f"{tool.name} {tool.version}".strip(),
            f"{tool.path or 'package index'} (from {tool.origin})"
            + (f", headers {tool.headers_version}" if tool.headers_version else ""),
        )
        for tool in plan.tools
    ]
    tools.append(
        (
            "torch",
            f"headers {plan.torch.version}".strip(),
            f"{plan.torch.path or plan.torch.requirement} ({plan.torch.origin})",
        )
    )
    tools += [("python", python.version, python.path) for python in plan.host_pythons]
    lines += _table(tools)
    lines += ["", f"Sources in ({len(plan.sources)})"]
    lines += _table(
        (source.family, source.path, source.role, " ".join(source.flags) or "-", source.reason)
        for source in plan.sources
    )
    lines += ["", f"Sources out ({len(plan.excluded)})"]
    lines += _table((source.family, source.path, source.role, source.reason) for source in plan.excluded)
    if plan.notes:
        lines += ["", "Notes", *(f"  {note}" for note in plan.notes)]
    if plan.problems:
        lines += ["", "Cannot be built here", *(f"  {problem}" for problem in plan.problems)]
    return "\n".join(lines) + "\n"
