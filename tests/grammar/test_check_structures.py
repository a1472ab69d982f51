"""What may be asked for, what is refused and how, before a core hears of it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from decimal import Decimal

import msgspec
import pytest
from structured_toys import fits

from mainspring.base.errors import RequestError
from mainspring.base.params import SamplingParams, StructuredOutputsParams
from mainspring.grammar import check
from mainspring.grammar.check import check_structured_outputs, check_structured_outputs_async
from mainspring.grammar.translate import MAX_TEXT_BYTES

CIRCLE = json.dumps(
    {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}, "items": {"$ref": "#/$defs/x"}}
)


def verdict(**kind) -> tuple[str, ...]:
    return check_structured_outputs(StructuredOutputsParams(**kind))


def refused(**kind) -> str:
    with pytest.raises(RequestError) as caught:
        verdict(**kind)
    assert caught.value.param == "structured_outputs"
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


# -- the form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": [5]}, "choice"),
        ({"choice": 5}, "choice"),
        ({"regex": 5}, "regex"),
        ({"json": 5}, "json"),
        ({"json": {"a": float("nan")}}, "json"),
        ({"json": {"a": object()}}, "json"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"json": {}, "lenient": "yes"}, "lenient"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " ?"}, "contradict"),
    ],
)
def test_what_is_no_structure(given, word):
    """Case B119: two kinds at once, none, and kinds of a wrong type."""
    with pytest.raises(RequestError, match=word) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.param == "structured_outputs"


def test_forms_are_made_one():
    schema = {"type": "object", "properties": {"北": {}}}
    asked = StructuredOutputsParams(json=schema)
    assert json.loads(asked.json) == schema
    assert asked == StructuredOutputsParams(json=json.dumps(schema, ensure_ascii=False))
    assert StructuredOutputsParams(json=True).json == "true"
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    assert [StructuredOutputsParams(json_object=True).kind, asked.kind] == ["json_object", "json"]
    wire = msgspec.msgpack.encode(SamplingParams(structured_outputs=asked))
    assert msgspec.msgpack.decode(wire, type=SamplingParams).structured_outputs == asked
    with pytest.raises(RequestError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": {}})


# -- what cannot be enforced ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ('{"type": "nope"}', "type: nope"),
        ('{"type": 5}', "type"),
        ('{"$ref": "#/none"}', r"\$ref"),
        ('{"$ref": "http://x"}', r"\$ref"),
        ('{"$ref": "#"}', r"\$ref '#' leads in a circle"),
        (CIRCLE, r"\$ref '#/\$defs/y' leads in a circle"),
        ('{"$id": "http://x/y", "properties": {"a": {"$ref": "y#/properties/a"}}}', "circle"),
        ('{"properties": {"a": {"$anchor": "b", "anyOf": [{"$ref": "#b"}, {"type": "string"}]}}}', "circle"),
        ('{"properties": {"a/b": {"allOf": [{"$ref": "#/properties/a~1b/allOf/0"}]}}}', "circle"),
        ("{", "not JSON"),
        ("[]", "must be a JSON schema"),
        ("5", "must be a JSON schema"),
        ("null", "must be a JSON schema"),
        ("NaN", "NaN"),
        ("false", "False"),
        ('{"type": "object", "properties": []}', "properties"),
        ('{"not": {}}', "not"),
        ('{"uniqueItems": true}', "uniqueItems"),
        ('{"if": {}, "then": {}}', "then"),
        ('{"dependentRequired": {"a": ["b"]}}', "dependentRequired"),
        ('{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "oneOf"),
        ('{"type": "string", "format": "nope"}', "format"),
        ('{"type": "string", "pattern": "("}', "pattern"),
        ('{"type": "string", "pattern": "(?<=a)b"}', "pattern.*look-behind"),
        ('{"type": "string", "pattern": "[\\\\S ]"}', "pattern"),
        ('{"type": "array", "minItems": 3, "maxItems": 1}', r"minItems \(3\)"),
        ('{"enum": []}', "anyOf is empty"),
        ('{"const": "a\\u0000b"}', r"const .*U\+0000"),
        ('{"properties": {"\\u0001": {}}}', r"properties .*U\+0001"),
        ('{"type": "object", "minProperties": 2}', "minProperties"),
        ('{"multipleOf": 999983}', "multipleOf"),
        ('{"allOf": [{"multipleOf": 9973}, {"properties": {"a": {"multipleOf": 9967}}}]}', "multipleOf"),
        (json.dumps({"properties": {f"p{i}": {"multipleOf": 9973} for i in range(6)}}), "multipleOf"),
        ('{"prefixItems": [{"const": 1}], "additionalItems": false}', "prefixItems and additionalItems"),
        ('{"prefixItems": [{"const": 1}], "items": [{"const": 2}]}', "prefixItems and a list of items"),
        ('{"$schema": "http://json-schema.org/draft-03/schema#", "type": "object"}', r"\$schema"),
        ('{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ('{"properties": {"a": {"x-guidance": {}}}}', "x-guidance"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "deep|recursion"),
    ],
)
def test_schemas_that_cannot_be_enforced(schema, word):
    """Cases B119, B127, B128, B130: refused by name, never taken and weakened."""
    with pytest.raises(RequestError, match=word):
        verdict(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        *(
            {"const": number}
            for number in (
                2**53 + 1,
                10**19 + 1,
                2**63,
                -(2**63),
                1 - 2**63,
                1.152921504606847e18,
                0.1 + 0.2,
                1e300,
            )
        ),
        *({"enum": [1, {"a": [number]}]} for number in (12345678901234567890, -(2**63), 1e15 + 0.5, 1e-40)),
        {"type": "integer", "minimum": 10**40, "maximum": 10**41},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"type": "integer", "minimum": -1e300, "maximum": -1e299},
        {"type": "number", "maximum": 2**53 + 2},
        {"type": ["number", "integer"], "maximum": 2**63 - 1},
        {"allOf": [{"const": -1e19}, {"type": "integer"}]},
        {"allOf": [{"type": "integer"}, {"exclusiveMinimum": -(2**63)}, {"exclusiveMaximum": 2 - 2**63}]},
    ],
    ids=str,
)
def test_numbers_that_would_come_out_as_others(schema):
    """Cases B119, B130: refused by keyword, in a schema and in a grammar with that schema; some of them would
    end the process."""
    for kind in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        assert re.search(r": (const|enum|\w+imum) \S+ has more digits than", refused(**kind))


@pytest.mark.parametrize(
    "number", [2**53, -(2**60), 2**63 - 1, 10**18, 0.1, -1.5e-10, 123456789.012345, 1e16]
)
def test_numbers_that_are_said_exactly(number):
    """Case B130."""
    said = format(Decimal(str(number)), "f")
    assert fits(said, json={"const": number})
    assert fits(f"[{said}]", json={"enum": [[number], "x"]})


def test_a_maximum_beyond_all_that_is_counted():
    """Case B130: what is said is below it."""
    schema = {"type": ["integer", "null"], "minimum": 0, "maximum": 2**64 - 1}
    assert fits(str(2**63 - 1), json=schema)
    assert not fits(str(2**64), json=schema)


def test_recursion_that_has_a_value_on_its_way_is_welcome():
    schema = {
        "$defs": {"list": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]}},
        "$ref": "#/$defs/list",
    }
    schema["$defs"]["pair"] = {"type": "array", "prefixItems": [{}, {"$ref": "#/$defs/list"}], "minItems": 2}
    assert fits("[1,[2,null]]", json=schema)


@pytest.mark.parametrize("number", [1, 7, 60, 1e6, 4096, 0.01, 2.5, 0.0001, 1e-8, 9973])
def test_usual_multiples_cost_nothing(number):
    """Cases B127, B130: what makes them costly are other factors than 2 and 5."""
    started_s = time.thread_time()
    assert verdict(json={"type": "number", "multipleOf": number}) == ()
    assert time.thread_time() - started_s < 1


@pytest.mark.parametrize("regex", ["[", "(", "*a", "(?<=a)b", r"\1(a)", r"\bfoo\b", r"[^\s\S]", "a{2,1}"])
def test_patterns_that_cannot_be_enforced(regex):
    """Case B119."""
    assert refused(regex=regex).startswith("structured_outputs: regex: ")


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ('x: "a"', "no start rule"),
        ("start: x", "unknown name"),
        ("root ::= x", "x"),
        ('root ::= "a', "root"),
        ("start: @other", "unknown grammar"),
        ('start: "a" <|im_end|>', "special token"),
        ('start: %json {"not": {}}', "not"),
        ('start: "%json {" %json {"a": {"$ref": "#/a"}}', "$ref"),
        ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        (r'start: %json {"x\u002dguidance": {"lenient": true}, "not": {}}', "x-guidance"),
    ],
)
def test_grammars_that_cannot_be_enforced(grammar, word):
    """Cases B119, B128: a grammar cannot ask for less strictness from inside, however it spells that."""
    assert word in refused(grammar=grammar)


def test_a_left_recursive_grammar_is_none_of_them():
    """Case B119: the parser knows what to do with it."""
    assert fits("baa", grammar='start: start "a" | "b"')


def test_schemas_in_a_grammar():
    """They are enforced as they are alone, and words that look like one are words."""
    date = '%json {"format": "date", "type": "string"}'
    grammar = f'start: "%json {{ }}" {date} %json\n{{"const": {{}}}} "%json {{"'
    assert fits('%json { }"2024-02-29"{}%json {', grammar=grammar)
    assert not fits('%json { }"2023-02-29"{}%json {', grammar=grammar)


def test_lenient_says_what_it_passes_over():
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert "uniqueItems" in refused(json=schema)
    (warning,) = verdict(json=schema, lenient=True)
    assert "uniqueItems" in warning
    assert verdict(json={"type": "object"}, lenient=True) == ()


def test_whitespace_must_be_white():
    """A caller's pattern may not smuggle text between the parts of a document."""
    for pattern in ("x*", r"\s*", "a)|(b", "(", r"[^a]", "/"):
        assert "whitespace_pattern" in refused(json_object=True, whitespace_pattern=pattern)
    for pattern in (" ?", r"[ \n]*", r"\t", ""):
        assert verdict(json_object=True, whitespace_pattern=pattern) == ()


