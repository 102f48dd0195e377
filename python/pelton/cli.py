"""The command `pelton`: `generate`, `info` and `doctor`.

A command is one entry in `COMMANDS`: its name, a line of summary, a function that adds its arguments and one
that runs it. Nothing heavy is imported before a command runs, so that `pelton info` works without torch and
on a machine that the wheel is not for.

Exit codes: 0; 1 for an error, which is one message on stderr; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import InvalidValueError, PeltonError, did_you_mean

if TYPE_CHECKING:
    from .sampling import SamplingParams

__all__ = ["COMMANDS", "Command", "main"]

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class Command:
    """A subcommand: `add_arguments` fills its parser, `run` does the work and returns the exit code."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    try:
        args = _parser().parse_args(argv)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except SystemExit as exit_:  # --help and wrong usage
        return exit_.code if isinstance(exit_.code, int) else 2
    except PeltonError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "pelton":
            raise
        return _fail(f"the Python package {error.name!r} is not installed: pip install {error.name}")
    except BrokenPipeError:  # whoever read our output has gone (`| head`)
        _discard_output()
        return 1
    except OSError as error:  # a full disk under the output, a file that cannot be read any more
        _discard_output()
        return _fail(f"{error.filename or 'reading or writing failed'}: {error.strerror or error}")


def _discard_output() -> None:
    """Forget what stdout still holds, which Python would try to write once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"pelton: error: {message}", file=sys.stderr)
    return 1


# ---
# Arguments
# ---


class _Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest option or command when there is none of a name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(parsed, "parser", self)
            options = [name for action in parser._actions for name in action.option_strings]
            first = unknown[0].partition("=")[0]
            hint = did_you_mean(first, options) if first.startswith("-") else ""
            parser.error(f"unknown argument {first!r}{hint}")
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(names)}{did_you_mean(str(value), names)}"
            )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> _Parser:
    parser = _Parser(prog="pelton", description="Run language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(child)
        child.set_defaults(run=command.run, parser=child)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import pelton

        print(f"pelton {pelton.__version__}")
        parser.exit()


# ---
# generate
# ---

# Options that go to SamplingParams and to LLM under their own names: (name, type, what is said about it)
_SAMPLING: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("max_tokens", int, f"most tokens to generate (default {DEFAULT_MAX_TOKENS})"),
    ("min_tokens", int, "do not end before this many"),
    ("temperature", float, "0 always takes the most likely token"),
    ("top_k", int, "choose among this many tokens; 0: all"),
    ("top_p", float, "choose among the tokens that make up this much of the probability"),
    ("min_p", float, "choose among tokens with this part of the best one's probability"),
    ("repetition_penalty", float, "above 1: what was there before becomes less likely"),
    ("presence_penalty", float, "above 0: what was generated before becomes less likely"),
    ("frequency_penalty", float, "the same, for each time that it was"),
    ("seed", int, "make the answer reproducible"),
)
_ENGINE: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("tokenizer", str, "folder or GGUF file of the tokenizer, if it is not the model's"),
    ("device", str, "auto (what this build runs on), cpu, cuda or cuda:N"),
    ("dtype", str, "auto, float32, bfloat16 or float16"),
    ("quantization", str, "awq, gptq, compressed-tensors or marlin: refuse the model unless it is that"),
    ("max_model_len", int, "longest prompt and answer together, in tokens"),
    ("block_size", int, "tokens in a block of the KV cache"),
    ("max_num_batched_tokens", int, "most tokens that one step computes"),
    ("kv_cache_memory", str, "memory for the KV cache, like 2GiB"),
    ("gpu_memory_utilization", float, "part of a GPU's memory to use in all, up to 1"),
)


def _add_options(
    group: argparse._ArgumentGroup, options: Sequence[tuple[str, Callable[[str], Any], str]]
) -> None:
    for name, kind, text in options:
        metavar = {int: "N", float: "X"}.get(kind, "VALUE")  # type: ignore[call-overload]
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, metavar=metavar, help=text)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face folder or a GGUF file (required)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="text to go on with; '-' or nothing reads it from stdin"
    )
    prompt.add_argument(
        "--chat", metavar="TEXT", help="message to answer, by the model's chat template; '-': stdin"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    sampling = parser.add_argument_group(
        "how tokens are chosen", "What is not given is as the model's generation_config.json says."
    )
    _add_options(sampling, _SAMPLING)
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of text")
    _add_options(parser.add_argument_group("how the model is run"), _ENGINE)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it comes, or (--no-stream) at the end",
    )
    output.add_argument("--quiet", action="store_true", help="no statistics on stderr")


def _generate(args: argparse.Namespace) -> int:
    if args.model is None:  # argparse would complain of this before it sees a misspelt --model
        args.parser.error("--model PATH is missing")
    if args.system is not None and args.chat is None:
        args.parser.error("--system needs --chat")
    given = {name: value for name, _, _ in _SAMPLING if (value := getattr(args, name)) is not None}
    if args.stop:
        given["stop"] = args.stop
    if args.ignore_eos:
        given["ignore_eos"] = True
    options = {name: value for name, _, _ in _ENGINE if (value := getattr(args, name)) is not None}
    from .sampling import SamplingParams

    SamplingParams(**{"max_tokens": None, **given})  # a wrong value is found before the model is loaded
    text = _prompt_text(args)

    start = time.perf_counter()
    with _loading(args) as progress:
        llm = _make_llm(args.model, **options, **progress)
    loaded = time.perf_counter()
    params = _with_defaults(llm.get_default_sampling_params(), given)
    prompt: Any = text
    if args.chat is not None:
        messages = [{"role": "user", "content": text}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        prompt = {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(messages)}
    run = _Run(load_s=loaded - start)
    try:
        run.write(llm.generate_stream(prompt, params), args.stream)
    finally:
        if not args.quiet and run.num_tokens:
            print(run.summary(), file=sys.stderr)
    return 0


def _make_llm(model: str, **options: Any) -> Any:
    from .llm import LLM

    return LLM(model, **options)


def _with_defaults(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """The model's own values, replaced by those that were given, with a limit that suits a terminal."""
    changes = dict(given)
    if "max_tokens" not in changes and defaults.max_tokens == type(defaults)().max_tokens:
        changes["max_tokens"] = max(DEFAULT_MAX_TOKENS, changes.get("min_tokens", 0))
    return dataclasses.replace(defaults, **changes)


