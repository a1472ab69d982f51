"""What the files of this room share: the error, and how schemas and messages are read."""

from __future__ import annotations

import json
from typing import Any

MAX_MESSAGE_CHARS = 300


class GrammarError(ValueError):
    """This cannot be enforced, or could not be compiled. One line, which names the part at fault."""


def read_json(name: str, text: str) -> Any:
    """Raises `GrammarError` for what is not JSON."""

    def refuse_constant(constant: str) -> None:
        raise GrammarError(f"{name} has {constant}, which is not JSON")

    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise GrammarError(f"{name} is nested too deeply") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(f"{name} is not JSON: {error}") from None


def as_json(name: str, value: Any) -> str:
    """Raises `GrammarError` for a number that was too large to be read."""
    try:
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise GrammarError(f"{name} is nested too deeply") from None
    except ValueError:
        raise GrammarError(f"{name} has a number that is too large") from None


def one_line(text: str) -> str:
    """The library quotes whole grammars, over many lines."""
    return _cut(" ".join(text.split()), MAX_MESSAGE_CHARS)


def shown(value: object) -> str:
    return _cut(" ".join(repr(value).split()), 60)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
