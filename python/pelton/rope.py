"""Rotary position embedding: what the config says, and the table of cosines and sines that follows from it.

Two spellings are read: the old one (`rope_theta` at the top level, `rope_scaling` with `type` or `rope_type`) and
the new one (everything in `rope_parameters`). Sources: Su et al., "RoFormer", 2021; Chen et al., "Position
Interpolation", 2023 (linear); Peng et al., "YaRN", 2023 (dynamic, yarn); Ding et al., "LongRoPE", 2024; the Llama 3.1
report (llama3).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CheckpointError, UnsupportedError, did_you_mean

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["ROPE_TYPES", "RopeConfig", "cos_sin_table", "inverse_frequencies"]

logger = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_ALIASES = {"su": "longrope"}
_NEEDS_FACTOR = ("linear", "dynamic", "llama3")
DEFAULT_THETA = 10000.0
MAX_POSITIONS = 2**31 - 1  # lengths are int32 in the kernels
_TABLE_ROWS = 4096  # computed at once: the float64 angles of a long table need not exist together


@dataclass(frozen=True)
class RopeConfig:
    """Which rotation a model was trained with.

    `rotary_dim` elements of a head rotate, `original_max_position` is the context length before scaling and
    `max_position` the config's max_position_embeddings. `attention_factor` multiplies cosines and sines; None means
    that it follows from the other values. Each further value is used by the types named behind it.
    """

    rotary_dim: int
    max_position: int
    original_max_position: float
    rope_type: str = "default"
    rope_theta: float = DEFAULT_THETA
    factor: float = 1.0
    attention_factor: float | None = None  # yarn, longrope
    mscale: float = 0.0  # yarn, with mscale_all_dim
    mscale_all_dim: float = 0.0  # yarn, with mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the rotation was scaled for."""
        if self.rope_type in ("linear", "dynamic"):
            return round(self.max_position * self.factor)
        if self.rope_type == "yarn":
            return max(self.max_position, round(self.original_max_position * self.factor))
        return self.max_position

    @property
    def cos_sin_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        if self.rope_type == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], head_dim: int, max_position: int, source: str
    ) -> RopeConfig:
        """Read the rotation from the values of a config.json; `source` names the file in errors.

        Raises:
            UnsupportedError: a type of rotation that Pelton does not know.
            CheckpointError: a value that is missing or cannot be.
        """
        rope = _merged(config, source)
        rope_type = str(rope.pop("rope_type"))
        rope_type = _ALIASES.get(rope_type, rope_type)
        if rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"{source}: rope type {rope_type!r} is not supported{did_you_mean(rope_type, ROPE_TYPES)}: "
                f"Pelton has {', '.join(ROPE_TYPES)}"
            )
        partial = _number(rope, "partial_rotary_factor", source, 1.0)
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise CheckpointError(
                f"{source}: head size {head_dim} and partial_rotary_factor {partial:g} make a rotary size of "
                f"{rotary_dim}; it must be even and from 2 to the head size"
            )
        original = _number(rope, "original_max_position_embeddings", source, float(max_position))
        # For Phi-3 and its kin the key stands beside the rope parameters, and wins.
        if rope_type in ("yarn", "llama3", "longrope") and config.get("original_max_position_embeddings"):
            original = _number(config, "original_max_position_embeddings", source, float(max_position))
        if original < 1:
            raise CheckpointError(
                f"{source}: rope original_max_position_embeddings must be at least 1, found {original:g}"
            )
        if rope.get("factor") is None and rope_type in _NEEDS_FACTOR:
            raise CheckpointError(
                f"{source}: rope type {rope_type!r} needs a factor, and the config has none"
            )
        values: dict[str, Any] = {
            key: _number(rope, key, source)
            for key in (
                "rope_theta",
                "factor",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "beta_fast",
                "beta_slow",
            )
            + ("low_freq_factor", "high_freq_factor")
            if rope.get(key) is not None
        }
        if rope_type in ("yarn", "longrope"):
            values.setdefault("factor", max_position / original)
        if rope.get("truncate") is not None:
            values["truncate"] = bool(rope["truncate"])
        if rope_type == "longrope":
            values |= {
                key: _factors(rope, key, rotary_dim // 2, source) for key in ("short_factor", "long_factor")
            }
        if rope_type == "llama3" and values.get("high_freq_factor", 4.0) <= values.get(
            "low_freq_factor", 1.0
        ):
            raise CheckpointError(f"{source}: rope high_freq_factor must be greater than low_freq_factor")
        for key in ("rope_theta", "factor", "beta_fast", "beta_slow"):
            if values.get(key, 1.0) <= 0:
                raise CheckpointError(f"{source}: rope {key} must be positive, found {values[key]:g}")
        _warn_of_unknown(rope, source)
        config_read = cls(
            rotary_dim=rotary_dim,
            max_position=max_position,
            original_max_position=original,
            rope_type=rope_type,
            **values,
        )
        _check_range(config_read, source)
        return config_read


def _check_range(rope: RopeConfig, source: str) -> None:
    """Each value may be sound and all of them together still give no rotation."""
    try:
        length = rope.max_model_len
        with np.errstate(all="ignore"):
            angles = inverse_frequencies(rope, length) * length
            is_sound = bool(np.isfinite(angles).all()) and math.isfinite(np.float32(rope.cos_sin_scale))
    except ArithmeticError:  # an overflow or a division by zero
        is_sound = False
    if not is_sound:
        raise CheckpointError(f"{source}: the rope parameters give no finite rotation: {rope}")
    if not 1 <= length <= MAX_POSITIONS:
        raise CheckpointError(
            f"{source}: max_position_embeddings={rope.max_position} and the rope factor {rope.factor:g} make a "
            f"longest sequence of {length:.6g} tokens; it must be from 1 to {MAX_POSITIONS}"
        )


def inverse_frequencies(rope: RopeConfig, length: float | None = None) -> NDArray[np.float64]:
    """Angle per position of each pair, float64 [rotary_dim / 2].

    `length` is the length of the sequence, which matters to `dynamic` and `longrope` only; None stands for the
    length the model was trained with.
    """
    length = rope.original_max_position if length is None else length
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    plain = rope.rope_theta**-exponent
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "dynamic":
        return _dynamic_theta(rope, np.float64(length)) ** -exponent
    if rope.rope_type == "yarn":
        return _yarn(rope, plain)
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "longrope":
        return plain / np.array(
            rope.long_factor if length > rope.original_max_position else rope.short_factor
        )
    return plain


def cos_sin_table(rope: RopeConfig, max_position: int) -> torch.Tensor:
    """The table that the rotary kernel reads, float32 [max_position, rotary_dim]: cosines, then sines.

    Angles are computed in float64, because an fp32 angle is off by 1e-2 at position 100,000. A `longrope` model
    takes its long factors when max_position needs them, and with `dynamic` a position beyond the trained length
    rotates as in a sequence that ends there, so that a token's key does not depend on what comes after it.
    """
    import torch

    dynamic = rope.rope_type == "dynamic" and max_position > rope.max_position
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = inverse_frequencies(rope, max_position)
    table = np.empty((max_position, rope.rotary_dim), dtype=np.float32)
    half = rope.rotary_dim // 2
    for first in range(0, max_position, _TABLE_ROWS):
        positions = np.arange(first, min(first + _TABLE_ROWS, max_position), dtype=np.float64)[:, None]
        if dynamic:
            frequencies = _dynamic_theta(rope, positions + 1) ** -exponent
        angles = positions * frequencies
        rows = table[first : first + len(positions)]
        np.multiply(np.cos(angles), rope.cos_sin_scale, out=rows[:, :half], casting="same_kind")
        np.multiply(np.sin(angles), rope.cos_sin_scale, out=rows[:, half:], casting="same_kind")
    return torch.from_numpy(table)


def _dynamic_theta(rope: RopeConfig, length: Any) -> Any:
    """NTK-aware base for a sequence of `length` tokens (an array gives an array)."""
    stretched = np.maximum(length, rope.max_position)
    dim = rope.rotary_dim
    growth = rope.factor * stretched / rope.max_position - (rope.factor - 1)
    return rope.rope_theta * growth ** (dim / (dim - 2) if dim > 2 else 1.0)


def _yarn(rope: RopeConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_position / (times * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    turns = rope.original_max_position * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(smooth, 0, 1)
    return plain * kept + plain / rope.factor * (1 - kept)


def _merged(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Both spellings as one dict with `rope_type` and `rope_theta`."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = config.get(key)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise CheckpointError(f"{source}: {key} must be a table, found {part!r}")
        if any(isinstance(value, Mapping) for value in part.values()):
            raise UnsupportedError(
                f"{source}: {key} differs by layer type ({', '.join(part)}); Pelton rotates all alike"
            )
        rope |= {name: value for name, value in part.items() if value is not None}
    old_type = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or old_type or "default"
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None and config.get(key) is not None:
            rope[key] = config[key]
    return rope


def _number(values: Mapping[str, Any], key: str, source: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None and default is not None:
        return default
    number = as_finite(value)
    if number is None:
        raise CheckpointError(f"{source}: rope {key} must be a number, found {value!r:.80}")
    return number


def as_finite(value: Any) -> float | None:
    """The number as a float; None for what is none, or not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's integers have no limit
        return None
    return number if math.isfinite(number) else None


def _factors(rope: Mapping[str, Any], key: str, count: int, source: str) -> tuple[float, ...]:
    value = rope.get(key)
    if (
        not isinstance(value, list | tuple)
        or len(value) != count
        or not all(as_finite(x) for x in value)  # a factor of 0 would divide by it
    ):
        found = f"{len(value)} of them" if isinstance(value, list | tuple) else repr(value)
        raise CheckpointError(
            f"{source}: rope {key} must be a list of {count} numbers other than 0, found {found}"
        )
    return tuple(float(x) for x in value)


def _warn_of_unknown(rope: Mapping[str, Any], source: str) -> None:
    known = {field.name for field in fields(RopeConfig)} | {
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
    # "finetuned" is a remark of YaRN's authors, without effect on the rotation.
    unknown = sorted(set(rope) - known - {"finetuned"})
    if unknown:
        logger.warning("%s: rope parameters without effect here: %s", source, ", ".join(unknown))
