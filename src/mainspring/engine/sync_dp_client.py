"""Several engine cores for a caller that waits: `DPLBAsyncMPClient`, on an event loop in a thread of its own.

A thread, so that it works wherever it is called: beside a loop that runs already, as in notebooks, and from
one thread after another. A call is one message to that loop and back. News are asked for ahead of time and
never given up half-way: what was taken from a rank's socket is passed on, or nobody would have it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import Command, CommandResult, EngineCoreOutputs, EngineCoreRequest
from mainspring.engine.client import EngineCoreClient
from mainspring.engine.dp_client import CoreGroup, DPLBAsyncMPClient
from mainspring.engine.mp_client import WATCH_S, check_owner
from mainspring.engine.router import Routing

T = TypeVar("T")


class SyncDPClient(EngineCoreClient):
    """Owns `group`, which ends with it: at `shutdown`, or at the latest when this object is collected."""

    def __init__(self, group: CoreGroup, routing: Routing = "load", *, by_priority: bool = False) -> None:
        """As `DPLBAsyncMPClient`."""
        self.max_model_len = group.ready.max_model_len
        self.cache_facts = group.ready.cache_facts
        self._unfinished: set[str] = set()
        self._news: Future[EngineCoreOutputs] | None = None
        self._owner = os.getpid()
        self._loop, thread = _running_loop()
        made: list[DPLBAsyncMPClient] = []
        self._release = weakref.finalize(self, _end, self._loop, thread, group, made)
        try:
            self._client = self._begin(_made(group, routing, by_priority)).result()
            made.append(self._client)
        except BaseException:
            self._release()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._begin(self._client.add_request(request)).result()
        self._unfinished.add(request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._unfinished.difference_update(request_ids)
        if self._release.alive:
            self._begin(self._client.abort_requests(request_ids)).result()

    def call(self, command: Command, timeout_s: float | None = None) -> CommandResult:
        answer = self._begin(self._client.call(command))
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()
            raise TimeoutError(f"the engine cores do not answer within {timeout_s} s") from None

    def get_output(self) -> EngineCoreOutputs:
        """Waits for news, but not for ever, so that a caller can be interrupted: empty after `WATCH_S`, and
        at once when no request is live."""
        self._check()
        if not self._unfinished:
            return EngineCoreOutputs()
        self._news = self._news or self._begin(self._client.get_output())
        try:
            news = self._news.result(WATCH_S)
        except TimeoutError:
            return EngineCoreOutputs()
        except EngineDeadError:
            self._news = None
            raise
        self._news = None
        self._unfinished.difference_update(o.request_id for o in news.outputs if o.finish_reason is not None)
        return news

    def shutdown(self) -> None:
        if self._release.alive:
            self._begin(self._client.shutdown()).result()
            self._release()

    def _begin(self, what: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self._check()
        except BaseException:
            what.close()
            raise
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _check(self) -> None:
        check_owner(self._owner)
        if not self._release.alive:
            raise EngineDeadError("the engine was shut down")


async def _made(group: CoreGroup, routing: Routing, by_priority: bool) -> DPLBAsyncMPClient:
    return DPLBAsyncMPClient(group, routing, by_priority=by_priority)


def _running_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """A loop that runs until it is stopped, and its thread, which closes it."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()

    thread = threading.Thread(target=run, name="mainspring-ranks", daemon=True)
    thread.start()
    return loop, thread


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    group: CoreGroup,
    made: Sequence[DPLBAsyncMPClient],
) -> None:
    """The cores first, then their client, and the loop at last: a socket that were left open would stop the
    collector for ever, which waits for what it has still to send."""
    group.close()
    loop.call_soon_threadsafe(_close, loop, made)
    if thread is not threading.current_thread():  # the collector may run there
        thread.join()


def _close(loop: asyncio.AbstractEventLoop, made: Sequence[DPLBAsyncMPClient]) -> None:
    for client in made:
        client.close()
    loop.stop()
