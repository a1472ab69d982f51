"""Clients of a core in another process: the simulation's promise from outside, and what is only theirs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs
from process_tools import (
    DEATH_BOUND_S,
    EXECUTOR,
    FACTS,
    PATIENCE_S,
    VOCAB_SIZE,
    Journal,
    Place,
    fake_config,
    in_thread,
    own_place,
    read_all,
    request,
    wait_until,
)

from mainspring.base.config import EngineArgs, EngineConfig, resolve
from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import (
    CheckHealth,
    Command,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GetStats,
    IsPaused,
    PauseScheduler,
    ResetPrefixCache,
    ResumeScheduler,
    SchedulerStats,
    Sleep,
)
from mainspring.engine.client import EngineCoreClient, InprocClient
from mainspring.engine.conversation import CommandFailed
from mainspring.engine.mp_client import AsyncMPClient, SyncMPClient
from mainspring.testing.fake_model import FakeModel, reference, reference_prompt_logprobs
from mainspring.testing.scenarios import Dice, SeededDice, make_guest
from mainspring.testing.simulation import Guest, Scenario, Transcript, assert_equal_logprobs


@pytest.fixture
def place() -> Iterator[Place]:
    with own_place() as place:
        yield place


# -- the promise, from outside -------------------------------------------------------------------------------

NUM_LIVES = 60  # of each client at each depth
CHILD = Scenario(
    guests=(),
    windows=(None, 7),
    block_size=4,
    num_blocks=44,  # one longest sequence, and little more: so that requests push each other out
    max_model_len=48,
    max_num_seqs=4,
    max_num_batched_tokens=16,
)


def child_config(depth: int) -> EngineConfig:
    args = EngineArgs(
        executor=EXECUTOR,
        block_size=CHILD.block_size,
        num_gpu_blocks_override=1 + CHILD.num_blocks,
        max_model_len=CHILD.max_model_len,
        max_num_seqs=CHILD.max_num_seqs,
        max_num_batched_tokens=CHILD.max_num_batched_tokens,
        async_scheduling=depth == 2,
    )
    fake = {"windows": CHILD.windows, "when": "at random"}
    return structs.replace(resolve(args, FACTS), executor_args={"checked": True, "fake": fake})


def make_visitor(dice: Dice, name: str) -> Guest:
    """A guest without what needs a grammar or a KV connector inside."""
    made = make_guest(dice, CHILD, 0)
    message = structs.replace(made.message, request_id=name, structured_outputs=None)
    return replace(made, message=message, structure=None, elsewhere=())


@dataclass
class World:
    """All that a client has heard, over many lives: news of a request that it aborted may come late."""

    model: FakeModel = field(default_factory=lambda: FakeModel(VOCAB_SIZE, CHILD.windows))
    transcripts: dict[str, Transcript] = field(default_factory=dict)

    def take(self, news: EngineCoreOutputs) -> None:
        for output in news.outputs:
            transcript = self.transcripts[output.request_id]
            if not transcript.aborted:
                transcript.take(output)

    def check(self, guest: Guest) -> None:
        name, got = guest.message.request_id, self.transcripts[guest.message.request_id]
        said = reference(guest.message, self.model, CHILD.max_model_len)
        if got.aborted:
            assert got.token_ids == said.token_ids[: len(got.token_ids)], f"{name} said something else"
            return
        assert got.last is not None, f"{name} got no answer"
        assert got.token_ids == said.token_ids, f"{name} said something else"
        assert (got.last.finish_reason, got.last.stop_reason) == said[1:3], f"{name} ended for another reason"
        assert_equal_logprobs(got.logprobs, said.logprobs, name)
        wanted = reference_prompt_logprobs(guest.message, self.model)
        prompt_logprobs = [] if got.prompt_logprobs is None else [got.prompt_logprobs]
        assert_equal_logprobs(prompt_logprobs, [] if wanted is None else [wanted], name)


class Actions:
    """What a client can do, awaited, whichever kind it is."""

    def __init__(self, client: SyncMPClient | AsyncMPClient) -> None:
        self.client = client

    async def add(self, message: EngineCoreRequest) -> None:
        await self._done(self.client.add_request(message))

    async def abort(self, name: str) -> None:
        await self._done(self.client.abort_requests([name]))

    async def call(self, command: Command) -> Any:
        return await self._done(self.client.call(command))

    async def news(self) -> EngineCoreOutputs:
        return await self._done(self.client.get_output())

    async def _done(self, result: Any) -> Any:
        return await result if isinstance(result, Awaitable) else result


async def live(do: Actions, world: World, seed: int) -> list[Guest]:
    """One scenario, in which time is counted in news. Commands that must not matter come in between."""
    dice = SeededDice(seed)
    guests = [make_visitor(dice, f"{seed}-{i}") for i in range(dice.integer(1, 8))]
    command = dice.maybe(
        40, lambda: dice.pick([GetStats(), ResetPrefixCache(True), PauseScheduler("keep", True)])
    )
    command_at = dice.integer(0, 20)
    last = max([g.arrives_at for g in guests] + [g.aborted_at or 0 for g in guests] + [command_at])
    now = 0
    while now <= last or any(not world.transcripts[g.message.request_id].is_over for g in guests):
        for guest in guests:
            name = guest.message.request_id
            if guest.arrives_at == now:
                world.transcripts[name] = Transcript()
                await do.add(structs.replace(guest.message))
            if guest.aborted_at == now and not world.transcripts[name].is_over:
                world.transcripts[name].aborted = True
                await do.abort(name)
        if command is not None and now == command_at:
            assert await do.call(command)
            assert await do.call(IsPaused()) == isinstance(command, PauseScheduler)
            await do.call(ResumeScheduler())
        arrived = [t for g in guests if (t := world.transcripts.get(g.message.request_id)) is not None]
        if any(not transcript.is_over for transcript in arrived):
            world.take(await do.news())
        now += 1
    return guests


async def live_often(client: SyncMPClient | AsyncMPClient) -> None:
    do, world = Actions(client), World()
    for seed in range(NUM_LIVES):
        for guest in await live(do, world, seed):
            world.check(guest)
        stats: SchedulerStats = await do.call(GetStats())
        left = (stats.num_running, stats.num_waiting, stats.num_parked, stats.kv_cache_usage)
        assert left == (0, 0, 0, 0.0), f"something is left after life {seed}"
    assert stats.num_preemptions > 10
    assert stats.prefix_cache_hits > 100
    assert sum(transcript.aborted for transcript in world.transcripts.values()) > 10


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_said_through_a_sync_client(place: Place, depth: int):
    """As `core/test_property.py`, through sockets: a child lives many lives, checked inside at every step."""
    asyncio.run(live_often(place.client(child_config(depth))))


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_said_through_an_async_client(place: Place, depth: int):
    async def main() -> None:
        client = await AsyncMPClient.launch(child_config(depth))
        try:
            await live_often(client)
        finally:
            await client.shutdown()

    asyncio.run(main())


# -- one contract --------------------------------------------------------------------------------------------


def with_async_client(use: Callable[[AsyncMPClient], Awaitable[None]], config: EngineConfig) -> None:
    async def main() -> None:
        client = await EngineCoreClient.make_async_client(config)
        try:
            await asyncio.wait_for(use(client), PATIENCE_S)
        finally:
            await client.shutdown()

    asyncio.run(main())


def test_make_client_picks_who_keeps_the_contract(place: Place):
    here = EngineCoreClient.make_client(fake_config(), in_process=True)
    there = EngineCoreClient.make_client(fake_config())
    assert isinstance(here, InprocClient)
    assert isinstance(there, SyncMPClient)
    place.clients.append(there)
    assert here.max_model_len == there.max_model_len
    answers = []
    for client in (here, there):
        journal = Journal(request("a"), request("b", 3))
        for message in journal.messages.values():
            client.add_request(structs.replace(message))
        read_all(client, journal).assert_whole()
        with pytest.raises(Exception, match="sleep level 9"):
            client.call(Sleep(9))
        assert client.get_output() == EngineCoreOutputs()
        answers.append(structs.replace(client.call(GetStats()), num_steps=0))
        client.shutdown()
        client.shutdown()
    assert answers[0] == answers[1]


def test_after_its_shutdown_a_client_says_so(place: Place):
    client = place.client(fake_config())
    client.add_request(request("a"))
    client.shutdown()
    for use in (
        lambda: client.add_request(request("b")),
        lambda: client.call(GetStats()),
        client.get_output,
    ):
        with pytest.raises(EngineDeadError, match="was shut down"):
            use()
    client.abort_requests(["a"])


def test_news_that_comes_while_a_command_is_waited_for_is_kept(place: Place):
    client = place.client(fake_config(step_s=0.002))
    journal = Journal(request("a", 40), request("b", 40))
    for message in journal.messages.values():
        client.add_request(message)
    for _ in range(10):
        client.call(GetStats())
        time.sleep(0.005)
    read_all(client, journal).assert_whole()


def test_many_commands_at_once_get_each_its_own_answer(place: Place):
    async def use(client: AsyncMPClient) -> None:
        commands: list[Command] = [GetStats(), IsPaused(), CheckHealth(), Sleep(9)] * 25
        answers = await asyncio.gather(*map(client.call, commands), return_exceptions=True)
        for command, answer in zip(commands, answers, strict=True):
            match command:
                case GetStats():
                    assert isinstance(answer, SchedulerStats)
                case IsPaused():
                    assert answer is False
                case CheckHealth():
                    assert answer is True
                case _:
                    assert isinstance(answer, CommandFailed)

    with_async_client(use, fake_config())


def test_a_command_that_was_given_up_disturbs_nobody(place: Place):
    async def use(client: AsyncMPClient) -> None:
        journal = Journal(request("a", 60))
        await client.add_request(request("a", 60))
        journal.take(await client.get_output())
        pause = asyncio.create_task(client.call(PauseScheduler("wait")))
        journal.take(await client.get_output())
        pause.cancel()
        assert await client.call(ResumeScheduler())
        while not journal.is_complete:
            journal.take(await client.get_output())
        journal.assert_whole()
        assert await client.call(CheckHealth())

    with_async_client(use, fake_config(step_s=0.002))


def test_everybody_who_waits_is_told_of_a_death(place: Place):
    """Case B001, the core's part: a process that was killed could not say anything."""

    async def use(client: AsyncMPClient) -> None:
        await client.add_request(request("a", 2))
        while (await client.get_output()).outputs[-1].finish_reason is None:
            pass
        await client.call(PauseScheduler("keep"))
        await client.add_request(request("held"))
        await client.abort_requests(["held"])
        reading = asyncio.create_task(client.get_output())
        stopped = client.process.process
        stopped.send_signal(19)
        calls = [asyncio.create_task(client.call(GetStats())) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (reading, *calls))
        stopped.kill()
        killed_s = time.monotonic()
        told = await asyncio.gather(reading, *calls, return_exceptions=True)
        assert time.monotonic() - killed_s < DEATH_BOUND_S
        assert all(isinstance(error, EngineDeadError) and "SIGKILL" in str(error) for error in told), told
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await client.get_output()

    with_async_client(use, fake_config())


