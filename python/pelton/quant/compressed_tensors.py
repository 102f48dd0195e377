"""Checkpoints of the compressed-tensors library in the format pack-quantized, as llm-compressor writes them.

`weight_packed` int32 [N, K * bits / 32, rounded up]: consecutive inputs in a word, the first in its low bits, each
plus 2^(bits - 1). `weight_scale` [N, G]. `weight_shape` int64 [2]: N and K. With zero points `weight_zero_point` int32
[N * bits / 32, rounded up, G], packed along the outputs, plus 2^(bits - 1) too. With `actorder: group` (older
versions) `weight_g_idx` int32 [K]: the group of each input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError
from .canonical import QuantizedWeight, Scheme, split_nibbles, trivial_groups, unpack_words
from .gptq import without_usual_zeros
from .layout import FLOATS, INTS, TensorSpec, check_groups, check_scales
from .settings import Rule, check_pattern, read_bits, read_flag, read_group_size, read_names

__all__ = ["MARK", "check", "optional", "parse", "read_rules", "specs"]

MARK = "weight_packed"
_FORMAT = "pack-quantized"
_CLASS = "Linear"  # of every layer that can be quantized here, in targets and ignore


def read_rules(values: Mapping[str, Any], where: str) -> tuple[Iterable[Rule], bool]:
    """The rules of a compressed-tensors config: `ignore`, then targets that are names, patterns, the class Linear."""
    status = values.get("quantization_status")
    if status not in (None, "compressed"):
        raise UnsupportedError(
            f"{where}.quantization_status: {status!r} is not supported; Pelton reads compressed weights"
        )
    for key in ("kv_cache_scheme", "transform_config"):
        if values.get(key):
            raise UnsupportedError(f"{where}.{key}: is not supported, found {values[key]!r:.80}")
    sparsity = values.get("sparsity_config") or values.get("moe_sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        raise UnsupportedError(
            f"{where}.sparsity_config: sparse weights are not supported, found {sparsity!r:.80}"
        )
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}.config_groups must be an object with groups, found {groups!r:.80}")
    rules = [_rule(name, None, "ignore", f"{where}.ignore") for name in read_names(values, "ignore", where)]
    targets: list[Rule] = []
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{at} must be an object, found {group!r:.80}")
        scheme = _scheme(group, group.get("format") or values.get("format"), at)
        targets += [
            _rule(target, scheme, f"config_groups.{name}", f"{at}.targets")
            for target in read_names(group, "targets", at)
        ]
    said: dict[str, Rule] = {}
    for rule in targets:
        other = said.setdefault(rule.pattern, rule)
        if other.kind == rule.kind and other.scheme != rule.scheme:
            raise CheckpointError(
                f"{where}.config_groups: {other.said_by} is {_describe(other)}, but {rule.said_by} is "
                f"{_describe(rule)}; a target can be in one group only"
            )
    order = ("exact", "regex", "all")
    return [*rules, *sorted(targets, key=lambda rule: order.index(rule.kind))], True


def _rule(pattern: str, scheme: Scheme | None, said_by: str, where: str) -> Rule:
    if pattern.startswith("re:"):
        return Rule("regex", check_pattern(pattern[3:], where), scheme, f"{said_by} {pattern!r}")
    return Rule("all" if pattern == _CLASS else "exact", pattern, scheme, f"{said_by} {pattern!r}")


def _describe(rule: Rule) -> str:
    scheme = rule.scheme
    if scheme is None:
        return "not quantized"
    return f"{scheme.bits} bit, group size {scheme.group_size}, symmetric {scheme.symmetric}, order {scheme.order}"


def _scheme(group: Mapping[str, Any], form: object, where: str) -> Scheme:
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise UnsupportedError(
                f"{where}.{key}: quantized activations are not supported; Pelton reads W4A16 and W8A16"
            )
    if form != _FORMAT:
        raise UnsupportedError(
            f"{where}.format: the packing {form!r} is not supported; Pelton reads {_FORMAT}"
        )
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{where}.weights must be an object, found {weights!r:.80}")
    where += ".weights"
    if weights.get("type", "int") != "int":
        raise UnsupportedError(f"{where}.type: {weights['type']!r} is not supported; Pelton reads int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise UnsupportedError(
            f"{where}.strategy: {strategy!r} is not supported; Pelton reads group and channel"
        )
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise UnsupportedError(f"{where}.actorder: {order!r} is not supported; Pelton reads group and weight")
    return Scheme(
        "compressed-tensors",
        read_bits(weights, "num_bits", where),
        -1 if strategy == "channel" else read_group_size(weights, "group_size", where),
        read_flag(weights, "symmetric", where, True),
        "equal" if order in (True, "group", "dynamic") else "none",
    )


def specs(scheme: Scheme, out_features: int, in_features: int, where: str) -> dict[str, TensorSpec]:
    fields, groups = 32 // scheme.bits, scheme.groups(in_features)
    tensors = {
        "weight_packed": TensorSpec((out_features, -(-in_features // fields)), INTS, False, "words"),
        "weight_scale": TensorSpec((out_features, groups), FLOATS, True, "scales"),
        "weight_shape": TensorSpec((2,), (torch.int64, torch.int32), True, "shape"),
    }
    if not scheme.symmetric:
        shape = (-(-out_features // fields), groups)
        tensors["weight_zero_point"] = TensorSpec(shape, INTS, True, "zeros")
    if scheme.order != "none":
        tensors["weight_g_idx"] = TensorSpec((in_features,), INTS, True, "groups")
    return tensors


def optional(scheme: Scheme) -> tuple[str, ...]:
    return ()


def check(scheme: Scheme, suffix: str, tensor: Tensor, spec: TensorSpec, where: str) -> None:
    if suffix == "weight_scale":
        check_scales(tensor, where)
    elif suffix == "weight_g_idx":
        check_groups(tensor, scheme.groups(spec.shape[0]), where)


def parse(scheme: Scheme, tensors: Mapping[str, Tensor], q: Tensor) -> QuantizedWeight:
    bits, (out_features, in_features) = scheme.bits, q.shape
    size = in_features if scheme.group_size == -1 else scheme.group_size
    packed = tensors["weight_packed"].view(torch.uint8)  # [N, bytes]
    if bits == 8:
        q.copy_(packed[:, :in_features])
    else:
        pairs = in_features // 2
        split_nibbles(packed[:, :pairs], q[:, 0 : 2 * pairs : 2], q[:, 1::2])
        if in_features % 2:
            q[:, -1] = packed[:, pairs] & 15
    zeros = None
    if not scheme.symmetric:
        along_outputs = tensors["weight_zero_point"].t()  # [G, words]
        zeros = without_usual_zeros(unpack_words(along_outputs, bits)[:, :out_features].contiguous(), bits)
    g_idx = tensors.get("weight_g_idx")
    if g_idx is not None and torch.equal(g_idx, trivial_groups(in_features, size, g_idx.device)):
        g_idx = None
    return QuantizedWeight(q, tensors["weight_scale"].t().contiguous(), zeros, g_idx, bits, size)
