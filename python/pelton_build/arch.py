"""The archs that each backend knows, and an answer to every other spelling that people try.

Sources: the `--gpu-architecture` tables of nvcc's documentation, CUDA 11.0 to 13.1; LLVM's AMDGPU usage
guide; the x86-64 psABI's microarchitecture levels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .values import Version, VersionRange, nearest

__all__ = [
    "BACKENDS",
    "ArchError",
    "check_archs",
    "check_cuda_archs_for",
    "cpu_flags_of",
    "cuda_arch_range",
    "known_archs",
]

BACKENDS = ("cpu", "cuda", "rocm")


class ArchError(ValueError):
    """A value of `target.arch` is not the name of an arch of the backend. The message holds no file or
    key."""


@dataclass(frozen=True)
class _Cuda:
    """A compute capability and the CUDA versions whose nvcc knows it: from `since`, before `until`."""

    number: int
    since: str
    until: str = ""
    specific: str = ""
    """First CUDA with the arch-specific form (suffix a)."""
    family: str = ""
    """First CUDA with the family-specific form (suffix f)."""


_CUDA = (
    _Cuda(50, "6.0", "13"),
    _Cuda(52, "6.5", "13"),
    _Cuda(53, "7.0", "13"),
    _Cuda(60, "8.0", "13"),
    _Cuda(61, "8.0", "13"),
    _Cuda(62, "8.0", "13"),
    _Cuda(70, "9.0", "13"),
    _Cuda(72, "9.2", "13"),
    _Cuda(75, "10.0"),
    _Cuda(80, "11.0"),
    _Cuda(86, "11.1"),
    _Cuda(87, "11.4"),
    _Cuda(88, "13.0"),
    _Cuda(89, "11.8"),
    _Cuda(90, "11.8", specific="12.0"),
    _Cuda(100, "12.8", specific="12.8", family="12.9"),
    _Cuda(101, "12.8", "13", specific="12.8", family="12.9"),
    _Cuda(103, "12.9", specific="12.9", family="12.9"),
    _Cuda(110, "13.0", specific="13.0", family="13.0"),
    _Cuda(120, "12.8", specific="12.8", family="12.9"),
    _Cuda(121, "12.9", specific="12.9", family="12.9"),
)
# The same silicon under another number: (old, new, first CUDA with the new number).
_RENAMED = ((101, 110, "13.0"),)

_ROCM = (
    "gfx803", "gfx900", "gfx902", "gfx904", "gfx906", "gfx908", "gfx909", "gfx90a", "gfx90c", "gfx940",
    "gfx941", "gfx942", "gfx950", "gfx1010", "gfx1011", "gfx1012", "gfx1013", "gfx1030", "gfx1031", "gfx1032",
    "gfx1033", "gfx1034", "gfx1035", "gfx1036", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150",
    "gfx1151", "gfx1152", "gfx1153", "gfx1200", "gfx1201",
)  # fmt: skip
_SRAMECC = ("gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
_ROCM_FEATURES = {"sramecc": _SRAMECC, "xnack": ("gfx900", "gfx902", "gfx904", "gfx909", "gfx90c", *_SRAMECC)}

# The flags of each level as Linux names them in /proc/cpuinfo, without those of the level before.
_CPU = {
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
# What people call these levels elsewhere.
_CPU_ALIASES = {
    **dict.fromkeys(("sse4", "sse4.2", "sse42", "nehalem"), "x86-64-v2"),
    **dict.fromkeys(("avx", "avx2", "core-avx2", "haswell", "broadwell", "x86-64"), "x86-64-v3"),
    **dict.fromkeys(("znver1", "znver2", "znver3"), "x86-64-v3"),
    **dict.fromkeys(("avx512", "avx512f", "skylake-avx512", "cascadelake", "icelake-server"), "x86-64-v4"),
    **dict.fromkeys(("sapphirerapids", "znver4", "znver5"), "x86-64-v4"),
}

_NATIVE = ("native", "host", "auto", "all", "all-major", "common", "local", "detect")
_SM = re.compile(r"(?:sm|compute)_(\d{2,3})([af]?)", re.ASCII)
_CUDA_LIKE = re.compile(
    r"(sm|compute|cc|cuda)?[_ -]*(\d{1,2})\.(\d)([a-z]?)|(sm|compute|cc|cuda)?[_ -]*(\d{2,3})([a-z]?)",
    re.ASCII,
)


def _cuda_names() -> dict[str, VersionRange]:
    names: dict[str, VersionRange] = {}
    for entry in _CUDA:
        for suffix, since in (("", entry.since), ("a", entry.specific), ("f", entry.family)):
            if since:
                until = f",<{entry.until}" if entry.until else ""
                for kind in ("sm", "compute"):
                    names[f"{kind}_{entry.number}{suffix}"] = VersionRange.parse(f">={since}{until}")
    return names


_CUDA_NAMES = _cuda_names()


def known_archs(backend: str) -> tuple[str, ...]:
    """Every arch name that `backend` knows, in order. ROCm's target features (`:xnack-`) come on top."""
    return {"cuda": tuple(_CUDA_NAMES), "rocm": _ROCM, "cpu": tuple(_CPU)}[backend]


