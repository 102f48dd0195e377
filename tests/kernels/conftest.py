"""The same tests for every library: their tensors are made where the loaded library's kernels run.

CUDA and ROCm libraries take tensors on the GPU; the CPU library and the emulation, which runs GPU kernels on
the CPU, take CPU tensors. ``kernel_checks`` has the marks of tests that hold for some libraries only.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from kernel_checks import DEVICE


def _tensors_on_device() -> AbstractContextManager[object]:
    return nullcontext() if DEVICE == "cpu" else torch.device(DEVICE)


# Tensors are made when a module is imported, too.
@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    with _tensors_on_device():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with _tensors_on_device():
        return (yield)
