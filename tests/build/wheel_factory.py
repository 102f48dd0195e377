"""Small wheels for the tests: a good one that passes the whole audit, and parts to spoil it with."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
import stat
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import code_object_factory as amd
from device_factory import K, assembled, container, cubin, image, ptx

LIBRARY = """
const char *op_source(void) { return "./kernels/norm/op.cpp"; }
typedef float v8 __attribute__((vector_size(32)));
void pelton_scale(v8 *x, float s) { v8 f = {s, s, s, s, s, s, s, s}; *x = *x * f + f; }
"""
LIBRARY_BASELINE = """
const char *op_source(void) { return "./kernels/norm/op.cpp"; }
int pelton_scale(int x) { return 3 * x; }
"""
LIBRARY_512 = (
    LIBRARY.replace("vector_size(32)", "vector_size(64)")
    .replace("v8", "v16")
    .replace("{s, s, s, s, s, s, s, s}", "{s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s}")
)
HOST = """
const char marker[] = "PELTON_HOST_SOABI=cpython-311-x86_64-linux-gnu";
const char *host_marker(void) { return marker; }
void *PyInit__host(void) { return 0; }
"""
HOST_NAME = "pelton/_host.cpython-311-x86_64-linux-gnu.so"
LIBRARY_NAME = "pelton/libpelton.so"


@cache
def shared_object(source: str, *flags: str) -> bytes:
    """A stripped shared object of C source that needs nothing of the C library unless `flags` say so."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "these tests compile small shared objects: install gcc (Debian: apt-get install gcc)"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.c"
        path.write_text(source)
        out = Path(folder) / "x.so"
        base = [compiler, "-shared", "-fPIC", "-O2", "-w", "-nostartfiles", "-Wl,--as-needed"]
        strip = [] if "-g" in flags else ["-s"]
        result = subprocess.run(
            [*base, *strip, "-o", str(out), "x.c", *flags],
            check=False,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return out.read_bytes()


INFO: dict[str, Any] = {
    "profile": "cpu-avx2",
    "backend": "cpu",
    "archs": ["x86-64-v3"],
    "version": "0.1.0+cpu.avx2",
    "label": "cpu.avx2",
    "platform_tag": "manylinux_2_28_x86_64",
    "glibc": "2.28",
    "size_budget": 5 << 20,
    "torch_floor": "2.10",
    "library": "libpelton.so",
    "features": {"awq": False, "fast-math": False, "gptq": False, "marlin": False},
    "host_pythons": ["3.11"],
    "toolchain": {"cxx": "gcc 12.2.0"},
    "plan": {
        "sources": [
            {"path": "norm/op.cpp", "family": "norm", "role": "op", "archs": []},
            {"path": "norm/cpu.cpp", "family": "norm", "role": "cpu", "archs": ["x86-64-v3"]},
        ]
    },
}
CUDA_COMMON = (
    image(ptx((), "sm_90"), "compute_90", "common/gpu.cu"),
    image(cubin(()), "sm_90a", "common/gpu.cu"),
)
CUDA_INFO: dict[str, Any] = {
    **INFO,
    "profile": "cuda-sm90",
    "backend": "cuda",
    "archs": ["sm_90a", "compute_90"],
    "version": "0.1.0+cu130.sm90",
    "label": "cu130.sm90",
    "toolchain": {"cxx": "gcc 12.2.0", "cuda": "nvcc 13.0.88"},
    "plan": {
        "sources": [
            {
                "path": "common/gpu.cu",
                "family": "common",
                "role": "gpu",
                "archs": ["sm_90a", "compute_90"],
                "support": True,
            },
            {"path": "norm/op.cpp", "family": "norm", "role": "op", "archs": []},
            {"path": "norm/gpu.cu", "family": "norm", "role": "gpu", "archs": ["sm_90a", "compute_90"]},
        ]
    },
}


ROCM_INFO: dict[str, Any] = {
    **INFO,
    "profile": "rocm-gfx1100",
    "backend": "rocm",
    "archs": ["gfx90a", "gfx1100"],
    "version": "0.1.0+rocm.gfx1100",
    "label": "rocm.gfx1100",
    "toolchain": {"cxx": "gcc 12.2.0", "rocm": "hip-clang 6.4.1"},
    "plan": {
        "sources": [
            {"path": "common/gpu.cu", "family": "common", "role": "gpu", "archs": ["gfx90a", "gfx1100"], "support": True},
            {"path": "norm/op.cpp", "family": "norm", "role": "op", "archs": []},
            {"path": "norm/gpu.cu", "family": "norm", "role": "gpu", "archs": ["gfx90a", "gfx1100"]},
        ],
        "matrix": {"norm": ["gfx90a", "gfx1100"]},
    },
}  # fmt: skip


@dataclass(frozen=True)
class WheelParts:
    """What a wheel is made of; the defaults are the good wheel of profile cpu-avx2."""

    version: str = "0.1.0+cpu.avx2"
    name: str = "pelton"
    tag: str = "py3-none-manylinux_2_28_x86_64"
    file_name: str = ""
    info: Mapping[str, Any] = field(default_factory=lambda: copy.deepcopy(INFO))
    metadata: str = (
        "Metadata-Version: 2.4\nName: pelton\nVersion: {version}\nRequires-Python: >=3.11\n"
        "Requires-Dist: torch>=2.10\nRequires-Dist: numpy\nLicense-File: LICENSE\n\nText.\n"
    )
    wheel: str = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files: Mapping[str, bytes] = field(default_factory=dict)  # added or replaced
    without: tuple[str, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict)
    record: Mapping[str, str] = field(
        default_factory=dict
    )  # file -> its line in RECORD instead of the true one
    unlisted: tuple[str, ...] = ()

    def but(self, **changes: Any) -> WheelParts:
        return replace(self, **changes)

    def with_info(self, **changes: Any) -> WheelParts:
        return replace(self, info={**self.info, **changes})


def cuda_images(source: str = "norm/gpu.cu", *kernels: K) -> tuple[bytes, bytes]:
    """The images of a source in the good CUDA wheel: machine code and PTX."""
    listed = kernels or (K(),)
    return image(ptx(listed, "sm_90"), "compute_90", source), image(cubin(listed), "sm_90a", source)


def cuda(*sources: Sequence[bytes], records: int | None = None, extra: str = "") -> WheelParts:
    """The parts of a wheel of profile cuda-sm90 whose library holds these images, one fat binary for each source."""
    containers = [container(*images) for images in sources or (CUDA_COMMON, cuda_images())]
    source = LIBRARY_BASELINE + assembled(containers, records, extra)
    return WheelParts(version="0.1.0+cu130.sm90", info=copy.deepcopy(CUDA_INFO)).but(
        files={LIBRARY_NAME: shared_object(source)}
    )


def rocm_bundle(source: str = "norm/gpu.cu", **changes: Any) -> bytes:
    """The bundle of a source in the good ROCm wheel: two archs, the size of a wave and the matrix product of each."""
    return amd.bundle(
        amd.code_object([amd.G(**{"wave": 64, "code": (amd.MFMA,), **changes})], "gfx90a", source),
        amd.code_object([amd.G(**{"wave": 32, "code": (amd.WMMA,), **changes})], "gfx1100", source),
        archs=["gfx90a", "gfx1100"],
    )


def rocm(*bundles: bytes, records: int | None = None, extra: str = "") -> WheelParts:
    """The parts of a wheel for AMD GPUs whose library holds these bundles."""
    source = LIBRARY_BASELINE + amd.assembled(bundles or (rocm_bundle(),), records) + extra
    return WheelParts(version="0.1.0+rocm.gfx1100", info=copy.deepcopy(ROCM_INFO)).but(
        files={LIBRARY_NAME: shared_object(source)}
    )


def bill(info: Mapping[str, Any], **changes: Any) -> bytes:
    """A bill of materials: that of the good wheels, with other keys where `changes` say so."""
    cuda = {"name": "cudart", "version": "13.0.88", "licenses": [{"expression": "LicenseRef-X"}]}
    hip = [
        {"name": name, "version": "6.4.1", "licenses": [{"expression": "MIT"}]}
        for name in ("hip", "rocm-device-libs")
    ]
    made = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"name": "pelton", "version": info["version"]}},
        "components": {"cuda": [cuda], "rocm": hip}.get(info["backend"], []),
    }
    return json.dumps({**made, **changes}).encode()


