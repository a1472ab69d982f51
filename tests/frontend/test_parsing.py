"""Answers in pieces: reasoning, text and calls, in every format."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing_texts import FORMATS, QWEN3, WORDS, Text, texts

from mainspring.base.errors import ConfigError
from mainspring.frontend.parsing.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    Content,
    Event,
    Reasoning,
    joined,
)
from mainspring.frontend.parsing.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    REQUIRED,
    ReasoningFormat,
    ToolFormat,
    named,
    reasoning_format,
    tool_format,
)
from mainspring.frontend.parsing.parser import PIECE_CHARS, AnswerParser, pieces_of

NUM_TEXTS = 200
NUM_SPLITS = 1000


def read(parser: AnswerParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def said(text: str, tools: ToolFormat | None = HERMES, *, is_open: bool | None = None) -> list[Event]:
    """`is_open` None: without reasoning."""
    reasoning = None if is_open is None else QWEN3
    return read(AnswerParser(tools, reasoning, begins_in_reasoning=bool(is_open)), [text])


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallBegins(index, name), CallArguments(index, arguments), CallEnds(index)]


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    names = {event.index: event.name for event in events if isinstance(event, CallBegins)}
    arguments = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    return [(name, arguments.get(index, "")) for index, name in names.items()]


def check_order(events: list[Event]) -> None:
    """The rules of `events.py`."""
    open_call, num_calls = None, 0
    for event in events:
        match event:
            case CallBegins(index, name):
                assert open_call is None
                assert index == num_calls
                assert name
                open_call, num_calls = index, num_calls + 1
            case CallArguments(index, text):
                assert index == open_call
                assert text
            case CallEnds(index):
                assert index == open_call
                open_call = None
            case Content(text) | Reasoning(text):
                assert open_call is None
                assert text
    assert open_call is None


def splits(text: str, count: int, dice: random.Random) -> Iterator[list[str]]:
    """Every split in two, single characters, and `count` random splits."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)
    for _ in range(count):
        ends = sorted(dice.choices(range(len(text) + 1), k=dice.randint(2, 12)))
        yield [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def check_splits(name: str, text: Text, num_random: int) -> None:
    whole = read(text.parser(name), [text.text])
    check_order(whole)
    for pieces in splits(text.text, num_random, random.Random(text.text)):
        assert read(text.parser(name), pieces) == whole, pieces


# -- any cutting gives the same ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_cutting_does_not_matter(name: str):
    """Case B134: a few texts of each format; all of them below."""
    for text in texts(name, 12):
        check_splits(name, text, num_random=30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORMATS)
def test_cutting_never_matters(name: str):
    """Case B134: 200 texts of each format, each in every split in two and in 1,000 random ones."""
    for text in texts(name, NUM_TEXTS):
        check_splits(name, text, NUM_SPLITS)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_call_in_pieces_of_any_size(size: int):
    """Case B134: quotes and brackets inside strings, numbers, empty and nested values, several calls, prose
    around them; the last quote and bracket come, the name comes once, and the arguments are JSON."""
    first = '{"a":"x}\\"","n":12,"o":{},"l":[1,2]}'
    second = '{"größe": "😀 <tool_call>", "e": ""}'
    text = (
        f'Hi <tool_call>{{"name":"f","arguments":{first}}}</tool_call>\n<tool_call>'
        f'{{"name": "g", "arguments": {second}}}</tool_call><tool_call>'
        '{"name": "h", "arguments": {}}</tool_call> bye'
    )
    events = read(AnswerParser(HERMES, None), [text[at : at + size] for at in range(0, len(text), size)])
    assert events == [
        Content("Hi"),
        *call(0, "f", first),
        *call(1, "g", second),
        *call(2, "h", "{}"),
        Content("bye"),
    ]
    assert json.loads(first)["a"] == 'x}"'


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "qwen3"])
def test_valid_calls_are_found(name: str):
    """In every spelling of a format: all calls, in order, with the arguments that were meant."""
    found = [text for text in texts(name, 240, seed=1) if text.calls is not None]
    assert len(found) == 60
    for text in found:
        events = calls_of(read(text.parser(name), [text.text]))
        assert [(called, json.loads(given)) for called, given in events] == text.calls, text


