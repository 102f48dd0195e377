"""How long a regular expression of a checkpoint may take: `re` tries one way to match after the other.

`(a+)+$` has 2^n ways to match n letters, and a file with such a pattern would hang the load. So the ways are counted,
from above, in the parsed pattern, for names as long as layers have them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

__all__ = ["LIMIT", "most_ways"]

#: more ways than these are refused
LIMIT = 10_000_000
_LENGTH = 40  # characters of a long name: model.layers.100.self_attn.q_proj has 32

_parser: Any = importlib.import_module("re._parser")


def most_ways(pattern: str) -> int:
    """At most so many ways to match a layer's name are tried; no more than a little over `LIMIT` is counted."""
    repeats, others = _sequence(_parser.parse(pattern))
    # k repeats of one character in a row divide the name among them
    return min(math.comb(_LENGTH + repeats, repeats) * others, LIMIT + 1)


def _sequence(items: Any) -> tuple[int, int]:
    """The repeats of one character that stand in a row, and the ways of everything else, multiplied."""
    repeats, others = 0, 1
    for operation, argument in items:
        more, ways = _item(str(operation), argument)
        repeats, others = min(repeats + more, LIMIT), min(others * ways, LIMIT + 1)
    return repeats, others


def _item(operation: str, argument: Any) -> tuple[int, int]:
    if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _repeat(*argument)
    if operation == "BRANCH":
        return _branch(argument[1])
    if operation == "GROUPREF_EXISTS":
        return _branch([part for part in argument[1:] if part is not None])
    if operation in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return _sequence(argument[-1])
    if operation == "ATOMIC_GROUP":
        return _sequence(argument)
    return 0, 1  # a character, a place, a group again


def _repeat(low: int, high: int, body: Any) -> tuple[int, int]:
    low, high = min(int(low), _LENGTH), min(int(high), _LENGTH)
    repeats, others = _sequence(body)
    if repeats == 0 and others == 1:
        return (1, 1) if high == _LENGTH else (0, high - low + 1)
    if high <= 1:
        return repeats, others + (1 - low)
    once = min(math.comb(_LENGTH + repeats, repeats) * others, LIMIT + 1)
    return 0, min(once**high, LIMIT + 1)


def _branch(parts: Sequence[Any]) -> tuple[int, int]:
    texts = [_text(part) for part in parts]
    if None not in texts:  # of different words only those that begin one another match at the same place
        return 0, max(sum(a.startswith(b) for b in texts) for a in texts)  # type: ignore[union-attr,arg-type]
    found = [_sequence(part) for part in parts]
    return max(repeats for repeats, _ in found), min(sum(others for _, others in found), LIMIT + 1)


def _text(part: Any) -> str | None:
    if all(str(operation) == "LITERAL" for operation, _ in part):
        text = "".join(chr(code) for _, code in part)
        return text.lower() if text.isascii() else None  # lower: the pattern may be told to ignore case
    return None
