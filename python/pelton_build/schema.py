"""The JSON schema of profiles, for editors, made from the dataclasses, their docstrings, and the known names.

It lies beside the profiles, whose first line names it; a test keeps it fresh.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import logging
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .arch import BACKENDS, known_archs
from .errors import BuildError
from .planning import project_root, write_atomically
from .profile import DERIVED, FOLDER, Profile, key_of
from .table import KernelTable, load_table
from .values import Size, Version, VersionRange

__all__ = ["FILE", "field_docs", "main", "schema"]

FILE = f"{FOLDER}/profile.schema.json"

logger = logging.getLogger(__name__)

_TEXTS = {
    Version: {"type": "string", "pattern": r"^\d+(\.\d+){0,3}$"},
    VersionRange: {
        "type": "string",
        "pattern": r"^\s*(==|>=|<=|>|<)[0-9.]+(\s*,\s*(==|>=|<=|>|<)[0-9.]+)*\s*$",
    },
    Size: {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?(B|KiB|MiB|GiB|TiB)$"},
}
_SIMPLE = {str: "string", bool: "boolean", int: "integer"}


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass, each as one line."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else None
            )
            if isinstance(text, str):
                docs[statement.target.id] = " ".join(text.split())
    return docs


def schema(table: KernelTable) -> dict[str, Any]:
    """The whole schema; `table` gives the names of the features."""
    made = _object(Profile, DERIVED)
    made["properties"]["features"] = {
        "type": "object",
        "description": field_docs(Profile)["features"],
        "additionalProperties": False,
        "properties": {
            name: {"type": "boolean", "description": entry.summary} for name, entry in table.features.items()
        },
    }
    made["properties"]["target"]["allOf"] = [
        {
            "if": {"properties": {"backend": {"const": backend}}, "required": ["backend"]},
            "then": {"properties": {"arch": _archs(backend)}},
        }
        for backend in BACKENDS
    ]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Build profile",
        "description": (Profile.__doc__ or "").strip(),
        **made,
    }


def _archs(backend: str) -> dict[str, Any]:
    known = {"enum": list(known_archs(backend))}
    # An AMD arch may go with target features.
    item = {"anyOf": [known, {"pattern": r"^gfx[0-9a-f]+(:[a-z]+[+-])+$"}]} if backend == "rocm" else known
    return {"type": "array", "minItems": 1, "uniqueItems": True, "items": item}


def _object(cls: type, left_out: Sequence[str] = ()) -> dict[str, Any]:
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    properties, required = {}, []
    for entry in dataclasses.fields(cls):
        if entry.name in left_out:
            continue
        key = key_of(entry.name)
        properties[key] = _property(hints[entry.name])
        text = docs.get(entry.name) or (
            hints[entry.name].__doc__ if dataclasses.is_dataclass(hints[entry.name]) else ""
        )
        if text:
            properties[key]["description"] = " ".join(text.split())
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            required.append(key)
        elif isinstance(entry.default, (str, bool, int)):
            properties[key]["default"] = entry.default
    made: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**made, "required": required} if required else made


def _property(kind: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _property(next(a for a in arguments if a is not types.NoneType))
    if kind in _TEXTS:
        return dict(_TEXTS[kind])
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _object(kind)
    if origin is tuple:
        return {"type": "array", "items": _property(arguments[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _property(arguments[1])}
    if origin is Literal:
        return {"enum": list(arguments)}
    return {"type": _SIMPLE[kind]}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="schema", description=f"Write {FILE}.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the file is not fresh")
    parser.add_argument("--root", type=Path, default=project_root(), help="the project's folder")
    options = parser.parse_args(arguments)
    path: Path = options.root / FILE
    text = json.dumps(schema(load_table(options.root)), indent=2) + "\n"
    if options.check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise BuildError(f"{FILE} is not fresh; run 'nox -s schema'")
        return 0
    write_atomically(path, text)
    logger.info("wrote %s", path)
    return 0
