"""Profile, choices, kernel table and toolchain in, plan out. Pure: equal inputs make equal plans."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .arch import ArchError, check_cuda_archs_for
from .errors import ChoiceError, PlanError, ProfileError, ToolchainError
from .features import feature_label, resolve_features
from .plan import (
    Backend,
    ExcludedSource,
    Feature,
    Jobs,
    Language,
    Plan,
    PlannedSource,
    Role,
    Setting,
    Tool,
    TorchHeaders,
)
from .profile import Profile
from .settings import DEVICE, PROFILE, PROFILE_FILE, Choices
from .table import FOLDER, Family, KernelTable, Source
from .toolchain import Toolchain
from .values import Size, Version, VersionRange, check_label, join_label

__all__ = ["JOB_MEMORY", "has_arch", "resolve"]

JOB_MEMORY: Mapping[Role, Size] = {
    "op": Size.parse("384 MiB"),
    "cpu": Size.parse("512 MiB"),
    "host": Size.parse("512 MiB"),
    "gpu": Size.parse("1 GiB"),
}
"""Memory that one compiler process of a role may take: twice to three times what gcc 12 and nvcc 13 were seen to
take."""

_DEBIAN_ROCM = "clang-19 lld-19 clang-tools-19 libclang-rt-19-dev llvm-19 rocm-device-libs libamdhip64-dev"
_CUDA_PACKAGES = "cuda-toolkit[nvcc,cudart,cccl]=={0}", "nvidia-nvvm=={1}.*", "nvidia-cuda-crt=={1}.*"


def resolve(
    profile: Profile, choices: Choices, table: KernelTable, toolchain: Toolchain, version: str = "0.0.0"
) -> Plan:
    """The plan for building `profile` here.

    What this machine lacks but may yet get is in `Plan.problems`; what is wrong is an error: ChoiceError for
    contradicting switches, ProfileError and PlanError for what cannot be built anywhere, ToolchainError for
    tools that are unusable or of the wrong version.
    """
    backend = profile.target.backend
    settings = list(_settings(profile, choices))
    features = resolve_features(profile, choices.features, table)
    problems: list[str] = []
    notes = [note.replace(PROFILE_FILE, profile.file) for note in choices.notes]

    _check_oldest(profile, table)
    tools, build_requires = _tools(profile, toolchain, problems)
    included, excluded = _sources(profile, table, features, tools)
    if not any(source.role in ("cpu", "gpu") for source in included):
        problems.insert(
            0, f"kernels.toml has no source for backend {backend} yet, so there is nothing to build"
        )
    else:
        problems[:0] = _holes(table, features, backend)
    torch = _torch(table, toolchain, notes)
    if torch.requirement:
        build_requires = (*build_requires, torch.requirement)
    if not toolchain.pythons and any(source.role == "host" for source in included):
        notes.append(
            "no CPython with headers found, so the wheel has no host extension and the Python twin does its "
            "work; install python3-dev to have it"
        )
    notes += toolchain.pythons_out
    notes += _passed_over(toolchain, tools)
    if (toolchain.system, toolchain.machine) != (profile.target.system, profile.target.machine):
        problems.append(
            f"this machine is {toolchain.system} on {toolchain.machine}, and the profile is for "
            f"{profile.target.system} on {profile.target.machine}; build it on such a machine"
        )

    jobs = _jobs(choices.jobs, toolchain, included)
    settings.append(Setting("jobs", str(jobs.count), choices.jobs.origin if choices.jobs else "calculated"))
    settings.append(Setting("torch-dir", torch.path or torch.requirement, torch.origin))
    label = _label(profile, tools) + feature_label(features)
    if choices.label is not None:
        settings.append(choices.label)
        label = _without_label(label, choices.label, features)
    glibc = profile.wheel.glibc
    driver, ptx_driver = _drivers(profile, tools)
    return Plan(
        profile=profile.name,
        summary=profile.summary,
        profile_file=profile.file,
        backend=backend,
        archs=profile.target.arch,
        system=profile.target.system,
        machine=profile.target.machine,
        package=table.library.package,
        library=table.library.name,
        kernels=FOLDER,
        version=version,
        label=label,
        wheel_version=join_label(version, label),
        platform_tag=f"manylinux_{glibc.parts[0]}_{glibc.parts[1]}_{profile.target.machine}",
        glibc=str(glibc),
        size_budget=profile.wheel.size_budget.bytes,
        requires=(f"torch>={table.library.torch}", *profile.wheel.requires),
        torch_floor=str(table.library.torch),
        minimum_driver=driver,
        minimum_driver_ptx=ptx_driver,
        cxx_standard=table.library.cxx_standard,
        features=features,
        settings=tuple(settings),
        sources=tuple(included),
        excluded=tuple(excluded),
        tools=tuple(tools),
        torch=torch,
        host_pythons=toolchain.pythons if any(source.role == "host" for source in included) else (),
        build_requires=build_requires,
        jobs=jobs,
        variant=profile.variant,
        local_memory=tuple(
            allowance
            for family in table.families
            for allowance in family.local_memory
            if not allowance.archs or set(allowance.archs) & set(profile.target.arch)
            if any(source.family == family.name and source.role == "gpu" for source in included)
        ),
        matrix={
            family.name: archs
            for family in table.families
            if (archs := tuple(a for a in profile.target.arch if a.partition(":")[0] in family.matrix))
            if any(source.family == family.name and source.role == "gpu" for source in included)
        },
        run_time=tuple(
            sorted(
                {
                    name
                    for family in table.families
                    for arch in profile.target.arch
                    for name in family.run_time.get(arch, ())
                    if any(source.family == family.name and source.role == "cpu" for source in included)
                }
            )
        ),
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _check_oldest(profile: Profile, table: KernelTable) -> None:
    """Raises ProfileError for an arch that the kernels are not written for."""
    oldest = table.library.oldest.get(profile.target.backend)
    for arch in profile.target.arch if oldest else ():
        if _number(arch) < _number(str(oldest)):
            raise ProfileError(
                f"{profile.file}: target.arch: {arch!r} is older than {oldest!r}, which the kernels need "
                "(kernels.toml, library.oldest); name a newer one"
            )


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _settings(profile: Profile, choices: Choices) -> tuple[Setting, ...]:
    """The profile's provenance. Raises ChoiceError when PELTON_TARGET_DEVICE contradicts PELTON_PROFILE."""
    chosen = choices.profile or Setting("profile", profile.name, "named directly")
    device, backend = choices.device, profile.target.backend
    lost = chosen.overridden
    if device is not None and device.value != backend:
        if chosen.origin == PROFILE:
            raise ChoiceError(
                f"{PROFILE}={chosen.value} (backend {backend}) and {DEVICE}={device.value} contradict each "
                "other; unset one of them"
            )
        lost = (*lost, f"{device.value} ({device.origin})")
    return (
        Setting("profile", profile.name, chosen.origin, lost),
        Setting("target-device", backend, f"{profile.file}, key target.backend"),
    )


