"""What a model thinks before it answers: whether it does, and how many tokens it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mainspring.frontend.parsing.formats import ReasoningFormat


class Opening(NamedTuple):
    """How an answer may begin."""

    form: ReasoningFormat | None  # None: without reasoning
    is_open: bool = False  # the prompt has begun it


def opening(form: ReasoningFormat | None, prompt: str, begun: object = None) -> Opening:
    """After a prompt that a template has written. `begun` is the message that the answer continues, if it
    does. Templates open reasoning, or forbid it by closing it at once, or leave it to the model."""
    if form is None:
        return Opening(None)
    if form.is_opened_by(prompt):
        return Opening(form, is_open=True)
    if begun is not None:
        is_open = isinstance(begun, str) and begun.rfind(form.begin) > begun.rfind(form.end)
        return Opening(form if is_open else None, is_open)
    return Opening(None if prompt.rstrip().endswith(form.end) else form)


class ReasoningCounter:
    """Tokens of one answer that are reasoning, its tags counted: every token up to the end tag, from the
    beginning or from the begin tag on."""

    def __init__(self, form: ReasoningFormat, token_bytes: Callable[[int], bytes], *, is_open: bool) -> None:
        self._begin, self._end = form.begin.encode(), form.end.encode()
        self._token_bytes = token_bytes
        self._text = b""  # in which the next tag may have begun
        self._is_open = is_open
        self._is_over = False  # nothing more counts
        self._num_read = 0
        self.num_tokens = 0

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            self._text += self._token_bytes(token_id)
            self._num_read += 1
            if not self._is_open:
                self._look_for_begin()
            if self._is_open:
                self.num_tokens = self._num_read
                self._is_over = self._end in self._text
                self._text = self._text[-len(self._end) :]

    def _look_for_begin(self) -> None:
        """Reasoning comes first, or not at all."""
        self._text = self._text.lstrip()
        self._is_open = self._text.startswith(self._begin)
        self._is_over = not self._is_open and not self._begin.startswith(self._text)
