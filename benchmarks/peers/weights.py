"""The model in the forms that the engines want: one GGUF file, and its weights in 16 bit.

The 16-bit forms hold the same numbers, the GGUF file's weights rounded to bfloat16 once: a folder as Hugging
Face lays one out (config.json, tokenizer.json, model.safetensors) and a GGUF file. The two differ in one way:
in GGUF the rows of Q and K are ordered for rotating neighbours (0, 1), (2, 3) ..., in the other for rotating
halves (0, d/2), (1, d/2 + 1) ...

Both are written beside their final name and renamed, so a folder or file under its name is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.tokenization.parts import USER_DEFINED
from mainspring.frontend.tokenization.pre_tokenizers import kind_of
from mainspring.frontend.tokenizer import Tokenizer

GGUF_ALIGNMENT = 32  # bytes; what a file without "general.alignment" means
GGUF_F32, GGUF_BF16 = 0, 30  # tensor types
FILE_TYPE_BF16 = 32
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

BFloat16 = npt.NDArray[np.uint16]  # the upper halves of float32


def to_bfloat16(values: npt.NDArray[np.float32]) -> BFloat16:
    """Rounded to nearest, ties to even. The values are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    lowest_kept = (bits >> 16) & 1
    return ((bits + 0x7FFF + lowest_kept) >> 16).astype(np.uint16)


def halves_order(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Q or K [num_heads * d, hidden] with each head's rows from neighbours' to halves' order."""
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def hf_name(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, layer, role, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[role]}.weight"


# ---- Hugging Face ------------------------------------------------------------------------------------------


def hf_folder(source: Path, cache_dir: Path) -> Path:
    """The folder with the weights of the Llama in `source`, in bfloat16; made on first use."""
    return _once(cache_dir / f"{source.stem}-bf16", lambda folder: _write_folder(source, folder))


def _write_folder(source: Path, folder: Path) -> None:
    folder.mkdir()
    with GGUFFile(source) as file:
        tokenizer = Tokenizer.from_gguf(file)
        vocabulary = tokenizer_json(file, tokenizer)
        config = hf_config(file)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        tensors = {}
        for name in file.tensor_names:
            values = file.dequantise(name)
            role = name.split(".")[-2]
            if role in heads:
                values = halves_order(values, heads[role])
            tensors[hf_name(name)] = to_bfloat16(values)
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
    }
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(vocabulary)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json of the Llama that a GGUF file holds, but for its special tokens."""
    of = {key.removeprefix("llama."): file.metadata[key] for key in file.metadata}
    num_heads = of["attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file.info("token_embd.weight").shape[0],
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": of.get("attention.head_count_kv", num_heads),
        "head_dim": of.get("attention.key_length", of["embedding_length"] // num_heads),
        "max_position_embeddings": of["context_length"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "rope_theta": of.get("rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "torch_dtype": "bfloat16",
    }


def tokenizer_json(file: GGUFFile, read: Tokenizer) -> str:
    """The byte-level vocabulary of a GGUF file, which was `read`, as tokenizer.json says it."""
    of = {key: file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type", "pre")}
    kind = kind_of(of["pre"])
    ids = {token: i for i, token in enumerate(of["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in of["merges"]]
    made = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=kind.ignore_merges))
    if kind.nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = kind.pre_tokenizer()
    made.decoder = decoders.ByteLevel()
    for i, (token, token_type) in enumerate(zip(of["tokens"], of["token_type"], strict=True)):
        if i in read.special_ids:
            made.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == USER_DEFINED:
            made.add_tokens([AddedToken(token, normalized=False)])
    text: str = made.to_str()
    return text


def write_safetensors(path: Path, tensors: dict[str, BFloat16]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(values.tobytes())


# ---- GGUF --------------------------------------------------------------------------------------------------


def gguf_16_bit(source: Path, cache_dir: Path) -> Path:
    """A GGUF file like `source` with its matrices in bfloat16; made on first use."""
    return _once(cache_dir / f"{source.stem}-bf16.gguf", lambda path: _write_gguf(source, path))


def _write_gguf(source: Path, path: Path) -> None:
    with GGUFFile(source) as file, open(path, "wb") as out:
        metadata = {key: file.metadata[key] for key in file.metadata} | {"general.file_type": FILE_TYPE_BF16}
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(file.tensor_names), len(metadata)))
        for key, value in metadata.items():
            out.write(_string(key) + _value(value))
        offset = 0
        for name in file.tensor_names:
            shape = file.info(name).shape
            kind, size = (GGUF_BF16, 2) if len(shape) > 1 else (GGUF_F32, 4)
            out.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
            out.write(struct.pack("<IQ", kind, offset))
            offset += _aligned(int(np.prod(shape)) * size)
        out.write(bytes(_aligned(out.tell()) - out.tell()))
        for name in file.tensor_names:
            values = file.dequantise(name)
            data = (to_bfloat16(values) if values.ndim > 1 else values).tobytes()
            out.write(data + bytes(_aligned(len(data)) - len(data)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // GGUF_ALIGNMENT) * GGUF_ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value with its type in front: bool, uint32, float32, string, or a list of strings or int32."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise ValueError(f"a metadata value of type {type(value).__name__} cannot be written")


# ---- both --------------------------------------------------------------------------------------------------


def _once(path: Path, write: Callable[[Path], None]) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        write(unfinished)
        unfinished.replace(path)
    return path
