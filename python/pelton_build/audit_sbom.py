"""The audit of the bill of materials: it names the foreign code that the binaries really hold, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pelton_build import fatbin, hipfat, sbom
from pelton_build.audit_input import CannotRun, Finding, OpenedWheel
from pelton_build.fatbin import FatbinError

__all__ = ["check_sbom"]

# A name of the C++ library's own type information: it stands alone only where the library is linked in.
_LIBSTDCXX = re.compile(rb"\0St9bad_alloc\0")


def check_sbom(wheel: OpenedWheel) -> Iterator[Finding]:
    """The file itself, what it says of the wheel, and its components against the binaries."""
    name = f"{wheel.dist_info}/sboms/{sbom.FILE.format(package=wheel.package)}"
    if name not in wheel.names:
        yield Finding("sbom", name, "missing", "a bill of materials")
        return
    try:
        bom = json.loads(wheel.read(name))
        form = f"{bom['bomFormat']} {bom['specVersion']}"
        about = bom["metadata"]["component"]
        subject = f"{about['name']} {about['version']}"
        listed = {str(part["name"]): part for part in bom.get("components", [])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield Finding("sbom", name, f"not readable ({error!r})", "a CycloneDX file in JSON")
        return
    if not re.fullmatch(r"CycloneDX 1\.\d+", form):
        yield Finding("sbom", name, form, "CycloneDX 1")
    if subject != f"{wheel.package} {wheel.claims.version}":
        yield Finding("sbom", name, f"of {subject}", f"of {wheel.package} {wheel.claims.version}")
    if "timestamp" in bom["metadata"]:
        yield Finding("sbom", name, "a time stamp", "none: equal builds have equal files")
    versions = {part.name: part.version for part in sbom.parts_of(wheel.info)}
    held = dict(_held(wheel))
    for part, why in held.items():
        entry: Any = listed.get(part)
        if not isinstance(entry, dict):
            yield Finding("sbom", name, f"{part} is not listed", f"{part}: {why}")
        elif part in versions and str(entry.get("version")) != versions[part]:
            yield Finding("sbom", name, f"{part} {entry.get('version')}", f"{part} {versions[part]}")
        elif not entry.get("licenses"):
            yield Finding("sbom", name, f"{part} without a license", "the license of each component")
    for part in sorted(listed.keys() - held.keys()):
        yield Finding("sbom", name, f"{part} is listed", "only what is found in the binaries")


def _held(wheel: OpenedWheel) -> Iterator[tuple[str, str]]:
    """Foreign code in the binaries: its name, and where it was seen."""
    for binary in wheel.binaries:
        data = wheel.read(binary.name)
        if _LIBSTDCXX.search(data):
            yield "libstdc++", f"linked into {binary.name}"
        if fatbin.REGISTRATION in binary.data:
            yield "cudart", f"{binary.name} registers device code, and needs no libcudart"
        if hipfat.SECTION in binary.data:
            yield "hip", f"headers, compiled into {binary.name}"
            yield "rocm-device-libs", f"compiled into the device code of {binary.name}"
        if b"__pybind11_internals" in data or b"pybind11::" in data:
            yield "pybind11", f"compiled into {binary.name}"
        if "libtorch_cpu.so" in binary.needed:
            yield "torch", f"headers of the stable interface, compiled into {binary.name}"
    try:
        names = [kernel.name for images in wheel.device_code for image in images for kernel in image.kernels]
    except (FatbinError, CannotRun):  # the check `archs` says so
        return
    if any(re.search(r"7cutlass|4cute", name) for name in names):
        yield "cutlass", "its types stand in the names of kernels"
