"""Loading quantized models: what is fused, what is left alone, and what is refused before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pelton.runner as runner
import quant_writers as writers
from model_driver import ON_GPU, Driver
from pelton import LLM, build_info, loader
from pelton.errors import CheckpointError, InvalidValueError, MissingFeature, UnsupportedError
from pelton.quant import checkpoint
from quant_engine import ALL, reference_products
from quant_writers import AWQ, CT, GPTQ, Quantized, Recipe, Shape, write_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def logits(folder: Path, **options: Any) -> torch.Tensor:
    driver = Driver(folder, **{"dtype": "float32", "max_model_len": 32} | options)
    sequence = driver.sequence(IDS)
    last = len(IDS) - 1
    return torch.cat([driver.step((sequence, last, last)), driver.step((sequence, 1, 1))])


def gptq(name: str, weight: Quantized) -> dict[str, torch.Tensor]:
    return writers.gptq(weight)


def awq(name: str, weight: Quantized) -> dict[str, torch.Tensor]:
    return writers.awq(weight)


def every(**options: Any) -> Recipe:
    """All layers but lm_head with these options."""
    return lambda name: None if name == "lm_head" else options


def but(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """`recipe`, with other options for layers whose names hold a key."""
    return lambda name: next((value for key, value in changes.items() if key in name), recipe(name))


def changed(config: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    return {**config, **values}


def ct_config(**weights: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CT))
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


MODELS = {
    "gptq": (Shape(), GPTQ, every(), gptq),
    "gptq-v2": (
        Shape(),
        changed(GPTQ, checkpoint_format="gptq_v2"),
        every(),
        lambda name, weight: writers.gptq(weight, version=2),
    ),
    "gptq-symmetric": (Shape(), changed(GPTQ, sym=True), every(symmetric=True), gptq),
    "gptq-v2-symmetric": (
        Shape(),
        changed(GPTQ, sym=True, checkpoint_format="gptq_v2"),
        every(symmetric=True),
        lambda name, weight: writers.gptq(weight, version=2),
    ),
    "gptq-sym-unsaid": (Shape(), {k: v for k, v in GPTQ.items() if k != "sym"}, every(), gptq),
    "awq-symmetric": (Shape(), changed(AWQ, zero_point=False), every(symmetric=True), awq),
    "gptq-8-bit": (Shape(), changed(GPTQ, bits=8), every(bits=8), gptq),
    "gptq-short-last-group": (
        Shape(hidden_size=72),
        changed(GPTQ, group_size=64),
        every(group_size=64),
        gptq,
    ),
    "gptq-one-group": (Shape(), changed(GPTQ, group_size=-1), every(group_size=-1), gptq),
    # q_proj, k_proj, v_proj have an order each, and two products at least cannot be joined
    "gptq-order": (Shape(), changed(GPTQ, desc_act=True), every(order="equal"), gptq),
    "gptq-any-order": (Shape(), changed(GPTQ, desc_act=True), every(order="any"), gptq),
    "gptq-lm-head": (Shape(), changed(GPTQ, lm_head=True), lambda name: {}, gptq),
    "gptq-parts-unquantized": (
        Shape(),
        GPTQ,
        but(every(), {"0.self_attn.k_proj": None, "1.self_attn.v_proj": None, "0.mlp.up_proj": None}),
        gptq,
    ),
    "gptq-parts-of-other-bits-and-groups": (
        Shape(),
        changed(
            GPTQ,
            dynamic={
                r"+:.*\.0\.self_attn\.k_proj": {"bits": 8},
                r".*\.1\..*up_proj": {"group_size": 16},
                "-:.*down_proj": {},
            },
        ),
        but(
            every(),
            {"0.self_attn.k_proj": {"bits": 8}, "1.mlp.up_proj": {"group_size": 16}, "down_proj": None},
        ),
        gptq,
    ),
    "gptq-some-symmetric": (Shape(), GPTQ, but(every(), {"k_proj": {"symmetric": True}}), gptq),
    "gptq-bf16-and-fp16-scales": (Shape(), GPTQ, but(every(), {"k_proj": {"dtype": torch.bfloat16}}), gptq),
    "gptq-bias": (
        Shape(architecture="Qwen2ForCausalLM"),
        GPTQ,
        every(),
        gptq,
    ),
    "gptq-bias-of-zeros": (
        Shape(),
        GPTQ,
        every(),
        lambda name, weight: writers.gptq(weight) | {"bias": torch.zeros(weight.q.shape[0])},
    ),
    "awq": (Shape(), AWQ, every(), awq),
    "awq-not-converted": (
        Shape(),
        changed(AWQ, modules_to_not_convert=["self_attn.o_proj", "model.layers.1.mlp"]),
        but(every(), {"o_proj": None, "1.mlp": None}),
        awq,
    ),
    "awq-name-within-a-name": (Shape(), changed(AWQ, modules_to_not_convert=["mlp.gate"]), every(), awq),
    "ct": (Shape(), CT, every(), lambda name, weight: writers.compressed(weight)),
    "ct-symmetric": (
        Shape(),
        ct_config(symmetric=True),
        every(symmetric=True),
        lambda name, weight: writers.compressed(weight, symmetric=True),
    ),
    "ct-odd-sizes": (
        Shape(hidden_size=70, intermediate_size=99),
        CT,
        every(),
        lambda name, weight: writers.compressed(weight),
    ),
    "ct-channel-int8": (
        Shape(),
        ct_config(num_bits=8, strategy="channel", group_size=None),
        every(bits=8, group_size=-1),
        lambda name, weight: writers.compressed(weight),
    ),
    "ct-order": (
        Shape(),
        ct_config(actorder="group"),
        every(order="equal"),
        lambda name, weight: writers.compressed(weight, order=True),
    ),
    "ct-ignore-pattern": (
        Shape(),
        changed(CT, ignore=["lm_head", r"re:.*\.0\.self_attn\.(q|v)_proj", "model.layers.1.mlp.gate_proj"]),
        but(every(), {"0.self_attn.q": None, "0.self_attn.v": None, "1.mlp.gate_proj": None}),
        lambda name, weight: writers.compressed(weight),
    ),
}


def write(folder: Path, name: str) -> Path:
    shape, config, recipe, writer = MODELS[name]
    packed = write_model(folder, shape, config, recipe, writer)
    if shape.architecture == "Qwen2ForCausalLM":
        for kind in ("packed", "plain"):
            tensors = load_file(folder / kind / "model.safetensors")
            generator = torch.Generator().manual_seed(9)
            for layer, (linear, (n, _)) in enumerate(shape.linears().items()):
                if linear.endswith(("q_proj", "k_proj", "v_proj")):
                    generator.manual_seed(layer)
                    tensors[f"{linear}.bias"] = torch.randn(n, generator=generator)
            save_file(tensors, folder / kind / "model.safetensors")
    return packed


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_dequantized_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, name)
    expected = logits(tmp_path / "plain")
    torch.testing.assert_close(logits(packed), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_kernels(name: str, tmp_path: Path) -> None:
    """With whatever kernels the library has for each model."""
    features = checkpoint.built_features()
    config = MODELS[name][1]
    if not features & {"awq", "gptq"}:
        pytest.skip("this library has no kernels for quantized weights")
    dtype = "float16" if ON_GPU else "float32"
    packed = write(tmp_path, name)
    expected = logits(tmp_path / "plain", dtype=dtype)
    bound = 2e-2 if ON_GPU else 2e-3
    found = logits(packed, dtype=dtype, quantization=config["quant_method"])
    torch.testing.assert_close(found, expected, rtol=0, atol=bound * float(expected.abs().max()))


def test_shards_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of one layer, and those of the layers that make one product, may lie in several files."""
    reference_products(monkeypatch)
    packed = write(tmp_path, "gptq")
    expected = logits(packed)
    tensors = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    names = sorted(tensors, key=lambda name: name[::-1])
    files = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, packed / file)
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(logits(packed), expected)


