"""The operators: one function each, which allocates the output and calls ``torch.ops.pelton``.

Importing this module loads the kernel library; a build for GPUs can be imported on a machine that
it does not fit, where the first operator says why. Float tensors are float32, float16 or bfloat16
and arithmetic is done in float32. Tensors lie where the library's kernels run (:func:`backend`).
:mod:`pelton.ops_reference` (here ``ops.reference``) holds a plain torch implementation of each
function.

A wrong shape, dtype, stride or device raises RuntimeError, whose message begins with the operator's
name. Run-time values (positions, slots, ids, lengths) are read when the kernel runs, also in each
replay of a graph. CPU kernels check them and raise the same error; GPU kernels, for which nobody
waits, leave out what is out of range, as each function says.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import _library
from . import ops_reference as reference

__all__ = [
    "SAMPLE_MAX_VOCAB",
    "awq_dequantize",
    "awq_gemm",
    "backend",
    "copy_blocks",
    "embedding",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "gptq_dequantize",
    "gptq_gemm",
    "gptq_shuffle",
    "greedy_sample",
    "linear",
    "linear_panel_width",
    "marlin_gemm",
    "marlin_pack_scales",
    "marlin_repack",
    "marlin_workspace_size",
    "pack_linear_weight",
    "pack_quant_groups",
    "pack_quant_weight",
    "paged_attention",
    "paged_attention_workspace_size",
    "quant_linear",
    "quant_panel_width",
    "reference",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "sample_workspace_size",
    "silu_and_mul",
    "swap_blocks",
]

# Overloads are called as `.default`: a decode step runs hundreds of operators, and the packet
# in front of them would resolve the overload each time.
_ops = _library.operators()


@functools.cache
def backend() -> str:
    """What the loaded library's kernels run on: "cpu", "cuda", "rocm", or "emulation" (GPU kernels in tests).

    Operators take tensors on that device: cuda tensors for "cuda" and "rocm", else CPU tensors.
    """
    return str(_ops.backend.default())


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    ``x`` [..., hidden_size], rows of one or two strides (all heads of a qkv buffer in one call);
    ``weight`` [hidden_size], dtype of ``x``. ``out`` may be ``x``.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if out is None:
        out = torch.empty_like(x)
    _ops.rms_norm.default(out, x, weight, eps)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """``residual += x``, then ``x = rms_norm(residual, weight, eps)``, both in place.

    ``x`` and ``residual`` [..., hidden_size], ``weight`` [hidden_size], all of one dtype. The sum
    is rounded to that dtype before it is normalized.
    """
    _ops.fused_add_rms_norm.default(x, residual, weight, eps)


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    """Rotates ``query`` and ``key`` by their positions, in place.

    ``query`` [num_tokens, num_heads, head_size] and ``key`` [num_tokens, num_kv_heads, head_size],
    of one dtype, any token and head stride (views of one qkv buffer); ``positions`` int64
    [num_tokens]; ``cos_sin_cache`` float32 [max_position, rotary_dim], cosines in the first half of
    a row and sines in the second. On a GPU a token whose position is not in the table stays as it is. The first ``rotary_dim`` elements of a head rotate, in pairs
    (i, i + rotary_dim / 2), or (2i, 2i + 1) when ``interleaved``.
    Under torch.compile with Inductor and dynamic shapes give it tensors of their own: torch 2.13 makes
    wrong code for slices of a view that an operator changes in place.
    Source: Su et al., "RoFormer", 2021; the first pairing is GPT-NeoX's.
    """
    _ops.rotary_embedding.default(query, key, positions, cos_sin_cache, interleaved)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` where ``x`` [..., 2d] is ``gate`` and ``up`` side by side; gives [..., d].

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _ops.silu_and_mul.default(out, x)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """``gelu(gate) * up`` where ``x`` [..., 2d] is ``gate`` and ``up`` side by side; gives [..., d].

    ``approximate`` is "none" (with the error function) or "tanh", as in ``torch.nn.GELU``.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _ops.gelu_and_mul.default(out, x, approximate)
    return out


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows ``ids`` (int64 [num_tokens]) of ``weight`` [vocab_size, hidden_size].

    An id outside the vocabulary raises RuntimeError and nothing is written; on a GPU its row is zeros.
    """
    if out is None:
        out = weight.new_empty((ids.shape[0], weight.shape[1]))
    _ops.embedding.default(out, ids, weight)
    return out


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes the keys and values of new tokens into one layer's paged cache.

    ``key``, ``value`` [num_tokens, num_kv_heads, head_size], any token and head stride; caches
    [num_blocks, num_kv_heads, block_size, head_size]; ``slot_mapping`` int64 [num_tokens], slot =
    block * block_size + offset. A negative slot is skipped; one past the cache raises RuntimeError
    and nothing is written, on a GPU it is skipped. No two tokens may have one slot.
    """
    _ops.reshape_and_cache.default(key, value, key_cache, value_cache, slot_mapping)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks within one layer's caches, pair after pair in the order of the list.

    ``block_mapping`` int64 [n, 2], rows of (source, destination). A block outside the cache raises
    RuntimeError and nothing is written; on a GPU its pair is skipped.
    """
    _ops.copy_blocks.default(key_cache, value_cache, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks of ``src`` to blocks of ``dst``, pair after pair in the order of the list.

    ``src`` and ``dst`` [num_blocks, ...] of one dtype and equal block shape; ``block_mapping`` int64
    [n, 2], rows of (block of src, block of dst). With GPU kernels one of ``src`` and ``dst`` may be in pinned
    host memory; the copy is done in the current stream. A ``block_mapping`` in host memory is read and
    checked at once, and the copy engines do the work; one on the GPU is read by a kernel when its turn comes
    (a CUDA graph can replay it with other pairs), which skips a pair that is out of range.
    """
    _ops.swap_blocks.default(src, dst, block_mapping)


