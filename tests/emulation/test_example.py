"""The worked example of the documentation, built as it stands there and run in the emulation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```\w+\n(?://|#) ((?:kernels|python)/[\w./]+)\n(.*?)^```",
    (ROOT / "docs" / "kernel-example.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def write_tree(tree: Path) -> None:
    """What builds an emulated library, the family `common`, and the example's files."""
    for folder in ("cmake", "kernels/common", "kernels/emulation", "python/pelton_build", "build_profiles"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    table = (ROOT / "kernels" / "kernels.toml").read_text()
    heads = list(re.finditer(r"^\[family\.(\w[\w-]*)\]", table, re.MULTILINE))
    common = next(i for i, head in enumerate(heads) if head[1] == "common")
    kept = table[: heads[0].start()] + table[heads[common].start() : heads[common + 1].start()]
    for name, text in BLOCKS:
        path = tree / name
        if name == "kernels/kernels.toml":
            path.write_text(kept + text)
        elif name.startswith("kernels/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.mark.slow
def test_the_worked_example_computes(tmp_path: Path) -> None:
    pytest.importorskip("pelton_build", reason="pelton_build is not on the path")
    if shutil.which("ninja") is None or shutil.which("cmake") is None:
        pytest.skip("CMake and Ninja build it")
    tree, build = tmp_path / "tree", tmp_path / "build"
    write_tree(tree)
    environ = {**os.environ, "PYTHONPATH": str(tree / "python")}
    configure = ["cmake", "-S", "kernels/emulation", "-B", str(build), "-G", "Ninja"]
    for command in (
        [*configure, f"-DPython_EXECUTABLE={sys.executable}", "--log-level=NOTICE"],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (function,) = [text for name, text in BLOCKS if name == "python/pelton/ops.py"]
    script = f"""
import torch
from torch import Tensor

torch.ops.load_library({str(build / "libpelton.so")!r})
{function}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = (torch.randn(5, 77) * 40).to(dtype)
    expected = (30 * torch.tanh(x.double() / 30)).to(dtype)
    torch.testing.assert_close(softcap(x, 30.0), expected)
    torch.testing.assert_close(softcap(x[:, :13], 30.0), expected[:, :13])
    assert softcap(x[:0], 30.0).shape == (0, 77)
for wrong in (lambda: softcap(x, 0.0), lambda: softcap(x, 1.0, x[:, 1:])):
    try:
        wrong()
    except RuntimeError as error:
        assert str(error).startswith("softcap: "), error
    else:
        raise AssertionError
print("computes")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "computes\n", done.stdout + done.stderr


def test_the_example_has_every_file() -> None:
    assert [name for name, _ in BLOCKS] == [
        "kernels/softcap/softcap.h",
        "kernels/softcap/gpu.cu",
        "kernels/softcap/op.cpp",
        "kernels/kernels.toml",
        "python/pelton/ops.py",
    ]
