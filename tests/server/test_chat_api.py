"""`/v1/chat/completions` over a socket, with a core that says what it is told to say."""

from __future__ import annotations

import pytest
from server_toys import HELLO, TOY, scripted, text_script

PARIS = "The capital is Paris."


@pytest.fixture(scope="module")
def paris():
    with scripted(text_script(PARIS)) as server:
        yield server


def joined(events, index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_reply(paris):
    reply = paris.chat(max_tokens=100)
    assert reply.status == 200
    body = reply.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "toy"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == PARIS
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    num_prompt = len(TOY.encode("user: hello\n"))
    num_answer = len(text_script(PARIS))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answer,
        "total_tokens": num_prompt + num_answer,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def test_stream_says_the_same(paris):
    events = paris.chat(max_tokens=100, stream=True).events
    assert joined(events) == PARIS
    first, *middle, last = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["choices"][0]["finish_reason"] is None for event in middle)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["system_fingerprint"] == paris.chat().json["system_fingerprint"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize(
    ("options", "at_end", "always"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True}, False, False),
    ],
)
def test_usage_of_streams(paris, options, at_end, always):
    events = paris.chat(max_tokens=4, stream=True, stream_options=options).events
    *chunks, last = events if at_end else [*events, {"choices": [], "usage": None}]
    if at_end:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4
    assert [("usage" in chunk) for chunk in chunks] == [always] * len(chunks)
    if always:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [0, 1, 2, 3, 4]


def test_several_answers():
    """Case B100: indices, own finish reasons, every token counted once and the prompt once; also greedy."""
    scripts = [text_script("one"), text_script("two two"), text_script("three", end=False)]

    def script(request):
        return scripts[int(request.request_id.partition("_")[0])]

    with scripted(script) as server:
        body = server.chat(n=3, max_tokens=8, temperature=0).json
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop", "length"]
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == ["one", "two two", "three..."]
        usage = body["usage"]
        assert usage["completion_tokens"] == 4 + 8 + 8
        events = server.chat(
            n=3, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
        ).events
        assert [joined(events, index) for index in range(3)] == texts
        assert [event["choices"][0]["delta"].get("role") for event in events[:3]] == ["assistant"] * 3
        ends = [c for event in events for c in event["choices"] if c["finish_reason"]]
        assert {c["index"]: c["finish_reason"] for c in ends} == {0: "stop", 1: "stop", 2: "length"}
        assert len(ends) == 3
        usage.pop("prompt_tokens_details"), usage.pop("completion_tokens_details")
        assert events[-1]["usage"] == usage


def test_logprobs(paris):
    """Case B095: what of them is asked for, and nothing else, in both forms."""
    for fields, num_top in (
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
    ):
        choice = paris.chat(max_tokens=4, **fields).json["choices"][0]
        events = paris.chat(max_tokens=4, stream=True, **fields).events
        if num_top is None:
            assert choice["logprobs"] is None
            assert all(event["choices"][0]["logprobs"] is None for event in events)
            continue
        content = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == PARIS[:4]
        assert [bytes(entry["bytes"]).decode() for entry in content] == list(PARIS[:4])
        assert all(len(entry["top_logprobs"]) == num_top for entry in content)
        assert all(entry["logprob"] < 0 for entry in content)
        streamed = [e["choices"][0]["logprobs"] for e in events]
        assert [entry for part in streamed if part for entry in part["content"]] == content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_logprobs_that_are_refused(paris, fields, param):
    """Case B095."""
    reply = paris.chat(**fields)
    assert reply.status == 400
    assert reply.error["param"] == param


