"""Llama 2 and 3, and what has its shape: SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

from typing import Any

from mainspring.models.families.file import ModelFile, plain_attention
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec


def llama(file: ModelFile) -> Model:
    """GGUF files call others so too, which may have a window."""
    attn = llama_attention(file)
    attns = file.with_windows(attn) if file.is_gguf else [attn] * file.num_layers()
    return llama_like(file, "llama", attns)


def unnamed(file: ModelFile) -> Model:
    """What a config describes that names no family: a Llama, and windows in the layers that it says."""
    return llama_like(file, "llama", file.with_windows(llama_attention(file)))


def mistral(file: ModelFile) -> Model:
    """With a window in the first models."""
    attn = plain_attention(file, kv_heads=8, sliding_window=file.window(default=4096))
    return llama_like(file, "mistral", [attn] * file.num_layers())


def llama_attention(file: ModelFile, **more: Any) -> AttnSpec:
    """Rows of Q and K are ordered for interleaved pairs in GGUF files, and for halves in others."""
    return plain_attention(
        file,
        interleaved=file.is_gguf,
        qkv_bias=file.has_bias("wq", "attention_bias"),
        out_bias=file.has_bias("wo", "attention_bias"),
        **more,
    )


def llama_like(
    file: ModelFile, architecture: str, attns: list[AttnSpec], *, tied: bool = False, **more: Any
) -> Model:
    """tied: what a config means that does not say. more: further fields of `ModelSpec`."""
    mlp = MLPSpec(file.keys.count("intermediate_size"), bias=file.has_bias("w_up", "mlp_bias"))
    layers = [LayerSpec(attn, mlp) for attn in attns]
    return file.model(architecture, layers, norm=file.norm(default=1e-6), tied=file.is_tied(tied), **more)
