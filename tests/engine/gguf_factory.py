"""Small GGUF files for tests, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER = {
    "attn_norm.weight": ("hidden",),
    "attn_q.weight": ("q", "hidden"),
    "attn_k.weight": ("kv", "hidden"),
    "attn_v.weight": ("kv", "hidden"),
    "attn_output.weight": ("hidden", "q"),
    "ffn_norm.weight": ("hidden",),
    "ffn_gate.weight": ("ffn", "hidden"),
    "ffn_up.weight": ("ffn", "hidden"),
    "ffn_down.weight": ("hidden", "ffn"),
}
BIASES = {"attn_q.bias": ("q",), "attn_k.bias": ("kv",), "attn_v.bias": ("kv",)}
QK_NORMS = {"attn_q_norm.weight": ("head",), "attn_k_norm.weight": ("head",)}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """From Hugging Face's rows of a query or key projection to those of the llama architecture in GGUF."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def model_tensors(
    *,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    head: int = 32,
    ffn: int = 96,
    vocab: int = 40,
    layers: int = 2,
    tied: bool = False,
    extra: Mapping[str, tuple[str, ...]] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Random tensors under GGUF names, with the values that Hugging Face names would have (not permuted)."""
    rng = np.random.default_rng(seed)
    sizes = {"hidden": hidden, "q": heads * head, "kv": kv_heads * head, "ffn": ffn, "head": head}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for layer in range(layers):
        for name, dims in {**LAYER, **(extra or {})}.items():
            shapes[f"blk.{layer}.{name}"] = tuple(sizes[dim] for dim in dims)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """The metadata that go with `model_tensors()`; a change to None leaves the key out."""
    values: dict[str, Any] = {
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 96,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.key_length": 32,
        f"{arch}.attention.value_length": 32,
    }
    values.update(changes)
    return {key: value for key, value in values.items() if value is not None}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    values: Mapping[str, Any] | None = None,
    *,
    arch: str = "llama",
    quant: str | Mapping[str, str] = "F32",
    permuted: bool = True,
) -> Path:
    """Write a file. `quant` is the type of all matrices, or of each by name (F32 for the others)."""
    tensors = model_tensors() if tensors is None else tensors
    values = metadata(arch) if values is None else values
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        add_value(writer, key, value)
    heads = {
        "attn_q": values.get(f"{arch}.attention.head_count"),
        "attn_k": values.get(f"{arch}.attention.head_count_kv"),
    }
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if arch == "llama" and permuted and heads.get(kind):
            tensor = permute(tensor, heads[kind])
        wanted = quant if isinstance(quant, str) else quant.get(name, "F32")
        if tensor.ndim < 2 or wanted == "F32":
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            qtype = gguf.GGMLQuantizationType[wanted]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(tensor), qtype), raw_dtype=qtype)
    finish(writer)
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level_values(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pre: str | None, **changes: Any
) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer."""
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in values.items() if value is not None}


def sentencepiece_values(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], **changes: Any
) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer."""
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(types),
        **{f"tokenizer.{key}": value for key, value in changes.items()},
    }
    return {key: value for key, value in values.items() if value is not None}
