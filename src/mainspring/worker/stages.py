"""Sampled tokens on their way back to the first stage of a pipeline.

Theory of operation. Only the last stage samples. The first needs the tokens, for they are what it reads
next; stages between need to know only that there is one. The first does not wait for a step's tokens when it
is told to sample, which would empty the pipeline, but when a plan has a row that reads one of them.

A request may have left its slot by then, and another have come: a token belongs to a stay, not to a slot.

Nobody waits in a circle. All ranks run the same steps in the same order, and what they do together in a step
they do in the order of its layers; of two ranks that wait for each other one would be ahead of the other in
that order, and who is ahead waits for nobody behind. Tokens alone go back, to a rank that may be ahead and
wait for room to send: so they must find room, whether it reads or not. They do: of a slot one token at most
is unread, for whoever reads a slot again has received what was in it, and of steps as many as may be in
flight. That is some kilobytes, and a socket has room for 200.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import SchedulerOutput
from mainspring.kernels.collectives import Collectives
from mainspring.models.parallel import Place
from mainspring.worker.input_batch import InputBatch, Slot

UNKNOWN_TOKEN = 0  # what stages between hold in a token's place


class _Expected(NamedTuple):
    """A step whose tokens were not received yet."""

    slots: npt.NDArray[np.intp]
    stays: list[Slot]


class Stages:
    """Where this worker stands in a pipeline of several stages."""

    def __init__(self, place: Place, collectives: Collectives | None) -> None:
        assert collectives is not None, "stages need links to each other"
        self.place = place
        self._collectives = collectives
        self._expected: deque[_Expected] = deque()
        # As many steps as may be in flight: when one more is told of, the oldest has been booked.
        self._most_expected = place.pipeline_parallel_size + 1

    @property
    def samples(self) -> bool:
        return self.place.is_last_stage

    def send(self, token_ids: Iterable[int]) -> None:
        """The tokens of a step, from the last stage to the first."""
        rows = np.array([list(token_ids)], np.int32)
        self._collectives.send(rows.view(np.float32), self.place.peer(0))

    def skip_sampling(self, batch: InputBatch, slots: npt.NDArray[np.intp]) -> None:
        """A step is sampled elsewhere: its tokens come later, or never matter here."""
        if not self.place.is_first_stage:
            batch.append_tokens(slots, [UNKNOWN_TOKEN] * len(slots))
            return
        self._expected.append(_Expected(slots, [batch.at(slot) for slot in slots.tolist()]))
        if len(self._expected) > self._most_expected:
            self._receive(batch)  # its tokens have been sent

    def catch_up(self, batch: InputBatch, plan: SchedulerOutput) -> None:
        """Receive the tokens that rows of `plan` read; and those before them, for they come in order."""
        reads = set(plan.slots)
        while any(reads.intersection(expected.slots.tolist()) for expected in self._expected):
            self._receive(batch)

    def _receive(self, batch: InputBatch) -> None:
        slots, stays = self._expected.popleft()
        received = np.empty((1, len(slots)), np.float32)
        self._collectives.recv(received, self.place.peer(self.place.pipeline_parallel_size - 1))
        still = [batch.slots[slot] is stay for slot, stay in zip(slots.tolist(), stays, strict=True)]
        token_ids = received.view(np.int32)[0][still].tolist()
        batch.append_tokens(slots[still], token_ids)
