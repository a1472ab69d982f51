"""`/v1/responses`, with a core that says what it is told to say."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from server_toys import TOY, Address, is_idle, scripted, text_script, wait_until

from mainspring.base.params import StructuredOutputsParams

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
CLOCK = {"type": "function", "name": "get_time"}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
LOGPROBS = "message.output_text.logprobs"


@contextmanager
def server_of(text: str = "hello Paris", *, end: bool = True, **options):
    with scripted(text_script(text, end), template=TEMPLATE, **options) as server:
        yield server
        server.core.gate.set()
        wait_until(lambda: is_idle(server))


def create(server: Address, given="hi", **fields):
    """The response, which must have come."""
    reply = server.post("/v1/responses", {"input": given} | fields)
    assert reply.status == 200, reply.body
    return reply.json


def framed(text: str) -> list[dict]:
    """The events of a stream. Asserts the framing."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, data = re.fullmatch("event: (.+)\ndata: ({.+})", frame).groups()
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def stream(server: Address, given="hi", **fields) -> list[dict]:
    reply = server.post("/v1/responses", {"input": given, "stream": True} | fields)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = framed(reply.body.decode())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def output_text(response: dict) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def asked(server):
    """The newest question, as the core was asked it."""
    return server.core.inner.seen[-1]


def prompt(server) -> str:
    return TOY.decode(asked(server).prompt_token_ids)


def refusal(server: Address, given="hi", **fields) -> dict:
    reply = server.post("/v1/responses", {"input": given} | fields)
    assert 400 <= reply.status < 500, reply.body
    return reply.error


def nameless(value):
    """Without ids and times, which differ between two answers that are the same."""
    if isinstance(value, dict):
        varies = ("id", "call_id", "created_at")
        return {name: nameless(each) for name, each in value.items() if name not in varies}
    return [nameless(each) for each in value] if isinstance(value, list) else value


# -- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello Paris", f"{THOUGHT}hello", f"{THOUGHT}{CALL}", f"hello {CALL}"])
@pytest.mark.parametrize("limit", [None, 9])
def test_streamed_and_whole(text, limit):
    """Case B137: the response at a stream's end is the one that would have come in one piece; cut too."""
    fields = {"tools": [WEATHER], "max_output_tokens": limit}
    options = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    with server_of(text, **options) as server:
        whole = create(server, **fields)
        events = stream(server, **fields)
        last = events[-1]
        assert nameless(last["response"]) == nameless(whole)
        is_cut = whole["status"] == "incomplete"
        assert is_cut == (limit is not None and len(text_script(text)) > limit)
        assert last["type"] == f"response.{whole['status']}"
        assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
        for response in (whole, last["response"]):
            assert server.get(f"/v1/responses/{response['id']}").json == response


def test_a_text():
    with server_of() as server:
        response = create(server, metadata={"a": "b"}, user="me", temperature=0.5, max_output_tokens=50)
        assert output_text(response) == "hello Paris"
        assert response["id"].startswith("resp_")
        assert (response["object"], response["status"], response["model"]) == ("response", "completed", "toy")
        assert (response["metadata"], response["user"]) == ({"a": "b"}, "me")
        assert (response["temperature"], response["max_output_tokens"]) == (0.5, 50)
        assert (response["tool_choice"], response["tools"]) == ("auto", [])
        assert prompt(server) == "user: hi\n"
        given = asked(server).sampling_params
        assert (given.temperature, given.max_tokens) == (0.5, 50)


