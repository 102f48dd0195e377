"""Checkpoints: what is found, what is refused, and one named error for each kind of damage."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_driver import DATA, DEVICE, ON_GPU, Driver, copy_model, cpu_only
from pelton.config import EngineConfig, load_model_config
from pelton.errors import CapacityError, CheckpointError, PeltonError, UnsupportedError
from pelton.layers import Linear, Place, Weight
from pelton.loader import load_weights, open_checkpoint, read_safetensors_header
from pelton.runner import Runner

safetensors = pytest.importorskip("safetensors.torch")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def load(folder: Path, **options: Any) -> Runner:
    options = {"kv_cache_memory": "4MiB"} | options
    return Runner(EngineConfig(model=folder, **options), load_model_config(folder))


def shard(folder: Path, parts: int = 3) -> list[Path]:
    """Split model.safetensors of the folder into shards with an index."""
    tensors = safetensors.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    files = []
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(tensors)[part::parts]  # the parts of one fused weight fall into different shards
        safetensors.save_file({key: tensors[key] for key in names}, folder / name)
        weight_map |= dict.fromkeys(names, name)
        files.append(folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_model(DATA / "llama-rope", tmp_path / "model")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the tensors of the folder's model.safetensors."""
    tensors = safetensors.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


def test_shards_give_the_same_model(model: Path) -> None:
    expected = Driver(model, dtype="float32").all_logits(PROMPT)
    shard(model)
    torch.testing.assert_close(Driver(model, dtype="float32").all_logits(PROMPT), expected, atol=0, rtol=0)
    (model / "model.safetensors.index.json").unlink()  # shards without an index are all read
    torch.testing.assert_close(Driver(model, dtype="float32").all_logits(PROMPT), expected, atol=0, rtol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.float64])
def test_every_stored_dtype_is_converted(model: Path, stored: torch.dtype) -> None:
    expected = Driver(model, dtype="float32").all_logits(PROMPT)
    edit(model, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    found = Driver(model, dtype="float32").all_logits(PROMPT)
    torch.testing.assert_close(found, expected, atol=0.05 if stored == torch.float16 else 0, rtol=0)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float64, torch.float32)],
)
def test_dtype_of_the_file_when_the_config_has_none(
    model: Path, tmp_path: Path, stored: torch.dtype, expected: torch.dtype
) -> None:
    model = copy_model(model, tmp_path / "other", {"dtype": None})
    edit(model, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    assert load(model).dtype == expected


def test_large_tensors_are_converted_in_pieces(tmp_path: Path) -> None:
    weight = torch.randn(3000, 1500).half()  # more than one chunk
    safetensors.save_file({"w": weight}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = torch.empty(weight.shape, dtype=dtype)
        load_weights(checkpoint, {"w": Weight((3000, 1500), lambda source, out=out: source.load(out=out))})
        torch.testing.assert_close(out, weight.to(dtype), atol=0, rtol=0)


def test_fused_weights_are_packed_in_any_order_and_the_plain_copy_goes() -> None:
    class Source:
        name = ""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.shape = tensor, tuple(tensor.shape)

        def load(self, *, out: torch.Tensor, first_row: int = 0) -> None:
            out.copy_(self.tensor)

    linear = Linear(8, {"q": 5, "k": 3, "v": 4}, Place(torch.float32, DEVICE), bias=True)
    places = linear.weights()
    assert {name: place.shape for name, place in places.items() if "weight" in name} == {
        "q.weight": (5, 8),
        "k.weight": (3, 8),
        "v.weight": (4, 8),
    }
    tensors = {name: torch.randn(place.shape, device=DEVICE) for name, place in places.items()}
    for name in ("v.weight", "q.bias", "k.weight", "v.bias", "k.bias", "q.weight"):
        places[name].load(Source(tensors[name]))
    x = torch.randn(6, 8, device=DEVICE)
    expected = torch.cat([x @ tensors[f"{p}.weight"].T + tensors[f"{p}.bias"] for p in "qkv"], dim=1)
    torch.testing.assert_close(linear(x, torch.empty(6, 12, device=DEVICE)), expected, atol=1e-5, rtol=1e-5)
    assert all(run._plain is None for run in linear._runs)  # type: ignore[union-attr]


def test_progress_counts_up_to_the_whole(model: Path) -> None:
    calls: list[tuple[int, int]] = []
    load(model, progress=lambda done, total: calls.append((done, total)))
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls) and len({total for _, total in calls}) == 1


# Tied embeddings.


def test_tied_without_with_equal_and_with_another_lm_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = DATA / "qwen3-h192-tied"
    expected = Driver(source, dtype="float32").all_logits(PROMPT)
    embedding = "model.embed_tokens.weight"
    equal = edit(
        copy_model(source, tmp_path / "equal"), lambda t: t.update({"lm_head.weight": t[embedding].clone()})
    )
    torch.testing.assert_close(Driver(equal, dtype="float32").all_logits(PROMPT), expected, atol=0, rtol=0)
    assert "lm_head" not in caplog.text

    other = edit(
        copy_model(source, tmp_path / "other"), lambda t: t.update({"lm_head.weight": t[embedding] * -1})
    )
    torch.testing.assert_close(
        Driver(other, dtype="float32").all_logits(PROMPT), -expected, atol=1e-5, rtol=1e-5
    )
    assert f"{other}: " in caplog.text and "lm_head.weight of its own" in caplog.text


def test_untied_without_lm_head_is_an_error(model: Path) -> None:
    edit(model, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing"):
        load(model)


# Wrong tensors.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing;"),
        (
            lambda t: [t.pop(n) for n in list(t) if "mlp" in n],
            r"mlp.gate_proj.weight' is missing \(5 more like it\)",
        ),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}),
            "layers.2.*none of this model's",
        ),
        (lambda t: t.update({"score.bias": torch.zeros(2)}), "'score.bias' is none of this model's"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"'model.norm.weight' has the shape \[31\], the config asks for \[32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config(model: Path, change: Any, message: str) -> None:
    edit(model, change)
    with pytest.raises(CheckpointError, match=f"{model}.*{message}"):
        load(model)


def test_more_layers_in_the_config_than_weights(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 60_000}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"60000 layers, the weights have \d"):
        load(model)


