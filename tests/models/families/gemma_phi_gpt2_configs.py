"""Configs of tiny networks, as `family_configs.py`: Gemma, Phi, GPT-2 and encoders."""

from __future__ import annotations

from typing import Any

GEMMA: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "sliding_window": 10,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 61,
}
GEMMA3 = GEMMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
}
PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "model_type": "phi3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 128,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 61,
}
# 12 elements of a head turn.
PHI4_MINI = PHI3 | {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [1.0, 1.2, 1.5, 2.5, 4.0, 6.0],
        "short_factor": [1.0, 1.0, 1.05, 1.1, 1.2, 1.3],
        "type": "longrope",
    },
    "sliding_window": 128,
    "tie_word_embeddings": True,
}

OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 2.5,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 6.0,
        "hidden_act": "gelu_pytorch_tanh",
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "rope_theta": 10_000.0,
    },
    "gemma3": GEMMA3 | {"cache_implementation": "hybrid", "sliding_window_pattern": 6},
    "gemma3-linear": GEMMA3
    | {
        "_sliding_window_pattern": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "use_bidirectional_attention": False,
    },
    "phi3": PHI3 | {"sliding_window": 10},
    "phi4-mini-long": PHI4_MINI,
    "phi4-mini-short": PHI4_MINI | {"original_max_position_embeddings": 64},
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 60,
        "embd_pdrop": 0.1,
        "eos_token_id": 60,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 128,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 128,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "vocab_size": 61,
    },
}
# Where the whole sequence decides how positions are turned, all of them are longer than the first context.
OTHER_SEQUENCES: dict[str, tuple[int, ...]] = {"phi4-mini-long": (37, 29)}
# How long requests may be, where that is less than the model could.
MAX_MODEL_LEN = {"phi4-mini-short": 64}

ENCODER_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertModel"],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 40,
        "model_type": "bert",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": 61,
    },
}
