"""The protocol of ranks in lock-step, explored: every order in which messages can be read and steps be made.

The model: a sender with requests to give, to any rank and at any moment, who also pauses all ranks, resumes
them, and puts them to sleep once all are at rest; a queue each way between it and every rank, in order; ranks
that read what has come, and step in a collective which nobody leaves before all have entered it. A request is
one unit of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from mainspring.engine import lockstep
from mainspring.engine.lockstep import (
    Wave,
    asks_now,
    is_at_rest,
    on_answer,
    on_start,
    on_step,
    on_work,
    passes_on,
    should_throttle_prefills,
)

# To ranks; and from them.
ADD, START, KEEP, ABORT, SLEEP, RESUME = "add", "start", "keep", "abort", "sleep", "resume"
WISH, RESTS = "wish", "rests"
Message = tuple[str, int]  # what, and of which wave or pause


class Rank(NamedTuple):
    wave: Wave = Wave()
    work: int = 0
    is_paused: bool = False
    is_to_sleep: bool = False
    is_asleep: bool = False  # cannot make a step
    pause: int = 0  # that is to be answered, or 0
    is_inside: bool = False  # in the collective of a step
    inbox: tuple[Message, ...] = ()
    outbox: tuple[Message, ...] = ()  # to the sender

    @property
    def has_work(self) -> bool:
        return self.work > 0 and not self.is_paused

    def told(self, kind: str, number: int = 0) -> Rank:
        return self._replace(inbox=(*self.inbox, (kind, number)))

    def says(self, kind: str, number: int) -> Rank:
        return self._replace(outbox=(*self.outbox, (kind, number)))


class Sender(NamedTuple):
    latest_wave: int = -1
    pauses: tuple[str, ...] = ()  # to come
    pause: int = 0  # that holds, or 0
    is_for_sleep: bool = False
    num_at_rest: int = 0  # ranks that have answered it


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    sender: Sender = Sender()
    unsent: int = 0

    def with_rank(self, index: int, rank: Rank) -> World:
        return self._replace(ranks=(*self.ranks[:index], rank, *self.ranks[index + 1 :]))

    def tell(self, kind: str, number: int, except_for: int | None = None) -> World:
        told = [r if i == except_for else r.told(kind, number) for i, r in enumerate(self.ranks)]
        return self._replace(ranks=tuple(told))


def send(world: World, index: int) -> World:
    """A request to one rank."""
    return world.with_rank(index, world.ranks[index].told(ADD))._replace(unsent=world.unsent - 1)


def commands(world: World) -> Iterator[World]:
    """What the sender may tell all ranks now."""
    sender = world.sender
    if sender.pause:
        yield world.tell(RESUME, 0)._replace(sender=sender._replace(pause=0, num_at_rest=0))
    elif sender.pauses:
        kind, *later = sender.pauses
        number = len(sender.pauses)
        paused = sender._replace(pauses=tuple(later), pause=number, is_for_sleep=kind == SLEEP)
        yield world.tell(ABORT if kind == SLEEP else kind, number)._replace(sender=paused)
    if sender.pause and sender.is_for_sleep and sender.num_at_rest == len(world.ranks):
        yield world.tell(SLEEP, 0)._replace(sender=sender._replace(is_for_sleep=False))


def read(world: World, index: int) -> World:
    """A rank reads its oldest message."""
    rank = world.ranks[index]
    (kind, number), inbox = rank.inbox[0], rank.inbox[1:]
    rank = rank._replace(inbox=inbox)
    if kind == ADD:
        rank = rank._replace(work=rank.work + 1)
    elif kind == START:
        rank = rank._replace(wave=on_start(rank.wave, number))
    elif kind in (KEEP, ABORT):
        work = rank.work if kind == KEEP else 0
        rank = rank._replace(is_paused=True, pause=number, work=work)
    elif kind == SLEEP:
        rank = rank._replace(is_to_sleep=True)
    else:
        rank = rank._replace(is_paused=False, pause=0, is_to_sleep=False, is_asleep=False)
    return world.with_rank(index, rank)


def hear(world: World, index: int) -> World:
    """The sender reads a rank's oldest message."""
    rank, sender = world.ranks[index], world.sender
    (kind, number), outbox = rank.outbox[0], rank.outbox[1:]
    world = world.with_rank(index, rank._replace(outbox=outbox))
    if kind == RESTS:
        is_of_now = number == sender.pause
        return world._replace(sender=sender._replace(num_at_rest=sender.num_at_rest + is_of_now))
    if not passes_on(sender.latest_wave, number):
        return world
    return world.tell(START, number, except_for=index)._replace(sender=sender._replace(latest_wave=number))


def come_to_rest(rank: Rank) -> Rank:
    """Answer the pause, and fall asleep."""
    if rank.pause:
        rank = rank.says(RESTS, rank.pause)
    return rank._replace(pause=0, is_to_sleep=False, is_asleep=rank.is_asleep or rank.is_to_sleep)