@functools.cache
def linear_panel_width() -> int:
    """How many output features one panel of a packed weight holds."""
    return int(_ops.linear_panel_width.default())


def pack_linear_weight(weight: Tensor) -> Tensor:
    """``weight`` [out_features, in_features] in the layout that :func:`linear` reads.

    Gives [ceil(out_features / P), in_features, P] with P = :func:`linear_panel_width`, padded with zeros.
    """
    width = linear_panel_width()
    packed = weight.new_empty((-(-weight.shape[0] // width), weight.shape[1], width))
    _ops.pack_linear_weight.default(packed, weight)
    return packed


def linear(
    x: Tensor,
    packed_weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``; ``packed_weight`` from :func:`pack_linear_weight`.

    ``x`` [..., in_features], rows of any one stride; gives [..., out_features] in the dtype of ``x``. Weight
    and ``bias`` [out_features] keep their own dtypes, and sums are kept in float32. Made for one row, where
    memory is the limit, as well as for thousands, where arithmetic is.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], out_features))
    _ops.linear.default(out, x, packed_weight, bias)
    return out


@functools.cache
def quant_panel_width() -> int:
    """How many output features one panel of a packed quantized weight holds."""
    return int(_ops.quant_panel_width.default())


def pack_quant_weight(q: Tensor, bits: int, order: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantized weights ``q`` uint8 [out_features, in_features] in the layout that :func:`quant_linear` reads.

    Gives uint8 [ceil(out_features / P), blocks, 4 * bits * P] with P = :func:`quant_panel_width` and blocks of 32
    inputs; ``bits`` is 4 or 8, and higher bits of ``q`` are left out. ``order`` int32 [32 * blocks]: input k of the
    result is input ``order[k]`` of ``q``, none for -1. On the CPU, in builds with the feature awq or gptq.
    """
    out_features, in_features = q.shape
    blocks = -(-(in_features if order is None else order.shape[0]) // 32)
    width = quant_panel_width()
    if out is None:
        out = q.new_empty((-(-out_features // width), blocks, 4 * bits * width))
    _ops.pack_quant_weight.default(out, q, order, bits)
    return out


def pack_quant_groups(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Scales or zeros [groups, out_features] as :func:`quant_linear` reads them: [ceil(out_features / P), groups, P]."""
    groups, out_features = values.shape
    width = quant_panel_width()
    full, rest = divmod(out_features, width)
    if out is None:
        out = values.new_empty(full + bool(rest), groups, width)
    out[:full] = values[:, : full * width].view(groups, full, width).transpose(0, 1)
    if rest:
        out[full, :, :rest] = values[:, full * width :]
        out[full, :, rest:] = 0
    return out


def quant_linear(
    x: Tensor,
    packed_weight: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    zeros: Tensor | None = None,
    order: Tensor | None = None,
    bias: Tensor | None = None,
    int8: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with quantized weights, ``W[n, k] = (q[n, k] - zeros[group, n]) * scales[group, n]``.

    ``x`` [..., in_features], rows of any one stride; gives [..., out_features] in the dtype of ``x``.
    ``packed_weight`` and ``order`` as for :func:`pack_quant_weight`; ``scales`` and ``zeros`` (uint8; None:
    ``2 ** (bits - 1)``) from :func:`pack_quant_groups`. The group of input k (after ``order``) is
    ``k // group_size``, where ``group_size`` is a multiple of 32, or -1 for one group.

    ``int8`` False: weights are dequantized in registers or in the cache, the arithmetic is float32. True: each 32
    inputs of a row of ``x`` are rounded to 8 bits with one scale, their products with a block of weights are exact,
    and sums of blocks are float32; the error is that of the rounding, about 0.5 % of a typical row's spread. Many rows
    of bfloat16 are computed in float32 all the same where the CPU has AMX, which is faster than either.
    On the CPU, in builds with the feature awq or gptq.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], out_features))
    _ops.quant_linear.default(out, x, packed_weight, scales, zeros, order, bias, bits, group_size, int8)
    return out


