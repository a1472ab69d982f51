"""The fold from an answer to a response and its events, on made-up outputs."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.frontend.parsing.formats import reasoning_format, tool_format
from mainspring.frontend.parsing.parser import AnswerParser
from mainspring.server.errors import ApiError
from mainspring.server.responses_types import ResponsesReply, name_of
from mainspring.server.responses_writing import ResponsesWriter

THOUGHT = "<think>\nWhat is it? <tool_call> no\n</think>\n\n"
ARGUMENTS = '{"city": "x}\\" 😀", "l": [1, {}]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get_time", "arguments": {"a": }}\n</tool_call>'
TEXTS = [
    "",
    "\n",
    "Hello, 😀!",
    f"{THOUGHT}Hello.",
    f"{THOUGHT}{CALL}\n{SECOND}\n",
    f"Let me see. {CALL}{SECOND} And then.",
    f"{CALL}\n\n{BROKEN} Hm.",
    "a < b <tool",
]
ENDS = {"stop": "completed", "length": "incomplete", "error": "failed", "abort": "cancelled"}


class Reader:
    """As a conversation's, but for the count."""

    def __init__(self) -> None:
        self._parser = AnswerParser(tool_format("hermes"), reasoning_format("qwen3"))
        self.num_reasoning_tokens = 7

    def read(self, answer: CompletionOutput) -> list:
        events = self._parser.feed(answer.text)
        return events if answer.finish_reason is None else events + self._parser.finish()


def beginning() -> ResponsesReply:
    return ResponsesReply(
        id="resp_a",
        created_at=0,
        instructions=None,
        metadata=None,
        model="toy",
        parallel_tool_calls=True,
        temperature=1.0,
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        background=False,
        max_output_tokens=None,
        max_tool_calls=None,
        previous_response_id=None,
        reasoning=None,
        status="in_progress",
        text=None,
        top_logprobs=None,
        truncation="disabled",
        user=None,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )


def new_writer(**options) -> ResponsesWriter:
    ids = itertools.count()
    return ResponsesWriter(beginning(), Reader(), lambda: f"call_{next(ids)}", **options)


def outputs(pieces: list[str], reason: str) -> list[RequestOutput]:
    """One for each piece, and the reason with the last."""
    made = []
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        answer = CompletionOutput(
            0, piece, list(range(len(piece))), finish_reason=reason if is_last else None
        )
        made.append(RequestOutput("a", None, [1, 2, 3], [answer], finished=is_last))
    return made


def events_of(pieces: list[str], reason: str, **options) -> tuple[list[dict], dict]:
    """As a client reads them; and the response at the end."""
    writer = new_writer(**options)
    events = [
        {"event": name_of(event)} | msgspec.to_builtins(event)
        for output in outputs(pieces, reason)
        for event in writer.chunks(0, output)
    ]
    return events, msgspec.to_builtins(writer.reply)


