"""The kernel table: what it refuses, and that the real one is sound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import plan_cases
from pelton_build import settings
from pelton_build.errors import TableError
from pelton_build.table import FOLDER, load_table, parse_table

LIBRARY = plan_cases.TABLE[: plan_cases.TABLE.index("[feature.awq]")]
FEATURE = '[feature.f]\nbackends = ["cuda"]\nenvironment = "PELTON_F"\n'


def test_the_real_table_lists_every_source() -> None:
    """Sources that no family lists would never be compiled; `host/` and what only tests use is not the table's."""
    table = plan_cases.real_table()
    listed = {
        source.path
        for family in table.families
        for source in (*family.op, *family.host, *(s for sources in family.device.values() for s in sources))
    }
    folder = plan_cases.ROOT / FOLDER
    there = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.c[pu]*")
        if path.suffix in (".cpp", ".cu")
    }
    assert {path for path in there - listed if not path.startswith(("host/", "emulation/"))} == set()
    assert {"awq", "gptq", "marlin", "fast-math"} <= set(table.features)


def test_variables_of_the_package_are_no_unknown_settings() -> None:
    """A variable that the package reads must not be refused as a misspelt setting of the build."""
    read = {
        name
        for path in (plan_cases.ROOT / "python/pelton").rglob("*.py")
        for name in re.findall(r"""environ(?:\.get\(|\[)["'](PELTON_\w+)""", path.read_text())
    }
    assert "PELTON_LIBRARY" in read
    assert read <= set(plan_cases.real_table().library.environment)


