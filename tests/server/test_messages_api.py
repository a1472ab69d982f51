"""`/v1/messages`, with a core that says what it is told to say."""

from __future__ import annotations

import json
import re
import threading
from contextlib import contextmanager

import pytest
from server_toys import HELLO, TOY, Address, is_idle, scripted, text_script, wait_until

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)
# Of a model that reasons, and of one that may be told not to.
REASONS = (
    "{% for m in messages %}{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{% endfor %}"
    + TEMPLATE
)
TOLD = (
    REASONS + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "It may rain.", "input_schema": SCHEMA}
CLOCK = {"name": "get_time", "input_schema": {}, "cache_control": {"type": "ephemeral"}}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
FORCED = f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]'
THOUGHT = "<think>\nHm.\n</think>\n\n"
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
KIND = {"type": "text", "text": "Be kind.", **EPHEMERAL}
BRIEF = {"type": "text", "text": "Be brief."}


def user(*blocks) -> list:
    return [{"role": "user", "content": list(blocks)}]


def assistant(*blocks) -> list:
    return [{"role": "assistant", "content": list(blocks)}]


def use(call_id: str, name: str, given: object) -> dict:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, **fields) -> dict:
    return {"type": "tool_result", "tool_use_id": call_id} | fields


@contextmanager
def server_of(text: str = "hello Paris", *, end: bool = True, template: str = TEMPLATE, **options):
    with scripted(text_script(text, end), template=template, **options) as server:
        yield server
        server.core.gate.set()
        wait_until(lambda: is_idle(server))


def create(server: Address, messages=HELLO, **fields):
    body = {"model": "toy", "max_tokens": 400, "messages": messages} | fields
    reply = server.post("/v1/messages", {name: value for name, value in body.items() if value is not None})
    assert reply.status == 200, reply.body
    return reply.json


