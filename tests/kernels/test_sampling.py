"""Sampling on GPUs: every draw against the inverse of the exact distribution, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pelton import ops
from pelton.request import Request
from pelton.sampling import (
    Sampler,
    SamplingParams,
    _has_kernel,
    _sorted_head_of_keys,
    request_seed,
    uniform,
)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.pelton, "sample"),
    reason="this build has no sampling kernels: on the CPU torch's own operators sample",
)
ON_GPU = ops.backend() in ("cuda", "rocm")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NAN, INF = math.nan, math.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def column(values: object, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def draw(logits: Tensor, seeds: list[int], positions: list[int] | None = None, **options: float) -> Tensor:
    """Ids of rows with the same options; an option that is not named is not passed."""
    rows = logits.shape[0]
    temperature = options.pop("temperature", 1.0)
    dtypes = {"top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    tensors = {name: column([value] * rows, dtypes[name]) for name, value in options.items()}
    return ops.sample(
        logits,
        column([temperature] * rows, torch.float32),
        column([s - 2**64 if s >= 2**63 else s for s in seeds], torch.int64),
        column(positions or [0] * rows, torch.int64),
        **tensors,
    )


def inverse(row: Tensor, u: float, **options: float) -> int:
    """Where ``u`` lies in the cumulative distribution of one row (float64)."""
    top_k, top_p = int(options.get("top_k", 0)), options.get("top_p", 1.0)
    weights = ops.reference.sample_distribution(
        row, options.get("temperature", 1.0), top_k, top_p, options.get("min_p", 0.0)
    )
    ordered = 0 < top_k < len(row) or top_p < 1
    order = (
        row.sort(descending=True, stable=True).indices
        if ordered
        else torch.arange(len(row), device=row.device)
    )
    cumulative = weights[order].cumsum(0)
    target = min(max(u, 0.0), 1 - 1e-15) * cumulative[-1]
    return int(order[(cumulative > target).nonzero()[0, 0]])


def possible(row: Tensor, u: float, options: dict[str, float]) -> set[int]:
    """The tokens that draw ``u`` may give, when float32 decides what lies on an edge."""
    found = set()
    for shift in (0.0, -1e-6, 1e-6):
        found.add(inverse(row, u + shift, **options))
        for name, change in (("top_p", 1e-6), ("min_p", 1e-6 * options.get("min_p", 0.0))):
            for edge in (-change, change):
                if name in options and 0 < options[name] + edge <= 1:
                    found.add(inverse(row, u + shift, **{**options, name: options[name] + edge}))
    return found


def check(logits: Tensor, seeds: list[int], options: dict[str, float]) -> None:
    """Every row's token is where its draw lies; in one of ten rows, rounding may have decided between two."""
    got = draw(logits, seeds, **options).tolist()
    shifted = 0
    for row, seed, token in zip(logits.double(), seeds, got, strict=True):
        u = uniform(seed, 0)
        if token != inverse(row, u, **options):
            shifted += 1
            assert token in possible(row, u, options), (options, seed, token)
    assert shifted <= max(1, len(got) // 10)


def seeds_for(count: int, stream: int = 0) -> list[int]:
    return [request_seed(1000 + stream, i) for i in range(count)]


OPTIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "temperature": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 131, 4097, 9001])
def test_draws_invert_the_distribution(vocab: int, options: dict[str, float]) -> None:
    rows = 30 if ON_GPU else 3
    check(randn(rows, vocab, seed=vocab) * 3, seeds_for(rows, vocab), options)


@pytest.mark.skipif(not ON_GPU, reason="a vocabulary too large for the emulation")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("vocab", "spread"), [(128_256, 5.0), (151_936, 1.0), (262_144, 2.5)])
def test_real_vocabularies(vocab: int, spread: float, options: dict[str, float]) -> None:
    check(randn(4, vocab, seed=vocab) * spread, seeds_for(4, vocab), options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 30}, {"top_p": 0.7}, {"min_p": 0.1, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("vocab", [9002])
def test_half_precision_logits_with_many_ties(
    dtype: torch.dtype, options: dict[str, float], vocab: int
) -> None:
    rows = 20 if ON_GPU else 3
    check((randn(rows, vocab, seed=3) * 2).to(dtype), seeds_for(rows), options)


FLAT = {
    "equal": lambda rows, vocab: torch.full((rows, vocab), 1.5, device=DEVICE),
    "two_values": lambda rows, vocab: (randn(rows, vocab) > 0).float(),
    "close": lambda rows, vocab: 3 + (randn(rows, vocab) * 2**18).round() * 2**-21,
    "closer": lambda rows, vocab: 3 + (randn(rows, vocab) * 4).round() * 2**-20,
}


@pytest.mark.parametrize("shape", FLAT)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 4500},
        {"top_p": 0.4},
        {"top_k": 8000, "top_p": 0.9},
        {"min_p": 0.5, "top_p": 0.99},
        {"top_k": 3},
    ],
    ids=str,
)
def test_more_tokens_of_one_size_than_can_be_sorted(shape: str, options: dict[str, float]) -> None:
    rows = 24 if ON_GPU else 2
    check(FLAT[shape](rows, 9500), seeds_for(rows, 7), options)


