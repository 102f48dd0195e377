from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, processors

import gguf_factory
import tokenizer_factory as factory
from pelton.errors import PeltonError, TokenizerError
from pelton.gguf import GgufFile
from pelton.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from pelton.tokenizer import Tokenizer, load_tokenizer

MARKOV = Path(__file__).parents[1] / "data" / "markov-bytelevel"
USER = [{"role": "user", "content": "ab"}]
PIECES = [
    *(
        "Hello",
        " world",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "   x",
        "12345",
        " 3.14",
        "1,000",
        "日本語",
        "中文字符",
        "한국어",
    ),
    *(
        "🎉",
        "👩‍👩‍👧",
        "é",
        "e\u0301",
        "ß",
        "İ",
        "'s",
        "don't",
        " I'LL",
        "<s>",
        "</s>",
        "<|user|>",
        "<tool>",
        " \n ",
        "\r\n",
    ),
    *(
        "…",
        "—",
        "$100",
        "½",
        "Ⅷ",
        "__init__",
        "=>",
        "\u00a0",
        "\u3000",
        "...",
        "?!",
        "CamelCase",
        " ",
        "the lazy dog",
        " .",
    ),
]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [
        "",
        " ",
        "".join(PIECES),
        *("".join(rng.choices(PIECES, k=rng.randint(1, 9))) for _ in range(count)),
    ]


def folder(path: Path, backend: Backend, config: dict[str, Any] | None = None, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    (path / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return path


NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "unk_token": "<unk>"}


# --- the field's cases ---


def test_a_chat_has_one_bos():
    assert load_tokenizer(MARKOV).apply_chat_template(USER) == [1, 4, 9, 10, 5]


@pytest.mark.parametrize(("text", "ids"), [("a", [1, 9]), ("", [1])])
def test_a_text_has_one_bos(text, ids):
    tokenizer = load_tokenizer(MARKOV)
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]


def test_no_chat_template_is_an_error_that_says_what_to_pass(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path / "m", factory.byte_level(), NAMES))
    assert tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match=r"no chat template.*chat_template='...'.*generate\(\)") as error:
        tokenizer.apply_chat_template(USER)
    assert str(tmp_path / "m") in str(error.value)
    chat = "{{ bos_token }}{{ messages[0].content }}"
    assert tokenizer.apply_chat_template(USER, chat_template=chat) == tokenizer.encode("ab")


def test_a_missing_tokenizer_mentions_skip_tokenizer_init(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer.*skip_tokenizer_init=True"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no such folder"):
        load_tokenizer(tmp_path / "nothing")


# --- folders, against Transformers ---


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    # earlier versions rendered keys of a message whose value is None
    return pytest.importorskip("transformers", minversion="5.24").AutoTokenizer


def sentencepiece_backend(tmp_path: Path) -> Backend:
    values = gguf_factory.sentencepiece_values(
        *factory.sentencepiece_vocabulary(), **{"ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
    )
    path = gguf_factory.write_gguf(tmp_path / "spm.gguf", values=gguf_factory.metadata(**values))
    return tokenizer_from_gguf(GgufFile(path)).backend


def without_bos(_: Path) -> Backend:
    backend = Backend.from_str(factory.byte_level().to_str())
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def truncating(_: Path) -> Backend:
    backend = Backend.from_str(factory.byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_token="<unk>")
    return backend


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (lambda _: factory.byte_level(), NAMES),
        (lambda _: factory.byte_level(), {**NAMES, "clean_up_tokenization_spaces": True}),  # not for BPE
        (lambda _: factory.byte_level(), {**NAMES, "add_bos_token": False}),  # tokenizer.json decides
        (lambda _: factory.byte_level(), {**NAMES, "extra_special_tokens": ["<tool>"]}),
        (lambda _: factory.byte_level(), {**NAMES, "additional_special_tokens": ["<tool>", "<|user|>"]}),
        (lambda _: factory.byte_level(), {**NAMES, "pad_token": "ain", "cls_token": "<tool>"}),
        (
            lambda _: factory.byte_level(),
            {**NAMES, "added_tokens_decoder": {"382": {"content": "3.14", "special": True}}},
        ),
        (without_bos, NAMES),
        (without_bos, {**NAMES, "add_bos_token": True}),
        (truncating, NAMES),
        (sentencepiece_backend, NAMES),
        (lambda _: factory.word_piece(), {"unk_token": "[UNK]", "clean_up_tokenization_spaces": True}),
        (lambda _: factory.word_piece(), {"unk_token": "[UNK]", "clean_up_tokenization_spaces": False}),
    ],
)
def test_ids_and_text_are_those_of_transformers(tmp_path, auto_tokenizer, backend, config):
    path = folder(tmp_path / "m", backend(tmp_path), config)
    ours, theirs = load_tokenizer(path), auto_tokenizer.from_pretrained(path)
    for text in texts(150):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)


