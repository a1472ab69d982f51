"""Calls written as Python: `f(city='Paris', days=[1, 2], opts={'a': True})`. Their arguments become JSON.

Rule 1. A literal is translated as it comes: plain text inside a string at once, an escape, a number or a
        word when it is complete. Whatever is in parentheses is a list. Keys that are no strings become
        strings, as in `json.dumps`.
Rule 2. It is a call, and stays one, once `f(x=` has been read; of one without arguments, `f()` and the comma
        or bracket behind it.
Rule 3. What cannot be translated (names, sums, positional arguments behind others, bytes, f-strings, numbers
        that JSON does not have) ends the translation: it is passed on as it was written, and so is all the
        rest of the answer, for where such a call ends is not known. The arguments are no JSON then, and the
        client sees what the model wrote.
"""

from __future__ import annotations

import json
import re
import unicodedata

from mainspring.frontend.parsing.json_calls import NO_ARGUMENTS
from mainspring.frontend.parsing.reader import SPACE, Emit, NotThisForm, Reader, Reading
from mainspring.frontend.parsing.telling import Telling

_NAME = re.compile(r"[\w.]*")
_PARAMETER = re.compile(r"\w*")
_CHARACTER_NAME = re.compile(r"[A-Za-z0-9 ()-]*")
_NUMBER_OR_WORD = re.compile(r"[\w.+-]*")
# The inside of a string, with escapes of one character.
_PLAIN = {quote: re.compile(rf"""(?:[^{quote}\\]++|\\[\\'"abfnrtv\n])*+""") for quote in "\"'"}
_SIMPLE_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {
    **{"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"},
    **{"\\": "\\", "'": "'", '"': '"', "\n": ""},
}
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_OPENINGS = {"[": ("[", "]"), "(": ("[", ")"), "{": ("{", "}")}  # what JSON says, and what closes it
_CLOSINGS = {"]": "]", ")": "]", "}": "}"}


class Untranslatable(Exception):
    """Carries what was taken and not passed on."""

    def __init__(self, written: str = "") -> None:
        self.written = written


def python_call(reader: Reader, telling: Telling) -> Reading[None]:
    """Raises `NotThisForm`, never with a call begun."""
    name = yield from reader.run(_NAME)
    if not all(map(str.isidentifier, name.split("."))):
        raise NotThisForm
    yield from reader.expect("(")
    if (yield from reader.after_space()) == ")":
        yield from reader.expect(")")
        if (yield from reader.after_space()) not in {",", "]"}:
            raise NotThisForm
        reader.release()
        telling.begin_call(name)
        telling.arguments(NO_ARGUMENTS)
    else:
        parameter = yield from _parameter(reader)
        reader.release()
        telling.begin_call(name)
        try:
            yield from _arguments(reader, telling.arguments, parameter)
        except Untranslatable as stopped:
            telling.arguments(stopped.written)
            while (yield from reader.peek()):
                telling.arguments(reader.take(len(reader.text)))
    telling.end_call()


def _parameter(reader: Reader) -> Reading[str]:
    """Takes `x=`."""
    name = yield from reader.run(_PARAMETER)
    if not name.isidentifier():
        raise NotThisForm
    yield from reader.after_space()
    yield from reader.expect("=")
    if (yield from reader.peek()) in {"=", ""}:
        raise NotThisForm
    return name


def _arguments(reader: Reader, emit: Emit, parameter: str) -> Reading[None]:
    """Of `f(x=1, y=2)` all behind `x=`. Raises `Untranslatable`."""
    emit("{")
    while True:
        emit(f"{_as_json(parameter)}: ")
        yield from literal(reader, emit)
        space = yield from reader.run(SPACE)
        has_comma = (yield from reader.peek()) == ","
        if has_comma:
            reader.take(reader.at + 1)
        character = yield from reader.after_space()
        if character == ")":
            reader.take(reader.at + 1)
            emit("}")
            return
        if not has_comma or not character:
            raise Untranslatable(space)
        emit(", ")
        reader.hold()
        try:
            parameter = yield from _parameter(reader)
        except NotThisForm:
            raise Untranslatable(reader.release()) from None
        reader.release()


def literal(reader: Reader, emit: Emit) -> Reading[None]:
    """Takes a literal of Python, and passes it on as JSON. Raises `Untranslatable`."""
    open_until: list[str] = []  # what closes the lists, tuples and mappings around
    comma = ""  # to be said if another element follows
    is_key = False
    while True:
        character = yield from reader.after_space()
        if open_until and character == open_until[-1] and (is_key or open_until[-1] != "}"):
            reader.take(reader.at + 1)
            emit(_CLOSINGS[open_until.pop()])
            is_key = False
        elif character in _OPENINGS and not is_key:
            reader.take(reader.at + 1)
            said, closing = _OPENINGS[character]
            emit(comma + said)
            open_until.append(closing)
            comma, is_key = "", closing == "}"
            continue
        elif not character:
            raise Untranslatable
        else:
            emit(comma)
            yield from _scalar(reader, emit, is_key)
        while open_until:
            space = yield from reader.run(SPACE)
            character = yield from reader.peek()
            if is_key:
                if character != ":":
                    raise Untranslatable(space)
                reader.take(reader.at + 1)
                emit(": ")
                comma, is_key = "", False
                break
            if character == ",":
                reader.take(reader.at + 1)
                comma, is_key = ", ", open_until[-1] == "}"
                break
            if character != open_until[-1]:
                raise Untranslatable(space)
            reader.take(reader.at + 1)
            emit(_CLOSINGS[open_until.pop()])
        if not open_until:
            return


