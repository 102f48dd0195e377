"""Grouped-query attention with rotary positions over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from .. import ops
from ..config import ModelConfig
from .linear import Linear
from .norm import HeadNorm
from .step import Step
from .weight import Layer, Place, Weight, weights_of

__all__ = ["Attention"]


class Attention:
    """``softmax(q k^T / sqrt(head_dim)) v`` for each head, each `num_heads / num_kv_heads` of them sharing a key.

    Sources: Vaswani et al., 2017; Ainslie et al., "GQA", 2023; Kwon et al., "PagedAttention", 2023.
    """

    def __init__(self, config: ModelConfig, layer: int, name: str, rope: Tensor, place: Place) -> None:
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.scale = config.head_dim**-0.5
        self.window = config.layer_windows[layer]
        self.rope = rope  # [max_model_len, rotary_dim], one for all layers
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {f"{name}.q_proj": query_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size},
            place,
            bias=config.attention_bias,
        )
        self.o_proj = Linear(
            query_size, {f"{name}.o_proj": config.hidden_size}, place, bias=config.attention_output_bias
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = HeadNorm(f"{name}.q_norm", self.head_dim, config.rms_norm_eps, place)
            self.k_norm = HeadNorm(f"{name}.k_norm", self.head_dim, config.rms_norm_eps, place)

    def weights(self) -> dict[str, Weight]:
        norms: list[Layer] = [norm for norm in (self.q_norm, self.k_norm) if norm]
        return weights_of([self.qkv_proj, self.o_proj, *norms])

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """``x`` [T, hidden_size], overwritten with the result."""
        num_heads, num_kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        key_cache, value_cache = step.kv_caches[self.layer]

        qkv = self.qkv_proj(x, step.buffer("qkv", self.qkv_proj.out_features))
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if self.q_norm and self.k_norm:
            self.q_norm.heads(q)
            self.k_norm.heads(k)
        ops.rotary_embedding(q, k, step.positions, self.rope)
        ops.reshape_and_cache(k, v, key_cache, value_cache, step.slot_mapping)
        attended = step.buffer("attention", num_heads * head_dim)
        ops.paged_attention(
            q,
            key_cache,
            value_cache,
            step.query_start_loc,
            step.seq_lens,
            step.block_tables,
            self.scale,
            sliding_window=self.window,
            out=attended.view(-1, num_heads, head_dim),
            workspace=step.workspace.flat(
                "attention_partial", ops.paged_attention_workspace_size(x.shape[0], num_heads, head_dim)
            ),
        )
        return self.o_proj(attended, x)
