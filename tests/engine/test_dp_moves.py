"""Requests that change ranks, with ranks that say what the test says: news and deaths in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GetStats,
    SchedulerStats,
)
from mainspring.base.params import SamplingParams
from mainspring.engine import dp_client
from mainspring.engine.conversation import CommandFailed
from mainspring.engine.dp_client import DPLBAsyncMPClient

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Rank:
    """Fits `AsyncMPClient`."""

    def __init__(self, process: object) -> None:
        self.has: list[str] = []  # ids of requests, as they came
        self.texts: dict[str, list[int]] = {}  # of each, the tokens it came with
        self.aborted: list[str] = []
        self.is_leaving = False
        self.answer: Callable[[Command], CommandResult] = lambda command: True
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._dead: str | None = None
        self._news: asyncio.Queue[EngineCoreOutputs | EngineDeadError] = asyncio.Queue()

    async def add_request(self, request: EngineCoreRequest) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        self.has.append(request.request_id)
        self.texts[request.request_id] = list(request.output_token_ids)

    async def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call(self, command: Command) -> CommandResult:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        await self.may_answer.wait()
        return self.answer(command)

    async def get_output(self) -> EngineCoreOutputs:
        news = await self._news.get()
        if isinstance(news, EngineDeadError):
            raise news
        return news

    # -- for tests

    def says(self, tokens: dict[str, list[int]], running: int = 0, waiting: int = 0, **more: object) -> None:
        outputs = [EngineCoreOutput(name, token_ids) for name, token_ids in tokens.items()]
        stats = SchedulerStats(num_running=running, num_waiting=waiting, **more)
        self._news.put_nowait(EngineCoreOutputs(outputs=outputs, scheduler_stats=stats))

    def ends(self, *names: str, reason: FinishReason = FinishReason.STOP) -> None:
        outputs = [EngineCoreOutput(name, [], reason) for name in names]
        self._news.put_nowait(EngineCoreOutputs(outputs=outputs))

    def dies(self, cause: str = "killed") -> None:
        self._dead = cause
        self._news.put_nowait(EngineDeadError(cause))


@pytest.fixture
def make_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[DPLBAsyncMPClient, list[Rank]]]:
    monkeypatch.setattr(dp_client, "AsyncMPClient", Rank)

    def make(number: int, **settings: object) -> tuple[DPLBAsyncMPClient, list[Rank]]:
        ready = SimpleNamespace(max_model_len=100)
        group = SimpleNamespace(processes=[None] * number, ready=ready, is_lockstep=False)
        client = DPLBAsyncMPClient(group, **settings)
        return client, client._clients

    return make


async def add(client: DPLBAsyncMPClient, *names: str, rank: int | None = None, **fields: object) -> None:
    for name in names:
        params = SamplingParams(max_tokens=9)
        await client.add_request(
            EngineCoreRequest(name, [1, 2, 3], params, data_parallel_rank=rank, **fields)
        )


async def hear(client: DPLBAsyncMPClient) -> list[tuple[str, list[int], FinishReason | None]]:
    news = await asyncio.wait_for(client.get_output(), 5)
    return [(output.request_id, output.new_token_ids, output.finish_reason) for output in news.outputs]


async def settled() -> None:
    """What was said is in the client's queue."""
    for _ in range(5):
        await asyncio.sleep(0)


def names(ids: list[str]) -> list[str]:
    return [one.partition("#")[0] for one in ids]


async def test_a_death_that_was_not_read_yet_ends_nobody_else(make_ranks) -> None:
    """Case B163: a seat is free in a rank that has just died. Who is moved there goes on where it can, and
    the living rank's requests with it."""
    client, (a, b) = make_ranks(2)
    await add(client, *(f"r{n}" for n in range(8)))
    b.ends(*b.has)
    assert len(await hear(client)) == 4
    a.says({name: [7] for name in a.has[:2]}, running=2, waiting=2)
    await settled()
    b.dies()
    assert [tokens for _, tokens, _ in await hear(client)] == [[7], [7]]
    mine = sorted(set(names(a.has)))
    assert len(mine) == 4
    a.ends(*(next(there for there in reversed(a.has) if there.startswith(name)) for name in mine))
    assert sorted(name for name, _, _ in await hear(client)) == mine
    assert client.loads == [(0, 0), (0, 0)]


