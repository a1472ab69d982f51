"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Q, K and V in one tensor, gate and up in another.

The smaller ones turn only a part of each head, and positions otherwise where requests may be longer than the
first context (`file.py`, longrope). GGUF files have the lists of factors as tensors.
"""

from __future__ import annotations

from dataclasses import replace

from mainspring.models.families.file import ModelFile
from mainspring.models.families.fused import fused_rows
from mainspring.models.families.model import Model
from mainspring.models.families.rope import LONGROPE
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec, RopeSpec
from mainspring.models.views import View

GGUF_QKV, GGUF_GATE_UP = "blk.{}.attn_qkv", "blk.{}.ffn_up"
CONFIG_QKV, CONFIG_GATE_UP = "model.layers.{}.self_attn.qkv_proj", "model.layers.{}.mlp.gate_up_proj"


def phi3(file: ModelFile) -> Model:
    keys = file.keys
    num_heads, num_kv_heads, head_size = file.heads()
    rope, ignored = _rope(file, head_size)
    attn = AttnSpec(num_heads, num_kv_heads, head_size, rope)
    mlp = MLPSpec(keys.count("intermediate_size"))
    for key, value in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
        keys.one_of(key, (value,), value)
    qkv, gate_up = (GGUF_QKV, GGUF_GATE_UP) if file.is_gguf else (CONFIG_QKV, CONFIG_GATE_UP)
    names = {
        **{role: f"{qkv}.{role[1:]}" for role in ("wq", "wk", "wv")},
        **{role: f"{gate_up}.{role[2:]}" for role in ("w_gate", "w_up")},
        "rope_factors": "rope_factors_long" if _is_long(file) else "rope_factors_short",
    }
    views: dict[str, View] = {}
    for layer in range(file.num_layers()):
        for tensor, rows in (
            (qkv, {"q": attn.q_width, "k": attn.k_width, "v": attn.k_width}),
            (gate_up, {"gate": mlp.intermediate_size, "up": mlp.intermediate_size}),
        ):
            at = tensor.replace("{}", str(layer))
            parts = {f"{at}.{part}.weight": count for part, count in rows.items()}
            views |= fused_rows(file, f"{at}.weight", parts)
    return file.with_names(names).model(
        "phi3",
        [LayerSpec(each, mlp) for each in _with_windows(file, attn)],
        norm=file.norm(default=None if file.is_gguf else 1e-5),
        tied=file.is_tied(),
        views=views,
        ignored=ignored,
    )


def _with_windows(file: ModelFile, attn: AttnSpec) -> list[AttnSpec]:
    """A window as long as the longest request is none."""
    longest = file.keys.count("max_position_embeddings")
    return [
        replace(attn, sliding_window=None if window is None or window >= longest else window)
        for window in file.windows()
    ]


def _is_long(file: ModelFile) -> bool:
    key = "original_max_position_embeddings"
    return key in file.keys and file.passes(file.keys.count(key))


def _rope(file: ModelFile, head_size: int) -> tuple[RopeSpec, frozenset[str]]:
    """And the tensors that are not used: the other list of factors."""
    keys = file.keys
    keys.get("original_max_position_embeddings")  # also there where nothing is scaled
    rope = file.rope(head_size, partial=True, scalings=LONGROPE)
    held = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}) & file.tensors
    if not file.is_gguf or not held:
        return rope, frozenset()
    keys.count("original_max_position_embeddings")
    amplitude = keys.positive("rope.scaling.attn_factor", 1.0)
    return replace(rope, has_factors=True, amplitude=amplitude), held