def test_no_variable_of_the_build_is_unknown_to_the_package() -> None:
    """The package warns of what neither it nor the build reads; it cannot import the build to know."""
    from pelton import _environment

    table = plan_cases.real_table()
    features = {feature.environment for feature in table.features.values()}
    build = {
        settings.PROFILE,
        settings.DEVICE,
        settings.TORCH_DIR,
        settings.VERSION,
        *table.library.environment,
    }
    known = {name for name in build | features if name and name.startswith(settings.PREFIX)}
    assert known == {*_environment.RUN, *_environment.BUILD}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[family.x]\ncpu = ['x.cpp']", "missing table [library]"),
        (LIBRARY + "oldest = { cuda = 'sm80' }", "library.oldest.cuda: unknown cuda arch 'sm80'; did you mean 'sm_80'?"),
        (LIBRARY + "oldest = { rocm = 'gfx900' }", "unknown key 'library.oldest.rocm'"),
        (LIBRARY + "[famly.x]\ncpu = ['x.cpp']", "unknown key 'famly'; did you mean 'family'?"),
        (LIBRARY + "[family.x]\ncuad = ['x.cu']", "unknown key 'family.x.cuad'; did you mean 'cuda'?"),
        (LIBRARY + "[family.x]\nsummary = 'none'", "family.x: has no source"),
        (LIBRARY + "[family.x]\ncpu = 'x.cpp'", "family.x.cpu: expected a list of sources"),
        (LIBRARY + "[family.x]\ncpu = [1]", "family.x.cpu[0]: expected a table"),
        (LIBRARY + "[family.x]\ncpu = ['/x.cpp']", "must be a path below kernels/"),
        (LIBRARY + "[family.x]\ncpu = ['../x.cpp']", "must be a path below kernels/"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp', 'x.cpp']", "'x.cpp' is listed twice"),
        (LIBRARY + "[family.x]\ncpu = ['./x.cpp']", "write './x.cpp' as 'x.cpp'"),
        (LIBRARY + "[family.x]\ncpu = ['x//y.cpp']", "write 'x//y.cpp' as 'x/y.cpp'"),
        (LIBRARY + "[family.x]\ncpu = ['x.h']", "'x.h' is no source of kind cpu; expected a file .cpp"),
        (LIBRARY + "[family.x]\ncpu = ['x.cu']", "'x.cu' is no source of kind cpu"),
        (LIBRARY + "[family.x]\nop = ['x.cpp']\ncpu = []", "family.x.cpu: lists no source; leave the key out"),
        (LIBRARY.replace('name = "', 'name = "../'), "library.name: '../"),
        (LIBRARY + "[feature.f]\nbackends = []", "feature.f.backends: name at least one"),
        (LIBRARY + "[feature.F]\nbackends = ['cpu']", "feature.F: 'F' is no name"),
        (LIBRARY + "[feature.a-b]\nbackends = ['cpu']\n[feature.ab]\nbackends = ['cpu']", "make one label"),
        (LIBRARY + "[feature.f]\nbackends = ['cpu']\nenvironment = 'PATH'", "'PATH' is no name for one of our"),
        (LIBRARY + "[feature.f]\nbackends = ['cpu']\nenvironment = 'MAX_JOBS'", "MAX_JOBS is a switch of the build"),
        ("a = " + "[" * 5000, "not valid TOML: nested too deeply"),
        (LIBRARY + "[family.x]\ncpu = [{ archs = [] }]", "family.x.cpu[0].path: expected text, the key is missing"),
        (LIBRARY + "[family.x]\ncuda = [{ path = 'x.cu', archs = ['sm90'] }]", "did you mean 'sm_90'"),
        (LIBRARY + "[family.x]\nop = [{ path = 'x.cpp', archs = ['sm_90'] }]", "only device code has archs"),
        (LIBRARY + "[family.x]\nop = [{ path = 'x.cpp', backends = ['gpu'] }]", "backends: unknown backend 'gpu'"),
        (LIBRARY + "[family.x]\ncpu = [{ path = 'x.cpp', backends = ['cpu'] }]", "only operators are told apart"),
        (LIBRARY + "[family.x]\nop = ['x.cpp']\nsupport = 'yes'", "family.x.support: expected true or false"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\ninstead = 'y'", "family.x.instead: expected a table"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\ninstead.cdua = 'y'", "'family.x.instead.cdua'; did you mean 'cuda'?"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\ninstead.cuda = ''", "family.x.instead.cuda: expected text"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\ninstead.cpu = 'y'", "the family has cpu sources; remove one"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nlocal-memory = 64", "family.x.local-memory: expected a list"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nlocal-memory = [{ kernal = 'k' }]", "did you mean 'kernel'?"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nlocal-memory = [{ kernel = 'k', bytes = 0, reason = 'r' }]", "number of bytes, found 0"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nlocal-memory = [{ kernel = 'k', bytes = 8 }]", "[0].reason: expected text"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nlocal-memory = [{ kernel = 'k', bytes = 8, reason = 'r' }, { kernel = 'k', bytes = 9, reason = 'r' }]", "kernel 'k' is listed twice for one arch"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nlocal-memory = [{ kernel = 'k', bytes = 8, archs = ['sm_90A'], reason = 'r' }]", "[0].archs: unknown cuda arch"),
        (LIBRARY + "[family.x]\nrocm = ['x.cu']\nlocal-memory = [{ kernel = 'k', bytes = 8, archs = ['gfx90b'], reason = 'r' }]", "[0].archs: unknown rocm arch 'gfx90b'; did you mean"),
        (LIBRARY + "[family.x]\nrocm = ['x.cu']\nmatrix = ['gfx90b']", "family.x.matrix: unknown rocm arch 'gfx90b'; did you mean"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nmatrix = ['gfx90a']", "family.x.matrix: the family has no rocm source"),
        (LIBRARY + "[family.x]\ncuda = [{ path = 'x.cu', toolkit = '12' }]", "'12' has no operator"),
        (LIBRARY + "[family.x]\nfeature = 'g'\ncpu = ['x.cpp']\n" + FEATURE, "family.x.feature: unknown feature 'g'"),
        (LIBRARY + "[family.x]\nfeature = ['f', 'h']\ncpu = ['x.cpp']\n" + FEATURE, "family.x.feature: unknown feature 'h'"),
        (LIBRARY + "[family.x]\nfeature = ['f', 'f']\ncpu = ['x.cpp']\n" + FEATURE, "family.x.feature: 'f' is listed twice"),
        (LIBRARY + "[family.x]\nfeature = []\ncpu = ['x.cpp']\n" + FEATURE, "family.x.feature: lists no feature; leave the key out"),
        (LIBRARY + "[family.x]\nfeature = 3\ncpu = ['x.cpp']\n" + FEATURE, "family.x.feature: expected a feature or a list of them, found 3"),
        (LIBRARY + "[family.x]\ncpu = [{ path = 'x.cpp', feature = '' }]\n", "family.x.cpu[0].feature: expected a feature or a list"),
        (LIBRARY + FEATURE + "definitions = 'X'", "feature.f.definitions: expected a list of texts, found 'X'"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\nrun-time = ['AVX512_VNNI']", "family.x.run-time: expected { ARCH = [INSTRUCTIONS, ...] }"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\nrun-time.x86-64-v5 = ['AVX512_VNNI']", "family.x.run-time: unknown cpu arch 'x86-64-v5'; did you mean"),
        (LIBRARY + "[family.x]\ncpu = ['x.cpp']\nrun-time.x86-64-v4 = ['vnni']", "run-time.x86-64-v4: 'vnni' is no name of instructions"),
        (LIBRARY + "[family.x]\ncuda = ['x.cu']\nrun-time.x86-64-v4 = ['AVX512_VNNI']", "family.x.run-time: the family has no cpu source"),
        (LIBRARY + FEATURE.replace("cuda", "cuad"), "feature.f.backends: unknown backend 'cuad'; did you mean 'cuda'?"),
        (LIBRARY + FEATURE + FEATURE.replace("feature.f", "feature.g"), "PELTON_F has two meanings"),
        (LIBRARY + "family = 1", "not valid TOML"),
        ("family = 1\n" + LIBRARY, "family: expected tables [family.NAME]"),
        (LIBRARY.replace('torch = "2.10"', 'torch = "new"'), "library.torch: 'new' is not a version"),
        (LIBRARY.replace("torch-headers", "torch-header"), "did you mean 'torch-headers'?"),
        (LIBRARY + "cxx-standard = 11", "library.cxx-standard: expected 17"),
    ],
)  # fmt: skip
def test_refuses(text: str, message: str) -> None:
    if message == "not valid TOML":
        text = text.replace("family = 1", "[library]")
    with pytest.raises(TableError) as caught:
        parse_table(text)
    assert message in str(caught.value) and str(caught.value).startswith("kernels/kernels.toml: ")


