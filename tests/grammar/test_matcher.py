"""Masks and tokens of one text: what each kind of structure lets through, where it ends, what ends it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from structured_toys import (
    END,
    EOS,
    NUM_WORDS,
    TOKENIZER,
    TOKENS,
    VOCAB_SIZE,
    allowed,
    asked,
    feed,
    fits,
    matcher,
    text_of,
)

from mainspring.grammar.library import make_matcher, make_tokenizer
from mainspring.grammar.matcher import Matcher
from mainspring.grammar.words import GrammarError

INTEGERS = {"type": "array", "items": {"type": "integer"}}


def only_way(**kind) -> str:
    """The text of a grammar that leaves no choice but that of tokens."""
    grammar, said = matcher(**kind), []
    while not grammar.is_finished():
        token = max(allowed(grammar), key=lambda token: len(TOKENS[token]))
        assert grammar.accept(token)
        said.append(token)
    return text_of(said)


# -- kinds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("[一-龥]{2}", ["北京"], ["北", "ab", "北京北"]),
        ("[\u0000-\u2e7f]+", ["aé\n\u2e7f"], ["北", ""]),
        ("(😀|🎉)", ["😀", "🎉"], ["😁", ""]),
        ("^abc$", ["abc"], ["abcd", "xabc", "ab"]),
        ("a$|b", ["a", "b"], ["ab"]),
        (r"\d+\.\d{2}", ["3.14", "10.00"], ["3.1", ".14"]),
        (r"a/b|\/c", ["a/b", "/c"], ["ab"]),
        ("(?i)yes", ["YES", "yEs"], ["ye"]),
    ],
)
def test_regex(pattern, right, wrong):
    """Case B131: the whole text matches, in characters and not in bytes."""
    for text in right:
        assert fits(text, regex=pattern), text
        assert re.fullmatch(pattern, text)
    for text in wrong:
        assert not fits(text, regex=pattern), text


def test_choice():
    """Case B131: choices are themselves, whatever they are made of; one may begin another."""
    words = ["a.b(c)*", "a|b", " leading", "pre", "prefix", 'q"uo\\te', "line\nend\t", "\x01\x7f", "é北京😀"]
    words += ["/slash/", "\u2028", r"a\nb", "%{}[]<>", "$", "pre"]
    for word in words:
        assert fits(word, choice=words), word
    for word in ("", "axb(c)*", "a", "pref", "prefixx", "a\nb"):
        assert not fits(word, choice=words), word


@pytest.mark.parametrize(
    "value", ['a\nb\t"\\/😀', "北京", "Zürich", "", "a'b", "</x>", r"\d", 5, -0.5, None, True, {"a": ["é"]}]
)
def test_const(value):
    """Case B131: a constant is said whole, with what JSON escapes escaped once."""
    said = only_way(json={"const": value}, disable_any_whitespace=True)
    assert json.loads(said) == value
    assert "\\u" not in said


def test_names_of_all_kinds():
    """Case B130: names with quotes, spaces, signs; the empty one."""
    names = ['q"q', "a b", "$ref?", "é", "北", "", "a\\b", "a/b", "\n"]
    schema = {
        "type": "object",
        "properties": {name: {"const": 1} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    said = only_way(json=schema, disable_any_whitespace=True)
    assert json.loads(said) == dict.fromkeys(names, 1)


def test_no_spelling_goes_around_a_name():
    r"""A name written \u0061 is the name a, and must not pass as another one."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "é\n": {"type": "integer"}}}
    assert fits('{"a": 1, "é\\n": 2, "b": "text"}', json=schema)
    for name in (r"\u0061", r"\u00e9\n", r"é\u000a"):
        assert not fits(f'{{"{name}": "text"}}', json=schema)


