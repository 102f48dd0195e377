"""Wheel variants (experimental: PEP 825 and 850 are drafts): wheels that an installer chooses among by the machine.

A variant wheel is a finished wheel without label, and as the last step

- `variant.json` in its `.dist-info`, with the properties of its profile (`[variant]` in the profile's file), and the
  line for it in RECORD;
- a variant label behind its file name: `pelton-0.1.0-py3-none-manylinux_2_28_x86_64-cuda_sm90.whl`.

Nothing else changes, and equal wheels make equal variant wheels.  `<project>-<version>-variants.json`, which the index
has beside them, says the same of all variants of one version; the index derives it from the wheels.  An installer that
knows nothing of variants takes the wheel without variant label, which therefore has to be there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import BuildError
from .profile import VARIANT_KEYS
from .wheel_info import UNREADABLE, read_build_info

__all__ = [
    "FILE",
    "VariantError",
    "differences",
    "main",
    "make_variant",
    "properties_of",
    "read_variant",
    "split_file_name",
    "variant_label",
    "variants_document",
]

logger = logging.getLogger(__name__)

FILE = "variant.json"  # in the .dist-info
SCHEMA = "https://variants-schema.wheelnext.dev/v0.2.0.json"
# Which kind of property decides first: a GPU build before one for the CPU.
NAMESPACES = tuple(VARIANT_KEYS)
# What detects the properties of a machine. Installers have the first and the last one built in; none knows AMD's yet.
PROVIDERS: Mapping[str, Mapping[str, Any]] = {
    "nvidia": {
        "requires": ["nvidia-variant-provider"],
        "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
    },
    "amd": {
        "requires": ["amd-variant-provider"],
        "plugin-api": "amd_variant_provider.plugin:AMDVariantPlugin",
    },
    "x86_64": {"requires": ["x86-64-variant-provider"]},
}
# Majors of compute capability that there are cards of.
_MAJORS = (8, 9, 10, 11, 12)

Properties = Mapping[str, Mapping[str, Sequence[str]]]
"""Namespace, feature, values: of each feature the machine needs one of the values."""


class VariantError(BuildError):
    """A wheel that no variant can be made of, or variant wheels that contradict each other."""


def variant_label(profile: str) -> str:
    """A profile's name as a part of a file name: `cuda_sm90`."""
    return re.sub(r"[^a-z0-9._]", "_", profile.lower())


def split_file_name(name: str) -> tuple[str, str]:
    """A wheel's file name without variant label, and the label; empty when it has none."""
    match = re.fullmatch(r"([^-]+-[^-]+-[^-]+-[^-]+-[^-]+)-([0-9a-z._]+)\.whl", name)
    # With a build tag, which starts with a digit, a plain name has as many parts.
    if match is None or name.split("-")[2][:1].isdecimal():
        return name, ""
    return f"{match[1]}.whl", match[2]


