"""What was asked for, in the notation of the library that enforces it (llguidance): text to text.

Rules.
1. Nothing is weakened on the way. What this notation cannot say is refused by name (`GrammarError`), and so
   are words that would change the library's own settings from inside a schema (`x-guidance`).
2. Between the parts of a JSON text stands nothing, a space, or a line end and some indentation: a weak model
   that may write spaces for ever does (case B125).
3. Nothing is compiled here, so it is quick: the cost is that of reading the text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from mainspring.base.params import StructuredOutputsParams
from mainspring.grammar.schema import OPTIONS_KEY, prepare_schema
from mainspring.grammar.structural_tag import structural_tag_to_lark
from mainspring.grammar.words import GrammarError, as_json, one_line, read_json

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_BYTES = 1 << 20  # of a schema, a pattern, a grammar, or all choices
MAX_EBNF_BYTES = 1 << 16  # rewritten by Python code, which is slower than the library's
WHITESPACE = r" |\n {0,16}|\n\t{0,8}"
ANY_OBJECT = '{"type": "object"}'

_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def translate(asked: StructuredOutputsParams) -> str:
    """The library's notation of `asked`. Raises `GrammarError`."""
    kind = asked.kind
    value = getattr(asked, kind)
    _check_size(kind, value)
    match kind:
        case "json":
            schema = read_json(kind, value)
            enforced = prepare_schema(kind, schema, closed=asked.disable_additional_properties)
            text = value if enforced == schema else as_json(kind, enforced)  # as it was written
            return LLMatcher.grammar_from_json_schema(text, overrides=json_options(asked))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=json_options(asked))
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            # Lark's literals are JSON's with everything but ASCII escaped.
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, dict.fromkeys(value)))}")
        case "grammar":
            return LLMatcher.grammar_from_lark(_as_lark(value))
        case "structural_tag":
            tag, closed = read_json(kind, value), asked.disable_additional_properties
            return LLMatcher.grammar_from_lark(structural_tag_to_lark(tag, json_options(asked), closed))
        case other:
            raise AssertionError(f"no notation for {other}")


def json_options(asked: StructuredOutputsParams) -> JsonCompileOptions:
    """The library's settings for a JSON schema."""
    options: JsonCompileOptions = {
        "lenient": asked.lenient,
        "coerce_one_of": False,
        # Without \uXXXX: a name spelled so would pass as another than it is.
        "json_allowed_escapes": '"\\bfnrt',
    }
    if asked.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = asked.whitespace_pattern or WHITESPACE
    return options


def _as_lark(text: str) -> str:
    # A schema inside a grammar could have the keyword too, and spell it with \uXXXX.
    if OPTIONS_KEY in re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text):
        raise GrammarError(f"grammar has the keyword {OPTIONS_KEY}, which is not a schema's to set")
    if _EBNF_RULE.search(text) is None:
        return text
    if len(text) > MAX_EBNF_BYTES:
        raise GrammarError(f"grammar in EBNF has {len(text)} characters; at most {MAX_EBNF_BYTES}")
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError("grammar is nested too deeply") from None
    except Exception as error:  # it has a type of its own for some mistakes, and none for others
        raise GrammarError(f"grammar: {one_line(str(error))}") from None


def _check_size(kind: str, value: object) -> None:
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    if (size := sum(len(text.encode()) for text in texts)) > MAX_TEXT_BYTES:
        raise GrammarError(f"{kind} has {size} bytes; at most {MAX_TEXT_BYTES}")
