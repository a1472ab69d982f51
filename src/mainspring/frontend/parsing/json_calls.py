"""Calls that are JSON: names are read, arguments are only followed to their end.

Rule 1. Arguments are passed on as they come, whatever stands in them: brackets are counted, strings are
        passed over, and nothing is built or judged. They end where their first bracket is closed.
Rule 2. Outside its strings JSON has no `<`. Arguments that have one are broken off there: what follows is the
        tag that ends the call, or no part of it.
Rule 3. It is a call, and stays one, once a name and the beginning of its arguments have been read, or, in a
        format with tags, the end of an object with a name and no arguments.
Rule 4. Cost. Text in which as many brackets close as open is passed over by one regular expression, strings
        and all, and a run of brackets by another; a loop in Python sees what is nested deeper.
"""

from __future__ import annotations

import re

from mainspring.frontend.parsing.reader import IN_STRING, Emit, NotThisForm, Reader, Reading
from mainspring.frontend.parsing.telling import Telling

ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'


def _balanced(depth: int) -> str:
    """A pattern of text outside strings in which as many brackets close as open, up to `depth` in each
    other. Their kinds do not matter."""
    inner = rf"|[\[{{]{_balanced(depth - 1)}[\]}}]" if depth else ""
    return rf'(?:[^"{{}}\[\]<]++|{_STRING}{inner})*+'


_BALANCED = re.compile(_balanced(4), re.DOTALL)
_OPENING = re.compile(r"[\[{]+")
_CLOSING = re.compile(r"[\]}]+")
_WORD = re.compile(r"[^\s,;:\"{}\[\]<]*")
_NAME = re.compile(r"[\w.:/-]*")


class Extent:
    """Where a list, an object or a string of JSON ends, over pieces. It begins with its bracket or quote."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "is_over")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False  # the next character stands behind a backslash
        self.is_over = False  # closed, or broken off

    def end(self, text: str, at: int) -> int:
        """How far `text` belongs to it, from `at` on. Asked for piece after piece, until `is_over`."""
        while at < len(text) and not self.is_over:
            at = self._end_in_string(text, at) if self._is_in_string else self._end_outside(text, at)
        return at

    def _end_in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        match = IN_STRING.match(text, at)
        assert match is not None, "it matches nothing at least"
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":  # the last character that has come
            self._is_escaped = True
        else:
            self._is_in_string = False
            self.is_over = not self._depth
        return at + 1

    def _end_outside(self, text: str, at: int) -> int:
        if self._depth:
            match = _BALANCED.match(text, at)
            assert match is not None, "it matches nothing at least"
            at = match.end()
            if at == len(text):
                return at
        character = text[at]
        if character == "<":
            self.is_over = True
            return at
        if character == '"':
            self._is_in_string = True
            return at + 1
        if match := _OPENING.match(text, at):
            self._depth += match.end() - at
            return match.end()
        match = _CLOSING.match(text, at)
        assert match is not None, "nothing else ends what is balanced"
        num_closed = min(self._depth, match.end() - at)
        self._depth -= num_closed
        self.is_over = not self._depth
        return at + num_closed


def value(reader: Reader, emit: Emit) -> Reading[None]:
    """Takes a value of any kind, and passes it on as it comes. Raises `NotThisForm` where none begins."""
    first = yield from reader.peek()
    if first and first in '{["':
        extent = Extent()
        while not extent.is_over and (yield from reader.peek()):
            emit(reader.take(extent.end(reader.text, reader.at)))
    elif word := (yield from reader.run(_WORD)):
        emit(word)
    else:
        raise NotThisForm


def object_call(reader: Reader, telling: Telling, needs_arguments: bool) -> Reading[None]:
    """`{"name": ..., "arguments": ...}`. Raises `NotThisForm`, perhaps with a call begun."""
    yield from reader.expect("{")
    name = ""
    early: list[str] | None = None  # arguments that came before the name
    if (yield from reader.after_space()) == "}":
        raise NotThisForm
    while True:
        key = yield from reader.json_string()
        yield from reader.after_space()
        yield from reader.expect(":")
        yield from reader.after_space()
        if key == "name" and not name:
            name = yield from reader.json_string()
            if not name:
                raise NotThisForm
            if early is not None:
                _begin(reader, telling, name)
                telling.arguments("".join(early))
        elif key in ARGUMENT_KEYS and not telling.in_call and early is None:
            if name:
                yield from _arguments(reader, telling, name)
            else:
                early = []
                yield from value(reader, early.append)
        else:
            yield from value(reader, _pass_over)
        if (yield from reader.after_space()) == "}":
            break
        yield from reader.expect(",")
        yield from reader.after_space()
    if not telling.in_call:
        if not name or needs_arguments:
            raise NotThisForm
        _begin(reader, telling, name)
        telling.arguments(NO_ARGUMENTS)
    yield from reader.expect("}")
    telling.end_call()


def named_call(reader: Reader, telling: Telling) -> Reading[None]:
    """`name{...}`, perhaps with the tag `[ARGS]` between. Raises `NotThisForm`."""
    name = yield from reader.run(_NAME)
    if not name:
        raise NotThisForm
    if (yield from reader.after_space()) == "[":
        yield from reader.expect("[ARGS]")
    if (yield from reader.after_space()) != "{":
        raise NotThisForm
    yield from _arguments(reader, telling, name)
    telling.end_call()


def _arguments(reader: Reader, telling: Telling, name: str) -> Reading[None]:
    first = yield from reader.peek()
    if not first or first in ",:;}]<":
        raise NotThisForm
    _begin(reader, telling, name)
    yield from value(reader, telling.arguments)


def _begin(reader: Reader, telling: Telling, name: str) -> None:
    reader.release()
    telling.begin_call(name)


def _pass_over(text: str) -> None:
    pass
