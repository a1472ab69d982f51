"""Clients of a core in another process: two thin drivers of one `Conversation`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

import zmq

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineDeadError, EngineError, innermost
from mainspring.base.messages import Command, CommandResult, EngineCoreOutputs, EngineCoreRequest
from mainspring.engine.client import EngineCoreClient
from mainspring.engine.conversation import Conversation
from mainspring.engine.launch import ConfigSource, CoreAddress, CoreProcess, JoinedCore
from mainspring.engine.wire import Frames

WATCH_S = 0.1  # how often a silent core's process is looked at
LINGER_S = 1.0  # for what a front end that leaves has said to a core that goes on
MAX_UNREAD = 64  # messages; then they stay in the socket, and the core notices


class _Sockets:
    """The two ends of ours, of either kind: we bind where outputs come in, the core binds where requests
    go."""

    def __init__(self, process: CoreProcess | JoinedCore, client_index: int = 0) -> None:
        """Raises `EngineDeadError` if that is not possible: the core has ended, and their folder with it."""
        self._context = zmq.Context()
        self._closing = threading.Lock()
        try:
            self.requests = self._context.socket(zmq.PUSH)
            # A stopped core must not stop us: admission has its own limits.
            self.requests.setsockopt(zmq.SNDHWM, 0)
            # A client that is dropped without `shutdown` must not wait for a core that may be gone.
            self.requests.setsockopt(zmq.LINGER, 0)
            self.requests.connect(process.input_address)
            self.outputs = self._context.socket(zmq.PULL)
            self.outputs.setsockopt(zmq.RCVTIMEO, int(WATCH_S * 1000))
            self.outputs.bind(process.output_addresses[client_index])
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EngineDeadError(f"the engine core cannot be reached: {error}") from None

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: for requests that have not left yet; none where the core has ended. Idempotent, also
        from two threads: who sees the core's death may be closing when the caller's `shutdown` comes."""
        with self._closing:  # of two that end a context at once, one would wait for ever
            self.requests.close(linger=int(linger_s * 1000))
            self.outputs.close(linger=0)
            self._context.term()


