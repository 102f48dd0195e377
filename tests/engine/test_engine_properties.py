"""Any sequence of add, abort and step: no block is lost or shared wrongly, every output is as when run alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_fakes import FakeRunner, alone, check_idle, check_pool, make_engine, results, run
from pelton.sampling import SamplingParams

MAX_MODEL_LEN = 24
# few tokens, and prompts cut from one text, so that prefixes meet in the cache
TEXT = [1, 2, 3, 1, 2, 3, 4, 1, 2, 3, 1, 2, 5, 6, 1, 1, 1, 1, 2, 3, 7, 1]

params = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    top_k=st.sampled_from([0, 3]),
    seed=st.sampled_from([None, 7]),
    max_tokens=st.sampled_from([1, 2, 5, None]),
    stop_token_ids=st.sampled_from([(), (3,), (4, 9)]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        spare_blocks=st.integers(0, 6),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([1, 2, 3, 7, 24, 100]),
        enable_prefix_caching=st.booleans(),
        chunked=st.booleans(),
        runs_ahead=st.booleans(),
    )
    def start(
        self, spare_blocks, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, chunked, runs_ahead
    ):
        self.runner = FakeRunner(1 + MAX_MODEL_LEN // 4 + spare_blocks, 4, runs_ahead=runs_ahead)
        self.budget = max_num_batched_tokens
        self.engine = make_engine(
            self.runner,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=chunked or max_num_batched_tokens < MAX_MODEL_LEN,
            eos_token_ids=(0,),
        )
        self.engine.scheduler.max_logits_rows = 5
        self.live = []
        self.done = []

    @rule(start=st.integers(0, 3), length=st.integers(1, 18), params=params)
    def add(self, start, length, params):
        number = self.engine._num_added
        self.live.append((self.engine.add_request(TEXT[start : start + length], params), number))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()
        self.sort_out()

    @rule(data=st.data())
    def abort(self, data):
        if self.live:
            group, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.engine.abort([group])
            assert group.finished
            assert {r.finish_reason for r in group.requests} <= {"abort", "stop", "length"}

    @rule(data=st.data())
    def preempt(self, data):
        # as if blocks had run out just now; the last to come gives way
        scheduler = self.engine.scheduler
        if scheduler.running and not scheduler._copies:
            scheduler._preempt(scheduler.running.pop())

    def sort_out(self):
        self.done += [entry for entry in self.live if entry[0].finished]
        self.live = [entry for entry in self.live if not entry[0].finished]

    @invariant()
    def blocks_are_in_order(self):
        if hasattr(self, "engine"):
            check_pool(self.engine.scheduler)
            assert self.runner.widest <= self.budget
            assert len(self.engine.scheduler.running) <= self.engine.scheduler.max_num_running

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        run(self.engine, [group for group, _ in self.live])
        self.sort_out()
        check_idle(self.engine)
        for group, number in self.done:
            request = group.first
            assert results(group) == alone(
                request.prompt_token_ids,
                request.params,
                number,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=(0,),
            )
            if request.params.prompt_logprobs is not None:
                assert len(group.output().prompt_logprobs) == request.num_prompt_tokens


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("spare", [0, 1, 5])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_many_requests_through_a_tiny_cache(caching, budget, spare, runs_ahead):
    runner = FakeRunner(1 + 8 + spare, 4, runs_ahead=runs_ahead)
    engine = make_engine(
        runner,
        max_model_len=32,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    params = [SamplingParams(temperature=i % 2, max_tokens=3 + i, n=1 + (i % 5 == 0)) for i in range(12)]
    prompts = [TEXT[: 5 + i % 4] + [i] for i in range(12)]
    groups = [engine.add_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    run(engine, groups)
    if budget == 16 and spare < 5:
        assert engine.scheduler.num_preemptions > 0
    for number, (prompt, p, group) in enumerate(zip(prompts, params, groups, strict=True)):
        assert results(group) == alone(prompt, p, number, max_model_len=32)
    check_idle(engine)
