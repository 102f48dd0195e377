"""The index: what its pages say, what it refuses, that it is incremental and atomic, and what installers make of it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html.parser
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton_build import index
from pelton_build.audit import AuditError
from pelton_build.errors import BuildError
from pelton_build.index import IndexBuildError, build_index, find_wheels, place_of, read_yanks
from pelton_build.serve import serving
from wheel_factory import WheelParts, labelled, make_wheel, unlabelled

pytest.importorskip(
    "elftools", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)
pytest.importorskip(
    "iced_x86", reason="the audit's libraries are not installed: pip install pyelftools iced-x86"
)

AVX512 = labelled("cpu-avx512", "cpu.avx512", archs=("x86-64-v4",))
FAST = labelled("cpu-avx2", "cpu.avx2.fastmath")
BASELINE = "cpu-avx2"


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """Wheels of two profiles, a second version and one special feature set; the baseline's without label, too."""
    folder = tmp_path / "dist"
    make_wheel(folder / "simple", unlabelled())
    make_wheel(folder / "simple", unlabelled("0.2.0"))
    make_wheel(folder / "cpu-avx2")
    make_wheel(folder / "cpu-avx2", labelled("cpu-avx2", "cpu.avx2", version="0.2.0"))
    make_wheel(folder / "cpu-avx2", FAST)
    make_wheel(folder / "cpu-avx512", AVX512)
    return folder


def made(dist: Path, out: Path, **options: object) -> index.IndexReport:
    return build_index(find_wheels([dist]), out, baseline=BASELINE, **options)  # type: ignore[arg-type]


class Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append({name: value or "" for name, value in attrs})


def links(page: Path) -> list[dict[str, str]]:
    parser = Links()
    parser.feed(page.read_text())
    return parser.links


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".index-")
    }


def test_indexes_and_their_wheels(dist: Path, tmp_path: Path) -> None:
    report = made(dist, tmp_path / "site")
    names = {place: [name.split("-py3")[0] for name in held] for place, held in report.places.items()}
    assert names == {
        "p/cpu-avx2/simple": ["pelton-0.1.0+cpu.avx2", "pelton-0.2.0+cpu.avx2"],
        "p/cpu-avx2.fastmath/simple": ["pelton-0.1.0+cpu.avx2.fastmath"],
        "p/cpu-avx512/simple": ["pelton-0.1.0+cpu.avx512"],
        "simple": ["pelton-0.1.0", "pelton-0.2.0"],
    }


def test_pages_say_the_truth_in_both_forms(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site)
    pages = sorted(site.rglob("simple/pelton/index.html"))
    assert len(pages) == 4
    for page in pages:
        assert 'data-requires-python="&gt;=3.11"' in page.read_text()
        document = json.loads(page.with_suffix(".json").read_text())
        assert document["meta"] == {"api-version": "1.1"}
        assert document["name"] == "pelton"
        found = links(page)
        assert len(found) == len(document["files"]) == len(document["versions"])
        for shown, described in zip(found, document["files"], strict=True):
            url, _, fragment = shown["href"].partition("#")
            assert url == described["url"]
            assert "+" not in url and not url.startswith(("/", "http"))
            wheel = (page.parent / urllib.parse.unquote(url)).resolve()
            assert wheel.name == described["filename"]
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            assert fragment == f"sha256={digest}"
            assert described["hashes"] == {"sha256": digest}
            assert described["size"] == wheel.stat().st_size
            assert described["requires-python"] == shown["data-requires-python"] == ">=3.11"
            assert described["upload-time"] == time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(wheel.stat().st_mtime)
            )
            metadata = wheel.with_name(f"{wheel.name}.metadata").read_bytes()
            expected = hashlib.sha256(metadata).hexdigest()
            assert described["core-metadata"] == {"sha256": expected}
            assert shown["data-core-metadata"] == f"sha256={expected}"
            assert "data-dist-info-metadata" not in shown  # pip before 23.1 stumbles over it
            assert described["yanked"] is False and "data-yanked" not in shown
        root = page.parent.parent
        assert [link["href"] for link in links(root / "index.html")] == ["pelton/"]
        assert json.loads((root / "index.json").read_text())["projects"] == [{"name": "pelton"}]


