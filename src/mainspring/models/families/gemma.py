"""Gemma 2 and 3: norms around each branch, a table of embeddings that is scaled, windows in most layers.

What differs between files: Hugging Face checkpoints hold norms as what is added to 1, GGUF files as they are
multiplied. GGUF files do not say which layers have a window, by how much scores are scaled in the largest
models, nor (before 2026) the theta of layers with a window: these are fixed by the architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from mainspring.models.families.file import ModelFile
from mainspring.models.families.keys import Keys
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec, RopeSpec
from mainspring.models.views import View

LOCAL_THETA: Final = 10_000.0
WINDOW: Final = 4096  # where a config does not say
CONFIG_NAMES: Final = {
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}


def gemma2(file: ModelFile) -> Model:
    """Every second layer has a window, the first of them too; scores and logits are capped."""
    keys = file.keys
    num_heads, num_kv_heads, head_size = file.heads()
    attn = AttnSpec(
        num_heads,
        num_kv_heads,
        head_size,
        file.rope(head_size),
        scale=_scale(file, head_size, num_layers_of_27b=46),
        soft_cap=_cap(keys, "attn_logit_softcapping", 50.0),
    )
    window = keys.count("sliding_window", WINDOW) if file.is_gguf else file.window(WINDOW)
    attns = [replace(attn, sliding_window=window if has else None) for has in _windowed(file, period=2)]
    return _gemma(file, "gemma2", attns, _cap(keys, "final_logit_softcapping", 30.0))


def gemma3(file: ModelFile) -> Model:
    """Five layers with a window to one without; theirs are other rotations. Heads of Q and K are normed."""
    keys = file.keys
    num_heads, num_kv_heads, head_size = file.heads()
    attn = AttnSpec(
        num_heads,
        num_kv_heads,
        head_size,
        file.rope(head_size, theta=LOCAL_THETA if file.is_gguf else 1_000_000.0, layer_type="full_attention"),
        scale=_scale(file, head_size, num_layers_of_27b=62),
        qk_norm="head",
    )
    window = file.window(WINDOW)
    local = replace(attn, rope=_local_rope(file, head_size), sliding_window=window)
    attns = [local if has and window is not None else attn for has in _windowed(file, period=6)]
    keys.one_of("use_bidirectional_attention", (False,), False)
    return _gemma(file, "gemma3", attns, _cap(keys, "final_logit_softcapping", 0.0))


def _cap(keys: Keys, key: str, default: float) -> float:
    """default: what is meant where the file does not say; null is none."""
    if key not in keys:
        return 0.0 if keys.says(key) else default
    return keys.positive(key)


def _gemma(file: ModelFile, architecture: str, attns: list[AttnSpec], logit_soft_cap: float) -> Model:
    keys = file.keys
    if not file.is_gguf:
        file = file.with_names(CONFIG_NAMES)
        for key in ("hidden_activation", "hidden_act"):
            keys.one_of(key, ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    mlp = MLPSpec(keys.count("intermediate_size"), "gelu_tanh")
    model = file.model(
        architecture,
        [LayerSpec(attn, mlp, norms="both") for attn in attns],
        norm=file.norm(default=None if file.is_gguf else 1e-6),
        tied=file.is_tied(True),
        embedding_scale=math.sqrt(keys.count("hidden_size")),
        logit_soft_cap=logit_soft_cap,
    )
    return model if file.is_gguf else replace(model, views=_one_more(model.names))


def _windowed(file: ModelFile, period: int) -> list[bool]:
    """All layers but every `period`-th; a file may say another period, or each layer."""
    keys = file.keys
    given = keys.get("sliding_window_pattern")
    if file.is_gguf and isinstance(given, list):
        return file.windowed()
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        period = keys.count(key, period)
    windowed = [bool((layer + 1) % period) for layer in range(file.num_layers())]
    return windowed if file.is_gguf else file.windowed(windowed, WINDOW)


def _scale(file: ModelFile, head_size: int, num_layers_of_27b: int) -> float:
    """Of scores. Only the largest models have another one than the head's size gives."""
    keys = file.keys
    if not file.is_gguf:
        return 1.0 / math.sqrt(keys.positive("query_pre_attn_scalar", 256.0))
    is_27b = file.num_layers() == num_layers_of_27b
    return 1.0 / math.sqrt(
        keys.count("hidden_size") / keys.count("num_attention_heads") if is_27b else head_size
    )


def _local_rope(file: ModelFile, head_size: int) -> RopeSpec:
    """Its theta has a key of its own, unless it stands beside what else is said of these layers."""
    theta = file.keys.positive("rope_local_base_freq", LOCAL_THETA)
    given = file.keys.get("rope_parameters")
    local = given.get("sliding_attention") if isinstance(given, Mapping) else None
    if local is None:
        return RopeSpec(head_size, theta, interleaved=False)
    rope = file.rope(head_size, layer_type="sliding_attention")
    return rope if isinstance(local, Mapping) and "rope_theta" in local else replace(rope, theta=theta)


def _one_more(names: Mapping[str, str]) -> dict[str, View]:
    """Every norm, with 1 added."""
    return {name: View(name, plus=1.0) for role, name in names.items() if role.endswith("norm")}
