"""The engine over a runner without a model: limits, caching, forks, aborts, failures."""

from __future__ import annotations

import math

import pytest
import torch

from engine_fakes import FakeRunner, FakeTokenizer, alone, check_idle, check_pool, make_engine, results, run
from pelton.detokenizer import IncrementalDetokenizer
from pelton.errors import CapacityError, InvalidValueError, ModelOutputError, PeltonError, PromptError
from pelton.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def successor_table(vocab_size: int = 32) -> torch.Tensor:
    """Token t is followed by t + 1."""
    return torch.eye(vocab_size).roll(1, 1) * 10


def answer(engine, prompt, params=GREEDY, **options):
    group = engine.add_request(prompt, params, **options)
    run(engine, [group])
    return group.output()


def text_engine(runner=None, **options):
    return make_engine(
        runner or FakeRunner(table=successor_table()),
        tokenizer=FakeTokenizer(),
        new_detokenizer=IncrementalDetokenizer,
        **options,
    )


@pytest.mark.parametrize(("length", "expected"), [(1, 15), (11, 5), (15, 1)])
def test_output_stops_at_the_model_length(length, expected):
    output = answer(make_engine(max_model_len=16), [1] * length, SamplingParams(max_tokens=None))
    assert len(output.outputs[0].token_ids) == expected
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "mentions"),
    [
        ([], "empty"),
        ([1] * 16, "max_model_len=16"),
        ([1] * 17, "17 tokens"),
        ([1, -1], "-1"),
        ([1, 32], "32 is not"),
        ([1, 2**40], str(2**40)),
        ([1, 2.0], "2.0"),
        ([1, True], "True"),
        ([1, "a"], "'a'"),
    ],
)
def test_bad_prompts_are_refused_by_name_and_the_engine_goes_on(prompt, mentions):
    engine = make_engine(max_model_len=16)
    with pytest.raises(PromptError, match=mentions):
        engine.add_request(prompt, GREEDY)
    assert results_of(answer(engine, [1, 2])) == alone([1, 2], GREEDY, max_model_len=16)
    check_idle(engine)


def results_of(output):
    return [(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"stop_token_ids": [32]}, "stop_token_ids: 32"),
        ({"logit_bias": {99: 1.0}}, "logit_bias: 99"),
        ({"logprobs": 33}, "logprobs=33"),
        ({"prompt_logprobs": 33}, "prompt_logprobs=33"),
        ({"stop": "x"}, "stop strings need a tokenizer"),
    ],
)
def test_params_that_do_not_fit_the_model_are_refused(options, mentions):
    engine = make_engine()
    with pytest.raises(InvalidValueError, match=mentions):
        engine.add_request([1], SamplingParams(**options))
    check_idle(engine)


def test_a_cache_too_small_for_one_sequence_is_refused_at_the_start():
    with pytest.raises(CapacityError, match=r"KV budget too small for one sequence.*at most 12"):
        make_engine(FakeRunner(4, 4), max_model_len=13)
    make_engine(FakeRunner(4, 4), max_model_len=12)
    with pytest.raises(CapacityError):
        make_engine(FakeRunner(1, 4), max_model_len=1)


def test_without_chunked_prefill_the_budget_must_hold_a_prompt():
    with pytest.raises(InvalidValueError, match="max_num_batched_tokens=16"):
        make_engine(enable_chunked_prefill=False, max_model_len=64)
    engine = make_engine(enable_chunked_prefill=False, max_model_len=16, max_num_batched_tokens=16)
    groups = [engine.add_request([i] * 10, GREEDY) for i in range(4)]
    for _ in range(3):
        engine.step()
        # a prompt is read whole or not at all
        assert all(r.num_computed_tokens in range(10, 17) for r in engine.scheduler.running)
    run(engine, groups)


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("max_tokens", [1, 9])
@pytest.mark.parametrize("length", [16, 17, 32, 48])
def test_a_prompt_wholly_in_the_cache_computes_its_last_token_again(block_size, length, max_tokens):
    engine = make_engine(FakeRunner(64, block_size), max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompt = [i % 7 for i in range(length)]
    outputs = [answer(engine, prompt, params) for _ in range(3)]
    assert outputs[0].num_cached_tokens == 0
    cached = (length - 1) // block_size * block_size
    assert [output.num_cached_tokens for output in outputs[1:]] == [cached, cached]
    assert results_of(outputs[0]) == results_of(outputs[1]) == results_of(outputs[2])
    check_idle(engine)


def test_generated_tokens_are_cached_for_the_next_turn():
    engine = make_engine()
    first = answer(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=10))
    turn = [1, 2, 3, *first.outputs[0].token_ids, 5]
    second = answer(engine, turn)
    assert second.num_cached_tokens == 12  # 12 of 13 computed tokens lie in full blocks
    assert results_of(second) == alone(turn, GREEDY)