def test_a_family_of_several_features() -> None:
    table = parse_table(
        LIBRARY
        + FEATURE
        + "[feature.g]\nbackends = ['cuda']\ndefinitions = ['G=1']\n"
        + "[family.x]\nfeature = ['g', 'f']\ncuda = ['quant/x/gpu.cu', { path = 'y.cu', feature = 'f' }]\n"
    )
    (family,) = table.families
    assert family.features == ("g", "f")
    assert [source.features for source in family.device["cuda"]] == [(), ("f",)]
    assert table.features["g"].definitions == ("G=1",)


def test_what_a_feature_defines_is_read() -> None:
    """A feature whose definition no source asks for would be a switch that does nothing."""
    folder = plan_cases.ROOT / FOLDER
    text = "".join(
        path.read_text() for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp", ".hpp")
    )
    for feature in plan_cases.real_table().features.values():
        for definition in feature.definitions:
            assert definition.partition("=")[0] in text, feature.name


def test_source_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(TableError, match=r"cannot be read"):
        load_table(tmp_path)
    (tmp_path / FOLDER / "kernels.toml").write_text(LIBRARY + "[family.x]\ncpu = ['x/cpu.cpp']")
    with pytest.raises(TableError, match=r"family\.x: source 'x/cpu\.cpp' does not exist in kernels/"):
        load_table(tmp_path)
