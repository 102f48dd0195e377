"""The audit of code objects for AMD GPUs, beyond what it has in common with that for NVIDIA's: see `audit_cuda`."""

from __future__ import annotations

from collections.abc import Iterator

from pelton_build import hipfat
from pelton_build.audit_input import CannotRun, Finding, NothingThere, OpenedWheel
from pelton_build.fatbin import FatbinError, function_name

__all__ = ["check_code_objects"]

VERSION = 5
"""Of code objects: what every ROCm from 6 on loads."""


def lds_limit(arch: str) -> int:
    """Bytes of local data share that a block can have."""
    return (160 if arch.startswith("gfx950") else 64) * 1024


def check_code_objects(wheel: OpenedWheel) -> Iterator[Finding]:
    """Their version, the size of a wave, the memory of a block, and matrix instructions where the plan has them."""
    claims, library = wheel.claims, wheel.library
    if claims.backend != "rocm":
        raise NothingThere(f"no code for AMD GPUs in a wheel for {claims.backend}")
    if library is None:
        return
    try:
        images = [image for bundle in wheel.device_code for image in bundle]
    except FatbinError as error:
        raise CannotRun(f"the device code is damaged ({error})") from None
    families = {source.path: source.family for source in claims.sources if source.role == "gpu"}
    matrix: set[tuple[str, str]] = set()
    for image in images:
        of = f"{image.source or 'a source without a name'} for {image.arch}"
        if image.version != VERSION:
            found = f"a code object of version {image.version or 'that is unknown'}, {of}"
            yield Finding("amdgpu", library.name, found, f"version {VERSION}, for ROCm 6 and 7")
        wave = hipfat.wave_size(image.arch)
        for kernel in image.kernels:
            name = f"{function_name(kernel.name)} of {of}"
            if kernel.wave != wave:
                found = f"waves of {kernel.wave} lanes in {name}"
                yield Finding("amdgpu", library.name, found, f"{wave} lanes")
            if kernel.shared > lds_limit(image.arch):
                found = f"{kernel.shared} bytes of shared memory a block in {name}"
                yield Finding("amdgpu", library.name, found, f"at most {lds_limit(image.arch)}")
            if kernel.matrix:
                matrix.add((families.get(image.source, ""), image.arch.partition(":")[0]))
    for family, archs in claims.matrix:
        for arch in archs:
            if (family, arch) not in matrix:
                found = f"no matrix instruction for {arch} in family {family}"
                kind = "MFMA" if hipfat.wave_size(arch) == 64 else "WMMA"
                yield Finding("amdgpu", library.name, found, f"{kind}, as the plan says")
