"""Qwen 2, 2.5 and 3. Windows, in layers from `max_window_layers` on, are off in all that were published."""

from __future__ import annotations

from mainspring.models.families.file import ModelFile, plain_attention
from mainspring.models.families.llama import llama_like
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec


def qwen2(file: ModelFile) -> Model:
    """Q, K and V have a bias."""
    attn = plain_attention(file, kv_heads=32, qkv_bias=True)
    return llama_like(file, "qwen2", _with_windows(file, attn))


def qwen3(file: ModelFile) -> Model:
    """Heads of Q and K are normed, and need not be a share of the hidden size."""
    attn = plain_attention(
        file,
        kv_heads=32,
        size=128,
        qk_norm="head",
        qkv_bias=file.has_bias("wq", "attention_bias"),
        out_bias=file.has_bias("wo", "attention_bias"),
    )
    return llama_like(file, "qwen3", _with_windows(file, attn))


def _with_windows(file: ModelFile, attn: AttnSpec) -> list[AttnSpec]:
    first = file.keys.count("max_window_layers", 28, least=0)
    return file.with_switched_windows(attn, [layer >= first for layer in range(file.num_layers())])