def good_files() -> dict[str, bytes]:
    return {
        "pelton/__init__.py": b'"""The package."""\n',
        LIBRARY_NAME: shared_object(LIBRARY, "-march=x86-64-v3"),
        HOST_NAME: shared_object(HOST),
    }


def unlabelled(version: str = "0.1.0", profile: str = "cpu-avx2") -> WheelParts:
    """The parts of a good wheel without label."""
    return WheelParts(version=version).with_info(profile=profile, label="", version=version)


def labelled(
    profile: str, label: str, version: str = "0.1.0", archs: tuple[str, ...] = ("x86-64-v3",)
) -> WheelParts:
    """The parts of a good wheel of another profile, label or version."""
    parts = WheelParts(version=f"{version}+{label}")
    files = (
        {}
        if archs == ("x86-64-v3",)
        else {LIBRARY_NAME: shared_object(LIBRARY_512, "-march=x86-64-v4", "-mprefer-vector-width=512")}
    )
    return parts.with_info(profile=profile, label=label, version=parts.version, archs=list(archs)).but(
        files=files
    )


def make_wheel(folder: Path, parts: WheelParts = WheelParts()) -> Path:
    """Write the wheel into `folder` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    dist_info = f"{parts.name}-{parts.version}.dist-info"
    files = good_files()
    files["pelton/_build_info.json"] = json.dumps(parts.info).encode()
    files[f"{dist_info}/METADATA"] = parts.metadata.format(version=parts.version).encode()
    files[f"{dist_info}/WHEEL"] = parts.wheel.format(tag=parts.tag).encode()
    files[f"{dist_info}/licenses/LICENSE"] = b"License text\n"
    files[f"{dist_info}/sboms/pelton.cdx.json"] = bill(parts.info)
    files.update(parts.files)
    for name in parts.without:
        del files[name]
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if name not in parts.unlisted:
            lines.append(parts.record.get(name, f"{name},sha256={digest},{len(data)}"))
    lines += [line for name, line in parts.record.items() if name not in files]
    record = f"{dist_info}/RECORD"
    files[record] = "".join(f"{line}\n" for line in [*lines, f"{record},,"]).encode()
    path = folder / (parts.file_name or f"{parts.name}-{parts.version}-{parts.tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, date_time=(2026, 11, 30, 0, 0, 0))
            info.external_attr = (stat.S_IFREG | parts.modes.get(name, 0o644)) << 16
            if name in parts.modes and stat.S_IFMT(parts.modes[name]):
                info.external_attr = parts.modes[name] << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return path
