"""Public faults of parameters that are judged without a model. Numbers are those of `tests/CASES.md`."""

from __future__ import annotations

import math

import pytest

from mainspring.base.errors import RequestError
from mainspring.base.params import SamplingParams

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
NO_NUMBERS = (math.nan, math.inf, -math.inf, float("1e400"), "0.5", None, True, [], 1j)
JUST_OUTSIDE = {
    "temperature": (-1, -1e-9),
    "top_p": (0, -0.1, 1.0000001),
    "min_p": (-0.1, 1.1),
    "repetition_penalty": (0, -1),
    "frequency_penalty": (-2.01, 2.01),
    "presence_penalty": (-2.01, 2.01),
}
AT_THE_EDGE = {
    "temperature": (0, -0.0, 1e9),
    "top_p": (1e-9, 1),
    "min_p": (0, -0.0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "frequency_penalty": (-2, 2, -0.0),
    "presence_penalty": (-2, 2, -0.0),
}


def refused(name: str, value: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.param == name
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_not_a_finite_number(name: str):
    """Case B110: a check of one side only would let NaN through."""
    for value in NO_NUMBERS:
        assert "a finite number" in refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_every_range(name: str):
    """Case B110: what is just outside is refused, what is on the edge is taken."""
    for value in JUST_OUTSIDE[name]:
        refused(name, value)
    for value in AT_THE_EDGE[name]:
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "x", None, True])
def test_bias_that_is_not_a_finite_number(value: object):
    """Cases B104, B110."""
    refused("logit_bias", {5: value})


@pytest.mark.parametrize(
    "name", ["top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "stream_interval"]
)
def test_counts_are_integers(name: str):
    """Cases B064, B110: neither strings nor fractions nor numbers beyond all bounds are counts."""
    for value in ("5", 1.5, math.nan, math.inf, [1], -7 if name != "seed" else 2**63, 2**64):
        refused(name, value)
    if name in ("top_k", "stream_interval"):
        SamplingParams(**{name: 2**63 - 1})


@pytest.mark.parametrize("value", [10**30, pytest.param(10**5000, id="many digits")])
def test_a_count_beyond_all_bounds_is_told_the_bound(value: int):
    """Case B110: the reason is that bound, not the other."""
    with pytest.raises(
        RequestError, match=r"max_tokens must be an integer of at least 1 and at most 92233720"
    ):
        SamplingParams(max_tokens=value)
    with pytest.raises(
        RequestError, match=r"top_k must be 0 or -1 for off, or a positive integer and at most "
    ):
        SamplingParams(top_k=value)


def test_none_is_the_default_where_there_is_one():
    """Case B064: null and absent are the same thing."""
    for name in ("seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias", "bad_words"):
        assert SamplingParams(**{name: None}) == SamplingParams()
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_a_refusal_does_not_repeat_what_it_was_given():
    """Case B143, its kind: the message is short, however long the value."""
    for name, value in [("temperature", "9" * 10**6), ("logit_bias", ["x"] * 10**5), ("stop", [5] * 10**5)]:
        assert len(refused(name, value)) < 200


@pytest.mark.parametrize("n", [0, -1, 1.5, 5_000_000, None, "2", True])
def test_how_many_answers(n: object):
    """Case B100, and B167: a number of answers that memory could not hold is refused before any is made."""
    refused("n", n)
