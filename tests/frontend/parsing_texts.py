"""Answers of every kind, for the parsers of answers: made by a seed, a few hundred characters each.

`texts(name, count)` gives texts in a format, of the kinds below in turn, with what is certain of them.

    calls      valid calls, in every spelling that the format has, between prose or alone
    broken     the same with a few characters lost, added or changed
    cut        the same, ended anywhere
    prose      text with pieces of tags, brackets and quotes
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from mainspring.frontend.parsing.formats import (
    REASONING_FORMATS,
    REQUIRED,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    named,
)
from mainspring.frontend.parsing.parser import AnswerParser

QWEN3 = REASONING_FORMATS["qwen3"]
FORMATS: dict[str, ToolFormat | None] = {
    **{name: TOOL_FORMATS[name] for name in ("hermes", "llama3_json", "mistral", "pythonic")},
    "required": REQUIRED,
    "named": named("tool"),
    "qwen3": None,  # reasoning, and no tools
}
KINDS = ("calls", "broken", "cut", "prose")

WORDS = [
    *("Let me look.", "Zürich", "北京", "😀", "👩\u200d👩\u200d👧", "e\u0301", "\u00a0", "\u2028", "a < b"),
    *(
        "<tool",
        "<tool_call",
        "</tool_call>",
        "<|python",
        "[TOOL_",
        "<think>",
        "</think",
        "</think>",
        "<",
        "</",
    ),
    *(
        "[1, 2]",
        '{"a": 1}',
        "f(x)",
        "f(x=1)",
        '"',
        "'",
        "\\",
        "{",
        "[",
        "]",
        "}",
        "(",
        ")",
        "x}",
        ";",
        "null",
    ),
    *("\n", "\n\n", "  ", "\t"),
]
STRINGS = [
    *('x}"', "it's", '"', "\\", "\n", "\t", "Zürich", "北京", "😀", "</tool_call>", "[TOOL_CALLS]", "{["),
    "",
]


class Text(NamedTuple):
    text: str
    calls: list[tuple[str, Any]] | None  # names and arguments, where they are certain
    reasoning: ReasoningFormat | None
    is_open: bool  # the prompt has begun the reasoning

    def parser(self, name: str) -> AnswerParser:
        return AnswerParser(FORMATS[name], self.reasoning, begins_in_reasoning=self.is_open)


def texts(name: str, count: int, seed: int = 0) -> list[Text]:
    dice = random.Random(f"{name} {seed}")
    return [_text(name, KINDS[i % len(KINDS)], dice) for i in range(count)]


def _text(name: str, kind: str, dice: random.Random) -> Text:
    if kind == "prose":
        body, calls = prose(dice), None
    else:
        body, calls = _answer(name, dice)
    reasoning = QWEN3 if name == "qwen3" or dice.random() < 0.3 else None
    is_open = reasoning is not None and dice.random() < 0.5
    if reasoning is not None:
        thought = dice.choice(["", "\n", "hm", "\nhm <tool_call>\n", "a </thin b"])
        begin, space = "" if is_open else reasoning.begin, dice.choice(["", "\n\n"])
        body = f"{begin}{thought}{reasoning.end}{space}{body}"
    if kind == "broken":
        body, calls = _broken(body, dice), None
    if kind == "cut":
        body, calls = body[: dice.randrange(len(body) + 1)], None
    return Text(body, calls, reasoning, is_open)


def prose(dice: random.Random, most: int = 12) -> str:
    return "".join(dice.choice(WORDS) + dice.choice(["", " "]) for _ in range(dice.randrange(most)))


def _broken(text: str, dice: random.Random) -> str:
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(text) + 1)
        lost = dice.choice([0, 1, 1, 5])
        added = dice.choice(["", "", '"', "}", "{", ",", "<", "\\", "]", "x", dice.choice(WORDS)])
        text = text[:at] + added + text[at + lost :]
    return text


def value(dice: random.Random, depth: int = 3) -> Any:
    match dice.randrange(8 if depth else 5):
        case 0:
            return dice.choice([0, -1, 12, 10**20, 1.5, -2e-07])
        case 1:
            return dice.choice([True, False, None])
        case 2 | 3 | 4:
            return "".join(dice.choice(STRINGS) for _ in range(dice.randrange(4)))
        case 5 | 6:
            return [value(dice, depth - 1) for _ in range(dice.randrange(4))]
        case _:
            return arguments(dice, depth - 1)


def arguments(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    names = dice.sample(["a", "city", "ñ", "x_1", "Länge"], dice.randrange(4))
    return {name: value(dice, depth) for name in names}


def _answer(name: str, dice: random.Random) -> tuple[str, list[tuple[str, Any]]]:
    num_calls = 1 if name == "named" else 0 if name == "qwen3" else dice.choice([1, 1, 2, 3])
    calls = [(dice.choice(["f", "get_weather", "a.b"]), arguments(dice)) for _ in range(num_calls)]
    if name == "named":
        calls = [("tool", calls[0][1])]
    return _WRITERS[name](calls, dice), calls


def _json(value: Any, dice: random.Random) -> str:
    separators = dice.choice([(", ", ": "), (",", ":"), (" ,\n", " : ")])
    return json.dumps(value, ensure_ascii=dice.random() < 0.3, separators=separators)


def _object(call: tuple[str, Any], dice: random.Random, key: str = "arguments") -> str:
    parts = [f'"name": {json.dumps(call[0])}', f'"{key}": {_json(call[1], dice)}']
    if dice.random() < 0.2:
        parts.reverse()
    if dice.random() < 0.2:
        parts.insert(dice.randrange(3), f'"id": {_json(value(dice), dice)}')
    space = dice.choice(["", "", "\n  "])
    return f"{{{space}{f', {space}'.join(parts)}{space}}}"


def _hermes(calls: list[tuple[str, Any]], dice: random.Random) -> str:
    space = dice.choice(["", "\n"])
    between = dice.choice(["", "\n", " and then "])
    said = between.join(f"<tool_call>{space}{_object(c, dice)}{space}</tool_call>" for c in calls)
    return _around(said, dice)


def _llama3(calls: list[tuple[str, Any]], dice: random.Random) -> str:
    said = dice.choice(["; ", ";", " ;\n"]).join(_object(c, dice, "parameters") for c in calls)
    return said if dice.random() < 0.5 else f"{dice.choice(['', 'Well. '])}<|python_tag|>{said}"


def _mistral(calls: list[tuple[str, Any]], dice: random.Random) -> str:
    if dice.random() < 0.5:
        said = f"[TOOL_CALLS]{dice.choice(['', ' '])}[{', '.join(_object(c, dice) for c in calls)}]"
    else:
        args = dice.choice(["", "[ARGS]"])
        said = "".join(f"[TOOL_CALLS]{name}{args}{_json(value, dice)}" for name, value in calls)
    return _around(said, dice)


def _pythonic(calls: list[tuple[str, Any]], dice: random.Random) -> str:
    space, end = dice.choice([("", ""), (" ", " "), ("\n", ",")])
    said = [
        f"{name}({space}{', '.join(f'{key}={v!r}' for key, v in given.items())}{end if given else space})"
        for name, given in calls
    ]
    return f"[{', '.join(said)}]"


def _required(calls: list[tuple[str, Any]], dice: random.Random) -> str:
    return f"[{', '.join(_object(c, dice, 'parameters') for c in calls)}]"


def _around(said: str, dice: random.Random) -> str:
    """Some prose without tags before and after."""
    before, after = dice.choice(["", "Let me see. ", "a < b\n"]), dice.choice(["", "\n", " Done."])
    return f"{before}{said}{after}"


_WRITERS: dict[str, Callable[[list[tuple[str, Any]], random.Random], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "pythonic": _pythonic,
    "required": _required,
    "named": lambda calls, dice: _json(calls[0][1], dice),
    "qwen3": lambda calls, dice: prose(dice),
}
