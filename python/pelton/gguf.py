"""GGUF files: metadata, the configuration they imply, and their tensors under Hugging Face names.

The header is parsed here (memory-mapped, every length checked against the file's end before it is used),
because a reader that trusts its lengths turns a cut file into a wrong model. Common quantizations are decoded
with torch, a block of rows at a time; the rest goes through the `gguf` package, which is imported only then.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import logging
import math
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from .errors import CheckpointError, PeltonError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "GgufError",
    "GgufFile",
    "GgufTensor",
    "is_gguf",
    "iter_tensors",
    "read_config",
]

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral checkpoints are written as "llama"
CHUNK_ELEMENTS = 1 << 18  # elements decoded at a time: 1 MiB of fp32, so that a block stays in the cache


class GgufError(CheckpointError):
    """A GGUF file that cannot be used; the message names the file and what is wrong with it."""


# ---
# Types
# ---

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorType:
    """A ggml tensor type: `block` elements are stored in `size` bytes."""

    id: int
    name: str
    block: int
    size: int


_TYPES = {
    t.id: t
    for t in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
        TensorType(30, "BF16", 1, 2),
    )
}


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise PeltonError(
            f"this GGUF file needs the package gguf, which cannot be imported ({error}): pip install gguf"
        ) from error
    return gguf


def _tensor_type(type_id: int) -> TensorType | None:
    """The type with this number, from our table or from the `gguf` package's; None if nobody knows it."""
    if type_id in _TYPES:
        return _TYPES[type_id]
    package = _gguf_package()
    try:
        kind = package.GGMLQuantizationType(type_id)
        block, size = package.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        return None
    return TensorType(type_id, kind.name, block, size)


# ---
# Header
# ---


class StringArray(Sequence[str]):
    """Strings that are decoded when they are asked for: vocabularies are long, and often only counted."""

    def __init__(self, data: mmap.mmap, starts: list[int]) -> None:
        self._data = data
        self._starts = starts  # of each string's length, and the end of the last

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._data[self._starts[i] + 8 : self._starts[i + 1]].decode("utf-8", errors="surrogateescape")

    def __iter__(self) -> Iterator[str]:
        data = self._data
        for start, stop in pairwise(self._starts):
            yield data[start + 8 : stop].decode("utf-8", errors="surrogateescape")