@given(
    st.sampled_from([name for name in FORMATS if name not in ("named", "qwen3")]),
    st.lists(st.sampled_from([*WORDS, '{"name": "f", "arguments": ', "<tool_call>", "[TOOL_CALLS]", "[f("])),
)
@settings(max_examples=300, deadline=None)
def test_what_is_no_call_is_text_as_it_was_written(name: str, words: list[str]):
    text = "".join(words)
    parser = AnswerParser(FORMATS[name], None)
    events = read(parser, [text])
    check_order(events)
    if not parser.has_calls:
        assert events == ([Content(text)] if text else [])


# -- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_may_end_anywhere(name: str):
    """Case B136: cut at every place, an answer raises nothing, and its arguments are the beginning of those
    of the whole. (In Python a word or an escape that was cut cannot be translated, and stays as it was.)"""
    for text in texts(name, 40, seed=2)[::4]:
        whole = calls_of(read(text.parser(name), [text.text]))
        begin = 0 if text.reasoning is None or text.is_open else len(text.reasoning.begin)
        for end in range(begin, len(text.text)):
            events = read(text.parser(name), [text.text[:end]])
            check_order(events)
            for (called, begun), (full_name, full) in zip(calls_of(events), whole, strict=False):
                assert called == full_name
                certain = re.sub(r"[\w.+\\=\s-]*$", "", begun) if name == "pythonic" else begun
                assert full.startswith(certain), (text, end)


def test_what_was_held_back_comes_at_the_end():
    """Case B139: text that might have become a tag, white space, or a call without its name."""
    for text in ("Hi <tool", "Hi <", "Hi \n", "Hi <tool_call>", 'Hi <tool_call>\n{"name": "f", "argum'):
        assert said(text) == [Content(text)]
    for text in ('{"name": "f"', '{"na', "{", " "):
        assert said(text, LLAMA3_JSON) == [Content(text)]
    assert said("[get_weather(", PYTHONIC) == [Content("[get_weather(")]
    assert said("hm </thi.", is_open=True) == [Reasoning("hm </thi.")]
    assert said("<thi", is_open=False) == [Content("<thi")]


def test_a_tag_that_is_due_and_was_cut_is_no_text():
    """Case B136: what ends reasoning, or a call; with the white space before it."""
    for end in range(1, len("</think>")):
        assert said("hm \n" + "</think>"[:end], is_open=True) == [Reasoning("hm")]
    f = call(0, "f", "{}")
    text = 'Ok\n<tool_call>\n{"name": "f", "arguments": {}}\n'
    for end in range(1, len("</tool_call>")):
        assert said(text + "</tool_call>"[:end]) == [Content("Ok"), *f]
    assert said(text + "</tool_call>\n</") == [Content("Ok"), *f, Content("</")]
    assert said(text + "</tool.") == [Content("Ok"), *f, Content("</tool.")]


def test_a_cut_call_is_ended_with_what_it_has():
    assert said('<tool_call>{"name": "f", "arguments": {"a": "b') == call(0, "f", '{"a": "b')
    assert said("[f(a='b", PYTHONIC) == call(0, "f", '{"a": "b')


def test_events_come_as_soon_as_they_are_certain():
    parser = AnswerParser(HERMES, QWEN3, begins_in_reasoning=True)
    assert parser.in_reasoning
    assert parser.feed("I think") == [Reasoning("I think")]
    assert parser.feed(" so</th") == [Reasoning(" so")]
    assert parser.feed("ink>\n\nYes") == [Content("Yes")]
    assert not parser.in_reasoning
    assert parser.feed(" <tool_call>\n{") == []
    assert parser.feed('"name": "f", "arguments":') == []
    assert not parser.has_calls
    assert parser.feed(' {"a": ') == [CallBegins(0, "f"), CallArguments(0, '{"a": ')]
    assert parser.has_calls
    assert parser.feed('"</tool_call>') == [CallArguments(0, '"</tool_call>')]
    assert parser.feed('"}}</tool_call>') == [CallArguments(0, '"}'), CallEnds(0)]
    assert parser.finish() == []