@pytest.mark.parametrize("length", [1999, 2000, 5000])
def test_long_strings(length):
    """Case B130: the reference's grammars broke from 2,000 characters on."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": length}},
        "required": ["a"],
    }
    assert fits(json.dumps({"a": "x" * length}), json=schema)
    assert not fits(json.dumps({"a": "x" * (length + 1)}), json=schema)


def test_additional_properties():
    """Case B130: allowed where nothing is said of them, held to their schema, or forbidden."""
    assert fits('{"b": "x"}', json={"properties": {"a": {}}, "type": "object"})
    integers = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert fits('{"b": 1}', json=integers)
    assert not fits('{"b": "x"}', json=integers)
    closed = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    assert fits('{"a": {"b": 1, "c": 2}}', json=closed)
    assert not fits('{"a": {"b": 1, "c": 2}}', json=closed, disable_additional_properties=True)
    assert fits('{"a": {"b": 1}}', json=closed, disable_additional_properties=True)


def test_array_lengths():
    """Case B127."""
    assert fits("[1, 2]", json=INTEGERS | {"minItems": 2, "maxItems": 2})
    assert not fits("[1]", json=INTEGERS | {"minItems": 2, "maxItems": 2})
    assert fits("[]", json=INTEGERS | {"maxItems": 0})
    assert not fits("[1]", json=INTEGERS | {"maxItems": 0})


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-12-31"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01"],
        ),
        ("time", ["23:59:59Z", "00:00:00.123+01:30"], ["24:00:00Z", "23:59:60Z", "22:59:60Z", "10:00:00"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z"]),
    ],
)
def test_dates_exist(format, right, wrong):
    """Alone, and beside a pattern of the schema's own."""
    for more in ({}, {"pattern": "^2"}, {"pattern": "^[0-9]", "allOf": [{"pattern": "Z$|[0-9]$"}]}):
        schema = {"type": "string", "format": format} | more
        for text in wrong:
            assert not fits(f'"{text}"', json=schema), (text, more)
    for text in right:
        assert fits(f'"{text}"', json={"type": "string", "format": format}), text


def test_json_object():
    assert fits('{"a": [1, {"b": null}]}', json_object=True)
    assert not fits("[]", json_object=True)
    assert not fits('"a"', json_object=True)


def test_white_space_is_bounded():
    """Case B125: a space, or a line and some indentation; inside strings it is the text's own."""
    assert fits('{\n  "a": [1, 2]\n}', json_object=True)
    assert fits('{"a": "' + " " * 500 + '"}', json_object=True)
    assert not fits('{  "a": 1}', json_object=True)
    assert not fits('{\n\n"a": 1}', json_object=True)
    assert not fits('{"a": 1} ', json_object=True)
    assert not fits("{\n" + " " * 9 + '"a": 1}', json_object=True)
    assert not fits('{"a": 1}', json_object=True, whitespace_pattern=r"\n")  # it must be there
    assert fits('{"a":1}', json_object=True, disable_any_whitespace=True)
    assert not fits('{"a": 1}', json_object=True, disable_any_whitespace=True)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "SELECT " column " FROM " [a-z]+\ncolumn ::= "a_x" | "b"',
        'start: "SELECT " column " FROM " /[a-z]+/\ncolumn: "a_x" | "b"',
        '?start: "SELECT " ("a_x" | "b") " FROM " NAME\nNAME: /[a-z]+/',
    ],
)
def test_grammars_in_both_notations(grammar):
    assert fits("SELECT a_x FROM t", grammar=grammar)
    assert not fits("SELECT c FROM t", grammar=grammar)
    assert not fits("SELECT a_x FROM ", grammar=grammar)


# -- structural tags -----------------------------------------------------------------------------------------

CALLS = {
    "type": "structural_tag",
    "triggers": ["<fn="],
    "structures": [
        {
            "begin": "<fn=add>",
            "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            "end": "</fn>",
        },
        {"begin": "<fn=say>", "schema": {"type": "string"}, "end": "</fn>"},
    ],
}


