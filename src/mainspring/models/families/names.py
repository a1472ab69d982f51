"""How files spell keys and tensors: what most families share. An adapter says where its own differ."""

from __future__ import annotations

from collections.abc import Mapping

# Keys of GGUF files, without the architecture's name, by those of Hugging Face configs.
GGUF_KEYS: Mapping[str, str] = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "value_head_dim": "attention.value_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "rotary_dim": "rope.dimension_count",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    # Of experts. Their number has a name of its own in each family's configs.
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
}
# Values of keys that no adapter reads which change nothing.
GGUF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0, 0.0),
    "rope.scaling.finetuned": (True, False),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "pooling_type": (0, 1, 2, 3),  # of hidden states: not of the network
}
CONFIG_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "hidden_act": ("silu",),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "use_cache": (True, False),
    "use_mrope": (False,),
}
# Keys of a config of which no value changes a logit.
CONFIG_SILENT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "bos_token_id",
        "cache_implementation",
        "classifier_dropout",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",  # of training, like the next
        "router_jitter_noise",
        "task_specific_params",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
    }
)
LAYER_TYPES = ("full_attention", "sliding_attention")  # as configs call them

# Tensors, by role; `{}` is the layer.
GGUF_NAMES: Mapping[str, str] = {
    "embedding": "token_embd",
    "output_norm": "output_norm",
    "head": "output",
    "rope_factors": "rope_freqs",
    "attn_norm": "blk.{}.attn_norm",
    "attn_post_norm": "blk.{}.post_attention_norm",
    "wq": "blk.{}.attn_q",
    "wk": "blk.{}.attn_k",
    "wv": "blk.{}.attn_v",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "wo": "blk.{}.attn_output",
    "mlp_norm": "blk.{}.ffn_norm",
    "mlp_post_norm": "blk.{}.post_ffw_norm",
    "w_gate": "blk.{}.ffn_gate",
    "w_up": "blk.{}.ffn_up",
    "w_down": "blk.{}.ffn_down",
}
CONFIG_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "output_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "wq": "model.layers.{}.self_attn.q_proj",
    "wk": "model.layers.{}.self_attn.k_proj",
    "wv": "model.layers.{}.self_attn.v_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "wo": "model.layers.{}.self_attn.o_proj",
    "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "w_gate": "model.layers.{}.mlp.gate_proj",
    "w_up": "model.layers.{}.mlp.up_proj",
    "w_down": "model.layers.{}.mlp.down_proj",
}