def test_settings_in_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, "gptq")
    expected = logits(packed)
    config = json.loads((packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (packed / "config.json").write_text(json.dumps(config))
    (packed / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(logits(packed), expected)


@pytest.mark.parametrize(
    ("name", "file", "settings", "message"),
    [
        (
            "gptq",
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "sym": False, "damp_percent": 0.1},
            "",
        ),
        ("gptq", "quant_config.json", {"w_bit": 8}, ""),  # another method's file
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, ""),
        ("gptq", "quantize_config.json", {"bits": 8}, "bits is 4, but .*quantize_config.json says 8"),
        ("gptq", "quantize_config.json", {"desc_act": True}, "desc_act is False, but .* says True"),
        ("awq", "quant_config.json", {"q_group_size": 128}, "group_size is 32, but .* says 128"),
    ],
)
def test_settings_in_two_files(
    name: str,
    file: str,
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, name)
    expected = None if message else logits(packed)
    (packed / file).write_text(json.dumps(settings))
    if expected is not None:
        assert torch.equal(logits(packed), expected)
        return
    with pytest.raises(CheckpointError, match=f"^{packed}/config.json: quantization_config.{message}"):
        logits(packed)


def test_a_head_that_should_be_quantized_and_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, "gptq")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["lm_head"] = True
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"lm_head: true says that 'lm_head' is quantized, but .*lm_head.weight"
    ):
        logits(packed)


