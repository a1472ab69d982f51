"""The core's post: threads and queues between its loop and the ZMQ sockets of its front ends, so that
(de)serialisation overlaps the forward pass.

Rule 1. The input thread decodes what arrives and queues it. What is said goes to the outbox of its front end,
        which has a queue and a thread (`outbox.py`).
Rule 2. An abort is queued twice: eagerly, to be seen during a step, and in order, to find a request whose ADD
        is still before it.
Rule 3. Outboxes are bounded. If the only front end does not read, the loop waits in `deliver`, where aborts
        still count. Where there are others they shall not wait with it: what is said to it is stored, up to
        `MAX_STORED_BYTES`, and then its requests end.
Rule 4. A message that does not decode, or names a client that there is not, hurts its sender's request alone.
        A thread that fails reports why, as an item of the input, and the loop ends with that cause.
Rule 5. At the core's end a client that does not read holds nobody.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from mainspring.base.errors import innermost
from mainspring.base.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from mainspring.engine.outbox import MAX_QUEUED_OUTPUTS, POLL_S, Outbox
from mainspring.engine.wire import ENGINE_CORE_DEAD, Codec, RequestType, Utility

logger = logging.getLogger(__name__)

MAX_STORED_BYTES = 1 << 26  # for one front end, which has some 1,000 steps in its sockets besides
SEND_LINGER_S = 4.0  # what was said last is given this long to leave
RECONNECT_MS, MAX_RECONNECT_MS = 1, 100  # a front end binds its end just after it heard READY


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A front end has disconnected: its requests are nobody's."""

    client_index: int


