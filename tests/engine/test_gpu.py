"""The engine on a GPU: memory, CUDA graphs, steps ahead, exact float32. Needs a GPU and a build of pelton for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model_driver import DATA, DEVICE, Driver, gpu_only
from pelton import LLM, SamplingParams
from pelton.config import EngineConfig, load_model_config
from pelton.errors import CapacityError, PeltonError
from pelton.runner import Runner

pytestmark = [pytest.mark.gpu, gpu_only]

MODELS = ["llama-rope", "llama-h80-7to1", "qwen3-h192-tied"]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i + 13 * seed + 5) % 96 for i in range(length)]


def llm(model: str | Path = "llama-rope", **options: Any) -> LLM:
    folder = DATA / model if isinstance(model, str) else model
    return LLM(folder, **({"skip_tokenizer_init": True, "kv_cache_memory": "16MiB"} | options))


def runner(model: str = "llama-rope", **options: Any) -> Runner:
    return Runner(EngineConfig(model=DATA / model, **options), load_model_config(DATA / model))


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("model", MODELS)
def test_graphs_are_recorded_at_the_start_and_give_the_same_tokens(model: str) -> None:
    recorded, eager = (
        Driver(DATA / model, dtype="float32", enforce_eager=flag, max_num_seqs=20) for flag in (False, True)
    )
    graphs = dict(recorded.runner._graphs)
    assert sorted(graphs) == [1, 2, 4, 8, 16, 24] and not eager.runner._graphs
    for batch in (1, 2, 3, 8, 20):
        prompts = [prompt(4 + 3 * seed, seed) for seed in range(batch)]
        found, logits = recorded.greedy(prompts, 12)
        expected, eager_logits = eager.greedy(prompts, 12)
        assert found == expected
        torch.testing.assert_close(logits, eager_logits, atol=1e-4, rtol=1e-4)
    assert recorded.runner._graphs == graphs
    recorded.runner.close()
    recorded.runner.close()
    assert recorded.greedy([prompt(5)], 4)[0] == eager.greedy([prompt(5)], 4)[0]  # recorded again
    assert sorted(recorded.runner._graphs) == [1]


def test_a_replay_does_no_more_than_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Driver(DATA / "llama-rope")
    sequence = it.sequence(prompt(9))
    it.step((sequence, 8, 1))
    monkeypatch.setattr(it.runner, "model", lambda _: pytest.fail("the model ran"))
    assert it.step((sequence, 1, 1)).isfinite().all()


def test_decode_steps_wait_for_nothing_but_their_tokens() -> None:
    """torch raises at whatever would make the host wait for the GPU, copies from memory that is not pinned included."""
    it = llm(max_num_seqs=4)
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, min_tokens=39),
    ]
    expected = tokens(it.generate([prompt(5), prompt(7)], params))
    groups = [it.engine.add_request(prompt(n), p) for n, p in zip((5, 7), params, strict=True)]
    for _ in range(4):
        it.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            it.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while it.engine.has_unfinished:
        it.engine.step()
    assert [group.first.output_token_ids for group in groups] == expected


def test_decode_steps_take_no_memory() -> None:
    it = llm(max_num_seqs=4)
    for i in range(3):
        it.engine.add_request(prompt(5, i), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(5):
        it.engine.step()
    before = torch.cuda.memory_stats(DEVICE)["num_device_alloc"]
    for _ in range(30):
        it.engine.step()
    assert torch.cuda.memory_stats(DEVICE)["num_device_alloc"] == before


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.8}, {"logprobs": 3}], ids=str)
def test_steps_ahead_give_the_same_tokens(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of many lengths that come and go, more than run at once."""
    params = [
        SamplingParams(
            **({"temperature": 0, "max_tokens": 3 + 5 * i % 29, "ignore_eos": i % 3 > 0, "seed": i} | options)
        )
        for i in range(24)
    ]
    prompts = [prompt(2 + 5 * i % 23, i) for i in range(24)]
    found = llm(max_num_seqs=7, dtype="float32", block_size=8).generate(prompts, params)
    monkeypatch.setattr(Runner, "runs_ahead", False)
    expected = llm(max_num_seqs=7, dtype="float32", block_size=8).generate(prompts, params)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.outputs[0].logprobs is None) == (other.outputs[0].logprobs is None)


def test_float32_is_exact_whatever_the_process_asks_for() -> None:
    it = Driver(DATA / "llama-rope", dtype="float32")
    expected = it.all_logits(prompt(64))
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        assert torch.equal(it.all_logits(prompt(64)), expected)
        assert torch.equal(Driver(DATA / "llama-rope", dtype="float32").all_logits(prompt(64)), expected)
        assert products.fp32_precision == "tf32"
        x = torch.randn(256, 256, device=DEVICE)
        assert ((x @ x).double() - x.double() @ x.double()).abs().max() > 1e-3  # the process has its wish
    finally:
        products.fp32_precision = before


def test_weights_are_on_the_gpu_once() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    it = runner("qwen3-h192-tied", enforce_eager=True, kv_cache_memory="1MiB", max_num_batched_tokens=16)
    ((_, product),) = it.model.lm_head._products
    head, embedding = product.weight, it.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr() and head.device == DEVICE
    assert it.dtype == torch.bfloat16
    num_bytes = sum(torch.Size(w.shape).numel() for w in it.model.weights().values()) * 2
    assert torch.cuda.max_memory_allocated(DEVICE) - before < num_bytes + (8 << 20)


