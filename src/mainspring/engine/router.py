"""Which of several engines runs a request: a pure choice from what their front end knows.

An engine's *load* is what stands before a new request: the prompt tokens it has yet to read, and a share of
each step for every request that lives in it. Tokens, not requests, so that one long prompt counts for many
short ones. The front end counts by itself what it gave and what came back; nothing is asked, so nothing is
stale.

With `prefix` routing requests with the same beginning go to the same engine, whose prefix cache then has it,
unless that one has more to do than a cached prompt would save: the engines are ranked by a hash of the
beginning and their number (rendezvous hashing), so that one engine's end moves only its own requests.

The beginning is short, for what differs within it has homes of chance: the turns of a conversation, and the
questions behind one system prompt, have their first tokens in common and little else for certain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

from mainspring.base.errors import RequestError
from mainspring.base.messages import SchedulerStats

DECODE_TOKENS = 64  # prompt tokens that a live request weighs as much as: its share of the steps to come
PREFIX_TOKENS = 32  # that make a beginning: two blocks of the usual size

Routing = Literal["load", "prefix"]


class EngineLoad(NamedTuple):
    """What lives in one engine."""

    num_unread_tokens: int  # of prompts without an answer yet
    num_requests: int

    @property
    def score(self) -> int:
        return self.num_unread_tokens + DECODE_TOKENS * self.num_requests


def engine_of(rank: int, ranks: range) -> int:
    """Which of the engines here, that have these ranks, a request asks for. Raises `RequestError` for a rank
    that is not here."""
    if rank not in ranks:
        first, last = ranks[0], ranks[-1]
        expected = f"from {first} to {last}" if last > first else f"{first}: there is one engine here"
        raise RequestError(f"data_parallel_rank {rank} must be {expected}", "data_parallel_rank")
    return ranks.index(rank)


def pick_engine(
    loads: Sequence[EngineLoad],
    alive: Collection[int],
    turn: int,
    prompt_token_ids: Sequence[int] = (),
    routing: Routing = "load",
) -> int:
    """An engine of `alive`. turn: a number that grows with every request, so that equals take turns.

    `alive` is not empty.
    """
    order = sorted(alive, key=lambda engine: (engine - turn) % len(loads))
    least = min(order, key=lambda engine: loads[engine].score)
    if routing == "load" or not prompt_token_ids:
        return least
    home = max(order, key=lambda engine: _affinity(prompt_token_ids[:PREFIX_TOKENS], engine))
    most_saved = len(prompt_token_ids)
    return home if loads[home].score <= loads[least].score + most_saved else least


class Move(NamedTuple):
    """Requests that wait in one engine are to go to another."""

    source: int
    target: int
    num_requests: int


def moves(
    stats: Sequence[SchedulerStats],
    num_requests: Sequence[int],
    sources: Collection[int],
    targets: Collection[int],
) -> list[Move]:
    """From engines where requests wait to those with free seats; num_requests: that live in each, by the
    front end's count, which is newer than the engines' own statistics.

    How many seats an engine has is not known here; but one where requests wait has as many as run there.
    """
    found = []
    taken = dict.fromkeys(targets, 0)
    for source in sources:
        left = stats[source].num_waiting
        for target in sorted(targets, key=lambda engine: num_requests[engine]):
            free = stats[source].num_running - num_requests[target] - taken[target]
            n = min(left, free)
            if target != source and n > 0 and not stats[target].num_waiting:
                found.append(Move(source, target, n))
                taken[target] += n
                left -= n
    return found


def _affinity(beginning: Sequence[int], engine: int) -> bytes:
    digest = hashlib.blake2b(np.array(beginning, np.int64).tobytes(), digest_size=8)
    digest.update(engine.to_bytes(4, "little"))
    return digest.digest()