def _tools(profile: Profile, toolchain: Toolchain, problems: list[str]) -> tuple[list[Tool], tuple[str, ...]]:
    """The compilers taken, and what to install for those from the package index."""
    needs, tools, requires = profile.toolchain, list[Tool](), tuple[str, ...]()
    gpu: Tool | None = None
    if profile.target.backend == "cuda":
        gpu, requires = _cuda(profile, toolchain, problems)
    elif profile.target.backend == "rocm":
        gpu = _checked("rocm", toolchain, needs.rocm, profile)
        if gpu is None:
            problems.append(
                f"no ROCm compiler found (looked at {_looked(toolchain.rocm.looked)}); install ROCm "
                f"{needs.rocm or ''} and set ROCM_PATH to it, or on Debian and Ubuntu the packages {_DEBIAN_ROCM}"
            )
        elif gpu.archs:
            for arch in profile.target.arch:
                if arch.partition(":")[0] not in gpu.archs:
                    raise ToolchainError(
                        f"{profile.file}: target.arch: {arch!r} is not known to {gpu.name} of ROCm {gpu.version} "
                        f"({gpu.path}, from {gpu.origin}); set ROCM_PATH or HIPCXX to a newer one"
                    )
    host = _host_compiler(profile, toolchain, gpu, problems)
    tools += [tool for tool in (host, gpu) if tool is not None]
    return tools, requires