def test_calls_in_free_text():
    """Case B128: free until the trigger; from there on it holds."""
    for text in ("hello", "a < b <f", 'Hi <fn=add>{"x": 1}</fn> and <fn=say>"y"</fn>\nbye'):
        assert fits(text, structural_tag=CALLS), text
    for text in ("<fn=sub>", "<fn= ", '<fn=add>{"x": "1"}</fn>', '<fn=add>{"x": 1}', "<fn=say>5</fn>"):
        assert not fits(text, structural_tag=CALLS), text


def tags(**format) -> dict:
    return {"structural_tag": {"type": "structural_tag", "format": format}}


def test_formats_of_structural_tags():
    think = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
    number = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9/]+"}, "end": ""}
    answer = {"type": "json_schema", "json_schema": {"type": "integer"}}
    thought = tags(type="sequence", elements=[think, {"type": "const_string", "value": "A: "}, answer])
    assert fits("<think>a < b\n</thin</think>A: 12", **thought)
    assert not fits("<think>a</think>A: x", **thought)
    either = tags(type="or", elements=[answer, {"type": "sequence", "elements": [think, number]}])
    assert fits("7", **either)
    assert fits("<think></think><n>1/2", **either)
    several = {"type": "tags_with_separator", "tags": [number, think], "separator": ", "}
    assert fits("", **tags(**several))
    assert fits("<n>1, <think>x</think>", **tags(**several))
    assert not fits("<n>1<n>2", **tags(**several))
    assert not fits("", **tags(**several, at_least_one=True))
    assert not fits("<n>1, <n>2", **tags(**several, stop_after_first=True))
    triggered = {"type": "triggered_tags", "triggers": ["<n"], "tags": [number]}
    assert fits("x <n>1 y", **tags(**triggered))
    assert not fits("x <n>y", **tags(**triggered))
    assert not fits("x <n>1", **tags(**triggered, at_least_one=True))
    assert fits("<n>1 x", **tags(**triggered, at_least_one=True))
    assert fits("x <n>1", **tags(**triggered, stop_after_first=True))
    assert not fits("x <n>1 y", **tags(**triggered, stop_after_first=True))
    assert fits("anything\n", **tags(type="any_text"))


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        ({"type": "structural_tag"}, "has no"),
        ({"type": "other"}, "structural_tag"),
        (CALLS | {"triggers": ["["]}, "triggers"),
        (CALLS | {"triggers": []}, "triggers"),
        (CALLS | {"triggers": ["<fn=", "<fn"]}, "only one"),
        (CALLS | {"structures": [{"begin": "<fn=a>"}]}, "end"),
        (CALLS | {"more": 1}, "more"),
        (CALLS | {"structures": [{"begin": "<fn=a>", "end": "", "schema": {"not": {}}}]}, "not"),
        (
            CALLS | {"structures": [{"begin": "<fn=a>", "end": "", "schema": {"x-guidance": {}}}]},
            "x-guidance",
        ),
        ({"type": "structural_tag", "format": {"type": "qwen_xml_parameter"}}, "qwen_xml_parameter"),
        ({"type": "structural_tag", "format": {"type": "regex", "pattern": "a", "excludes": []}}, "excludes"),
        ({"type": "structural_tag", "format": {"type": "sequence", "elements": []}}, "elements"),
    ],
)
def test_structural_tags_that_are_refused(tag, word):
    with pytest.raises(GrammarError, match=word):
        make_matcher(TOKENIZER, asked(structural_tag=tag))


# -- tokens --------------------------------------------------------------------------------------------------


def test_a_mask_is_exactly_what_is_accepted():
    """Along one text: every token is tried, and none that is refused changes anything."""
    grammar = matcher(json={"type": "object", "properties": {"name": {"enum": ["北京", "ab"]}}})
    for token in (ord("{"), ord('"'), TOKENS.index(b"name"), ord('"'), ord(":")):
        open_tokens = allowed(grammar)
        for other in range(VOCAB_SIZE):
            assert grammar.accept(other) == (other in open_tokens), (other, open_tokens)
            if other in open_tokens:
                grammar.rollback(1)
        assert allowed(grammar) == open_tokens
        assert grammar.accept(token)


