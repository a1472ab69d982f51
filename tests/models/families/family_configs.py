"""Configs of tiny networks, one or more per family, in the form that makers publish: `make_fixtures.py`.

Odd sizes on purpose: several heads on a KV head, heads that are no share of hidden_size where a family says
so, a vocabulary that is no round number, windows shorter than the longest sequence.
"""

from __future__ import annotations

from typing import Any

from gemma_phi_gpt2_configs import OTHER_CONFIGS, OTHER_SEQUENCES
from moe_configs import MOE_CONFIGS

# Lengths of the sequences, by fixture. The longer passes windows and first contexts.
SEQUENCES: dict[str, tuple[int, ...]] = {"default": (37, 9)} | OTHER_SEQUENCES

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
LLAMA = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 1000.0,
    "rope_scaling": None,
}
QWEN2 = SHAPE | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 3,
}
QWEN3 = SHAPE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_window_layers": 3,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
OLMO2 = SHAPE | {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "rope_theta": 1000,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-biased": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama-llama3": LLAMA
    | {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
    },
    "mistral": SHAPE
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "rope_theta": 1000.0,
        "sliding_window": 10,
    },
    "qwen2": QWEN2,
    "qwen2-window": QWEN2 | {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "qwen2-yarn": QWEN2
    | {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "qwen3": QWEN3,
    "smollm3": SHAPE
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 5,
        "max_window_layers": 5,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0, 1],
        "num_hidden_layers": 5,
        "pad_token_id": 2,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "granite": SHAPE
    | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "logits_scaling": 3.0,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rope_scaling": None,
        "rope_theta": 1000.0,
        "tie_word_embeddings": True,
    },
    "olmo2": OLMO2,
    "olmo3": OLMO2
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "rope_theta": 500000,
        "num_key_value_heads": 4,
        "sliding_window": 10,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "rope_type": "yarn",
        },
    },
    **OTHER_CONFIGS,
    **MOE_CONFIGS,
}
