"""The models that `fuzz_checkpoints.py` damages: small ones that have everything a file can have.

    python benchmarks/fuzz_corpus.py        # writes tests/data/checkpoints again, byte for byte

The folder is part of the repository, so that a case's number means the same everywhere; whoever changes it
changes all cases.
"""

from __future__ import annotations

import json
import shutil
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mainspring.checkpoint.blocks import TENSOR_TYPES, TensorType, decode_blocks

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "checkpoints"


def blocks(kind: TensorType, rows: int, row_blocks: int) -> np.ndarray:
    """Raw bytes [rows, ...] of finite weights."""
    rng = np.random.default_rng(kind.block_bytes)
    made = rng.integers(0, 256, rows * row_blocks * kind.block_bytes, np.uint8).view(kind.layout)
    for name in kind.layout.names or ():
        if kind.layout[name].kind == "f":
            made[name] = rng.uniform(-0.1, 0.1, len(made))
    if kind.layout.names is None:
        made[...] = np.arange(len(made))
    values = np.empty(len(made) * kind.block_size, np.float32)
    decode_blocks(kind, made.view(np.uint8), values)
    assert np.isfinite(values).all()
    return made.view(np.uint8).reshape(rows, -1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_types(path: Path) -> None:
    """Every tensor type, and any number of dimensions."""
    writer = gguf.GGUFWriter(path, "llama")
    for number, kind in TENSOR_TYPES.items():
        raw = blocks(kind, 3, 5 if kind.block_size == 1 else 1)
        if kind.name in ("F32", "F16"):
            writer.add_tensor(kind.name, raw.view(kind.layout))
        else:
            writer.add_tensor(kind.name, raw, raw_dtype=gguf.GGMLQuantizationType(number))
    for num_dims in (1, 3, 4):
        writer.add_tensor(
            f"{num_dims} dimensions", np.arange(2**num_dims, dtype=np.float32).reshape([2] * num_dims)
        )
    finish(writer)


def write_values(path: Path) -> None:
    """Every type of value, alone and in arrays."""
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    numbers = {
        kinds.UINT8: 200, kinds.INT8: -100, kinds.UINT16: 60_000, kinds.INT16: -30_000,
        kinds.UINT32: 4_000_000_000, kinds.INT32: -2_000_000_000, kinds.UINT64: 2**63 + 1,
        kinds.INT64: -(2**62), kinds.FLOAT32: 0.5, kinds.FLOAT64: 0.1, kinds.BOOL: True,
        kinds.STRING: "Grüße, 世界 🌍",
    }  # fmt: skip
    for kind, value in numbers.items():
        writer.add_key_value(f"one.{kind.name.lower()}", value, kind)
        writer.add_key_value(f"many.{kind.name.lower()}", [value] * 3, kinds.ARRAY, kind)
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_tensor("w", np.arange(8, dtype=np.float32))
    finish(writer)


def write_vocabulary(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    words = [f"▁w{i}" for i in range(120)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(120)])
    writer.add_token_types([1] * 120)
    writer.add_token_merges([f"{a} {b}" for a, b in pairwise(words)])
    writer.add_tensor("token_embd.weight", np.ones((120, 4), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    finish(writer)


def write_version_2(path: Path) -> None:
    write_values(path)
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    path.write_bytes(content)


def write_parts(folder: Path) -> None:
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=2)
    writer.add_name("in parts")
    for i in range(5):
        writer.add_tensor(f"blk.{i}.w", np.full((2, 32), i, np.float32))
    finish(writer)


def safetensors(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (kind, values) in tensors.items():
        table[name] = {
            "dtype": kind,
            "shape": values.shape,
            "data_offsets": [len(data), len(data) + values.nbytes],
        }
        data += values.tobytes()
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors(path: Path) -> None:
    numbers = np.arange(24)
    made = {
        name: (name, numbers.astype(kind).reshape(4, 6))
        for name, kind in {
            "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2",
            "I8": "i1", "U8": "u1", "BOOL": "u1", "F8_E4M3": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8",
        }.items()
    }  # fmt: skip
    made |= {"vector": ("F32", np.ones(3, "<f4")), "number": ("F32", np.ones((), "<f4"))}
    path.write_bytes(safetensors(made))


def write_folder(folder: Path) -> None:
    """As Hugging Face writes it: settings, and weights in two shards with an index."""
    folder.mkdir()
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8,
        "rope_scaling": None,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    places = {}
    for i, kind in enumerate(("BF16", "F16"), 1):
        name = f"model-{i:05}-of-00002.safetensors"
        tensors = {f"layers.{i}.{j}.weight": (kind, np.full((3, 4), j, "<u2")) for j in range(3)}
        (folder / name).write_bytes(safetensors(tensors))
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 144}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_corpus(corpus: Path = CORPUS) -> None:
    shutil.rmtree(corpus, ignore_errors=True)
    corpus.mkdir(parents=True)
    write_types(corpus / "types.gguf")
    write_values(corpus / "values.gguf")
    write_vocabulary(corpus / "vocabulary.gguf")
    write_version_2(corpus / "version_2.gguf")
    write_parts(corpus / "parts")
    write_safetensors(corpus / "single.safetensors")
    write_folder(corpus / "folder")


if __name__ == "__main__":
    write_corpus()