def test_requests_of_one_step_share_a_prefix():
    runner = FakeRunner()
    engine = make_engine(runner, max_num_batched_tokens=64)
    groups = [engine.add_request([1, 2, 3, 4, 5, 6, 7, 8, i], GREEDY) for i in range(4)]
    engine.step()
    assert runner.num_computed == 9 + 3
    run(engine, groups)
    check_idle(engine)


def test_no_caching_shares_nothing():
    engine = make_engine(enable_prefix_caching=False)
    assert [answer(engine, [1] * 9).num_cached_tokens for _ in range(2)] == [0, 0]
    assert engine.scheduler.pool.num_cached == 0


def test_eviction_takes_the_oldest_and_the_tail_first():
    engine = make_engine(FakeRunner(1 + 8, 4), max_model_len=32)
    one = SamplingParams(temperature=0, max_tokens=1)
    answer(engine, list(range(16)), one)  # 4 full blocks
    answer(engine, [30, *range(15)], one)  # 4 more: every block holds something now
    answer(engine, [31, *range(7)], one)  # needs 2: the tail of the first
    assert answer(engine, list(range(16)), one).num_cached_tokens == 8
    check_idle(engine)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_a_prompt_share_its_blocks_and_differ(length, caching):
    runner = FakeRunner()
    engine = make_engine(runner, enable_prefix_caching=caching)
    params = SamplingParams(n=4, temperature=2.0, max_tokens=9, seed=3)
    prompt = list(range(length))
    group = engine.add_request(prompt, params)
    engine.step()
    assert runner.num_computed == length
    assert [r.num_output_tokens for r in group.requests] == [1] * 4
    full = length // 4
    assert len({tuple(r.block_ids[:full]) for r in group.requests}) == 1
    assert len({tuple(r.block_ids[full:]) for r in group.requests}) == (4 if length % 4 else 1)
    engine.step()
    assert runner.num_computed == length + 4
    check_pool(engine.scheduler)
    run(engine, [group])
    output = group.output()
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert results_of(output) == alone(prompt, params)
    check_idle(engine)


def test_completions_beyond_max_num_seqs_wait():
    engine = make_engine(max_num_seqs=2)
    params = SamplingParams(n=5, max_tokens=6)
    output = answer(engine, [1, 2, 3, 4, 5], params)
    assert results_of(output) == alone([1, 2, 3, 4, 5], params)
    check_idle(engine)


def test_a_first_completion_that_ends_at_once_leaves_the_others():
    # the first token of the prompt's completions is 3 or something else, by the draw
    params = SamplingParams(n=8, temperature=3.0, max_tokens=4, stop_token_ids=list(range(0, 32, 2)), seed=0)
    engine = make_engine()
    output = answer(engine, [1, 2, 3, 4, 5, 6], params)
    lengths = {len(c.token_ids) for c in output.outputs}
    assert 1 in lengths and len(lengths) > 1
    assert results_of(output) == alone([1, 2, 3, 4, 5, 6], params)
    check_idle(engine)


