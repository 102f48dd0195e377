"""Every switch of the build, read in one place: the command line's `-C key=value` and the environment.

This is the only module that reads the environment. The command line wins over the environment, the
environment over the profile. Two sources of one strength that contradict each other are an error, and so
is a name that nobody reads. An empty variable counts as unset; blanks around a value do not count.

| command line | environment | meaning |
|---|---|---|
| `-C profile=NAME` | `PELTON_PROFILE` | the profile |
| | `PELTON_TARGET_DEVICE` = cpu, cuda or rocm | the backend that the profile is sought for |
| `-C feature.NAME=on` or `off` | the variable that the kernel table names | a feature |
| `-C jobs=N` | `MAX_JOBS` | compiler processes at once |
| `-C label=off` | | a wheel without version label, for a public registry |
| | `PELTON_TORCH_DIR` | the folder of a torch package to take the headers from |
| | `PELTON_VERSION` | the project's version |
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .arch import BACKENDS
from .errors import ChoiceError
from .plan import Setting
from .table import KernelTable
from .values import did_you_mean, nearest, parse_switch

__all__ = [
    "Choices",
    "ConfigSettings",
    "environment",
    "pass_through",
    "read_choices",
    "replace_environment",
    "scrubbed",
    "split_setting",
]

ConfigSettings = Mapping[str, "str | bool | Sequence[str]"]
"""What a PEP 517 front end hands over for `-C key=value`; a repeated key makes a list."""

PREFIX = "PELTON_"
PROFILE, DEVICE, TORCH_DIR, JOBS = "PELTON_PROFILE", "PELTON_TARGET_DEVICE", "PELTON_TORCH_DIR", "MAX_JOBS"
PROFILE_FILE = "<profile>"  # stands in a note for the file of the profile, which is not known yet
VERSION = "PELTON_VERSION"  # read by `version`

# What people look for among the settings, and the profile says.
_SAID_BY_PROFILE = (
    "archs",
    "backend",
    "cuda",
    "glibc",
    "rocm",
    "size-budget",
    "target",
    "toolchain",
    "wheel",
)
# Config settings of the backend that ours wraps: the first part of the dotted key.
_WRAPPED = (
    "build",
    "build-dir",
    "cmake",
    "editable",
    "experimental",
    "fail",
    "install",
    "logging",
    "messages",
    "minimum-version",
    "ninja",
    "sdist",
    "search",
    "strict-config",
    "wheel",
)

# Those of them that the backend fills in.
_FROM_PLAN = ("wheel.tags", "wheel.py-api")

# Variables that other build tools read for what the profile says here.
_ARCH_VARIABLES = {
    "TORCH_CUDA_ARCH_LIST": "cuda",
    "CUDAARCHS": "cuda",
    "CMAKE_CUDA_ARCHITECTURES": "cuda",
    "PYTORCH_ROCM_ARCH": "rocm",
    "HIP_ARCHITECTURES": "rocm",
    "AMDGPU_TARGETS": "rocm",
    "GPU_TARGETS": "rocm",
    "HCC_AMDGPU_TARGET": "rocm",
}
_FLAG_VARIABLES = (
    "CFLAGS",
    "CPPFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDAFLAGS",
    "HIPFLAGS",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "HIPCC_COMPILE_FLAGS_APPEND",
)
# Variables that CMake and the linker take for what the build says itself: how and where to install, what to link.
_BEHIND_VARIABLES = (
    "CMAKE_BUILD_TYPE",
    "CMAKE_CONFIGURATION_TYPES",
    "CMAKE_CONFIG_TYPE",
    "CMAKE_GENERATOR",  # another one than Ninja ignores the job pools, and writes other bytes
    "CMAKE_GENERATOR_INSTANCE",
    "CMAKE_GENERATOR_PLATFORM",
    "CMAKE_GENERATOR_TOOLSET",
    "CMAKE_INSTALL_MODE",
    "CMAKE_INSTALL_PREFIX",
    "CMAKE_TOOLCHAIN_FILE",
    "DESTDIR",
    "LD_RUN_PATH",
)
_WRAPPED_PREFIX = "SKBUILD_"
_CMAKE_VARIABLES = ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE")
# Definitions that would decide what the profile decides.
_PLAN_DEFINITIONS = re.compile(
    r"-?D?\s*(PELTON_\w+|CMAKE_(?:CUDA|HIP)_ARCHITECTURES|CMAKE_(?:C|CXX|CUDA|HIP)_FLAGS\w*|GPU_TARGETS|AMDGPU_TARGETS)"
    r"(?::\w+)?=(\S*)"
)
# Definitions of compilers: the plan takes them from variables, and knows their versions then.
_COMPILER_DEFINITIONS = {
    "CMAKE_C_COMPILER": "CXX",
    "CMAKE_CXX_COMPILER": "CXX",
    "CMAKE_CUDA_COMPILER": "CUDACXX",
    "CMAKE_CUDA_HOST_COMPILER": "CXX",
    "CMAKE_HIP_COMPILER": "HIPCXX",
    "CUDAToolkit_ROOT": "CUDA_HOME",
    "CUDA_TOOLKIT_ROOT_DIR": "CUDA_HOME",
    "ROCM_PATH": "ROCM_PATH",
}
# What there is to say to CMake beside the plan: it changes how a build runs, and not what comes out.
_FREE_DEFINITIONS = (
    "CMAKE_COLOR_DIAGNOSTICS",
    "CMAKE_CUDA_COMPILER_LAUNCHER",
    "CMAKE_CXX_COMPILER_LAUNCHER",
    "CMAKE_EXPORT_COMPILE_COMMANDS",
    "CMAKE_HIP_COMPILER_LAUNCHER",
    "CMAKE_MESSAGE_LOG_LEVEL",
    "CMAKE_VERBOSE_MAKEFILE",
)


@dataclass(frozen=True)
class Choices:
    """What the user chose, each with its origin and what lost against it. None: not chosen."""

    profile: Setting | None = None
    device: Setting | None = None
    features: Mapping[str, Setting] = field(default_factory=dict)
    """Value `on` or `off` by feature name."""
    jobs: Setting | None = None
    torch_dir: Setting | None = None
    label: Setting | None = None
    """Value `on` or `off`: whether the wheel's version has the profile's label."""
    notes: tuple[str, ...] = ()
    """Variables that are set and not used, one line each."""


def environment() -> Mapping[str, str]:
    """The environment of this process."""
    return dict(os.environ)


def replace_environment(environ: Mapping[str, str]) -> None:
    """Make `environ` the environment of this process and of those that it starts."""
    os.environ.clear()
    os.environ.update(environ)


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables that `read_choices` says are not used: run compilers and CMake
    in it."""
    dropped = {
        *_ARCH_VARIABLES,
        *_FLAG_VARIABLES,
        *_BEHIND_VARIABLES,
        *_CMAKE_VARIABLES,
        "CMAKE_BUILD_PARALLEL_LEVEL",
        "CUDAHOSTCXX",
        "HIPHOSTCXX",
        "NVCC_CCBIN",
    }
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and not name.startswith(_WRAPPED_PREFIX)
    }


