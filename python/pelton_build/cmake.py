"""The plan as CMake reads it: `python -m pelton_build cmake plan --profile NAME --build-dir FOLDER`.

CMake has one definition, the profile's name. For everything else that was chosen (features, jobs, torch's folder) the
backend leaves a request in the build folder, so that CMake, which runs this again by itself when a file that the plan
was made from changes, makes the same choices then. Without a request (CMake run by hand) the environment says them.

Written into the build folder, each whole or not at all:

- `pelton_plan.cmake`: assignments of `PELTON_PLAN_*`, see `variables`;
- `pelton_plan.json`: the plan itself;
- `pelton/_build_info.json` and `pelton/_built.py`, which are installed into the package;
- for a wheel `pelton.cdx.json`, its bill of materials.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import sbom
from .errors import BuildError, PlanError
from .glibc import needs_stubs
from .hipify import hipified_name, with_headers
from .plan import Plan, PlannedSource, Setting, render
from .planning import choose_profile, project_root, write_atomically
from .profile import load_profile, profile_names
from .project import load_project
from .resolve import resolve
from .settings import Choices, environment, read_choices
from .table import load_table
from .toolchain import probe_toolchain
from .version import SourceVersion, source_version

__all__ = [
    "Request",
    "build_info",
    "main",
    "plan_of",
    "quote",
    "read_request",
    "refuse_problems",
    "request_file",
    "source_digest",
    "variables",
    "write_request",
]

REQUEST = "pelton_request.json"

# Variables that lead to tools. An editable installation is rebuilt with the tools that it was built with.
TOOL_VARIABLES = ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "HIPCXX", "ROCM_PATH", "ROCM_HOME", "HIP_PATH")

# What goes into the digest of the source, beside the two files at the top. Every profile is in every wheel, which
# names the others (`profiles_of`).
_DIGESTED = ("build_profiles", "cmake", "kernels", "python/pelton", "python/pelton_build")
_DIGESTED_SUFFIXES = frozenset((".c", ".cmake", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".py", ".toml", ".txt"))


@dataclass(frozen=True)
class Request:
    """What the backend wants built in a folder."""

    state: str
    """`wheel`, `editable`, or `dev` when CMake is run by hand."""
    choices: Choices
    version: SourceVersion
    tools: Mapping[str, str] = field(default_factory=dict)
    """The variables of `TOOL_VARIABLES` that are set."""

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Raises ValueError when `text` is no request."""
        try:
            data = json.loads(text)
            choices = data["choices"]
            return cls(
                state=str(data["state"]),
                choices=Choices(
                    profile=_setting(choices["profile"]),
                    device=_setting(choices["device"]),
                    features={name: _known(_setting(entry)) for name, entry in choices["features"].items()},
                    jobs=_setting(choices["jobs"]),
                    torch_dir=_setting(choices["torch_dir"]),
                    label=_setting(choices["label"]),
                    notes=tuple(choices["notes"]),
                ),
                version=SourceVersion(**{**data["version"], "warnings": tuple(data["version"]["warnings"])}),
                tools=dict(data["tools"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a build request ({error!r})") from None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def _setting(data: Mapping[str, Any] | None) -> Setting | None:
    return (
        None
        if data is None
        else Setting(data["name"], data["value"], data["origin"], tuple(data["overridden"]))
    )


def _known(setting: Setting | None) -> Setting:
    if setting is None:
        raise TypeError("a feature without value")
    return setting


def request_file(build_dir: Path) -> Path:
    return build_dir / REQUEST


def write_request(build_dir: Path, request: Request) -> None:
    write_atomically(request_file(build_dir), request.to_json())


def read_request(build_dir: Path) -> Request | None:
    """The request in a build folder; None when there is none, or one that an interrupted or older build left."""
    try:
        return Request.from_json(request_file(build_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def plan_of(root: Path, request: Request) -> tuple[Plan, Request]:
    """The plan for a request on this machine, and the request with its profile named. Raises BuildError."""
    environ = {**environment(), **request.tools}
    table = load_table(root)
    toolchain = probe_toolchain(environ, request.choices)
    profile, choices = choose_profile(root, request.choices, table, toolchain, environ)
    if request.state == "editable":  # serves the Python that it is installed into, and no other
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        own = tuple(python for python in toolchain.pythons if python.suffix == suffix)
        toolchain = dataclasses.replace(toolchain, pythons=own)
    plan = resolve(profile, choices, table, toolchain, request.version.version)
    return plan, dataclasses.replace(request, choices=choices)


def request_by_hand(root: Path, profile: str) -> Request:
    """The request of someone who runs CMake directly: the definition, then the environment. Raises BuildError."""
    environ = environment()
    choices = read_choices({"profile": profile} if profile else None, environ, load_table(root), option="-D")
    return Request("dev", choices, source_version(root, environ, load_project(root)))


def quote(value: str | Iterable[str]) -> str:
    """A CMake argument that stands for `value`, whatever characters are in it; several values make a list.

    Raises PlanError for a list that nothing can quote: CMake does not split one inside of square brackets.
    """
    if isinstance(value, str):
        text = value
    else:
        items = list(value)
        for item in items:
            if ("[" in item or "]" in item) and (";" in item or (len(items) > 1 and not _balanced(item))):
                raise PlanError(
                    f"{item!r} cannot be handed to CMake because of its square brackets; rename it"
                )
        text = ";".join(item.replace(";", r"\;") for item in items)
    mark = "="
    while f"]{mark}]" in f"{text}]":
        mark += "="
    start = "\n" if text.startswith("\n") else ""  # CMake drops one line break behind the opening bracket
    return f"[{mark}[{start}{text}]{mark}]"


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def variables(
    plan: Plan, request: Request, root: Path, build_dir: Path, depends: Sequence[Path]
) -> dict[str, str]:
    """The variables that `cmake/*.cmake` read, by name without `PELTON_PLAN_`, each as a quoted CMake argument.

    STATE: as in the request.
    PACKAGE, LIBRARY, KERNELS, CXX_STANDARD, CXX_COMPILER, MACHINE, TORCH_FLOOR: as in the plan.
    LANGUAGES: CMake's names of those that the plan needs. CUDA_COMPILER, CUDA_RUNTIME: the program and the static
        library of its toolkit; empty without CUDA.
    HIP_COMPILER, HIP_ROOT, HIP_DEVICE_LIBS: the program, its ROCm and the folder of the device libraries; empty without
        ROCm. HIP_ARCHS: all archs of the plan then.
    HIPIFY_NAMES, HIPIFY_OUTPUTS: the HIP sources and the headers that they include, below the project, and what hipify
        makes of them, below the folder of its outputs. TORCH: the folder of the torch package, whose hipify it is.
    GLIBC_FLOOR: glibc to link for; empty to link as usual.
    TORCH_INCLUDE, PYBIND11_INCLUDE: folders of headers.
    HIDDEN_FOLDERS: `folder=name` pairs that are replaced in binaries.
    JOBS, GPU_JOBS: sizes of the job pools.
    GROUPS: indices; GROUP_<i>_ROLE, _LANGUAGE, _SOURCES, _NAMES, _ARCHS, _FLAGS, _DEFINITIONS: sources that are
        compiled alike, with their names in the plan; the archs as CMake names them, for GPU languages. HIP's sources
        are outputs of hipify.
    HOSTS: indices; HOST_<i>_SOABI, _SUFFIX, _INCLUDE; HOST_SOURCES, HOST_DEFINITIONS: the host extension.
    BUILD_INFO, MARKER: files to install into the package. SBOM: the bill of materials of a wheel. DEPENDS: what the plan was made from. TEXT: for the log.
    VARIABLES: all names.
    """
    cxx, cuda, rocm = plan.tool("cxx"), plan.tool("cuda"), plan.tool("rocm")
    hipified = with_headers(root, hip_sources(plan))
    host = [source for source in plan.sources if source.role == "host"]
    pythons = plan.host_pythons if host else ()
    pybind11 = _pybind11_include() if pythons else ""
    hidden = [f"{plan.torch.path}=torch"] if plan.torch.path else []
    hidden += [f"{pybind11}=pybind11"] if pybind11 else []
    hidden += [f"{cuda.root}=cuda"] if cuda and cuda.root else []
    hidden += [f"{rocm.root}=rocm"] if rocm and rocm.root else []
    hidden += [f"{python.include}=python{python.version}" for python in pythons]
    package = build_dir / plan.package
    found: dict[str, str | Iterable[str]] = {
        "STATE": request.state,
        "PACKAGE": plan.package,
        "KERNELS": plan.kernels,
        "LIBRARY": plan.library,
        "CXX_STANDARD": str(plan.cxx_standard),
        "CXX_COMPILER": cxx.path if cxx else "",
        "LANGUAGES": sorted({"CXX", *(source.language for source in plan.sources)}, reverse=True),
        "CUDA_COMPILER": cuda.path if cuda else "",
        "CUDA_RUNTIME": cuda.runtime if cuda else "",
        "HIP_COMPILER": rocm.path if rocm else "",
        "HIP_ROOT": rocm.root if rocm else "",
        "HIP_DEVICE_LIBS": rocm.device_libs if rocm else "",
        "HIP_ARCHS": plan.archs if rocm else [],
        "HIPIFY_NAMES": hipified,
        "HIPIFY_OUTPUTS": [hipified_name(name) for name in hipified],
        "TORCH": plan.torch.path,
        "MACHINE": plan.machine,
        "TORCH_FLOOR": plan.torch_floor,
        "GLIBC_FLOOR": plan.glibc if links_for_floor(plan, request) else "",
        "TORCH_INCLUDE": f"{plan.torch.path}/include",
        "PYBIND11_INCLUDE": pybind11,
        "HIDDEN_FOLDERS": hidden,
        "JOBS": str(plan.jobs.count),
        "GPU_JOBS": str(plan.jobs.gpu_count),
        "BUILD_INFO": str(package / "_build_info.json"),
        "MARKER": str(package / "_built.py"),
        "SBOM": str(_sbom_file(build_dir, plan)) if request.state == "wheel" else "",
        "DEPENDS": [str(path) for path in depends],
        "TEXT": render(plan),
        "HOST_SOURCES": [str(root / plan.kernels / source.path) for source in host],
        "HOST_DEFINITIONS": sorted({definition for source in host for definition in source.definitions}),
        "HOSTS": [str(index) for index in range(len(pythons))],
    }
    for index, python in enumerate(pythons):
        found[f"HOST_{index}_SOABI"] = python.suffix.strip(".").removesuffix(".so")
        found[f"HOST_{index}_SUFFIX"] = python.suffix
        found[f"HOST_{index}_INCLUDE"] = python.include
    groups = _groups(source for source in plan.sources if source.role != "host")
    found["GROUPS"] = [str(index) for index in range(len(groups))]
    for index, group in enumerate(groups):
        found[f"GROUP_{index}_ROLE"] = group[0].role
        found[f"GROUP_{index}_LANGUAGE"] = group[0].language
        found[f"GROUP_{index}_SOURCES"] = [
            hipified_name(f"{plan.kernels}/{source.path}")
            if source.language == "HIP"
            else str(root / plan.kernels / source.path)
            for source in group
        ]
        found[f"GROUP_{index}_NAMES"] = [source.path for source in group]
        found[f"GROUP_{index}_ARCHS"] = [
            _cmake_arch(arch) for arch in group[0].archs if group[0].role == "gpu"
        ]
        found[f"GROUP_{index}_FLAGS"] = group[0].flags
        found[f"GROUP_{index}_DEFINITIONS"] = group[0].definitions
    found["VARIABLES"] = sorted(found)
    return {name: quote(value) for name, value in found.items()}


def hip_sources(plan: Plan) -> list[str]:
    """The sources that pass through hipify, below the project."""
    return [f"{plan.kernels}/{source.path}" for source in plan.sources if source.language == "HIP"]


def links_for_floor(plan: Plan, request: Request) -> bool:
    """Whether the build links for an older glibc than this machine's, and libstdc++ into the binaries with it."""
    return request.state == "wheel" and needs_stubs(plan.glibc)


def _groups(sources: Iterable[PlannedSource]) -> list[list[PlannedSource]]:
    """Sources that are compiled alike, in the plan's order."""
    groups: dict[tuple[object, ...], list[PlannedSource]] = {}
    for source in sources:
        key = (source.role, source.language, source.archs, source.flags, source.definitions)
        groups.setdefault(key, []).append(source)
    return list(groups.values())


def _cmake_arch(arch: str) -> str:
    """`90a-real` for sm_90a, `80-virtual` for compute_80; AMD's names are CMake's own."""
    kind, _, number = arch.partition("_")
    return {"sm": f"{number}-real", "compute": f"{number}-virtual"}.get(kind, arch)


def _pybind11_include() -> str:
    spec = importlib.util.find_spec("pybind11")
    folder = Path(spec.origin).parent / "include" if spec is not None and spec.origin else None
    if folder is None or not (folder / "pybind11" / "pybind11.h").is_file():
        raise PlanError(
            "pybind11 is not installed in the build environment; install it (pip install pybind11) or build with "
            "isolation"
        )
    return str(folder)


def source_digest(root: Path) -> str:
    """SHA-256 over names and contents of everything in the source that can change a wheel."""
    files = [root / "CMakeLists.txt", root / "pyproject.toml"]
    for folder in _DIGESTED:
        files += (
            path
            for path in (root / folder).rglob("*")
            if path.suffix in _DIGESTED_SUFFIXES and path.is_file()
        )
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        total.update(f"{path.relative_to(root).as_posix()}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{total.hexdigest()}"


def build_info(plan: Plan, request: Request, root: Path, cmake_version: str) -> dict[str, Any]:
    """What the wheel says of itself; nothing in it depends on where or by whom it was built.

    An editable installation changes after this was written, so it has no digest of its source.
    """
    toolchain = {tool.kind: f"{tool.name} {tool.version}" for tool in plan.tools}
    toolchain |= {"cmake": cmake_version, "torch-headers": plan.torch.version}
    if plan.host_pythons:
        toolchain["pybind11"] = _distribution_version("pybind11")
    return {
        "format": 1,
        "profile": plan.profile,
        "summary": plan.summary,
        "version": plan.wheel_version,
        "label": plan.label,
        "commit": request.version.commit,
        "state": request.state,
        "backend": plan.backend,
        "archs": list(plan.archs),
        "glibc": plan.glibc,
        "torch_floor": plan.torch_floor,
        "minimum_driver": plan.minimum_driver,
        "minimum_driver_ptx": plan.minimum_driver_ptx,
        "size_budget": plan.size_budget,
        "static_libstdcxx": links_for_floor(plan, request),
        "features": {feature.name: feature.enabled for feature in plan.features},
        "changed_features": [feature.name for feature in plan.features if feature.changed],
        "toolchain": toolchain,
        "host_pythons": [python.version for python in plan.host_pythons],
        "source_digest": source_digest(root) if request.state == "wheel" else "",
        "profiles": profiles_of(root),
        "plan": plan.public(),
    }


def profiles_of(root: Path) -> list[dict[str, Any]]:
    """All profiles that there are wheels for, so that a wheel on the wrong machine can name the right one."""
    made = []
    for name in profile_names(root):
        with contextlib.suppress(
            BuildError
        ):  # a broken profile is no profile yet, and no reason to stop another's build
            profile = load_profile(root, name)
            target, bounds = profile.target, profile.variant.get("nvidia", {}).get("cuda_version_lower_bound")
            made.append(
                {
                    "profile": name,
                    "summary": profile.summary,
                    "backend": target.backend,
                    "archs": list(target.arch),
                    "minimum_driver": bounds[0] if bounds else "",
                }
            )
    return made


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


_MARKER = '''"""Written by the build. An editable installation rebuilds when this module is imported."""
'''


def write_plan(root: Path, profile: str, build_dir: Path, cmake_version: str) -> Plan:
    """Make the plan for `build_dir` and write the files above. Raises BuildError when it cannot be built."""
    if ";" in str(root) or "\n" in str(root):
        raise PlanError(f"CMake cannot work in a folder with ';' in its path: {root}; move the source")
    request = read_request(build_dir)
    if request is None or (
        profile and (request.choices.profile is None or request.choices.profile.value != profile)
    ):
        request = request_by_hand(root, profile)
    plan = refuse_problems(plan_of(root, request)[0])
    if plan.build_requires:
        wanted = " ".join(f"'{requirement}'" for requirement in plan.build_requires)
        raise PlanError(
            f"this machine lacks what the build environment has to have: {', '.join(plan.build_requires)}; install it "
            f"there (pip install {wanted}), or build with isolation"
        )
    if plan.backend == "cuda" and "," in tempfile.gettempdir():
        raise PlanError(
            f"nvcc cannot work with ',' in the path of temporary files: {tempfile.gettempdir()}; set TMPDIR to another "
            "folder"
        )
    info = build_info(plan, request, root, cmake_version)
    write_atomically(
        build_dir / plan.package / "_build_info.json", json.dumps(info, indent=2, sort_keys=True) + "\n"
    )
    write_atomically(build_dir / plan.package / "_built.py", _MARKER)
    if request.state == "wheel":
        text = sbom.render(info, plan.package, load_project(root).license)
        write_atomically(_sbom_file(build_dir, plan), text)
    write_atomically(build_dir / "pelton_plan.json", plan.to_json())
    made = variables(plan, request, root, build_dir, _depends(root, plan, build_dir))
    lines = [f"set(PELTON_PLAN_{name} {value})" for name, value in made.items()]
    write_atomically(build_dir / "pelton_plan.cmake", "\n".join(["# Written by pelton_build.", *lines, ""]))
    return plan


def _sbom_file(build_dir: Path, plan: Plan) -> Path:
    return build_dir / sbom.FILE.format(package=plan.package)


def refuse_problems(plan: Plan) -> Plan:
    """The plan. Raises PlanError when it cannot be built on this machine."""
    if plan.problems:
        raise PlanError(f"profile {plan.profile!r} cannot be built here: " + "; ".join(plan.problems))
    return plan


def _depends(root: Path, plan: Plan, build_dir: Path) -> list[Path]:
    """What the plan was made from: the files that were read, and this tool itself as far as it was used."""
    modules = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == __package__]
    own = {Path(module.__file__) for module in modules if module.__file__}
    files = [
        root / plan.profile_file,
        root / plan.kernels / "kernels.toml",
        root / "pyproject.toml",
        *sorted(own),
        # They may come to include a header that has not been hipified.
        *(root / name for name in with_headers(root, hip_sources(plan))),
    ]
    return [*files, *([request_file(build_dir)] if request_file(build_dir).is_file() else [])]


def main(arguments: Sequence[str]) -> int:
    """The subcommand `cmake`."""
    parser = argparse.ArgumentParser(prog="cmake", description="Write the plan as a CMake file.")
    parser.add_argument("action", choices=["plan"])
    parser.add_argument(
        "--profile", default="", help="the profile's name; empty: the request, else detection"
    )
    parser.add_argument("--build-dir", type=Path, required=True, help="CMake's build folder")
    parser.add_argument("--cmake-version", default="", help="for the build info")
    options = parser.parse_args(arguments)
    try:
        write_plan(project_root(), options.profile, options.build_dir.absolute(), options.cmake_version)
    except OSError as error:
        raise BuildError(f"{error.filename or options.build_dir}: {error.strerror or error}") from None
    return 0
