"""Names of archs, and an answer to each other spelling."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton_build.arch import (
    BACKENDS,
    ArchError,
    check_archs,
    check_cuda_archs_for,
    cpu_flags_of,
    cuda_arch_range,
    known_archs,
)
from pelton_build.values import Version, VersionRange


@pytest.mark.parametrize(
    ("backend", "archs"),
    [
        ("cuda", ["sm_90"]),
        ("cuda", ["sm_90a"]),
        ("cuda", ["sm_80", "sm_90a", "compute_90"]),
        ("cuda", ["sm_120f", "compute_120"]),
        ("rocm", ["gfx90a", "gfx1100"]),
        ("rocm", ["gfx90a:sramecc+:xnack-", "gfx90a:xnack+"]),
        ("cpu", ["x86-64-v4"]),
    ],
)
def test_known(backend: str, archs: list[str]) -> None:
    check_archs(backend, archs)


@pytest.mark.parametrize(
    ("backend", "archs", "message"),
    [
        ("cuda", ["sm_90A"], "did you mean 'sm_90a'"),
        ("cuda", ["SM_90"], "did you mean 'sm_90'"),
        ("cuda", ["sm90"], "did you mean 'sm_90'"),
        ("cuda", ["sm-90"], "did you mean 'sm_90'"),
        ("cuda", ["90"], "did you mean 'sm_90'"),
        ("cuda", ["90a"], "did you mean 'sm_90a'"),
        ("cuda", ["9.0"], "did you mean 'sm_90'"),
        ("cuda", ["9.0a"], "did you mean 'sm_90a'"),
        ("cuda", ["12.0"], "did you mean 'sm_120'"),
        ("cuda", ["9.0+PTX"], "as two entries: 'sm_90', 'compute_90'"),
        ("cuda", ["8.6-real"], "did you mean 'sm_86'"),
        ("cuda", ["90-virtual"], "did you mean 'compute_90'"),
        ("cuda", ["sm_93"], "did you mean 'sm_90'"),
        ("cuda", ["sm_80a"], "did you mean 'sm_80'"),
        ("cuda", ["compute90"], "did you mean 'compute_90'"),
        ("cuda", ["native"], "name the hardware"),
        ("cuda", ["all-major"], "name the hardware"),
        ("cuda", ["gfx90a"], "backend rocm"),
        ("cuda", ["x86-64-v3"], "backend cpu"),
        ("cuda", ["hopper"], "known: sm_50"),
        ("cuda", ["sm_80;sm_90"], "as an entry of its own: 'sm_80', 'sm_90'"),
        ("cuda", ["sm_80 sm_90"], "as an entry of its own"),
        ("cuda", [""], "an empty name"),
        ("cuda", [], "at least one"),
        ("cuda", ["sm_90a", "sm_90a"], "'sm_90a' is listed twice"),
        ("rocm", ["gxf1100"], "did you mean 'gfx1100'"),
        ("rocm", ["GFX90A"], "did you mean 'gfx90a'"),
        ("rocm", ["gfx1105"], "did you mean 'gfx1103'"),
        ("rocm", ["gfx90b"], "did you mean 'gfx90a'"),
        ("rocm", ["gfx1111"], "did you mean 'gfx1151'"),  # of no family: spelt alike
        ("rocm", ["1100"], "did you mean 'gfx1100'"),
        ("rocm", ["sm_90"], "backend cuda"),
        ("rocm", ["native"], "name the hardware, such as 'gfx90a'"),
        ("rocm", ["gfx90a:xnack"], "did you mean 'xnack-'"),
        ("rocm", ["gfx90a:"], "unknown target feature"),
        ("rocm", ["gfx1100:xnack-"], "gfx1100 has no target feature 'xnack'"),
        ("rocm", ["gfx90a:xnack-:sramecc+"], "'gfx90a:sramecc+:xnack-'"),
        ("rocm", ["gfx90a:xnack-:xnack+"], "given twice"),
        ("rocm", ["gfx90a", "gfx90a:xnack-"], "listed twice, with and without target features"),
        ("rocm", [], "at least one"),
        ("cpu", ["avx2"], "did you mean 'x86-64-v3'"),
        ("cpu", ["skylake-avx512"], "did you mean 'x86-64-v4'"),
        ("cpu", ["x86_64_v3"], "did you mean 'x86-64-v3'"),
        ("cpu", ["X86-64-V4"], "did you mean 'x86-64-v4'"),
        ("cpu", ["native"], "name the hardware, such as 'x86-64-v3'"),
        ("cpu", ["x86-64-v3", "x86-64-v4"], "exactly one arch"),
    ],
)
def test_answer(backend: str, archs: list[str], message: str) -> None:
    with pytest.raises(ArchError) as caught:
        check_archs(backend, archs)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "allowed", "found", "message"),
    [
        ("sm_101", ">=12.8,<14", "13.0", "'sm_110' (renamed)"),
        ("sm_101a", ">=12.8,<14", "13.0.88", "'sm_110a' (renamed)"),
        ("compute_101", ">=12.8,<14", "13.1", "'compute_110' (renamed)"),
        ("sm_110", ">=12.8,<14", "12.9", "'sm_101' (renamed)"),
        ("sm_101", ">=13", None, "'sm_110' (renamed)"),
        ("sm_70", ">=12.8,<14", "13.0", "it needs CUDA >=9.0,<13"),
        ("sm_120f", ">=12.8,<14", "12.8", "it needs CUDA >=12.9"),
        ("sm_100", "<12.8", None, "any nvcc of toolchain.cuda"),
    ],
)
def test_nvcc_that_does_not_know_it(arch: str, allowed: str, found: str | None, message: str) -> None:
    with pytest.raises(ArchError) as caught:
        check_cuda_archs_for([arch], VersionRange.parse(allowed), Version.parse(found) if found else None)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "found"),
    [("sm_101", "12.8"), ("sm_101", None), ("sm_110", "13.0"), ("sm_70", "12.9"), ("sm_90a", "12.8")],
)
def test_nvcc_that_knows_it(arch: str, found: str | None) -> None:
    check_cuda_archs_for([arch], VersionRange.parse(">=12.8,<14"), Version.parse(found) if found else None)


def test_virtual_and_real_archs_come_in_pairs() -> None:
    names = known_archs("cuda")
    assert {name.replace("sm_", "compute_") for name in names} == {
        name for name in names if "compute" in name
    }
    assert all(cuda_arch_range(name).clauses for name in names)


def test_levels_contain_each_other() -> None:
    flags = [cpu_flags_of(level) for level in known_archs("cpu")]
    assert all(low < high for low, high in itertools.pairwise(flags))
    assert {"avx2", "fma"} <= flags[1] and "avx512f" not in flags[1]


@given(st.sampled_from(BACKENDS), st.lists(st.text(max_size=12), max_size=3))
def test_any_text_is_known_or_explained(backend: str, archs: list[str]) -> None:
    try:
        check_archs(backend, archs)
    except ArchError as error:
        assert str(error)
    else:
        assert all(arch.split(":")[0] in known_archs(backend) for arch in archs)


@given(st.data())
def test_a_suggested_name_is_a_known_one(data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from(BACKENDS))
    name = data.draw(st.sampled_from(known_archs(backend)))
    position = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.characters(codec="ascii", categories=["L", "N"]))
    misspelt = name[:position] + letter + name[position + 1 :]
    try:
        check_archs(backend, [misspelt])
    except ArchError as error:
        said = str(error)
        if "did you mean" in said:
            suggestion = said.split("did you mean '")[1].split("'")[0]
            check_archs(backend, [suggestion])
