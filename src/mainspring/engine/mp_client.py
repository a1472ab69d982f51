"""Clients of a core in another process: two thin drivers of one `Conversation`."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineDeadError, EngineError, innermost
from mainspring.base.messages import Command, CommandResult, EngineCoreOutputs, EngineCoreRequest
from mainspring.engine.client import EngineCoreClient
from mainspring.engine.conversation import Conversation
from mainspring.engine.launch import ConfigSource, CoreAddress, CoreProcess, JoinedCore

WATCH_S = 0.1  # how often a silent core's process is looked at
LINGER_S = 1.0  # for what a front end that leaves has said to a core that goes on
MAX_UNREAD = 64  # messages; then they stay in the socket, and the core notices


class _Sockets:
    """The two ends of ours, of either kind: we bind where outputs come in, the core binds where requests
    go."""

    def __init__(self, context: Any, input_address: str, output_address: str) -> None:
        self.requests = context.socket(zmq.PUSH)
        # A stopped core must not stop us: admission has its own limits.
        self.requests.setsockopt(zmq.SNDHWM, 0)
        # A client that is dropped without `shutdown` must not wait for a core that may be gone.
        self.requests.setsockopt(zmq.LINGER, 0)
        self.requests.connect(input_address)
        self.outputs = context.socket(zmq.PULL)
        self.outputs.bind(output_address)

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: for requests that have not left yet; none where the core has ended."""
        self.requests.close(linger=int(linger_s * 1000))
        self.outputs.close(linger=0)


class SyncMPClient(EngineCoreClient):
    """For a caller that waits: `get_output` blocks until the core says something or dies."""

    def __init__(self, config: ConfigSource, shutdown_timeout_s: float = 0.0) -> None:
        self._talk = Conversation()
        self._early: deque[EngineCoreOutputs] = deque()  # news that came while an answer was waited for
        self._unfinished: set[str] = set()
        self._owner = os.getpid()
        self.process = CoreProcess(config, shutdown_timeout_s=shutdown_timeout_s)
        self.max_model_len = self.process.ready.max_model_len
        self.cache_facts = self.process.ready.cache_facts
        self._context = zmq.Context()
        self._sockets = _Sockets(self._context, self.process.input_address, self.process.output_addresses[0])

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(self._talk.add(request))
        self._unfinished.add(request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        if self._talk.cause_of_death is None:
            self._send(self._talk.abort(request_ids))

    def call(self, command: Command) -> CommandResult:
        answer: Future[CommandResult] = Future()
        self._send(self._talk.call(command, answer))
        while not answer.done():
            if (news := self._receive()) is not None:
                self._early.append(news)
        return answer.result()

    def get_output(self) -> EngineCoreOutputs:
        """Waits for news, but not for ever, so that a caller can be interrupted: empty after `WATCH_S`, and
        at once when no request is live."""
        self._talk.check_alive()
        news = self._early.popleft() if self._early else None
        if news is None and self._unfinished:
            news = self._receive()
        if news is None:
            return EngineCoreOutputs()
        self._unfinished.difference_update(o.request_id for o in news.outputs if o.finish_reason is not None)
        return news

    def shutdown(self) -> None:
        self._talk.died("the engine was shut down")
        self.process.close()
        self._sockets.close()
        self._context.term()

    def _send(self, frames: list[bytes]) -> None:
        self._check_owner()
        self._sockets.requests.send_multipart(frames)

    def _check_owner(self) -> None:
        """Sockets do not survive a fork: a child that used ours would wait for ever."""
        if os.getpid() != self._owner:
            raise EngineError("this engine belongs to the process that made it; make another after the fork")

    def _receive(self) -> EngineCoreOutputs | None:
        """The next message; None if none came for `WATCH_S`, or if it was an answer. What a dead core has
        said before is read to its end first."""
        self._check_owner()
        if not self._sockets.outputs.poll(int(WATCH_S * 1000)):
            if (end := self.process.how_it_ended()) is not None and not self._sockets.outputs.poll(0):
                raise self._talk.died(end)
            return None
        return self._talk.hear(self._sockets.outputs.recv_multipart())


class AsyncMPClient:
    """For an event loop: the same contract, awaited. One task receives; `get_output` takes what it left.

    Created and used on one loop.
    """

    def __init__(
        self, process: CoreProcess | JoinedCore, client_index: int = 0, *, owns_process: bool = True
    ) -> None:
        self._talk = Conversation(client_index)
        self.process = process
        self.max_model_len = process.ready.max_model_len
        self._owns_process = owns_process
        self._news: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue(MAX_UNREAD)
        self._context = zmq.asyncio.Context()
        self._sockets = _Sockets(self._context, process.input_address, process.output_addresses[client_index])
        self._receiver = asyncio.create_task(self._receive(), name="mainspring-outputs")

    @classmethod
    async def launch(cls, config: EngineConfig, shutdown_timeout_s: float = 0.0) -> AsyncMPClient:
        """Start a core of its own; the loop goes on meanwhile."""
        make = partial(CoreProcess, config, shutdown_timeout_s=shutdown_timeout_s)
        return cls(await asyncio.to_thread(make))

    @classmethod
    async def join(cls, address: CoreAddress, client_index: int) -> AsyncMPClient:
        """Share a core that another process has started for several front ends."""
        return cls(JoinedCore(address), client_index, owns_process=False)

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._send(self._talk.add(request))

    async def abort_requests(self, request_ids: list[str]) -> None:
        if self._talk.cause_of_death is None:
            await self._send(self._talk.abort(request_ids))

    async def call(self, command: Command) -> CommandResult:
        answer: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        await self._send(self._talk.call(command, answer))
        return await answer

    async def get_output(self) -> EngineCoreOutputs:
        """The next news. Raises `EngineDeadError`, again at every call, once the core has ended."""
        if self._news.empty():
            self._talk.check_alive()
        news = await self._news.get()
        if isinstance(news, EngineDeadError):
            raise news
        return news

    async def shutdown(self) -> None:
        """What the core says while it drains can still be read; who waits for more gets `EngineDeadError`."""
        if self._owns_process:
            await asyncio.to_thread(self.process.close)
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        linger_s = 0.0 if self._owns_process or self._talk.cause_of_death else LINGER_S
        self._end(self._talk.died("the engine was shut down"))
        self._sockets.close(linger_s)
        await asyncio.to_thread(self._context.term)
        if isinstance(self.process, JoinedCore):
            self.process.close()

    async def _send(self, frames: list[bytes]) -> None:
        await self._sockets.requests.send_multipart(frames)

    async def _receive(self) -> None:
        try:
            while True:
                if not await self._sockets.outputs.poll(int(WATCH_S * 1000)):
                    end = self.process.how_it_ended()
                    if end is not None and not await self._sockets.outputs.poll(0):
                        raise self._talk.died(end)
                    continue
                if (news := self._talk.hear(await self._sockets.outputs.recv_multipart())) is not None:
                    await self._news.put(news)
        except EngineDeadError as error:
            self._end(error)
        except Exception as error:
            self._end(self._talk.died(f"the client of the engine core failed: {innermost(error)}"))

    def _end(self, error: EngineDeadError) -> None:
        """Wake who waits for news. While some are unread nobody does; `get_output` raises behind them."""
        if self._news.empty():
            self._news.put_nowait(error)