def cpu_flags_of(level: str) -> frozenset[str]:
    """All flags of /proc/cpuinfo that `level` stands for, those of the lower levels included."""
    flags: set[str] = set()
    for name, own in _CPU.items():
        flags.update(own)
        if name == level:
            return frozenset(flags)
    raise KeyError(level)


def cuda_arch_range(arch: str) -> VersionRange:
    """The CUDA versions whose nvcc knows `arch`, a known name."""
    return _CUDA_NAMES[arch]


def check_archs(backend: str, archs: Sequence[str]) -> None:
    """Raises ArchError unless `archs` are names of archs of `backend`, each once, at least one."""
    if not archs:
        raise ArchError(
            f"names no hardware; give at least one arch of backend {backend}, such as {_example(backend)!r}"
        )
    for index, arch in enumerate(archs):
        _check_one(backend, arch)
        if arch in archs[:index]:
            raise ArchError(f"{arch!r} is listed twice; name each arch once")
    if backend == "cpu" and len(archs) > 1:
        raise ArchError(
            f"a CPU profile has exactly one arch, found {', '.join(map(repr, archs))}; make one profile for "
            "each"
        )
    if backend == "rocm":
        bare = [arch.split(":")[0] for arch in archs]
        for index, name in enumerate(bare):
            if name in bare[:index] and (name in archs):
                raise ArchError(f"{name!r} is listed twice, with and without target features; keep one")


def check_cuda_archs_for(archs: Iterable[str], versions: VersionRange, found: Version | None) -> None:
    """Raises ArchError when the nvcc found, or every nvcc that the profile allows, does not know one of
    `archs`."""
    for arch in archs:
        known = cuda_arch_range(arch)
        if found is not None:
            if found not in known:
                raise ArchError(_not_in(arch, f"nvcc {found}", known))
        elif not _overlap(known, versions):
            raise ArchError(_not_in(arch, f"any nvcc of toolchain.cuda {str(versions)!r}", known))


def _not_in(arch: str, which: str, known: VersionRange) -> str:
    match = _SM.fullmatch(arch)
    assert match is not None
    for old, new, since in _RENAMED:
        if int(match[1]) == old:
            renamed = arch.replace(str(old), str(new))
            return f"{arch!r} is not known to {which}: since CUDA {since} it is named {renamed!r} (renamed)"
        if int(match[1]) == new:
            before = arch.replace(str(new), str(old))
            return f"{arch!r} is not known to {which}: before CUDA {since} it is named {before!r} (renamed)"
    return f"{arch!r} is not known to {which}: it needs CUDA {known}"


def _overlap(a: VersionRange, b: VersionRange) -> bool:
    try:
        VersionRange.parse(",".join(filter(None, (str(a), str(b)))))
    except ValueError:
        return False
    return True


def _example(backend: str) -> str:
    return {"cuda": "sm_90", "rocm": "gfx90a", "cpu": "x86-64-v3"}[backend]


def _check_one(backend: str, arch: str) -> None:
    if backend == "cuda" and arch in _CUDA_NAMES:
        return
    if backend == "cpu" and arch in _CPU:
        return
    if backend == "rocm":
        name, *features = arch.split(":")
        if name in _ROCM:
            _check_rocm_features(arch, name, features)
            return
    raise ArchError(_explain(backend, arch))


