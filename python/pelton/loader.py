"""Checkpoints: their tensors by Hugging Face name, checked before anything is loaded, then read in one pass.

A folder's weights are found in this order: 1. the shards that `model.safetensors.index.json` names,
2. `model.safetensors`, 3. every `*.safetensors` but Mistral's `consolidated*`. Pickled weights are refused, because
unpickling runs whatever code the file holds. The safetensors header is read here and the data with plain reads, not
memory-mapped: a damaged file is an error that names it, and the file's pages do not stay beside the packed weights. On the
way to a GPU a tensor passes through two pinned buffers, so that one is sent while the other is read.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import logging
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch

from .config import read_json
from .errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from .layers import Weight

__all__ = [
    "Checkpoint",
    "CheckpointTensor",
    "check_num_layers",
    "dummy_checkpoint",
    "load_weights",
    "open_checkpoint",
    "read_safetensors_header",
]

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_DTYPES = _FLOATS | {"I32": torch.int32, "I64": torch.int64}
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_MAX_HEADER = 100_000_000  # the format's own limit
_CHUNK = 8 << 20
_PINNED_BYTES = 32 << 20  # of each of the two buffers; a longer row gets longer ones
#: tensors of old checkpoints that hold no weights: the rotation's frequencies
_IGNORED_SUFFIX = "rotary_emb.inv_freq"

Progress = Callable[[int, int], None]


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint that was not read yet."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def load(self, *, out: Tensor, first_row: int = 0) -> Any:
        """Read as many rows as `out` has, from `first_row` on (any float dtype; integers as they are)."""


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor in a safetensors file, at byte `offset` of it."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    path: Path
    offset: int
    num_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        if self.dtype_name not in _DTYPES:
            raise UnsupportedError(
                f"{self.path}: {self.name!r} is of type {self.dtype_name}; Pelton reads {', '.join(_FLOATS)}"
            )
        return _DTYPES[self.dtype_name]

    def load(self, *, out: Tensor, first_row: int = 0) -> None:
        """Read the rows into `out`, converted to its dtype; straight into its memory when that is the file's dtype."""
        with self._open(first_row * math.prod(self.shape[1:]) * self.dtype.itemsize) as file:
            if out.dtype == self.dtype and out.is_contiguous():
                self._fill(file, out.view(-1).view(torch.uint8).numpy())
                return
            target = out.view(-1)
            source = torch.empty(min(_CHUNK // self.dtype.itemsize, target.numel()), dtype=self.dtype)
            for first in range(0, target.numel(), max(1, source.numel())):
                part = source[: target.numel() - first]
                self._fill(file, part.view(torch.uint8).numpy())
                target[first : first + part.numel()] = part

    def equals(self, other: SafetensorsTensor) -> bool:
        """Whether both hold the same bytes."""
        if (self.shape, self.dtype_name) != (other.shape, other.dtype_name):
            return False
        with self._open() as mine, other._open() as theirs:
            for first in range(0, self.num_bytes, _CHUNK):
                count = min(_CHUNK, self.num_bytes - first)
                if mine.read(count) != theirs.read(count):
                    return False
        return True

    def _open(self, start: int = 0) -> BinaryIO:
        file = self.path.open("rb", buffering=0)
        file.seek(self.offset + start)
        return file

    def _fill(self, file: BinaryIO, buffer: Any) -> None:
        view = memoryview(buffer)
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{self.path}: cut short in {self.name!r}; download the file again")
            view = view[count:]


@dataclass(frozen=True)
class DummyTensor:
    """A tensor that no file has: random numbers like those of a fresh model, ones where it is a vector."""

    name: str
    shape: tuple[int, ...]
    fill: Callable[[Tensor, torch.Generator], None] | None = None

    def load(self, *, out: Tensor, first_row: int = 0) -> None:
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(f"{self.name} {first_row}".encode()))
        if self.fill is not None:
            self.fill(out, generator)
        elif len(self.shape) == 1:
            out.fill_(1.0)
        else:
            out.normal_(0.0, 0.02, generator=generator)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a model, by Hugging Face name, in the order in which they are best read."""

    path: Path
    tensors: Mapping[str, CheckpointTensor]

    @cached_property
    def dtype(self) -> str:
        """The dtype that most elements are stored in, quantized ones aside (float32 for GGUF files)."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            dtype = tensor.dtype if isinstance(tensor, SafetensorsTensor) else torch.float32
            if dtype.is_floating_point:
                counts[str(dtype).removeprefix("torch.")] += math.prod(tensor.shape)
        most = counts.most_common(1)[0][0] if counts else "float32"
        return "float32" if most == "float64" else most


def dummy_checkpoint(model: str | Path, weights: Mapping[str, Weight]) -> Checkpoint:
    """A checkpoint for these places that holds random numbers; no file but config.json is needed."""
    return Checkpoint(
        Path(model), {name: DummyTensor(name, weight.shape, weight.fill) for name, weight in weights.items()}
    )


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Find the tensors of a Hugging Face folder or a GGUF file; no weight is read.

    Raises:
        CheckpointError: files are missing, damaged, incomplete or pickled.
    """
    path = Path(model)
    if path.is_dir():
        return Checkpoint(path, _folder_tensors(path))
    from . import gguf

    if not gguf.is_gguf(path):
        raise CheckpointError(f"{path}: neither a folder with safetensors nor a GGUF file")
    return Checkpoint(path, {tensor.name: tensor for tensor in gguf.GgufFile(path).tensors()})


def _folder_tensors(folder: Path) -> dict[str, CheckpointTensor]:
    expected: dict[str, str] = {}
    if _is_there(folder / _INDEX):
        expected = _read_index(folder / _INDEX)
        files = [folder / name for name in dict.fromkeys(expected.values())]
    elif _is_there(folder / "model.safetensors"):
        files = [folder / "model.safetensors"]
    else:
        files = sorted(
            file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")
        )
    if not files:
        raise _no_weights(folder)
    for file in files:
        if not _is_there(file):
            raise CheckpointError(f"{file}: this shard is missing, {_INDEX} names it; download the file")
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        for tensor in read_safetensors_header(file):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{file}: {tensor.name!r} is in another shard already; the folder mixes checkpoints"
                )
            tensors[tensor.name] = tensor
    for name, shard in expected.items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / shard}: {_INDEX} says that {name!r} is in this file, but it is not"
            )
    return tensors


def _is_there(path: Path) -> bool:
    """Whether this file exists. Raises CheckpointError for what has its name and is no file."""
    if path.is_file():
        return True
    if path.exists():
        what = "a folder" if path.is_dir() else "a pipe, a socket or a device"
        raise CheckpointError(f"{path}: this is {what}, expected a file")
    if path.is_symlink():
        raise CheckpointError(
            f"{path}: a link to {str(path.readlink())!r}, where no file is found; download the file again"
        )
    return False


def _no_weights(folder: Path) -> CheckpointError:
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        return CheckpointError(
            f"{folder}: the weights are pickled ({', '.join(pickled[:3])}), and Pelton does not read them: unpickling "
            "runs whatever code the file holds. Use the model's safetensors files, or convert it once in a place you "
            "trust (transformers' save_pretrained writes safetensors)"
        )
    return CheckpointError(f"{folder}: no weights; Pelton reads model.safetensors, or shards with {_INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: has no weight_map (tensor name to file name); download the file again"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {name!r} is said to be in {file!r}; it must be the plain name of a .safetensors file"
            )
    return weight_map


def read_safetensors_header(path: Path) -> list[SafetensorsTensor]:
    """The tensors of a safetensors file in the order of their data, every length checked against the file's.

    Raises:
        CheckpointError: the file is empty, cut short or damaged.
    """
    damaged = "download the file again"
    size = path.stat().st_size
    if size < 8:
        what = "the file is empty" if size == 0 else f"cut short: {size} bytes are no safetensors file"
        raise CheckpointError(f"{path}: {what}; {damaged}")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{path}: not a safetensors file, or damaged: the header is said to have {length} bytes, the file "
                f"has {size}; {damaged}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header is not JSON or damaged ({error}); {damaged}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object; {damaged}")
    start = 8 + length
    tensors = [
        _header_entry(path, name, entry, start, size)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_layout(path, tensors, start, size)
    return tensors


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twin = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {twin!r:.200} twice")
    return found


def _check_layout(path: Path, tensors: Sequence[SafetensorsTensor], start: int, size: int) -> None:
    """The format allows neither holes nor bytes that belong to two tensors. Raises CheckpointError."""
    before, end = "the header", start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps with" if tensor.offset < end else "leaves a hole behind"
            raise CheckpointError(
                f"{path}: damaged: {tensor.name!r} begins at byte {tensor.offset} and {what} {before}, which ends at "
                f"byte {end}; download the file again"
            )
        before, end = repr(tensor.name), end + tensor.num_bytes
    if end != size:
        raise CheckpointError(
            f"{path}: damaged: {size - end} bytes follow {before}, which ends at byte {end}; download the file again"
        )


def _header_entry(path: Path, name: str, entry: Any, start: int, size: int) -> SafetensorsTensor:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)) or not isinstance(dtype, str):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: damaged header entry for {name!r}: {entry!r}; download the file again"
        ) from None
    if start + last > size:
        raise CheckpointError(
            f"{path}: cut short: {name!r} ends at byte {start + last}, the file has {size}; download the file again"
        )
    itemsize = _SIZES.get(dtype, 1)
    if last - first != math.prod(shape) * itemsize:
        raise CheckpointError(
            f"{path}: damaged: {name!r} of shape {list(shape)} and type {dtype} has {last - first} bytes; "
            "download the file again"
        )
    return SafetensorsTensor(name, shape, dtype, path, start + first, last - first)


def check_num_layers(checkpoint: Checkpoint, num_layers: int) -> None:
    """Raise CheckpointError if the config has more layers than the checkpoint."""
    numbers = (re.match(r"model\.layers\.(\d+)\.", name) for name in checkpoint.tensors)
    found = len({match[1] for match in numbers if match})
    if num_layers > found:
        raise CheckpointError(
            f"{checkpoint.path}: the config says {num_layers} layers, the weights have {found}; they do not belong "
            "together, or files are missing"
        )


def load_weights(
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    *,
    tied: bool = False,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> None:
    """Read every tensor of the checkpoint into its place, one after the other: the order of the file, but what has
    to be checked comes first, and what makes one weight together.

    `weights` are the model's, by Hugging Face name. Names, shapes and types are checked first, before memory is
    taken. `tied` says that lm_head may be missing: `weights` then has no place for it unless the checkpoint has it.
    `device` is where the places are, if not on the CPU.

    Raises:
        CheckpointError: a tensor is missing, unexpected, or of another shape than the config says.
        UnsupportedError: a tensor of a type that Pelton does not read.
    """
    sources = dict(_checked(checkpoint, weights))
    if tied:
        _warn_if_untied(checkpoint)
    total = sum(math.prod(source.shape) for source in sources.values())
    done = 0
    if progress:
        progress(0, total)
    uploader = None if device is None or device.type == "cpu" else _Uploader(device)
    for name in _reading_order(list(sources), weights):
        source, weight = sources[name], weights[name]
        direct = uploader is None or weight.early or isinstance(source, DummyTensor)
        weight.load(source if direct or uploader is None else _Uploaded(source, uploader))
        done += math.prod(source.shape)
        if progress:
            progress(done, total)


def _reading_order(names: Sequence[str], weights: Mapping[str, Weight]) -> list[str]:
    place: dict[object, int] = {}
    for index, name in enumerate(names):
        place.setdefault(weights[name].owner or name, index)
    return sorted(names, key=lambda name: (not weights[name].early, place[weights[name].owner or name]))


class _Uploader:
    """Two pinned buffers: while one is on its way to the device, the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._next = 0

    def send(self, source: CheckpointTensor, out: Tensor, first_row: int) -> None:
        row_bytes = max(1, math.prod(out.shape[1:]) * out.itemsize)
        rows = max(1, _PINNED_BYTES // row_bytes)
        for first in range(0, out.shape[0], rows):
            target = out[first : first + rows]
            index, self._next = self._next, 1 - self._next
            self._sent[index].synchronize()
            if self._buffers[index].numel() < target.numel() * target.itemsize:
                size = max(_PINNED_BYTES, row_bytes)
                self._buffers[index] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            piece = (
                self._buffers[index][: target.numel() * target.itemsize].view(out.dtype).view(target.shape)
            )
            source.load(out=piece, first_row=first_row + first)
            target.copy_(piece, non_blocking=True)
            self._sent[index].record(torch.cuda.current_stream(self._device))


@dataclass(frozen=True)
class _Uploaded:
    """A tensor of a checkpoint whose `load` fills memory of a GPU."""

    source: CheckpointTensor
    uploader: _Uploader

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """What it is stored in."""
        return self.source.dtype if isinstance(self.source, SafetensorsTensor) else torch.float32

    def load(self, *, out: Tensor, first_row: int = 0) -> None:
        self.uploader.send(self.source, out, first_row)


def _checked(checkpoint: Checkpoint, weights: Mapping[str, Weight]) -> Iterator[tuple[str, CheckpointTensor]]:
    missing = [name for name in weights if name not in checkpoint.tensors]
    unexpected = [
        name for name in checkpoint.tensors if name not in weights and not name.endswith(_IGNORED_SUFFIX)
    ]
    for what, names in (("is missing", missing), ("is none of this model's", unexpected)):
        if names:
            others = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            raise CheckpointError(
                f"{checkpoint.path}: the tensor {names[0]!r} {what}{others}; the config and the weights do not belong "
                "together, or files are missing"
            )
    for name, source in checkpoint.tensors.items():
        if name not in weights:
            continue
        if tuple(source.shape) != weights[name].shape:
            raise CheckpointError(
                f"{_file_of(source, checkpoint)}: {name!r} has the shape {list(source.shape)}, {weights[name].asked_by} "
                f"asks for {list(weights[name].shape)}"
            )
        if isinstance(source, SafetensorsTensor) and source.dtype not in weights[name].dtypes:
            expected = ", ".join(tag for tag, dtype in _DTYPES.items() if dtype in weights[name].dtypes)
            raise UnsupportedError(
                f"{source.path}: {name!r} is of type {source.dtype_name}; Pelton reads {expected}"
            )
        yield name, source


def _file_of(source: CheckpointTensor, checkpoint: Checkpoint) -> Path:
    return source.path if isinstance(source, SafetensorsTensor) else checkpoint.path


def _warn_if_untied(checkpoint: Checkpoint) -> None:
    """Transformers takes the file's lm_head even if the config ties it to the embedding: so do we, aloud."""
    head, embedding = (
        checkpoint.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    if (
        isinstance(head, SafetensorsTensor)
        and isinstance(embedding, SafetensorsTensor)
        and not head.equals(embedding)
    ):
        logger.warning(
            "%s: the config says tie_word_embeddings, but the file has a lm_head.weight of its own that differs from "
            "the embedding: the file's is used",
            checkpoint.path,
        )