def pass_through(config_settings: ConfigSettings | None) -> dict[str, object]:
    """The config settings that are not ours, for the wrapped backend. `read_choices` has refused the
    unknown ones."""
    return {
        key: value
        for key, value in (config_settings or {}).items()
        if key not in ("profile", "jobs", "label") and not key.startswith("feature.")
    }


def read_choices(
    config_settings: ConfigSettings | None,
    environ: Mapping[str, str],
    table: KernelTable,
    *,
    option: str = "-C ",
) -> Choices:
    """All switches, merged. `option` is how the command line spells a setting, for messages.

    Raises ChoiceError naming the switch, the value and what is allowed.
    """
    given = _command_line(config_settings or {}, table, option)
    env = {name: value.strip() for name, value in environ.items() if value.strip()}
    _refuse_unknown(env, table)

    profile = _merge("profile", _one(given, "profile", option), _from(env, PROFILE), _cmake_profile(env))
    device = _merge("target-device", None, _from(env, DEVICE), [])
    if device is not None:
        value = device.value.lower()
        if value not in BACKENDS:
            aliases = {"gpu": "cuda or rocm", "nvidia": "cuda", "amd": "rocm", "hip": "rocm", "x86": "cpu"}
            hint = f"; did you mean {aliases[value]}?" if value in aliases else did_you_mean(value, BACKENDS)
            raise ChoiceError(
                f"{DEVICE}: unknown device {device.value!r}{hint} allowed: {', '.join(BACKENDS)}"
            )
        device = Setting(device.name, value, device.origin)
    features: dict[str, Setting] = {}
    for name, entry in table.features.items():
        command = _switch(_one(given, f"feature.{name}", option))
        variable = _switch(_from(env, entry.environment)) if entry.environment else None
        state = _merge(f"feature.{name}", command, variable, [])
        if state is not None:
            features[name] = state
    jobs = _merge("jobs", _jobs(_one(given, "jobs", option)), _jobs(_from(env, JOBS)), [])
    torch_dir = _merge("torch-dir", None, _from(env, TORCH_DIR), [])
    label = _merge("label", _switch(_one(given, "label", option)), None, [])
    return Choices(profile, device, features, jobs, torch_dir, label, _unused(env))


