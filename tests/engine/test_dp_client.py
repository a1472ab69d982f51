"""Several engine cores as one: who runs what, what a death costs, what is left over."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from msgspec import structs

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import ConfigError, EngineDeadError, RequestError
from mainspring.base.messages import CheckHealth, EngineCoreRequest, GetStats
from mainspring.base.params import SamplingParams
from mainspring.engine.dp_client import CoreGroup, DPLBAsyncMPClient, _Live
from mainspring.engine.mp_client import AsyncMPClient

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config(step_s: float = 0.0, **changes) -> EngineConfig:
    settings = {
        "model": "",
        "vocab_size": 1000,
        "executor": "mainspring.testing.process_executor:ProcessExecutor",
        "executor_args": {"step_s": step_s, "fake": {"num_blocks": 400}},
        "scheduler": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=400),
        "block_size": 16,
        "depth": 1,
        "seed": 0,
    }
    return EngineConfig(**settings | changes)


def request(name: str, max_tokens: int = 10, rank: int | None = None, prompt: int = 5) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1)
    number = int("".join(filter(str.isdigit, name)) or 0)
    return EngineCoreRequest(name, [1 + number % 900] * prompt, params, data_parallel_rank=rank)


@asynccontextmanager
async def cores(num_ranks: int = 2, step_s: float = 0.0, shutdown_timeout_s: float = 0.0):
    start = partial(CoreGroup, [config(step_s)] * num_ranks, shutdown_timeout_s=shutdown_timeout_s)
    group = await asyncio.to_thread(start)
    client = DPLBAsyncMPClient(group)
    try:
        yield client
    finally:
        await client.shutdown()
        for process in group.processes:
            assert process.how_it_ended() is not None


async def collect(client, names: set[str], on_news=lambda said: None) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {name: [] for name in names}
    left = set(names)
    while left:
        news = await asyncio.wait_for(client.get_output(), 30)
        for output in news.outputs:
            said[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                left.remove(output.request_id)
        on_news(said)
    return said


async def until(is_true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_true():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not come true")


async def alone(requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    client = await AsyncMPClient.launch(config())
    try:
        for one in requests:
            await client.add_request(one)
        return await collect(client, {one.request_id for one in requests})
    finally:
        await client.shutdown()


async def test_all_ranks_work_and_counts_return_to_nothing() -> None:
    """Case B161: after ends and aborts of every kind the counts are exactly 0."""
    async with cores() as client:
        for n in range(40):
            await client.add_request(request(f"r{n}", max_tokens=400 if n % 4 == 0 else 10))
        assert [load.num_requests for load in client.loads] == [20, 20]
        aborted = {f"r{n}" for n in range(0, 40, 4)}
        await client.abort_requests([*aborted, "nobody"])
        await collect(client, {f"r{n}" for n in range(40)} - aborted)
        assert client.loads == [(0, 0), (0, 0)]
        for _ in range(500):
            stats = await client.call(GetStats())
            if not stats.num_running:
                break
            await asyncio.sleep(0.01)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert await client.call(CheckHealth())


async def test_a_rank_that_is_asked_for_gets_it() -> None:
    async with cores() as client:
        for n in range(6):
            await client.add_request(request(f"r{n}", rank=1))
        assert [load.num_requests for load in client.loads] == [0, 6]
        await collect(client, {f"r{n}" for n in range(6)})
        with pytest.raises(RequestError, match="data_parallel_rank 2 must be from 0 to 1"):
            await client.add_request(request("r9", rank=2))


async def test_a_dead_rank_loses_no_token_and_says_none_twice() -> None:
    """Case B163: kill -9 of one rank in the middle of twelve answers: all are what they would have been."""
    requests = [request(f"r{n}", max_tokens=60) for n in range(12)]
    expected = await alone([request(f"r{n}", max_tokens=60) for n in range(12)])
    async with cores(step_s=0.005) as client:
        for one in requests:
            await client.add_request(one)
        killed = False

        def kill_once(said: dict[str, list[int]]) -> None:
            nonlocal killed
            if not killed and sum(map(len, said.values())) > 100:
                os.kill(client._clients[1].process.pid, signal.SIGKILL)
                killed = True

        assert await collect(client, set(expected), kill_once) == expected
        assert killed
        gone = client._stats[1]
        assert gone.num_scheduled_tokens > 0  # counters only grow, also those of all together
        assert (gone.num_running, gone.num_waiting, gone.kv_cache_usage) == (0, 0, 0.0)
        await client.add_request(request("r50", rank=1))  # it is gone; another does as well
        await collect(client, {"r50"})
        assert client.loads == [(0, 0), (0, 0)]


async def test_the_journal_is_its_own() -> None:
    """Siblings of one question may come with one list, and their caller may keep a journal, too: what is
    passed on is nobody else's."""
    shared: list[int] = []
    asked = [structs.replace(request(f"r{n}", max_tokens=30), output_token_ids=shared) for n in range(12)]
    expected = await alone([request(f"r{n}", max_tokens=30) for n in range(12)])
    async with cores(step_s=0.003) as client:
        for one in asked:
            await client.add_request(one)
        os.kill(client._clients[1].process.pid, signal.SIGKILL)
        assert await collect(client, set(expected)) == expected
    assert shared == []


