"""Headers of other HIP versions, as they are put together from AMD's repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pelton_build.hip_headers import (
    RELEASES,
    HeadersError,
    _foreign,
    own_headers,
    unpack_headers,
    version_files,
)
from pelton_build.toolchain import _rocm_version


@pytest.mark.parametrize("version", RELEASES)
def test_the_version_is_what_a_rocm_says(tmp_path: Path, version: str) -> None:
    for name, text in version_files(version).items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert version.startswith(_rocm_version(tmp_path)) and _rocm_version(tmp_path).count(".") == 1
    assert f"HIP_VERSION_MAJOR={version[0]}\n" in (tmp_path / "share/hip/version").read_text()


@pytest.mark.parametrize("version", ["", "6", "6.2", "6.2.2.1", "v6.2.2", "../6.2.2", "6.2.²"])
def test_what_is_no_release(version: str) -> None:
    with pytest.raises(HeadersError, match="is no ROCm release; write it as"):
        version_files(version)


def test_headers_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(HeadersError, match=r"has no include/hip/hip_version.h; name the folder of a ROCm"):
        own_headers(tmp_path)
    header = tmp_path / "include/hip/hip_version.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    assert own_headers(tmp_path) == tmp_path


def test_headers_that_another_folder_has_to_stand_in_for(tmp_path: Path) -> None:
    own = tmp_path / "own"
    said = f". {own}/include/hip/hip_runtime.h\n.. /usr/include/stdio.h\n"
    assert _foreign(said, own) == ""
    assert _foreign(f"{said}.. /usr/include/hip/hip_fp16.h\n", own) == "/usr/include/hip/hip_fp16.h"


def test_headers_of_a_tag(tmp_path: Path) -> None:
    repository = tmp_path / "clr"
    header = repository / "hipamd/include/hip/amd_detail/x.h"
    header.parent.mkdir(parents=True)

    def git(*arguments: str) -> None:
        options = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *options, *arguments], cwd=repository, check=True, capture_output=True)

    git("init", "-q")
    for version in ("1", "2"):
        header.write_text(f"// {version}\n")
        (repository / "README").write_text(version)
        git("add", "-A")
        git("commit", "-q", "-m", version)
        git("tag", f"rocm-{version}")
    unpack_headers(repository, "rocm-1", "hipamd/include", tmp_path / "root")
    files = sorted(
        p.relative_to(tmp_path / "root").as_posix() for p in (tmp_path / "root").rglob("*") if p.is_file()
    )
    assert files == ["include/hip/amd_detail/x.h"]
    assert (tmp_path / "root" / files[0]).read_text() == "// 1\n"
    for tag, folder in (("rocm-3", "hipamd/include"), ("rocm-1", "none")):
        with pytest.raises(HeadersError, match=rf"has no {folder} at {tag}"):
            unpack_headers(repository, tag, folder, tmp_path / "root")
