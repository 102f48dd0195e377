"""Tokenizers: text to ids and back, and chat templates.

`load_tokenizer` takes a Hugging Face folder or a GGUF file. The folder's `tokenizer.json` is read with the
`tokenizers` library and is the truth about ids (where Transformers rebuilds a tokenizer from a class name, it
is not consulted); `tokenizer_config.json` adds names of special tokens and the chat template. Transformers is
imported only for folders that have a tokenizer in another form.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .detokenizer import CONTEXT_TOKENS, TextStream, Utf8Stream, WindowStream
from .errors import TokenizerError

if TYPE_CHECKING:
    import jinja2
    import tokenizers

__all__ = ["Tokenizer", "load_tokenizer"]

logger = logging.getLogger(__name__)

SKIP_HINT = (
    "To run it on token ids alone, pass skip_tokenizer_init=True and prompts as {'prompt_token_ids': [...]}."
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
)

Message = Mapping[str, Any]


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or of a GGUF file.

    Raises:
        TokenizerError: there is none, or it is damaged or of an unknown kind.
        CheckpointError: the GGUF file is damaged.
    """
    from .gguf import GgufFile, is_gguf

    path = Path(model_path)
    try:
        path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in it
        raise TokenizerError(f"{path!s:.200}: no such folder or GGUF file") from None
    if is_gguf(path):
        from .gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(GgufFile(path))
    if not path.is_dir():
        raise TokenizerError(f"{path}: no such folder or GGUF file")
    if (path / "tokenizer.json").is_file():
        return _from_folder(path)
    if any((path / name).is_file() for name in OTHER_TOKENIZER_FILES):
        return _from_transformers(path)
    raise TokenizerError(f"{path}: has no tokenizer (no tokenizer.json). {SKIP_HINT}")


@dataclass
class Tokenizer:
    """A tokenizer of the `tokenizers` library with the special tokens and chat template of a model.

    `special_tokens` maps names like "bos_token" to text; `chat_templates` maps names ("default", "tool_use")
    to Jinja source.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict, repr=False)
    cleans_up_spaces: bool = False
    path: Path | None = None

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        self._special_ids = frozenset(
            index for index, token in self.backend.get_added_tokens_decoder().items() if token.special
        )
        self._joins = _joined_bytes(self.backend)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's embedding may have more rows)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def all_special_ids(self) -> tuple[int, ...]:
        """The ids that `skip_special_tokens` leaves out, in ascending order."""
        return tuple(sorted(self._special_ids))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template; None if the model has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens that the text spells out count as such.

        Raises:
            TokenizerError: `text` is not valid Unicode text.
        """
        try:
            with library_errors("the tokenizer cannot encode the prompt", (TypeError, UnicodeEncodeError)):
                return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            kind = f"{type(text).__name__}" if not isinstance(text, str) else "text with lone surrogates"
            raise TokenizerError(f"a prompt must be valid Unicode text, got {kind}") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once; ids that the vocabulary does not have give no text."""
        ids = [i for i in token_ids if 0 <= i < 1 << 32]
        with library_errors("the tokenizer cannot decode its tokens"):
            text = str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        return _clean_up(text) if self.cleans_up_spaces else text

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, which may be a part of a character; b"" for an id without token.

        Special tokens are spelled out. For tokenizers that do not join bytes (`joins_bytes`), the token's own
        text.
        """
        value = self._bytes.get(token_id)
        if value is None:
            token = self.id_to_token(token_id)
            value = b"" if token is None else self._joins.to_bytes(token) if self._joins else token.encode()
            self._bytes[token_id] = value
        return value

    @property
    def joins_bytes(self) -> bool:
        """Whether the text of a sequence is just its tokens' bytes, one after the other."""
        return self._joins is not None

    def text_stream(self, context: Sequence[int] = (), skip_special_tokens: bool = True) -> TextStream:
        """Incremental decoding of tokens that come after `context` (whose text is not repeated).

        Text that is no valid UTF-8 may differ from `decode`'s: here each maximal part of a character becomes
        one U+FFFD, whereas `decode` may turn a whole run of byte tokens into them, valid characters included.
        """
        if self._joins is None or self.cleans_up_spaces:
            return WindowStream(lambda ids: self.decode(ids, skip_special_tokens), context[-CONTEXT_TOKENS:])
        skip = self._special_ids if skip_special_tokens else frozenset()
        strip = self._joins.strip_left
        if strip and any(self.token_bytes(i) for i in context if i not in skip):
            strip = 0
        return Utf8Stream(self.token_bytes, skip, strip)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text that the chat template makes of a conversation.

        `chat_template` is Jinja source or the name of one of the model's templates; other keyword arguments
        are variables of the template (`enable_thinking=False` and the like).

        Raises:
            TokenizerError: no template, a template that refuses the messages, or messages that are none.
        """
        source = self._template_source(chat_template, tools)
        _check_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise TokenizerError("continue_final_message=True needs add_generation_prompt=False")
        # As Transformers does: None means absent (templates would write "None").
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        final = ""
        if continue_final_message:
            final = chat[-1].get("content", "")
            if not isinstance(final, str) or not final.strip():
                raise TokenizerError("continue_final_message=True needs a last message with text")
        try:
            text = _template(source).render(
                messages=chat,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except TokenizerError:
            raise
        except Exception as error:  # whatever the template's own expressions raise
            raise TokenizerError(
                f"the chat template refuses these messages: {error or type(error).__name__}"
            ) from error
        if continue_final_message:
            at = text.rfind(final)
            length = len(final)
            if at < 0:
                at, length = text.rfind(final.strip()), len(final.strip())
            if at < 0:
                raise TokenizerError(
                    "continue_final_message=True: the chat template does not write the last message"
                )
            text = text[: at + length]
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """The ids of `render_chat`. The template writes special tokens: none are added, so one BOS, not two."""
        return self.encode(
            self.render_chat(messages, add_generation_prompt, **options), add_special_tokens=False
        )

    def _template_source(self, chosen: str | None, tools: object) -> str:
        if chosen is not None:
            return self.chat_templates.get(chosen, chosen)
        if tools is not None and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" in self.chat_templates:
            return self.chat_templates["default"]
        where = f"{self.path}: " if self.path else ""
        if self.chat_templates:
            names = ", ".join(sorted(self.chat_templates))
            raise TokenizerError(f"{where}no default chat template; pass chat_template= one of {names}")
        raise TokenizerError(
            f"{where}the model has no chat template. Pass one as chat_template='...' (Jinja source), or "
            f"write the prompt yourself and use generate()."
        )


# ---
# Chat templates
# ---


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise TokenizerError(
            "messages must be a list that is not empty, like [{'role': 'user', 'content': '...'}], "
            f"got {type(messages).__name__}{' (empty)' if not messages else ''}"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TokenizerError(
                f"messages[{index}] must be a dict with 'role' and 'content', got {message!r:.80}"
            )


@lru_cache(maxsize=16)
def _template(source: str) -> jinja2.Template:
    """Compile a template, in a sandbox because it comes with the checkpoint, with the field's helpers."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks what trainers learn from; here it is its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            return str(caller())

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error


