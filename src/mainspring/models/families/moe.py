"""Mixtral, Qwen 1.5 and 3 with experts, GLM 4.5: each row goes through a few of many MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mainspring.models.families.experts import (
    MLP,
    SIGMOID,
    SOFTMAX,
    experts_of,
    model_with_experts,
    scores_by,
    tensors_behind,
)
from mainspring.models.families.file import ModelFile, plain_attention
from mainspring.models.families.llama import llama, llama_attention
from mainspring.models.families.model import Model
from mainspring.models.families.rope import SCALINGS
from mainspring.models.spec import AttnSpec, ExpertsSpec, MLPSpec

MIXTRAL_NAMES: Final = {
    "router": "model.layers.{}.block_sparse_moe.gate",
    "experts.w_gate": "model.layers.{}.block_sparse_moe.experts.{expert}.w1",
    "experts.w_up": "model.layers.{}.block_sparse_moe.experts.{expert}.w3",
    "experts.w_down": "model.layers.{}.block_sparse_moe.experts.{expert}.w2",
}
QWEN2_NAMES: Final = {
    "shared.w_gate": "model.layers.{}.mlp.shared_expert.gate_proj",
    "shared.w_up": "model.layers.{}.mlp.shared_expert.up_proj",
    "shared.w_down": "model.layers.{}.mlp.shared_expert.down_proj",
    "shared_gate": "model.layers.{}.mlp.shared_expert_gate",
}
GLM_NAMES: Final = {
    "shared.w_gate": "model.layers.{}.mlp.shared_experts.gate_proj",
    "shared.w_up": "model.layers.{}.mlp.shared_experts.up_proj",
    "shared.w_down": "model.layers.{}.mlp.shared_experts.down_proj",
}
GLM_GGUF_NAMES: Final = {"mlp_norm": "blk.{}.post_attention_norm"}


def llama_of_gguf(file: ModelFile) -> Model:
    """GGUF files call Mixtral a llama."""
    return mixtral(file) if file.keys.count("num_local_experts", 0, least=0) else llama(file)


def mixtral(file: ModelFile) -> Model:
    scores_by(file, SOFTMAX)
    if file.is_gguf:
        attns = file.with_windows(llama_attention(file))
    else:
        attn = plain_attention(file, kv_heads=8, theta=1e6, sliding_window=file.window())
        attns, file = [attn] * file.num_layers(), file.with_names(MIXTRAL_NAMES)
    experts = experts_of(file, "num_local_experts", intermediate_size=file.keys.count("intermediate_size"))
    return model_with_experts(file, "mixtral", attns, [experts] * len(attns), eps=1e-5)


def qwen2_moe(file: ModelFile) -> Model:
    """Qwen 1.5 and 2: beside the experts, one MLP for all rows, weighted by a gate of its own."""
    keys = file.keys
    has_bias = file.is_gguf or keys.flag("qkv_bias", True)
    attn = plain_attention(file, kv_heads=16, qkv_bias=has_bias)
    experts = replace(
        _qwen_experts(file, normalised=False),
        shared=MLPSpec(keys.count("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    if not file.is_gguf:
        file = file.with_names(QWEN2_NAMES)
    return _qwen_model(file, "qwen2_moe", attn, experts)


def qwen3_moe(file: ModelFile) -> Model:
    attn = plain_attention(
        file,
        kv_heads=4,
        qk_norm="head",
        qkv_bias=file.has_bias("wq", "attention_bias"),
        out_bias=file.has_bias("wo", "attention_bias"),
    )
    return _qwen_model(file, "qwen3_moe", attn, _qwen_experts(file, normalised=file.is_gguf))


def _qwen_experts(file: ModelFile, normalised: bool) -> ExpertsSpec:
    """normalised: whether weights are shares of their sum, in files that do not say."""
    keys = file.keys
    scores_by(file, SOFTMAX)
    count = "num_experts" if "num_experts" in keys else "num_local_experts"
    return experts_of(
        file,
        count,
        intermediate_size=keys.count("moe_intermediate_size"),
        normalised=keys.flag("norm_topk_prob", normalised),
    )


def _qwen_model(file: ModelFile, architecture: str, attn: AttnSpec, experts: ExpertsSpec) -> Model:
    """Windows, whose meaning is another than in Qwens without experts, are off in all that were published."""
    keys, num_layers = file.keys, file.num_layers()
    mlps: list[MLP] = [experts] * num_layers
    keys.get("intermediate_size")  # of layers without experts, of which there need be none
    if not file.is_gguf:
        keys.one_of("use_sliding_window", (False,), False)
        keys.get("max_window_layers")
        for layer in _dense_layers(file):
            mlps[layer] = MLPSpec(keys.count("intermediate_size"))
    attns = file.with_switched_windows(attn, [False] * num_layers)
    return model_with_experts(file, architecture, attns, mlps)


def _dense_layers(file: ModelFile) -> list[int]:
    keys, num_layers = file.keys, file.num_layers()
    step, listed = keys.count("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise keys.refusal("mlp_only_layers", "a list of layers")
    dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
    if len(dense) == num_layers:
        raise keys.refusal("decoder_sparse_step", f"at most {num_layers}, so that a layer has experts")
    return dense


def glm4_moe(file: ModelFile) -> Model:
    """GLM 4.5 and 4.6: the first layers are plain; experts are chosen by a sigmoid with a correction. What
    predicts further tokens is a layer more, and is not read."""
    keys = file.keys
    more, num_layers = keys.count("num_nextn_predict_layers", 0, least=0), file.num_layers()
    if file.is_gguf:
        num_layers -= more  # counted there
        file = file.with_names(GLM_GGUF_NAMES)
        has_norms = file.names["q_norm"].replace("{}", "0") + ".weight" in file.tensors
    else:
        file = file.with_names(GLM_NAMES)
        has_norms = keys.flag("use_qk_norm", False)
        if not any("partial_rotary_factor" in said for said in (keys, keys.inner("rope_parameters"))):
            raise keys.refusal("partial_rotary_factor", "the part of each head that turns")
    num_heads, num_kv_heads, head_size = file.heads(kv_heads=8)
    rope = file.rope(head_size, partial=True, scalings=SCALINGS)
    attn = AttnSpec(
        num_heads,
        num_kv_heads,
        head_size,
        rope,
        qkv_bias=file.has_bias("wq", "attention_bias"),
        qk_norm="head" if has_norms else None,
    )
    plain = keys.count("first_k_dense_replace", 0 if file.is_gguf else 1, least=0)
    if plain >= num_layers:
        raise keys.refusal("first_k_dense_replace", f"less than {num_layers}, the number of layers")
    mlps = [MLPSpec(keys.count("intermediate_size"))] * plain + [_glm_experts(file)] * (num_layers - plain)
    behind = tensors_behind(file, num_layers, "blk." if file.is_gguf else "model.layers.")
    return model_with_experts(file, "glm4_moe", [attn] * num_layers, mlps, eps=1e-5, ignored=behind)


def _glm_experts(file: ModelFile) -> ExpertsSpec:
    keys, width = file.keys, file.keys.count("moe_intermediate_size")
    scores_by(file, SIGMOID)
    for key in ("n_group", "topk_group"):  # a choice of groups of experts before that of experts
        keys.one_of(key, (1,), 1)
    return experts_of(
        file,
        "n_routed_experts",
        intermediate_size=width,
        scoring="sigmoid",
        normalised=keys.flag("norm_topk_prob", True),
        scale=keys.positive("routed_scaling_factor", 1.0),
        correction=True,
        shared=MLPSpec(width * keys.count("n_shared_experts", 1)),
    )
