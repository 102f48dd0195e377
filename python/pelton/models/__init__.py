"""The models that Pelton implements, by architecture name."""

from __future__ import annotations

from ..config import ModelConfig
from ..errors import UnsupportedError
from ..layers import Place
from .llama import CausalLM

__all__ = ["MODELS", "CausalLM", "build_model"]

MODELS = {
    "LlamaForCausalLM": CausalLM,
    "MistralForCausalLM": CausalLM,
    "Qwen2ForCausalLM": CausalLM,
    "Qwen3ForCausalLM": CausalLM,
}


def build_model(config: ModelConfig, place: Place, max_model_len: int, *, tied: bool) -> CausalLM:
    """The model of `config`, without weights."""
    if config.architecture not in MODELS:
        raise UnsupportedError(
            f"architecture {config.architecture!r} is not supported; Pelton has {', '.join(MODELS)}"
        )
    return MODELS[config.architecture](config, place, max_model_len, tied=tied)