def test_reasoning_is_an_item():
    """Counted, and told apart; sent back, it stands where the template has it."""
    with server_of(f"{THOUGHT}hello", reasoning_parser="qwen3") as server:
        response = create(server, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
        reasoning, message = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "hello"
        usage = response["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip())
        events = [event["type"] for event in stream(server)]
        assert "response.reasoning_text.delta" in events
        user = {"role": "user", "content": "hi"}
        create(server, [user, reasoning, message, user])
        assert prompt(server) == "user: hi\nassistant: hello<think>Hm.</think>\nuser: hi\n"
        assert [item["type"] for item in create(server, include_reasoning=False)["output"]] == ["message"]


def test_logprobs():
    with server_of("hello Paris é", reasoning_parser="none") as server:
        fields = {"include": [LOGPROBS], "top_logprobs": 2}
        whole = create(server, **fields)
        found = whole["output"][0]["content"][0]["logprobs"]
        assert "".join(each["token"] for each in found[:2]) == "hello Paris"
        assert all(len(each["top_logprobs"]) == 2 for each in found)
        events = stream(server, **fields)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        [done] = [event for event in events if event["type"] == "response.output_text.done"]
        in_deltas = [each for event in deltas for each in event["logprobs"]]
        assert done["logprobs"] == found
        assert found[: len(in_deltas)] == in_deltas
        assert len(found) - len(in_deltas) <= 1  # the end's, which has no text


def test_the_same_question_as_a_chat():
    """Fields that mean the same reach the engine as a chat's do."""
    fields = {
        **{"temperature": 0.7, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "stop": ["x"]},
        **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5},
        **{"ignore_eos": True, "stop_token_ids": [9], "logit_bias": {"5": 1.0}, "priority": 3},
    }
    with server_of() as server:
        server.chat([{"role": "user", "content": "hi"}], max_tokens=5, **fields)
        chat = asked(server)
        create(server, max_output_tokens=5, **fields)
        ours = asked(server)
        assert ours.sampling_params == chat.sampling_params
        assert ours.prompt_token_ids == chat.prompt_token_ids
        assert ours.priority == chat.priority == 3


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_schema", "name": "c", "schema": PARAMETERS}, {"json": PARAMETERS}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "text"}, None),
    ],
)
def test_formats_of_text(form, expected):
    """Case B128: what the text must be reaches the engine."""
    with server_of('{"city": "Paris"}', reasoning_parser="none") as server:
        response = create(server, text={"format": form})
        wanted = asked(server).structured_outputs
        assert wanted == (None if expected is None else StructuredOutputsParams(**expected))
        assert response["text"]["format"]["type"] == form["type"]


# -- conversations -------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_answers():
    """The loop of an agent, twice: by the id of the response, and with all items sent again."""
    with server_of(CALL) as server:
        first = create(server, "weather?", tools=[WEATHER, CLOCK], instructions="be brief")
        [call] = first["output"]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", ARGUMENTS)
        assert call["call_id"] != call["id"]
        assert first["tools"] == [WEATHER, CLOCK]
        assert '"name": "get_time"' in prompt(server)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        said = f'user: weather?\nassistant: <tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
        said += "</tool_call>\ntool: sunny\n"
        second = create(server, [output], previous_response_id=first["id"])
        assert prompt(server) == said  # tools and instructions are a request's own
        assert second["previous_response_id"] == first["id"]
        create(server, [{"role": "user", "content": "weather?"}, call, output])
        assert prompt(server) == said


