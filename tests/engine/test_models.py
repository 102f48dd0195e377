"""Models against the float64 figures of recorded cases and against Transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model_driver import DATA, DEVICE, Driver, copy_model
from pelton import LLM, SamplingParams

RECORDED = [
    (model, variant)
    for model in ("llama-rope", "llama-h80-7to1", "qwen3-h192-tied")
    for variant in json.loads((DATA / model / "expected.json").read_text())["variants"]
]


@pytest.mark.parametrize(("model", "variant"), RECORDED)
def test_recorded_logprobs_and_greedy_tokens(model: str, variant: str, tmp_path: Path) -> None:
    expected = json.loads((DATA / model / "expected.json").read_text())
    case = expected["variants"][variant]
    driver = Driver(copy_model(DATA / model, tmp_path, case["config_overrides"]), dtype="float32")
    for answer in case["cases"]:
        prompt = expected["prompts"][str(answer["prompt_len"])]
        logprobs = driver.all_logits(prompt).double().log_softmax(-1)
        seen = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
        torch.testing.assert_close(
            seen, torch.tensor(answer["prompt_logprobs"][1:], dtype=torch.float64), atol=2e-4, rtol=0
        )
        top = logprobs[-1].topk(5)
        assert top.indices.tolist() == [token for token, _ in answer["next_top5"]]
        assert top.values.tolist() == pytest.approx([value for _, value in answer["next_top5"]], abs=2e-4)
        if "greedy16" in answer:
            assert driver.greedy([prompt], 16)[0] == [answer["greedy16"]]


BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 12}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases-other-head-dim": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama3-rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-attention-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a random model of an architecture: (folder, Transformers' model in float64)."""
    transformers = pytest.importorskip("transformers")
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            kind, options = ARCHITECTURES[name]
            torch.manual_seed(7)
            config = transformers.AutoConfig.for_model(kind, **(BASE | options))
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("bias") or "norm" in parameter_name:  # neither zeros nor ones
                    torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.3)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, max_shard_size="40KB")
            assert (folder / "model.safetensors.index.json").is_file()
            made[name] = (folder, model.double().eval())
        return made[name]

    return make


def _reference(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_logits_as_transformers(name: str, tiny_models: Any) -> None:
    folder, reference = tiny_models(name)
    driver = Driver(folder, dtype="float32")
    for length in (1, 5, 40):
        token_ids = [(7 * i + 3) % 97 for i in range(length)]
        if name == "llama-longrope" and length <= 16:
            continue  # Pelton takes the long factors for every sequence of a runner that allows long ones
        torch.testing.assert_close(
            driver.all_logits(token_ids).double(), _reference(reference, token_ids), atol=2e-4, rtol=2e-4
        )


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama-longrope"])
def test_same_greedy_tokens_as_transformers(name: str, tiny_models: Any) -> None:
    """In float32 on one device, for a batch of prompts of different lengths that start together."""
    folder, reference = tiny_models(name)
    model = copy.deepcopy(reference).float().to(DEVICE)
    prompts = [[(7 * i * i + 3 * i + 11 * seed) % 97 for i in range(3 + 9 * seed)] for seed in range(5)]
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            ids = torch.tensor([prompt], device=DEVICE)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=24,
                min_new_tokens=24,
                pad_token_id=0,
                eos_token_id=None,
            )
        expected.append(out[0, len(prompt) :].tolist())
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for options in ({}, {"enforce_eager": True, "max_num_batched_tokens": 16, "block_size": 8}):
        llm = LLM(folder, dtype="float32", skip_tokenizer_init=True, kv_cache_memory="8MiB", **options)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.12), ("float16", 0.02)])
def test_half_precision_is_close(name: str, dtype: str, tolerance: float, tiny_models: Any) -> None:
    folder, reference = tiny_models(name)
    token_ids = [(5 * i + 2) % 97 for i in range(30)]
    expected = _reference(reference, token_ids)
    error = (Driver(folder, dtype=dtype).all_logits(token_ids).double() - expected).norm() / expected.norm()
    assert 0 < error < tolerance


def test_dtype_auto_is_the_checkpoints() -> None:
    driver = Driver(DATA / "llama-rope")
    assert driver.runner.dtype == torch.bfloat16
    assert driver.all_logits([1, 2, 3]).dtype == torch.float32


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """Within the trained length as without scaling; beyond it, the same whether in one step or in many."""
    overrides = {"max_position_embeddings": 16, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    dynamic = Driver(copy_model(DATA / "llama-rope", tmp_path, overrides), dtype="float32")
    plain = Driver(DATA / "llama-rope", dtype="float32")
    assert dynamic.runner.max_model_len == 64
    token_ids = [(11 * i + 5) % 96 for i in range(60)]
    one_shot = dynamic.all_logits(token_ids)
    torch.testing.assert_close(one_shot[:16], plain.all_logits(token_ids)[:16])
    torch.testing.assert_close(one_shot, dynamic.all_logits(token_ids, chunk=7), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(one_shot[20:], plain.all_logits(token_ids)[20:], atol=0.1)