@pytest.mark.parametrize("name", ["gptq", "gptq-order", "awq", "ct", "ct-symmetric"])
def test_random_weights_need_no_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, name)
    (packed / "model.safetensors").unlink()
    found = logits(packed, load_format="dummy")
    assert found.isfinite().all()
    assert found.std() > 1e-3


def test_progress_counts_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    calls: list[tuple[int, int]] = []
    packed = write(tmp_path, "ct")
    logits(packed, progress=lambda done, total: calls.append((done, total)))
    total = sum(tensor.numel() for tensor in load_file(packed / "model.safetensors").values())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


# --- what is refused ---

Q, V, LM = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "lm_head"


def set_nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1)[3] = float("nan")


def set_index(tensors: dict[str, torch.Tensor], value: int) -> None:
    tensors[f"{Q}.g_idx"][5] = value


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


BAD_TENSORS = [
    # model, change, found and expected
    ("gptq", lambda t: set_nan(t, f"{V}.scales"), rf"'{V}.scales': 1 of 64 scales are NaN"),
    ("awq", lambda t: set_nan(t, f"{V}.scales"), rf"'{V}.scales': 1 of 64 scales are NaN"),
    ("ct", lambda t: set_nan(t, f"{V}.weight_scale"), rf"'{V}.weight_scale': 1 of 64 scales are NaN"),
    ("gptq-order", lambda t: set_index(t, 2), rf"'{Q}.g_idx': group indices from 0 to 2, expected 0 to 1"),
    ("gptq-order", lambda t: set_index(t, -1), rf"'{Q}.g_idx': group indices from -1 to 1, expected 0 to 1"),
    ("gptq-order", lambda t: t.pop(f"{Q}.g_idx"), rf"the tensor '{Q}.g_idx' is missing"),
    ("gptq", lambda t: t.pop(f"{Q}.scales"), rf"the tensor '{Q}.scales' is missing"),
    ("ct", lambda t: t.pop(f"{Q}.weight_zero_point"), rf"the tensor '{Q}.weight_zero_point' is missing"),
    (
        "gptq-symmetric",
        lambda t: t[f"{V}.qzeros"].view(-1)[1].fill_(0x77777757),
        rf"'{V}.qzeros': 1 of 64 zero points are not 8 .the first is 6., which sym: true with checkpoint_format 'gptq' "
        "means; the file may have been written as 'gptq_v2', or sym should be false",
    ),
    (
        "gptq-symmetric",
        lambda t: t[f"{Q}.qzeros"].add_(0x11111111),
        rf"'{Q}.qzeros': 128 of 128 zero points are not 8 .the first is 9.*'gptq_v2'",
    ),
    (
        "gptq-v2-symmetric",
        lambda t: t[f"{Q}.qzeros"].sub_(0x11111111),
        rf"'{Q}.qzeros': 128 of 128 zero points are not 8 .the first is 7.*checkpoint_format 'gptq_v2' means.* as 'gptq'",
    ),
    (
        "awq-symmetric",
        lambda t: t[f"{Q}.qzeros"].zero_(),
        rf"'{Q}.qzeros': 128 of 128 zero points are not 8 .the first is 0., which zero_point: false means",
    ),
    (
        "gptq",
        lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:-1].clone()}),
        rf"'{Q}.qweight' has the shape \[7, 64\], gptq, 4 bit, group size 32 with 64 inputs and 64 outputs asks for \[8, 64\]",
    ),
    (
        "gptq",
        lambda t: t.update({f"{Q}.qzeros": torch.zeros(4, 8, dtype=torch.int32)}),
        r"has the shape \[4, 8\], gptq, 4 bit, group size 32 with 64 inputs and 64 outputs asks for \[2, 8\]",
    ),
    (
        "awq",
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:1].clone()}),
        r"has the shape \[1, 64\], awq, 4 bit, group size 32 with 64 inputs and 64 outputs asks for \[2, 64\]",
    ),
    (
        "ct",
        lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 63])}),
        rf"'{Q}.weight_shape': says \[64, 63\], the config asks for \[64, 64\]",
    ),
    (
        "awq",
        lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
        rf"'{Q}.qweight' is of type F32; Pelton reads I32",
    ),
    (
        "awq",
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].int()}),
        rf"'{Q}.scales' is of type I32; Pelton reads F32, F16, BF16",
    ),
    ("gptq", lambda t: t.update({f"{Q}.weight": torch.zeros(64, 64)}), "has both .*qweight' and .*weight'"),
    ("gptq", lambda t: rename(t, f"{Q}.qweight", f"{Q}.weight_packed"), "a mix of methods is not supported"),
    ("ct", lambda t: rename(t, f"{Q}.weight_packed", f"{Q}.qweight"), "a mix of methods is not supported"),
    (
        "ct",
        lambda t: rename(t, f"{Q}.weight_packed", f"{Q}.weight"),
        "says that .* is quantized, but the file has",
    ),
    (
        "ct",
        lambda t: rename(t, f"{LM}.weight", f"{LM}.weight_packed"),
        "ignore 'lm_head' leaves it unquantized",
    ),
    (
        "gptq-bias-of-zeros",
        lambda t: t[f"{Q}.bias"].fill_(1),
        rf"'{Q}.bias' is a bias that the config does not",
    ),
    (
        "awq-not-converted",
        lambda t: rename(
            t, "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.qweight"
        ),
        "modules_to_not_convert 'self_attn.o_proj' leaves it unquantized",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD_TENSORS)