TEMPLATES = {
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    {%- endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}{{ '<é>' | tojson }}",
    "controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ add_generation_prompt }}{{ tools is none }}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}{{ date_string }}",
    "missing": "{{ messages[0].name is defined }}{{ messages[0].nothing }}",
    "documents": "{% for d in documents %}{{ d.title }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_render_as_in_transformers(tmp_path, auto_tokenizer, name):
    path = folder(tmp_path / "m", factory.byte_level(), {**NAMES, "chat_template": TEMPLATES[name]})
    ours, theirs = load_tokenizer(path), auto_tokenizer.from_pretrained(path)
    chat = [
        {"role": "user", "content": "Hi <|user|> ünï", "name": None},
        {"role": "assistant", "content": "  yes\n"},
        {"role": "user", "content": "<b>&amp;</b>"},
    ]
    for prompt in (True, False):
        options = {
            "add_generation_prompt": prompt,
            "enable_thinking": False,
            "date_string": "1 Jan",
            "documents": [{"title": "T", "text": "x"}],
        }
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.render_chat(chat, **options) == text
        assert ours.apply_chat_template(chat, **options) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("content", ["so far", "so far  ", " so\nfar"])
@pytest.mark.parametrize("shape", ["{{ m.content }}", "{{ m.content | trim }}"])
def test_continuing_the_last_message_as_in_transformers(tmp_path, auto_tokenizer, content, shape):
    template = "{% for m in messages %}[{{ m.role }}]" + shape + "[end]{% endfor %}"
    path = folder(tmp_path / "m", factory.byte_level(), {**NAMES, "chat_template": template})
    ours, theirs = load_tokenizer(path), auto_tokenizer.from_pretrained(path)
    chat = [*USER, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours.render_chat(chat, **options)
    assert text == theirs.apply_chat_template(chat, tokenize=False, **options)
    assert text.startswith("[user]ab[end][assistant]") and not text.endswith("[end]")


# --- where templates come from ---


def test_template_files_win_over_the_key(tmp_path):
    config = {**NAMES, "chat_template": "key"}
    assert load_tokenizer(folder(tmp_path / "a", factory.byte_level(), config)).chat_template == "key"
    path = folder(tmp_path / "b", factory.byte_level(), config, chat_template__jinja="file")
    assert load_tokenizer(path).chat_template == "file"
    path = folder(
        tmp_path / "c", factory.byte_level(), config, chat_template__json='{"chat_template": "json"}'
    )
    assert load_tokenizer(path).chat_template == "json"


def test_several_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    path = folder(tmp_path / "m", factory.byte_level(), {**NAMES, "chat_template": named})
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("from file")
    tokenizer = load_tokenizer(path)
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[{"type": "function"}]) == "with tools"
    assert tokenizer.render_chat(USER, chat_template="rag") == "from file"
    assert tokenizer.render_chat(USER, chat_template="{{ 1 + 1 }}") == "2"
    del tokenizer.chat_templates["default"]
    with pytest.raises(TokenizerError, match="one of rag, tool_use"):
        tokenizer.render_chat(USER)


def test_the_date_is_this_machines(tmp_path):
    import datetime

    path = folder(tmp_path / "m", factory.byte_level(), {"chat_template": "{{ strftime_now('%Y-%m') }}"})
    assert load_tokenizer(path).render_chat(USER) == datetime.datetime.now().strftime("%Y-%m")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            USER,
            "refuses these messages: roles must alternate",
        ),
        ("{% for m in messages %}", USER, "not valid Jinja"),
        ("{{ messages[0].content.nothing.more }}", USER, "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", USER, "refuses these messages.*unsafe"),
        ("{{ messages.append(1) }}", USER, "refuses these messages.*unsafe"),
        ("{{ 1 / 0 }}", USER, "refuses these messages: division by zero"),
        ("{{ 10 ** 400 * 1.5 }}", USER, "refuses these messages: int too large"),
        (
            "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
            USER,
            "refuses these messages: maximum recursion depth",
        ),
        ("x", [], r"messages must be a list.*\(empty\)"),
        ("x", "hello", "messages must be a list.*got str"),
        ("x", ["hello"], r"messages\[0\] must be a dict with 'role'"),
        ("x", [{"content": "hello"}], r"messages\[0\] must be a dict with 'role'"),
    ],
)
def test_chats_that_are_refused(tmp_path, template, messages, message):
    tokenizer = load_tokenizer(folder(tmp_path / "m", factory.byte_level(), {"chat_template": template}))
    with pytest.raises(TokenizerError, match=message):
        tokenizer.apply_chat_template(messages)


