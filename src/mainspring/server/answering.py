"""From prompts to an answer on the wire, whole or streamed: the same for every endpoint that generates.

Rules.
1. A request is accepted by the engine before the first byte of a reply is sent, so whatever can be refused is
   refused with a status of its own; after that a failure is the stream's last event but one.
2. Every stream ends: with `[DONE]` or the event that its API ends with, after an error too. Only a client
   that has left gets nothing.
3. When a reply is over, in whatever way, nothing of it is left in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mainspring.base.outputs import RequestOutput
from mainspring.base.params import PoolingParams, SamplingParams
from mainspring.frontend.async_llm import AsyncLLM, RequestStream
from mainspring.server.errors import ApiError, as_api_error
from mainspring.server.http import JSONReply, cancelled, disconnected, encode, while_connected
from mainspring.server.prompts import LONG_CHARACTERS, TokenPrompt, off_loop_if
from mainspring.server.writing import Writer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment


class Framing(NamedTuple):
    """How a stream's parts stand on the wire."""

    event: Callable[[Any], bytes]
    failure: Callable[[ApiError], bytes]  # of a stream that cannot go on
    end: bytes  # after the last event
    keep_alive: bytes = KEEP_ALIVE  # for a stream that has nothing else to say


class Question(NamedTuple):
    """What the engine is asked: prompts that share their parameters."""

    id: str
    prompts: Sequence[TokenPrompt]
    params: SamplingParams | PoolingParams
    priority: int
    cache_salt: str | None
    trace_headers: Mapping[str, str]
    data_parallel_rank: int | None = None


async def answer(
    llm: AsyncLLM,
    request: Request,
    question: Question,
    writer: Writer,
    keep_alive_s: float | None,
    framing: Framing | None = None,
) -> Response:
    """`keep_alive_s` is None for a reply in one piece; 0: a stream that is silent while nothing happens.
    `framing` is that of chats and completions unless another is given."""
    if keep_alive_s is None:
        return JSONReply(await while_connected(request.receive, _whole(llm, question, writer)))
    async with AsyncExitStack() as opened:
        streams = [await opened.enter_async_context(stream) async for stream in ask(llm, question)]
        return EventStream(streams, opened.pop_all(), writer, keep_alive_s, framing)


async def _whole(llm: AsyncLLM, question: Question, writer: Writer) -> msgspec.Struct:
    outputs = await whole_outputs(llm, question)
    return await off_loop_if(are_long(outputs), lambda: writer.whole(outputs))


def are_long(outputs: Sequence[RequestOutput]) -> bool:
    """Whether it takes long to read what they say."""
    return sum(len(answer.text) for output in outputs for answer in output.outputs) > LONG_CHARACTERS


async def whole_outputs(llm: AsyncLLM, question: Question) -> list[RequestOutput]:
    """The last output of each prompt, in their order."""
    async with AsyncExitStack() as opened:
        streams = [await opened.enter_async_context(stream) async for stream in ask(llm, question)]
        return [await anext(stream) for stream in streams]


async def ask(llm: AsyncLLM, question: Question) -> AsyncIterator[RequestStream]:
    for prompt in question.prompts:
        yield await llm.add_request(
            question.id,  # of all of them: an abort by it ends all
            prompt.as_prompt(),
            question.params,
            priority=question.priority,
            cache_salt=question.cache_salt,
            trace_headers=question.trace_headers,
            data_parallel_rank=question.data_parallel_rank,
        )


class ByteStream(Response):
    """Server-sent events, written as they come. A reader that is slow is waited for."""

    media_type = "text/event-stream"

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        opened: AsyncExitStack,
        keep_alive_s: float,
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        """`pieces`: whole events. `opened` is closed at the end, whichever it is."""
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # for proxies that would wait for more
        self._pieces = pieces
        self._opened = opened
        self._keep_alive_s = keep_alive_s
        self._sign_of_life = keep_alive
        self._last_write_s = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._opened:
            writing = asyncio.ensure_future(self._write(send))
            gone = asyncio.ensure_future(disconnected(receive))
            tasks: set[asyncio.Future[Any]] = {writing, gone}
            if self._keep_alive_s:
                tasks.add(asyncio.ensure_future(self._keep_alive(send)))
            try:
                await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
            finally:
                await cancelled(*tasks)

    async def _write(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await self._send(send, piece)
        await self._send(send, b"", more=False)

    async def _send(self, send: Any, events: bytes, more: bool = True) -> None:
        if self._keep_alive_s:
            self._last_write_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": events, "more_body": more})

    async def _keep_alive(self, send: Any) -> None:
        """A sign of life whenever nothing was sent for so long."""
        loop = asyncio.get_running_loop()
        self._last_write_s = loop.time()
        while True:
            silent_s = loop.time() - self._last_write_s
            if silent_s >= self._keep_alive_s:
                await self._send(send, self._sign_of_life)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)


class EventStream(ByteStream):
    """What the engine says. While a slow reader is waited for, outputs are merged: he gets fewer and longer
    events."""

    def __init__(
        self,
        streams: Sequence[RequestStream],
        opened: AsyncExitStack,
        writer: Writer,
        keep_alive_s: float,
        framing: Framing | None = None,
    ) -> None:
        """`framing` is that of chats and completions unless another is given."""
        framing = framing or OPENAI
        super().__init__(_events(streams, writer, framing), opened, keep_alive_s, framing.keep_alive)


async def _events(
    streams: Sequence[RequestStream], writer: Writer, framing: Framing
) -> AsyncGenerator[bytes, None]:
    def encoded(index: int, output: RequestOutput) -> bytes:
        return b"".join([framing.event(chunk) for chunk in writer.chunks(index, output)])

    try:
        async with aclosing(_merged(streams)) as outputs:
            async for index, output in outputs:
                if events := await off_loop_if(are_long([output]), partial(encoded, index, output)):
                    yield events
        rest = b"".join(map(framing.event, writer.last()))
    except Exception as error:
        rest = framing.failure(as_api_error(error))
    if rest := rest + framing.end:
        yield rest


def event(data: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % encode(data)


def named_event(name: str, data: msgspec.Struct) -> bytes:
    """As some APIs have them: with the event's name beside its data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(data))


def typed_event(data: msgspec.Struct) -> bytes:
    """One whose name is its `type`."""
    tag = type(data).__struct_config__.tag
    assert isinstance(tag, str)
    return named_event(tag, data)


OPENAI = Framing(event, lambda error: event(error.reply), DONE)


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """What comes from any of them, with its index, in the order in which it comes."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ready, key=waiting.__getitem__):
                index = waiting.pop(task)
                output = task.result()
                yield index, output
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        await cancelled(*waiting)