def test_a_shutdown_is_told_to_who_waits_for_news(place: Place):
    async def use(client: AsyncMPClient) -> None:
        reading = asyncio.create_task(client.get_output())
        await asyncio.sleep(0)
        await client.shutdown()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(reading, DEATH_BOUND_S)
        with pytest.raises(EngineDeadError):
            await client.get_output()

    with_async_client(use, fake_config())


def test_a_core_that_has_said_that_it_ends_is_waited_for(place: Place):
    """It would stay behind as a zombie, for as long as its client is kept."""

    async def read(client: AsyncMPClient) -> None:
        while True:
            await client.get_output()

    async def use(client: AsyncMPClient) -> None:
        await client.add_request(request("r"))
        with pytest.raises(EngineDeadError, match="PlannedFailure"):
            await read(client)
        pid = client.process.pid
        await asyncio.to_thread(wait_until, lambda: not os.path.exists(f"/proc/{pid}"), DEATH_BOUND_S)

    with_async_client(use, fake_config(phase="decode", deed="raise"))


def test_two_may_end_a_client_at_once(place: Place):
    """Case B001: who sees that the core was killed ends the client while its owner does; both return."""

    async def use(client: AsyncMPClient) -> None:
        client.process.process.kill()
        with pytest.raises(EngineDeadError):
            await client.get_output()
        await asyncio.gather(*(client.shutdown() for _ in range(4)))

    for _ in range(5):
        with_async_client(use, fake_config())