def test_tokens_as_ids(paris):
    body = paris.chat(
        max_tokens=2, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True
    ).json
    ids = text_script(PARIS)[:2]
    assert [e["token"] for e in body["choices"][0]["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
    assert body["choices"][0]["token_ids"] == ids
    assert body["prompt_token_ids"] == TOY.encode("user: hello\n")
    assert body["prompt_text"] is None
    assert paris.chat(return_prompt_text=True).json["prompt_text"] == "user: hello\n"
    events = paris.chat(max_tokens=2, return_token_ids=True, return_prompt_text=True, stream=True).events
    assert events[0]["prompt_token_ids"] == TOY.encode("user: hello\n")
    assert events[0]["prompt_text"] == "user: hello\n"
    assert [event["choices"][0]["token_ids"] for event in events[1:]] == [[i] for i in ids]


def test_prompt_logprobs(paris):
    body = paris.chat(prompt_logprobs=0).json
    assert body["prompt_logprobs"][0] is None
    ids = TOY.encode("user: hello\n")
    assert [next(iter(position)) for position in body["prompt_logprobs"][1:]] == [str(i) for i in ids[1:]]
    assert paris.chat(prompt_logprobs=0, stream=True).error["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stop", ["cap", ["cap"], ["zzz", "cap"]])
def test_stop(paris, stop):
    """Case B083: a string or a list of them; not in the answer unless asked for; a stream says the same."""
    choice = paris.chat(max_tokens=100, stop=stop).json["choices"][0]
    assert choice["message"]["content"] == "The "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "cap")
    events = paris.chat(max_tokens=100, stop=stop, stream=True).events
    assert joined(events) == "The "
    assert events[-1]["choices"][0]["stop_reason"] == "cap"
    shown = paris.chat(max_tokens=100, stop=stop, include_stop_str_in_output=True).json["choices"][0]
    assert shown["message"]["content"] == "The cap"


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(paris, stop):
    """Case B083."""
    assert paris.chat(max_tokens=100, stop=stop).json["choices"][0]["message"]["content"] == PARIS


def test_what_may_be_a_stop_is_held_back():
    """Case B071: nothing of it is sent before it is known; what is none after all comes at the end."""
    with scripted(text_script("DEFGX", end=False)) as server:
        events = server.chat(max_tokens=5, stop=["DEFGHIJ"], stream=True).events
        texts = [event["choices"][0]["delta"].get("content") for event in events]
        assert texts == ["", "DEFGX"]
        cut = server.chat(max_tokens=3, stop=["DEFGHIJ"], stream=True).events
        assert joined(cut) == "DEF"
        assert cut[-1]["choices"][0]["finish_reason"] == "length"


def test_halves_of_characters_are_held_back():
    """Case B086: the answer in deltas is the answer."""
    text = "né 你好 👩‍👩‍👧"
    with scripted(list(text.encode())) as server:
        events = server.chat(max_tokens=len(text.encode()), stream=True).events
        assert joined(events) == text
        assert all("\ufffd" not in event["choices"][0]["delta"].get("content", "") for event in events)


def test_stream_interval(paris):
    events = paris.chat(max_tokens=7, stream=True, stream_interval=3).events
    assert [event["choices"][0]["delta"].get("content") for event in events] == ["", "T", "he ", "cap"]


def test_the_answer_goes_on_where_a_message_ended(paris):
    """Assistant prefill: with and without what was there before."""
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    body = paris.chat(messages, continue_final_message=True, echo=True, max_tokens=3).json
    assert body["choices"][0]["message"]["content"] == "Well, The"
    assert body["usage"]["prompt_tokens"] == len(TOY.encode("user: hello\nassistant: Well, "))
    events = paris.chat(messages, continue_final_message=True, echo=True, max_tokens=3, stream=True).events
    assert joined(events) == "Well, The"
    plain = paris.chat(messages, continue_final_message=True, max_tokens=3).json
    assert plain["choices"][0]["message"]["content"] == "The"
    both = paris.chat(messages, continue_final_message=True, add_generation_prompt=True)
    assert both.error["param"] == "continue_final_message"


def test_limits_of_length():
    """Case B064: null is the rest of the context; max_completion_tokens goes before max_tokens."""
    with scripted([]) as server:
        room = 512 - len(TOY.encode("user: hello\n"))
        for fields, count in (
            ({"max_tokens": None}, room),
            ({"max_tokens": 512}, room),
            ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
            ({"max_tokens": None, "max_completion_tokens": 4}, 4),
        ):
            body = server.chat(**fields).json
            assert body["usage"]["completion_tokens"] == count
            assert body["choices"][0]["finish_reason"] == "length"
        for wrong in (0, -1, 513, 10**9, "5", 1.5, True):
            reply = server.chat(max_tokens=wrong)
            assert (reply.status, reply.error["param"]) == (400, "max_tokens"), wrong


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "priority"]
)
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", '"0.5"', "true", "[]"])
def test_numbers_that_are_none(paris, name, text):
    """Case B110: refused before the engine hears of them; null is the default."""
    head = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "%b": ' % name.encode()
    reply = paris.post("/v1/chat/completions", head + text.encode() + b"}", content_type="application/json")
    assert reply.status == 400
    assert reply.error["param"] in (name, "body")
    assert paris.chat(**{name: None}).status == 200