@pytest.mark.parametrize("options", [{"temperature": 1e30}, {"temperature": 1e30, "top_p": 0.5}], ids=str)
def test_masked_tokens_stay_masked_at_any_temperature(options: dict[str, float]) -> None:
    logits = torch.zeros(60, 5, device=DEVICE)
    logits[:, [0, 2]] = -INF
    drawn = set(draw(logits, seeds_for(60), **options).tolist())
    assert drawn == ({1, 3, 4} if len(options) == 1 else {1, 3})


def test_chi_square() -> None:
    rows = 20_000 if ON_GPU else 100
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0], device=DEVICE)
    for options in ({}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}):
        weights = ops.reference.sample_distribution(
            logits.double(),
            options.get("temperature", 1.0),
            int(options.get("top_k", 0)),
            options.get("top_p", 1.0),
            options.get("min_p", 0.0),
        ).cpu()
        expected = weights / weights.sum() * rows
        seen = draw(logits.expand(rows, -1), seeds_for(rows), **options).bincount(minlength=8).cpu()
        kept = expected > 0
        assert seen[~kept].sum() == 0
        assert ((seen - expected).square() / expected)[kept].sum() < 30  # 7 degrees of freedom


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"temperature": 0.0}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.4}, {1, 2}),
        ({"min_p": 1.0}, {1, 2, 3, 5}),
    ],
    ids=str,
)
def test_of_equal_logits_the_lowest_ids_are_kept(options: dict[str, float], allowed: set[int]) -> None:
    row = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0, 3.0], device=DEVICE)
    assert set(draw(row.expand(60, -1), seeds_for(60), **options).tolist()) == allowed


@pytest.mark.parametrize(("top_p", "allowed"), [(0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2})])
def test_top_p_at_its_boundary(top_p: float, allowed: set[int]) -> None:
    row = torch.tensor([0.5, 0.3, 0.2], device=DEVICE).log()
    assert set(draw(row.expand(60, -1), seeds_for(60), top_p=top_p).tolist()) == allowed


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 0.1}], ids=str)
def test_never_a_token_of_probability_zero(options: dict[str, float]) -> None:
    seeds = sorted(range(20_000), key=lambda seed: uniform(seed, 0))
    seeds = [*seeds[:3], *seeds[-3:]]  # draws within 1e-4 of 0 and of 1
    row = torch.full((500,), -INF, device=DEVICE)
    row[200], row[400] = 1.0, 0.5
    assert draw(row.expand(6, -1), seeds, **options).tolist() == [200, 200, 200, 400, 400, 400]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rows = 30 if ON_GPU else 8
    logits = randn(1, 300).expand(rows, -1).contiguous()
    seeds, positions = [2**64 - 1, 5] * (rows // 2), list(range(rows))
    expected = [inverse(logits[0].double(), uniform(s, p)) for s, p in zip(seeds, positions, strict=True)]
    assert draw(logits, seeds, positions).tolist() == expected
    assert draw(logits, seeds[::-1], positions[::-1]).tolist() == expected[::-1]
    assert len(set(expected)) > 3


def mixed(rows: int, vocab: int) -> dict[str, Tensor]:
    index = torch.arange(rows, device=DEVICE)
    return {
        "logits": randn(rows, vocab, seed=5) * 3,
        "temperature": column([(0.0, 1.0, 0.4, 2.0)[i % 4] for i in range(rows)], torch.float32),
        "seeds": index * 7919,
        "positions": index % 5,
        "top_k": column([(0, 3, 1, 100, 2000)[i % 5] for i in range(rows)], torch.int32),
        "top_p": column([(1.0, 0.7, 0.95)[i % 3] for i in range(rows)], torch.float32),
        "min_p": column([(0.0, 0.0, 0.0, 0.1)[i % 4] for i in range(rows)], torch.float32),
    }


def test_a_mixed_batch_is_what_each_row_gives_alone_and_what_the_reference_gives() -> None:
    arguments = mixed(20, 5000)
    together = ops.sample(**arguments)
    alone = [ops.sample(**{name: x[i : i + 1] for name, x in arguments.items()}) for i in range(20)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, ops.sample(**arguments))
    assert torch.equal(together, ops.reference.sample(**arguments))


SAMPLER_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "repetition_penalty": 1.3},
    {},
    {"temperature": 0.6, "top_k": 40, "logprobs": 0},
    {"temperature": 1e300, "top_p": 0.999},
    {"top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": -0.4, "logprobs": 5},
    {"min_p": 0.1, "logit_bias": {3: 4.0, 2999: -1e30}, "logprobs": -1},
    {"top_k": 10**30, "top_p": 0.9, "min_p": 0.01},
    {"min_tokens": 2, "stop_token_ids": [5, 6], "logprobs": 2},
]


