"""Token ids to text, one at a time: what may be shown now, and where a stop string ends the text.

Two things are held back: bytes that do not make a whole character yet, and the longest end of the text that a
stop string may begin with. So what was shown is never taken back, and no delta shows a part of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .sampling import SamplingParams

__all__ = ["IncrementalDetokenizer", "TextStream"]

CONTEXT_TOKENS = 6  # tokens of the prompt that the text of the first new ones may depend on
MAX_PENDING_TOKENS = (
    8  # no character has more bytes than 4, so what is still broken after so many stays broken
)


class TextStream(Protocol):
    """Text of a growing token sequence: each piece is final."""

    def add(self, token_id: int) -> str:
        """The text that this token makes certain."""
        ...

    def end(self) -> str:
        """The rest: incomplete characters as U+FFFD."""
        ...


class Utf8Stream:
    """For tokenizers whose tokens are byte strings that are joined (`token_bytes`, see
    `Tokenizer.text_stream`).

    `skip` are the ids that give no text; `strip_left` is the number of spaces that are dropped at the very
    beginning.
    """

    def __init__(
        self, token_bytes: TokenBytes, skip: frozenset[int] = frozenset(), strip_left: int = 0
    ) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._strip = strip_left
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._stripped(self._decode(self._token_bytes(token_id)))

    def end(self) -> str:
        return self._stripped(self._decode(b"", True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text


class TokenBytes(Protocol):
    def __call__(self, token_id: int, /) -> bytes: ...


class Decode(Protocol):
    def __call__(self, token_ids: list[int], /) -> str: ...


class WindowStream:
    """For any other tokenizer: decodes a short window twice, without and with the new tokens.

    The window begins where the text was last complete, and the tokens before it give it context (spaces
    between words and the like depend on neighbours).
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context)
        self._read = len(self._ids)  # how many of _ids have been given out
        self._before = decode(self._ids)

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._before):
            if len(self._ids) - self._read < MAX_PENDING_TOKENS:
                return ""
        elif text.endswith("\ufffd") and len(self._ids) - self._read < MAX_PENDING_TOKENS:
            return ""
        return self._give(text)

    def end(self) -> str:
        return self._give(self._decode(self._ids))

    def _give(self, text: str) -> str:
        delta = text[len(self._before) :]
        if delta:  # else keep the context: these tokens have no text of their own
            self._ids = self._ids[self._read :]
        self._ids = self._ids[-CONTEXT_TOKENS:]
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return delta


class StreamSource(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def text_stream(self, context: Sequence[int], skip_special_tokens: bool) -> TextStream: ...


class IncrementalDetokenizer:
    """The text of one request.

    Call `append` with each token in turn and show what it returns. When it finds a stop string, `stop_reason`
    is that string and the text is complete: the request ends with the token just appended. When a request
    ends for another reason, `flush` gives what was held back. A token that ends a request by its id (eos,
    `stop_token_ids`) has no text and is not appended, unless `include_stop_str_in_output` asks for it.

    `prompt_token_ids` are context only: the text of the first token may depend on them. A stop string must
    end in text of the output; it ends the request from the `min_tokens`-th token on.
    """

    def __init__(
        self, tokenizer: StreamSource, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        stop = params.stop or ()
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stream = tokenizer.text_stream(prompt_token_ids, params.skip_special_tokens)
        self._shown: list[str] = []
        self._held = ""
        self._num_tokens = 0
        self._done = False
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """All that has been given out."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def append(self, token_id: int) -> str:
        """Add a token and return the text that can be shown now (often empty).

        Raises:
            RuntimeError: the text is complete already.
        """
        if self._done:
            raise RuntimeError("append after the end of the text")
        self._num_tokens += 1
        new = self._stream.add(token_id)
        if not new:
            return ""
        if not self._stops:
            self._shown.append(new)
            return new
        old = len(self._held)
        text = self._held + new
        if self._num_tokens >= self._min_tokens:
            match = find_stop(text, old, self._stops)
            if match is not None:
                start, self.stop_reason = match
                self._done = True
                self._held = ""
                return self._show(text[: start + len(self.stop_reason)] if self._include else text[:start])
        hold = possible_stop(text, self._stops)
        self._held = text[len(text) - hold :]
        return self._show(text[: len(text) - hold])

    def flush(self) -> str:
        """End the text and return what was held back; nothing after a stop string or a second time."""
        if self._done:
            return ""
        self._done = True
        rest, self._held = self._held + self._stream.end(), ""
        return self._show(rest)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


def find_stop(text: str, old: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Of the stop strings that end in `text[old:]` the first to begin; of several there the shortest."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, old - len(stop) + 1))
        if start >= 0 and (best is None or (start, len(stop)) < best[:2]):
            best = start, len(stop), stop
    return None if best is None else (best[0], best[2])


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of `text` that one of `stops` begins with (and goes on after)."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        end = text[len(text) - length :]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