def test_a_request_does_not_depend_on_its_company():
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=12),
        SamplingParams(temperature=1.5, top_p=0.8, seed=5, max_tokens=12, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.4),
        SamplingParams(temperature=1, top_k=4, min_p=0.05, seed=9, max_tokens=12, logprobs=2),
    ]
    engine = make_engine(max_num_batched_tokens=5)
    groups = [engine.add_request([i, 1, 2, 3, 4, 5], p) for i, p in enumerate(params)]
    run(engine, groups)
    for i, (p, group) in enumerate(zip(params, groups, strict=True)):
        assert results(group) == alone([i, 1, 2, 3, 4, 5], p)


def test_a_seed_gives_the_same_and_no_seed_gives_others():
    params = SamplingParams(temperature=2.0, max_tokens=8)
    engine = make_engine()
    assert results_of(answer(engine, [1], params)) != results_of(answer(engine, [1], params))
    seeded = SamplingParams(temperature=2.0, max_tokens=8, seed=1)
    assert results_of(answer(engine, [1], seeded)) == results_of(answer(engine, [1], seeded))
    assert results_of(answer(make_engine(seed=1), [1], params)) != results_of(
        answer(make_engine(), [1], params)
    )
    assert results_of(answer(make_engine(seed=1), [1], params)) == results_of(
        answer(make_engine(seed=1), [1], params)
    )


def test_a_waiting_request_is_not_overtaken_for_ever():
    engine = make_engine(FakeRunner(1 + 6, 4), max_model_len=24, max_num_seqs=4)
    long = SamplingParams(temperature=0, max_tokens=12)
    engine.add_request([1] * 4, long)
    big = engine.add_request([2] * 20, SamplingParams(temperature=0, max_tokens=4))
    for i in range(60):
        if len(engine._groups) < 4:
            engine.add_request([3, i % 30], SamplingParams(temperature=0, max_tokens=2))
        engine.step()
        if big.finished:
            break
    assert big.finished


