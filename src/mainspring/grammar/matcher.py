"""Where one text stands in its grammar. Fits `base.protocols.Grammar`.

Rule 1. A token that ends the text is allowed where the grammar may end, and nowhere else. The library knows
        the vocabulary's own end tokens; a request has more (its stop tokens) or fewer (`ignore_eos`).
Rule 2. A stop token that is also a possible continuation is allowed as that, and ends the text all the same:
        its client asked for it, and is told which token it was.
Rule 3. A matcher that has reached a limit raises `GrammarError`, and stays unusable; that ends its own
        request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mainspring.grammar.words import GrammarError, one_line

Bits = tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]  # words of a row, and what to change in each


class Matcher:
    """A library's matcher, and the tokens that end this request."""

    def __init__(
        self,
        matcher: LLMatcher,
        known_ends: Iterable[int],
        ends: Iterable[int],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`known_ends` are the library's end tokens, `ends` the request's."""
        self._matcher = matcher
        self._more_ends = _bits(set(ends) - set(known_ends))
        self._no_ends = _bits(set(known_ends) - set(ends))
        self._on_failure = on_failure

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """See `Grammar.fill`. Raises `GrammarError`."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        if self._more_ends is not None and self._matcher.is_accepting():
            words, bits = self._more_ends
            np.bitwise_or.at(row, words, bits)
        if self._no_ends is not None:
            words, bits = self._no_ends
            before = row[words]
            np.bitwise_and.at(row, words, ~bits)
            if not row.any():  # it can only end: more would be wrong
                row[words] = before

    def accept(self, token_id: int) -> bool:
        """See `Grammar.accept`. Raises `GrammarError`."""
        is_taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise GrammarError(
                f"{num_tokens} tokens cannot be taken back: {one_line(self._matcher.get_error())}"
            )

    def is_finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._on_failure()
            raise GrammarError(f"the grammar is too complex to go on: {one_line(self._matcher.get_error())}")


def _bits(token_ids: set[int]) -> Bits | None:
    if not token_ids:
        return None
    ids = np.array(sorted(token_ids))
    return ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)).view(np.int32)
