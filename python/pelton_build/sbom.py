"""The software bill of materials of a wheel: what is linked or compiled into its binaries, and what made them.

It is a CycloneDX file in ``.dist-info/sboms/`` (PEP 770), derived from the build info alone: without time stamps, and
with a serial number that follows from the content, so that equal builds have equal files.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import PlanError

__all__ = ["FILE", "REQUIREMENT", "Part", "parts_of", "render"]

REQUIREMENT = "cyclonedx-python-lib>=11,<12"

FILE = "{package}.cdx.json"
"""Its name in the folder `sboms`."""


@dataclass(frozen=True)
class Part:
    """Foreign code that is in a wheel's binaries."""

    name: str
    version: str
    license: str
    """SPDX expression."""
    purl: tuple[str, str, str]
    """Type, namespace and name of its package URL."""
    description: str


def parts_of(info: Mapping[str, Any]) -> tuple[Part, ...]:
    """What a build puts into its binaries, by the build info: a header counts when code of it is compiled in."""
    toolchain: Mapping[str, str] = info.get("toolchain", {})
    parts = []

    def add(key: str, name: str, license: str, purl: tuple[str, str, str], description: str) -> None:
        version = toolchain.get(key, "").rpartition(" ")[2]
        if version:
            parts.append(Part(name, version, license, purl, description))

    if info.get("static_libstdcxx"):
        license = "GPL-3.0-or-later WITH GCC-exception-3.1"
        add("cxx", "libstdc++", license, ("generic", "gnu", "libstdc++"), "C++ library, linked in")
    if info.get("backend") == "cuda":
        license = "LicenseRef-NVIDIA-CUDA-Toolkit-EULA"
        add("cuda", "cudart", license, ("generic", "nvidia", "cudart"), "CUDA runtime, linked in")
    if info.get("backend") == "rocm":
        add("rocm", "hip", "MIT", ("generic", "amd", "hip"), "headers, compiled into the GPU code")
        add(
            "rocm",
            "rocm-device-libs",
            "NCSA",
            ("generic", "amd", "rocm-device-libs"),
            "linked into the GPU code",
        )
    add(
        "pybind11",
        "pybind11",
        "BSD-3-Clause",
        ("pypi", "", "pybind11"),
        "headers, compiled into the host module",
    )
    add(
        "torch-headers",
        "torch",
        "BSD-3-Clause",
        ("pypi", "", "torch"),
        "headers, compiled into the operators",
    )
    add(
        "cutlass",
        "cutlass",
        "BSD-3-Clause",
        ("pypi", "", "nvidia-cutlass"),
        "headers, compiled into GPU kernels",
    )
    return tuple(parts)


def render(info: Mapping[str, Any], package: str, license: str) -> str:
    """The file's text. Raises PlanError when the library that writes it is not installed."""
    try:
        from cyclonedx.model.bom import Bom
        from cyclonedx.model.component import Component, ComponentType
        from cyclonedx.model.license import LicenseExpression
        from cyclonedx.output.json import JsonV1Dot6
        from packageurl import PackageURL
    except ImportError:
        raise PlanError(
            f"cyclonedx-python-lib, which writes the bill of materials, is not installed in the build environment; "
            f"install '{REQUIREMENT}', or build with isolation"
        ) from None

    version = str(info["version"])
    root = Component(
        type=ComponentType.LIBRARY,
        bom_ref=package,
        name=package,
        version=version,
        licenses=[LicenseExpression(license)] if license else [],
        purl=PackageURL("pypi", None, package, version),
    )
    components = [
        Component(
            type=ComponentType.LIBRARY,
            bom_ref=part.name,
            name=part.name,
            version=part.version,
            description=part.description,
            licenses=[LicenseExpression(part.license)],
            purl=PackageURL(part.purl[0], part.purl[1] or None, part.purl[2], part.version),
        )
        for part in parts_of(info)
    ]
    seed = json.dumps(info, sort_keys=True)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, seed), components=components)
    bom.metadata.timestamp = None  # type: ignore[assignment]  # written only when there is one
    bom.metadata.component = root
    for key, text in sorted(info.get("toolchain", {}).items()):
        if key in ("cxx", "cuda", "rocm", "cmake"):
            name, _, number = text.rpartition(" ")
            bom.metadata.tools.components.add(
                Component(
                    type=ComponentType.APPLICATION, bom_ref=f"tool-{key}", name=name or key, version=number
                )
            )
    bom.register_dependency(root, components)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