def properties_of(variant: Properties) -> dict[str, dict[str, list[str]]]:
    """A profile's `[variant]` as installers read it.

    PTX runs on every later card, but `80_virtual` says so only of cards of its own major capability, so the first one of
    each later major is added.
    """
    made = {space: {key: list(values) for key, values in keys.items()} for space, keys in variant.items()}
    archs = made.get("nvidia", {}).get("sm_arch", [])
    virtual = [int(arch.removesuffix("_virtual")) for arch in archs if arch.endswith("_virtual")]
    if virtual:
        archs += [f"{major}0_virtual" for major in _MAJORS if major > min(virtual) // 10]
        made["nvidia"]["sm_arch"] = list(dict.fromkeys(archs))
    return made


def variants_document(variants: Mapping[str, Properties]) -> dict[str, Any]:
    """The content of `variant.json` (one variant) and of the index's `-variants.json` (all of a version)."""
    return {
        "$schema": SCHEMA,
        "default-priorities": {"namespace": list(NAMESPACES)},
        "providers": {space: dict(PROVIDERS[space]) for space in NAMESPACES},
        "variants": {label: variants[label] for label in sorted(variants)},
    }


def document_text(variants: Mapping[str, Properties]) -> str:
    return json.dumps(variants_document(variants), indent=1, sort_keys=True) + "\n"


def read_variant(text: bytes | str, label: str, where: str) -> Properties:
    """The properties in a `variant.json`.  Raises VariantError when it is not one that `make_variant` writes."""
    try:
        document = json.loads(text)
        properties: Properties = document["variants"][label]
        sound = document == variants_document({label: properties})
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise VariantError(
            f"{where}: does not describe the one variant {label!r} of the file's name; make it again"
        )
    return properties


def make_variant(wheel: Path, folder: Path) -> Path:
    """Make the variant wheel of a finished wheel without label; returns its path.

    Raises VariantError: the wheel has a label, is a variant already, its profile has no variant properties, or it is no
    wheel of this build (WheelError).
    """
    name, label = split_file_name(wheel.name)
    if label:
        raise VariantError(f"{wheel}: is a variant wheel already")
    try:
        info = read_build_info(wheel)
        with zipfile.ZipFile(wheel) as archive:
            members = archive.infolist()
            content = {member.filename: archive.read(member) for member in members}
    except UNREADABLE as error:
        raise VariantError(f"{wheel}: not a readable wheel ({error})") from None
    profile, own = info["profile"], info["label"]
    if any(m.endswith(f".dist-info/{FILE}") for m in content):
        raise VariantError(f"{wheel}: is a variant wheel already")
    records = [m for m in content if m.count("/") == 1 and m.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise VariantError(
            f"{wheel}: has {len(records)} files .dist-info/RECORD, a wheel has one; build it again"
        )
    record = records[0]
    try:
        properties = properties_of(info["plan"].get("variant", {}))
    except (TypeError, AttributeError, ValueError):
        raise VariantError(
            f"{wheel}: plan.variant of its build info is no table of lists; build it again"
        ) from None
    if own:
        raise VariantError(
            f"{wheel}: has the label {own}; a variant is made of the wheel without label, -C label=off"
        )
    if not properties:
        raise VariantError(
            f"{wheel}: profile {profile} has no table [variant]; say there what hardware it is for"
        )
    if unknown := sorted(set(properties) - set(NAMESPACES)):
        known = ", ".join(NAMESPACES)
        raise VariantError(f"{wheel}: variant.{unknown[0]}: unknown namespace; known: {known}")
    label = variant_label(profile)
    text = document_text({label: properties}).encode()
    path = record.replace("RECORD", FILE)
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    content[path] = text
    content[record] = _listed(
        content[record].decode(), record, f"{path},sha256={digest},{len(text)}"
    ).encode()
    made = folder / f"{name.removesuffix('.whl')}-{label}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = made.with_name(f".{made.name}.new")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for member in members:
                if member.filename == record:
                    added = zipfile.ZipInfo(path, member.date_time)
                    added.external_attr = member.external_attr
                    archive.writestr(added, text, zipfile.ZIP_DEFLATED)
                archive.writestr(member, content[member.filename], member.compress_type)
        temporary.chmod(0o644)
        temporary.replace(made)
    finally:
        temporary.unlink(missing_ok=True)
    status = wheel.stat()
    os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
    return made


def _listed(lines: str, record: str, line: str) -> str:
    """RECORD with one more line, before its own."""
    own = f"{record},,\n"
    return lines.replace(own, f"{line}\n{own}") if own in lines else f"{lines}{line}\n"


def differences(first: Path, second: Path) -> tuple[str, ...]:
    """Members in which two wheels differ, but for what says version and label; none: they are of one build."""
    contents = []
    for wheel in (first, second):
        try:
            with zipfile.ZipFile(wheel) as archive:
                contents.append(
                    {
                        name: archive.read(name)
                        for name in archive.namelist()
                        if not name.partition("/")[0].endswith(".dist-info")
                        and not (name.count("/") == 1 and name.endswith("/_build_info.json"))
                    }
                )
        except UNREADABLE as error:
            raise VariantError(f"{wheel}: not a readable wheel ({error})") from None
    one, other = contents
    return tuple(name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name))


def same_properties(variants: Iterable[tuple[str, Properties]]) -> tuple[str, str] | None:
    """Two variants that no installer could choose between: their labels."""
    seen: dict[str, str] = {}
    for label, properties in variants:
        key = json.dumps(properties, sort_keys=True)
        if key in seen:
            return seen[key], label
        seen[key] = label
    return None


def main(arguments: Sequence[str]) -> int:
    """The subcommand `variants`."""
    parser = argparse.ArgumentParser(prog="variants", description="Make variant wheels of finished wheels.")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="a wheel without label")
    parser.add_argument("--out", type=Path, required=True, help="folder of the variant wheels")
    parser.add_argument(
        "--of",
        type=Path,
        metavar="WHEEL",
        help="the labelled wheel: refuse one that is not of the same build",
    )
    options = parser.parse_args(arguments)
    for wheel in options.wheels:
        if options.of is not None and (names := differences(options.of, wheel)):
            raise VariantError(
                f"{wheel}: not of the same build as {options.of}: {', '.join(names[:5])} differ"
            )
        logger.info("made %s", make_variant(wheel, options.out))
    return 0
