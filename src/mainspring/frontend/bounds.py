"""What an answer must be, where a part of it is free or may be something else: structural tags around what is
asked for (see `grammar/structural_tag.py`)."""

from __future__ import annotations

import json
from typing import Any

from mainspring.base.errors import RequestError
from mainspring.base.params import STRUCTURE_KINDS, StructuredOutputsParams
from mainspring.frontend.parsing.constraints import tools_of
from mainspring.frontend.parsing.formats import HERMES, ReasoningFormat, ToolFormat
from mainspring.frontend.tools import ToolUse

# Models were trained to write some between their reasoning and their answer; parsers take it away.
_SPACE = {"type": "regex", "pattern": r"[ \n]{0,4}"}
_NOTHING = {"type": "regex", "pattern": "()"}
_OPTIONS = [name for name in StructuredOutputsParams.__struct_fields__ if name not in STRUCTURE_KINDS]


def after_reasoning(
    wanted: StructuredOutputsParams | None,
    form: ReasoningFormat,
    *,
    is_open: bool,
    max_tokens: int | None = None,
) -> StructuredOutputsParams | None:
    """`wanted`, of a text that begins with free reasoning: what binds the answer does not bind that.

    `is_open`: the prompt has begun it, so it must be ended; else it may be left out. Ended it is after
    `max_tokens` at the latest. None: nothing is bound, and nothing limited.
    """
    if wanted is None and max_tokens is None:
        return None
    begin = "" if is_open else form.begin
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": form.end}
    begins: dict[str, Any] = {"type": "sequence", "elements": [thought, _SPACE]}
    if not is_open:
        begins = {"type": "or", "elements": [begins, _NOTHING]}
    answer = {"type": "any_text"} if wanted is None else _node(wanted)
    sequence = {"type": "sequence", "elements": [begins, answer]}
    if max_tokens is None:
        return _tag(sequence, wanted)
    return _tag(sequence, wanted, limit={"begin": begin, "end": form.end, "max_tokens": max_tokens})


def calls_or(use: ToolUse, form: ToolFormat, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Text that fits `wanted`, or calls in the model's own form and nothing else: an agent whose answer has a
    schema must be able to call before it answers. Arguments fit the schemas of tools that are strict.

    Raises `RequestError` for a form that cannot be bound.
    """
    if form is not HERMES:
        raise RequestError(
            f"what an answer must be cannot be said beside tools whose calls are of the form {form.name}; "
            'set tool_choice to "required" or "none", or leave one of them out',
            "tool_choice",
        )
    calls = [
        {
            "type": "tag",
            "begin": f'{form.begin}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": tool.schema if tool.is_strict else {"type": "object"},
            },
            "end": f"}}\n{form.end}",
        }
        for tool in tools_of(use.tools)
    ]
    several = {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not use.parallel,
    }
    return _tag({"type": "or", "elements": [several, _node(wanted)]}, wanted)


def _node(wanted: StructuredOutputsParams) -> dict[str, Any]:
    return {"type": "structured_outputs", wanted.kind: getattr(wanted, wanted.kind)}


def _tag(
    node: dict[str, Any], wanted: StructuredOutputsParams | None, **more: Any
) -> StructuredOutputsParams:
    """With what was asked of the form of JSON."""
    options = {} if wanted is None else {name: getattr(wanted, name) for name in _OPTIONS}
    tag = {"type": "structural_tag", "format": node, **more}
    return StructuredOutputsParams(structural_tag=tag, **options)
