"""Tools at `/v1/chat/completions`, with a core that says what it is told to say."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
from server_toys import HELLO, TOY, scripted, text_script

from mainspring.server import answering
from mainspring.server.conversation import AnswerReader

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "x}\\" 😀", "n": 12, "o": {}, "l": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
FORCED = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "get_time", "parameters": {{}}}}]'


def allowed(mode: str, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def server_of(text: str, *, end: bool = True, chunk: int = 1, **settings):
    return scripted(text_script(text, end), chunk=chunk, template=TEMPLATE, **settings)


def whole(server, **fields):
    """Of the only choice: (content, [(name, arguments)], finish reason)."""
    [choice] = server.chat(**{"max_tokens": 400, "tools": TOOLS} | fields).json["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert calls or "tool_calls" not in message
    assert all(re.fullmatch("chatcmpl-tool-[0-9a-f]{16}", call["id"]) for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    said = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message["content"], said, choice["finish_reason"]


def streamed(server, **fields):
    """The same, of a stream. Asserts that names and ids come once, in order, and that there is one end."""
    events = server.chat(**{"max_tokens": 400, "tools": TOOLS, "stream": True} | fields).events
    content, calls, ids, ends = "", [], [], []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                assert delta["content"] is None
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    ids.append(call["id"])
                    calls.append([call["function"]["name"], ""])
                else:
                    assert call["index"] == len(calls) - 1
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    assert call["function"]["arguments"]
                    calls[-1][1] += call["function"]["arguments"]
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(set(ids)) == len(ids)
    [reason] = ends
    assert events[-1]["choices"][0]["finish_reason"] == reason
    return content, list(map(tuple, calls)), reason


def both(server, **fields):
    """Whole and streamed, which must agree."""
    content, calls, reason = whole(server, **fields)
    assert content is not None or calls
    assert streamed(server, **fields) == (content or "", calls, reason)
    return content, calls, reason


@pytest.mark.parametrize(
    ("fields", "text", "calls", "reason"),
    [
        ({}, CALL, [("get_weather", ARGUMENTS)], "tool_calls"),
        ({"tool_choice": "auto"}, CALL, [("get_weather", ARGUMENTS)], "tool_calls"),
        ({"tool_choice": "auto"}, "Hello.", [], "stop"),
        ({"tool_choice": "none"}, "Hello.", [], "stop"),
        ({"tool_choice": "none"}, CALL, [], "stop"),
        ({"tool_choice": NAMED}, ARGUMENTS, [("get_weather", ARGUMENTS)], "stop"),
        ({"tool_choice": "required"}, FORCED, [("get_weather", ARGUMENTS), ("get_time", "{}")], "tool_calls"),
    ],
)
def test_why_an_answer_ends(fields, text, calls, reason):
    """Case B137: the same whole and streamed, for every choice, with a call and without."""
    with server_of(text) as server:
        content, said, why = both(server, **fields)
    assert (said, why) == (calls, reason)
    is_forced = fields.get("tool_choice") in (NAMED, "required")
    assert content == (("" if is_forced else None) if calls else text)


SHORT = '{"a": "}\\" é"}'


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, f'So <tool_call>{{"name": "f", "arguments": {SHORT}}}</tool_call>'),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, SHORT),
        ({"tool_choice": "required"}, f'[{{"name": "f", "parameters": {SHORT}}}, {{"name": "f"'),
    ],
    ids=["auto", "named", "required"],
)
def test_a_call_that_is_cut(fields, text):
    """Case B136: cut by max_tokens at every length, the reason is length, and what there is of the call is
    delivered as it is."""
    with server_of(text, end=False) as server:
        longest = ""
        for max_tokens in range(1, len(TOY.encode(text)) + 1):
            tools = [{"type": "function", "function": {"name": "f"}}]
            content, said, reason = both(server, tools=tools, max_tokens=max_tokens, **fields)
            assert reason == "length"
            assert not content or (not fields and (said or text.startswith(content)))
            arguments = said[0][1] if said else ""
            assert SHORT.startswith(arguments.rstrip("\ufffd"))  # cut inside a character
            assert len(arguments) >= len(longest)
            longest = arguments
    assert longest == SHORT


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"A\n{CALL}\n\n after", "A\nafter"),
        (f"{CALL}{SECOND} after", "after"),
        (f"A {CALL}B{SECOND}", "A\nB"),
    ],
)
def test_texts_around_calls_are_not_glued(text, content):
    with server_of(text) as server:
        assert both(server)[0] == content


def test_what_is_long_is_read_beside_the_loop(monkeypatch):
    """Whole and streamed, by every API, and with the same result; what is short is not worth a thread."""
    threads = []
    plain = AnswerReader.read

    def read(self, answer):
        if answer.text:
            threads.append(threading.current_thread())
        return plain(self, answer)

    monkeypatch.setattr(AnswerReader, "read", read)
    monkeypatch.setattr(answering, "LONG_CHARACTERS", 50)
    with server_of(CALL, chunk=1000) as server:
        assert both(server)[1] == [("get_weather", ARGUMENTS)]
        for path, given in (
            ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]}),
            (
                "/v1/messages",
                {"messages": HELLO, "max_tokens": 400, "tools": [{"name": "f", "input_schema": PARAMETERS}]},
            ),
        ):
            for stream in (False, True):
                fields = {"model": "toy", "stream": stream, **given}
                reply = server.post(path, fields)
                assert (reply.status, b"x}" in reply.body) == (200, True), reply.body
        assert len(threads) == 6
        assert server._thread not in threads
        threads.clear()
        monkeypatch.setattr(answering, "LONG_CHARACTERS", 500)
        both(server)
        assert threads == [server._thread] * 2


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [({}, CALL), ({"tool_choice": "required"}, FORCED), ({"tool_choice": NAMED}, ARGUMENTS)],
    ids=["auto", "required", "named"],
)
def test_a_stop_string_inside_a_call(fields, text, include):
    """Case B137: the call was not made, so nobody may run it. Between calls and behind them it is as ever."""
    with server_of(text) as server:
        _, cut, reason = both(server, stop=["12,"], include_stop_str_in_output=include, **fields)
        assert cut == [("get_weather", ARGUMENTS[: ARGUMENTS.index("12,") + 3 * include])]
        assert reason == "stop"
        if not fields:
            called = (None, [("get_weather", ARGUMENTS)], "tool_calls")
            assert both(server, stop=["</tool_call>"], include_stop_str_in_output=include) == called


def test_a_tag_of_reasoning_that_is_cut_is_no_call():
    """What a named call's arguments begin with is a brace."""
    with server_of("<think>hm</think>\n{}", end=False, reasoning_parser="qwen3") as server:
        for max_tokens in range(1, 7):
            assert both(server, tool_choice=NAMED, max_tokens=max_tokens) == ("", [], "length")


