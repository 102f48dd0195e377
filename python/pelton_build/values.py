"""Small values that the schema is made of: versions, version ranges, sizes, labels, nearest known names.

All are frozen, and `str(parse(text))` is the canonical spelling of `text`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "Size",
    "Version",
    "VersionRange",
    "check_label",
    "check_requirement",
    "did_you_mean",
    "join_label",
    "nearest",
    "parse_switch",
]

_VERSION = re.compile(r"\d{1,6}(\.\d{1,6}){0,3}", re.ASCII)
_CLAUSE = re.compile(r"\s*(==|!=|>=|<=|>|<|~=)?\s*([^\s,<>=!~]+)\s*", re.ASCII)
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,3})?)\s*([A-Za-z]*)", re.ASCII)
# A part of digits alone has no leading zero: installers would drop it, and the file would get another name.
_LABEL = re.compile(r"(?!0\d+(?![a-z\d]))[a-z\d]+(\.(?!0\d+(?![a-z\d]))[a-z\d]+)*", re.ASCII)
_REQUIREMENT = re.compile(
    r"[A-Z\d](?:[A-Z\d._-]*[A-Z\d])?\s*"  # name
    r"(?:\[\s*[A-Z\d._-]+\s*(?:,\s*[A-Z\d._-]+\s*)*\]\s*)?"  # extras
    r"(?:(?:===|==|!=|>=|<=|>|<|~=)\s*[A-Z\d][A-Z\d._*+!-]*\s*"  # version clauses
    r"(?:,\s*(?:===|==|!=|>=|<=|>|<|~=)\s*[A-Z\d][A-Z\d._*+!-]*\s*)*)?"
    r"(?:;[^;]+)?",  # marker
    re.ASCII | re.IGNORECASE,
)
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SWITCH = {
    "1": True,
    "on": True,
    "true": True,
    "yes": True,
    "0": False,
    "off": False,
    "false": False,
    "no": False,
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `word`, letter case, blanks and the kind of dash apart; None when none is
    like it."""

    def plain(text: str) -> str:
        return re.sub(r"[\s_.-]+", "-", text.strip().lower())

    table: dict[str, str] = {}
    for name in sorted(known):
        table.setdefault(plain(name), name)
    close = difflib.get_close_matches(plain(word), table, n=1, cutoff=cutoff)
    return table[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'? known: ...` for an error message about the unknown name `word`."""
    names = sorted(known)
    close = nearest(word, names)
    hint = f"; did you mean {close!r}?" if close else ""
    listed = f" known: {', '.join(names)}" if names else ""
    return f"{hint}{listed}" if hint else f";{listed}" if listed else ""


def parse_switch(text: str) -> bool:
    """`on` or `off` in the spellings people use (1/0, true/false, yes/no, any case). Raises ValueError."""
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        close = nearest(text, _SWITCH, cutoff=0.7)
        hint = f"; did you mean {close!r}?" if close else ";"
        raise ValueError(
            f"{text!r} is neither on nor off{hint} allowed: on, off, 1, 0, true, false, yes, no"
        ) from None


@dataclass(frozen=True, order=True)
class Version:
    """A plain numeric version such as 12.8 or 13.0.88; missing parts count as 0 when compared."""

    parts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Version:
        """Raises ValueError when `text` is not one to four numbers with points between them."""
        if not _VERSION.fullmatch(text):
            raise ValueError(
                f"{text!r} is not a version; write numbers with points between them, such as 12.8"
            )
        return cls(tuple(int(part) for part in text.split(".")))

    def __str__(self) -> str:
        return ".".join(map(str, self.parts))

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Four numbers to compare by, so that 13 and 13.0 are one version."""
        padded = (*self.parts, 0, 0, 0, 0)[:4]
        return (padded[0], padded[1], padded[2], padded[3])


@dataclass(frozen=True)
class VersionRange:
    """Versions allowed: clauses such as `>=12.8,<14`, all of which must hold. No clause allows everything."""

    clauses: tuple[tuple[str, Version], ...] = ()

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Raises ValueError on an unknown operator, a bare version, or a range that nothing can satisfy."""
        clauses: list[tuple[str, Version]] = []
        for piece in text.split(",") if text.strip() else []:
            match = _CLAUSE.fullmatch(piece)
            if match is None:
                raise ValueError(
                    f"{piece.strip()!r} in {text!r} is not a version clause; write e.g. '>=12.8,<14'"
                )
            operator, number = match[1], match[2]
            if operator is None:
                raise ValueError(f"{number!r} has no operator; write e.g. '>={number}' or '=={number}'")
            if operator in ("~=", "!="):
                raise ValueError(f"operator {operator!r} is not supported; use ==, >=, >, <= and <")
            clauses.append((operator, Version.parse(number)))
        made = cls(tuple(clauses))
        if not made._satisfiable():
            raise ValueError(f"no version satisfies {text!r}")
        return made

    def __str__(self) -> str:
        return ",".join(f"{operator}{version}" for operator, version in self.clauses)

    def __contains__(self, version: object) -> bool:
        """`==12.8` holds for 12.8.93 too: a shorter version names all that begin with it."""
        if not isinstance(version, Version):
            return False
        return all(_holds(version, operator, bound) for operator, bound in self.clauses)

    @property
    def lower(self) -> Version | None:
        """The highest lower bound, None when there is none."""
        bounds = [bound for operator, bound in self.clauses if operator in (">=", ">", "==")]
        return max(bounds, key=lambda v: v.key) if bounds else None

    def _satisfiable(self) -> bool:
        lows = [(b.key, op == ">") for op, b in self.clauses if op in (">=", ">")]
        highs = [(b.key, op == "<") for op, b in self.clauses if op in ("<=", "<")]
        exact = [b for op, b in self.clauses if op == "=="]
        if exact:
            return all(
                b in VersionRange(tuple(c for c in self.clauses if c[0] != "==")) for b in exact
            ) and all(
                a.parts[: len(b.parts)] == b.parts or b.parts[: len(a.parts)] == a.parts
                for a in exact
                for b in exact
            )
        if not lows or not highs:
            return True
        low, low_open = max(lows)
        high = min(key for key, _ in highs)
        high_open = any(is_open for key, is_open in highs if key == high)
        # Versions go on without end below their last part, so only equal bounds can be empty.
        return low < high or (low == high and not low_open and not high_open)


def _holds(version: Version, operator: str, bound: Version) -> bool:
    match operator:
        case "==":
            return version.parts[: len(bound.parts)] == bound.parts or version.key == bound.key
        case ">=":
            return version.key >= bound.key
        case ">":
            return version.key > bound.key
        case "<=":
            return version.key <= bound.key
        case _:
            return version.key < bound.key


@dataclass(frozen=True, order=True)
class Size:
    """A number of bytes, written with a binary unit: `5 MiB`."""

    bytes: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Raises ValueError on a missing or decimal unit, or on nothing at all."""
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a size; write e.g. '200 MiB'")
        number, unit = match[1], match[2]
        if unit not in _UNITS:
            close = nearest(unit, _UNITS, cutoff=0.4)
            hint = f"; did you mean '{number} {close}'?" if close else ""
            raise ValueError(f"size {text!r} has no unit out of {', '.join(_UNITS)}{hint}")
        size = float(number) * _UNITS[unit]
        if size < 1:
            raise ValueError(f"size {text!r} must be at least one byte")
        return cls(int(size))

    def __str__(self) -> str:
        for unit, factor in reversed(_UNITS.items()):
            if self.bytes >= factor and self.bytes % factor == 0:
                return f"{self.bytes // factor} {unit}"
        return f"{self.bytes} B"

    def human(self) -> str:
        """About this many, one digit behind the point: `1.4 GiB`."""
        for unit, factor in reversed(_UNITS.items()):
            if self.bytes >= factor:
                return f"{self.bytes / factor:.1f} {unit}" if factor > 1 else f"{self.bytes} B"
        return "0 B"


def check_label(label: str) -> str:
    """`label` when it is a local version label in normal form, else ValueError."""
    if not _LABEL.fullmatch(label):
        raise ValueError(
            f"{label!r} is not a local version label; use small letters and digits, in parts with points "
            "between them, such as 'cpu.avx2'"
        )
    return label


def check_requirement(text: str) -> str:
    """`text` when it is a requirement by name, as wheels state them: no address, no second line; else ValueError."""
    if not _REQUIREMENT.fullmatch(text) or not text.isprintable():
        raise ValueError(f"{text!r} is not a requirement; write e.g. 'numpy>=1.26' or 'numpy>=1.26,<3'")
    return text


def join_label(version: str, label: str) -> str:
    """The version with the label in its one local part: `0.1.0` → `0.1.0+cpu.avx2`, `0.1.1.dev2+dirty` →
    `0.1.1.dev2+cpu.avx2.dirty`; without a label the version itself."""
    if not label:
        return version
    public, _, local = version.partition("+")
    return f"{public}+{label}.{local}" if local else f"{public}+{label}"
