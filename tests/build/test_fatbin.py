"""The reader of device code: every field of images made by hand, real ones where nvcc is installed, and damage."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_factory import LZ4, ZSTD, K, container, cubin, elf, image, mangled, ptx
from pelton_build.fatbin import FatbinError, Image, Kernel, function_name, read_fatbin

pytest.importorskip("elftools", reason="pyelftools is not installed: pip install pyelftools")

SPILLING = K(mangled("spill_kernel"), registers=255, local=256, loads=3, stores=2, shared=1056)


def test_every_field_of_a_cubin() -> None:
    data = cubin([K(), SPILLING])
    ((read,),) = read_fatbin(container(image(data)))
    assert read == Image(
        source="norm/gpu.cu",
        kind="cubin",
        arch="sm_90a",
        made_for="sm_90a",
        size=len(data) + -len(data) % 8,
        stored=len(data) + -len(data) % 8,
        kernels=(
            Kernel(mangled("scale_kernel"), registers=24, code=16),
            Kernel(SPILLING.name, registers=255, local=256, loads=3, stores=2, shared=1056, code=96),
        ),
    )


@pytest.mark.parametrize(
    ("packed", "library"), [(0, "elftools"), (LZ4, "lz4"), (ZSTD, "zstandard")], ids=["plain", "lz4", "zstd"]
)
def test_ptx_and_cubin_of_one_source(packed: int, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    code, text = cubin(arch="sm_80"), ptx(arch="sm_80")
    (images,) = read_fatbin(
        container(image(text, "compute_80", packed=packed), image(code, "sm_80", packed=packed))
    )
    assert [(i.kind, i.arch, i.made_for) for i in images] == [
        ("ptx", "compute_80", "compute_80"),
        ("cubin", "sm_80", "sm_80"),
    ]
    assert [kernel.name for kernel in images[0].kernels] == [kernel.name for kernel in images[1].kernels]
    if packed:
        assert [i.size for i in images] == [len(text), len(code)]


@pytest.mark.parametrize(
    "arch", ["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_120", "compute_80", "compute_90a"]
)
def test_archs(arch: str) -> None:
    name = arch.replace("compute", "sm")
    data = cubin(arch=name) if arch.startswith("sm") else ptx(arch=name)
    ((read,),) = read_fatbin(container(image(data, arch)))
    assert (read.arch, read.made_for) == (arch, arch)


def test_containers_stay_apart() -> None:
    one = container(image(cubin(), source="norm/gpu.cu"))
    two = container(
        image(cubin(), source="cache/gpu.cu"), image(cubin(arch="sm_80"), "sm_80", "cache/gpu.cu")
    )
    read = read_fatbin(one + bytes(16) + two + bytes(8))
    assert [[(i.source, i.arch) for i in images] for images in read] == [
        [("norm/gpu.cu", "sm_90a")],
        [("cache/gpu.cu", "sm_90a"), ("cache/gpu.cu", "sm_80")],
    ]
    assert read_fatbin(b"") == ()


def test_source_without_a_name_and_without_kernels() -> None:
    ((read,),) = read_fatbin(container(image(cubin([]), source="")))
    assert (read.source, read.kernels) == ("", ())


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "text": (lambda: b"this is no fat binary at all", "no fat binary at offset 0x0"),
    "cut off in the header": (lambda: container(image(cubin()))[:12], "cut off"),
    "cut off in the image": (lambda: container(image(cubin()))[:-8], "cut off"),
    "another version": (lambda: b"\x50\xed\x55\xba\x02" + container()[5:], "version 2"),
    "an image that is too long": (lambda: container(image(cubin())[:-8]), "does not fit"),
    "another kind": (lambda: container(image(cubin(), kind=9)), "kind 9"),
    "a cubin of another machine": (lambda: container(image(elf([]))), "damaged"),
    "a host library as cubin": (lambda: container(image(cubin(machine=62))), "no cubin"),
    "text as cubin": (lambda: container(image(b"text" * 20)), "damaged"),
    "a compressed image that is a bomb": (
        lambda: container(image(bytes(1 << 22), "sm_90a", packed=ZSTD)), "no size that is possible"),
    "text as LZ4": (lambda: container(image(cubin(), packed=LZ4)[:-40] + b"\xff" * 40), "cannot be unpacked"),
    "text as zstd": (lambda: container(image(cubin(), packed=ZSTD).replace(b"\x28\xb5\x2f\xfd", b"ABCD")), "unpacked"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_device_code_is_named(case: str) -> None:
    for library in ("lz4", "zstandard"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    make, text = BROKEN[case]
    with pytest.raises(FatbinError, match=text):
        read_fatbin(make())


GOOD = container(image(ptx(), "compute_80"), image(cubin([K(), SPILLING]), "sm_80")) + container(
    image(cubin())
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_is_read_or_one_error(data: st.DataObject) -> None:
    bad = bytearray(GOOD)
    for at in data.draw(st.lists(st.integers(0, len(bad) - 1), max_size=12)):
        bad[at] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(bad)), st.integers(0, len(bad))))
    try:
        read_fatbin(bytes(bad[:end]))
    except FatbinError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_ZN6pelton3gpu36_GLOBAL__N__2c025868_4_x_cu_5e41718212scale_kernelIdEEvPT_S3_", "scale_kernel"),
        (mangled("rms_norm_kernel"), "rms_norm_kernel"),
        ("_Z5spilliPf", "spill"),
        ("spill", "spill"),
        ("_ZN99x", "_ZN99x"),
        ("_ZNK3abc3defEv", "def"),
    ],
)
def test_function_names(name: str, plain: str) -> None:
    assert function_name(name) == plain


SOURCE = """
namespace pelton::gpu { namespace {
template <class T> __global__ void scale_kernel(T* x, T s) { x[threadIdx.x] *= s; }
__global__ void stack_kernel(int n, float* x) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n];
  for (int k = 0; k < n; k++) a[(k * 7) % 64] += a[k % 64];
  float s = 0;
  for (int i = 0; i < 64; i++) s += a[i];
  x[threadIdx.x] = s;
}
}
void go(float* x, double* y) {
  scale_kernel<<<1, 32>>>(x, 2.f);
  scale_kernel<<<1, 32>>>(y, 2.);
  stack_kernel<<<1, 32>>>(3, x);
}
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "none", "size", "speed"])
def test_what_nvcc_makes(mode: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    for library in ("lz4", "zstandard"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    (tmp_path / "x.cu").write_text(SOURCE)
    archs = ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_80,code=compute_80"]
    archs += ["-gencode", "arch=compute_90a,code=sm_90a"]
    options = [f"--compress-mode={mode}", "-Xfatbin=--ident=made/x.cu", "-Xcompiler", "-fPIC"]
    made = subprocess.run(
        [nvcc, *options, *archs, "-c", "x.cu", "-o", "x.o"],
        check=False, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    if made.returncode and "--compress-mode" in made.stderr:
        pytest.skip("this nvcc is older than the option --compress-mode")
    assert made.returncode == 0, made.stderr
    from elftools.elf.elffile import ELFFile

    with (tmp_path / "x.o").open("rb") as file:
        section = ELFFile(file).get_section_by_name(".nv_fatbin").data()
    (images,) = read_fatbin(section)
    assert sorted((i.source, i.arch, i.made_for) for i in images) == [
        ("made/x.cu", "compute_80", "compute_80"),
        ("made/x.cu", "sm_80", "sm_80"),
        ("made/x.cu", "sm_90a", "sm_90a"),
    ]
    for read in images:
        assert [function_name(k.name) for k in read.kernels] == [
            "scale_kernel",
            "scale_kernel",
            "stack_kernel",
        ]
        if read.kind == "cubin":
            *scale, stack = read.kernels
            assert all(k.registers > 0 and k.local == k.loads == k.stores == 0 for k in scale)
            assert stack.local == 256 and stack.loads > 0 and stack.stores > 0