def events_of(text: str) -> list[dict]:
    """Of a stream. Asserts the framing."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = re.fullmatch("event: (.+)\ndata: ({.+})", frame).groups()
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def stream(server: Address, messages=HELLO, **fields) -> list[dict]:
    body = {"model": "toy", "max_tokens": 400, "messages": messages, "stream": True} | fields
    reply = server.post("/v1/messages", body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(reply.body.decode())


def error_of(reply, status: int = 400, kind: str = "invalid_request_error") -> str:
    """The words. Asserts the envelope."""
    assert reply.status == status, reply.body
    assert reply.json.keys() == {"type", "error", "request_id"}
    assert reply.json["type"] == "error"
    assert reply.json["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert reply.json["error"].keys() == {"type", "message"}
    assert reply.json["error"]["type"] == kind
    return reply.json["error"]["message"]


def refusal(server: Address, messages=HELLO, **fields) -> str:
    body = {"model": "toy", "max_tokens": 400, "messages": messages} | fields
    return error_of(server.post("/v1/messages", body))


def prompt(server) -> str:
    """The newest, as the core was asked it."""
    return TOY.decode(server.core.inner.seen[-1].prompt_token_ids)


def params(server):
    return server.core.inner.seen[-1].sampling_params


def texts(message: dict) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


# -- answers -------------------------------------------------------------------------------------------------


def test_a_message():
    with server_of() as server:
        message = create(server, metadata={"user_id": "me"}, temperature=0.5, top_p=0.9, top_k=7)
        assert message["id"].startswith("msg_")
        assert message == {
            "id": message["id"],
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": "hello Paris"}],
            "model": "toy",
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": len(TOY.encode("user: hello\n")),
                "output_tokens": len(text_script("hello Paris")),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }
        assert (params(server).temperature, params(server).top_p, params(server).top_k) == (0.5, 0.9, 7)
        reply = server.post(
            "/v1/messages?beta=true",
            {"model": "toy", "max_tokens": 1, "messages": HELLO},
            x_request_id="mine",
            anthropic_version="2023-06-01",
            anthropic_beta="some-thing-2026-01-01",
        )
        assert reply.json["id"] == "msg_mine"
        assert reply.headers["request-id"] == "mine"
        assert reply.json["stop_reason"] == "max_tokens"


def test_stop_sequences():
    with server_of("one STOP two") as server:
        message = create(server, stop_sequences=["two", "STOP"])
        assert texts(message) == "one "
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
        end = stream(server, stop_sequences=["STOP"])[-2]
        assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}
        assert create(server, stop_sequences=[])["stop_reason"] == "end_turn"
        assert "stop_sequences" in refusal(server, stop_sequences=[""])


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_streamed_and_whole(chunk):
    """Case B137: thoughts, text and calls; events in their order."""
    with server_of(f"{THOUGHT}Let me see. {CALL}\n{SECOND}", template=REASONS, chunk=chunk) as server:
        message = create(server, tools=[WEATHER, CLOCK])
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert message["stop_reason"] == "tool_use"
        calls = message["content"][2:]
        assert [(call["name"], call["input"]) for call in calls] == [
            ("get_weather", {"city": "Paris"}),
            ("get_time", {}),
        ]
        assert all(re.fullmatch("toolu_[0-9a-f]{24}", call["id"]) for call in calls)
        assert len({call["id"] for call in calls}) == 2
        first, *middle, end, last = stream(server, tools=[WEATHER, CLOCK])
        assert (first["type"], last) == ("message_start", {"type": "message_stop"})
        starts = [event for event in middle if event["type"] == "content_block_start"]
        assert [event["index"] for event in starts] == [0, 1, 2, 3]
        said = {
            index: "".join(
                event["delta"].get(name, "")
                for event in middle
                if event["type"] == "content_block_delta" and event["index"] == index
                for name in ("thinking", "text", "partial_json")
            )
            for index in range(4)
        }
        assert said == {0: "Hm.", 1: "Let me see.", 2: ARGUMENTS, 3: "{}"}
        assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert end["usage"]["output_tokens"] == message["usage"]["output_tokens"]


def test_a_stream_that_has_nothing_to_say_pings():
    with server_of(sse_keep_alive_interval=0.05) as server:
        server.core.gate.clear()
        threading.Timer(0.4, server.core.gate.set).start()
        events = stream(server)
        assert events[0] == {"type": "ping"}
        assert next(event["type"] for event in events if event["type"] != "ping") == "message_start"


# -- prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"system": "Be kind."}, "system: Be kind.\nuser: hello\n"),
        ({"system": [KIND, BRIEF]}, "system: Be kind.\nBe brief.\nuser: hello\n"),
        ({"system": ""}, "user: hello\n"),
        (
            {"system": "Be kind.", "messages": [{"role": "system", "content": [BRIEF]}, *HELLO]},
            "system: Be kind.\n\nBe brief.\nuser: hello\n",
        ),
        ({"messages": user(KIND, BRIEF)}, "user: Be kind.\nBe brief.\n"),
        ({"messages": [*HELLO, {"role": "user", "content": "there"}]}, "user: hello\n\nthere\n"),
        ({"messages": user()}, "user: \n"),
        (
            {
                "messages": [
                    *HELLO,
                    *assistant(
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "text", "text": "I look.", "citations": None},
                        use("a", "get_weather", {"city": "Paris"}),
                        use("b", "get_time", {}),
                    ),
                    *user(
                        result("a", content="Rain.", **EPHEMERAL),
                        result("b", content=[{"type": "text", "text": "Ten."}], is_error=False),
                        {"type": "text", "text": "And now?"},
                    ),
                ]
            },
            "<think>Hm.</think>user: hello\n"
            "assistant: I look."
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
            '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n'
            "tool: Rain.\ntool: Ten.\nuser: And now?\n",
        ),
    ],
)
def test_prompts(fields, expected):
    """Case B145: texts in blocks, several messages of one role, calls and their results."""
    with server_of(template=REASONS) as server:
        create(server, **fields)
        assert prompt(server) == expected
        count = server.post("/v1/messages/count_tokens", {"model": "toy", "messages": HELLO} | fields)
        assert count.json == {"input_tokens": len(TOY.encode(expected))}


def test_results_that_say_nothing():
    call = assistant(use("a", "f", {}))
    with server_of() as server:
        for is_error, said in ((True, "error"), (False, "")):
            create(server, [*HELLO, *call, *user(result("a", is_error=is_error))])
            assert prompt(server).endswith(f"</tool_call>\ntool: {said}\n")


def test_an_answer_that_was_begun():
    """The last message is the assistant's: the answer goes on with it, and says what is new."""
    with server_of(" and Rome") as server:
        message = create(server, [*HELLO, {"role": "assistant", "content": "Paris"}])
        assert prompt(server) == "user: hello\nassistant: Paris"
        assert texts(message) == " and Rome"
        assert "results must follow" in refusal(server, [*HELLO, *assistant(use("a", "f", {}))])


