"""Which of several engines runs a request, and when one that waits goes elsewhere: pure choices."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from mainspring.base.errors import RequestError
from mainspring.base.messages import SchedulerStats
from mainspring.engine.router import EngineLoad, Move, engine_of, moves, pick_engine


def idle(number: int) -> list[EngineLoad]:
    return [EngineLoad(0, 0)] * number


@pytest.mark.parametrize("num_engines", [2, 4])
def test_equals_take_turns(num_engines: int) -> None:
    """Case B160: 1,000 arrivals of equal service, counted by who sends them, spread evenly to a tenth."""
    live = [0] * num_engines
    placed = [0] * num_engines
    ending: deque[int] = deque()
    for turn in range(1000):
        loads = [EngineLoad(0, count) for count in live]
        engine = pick_engine(loads, range(num_engines), turn)
        live[engine] += 1
        placed[engine] += 1
        ending.append(engine)
        if len(ending) > 20:
            live[ending.popleft()] -= 1
    assert max(placed) <= 1.1 * min(placed)


def test_a_long_prompt_counts_for_many_short_ones() -> None:
    """Case B161: one engine reads 5,000 tokens; the ten short requests that come go to the other."""
    loads = [EngineLoad(0, 0), EngineLoad(5000, 1)]
    for turn in range(10):
        engine = pick_engine(loads, (0, 1), turn)
        assert engine == 0
        loads[0] = EngineLoad(loads[0].num_unread_tokens + 10, loads[0].num_requests + 1)


def test_ranks_that_there_are_not_are_refused() -> None:
    assert [engine_of(rank, range(4, 6)) for rank in (4, 5)] == [0, 1]
    assert engine_of(0, range(1)) == 0
    for rank in (3, 6):
        with pytest.raises(RequestError, match=f"data_parallel_rank {rank} must be from 4 to 5"):
            engine_of(rank, range(4, 6))
    with pytest.raises(RequestError, match="data_parallel_rank 1 must be 0: there is one engine here"):
        engine_of(1, range(1))


def test_the_dead_get_nothing() -> None:
    assert {pick_engine(idle(3), {1}, turn) for turn in range(9)} == {1}


def test_a_beginning_has_a_home_unless_that_is_much_busier() -> None:
    prompts = [[n] * 300 for n in range(40)]
    homes = [pick_engine(idle(4), range(4), turn, prompt, "prefix") for turn, prompt in enumerate(prompts)]
    again = [pick_engine(idle(4), range(4), 7, [*prompt, 5], "prefix") for prompt in prompts]
    assert homes == again, "the turn does not matter, nor what follows the beginning"
    assert set(homes) == {0, 1, 2, 3}
    without = [pick_engine(idle(4), {0, 1, 2}, 7, prompt, "prefix") for prompt in prompts]
    assert all(new == old for new, old in zip(without, homes, strict=True) if old != 3), "only its own move"
    busy = [EngineLoad(300 if engine == homes[0] else 0, 0) for engine in range(4)]
    assert pick_engine(busy, range(4), 0, prompts[0], "prefix") == homes[0], "that much may be cached"
    assert pick_engine(busy, range(4), 0, prompts[0][:299], "prefix") != homes[0]


def test_turns_of_a_conversation_have_one_home() -> None:
    """They are short, and each has the one before as its beginning; so have the questions behind one system
    prompt."""
    dice = random.Random(1)

    def said() -> list[int]:
        return [dice.randrange(1000) for _ in range(40)]

    for first in range(20):
        prompt, homes = said(), set()
        for turn in range(5):
            homes.add(pick_engine(idle(4), range(4), first + turn, prompt, "prefix"))
            prompt = prompt + said()
        assert len(homes) == 1
    system = said()
    assert len({pick_engine(idle(4), range(4), turn, system + said(), "prefix") for turn in range(20)}) == 1


def stats(running: int, waiting: int) -> SchedulerStats:
    return SchedulerStats(num_running=running, num_waiting=waiting)


def test_who_waits_goes_where_a_seat_is_free() -> None:
    assert moves([stats(8, 5), stats(2, 0)], [13, 2], {0, 1}, {0, 1}) == [Move(0, 1, 5)]
    assert moves([stats(8, 5), stats(6, 0)], [13, 6], {0, 1}, {0, 1}) == [Move(0, 1, 2)]
    assert moves([stats(8, 5), stats(8, 1)], [13, 9], {0, 1}, {0, 1}) == []
    assert moves([stats(8, 5), stats(0, 0)], [13, 0], {0, 1}, {0}) == [], "not to those that take none"
    assert moves([stats(4, 9), stats(0, 0), stats(2, 0)], [13, 0, 2], {0, 1, 2}, {0, 1, 2}) == [
        Move(0, 1, 4),
        Move(0, 2, 2),
    ]


@dataclass
class Engine:
    """Seats, and a queue before them; a step takes one token of every seat."""

    seats: int
    waiting: deque[int] = field(default_factory=deque)  # lengths
    running: list[int] = field(default_factory=list)

    def step(self) -> None:
        self.running = [left - 1 for left in self.running if left > 1]
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.popleft())

    @property
    def stats(self) -> SchedulerStats:
        return stats(len(self.running), len(self.waiting))


@pytest.mark.parametrize("num_engines", [2, 3])
def test_no_engine_idles_while_requests_wait_elsewhere(num_engines: int) -> None:
    """500 requests of skewed lengths; statistics are a step old, as those of real engines are."""
    dice = random.Random(num_engines)
    engines = [Engine(8) for _ in range(num_engines)]
    lengths = [dice.choice([1, 2, 4, 8, 200]) for _ in range(500)]
    for turn, length in enumerate(lengths):
        loads = [EngineLoad(0, len(engine.running) + len(engine.waiting)) for engine in engines]
        engines[pick_engine(loads, range(num_engines), turn)].waiting.append(length)
    idle_steps = 0
    while any(engine.running or engine.waiting for engine in engines):
        for engine in engines:
            engine.step()
        told = [engine.stats for engine in engines]
        live = [len(engine.running) + len(engine.waiting) for engine in engines]
        wait_somewhere = any(engine.waiting for engine in engines)
        is_idle = any(not engine.running for engine in engines)
        idle_steps = idle_steps + 1 if is_idle and wait_somewhere else 0
        assert idle_steps <= 1
        for source, target, count in moves(told, live, range(num_engines), range(num_engines)):
            for _ in range(count):
                engines[target].waiting.append(engines[source].waiting.popleft())
