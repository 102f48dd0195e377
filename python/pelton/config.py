"""What a model is (`ModelConfig`, read from its folder or GGUF file) and how it is run (`EngineConfig`)."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .device import check_device_name
from .errors import CheckpointError, InvalidValueError, UnknownOptionError, UnsupportedError, did_you_mean
from .memory import parse_bytes
from .quant.settings import FORMATS, QuantizationConfig, check_flag, check_same_settings, read_quantization
from .rope import RopeConfig, as_finite

__all__ = [
    "BLOCK_SIZES",
    "DTYPES",
    "SUPPORTED_ARCHITECTURES",
    "EngineConfig",
    "ModelConfig",
    "load_model_config",
    "read_json",
]

DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = (*FORMATS, "marlin")
BLOCK_SIZES = (8, 16, 32, 64)
MAX_HEAD_DIM = 256  # of the attention kernels
_MAX_SIZE = 2**40
_MAX_SIZES = {"num_hidden_layers": 1 << 16}  # each costs memory before the weights are looked at
#: activation names of Hugging Face configs -> the gated activation that computes them
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class _Architecture:
    """What distinguishes the architectures of the Llama family; each field is a config key's default or a fact."""

    qkv_bias: bool | None = None  # None: the config's attention_bias says, for the output projection too
    mlp_bias: bool | None = False  # None: the config's mlp_bias says
    qk_norm: bool = False
    head_dim: int | None = None  # when the config has none; None: hidden_size / num_attention_heads
    sliding_window: int | None = None  # when the config does not mention it
    optional_window: bool = False  # the window counts only with use_sliding_window, from max_window_layers on


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(mlp_bias=None),
    "MistralForCausalLM": _Architecture(qkv_bias=False, sliding_window=4096),
    "Qwen2ForCausalLM": _Architecture(qkv_bias=True, sliding_window=4096, optional_window=True),
    "Qwen3ForCausalLM": _Architecture(qk_norm=True, head_dim=128, sliding_window=4096, optional_window=True),
}
_ALIASES = {"LLaMAForCausalLM": "LlamaForCausalLM"}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED_ARCHITECTURES = tuple(_ARCHITECTURES)


@dataclass(frozen=True)
class ModelConfig:
    """A model of the Llama family.

    `layer_windows` has one entry a layer: 0, or how many positions a query sees (its own included). `max_model_len`
    is the longest sequence of the checkpoint, `dtype` the one it was stored in (None: not said). `bos_token_ids`
    and `eos_token_ids` join config.json and generation_config.json.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of the query, key and value projections
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int, ...] = ()
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    quantization: QuantizationConfig | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim

    @property
    def sliding_window(self) -> int:
        """The longest window of any layer, 0 if some layer sees everything."""
        return 0 if 0 in self.layer_windows else max(self.layer_windows, default=0)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one position in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], source: str, generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Read the values of a config.json; `source` names the file in errors.

        Raises:
            UnsupportedError: another architecture, or an option of this one that Pelton does not implement.
            CheckpointError: a value that is missing or cannot be.
        """
        architecture = _architecture_of(config, source)
        facts = _ARCHITECTURES[architecture]
        num_layers = _positive(config, "num_hidden_layers", source)
        num_heads = _positive(config, "num_attention_heads", source)
        num_kv_heads = _positive(config, "num_key_value_heads", source, num_heads)
        hidden_size = _positive(config, "hidden_size", source)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{source}: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
            )
        if config.get("head_dim") is None and facts.head_dim is None and hidden_size % num_heads:
            raise CheckpointError(
                f"{source}: no head_dim, and hidden_size={hidden_size} is not a multiple of "
                f"num_attention_heads={num_heads}"
            )
        head_dim = _positive(config, "head_dim", source, facts.head_dim or hidden_size // num_heads)
        if head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"{source}: heads of {head_dim} elements are not supported; Pelton has up to {MAX_HEAD_DIM}"
            )
        max_position = _positive(config, "max_position_embeddings", source)
        rope = RopeConfig.from_config(config, head_dim, max_position, source)
        own_bias = _flag(config, "attention_bias", source)
        generation_config = generation_config or {}
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size", source),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_positive(config, "vocab_size", source),
            rms_norm_eps=_eps(config, source),
            rope=rope,
            max_model_len=rope.max_model_len,
            hidden_act=_activation(config, source),
            tie_word_embeddings=_flag(config, "tie_word_embeddings", source),
            attention_bias=own_bias if facts.qkv_bias is None else facts.qkv_bias,
            attention_output_bias=own_bias if facts.qkv_bias is None else False,
            mlp_bias=_flag(config, "mlp_bias", source) if facts.mlp_bias is None else facts.mlp_bias,
            qk_norm=facts.qk_norm,
            layer_windows=_layer_windows(config, facts, num_layers, source),
            bos_token_ids=_token_ids("bos_token_id", config, generation_config, source),
            eos_token_ids=_token_ids("eos_token_id", config, generation_config, source),
            dtype=_dtype(config, source),
            quantization=_quantization(config, source),
        )