# -- tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "text", "names", "reason"),
    [
        (None, CALL, ["get_weather"], "tool_use"),
        ({"type": "auto"}, CALL + SECOND, ["get_weather", "get_time"], "tool_use"),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL + SECOND, ["get_weather"], "tool_use"),
        ({"type": "auto"}, "Hello.", [], "end_turn"),
        ({"type": "none"}, "Hello.", [], "end_turn"),
        ({"type": "any"}, FORCED, ["get_weather"], "tool_use"),
        ({"type": "tool", "name": "get_weather"}, ARGUMENTS, ["get_weather"], "tool_use"),
    ],
)
def test_choices(choice, text, names, reason):
    with server_of(text) as server:
        fields = {"tools": [WEATHER, CLOCK], "tool_choice": choice}
        message = create(server, **fields)
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert [call["name"] for call in calls] == names
        assert message["stop_reason"] == reason
        if choice is not None and choice["type"] in ("any", "tool"):
            bounds = server.core.inner.seen[-1].structured_outputs
            assert "city" in (bounds.json or bounds.structural_tag)
        if names:
            assert calls[0]["input"] == {"city": "Paris"}
        starts = [e for e in stream(server, **fields) if e["type"] == "content_block_start"]
        streamed = [e["content_block"] for e in starts if e["content_block"]["type"] == "tool_use"]
        assert [(block["name"], block["input"]) for block in streamed] == [(name, {}) for name in names]


def test_what_tools_become():
    with server_of("Hello.") as server:
        create(server, tools=[WEATHER | {"strict": True, "type": "custom"}, CLOCK])
        shown = [json.loads(line) for line in prompt(server).splitlines()[:2]]
        assert shown == [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "parameters": SCHEMA,
                    "description": "It may rain.",
                    "strict": True,
                },
            },
            {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
        ]
        assert create(server, tools=[])["stop_reason"] == "end_turn"
        many = server.post(
            "/v1/messages/count_tokens", {"model": "toy", "messages": HELLO, "tools": [WEATHER]}
        )
        assert many.json["input_tokens"] > len(TOY.encode("user: hello\n")) + 50


# -- thinking ------------------------------------------------------------------------------------------------


