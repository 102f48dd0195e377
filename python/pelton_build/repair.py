"""Have auditwheel repair a wheel, and check that there was nothing to repair: `python -m pelton_build repair WHEEL`.

Our wheels are linked for their platform tag from the start. So the repair must accept the tag, copy no library into
the wheel and change no binary; anything else means that the link is not what the plan said. The repaired copy is
thrown away.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from .errors import BuildError
from .settings import environment
from .wheel_info import read_build_info

__all__ = ["RepairError", "check", "main"]

EXCLUDED = "libtorch*.so"
"""Libraries that the user's torch brings."""

logger = logging.getLogger(__name__)


class RepairError(BuildError):
    """auditwheel refuses the wheel, or would have to change it."""


def check(wheel: Path) -> str:
    """The platform tag that auditwheel has confirmed. Raises RepairError saying what it objects to."""
    tag = _platform(wheel)
    with tempfile.TemporaryDirectory(prefix="repair-") as folder:
        command = [
            sys.executable,
            "-X",
            "utf8",
            "-m",
            "auditwheel",
            "repair",
            "--plat",
            tag,
            "--exclude",
            EXCLUDED,
        ]
        result = subprocess.run(
            [*command, "--wheel-dir", folder, str(wheel)],
            env={**environment(), "PYTHONUTF8": "1"},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if result.returncode != 0:
            said = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
            raise RepairError(
                f"{wheel.name}: auditwheel refuses {tag}: {said[-1] if said else 'it says nothing'}"
            )
        made = list(Path(folder).glob("*.whl"))
        # It leaves no copy when there is nothing at all to do.
        before, after = _binaries(wheel), _binaries(made[0]) if made else _binaries(wheel)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise RepairError(
            f"{wheel.name}: auditwheel had to change {', '.join(changed)}; a binary was linked with a library that "
            "the wheel must not carry"
        )
    return tag


def _platform(wheel: Path) -> str:
    """The platform that the wheel's build info names.  Raises RepairError, WheelError."""
    tag = read_build_info(wheel)["plan"].get("platform_tag")
    if not isinstance(tag, str):
        raise RepairError(f"{wheel}: its plan names no platform; build the wheel again")
    return tag


def _binaries(wheel: Path) -> Mapping[str, str]:
    """Hashes of the shared objects in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if ".so" in name.rpartition("/")[2]
        }


def main(arguments: Sequence[str]) -> int:
    """The subcommand `repair`."""
    parser = argparse.ArgumentParser(
        prog="repair", description="Check that auditwheel has nothing to repair."
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    for wheel in parser.parse_args(arguments).wheels:
        logger.info("%s: auditwheel confirms %s, nothing to repair", wheel.name, check(wheel))
    return 0
