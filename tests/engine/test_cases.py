"""Requests on a model whose next-token logits are a table (`data/markov-bytelevel`), so that every answer is known.

`data/cases.json` is a table of reports from the field: stop strings, eos lists, limits of length, bad values.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pelton import LLM, SamplingParams
from pelton.errors import InvalidValueError, PeltonError, PromptError, TokenizerError, UnknownOptionError

DATA = Path(__file__).parent.parent / "data"
MODEL = DATA / "markov-bytelevel"
CASES = json.loads((DATA / "cases.json").read_text())["cases"]


@pytest.fixture(scope="module")
def llm():
    return LLM(MODEL, kv_cache_memory="4MiB", max_num_seqs=8)


def ask(llm, case):
    params = SamplingParams(**case["params"])
    if "chat" in case:
        return llm.chat(case["chat"], params)[0]
    if "prompt_text" in case:
        return llm.generate(case["prompt_text"], params)[0]
    return llm.generate({"prompt_token_ids": case["prompt_token_ids"]}, params)[0]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(llm, case):
    expect = case["expect"]
    assert {"max_model_len": llm.config.max_model_len} == case.get("engine", {"max_model_len": 256})
    if "error_mentions" in expect:
        with pytest.raises(PeltonError) as caught:
            ask(llm, case)
        assert isinstance(caught.value, ValueError)
        for word in expect["error_mentions"]:
            assert word in str(caught.value)
        # and the next one is answered
        case, expect = CASES[0], CASES[0]["expect"]
    output = ask(llm, case)
    completion = output.outputs[0]
    assert output.finished
    assert completion.token_ids == expect["token_ids"]
    assert completion.finish_reason == expect.get("finish_reason", completion.finish_reason)
    assert completion.text == expect.get("text", completion.text)
    if "text_any_of" in expect:
        assert completion.text in expect["text_any_of"]
    if "prompt_token_ids" in expect:
        assert output.prompt_token_ids == expect["prompt_token_ids"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["name"].startswith("stop_")], ids=lambda case: case["name"]
)
def test_stream_of_case(llm, case):
    whole = ask(llm, case).outputs[0]
    params = SamplingParams(**case["params"])
    text, tokens = "", []
    for output in llm.generate_stream({"prompt_token_ids": case["prompt_token_ids"]}, params):
        (delta,) = output.outputs
        text += delta.text
        tokens += delta.token_ids
        assert whole.text.startswith(text)
    assert output.finished and delta.finish_reason == whole.finish_reason
    assert (text, tokens) == (whole.text, whole.token_ids)


GREEDY = SamplingParams(temperature=0, max_tokens=4)
GOOD = {"prompt_token_ids": [1, 9]}


def test_order_is_kept_and_params_are_each_ones_own(llm):
    starts = [9, 13, 48, 20, 30, 9, 48, 16, 13, 40, 41, 42]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 7) for i in range(len(starts))]
    together = llm.generate([[1, start] for start in starts], params)
    for start, p, output in zip(starts, params, together, strict=True):
        assert output.prompt_token_ids == [1, start]
        assert output.outputs[0].token_ids == llm.generate([1, start], p)[0].outputs[0].token_ids
    assert len({output.request_id for output in together}) == len(starts)


def test_forms_of_a_prompt(llm):
    import numpy as np
    import torch

    ids = llm.get_tokenizer().encode("ab")
    forms = [
        "ab",
        {"prompt": "ab"},
        {"prompt_token_ids": ids},
        ids,
        tuple(ids),
        np.array(ids),
        torch.tensor(ids),
    ]
    for form in forms:
        (one,) = llm.generate(form, GREEDY)
        assert one.prompt_token_ids == ids
    outputs = llm.generate(forms, GREEDY)
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(one.outputs[0].token_ids)}
    assert [output.prompt for output in outputs[:3]] == ["ab", "ab", None]
    assert llm.generate([], GREEDY) == []
    assert llm.generate([np.int64(1), np.int64(9)], GREEDY)[0].prompt_token_ids == [1, 9]


@pytest.mark.parametrize(
    ("prompts", "params", "mentions"),
    [
        ([GOOD, {"prompt_token_ids": []}, GOOD], GREEDY, "prompt 1 is empty"),
        ([GOOD, {}], GREEDY, "prompt 1 is empty"),
        ([GOOD, None], GREEDY, "prompt 1"),
        ([GOOD, {"promt": "a"}], GREEDY, "did you mean 'prompt'"),
        ([GOOD, {"prompt_token_ids": "ab"}], GREEDY, "prompt 1"),
        ([GOOD, {"prompt": 3}], GREEDY, "prompt 1"),
        (7, GREEDY, "prompts must be"),
        (None, GREEDY, "prompts must be"),
        ([1, "a"], GREEDY, "'a'"),
        ([1, 1.5], GREEDY, "1.5"),
        ([[1, 2], [[3]]], GREEDY, "prompt 1"),
        ([GOOD, GOOD], [GREEDY], "1 entries for 2 prompts"),
        (GOOD, [GREEDY, GREEDY], "2 entries for 1 prompts"),
        (GOOD, {"temperature": 0}, "must be SamplingParams"),
        (GOOD, [None], "must be SamplingParams"),
    ],
)
def test_a_call_with_a_mistake_is_refused_as_a_whole(llm, prompts, params, mentions):
    added = llm.engine._num_added
    with pytest.raises(PeltonError, match=mentions):
        llm.generate(prompts, params)
    with pytest.raises(PeltonError, match=mentions):
        llm.generate_stream(prompts, params)  # before the first next()
    assert llm.engine._num_added == added and not llm.engine.has_unfinished


@pytest.mark.parametrize("messages", ["hi", [], [[]], [["a"]], 3, [{"role": "user"}, "x"]])
def test_bad_messages(llm, messages):
    with pytest.raises(PeltonError):
        llm.chat(messages, GREEDY)


def test_chat_of_several_conversations(llm):
    one = [{"role": "user", "content": "ab"}]
    two = [{"role": "user", "content": "b"}]
    outputs = llm.chat([one, two], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [
        llm.chat(c, GREEDY)[0].outputs[0].token_ids for c in (one, two)
    ]
    assert outputs[0].prompt == "<s><|user|>ab<|assistant|>"
    assert llm.chat(one, GREEDY, add_generation_prompt=False)[0].prompt_token_ids == [1, 4, 9, 10]


def test_params_are_not_mixed_with_the_file(llm):
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.2, top_k=1, repetition_penalty=1.3
    )
    hot = SamplingParams(temperature=50.0, max_tokens=1)
    outputs = llm.generate([GOOD] * 30, hot)
    assert len({output.outputs[0].token_ids[0] for output in outputs}) > 5  # top_k 1 would give one
    # without params it is the file's
    default = llm.generate([GOOD] * 3)
    assert len({tuple(output.outputs[0].token_ids) for output in default}) == 1


def test_leaving_a_stream_frees_its_requests(llm):
    stream = llm.generate_stream(
        [GOOD, [1, 48]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    )
    for output in stream:
        assert not output.finished
        break
    assert llm.engine.has_unfinished
    stream.close()
    assert not llm.engine.has_unfinished
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks - 1


def test_calls_inside_of_a_stream(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = llm.generate([1, 48], params)[0].outputs[0].token_ids
    tokens = []
    for output in llm.generate_stream([1, 48], params):
        assert llm.generate(GOOD, params)[0].outputs[0].token_ids
        tokens += output.outputs[0].token_ids
    assert tokens == alone


def test_cumulative_stream(llm):
    params = SamplingParams(temperature=0, max_tokens=5)
    outputs = list(llm.generate_stream([1, 48], params, cumulative=True))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]
    assert outputs[-1].outputs == llm.generate([1, 48], params)[0].outputs


def test_threads_share_a_batch(llm):
    from concurrent.futures import ThreadPoolExecutor

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    starts = list(range(9, 33))
    expected = [llm.generate([1, start], params)[0].outputs[0].token_ids for start in starts]
    with ThreadPoolExecutor(6) as threads:
        outputs = threads.map(lambda start: llm.generate([1, start], params)[0].outputs[0].token_ids, starts)
        assert list(outputs) == expected
    assert not llm.engine.has_unfinished


def test_ctrl_c_leaves_a_usable_engine(llm, monkeypatch):
    steps = iter(range(100))
    execute = llm.engine.runner.execute

    def interrupted(*arguments):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return execute(*arguments)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([GOOD, [1, 48]], SamplingParams(max_tokens=50, ignore_eos=True))
    assert not llm.engine.has_unfinished
    assert llm.generate(GOOD, GREEDY)[0].outputs[0].token_ids == [56, 57, 58, 59]


def test_without_tokenizer(tmp_path):
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(MODEL / name)
    with pytest.raises(TokenizerError, match="tokenizer"):
        LLM(tmp_path, kv_cache_memory="1MiB")
    llm = LLM(tmp_path, kv_cache_memory="1MiB", skip_tokenizer_init=True)
    output = llm.generate({"prompt_token_ids": [1, 13]}, SamplingParams(temperature=0, logprobs=1))[0]
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([14, 15, 2], "")
    assert output.outputs[0].logprobs[0][14].decoded_token is None
    for call, mentions in (
        (lambda: llm.generate("a", GREEDY), "skip_tokenizer_init"),
        (lambda: llm.generate([1], SamplingParams(stop="a")), "stop strings"),
        (lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY), "skip_tokenizer_init"),
        (llm.get_tokenizer, "skip_tokenizer_init"),
    ):
        with pytest.raises(PeltonError, match=mentions):
            call()


@pytest.mark.parametrize(
    ("options", "error", "mentions"),
    [
        ({"max_num_sequences": 3}, UnknownOptionError, "max_num_seqs"),
        ({"temperature": 0}, UnknownOptionError, "SamplingParams"),
        ({"max_model_len": 257}, InvalidValueError, "256"),
        ({"kv_cache_memory": 1024}, PeltonError, "kv_cache_memory"),
        ({"block_size": 7}, InvalidValueError, "block_size"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 17}, InvalidValueError, "chunked"),
    ],
)
def test_bad_options(options, error, mentions):
    with pytest.raises(error, match=mentions):
        LLM(MODEL, **options)


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 17}, {"max_num_batched_tokens": 17, "block_size": 8}]
)
def test_a_long_prompt_in_small_steps(options):
    llm = LLM(MODEL, kv_cache_memory="1MiB", **options)
    prompt = [1] + [48] * 199
    assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == [49, 50, 48, 49]


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("length", [16, 32, 48, 64])
def test_a_prompt_wholly_in_the_cache(block_size, length):
    llm = LLM(MODEL, kv_cache_memory="1MiB", block_size=block_size)
    prompt = [9 + i % 40 for i in range(length)]
    for params in (GREEDY, SamplingParams(temperature=0, max_tokens=1)):
        outputs = [llm.generate(prompt, params)[0] for _ in range(3)]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert outputs[2].num_cached_tokens == (length - 1) // block_size * block_size


def test_prompt_too_long_names_the_limit(llm):
    with pytest.raises(PromptError, match="max_model_len=256"):
        llm.generate([48] * 300, GREEDY)