def test_continuing_needs_something_to_continue(tmp_path):
    tokenizer = load_tokenizer(
        folder(tmp_path / "m", factory.byte_level(), {"chat_template": "[{{ messages[0].role }}]"})
    )
    with pytest.raises(TokenizerError, match="add_generation_prompt=False"):
        tokenizer.render_chat(USER, continue_final_message=True)
    with pytest.raises(TokenizerError, match="does not write the last message"):
        tokenizer.render_chat(USER, False, continue_final_message=True)
    with pytest.raises(TokenizerError, match="last message with text"):
        tokenizer.render_chat([{"role": "assistant"}], False, continue_final_message=True)


# --- damaged folders and odd input ---


def test_merges_that_end_the_librarys_process_or_make_it_panic_are_one_error(tmp_path):
    """In a process of its own: the library aborts when a prefix is cut off in the middle of a character."""
    path = folder(tmp_path / "m", factory.byte_level(), NAMES)
    data = json.loads((path / "tokenizer.json").read_text())
    model = data["model"] | {"vocab": {"a": 0, "ß": 1, "ab": 2}, "merges": [["a", "ß"]]}
    for prefix, message in ((None, "not a tokenizer that can be read"), ("x", "does not fit the continuing")):
        changed = {**data, "added_tokens": [], "model": {**model, "continuing_subword_prefix": prefix}}
        (path / "tokenizer.json").write_text(json.dumps(changed))
        code = f"from pelton.tokenizer import load_tokenizer\nload_tokenizer({str(path)!r})"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode == 1, found.stderr
        assert f"TokenizerError: {path / 'tokenizer.json'}" in found.stderr and message in found.stderr


def test_a_subword_prefix_that_fits_is_read(tmp_path):
    path = folder(tmp_path / "m", factory.byte_level(), NAMES)
    data = json.loads((path / "tokenizer.json").read_text())
    vocab = {"a": 0, "##b": 1, "ab": 2, "##c": 3, "abc": 4}
    merges = [["a", "##b"], ["ab", "##c"]]
    data["model"] |= {"vocab": vocab, "merges": merges, "continuing_subword_prefix": "##"}
    data |= {"added_tokens": [], "post_processor": None}
    (path / "tokenizer.json").write_text(json.dumps(data))
    assert load_tokenizer(path).encode("abc") == [4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer that can be read"),
        ("tokenizer.json", "", "tokenizer.json: not a tokenizer that can be read"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json: not a tokenizer that can be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: must hold a JSON object, not list"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: cannot be read as JSON"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": "y"}}',
            "added_tokens_decoder must map ids",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder must map ids"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', "extra_special_tokens must be a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": null}', None),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"300": "special"}}', None),
        ("chat_template.jinja", "\xff", "chat_template.jinja: cannot be read as text"),
        ("special_tokens_map.json", "\xff", "special_tokens_map.json: cannot be read as JSON"),
        ("vocab.json", "{}", None),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    path = folder(tmp_path / "m", factory.byte_level(), NAMES)
    (path / name).write_bytes(content.encode("latin-1"))
    if message is None:
        load_tokenizer(path)
        return
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    "files", [{"vocab.json": "{}"}, {"tokenizer.model": "no protobuf"}, {"tekken.json": "{"}]
)
def test_other_tokenizer_files_that_transformers_cannot_convert(tmp_path, files):
    pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=f"{next(iter(files))}.*skip_tokenizer_init=True"):
        load_tokenizer(tmp_path)