def marlin_repack(q: Tensor, bits: int, perm: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Quantized weights ``q`` uint8 [out_features, in_features] in the layout that :func:`marlin_gemm` reads.

    Gives int32 [ceil(out_features / 64), ceil(in_features / 64), 128 * bits]; ``bits`` is 4 or 8, and higher bits of
    ``q`` are left out. ``perm`` int32 [in_features]: input k of the result is input ``perm[k]`` of ``q`` (outside of
    it: zeros). The layout is described in ``kernels/quant/marlin/layout.h``. Only in builds with the feature marlin.
    """
    if out is None:
        shape = (-(-q.shape[0] // 64), -(-q.shape[1] // 64), 128 * bits)
        out = q.new_empty(shape, dtype=torch.int32)
    _ops.marlin_repack.default(out, q, perm, bits)
    return out


def marlin_pack_scales(values: Tensor) -> Tensor:
    """Scales or zeros [groups, out_features] as :func:`marlin_gemm` has them: [ceil(out_features / 64), groups, 64]."""
    groups, out_features = values.shape
    blocks = -(-out_features // 64)
    padded = values.new_zeros(groups, blocks * 64)
    padded[:, :out_features] = values
    return padded.view(groups, blocks, 4, 2, 8).permute(1, 0, 2, 4, 3).reshape(blocks, groups, 64)


def marlin_workspace_size(num_tokens: int, out_features: int, in_features: int, copied: bool = True) -> int:
    """Elements (float32) of the workspace that :func:`marlin_gemm` needs.

    It holds counters, partial sums of outputs whose inputs are split over multiprocessors, and a copy of ``x`` when
    that has permuted inputs or rows that are not aligned to 16 bytes (``copied``). It must be zeros before its first
    use, and calls leave its counters zero: one workspace, as large as the largest call needs, does for all calls of a
    stream, also in graphs. Two streams need one each.
    """
    return int(_ops.marlin_workspace_size.default(num_tokens, out_features, in_features, copied))


def marlin_gemm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group_size: int,
    out_features: int,
    zeros: Tensor | None = None,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """``x @ W.T + bias`` with quantized weights, ``W[n, k] = (q[n, k] - zero[n, group]) * scale[n, group]``.

    ``x`` [..., in_features], float16 or bfloat16, rows of any one stride; gives [..., out_features]. ``weight`` from
    :func:`marlin_repack`; ``scales`` (dtype of ``x``) and ``zeros`` (uint8 below ``2 ** bits``; None:
    ``2 ** (bits - 1)``) from :func:`marlin_pack_scales`; the group of input k is ``k // group_size``, where
    ``group_size`` is a multiple of 32, or -1 for one group. ``perm`` int32 [in_features]: input k of ``weight`` is
    input ``perm[k]`` of ``x`` (GPTQ's act-order, with inputs sorted by group). Products of up to 64 inputs are summed
    in float32 before they are scaled; on GPUs of compute capability 9.0, with 4 bits and 33 tokens or more, scaled
    weights are rounded to the dtype instead. The order of sums does not depend on timing. ``workspace``: float32,
    :func:`marlin_workspace_size` elements, zeros before its first use.
    Sources: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference", 2024; Osama et al.,
    "Stream-K", 2023. Only in builds with the feature marlin.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], out_features))
    if workspace is None:
        num_tokens = x.numel() // max(x.shape[-1], 1)
        size = marlin_workspace_size(num_tokens, out_features, x.shape[-1])
        workspace = x.new_zeros(size, dtype=torch.float32)
    _ops.marlin_gemm.default(out, x, weight, scales, zeros, perm, bias, workspace, bits, group_size)
    return out


