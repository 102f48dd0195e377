"""The reader of AMD device code: every field of code objects made by hand, real ones where clang is, and damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from code_object_factory import MFMA, NOTHING, WMMA, G, bundle, code_object, packed, section
from pelton_build.fatbin import FatbinError, Image, Kernel
from pelton_build.hipfat import mark_of, read_bundles, unpack_metadata, wave_size

pytest.importorskip("elftools", reason="pyelftools is not installed: pip install pyelftools")

SOURCES = ("norm/gpu.cu", "quant/gptq/gpu.cu")
SPILLING = G(
    "spill_kernel", registers=255, scratch=256, spilled=60, shared=1056, wave=64, code=(MFMA, NOTHING, MFMA)
)


def test_every_field_of_a_code_object() -> None:
    data = code_object([G(), SPILLING], "gfx90a", "quant/gptq/gpu.cu")
    ((read,),) = read_bundles(section(bundle(data, archs=["gfx90a"])), SOURCES)
    assert read == Image(
        source="quant/gptq/gpu.cu",
        kind="code object",
        arch="gfx90a",
        made_for="gfx90a",
        size=len(data),
        stored=len(data),
        kernels=(
            Kernel(G().name, registers=24, code=8, wave=32),
            Kernel("spill_kernel", registers=255, local=256, loads=60, stores=60, shared=1056, code=12, wave=64, matrix=2),
        ),
        version=5,
    )  # fmt: skip


def test_bundles_in_their_order() -> None:
    one = bundle(code_object(arch="gfx90a:xnack-"), code_object(), archs=["gfx90a:xnack-", "gfx1100"])
    two = bundle(code_object(source="a stranger"))
    read = read_bundles(section(one, two), SOURCES)
    assert [[(image.source, image.arch, image.made_for) for image in images] for images in read] == [
        [("norm/gpu.cu", "gfx90a:xnack-", "gfx90a:xnack-"), ("norm/gpu.cu", "gfx1100", "gfx1100")],
        [("", "gfx1100", "gfx1100")],
    ]
    assert read_bundles(b"", SOURCES) == read_bundles(bytes(8192), SOURCES) == ()


@pytest.mark.parametrize(
    ("arch", "code", "count"),
    [
        ("gfx1100", (WMMA, NOTHING, WMMA + 0x10000), 2),
        ("gfx1201", (WMMA,), 1),
        ("gfx1100", (MFMA,), 0),
        ("gfx90a", (WMMA,), 0),
        ("gfx90a", (0xD3D80000, 0xD3D90000, 0xD3800000), 0),  # v_accvgpr_read, _write, v_pk_mad: no products
        ("gfx942", (MFMA, 0xD3E00000), 2),
    ],
)
def test_matrix_instructions(arch: str, code: tuple[int, ...], count: int) -> None:
    ((image,),) = read_bundles(bundle(code_object([G(code=code)], arch), archs=[arch]), SOURCES)
    assert image.kernels[0].matrix == count


@pytest.mark.parametrize(("arch", "size"), [("gfx906", 64), ("gfx90a", 64), ("gfx942", 64), ("gfx1030", 32), ("gfx1201", 32)])  # fmt: skip
def test_lanes_of_a_wave(arch: str, size: int) -> None:
    assert wave_size(arch) == size


GOOD = bundle(code_object())
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no bundle": (lambda: b"x" * 5000, "no bundle of code objects at offset 0x0"),
    "something behind it": (lambda: section(GOOD) + b"x", "no bundle of code objects at offset 0x"),
    "cut in the table": (lambda: GOOD[:60], "is cut off"),
    "cut in a name": (lambda: GOOD[:100], "is cut off"),
    "cut in the code": (lambda: GOOD[:-100], "the bundle at offset 0x0 is cut off"),
    "compressed": (lambda: b"CCOB" + bytes(60), "a compressed bundle at offset 0x0; compile with --no-offload-compress"),
    "code for the host": (lambda: bundle(code_object(), host=b"x"), "holds code for x86_64-unknown-linux--"),
    "another kind": (lambda: bundle(code_object(), kind="openmp"), "neither HIP's nor the host's"),
    "another machine": (lambda: bundle(code_object(machine=62)), "is for machine 62, no AMD GPU"),
    "no ELF": (lambda: bundle(b"x" * 500), "is damaged"),
    "a note that is cut": (
        lambda: bundle(code_object().replace(b".vgpr_count", b".vgpr_counu", 1)), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_said(case: str) -> None:
    make, message = DAMAGED[case]
    with pytest.raises(FatbinError, match=re.escape(message)):
        read_bundles(make(), SOURCES)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_any_damage_is_one_error(at: int, byte: int, end: int) -> None:
    data = bytearray(GOOD)
    data[at] = byte
    with contextlib.suppress(FatbinError):
        read_bundles(bytes(data[:end]), SOURCES)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_messagepack_comes_back(value: Any) -> None:
    assert unpack_metadata(packed(value)) == value


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x7f", 127), (b"\xff", -1), (b"\xe0", -32), (b"\xcc\xff", 255), (b"\xcd\x01\x00", 256), (b"\xd0\x80", -128),
        (b"\xce\x00\x00\x00\x01", 1), (b"\xcf" + b"\xff" * 8, 2**64 - 1), (b"\xd1\xff\xfe", -2), (b"\xd2\xff\xff\xff\xfd", -3),
        (b"\xca\x3f\x80\x00\x00", 1.0), (b"\xd9\x01a", "a"), (b"\xdb\x00\x00\x00\x01b", "b"), (b"\xc4\x01c", b"c"),
        (b"\xdd\x00\x00\x00\x01\x01", [1]), (b"\xdf\x00\x00\x00\x01\x01\x02", {1: 2}),
    ],
)  # fmt: skip
def test_messagepack_of_every_width(data: bytes, value: Any) -> None:
    assert unpack_metadata(data) == value
    for end in range(len(data)):
        with pytest.raises(ValueError, match="offset"):
            unpack_metadata(data[:end])


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\xd4\x00\x00", b"\xc7\x00\x00", b"\x91" * 40, b"\x81\x90\x01", b"\xa1\xff"]
)
def test_what_is_no_messagepack(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"MessagePack|a key of type|decode"):
        unpack_metadata(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        unpack_metadata(data)


PROGRAM = """
__attribute__((global)) void scale(float* x) { x[__builtin_amdgcn_workitem_id_x()] *= 2; }
__attribute__((global)) void uses_memory(float* x, int n) {
  volatile float many[16];
  for (int i = 0; i < 16; ++i) many[i] = x[i];
  x[0] = many[n & 15];
}
"""


@pytest.mark.skipif(shutil.which("clang++-19") is None, reason="needs clang++-19")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
def test_a_real_code_object(tmp_path: Path, arch: str) -> None:
    """Against what llvm-readelf says of it."""
    (tmp_path / "x.hip").write_text(PROGRAM)
    cuid = hashlib.md5(b"norm/gpu.cu").hexdigest()
    options = ["-x", "hip", f"--offload-arch={arch}", "-nogpuinc", "-nogpulib", "-mcode-object-version=5", "-O2", f"-cuid={cuid}"]  # fmt: skip
    command = ["clang++-19", *options, "--cuda-device-only", "-o", "x.out", "x.hip"]
    subprocess.run(command, cwd=tmp_path, check=True)
    data = (tmp_path / "x.out").read_bytes()
    ((image,),) = read_bundles(data, SOURCES)
    assert (image.source, image.arch, image.made_for, image.version) == ("norm/gpu.cu", arch, arch, 5)
    (offset, size) = next(
        struct.unpack_from("<QQ", data, match.start() - 24) for match in re.finditer(rb"hipv4-amdgcn", data)
    )
    (tmp_path / "x.co").write_bytes(data[offset : offset + size])
    notes = ["llvm-readelf-19", "--notes", "--elf-output-style=GNU", "x.co"]
    said = subprocess.run(notes, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    for kernel in image.kernels:
        entry = next(
            part for part in re.split(r"(?m)^  - ", said) if f".name:           {kernel.name}\n" in part
        )
        numbers = dict(re.findall(r"\.(\w+): +(\d+)", entry))
        assert (kernel.registers, kernel.local, kernel.wave) == tuple(
            int(numbers[key]) for key in ("vgpr_count", "private_segment_fixed_size", "wavefront_size")
        ), json.dumps(numbers)
        assert kernel.code > 8
    assert {kernel.local > 0 for kernel in image.kernels} == {False, True}


def test_marks_differ() -> None:
    assert len({mark_of(f"family{n}/gpu.cu") for n in range(100)}) == 100
