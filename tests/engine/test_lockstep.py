"""Ranks that step together, as real processes with a tiny model of experts: answers, sleep, and a death."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from mainspring.base.config import EXECUTE_TIMEOUT, EngineConfig, SchedulerConfig
from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import (
    CheckHealth,
    EngineCoreRequest,
    PauseScheduler,
    ResumeScheduler,
    Sleep,
    WakeUp,
)
from mainspring.base.params import SamplingParams
from mainspring.engine import launch
from mainspring.engine.dp_client import CoreGroup, DPLBAsyncMPClient

pytestmark = pytest.mark.anyio

MODEL = {
    "model_type": "mixtral",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_local_experts": 5,  # not a multiple of the ranks
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def config(interval: int = 1) -> EngineConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        prefill_schedule_interval=interval,
    )
    return EngineConfig(
        model=json.dumps(MODEL),
        vocab_size=128,
        executor="uniproc",
        scheduler=scheduler,
        block_size=16,
        depth=1,
        seed=3,
        load_format="dummy",
        kernels="numpy",
        num_gpu_blocks_override=100,
        num_threads=1,
    )


def request(number: int, max_tokens: int = 20) -> EngineCoreRequest:
    prompt = [(7 * number + at) % 128 for at in range(5 + number % 9)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=number)
    return EngineCoreRequest(f"r{number}", prompt, params)


@asynccontextmanager
async def ranks(number: int, *, lockstep: bool = True, interval: int = 1):
    group = await asyncio.to_thread(CoreGroup, [config(interval)] * number, lockstep=lockstep)
    client = DPLBAsyncMPClient(group)
    try:
        yield client
    finally:
        await client.shutdown()


async def collect(client: DPLBAsyncMPClient, numbers: set[int]) -> dict[int, list[int]]:
    said: dict[int, list[int]] = {number: [] for number in numbers}
    left = set(numbers)
    while left:
        news = await asyncio.wait_for(client.get_output(), 60)
        for output in news.outputs:
            number = int(output.request_id[1:])
            assert output.error is None
            said[number] += output.new_token_ids
            if output.finish_reason is not None:
                left.remove(number)
    return said


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """What one engine says, which has all experts."""

    async def ask() -> dict[int, list[int]]:
        async with ranks(1, lockstep=False) as client:
            for number in range(24):
                await client.add_request(request(number))
            return await collect(client, set(range(24)))

    return asyncio.run(ask())


@pytest.mark.parametrize(("number", "interval"), [(2, 1), (3, 4)])
async def test_random_lives_of_real_ranks(alone: dict[int, list[int]], number: int, interval: int) -> None:
    """Bursts and lulls, so that waves end and begin, and requests meet waves that have just ended. Sums over
    ranks have another order, which these draws do not notice."""
    dice = random.Random(number)
    async with ranks(number, interval=interval) as client:
        todo = list(range(24))
        while todo:
            burst = {todo.pop() for _ in range(min(len(todo), dice.randint(1, 6)))}
            for one in burst:
                await client.add_request(request(one))
                await asyncio.sleep(dice.choice([0.0, 0.0, 0.02]))
            said = await collect(client, burst)
            assert said == {one: alone[one] for one in burst}
            await asyncio.sleep(dice.choice([0.0, 0.01, 0.1]))
        await asleep(client)
        assert client.loads == [(0, 0)] * number


async def asleep(client: DPLBAsyncMPClient) -> None:
    """Every rank sleeps: soon nobody uses the processor any more."""
    used = [99]
    for _ in range(30):
        before = [cpu_ticks(process.process.pid) for process in client._clients]
        await asyncio.sleep(0.3)
        used = [cpu_ticks(one.process.pid) - was for one, was in zip(client._clients, before, strict=True)]
        if max(used) <= 5:  # hundredths of a second
            return
    raise AssertionError(f"ranks do not sleep: {used}")


async def until_it_raises(client: DPLBAsyncMPClient) -> None:
    while True:
        await asyncio.wait_for(client.get_output(), 30)


def cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def everything(said: dict[int, list[int]], client: DPLBAsyncMPClient) -> asyncio.Task[None]:
    """Reads all that comes into `said`, until it is cancelled."""

    async def read() -> None:
        while True:
            for output in (await client.get_output()).outputs:
                said.setdefault(int(output.request_id[1:]), []).extend(output.new_token_ids)

    return asyncio.get_running_loop().create_task(read())


async def until(condition: Callable[[], bool], reader: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            assert not reader.done(), reader.exception()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_what_a_pause_held_back_goes_on_in_a_new_wave(alone: dict[int, list[int]], mode: str) -> None:
    """Case B175: the wave has ended, and one rank alone has something to run when it is resumed."""
    said: dict[int, list[int]] = {}
    async with ranks(2) as client:
        reader = everything(said, client)
        await client.add_request(request(1))
        await until(lambda: len(said.get(1, [])) > 1, reader)
        assert await client.call(PauseScheduler(mode))
        await client.add_request(request(2))
        await asyncio.sleep(0.2)
        assert 2 not in said, "it waits for the end of the pause"
        assert await client.call(ResumeScheduler())
        await until(lambda: len(said.get(2, [])) == 20, reader)
        assert said[2] == alone[2]
        assert said[1] == (alone[1] if mode != "abort" else alone[1][: len(said[1])])
        await asleep(client)
        reader.cancel()


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_all_fall_asleep_together_while_a_wave_runs(alone: dict[int, list[int]], level: int) -> None:
    """Nobody gives memory back that a step of the others needs; a request that comes meanwhile waits."""
    said: dict[int, list[int]] = {}
    async with ranks(2) as client:
        reader = everything(said, client)
        for _ in range(3):
            said.clear()
            await client.add_request(request(1, max_tokens=200))
            await until(lambda: len(said.get(1, [])) > 1, reader)
            assert await client.call(Sleep(level))
            await client.add_request(request(2))
            await asyncio.sleep(0.1)
            assert await client.call(WakeUp())
            await until(lambda: len(said.get(2, [])) == 20, reader)
            assert said[2] == alone[2]
        assert await client.call(CheckHealth())
        reader.cancel()


async def test_aborted_requests_let_all_ranks_sleep() -> None:
    async with ranks(2) as client:
        for number in range(6):
            await client.add_request(request(number, max_tokens=200))
        for _ in range(5):
            await client.get_output()
        await client.abort_requests([f"r{number}" for number in range(6)])
        await asleep(client)


@pytest.mark.parametrize("victim", [0, 1])
async def test_one_that_is_killed_ends_all_and_everybody_is_told(victim: int) -> None:
    """Case B163: with the cause, which the others' lost connections are not."""
    async with ranks(2) as client:
        for number in range(6):
            await client.add_request(request(number, max_tokens=200))
        for _ in range(5):
            await client.get_output()
        os.kill(client._clients[victim].process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"process \(pid \d+\) was killed by SIGKILL"):
            await until_it_raises(client)
        with pytest.raises(EngineDeadError):
            await client.add_request(request(9))
    for one in client._clients:
        assert one.process.how_it_ended() is not None


@pytest.mark.parametrize("victim", [0, 1])
async def test_one_that_is_stopped_is_named_after_a_time(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case B163: all wait for it, and nobody else watches them."""
    monkeypatch.setenv(EXECUTE_TIMEOUT, "0.5")
    monkeypatch.setattr(launch, "KILL_AFTER_S", 0.2)
    async with ranks(3) as client:
        for number in range(6):
            await client.add_request(request(number, max_tokens=200))
        for _ in range(5):
            await client.get_output()
        os.kill(client._clients[victim].process.pid, signal.SIGSTOP)
        named = rf"rank {victim} has been silent for 0\.5 s \({EXECUTE_TIMEOUT}\)"
        with pytest.raises(EngineDeadError, match=named):
            await until_it_raises(client)
    assert all(one.process.how_it_ended() is not None for one in client._clients)