def _passed_over(toolchain: Toolchain, tools: list[Tool]) -> list[str]:
    """Compilers that come before the ones taken and do not work."""
    probes = {"cxx": toolchain.cxx, "cuda": toolchain.cuda, "rocm": toolchain.rocm}
    return [
        f"{place}; passed over for {tool.path or 'that of the package index'}"
        for tool in tools
        for place in probes[tool.kind].looked
        if ", which " in place
    ]


def _looked(places: tuple[str, ...]) -> str:
    return ", ".join(places) or "nothing"


def _checked(kind: str, toolchain: Toolchain, allowed: VersionRange, profile: Profile) -> Tool | None:
    """The toolkit found, of an allowed version; None when there is none. Raises ToolchainError."""
    probe, variable = (toolchain.cuda, "CUDA_HOME") if kind == "cuda" else (toolchain.rocm, "ROCM_PATH")
    if probe.problem:
        raise ToolchainError(probe.problem)
    tool = probe.tool
    if tool is None:
        return None
    seen = [f"{other.name} {other.version} ({other.path}, from {other.origin})" for other in probe.others]
    others = f"; also seen: {', '.join(seen)}" if seen else ""
    if tool.origin in ("CUDACXX", "HIPCXX"):
        variable = tool.origin
    headers = f"headers {tool.headers_version}" if tool.headers_version else "no headers beside it"
    where = f"{tool.name} {tool.version or 'of unknown version'} ({tool.path}, from {tool.origin}, {headers})"
    if not tool.version or Version.parse(tool.version) not in allowed:
        raise ToolchainError(
            f"{profile.file}: toolchain.{kind}: found {where}, needed {allowed}{others}; set {variable} to a "
            "toolkit that fits"
        )
    if kind == "cuda" and tool.headers_version and not tool.runtime:
        raise ToolchainError(
            f"{where} has no libcudart_static.a in {tool.root}; install the runtime's development files, or set "
            f"{variable} to a whole toolkit{others}"
        )
    if not tool.headers_version:
        raise ToolchainError(
            f"{where} is not a whole toolkit; install its headers, or set {variable} to one that is{others}"
        )
    if not _same_release(tool.version, tool.headers_version):
        raise ToolchainError(
            f"{where} and the headers in {tool.root} ({tool.headers_version}) are of two versions; "
            f"install one toolkit whole, or set {variable} to one that is{others}"
        )
    return tool


def _same_release(a: str, b: str) -> bool:
    return Version.parse(a).key[:2] == Version.parse(b).key[:2]


def _cuda(profile: Profile, toolchain: Toolchain, problems: list[str]) -> tuple[Tool | None, tuple[str, ...]]:
    needs, requires = profile.toolchain, tuple[str, ...]()
    tool = _checked("cuda", toolchain, needs.cuda, profile)
    if tool is None and needs.cuda_package is not None:
        release = ".".join(map(str, needs.cuda_package.parts[:2]))
        tool = Tool(
            "cuda", "nvcc", "", str(needs.cuda_package), f"{profile.file}, key toolchain.cuda-package"
        )
        requires = tuple(text.format(needs.cuda_package, release) for text in _CUDA_PACKAGES)
    if tool is None:
        problems.append(
            f"no CUDA compiler found (looked at {_looked(toolchain.cuda.looked)}); install CUDA "
            f"{needs.cuda}, or set toolchain.cuda-package in the profile to take the compiler from the "
            "package index"
        )
    else:
        try:
            check_cuda_archs_for(profile.target.arch, needs.cuda, Version.parse(tool.version))
        except ArchError as error:
            raise ProfileError(f"{profile.file}: target.arch: {error}") from None
    return tool, requires