def _command_line(
    config_settings: ConfigSettings, table: KernelTable, option: str
) -> Mapping[str, tuple[str, ...]]:
    """Values of our own keys, blanks and repetitions apart. Raises ChoiceError for a key that nobody
    reads."""
    ours = ["profile", "jobs", "label", *(f"feature.{name}" for name in table.features)]
    given: dict[str, tuple[str, ...]] = {}
    for key, value in config_settings.items():
        if key in ours:
            values = [value] if isinstance(value, (str, bool)) else list(value)
            texts = [str(item).strip() for item in values]
            given[key] = tuple(dict.fromkeys(texts))
            if "" in given[key]:
                raise ChoiceError(
                    f"{option}{key}=: the value is empty; leave the option out or give it a value"
                )
        elif key.startswith("feature."):
            name = key.removeprefix("feature.")
            raise ChoiceError(f"{option}{key}: unknown feature {name!r}{did_you_mean(name, table.features)}")
        elif key.removeprefix("skbuild.") in _FROM_PLAN:
            raise ChoiceError(
                f"{option}{key}: the wheel's tag follows from the plan; change wheel.glibc in the profile"
            )
        elif key.removeprefix("skbuild.").split(".")[0] not in _WRAPPED:
            close = nearest(key, [*ours, *_WRAPPED])
            hint = f"; did you mean '{option}{close}'?" if close else ";"
            if nearest(key.split(".")[0], _SAID_BY_PROFILE, cutoff=0.8):
                hint = "; what is built for which hardware is said by the profile, a file of build_profiles/;"
            raise ChoiceError(f"{option}{key}: unknown setting {key!r}{hint} known: {', '.join(ours)}")
        elif match := _PLAN_DEFINITIONS.search(
            f"{key.rpartition('.')[2]}={value}" if ".define." in key else str(value)
        ):
            name = match[1]
            use = f"{option}profile=NAME" if name == PROFILE else "the profile (or a profile of your own)"
            raise ChoiceError(f"{option}{key}: {name} follows from the plan; say it with {use}")
        elif ".define." in f".{key}":
            _check_definition(f"{option}{key}", key.rpartition(".")[2])
        else:
            for name in re.findall(r"-D\s*(\w+)", str(value)):
                _check_definition(f"{option}{key}", name)
    return given


def _check_definition(where: str, name: str) -> None:
    """Raises ChoiceError for a definition that nothing reads, or that the plan would not know of."""
    name = name.partition(":")[0]
    if variable := _COMPILER_DEFINITIONS.get(name):
        raise ChoiceError(f"{where}: the plan says which compiler it is; set the variable {variable} to it")
    if name not in _FREE_DEFINITIONS:
        hint = did_you_mean(name, _FREE_DEFINITIONS)
        raise ChoiceError(f"{where}: {name} is no definition that this build reads{hint}")