# -- what is a call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (HERMES, "<tool_call>soon</tool_call>"),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'),  # half of a pair
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": }</tool_call>'),
        (HERMES, "<tool_call>{'name': 'f'}</tool_call>"),
        (HERMES, "a </tool_call> b"),
        (LLAMA3_JSON, '{"name": "Bob"}'),  # an answer in JSON
        (LLAMA3_JSON, '{"name": "Bob", "age": 5}'),
        (LLAMA3_JSON, 'Sure: {"name": "f", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] 1 + 1"),
        (MISTRAL, "[TOOL_CALLS][]"),
        (PYTHONIC, "[1, 2]"),
        (PYTHONIC, "[f(1)]"),
        (PYTHONIC, "[3f(x=1)]"),
        (PYTHONIC, "[.(x=1)]"),
        (PYTHONIC, "[f(1x=1)]"),
        (PYTHONIC, "[f() for x in y]"),
        (PYTHONIC, "[f(x==1)]"),
        (PYTHONIC, "Call [f(x=1)]"),
        (REQUIRED, '["name"]'),
    ],
)
def test_no_call(tools: ToolFormat, text: str):
    assert said(text, tools) == [Content(text)]


def test_a_broken_call_does_not_hide_the_next():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert said(f"<tool_call>\n{good}") == [Content("<tool_call>"), *call(0, "f", "{}")]
    assert said(f'<tool_call>{{"name": x}}</tool_call>{good}') == [
        Content('<tool_call>{"name": x}</tool_call>'),
        *call(0, "f", "{}"),
    ]


@pytest.mark.parametrize(
    ("written", "arguments", "rest"),
    [
        ('{"a": 1}}}</tool_call>', '{"a": 1}', "}"),  # a bracket too many
        ('{"a": {"b": 1}}</tool_call> x', '{"a": {"b": 1}}', "x"),  # one too few, of the call
        ('{"a": 1</tool_call> x', '{"a": 1', "x"),  # two too few
        ('{"a": "x\ny"}}</tool_call>', '{"a": "x\ny"}', ""),  # not JSON, and passed on
        ('"{}"}</tool_call>', '"{}"', ""),
        ("null}</tool_call>", "null", ""),
        ('{}, "id": {"x": "}"}}</tool_call>', "{}", ""),
        ('{"a": 1}, "parameters": {"b": 2}}</tool_call>', '{"a": 1}', ""),  # the first count
    ],
)
def test_arguments_are_passed_on_as_they_were_written(written: str, arguments: str, rest: str):
    events = said(f'<tool_call>{{"name": "f", "arguments": {written}')
    assert events == [*call(0, "f", arguments), *([Content(rest)] if rest else [])]


def test_an_end_tag_is_one_only_behind_its_call():
    good, broken = '<tool_call>{"name": "f", "arguments": {}}', "<tool_call>x</tool_call>"
    assert said(f"{good}</tool_call></tool_call>") == [*call(0, "f", "{}"), Content("</tool_call>")]
    assert said(f"{good}{broken}") == [*call(0, "f", "{}"), Content(broken)]


def test_a_tool_without_arguments():
    assert said('<tool_call>{"name": "now"}</tool_call>') == call(0, "now", "{}")
    assert said("[now()]", PYTHONIC) == call(0, "now", "{}")
    assert said('{"name": "now", "parameters": {}}', LLAMA3_JSON) == call(0, "now", "{}")


def test_several_calls_in_one_list():
    two = [*call(0, "f", '{"x": 1}'), *call(1, "g", "{}")]
    assert said('{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', LLAMA3_JSON) == two
    f, g = '{"name": "f", "arguments": {"x": 1}}', '{"arguments": {}, "name": "g"}'
    assert said(f"[TOOL_CALLS][{f}, {g}]", MISTRAL) == two
    assert said('[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{}', MISTRAL) == two
    assert said("[f(x=1), g()]", PYTHONIC) == two
    assert said(f"[{f},{g}]", REQUIRED) == two


def test_a_list_that_ends_otherwise():
    """The calls that were begun stay, and the rest is text."""
    f = '{"name": "f", "parameters": {}}'
    assert said(f'{f}; {{"x": 1}}', LLAMA3_JSON) == [*call(0, "f", "{}"), Content('; {"x": 1}')]
    assert said(f"{f}\nThat is all.", LLAMA3_JSON) == [*call(0, "f", "{}"), Content("That is all.")]
    assert said(f"[{f}, 5]", REQUIRED) == [*call(0, "f", "{}"), Content(", 5]")]