async def test_the_last_rank_s_end_is_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async with cores(step_s=0.01) as client:
        await client.add_request(request("r1", max_tokens=300))
        for other in client._clients:
            os.kill(other.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            await collect(client, {"r1"})
        with pytest.raises(EngineDeadError):
            await client.add_request(request("r2"))
    assert "no other is left" in caplog.text


@pytest.mark.parametrize("shutdown_timeout_s", [0.0, 20.0])
async def test_a_rank_that_is_asked_to_end_hands_over(shutdown_timeout_s: float) -> None:
    """Case B163: SIGTERM to one of two. It finishes what it has time for and the other has the rest; nothing
    new goes to it, and commands leave it out."""
    names = [f"r{n}" for n in range(12)]
    expected = await alone([request(name, max_tokens=60) for name in [*names, "r90", "r91"]])
    async with cores(step_s=0.005, shutdown_timeout_s=shutdown_timeout_s) as client:
        for name in names:
            await client.add_request(request(name, max_tokens=60))
        reader = asyncio.create_task(collect(client, set(expected)))
        await until(lambda: sum(len(live.request.output_token_ids) for live in client._live.values()) > 100)
        leaving = client._clients[1]
        os.kill(leaving.process.pid, signal.SIGTERM)
        await until(lambda: leaving.is_leaving)
        for name in ("r90", "r91"):
            await client.add_request(request(name, max_tokens=60, rank=1))
        assert await client.call(CheckHealth()) is True
        assert await reader == expected
        await until(lambda: leaving.process.how_it_ended() is not None)
        assert await client.call(CheckHealth()) is True


async def test_who_has_said_that_it_ends_is_no_zombie() -> None:
    """Though the others go on, and its client is kept with theirs."""
    breaks = {"phase": "decode", "deed": "raise", "fake": {"num_blocks": 400}}
    group = await asyncio.to_thread(CoreGroup, [config(executor_args=breaks), config(0.002)])
    client = DPLBAsyncMPClient(group)
    try:
        await client.add_request(request("r1", max_tokens=60, rank=0))
        said = await collect(client, {"r1"})
        assert len(said["r1"]) == 60
        await until(lambda: not os.path.exists(f"/proc/{group.processes[0].pid}"))  # where a zombie would be
    finally:
        await client.shutdown()


async def test_no_rank_idles_while_requests_wait_in_another() -> None:
    """Four seats each. Everything long is in one rank and the other runs dry: those who wait move over, and
    answer what they would have answered where they were."""
    expected = await alone([request(f"r{n}", max_tokens=40) for n in range(16)])
    async with cores(step_s=0.004) as client:
        for n in range(16):
            await client._place(_Live(request(f"r{n}", max_tokens=40)), 0)
        moved = False

        def look(said: dict[str, list[int]]) -> None:
            nonlocal moved
            moved |= client.loads[1].num_requests >= 4

        assert await collect(client, set(expected), look) == expected
        assert moved
        assert client.loads == [(0, 0), (0, 0)]


@pytest.mark.parametrize("killed", [0, 1])
async def test_a_start_that_fails_says_who_failed_first(killed: int) -> None:
    """The others were given up for that."""
    deeds = [{"phase": "loading", "deed": "sleep"}, {"phase": "loading", "deed": "sleep"}]
    deeds[killed] = {"phase": "loading", "deed": "kill"}
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL while it was starting"):
        await asyncio.to_thread(CoreGroup, [config(executor_args=deed) for deed in deeds])


async def test_one_that_does_not_start_ends_the_others() -> None:
    good, bad = config(), config(executor="nonsense")
    with pytest.raises(ConfigError, match="nonsense"):
        await asyncio.to_thread(CoreGroup, [good, bad])


@pytest.mark.slow
async def test_five_hundred_of_skewed_lengths() -> None:
    """Done when all have ended: no rank was idle over two looks while another had requests waiting."""
    async with cores(step_s=0.002) as client:
        names = set()
        for n in range(500):
            one = request(f"r{n}", max_tokens=200 if n % 10 == 0 else 5, prompt=1 + n % 50)
            names.add(one.request_id)
            await client.add_request(one)
        idle_looks, worst = 0, 0

        def look(said: dict[str, list[int]]) -> None:
            nonlocal idle_looks, worst
            waiting = any(stats.num_waiting > 1 for stats in client._stats)
            idle_looks = idle_looks + 1 if waiting and min(client._num_requests) == 0 else 0
            worst = max(worst, idle_looks)

        await collect(client, names, look)
        assert worst <= 2
        assert client.loads == [(0, 0), (0, 0)]
