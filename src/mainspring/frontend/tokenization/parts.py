"""What a `Tokenizer` is made of, whatever file it came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted
from mainspring.frontend.tokenization.spelling import Spelling

# Types of tokens, as GGUF files and SentencePiece models number them. What is not named here is ordinary.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class PlainEncoder(Protocol):
    """Text to ids; nothing in the text becomes a special token."""

    def encode(self, text: str, is_start: bool) -> list[int]:
        """`text` is Unicode. `is_start`: nothing, not even a special token, comes before it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    tokens: Sequence[str]  # by id, as the vocabulary spells them
    spelling: Spelling
    encoder: PlainEncoder
    # Text to ids, special tokens' texts becoming them. None: cut at special tokens, encode what is between.
    encode_whole: Callable[[str], list[int]] | None = None
    special_ids: frozenset[int]
    literal_ids: frozenset[int]  # special, or else found in text before anything else is: they are as written
    unused_ids: frozenset[int] = frozenset()  # they only fill the vocabulary up
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # the first is *the* EOS
    prefix_ids: tuple[int, ...] = ()  # what goes around a text
    suffix_ids: tuple[int, ...] = ()
    strip_left_ids: frozenset[int] = frozenset()  # special tokens that take white space before them along
    strip_right_ids: frozenset[int] = frozenset()
    # Characters that may be in no token; of all others at least a byte is, but that NFC may come first.
    # None: any may be lost.
    lost: str | None = None
    chat_template: str | None = None


def ids_of_types(types: Sequence[int] | npt.NDArray[Any], *wanted: int) -> frozenset[int]:
    return frozenset(np.flatnonzero(np.isin(types, wanted)).tolist())


def numbered(tokens: Sequence[str], without: frozenset[int], key: str) -> dict[str, int]:
    """Token -> id. Raises `CheckpointError`, naming `key`, for two that are the same."""
    found = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(found) == len(tokens):
        for i in without:
            del found[tokens[i]]
        return found
    found = {token: i for i, token in enumerate(tokens) if i not in without}
    if len(found) != len(tokens) - len(without):
        raise CheckpointError(_first_duplicate(tokens, without, key))
    return found


def _first_duplicate(tokens: Sequence[str], without: frozenset[int], key: str) -> str:
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if i not in without and seen.setdefault(token, i) != i:
            return f"tokens {seen[token]} and {i} of {key} are both {quoted(token)}"
    raise AssertionError("there is none")