# -- limits --------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        branch = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        schema = {"oneOf": [branch | {"properties": {"v": schema, "k": {"const": i}}} for i in range(2)]}
    return schema


@pytest.mark.parametrize(
    "kind",
    [
        {"json": {"type": "string", "maxLength": MAX_TEXT_BYTES, "title": "x" * MAX_TEXT_BYTES}},
        {"regex": "(" * 60_000},
        {"regex": "(" * 60_000 + "a" + ")" * 60_000},
        {"regex": "(a?){200}a{200}"},
        {"regex": ".{0,5000}"},
        {"regex": "((((a{0,100}){0,100}){0,100}){0,100}){0,100}b"},
        {"regex": "(.*a.{20}|.*b.{20}|.*c.{25})*z"},
        {"json": {"type": "string", "maxLength": 10**6}},
        {"json": {"enum": [f"value-{i}" for i in range(50_000)]}},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
        {"json": '{"enum": [' + "[" * 60_000 + "]" * 60_000 + "]}"},
        {"json": nested(12)},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": 'start: (("a"{0,1000}){0,1000}){0,1000}'},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": 'root ::= "a" | ' * 3000 + '"b"'},
        {"choice": [f"choice {i}" for i in range(20_000)]},
    ],
    ids=lambda kind: "-".join([*kind, str(next(iter(kind.values())))[:25]]),
)
def test_nothing_takes_long_or_kills(kind):
    """Case B121: accepted or refused, within seconds, by an interpreter that is still there."""
    started_s = time.monotonic()
    try:
        check._judge(StructuredOutputsParams(**kind))
    finally:
        assert time.monotonic() - started_s < 10.0


