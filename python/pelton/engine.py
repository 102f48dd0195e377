"""The step loop: requests in, tokens out.

The engine knows a runner (plan -> logits), a scheduler (requests -> plan), a sampler (logits -> tokens) and maybe a
tokenizer (tokens -> text), and nothing of models or tensors' contents.

Where the runner is a device that works while the host goes on, the engine runs one step ahead: when all that the next
step needs and the host lacks are the last step's tokens, it is started with them as they lie on the device, and the
host reads them (texts, ends, stop strings) while that step runs. A request that proves to have ended by then has a
row in it that nobody looks at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pelton.errors import CapacityError, InvalidValueError, ModelOutputError, PeltonError, PromptError
from pelton.outputs import CompletionOutput, Logprob, RequestOutput
from pelton.request import Request, RequestStatus
from pelton.sampling import (
    Sampled,
    Sampler,
    SamplingParams,
    TokenLogprobs,
    request_seed,
    send,
    token_logprobs,
)
from pelton.scheduler import Scheduler, StepPlan

__all__ = ["Engine", "RequestGroup", "Runner"]

logger = logging.getLogger(__name__)

#: Rows of logits that one step gives to prompt_logprobs take at most this much memory.
_PROMPT_LOGITS_BYTES = 64 * 2**20


class Runner(Protocol):
    """What executes a plan."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the host goes on, so that steps should be started early."""
        ...

    def execute(self, plan: StepPlan, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Run the copies, then compute the plan's tokens; fp32 logits [sum of num_logits, vocab_size], in order.

        `tokens` (int64, on the device) are the requests' new tokens, one each, where the requests lack them.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was started. `requests`: whose each sampled row is; `forks`: parents and their new siblings."""

    plan: StepPlan
    requests: list[Request]
    forks: list[tuple[Request, list[Request]]]
    sampled: Sampled


class RequestGroup:
    """A prompt and its `n` completions: what the caller sees of them."""

    __slots__ = ("error", "num_unfinished", "prompt", "request_id", "requests", "streamed", "streaming")

    def __init__(self, request_id: str, prompt: str | None, first: Request, streaming: bool = False) -> None:
        self.request_id = request_id
        self.prompt = prompt
        #: the completions that exist: before the first token it is one
        self.requests: list[Request] = [first]
        self.num_unfinished = first.params.n
        #: text is wanted with every token, not only in the end
        self.streaming = streaming
        #: why the group ended early, if the caller must know
        self.error: PeltonError | None = None
        #: per completion: text parts and tokens that a stream has given out; None: its end, too
        self.streamed: list[tuple[int, int] | None] = []

    @property
    def first(self) -> Request:
        return self.requests[0]

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def output(self) -> RequestOutput:
        """Everything so far (lists are copies)."""
        return self._request_output([self._completion(request, 0, 0) for request in self.requests])

    def delta(self) -> RequestOutput | None:
        """What is new since the last call: completions with new tokens, text or an end. None if nothing is."""
        completions = []
        for place, request in enumerate(self.requests):
            if place == len(self.streamed):
                self.streamed.append((0, 0))
            given = self.streamed[place]
            now = (len(request.text_parts), len(request.output_token_ids))
            if given is None or (given == now and not request.is_finished):
                continue
            completions.append(self._completion(request, *given))
            self.streamed[place] = None if request.is_finished else now
        return self._request_output(completions) if completions else None

    def _request_output(self, completions: list[CompletionOutput]) -> RequestOutput:
        first = self.first
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=completions,
            finished=self.finished,
            prompt_logprobs=None if first.prompt_logprobs is None else list(first.prompt_logprobs),
            num_cached_tokens=first.num_cached_tokens,
        )

    @staticmethod
    def _completion(request: Request, num_parts: int, num_tokens: int) -> CompletionOutput:
        return CompletionOutput(
            index=request.index,
            text="".join(request.text_parts[num_parts:]),
            token_ids=request.output_token_ids[num_tokens:],
            cumulative_logprob=request.cumulative_logprob,
            logprobs=None if request.logprobs is None else request.logprobs[num_tokens:],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


class Engine:
    """Runs requests over one runner.

    Args:
        runner: executes plans; owns the KV cache.
        tokenizer: makes text of tokens; None: text is "" and stop strings are refused.
        eos_token_ids: ids that end a request unless it ignores them.
        seed: base of the seeds of requests that have none of their own.
        max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching, enable_chunked_prefill: see
            `Scheduler`.
        new_detokenizer: (tokenizer, prompt ids, params) -> incremental detokenizer.

    Raises:
        CapacityError: the KV cache cannot hold one sequence of max_model_len tokens.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer: Any = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        new_detokenizer: Callable[..., Any] | None = None,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.seed = seed
        self.vocab_size = runner.vocab_size
        # Configs say -1, or an id of the tokenizer's that the embedding lacks: as an index into the logits it
        # would be another request's token.
        self.eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < self.vocab_size)
        self.scheduler = Scheduler(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            max_logits_rows=max(16, _PROMPT_LOGITS_BYTES // (4 * self.vocab_size)),
        )
        self.sampler = Sampler()
        self._new_detokenizer = new_detokenizer
        self._groups: dict[str, RequestGroup] = {}
        self._ahead: _Flight | None = None
        self._num_added = 0
        self._decoded: dict[int, str] = {}
        self._is_stepping = False
        self._abort_after_step: list[RequestGroup] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, what: str = "the prompt"
    ) -> None:
        """Raise what `add_request` would raise, adding nothing. O(prompt).

        Raises:
            PromptError: the prompt is empty, not shorter than max_model_len, or has ids outside of the vocabulary.
            InvalidValueError: ids or counts in `params` outside of the vocabulary; stop strings without tokenizer.
        """
        if not prompt_token_ids:
            raise PromptError(f"{what} is empty: it must have at least one token")
        for token_id in prompt_token_ids:
            if type(token_id) is not int:
                raise PromptError(f"{what}: token ids must be integers, got {token_id!r}")
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.vocab_size:
            raise PromptError(
                f"{what}: {low if low < 0 else high} is not a token id of this model (0 to {self.vocab_size - 1})"
            )
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptError(
                f"{what} has {len(prompt_token_ids)} tokens, and prompt and output together have at most "
                f"max_model_len={self.max_model_len}: shorten it to at most {self.max_model_len - 1} tokens, or "
                "raise max_model_len if the model allows it"
            )
        params.check_vocabulary(self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidValueError(
                "stop strings need a tokenizer, and there is none (skip_tokenizer_init): use stop_token_ids"
            )

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        streaming: bool = False,
        checked: bool = False,
    ) -> RequestGroup:
        """Queue a request.

        Args:
            prompt_token_ids, params: the prompt and what to do with it.
            request_id: for the output; None: a number.
            prompt: the text of the prompt, for the output.
            streaming: text is wanted with every token; else it is made in the end, unless stop strings need it.
            checked: `check` was called.

        Raises:
            what `check` raises; InvalidValueError: an unfinished request has this id.
        """
        if not checked:
            self.check(prompt_token_ids, params)
        number = self._num_added
        if request_id is None:
            request_id = str(number)
        if request_id in self._groups:
            raise InvalidValueError(f"request_id {request_id!r} is in use by an unfinished request")
        self._num_added += 1
        seed = request_seed(self.seed, 1 + number) if params.seed is None else request_seed(params.seed)
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            arrival=number,
        )
        group = request.group = RequestGroup(request_id, prompt, request, streaming)
        self._start_text(request)
        self._groups[request_id] = group
        self.scheduler.add(request)
        return group

    def abort(self, groups: Iterable[RequestGroup]) -> None:
        """End these groups where they are (finish_reason "abort"); those that are finished stay as they are."""
        if self._is_stepping:
            # the garbage collector closes a stream that nobody holds any more, and may do so in the middle of a step
            self._abort_after_step.extend(groups)
            return
        for group in groups:
            if self._groups.get(group.request_id) is not group:
                continue
            del self._groups[group.request_id]
            unfinished = [request for request in group.requests if not request.is_finished]
            self.scheduler.finish(unfinished)
            for request in unfinished:
                self._end(request, "abort")
            group.num_unfinished = 0

    def reset(self, error: PeltonError | None = None) -> None:
        """Abort everything and forget the cache: for when a step was interrupted, wherever that was."""
        groups = list(self._groups.values())
        self._groups = {}
        self._ahead = None
        self.scheduler.reset()
        for group in groups:
            group.error = group.error or error
            group.num_unfinished = 0
            for request in group.requests:
                request.status = RequestStatus.FINISHED
                request.finish_reason = request.finish_reason or "abort"

    def step(self) -> list[RequestGroup]:
        """Take in one step, and maybe start the one after it; return the groups that got tokens.

        If it raises (an error of the runner, CapacityError when a GPU's memory runs out, Ctrl-C), all requests are
        aborted, the cache is forgotten, and the engine takes new requests.
        """
        self._is_stepping = True
        try:
            with torch.inference_mode():
                return self._step()
        except BaseException as error:
            self.reset(PeltonError(f"the engine dropped this request because a step failed: {error!r}"))
            if isinstance(error, torch.OutOfMemoryError):
                raise CapacityError(
                    f"out of GPU memory in a step ({error}): lower gpu_memory_utilization or kv_cache_memory to leave "
                    "more room, or max_num_seqs, or end other processes on this GPU"
                ) from error
            raise
        finally:
            self._is_stepping = False
            if self._abort_after_step:
                groups, self._abort_after_step = self._abort_after_step, []
                self.abort(groups)

    def _step(self) -> list[RequestGroup]:
        flight, self._ahead = self._ahead, None
        if flight is not None and all(request.is_finished for request in flight.requests):
            flight = None  # all of it was work for nothing
        if flight is None:
            flight = self._start()
        if flight is None:
            return []
        if self.runner.runs_ahead:
            self._ahead = self._start_ahead(flight)
        groups = self._take(flight)
        if self._ahead is not None:
            self.scheduler.settle(self._ahead.plan)
        return groups

    def _start(self) -> _Flight | None:
        """Start the next step; None if it gives no tokens."""
        plan = self.scheduler.schedule()
        if not plan.scheduled:
            if self.scheduler.has_unfinished:
                raise RuntimeError(
                    "scheduler: nothing to compute although requests are unfinished (a bug in Pelton)"
                )
            return None
        logits = self.runner.execute(plan)
        self.scheduler.update(plan)

        rows: list[int] = []
        requests: list[Request] = []
        forks: list[tuple[Request, list[Request]]] = []
        row = 0
        for item in plan.scheduled:
            if item.num_logits == 0:
                continue
            request = item.request
            if request.prompt_logprobs is not None and request.wants_prompt_logprobs:
                self._take_prompt_logprobs(request, logits, row, item.num_logits)
            row += item.num_logits
            if request.num_computed_tokens == len(request.token_ids):
                rows.append(row - 1)
                requests.append(request)
                if request.siblings:
                    children = self._new_siblings(request)
                    forks.append((request, children))
                    rows.extend([row - 1] * len(children))
                    requests.extend(children)
        if not requests:
            return None
        if len(rows) != logits.shape[0] or forks:
            logits = logits.index_select(0, send(rows, logits.device))
        return _Flight(plan, requests, forks, self.sampler.start(logits, requests))

    def _start_ahead(self, flight: _Flight) -> _Flight | None:
        """Start the step after `flight`, whose tokens the host does not know; None if that cannot be."""
        if flight.forks:
            return None
        plan = self.scheduler.schedule_ahead(flight.plan)
        if plan is None:
            return None
        requests = [item.request for item in plan.scheduled]
        tokens = flight.sampled.tokens
        if len(requests) != len(flight.requests):
            places = {request: row for row, request in enumerate(flight.requests)}
            tokens = tokens.index_select(0, send([places[request] for request in requests], tokens.device))
        logits = self.runner.execute(plan, tokens)
        self.scheduler.update(plan)
        return _Flight(plan, requests, [], self.sampler.start(logits, requests, num_pending=1))

    def _take(self, flight: _Flight) -> list[RequestGroup]:
        """Wait for the tokens of a step and give them to the requests; return the groups that got some."""
        token_ids, logprobs, valid = flight.sampled.result()
        for parent, children in flight.forks:
            self.scheduler.fork(parent, children)
        ended: list[Request] = []
        taken: list[Request] = []
        for request, token_id, entry, is_valid in zip(
            flight.requests, token_ids, logprobs, valid, strict=True
        ):
            if request.is_finished:  # it ended, or was aborted, after the step was started
                continue
            taken.append(request)
            if not is_valid:
                self._refuse(request)
                ended.append(request)
                continue
            request.append(token_id)
            if entry is not None and request.logprobs is not None:
                request.logprobs.append(self._logprob_dict(entry))
                request.cumulative_logprob = (request.cumulative_logprob or 0.0) + entry.logprobs[0]
            if self._is_ended(request, token_id):
                ended.append(request)
        if ended:
            self.scheduler.finish(ended)
            for request in ended:
                if request.group.finished:
                    self._groups.pop(request.group.request_id, None)
        return list(dict.fromkeys(request.group for request in taken))

    def _new_siblings(self, first: Request) -> list[Request]:
        """The other completions of a prompt that was just computed."""
        children = []
        for index in range(1, first.siblings + 1):
            child = Request(
                f"{first.request_id}-{index}",
                first.prompt_token_ids,
                first.params,
                max_model_len=self.max_model_len,
                eos_token_ids=self.eos_token_ids,
                seed=request_seed(first.seed, index),
                arrival=first.arrival,
                index=index,
            )
            child.prompt_logprobs = None  # the first has them
            child.group = first.group
            self._start_text(child)
            children.append(child)
        first.siblings = 0
        first.group.requests.extend(children)
        return children

    def _take_prompt_logprobs(self, request: Request, logits: torch.Tensor, row: int, num_rows: int) -> None:
        """Rows of prompt positions: that of position p speaks about token p + 1. The last may be the next token's."""
        start = request.num_prompt_logprobs
        tokens = request.prompt_token_ids[start + 1 : start + 1 + num_rows]
        count = request.params.prompt_logprobs
        assert count is not None and request.prompt_logprobs is not None
        for entry in token_logprobs(logits[row : row + len(tokens)], tokens, [count] * len(tokens)):
            request.prompt_logprobs.append(self._logprob_dict(entry))
        request.num_prompt_logprobs += len(tokens)

    def _logprob_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        return {
            token_id: Logprob(logprob, rank, self._decode(token_id))
            for token_id, logprob, rank in zip(*entry, strict=True)
        }

    def _decode(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self._decoded.get(token_id)
        if text is None:
            text = self._decoded[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _is_ended(self, request: Request, token_id: int) -> bool:
        """Whether the token that was just appended ends the request; notes the reason and the text."""
        if token_id in request.eos_token_ids or token_id in request.stop_token_ids:
            # the caller's ids are a reason to name, also when they are the model's own
            named = token_id if token_id in request.stop_token_ids else None
            self._end(request, "stop", named, last_is_hidden=not request.params.include_stop_str_in_output)
            return True
        if request.detokenizer is not None:
            delta = request.detokenizer.append(token_id)
            if delta:
                request.text_parts.append(delta)
            matched = request.detokenizer.stop_reason
            if matched is not None:
                self._end(request, "stop", matched)
                return True
        if len(request.token_ids) >= request.max_total_tokens:
            self._end(request, "length")
            return True
        return False

    def _refuse(self, request: Request) -> None:
        where = len(request.token_ids) - 1
        request.group.error = request.group.error or ModelOutputError(
            f"request {request.group.request_id}: the model's logits at position {where} are NaN or infinite, so no "
            "token can be chosen: try dtype='float32', and check the model's files"
        )
        self._end(request, "abort")

    def _start_text(self, request: Request) -> None:
        """Make a detokenizer, if text is wanted before the end."""
        if self._new_detokenizer is not None and (request.params.stop or request.group.streaming):
            request.detokenizer = self._new_detokenizer(
                self.tokenizer, request.prompt_token_ids, request.params
            )

    def _end(
        self,
        request: Request,
        reason: str,
        stop_reason: int | str | None = None,
        last_is_hidden: bool = False,
    ) -> None:
        """Note why a request ends, and complete its text. The scheduler is told by the caller."""
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.group.num_unfinished -= 1
        if self._new_detokenizer is None:
            return
        detokenizer = request.detokenizer
        if detokenizer is None:
            detokenizer = self._new_detokenizer(self.tokenizer, request.prompt_token_ids, request.params)
            tokens = request.output_token_ids[:-1] if last_is_hidden else request.output_token_ids
            request.text_parts.extend(detokenizer.append(token_id) for token_id in tokens)
        elif reason == "stop" and isinstance(stop_reason, int | None) and not last_is_hidden:
            request.text_parts.append(detokenizer.append(request.output_token_ids[-1]))
        request.text_parts.append(detokenizer.flush())
        request.detokenizer = None
