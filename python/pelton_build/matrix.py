"""The CI matrix: one row for each profile, made from the profiles alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BuildError
from .planning import project_root
from .profile import check_own_label, load_profile, profile_names
from .project import load_project

__all__ = ["main", "matrix"]


def matrix(root: Path) -> dict[str, list[dict[str, Any]]]:
    """`{"include": [row, ...]}`, sorted by profile. Raises ProfileError: a broken profile must not be left
    out, and two with one label would make wheels of one name."""
    baseline = load_project(root).baseline_profile
    names = profile_names(root)
    if not names:
        raise BuildError(f"{root / 'build_profiles'}: no profile is there, so that nothing would be built")
    rows = []
    for name in names:
        profile = load_profile(root, name)
        check_own_label(root, profile)
        rows.append(
            {
                "profile": name,
                "session": f"build-{name}",
                "backend": profile.target.backend,
                "arch": " ".join(profile.target.arch),
                "runner": profile.ci.runner,
                "container": profile.ci.container,
                "packages": " ".join(profile.ci.packages),
                "run": profile.ci.run,
                "baseline": name == baseline,
                "variant": bool(profile.variant),
                "timeout_minutes": profile.ci.timeout_minutes,
            }
        )
    return {"include": rows}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="matrix", description="Print the CI matrix as one line of JSON.")
    parser.add_argument("--root", type=Path, default=project_root(), help="the project's folder")
    root = parser.parse_args(arguments).root
    sys.stdout.write(json.dumps(matrix(root)) + "\n")
    return 0