def test_thinking():
    plain, closed = "user: hello\n", "user: hello\n<think>\n\n</think>\n\n"
    with server_of(f"{THOUGHT}Yes.", template=TOLD) as server:
        thinks = [
            None,
            {"type": "adaptive"},
            {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
        ]
        for thinking in thinks:
            thought, answer = create(server, thinking=thinking)["content"]
            assert prompt(server) == plain
            assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
            assert answer == {"type": "text", "text": "Yes."}
        thought = {"thinking_tokens": len(TOY.encode("<think>\nHm.\n</think>"))}
        assert create(server)["usage"]["output_tokens_details"] == thought
        assert stream(server)[-2]["usage"]["output_tokens_details"] == thought
        create(server, thinking=thinks[-1])
        tag = json.loads(server.core.inner.seen[-1].structured_outputs.structural_tag)
        assert '"max_tokens": 1024' in json.dumps(tag)
        [answer] = create(server, thinking={"type": "adaptive", "display": "omitted"})["content"]
        assert answer == {"type": "text", "text": "Yes."}
        create(server, thinking={"type": "disabled"})
        assert prompt(server) == closed
        create(server, chat_template_kwargs={"enable_thinking": False})
        assert prompt(server) == closed
        body = {"model": "toy", "messages": HELLO, "thinking": {"type": "disabled"}}
        count = server.post("/v1/messages/count_tokens", body)
        assert count.json == {"input_tokens": len(TOY.encode(closed))}


def test_thinking_that_cannot_be_had():
    with server_of("Yes.") as server:
        assert create(server, thinking={"type": "disabled"})["stop_reason"] == "end_turn"
        words = refusal(server, thinking={"type": "enabled", "budget_tokens": 1024})
        assert "thinking.budget_tokens: this model does not reason" in words
        words = refusal(server, output_config={"effort": "high"})
        assert words.startswith("output_config.effort: ")
    with server_of("Yes.", template=TOLD) as server:
        for thinking in (
            {"type": "enabled"},
            {"type": "enabled", "budget_tokens": -1},
            {"type": "sometimes"},
            {"type": "adaptive", "display": "loud"},
            {},
        ):
            assert "thinking" in refusal(server, thinking=thinking)
    with server_of("Yes.", template=REASONS) as server:
        words = refusal(server, thinking={"type": "disabled"})
        assert words.startswith("thinking.type: the model's chat template cannot say")


def test_structured_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    with server_of('{"a": 1}') as server:
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            create(server, **fields)
            assert json.loads(server.core.inner.seen[-1].structured_outputs.json) == schema
        assert "output_config.format" in refusal(server, output_config={"format": {"type": "json_schema"}})
        wrong = form | {"schema": {"not": {}}}
        words = ": these keywords are not supported"
        assert refusal(server, output_config={"format": wrong}).startswith(f"output_config.format{words}")
        assert refusal(server, output_format=wrong).startswith(f"output_format{words}")


def test_a_limit_above_the_models_length_is_none():
    """Clients send the limit of a model that they know."""
    with server_of() as server:
        create(server, max_tokens=32_000)
        room = 512 - len(server.core.inner.seen[-1].prompt_token_ids)
        assert params(server).max_tokens == room


# -- refusals ------------------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": user(IMAGE)}, r"messages\[0\].content\[0\] is of type 'image'"),
        ({"messages": user({"type": "document"})}, "is of type 'document'"),
        ({"messages": assistant({"type": "redacted_thinking"})}, "of another server"),
        ({"messages": user(use("a", "f", {}))}, "is of type 'tool_use'"),
        ({"messages": user({"type": "text"})}, "text must be text"),
        ({"messages": user(7)}, "is of type None"),
        ({"messages": [{"role": "user", "content": 7}]}, "must be text or a list of blocks"),
        ({"messages": [{"role": "user"}]}, "must be text or a list of blocks"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role must be"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": user(result("z"))}, "no tool_use before it has the id 'z'"),
        ({"messages": assistant(use("a", "f", "x"))}, "must be an object"),
        ({"system": [IMAGE]}, r"system\[0\] is of type 'image'"),
        ({"tools": [SEARCH]}, r"tools\[0\] is of type 'web_search"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, r"tools\[0\] is of type 'bash"),
        ({"tools": [{"name": "f"}]}, "input_schema must be a JSON schema of type object"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "of type object"),
        ({"tools": [{"input_schema": {}}]}, "must have a name"),
        ({"tools": [WEATHER, WEATHER]}, "a name of its own"),
        (
            {"tools": [{"name": "f", "input_schema": {"not": {}}}], "tool_choice": {"type": "any"}},
            r"^tools\[0\] 'f': input_schema: these keywords",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"properties": {"a": {"not": {}}}}, "strict": True}]},
            r"^tools\[0\] 'f': input_schema",
        ),
        ({"system": "x" * 600}, r"^prompt is too long: \d{3} tokens > 511 maximum$"),
        ({"system": "x" * 600, "max_tokens": 100_000}, "^prompt is too long: "),
        ({"system": "x" * 200_000}, r"^prompt is too long: \d{4,5} tokens > 511 maximum$"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "no tool is called so"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "needs a name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "must be auto, any, tool or none"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: "),
        ({"container": "c"}, "container: "),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management: "),
        ({"watermarking": True}, "watermarking: "),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 3}, "temperature must be at most 2"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_refused_by_name(fields, words):
    with server_of() as server:
        assert re.search(words, refusal(server, **fields))
        assert not server.core.inner.seen


