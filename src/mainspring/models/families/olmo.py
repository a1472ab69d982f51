"""OLMo 2 and 3: norms behind each branch and none before, and one over all heads of Q and of K.

GGUF files call both olmo2; those of OLMo 3 have a window, in all layers but every fourth, as configs say it.
Only layers without one turn long contexts otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mainspring.models.families.file import ModelFile, plain_attention
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec, LayerSpec, MLPSpec, RopeSpec

CONFIG_NAMES: Final = {
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
WINDOWS_BUT: Final = 4  # every so many-th layer has none


def olmo2(file: ModelFile) -> Model:
    if file.is_gguf and file.window() is not None:
        return olmo3(file)
    return _olmo(file, "olmo2", [_attention(file, 10_000.0)] * file.num_layers())


def olmo3(file: ModelFile) -> Model:
    attn = _attention(file, 10_000.0 if file.is_gguf else 500_000.0, "full_attention")
    default = [bool((layer + 1) % WINDOWS_BUT) for layer in range(file.num_layers())]
    local = replace(attn, rope=_local_rope(file, attn))
    attns = [
        replace(local, sliding_window=window) if window else attn for window in file.windows(default, 4096)
    ]
    return _olmo(file, "olmo3", attns)


def _attention(file: ModelFile, theta: float, layer_type: str | None = None) -> AttnSpec:
    return plain_attention(
        file,
        theta=theta,
        layer_type=layer_type,
        qk_norm="row",
        qkv_bias=file.has_bias("wq", "attention_bias"),
        out_bias=file.has_bias("wo", "attention_bias"),
    )


def _local_rope(file: ModelFile, attn: AttnSpec) -> RopeSpec:
    if "rope_parameters" in file.keys:
        return file.rope(attn.head_size, theta=500_000.0, layer_type="sliding_attention")
    assert attn.rope is not None
    return replace(attn.rope, factors=(), amplitude=1.0)


def _olmo(file: ModelFile, architecture: str, attns: list[AttnSpec]) -> Model:
    if not file.is_gguf:
        file = file.with_names(CONFIG_NAMES)
    mlp = MLPSpec(file.keys.count("intermediate_size"))
    layers = [LayerSpec(attn, mlp, norms="after") for attn in attns]
    return file.model(architecture, layers, norm=file.norm(default=1e-5), tied=file.is_tied())
