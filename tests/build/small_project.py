"""A small copy of the project to build wheels of."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("scikit_build_core", "cyclonedx", "pybind11", "ziglang", "torch")
MISSING = [name for name in TOOLS if importlib.util.find_spec(name) is None]
MISSING += [name for name in ("g++", "git") if shutil.which(name) is None]
"""What this environment lacks to build."""

HOOK = (
    "import json, sys; sys.path.insert(0, 'python'); from pelton_build import backend; "
    "print(json.dumps(getattr(backend, sys.argv[1])(*json.loads(sys.argv[2]))))"
)
SWITCHES = ("CMAKE_", "MAX_JOBS", "PELTON_", "SKBUILD", "USE_FAST_MATH", "SOURCE_DATE_EPOCH", "GIT_")
PROFILE = {"profile": "cpu-avx2"}
COPIED = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", ".gitignore", "build_profiles", "cmake", "kernels", "python", "noxfile.py")  # fmt: skip
FAMILIES = ("common", "norm")


class Project:
    """A copy of the project with a few families of kernels and no host extension, in git, tagged v0.3.0."""

    def __init__(self, folder: Path, families: Sequence[str] = FAMILIES) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "_source.json")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copyfile(source, folder / name)
        table = folder / "kernels" / "kernels.toml"
        parts = re.split(r"(?m)^(?=\[family\.)", table.read_text(encoding="utf-8"))
        kept = [part for part in parts[1:] if part.startswith(tuple(f"[family.{name}]" for name in families))]
        table.write_text("".join([parts[0], *kept]), encoding="utf-8")
        for profile in (folder / "build_profiles").glob("*.toml"):  # these families implement no feature
            text = profile.read_text(encoding="utf-8")
            features = re.search(r"(?m)^\[features\]\n(?:[^\[].*\n|\n)*", text)
            if features is not None:
                text = text.replace(features[0], features[0].replace("= true", "= false"))
                profile.write_text(text, encoding="utf-8")
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "all")
        self.git("tag", "v0.3.0")

    def git(self, *arguments: str) -> None:
        environ = {
            **os.environ,
            "GIT_AUTHOR_DATE": "2026-05-01T12:00:00Z",
            "GIT_COMMITTER_DATE": "2026-05-01T12:00:00Z",
        }
        options = (
            "-c",
            "user.name=T",
            "-c",
            "user.email=t@example.org",
            "-c",
            "commit.gpgsign=false",
            "-c",
            "core.autocrlf=false",
        )
        subprocess.run(["git", *options, *arguments], cwd=self.folder, env=environ, check=True)

    def copy(self, folder: Path) -> Project:
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "-q", str(self.folder), str(folder)], check=True)
        made = object.__new__(Project)
        made.folder = folder
        return made

    def start(
        self, name: str, *arguments: object, within: Sequence[str] = (), **environ: str
    ) -> subprocess.Popen[str]:
        """Run a hook; `within` is a command to run it in."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(SWITCHES)}
        return subprocess.Popen(
            [*within, sys.executable, "-c", HOOK, name, json.dumps(arguments)],
            cwd=self.folder,
            env={**clean, "MAX_JOBS": "2", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def build(self, name: str, *arguments: object, within: Sequence[str] = (), **environ: str) -> str:
        """Run a hook to its end; returns its answer."""
        process = self.start(name, *arguments, within=within, **environ)
        said, _ = process.communicate()
        assert process.returncode == 0, said[-6000:]
        return str(json.loads(said.strip().splitlines()[-1]))

    def wheel(
        self,
        out: Path,
        settings: dict[str, str] = PROFILE,
        within: Sequence[str] = (),
        **environ: str,
    ) -> Path:
        return out / self.build("build_wheel", str(out), settings, within=within, **environ)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
