"""Variant wheels: how they are made, what the audit says of them, what the index makes of them."""

from __future__ import annotations

import json
import re
import urllib.parse
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pelton_build import variants
from pelton_build.audit import audit_wheel
from pelton_build.errors import BuildError
from pelton_build.index import IndexBuildError, build_index, find_wheels
from pelton_build.profile import load_profile, profile_names
from pelton_build.variants import (
    VariantError,
    differences,
    make_variant,
    properties_of,
    read_variant,
    split_file_name,
    variant_label,
)
from pelton_build.wheel_info import WheelError
from wheel_factory import WheelParts, cuda, make_wheel, unlabelled

pytest.importorskip(
    "elftools", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)
pytest.importorskip(
    "iced_x86", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "pelton-0.1.0-py3-none-manylinux_2_28_x86_64"
SM90 = {"nvidia": {"sm_arch": ["90_real"], "cuda_version_lower_bound": ["13.0"]}}
AVX2 = {"x86_64": {"level": ["v3"]}}


def plain(profile: str = "cpu-avx2", properties: dict[str, Any] = AVX2, **changes: Any) -> WheelParts:
    """The parts of a good wheel without label whose profile has variant properties."""
    parts = unlabelled(profile=profile) if profile.startswith("cpu") else cuda()
    if not profile.startswith("cpu"):
        parts = parts.but(version="0.1.0").with_info(profile=profile, label="", version="0.1.0")
    plan = {**parts.info["plan"], "variant": properties}
    return parts.with_info(**{"plan": plan, "source_digest": "sha256:1", **changes})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (f"{PLAIN}.whl", (f"{PLAIN}.whl", "")),
        (f"{PLAIN}-cuda_sm90.whl", (f"{PLAIN}.whl", "cuda_sm90")),
        ("pelton-0.1.0-1-py3-none-any.whl", ("pelton-0.1.0-1-py3-none-any.whl", "")),  # a build tag
        ("pelton-0.1.0-py3-none-any-A.whl", ("pelton-0.1.0-py3-none-any-A.whl", "")),
        ("pelton.whl", ("pelton.whl", "")),
    ],
)
def test_file_names(name: str, parts: tuple[str, str]) -> None:
    assert split_file_name(name) == parts


@pytest.mark.parametrize(
    ("given", "archs"),
    [
        (["90_real"], ["90_real"]),
        (
            ["80_real", "80_virtual"],
            ["80_real", "80_virtual", "90_virtual", "100_virtual", "110_virtual", "120_virtual"],
        ),
        (["100_virtual"], ["100_virtual", "110_virtual", "120_virtual"]),
    ],
)
def test_ptx_runs_on_later_cards(given: list[str], archs: list[str]) -> None:
    assert properties_of({"nvidia": {"sm_arch": given}}) == {"nvidia": {"sm_arch": archs}}


def test_every_profile_has_a_variant() -> None:
    labels = [variant_label(name) for name in profile_names(ROOT)]
    assert len(set(labels)) == len(labels)
    made = [(name, properties_of(load_profile(ROOT, name).variant)) for name in profile_names(ROOT)]
    assert all(properties and set(properties) <= set(variants.NAMESPACES) for _, properties in made)
    assert variants.same_properties(made) is None


def test_made_of_a_wheel_and_nothing_else_changes(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, plain())
    made = make_variant(wheel, tmp_path / "out")
    assert made.name == f"{PLAIN}-cpu_avx2.whl"
    assert differences(wheel, made) == ()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made) as new:
        added = "pelton-0.1.0.dist-info/variant.json"
        assert set(new.namelist()) - set(old.namelist()) == {added}
        assert {n for n in old.namelist() if old.read(n) != new.read(n)} == {"pelton-0.1.0.dist-info/RECORD"}
        assert all(old.getinfo(n).external_attr == new.getinfo(n).external_attr for n in old.namelist())
        document = json.loads(new.read(added))
    assert document["variants"] == {"cpu_avx2": AVX2}
    assert list(document["providers"]) == sorted(document["default-priorities"]["namespace"])
    assert audit_wheel(made).findings == ()
    again = make_variant(wheel, tmp_path / "again")
    assert made.read_bytes() == again.read_bytes()
    assert not list((tmp_path / "out").glob(".*"))