def test_shapes_that_pass_the_pinned_buffers_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Driver(DATA / "llama-rope", dtype="float32").all_logits(prompt(9))
    monkeypatch.setattr("pelton.loader._PINNED_BYTES", 1000)  # less than some rows have
    assert torch.equal(Driver(DATA / "llama-rope", dtype="float32").all_logits(prompt(9)), expected)


# Memory.


def test_the_kv_cache_takes_what_the_utilization_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 2 GiB that nobody else changes meanwhile, and on which something else has 600 MiB."""
    gc.collect()
    torch.cuda.empty_cache()
    base, total, others = torch.cuda.memory_reserved(DEVICE), 2 << 30, 600 << 20

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return total - others - (torch.cuda.memory_reserved(device) - base), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    options = {"gpu_memory_utilization": 0.75, "max_num_seqs": 1024, "enforce_eager": True}
    it = runner(max_model_len=256, **options)
    assert it.kv_plan.reason == "gpu_memory_utilization=0.75"
    free, _ = mem_get_info(DEVICE)
    assert 0 <= total * 0.75 - (total - free) < 64 << 20
    key_cache, value_cache = it.kv_caches[0]
    assert key_cache.shape[0] == value_cache.shape[0] == it.num_blocks and key_cache.device == DEVICE
    num_blocks = it.num_blocks
    del it, key_cache, value_cache
    larger_steps = runner(max_model_len=256, **(options | {"max_num_batched_tokens": 1 << 17}))
    assert larger_steps.num_blocks < num_blocks


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"gpu_memory_utilization": 1e-4},
            ["nothing is left for the KV cache", "raise gpu_memory_utilization"],
        ),
        ({"kv_cache_memory": "10000GiB"}, ["KV cache 10000.00 GiB", "lower kv_cache_memory"]),
        ({"kv_cache_memory": "1KiB"}, ["kv_cache_memory is 1024 bytes", "give at least"]),
        (
            {"max_num_batched_tokens": 1 << 34, "kv_cache_memory": "60GiB"},
            ["out of GPU memory", "activations", "max_num_batched_tokens"],
        ),
    ],
    ids=["utilization", "kv_cache_memory", "small", "activations"],
)
def test_out_of_memory_at_the_start(options: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(CapacityError) as caught:
        runner(**options)
    for text in says:
        assert text in str(caught.value)
    assert runner(kv_cache_memory="1MiB").num_blocks > 2  # and the GPU is usable


@pytest.fixture
def a_hundred_mebibytes() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(DEVICE)
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved(DEVICE) + (100 << 20)) / total, DEVICE
    )
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


@pytest.mark.usefixtures("a_hundred_mebibytes")
@pytest.mark.parametrize(
    ("changes", "doing"),
    [
        ({"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 4}, "loading the weights"),
        ({}, "taking the KV cache"),
    ],
    ids=["weights", "cache"],
)
def test_torch_running_out_is_the_same_error(changes: dict[str, Any], doing: str, tmp_path: Path) -> None:
    import json

    config = json.loads((DATA / "llama-rope" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "kv_cache_memory": "4GiB", "max_num_batched_tokens": 64}
    with pytest.raises(
        CapacityError, match=f"out of GPU memory while {doing}: weights .*cuda:0 has .*What helps"
    ):
        Runner(EngineConfig(model=tmp_path, **options), load_model_config(tmp_path))


def test_an_error_while_recording_is_the_one_that_is_told() -> None:
    it = runner(enforce_eager=False, max_num_seqs=2, kv_cache_memory="1MiB")
    it.close()
    model = it.model

    def broken(step: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("stop")
        return model(step)

    it.model = broken  # type: ignore[assignment]
    with pytest.raises(KeyError, match="stop"):
        it._record_all([1])
    it.model = model
    it._record_all([1, 2])
    assert sorted(it._graphs) == [1, 2]


# Half precision.


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_are_within_the_bound(model: str, dtype: str) -> None:
    """Against the same weights in float32: docs/engine.md derives the bound.

    A layer rounds 12 times on the way to the residual stream, the head twice more: with independent errors of rms
    u / sqrt(3), u the unit roundoff, the relative error of the logits is about u sqrt((12 L + 2) / 3), times what the
    network amplifies, for which 4 is allowed.
    """
    exact = Driver(DATA / model, dtype="float32")
    half = Driver(DATA / model, dtype=dtype)
    unit = torch.finfo(getattr(torch, dtype)).eps / 2
    num_layers = exact.runner.model_config.num_layers
    for length in (1, 17, 90):
        expected = exact.all_logits(prompt(length)).double()
        error = (half.all_logits(prompt(length)).double() - expected).norm() / expected.norm()
        assert 0 < error < 4 * unit * ((12 * num_layers + 2) / 3) ** 0.5


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_logits_are_as_near_as_those_of_transformers(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    ids = prompt(90)

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        it = transformers.AutoModelForCausalLM.from_pretrained(DATA / model, dtype=dtype).to(DEVICE).eval()
        with torch.no_grad():
            return it(torch.tensor([ids], device=DEVICE), use_cache=False).logits[0].double().cpu()

    exact = theirs(torch.float64)
    ours = Driver(DATA / model, dtype="bfloat16").all_logits(ids).double()
    assert (ours - exact).norm() < 1.5 * (theirs(torch.bfloat16) - exact).norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu() -> None:
    it = llm(device="cuda:1")
    assert it.engine.runner.kv_caches[0][0].device == torch.device("cuda:1")
    assert tokens(it.generate([prompt(9)])) == tokens(llm(device="cuda:0").generate([prompt(9)]))
    assert torch.cuda.current_device() == 0


def test_there_is_no_such_gpu() -> None:
    with pytest.raises(PeltonError, match="device='cuda:99': torch finds"):
        llm(device="cuda:99")
