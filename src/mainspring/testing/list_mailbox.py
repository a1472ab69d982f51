"""The post of a busy loop without sockets: what arrives is a list, what is said is a list."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from mainspring.base.messages import EngineCoreOutput, EngineCoreOutputs, UtilityOutput
from mainspring.engine.mailbox import Item, Payload
from mainspring.engine.wire import RequestType


class ListMailbox:
    """Fits `engine.mailbox.Mailbox`.

    `on_wait` is called when the loop would wait for ever, and must put something; by default that is a
    mistake.
    """

    def __init__(self) -> None:
        self.arriving: deque[Item] = deque()
        self.delivered: list[tuple[int, EngineCoreOutputs]] = []
        self.death: str | None = None
        self.is_closed = False
        self.num_waits = 0
        self.on_wait: Callable[[], None] = lambda: None
        self.on_receive: Callable[[], None] = lambda: None  # called each time, before the loop looks

    def put(self, kind: RequestType, payload: Payload = None) -> None:
        self.arriving.append((kind, payload))

    def receive(self, wait: bool) -> list[Item]:
        self.on_receive()
        if wait and not self.arriving:
            self.num_waits += 1
            self.on_wait()
            assert self.arriving, "the loop waits, and nothing will come"
        items = list(self.arriving)
        self.arriving.clear()
        return items

    def deliver(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        self.delivered.extend(outputs.items())

    def announce_death(self, cause: str) -> None:
        assert self.death is None, "a second death"
        self.death = cause

    def close(self) -> None:
        self.is_closed = True

    def said_to(self, client_index: int) -> list[EngineCoreOutput]:
        return [
            output for client, said in self.delivered if client == client_index for output in said.outputs
        ]

    def answers_to(self, client_index: int) -> list[UtilityOutput]:
        return [
            said.utility_output
            for client, said in self.delivered
            if client == client_index and said.utility_output is not None
        ]
