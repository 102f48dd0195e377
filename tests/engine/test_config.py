"""Model and engine configuration: what is read, what is refused, and the sizes of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_driver import DATA
from pelton.config import EngineConfig, ModelConfig, load_model_config
from pelton.errors import (
    CapacityError,
    CheckpointError,
    InvalidValueError,
    PeltonError,
    UnknownOptionError,
    UnsupportedError,
)
from pelton.memory import available_memory, format_bytes, parse_bytes, plan_kv_cache
from pelton.rope import cos_sin_table

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def read(**changes: Any) -> ModelConfig:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    return ModelConfig.from_dict(config, "config.json")


def test_defaults_of_llama() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.layer_windows) == (4, 16, (0, 0, 0))
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm) == (
        False,
    ) * 4
    assert (config.hidden_act, config.dtype, config.max_model_len, config.sliding_window) == (
        "silu",
        None,
        256,
        0,
    )
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": 2, "head_dim": 32}, {"num_kv_heads": 2, "head_dim": 32, "head_size": 32}),
        ({"head_dim": 20, "hidden_size": 50}, {"head_dim": 20}),
        ({"attention_bias": True}, {"attention_bias": True, "attention_output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True, "attention_bias": False}),
        ({"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
        ({"hidden_act": "gelu_new"}, {"hidden_act": "gelu_tanh"}),
        ({"torch_dtype": "float16"}, {"dtype": "float16"}),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, {"dtype": "bfloat16"}),
        ({"dtype": "float64"}, {"dtype": "float32"}),
        ({"rms_norm_eps": ...}, {"rms_norm_eps": 1e-6}),
        ({"architectures": ["LLaMAForCausalLM"]}, {"architecture": "LlamaForCausalLM"}),
        (
            {"architectures": ..., "model_type": "qwen3"},
            {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
        ),
        ({"eos_token_id": 3, "bos_token_id": None}, {"eos_token_ids": (3,), "bos_token_ids": ()}),
        ({"eos_token_id": [3, 4, 3]}, {"eos_token_ids": (3, 4)}),
        # Llama has no window, whatever the config says
        ({"sliding_window": 7}, {"layer_windows": (0, 0, 0)}),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, {"attention_bias": False}),
        ({"architectures": ["MistralForCausalLM"]}, {"layer_windows": (4096,) * 3, "sliding_window": 4096}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"sliding_window": 0}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9},
            {"layer_windows": (0, 0, 0), "attention_bias": True, "attention_output_bias": False},
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            {"layer_windows": (0, 9, 9), "sliding_window": 0},
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            {"layer_windows": (9, 0, 9)},
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"head_dim": 128, "qk_norm": True}),
    ],
)
def test_what_a_config_means(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(**changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            UnsupportedError,
            "GPT2LMHeadModel is not supported.*LlamaFor",
        ),
        ({"architectures": []}, UnsupportedError, "model_type None is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quantized with 'fp8'"),
        ({"hidden_act": "relu"}, UnsupportedError, "'relu' is not supported; Pelton has silu"),
        ({"dtype": "float8_e4m3fn"}, UnsupportedError, "float8_e4m3fn"),
        ({"rope_scaling": {"type": "spiral"}}, UnsupportedError, "'spiral'"),
        ({"auto_map": {"AutoModel": "modeling.Evil"}}, CheckpointError, "never runs code"),
        ({"hidden_size": ...}, CheckpointError, "hidden_size is missing"),
        ({"max_position_embeddings": ...}, CheckpointError, "max_position_embeddings is missing"),
        ({"vocab_size": 0}, CheckpointError, "vocab_size must be a positive whole number, found 0"),
        ({"num_hidden_layers": 2.5}, CheckpointError, "num_hidden_layers must be .* found 2.5"),
        ({"num_hidden_layers": True}, CheckpointError, "num_hidden_layers must be .* found True"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_attention_heads=4 is not a multiple"),
        ({"hidden_size": 66}, CheckpointError, "hidden_size=66 is not a multiple"),
        ({"rms_norm_eps": "small"}, CheckpointError, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, CheckpointError, "eos_token_id must be a token id"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            CheckpointError,
            "sliding_window must be",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 3,
            },
            UnsupportedError,
            "chunked_attention",
        ),
    ],
)
def test_refused_configs_name_file_and_key(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"config.json: .*{message}"):
        read(**changes)


HUGE = 10**400  # JSON's integers have no limit
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", True),
        ("architectures", [["LlamaForCausalLM"]]),
        ("hidden_act", ["silu"]),
        ("num_hidden_layers", 10**9),  # would take memory before the weights are looked at
        ("num_hidden_layers", HUGE),
        ("vocab_size", HUGE),
        ("max_position_embeddings", 2**31),
        ("head_dim", 10**9),
        ("rms_norm_eps", HUGE),
        ("rms_norm_eps", None),
        ("rope_theta", HUGE),
        ("partial_rotary_factor", HUGE),
        ("tie_word_embeddings", "false"),
        ("attention_bias", 1),
        ("mlp_bias", []),
    ],
)
def test_values_of_a_wrong_kind_or_size_are_named(key: str, value: Any) -> None:
    with pytest.raises(PeltonError, match=key.replace("head_dim", "head")) as caught:
        read(**{key: value})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("key", "value"),
    [("layer_types", 3), ("max_window_layers", "x"), ("use_sliding_window", "no"), ("sliding_window", 0.5)],
)
def test_wrong_kinds_of_window_values_are_named(key: str, value: Any) -> None:
    config = {"sliding_window": 8, "use_sliding_window": True, "architectures": ["Qwen2ForCausalLM"]}
    with pytest.raises(PeltonError, match=key):
        read(**{**config, key: value})


def test_max_window_layers_null_is_the_default() -> None:
    config = read(
        architectures=["Qwen2ForCausalLM"],
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=None,
        num_hidden_layers=30,
    )
    assert config.layer_windows == (0,) * 28 + (8,) * 2


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize(
    "key",
    [
        "factor",
        "rope_theta",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1, 1.0, 1e-300, 1e300, HUGE, float("nan"), "x", [], None])
def test_rope_values_give_a_finite_rotation_or_a_named_error(rope_type: str, key: str, value: Any) -> None:
    scaling = {"rope_type": rope_type, **ROPES[rope_type], key: value}
    try:
        config = read(rope_parameters=scaling)
    except PeltonError as error:
        assert "config.json" in str(error)
    else:
        assert 1 <= config.max_model_len < 2**31
        table = cos_sin_table(config.rope, min(config.max_model_len, 300))
        assert bool(table.isfinite().all())


def test_eos_of_generation_config_joins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "bos_token_id": 1}')
    config = load_model_config(str(tmp_path))
    assert (config.eos_token_ids, config.bos_token_ids) == ((2, 3), (1,))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "\x00", "[" * 100_000], ids=["empty", "cut", "list", "binary", "deep"]
)
def test_damaged_json_is_named(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/{name}: .*download"):
        load_model_config(tmp_path)


def test_missing_model_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/model: no such folder or file.*download the model first"):
        load_model_config("org/model")
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        load_model_config(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model.onnx: neither a folder"):
        load_model_config(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model must be"),
        ({"model": 3}, "model must be"),
        ({"tokenizer": 3}, "tokenizer must be"),
        ({"dtype": "float64"}, "dtype 'float64' is none of auto, float32"),
        ({"dtype": "floot32"}, "did you mean 'float32'"),
        ({"max_model_len": 0}, "max_model_len must be a whole number of at least 1, found 0"),
        ({"max_num_seqs": None}, "max_num_seqs must be"),
        ({"max_num_seqs": True}, "max_num_seqs must be"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens must be .* found 1.5"),
        ({"block_size": 17}, "block_size=17 .*8, 16, 32, 64; the nearest is 16"),
        ({"block_size": 1000}, "the nearest is 64"),
        ({"block_size": "16"}, "block_size='16' is not supported"),
        ({"seed": -1.0}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory must be .*\"2GiB\".* found 'much'"),
        ({"kv_cache_memory": 0}, "kv_cache_memory must be positive"),
        ({"kv_cache_memory": float("nan")}, "kv_cache_memory must be"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, found 1"),
        ({"progress": True}, "progress must be a function"),
    ],
)
def test_bad_engine_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        EngineConfig.from_options(**({"model": "m"} | options))


def test_unknown_options() -> None:
    with pytest.raises(UnknownOptionError, match=r"'max_model_length'.*did you mean 'max_model_len'"):
        EngineConfig.from_options(model="m", max_model_length=3)
    with pytest.raises(UnknownOptionError, match=r"SamplingParams\(temperature=...\)"):
        EngineConfig.from_options(model="m", temperature=0.5)
    with pytest.raises(InvalidValueError, match="needs a model"):
        EngineConfig.from_options()


def test_options_are_normalized() -> None:
    torch = pytest.importorskip("torch")
    config = EngineConfig(model=Path("m"), dtype=torch.bfloat16, kv_cache_memory="1.5 MiB")
    assert (config.dtype, config.kv_cache_memory) == ("bfloat16", 3 * 2**19)


def test_max_model_len_is_checked_against_the_checkpoint() -> None:
    model = load_model_config(DATA / "llama-rope")
    assert EngineConfig(model="m").resolve(model).max_model_len == 256
    assert EngineConfig(model="m").resolve(model).dtype == "bfloat16"
    assert EngineConfig(model="m", max_model_len=10, dtype="float16").resolve(model).max_model_len == 10
    with pytest.raises(InvalidValueError, match=r"max_model_len=257 is more than the 256 .*use 256 or less"):
        EngineConfig(model="m", max_model_len=257).resolve(model)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5),
        (5.0, 5),
        ("5", 5),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5KB", 1500),
        ("3m", 3_000_000),
        ("7B", 7),
    ],
)
def test_parse_bytes(value: Any, expected: int) -> None:
    assert parse_bytes(value, "x") == expected


@pytest.mark.parametrize("value", ["9" * 400, "9" * 400 + "GiB", float("inf"), float("nan")])
def test_sizes_beyond_all_numbers(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="x must be"):
        parse_bytes(value, "x")
    assert parse_bytes(HUGE, "x") == HUGE  # refused later, with the memory there is


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\udcff"])
def test_names_that_no_file_can_have(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{name[:100]}.*(cannot be read|no such folder)"):
        load_model_config(name)


@given(st.text() | st.floats() | st.none() | st.booleans() | st.integers(0))
def test_parse_bytes_gives_a_number_or_a_named_error(value: Any) -> None:
    try:
        assert parse_bytes(value, "x") >= 0 or isinstance(value, float)
    except PeltonError as error:
        assert str(error).startswith("x must be")


@given(st.integers(0, 2**50))
def test_format_bytes_can_be_read_back(count: int) -> None:
    text = format_bytes(count).removesuffix(" bytes")
    assert parse_bytes(text, "x") == pytest.approx(count, rel=0.01)


def plan(**changes: Any) -> Any:
    sizes = {
        "bytes_per_block": 100,
        "block_size": 16,
        "max_model_len": 160,
        "max_num_seqs": 4,
        "kv_cache_memory": None,
        "available": 1_000_000,
    }
    return plan_kv_cache(**(sizes | changes))


def test_kv_cache_sizes() -> None:
    assert plan().num_blocks == 4 * 10 + 1  # what the sequences can use
    assert plan(available=8000).num_blocks == 20  # a quarter of the free memory
    assert plan(available=2000).num_blocks == 11  # one sequence needs more than the quarter
    assert plan(kv_cache_memory=1100).num_blocks == 11
    assert plan(kv_cache_memory=10_050).num_blocks == 100  # asked for: taken as it is
    assert plan(kv_cache_memory=10_050).num_bytes == 10_000


def test_more_memory_for_the_kv_cache_than_there_is() -> None:
    with pytest.raises(CapacityError, match=r"kv_cache_memory is 1125899906842624 bytes .* free"):
        plan(kv_cache_memory=2**50)


@pytest.mark.parametrize("changes", [{"kv_cache_memory": 1099}, {"available": 1200}])
def test_kv_budget_for_less_than_one_sequence(changes: dict[str, Any]) -> None:
    with pytest.raises(CapacityError) as error:
        plan(**changes)
    message = str(error.value)
    assert "max_model_len=160 needs 1100 bytes" in message
    assert str(next(iter(changes.values()))) in message  # what was found
    fits = int(message.split("lower max_model_len to ")[1].split()[0])
    assert plan(max_model_len=fits, **changes).num_blocks == fits // 16 + 1
    with pytest.raises(CapacityError):
        plan(max_model_len=fits + 1, **changes)


@given(
    st.integers(1, 10**6),
    st.sampled_from([8, 16]),
    st.integers(1, 10**4),
    st.integers(1, 99),
    st.integers(0, 10**9),
)
def test_a_planned_cache_holds_one_sequence_and_stays_in_memory(
    bytes_per_block: int, block_size: int, max_model_len: int, max_num_seqs: int, available: int
) -> None:
    try:
        cache = plan(
            bytes_per_block=bytes_per_block,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            available=available,
        )
    except CapacityError:
        assert (-(-max_model_len // block_size) + 1) * bytes_per_block > 0.79 * available
        return
    assert (cache.num_blocks - 1) * block_size >= max_model_len
    assert cache.num_bytes <= 0.8 * available


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemFree: 1 kB\nMemAvailable:  1000 kB\n"}, 1_024_000),
        ({"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "2000\n"}, 3000),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "2000\n"}, 1_024_000),
        ({"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "20"}, 0),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
            },
            8000,
        ),
    ],
)
def test_available_memory(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, content in ({"proc/meminfo": "MemAvailable: 1000 kB"} | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_memory(tmp_path) == expected


def test_available_memory_of_this_machine() -> None:
    assert available_memory() > 2**20
    assert available_memory(Path("/nonexistent")) > 2**20