def sampler_requests(options: list[dict[str, Any]]) -> list[Request]:
    requests = []
    for i, option in enumerate(options):
        params = SamplingParams(max_tokens=None, **option)
        requests.append(Request(str(i), [1, 2, 9], params, max_model_len=99, seed=request_seed(i)))
        requests[-1].append(7)
    return requests


class NoEvent:
    """In place of a GPU's event, where kernels run before their operator returns."""

    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler uses the kernel, in emulation too."""
    monkeypatch.setattr("pelton.sampling._has_kernel", lambda logits: True)
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "Event", NoEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "options", [SAMPLER_OPTIONS, SAMPLER_OPTIONS[:1] * 3, SAMPLER_OPTIONS[3:4] * 2], ids=len
)
def test_the_sampler_gives_the_same_with_and_without_the_kernel(
    monkeypatch: pytest.MonkeyPatch, options: list[dict[str, Any]]
) -> None:
    logits = (randn(len(options), 3000, seed=2) * 3).round(decimals=1)
    logits[0, 8] = 50.0
    ids, logprobs, valid = Sampler().sample(logits.clone(), sampler_requests(options))
    monkeypatch.setattr("pelton.sampling._has_kernel", lambda logits: False)
    with torch.device("cpu"):
        cpu_ids, cpu_logprobs, cpu_valid = Sampler().sample(logits.cpu().clone(), sampler_requests(options))
    assert ids == cpu_ids and valid == cpu_valid
    for entry, cpu_entry in zip(logprobs, cpu_logprobs, strict=True):
        assert (entry is None) == (cpu_entry is None)
        if entry is not None and cpu_entry is not None:
            assert entry.token_ids == cpu_entry.token_ids and entry.ranks == cpu_entry.ranks
            assert entry.logprobs == pytest.approx(cpu_entry.logprobs, abs=1e-5)


@pytest.mark.usefixtures("kernel")
def test_the_sampler_reports_rows_without_a_maximum() -> None:
    for options in ({"temperature": 0, "logprobs": 1}, {"logprobs": 1}):
        logits = randn(3, 50)
        logits[1, 4] = NAN
        ids, logprobs, valid = Sampler().sample(logits, sampler_requests([options] * 3))
        assert valid == [True, False, True] and all(0 <= i < 50 for i in ids)
        assert logprobs[0] is not None and logprobs[0].token_ids[0] == ids[0]


@pytest.mark.skipif(not ON_GPU, reason="the GPU's own path")
def test_which_logits_go_to_the_kernel() -> None:
    assert _has_kernel(torch.zeros(1, 9, device=DEVICE)) and not _has_kernel(torch.zeros(1, 9, device="cpu"))


@pytest.mark.parametrize("size", [1, 5, 300])
def test_the_head_of_the_sorted_row_without_a_look_at_the_host(size: int) -> None:
    for x in (randn(3, 1024), randn(3, 1024).round(), torch.zeros(3, 1024, device=DEVICE)):
        x[1, ::2] = -INF
        x[2, ::3] = -0.0
        expected = x.sort(dim=-1, descending=True, stable=True)
        values, ids = _sorted_head_of_keys(x, size)
        assert torch.equal(values, expected.values[:, :size]) and torch.equal(ids, expected.indices[:, :size])


@pytest.mark.parametrize("padding", [0, 3, 4])
def test_rows_of_any_stride(padding: int) -> None:
    logits = torch.full((6, 701 + padding), NAN, device=DEVICE)
    logits[:, :701] = randn(6, 701)
    view = logits[:, :701]
    for options in ({}, {"top_k": 9}, {"top_p": 0.9}):
        assert torch.equal(draw(view, seeds_for(6), **options), draw(view.clone(), seeds_for(6), **options))
    assert torch.equal(ops.greedy_sample(view), view.argmax(-1))
    shifted = logits.flatten()[1:].as_strided((5, 701), (701 + padding, 1), 1)  # not aligned to an access
    shifted.copy_(view[:5].clone())
    assert torch.equal(draw(shifted, seeds_for(5)), draw(shifted.clone(), seeds_for(5)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_rows_without_a_maximum_are_reported_and_touch_nothing_else(
    temperature: float, options: dict[str, float]
) -> None:
    logits = randn(5, 600)
    expected = draw(logits, seeds_for(5), temperature=temperature, **options)
    logits[1, 17] = NAN
    logits[2] = -INF
    logits[3, 500] = INF
    got = draw(logits, seeds_for(5), temperature=temperature, **options).tolist()
    assert got == [expected[0], -1, -1, -1, expected[4]]
    if not options:
        greedy = ops.greedy_sample(logits).tolist()
        assert greedy == [int(logits[0].argmax()), -1, -1, -1, int(logits[4].argmax())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 128, 129, 4096, 4099, 12_345])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    logits = randn(7, vocab, seed=vocab).to(dtype)
    logits[1] = logits[1].round()  # ties
    logits[2] = 0.0
    logits[2, vocab // 2 :] = -0.0
    logits[3, : vocab - 1] = -INF
    expected = ops.reference.greedy_sample(logits)
    assert expected[2] == 0
    assert torch.equal(ops.greedy_sample(logits), expected)
    assert torch.equal(draw(logits, seeds_for(7), temperature=0.0), expected)


def test_logprobs_are_those_of_the_logits_as_they_are() -> None:
    arguments = mixed(12, 5000)
    arguments["logits"][4] = NAN
    arguments["logits"][5, ::2] = -INF
    logprobs = torch.full((12,), 7.0, device=DEVICE)
    ids = ops.sample(**arguments, logprobs=logprobs)
    expected = (
        arguments["logits"].double().log_softmax(-1).gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    )
    torch.testing.assert_close(logprobs.double(), expected, atol=3e-6, rtol=1e-6, equal_nan=True)
    assert ids[4] == -1 and logprobs[4].isnan() and not logprobs[5].isnan()
    assert torch.equal(ids, ops.sample(**arguments))


def test_no_rows() -> None:
    logits = torch.empty(0, 50, device=DEVICE)
    assert draw(logits, []).shape == (0,)
    assert ops.greedy_sample(logits).shape == (0,)


def test_given_out_and_workspace_are_used() -> None:
    logits, out = randn(3, 100), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    workspace = torch.empty(ops.sample_workspace_size(3, 100) + 10, device=DEVICE)
    assert ops.greedy_sample(logits, out=out, workspace=workspace) is out
    assert torch.equal(out, logits.argmax(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3, 4)}, r"sample: logits must be \[rows, vocab\]"),
        (
            {"logits": torch.zeros(2, 4, dtype=torch.float64)},
            "sample: dtype must be float32, float16 or bfloat16",
        ),
        ({"logits": torch.zeros(4, 2).t()}, "sample: logits's last dimension must be contiguous"),
        ({"logits": torch.zeros(2, 0)}, "sample: the vocabulary must have 1 to 1048576 tokens, logits has 0"),
        ({"temperature": torch.zeros(3)}, r"sample: temperature must have shape \[2\], found \[3\]"),
        ({"temperature": torch.zeros(2).double()}, "sample: temperature must be Float"),
        ({"top_k": torch.zeros(2, dtype=torch.int64)}, "sample: top_k must be Int"),
        ({"top_p": torch.zeros(4)[::2]}, "sample: top_p must be contiguous"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "sample: seeds must be Long"),
        ({"workspace": torch.zeros(3)}, r"sample: workspace must have at least \d+ elements, found 3"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "out": torch.zeros(2, dtype=torch.int64),
        "logprobs": None,
        "logits": torch.zeros(2, 4),
        "temperature": torch.zeros(2),
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "seeds": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "workspace": torch.zeros(ops.sample_workspace_size(2, 4)),
        **change,
    }
    moved = {name: x if x is None else to_device(x) for name, x in arguments.items()}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pelton.sample.default(**moved)


def to_device(x: Tensor) -> Tensor:
    """On the tests' device with the same strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)


def test_opcheck() -> None:
    arguments = mixed(3, 64)
    workspace = torch.empty(ops.sample_workspace_size(3, 64), device=DEVICE)
    out = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    options = [arguments[name] for name in ("top_k", "top_p", "min_p", "seeds", "positions")]
    for logprobs in (None, torch.zeros(3, device=DEVICE)):
        call = (out, logprobs, arguments["logits"], arguments["temperature"], *options, workspace)
        result = torch.library.opcheck(torch.ops.pelton.sample.default, call)
        assert set(result.values()) == {"SUCCESS"}
    result = torch.library.opcheck(
        torch.ops.pelton.greedy_sample.default, (out, arguments["logits"], workspace)
    )
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_captured_in_a_graph() -> None:
    arguments = mixed(9, 20_000)
    out = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    workspace = torch.empty(ops.sample_workspace_size(9, 20_000), device=DEVICE)
    ops.sample(**arguments, out=out, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.sample(**arguments, out=out, workspace=workspace)
    for step in range(3):
        arguments["logits"].copy_(randn(9, 20_000, seed=step) * 2)
        arguments["positions"].fill_(step)
        graph.replay()
        assert torch.equal(out, ops.sample(**arguments))
