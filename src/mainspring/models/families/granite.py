"""Granite 3: a Llama with four multipliers: of embeddings, scores, what branches add, and logits."""

from __future__ import annotations

from dataclasses import replace

from mainspring.models.families.file import ModelFile
from mainspring.models.families.llama import llama_attention, llama_like
from mainspring.models.families.model import Model


def granite(file: ModelFile) -> Model:
    keys = file.keys
    attn = llama_attention(file)
    attn = replace(
        attn, scale=keys.positive("attention_multiplier", attn.head_size**-0.5 if file.is_gguf else 1.0)
    )
    if file.is_gguf and not keys.flag(
        "rope.scaling.finetuned", True
    ):  # so these files say that nothing turns
        attn = replace(attn, rope=None)
    residual_scale = keys.positive("residual_multiplier", 1.0)
    model = llama_like(
        file,
        "granite",
        [attn] * file.num_layers(),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        logit_scale=1.0 / keys.positive("logits_scaling", 1.0),
    )
    layers = [replace(layer, residual_scale=residual_scale) for layer in model.spec.layers]
    return replace(model, spec=replace(model.spec, layers=tuple(layers)))
