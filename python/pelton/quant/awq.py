"""AWQ checkpoints in the gemm packing, as AutoAWQ, llm-awq's converters and gptqmodel write them.

`qweight` int32 [K, N / 8]: field i of a word, counted from its low bits, is output (0, 2, 4, 6, 1, 3, 5, 7)[i] of the
word's eight. `qzeros` int32 [G, N / 8] in the same order. `scales` [G, N]. Always 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError
from .canonical import QuantizedWeight, Scheme, split_nibbles, unpack_words
from .gptq import check_pack_dtype, check_usual_zeros, lm_head_rule, without_usual_zeros
from .layout import FLOATS, INTS, TensorSpec, check_scales
from .settings import Rule, one_value, read_bits, read_flag, read_group_size, read_names

__all__ = ["MARK", "ORDER", "check", "optional", "parse", "read_rules", "specs"]

MARK = "qweight"
#: the output in each field of a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_rules(values: Mapping[str, Any], where: str) -> tuple[Iterable[Rule], bool]:
    """The rules of an AWQ config: `modules_to_not_convert` (parts of names), lm_head, then the rest."""
    version = one_value(values, ("version", "checkpoint_format", "format"), where)
    if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
        raise UnsupportedError(
            f"{where}.version: the AWQ packing {version!r} is not supported; Pelton reads gemm"
        )
    check_pack_dtype(values, where)
    one_value(values, ("bits", "w_bit"), where)
    one_value(values, ("group_size", "q_group_size"), where)
    bits_key = "bits" if "bits" in values else "w_bit"
    bits = read_bits(values, bits_key, where)
    if bits != 4:
        raise UnsupportedError(
            f"{where}.{bits_key}: AWQ weights of {bits} bits are not supported; Pelton has 4"
        )
    size = read_group_size(values, "group_size" if "group_size" in values else "q_group_size", where)
    scheme = Scheme("awq", bits, size, not read_flag(values, "zero_point", where, True))
    key = "modules_to_not_convert"
    rules = [Rule("part", name, None, f"{key} {name!r}") for name in read_names(values, key, where)]
    rules.append(lm_head_rule(values, scheme, where))
    return [*rules, Rule("all", "", scheme, "quantization_config")], False


def specs(scheme: Scheme, out_features: int, in_features: int, where: str) -> dict[str, TensorSpec]:
    groups = scheme.groups(in_features)
    if out_features % 8:
        raise CheckpointError(
            f"{where}: an AWQ layer has outputs in multiples of 8, the config asks for {out_features}"
        )
    return {
        "qweight": TensorSpec((in_features, out_features // 8), INTS, False, "words"),
        "qzeros": TensorSpec((groups, out_features // 8), INTS, True, "zeros"),
        "scales": TensorSpec((groups, out_features), FLOATS, True, "scales"),
    }


def optional(scheme: Scheme) -> tuple[str, ...]:
    return ()


def check(scheme: Scheme, suffix: str, tensor: Tensor, spec: TensorSpec, where: str) -> None:
    if suffix == "scales":
        check_scales(tensor, where)
    elif suffix == "qzeros" and scheme.symmetric:
        advice = "set zero_point to true if the file has zero points"
        check_usual_zeros(unpack_words(tensor, 4), 4, where, "zero_point: false", advice)


def parse(scheme: Scheme, tensors: Mapping[str, Tensor], q: Tensor) -> QuantizedWeight:
    out_features, in_features = q.shape
    words = tensors["qweight"].view(torch.uint8).view(in_features, -1, 4)
    outputs = q.view(-1, 8, in_features)
    for byte in range(4):
        fields = words[:, :, byte].t()
        split_nibbles(fields, outputs[:, ORDER[2 * byte]], outputs[:, ORDER[2 * byte + 1]])
    stored = unpack_words(tensors["qzeros"], 4).view(-1, out_features // 8, 8)
    zeros = torch.empty_like(stored)
    zeros[:, :, list(ORDER)] = stored
    return QuantizedWeight(
        q,
        tensors["scales"],
        without_usual_zeros(zeros.view(-1, out_features), 4),
        None,
        4,
        in_features if scheme.group_size == -1 else scheme.group_size,
    )