def test_bad_tensors_are_refused_before_weights_are_read(
    name: str, change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, name)
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors")
    read: list[str] = []
    load = loader.SafetensorsTensor.load

    def recording(self: Any, **options: Any) -> None:
        read.append(self.name)
        load(self, **options)

    monkeypatch.setattr(loader.SafetensorsTensor, "load", recording)
    with pytest.raises((CheckpointError, UnsupportedError), match=f"{packed}.*{message}"):
        logits(packed)
    early = ("scales", "weight_scale", "g_idx", "qzeros", "weight_zero_point", "weight_shape", "bias")
    assert [tensor for tensor in read if not tensor.endswith(early)] == []


def test_a_file_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, "awq")
    file = packed / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{file}: cut short"):
        logits(packed)


def test_packed_weights_without_a_config(tmp_path: Path) -> None:
    packed = write(tmp_path, "gptq")
    config = json.loads((packed / "config.json").read_text())
    del config["quantization_config"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"packed weights \('model.*qweight'\), but there is no quantization_config"
    ):
        logits(packed)


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("gptq", "awq", "quantization='awq' contradicts .*its config says quant_method 'gptq'"),
        ("awq", "gptq", "contradicts .*'awq'"),
        ("ct", "gptq", "contradicts .*'compressed-tensors'"),
        ("plain", "awq", "contradicts .*has no quantization_config"),
        ("plain", "marlin", "contradicts .*has no quantization_config"),
        ("gptq", "gpqt", "none of awq, gptq, compressed-tensors, marlin .did you mean 'gptq'"),
        ("gptq", "fp8", "'fp8' is none of"),
    ],
)
def test_a_flag_that_contradicts_the_checkpoint(name: str, flag: str, message: str, tmp_path: Path) -> None:
    packed = write(tmp_path, "gptq" if name == "plain" else name)
    model = tmp_path / "plain" if name == "plain" else packed
    with pytest.raises(InvalidValueError, match=message):
        LLM(model, quantization=flag, skip_tokenizer_init=True)


def test_a_flag_that_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_products(monkeypatch)
    packed = write(tmp_path, "awq")
    assert torch.equal(logits(packed, quantization="awq"), logits(packed))


@pytest.mark.skipif(ON_GPU, reason="about builds without it")
def test_marlin_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "built_features", lambda: ALL)
    packed = write(tmp_path, "awq")
    with pytest.raises(UnsupportedError, match="'marlin' cannot be had: marlin is for CUDA"):
        logits(packed, quantization="marlin")


INSTALLED = {"profile": "cuda-sm90", "path": Path("info"), "features": {"awq": False, "gptq": False}}


@pytest.mark.parametrize(
    ("label", "index", "command"),
    [
        (
            "cu130.sm90",
            "",
            r"pip install --force-reinstall --no-deps . -C profile=cuda-sm90 -C feature.awq=on",
        ),
        (
            "cu130.sm90.noawq.nogptq",
            "https://wheels.example/pelton",
            "--index-url https://wheels.example/pelton/p/cuda-sm90/simple/ pelton .*, or pip install .* -C feature.awq=on",
        ),
        ("cu130.sm90.noawq.nogptq", "", "--index-url INDEX/p/cuda-sm90/simple/ pelton   .INDEX: the address"),
    ],
)
def test_a_build_without_the_feature(
    label: str, index: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = write(tmp_path, "awq")
    for name, value in (INSTALLED | {"label": label}).items():
        monkeypatch.setattr(build_info, name, value)
    monkeypatch.setattr(checkpoint._library, "overridden", lambda: False)
    monkeypatch.setenv("PELTON_INDEX", index)
    monkeypatch.setattr(runner.guard, "check_gpu", lambda index: None)
    with pytest.raises(MissingFeature) as caught:
        logits(packed)
    error = caught.value
    assert (error.feature, error.profile) == ("awq", "cuda-sm90")
    assert (
        f"awq weights need the feature awq, and this build of pelton (profile cuda-sm90, label {label})"
        in str(error)
    )
    with pytest.raises(MissingFeature, match=command):
        raise error
