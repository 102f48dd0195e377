"""A runner without a model, which watches what the scheduler does with the blocks."""

from __future__ import annotations

import zlib

import torch

from pelton.engine import Engine
from pelton.kv_cache import NULL_BLOCK
from pelton.sampling import SamplingParams
from pelton.scheduler import StepPlan


class FakeRunner:
    """Keeps tokens where a model keeps their keys and values, and reads the context back from there.

    The logits of a position are a function of its whole context as the cache has it, so a block that is lost, shared
    wrongly or written over changes the output; it is also compared with the request's tokens at once.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 32,
        table=None,
        runs_ahead: bool = False,
    ) -> None:
        self.runs_ahead = runs_ahead
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.table = table  # [vocab, vocab]: next-token logits by the last token alone
        self.cache = [[None] * block_size for _ in range(num_blocks)]
        self.num_steps = 0
        self.num_ahead = 0
        self.num_computed = 0
        self.widest = 0
        self.fail_at: dict[int, BaseException] = {}
        self.nan_after: tuple[int, ...] | None = None

    def execute(self, plan: StepPlan, tokens: torch.Tensor | None = None) -> torch.Tensor:
        self.num_steps += 1
        self.num_ahead += tokens is not None
        if self.num_steps in self.fail_at:
            raise self.fail_at.pop(self.num_steps)
        sources = {source for source, _ in plan.block_copies}
        destinations = [destination for _, destination in plan.block_copies]
        assert len(set(destinations)) == len(destinations) and not sources & set(destinations)
        for source, destination in plan.block_copies:
            self.cache[destination] = list(self.cache[source])
        written: set[tuple[int, int]] = set()
        known = [item.request.token_ids for item in plan.scheduled]
        if tokens is not None:
            assert len(tokens) == len(known)
            known = [ids + [token] for ids, token in zip(known, tokens.tolist(), strict=True)]
        # a layer writes the keys and values of the whole step before it reads any
        for item, token_ids in zip(plan.scheduled, known, strict=True):
            request, start = item.request, item.request.num_computed_tokens
            assert item.num_new_tokens > 0
            assert start + item.num_new_tokens <= len(token_ids)
            assert tokens is None or start + 1 == len(token_ids)
            assert len(request.block_ids) == -(-(start + item.num_new_tokens) // self.block_size)
            assert NULL_BLOCK not in request.block_ids
            for position in range(start, start + item.num_new_tokens):
                block, offset = request.block_ids[position // self.block_size], position % self.block_size
                assert (block, offset) not in written, "two requests write to one slot"
                written.add((block, offset))
                self.cache[block][offset] = token_ids[position]
        num_tokens = sum(item.num_new_tokens for item in plan.scheduled)
        self.num_computed += num_tokens
        self.widest = max(self.widest, num_tokens)
        rows = []
        for item, token_ids in zip(plan.scheduled, known, strict=True):
            request, end = item.request, item.request.num_computed_tokens + item.num_new_tokens
            context = [
                self.cache[request.block_ids[i // self.block_size]][i % self.block_size] for i in range(end)
            ]
            assert context == token_ids[:end], "the cache holds other tokens"
            rows += [self._row(context[:length]) for length in range(end - item.num_logits + 1, end + 1)]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _row(self, context: list[int]) -> torch.Tensor:
        if self.nan_after is not None and tuple(context[: len(self.nan_after)]) == self.nan_after:
            return torch.full((self.vocab_size,), float("nan"))
        if self.table is not None:
            return self.table[context[-1]].clone()
        seed = zlib.crc32(repr(context).encode())
        return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


class FakeTokenizer:
    """One letter a token."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)

    def text_stream(self, context, skip_special_tokens):
        return self

    def add(self, token_id):
        return chr(97 + token_id)

    def end(self):
        return ""


def make_engine(runner: FakeRunner | None = None, **options) -> Engine:
    runner = runner or FakeRunner()
    defaults = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return Engine(runner, **{**defaults, **options})


def run(engine: Engine, groups) -> None:
    steps = 0
    while not all(group.finished for group in groups):
        engine.step()
        steps += 1
        assert steps < 5000, "no progress"


def alone(prompt, params: SamplingParams, number: int = 0, vocab_size: int = 32, **options):
    """Outputs of the request on an engine of its own, with room and without cache; `number` is its arrival."""
    engine = make_engine(
        FakeRunner(256, 4, vocab_size), enable_prefix_caching=False, max_num_batched_tokens=4096, **options
    )
    engine._num_added = number
    group = engine.add_request(prompt, params)
    run(engine, [group])
    return [(c.token_ids, c.finish_reason, c.stop_reason) for c in group.output().outputs]


def results(group):
    return [(c.token_ids, c.finish_reason, c.stop_reason) for c in group.output().outputs]


def check_idle(engine: Engine) -> None:
    """Nothing runs, no block is held, and what is cached is consistent."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    assert not engine.has_unfinished and not scheduler.has_unfinished
    assert pool.num_free == pool.num_blocks - 1
    check_pool(scheduler)


def check_pool(scheduler) -> None:
    """Reference counts are what the requests hold, and the free list is the rest."""
    pool = scheduler.pool
    held: dict[int, int] = {}
    for request in scheduler.running:
        assert len(set(request.block_ids)) == len(request.block_ids)
        for block in request.block_ids:
            held[block] = held.get(block, 0) + 1
    for request in scheduler.waiting:
        assert request.block_ids == []
    for block in range(1, pool.num_blocks):
        assert pool.ref_count(block) == held.get(block, 0)
        assert (block in pool._free) == (block not in held)
    assert pool.ref_count(NULL_BLOCK) == 1 and NULL_BLOCK not in pool._free
    for key, block in pool._cached.items():
        assert pool._hashes[block] == key
    assert sum(key is not None for key in pool._hashes) == len(pool._cached)
