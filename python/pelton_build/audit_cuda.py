"""The audit of device code, NVIDIA's and what AMD's has in common with it: which kernels a library holds, of which family, for which archs, at what
cost.

A kernel belongs to the source that the build named in the image's header, and so to the family that the plan puts this
source in. What an image says of itself (its notes, its PTX target, the file's name in its mangled kernels) has to agree.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pelton_build import fatbin, hipfat
from pelton_build.audit_input import Allowance, Binary, CannotRun, Finding, NothingThere, OpenedWheel
from pelton_build.fatbin import FatbinError, Image, function_name

__all__ = ["KernelUse", "check_archs", "check_cuobjdump", "check_local_memory", "demangled", "kernel_uses"]


NO_DEVICE_CODE = "no device code in a wheel for CPUs"
# Where the device code of a backend stands.
_SECTIONS = {
    "cuda": (fatbin.SECTION, fatbin.REGISTRATION, fatbin.LINKED_SECTION),
    "rocm": (hipfat.SECTION, hipfat.REGISTRATION),
}


@dataclass(frozen=True)
class KernelUse:
    """What one kernel takes on one arch."""

    family: str
    source: str
    arch: str
    kernel: str
    """As mangled."""
    registers: int
    shared: int
    local: int
    loads: int
    stores: int


def kernel_uses(wheel: OpenedWheel) -> tuple[KernelUse, ...]:
    """Every kernel of the library's machine code. Raises FatbinError, CannotRun."""
    families = {source.path: source.family for source in wheel.claims.sources if source.role == "gpu"}
    return tuple(
        KernelUse(
            families.get(image.source, ""),
            image.source,
            image.arch,
            kernel.name,
            kernel.registers,
            kernel.shared,
            kernel.local,
            kernel.loads,
            kernel.stores,
        )
        for container in wheel.device_code
        for image in container
        if image.kind != "ptx"
        for kernel in image.kernels
    )


def check_archs(wheel: OpenedWheel) -> Iterator[Finding]:
    """Device code against the plan."""
    claims, library = wheel.claims, wheel.library
    for binary in wheel.binaries:
        for section in binary.data:
            if binary is not library or section not in _SECTIONS.get(claims.backend, ()):
                yield Finding("archs", binary.name, f"device code ({section})", "none in this file")
    if claims.backend == "cpu":
        raise NothingThere(NO_DEVICE_CODE)
    if library is None:
        return
    try:
        containers = wheel.device_code
    except FatbinError as error:
        yield Finding("archs", library.name, f"damaged device code: {error}", "fat binaries that can be read")
        return
    planned = {source.path: source for source in claims.sources if source.role == "gpu"}
    if not planned:
        yield Finding("archs", wheel.info_path, "no GPU source in the plan", "the plan of a GPU build")
    yield from _registered(library, len(containers))
    by_source: dict[str, list[Image]] = {}
    for container in containers:
        for image in container:
            by_source.setdefault(image.source, []).append(image)
    for name, images in sorted(by_source.items()):
        if name not in planned:
            found = (
                f"device code for {_archs(images)} of {name or 'a source without a name'}{_holding(images)}"
            )
            yield Finding("archs", library.name, found, f"sources of the plan: {', '.join(sorted(planned))}")
    for path, source in planned.items():
        of = f"{path} (family {source.family})"
        if claims.backend == "rocm" and source.support and path not in by_source:
            continue  # HIP's compiler makes no code object of a source without a kernel, such as one of launchers
        for finding in _compare(by_source.get(path, []), source.archs, of):
            yield Finding("archs", library.name, *finding)
    for family in dict.fromkeys(source.family for source in planned.values() if not source.support):
        own = [image for p, s in planned.items() if s.family == family for image in by_source.get(p, [])]
        if own and not any(image.kernels for image in own):
            yield Finding("archs", library.name, f"no kernel of family {family}", "at least one")


def _registered(library: Binary, containers: int) -> Iterator[Finding]:
    if fatbin.LINKED_SECTION in library.data:
        found = f"relocatable device code ({fatbin.LINKED_SECTION})"
        yield Finding("archs", library.name, found, "each source compiled whole")
    records = len(library.data.get(fatbin.REGISTRATION, b"")) // fatbin.REGISTRATION_SIZE
    records += len(library.data.get(hipfat.REGISTRATION, b"")) // hipfat.REGISTRATION_SIZE
    if records != containers:
        found = f"{containers} fat binaries, of which {records} are registered at load"
        yield Finding("archs", library.name, found, "each registered once")


def _compare(images: list[Image], archs: Iterable[str], of: str) -> Iterator[tuple[str, str]]:
    """What differs between the images of a source and the archs of its plan: found, needed."""
    wanted, counts = list(archs), Counter(image.arch for image in images)
    needed = f"exactly {', '.join(wanted)}, as the plan says"
    for arch in wanted:
        if arch not in counts:
            yield f"no {_kind(arch)} for {arch} of {of}; there is {_archs(images)}", needed
    for arch, count in sorted(counts.items()):
        if arch not in wanted:
            yield f"{_kind(arch)} for {arch} of {of}", needed
        elif count > 1:
            yield f"{_kind(arch)} for {arch} of {of} {count} times", "once"
    for image in images:
        if image.made_for and image.made_for != image.arch:
            yield f"{image.kind} of {of} marked {image.arch}, compiled for {image.made_for}", "one arch"
        for kernel in image.kernels:
            file = file_in_name(kernel.name)
            if file and file != _mangled_file(image.source):
                found = f"kernel {function_name(kernel.name)} from a file {file} among those of {of}"
                yield found, f"kernels from {image.source}"
    kernels = {image.arch: {kernel.name for kernel in image.kernels} for image in images}
    every = set().union(*kernels.values()) if kernels else set()
    for arch, names in kernels.items():
        if missing := every - names:
            shown = ", ".join(sorted({function_name(name) for name in missing}))
            yield f"{len(missing)} kernels of {of} not compiled for {arch}: {shown}", "each for each arch"


