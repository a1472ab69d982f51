"""The protocol of ranks in lock-step, explored: every order in which messages can be read and steps be made.

The model: a sender with requests to give, to any rank and at any moment; a queue each way between it and
every rank, in order; ranks that read what has come, and step in a collective which nobody leaves before all
have entered it. A request is one unit of work.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest

from mainspring.engine import lockstep
from mainspring.engine.lockstep import (
    Belief,
    Wave,
    asks_now,
    on_answer,
    on_request,
    on_sending,
    on_start,
    on_step,
    on_wake_wish,
    on_wave_complete,
    should_throttle_prefills,
)

ADD, START, COMPLETE, WISH = "add", "start", "complete", "wish"


class Rank(NamedTuple):
    wave: Wave = Wave()
    work: int = 0
    is_inside: bool = False  # in the collective of a step
    inbox: tuple[tuple[str, int], ...] = ()
    outbox: tuple[tuple[str, int], ...] = ()  # to the sender


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    belief: Belief = Belief()
    unsent: int = 0

    def with_rank(self, index: int, rank: Rank) -> World:
        return self._replace(ranks=(*self.ranks[:index], rank, *self.ranks[index + 1 :]))


def send(world: World, index: int) -> World:
    """A request to one rank."""
    belief, starts = on_sending(world.belief)
    ranks = list(world.ranks)
    for other, rank in enumerate(ranks):
        if other == index:
            ranks[other] = rank._replace(inbox=(*rank.inbox, (ADD, world.belief.number)))
        elif starts:
            ranks[other] = rank._replace(inbox=(*rank.inbox, (START, world.belief.number)))
    return World(tuple(ranks), belief, world.unsent - 1)


def read(world: World, index: int) -> World:
    """A rank reads its oldest message."""
    rank = world.ranks[index]
    (kind, number), inbox = rank.inbox[0], rank.inbox[1:]
    rank = rank._replace(inbox=inbox)
    if kind == START:
        return world.with_rank(index, rank._replace(wave=on_start(rank.wave, number)))
    wave, wakes_others = on_request(rank.wave, number)
    outbox = (*rank.outbox, (WISH, wave.number)) if wakes_others else rank.outbox
    return world.with_rank(index, rank._replace(wave=wave, work=rank.work + 1, outbox=outbox))


def hear(world: World, index: int) -> World:
    """The sender reads a rank's oldest message."""
    rank = world.ranks[index]
    (kind, number), outbox = rank.outbox[0], rank.outbox[1:]
    world = world.with_rank(index, rank._replace(outbox=outbox))
    if kind == COMPLETE:
        return world._replace(belief=on_wave_complete(world.belief, number))
    belief, starts = on_wake_wish(world.belief, number)
    ranks = list(world.ranks)
    for other, one in enumerate(ranks):
        if starts and other != index:
            ranks[other] = one._replace(inbox=(*one.inbox, (START, number)))
    return World(tuple(ranks), belief, world.unsent)


def step(world: World) -> World:
    """All ranks are inside: the step is made, and those that ask each other get one answer."""
    ranks = [
        rank._replace(wave=on_step(rank.wave), work=max(0, rank.work - 1), is_inside=False)
        for rank in world.ranks
    ]
    assert len({rank.wave for rank in ranks}) == 1, "ranks that step together are in one wave"
    if asks_now(ranks[0].wave):
        number = ranks[0].wave.number
        anybody = any(rank.work for rank in ranks)
        ranks = [rank._replace(wave=on_answer(rank.wave, anybody)) for rank in ranks]
        if not anybody:
            ranks[0] = ranks[0]._replace(outbox=(*ranks[0].outbox, (COMPLETE, number)))
    return world._replace(ranks=tuple(ranks))


def next_worlds(world: World) -> list[World]:
    found = []
    if world.unsent:
        found += [send(world, index) for index in range(len(world.ranks))]
    for index, rank in enumerate(world.ranks):
        if rank.outbox:
            found.append(hear(world, index))
        if rank.is_inside:
            continue
        if rank.inbox:
            found.append(read(world, index))
        if rank.wave.is_running:
            found.append(world.with_rank(index, rank._replace(is_inside=True)))
    if all(rank.is_inside for rank in world.ranks):
        found.append(step(world))
    return found


def explore(num_ranks: int, num_requests: int) -> int:
    """All worlds that can be reached; how many there are."""
    start = World((Rank(),) * num_ranks, unsent=num_requests)
    seen, todo = {start}, deque([start])
    while todo:
        world = todo.popleft()
        following = next_worlds(world)
        if not following:
            assert world.unsent == 0
            assert all(rank.work == 0 for rank in world.ranks), "a request is lost"
            assert not any(rank.is_inside for rank in world.ranks), "a rank waits in a collective, alone"
            assert not any(rank.wave.is_running for rank in world.ranks), "somebody does not sleep"
            assert not world.belief.is_running, "the sender believes in a wave that is over"
            assert len({rank.wave for rank in world.ranks}) == 1
            assert world.belief.number == world.ranks[0].wave.number
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return len(seen)


def test_two_ranks_and_three_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", 2)
    assert explore(2, 3) > 500


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_three_ranks_and_up_to_four_requests(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, interval: int
) -> None:
    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", interval)
    assert explore(3, num_requests) > 50 * 6**num_requests / 4


def test_a_protocol_without_wishes_loses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exploration finds what the wish is for: a request that meets a wave which has just ended."""

    def deaf(belief: Belief, number: int) -> tuple[Belief, bool]:
        del number
        return belief, False

    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", 1)
    monkeypatch.setitem(hear.__globals__, "on_wake_wish", deaf)
    with pytest.raises(AssertionError):
        explore(2, 2)


def test_late_and_repeated_starts_change_nothing() -> None:
    wave = Wave(3, True, 5)
    assert on_start(wave, 2) == on_start(wave, 3) == wave
    assert on_start(Wave(3), 2) == Wave(3)
    assert on_start(Wave(3), 3) == Wave(3, True)


def test_prompts_start_on_aligned_steps_and_never_delay_who_decodes() -> None:
    assert not should_throttle_prefills(7, 1, num_decoding=5, had_no_room=False), "off"
    assert not should_throttle_prefills(8, 4, num_decoding=5, had_no_room=False), "aligned"
    assert should_throttle_prefills(7, 4, num_decoding=5, had_no_room=False)
    assert not should_throttle_prefills(7, 4, num_decoding=0, had_no_room=False), "nobody to disturb"
    assert not should_throttle_prefills(7, 4, num_decoding=5, had_no_room=True), "who found no room is next"
