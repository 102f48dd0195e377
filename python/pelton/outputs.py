"""What a request gives back, in the shapes that people know from this field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability under the model's raw logits (before any sampling option)."""

    logprob: float
    #: 1 for the most likely token of its position
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    In a stream of deltas `text`, `token_ids` and `logprobs` hold what is new since the last one.
    """

    index: int
    text: str
    #: with the token that ended the request (eos, stop id, or the one that completed a stop string)
    token_ids: list[int]
    cumulative_logprob: float | None = None
    #: per token of `token_ids`: the sampled token first, then the most likely ones
    logprobs: list[dict[int, Logprob]] | None = None
    #: "stop" | "length" | "abort", None while unfinished
    finish_reason: str | None = None
    #: the stop string or stop id that ended it; None for eos
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    #: per prompt token, the first is None (nothing comes before it)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    #: prompt tokens whose keys and values came from the prefix cache
    num_cached_tokens: int = 0
