"""The HIP runtime made visible to a library that is linked with none: tried with stand-ins of several versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pelton import _hip
from pelton.errors import LibraryError

ROOT = Path(__file__).resolve().parents[1]

RUNTIME = """
static int registered;
void **__hipRegisterFatBinary(const void *data) { registered++; return (void **)&registered; }
int hipGetDevice(int *device) { *device = VERSION; return registered; }
"""
VERSIONED = "hip_4.2 { global: hipGetDevice; __hipRegisterFatBinary; local: *; };\n"
# As HIP's clang makes it: the constructor hands the code objects to the runtime.
LIBRARY = """
void **__hipRegisterFatBinary(const void *data);
int hipGetDevice(int *device);
static int code;
__attribute__((constructor)) static void register_code(void) { __hipRegisterFatBinary(&code); }
int answer(void) { int device; return 100 * hipGetDevice(&device) + device; }
"""
# What torch does (a runtime that only it sees), then what pelton does.
PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from pelton import _hip
from pelton.errors import LibraryError
library, torch, *runtimes = sys.argv[1:]
for path in runtimes:
    ctypes.CDLL(path, mode=os.RTLD_LOCAL)
try:
    ctypes.CDLL(library, mode=os.RTLD_NOW)
except OSError as error:
    assert "undefined symbol" in str(error), error
else:
    sys.exit("the library has loaded without a visible runtime")
assert _hip.needs_runtime(Path(library))
try:
    print(_hip.expose_runtime(Path(torch), "2.99"))
except LibraryError as error:
    print(error)
    sys.exit(3)
print(ctypes.CDLL(library, mode=os.RTLD_NOW).answer())
"""


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler")
    return found


def shared(compiler: str, path: Path, source: str, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-o", str(path), "-", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def runtime(compiler: str, folder: Path, name: str, version: int, versioned: bool = False) -> Path:
    options = [f"-DVERSION={version}", f"-Wl,-soname,{name}"]
    if versioned:
        script = folder / "symbols.map"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(VERSIONED)
        options.append(f"-Wl,--version-script={script}")
    return shared(compiler, folder / name, RUNTIME, *options)


def run(library: Path, torch: Path, *runtimes: Path) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", PROGRAM, str(library), str(torch), *map(str, runtimes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "python")
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("name", "versioned"),
    [
        ("libamdhip64.so.5", False),
        ("libamdhip64.so.6", True),
        ("libamdhip64.so.7", True),
        ("libamdhip64.so", False),
        ("libamdhip64-2a1b3c4d.so.6", True),
    ],
)
def test_one_library_for_every_runtime(tmp_path: Path, compiler: str, name: str, versioned: bool) -> None:
    library = shared(compiler, tmp_path / "libkernels.so", LIBRARY)
    found = runtime(compiler, tmp_path / "a folder/torch/lib", name, 6, versioned)
    code, said = run(library, tmp_path / "a folder/torch", found)
    assert (code, said) == (0, [str(found), "106"])  # registered once, with this runtime


def test_torchs_own_runtime_before_another(tmp_path: Path, compiler: str) -> None:
    library = shared(compiler, tmp_path / "libkernels.so", LIBRARY)
    other = runtime(compiler, tmp_path / "opt/rocm/lib", "libamdhip64.so.6", 6)
    own = runtime(compiler, tmp_path / "torch/lib", "libamdhip64.so.7", 7)
    code, said = run(library, tmp_path / "torch", other, own)
    assert code == 0 and said[:2] == [str(own), "107"]
    assert "2 HIP runtimes are loaded" in said[2]


def test_no_runtime_says_what_was_looked_for(tmp_path: Path, compiler: str) -> None:
    library = shared(compiler, tmp_path / "libkernels.so", LIBRARY)
    code, said = run(library, tmp_path / "torch")
    assert code == 3 and len(said) == 1
    for part in (
        "libamdhip64.so (of any version) is not among",
        f"torch 2.99 in {tmp_path / 'torch'}",
        "doctor",
    ):
        assert part in said[0]


def test_what_a_map_says() -> None:
    lines = [
        "7f00-7f01 r-xp 00000000 08:01 1   /a b/libamdhip64.so.6.4.1\n",
        "7f01-7f02 r--p 00001000 08:01 1   /a b/libamdhip64.so.6.4.1\n",
        "7f02-7f03 r-xp 00000000 08:01 2   /x/libamdhip64.so.7 (deleted)\n",
        "7f03-7f04 rw-p 00000000 00:00 0 \n",
        "7f04-7f05 r-xp 00000000 08:01 3   /x/libamdhip64_notes.txt\n",
        "7f05-7f06 r-xp 00000000 08:01 4   /libamdhip64/libc.so.6\n",
    ]
    assert _hip.mapped_runtimes(lines) == ["/a b/libamdhip64.so.6.4.1"]


def test_other_libraries_need_no_runtime(tmp_path: Path) -> None:
    for content in (b"", b"x" * 5000, b"__hipRegisterFatBinaryX\0"):
        (tmp_path / "x.so").write_bytes(content)
        assert not _hip.needs_runtime(tmp_path / "x.so")
    (tmp_path / "x.so").write_bytes(b"a\0__hipRegisterFatBinary\0b")
    assert _hip.needs_runtime(tmp_path / "x.so")
    with pytest.raises(LibraryError, match="is not built for ROCm"):
        _hip.expose_runtime(Path("/torch"), "2.13.0+cpu")
