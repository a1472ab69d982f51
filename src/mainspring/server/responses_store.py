"""What is kept of responses: for `previous_response_id`, for who asks for one again, and for those that are
made in the background.

Rules.
1. The store is bounded by count and by bytes, and the oldest go first. What still runs stays; where
   everything runs there is no room. Then a new one is made without being stored, unless somebody wants it
   stored: that is refused with a 503.
2. Bytes are those of the whole conversation's items and of kept events, as JSON. In memory conversations
   share their items, so this is an upper bound.
3. An item may be in several responses, and is known as long as one of them is.
4. It belongs to one process and ends with it. Ids are random: who knows one has been told it.
5. That a response was evicted is remembered for the last of them: it is told apart from one that never was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import msgspec

from mainspring.server.answering import named_event
from mainspring.server.errors import RETRY_AFTER_S, ApiError
from mainspring.server.http import cancelled, encode
from mainspring.server.responses_types import Item, ResponseEvent, ResponsesReply, name_of
from mainspring.server.responses_writing import ResponsesWriter

MAX_REMEMBERED = 10_000  # ids of responses that were evicted


class StoredResponse:
    """One response, while it is made and afterwards."""

    def __init__(
        self,
        writer: ResponsesWriter,
        before: StoredResponse | None,
        given: Iterable[Item],
        *,
        keeps_events: bool = False,
    ) -> None:
        """`given`: the items of its own input; `before`: the response that it goes on from."""
        self._writer = writer
        self.id = writer.reply.id
        self.given = tuple(given)
        self.items: tuple[Item, ...] = (*before.items, *before.said, *self.given) if before else self.given
        self.said: tuple[Item, ...] = ()  # the items of its output, once it is over
        self.num_bytes: int = len(encode(self.given)) + (before.num_bytes if before else 0)
        self.task: asyncio.Task[None] | None = None  # that makes it in the background
        self.keeps_events = keeps_events
        self._events: list[bytes] = []
        self._news = asyncio.Event()

    @property
    def reply(self) -> ResponsesReply:
        return self._writer.reply

    @property
    def is_over(self) -> bool:
        return self._writer.is_over

    def tell(self, events: Iterable[ResponseEvent]) -> None:
        """The next of its events; the number of each is its place."""
        for event in events:
            if self.keeps_events:
                self._events.append(named_event(name_of(event), event))
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def events_from(self, begin: int) -> AsyncGenerator[bytes, None]:
        """The events from that number to the last one, as they come."""
        while True:
            if new := self._events[begin:]:
                begin += len(new)
                yield b"".join(new)
            elif self.is_over:
                return
            else:
                await self._news.wait()

    def end(self) -> None:
        """Whatever happened to it: from now on it does not change."""
        for _ in self._writer.cancelled():  # if nobody has ended it
            pass
        self.said = tuple(msgspec.to_builtins(self.reply.output))
        self.num_bytes += len(encode(self.said)) + sum(map(len, self._events))


class ResponseStore:
    """Everything in it happens on the server's event loop."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: dict[str, StoredResponse] = {}  # the oldest first
        self._items: dict[str, dict[str, Item]] = {}  # by their ids, and those of the responses with them
        self._evicted: dict[str, None] = {}  # the oldest first

    @property
    def is_on(self) -> bool:
        return self._max_count > 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, response: StoredResponse, *, must: bool) -> bool:
        """Whether there was room. Raises `ApiError` (503) if it `must` be stored and there is none, for all
        that is stored still runs."""
        self._evict(self._max_count - 1, self._max_bytes - response.num_bytes)
        if len(self._responses) >= self._max_count:
            if not must:
                self._remember_evicted(response)
                return False
            raise ApiError(
                503,
                f"{len(self._responses)} stored responses are being made, and there is room for no more; "
                "wait for one, or raise --max-stored-responses",
                "store",
                retry_after_s=RETRY_AFTER_S,
            )
        self._responses[response.id] = response
        self._num_bytes += response.num_bytes
        self._know(response, response.given)
        return True

    def settle(self, response: StoredResponse) -> None:
        """It is over, in whatever way."""
        before = response.num_bytes
        response.end()
        if self._responses.get(response.id) is response:  # or it was deleted meanwhile
            self._num_bytes += response.num_bytes - before
            self._know(response, response.said)
            self._evict(self._max_count, self._max_bytes)

    def get(self, response_id: str, param: str = "response_id") -> StoredResponse:
        """Raises `ApiError` (404)."""
        found = self._responses.get(response_id)
        if found is None:
            shown = response_id[:100]
            why = (
                f"Response with id {shown!r} was evicted: the server keeps a bounded number of them "
                "(--max-stored-responses, --max-stored-response-bytes)."
                if response_id in self._evicted
                else f"Response with id {shown!r} not found."
            )
            raise ApiError(404, why, param)
        return found

    def item(self, item_id: str) -> Item | None:
        """Of a stored response's input or output."""
        found = self._items.get(item_id)
        return None if found is None else found[next(reversed(found))]

    async def delete(self, response_id: str) -> None:
        """Also one that is being made: nobody could ask for it. Raises `ApiError` (404)."""
        response = self.get(response_id)
        self._remove(response)
        if response.task is not None:
            await cancelled(response.task)

    async def close(self) -> None:
        await cancelled(*(each.task for each in self._responses.values() if each.task is not None))

    # --------------------------------------------------------------------------------------------------------

    def _know(self, response: StoredResponse, items: Iterable[Item]) -> None:
        for item in items:
            self._items.setdefault(item["id"], {})[response.id] = item

    def _evict(self, max_count: int, max_bytes: int) -> None:
        """The oldest that are over, until there is room."""
        if len(self._responses) <= max_count and self._num_bytes <= max_bytes:
            return
        for response in [each for each in self._responses.values() if each.is_over]:
            self._remove(response)
            self._remember_evicted(response)
            if len(self._responses) <= max_count and self._num_bytes <= max_bytes:
                return

    def _remember_evicted(self, response: StoredResponse) -> None:
        self._evicted[response.id] = None
        if len(self._evicted) > MAX_REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    def _remove(self, response: StoredResponse) -> None:
        del self._responses[response.id]
        self._num_bytes -= response.num_bytes
        for item_id in {item["id"] for item in (*response.given, *response.said)}:
            if known := self._items.get(item_id):
                known.pop(response.id, None)
                if not known:
                    del self._items[item_id]