def test_a_folder_with_vocab_and_merges_is_converted(tmp_path):
    pytest.importorskip("transformers")
    backend = without_bos(tmp_path)
    backend.model.save(str(tmp_path))
    shutil.copy(MARKOV / "config.json", tmp_path)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.joins_bytes
    for text in ("Hello  world 123", "Grüße 日本語", "a</s>b"):
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), False) == text


@pytest.mark.parametrize("text", ["a\ud800b", 3, None, b"bytes"])
def test_what_is_no_text(text):
    with pytest.raises(TokenizerError, match="must be valid Unicode text"):
        load_tokenizer(MARKOV).encode(text)


def test_special_tokens_outside_of_the_vocabulary_get_no_new_ids(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path / "m", factory.byte_level(), {**NAMES, "pad_token": "[PAD]"}))
    assert tokenizer.vocab_size == factory.byte_level().get_vocab_size()
    assert max(tokenizer.encode("[PAD]")) < tokenizer.vocab_size
    assert tokenizer.special_tokens["pad_token"] == "[PAD]"  # templates may write it


def test_ids_that_the_vocabulary_does_not_have():
    tokenizer = load_tokenizer(MARKOV)
    assert tokenizer.decode([9, 127, 10]) == "ab"
    assert tokenizer.decode([9, -1, 2**40, 10]) == "ab"
    assert tokenizer.token_bytes(127) == tokenizer.token_bytes(-1) == tokenizer.token_bytes(2**70) == b""
    assert tokenizer.id_to_token(-1) is None
    assert tokenizer.vocab_size == 76
    assert tokenizer.all_special_ids == (0, 1, 2, 3, 4, 5, 6)  # <think> is added, but not special


# --- GGUF ---


def byte_level_file(tmp_path: Path, pre: str | None = "gpt-2", **changes: Any) -> Path:
    state = json.loads(factory.byte_level().to_str())
    vocab = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocab] + ["<tool>"]
    types = [3 if index < 4 else 1 for index in range(len(vocab))] + [4]
    merges = [" ".join(merge) for merge in state["model"]["merges"]]
    values = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "chat_template": "T", **changes}
    vocabulary = gguf_factory.byte_level_values(tokens, merges, types, pre, **values)
    vocabulary = {key: value for key, value in vocabulary.items() if value is not ...}
    return gguf_factory.write_gguf(tmp_path / "m.gguf", values=gguf_factory.metadata(**vocabulary))


def sentencepiece_file(tmp_path: Path, **changes: Any) -> Path:
    tokens, scores, types = factory.sentencepiece_vocabulary()
    tokens, scores, types = [*tokens, "<|user|>", "<think>"], [*scores, 0.0, 0.0], [*types, 3, 4]
    values = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, **changes}
    vocabulary = gguf_factory.sentencepiece_values(tokens, scores, types, **values)
    return gguf_factory.write_gguf(tmp_path / "m.gguf", values=gguf_factory.metadata(**vocabulary))


def test_byte_level_gguf_equals_the_tokenizer_it_was_made_of(tmp_path):
    original = Tokenizer(factory.byte_level())
    tokenizer = load_tokenizer(byte_level_file(tmp_path))
    for text in texts(100):
        if "▁ß" not in text:  # the original has one token more
            ids = original.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text) == ids, text
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == original.decode(ids, skip)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (1, 2, "T")
    assert tokenizer.all_special_ids == (0, 1, 2, 3)


