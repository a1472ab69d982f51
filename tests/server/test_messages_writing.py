"""The fold from an answer to a message and its events, on made-up outputs."""

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
from mainspring.server.messages_writing import MessagesWriter

THOUGHT = "<think>\nWhat is it? <tool_call> no\n</think>\n\n"
ARGUMENTS = '{"city": "x}\\" 😀", "l": [1, {}], "n": 12345678901234567890123}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "get_time", "arguments": {"a": }}\n</tool_call>'
TEXTS = [
    "",
    "Hello, 😀!",
    f"{THOUGHT}Hello.",
    f"{THOUGHT}{CALL}\n{SECOND}\n",
    f"Let me see. {CALL}{SECOND} And then.",
    f"{CALL}\n\n{BROKEN} Hm.",
    "a < b <tool",
]
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class Reader:
    """As a conversation's."""

    def __init__(self) -> None:
        self._parser = AnswerParser(tool_format("hermes"), reasoning_format("qwen3"))
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._parser.has_calls

    def read(self, answer: CompletionOutput) -> list:
        events = self._parser.feed(answer.text)
        return events if answer.finish_reason is None else events + self._parser.finish()


def new_writer(**options) -> MessagesWriter:
    ids = itertools.count()
    return MessagesWriter("msg_a", "toy", Reader(), lambda: f"toolu_{next(ids)}", **options)


def outputs(pieces: list[str], reason: str = "stop", stop_reason=None) -> list[RequestOutput]:
    """One for each piece, and the reason with the last. The prompt is of 5 tokens, 2 of them cached."""
    made = []
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        end = {"finish_reason": reason, "stop_reason": stop_reason} if is_last else {}
        answer = CompletionOutput(0, piece, list(range(len(piece))), **end)
        output = RequestOutput("a", None, [1, 2, 3, 4, 5], [answer], finished=is_last)
        output.num_cached_tokens = 2
        made.append(output)
    return made


def whole(text: str, reason: str = "stop", stop_reason=None, **options) -> dict:
    message = new_writer(**options).whole(outputs([text], reason, stop_reason))
    return json.loads(msgspec.json.encode(message))


def streamed(pieces: list[str], reason: str = "stop", stop_reason=None, **options) -> dict:
    """What a client that only follows the rules arrives at. Asserts the rules."""
    writer = new_writer(**options)
    made = [event for output in outputs(pieces, reason, stop_reason) for event in writer.chunks(0, output)]
    assert list(writer.last()) == []
    first, *middle, delta, last = [json.loads(msgspec.json.encode(event)) for event in made]
    assert first["type"] == "message_start"
    assert delta["type"] == "message_delta"
    assert last == {"type": "message_stop"}
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] == delta["usage"]["input_tokens"]
    is_open, said = False, ""
    for event in middle:
        assert event["index"] == len(message["content"]) - is_open
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open, said = True, ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert is_open
                block, told = message["content"][-1], event["delta"]
                kind, name = DELTAS[block["type"]]
                if told["type"] == "signature_delta":
                    block["signature"] = told["signature"]
                    continue
                assert told["type"] == kind
                assert told[name]
                assert not block.get("signature")  # it comes last
                said += told[name]
                if name in block:
                    block[name] = said
            case "content_block_stop":
                assert is_open
                is_open = False
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    block["input"] = parsed(said)
            case other:
                raise AssertionError(other)
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def parsed(text: str) -> dict:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_cut_in_two(text, reason):
    expected = whole(text, reason)
    assert expected["usage"] == {
        "input_tokens": 3,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(text),
    }
    for at in range(len(text) + 1):
        assert streamed([text[:at], text[at:]], reason) == expected


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 200), st.lists(st.integers(0, 200), max_size=12))
def test_any_cuts_of_any_beginning(text, end, cuts):
    """Case B136: an answer that is cut anywhere, in any pieces."""
    text = text[:end]
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)] or [""]
    assert streamed(pieces, "length") == whole(text, "length")


def test_what_an_answer_says():
    def content(text, **options):
        return whole(text, **options)["content"]

    assert content("") == []
    assert content("Hello.") == [{"type": "text", "text": "Hello."}]
    thought, call, second = content(f"{THOUGHT}{CALL}\n{SECOND}\n")
    assert (thought["type"], thought["thinking"]) == ("thinking", "What is it? <tool_call> no")
    assert len(thought["signature"]) == 64
    assert call == {
        "type": "tool_use",
        "id": "toolu_0",
        "name": "get_weather",
        "input": {"city": 'x}" 😀', "l": [1, {}], "n": 12345678901234567890123},
    }
    assert second == {"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}}
    assert content(f"{THOUGHT}Yes.", shows_thinking=False) == [{"type": "text", "text": "Yes."}]


@pytest.mark.parametrize(
    ("text", "reason", "stop_reason", "expected"),
    [
        ("Hi.", "stop", None, ("end_turn", None)),
        ("Hi.", "stop", 7, ("end_turn", None)),  # a token
        ("Hi.", "stop", "END", ("stop_sequence", "END")),
        ("Hi.", "length", None, ("max_tokens", None)),
        (CALL, "stop", None, ("tool_use", None)),
        (CALL, "length", None, ("max_tokens", None)),
        (CALL[:-20], "stop", "END", ("stop_sequence", "END")),
    ],
)
def test_why_it_ends(text, reason, stop_reason, expected):
    """Case B137: the same whole and streamed, and only once."""
    message = whole(text, reason, stop_reason)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert streamed([text], reason, stop_reason) == message


def test_calls_whose_arguments_are_no_object():
    """Nothing is lost of what the model wrote."""
    [call] = whole(CALL[: CALL.index("😀")], "length")["content"]
    assert call["input"] == {"INVALID_JSON": '{"city": "x}\\" '}
    *_, broken, _ = whole(f"{CALL}{BROKEN} Hm.")["content"]
    assert broken["input"].keys() == {"INVALID_JSON"}


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_answers_that_fail(reason, status):
    """They are errors, for there is no stop_reason of this kind."""
    for say in (whole, lambda text, reason: streamed([text], reason)):
        with pytest.raises(ApiError) as caught:
            say("Hello", reason)
        assert caught.value.status == status
