"""From tools, and what a client demands of them, to what the text must be and how it is then read.

Theory of operation. A call that is demanded is a text in a form of ours: for a named tool nothing but its
arguments, for "required" a list of {"name", "parameters"}. Where the model may choose ("auto"), the text is
free until a call of the model's own form begins; from there on it is held to the tools if one of them is
`strict`. The forms are those that `formats.py` reads, so what the grammar lets through is read as calls whose
arguments fit.

Rule 1. Every tool's schema is a rule of its own in one structural tag: references in it stay its own.
Rule 2. Arguments are an object, also where a schema does not say so; those of a tool without parameters
        are `{}`. A tool that lists its arguments, and says nothing of others, has no others: those that
        small models invent would be refused by whoever is called, though they fit the schema.
Rule 3. `strict` closes the objects within arguments too, as `grammar/schema.py` does. What is demanded fits
        its schema in any case.
Rule 4. What cannot be enforced is refused by tool and keyword, with `RequestError`.

`demanded` may compile a grammar, which takes milliseconds the first time: call it in a thread where others
wait. The verdict is remembered, so the same check on the way into the engine costs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.frontend.parsing.formats import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    REQUIRED,
    ToolFormat,
    named,
)
from mainspring.grammar.schema import prepare_schema
from mainspring.grammar.words import GrammarError, shown

Node = dict[str, Any]  # of a structural tag

NO_PARAMETERS: Node = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords beside which `properties` alone tell what a tool's arguments are called.
_LISTING = {"type", "properties", "required", "minProperties", "maxProperties", "$defs", "definitions"}
_LISTING |= {"title", "description", "examples", "default", "strict", "$schema", "$id", "$comment"}
_NAME = re.compile(r"[^\s\"'\\\x00-\x1f\x7f]{1,128}")


# What stands before the object of a call, and behind it, where a tag announces it.
_AROUND_CALL = {
    HERMES: (f"{HERMES.begin}\n", f"\n{HERMES.end}"),
    MISTRAL: (f"{MISTRAL.begin}[", "]"),
}
# Without a tag, calls are all that is said, or nothing of it: the first character decides. The tag is a
# special token, which cannot be said; the same text in other tokens is only text.
_NO_CALL = r"\s*([^{\s](.|\n)*)?"
_WITHOUT_TAG = replace(LLAMA3_JSON, begin="")


class Tool(NamedTuple):
    name: str
    schema: Node  # of its arguments, an object
    is_strict: bool


class Demand(NamedTuple):
    tool_format: ToolFormat | None  # how the answer is read; None: it has no calls
    structured_outputs: StructuredOutputsParams | None  # what the text, after the reasoning, must be


def tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """From chat completions' `{"type": "function", "function": {...}}`. Raises `RequestError`."""
    if not tools:
        raise RequestError("tools is empty; leave it out, or name at least one tool", "tools")
    found = tuple(_tool(number, tool) for number, tool in enumerate(tools))
    names: set[str] = set()
    for number, (name, *_) in enumerate(found):
        if name in names:
            raise RequestError(
                f"tools[{number}]: there is a tool {name!r} already; each needs a name of its own", "tools"
            )
        names.add(name)
    return found


def demanded(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    parallel: bool,
    auto_format: ToolFormat | None,
    specials: Container[str] = (),
) -> Demand:
    """`parallel`: more than one call is welcome. `auto_format` is the model's own. `specials`: texts of the
    model's special tokens, which no grammar can say yet. Raises `RequestError`."""
    known = tools_of(tools)
    asked = _forced(known, tool_choice, parallel)
    if asked is not None:
        name = _named(tool_choice)
        _check(asked, known)
        return Demand(REQUIRED if name is None else named(name), asked)
    if tool_choice == "none" or auto_format is None:
        return Demand(None, None)
    if not any(tool.is_strict for tool in known):
        return Demand(auto_format, None)
    demand = _strict(known, parallel, auto_format, specials)
    assert demand.structured_outputs is not None
    _check(demand.structured_outputs, known)
    return demand


def forced(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], parallel: bool
) -> StructuredOutputsParams | None:
    """What the text must be where a call is demanded; None where none is. Raises `RequestError`."""
    known = tools_of(tools)
    asked = _forced(known, tool_choice, parallel)
    if asked is not None:
        _check(asked, known)
    return asked


# -- tools ---------------------------------------------------------------------------------------------------


def _tool(number: int, tool: Mapping[str, Any]) -> Tool:
    where = f"tools[{number}]"
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise RequestError(f'{where} must have "type": "function" and an object "function"', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}: name must be 1 to 128 characters without spaces and quotes, got {shown(name)}", "tools"
        )
    where = f"{where} {name!r}"
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise RequestError(f"{where}: strict must be true or false, got {shown(strict)}", "tools")
    schema = _schema(where, function.get("parameters"))
    if strict:
        try:
            schema = prepare_schema("parameters", schema, closed=True)
        except GrammarError as error:
            raise RequestError(f"{where}: {error}", "tools") from None
    return Tool(name, schema, bool(strict))


