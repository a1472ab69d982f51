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
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from mainspring.base.errors import RequestError
from mainspring.base.params import StructuredOutputsParams
from mainspring.grammar.schema import OPTIONS_KEY, prepare_schema
from mainspring.grammar.structural_tag import structural_tag_to_lark
from mainspring.grammar.words import GrammarError, as_json, one_line, read_json

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_BYTES = 1 << 20  # of a schema, a pattern, a grammar, or all choices
MAX_EBNF_BYTES = 1 << 16  # rewritten by Python code, which is slower than the library's
WHITESPACE = r" |\n {0,8}|\n\t{0,4}"
# Else, where only one text can follow, a mask is of the one token that the library would take: that costs
# time in proportion to all of that text, at every step, and the model knows best how it spells it.
OPTIONS = '%llguidance {"no_forcing": true}'

_NO_OPTIONS = re.compile(r"^\s*%llguidance\s*\{\s*\}", re.MULTILINE)
_SCHEMA_RULE = re.compile(r"%json\s*(?=\{)")
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def translate(asked: StructuredOutputsParams) -> str:
    """`asked` as a grammar in Lark's notation. Raises `GrammarError`."""
    kind = asked.kind
    value = getattr(asked, kind)
    _check_size(kind, value)
    return f"{_lark(kind, value, asked)}\n{OPTIONS}\n"


def _lark(kind: str, value: Any, asked: StructuredOutputsParams) -> str:
    match kind:
        case "json":
            return _json_rule(
                prepare_schema(kind, read_json(kind, value), closed=asked.disable_additional_properties),
                asked,
            )
        case "json_object":
            return _json_rule({"type": "object"}, asked)
        case "regex":
            as_lark: str = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
            return as_lark
        case "choice":
            # Lark's literals are JSON's with everything but ASCII escaped.
            return f"start: {' | '.join(map(json.dumps, dict.fromkeys(value)))}"
        case "grammar":
            return _as_lark(value)
        case "structural_tag":
            return structural_tag_to_lark(
                read_json(kind, value),
                json_options(asked),
                asked.disable_additional_properties,
                lambda fields: _nested(fields, asked),
            )
        case other:
            raise AssertionError(f"no notation for {other}")


def _nested(fields: dict[str, Any], outer: StructuredOutputsParams) -> str:
    """Another constraint inside a structural tag; how JSON is written is for the outer one to say."""
    try:
        asked = StructuredOutputsParams(**fields)
    except (TypeError, RequestError) as error:
        raise GrammarError(f"structural_tag: {error}") from None
    if asked.kind == "structural_tag" and "limit" in read_json("structural_tag", str(asked.structural_tag)):
        raise GrammarError("structural_tag: limit is for the outermost tag")
    return _lark(asked.kind, getattr(asked, asked.kind), outer)


def _json_rule(schema: dict[str, Any], asked: StructuredOutputsParams) -> str:
    return f"start: %json {as_json('json', schema | {OPTIONS_KEY: dict(json_options(asked))})}"


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
        text = _NO_OPTIONS.sub("", text)
        if "%llguidance" in text:
            raise GrammarError("grammar has options (%llguidance), which are not a grammar's to set")
        return _with_prepared_schemas(text)
    if len(text) > MAX_EBNF_BYTES:
        raise GrammarError(f"grammar in EBNF has {len(text)} characters; at most {MAX_EBNF_BYTES}")
    try:
        return _NO_OPTIONS.sub("", gbnf_to_lark(text))
    except RecursionError:
        raise GrammarError("grammar is nested too deeply") from None
    except Exception as error:  # it has a type of its own for some mistakes, and none for others
        raise GrammarError(f"grammar: {one_line(str(error))}") from None


def _with_prepared_schemas(text: str) -> str:
    """A grammar may have schemas in it."""
    parts, at = [], 0
    for match in _SCHEMA_RULE.finditer(text):
        if match.start() < at:
            continue  # words in a schema
        try:
            schema, end = json.JSONDecoder().raw_decode(text, match.end())
        except RecursionError:
            raise GrammarError("grammar is nested too deeply") from None
        except ValueError:
            continue  # words in a literal, or what the library will refuse
        prepared = prepare_schema("grammar", schema)
        if prepared != schema:  # it may be words in a literal, after all
            parts += [text[at : match.end()], as_json("grammar", prepared)]
            at = end
    return "".join([*parts, text[at:]])


def _check_size(kind: str, value: object) -> None:
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    if (size := sum(len(text.encode()) for text in texts)) > MAX_TEXT_BYTES:
        raise GrammarError(f"{kind} has {size} bytes; at most {MAX_TEXT_BYTES}")
