"""The one place that makes the library's objects: vocabularies and matchers, with limits.

The library is written in Rust. Making a matcher and filling a mask leave the interpreter's lock; making a
vocabulary holds it, so that is done once. Its own limits, counted in work and not in seconds, bound what any
grammar may cost, when it is made and at every step: nothing here can be interrupted, and nothing has to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mainspring.base.params import StructuredOutputsParams
from mainspring.grammar.translate import translate
from mainspring.grammar.words import GrammarError, one_line

LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # 1 to 2 kB each
    verbose_errors=False,  # messages quote no more of a client's grammar than they must
)


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


class Made(NamedTuple):
    matcher: LLMatcher  # at its beginning
    warnings: tuple[str, ...]  # what is not enforced; only where `lenient` was set


class _Tokens:
    """A vocabulary as the library wants to read it, and the way from forced text to tokens.

    Where a grammar leaves one continuation only, the mask allows the one token that a reader of that text
    would begin with, so the model is not led into spellings it never saw. Longest match comes near to what a
    tokenizer does.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Every byte of `text` must be in the answer: what the library is not told it takes as said."""
        if self.tokenizer is None:
            return []  # it is being made, and tries whether bytes are understood
        data = text.encode() if isinstance(text, str) else text
        try:
            return self.tokenizer.greedy_tokenize(data.decode())
        except UnicodeDecodeError as error:  # part of a character
            whole = self.tokenizer.greedy_tokenize(data[: error.start].decode())
            return [*whole, *(self._byte_ids[byte] for byte in data[error.start :])]

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        special = set(self.special_token_ids)
        return {token[0]: i for i, token in enumerate(self.tokens) if len(token) == 1 and i not in special}


def make_tokenizer(
    tokens: Sequence[bytes], special_ids: Sequence[int], end_ids: Sequence[int], vocab_size: int
) -> LLTokenizer:
    """`tokens[id]` is what a token says. `end_ids` end a text, where the grammar allows; at least one.
    `vocab_size` may be larger than there are tokens: models have more rows."""
    padded = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]
    words = _Tokens(padded, [i for i in special_ids if i < vocab_size], end_ids[0])
    words.tokenizer = LLTokenizer(
        TokenizerWrapper(words), n_vocab=vocab_size, eos_token=list(end_ids), slices=LLTokenizer.json_slices()
    )
    return words.tokenizer


def make_matcher(tokenizer: LLTokenizer, asked: StructuredOutputsParams) -> Made:
    """Raises `GrammarError` for what cannot be enforced, or fits no text at all."""
    _check_whitespace(tokenizer, asked)
    matcher = LLMatcher(tokenizer, translate(asked), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(f"{asked.kind}: {_worded(matcher.get_error())}")
    warnings = tuple(map(_worded, matcher.get_grammar_warnings()))
    if warnings and not asked.lenient:
        raise GrammarError(f"{asked.kind}: {'; '.join(warnings)}")
    matcher.compute_bitmask()  # also so that the first step of every request finds it done
    if matcher.is_error():
        fault = one_line(matcher.get_error())
        cause = "no text fits it" if "NoExtension" in fault else f"it is too complex: {fault}"
        raise GrammarError(f"{asked.kind}: {cause}")
    return Made(matcher, warnings)


def _check_whitespace(tokenizer: LLTokenizer, asked: StructuredOutputsParams) -> None:
    """A pattern of a caller's may match nothing but JSON's whitespace, or the text would not be JSON."""
    if not asked.whitespace_pattern:
        return
    pattern = asked.whitespace_pattern.replace("/", r"\/")
    wrong = rf"start: OTHER" "\n" rf"OTHER: /{pattern}/ & ~/[ \t\n\r]*/"
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(wrong), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise GrammarError(f"whitespace_pattern: {one_line(matcher.get_error())}")
    matcher.compute_bitmask()
    if not matcher.is_error():
        raise GrammarError("whitespace_pattern may match only spaces, tabs and line ends")


def _worded(message: str) -> str:
    """The library's message in one line, with the keyword at fault and without advice that does not apply."""
    line = one_line(message)
    if line.startswith("oneOf constraints are not supported"):
        return "oneOf is not supported where more than one of its schemas may fit; use anyOf"
    for beginning, keyword in _KEYWORDS.items():
        if line.startswith(beginning):
            return f"{keyword}: {line}"
    return line.replace("Unimplemented keys: ", "these keywords are not supported: ")
