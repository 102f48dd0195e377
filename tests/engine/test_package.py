"""`import pelton` is light, and its names come when they are used."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

import pelton
from pelton import _editable
from pelton.errors import LibraryError


def in_new_process(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_import_loads_neither_torch_nor_numpy():
    code = "import sys, pelton; pelton.__version__; pelton.build_info.profile; print('torch' in sys.modules)"
    assert in_new_process(code) == "False"
    assert in_new_process("import sys, pelton; print('numpy' in sys.modules)") == "False"


def test_sampling_params_need_no_torch():
    code = "import sys; from pelton import SamplingParams; SamplingParams(top_p=0.9); print('torch' in sys.modules)"
    assert in_new_process(code) == "False"


def test_all_names_are_there():
    for name in pelton.__all__:
        assert getattr(pelton, name) is not None
    assert set(pelton.__all__) <= set(dir(pelton))
    with pytest.raises(AttributeError, match="'LMM'"):
        _ = pelton.LMM


def test_build_info_is_the_module():
    assert pelton.build_info.version == pelton.__version__


def test_an_editable_installation_that_cannot_write_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/build/lock")

    monkeypatch.setattr(_editable.importlib, "import_module", refuse)
    with pytest.raises(
        LibraryError, match=r"/elsewhere/build/lock: Permission denied\. Import it as the user"
    ):
        _editable.rebuild()
