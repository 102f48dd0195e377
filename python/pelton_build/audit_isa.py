"""Instructions of x86-64 code, classified by the CPUID features that `iced-x86` gives for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from pelton_build.audit_input import CannotRun, Code

__all__ = ["LEVELS", "allowed_features", "cpu_features"]

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


@cache
def _names() -> tuple[dict[int, str], dict[int, str]]:
    """The library's names of CPUID features and of instructions, by number."""
    import iced_x86

    features, codes = (
        {value: key for key, value in vars(kind).items() if isinstance(value, int)}
        for kind in (iced_x86.CpuidFeature, iced_x86.Code)
    )
    return features, codes


@lru_cache(maxsize=16)
def cpu_features(code: tuple[Code, ...]) -> Mapping[str, tuple[int, str]]:
    """CPUID features that the instructions need: count and first example of each; ``(not decodable)`` is one too.

    Those of the last files are kept: wheels of one build have the same binaries.
    """
    import iced_x86

    names, codes = _names()
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
