"""What the files of this room share: the error, and how schemas and messages are read."""

from __future__ import annotations

import json
import re
from typing import Any

OPTIONS_KEY = "x-guidance"  # in a schema: the library's own settings, strictness among them
MAX_MESSAGE_CHARS = 300

# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
_SCHEMA_KEYS = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("contains", "propertyNames", "not", "if", "then", "else"),
)
_SCHEMA_LIST_KEYS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


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


def check_schema(name: str, schema: Any, *, closed: bool = False) -> dict[str, Any]:
    """The schema as it is to be enforced; `closed`: objects that name properties, and say nothing of others,
    have no others. A schema may be True: everything fits it. Raises `GrammarError`."""
    if schema is False:
        raise GrammarError(f"{name} is the schema False, which nothing fits")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"{name} must be a JSON schema, which is an object; got {shown(schema)}")
    if OPTIONS_KEY in schema:
        raise GrammarError(f"{name} has the keyword {OPTIONS_KEY}, which is not a schema's to set")
    try:
        return _closed(schema) if closed else schema
    except RecursionError:
        raise GrammarError(f"{name} is nested too deeply") from None


def refuse_options_key(name: str, grammar: str) -> None:
    r"""A schema inside a grammar could have the keyword too, and spell it with \uXXXX."""
    if OPTIONS_KEY in re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), grammar):
        raise GrammarError(f"{name} has the keyword {OPTIONS_KEY}, which is not a schema's to set")


def one_line(text: str) -> str:
    """The library quotes whole grammars, over many lines."""
    return _cut(" ".join(text.split()), MAX_MESSAGE_CHARS)


def shown(value: object) -> str:
    return _cut(" ".join(repr(value).split()), 60)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in _SCHEMA_KEYS:
        if key in copy:
            copy[key] = _closed(copy[key])
    for key in _SCHEMA_LIST_KEYS:
        if isinstance(copy.get(key), list):
            copy[key] = [_closed(part) for part in copy[key]]
    for key in _SCHEMA_MAP_KEYS:
        if isinstance(copy.get(key), dict):
            copy[key] = {name: _closed(part) for name, part in copy[key].items()}
    if "properties" in copy and not copy.keys() & {"additionalProperties", "patternProperties"}:
        copy["additionalProperties"] = False
    return copy