def test_a_reader_who_comes_late_finds_everything(place: Place):
    """Case B166: eight streams of which nothing is read until they would have ended long ago."""
    client = place.client(fake_config(settings={"max_num_seqs": 8}))
    journal = Journal(*(request(f"r{i}", 200) for i in range(8)))
    for message in journal.messages.values():
        client.add_request(message)
    time.sleep(0.5)
    read_all(client, journal).assert_whole()


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_async_reader_who_comes_late_finds_everything(place: Place, is_waiting: bool):
    """Case B166: more messages than are read ahead, while the loop stands still; also where one waits for
    them, and is woken when the last of those has come."""

    async def use(client: AsyncMPClient) -> None:
        journal = Journal(*(request(f"r{i}", 200) for i in range(8)))
        for message in journal.messages.values():
            await client.add_request(message)
        reading = asyncio.create_task(client.get_output()) if is_waiting else None
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251  the loop stands still
        if reading is not None:
            journal.take(await reading)
        while not journal.is_complete:
            journal.take(await client.get_output())
        journal.assert_whole()

    with_async_client(use, fake_config(settings={"max_num_seqs": 8}))


def test_thousands_of_requests_and_aborts_at_once(place: Place):
    """Case B166: none is lost, none hangs, and nothing is left."""
    client = place.client(fake_config(settings={"max_num_seqs": 64, "max_num_batched_tokens": 256}))
    messages = [request(f"r{i}", 1, 2) for i in range(2000)]
    for message in messages:
        client.add_request(message)
    client.abort_requests([message.request_id for message in messages[1::2]])
    ends: dict[str, FinishReason] = {}
    while len(ends.keys() & {message.request_id for message in messages[::2]}) < 1000:
        ends |= {o.request_id: o.finish_reason for o in client.get_output().outputs}
    stats: SchedulerStats = client.call(GetStats())
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert set(ends.values()) == {FinishReason.LENGTH}