def load_model_config(model: str | Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder or a GGUF file.

    Raises:
        CheckpointError: nothing is there, or it is damaged, or it wants to run code of its own.
        UnsupportedError: a model that Pelton does not implement.
    """
    path = Path(model)
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name that is too long, or a folder on the way that may not be searched
        raise CheckpointError(f"{model!s:.200}: cannot be read: {error.strerror}") from None
    if is_dir:
        config = read_json(path / "config.json", "Pelton reads Hugging Face folders and GGUF files")
        generation = path / "generation_config.json"
        found = ModelConfig.from_dict(
            config, str(path / "config.json"), read_json(generation) if generation.is_file() else None
        )
        if found.quantization is not None:
            _check_beside(path, config, found.quantization)
        return dataclasses.replace(found, quantization=found.quantization or _beside(path))
    if is_file:
        from . import gguf

        if not gguf.is_gguf(path):
            raise CheckpointError(
                f"{path}: neither a folder with config.json nor a GGUF file; give the folder that holds the model"
            )
        return ModelConfig.from_dict(gguf.read_config(path), str(path))
    raise CheckpointError(
        f"{model}: no such folder or file. Pelton reads a local Hugging Face folder (config.json and *.safetensors) "
        "or a GGUF file; download the model first"
    )


def read_json(path: Path, hint: str = "the folder is incomplete") -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file is missing, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: must hold a JSON object, found {type(value).__name__}; download the file again"
        )
    return value


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run: every option of `LLM(...)`, checked once.

    Attributes:
        model: a Hugging Face folder or a GGUF file.
        tokenizer: folder or file of the tokenizer, if it is not the model's.
        skip_tokenizer_init: run on token ids alone, without a tokenizer.
        device: "auto" (what the installed kernels run on), "cpu", "cuda" or a numbered GPU like "cuda:1".
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        quantization: None: as the checkpoint's config says; "awq", "gptq" or "compressed-tensors": an error unless the
            checkpoint is of that format; "marlin": an error unless every quantized layer runs on the Marlin kernels.
        int8_activations: on the CPU, whether products with quantized weights may round activations to int8, which is
            about twice as fast; None: where they are bfloat16, whose own rounding is about as large.
        load_format: "auto" reads the checkpoint; "dummy" fills the weights with random numbers and needs no more than
            config.json, for measuring.
        max_model_len: longest sequence, prompt and output together; None: the checkpoint's.
        block_size: tokens a block of the KV cache holds: 8, 16, 32 or 64.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens that one step computes.
        kv_cache_memory: bytes of the KV cache, or a text like "2GiB"; None: on the CPU a quarter of the free memory,
            and no more than `max_num_seqs` sequences can use; on a GPU what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: the part of the GPU's memory, above 0 and at most 1, that weights, activations, CUDA
            graphs, the KV cache and other processes may take together; no meaning on the CPU.
        enable_prefix_caching: keep the KV of prompts, for prompts that begin alike.
        enable_chunked_prefill: read a long prompt over several steps.
        seed: of the random numbers of requests that bring no seed of their own.
        enforce_eager: never record CPU or CUDA graphs; slower, for finding errors.
        progress: called while weights are loaded, with the elements loaded and the elements in all.

    Raises:
        InvalidValueError: a value that the option cannot have.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    int8_activations: bool | None = None
    load_format: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int = 0
    enforce_eager: bool = False
    progress: Callable[[int, int], None] | None = None

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` as a number of bytes."""
        return None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory, "kv_cache_memory")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise InvalidValueError(f"model must be a folder or a GGUF file, found {self.model!r}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str | Path):
            raise InvalidValueError(f"tokenizer must be a folder or a file, found {self.tokenizer!r}")
        for name in (
            "skip_tokenizer_init",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enforce_eager",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidValueError(f"{name} must be True or False, found {getattr(self, name)!r}")
        object.__setattr__(self, "device", check_device_name(self.device))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in ("auto", *DTYPES):
            allowed = ", ".join(("auto", *DTYPES))
            raise InvalidValueError(
                f"dtype {self.dtype!r} is none of {allowed}{did_you_mean(self.dtype, DTYPES)}"
            )
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            hint = did_you_mean(str(self.quantization), QUANTIZATIONS)
            raise InvalidValueError(
                f"quantization {self.quantization!r} is none of {', '.join(QUANTIZATIONS)}{hint}"
            )
        if self.load_format not in LOAD_FORMATS:
            hint = did_you_mean(str(self.load_format), LOAD_FORMATS)
            raise InvalidValueError(
                f"load_format {self.load_format!r} is none of {', '.join(LOAD_FORMATS)}{hint}"
            )
        if self.int8_activations is not None and not isinstance(self.int8_activations, bool):
            raise InvalidValueError(
                f"int8_activations must be True, False or None, found {self.int8_activations!r}"
            )
        utilization = as_finite(self.gpu_memory_utilization)
        if utilization is None or not 0 < utilization <= 1:
            raise InvalidValueError(
                "gpu_memory_utilization must be a number above 0 and at most 1, found "
                f"{self.gpu_memory_utilization!r}"
            )
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if not (name == "max_model_len" and value is None) and (not _is_int(value) or value < 1):
                raise InvalidValueError(f"{name} must be a whole number of at least 1, found {value!r}")
        if not _is_int(self.block_size) or self.block_size not in BLOCK_SIZES:
            raise InvalidValueError(
                f"block_size={self.block_size!r} is not supported: it must be one of "
                f"{', '.join(map(str, BLOCK_SIZES))}{_nearest_block_size(self.block_size)}"
            )
        if not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise InvalidValueError(f"seed must be a whole number of 64 bits, found {self.seed!r}")
        if self.kv_cache_memory is not None:
            size = parse_bytes(self.kv_cache_memory, "kv_cache_memory")
            if size < 1:
                raise InvalidValueError(f"kv_cache_memory must be positive, found {self.kv_cache_memory!r}")
            object.__setattr__(self, "kv_cache_memory", size)
        if self.progress is not None and not callable(self.progress):
            raise InvalidValueError(
                f"progress must be a function of (elements loaded, elements in all), found {self.progress!r}"
            )

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Make a config from the options of `LLM(...)`.

        Raises:
            UnknownOptionError: there is no such option; the message gives the nearest, or says where it lives.
            InvalidValueError: a value that the option cannot have.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name in known:
                continue
            from .sampling import SamplingParams

            if name in inspect.signature(SamplingParams).parameters:
                raise UnknownOptionError(
                    f"LLM has no option {name!r}: it belongs to a request, SamplingParams({name}=...)"
                )
            raise UnknownOptionError(f"LLM has no option {name!r}{did_you_mean(name, known)}")
        if "model" not in options:
            raise InvalidValueError("LLM needs a model: a Hugging Face folder or a GGUF file")
        return cls(**options)

    def resolve(self, model_config: ModelConfig) -> EngineConfig:
        """The config with everything set that depends on the model (`max_model_len`, `dtype` when it is known).

        Raises:
            InvalidValueError: max_model_len is more than the checkpoint allows, or quantization contradicts it.
        """
        check_flag(self.quantization, model_config.quantization, self.model)
        limit = model_config.max_model_len
        if self.max_model_len is not None and self.max_model_len > limit:
            raise InvalidValueError(
                f"max_model_len={self.max_model_len} is more than the {limit} positions of {self.model}: "
                f"use {limit} or less"
            )
        dtype = model_config.dtype if self.dtype == "auto" and model_config.dtype else self.dtype
        return dataclasses.replace(self, max_model_len=self.max_model_len or limit, dtype=dtype)


def _architecture_of(config: Mapping[str, Any], source: str) -> str:
    if config.get("auto_map"):
        raise CheckpointError(
            f"{source}: the checkpoint names Python code of its own (auto_map). Pelton never runs code from a "
            "checkpoint, because it could do anything to this machine; if the model is one of "
            f"{', '.join(_ARCHITECTURES)} as it stands, remove auto_map from the file"
        )
    names = config.get("architectures") or []
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{source}: architectures must be a list of names, found {names!r:.80}")
    if not names and str(config.get("model_type")) in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[str(config["model_type"])]
    for name in names:
        name = _ALIASES.get(name, name)
        if name in _ARCHITECTURES:
            return name
    found = ", ".join(names) or f"model_type {config.get('model_type')!r}"
    raise UnsupportedError(
        f"{source}: architecture {found} is not supported; Pelton has {', '.join(_ARCHITECTURES)}"
    )


#: where older tools wrote the settings, and which method's they are
_BESIDE = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))


