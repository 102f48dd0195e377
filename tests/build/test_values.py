"""Versions, ranges, sizes, labels, switches, nearest names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version as Pep440

from pelton_build.values import (
    Size,
    Version,
    VersionRange,
    check_label,
    check_requirement,
    did_you_mean,
    join_label,
    nearest,
    parse_switch,
)

numbers = st.lists(st.integers(0, 99), min_size=1, max_size=4)
versions = numbers.map(lambda parts: Version(tuple(parts)))


@given(versions)
def test_version_comes_back(version: Version) -> None:
    assert Version.parse(str(version)) == version


@given(st.text(max_size=12))
def test_version_parses_or_says_why(text: str) -> None:
    try:
        version = Version.parse(text)
    except ValueError as error:
        assert repr(text) in str(error)
    else:
        assert Pep440(str(version)) == Pep440(text)


@given(st.sampled_from((">=", ">", "<=", "<")), versions, versions)
def test_range_agrees_with_packaging(operator: str, bound: Version, version: Version) -> None:
    found = version in VersionRange.parse(f"{operator}{bound}")
    assert found == (str(version) in SpecifierSet(f"{operator}{bound}"))


@given(versions, versions)
def test_equal_means_begins_with(bound: Version, version: Version) -> None:
    found = version in VersionRange.parse(f"=={bound}")
    assert found == (
        str(version) in SpecifierSet(f"=={bound},!=999") or str(version) in SpecifierSet(f"=={bound}.*")
    )


@given(st.lists(st.tuples(st.sampled_from((">=", ">", "<=", "<", "==")), versions), max_size=3))
def test_range_comes_back_or_is_empty(clauses: list[tuple[str, Version]]) -> None:
    text = ",".join(f"{operator}{version}" for operator, version in clauses)
    try:
        parsed = VersionRange.parse(text)
    except ValueError:
        # Then no bound, nor anything just beside one, is in it.
        for _, version in clauses:
            beside = [
                version,
                Version((*version.parts, 0, 0, 0)[:3] + (1,)),
                Version((*version.parts, 1)[:4]),
            ]
            for candidate in beside:
                assert str(candidate) not in SpecifierSet(text)
    else:
        assert str(parsed) == text
        assert VersionRange.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12.8", "no operator; write e.g. '>=12.8'"),
        (">=12.8,", "not a version clause"),
        ("~=12.8", "operator '~=' is not supported"),
        ("!=13", "operator '!=' is not supported"),
        (">=13,<12", "no version satisfies"),
        (">13,<13", "no version satisfies"),
        (">=13.0,<13", "no version satisfies"),
        ("==12,==13", "no version satisfies"),
        ("==12,>=13", "no version satisfies"),
        (">=12.x", "is not a version"),
        (">=12.8 <14", "is not a version clause"),
        ("=>12", "is not a version clause"),
        (">=1.2.3.4.5", "is not a version"),
        (">=١٢", "is not a version"),
    ],
)
def test_range_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        VersionRange.parse(text)
    assert message in str(caught.value)


def test_empty_range_allows_everything() -> None:
    assert Version.parse("0.1") in VersionRange.parse("")
    assert not VersionRange.parse(" ").clauses


@pytest.mark.parametrize(
    ("text", "size"),
    [("5 MiB", 5 << 20), ("200MiB", 200 << 20), ("1.5 GiB", 3 << 29), ("1 B", 1), (" 2 KiB ", 2048)],
)
def test_size(text: str, size: int) -> None:
    assert Size.parse(text).bytes == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "has no unit"),
        ("5 MB", "did you mean '5 MiB'"),
        ("5 mib", "did you mean '5 MiB'"),
        ("", "is not a size"),
        ("-5 MiB", "is not a size"),
        ("0 MiB", "at least one byte"),
        ("5 MiB extra", "is not a size"),
        ("1e3 MiB", "is not a size"),
    ],
)
def test_size_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        Size.parse(text)
    assert message in str(caught.value)


@given(st.integers(1, 1 << 50))
def test_size_comes_back(size: int) -> None:
    assert Size.parse(str(Size(size))) == Size(size)


@given(st.integers(0, 1 << 50))
def test_human_size_is_near(size: int) -> None:
    number, unit = Size(size).human().split()
    assert (
        abs(float(number) - size / {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit])
        <= 0.05
    )


@given(
    st.from_regex(
        r"([1-9][0-9]*|0|[a-z][a-z0-9]*|[0-9]+[a-z])(\.([1-9][0-9]*|[0-9]*[a-z]+[0-9]*))*", fullmatch=True
    )
)
def test_label_joins_to_one_local_part(label: str) -> None:
    for version in ("0.1.0", "0.3.1.dev4+g1a2b.dirty"):
        joined = join_label(version, check_label(label))
        assert joined.count("+") == 1
        assert Pep440(joined).public == Pep440(version).public
        assert (Pep440(joined).local or "").split(".")[: len(label.split("."))] == label.split(".")


@pytest.mark.parametrize(
    "label", ["", ".", "cpu.", ".cpu", "CPU", "cpu-avx2", "cpu avx2", "cpu..x", "ä", "cpu\n", "cpu.007", "00"]
)
def test_label_refuses(label: str) -> None:
    with pytest.raises(ValueError, match="not a local version label"):
        check_label(label)


@pytest.mark.parametrize(
    "text",
    [
        "numpy",
        "numpy>=1.26",
        "torch >= 2.10, < 3",
        "a[b,c-d]==1.*",
        "x~=1.0; python_version < '3.12'",
        "y===1+l",
    ],
)
def test_requirement(text: str) -> None:
    Requirement(text)
    assert check_requirement(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "foo >=",
        "foo>=1\nRequires-Dist: bar",
        "foo @ https://x/y.whl",
        "foo;",
        "foo 1",
        "-r x",
        "foo>=1,",
    ],
)
def test_requirement_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a requirement"):
        check_requirement(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("on", True), ("YES", True), (" True ", True), ("0", False), ("off", False), ("No", False)],
)
def test_switch(text: str, value: bool) -> None:
    assert parse_switch(text) is value


@pytest.mark.parametrize(
    ("text", "hint"), [("of", "'off'"), ("ture", "'true'"), ("2", "allowed"), ("", "allowed")]
)
def test_switch_refuses(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_switch(text)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("cpu_avx2", "cpu-avx2"),
        ("CPU-AVX2", "cpu-avx2"),
        ("cpu-avx", "cpu-avx2"),
        ("cuda-sm9", "cuda-sm90"),
        ("nothing-like-it", None),
        ("", None),
    ],
)
def test_nearest(word: str, found: str | None) -> None:
    assert nearest(word, ["cuda-sm90", "cpu-avx2", "rocm-gfx90a"]) == found


@given(st.text(), st.lists(st.text()))
def test_did_you_mean_names_all_that_is_known(word: str, known: list[str]) -> None:
    text = did_you_mean(word, known)
    assert all(name in text for name in known)