# ---
# Decoding
# ---


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table of the printable characters that stand for bytes in byte-level vocabularies."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class _JoinedBytes:
    """How a decoder that only joins makes bytes of a token."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0
    alphabet: Mapping[str, int] = field(default_factory=byte_alphabet)

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([self.alphabet[char] for char in token])
            except KeyError:  # an added token, which is written as it is
                return token.encode()
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.byte_fallback:
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                return bytes([int(match[1], 16)])
        return token.encode()


def _joined_bytes(backend: tokenizers.Tokenizer) -> _JoinedBytes | None:
    """What the decoder does, if it only joins tokens (ByteLevel, or SentencePiece's steps); else None."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _JoinedBytes(byte_level=True)
    if "Fuse" not in kinds:
        return None
    replacements, fallback, strip, fused = [], False, 0, False
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not fallback and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["content"] == " " and step["stop"] == 0 and not strip:
            strip = step["start"]
        else:
            return None
    return _JoinedBytes(replacements=tuple(replacements), byte_fallback=fallback, strip_left=strip)


def _clean_up(text: str) -> str:
    """What `clean_up_tokenization_spaces` asks for: no space before punctuation and English contractions."""
    for end in (".", "?", "!", ","):
        text = text.replace(f" {end}", end)
    text = text.replace(" ' ", "'")
    for end in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(f" {end}", end)
    return text


# ---
# Hugging Face folders
# ---


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _from_folder(path: Path) -> Tokenizer:
    import tokenizers

    file = path / "tokenizer.json"
    unreadable = f"{file}: not a tokenizer that can be read"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{unreadable}: {error}") from error
    _check_subword_prefix(text, file)
    with library_errors(unreadable):
        backend = tokenizers.Tokenizer.from_str(text)
    config = _optional_json(path / "tokenizer_config.json")
    names = _special_names(config, _optional_json(path / "special_tokens_map.json"))
    _add_missing(backend, config, names, path)
    return Tokenizer(
        backend,
        special_tokens=names,
        chat_templates=_chat_templates(path, config),
        cleans_up_spaces=bool(config.get("clean_up_tokenization_spaces", False)) and _wants_clean_up(backend),
        path=path,
    )


@contextmanager
def library_errors(what: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What the `tokenizers` library raises as a TokenizerError: plain Exception, or a panic, which is none."""
    try:
        yield
    except BaseException as error:
        is_theirs = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_theirs or isinstance(error, (TokenizerError, *passing)):
            raise
        raise TokenizerError(f"{what}: {error}") from error


def _check_subword_prefix(text: str, file: Path) -> None:
    """Refuse BPE merges that do not fit `continuing_subword_prefix`.

    The library cuts as many bytes off the right part of each as the prefix has, whatever they are, and ends the
    process where that is in the middle of a character.
    """
    if not re.search(r'"continuing_subword_prefix"\s*:\s*"[^"]', text):
        return
    try:
        model = json.loads(text)["model"]
        prefix, merges = model["continuing_subword_prefix"], model.get("merges") or []
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        bad = next((pair for pair in pairs if len(pair) != 2 or not pair[1].startswith(prefix)), None)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return  # not for us to say: the library names what is wrong with the file
    if bad is not None:
        raise TokenizerError(
            f"{file}: damaged: the merge {bad!r:.80} does not fit the continuing_subword_prefix {prefix!r}"
        )


def _wants_clean_up(backend: tokenizers.Tokenizer) -> bool:
    """As Transformers: the clean-up was made for WordPiece; it would damage the text of BPE tokenizers."""
    return type(backend.model).__name__ != "BPE"


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_names(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; tokenizer_config.json wins over the older special_tokens_map.json."""
    names = {}
    for name in NAMED_TOKENS:
        text = _token_text(config.get(name)) or _token_text(special_map.get(name))
        if text is not None:
            names[name] = text
    return names


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str], path: Path
) -> None:
    """Add tokens that tokenizer_config.json has and tokenizer.json does not mark as added.

    Special tokens that the vocabulary does not have are left out: Transformers gives them new ids, but these would
    lie past the model's embedding.
    """
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping) or not all(re.fullmatch(r"\d{1,18}", index) for index in added):
        raise TokenizerError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder must map ids to tokens")
    for index, entry in sorted(added.items(), key=lambda item: int(item[0])):
        text = _token_text(entry)
        if text is None or text in known:
            continue
        expected = backend.token_to_id(text)
        if expected is None:
            expected = backend.get_vocab_size(with_added_tokens=True)
        if expected != int(index):
            logger.warning(
                "%s: tokenizer_config.json gives %r the id %s, which it cannot have", path, text, index
            )
            continue
        flags = {
            k: bool(entry[k])
            for k in ("lstrip", "rstrip", "single_word", "normalized", "special")
            if isinstance(entry, Mapping) and k in entry
        }
        backend.add_tokens([AddedToken(text, **flags)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, Mapping | list):
        raise TokenizerError(
            f"{path / 'tokenizer_config.json'}: extra_special_tokens must be a list of tokens"
        )
    extra = map(_token_text, extra.values() if isinstance(extra, Mapping) else extra)
    tokens = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in [*names.values(), *(text for text in extra if text and text not in tokens)]:
        if backend.token_to_id(text) is not None and not (text in tokens and tokens[text].special):
            backend.add_special_tokens([tokens.get(text) or AddedToken(text, normalized=False, special=True)])


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. Files win over the key in tokenizer_config.json, a string or a list of named templates."""
    templates: dict[str, str] = {}
    found = config.get("chat_template")
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        for entry in found:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    legacy = _token_text({"content": _optional_json(path / "chat_template.json").get("chat_template")})
    if legacy is not None:
        templates["default"] = legacy
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{file}: cannot be read as text: {error}") from error
    return templates


def _from_transformers(path: Path) -> Tokenizer:
    """Tokenizers in older forms, converted by Transformers (which takes seconds to import)."""
    found = [name for name in OTHER_TOKENIZER_FILES if (path / name).is_file()]
    logger.info("%s: no tokenizer.json; converting %s with transformers", path, ", ".join(found))
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        backend = loaded.backend_tokenizer
    except Exception as error:  # anything: import errors, missing sentencepiece, unknown classes
        reason = str(error).strip().partition("\n")[0].rstrip(" .:")
        raise TokenizerError(
            f"{path}: has no tokenizer.json, and transformers cannot convert {', '.join(found)} "
            f"({type(error).__name__}: {reason}). {SKIP_HINT}"
        ) from error
    config = _optional_json(path / "tokenizer_config.json")
    names = {name: str(text) for name in NAMED_TOKENS if (text := getattr(loaded, name, None)) is not None}
    return Tokenizer(
        backend,
        special_tokens=names,
        chat_templates=_chat_templates(path, config),
        cleans_up_spaces=bool(loaded.clean_up_tokenization_spaces) and _wants_clean_up(backend),
        path=path,
    )
