"""Reading the device code in a host binary: NVIDIA's fat binaries, the cubins and PTX in them, and their kernels.

The section ``.nv_fatbin`` holds one container for each CUDA source, in the order of the link. A container is a header
and a row of entries, one for each image; an entry's header says what the image is and the arch that the driver picks
it by, and carries the name that the build gave its source (``fatbinary --ident``). An image may be compressed (LZ4 or
Zstandard). A cubin is an ELF file; its ``.nv.info`` sections tell registers and stack of each kernel. The layout is
that of CUDA 11 to 13, compared with what cuobjdump prints.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FatbinError", "Image", "Kernel", "function_name", "read_fatbin"]

SECTION = ".nv_fatbin"
REGISTRATION = ".nvFatBinSegment"
"""One record for each container that is registered when the library is loaded."""
REGISTRATION_SIZE = 24
LINKED_SECTION = "__nv_relfatbin"
"""Relocatable device code, which a program of one library has no use for."""

MAX_IMAGE = 1 << 30  # bytes, unpacked; far above every cubin that there is
MAX_RATIO = 1000  # of unpacked to compressed; LZ4 cannot exceed 255

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_MAGIC = 0xBA55ED50
# kind, version, size of this header, size of the image, its compressed size, offset of the options, minor and major
# version of the image's format, arch, offset and length of the identifier, flags, nothing, unpacked size
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_PTX, _CUBIN = 1, 2
_LZ4, _ZSTD, _SPECIFIC, _FAMILY = 0x2000, 0x8000, 0x100000, 0x200000

# .nv.info: attributes of format 4 carry a size and a value, here the symbol's index and a number.
_FRAME_SIZE, _MIN_STACK, _REGISTERS = 0x11, 0x12, 0x2F
# Low nine bits of a 128-bit instruction (since sm_70): load from and store to local memory.
_LOAD_LOCAL, _STORE_LOCAL = 0x183, 0x187


class FatbinError(Exception):
    """Bytes that are no fat binary, or a damaged one. The text says where."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of an image. Of PTX only the name is known."""

    name: str
    """As mangled."""
    registers: int = 0
    """Registers a thread."""
    local: int = 0
    """Bytes of local memory a thread: spilled registers and arrays that are indexed at run time."""
    loads: int = 0
    stores: int = 0
    """Instructions that load from and store to local memory; on AMD GPUs the registers that are spilled."""
    shared: int = 0
    """Bytes of static shared memory a block."""
    code: int = 0
    """Bytes of machine code."""
    wave: int = 0
    """Lanes of a wave, on AMD GPUs."""
    matrix: int = 0
    """Matrix instructions, on AMD GPUs."""


@dataclass(frozen=True)
class Image:
    """Device code of one source for one arch."""

    source: str
    """The source as the build named it; empty when it did not."""
    kind: Literal["cubin", "ptx", "code object"]
    arch: str
    """What the driver picks it by: `sm_90a`, or `compute_80` for PTX, or `gfx90a`."""
    made_for: str
    """The arch that the image itself says it was compiled for; empty when it says none."""
    size: int
    """Bytes, unpacked."""
    stored: int
    """Bytes in the library."""
    kernels: tuple[Kernel, ...]
    version: int = 0
    """Of an AMD code object."""


def read_fatbin(section: bytes) -> tuple[tuple[Image, ...], ...]:
    """The containers of a section, each as its images.

    Raises:
        FatbinError: the section is damaged, or of a layout that is not known here.
        ImportError: an image is compressed, and the library that unpacks it is not installed.
    """
    containers = []
    at = 0
    while at < len(section):
        if not any(section[at : at + 8]):  # containers start at multiples of eight
            at += 8
            continue
        magic, version, header, size = _unpack(_CONTAINER, section, at, "a container")
        if magic != _MAGIC or header < _CONTAINER.size:
            raise FatbinError(f"no fat binary at offset {at:#x}")
        if version != 1:
            raise FatbinError(f"a fat binary of version {version} at offset {at:#x}; version 1 is known")
        start, end = at + header, at + header + size
        if end > len(section):
            raise FatbinError(f"the fat binary at offset {at:#x} is cut off")
        containers.append(tuple(_images(section, start, end)))
        at = end + -end % 8
    return tuple(containers)


def _images(section: bytes, at: int, end: int) -> Iterator[Image]:
    while at < end:
        entry = _unpack(_ENTRY, section[:end], at, "an image")
        (kind, _, header, size, packed, _, _, _, arch, name_at, name_length, flags, _, unpacked) = entry
        if header < _ENTRY.size or at + header + size > end:
            raise FatbinError(f"the image at offset {at:#x} does not fit into its fat binary")
        name = section[at + name_at : at + name_at + name_length] if name_at + name_length <= header else b""
        payload = section[at + header : at + header + size]
        suffix = ("a" if flags & _SPECIFIC else "") + ("f" if flags & _FAMILY else "")
        if flags & (_LZ4 | _ZSTD):
            if packed > size or unpacked > min(MAX_IMAGE, MAX_RATIO * packed):
                raise FatbinError(f"the image at offset {at:#x} has no size that is possible")
            data = _unpacked(payload[:packed], unpacked, bool(flags & _ZSTD), at)
        else:
            data = payload
        source = name.split(b"\0")[0].decode(errors="replace")
        if kind == _CUBIN:
            made_for, kernels = read_cubin(data, at)
            yield Image(source, "cubin", f"sm_{arch}{suffix}", made_for, len(data), size, kernels)
        elif kind == _PTX:
            made_for, kernels = read_ptx(data)
            yield Image(source, "ptx", f"compute_{arch}{suffix}", made_for, len(data), size, kernels)
        else:
            raise FatbinError(f"the image at offset {at:#x} is of kind {kind}, neither PTX nor a cubin")
        at += header + size