def _drivers(profile: Profile, tools: list[Tool]) -> tuple[str, str]:
    """CUDA versions that the user's driver has to support, without and with compiling PTX.

    A runtime works with every driver of its major version; PTX is understood by drivers of its own version on.
    """
    tool = next((tool for tool in tools if tool.kind == "cuda"), None)
    if tool is None:
        return "", ""
    major, minor = Version.parse(tool.version).key[:2]
    ptx = any(arch.startswith("compute_") for arch in profile.target.arch)
    return f"{major}.0", f"{major}.{minor}" if ptx else ""


def _host_compiler(
    profile: Profile, toolchain: Toolchain, gpu: Tool | None, problems: list[str]
) -> Tool | None:
    probe, needs = toolchain.cxx, profile.toolchain
    if probe.problem:
        raise ToolchainError(probe.problem)
    tool = probe.tool
    if tool is None:
        problems.append(f"no C++ compiler found (looked at {_looked(probe.looked)}); install g++ or set CXX")
        return None
    allowed = {"gcc": needs.gcc, "clang": needs.clang}.get(tool.name, VersionRange())
    where = f"{tool.name} {tool.version or 'of unknown version'} ({tool.path}, from {tool.origin})"
    if not tool.version or Version.parse(tool.version) not in allowed:
        raise ToolchainError(
            f"{profile.file}: toolchain.{tool.name}: found {where}, needed {allowed}; install it and set "
            "CXX to it"
        )
    limit = {"gcc": gpu.host_limit, "clang": gpu.clang_limit}.get(tool.name, "") if gpu is not None else ""
    if gpu is not None and limit and Version.parse(tool.version).parts[0] > int(limit):
        package, program = ("g++", "g++") if tool.name == "gcc" else ("clang", "clang++")
        raise ToolchainError(
            f"{where} is too new for {gpu.name} {gpu.version}, which accepts {tool.name} up to {limit}; install "
            f"{package}-{limit} and set CXX={program}-{limit}"
        )
    return tool


def _torch(table: KernelTable, toolchain: Toolchain, notes: list[str]) -> TorchHeaders:
    """The first torch whose headers do, else a build requirement. Raises ToolchainError for the one the
    user named."""
    if toolchain.torch_problem:
        raise ToolchainError(toolchain.torch_problem)
    allowed = table.library.torch_headers
    for headers in toolchain.torch:
        if Version.parse(headers.version) in allowed:
            return headers
        where = f"torch {headers.version} ({headers.path}, from {headers.origin})"
        reason = f"{where}: headers of torch {allowed} are needed"
        if headers.origin == "PELTON_TORCH_DIR":
            raise ToolchainError(reason)
        notes.append(f"{reason}, so it is not taken")
    return TorchHeaders("", "", "build requirement, no such torch found here", table.library.torch_package)


def _sources(
    profile: Profile, table: KernelTable, features: tuple[Feature, ...], tools: list[Tool]
) -> tuple[list[PlannedSource], list[ExcludedSource]]:
    """Every source of the table, in or out, in the table's order."""
    backend, on = profile.target.backend, {feature.name for feature in features if feature.enabled}
    why_out = {family.name: _family_out(family, backend, on) for family in table.families}
    wanted = any(not reason for name, reason in why_out.items() if _by_name(table, name).device)
    included: list[PlannedSource] = []
    excluded: list[ExcludedSource] = []
    for family in table.families:
        reason = why_out[family.name]
        if family.supports and not wanted:
            reason = f"supports other families, and none is in for backend {backend}"
        decided = [
            (role, source, reason or _source_out(source, role, profile, on, tools))
            for role, source in _of(family, backend)
        ]
        only = {arch for _, source, why in decided if not why for arch in source.archs}
        has = sorted({has_arch(arch, table) for arch in only.intersection(profile.target.arch)})
        for role, source, why in decided:
            if why:
                excluded.append(ExcludedSource(source.path, family.name, role, why))
            else:
                included.append(_planned(source, role, family, profile, table, has, on))
        for other, sources in family.device.items():
            if other != backend:
                other_role: Role = "cpu" if other == "cpu" else "gpu"
                seen = {source.path for source in included} | {source.path for source in excluded}
                excluded += [
                    ExcludedSource(
                        s.path,
                        family.name,
                        other_role,
                        f"for backend {other}, and this plan is for {backend}",
                    )
                    for s in sources
                    if s.path not in seen
                ]
    for path in _duplicates([source.path for source in included]):
        raise PlanError(
            f"kernels.toml: source {path!r} is planned twice for profile {profile.name!r}; list it once"
        )
    return included, excluded


