"""SamplingParams, and the sampler against the definition of each option written out in float64."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import InvalidValueError, PeltonError, UnknownOptionError
from pelton.request import Request
from pelton.sampling import (
    Sampler,
    SamplingParams,
    _argmax,
    _sorted_head,
    request_seed,
    token_logprobs,
    uniform,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 1.0, True, None, "1"]),
        ("temperature", [-0.1, NAN, INF, -INF, True, None, "1"]),
        ("top_k", [-2, 1.5, True, None]),
        ("top_p", [0, 0.0, -0.1, 1.0001, NAN, True, None]),
        ("min_p", [-0.1, 1.1, NAN, False]),
        ("repetition_penalty", [0, -1, NAN, INF, 1e-300, 1e39]),
        ("presence_penalty", [2.1, -2.1, NAN, INF]),
        ("frequency_penalty", [2.1, -2.1, NAN, -INF]),
        ("seed", [1.0, True, 2**64, -(2**63) - 1, "0"]),
        ("stop", ["", [""], ["a", ""], 3, [3], [None], b"a"]),
        ("stop_token_ids", [[-1], [1.0], [True], 3, "12", ["1"]]),
        ("include_stop_str_in_output", [1, None, "yes"]),
        ("ignore_eos", [1, None]),
        ("skip_special_tokens", [0]),
        ("max_tokens", [0, -1, 1.0, True]),
        ("min_tokens", [-1, 1.0, None]),
        ("logprobs", [-2, -5, 1.0, True]),
        ("prompt_logprobs", [-2, 1.0]),
        ("logit_bias", [[1], {-1: 1.0}, {1: NAN}, {1: INF}, {"1": 1.0}, {True: 1.0}]),
    ],
)
def test_bad_values_are_errors_that_name_the_parameter(name, values):
    for value in values:
        with pytest.raises(InvalidValueError, match=rf"\b{name}\b"):
            SamplingParams(**{name: value})


def test_good_values_at_their_limits():
    params = SamplingParams(
        n=1, temperature=0, top_k=-1, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2,
        seed=2**64 - 1, stop="x", stop_token_ids=[3, 3, np.int64(4)], max_tokens=None, min_tokens=10**6,
        logprobs=0, prompt_logprobs=-1, logit_bias={np.int32(3): 1},
    )  # fmt: skip
    assert params.stop == ("x",) and params.stop_token_ids == (3, 4) and params.logit_bias == {3: 1.0}
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5
    assert type(SamplingParams(max_tokens=np.int64(5)).max_tokens) is int
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


@pytest.mark.parametrize("name", ["temperature", "top_p", "repetition_penalty", "presence_penalty"])
def test_integers_beyond_all_floats(name):
    with pytest.raises(InvalidValueError, match=name):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize("bias", [1e39, -1e39, 10**400])
def test_a_bias_that_float32_cannot_hold(bias):
    with pytest.raises(InvalidValueError, match=r"logit_bias\[3\] must be a finite number from -1e\+30"):
        SamplingParams(logit_bias={3: bias})


def test_stop_ids_that_leave_no_token_for_min_tokens():
    params = SamplingParams(stop_token_ids=range(8), min_tokens=1)
    params.check_vocabulary(9)
    with pytest.raises(InvalidValueError, match=r"stop_token_ids are all 8 tokens.*min_tokens=1"):
        params.check_vocabulary(8)


def test_min_over_max():
    with pytest.raises(InvalidValueError, match=r"min_tokens=9 is more than max_tokens=4"):
        SamplingParams(min_tokens=9, max_tokens=4)


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("batch_size", r"LLM\(max_num_seqs"),
        ("max_new_tokens", "max_tokens"),
        ("do_sample", "temperature=0"),
        ("max_model_len", r"LLM\(max_model_len"),
        ("temprature", "did you mean 'temperature'"),
        ("zzz", "no option 'zzz'"),
    ],
)
def test_unknown_names_say_where_the_option_lives(name, mentions):
    with pytest.raises(UnknownOptionError, match=mentions) as caught:
        SamplingParams(**{name: 1})
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TypeError)
    assert name in str(caught.value)


def test_params_are_values():
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 2})
    assert copy.copy(params) == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=2).n == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    with pytest.raises(UnknownOptionError, match="keywords only"):
        SamplingParams(0.5)
    assert "temperature" in inspect.signature(SamplingParams).parameters


def requests_for(params, count=None, **options):
    params = params if isinstance(params, list) else [params] * count
    return [
        Request(str(i), [1, 2], p, max_model_len=100, seed=request_seed(0, i), **options)
        for i, p in enumerate(params)
    ]


def sample(logits, requests):
    ids, _, valid = Sampler().sample(logits.clone(), requests)
    assert all(valid)
    return ids


def distribution(row: list[float], params: SamplingParams) -> np.ndarray:
    """What the documentation says, step by step, over one row."""
    x = np.array(row, dtype=np.float64) / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max() * (1 - 1e-9)] = 0
    order = sorted(range(len(p)), key=lambda i: (-x[i], i))
    if 0 < params.top_k < len(p):
        p[order[params.top_k :]] = 0
    # min_p alone does not renormalize for top_p
    total = p.sum() if 0 < params.top_k < len(p) or params.min_p else 1.0
    if params.top_p < 1:
        before = 0.0
        for place, i in enumerate(order):
            if place and before >= (params.top_p - 1e-6) * total:
                p[i] = 0
            before += p[i]
    return p / p.sum()


@pytest.mark.parametrize("temperature", [1e30, 1e50, 1e300])
def test_masked_tokens_stay_masked_at_any_temperature(temperature):
    """1 / temperature is 0 in float32, and 0 times the mask's infinity is NaN."""
    params = SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=[0, 2])
    drawn = sample(torch.zeros(400, 5), requests_for(params, 400))
    assert set(drawn) == {1, 3, 4}
    assert all(100 < drawn.count(i) < 170 for i in (1, 3, 4))


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 5, "min_p": 0.05, "top_p": 0.95, "temperature": 1.7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [11, 128, 700])
def test_draws_follow_the_distribution(options, width):
    params = SamplingParams(**options)
    generator = torch.Generator().manual_seed(width)
    row = torch.randn(width, generator=generator) * 2
    row[width // 2 :] -= 4
    count = 3000
    ids = sample(row.repeat(count, 1), requests_for(params, count))
    expected = distribution(row.tolist(), params) * count
    seen = np.bincount(ids, minlength=width)
    assert seen[expected == 0].sum() == 0
    # chi square, cells of little expectation joined
    small = expected < 5
    cells = [(seen[i], expected[i]) for i in np.flatnonzero(~small)]
    if expected[small].sum() > 1:
        cells.append((seen[small].sum(), expected[small].sum()))
    chi2 = sum((s - e) ** 2 / e for s, e in cells)
    df = max(len(cells) - 1, 1)
    assert chi2 < df + 5 * math.sqrt(2 * df) + 1e-9


def test_a_mixed_batch_is_what_each_row_gives_alone():
    torch.manual_seed(0)
    logits = torch.randn(len(OPTIONS) * 2, 1000) * 3
    params = [SamplingParams(**options) for options in OPTIONS for _ in range(2)]
    params[3] = SamplingParams(temperature=0)
    params[7] = SamplingParams(temperature=0, repetition_penalty=1.2, logprobs=3)
    requests = requests_for(params)
    together = sample(logits, requests)
    assert together == [sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]


def test_ties():
    row = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, 3.0]])
    for params, allowed in (
        (SamplingParams(temperature=0), {1}),
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.4), {1, 2}),
        (SamplingParams(min_p=1.0), {1, 2, 3, 5}),
    ):
        assert set(sample(row.repeat(300, 1), requests_for(params, 300))) == allowed