class _Cursor:
    """Reads little-endian values and refuses to read past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.pos = 0
        self.end = len(data)

    def need(self, count: int, what: str) -> None:
        if count > self.end - self.pos:
            raise GgufError(
                f"{self.path}: cut short or corrupt: {what} needs {count} bytes at offset {self.pos}, "
                f"but the file ends at {self.end}. Download or copy it again."
            )

    def unpack(self, fmt: str, what: str) -> Any:
        size = struct.calcsize("<" + fmt)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + fmt, self.data, self.pos)
        self.pos += size
        return value

    def text(self, what: str) -> str:
        length = self.unpack("Q", f"the length of {what}")
        self.need(length, what)
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        return raw.decode("utf-8", errors="surrogateescape")

    def texts(self, count: int, what: str) -> StringArray:
        self.need(8 * count, what)  # each has a length of eight bytes, so a wild count ends here
        data, pos, end = self.data, self.pos, self.end
        unpack_length = struct.Struct("<Q").unpack_from
        starts = []
        for _ in range(count):
            starts.append(pos)
            if pos + 8 > end:
                break
            (length,) = unpack_length(data, pos)
            pos += 8 + length
        if pos > end or len(starts) < count:
            self.pos = starts[-1]
            self.need(max(8, pos - starts[-1]), f"string {len(starts) - 1} of {what}")
        self.pos = pos
        starts.append(pos)
        return StringArray(data, starts)

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind], f"the value of {key!r}")
        if kind == _STRING:
            return self.text(f"the value of {key!r}")
        if kind == _ARRAY:
            item = self.unpack("I", f"the element type of {key!r}")
            count = self.unpack("Q", f"the length of {key!r}")
            if item == _STRING:
                return self.texts(count, f"the array {key!r}")
            if item in _SCALARS:
                size = struct.calcsize("<" + _SCALARS[item])
                self.need(size * count, f"the array {key!r}")
                values = list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.pos))
                self.pos += size * count
                return values
            raise GgufError(
                f"{self.path}: corrupt: the array {key!r} has elements of type {item}, which is none"
            )
        raise GgufError(f"{self.path}: corrupt: {key!r} has type {kind}, which GGUF does not have")


@dataclass(frozen=True)
class _RawTensor:
    name: str
    shape: tuple[int, ...]  # as torch says it: rows first
    type: TensorType
    start: int  # absolute, in bytes
    num_bytes: int
    data: mmap.mmap


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise GgufError(f"{path}: the file is empty. Download or copy it again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path) -> tuple[dict[str, Any], list[_RawTensor]]:
    cursor = _Cursor(_map_file(path), path)
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise GgufError(f"{path}: not a GGUF file (it begins with {magic!r} instead of {MAGIC!r})")
    cursor.pos = 4
    version = cursor.unpack("I", "the version")
    if version & 0xFFFF == 0 and version:
        raise GgufError(f"{path}: a big-endian GGUF file; convert it to little endian (gguf-convert-endian)")
    if version not in SUPPORTED_VERSIONS:
        versions = " and ".join(map(str, SUPPORTED_VERSIONS))
        raise GgufError(f"{path}: GGUF version {version}; versions {versions} can be read")
    num_tensors = cursor.unpack("Q", "the number of tensors")
    num_keys = cursor.unpack("Q", "the number of metadata keys")
    cursor.need(13 * num_keys + 33 * num_tensors, f"a header of {num_keys} keys and {num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.text(f"metadata key {index} of {num_keys}")
        if key in metadata:
            raise GgufError(f"{path}: corrupt: the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.unpack("I", f"the type of {key!r}"), key)

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise GgufError(f"{path}: corrupt: general.alignment is {alignment!r}, not a power of two")

    described: list[tuple[str, tuple[int, ...], TensorType, int, int]] = []
    names: set[str] = set()
    for index in range(num_tensors):
        name = cursor.text(f"the name of tensor {index} of {num_tensors}")
        if name in names:
            raise GgufError(f"{path}: corrupt: the tensor {name!r} appears twice")
        names.add(name)
        num_dims = cursor.unpack("I", f"the number of dimensions of {name!r}")
        if not 1 <= num_dims <= 4:
            raise GgufError(f"{path}: corrupt: the tensor {name!r} has {num_dims} dimensions")
        dims = tuple(cursor.unpack("Q", f"the shape of {name!r}") for _ in range(num_dims))
        type_id = cursor.unpack("I", f"the type of {name!r}")
        offset = cursor.unpack("Q", f"the offset of {name!r}")
        kind = _tensor_type(type_id)
        if kind is None:
            raise GgufError(
                f"{path}: the tensor {name!r} has quantization type {type_id}, which is "
                f"unknown here. The file is damaged, or newer than the gguf package (pip install -U gguf)."
            )
        if 0 in dims or dims[0] % kind.block:
            raise GgufError(
                f"{path}: corrupt: {name!r} has shape {dims}, not in blocks of {kind.block} ({kind.name})"
            )
        if offset % alignment:
            raise GgufError(f"{path}: corrupt: the data of {name!r} is not aligned to {alignment} bytes")
        described.append((name, dims[::-1], kind, offset, math.prod(dims) // kind.block * kind.size))

    base = -(-cursor.pos // alignment) * alignment
    tensors = []
    for name, shape, kind, offset, num_bytes in described:
        start = base + offset
        if start + num_bytes > cursor.end:
            raise GgufError(
                f"{path}: cut short or corrupt: the tensor {name!r} lies at bytes {start} to "
                f"{start + num_bytes}, but the file ends at {cursor.end}. Download or copy it again."
            )
        tensors.append(_RawTensor(name, shape, kind, start, num_bytes, cursor.data))
    return metadata, tensors


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is a file that is, or by its name claims to be, a GGUF file."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


# ---
# Tensor names
# ---

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"
_IGNORED = re.compile(r"^(rope_freqs\.weight|blk\.\d+\.(rope_freqs|attn_rot_embd)(\.weight)?)$")


def _hf_name(name: str) -> str | None:
    """The Hugging Face name of a tensor; None when there is none."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}"
    return None