async def test_a_word_of_an_earlier_stay_does_not_count(make_ranks) -> None:
    """Case B163: from A to B, and after B's death to A again. The token that A said in the first stay is on
    its way still, and comes again in the second."""
    client, (a, b) = make_ranks(2)
    await add(client, *(f"r{n}" for n in range(8)))
    first = a.has[2]
    b.ends(*b.has)
    await hear(client)
    a.says({name: [7] for name in a.has[:2]}, running=2, waiting=2)
    await hear(client)
    assert first in a.aborted
    b.dies()
    a.says({first: [42]})
    await settled()
    assert await hear(client) == []
    again = a.has[-2]
    assert names([again]) == names([first])
    assert again != first
    a.says({again: [42]})
    assert await hear(client) == [(*names([first]), [42], None)]


async def test_a_request_that_has_met_two_deaths_meets_no_third(make_ranks) -> None:
    """Case B163: it may be what ends them. The ranks that are left, and their requests, go on."""
    client, ranks = make_ranks(4)
    await add(client, *(f"r{n}" for n in range(8)))
    await add(client, "poison")

    def home() -> Rank:
        return ranks[client._live["poison"].engine]

    first = home()
    first.dies("out of memory")
    await settled()
    waiting = asyncio.create_task(client.get_output())
    await settled()
    assert home() is not first
    second = home()
    assert "poison" in names(second.has)
    second.dies("out of memory")
    (*ends,) = (await asyncio.wait_for(waiting, 5)).outputs
    assert "poison" in [end.request_id for end in ends]
    for end in ends:
        assert end.finish_reason is FinishReason.ERROR
        assert end.error == "2 engine cores have ended while they had it, the last one: out of memory"
    assert len(client._alive) == 2
    assert set(client._live) == {f"r{n}" for n in range(8)} - {end.request_id for end in ends}
    assert sum(count for _, count in client.loads) == len(client._live) >= 6


async def test_who_leaves_gets_nothing_and_what_it_aborts_goes_on(make_ranks) -> None:
    """Case B163: with what was said before."""
    client, (a, b) = make_ranks(2)
    await add(client, "r0", "r1", rank=0)
    a.says({name: [5] for name in a.has})
    await hear(client)
    a.is_leaving = True
    await add(client, "r2", "r3", rank=0)
    await add(client, "r4", "r5")
    assert names(b.has) == ["r2", "r3", "r4", "r5"]
    a.ends(a.has[0])
    assert await hear(client) == [("r0", [], FinishReason.STOP)]
    a.ends(a.has[1], reason=FinishReason.ABORT)
    a.dies("it was told to end")
    assert await hear(client) == []
    assert names(b.has)[-1] == "r1"
    assert b.texts[b.has[-1]] == [5]
    b.ends(*b.has)
    assert len(await hear(client)) == 5
    assert client.loads == [(0, 0), (0, 0)]


async def test_where_all_leave_what_is_aborted_is(make_ranks) -> None:
    client, (a, b) = make_ranks(2)
    await add(client, "r0", "r1")
    a.is_leaving = b.is_leaving = True
    a.ends(*a.has, reason=FinishReason.ABORT)
    assert [reason for _, _, reason in await hear(client)] == [FinishReason.ABORT]
    b.ends(*b.has)
    assert [reason for _, _, reason in await hear(client)] == [FinishReason.STOP]


async def test_an_abort_that_nobody_leaves_for_is_one(make_ranks) -> None:
    """Also where its rank is known to be dead before that is read."""
    client, (a, _) = make_ranks(2)
    await add(client, "r0", "r1", rank=0)
    a.ends(a.has[0], reason=FinishReason.ABORT)
    assert await hear(client) == [("r0", [], FinishReason.ABORT)]
    a.ends(a.has[1], reason=FinishReason.ABORT)
    await settled()
    a.dies()
    await add(client, "r2", rank=0)
    assert await hear(client) == [("r1", [], FinishReason.ABORT)]


async def test_who_leaves_in_good_order_makes_nobody_a_suspect(make_ranks) -> None:
    client, ranks = make_ranks(4)
    await add(client, "r0", rank=0)
    waiting = asyncio.create_task(client.get_output())
    for _ in range(3):
        home = ranks[client._live["r0"].engine]
        home.is_leaving = True
        home.dies("it was told to end")
        await settled()
    last = ranks[client._live["r0"].engine]
    last.ends(*last.has)
    assert [end.finish_reason for end in (await waiting).outputs] == [FinishReason.STOP]


