"""Requests that are ready to run, best first.

Order, FCFS: those that were running before (preempted, or holding KV brought from elsewhere) by arrival, then
the others by arrival. Order, priority: smaller priority first; among equals the same order as FCFS, with the
front end's arrival time before the order of arrival here. So partial work is never thrown away for an equal
that has none (case B173), and nobody is overtaken for ever.

Leaving without being popped (an abort) is lazy: the entry stays until it surfaces or the dead outnumber the
living.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from mainspring.core.request import Request, Status

_READY = (Status.WAITING, Status.PREEMPTED)
_Key = tuple[float, ...]


class RequestQueue:
    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[_Key, Request]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def __iter__(self) -> Iterator[Request]:
        """Every request in it, in no order."""
        return (request for _, request in self._heap if request.status in _READY)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if request.status in _READY:
                return request
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return None

    def pop(self) -> Request:
        """The request that `peek` shows."""
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        return request

    def note_dead(self) -> None:
        """A request in here has finished: its status says so already."""
        self._num_dead += 1
        if self._num_dead > 64 and 2 * self._num_dead > len(self._heap):
            self.reorder()

    def reorder(self) -> None:
        """The keys of some have changed: look at all anew."""
        self._heap = [(self._key(request), request) for request in self]
        heapq.heapify(self._heap)
        self._num_dead = 0

    def _key(self, request: Request) -> _Key:
        newcomer = not (request.status is Status.PREEMPTED or request.holds_kv)
        if self._by_priority:
            return (request.message.priority, newcomer, request.message.arrival_time_s, request.sequence)
        return (newcomer, request.sequence)
