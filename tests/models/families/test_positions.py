"""What turns positions, for any numbers in a config: it is computed, or refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_published_configs import CONFIGS, first, read

from mainspring.base.errors import CheckpointError
from mainspring.models.families import from_config

NUMBERS = st.one_of(
    st.floats(),
    st.floats(min_value=0, max_value=1e6),
    st.integers(-2, 1 << 70),
    st.sampled_from([1, 1.0, 8.0, 8192, None, True, "8", [2.0]]),
)
KEYS = (
    *(
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "partial_rotary_factor",
        "rope_theta",
    ),
    *(
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
)
SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": CONFIGS["Llama-3.2-1B"]["rope_scaling"],
    "yarn": CONFIGS["Olmo-3-1025-7B"]["rope_scaling"],
}


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a machine that has other things to do
@given(
    st.sampled_from(sorted(SCALINGS)), st.dictionaries(st.sampled_from(KEYS), NUMBERS, max_size=3), NUMBERS
)
def test_any_numbers(kind: str, changes: dict[str, Any], theta: object) -> None:
    """Case B155: no number makes it fail otherwise."""
    config = CONFIGS["Llama-3.2-1B"] | {
        "rope_theta": theta,
        "rope_scaling": SCALINGS[kind] | {"rope_type": kind} | changes,
    }
    try:
        rope = from_config(config).layers[0].attn.rope
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "\n" not in refusal
        return
    assert rope is not None
    assert len(rope.factors) == 32
    assert all(0.0 < factor < math.inf for factor in (*rope.factors, rope.amplitude))


def test_yarn_as_its_makers_describe_it() -> None:
    """With theta 500,000 and heads of 128, a first context of 8,192 has 32 turns of frequency 18.09 and one
    of 34.98: those up to the 18th stay, those from the 35th on are divided, between them it grows evenly."""
    rope = read("Olmo-3-1025-7B").layers[3].attn.rope
    assert rope is not None
    assert rope.factors[:19] == (1.0,) * 19
    assert rope.factors[35:] == pytest.approx((8.0,) * 29)
    shares = [(1.0 - 1.0 / factor) / (1.0 - 1.0 / 8.0) for factor in rope.factors[18:36]]
    assert shares == pytest.approx([step / 17 for step in range(18)])


def test_the_inner_of_two_thetas_is_meant() -> None:
    rope = first(read("Qwen3-0.6B", rope_parameters={"rope_type": "default", "rope_theta": 7.0})).attn.rope
    assert rope is not None
    assert rope.theta == 7.0
