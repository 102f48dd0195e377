"""How quantized weights are computed with: one packing a backend, and the policy which one is used.

A method is a class with

    pack(weight, dtype, device)   a `QuantizedWeight` in the layout of its kernel, for activations of `dtype`;
                                  the weight lies on `device` already, and its tensors may be overwritten
    apply(x, bias, out)           ``out = x W^T + bias``: x [T, K] contiguous; out [T, N] whose rows may be further
                                  apart than N elements (columns of a wider buffer); bias [N] or None
    num_bytes(N, K, groups, bits, itemsize)   of what `pack` keeps

On the CPU `apply` may call operators of this package alone, because a recorded step repeats nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..pages import own_pages
from .canonical import QuantizedWeight, Scheme, pack_words

__all__ = [
    "FORMAT_FEATURES",
    "METHODS",
    "Choice",
    "Method",
    "Refusal",
    "Target",
    "choose",
]

#: the features that run a format, the one of its name first
FORMAT_FEATURES: Mapping[str, tuple[str, ...]] = {
    "awq": ("awq", "marlin"),
    "gptq": ("gptq", "marlin"),
    "compressed-tensors": ("marlin", "gptq", "awq"),
}
_HALVES = ("float16", "bfloat16")
_PACKED_ROWS = 1024


@dataclass(frozen=True)
class Target:
    """What computes: the library's backend and features, the activations' dtype, the GPU's compute capability.

    `int8`: whether products on the CPU may round activations to int8; None: those of bfloat16.
    """

    backend: str  # cpu, cuda, rocm, emulation
    features: frozenset[str]
    dtype: str
    capability: tuple[int, int] | None = None
    int8: bool | None = None


@dataclass(frozen=True)
class Choice:
    """The method (a key of `METHODS`), and why."""

    method: str
    reason: str


@dataclass(frozen=True)
class Refusal:
    """Why no method will do, and the feature that a wheel for this machine would need; "": none helps."""

    reason: str
    feature: str = ""


def choose(target: Target, scheme: Scheme, in_features: int, out_features: int) -> Choice | Refusal:
    """The method for a linear layer of this scheme. The first that applies:

    1. None, when the build has no feature that runs the format.
    2. On the CPU: its kernels, which take everything; with activations in int8 if the target says so, or says nothing
       and they are bfloat16, whose own rounding is about as large.
    3. None on GPUs, for activations of float32.
    4. marlin, if the build has it: compute capability 8.0 or newer, groups of multiples of 32 inputs or one, and no
       mapping of inputs to groups of unequal sizes. Which of its kernels multiplies, `marlin_gemm` decides by the
       number of tokens and the GPU.
    5. awq, if the build has it, for checkpoints of that format: 4 bit, outputs in eights, whole groups.
    6. gptq, if the build has it: everything.
    7. awq again, for other checkpoints that fit it.
    """
    on = target.features
    runs = [feature for feature in FORMAT_FEATURES[scheme.format] if feature in on]
    if not runs or (target.backend != "cuda" and runs == ["marlin"]):
        usual = scheme.format if scheme.format in ("awq", "gptq") else "gptq"
        return Refusal(f"{scheme.format} weights need the feature {usual}", usual)
    if target.backend == "cpu":
        if target.int8 or (target.int8 is None and target.dtype == "bfloat16"):
            return Choice("cpu-int8", f"kernels of the CPU, activations of {target.dtype} in int8")
        return Choice("cpu", f"kernels of the CPU, activations of {target.dtype} as they are")
    if target.dtype not in _HALVES:
        return Refusal(f"quantized weights run on GPUs in {' or '.join(_HALVES)}, not in {target.dtype}")
    no_marlin = _why_not_marlin(target, scheme, in_features)
    if not no_marlin:
        return Choice("marlin", "fits the tensor core layout")
    no_awq = _why_not_awq(target, scheme, in_features, out_features)
    if scheme.format == "awq" and not no_awq:
        return Choice("awq", f"not marlin: {no_marlin}")
    if "gptq" in on:
        return Choice("gptq", f"not marlin: {no_marlin}")
    if not no_awq:
        return Choice("awq", f"not marlin: {no_marlin}; not gptq: the build does not have it")
    return Refusal(f"not marlin: {no_marlin}; not awq: {no_awq}", "gptq")


def _why_not_marlin(target: Target, scheme: Scheme, in_features: int) -> str:
    if target.backend not in ("cuda", "emulation"):
        return f"it is for CUDA, and this is a build for {target.backend}"
    if "marlin" not in target.features:
        return "the build does not have it"
    if target.capability is not None and target.capability < (8, 0):
        return f"it needs compute capability 8.0, the GPU has {'.'.join(map(str, target.capability))}"
    if scheme.group_size != -1 and scheme.group_size % 32 and scheme.group_size < in_features:
        return f"it has groups of multiples of 32 inputs or one, not of {scheme.group_size}"
    if scheme.order == "any":
        return "the mapping of inputs to groups has groups of unequal sizes"
    return ""


def _why_not_awq(target: Target, scheme: Scheme, in_features: int, out_features: int) -> str:
    if "awq" not in target.features:
        return "the build does not have it"
    if scheme.bits != 4 or scheme.order != "none":
        return "it has 4 bit, without a mapping of inputs to groups"
    if out_features % 8:
        return f"it has outputs in eights, not {out_features}"
    if scheme.group_size != -1 and in_features % scheme.group_size:
        return f"{in_features} inputs are no whole groups of {scheme.group_size}"
    return ""


class Method(Protocol):
    """See the module's description."""

    @classmethod
    def pack(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> Method: ...
    @staticmethod
    def num_bytes(out_features: int, in_features: int, groups: int, bits: int, itemsize: int) -> int: ...
    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor: ...


class CpuLinear:
    """4-bit and 8-bit weights on the CPU, and any mapping of inputs to groups; arithmetic in float32."""

    int8 = False

    def __init__(self, weight: QuantizedWeight) -> None:
        self.bits, self.out_features = weight.bits, weight.out_features
        self.order, self.group_size, rows = _in_blocks(weight)
        scales, zeros = weight.scales, weight.zeros
        if rows is not None:
            scales, zeros = scales[rows], None if zeros is None else zeros[rows]
        width = ops.quant_panel_width()
        panels, groups = -(-weight.out_features // width), scales.shape[0]
        blocks = -(-(weight.in_features if self.order is None else self.order.shape[0]) // 32)
        self.weight = own_pages((panels, blocks, 4 * weight.bits * width), torch.uint8)
        ops.pack_quant_weight(weight.q, weight.bits, self.order, out=self.weight)
        self.scales = ops.pack_quant_groups(scales, out=own_pages((panels, groups, width), scales.dtype))
        self.zeros: Tensor | None = None
        if zeros is not None:
            self.zeros = ops.pack_quant_groups(zeros, out=own_pages((panels, groups, width), zeros.dtype))

    @classmethod
    def pack(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> CpuLinear:
        return cls(weight)

    @staticmethod
    def num_bytes(out_features: int, in_features: int, groups: int, bits: int, itemsize: int) -> int:
        return out_features * (in_features * bits // 8 + groups * 3)

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        return ops.quant_linear(
            x,
            self.weight,
            self.scales,
            bits=self.bits,
            group_size=self.group_size,
            out_features=self.out_features,
            zeros=self.zeros,
            order=self.order,
            bias=bias,
            int8=self.int8,
            out=out,
        )


class CpuInt8Linear(CpuLinear):
    """The same with activations that are rounded to int8, a scale for each 32: about twice as fast."""

    int8 = True


def _in_blocks(weight: QuantizedWeight) -> tuple[Tensor | None, int, Tensor | None]:
    """How the inputs lie so that each group has whole blocks of 32: the order of inputs (None: as they are), inputs of
    a group, and the group that each row of scales is of (None: as they are)."""
    block = 32
    size = -1 if weight.group_size >= weight.in_features else weight.group_size
    if weight.g_idx is None and (size == -1 or size % block == 0):
        return None, size, None
    groups = weight.groups().long()
    counts = torch.bincount(groups, minlength=weight.scales.shape[0])
    blocks = -(-counts // block)
    # where each group begins, and where each of its inputs goes
    starts = (blocks.cumsum(0) - blocks) * block
    by_group = torch.argsort(groups, stable=True)
    within = (
        torch.arange(groups.shape[0], device=groups.device) - (counts.cumsum(0) - counts)[groups[by_group]]
    )
    order = torch.full((int(blocks.sum()) * block,), -1, dtype=torch.int32, device=groups.device)
    order[starts[groups[by_group]] + within] = by_group.int()
    if bool((blocks[:-1] == blocks[0]).all()) and 0 < int(blocks[-1]) <= int(blocks[0]):
        return order, int(blocks[0]) * block, None
    return order, block, torch.repeat_interleave(blocks)


class MarlinLinear:
    """4-bit and 8-bit weights in Marlin's layout, on NVIDIA's matrix units; act-order by permuted inputs."""

    #: Tokens for which permuted inputs are copied by the operator; for more, torch does it, into memory of its own.
    copied_tokens = 512
    #: The workspaces of each device, the last one in use. CUDA graphs may hold the older ones.
    workspaces: ClassVar[dict[torch.device, list[Tensor]]] = {}

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.bits, self.out_features, in_features = weight.bits, weight.out_features, weight.in_features
        self.group_size = -1 if weight.group_size >= in_features else weight.group_size
        self.perm = None
        if weight.g_idx is not None and weight.scales.shape[0] > 1:
            self.perm = torch.argsort(weight.g_idx, stable=True).int()
        self.weight = ops.marlin_repack(weight.q.contiguous(), self.bits, self.perm)
        self.scales = ops.marlin_pack_scales(weight.scales.to(dtype))
        self.zeros = None if weight.zeros is None else ops.marlin_pack_scales(weight.zeros)
        self.copies = self.perm is not None or in_features % 8 != 0
        self._reserve(weight.q.device, in_features)

    def _reserve(self, device: torch.device, in_features: int) -> None:
        """Have a workspace that is large enough for any call, before any graph is recorded."""

        def size_of(num_tokens: int, copied: bool = False) -> int:
            return ops.marlin_workspace_size(num_tokens, self.out_features, in_features, copied)

        size = max(size_of(num_tokens) for num_tokens in (8, 16, 32, 64, 128, 256, 512, 1 << 20))
        if self.copies:
            size += size_of(self.copied_tokens, True) - size_of(self.copied_tokens)
        own = self.workspaces.setdefault(device, [])
        if not own or own[-1].numel() < size:
            own.append(torch.zeros(size, dtype=torch.float32, device=device))

    @classmethod
    def pack(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> MarlinLinear:
        return cls(weight, dtype)

    @staticmethod
    def num_bytes(out_features: int, in_features: int, groups: int, bits: int, itemsize: int) -> int:
        rows, columns = -(-out_features // 64) * 64, -(-in_features // 64) * 64
        return rows * (columns * bits // 8 + groups * (itemsize + 1))

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        perm = self.perm
        if self.copies and x.shape[0] > self.copied_tokens:
            if perm is not None:
                x, perm = x.index_select(1, perm), None
            x = F.pad(x, (0, -x.shape[1] % 8))
        return ops.marlin_gemm(
            x,
            self.weight,
            self.scales,
            bits=self.bits,
            group_size=self.group_size,
            out_features=self.out_features,
            zeros=self.zeros,
            perm=perm,
            bias=bias,
            out=out,
            workspace=self.workspaces[x.device][-1],
        )


#: Tokens from which the plain GPU methods write the weights out as numbers, for torch's product.
DEQUANTIZED_FROM = 65


class GptqLinear:
    """4-bit and 8-bit weights of any format in GPTQ's layout, and any mapping of inputs to groups, on GPUs.

    Inputs that do not lie group by group, in whole steps of the kernel, are put there when the weights are packed.
    """

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.bits, self.out_features, self.in_features = weight.bits, weight.out_features, weight.in_features
        self.order, self.group_size, rows = _in_blocks(weight)
        scales, zeros = weight.scales.to(dtype), weight.zeros
        if rows is not None:
            scales, zeros = scales[rows], None if zeros is None else zeros[rows]
        fields = 32 // self.bits
        if self.order is None and self.in_features % fields:
            inputs = torch.arange(self.in_features, dtype=torch.int32, device=weight.q.device)
            self.order = F.pad(inputs, (0, -self.in_features % fields), value=-1)
        # Outputs in whole words of zero points, and whole vectors.
        padding = -self.out_features % 8
        q = weight.q if padding == 0 else F.pad(weight.q, (0, 0, 0, padding))
        self.weight = torch.empty(
            (-(-self._rows() // fields), q.shape[0]), dtype=torch.int32, device=weight.q.device
        )
        # Some outputs at a time, because rearranged weights take four to eight times their memory.
        for first in range(0, q.shape[0], _PACKED_ROWS):
            some = q[first : first + _PACKED_ROWS]
            if self.order is not None:
                some = some.index_select(1, self.order.clamp(min=0))
            self.weight[:, first : first + _PACKED_ROWS] = pack_words(some, self.bits).t()
        self.scales = F.pad(scales, (0, padding)).contiguous()
        self.zeros = None if zeros is None else pack_words(F.pad(zeros, (0, padding)), self.bits)
        self.has_gaps = self.order is not None and bool((self.order < 0).any())

    def _rows(self) -> int:
        return self.in_features if self.order is None else self.order.shape[0]

    @classmethod
    def pack(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> GptqLinear:
        return cls(weight, dtype)

    @staticmethod
    def num_bytes(out_features: int, in_features: int, groups: int, bits: int, itemsize: int) -> int:
        rows, columns = in_features + 32 * groups, -(-out_features // 8) * 8
        groups += -(-in_features // 32) if groups > 1 else 0
        return columns * (rows * bits // 8 + groups * (itemsize + bits // 8 + 1)) + 4 * rows

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if x.shape[0] >= DEQUANTIZED_FROM:
            weight = x.new_empty(self.in_features, self.weight.shape[1])
            ops.gptq_dequantize(
                self.weight,
                self.scales,
                bits=self.bits,
                group_size=self.group_size,
                qzeros=self.zeros,
                order=self.order,
                out=weight,
            )
            return _multiply(x, weight[:, : self.out_features], bias, out)
        if self.order is not None:
            # A pass of its own: each block of the kernel would gather them again. Gaps get a column of zeros.
            if self.has_gaps:
                x = F.pad(x, (1, 0)).index_select(1, self.order + 1)
            else:
                x = x.index_select(1, self.order)
        padding = self.weight.shape[1] - self.out_features
        result = out
        if padding:
            result = x.new_empty(x.shape[0], self.weight.shape[1])
            bias = None if bias is None else F.pad(bias, (0, padding))
        ops.gptq_gemm(
            x,
            self.weight,
            self.scales,
            bits=self.bits,
            group_size=self.group_size,
            qzeros=self.zeros,
            bias=bias,
            out=result,
        )
        return out.copy_(result[:, : self.out_features]) if padding else out


class AwqLinear:
    """4-bit weights in AWQ's layout on GPUs: outputs in eights, whole groups of consecutive inputs."""

    #: The output in each nibble of a word, low ones first.
    nibbles = (0, 2, 4, 6, 1, 3, 5, 7)

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.group_size = -1 if weight.group_size >= weight.in_features else weight.group_size
        self.weight = torch.empty(
            (weight.in_features, weight.out_features // 8), dtype=torch.int32, device=weight.q.device
        )
        for first in range(0, weight.in_features, _PACKED_ROWS):
            some = weight.q[:, first : first + _PACKED_ROWS].t()
            self.weight[first : first + _PACKED_ROWS] = self._words(some)
        self.scales = weight.scales.to(dtype).contiguous()
        zeros = weight.zeros
        if zeros is None:
            zeros = torch.full(self.scales.shape, 8, dtype=torch.uint8, device=weight.q.device)
        self.zeros = self._words(zeros)

    @classmethod
    def _words(cls, fields: Tensor) -> Tensor:
        ordered = fields.unflatten(1, (-1, 8))[..., list(cls.nibbles)]
        return pack_words(ordered, 4).flatten(1)

    @classmethod
    def pack(cls, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> AwqLinear:
        return cls(weight, dtype)

    @staticmethod
    def num_bytes(out_features: int, in_features: int, groups: int, bits: int, itemsize: int) -> int:
        return out_features * in_features // 2 + groups * out_features * (2 * itemsize + 1) // 2

    def apply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        if x.shape[0] >= DEQUANTIZED_FROM:
            weight = ops.awq_dequantize(
                self.weight, self.zeros, self.scales, group_size=self.group_size, dtype=x.dtype
            )
            return _multiply(x, weight, bias, out)
        return ops.awq_gemm(
            x, self.weight, self.zeros, self.scales, group_size=self.group_size, bias=bias, out=out
        )


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``x @ weight + bias`` by torch; `weight` [K, N]."""
    torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
    return out


#: The methods that `choose` names.
METHODS: dict[str, type[Method]] = {
    "cpu": CpuLinear,
    "cpu-int8": CpuInt8Linear,
    "marlin": MarlinLinear,
    "gptq": GptqLinear,
    "awq": AwqLinear,
}
