"""The one place that makes the library's objects: vocabularies and matchers, with limits.

The library is written in Rust. Making a matcher and filling a mask leave the interpreter's lock; making a
vocabulary holds it, so that is done once. Its own limits, counted in work and not in seconds, bound what any
grammar may cost, when it is made and at every step: nothing here can be interrupted, and nothing has to be.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mainspring.base.params import StructuredOutputsParams
from mainspring.grammar.translate import OPTIONS, translate
from mainspring.grammar.words import GrammarError, one_line

LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # 1 to 2 kB each
    verbose_errors=False,  # messages quote no more of a client's grammar than they must
)


NUM_BEGINNINGS = 64  # tokens that are tried

# How the library's messages begin, and the keyword they speak of without naming it.
_KEYWORDS = {
    "Resource ": "$ref or $schema",
    "Anchor ": "$ref",
    "Pointer ": "$ref",
    "Invalid URI reference ": "$ref",
    "circular references ": "$ref",
    "Unknown format: ": "format",
    "regex parse error": "pattern",
    "Failed to generate regex for ": "minimum, maximum, exclusiveMinimum and exclusiveMaximum",
    "Schema intersection ": "allOf",
    "schema must be ": "a schema inside it",
}


_QUOTE = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_PLACE = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema: |invalid regex .*?\(in regex\): )", re.DOTALL
)


class Made(NamedTuple):
    matcher: LLMatcher  # at its beginning
    warnings: tuple[str, ...]  # what is not enforced; only where `lenient` was set


class _Tokens:
    """A vocabulary as the library wants to read it."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        """Text to ids. It is asked for when the vocabulary is made, and else only where text is forced."""
        if text in (b"test", "test"):
            return []
        raise AssertionError("no grammar forces text here")


def make_tokenizer(
    tokens: Sequence[bytes], special_ids: Sequence[int], end_ids: Sequence[int], vocab_size: int
) -> LLTokenizer:
    """`tokens[id]` is what a token says. `end_ids` end a text, where the grammar allows; at least one.
    `vocab_size` may be larger than there are tokens: models have more rows."""
    padded = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]
    words = TokenizerWrapper(_Tokens(padded, [i for i in special_ids if i < vocab_size], end_ids[0]))
    return LLTokenizer(words, n_vocab=vocab_size, eos_token=list(end_ids), slices=LLTokenizer.json_slices())


def make_matcher(tokenizer: LLTokenizer, asked: StructuredOutputsParams) -> Made:
    """Raises `GrammarError` for what cannot be enforced, or fits no text at all."""
    _check_whitespace(tokenizer, asked)
    matcher = LLMatcher(tokenizer, translate(asked), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(f"{asked.kind}: {_worded(matcher.get_error())}")
    warnings = tuple(map(_worded, matcher.get_grammar_warnings()))
    if warnings and not asked.lenient:
        raise GrammarError(f"{asked.kind}: {'; '.join(warnings)}")
    _try_beginnings(matcher, asked)
    return Made(matcher, warnings)


def _try_beginnings(matcher: LLMatcher, asked: StructuredOutputsParams) -> None:
    """The first mask, and one token: what is too complex is often so from the first brace on. It also means
    that the first step of every request finds this done."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        too_complex = f"it is too complex: {one_line(matcher.get_error())}"
        raise GrammarError(f"{asked.kind}: {'no text fits it' if _is_empty(matcher) else too_complex}")
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    for token_id in allowed[:NUM_BEGINNINGS].tolist():
        beginning = matcher.deep_copy()
        if not beginning.consume_token(token_id):
            raise GrammarError(f"{asked.kind}: it is too complex: {one_line(beginning.get_error())}")


def _check_whitespace(tokenizer: LLTokenizer, asked: StructuredOutputsParams) -> None:
    """A pattern of a caller's may match nothing but JSON's whitespace, or the text would not be JSON."""
    if not asked.whitespace_pattern:
        return
    pattern = asked.whitespace_pattern.replace("/", r"\/")
    others = f"start: OTHER\nOTHER: /{pattern}/ & ~/[ \\t\\n\\r]*/\n{OPTIONS}\n"
    matcher = LLMatcher(tokenizer, others, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(f"whitespace_pattern: {_worded(matcher.get_error())}")
    matcher.compute_bitmask()
    if not matcher.is_error() or not _is_empty(matcher):
        raise GrammarError("whitespace_pattern may match only spaces, tabs and line ends")


def _is_empty(matcher: LLMatcher) -> bool:
    """Of a matcher that has failed at its beginning: no text fits."""
    return "NoExtension" in matcher.get_error()


def _worded(message: str) -> str:
    """The library's message in one line, with the keyword at fault, and without what does not help: a quote
    of the grammar that was made here, and advice that does not apply."""
    message = _QUOTE.sub("", message)
    line = one_line(_PLACE.sub("", message))
    if line.startswith("oneOf constraints are not supported"):
        return "oneOf is not supported where more than one of its schemas may fit; use anyOf"
    for beginning, keyword in _KEYWORDS.items():
        if line.startswith(beginning):
            return f"{keyword}: {line}"
    return line.replace("Unimplemented keys: ", "these keywords are not supported: ")