def _unpack(form: struct.Struct, data: bytes, at: int, what: str) -> tuple[int, ...]:
    if at + form.size > len(data):
        raise FatbinError(f"{what} is cut off at offset {at:#x}")
    return form.unpack_from(data, at)


def _unpacked(data: bytes, size: int, zstd: bool, at: int) -> bytes:
    unpack = _unzstd if zstd else _unlz4
    try:
        plain = unpack(data, size)
    except ImportError:
        raise
    except Exception as error:  # whatever the library meets in damaged data
        raise FatbinError(f"the image at offset {at:#x} cannot be unpacked ({error})") from None
    if len(plain) != size:
        raise FatbinError(f"the image at offset {at:#x} unpacks to {len(plain)} bytes, not to {size}")
    return plain


def _unzstd(data: bytes, size: int) -> bytes:
    import zstandard

    # A frame may name another size than the entry: no more than the entry's is unpacked.
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        return bytes(reader.read(size + 1))


def _unlz4(data: bytes, size: int) -> bytes:
    import lz4.block

    return bytes(lz4.block.decompress(data, uncompressed_size=size))


def read_ptx(data: bytes) -> tuple[str, tuple[Kernel, ...]]:
    """The arch that PTX names, as `compute_80`, and its kernels."""
    target = re.search(rb"^\s*\.target\s+sm_(\d+[af]?)", data, re.MULTILINE)
    names = sorted({match[1].decode() for match in re.finditer(rb"\.entry\s+([\w$]+)", data)})
    return (f"compute_{target[1].decode()}" if target else ""), tuple(map(Kernel, names))


def read_cubin(data: bytes, at: int = 0) -> tuple[str, tuple[Kernel, ...]]:
    """The arch that a cubin's notes name, as `sm_90a`, and its kernels. Raises FatbinError when it is damaged."""
    from elftools.elf.elffile import ELFFile

    try:
        elf: Any = ELFFile(io.BytesIO(data))
        if elf["e_machine"] not in ("EM_CUDA", 190):
            raise FatbinError(f"the image at offset {at:#x} is for {elf['e_machine']}, no cubin")
        sections: dict[str, Any] = {section.name: section for section in elf.iter_sections()}
        symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
        numbers = _numbers_of_kernels(sections[".nv.info"].data(), symbols)
        kernels = []
        for name, section in sections.items():
            kernel = name.removeprefix(".text.")
            if kernel == name or f".nv.info.{kernel}" not in sections:
                continue
            code = section.data()
            opcodes = [code[i] | (code[i + 1] & 1) << 8 for i in range(0, len(code) - 15, 16)]
            shared = sections.get(f".nv.shared.{kernel}")
            own = numbers.get(kernel, {})
            kernels.append(
                Kernel(
                    name=kernel,
                    registers=own.get(_REGISTERS, 0),
                    local=max(own.get(_FRAME_SIZE, 0), own.get(_MIN_STACK, 0)),
                    loads=opcodes.count(_LOAD_LOCAL),
                    stores=opcodes.count(_STORE_LOCAL),
                    shared=int(shared["sh_size"]) if shared is not None else 0,
                    code=len(code),
                )
            )
        return _noted_arch(sections), tuple(sorted(kernels, key=lambda kernel: kernel.name))
    except FatbinError:
        raise
    except Exception as error:  # a damaged file makes the parser raise whatever it meets
        raise FatbinError(f"the cubin at offset {at:#x} is damaged ({error!r})") from None


def _numbers_of_kernels(info: bytes, symbols: list[str]) -> dict[str, dict[int, int]]:
    """For each function the attributes that are one number. Raises FatbinError."""
    found: dict[str, dict[int, int]] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value, if any, stands where the size does
            continue
        if attribute in (_FRAME_SIZE, _MIN_STACK, _REGISTERS) and size >= 8:
            index, value = struct.unpack_from("<II", info, at)
            found.setdefault(symbols[index], {})[attribute] = value
        at += size
    return found


def _noted_arch(sections: Mapping[str, Any]) -> str:
    """The arch in the options that ptxas notes down (since CUDA 12); empty when there is no such note."""
    section = sections.get(".note.nv.tkinfo")
    match = re.search(rb"-arch[ =](sm_\d+[af]?)", section.data()) if section is not None else None
    return match[1].decode() if match else ""


def function_name(mangled: str) -> str:
    """The plain name in a mangled one: `rms_norm_kernel` of `_ZN6pelton3gpu...15rms_norm_kernelIfEEvT_`."""
    match = re.match(r"_Z(N?)(?:K?)", mangled)
    if match is None:
        return mangled
    at, name = match.end(), ""
    while length := re.match(r"[1-9]\d*", mangled[at:]):
        start = at + length.end()
        end = start + int(length[0])
        if end > len(mangled):
            return mangled
        name, at = mangled[start:end], end
        if not match[1]:
            break
    return name or mangled
