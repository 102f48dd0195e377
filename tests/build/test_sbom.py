"""The bill of materials: what it lists for each kind of build, the same for equal builds, and a valid file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from pelton_build import sbom
from pelton_build.errors import PlanError

CPU: Mapping[str, Any] = {
    "version": "0.1.0+cpu.avx2",
    "backend": "cpu",
    "static_libstdcxx": True,
    "toolchain": {"cxx": "gcc 12.2.0", "cmake": "4.1.0", "pybind11": "3.1.0", "torch-headers": "2.13.0+cpu"},
}
CUDA = {
    **CPU,
    "version": "0.1.0+cu130.sm90",
    "backend": "cuda",
    "toolchain": {**CPU["toolchain"], "cuda": "nvcc 13.0.88", "cutlass": "4.2.0.0"},
}


@pytest.mark.parametrize(
    ("info", "parts"),
    [
        (CPU, [("libstdc++", "12.2.0"), ("pybind11", "3.1.0"), ("torch", "2.13.0+cpu")]),
        ({**CPU, "static_libstdcxx": False}, [("pybind11", "3.1.0"), ("torch", "2.13.0+cpu")]),
        (
            CUDA,
            [
                ("libstdc++", "12.2.0"),
                ("cudart", "13.0.88"),
                ("pybind11", "3.1.0"),
                ("torch", "2.13.0+cpu"),
                ("cutlass", "4.2.0.0"),
            ],
        ),
        ({"version": "0.1.0", "backend": "cpu"}, []),
    ],
)
def test_parts(info: Mapping[str, Any], parts: list[tuple[str, str]]) -> None:
    assert [(part.name, part.version) for part in sbom.parts_of(info)] == parts
    assert all(part.license and part.description for part in sbom.parts_of(info))


@pytest.mark.parametrize("info", [CPU, CUDA])
def test_file(info: Mapping[str, Any]) -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed")
    text = sbom.render(info, "pelton", "Apache-2.0")
    assert text == sbom.render(dict(reversed(info.items())), "pelton", "Apache-2.0")
    made = json.loads(text)
    assert made["metadata"]["component"]["version"] == info["version"]
    assert "timestamp" not in made["metadata"]
    assert {c["name"]: c["version"] for c in made["components"]} == {
        part.name: part.version for part in sbom.parts_of(info)
    }
    tools = {tool["name"]: tool["version"] for tool in made["metadata"]["tools"]["components"]}
    assert tools["gcc"] == "12.2.0" and ("nvcc" in tools) == (info is CUDA)
    (of,) = [entry for entry in made["dependencies"] if entry["ref"] == "pelton"]
    assert set(of["dependsOn"]) == {part.name for part in sbom.parts_of(info)}


def test_file_is_valid_cyclonedx() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.exception import MissingOptionalDependencyException
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    try:
        error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(
            sbom.render(CUDA, "pelton", "Apache-2.0")
        )
    except MissingOptionalDependencyException as missing:
        pytest.skip(str(missing))
    assert error is None


def test_serial_number_follows_from_the_build() -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed")
    numbers = {json.loads(sbom.render(info, "pelton", ""))["serialNumber"] for info in (CPU, CUDA, dict(CPU))}
    assert len(numbers) == 2


def test_missing_library_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cyclonedx.model.bom", None)
    with pytest.raises(PlanError, match="install 'cyclonedx-python-lib"):
        sbom.render(CPU, "pelton", "Apache-2.0")
