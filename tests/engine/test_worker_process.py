"""Blows to a worker whose core is a process of its own: who is told what, and what is left.

`tests/executor/test_multiproc.py` has every phase and deed, with the core in its own process. Here is what
comes of it for front ends, and what becomes of workers when their core or its front end is struck.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from random import Random
from threading import Timer
from typing import Any

import pytest
from process_tools import (
    PATIENCE_S,
    FrontEnd,
    Place,
    in_thread,
    own_place,
)

from mainspring.base.config import EngineConfig
from mainspring.base.errors import ConfigError, EngineDeadError
from mainspring.base.messages import CheckHealth, EngineCoreRequest, FinishReason
from mainspring.base.params import SamplingParams
from mainspring.engine.conversation import CommandFailed
from mainspring.engine.mp_client import AsyncMPClient, SyncMPClient
from mainspring.executor.multiproc import END_S, EXECUTE_TIMEOUT, TERM_S
from mainspring.testing.breakable_worker import breakable_config
from mainspring.testing.surroundings import Surroundings, wait_until, watched_surroundings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

TOLD_BOUND_S = 3.0  # from a death to the last client that knows of it
TIMEOUT_S = 1.5  # of a step
FOR_EVER_S = 600.0
STEP_S = 0.005
STAGES, SHARERS = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
VICTIMS = {
    "first stage": (STAGES, 0),
    "last stage": (STAGES, 1),
    "first sharer": (SHARERS, 0),
    "second sharer": (SHARERS, 1),
}
BLOWS = ("SIGKILL", "SIGTERM", "SIGSTOP", "exception", "exit")
Said = dict[str, FinishReason | None]


@pytest.fixture
def surroundings() -> Iterator[Surroundings]:
    with watched_surroundings() as surroundings:
        yield surroundings


@pytest.fixture
def place(surroundings: Surroundings) -> Iterator[Place]:
    with own_place() as place:
        yield place


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXECUTE_TIMEOUT, str(TIMEOUT_S))


@pytest.fixture(autouse=True)
def sigint_is_not_ignored() -> Iterator[None]:
    """As it is where the tests run in a shell's background; what is ignored stays so in our children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def config_of(place: Place, victim: str, phase: str, blow: str, **more: Any) -> EngineConfig:
    """The rank waits in the phase for a blow from outside, or does to itself what nobody else can."""
    settings, rank = VICTIMS[victim]
    deed = {"exception": "raise", "exit": "exit"}.get(blow, "nothing" if phase == "idle" else "sleep")
    given = {"deed": deed, "nap_s": FOR_EVER_S, "step_s": STEP_S, "mark": place.mark}
    return breakable_config(settings=settings | {"max_num_seqs": 2}, rank=rank, phase=phase, **given | more)


def request(name: str, max_tokens: int = 200) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(name, [(sum(name.encode()) + i) % 128 for i in range(20)], params)


def read_ends(client: SyncMPClient, names: set[str]) -> Said:
    """How each of them ended."""
    ends: Said = {}
    while ends.keys() != names:
        for output in client.get_output().outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    return ends


def serve_three(client: SyncMPClient, until_they_arrived: bool = False) -> Future[Said]:
    """Two run, and one waits for its turn."""
    for name in ("a", "b", "waits"):
        client.add_request(request(name))
    if until_they_arrived:  # else a core may end before it hears of them
        client.call(CheckHealth())
    return in_thread(lambda: read_ends(client, {"a", "b", "waits"}))


def cause_of(victim: str, phase: str, blow: str) -> str:
    rank = VICTIMS[victim][1]
    return {
        "exception": rf"worker {rank}: PlannedFailure: at {phase}",
        "exit": rf"worker {rank} \(pid \d+\) ended with status 3",
        "SIGSTOP": rf"within 1\.5 s \({EXECUTE_TIMEOUT}\); worker {rank} \(pid \d+\) is stopped",
    }.get(blow, rf"worker {rank} \(pid \d+\) was killed by {blow}")


