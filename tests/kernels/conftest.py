"""The same tests for every library: their tensors are made where the loaded library's kernels run.

CUDA and ROCm libraries take tensors on the GPU; the CPU library and the emulation, which runs GPU kernels on
the CPU, take CPU tensors. ``kernel_checks`` has the marks of tests that hold for some libraries only.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_checks import DEVICE
from pelton import ops

HERE = Path(__file__).parent


def _tensors_on_device(node: pytest.Item | pytest.Collector) -> AbstractContextManager[object]:
    # pytest calls these hooks for the tests of other folders, too.
    ours = node.path.is_relative_to(HERE)
    return torch.device(DEVICE) if ours and DEVICE != "cpu" else nullcontext()


# Tensors are made when a module is imported, too.
@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    with _tensors_on_device(collector):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with _tensors_on_device(item):
        return (yield)


@pytest.fixture(params=[None, "64", "32"], ids=["nvidia", "wave64", "wave32"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix instructions of NVIDIA, CDNA and RDNA in turn, where they are emulated."""
    if request.param is None:
        monkeypatch.delenv("PELTON_EMULATION_WAVE", raising=False)
    elif ops.backend() != "emulation":
        pytest.skip("for the emulation")
    else:
        monkeypatch.setenv("PELTON_EMULATION_WAVE", request.param)
