"""The GPU sources against the headers of other HIP versions than this machine's: they have to compile with each.

    python -m pelton_build hip-headers --torch FOLDER --work FOLDER [--hip URL] [--clr URL] [VERSION | FOLDER]...

The headers are those of AMD's repositories HIP and clr at the tags of ROCm releases, or of a folder such as
`/opt/rocm-7.1.0`. HIP's compiler checks every source of the plan of each ROCm profile against them, for host and GPU, and
makes no code.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .cmake import hip_sources
from .device_libs import complete
from .errors import BuildError, ToolchainError
from .hipify import hipified_name, hipify_text, with_headers
from .plan import Plan
from .planning import make_plan, project_root, write_atomically
from .profile import load_profile, profile_names
from .settings import environment, scrubbed
from .toolchain import run_limited

__all__ = ["RELEASES", "main", "own_headers", "unpack_headers", "version_files"]

RELEASES = ("5.7.1", "6.0.2", "6.2.2", "6.4.1", "7.1.0")
HIP = "https://github.com/ROCm/HIP"
CLR = "https://github.com/ROCm/clr"
LIMIT = 600.0
"""Seconds for one source."""


class HeadersError(BuildError):
    """The headers of a version cannot be had, or a source does not compile with them."""


def version_files(version: str) -> dict[str, str]:
    """What AMD's build makes of the version, by the path below the root: compilers and headers ask for it."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version, re.ASCII):
        raise HeadersError(f"{version!r} is no ROCm release; write it as {RELEASES[-1]}")
    major, minor, patch = version.split(".")
    numbers = {"MAJOR": major, "MINOR": minor, "PATCH": patch}
    header = "".join(f"#define HIP_VERSION_{name} {number}\n" for name, number in numbers.items())
    header += (
        '#define HIP_VERSION_GITHASH ""\n#define HIP_VERSION_BUILD_ID 0\n#define HIP_VERSION_BUILD_NAME ""\n'
    )
    header += f"#define HIP_VERSION {int(major) * 10_000_000 + int(minor) * 100_000 + int(patch)}\n"
    return {
        "include/hip/hip_version.h": f"#pragma once\n{header}#define __HIP_HAS_GET_PCH 1\n",
        "share/hip/version": "".join(f"HIP_VERSION_{name}={number}\n" for name, number in numbers.items()),
    }


def _foreign(listed: str, headers: Path) -> str:
    """The first of HIP's headers among the files that a compiler read which is not below `headers`."""
    for path in re.findall(r"\S*/hip/\S+\.(?:h|hpp)\b", listed):
        if not Path(path).resolve().is_relative_to(headers.resolve()):
            return str(path)
    return ""


def own_headers(folder: Path) -> Path:
    """A folder of HIP's headers that is there already.  Raises HeadersError."""
    if not (folder / "include/hip/hip_version.h").is_file():
        raise HeadersError(f"{folder} has no include/hip/hip_version.h; name the folder of a ROCm")
    return folder.absolute()


def unpack_headers(repository: Path, tag: str, folder: str, root: Path) -> None:
    """Put `folder` of a repository at `tag` into `root` as `include`. Raises HeadersError."""
    command = ["git", "-C", str(repository), "archive", tag, folder]
    done = subprocess.run(command, check=False, capture_output=True)
    if done.returncode != 0:
        raise HeadersError(
            f"{repository} has no {folder} at {tag}: {done.stderr.decode(errors='replace').strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            inside = Path(member.name).relative_to(Path(folder).parent)
            if member.isfile() and ".." not in inside.parts:
                content = archive.extractfile(member)
                assert content is not None
                target = root / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())