TEXT = "I'LL pay   $1234567 for Ⅷ\n\n  CamelCaseé's/\nx"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (
            "gpt-2",
            "I|'|LL| pay|  | $|1234567| for| Ⅷ|\n\n | CamelCaseé|'s|/|\n|x",
        ),
        (
            "smollm",
            "I|'|LL| pay|  | $|1|2|3|4|5|6|7| for| |Ⅷ|\n\n | CamelCaseé|'s|/|\n|x",
        ),
        (
            "default",
            "I|'|LL| pay|   |$|123|456|7| for| |Ⅷ|\n\n | CamelCaseé|'|s|/|\n|x",
        ),
        (
            "llama-bpe",
            "I|'LL| pay|  | $|123|456|7| for| |Ⅷ|\n\n| | CamelCaseé|'s|/\n|x",
        ),
        (
            "qwen2",
            "I|'LL| pay|  | $|1|2|3|4|5|6|7| for| |Ⅷ|\n\n| | CamelCaseé|'s|/\n|x",
        ),
        (
            "gpt-4o",
            "I'LL| pay|  | $|123|456|7| for| |Ⅷ|\n\n| | Camel|Caseé's|/\n|x",
        ),
        (
            "tekken",
            "I|'LL| pay|  | $|1|2|3|4|5|6|7| for| |Ⅷ|\n\n| | Camel|Caseé|'s|/\n|x",
        ),
    ],
)
def test_pre_tokenizers_split(tmp_path, pre, pieces):
    backend = load_tokenizer(byte_level_file(tmp_path, pre)).backend
    found = [TEXT[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert found == pieces.split("|")


def test_the_librarys_own_forms_of_two_pre_tokenizers(tmp_path):
    """SmolLM2's tokenizer.json says Digits and ByteLevel, GPT-2's only ByteLevel."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    forms = {"gpt-2": gpt2, "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), gpt2])}
    for pre, form in forms.items():
        backend = load_tokenizer(byte_level_file(tmp_path, pre)).backend
        for text in texts(200):
            assert backend.pre_tokenizer.pre_tokenize_str(text) == form.pre_tokenize_str(text)


def test_whole_pieces_are_taken_without_merges(tmp_path):
    tokens, merges = ["a", "b", "c", "ab", "abc"], ["a b"]
    for pre, ids in (("llama-bpe", [4]), ("qwen2", [3, 2])):
        values = gguf_factory.byte_level_values(tokens, merges, [1] * 5, pre)
        path = gguf_factory.write_gguf(tmp_path / "m.gguf", values=gguf_factory.metadata(**values))
        assert load_tokenizer(path).encode("abc") == ids


@pytest.mark.parametrize(
    ("make", "changes", "expected"),
    [
        (byte_level_file, {}, "$"),
        (byte_level_file, {"pre": "llama-bpe"}, "<s> $"),
        (byte_level_file, {"pre": "llama-bpe", "ggml.add_bos_token": False}, "$"),
        (byte_level_file, {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, "<s> $ </s>"),
        (byte_level_file, {"ggml.add_bos_token": True, "ggml.bos_token_id": ...}, "$"),
        (sentencepiece_file, {}, "<s> $"),
        (sentencepiece_file, {"ggml.add_bos_token": False}, "$"),
        (sentencepiece_file, {"ggml.add_eos_token": True}, "<s> $ </s>"),
    ],
)
def test_bos_and_eos(tmp_path, make: Callable[..., Path], changes, expected):
    tokenizer = load_tokenizer(make(tmp_path, **changes))
    bare = tokenizer.encode("Hello", add_special_tokens=False)
    ids = {"$": bare, "<s>": [1], "</s>": [2]}
    assert tokenizer.encode("Hello") == [i for part in expected.split() for i in ids[part]]


# Ids of the file above as llama.cpp gives them (space prefix on, then off); <0xNN> are bytes.
@pytest.mark.parametrize(
    ("text", "prefixed", "plain"),
    [
        ("fox", "▁fox", "fox"),
        (" fox", "▁ ▁fox", "▁fox"),
        ("the  dog", "▁t he ▁ ▁dog", "t he ▁ ▁dog"),
        ("ж", "▁ <0xD0> <0xB6>", "<0xD0> <0xB6>"),
        ("<|user|>fox</s> fox", "<|user|> ▁fox </s> ▁ ▁fox", "<|user|> fox </s> ▁fox"),
        ("a<think>b", "▁a <think> ▁b", "a <think> b"),
        ("\x01", "▁ <0x01>", "<0x01>"),
        ("", "", ""),
    ],
)
def test_sentencepiece_text(tmp_path, text, prefixed, plain):
    for prefix, expected in ((True, prefixed), (False, plain)):
        file = sentencepiece_file(tmp_path, **{"ggml.add_bos_token": False, "ggml.add_space_prefix": prefix})
        tokenizer = load_tokenizer(file)
        ids = tokenizer.encode(text)
        found = [tokenizer.id_to_token(i) for i in ids]
        # pieces of words depend on the training of the vocabulary: what counts is where they are cut for sure
        assert "".join(map(str, found)) == expected.replace(" ", "")
        if "<" not in text:
            assert tokenizer.decode(ids) == text


def sentencepiece_reference(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition: join the neighbours with the best score, the leftmost of equals."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores
        ]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def test_merges_from_scores_do_as_sentencepiece(tmp_path):
    tokens, scores, types = factory.sentencepiece_vocabulary()
    known = {text: score for text, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path, **{"ggml.add_bos_token": False}))
    for text in texts(200):
        text = "".join(char for char in text if char in known or char == " ")
        if not text or "<" in text:
            continue
        expected = sentencepiece_reference("▁" + text.replace(" ", "▁"), known)
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode(text)] == expected


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (
            byte_level_file,
            {"pre": "smolm"},
            r"pre-tokenizer 'smolm' .*did you mean 'smollm'.*known are .*llama-bpe",
        ),
        (byte_level_file, {"ggml.model": "bert"}, "tokenizer 'bert' is not supported; supported are gpt2"),
        (byte_level_file, {"ggml.model": "no_vocab"}, "no tokenizer.*skip_tokenizer_init"),
        (byte_level_file, {"ggml.tokens": ...}, "tokenizer.ggml.tokens is missing"),
        (
            byte_level_file,
            {"ggml.tokens": [1, 2]},
            "tokenizer.ggml.tokens is missing or not a list of strings",
        ),
        (byte_level_file, {"ggml.merges": ...}, "tokenizer.ggml.merges is missing"),
        (byte_level_file, {"ggml.merges": ["ab"]}, "'ab', which is no pair"),
        (byte_level_file, {"ggml.merges": ["a zz"]}, "its tokenizer is damaged"),
        (
            byte_level_file,
            {"ggml.token_type": [1, 1]},
            "382 tokens but 2 token types|381 tokens but 2 token types",
        ),
        (byte_level_file, {"ggml.token_type": 1}, "token_type is 1, not one type for each token"),
        (byte_level_file, {"ggml.eos_token_id": 5000}, "eos_token_id is 5000, but there are 381 tokens"),
        (sentencepiece_file, {"ggml.scores": [1.0]}, "tokenizer.ggml.scores is missing or not one for each"),
    ],
)
def test_gguf_tokenizers_that_cannot_be_used(tmp_path, make, changes, message):
    path = make(tmp_path, **changes)
    with pytest.raises(PeltonError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def test_no_pre_tokenizer_is_the_default_with_a_warning(tmp_path, caplog):
    tokenizer = load_tokenizer(byte_level_file(tmp_path, None))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    default = load_tokenizer(byte_level_file(tmp_path, "default"))
    assert tokenizer.encode(TEXT) == default.encode(TEXT)


def test_every_pre_tokenizer_keeps_all_of_the_text(tmp_path):
    for pre in PRE_TOKENIZERS:
        tokenizer = load_tokenizer(byte_level_file(tmp_path, pre))
        for text in texts(10):
            assert tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False) == text
