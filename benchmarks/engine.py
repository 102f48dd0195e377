"""Engine throughput beside its peers: one process per engine, the same weights, interleaved rounds.

    python benchmarks/models.py SmolLM2-135M-Instruct.Q4_1.gguf build/bench
    python benchmarks/engine.py build/bench --batch 1 32 --dtype float32 bfloat16 --json results.json

Every engine gets the same prompts (random token ids, so that no prefix cache helps) and writes the same
number of tokens greedily, ignoring the end token. A round asks each engine in turn, so that a change in
the machine's speed meets all of them. Per round and engine:

- prefill tokens/s = prompt tokens / time of a call for one token
- decode tokens/s  = further tokens / (time of the whole call - time of a call for one token)

The table shows medians over the rounds and the ratio to Pelton. Engines whose package is not installed
are named as missing.

On a GPU no checkpoint is needed: the weights are random numbers, made on the device in the shape of a known model.

    python benchmarks/engine.py --device cuda --model llama-3-8b --batch 1 32 256 --prompt 512 --json results.json

Pelton is then also asked how much of a decode step the GPU computes, by the profiler's timeline of some steps, and how
long the same recorded step takes when it is started again and again with nothing in between.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], dict[str, float] | None]
Settings = dict[str, Any]

PACKAGES = {
    "pelton": "pelton",
    "transformers": "transformers",
    "transformers-static": "transformers",
    "llama.cpp": "xllamacpp",
    "vllm": "vllm",
}

#: config.json of models whose weights are made up
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}


def model_folder(folder: Path, settings: Settings) -> Path:
    """Where the model is: on a GPU a folder with nothing but a config.json."""
    if settings["device"] == "cpu":
        return folder / f"hf-{settings['dtype']}"
    target = folder / settings["model"]
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({**SHAPES[settings["model"]], "dtype": settings["dtype"]}))
    return target


def open_pelton(folder: Path, settings: Settings) -> Generate:
    """Pelton on the Hugging Face folder."""
    import torch

    torch.set_num_threads(settings["threads"])
    from pelton import LLM, SamplingParams

    on_gpu = settings["device"] != "cpu"
    if settings["isa"] == "avx2" and hasattr(torch.ops.pelton, "quant_allow_vnni"):
        torch.ops.pelton.quant_allow_vnni(False)
    llm = LLM(
        str(model_folder(folder, settings)),
        device=settings["device"],
        load_format="dummy" if on_gpu else "auto",
        dtype="bfloat16" if settings["dtype"].startswith("int4") else settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=max(settings["batch"]),
        max_num_batched_tokens=16384 if on_gpu else 2048,
        gpu_memory_utilization=0.45,  # the peers are loaded, too
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, float] | None:
        asked = [{"prompt_token_ids": p} for p in prompts]
        if new_tokens == 0:  # a question that only this engine knows
            return decode_step_times(llm, asked) if on_gpu else None
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(asked, params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == new_tokens for o in outputs)
        return None

    return generate


def decode_step_times(llm: Any, asked: list[dict[str, list[int]]]) -> dict[str, float]:
    """Seconds of a decode step, from the profiler's timeline of some: all of it, and when the GPU computed.

    Copies between host and device are not computing; kernels that run side by side count once. `replay` is the same
    recorded step, started again and again with nothing in between, by the GPU's clock.
    """
    import torch

    from pelton import SamplingParams

    engine, steps = llm.engine, 24
    params = SamplingParams(temperature=0.0, max_tokens=steps + 40, ignore_eos=True)
    groups = [engine.add_request(prompt["prompt_token_ids"], params) for prompt in asked]
    while min(len(group.first.output_token_ids) for group in groups) < 4:
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.abort(groups)
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    marks = [event.time_range.start for event in events if "embedding" in event.name]  # one a step
    steps = len(marks) - 1
    if steps < 1:
        raise SystemExit("the profiler told of no kernels: is another one running, or CUPTI missing?")
    kernels = [
        event
        for event in events
        if marks[0] <= event.time_range.start < marks[-1] and not event.name.startswith(("Memcpy", "Memset"))
    ]
    by_name: dict[str, float] = {}
    idle: dict[str, float] = {}
    busy, end, last = 0.0, kernels[0].time_range.start, ""
    for event in kernels:
        by_name[event.name] = by_name.get(event.name, 0.0) + event.device_time / steps
        start = event.time_range.start
        if start > end:
            between = f"{last[:50]} ... {event.name[:50]}"
            idle[between] = idle.get(between, 0.0) + (start - end) / steps
        busy += max(0.0, event.time_range.end - max(start, end))
        end, last = max(end, event.time_range.end), event.name
    for title, times in (("computing", by_name), ("idle", idle)):
        print(title, file=sys.stderr)
        for name, micros in sorted(times.items(), key=lambda item: -item[1])[:14]:
            print(f"{micros:9.1f} us  {name[:120]}", file=sys.stderr)
    span = marks[-1] - marks[0]

    runner = engine.runner
    graph = runner._graphs[next(size for size in runner._graph_sizes if size >= len(asked))]
    first_event, last_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first_event.record()
    for _ in range(20):
        graph.replay()
    last_event.record()
    torch.cuda.synchronize()
    return {
        "step": span / steps * 1e-6,
        "busy": busy / steps * 1e-6,
        "replay": first_event.elapsed_time(last_event) / 20e3,
    }


def open_transformers(folder: Path, settings: Settings, **options: Any) -> Generate:
    """Transformers' `generate` with static batching."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    if settings["device"] == "cpu":
        model = AutoModelForCausalLM.from_pretrained(model_folder(folder, settings), dtype=dtype)
    else:
        from transformers import AutoConfig

        with torch.device(settings["device"]):
            config = AutoConfig.from_pretrained(model_folder(folder, settings))
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts, device=settings["device"])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                **options,
            )
        assert out.shape[1] == ids.shape[1] + new_tokens

    return generate