@pytest.mark.parametrize("budget", [1, 4, 16])
def test_prompt_logprobs_come_past_the_cache(budget):
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 9, 8, 7]
    engine = make_engine(max_num_batched_tokens=budget)
    answer(engine, prompt)
    output = answer(
        engine, prompt, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=0)
    )
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    runner = FakeRunner()
    for i, entry in enumerate(output.prompt_logprobs[1:], 1):
        row = runner._row(prompt[:i]).log_softmax(-1)
        assert entry[prompt[i]].logprob == pytest.approx(row[prompt[i]].item(), abs=1e-5)
        assert entry[prompt[i]].rank == int((row > row[prompt[i]]).sum()) + 1
        assert next(iter(entry)) == prompt[i]
        best = row.topk(2).indices.tolist()
        assert set(entry) == {prompt[i], *best}
        assert [entry[t].rank for t in best] == [1, 2]
    tokens = output.outputs[0].token_ids
    for i, entry in enumerate(output.outputs[0].logprobs):
        row = runner._row(prompt + tokens[:i]).log_softmax(-1)
        assert list(entry) == [tokens[i]]
        assert entry[tokens[i]].logprob == pytest.approx(row[tokens[i]].item(), abs=1e-5)
    total = sum(entry[t].logprob for t, entry in zip(tokens, output.outputs[0].logprobs, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_limit_the_rows_of_a_step():
    engine = make_engine(max_num_batched_tokens=64)
    engine.scheduler.max_logits_rows = 5
    output = answer(engine, [1] * 23, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == 23
    assert engine.runner.num_steps == 5 + 1


def test_logprobs_of_the_whole_vocabulary():
    output = answer(make_engine(), [1], SamplingParams(max_tokens=1, logprobs=-1))
    (entry,) = output.outputs[0].logprobs
    assert len(entry) == 32
    assert sum(math.exp(value.logprob) for value in entry.values()) == pytest.approx(1)


def test_logprobs_are_of_the_raw_logits():
    table = torch.zeros(32, 32)
    table[1, 5] = 4.0
    engine = make_engine(FakeRunner(table=table))
    raw = table[1].log_softmax(-1)
    for options in (
        {"temperature": 0.3},
        {"temperature": 0, "logit_bias": {7: 9.0}},
        {"temperature": 0, "repetition_penalty": 2.0},
        {"temperature": 0, "stop_token_ids": [5], "min_tokens": 1},
    ):
        (entry,) = (
            answer(engine, [1], SamplingParams(max_tokens=1, logprobs=1, **options)).outputs[0].logprobs
        )
        for token_id, value in entry.items():
            assert value.logprob == pytest.approx(raw[token_id].item(), abs=1e-6)
        assert entry[5].rank == 1


@pytest.mark.parametrize(
    ("options", "tokens", "reason", "stop_reason"),
    [
        ({}, [2, 3, 4, 5], "stop", None),  # 5 is eos
        ({"ignore_eos": True, "max_tokens": 6}, [2, 3, 4, 5, 6, 7], "length", None),
        ({"stop_token_ids": [4]}, [2, 3, 4], "stop", 4),
        ({"stop_token_ids": [5]}, [2, 3, 4, 5], "stop", 5),
        ({"stop_token_ids": [7], "ignore_eos": True}, [2, 3, 4, 5, 6, 7], "stop", 7),
        ({"max_tokens": 3}, [2, 3, 4], "length", None),
        ({"max_tokens": 4}, [2, 3, 4, 5], "stop", None),
    ],
)
def test_ends(options, tokens, reason, stop_reason):
    engine = make_engine(FakeRunner(table=successor_table()), eos_token_ids=(5,))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 9, **options})
    assert results_of(answer(engine, [1], params)) == [(tokens, reason, stop_reason)]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "text", "reason", "stop_reason"),
    [
        ({}, "cde", "stop", None),  # eos, token 5, has no text
        ({"include_stop_str_in_output": True}, "cdef", "stop", None),
        ({"stop_token_ids": [3]}, "c", "stop", 3),
        ({"stop_token_ids": [3], "include_stop_str_in_output": True}, "cd", "stop", 3),
        ({"stop": "de"}, "c", "stop", "de"),
        ({"stop": "de", "include_stop_str_in_output": True}, "cde", "stop", "de"),
        ({"stop": "dx", "max_tokens": 2}, "cd", "length", None),  # held back, and given out in the end
        ({"stop": "de", "max_tokens": 3}, "c", "stop", "de"),
        ({"stop": "exx"}, "cde", "stop", None),
        ({"stop": "f", "include_stop_str_in_output": True}, "cdef", "stop", None),
    ],
)
def test_text(options, text, reason, stop_reason, streaming):
    engine = text_engine(eos_token_ids=(5,))
    params = SamplingParams(**{"temperature": 0, "max_tokens": 9, **options})
    (completion,) = answer(engine, [1], params, streaming=streaming).outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stop_reason)


def test_deltas_joined_are_the_output():
    engine = text_engine()
    params = SamplingParams(n=2, temperature=1, max_tokens=9, stop=["kl"], logprobs=0, seed=0)
    group = engine.add_request([1, 2, 3], params, streaming=True)
    deltas = []
    while not group.finished:
        engine.step()
        delta = group.delta()
        deltas += delta.outputs if delta else []
        assert group.delta() is None
    for completion in group.output().outputs:
        mine = [d for d in deltas if d.index == completion.index]
        assert "".join(d.text for d in mine) == completion.text
        assert [t for d in mine for t in d.token_ids] == completion.token_ids
        assert [p for d in mine for p in d.logprobs] == completion.logprobs
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]


def test_decoded_tokens_of_logprobs():
    (completion,) = answer(
        text_engine(), [1], SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    ).outputs
    assert completion.logprobs[0][2].decoded_token == "c"


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "forked", "finished"])
def test_abort(when):
    engine = make_engine(max_num_batched_tokens=4)
    params = SamplingParams(n=3 if when == "forked" else 1, max_tokens=5, temperature=1)
    other = engine.add_request([5, 6, 7], GREEDY)
    group = engine.add_request([1, 2, 3, 4, 5, 6, 7, 8, 9], params)
    steps = {"waiting": 0, "prefill": 2, "decode": 6, "forked": 6, "finished": 40}[when]
    for _ in range(steps):
        engine.step()
    engine.abort([group, group])
    assert group.finished
    assert results(group)[0][1] == ("length" if when == "finished" else "abort")
    check_pool(engine.scheduler)
    run(engine, [other])
    assert results(other) == alone([5, 6, 7], GREEDY)
    check_idle(engine)