async def strike_while_it_serves(place: Place, victim: str, phase: str, blow: str) -> None:
    """Whoever waits is told: for tokens, for a turn, for an answer; and all who come later."""
    cause = cause_of(victim, phase, blow)
    client = await AsyncMPClient.launch(config_of(place, victim, phase, blow))
    try:
        for name in ("a", "b", "waits") if phase != "idle" else ():
            await client.add_request(request(name))
        asking = asyncio.create_task(client.call(CheckHealth()))
        if phase == "idle" and blow != "exit":
            assert await asking
        reading = asyncio.create_task(read_for_ever(client))
        pid = await asyncio.to_thread(place.wait_for_mark)
        if blow.startswith("SIG"):
            os.kill(pid, getattr(signal, blow))
        struck_s = time.monotonic()
        if phase == "idle" and blow == "SIGSTOP":  # is seen by who asks next
            asking = asyncio.create_task(client.call(CheckHealth()))
        with pytest.raises(EngineDeadError, match=cause):
            await asyncio.wait_for(reading, PATIENCE_S)
        await asyncio.wait([asking], timeout=TOLD_BOUND_S)
        assert asking.done()
        if (refused := asking.exception()) is not None:
            assert isinstance(refused, EngineDeadError | CommandFailed)
            assert re.search(cause, str(refused))
        assert time.monotonic() - struck_s < TOLD_BOUND_S + (TIMEOUT_S if blow == "SIGSTOP" else 0.0)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=cause):
                await client.get_output()
            with pytest.raises(EngineDeadError, match=cause):
                await client.add_request(request("late"))
            with pytest.raises(EngineDeadError, match=cause):
                await client.call(CheckHealth())
    finally:
        await client.shutdown()
    assert client.process.process.returncode == 1


async def read_for_ever(client: AsyncMPClient) -> None:
    while True:
        await client.get_output()


@pytest.mark.parametrize(
    ("victim", "phase", "blow"),
    [
        ("first stage", "prefill", "SIGKILL"),
        ("second sharer", "decode", "exception"),
        ("last stage", "idle", "SIGTERM"),
        ("second sharer", "decode", "SIGSTOP"),
    ],
)
def test_a_worker_is_struck_while_its_core_serves(place: Place, victim: str, phase: str, blow: str) -> None:
    """Cases B001 and B010, where it is a worker: everybody is told within the bound, and nothing is left."""
    asyncio.run(strike_while_it_serves(place, victim, phase, blow))


