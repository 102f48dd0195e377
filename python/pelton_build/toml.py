"""Reading TOML files, with every way in which that can fail as one message of the caller's kind."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path
from typing import Any

from .errors import BuildError

__all__ = ["parse_toml", "read_text"]


def read_text(path: Path, shown: str, error: type[BuildError]) -> str:
    """The text of the regular file `path`. Raises `error` naming `shown`."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise error(
                f"{shown}: cannot be read (not a regular file)"
            )  # a pipe would be waited for without end
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(f"{shown}: not UTF-8 text ({failure.reason} at byte {failure.start})") from None
    except OSError as failure:
        raise error(f"{shown}: cannot be read ({failure.strerror})") from None


def parse_toml(text: str, shown: str, error: type[BuildError]) -> dict[str, Any]:
    """The data in `text`. Raises `error` naming `shown`."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{shown}: not valid TOML: nested too deeply") from None
    except ValueError as failure:  # besides TOML's own: numbers with too many digits, dates that do not exist
        raise error(f"{shown}: not valid TOML: {failure}") from None
