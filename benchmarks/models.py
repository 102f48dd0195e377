"""Prepare one model in every form that the peers read, from a GGUF file.

    python benchmarks/models.py SmolLM2-135M-Instruct.Q4_1.gguf FOLDER

writes FOLDER/hf-float32 and FOLDER/hf-bfloat16 (safetensors), FOLDER/model-f32.gguf and
FOLDER/model-bf16.gguf. The weights of all four are the dequantized weights of the file, so that every
engine multiplies the same numbers.
"""

from __future__ import annotations

import argparse
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


def prepare(source: Path, folder: Path) -> None:
    """Write every form that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (("f32", gguf.GGMLQuantizationType.F32), ("bf16", gguf.GGMLQuantizationType.BF16)):
        target = folder / f"model-{name}.gguf"
        if not target.exists():
            write_gguf(source, target.with_suffix(".part"), kind)
            target.with_suffix(".part").rename(target)
    for dtype in ("float32", "bfloat16"):
        target = folder / f"hf-{dtype}"
        if not (target / "config.json").exists():
            write_folder(source, target, dtype)


def main() -> None:
    """Command line: SOURCE.gguf FOLDER."""
    parser = argparse.ArgumentParser(description="prepare one model in every form that the peers read")
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("folder", type=Path, help="where the forms are written")
    arguments = parser.parse_args()
    prepare(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()
