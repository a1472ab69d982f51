"""Configs with the keys that makers publish are understood, each key of them; and what they say of a network.

Lists of factors are shorter to write than those published. A key more, or another value, is refused by name.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mainspring.base.errors import CheckpointError
from mainspring.models.families import from_config
from mainspring.models.spec import LayerSpec, ModelSpec

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "published_configs.json").read_text()
)


def read(name: str, **changes: Any) -> ModelSpec:
    return from_config(CONFIGS[name] | changes)


def windowed(spec: ModelSpec) -> list[int]:
    return [i for i, layer in enumerate(spec.layers) if layer.attn.sliding_window is not None]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_understood(name: str) -> None:
    assert len(read(name).layers) in (6, 12, 16, 18, 24, 26, 28, 30, 32, 34, 36, 40, 46, 48)
    with pytest.raises(CheckpointError, match=r"^new_key is 3: not supported, may change the mathematics$"):
        read(name, new_key=3)


def test_gemma_2() -> None:
    spec = read("gemma-2-2b")
    assert windowed(spec) == list(range(0, 26, 2))
    attn = spec.layers[0].attn
    assert (attn.sliding_window, attn.soft_cap, spec.logit_soft_cap) == (4096, 50.0, 30.0)
    assert (attn.q_width, attn.k_width, spec.embedding_scale) == (2048, 1024, 48.0)
    assert spec.tied_embeddings
    assert spec.layers[0].norms == "both"
    assert read("gemma-2-27b").layers[0].attn.scale == 1 / 12, "not by the head's size, 128"


def test_gemma_2_where_a_config_is_silent() -> None:
    """A cap or a window of null is none; a key that is left out means what the published models have."""
    said = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    silent = from_config({key: value for key, value in CONFIGS["gemma-2-2b"].items() if key not in said})
    assert silent == read("gemma-2-2b")
    null = read("gemma-2-2b", **dict.fromkeys(said))
    assert (first(null).attn.soft_cap, null.logit_soft_cap, windowed(null)) == (0.0, 0.0, [])


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("gemma-3-270m", 512),
        ("gemma-3-1b-it", 512),
        ("gemma-3-4b, its text", 1024),
        ("gemma-3-4b, its text, written in 2026", 1024),
    ],
)
def test_gemma_3(name: str, window: int) -> None:
    """Case B155: five layers with a window and a theta of their own, then one that sees everything."""
    spec = read(name)
    for index, layer in enumerate(spec.layers):
        rope = layer.attn.rope
        assert rope is not None
        is_global = index % 6 == 5
        assert layer.attn.sliding_window == (None if is_global else window)
        assert rope.theta == (1e6 if is_global else 1e4)
        assert rope.factors == ((8.0,) * 128 if is_global and "4b" in name else ())
        assert (layer.attn.qk_norm, layer.attn.soft_cap) == ("head", 0.0)
    assert spec.logit_soft_cap == 0.0


def first(spec: ModelSpec) -> LayerSpec:
    return spec.layers[0]


def test_phi_3_has_a_window_and_phi_4_none() -> None:
    """Case B154: a window that a model has is kept; one as long as the longest request is none."""
    assert windowed(read("Phi-3-mini-4k-instruct")) == list(range(32))
    for name in ("Phi-3-mini-128k-instruct", "Phi-3.5-mini-instruct", "Phi-4-mini-instruct", "phi-4"):
        assert windowed(read(name)) == []


@pytest.mark.parametrize(
    ("name", "turning"),
    [("Phi-3-mini-128k-instruct", 96), ("Phi-3.5-mini-instruct", 96), ("Phi-4-mini-instruct", 96)],
)
def test_long_factors_are_for_what_passes_the_first_context(name: str, turning: int) -> None:
    """Case B155: fixed by the longest request there may be, not by each request's length."""
    rope = first(read(name)).attn.rope
    assert rope is not None
    assert rope.rotary_dim == turning
    assert rope.factors == tuple(CONFIGS[name]["rope_scaling"]["long_factor"])
    assert rope.amplitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_phi_4_mini_turns_three_quarters_of_a_head() -> None:
    spec = read("Phi-4-mini-instruct")
    assert first(spec).attn.head_size == 128
    assert spec.tied_embeddings
    assert not read("phi-4").tied_embeddings


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "longrope", "short_factor": [1.0] * 48}, "rope_scaling.long_factor is missing"),
        (
            {"type": "longrope", "short_factor": [1.0] * 47, "long_factor": [1.0] * 48},
            "rope_scaling.short_factor is .*; expected a list of 48 positive numbers",
        ),
        (
            {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [0.0] * 48},
            "rope_scaling.long_factor is .*; expected a list of 48 positive numbers",
        ),
        (
            {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "long_mscale": 1.2},
            "rope_scaling.long_mscale is 1.2: not supported",
        ),
    ],
)
def test_factors_that_are_not_understood_are_refused(scaling: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read("Phi-4-mini-instruct", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma-2-2b", {"hidden_activation": "gelu"}),
        ("gemma-2-2b", {"attention_bias": True}),
        ("gemma-3-270m", {"use_bidirectional_attention": True}),
        ("gemma-3-270m", {"attn_logit_softcapping": 50.0}),
        ("Phi-4-mini-instruct", {"lm_head_bias": True}),
        ("Phi-4-mini-instruct", {"full_attn_mod": 2}),
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"n_ctx": 512}),
        ("all-MiniLM-L6-v2", {"position_embedding_type": "relative_key"}),
        ("all-MiniLM-L6-v2", {"hidden_act": "relu"}),
        ("all-MiniLM-L6-v2", {"is_decoder": True}),
    ],
)
def test_what_would_be_another_network_is_refused(name: str, change: dict[str, Any]) -> None:
    """Case B155: a model that would answer wrongly does not load."""
    (key,) = change
    with pytest.raises(CheckpointError, match=key):
        read(name, **change)


def test_gpt_2() -> None:
    spec = read("gpt2")
    assert (spec.num_positions, spec.tied_embeddings, spec.norm.is_layer_norm) == (1024, True, True)
    layer = first(spec)
    assert (layer.attn.rope, layer.mlp.gated, layer.mlp.activation) == (None, False, "gelu_tanh")
    assert layer.mlp.intermediate_size == 3072


def test_encoders() -> None:
    for name in ("all-MiniLM-L6-v2", "bge-small-en-v1.5"):
        spec = read(name)
        assert not spec.has_head
        assert not spec.output_norm
        assert (spec.embedding_bias, spec.embedding_norm, spec.num_positions) == (True, True, 512)
        assert (first(spec).norms, first(spec).attn.causal, first(spec).mlp.activation) == (
            "sum",
            False,
            "gelu",
        )