# -- pauses --------------------------------------------------------------------------------------------------


def test_while_paused_nothing_runs_and_everything_else_works(place: Place):
    """Case B175: requests before, during and after; health, a reset and an abort meanwhile."""

    async def use(client: AsyncMPClient) -> None:
        before, during, aborted, after = (request(name, 30) for name in ("before", "during", "gone", "after"))
        journal = Journal(before, during, after)
        await client.add_request(before)
        journal.take(await client.get_output())
        assert await client.call(PauseScheduler("keep"))
        steps = (await client.call(GetStats())).num_steps
        await client.add_request(during)
        await client.add_request(aborted)
        assert await client.call(CheckHealth())
        assert await client.call(ResetPrefixCache(True))
        await client.abort_requests(["gone"])
        await asyncio.sleep(0.05)
        stats: SchedulerStats = await client.call(GetStats())
        assert stats.num_steps == steps
        assert stats.num_running + stats.num_waiting == 2
        await client.call(ResumeScheduler())
        await client.add_request(after)
        while not journal.is_complete:
            journal.take(await client.get_output())
        journal.assert_whole()

    with_async_client(use, fake_config(step_s=0.01))


def test_a_core_that_is_told_to_end_while_paused_answers_and_ends(place: Place):
    """Case B175: however long it might drain, what is held back cannot run any more."""
    client = place.client(fake_config(), shutdown_timeout_s=30.0)
    client.call(PauseScheduler("keep"))
    journal = Journal(request("a"), request("b"))
    for message in journal.messages.values():
        client.add_request(message)
    assert client.call(GetStats()).num_waiting == 2
    client.process.process.terminate()
    in_thread(lambda: read_all(client, journal)).result(PATIENCE_S)
    assert {journal.reason("a"), journal.reason("b")} == {FinishReason.ABORT}
    wait_until(lambda: client.process.process.poll() == 0, DEATH_BOUND_S)
