"""What this machine has to build with, found by probing and returned as plain values.

Nothing is imported and nothing is guessed from names: programs are asked, with a time limit each, and headers are
read. A probe that fails is a value too; only `resolve` decides whether the plan minds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .plan import HostPython, Tool, TorchHeaders

__all__ = ["Probe", "Toolchain"]


@dataclass(frozen=True)
class Probe:
    """The outcome of looking for one kind of tool."""

    tool: Tool | None = None
    """What is taken, by the documented order."""
    problem: str = ""
    """Why looking was ended with an error: a variable is set and unusable. A whole message."""
    others: tuple[Tool, ...] = ()
    """What else was seen and not taken."""
    looked: tuple[str, ...] = ()
    """Where was looked, in order."""


@dataclass(frozen=True)
class Toolchain:
    """This machine as a place to build. The default: an x86-64 Linux with one core and nothing installed."""

    system: str = "linux"
    machine: str = "x86_64"
    cxx: Probe = field(default_factory=Probe)
    cuda: Probe = field(default_factory=Probe)
    rocm: Probe = field(default_factory=Probe)
    torch: tuple[TorchHeaders, ...] = ()
    """Torch packages with headers, in the order of preference."""
    torch_problem: str = ""
    """Why the folder that the user named cannot be used. A whole message."""
    pythons: tuple[HostPython, ...] = ()
    pythons_out: tuple[str, ...] = ()
    """Pythons that were seen and cannot be built for, each with the reason."""
    cores: int = 1
    cores_origin: str = "assumed"
    memory: int = 2 << 30
    """Bytes available."""
    memory_origin: str = "assumed"
