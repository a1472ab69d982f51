"""A grammar whose text begins with free text between two tags, of no more than so many tokens: after them the
end tag is the only way on. Fits `base.protocols.Grammar`.

The library has limits of its own, but text that reaches them counts as ended, with or without its end. So the
tokens are counted here, and where they are spent the mask is narrowed to those that spell what is left of the
end tag. The grammar takes the tag at any place of the free text, so it goes along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.protocols import Grammar
from mainspring.grammar.structural_tag import Limit


class _State(NamedTuple):
    """After some tokens."""

    text: bytes  # the last of it, in which a tag may have begun
    num_tokens: int  # of the free text
    is_open: bool
    is_over: bool  # nothing more is counted


class Limited:
    """`inner`, and the limit of how it begins."""

    def __init__(self, inner: Grammar, limit: Limit, tokens: Sequence[bytes]) -> None:
        """`tokens[id]` is what a token says."""
        self._inner = inner
        self._tokens = tokens
        self._begin, self._end, self._most = limit.begin.encode(), limit.end.encode(), limit.max_tokens
        self._states = [_State(b"", 0, not self._begin, False)]  # one for each token, so it can be taken back

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        self._inner.fill(row)
        state = self._states[-1]
        if state.is_open and not state.is_over and state.num_tokens >= self._most:
            left, bits = self._left(state.text), np.zeros(row.size * 32, np.uint8)
            known = self._tokens[: bits.size]
            bits[[i for i, text in enumerate(known) if text and left.startswith(text)]] = 1
            row &= np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if not self._inner.accept(token_id):
            return False
        state = self._states[-1]
        self._states.append(state if state.is_over else self._after(state, self._tokens[token_id]))
        return True

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        if num_tokens:
            del self._states[-num_tokens:]

    def is_finished(self) -> bool:
        return self._inner.is_finished()

    def _after(self, state: _State, said: bytes) -> _State:
        text = state.text + said
        if not state.is_open:
            is_begun = text.startswith(self._begin)
            may_begin = is_begun or self._begin.startswith(text)
            return _State(text[len(self._begin) :] if is_begun else text, 0, is_begun, not may_begin)
        return _State(text[-len(self._end) :], state.num_tokens + 1, True, self._end in text)

    def _left(self, text: bytes) -> bytes:
        """What of the end tag is still to be said."""
        for num_said in range(len(self._end) - 1, 0, -1):
            if text.endswith(self._end[:num_said]):
                return self._end[num_said:]
        return self._end