PLACES: list[tuple[str, str, list[str] | None, str]] = [
    # the label alone, as wheels of older builds have it
    ("cpu-avx2", "cpu.avx2", None, "cpu-avx2"),
    ("cpu-avx2", "cpu.avx2.fastmath", None, "cpu-avx2.fastmath"),
    ("cuda-sm90", "cu130.sm90.fastmath.nomarlin", None, "cuda-sm90.fastmath.nomarlin"),
    ("cuda-sm90", "cu130.sm90", None, "cuda-sm90"),
    ("x", "fastmath", None, "x"),
    ("cpu-avx2", "", None, ""),
    # with what the build info says was changed
    ("cpu-fastmath", "cpu.fastmath", [], "cpu-fastmath"),
    ("cpu-fastmath", "cpu.fastmath.nomarlin", ["marlin"], "cpu-fastmath.nomarlin"),
    ("cpu-avx2", "cpu.avx2.noawq", [], "cpu-avx2"),
    ("cuda-sm90", "cu130.sm90.fastmath.nomarlin", ["marlin", "fast-math"], "cuda-sm90.fastmath.nomarlin"),
    ("cpu-avx2", "", [], ""),
]


@pytest.mark.parametrize(("profile", "label", "changed", "place"), PLACES)
def test_place(profile: str, label: str, changed: list[str] | None, place: str) -> None:
    features = {"awq": False, "gptq": True, "marlin": False, "fast-math": True}
    assert place_of(profile, label, features, changed) == place


@pytest.mark.parametrize("changed", ["gptq", ["gpqt"], [["gptq"]], {"gptq": 1}, 3])
def test_changed_features_that_are_none(changed: object, tmp_path: Path) -> None:
    make_wheel(tmp_path, labelled("cpu-gptq", "cpu.gptq").with_info(changed_features=changed))
    with pytest.raises(IndexBuildError, match="changed_features"):
        made(tmp_path, tmp_path / "site")


def test_a_profile_whose_label_ends_like_a_feature(dist: Path, tmp_path: Path) -> None:
    make_wheel(dist / "new", labelled("cpu-gptq", "cpu.gptq").with_info(changed_features=[]))
    places = made(dist, tmp_path / "site").places
    assert "p/cpu-gptq/simple" in places and "p/cpu-gptq.gptq/simple" not in places


