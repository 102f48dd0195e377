"""The index's front page: helps a person to find the wheel for a machine.

Plain HTML that works without scripts, on a phone and on paper.  Like the rest of the index it is derived from the
wheels alone; what a wheel is for stands in its build info.
"""

from __future__ import annotations

import html
import shlex
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["MainIndex", "Offer", "Release", "front_page", "hardware_text"]

URL_STAND_IN = "INDEX"
"""What stands for the index's address in commands when nobody told it."""

_SECTIONS = {
    "cuda": (
        "NVIDIA GPU",
        "Compute capability and driver of this machine's cards:",
        "nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv",
    ),
    "rocm": (
        "AMD GPU",
        "Architecture of this machine's cards:",
        "rocminfo | grep -o 'gfx[0-9a-f]*' | sort -u",
    ),
    "cpu": (
        "CPU",
        "A line is printed when this machine has AVX-512, as the profiles with x86-64-v4 need it:",
        "grep -m 1 -o avx512vl /proc/cpuinfo",
    ),
}

_STYLE = """
      :root { color-scheme: light dark; --line: #8886; --soft: #8881; --mark: #0a7; }
      * { box-sizing: border-box; }
      body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem;
             overflow-wrap: anywhere; }
      h1 { margin: .5rem 0; }
      h2 { margin: 2rem 0 .25rem; border-bottom: 1px solid var(--line); }
      article { border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; }
      article h3 { margin: 0; }
      article p { margin: .25rem 0; }
      pre { background: var(--soft); border-left: .25rem solid var(--mark); padding: .5rem .75rem; margin: .5rem 0;
            white-space: pre-wrap; }
      small, .facts { opacity: .8; }
      summary { cursor: pointer; padding: .5rem 0; }
      .yanked { text-decoration: line-through; }
"""


@dataclass(frozen=True)
class Release:
    """One wheel that is offered."""

    file_name: str
    version: str  # with the label
    url: str  # relative to the front page
    size: int  # bytes
    sha256: str
    requires_python: str
    yanked: str | None = None  # the reason


@dataclass(frozen=True)
class Offer:
    """One index of the site: the wheels for one kind of machine, newest last."""

    place: str  # cuda-sm90, or cuda-sm90.fastmath
    summary: str
    backend: str
    archs: tuple[str, ...]
    releases: tuple[Release, ...]

    @property
    def newest(self) -> Release:
        """The newest release that is not yanked, else the newest."""
        usable = [release for release in self.releases if release.yanked is None]
        return (usable or self.releases)[-1]


@dataclass(frozen=True)
class MainIndex:
    """The index simple/: the baseline's wheels, and variant wheels for installers that choose by themselves."""

    version: str  # the newest
    variants: tuple[str, ...] = ()  # profiles that have variant wheels of this version
    script: str = ""  # the file that says which wheel is for a machine, relative to the front page


def hardware_text(backend: str, archs: Iterable[str]) -> str:
    """What a person compares with the machine: "compute capability 9.0", "gfx90a", "x86-64-v3".

    ``compute_80`` is PTX, which the driver compiles for every card from 8.0 on.
    """
    if backend != "cuda":
        return ", ".join(archs)
    texts = []
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        capability = f"{digits[:-1]}.{digits[-1:]}"
        texts.append(f"{capability} and newer" if kind == "compute" else capability)
    return f"compute capability {', '.join(texts)}"


def front_page(
    project: str, offers: Sequence[Offer], baseline: str, url: str, main: MainIndex | None = None
) -> str:
    """The page.  ``url`` is the index's own address for the commands, "" when it is not known."""
    base = url.rstrip("/") or URL_STAND_IN
    by_backend: dict[str, list[Offer]] = {}
    for offer in offers:
        by_backend.setdefault(offer.backend, []).append(offer)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "  <head>",
        '    <meta charset="utf-8">',
        '    <meta name="viewport" content="width=device-width, initial-scale=1">',
        f"    <title>Install {html.escape(project)}</title>",
        f"    <style>{_STYLE}    </style>",
        "  </head>",
        "  <body>",
        f"    <h1>Install {html.escape(project)}</h1>",
        "    <p>Each wheel is built for one kind of machine and refuses to run on any other. Find yours and copy its"
        " command; take one only, never two of these indexes together.</p>",
    ]
    if not url:
        lines.append(f"    <p><code>{URL_STAND_IN}</code> stands for the address of this page.</p>")
    if main is not None:
        lines += _main_section(project, main, base)
    for backend, (title, question, command) in _sections(by_backend).items():
        lines += [
            f'    <section id="{backend}">',
            f"    <h2>{html.escape(title)}</h2>",
            f"    <p>{html.escape(question)}</p>",
            f"    <pre><code>{html.escape(command)}</code></pre>",
        ]
        for offer in by_backend[backend]:
            lines += _article(project, offer, base, offer.place == baseline)
        lines.append("    </section>")
    lines += ["  </body>", "</html>", ""]
    return "\n".join(lines)