def _check_rocm_features(arch: str, name: str, features: list[str]) -> None:
    seen: list[str] = []
    for feature in features:
        key = feature[:-1]
        if feature[-1:] not in ("+", "-") or key not in _ROCM_FEATURES:
            close = nearest(key or feature, _ROCM_FEATURES, 0.4) or "xnack"
            raise ArchError(
                f"{arch!r}: unknown target feature {feature!r}; did you mean '{close}-'? known: sramecc, "
                "xnack, each with + or -"
            )
        if name not in _ROCM_FEATURES[key]:
            raise ArchError(f"{arch!r}: {name} has no target feature {key!r}; write {name!r}")
        if key in seen:
            raise ArchError(f"{arch!r}: target feature {key!r} is given twice")
        seen.append(key)
    if seen != sorted(seen):
        raise ArchError(
            f"{arch!r}: target features go in alphabetical order; write '{name}:{':'.join(sorted(features))}'"
        )


def _explain(backend: str, arch: str) -> str:
    word = arch.strip().lower()
    if not word:
        return f"an empty name; write e.g. {_example(backend)!r}"
    if len(parts := [part for part in re.split(r"[\s,;|]+", word) if part]) > 1:
        return f"{arch!r} names several; write each as an entry of its own: {', '.join(map(repr, parts))}"
    if word in _NATIVE:
        return (
            f"{arch!r} depends on the machine that builds; name the hardware, such as {_example(backend)!r}"
        )
    for other in BACKENDS:
        if other != backend and _is_known(other, word):
            return (
                f"{arch!r} is an arch of backend {other}, and target.backend is {backend!r}; set "
                f"target.backend = {other!r} or name an arch such as {_example(backend)!r}"
            )
    if backend == "cuda":
        return _explain_cuda(arch, word)
    if backend == "cpu":
        close = _CPU_ALIASES.get(word) or _CPU_ALIASES.get(word.replace("_", "-")) or nearest(word, _CPU, 0.5)
    else:
        name = word.split(":")[0]
        close = _gpu_of_family(name) or nearest(name, _ROCM, 0.5)
        if close is None and re.fullmatch(r"\d{3,4}[a-c]?", word):
            close = nearest(f"gfx{word}", _ROCM, 0.5)
    return f"unknown {backend} arch {arch!r}{_hint(close, known_archs(backend))}"


def _gpu_of_family(name: str) -> str | None:
    """The AMD GPU whose number is nearest among those with the same beginning: `gfx1103` for `gfx1105`."""
    if not re.fullmatch(r"gfx[0-9]{2,3}[0-9a-f]", name):
        return None
    family = [known for known in _ROCM if known[:-1] == name[:-1]]
    return min(family, key=lambda known: (abs(int(known[-1], 16) - int(name[-1], 16)), known), default=None)


def _hint(close: str | None, known: Iterable[str]) -> str:
    return f"; did you mean {close!r}?" if close else f"; known: {', '.join(known)}"


def _is_known(backend: str, word: str) -> bool:
    if backend == "rocm":
        return word.split(":")[0] in _ROCM
    return word in (_CUDA_NAMES if backend == "cuda" else _CPU)


def _explain_cuda(arch: str, word: str) -> str:
    ptx = False
    for tail in ("+ptx", "-virtual", "-real"):
        if word.endswith(tail):
            ptx |= tail == "+ptx"
            virtual = tail == "-virtual"
            word = word.removesuffix(tail)
            break
    else:
        virtual = False
    match = _CUDA_LIKE.fullmatch(word)
    if match is None:
        machine_code = [name for name in _CUDA_NAMES if name.startswith("sm_")]
        close = nearest(word, _CUDA_NAMES, 0.5)
        return f"unknown cuda arch {arch!r}{_hint(close, [*machine_code, 'compute_* for PTX'])}"
    kind = match[1] or match[5] or ""
    number = int(match[2] + match[3]) if match[2] else int(match[6])
    suffix = match[4] or match[7] or ""
    prefix = "compute" if kind == "compute" or virtual else "sm"
    by_number = {entry.number: entry for entry in _CUDA}
    best = min(by_number, key=lambda n: (abs(n - number), n))
    name = f"{prefix}_{best}{suffix}"
    if name not in _CUDA_NAMES:
        name = f"{prefix}_{best}"
    if ptx:
        compute = name.replace("sm_", "compute_")
        return (
            f"{arch!r} is the spelling of another tool; write machine code and PTX as two entries: "
            f"{name!r}, {compute!r}"
        )
    return f"unknown cuda arch {arch!r}; did you mean {name!r}?"
