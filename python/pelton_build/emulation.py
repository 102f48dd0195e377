"""The plan of the emulated library: every GPU kernel, compiled as plain C++ for this machine's CPU.

It is no profile, because nobody installs it: tests load it. `kernels/emulation/CMakeLists.txt` carries it out.
Sources are the `cuda` list of each family and its `rocm` list. Which of a family's kernels run is its launchers' choice:
AMD's when PELTON_EMULATION_WAVE asks for waves of 32 or 64 lanes, sm_90's when PELTON_EMULATION_ARCH is `sm_90`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .cmake import quote
from .errors import PlanError
from .hipify import hipified_name, with_headers
from .planning import project_root, write_atomically
from .resolve import has_arch, torch_target
from .settings import environment, read_choices
from .table import FILE, FOLDER, KernelTable, load_table
from .toolchain import probe_cxx, probe_torch
from .values import Version

__all__ = ["EmulatedSources", "emulated_sources", "main", "write_plan"]

EMULATED_ARCHS = frozenset({"sm_90a"})
"""Archs whose own instructions the emulation has."""
TESTS = "tests/emulation/cases.cu"
"""Kernels with planted bugs, which the tests of the emulation load."""


@dataclass(frozen=True)
class EmulatedSources:
    """Paths below the table's folder."""

    op: tuple[str, ...]
    gpu: tuple[str, ...]
    left_out: tuple[str, ...]
    """Sources with the reason why they are not in, for the log."""
    definitions: tuple[str, ...] = ()
    """Of the GPU sources: that files for one arch alone are in."""


def emulated_sources(table: KernelTable) -> EmulatedSources:
    """What the emulated library is made of: the families that have GPU code for every arch, and their operators."""
    op: list[str] = []
    gpu: list[str] = []
    left_out: list[str] = []
    definitions: dict[str, None] = {}
    for family in table.families:
        device = [source for backend in ("cuda", "rocm") for source in family.device.get(backend, ())]
        portable = list(dict.fromkeys(source.path for source in device if not source.archs))
        own = [source for source in device if set(source.archs) & EMULATED_ARCHS]
        left_out += [f"{s.path} (for {', '.join(s.archs)} alone)" for s in device if s.archs and s not in own]
        if not portable:
            if family.op:
                left_out.append(f"family {family.name} (no GPU source for every arch)")
            continue
        gpu += [*portable, *dict.fromkeys(source.path for source in own)]
        definitions |= dict.fromkeys(has_arch(arch, table) for source in own for arch in source.archs)
        op += [s.path for s in family.op if not s.backends or set(s.backends) & {"cuda", "rocm"}]
    return EmulatedSources(tuple(op), tuple(gpu), tuple(left_out), tuple(definitions))


def write_plan(root: Path, build_dir: Path) -> None:
    """Write `emulation_plan.cmake`. Raises BuildError when something is missing."""
    environ = environment()
    table = load_table(root)
    choices = read_choices(None, environ, table)
    cxx = probe_cxx(environ)
    if cxx.tool is None:
        raise PlanError(
            cxx.problem or f"no C++ compiler found (looked: {', '.join(cxx.looked)}); install g++"
        )
    wanted = choices.torch_dir.value if choices.torch_dir is not None else None
    found, problem = probe_torch(wanted, [], [Path(entry or ".") for entry in sys.path])
    torch = next((t for t in found if Version.parse(t.version) in table.library.torch_headers), None)
    if torch is None:
        raise PlanError(
            problem
            or f"the emulation needs torch {table.library.torch_headers} in this Python's environment "
            f"({sys.executable}); install it: pip install {table.library.torch_package}"
        )
    sources = emulated_sources(table)
    gpu = [f"{FOLDER}/{path}" for path in sources.gpu]
    tests = [TESTS] if (root / TESTS).is_file() else []
    hipified = with_headers(root, [*gpu, *tests])
    log = [
        f"emulation of {len(sources.gpu)} GPU sources",
        *(f"not in it: {text}" for text in sources.left_out),
    ]
    made = {
        "LIBRARY": table.library.name,
        "CXX_STANDARD": str(table.library.cxx_standard),
        "CXX_COMPILER": cxx.tool.path,
        "TORCH": torch.path,
        "OP_SOURCES": [str(root / FOLDER / path) for path in sources.op],
        "OP_DEFINITIONS": [f"TORCH_TARGET_VERSION={torch_target(table.library.torch)}"],
        "GPU_DEFINITIONS": list(sources.definitions),
        "GPU_SOURCES": [hipified_name(path) for path in gpu],
        "TEST_SOURCES": [hipified_name(path) for path in tests],
        "HIPIFY_NAMES": list(hipified),
        "HIPIFY_OUTPUTS": [hipified_name(path) for path in hipified],
        "DEPENDS": [str(root / FILE), str(Path(__file__)), *(str(root / path) for path in hipified)],
        "TEXT": "\n".join(log),
    }
    lines = [f"set(PELTON_EMULATION_{name} {quote(value)})" for name, value in made.items()]
    write_atomically(
        build_dir / "emulation_plan.cmake", "\n".join(["# Written by pelton_build.", *lines, ""])
    )


def main(arguments: Sequence[str]) -> int:
    """The subcommand `emulation`."""
    parser = argparse.ArgumentParser(
        prog="emulation", description="Write the emulated library's plan for CMake."
    )
    parser.add_argument("--build-dir", type=Path, required=True, help="CMake's build folder")
    options = parser.parse_args(arguments)
    write_plan(project_root(), options.build_dir.absolute())
    return 0
