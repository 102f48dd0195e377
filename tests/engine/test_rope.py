"""Rope parameters in both spellings, and the tables that follow."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_driver import DATA
from pelton.errors import CheckpointError, UnsupportedError
from pelton.rope import ROPE_TYPES, RopeConfig, cos_sin_table, inverse_frequencies

TABLES: dict[str, Any] = json.loads((DATA / "rope_tables.json").read_text())


def read(config: dict[str, Any], head_dim: int = 64, max_position: int = 4096) -> RopeConfig:
    return RopeConfig.from_config(config, config.get("head_dim", head_dim), max_position, "config.json")


@pytest.mark.parametrize("name", TABLES)
def test_recorded_tables(name: str) -> None:
    table = TABLES[name]
    config = table["config"]
    rope = read(config, max_position=config.get("max_position_embeddings", 4096))
    assert rope.cos_sin_scale == pytest.approx(table["attention_factor"], abs=1e-9)
    np.testing.assert_allclose(inverse_frequencies(rope), table["inv_freq"], rtol=1e-9)
    positions = table["positions"]
    half = rope.rotary_dim // 2
    cos = cos_sin_table(rope, max(positions) + 1)[positions][:, [0, half // 2, half - 1]]
    expected = torch.tensor(table["cos_first_mid_last"])
    assert cos.dtype == torch.float32
    for row, position in enumerate(positions):
        torch.testing.assert_close(cos[row], expected[row], atol=1e-6 if position <= 8191 else 1e-2, rtol=0)


def test_table_holds_cosines_then_sines() -> None:
    rope = read({"rope_scaling": {"type": "yarn", "factor": 4.0}}, head_dim=8)
    table = cos_sin_table(rope, 5000).double()  # more rows than are computed at once
    angle = 4999 * inverse_frequencies(rope)
    np.testing.assert_allclose(table[4999, :4], np.cos(angle) * rope.cos_sin_scale, atol=1e-6)
    np.testing.assert_allclose(table[4999, 4:], np.sin(angle) * rope.cos_sin_scale, atol=1e-6)
    assert tuple(table.shape) == (5000, 8)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"rope_parameters": {"rope_theta": 10000.0}}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        ),
        (
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        ),
        # both at once: the new spelling wins, as in Transformers
        ({"rope_theta": 1e6}, {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 1e6}}),
    ],
)
def test_old_and_new_spelling_are_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(old) == read(new)


YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (YARN, 0.1 * math.log(16) + 1),
        (YARN | {"attention_factor": 1.0}, 1.0),
        (YARN | {"attention_factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.3}, 0.5),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(16) + 1) / (0.1 * math.log(16) + 1)),
        (YARN | {"mscale": 2.0}, 0.1 * math.log(16) + 1),
        (YARN | {"factor": None}, 0.1 * math.log(4096 / 256) + 1),
        (YARN | {"factor": 1.0}, 1.0),
        ({"rope_type": "linear", "factor": 16.0, "attention_factor": 3.0}, 1.0),
    ],
)
def test_attention_factor(rope: dict[str, Any], expected: float) -> None:
    assert read({"rope_scaling": rope}).cos_sin_scale == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("key", ["beta_fast", "beta_slow", "truncate"])
def test_yarn_options_have_an_effect(key: str) -> None:
    values = {"beta_fast": 4.0, "beta_slow": 3.0, "truncate": False}
    plain, changed = (
        inverse_frequencies(read({"rope_scaling": YARN | extra})) for extra in ({}, {key: values[key]})
    )
    assert not np.allclose(plain, changed)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 4096),
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        (YARN, 4096),
        (YARN | {"original_max_position_embeddings": 4096}, 65536),
        ({"rope_type": "llama3", **LLAMA3}, 4096),
    ],
)
def test_longest_sequence(rope: dict[str, Any], expected: int) -> None:
    assert read({"rope_scaling": rope}).max_model_len == expected


def test_longrope_takes_the_long_factors_when_the_table_is_long() -> None:
    factors = {"short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = read(
        {"rope_scaling": {"type": "su", "original_max_position_embeddings": 256, **factors}}, head_dim=8
    )
    assert rope.cos_sin_scale == pytest.approx(math.sqrt(1 + math.log(16) / math.log(256)))
    short, long = cos_sin_table(rope, 256), cos_sin_table(rope, 257)
    assert short[1, 0].item() == pytest.approx(rope.cos_sin_scale * math.cos(1.0))
    assert long[1, 0].item() == pytest.approx(rope.cos_sin_scale * math.cos(0.5))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"rope_scaling": {"type": "yarm", "factor": 2.0}}, UnsupportedError, "did you mean 'yarn'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, UnsupportedError, "'mrope'.*default, linear"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            UnsupportedError,
            "differs by layer type",
        ),
        ({"rope_scaling": {"type": "linear"}}, CheckpointError, "'linear' needs a factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, CheckpointError, "factor must be positive"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, CheckpointError, "factor must be a number"),
        ({"rope_theta": True}, CheckpointError, "rope_theta must be a number, found True"),
        ({"rope_theta": float("nan")}, CheckpointError, "rope_theta must be a number"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta must be positive"),
        ({"rope_scaling": [1]}, CheckpointError, "rope_scaling must be a table"),
        ({"partial_rotary_factor": 0.01}, CheckpointError, "rotary size of 0"),
        ({"partial_rotary_factor": 1.5}, CheckpointError, "rotary size of 96"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            CheckpointError,
            "list of 32 numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            CheckpointError,
            "high_freq_factor",
        ),
    ],
)
def test_errors_name_the_file_and_the_key(
    config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^config.json: .*{message}"):
        read(config)


def test_unknown_parameters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    read({"rope_scaling": {"type": "linear", "factor": 2.0, "flavour": 1, "finetuned": True}})
    assert "without effect here: flavour" in caplog.text
    assert "finetuned" not in caplog.text


@given(
    rope_type=st.sampled_from([name for name in ROPE_TYPES if name != "longrope"]),
    factor=st.floats(1.0, 64.0),
    original=st.integers(64, 8192),
    theta=st.floats(100.0, 1e7),
    half=st.integers(2, 64),
)
def test_frequencies_lie_between_plain_and_scaled(
    rope_type: str, factor: float, original: int, theta: float, half: int
) -> None:
    scaling = {"rope_type": rope_type, "factor": factor, "original_max_position_embeddings": original}
    rope = read({"rope_theta": theta, "rope_scaling": scaling}, head_dim=2 * half, max_position=original)
    plain = theta ** -(np.arange(half) / half)
    frequencies = inverse_frequencies(rope)
    assert (frequencies <= plain * (1 + 1e-12)).all()
    assert (frequencies >= plain / factor * (1 - 1e-12)).all()
