"""Reading AMD device code in a host binary: bundles of code objects, and their kernels.

The section ``.hip_fatbin`` holds one bundle for each HIP source, each at a multiple of 4096: a table of entries, of which
one is the (empty) host's and each other a code object for one target. A code object is an ELF file; its note of AMD's
metadata, in MessagePack, tells what each kernel takes. The compiler leaves a mark in it, a symbol with a hash of the id
that the build gave the source, which is made of the source's name in the plan. The layout is that of clang 17 to 19,
compared with what llvm-readelf prints.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .fatbin import FatbinError, Image, Kernel

__all__ = ["mark_of", "read_bundles", "read_code_object", "unpack_metadata", "wave_size"]

SECTION = ".hip_fatbin"
REGISTRATION = ".hipFatBinSegment"
REGISTRATION_SIZE = 24

_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_COMPRESSED = b"CCOB"
_ALIGNMENT = 4096
_ENTRY = struct.Struct("<QQQ")  # offset, size, length of the target's name, which follows
_HSA, _MACHINE, _METADATA = 64, 224, 32  # ELF: ABI, machine; type of the note
_MARK = "__hip_cuid_"

# Version of the code object by the ABI version in its ELF header.
_VERSIONS = {1: 3, 2: 4, 3: 5, 4: 6}


def mark_of(source: str) -> str:
    """The mark that the compiler leaves for a source of this name, by the id that CMake gives it (-cuid)."""
    cuid = hashlib.md5(source.encode(), usedforsecurity=False).hexdigest()
    digest = hashlib.md5(cuid.encode(), usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:8], 'little'):x}"


def wave_size(arch: str) -> int:
    """Lanes of a wave: 64 on GCN and CDNA, 32 on RDNA as the compiler is called here."""
    return 64 if re.match(r"gfx[6-9]", arch) else 32


def read_bundles(section: bytes, sources: Iterable[str]) -> tuple[tuple[Image, ...], ...]:
    """The bundles of a section, each as its code objects. `sources`: names that a mark may stand for.

    Raises FatbinError when the section is damaged, or of a layout that is not known here.
    """
    marks = {mark_of(source): source for source in sources}
    bundles = []
    at = 0
    while at < len(section):
        if section.startswith(_MAGIC, at):
            images, end = _bundle(section, at, marks)
            bundles.append(images)
            at = end + -end % _ALIGNMENT
        elif section.startswith(_COMPRESSED, at):
            raise FatbinError(f"a compressed bundle at offset {at:#x}; compile with --no-offload-compress")
        elif any(section[at : at + _ALIGNMENT]):
            raise FatbinError(f"no bundle of code objects at offset {at:#x}")
        else:
            at += _ALIGNMENT
    return tuple(bundles)


def _bundle(section: bytes, start: int, marks: Mapping[str, str]) -> tuple[tuple[Image, ...], int]:
    at = start + len(_MAGIC)
    (count,) = _unpack(struct.Struct("<Q"), section, at)
    at += 8
    images, end = [], at
    for _ in range(count):
        offset, size, length = _unpack(_ENTRY, section, at)
        name = section[at + _ENTRY.size : at + _ENTRY.size + length]
        at += _ENTRY.size + length
        if len(name) != length or start + offset + size > len(section):
            raise FatbinError(f"the bundle at offset {start:#x} is cut off")
        end = max(end, at, start + offset + size)
        kind, _, target = name.decode(errors="replace").partition("-")
        if kind == "host":
            if size:
                raise FatbinError(f"the bundle at offset {start:#x} holds code for {target}")
        elif kind in ("hipv4", "hip"):
            data = section[start + offset : start + offset + size]
            images.append(read_code_object(data, _arch(target), marks, start + offset))
        else:
            raise FatbinError(
                f"the bundle at offset {start:#x} has an entry {name!r}, neither HIP's nor the host's"
            )
    return tuple(images), end


def _arch(target: str) -> str:
    """`gfx90a:xnack-` of `amdgcn-amd-amdhsa--gfx90a:xnack-`."""
    return target.rpartition("-gfx")[0] and "gfx" + target.partition("-gfx")[2]


def _unpack(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    if at + form.size > len(data):
        raise FatbinError(f"a bundle is cut off at offset {at:#x}")
    return form.unpack_from(data, at)


def read_code_object(data: bytes, arch: str, marks: Mapping[str, str], at: int = 0) -> Image:
    """One code object. Raises FatbinError when it is damaged."""
    from elftools.elf.elffile import ELFFile

    try:
        elf: Any = ELFFile(io.BytesIO(data))
        ident = data[:16]
        (machine,) = struct.unpack_from("<H", data, 18)
        if ident[7] != _HSA or machine != _MACHINE:
            raise FatbinError(f"the code object at offset {at:#x} is for machine {machine}, no AMD GPU")
        sections = list(elf.iter_sections())
        symbols = {}
        for section in sections:
            if section.name in (".dynsym", ".symtab"):
                symbols.update({symbol.name: symbol for symbol in section.iter_symbols()})
        found = [marks.get(name.removeprefix(_MARK), "") for name in symbols if name.startswith(_MARK)]
        metadata = next((m for s in sections if s.name == ".note" for m in _metadata(s.data())), {})
        kernels = [_kernel(entry, elf, symbols, arch) for entry in metadata.get("amdhsa.kernels", [])]
        target = str(metadata.get("amdhsa.target", ""))
        return Image(
            source=next(filter(None, found), ""),
            kind="code object",
            arch=arch,
            made_for=_arch(target) if target else "",
            size=len(data),
            stored=len(data),
            kernels=tuple(sorted(kernels, key=lambda kernel: kernel.name)),
            version=_VERSIONS.get(ident[8], 0),
        )
    except FatbinError:
        raise
    except Exception as error:  # a damaged file makes the parser raise whatever it meets
        raise FatbinError(f"the code object at offset {at:#x} is damaged ({error!r})") from None


def _metadata(note: bytes) -> Iterator[Mapping[str, Any]]:
    at = 0
    while at + 12 <= len(note):
        name_size, size, kind = struct.unpack_from("<III", note, at)
        name = note[at + 12 : at + 12 + name_size].rstrip(b"\0")
        start = at + 12 + name_size + -name_size % 4
        if name == b"AMDGPU" and kind == _METADATA:
            value = unpack_metadata(note[start : start + size])
            if isinstance(value, dict):
                yield value
        at = start + size + -size % 4


def _kernel(entry: Mapping[str, Any], elf: Any, symbols: Mapping[str, Any], arch: str) -> Kernel:
    name = str(entry[".name"])
    symbol = symbols.get(name)
    code = b""
    if symbol is not None and isinstance(symbol["st_shndx"], int):
        section = elf.get_section(symbol["st_shndx"])
        begin = symbol["st_value"] - section["sh_addr"]
        code = section.data()[begin : begin + symbol["st_size"]]
    spilled = int(entry[".vgpr_spill_count"])
    return Kernel(
        name=name,
        registers=int(entry[".vgpr_count"]),
        local=int(entry[".private_segment_fixed_size"]),
        loads=spilled,
        stores=spilled,
        shared=int(entry[".group_segment_fixed_size"]),
        code=len(code),
        wave=int(entry[".wavefront_size"]),
        matrix=_matrix_instructions(code, arch),
    )


def _matrix_instructions(code: bytes, arch: str) -> int:
    """How many words of the code look like matrix instructions: MFMA on CDNA, WMMA on RDNA 3 and later."""
    words = struct.unpack(f"<{len(code) // 4}I", code[: len(code) // 4 * 4])
    if wave_size(arch) == 64:
        # VOP3P: nine leading bits, then the operation; those from 64 on are MFMA, but for the two of its registers.
        return sum(
            w >> 23 == 0x1A7 and (w >> 16) & 0x7F >= 0x40 and (w >> 16) & 0x7F not in (0x58, 0x59)
            for w in words
        )
    return sum(w >> 24 == 0xCC and 0x40 <= (w >> 16) & 0x7F <= 0x47 for w in words)


# --- MessagePack ----------------------------------------------------------------------------------------------

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_SIZED = {0xC4: (">B", "bin"), 0xC5: (">H", "bin"), 0xC6: (">I", "bin"), 0xD9: (">B", "str"), 0xDA: (">H", "str"), 0xDB: (">I", "str"), 0xDC: (">H", "list"), 0xDD: (">I", "list"), 0xDE: (">H", "map"), 0xDF: (">I", "map")}  # fmt: skip
_DEEPEST = 16


def unpack_metadata(data: bytes) -> Any:
    """The value that MessagePack `data` begins with. Raises ValueError for what is none, or cut off."""
    return _value(data, 0, 0)[0]


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if at >= len(data) or depth > _DEEPEST:
        raise ValueError(f"no MessagePack at offset {at:#x}")
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first < 0x90:
        return _map(data, at, first & 0x0F, depth)
    if first < 0xA0:
        return _list(data, at, first & 0x0F, depth)
    if first < 0xC0:
        return _text(data, at, first & 0x1F)
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at
    if first in _NUMBERS:
        form = struct.Struct(_NUMBERS[first])
        if at + form.size > len(data):
            raise ValueError(f"a number is cut off at offset {at:#x}")
        return form.unpack_from(data, at)[0], at + form.size
    if first not in _SIZED:
        raise ValueError(f"byte {first:#x} at offset {at - 1:#x} is no MessagePack that is known here")
    text, kind = _SIZED[first]
    form = struct.Struct(text)
    if at + form.size > len(data):
        raise ValueError(f"a length is cut off at offset {at:#x}")
    (count,) = form.unpack_from(data, at)
    at += form.size
    if kind == "map":
        return _map(data, at, count, depth)
    if kind == "list":
        return _list(data, at, count, depth)
    if kind == "str":
        return _text(data, at, count)
    return _bytes(data, at, count)


def _bytes(data: bytes, at: int, count: int) -> tuple[bytes, int]:
    if at + count > len(data):
        raise ValueError(f"{count} bytes are cut off at offset {at:#x}")
    return data[at : at + count], at + count


def _text(data: bytes, at: int, count: int) -> tuple[str, int]:
    raw, at = _bytes(data, at, count)
    return raw.decode(), at  # UnicodeDecodeError is a ValueError


def _list(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(count):
        item, at = _value(data, at, depth + 1)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, count: int, depth: int) -> tuple[dict[Any, Any], int]:
    items = {}
    for _ in range(count):
        key, at = _value(data, at, depth + 1)
        if not isinstance(key, str | int | bool | bytes):
            raise ValueError(f"a key of type {type(key).__name__} before offset {at:#x}")
        items[key], at = _value(data, at, depth + 1)
    return items, at
