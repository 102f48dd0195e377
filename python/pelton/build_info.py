"""What this installation was built as, read from the `_build_info.json` that the build put beside the library.

Works without torch and without the library. In a source tree that was never built everything is empty and the
version is `0+source`.

`profile`, `version` (with the label), `label`, `backend`, `archs`, `glibc`, `torch_floor`, `size_budget`,
`features`, `toolchain`, `host_pythons`, `source_digest`, `commit`, `state` and `plan` are the file's entries;
`path` is the file itself, None when there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pelton
from pelton.errors import PeltonError

__all__ = [
    "BuildInfoError",
    "archs",
    "as_dict",
    "backend",
    "commit",
    "features",
    "find_file",
    "glibc",
    "host_pythons",
    "label",
    "path",
    "plan",
    "profile",
    "size_budget",
    "source_digest",
    "state",
    "toolchain",
    "torch_floor",
    "version",
]

FILE = "_build_info.json"


class BuildInfoError(PeltonError):
    """The installation's `_build_info.json` is damaged."""


def find_file(name: str) -> Path | None:
    """The file `name` that the build installed into the package; None when there is none.

    An editable installation has two folders, the source's and the build's.
    """
    for folder in pelton.__path__:
        candidate = Path(folder) / name
        if candidate.is_file():
            return candidate
    return None


def _read() -> tuple[Path | None, Mapping[str, Any]]:
    file = find_file(FILE)
    if file is None:
        return None, {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildInfoError(f"{file}: damaged ({error}); reinstall pelton") from None
    if not isinstance(data, dict) or not isinstance(data.get("version"), str):
        raise BuildInfoError(f"{file}: damaged (no version in it); reinstall pelton")
    return file, data


path, _info = _read()

profile: str = _info.get("profile", "")
version: str = _info.get("version", "0+source")
label: str = _info.get("label", "")
backend: str = _info.get("backend", "")
archs: tuple[str, ...] = tuple(_info.get("archs", ()))
glibc: str = _info.get("glibc", "")
torch_floor: str = _info.get("torch_floor", "")
size_budget: int = _info.get("size_budget", 0)
features: Mapping[str, bool] = _info.get("features", {})
toolchain: Mapping[str, str] = _info.get("toolchain", {})
host_pythons: tuple[str, ...] = tuple(_info.get("host_pythons", ()))
source_digest: str = _info.get("source_digest", "")
commit: str = _info.get("commit", "")
state: str = _info.get("state", "source")
plan: Mapping[str, Any] = _info.get("plan", {})


def as_dict() -> dict[str, Any]:
    """All entries of the file, as it has them; only `version` and `state` in a source tree."""
    return dict(_info) if _info else {"version": version, "state": state}