def _prompt_text(args: argparse.Namespace) -> str:
    text: str | None = args.prompt if args.chat is None else args.chat
    if text is not None and text != "-":
        return text
    if sys.stdin is None or (text is None and sys.stdin.isatty()):
        args.parser.error("nothing to do: give --prompt TEXT, --chat TEXT, or text on stdin")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"stdin is not text in {sys.stdin.encoding}: {error}") from None


@contextmanager
def _loading(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A bar on stderr while weights are loaded, if that is a terminal: the options of `LLM` that feed it."""
    if args.quiet or not sys.stderr.isatty():
        yield {}
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("loading {task.fields[model]}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, model=args.model)
        yield {"progress": lambda done, total: bar.update(task, completed=done, total=total)}


@dataclass
class _Run:
    """One answer: writes it to stdout and keeps the figures."""

    load_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: str | None = None

    def write(self, outputs: Iterator[Any], stream: bool) -> None:
        start = time.perf_counter()
        last = ""
        held: list[str] = []
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
        try:
            for output in outputs:
                completion = output.outputs[0]
                self.prompt_tokens = len(output.prompt_token_ids)
                self.cached_tokens = output.num_cached_tokens
                if completion.token_ids:
                    self.last_s = time.perf_counter() - start
                    self.first_s = self.first_s or self.last_s
                    self.num_tokens += len(completion.token_ids)
                self.finish_reason = completion.finish_reason or self.finish_reason
                if completion.text:
                    last = completion.text
                    held.append(last)
                    if stream:
                        print(held.pop(), end="", flush=True)
        finally:
            if held:
                print("".join(held), end="")
            if last and not last.endswith("\n"):
                print(flush=True)

    def summary(self) -> str:
        parts = [f"{self.prompt_tokens} prompt tokens"]
        if self.cached_tokens:
            parts[0] += f" ({self.cached_tokens} cached)"
        reason = f" (ended by {self.finish_reason})" if self.finish_reason else ""
        parts.append(f"{self.num_tokens} generated{reason}")
        parts.append(f"first token after {self.first_s:.2f} s")
        decode_s = self.last_s - self.first_s
        if self.num_tokens > 1 and decode_s > 0:
            parts.append(f"then {(self.num_tokens - 1) / decode_s:.1f} tokens/s")
        parts.append(f"loaded in {self.load_s:.2f} s")
        return f"[{', '.join(parts)}]"


# ---
# info
# ---


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="for machines: everything, the whole plan included"
    )


def _info(args: argparse.Namespace) -> int:
    info = _collect_info()
    if args.json:
        print(json.dumps(info, indent=2, sort_keys=True))
    else:
        _print_info(info)
    return 0


def _collect_info() -> dict[str, Any]:
    """What is installed and what it finds: plain values for JSON. Needs neither torch nor the library."""
    import pelton

    from . import _library, build_info, guard, host

    try:
        library, library_error = str(_library.find(os.environ.get("PELTON_LIBRARY"), pelton.__path__)), None
    except PeltonError as error:
        library, library_error = None, str(error)
    fits, problem, gpus = None, None, build_info.backend in ("cuda", "rocm")
    try:
        machine = guard.this_machine(gpus=gpus)
        if build_info.path is not None:
            mismatch = guard.find_mismatch(build_info.as_dict(), machine, guard.index_address())
            fits, problem = mismatch is None, None if mismatch is None else str(mismatch)
    except PeltonError as error:  # PELTON_HOST describes no machine: what is below is the real one's
        machine, problem = guard.real_machine(gpus), str(error)
    cpu: Any = host.cpu_features()
    return {
        "version": build_info.version,
        "build": build_info.as_dict(),
        "package": [str(path) for path in pelton.__path__],
        "library": library,
        "library_error": library_error,
        "fits_this_machine": fits,
        "problem": problem,
        "host_module": {**host.module_info(), "reason": host.reason},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "torch": machine.torch,
        "torch_cuda": machine.torch_cuda,
        "torch_rocm": machine.torch_rocm,
        "machine": {
            "system": sys.platform,
            "machine": platform.machine(),
            "glibc": machine.glibc,
            "cpu_vendor": cpu.get("vendor", ""),
            "cpu_level": machine.level,
            "cpu_flags": list(cpu.get("flags", ())),
            "cpu_flags_off": list(cpu.get("off", ())),
            "nvidia_driver": machine.driver,
            "gpus": [dataclasses.asdict(gpu) for gpu in machine.gpus or ()],
        },
    }


def _torch_text(info: Mapping[str, Any]) -> str:
    builds = [
        f"{name} {info[key]}" for name, key in (("CUDA", "torch_cuda"), ("ROCm", "torch_rocm")) if info[key]
    ]
    return " for ".join([info["torch"], *builds]) if info["torch"] else "not installed"


def _print_info(info: dict[str, Any]) -> None:
    build, machine, host = info["build"], info["machine"], info["host_module"]
    on = [name for name, value in build.get("features", {}).items() if value]
    toolchain = ", ".join(f"{name} {value}" for name, value in build.get("toolchain", {}).items())
    unknown = f"unknown: {info['problem']}" if info["problem"] else "not built: run from a source tree"
    fits = {None: unknown, True: "yes", False: f"no: {info['problem']}"}
    rows = [
        ("version", info["version"]),
        ("profile", build.get("profile", "")),
        ("backend", " ".join([build.get("backend", ""), *build.get("archs", ())]).strip()),
        ("features", ", ".join(on) or "none"),
        ("built with", toolchain),
        ("built from", f"{build.get('commit', '')} {build.get('state', '')}".strip()),
        ("sources", build.get("source_digest", "")),
        ("library", info["library"] or f"none: {info['library_error']}"),
        ("fits this machine", fits[info["fits_this_machine"]]),
        ("host module", host["implementation"] + (f": {host['reason']}" if host["reason"] else "")),
        ("Python", f"{info['python']['version']} ({info['python']['executable']})"),
        ("torch", _torch_text(info)),
        *((f"GPU {i}", f"{gpu['name']} ({gpu['arch']})") for i, gpu in enumerate(machine["gpus"])),
        ("NVIDIA driver", f"for CUDA {machine['nvidia_driver']}" if machine["nvidia_driver"] else ""),
        ("CPU", f"{machine['cpu_vendor']} {machine['cpu_level'] or ''}".strip()),
        ("CPU features", " ".join(machine["cpu_flags"])),
        ("not enabled", " ".join(machine["cpu_flags_off"])),
        ("system", f"{machine['system']} {machine['machine']}, glibc {machine['glibc'] or 'none'}"),
    ]
    rows = [(name, str(value)) for name, value in rows if value]
    if not sys.stdout.isatty():  # a log or a program: one line each, not folded
        print("\n".join(f"{name:<18} {value}" for name, value in rows))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    Console().print(table)


# ---
# doctor
# ---


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for machines")


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    findings = doctor.examine()
    print(doctor.report(findings, args.json))
    return int(any(finding.status == "error" for finding in findings))


COMMANDS: tuple[Command, ...] = (
    Command("generate", "Complete a text or answer a message.", _generate_arguments, _generate),
    Command("info", "What this installation was built for, and what it finds here.", _info_arguments, _info),
    Command(
        "doctor",
        "Look for what is wrong with this installation, and say what to do.",
        _doctor_arguments,
        _doctor,
    ),
)
