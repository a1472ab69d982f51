"""Changes of one key or a few of a config, tried on every family by `make_changes.py`.

Most mean nothing to most families, and that is the point: whatever a config says is either computed as the
independent implementation computes it, or refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_configs import MOE_CONFIGS

FILE = Path(__file__).parents[2] / "data" / "family_changes.json"
SAME = ""  # recorded where a change changes nothing
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "olmo3"),
    *("gemma2", "gemma3", "phi3", "gpt2"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe"),
)

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CHANGES: tuple[dict[str, Any], ...] = (
    # What a layer computes.
    {"hidden_act": "gelu"},
    {"hidden_act": "relu"},
    {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
    {"hidden_activation": "silu"},
    {"activation_function": "relu"},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"qkv_bias": True},
    {"clip_qkv": 0.5},
    {"use_qk_norm": True},
    {"qk_layernorm": True},
    {"rms_norm_eps": 0.3},
    {"layer_norm_epsilon": 0.3},
    {"num_key_value_heads": None},
    {"head_dim": None},
    {"head_dim": 4},
    {"query_pre_attn_scalar": 3},
    {"attn_logit_softcapping": 0.7},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    # Around the layers.
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"final_logit_softcapping": 0.7},
    {"attention_multiplier": 0.7},
    {"embedding_multiplier": 2.0},
    {"residual_multiplier": 0.5},
    {"logits_scaling": 1.5},
    {"logit_scale": 0.5},
    {"pretraining_tp": 2},
    {"max_position_embeddings": 4096},
    {"is_decoder": True},
    {"use_bidirectional_attention": True},
    # Windows.
    {"sliding_window": 6},
    {"sliding_window": None},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 6},
    {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0, "layer_types": None},
    {"layer_types": None, "sliding_window": 6},
    {"sliding_window_pattern": 2},
    {"attention_chunk_size": 8},
    # Positions.
    {"rope_theta": 300.0},
    {"rope_theta": None},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": YARN},
    {"rope_scaling": YARN | {"attention_factor": 0.8, "beta_fast": 8, "beta_slow": 2}},
    {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.2}},
    {"rope_scaling": YARN | {"truncate": False}},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {"rope_type": "unheard_of", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}},
    {"partial_rotary_factor": 0.5},
    {"rope_interleaved": True},
    {"rope_local_base_freq": 300.0},
    {"no_rope_layer_interval": 2, "no_rope_layers": None},
    {"no_rope_layers": [0, 1, 1, 1, 1]},
    {"position_embedding_type": "relative_key"},
    {"n_positions": 16},
)
# For families with experts.
MOE_CHANGES: tuple[dict[str, Any], ...] = (
    {"num_experts_per_tok": 1},
    {"num_experts_per_tok": 5},
    {"norm_topk_prob": True},
    {"norm_topk_prob": False},
    {"norm_topk_prob": None},
    {"routed_scaling_factor": 0.7},
    {"routed_scaling_factor": None},
    {"n_group": 7, "topk_group": 3},
    {"first_k_dense_replace": 0},
    {"decoder_sparse_step": 2},
    {"mlp_only_layers": [1]},
    {"router_jitter_noise": 0.1},
    {"partial_rotary_factor": None},
    {"qkv_bias": False},
    {"use_qk_norm": False},
    {"moe_intermediate_size": None},
    {"n_shared_experts": 1},
)


def changes_of(name: str) -> tuple[dict[str, Any], ...]:
    return CHANGES + MOE_CHANGES if name in MOE_CONFIGS else CHANGES


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """None takes a key away."""
    kept = {key: value for key, value in config.items() if key not in change}
    return kept | {key: value for key, value in change.items() if value is not None}


def read() -> dict[str, list[tuple[dict[str, Any], str | None]]]:
    """Per family: each change, and the last row of logits of the fixture's first sequence (base 85, float32),
    or `SAME`; None where it cannot be loaded, or not without leaving out tensors or making some up."""
    found = json.loads(FILE.read_text())
    return {name: list(zip(changes_of(name), found[name], strict=True)) for name in FAMILIES if name in found}
