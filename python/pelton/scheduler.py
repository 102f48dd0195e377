"""What the next step computes.

One token budget a step. Requests that run come first, in the order in which they arrived, then those that wait,
so that a long prompt is read in the room that decoding leaves (chunked prefill) and nobody is overtaken for ever.
When the blocks run out, the request that came last starts over later (preemption by recompute): it keeps its
tokens, gives up its blocks and goes to the head of the queue. The first request can therefore always go on, and
one sequence always fits (checked when the scheduler is made), so every request ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton.errors import CapacityError, InvalidValueError
from pelton.kv_cache import BlockPool, extend_block_hashes
from pelton.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ScheduledRequest", "Scheduler", "StepPlan"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The step computes tokens [num_computed, num_computed + num_new_tokens) of the request.

    Logits are wanted for the last `num_logits` of these positions: 0 while a prompt is unfinished, 1 to sample,
    more when the request wants prompt_logprobs.
    """

    request: Request
    num_new_tokens: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner executes: first the copies (source block, destination block), then the requests' tokens."""

    scheduled: tuple[ScheduledRequest, ...]
    block_copies: tuple[tuple[int, int], ...] = ()


class Scheduler:
    """Decides each step's plan and keeps the requests' blocks.

    Args:
        num_blocks, block_size: the runner's KV cache (block 0, the null block, included).
        max_model_len: longest sequence, prompt and output together.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens a step computes.
        enable_prefix_caching: take the KV of a known prefix from the cache.
        enable_chunked_prefill: read a long prompt over several steps. When false, a prompt is computed in one
            step and `max_num_batched_tokens` must hold the longest.
        max_logits_rows: with prompt_logprobs, most rows of logits a step gives (they are large).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        max_logits_rows: int = 1024,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        # every running request gets at least one token a step, so none starves when the budget is tiny
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_logits_rows = max_logits_rows
        self.chunked_prefill = enable_chunked_prefill
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise InvalidValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than max_model_len={max_model_len}, and "
                "with enable_chunked_prefill=False a prompt must fit into one step: raise "
                "max_num_batched_tokens, lower max_model_len, or leave chunked prefill on"
            )
        usable = max(num_blocks - 1, 0)
        if usable * block_size < max_model_len:
            raise CapacityError(
                f"KV budget too small for one sequence: max_model_len={max_model_len} tokens need "
                f"{-(-max_model_len // block_size)} blocks of {block_size}, the KV cache has {usable}: raise "
                f"kv_cache_memory or set max_model_len to at most {usable * block_size}"
            )
        self.pool = BlockPool(num_blocks, enable_prefix_caching)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._copies: list[tuple[int, int]] = []
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def fork(self, parent: Request, children: list[Request]) -> None:
        """Let `children` go on from where `parent` stands: its computed tokens are theirs, and its full blocks.

        The block that parent and child would both write to in the next step is copied at the head of that step.
        Call it after the step that computed the parent's prompt, and before anything else is finished, so that
        no source of a copy can be handed out as the destination of another. Children for whom there is no room
        wait at the head of the queue and compute the prompt again.
        """
        num_shared, has_tail = divmod(parent.num_computed_tokens, self.block_size)
        admitted: list[Request] = []
        for child in children:
            if len(self.running) + len(admitted) >= self.max_num_running or self.pool.num_free < bool(
                has_tail
            ):
                break
            child.block_ids = parent.block_ids[:num_shared]
            child.block_hashes = parent.block_hashes[:num_shared]
            self.pool.share(child.block_ids)
            if has_tail:
                child.block_ids.append(self.pool.allocate())
                self._copies.append((parent.block_ids[num_shared], child.block_ids[num_shared]))
            child.num_computed_tokens = parent.num_computed_tokens
            child.status = RequestStatus.RUNNING
            admitted.append(child)
        # next to the parent: the list stays in order of arrival
        at = self.running.index(parent) + 1
        self.running[at:at] = admitted
        self.waiting.extendleft(reversed(children[len(admitted) :]))

    def schedule(self) -> StepPlan:
        """Plan a step: choose the requests, give them blocks. Empty when there is nothing to do."""
        copies = tuple(self._copies)
        self._copies.clear()
        num_preemptions = self.num_preemptions
        scheduled: list[ScheduledRequest] = []
        budget = self.max_num_batched_tokens
        rows = self.max_logits_rows

        running = self.running
        position = 0
        while position < len(running) and budget > 0:
            request = running[position]
            num_new = min(len(request.token_ids) - request.num_computed_tokens, budget)
            if request.prompt_logprobs is not None:
                num_new = self._limit_logits(request, num_new, rows)
            if not self._grow(request, request.num_computed_tokens + num_new):
                break  # it was the last one that could give way, and gave way itself
            item = self._plan(request, num_new)
            scheduled.append(item)
            budget -= num_new
            rows -= item.num_logits
            position += 1

        # a preempted request is at the head of the queue: nothing overtakes it while blocks are short
        may_admit = bool(self.waiting) and num_preemptions == self.num_preemptions
        promised = self._num_promised() if may_admit else 0
        while may_admit and self.waiting and budget > 0 and len(running) < self.max_num_running:
            request = self.waiting[0]
            num_new = self._admit(request, budget, rows, promised)
            if num_new == 0:
                break
            self.waiting.popleft()
            running.append(request)
            promised += self._num_missing(request)
            item = self._plan(request, num_new)
            scheduled.append(item)
            budget -= num_new
            rows -= item.num_logits
        return StepPlan(tuple(scheduled), copies)

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan` before its tokens are known: one more token for each request that goes on.

        `plan` was computed (`update`), and its tokens are not appended yet. Requests that end with their next token,
        because of their length, are left out; whether another ends with it is not known, and its row is then work for
        nothing. None when the next step is to be another one: requests can be admitted, or blocks are short, or a
        choice depends on the tokens. `settle` follows when the tokens are known.
        """
        going_on: list[Request] = []
        missing = num_running = 0
        for item in plan.scheduled:
            request = item.request
            if request.status is not RequestStatus.RUNNING:
                continue
            num_running += 1
            num_tokens = len(request.token_ids)
            if request.num_computed_tokens != num_tokens or request.siblings or request.params.has_penalties:
                return None
            if num_tokens + 1 < request.max_total_tokens:
                going_on.append(request)
                missing += num_tokens // self.block_size + 1 - len(request.block_ids)
        if not going_on or num_running != len(self.running) or self._copies or missing > self.pool.num_free:
            return None
        if self.waiting and not len(going_on) == num_running == self.max_num_running:
            return None
        for request in going_on:
            if request.num_computed_tokens // self.block_size == len(request.block_ids):
                request.block_ids.append(self.pool.allocate())
        return StepPlan(tuple(ScheduledRequest(request, 1, 1) for request in going_on))

    def settle(self, plan: StepPlan) -> None:
        """Make the blocks known that a plan of `schedule_ahead` filled, now that their tokens are."""
        for item in plan.scheduled:
            request = item.request
            if request.status is RequestStatus.RUNNING:
                self._commit(request, request.num_computed_tokens - 1, request.num_computed_tokens)

    def update(self, plan: StepPlan) -> None:
        """Note that the step was computed."""
        for item in plan.scheduled:
            item.request.num_computed_tokens += item.num_new_tokens

    def finish(self, requests: Iterable[Request]) -> None:
        """Take these requests out, whatever they are doing, and give up their blocks."""
        gone = [request for request in requests if request.status is not RequestStatus.FINISHED]
        if not gone:
            return
        waiting = False
        for request in gone:
            waiting |= request.status is RequestStatus.WAITING
            request.status = RequestStatus.FINISHED
            self._release(request)
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        if waiting:
            self.waiting = deque(
                request for request in self.waiting if request.status is RequestStatus.WAITING
            )

    def reset(self) -> None:
        """Drop every request and everything cached: the way out of a step that was interrupted anywhere."""
        for request in (*self.running, *self.waiting):
            request.status = RequestStatus.FINISHED
            request.block_ids = []
        self.running = []
        self.waiting = deque()
        self._copies.clear()
        self.pool.reset()

    def _plan(self, request: Request, num_new: int) -> ScheduledRequest:
        end = request.num_computed_tokens + num_new
        if request.wants_prompt_logprobs:
            num_logits = max(0, end - max(request.num_computed_tokens, request.num_prompt_logprobs))
        else:
            num_logits = int(end == len(request.token_ids))
        # Full blocks are known from here on. The plan is executed as a whole, and a layer writes the step's keys
        # and values before any of its queries reads, so requests of one step can already share.
        self._commit(request, request.num_computed_tokens, end)
        return ScheduledRequest(request, num_new, num_logits)

    def _commit(self, request: Request, start: int, end: int) -> None:
        """Make the blocks known that tokens from `start` to `end` fill."""
        if not self.pool.enable_prefix_caching:
            return
        first, last = start // self.block_size, end // self.block_size
        if first < last:
            extend_block_hashes(request.block_hashes, request.token_ids, self.block_size)
            for i in range(first, last):
                self.pool.commit(request.block_ids[i], request.block_hashes[i])

    def _limit_logits(self, request: Request, num_new: int, rows: int) -> int:
        """Fewer tokens, if prompt_logprobs would make more rows of logits than a step may give."""
        if not request.wants_prompt_logprobs or not self.chunked_prefill:
            return num_new
        done = max(request.num_prompt_logprobs - request.num_computed_tokens, 0)
        return min(num_new, done + max(rows, 1))

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a running request the blocks for `num_tokens`, preempting from the end; False: it went itself."""
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        while missing > self.pool.num_free:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        for _ in range(missing):
            request.block_ids.append(self.pool.allocate())
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []

    def _num_missing(self, request: Request) -> int:
        """Blocks that a running request still needs for the tokens that are known."""
        return -(-len(request.token_ids) // self.block_size) - len(request.block_ids)

    def _num_promised(self) -> int:
        return sum(self._num_missing(request) for request in self.running)

    def _admit(self, request: Request, budget: int, rows: int, promised: int) -> int:
        """Start a waiting request, if there is room; return the number of tokens to compute, or 0.

        Room means blocks for all of its known tokens beside what running requests still need for theirs:
        reading half of a prompt only to give it up again would be work for nothing.
        """
        num_tokens = len(request.token_ids)
        cached: list[int] = []
        if self.pool.enable_prefix_caching and not request.wants_prompt_logprobs:
            extend_block_hashes(request.block_hashes, request.token_ids, self.block_size)
            # the last token is always computed: its logits are what the step is for
            cached = self.pool.match(request.block_hashes, (num_tokens - 1) // self.block_size)
        num_cached = len(cached) * self.block_size
        num_new = num_tokens - num_cached
        if num_new > budget:
            if not self.chunked_prefill:
                return 0
            num_new = budget
        num_new = self._limit_logits(request, num_new, rows)
        missing = -(-num_tokens // self.block_size) - len(cached)
        if missing > self.pool.num_free - self.pool.num_free_in(cached) - promised:
            return 0
        self.pool.share(cached)
        num_blocks = -(-(num_cached + num_new) // self.block_size)
        request.block_ids = cached + [self.pool.allocate() for _ in range(num_blocks - len(cached))]
        request.num_computed_tokens = num_cached
        if not request.output_token_ids:
            request.num_cached_tokens = num_cached
        request.status = RequestStatus.RUNNING
        return num_new