def _clone(url: str, folder: Path) -> Path:
    """A repository without work tree; one that is there is taken as it is."""
    if Path(url).is_dir():
        return Path(url)
    if not (folder / "HEAD").is_file():
        command = ["git", "clone", "-q", "--bare", "--filter=blob:none", url, str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise HeadersError(f"{url} cannot be cloned: {done.stderr.strip()}")
    return folder


def _plans(root: Path) -> Iterator[Plan]:
    for name in profile_names(root):
        if load_profile(root, name).target.backend == "rocm":
            yield make_plan(root, {"profile": name}, version="0")


def _check(plan: Plan, folder: Path, headers: Path, libs: Path, version: str) -> int:
    """Compile every source of a plan; returns their number. Raises HeadersError for the first that fails."""
    tool = plan.tool("rocm")
    if tool is None:
        raise ToolchainError("; ".join(plan.problems) or "no HIP compiler")
    complete(tool.path, Path(tool.device_libs), libs, plan.archs)
    options = [
        "-x",
        "hip",
        f"-std=c++{plan.cxx_standard}",
        "-fsyntax-only",
        "-H",  # names every file that is read
        "-Wall",
        "-Werror",
        "-Wno-sign-compare",
    ]
    options += [
        "-DHIP_ENABLE_WARP_SYNC_BUILTINS=1",  # as HIP 7 has it, by default
        "-Wno-unused-command-line-argument",
        f"--rocm-path={headers}",
        "-isystem",
        str(headers / "include"),
    ]
    options += [f"--rocm-device-lib-path={libs}", *(f"--offload-arch={arch}" for arch in plan.archs)]
    sources = [source for source in plan.sources if source.language == "HIP"]
    for source in sources:
        made = folder / hipified_name(f"{plan.kernels}/{source.path}")
        definitions = [f"-D{definition}" for definition in source.definitions]
        said = run_limited([tool.path, *options, *definitions, str(made)], scrubbed(environment()), LIMIT)
        if foreign := _foreign(said.err, headers):
            raise HeadersError(
                f"{headers} is not whole: {foreign} was read in place of a file of its own; name the folder of a whole ROCm"
            )
        if said.problem:
            errors = "\n".join(line for line in said.err.splitlines() if not re.match(r"\.+ /", line))
            raise HeadersError(
                f"{source.path} does not compile with HIP {version} for {plan.profile}:\n{errors}"
            )
    return len(sources)


def main(arguments: Sequence[str]) -> int:
    """The subcommand `hip-headers`."""
    parser = argparse.ArgumentParser(
        prog="hip-headers", description="Compile the GPU sources with the headers of other HIP versions."
    )
    parser.add_argument(
        "--torch", type=Path, required=True, help="the folder of the torch package, for hipify"
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder to work in")
    parser.add_argument("--hip", default=HIP, help="repository with the API's headers: a URL or a folder")
    parser.add_argument("--clr", default=CLR, help="repository with AMD's implementation: a URL or a folder")
    parser.add_argument(
        "versions",
        nargs="*",
        default=list(RELEASES),
        metavar="VERSION",
        help=f"of ROCm, or a folder with include/hip (default: {' '.join(RELEASES)})",
    )
    options = parser.parse_args(arguments)
    root, work = project_root(), options.work.absolute()
    folders = {
        name: own_headers(Path(name)) for name in options.versions if "/" in name or Path(name).is_dir()
    }
    files = {name: version_files(name) for name in options.versions if name not in folders}
    plans = list(_plans(root))
    names = with_headers(root, dict.fromkeys(name for plan in plans for name in hip_sources(plan)))
    for name in names:
        write_atomically(
            work / "hipified" / hipified_name(name), hipify_text(root / name, name, options.torch)
        )
    if files:
        hip, clr = _clone(options.hip, work / "HIP.git"), _clone(options.clr, work / "clr.git")
    for version in dict.fromkeys(options.versions):
        headers = folders.get(version, work / version)
        if version in files:
            unpack_headers(hip, f"rocm-{version}", "include", headers)
            unpack_headers(clr, f"rocm-{version}", "hipamd/include", headers)
            for name, text in files[version].items():
                write_atomically(headers / name, text)
        for plan in plans:
            count = _check(plan, work / "hipified", headers, work / "device_libs", version)
            sys.stdout.write(f"HIP {version}: {count} sources of {plan.profile} compile\n")
            sys.stdout.flush()
    return 0
