"""Time to make the package index of many wheels, and to make it again when nothing, or one wheel, has changed.

    python benchmarks/index.py --wheels 1000 --json index.json
    python benchmarks/index.py --wheels 200 --wheel dist/cpu-avx2/pelton-0.1.0+cpu.avx2-py3-none-manylinux_2_28_x86_64.whl

Runs with the Python of an environment that holds the `audit` dependency group, and, for the small wheels that it makes
by itself, a C compiler. The wheels differ in version alone (`--wheel`: copies of a real wheel under other versions), or
each has a library of its own (`--distinct`), so that no audit can use what another one found. Every wheel is audited.
Reported are seconds of wall clock and of CPU, children included:

- first: into an empty folder
- again: nothing has changed
- one more: one wheel was added
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import json
import os
import platform
import resource
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "build")]

from pelton_build.index import build_index, find_wheels  # noqa: E402


def versions(count: int) -> list[str]:
    return [f"0.{number // 100}.{number % 100}" for number in range(count)]


def small_wheel(folder: Path, version: str, mark: str) -> None:
    """A wheel that passes the audit, of some kilobytes; `mark` goes into its library."""
    from wheel_factory import LIBRARY_NAME, good_files, labelled, make_wheel

    parts = labelled("cpu-avx2", "cpu.avx2", version=version)
    if mark:
        library = good_files()[LIBRARY_NAME]
        parts = parts.but(files={LIBRARY_NAME: library + mark.encode()})  # behind the ELF file's own end
    make_wheel(folder, parts)


def copy_wheel(wheel: Path, folder: Path, version: str) -> None:
    """A real wheel under another version, which file name, metadata, build info, bill of materials and RECORD say."""
    project, old, tags = wheel.name.split("-", 2)
    new = version + (f"+{old.partition('+')[2]}" if "+" in old else "")
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
        for member in members:
            data = archive.read(member)
            if member.filename.endswith((".json", "METADATA")):
                data = data.replace(old.encode(), new.encode())
            files[member.filename.replace(f"-{old}.dist-info", f"-{new}.dist-info")] = (member, data)
    record = f"{project}-{new}.dist-info/RECORD"
    lines = []
    for name, (_, data) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},,\n" if name == record else f"{name},sha256={digest},{len(data)}\n")
    files[record] = (files[record][0], "".join(lines).encode())
    with zipfile.ZipFile(folder / f"{project}-{new}-{tags}", "w") as archive:
        for name, (member, data) in files.items():
            made = zipfile.ZipInfo(name, member.date_time)
            made.external_attr = member.external_attr
            archive.writestr(made, data, zipfile.ZIP_DEFLATED, 1)


def timed(folder: Path, site: Path) -> dict[str, float]:
    """Make the index; wall-clock and CPU seconds."""

    def cpu() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start, used = time.perf_counter(), cpu()
    build_index(find_wheels([folder]), site, baseline="cpu-avx2")
    return {"wall_s": round(time.perf_counter() - start, 2), "cpu_s": round(cpu() - used, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=int, default=1000, metavar="N")
    parser.add_argument("--wheel", type=Path, help="copies of this real wheel instead of small ones")
    parser.add_argument("--distinct", action="store_true", help="each small wheel with a library of its own")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        dist, site = Path(scratch) / "dist", Path(scratch) / "site"
        dist.mkdir()
        *most, last = versions(options.wheels + 1)

        def make(version: str) -> None:
            if options.wheel:
                copy_wheel(options.wheel, dist, version)
            else:
                small_wheel(dist, version, version if options.distinct else "")

        for version in most:
            make(version)
        size = sum(path.stat().st_size for path in dist.iterdir())
        figures = {"first": timed(dist, site), "again": timed(dist, site)}
        make(last)
        figures["one more"] = timed(dist, site)
    kind = options.wheel.name if options.wheel else "small" + (", distinct" if options.distinct else "")
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "wheels": options.wheels,
        "kind": kind,
        "bytes": size,
        "seconds": figures,
    }
    for name, figure in figures.items():
        print(f"{name:<10} {figure['wall_s']:8.2f} s wall {figure['cpu_s']:8.2f} s CPU")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
