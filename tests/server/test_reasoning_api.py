"""Reasoning at `/v1/chat/completions`, with a core that says what it is told to say."""

from __future__ import annotations

import json

import pytest
from server_toys import HELLO, TOY, scripted, text_script

# Of a model that may reason, one that may be told not to, and one whose template begins it.
MAY = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}{{ '\n' }}{% endfor %}"
TOLD = MAY + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
MUST = MAY + "{% if add_generation_prompt %}<think>\n{% endif %}"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
REQUIRED = '[{"name": "get_weather", "parameters": {}}]'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}


def said(server, **fields):
    """Whole and streamed, which must agree: (reasoning, content, names of calls, finish reason)."""
    given = {"max_tokens": 400} | fields
    body = server.chat(**given).json
    [choice] = body["choices"]
    message = choice["message"]
    assert message.get("reasoning_content") == message["reasoning"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
    found = message["reasoning"] or "", message["content"] or "", calls, choice["finish_reason"]

    options = {"include_usage": True}
    *events, end = server.chat(**given, stream=True, stream_options=options).events
    deltas = [event["choices"][0]["delta"] for event in events]
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reasoning
    content = "".join(delta.get("content") or "" for delta in deltas)
    names = [
        call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", []) if "id" in call
    ]
    assert (reasoning, content, names, events[-1]["choices"][0]["finish_reason"]) == found
    assert end["usage"]["completion_tokens_details"] == body["usage"]["completion_tokens_details"]
    return found


def num_reasoning_tokens(server, **fields) -> int:
    body = server.chat(**{"max_tokens": 400} | fields).json
    return body["usage"]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (MAY, "<think>\nHm, <b> 🎉.\n</think>\n\nYes.", "Hm, <b> 🎉.", "Yes."),
        (MAY, "Yes.", "", "Yes."),
        (MAY, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (MUST, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (MUST, "</think>Yes.", "", "Yes."),
        (MUST, "Hm. And so on", "Hm. And so on", ""),
    ],
)
def test_reasoning_is_kept_apart(template, text, reasoning, content, chunk):
    with scripted(text_script(text), template=template, chunk=chunk) as server:
        assert said(server) == (reasoning, content, [], "stop")
        assert said(server, include_reasoning=False) == ("", content, [], "stop")


def test_its_tokens_are_counted():
    """Its tags too, and also where it is not shown; of several answers all."""
    thought = "<think>ab</think>"
    num_tokens = len(TOY.encode(thought))
    with scripted(text_script(f"{thought}\n\nYes."), template=MAY) as server:
        assert num_reasoning_tokens(server) == num_tokens
        assert num_reasoning_tokens(server, include_reasoning=False) == num_tokens
        assert num_reasoning_tokens(server, n=3) == 3 * num_tokens
        assert num_reasoning_tokens(server, max_tokens=9) == 9
    with scripted(text_script("ab</think>Yes."), template=MUST) as server:
        assert num_reasoning_tokens(server) == len(TOY.encode("ab</think>"))
    with scripted(text_script("Yes."), template=MAY) as server:
        assert num_reasoning_tokens(server) == 0
    with scripted(text_script("Yes.")) as server:  # a model that does not reason
        assert server.chat().json["usage"]["completion_tokens_details"] is None


def test_reasoning_that_is_left_out_is_nowhere():
    """Its tokens are not beside their log-probabilities or ids either, and bring no chunks."""
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True, "max_tokens": 400}
    answer = "\n\nYes."
    for chunk in (1, 7, 1000):
        with scripted(text_script(f"<think>\nHm.\n</think>{answer}"), template=MAY, chunk=chunk) as server:
            [choice] = server.chat(**fields).json["choices"]
            assert "".join(each["token"] for each in choice["logprobs"]["content"]) == f"{answer}<eos>"
            assert choice["token_ids"] == text_script(answer)
            _, *events = server.chat(**fields, stream=True).events
        choices = [event["choices"][0] for event in events]
        tokens = [
            each["token"] for one in choices for each in (one["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(tokens) == f"{answer}<eos>"
        assert [i for one in choices for i in one["token_ids"]] == text_script(answer)
        assert len(choices) <= len(tokens) + 1


def test_reasoning_that_is_cut():
    """At every length: whole and streamed agree, and nothing is lost but tags."""
    with scripted(text_script("<think>abc</think>\n\nYes, so.", end=False), template=MAY) as server:
        for max_tokens in range(1, 30):
            reasoning, content, _, reason = said(server, max_tokens=max_tokens)
            assert reason == "length"
            assert "abc</think>".startswith(reasoning)
            assert "Yes, so.......".startswith(content) or "<think>".startswith(content)


def test_calls_after_reasoning():
    thought = "<think>I call <tool_call> it.</think>\n\n"
    template = MAY + "<tool_call>"
    with scripted(text_script(thought + CALL), template=template) as server:
        expected = ("I call <tool_call> it.", "", ["get_weather"], "tool_calls")
        assert said(server, tools=[WEATHER]) == expected
        assert said(server, tools=[WEATHER], include_reasoning=False) == ("", *expected[1:])
    with scripted(text_script(thought + REQUIRED), template=template) as server:
        assert said(server, tools=[WEATHER], tool_choice="required") == expected


def test_templates_are_told_how_much_to_reason():
    def prompt(server, **fields):
        return server.chat(**fields, return_prompt_text=True).json["prompt_text"]

    plain, closed = "user: hello\n", "user: hello\n<think>\n\n</think>\n\n"
    with scripted(text_script("Yes."), template=TOLD) as server:
        assert prompt(server) == prompt(server, reasoning_effort="high") == plain
        assert prompt(server, reasoning_effort="none") == closed
        assert prompt(server, chat_template_kwargs={"enable_thinking": False}) == closed
        both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
        assert prompt(server, **both) == plain  # who says it in the template's own words means it
        assert server.chat(reasoning_effort="enormous").error["param"] == "reasoning_effort"
    with scripted(
        text_script("Yes."), template="{{ reasoning_effort }}: {{ messages[0].content }}"
    ) as server:
        assert prompt(server, reasoning_effort="low") == "low: hello"
    with scripted(text_script("Yes."), template=MUST) as server:
        for effort in ("none", "high"):  # its template cannot say either
            assert server.chat(reasoning_effort=effort).error["param"] == "reasoning_effort"
    with scripted(text_script("Yes.")) as server:  # a model that does not reason
        assert server.chat(reasoning_effort="none").status == 200
        assert server.chat(reasoning_effort="high").error["param"] == "reasoning_effort"


def test_what_follows_is_bound_and_reasoning_is_not():
    """What the engine is asked for: free text to the end tag, where there may be any; then the rest."""

    def bound(server, **fields):
        assert server.chat(**{"response_format": SCHEMA} | fields).status == 200
        return server.core.inner.seen[-1].structured_outputs

    with scripted(text_script("[]"), template=TOLD) as server:
        wrapped = json.loads(bound(server).structural_tag)["format"]
        begins, answer = wrapped["elements"]
        assert begins["type"] == "or"
        assert answer == {"type": "structured_outputs", "json": '{"type": "array"}'}
        off = {"enable_thinking": False}
        assert bound(server, chat_template_kwargs=off).json == '{"type": "array"}'
        assert bound(server, response_format=None) is None
        goes_on = [*HELLO, {"role": "assistant", "content": "Well"}]
        assert bound(server, messages=goes_on, continue_final_message=True).json == '{"type": "array"}'
        loosely = {"structured_outputs": {"regex": "a+"}, "response_format": None}
        assert "a+" in bound(server, **loosely).structural_tag
        forced = {"tools": [WEATHER], "tool_choice": "required", "response_format": None}
        assert "get_weather" in bound(server, **forced).structural_tag
    with scripted(text_script("x</think>[]"), template=MUST) as server:
        begins, _ = json.loads(bound(server).structural_tag)["format"]["elements"]
        assert begins["elements"][0] == {
            "type": "tag",
            "begin": "",
            "content": {"type": "any_text"},
            "end": "</think>",
        }
    with scripted(text_script("[]"), template=MUST, reasoning_parser="none") as server:
        assert bound(server).json == '{"type": "array"}'


def test_what_cannot_be_bound_is_refused_by_the_name_that_was_sent():
    with scripted(text_script("x"), template=MAY) as server:
        server.service._chats = server.service.chats._replace(specials=frozenset({"</think>"}))
        for fields in (
            {"response_format": SCHEMA},
            {"guided_regex": "a"},
            {"structured_outputs": {"regex": "a"}},
        ):
            reply = server.chat(**fields)
            assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))
            assert "special token" in reply.error["message"]


def test_a_budget():
    with scripted(text_script("x</think>y"), template=MUST) as server:
        assert said(server, thinking_token_budget=5) == ("x", "y", [], "stop")
        tag = json.loads(server.core.inner.seen[-1].structured_outputs.structural_tag)
        assert tag["limit"] == {"begin": "", "end": "</think>", "max_tokens": 5}
        assert tag["format"]["elements"][1] == {"type": "any_text"}
        assert server.chat(thinking_token_budget=-1).error["param"] == "thinking_token_budget"
        beams = server.chat(thinking_token_budget=5, use_beam_search=True, n=2)
        assert beams.error["param"] == "thinking_token_budget"
    with scripted(text_script("y")) as server:
        assert server.chat(thinking_token_budget=5).error["param"] == "thinking_token_budget"
        assert server.complete(thinking_token_budget=5).error["param"] == "thinking_token_budget"


def test_reasoning_is_content_where_nobody_reads_it():
    text = "<think>a</think>b"
    with scripted(text_script(text), template=MAY, reasoning_parser="none") as server:
        assert server.chat(max_tokens=50).json["choices"][0]["message"]["content"] == text
    with scripted(text_script(text), reasoning_parser="deepseek_r1") as server:
        assert said(server) == ("a", "b", [], "stop")


def test_templates_get_the_reasoning_of_earlier_answers():
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.reasoning }}|{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "x", name: "because"}]
        with scripted(text_script("y"), template=template) as server:
            assert server.chat(messages, return_prompt_text=True).json["prompt_text"] == "because|because|"
