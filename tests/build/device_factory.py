"""Device code made by hand for the tests: cubins, PTX and fat binaries of a few hundred bytes, without any CUDA tool.

The layouts are those that nvcc 13.0 writes; `test_fatbin.py` compares the reader with real ones where nvcc is
installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LZ4, ZSTD = 0x2000, 0x8000


def mangled(kernel: str, file: str = "gpu_cu") -> str:
    """The name of a kernel in the anonymous namespace of a file, as nvcc mangles it."""
    namespace = f"_GLOBAL__N__0123abcd_{len(file)}_{file}_89abcdef"
    return f"_ZN6pelton3gpu{len(namespace)}{namespace}{len(kernel)}{kernel}EPf"


@dataclass(frozen=True)
class K:
    """A kernel of a cubin."""

    name: str = mangled("scale_kernel")
    registers: int = 24
    local: int = 0
    loads: int = 0
    stores: int = 0
    shared: int = 0


def elf(sections: Sequence[tuple[str, int, bytes]], machine: int = 190, symbols: Iterable[str] = ()) -> bytes:
    """A 64-bit ELF file of these sections (name, type, content) and a symbol table."""
    strings = b"\0"
    table = bytes(24)
    for symbol in symbols:
        table += struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, 1, 0, 0)
        strings += symbol.encode() + b"\0"
    index = len(sections) + 1  # of the strings that the symbols name
    rows = [("", 0, b"", 0), *((*row, 0) for row in sections), (".strtab", 3, strings, 0)]
    rows.append((".symtab", 2, table, index))
    names = b"".join(name.encode() + b"\0" for name, *_ in [*rows, (".shstrtab",)])
    rows.append((".shstrtab", 3, names, 0))
    body, headers, at_name, at = b"", b"", 0, 64
    for name, kind, data, link in rows:
        entry = 24 if kind == 2 else 0
        headers += struct.pack("<IIQQQQIIQQ", at_name, kind, 0, 0, at, len(data), link, 0, 1, entry)
        at_name += len(name) + 1
        if kind != 8:  # NOBITS takes no place in the file
            body += data
            at += len(data)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, at, 0, 64, 0, 0, 64, len(rows), len(rows) - 1)
    return ident + head + body + headers


def cubin(kernels: Iterable[K] = (K(),), arch: str = "sm_90a", machine: int = 190) -> bytes:
    """A cubin that notes `arch` among the options of ptxas."""
    listed = list(kernels)
    info = b""
    sections: list[tuple[str, int, bytes]] = [
        (".note.nv.tkinfo", 1, f"ptxas\0Cuda compilation tools\0-arch {arch} -m 64 \0".encode())
    ]
    for index, kernel in enumerate(listed, start=1):
        for attribute, value in ((0x2F, kernel.registers), (0x11, kernel.local), (0x12, kernel.local)):
            info += struct.pack("<BBHII", 4, attribute, 8, index, value)
        code = struct.pack("<QQ", 0x0000000401007387, 0) * kernel.stores
        code += struct.pack("<QQ", 0x0000000001007983, 0) * kernel.loads
        code += struct.pack("<QQ", 0x000000000000794D, 0)  # EXIT
        sections.append((f".text.{kernel.name}", 1, code))
        sections.append((f".nv.info.{kernel.name}", 0x70000000, bytes(4)))
        if kernel.shared:
            sections.append((f".nv.shared.{kernel.name}", 8, bytes(kernel.shared)))
    sections.append((".nv.info", 0x70000000, struct.pack("<BBH", 3, 0x1B, 255) + info))
    return elf(sections, machine, [kernel.name for kernel in listed])


def ptx(kernels: Iterable[K] = (K(),), arch: str = "sm_80") -> bytes:
    entries = "".join(f".visible .entry {kernel.name}(\n.param .u64 p\n)\n{{ ret; }}\n" for kernel in kernels)
    return f".version 9.0\n.target {arch}\n.address_size 64\n{entries}\0".encode()


def image(
    data: bytes, arch: str = "sm_90a", source: str = "norm/gpu.cu", packed: int = 0, kind: int | None = None
) -> bytes:
    """An entry of a fat binary; `packed` is LZ4 or ZSTD for a compressed one."""
    prefix, _, number = arch.partition("_")
    suffix = number.lstrip("0123456789")
    flags = 0x11 | packed | {"a": 0x100000, "f": 0x200000}.get(suffix, 0)
    payload = data
    if packed == LZ4:
        import lz4.block

        payload = lz4.block.compress(data, store_size=False)
    elif packed == ZSTD:
        import zstandard

        payload = zstandard.ZstdCompressor().compress(data)
    size = len(payload) + -len(payload) % 8
    name = source.encode() + b"\0"
    header = 64 + len(name) + -len(name) % 8
    fields = (
        kind or (2 if prefix == "sm" else 1), 0x101, header, size, len(payload) if packed else 0, 0, 0, 9,
        int(number.rstrip("af")), 64, len(source), flags, 0, len(data) if packed else 0,
    )  # fmt: skip
    return (
        struct.pack("<HHIQIIHHIIIQQQ", *fields) + name.ljust(header - 64, b"\0") + payload.ljust(size, b"\0")
    )


def container(*images: bytes) -> bytes:
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def assembled(containers: Sequence[bytes], records: int | None = None, extra: str = "") -> str:
    """C source that puts fat binaries into a library's sections, and registers `records` of them (default: all)."""
    lines = []
    if containers:
        data = b"".join(containers)
        text = ",".join(map(str, data))
        lines.append(f'__asm__(".section .nv_fatbin,\\"a\\"\\n.align 8\\n.byte {text}\\n.text");')
    count = len(containers) if records is None else records
    if count:
        lines.append(
            f'__asm__(".section .nvFatBinSegment,\\"aw\\"\\n.align 8\\n.fill {count * 24},1,0\\n.text");'
        )
    if extra:
        lines.append(f'__asm__(".section {extra},\\"a\\"\\n.fill 64,1,1\\n.text");')
    return "\n".join(lines)