REFUSED: dict[str, tuple[WheelParts, str]] = {
    "with a label": (WheelParts(), "has the label cpu.avx2"),
    "without properties": (plain(properties={}), r"profile cpu-avx2 has no table \[variant\]"),
    "an unknown namespace": (plain(properties={"vulkan": {"level": ["1"]}}), "variant.vulkan: unknown namespace; known: nvidia"),
    "no build info": (plain().but(without=("pelton/_build_info.json",)), "has no _build_info.json; name a wheel that nox -s"),
    "a variant": (plain().but(file_name=f"{PLAIN}-cpu_avx2.whl"), "is a variant wheel already"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_made(case: str, tmp_path: Path) -> None:
    parts, message = REFUSED[case]
    wheel = make_wheel(tmp_path, parts)
    with pytest.raises(BuildError, match=message):
        make_variant(wheel, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))


def test_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    path = tmp_path / f"{PLAIN}.whl"
    path.write_bytes(b"PK")
    with pytest.raises(WheelError, match="not a readable wheel"):
        make_variant(path, tmp_path / "out")
    with pytest.raises(VariantError, match="not a readable wheel"):
        differences(path, path)


def test_a_variant_wheel_under_a_plain_name(tmp_path: Path) -> None:
    made = make_variant(make_wheel(tmp_path, plain()), tmp_path / "out")
    renamed = made.rename(tmp_path / "out" / f"{PLAIN}.whl")
    with pytest.raises(VariantError, match="is a variant wheel already"):
        make_variant(renamed, tmp_path / "again")
    assert not list((tmp_path / "again").glob("*"))


def test_an_encrypted_member(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, plain())
    data = bytearray(wheel.read_bytes())
    at = data.index(b"PK\x01\x02")
    while at >= 0:  # each entry of the directory says that its member is encrypted
        data[at + 8] |= 1
        at = data.find(b"PK\x01\x02", at + 4)
    wheel.write_bytes(data)
    for act in (lambda: make_variant(wheel, tmp_path / "out"), lambda: differences(wheel, wheel)):
        with pytest.raises(BuildError, match=r"not a readable wheel \(.*encrypted"):
            act()


def test_another_build_is_told_by_the_member_that_differs(tmp_path: Path) -> None:
    one = make_wheel(tmp_path / "a", plain())
    other = make_wheel(tmp_path / "b", plain().but(files={"pelton/__init__.py": b"X = 1\n"}))
    assert differences(one, other) == ("pelton/__init__.py",)
    out = tmp_path / "out"
    with pytest.raises(VariantError, match=r"not of the same build .*: pelton/__init__.py differ"):
        variants.main([str(one), "--of", str(other), "--out", str(out)])
    assert not out.exists()
    labelled = make_wheel(tmp_path / "c")
    assert variants.main([str(one), "--of", str(labelled), "--out", str(out)]) == 0
    assert [path.name for path in out.iterdir()] == [f"{PLAIN}-cpu_avx2.whl"]


VARIANT_JSON = "pelton-0.1.0.dist-info/variant.json"
WRITTEN = variants.document_text({"cpu_avx2": AVX2}).encode()
BAD: dict[str, tuple[WheelParts, str]] = {
    "without properties": (plain().but(file_name=f"{PLAIN}-cpu_avx2.whl"), "found none"),
    "properties in a wheel that is no variant": (plain().but(files={VARIANT_JSON: WRITTEN}), "no variant label"),
    "another profile's label": (
        plain().but(file_name=f"{PLAIN}-cpu_avx512.whl", files={VARIANT_JSON: WRITTEN.replace(b"cpu_avx2", b"cpu_avx512")}),
        "needed cpu_avx2, after the profile"),
    "another label inside": (
        plain().but(file_name=f"{PLAIN}-cpu_avx2.whl", files={VARIANT_JSON: WRITTEN.replace(b"cpu_avx2", b"other")}),
        "does not describe the one variant 'cpu_avx2'"),
    "other properties than the profile's": (
        plain().but(file_name=f"{PLAIN}-cpu_avx2.whl", files={VARIANT_JSON: WRITTEN.replace(b"v3", b"v1")}), "as the build info says"),
    "no JSON": (plain().but(file_name=f"{PLAIN}-cpu_avx2.whl", files={VARIANT_JSON: b"{"}), "does not describe"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_the_audit_refuses(case: str, tmp_path: Path) -> None:
    parts, message = BAD[case]
    findings = audit_wheel(make_wheel(tmp_path, parts), only={"variant"}).findings
    assert any(message in str(finding) for finding in findings), findings


# --- the index ---


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A version with its baseline and two variants."""
    folder = tmp_path / "dist"
    wheel = make_wheel(folder, plain())
    make_variant(wheel, folder)
    make_variant(make_wheel(tmp_path / "cuda", plain("cuda-sm90", SM90)), folder)
    return folder


def made(dist: Path, out: Path) -> Any:
    return build_index(find_wheels([dist]), out, baseline="cpu-avx2")


def linked(site: Path) -> dict[str, Path]:
    """The files that the page links to, by name."""
    page = site / "simple/pelton/index.html"
    links = re.findall(r'href="([^"#]+)#sha256=[0-9a-f]{64}"', page.read_text())
    assert len(links) == page.read_text().count("<a ")
    paths = [(page.parent / urllib.parse.unquote(link)).resolve() for link in links]
    return {path.name: path for path in paths}


def test_variants_are_on_the_main_index_alone(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    report = made(dist, site)
    assert set(report.places) == {"simple"}
    files = linked(site)
    assert set(files) == {
        f"{PLAIN}.whl", f"{PLAIN}-cpu_avx2.whl", f"{PLAIN}-cuda_sm90.whl", "pelton-0.1.0-variants.json"
    }  # fmt: skip
    document = json.loads(files["pelton-0.1.0-variants.json"].read_text())
    assert document["variants"] == {"cpu_avx2": AVX2, "cuda_sm90": SM90}
    listed = json.loads((site / "simple/pelton/index.json").read_text())
    assert {file["filename"] for file in listed["files"]} == set(files)
    assert listed["versions"] == ["0.1.0"]
    assert all(file["size"] == files[file["filename"]].stat().st_size for file in listed["files"])


def test_another_run_changes_nothing_and_a_removed_variant_goes(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site)
    report = made(dist, site)
    assert (report.written, report.removed) == ((), ())
    (dist / f"{PLAIN}-cuda_sm90.whl").unlink()
    made(dist, site)
    files = linked(site)
    assert set(json.loads(files["pelton-0.1.0-variants.json"].read_text())["variants"]) == {"cpu_avx2"}
    assert len(list(site.rglob("*-variants.json"))) == 1
    for path in dist.glob("*-cpu_avx2.whl"):
        path.unlink()
    made(dist, site)
    assert set(linked(site)) == {f"{PLAIN}.whl"}
    assert not list(site.rglob("*-variants.json"))


def _no_baseline(dist: Path) -> None:
    (dist / f"{PLAIN}.whl").unlink()


def _other_sources(dist: Path) -> None:
    make_variant(make_wheel(dist.parent / "x", plain("cuda-sm90", SM90, source_digest="sha256:2")), dist)


def _same_machines(dist: Path) -> None:
    make_variant(make_wheel(dist.parent / "x", plain("cpu-avx2b", AVX2)), dist)


def _spoiled(dist: Path) -> None:
    make_wheel(dist, plain().but(file_name=f"{PLAIN}-cpu_avx2.whl"))


INCONSISTENT = {
    "without the baseline": (_no_baseline, "has no wheel of version 0.1.0 without variant label"),
    "of other sources": (_other_sources, "cuda_sm90.whl was not built from the sources of"),
    "for the same machines": (
        _same_machines,
        "variants cpu_avx2 and cpu_avx2b of version 0.1.0 are for the same",
    ),
    "without its properties": (_spoiled, "cpu_avx2.whl: fails its audit: "),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_refused_when_inconsistent(case: str, dist: Path, tmp_path: Path) -> None:
    spoil, message = INCONSISTENT[case]
    site = tmp_path / "site"
    made(dist, site)
    before = {path: path.read_bytes() for path in site.rglob("*") if path.is_file()}
    spoil(dist)
    with pytest.raises(IndexBuildError, match=message):
        made(dist, site)
    assert {path: path.read_bytes() for path in site.rglob("*") if path.is_file()} == before


def test_the_front_page_names_them(dist: Path, tmp_path: Path) -> None:
    made(dist, tmp_path / "site")
    text = (tmp_path / "site/index.html").read_text()
    assert "uv pip install --preview-features wheel-variants --index INDEX/simple/ pelton" in text
    assert "cpu-avx2, cuda-sm90" in text


def test_the_reference_implementation_reads_them(dist: Path, tmp_path: Path) -> None:
    """variantlib makes the same index file of our wheels."""
    pytest.importorskip("variantlib", reason="variantlib is not installed")
    from variantlib.commands.generate_index_json import generate_index_json

    made(dist, tmp_path / "site")
    generate_index_json(["-d", str(dist)])
    theirs = json.loads((dist / "pelton-0.1.0-variants.json").read_text())
    assert theirs == json.loads(linked(tmp_path / "site")["pelton-0.1.0-variants.json"].read_text())


def test_properties_that_nobody_wrote_here() -> None:
    with pytest.raises(VariantError, match="x: does not describe"):
        read_variant(json.dumps({"variants": {"a": AVX2}}), "a", "x")
    assert read_variant(WRITTEN, "cpu_avx2", "x") == AVX2
