"""A request and its progress.

Progress is one number: `num_computed_tokens` catches up with `num_tokens`. A prompt that is read for the first
time, a prompt read in chunks, a decode step and a request that starts over after preemption are all the same
thing to the scheduler: tokens that are known and not computed yet.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pelton.sampling import SamplingParams

__all__ = ["Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence of tokens: a prompt and what was generated for it.

    `n > 1` completions of a prompt are `n` requests with the same `prompt_token_ids`; those with `index > 0` come
    into being when the prompt of the first is computed, and share its blocks (`siblings` says how many).
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_ids",
        "cumulative_logprob",
        "detokenizer",
        "eos_token_ids",
        "finish_reason",
        "group",
        "index",
        "logprobs",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "penalty_state",
        "plain_greedy",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "seed",
        "siblings",
        "status",
        "stop_reason",
        "stop_token_ids",
        "text_parts",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        arrival: int = 0,
        index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.arrival = arrival
        self.params = params
        self.seed = seed
        self.prompt_token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.output_token_ids: list[int] = []
        #: prompt and output in one list, so that nobody has to join them in a step
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_ids: list[int] = []
        #: chained hash of each full block of `token_ids` (those known so far)
        self.block_hashes: list[bytes] = []
        self.status = RequestStatus.WAITING
        self.siblings = params.n - 1 if index == 0 else 0

        limit = max_model_len
        if params.max_tokens is not None:
            limit = min(limit, self.num_prompt_tokens + params.max_tokens)
        self.max_total_tokens = limit
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        #: the next token is the argmax of the raw logits and nothing else is asked for
        self.plain_greedy = params.is_plain_greedy

        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        #: deltas of the text, in order; what a detokenizer still holds back is not in it
        self.text_parts: list[str] = []
        self.logprobs: list[Any] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.prompt_logprobs: list[Any] | None = None if params.prompt_logprobs is None else [None]
        #: prompt positions whose logits were seen (position p speaks about token p + 1)
        self.num_prompt_logprobs = 0
        #: the RequestGroup that it belongs to (None outside of an engine)
        self.group: Any = None
        self.detokenizer: Any = None
        self.penalty_state: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while logits of prompt positions are still to be computed."""
        return self.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens}, blocks={self.block_ids})"
        )
