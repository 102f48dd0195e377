from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gguf_factory
import tokenizer_factory as factory
from pelton.detokenizer import IncrementalDetokenizer, find_stop, possible_stop
from pelton.gguf import GgufFile
from pelton.gguf_tokenizer import tokenizer_from_gguf
from pelton.sampling import SamplingParams
from pelton.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"
CASES = {
    case["name"]: case for case in json.loads((DATA / "cases.json").read_text(encoding="utf-8"))["cases"]
}


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(factory.byte_level())


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    values = gguf_factory.sentencepiece_values(
        *factory.sentencepiece_vocabulary(), **{"ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
    )
    path = gguf_factory.write_gguf(
        tmp_path_factory.mktemp("spm") / "m.gguf", values=gguf_factory.metadata(**values)
    )
    return tokenizer_from_gguf(GgufFile(path))


@pytest.fixture(scope="module")
def markov() -> Tokenizer:
    return load_tokenizer(DATA / "markov-bytelevel")


def run(
    tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = (), **params: Any
) -> tuple[list[str], int, str | None]:
    """The deltas (the last one is the flush), how many ids were taken, and the stop string."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.append(token_id))
        if detokenizer.stop_reason is not None:
            break
    taken = len(deltas)
    deltas.append(detokenizer.flush())
    assert detokenizer.text == "".join(deltas)
    return deltas, taken, detokenizer.stop_reason


def certain(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """All that more bytes cannot change."""
    content = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.all_special_ids)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(content)


def oracle(
    texts: Sequence[str], whole: str, stops: Sequence[str], min_tokens: int = 0, include: bool = False
) -> tuple[str, int, str | None]:
    """From the text that is certain after each number of tokens: the text, the tokens taken, the stop string."""
    for count in range(1, len(texts)):
        before, now = len(texts[count - 1]), texts[count]
        ends = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(now))
            if now.startswith(stop, start) and before < start + len(stop)
        ]
        if ends and count >= min_tokens:
            start, length, stop = min(ends)
            return now[: start + length] if include else now[:start], count, stop
    return whole, len(texts) - 1, None


# --- the cases from the field ---


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith("stop_") and name != "stop_token_id"]
)
def test_stop_string_cases(markov, name):
    case = CASES[name]
    params, expected = case["params"], case["expect"]
    given = {
        key: params[key] for key in ("stop", "min_tokens", "include_stop_str_in_output") if key in params
    }
    answer = [56, 57, 58, 59, 60, 61][: params["max_tokens"]]  # then the model says eos
    deltas, taken, reason = run(markov, answer, case["prompt_token_ids"], **given)
    assert "".join(deltas) == expected["text"]
    assert answer[:taken] == [i for i in expected["token_ids"] if i != 2]
    ended_by_text = expected["finish_reason"] == "stop" and 2 not in expected["token_ids"]
    assert (reason in params["stop"]) == ended_by_text


def test_text_is_shown_as_soon_as_it_is_certain(markov):
    # tokens: ab cST OPd ef
    assert run(markov, [56, 57, 58, 59], stop=["STOPPED"])[0] == ["ab", "c", "STOPd", "ef", ""]
    assert run(markov, [56, 57, 58, 59], stop=["zzz"])[0] == ["ab", "cST", "OPd", "ef", ""]
    assert run(markov, [56, 57, 58, 59])[0] == ["ab", "cST", "OPd", "ef", ""]
    assert run(markov, [56, 57], stop=["STOPPED"])[0] == ["ab", "c", "ST"]


def test_a_shorter_stop_string_inside_of_held_text_that_came_too_early(markov):
    # "TOP" is complete at the third token; held back for "STOPdez" it must not be found at the fourth
    deltas, taken, reason = run(markov, [56, 57, 58, 59, 60], stop=["STOPdez", "TOP"], min_tokens=4)
    assert ("".join(deltas), taken, reason) == ("abcSTOPdefgh", 5, None)


def test_nothing_comes_after_the_end(markov):
    detokenizer = IncrementalDetokenizer(markov, [], SamplingParams(stop="b"))
    assert detokenizer.append(56) == "a"
    assert detokenizer.stop_reason == "b"
    assert detokenizer.flush() == ""
    with pytest.raises(RuntimeError, match="after the end"):
        detokenizer.append(56)


def test_special_tokens_are_left_out_unless_asked_for(byte_level):
    ids = byte_level.encode("<|user|>a<tool>b</s>", add_special_tokens=False)
    assert "".join(run(byte_level, ids)[0]) == "a<tool>b"
    assert "".join(run(byte_level, ids, skip_special_tokens=False)[0]) == "<|user|>a<tool>b</s>"


def test_ids_without_a_token_have_no_text(byte_level):
    assert "".join(run(byte_level, [10**6, *byte_level.encode("ab", False), 2**40])[0]) == "ab"


# --- characters ---


def test_a_character_is_shown_when_its_last_byte_is_there(byte_level):
    letters = {byte: byte_level.backend.token_to_id(char) for char, byte in alphabet().items()}
    ids = [letters[byte] for byte in "é🎉x".encode()]
    assert run(byte_level, ids)[0] == ["", "é", "", "", "", "🎉", "x", ""]
    assert run(byte_level, ids[:4])[0] == ["", "é", "", "", "\ufffd"]
    assert run(byte_level, [*ids[2:5], ids[6]])[0] == ["", "", "", "\ufffdx", ""]


def alphabet() -> dict[str, int]:
    from pelton.tokenizer import byte_alphabet

    return byte_alphabet()


def test_byte_alphabet_is_the_librarys():
    from tokenizers import pre_tokenizers

    table = alphabet()
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for char, byte in table.items():
        if byte < 128:
            ((found, _),) = pre_tokenizers.ByteLevel(
                add_prefix_space=False, use_regex=False
            ).pre_tokenize_str(chr(byte))
            assert found == char


def test_the_first_space_is_stripped_only_at_the_beginning_of_all_text(sentencepiece):
    ids = sentencepiece.encode("the fox")
    assert ids[0] == 1
    assert "".join(run(sentencepiece, ids[1:])[0]) == "the fox"
    assert "".join(run(sentencepiece, ids[1:], prompt=[1])[0]) == "the fox"
    assert "".join(run(sentencepiece, ids[1:], prompt=ids)[0]) == " the fox"
    assert "".join(run(sentencepiece, ids[1:], prompt=[1], skip_special_tokens=False)[0]) == " the fox"


def test_byte_tokens_make_characters(sentencepiece):
    ids = [sentencepiece.backend.token_to_id(f"<0x{byte:02X}>") for byte in "ж→".encode()]
    assert run(sentencepiece, ids)[0] == ["", "ж", "", "", "→", ""]


# --- properties ---

STOPS = st.lists(st.text("abcSTOP \n.é", min_size=1, max_size=4), max_size=3)


@st.composite
def ids_of(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids of text, and ids at random."""
    text = st.text("abcSTOP .\né日🎉", max_size=12).map(
        lambda t: tokenizer.encode(t, add_special_tokens=False)
    )
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12)
    return list(itertools.chain(*draw(st.lists(text | noise, max_size=4))))