def test_strict_where_a_call_begins_with_a_special_token():
    """It cannot be enforced where the model may choose, so it is refused; where a call is demanded it can."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    text = f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    with scripted(text_script(text), template="[TOOL_CALLS]{{ messages[0].content }}") as server:
        assert server.chat(tools=[strict]).status == 200
        server.service._chats = server.service.chats._replace(specials=frozenset({"[TOOL_CALLS]"}))
        refused = server.chat(tools=[strict])
        assert (refused.status, refused.error["param"]) == (400, "tools")
        assert "'get_weather': strict cannot be enforced" in refused.error["message"]
        for fields in ({"tools": [strict], "tool_choice": "required"}, {"tools": [WEATHER]}):
            assert server.chat(**fields).status == 200


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_any_cutting_of_the_text_gives_the_same_call(chunk):
    """Case B134: text before, between and after, two calls, nested quotes, characters of several bytes."""
    text = f"Well 🎉 {CALL}\n{SECOND} so."
    with server_of(text, chunk=chunk) as server:
        content, said, reason = both(server)
    assert said == [("get_weather", ARGUMENTS), ("get_time", "{}")]
    assert json.loads(said[0][1]) == {"city": 'x}" 😀', "n": 12, "o": {}, "l": [1, 2]}
    assert content.startswith("Well 🎉")
    assert content.endswith("so.")
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("Hi <tool", {}, "stop"),
        ("Hi <toolSTOP and more", {"stop": ["STOP"]}, "stop"),
        ("Hi <tool", {"max_tokens": len(TOY.encode("Hi <tool"))}, "length"),
    ],
    ids=["eos", "stop string", "max_tokens"],
)
def test_text_that_was_held_back_is_given_at_the_end(text, fields, reason):
    """Case B139: what might have begun a call is content, however the answer ends."""
    with server_of(text) as server:
        assert both(server, **fields) == ("Hi <tool", [], reason)


def test_text_that_was_held_back_is_given_when_it_is_aborted():
    """Case B139: by an abort, too."""
    with server_of("Hi <tool", end=False) as server:
        core = server.core
        num_tokens = len(TOY.encode("Hi <tool"))
        advance = core.inner._advance

        def some(request, tokens):
            output = advance(request, tokens)
            if len(tokens) == num_tokens:
                core.gate.clear()
            return output

        core.inner._advance = some

        def abort():
            while core.gate.is_set():
                time.sleep(0.001)
            server.loop.call_soon_threadsafe(
                lambda: server.loop.create_task(server.service.llm.abort("chatcmpl-held"))
            )

        thread = threading.Thread(target=abort)
        thread.start()
        assert streamed(server, request_id="held") == ("Hi <tool", [], "abort")
        thread.join()


def test_one_call_where_several_are_not_wanted():
    with server_of(f"{CALL}{SECOND}") as server:
        only = [("get_weather", ARGUMENTS)]
        assert both(server, parallel_tool_calls=False) == (None, only, "tool_calls")
        assert len(both(server, parallel_tool_calls=True)[1]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": allowed("none", CLOCK)}, "tool_choice"),
        ({"tool_choice": allowed("auto")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "get_time")}, "tool_choice"),
        (
            {"tool_choice": allowed("auto", {"type": "function", "function": {"name": "nobody"}})},
            "tool_choice",
        ),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"use_beam_search": True, "n": 2}, "tools"),
    ],
)
def test_what_is_no_tool_or_no_choice(fields, param):
    """Case B137: no tools, none of that name, or nothing to choose from: refused by name."""
    with server_of("x") as server:
        reply = server.chat(**{"tools": TOOLS} | fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_no_tools_in_a_list_are_no_tools():
    template = "{% if tools is not none %}tools! {% endif %}{{ messages[0].content }}"
    with scripted(text_script("x"), template=template) as server:
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = server.post(path, {"messages": HELLO, "tools": [], "return_prompt_text": True})
            assert reply.status == 200
            assert reply.json.get("prompt_text", "hello") == "hello"
            assert reply.json.get("tokens", TOY.encode("hello")) == TOY.encode("hello")
        reply = server.chat(tools=[], tool_choice="required")
        assert (reply.status, reply.error["param"]) == (400, "tool_choice")


def test_choices_without_tools_that_ask_for_nothing():
    with server_of(CALL) as server:
        for choice in ("none", "auto", None):
            assert whole(server, tools=None, tool_choice=choice) == (CALL, [], "stop")


def test_tools_and_calls_reach_the_template():
    """Arguments come as JSON text, and templates get objects."""
    calls = [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "é"}'}}
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "content": [{"type": "text", "text": "wind"}]},
    ]
    with server_of("It rains.") as server:
        reply = server.chat(messages, tools=TOOLS, return_prompt_text=True, max_tokens=50).json
        body = {"messages": messages, "tools": TOOLS}
        assert server.post("/tokenize", body).json["count"] == reply["usage"]["prompt_tokens"]
    assert reply["prompt_text"] == (
        f"{json.dumps(WEATHER)}\n{json.dumps(CLOCK)}\nuser: hello\n"
        'assistant: <tool_call>{"name": "get_weather", "arguments": {"city": "é"}}</tool_call>\n'
        "tool: rain\ntool: wind\n"
    )


@pytest.mark.parametrize(
    ("mode", "text"), [("auto", SECOND), ("required", '[{"name": "get_time", "parameters": {}}]')]
)
def test_some_tools_are_allowed(mode, text):
    """The model is told of these alone, and cannot be made to call another."""
    choice = allowed(mode, CLOCK, CLOCK)
    with server_of(text) as server:
        assert both(server, tool_choice=choice)[1:] == ([("get_time", "{}")], "tool_calls")
        seen = server.core.inner.seen[-1]
        assert TOY.decode(seen.prompt_token_ids) == f"{json.dumps(CLOCK)}\nuser: hello\n"
        assert "get_weather" not in str(seen.structured_outputs)
        assert (seen.structured_outputs is None) == (mode == "auto")


def test_several_answers():
    """Each answer has its own calls, and ids of its own."""
    scripts = [text_script(CALL), text_script("No."), text_script(SECOND)]

    def script(request):
        return scripts[int(request.request_id.partition("_")[0])]

    with scripted(script, template=TEMPLATE) as server:
        choices = server.chat(n=3, tools=TOOLS, max_tokens=200).json["choices"]
        events = server.chat(n=3, tools=TOOLS, max_tokens=200, stream=True).events
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    names = [[c["function"]["name"] for c in choice["message"].get("tool_calls", [])] for choice in choices]
    assert names == [["get_weather"], [], ["get_time"]]
    begun = {
        choice["index"]: call
        for event in events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", [])
        if "id" in call
    }
    assert {index: call["function"]["name"] for index, call in begun.items()} == {
        0: "get_weather",
        2: "get_time",
    }
    assert begun[0]["id"] != begun[2]["id"]


def test_log_probabilities_and_ids_beside_calls():
    """Every token has its own once, whatever its text says."""
    with server_of(f"Well {CALL}") as server:
        given = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, "max_tokens": 200}
        [choice] = server.chat(**given).json["choices"]
        events = server.chat(**given, stream=True).events
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    chunks = [event["choices"][0] for event in events]
    assert [i for chunk in chunks for i in chunk.get("token_ids") or []] == choice["token_ids"]
    logprobs = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"]


def test_calls_are_text_where_nobody_reads_them():
    """A model whose template shows no format that is known, and a server that is told to."""
    with scripted(text_script(CALL), template="{{ messages[0].content }}") as server:
        assert both(server) == (CALL, [], "stop")
    with server_of(CALL, tool_call_parser="none") as server:
        assert both(server) == (CALL, [], "stop")
    with scripted(
        text_script(CALL), template="{{ messages[0].content }}", tool_call_parser="hermes"
    ) as server:
        assert both(server)[1] == [("get_weather", ARGUMENTS)]


def test_calls_of_its_own_accord_may_be_forbidden():
    """As in vLLM without --enable-auto-tool-choice."""
    with server_of(ARGUMENTS, enable_auto_tool_choice=False) as server:
        assert server.chat(tools=TOOLS).error["param"] == "tool_choice"
        assert server.chat(tools=TOOLS, tool_choice="none").status == 200
        assert both(server, tool_choice=NAMED)[1] == [("get_weather", ARGUMENTS)]


def test_ids_as_mistrals_template_wants_them():
    text = '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'
    with scripted(text_script(text), template="[TOOL_CALLS]{{ messages[0].content }}") as server:
        [choice] = server.chat(tools=TOOLS, max_tokens=200).json["choices"]
    [call] = choice["message"]["tool_calls"]
    assert re.fullmatch("[0-9a-z]{9}", call["id"])


def test_forced_calls_are_bound_by_their_schemas():
    """Whether strict or not: what the engine is asked for. Arguments that are not listed do not exist."""
    schema = PARAMETERS | {"additionalProperties": False}
    with server_of("{}") as server:
        seen = server.core.inner.seen
        server.chat(tools=TOOLS, tool_choice=NAMED)
        assert json.loads(seen[-1].structured_outputs.json) == schema
        server.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert "get_time" in seen[-1].structured_outputs.structural_tag
        server.chat(tools=TOOLS)
        assert seen[-1].structured_outputs is None
        # what is said is calls alone, so there is nothing that this could bind
        server.chat(tools=TOOLS, tool_choice=NAMED, response_format={"type": "json_object"})
        assert json.loads(seen[-1].structured_outputs.json) == schema


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": "x", "tool_calls": None},
        {"role": "tool", "content": "x"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "tool", "tool_call_id": "a", "content": [], "name": "f"},
    ],
)
def test_messages_of_calls_and_results(message):
    """Case B145: no content beside calls, results without an id."""
    with server_of("x") as server:
        assert server.chat([*HELLO, message], tools=TOOLS).status == 200


@pytest.mark.parametrize(
    "calls",
    [
        5,
        "f",
        [5],
        [{}],
        [{"function": {}}],
        [{"function": {"name": 5}}],
    ],
)
def test_calls_that_are_none(calls):
    """Case B145: refused, and where they stand is named."""
    with server_of("x") as server:
        reply = server.chat([{"role": "assistant", "content": "x", "tool_calls": calls}])
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert reply.error["message"].startswith("messages[0].tool_calls")


@pytest.mark.parametrize("arguments", ['{"city": "Pa', "Paris", "[1]", '{"a": "\\ud83e"}'])
def test_a_conversation_goes_on_after_a_call_that_was_broken(arguments):
    """Arguments that are no object of JSON are shown to the model as the text that they are."""
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "no JSON"}]
    with server_of("x") as server:
        reply = server.chat(messages, return_prompt_text=True).json
    told = json.dumps({"name": "f", "arguments": {"INVALID_JSON": arguments}})
    assert reply["prompt_text"] == f"user: hello\nassistant: <tool_call>{told}</tool_call>\ntool: no JSON\n"


def test_half_characters():
    """Case B146: half of a pair of surrogates, in names and in arguments, is refused or replaced."""
    half, start = '"\\ud83e"', '{"messages": [{"role": "user", "content": "x"}], "tools": '
    name = start + '[{"type": "function", "function": {"name": %s}}]}'
    schema = name.replace("%s", '"f", "parameters": {"type": "object", "properties": {%s: {}}}')
    call = (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '
        '"{\\"a\\": \\"\\\\ud83e\\"}"}}]}]}'
    )
    with server_of("x") as server:
        for body in (name % half, schema % half, call):
            reply = server.post("/v1/chat/completions", body.encode(), content_type="application/json")
            assert reply.status in (200, 400), reply.body
            assert server.chat().status == 200
