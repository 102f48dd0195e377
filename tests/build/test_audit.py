"""The audit: a good wheel passes whole, and for each check a wheel made bad on purpose fails just there."""

from __future__ import annotations

import getpass
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import code_object_factory as amd
from device_factory import K, assembled, container, cubin, image, mangled, ptx
from pelton_build import audit
from pelton_build.audit import AuditError, CannotRun, audit_wheel
from wheel_factory import (
    CUDA_COMMON,
    CUDA_INFO,
    HOST,
    HOST_NAME,
    INFO,
    LIBRARY,
    LIBRARY_512,
    LIBRARY_BASELINE,
    LIBRARY_NAME,
    ROCM_INFO,
    WheelParts,
    bill,
    cuda,
    cuda_images,
    good_files,
    labelled,
    make_wheel,
    rocm,
    rocm_bundle,
    shared_object,
)

pytest.importorskip(
    "elftools", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)
pytest.importorskip(
    "iced_x86", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)

GOOD = WheelParts()


def spoiled_library(*flags: str, source: str = LIBRARY, march: str = "x86-64-v3") -> WheelParts:
    return GOOD.but(files={LIBRARY_NAME: shared_object(source, f"-march={march}", *flags)})


def with_needed(library: str) -> WheelParts:
    """The good library with one more DT_NEEDED, as a linker writes it."""
    stub = shared_object("void stub(void){}", f"-Wl,-soname,{library}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stub.so"
        path.write_bytes(stub)
        return spoiled_library("-Wl,--no-as-needed", str(path))


def with_stack_flags(flags: int | None) -> WheelParts:
    """PT_GNU_STACK of the library patched: other flags, or the header made another one."""
    data = bytearray(shared_object(LIBRARY, "-march=x86-64-v3"))
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for index in range(count):
        at = offset + index * size
        if struct.unpack_from("<I", data, at)[0] == 0x6474E551:
            struct.pack_into("<I", data, at, 0 if flags is None else 0x6474E551)
            if flags is not None:
                struct.pack_into("<I", data, at + 4, flags)
    return GOOD.but(files={LIBRARY_NAME: bytes(data)})


def asking(instruction: str, *allowed: str) -> WheelParts:
    """A wheel for AVX-512 with an instruction, and a plan that allows some behind a question to the CPU."""
    parts = labelled("cpu-avx512", "cpu.avx512", archs=("x86-64-v4",))
    source = LIBRARY_512 + f'void f(void) {{ __asm__ volatile("{instruction}"); }}'
    library = shared_object(source, "-march=x86-64-v4", "-mprefer-vector-width=512")
    made = parts.with_info(plan={**parts.info["plan"], "run_time": list(allowed)})
    return made.but(files={LIBRARY_NAME: library})


def with_bill(**changes: Any) -> WheelParts:
    return GOOD.but(files={BILL: bill(GOOD.info, **changes)})


def with_cudart(**changes: Any) -> WheelParts:
    """A CUDA wheel on whose bill the runtime's entry is another."""
    (entry,) = json.loads(bill(CUDA_INFO))["components"]
    text = bill(CUDA_INFO, components=[{**entry, **changes}])
    parts = cuda()
    return parts.but(files={**parts.files, CUDA_BILL: text})


def cuda_library(source: str) -> WheelParts:
    return cuda().but(files={LIBRARY_NAME: shared_object(source)})


def spilling(local: int, allowed: int, *archs: str, kernel: str = "scale_kernel") -> WheelParts:
    """A CUDA wheel with a kernel that uses so much local memory, and a plan that allows it so much."""
    parts = cuda(CUDA_COMMON, cuda_images("norm/gpu.cu", K(local=local, loads=local // 4)))
    allowance = {
        "family": "norm",
        "kernel": kernel,
        "archs": archs,
        "bytes": allowed,
        "reason": "a test",
    }
    return parts.with_info(plan={**parts.info["plan"], "local_memory": [allowance]})


# Prints what a toolkit's dumper would say of the good CUDA wheel.
CUOBJDUMP = """#!/bin/sh
echo "ELF file    1: gpu.sm_90a.cubin"
echo "ELF file    2: gpu.sm_90a.cubin"
echo "PTX file    1: gpu.sm_90.ptx"
echo "PTX file    2: gpu.sm_90.ptx"
"""


@pytest.fixture
def cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cuobjdump first on PATH."""
    program = tmp_path / "bin" / "cuobjdump"
    program.parent.mkdir()
    program.write_text(CUOBJDUMP)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


DLOPEN = HOST + 'void *dlopen(const char *, int); void *f(void) { return dlopen("x", 1); }'
DIST_INFO = "pelton-0.1.0+cpu.avx2.dist-info"
BILL = f"{DIST_INFO}/sboms/pelton.cdx.json"
CUDA_BILL = "pelton-0.1.0+cu130.sm90.dist-info/sboms/pelton.cdx.json"
ROCM_BILL = "pelton-0.1.0+rocm.gfx1100.dist-info/sboms/pelton.cdx.json"
INIT = "pelton/__init__.py"

BAD: dict[str, tuple[Callable[[], WheelParts], str, str, str]] = {
    # what is wrong: parts, check, file, part of what was found
    "file name of another version": (
        lambda: GOOD.but(file_name="pelton-0.2.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl"), "name", "METADATA", "0.1.0+cpu.avx2"),
    "file name without the label": (
        lambda: GOOD.but(file_name="pelton-0.1.0-py3-none-manylinux_2_28_x86_64.whl"), "name", ".whl", "label (none)"),
    "file name of another distribution": (
        lambda: GOOD.but(file_name="pelten-0.1.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl"), "name", "METADATA", "name pelton"),
    "file name that is none": (lambda: GOOD.but(file_name="pelton.whl"), "name", "pelton.whl", "Invalid wheel"),
    "metadata of another version": (
        lambda: GOOD.but(metadata=GOOD.metadata.replace("{version}", "0.1.0+cpu.avx512")), "name", "METADATA", "cpu.avx512"),
    "metadata without a version": (
        lambda: GOOD.but(metadata=GOOD.metadata.replace("Version: {version}\n", "")), "name", "METADATA", "(none)"),
    "build info of another version": (lambda: GOOD.with_info(version="0.1.1+cpu.avx2"), "name", "_build_info.json", "0.1.1"),
    "variant label without properties": (
        lambda: GOOD.but(file_name="pelton-0.1.0+cpu.avx2-py3-none-manylinux_2_28_x86_64-cpu_avx2.whl"), "variant", "variant.json", "none"),
    "build info without label": (lambda: GOOD.with_info(label=""), "name", ".whl", "label cpu.avx2"),
    "build info of another label": (lambda: GOOD.with_info(label="cpu.avx512"), "name", ".whl", "cpu.avx2"),
    "renamed platform tag": (
        lambda: GOOD.but(file_name="pelton-0.1.0+cpu.avx2-py3-none-manylinux_2_17_x86_64.whl"), "name", "WHEEL", "2_28"),
    "per-Python tag": (
        lambda: GOOD.but(tag="cp311-cp311-manylinux_2_28_x86_64"), "name", ".whl", "cp311"),
    "build tag": (
        lambda: GOOD.but(file_name="pelton-0.1.0+cpu.avx2-1-py3-none-manylinux_2_28_x86_64.whl"), "name", ".whl", "build tag 1"),
    "pure": (lambda: GOOD.but(wheel=GOOD.wheel.replace("false", "true")), "name", "WHEEL", "true"),
    "no Requires-Python": (
        lambda: GOOD.but(metadata=GOOD.metadata.replace("Requires-Python: >=3.11\n", "")), "metadata", "METADATA", "no Requires-Python"),
    "no torch": (lambda: GOOD.but(metadata=GOOD.metadata.replace("Requires-Dist: torch>=2.10\n", "")), "metadata", "METADATA", "no torch"),
    "torch floor of another version": (
        lambda: GOOD.but(metadata=GOOD.metadata.replace("torch>=2.10", "torch>=2.9")), "metadata", "METADATA", ">=2.9"),
    "no license": (lambda: GOOD.but(without=(f"{DIST_INFO}/licenses/LICENSE",)), "metadata", DIST_INFO, "no LICENSE"),
    "library missing": (lambda: GOOD.but(without=(LIBRARY_NAME,)), "contents", LIBRARY_NAME, "missing"),
    "module of a planned Python missing": (
        lambda: GOOD.with_info(host_pythons=["3.11", "3.12"]), "contents", "_host.cpython-312", "missing"),
    "another binary": (
        lambda: GOOD.but(files={"pelton/libother.so": shared_object("int x;")}), "contents", "libother.so", "not in the plan"),
    "library that is no ELF file": (
        lambda: GOOD.but(files={"pelton/libtext.so": b"text"}), "contents", "libtext.so", "no ELF"),
    "forged hash": (
        lambda: GOOD.but(record={INIT: f"{INIT},sha256=AAAA,22"}), "record", INIT, "sha256=AAAA"),
    "forged size": (
        lambda: GOOD.but(record={"pelton/x.py": "pelton/x.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,7"}, files={"pelton/x.py": b""}),
        "record", "pelton/x.py", "size 7"),
    "weak hash": (lambda: GOOD.but(record={INIT: f"{INIT},md5=AAAA,22"}), "record", INIT, "md5"),
    "file not in RECORD": (lambda: GOOD.but(unlisted=(INIT,)), "record", INIT, "not listed"),
    "RECORD lists a missing file": (
        lambda: GOOD.but(record={"pelton/gone.py": "pelton/gone.py,sha256=AAAA,1"}), "record", "pelton/gone.py", "not in the wheel"),
    "umask 077": (lambda: GOOD.but(modes={INIT: 0o600}), "modes", INIT, "0600"),
    "umask 000": (lambda: GOOD.but(modes={INIT: 0o666}), "modes", INIT, "0666"),
    "symbolic link": (lambda: GOOD.but(modes={INIT: 0o120755}), "modes", INIT, "symbolic link"),
    "names that differ in case": (lambda: GOOD.but(files={"pelton/__INIT__.py": b""}), "modes", "__INIT__", "same name"),
    "file beside the package": (lambda: GOOD.but(files={"setup.py": b""}), "modes", "setup.py", "outside"),
    "glibc above the floor": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(DLOPEN, "-lc")}), "floors", HOST_NAME, "GLIBC_2.34 of libc.so.6"),
    "auditwheel sees it too": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(DLOPEN, "-lc")}), "auditwheel", ".whl", "manylinux_2_34"),
    "musl": (lambda: with_needed("libc.musl-x86_64.so.1"), "needed", LIBRARY_NAME, "libc.musl-x86_64.so.1"),
    "HIP runtime": (lambda: with_needed("libamdhip64.so.6"), "needed", LIBRARY_NAME, "libamdhip64.so.6"),
    "CUDA runtime": (lambda: with_needed("libcudart.so.13"), "needed", LIBRARY_NAME, "libcudart.so.13"),
    "CUDA driver": (lambda: with_needed("libcuda.so.1"), "needed", LIBRARY_NAME, "libcuda.so.1"),
    "torch's CUDA library": (lambda: with_needed("libtorch_cuda.so"), "needed", LIBRARY_NAME, "libtorch_cuda.so"),
    "torch's HIP library": (lambda: with_needed("libtorch_hip.so"), "needed", LIBRARY_NAME, "libtorch_hip.so"),
    "a family without its operators": (
        lambda: GOOD.but(files={LIBRARY_NAME: shared_object(LIBRARY.replace("norm/op", "rope/op"), "-march=x86-64-v3")}),
        "operators", LIBRARY_NAME, "no operator of family norm"),
    "operators that the plan does not have": (
        lambda: spoiled_library(source=LIBRARY + 'const char *f(void) { return "./kernels/rope/op.cpp"; }'),
        "operators", LIBRARY_NAME, "operators of rope/op.cpp"),
    "device code in a CPU wheel": (
        lambda: spoiled_library(source=LIBRARY + assembled([container(*cuda_images())])), "archs", LIBRARY_NAME, "device code (.nv_fatbin)"),
    "HIP code in a CPU wheel": (
        lambda: spoiled_library(source=LIBRARY + assembled([], extra=".hip_fatbin")), "archs", LIBRARY_NAME, "device code (.hip_fatbin)"),
    "device code in a per-Python module": (
        lambda: cuda().but(files={HOST_NAME: shared_object(HOST + assembled([container(*cuda_images())]))}), "archs", HOST_NAME, "device code"),
    "no device code at all": (lambda: cuda_library(LIBRARY_BASELINE), "archs", LIBRARY_NAME, "no machine code for sm_90a of norm/gpu.cu (family norm); there is none"),
    "a plan without GPU sources": (lambda: cuda().with_info(plan={}), "archs", "_build_info.json", "no GPU source"),
    "a family without machine code": (
        lambda: cuda(CUDA_COMMON, cuda_images()[:1]), "archs", LIBRARY_NAME, "no machine code for sm_90a of norm/gpu.cu (family norm); there is compute_90"),
    "a family without PTX": (lambda: cuda(CUDA_COMMON, cuda_images()[1:]), "archs", LIBRARY_NAME, "no PTX for compute_90 of norm/gpu.cu"),
    "a family that is not there": (lambda: cuda(CUDA_COMMON), "archs", LIBRARY_NAME, "of norm/gpu.cu (family norm); there is none"),
    "a family without kernels": (lambda: cuda(CUDA_COMMON, [image(ptx((), "sm_90"), "compute_90"), image(cubin(()))]), "archs", LIBRARY_NAME, "no kernel of family norm"),
    "machine code for sm_90 and not for sm_90a": (
        lambda: cuda(CUDA_COMMON, [cuda_images()[0], image(cubin(arch="sm_90"), "sm_90")]), "archs", LIBRARY_NAME, "no machine code for sm_90a"),
    "an arch that the plan does not name": (
        lambda: cuda(CUDA_COMMON, [*cuda_images(), image(cubin(arch="sm_80"), "sm_80")]), "archs", LIBRARY_NAME, "machine code for sm_80 of norm/gpu.cu"),
    "PTX that the plan does not name": (
        lambda: cuda(CUDA_COMMON, [*cuda_images(), image(ptx(arch="sm_80"), "compute_80")]), "archs", LIBRARY_NAME, "PTX for compute_80 of norm/gpu.cu"),
    "an arch twice": (lambda: cuda(CUDA_COMMON, [*cuda_images(), cuda_images()[1]]), "archs", LIBRARY_NAME, "2 times"),
    "machine code that is marked as another arch's": (
        lambda: cuda(CUDA_COMMON, [cuda_images()[0], image(cubin(arch="sm_80"), "sm_90a")]), "archs", LIBRARY_NAME, "marked sm_90a, compiled for sm_80"),
    "PTX that is marked as another arch's": (
        lambda: cuda(CUDA_COMMON, [image(ptx(arch="sm_80"), "compute_90"), cuda_images()[1]]), "archs", LIBRARY_NAME, "marked compute_90, compiled for compute_80"),
    "a source that the plan does not have": (
        lambda: cuda(CUDA_COMMON, cuda_images(), cuda_images("rope/gpu.cu")), "archs", LIBRARY_NAME, "of rope/gpu.cu (kernels scale_kernel)"),
    "device code without a source's name": (
        lambda: cuda(CUDA_COMMON, cuda_images(), cuda_images("")), "archs", LIBRARY_NAME, "of a source without a name"),
    "a kernel of another file": (
        lambda: cuda(CUDA_COMMON, cuda_images("norm/gpu.cu", K(mangled("scale_kernel", "gpu_sm90_cu")))), "archs", LIBRARY_NAME, "from a file gpu_sm90_cu"),
    "a kernel for one of the archs only": (
        lambda: cuda(CUDA_COMMON, [cuda_images()[0], cuda_images("norm/gpu.cu", K(), K(mangled("other_kernel")))[1]]),
        "archs", LIBRARY_NAME, "1 kernels of norm/gpu.cu (family norm) not compiled for compute_90: other_kernel"),
    "relocatable device code": (lambda: cuda(extra="__nv_relfatbin"), "archs", LIBRARY_NAME, "relocatable device code"),
    "device code that nobody registers": (lambda: cuda(records=1), "archs", LIBRARY_NAME, "2 fat binaries, of which 1"),
    "damaged device code": (
        lambda: cuda_library(LIBRARY_BASELINE + assembled([container(*cuda_images())[:-8]])), "archs", LIBRARY_NAME, "damaged device code"),
    "a kernel that spills": (
        lambda: cuda(CUDA_COMMON, cuda_images("norm/gpu.cu", K(local=64, loads=2, stores=1))), "local", LIBRARY_NAME, "64 bytes of local memory a thread (1 stores, 2 loads, 24 registers) in scale_kernel of norm/gpu.cu on sm_90a"),
    "a kernel that spills more than it may": (
        lambda: spilling(64, 32), "local", LIBRARY_NAME, "64 bytes"),
    "a kernel that may spill on another arch": (lambda: spilling(32, 32, "sm_80"), "local", LIBRARY_NAME, "32 bytes"),
    "an allowance for a kernel that is not there": (
        lambda: spilling(0, 32, kernel="scael_kernel"), "local", "_build_info.json", "scael_kernel of family norm, which is not there"),
    "cuobjdump finds other images": (lambda: cuda(CUDA_COMMON, cuda_images()[:1]), "cuobjdump", LIBRARY_NAME, "1 cubin sm_90a"),
    "no AMD code for an arch": (
        lambda: rocm(amd.bundle(amd.code_object([amd.G(wave=64)], "gfx90a"), archs=["gfx90a"])), "archs", LIBRARY_NAME, "no machine code for gfx1100 of norm/gpu.cu"),
    "AMD code for another arch": (
        lambda: rocm(amd.bundle(amd.code_object(arch="gfx942"), archs=["gfx942"])), "archs", LIBRARY_NAME, "machine code for gfx942 of norm/gpu.cu"),
    "a code object under another arch's name": (
        lambda: rocm(amd.bundle(amd.code_object(arch="gfx1101"), archs=["gfx1100"])), "archs", LIBRARY_NAME, "marked gfx1100, compiled for gfx1101"),
    "AMD code of a source that is not in the plan": (lambda: rocm(rocm_bundle(), rocm_bundle("awq/gpu.cu")), "archs", LIBRARY_NAME, "of a source without a name (kernels scale_kernel)"),
    "an AMD family without its code": (lambda: rocm(rocm_bundle("common/gpu.cu")), "archs", LIBRARY_NAME, "of norm/gpu.cu"),
    "a kernel that one AMD arch lacks": (
        lambda: rocm(amd.bundle(amd.code_object([amd.G(wave=64)], "gfx90a"), amd.code_object([], "gfx1100"), archs=["gfx90a", "gfx1100"])),
        "archs", LIBRARY_NAME, "1 kernels of norm/gpu.cu (family norm) not compiled for gfx1100: scale_kernel"),
    "AMD code that is not registered": (lambda: rocm(records=0), "archs", LIBRARY_NAME, "1 fat binaries, of which 0 are registered"),
    "damaged AMD code": (lambda: rocm(rocm_bundle()[:-200] + b"x" * 100), "archs", LIBRARY_NAME, "damaged device code"),
    "AMD code in a CUDA wheel": (
        lambda: cuda(CUDA_COMMON, cuda_images(), extra=".hip_fatbin"), "archs", LIBRARY_NAME, "device code (.hip_fatbin)"),
    "an AMD kernel that spills": (lambda: rocm(rocm_bundle(scratch=64, spilled=3)), "local", LIBRARY_NAME, "64 bytes of local memory a thread (3 stores"),
    "a code object of another version": (
        lambda: rocm(amd.bundle(amd.code_object([amd.G(wave=64)], "gfx90a", abi=4), amd.code_object(abi=1), archs=["gfx90a", "gfx1100"])), "amdgpu", LIBRARY_NAME, "a code object of version 6, norm/gpu.cu for gfx90a"),
    "a wave of another size": (lambda: rocm(rocm_bundle(wave=64)), "amdgpu", LIBRARY_NAME, "waves of 64 lanes in scale_kernel of norm/gpu.cu for gfx1100"),
    "more shared memory than there is": (lambda: rocm(rocm_bundle(shared=65537)), "amdgpu", LIBRARY_NAME, "65537 bytes of shared memory a block in scale_kernel"),
    "no matrix instruction": (lambda: rocm(rocm_bundle(code=(amd.NOTHING,))), "amdgpu", LIBRARY_NAME, "no matrix instruction for gfx90a in family norm"),
    "a HIP runtime that is needed": (lambda: with_needed("libamdhip64.so.6"), "needed", LIBRARY_NAME, "libamdhip64.so.6"),
    "HIP is not on the bill": (
        lambda: rocm().but(files={**rocm().files, ROCM_BILL: bill(ROCM_INFO, components=[])}), "sbom", ROCM_BILL, "rocm-device-libs is not listed"),
    "OpenMP": (lambda: with_needed("libgomp.so.1"), "needed", LIBRARY_NAME, "libgomp.so.1"),
    "libstdc++": (lambda: with_needed("libstdc++.so.6"), "needed", LIBRARY_NAME, "libstdc++.so.6"),
    "libc10": (lambda: with_needed("libc10.so"), "needed", LIBRARY_NAME, "libc10.so"),
    "libpython": (lambda: with_needed("libpython3.11.so.1.0"), "needed", LIBRARY_NAME, "libpython3.11"),
    "RUNPATH": (lambda: spoiled_library("-Wl,-rpath,/opt/torch/lib"), "rpath", LIBRARY_NAME, "RUNPATH /opt/torch/lib"),
    "RPATH": (
        lambda: spoiled_library("-Wl,--disable-new-dtags,-rpath,$ORIGIN"), "rpath", LIBRARY_NAME, "RPATH $ORIGIN"),
    "Python symbol in the library": (
        lambda: spoiled_library(source=LIBRARY + "void *PyList_New(long); void *f(void) { return PyList_New(1); }"),
        "abi", LIBRARY_NAME, "PyList_New"),
    "torch's C++ interface": (
        lambda: spoiled_library(source=LIBRARY + "void _ZN2at6TensorC1Ev(void); void f(void) { _ZN2at6TensorC1Ev(); }"),
        "abi", LIBRARY_NAME, "_ZN2at6TensorC1Ev"),
    "a function of a newer torch": (
        lambda: spoiled_library(source=LIBRARY + "int torch_from_blob(void); int f(void) { return torch_from_blob(); }"),
        "torch-abi", LIBRARY_NAME, "torch_from_blob of torch 2.11.0"),
    "a function that no torch has": (
        lambda: spoiled_library(source=LIBRARY + "int aoti_torch_none(void); int f(void) { return aoti_torch_none(); }"),
        "torch-abi", LIBRARY_NAME, "aoti_torch_none, in no torch that is known"),
    "torch's C++ classes in a signature": (
        lambda: spoiled_library(source=LIBRARY + "int _Z3useRKN2at6TensorE(void*); int f(void) { return _Z3useRKN2at6TensorE(0); }"),
        "torch-abi", LIBRARY_NAME, "use(at::Tensor const&) of torch"),
    "torch in a per-Python module": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(HOST + "int torch_from_blob(void); int f(void) { return torch_from_blob(); }")}),
        "torch-abi", HOST_NAME, "torch_from_blob"),
    "module of another Python under this name": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(HOST.replace("311", "312"))}), "python", HOST_NAME, "built for cpython-312"),
    "module that does not say its Python": (
        lambda: GOOD.but(files={HOST_NAME: shared_object("void *PyInit__host(void) { return 0; }")}), "python", HOST_NAME, "unknown Python"),
    "module without its entry": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(HOST.replace("PyInit__host", "PyInit_host"))}), "python", HOST_NAME, "no module init"),
    "module with a name that Python ignores": (
        lambda: GOOD.but(files={"pelton/_host.so": shared_object(HOST)}), "python", "pelton/_host.so", "_host.so"),
    "stray per-Python binary": (
        lambda: GOOD.but(files={"pelton/ops.cpython-312-x86_64-linux-gnu.so": shared_object("int x;")}),
        "python", "ops.cpython-312", "per-Python"),
    "AVX-512 in an AVX2 wheel": (
        lambda: spoiled_library("-mprefer-vector-width=512", source=LIBRARY_512, march="x86-64-v4"), "isa", LIBRARY_NAME, "AVX512F"),
    "one EVEX instruction": (
        lambda: spoiled_library(source=LIBRARY + 'void f(void) { __asm__ volatile(".byte 0x62,0xf1,0x7c,0x48,0x58,0xc1"); }'),
        "isa", LIBRARY_NAME, "vaddps"),
    "a mask instruction": (
        lambda: spoiled_library(source=LIBRARY + 'void f(void) { __asm__ volatile("kmovw %eax, %k1"); }'), "isa", LIBRARY_NAME, "kmovw"),
    "an extension that is in no level": (
        lambda: spoiled_library(source=LIBRARY + 'void f(void) { __asm__ volatile("vaesenc %xmm0, %xmm0, %xmm0"); }'), "isa", LIBRARY_NAME, "AES"),
    "a library below the level that it names": (lambda: spoiled_library(march="x86-64", source="int f(int x) { return x + 1; }"), "isa", LIBRARY_NAME, "no instruction of x86-64-v3"),
    "an extension that the plan does not have for this arch": (
        lambda: asking("vpdpbusd %zmm1, %zmm2, %zmm3", "AVX_VNNI"), "isa", LIBRARY_NAME, "AVX512_VNNI"),
    "no instruction of what the plan says that is asked for": (
        lambda: asking("nop", "AVX512_VNNI"), "isa", LIBRARY_NAME, "no instruction of AVX512_VNNI"),
    "AVX before the guard": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(HOST + LIBRARY, "-march=x86-64-v3")}), "isa", HOST_NAME, "AVX"),
    "POPCNT before the guard": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(HOST + "int f(int x) { return __builtin_popcount(x); }", "-mpopcnt")}), "isa", HOST_NAME, "POPCNT"),
    "another machine": (
        lambda: GOOD.but(files={LIBRARY_NAME: _patched(18, b"\xb7\x00")}), "isa", LIBRARY_NAME, "EM_AARCH64"),
    "no bill of materials": (lambda: GOOD.but(without=(BILL,)), "sbom", BILL, "missing"),
    "a bill that is no JSON": (lambda: GOOD.but(files={BILL: b"{"}), "sbom", BILL, "not readable"),
    "a bill of another kind": (lambda: with_bill(bomFormat="SPDX"), "sbom", BILL, "SPDX 1.6"),
    "a bill without a subject": (lambda: with_bill(metadata={}), "sbom", BILL, "not readable"),
    "the bill of another version": (
        lambda: with_bill(metadata={"component": {"name": "pelton", "version": "0.0.1"}}), "sbom", BILL, "of pelton 0.0.1"),
    "a bill with a time stamp": (
        lambda: with_bill(metadata={"timestamp": "2026-01-01T00:00:00Z", "component": {"name": "pelton", "version": GOOD.version}}),
        "sbom", BILL, "a time stamp"),
    "CUDA's runtime is not on the bill": (
        lambda: cuda().but(files={**cuda().files, CUDA_BILL: bill(CUDA_INFO, components=[])}), "sbom", CUDA_BILL, "cudart is not listed"),
    "another version of it": (
        lambda: with_cudart(version="12.8"), "sbom", CUDA_BILL, "cudart 12.8"),
    "no license of it": (lambda: with_cudart(licenses=[]), "sbom", CUDA_BILL, "cudart without a license"),
    "libstdc++ is not on the bill": (
        lambda: spoiled_library(source=LIBRARY + 'const char *f(void) { return "\\0St9bad_alloc\\0"; }'), "sbom", BILL, "libstdc++ is not listed"),
    "pybind11 is not on the bill": (
        lambda: GOOD.but(files={HOST_NAME: shared_object(HOST + 'const char *f(void) { return "__pybind11_internals_v11"; }')}),
        "sbom", BILL, "pybind11 is not listed"),
    "torch's headers are not on the bill": (lambda: with_needed("libtorch_cpu.so"), "sbom", BILL, "torch is not listed"),
    "CUTLASS is not on the bill": (
        lambda: cuda(CUDA_COMMON, cuda_images("norm/gpu.cu", K("_ZN7cutlass6kernelEv"))), "sbom", CUDA_BILL, "cutlass is not listed"),
    "something that is not there is on the bill": (
        lambda: with_bill(components=[{"name": "cudart", "version": "13.0.88"}]), "sbom", BILL, "cudart is listed"),
    "path of the checkout": (
        lambda: GOOD.but(files={INIT: f'ROOT = "{Path(audit.__file__).resolve().parents[2]}"\n'.encode()}), "paths", INIT, str(Path(audit.__file__).resolve().parents[2])),
    "home folder in a text": (lambda: GOOD.but(files={INIT: b"# see /home/ada/notes.txt\n"}), "paths", INIT, "/home/ada/notes.txt"),
    "build folder in the library": (
        lambda: spoiled_library(source=LIBRARY + 'const char *f(void) { return "/builds/team/kernels/norm/cpu.cpp"; }'), "paths", LIBRARY_NAME, "/builds/team"),
    "include folder among the compiler's options": (
        lambda: spoiled_library(source=LIBRARY + 'const char *f(void) { return "gcc -O2 -I/builds/team/include"; }'), "paths", LIBRARY_NAME, "/builds/team"),
    "user's name in a path": (
        lambda: GOOD.but(files={INIT: f"# /scratch/{getpass.getuser()}/x.py\n".encode()}), "paths", INIT, f"/scratch/{getpass.getuser()}/"),
    "temporary folder in the build info": (
        lambda: GOOD.with_info(torch="/tmp/pip-build-env-x/overlay"), "paths", "_build_info.json", "/tmp/pip-build-env-x"),
    "over the budget": (lambda: GOOD.with_info(size_budget=1000), "size", ".whl", "bytes"),
    "executable stack": (lambda: with_stack_flags(7), "stack", LIBRARY_NAME, "RWE"),
    "no stack header": (lambda: with_stack_flags(None), "stack", LIBRARY_NAME, "no PT_GNU_STACK"),
    "debug information": (lambda: spoiled_library("-g"), "stripped", LIBRARY_NAME, ".debug_info"),
}  # fmt: skip


OPTIONAL = {"auditwheel": "auditwheel", "torch-abi": "torch_abi_audit"}
"""Checks that ask another program's library, and that library: the rest of the audit stands without it."""


def _patched(offset: int, value: bytes) -> bytes:
    data = bytearray(shared_object(LIBRARY, "-march=x86-64-v3"))
    data[offset : offset + len(value)] = value
    return bytes(data)


def test_good_wheel_passes(tmp_path: Path) -> None:
    report = audit_wheel(make_wheel(tmp_path))
    assert report.findings == ()
    assert [result.name for result in report.results] == list(audit.CHECKS)
    assert {result.name for result in report.skipped} <= set(OPTIONAL)


@pytest.mark.parametrize(
    ("parts", "nothing"),
    [
        (GOOD, {"variant", "archs", "local", "cuobjdump", "amdgpu"}),
        (cuda(), {"variant", "amdgpu"}),
        (rocm(), {"variant", "cuobjdump"}),
    ],
    ids=["cpu", "cuda", "rocm"],
)
def test_what_is_not_there_is_not_said_to_have_passed(
    parts: WheelParts, nothing: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = audit_wheel(make_wheel(tmp_path, parts))
    assert {result.name for result in report.results if result.nothing} == nothing
    audit.render(report)
    assert capsys.readouterr().out.count(" not there ") == len(nothing)


def test_good_avx512_wheel_passes(tmp_path: Path) -> None:
    parts = labelled("cpu-avx512", "cpu.avx512", archs=("x86-64-v4",))
    assert audit_wheel(make_wheel(tmp_path, parts)).findings == ()


def test_instructions_that_the_plan_allows_behind_a_question(tmp_path: Path) -> None:
    parts = asking("vpdpbusd %zmm1, %zmm2, %zmm3", "AVX512_VNNI")
    assert audit_wheel(make_wheel(tmp_path, parts), only={"isa"}).findings == ()


def test_paths_that_are_nobodys_are_allowed(tmp_path: Path) -> None:
    text = b"# see tests/build/x.py, kernels/norm/cpu.cpp, /proc/cpuinfo, /p/<profile>/simple/ and https://a.example/home/x\n"
    assert audit_wheel(make_wheel(tmp_path, GOOD.but(files={INIT: text})), only={"paths"}).findings == ()


def test_dirty_mark_after_the_label_is_allowed(tmp_path: Path) -> None:
    parts = GOOD.but(version="0.1.0.dev3+cpu.avx2.dirty").with_info(version="0.1.0.dev3+cpu.avx2.dirty")
    assert audit_wheel(make_wheel(tmp_path, parts)).findings == ()


def test_good_cuda_wheel_passes(tmp_path: Path, cuobjdump: None) -> None:
    report = audit_wheel(make_wheel(tmp_path, cuda()))
    assert report.findings == ()
    assert {result.name for result in report.skipped} <= set(OPTIONAL)
    (use,) = report.to_json()["kernels"]
    assert (use["family"], use["source"], use["arch"], use["registers"], use["local"]) == (
        "norm",
        "norm/gpu.cu",
        "sm_90a",
        24,
        0,
    )


def test_good_rocm_wheel_passes(tmp_path: Path) -> None:
    report = audit_wheel(make_wheel(tmp_path, rocm()))
    assert report.findings == ()
    assert {result.name for result in report.skipped} <= set(OPTIONAL)
    uses = report.to_json()["kernels"]
    assert [(use["family"], use["arch"], use["registers"]) for use in uses] == [
        ("norm", "gfx90a", 24),
        ("norm", "gfx1100", 24),
    ]


def test_scratch_memory_that_the_plan_allows(tmp_path: Path) -> None:
    parts = rocm(rocm_bundle(scratch=80, spilled=2))
    allowed = {
        "family": "norm",
        "kernel": "scale_kernel",
        "archs": ["gfx90a", "gfx1100"],
        "bytes": 80,
        "reason": "x",
    }
    plan = {**parts.info["plan"], "local_memory": [allowed]}
    assert audit_wheel(make_wheel(tmp_path, parts.with_info(plan=plan)), only={"local"}).findings == ()


def test_local_memory_that_the_plan_allows(tmp_path: Path) -> None:
    for archs in ((), ("sm_90a",), ("sm_80", "sm_90a")):
        assert audit_wheel(make_wheel(tmp_path, spilling(32, 32, *archs)), only={"local"}).findings == ()
    assert audit_wheel(make_wheel(tmp_path, spilling(0, 32)), only={"local"}).findings == ()


def test_no_dumper_is_reported_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton_build.audit_cuda.shutil.which", lambda name: None)
    report = audit_wheel(make_wheel(tmp_path, cuda()), only={"cuobjdump"})
    assert [result.skipped for result in report.results] == ["cuobjdump of the CUDA toolkit is not on PATH"]


@pytest.mark.parametrize("case", BAD)
def test_bad_wheel_fails_its_check(case: str, tmp_path: Path, cuobjdump: None) -> None:
    make, check, file, found = BAD[case]
    if check in OPTIONAL:
        pytest.importorskip(OPTIONAL[check], reason=f"what the check {check} asks is not installed")
    findings = audit_wheel(make_wheel(tmp_path, make()), only={check}).findings
    assert any(file in f.file and found in f.found for f in findings), findings
    assert all(f.needed for f in findings)


def test_every_check_has_a_bad_wheel() -> None:
    assert {check for _, check, _, _ in BAD.values()} == set(audit.CHECKS)


def test_what_the_library_is_linked_with_is_of_the_floor() -> None:
    """The list of functions of the oldest torch, which the linker gets, against torch-abi-audit's."""
    audited = pytest.importorskip("torch_abi_audit", reason="torch-abi-audit is not installed")
    root = Path(__file__).resolve().parents[2]
    (path,) = (root / "cmake").glob("torch-*-symbols.txt")
    symbols = [line for line in path.read_text().split() if not line.startswith("#")]
    # Some are exported and declared nowhere: the audit refuses those.
    least, newest, _ = audited.minimum_version(symbols)
    floor = tuple(map(int, path.name.split("-")[1].split(".")))
    assert symbols and least[:2] <= floor, (newest, floor)


def _pipe(folder: Path) -> Path:
    path = folder / "x.whl"
    os.mkfifo(path)
    return path


HARMFUL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no zip": (lambda folder: _file(folder, b"not a zip file"), "not a readable wheel"),
    "empty": (lambda folder: _file(folder, b""), "not a readable wheel"),
    "truncated": (lambda folder: _file(folder, make_wheel(folder / "x").read_bytes()[:-200]), "not a readable wheel"),
    "path that leaves the wheel": (lambda folder: make_wheel(folder, GOOD.but(files={"pelton/../../x": b""})), "leaves the wheel"),
    "absolute path": (lambda folder: make_wheel(folder, GOOD.but(files={"/etc/x": b""})), "absolute path"),
    "backslash": (lambda folder: make_wheel(folder, GOOD.but(files={"pelton\\x": b""})), "backslash"),
    "zip bomb": (lambda folder: make_wheel(folder, GOOD.but(files={"pelton/x": bytes(100 << 20)})), "1000:1"),
    "damaged member": (lambda folder: _damaged(folder), "pelton/__init__.py"),  # noqa: PLW0108
    "no build info": (lambda folder: make_wheel(folder, GOOD.but(without=("pelton/_build_info.json",))), "_build_info.json"),
    "build info without a key": (lambda folder: make_wheel(folder, GOOD.but(info={**INFO, "glibc": 2.28})), "'glibc'"),
    "build info that is no JSON": (
        lambda folder: make_wheel(folder, GOOD.but(files={"pelton/_build_info.json": b"{"})), "not JSON"),
    "build info of many levels": (
        lambda folder: make_wheel(folder, GOOD.but(files={"pelton/_build_info.json": b"[" * 100_000})), "not JSON"),
    "build info with half a character": (lambda folder: make_wheel(folder, GOOD.with_info(summary="\ud800")), "half characters"),
    "a toolchain that is a text": (lambda folder: make_wheel(folder, GOOD.with_info(toolchain="x")), "toolchain is not an object"),
    "a floor that is no version": (lambda folder: make_wheel(folder, GOOD.with_info(torch_floor="x")), "torch_floor is no version, found 'x'"),
    "a pipe": (lambda folder: _pipe(folder), "not a file; name a wheel"),  # noqa: PLW0108
    "two dist-infos": (lambda folder: make_wheel(folder, GOOD.but(files={"x-1.dist-info/METADATA": b""})), "2 .dist-info"),
    "damaged ELF file": (
        lambda folder: make_wheel(folder, GOOD.but(files={LIBRARY_NAME: shared_object(LIBRARY, "-march=x86-64-v3")[:900]})), "damaged ELF"),
}  # fmt: skip


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "pelton-0.1.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl"
    path.write_bytes(data)
    return path


def _damaged(folder: Path) -> Path:
    path = make_wheel(folder)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("pelton/__init__.py")
    data = bytearray(path.read_bytes())
    at = info.header_offset + 30 + len(info.filename)
    data[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", HARMFUL)
def test_harmful_wheel_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, text = HARMFUL[case]
    path = make(tmp_path)
    with pytest.raises(AuditError, match=text) as caught:
        audit_wheel(path)
    assert path.name in str(caught.value)


QUICK = set(audit.CHECKS) - {"auditwheel"}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_finding_or_a_refusal(data: st.DataObject) -> None:
    """Whatever bytes of the wheel or of its library are changed or cut off: never another exception."""
    with tempfile.TemporaryDirectory() as folder:
        if data.draw(st.booleans(), label="damage the library"):
            parts = data.draw(st.sampled_from([GOOD.but(files=good_files()), cuda()]), label="of which wheel")
            library = _damage(data, parts.files[LIBRARY_NAME])
            path = make_wheel(Path(folder), parts.but(files={LIBRARY_NAME: library}))
        else:
            path = make_wheel(Path(folder))
            path.write_bytes(_damage(data, path.read_bytes()))
        try:
            audit_wheel(path, only=QUICK)
        except AuditError as error:
            assert str(error)


def _damage(data: st.DataObject, good: bytes) -> bytes:
    bad = bytearray(good)
    for at in data.draw(st.lists(st.integers(0, len(bad) - 1), min_size=1, max_size=20), label="places"):
        bad[at] = data.draw(st.integers(0, 255))
    return bytes(bad[: data.draw(st.one_of(st.just(len(bad)), st.integers(0, len(bad))), label="length")])


def test_missing_tool_is_reported_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = audit.require

    def require(module: str, distribution: str) -> None:
        if module == "iced_x86":
            raise CannotRun(f"{distribution} is not installed here")
        real(module, distribution)

    monkeypatch.setattr(audit, "require", require)
    report = audit_wheel(make_wheel(tmp_path))
    assert [(r.name, r.skipped) for r in report.skipped if r.name == "isa"] == [
        ("isa", "iced-x86 is not installed here")
    ]
    assert report.to_json()["ok"] is True


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pelton_build.audit", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


def test_command_line(tmp_path: Path) -> None:
    good = make_wheel(tmp_path / "good")
    bad = make_wheel(tmp_path / "bad", BAD["AVX-512 in an AVX2 wheel"][0]())
    missing = tmp_path / "none.whl"
    passed = run(str(good))
    assert passed.returncode == 0, passed.stderr
    assert "passed" in passed.stdout
    device = make_wheel(tmp_path / "cuda", cuda(CUDA_COMMON, cuda_images("norm/gpu.cu", K(registers=77))))
    for options, text in (((), "1"), (("--kernels",), "scale_kernel")):
        shown = run(*options, str(device))
        assert "77" in shown.stdout and text in shown.stdout, shown.stdout
    failed = run("--json", str(good), str(bad))
    assert failed.returncode == 1
    reports = json.loads(failed.stdout)
    assert [report["ok"] for report in reports] == [True, False]
    refused = run(str(missing))
    assert refused.returncode == 1
    assert "none.whl" in refused.stderr and "Traceback" not in refused.stderr
