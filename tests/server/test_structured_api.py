"""Structured outputs over a socket: every field that asks for one, and every way to ask for none."""

from __future__ import annotations

import json

import pytest
from server_toys import HELLO, scripted, text_script

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOT = {"not": {}}  # which no grammar enforces
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def server():
    with scripted(text_script('{"a": 1}')) as found:
        yield found


def asked(server, **fields):
    """What the engine was asked for."""
    reply = server.chat(**fields)
    assert reply.status == 200, reply.body
    return server.core.inner.seen[-1].structured_outputs


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "json",
            SCHEMA,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            "json",
            SCHEMA,
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
        ({"structured_outputs": {"json": True}}, "json", True),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", True),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_regex": "[0-9]{3}"}, "regex", "[0-9]{3}"),
        ({"guided_choice": ["x"]}, "choice", ("x",)),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"guided_json_object": True}, "json_object", True),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, "regex", "a"),
    ],
)
def test_every_way_to_ask(server, fields, kind, value):
    """Case B128: what is accepted reaches the engine, whichever field it came in, in both endpoints."""
    found = asked(server, **fields)
    assert found.kind == kind
    given = getattr(found, kind)
    assert (json.loads(given) if kind == "json" else given) == value
    assert server.complete(**fields).status == 200
    assert server.core.inner.seen[-1].structured_outputs == found
    assert server.chat(stream=True, **fields).events


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None, "guided_json": None, "guided_json_object": False},
    ],
)
def test_no_constraint(server, fields):
    assert asked(server, **fields) is None


def test_options_of_json(server):
    found = asked(
        server,
        structured_outputs={
            "json": SCHEMA,
            "disable_any_whitespace": True,
            "disable_additional_properties": True,
        },
    )
    assert found.disable_any_whitespace
    assert found.disable_additional_properties
    assert (
        asked(server, structured_outputs={"json": SCHEMA, "whitespace_pattern": " ?"}).whitespace_pattern
        == " ?"
    )
    assert asked(server, guided_json=SCHEMA, guided_whitespace_pattern=" ?").whitespace_pattern == " ?"


WRONG = [
    *({"regex": regex} for regex in ("[", "(", "*a", "(?<=a)b", "\\1(a)")),
    *(
        {"json": schema}
        for schema in ("{", "5", "null", "[]", {"type": "nope"}, {"type": 5}, {"$ref": "#/none"})
    ),
    *({"json": schema} for schema in ({"$ref": "http://x"}, {"type": "object", "properties": []})),
    *(
        {"grammar": grammar}
        for grammar in ("", 'x ::= "a"', "root ::= root", "root ::= nobody", "root ::= (")
    ),
    *({"choice": choice} for choice in ([], [""], ["a", ""])),
    {"structural_tag": "{}"},
    {"structural_tag": {"nonsense": 1}},
    {"regex": "a", "choice": ["b"]},
    {"regex": "(" * 60_000},
    {},
    {"json_object": False},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: json.dumps(wrong)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused(server, wrong, stream):
    """Case B119: before the headers, streamed or not, by the compiler's words; the server goes on."""
    reply = server.chat(structured_outputs=wrong, stream=stream)
    assert reply.status == 400
    assert reply.error["param"] == "structured_outputs"
    assert len(reply.body) < 2000
    assert server.get("/health").status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"response_format": {"type": "nonsense"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_..."),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_json": {"type": "nope"}}, "guided_json"),
    ],
)
def test_other_fields_that_are_refused(server, fields, param):
    """Case B128."""
    for reply in (server.chat(**fields), server.complete(**fields)):
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.error["message"].startswith(param) or param in ("structured_outputs", "guided_...")


@pytest.mark.parametrize("template", [PLAIN, PLAIN + "{{ '<think></think>' if false }}"])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NOT}}}, "response_format"),
        ({"guided_json": NOT}, "guided_json"),
        ({"structured_outputs": {"json": NOT}}, "structured_outputs: json"),
    ],
)
def test_a_refusal_has_the_name_that_was_sent(template, fields, name):
    """Also of a model that reasons before it says what is bound."""
    with scripted(text_script("x"), template=template) as server:
        error = server.chat(**fields).error
    assert error["param"] == name.partition(":")[0]
    assert error["message"].startswith(f"{name}: these keywords are not supported")


def test_lenient_is_told(server):
    """What is not enforced is in the answer, whole and streamed; without `lenient` it is refused."""
    schema = {"type": "array", "uniqueItems": True}
    refused = server.chat(structured_outputs={"json": schema})
    assert "uniqueItems" in refused.error["message"]
    fields = {"structured_outputs": {"json": schema, "lenient": True}}
    for reply in (server.chat(**fields), server.complete(**fields)):
        [warning] = reply.json["warnings"]
        assert "uniqueItems" in warning
    for events in (server.chat(stream=True, **fields).events, server.complete(stream=True, **fields).events):
        [warnings] = [event["warnings"] for event in events if "warnings" in event]
        assert "uniqueItems" in warnings[0]
    assert "warnings" not in server.chat(messages=HELLO).json
