"""The three formats, written from their definitions with numpy: what the parsers are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantized:
    """A random quantized layer: W[n, k] = (q[n, k] - zeros[g, n]) * scales[g, n], g = g_idx[k]."""

    q: np.ndarray  # [N, K]
    zeros: np.ndarray  # [G, N]
    scales: torch.Tensor  # [G, N]
    g_idx: np.ndarray  # [K]
    bits: int
    group_size: int

    def dequantized(self) -> torch.Tensor:
        scales = self.scales.double().numpy()
        return torch.from_numpy((self.q - self.zeros[self.g_idx].T.astype(np.float64)) * scales[self.g_idx].T)


def quantized(
    n: int,
    k: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    order: str = "none",
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Quantized:
    rng = np.random.default_rng(seed)
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    g_idx = np.arange(k) // size
    if order == "equal":
        g_idx = rng.permutation(g_idx)
    elif order == "any":
        g_idx = rng.integers(0, groups, k)
    usual = np.full((groups, n), 1 << (bits - 1))
    zeros = usual if symmetric else rng.integers(0, 1 << bits, (groups, n))
    scales = torch.from_numpy(rng.uniform(0.5, 1.5, (groups, n)) / (1 << bits) / np.sqrt(k)).to(dtype)
    return Quantized(rng.integers(0, 1 << bits, (n, k)), zeros, scales, g_idx, bits, group_size)


def pack(fields: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words along the last axis, the first field in the low bits; padded with zeros."""
    count = 32 // bits
    fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, -fields.shape[-1] % count)])
    fields = fields.reshape(*fields.shape[:-1], -1, count).astype(np.uint64)
    return (fields << (np.arange(count, dtype=np.uint64) * np.uint64(bits))).sum(-1).astype(np.uint32)


def int32(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def gptq(weight: Quantized, version: int = 1) -> dict[str, torch.Tensor]:
    zeros = pack(weight.zeros, weight.bits)
    if version == 1:  # less one in the whole word, as the tools do it
        zeros = zeros - np.uint32(sum(1 << (weight.bits * i) for i in range(32 // weight.bits)))
    return {
        "qweight": int32(pack(weight.q, weight.bits).T),
        "qzeros": int32(zeros),
        "scales": weight.scales,
        "g_idx": torch.from_numpy(weight.g_idx.astype(np.int32)),
    }


def awq(weight: Quantized) -> dict[str, torch.Tensor]:
    def ordered(values: np.ndarray) -> np.ndarray:
        return values.reshape(*values.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(values.shape)

    return {
        "qweight": int32(pack(ordered(weight.q.T), 4)),
        "qzeros": int32(pack(ordered(weight.zeros), 4)),
        "scales": weight.scales,
    }


def compressed(weight: Quantized, symmetric: bool = False, order: bool = False) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": int32(pack(weight.q, weight.bits)),
        "weight_scale": weight.scales.t().contiguous(),
        "weight_shape": torch.tensor(weight.q.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = int32(pack(weight.zeros, weight.bits).T)
    if order:
        tensors["weight_g_idx"] = torch.from_numpy(weight.g_idx.astype(np.int32))
    return tensors


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head"],
}


@dataclass(frozen=True)
class Shape:
    """A tiny model of the Llama family."""

    hidden_size: int = 64
    intermediate_size: int = 96
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 48
    architecture: str = "LlamaForCausalLM"
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name not in ("architecture", "more")}
        return values | {
            "architectures": [self.architecture],
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "dtype": "float32",
            **self.more,
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of every linear layer."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        h, i = self.hidden_size, self.intermediate_size
        block = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)}
        block |= {
            "self_attn.o_proj": (h, q),
            "mlp.gate_proj": (i, h),
            "mlp.up_proj": (i, h),
            "mlp.down_proj": (h, i),
        }
        layers = range(self.num_hidden_layers)
        found = {f"model.layers.{layer}.{name}": size for layer in layers for name, size in block.items()}
        return found | {"lm_head": (self.vocab_size, h)}


Writer = Callable[[str, Quantized], dict[str, torch.Tensor]]
#: what a layer is: options of `quantized`, or None for plain weights
Recipe = Callable[[str], Mapping[str, Any] | None]


def write_model(
    folder: Path, shape: Shape, quantization: Mapping[str, Any], recipe: Recipe, writer: Writer
) -> Path:
    """A checkpoint in `folder`/packed, and the same weights in float32 in `folder`/plain."""
    generator = torch.Generator().manual_seed(3)
    shared = {
        "model.embed_tokens.weight": torch.randn(shape.vocab_size, shape.hidden_size, generator=generator),
        "model.norm.weight": torch.rand(shape.hidden_size, generator=generator) + 0.5,
    }
    for layer in range(shape.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{layer}.{norm}.weight"
            shared[name] = torch.rand(shape.hidden_size, generator=generator) + 0.5
    packed, plain = dict(shared), dict(shared)
    for seed, (name, (n, k)) in enumerate(shape.linears().items()):
        options = recipe(name)
        if options is None:
            packed[f"{name}.weight"] = torch.randn(n, k, generator=generator) / k**0.5
            plain[f"{name}.weight"] = packed[f"{name}.weight"]
            continue
        weight = quantized(n, k, seed=seed, **options)
        # the largest values of a random layer should be about 1, whatever its zero points are
        weight = replace(weight, scales=(weight.scales.float() * 3).to(weight.scales.dtype))
        plain[f"{name}.weight"] = weight.dequantized().float()
        packed |= {f"{name}.{suffix}": tensor for suffix, tensor in writer(name, weight).items()}
    for kind, tensors, extra in (
        ("plain", plain, {}),
        ("packed", packed, {"quantization_config": quantization}),
    ):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(shape.config() | extra))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / kind / "model.safetensors",
        )
    return folder / "packed"