def _scalar(reader: Reader, emit: Emit, is_key: bool) -> Reading[None]:
    character = yield from reader.peek()
    if character in _PLAIN:
        yield from _string(reader, emit)
        return
    written = yield from reader.run(_NUMBER_OR_WORD)
    said = _WORDS.get(written) or _number(written)
    if said is None or (yield from reader.peek()) in _PLAIN:  # a string with a prefix
        raise Untranslatable(written)
    emit(f'"{said}"' if is_key else said)


def _number(written: str) -> str | None:
    if _JSON_NUMBER.fullmatch(written):
        return written
    for kind in (lambda text: int(text, 0), float):
        try:
            return json.dumps(kind(written), allow_nan=False)
        except ValueError:
            continue
    return None


def _string(reader: Reader, emit: Emit) -> Reading[None]:
    quote = yield from reader.peek()
    reader.take(reader.at + 1)
    emit('"')
    is_long = False
    if (yield from reader.peek()) == quote:
        reader.take(reader.at + 1)
        if (yield from reader.peek()) != quote:
            emit('"')
            return
        reader.take(reader.at + 1)
        is_long = True
    plain = _PLAIN[quote]
    while character := (yield from reader.peek()):
        match = plain.match(reader.text, reader.at)
        if match is not None and match.end() > reader.at:
            emit(_inside(_SIMPLE_ESCAPE.sub(_meaning, reader.take(match.end()))))
        elif character == "\\":
            reader.take(reader.at + 1)
            emit((yield from _escape(reader)))
        elif character == quote:
            reader.take(reader.at + 1)
            if not is_long or (yield from _closes(reader, quote, emit)):
                emit('"')
                return


def _meaning(escape: re.Match[str]) -> str:
    return _ESCAPES[escape[1]]


def _closes(reader: Reader, quote: str, emit: Emit) -> Reading[bool]:
    """Behind one quote in a long string: whether two more follow. Those that do not close it are of it."""
    num_quotes = 1
    while num_quotes < 3 and (yield from reader.peek()) == quote:
        reader.take(reader.at + 1)
        num_quotes += 1
    if num_quotes < 3:
        emit(_inside(quote * num_quotes))
    return num_quotes == 3


def _escape(reader: Reader) -> Reading[str]:
    """Takes what stands behind a backslash; as JSON says it inside a string."""
    kind = yield from reader.peek()
    if not kind:
        raise Untranslatable("\\")
    reader.take(reader.at + 1)
    if kind in _ESCAPES:
        return _inside(_ESCAPES[kind])
    if kind == "N":
        return (yield from _named(reader))
    if kind in "01234567":
        return _inside(chr((yield from _octal(reader, int(kind)))))
    if kind not in _NUM_DIGITS:
        return _inside("\\" + kind)  # Python leaves it as it is
    digits = ""
    while len(digits) < _NUM_DIGITS[kind] and _is_hex((yield from reader.peek())):
        digits += reader.take(reader.at + 1)
    if len(digits) < _NUM_DIGITS[kind] or int(digits, 16) > 0x10FFFF:
        raise Untranslatable(f"\\{kind}{digits}")
    code = int(digits, 16)
    # Halves of a surrogate pair stay escapes: UTF-8 cannot spell them, and JSON joins two of them.
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else _inside(chr(code))


def _octal(reader: Reader, number: int) -> Reading[int]:
    for _ in range(2):
        digit = yield from reader.peek()
        if not digit or digit not in "01234567":
            break
        number = number * 8 + int(reader.take(reader.at + 1))
    return number


def _named(reader: Reader) -> Reading[str]:
    r"""`\N{EM DASH}`, behind the N."""
    reader.hold()
    try:
        yield from reader.expect("{")
        name = yield from reader.run(_CHARACTER_NAME)
        yield from reader.expect("}")
        character = unicodedata.lookup(name)
    except (NotThisForm, KeyError):
        raise Untranslatable("\\N" + reader.release()) from None
    reader.release()
    return _inside(character)


def _is_hex(character: str) -> bool:
    return bool(character) and character in "0123456789abcdefABCDEF"


def _inside(text: str) -> str:
    """Text as it stands in a string of JSON."""
    return _as_json(text)[1:-1]


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
