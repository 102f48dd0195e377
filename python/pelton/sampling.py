"""How the next token is chosen: `SamplingParams`, and the sampler that applies them to a batch of logits.

What happens to a row of logits, in this order:

1. `logit_bias` is added;
2. while fewer than `min_tokens` tokens are generated, eos and the stop ids are masked;
3. `repetition_penalty` (tokens of prompt and output: positive logits are divided by it, others multiplied), then
   `frequency_penalty` times the count and `presence_penalty` (tokens of the output alone) are subtracted;
4. `temperature` 0 takes the argmax (of equal logits the lowest id); else the logits are divided by it;
5. `min_p` keeps tokens with at least `min_p` times the probability of the most likely one;
6. `top_k` keeps exactly the k most likely of these (of equal logits the lowest ids);
7. `top_p` keeps the fewest most likely of these whose probabilities, relative to what steps 5 and 6 kept when
   `top_k` is on, reach `top_p` (again the lowest ids of equals; 1e-6 counts as reached);
8. one token is drawn from what is left.

A draw is a pure function of the request's seed and the number of tokens generated so far, so that a request
gives the same tokens alone, in a batch, and after preemption. On a GPU a kernel does steps 4 to 8
(`pelton.ops.sample`): draws are the same numbers as on the CPU and choose the same tokens from the same logits,
unless one lies so close to the edge between two tokens, or a token so close to the edge of what top_p or min_p
keeps, that the last bits of float32 decide. (The logits themselves differ in their last bits between devices.)
Log-probabilities that are reported are those of the raw logits, before step 1.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from pelton.errors import InvalidValueError, UnknownOptionError, did_you_mean

if TYPE_CHECKING:
    import torch

    from pelton.request import Request

__all__ = ["Sampled", "Sampler", "SamplingParams", "TokenLogprobs"]

#: Temperatures below this are greedy: dividing by them overflows, and nothing but the argmax has any weight.
GREEDY_BELOW = 1e-5
# Logits are float32. Within these limits none becomes infinite by what is done to it.
_MAX_BIAS = 1e30
_MAX_PENALTY = 1e6
_MIN_SCALE = 1e-30

# Where names from neighbouring libraries and other parts of the interface have their place.
_ELSEWHERE = {
    **dict.fromkeys(
        ("batch_size", "max_batch_size", "max_num_seqs"),
        "the number of sequences run at once is LLM(max_num_seqs=...)",
    ),
    **dict.fromkeys(
        ("max_model_len", "max_seq_len", "n_ctx", "context_length"),
        "the length limit of prompt and output together is LLM(max_model_len=...)",
    ),
    **dict.fromkeys(
        (
            "max_num_batched_tokens",
            "block_size",
            "dtype",
            "enable_prefix_caching",
            "kv_cache_memory",
            "gpu_memory_utilization",
        ),
        "it is an option of LLM(...)",
    ),
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "max_completion_tokens", "n_predict"), "the name here is max_tokens"
    ),
    **dict.fromkeys(("min_new_tokens", "min_length"), "the name here is min_tokens"),
    "do_sample": "temperature=0 is greedy, anything above samples",
    **dict.fromkeys(("num_return_sequences", "best_of", "num_completions"), "the number of completions is n"),
    **dict.fromkeys(
        ("eos_token_id", "stop_ids", "eos_token_ids"), "ids that end a request are stop_token_ids"
    ),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "texts that end a request are stop"),
    **dict.fromkeys(("random_seed", "generator"), "the name here is seed"),
    "top_logprobs": "the number of log-probabilities per token is logprobs",
    "repeat_penalty": "the name here is repetition_penalty",
    **dict.fromkeys(("num_beams", "use_beam_search", "beam_width"), "beam search is not implemented"),
    "stream": "streaming is LLM.generate_stream(...)",
    "use_tqdm": "it is an argument of LLM.generate(...)",
    "enable_thinking": "options of the chat template go to LLM.chat(...)",
}


def _fail(name: str, value: object, must: str) -> InvalidValueError:
    return InvalidValueError(f"{name} must be {must}, got {value!r}")


def _integer(name: str, value: object, must: str) -> int:
    # numpy integers are welcome, bool (an int to Python) is not
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _fail(name, value, must)
    return int(value)


def _real(name: str, value: object, must: str, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _fail(name, value, must)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high):
        raise _fail(name, value, must)
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise _fail(name, value, "True or False")
    return bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What to generate for a prompt and how. Every value is checked here, at once; all are keyword-only.

    The defaults are the field's: temperature 1 and at most 16 tokens. Values of the model's
    generation_config.json are never mixed in (`LLM.get_default_sampling_params()` gives those).

    Raises:
        InvalidValueError: a value out of range or of the wrong type, NaN and infinity included.
        UnknownOptionError: an option that does not exist here; the message says where it lives.
    """

    n: int = 1
    """Completions per prompt; they share the prompt's KV blocks."""
    temperature: float = 1.0
    """0 (anything below 1e-5) is greedy; above, logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: off."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability, in (0, 1]; 1: off."""
    min_p: float = 0.0
    """Keep tokens with at least this part of the most likely token's probability, in [0, 1]; 0: off."""
    repetition_penalty: float = 1.0
    """Greater than 0 (1e-6 to 1e6); above 1 makes tokens of prompt and output less likely."""
    presence_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; subtracted from the logits of output tokens for each time they occur."""
    seed: int | None = None
    """Makes the request reproducible on its own. None: drawn from the engine's seed and the request's number."""
    stop: str | Sequence[str] | None = ()
    """Strings that end the request; the text is cut before the earliest match."""
    stop_token_ids: Sequence[int] | None = ()
    """Token ids that end the request; the id is in `token_ids`, its text is not in `text`."""
    include_stop_str_in_output: bool = False
    """Leave what ended the request in the text."""
    ignore_eos: bool = False
    """Go on after the model's eos tokens (`stop_token_ids` still end)."""
    max_tokens: int | None = 16
    """Most tokens to generate, at least 1. None: up to the engine's max_model_len."""
    min_tokens: int = 0
    """Until this many are generated eos and stop ids cannot be chosen, and stop strings do not end."""
    logprobs: int | None = None
    """Report log-probabilities of each generated token and of this many most likely ones; -1: of all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt (which is then computed in full, past the prefix cache)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> number added to its logit, from -1e30 to 1e30."""

    def __new__(cls, *args: object, **options: object) -> Self:
        # The dataclass's own complaint about a wrong name would not say where the option lives.
        if args:
            raise UnknownOptionError(
                f"SamplingParams takes keywords only, such as SamplingParams(temperature={args[0]!r})"
            )
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, known)
                raise UnknownOptionError(f"SamplingParams has no option {name!r}{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, "an integer of at least 1"))
        if self.n < 1:
            raise _fail("n", self.n, "an integer of at least 1")
        put("temperature", _real("temperature", self.temperature, "a finite number of at least 0", 0.0))
        must = "an integer of at least 1, or 0 or -1 for off"
        put("top_k", _integer("top_k", self.top_k, must))
        if self.top_k < -1:
            raise _fail("top_k", self.top_k, must)
        put("top_p", _real("top_p", self.top_p, "in (0, 1]", 0.0, 1.0))
        if self.top_p == 0.0:
            raise _fail("top_p", self.top_p, "in (0, 1]")
        put("min_p", _real("min_p", self.min_p, "in [0, 1]", 0.0, 1.0))
        must = f"a number greater than 0, from {1 / _MAX_PENALTY:g} to {_MAX_PENALTY:g}"
        put(
            "repetition_penalty",
            _real("repetition_penalty", self.repetition_penalty, must, 1 / _MAX_PENALTY, _MAX_PENALTY),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, _real(name, getattr(self, name), "in [-2, 2]", -2.0, 2.0))
        if self.seed is not None:
            must = "None or an integer from -2^63 to 2^64 - 1"
            put("seed", _integer("seed", self.seed, must))
            if not -(2**63) <= self.seed < 2**64:
                raise _fail("seed", self.seed, must)

        put("stop", self._checked_stop(self.stop))
        put("stop_token_ids", self._checked_stop_ids(self.stop_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            put(name, _flag(name, getattr(self, name)))

        if self.max_tokens is not None:
            must = "None or an integer of at least 1"
            put("max_tokens", _integer("max_tokens", self.max_tokens, must))
            if self.max_tokens < 1:
                raise _fail("max_tokens", self.max_tokens, must)
        put("min_tokens", _integer("min_tokens", self.min_tokens, "an integer of at least 0"))
        if self.min_tokens < 0:
            raise _fail("min_tokens", self.min_tokens, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower one or raise the other"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                must = "None, an integer of at least 0, or -1 for the whole vocabulary"
                put(name, _integer(name, value, must))
                if getattr(self, name) < -1:
                    raise _fail(name, value, must)
        put("logit_bias", self._checked_bias(self.logit_bias))

    @staticmethod
    def _checked_stop(stop: object) -> tuple[str, ...]:
        if stop is None:
            return ()
        if not isinstance(stop, str) and not isinstance(stop, Iterable):
            raise _fail("stop", stop, "a string or a list of strings")
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in texts:
            if not isinstance(text, str):
                raise _fail("stop", text, "a string or a list of strings")
            if not text:
                raise InvalidValueError("stop must not hold the empty string: it would match everywhere")
        return tuple(dict.fromkeys(texts))

    @staticmethod
    def _checked_stop_ids(ids: object) -> tuple[int, ...]:
        if ids is None:
            return ()
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise _fail("stop_token_ids", ids, "a list of token ids")
        checked = tuple(dict.fromkeys(_integer("stop_token_ids", i, "a list of token ids") for i in ids))
        for token_id in checked:
            if token_id < 0:
                raise InvalidValueError(f"stop_token_ids: {token_id} is not a token id (they start at 0)")
        return checked

    @staticmethod
    def _checked_bias(bias: object) -> dict[int, float] | None:
        if bias is None:
            return None
        if not isinstance(bias, Mapping):
            raise _fail("logit_bias", bias, "a mapping from token id to number")
        checked = {
            _integer("logit_bias", token_id, "a mapping from token id (an integer) to number"): _real(
                f"logit_bias[{token_id}]",
                value,
                f"a finite number from {-_MAX_BIAS:g} to {_MAX_BIAS:g}",
                -_MAX_BIAS,
                _MAX_BIAS,
            )
            for token_id, value in bias.items()
        }
        for token_id in checked:
            if token_id < 0:
                raise InvalidValueError(f"logit_bias: {token_id} is not a token id (they start at 0)")
        return checked or None

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidValueError for a token id or a count that the model's vocabulary does not have."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids or ()),
            ("logit_bias", self.logit_bias or ()),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidValueError(
                        f"{name}: {token_id} is not a token id of this model (0 to {vocab_size - 1})"
                    )
        if self.min_tokens and len(self.stop_token_ids or ()) == vocab_size:
            raise InvalidValueError(
                f"stop_token_ids are all {vocab_size} tokens of this model, so min_tokens={self.min_tokens} leaves "
                "none to choose"
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise InvalidValueError(
                    f"{name}={count} is more than the model's vocabulary of {vocab_size} (-1 asks for all of it)"
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """The sampler writes to the row."""
        return not self.is_greedy or self.has_penalties or self.logit_bias is not None

    @property
    def is_plain_greedy(self) -> bool:
        """The argmax of the raw logits and nothing else (once min_tokens is reached)."""
        return self.is_greedy and self.logprobs is None and not self.has_penalties and self.logit_bias is None


# help() and editors show the options, not the catch-all of __new__
SamplingParams.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(SamplingParams)
    ]
)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one position: the token in question first, then the most likely ones in order."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a well-mixed bijection of 64-bit numbers."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def request_seed(seed: int, stream: int = 0) -> int:
    """Return the 64-bit seed of stream number `stream` (completion index, or request number) under `seed`."""
    return mix64(mix64(seed) + _GAMMA * stream)


def uniform(seed: int, counter: int) -> float:
    """Return draw number `counter` of the generator `seed`, uniform in [0, 1) with 52 bits."""
    return (mix64(seed + _GAMMA * (counter + 1)) >> 12) * 2.0**-52


class _PenaltyState:
    """The distinct tokens that a request has seen and how often its output has them; grows token by token."""

    __slots__ = ("counts", "ids", "num_seen", "places", "size")

    def __init__(self, request: Request) -> None:
        params = request.params
        prompt = dict.fromkeys(request.prompt_token_ids) if params.repetition_penalty != 1.0 else {}
        self.size = len(prompt)
        self.ids = np.zeros(max(64, 2 * self.size), dtype=np.int64)
        self.ids[: self.size] = list(prompt)
        self.counts = np.zeros(len(self.ids), dtype=np.float32)
        self.places = {token_id: place for place, token_id in enumerate(prompt)}
        self.num_seen = 0

    def catch_up(self, output_token_ids: list[int]) -> None:
        while self.num_seen < len(output_token_ids):
            token_id = output_token_ids[self.num_seen]
            self.num_seen += 1
            place = self.places.get(token_id)
            if place is None:
                place = self.size
                if place == len(self.ids):
                    self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
                    self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
                self.places[token_id] = place
                self.ids[place] = token_id
                self.size += 1
            self.counts[place] += 1.0


_CHUNK = 128


#: token ids, log-probabilities (None where not asked for), and whether each row could be sampled: False for a row with
#: NaN or without a finite maximum, whose token means nothing
Chosen = tuple[list[int], "list[TokenLogprobs | None]", list[bool]]


class Sampled:
    """What was chosen, perhaps still on its way from the device."""

    def __init__(self, result: Chosen | Callable[[], Chosen], tokens: torch.Tensor | None = None) -> None:
        self._result = result
        self._tokens = tokens

    @property
    def tokens(self) -> torch.Tensor:
        """The token ids on the device, int64 [rows]; they can be used there before the host has them."""
        if self._tokens is None:
            import torch

            self._tokens = torch.tensor(self.result()[0], dtype=torch.int64, device="cpu")
        return self._tokens

    def result(self) -> Chosen:
        """Wait for the device, if need be."""
        if callable(self._result):
            self._result = self._result()
        return self._result


class Sampler:
    """Chooses one token per row of logits. Holds no state of its own: what a request needs lies on the request."""

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Chosen:
        """Choose the next token of each request, and wait for it (see `start`)."""
        return self.start(logits, requests).result()

    def start(self, logits: torch.Tensor, requests: Sequence[Request], num_pending: int = 0) -> Sampled:
        """Choose the next token of each request.

        Args:
            logits: [len(requests), vocab_size] fp32. Written to.
            requests: whose row each is.
            num_pending: how many tokens each request has beyond those that it knows of. Such requests have no
                penalties, which would have to count these tokens.
        """
        num_output_tokens = [len(request.output_token_ids) + num_pending for request in requests]
        unfinished_minimum = [
            count < request.params.min_tokens
            for count, request in zip(num_output_tokens, requests, strict=True)
        ]
        if _has_kernel(logits):
            return self._start_kernel(logits, requests, num_output_tokens, unfinished_minimum)
        return Sampled(self._sample_by_torch(logits, requests, num_output_tokens, unfinished_minimum))

    def _sample_by_torch(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        num_output_tokens: list[int],
        unfinished_minimum: list[bool],
    ) -> Chosen:
        params = [request.params for request in requests]
        if not any(unfinished_minimum) and all(request.plain_greedy for request in requests):
            maxima, ids = _argmax(logits)
            return ids, [None] * len(ids), [math.isfinite(value) for value in maxima]

        wanted = [i for i, p in enumerate(params) if p.logprobs is not None]
        raw = _rows(logits, wanted) if wanted else None
        if (
            raw is not None
            and raw is logits
            and (any(unfinished_minimum) or any(p.changes_logits for p in params))
        ):
            raw = logits.clone()
        self._adjust(logits, requests, unfinished_minimum)

        maxima, ids = _argmax(logits)
        valid = [math.isfinite(value) for value in maxima]
        random = [i for i, p in enumerate(params) if valid[i] and not p.is_greedy]
        if random:
            draws = [uniform(requests[i].seed, num_output_tokens[i]) for i in random]
            tops = [maxima[i] for i in random]
            drawn = _sample_rows(_rows(logits, random), tops, [params[i] for i in random], draws)
            for i, token_id in zip(random, drawn, strict=True):
                ids[i] = token_id

        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        if raw is not None:
            found = token_logprobs(raw, [ids[i] for i in wanted], [params[i].logprobs or 0 for i in wanted])
            for i, entry in zip(wanted, found, strict=True):
                logprobs[i] = entry
        return ids, logprobs, valid

    def _start_kernel(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        num_output_tokens: list[int],
        unfinished_minimum: list[bool],
    ) -> Sampled:
        """All work is queued on the device, the copy to the host included; nothing is waited for."""
        import torch

        from pelton import ops

        params = [request.params for request in requests]
        wanted = [i for i, p in enumerate(params) if p.logprobs is not None]
        raw = _rows(logits, wanted) if wanted else None
        if any(unfinished_minimum) or any(p.has_penalties or p.logit_bias for p in params):
            if raw is not None and raw is logits:
                raw = raw.clone()
            self._adjust(logits, requests, unfinished_minimum)
        if all(p.is_greedy for p in params):
            tokens = ops.greedy_sample(logits)
        else:
            tokens = ops.sample(logits, **_kernel_arguments(requests, num_output_tokens, logits.device))
        num_top = [params[i].logprobs or 0 for i in wanted]
        packed = None
        if raw is not None:
            chosen = _rows(tokens.unsqueeze(1), wanted).clamp(min=0)
            packed = _packed_logprobs(raw, chosen, num_top).to("cpu", non_blocking=True)
        on_host = tokens.to("cpu", non_blocking=True)  # into pinned memory
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(logits.device))
        vocab_size = logits.shape[1]

        def result() -> Chosen:
            arrived.synchronize()
            ids = on_host.tolist()
            logprobs: list[TokenLogprobs | None] = [None] * len(ids)
            if packed is not None:
                wanted_ids = [max(ids[i], 0) for i in wanted]
                found = _unpacked_logprobs(packed, wanted_ids, num_top, vocab_size)
                for i, entry in zip(wanted, found, strict=True):
                    logprobs[i] = entry
            return [max(token_id, 0) for token_id in ids], logprobs, [token_id >= 0 for token_id in ids]

        return Sampled(result, tokens)

    @staticmethod
    def _adjust(logits: torch.Tensor, requests: Sequence[Request], unfinished_minimum: list[bool]) -> None:
        """Bias, min_tokens mask and penalties, in place, in one gather and one scatter over the touched logits."""
        import torch

        vocab_size, device = logits.shape[1], logits.device
        flat = logits.view(-1)
        biased: list[int] = []
        biases: list[float] = []
        masked: list[int] = []
        for row, request in enumerate(requests):
            bias = request.params.logit_bias
            if bias:
                biased += [row * vocab_size + i for i in bias]
                biases += bias.values()
            if unfinished_minimum[row]:
                masked += [row * vocab_size + i for i in request.eos_token_ids | request.stop_token_ids]
        if biased:
            flat.index_add_(0, send(biased, device), send(biases, device, torch.float32))
        if masked:
            flat.index_fill_(0, send(masked, device), -math.inf)

        places: list[Any] = []
        counts: list[Any] = []
        sizes: list[int] = []
        strengths: list[tuple[float, float, float]] = []
        for row, request in enumerate(requests):
            params = request.params
            if not params.has_penalties:
                continue
            state = request.penalty_state
            if state is None:
                state = request.penalty_state = _PenaltyState(request)
            state.catch_up(request.output_token_ids)
            if state.size:
                places.append(state.ids[: state.size] + row * vocab_size)
                counts.append(state.counts[: state.size])
                sizes.append(state.size)
                strengths.append(
                    (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
                )
        if not places:
            return
        index = send(np.concatenate(places), device)
        count = send(np.concatenate(counts), device)
        each = np.repeat(np.array(strengths, dtype=np.float32), sizes, axis=0)
        repetition, frequency, presence = send(each, device).unbind(-1)
        values = flat[index]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[index] = values - frequency * count - presence * (count > 0)


def _has_kernel(logits: torch.Tensor) -> bool:
    """Whether `pelton.ops.sample` takes these logits."""
    if not logits.is_cuda:
        return False
    from pelton import ops

    return ops.backend() in ("cuda", "rocm") and logits.shape[1] <= ops.SAMPLE_MAX_VOCAB


def _kernel_arguments(
    requests: Sequence[Request], num_output_tokens: list[int], device: torch.device
) -> dict[str, torch.Tensor | None]:
    """What `pelton.ops.sample` needs of each request, in one transfer."""
    import torch

    num_rows = len(requests)
    params = [request.params for request in requests]
    host = np.empty((4, num_rows), dtype=np.int64)
    host[0] = np.array([request.seed & _MASK for request in requests], dtype=np.uint64).view(np.int64)
    host[1] = num_output_tokens
    halves = host[2:].view(np.int32).reshape(4, num_rows)
    limit = np.iinfo(np.int32).max
    halves[0] = [min(max(p.top_k, 0), limit) for p in params]
    reals = halves[1:].view(np.float32)
    # float32 has no number for the largest temperatures: infinity stands for them
    with np.errstate(over="ignore"):
        reals[0] = [p.temperature for p in params]
    reals[1] = [p.top_p for p in params]
    reals[2] = [p.min_p for p in params]
    there = send(host, device)
    narrow = there[2:].view(torch.int32).view(4, num_rows)
    return {
        "seeds": there[0],
        "positions": there[1],
        "top_k": narrow[0] if any(p.top_k > 0 for p in params) else None,
        "temperature": narrow[1].view(torch.float32),
        "top_p": narrow[2].view(torch.float32) if any(p.top_p < 1.0 for p in params) else None,
        "min_p": narrow[3].view(torch.float32) if any(p.min_p > 0.0 for p in params) else None,
    }


def send(
    values: Sequence[float] | np.ndarray[Any, Any], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """These values on the device. To a GPU they go from pinned memory, so that the host waits for nothing."""
    import torch

    if isinstance(values, np.ndarray):
        host = torch.from_numpy(values)
    else:  # on the CPU, whatever torch's default device is
        host = torch.tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, send(rows, logits.device))


def _argmax(x: torch.Tensor) -> tuple[list[float], list[int]]:
    """Maxima and the first index of each, per row. NaN counts as the maximum.

    In two passes, since torch's amax over the last dimension is vectorized and its argmax is not (12 times slower
    at 32 x 49152): maxima of chunks, then the position inside of the first chunk that has the row's maximum. For a row or two one call costs less than several.
    """
    import torch

    num_rows, width = x.shape
    if width < 4 * _CHUNK or num_rows < 3:
        values, ids = x.max(dim=-1)
        return values.tolist(), ids.tolist()
    num_chunks, rest = divmod(width, _CHUNK)
    maxima = x[:, : num_chunks * _CHUNK].unflatten(-1, (num_chunks, _CHUNK)).amax(-1)
    if rest:
        maxima = torch.cat((maxima, x[:, num_chunks * _CHUNK :].amax(-1, keepdim=True)), dim=-1)
    # The last, short chunk is read together with the end of the one before, all of which is smaller.
    start = (maxima.argmax(-1, keepdim=True) * _CHUNK).clamp_(max=width - _CHUNK)
    inner = x.gather(1, start + torch.arange(_CHUNK, device=x.device))
    values, place = inner.max(dim=-1)
    return values.tolist(), (start.squeeze(-1) + place).tolist()


def _sample_rows(
    logits: torch.Tensor, maxima: list[float], params: Sequence[SamplingParams], draws: list[float]
) -> list[int]:
    """Draw a token per row from the softmax of logits / temperature, cut by min_p, top_k and top_p.

    `logits` [R, V] fp32 with the rows' `maxima` (finite), overwritten; `draws` uniform in [0, 1).
    """
    width = logits.shape[1]
    with_k = [i for i, p in enumerate(params) if 0 < p.top_k < width]
    with_p = [i for i, p in enumerate(params) if not 0 < p.top_k < width and p.top_p < 1.0]
    whole = [i for i, p in enumerate(params) if not 0 < p.top_k < width and p.top_p >= 1.0]
    ids = [0] * len(params)
    if with_k:
        # The head of the sorted row is enough, and no option changes the order: leave the rest of the row alone.
        cut = [params[i] for i in with_k]
        values, heads = _sorted_head(_rows(logits, with_k), max(p.top_k for p in cut))
        _scale(values, [maxima[i] for i in with_k], cut)
        drawn = _draw_from_head(values, heads, None, cut, [draws[i] for i in with_k])
        for i, token_id in zip(with_k, drawn, strict=True):
            ids[i] = token_id
    if with_p:
        # How long a head reaches top_p is not known before; for what models usually say this length is enough.
        cut = [params[i] for i in with_p]
        rows = _scale(_rows(logits, with_p), [maxima[i] for i in with_p], cut)
        values, heads = _sorted_head(rows, min(width, 64))
        totals = rows.exp().sum(-1, keepdim=True).double()
        drawn = _draw_from_head(values, heads, totals, cut, [draws[i] for i in with_p])
        for row, (i, token_id) in enumerate(zip(with_p, drawn, strict=True)):
            ids[i] = token_id if token_id >= 0 else _draw_from_nucleus(rows[row], params[i].top_p, draws[i])
    if whole:
        rows = _scale(_rows(logits, whole), [maxima[i] for i in whole], [params[i] for i in whole])
        drawn = _draw_from_all(rows, [draws[i] for i in whole])
        for i, token_id in zip(whole, drawn, strict=True):
            ids[i] = token_id
    return ids


def _scale(x: torch.Tensor, maxima: list[float], params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits [R, n], in place: the row's maximum becomes 0, temperature and min_p are applied."""
    import torch

    # the difference first: large logits keep their precision
    x.sub_(torch.tensor(maxima, device=x.device).unsqueeze(1))
    if any(p.temperature != 1.0 for p in params):
        # never by 0, which would make NaN of the tokens that are masked with -inf
        scale = [max(1.0 / p.temperature, _MIN_SCALE) for p in params]
        x.mul_(torch.tensor(scale, device=x.device).unsqueeze(1))
    if any(p.min_p > 0.0 for p in params):
        floor = [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
        x.masked_fill_(x < torch.tensor(floor, device=x.device).unsqueeze(1), -math.inf)
    return x


def _draw_from_all(x: torch.Tensor, draws: list[float]) -> list[int]:
    """Inverse of the cumulative distribution of softmax(x) at `draws`, in two levels; `x`, with maximum 0, is overwritten."""
    import torch

    num_rows, width = x.shape
    weights = x.exp_()
    if width % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -width % _CHUNK))
    weights = weights.view(num_rows, -1, _CHUNK)
    u = torch.tensor(draws, dtype=torch.float64, device=x.device).unsqueeze(1)

    outer = weights.sum(-1).double().cumsum(-1)
    target = u * outer[:, -1:]
    chunk = _first_above(outer, target)
    before = torch.where(chunk > 0, outer.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = (target - before) / (outer.gather(1, chunk) - before)
    picked = weights[torch.arange(num_rows, device=x.device), chunk.squeeze(1)]
    inner = picked.double().cumsum(-1)
    place = _first_above(inner, inside * inner[:, -1:])
    return (chunk * _CHUNK + place).squeeze(1).tolist()


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight is above the target: never one of weight 0, rounding included."""
    import torch

    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _draw_from_head(
    values: torch.Tensor,
    ids: torch.Tensor,
    totals: torch.Tensor | None,
    params: Sequence[SamplingParams],
    draws: list[float],
) -> list[int]:
    """Draw from the first tokens of each sorted row, `values` with maximum 0 and `ids`, both [R, n].

    `totals` [R, 1] are the weights of the whole rows, for rows that only top_p cuts; None: top_k cuts all rows
    somewhere in the head. -1 where top_p reaches beyond the head.
    """
    import torch

    device = values.device
    size = values.shape[1]
    weights = values.double().exp_()
    if totals is None:
        limit = torch.tensor([p.top_k for p in params], device=device).unsqueeze(1)
        weights.masked_fill_(torch.arange(size, device=device) >= limit, 0.0)
    cumulative = weights.cumsum(-1)
    reached = cumulative[:, -1:]
    if any(p.top_p < 1.0 for p in params):
        top_p = [p.top_p if p.top_p < 1.0 else math.inf for p in params]
        goal = torch.tensor(top_p, dtype=torch.float64, device=device).unsqueeze(1).sub_(1e-6)
        goal = goal * (reached if totals is None else totals)
        keep = cumulative - weights < goal
        keep[:, 0] = True
        cumulative = (weights * keep).cumsum(-1)
    u = torch.tensor(draws, dtype=torch.float64, device=device).unsqueeze(1)
    found = ids.gather(1, _first_above(cumulative, u * cumulative[:, -1:]))
    if totals is not None:
        found = torch.where(reached >= goal, found, -1)
    return found.squeeze(1).tolist()


def _draw_from_nucleus(x: torch.Tensor, top_p: float, draw: float) -> int:
    """Draw from the top_p part of one row [V] with maximum 0, however long it is.

    All tokens below (1 - p) / V together have less than 1 - p, so only those above need to be sorted.
    """

    weights = x.exp().double()
    total = float(weights.sum())
    ids = (weights >= (1.0 - top_p) * total / len(weights)).nonzero().flatten()
    # by logits, not weights: what rounds to one weight keeps its order
    ids = ids[x[ids].sort(descending=True, stable=True).indices]
    weights = weights[ids]
    cumulative = weights.cumsum(0)
    keep = cumulative - weights < (top_p - 1e-6) * total
    keep[0] = True
    cumulative = (weights * keep).cumsum(0).unsqueeze(0)
    return int(ids[_first_above(cumulative, draw * cumulative[:, -1:]).squeeze()])


def _top(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch.topk. The `size` largest are in the `size` chunks with the largest maxima, so look only there."""
    num_rows, width = x.shape
    num_chunks, rest = divmod(width, _CHUNK)
    if rest or size > num_chunks // 4:
        return x.topk(size, dim=-1)
    chunks = x.view(num_rows, num_chunks, _CHUNK)
    picked = chunks.amax(-1).topk(size, dim=-1, sorted=False).indices
    inner = chunks.gather(1, picked.unsqueeze(-1).expand(-1, -1, _CHUNK)).view(num_rows, size * _CHUNK)
    values, places = inner.topk(size, dim=-1)
    return values, picked.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK


def _sorted_head(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` largest values of each row and their indices, in descending order, equals by ascending index."""

    if size >= x.shape[1]:
        values, ids = x.sort(dim=-1, descending=True, stable=True)
        return values, ids
    if x.is_cuda:
        return _sorted_head_of_keys(x, size)
    values, ids = _top(x, size + 1)
    # which of the values that equal the last one come out is open: take the first ones by index
    tied = (values[:, size - 1] == values[:, size]) & (values[:, size] > -math.inf)
    values, ids = values[:, :size], ids[:, :size]
    for row in tied.nonzero().flatten().tolist():
        last = values[row, -1]
        above = int((values[row] > last).sum())
        ids[row, above:] = (x[row] == last).nonzero().flatten()[: size - above]
    ids, _ = ids.sort(dim=-1)
    values, order = x.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _sorted_head_of_keys(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_sorted_head` without a look at values on the host: float32 and index make one integer that has no equal."""
    import torch

    bits = (x + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    low = 2**32 - 1
    keys = (order << 32) + (low - torch.arange(x.shape[1], device=x.device))
    ids = low - (keys.topk(size, dim=-1).values & low)
    return x.gather(1, ids), ids


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of `token_ids`, one per row of raw logits [R, V], and of the `num_top` most likely ones.

    `num_top` -1 is the whole vocabulary. A rank is one more than the number of tokens that are more likely.
    """
    import torch

    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    return _unpacked_logprobs(_packed_logprobs(logits, chosen, num_top), token_ids, num_top, logits.shape[1])


def _packed_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> torch.Tensor:
    """What `token_logprobs` says as one tensor [R, 2 + 2 n], so that it leaves the device in one transfer.

    Log-probability and rank - 1 of the tokens [R, 1], then the `n` largest log-probabilities and their ids; float64
    holds all of these exactly.
    """
    import torch

    maxima = logits.amax(-1, keepdim=True)
    scratch = torch.sub(logits, maxima)
    normalizer = scratch.exp_().sum(-1, keepdim=True).log_().add_(maxima)
    chosen = logits.gather(1, token_ids)
    ranks = torch.gt(logits, chosen, out=scratch).sum(-1, keepdim=True)
    parts = [chosen - normalizer, ranks]
    most = max(_counts(num_top, logits.shape[1]), default=0)
    if most:
        values, ids = _sorted_head(logits, most)
        parts += [values - normalizer, ids]
    return torch.cat([part.double() for part in parts], dim=-1)


def _counts(num_top: Sequence[int], width: int) -> list[int]:
    return [width if count < 0 else min(count, width) for count in num_top]


def _unpacked_logprobs(
    packed: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int], width: int
) -> list[TokenLogprobs]:
    most = (packed.shape[1] - 2) // 2
    result = []
    for row, token_id, count in zip(packed.tolist(), token_ids, _counts(num_top, width), strict=True):
        values, ids = row[2 : 2 + most], row[2 + most :]
        others = [i for i in range(count) if ids[i] != token_id]
        result.append(
            TokenLogprobs(
                [token_id, *(int(ids[i]) for i in others)],
                [row[0], *(values[i] for i in others)],
                [int(row[1]) + 1, *(i + 1 for i in others)],
            )
        )
    return result
