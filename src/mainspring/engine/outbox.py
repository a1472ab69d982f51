"""What is said to one front end: sent by the loop where that takes no waiting, else by a thread with a queue.

Rule 1. The socket has one user at a time: the thread while anything is queued or on its way, else the loop.
Rule 2. What is said leaves in the order it was said.
Rule 3. Plain tokens are encoded and sent by the loop. A hand-over costs it more: a thread must wake, and what
        it encodes is in the cache of another processor. Lists of log-probabilities, which may be long, are
        encoded by the thread.
Rule 4. The queue is bounded: `say` waits for room. `store` is for what must be said and cannot wait; it is
        measured, so that there is a bound to that too.
"""

from __future__ import annotations

import threading
from collections import deque

import zmq

from mainspring.base.messages import EngineCoreOutputs
from mainspring.engine.wire import Codec, Frames

MAX_QUEUED_OUTPUTS = 64  # messages that nobody has read: then there is no room
POLL_S = 0.1
HANDOVER_S = 0.001  # after a message is queued, at most, for the thread to take it
LAST_WORD_S = 0.5  # at the end, a client that takes nothing for so long is not waited for

_Item = EngineCoreOutputs | Frames | None  # None: the end


class Outbox:
    """`say` and `store` are for the loop, `run` is the thread's, the rest for anybody."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """`socket`: a PUSH with a send timeout of `POLL_S`; who made it closes it."""
        self.is_gone = False  # nobody will read: what is said is dropped
        self.is_hurried = False  # who does not read is waited for no longer than `LAST_WORD_S`
        self.is_closing = False  # nobody is waited for
        self._socket = socket
        self._codec = Codec()  # the loop's
        self._changed = threading.Condition()  # of what follows
        self._items: deque[_Item] = deque()
        self._num_unsent = 0  # items queued, or taken by the thread and not sent yet
        self._num_bytes = 0  # of those queued that are encoded
        self._is_stalled = False  # the socket has no room either

    @property
    def is_full(self) -> bool:
        return len(self._items) >= MAX_QUEUED_OUTPUTS

    def say(self, outputs: EngineCoreOutputs, wait_s: float) -> bool:
        """False, and nothing was said, if there is no room after `wait_s`."""
        if self.is_gone:
            return True
        item: _Item = outputs
        if not self._num_unsent and (body := self._codec.encode_plain(outputs)) is not None:
            try:
                self._socket.send(body, zmq.NOBLOCK)
                return True
            except zmq.Again:
                item = [body]
        with self._changed:
            if not self._changed.wait_for(lambda: not self.is_full, wait_s):
                return False
            self._put(item)
            # Where the loop keeps the interpreter, the thread gets it only after a whole switch interval, and
            # would fall ever further behind.
            self._changed.wait_for(lambda: not self._items or self._is_stalled, HANDOVER_S)
        return True

    def store(self, message: EngineCoreOutputs | Frames) -> int:
        """Say it although there is no room. Returns how many bytes wait."""
        frames = message if isinstance(message, list) else [self._codec.encode(message)]
        with self._changed:
            self._put(frames)
            return self._num_bytes

    def end(self) -> None:
        """The thread ends behind what was said."""
        with self._changed:
            self._put(None)

    def _put(self, item: _Item) -> None:
        self._items.append(item)
        self._num_unsent += 1
        self._num_bytes += _num_bytes(item)
        self._changed.notify_all()

    def run(self) -> None:
        codec = Codec()
        while (item := self._take()) is not None:
            self._send(item if isinstance(item, list) else [codec.encode(item)])
            with self._changed:
                self._num_unsent -= 1

    def _take(self) -> _Item:
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            item = self._items.popleft()
            self._num_bytes -= _num_bytes(item)
            self._changed.notify_all()
        return item

    def _send(self, frames: Frames) -> None:
        """Until it has left, its reader is gone, or has had its time."""
        patience_s = LAST_WORD_S
        while not self.is_gone and not self.is_closing:
            try:
                # Not polled first: with each call the loop takes the interpreter, perhaps for long.
                self._socket.send_multipart(frames)
                self._is_stalled = False
                return
            except zmq.Again:
                self._is_stalled = True
            if self.is_hurried and (patience_s := patience_s - POLL_S) <= 0:
                self.is_gone = True


def _num_bytes(item: _Item) -> int:
    return sum(map(len, item)) if isinstance(item, list) else 0
