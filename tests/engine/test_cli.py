from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pelton
from pelton import cli
from pelton.errors import CheckpointError
from pelton.outputs import CompletionOutput, RequestOutput
from pelton.sampling import SamplingParams

MARKOV = Path(__file__).parents[1] / "data" / "markov-bytelevel"


class FakeTokenizer:
    def __init__(self) -> None:
        self.messages: Any = None

    def apply_chat_template(self, messages: Any) -> list[int]:
        self.messages = messages
        return [1, 2, 3]


class FakeLLM:
    """Answers " Paris.", in three steps, the second without text; keeps what it was asked."""

    made: list[FakeLLM]
    defaults = SamplingParams(temperature=0.25, top_k=7)
    texts = (" Par", "", "is.")
    error: BaseException | None = None

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options
        self.tokenizer = FakeTokenizer()
        self.prompt: Any = None
        self.params: Any = None
        FakeLLM.made.append(self)

    def get_default_sampling_params(self) -> SamplingParams:
        return self.defaults

    def get_tokenizer(self) -> FakeTokenizer:
        return self.tokenizer

    def generate_stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompt, self.params = prompt, params
        for index, text in enumerate(self.texts):
            last = index == len(self.texts) - 1
            completion = CompletionOutput(0, text, [index], finish_reason="stop" if last else None)
            yield RequestOutput("0", None, [5, 6, 7, 8], [completion], last, num_cached_tokens=2)
            if self.error is not None:
                raise self.error


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    class Fresh(FakeLLM):
        pass

    FakeLLM.made = []
    monkeypatch.setattr(cli, "_make_llm", Fresh)
    return Fresh


def only(fake: type[FakeLLM]) -> FakeLLM:
    (llm,) = fake.made
    return llm


# --- generate ---


def test_generate_writes_text_to_stdout_and_figures_to_stderr(fake, capsys):
    assert cli.main(["generate", "--model", "m", "--prompt", "The capital is"]) == 0
    out, err = capsys.readouterr()
    assert out == " Paris.\n"
    assert "4 prompt tokens (2 cached), 3 generated (ended by stop), first token after " in err
    assert "tokens/s" in err
    llm = only(fake)
    assert (llm.model, llm.options, llm.prompt) == ("m", {}, "The capital is")


