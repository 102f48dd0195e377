"""CMake presets, one for each profile, for editors and `cmake --preset NAME`.

They go into CMakeUserPresets.json, which CMake reads and git ignores: a checked-in file would have to be
edited for each new profile.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BuildError
from .planning import project_root, write_atomically
from .profile import load_profile, profile_names

__all__ = ["FILE", "main", "presets"]

FILE = "CMakeUserPresets.json"
_MARK = "pelton_build"

logger = logging.getLogger(__name__)


def presets(root: Path) -> dict[str, Any]:
    """The content of the presets file. Raises ProfileError."""
    base = {
        "name": "base",
        "hidden": True,
        "generator": "Ninja",
        "binaryDir": "${sourceDir}/build/${presetName}/dev",
        "cacheVariables": {"CMAKE_BUILD_TYPE": "RelWithDebInfo", "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"},
    }
    profiles = [load_profile(root, name) for name in profile_names(root)]
    return {
        "version": 6,
        "cmakeMinimumRequired": {"major": 3, "minor": 28, "patch": 0},
        "vendor": {_MARK: {"generated": True}},
        "configurePresets": [
            base,
            *(
                {
                    "name": profile.name,
                    "displayName": profile.summary,
                    "inherits": "base",
                    "cacheVariables": {"PELTON_PROFILE": profile.name},
                }
                for profile in profiles
            ),
        ],
        "buildPresets": [{"name": profile.name, "configurePreset": profile.name} for profile in profiles],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="presets", description=f"Write {FILE}.")
    parser.add_argument("--root", type=Path, default=project_root(), help="the project's folder")
    root: Path = parser.parse_args(arguments).root
    path = root / FILE
    if path.exists() and not _ours(path):
        raise BuildError(
            f"{FILE} was not written by this tool; move your presets to another file and try again"
        )
    write_atomically(path, json.dumps(presets(root), indent=2) + "\n")
    logger.info("wrote %s", path)
    return 0


def _ours(path: Path) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and _MARK in data.get("vendor", {})
