"""`/v1/messages`: outputs of the engine, as a message and as the events of its stream.

A pure fold, as every writer is: what an answer says (`frontend/parsing/events.py`) becomes blocks, at most
one of which is open at a time:

    message_start
    of each block: content_block_start, content_block_delta, ..., content_block_stop
    message_delta, message_stop

Rules.
1. However an answer is cut into outputs, the message at its end is the same, and so are the events but for
   where deltas are cut.
2. An answer that says nothing has no block.
3. The input of a call is the object that the model wrote. What is none (the answer was cut in it, or the
   model erred) is {"INVALID_JSON": text}, as that API lets clients say it; a stream has the text itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.frontend.chat_template import INVALID_JSON
from mainspring.frontend.parsing.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    Content,
    Event,
    Reasoning,
    joined,
)
from mainspring.server.errors import LOADING_RETRY_AFTER_S, ApiError
from mainspring.server.messages_types import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    Message,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokens,
    SignatureDelta,
    Stop,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from mainspring.server.writing import Tally, check_no_error

Events = Iterator[MessageEvent]
NO_INPUT = msgspec.Raw(b"{}")


class Reader(Protocol):
    """Of one answer: see `conversation.py`."""

    @property
    def has_calls(self) -> bool: ...

    @property
    def num_reasoning_tokens(self) -> int: ...

    def read(self, answer: CompletionOutput) -> list[Event]: ...


class MessagesWriter:
    """Fits `writing.Writer`. One conversation, one answer."""

    def __init__(
        self,
        message_id: str,
        model: str,
        reader: Reader,
        call_id: Callable[[], str],
        shows_thinking: bool = True,
    ) -> None:
        """`call_id` makes a new one."""
        self._id = message_id
        self._model = model
        self._reader = reader
        self._call_id = call_id
        self._shows_thinking = shows_thinking
        self._content: list[Block] = []  # those that are complete
        self._open: Block | None = None
        self._pieces: list[str] = []  # of the open one's text
        self._stop: Stop | None = None
        self._tally = Tally()
        self._has_begun = False

    def whole(self, outputs: Sequence[RequestOutput]) -> Message:
        [output] = outputs
        for _ in self.chunks(0, output):
            pass
        return self._message(self._usage())

    def chunks(self, prompt_index: int, output: RequestOutput) -> Events:
        for answer in output.outputs:
            check_no_error(answer)
        self._tally.add(prompt_index, output)
        if not self._has_begun:
            self._has_begun = True
            yield MessageStart(self._message(self._prompt_usage()))
        for answer in output.outputs:
            for event in joined(self._reader.read(answer)):
                yield from self._say(event)
            if answer.finish_reason is not None:
                yield from self._end(answer)

    def last(self) -> Events:
        yield from ()

    # --- blocks ---------------------------------------------------------------------------------------------

    def _say(self, event: Event) -> Events:
        match event:
            case Reasoning(text):
                if self._shows_thinking:
                    if not isinstance(self._open, ThinkingBlock):
                        yield from self._enter(ThinkingBlock())
                    yield self._grow(text)
            case Content(text):
                if not isinstance(self._open, TextBlock):
                    yield from self._enter(TextBlock())
                yield self._grow(text)
            case CallBegins(_, name):
                yield from self._enter(ToolUseBlock(self._call_id(), name, NO_INPUT))
            case CallArguments(_, text):
                yield self._grow(text)
            case CallEnds():
                yield from self._close()

    def _enter(self, block: Block) -> Events:
        yield from self._close()
        self._open = block
        yield BlockStart(len(self._content), msgspec.structs.replace(block))

    def _grow(self, text: str) -> BlockDelta:
        self._pieces.append(text)
        index = len(self._content)
        match self._open:
            case TextBlock():
                return BlockDelta(index, TextDelta(text))
            case ThinkingBlock():
                return BlockDelta(index, ThinkingDelta(text))
        return BlockDelta(index, InputDelta(text))

    def _close(self) -> Events:
        block, text, index = self._open, "".join(self._pieces), len(self._content)
        if block is None:
            return
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking = text
                block.signature = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
                yield BlockDelta(index, SignatureDelta(block.signature))
            case ToolUseBlock():
                block.input = _object(text)
        self._content.append(block)
        self._open = None
        self._pieces.clear()
        yield BlockStop(index)

    # --- ends -----------------------------------------------------------------------------------------------

    def _end(self, answer: CompletionOutput) -> Events:
        yield from self._close()
        self._stop = self._stop_of(answer)
        yield MessageDelta(self._stop, self._usage())
        yield MessageStop()

    def _stop_of(self, answer: CompletionOutput) -> Stop:
        """Raises `ApiError` for an answer that was taken away: this API has no name for it."""
        reason: StopReason = "end_turn"
        sequence = None
        if answer.finish_reason == "abort":
            raise ApiError(
                503, "the answer was ended before it was complete", retry_after_s=LOADING_RETRY_AFTER_S
            )
        if answer.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(answer.stop_reason, str):
            reason, sequence = "stop_sequence", answer.stop_reason
        elif self._reader.has_calls:
            reason = "tool_use"
        return Stop(reason, sequence)

    def _message(self, usage: MessageUsage) -> Message:
        reason, sequence = (None, None) if self._stop is None else msgspec.structs.astuple(self._stop)
        return Message(
            id=self._id,
            content=list(self._content),
            model=self._model,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _prompt_usage(self) -> MessageUsage:
        num_prompt, num_cached = self._tally.usage().prompt_tokens, self._tally.num_cached_tokens or 0
        return MessageUsage(
            input_tokens=num_prompt - num_cached, output_tokens=0, cache_read_input_tokens=num_cached
        )

    def _usage(self) -> MessageUsage:
        usage = self._prompt_usage()
        usage.output_tokens = self._tally.num_completion_tokens
        if num_thinking := self._reader.num_reasoning_tokens:
            usage.output_tokens_details = OutputTokens(num_thinking)
        return usage


def _object(text: str) -> msgspec.Raw:
    """See rule 3. A call of nothing has an empty one."""
    if not text.strip():
        return NO_INPUT
    encoded = text.encode("utf-8", "replace")
    try:
        msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode({INVALID_JSON: encoded.decode()}))
    return msgspec.Raw(encoded)
