"""What was read becomes events.

Rule 1. White space between a text and a tag, or a call, belongs to the tag: templates write it there, so a
        model does. It is dropped after reasoning and before it, and on both sides of calls. Everywhere else
        text is passed on exactly as it was written.
Rule 2. So white space at the end of what came is kept until it is known what follows it. When nothing does,
        it is text, unless nothing but a tag or call stands before it.
"""

from __future__ import annotations

from mainspring.frontend.parsing.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    Content,
    Event,
    Reasoning,
)


class Telling:
    __slots__ = ("_events", "_is_after_tag", "_spaces", "in_call", "kind", "num_calls")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.kind: type[Content] | type[Reasoning] = Content  # of text
        self._is_after_tag = False  # and no text has come since
        self._spaces: list[str] = []  # what rule 2 keeps
        self.in_call = False
        self.num_calls = 0  # that were begun

    def taken(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        stripped = text.rstrip()
        if self._is_after_tag:
            stripped = stripped.lstrip()
            if not stripped:
                return
            self._is_after_tag = False
            self._events.append(self.kind(stripped))
        elif stripped:
            self._events.append(self.kind("".join([*self._spaces, stripped])))
            self._spaces.clear()
        if spaces := text[len(text.rstrip()) :]:
            self._spaces.append(spaces)

    def tag(self, kind: type[Content] | type[Reasoning] = Content) -> None:
        """A tag stands here, or a call; text after it is of this kind."""
        self._spaces.clear()
        self._is_after_tag = True
        self.kind = kind

    def begin_call(self, name: str) -> None:
        self.tag()
        self._events.append(CallBegins(self.num_calls, name))
        self.num_calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """If there is one."""
        if self.in_call:
            self._events.append(CallEnds(self.num_calls - 1))
            self.in_call = False

    def finish(self) -> None:
        self.end_call()
        if self._spaces:
            self._events.append(self.kind("".join(self._spaces)))
            self._spaces.clear()