def _holes(table: KernelTable, features: tuple[Feature, ...], backend: Backend) -> list[str]:
    """The families that a wheel of this backend would lack although nobody said that it may."""
    on = {feature.name for feature in features if feature.enabled}
    names = [
        family.name
        for family in table.families
        if not (family.supports or backend in family.device or backend in family.instead)
        and not _off(family.features, on)
    ]
    if not names:
        return []
    return [
        f"kernels.toml: no {backend} source for {', '.join(names)}; add it to [family.{names[0]}], or say there "
        f"with instead.{backend} what does the work"
    ]


def _duplicates(paths: list[str]) -> list[str]:
    return sorted({path for path in paths if paths.count(path) > 1})


def _by_name(table: KernelTable, name: str) -> Family:
    return next(family for family in table.families if family.name == name)


def _of(family: Family, backend: Backend) -> list[tuple[Role, Source]]:
    device: Role = "cpu" if backend == "cpu" else "gpu"
    return [
        *(("op", source) for source in family.op),
        *((device, source) for source in family.device.get(backend, ())),
        *(("host", source) for source in family.host),
    ]


def _family_out(family: Family, backend: Backend, on: set[str]) -> str:
    if reason := _off(family.features, on):
        return reason
    if not family.supports and backend not in family.device:
        instead = family.instead.get(backend)
        return f"not needed for {backend}: {instead}" if instead else f"no {backend} source in kernels.toml"
    return ""


def _off(features: tuple[str, ...], on: set[str]) -> str:
    """Why none of the features that could bring something does; empty when one does, or none is needed."""
    if not features or on.intersection(features):
        return ""
    return (
        f"feature {features[0]} is off"
        if len(features) == 1
        else f"features {' and '.join(features)} are off"
    )


def has_arch(arch: str, table: KernelTable) -> str:
    """What a family's sources see when a file for `arch` alone is in: `PELTON_HAS_SM90` for sm_90 and sm_90a,
    which are one silicon; `PELTON_HAS_GFX90A` for gfx90a."""
    word = re.sub(r"^((?:SM|COMPUTE)\d+)[AF]$", r"\1", arch.partition(":")[0].upper().replace("_", ""))
    return f"{table.library.name.upper()}_HAS_{word}=1"


def _source_out(source: Source, role: Role, profile: Profile, on: set[str], tools: list[Tool]) -> str:
    if reason := _off(source.features, on):
        return reason
    if source.backends and profile.target.backend not in source.backends:
        return f"for backend {' and '.join(source.backends)}, and this plan is for {profile.target.backend}"
    if source.archs and not set(source.archs) & set(profile.target.arch):
        return f"for {', '.join(source.archs)} alone, and target.arch is {', '.join(profile.target.arch)}"
    kind = profile.target.backend if role == "gpu" else "cxx"
    tool = next((tool for tool in tools if tool.kind == kind), None)
    if source.toolkit.clauses and tool is not None and Version.parse(tool.version) not in source.toolkit:
        return f"needs {tool.name} {source.toolkit}, found {tool.version}"
    return ""