def test_abort_from_inside_of_a_step_waits_for_its_end():
    # what the garbage collector does when it closes a stream
    engine = make_engine()
    group = engine.add_request([1, 2, 3], SamplingParams(max_tokens=20))
    other = engine.add_request([4, 5], GREEDY)
    execute = engine.runner.execute

    def interrupting(plan):
        engine.abort([group])
        return execute(plan)

    engine.runner.execute = interrupting
    engine.step()
    engine.runner.execute = execute
    assert group.finished and not other.finished
    run(engine, [other])
    assert results(other) == alone([4, 5], GREEDY)
    check_idle(engine)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_fails_leaves_a_usable_engine(error, at):
    engine = make_engine()
    groups = [engine.add_request([i, 2, 3, 4, 5], SamplingParams(n=2, max_tokens=20)) for i in range(3)]
    engine.runner.fail_at[at] = error
    with pytest.raises(type(error)):
        run(engine, groups)
    assert all(group.finished and isinstance(group.error, PeltonError) for group in groups)
    check_idle(engine)
    assert results_of(answer(engine, [0, 2, 3, 4, 5])) == alone([0, 2, 3, 4, 5], GREEDY)


@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_ends_its_own_request_only(temperature):
    engine = make_engine()
    engine.runner.nan_after = (7, 7)
    params = SamplingParams(temperature=temperature, max_tokens=6, seed=1)
    bad = engine.add_request([7, 7], params)
    good = engine.add_request([7, 8], params)
    run(engine, [bad, good])
    assert isinstance(bad.error, ModelOutputError) and "NaN" in str(bad.error)
    assert results(bad) == [([], "abort", None)]
    assert good.error is None and results(good) == alone([7, 8], params)
    check_idle(engine)


def test_an_id_in_use_is_refused():
    engine = make_engine()
    engine.add_request([1], GREEDY, request_id="x")
    with pytest.raises(InvalidValueError, match="'x' is in use"):
        engine.add_request([1], GREEDY, request_id="x")


def test_an_idle_engine_steps():
    assert make_engine().step() == []


@pytest.mark.parametrize("eos", [-1, 32, 40, 2**31])
def test_end_ids_outside_of_the_vocabulary_touch_no_other_request(eos):
    """As indexes into the logits they are tokens of the neighbours; min_tokens masks them."""
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=4)
    engine = make_engine(FakeRunner(table=successor_table()), eos_token_ids=(eos,))
    # successors: each of these reaches 31 or 8, which the ids -1 and 40 would mask in another row
    groups = [engine.add_request([start], params) for start in (28, 5, 28, 5)]
    run(engine, groups)
    assert [g.output().outputs[0].token_ids for g in groups] == [[29, 30, 31, 0], [6, 7, 8, 9]] * 2


# A step ahead of the tokens.


@pytest.mark.parametrize("prompts", [[[1, 2]], [[1, 2], [3], [4, 5, 6]]], ids=["one", "three"])
def test_steps_are_started_before_the_tokens_of_the_last_one_are_known(prompts):
    """All but the first step, as long as nobody can be admitted; and never one for a token that is too many."""
    runner = FakeRunner(runs_ahead=True)
    engine = make_engine(runner)
    params = [SamplingParams(temperature=0.5, max_tokens=9 + 3 * i) for i in range(len(prompts))]
    groups = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
    run(engine, groups)
    assert [results(group) for group in groups] == [
        alone(p, s, number) for number, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    longest = max(p.max_tokens for p in params)
    assert (runner.num_steps, runner.num_ahead) == (longest, longest - 1)
    assert runner.num_computed == sum(len(p) + s.max_tokens - 1 for p, s in zip(prompts, params, strict=True))
    check_idle(engine)


def test_an_end_that_was_not_foreseen_costs_one_row():
    prompt, params = [1, 2], SamplingParams(temperature=0, max_tokens=20)
    tokens = alone(prompt, params)[0][0]
    stop = next(i for i in range(3, 20) if tokens[i] not in tokens[:i])
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[tokens[stop]])
    runner = FakeRunner(runs_ahead=True)
    engine = make_engine(runner)
    group = engine.add_request(prompt, params)
    run(engine, [group])
    assert results(group) == [(tokens[: stop + 1], "stop", tokens[stop])]
    assert runner.num_computed == len(prompt) + stop + 1
    check_idle(engine)
    other = engine.add_request([5, 6, 7], params)  # the step that nobody wants is not taken for this one's
    run(engine, [other])
    assert results(other) == alone([5, 6, 7], params)


