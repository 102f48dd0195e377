"""The command `pelton-select`: which of the project's wheels is for this machine, and the command that installs it.

It asks the guard (`guard.find_mismatch`) of every profile that the installed build knows, so that it recommends nothing
that the guard would refuse, and takes, of those that fit:

1. a build for a GPU before one for the CPU;
2. the build for the GPU that a program sees first;
3. of these the one whose arch is nearest to the GPU's;
4. of CPU builds the one of the highest level.

Torch does not count: any will be installed. So the command needs neither torch nor the library, and any wheel of the
project has it, the baseline among them. `PELTON_HOST` may describe another machine (see `docs/install.md`).

Exit codes: 0 a build fits; 1 an error, one message on stderr; 2 wrong usage; 3 no build fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import guard
from ._gpus import fit
from .errors import PeltonError

__all__ = ["Candidate", "Choice", "choose", "main", "render"]

STAND_IN = "INDEX"
"""Stands in commands for the index's address when nobody told it."""

NOTHING_FITS = 3


@dataclass(frozen=True)
class Candidate:
    """A profile, and why it is not for this machine; an empty reason: it fits."""

    profile: str
    backend: str
    archs: tuple[str, ...]
    summary: str
    reason: str
    key: tuple[int, ...] = ()
    """What candidates that fit are ordered by, the best one lowest."""


@dataclass(frozen=True)
class Choice:
    """The answer for one machine."""

    machine: str
    candidates: tuple[Candidate, ...]
    """Those that fit, best first; then the others."""
    notes: tuple[str, ...] = ()
    """What else there is to know: GPUs that the build does not run on, a torch that it needs."""

    @property
    def best(self) -> Candidate | None:
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and not first.reason else None


def choose(info: Mapping[str, Any], machine: guard.Machine) -> Choice:
    """The choice among the profiles that a build info names."""
    wanted = replace(machine, torch=str(info["torch_floor"]), torch_cuda="any", torch_rocm="any")
    candidates = sorted(
        (_candidate(_as_build(other, info), wanted) for other in info.get("profiles", ())),
        key=lambda c: (bool(c.reason), c.key, c.profile),
    )
    choice = Choice(guard.describe(machine), tuple(candidates))
    return (
        choice if choice.best is None else replace(choice, notes=_notes(choice, choice.best, info, machine))
    )


