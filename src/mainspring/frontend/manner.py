"""How a model writes its answers: in which format it calls tools, and between which tags it reasons.

The names are vLLM's names of parsers. `auto` reads the chat template, which writes calls and reasoning of
earlier answers in the model's own way; where it shows nothing that is known, answers are plain text.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import NamedTuple

from mainspring.frontend.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)

AUTO, NONE = "auto", "none"
# Words of a template -> the format; all of the first must be there, and none of the second.
_SIGNS = (
    (("<tool_call>",), ("<function=", "<arg_key>"), "hermes"),
    (("[TOOL_CALLS]",), (), "mistral"),
    (("ipython", '"parameters": '), (), "llama3_json"),
)


class Manner(NamedTuple):
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None


@lru_cache(maxsize=32)  # asked for with every chat
def manner_of(template: str, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> Manner:
    """Raises `ConfigError` for a name that is not known."""
    return Manner(_tools(template, tool_call_parser), _reasoning(template, reasoning_parser))


def _tools(template: str, name: str) -> ToolFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        return tool_format(name)
    for signs, counter_signs, found in _SIGNS:
        if all(sign in template for sign in signs) and not any(sign in template for sign in counter_signs):
            return TOOL_FORMATS[found]
    return None


def _reasoning(template: str, name: str) -> ReasoningFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        return reasoning_format(name)
    return next((known for known in REASONING_FORMATS.values() if known.end in template), None)


def needs_special_tokens(manner: Manner, specials: Container[str]) -> bool:
    """Whether a tag is one of the special tokens, which texts leave out unless they are asked for."""
    tool, reasoning = manner
    tags = [] if tool is None else [tool.begin, tool.end]
    tags += [] if reasoning is None else [reasoning.begin, reasoning.end]
    return any(tag and tag in specials for tag in tags)