def test_temperature_has_a_bound_here(paris):
    assert paris.chat(temperature=2.01).error["param"] == "temperature"
    assert paris.chat(temperature=2).status == 200


def test_values_reach_the_engine():
    fields = {
        "temperature": 0.5,
        "top_p": 0.4,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": 101, "6": -3.5},
        "allowed_token_ids": [5, 6, 7],
        "min_tokens": 1,
        "stop_token_ids": [65],
        "ignore_eos": True,
        "priority": -3,
        "cache_salt": "pepper",
    }
    with scripted() as server:
        assert server.chat(**fields).status == 200
        request = server.core.inner.seen[-1]
        params = request.sampling_params
        assert params.logit_bias == {5: 100.0, 6: -3.5}, "clamped, as OpenAI does"
        for name in fields.keys() - {"logit_bias", "priority", "cache_salt", "stop_token_ids"}:
            assert getattr(params, name) == fields[name], name
        assert (request.priority, request.cache_salt) == (-3, "pepper")
        assert 65 in request.stop_token_ids
        server.chat(bad_words=["ab"])
        assert [TOY.id("ab")] in server.core.inner.seen[-1].bad_words_token_ids
        server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, x_vllm_priority="5")
        assert server.core.inner.seen[-1].priority == 5


def test_defaults_of_the_server():
    """Case B118: what is absent or null is the server's; what is set wins, also the API's default."""
    given = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.3, "max_new_tokens": 7}
    with scripted(override_generation_config=given) as server:

        def seen(**fields):
            assert server.chat(**{"max_tokens": None} | fields).status == 200
            params = server.core.inner.seen[-1].sampling_params
            return params.temperature, params.top_k, params.repetition_penalty, params.max_tokens

        assert seen() == seen(temperature=None) == (0.6, 20, 1.3, 7)
        assert seen(temperature=1.0, top_k=0, repetition_penalty=1.0, max_tokens=9) == (1.0, 0, 1.0, 9)


def test_advice_of_the_models_makers():
    """It goes before the API's defaults, and after what the server's owner and the request say."""
    advice = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
    with scripted(engine={"sampling_defaults": advice}, override_generation_config={"top_k": 5}) as server:
        assert server.chat(max_tokens=None, temperature=0.2).status == 200
        params = server.core.inner.seen[-1].sampling_params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.2, 5, 7)


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {"999999": 1}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"abc": 1}},
        {"logit_bias": {"5": "x"}},
        {"logit_bias": {"5": None}},
        {"allowed_token_ids": [999999]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"stop_token_ids": [-1]},
    ],
)
def test_ids_that_are_none(paris, body):
    """Case B104."""
    reply = paris.chat(**body)
    assert (reply.status, reply.error["param"]) == (400, next(iter(body)))


def test_a_cache_salt_has_a_form(paris):
    for salt in ("a/b", "", "x" * 129, "a@b", "nul\0"):
        assert paris.chat(cache_salt=salt).error["param"] == "cache_salt"