@pytest.mark.parametrize(
    ("options", "ahead"),
    [({"repetition_penalty": 1.2}, False), ({"min_tokens": 5}, True), ({"logprobs": 2}, True)],
    ids=["penalty", "min_tokens", "logprobs"],
)
def test_what_may_run_ahead(options, ahead):
    """Penalties need the tokens; what counts them alone does not."""
    params = SamplingParams(temperature=0.7, max_tokens=8, seed=1, **options)
    outputs = []
    for runs_ahead in (False, True):
        runner = FakeRunner(runs_ahead=runs_ahead)
        engine = make_engine(runner, eos_token_ids=(3, 4, 5, 6))
        group = engine.add_request([1, 2, 3], params)
        run(engine, [group])
        outputs.append(group.output().outputs[0])
        assert (runner.num_ahead > 0) == (runs_ahead and ahead)
    assert outputs[0] == outputs[1]


def test_an_abort_leaves_the_others_of_the_step_that_was_started():
    runner = FakeRunner(runs_ahead=True)
    engine = make_engine(runner)
    groups = [engine.add_request([i, 2], SamplingParams(temperature=0, max_tokens=12)) for i in range(3)]
    for _ in range(4):
        engine.step()
    engine.abort([groups[1]])
    late = engine.add_request([9], SamplingParams(temperature=0, max_tokens=3))
    run(engine, [groups[0], groups[2], late])
    for group, prompt, count in ((groups[0], [0, 2], 12), (groups[2], [2, 2], 12), (late, [9], 3)):
        assert results(group) == alone(prompt, SamplingParams(temperature=0, max_tokens=count))
    check_idle(engine)


def test_blocks_that_were_filled_ahead_are_found_again():
    runner = FakeRunner(runs_ahead=True)
    engine = make_engine(runner)
    params = SamplingParams(temperature=0, max_tokens=14)
    first = engine.add_request([1, 2, 3], params)
    run(engine, [first])
    tokens = [1, 2, 3, *results(first)[0][0]]
    again = engine.add_request([*tokens, 5], params)
    run(engine, [again])
    assert again.first.num_cached_tokens == 16  # the last token of the first request was never computed
    assert results(again) == alone([*tokens, 5], params)


def test_the_engine_recovers_from_an_error_in_a_step_that_was_started_early():
    runner = FakeRunner(runs_ahead=True)
    engine = make_engine(runner)
    params = SamplingParams(temperature=0, max_tokens=9)
    group = engine.add_request([1, 2], params)
    runner.fail_at = {4: RuntimeError("broken")}
    with pytest.raises(RuntimeError, match="broken"):
        run(engine, [group])
    assert group.finished and group.error is not None
    again = engine.add_request([1, 2], params)
    run(engine, [again])
    assert results(again) == alone([1, 2], params)
    check_idle(engine)


def test_running_out_of_gpu_memory_in_a_step_is_a_clear_error():
    runner = FakeRunner()
    engine = make_engine(runner)
    runner.fail_at = {2: torch.OutOfMemoryError("CUDA out of memory")}
    group = engine.add_request([1, 2], SamplingParams(max_tokens=9))
    with pytest.raises(CapacityError, match=r"out of GPU memory in a step .*lower gpu_memory_utilization"):
        run(engine, [group])
    again = engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=9))
    run(engine, [again])
    assert results(again) == alone([1, 2], SamplingParams(temperature=0, max_tokens=9))
