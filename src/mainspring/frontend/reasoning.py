"""What a model thinks before it answers: how it is limited, what may follow it, and how many tokens it
took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mainspring.base.params import STRUCTURE_KINDS, StructuredOutputsParams
from mainspring.frontend.parsing.formats import ReasoningFormat

_OTHERS = [name for name in StructuredOutputsParams.__struct_fields__ if name not in STRUCTURE_KINDS]


def after_reasoning(
    wanted: StructuredOutputsParams | None,
    form: ReasoningFormat,
    *,
    is_open: bool,
    max_tokens: int | None = None,
) -> StructuredOutputsParams | None:
    """`wanted`, of a text that begins with free reasoning: what binds the answer does not bind that.

    `is_open`: the prompt has begun it, so it must be ended; else it may be left out. Ended it is after
    `max_tokens` at the latest. None: nothing is bound, and nothing limited.
    """
    if wanted is None and max_tokens is None:
        return None
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    thought: dict[str, Any] = {
        "type": "tag",
        "begin": "" if is_open else form.begin,
        "content": {"type": "any_text", **limit},
        "end": form.end,
    }
    if not is_open:
        thought = {
            "type": "tags_with_separator",
            "tags": [thought],
            "separator": "",
            "stop_after_first": True,
        }
    sequence = {"type": "sequence", "elements": [thought, _as_node(wanted)]}
    others: dict[str, Any] = {}
    if wanted is not None:
        others = {
            name: getattr(wanted, name) for name in wanted.__struct_fields__ if name not in STRUCTURE_KINDS
        }
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": sequence}, **others)


def _as_node(wanted: StructuredOutputsParams | None) -> dict[str, Any]:
    if wanted is None:
        return {"type": "any_text"}
    return {"type": "structured_outputs", wanted.kind: getattr(wanted, wanted.kind)}


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