def _main_section(project: str, main: MainIndex, base: str) -> list[str]:
    name, index = html.escape(project), html.escape(f"{base}/simple/")
    lines = ['    <section id="choose">', "    <h2>Let a program choose</h2>"]
    if main.script:
        script = html.escape(shlex.quote(f"{base}/{main.script}"))
        lines += [
            f'    <p><a href="{html.escape(main.script)}">{html.escape(main.script)}</a> prints the command for this'
            " machine. It installs nothing and needs nothing but Python; one of</p>",
            f"    <pre><code>pipx run {script}</code></pre>",
            f"    <pre><code>uv run {script}</code></pre>",
            f"    <pre><code>curl -LO {script} &amp;&amp; python3 {html.escape(main.script)}</code></pre>",
        ]
    if main.variants:
        lines += [
            "    <p>Or have uv choose while it installs (experimental, wheel variants). It knows of"
            f" {html.escape(', '.join(main.variants))}; uv does not look for AMD GPUs:</p>",
            "    <pre><code>uv pip install --preview-features wheel-variants --index"
            f" {html.escape(shlex.quote(f'{base}/simple/'))} {name}</code></pre>",
        ]
    lines.append(
        f'    <p>Index: <a href="simple/">{index}</a>, the wheel that runs on most machines, version'
        f" {html.escape(main.version)}.</p>"
    )
    return [*lines, "    </section>"]


def _sections(by_backend: Mapping[str, object]) -> dict[str, tuple[str, str, str]]:
    return {backend: section for backend, section in _SECTIONS.items() if backend in by_backend}


def _article(project: str, offer: Offer, base: str, is_baseline: bool) -> list[str]:
    newest = offer.newest
    index = f"{base}/p/{urllib.parse.quote(offer.place)}/simple/"
    command = f'pip install --extra-index-url {shlex.quote(index)} "{project}=={newest.version}"'
    facts = [
        hardware_text(offer.backend, offer.archs),
        f"version {newest.version}",
        f"{_megabytes(newest.size)} MB",
    ]
    if newest.requires_python:
        facts.append(f"Python {newest.requires_python}")
    lines = [
        f'    <article id="{html.escape(offer.place)}">',
        f"      <h3>{html.escape(offer.summary or offer.place)}</h3>",
        f'      <p class="facts">{html.escape(" · ".join(facts))}</p>',
        f"      <pre><code>{html.escape(command)}</code></pre>",
    ]
    if is_baseline:
        lines.append("      <p>The right one when nothing better is known of the machine.</p>")
    if newest.yanked is not None:
        lines.append(f"      <p><strong>Withdrawn:</strong> {html.escape(newest.yanked)}</p>")
    lines += [
        "      <details>",
        f"        <summary>All files of {html.escape(offer.place)}</summary>",
        f'        <p>Index: <a href="p/{urllib.parse.quote(offer.place)}/simple/">{html.escape(index)}</a></p>',
        "        <ul>",
    ]
    for release in reversed(offer.releases):
        lines.append(f"          <li>{_release(release)}</li>")
    return [*lines, "        </ul>", "      </details>", "    </article>"]


def _release(release: Release) -> str:
    mark = "" if release.yanked is None else ' class="yanked"'
    note = "" if release.yanked is None else f" withdrawn: {html.escape(release.yanked)}"
    return (
        f'<a{mark} href="{html.escape(release.url)}">{html.escape(release.file_name)}</a>{note}'
        f"<br><small>SHA-256 {release.sha256}</small>"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"
