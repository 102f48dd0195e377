"""Build times of one profile: cold, one kernel touched, nothing touched.

    python benchmarks/build.py --profile cpu-avx2 --json build-times.json

Runs with the Python of an environment that holds the `build` dependency group and torch. The tree is
copied into a temporary folder and installed, editable and with rebuild on import, into a virtual environment of
its own that sees the packages of this one; nothing here is changed. Reported are seconds of wall clock and of CPU,
children included:

- cold: the wheel, from an empty build folder
- editable: the first editable installation, from an empty build folder
- touched: `import pelton` and the library's load after one kernel's source changed, for each family given
- nothing: the same when nothing changed, and, to compare with, an import that does not ask for a rebuild
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def copy_tracked(target: Path) -> None:
    """Copy the files that git tracks or would, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def timed(command: list[str], folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Run a command; its wall-clock and CPU seconds. A failure prints its output and ends the benchmark."""

    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start, used = time.perf_counter(), cpu()
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stdout}{done.stderr}")
    return {"wall_s": round(time.perf_counter() - start, 2), "cpu_s": round(cpu() - used, 2)}


def measure(profile: str, families: list[str], scratch: Path) -> dict[str, dict[str, float]]:
    """All figures of one profile, in a fresh copy of the tree below `scratch`."""
    source, venv = scratch / "source", scratch / "venv"
    copy_tracked(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    packages = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    Path(packages, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PELTON_", "PYTHONPATH"))},
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "-C", f"profile={profile}"]

    figures = {"cold": timed([*pip, "wheel", *options, "-w", str(scratch), "."], source, environment)}
    shutil.rmtree(source / "build", ignore_errors=True)
    editable = [*pip, "install", *options, "-C", "editable.rebuild=true", "-e", "."]
    figures["editable"] = timed(editable, source, environment)

    load = [python, "-c", "import pelton.ops"]
    timed(load, source, environment)  # writes the byte code
    for family in families:
        kernel = source / "kernels" / family / "cpu.cpp"
        kernel.write_text(kernel.read_text() + "\n// touched\n")
        figures[f"touched {family}"] = timed(load, source, environment)
    figures["nothing touched"] = timed(load, source, environment)
    figures["no rebuild asked for"] = timed([python, "-c", "import torch"], source, environment)
    return figures


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="build times of one profile")
    parser.add_argument("--profile", default="cpu-avx2")
    parser.add_argument("--families", nargs="+", default=["norm", "linear", "attention"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pelton-build-") as scratch:
        figures = measure(arguments.profile, arguments.families, Path(scratch))
    for name, taken in figures.items():
        print(f"{arguments.profile:12} {name:22} {taken['wall_s']:7.2f} s wall {taken['cpu_s']:7.2f} s cpu")
    if arguments.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "command": " ".join(["python", *sys.argv]),
            "profile": arguments.profile,
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
