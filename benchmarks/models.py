"""Prepare one model in every form that the peers read, from a GGUF file.

    python benchmarks/models.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

writes FOLDER/hf-float32 and FOLDER/hf-bfloat16 (safetensors), FOLDER/model-f32.gguf and
FOLDER/model-bf16.gguf. The weights of all four are the dequantized weights of the file, so that every
engine multiplies the same numbers.

The 4-bit forms are these weights rounded once more, the same numbers again: FOLDER/model-int4.gguf (Q4_0, all
matrices), FOLDER/hf-int4 (GPTQ, groups of 32, the output layer too, so it has the size of the former) and
FOLDER/hf-int4-head16 (GPTQ with the output layer in bfloat16, as GPTQ checkpoints mostly are).
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import gguf
import numpy as np


def write_gguf(source: Path, target: Path, dtype: gguf.GGMLQuantizationType) -> None:
    """Copy a GGUF file with its matrices in `dtype`; vectors stay float32, as llama.cpp wants them."""
    reader = gguf.GGUFReader(source)
    field = reader.fields["general.architecture"]
    writer = gguf.GGUFWriter(target, field.contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = dtype if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, target: Path, dtype: str) -> None:
    """Save the dequantized model and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def write_gptq(source: Path, plain: Path, target: Path, quantized_head: bool) -> None:
    """The blocks of a Q4_0 file as a GPTQ checkpoint; names, vectors and tokenizer from `plain`."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    config = json.loads((plain / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def layer(tensor: gguf.ReaderTensor, rotary_heads: int) -> dict[str, torch.Tensor]:
        raw = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
        blocks = raw.view(raw.shape[0], -1, 18)  # fp16 scale, then 16 bytes: elements i and i + 16
        q = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), dim=-1).flatten(1)
        scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        if rotary_heads:  # GGUF has the pairs of a head side by side
            q, scales = (
                t.unflatten(0, (rotary_heads, -1, 2)).transpose(1, 2).flatten(0, 2) for t in (q, scales)
            )
        q = q.t().contiguous()
        words = sum(q[i::8].to(torch.int64) << (4 * i) for i in range(8))
        groups, outputs = q.shape[0] // 32, q.shape[1]
        return {
            "qweight": words.to(torch.uint32).view(torch.int32),
            "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
            "scales": scales.t().contiguous(),
            "g_idx": torch.arange(q.shape[0], dtype=torch.int32) // 32,
        }

    with safe_open(plain / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for tensor in gguf.GGUFReader(source).tensors:
        name = tensor.name.split(".")
        if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_0:
            continue
        if name[0] == "token_embd":
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
            tensors["model.embed_tokens.weight"] = values.to(torch.bfloat16)
            if quantized_head:
                tensors |= {f"lm_head.{suffix}": t for suffix, t in layer(tensor, 0).items()}
            continue
        full = f"model.layers.{name[1]}.{parts[name[2]]}"
        del tensors[f"{full}.weight"]
        tensors |= {f"{full}.{suffix}": t for suffix, t in layer(tensor, heads.get(name[2], 0)).items()}
    shutil.copytree(plain, target, dirs_exist_ok=True)
    config["tie_word_embeddings"] = not quantized_head
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "lm_head": quantized_head,
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2))


def prepare(source: Path, folder: Path) -> None:
    """Write every form that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = gguf.GGMLQuantizationType
    for name, kind in (("f32", kinds.F32), ("bf16", kinds.BF16), ("int4", kinds.Q4_0)):
        target = folder / f"model-{name}.gguf"
        if not target.exists():
            write_gguf(source, target.with_suffix(".part"), kind)
            target.with_suffix(".part").rename(target)
    for dtype in ("float32", "bfloat16"):
        target = folder / f"hf-{dtype}"
        if not (target / "config.json").exists():
            write_folder(source, target, dtype)
    for name, quantized_head in (("hf-int4", True), ("hf-int4-head16", False)):
        if not (folder / name / "config.json").exists():
            write_gptq(folder / "model-int4.gguf", folder / "hf-bfloat16", folder / name, quantized_head)


def main() -> None:
    """Command line: SOURCE.gguf FOLDER."""
    parser = argparse.ArgumentParser(description="prepare one model in every form that the peers read")
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("folder", type=Path, help="where the forms are written")
    arguments = parser.parse_args()
    prepare(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()