@dataclass(frozen=True, slots=True)
class ClientStalled:
    """A front end has not read for too long: its requests can be told no more."""

    client_index: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that was not understood, and the answer to whoever sent it."""

    client_index: int
    answer: EngineCoreOutputs


Payload = EngineCoreRequest | list[str] | int | Utility | ClientGone | ClientStalled | Refused | str | None
Item = tuple[RequestType, Payload]


class Mailbox(Protocol):
    """What a busy loop needs of its post."""

    def receive(self, wait: bool) -> list[Item]:
        """All that has arrived, in order; with `wait`, at least one item."""

    def deliver(self, outputs: Mapping[int, EngineCoreOutputs]) -> None: ...

    def announce_death(self, cause: str) -> None:
        """Tell every client, behind everything that was delivered before."""

    def close(self) -> None: ...


class ZmqMailbox:
    def __init__(
        self,
        input_address: str,
        output_addresses: Sequence[str],
        aborts_queue: queue.SimpleQueue[list[str]],
        process_aborts: Callable[[], None],
    ) -> None:
        """`process_aborts` honours what is in `aborts_queue`; it is called by the loop while it waits in
        `deliver`."""
        self._aborts_queue = aborts_queue
        self._process_aborts = process_aborts
        self._input_queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._closing = False
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.bind(input_address)
        self._outputs = [self._context.socket(zmq.PUSH) for _ in output_addresses]
        self._outboxes = [Outbox(socket) for socket in self._outputs]
        self._monitors = []
        for socket, address in zip(self._outputs, output_addresses, strict=True):
            socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_OUTPUTS)
            socket.setsockopt(zmq.SNDTIMEO, int(POLL_S * 1000))
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
            socket.setsockopt(zmq.LINGER, int(SEND_LINGER_S * 1000))
            self._monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            socket.connect(address)
        self._threads = [
            threading.Thread(target=self._guard, args=(run,), name=f"mainspring-{name}", daemon=True)
            for run, name in (
                (self._run_input, "input"),
                *((outbox.run, f"output-{i}") for i, outbox in enumerate(self._outboxes)),
            )
        ]
        for thread in self._threads:
            thread.start()

    # -- the loop's side -------------------------------------------------------------------------------------

    def post(self, kind: RequestType, payload: Payload = None) -> None:
        """An item of the core's own, from any thread or signal handler's helper."""
        self._input_queue.put((kind, payload))

    def receive(self, wait: bool) -> list[Item]:
        items = [self._input_queue.get()] if wait else []
        while True:
            try:
                items.append(self._input_queue.get_nowait())
            except queue.Empty:
                return items

    def deliver(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        for client_index, news in outputs.items():
            outbox = self._outboxes[client_index]
            if len(self._outboxes) > 1:
                if not outbox.say(news, wait_s=0.0) and outbox.store(news) > MAX_STORED_BYTES:
                    self.post(RequestType.ABORT, ClientStalled(client_index))
            else:
                while not outbox.say(news, wait_s=POLL_S) and not self._closing:
                    self._process_aborts()

    def hurry(self) -> None:
        """From now on who does not read is not waited for. From any thread."""
        for outbox in self._outboxes:
            outbox.is_hurried = True

    def announce_death(self, cause: str) -> None:
        self.hurry()
        for outbox in self._outboxes:
            outbox.store([ENGINE_CORE_DEAD, cause.encode()])

    def close(self) -> None:
        """Send what is queued, for a bounded time, and let the sockets go."""
        self.hurry()
        deadline_s = time.monotonic() + SEND_LINGER_S
        for outbox in self._outboxes:
            outbox.end()
        for thread in self._threads[1:]:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._closing = True
        for outbox in self._outboxes:
            outbox.is_closing = True
        for thread in self._threads:
            thread.join(10 * POLL_S)
        for socket, outbox in zip(self._outputs, self._outboxes, strict=True):
            # What is queued for who does not read would be waited for.
            socket.close(linger=0 if outbox.is_gone else None)
        for socket in (*self._monitors, self._input):
            socket.close()
        self._context.term()

    # -- the threads -----------------------------------------------------------------------------------------

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # whatever it is, the loop must end with it
            self.post(RequestType.EXECUTOR_FAILED, f"a thread of the engine core failed: {innermost(error)}")

    def _run_input(self) -> None:
        codec = Codec()
        poller = zmq.Poller()
        for socket in (self._input, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        while not self._closing:
            for socket, _ in poller.poll(int(POLL_S * 1000)):
                if socket is self._input:
                    self._take(codec, self._input.recv_multipart())
                else:
                    socket.recv_multipart()
                    client_index = self._monitors.index(socket)
                    self._outboxes[client_index].is_gone = True
                    self.post(RequestType.ABORT, ClientGone(client_index))

    def _take(self, codec: Codec, frames: list[bytes]) -> None:
        try:
            kind, payload = codec.decode_request(*frames)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            self._refuse(frames, error)
            return
        if isinstance(payload, list):
            self._aborts_queue.put(payload)
        elif isinstance(payload, int):
            pass  # a wave is nobody's
        elif payload.client_index not in range(len(self._outputs)):
            logger.error("a message of client %d is dropped: there is none", payload.client_index)
            return
        elif self._outboxes[payload.client_index].is_gone:
            return  # it was sent before, and arrives after, the end of its client
        self._input_queue.put((kind, payload))

    def _refuse(self, frames: list[bytes], error: Exception) -> None:
        """A message that is not understood: if it says who sent it and what for, that is answered."""
        logger.error("a message of %d bytes is refused: %s", sum(map(len, frames)), error)
        text = f"the message is malformed: {error}"
        try:
            kind, raw = RequestType(frames[0]), msgspec.msgpack.decode(frames[1])
            match kind, raw:
                case RequestType.ADD, [str(request_id), *others]:
                    client_index = others[7] if len(others) > 7 else 0
                    output = EngineCoreOutput(request_id, [], FinishReason.ERROR, error=text)
                    answer = EngineCoreOutputs(outputs=[output])
                case RequestType.UTILITY, [int(client_index), int(call_id), *_]:
                    answer = EngineCoreOutputs(utility_output=UtilityOutput(call_id, b"", text))
                case _:
                    return
        except (msgspec.MsgspecError, ValueError, IndexError):
            return
        if client_index in range(len(self._outputs)):
            self.post(kind, Refused(client_index, answer))  # sent by the loop: we must not wait for room