def open_transformers_static(folder: Path, settings: Settings) -> Generate:
    """Transformers with its static cache, which compiles the decode step."""
    return open_transformers(folder, settings, cache_implementation="static")


def open_llama_cpp(folder: Path, settings: Settings) -> Generate:
    """llama.cpp's server core in this process, one slot a sequence."""
    import xllamacpp

    slots = max(settings["batch"])
    params = xllamacpp.CommonParams()
    form = {"float32": "f32", "bfloat16": "bf16"}.get(settings["dtype"], "int4")
    params.model.path = str(folder / f"model-{form}.gguf")
    params.n_parallel = slots
    params.n_ctx = settings["context"] * slots
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_gpu_layers = 0
    params.cache_ram_mib = 0
    params.warmup = True
    params.port = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        answer = server.handle_completions(
            {
                "prompt": prompts if len(prompts) > 1 else prompts[0],
                "n_predict": new_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        # Each choice must have run to its full length (its usage figures cover one choice only).
        reasons = [choice["finish_reason"] for choice in answer.get("choices", [])]
        assert reasons == ["length"] * len(prompts), str(answer)[:500]

    return generate


def open_vllm(folder: Path, settings: Settings) -> Generate:
    """vLLM's CPU build, eager."""
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder / f"hf-{settings['dtype']}"),
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=max(settings["batch"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    return generate


# What holds torch's and oneDNN's run-time dispatch to one instruction set, so that a machine with wider
# registers can stand in for a plain one. It does not bind Pelton (its wheel decides, besides AVX-VNNI) nor llama.cpp.
ISA_LIMITS = {
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}

OPENERS: dict[str, Callable[[Path, Settings], Generate]] = {
    "pelton": open_pelton,
    "transformers": open_transformers,
    "transformers-static": open_transformers_static,
    "llama.cpp": open_llama_cpp,
    "vllm": open_vllm,
}


def worker(name: str, folder: Path, settings: Settings) -> None:
    """Load one engine, then answer one JSON request a line with the seconds that it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print must not mix with the answers
    start = time.perf_counter()
    generate = OPENERS[name](folder, settings)
    print(json.dumps({"load": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        extra = generate(request["prompts"], request["new_tokens"])
        taken = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu, **(extra or {})}
        print(json.dumps(taken), file=answers, flush=True)


class Peer:
    """One engine in its own process."""

    def __init__(self, name: str, folder: Path, settings: Settings) -> None:
        command = [
            sys.executable,
            __file__,
            str(folder),
            "--worker",
            name,
            "--settings",
            json.dumps(settings),
        ]
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ISA_LIMITS[settings["isa"]]},
        )
        self.load = self.answer()["load"]

    def answer(self) -> dict[str, float]:
        """Read one answer; a worker that ended is an error."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker ended with status {self.process.wait()}")
        return dict(json.loads(line))

    def ask(self, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
        """Let the engine write `new_tokens` for each prompt."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End the worker."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(peers: list[Peer], batch: int, settings: Settings) -> list[dict[str, Any]]:
    """Interleaved rounds at one batch size; one row per engine."""
    rng = random.Random(batch)
    samples: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    for round_number in range(settings["rounds"] + 1):
        for peer in peers:
            # New prompts for every call, so that nothing of an earlier one can be reused.
            prompts = [
                [[rng.randrange(100, 40000) for _ in range(settings["prompt"])] for _ in range(batch)]
                for _ in range(2)
            ]
            one = peer.ask(prompts[0], 1)
            full = peer.ask(prompts[1], settings["new_tokens"])
            if round_number == 0:
                continue  # warm-up
            further = batch * (settings["new_tokens"] - 1)
            samples[peer.name].append(
                {
                    "decode": further / (full["wall"] - one["wall"]),
                    "prefill": batch * settings["prompt"] / one["wall"],
                    "first_token": one["wall"],
                    "cpu_per_token": (full["cpu"] - one["cpu"]) / further,
                }
            )
    return [
        {
            "engine": name,
            "batch": batch,
            **{key: statistics.median(s[key] for s in values) for key in values[0]},
            "rounds": values,
        }
        for name, values in samples.items()
    ]


def environment(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = {}
    for name, package in {**PACKAGES, "torch": "torch"}.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # a source tree on the path is there, too, without metadata
            versions[name] = "source tree" if importlib.util.find_spec(package) else "missing"
    gpu = "none"
    if device != "cpu":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "gpu": gpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python", *sys.argv]),
    }


def write_report(file: Path | None, report: dict[str, Any]) -> None:
    """Write what is known so far: a run that is cut leaves its first rows."""
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="engine throughput beside its peers")
    parser.add_argument("folder", type=Path, nargs="?", help="folder written by benchmarks/models.py (CPU)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--model", default="llama-3-8b", choices=list(SHAPES), help="shape of the weights (GPU)"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=list(OPENERS), help="default: all that the device has"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16", "int4", "int4-head16"],
        help="default: float32, GPU bfloat16; int4: pelton beside llama.cpp's Q4_0, see benchmarks/models.py",
    )
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens a sequence")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", choices=list(ISA_LIMITS), default="native", help="limit torch's dispatch")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.folder, json.loads(arguments.settings))
        return
    on_gpu = arguments.device != "cpu"
    if arguments.folder is None and not on_gpu:
        parser.error("the folder with the models is missing (see benchmarks/models.py)")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="pelton-bench-"))
    on_cpu_alone, on_gpu_alone = {"llama.cpp", "vllm"}, {"transformers-static"}
    engines = arguments.engines or [n for n in OPENERS if n not in (on_cpu_alone if on_gpu else on_gpu_alone)]

    from rich.console import Console
    from rich.table import Table

    console = Console()
    report: dict[str, Any] = {"environment": environment(arguments.device), "results": [], "decode_steps": []}
    missing = [n for n in engines if report["environment"]["versions"][n] == "missing"]
    if missing:
        console.print(f"not installed, not measured: {', '.join(missing)}")
    for dtype in arguments.dtype or ["bfloat16" if on_gpu else "float32"]:
        settings: Settings = {
            "dtype": dtype,
            "device": arguments.device,
            "model": arguments.model,
            "batch": arguments.batch,
            "prompt": arguments.prompt,
            "new_tokens": arguments.new_tokens,
            "context": arguments.prompt + arguments.new_tokens + 32,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "isa": arguments.isa,
        }
        peers = [Peer(n, folder, settings) for n in engines if n not in missing]
        for batch in arguments.batch:
            rows = measure(peers, batch, settings)
            own = next((r for r in rows if r["engine"] == "pelton"), None)
            table = Table(title=f"{dtype}, batch {batch}, {arguments.threads} threads, {arguments.isa}")
            for column in (
                "engine",
                "decode tok/s",
                "pelton is",
                "prefill tok/s",
                "pelton is ",
                "first token ms",
                "cpu ms/token",
            ):
                table.add_column(column, justify="left" if column == "engine" else "right")
            for row in rows:
                row["dtype"] = dtype
                ratios = [f"{own[k] / row[k]:.2f} x" if own else "" for k in ("decode", "prefill")]
                table.add_row(
                    row["engine"],
                    f"{row['decode']:.1f}",
                    ratios[0],
                    f"{row['prefill']:.0f}",
                    ratios[1],
                    f"{row['first_token'] * 1e3:.1f}",
                    f"{row['cpu_per_token'] * 1e3:.2f}",
                )
            console.print(table)
            report["results"].extend(rows)
            write_report(arguments.json, report)
        for peer in peers if on_gpu else []:
            for batch in arguments.batch if peer.name == "pelton" else []:
                times = peer.ask([[7] * arguments.prompt] * batch, 0)
                parts = {name: times[name] for name in ("step", "busy", "replay")}
                report["decode_steps"].append({"dtype": dtype, "batch": batch, **parts})
                text = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in parts.items())
                console.print(f"decode step of batch {batch}: {text}")
        for peer in peers:
            peer.close()
    write_report(arguments.json, report)


if __name__ == "__main__":
    main()