@dataclass(frozen=True)
class GgufTensor:
    """One tensor, not read yet.

    `name` is its Hugging Face name, `shape` as torch says it. `permuted_heads` is not 0 for the query and key
    projections of the llama architecture: the file pairs neighbouring rotary elements there, and `load` puts
    the rows back into Hugging Face's order (first halves, then second halves).
    """

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    type: TensorType
    permuted_heads: int
    _raw: _RawTensor
    _path: Path

    def load(
        self, dtype: torch.dtype | None = None, out: torch.Tensor | None = None, first_row: int = 0
    ) -> torch.Tensor:
        """Decode into a new tensor of `dtype` (default: fp32, or the file's own for F16 and BF16) or into
        `out`.

        `out` must have this shape, or fewer rows: those from `first_row` on; any dtype and strides will do. Only a
        block of rows is held in fp32 at a time.

        Raises:
            GgufError: the type can be recognized but not decoded.
        """
        import torch

        if out is None:
            own = {"F16": torch.float16, "BF16": torch.bfloat16}.get(self.type.name, torch.float32)
            out = torch.empty(self.shape, dtype=dtype or own)
        elif tuple(out.shape[1:]) != self.shape[1:] or first_row + out.shape[0] > self.shape[0]:
            raise ValueError(
                f"{self.gguf_name}: out has shape {tuple(out.shape)}, the tensor {self.shape} from row {first_row} on"
            )
        with _one_thread():
            self._load(out, first_row)
        return out

    def _load(self, out: torch.Tensor, first_row: int) -> None:
        import torch

        cols = self.shape[-1]
        num_rows = math.prod(self.shape[:-1])
        row_bytes = cols // self.type.block * self.type.size
        raw = _bytes_tensor(self._raw.data, self._raw.start, self._raw.num_bytes).view(num_rows, row_bytes)
        if len(self.shape) == 1 and self.permuted_heads:  # a bias: its elements are the rows
            out.copy_(self._decode(raw)[0][_half_order(cols, self.permuted_heads)])
            return
        order = _half_order(num_rows, self.permuted_heads) if self.permuted_heads else None
        flat = out.view(-1, cols)
        step = max(1, CHUNK_ELEMENTS // cols)
        for start in range(0, flat.shape[0], step):
            target = flat[start : start + step]
            rows = slice(first_row + start, first_row + start + target.shape[0])
            block = raw[rows] if order is None else raw[order[rows]]
            if self.type.name in _DECODERS and target.dtype == torch.float32 and target.is_contiguous():
                _decode_blocks(self.type, block, target)
            else:
                target.copy_(self._decode(block))

    def _decode(self, raw: torch.Tensor) -> torch.Tensor:
        """`raw` uint8 [rows, bytes] -> [rows, columns], fp32 (F16 and BF16: as they are)."""
        import torch

        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(self.type.name)
        if plain is not None:
            return raw.contiguous().view(plain)
        if self.type.name in _DECODERS:
            out = torch.empty(raw.shape[0], raw.shape[1] // self.type.size * self.type.block)
            _decode_blocks(self.type, raw, out)
            return out
        package = _gguf_package()
        try:
            values = package.dequantize(raw.contiguous().numpy(), package.GGMLQuantizationType(self.type.id))
        except NotImplementedError as error:
            raise GgufError(
                f"{self._path}: {self.gguf_name!r} is {self.type.name}, which cannot be decoded"
            ) from error
        return torch.from_numpy(values.reshape(raw.shape[0], -1))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: the steps here are so short that a second one is slower on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _half_order(rows: int, heads: int) -> torch.Tensor:
    """Where each Hugging Face row of a permuted projection lies in the file."""
    import torch

    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _bytes_tensor(data: mmap.mmap, start: int, count: int) -> torch.Tensor:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nobody writes to it
        return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start)


# ---
# Decoding. A decoder gets blocks uint8 [n, size] and fills out fp32 [n, block]; operations and their order
# are those of the `gguf` package, so that results are equal bit for bit.
# ---


def _decode_blocks(kind: TensorType, raw: torch.Tensor, out: torch.Tensor) -> None:
    """`raw` uint8 [rows, bytes], `out` contiguous fp32 [rows, columns]."""
    _DECODERS[kind.name](raw.reshape(-1, kind.size), out.view(-1, kind.block))


def _halves(raw: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """`count` fp16 values at byte `start` of every block, as fp32 [n, count]."""
    import torch

    return raw[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _q4_0(raw: torch.Tensor, out: torch.Tensor) -> None:
    scale, packed = _halves(raw, 0, 1), raw[:, 2:]
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    out.sub_(8).mul_(scale)


def _q4_1(raw: torch.Tensor, out: torch.Tensor) -> None:
    scale, low, packed = _halves(raw, 0, 1), _halves(raw, 2, 1), raw[:, 4:]
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    out.mul_(scale).add_(low)


def _fifth_bits(raw: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high bits of the first and of the last 16 elements, as 0 or 16, uint8 [n, 16] each."""
    import torch

    shifts = torch.arange(8, dtype=torch.uint8)
    bits = ((raw[:, start : start + 4, None] >> shifts) & 1).reshape(-1, 32) << 4
    return bits[:, :16], bits[:, 16:]


def _q5_0(raw: torch.Tensor, out: torch.Tensor) -> None:
    scale, packed = _halves(raw, 0, 1), raw[:, 6:]
    first, last = _fifth_bits(raw, 2)
    out[:, :16] = (packed & 15) | first
    out[:, 16:] = (packed >> 4) | last
    out.sub_(16).mul_(scale)


def _q5_1(raw: torch.Tensor, out: torch.Tensor) -> None:
    scale, low, packed = _halves(raw, 0, 1), _halves(raw, 2, 1), raw[:, 8:]
    first, last = _fifth_bits(raw, 4)
    out[:, :16] = (packed & 15) | first
    out[:, 16:] = (packed >> 4) | last
    out.mul_(scale).add_(low)


def _q8_0(raw: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    out.copy_(raw[:, 2:].view(torch.int8))
    out.mul_(_halves(raw, 0, 1))


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the eight sub-blocks of Q4_K and Q5_K, fp32 [n, 8]: d * sc and dmin * m."""
    import torch

    d, d_min = _halves(raw, 0, 1), _halves(raw, 2, 1)
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], 1)
    minima = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], 1)
    return d * scales, d_min * minima


