"""How a vocabulary spells its tokens, and so what bytes each stands for.

A token *is* bytes, and text is their concatenation read as UTF-8. That is what lets a detokenizer work with
one token at a time. Where a vocabulary puts a space in front of every text, its decoding takes one away
again (`adds_space`): from the beginning of the text, nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

SPACE = "\u2581"  # how SentencePiece writes a space
CONTINUES = "##"  # how WordPiece begins what is not the beginning of a word
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Spelling(Protocol):
    adds_space: bool

    def spell(self, token: str) -> bytes: ...

    def spell_literal(self, token: str) -> bytes:
        """Of a token that is found in text as it is written, special ones among them."""
        ...

    def spell_all(self, tokens: Sequence[str]) -> list[bytes]:
        """`spell` of each, in a fraction of the time."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one visible character; this is the way back.

    A byte that is a visible Latin-1 character stands for itself; the others are, in order, U+0100 and on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
_BYTE_VALUES = np.array([BYTE_OF.get(chr(i), -1) for i in range(max(map(ord, BYTE_OF)) + 2)])


def lost_characters(tokens: Iterable[str]) -> str | None:
    """Those of which no byte is a token in a byte-level vocabulary. None for one that lacks bytes of longer
    characters, too, but for the rarest (from U+40000 on)."""
    missing = {BYTE_OF[c] for c in BYTE_OF.keys() - set(tokens)} - {0xC0, 0xC1}  # which no text has
    if any(0x80 <= byte < 0xF0 for byte in missing):
        return None
    return "".join(chr(byte) for byte in sorted(missing) if byte < 0x80)


class ByteLevel:
    """One character for each byte; a token that has others is its text."""

    adds_space = False

    def spell(self, token: str) -> bytes:
        if not BYTE_OF.keys() >= set(token):
            return token.encode()
        return bytes(map(BYTE_OF.__getitem__, token))

    def spell_literal(self, token: str) -> bytes:
        return token.encode()

    def spell_all(self, tokens: Sequence[str]) -> list[bytes]:
        text = "".join(tokens).encode("utf-32-le", "surrogatepass")
        characters = np.frombuffer(text, dtype="<u4")
        values = _BYTE_VALUES[np.minimum(characters, len(_BYTE_VALUES) - 1)]
        ends = np.cumsum([len(token) for token in tokens])
        spelled = values.astype(np.uint8).tobytes()
        start, found = 0, []
        for end in ends.tolist():
            found.append(spelled[start:end])
            start = end
        for i in set(np.searchsorted(ends, np.flatnonzero(values < 0), side="right").tolist()):
            found[i] = self.spell(tokens[i])
        return found


class SentencePieces:
    """Text with U+2581 for a space; `<0xE2>` for a byte."""

    def __init__(self, adds_space: bool) -> None:
        self.adds_space = adds_space

    def spell(self, token: str) -> bytes:
        if token.startswith("<0x") and (found := _BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        return token.replace(SPACE, " ").encode()

    def spell_literal(self, token: str) -> bytes:
        return token.replace(SPACE, " ").encode()

    def spell_all(self, tokens: Sequence[str]) -> list[bytes]:
        return list(map(self.spell, tokens))


class WordPieces:
    """Words, with a space before each; `##` before what continues one."""

    adds_space = True

    def spell(self, token: str) -> bytes:
        return (token[len(CONTINUES) :] if token.startswith(CONTINUES) else f" {token}").encode()

    def spell_literal(self, token: str) -> bytes:
        return self.spell(token)

    def spell_all(self, tokens: Sequence[str]) -> list[bytes]:
        return list(map(self.spell, tokens))
