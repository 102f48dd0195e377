"""A model gives the same tokens however its requests are scheduled: alone, batched, cached, chunked, preempted."""

from __future__ import annotations

from pathlib import Path

import pytest

from pelton import LLM, SamplingParams

MODEL = Path(__file__).parent.parent / "data" / "llama-rope"
COUNT, NEW = 20, 40


@pytest.fixture(scope="module")
def prompts(vocab_size=64):
    shared = [(5 * i + 3) % vocab_size for i in range(24)]
    return [shared[: 3 + i] + [(7 * i + j) % vocab_size for j in range(i % 5)] for i in range(COUNT)]


@pytest.fixture(scope="module")
def params():
    greedy = [SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)] * (COUNT // 2)
    drawn = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=NEW, ignore_eos=True)
        for i in range(COUNT - len(greedy))
    ]
    return greedy + drawn


def make(**options):
    return LLM(MODEL, skip_tokenizer_init=True, max_model_len=96, dtype="float32", **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(prompts, params):
    llm = make(enable_prefix_caching=False, enforce_eager=True)
    return [tokens(llm.generate(prompt, p))[0] for prompt, p in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"enforce_eager": True},
        {"block_size": 8, "max_num_batched_tokens": 7},
        {"block_size": 8, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_same_tokens(options, prompts, params, alone):
    llm = make(**options)
    for _ in range(2):  # the second time from the cache
        assert tokens(llm.generate(prompts, params)) == alone


@pytest.mark.parametrize("caching", [True, False])
def test_same_tokens_with_preemption(caching, prompts, params, alone):
    probe = make(block_size=8)
    block_bytes = probe.engine.runner.kv_plan.num_bytes // probe.engine.runner.num_blocks
    llm = make(block_size=8, kv_cache_memory=block_bytes * 16, enable_prefix_caching=caching)
    assert tokens(llm.generate(prompts, params)) == alone
    assert llm.engine.scheduler.num_preemptions > 0
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks - 1


def test_completions_of_one_prompt(prompts):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=NEW, ignore_eos=True)
    outputs = [
        make(**options).generate(prompts[5], params)[0]
        for options in ({}, {"max_num_seqs": 2, "block_size": 8})
    ]
    assert [c.token_ids for c in outputs[0].outputs] == [c.token_ids for c in outputs[1].outputs]
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) == 4