def _kind(arch: str) -> str:
    return "PTX" if arch.startswith("compute_") else "machine code"


def _archs(images: list[Image]) -> str:
    return ", ".join(sorted({image.arch for image in images})) or "none"


def _holding(images: list[Image]) -> str:
    names = sorted({function_name(kernel.name) for image in images for kernel in image.kernels})
    return f" (kernels {', '.join(names[:4])}{' and more' if len(names) > 4 else ''})" if names else ""


def file_in_name(mangled: str) -> str:
    """The file that nvcc writes into names of an anonymous namespace: `gpu_cu`; empty for other names."""
    match = re.search(r"_GLOBAL__N__[0-9a-f]{8}_(\d+)_", mangled)
    if match is None:
        return ""
    return mangled[match.end() : match.end() + int(match[1])]


def _mangled_file(path: str) -> str:
    return re.sub(r"\W", "_", path.rpartition("/")[2], flags=re.ASCII)


def check_local_memory(wheel: OpenedWheel) -> Iterator[Finding]:
    """Kernels that use more local memory than the plan allows them."""
    library = wheel.library
    if wheel.claims.backend == "cpu":
        raise NothingThere(NO_DEVICE_CODE)
    if library is None:
        return
    try:
        uses = kernel_uses(wheel)
    except FatbinError as error:
        raise CannotRun(f"the device code is damaged ({error})") from None
    for use in uses:
        if not (use.local or use.loads or use.stores):
            continue
        allowance = _allowance(wheel.claims.local_memory, use)
        if allowance is None or use.local > allowance.bytes:
            found = (
                f"{use.local} bytes of local memory a thread ({use.stores} stores, {use.loads} loads, "
                f"{use.registers} registers) in {demangled([use.kernel])[use.kernel]} of {use.source} on {use.arch}"
            )
            needed = (
                f"at most {allowance.bytes} bytes"
                if allowance
                else "none: no spilled register, no array in memory"
            )
            yield Finding("local", library.name, found, needed)
    # One that no kernel needs is no fault: another version of the compiler may need it.
    there = {(use.family, function_name(use.kernel)) for use in uses}
    for allowance in wheel.claims.local_memory:
        if (allowance.family, allowance.kernel) not in there:
            found = f"local memory is allowed to {allowance.kernel} of family {allowance.family}"
            yield Finding("local", wheel.info_path, f"{found}, which is not there", "the name of a kernel")


def _allowance(allowances: Iterable[Allowance], use: KernelUse) -> Allowance | None:
    for a in allowances:
        if (a.family, a.kernel) == (use.family, function_name(use.kernel)) and (
            not a.archs or use.arch in a.archs
        ):
            return a
    return None


def demangled(names: Iterable[str]) -> Mapping[str, str]:
    """Names for a person, by what c++filt says where it is installed: `rms_norm_kernel<float>`."""
    mangled = list(dict.fromkeys(names))
    program = shutil.which("c++filt")
    if program is None or not mangled:
        return {name: function_name(name) for name in mangled}
    done = subprocess.run([program], check=False, input="\n".join(mangled), capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or len(lines) != len(mangled):
        return {name: function_name(name) for name in mangled}
    return {name: _short(line) or name for name, line in zip(mangled, lines, strict=True)}


def _short(signature: str) -> str:
    """A signature without result, namespaces of the function and parameters."""
    text = signature.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for at, letter in enumerate(text):  # the parameters begin at the first parenthesis outside of <>
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and at:
            text = text[:at]
            break
    head, angle, rest = text.partition("<")
    return head.rpartition("::")[2] + angle + rest


def check_cuobjdump(wheel: OpenedWheel) -> Iterator[Finding]:
    """The same images as the toolkit's own dumper finds, where it is installed."""
    library = wheel.library
    if wheel.claims.backend != "cuda":
        raise NothingThere(f"no code for NVIDIA GPUs in a wheel for {wheel.claims.backend}")
    if library is None or fatbin.SECTION not in library.data:
        return
    program = shutil.which("cuobjdump")
    if program is None:
        raise CannotRun("cuobjdump of the CUDA toolkit is not on PATH")
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        path = Path(folder) / "library.so"
        path.write_bytes(wheel.read(library.name))
        command = [program, "-lelf", "-lptx", str(path)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    theirs = Counter(
        re.findall(r"^(?:ELF|PTX) file +\d+: .*\.(sm_\d+[af]?)\.(cubin|ptx)$", done.stdout, re.M)
    )
    if not theirs:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CannotRun(f"cuobjdump gave no answer: {said[-1] if said else done.returncode}")
    try:
        images = [image for container in wheel.device_code for image in container]
    except FatbinError as error:
        yield Finding("cuobjdump", library.name, f"images that only cuobjdump can read: {error}", "the same")
        return
    ours = Counter[tuple[str, str]]((image.arch.replace("compute_", "sm_"), image.kind) for image in images)
    if ours != theirs:

        def text(counts: Mapping[tuple[str, str], int]) -> str:
            return ", ".join(f"{n} {kind} {arch}" for (arch, kind), n in sorted(counts.items()))

        yield Finding(
            "cuobjdump", library.name, f"images {text(ours)}", f"{text(theirs)}, as cuobjdump lists"
        )
