"""The build info of a finished wheel, for the steps that begin with one."""

from __future__ import annotations

import json
import lzma
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BuildError

__all__ = ["UNREADABLE", "WheelError", "read_build_info"]


LARGEST = 16 << 20  # bytes; a build info has some ten thousand
UNREADABLE = (
    OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""What zipfile and json raise for damaged, encrypted or hostile files."""


class WheelError(BuildError):
    """A file that should be a wheel of this build is none."""


def _member(archive: zipfile.ZipFile, wheel: Path) -> str:
    """The name of the build info in a wheel.  Raises WheelError when it has none, or several."""
    found = [n for n in archive.namelist() if n.endswith("/_build_info.json") and n.count("/") == 1]
    if len(found) != 1:
        has = f"the build infos {', '.join(sorted(found))}" if found else "no _build_info.json"
        raise WheelError(f"{wheel}: has {has}; name a wheel that nox -s build-<profile> made")
    return found[0]


def read_build_info(wheel: Path) -> Mapping[str, Any]:
    """The build info of a wheel: at least its profile, its label and its plan.

    Raises WheelError: the file is not there, is no wheel, or no wheel of this build.
    """
    if wheel.exists() and not wheel.is_file():
        raise WheelError(f"{wheel}: not a file; name a wheel that nox -s build-<profile> made")
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = _member(archive, wheel)
            if archive.getinfo(name).file_size > LARGEST:
                raise WheelError(f"{wheel}: {name} has more than {LARGEST} bytes; build the wheel again")
            info: dict[str, Any] = json.loads(archive.read(name))
    except UNREADABLE as error:
        said = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        raise WheelError(f"{wheel}: not a readable wheel ({said})") from None
    for key, kind in {"profile": str, "label": str, "plan": dict}.items():
        if not isinstance(info, dict) or not isinstance(info.get(key), kind):
            raise WheelError(f"{wheel}: {name} has no {key}; build the wheel again")
    return info
