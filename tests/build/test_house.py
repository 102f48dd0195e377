"""What the documents say is what there is: commands, options, checks, links; and no name of a package registry."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import plan_cases
from pelton_build import audit
from pelton_build.matrix import matrix
from pelton_build.planning import make_plan
from pelton_build.profile import profile_names

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/*.md")),
]


def commands(document: Path) -> list[str]:
    """The lines of the ``sh`` blocks, comments apart."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [
        line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()
    ]


def test_ci_runs_the_commands_of_the_readme() -> None:
    """The three blocks under "Try it" stand in .ci/run as they are, in their order."""
    setup, first, second = commands(ROOT / "README.md")[:3]
    assert (first, second) == ("nox -s quickstart", "nox -s tests")
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line in (setup, first, second)] == [setup, first, second]


def test_ci_script_is_sound_bash() -> None:
    script = ROOT / ".ci" / "run"
    assert "set -euo pipefail" in script.read_text()
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", str(script)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def sessions() -> set[str]:
    """Names of the nox sessions: functions with the decorator, and one for each profile."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    decorated = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(d) for d in node.decorator_list)
    }
    return decorated | {f"build-{name}" for name in profile_names(ROOT)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_sessions_that_documents_name_exist(document: Path) -> None:
    named = re.findall(r"nox -s ([\w-]+)", document.read_text())
    assert {name for name in named if name != "build-NAME"} <= sessions()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    text = document.read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (document.parent / target).exists(), target
    for target in re.findall(r"`((?:python|kernels|docs|tests|build_profiles|cmake)/[\w./-]+)`", text):
        assert (ROOT / target).exists(), target


def fields_of(module: str, name: str) -> set[str]:
    """Annotated fields of a class, read from the source: no import of the engine is needed."""
    tree = ast.parse((ROOT / "python" / "pelton" / module).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    }


@pytest.mark.parametrize(
    ("module", "name", "apart"),
    [("config.py", "EngineConfig", {"model"}), ("sampling.py", "SamplingParams", set())],
)
def test_engine_options_are_documented(module: str, name: str, apart: set[str]) -> None:
    title = {"EngineConfig": "## `LLM(", "SamplingParams": "## `SamplingParams("}[name]
    section = (ROOT / "docs" / "engine.md").read_text().partition(title)[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert documented == fields_of(module, name) - apart


def test_audit_checks_are_documented() -> None:
    section = (ROOT / "docs" / "install.md").read_text().partition("## The audit")[2]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows == {name: summary for name, (_, summary) in audit.CHECKS.items()}


def test_doctor_checks_are_documented() -> None:
    doctor = pytest.importorskip("pelton.doctor", reason="pelton is not installed")
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    documented = set(re.findall(r"^\| `([\w ]+)`: `([\w -]+)` \|", text, re.MULTILINE))
    assert documented == {(group, name) for name, (group, _) in doctor.CHECKS.items()}


def test_the_example_of_a_new_gpu_is_a_profile_that_can_be_planned(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "new-gpu.md").read_text()
    (example,) = re.findall(r"^```toml\n# build_profiles/(.*?)\n(.*?)^```", text, re.M | re.S)
    tree = plan_cases.copy_tree(tmp_path / "tree")
    (tree / "build_profiles" / example[0]).write_text(example[1])
    plan = make_plan(tree, {"profile": Path(example[0]).stem}, {}, version="1.0")
    assert plan.archs == ("sm_89",)
    assert plan.label.endswith(".sm89")
    assert [
        problem for problem in plan.problems if "compiler" not in problem and "torch" not in problem
    ] == []


def test_workflows_pin_actions_and_limit_jobs() -> None:
    for path in sorted(ROOT.glob(".github/workflows/*.yml")):
        text = path.read_text()
        jobs = re.split(r"^  (?=\w[\w-]*:$)", text.partition("\njobs:\n")[2], flags=re.M)[1:]
        assert jobs, path.name
        assert [job.partition(":")[0] for job in jobs if "    timeout-minutes: " not in job] == []
        used = re.findall(r"uses: (.*)", text)
        assert (
            used
            and [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action)]
            == []
        )
        assert "permissions:" in text
        assert [name for name in profile_names(ROOT) if name in text] == [], (
            "profiles are listed by the matrix"
        )


def workflow(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    made: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return made


def jobs_before(jobs: dict[str, Any], name: str) -> set[str]:
    """The jobs that have to end well before this one begins."""
    needs = jobs[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(jobs_before(jobs, other) for other in direct))


def test_nothing_is_published_but_audited_files_of_a_tag() -> None:
    jobs = workflow("release.yml")["jobs"]
    publishing = {
        name
        for name, job in jobs.items()
        if "write" in job.get("permissions", {}).values() or "write-all" in str(job.get("permissions"))
    }
    assert publishing == {"attest", "sbom", "publish", "registry", "pages"}
    for name in publishing:
        assert jobs[name]["if"] == "github.ref_type == 'tag'", name
        assert {"plan", "wheels", "index"} <= jobs_before(jobs, name), name
    assert {"sdist", "attest", "sbom"} <= jobs_before(jobs, "registry") & jobs_before(jobs, "pages")
    steps = [step.get("run", "") for step in jobs["index"]["steps"]]
    (variants,) = (i for i, step in enumerate(steps) if "pelton_build variants" in step)
    assert variants < steps.index("nox -s audit") < steps.index("nox -s index")


def test_the_registry_gets_files_without_label_and_no_password() -> None:
    job = workflow("release.yml")["jobs"]["registry"]
    assert job["permissions"] == {"id-token": "write"}
    download, publish = job["steps"]
    assert download["with"]["pattern"] == "{unlabelled,sdist}"
    assert publish["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "password" not in publish.get("with", {})


def test_no_workflow_keeps_a_cache_or_a_secret() -> None:
    """What one run compiled is not what another releases, and there is nothing to steal."""
    for path in ROOT.glob(".github/workflows/*.yml"):
        text = path.read_text()
        assert "actions/cache" not in text and "cache:" not in text, path.name
        assert "secrets." not in text, path.name


def test_ci_installs_what_the_profiles_images_need() -> None:
    """.ci/run builds a wheel for AMD GPUs on a bare Debian: with the packages that the profiles name."""
    script = (ROOT / ".ci" / "run").read_text()
    packages = {package for row in matrix(ROOT)["include"] for package in row["packages"].split()}
    assert packages
    assert [
        package for package in packages if not re.search(rf"[(\s]{re.escape(package)}[)\s]", script)
    ] == []


def test_one_version_of_cibuildwheel() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (version,) = set(re.findall(r"cibuildwheel==([\d.]+)", text))
    assert f'"cibuildwheel=={version}"' in (ROOT / "pyproject.toml").read_text()


def test_the_described_machines_of_the_documents_are_valid(tmp_path: Path) -> None:
    pytest.importorskip("pelton.guard", reason="pelton is not installed")
    from pelton.guard import Machine, described_machine

    text = (ROOT / "docs" / "install.md").read_text()
    blocks = [b for b in re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S) if "machine.toml" in b]
    real = Machine("linux", "x86_64", "2.36", frozenset(), frozenset(), None)
    machines = []
    for block in blocks:
        path = tmp_path / "machine.toml"
        path.write_text(block)
        machines.append(described_machine(path, real))
    server, gpus = machines
    assert server.glibc == "2.31" and "avx512f" in server.off and "movbe" not in server.flags
    assert [gpu.arch for gpu in gpus.gpus or ()] == ["sm_90"] * 8 + ["sm_75"]
    assert (gpus.driver, gpus.torch_cuda, gpus.rocm) == ("13.0", "13.0", None)


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name]


def test_no_registry_and_no_foreign_folder_is_named() -> None:
    """A clone must not depend on one registry's address, nor on the folders of the machine it was written on."""
    hosts = [
        "pypi" + ".org",
        "files.python" + "hosted.org",
        "download.py" + "torch.org",
        "hugging" + "face.co/",
    ]
    for path in tracked_files():
        data = path.read_bytes() if path.is_file() else b""
        for host in [*hosts, "/work" + "/main", "/work" + "/shared"]:
            assert host.encode() not in data, f"{path.relative_to(ROOT)} names {host}"


def test_commands_of_the_tool_are_there() -> None:
    command = [sys.executable, "-m", "pelton_build", "--help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("plan", "audit", "index"):
        assert f"  {name}" in done.stdout