def test_a_named_call_is_all_of_the_text():
    assert said('{"a": "</think>"}', named("f")) == call(0, "f", '{"a": "</think>"}')
    assert said("hm</think>\n\n{}", named("f"), is_open=True) == [Reasoning("hm"), *call(0, "f", "{}")]
    for text in ("", "<", "<think>", " ["):
        assert calls_of(said(text, named("f"))) == []


# -- reasoning -----------------------------------------------------------------------------------------------


def test_reasoning_comes_first_or_not_at_all():
    assert said("<think>\nhm\n</think>\n\nYes", is_open=False) == [Reasoning("hm"), Content("Yes")]
    assert said("hm\n</think>\n\nYes", is_open=True) == [Reasoning("hm"), Content("Yes")]
    assert said("\n<think>hm</think>Yes", is_open=True) == [Reasoning("hm"), Content("Yes")]
    assert said("Yes <think>hm</think>", is_open=False) == [Content("Yes <think>hm</think>")]
    assert said("<think>\n\n</think>\n\nYes", is_open=False) == [Content("Yes")]
    assert said("hm <think> hm", is_open=True) == [Reasoning("hm <think> hm")]
    assert said("<think>hm</think></think>", is_open=False) == [Reasoning("hm"), Content("</think>")]


def test_a_call_inside_reasoning_is_reasoning():
    f = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert said(f"{f}\n</think>\n\n{f}", is_open=True) == [Reasoning(f), *call(0, "f", "{}")]
    for tools, text in ((LLAMA3_JSON, '{"name": "f", "parameters": {}}'), (PYTHONIC, "[f()]")):
        assert said(f"{text}</think>\n{text}", tools, is_open=True) == [Reasoning(text), *call(0, "f", "{}")]


def test_white_space_inside_texts_is_kept():
    assert said(" \n a \n\n b \n", is_open=False) == [Content(" \n a \n\n b \n")]
    assert said("a \n b\n</think>\n  c \n", is_open=True) == [Reasoning("a \n b"), Content("c \n")]


def test_another_reasoning_format_is_a_line():
    other = ReasoningFormat("other", "[THINK]", "[/THINK]")
    assert other.is_opened_by("user: hi [THINK]\n")
    assert not other.is_opened_by("[THINK]\n\n[/THINK]\n\n")
    assert read(AnswerParser(None, other), ["[THINK]hm[/THI", "NK]Yes"]) == [Reasoning("hm"), Content("Yes")]


def test_names_are_vllms():
    assert tool_format("qwen") is tool_format("hermes") is HERMES
    assert reasoning_format("deepseek_r1").end == "</think>"
    with pytest.raises(ConfigError, match=r"tool_call_parser 'x' is not known; there are hermes, "):
        tool_format("x")
    with pytest.raises(ConfigError, match=r"reasoning_parser 'x' is not known; there are deepseek_r1, "):
        reasoning_format("x")


# -- cost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_what_waits_is_bounded(name: str):
    """Between two pieces no more waits to be looked at again than the beginning of a tag."""
    text = "".join(text.text for text in texts(name, 40, seed=3))
    parser = AnswerParser(FORMATS[name], QWEN3)
    for character in text:
        parser.feed(character)
        reader = parser._reader
        assert len(reader.text) - reader.at < len("<|python_tag|>")


@pytest.mark.slow
@pytest.mark.parametrize(
    "repeated", ["\n", "<", "<tool_call>", "<tool_call>{", '<tool_call>{"', "[", '{"a": [', "\\"]
)
def test_cost_is_linear(repeated: str):
    """Four times the text takes about four times as long, in pieces of a character."""

    def cost(count: int) -> float:
        pieces = list(f'<tool_call>{{"name": "f", "arguments": {{"x": {repeated * count}')
        pieces += list(repeated * count)
        start = time.thread_time()
        read(AnswerParser(HERMES, None), [*list(repeated * count), *pieces])
        return time.thread_time() - start

    size = 20_000 // len(repeated)
    assert min(cost(4 * size) for _ in range(2)) < 8 * max(cost(size) for _ in range(3))


def test_a_whole_text_is_cut_into_pieces():
    text = "x" * (2 * PIECE_CHARS + 1)
    assert [len(piece) for piece in pieces_of(text)] == [PIECE_CHARS, PIECE_CHARS, 1]
    assert list(pieces_of("")) == []
