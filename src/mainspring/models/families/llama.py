"""Llama 2 and 3, and what has its shape: SmolLM2, TinyLlama, Mistral (with a window)."""

from __future__ import annotations

from mainspring.models.families.file import ModelFile, plain_attention
from mainspring.models.families.model import Model
from mainspring.models.spec import LayerSpec, MLPSpec


def llama(file: ModelFile) -> Model:
    """Rows of Q and K are ordered for interleaved pairs in GGUF files, and for halves in others."""
    attn = plain_attention(file, interleaved=file.is_gguf)
    mlp = MLPSpec(file.keys.count("intermediate_size"))
    layers = [LayerSpec(each, mlp) for each in file.with_windows(attn)]
    norm = file.norm(default=None if file.is_gguf else 1e-6)
    return file.model("llama", layers, norm=norm, tied=file.is_tied())
