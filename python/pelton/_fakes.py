"""Fake kernels: what the operators do to shapes, for torch.compile and FakeTensorMode.

Every operator writes into tensors that its caller allocated and returns nothing, so a
fake kernel has only the agreement of shapes to check.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["register"]


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    torch._check(out.shape == x.shape, lambda: "rms_norm: out must have the shape of x")
    torch._check(weight.shape == x.shape[-1:], lambda: "rms_norm: weight must have x's last dimension")


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    torch._check(residual.shape == x.shape, lambda: "fused_add_rms_norm: residual must have the shape of x")
    torch._check(
        weight.shape == x.shape[-1:], lambda: "fused_add_rms_norm: weight must have x's last dimension"
    )


def _rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool
) -> None:
    torch._check(
        query.dim() == 3 and key.dim() == 3,
        lambda: "rotary_embedding: query and key must be [num_tokens, num_heads, head_size]",
    )


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    torch._check(
        out.shape[-1] * 2 == x.shape[-1], lambda: "silu_and_mul: out must have half of x's last dimension"
    )


def _gelu_and_mul(out: Tensor, x: Tensor, approximate: str) -> None:
    torch._check(
        out.shape[-1] * 2 == x.shape[-1], lambda: "gelu_and_mul: out must have half of x's last dimension"
    )


def _embedding(out: Tensor, ids: Tensor, weight: Tensor) -> None:
    torch._check(
        out.dim() == 2 and out.shape[-1] == weight.shape[-1],
        lambda: "embedding: out must be [num_tokens, hidden_size]",
    )


def _reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    torch._check(
        key_cache.shape == value_cache.shape, lambda: "reshape_and_cache: the caches must have one shape"
    )


def _copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    torch._check(key_cache.shape == value_cache.shape, lambda: "copy_blocks: the caches must have one shape")


def _swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    torch._check(src.shape[1:] == dst.shape[1:], lambda: "swap_blocks: src and dst must have equal blocks")


def _linear(out: Tensor, x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> None:
    torch._check(
        packed_weight.dim() == 3 and packed_weight.shape[1] == x.shape[-1],
        lambda: "linear: packed_weight must be [panels, in_features, panel width] with x's last dimension",
    )


def _pack_quant_weight(packed: Tensor, q: Tensor, order: Tensor | None, bits: int) -> None:
    torch._check(
        packed.dim() == 3 and q.dim() == 2,
        lambda: "pack_quant_weight: packed must be [panels, blocks, bytes], q [out_features, in_features]",
    )


def _quant_linear(
    out: Tensor,
    x: Tensor,
    packed_weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    int8: bool,
) -> None:
    torch._check(out.shape[:-1] == x.shape[:-1], lambda: "quant_linear: out must have x's leading dimensions")
    torch._check(
        packed_weight.dim() == 3, lambda: "quant_linear: packed_weight must be [panels, blocks, bytes]"
    )


def _pack_linear_weight(packed: Tensor, weight: Tensor) -> None:
    torch._check(
        packed.dim() == 3 and packed.shape[1] == weight.shape[1],
        lambda: "pack_linear_weight: packed must be [panels, in_features, panel width]",
    )


def _marlin_repack(out: Tensor, q: Tensor, perm: Tensor | None, bits: int) -> None:
    torch._check(q.dim() == 2, lambda: "marlin_repack: q must be [out_features, in_features]")
    torch._check(
        out.dim() == 3 and out.shape[2] == 128 * bits,
        lambda: "marlin_repack: out must be [tiles, tiles, 128 * bits]",
    )


def _marlin_gemm(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    workspace: Tensor,
    bits: int,
    group_size: int,
) -> None:
    torch._check(
        out.shape[:-1] == x.shape[:-1], lambda: "marlin_gemm: out must have the leading dimensions of x"
    )
    torch._check(
        weight.dim() == 3 and scales.dim() == 3,
        lambda: "marlin_gemm: weight and scales must have three dimensions",
    )


def _gptq_gemm(
    out: Tensor,
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor | None,
    scales: Tensor,
    g_idx: Tensor | None,
    order: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
) -> None:
    torch._check(
        out.shape == (*x.shape[:-1], qweight.shape[1]),
        lambda: "gptq_gemm: out must be [..., out_features of qweight] with the leading dimensions of x",
    )


def _gptq_dequantize(
    out: Tensor,
    qweight: Tensor,
    qzeros: Tensor | None,
    scales: Tensor,
    g_idx: Tensor | None,
    order: Tensor | None,
    bits: int,
    group_size: int,
) -> None:
    torch._check(
        out.dim() == 2 and out.shape[1] == qweight.shape[1],
        lambda: "gptq_dequantize: out must be [in_features, out_features]",
    )


def _gptq_shuffle(out: Tensor, qweight: Tensor, order: Tensor, bits: int) -> None:
    torch._check(
        out.dim() == 2 and out.shape[1] == qweight.shape[1],
        lambda: "gptq_shuffle: out must have the outputs of qweight",
    )


def _awq_gemm(
    out: Tensor,
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> None:
    torch._check(
        out.shape == (*x.shape[:-1], scales.shape[1]),
        lambda: "awq_gemm: out must be [..., out_features of scales] with the leading dimensions of x",
    )


def _awq_dequantize(out: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> None:
    torch._check(
        out.shape == (qweight.shape[0], scales.shape[1]),
        lambda: "awq_dequantize: out must be [in_features, out_features]",
    )


def _paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    workspace: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    torch._check(out.shape == query.shape, lambda: "paged_attention: out must have the shape of query")


def _sample(
    out: Tensor,
    logprobs: Tensor | None,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    workspace: Tensor,
) -> None:
    torch._check(logits.dim() == 2, lambda: "sample: logits must be [rows, vocab]")
    torch._check(out.shape == logits.shape[:1], lambda: "sample: out must be [rows]")


def _greedy_sample(out: Tensor, logits: Tensor, workspace: Tensor) -> None:
    torch._check(logits.dim() == 2, lambda: "greedy_sample: logits must be [rows, vocab]")
    torch._check(out.shape == logits.shape[:1], lambda: "greedy_sample: out must be [rows]")


_FAKES = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "rotary_embedding": _rotary_embedding,
    "silu_and_mul": _silu_and_mul,
    "gelu_and_mul": _gelu_and_mul,
    "embedding": _embedding,
    "reshape_and_cache": _reshape_and_cache,
    "copy_blocks": _copy_blocks,
    "swap_blocks": _swap_blocks,
    "linear": _linear,
    "pack_linear_weight": _pack_linear_weight,
    "pack_quant_weight": _pack_quant_weight,
    "quant_linear": _quant_linear,
    "marlin_repack": _marlin_repack,
    "marlin_gemm": _marlin_gemm,
    "gptq_gemm": _gptq_gemm,
    "gptq_dequantize": _gptq_dequantize,
    "gptq_shuffle": _gptq_shuffle,
    "awq_gemm": _awq_gemm,
    "awq_dequantize": _awq_dequantize,
    "paged_attention": _paged_attention,
    "sample": _sample,
    "greedy_sample": _greedy_sample,
}


def register() -> None:
    """Registers a fake kernel for every operator that the library has; call once, after it is loaded.

    A build may leave a family of kernels out; the operators that it would bring do not exist then.
    """
    for name, fake in _FAKES.items():
        if hasattr(torch.ops.pelton, name):
            torch.library.register_fake(f"pelton::{name}", fake)