@pytest.mark.slow
@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("phase", ["prefill", "decode", "sample", "idle"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_any_worker_is_struck_while_its_core_serves(place: Place, victim: str, phase: str, blow: str) -> None:
    if phase == "idle" and blow == "exception":
        pytest.skip("nothing of ours runs there that could raise")
    asyncio.run(strike_while_it_serves(place, victim, phase, blow))


@pytest.mark.parametrize(
    ("victim", "phase", "blow"),
    [
        ("second sharer", "start-up", "SIGKILL"),
        ("last stage", "loading", "exception"),
        pytest.param("first stage", "start-up", "exit", marks=pytest.mark.slow),
        pytest.param("first sharer", "loading", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("last stage", "initialize", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("first stage", "initialize", "SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_struck_before_its_core_serves(place: Place, victim: str, phase: str, blow: str) -> None:
    """Case B005: the start ends, with the rank and the cause."""
    launching = in_thread(lambda: place.client(config_of(place, victim, phase, blow)))
    pid = place.wait_for_mark()
    if blow.startswith("SIG"):
        os.kill(pid, getattr(signal, blow))
    with pytest.raises(EngineDeadError, match=cause_of(victim, phase, blow)) as caught:
        launching.result(PATIENCE_S)
    assert "ended with status 1 while it was starting: " in str(caught.value)


def test_a_wrong_setting_that_a_worker_finds(place: Place) -> None:
    """Is a user's mistake here too, in one line and without names of processes."""
    config = breakable_config(settings=STAGES, rank=1, phase="loading", deed="refuse")
    with pytest.raises(ConfigError, match=r"^setting loading is wrong$"):
        place.client(config)


@pytest.mark.parametrize(
    ("victim", "blow"),
    [
        ("last stage", "SIGSTOP"),
        ("second sharer", "exception"),
        pytest.param("first stage", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("first sharer", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("first sharer", "exit", marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_struck_while_its_core_ends(place: Place, victim: str, blow: str) -> None:
    """`shutdown` comes to an end, with the requests aborted, and takes the worker with it; a core that would
    be killed for taking too long would leave one that is stopped."""
    client = place.client(config_of(place, victim, "shutdown", blow))
    client.call(CheckHealth())
    reading = serve_three(client)
    began_s = time.monotonic()
    closing = in_thread(client.shutdown)
    pid = place.wait_for_mark()
    if blow.startswith("SIG"):
        os.kill(pid, getattr(signal, blow))
    closing.result(PATIENCE_S)
    assert time.monotonic() - began_s < END_S + TERM_S + 1.0
    assert client.process.process.returncode == 0
    with pytest.raises(EngineDeadError):
        reading.result(PATIENCE_S)


@pytest.mark.parametrize("blow", ["SIGTERM", "SIGINT"])
def test_a_core_with_workers_is_told_to_end(
    place: Place, capfd: pytest.CaptureFixture[str], blow: str
) -> None:
    """Everybody gets an end, the workers go in order, and nobody says a word."""
    client = place.client(breakable_config(settings=SHARERS | {"max_num_seqs": 2}, step_s=STEP_S))
    reading = serve_three(client, until_they_arrived=True)
    os.kill(client.process.pid, getattr(signal, blow))
    assert set(reading.result(PATIENCE_S).values()) == {FinishReason.ABORT}
    assert client.process.process.wait(PATIENCE_S) == 0
    client.shutdown()
    assert capfd.readouterr() == ("", "")


def test_a_core_with_workers_that_may_finish(place: Place) -> None:
    """Told to end, with time: what was asked is answered to its end."""
    config = breakable_config(settings=STAGES | {"max_num_seqs": 2}, step_s=STEP_S)
    client = place.client(config, shutdown_timeout_s=PATIENCE_S)
    for name in ("a", "b", "waits"):
        client.add_request(request(name, 30))
    client.call(CheckHealth())  # they have arrived
    os.kill(client.process.pid, signal.SIGTERM)
    ends = in_thread(lambda: read_ends(client, {"a", "b", "waits"})).result(PATIENCE_S)
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert client.process.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_one_of_them_is_killed_at_some_moment(place: Place, surroundings: Surroundings, seed: int) -> None:
    """The core or a worker, while requests come: whoever waits is told, nothing is left, and it is no other
    cause than this."""
    random = Random(seed)
    settings = random.choice([STAGES, SHARERS, STAGES | {"async_scheduling": True}])
    client = place.client(breakable_config(settings=settings | {"max_num_seqs": 2}))
    (core,) = place.core_pids()
    victims = {core: rf"\(pid {core}\)"} | {pid: rf"\(pid {pid}\)" for pid in surroundings.workers}
    pid = random.choice(list(victims))
    killer = Timer(random.uniform(0.0, 0.3), os.kill, [pid, signal.SIGKILL])
    killer.start()

    def ask_for_ever() -> None:
        for number in count():
            client.add_request(request(f"{number}", random.randint(1, 40)))
            read_ends(client, {f"{number}"})

    with pytest.raises(EngineDeadError, match=victims[pid] + " was killed by SIGKILL"):
        ask_for_ever()
    killer.join()


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("first sharer", "decode"),
        pytest.param("second sharer", "loading", marks=pytest.mark.slow),
        pytest.param("last stage", "prefill", marks=pytest.mark.slow),
        pytest.param("first stage", "decode", marks=pytest.mark.slow),
    ],
)
def test_a_core_is_killed_and_takes_its_workers(
    place: Place, surroundings: Surroundings, victim: str, phase: str
) -> None:
    """Case B007: one is in the middle of something long, the other waits for it in a collective."""
    launching = in_thread(lambda: place.client(config_of(place, victim, phase, "SIGKILL")))
    if phase != "loading":
        client = launching.result(PATIENCE_S)
        reading = serve_three(client)
    place.wait_for_mark()
    (core,) = place.core_pids()
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: not surroundings.workers, 3.0, lambda: f"these are left: {surroundings.workers}")
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        (launching if phase == "loading" else reading).result(PATIENCE_S)


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("second sharer", "decode"),
        pytest.param("last stage", "loading", marks=pytest.mark.slow),
        pytest.param("first stage", "prefill", marks=pytest.mark.slow),
    ],
)
def test_a_front_end_is_killed_and_takes_them_all(
    place: Place, surroundings: Surroundings, victim: str, phase: str
) -> None:
    """Cases B007 and B028, with workers: the core is in a step that does not end."""
    front = FrontEnd(place, config_of(place, victim, phase, "SIGKILL"), request("a"), request("b"))
    front.go_on()
    place.wait_for_mark()
    assert len(surroundings.workers) == 2
    front.process.kill()
    assert front.end() == -signal.SIGKILL
    wait_until(lambda: not surroundings.pids(), 5.0, lambda: f"these are left: {surroundings.pids()}")