def test_tensor_type_that_is_not_read(model: Path) -> None:
    edit(model, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    with pytest.raises(
        UnsupportedError, match=r"'model.norm.weight' is of type I8; Pelton reads F32, F16, BF16, F64"
    ):
        load(model)


def test_old_rotary_buffers_are_ignored(model: Path) -> None:
    edit(model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(32)}))
    load(model)


def test_errors_come_before_memory_is_taken(model: Path, tmp_path: Path) -> None:
    """The model is said to be of some hundred GiB: the wrong shape is found without allocating it."""
    huge = copy_model(model, tmp_path / "huge", {"vocab_size": 2**31})
    tracemalloc.start()
    found = r"out of GPU memory: .* weights \d+" if ON_GPU else r"weights take \d+ bytes "
    with pytest.raises(CapacityError, match=found + ".* use a smaller model or dtype"):
        load(huge, kv_cache_memory=None)
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


_MEASURE = """
import sys, torch
from pelton.config import EngineConfig, load_model_config
from pelton.runner import Runner
def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024
before = status("VmRSS")
runner = Runner(EngineConfig(model=sys.argv[1], kv_cache_memory="256MiB"), load_model_config(sys.argv[1]))
print(status("VmHWM") - before)
"""


@cpu_only
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured with Linux's /proc")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Peak memory stays under 1.2 times the checkpoint, and an unused KV cache costs nothing."""
    config = json.loads((DATA / "llama-rope" / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (8000, 512),
        "lm_head.weight": (8000, 512),
        "model.norm.weight": (512,),
    }
    for layer in range(12):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{part}_layernorm.weight": (512,) for part in ("input", "post_attention")}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (2048, 512) for part in ("gate", "up")}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (128, 512) for part in "kv"}
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (256, 512),
            f"{name}.self_attn.o_proj.weight": (512, 256),
        }
        shapes |= {f"{name}.mlp.down_proj.weight": (512, 2048)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True, env=_environment()).stdout)
    assert 0.8 * size < peak < 1.2 * size


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# Files that are missing, cut or damaged.


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def set_header(file: Path, header: Any) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(64))


