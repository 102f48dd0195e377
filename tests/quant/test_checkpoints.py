"""Checkpoints as gptqmodel and llm-compressor wrote them, with logits that were computed in float64 (see the README
beside them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model_driver import DATA, ON_GPU, Driver, cpu_only
from pelton.errors import InvalidValueError, UnsupportedError
from quant_engine import needs_kernels, reference_products

FOLDERS = sorted((DATA / "quantized").glob("*/"))
#: largest error, as a share of the largest logit: a few roundings of that dtype in a row
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def error_of(folder: Path, dtype: str, **options: Any) -> float:
    expected = load_file(folder / "expected.safetensors")
    driver = Driver(folder, dtype=dtype, max_model_len=64, **options)
    for ids, logits in zip(expected["input_ids"].tolist(), expected["logits"].double(), strict=True):
        sequence = driver.sequence(ids)
        # prefill, then token by token
        found = [driver.step((sequence, len(ids) - 4, len(ids) - 4))]
        found += [driver.step((sequence, 1, 1)) for _ in range(4)]
        worst = float((torch.cat(found).double() - logits).abs().max() / logits.abs().max())
    return worst


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_with_dequantized_weights(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    assert error_of(folder, dtype) < BOUNDS[dtype]


@needs_kernels
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits(folder: Path, dtype: str) -> None:
    if ON_GPU and dtype == "float32":
        with pytest.raises(UnsupportedError, match="float16 or bfloat16, not in float32"):
            error_of(folder, dtype)
        return
    # the weights' own arithmetic is exact in float32 and as in the other tests; int8 has a test of its own
    assert error_of(folder, dtype, int8_activations=None if ON_GPU else False) < BOUNDS[dtype]


@needs_kernels
@cpu_only
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_with_activations_in_int8(folder: Path, dtype: str) -> None:
    assert 1e-4 < error_of(folder, dtype, int8_activations=True) < 4e-2


@cpu_only
def test_int8_where_it_cannot_be() -> None:
    with pytest.raises(
        InvalidValueError, match=r"int8_activations=True is for quantized weights on the CPU, and .* is not"
    ):
        Driver(DATA / "llama-rope", int8_activations=True)


def test_there_are_checkpoints_of_each_format() -> None:
    assert [folder.name for folder in FOLDERS] == [
        "awq-g32-asym",
        "ct-g32-asym-int8",
        "ct-g64-sym",
        "ct-int8-lm-head",
        "gptq-g64-sym",
    ]
