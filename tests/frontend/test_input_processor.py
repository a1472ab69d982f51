from __future__ import annotations

import dataclasses
import math
import re

import pytest
from frontend_toys import END, EOS, FACTS, TOY, ToyTokenizer
from hypothesis import given
from hypothesis import strategies as st

from mainspring.base.config import ModelFacts
from mainspring.base.errors import RequestError
from mainspring.base.params import PoolingParams, SamplingParams, StructuredOutputsParams
from mainspring.frontend.input_processor import InputProcessor

V = FACTS.vocab_size
LIMIT = 32


def make(tokenizer=TOY, **settings) -> InputProcessor:
    return InputProcessor(FACTS, LIMIT, tokenizer, **settings)


def process(prompt="hello", *, processor=None, priority=0, cache_salt=None, **params):
    return (processor or make()).process("r", prompt, SamplingParams(**params), priority, cache_salt)


def request_of(*args, **kwargs):
    return process(*args, **kwargs).requests[0]


def refused(param: str, *args, **kwargs) -> str:
    with pytest.raises(RequestError) as caught:
        process(*args, **kwargs)
    assert caught.value.param == param
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message
    assert param in message
    return message


# --- prompts --------------------------------------------------------------------------------------------


class NeverRead(ToyTokenizer):
    """One whose texts take too long to be read."""

    def encode(self, text, *options):
        if len(text) > 10_000:
            raise AssertionError("it was cut into tokens")
        return super().encode(text, *options)


def test_a_text_that_is_far_too_long_is_refused_unread():
    processor = make(NeverRead())
    message = refused("prompt", "a" * 1_000_000, processor=processor)
    assert re.match(
        r"prompt has 1000000 characters, \d+ tokens at the very least, and max_model_len is 32", message
    )
    with pytest.raises(RequestError, match="tokens at the very least"):
        processor.process("r", "a" * 1_000_000, PoolingParams(task="embed"))
    with pytest.raises(AssertionError, match="cut into tokens"):
        processor.process("r", "a" * 1_000_000, PoolingParams(task="embed", truncate_prompt_tokens=5))


def test_forms_of_a_prompt():
    ids = TOY.encode("hello")
    for prompt, text in [
        ("hello", "hello"),
        (ids, None),
        (tuple(ids), None),
        ({"prompt": "hello"}, "hello"),
        ({"prompt_token_ids": ids}, None),
        ({"prompt_token_ids": ids, "prompt": "hello"}, "hello"),
    ]:
        result = process(prompt)
        assert result.prompt == text
        assert result.requests[0].prompt_token_ids == ids
        assert result.requests[0].prompt_token_ids is not ids, "the caller's list is not kept"


def test_bos_of_the_tokenizer():
    with_bos = make(ToyTokenizer(add_bos=True))
    ids = request_of("hello", processor=with_bos).prompt_token_ids
    assert ids == [TOY.bos_token_id, TOY.id("hello")]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        {},
        {"prompt": 5},
        {"prompt_embeds": [1]},
        {"prompt": "a", "multi_modal_data": {}},
        b"abc",
        {1, 2},
    ],
)
def test_what_is_no_prompt(prompt):
    refused("prompt", prompt)