def test_top_p_at_its_boundary():
    row = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for top_p, allowed in ((0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2})):
        assert set(sample(row.repeat(300, 1), requests_for(SamplingParams(top_p=top_p), 300))) == allowed


def test_top_p_that_reaches_far():
    # nearly flat: thousands of tokens belong to the nucleus
    torch.manual_seed(1)
    row = torch.randn(1, 20_000) * 0.01
    params = SamplingParams(top_p=0.5)
    ids = sample(row.repeat(60, 1), requests_for(params, 60))
    expected = distribution(row[0].tolist(), params)
    assert all(expected[i] > 0 for i in ids)
    ranks = row[0].argsort(descending=True).argsort()[ids]
    assert 3500 < ranks.float().mean() < 6200  # uniform over about 9,900


def test_never_a_token_of_probability_zero(monkeypatch):
    row = torch.full((1, 500), -INF)
    row[0, 200] = 1.0
    row[0, 400] = 0.5
    for draw in (0.0, 1 - 2.0**-52):
        monkeypatch.setattr("pelton.sampling.uniform", lambda seed, counter, draw=draw: draw)
        for options in ({}, {"top_k": 5}, {"top_p": 0.99}, {"top_k": 3, "top_p": 0.999}, {"min_p": 0.1}):
            assert sample(row, requests_for(SamplingParams(**options), 1)) == [200 if draw == 0 else 400]


def test_extreme_logits_and_temperatures():
    row = torch.tensor([[1e5, 1e5 - 1, -1e5]])
    for temperature in (1e-4, 1e-2, 1e3, 1e30):
        assert sample(row, requests_for(SamplingParams(temperature=temperature, seed=1), 1))[0] in (0, 1, 2)
    assert sample(row, requests_for(SamplingParams(temperature=1e-9), 1)) == [0]