def _one(given: Mapping[str, tuple[str, ...]], key: str, option: str) -> Setting | None:
    values = given.get(key, ())
    if len(values) > 1:
        raise ChoiceError(
            f"{option}{key} is given {len(values)} times with different values: "
            f"{', '.join(map(repr, values))}; keep one"
        )
    return Setting(key, values[0], f"{option}{key}=") if values else None


def _from(env: Mapping[str, str], variable: str) -> Setting | None:
    return Setting(variable, env[variable], variable) if variable in env else None


def _merge(
    name: str, command: Setting | None, variable: Setting | None, weaker: Iterable[Setting]
) -> Setting | None:
    found = [setting for setting in (command, variable) if setting is not None]
    if not found:
        return None
    lost = tuple(f"{setting.value} ({setting.origin})" for setting in (*found[1:], *weaker))
    return Setting(name, found[0].value, found[0].origin, lost)


def _switch(setting: Setting | None) -> Setting | None:
    if setting is None:
        return None
    try:
        return Setting(setting.name, "on" if parse_switch(setting.value) else "off", setting.origin)
    except ValueError as error:
        raise ChoiceError(f"{setting.origin.rstrip('=')}: {error}") from None


def _jobs(setting: Setting | None) -> Setting | None:
    if setting is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", setting.value, re.ASCII) or int(setting.value) < 1:
        raise ChoiceError(
            f"{setting.origin.rstrip('=')}: {setting.value!r} is no number of jobs; give a whole number from "
            "1 on, or leave it unset to have it calculated"
        )
    return Setting(setting.name, str(int(setting.value)), setting.origin)


def _refuse_unknown(env: Mapping[str, str], table: KernelTable) -> None:
    known = [
        PROFILE,
        DEVICE,
        TORCH_DIR,
        VERSION,
        *(f.environment for f in table.features.values() if f.environment),
    ]
    allowed = {*known, *table.library.environment}
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in allowed:
            raise ChoiceError(
                f"environment variable {name} is unknown{did_you_mean(name, allowed)}; unset it"
            )


def _cmake_profile(env: Mapping[str, str]) -> list[Setting]:
    """A profile that someone tries to hand to CMake directly: it never wins, and the plan says so."""
    found = []
    for variable in _CMAKE_VARIABLES:
        for match in _PLAN_DEFINITIONS.finditer(env.get(variable, "")):
            if match[1] == PROFILE:
                found.append(Setting("profile", match[2].strip("\"';"), f"{variable}, never used"))
    return found


def _unused(env: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    for name in sorted(env):
        value = env[name]
        if name in _ARCH_VARIABLES:
            notes.append(f"{name}={value} is not used: the archs stand in {PROFILE_FILE}, key target.arch")
        elif name in _FLAG_VARIABLES:
            notes.append(
                f"{name}={value} is not used: compiler flags follow from the profile and the kernel table"
            )
        elif name in _BEHIND_VARIABLES:
            notes.append(f"{name}={value} is not used: the build says this itself, from the plan")
        elif name in ("CUDAHOSTCXX", "HIPHOSTCXX", "NVCC_CCBIN"):
            notes.append(
                f"{name}={value} is not used: the host compiler of GPU code is that of the C++ code, set CXX"
            )
        elif name == "CMAKE_BUILD_PARALLEL_LEVEL":
            notes.append(f"{name}={value} is not used: set {JOBS}")
        elif name in _CMAKE_VARIABLES:
            notes.append(
                f"{name}={value} is not used: the plan decides what CMake gets; the rest goes on the "
                "command line as -C cmake.define.NAME=VALUE"
            )
        elif name.startswith(_WRAPPED_PREFIX):
            key = name.removeprefix(_WRAPPED_PREFIX).lower().replace("_", ".", 1).replace("_", "-")
            notes.append(f"{name}={value} is not used: say it on the command line, such as -C {key}=VALUE")
    return tuple(notes)


def split_setting(option: str, text: str, form: str) -> tuple[str, str]:
    """`KEY=VALUE` of the command line as a pair. Raises ChoiceError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ChoiceError(f"{option}{text}: write {form}")
    return key.strip(), value