def test_quiet_says_nothing_on_stderr(fake, capsys):
    assert cli.main(["generate", "--model", "m", "--prompt", "x", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


class Recorder(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        if not self.flushed or self.flushed[-1] != self.getvalue():
            self.flushed.append(self.getvalue())


@pytest.mark.parametrize(
    ("option", "flushed"), [("--stream", [" Par", " Paris.", " Paris.\n"]), ("--no-stream", [" Paris.\n"])]
)
def test_streaming(fake, monkeypatch, option, flushed):
    out = Recorder()
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["generate", "--model", "m", "--prompt", "x", option]) == 0
    assert out.flushed == flushed


@pytest.mark.parametrize(("texts", "expected"), [(("a\n",), "a\n"), (("",), ""), (("a", "\n\n"), "a\n\n")])
def test_the_last_line_is_ended_once(fake, capsys, texts, expected):
    fake.texts = texts
    assert cli.main(["generate", "--model", "m", "--prompt", "x"]) == 0
    assert capsys.readouterr().out == expected


def test_a_terminal_that_cannot_show_a_character(fake, monkeypatch):
    fake.texts = ("caf\u00e9",)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["generate", "--model", "m", "--prompt", "x"]) == 0
    assert out.buffer.getvalue() == b"caf?\n"  # type: ignore[attr-defined]


def test_sampling_options_replace_the_models_own(fake):
    options = ["--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--seed", "3", "--ignore-eos"]
    assert (
        cli.main(["generate", "--model", "m", "--prompt", "x", *options, "--stop", "a", "--stop", "b"]) == 0
    )
    params = only(fake).params
    assert params.max_tokens == 9
    assert (params.temperature, params.top_p, params.seed, params.ignore_eos) == (0.5, 0.9, 3, True)
    assert params.stop == ("a", "b")
    assert params.top_k == 7  # the model's


@pytest.mark.parametrize(
    ("defaults", "options", "expected"),
    [
        (SamplingParams(), [], cli.DEFAULT_MAX_TOKENS),
        (SamplingParams(max_tokens=99), [], 99),  # the model's file says so
        (SamplingParams(max_tokens=99), ["--max-tokens", "5"], 5),
        (SamplingParams(), ["--min-tokens", "1000"], 1000),
    ],
)
def test_how_many_tokens(fake, defaults, options, expected):
    fake.defaults = defaults
    assert cli.main(["generate", "--model", "m", "--prompt", "x", *options]) == 0
    assert only(fake).params.max_tokens == expected


def test_engine_options_go_to_the_llm(fake):
    options = [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "77",
        "--kv-cache-memory",
        "1GiB",
        "--block-size",
        "8",
    ]
    assert cli.main(["generate", "--model", "m", "--prompt", "x", *options, "--tokenizer", "t"]) == 0
    assert only(fake).options == {
        "dtype": "bfloat16",
        "max_model_len": 77,
        "kv_cache_memory": "1GiB",
        "block_size": 8,
        "tokenizer": "t",
    }


def test_every_engine_option_is_one_of_the_engines():
    import dataclasses

    from pelton.config import EngineConfig

    known = {field.name for field in dataclasses.fields(EngineConfig)}
    assert {name for name, _, _ in cli._ENGINE} <= known


def test_chat_goes_through_the_template(fake):
    assert cli.main(["generate", "--model", "m", "--chat", "hello", "--system", "be brief"]) == 0
    llm = only(fake)
    assert llm.tokenizer.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert llm.prompt == {"prompt_token_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("options", "chat"), [([], False), (["--prompt", "-"], False), (["--chat", "-"], True)]
)
def test_text_from_stdin(fake, monkeypatch, options, chat):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert cli.main(["generate", "--model", "m", *options]) == 0
    llm = only(fake)
    found = llm.tokenizer.messages[0]["content"] if chat else llm.prompt
    assert found == "two\nlines"


# --- errors ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "pelton: error: the following arguments are required: COMMAND"),
        (["genrate"], "'genrate' is none of generate, info, doctor (did you mean 'generate'?)"),
        (["--versoin"], "COMMAND"),
        (["generate"], "--model PATH is missing"),
        (["generate", "--modle", "m"], "unknown argument '--modle' (did you mean '--model'?)"),
        (["generate", "--model", "m", "--max-token", "3"], "'--max-token' (did you mean '--max-tokens'?)"),
        (["generate", "--model", "m", "--temprature=1"], "'--temprature' (did you mean '--temperature'?)"),
        (["generate", "--model", "m", "--prompt", "a", "more"], "unknown argument 'more' (see"),
        (["generate", "--model", "m", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        (["generate", "--model", "m", "--prompt", "a", "--chat", "b"], "not allowed with"),
        (["generate", "--model", "m", "--system", "a"], "--system needs --chat"),
        (["info", "--jsn"], "unknown argument '--jsn' (did you mean '--json'?)"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(fake, capsys, argv, message):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1 and "--help" in err
    assert out == "" and not fake.made


def test_nothing_to_do_on_a_terminal(fake, monkeypatch, capsys):
    terminal = io.StringIO("")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    assert cli.main(["generate", "--model", "m"]) == 2
    assert "give --prompt TEXT" in capsys.readouterr().err


def test_a_wrong_value_is_found_before_the_model_is_loaded(fake, capsys):
    assert cli.main(["generate", "--model", "m", "--prompt", "x", "--top-p", "1.5"]) == 1
    assert "top_p" in capsys.readouterr().err
    assert not fake.made


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CheckpointError("m/config.json: no such file"), "pelton: error: m/config.json: no such file"),
        (KeyboardInterrupt(), "pelton: error: interrupted"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "'torch' is not installed: pip install torch",
        ),
    ],
)
def test_errors_are_one_message_and_code_1(fake, capsys, error, message):
    fake.error = error
    assert cli.main(["generate", "--model", "m", "--prompt", "x"]) == 1
    out, err = capsys.readouterr()
    assert out == " Par\n"  # what was there before stays, with its line ended
    assert err.rstrip("\n").endswith(message)
    assert "Traceback" not in err


def test_a_fault_of_ours_is_not_hidden(fake):
    fake.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate", "--model", "m", "--prompt", "x"])


# --- info ---


def test_info_tells_what_is_there(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("version", "library", "fits this machine", "host module", "Python", "torch", "CPU"):
        assert word in out
    assert pelton.__version__ in out


def test_info_is_a_table_on_a_terminal(monkeypatch):
    out = Recorder()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["info"]) == 0
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "host module" in out.getvalue()


def test_info_for_machines(capsys):
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["version"] == pelton.__version__
    assert info["host_module"]["implementation"] in ("extension", "twin")
    assert info["python"]["executable"] == sys.executable
    assert info["machine"]["cpu_level"].startswith("x86-64")
    assert (info["library"] is None) != (info["library_error"] is None)


BUILD = {
    "version": "1.2.3+cpu.avx512",
    "profile": "cpu-avx512",
    "backend": "cpu",
    "archs": ["x86-64-v4"],
    "glibc": "2.28",
    "torch_floor": "2.10",
    "features": {"fast-math": True, "awq": False},
    "toolchain": {"c++": "gcc 12.2"},
}


def run(argv: list[str], path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m pelton` of the package at `path`, in a process of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PELTON_")}
    env.update(environment, PYTHONPATH=str(path))
    return subprocess.run(
        [sys.executable, "-m", "pelton", *argv],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as if installed with a build info: its Python files, and no library."""
    import shutil

    source = Path(cli.__file__).parent
    shutil.copytree(
        source, tmp_path / "site" / "pelton", ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build*")
    )
    (tmp_path / "site" / "pelton" / "_build_info.json").write_text(json.dumps(BUILD))
    return tmp_path / "site"


def test_info_on_a_machine_that_the_build_is_not_for(installed, tmp_path):
    (tmp_path / "host.toml").write_text('[cpu]\nlevel = "x86-64-v3"\n')
    done = run(["info", "--json"], installed, PELTON_HOST=str(tmp_path / "host.toml"))
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["fits_this_machine"] is False
    assert "x86-64-v4" in info["problem"]
    assert info["build"]["profile"] == "cpu-avx512"
    text = run(["info"], installed, PELTON_HOST=str(tmp_path / "host.toml"))
    assert text.returncode == 0, text.stderr
    assert "cpu-avx512" in text.stdout and "fast-math" in text.stdout and "awq" not in text.stdout
    assert "fits this machine  no: this build of pelton" in text.stdout


def test_info_and_errors_without_torch(installed, tmp_path):
    (tmp_path / "host.toml").write_text('torch = ""\n[cpu]\nlevel = "x86-64-v4"\n')
    (installed / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    done = run(["info"], installed, PELTON_HOST=str(tmp_path / "host.toml"))
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout
    done = run(["generate", "--model", str(MARKOV), "--prompt", "a"], installed)
    assert done.returncode == 1
    assert "torch" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_info_with_a_host_file_that_is_wrong(installed, tmp_path):
    (tmp_path / "host.toml").write_text("cup = 1\n")
    done = run(["info", "--json"], installed, PELTON_HOST=str(tmp_path / "host.toml"))
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert "PELTON_HOST" in info["problem"] and info["fits_this_machine"] is None
    assert info["machine"]["glibc"] and info["machine"]["cpu_level"], "of the real machine"
    for host, said in ((tmp_path, "is not a file"), (tmp_path / "none.toml", "cannot be read")):
        done = run(["info"], installed, PELTON_HOST=str(host))
        assert done.returncode == 0, done.stderr
        assert f"unknown: PELTON_HOST: {host}: {said}" in done.stdout


def test_info_imports_nothing_heavy():
    code = "import sys; from pelton.cli import main; main(['info']); print({'torch', 'transformers'} & {*sys.modules})"
    path = str(Path(cli.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pelton {pelton.__version__}\n"


@pytest.mark.parametrize(
    "argv", [["--help"], ["generate", "--help"], ["info", "--help"], ["doctor", "--help"]]
)
def test_help(capsys, argv):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert all(command.name in out for command in cli.COMMANDS) or argv[0] in out


def test_a_reader_that_leaves_is_no_error(fake, tmp_path):
    """`pelton generate | head -c 1`: no traceback, and the exit code says that not all was written."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_cli; from pelton import cli\n"
        "test_cli.FakeLLM.made = []; test_cli.FakeLLM.texts = ('x' * 100000,) * 50\n"
        "cli._make_llm = test_cli.FakeLLM\n"
        "sys.exit(cli.main(['generate', '--model', 'm', '--prompt', 'x', '--quiet']))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert error == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a disk that is full")
@pytest.mark.parametrize(
    ("stdout", "code", "error"), [("/dev/full", 1, "No space left on device"), (None, 0, "")]
)
@pytest.mark.parametrize("command", [["generate", "--model", "m", "--prompt", "x", "--quiet"], ["info"]])
def test_output_that_cannot_be_written(fake, tmp_path, command, stdout, code, error):
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_cli; from pelton import cli\n"
        "test_cli.FakeLLM.made = []; test_cli.FakeLLM.texts = ('x',) * 5\n"
        "cli._make_llm = test_cli.FakeLLM\n"
        f"sys.exit(cli.main({command!r}))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    redirect = ">&-" if stdout is None else f"> {stdout}"
    shell = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, program]
    done = subprocess.run(shell, env=env, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert error in done.stderr and len(done.stderr.splitlines()) == bool(error)
