"""What the text must look like: flags for `StructuredOutputsParams`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.cli.dialect import Parser

# Flag -> field. A value that begins with a bracket or has several lines is the thing itself, else it names a
# file.
FILES = {"json_schema": "json", "grammar": "grammar", "structural_tag": "structural_tag"}
FLAGS = (*FILES, "regex", "choice", "json_object")


def add_structure_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what the text must look like (one of these)")
    rare = None if parser.show_all else argparse.SUPPRESS
    group.add_argument("--json-schema", metavar="JSON", help="JSON that fits this schema, or that file's")
    group.add_argument("--json-object", action="store_true", help=rare or "any JSON object")
    group.add_argument("--regex", metavar="PATTERN", help="the whole text matches it")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these; repeat it for each")
    group.add_argument("--grammar", metavar="FILE", help=rare or "what this EBNF or Lark grammar says")
    group.add_argument("--structural-tag", metavar="JSON", help=rare or "free text with structured parts")


def structure(given: argparse.Namespace) -> StructuredOutputsParams | None:
    """None where nothing was asked for. Raises `RequestError`."""
    asked = {name: getattr(given, name) for name in FLAGS if hasattr(given, name)}
    if not asked:
        return None
    if len(asked) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in asked)
        raise RequestError(f"{flags} contradict each other: give one of them")
    ((name, value),) = asked.items()
    if name in FILES:
        value = _text(name, value)
    return StructuredOutputsParams(**{FILES.get(name, name): value})


def _text(name: str, value: str) -> str:
    if value.lstrip().startswith(("{", "[")) or "\n" in value or "::=" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = (error.strerror or "") if isinstance(error, OSError) else "it is not UTF-8 text"
        flag = "--" + name.replace("_", "-")
        raise RequestError(f"{flag} {value!r} is neither the thing itself nor a file of it: {why}") from None
