"""The documents' commands are ones that the programs take: parsed by the programs themselves, and not run."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from pelton_build.planning import make_plan, settings_of
from pelton_build.profile import profile_names

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]


def commands(start: str) -> list[tuple[str, dict[str, str], list[str]]]:
    """Commands of the documents' blocks that begin so: the document, the variables set before, and the words behind."""
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(
            r"^```(?:sh|console|text)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL
        )
        for line in "".join(blocks).splitlines():
            for part in line.removeprefix("$ ").partition("  #")[0].split("&&"):
                environ, rest = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", part.strip()).groups()  # type: ignore[union-attr]
                if rest == start or rest.startswith(f"{start} "):
                    variables = dict(word.split("=", 1) for word in environ.split())
                    found.append((document.name, variables, shlex.split(rest.removeprefix(start))))
    return found


def switches(words: list[str]) -> tuple[list[str], list[str]]:
    """The features and the config settings among a session's arguments."""
    pairs = list(zip(words[::2], words[1::2], strict=True))
    assert {option for option, _ in pairs} <= {"--feature", "-C"}, words
    return [v for o, v in pairs if o == "--feature"], [v for o, v in pairs if o == "-C"]


def test_commands_that_build_and_plan_are_taken() -> None:
    checked = 0
    known = profile_names(ROOT)
    for document, variables, words in commands("nox -s"):
        name, *arguments = words
        assert arguments[:1] in ([], ["--"]), (document, words)
        if name == "plan" and arguments:
            name, *arguments = f"build-{arguments[1]}", "--", *arguments[2:]
        profile = name.removeprefix("build-")
        if name == profile or (profile not in known and document == "new-gpu.md"):
            continue  # another session, or the profile that the page adds
        features, settings = switches(arguments[1:])
        environ = {key: value for key, value in variables.items() if key != "ROCM_PATH"}
        plan = make_plan(ROOT, settings_of(profile, features, settings), environ, version="1.0")
        assert plan.profile == profile, document
        checked += 1
    assert checked >= 8


def test_options_of_the_release_are_there() -> None:
    text = (ROOT / "noxfile.py").read_text()
    options = {word for _, _, words in commands("nox -s release") for word in words if word.startswith("--")}
    assert {"--dry-run", "--tag"} <= options
    for option in options - {"--"}:
        assert f'"{option}"' in text, option


def test_commands_of_the_package_are_taken() -> None:
    cli = pytest.importorskip("pelton.cli", reason="pelton is not installed")
    checked = 0
    for start in ("pelton", "python -m pelton", "build/quickstart/venv/bin/pelton"):
        for document, _, words in commands(start):
            try:
                cli._parser().parse_args(words)
            except SystemExit as error:
                assert error.code == 0, f"{document}: {start} {shlex.join(words)}"
            checked += 1
    assert checked >= 3


def test_the_configuration_of_sccache_has_its_keys() -> None:
    """Those of a storage with S3's interface; sccache refuses a file with others (tried with 0.16)."""
    known = {
        "bucket", "region", "key_prefix", "no_credentials", "endpoint", "use_ssl", "server_side_encryption",
        "enable_virtual_host_style", "rw_mode",
    }  # fmt: skip
    text = (ROOT / "docs" / "releases.md").read_text()
    (block,) = re.findall(r"^```toml\n# ~/\.config/sccache/config\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    given = tomllib.loads(block)
    assert set(given) == {"cache"} and set(given["cache"]) == {"s3"}
    assert set(given["cache"]["s3"]) <= known
    assert {"bucket", "no_credentials"} <= set(given["cache"]["s3"])  # without these it refuses the file, too
