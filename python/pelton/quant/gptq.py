"""GPTQ checkpoints, as AutoGPTQ and gptqmodel write them.

`qweight` int32 [K * bits / 32, N]: consecutive inputs in a word, the first in its low bits. `qzeros` int32
[G, N * bits / 32]: consecutive outputs in a word. `scales` [G, N]. `g_idx` int32 [K]: the group of each input.
Zero points are stored less one in `checkpoint_format` "gptq" (v1), where the writer subtracts 1 from every field of a
whole word at once, so that a zero point of 0 borrows from the next field; adding the same to the word undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError, did_you_mean
from .canonical import QuantizedWeight, Scheme, split_nibbles, trivial_groups, unpack_words
from .layout import FLOATS, INTS, TensorSpec, check_groups, check_scales
from .settings import Rule, check_pattern, one_value, read_bits, read_flag, read_group_size, read_names

__all__ = ["MARK", "check", "optional", "parse", "read_rules", "specs"]

MARK = "qweight"
_ONES = {4: 0x11111111, 8: 0x01010101}
_FORMATS = ("gptq", "gptq_v2")
#: the settings of `dynamic` that decide how a layer is stored
_CHANGES = ("bits", "group_size", "sym", "desc_act")


def read_rules(values: Mapping[str, Any], where: str) -> tuple[Iterable[Rule], bool]:
    """The rules of a GPTQ config: `dynamic` (gptqmodel), lm_head, `modules_in_block_to_quantize`, then the rest."""
    form = one_value(values, ("checkpoint_format", "format"), where)
    form = "gptq" if form is None else form
    if form not in _FORMATS:
        raise UnsupportedError(
            f"{where}.checkpoint_format: the packing {form!r} is not supported; Pelton reads {' and '.join(_FORMATS)}"
        )
    check_pack_dtype(values, where)
    base = Scheme(
        "gptq",
        read_bits(values, "bits", where),
        read_group_size(values, "group_size", where),
        read_flag(values, "sym", where, False),  # unsaid: any zero points
        "equal" if read_flag(values, "desc_act", where, False) else "none",
        zeros_less_one=form == "gptq",
    )
    rules = [_dynamic(pattern, changes, base, where) for pattern, changes in _dynamic_of(values, where)]
    rules.append(lm_head_rule(values, base, where))
    blocks = values.get("modules_in_block_to_quantize")
    if isinstance(blocks, list) and blocks:
        flat = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
        key = "modules_in_block_to_quantize"
        names = "|".join(re.escape(name) for name in read_names({key: flat}, key, where))
        rules.append(Rule("regex", rf"(?!.*\.(?:{names})$)(?!lm_head$)", None, key))
    return [*rules, Rule("all", "", base, "quantization_config")], False


def lm_head_rule(values: Mapping[str, Any], base: Scheme, where: str) -> Rule:
    quantized = read_flag(values, "lm_head", where, False)
    return Rule("exact", "lm_head", base if quantized else None, f"lm_head: {str(quantized).lower()}")


def check_pack_dtype(values: Mapping[str, Any], where: str) -> None:
    """Words of 32 bits, which is what everybody but gptqmodel's option writes."""
    if values.get("pack_dtype") not in (None, "int32", "torch.int32"):
        raise UnsupportedError(
            f"{where}.pack_dtype: words of {values['pack_dtype']!r} are not supported; Pelton reads int32"
        )


