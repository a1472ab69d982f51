"""What one step gathers while it is planned, and what is remembered of it until its result is booked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mainspring.base.messages import BlockAppend, NewRequestData
from mainspring.core.request import Request


@dataclass(slots=True)
class StepBuilder:
    """The budgets and rows of a step in the making. Quiet rows (one token, nothing to decide) are not listed
    here: they are the requests in `running` that nothing below speaks of."""

    tokens_left: int
    counts: dict[Request, int] = field(default_factory=dict)  # tokens of rows that were looked at
    skipped: set[Request] = field(default_factory=set)  # running, but without a row in this step
    new_blocks: list[BlockAppend] = field(default_factory=list)
    new_requests: list[NewRequestData] = field(default_factory=list)
    num_preempted: int = 0

    def add(self, request: Request, n: int) -> None:
        self.counts[request] = n
        self.tokens_left -= n

    def drop(self, request: Request) -> None:
        """Undo what the step had for a running request that is preempted: its tokens are free for others."""
        if request in self.skipped:
            self.skipped.remove(request)
        else:
            self.tokens_left += self.counts.pop(request, 1)
            self.new_blocks = [append for append in self.new_blocks if append.slot != request.slot]
        self.num_preempted += 1


class Rows(NamedTuple):
    """The rows of a step; shared by consecutive steps while they stay the same, so never changed."""

    requests: list[Request]
    generations: list[int]  # of each row's stay in its slot
    slots: list[int]
    counts: list[int]
    sampling: list[int]  # indices of rows that sample
    grammar: list[int]  # indices of those that need a mask


class Chunk(NamedTuple):
    """A row of more than one token, or one that samples nothing: booking it moves `num_booked_tokens` to
    `end`."""

    request: Request
    generation: int
    end: int


class MaskedRow(NamedTuple):
    """A row that samples under a grammar, which must have been fed `end` tokens before."""

    row: int
    request: Request
    generation: int
    end: int


@dataclass(slots=True)
class StepRecord:
    """A step in flight: what booking needs to know, as it was when the step was planned."""

    step_id: int
    rows: Rows
    chunks: list[Chunk]
    masked: list[MaskedRow]
