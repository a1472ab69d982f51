"""Configs as makers publish them, of Llama and its like: networks of the size that is published, and more.

`test_published_configs.py` asks of every config that each of its keys is understood.
"""

from __future__ import annotations

import math

import pytest
from test_published_configs import CONFIGS, first, read, windowed

from mainspring.models.families import from_config
from mainspring.models.spec import ModelSpec, weight_table

PARAMETERS = {
    "GLM-4.5-Air": 106_852_251_264,  # without the layer that predicts further tokens
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "OLMo-2-0425-1B": 1_484_916_736,
    "Olmo-3-1025-7B": 7_298_011_136,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "SmolLM2-135M-Instruct": 134_515_008,
    "SmolLM3-3B": 3_075_098_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-270m": 268_098_176,
    "gpt2": 124_439_808,
    "granite-3.3-2b-instruct": 2_533_539_840,
    "phi-4": 14_659_507_200,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-4-mini-instruct": 3_836_021_760,
}


def num_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(part.shape) for _, parts in weight_table(spec) for part in parts)


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes(name: str) -> None:
    """Case B155: heads, their size, biases and ties are read as they were meant."""
    assert num_parameters(read(name)) == PARAMETERS[name]


def test_llama_3() -> None:
    """Case B155: quick frequencies stay, slow ones are divided by the factor, a few lie between."""
    rope = first(read("Llama-3.2-1B")).attn.rope
    assert rope is not None
    assert (rope.theta, rope.rotary_dim, rope.amplitude) == (500_000.0, 64, 1.0)
    assert rope.factors[:13] == (1.0,) * 13
    assert rope.factors[-12:] == pytest.approx((32.0,) * 12)
    assert list(rope.factors) == sorted(rope.factors)


def test_windows() -> None:
    """Case B154: the first Mistral has one in every layer; a config that has it off has none."""
    assert windowed(read("Mistral-7B-v0.1")) == list(range(32))
    assert windowed(read("Olmo-3-1025-7B")) == [layer for layer in range(32) if layer % 4 != 3]
    for name in ("Mistral-7B-v0.3", "Qwen2.5-0.5B", "Qwen3-0.6B", "SmolLM3-3B"):
        assert windowed(read(name)) == []
    on = read("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=20)
    assert windowed(on) == [20, 21, 22, 23]


def test_mistral_without_the_key_has_the_window_of_the_first() -> None:
    config = dict(CONFIGS["Mistral-7B-v0.3"])
    assert config.pop("sliding_window") is None, "null is none"
    assert from_config(config).layers[0].attn.sliding_window == 4096


def test_smollm_3_does_not_turn_every_fourth_layer() -> None:
    spec = read("SmolLM3-3B")
    assert [i for i, layer in enumerate(spec.layers) if layer.attn.rope is None] == list(range(3, 36, 4))


def test_granite_multiplies() -> None:
    spec = read("granite-3.3-2b-instruct")
    assert (spec.embedding_scale, spec.logit_scale) == (12.0, 0.125)
    assert (first(spec).attn.scale, first(spec).residual_scale) == (0.015625, 0.22)


def test_olmo() -> None:
    for name in ("OLMo-2-0425-1B", "Olmo-3-1025-7B"):
        layer = first(read(name))
        assert (layer.norms, layer.attn.qk_norm) == ("after", "row")
    local, whole = (read("Olmo-3-1025-7B").layers[i].attn.rope for i in (0, 3))
    assert local is not None
    assert whole is not None
    assert (local.factors, local.amplitude) == ((), 1.0)
    assert whole.amplitude == pytest.approx(0.1 * math.log(8) + 1)
    assert (whole.factors[0], whole.factors[-1]) == (1.0, pytest.approx(8.0))
