"""An answer, as it comes, into what it says: reasoning, text, and calls of tools.

    parser = AnswerParser(tool_format("hermes"), reasoning_format("qwen3"))
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()

Theory of operation. One generator reads the answer from its beginning to its end (`reader.py`), by a
description of its format (`formats.py`), and tells what it finds (`telling.py`).

Rule 1. How a text is cut does not matter: joined, the events are those of the whole text.
Rule 2. Everything is told as soon as it is certain. Kept back is only what may begin a tag, white space that
        may stand before one, and what may be a call but is not yet.
Rule 3. Nothing is lost. What turns out not to be a call comes out as text, as it was written, up to the first
        character that cannot be of one; there reading goes on. Once a call was begun (see the rules of
        `json_calls.py` and `python_calls.py`) it is one: what then stands where nothing may is text.
Rule 4. The end is the end, whatever made it: it gives what was kept back, and a call that was begun is ended.
        But where a tag is due that ends something, its beginning is not text: the answer was cut in it.
Rule 5. A piece costs time in proportion to its length; see `pieces_of`.
Rule 6. Reasoning comes first or not at all. What looks like a call inside it is reasoning, and reasoning
        whose end does not come is all there is. Tags elsewhere are text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from mainspring.frontend.parsing.events import Event, Reasoning
from mainspring.frontend.parsing.formats import Call, Form, ReasoningFormat, ToolFormat
from mainspring.frontend.parsing.json_calls import named_call, object_call
from mainspring.frontend.parsing.python_calls import python_call
from mainspring.frontend.parsing.reader import NotThisForm, Reader, Reading
from mainspring.frontend.parsing.telling import Telling

PIECE_CHARS = 2048  # some 3 ms of the costliest text, a nested list in Python


BREATH_S = 1e-5


def pieces_of(text: str) -> Iterator[str]:
    """A text that came as a whole, in pieces between which this thread makes way: an event loop in another
    waits for one piece, and not until the interpreter takes its turn to look."""
    for at in range(0, len(text), PIECE_CHARS):
        if at:
            time.sleep(BREATH_S)
        yield text[at : at + PIECE_CHARS]


class AnswerParser:
    """Of one answer."""

    __slots__ = ("_reader", "_reading", "_telling")

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        *,
        begins_in_reasoning: bool = False,
    ) -> None:
        """`begins_in_reasoning`: the prompt has opened it; see `ReasoningFormat.is_opened_by`."""
        self._reader = Reader()
        self._telling = Telling()
        self._reading: Iterator[None] = _answer(
            self._reader, self._telling, tool_format, reasoning_format, begins_in_reasoning
        )
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        """Whether a call was begun."""
        return self._telling.num_calls > 0

    @property
    def in_reasoning(self) -> bool:
        """Whether text that comes next is reasoning, unless it is a tag."""
        return self._telling.kind is Reasoning

    @property
    def in_call(self) -> bool:
        """Whether a call was begun and is not over."""
        return self._telling.in_call

    def feed(self, text: str) -> list[Event]:
        """What is certain with the next piece."""
        self._reader.add(text)
        next(self._reading)
        return self._telling.taken()

    def finish(self) -> list[Event]:
        """The rest. Nothing may be fed after it."""
        self._reader.is_over = True
        for _ in self._reading:
            raise AssertionError("a reader waits for more than there is")
        self._telling.finish()
        return self._telling.taken()


def _answer(
    reader: Reader,
    telling: Telling,
    calls: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    begins_in_reasoning: bool,
) -> Reading[None]:
    if reasoning is not None:
        yield from _reasoning(reader, telling, reasoning, begins_in_reasoning)
    if calls is not None and calls.is_bare:
        yield from _calls(reader, telling, calls)
    tags = _Tags(tag for tag in ((calls.begin, calls.end) if calls is not None else ()) if tag)
    is_open = False  # a tag `end` is due
    while tag := (yield from tags.next(reader, telling, due=calls.end if calls and is_open else "")):
        assert calls is not None, "without a format there are no tags"
        if tag == calls.begin:
            reader.hold()
            reader.take(reader.at + len(tag))
            is_open = yield from _calls(reader, telling, calls)
        elif is_open:
            reader.take(reader.at + len(tag))
            telling.tag()
            is_open = False
        else:
            telling.text(reader.take(reader.at + len(tag)))


def _reasoning(reader: Reader, telling: Telling, reasoning: ReasoningFormat, is_open: bool) -> Reading[None]:
    if is_open:
        telling.tag(Reasoning)
    reader.hold()
    yield from reader.after_space()
    try:
        yield from reader.expect(reasoning.begin)
        reader.release()
    except NotThisForm:
        reader.rewind()
        if not is_open:
            return
    telling.tag(Reasoning)
    tag = yield from _Tags([reasoning.end]).next(reader, telling, due=reasoning.end)
    if tag:
        reader.take(reader.at + len(tag))
        telling.tag()


def _calls(reader: Reader, telling: Telling, calls: ToolFormat) -> Reading[bool]:
    """Reads calls for as long as there are any; what is taken and is not of one becomes text. Returns whether
    a call was begun."""
    num_before = telling.num_calls
    reader.hold()
    try:
        first = yield from reader.after_space()
        form = next((form for form in calls.forms if _may_begin(form, first)), None)
        if form is not None:
            yield from reader.expect(form.opening)
            while True:
                yield from reader.after_space()
                yield from _call(reader, telling, calls, form)
                reader.hold()
                if (yield from reader.after_space()) != form.separator or not form.separator:
                    break
                yield from reader.expect(form.separator)
            yield from reader.expect(form.closing)
            reader.release()
            return True
    except NotThisForm:
        telling.end_call()
    telling.text(reader.release())
    return telling.num_calls > num_before


def _may_begin(form: Form, first: str) -> bool:
    if not first:
        return False
    if form.opening:
        return first == form.opening
    return first == "{" if form.call in (Call.OBJECT, Call.ARGUMENTS) else True


def _call(reader: Reader, telling: Telling, calls: ToolFormat, form: Form) -> Reading[None]:
    match form.call:
        case Call.OBJECT:
            yield from object_call(reader, telling, needs_arguments=calls.is_bare)
        case Call.NAMED:
            yield from named_call(reader, telling)
        case Call.PYTHON:
            yield from python_call(reader, telling)
        case Call.ARGUMENTS:
            reader.release()
            telling.begin_call(calls.called)
            while (yield from reader.peek()):
                telling.arguments(reader.take(len(reader.text)))
            telling.end_call()


class _Tags:
    """Looks for the first of some tags. What may be the beginning of one at the end of a piece waits."""

    def __init__(self, tags: list[str] | Iterator[str]) -> None:
        tags = list(tags)
        whole = "|".join(map(re.escape, tags))
        begun = "|".join(map(_beginning, tags))
        self._whole = re.compile(whole) if tags else None
        self._whole_or_begun = re.compile(rf"{whole}|(?:{begun})\Z") if tags else None

    def next(self, reader: Reader, telling: Telling, due: str = "") -> Reading[str]:
        """The next tag, which is not taken; "" where the text is over. What stands before it is told, but for
        the beginning of the tag that is `due`, if the text ends in it."""
        while (yield from reader.peek()):
            pattern = self._whole if reader.is_over else self._whole_or_begun
            match = pattern.search(reader.text, reader.at) if pattern is not None else None
            end = match.start() if match is not None else len(reader.text)
            if end > reader.at:
                text = reader.take(end)
                if reader.is_over and due.startswith(text):  # what waited, and all that there was
                    telling.tag(telling.kind)
                else:
                    telling.text(text)
            if match is not None:
                if self._whole is not None and self._whole.match(reader.text, end):
                    return match[0]
                if not reader.is_over:
                    yield
        return ""


def _beginning(tag: str) -> str:
    """A pattern of every beginning of `tag` that is not all of it: `<(?:a(?:b)?)?` of `<ab>`."""
    pattern = ""
    for character in reversed(tag[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern
