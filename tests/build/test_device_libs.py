"""Device libraries completed for GPUs that are newer than they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pelton_build.arch import known_archs
from pelton_build.device_libs import complete, isa_file, isa_version, main
from pelton_build.errors import ToolchainError
from plan_cases import script


@pytest.mark.parametrize(
    ("arch", "version"),
    [("gfx906", 9006), ("gfx90a", 9010), ("gfx90c", 9012), ("gfx942", 9402), ("gfx1036", 10306), ("gfx1100", 11000), ("gfx1151", 11501), ("gfx1201", 12001)],
)  # fmt: skip
def test_numbers_of_gpus(arch: str, version: int) -> None:
    assert isa_version(arch) == version
    assert isa_file(arch) == f"oclc_isa_version_{arch[3:]}.bc"


def test_every_known_gpu_has_a_number() -> None:
    assert len({isa_version(arch) for arch in known_archs("rocm")}) == len(known_archs("rocm"))


@pytest.fixture
def libs(tmp_path: Path) -> Path:
    folder = tmp_path / "libs"
    folder.mkdir()
    for name in ("ocml.bc", "oclc_isa_version_90a.bc"):
        (folder / name).write_text("there")
    return folder


FAKE = """while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
cat > "$out" """


def test_only_what_is_missing_is_made(tmp_path: Path, libs: Path) -> None:
    clang = script(tmp_path / "clang", FAKE)
    out = tmp_path / "out"
    for _ in range(2):  # again, over what was made before
        archs = ["gfx90a:xnack-", "gfx1100", "gfx1100"]
        assert complete(str(clang), libs, out, archs) == ("oclc_isa_version_1100.bc",)
        assert (out / "oclc_isa_version_90a.bc").read_text() == (out / "ocml.bc").read_text() == "there"
        assert "const int __oclc_ISA_version = 11000;" in (out / "oclc_isa_version_1100.bc").read_text()
    assert complete(str(clang), libs, out, ["gfx90a"]) == ()
    assert not (out / "oclc_isa_version_1100.bc").exists()


def test_what_cannot_be_made_is_said(tmp_path: Path, libs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = script(tmp_path / "clang", "echo no such target >&2; exit 1")
    with pytest.raises(ToolchainError, match=r"cannot make oclc_isa_version_1100\.bc: .*no such target"):
        complete(str(broken), libs, tmp_path / "out", ["gfx1100"])
    with pytest.raises(ToolchainError, match="holds no device libraries"):
        complete(str(broken), tmp_path, tmp_path / "out", ["gfx1100"])
    assert main(["--clang", str(broken), "--libs", str(libs), "--out", str(tmp_path / "out"), "gfx90a"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(shutil.which("clang++-19") is None, reason="needs clang++-19")
def test_the_same_bytes_wherever_it_is_made(tmp_path: Path, libs: Path) -> None:
    made = []
    for name in ("a", "b c"):
        complete("clang++-19", libs, tmp_path / name, ["gfx1201"])
        made.append((tmp_path / name / "oclc_isa_version_1201.bc").read_bytes())
    assert made[0] == made[1] and made[0].startswith(b"BC")
