"""The Llama family: Llama 2 and 3, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3.

    h = embed(ids)
    h = h + attention(norm(h))      in each layer
    h = h + mlp(norm(h))
    logits = lm_head(norm(h))

The residual stream `h` is `residual` here, and the sum is made by the norm that reads it next, in one operator.
Sources: Touvron et al., "Llama 2", 2023; Dubey et al., "The Llama 3 Herd of Models", 2024; Jiang et al., "Mistral
7B", 2023; Yang et al., "Qwen2", 2024, and "Qwen3", 2025.
"""

from __future__ import annotations

from torch import Tensor

from ..config import ModelConfig
from ..layers import (
    Attention,
    Embedding,
    GatedMLP,
    Layer,
    Linear,
    Place,
    RMSNorm,
    Step,
    Weight,
    weights_of,
)
from ..loader import CheckpointTensor
from ..rope import cos_sin_table

__all__ = ["CausalLM", "DecoderLayer"]


class DecoderLayer:
    """Attention and feed-forward block, each before its residual connection."""

    def __init__(self, config: ModelConfig, layer: int, rope: Tensor, place: Place) -> None:
        name = f"model.layers.{layer}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", size, eps, place)
        self.attention = Attention(config, layer, f"{name}.self_attn", rope, place)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, place)
        self.mlp = GatedMLP(config, f"{name}.mlp", place)

    def weights(self) -> dict[str, Weight]:
        return weights_of([self.attention_norm, self.attention, self.mlp_norm, self.mlp])


class CausalLM:
    """Next-token logits of a decoder of the Llama family.

    `tied` says that there is no lm_head of its own: the embedding serves as one. No memory is taken before the
    weights are loaded, but for the rotation's table.
    """

    def __init__(self, config: ModelConfig, place: Place, max_model_len: int, *, tied: bool) -> None:
        rope = cos_sin_table(config.rope, max_model_len).to(place.device)
        self.config = config
        self.tied = tied
        self.embed_tokens = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, place)
        self.layers = [DecoderLayer(config, layer, rope, place) for layer in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, place)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, place)

    def weights(self) -> dict[str, Weight]:
        """Where each tensor of a checkpoint goes, by Hugging Face name."""
        parts: list[Layer] = [self.embed_tokens, *self.layers, self.norm]
        places = weights_of(parts if self.tied else [*parts, self.lm_head])
        if self.tied:
            embedding = places["model.embed_tokens.weight"]

            def load_both(source: CheckpointTensor) -> None:
                embedding.load(source)
                self.lm_head.take(self.embed_tokens.weight)

            places["model.embed_tokens.weight"] = Weight(embedding.shape, load_both)
        return places

    def __call__(self, step: Step) -> Tensor:
        """Logits [rows, vocab_size] of the rows that the step asks for."""
        size = self.config.hidden_size
        residual = self.embed_tokens(step.ids, step.buffer("residual", size))
        x = step.buffer("hidden", size)
        for index, layer in enumerate(self.layers):
            x = layer.attention_norm.add(x, residual) if index else layer.attention_norm(residual, x)
            x = layer.attention(x, step)
            x = layer.mlp_norm.add(x, residual)
            x = layer.mlp(x, step)

        if step.logits_rows is not None:
            x, residual = x[step.logits_rows], residual[step.logits_rows]
        x = self.norm.add(x, residual)
        return self.lm_head(x, step.logits_buffer(x.shape[0], self.config.vocab_size))
