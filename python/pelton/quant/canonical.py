"""The one form that quantized weights have between a parser (checkpoint layout) and a method (kernel layout)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "QuantizedWeight",
    "Scheme",
    "num_groups",
    "pack_words",
    "split_nibbles",
    "trivial_groups",
    "unpack_words",
]

_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is quantized, as far as the config says it.

    `format`: gptq, awq or compressed-tensors. `group_size`: consecutive inputs that share a scale, -1: all of them.
    `order`: "none": group of input k is k // group_size; "equal": an index maps inputs to groups, all groups but a
    short last one have equally many; "any": a mapping without such a rule. Before the file is read it is what the
    config promises.
    """

    format: str
    bits: int
    group_size: int
    symmetric: bool
    order: str = "none"
    zeros_less_one: bool = False  # GPTQ v1 stores zero points less one

    def groups(self, in_features: int) -> int:
        """How many scales each output has."""
        return num_groups(in_features, self.group_size)

    def describe(self) -> str:
        """For messages: "gptq, 4 bit, group size 128"."""
        return f"{self.format}, {self.bits} bit, group size {self.group_size}"


@dataclass(frozen=True)
class QuantizedWeight:
    """``W[n, k] = (q[n, k] - zeros[g, n]) * scales[g, n]`` with the group g of input k.

    `q` uint8 [N, K] of 0 .. 2^bits - 1 (contiguous rows); `scales` [G, N] in the file's dtype; `zeros` uint8 [G, N],
    None: 2^(bits - 1) everywhere; `g_idx` int32 [K], None: g = k // group_size. `group_size` is K where one group
    spans all inputs; G = ceil(K / group_size), the last group may be short. All on one device.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    bits: int
    group_size: int

    @property
    def out_features(self) -> int:
        return self.q.shape[0]

    @property
    def in_features(self) -> int:
        return self.q.shape[1]

    @property
    def order(self) -> str:
        """`Scheme.order`, of the weight itself."""
        if self.g_idx is None:
            return "none"
        counts = torch.bincount(self.g_idx, minlength=self.scales.shape[0])
        expected = torch.bincount(trivial_groups(self.in_features, self.group_size, self.q.device))
        return "equal" if torch.equal(counts, expected) else "any"

    def groups(self) -> Tensor:
        """The group of each input, int32 [K]."""
        if self.g_idx is not None:
            return self.g_idx
        return trivial_groups(self.in_features, self.group_size, self.q.device)

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """W [N, K], computed in float32 (float64 for that dtype) and rounded once."""
        if out is None:
            out = torch.empty(self.q.shape, dtype=dtype, device=self.q.device)
        compute = torch.float64 if out.dtype == torch.float64 else torch.float32
        groups = self.groups().long()
        for first in range(0, self.out_features, _CHUNK_ROWS):
            rows = slice(first, first + _CHUNK_ROWS)
            values = self.q[rows].to(compute)
            if self.zeros is None:
                values -= 1 << (self.bits - 1)
            else:
                values -= self.zeros[:, rows].t().to(compute)[:, groups]
            values *= self.scales[:, rows].t().to(compute)[:, groups]
            out[rows] = values
        return out


def num_groups(in_features: int, group_size: int) -> int:
    """How many groups that many inputs make; the last one may be short."""
    return 1 if group_size == -1 else -(-in_features // group_size)


def trivial_groups(in_features: int, group_size: int, device: torch.device | None = None) -> Tensor:
    """The group of each input where groups are consecutive, int32 [K]."""
    return torch.arange(in_features, dtype=torch.int32, device=device) // group_size


def split_nibbles(fields: Tensor, low: Tensor, high: Tensor) -> None:
    """Write the halves of uint8 `fields` to `low` and `high`, which may be strided: no memory is taken."""
    torch.bitwise_and(fields, 15, out=low)
    torch.bitwise_right_shift(fields, 4, out=high)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The 4 or 8 bit fields of int32 `words` [..., W], low ones first: uint8 [..., W * 32 / bits]."""
    fields = words.contiguous().view(torch.uint8)
    if bits == 8:
        return fields
    return torch.stack((fields & 15, fields >> 4), dim=-1).flatten(-2)


def pack_words(fields: Tensor, bits: int) -> Tensor:
    """int32 words of `fields` [..., F] (uint8 below 2^bits, F a multiple of 32 / bits), low ones first."""
    if bits == 4:
        fields = fields[..., 0::2] | (fields[..., 1::2] << 4)
    return fields.contiguous().view(torch.int32)