def gptq_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group_size: int,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    order: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W + bias`` with weights in GPTQ's layout, ``W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]``.

    ``x`` [..., in_features], float16 or bfloat16, rows of any one stride; gives [..., out_features]. ``qweight`` int32
    [rows / (32 / bits), out_features], ``bits`` 4 or 8, consecutive rows in a word, low bits first; ``scales`` [groups,
    out_features], float16 or bfloat16; ``qzeros`` int32 [groups, out_features / (32 / bits)], the zero points themselves
    (as in checkpoint_format gptq_v2), None: ``2 ** (bits - 1)``. The group g of row k is ``k // group_size`` (-1: there
    is one group), or ``g_idx[k]`` (int32 [rows]; a row whose group does not exist counts as zeros). ``order`` int32
    [rows]: row k belongs to input ``order[k]`` of ``x``, to none when there is no such input; None: to input k.
    Products of a group are summed in float32 before they are scaled; groups of multiples of 32 rows without ``g_idx``
    are the fast case. Results do not depend on timing. Only in builds for GPUs with the feature gptq.
    Source: Frantar et al., "GPTQ", 2022.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], qweight.shape[1]))
    _ops.gptq_gemm.default(out, x, qweight, qzeros, scales, g_idx, order, bias, bits, group_size)
    return out