def test_what_asks_for_nothing_is_fine():
    nothing = {
        "mcp_servers": [],
        "container": None,
        "context_management": {"edits": []},
        "watermarking": False,
        "kv_transfer_params": {},
        "vllm_xargs": {},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "stop_sequences": None,
        "tools": None,
        "thinking": None,
    }
    with server_of() as server:
        assert texts(create(server, **nothing)) == "hello Paris"


def test_errors_have_the_form_of_their_api():
    """Case B142: whatever goes wrong below these paths, also where there is nothing, and in front of the
    endpoints."""
    body = {"model": "toy", "max_tokens": 5, "messages": HELLO}
    with server_of(api_key=["k"], max_request_bytes=10_000) as server:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert "a key is needed" in error_of(server.post(path, body), 401, "authentication_error")
        server.headers = {"x-api-key": "k"}
        missing = server.post("/v1/messages", body | {"model": "zz"})
        assert "Valid aliases: toy" in error_of(missing, 404, "not_found_error")
        missing = server.post("/v1/messages/count_tokens", body | {"model": "zz"})
        error_of(missing, 404, "not_found_error")
        error_of(server.get("/v1/messages/batches"), 404, "not_found_error")
        assert server.get("/v1/messages/batches").headers["content-type"] == "application/json"
        assert "only POST" in error_of(server.get("/v1/messages"), 405)
        assert "max_tokens" in error_of(server.post("/v1/messages", {"model": "toy", "messages": HELLO}))
        assert "model" in error_of(server.post("/v1/messages", {"max_tokens": 5, "messages": HELLO}))
        error_of(server.post("/v1/messages", b"{"))
        error_of(server.post("/v1/messages", b"{}", content_type="text/plain"))
        error_of(server.post("/v1/messages", b" " * 20_000), 413, "request_too_large")
        assert server.get("/v1/messagesx").error["code"] == 404  # of nobody
        assert server.post("/v1/messages", body).status == 200
    with server_of(engine={"max_num_queued_reqs": 1}) as server:
        server.core.gate.clear()
        connection, _ = server.send("POST", "/v1/messages", body | {"stream": True})
        refused = server.post("/v1/messages", body)
        assert refused.headers["retry-after"] == "1"
        error_of(refused, 503, "overloaded_error")
        server.core.gate.set()
        connection.close()


def test_a_stream_that_fails_says_so():
    with scripted(text_script("hello Paris, and more")) as server:
        server.core.gate.clear()
        body = {"model": "toy", "max_tokens": 5, "messages": HELLO, "stream": True}
        connection, response = server.send("POST", "/v1/messages", body, x_request_id="mine")
        server.core.inner.fail_with = RuntimeError("broken")
        [event] = events_of(response.read().decode())
        assert event["type"] == "error"
        assert event["request_id"] == "mine"
        assert event["error"]["type"] in ("api_error", "overloaded_error")
        connection.close()


def test_a_big_mistake_has_a_small_answer():
    """Case B143."""
    with server_of() as server:
        for messages in (
            [{"role": "user", "content": [{"type": "x" * 100_000}]}] * 50,
            [{"role": "x" * 100_000, "content": "a"}],
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x" * 100_000}]}],
        ):
            assert len(refusal(server, messages)) < 500
