"""One step of an engine's layer, for tests that record it and run it again."""

from __future__ import annotations

import torch
from torch import Tensor

from pelton import ops


def table(max_position: int, rotary_dim: int) -> Tensor:
    return torch.rand(max_position, rotary_dim)


class Layer:
    """All ops of these families in one step over fixed tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.ids = torch.tensor([1, 2, 3])
        self.positions = torch.tensor([0, 1, 2])
        self.slots = torch.tensor([4, 5, -1])
        self.mapping = torch.tensor([[1, 2]])
        self.weight, self.embeddings = torch.randn(64), torch.randn(10, 64)
        self.cos_sin = table(20, 16)
        self.hidden, self.normed, self.residual = (torch.zeros(3, 64) for _ in range(3))
        self.gated, self.gelu = torch.zeros(3, 32), torch.zeros(3, 32)
        self.key_cache, self.value_cache, self.host = (torch.zeros(4, 2, 4, 16) for _ in range(3))

    def run(self, kernels: object = ops) -> None:
        k = kernels
        k.embedding(self.ids, self.embeddings, out=self.hidden)  # type: ignore[attr-defined]
        k.rms_norm(self.hidden, self.weight, 1e-5, out=self.normed)  # type: ignore[attr-defined]
        query, key = self.normed.view(3, 4, 16)[:, :2], self.normed.view(3, 4, 16)[:, 2:]
        k.rotary_embedding(query, key, self.positions, self.cos_sin)  # type: ignore[attr-defined]
        k.reshape_and_cache(key, query, self.key_cache, self.value_cache, self.slots)  # type: ignore[attr-defined]
        k.copy_blocks(self.key_cache, self.value_cache, self.mapping)  # type: ignore[attr-defined]
        k.swap_blocks(self.key_cache, self.host, self.mapping)  # type: ignore[attr-defined]
        k.fused_add_rms_norm(self.hidden, self.residual, self.weight, 1e-5)  # type: ignore[attr-defined]
        k.silu_and_mul(self.hidden, out=self.gated)  # type: ignore[attr-defined]
        k.gelu_and_mul(self.hidden, out=self.gelu)  # type: ignore[attr-defined]

    def change_inputs(self) -> None:
        self.ids.copy_(torch.tensor([9, 0, 9]))
        self.positions.copy_(torch.tensor([19, 0, 7]))
        self.slots.copy_(torch.tensor([-1, 15, 8]))
        self.mapping.copy_(torch.tensor([[2, 0]]))
        self.embeddings.mul_(0.5).add_(0.1)

    def state(self) -> list[Tensor]:
        names = ("hidden", "normed", "residual", "gated", "gelu", "key_cache", "value_cache", "host")
        return [getattr(self, name).clone() for name in names]
