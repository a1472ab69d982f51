"""Stages of a pipeline never wait for each other in a circle, however little room their links have."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from mainspring.kernels.collectives import PipeCollectives
from mainspring.models.parallel import Place
from mainspring.worker.stages import Stages

LEAST = 1  # what a socket is asked to have for room: the system gives it its least, a message or two
HIDDEN = np.ones((64, 256), np.float32)  # far more than fits
PATIENCE_S = 20.0


class FakeBatch:
    """Slots that are never left; what they hold."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [object() for _ in range(num_slots)]
        self.tokens: dict[int, int] = {}

    def at(self, slot: int) -> Any:
        return self.slots[slot]

    def append_tokens(self, slots: Any, token_ids: list[int]) -> None:
        self.tokens.update(zip(slots.tolist(), token_ids, strict=True))


@pytest.fixture
def links() -> Iterator[tuple[Connection, Connection]]:
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LEAST)
    first, last = (Connection(end.detach()) for end in ends)
    yield first, last
    first.close()
    last.close()


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_that_nobody_reads_do_not_fill_the_link(
    links: tuple[Connection, Connection], depth: int
) -> None:
    """500 steps, each of a request of its own that ends with its first token, so that the first stage never
    needs one; as many steps in flight as an engine has."""
    num_steps, places = 500, [Place(rank, 1, 2) for rank in range(2)]
    may_send = threading.Semaphore(depth)
    batch = FakeBatch(num_steps)

    def be_first() -> None:
        collectives = PipeCollectives(0, [0], {1: links[0]})
        stages = Stages(places[0], collectives)
        for step in range(num_steps):
            assert may_send.acquire(timeout=PATIENCE_S)
            collectives.send(HIDDEN, 1)
            stages.skip_sampling(batch, np.array([step]))

    def be_last() -> None:
        collectives = PipeCollectives(1, [1], {0: links[1]})
        stages = Stages(places[1], collectives)
        hidden = np.empty_like(HIDDEN)
        for step in range(num_steps):
            collectives.recv(hidden, 0)
            stages.send([7 * step])
            may_send.release()  # whoever plans has its result

    ranks = [threading.Thread(target=be, daemon=True) for be in (be_first, be_last)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)
        assert not rank.is_alive(), "a rank waits for ever"
    assert len(batch.tokens) == num_steps - 3, "the first stage reads what has been booked"
    assert all(token == 7 * step for step, token in batch.tokens.items())
