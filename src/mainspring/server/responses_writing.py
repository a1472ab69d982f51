"""`/v1/responses`: outputs of the engine, as a response and as the events of its stream.

A pure fold, as every writer is: what an answer says (`frontend/parsing/events.py`) becomes items. At most one
is open at a time, and whatever happens to it is an event:

    created, in_progress
    of each item: output_item.added, content_part.added, a delta for each piece of its text, that the text is
    done, content_part.done, output_item.done; a call has no parts
    completed | incomplete | failed

Rules.
1. Sequence numbers count the events, from 0. However an answer is cut into outputs, the response at its end
   is the same, and so are the events but for where deltas are cut.
2. An answer that says nothing at all is one empty message: every response that was completed has an item.
3. What ends an answer early leaves its open item `incomplete`; a call whose arguments are no JSON is that,
   too. Nothing comes after the last event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.frontend.parsing.events import CallArguments, CallBegins, CallEnds, Content, Event, Reasoning
from mainspring.server.errors import ApiError
from mainspring.server.replies import ChosenLogprob
from mainspring.server.responses_types import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Failed,
    FunctionCall,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponsesReply,
    ResponseUsage,
    Status,
    TextDelta,
    TextDone,
)
from mainspring.server.writing import Tally, check_no_error

Events = Iterator[ResponseEvent]
LogprobsOf = Callable[[CompletionOutput], list[ChosenLogprob]]


class Reader(Protocol):
    """Of one answer: see `conversation.py`."""

    @property
    def num_reasoning_tokens(self) -> int: ...

    def read(self, answer: CompletionOutput) -> list[Event]: ...


class ResponsesWriter:
    """Fits `writing.Writer`. One conversation, one answer."""

    def __init__(
        self,
        reply: ResponsesReply,
        reader: Reader,
        new_call_id: Callable[[], str],
        logprobs_of: LogprobsOf | None = None,
        include_reasoning: bool = True,
    ) -> None:
        """`reply`: the response before anything was said. `logprobs_of`: where they are asked for, which
        needs an answer that is one message."""
        self._reply = reply
        self._reader = reader
        self._new_call_id = new_call_id
        self._logprobs_of = logprobs_of
        self._include_reasoning = include_reasoning
        self._stem = reply.id.partition("_")[2]
        self._number = 0  # of the next event
        self._done: list[OutputItem] = []
        self._open: _Open | None = None
        self._logprobs: list[ChosenLogprob] = []  # of tokens whose text has not come yet
        self._tally = Tally()
        self._has_begun = False
        self.is_over = False

    @property
    def reply(self) -> ResponsesReply:
        """The response as it stands."""
        open_items = [] if self._open is None else [self._open.item("in_progress")]
        return replace(self._reply, output=self._done + open_items)

    # --- as the engine answers ------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> ResponsesReply:
        [output] = outputs
        for answer in output.outputs:
            check_no_error(answer)
        for _ in self.chunks(0, output):
            pass
        return self.reply

    def chunks(self, prompt_index: int, output: RequestOutput) -> Events:
        yield from self._begin()
        self._tally.add(prompt_index, output)
        if output.warnings:
            self._reply.warnings = output.warnings
        for answer in output.outputs:
            if self._logprobs_of is not None:
                self._logprobs += self._logprobs_of(answer)
            for event in self._reader.read(answer):
                yield from self._say(event)
            if answer.finish_reason is not None:
                yield from self._end(answer)

    def last(self) -> Events:
        yield from ()

    # --- ends -----------------------------------------------------------------------------------------------

    def failed(self, error: ApiError) -> Events:
        """The end of an answer that cannot go on."""
        if not self.is_over:
            yield from self._begin()
            self._reply.error = ResponseError(message=error.message)
            yield self._finish("failed", Failed)

    def cancelled(self) -> Events:
        """The end of an answer that nobody waits for any more."""
        if not self.is_over:
            yield from self._begin()
            yield self._finish("cancelled", Incomplete)

    def _end(self, answer: CompletionOutput) -> Events:
        match answer.finish_reason:
            case "error":
                yield from self.failed(ApiError(500, answer.error or "no cause is known"))
            case "abort":
                yield from self.cancelled()
            case "length":
                self._reply.incomplete_details = IncompleteDetails()
                yield from self._close_last("incomplete")
                yield self._finish("incomplete", Incomplete)
            case _:
                yield from self._close_last("completed")
                # A stop string may have cut a call, which then was not made.
                if isinstance(answer.stop_reason, str) and self._done[-1].status == "incomplete":
                    yield self._finish("incomplete", Incomplete)
                else:
                    yield self._finish("completed", Completed)

    def _close_last(self, status: ItemStatus) -> Events:
        if self._open is None and not self._done:
            yield from self._enter(_Message, "msg")
        yield from self._close(status)

    def _finish(self, status: Status, kind: type[Completed | Incomplete | Failed]) -> ResponseEvent:
        if self._open is not None:
            self._done.append(self._open.item("incomplete"))
            self._open = None
        self._reply.status = status
        self._reply.usage = self._usage()
        self.is_over = True
        return self._numbered(kind(sequence_number=0, response=self.reply))

    def _usage(self) -> ResponseUsage:
        counted = self._tally.usage()
        return ResponseUsage(
            input_tokens=counted.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=self._tally.num_cached_tokens or 0),
            output_tokens=counted.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reader.num_reasoning_tokens),
            total_tokens=counted.total_tokens,
        )

    # --- items ----------------------------------------------------------------------------------------------

    def _begin(self) -> Events:
        if not self._has_begun:
            self._has_begun = True
            self._reply.status = "in_progress"
            for kind in (Created, InProgress):
                yield self._numbered(kind(sequence_number=0, response=self.reply))

    def _say(self, event: Event) -> Events:
        match event:
            case Content(text):
                if not isinstance(self._open, _Message):
                    yield from self._enter(_Message, "msg")
                yield self._grow(text)
            case Reasoning(text):
                if self._include_reasoning:
                    if not isinstance(self._open, _Reasoning):
                        yield from self._enter(_Reasoning, "rs")
                    yield self._grow(text)
            case CallBegins(_, name):
                yield from self._enter(partial(_Call, name, self._new_call_id()), "fc")
            case CallArguments(_, text):
                yield self._grow(text)
            case CallEnds():
                yield from self._close("completed")

    def _enter(self, make: Callable[[str, int], _Open], prefix: str) -> Events:
        yield from self._close("completed")
        index = len(self._done)
        self._open = make(f"{prefix}_{self._stem}_{index}", index)
        for event in self._open.begins():
            yield self._numbered(event)

    def _grow(self, text: str) -> ResponseEvent:
        assert self._open is not None
        logprobs, self._logprobs = self._logprobs, []
        return self._numbered(self._open.grows(text, logprobs))

    def _close(self, status: ItemStatus) -> Events:
        if self._open is not None:
            item, events = self._open.ends(status, self._logprobs)
            self._done.append(item)
            self._open = None
            for event in events:
                yield self._numbered(event)

    def _numbered(self, event: ResponseEvent) -> ResponseEvent:
        event.sequence_number = self._number
        self._number += 1
        return event


# -- items that are open -------------------------------------------------------------------------------------


class _Open(ABC):
    """An item whose text is still coming. Its events are numbered by the writer."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._pieces: list[str] = []
        self._of_output: dict[str, Any] = {"sequence_number": 0, "output_index": index}
        self._of_item = self._of_output | {"item_id": item_id}

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def begins(self) -> list[ResponseEvent]:
        return [ItemAdded(item=self.item("in_progress"), **self._of_output)]

    def grows(self, text: str, logprobs: list[ChosenLogprob]) -> ResponseEvent:
        self._pieces.append(text)
        return self._delta(text, logprobs)

    def ends(
        self, status: ItemStatus, logprobs: list[ChosenLogprob]
    ) -> tuple[OutputItem, list[ResponseEvent]]:
        """The item, and what is to be told of it. `logprobs`: those that no text brought."""
        told = self._told(logprobs)
        item = self.item(status)
        return item, [*told, ItemDone(item=item, **self._of_output)]

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem: ...

    @abstractmethod
    def _delta(self, text: str, logprobs: list[ChosenLogprob]) -> ResponseEvent: ...

    @abstractmethod
    def _told(self, logprobs: list[ChosenLogprob]) -> list[ResponseEvent]:
        """The events of a text that is complete."""


