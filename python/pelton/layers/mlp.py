"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from .. import ops
from ..config import ModelConfig
from .linear import Linear
from .step import Step
from .weight import Place, Weight

__all__ = ["GatedMLP"]

_ACTIVATIONS = {
    "silu": ops.silu_and_mul,
    "gelu": lambda x, out: ops.gelu_and_mul(x, "none", out=out),
    "gelu_tanh": lambda x, out: ops.gelu_and_mul(x, "tanh", out=out),
}


class GatedMLP:
    """``down(act(gate(x)) * up(x))`` (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: ModelConfig, name: str, place: Place) -> None:
        self.size = config.intermediate_size
        self.activation = _ACTIVATIONS[config.hidden_act]
        self.gate_up_proj = Linear(
            config.hidden_size,
            {f"{name}.gate_proj": self.size, f"{name}.up_proj": self.size},
            place,
            bias=config.mlp_bias,
        )
        self.down_proj = Linear(
            self.size, {f"{name}.down_proj": config.hidden_size}, place, bias=config.mlp_bias
        )

    def weights(self) -> dict[str, Weight]:
        return self.gate_up_proj.weights() | self.down_proj.weights()

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """``x`` [T, hidden_size], overwritten with the result."""
        gate_up = self.gate_up_proj(x, step.buffer("gate_up", 2 * self.size))
        activated = self.activation(gate_up, out=step.buffer("activated", self.size))
        return self.down_proj(activated, x)