def gptq_dequantize(
    qweight: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group_size: int,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    order: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    out: Tensor | None = None,
) -> Tensor:
    """The matrix W [in_features, out_features] of :func:`gptq_gemm`, computed in float32 and rounded to ``dtype``.

    With ``order`` row k of the weights is row ``order[k]`` of W; give ``out``, if it does not name each row once.
    """
    if out is None:
        rows = qweight.shape[0] * (32 // bits)
        out = torch.empty((rows, qweight.shape[1]), dtype=dtype, device=qweight.device)
    _ops.gptq_dequantize.default(out, qweight, qzeros, scales, g_idx, order, bits, group_size)
    return out


def gptq_shuffle(qweight: Tensor, order: Tensor, *, bits: int, out: Tensor | None = None) -> Tensor:
    """GPTQ weights with row ``order[k]`` (int32 [rows]) of ``qweight`` as row k, zeros where there is no such row.

    With rows sorted by group, :func:`gptq_gemm` needs no ``g_idx``; it takes the same ``order``.
    """
    if out is None:
        out = qweight.new_empty((order.shape[0] // (32 // bits), qweight.shape[1]))
    _ops.gptq_shuffle.default(out, qweight, order, bits)
    return out


def awq_gemm(
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ W + bias`` with 4-bit weights in AWQ's layout, ``W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]``.

    ``x`` [..., in_features], float16 or bfloat16, rows of any one stride; gives [..., out_features]. ``qweight`` int32
    [in_features, out_features / 8], nibble i of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[i]; ``qzeros`` int32
    [groups, out_features / 8] in the same order; ``scales`` [groups, out_features], float16 or bfloat16; g = k //
    group_size (-1: there is one group). Sums as in :func:`gptq_gemm`. Only in builds for GPUs with the feature awq.
    Source: Lin et al., "AWQ: Activation-aware Weight Quantization", 2023.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], scales.shape[1]))
    _ops.awq_gemm.default(out, x, qweight, qzeros, scales, bias, group_size)
    return out


def awq_dequantize(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    dtype: torch.dtype = torch.float16,
    out: Tensor | None = None,
) -> Tensor:
    """The matrix W [in_features, out_features] of :func:`awq_gemm`, computed in float32 and rounded to ``dtype``."""
    if out is None:
        out = torch.empty((qweight.shape[0], scales.shape[1]), dtype=dtype, device=qweight.device)
    _ops.awq_dequantize.default(out, qweight, qzeros, scales, group_size)
    return out


def paged_attention_workspace_size(num_tokens: int, num_heads: int, head_size: int) -> int:
    """Elements (float32) of the workspace that :func:`paged_attention` needs for such a batch.

    It holds partial results of queries whose context is split over threads (on the GPU: over its multiprocessors),
    so it grows with their number and not with the context. It needs no particular contents. A smaller one is
    allowed: there is less splitting then, none with 0.
    """
    return int(_ops.paged_attention_workspace_size.default(num_tokens, num_heads, head_size))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens against the paged cache, decode and chunked prefill in one call.

    ``query`` [num_tokens, num_heads, head_size]; caches [num_blocks, num_kv_heads, block_size,
    head_size]; ``query_start_loc`` int32 [num_seqs + 1]; ``seq_lens`` int32 [num_seqs];
    ``block_tables`` int32 [num_seqs, max_blocks]. Sequence s owns rows query_start_loc[s] to
    query_start_loc[s + 1], the last of them at position seq_lens[s] - 1, and its keys are in the
    cache already. ``sliding_window`` w > 0: a query sees its own and the w - 1 positions before it.
    ``soft_cap`` c > 0: scores become c * tanh(score / c). Rows of sequences of length 0 are neither
    read nor written. The cache may have another dtype than ``query``. Any block_size; head_size up to 256.
    ``workspace``: float32, :func:`paged_attention_workspace_size` elements.
    Source: Dao, "FlashAttention-2", 2023; Kwon et al., "PagedAttention", 2023.
    """
    if out is None:
        out = torch.empty_like(query)
    if workspace is None:
        size = paged_attention_workspace_size(query.shape[0], query.shape[1], query.shape[2])
        workspace = query.new_empty(size, dtype=torch.float32)
    _ops.paged_attention.default(
        out,
        query,
        key_cache,
        value_cache,
        query_start_loc,
        seq_lens,
        block_tables,
        workspace,
        scale,
        sliding_window,
        soft_cap,
    )
    return out


#: The largest vocabulary that :func:`sample` takes.
SAMPLE_MAX_VOCAB = 2**20


@functools.cache
def sample_workspace_size(num_rows: int, vocab_size: int) -> int:
    """Elements (float32) of the workspace that :func:`sample` and :func:`greedy_sample` need."""
    return int(_ops.sample_workspace_size.default(num_rows, vocab_size))


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    logprobs: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """One token per row of ``logits`` [rows, vocab], any row stride: steps 4 to 8 of :mod:`pelton.sampling`.

    Per row: ``temperature`` float32 (below 1e-5 the argmax, of equals the lowest id), ``top_k`` int32 (0 or the
    vocabulary's size and more: off), ``top_p`` (1: off) and ``min_p`` (0: off) float32. The draw is
    ``pelton.sampling.uniform(seed, position)`` of int64 ``seeds`` (their 64 bits) and ``positions``, taken through
    the cumulative distribution in the order of ids, or from the most likely token on where top_k or top_p is on:
    the same as on the CPU, wherever rounding does not decide. Where top_k or top_p is on, a token less likely
    than 2^-44 times the most likely one is never drawn.

    Gives int64 [rows], -1 for a row with NaN or without a finite maximum. ``logprobs`` float32 [rows] receives the
    log-probabilities of these tokens in the softmax of ``logits``, NaN for such rows. ``workspace``: float32,
    :func:`sample_workspace_size` elements. Only in builds for GPUs.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        out = logits.new_empty(num_rows, dtype=torch.int64)
    if workspace is None:
        size = sample_workspace_size(num_rows, vocab_size)
        workspace = logits.new_empty(size, dtype=torch.float32)
    _ops.sample.default(out, logprobs, logits, temperature, top_k, top_p, min_p, seeds, positions, workspace)
    return out


def greedy_sample(logits: Tensor, out: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
    """The argmax per row of ``logits`` [rows, vocab], of equals the lowest id; int64 [rows].

    -1 for a row with NaN or without a finite maximum. ``workspace``: float32, :func:`sample_workspace_size`
    elements. Only in builds for GPUs.
    """
    num_rows, vocab_size = logits.shape
    if out is None:
        out = logits.new_empty(num_rows, dtype=torch.int64)
    if workspace is None:
        size = sample_workspace_size(num_rows, vocab_size)
        workspace = logits.new_empty(size, dtype=torch.float32)
    _ops.greedy_sample.default(out, logits, workspace)
    return out