def test_no_token_outside_the_vocabulary_is_allowed():
    open_tokens = allowed(matcher(regex=r"(.|\n)*"))
    assert max(open_tokens) <= EOS + 1
    assert {EOS, END} <= open_tokens
    assert len(open_tokens) > 150


def test_tokens_that_say_the_same_are_all_allowed():
    tokenizer = make_tokenizer([b"a", b"b", b"a", b"", b"<eos>"], [4], [4], 8)
    grammar = Matcher(make_matcher(tokenizer, asked(regex="[ab]{2}")).matcher, [4], [4])
    row = np.zeros(1, dtype=np.int32)
    grammar.fill(row)
    assert row[0] == 0b111
    assert grammar.accept(2)
    assert grammar.accept(1)
    assert grammar.is_finished()


def test_rollback():
    """Case B133: back over a token, over several, over the end; then on as if nothing had been."""
    grammar = matcher(json=INTEGERS)
    assert feed(grammar, "[1, 2")
    before = allowed(grammar)
    assert feed(grammar, "3]")
    assert grammar.is_finished()
    grammar.rollback(2)
    assert not grammar.is_finished()
    assert allowed(grammar) == before
    grammar.rollback(0)
    assert feed(grammar, "]")
    grammar.rollback(6)
    assert allowed(grammar) == allowed(matcher(json=INTEGERS))


# -- ends ----------------------------------------------------------------------------------------------------


def test_ends_are_allowed_where_the_grammar_ends():
    """Case B122: and after that nothing is."""
    grammar = matcher(regex="ab?")
    assert not allowed(grammar) & {EOS, END}
    assert feed(grammar, "a")
    assert allowed(grammar) == {ord("b"), EOS, END}
    assert grammar.accept(EOS)
    assert grammar.is_finished()
    assert not grammar.accept(EOS)
    assert not grammar.accept(ord("b"))


def test_ignored_ends_are_not_allowed():
    """A request with `ignore_eos` goes on while it can."""
    grammar = matcher(ends=(), regex="a+")
    assert feed(grammar, "a")
    assert allowed(grammar) == {ord("a")}
    empty = matcher(ends=(), regex="")
    assert allowed(empty), "an end is the only way there is"


def test_a_stop_token_of_the_request():
    """Where the text may end it may end by that; where the token is a continuation it is allowed as one."""
    stop = TOKENS.index(b"null")
    grammar = matcher(ends=(EOS, END, stop), json=INTEGERS)
    assert stop not in allowed(grammar)
    assert feed(grammar, "[]")
    assert stop in allowed(grammar)
    grammar = matcher(ends=(EOS, ord("1")), json=INTEGERS)
    assert feed(grammar, "[")
    assert ord("1") in allowed(grammar)


# -- limits --------------------------------------------------------------------------------------------------


def test_a_grammar_that_becomes_too_complex_says_so():
    """And stays so: whoever compiled it hears of it, to give it out no more."""
    failed = []
    limits = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    inner = LLMatcher(
        TOKENIZER, LLMatcher.grammar_from_regex("(.*a.{20}|.*b.{15})z"), log_level=0, limits=limits
    )
    grammar = Matcher(inner, [EOS, END], [EOS], lambda: failed.append(1))
    row = np.zeros(NUM_WORDS, dtype=np.int32)

    def go_on() -> None:
        for byte in b"abcab" * 10:
            grammar.fill(row)
            assert grammar.accept(byte)

    with pytest.raises(GrammarError, match=r"too complex.*too many states"):
        go_on()
    assert failed
    with pytest.raises(GrammarError):
        grammar.fill(row)
    with pytest.raises(GrammarError):
        grammar.accept(ord("a"))
