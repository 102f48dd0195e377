"""The whole engine over emulated GPU kernels: requests of many lengths in one batch, read in pieces, from the cache."""

from __future__ import annotations

import json

import pytest

from model_driver import DATA
from pelton import LLM, SamplingParams, ops

pytestmark = pytest.mark.skipif(
    ops.backend() != "emulation", reason="PELTON_LIBRARY names no emulated build (nox -s emulate)"
)


@pytest.mark.parametrize("model", ["llama-rope", "qwen3-h192-tied"])
def test_greedy_tokens_are_those_of_the_float64_reference(model: str) -> None:
    expected = json.loads((DATA / model / "expected.json").read_text())
    cases = next(v["cases"] for v in expected["variants"].values() if not v["config_overrides"])
    cases = [case for case in cases if "greedy16" in case]
    assert cases
    prompts = [expected["prompts"][str(case["prompt_len"])] for case in cases]
    llm = LLM(
        DATA / model,
        dtype="float32",
        skip_tokenizer_init=True,
        kv_cache_memory="8MiB",
        max_num_batched_tokens=24,
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == [case["greedy16"] for case in cases]
