"""A text that comes in pieces, read as if it were there as a whole.

Theory of operation. What reads is a generator; it yields where it needs the next character and there is none
yet, and is resumed when there is. So a reader of a form is written as for a whole text, in the order of the
form, and what it says cannot depend on how the text was cut as long as it looks at characters and at
`is_over`, and never at where a piece ends.

Rule 1. What was taken is gone, and no text is looked at twice: what a reader leaves between two pieces is
        bounded (the beginning of a tag), so the work is linear in the text however it comes.
Rule 2. Between `hold` and `release` what is taken is kept as well, so that it can be given back as it was
        written. `hold` while holding goes on holding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]  # what reads: yields for more, returns its result
Emit = Callable[[str], None]  # where a text goes

SPACE = re.compile(r"\s*")
IN_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # as far as whole escapes go


class NotThisForm(Exception):
    """The text is not of the form that was tried. `reader.at` is at the character that cannot be."""


class Reader:
    """`text[at:]` is what came and was not taken."""

    __slots__ = ("_held", "at", "is_over", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False  # nothing comes any more
        self._held: list[str] | None = None

    def add(self, piece: str) -> None:
        self.text = self.text[self.at :] + piece
        self.at = 0

    def take(self, end: int) -> str:
        """`text[at:end]`, which is over with that."""
        taken = self.text[self.at : end]
        self.at = end
        if self._held is not None:
            self._held.append(taken)
        return taken

    def hold(self) -> None:
        if self._held is None:
            self._held = []

    def release(self) -> str:
        """What was taken since `hold`."""
        held, self._held = self._held, None
        return "".join(held or ())

    def rewind(self) -> None:
        """As if nothing had been taken since `hold`. Only for what is short."""
        self.text = self.release() + self.text[self.at :]
        self.at = 0

    # -- what readers are made of ----------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character; "" where the text is over."""
        while self.at == len(self.text):
            if self.is_over:
                return ""
            yield
        return self.text[self.at]

    def expect(self, text: str) -> Reading[None]:
        """Takes it. Raises `NotThisForm` at the first character that differs."""
        for character in text:
            if (yield from self.peek()) != character:
                raise NotThisForm
            self.take(self.at + 1)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes what matches. The pattern is a class of characters, repeated: it must not matter where the
        text is cut."""
        parts = []
        while (yield from self.peek()):
            match = pattern.match(self.text, self.at)
            if match is None or match.end() == self.at:
                break
            parts.append(self.take(match.end()))
        return "".join(parts)

    def after_space(self) -> Reading[str]:
        """Takes white space, and peeks."""
        yield from self.run(SPACE)
        return (yield from self.peek())

    def json_string(self) -> Reading[str]:
        """Takes a string of JSON, and returns what it says. Raises `NotThisForm`."""
        yield from self.expect('"')
        parts = ['"']
        while character := (yield from self.peek()):
            if character == '"':
                break
            match = IN_STRING.match(self.text, self.at)
            if match is not None and match.end() > self.at:
                parts.append(self.take(match.end()))
            else:  # a backslash, and what it stands before has not come
                parts.append(self.take(self.at + 1))
                yield from self.peek()
                parts.append(self.take(self.at + 1))
        yield from self.expect('"')
        try:
            said: str = json.loads("".join(parts) + '"', strict=False)
            said.encode()  # half of a surrogate pair is no text
        except ValueError:
            raise NotThisForm from None
        return said
