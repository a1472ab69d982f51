"""Sampled tokens on their way back to the first stage of a pipeline.

Theory of operation. Only the last stage samples. The first needs the tokens, for they are what it reads
next; stages between need to know only that there is one. The first does not wait for a step's tokens when it
is told to sample, which would empty the pipeline, but when a plan has a row that reads one of them.

A request may have left its slot by then, and another have come: a token belongs to a stay, not to a slot.
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

    @property
    def samples(self) -> bool:
        return self.place.is_last_stage

    def send(self, token_ids: Iterable[int]) -> None:
        """The tokens of a step, from the last stage to the first."""
        rows = np.array([list(token_ids)], np.int32)
        self._collectives.send(rows.view(np.float32), self.place.peer(0))

    def skip_sampling(self, batch: InputBatch, slots: npt.NDArray[np.intp]) -> None:
        """A step is sampled elsewhere: its tokens come later, or never matter here."""
        if self.place.is_first_stage:
            self._expected.append(_Expected(slots, [batch.at(slot) for slot in slots.tolist()]))
        else:
            batch.append_tokens(slots, [UNKNOWN_TOKEN] * len(slots))

    def catch_up(self, batch: InputBatch, plan: SchedulerOutput) -> None:
        """Receive the tokens that rows of `plan` read; and those before them, for they come in order."""
        reads = set(plan.slots)
        while any(reads.intersection(expected.slots.tolist()) for expected in self._expected):
            slots, stays = self._expected.popleft()
            received = np.empty((1, len(slots)), np.float32)
            self._collectives.recv(received, self.place.peer(self.place.pipeline_parallel_size - 1))
            still = [batch.slots[slot] is stay for slot, stay in zip(slots.tolist(), stays, strict=True)]
            token_ids = received.view(np.int32)[0][still].tolist()
            batch.append_tokens(slots[still], token_ids)