def _quantization(config: Mapping[str, Any], source: str) -> QuantizationConfig | None:
    # older versions of llm-compressor wrote compression_config
    values = config.get("quantization_config") or config.get("compression_config")
    return read_quantization(values, source) if values else None


def _check_beside(folder: Path, config: Mapping[str, Any], found: QuantizationConfig) -> None:
    """config.json decides; older tools' file beside it may not say otherwise."""
    for name, method in _BESIDE:
        if method == found.format and (folder / name).is_file():
            values = config.get("quantization_config") or config["compression_config"]
            where = f"{found.source}: quantization_config"
            check_same_settings(values, read_json(folder / name), where, str(folder / name))


def _beside(folder: Path) -> QuantizationConfig | None:
    """The quantization settings that older tools wrote to a file of their own."""
    for name, method in _BESIDE:
        if (folder / name).is_file():
            return read_quantization({"quant_method": method} | read_json(folder / name), str(folder / name))
    return None


def _positive(config: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise CheckpointError(f"{source}: {key} is missing")
    if not _is_int(value) or value < 1:
        raise CheckpointError(f"{source}: {key} must be a positive whole number, found {value!r:.80}")
    limit = _MAX_SIZES.get(key, _MAX_SIZE)
    if value > limit:
        raise CheckpointError(f"{source}: {key} must be at most {limit}, found {value!r:.80}")
    return int(value)


def _flag(config: Mapping[str, Any], key: str, source: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{source}: {key} must be true or false, found {value!r:.80}")
    return bool(value)


def _eps(config: Mapping[str, Any], source: str) -> float:
    value = as_finite(config.get("rms_norm_eps", 1e-6))
    if value is None or not 0 <= value <= 1:
        raise CheckpointError(
            f"{source}: rms_norm_eps must be a number from 0 to 1, found {config.get('rms_norm_eps')!r:.80}"
        )
    return value


def _activation(config: Mapping[str, Any], source: str) -> str:
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(
            f"{source}: hidden_act {name!r} is not supported; Pelton has {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _layer_windows(
    config: Mapping[str, Any], facts: _Architecture, num_layers: int, source: str
) -> tuple[int, ...]:
    window = config.get("sliding_window", facts.sliding_window)
    if facts.sliding_window is None or (
        facts.optional_window and not _flag(config, "use_sliding_window", source)
    ):
        window = None  # the architecture has no window, or has it turned off
    if window is None:
        return (0,) * num_layers
    if not _is_int(window) or window < 1:
        raise CheckpointError(
            f"{source}: sliding_window must be a positive whole number or null, found {window!r}"
        )
    if not facts.optional_window:
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers")
        first = 28 if first is None else first
        if not _is_int(first):
            raise CheckpointError(f"{source}: max_window_layers must be a whole number, found {first!r:.80}")
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(kinds, list | tuple):
        raise CheckpointError(f"{source}: layer_types must be a list, found {kinds!r:.80}")
    unknown = sorted(set(map(str, kinds)) - {"sliding_attention", "full_attention"})
    if unknown or len(kinds) != num_layers:
        what = f"{', '.join(unknown)}" if unknown else f"{len(kinds)} entries for {num_layers} layers"
        raise UnsupportedError(
            f"{source}: layer_types with {what} is not supported; Pelton has sliding_attention "
            "and full_attention, one entry a layer"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _token_ids(
    key: str, config: Mapping[str, Any], generation_config: Mapping[str, Any], source: str
) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for values in (config, generation_config):
        value = values.get(key)
        for token in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if not _is_int(token):
                raise CheckpointError(
                    f"{source}: {key} must be a token id or a list of them, found {value!r}"
                )
            ids[token] = None
    return tuple(ids)


def _dtype(config: Mapping[str, Any], source: str) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name == "float64":
        return "float32"
    if name not in DTYPES:
        raise UnsupportedError(f"{source}: dtype {value!r} is not supported; Pelton has {', '.join(DTYPES)}")
    return name


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _nearest_block_size(value: Any) -> str:
    if not _is_int(value):
        return ""
    return f"; the nearest is {min(BLOCK_SIZES, key=lambda size: abs(size - value))}"