def check_owner(pid: int) -> None:
    """Neither sockets nor threads survive a fork: a child that used a client of its parent, the process
    `pid`, would wait for ever. Raises `EngineError`."""
    if os.getpid() != pid:
        raise EngineError("this engine belongs to the process that made it; make another after the fork")


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
        try:
            self._sockets = _Sockets(self.process)
        except BaseException:
            self.process.close()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(self._talk.add(request))
        self._unfinished.add(request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        if self._talk.cause_of_death is None:
            self._send(self._talk.abort(request_ids))

    def call(self, command: Command, timeout_s: float | None = None) -> CommandResult:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        answer: Future[CommandResult] = Future()
        self._send(self._talk.call(command, answer))
        while not answer.done():
            if deadline_s is not None and time.monotonic() > deadline_s:
                answer.cancel()  # should it come, it is passed over
                raise TimeoutError(f"the engine core does not answer within {timeout_s} s")
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

    def _send(self, frames: Frames) -> None:
        check_owner(self._owner)
        self._sockets.requests.send_multipart(frames)

    def _receive(self) -> EngineCoreOutputs | None:
        """The next message; None if none came for `WATCH_S`, or if it was an answer. What a dead core has
        said before is read to its end first."""
        check_owner(self._owner)
        try:
            frames = self._sockets.outputs.recv_multipart()
        except zmq.Again:
            if (end := self.process.how_it_ended()) is not None and not self._sockets.outputs.poll(0):
                raise self._talk.died(end) from None
            return None
        return self._talk.hear(frames)


class AsyncMPClient:
    """For an event loop: the same contract, awaited. What arrives is read when the loop finds the socket
    readable, and `get_output` takes it from there.

    Created and used on one loop.
    """

    num_engines = 1

    def __init__(
        self, process: CoreProcess | JoinedCore, client_index: int = 0, *, owns_process: bool = True
    ) -> None:
        self._talk = Conversation(client_index)
        self.process = process
        self.max_model_len = process.ready.max_model_len
        self._owns_process = owns_process
        self._news: deque[EngineCoreOutputs] = deque()
        self._arrived = asyncio.Event()  # news, or the end
        self._is_held = False
        self._sockets = _Sockets(process, client_index)
        self._loop = asyncio.get_running_loop()
        self._watch = self._loop.call_later(WATCH_S, self._look_at_process)
        self._resume()

    @classmethod
    async def launch(cls, config: EngineConfig, shutdown_timeout_s: float = 0.0) -> AsyncMPClient:
        """Start a core of its own; the loop goes on meanwhile."""
        given_up = threading.Event()
        make = partial(CoreProcess, config, shutdown_timeout_s=shutdown_timeout_s, given_up=given_up)
        try:
            return cls(await asyncio.to_thread(make))
        except asyncio.CancelledError:
            given_up.set()  # or the interpreter's end would wait for the thread
            raise

    @classmethod
    async def join(cls, address: CoreAddress, client_index: int) -> AsyncMPClient:
        """Share a core that another process has started for several front ends."""
        return cls(JoinedCore(address), client_index, owns_process=False)

    @property
    def is_leaving(self) -> bool:
        """The core was asked to end: it aborts what it is sent, and at its deadline what it has."""
        return self._talk.is_leaving

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._send(self._talk.add(request))

    async def abort_requests(self, request_ids: list[str]) -> None:
        if self._talk.cause_of_death is None:
            self._send(self._talk.abort(request_ids))

    async def start_wave(self, number: int) -> None:
        """For ranks in lock-step: another has work."""
        self._send(self._talk.start_wave(number))

    async def call(self, command: Command) -> CommandResult:
        answer: asyncio.Future[CommandResult] = self._loop.create_future()
        self._send(self._talk.call(command, answer))
        return await answer

    async def get_output(self) -> EngineCoreOutputs:
        """The next news. Raises `EngineDeadError`, again at every call, once the core has ended and all it
        said was read."""
        while not self._news:
            self._talk.check_alive()
            self._arrived.clear()
            if self._is_held:
                self._resume()
            else:
                await self._arrived.wait()
        return self._news.popleft()

    async def shutdown(self) -> None:
        """What the core says while it drains can still be read; who waits for more gets `EngineDeadError`."""
        if self._owns_process:
            await asyncio.to_thread(self.process.close)
        linger_s = 0.0 if self._owns_process or self._talk.cause_of_death else LINGER_S
        self._part()
        await asyncio.to_thread(self._sockets.close, linger_s)
        if isinstance(self.process, JoinedCore):
            self.process.close()

    def close(self) -> None:
        """`shutdown` at once, for a core whose process has ended. Idempotent, also after a `shutdown`."""
        self._part()
        self._sockets.close()

    def _part(self) -> None:
        self._talk.died("the engine was shut down")
        self._watch.cancel()
        self._end()

    def _send(self, frames: Frames) -> None:
        self._sockets.requests.send_multipart(frames)  # it always has room

    def _resume(self) -> None:
        self._is_held = False
        self._loop.add_reader(self._sockets.outputs.fileno(), self._read)
        self._read()

    def _hold(self) -> None:
        """Nobody takes the news: what else comes stays in the socket."""
        self._is_held = True
        self._loop.remove_reader(self._sockets.outputs.fileno())

    def _read(self) -> bool:
        """All that has arrived, since the descriptor becomes readable once for all of it, as far as there is
        room for it. True if nothing was left in the socket."""
        try:
            while not self._is_held:
                news = self._talk.hear(self._sockets.outputs.recv_multipart(zmq.NOBLOCK))
                if news is not None:
                    self._news.append(news)
                    self._arrived.set()
                    if len(self._news) >= MAX_UNREAD:
                        self._hold()
        except zmq.Again:
            return True
        except EngineDeadError:
            self._end()
        except Exception as error:
            self._talk.died(f"the client of the engine core failed: {innermost(error)}")
            self._end()
        return False

    def _look_at_process(self) -> None:
        """What a dead core has said before is read to its end first. One that has said itself that it ends is
        looked at until it has: its process would stay behind as a zombie."""
        end = self.process.how_it_ended()
        if end is not None and self._talk.cause_of_death is None and self._read():
            self._talk.died(end)
            self._end()
        if end is None or self._talk.cause_of_death is None:
            self._watch = self._loop.call_later(WATCH_S, self._look_at_process)

    def _end(self) -> None:
        """Nothing is read any more; who waits for news is told of the end."""
        if not self._is_held:  # else the sockets may be being closed
            self._hold()
        self._arrived.set()