def _schema(where: str, parameters: Any) -> Node:
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}: parameters must be a JSON schema, got {shown(parameters)}", "tools")
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise RequestError(
            f'{where}: parameters must describe an object, but type is {shown(kinds)}; set it to "object"',
            "tools",
        )
    closing = {"additionalProperties": False} if _lists_all(parameters) else {}
    return {**parameters, **closing, "type": "object"}


def _lists_all(parameters: Mapping[str, Any]) -> bool:
    """Whether something fits that has no other arguments than those listed, and nothing asks for others."""
    properties, required = parameters.get("properties"), parameters.get("required", [])
    if (
        not isinstance(properties, Mapping)
        or not isinstance(required, list)
        or not parameters.keys() <= _LISTING
    ):
        return False
    return all(name in properties for name in required if isinstance(name, str))


def _named(tool_choice: str | Mapping[str, Any]) -> str | None:
    """The tool that is demanded by name. Chat completions and responses spell it differently."""
    if isinstance(tool_choice, str):
        return None
    name = tool_choice.get("function", tool_choice) if isinstance(tool_choice, Mapping) else None
    name = name.get("name") if isinstance(name, Mapping) and tool_choice.get("type") == "function" else None
    if not isinstance(name, str):
        raise RequestError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...'
            f"}}}}, got {shown(tool_choice)}",
            "tool_choice",
        )
    return name


# -- what the text must be -----------------------------------------------------------------------------------


def _forced(
    tools: Sequence[Tool], tool_choice: str | Mapping[str, Any], parallel: bool
) -> StructuredOutputsParams | None:
    if tool_choice in ("none", "auto"):
        return None
    if tool_choice == "required":
        return _as_tag(_list_of_calls(tools, parallel))
    name = _named(tool_choice)
    if name is None:
        raise RequestError(
            f'tool_choice must be "none", "auto" or "required", or name a tool; got {shown(tool_choice)}',
            "tool_choice",
        )
    for tool in tools:
        if tool.name == name:
            return StructuredOutputsParams(json=tool.schema)
    raise RequestError(
        f"tool_choice names {shown(name)}, but the tools are {', '.join(tool.name for tool in tools)}",
        "tool_choice",
    )


def _list_of_calls(tools: Sequence[Tool], parallel: bool) -> Node:
    calls = [_call(tool, "", "parameters", "") for tool in tools]
    return {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "["},
            _separated(calls, ", ", parallel),
            {"type": "const_string", "value": "]"},
        ],
    }


def _strict(
    tools: Sequence[Tool], parallel: bool, auto_format: ToolFormat, specials: Container[str]
) -> Demand:
    """Free text, in which calls fit. Tools that are not strict may be given any object."""
    held = [tool if tool.is_strict else tool._replace(schema={"type": "object"}) for tool in tools]
    if auto_format in _AROUND_CALL and auto_format.begin not in specials:
        begin, end = _AROUND_CALL[auto_format]
        free: Node = {
            "type": "triggered_tags",
            "triggers": [auto_format.begin],
            "tags": [_call(tool, begin, "arguments", end) for tool in held],
            "stop_after_first": not parallel,
        }
        return Demand(auto_format, _as_tag(free))
    if auto_format is LLAMA3_JSON:
        calls = _separated([_call(tool, "", "parameters", "") for tool in held], "; ", parallel)
        free = {"type": "or", "elements": [{"type": "regex", "pattern": _NO_CALL}, calls]}
        return Demand(_WITHOUT_TAG, _as_tag(free))
    strict = next(tool for tool in tools if tool.is_strict)
    raise RequestError(
        f'tool {strict.name!r}: strict cannot be enforced with tool_choice "auto" where calls have the form '
        f'{auto_format.name}; set tool_choice to "required", or leave out strict',
        "tools",
    )


def _call(tool: Tool, begin: str, arguments: str, end: str) -> Node:
    return {
        "type": "tag",
        "begin": f'{begin}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": ',
        "content": {"type": "json_schema", "json_schema": tool.schema},
        "end": f"}}{end}",
    }


def _separated(calls: list[Node], separator: str, parallel: bool) -> Node:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _as_tag(node: Node) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": node})


def _check(asked: StructuredOutputsParams, tools: Sequence[Tool]) -> None:
    """Raises `RequestError` with the tool that is at fault."""
    from mainspring.grammar.check import check_structured_outputs  # the library is large

    try:
        check_structured_outputs(asked)
    except RequestError as whole:
        for number, tool in enumerate(tools):
            try:
                check_structured_outputs(StructuredOutputsParams(json=tool.schema))
            except RequestError as error:
                reason = str(error).removeprefix("structured_outputs: ").removeprefix("json: ")
                raise RequestError(f"tools[{number}] {tool.name!r}: parameters: {reason}", "tools") from None
        raise RequestError(f"tools: {str(whole).removeprefix('structured_outputs: ')}", "tools") from None