@given(data=st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_join_to_what_decode_says(byte_level, skip, data):
    prompt, ids = data.draw(ids_of(byte_level)), data.draw(ids_of(byte_level))
    # begin at a character: what the prompt's last bytes become is the prompt's text
    prompt = [i for i in prompt if byte_level.token_bytes(i).isascii()]
    deltas, _, _ = run(byte_level, ids, prompt, skip_special_tokens=skip)
    whole = byte_level.decode([*prompt, *ids], skip)
    assert byte_level.decode(prompt, skip) + "".join(deltas) == whole
    assert "".join(deltas) == byte_level.decode(ids, skip)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_stop_strings_against_a_search_of_the_whole_text(byte_level, data):
    ids, stops = data.draw(ids_of(byte_level)), data.draw(STOPS)
    min_tokens, include = data.draw(st.integers(0, 6)), data.draw(st.booleans())
    texts = [certain(byte_level, ids[:count]) for count in range(len(ids) + 1)]
    text, taken, reason = oracle(texts, byte_level.decode(ids), stops, min_tokens, include)
    deltas, found_taken, found_reason = run(
        byte_level, ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include
    )
    assert ("".join(deltas), found_taken, found_reason) == (text, taken, reason)
    # and nothing is held back without need
    shown = ""
    for count, delta in enumerate(deltas[:-1], 1):
        shown += delta
        if count < taken or reason is None:
            so_far = texts[count]
            held = max(
                (n for n in range(len(so_far) + 1) for s in stops if n < len(s) and so_far.endswith(s[:n])),
                default=0,
            )
            assert shown == so_far[: len(so_far) - held]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_sentencepiece_deltas_join_to_what_decode_says(sentencepiece, data):
    prompt, ids = data.draw(ids_of(sentencepiece)), data.draw(ids_of(sentencepiece))
    prompt = [i for i in prompt if i >= 259]  # no byte tokens
    deltas, _, _ = run(sentencepiece, ids, prompt)
    whole = sentencepiece.decode([*prompt, *ids])
    if "\ufffd" not in whole:  # the library makes U+FFFD of whole runs of byte tokens, valid ones included
        assert sentencepiece.decode(prompt) + "".join(deltas) == whole


def test_a_long_answer_takes_time_in_proportion(sentencepiece):
    """Counted, not timed: bytes looked at by the decoder, for a text without and with a stop string."""
    ids = sentencepiece.encode("the lazy dog. " * 2000)
    detokenizer = IncrementalDetokenizer(
        sentencepiece, [], SamplingParams(max_tokens=None, stop="the lazier")
    )
    longest = 0
    for token_id in ids:
        detokenizer.append(token_id)
        longest = max(longest, len(detokenizer._held))
    assert longest < len("the lazier")
    assert len(detokenizer.text) > 20_000


# --- tokenizers that do not join bytes ---


def test_word_pieces_are_decoded_in_windows():
    tokenizer = Tokenizer(factory.word_piece(), cleans_up_spaces=True)
    assert not tokenizer.joins_bytes
    ids = tokenizer.encode("the quick fox jumps over 123 dogs", add_special_tokens=False)
    for cut in range(len(ids)):
        deltas, _, _ = run(tokenizer, ids[cut:], ids[:cut])
        assert tokenizer.decode(ids[:cut]) + "".join(deltas) == tokenizer.decode(ids)
        # a window does not grow: all is shown at once
        assert "".join(deltas[:-1]) == "".join(deltas)


def test_windows_give_up_on_bytes_that_stay_broken(byte_level):
    class InWindows:
        """The byte-level tokenizer, decoded like one that is not known to join bytes."""

        def text_stream(self, context: Sequence[int], skip: bool) -> Any:
            from pelton.detokenizer import WindowStream

            return WindowStream(lambda ids: byte_level.decode(ids, skip), context)

    broken = byte_level.backend.token_to_id(next(char for char, byte in alphabet().items() if byte == 0xFF))
    letter = byte_level.encode("a", add_special_tokens=False)
    deltas, _, _ = run(InWindows(), [broken] * 40 + letter)
    assert "".join(deltas) == "\ufffd" * 40 + "a"
    assert max(map(len, deltas)) < 12
    text = "Grüße 日本語 🎉 done"
    deltas, _, _ = run(InWindows(), byte_level.encode(text, add_special_tokens=False))
    assert "".join(deltas) == text


# --- the two decisions ---


@pytest.mark.parametrize(
    ("text", "old", "stops", "expected"),
    [
        ("abcSTOPd", 5, ("STOP",), (3, "STOP")),
        ("abcSTOPd", 5, ("d", "STOP"), (3, "STOP")),
        ("abcSTOPd", 7, ("STOP",), None),  # it ended in what was there before
        ("abcSTOPd", 6, ("STOP",), (3, "STOP")),
        ("aab", 0, ("ab", "aab"), (0, "aab")),
        ("aab", 0, ("aab", "aa"), (0, "aa")),
        ("aXbXc", 3, ("X",), (3, "X")),
        ("abc", 0, ("d",), None),
    ],
)
def test_find_stop(text, old, stops, expected):
    assert find_stop(text, old, stops) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcST", ("STOP",), 2),
        ("abc", ("STOP",), 0),
        ("aaa", ("aaab",), 3),
        ("aa", ("aa",), 1),
        ("xS", ("STOP", "xSy"), 2),
        ("", ("a",), 0),
        ("abab", ("ababc", "b"), 4),
    ],
)
def test_possible_stop(text, stops, expected):
    assert possible_stop(text, stops) == expected
