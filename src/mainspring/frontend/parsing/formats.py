"""How models write calls and reasoning: descriptions, as data. `parser.py` reads by them.

A format of calls is a place where they may stand and a form that they have there.

    place   behind the tag `begin`, wherever it comes; or, `is_bare`, at the beginning of the answer
    form    `opening` call `separator` call ... `closing`, then the tag `end` if there is one; of several
            forms, the first character decides
    call    OBJECT      {"name": "f", "arguments": {...}}; keys in any order, others are passed over, and
                        "parameters" is as good as "arguments"
            NAMED       f{...} or f[ARGS]{...}
            PYTHON      f(x=1, y=['a', None]); becomes JSON as it comes
            ARGUMENTS   {...} alone: the name is known beforehand, and all of the answer is its arguments

Another format of these parts needs a line in `TOOL_FORMATS`, and no code. A name here is vLLM's name of the
parser that reads the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mainspring.base.errors import ConfigError


class Call(Enum):
    OBJECT = auto()
    NAMED = auto()
    PYTHON = auto()
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Form:
    call: Call
    opening: str = ""  # one character each, or none
    separator: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    name: str
    forms: tuple[Form, ...]
    begin: str = ""
    end: str = ""
    is_bare: bool = False
    called: str = ""  # by ARGUMENTS


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The first thing that an answer says, between two tags."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a template has written the first tag already. A template that forbids reasoning writes
        both."""
        return prompt.rstrip().endswith(self.begin)


_LIST_OF_OBJECTS = Form(Call.OBJECT, "[", ",", "]")

HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>", forms=(Form(Call.OBJECT),))
LLAMA3_JSON = ToolFormat(
    name="llama3_json",
    begin="<|python_tag|>",
    is_bare=True,
    forms=(Form(Call.OBJECT, separator=";"),),
)
MISTRAL = ToolFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    forms=(_LIST_OF_OBJECTS, Form(Call.OBJECT, separator=","), Form(Call.NAMED)),
)
PYTHONIC = ToolFormat(name="pythonic", is_bare=True, forms=(Form(Call.PYTHON, "[", ",", "]"),))

TOOL_FORMATS = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
}
REASONING_FORMATS = {name: ReasoningFormat(name) for name in ("deepseek_r1", "qwen3")}

# What is forced (see `constraints.py`), whatever the model's own format.
REQUIRED = ToolFormat(name="required", is_bare=True, forms=(_LIST_OF_OBJECTS,))


def named(called: str) -> ToolFormat:
    """The answer is nothing but arguments for the tool `called`."""
    return ToolFormat(name="named", is_bare=True, forms=(Form(Call.ARGUMENTS),), called=called)


def tool_format(name: str) -> ToolFormat:
    """Raises `ConfigError`."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"tool_call_parser {name!r} is not known; there are {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises `ConfigError`."""
    if name not in REASONING_FORMATS:
        raise ConfigError(f"reasoning_parser {name!r} is not known; there are {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]
