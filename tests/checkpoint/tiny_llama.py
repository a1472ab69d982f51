"""A llama of two layers with random weights, as a folder: small enough to compute in no time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mainspring import LLM, SamplingParams

VOCAB, HIDDEN = 40, 64
CONFIG: Mapping[str, Any] = {
    **{"model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 0},
}
MATRICES: Mapping[str, tuple[int, int]] = {  # of each layer: outputs, inputs
    **{"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)},
    **{"self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64)},
    "mlp.down_proj": (64, 96),
}
LAYERS = [f"model.layers.{i}" for i in range(2)]


def vectors() -> dict[str, np.ndarray]:
    """The embedding and the norms."""
    rng = np.random.default_rng(7)
    norms = ["model.norm", *(f"{layer}.input_layernorm" for layer in LAYERS)]
    norms += [f"{layer}.post_attention_layernorm" for layer in LAYERS]
    return {
        # Small: as the tied head, a large embedding finds the last token again, whatever the layers compute.
        "model.embed_tokens.weight": (rng.standard_normal((VOCAB, HIDDEN)) / 8).astype(np.float32),
        **{f"{name}.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32) for name in norms},
    }


def weights() -> dict[str, np.ndarray]:
    """All tensors, float32; the head is tied."""
    rng = np.random.default_rng(8)
    return vectors() | {
        f"{layer}.{name}.weight": (rng.standard_normal(shape) / 8).astype(np.float32)
        for layer in LAYERS
        for name, shape in MATRICES.items()
    }


def write(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder


def said(folder: Path, kernels: str = "numpy", prompt_len: int = 5) -> tuple[list[int], float]:
    """The tokens of a greedy answer, and its log-probability."""
    prompt = [1 + i * i % (VOCAB - 1) for i in range(prompt_len)]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "in_process": True, "num_threads": 1}
    with LLM(folder, kernels=kernels, kv_cache_memory_bytes=1 << 22, **settings) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (output,) = answer.outputs
    assert output.cumulative_logprob is not None
    return list(output.token_ids), output.cumulative_logprob
