"""Host-only helpers: the `_host` extension where it fits this interpreter, else its twin in Python.

The choice, in this order:

1. no extension under a name that this interpreter reads: the twin;
2. the extension's own mark says that it was built for another Python: the twin, and the file is never loaded; with a
   warning when the file's name says otherwise (it was renamed or copied in), without one when this Python reads
   other Pythons' files (a debug build reads those of the release build);
3. the extension does not load: the twin, with a warning;
4. the extension.

`implementation` is `"extension"` or `"twin"`, `reason` says why it is the twin.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import re
import sysconfig
from pathlib import Path
from types import ModuleType

from pelton import _host_py

__all__ = ["chain_block_hashes", "cpu_features", "implementation", "module_info", "reason"]

logger = logging.getLogger(__name__)

NAME = "pelton._host"
_MARK = re.compile(rb"PELTON_HOST_SOABI=([A-Za-z0-9_.-]+)")


def _built_for(path: Path) -> str:
    """The SOABI that the build wrote into the extension; empty when it says none or cannot be read."""
    try:
        match = _MARK.search(path.read_bytes())
    except OSError:
        return ""
    return match[1].decode("ascii") if match else ""


def _choose(soabi: str) -> tuple[ModuleType, str]:
    """The implementation to use, and why it is the twin (empty: it is the extension)."""
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:
        return _host_py, f"this installation has no extension for {soabi or 'this Python'}"
    origin = Path(spec.origin)
    built_for = _built_for(origin)
    if built_for != soabi:
        reason = f"{origin.name} was built for {built_for or 'an unknown Python'}, and this Python is {soabi}"
        if origin.name == f"_host.{built_for}.so":  # named right; this Python reads other Pythons' files too
            return _host_py, reason
    else:
        try:
            return importlib.import_module(NAME), ""
        except ImportError as error:
            reason = f"{origin.name} does not load: {error}"
    logger.warning("%s; pelton works with its Python twin instead, reinstall pelton to mend it", reason)
    return _host_py, reason


_module, reason = _choose(sysconfig.get_config_var("SOABI") or "")
implementation: str = "twin" if _module is _host_py else "extension"
cpu_features = _module.cpu_features
chain_block_hashes = _module.chain_block_hashes
module_info = _module.module_info