@given(
    st.integers(1, 4), st.sampled_from([1, 7, 511, 512, 513, 640, 1000]), st.integers(0, 10**6), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_argmax_is_torchs(rows, width, seed, coarse):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    if coarse:
        x = x.round()  # many ties: the first wins
    values, ids = _argmax(x)
    assert ids == x.argmax(-1).tolist() and values == x.amax(-1).tolist()


@given(st.sampled_from([1, 5, 40, 300, 1000]), st.integers(0, 10**6), st.sampled_from([1.0, 2.0, 100.0]))
@settings(max_examples=60, deadline=None)
def test_sorted_head_is_the_head_of_the_stable_sort(size, seed, fineness):
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(seed))
    x = (x * fineness).round() / fineness
    values, ids = _sorted_head(x, size)
    expected = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :size]) and torch.equal(ids, expected.indices[:, :size])


@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_without_a_maximum_are_reported_and_touch_nothing_else(temperature):
    torch.manual_seed(0)
    logits = torch.randn(5, 600)
    requests = requests_for(SamplingParams(temperature=temperature), 5)
    expected = sample(logits, requests)
    logits[1, 17] = NAN
    logits[2] = -INF
    logits[3, 500] = INF
    ids, _, valid = Sampler().sample(logits, requests)
    assert valid == [True, False, False, False, True]
    assert (ids[0], ids[4]) == (expected[0], expected[4])


def penalized(row, prompt, output, params):
    row = list(row)
    for token_id in range(len(row)):
        count = output.count(token_id)
        if count or token_id in prompt:
            row[token_id] = (
                row[token_id] / params.repetition_penalty
                if row[token_id] > 0
                else (row[token_id] * params.repetition_penalty)
            )
        row[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return row


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4},
    ],
)
def test_penalties(options):
    params = SamplingParams(temperature=0, max_tokens=None, **options)
    torch.manual_seed(3)
    logits = torch.randn(3, 40)
    requests = [Request(str(i), [1, 2, 2, 30 + i], params, max_model_len=1000) for i in range(3)]
    for _ in range(90):  # more than the state's first capacity
        work = logits.clone()
        ids, _, _ = Sampler().sample(work, requests)
        for i, request in enumerate(requests):
            expected = penalized(
                logits[i].tolist(), request.prompt_token_ids, request.output_token_ids, params
            )
            torch.testing.assert_close(work[i], torch.tensor(expected), rtol=1e-5, atol=1e-5)
            request.append(ids[i])


def test_bias_and_min_tokens():
    row = torch.zeros(1, 20)
    row[0, 3], row[0, 4] = 2.0, 1.0
    params = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[3])
    (request,) = requests_for(params, 1, eos_token_ids=(4,))
    assert sample(row, [request]) == [0]
    request.append(0)
    assert sample(row, [request]) == [3]
    assert sample(row, requests_for(SamplingParams(temperature=0, logit_bias={7: 2.5, 3: -9.0}), 1)) == [7]
    keeps = requests_for(SamplingParams(temperature=0, min_tokens=1, ignore_eos=True), 1, eos_token_ids=(3,))
    assert sample(row, keeps) == [3]


def test_logprobs_of_rows():
    torch.manual_seed(0)
    logits = torch.randn(4, 700)
    expected = logits.double().log_softmax(-1)
    tokens = [5, int(logits[1].argmax()), 699, 0]
    for row, entry in enumerate(token_logprobs(logits, tokens, [0, 3, 700, -1])):
        assert entry.token_ids[0] == tokens[row]
        assert len(set(entry.token_ids)) == len(entry.token_ids)
        torch.testing.assert_close(
            torch.tensor(entry.logprobs, dtype=torch.float64),
            expected[row, entry.token_ids],
            atol=1e-5,
            rtol=0,
        )
        for token_id, rank in zip(entry.token_ids, entry.ranks, strict=True):
            assert rank == int((logits[row] > logits[row, token_id]).sum()) + 1
    entries = token_logprobs(logits, tokens, [0, 3, 700, -1])
    assert [len(entry.token_ids) for entry in entries] == [1, 3, 700, 700]


def test_draws_are_uniform_and_independent():
    values = np.array(
        [[uniform(request_seed(seed), counter) for counter in range(50)] for seed in range(400)]
    )
    assert values.min() >= 0 and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 60
    for a, b in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    assert len({request_seed(0, i) for i in range(1000)} | {request_seed(i) for i in range(1000)}) == 1999


def test_params_need_no_torch_and_errors_have_one_base():
    assert issubclass(UnknownOptionError, PeltonError)
    assert inspect.getdoc(SamplingParams)
