"""GPUs: which there are, and which archs of a build run on them.

A build's archs, as its profile names them:

- ``sm_90`` is machine code: it runs on GPUs of the same major and the same or a later minor compute capability;
- ``sm_90a`` is machine code with instructions of this one capability: it runs there and nowhere else;
- ``sm_100f`` is machine code of a family: as ``sm_100``, and only on GPUs of that family;
- ``compute_80`` is PTX: the driver compiles it for every GPU of that capability or a later one
  (``compute_90a`` again for that one alone);
- ``gfx90a`` is machine code for AMD GPUs of exactly this name.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import _ask_driver

__all__ = ["Answer", "Gpu", "amd_gpus", "ask_nvidia", "ask_rocminfo", "fit", "visible"]

LIMIT = 20.0
"""Seconds that the driver has to answer in: it may first have to wake up many GPUs."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that a program would see."""

    arch: str
    """`sm_90`, `gfx90a`."""
    name: str = ""
    memory: int = 0
    """Bytes; 0 when not known."""

    @property
    def backend(self) -> str:
        return "rocm" if self.arch.startswith("gfx") else "cuda"

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})" if self.name else self.arch


@dataclass(frozen=True)
class Answer:
    """What a driver said."""

    driver: str | None
    """CUDA version that it supports: `13.0`; empty when there is no driver, None when it gave no answer."""
    gpus: tuple[Gpu, ...] = ()
    note: str = ""
    """What went wrong."""
    library: str = ""
    """The driver's library."""


def ask_nvidia(environ: Mapping[str, str], limit: float = LIMIT) -> Answer:
    """The NVIDIA driver and the GPUs that it shows to a program with this environment. Raises nothing."""
    if not sys.executable or getattr(sys, "frozen", False):
        return Answer(None, note="this Python cannot start another one to ask the driver")
    command = [sys.executable, "-I", "-S", str(Path(_ask_driver.__file__))]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            env=dict(environ),
        )
        data = json.loads(done.stdout)
        return Answer(
            str(data["driver"]),
            tuple(Gpu(str(gpu["arch"]), str(gpu["name"]), int(gpu["memory"])) for gpu in data["gpus"]),
            str(data["note"]),
            str(data["library"]),
        )
    except subprocess.TimeoutExpired:
        return Answer(None, note=f"the NVIDIA driver gives no answer within {limit:.0f} s")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Answer(None, note=f"the NVIDIA driver cannot be asked ({error})")


def amd_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs that the kernel's AMD driver lists."""
    found: list[tuple[int, Gpu]] = []
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*"):
        try:
            text = (node / "properties").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        version = int(match[1]) if match else 0
        if version:
            arch = f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"
            found.append((int(node.name) if node.name.isdecimal() else sys.maxsize, Gpu(arch, "AMD GPU")))
    return tuple(gpu for _, gpu in sorted(found, key=lambda pair: pair[0]))


def ask_rocminfo(environ: Mapping[str, str], limit: float = 5.0) -> tuple[Gpu, ...]:
    """The GPUs that ROCm's tool lists, for systems whose kernel does not list them (WSL). Raises nothing."""
    program = shutil.which("rocminfo", path=environ.get("PATH"))
    if program is None:
        return ()
    hidden = {key: value for key, value in environ.items() if not key.endswith("_VISIBLE_DEVICES")}
    try:
        done = subprocess.run(
            [program], check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, env=hidden
        )
    except (subprocess.TimeoutExpired, OSError):
        return ()
    found = []
    for agent in done.stdout.decode(errors="replace").split("\nAgent ")[1:]:
        name = re.search(r"^\s*Name:\s*(gfx[0-9a-f]+)\s*$", agent, re.MULTILINE)
        if name and re.search(r"^\s*Device Type:\s*GPU\s*$", agent, re.MULTILINE):
            called = re.search(r"^\s*Marketing Name:\s*(\S.*?)\s*$", agent, re.MULTILINE)
            found.append(Gpu(name[1], called[1] if called else "AMD GPU"))
    return tuple(found)


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that the variables of their drivers leave visible, in their order.

    What stands behind a number that names no GPU is hidden, as the drivers do it. Names of single GPUs (`GPU-...`)
    are of no GPU here, and hide nothing.
    """
    shown: list[Gpu] = []
    for backend, variables in (
        ("cuda", ("CUDA_VISIBLE_DEVICES",)),
        ("rocm", ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
    ):
        own = [gpu for gpu in gpus if gpu.backend == backend]
        for variable in variables:
            own = _chosen(own, environ.get(variable))
        shown += own
    return tuple(shown)


def _chosen(gpus: list[Gpu], value: str | None) -> list[Gpu]:
    if value is None:
        return gpus
    chosen: list[Gpu] = []
    for token in value.split(","):
        token = token.strip()
        if token.upper().startswith(("GPU-", "MIG-")):
            return gpus
        if not re.fullmatch(r"[0-9]{1,9}", token) or int(token) >= len(gpus):
            break
        chosen.append(gpus[int(token)])
    return chosen


def fit(archs: Iterable[str], gpu: Gpu) -> tuple[int, str] | None:
    """The arch of a build that runs on `gpu`, and how far it is from it (0: made for it); None when none does."""
    fits = [(rank, arch) for arch in archs if (rank := _rank(arch, gpu.arch)) is not None]
    return min(fits) if fits else None


def _rank(arch: str, gpu: str) -> int | None:
    if arch.startswith("gfx"):
        return 0 if arch.split(":")[0] == gpu.split(":")[0] else None
    code, card = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch), re.fullmatch(r"sm_(\d+)[af]?", gpu)
    if code is None or card is None:
        return None
    kind, number, suffix, have = code[1], int(code[2]), code[3], int(card[1])
    if number > have or (suffix == "a" and number != have):
        return None
    if (kind == "sm" or suffix == "f") and number // 10 != have // 10:
        return None
    return have - number + (1000 if kind == "compute" else 0)
