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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], None]
Settings = dict[str, Any]

PACKAGES = {"pelton": "pelton", "transformers": "transformers", "llama.cpp": "xllamacpp", "vllm": "vllm"}


def open_pelton(folder: Path, settings: Settings) -> Generate:
    """Pelton on the Hugging Face folder."""
    import torch

    torch.set_num_threads(settings["threads"])
    from pelton import LLM, SamplingParams

    llm = LLM(
        str(folder / f"hf-{settings['dtype']}"),
        dtype=settings["dtype"],
        max_model_len=settings["context"],
        max_num_seqs=max(settings["batch"]),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == new_tokens for o in outputs)

    return generate


def open_transformers(folder: Path, settings: Settings) -> Generate:
    """Transformers' `generate` with static batching."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        folder / f"hf-{settings['dtype']}", dtype=getattr(torch, settings["dtype"])
    )
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
            )
        assert out.shape[1] == ids.shape[1] + new_tokens

    return generate


def open_llama_cpp(folder: Path, settings: Settings) -> Generate:
    """llama.cpp's server core in this process, one slot a sequence."""
    import xllamacpp

    slots = max(settings["batch"])
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / f"model-{'f32' if settings['dtype'] == 'float32' else 'bf16'}.gguf")
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
# registers can stand in for a plain one. It does not bind Pelton (its wheel decides) nor llama.cpp.
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
        generate(request["prompts"], request["new_tokens"])
        taken = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu}
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


def environment() -> dict[str, Any]:
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
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="engine throughput beside its peers")
    parser.add_argument("folder", type=Path, help="folder written by benchmarks/models.py")
    parser.add_argument("--engines", nargs="+", choices=list(OPENERS), default=list(OPENERS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
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

    from rich.console import Console
    from rich.table import Table

    console = Console()
    report: dict[str, Any] = {"environment": environment(), "results": []}
    missing = [n for n in arguments.engines if report["environment"]["versions"][n] == "missing"]
    if missing:
        console.print(f"not installed, not measured: {', '.join(missing)}")
    for dtype in arguments.dtype:
        settings: Settings = {
            "dtype": dtype,
            "batch": arguments.batch,
            "prompt": arguments.prompt,
            "new_tokens": arguments.new_tokens,
            "context": arguments.prompt + arguments.new_tokens + 32,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "isa": arguments.isa,
        }
        peers = [Peer(n, arguments.folder, settings) for n in arguments.engines if n not in missing]
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
                    f"{row['cpu_per_token'] * 1e3:.2f}",
                )
            console.print(table)
            report["results"].extend(rows)
        for peer in peers:
            peer.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
