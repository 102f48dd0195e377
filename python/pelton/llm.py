"""`LLM`: a model that is ready to answer."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.config import EngineConfig, ModelConfig, load_model_config, read_json
from pelton.engine import Engine, RequestGroup
from pelton.errors import InvalidValueError, PromptError, TokenizerError, did_you_mean
from pelton.outputs import RequestOutput
from pelton.sampling import SamplingParams

if TYPE_CHECKING:
    from pelton.tokenizer import Tokenizer

__all__ = ["LLM"]

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any] | Sequence[int]


class LLM:
    """A model, its tokenizer and its KV cache.

    Args:
        model: a Hugging Face folder (config.json and safetensors) or a GGUF file.
        options: everything that `pelton.config.EngineConfig` has: `device`, `dtype`, `max_model_len`, `block_size`,
            `max_num_seqs`, `max_num_batched_tokens`, `kv_cache_memory`, `gpu_memory_utilization`,
            `enable_prefix_caching`, `enable_chunked_prefill`, `seed`, `skip_tokenizer_init`, `tokenizer`, `enforce_eager`, ...

    Raises:
        UnknownOptionError: an option that does not exist; the message gives the nearest, or says where it lives.
        InvalidValueError: a value that an option cannot have.
        CapacityError: the weights, or the KV cache of one sequence of `max_model_len` tokens, do not fit.
        HardwareMismatch: the installed build needs a GPU that is not there.
        CheckpointError, UnsupportedError, TokenizerError: about the files of the model.

    A call checks all of its prompts and parameters before it runs any: it is refused as a whole, or answered as a
    whole. After any error, and after Ctrl-C, the next call works. Several threads may call at once; their requests
    then run in one batch.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        config = EngineConfig.from_options(model=model, **options)
        self.model_config: ModelConfig = load_model_config(config.model)
        self.config: EngineConfig = config.resolve(self.model_config)
        self._tokenizer: Tokenizer | None = None
        new_detokenizer = None
        if not config.skip_tokenizer_init:
            from pelton.detokenizer import IncrementalDetokenizer
            from pelton.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(config.tokenizer or config.model)
            new_detokenizer = IncrementalDetokenizer

        from pelton.runner import Runner

        runner = Runner(self.config, self.model_config)
        assert self.config.max_model_len is not None
        self.engine = Engine(
            runner,
            tokenizer=self._tokenizer,
            new_detokenizer=new_detokenizer,
            eos_token_ids=self.model_config.eos_token_ids,
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            enable_prefix_caching=self.config.enable_prefix_caching,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
            seed=self.config.seed,
        )
        self._lock = threading.RLock()
        self._entering: set[int] = set()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError with skip_tokenizer_init=True."""
        if self._tokenizer is None:
            raise TokenizerError("there is no tokenizer: the LLM was made with skip_tokenizer_init=True")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without params uses: the sampling values of the model's generation_config.json.

        These are temperature (0 with `do_sample: false`), top_k, top_p, min_p, repetition_penalty and
        max_new_tokens (as max_tokens); what the file does not say is `SamplingParams()`'s. Params that are passed
        are used as they are: nothing of the file is mixed into them. Only its eos ids always count.
        """
        file = Path(self.config.model) / "generation_config.json"
        values = read_json(file) if file.is_file() else {}
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        names["max_new_tokens"] = "max_tokens"
        chosen = {names[key]: value for key, value in values.items() if key in names and value is not None}
        if values.get("do_sample") is False:
            chosen["temperature"] = 0.0
        try:
            return SamplingParams(**chosen)
        except InvalidValueError as error:
            raise InvalidValueError(f"{file}: {error}; pass SamplingParams of your own") from None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one or a list of: a text, a list of token ids, `{"prompt": text}` or
                `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts, or one for each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr; None: when that is a terminal and there are several prompts.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            PromptError: a prompt is empty, has ids that the model does not know, or leaves no room for one token.
            InvalidValueError: `sampling_params` do not fit the prompts or the model.
            TokenizerError: a text without a tokenizer.
            ModelOutputError: the model computed NaN.
            In each case no prompt is answered.
        """
        return self._run(self._read_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, through the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]` or a list of such lists.
            sampling_params, use_tqdm: as in `generate`.
            add_generation_prompt: let the template open the assistant's turn.
            template_options: passed to the template (`chat_template=`, `tools=`, `enable_thinking=`, ...).

        Raises:
            TokenizerError: the model has no chat template, or it refuses the messages.
            and what `generate` raises.
        """
        tokenizer = self.get_tokenizer()
        prompts: list[tuple[str | None, list[int]]] = []
        for place, conversation in enumerate(_read_conversations(messages)):
            if not conversation:
                raise PromptError(f"conversation {place} is empty: it must have at least one message")
            ids = tokenizer.apply_chat_template(
                list(conversation), add_generation_prompt=add_generation_prompt, **template_options
            )
            prompts.append((tokenizer.decode(ids, skip_special_tokens=False), ids))
        return self._run(prompts, sampling_params, use_tqdm)

    def generate_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cumulative: bool = False,
    ) -> Iterator[RequestOutput]:
        """Complete prompts and give out what is new after each step.

        Each output belongs to one prompt (`request_id`; in the order of the prompts for the first ones, then as
        they come) and holds the completions that went on, with only their new text, tokens and log-probabilities;
        joined they are what `generate` gives. Text that may still become a stop string, or is half a character,
        is held back until that is known. The last output of a prompt has `finished=True`.

        Leaving the iterator (`break`, `close()`) aborts what is unfinished.

        Args:
            prompts, sampling_params: as in `generate`; they are checked at once, before the first `next()`.
            cumulative: give out everything so far each time, not only what is new.
        """
        requests = self._prepare(self._read_prompts(prompts), sampling_params)

        def stream() -> Iterator[RequestOutput]:
            with self._submitted(requests, streaming=True) as groups:
                live = groups
                while live:
                    with self._turn():
                        # another thread's step may have served these, too
                        news = [
                            (group, group.output() if cumulative else delta)
                            for group in live
                            if (delta := group.delta()) is not None
                        ]
                        live = [group for group in live if not group.finished]
                        if live and not news:
                            self.engine.step()
                    for group, output in news:
                        _raise_error_of(group)
                        yield output

        return stream()

    def _run(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        requests = self._prepare(prompts, sampling_params)
        if use_tqdm is None:
            use_tqdm = len(requests) > 1 and sys.stderr.isatty()
        with self._submitted(requests) as groups, _progress(len(groups), use_tqdm) as advance:
            for group in groups:
                while not group.finished:
                    with self._turn():
                        if not group.finished:
                            self.engine.step()
                _raise_error_of(group)
                advance()
            return [group.output() for group in groups]

    @contextmanager
    def _submitted(
        self, requests: list[tuple[str | None, list[int], SamplingParams]], streaming: bool = False
    ) -> Iterator[list[RequestGroup]]:
        """Hand requests to the engine; whatever happens then, none of them stays in it."""
        groups: list[RequestGroup] = []
        thread = threading.get_ident()
        try:
            self._entering.add(thread)
            with self._lock:
                self._entering.discard(thread)
                for prompt, ids, params in requests:
                    groups.append(
                        self.engine.add_request(ids, params, prompt=prompt, streaming=streaming, checked=True)
                    )
            yield groups
        finally:
            self._entering.discard(thread)
            with self._lock:
                self.engine.abort(groups)

    def _turn(self) -> threading.RLock:
        """The lock, for one step. A thread that waits with new requests goes first (locks are not fair)."""
        if self._entering:
            time.sleep(1e-4)
        return self._lock

    def _prepare(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """Pair prompts with params and check all of them."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompts)
        elif isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            params = list(sampling_params)
        else:
            params = [sampling_params]
        for entry in params:
            if not isinstance(entry, SamplingParams):
                raise InvalidValueError(
                    f"sampling_params must be SamplingParams(...) or a list of them, got {entry!r}"
                )
        if len(params) != len(prompts):
            raise InvalidValueError(
                f"sampling_params has {len(params)} entries for {len(prompts)} prompts: give one for all, or one each"
            )
        for place, ((_, ids), entry) in enumerate(zip(prompts, params, strict=True)):
            self.engine.check(ids, entry, "the prompt" if len(prompts) == 1 else f"prompt {place}")
        return [(text, ids, entry) for (text, ids), entry in zip(prompts, params, strict=True)]

    def _read_prompts(self, prompts: Any) -> list[tuple[str | None, list[int]]]:
        if isinstance(prompts, str | Mapping) or _is_ids(prompts):
            return [self._read_prompt(prompts, "the prompt")]
        if not isinstance(prompts, Sequence):
            raise PromptError(
                "prompts must be a text, a list of token ids, {'prompt': text}, {'prompt_token_ids': [...]}, or a "
                f"list of these, got {type(prompts).__name__}"
            )
        return [self._read_prompt(prompt, f"prompt {place}") for place, prompt in enumerate(prompts)]

    def _read_prompt(self, prompt: Any, what: str) -> tuple[str | None, list[int]]:
        """The text (if known) and the token ids of one prompt."""
        text: Any = None
        ids: Any = None
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in ("prompt", "prompt_token_ids"):
                    hint = did_you_mean(str(key), ("prompt", "prompt_token_ids"))
                    raise PromptError(
                        f"{what}: unknown key {key!r}{hint}; it takes 'prompt' or 'prompt_token_ids'"
                    )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is None and ids is None:
                raise PromptError(f"{what} is empty: it needs 'prompt' or 'prompt_token_ids'")
        elif isinstance(prompt, str):
            text = prompt
        elif prompt is None:
            raise PromptError(f"{what} is None: it must be a text or token ids")
        else:
            ids = prompt
        if text is not None and not isinstance(text, str):
            raise PromptError(f"{what} must be a text, got {type(text).__name__}")
        if ids is not None or text is None:
            return text, _read_ids(ids, what)
        if self._tokenizer is None:
            raise TokenizerError(
                f"{what} is a text, and there is no tokenizer (skip_tokenizer_init=True): pass "
                "{'prompt_token_ids': [...]}"
            )
        return text, list(self._tokenizer.encode(text))


