"""Finding and loading the kernel library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pelton import _library
from pelton.errors import LibraryError, PeltonError


def test_override_wins(tmp_path: Path) -> None:
    override, installed = tmp_path / "other.so", tmp_path / _library.LIBRARY_NAME
    override.touch()
    installed.touch()
    assert _library.find(str(override), [str(tmp_path)]) == override


def test_first_folder_that_has_it(tmp_path: Path) -> None:
    source, built, later = (tmp_path / name for name in ("source", "built", "later"))
    for folder in (source, built, later):
        folder.mkdir()
    (built / _library.LIBRARY_NAME).touch()
    (later / _library.LIBRARY_NAME).touch()
    folders = [str(source), str(built), str(later)]
    assert _library.find(None, folders) == built / _library.LIBRARY_NAME
    assert _library.find("", folders) == built / _library.LIBRARY_NAME


def test_override_that_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.so", tmp_path):
        with pytest.raises(
            LibraryError, match=r"^PELTON_LIBRARY is .*, which is not a file; set it to a built"
        ):
            _library.find(str(path), [str(tmp_path)])


def test_no_library_names_the_folders(tmp_path: Path) -> None:
    with pytest.raises(
        LibraryError, match=rf"^the kernel library libpelton.so is not in {tmp_path}: .*pip install -e"
    ):
        _library.find(None, [str(tmp_path)])


def test_load_is_idempotent() -> None:
    assert _library.load() == _library.load()


def test_errors_are_what_callers_expect() -> None:
    assert issubclass(LibraryError, PeltonError)
    assert issubclass(LibraryError, ImportError)


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_damaged_library_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(content)
    import pelton

    program = "from pelton.errors import LibraryError\ntry:\n    import pelton.ops\nexcept LibraryError as error:\n    print(error)"
    path = os.pathsep.join([str(Path(folder).parent) for folder in pelton.__path__])
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PELTON_LIBRARY": str(damaged), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith(f"the kernel library {damaged} cannot be loaded with torch ")
