"""Calls written as Python: literals become the JSON that `json.dumps` makes of them, however they come."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.frontend.parsing.events import CallArguments, CallBegins, CallEnds, Content, Event, joined
from mainspring.frontend.parsing.formats import PYTHONIC
from mainspring.frontend.parsing.parser import AnswerParser

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)
PLAIN_PARTS = ["a", " ", "é", "北京", "😀", "{", "]", ")", ",", "#", "\x7f", "\u2028"]
ESCAPES = [*"nta\\'\"\n", "x41", "xe9", "u00e9", "U0001F600", "N{EM DASH}", "101", "0", "7z"]
STRING_PARTS = st.sampled_from([*PLAIN_PARTS, *(f"\\{escape}" for escape in ESCAPES)])


def read(text: str, size: int | None = None) -> list[Event]:
    parser = AnswerParser(PYTHONIC, None)
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


def arguments_of(text: str, size: int | None = None) -> str:
    """Of an answer that is nothing but one call."""
    begins, arguments, ends = read(text, size)
    assert isinstance(begins, CallBegins)
    assert isinstance(arguments, CallArguments)
    assert isinstance(ends, CallEnds)
    return arguments.text


@given(VALUES, st.sampled_from([None, 1, 3]))
@settings(max_examples=200, deadline=None)
def test_a_literal_is_what_json_makes_of_it(value: Any, size: int | None):
    expected = json.loads(json.dumps({"x": value}))
    assert json.loads(arguments_of(f"[f(x={value!r})]", size)) == expected


@given(
    st.lists(STRING_PARTS, max_size=8),
    st.sampled_from(["'", '"', "'''", '"""']),
    st.sampled_from([None, 1]),
)
@settings(max_examples=300, deadline=None)
def test_a_string_is_what_python_reads(parts: list[str], quotes: str, size: int | None):
    written = f"{quotes}{''.join(parts)}{quotes}"
    assert json.loads(arguments_of(f"[f(x={written})]", size)) == {"x": ast.literal_eval(written)}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("-1e5", "-1e5"),
        ("10" * 3000, "10" * 3000),  # longer than Python counts
        ("+5", "5"),
        ("1_000", "1000"),
        ("0x1F", "31"),
        (".5", "0.5"),
        ("5.", "5.0"),
        ("true", "true"),  # as JSON says it
        ("null", "null"),
        ("()", "[]"),
        ("(1,)", "[1]"),
        ("[1, 2,]", "[1, 2]"),
        ("{}", "{}"),
        ("{'a': (1, {None: []}), 2.5: 'b',}", '{"a": [1, {"null": []}], "2.5": "b"}'),
        ("'''it's ''a'' '''", "\"it's ''a'' \""),
        ("''", '""'),
        ("'\\ud83d\\ude00'", '"\\ud83d\\ude00"'),  # a pair is joined by whoever reads the JSON
        ("'a\nb'", '"a\\nb"'),  # Python refuses it, but models write it
        ("'\\d'", '"\\\\d"'),
    ],
)
def test_what_a_literal_becomes(written: str, said: str):
    for size in (None, 1):
        assert arguments_of(f"[f(x={written})]", size) == f'{{"x": {said}}}'


def test_deep_nesting_is_only_long():
    depth = 5000
    assert arguments_of(f"[f(x={'[' * depth}{']' * depth})]") == f'{{"x": {"[" * depth}{"]" * depth}}}'


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("x=y)]", '{"x": y)]'),
        ("x=1 + 2)] and more", '{"x": 1 + 2)] and more'),
        ("x=1, 2)]", '{"x": 1, 2)]'),
        ("x=1 y=2)]", '{"x": 1 y=2)]'),
        ("x=f'a')]", "{\"x\": f'a')]"),
        ("x=b'a')]", "{\"x\": b'a')]"),
        ("x=1j)]", '{"x": 1j)]'),
        ("x=nan)]", '{"x": nan)]'),
        ("x={1})]", '{"x": {"1"})]'),
        ("x={[1]: 2})]", '{"x": {[1]: 2})]'),
        ("x='\\x4')]", '{"x": "\\x4\')]'),
        ("x='\\N{NO SUCH}')]", '{"x": "\\N{NO SUCH}\')]'),
        ("x='\\U00110000')]", '{"x": "\\U00110000\')]'),
        ("x=[1, , 2])]", '{"x": [1, , 2])]'),
        ("x=)]", '{"x": )]'),
    ],
)
def test_what_is_no_literal_is_passed_on_with_all_that_follows(written: str, said: str):
    for size in (None, 1):
        assert read(f"[f({written}", size) == [CallBegins(0, "f"), CallArguments(0, said), CallEnds(0)]


def test_white_space_and_commas_anywhere():
    text = "[ f( a = 1 ,\n b = [ 2 , 3 ] , ) , g ( ) ]"
    assert read(text)[:3] == [CallBegins(0, "f"), CallArguments(0, '{"a": 1, "b": [2, 3]}'), CallEnds(0)]
    assert read(text)[3:] == [Content(", g ( ) ]")]  # a space before the bracket is how prose writes
    assert read("[f(a=1), g( ) ]")[3:] == [CallBegins(1, "g"), CallArguments(1, "{}"), CallEnds(1)]