def _raise_error_of(group: RequestGroup) -> None:
    if group.error is not None:
        raise group.error


def _is_ids(value: Any) -> bool:
    """A list of token ids (not of prompts), or an array of them."""
    if isinstance(value, list | tuple):
        return (
            bool(value)
            and not isinstance(value[0], str | Mapping | list | tuple)
            and not _is_array(value[0], 1)
        )
    return _is_array(value, 1)


def _is_array(value: Any, ndim: int) -> bool:
    return hasattr(value, "tolist") and getattr(value, "ndim", None) == ndim


def _read_ids(ids: Any, what: str) -> list[int]:
    if _is_array(ids, 1):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise PromptError(f"{what}: token ids must be a list of integers, got {type(ids).__name__}")
    # scalars of numpy or torch become what they hold; the engine checks the rest
    return [i.item() if _is_array(i, 0) else i for i in ids]


def _read_conversations(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        if all(
            isinstance(c, Sequence) and not isinstance(c, str) and all(isinstance(m, Mapping) for m in c)
            for c in conversations
        ):
            return conversations
    raise PromptError(
        "messages must be a conversation [{'role': ..., 'content': ...}, ...] or a list of conversations, got "
        f"{messages!r:.100}"
    )


@contextmanager
def _progress(total: int, shown: bool) -> Iterator[Any]:
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
