"""The index's front page: what it says, and that a browser shows it whole on a narrow screen."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pelton_build.front_page import MainIndex, Offer, Release, front_page, hardware_text

SHA = "ab" * 32


def release(version: str = "0.1.0+cu130.sm90", yanked: str | None = None) -> Release:
    name = f"pelton-{version}-py3-none-manylinux_2_28_x86_64.whl"
    return Release(
        name, version, f"wheels/abab/{name.replace('+', '%2B')}", 12_345_678, SHA, ">=3.11", yanked
    )


HOPPER = Offer("cuda-sm90", "NVIDIA Hopper: H100, H200", "cuda", ("sm_90a",), (release(),))
AMPERE = Offer("cuda-sm80", "NVIDIA Ampere", "cuda", ("sm_80", "compute_80"), (release("0.1.0+cu130.sm80"),))
AMD = Offer("rocm-gfx90a", "AMD Instinct MI200", "rocm", ("gfx90a",), (release("0.1.0+rocm.gfx90a"),))
CPU = Offer("cpu-avx2", "x86-64 with AVX2", "cpu", ("x86-64-v3",), (release("0.1.0+cpu.avx2"),))
FAST = Offer(
    "cpu-avx2.fastmath", "x86-64 with AVX2", "cpu", ("x86-64-v3",), (release("0.1.0+cpu.avx2.fastmath"),)
)


@pytest.mark.parametrize(
    ("backend", "archs", "text"),
    [
        ("cuda", ["sm_90a"], "compute capability 9.0"),
        ("cuda", ["sm_80", "compute_80"], "compute capability 8.0, 8.0 and newer"),
        ("cuda", ["sm_100a", "sm_120f"], "compute capability 10.0, 12.0"),
        ("rocm", ["gfx90a", "gfx942"], "gfx90a, gfx942"),
        ("cpu", ["x86-64-v3"], "x86-64-v3"),
    ],
)
def test_hardware(backend: str, archs: list[str], text: str) -> None:
    assert hardware_text(backend, archs) == text


class Page(html.parser.HTMLParser):
    """The page's commands, links, section ids; every element must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.commands: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "a":
            self.links.append(values["href"] or "")
        if "id" in values:
            self.ids.append(values["id"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "code" and data.startswith("pip"):
            self.commands.append(data)


def test_every_offer_has_its_command() -> None:
    page = Page(front_page("pelton", [CPU, HOPPER, AMPERE, AMD], "cpu-avx2", "https://example.test/whl/"))
    assert page.ids == ["cuda", "cuda-sm90", "cuda-sm80", "rocm", "rocm-gfx90a", "cpu", "cpu-avx2"]
    assert page.commands[0] == (
        'pip install --extra-index-url https://example.test/whl/p/cuda-sm90/simple/ "pelton==0.1.0+cu130.sm90"'
    )
    assert len(page.commands) == 4
    assert all(not re.match(r"\w+:|/", link) for link in page.links), "links must be relative"


def test_without_an_address_the_commands_have_a_stand_in() -> None:
    text = front_page("pelton", [CPU], "cpu-avx2", "")
    assert Page(text).commands[0].startswith("pip install --extra-index-url INDEX/p/cpu-avx2/simple/")
    assert "<code>INDEX</code> stands for the address of this page" in text


def test_only_what_is_offered_is_shown() -> None:
    text = front_page("pelton", [CPU, FAST], "cpu-avx2", "")
    assert "NVIDIA" not in text
    assert text.count("when nothing better is known") == 1
    assert Page(text).ids == ["cpu", "cpu-avx2", "cpu-avx2.fastmath"]


def test_a_withdrawn_release_is_not_recommended() -> None:
    old, new = release("0.1.0+cpu.avx2"), release("0.2.0+cpu.avx2", yanked="wrong <sums>")
    offer = Offer("cpu-avx2", "CPU", "cpu", ("x86-64-v3",), (old, new))
    assert offer.newest is old
    text = front_page("pelton", [offer], "cpu-avx2", "")
    assert '"pelton==0.1.0+cpu.avx2"' in Page(text).commands[0]
    assert "wrong &lt;sums&gt;" in text
    alone = Offer("cpu-avx2", "CPU", "cpu", ("x86-64-v3",), (new,))
    assert "<strong>Withdrawn:</strong>" in front_page("pelton", [alone], "cpu-avx2", "")


MAIN = MainIndex("0.1.0", ("cpu-avx2", "cuda-sm90"), script="pelton-select.py")


def test_programs_that_choose() -> None:
    text = front_page("pelton", [CPU, HOPPER], "cpu-avx2", "https://example.test/whl", MAIN)
    page = Page(text)
    assert page.ids[0] == "choose"
    assert page.links[:2] == ["pelton-select.py", "simple/"]
    assert page.commands[0] == "pipx run https://example.test/whl/pelton-select.py"
    assert "<code>uv run https://example.test/whl/pelton-select.py</code>" in text
    assert "--preview-features wheel-variants --index https://example.test/whl/simple/ pelton</code>" in text
    assert "cpu-avx2, cuda-sm90" in text


def test_only_programs_that_are_there() -> None:
    text = front_page("pelton", [CPU], "cpu-avx2", "", MainIndex("0.1.0"))
    assert 'href="simple/"' in text
    assert "pelton-select" not in text and "wheel-variants" not in text
    assert "choose" not in Page(front_page("pelton", [CPU], "cpu-avx2", "")).ids


def test_text_from_wheels_is_escaped() -> None:
    offer = Offer("cpu-avx2", "<script>alert(1)</script>", "cpu", ("x86-64-v3",), (release(),))
    assert "<script" not in front_page("pelton", [offer], "cpu-avx2", "")


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1280])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    """Nothing is wider than the screen.  The check is a script that the test adds; the page itself has none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    offers = [HOPPER, AMPERE, AMD, CPU, FAST]
    text = front_page(
        "pelton", offers, "cpu-avx2", "https://example.test/a/rather/long/address/of/an/index", MAIN
    )
    frame = tmp_path / "page.html"
    frame.write_text(text.replace("<details>", "<details open>"))
    # Chromium's own windows have a least width, so the page stands in a frame of the width that is asked for.
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe id="f" src="page.html" width="{width}" height="800" style="border:0"></iframe>'
        "<script>f.onload = () => { const d = f.contentDocument.documentElement;"
        " document.title = `${d.scrollWidth} ${d.clientWidth} ${f.contentDocument.querySelectorAll('article').length}`;"
        "};</script>"
    )
    result = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", result.stdout)
    assert found is not None, result.stdout + result.stderr
    scroll_width, client_width, articles = map(int, found.groups())
    assert client_width <= width
    assert scroll_width <= client_width, "something is wider than the screen"
    assert articles == len(offers)