def test_a_call_that_was_cut_and_what_follows():
    """Case B136: a conversation goes on from it, by the id of the response and with its items sent again."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    cut = '{"city": "Pa'
    with server_of(cut, end=False) as server:
        choice = {"type": "function", "name": "f"}
        first = create(server, tools=[tool], tool_choice=choice, max_output_tokens=len(cut))
        [call] = first["output"]
        assert (first["status"], call["arguments"]) == ("incomplete", cut)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "no JSON"}
        told = json.dumps({"name": "f", "arguments": {"INVALID_JSON": cut}})
        said = f"user: hi\nassistant: <tool_call>{told}</tool_call>\ntool: no JSON\n"
        create(server, [output], previous_response_id=first["id"])
        assert prompt(server) == said
        create(server, [{"role": "user", "content": "hi"}, call, output])
        assert prompt(server) == said


def test_calls_of_one_turn_are_one_message():
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "get_time", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
    ]
    with server_of() as server:
        create(server, items)
        calls = [
            f'<tool_call>{{"name": "get_time", "arguments": {a}}}</tool_call>' for a in ("{}", '{"a": 1}')
        ]
        assert prompt(server) == f"user: a\nb\nassistant: c{''.join(calls)}\ntool: two\ntool: one\n"


def test_instructions():
    """They come first, with what developers say first, and are not carried over."""
    with server_of() as server:
        items = [{"role": "developer", "content": "one"}, {"role": "user", "content": "hi"}]
        first = create(server, items, instructions="zero")
        assert prompt(server) == "system: zero\n\none\nuser: hi\n"
        create(server, "more", previous_response_id=first["id"])
        assert prompt(server) == "system: one\nuser: hi\nassistant: hello Paris\nuser: more\n"


def test_items_by_reference():
    with server_of() as server:
        first = create(server)
        [item] = first["output"]
        create(server, [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "more"}])
        assert prompt(server) == "assistant: hello Paris\nuser: more\n"
        for response_id in list(server.service.responses._responses):
            server.ask("DELETE", f"/v1/responses/{response_id}")
        error = refusal(server, [{"type": "item_reference", "id": item["id"]}])
        assert (error["code"], error["param"]) == (404, "input")


@pytest.mark.parametrize("goes", ["first", "second", "evicted"])
def test_an_item_of_two_responses_is_known_as_long_as_one_is_stored(goes):
    with server_of(max_stored_responses=2) as server:
        first = create(server)
        [item] = first["output"]
        second = create(server, [item, {"role": "user", "content": "more"}])
        if goes == "evicted":
            create(server)
        else:
            server.ask("DELETE", f"/v1/responses/{(first if goes == 'first' else second)['id']}")
        create(server, [{"type": "item_reference", "id": item["id"]}], store=False)
        assert prompt(server) == "assistant: hello Paris\n"


@pytest.mark.parametrize(
    ("choice", "text", "called"),
    [
        ("required", f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]', "get_weather"),
        ({"type": "function", "name": "get_weather"}, ARGUMENTS, "get_weather"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_time"}],
            },
            '[{"name": "get_time", "parameters": {}}]',
            "get_time",
        ),
    ],
)
def test_forced_calls(choice, text, called):
    """Bound by the schema, and read accordingly."""
    with server_of(text) as server:
        response = create(server, tools=[WEATHER, CLOCK], tool_choice=choice)
        [call] = response["output"]
        assert (call["name"], call["status"], response["status"]) == (called, "completed", "completed")
        assert response["tool_choice"] == choice
        assert asked(server).structured_outputs is not None
        names = re.findall('"name": "(get_\\w+)"', prompt(server))
        assert names == (["get_time"] if called == "get_time" else ["get_weather", "get_time"])


def test_one_call_at_most():
    with server_of(f"{CALL}\n{CALL}") as server:
        assert len(create(server, tools=[WEATHER])["output"]) == 2
        response = create(server, tools=[WEATHER], parallel_tool_calls=False)
        assert len(response["output"]) == 1
        assert response["parallel_tool_calls"] is False


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_server():
    with server_of() as server:
        yield server


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "content\\[0\\]"),
        ({"input": [{"type": "web_search_call"}]}, "input", "input\\[0\\] is of type 'web_search_call'"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "robot"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input", "arguments"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input",
            "call_id '1'",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "cannot be read"),
        ({"input": [{}]}, "input", "None"),
        ({"input": 5}, "input", "Expected"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input says nothing"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "mcp"}]}, "tools", "runs no tools"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"tool_choice": {"type": "file_search"}, "tools": [CLOCK]}, "tool_choice", "file_search"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [CLOCK]}, "tool_choice", "'f'"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [CLOCK]},
            "tool_choice",
            "allows no tool",
        ),
        ({"tool_choice": {"function": 5}, "tools": [CLOCK]}, "tool_choice", "must be"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "xml"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format",
            "^text.format: these keywords are not supported",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "text.format and structured_outputs",
        ),
        ({"prompt": {"id": "p"}}, "prompt", "templates"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"background": True, "store": False}, "background", "store"),
        ({"include": ["everything"]}, "include", "everything"),
        ({"include": [LOGPROBS], "tools": [CLOCK]}, "include", "tools"),
        ({"top_logprobs": 2}, "top_logprobs", LOGPROBS),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "content"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({"truncation": "some"}, "truncation", "auto"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "max_output_tokens 100000"),
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "extra"),
        ({"enable_response_messages": True}, "enable_response_messages", "form"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "not found"),
        ({"model": "other"}, "model", "does not exist"),
        ({"cache_salt": ""}, "cache_salt", "characters"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_refusals(one_server, fields, param, words):
    error = refusal(one_server, **fields)
    assert error["param"] == param
    assert re.search(words, error["message"]), error["message"]
    assert not one_server.core.inner.seen


def test_a_long_prompt():
    """Refused, unless it may be cut: then its end is kept, with room for the answer."""
    with server_of() as server:
        error = refusal(server, "x" * 600)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert "maximum context length is 512 tokens, and input has 607" in error["message"]
        create(server, "x" * 600, truncation="auto", max_output_tokens=12)
        assert len(asked(server).prompt_token_ids) == 500
        assert prompt(server) == "x" * 499 + "\n"


# -- the store -----------------------------------------------------------------------------------------------


def test_the_oldest_go_first():
    """By count; who asks for one that had to go is told so, and who goes on from it too."""
    with server_of(max_stored_responses=2) as server:
        first, second, third = (create(server)["id"] for _ in range(3))
        assert server.get(f"/v1/responses/{second}").status == 200
        assert server.get(f"/v1/responses/{third}").status == 200
        for reply in (
            server.get(f"/v1/responses/{first}"),
            server.post("/v1/responses", {"input": "hi", "previous_response_id": first}),
        ):
            assert (reply.status, "was evicted" in reply.error["message"]) == (404, True)
        assert "not found" in server.get("/v1/responses/resp_never").error["message"]


def test_bytes_are_bounded():
    """However much is asked, what is kept stays below the bound, and what is counted is what is there."""
    with server_of(max_stored_response_bytes=3000) as server:
        store = server.service.responses
        ids = [create(server, "x" * 300)["id"] for _ in range(12)]
        assert 0 < store.num_bytes <= 3000
        kept = [server.get(f"/v1/responses/{each}").status == 200 for each in ids]
        assert kept == sorted(kept)
        assert 2 <= sum(kept) < 8
        previous = create(server)["id"]
        for _ in range(5):
            previous = create(server, "x" * 30, previous_response_id=previous)["id"]
            assert store.num_bytes <= 3000
        while len(store):
            server.ask("DELETE", f"/v1/responses/{next(iter(store._responses))}")
        assert (store.num_bytes, store._items) == (0, {})


def test_not_stored():
    with server_of() as server:
        response = create(server, store=False)
        assert server.get(f"/v1/responses/{response['id']}").status == 404
        assert len(server.service.responses) == 0
    with server_of(max_stored_responses=0) as server:
        assert server.get(f"/v1/responses/{create(server)['id']}").status == 404
        assert refusal(server, store=True)["param"] == "store"
        assert refusal(server, background=True)["param"] == "background"


def test_deleting():
    with server_of() as server:
        path = f"/v1/responses/{create(server)['id']}"
        reply = server.ask("DELETE", path)
        assert reply.json == {"id": path.rsplit("/", 1)[1], "object": "response", "deleted": True}
        assert server.get(path).status == server.ask("DELETE", path).status == 404


def test_input_items():
    """All of the conversation before the answer, the newest first unless it is asked for otherwise."""
    with server_of() as server:
        first = create(server, "one")
        second = create(server, "two", previous_response_id=first["id"])
        path = f"/v1/responses/{second['id']}/input_items"
        listed = server.get(f"{path}?order=asc").json
        texts = [item["content"][0]["text"] for item in listed["data"]]
        assert texts == ["one", "hello Paris", "two"]
        assert listed["has_more"] is False
        assert server.get(path).json["data"] == listed["data"][::-1]
        page = server.get(f"{path}?order=asc&limit=1&after={listed['data'][0]['id']}").json
        assert page["data"] == listed["data"][1:2]
        assert (page["first_id"], page["last_id"]) == (listed["data"][1]["id"],) * 2
        assert page["has_more"] is True
        for query, param in (
            ("limit=0", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=x", "after"),
        ):
            assert server.get(f"{path}?{query}").error["param"] == param


# -- in the background ---------------------------------------------------------------------------------------


def wait_for(server: Address, response_id: str, *statuses: str) -> dict:
    def found() -> dict | None:
        response = server.get(f"/v1/responses/{response_id}").json
        return response if response["status"] in statuses else None

    return wait_until(found)


def test_in_the_background():
    with server_of() as server:
        server.core.gate.clear()
        begun = create(server, background=True)
        assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
        path = f"/v1/responses/{begun['id']}"
        assert server.get(path).json["status"] == "queued"
        error = refusal(server, previous_response_id=begun["id"])
        assert (error["param"], "queued" in error["message"]) == ("previous_response_id", True)
        server.core.gate.set()
        done = wait_for(server, begun["id"], "completed")
        assert output_text(done) == "hello Paris"
        assert server.post(f"{path}/cancel", None).json == done  # too late, and no mistake
        assert output_text(create(server, "more", previous_response_id=begun["id"])) == "hello Paris"


def test_cancelling():
    """It ends in the engine, and keeps what it has said."""
    steps = []

    def script(request):
        steps.append(request)
        if len(steps) == 3:
            server.core.gate.clear()
        return TOY.encode("hello" * 9)

    with scripted(script, template=TEMPLATE) as server:
        begun = create(server, background=True)["id"]
        wait_until(lambda: output_text(server.get(f"/v1/responses/{begun}").json) == "hello" * 3)
        assert server.get(f"/v1/responses/{begun}").json["status"] == "in_progress"
        reply = server.post(f"/v1/responses/{begun}/cancel", None)
        assert (reply.status, reply.json["status"]) == (200, "cancelled")
        assert not server.core.inner.live
        [message] = reply.json["output"]
        assert (message["status"], message["content"][0]["text"]) == ("incomplete", "hello" * 3)
        assert server.get(f"/v1/responses/{begun}").json == reply.json
        assert refusal(server, previous_response_id=begun)["param"] == "previous_response_id"


def test_only_those_in_the_background_are_cancelled():
    with server_of() as server:
        reply = server.post(f"/v1/responses/{create(server)['id']}/cancel", None)
        assert (reply.status, reply.error["param"]) == (400, "response_id")
        assert server.post("/v1/responses/resp_x/cancel", None).status == 404
        assert server.get("/v1/responses/resp_x/cancel").status == 405


def test_deleting_one_that_is_made():
    with server_of() as server:
        server.core.gate.clear()
        begun = create(server, background=True)["id"]
        assert server.core.inner.live
        server.ask("DELETE", f"/v1/responses/{begun}")
        assert not server.core.inner.live
        assert server.get(f"/v1/responses/{begun}").status == 404
        assert server.service.responses.num_bytes == 0


def test_a_client_that_leaves_a_background():
    """It goes on; whoever comes back may have its events from any number on, also all of them, also later."""
    with server_of() as server:
        server.core.gate.clear()
        body = {"input": "hi", "background": True, "stream": True}
        connection, _ = server.send("POST", "/v1/responses", body)
        wait_until(lambda: server.core.inner.live)
        [begun] = server.service.responses._responses
        connection.close()
        path = f"/v1/responses/{begun}?stream=true"
        again, response = server.send("GET", path)
        server.core.gate.set()
        events = framed(response.read().decode())
        again.close()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        assert framed(server.get(path).body.decode()) == events
        assert framed(server.get(f"{path}&starting_after=3").body.decode()) == events[4:]
        assert server.get(f"{path}&starting_after=x").error["param"] == "starting_after"
        plain = create(server)["id"]
        assert server.get(f"/v1/responses/{plain}?stream=true").error["param"] == "stream"


def test_a_client_that_leaves():
    """Not in the background: the engine is told, and what is stored says so."""
    with server_of("hello" * 100) as server:
        server.core.gate.clear()
        connection, _ = server.send("POST", "/v1/responses", {"input": "hi", "stream": True})
        wait_until(lambda: server.core.inner.live)
        [begun] = server.service.responses._responses
        connection.close()
        assert wait_for(server, begun, "cancelled")["output"] == []
        wait_until(lambda: not server.core.inner.live)


def test_no_room_for_more():
    """All that is stored still runs: the next is refused, for now, and those are left alone."""
    with server_of(max_stored_responses=2) as server:
        server.core.gate.clear()
        begun = [create(server, background=True)["id"] for _ in range(2)]
        reply = server.post("/v1/responses", {"input": "hi", "background": True})
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert len(server.core.inner.live) == 2
        server.core.gate.set()
        assert all(wait_for(server, each, "completed") for each in begun)


def test_no_room_and_nobody_asked_for_any():
    """Requests that say nothing of the store are answered, however many there are."""
    with server_of(max_stored_responses=2) as server, ThreadPoolExecutor() as pool:
        server.core.gate.clear()
        replies = [pool.submit(create, server) for _ in range(6)]
        wait_until(lambda: len(server.core.inner.live) == 6)
        assert server.post("/v1/responses", {"input": "hi", "store": True}).status == 503
        server.core.gate.set()
        ids = [reply.result()["id"] for reply in replies]
        found = [server.get(f"/v1/responses/{each}") for each in ids]
        assert sorted(reply.status for reply in found) == [200, 200, 404, 404, 404, 404]
        assert all("was evicted" in reply.error["message"] for reply in found if reply.status == 404)


def test_the_end_of_the_server():
    """A response that is made in the background ends with the server, which does not wait for it."""
    with scripted(text_script("hello")) as server:
        server.core.gate.clear()
        create(server, background=True)
    assert server.failure is None
    [stored] = server.service.responses._responses.values()
    assert stored.is_over
    assert server.service.num_live == 0


# -- failures ------------------------------------------------------------------------------------------------


def test_the_engine_fails():
    """A stream ends with response.failed, one piece with a 500; what is stored says so."""
    with scripted(text_script("hello" * 100)) as server:
        server.core.gate.clear()
        connection, response = server.send("POST", "/v1/responses", {"input": "hi", "stream": True})
        begun = create(server, background=True)["id"]
        wait_until(lambda: len(server.core.inner.live) == 2)
        server.core.inner.fail_with = RuntimeError("it broke")
        events = framed(response.read().decode())
        connection.close()
        assert [event["type"] for event in events][-1] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        failed = events[-1]["response"]
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert "it broke" in failed["error"]["message"]
        assert wait_for(server, begun, "failed")["error"] == failed["error"]
        assert server.get(f"/v1/responses/{failed['id']}").json == failed
