"""Checkpoints as gptqmodel and llm-compressor wrote them, with logits that were computed in float64 (see the README
beside them)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_driver import DATA, ON_GPU, Driver
from pelton.errors import UnsupportedError
from quant_engine import needs_kernels, reference_products

FOLDERS = sorted((DATA / "quantized").glob("*/"))
#: largest error, as a share of the largest logit: a few roundings of that dtype in a row
BOUNDS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def error_of(folder: Path, dtype: str) -> float:
    expected = load_file(folder / "expected.safetensors")
    driver = Driver(folder, dtype=dtype, max_model_len=64)
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
    assert error_of(folder, dtype) < BOUNDS[dtype]


def test_there_are_checkpoints_of_each_format() -> None:
    assert [folder.name for folder in FOLDERS] == [
        "awq-g32-asym",
        "ct-g32-asym-int8",
        "ct-g64-sym",
        "ct-int8-lm-head",
        "gptq-g64-sym",
    ]
