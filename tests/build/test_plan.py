"""The plan's forms: JSON, text for people, and what a wheel may tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import plan_cases
from pelton_build.plan import Plan, Setting, render
from pelton_build.settings import Choices
from plan_cases import CPU, CUDA, FULL, plan_for


def test_text_says_what_was_decided_and_why() -> None:
    chosen = Setting("profile", "test", "-C profile=", ("cpu-avx512 (PELTON_PROFILE)",))
    text = render(plan_for(CUDA, Choices(profile=chosen, notes=("a note",)), plan_cases.BARE))
    for part in (
        "test: a GPU",
        "pack-0.1.0+cu128.test-py3-none-manylinux_2_28_x86_64.whl",
        "-C profile=",
        "not used: cpu-avx512 (PELTON_PROFILE)",
        "norm/gpu.cu",
        "cuda code for sm_80, sm_90a",
        "not needed for cuda: torch does it",
        "min(1 cores (assumed)",
        "a note",
        "Cannot be built here",
        "no CUDA compiler found",
    ):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_wheel_tells_nothing_of_the_machine() -> None:
    public = json.dumps(plan_for(CPU, toolchain=FULL).public())
    for private in ("/usr", "/env", "cores", "free", "PATH"):
        assert private not in public
    assert json.loads(public)["features"] == {
        "awq": False,
        "fast-math": False,
        "gptq": False,
        "marlin": False,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("format"), "not a plan of format"),
        (lambda data: data.update(format=0), "not a plan of format"),
        (lambda data: data.pop("label"), "keys missing or unknown: label"),
        (lambda data: data.update(more=1), "keys missing or unknown: more"),
        (lambda data: data.update(backend="gpu"), "plan.backend: 'gpu' is none of"),
        (lambda data: data.update(archs="x"), "plan.archs: expected a list"),
        (lambda data: data.update(glibc=2), "plan.glibc: expected str, found 2"),
        (lambda data: data["sources"][0].update(role="x"), "plan.sources[0].role"),
        (lambda data: data["jobs"].update(count="x"), "plan.jobs.count: expected int"),
    ],
)
def test_json_that_is_no_plan(change, message: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(plan_for(CPU).to_json())
    change(data)
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        Plan.from_json(json.dumps(data))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"plan"'])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(text)


def test_planning_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """An interpreter without packages, no program on PATH, an empty HOME; nothing but the standard library loaded."""
    root = plan_cases.copy_tree(tmp_path)
    code = (
        "import sys; sys.path.insert(0, 'python')\n"
        "from pelton_build.__main__ import main\n"
        "status = main(['plan', 'cpu-avx2'])\n"
        "foreign = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "known = ('__main__', 'pelton_build', '_sysconfigdata')\n"
        "print('foreign:', sorted(name for name in foreign if not name.startswith(known)))\n"
        "sys.exit(status)\n"
    )
    executable = Path(os.path.realpath(sys.executable))
    done = subprocess.run(
        [executable, "-I", "-S", "-c", code],
        cwd=root,
        env={"PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler found" in done.stdout
    assert "foreign: []" in done.stdout
