"""The command that chooses a wheel, as one Python file on the index: it can be run before anything is installed.

The file holds the Python modules of a wheel's package and its build info, and nothing compiled; it needs no other
package.  It is made of the wheel alone, so that equal wheels make equal files.
"""

from __future__ import annotations

import ast
import base64
import io
import re
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .errors import BuildError

__all__ = ["entry_point", "file_name", "select_script"]

# Also Pythons that are too old must be able to read it, to say so.
_TEMPLATE = '''\
#!/usr/bin/env python3
# /// script
# requires-python = ">={oldest}"
# ///
"""{command} of {project} {version}: says which wheel is for this machine. Try --help."""

import base64
import io
import os
import sys
import tempfile
import zipfile

INDEX = {index!r}
MODULES = """\\
{data}
"""


def run():
    if sys.version_info < {least}:
        sys.exit("error: {command} needs Python {oldest} or newer, this is " + sys.version.split()[0])
    if INDEX and not os.environ.get("PELTON_INDEX"):
        os.environ["PELTON_INDEX"] = INDEX
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(io.BytesIO(base64.b64decode(MODULES))).extractall(folder)
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        from {module} import {function}

        return {function}()


if __name__ == "__main__":
    sys.exit(run())
'''


def file_name(project: str) -> str:
    return f"{project}-select.py"


def entry_point(text: str, project: str) -> str:
    """`module:function` of the command `<project>-select` in an entry_points.txt; empty when there is none."""
    match = re.search(rf"(?m)^{re.escape(project)}-select *= *([\w.]+:\w+) *$", text)
    return match[1] if match else ""


def select_script(wheel: Path, project: str, version: str, entry: str, oldest: str, index: str) -> str:
    """The file's text.

    Args:
        entry: `module:function`, as `entry_point` found it.
        oldest: the oldest Python, `3.11`.
        index: the index's address; "" when it is not known.

    Raises BuildError when the wheel cannot be read.
    """
    module, _, function = entry.partition(":")
    package = module.partition(".")[0]
    try:
        with zipfile.ZipFile(wheel) as archive:
            there = {
                name: archive.read(name)
                for name in archive.namelist()
                if re.fullmatch(rf"{re.escape(package)}/(\w+\.py|_build_info\.json)", name)
            }
        names = {*_needed(module, there), f"{package}/_build_info.json"} & there.keys()
        data = _zip((name, there[name]) for name in sorted(names))
    except (OSError, zipfile.BadZipFile, ValueError, SyntaxError) as error:
        raise BuildError(f"{wheel}: not a readable wheel ({error})") from None
    return _TEMPLATE.format(
        command=f"{project}-select",
        project=project,
        version=version,
        index=index,
        data="\n".join(textwrap.wrap(base64.b64encode(data).decode(), 110)),
        oldest=oldest,
        least=tuple(map(int, oldest.split("."))),
        module=module,
        function=function,
    )


def _needed(module: str, files: Mapping[str, bytes]) -> set[str]:
    """The files of a module and of all modules of its package that it imports, on loading or later.

    Runners hand the whole script over as one argument, which may have 128 KiB.
    """
    package = module.partition(".")[0]
    found: set[str] = set()
    waiting = [package, module]
    while waiting:
        name = waiting.pop()
        path = f"{package}/__init__.py" if name == package else f"{name.replace('.', '/')}.py"
        if path in found or path not in files:  # a name in a module, or another package's module
            continue
        found.add(path)
        for node in _imports(ast.parse(files[path])):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names if alias.name.partition(".")[0] == package]
            elif node.level == 1 or (node.module or "").partition(".")[0] == package:
                start = f"{package}.{node.module or ''}".rstrip(".") if node.level else str(node.module)
                waiting += [start, *(f"{start}.{alias.name}" for alias in node.names)]
    return found


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports but those for type checkers."""
    if isinstance(tree, (ast.Import, ast.ImportFrom)):
        yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _imports(child)


def _zip(files: Iterable[tuple[str, bytes]]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED, 9)
    return made.getvalue()
