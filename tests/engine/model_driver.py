"""Drives a Runner without scheduler and engine: sequences, their blocks, and the plans of steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pelton import ops
from pelton.config import EngineConfig, load_model_config
from pelton.runner import Runner
from pelton.scheduler import ScheduledRequest, StepPlan

DATA = Path(__file__).parent.parent / "data"
#: where the installed kernels run
DEVICE = torch.device("cuda:0" if ops.backend() in ("cuda", "rocm") else "cpu")
ON_GPU = DEVICE.type != "cpu"
cpu_only = pytest.mark.skipif(ON_GPU, reason="about the CPU's engine, and the installed kernels are for GPUs")
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a GPU, and a build of pelton for it")


@dataclass
class FakeRequest:
    """What the runner reads of a request."""

    token_ids: list[int]
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)


class Driver:
    """Runs sequences on a runner; blocks are handed out in a shuffled order and never block 0."""

    def __init__(self, model: Path, **options: Any) -> None:
        options = {"kv_cache_memory": "8MiB", "max_num_seqs": 8} | options
        self.runner = Runner(EngineConfig(model=model, **options), load_model_config(model))
        order = torch.randperm(self.runner.num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.free: list[int] = order.tolist()

    def sequence(self, token_ids: Sequence[int]) -> FakeRequest:
        return FakeRequest(list(token_ids))

    def step(
        self, *parts: tuple[FakeRequest, int, int], copies: tuple[tuple[int, int], ...] = ()
    ) -> torch.Tensor:
        """One step of (sequence, new tokens, rows of logits); a copy on the CPU: the logits are the runner's own."""
        for sequence, count, _ in parts:
            need = -(-(sequence.num_computed_tokens + count) // self.runner.block_size)
            while len(sequence.block_ids) < need:
                sequence.block_ids.append(self.free.pop())
        plan = StepPlan(tuple(ScheduledRequest(s, count, rows) for s, count, rows in parts), copies)  # type: ignore[arg-type]
        logits = self.runner.execute(plan).to("cpu", copy=True)
        for sequence, count, _ in parts:
            sequence.num_computed_tokens += count
        return logits

    def all_logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Logits of every position, computed in chunks."""
        sequence = self.sequence(token_ids)
        rows = []
        for first in range(0, len(token_ids), chunk or len(token_ids)):
            count = min(chunk or len(token_ids), len(token_ids) - first)
            rows.append(self.step((sequence, count, count)))
        self.free.extend(sequence.block_ids)
        return torch.cat(rows)

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], torch.Tensor]:
        """`count` tokens for each prompt, all of them in one batch; also the logits of the last step."""
        sequences = [self.sequence(prompt) for prompt in prompts]
        logits = self.step(*((s, len(s.token_ids), 1) for s in sequences))
        for _ in range(count - 1):
            for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
                sequence.token_ids.append(token)
            logits = self.step(*((s, 1, 1) for s in sequences))
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.token_ids.append(token)
            self.free.extend(sequence.block_ids)
        outputs = [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
        return outputs, logits


def copy_model(source: Path, target: Path, overrides: Mapping[str, Any] = {}) -> Path:
    """The model folder `source` under `target`, with other values in its config.json (None: without the key)."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | overrides
    config = {key: value for key, value in config.items() if value is not None or key not in overrides}
    (target / "config.json").write_text(json.dumps(config))
    return target