def _dynamic_of(values: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    dynamic = values.get("dynamic")
    if dynamic is None:
        return []
    if not isinstance(dynamic, Mapping) or not all(isinstance(v, Mapping | None) for v in dynamic.values()):
        raise CheckpointError(f"{where}.dynamic must map patterns to settings, found {dynamic!r:.80}")
    return [(str(pattern), changes or {}) for pattern, changes in dynamic.items()]


def _dynamic(pattern: str, changes: Mapping[str, Any], base: Scheme, where: str) -> Rule:
    at = f"{where}.dynamic[{pattern!r}]"
    said_by = f"dynamic {pattern!r}"
    for key in changes:
        meant = did_you_mean(key, _CHANGES)
        if meant and key not in _CHANGES:  # others say how it was quantized, not how it is stored
            raise CheckpointError(f"{at}: the key {key!r} is unknown{meant}")
    if pattern.startswith("-:"):
        return Rule("regex", check_pattern(pattern[2:], at), None, said_by)
    scheme = base
    if "bits" in changes:
        scheme = replace(scheme, bits=read_bits(changes, "bits", at))
    if "group_size" in changes:
        scheme = replace(scheme, group_size=read_group_size(changes, "group_size", at))
    if "sym" in changes:
        scheme = replace(scheme, symmetric=read_flag(changes, "sym", at, base.symmetric))
    if "desc_act" in changes:
        scheme = replace(scheme, order="equal" if read_flag(changes, "desc_act", at, False) else "none")
    return Rule("regex", check_pattern(pattern.removeprefix("+:"), at), scheme, said_by)


def specs(scheme: Scheme, out_features: int, in_features: int, where: str) -> dict[str, TensorSpec]:
    fields, groups = 32 // scheme.bits, scheme.groups(in_features)
    for what, size in (("inputs", in_features), ("outputs", out_features)):
        if size % fields:
            raise CheckpointError(
                f"{where}: a GPTQ layer of {scheme.bits} bits has {what} in multiples of {fields}, the config asks for "
                f"{size}"
            )
    return {
        "qweight": TensorSpec((in_features // fields, out_features), INTS, False, "words"),
        "qzeros": TensorSpec((groups, out_features // fields), INTS, True, "zeros"),
        "scales": TensorSpec((groups, out_features), FLOATS, True, "scales"),
        "g_idx": TensorSpec((in_features,), INTS, True, "groups"),
    }


def optional(scheme: Scheme) -> tuple[str, ...]:
    return () if scheme.order != "none" else ("g_idx",)  # without order every writer means consecutive groups


def check(scheme: Scheme, suffix: str, tensor: Tensor, spec: TensorSpec, where: str) -> None:
    if suffix == "scales":
        check_scales(tensor, where)
    elif suffix == "qzeros" and scheme.symmetric:
        stored_for = "gptq" if scheme.zeros_less_one else "gptq_v2"
        other = "gptq_v2" if scheme.zeros_less_one else "gptq"
        check_usual_zeros(
            _decoded_zeros(scheme, tensor),
            scheme.bits,
            where,
            f"sym: true with checkpoint_format {stored_for!r}",
            f"the file may have been written as {other!r}, or sym should be false",
        )
    elif suffix == "g_idx":
        check_groups(tensor, scheme.groups(spec.shape[0]), where)


def parse(scheme: Scheme, tensors: Mapping[str, Tensor], q: Tensor) -> QuantizedWeight:
    bits, (out_features, in_features) = scheme.bits, q.shape
    words = tensors["qweight"].view(torch.uint8).view(-1, out_features, 4).permute(1, 0, 2)
    if bits == 8:
        q.view(out_features, -1, 4).copy_(words)
    else:
        fields = q.view(out_features, -1, 4, 2)
        split_nibbles(words, fields[..., 0], fields[..., 1])
    return QuantizedWeight(
        q,
        tensors["scales"],
        without_usual_zeros(_decoded_zeros(scheme, tensors["qzeros"]), bits),
        _order(scheme, tensors.get("g_idx"), in_features),
        bits,
        in_features if scheme.group_size == -1 else scheme.group_size,
    )


def _decoded_zeros(scheme: Scheme, qzeros: Tensor) -> Tensor:
    return unpack_words(qzeros + _ONES[scheme.bits] if scheme.zeros_less_one else qzeros, scheme.bits)


def check_usual_zeros(zeros: Tensor, bits: int, where: str, settings: str, advice: str) -> None:
    """Refuse zero points that symmetric settings do not allow."""
    usual = 1 << (bits - 1)
    wrong = zeros[zeros != usual]
    if wrong.numel():
        raise CheckpointError(
            f"{where}: {wrong.numel()} of {zeros.numel()} zero points are not {usual} (the first is {int(wrong[0])}), "
            f"which {settings} means; {advice}"
        )


def without_usual_zeros(zeros: Tensor, bits: int) -> Tensor | None:
    """None when all zero points are 2^(bits - 1), those of symmetric quantization."""
    low, high = torch.aminmax(zeros)
    return None if int(low) == int(high) == 1 << (bits - 1) else zeros


def _order(scheme: Scheme, g_idx: Tensor | None, in_features: int) -> Tensor | None:
    """The mapping of inputs to groups, None for consecutive groups. Without desc_act all zeros say that, too."""
    size = in_features if scheme.group_size == -1 else scheme.group_size
    if g_idx is None or torch.equal(g_idx, trivial_groups(in_features, size, g_idx.device)):
        return None
    return None if scheme.order == "none" and not bool(g_idx.any()) else g_idx