def _as_build(other: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """What a build of another profile of the same project says of itself, as far as it is known."""
    floors = {"glibc": info["glibc"], "torch_floor": info["torch_floor"]}
    return {**floors, "minimum_driver_ptx": other.get("minimum_driver", ""), **other, "profiles": ()}


def _candidate(build: Mapping[str, Any], machine: guard.Machine) -> Candidate:
    archs, backend = tuple(map(str, build["archs"])), str(build["backend"])
    reason, key = "", tuple[int, ...]()
    mismatch = guard.find_mismatch(build, machine)
    if mismatch is not None:
        reason = f"needs {mismatch.needed}; found {mismatch.found}"
    elif backend == "cpu":
        levels = list(guard.LEVELS)
        key = (1, -max((levels.index(level) for level in archs), default=0))
    else:
        fits = [(number, best[0]) for number, best in enumerate(_fits(archs, backend, machine)) if best]
        if fits:
            key = (0, *fits[0])
        else:  # the guard lets a build pass when the driver does not answer; recommending it is another thing
            reason = f"the GPUs are not known ({machine.gpu_note or 'their driver gives no answer'})"
    return Candidate(str(build["profile"]), backend, archs, str(build.get("summary", "")), reason, key)


def _fits(archs: Sequence[str], backend: str, machine: guard.Machine) -> list[tuple[int, str] | None]:
    return [fit(archs, gpu) if gpu.backend == backend else None for gpu in machine.gpus or ()]


def _notes(
    choice: Choice, best: Candidate, info: Mapping[str, Any], machine: guard.Machine
) -> tuple[str, ...]:
    notes = []
    if best.backend == "cpu":
        held_up = [c for c in choice.candidates if any(_fits(c.archs, c.backend, machine))]
        if held_up:
            notes += [f"{c.profile} is for a GPU of this machine, but {c.reason}" for c in held_up]
        elif machine.gpus:
            notes.append(f"no build is for {', '.join(dict.fromkeys(map(str, machine.gpus)))}")
        elif machine.gpu_note and machine.driver != "":
            notes.append(f"a GPU may be there all the same: {machine.gpu_note}; pelton doctor looks into it")
        return tuple(notes)
    others = [
        f"GPU {number}, {gpu}"
        for number, gpu in enumerate(machine.gpus or ())
        if gpu.backend != best.backend or fit(best.archs, gpu) is None
    ]
    if others:
        notes.append(f"it does not run on {', '.join(others)}")
    kind = "ROCm" if best.backend == "rocm" else "CUDA"
    if not (machine.torch_rocm if best.backend == "rocm" else machine.torch_cuda):
        has = f"torch {machine.torch} is a build without {kind}" if machine.torch else "there is no torch"
        notes.append(f"{has}: install torch {info['torch_floor']} or newer, built for {kind}, before it")
    return tuple(notes)


def commands(profile: str, version: str, index: str) -> dict[str, str]:
    """What installs a profile's build: the index's address, and the commands for pip and uv.

    Other packages come from where the installer always looks. The version has no label: the profile's index has only
    one, which wins over a wheel without label elsewhere.
    """
    url = f"{index.rstrip('/') or STAND_IN}/p/{profile}/simple/"
    public = version.partition("+")[0]
    wanted = f'"pelton=={public}"'
    return {
        "index_url": url,
        "pip": f"pip install --extra-index-url {shlex.quote(url)} {wanted}",
        "uv": f"uv pip install --index {shlex.quote(url)} {wanted}",
    }


def as_json(choice: Choice, version: str, index: str) -> dict[str, Any]:
    """The answer for machines."""
    best = choice.best
    return {
        "profile": best.profile if best else None,
        "summary": best.summary if best else None,
        **(
            commands(best.profile, version, index)
            if best
            else dict.fromkeys(("index_url", "pip", "uv"), None)
        ),
        "version": version,
        "machine": choice.machine,
        "notes": list(choice.notes),
        "candidates": [
            {key: value for key, value in dataclasses.asdict(candidate).items() if key != "key"}
            for candidate in choice.candidates
        ],
    }


def render(choice: Choice, version: str, index: str) -> str:
    """The answer for a person."""
    best = choice.best
    lines = [f"machine  {choice.machine}"]
    if best is None:
        lines += ["", "No build of pelton fits this machine:"]
    else:
        made = commands(best.profile, version, index)
        about = f"  ({best.summary})" if best.summary else ""
        lines += [f"profile  {best.profile}{about}", f"index    {made['index_url']}", ""]
        lines += [f"  {made['pip']}", f"  {made['uv']}", ""]
        if not index:
            lines.append(f"{STAND_IN} stands for the index's address; --index or PELTON_INDEX fills it in.")
        lines += [f"Note: {note}." for note in choice.notes]
        lines.append("Passed over:")
    for candidate in choice.candidates:
        if candidate is not best:
            lines.append(f"  {candidate.profile}: {candidate.reason or 'fits, but less well'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="pelton-select",
        description="Say which wheel of pelton is for this machine, and the command that installs it.",
        epilog="Exit code: 0 a build fits, 1 an error, 2 wrong usage, 3 no build fits.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--index", default="", metavar="URL", help="the index's address (else PELTON_INDEX)")
    form.add_argument("--profile-only", action="store_true", help="print the profile's name and nothing else")
    options = parser.parse_args(arguments)
    try:
        from . import build_info

        if build_info.path is None:
            raise PeltonError(
                "this is a source tree without a build, which knows no profiles; install a wheel"
            )
        index = guard.checked_address(options.index, "--index") or guard.checked_address(
            guard.index_address(), "PELTON_INDEX"
        )
        info = build_info.as_dict()
        choice = choose(info, guard.this_machine(gpus=True))
    except PeltonError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if options.json:
        text = json.dumps(as_json(choice, build_info.version, index), indent=2)
    elif options.profile_only:
        text = choice.best.profile if choice.best else ""
    else:
        text = render(choice, build_info.version, index)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough
        _close_output()
    except OSError as error:
        _close_output()
        sys.stderr.write(f"error: the answer cannot be written: {error.strerror or error}\n")
        return 1
    return NOTHING_FITS if choice.best is None else 0


def _close_output() -> None:
    """Let what is still to be written go nowhere, or Python fails at it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