def step(world: World) -> World:
    """All ranks are inside: the step is made, and those that ask each other get one answer."""
    ranks = [
        rank._replace(wave=on_step(rank.wave), work=max(0, rank.work - rank.has_work), is_inside=False)
        for rank in world.ranks
    ]
    assert len({rank.wave for rank in ranks}) == 1, "ranks that step together are in one wave"
    if asks_now(ranks[0].wave):
        anybody = any(rank.has_work for rank in ranks)
        ranks = [rank._replace(wave=on_answer(rank.wave, anybody)) for rank in ranks]
    return world._replace(ranks=tuple(ranks))


def moves_of(rank: Rank) -> Iterator[Rank]:
    """What a rank may do that is not inside, whatever it has read."""
    if rank.wave.is_running:
        assert not rank.is_asleep, "a rank steps that has given its memory back"
        yield rank._replace(is_inside=True)
    elif rank.has_work:
        woken = on_work(rank.wave)
        yield rank._replace(wave=woken).says(WISH, woken.number)
    elif is_at_rest(rank.wave, rank.has_work) and (rank.pause or rank.is_to_sleep):
        yield come_to_rest(rank)


def next_worlds(world: World) -> Iterator[World]:
    if world.unsent:
        for index in range(len(world.ranks)):
            yield send(world, index)
    yield from commands(world)
    for index, rank in enumerate(world.ranks):
        if rank.outbox:
            yield hear(world, index)
        if rank.is_inside:
            continue
        if rank.inbox:
            yield read(world, index)
        for moved in moves_of(rank):
            yield world.with_rank(index, moved)
    if all(rank.is_inside for rank in world.ranks):
        yield step(world)


def explore(num_ranks: int, num_requests: int, *pauses: str) -> int:
    """All worlds that can be reached; how many there are."""
    start = World((Rank(),) * num_ranks, Sender(pauses=pauses), num_requests)
    seen, todo = {start}, deque([start])
    while todo:
        world = todo.popleft()
        is_over = True
        for new in next_worlds(world):
            is_over = False
            if new not in seen:
                seen.add(new)
                todo.append(new)
        if is_over:
            assert world.unsent == 0
            assert all(rank.work == 0 for rank in world.ranks), "a request is lost"
            assert not any(rank.is_inside for rank in world.ranks), "a rank waits in a collective, alone"
            assert not any(rank.wave.is_running for rank in world.ranks), "somebody does not sleep"
            assert len({rank.wave for rank in world.ranks}) == 1
    return len(seen)


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
def test_three_ranks_and_up_to_four_requests(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, interval: int
) -> None:
    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", interval)
    assert explore(3, num_requests) > 40 * 5**num_requests / 4


PAUSES = [(KEEP, KEEP), (SLEEP, KEEP), (KEEP, SLEEP), (SLEEP, SLEEP)]


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("pauses", PAUSES)
def test_ranks_are_paused_and_put_to_sleep(
    monkeypatch: pytest.MonkeyPatch, pauses: tuple[str, ...], interval: int
) -> None:
    """Case B175: requests come before, during and after; some pauses end before all are at rest."""
    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", interval)
    assert explore(2, 1, *pauses) > 8_000
    assert explore(3, 1, pauses[0]) > 8_000


@pytest.mark.slow
@pytest.mark.parametrize("pauses", PAUSES)
def test_more_requests_meet_pauses(monkeypatch: pytest.MonkeyPatch, pauses: tuple[str, ...]) -> None:
    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", 2)
    assert explore(2, 2, *pauses) > 80_000
    assert explore(3, 2, pauses[0]) > 80_000


def test_a_protocol_without_wishes_loses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exploration finds what the wish is for."""
    monkeypatch.setitem(hear.__globals__, "passes_on", lambda latest, number: False)
    with pytest.raises(AssertionError, match="lost"):
        explore(2, 1)


def test_a_rank_that_falls_asleep_on_its_own_is_missed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exploration finds what the first rests of all are for: one may have nothing to run, while another's
    wish is still on its way."""
    monkeypatch.setattr(lockstep, "SYNC_INTERVAL", 1)

    sound = read

    def hasty(world: World, index: int) -> World:
        new = sound(world, index)
        kind, _ = world.ranks[index].inbox[0]
        is_to_sleep = kind == ABORT and world.sender.is_for_sleep
        return new.with_rank(index, new.ranks[index]._replace(is_to_sleep=True)) if is_to_sleep else new

    monkeypatch.setitem(next_worlds.__globals__, "read", hasty)
    with pytest.raises(AssertionError, match="given its memory back"):
        explore(2, 2, SLEEP)


def test_a_rank_that_does_not_heed_the_wave_is_missed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without work may be in a wave for the sake of others."""

    sound = moves_of

    def careless(rank: Rank) -> Iterator[Rank]:
        yield from sound(rank)
        if rank.wave.is_running and not rank.has_work and (rank.pause or rank.is_to_sleep):
            yield come_to_rest(rank)

    monkeypatch.setitem(next_worlds.__globals__, "moves_of", careless)
    with pytest.raises(AssertionError, match="given its memory back"):
        explore(2, 1, SLEEP)


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
