"""Each pain of pains.toml has tests that exist, or a reason."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAINS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("pains.toml").read_text(encoding="utf-8")
)["pain"]


@cache
def functions(path: Path) -> dict[str, list[str]]:
    """The test functions of a file, with their decorators."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("name", PAINS)
def test_a_pain_has_its_tests(name: str) -> None:
    pain = PAINS[name]
    assert set(pain) <= {"what", "tests", "reason"} and pain["what"]
    assert pain.get("tests") or pain.get("reason"), "neither tests nor a reason"
    for entry in pain.get("tests", []):
        file, _, function = entry.partition("::")
        assert (TESTS / file).is_file(), f"{entry}: no such file"
        known = functions(TESTS / file)
        assert function in known, f"{entry}: no such test in it"
        off = [decorator for decorator in known[function] if re.search(r"\bmark\.skip(\(|$)", decorator)]
        assert not off, f"{entry} is switched off"


def test_no_pain_is_there_twice() -> None:
    said = [pain["what"] for pain in PAINS.values()]
    assert len(set(said)) == len(said)