def _q4_k(raw: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _k_scales(raw)
    packed = raw[:, 16:].unflatten(1, (4, 32))
    values = out.view(-1, 4, 2, 32)
    values[:, :, 0] = packed & 15
    values[:, :, 1] = packed >> 4
    out.view(-1, 8, 32).mul_(scales[:, :, None]).sub_(minima[:, :, None])


def _q5_k(raw: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _k_scales(raw)
    high, packed = raw[:, 16:48], raw[:, 48:].unflatten(1, (4, 32))
    values = out.view(-1, 4, 2, 32)
    for pair in range(4):  # bit i of the high bytes belongs to sub-block i
        values[:, pair, 0] = (packed[:, pair] & 15) | (((high >> (2 * pair)) & 1) << 4)
        values[:, pair, 1] = (packed[:, pair] >> 4) | (((high >> (2 * pair + 1)) & 1) << 4)
    out.view(-1, 8, 32).mul_(scales[:, :, None]).sub_(minima[:, :, None])


def _q6_k(raw: torch.Tensor, out: torch.Tensor) -> None:
    import torch

    low, high = raw[:, :128].unflatten(1, (2, 2, 32)), raw[:, 128:192].unflatten(1, (2, 32))
    scales = raw[:, 192:208].view(torch.int8).float() * _halves(raw, 208, 1)  # [n, 16], one for 16 elements
    values = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        bits = low[:, :, quarter % 2]
        bits = bits & 15 if quarter < 2 else bits >> 4
        values[:, :, quarter] = bits | (((high >> (2 * quarter)) & 3) << 4)
    out.sub_(32).view(-1, 16, 16).mul_(scales[:, :, None])


_DECODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# ---
# The file
# ---

_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")

# Tokens that end a turn: also an end of the text when the chat template writes them (files often name only
# one).
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|end_of_turn|>")


class GgufFile:
    """A GGUF file (or the first of a split one): `metadata`, `config()`, `tensors()`.

    Raises:
        GgufError: not a GGUF file, cut short, or corrupt.
        UnsupportedError: from `config` and `tensors`: a model that Pelton does not run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata, self._raw = _parse(self.path)
        count = self.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1:
            self._open_splits(count)
        self._by_name = {raw.name: raw for raw in self._raw}

    def _open_splits(self, count: int) -> None:
        match = _SPLIT_NAME.match(self.path.name)
        number = self.metadata.get("split.no", 0)
        if number != 0:
            raise GgufError(
                f"{self.path}: part {number + 1} of {count}; open the one with -00001-of-{count:05d}"
            )
        if match is None or int(match["count"]) != count:
            raise GgufError(
                f"{self.path}: the first of {count} parts, but not named NAME-00001-of-{count:05d}.gguf"
            )
        for index in range(1, count):
            part = self.path.with_name(f"{match['stem']}-{index + 1:05d}-of-{count:05d}.gguf")
            if not part.is_file():
                raise GgufError(f"{part}: missing; {self.path.name} is the first of {count} parts")
            metadata, raw = _parse(part)
            if metadata.get("split.no") != index or metadata.get("split.count") != count:
                raise GgufError(f"{part}: does not say that it is part {index + 1} of {count}")
            self._raw += raw
        total = self.metadata.get("split.tensors.count", len(self._raw))
        if total != len(self._raw):
            raise GgufError(
                f"{self.path}: the {count} parts hold {len(self._raw)} tensors, not the {total} announced"
            )

    @property
    def architecture(self) -> str:
        """`general.architecture`, which must be one that is supported."""
        name = self.metadata.get("general.architecture")
        if name is None:
            raise GgufError(f"{self.path}: has no general.architecture; is it a whole model?")
        if name not in SUPPORTED_ARCHITECTURES:
            known = ", ".join(SUPPORTED_ARCHITECTURES)
            raise UnsupportedError(
                f"{self.path}: architecture {name!r} is not supported; supported are {known}"
            )
        return str(name)

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        full = f"{self.architecture}.{key}" if not key.startswith("tokenizer.") else key
        value = self.metadata.get(full, default)
        if value is ...:
            raise GgufError(f"{self.path}: the metadata key {full!r} is missing")
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise GgufError(f"{self.path}: the metadata key {full!r} is {value!r}, not a number")
        return _shortest(value) if isinstance(value, float) else value

    def config(self) -> dict[str, Any]:
        """What `config.json` of the same model would hold.

        Raises:
            GgufError: a key is missing or of a wrong type.
            UnsupportedError: unsupported architecture, mixture of experts, or unknown rope scaling.
        """
        arch = self.architecture
        if self._get("expert_count", int, 0):
            raise UnsupportedError(
                f"{self.path}: a mixture of experts ({arch}.expert_count), which is not supported"
            )
        if "token_embd.weight" not in self._by_name:
            raise GgufError(f"{self.path}: has no tensor 'token_embd.weight'; is it a whole model?")
        hidden = self._get("embedding_length", int)
        heads = self._get("attention.head_count", int)
        if heads <= 0 or hidden <= 0:
            raise GgufError(f"{self.path}: corrupt: embedding length {hidden} with {heads} attention heads")
        head_dim = self._get("attention.key_length", int, hidden // heads)
        if head_dim <= 0:
            raise GgufError(f"{self.path}: corrupt: heads of {head_dim} elements")
        if self._get("attention.value_length", int, head_dim) != head_dim:
            raise UnsupportedError(f"{self.path}: keys and values of different length are not supported")
        has = self._by_name.__contains__
        qkv_bias, out_bias = has("blk.0.attn_q.bias"), has("blk.0.attn_output.bias")
        window = self._get("attention.sliding_window", int, 0)
        model_type, class_name = {
            "llama": ("llama", "LlamaForCausalLM"),
            "qwen2": ("qwen2", "Qwen2ForCausalLM"),
            "qwen3": ("qwen3", "Qwen3ForCausalLM"),
        }[arch]
        if arch == "llama" and qkv_bias and not out_bias:  # what sets Qwen2 apart from Llama is just this
            model_type, class_name = "qwen2", "Qwen2ForCausalLM"
        elif arch == "llama" and window:
            model_type, class_name = "mistral", "MistralForCausalLM"
        context = self._get("context_length", int)
        config: dict[str, Any] = {
            "architectures": [class_name],
            "model_type": model_type,
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length", int),
            "num_hidden_layers": self._get("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "vocab_size": self._by_name["token_embd.weight"].shape[0],
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon", float),
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rope_theta": self._get("rope.freq_base", float, 10000.0),
            "rope_scaling": self._rope_scaling(head_dim, context),
            "attention_bias": qkv_bias and (out_bias or arch == "qwen3"),
            "mlp_bias": has("blk.0.ffn_gate.bias"),
            "sliding_window": window or None,
            "use_sliding_window": bool(window),
            "tie_word_embeddings": not has("output.weight"),
            "torch_dtype": self._dtype_name(),
        }
        rotary = self._get("rope.dimension_count", int, head_dim)
        if rotary != head_dim:
            config["partial_rotary_factor"] = rotary / head_dim
        bos = self._get("tokenizer.ggml.bos_token_id", int, None)
        config["bos_token_id"] = bos
        eos = self.eos_token_ids()
        config["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
        return config

    def _dtype_name(self) -> str:
        """Half precision when the matrices are; what is quantized is exact in fp32 only."""
        kinds = {raw.type.name for raw in self._raw if len(raw.shape) > 1}
        return {frozenset(["BF16"]): "bfloat16", frozenset(["F16"]): "float16"}.get(
            frozenset(kinds), "float32"
        )

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: eos, end of turn or message, and the end of turn that the template writes."""
        ids = [self._get(f"tokenizer.ggml.{key}_token_id", int, None) for key in ("eos", "eot", "eom")]
        template = self.metadata.get("tokenizer.chat_template")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        types = self.metadata.get("tokenizer.ggml.token_type")
        if isinstance(template, str) and isinstance(tokens, StringArray) and isinstance(types, list):
            control = {tokens[i]: i for i, kind in enumerate(types[: len(tokens)]) if kind == 3}
            ids += [control[text] for text in _END_OF_TURN if text in template and text in control]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _rope_scaling(self, head_dim: int, context: int) -> dict[str, Any] | None:
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type")
        factor = self._get("rope.scaling.factor", float, self._get("rope.scale_linear", float, 1.0))
        original = self._get("rope.scaling.original_context_length", int, None)
        if ROPE_FREQS in self._by_name:
            theta = self._get("rope.freq_base", float, 10000.0)
            rotary = self._get("rope.dimension_count", int, head_dim)
            factors = self.tensor(ROPE_FREQS).load().flatten().tolist()
            if not all(0 < f < math.inf for f in factors) or not 0 < theta < math.inf or rotary <= 0:
                raise GgufError(
                    f"{self.path}: corrupt: {ROPE_FREQS!r}, a rope base of {theta:g} and a rotary size of {rotary} "
                    "give no rotation"
                )
            return _factors_as_scaling(factors, theta, rotary, context)
        if kind in (None, "linear"):
            return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
        if kind == "none":
            return None
        if kind == "yarn":
            if not 0 < factor < math.inf:
                raise GgufError(f"{self.path}: corrupt: a rope scaling factor of {factor:g}")
            scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
            scaling["original_max_position_embeddings"] = original or int(context / factor)
            attn_factor = self._get("rope.scaling.attn_factor", float, None)
            if attn_factor is not None:  # the file's multiplies the usual one, Hugging Face's replaces it
                scaling["attention_factor"] = attn_factor * (0.1 * math.log(factor) + 1.0)
            for key in ("beta_fast", "beta_slow"):
                value = self._get(f"rope.scaling.yarn_{key}", float, None)
                if value is not None:
                    scaling[key] = value
            return scaling
        raise UnsupportedError(
            f"{self.path}: rope scaling of type {kind!r} is not supported (linear and yarn are)"
        )

    def tensor(self, gguf_name: str) -> GgufTensor:
        """The tensor with this name in the file."""
        raw = self._by_name.get(gguf_name)
        if raw is None:
            raise GgufError(f"{self.path}: has no tensor {gguf_name!r}")
        return GgufTensor(gguf_name, gguf_name, raw.shape, raw.type, 0, raw, self.path)

    def tensors(self) -> Iterator[GgufTensor]:
        """Every parameter of the model, not read yet, in the file's order.

        Raises:
            GgufError: a tensor that the supported architectures do not have.
        """
        arch = self.architecture
        permuted: dict[str, int] = {}
        if arch == "llama":
            heads = self._get("attention.head_count", int)
            permuted = {"attn_q": heads, "attn_k": self._get("attention.head_count_kv", int, heads)}
        for raw in self._raw:
            if _IGNORED.match(raw.name):
                continue
            name = _hf_name(raw.name)
            if name is None:
                raise GgufError(f"{self.path}: the tensor {raw.name!r} is none of the architecture {arch!r}")
            num_heads = permuted.get(raw.name.split(".")[-2], 0)
            if num_heads and raw.shape[0] % (2 * num_heads):
                raise GgufError(
                    f"{self.path}: corrupt: {raw.name!r} of shape {raw.shape} with {num_heads} heads"
                )
            yield GgufTensor(name, raw.name, raw.shape, raw.type, num_heads, raw, self.path)


def _shortest(value: float) -> float:
    """The shortest decimal with the same fp32 value: files store fp32, so that 1e-5 reads 9.99999974e-06."""
    if not math.isfinite(value) or abs(value) > 3e38:  # a float64 may be larger than any fp32
        return value
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _factors_as_scaling(factors: list[float], theta: float, rotary: int, context: int) -> dict[str, Any]:
    """The `rope_scaling` that divides the rotary frequencies by `factors`.

    Llama 3 files carry the factors instead of the four numbers they came from. The numbers come back by
    solving for them: 1/f is 1 for short waves, 1/factor for long ones, and linear in the frequency between.
    Only the ratios to the original length count, so low_freq_factor is set to 1. Factors of another kind are
    handed on as they are, in longrope's spelling.
    """
    explicit = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }
    if len(factors) != rotary // 2:
        return explicit
    factor = max(factors)
    if factor <= 1.0:
        return explicit
    turns = [theta ** (-2 * i / rotary) / (2 * math.pi) for i in range(len(factors))]  # 1 / wave length
    smooth = [(1 / f - 1 / factor) / (1 - 1 / factor) for f in factors]
    middle = [i for i, s in enumerate(smooth) if 1e-4 < s < 1 - 1e-4]
    if len(middle) < 2:
        return explicit
    first, last = middle[0], middle[-1]
    slope = (smooth[first] - smooth[last]) / (turns[first] - turns[last])
    offset = slope * turns[first] - smooth[first]
    if slope <= 0 or offset <= 0:
        return explicit
    original, high = slope / offset, 1 + 1 / offset
    original = float(round(original)) if abs(original - round(original)) < 1e-3 * original else original
    high = float(round(high)) if abs(high - round(high)) < 1e-3 * high else high
    for f, t in zip(factors, turns, strict=True):
        s = min(1.0, max(0.0, (original * t - 1.0) / (high - 1.0)))
        if abs(1 / ((1 - s) / factor + s) - f) > 1e-3 * f:
            return explicit
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": int(original) if original.is_integer() else original,
    }


def read_config(path: str | Path) -> dict[str, Any]:
    """`GgufFile(path).config()`."""
    return GgufFile(path).config()


def iter_tensors(path: str | Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every parameter, one at a time; `dtype` as in `GgufTensor.load`."""
    for tensor in GgufFile(path).tensors():
        yield tensor.name, tensor.load(dtype)
