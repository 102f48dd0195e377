"""The parts that models are made of.

Each owns its parameters and says how they are loaded; all arithmetic is `pelton.ops`.
"""

from __future__ import annotations

from .attention import Attention
from .embedding import Embedding
from .linear import Linear
from .mlp import GatedMLP
from .norm import HeadNorm, RMSNorm
from .step import Step, Workspace
from .weight import Layer, Place, Weight, weights_of

__all__ = [
    "Attention",
    "Embedding",
    "GatedMLP",
    "HeadNorm",
    "Layer",
    "Linear",
    "Place",
    "RMSNorm",
    "Step",
    "Weight",
    "Workspace",
    "weights_of",
]
