"""Values of a wrong kind are refused by name, whatever kind they are of."""

import pytest

from mainspring.base.errors import RequestError
from mainspring.base.params import SamplingParams

HUGE = 10**400  # an integer beyond every float


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", ["\ud800"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("bad_words", 1.5),
        ("bad_words", ["a\udfff"]),
        ("allowed_token_ids", 7),
        ("temperature", HUGE),
        ("top_p", HUGE),
        ("repetition_penalty", HUGE),
        ("repetition_penalty", 1e-40),
        ("logit_bias", {1: HUGE}),
        ("logit_bias", {1.7: 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {"1_0": 1.0}),
        ("logit_bias", [(1, 2.0)]),
        ("skip_special_tokens", "x"),
        ("ignore_eos", "no"),
        ("detokenize", 1),
        ("include_stop_str_in_output", None),
        ("skip_reading_prefix_cache", "x"),
        ("extra_args", {"a": 1}),
    ],
)
def test_refused_by_name(name: str, value: object):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


def test_forms_that_are_taken():
    params = SamplingParams(stop=("a", "b"), stop_token_ids={3}, logit_bias={"5": 1, 6: 200.0}, extra_args={})
    assert params.stop == ["a", "b"]
    assert params.stop_token_ids == [3]
    assert params.logit_bias == {5: 1, 6: 100.0}
