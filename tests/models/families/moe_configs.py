"""Configs of tiny networks, as `family_configs.py`: those with experts."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 61,
}
QWEN = SHAPE | {
    "decoder_sparse_step": 1,
    "intermediate_size": 80,
    "max_window_layers": 2,
    "moe_intermediate_size": 32,
    "router_aux_loss_coef": 0.001,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
QWEN3 = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "head_dim": 32,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 10,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "rope_scaling": None,
    "sliding_window": None,
}

MOE_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": SHAPE
    | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 48,
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 5,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "qwen2-moe": QWEN
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "norm_topk_prob": False,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3-moe": QWEN3,
    "qwen3-moe-mixed": QWEN3
    | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_experts": 6},
    "glm4-moe": SHAPE
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "intermediate_size": 80,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "routed_scaling_factor": 1.7,
        "topk_group": 1,
        "use_qk_norm": True,
    },
}
# Their GGUF form cannot say which layers have experts.
FOLDERS_ONLY = ("qwen3-moe-mixed",)
