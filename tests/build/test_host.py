"""The host extension's twin, what chooses between the two, and that both are equal where the extension is built."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import sysconfig
from hashlib import blake2b
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton import _host_py, build_info, host

SOABI = sysconfig.get_config_var("SOABI")


def implementations() -> list[ModuleType]:
    """The twin, and the extension where this installation has it for this Python."""
    try:
        from pelton import _host
    except ImportError:
        return [_host_py]
    return [_host_py, _host]


BOTH = pytest.mark.parametrize(
    "module", implementations(), ids=lambda module: module.__name__.rpartition(".")[2]
)


@BOTH
@given(
    parent=st.binary(max_size=300),
    tokens=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70),
    size=st.integers(1, 40),
)
def test_hashes_by_their_definition(module: ModuleType, parent: bytes, tokens: list[int], size: int) -> None:
    expected = []
    for start in range(0, len(tokens) - size + 1, size):
        block = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens[start : start + size])
        parent_of_next = blake2b((expected[-1] if expected else parent) + block, digest_size=16).digest()
        expected.append(parent_of_next)
    assert module.chain_block_hashes(parent, tokens, size) == expected


@BOTH
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257])
def test_hashes_around_the_block_of_the_hash_function(module: ModuleType, length: int) -> None:
    data = bytes(range(256)) * 2
    assert module.chain_block_hashes(data[:length], [7], 1) == [
        blake2b(data[:length] + (7).to_bytes(8, "little"), digest_size=16).digest()
    ]


@BOTH
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((b"", [1], 0), ValueError),
        ((b"", [1], -1), ValueError),
        ((b"", [2**63], 1), OverflowError),
        ((b"", [1.5], 1), TypeError),
        ((b"", ["1"], 1), TypeError),
        ((b"", 5, 1), TypeError),
        (("text", [1], 1), TypeError),
    ],
)
def test_errors_are_the_same(
    module: ModuleType, arguments: tuple[object, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        module.chain_block_hashes(*arguments)


@BOTH
def test_cpu_features_have_one_form(module: ModuleType) -> None:
    found = module.cpu_features()
    assert set(found) == {"vendor", "flags", "off"}
    assert found["flags"] == sorted(set(found["flags"]))
    assert set(found["flags"]) <= _host_py.KNOWN_FLAGS
    assert not set(found["flags"]) & set(found["off"])


@pytest.mark.skipif(len(implementations()) < 2, reason="this installation has no extension for this Python")
def test_both_see_one_cpu() -> None:
    twin, extension = implementations()
    mine, theirs = twin.cpu_features(), extension.cpu_features()
    assert mine["vendor"] == theirs["vendor"]
    # A kernel may hide what CPUID shows, never the other way round.
    assert set(mine["flags"]) <= set(theirs["flags"])
    wide = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "amx_tile"}
    assert wide & set(mine["flags"]) == wide & set(theirs["flags"])


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
flags\t\t: fpu sse sse2 avx avx2 fma somethingnew
bugs\t\t: spectre_v1

processor\t: 1
vendor_id\t: Other
flags\t\t: sse
"""


@pytest.mark.parametrize(
    ("text", "vendor", "flags"),
    [
        (CPUINFO, "GenuineIntel", ["avx", "avx2", "fma", "sse", "sse2"]),
        ("", "", []),
        ("Features : fp asimd\n", "", []),
        ("flags", "", []),
    ],
)
def test_cpuinfo(text: str, vendor: str, flags: list[str]) -> None:
    assert _host_py._parse_cpuinfo(text) == {"vendor": vendor, "flags": flags, "off": []}


def test_a_machine_without_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_host_py, "CPUINFO", tmp_path / "missing")
    assert _host_py.cpu_features() == {"vendor": "", "flags": [], "off": []}


def test_the_choice_says_what_it_is() -> None:
    assert host.implementation == host.module_info()["implementation"]
    assert bool(host.reason) == (host.implementation == "twin")
    assert host.module_info()["python"] == SOABI


class Package:
    """A copy of the package's host part in a folder, with extension files of the test's making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pelton"
        self.folder.mkdir(parents=True)
        source = Path(host.__file__).parent
        for name in ("host.py", "_host_py.py"):
            (self.folder / name).write_text((source / name).read_text(encoding="utf-8"), encoding="utf-8")
        (self.folder / "__init__.py").touch()

    def add(self, content: bytes) -> Path:
        file = self.folder / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
        file.write_bytes(content)
        return file

    def choose(self) -> list[str]:
        """Implementation, reason and what was written to stderr, from a Python of its own."""
        program = (
            "from pelton import host; print(host.implementation); print(host.reason); host.cpu_features()"
        )
        environ = {**os.environ, "PYTHONPATH": str(self.folder.parent)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            env=environ,
            capture_output=True,
            text=True,
            cwd=self.folder.parent,
        )
        assert done.returncode == 0, done.stderr
        return [*done.stdout.splitlines(), done.stderr.strip()]


def test_a_missing_extension_is_no_event(tmp_path: Path) -> None:
    implementation, reason, said = Package(tmp_path).choose()
    assert implementation == "twin"
    assert "no extension" in reason
    assert said == ""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF truncated",
        b"PELTON_HOST_SOABI=cpython-39-x86_64-linux-gnu\0",
        b"PELTON_HOST_SOABI=cpython-313t-x86_64-linux-gnu\0",
    ],
)
def test_an_extension_for_another_python_is_never_loaded(tmp_path: Path, content: bytes) -> None:
    package = Package(tmp_path)
    file = package.add(content)
    implementation, reason, said = package.choose()
    assert implementation == "twin"
    assert file.name in reason
    assert said.count("\n") == 0, "more than one message"
    assert "reinstall" in said


def test_an_extension_that_does_not_load(tmp_path: Path) -> None:
    package = Package(tmp_path)
    package.add(f"PELTON_HOST_SOABI={SOABI}\0".encode())
    implementation, reason, said = package.choose()
    assert implementation == "twin"
    assert "does not load" in reason
    assert "does not load" in said


def test_build_info_needs_no_torch() -> None:
    program = (
        "import sys, pelton; from pelton import build_info; assert pelton.__version__ == build_info.version; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_damaged_build_info_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import pelton

    caplog.set_level(logging.DEBUG)
    for content in (b"", b"{", b"[]", b'{"profile": "x"}', b"\xff"):
        (tmp_path / build_info.FILE).write_bytes(content)
        monkeypatch.setattr(pelton, "__path__", [str(tmp_path)])
        with pytest.raises(build_info.BuildInfoError, match="reinstall"):
            build_info._read()


@pytest.mark.parametrize(
    ("name", "warned"), [("_host.cpython-311-x.so", False), ("_host.cpython-312-x.so", True)]
)
def test_a_debug_build_of_python_is_no_reason_to_warn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    warned: bool,
) -> None:
    """It reads the release build's file under its right name; a renamed file is another matter."""
    file = tmp_path / name
    file.write_bytes(b"PELTON_HOST_SOABI=cpython-311-x\0")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: SimpleNamespace(origin=str(file)))
    module, reason = host._choose("cpython-311d-x")
    assert module is _host_py
    assert "cpython-311d-x" in reason
    assert bool(caplog.records) == warned
