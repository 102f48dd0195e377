"""The variables of the environment that are Pelton's, and those that look as if they were.

A misspelt name has no effect, which nobody notices by what happens: so importing the package warns of every variable
that begins with ``PELTON_`` and that nothing reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["BUILD", "PREFIX", "RUN", "unknown", "warn"]

PREFIX = "PELTON_"
RUN = ("PELTON_HOST", "PELTON_INDEX", "PELTON_LIBRARY")
"""What the installed package reads."""
BUILD = (
    "PELTON_EMULATION_ARCH",
    "PELTON_EMULATION_ORDERS",
    "PELTON_EMULATION_WAVE",
    "PELTON_ENABLE_AWQ",
    "PELTON_ENABLE_GPTQ",
    "PELTON_ENABLE_MARLIN",
    "PELTON_PROFILE",
    "PELTON_TARGET_DEVICE",
    "PELTON_TORCH_DIR",
    "PELTON_VERSION",
)
"""What builds and tests read: of no effect here, and no mistake."""


def unknown(names: Iterable[str]) -> dict[str, str]:
    """The names that look like variables of Pelton and are none, each with a hint: the nearest that there is."""
    from .errors import did_you_mean

    known = {name.removeprefix(PREFIX): name for name in (*RUN, *BUILD)}
    strange = sorted(name for name in names if name.startswith(PREFIX) and name not in known.values())
    hints = ((name, did_you_mean(name.removeprefix(PREFIX), known)) for name in strange)
    return {name: hint.replace("mean '", f"mean '{PREFIX}") for name, hint in hints}


def warn() -> None:
    """Warn of the variables of this process that nothing reads."""
    if all(name in RUN or name in BUILD for name in os.environ if name.startswith(PREFIX)):
        return
    import logging

    for name, hint in unknown(os.environ).items():
        logging.getLogger(__name__).warning(
            "environment variable %s is unknown to pelton and has no effect%s", name, hint
        )
