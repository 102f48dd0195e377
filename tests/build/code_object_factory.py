"""AMD device code made by hand for the tests: code objects and bundles of a few hundred bytes, without any AMD tool.

The layouts are those that clang 19 writes; `test_hipfat.py` compares the reader with real ones where it is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pelton_build.hipfat import mark_of

NOTHING, MFMA, WMMA = (
    0xBF800000,
    0xD3CD0000,
    0xCC400000,
)  # s_nop; v_mfma_f32_16x16x16f16; v_wmma_f32_16x16x16_f16


@dataclass(frozen=True)
class G:
    """A kernel of a code object."""

    name: str = "_ZN6pelton3gpu12scale_kernelIfEEvPf"
    registers: int = 24
    scratch: int = 0
    spilled: int = 0
    shared: int = 0
    wave: int = 32
    code: tuple[int, ...] = (NOTHING, NOTHING)


def packed(value: Any) -> bytes:
    """`value` as MessagePack."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return (
            bytes([0xA0 + len(data)]) if len(data) < 32 else b"\xda" + struct.pack(">H", len(data))
        ) + data
    if isinstance(value, bytes):
        return b"\xc5" + struct.pack(">H", len(value)) + value
    if isinstance(value, dict):
        body = b"".join(packed(key) + packed(item) for key, item in value.items())
        return (
            bytes([0x80 + len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))
        ) + body
    body = b"".join(map(packed, value))
    return (bytes([0x90 + len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))) + body


def _metadata(kernel: G) -> dict[str, Any]:
    return {
        ".args": [{".offset": 0, ".size": 8, ".value_kind": "by_value"}],
        ".group_segment_fixed_size": kernel.shared,
        ".name": kernel.name,
        ".private_segment_fixed_size": kernel.scratch,
        ".sgpr_count": 30,
        ".sgpr_spill_count": 0,
        ".symbol": f"{kernel.name}.kd",
        ".vgpr_count": kernel.registers,
        ".vgpr_spill_count": kernel.spilled,
        ".wavefront_size": kernel.wave,
    }


def code_object(
    kernels: Iterable[G] = (G(),),
    arch: str = "gfx1100",
    source: str = "norm/gpu.cu",
    abi: int = 3,
    machine: int = 224,
    mark: str | None = None,
) -> bytes:
    """A code object of a source; `abi` 3 is version 5."""
    listed = list(kernels)
    value = {"amdhsa.kernels": [_metadata(k) for k in listed], "amdhsa.target": f"amdgcn-amd-amdhsa--{arch}", "amdhsa.version": [1, 2]}  # fmt: skip
    data = packed(value)
    note = struct.pack("<III", 7, len(data), 32) + b"AMDGPU\0\0" + data + bytes(-len(data) % 4)
    code, symbols = b"", []
    for kernel in listed:
        words = struct.pack(f"<{len(kernel.code)}I", *kernel.code)
        symbols.append((kernel.name, len(code), len(words)))
        code += words
    symbols.append((f"__hip_cuid_{mark_of(source) if mark is None else mark}", 0, 0))
    strings, table = b"\0", bytes(24)
    for name, at, size in symbols:
        table += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 2, 0x1000 + at, size)
        strings += name.encode() + b"\0"
    rows = [("", 0, b"", 0, 0), (".note", 7, note, 0, 0), (".text", 1, code, 0, 0x1000)]
    rows += [(".dynstr", 3, strings, 0, 0), (".dynsym", 11, table, 3, 0)]
    names = b"".join(name.encode() + b"\0" for name, *_ in [*rows, (".shstrtab",)])
    rows.append((".shstrtab", 3, names, 0, 0))
    body, headers, at_name, at = b"", b"", 0, 64
    for name, kind, content, link, address in rows:
        entry = 24 if kind == 11 else 0
        headers += struct.pack("<IIQQQQIIQQ", at_name, kind, 0, address, at, len(content), link, 0, 1, entry)
        at_name += len(name) + 1
        body += content
        at += len(content)
    ident = b"\x7fELF\x02\x01\x01" + bytes([64, abi]) + bytes(7)
    head = struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, at, 0x41, 64, 0, 0, 64, len(rows), len(rows) - 1
    )
    return ident + head + body + headers


def bundle(
    *objects: bytes, archs: Sequence[str] = ("gfx1100",), host: bytes = b"", kind: str = "hipv4"
) -> bytes:
    """A bundle of code objects, each for the arch at its position."""
    entries = [("host-x86_64-unknown-linux--", host)]
    entries += [
        (f"{kind}-amdgcn-amd-amdhsa--{arch}", data) for arch, data in zip(archs, objects, strict=True)
    ]
    at, table, body = 4096, b"", b""
    for name, data in entries:
        table += struct.pack("<QQQ", at, len(data), len(name)) + name.encode()
        body += data
        at += len(data)
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)) + table
    return head + bytes(4096 - len(head)) + body


def section(*bundles: bytes) -> bytes:
    """The content of `.hip_fatbin`."""
    return b"".join(data + bytes(-len(data) % 4096) for data in bundles)


def assembled(bundles: Sequence[bytes], records: int | None = None) -> str:
    """C source that puts bundles into a library's sections, and registers `records` of them (default: all)."""
    lines = []
    if bundles:
        text = ",".join(map(str, section(*bundles)))
        lines.append(f'__asm__(".section .hip_fatbin,\\"a\\"\\n.align 4096\\n.byte {text}\\n.text");')
    count = len(bundles) if records is None else records
    if count:
        lines.append(
            f'__asm__(".section .hipFatBinSegment,\\"aw\\"\\n.align 8\\n.fill {count * 24},1,0\\n.text");'
        )
    return "\n".join(lines)