def test_linked_folders_are_followed_once(dist: Path, tmp_path: Path) -> None:
    plain = [path.name for path in find_wheels([dist])]
    (tmp_path / "elsewhere").mkdir()
    (dist / "cpu-avx512").rename(tmp_path / "elsewhere/cpu-avx512")
    (dist / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/circle").symlink_to(dist)
    (dist / "self").symlink_to(dist)
    assert sorted(path.name for path in find_wheels([dist])) == sorted(plain)


def test_the_index_in_the_folder_of_the_wheels(dist: Path, tmp_path: Path) -> None:
    """Its own copies do not keep a wheel that is gone; also when a link leads there."""
    site = dist / "site"
    (dist / "linked").symlink_to(site)

    def run() -> index.IndexReport:
        return build_index(find_wheels([dist], site), site, baseline=BASELINE)

    run()
    for path in (dist / "cpu-avx512").iterdir():
        path.unlink()
    assert not any("avx512" in wheel.file_name for wheel in run().wheels)
    for place in (site, site / "wheels", dist / "linked"):
        with pytest.raises(IndexBuildError, match="lies in the index's own folder"):
            find_wheels([place], site)


@pytest.mark.parametrize("alone", [False, True])
def test_a_wheel_in_capital_letters(alone: bool, dist: Path) -> None:
    path = next((dist / "cpu-avx512").iterdir())
    path = path.rename(path.with_suffix(".WHL"))
    with pytest.raises(IndexBuildError, match=r"\.WHL: .*rename it"):
        find_wheels([path if alone else dist])


def test_second_run_touches_nothing_and_reads_no_wheel(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    made(dist, site)
    before = tree(site)
    monkeypatch.setattr(
        index.audit, "audit_wheel", lambda *a, **k: pytest.fail("an unchanged wheel was audited again")
    )
    report = made(dist, site)
    assert report.written == () and report.removed == ()
    assert tree(site) == before


def test_many_wheels_are_read_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entries in the same order, and an error of a process is the run's."""
    folder = tmp_path / "dist"
    for number in range(6):
        make_wheel(folder, labelled("cpu-avx2", "cpu.avx2", version=f"0.1.{number}"))
    paths = find_wheels([folder])
    alone = list(index.read_wheels(paths))
    monkeypatch.setattr(index, "PARALLEL_FROM", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert list(index.read_wheels(paths)) == alone
    make_wheel(folder, labelled("cpu-avx2", "cpu.avx2", version="0.1.2").with_info(archs=["x86-64-v4"]))
    with pytest.raises(IndexBuildError, match=r"0\.1\.2.*fails its audit: isa"):
        list(index.read_wheels(paths))


def test_a_new_wheel_and_a_removed_one(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site)
    make_wheel(
        dist / "cpu-avx512", labelled("cpu-avx512", "cpu.avx512", version="0.2.0", archs=("x86-64-v4",))
    )
    for path in (dist / "cpu-avx2").glob("*fastmath*"):
        path.unlink()
    report = made(dist, site)
    assert {name.split("/")[0] for name in report.written} == {"index.html", "p", "wheels"}
    changed = set(report.written) - {"index.html"}
    assert all("cpu-avx512" in name or "cpu.avx512" in name for name in changed)
    assert report.removed and all("fastmath" in name for name in report.removed)
    assert not (site / "p/cpu-avx2.fastmath").exists()


def test_front_page(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site, url="https://example.test/whl")
    text = (site / "index.html").read_text()
    assert "https://example.test/whl/p/cpu-avx2.fastmath/simple/" in text
    links = re.findall(r'href="([^"]+)"', text)
    assert links
    for link in links:
        path = site / urllib.parse.unquote(link)
        assert (path / "index.html").is_file() if link.endswith("/") else path.is_file(), link


@pytest.mark.parametrize("name", ["simple", "p", "wheels", "index.html", ".index-lock", ".index-state.json"])
def test_links_in_the_index_are_not_followed(name: str, dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site)
    other = tmp_path / "precious"
    if (site / name).is_dir():
        shutil.rmtree(site / name)
        (other / "sub").mkdir(parents=True)
        (other / "sub/a.txt").write_text("1")
    else:
        (site / name).unlink(missing_ok=True)
        other.write_text("1")
    (site / name).symlink_to(other)
    with pytest.raises(IndexBuildError, match=rf"{name}: not the (file|folder) that an index has; remove it"):
        made(dist, site)
    assert (other / "sub/a.txt" if other.is_dir() else other).read_text() == "1"


def test_links_in_a_circle(tmp_path: Path) -> None:
    path = tmp_path / "self.whl"
    path.symlink_to(path)
    with pytest.raises(IndexBuildError, match=r"self\.whl"):
        find_wheels([path], tmp_path / "site")


def test_a_time_that_no_calendar_has(dist: Path, tmp_path: Path) -> None:
    os.utime(next((dist / "cpu-avx512").iterdir()), (2e11, 2e11))
    with pytest.raises(IndexBuildError, match=r"its time, .* lies in the future"):
        made(dist, tmp_path / "site")


def test_the_state_is_a_cache(dist: Path, tmp_path: Path) -> None:
    made(dist, tmp_path / "site")
    (tmp_path / "site/.index-state.json").write_text("[" * 100_000)
    assert made(dist, tmp_path / "site").removed == ()


@pytest.mark.parametrize(
    "url", ["example.test/whl", "ftp://example.test", "https://example.test/?a=b", "http://[::1"]
)
def test_an_address_that_is_none(url: str, dist: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pelton_build.index", str(dist), "--out", str(tmp_path / "site")]
    result = subprocess.run([*command, "--url", url], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "--url" in result.stderr and url in result.stderr
    assert not (tmp_path / "site").exists()


def test_a_rebuilt_wheel_replaces_the_old_one(tmp_path: Path) -> None:
    dist, site = tmp_path / "dist", tmp_path / "site"
    make_wheel(dist, unlabelled())
    made(dist, site)
    path = make_wheel(dist, unlabelled().but(files={"pelton/new.py": b"NEW = 1\n"}))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
    made(dist, site)
    document = json.loads((site / "simple/pelton/index.json").read_text())
    assert document["files"][0]["hashes"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_damaged_state_costs_only_time(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site)
    before = tree(site)
    for text in ("{", "[]", '{"format": 1}', ""):
        (site / index.STATE).write_text(text)
        assert made(dist, site).written == ()
        assert tree(site) == before


def _two_labels(dist: Path) -> None:
    make_wheel(dist / "cpu-avx2", labelled("cpu-avx2", "cpu.avx2b"))


def _of_another_profile(dist: Path) -> None:
    make_wheel(dist / "new", unlabelled("0.3.0", profile="cpu-avx512"))


def _same_name(dist: Path) -> None:
    make_wheel(dist / "copy", WheelParts().but(files={"pelton/other.py": b"X = 1\n"}))


def _renamed(dist: Path) -> None:
    path = make_wheel(dist / "new", labelled("cpu-avx2", "cpu.avx2", version="0.3.0"))
    path.rename(path.with_name(path.name.replace("0.3.0", "0.4.0")))


def _failing(dist: Path) -> None:
    make_wheel(dist / "new", labelled("cpu-avx2", "cpu.avx2", version="0.3.0").with_info(archs=["x86-64-v4"]))


def _truncated(dist: Path) -> None:
    path = make_wheel(dist / "new", labelled("cpu-avx2", "cpu.avx2", version="0.3.0"))
    path.write_bytes(path.read_bytes()[:-300])


def _from_the_future(dist: Path) -> None:
    path = make_wheel(dist / "new", labelled("cpu-avx2", "cpu.avx2", version="0.3.0"))
    os.utime(path, (time.time() + 86400, time.time() + 86400))


def _next(dist: Path, **changes: object) -> Path:
    """The baseline's next version, spoiled."""
    return make_wheel(dist / "new", labelled("cpu-avx2", "cpu.avx2", version="0.3.0").but(**changes))


def _bomb(dist: Path) -> None:
    _next(dist, files={"pelton/zeros.bin": bytes(200 << 20)})


def _liar(dist: Path) -> None:
    """A member that unpacks to more than the directory says."""
    path = _next(dist, files={"pelton/zeros.bin": bytes(1 << 20)})
    true, said = struct.pack("<L", 1 << 20), struct.pack("<L", 100)
    path.write_bytes(path.read_bytes().replace(true, said))


def _leaving(dist: Path) -> None:
    _next(dist, files={"pelton/../../evil.py": b"X = 1\n"})


def _absolute(dist: Path) -> None:
    _next(dist, files={"/tmp/evil.py": b"X = 1\n"})


def _forged_record(dist: Path) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"another").digest()).rstrip(b"=").decode()
    _next(dist, record={"pelton/__init__.py": f"pelton/__init__.py,sha256={digest},7"})


def _unlisted(dist: Path) -> None:
    _next(dist, files={"pelton/extra.py": b"X = 1\n"}, unlisted=("pelton/extra.py",))


def _other_metadata(dist: Path) -> None:
    _next(dist, metadata=WheelParts().metadata.replace("{version}", "0.4.0+cpu.avx2"))


def _other_name(dist: Path) -> None:
    _next(dist, metadata=WheelParts().metadata.replace("Name: pelton", "Name: pelten"))


def _leaving_profile(dist: Path) -> None:
    make_wheel(dist / "new", labelled("../../evil", "cpu.avx2", version="0.3.0"))


def _pipe(dist: Path) -> None:
    os.mkfifo(dist / "pelton-0.3.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl")


def _folder(dist: Path) -> None:
    (dist / "pelton-0.3.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl").mkdir()


def _text(dist: Path) -> None:
    (dist / "pelton-0.3.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl").write_text("wheel\n")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "two labels of one version": (_two_labels, "two labels of version 0.1.0"),
    "without label, for some machines only": (_of_another_profile, "0.3.0.*profile cpu-avx512 without label"),
    "two wheels of one name": (_same_name, "two different wheels of one name"),
    "renamed": (_renamed, "0.4.0.*fails its audit: name"),
    "failing audit": (_failing, "0.3.0.*fails its audit: isa"),
    "truncated": (_truncated, "0.3.0.*not a readable wheel"),
    "zip bomb": (_bomb, r"0\.3\.0.*zeros.bin is compressed more than 1000:1"),
    "a member larger than it says": (_liar, r"0\.3\.0.*zeros.bin cannot be read"),
    "a path that leaves the wheel": (
        _leaving,
        r"0\.3\.0.*'pelton/../../evil.py': a path that leaves the wheel",
    ),
    "an absolute path": (_absolute, r"0\.3\.0.*'/tmp/evil.py': an absolute path"),
    "forged RECORD": (_forged_record, r"0\.3\.0.*fails its audit: record: pelton/__init__.py"),
    "not in RECORD": (_unlisted, r"0\.3\.0.*fails its audit: record: pelton/extra.py"),
    "metadata of another version": (_other_metadata, r"0\.3\.0.*fails its audit: name"),
    "metadata of another project": (_other_name, r"0\.3\.0.*fails its audit: name"),
    "a profile that leaves the index": (_leaving_profile, r"0\.3\.0.*'../../evil' is no name of a profile"),
    "a pipe": (_pipe, r"0\.3\.0.*not a file"),
    "a folder": (_folder, r"0\.3\.0.*not a file"),
    "no zip": (_text, r"0\.3\.0.*not a readable wheel"),
    "from the future": (_from_the_future, "0.3.0.*lies in the future"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_written(case: str, dist: Path, tmp_path: Path) -> None:
    spoil, text = REFUSED[case]
    site = tmp_path / "site"
    made(dist, site)
    before = tree(site)
    spoil(dist)
    with pytest.raises((IndexBuildError, AuditError), match=text):
        made(dist, site)
    assert tree(site) == before
    with pytest.raises((IndexBuildError, AuditError)):
        made(dist, tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


def test_two_profiles_are_not_on_one_index(dist: Path) -> None:
    """A profile may have the name that another one's feature set gets."""
    entries = [index.read_wheel(path)[0] for path in find_wheels([dist])]
    (fast,) = [entry for entry in entries if entry.place == "cpu-avx2.fastmath"]
    other = dataclasses.replace(fast, profile="cpu-avx2.fastmath", file_name="other.whl")
    with pytest.raises(
        IndexBuildError, match=r"p/cpu-avx2\.fastmath/simple/: .* is of profile cpu-avx2, other\.whl of"
    ):
        index.plan_pages([*entries, other], BASELINE)


def test_an_unreadable_folder(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not passed over, or the index would lose what is in it.  (The tests may run as a user whom no mode stops.)"""
    site = tmp_path / "site"
    made(dist, site)
    before = tree(site)
    real = os.scandir

    def scandir(path: str) -> object:
        if Path(path).name == "cpu-avx512":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(IndexBuildError, match="cpu-avx512: Permission denied; make it readable"):
            made(dist, site)
    assert tree(site) == before


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_wheel_is_refused_or_read(wheel_bytes: tuple[Path, bytes], data: st.DataObject) -> None:
    """Whatever is flipped or cut: an error with the file's name, or the same entry; never another exception."""
    path, whole = wheel_bytes
    spoiled = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        spoiled[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(spoiled[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    try:
        entry, _ = index.read_wheel(path)
    except (IndexBuildError, AuditError) as error:
        assert path.name in str(error)
    else:
        assert (entry.version, entry.profile) == ("0.1.0+cpu.avx2", "cpu-avx2")


@pytest.fixture(scope="module")
def wheel_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = make_wheel(tmp_path_factory.mktemp("wheel"))
    return path, path.read_bytes()


def test_the_same_wheel_in_two_folders_is_one(dist: Path, tmp_path: Path) -> None:
    shutil.copytree(dist / "cpu-avx512", dist / "copy")
    assert len(made(dist, tmp_path / "site").wheels) == 6


def test_no_wheels_and_foreign_folder(tmp_path: Path) -> None:
    with pytest.raises(IndexBuildError, match="no wheels"):
        build_index([], tmp_path / "site", baseline=BASELINE)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(IndexBuildError, match=r"holds other files \(cat.jpg\)"):
        build_index([make_wheel(tmp_path)], tmp_path / "photos", baseline=BASELINE)
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/..index-state.json.new").write_bytes(
        b"{"
    )  # by a run that was killed at its first file
    build_index([make_wheel(tmp_path)], tmp_path / "killed", baseline=BASELINE)
    with pytest.raises(IndexBuildError, match="neither a folder nor a wheel"):
        find_wheels([tmp_path / "gone"])


@pytest.mark.parametrize("after", range(9))
def test_interrupted_run_leaves_a_sound_index(
    after: int, dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the moment of the crash, every page links to files that are there with their promised hashes, and the
    next run makes what it should be."""
    site = tmp_path / "site"
    made(dist, site)
    make_wheel(
        dist / "cpu-avx512", labelled("cpu-avx512", "cpu.avx512", version="0.2.0", archs=("x86-64-v4",))
    )
    rebuilt = make_wheel(dist / "cpu-avx2", WheelParts().but(files={"pelton/new.py": b"NEW = 1\n"}))
    os.utime(rebuilt, ns=(0, rebuilt.stat().st_mtime_ns + 10**9))
    real = Path.replace
    calls = 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            made(dist, site)
    for page in site.rglob("simple/pelton/index.html"):
        for shown in links(page):
            url, _, fragment = shown["href"].partition("#sha256=")
            wheel = page.parent / urllib.parse.unquote(url)
            assert hashlib.sha256(wheel.read_bytes()).hexdigest() == fragment
            metadata = wheel.with_name(f"{wheel.name}.metadata").read_bytes()
            assert shown["data-core-metadata"] == f"sha256={hashlib.sha256(metadata).hexdigest()}"
    made(dist, site)
    made(dist, tmp_path / "fresh")
    pages = {name: data for name, (_, data) in tree(site).items()}
    assert pages == {name: data for name, (_, data) in tree(tmp_path / "fresh").items()}


def test_yanked(dist: Path, tmp_path: Path) -> None:
    file = tmp_path / "yanked.toml"
    file.write_text('[yanked]\n"0.2.0" = "wrong <results> & slow"\n')
    site = tmp_path / "site"
    made(dist, site, yanks=read_yanks(file))
    document = json.loads((site / "simple/pelton/index.json").read_text())
    assert [f["yanked"] for f in document["files"]] == [False, "wrong <results> & slow"]
    assert [link.get("data-yanked") for link in links(site / "simple/pelton/index.html")] == [
        None,
        "wrong <results> & slow",
    ]
    for text, message in [
        (
            '[yanked]\n"0.9.0" = "gone"\n',
            r"yanked.0.9.0: neither a version nor a file of this index, which holds .*0\.2\.0",
        ),
        ('[yanked]\n0.2.0 = "x"\n', "write the version in quotes"),
        ('[yanked]\n"0.2.0" = ""\n', "say why"),
        ('[yank]\n"0.2.0" = "x"\n', r"table \[yanked\]"),
        ("[yanked", "not valid TOML"),
    ]:
        file.write_text(text)
        with pytest.raises(IndexBuildError, match=message):
            made(dist, site, yanks=read_yanks(file))


def test_served_with_types_that_installers_ask_for(dist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    made(dist, site)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with serving(site) as url:
        with opener.open(f"{url}/simple/pelton/") as answer:
            assert answer.headers.get_content_type() == "text/html"
        with opener.open(f"{url}/simple/pelton") as answer:  # without the final slash: redirected
            assert answer.url.endswith("/simple/pelton/")
        with opener.open(f"{url}/simple/pelton/index.json") as answer:
            assert answer.headers.get_content_type() == "application/vnd.pypi.simple.v1+json"


def test_serving_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not a folder"), serving(tmp_path / "none"):
        pass
    with (
        serving(tmp_path) as url,
        pytest.raises(BuildError, match="cannot listen"),
        serving(tmp_path, int(url.rpartition(":")[2])),
    ):
        pass


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("PIP_") and "proxy" not in k.lower()
    }
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("path", "requirement", "expected"),
    [
        ("/simple/", "pelton", "pelton-0.2.0-"),
        ("/simple", "Pelton", "pelton-0.2.0-"),
        ("/simple/", "pelton==0.1.0", "pelton-0.1.0-"),
        ("/p/cpu-avx2/simple/", "pelton", "pelton-0.2.0+cpu.avx2-"),
        ("/p/cpu-avx2/simple", "Pelton==0.1.0", "pelton-0.1.0+cpu.avx2-"),
        ("/p/cpu-avx512/simple/", "pelton", "pelton-0.1.0+cpu.avx512-"),
        ("/p/cpu-avx2.fastmath/simple/", "pelton", "pelton-0.1.0+cpu.avx2.fastmath-"),
    ],
)
def test_pip_takes_the_right_wheel(
    path: str, requirement: str, expected: str, dist: Path, tmp_path: Path
) -> None:
    site, got = tmp_path / "site", tmp_path / "got"
    made(dist, site)
    with serving(site) as url:
        done = pip(
            "download", "--no-deps", "--only-binary", ":all:", "-d", str(got), "-i", url + path, requirement
        )
    assert done.returncode == 0, done.stderr
    assert [wheel.name.startswith(expected) for wheel in got.iterdir()] == [True]


@pytest.mark.parametrize(
    "restriction",
    [
        ("--python-version", "3.10"),
        ("--platform", "musllinux_1_2_x86_64"),
        ("--platform", "manylinux_2_17_x86_64"),
        ("--platform", "manylinux_2_28_aarch64"),
    ],
)
def test_pip_takes_nothing_where_nothing_fits(
    restriction: tuple[str, str], dist: Path, tmp_path: Path
) -> None:
    site, got = tmp_path / "site", tmp_path / "got"
    made(dist, site)
    with serving(site) as url:
        options = ("--no-deps", "--only-binary", ":all:", "-d", str(got), "-i", f"{url}/simple/")
        done = pip("download", *options, *restriction, "pelton")
    assert done.returncode != 0
    assert "No matching distribution" in done.stderr
    assert not got.exists() or not list(got.iterdir())


def test_pip_and_yanked_versions(dist: Path, tmp_path: Path) -> None:
    site, got = tmp_path / "site", tmp_path / "got"
    made(dist, site, yanks={"0.2.0": "wrong results"})
    with serving(site) as url:
        options = ("download", "--no-deps", "--only-binary", ":all:", "-d", str(got), "-i", f"{url}/simple/")
        assert pip(*options, "pelton").returncode == 0
        assert [wheel.name.split("-py3")[0] for wheel in got.iterdir()] == ["pelton-0.1.0"]
        pinned = pip(*options, "pelton==0.2.0")
    assert pinned.returncode == 0
    assert "wrong results" in pinned.stdout + pinned.stderr


def test_command_line(dist: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pelton_build.index", str(dist), "--out", str(tmp_path / "site")]
    done = subprocess.run([*command, "--baseline", BASELINE], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "p/cpu-avx512/simple/" in done.stdout
    misspelt = subprocess.run(
        [*command, "--baseline", "cpu-avx"], check=False, capture_output=True, text=True
    )
    assert misspelt.returncode == 1
    assert "unknown baseline profile 'cpu-avx'; did you mean 'cpu-avx2'?" in misspelt.stderr
    assert (tmp_path / "site/simple/index.html").is_file()
    _failing(dist)
    failed = subprocess.run([*command, "--baseline", BASELINE], check=False, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "fails its audit" in failed.stderr and "Traceback" not in failed.stderr