def _planned(
    source: Source,
    role: Role,
    family: Family,
    profile: Profile,
    table: KernelTable,
    has: list[str],
    on: set[str],
) -> PlannedSource:
    library, archs, flags = table.library, tuple[str, ...](), tuple[str, ...]()
    definitions: tuple[str, ...] = (*family.definitions, *source.definitions)
    language: Language = "CXX"
    why = {
        "op": "operator",
        "host": "host extension",
        "cpu": "cpu code",
        "gpu": f"{profile.target.backend} code",
    }[role]
    if role in ("cpu", "gpu"):
        archs = tuple(a for a in profile.target.arch if not source.archs or a in source.archs)
        why += f" for {', '.join(archs)}"
    if role == "cpu":
        flags = (f"-march={archs[0]}",)
    elif role == "gpu":
        language = "CUDA" if profile.target.backend == "cuda" else "HIP"
    elif role == "op":
        definitions = (
            f"TORCH_TARGET_VERSION={torch_target(library.torch)}",
            *definitions,
        )
    if role in ("op", "gpu"):
        words = {"cpu": (), "cuda": ("GPU",), "rocm": ("GPU", "ROCM")}[profile.target.backend]
        definitions = (*definitions, *(f"{library.name.upper()}_{word}=1" for word in words), *has)
    if role in ("cpu", "gpu"):
        brings = [entry for name, entry in table.features.items() if name in on]
        definitions = (*definitions, *(d for entry in brings for d in entry.definitions))
    brought = ", ".join(name for name in dict.fromkeys((*family.features, *source.features)) if name in on)
    if brought:
        why += f", feature {brought}"
    return PlannedSource(
        source.path, family.name, role, language, archs, flags, definitions, why, family.supports
    )


def torch_target(version: Version) -> str:
    """The value of TORCH_TARGET_VERSION for a torch version: one byte each for major, minor and patch,
    from the top."""
    major, minor, patch, _ = version.key
    return f"0x{major:02x}{minor:02x}{patch:02x}{0:010x}ULL"


def _jobs(choice: Setting | None, toolchain: Toolchain, sources: list[PlannedSource]) -> Jobs:
    """As many jobs as there are cores and as fit into the memory. GPU compilers have a pool of their own, so
    that the many light jobs need not wait for their memory."""
    roles: set[Role] = {source.role for source in sources}
    light: Role = max(roles - {"gpu"}, key=lambda role: (JOB_MEMORY[role].bytes, role), default="op")
    count, text = _fitting(toolchain, light)
    gpu_count = count
    if "gpu" in roles:
        gpu_count, gpu_text = _fitting(toolchain, "gpu")
        text += f"; {gpu_text}"
    if choice is not None:
        count = gpu_count = int(choice.value)
        text = f"{count} ({choice.origin.rstrip('=')}); calculated: {text}"
        need = count * JOB_MEMORY["gpu" if "gpu" in roles else light].bytes
        if need > toolchain.memory:
            text += f"; {count} jobs may need {Size(need).human()}"
    return Jobs(count, text, toolchain.cores, toolchain.memory, JOB_MEMORY[light].bytes, gpu_count)


def _fitting(toolchain: Toolchain, role: Role) -> tuple[int, str]:
    per_job = JOB_MEMORY[role].bytes
    fits = toolchain.memory // per_job
    count = max(1, min(toolchain.cores, fits))
    return count, (
        f"min({toolchain.cores} cores ({toolchain.cores_origin}), {Size(toolchain.memory).human()} "
        f"({toolchain.memory_origin}) / {Size(per_job).human()} for each {role} source = {fits}) = {count}"
        + (", at least one" if fits < 1 else "")
    )


def _without_label(label: str, choice: Setting, features: tuple[Feature, ...]) -> str:
    """The label, or none where that was chosen. Raises ChoiceError when only the label would tell two wheels apart."""
    if choice.value == "on":
        return label
    changed = [
        f"{feature.name}={'on' if feature.enabled else 'off'}" for feature in features if feature.changed
    ]
    if changed:
        raise ChoiceError(
            f"{choice.origin}off: the features differ from the profile's ({', '.join(changed)}), and without a label "
            "nobody could tell this wheel from the profile's own; leave one of the two out"
        )
    return ""


def _label(profile: Profile, tools: list[Tool]) -> str:
    label = profile.wheel.label
    if "{" in label:
        tool = next((tool for tool in tools if tool.kind == "cuda"), None)
        found = Version.parse(tool.version) if tool is not None else profile.toolchain.cuda.lower
        if found is None:
            raise PlanError(
                f"{profile.file}: wheel.label: {label!r} needs the CUDA version, and none is known: no "
                "compiler found, and toolchain.cuda has no lower bound"
            )
        major, minor = found.key[:2]
        values = {"cuda_major": str(major), "cuda_major_minor": f"{major}{minor}"}
        label = re.sub(r"\{([a-z_]+)\}", lambda match: values[match[1]], label)
    return check_label(label)
