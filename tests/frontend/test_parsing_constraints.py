"""What a demand makes of a text: what its grammar lets through is read as calls that fit their schemas."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "grammar"))
from structured_toys import fault_of, feed, fits, judge, matcher, random_text, snippets_of

from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.frontend.parsing.constraints import Demand, demanded, forced, tools_of
from mainspring.frontend.parsing.events import CallArguments, CallBegins, Content, Event, joined
from mainspring.frontend.parsing.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    REQUIRED,
    ToolFormat,
    named,
)
from mainspring.frontend.parsing.parser import AnswerParser

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["°C", "°F"]},
            "days": {"type": "integer"},
        },
        "required": ["city"],
    },
    "now": None,
    "walk": {"$defs": {"node": NODE}, "type": "object", "properties": {"list": {"$ref": "#/$defs/node"}}},
    "walk_text": {  # the same reference means another thing
        "$defs": {"node": {"type": "string", "maxLength": 5}},
        "properties": {"list": {"$ref": "#/$defs/node"}},
        "required": ["list"],
    },
    "führe_aus": {
        "type": "object",
        "properties": {
            "code": {"type": "string", "minLength": 1},
            "at": {"type": "string", "format": "date"},
            "n": {"type": "number", "minimum": 0, "maximum": 3},
            "tags": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 3},
        },
        "required": ["code", "n"],
        "additionalProperties": False,
    },
}
WEATHER = SCHEMAS["get_weather"]
NOISE = [b"<tool_call>", b"</tool_call>", b"[TOOL_CALLS]", b"<|python_tag|>", b'"name": ', b"; ", b"]"]
Played = tuple[str, list[Event], bool]


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


def tools(**more: Any) -> list[dict[str, Any]]:
    return [tool(name, schema, **more) for name, schema in SCHEMAS.items()]


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def kind_of(asked: StructuredOutputsParams | None) -> dict[str, Any]:
    assert asked is not None
    return {asked.kind: json.loads(getattr(asked, asked.kind))}


def read(text: str, tool_format: ToolFormat | None, dice: random.Random) -> list[Event]:
    parser = AnswerParser(tool_format, None)
    ends = sorted(dice.choices(range(len(text) + 1), k=8))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


def check_calls(events: list[Event], known: dict[str, Any]) -> int:
    """Every call is of a tool and fits its schema. How many there are."""
    names = [event.name for event in events if isinstance(event, CallBegins)]
    arguments = [event.text for event in events if isinstance(event, CallArguments)]
    for name, given in zip(names, arguments, strict=True):
        assert isinstance(json.loads(given), dict)
        assert fault_of(judge(known[name]), given) is None, (name, given)
    return len(names)


def play(demand: Demand, known: dict[str, Any], count: int, budget: int, likely: str = "") -> list[Played]:
    """Random texts of the grammar, read; and whether they came to their end. Calls are checked. `likely` is
    said often, where it may be."""
    dice = random.Random(f"{demand}")
    snippets = [*snippets_of(list(known.values())), *NOISE]
    snippets += [likely.encode()] * len(snippets) if likely else []
    played = []
    for _ in range(count):
        text, is_whole = random_text(kind_of(demand.structured_outputs), dice, snippets, budget)
        written = text.decode(errors="ignore" if not is_whole else "strict")
        events = read(written, demand.tool_format, dice)
        if is_whole:
            check_calls(events, known)
        played.append((written, events, is_whole))
    return played


def test_a_tool_that_lists_its_arguments_has_no_others():
    """A small model invents some, and libraries refuse what their function does not take."""

    def schema_of(**parameters: Any) -> dict[str, Any]:
        asked = forced([tool("f", parameters)], named_choice("f"), True)
        return kind_of(asked)["json"]

    listed = {"properties": {"a": {"type": "object", "properties": {}}}}
    closed = {"type": "object", "additionalProperties": False}
    assert schema_of(**listed) == listed | closed
    assert schema_of(**listed, minProperties=1) == listed | closed | {"minProperties": 1}
    assert schema_of(**listed, required=["a"], title="f") == listed | closed | {
        "required": ["a"],
        "title": "f",
    }
    assert schema_of(properties={}) == {"properties": {}} | closed
    for says_more in (
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^x": {"type": "integer"}}},
        {"required": ["a", "b"]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"properties": None, "description": "anything"},
    ):
        given = {key: value for key, value in (listed | says_more).items() if value is not None}
        assert schema_of(**given) == given | {"type": "object"}


KNOWN = {t.name: t.schema for t in tools_of(tools())}
STRICT = {t.name: t.schema for t in tools_of(tools(strict=True))}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_call_fits_its_schema(name: str):
    demand = demanded(tools(), named_choice(name), True, None)
    assert demand.tool_format == named(name)
    for text, events, is_whole in play(demand, KNOWN, 25, budget=120):
        if is_whole:
            assert check_calls(events, KNOWN) == 1, text
            assert not any(isinstance(event, Content) for event in events)


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_fit_their_schemas(parallel: bool):
    demand = demanded(tools(), "required", parallel, HERMES)
    assert demand.tool_format is REQUIRED
    counts = set()
    for _, events, is_whole in play(demand, KNOWN, 60, budget=250):
        if is_whole:
            counts.add(check_calls(events, KNOWN))
            assert not any(isinstance(event, Content) for event in events)
    assert 1 in counts
    assert 0 not in counts
    assert (max(counts) > 1) == parallel


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3_JSON, MISTRAL], ids=lambda known: known.name)
def test_strict_calls_fit_their_schemas_once_they_begin(tool_format: ToolFormat):
    """However they are announced: by the tag, or by a bracket at the beginning."""
    demand = demanded(tools(strict=True), "auto", True, tool_format)
    played = play(demand, STRICT, 50, 150, "{" if tool_format is LLAMA3_JSON else tool_format.begin)
    with_calls = [events for _, events, is_whole in played if is_whole and check_calls(events, STRICT)]
    without = [events for _, events, is_whole in played if is_whole and not check_calls(events, STRICT)]
    assert len(with_calls) > 4
    assert without


def test_only_strict_tools_are_held_to_their_schema():
    asked = demanded([tool("f", WEATHER, strict=True), tool("g", WEATHER)], "auto", True, HERMES)[1]
    kind = kind_of(asked)

    def written(name: str, arguments: str) -> str:
        return f'Hi <tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    assert fits(written("f", '{"city": "x"}'), **kind)
    assert not fits(written("f", "{}"), **kind)
    assert not fits(written("f", '{"city": "x", "more": 1}'), **kind)
    assert fits(written("g", "{}"), **kind)
    assert fits(written("g", '{"more": [1]}'), **kind)
    assert not fits(written("g", "[]"), **kind)
    assert not feed(matcher(**kind), written("h", "{}"))
    assert fits("no call at all {", **kind)


def test_one_call_at_most():
    counts = set()
    for tool_format in (HERMES, MISTRAL):
        demand = demanded([tool("f", strict=True)], "auto", False, tool_format)
        for _, events, is_whole in play(demand, {"f": {"type": "object"}}, 30, 80, tool_format.begin):
            if is_whole:
                counts.add(check_calls(events, {"f": {"type": "object"}}))
    assert counts == {0, 1}


def test_auto_without_strict_is_free():
    assert demanded(tools(), "auto", True, PYTHONIC) == Demand(PYTHONIC, None)
    assert demanded(tools(), "auto", True, None) == Demand(None, None)
    assert demanded(tools(strict=True), "none", True, HERMES) == Demand(None, None)
    assert forced(tools(), "auto", True) is None
    assert forced(tools(), "none", True) is None


def test_a_tool_without_parameters_has_no_arguments():
    kind = kind_of(forced([tool("now")], named_choice("now"), True))
    assert fits("{}", **kind)
    assert not fits('{"a": 1}', **kind)


def test_arguments_are_an_object_also_where_the_schema_does_not_say_so():
    for schema in ({}, {"properties": {"a": {}}}, {"type": ["object", "null"]}):
        kind = kind_of(forced([tool("f", schema)], named_choice("f"), True))
        assert fits('{"a": 1}', **kind)
        assert not fits('"france"', **kind)
        assert not fits("null", **kind)


def test_responses_spell_the_choice_otherwise():
    flat = {"type": "function", "name": "now"}
    assert forced(tools(), flat, True) == forced(tools(), named_choice("now"), True)


def test_special_tokens_cannot_be_said():
    """A tag that is one would be asked for in vain: refused, or, where a call needs none, not read."""
    strict = tools(strict=True)
    assert demanded(strict, "auto", True, MISTRAL, {"</s>"}).tool_format is MISTRAL
    with pytest.raises(RequestError, match=r"strict cannot be enforced .* form mistral"):
        demanded(strict, "auto", True, MISTRAL, {"[TOOL_CALLS]"})
    read_as = demanded(strict, "auto", True, LLAMA3_JSON, {"<|python_tag|>"}).tool_format
    text = '<|python_tag|>{"name": "f", "parameters": {}}'
    assert read(text, read_as, random.Random(0)) == [Content(text)]


LISTED = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}


@pytest.mark.parametrize("strict", [False, True])
def test_some_argument_of_those_that_are_listed(strict: bool):
    """Among the arguments, and with `strict` inside them: there are no others, so they can be counted."""
    some = LISTED | {"minProperties": 1}
    schema = {"type": "object", "properties": {"c": some}, "required": ["c"]} if strict else some
    asked = forced([tool("f", schema, strict=strict)], named_choice("f"), True)
    assert asked is not None
    for text, is_enough in (('{"b": null}', True), ("{}", False), ('{"z": 1}', False)):
        assert fits(f'{{"c": {text}}}' if strict else text, json=asked.json) == is_enough


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("given", "choice", "message"),
    [
        ([], "auto", r"tools is empty"),
        ([{"type": "web_search"}], "auto", r'tools\[0\] must have "type": "function"'),
        ([{"type": "function"}], "auto", r'tools\[0\] must have "type": "function" and an object "function"'),
        ([tool("a b")], "auto", r"tools\[0\]: name must be 1 to 128 characters .* got 'a b'"),
        ([tool("")], "auto", r"tools\[0\]: name must be"),
        ([tool("f"), tool("g"), tool("f")], "auto", r"tools\[2\]: there is a tool 'f' already"),
        ([tool("f", [])], "auto", r"tools\[0\] 'f': parameters must be a JSON schema"),
        ([tool("f", {"type": "string"})], "auto", r"'f': parameters must describe an object, .* 'string'"),
        ([tool("f", strict="yes")], "auto", r"'f': strict must be true or false"),
        ([tool("f", deep(500), strict=True)], "auto", r"tools\[0\] 'f': parameters is nested too deeply"),
        (tools(), "sometimes", r"tool_choice must be .* got 'sometimes'"),
        (tools(), {"type": "tool", "name": "now"}, r"tool_choice must be .* got \{'type': 'tool'"),
        (tools(), named_choice("later"), r"tool_choice names 'later', but the tools are get_weather, now"),
        (
            [tool("f"), tool("g", {"properties": {"a": {"pattern": "(?=a)b"}}})],
            "required",
            r"tools\[1\] 'g': parameters: pattern: ",
        ),
        ([tool("f", {"properties": {"a": {"not": {}}}})], named_choice("f"), r"'f': parameters: .*not"),
        ([tool("f", {"properties": {"a": {"$ref": "#/x"}}})], "required", r"'f': parameters: \$ref"),
        ([tool("f", {"multipleOf": 30011}, strict=True)], "auto", r"'f': parameters: multipleOf"),
        (
            [tool("f", LISTED | {"minProperties": 2})],
            "required",
            r"'f': parameters: min/maxProperties only .* required",
        ),
        (tools(strict=True), "auto", r"tool 'get_weather': strict cannot be enforced .* form pythonic"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(given: Any, choice: Any, message: str):
    with pytest.raises(RequestError, match=message) as refusal:
        demanded(given, choice, True, PYTHONIC)
    assert refusal.value.param in ("tools", "tool_choice")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
