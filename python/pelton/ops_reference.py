"""A plain torch implementation of every operator in :mod:`pelton.ops`, same signatures.

They say what the operators compute, and the tests compare the kernels with them. Arithmetic
is done in float32, or in float64 when the input is float64, and rounded once at the end.
They loop over sequences and blocks in Python: not for use in the engine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sampling import GREEDY_BELOW, uniform

__all__ = [
    "awq_dequantize",
    "awq_gemm",
    "copy_blocks",
    "embedding",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "gptq_dequantize",
    "gptq_gemm",
    "gptq_shuffle",
    "greedy_sample",
    "linear",
    "marlin_gemm",
    "marlin_repack",
    "pack_linear_weight",
    "pack_quant_weight",
    "paged_attention",
    "quant_linear",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "swap_blocks",
]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _deliver(result: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result.to(like.dtype)
    return out.copy_(result)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return _deliver(wide * scale * _wide(weight), x, out)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.copy_(_wide(x) + _wide(residual))
    rms_norm(residual, weight, eps, out=x)


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False
) -> None:
    rotary_dim = cos_sin_cache.shape[-1]
    half = rotary_dim // 2
    angles = cos_sin_cache[positions].unsqueeze(1)
    cos, sin = angles[..., :half], angles[..., half:]
    for x in (query, key):
        rotated = _wide(x[..., :rotary_dim])
        if interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated[..., :half], rotated[..., half:]
        pair = (first * cos - second * sin, second * cos + first * sin)
        x[..., :rotary_dim] = (
            torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
        )


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    gate, up = _wide(x).chunk(2, dim=-1)
    return _deliver(torch.nn.functional.silu(gate) * up, x, out)


def gelu_and_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    gate, up = _wide(x).chunk(2, dim=-1)
    return _deliver(torch.nn.functional.gelu(gate, approximate=approximate) * up, x, out)


def embedding(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    return _deliver(weight[ids], weight, out)


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    block_size = key_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[kept]
    value_cache[blocks, :, offsets] = value[kept]


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_mapping: Tensor) -> None:
    swap_blocks(key_cache, key_cache, block_mapping)
    swap_blocks(value_cache, value_cache, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    for source, destination in block_mapping.tolist():
        dst[destination] = src[source]


def pack_linear_weight(weight: Tensor) -> Tensor:
    out_features, in_features = weight.shape
    width = torch.ops.pelton.linear_panel_width()
    panels = -(-out_features // width)
    padded = weight.new_zeros(panels * width, in_features)
    padded[:out_features] = weight
    return padded.view(panels, width, in_features).transpose(1, 2).contiguous()


def linear(
    x: Tensor,
    packed_weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
    out: Tensor | None = None,
) -> Tensor:
    in_features = packed_weight.shape[1]
    weight = packed_weight.transpose(1, 2).reshape(-1, in_features)[:out_features]
    wide = _wide(x)
    result = wide @ weight.to(wide.dtype).t()
    if bias is not None:
        result = result + bias.to(wide.dtype)
    return _deliver(result, x, out)


def marlin_repack(q: Tensor, bits: int, perm: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    if perm is not None:
        q = q[:, perm.long()]
    out_features, in_features = q.shape
    rows, columns = -(-out_features // 64), -(-in_features // 64)
    padded = q.new_zeros(rows * 64, columns * 64)
    padded[:out_features, :in_features] = q & ((1 << bits) - 1)
    # Row of a tile: slab, half (8), group; input: step (16), half (8), pair, element.
    tiles = padded.view(rows, 4, 2, 8, columns, 4, 2, 4, 2)
    if bits == 4:
        nibbles = tiles.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(rows, columns, -1, 2)
        packed = nibbles[..., 0] | nibbles[..., 1] << 4
    else:
        steps = tiles.unflatten(5, (2, 2))
        packed = steps.permute(0, 4, 1, 5, 3, 8, 6, 7, 2, 9).reshape(rows, columns, -1)
    result = packed.contiguous().view(torch.int32)
    return result if out is None else out.copy_(result)


def marlin_unpack(weight: Tensor, bits: int, out_features: int, in_features: int) -> Tensor:
    """``q`` uint8 [out_features, in_features] of packed ``weight``."""
    rows, columns = weight.shape[:2]
    packed = weight.contiguous().view(torch.uint8)
    if bits == 4:
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).view(rows, columns, 4, 8, 4, 4, 2, 2, 2)
        tiles = nibbles.permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    else:
        steps = packed.view(rows, columns, 4, 2, 8, 4, 2, 2, 2, 2)
        tiles = steps.permute(0, 2, 8, 4, 1, 3, 6, 7, 5, 9)
    return tiles.reshape(rows * 64, columns * 64)[:out_features, :in_features]


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
    in_features = x.shape[-1]
    wide = _wide(x if perm is None else x[..., perm.long()])
    group = torch.arange(in_features, device=x.device) // (in_features if group_size == -1 else group_size)

    def per_weight(values: Tensor) -> Tensor:  # [out_features, in_features]
        blocks, groups, _ = values.shape
        rows = values.view(blocks, groups, 4, 8, 2).permute(0, 2, 4, 3, 1).reshape(-1, groups)
        return rows[:out_features, group].to(wide.dtype)

    q = marlin_unpack(weight, bits, out_features, in_features).to(wide.dtype)
    zero = 2 ** (bits - 1) if zeros is None else per_weight(zeros)
    result = wide @ ((q - zero) * per_weight(scales)).t()
    return _deliver(result if bias is None else result + bias.to(wide.dtype), x, out)


def _quant_lanes() -> int:
    return int(torch.ops.pelton.quant_panel_width()) // 2


def pack_quant_weight(q: Tensor, bits: int, order: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    out_features, in_features = q.shape
    lanes = _quant_lanes()
    if order is None:
        order = torch.arange(in_features, device=q.device)
    inputs, panels = -(-len(order) // 32) * 32, -(-out_features // (2 * lanes))
    padded = q.new_full((panels * 2 * lanes, inputs), 1 << (bits - 1))
    there = (order >= 0).nonzero().squeeze(1)
    padded[:out_features, there] = q[:, order[there].long()]
    # [panels, vectors, lanes, steps, halves of a byte, bytes]
    fields = padded.view(panels, 2, lanes, inputs * bits // 32, 8 // bits, 4).permute(0, 3, 1, 2, 5, 4)
    packed = fields[..., 0] if bits == 8 else (fields[..., 0] & 15) | (fields[..., 1] << 4)
    return _deliver(packed.reshape(panels, inputs // 32, 8 * bits * lanes), q, out)


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
    lanes = _quant_lanes()
    panels, blocks = packed_weight.shape[:2]
    inputs = 32 * blocks
    fields = packed_weight.view(panels, inputs * bits // 32, 2, lanes, 4)
    halves = [fields] if bits == 8 else [fields & 15, fields >> 4]
    q = torch.stack(halves, dim=4).permute(0, 2, 3, 1, 4, 5).reshape(panels * 2 * lanes, inputs)
    wide = _wide(x)
    if group_size == -1:
        group_size = max(32, inputs)
    groups = torch.arange(inputs, device=x.device) // group_size

    def spread(values: Tensor) -> Tensor:
        return values.transpose(0, 1).flatten(1).t().to(wide.dtype)[:, groups]

    zero = spread(zeros) if zeros is not None else float(1 << (bits - 1))
    weight = ((q.to(wide.dtype) - zero) * spread(scales))[:out_features]
    columns = torch.nn.functional.pad(wide, (0, inputs + 1 - x.shape[-1]))  # the last one is a zero
    columns = columns[..., :-1] if order is None else columns[..., order.long()]
    if int8:
        parts = columns.unflatten(-1, (blocks, 32))
        scale = parts.abs().amax(-1, keepdim=True) / 127
        columns = (torch.where(scale > 0, parts / scale, 0.0).round() * scale).flatten(-2)
    result = columns @ weight.t()
    if bias is not None:
        result = result + bias.to(wide.dtype)
    return _deliver(result, x, out)


def _fields(words: Tensor, bits: int) -> Tensor:
    """The fields of int32 ``words`` along a new last dimension, low ones first; int64."""
    shifts = torch.arange(0, 32, bits, device=words.device)
    return words.long().unsqueeze(-1) >> shifts & ((1 << bits) - 1)


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
    wide = _wide(x)
    weight = wide.new_zeros(x.shape[-1], qweight.shape[1])
    gptq_dequantize(
        qweight,
        scales,
        bits=bits,
        group_size=group_size,
        qzeros=qzeros,
        g_idx=g_idx,
        order=order,
        out=weight,
    )
    result = wide @ weight
    return _deliver(result if bias is None else result + bias.to(wide.dtype), x, out)


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
    q = _fields(qweight, bits).transpose(1, 2).flatten(0, 1)
    rows = torch.arange(q.shape[0], device=q.device)
    groups = (
        rows // (max(1, q.shape[0]) if group_size == -1 else group_size) if g_idx is None else g_idx.long()
    )
    known = (groups >= 0) & (groups < scales.shape[0])
    groups = torch.where(known, groups, 0)
    zeros = 1 << (bits - 1) if qzeros is None else _fields(qzeros, bits).flatten(1)[groups]
    weight = (q - zeros).to(torch.float64) * scales.double()[groups] * known.unsqueeze(1)
    if out is None:
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
    inputs = rows if order is None else order.long()
    named = (inputs >= 0) & (inputs < out.shape[0])
    out[inputs[named]] = weight[named].to(out.dtype)
    return out


def gptq_shuffle(qweight: Tensor, order: Tensor, *, bits: int, out: Tensor | None = None) -> Tensor:
    q = _fields(qweight, bits).transpose(1, 2).flatten(0, 1)
    named = (order >= 0) & (order < q.shape[0])
    rows = q[torch.where(named, order.long(), 0)] * named.unsqueeze(1)
    shifts = torch.arange(0, 32, bits, device=q.device).view(-1, 1)
    words = (rows.unflatten(0, (-1, 32 // bits)) << shifts).sum(1)
    result = torch.where(words < 2**31, words, words - 2**32).int()
    return result if out is None else out.copy_(result)


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
    wide = _wide(x)
    weight = awq_dequantize(qweight, qzeros, scales, group_size=group_size, dtype=wide.dtype)
    result = wide @ weight
    return _deliver(result if bias is None else result + bias.to(wide.dtype), x, out)


def awq_dequantize(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    dtype: torch.dtype = torch.float16,
    out: Tensor | None = None,
) -> Tensor:
    field = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=qweight.device)  # of each output
    q, zeros = (_fields(words, 4)[..., field].flatten(1) for words in (qweight, qzeros))
    rows = torch.arange(q.shape[0], device=q.device)
    groups = rows // (max(1, q.shape[0]) if group_size == -1 else group_size)
    weight = (q - zeros[groups]).double() * scales.double()[groups]
    return weight.to(dtype) if out is None else out.copy_(weight)


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
    if out is None:
        out = torch.empty_like(query)
    num_heads = query.shape[1]
    num_kv_heads, block_size = key_cache.shape[1:3]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if length == 0 or num_queries == 0:
            continue
        blocks = block_tables[sequence, : -(-length // block_size)].long()
        # [num_blocks, kv heads, block size, head size] -> [heads, length, head size]
        keys, values = (
            _wide(cache[blocks])
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .repeat_interleave(num_heads // num_kv_heads, dim=0)
            for cache in (key_cache, value_cache)
        )
        q = _wide(query[rows]).transpose(0, 1)
        scores = (q @ keys.to(q.dtype).transpose(1, 2)) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_positions = torch.arange(length, device=query.device)
        query_positions = torch.arange(length - num_queries, length, device=query.device).unsqueeze(1)
        visible = key_positions <= query_positions
        if sliding_window > 0:
            visible &= key_positions > query_positions - sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        # A value that is not visible may be anything, NaN included: 0 * NaN must not reach the sum.
        hidden = ~visible.any(dim=0)
        values = values.to(q.dtype).masked_fill(hidden.unsqueeze(-1), 0.0)
        out[rows] = (weights @ values).transpose(0, 1).to(out.dtype)
    return out


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
    ids = []
    for row, x in enumerate(logits.double()):
        peak = x.max().item()
        if not math.isfinite(peak):
            ids.append(-1)
            continue
        order = x.sort(descending=True, stable=True).indices
        if temperature[row] < GREEDY_BELOW:
            ids.append(int(order[0]))
            continue
        weights = sample_distribution(
            x,
            float(temperature[row]),
            0 if top_k is None else int(top_k[row]),
            1.0 if top_p is None else float(top_p[row]),
            0.0 if min_p is None else float(min_p[row]),
        )
        cuts = (top_k is not None and 0 < top_k[row] < len(x)) or (top_p is not None and top_p[row] < 1)
        if not cuts:
            order = torch.arange(len(x), device=x.device)
        cumulative = weights[order].cumsum(0)
        target = uniform(int(seeds[row]), int(positions[row])) * cumulative[-1]
        ids.append(int(order[(cumulative > target).nonzero()[0, 0]]))
    result = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    if logprobs is not None:
        chosen = logits.double().log_softmax(-1).gather(1, result.clamp(min=0).unsqueeze(1)).squeeze(1)
        logprobs.copy_(torch.where(result < 0, math.nan, chosen))
    return result if out is None else out.copy_(result)


def sample_distribution(x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Weights of the tokens of one row, proportional to the probabilities :func:`sample` draws with."""
    log_weights = (x - x.max()) / temperature
    if min_p > 0:
        log_weights = log_weights.masked_fill(log_weights < min(math.log(min_p), 0.0), -math.inf)
    weights = log_weights.exp()
    order = x.sort(descending=True, stable=True).indices
    if 0 < top_k < len(x):
        weights[order[top_k:]] = 0
    if top_p < 1:
        ordered = weights[order]
        before = ordered.cumsum(0) - ordered
        kept = before < (top_p - 1e-6) * weights.sum()
        kept[0] = True
        weights[order[~kept]] = 0
    return weights


def greedy_sample(logits: Tensor, out: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    result = torch.where(values[:, 0].isfinite(), ids[:, 0], -1)
    return result if out is None else out.copy_(result)
