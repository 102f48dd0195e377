"""quantization_config: which layer is quantized and how, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.config import EngineConfig
from pelton.errors import CheckpointError, PeltonError, UnsupportedError
from pelton.quant.canonical import Scheme
from pelton.quant.settings import read_quantization
from quant_writers import AWQ, CT, GPTQ

Q, V, DOWN, HEAD = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.v_proj",
    "model.layers.11.mlp.down_proj",
    "lm_head",
)
G4 = Scheme("gptq", 4, 32, False, zeros_less_one=True)
A4 = Scheme("awq", 4, 32, False)
C4 = Scheme("compressed-tensors", 4, 32, False)
C8 = Scheme("compressed-tensors", 8, -1, True)


def ct(groups: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CT)) | values
    for name, group in (groups or {}).items():
        config["config_groups"].setdefault(name, {}).update(group)
    return config


W4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
LAYERS = [
    # config, scheme of Q, V, DOWN, HEAD
    (GPTQ, [G4, G4, G4, None]),
    (GPTQ | {"lm_head": True}, [G4, G4, G4, G4]),
    (
        GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "sym": True},
        [*[Scheme("gptq", 8, 32, True)] * 3, None],
    ),
    (GPTQ | {"desc_act": True, "group_size": -1}, [*[Scheme("gptq", 4, -1, False, "equal", True)] * 3, None]),
    (
        GPTQ | {"dynamic": {r"-:.*\.0\.": {}, r"+:.*v_proj": {"bits": 8}, r".*mlp": {"group_size": 128}}},
        [
            None,
            Scheme("gptq", 8, 32, False, zeros_less_one=True),
            Scheme("gptq", 4, 128, False, zeros_less_one=True),
            None,
        ],
    ),
    (
        GPTQ | {"dynamic": {"lm_head": {"bits": 8}}},
        [G4, G4, G4, Scheme("gptq", 8, 32, False, zeros_less_one=True)],
    ),
    (
        GPTQ
        | {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.v_proj"], ["mlp.gate_proj"]]},
        [G4, G4, None, None],
    ),
    (AWQ, [A4, A4, A4, None]),
    (GPTQ | {"checkpoint_format": "gptq", "format": "gptq", "method": "gptq"}, [G4, G4, G4, None]),
    (GPTQ | {"checkpoint_format": None, "format": "gptq", "method": "rtn"}, [G4, G4, G4, None]),
    (GPTQ | {"dynamic": {"x": {"damp_percent": 0.1, "mse": 2.4, "adapter": {}}}}, [G4, G4, G4, None]),
    (
        AWQ | {"version": "GEMM", "format": "gemm", "w_bit": 4, "q_group_size": 32, "method": "awq"},
        [A4, A4, A4, None],
    ),
    (ct({"group_1": {"targets": ["Linear"], "weights": W4}}), [C4, C4, C4, None]),
    (AWQ | {"modules_to_not_convert": None}, [A4, A4, A4, None]),
    (AWQ | {"modules_to_not_convert": ["self_attn"]}, [None, None, A4, None]),
    (AWQ | {"modules_to_not_convert": ["model.layers.1."]}, [A4, None, A4, None]),
    (AWQ | {"modules_to_not_convert": ["layers.11.mlp.down_proj"]}, [A4, A4, None, None]),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, [A4, A4, A4, None]),
    (ct(), [C4, C4, C4, None]),
    (ct(ignore=[]), [C4, C4, C4, C4]),
    (ct(ignore=["re:.*self_attn.*", HEAD]), [None, None, C4, None]),
    (ct(ignore=["re:self_attn"]), [C4, C4, C4, C4]),  # patterns match from the beginning
    (ct(ignore=["Linear"]), [None, None, None, None]),
    (ct({"group_0": {"targets": [Q]}}), [C4, None, None, None]),
    (
        ct(
            {"group_1": {"targets": ["re:.*mlp.*", V], "weights": W8}}
        ),  # names before patterns before classes
        [C4, C8, C8, None],
    ),
    (
        ct({"group_1": {"targets": [V], "weights": W4 | {"actorder": "group"}}}),
        [C4, Scheme("compressed-tensors", 4, 32, False, "equal"), C4, None],
    ),
    (ct({"group_0": {"weights": W4 | {"actorder": "weight"}}}), [C4, C4, C4, None]),
    (ct({"group_0": {"format": "pack-quantized"}}, format="mixed-precision"), [C4, C4, C4, None]),
    (ct(sparsity_config={}, kv_cache_scheme=None, transform_config={}), [C4, C4, C4, None]),
    (ct(sparsity_config={"format": "dense"}), [C4, C4, C4, None]),
]


@pytest.mark.parametrize(("config", "schemes"), LAYERS)
def test_schemes(config: dict[str, Any], schemes: list[Scheme | None]) -> None:
    read = read_quantization(config, "config.json")
    rules = [read.rule(name) for name in (Q, V, DOWN, HEAD)]
    assert [rule.scheme if rule else None for rule in rules] == schemes


def test_a_text_that_is_part_of_other_names_yields_to_the_file() -> None:
    read = read_quantization(
        AWQ | {"modules_to_not_convert": ["mlp.down", "self_attn.q_proj"]}, "config.json"
    )
    assert read.quantized(DOWN) == A4
    assert read.quantized(Q) is None


REFUSED = [
    (
        {"quant_method": "fp8"},
        UnsupportedError,
        "quant_method: weights quantized with 'fp8' are not supported",
    ),
    ({"quant_method": "gptqq", "bits": 4}, UnsupportedError, "did you mean 'gptq'"),
    ({"quant_method": 3}, UnsupportedError, "quantized with 3"),
    ({"bits": 4}, CheckpointError, "quant_method is missing"),
    ([4], CheckpointError, "must be an object, found .4."),
    (GPTQ | {"bits": 3}, UnsupportedError, "bits: weights of 3 bits are not supported; Pelton has 4 and 8"),
    (GPTQ | {"bits": "4"}, CheckpointError, "bits must be a whole number, found '4'"),
    (GPTQ | {"bits": None}, CheckpointError, "bits must be a whole number, found None"),
    (GPTQ | {"group_size": 48}, CheckpointError, "group_size must be one of -1, 16, .* found 48"),
    (GPTQ | {"group_size": 0}, CheckpointError, "group_size must be one of .* found 0"),
    (GPTQ | {"group_size": True}, CheckpointError, "group_size must be one of .* found True"),
    (GPTQ | {"sym": "yes"}, CheckpointError, "sym must be true or false, found 'yes'"),
    (GPTQ | {"checkpoint_format": "marlin"}, UnsupportedError, "checkpoint_format: the packing 'marlin'"),
    (GPTQ | {"checkpoint_format": ["gptq"]}, UnsupportedError, "checkpoint_format: the packing .'gptq'."),
    (
        GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"},
        CheckpointError,
        "checkpoint_format is 'gptq', but format is 'gptq_v2'",
    ),
    (GPTQ | {"method": "awq"}, CheckpointError, "quant_method is 'gptq', but method is 'awq'"),
    (AWQ | {"method": "gptq"}, CheckpointError, "quant_method is 'awq', but method is 'gptq'"),
    (AWQ | {"format": "gemv"}, CheckpointError, "version is 'gemm', but format is 'gemv'"),
    (AWQ | {"checkpoint_format": "marlin"}, CheckpointError, "version is 'gemm', but checkpoint_format is"),
    (AWQ | {"w_bit": 8}, CheckpointError, "bits is 4, but w_bit is 8"),
    (AWQ | {"q_group_size": 128}, CheckpointError, "group_size is 32, but q_group_size is 128"),
    (
        GPTQ | {"dynamic": {"a": {"bitz": 8}}},
        CheckpointError,
        "the key 'bitz' is unknown .did you mean 'bits'",
    ),
    (GPTQ | {"dynamic": {"a": {"groupsize": 64}}}, CheckpointError, "'groupsize' .* mean 'group_size'"),
    (
        ct({"group_1": {"targets": ["Linear"], "weights": W8}}),
        CheckpointError,
        "group_0 'Linear' is 4 bit, group size 32, .* but config_groups.group_1 'Linear' is 8 bit, group size -1",
    ),
    (GPTQ | {"pack_dtype": "int16"}, UnsupportedError, "pack_dtype: words of 'int16'"),
    (GPTQ | {"dynamic": ["a"]}, CheckpointError, "dynamic must map patterns"),
    (GPTQ | {"dynamic": {"+:(": {}}}, CheckpointError, "'.' is no regular expression"),
    (GPTQ | {"dynamic": {"-:(([a-z._0-9])+)+$!": {}}}, CheckpointError, r"dynamic.* could take forever"),
    (GPTQ | {"dynamic": {"(" * 2000 + ")" * 2000: {}}}, CheckpointError, "is no regular expression"),
    (GPTQ | {"dynamic": {"a": {"bits": 2}}}, UnsupportedError, r"dynamic\['a'\].bits: weights of 2 bits"),
    (AWQ | {"bits": 8}, UnsupportedError, "bits: AWQ weights of 8 bits are not supported; Pelton has 4"),
    (AWQ | {"version": "gemv"}, UnsupportedError, "version: the AWQ packing 'gemv' is not supported"),
    (AWQ | {"group_size": "128"}, CheckpointError, "group_size must be one of"),
    (
        AWQ | {"modules_to_not_convert": "lm_head"},
        CheckpointError,
        "modules_to_not_convert must be a list of names",
    ),
    (ct(format="int-quantized"), UnsupportedError, "group_0.format: the packing 'int-quantized'"),
    (ct(format="marlin-24"), UnsupportedError, "the packing 'marlin-24'"),
    (ct({"group_0": {"format": "float-quantized"}}), UnsupportedError, "the packing 'float-quantized'"),
    (ct(quantization_status="frozen"), UnsupportedError, "quantization_status: 'frozen'"),
    (ct(kv_cache_scheme={"num_bits": 8}), UnsupportedError, "kv_cache_scheme: is not supported"),
    (
        ct(sparsity_config={"format": "sparse-24-bitmask"}),
        UnsupportedError,
        "sparsity_config: sparse weights",
    ),
    (ct(config_groups={}), CheckpointError, "config_groups must be an object with groups"),
    (ct(config_groups={"a": "W4A16"}), CheckpointError, "config_groups.a must be an object"),
    (ct({"group_0": {"input_activations": W8}}), UnsupportedError, "quantized activations are not supported"),
    (ct({"group_0": {"weights": W4 | {"type": "float"}}}), UnsupportedError, "weights.type: 'float'"),
    (ct({"group_0": {"weights": W4 | {"strategy": "block"}}}), UnsupportedError, "weights.strategy: 'block'"),
    (ct({"group_0": {"weights": W4 | {"num_bits": 2}}}), UnsupportedError, "num_bits: weights of 2 bits"),
    (ct({"group_0": {"weights": W4 | {"group_size": 48}}}), CheckpointError, "group_size must be one of"),
    (ct({"group_0": {"weights": W4 | {"actorder": "random"}}}), UnsupportedError, "actorder: 'random'"),
    (ct({"group_0": {"targets": ["re:["]}}), CheckpointError, "is no regular expression"),
    (ct({"group_0": {"targets": ["re:(.*)*x"]}}), CheckpointError, "targets: .* could take forever"),
    (ct(ignore=["re:(a|a)+$"]), CheckpointError, "ignore: .* could take forever"),
    (ct({"group_0": {"targets": "Linear"}}), CheckpointError, "targets must be a list of names"),
    (ct({"group_0": {"weights": None}}), CheckpointError, "weights must be an object, found None"),
]


@pytest.mark.parametrize(("config", "error", "message"), REFUSED)
def test_refused(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"model/config.json: quantization_config.*{message}"):
        read_quantization(config, "model/config.json")


KEYS = sorted(
    {key for config, _ in LAYERS for key in config} | {"dynamic", "pack_dtype", "weights", "targets"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.sampled_from(["gptq", "re:(", "Linear", "group", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([GPTQ, AWQ, CT]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(sorted(W4) + ["actorder", "targets"]), VALUES, max_size=2),
)
def test_any_values_are_read_or_refused(
    base: dict[str, Any], changes: dict[str, Any], weights: dict[str, Any]
) -> None:
    config = json.loads(json.dumps(base)) | changes
    group = config.get("config_groups")
    if isinstance(group, dict) and isinstance(group.get("group_0"), dict):
        group["group_0"]["weights"] = W4 | weights
    try:
        read = read_quantization(config, "config.json")
    except PeltonError as error:
        assert str(error).startswith("config.json: quantization_config")
        return
    for name in (Q, V, DOWN, HEAD):
        rule = read.rule(name)
        assert rule is None or rule.scheme is None or rule.scheme.bits in (4, 8)


@pytest.mark.parametrize("value", ["awq", "gptq", "marlin", "compressed-tensors", None])
def test_the_engine_takes_the_names(value: str | None) -> None:
    assert EngineConfig(model="x", quantization=value).quantization == value
