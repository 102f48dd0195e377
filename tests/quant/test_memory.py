"""What loading a quantized model takes, beside the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import quant_writers as writers
from model_driver import cpu_only
from quant_engine import needs_kernels
from quant_writers import AWQ, CT, GPTQ, Shape, write_model

_MEASURE = """
import sys
from pelton.config import EngineConfig, load_model_config
from pelton.runner import Runner
def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024
def load(model):
    config = EngineConfig(model=model, kv_cache_memory="64MiB", dtype="bfloat16")
    return Runner(config, load_model_config(model))
small = load(sys.argv[1])  # what runs for the first time takes memory for its code
before = status("VmRSS")
large = load(sys.argv[2])
print(status("VmHWM") - before)
"""
SHAPE = Shape(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=2048,
)


@cpu_only
@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured with Linux's /proc")
@pytest.mark.parametrize("config", [GPTQ, AWQ, CT], ids=lambda config: str(config["quant_method"]))
def test_loading_takes_little_more_memory_than_the_checkpoint(
    config: dict[str, object], tmp_path: Path
) -> None:
    writer = {"gptq": writers.gptq, "awq": writers.awq}.get(str(config["quant_method"]), writers.compressed)
    small = write_model(
        tmp_path,
        Shape(num_hidden_layers=1),
        config,
        lambda name: None if name == "lm_head" else {},
        lambda _, weight: writer(weight),
    )
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(SHAPE.config() | {"quantization_config": config}))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(SHAPE.vocab_size, SHAPE.hidden_size, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(SHAPE.vocab_size, SHAPE.hidden_size, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(SHAPE.hidden_size),
    }
    for layer in range(SHAPE.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.zeros(SHAPE.hidden_size)
    written: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, (n, k) in list(SHAPE.linears().items())[:-1]:
        if (n, k) not in written:
            written[n, k] = writer(writers.quantized(n, k))
        tensors |= {f"{name}.{suffix}": tensor.clone() for suffix, tensor in written[n, k].items()}
    save_file(tensors, large / "model.safetensors")
    size = (large / "model.safetensors").stat().st_size
    environ = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _MEASURE, str(small), str(large)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout)
    assert 0.8 * size < peak < 1.2 * size