def entry(first: int, last: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(last - first) // 4], "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.write_bytes(b""), "the file is empty"),
        (lambda f: cut(f, 5), "cut short: 5 bytes"),
        (lambda f: cut(f, 100), "header is said to have .* the file has 100"),
        (lambda f: cut(f, f.stat().st_size - 1), "cut short: '.*' ends at byte"),
        (
            lambda f: f.write_bytes(struct.pack("<Q", 2**60) + f.read_bytes()[8:]),
            f"header is said to have {2**60} bytes",
        ),
        (lambda f: f.write_bytes(bytes(1000)), "header is not JSON"),
        (lambda f: set_header(f, b"{not json"), "header is not JSON"),
        (lambda f: set_header(f, b"\xff\xfe{}"), "header is not JSON"),
        (lambda f: set_header(f, [1]), "header is not a JSON object"),
        (lambda f: set_header(f, {"a": 1}), "damaged header entry for 'a': 1"),
        (lambda f: set_header(f, {"a": {"dtype": "F32", "shape": [1]}}), "damaged header entry for 'a'"),
        (
            lambda f: set_header(f, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
            "damaged header",
        ),
        (
            lambda f: set_header(f, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
            "'a' of shape .2. .* 4 bytes",
        ),
        (
            lambda f: set_header(f, {"a": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}),
            "cut short: 'a'",
        ),
        (
            lambda f: set_header(f, {"a": entry(0, 64), "b": entry(0, 64)}),
            "'b' begins at byte .* overlaps with 'a'",
        ),
        (
            lambda f: set_header(f, {"a": entry(0, 36), "b": entry(32, 64)}),
            "'b' begins at byte .* overlaps with 'a'",
        ),
        (lambda f: set_header(f, {"a": entry(0, 32), "b": entry(36, 64)}), "'b' .* leaves a hole behind 'a'"),
        (lambda f: set_header(f, {"a": entry(4, 64)}), "'a' .* leaves a hole behind the header"),
        (lambda f: set_header(f, {"a": entry(0, 64), "b": entry(60, 60)}), "'b' .* overlaps|'a' .* overlaps"),
        (lambda f: set_header(f, {"a": entry(0, 60)}), "4 bytes follow 'a'"),
        (lambda f: set_header(f, {}), "64 bytes follow the header"),
        (lambda f: f.write_bytes(f.read_bytes() + b"x" * 100), "100 bytes follow '.*', which ends at"),
        (
            lambda f: set_header(f, json.dumps({"a": entry(0, 64)}).encode().replace(b"{", b'{"a": 1, ', 1)),
            "the key 'a' twice",
        ),
        (lambda f: set_header(f, b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "the key 'dtype' twice"),
        (lambda f: f.write_bytes(b"<!DOCTYPE html><html>404</html>"), "not a safetensors file, or damaged"),
        (
            lambda f: f.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid"),
            "not a safetensors file",
        ),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_safetensors(model: Path, damage: Any, message: str, sharded: bool) -> None:
    file = shard(model)[1] if sharded else model / "model.safetensors"
    damage(file)
    with pytest.raises(CheckpointError, match=f"^{file}: .*{message}"):
        load(model)


def test_file_cut_after_its_header_was_read(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    file = model / "model.safetensors"
    cut(file, file.stat().st_size - 10)
    last = list(checkpoint.tensors.values())[-1]
    with pytest.raises(CheckpointError, match=f"{file}: cut short in '{last.name}'"):
        last.load(out=torch.empty(last.shape))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("", "not readable as JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "'a' is said to be in 1"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "must be the plain name"),
        ('{"weight_map": {"a": "/tmp/x.safetensors"}}', "must be the plain name"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "must be the plain name"),
    ],
)
def test_damaged_index(model: Path, content: str, message: str) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(CheckpointError, match=f"{index}: .*{message}"):
        load(model)


def test_missing_shard(model: Path) -> None:
    files = shard(model)
    files[2].unlink()
    with pytest.raises(CheckpointError, match=f"^{files[2]}: this shard is missing"):
        load(model)


def to_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("elsewhere")


def to_loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def to_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (to_link, "a link to 'elsewhere', where no file is found"),
        (to_loop, "a link to '.*', where no file is found"),
        (to_pipe, "this is a pipe, a socket or a device, expected a file"),
        (to_folder, "this is a folder, expected a file"),
    ],
)
@pytest.mark.parametrize("which", ["single", "index", "shard", "without index"])
def test_what_is_no_file(model: Path, damage: Any, message: str, which: str) -> None:
    file = model / "model.safetensors"
    if which != "single":
        shards, index = shard(model), model / "model.safetensors.index.json"
        file = index if which == "index" else shards[1]
        if which == "without index":
            index.unlink()
    damage(file)
    with pytest.raises(CheckpointError, match=f"^{file}: {message}"):
        open_checkpoint(model)


def test_tensors_without_elements_and_metadata_are_no_damage(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"b": torch.ones(3), "a": torch.empty(0, 4), "c": torch.empty(0), "d": torch.ones(2).half()}
    safetensors.save_file(tensors, file, {"format": "pt"})
    assert {t.name: t.shape for t in read_safetensors_header(file)} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


def test_index_that_names_the_wrong_shard_or_a_tensor_twice(model: Path) -> None:
    files = shard(model)
    index = model / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": names | {"extra": files[0].name}}))
    with pytest.raises(CheckpointError, match=f"{files[0]}: .*says that 'extra' is in this file"):
        load(model)
    shutil.copy(files[0], files[1])
    with pytest.raises(CheckpointError, match=f"{files[1]}: '.*' is in another shard already"):
        load(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_unread(model: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("the pickle was loaded",))

    (model / "model.safetensors").unlink()
    torch.save({"w": Bomb()}, model / name)
    with pytest.raises(CheckpointError, match=rf"pickled \({name}\).*runs whatever code"):
        load(model)


def test_pickled_weights_beside_safetensors_do_no_harm(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"junk")
    load(model)


def test_folder_without_weights_and_file_of_another_kind(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{model}: no weights; Pelton reads model.safetensors"):
        load(model)
    with pytest.raises(CheckpointError, match="neither a folder"):
        open_checkpoint(model / "config.json")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_a_named_error_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray((DATA / "llama-rope" / "model.safetensors").read_bytes())
    file = tmp_path_factory.mktemp("damage") / "model.safetensors"
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 2500))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        for tensor in read_safetensors_header(file):
            assert tensor.offset + tensor.num_bytes <= file.stat().st_size
    except PeltonError as error:
        assert str(error).startswith(f"{file}: ")
