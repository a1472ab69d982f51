"""The tools of a chat, and which of them its answer must call: what a caller gives, judged and named.

    use = judged_tools(tools, tool_choice, parallel_tool_calls)

`tools` are OpenAI's: {"type": "function", "function": {"name", "description", "parameters", "strict"}}, and
go to the chat template as they are. A choice is none, auto (the model decides), required (one or more calls)
or {"type": "function", "function": {"name": ...}} (a call of that one). Some tools alone may be allowed
({"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}): then there are
no others, and the model is not told of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mainspring.base.errors import RequestError
from mainspring.frontend.parsing.constraints import tools_of

CHOICES = ("none", "auto", "required")
MAX_TOOLS = 1024


class ToolUse(NamedTuple):
    """Judged. Without tools the choice is none."""

    tools: tuple[dict[str, Any], ...] = ()  # as they were given; those that are allowed
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None  # of the tool that must be called
    parallel: bool = True  # several calls in one answer

    @property
    def is_forced(self) -> bool:
        """Whether the answer is made of calls and nothing else."""
        return self.choice in ("required", "named")

    @property
    def tool_choice(self) -> str | dict[str, Any]:
        """As OpenAI writes it."""
        return self.choice if self.name is None else {"type": "function", "function": {"name": self.name}}


def judged_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = None,
) -> ToolUse:
    """Raises `RequestError` for what is no tool or no choice, for a choice without tools, and for one of a
    tool that is not there."""
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise RequestError(f"tools must be a list, got a {type(tools).__name__}", "tools")
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools; give some, or leave it out", "tool_choice")
        return ToolUse()
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} tools; at most {MAX_TOOLS}", "tools")
    names = [tool.name for tool in tools_of(tools)]
    match tool_choice:
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": allowed},
        }:
            tools, tool_choice = _allowed(dict(zip(names, tools, strict=True)), allowed), mode
    choice, name = _judged_choice("auto" if tool_choice is None else tool_choice, names)
    return ToolUse(tuple(map(dict, tools)), choice, name, parallel is not False)


def _allowed(tools: Mapping[str, Mapping[str, Any]], allowed: object) -> list[Mapping[str, Any]]:
    """Of `tools`, by name."""
    found = {}
    for one in allowed if isinstance(allowed, Sequence) else ():
        match one:
            case {"type": "function", "function": {"name": str(name)}} if name in tools:
                found[name] = tools[name]
            case _:
                raise RequestError(
                    f"tool_choice allows {_shown(one)}, which is none of the tools' names", "tool_choice"
                )
    if not found:
        raise RequestError("tool_choice allows no tool; name at least one", "tool_choice")
    return list(found.values())


def _judged_choice(
    choice: str | Mapping[str, Any], names: Sequence[str]
) -> tuple[Literal["none", "auto", "required", "named"], str | None]:
    match choice:
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}} | {"function": {"name": str(name)}}:
            if name not in names:
                raise RequestError(
                    f"tool_choice names {_shown(name)}, and no tool is called so", "tool_choice"
                )
            return "named", name
    raise RequestError(
        f"tool_choice must be {', '.join(CHOICES)}, {{'type': 'function', 'function': {{'name': ...}}}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}, "
        f"got {_shown(choice)}",
        "tool_choice",
    )


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
