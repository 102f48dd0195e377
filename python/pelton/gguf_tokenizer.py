"""The tokenizer that a GGUF file describes, built with the `tokenizers` library.

Two kinds exist among the supported models: `gpt2`, byte-level BPE with merges, whose way of splitting text
has a name in `tokenizer.ggml.pre`; and `llama`, SentencePiece's BPE with a score per token. Ids must equal
those of the model's training, so an unknown name is an error, never a guess.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import TokenizerError, did_you_mean
from .gguf import GgufFile, StringArray
from .tokenizer import SKIP_HINT, Tokenizer, library_errors

if TYPE_CHECKING:
    import tokenizers

__all__ = ["PRE_TOKENIZERS", "tokenizer_from_gguf"]

logger = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "\u2581"  # how SentencePiece writes a space

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
_REST = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_REST}"


def _modern(digits: str) -> str:
    """The split of GPT-4's successors (Llama 3, Qwen 2): `digits` is how many of them stay together."""
    return (
        rf"(?i:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_REST}"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(suffix: str, digits: str) -> str:
    """The split that also separates words at changes of case (GPT-4o, Mistral's tekken)."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_REST}"
    )


# Splits are applied one after the other, each to the pieces of the one before; what a pattern does not match
# stays a piece of its own.
_LLAMA3 = (_modern(r"\p{N}{1,3}"),)
_QWEN2 = (_modern(r"\p{N}"),)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_PLAIN = (
    r"[\p{P}\$\+<=>\^~\|]+",
    rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
)
_GPT4O = (_cased(rf"(?i:{_ENGLISH})?", r"\p{N}{1,3}"),)
_TEKKEN = (_cased("", r"\p{N}"),)

#: name in `tokenizer.ggml.pre` -> the patterns that split text
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _PLAIN,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(
        (
            "llama-bpe",
            "llama3",
            "llama-v3",
            "smaug-bpe",
            "dbrx",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ),
        _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
# : Of these a whole piece that is a token is taken as it is, whatever the merges say; and a BOS is the
# default.
_WHOLE_PIECES = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "tekken",
}


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Build it from the file's metadata.

    Raises:
        TokenizerError: no tokenizer in the file, a kind or pre-tokenizer that is not known, or data that
        contradict
            each other.
    """
    metadata = file.metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        raise TokenizerError(f"{file.path}: has no tokenizer. {SKIP_HINT}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens:
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.tokens is missing or not a list of strings. {SKIP_HINT}"
        )
    tokens = list(tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list):
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.token_type is {types!r:.80}, not one type for each token"
        )
    if len(types) != len(tokens):
        raise TokenizerError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
    pre = metadata.get("tokenizer.ggml.pre")
    with library_errors(f"{file.path}: its tokenizer is damaged"):
        if kind == "gpt2":
            backend, bos_default = _byte_level(file, tokens, types, pre), pre in _WHOLE_PIECES
        elif kind == "llama":
            backend, bos_default = _sentencepiece(file, tokens, types), True
        else:
            raise TokenizerError(
                f"{file.path}: tokenizer {kind!r} is not supported; supported are gpt2 (byte-level BPE) and "
                f"llama (SentencePiece). {SKIP_HINT}"
            )
        names = _special_names(file, tokens)
        _mark_special(backend, tokens, types, kind == "gpt2")
        _add_bos_and_eos(file, backend, names, bos_default)
    return Tokenizer(backend, special_tokens=names, chat_templates=_chat_templates(metadata), path=file.path)


def _special_names(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    keys = {
        "bos": "bos",
        "eos": "eos",
        "unk": "unknown",
        "pad": "padding",
        "sep": "seperator",
        "mask": "mask",
        "cls": "cls",
    }
    names = {}
    for name, key in keys.items():
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None or index == 0xFFFFFFFF:  # how some writers say "none"
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise TokenizerError(
                f"{file.path}: {key}_token_id is {index!r}, but there are {len(tokens)} tokens"
            )
        names[f"{name}_token"] = tokens[index]
    return names


def _mark_special(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], byte_level: bool
) -> None:
    """Control tokens are special, user-defined ones are added: both are found in text before it is split."""
    from tokenizers import AddedToken

    marked = [(text, kind) for text, kind in zip(tokens, types, strict=True) if kind != NORMAL and text]
    special_kinds = (
        (CONTROL,) if byte_level else (CONTROL, UNKNOWN)
    )  # SentencePiece's <unk> is not text either
    special = [text for text, kind in marked if kind in special_kinds]
    added = [text for text, kind in marked if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])


def _add_bos_and_eos(
    file: GgufFile, backend: tokenizers.Tokenizer, names: dict[str, str], bos_default: bool
) -> None:
    from tokenizers import processors

    template, special = ["$A"], []
    for name, default in (("bos", bos_default), ("eos", False)):
        if not file.metadata.get(f"tokenizer.ggml.add_{name}_token", default) or f"{name}_token" not in names:
            continue
        text = names[f"{name}_token"]
        template = [text, *template] if name == "bos" else [*template, text]
        special.append((text, file.metadata[f"tokenizer.ggml.{name}_token_id"]))
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict(special).items())
        )


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {
        key: value for key, value in metadata.items() if key.startswith(prefix) and isinstance(value, str)
    }
    return {
        "default" if key == prefix else key.removeprefix(f"{prefix}."): value for key, value in found.items()
    }


def _byte_level(
    file: GgufFile, tokens: Sequence[str], types: Sequence[int], pre: object
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if pre is None:
        logger.warning("%s: tokenizer.ggml.pre is missing; text is split as for 'default'", file.path)
        pre = "default"
    patterns = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if patterns is None:
        hint = did_you_mean(str(pre), PRE_TOKENIZERS)
        raise TokenizerError(
            f"{file.path}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known{hint}; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. {SKIP_HINT}"
        )
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, StringArray):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.merges is missing. {SKIP_HINT}")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    broken = next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None)
    if broken is not None:
        raise TokenizerError(f"{file.path}: tokenizer.ggml.merges has {' '.join(broken)!r}, which is no pair")
    vocab = {text: index for index, text in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _WHOLE_PIECES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(
            f"{file.path}: tokenizer.ggml.scores is missing or not one for each of {len(tokens)} tokens"
        )
    vocab = {text: index for index, text in enumerate(tokens)}
    unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_space = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_space]) if prefix else to_space
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Merges that do as SentencePiece: of all neighbours that join to a token, the best score joins first."""
    mergeable = {
        text: score
        for text, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    index = {text: i for i, text in enumerate(tokens)}
    merges = []
    for text, score in mergeable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-score, index[left], index[right], left, right))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]
