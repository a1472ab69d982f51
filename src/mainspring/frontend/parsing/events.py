"""What an answer says, in the order in which it says it.

Rule 1. Texts of one kind that follow each other are one text that came in pieces.
Rule 2. Calls do not overlap: `CallBegins`, any number of `CallArguments`, `CallEnds`, all of one index.
        Indices count 0, 1, ...; a call that was begun is always ended, at the latest where the text ends.
Rule 3. The arguments of a call, joined, are JSON text as the model wrote it. Nobody has checked it: a model
        may write what is not JSON, and an answer may be cut in the middle of it.
"""

from __future__ import annotations

from itertools import groupby

import msgspec


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str  # never empty


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str  # never empty


class CallBegins(msgspec.Struct, frozen=True, gc=False):
    index: int
    name: str  # never empty; whether there is such a tool is not known here


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    index: int
    text: str  # never empty


class CallEnds(msgspec.Struct, frozen=True, gc=False):
    index: int


Event = Reasoning | Content | CallBegins | CallArguments | CallEnds
_TEXTS = (Reasoning, Content, CallArguments)


def joined(events: list[Event]) -> list[Event]:
    """The same, with neighbouring texts of one kind as one: what a whole answer, and the same answer in any
    pieces, have in common."""
    result: list[Event] = []
    for _, group in groupby(events, type):
        first, *others = group
        if isinstance(first, _TEXTS):
            text = "".join(event.text for event in (first, *others) if isinstance(event, _TEXTS))
            result.append(msgspec.structs.replace(first, text=text))
        else:
            result += [first, *others]
    return result