def test_too_much_text_is_refused():
    assert "at most" in refused(json={"title": "x" * MAX_TEXT_BYTES})
    assert "at most" in refused(choice=["x" * MAX_TEXT_BYTES, "y"])
    assert "at most" in refused(regex="x" * (MAX_TEXT_BYTES + 1))


# -- where and how often -------------------------------------------------------------------------------------


def test_asking_twice_costs_once(monkeypatch: pytest.MonkeyPatch):
    made = []
    plain = check.make_matcher
    monkeypatch.setattr(check, "make_matcher", lambda *given: (made.append(1), plain(*given))[1])
    for _ in range(3):
        assert verdict(regex="once [a-z]") == ()
        refused(regex="once (")
    assert len(made) == 2


def test_the_loop_goes_on_meanwhile(monkeypatch: pytest.MonkeyPatch):
    """The judging is done in another thread, and only where there is no verdict yet."""
    threads = []
    plain = check.make_matcher

    def noted(*given):
        threads.append(threading.get_ident())
        return plain(*given)

    monkeypatch.setattr(check, "make_matcher", noted)

    async def ask():
        for asked in (StructuredOutputsParams(regex="loop [a-z]"), StructuredOutputsParams(regex="loop (")):
            for _ in range(2):
                try:
                    await check_structured_outputs_async(asked)
                except RequestError as error:
                    assert "loop (" in str(error)  # noqa: PT017

    asyncio.run(ask())
    assert len(threads) == 2
    assert threading.get_ident() not in threads