def check_order(events: list[dict], final: dict) -> None:
    """That a client that only follows the rules arrives at the final response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all(event["event"] == event["type"] for event in events)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == {"cancelled": "incomplete"}.get(final["status"], final["status"])
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"] == final
    built: list[dict] = []
    now: str | None = None  # the item that is open
    texts: dict[str, str] = {}
    for name, event in zip(names[2:-1], events[2:-1], strict=True):
        if name == "output_item.added":
            assert now is None
            assert event["output_index"] == len(built)
            now = event["item"]["id"]
            assert event["item"]["status"] == "in_progress"
            kind, texts[now] = event["item"]["type"], ""
            expects = ["delta"] if kind == "function_call" else ["content_part.added"]
            continue
        if name == "output_item.done":
            assert event["item"]["id"] == now
            assert expects == ["output_item.done"]
            built.append(event["item"])
            now = None
            continue
        assert (event["item_id"], event["output_index"]) == (now, len(built))
        if name == "content_part.added":
            assert expects == ["content_part.added"]
            assert event["part"]["text"] == ""
            expects = ["delta"]
        elif name.endswith(".delta"):
            assert expects == ["delta"]
            assert event["delta"]
            texts[now] += event["delta"]
        elif name == "content_part.done":
            assert expects == ["content_part.done"]
            assert event["part"]["text"] == texts[now]
            expects = ["output_item.done"]
        else:
            assert (
                name
                == {
                    "message": "output_text.done",
                    "reasoning": "reasoning_text.done",
                    "function_call": "function_call_arguments.done",
                }[kind]
            )
            assert event["arguments" if kind == "function_call" else "text"] == texts[now]
            expects = ["output_item.done" if kind == "function_call" else "content_part.done"]
    assert final["output"][: len(built)] == built
    left = final["output"][len(built) :]
    assert len(left) == (now is not None)
    assert all(item["status"] == "incomplete" for item in left)
    assert not left or final["status"] in ("failed", "cancelled")


def without_cuts(events: list[dict]) -> list[dict]:
    """Neighbouring deltas as one, without numbers."""
    joined: list[dict] = []
    for event in events:
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        if joined and event["type"].endswith(".delta") and joined[-1]["type"] == event["type"]:
            joined[-1]["delta"] += event["delta"]
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize("reason", ENDS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_cut(text, reason):
    """Cut in two anywhere, by output, the response is that of the whole; so are the events."""
    expected, final = events_of([text], reason)
    check_order(expected, final)
    assert final["status"] == ENDS[reason]
    for place in range(len(text)):
        events, said = events_of([text[:place], text[place:]], reason)
        check_order(events, said)
        assert said == final
        assert without_cuts(events) == without_cuts(expected)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_cuts(data):
    """Case B136: however it is cut, and wherever the answer ends."""
    text = data.draw(st.sampled_from(TEXTS))
    text = text[: data.draw(st.integers(0, len(text)))]
    reason = data.draw(st.sampled_from(["stop", "length"]))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    expected, final = events_of([text], reason)
    events, said = events_of(pieces, reason)
    check_order(events, said)
    assert said == final
    assert without_cuts(events) == without_cuts(expected)


def test_items():
    """Reasoning, then calls; the white space between them is no message, as models write line ends there."""
    _, final = events_of([TEXTS[4]], "stop")
    reasoning, first, second = final["output"]
    [part] = reasoning["content"]
    assert (part["type"], part["text"].strip()) == ("reasoning_text", "What is it? <tool_call> no")
    assert reasoning["summary"] == []
    assert (first["name"], first["arguments"], first["call_id"]) == ("get_weather", ARGUMENTS, "call_0")
    assert (second["name"], second["arguments"], second["call_id"]) == ("get_time", "{}", "call_1")
    assert len({item["id"] for item in final["output"]}) == 3
    assert all(item["status"] == "completed" for item in final["output"])


def test_text_around_calls():
    _, final = events_of([TEXTS[5]], "stop")
    kinds = [item["type"] for item in final["output"]]
    assert kinds == ["message", "function_call", "function_call", "message"]
    assert final["output"][0]["content"][0]["text"].rstrip() == "Let me see."
    assert final["output"][3]["content"][0]["text"].strip() == "And then."


def test_a_call_that_is_cut():
    """Case B136: the call is delivered as far as it came, and marked; the response says why."""
    events, final = events_of([CALL[:60]], "length")
    [call] = final["output"]
    assert ARGUMENTS.startswith(call["arguments"])
    assert call["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["type"] == "response.incomplete"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["arguments"])


def test_a_stop_string_inside_a_call():
    """The call was not made: it and the response are incomplete. Behind a call it ends nothing early."""
    for text, status in ((CALL[:50], "incomplete"), (CALL[: CALL.index("\n</tool")], "completed")):
        answer = CompletionOutput(0, text, [1], finish_reason="stop", stop_reason="x")
        reply = new_writer().whole([RequestOutput("a", None, [1], [answer], finished=True)])
        assert (reply.status, reply.output[-1].status) == (status, status)
        assert reply.incomplete_details is None


def test_text_that_began_like_a_call():
    """Case B139: what was held back as a possible call is text, whatever ended the answer."""
    for reason in ENDS:
        _, final = events_of(["Hi", " <to", "ol"], reason)
        assert final["output"][0]["content"][0]["text"] == "Hi <tool"


def test_nothing_said():
    """One empty message, so that every answer has something that a client can show."""
    _, final = events_of([""], "stop")
    [message] = final["output"]
    assert message["content"][0]["text"] == ""
    assert message["status"] == "completed"


def test_reasoning_that_is_not_wanted():
    _, final = events_of([TEXTS[3]], "stop", include_reasoning=False)
    [message] = final["output"]
    assert message["content"][0]["text"].strip() == "Hello."


def test_usage():
    _, final = events_of(["Hel", "lo"], "stop")
    usage = final["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 5, 8)
    assert usage["output_tokens_details"]["reasoning_tokens"] == 7


def test_a_failure_ends_it_once():
    writer = new_writer()
    first, _ = outputs(["Hel", "lo"], "stop")
    events = [*writer.chunks(0, first), *writer.failed(ApiError(500, "broken")), *writer.cancelled()]
    said = [{"event": name_of(event)} | msgspec.to_builtins(event) for event in events]
    final = msgspec.to_builtins(writer.reply)
    check_order(said, final)
    assert final["error"] == {"code": "server_error", "message": "broken"}
    assert final["output"][0]["content"][0]["text"] == "Hel"
    assert list(writer.failed(ApiError(500, "again"))) == []


def test_a_whole_failure_is_raised():
    with pytest.raises(ApiError, match="broken"):
        new_writer().whole(
            [
                RequestOutput(
                    "a", None, [1], [CompletionOutput(0, "", [], finish_reason="error", error="broken")]
                )
            ]
        )