@pytest.mark.parametrize("prompt", ["", [], (), {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompt_is_judged_by_ids(prompt):
    assert "empty" in refused("prompt", prompt)


@pytest.mark.parametrize("ids", [[-1], [V], [2**70], [0, V + 5]])
def test_prompt_ids_in_the_vocabulary(ids):
    """Case B104: an id without a row would index the embedding in the engine."""
    assert str(V - 1) in refused("prompt_token_ids", ids)


@pytest.mark.parametrize("ids", [[1.0], [1, "2"], [True], [None], [[1]]])
def test_prompt_ids_are_integers(ids):
    refused("prompt_token_ids", {"prompt_token_ids": ids})


def test_ids_beyond_the_tokenizer_are_accepted_back():
    """Case B106: the head has more rows than there are tokens; what it said can be sent again."""
    assert request_of([V - 1]).prompt_token_ids == [V - 1]


# --- lengths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, None])
def test_prompt_at_the_limit(max_tokens):
    """Case B062: one token of room is enough; none is refused with both counts, before the core."""
    for length, room in [(LIMIT - 2, 2), (LIMIT - 1, 1)]:
        params = request_of([1] * length, max_tokens=max_tokens).sampling_params
        assert params.max_tokens == min(room, max_tokens or room)
    for length in (LIMIT, LIMIT + 1):
        message = refused("prompt", [1] * length, max_tokens=max_tokens)
        assert str(length) in message
        assert f"max_model_len {LIMIT}" in message


@pytest.mark.parametrize(("given", "resolved"), [(None, 22), (1, 1), (22, 22), (23, 22), (10**9, 22)])
def test_max_tokens_is_an_upper_bound(given, resolved):
    """Cases B064, B065: none is what the length leaves, each prompt its own; more is lowered to it."""
    assert request_of([1] * 10, max_tokens=given).sampling_params.max_tokens == resolved
    assert request_of([1] * 11, max_tokens=given).sampling_params.max_tokens == min(resolved, 21)


@pytest.mark.parametrize("value", [0, -1, "5", 1.5, True])
def test_max_tokens_that_is_no_count(value):
    """Case B064."""
    refused("max_tokens", max_tokens=value)


def test_min_tokens_is_a_demand():
    """Case B076: it has to fit, while max_tokens need not."""
    assert request_of([1] * 12, max_tokens=None, min_tokens=20).sampling_params.min_tokens == 20
    assert str(LIMIT) in refused("min_tokens", [1] * 13, max_tokens=None, min_tokens=20)
    refused("min_tokens", min_tokens=5, max_tokens=4)


# --- parameters that need the vocabulary ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {V: 5}),
        ("logit_bias", {-1: 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {5: "x"}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: None}),
        ("allowed_token_ids", [V]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("stop_token_ids", [V]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["5"]),
    ],
)
def test_ids_are_checked_before_the_core(name, value):
    """Case B104."""
    refused(name, **{name: value})


def test_ids_that_are_right():
    """Case B104: string keys, values beyond 100, duplicates and the whole vocabulary are fine."""
    params = request_of(
        logit_bias={"5": 101.0, V - 1: -1000}, allowed_token_ids=[5, 5, *range(V)], stop_token_ids=[7, 7]
    ).sampling_params
    assert params.logit_bias == {5: 100.0, V - 1: -100.0}
    assert params.allowed_token_ids == [5, 5, *range(V)]


def test_bad_words_that_have_an_id_beyond_the_head():
    """Case B104: the tokenizer may know tokens for which the model has no row."""
    facts = ModelFacts(path="", architecture="toy", max_position_embeddings=64, vocab_size=256)
    narrow = InputProcessor(facts, LIMIT, TOY)
    refused("bad_words", [1], processor=narrow, bad_words=["STOP"])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_within_the_limit(name):
    small, unlimited = make(max_logprobs=5), make(max_logprobs=-1)
    for value in (0, 1, 5):
        assert getattr(request_of(processor=small, **{name: value}).sampling_params, name) == value
    assert "max_logprobs=6" in refused(name, processor=small, **{name: 6})
    assert "max_logprobs=-1" in refused(name, processor=small, **{name: -1})
    assert getattr(request_of(processor=unlimited, **{name: -1}).sampling_params, name) == -1
    refused(name, processor=unlimited, **{name: V + 1})
    assert getattr(request_of(processor=make(max_logprobs=V), **{name: -1}).sampling_params, name) == -1


def test_prompt_logprobs_do_not_read_the_prefix_cache():
    """Case B091: cached tokens have no logits; what the caller says himself stands."""
    assert request_of(prompt_logprobs=1).sampling_params.skip_reading_prefix_cache is True
    assert request_of().sampling_params.skip_reading_prefix_cache is False
    assert request_of(skip_reading_prefix_cache=True).sampling_params.skip_reading_prefix_cache is True


def test_bad_words_with_and_without_a_space():
    """Case B107: both forms are banned, also where they have different numbers of tokens."""
    toy = ToyTokenizer(["w", " word", "phrase", " phrase"])
    processor = InputProcessor(FACTS, LIMIT, toy)
    # "word" is four tokens and " word" one; "phrase" one each
    assert request_of(
        [1], processor=processor, bad_words=["word", "phrase", "phrase"]
    ).bad_words_token_ids == [
        toy.encode("word"),
        [toy.id(" word")],
        [toy.id("phrase")],
        [toy.id(" phrase")],
    ]
    short_plain = InputProcessor(FACTS, LIMIT, ToyTokenizer(["word"]))
    forms = request_of([1], processor=short_plain, bad_words=["word"]).bad_words_token_ids
    assert [len(form) for form in forms] == [1, 2]


def test_bad_word_without_a_token():
    class Dropping(ToyTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [i for i in super().encode(text) if i != ord("x")]

    refused("bad_words", [1], processor=make(Dropping()), bad_words=["x"])


def test_masks_that_leave_nothing():
    """Case B109: refused where it can be known before."""
    a, b = TOY.id(" the"), ord("b")
    refused("allowed_token_ids", allowed_token_ids=[a], bad_words=[" the"])
    refused("allowed_token_ids", allowed_token_ids=[TOY.eos_token_id], min_tokens=5)
    refused("allowed_token_ids", allowed_token_ids=[TOY.eos_token_id, b], stop_token_ids=[b], min_tokens=1)
    refused("allowed_token_ids", allowed_token_ids=[*TOY.eos_token_ids], min_tokens=1)
    request_of(allowed_token_ids=[a, b], bad_words=[" the"])
    request_of(allowed_token_ids=[TOY.eos_token_id])
    request_of(allowed_token_ids=[TOY.eos_token_id], min_tokens=5, ignore_eos=True)


def test_without_a_tokenizer():
    """Case B082: what needs text is refused by name, not ignored."""
    bare = make(None)
    assert request_of([1, 2], processor=bare).prompt_token_ids == [1, 2]
    assert "prompt_token_ids" in refused("prompt", "hello", processor=bare)
    refused("stop", [1], processor=bare, stop=["x"])
    refused("bad_words", [1], processor=bare, bad_words=["x"])


def test_stop_strings_need_text():
    """Case B082."""
    refused("stop", stop=["x"], detokenize=False)


def test_stop_forms():
    """Case B083: a string and a list of one are equal; none at all; long ones; empty ones are refused."""
    assert request_of(stop="7").sampling_params.stop == request_of(stop=["7"]).sampling_params.stop == ["7"]
    assert request_of(stop=[]).sampling_params.stop == request_of(stop=None).sampling_params.stop == []
    request_of(stop=["x" * 1000] * 5)
    refused("stop", stop="")
    refused("stop", stop=["a", ""])
    refused("stop", stop=["x" * 10_000, "y" * 10_000])


# --- the end --------------------------------------------------------------------------------------------


def test_end_tokens():
    """Case B079: every EOS of the model ends it; ignore_eos leaves only what the caller named."""
    eos, end = FACTS.eos_token_ids
    request = request_of(stop_token_ids=[7, eos, 7])
    assert (request.eos_token_id, request.stop_token_ids) == (eos, [7, end])
    request = request_of(stop_token_ids=[7, eos], ignore_eos=True)
    assert (request.eos_token_id, request.stop_token_ids) == (None, [7, eos])


def test_stop_string_that_is_a_special_token():
    """Case B080: it is not in the text, so its id ends the answer, also with ignore_eos."""
    assert request_of(stop=[END], ignore_eos=True).stop_token_ids == [TOY.id(END)]
    assert request_of(stop=[EOS, "x"]).stop_token_ids == [TOY.id(END)], "EOS ends it anyway"


# --- the rest -------------------------------------------------------------------------------------------


def test_the_callers_objects_are_left_alone():
    allowed = [5, 6]
    params = SamplingParams(n=2, allowed_token_ids=allowed, max_tokens=None, prompt_logprobs=1)
    requests = make().process("r", "hello", params).requests
    allowed.append(V + 100)
    assert requests[0].sampling_params.allowed_token_ids == [5, 6]
    assert (params.n, params.seed, params.max_tokens, params.skip_reading_prefix_cache) == (
        2,
        None,
        None,
        None,
    )


def test_params_changed_after_they_were_made_are_judged_again():
    params = SamplingParams()
    params.temperature = math.nan
    with pytest.raises(RequestError, match="temperature"):
        make().process("r", "hello", params)


def test_seeds_are_given_at_intake_and_can_be_repeated():
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    seeds = [[request_of(processor=p).sampling_params.seed for _ in range(3)] for p in (first, again, other)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == 3
    assert request_of(seed=0).sampling_params.seed == 0
    assert request_of(seed=-1).sampling_params.seed >= 0


def test_internal_ids_differ():
    """Case B140: the same id of the caller is a new id inside each time."""
    ids = {request_of().request_id for _ in range(100)}
    assert len(ids) == 100
    assert all(i.startswith("r-") and len(i) == 10 for i in ids)


def test_salt_and_priority():
    request = request_of({"prompt": "hello", "cache_salt": "s"}, priority=-3)
    assert (request.cache_salt, request.priority) == ("s", -3)
    assert request_of(cache_salt="t").cache_salt == "t"
    refused("cache_salt", cache_salt="")
    refused("cache_salt", {"prompt": "hello", "cache_salt": ""})
    refused("priority", priority=1.0)
    refused("priority", priority=True)
    refused("priority", priority=2**63)


def test_structured_outputs():
    """They go to the core beside the parameters, not in them; what cannot be enforced stays here."""
    structure = StructuredOutputsParams(json={"type": "object"})
    params = SamplingParams(structured_outputs=structure)
    (request,) = make().process("r", "hello", params).requests
    assert request.structured_outputs == structure
    assert request.sampling_params.structured_outputs is None
    assert params.structured_outputs is structure, "the caller's object is not changed"
    assert "dependentSchemas" in refused(
        "structured_outputs", structured_outputs=StructuredOutputsParams(json={"dependentSchemas": {}})
    )
    assert "skip_tokenizer_init" in refused(
        "structured_outputs", [1], processor=make(None), structured_outputs=structure
    )
    endless = InputProcessor(dataclasses.replace(FACTS, eos_token_ids=()), LIMIT, TOY)
    assert "names none" in refused("structured_outputs", processor=endless, structured_outputs=structure)


def test_what_is_no_sampling_params():
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams, got dict"):
        make().process("r", "hello", {"max_tokens": 3})


@given(st.lists(st.integers(-5, V + 5), max_size=40), st.integers(0, 50), st.none() | st.integers(1, 50))
def test_what_is_accepted_can_be_served(ids, min_tokens, max_tokens):
    """Whatever comes: a refusal, or a request within the vocabulary and the length."""
    try:
        request = request_of(ids, min_tokens=min_tokens, max_tokens=max_tokens)
    except RequestError:
        return
    params = request.sampling_params
    assert all(0 <= i < V for i in request.prompt_token_ids)
    assert 1 <= params.max_tokens <= LIMIT - len(ids)
    assert params.min_tokens <= params.max_tokens


def test_text_that_cannot_be_sent_is_refused_by_name():
    """Case B146, its kind: half a surrogate pair must be seen at intake, where only its sender is hurt."""
    assert "U+D800" in refused("cache_salt", cache_salt="a\ud800")
    with pytest.raises(RequestError, match="request_id"):
        make().process("r\udfff", "hello", SamplingParams())
    with pytest.raises(RequestError, match="request_id"):
        make().process(5, "hello", SamplingParams())


def test_integers_of_other_libraries_are_integers():
    np = pytest.importorskip("numpy")
    ids = request_of([np.int64(4), 5]).prompt_token_ids
    assert ids == [4, 5]
    assert {type(i) for i in ids} == {int}
    assert "True" in refused("prompt_token_ids", [True, 5])
    assert "1.0" in refused("prompt_token_ids", [np.float64(1.0)])


def test_what_is_shown_of_a_wrong_value_is_short():
    assert len(refused("prompt", {"k" * 100_000: 1})) < 300
