"""Where the engine runs, and how much of a GPU's memory it takes: decisions over plain values, tested without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest

from model_driver import DATA, ON_GPU
from pelton import LLM, ops
from pelton.config import EngineConfig, load_model_config
from pelton.device import check_device_name, choose_device
from pelton.errors import CapacityError, HardwareMismatch, InvalidValueError, PeltonError
from pelton.memory import MOST_SPARE_BLOCKS, GpuMemory, plan_gpu_kv_cache
from pelton.runner import Runner

GIB = 2**30


@pytest.mark.parametrize(
    ("wish", "backend", "gpus", "device"),
    [
        ("auto", "cpu", 0, "cpu"),
        ("auto", "cpu", 2, "cpu"),
        ("cpu", "cpu", 2, "cpu"),
        ("auto", "emulation", 1, "cpu"),
        ("cpu", "emulation", 0, "cpu"),
        ("auto", "cuda", 1, "cuda:0"),
        ("cuda", "cuda", 2, "cuda:0"),
        ("cuda:1", "cuda", 2, "cuda:1"),
        ("auto", "rocm", 1, "cuda:0"),
        ("cuda:0", "rocm", 1, "cuda:0"),
    ],
)
def test_the_library_decides(wish: str, backend: str, gpus: int, device: str) -> None:
    assert choose_device(wish, backend, "some-profile", lambda: gpus) == device


@pytest.mark.parametrize(
    ("wish", "backend", "gpus", "error", "says"),
    [
        (
            "cuda",
            "cpu",
            1,
            InvalidValueError,
            ["device='cuda'", "profile mine", "CPU kernels only", "cuda-sm90", "pip"],
        ),
        ("cuda:1", "emulation", 2, InvalidValueError, ["device='cuda:1'", "backend emulation"]),
        (
            "cpu",
            "cuda",
            1,
            InvalidValueError,
            ["device='cpu'", "GPU kernels only", "cpu-avx2", "pip install"],
        ),
        ("cpu", "rocm", 1, InvalidValueError, ["device='cpu'", "backend rocm"]),
        (
            "auto",
            "cuda",
            0,
            HardwareMismatch,
            ["profile mine", "no GPU that torch can use", "nvidia-smi", "cpu-avx2"],
        ),
        ("cuda:2", "cuda", 2, InvalidValueError, ["device='cuda:2'", "2 GPU(s)", "cuda:0 to cuda:1"]),
        ("cuda:1", "cuda", 1, InvalidValueError, ["cuda:0 alone"]),
    ],
)
def test_wishes_that_cannot_be(
    wish: str, backend: str, gpus: int, error: type[PeltonError], says: list[str]
) -> None:
    with pytest.raises(error) as caught:
        choose_device(wish, backend, "mine", lambda: gpus)
    for text in says:
        assert text in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:17"])
def test_device_names(name: str) -> None:
    assert check_device_name(name) == name
    assert EngineConfig(model="m", device=name).device == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpu", "'cuda'"),
        ("cuda:", ""),
        ("cuda:-1", ""),
        ("cuda:one", ""),
        ("", ""),
        (None, ""),
        (0, ""),
        ("cdua", "'cuda'"),
    ],
)
def test_other_device_names(name: Any, hint: str) -> None:
    with pytest.raises(InvalidValueError, match="device must be 'auto', 'cpu', 'cuda'") as caught:
        EngineConfig(model="m", device=name)
    assert repr(name) in str(caught.value) and hint in str(caught.value)


def test_the_other_device_is_refused_before_anything_is_read() -> None:
    wish = "cpu" if ON_GPU else "cuda"
    with pytest.raises(InvalidValueError, match=f"device='{wish}': this build of pelton .*{ops.backend()}"):
        LLM(DATA / "llama-rope", device=wish, skip_tokenizer_init=True)


@pytest.mark.parametrize("value", [0, -1, 1.01, math.nan, math.inf, "0.9", None, True])
def test_utilization_is_a_part(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="gpu_memory_utilization must be a number above 0"):
        EngineConfig(model="m", gpu_memory_utilization=value)


def test_load_format_is_known() -> None:
    with pytest.raises(InvalidValueError, match=r"load_format 'dumy' .*did you mean 'dummy'"):
        EngineConfig(model="m", load_format="dumy")


def memory(**sizes: Any) -> GpuMemory:
    whole = {"device": "cuda:0", "total": 80 * GIB, "utilization": 0.9, "others": GIB, "weights": 16 * GIB}
    return GpuMemory(**(whole | {"activations": 2 * GIB, "graphs": GIB} | sizes))


def plan(state: GpuMemory, **options: Any) -> Any:
    known = {"bytes_per_block": 2 << 20, "block_size": 16, "max_model_len": 8192, "max_num_seqs": 64}
    return plan_gpu_kv_cache(state, **(known | {"kv_cache_memory": None} | options))


def test_the_kv_cache_gets_what_is_left() -> None:
    assert memory().left == 72 * GIB - 20 * GIB
    assert plan(memory()).num_blocks == 52 * 512
    assert plan(memory(), reserve=GIB).num_blocks == 51 * 512
    assert plan(memory(others=31 * GIB)).num_blocks == 22 * 512  # other processes count
    assert plan(memory(utilization=1.0)).num_blocks == 60 * 512
    assert "gpu_memory_utilization=0.9" in plan(memory()).reason


def test_the_kv_cache_is_as_large_as_was_said() -> None:
    found = plan(memory(), kv_cache_memory=58 * GIB + 5)  # beyond the utilization, but there
    assert (found.num_blocks, found.reason) == (58 * 512, "kv_cache_memory")
    with pytest.raises(
        CapacityError,
        match=r"out of GPU memory: weights 16.00 GiB, KV cache 61.00 GiB.*lower kv_cache_memory",
    ):
        plan(memory(), kv_cache_memory=61 * GIB)
    with pytest.raises(
        CapacityError, match=r"max_model_len=8192 needs 1075838976 bytes .* kv_cache_memory is 1024 "
    ):
        plan(memory(), kv_cache_memory=1024)


def test_more_blocks_than_can_be_used_are_not_taken() -> None:
    found = plan(memory(), bytes_per_block=1024, max_model_len=100, max_num_seqs=3)
    assert found.num_blocks == MOST_SPARE_BLOCKS + 1
    found = plan(memory(), bytes_per_block=1024, max_model_len=16 * MOST_SPARE_BLOCKS, max_num_seqs=3)
    assert found.num_blocks == 3 * MOST_SPARE_BLOCKS + 1


@pytest.mark.parametrize(
    ("state", "options", "says", "says_not"),
    [
        (
            memory(weights=70 * GIB, activations=0, graphs=0, others=GIB // 2),
            {"max_model_len": 2**20},
            [
                "max_model_len=1048576 needs",
                "lower max_model_len to 12272 or less",
                "raise gpu_memory_utilization",
            ],
            ["enforce_eager", "max_num_batched_tokens", "end other processes"],
        ),
        (
            memory(weights=80 * GIB),
            {},
            [
                "nothing is left for the KV cache",
                "weights 80.00 GiB",
                "activations 2.00 GiB",
                "CUDA graphs 1.00 GiB",
            ]
            + ["max_num_batched_tokens", "enforce_eager=True", "smaller model", "cuda:0 has 80.00 GiB"],
            ["max_model_len"],
        ),
        (
            memory(others=60 * GIB),
            {},
            ["other processes and the CUDA context 60.00 GiB", "end other processes"],
            [],
        ),
    ],
    ids=["length", "weights", "others"],
)
def test_out_of_memory_says_the_sum_and_what_to_lower(
    state: GpuMemory, options: dict[str, Any], says: list[str], says_not: list[str]
) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(state, **options)
    message = str(caught.value)
    assert message.startswith("out of GPU memory: ")
    for text in says:
        assert text in message
    for text in says_not:
        assert text not in message


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_dummy_weights_need_a_config_alone(tmp_path: Any, dtype: str) -> None:
    (tmp_path / "config.json").write_text((DATA / "qwen3-h192-tied" / "config.json").read_text())
    options = {"load_format": "dummy", "dtype": dtype, "kv_cache_memory": "4MiB"}
    runner = Runner(EngineConfig(model=tmp_path, **options), load_model_config(tmp_path))
    weight = runner.model.embed_tokens.weight
    assert 0.015 < weight.float().std() < 0.025 and (runner.model.norm.weight == 1).all()
    again = Runner(EngineConfig(model=tmp_path, **options), load_model_config(tmp_path))
    assert (again.model.embed_tokens.weight == weight).all()
    llm = LLM(tmp_path, skip_tokenizer_init=True, **options)
    assert len(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids) == 16