class _Message(_Open):
    def __init__(self, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._logprobs: list[ChosenLogprob] = []

    def item(self, status: ItemStatus) -> OutputMessage:
        is_new = status == "in_progress" and not self._pieces
        return OutputMessage(id=self._id, content=[] if is_new else [self._part()], status=status)

    def begins(self) -> list[ResponseEvent]:
        return [*super().begins(), PartAdded(part=OutputText(text="", logprobs=[]), **self._of_item)]

    def _delta(self, text: str, logprobs: list[ChosenLogprob]) -> ResponseEvent:
        self._logprobs += logprobs
        return TextDelta(delta=text, logprobs=logprobs, **self._of_item)

    def _told(self, logprobs: list[ChosenLogprob]) -> list[ResponseEvent]:
        self._logprobs += logprobs
        return [
            TextDone(text=self._text, logprobs=self._logprobs, **self._of_item),
            PartDone(part=self._part(), **self._of_item),
        ]

    def _part(self) -> OutputText:
        return OutputText(text=self._text, logprobs=self._logprobs or None)


class _Reasoning(_Open):
    def item(self, status: ItemStatus) -> ReasoningItem:
        content = [ReasoningText(text=self._text)] if self._pieces else []
        return ReasoningItem(id=self._id, content=content, status=status)

    def begins(self) -> list[ResponseEvent]:
        return [*super().begins(), PartAdded(part=ReasoningText(text=""), **self._of_item)]

    def _delta(self, text: str, logprobs: list[ChosenLogprob]) -> ResponseEvent:
        return ReasoningDelta(delta=text, **self._of_item)

    def _told(self, logprobs: list[ChosenLogprob]) -> list[ResponseEvent]:
        text = self._text
        return [
            ReasoningDone(text=text, **self._of_item),
            PartDone(part=ReasoningText(text=text), **self._of_item),
        ]


class _Call(_Open):
    def __init__(self, name: str, call_id: str, item_id: str, index: int) -> None:
        super().__init__(item_id, index)
        self._name, self._call_id = name, call_id

    def item(self, status: ItemStatus) -> FunctionCall:
        if status == "completed" and not _is_json(self._text):
            status = "incomplete"
        return FunctionCall(
            id=self._id, call_id=self._call_id, name=self._name, arguments=self._text, status=status
        )

    def _delta(self, text: str, logprobs: list[ChosenLogprob]) -> ResponseEvent:
        return ArgumentsDelta(delta=text, **self._of_item)

    def _told(self, logprobs: list[ChosenLogprob]) -> list[ResponseEvent]:
        return [ArgumentsDone(name=self._name, arguments=self._text, **self._of_item)]


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
