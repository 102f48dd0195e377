"""The `quantization_config` of a checkpoint: which layers are quantized, and how. Read once, checked once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, InvalidValueError, UnsupportedError, did_you_mean
from . import patterns
from .canonical import Scheme

__all__ = [
    "FORMATS",
    "GROUP_SIZES",
    "QuantizationConfig",
    "Rule",
    "check_flag",
    "read_bits",
    "read_flag",
    "read_group_size",
    "read_quantization",
]

FORMATS = ("awq", "gptq", "compressed-tensors")
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
_BITS = (4, 8)


@dataclass(frozen=True)
class Rule:
    """What a list of the config says of some layers: their scheme, None for layers that are not quantized.

    `kind` is how `pattern` is compared with a layer's name: "exact"; "regex", from the name's beginning; "part", a
    text anywhere in the name; "all".
    """

    kind: str
    pattern: str
    scheme: Scheme | None
    said_by: str

    def matches(self, name: str) -> bool:
        if self.kind == "exact":
            return name == self.pattern
        if self.kind == "regex":
            return re.match(self.pattern, name) is not None
        return self.kind == "all" or self.pattern in name

    def names(self, name: str) -> bool:
        """Whether this layer is meant for certain: a text may be part of other names, too."""
        if self.kind != "part":
            return self.matches(name)
        return f".{self.pattern.strip('.')}." in f".{name}."


@dataclass(frozen=True)
class QuantizationConfig:
    """Of `rules` the first that matches a layer says how it is quantized.

    `complete`: the file has to agree with the rules in every layer. Otherwise (the tools that write the format do not
    list all layers) what the file has decides, unless a rule forbids it by name.
    """

    format: str
    source: str
    rules: tuple[Rule, ...]
    complete: bool

    def rule(self, name: str) -> Rule | None:
        """The rule for the linear layer `name`."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def quantized(self, name: str) -> Scheme | None:
        """The scheme of a layer that the file has quantized, even if a list seems to leave it out."""
        rule = self.rule(name)
        if rule is not None and rule.scheme is None and not rule.names(name):
            rule = next((r for r in self.rules if r.scheme is not None and r.matches(name)), None)
        return rule.scheme if rule else None


def read_quantization(values: Any, source: str) -> QuantizationConfig:
    """Read the `quantization_config` of config.json; `source` names the file in errors.

    Raises:
        UnsupportedError: a method, packing or number of bits that Pelton does not read.
        CheckpointError: a value that is missing or cannot be.
    """
    from . import awq, compressed_tensors, gptq

    where = f"{source}: quantization_config"
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where} must be an object, found {values!r:.80}")
    method = values.get("quant_method")
    if method is None:
        raise CheckpointError(f"{where}.quant_method is missing; Pelton reads {', '.join(FORMATS)}")
    readers: Mapping[str, Callable[[Mapping[str, Any], str], tuple[Iterable[Rule], bool]]] = {
        "awq": awq.read_rules,
        "gptq": gptq.read_rules,
        "compressed-tensors": compressed_tensors.read_rules,
    }
    if not isinstance(method, str) or method not in readers:
        raise UnsupportedError(
            f"{where}.quant_method: weights quantized with {method!r} are not supported; Pelton reads "
            f"{', '.join(FORMATS)}{did_you_mean(str(method), FORMATS)}, and quantized GGUF files"
        )
    other = values.get("method")  # gptqmodel writes both
    if other in FORMATS and other != method:
        raise CheckpointError(
            f"{where}.quant_method is {method!r}, but method is {other!r}; remove the wrong one"
        )
    rules, complete = readers[method](values, where)
    return QuantizationConfig(method, source, tuple(rules), complete)


def one_value(values: Mapping[str, Any], keys: Sequence[str], where: str) -> Any:
    """The value that is said under any of these keys, which mean the same; None: none says it.

    Raises:
        CheckpointError: two of them say different things.
    """
    said = [(key, values[key]) for key in keys if values.get(key) is not None]
    for key, value in said[1:]:
        first, expected = said[0]
        if _folded(value) != _folded(expected):
            raise CheckpointError(
                f"{where}.{first} is {expected!r:.80}, but {key} is {value!r:.80}, and both mean the same; remove the "
                "wrong one"
            )
    return said[0][1] if said else None


def _folded(value: object) -> tuple[type, object]:
    return (type(value), value.lower() if isinstance(value, str) else value)


def check_same_settings(ours: Mapping[str, Any], others: Mapping[str, Any], where: str, beside: str) -> None:
    """Refuse another file's settings that say otherwise. Raises CheckpointError."""
    for keys in (("bits", "w_bit"), ("group_size", "q_group_size"), ("sym",), ("desc_act",), ("zero_point",)):
        mine, theirs = (one_value(values, keys, at) for values, at in ((ours, where), (others, beside)))
        if mine is not None and theirs is not None and mine != theirs:
            raise CheckpointError(
                f"{where}.{keys[0]} is {mine!r:.80}, but {beside} says {theirs!r:.80}; one of the files is not this "
                "checkpoint's: replace or remove it"
            )


def read_bits(values: Mapping[str, Any], key: str, where: str) -> int:
    bits = values.get(key)
    if not isinstance(bits, int) or isinstance(bits, bool):
        raise CheckpointError(f"{where}.{key} must be a whole number, found {bits!r:.80}")
    if bits not in _BITS:
        raise UnsupportedError(
            f"{where}.{key}: weights of {bits} bits are not supported; Pelton has {' and '.join(map(str, _BITS))}"
        )
    return bits


def read_group_size(values: Mapping[str, Any], key: str, where: str) -> int:
    size = values.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or size not in GROUP_SIZES:
        raise CheckpointError(
            f"{where}.{key} must be one of {', '.join(map(str, GROUP_SIZES))} (-1: all inputs), found {size!r:.80}"
        )
    return size


def read_flag(values: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}.{key} must be true or false, found {value!r:.80}")
    return default if value is None else value


def read_names(values: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A list of texts; none where the key is missing or null."""
    names = values.get(key)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise CheckpointError(f"{where}.{key} must be a list of names, found {names!r:.80}")
    return names


def check_pattern(pattern: str, where: str) -> str:
    """A regular expression that can be compiled, and matched with any layer's name in little time."""
    try:
        re.compile(pattern)
        steps = patterns.most_ways(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: {pattern!r:.200} is no regular expression ({error})") from None
    if steps > patterns.LIMIT:
        raise CheckpointError(
            f"{where}: the regular expression {pattern!r:.200} could take forever to match, because of repeats within "
            "repeats or too many in a row; write it with fewer of them"
        )
    return pattern


def check_flag(flag: str | None, config: QuantizationConfig | None, model: object) -> None:
    """Refuse a `quantization=` that contradicts the checkpoint. "marlin" is a way to run any format.

    Raises:
        InvalidValueError: it does.
    """
    if flag is None or (config is not None and flag in (config.format, "marlin")):
        return
    found = (
        f"its config says quant_method {config.format!r}"
        if config
        else "its config has no quantization_config"
    )
    raise InvalidValueError(
        f"quantization={flag!r} contradicts {model}: {found}; leave quantization out, or choose another model"
    )