def plain(content) -> str:
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b", "")]}],
        [{"role": "assistant", "content": "first"}, *HELLO],
        [*HELLO, *HELLO],
        [{"role": "developer", "content": "be brief", "name": "boss"}, *HELLO],
        HELLO * 300,
    ],
)
def test_messages_of_many_forms(messages):
    """Case B145: empty contents stay what they are, parts are joined by line ends."""
    with scripted() as server:
        many = len(messages) == 300
        assert server.chat(messages).status == (400 if many else 200)  # 300 do not fit this model
        if not many:
            text = "".join(f"{m['role']}: {plain(m['content'])}\n" for m in messages)
            assert server.core.inner.seen[-1].prompt_token_ids == TOY.encode(text)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        [5],
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "user", "content": [{"type": "nonsense"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
)
def test_messages_that_are_none(paris, messages):
    """Case B145: 400 and the field's name."""
    reply = paris.post("/v1/chat/completions", {"messages": messages})
    assert (reply.status, reply.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"reasoning_effort": "high"},
        {"logprob_token_ids": [5]},
        {"thinking_token_budget": 5},
        {"kv_transfer_params": {"a": 1}},
        {"modalities": ["text", "audio"]},
    ],
)
def test_what_cannot_be_had_is_refused_by_name(paris, fields):
    """Case B128: never passed over in silence."""
    reply = paris.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none", "parallel_tool_calls": True},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "verbosity": "low"},
        {"reasoning_effort": "none", "use_beam_search": False, "modalities": ["text"], "best_of": 1},
        {"nobody_knows_this": {"a": [1, 2]}},
        {"n": None, "stream": None, "stop": None, "logit_bias": None, "response_format": None},
        {"response_format": {"type": "text"}},
        {"include_reasoning": True, "documents": [{"text": "a"}], "chat_template_kwargs": {"x": 1}},
    ],
)
def test_what_asks_for_nothing_is_taken(paris, fields):
    assert paris.chat(**fields).status == 200


def test_templates_of_requests(paris):
    assert paris.chat(chat_template="{{ messages }}").error["param"] == "chat_template"
    with scripted(trust_request_chat_template=True) as server:
        reply = server.chat(
            chat_template="<{{ messages[0].content }}{{ mark }}>", chat_template_kwargs={"mark": "!"}
        )
        assert reply.status == 200
        assert server.core.inner.seen[-1].prompt_token_ids == TOY.encode("<hello!>")
        assert server.chat(chat_template="{% if %}").error["param"] == "chat_template"


def test_defaults_of_templates():
    with scripted(template="{{ mark }}", default_chat_template_kwargs={"mark": "!"}) as server:
        server.chat()
        assert server.core.inner.seen[-1].prompt_token_ids == TOY.encode("!")
        server.chat(chat_template_kwargs={"mark": "?"})
        assert server.core.inner.seen[-1].prompt_token_ids == TOY.encode("?")
        refused = server.chat(chat_template_kwargs={"messages": []})
        assert refused.error["param"] == "chat_template_kwargs"


def test_truncation():
    """Case B067: the last tokens stay, usage shows it; what cannot be is refused."""
    with scripted() as server:
        ids = TOY.encode("user: hello\n")
        for keep, side, expected in (
            (3, None, ids[-3:]),
            (3, "left", ids[-3:]),
            (3, "right", ids[:3]),
            (500, None, ids),
            (-1, None, ids),
        ):
            reply = server.chat(truncate_prompt_tokens=keep, truncation_side=side)
            assert reply.json["usage"]["prompt_tokens"] == len(expected)
            assert server.core.inner.seen[-1].prompt_token_ids == expected
        for wrong in (0, -2, 512, 10**6):
            assert server.chat(truncate_prompt_tokens=wrong).error["param"] == "truncate_prompt_tokens"
        assert server.chat(truncate_prompt_tokens=1, truncation_side="up").error["param"] == "truncation_side"
        long = server.complete("x" * 2000, truncate_prompt_tokens=-1, max_tokens=1)
        assert long.json["usage"]["prompt_tokens"] == 511