async def test_a_silent_rank_is_passed_by_until_it_speaks(
    make_ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B163: stopped, or in a long step. It keeps what it has; where all are silent nobody is passed
    by."""
    monkeypatch.setattr(dp_client, "SILENT_S", 0.05)
    client, (a, b) = make_ranks(2)
    await add(client, "r0", rank=0)
    await asyncio.sleep(0.06)
    await add(client, "r1", "r2", "r3")
    assert (names(a.has), names(b.has)) == (["r0"], ["r1", "r2", "r3"])
    a.says({a.has[0]: [5]})
    assert await hear(client) == [("r0", [5], None)]
    await add(client, "r4")
    assert names(a.has) == ["r0", "r4"]
    await asyncio.sleep(0.06)
    await add(client, "r5")
    assert names(a.has) == ["r0", "r4", "r5"], "both are silent, and it has less"


async def test_no_seat_is_looked_for_where_nothing_is_taken(make_ranks) -> None:
    client, (a, b) = make_ranks(2)
    await add(client, "r0", "r1", "r2", "r3")
    b.ends(*b.has)
    await hear(client)
    b.is_leaving = True
    a.says({a.has[0]: [5]}, running=1, waiting=1)
    await hear(client)
    assert a.aborted == []
    b.is_leaving = False
    a.says({a.has[0]: [5]}, running=1, waiting=1)
    await hear(client)
    assert len(a.aborted) == 1


async def test_a_command_leaves_out_who_ends_meanwhile(make_ranks) -> None:
    """Case B163: the others have obeyed. One that cannot, and stays, is heard."""
    client, (a, b, c) = make_ranks(3)
    assert await client.call(CheckHealth()) is True
    a.dies()
    assert await client.call(CheckHealth()) is True

    def refuse(command: Command) -> CommandResult:
        b.is_leaving = True
        raise CommandFailed("the engine core is shutting down")

    b.answer = refuse
    assert await client.call(CheckHealth()) is True, "asked to end while the command was on its way"

    def fail(command: Command) -> CommandResult:
        raise CommandFailed("it cannot")

    c.answer = fail
    with pytest.raises(CommandFailed, match="it cannot"):
        await client.call(CheckHealth())
    b.dies()
    c.dies("the last")
    with pytest.raises(EngineDeadError):
        await client.call(CheckHealth())


async def test_counters_only_grow_and_blocks_are_of_those_that_live(make_ranks) -> None:
    client, (a, b) = make_ranks(2)
    a.says({}, num_steps=10, num_scheduled_tokens=100, kv_cache_usage=0.5)
    b.says({}, running=1, num_steps=10, num_scheduled_tokens=70, kv_cache_usage=0.3)
    for _ in range(2):
        stats = (await client.get_output()).scheduler_stats
    assert (stats.num_scheduled_tokens, stats.kv_cache_usage) == (170, 0.4)
    a.answer = lambda command: SchedulerStats(num_steps=12, num_scheduled_tokens=120, kv_cache_usage=0.5)
    a.says({}, num_steps=11, num_scheduled_tokens=110)  # said before the answer, and read after it
    b.dies()
    assert (await client.call(GetStats())).num_scheduled_tokens == 190
    assert (await client.get_output()).scheduler_stats.num_scheduled_tokens == 190
    waiting = asyncio.create_task(client.get_output())
    await settled()
    stats = await client.call(GetStats())
    assert (stats.num_scheduled_tokens, stats.num_running, stats.kv_cache_usage) == (190, 0, 0.5)
    waiting.cancel()


async def test_an_answer_that_is_read_after_a_death_is_the_dead_s(make_ranks) -> None:
    client, (a, b) = make_ranks(2)
    b.answer = lambda command: SchedulerStats(num_running=3, num_steps=1, num_scheduled_tokens=7)
    a.answer = lambda command: SchedulerStats()
    a.may_answer.clear()
    asking = asyncio.create_task(client.call(GetStats()))
    await settled()
    b.dies()
    waiting = asyncio.create_task(client.get_output())
    await settled()
    a.may_answer.set()
    stats = await asking
    assert (stats.num_scheduled_tokens, stats.num_running) == (7, 0)
    waiting.cancel()


@pytest.mark.parametrize(("by_priority", "first"), [(True, "urgent"), (False, "long")])
async def test_a_free_seat_is_for_the_first_in_line(make_ranks, by_priority: bool, first: str) -> None:
    """The first two may be being read. With priorities that is who comes first by them."""
    client, (a, b) = make_ranks(2, by_priority=by_priority)
    await add(client, "other", rank=1)
    for number, (name, priority) in enumerate(
        [("x", 0), ("y", 0), ("long", 5), ("late", 7), ("urgent", 1), ("fresh", 3)]
    ):
        client._turn = number
        client._num_requests[1] += 100  # so that the router takes A
        await add(client, name, priority=priority, arrival_time_s=float(number))
        client._num_requests[1] -= 100
    assert len(a.has) == 6
    b.ends(*b.has)
    await hear(client)
    a.says({}, running=1, waiting=4)
    await hear(client)
    assert names(b.has) == ["other", first]
