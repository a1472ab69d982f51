"""Blows to a core and to its front end, in every phase of their lives: who is told what, and what is left.

A core is struck while the test is its front end; a front end is a script. Each test has a folder of its own
for everything temporary (`Place`), and at its end no process, socket or shared memory may be left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from process_tools import (
    DEATH_BOUND_S,
    EXECUTOR,
    JOINING_FRONT_END,
    ORPHAN_BOUND_S,
    PATIENCE_S,
    FrontEnd,
    Journal,
    Place,
    fake_config,
    in_thread,
    own_place,
    read_all,
    request,
    right_answer,
    wait_until,
)

from mainspring.base.config import EngineArgs, EngineConfig
from mainspring.base.errors import ConfigError, EngineDeadError
from mainspring.base.messages import CheckHealth, EngineCoreRequest, FinishReason, GetStats, SchedulerStats
from mainspring.base.params import SamplingParams
from mainspring.engine import launch, mailbox
from mainspring.engine.build import build_engine
from mainspring.engine.client import InprocClient
from mainspring.engine.conversation import CommandFailed
from mainspring.engine.launch import CoreProcess
from mainspring.engine.mp_client import AsyncMPClient, SyncMPClient
from mainspring.frontend.llm_engine import prepare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

BLOWS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "exception")
FOR_EVER_S = 600.0
NAP_S = 0.4
STEP_S = 0.004


@pytest.fixture
def place() -> Iterator[Place]:
    with own_place() as place:
        yield place


@pytest.fixture(autouse=True)
def sigint_is_not_ignored() -> Iterator[None]:
    """As it is where the tests run in a shell's background; what is ignored stays so in our children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> tuple[EngineConfig, EngineCoreRequest, list[int]]:
    """A configuration with the real model, a request, and what it says."""
    args = EngineArgs(
        model=str(smollm2), kernels="numpy", num_threads=1, max_model_len=128, kv_cache_memory_bytes=2**24
    )
    config = prepare(args).config
    message = EngineCoreRequest(
        "real", [504, 3575, 282, 4649, 314], SamplingParams(temperature=0.0, seed=0, max_tokens=6)
    )
    client = InprocClient(build_engine(config))
    tokens: list[int] = []
    client.add_request(message)
    while len(tokens) < 6:
        for output in client.get_output().outputs:
            tokens += output.new_token_ids
    client.shutdown()
    return config, message, tokens


def with_real_model(config: EngineConfig, **executor_args: Any) -> EngineConfig:
    return structs.replace(config, executor=EXECUTOR, executor_args={"around": "uniproc", **executor_args})


def strike(pid: int, blow: str) -> None:
    """A stopped process is let go on a little later."""
    os.kill(pid, getattr(signal, blow))
    if blow == "SIGSTOP":
        wait_until(lambda: is_stopped(pid), what="that it stops")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def plan(place: Place, phase: str, blow: str) -> dict[str, Any]:
    """Executor arguments that mark the phase and hold it, so that the blow falls within; they strike from
    inside where the blow is an exception."""
    deed = "raise" if blow == "exception" else "nothing" if phase == "idle" else "sleep"
    return {"phase": phase, "mark": place.mark, "step_s": STEP_S, "deed": deed, "nap_s": NAP_S}


def assert_dead(client: SyncMPClient, since_s: float) -> None:
    """Within the bound, and for ever; aborting is harmless."""
    wait_until(lambda: is_refused(client) == "dead", what="that it is dead")
    assert time.monotonic() - since_s < DEATH_BOUND_S
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            client.get_output()
        with pytest.raises(EngineDeadError):
            client.add_request(request("late"))
        with pytest.raises(EngineDeadError):
            client.call(CheckHealth())
    client.abort_requests(["late"])


def is_refused(client: SyncMPClient) -> str:
    """Why a command is not done; empty if it is."""
    try:
        assert client.call(CheckHealth()) is True
    except EngineDeadError:
        return "dead"
    except CommandFailed as error:
        return str(error)
    return ""


# -- the core ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("phase", ["start-up", "loading"])
def test_a_core_struck_before_it_serves(place: Place, phase: str, blow: str):
    """Case B005: the error names the process, how it ended and why."""
    config = fake_config(**plan(place, phase, blow))
    launching = in_thread(lambda: place.client(config))
    if phase == "loading" or blow == "exception":
        pid = place.wait_for_mark()
    else:
        [pid] = wait_until(place.core_pids, what="the process")
    if blow != "exception":
        strike(pid, blow)
    started_s = time.monotonic()
    if blow == "SIGSTOP":
        time.sleep(0.1)
        assert not launching.done()
        os.kill(pid, signal.SIGCONT)
        client = launching.result(PATIENCE_S)
        client.add_request(message := request("a"))
        read_all(client, Journal(message)).assert_whole()
        client.shutdown()
        return
    with pytest.raises(EngineDeadError) as caught:
        launching.result(PATIENCE_S)
    assert time.monotonic() - started_s < DEATH_BOUND_S
    ends = {
        "SIGKILL": ["was killed by SIGKILL while it was starting"],
        "SIGTERM": ["was killed by SIGTERM", "ended with status 1 while it was starting: it was told to end"],
        "SIGINT": ["was killed by SIGINT", "ended with status 1", "ended with status 130"],
        "exception": [f"ended with status 1 while it was starting: PlannedFailure: at {phase}"],
    }
    assert f"(pid {pid})" in str(caught.value)
    assert any(end in str(caught.value) for end in ends[blow]), str(caught.value)


def test_a_core_that_kills_itself_while_loading(place: Place):
    """Case B005: within seconds, with the pid and the signal."""
    with pytest.raises(EngineDeadError, match=r"\(pid \d+\) was killed by SIGKILL while it was starting"):
        place.client(fake_config(phase="loading", deed="kill"))


@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("phase", ["idle", "prefill", "decode"])
def test_a_core_struck_while_it_serves(place: Place, phase: str, blow: str):
    """Cases B001 (the core's part) and B010: everybody is told within the bound, running or waiting."""
    client = place.client(fake_config(settings={"max_num_seqs": 2}, **plan(place, phase, blow)))
    messages = [request("a", 90, 30), request("b", 90, 20), request("waits", 90)]
    journal = Journal(*(messages if phase != "idle" else []))
    strike_while_it_serves(place, client, journal, blow)
    if blow == "SIGSTOP":
        journal.assert_whole()
    else:
        journal.assert_beginnings()
        assert phase != "decode" or len(journal.tokens["a"]) > 1


def strike_while_it_serves(place: Place, client: SyncMPClient, journal: Journal, blow: str) -> None:
    """Strike at the mark, and see that all in `journal` get what they should."""
    pid = client.process.pid
    assert client.call(CheckHealth())
    for message in journal.messages.values():
        client.add_request(message)
    reading = in_thread(lambda: read_all(client, journal))
    place.wait_for_mark()
    if blow != "exception":
        strike(pid, blow)
    struck_s = time.monotonic()
    if blow == "SIGSTOP":
        time.sleep(0.1)
        assert reading.done() == (not journal.messages)
        os.kill(pid, signal.SIGCONT)
        reading.result(PATIENCE_S)
        assert client.call(CheckHealth())
        client.shutdown()
        assert client.process.process.returncode == 0
        return
    is_told = blow in ("SIGTERM", "SIGINT")
    if is_told or not journal.messages:
        reading.result(DEATH_BOUND_S)
        assert {journal.reason(name) for name in journal.messages} <= {FinishReason.ABORT}
        cause, status = "ended with status 0", 0
    else:
        with pytest.raises(EngineDeadError):
            reading.result(DEATH_BOUND_S)
        assert journal.ends == {}
    if blow == "SIGKILL":
        cause, status = f"(pid {pid}) was killed by SIGKILL", -signal.SIGKILL
    elif blow == "exception":
        cause, status = "PlannedFailure: at ", 1
    assert_dead(client, struck_s)
    with pytest.raises(EngineDeadError) as caught:
        client.get_output()
    assert cause in str(caught.value)
    client.shutdown()
    client.shutdown()
    assert client.process.process.returncode == status


@pytest.mark.parametrize("blow", BLOWS)
def test_a_core_struck_while_it_ends(place: Place, blow: str):
    """Case B029: a second signal is harmless, and whatever comes, `shutdown` comes to an end."""
    client = place.client(fake_config(**plan(place, "shutdown", blow)))
    client.add_request(request("a", 200))
    client.get_output()
    closing = in_thread(client.shutdown)
    place.wait_for_mark()
    if blow != "exception":
        strike(client.process.pid, blow)
    if blow == "SIGSTOP":
        time.sleep(0.1)
        assert not closing.done()
        os.kill(client.process.pid, signal.SIGCONT)
    closing.result(PATIENCE_S)
    status = {"SIGKILL": -signal.SIGKILL, "exception": 1}.get(blow, 0)
    assert client.process.process.returncode == status


def test_a_core_whose_front_end_does_not_read_can_be_told_to_end(place: Place):
    """Case B031: it waits in the middle of a step for room, and nobody makes any."""
    client = place.client(fake_config(settings={"max_num_seqs": 1}))
    for i in range(20):
        client.add_request(request(f"r{i}", 200))
    pid = client.process.pid

    def waits() -> bool:
        before_s = cpu_time_s(pid)
        time.sleep(0.2)
        return before_s > 0.3 and cpu_time_s(pid) - before_s < 0.05

    wait_until(waits, what="that it waits for room")
    os.kill(pid, signal.SIGTERM)
    assert client.process.process.wait(2 * DEATH_BOUND_S + mailbox.SEND_LINGER_S) == 0


def cpu_time_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_core_that_stays_stopped_is_ended_by_force(place: Place, monkeypatch):
    monkeypatch.setattr(launch, "KILL_AFTER_S", 0.3)
    client = place.client(fake_config())
    strike(client.process.pid, "SIGSTOP")
    client.shutdown()
    assert client.process.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("phase", "blow"),
    [
        pytest.param("loading", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("idle", "SIGINT", marks=pytest.mark.slow),
        ("prefill", "exception"),
        pytest.param("decode", "SIGTERM", marks=pytest.mark.slow),
        ("decode", "SIGSTOP"),
    ],
)
def test_a_core_with_the_real_model_is_struck(place: Place, real, phase: str, blow: str):
    config, message, tokens = real
    config = with_real_model(config, **plan(place, phase, blow))
    if phase == "loading":
        launching = in_thread(lambda: place.client(config))
        strike(place.wait_for_mark(), blow)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL while it was starting"):
            launching.result(DEATH_BOUND_S)
        return
    client = place.client(config)
    journal = Journal(*([message] if phase != "idle" else []))
    strike_while_it_serves(place, client, journal, blow)
    said = journal.tokens.get("real", [])
    assert said == (tokens if blow == "SIGSTOP" else tokens[: len(said)])


# -- the front end -------------------------------------------------------------------------------------------

STATUS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM, "SIGINT": -signal.SIGINT, "exception": 1}


@pytest.mark.parametrize("blow", BLOWS)
@pytest.mark.parametrize("phase", ["start-up", "loading", "idle", "prefill", "decode", "shutdown"])
def test_a_front_end_is_struck(place: Place, phase: str, blow: str):
    """Cases B007 and B028: its core ends with it, also in the middle of loading or of a long step."""
    hangs = blow == "SIGKILL"
    deed: dict[str, Any] = {"deed": "sleep", "nap_s": FOR_EVER_S if hangs else NAP_S}
    config = fake_config(phase=phase, mark=place.mark, step_s=STEP_S, **deed)
    messages = [request("a", 30, 30), request("b", 20)]
    front = FrontEnd(place, config, *messages)
    strike_front_end(place, front, phase, blow)
    if blow == "SIGSTOP":
        for message in messages:
            assert front.tokens(message.request_id) == right_answer(message).token_ids


def strike_front_end(place: Place, front: FrontEnd, phase: str, blow: str) -> None:
    """Strike when it has reached the phase, and see how it ends and that nothing of it is left."""
    if phase == "start-up":
        wait_until(place.core_pids, what="the core")
    elif phase == "idle":
        front.wait_for("idle")
    else:
        front.go_on()
        place.wait_for_mark()
    strike(front.process.pid, "SIGUSR1" if blow == "exception" else blow)
    if blow == "SIGSTOP":
        time.sleep(0.1)
        os.kill(front.process.pid, signal.SIGCONT)
        if phase in ("start-up", "idle"):
            front.go_on()
    assert front.end() == STATUS.get(blow, 0), front.errors()
    place.assert_clean(ORPHAN_BOUND_S)
    assert front.errors().count("Traceback") == (blow in ("SIGINT", "exception")), front.errors()
    assert "Exception ignored" not in front.errors()


@pytest.mark.parametrize(
    ("phase", "blow"),
    [
        pytest.param("start-up", "SIGINT", marks=pytest.mark.slow),
        pytest.param("loading", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("idle", "exception", marks=pytest.mark.slow),
        ("decode", "SIGKILL"),
        ("decode", "SIGSTOP"),
    ],
)
def test_a_front_end_with_the_real_model_is_struck(place: Place, real, phase: str, blow: str):
    config, message, tokens = real
    config = with_real_model(config, phase=phase, mark=place.mark, deed="sleep", nap_s=NAP_S)
    front = FrontEnd(place, config, message)
    strike_front_end(place, front, phase, blow)
    said = front.tokens("real")
    assert said == (tokens if blow == "SIGSTOP" else tokens[: len(said)])


def test_ctrl_c_twice_ends_a_front_end_and_its_core(place: Place):
    """Case B029: the second one comes while the first is cleaned up after."""
    front = FrontEnd(place, fake_config(phase="shutdown", deed="sleep", nap_s=NAP_S, mark=place.mark))
    front.wait_for("idle")
    os.kill(front.process.pid, signal.SIGINT)
    place.wait_for_mark()
    if front.process.poll() is None:
        os.kill(front.process.pid, signal.SIGINT)
    assert front.end() != 0
    place.assert_clean(ORPHAN_BOUND_S)


def test_two_front_ends_of_one_core(place: Place):
    """One is killed: its requests are freed, and the stream of the other does not notice."""
    ours, theirs = request("ours", 120), [request(f"theirs-{i}", 230, 10) for i in range(3)]

    async def main() -> Journal:
        config = fake_config(step_s=STEP_S, settings={"max_num_seqs": 3})
        process = await asyncio.to_thread(lambda: CoreProcess(config, num_clients=2))
        client = AsyncMPClient(process)
        other = FrontEnd(place, process.address, *theirs, text=JOINING_FRONT_END)
        await asyncio.to_thread(other.wait_for, "token")
        journal = Journal(ours)
        await client.add_request(ours)
        stats: SchedulerStats = await client.call(GetStats())
        assert (stats.num_running, stats.num_waiting) == (3, 1)
        other.process.kill()
        killed_s = time.monotonic()
        while stats.num_running + stats.num_waiting > 1:
            assert time.monotonic() - killed_s < DEATH_BOUND_S
            await asyncio.sleep(0.01)
            stats = await client.call(GetStats())
        while not journal.is_complete:
            journal.take(await client.get_output())
        stats = await client.call(GetStats())
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        await client.shutdown()
        assert await asyncio.to_thread(other.end) == -signal.SIGKILL
        for message in theirs:
            said = other.tokens(message.request_id)
            assert said == right_answer(message).token_ids[: len(said)]
        return journal

    asyncio.run(main()).assert_whole()


def test_a_front_end_that_is_stopped_does_not_stop_another_of_the_same_core(place: Place):
    """Although there is more to say to it than sockets and queues hold: 200 messages of some 10 KiB."""
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=200, logprobs=20)
    theirs = [structs.replace(request(f"theirs-{i}"), sampling_params=params) for i in range(32)]

    async def main() -> None:
        settings = {"max_num_seqs": 33, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 1025}
        process = await asyncio.to_thread(lambda: CoreProcess(fake_config(settings=settings), num_clients=2))
        client = AsyncMPClient(process)
        other = FrontEnd(place, process.address, *theirs, text=JOINING_FRONT_END)
        await asyncio.to_thread(other.wait_for, "token")
        strike(other.process.pid, "SIGSTOP")
        num_running = 32
        while num_running:
            journal = Journal(request("ours"))
            await client.add_request(request("ours"))
            while not journal.is_complete:
                journal.take(await client.get_output())
            journal.assert_whole()
            num_running = (await client.call(GetStats())).num_running
        os.kill(other.process.pid, signal.SIGCONT)

        def has_heard_all() -> bool:
            return all(len(other.tokens(message.request_id)) == 200 for message in theirs)

        await asyncio.to_thread(wait_until, has_heard_all)
        other.process.kill()
        assert await asyncio.to_thread(other.end) == -signal.SIGKILL
        await client.shutdown()
        for message in theirs:
            assert other.tokens(message.request_id) == right_answer(message).token_ids

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_front_end_that_joined_is_told_of_the_death_of_the_core(place: Place):
    process = CoreProcess(fake_config(step_s=STEP_S), num_clients=2)
    other = FrontEnd(place, process.address, request("theirs", 230), text=JOINING_FRONT_END)
    other.wait_for("token")
    process.process.kill()
    assert other.end(DEATH_BOUND_S) == 1
    assert f"EngineDeadError: the engine core's process (pid {process.pid}) has ended" in other.errors()
    process.close()


# -- how programs are started, and how they end without a word -----------------------------------------------

PROGRAM = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
import msgspec
from mainspring.base.config import EngineConfig
from mainspring.base.messages import CheckHealth
from mainspring.engine.client import EngineCoreClient
config = msgspec.json.decode({config!r}, type=EngineConfig)
client = EngineCoreClient.make_client(config)
print(time.monotonic(), flush=True)
{end}
"""

FORK = """
import os
pid = os.fork()
if not pid:
    sys.exit()
os.waitpid(pid, 0)
assert client.call(CheckHealth())
client.shutdown()
"""

ENDS = {
    "shutdown twice": ("client.shutdown(); client.shutdown()", 0),
    "no shutdown": ("", 0),
    "an exception": ("raise ValueError('planned')", 1),
    "dropped, and another": (
        "del client; client = EngineCoreClient.make_client(config); client.shutdown()",
        0,
    ),
    "sys.exit": ("sys.exit(7)", 7),
    "a fork that ends first": (FORK, 0),
    "a core that died": ("client.process.process.kill(); client.process.process.wait()", 0),
}


def run_program(place: Place, end: str, *, from_standard_input: bool) -> subprocess.CompletedProcess[str]:
    text = PROGRAM.format(config=msgspec.json.encode(fake_config()), end=end)
    how = "-" if from_standard_input else str(place.path / "program.py")
    if not from_standard_input:
        Path(how).write_text(text)
    return subprocess.run(
        [sys.executable, how, str(place.path)],
        input=text if from_standard_input else None,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_program_read_from_standard_input(place: Place):
    done = run_program(place, "client.shutdown()", from_standard_input=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) > 0


@pytest.mark.parametrize("end", ENDS)
def test_a_program_without_a_main_guard_ends(place: Place, end: str):
    """Case B032: it ends quickly and leaves nothing, whether it says goodbye or not."""
    how, status = ENDS[end]
    done = run_program(place, how, from_standard_input=False)
    assert done.returncode == status, done.stderr
    assert time.monotonic() - float(done.stdout) < 5.0
    assert done.stderr.count("Traceback") == (end == "an exception"), done.stderr
    assert "Exception ignored" not in done.stderr
    place.assert_clean(ORPHAN_BOUND_S)


def test_settings_that_are_wrong_are_a_user_s_mistake_also_in_a_child(place: Place):
    with pytest.raises(ConfigError, match="max_model_len 256 takes"):
        place.client(fake_config(settings={"num_gpu_blocks_override": 4}))


def test_a_core_can_be_seen_by_name(place: Place):
    client = place.client(fake_config())
    assert Path(f"/proc/{client.process.pid}/comm").read_text() == "mainspring-core\n"
    client.shutdown()


# -- a core that does not answer -----------------------------------------------------------------------------


def test_a_stopped_core_is_noticed_by_a_round_trip_with_a_timeout(place: Place):
    """Case B004: its process lives, so only a command can tell; afterwards everything goes on."""

    async def main() -> None:
        client = await AsyncMPClient.launch(fake_config(step_s=STEP_S))
        journal = Journal(request("a", 60))
        await client.add_request(request("a", 60))
        journal.take(await client.get_output())
        strike(client.process.pid, "SIGSTOP")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.call(CheckHealth()), 0.2)
        os.kill(client.process.pid, signal.SIGCONT)
        assert await asyncio.wait_for(client.call(CheckHealth()), PATIENCE_S)
        while not journal.is_complete:
            journal.take(await client.get_output())
        journal.assert_whole()
        await client.shutdown()

    asyncio.run(main())


# -- draining ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_s", "is_whole"), [(20.0, True), (0.3, False)])
def test_a_core_that_is_told_to_end_drains(place: Place, timeout_s: float, is_whole: bool):
    """Case B031: what runs goes on until the deadline, what is new is refused, and the status is 0."""
    messages = [request("a", 150), request("b", 150)]
    client = place.client(fake_config(step_s=STEP_S), shutdown_timeout_s=timeout_s)
    journal = Journal(*messages, request("late"))
    for message in messages:
        client.add_request(message)
    while not (journal.tokens["a"] and journal.tokens["b"]):  # both have arrived
        journal.take(client.get_output())
    process = client.process.process
    process.terminate()
    asked_s = time.monotonic()
    wait_until(lambda: "shutting down" in is_refused(client), what="the refusal of commands")
    process.terminate()
    client.add_request(request("late"))
    read_all(client, journal)
    assert is_whole or time.monotonic() - asked_s < timeout_s + DEATH_BOUND_S
    assert process.wait(PATIENCE_S) == 0
    assert journal.reason("late") is FinishReason.ABORT
    for message in messages:
        said = right_answer(message)
        name = message.request_id
        assert journal.reason(name) is (said.finish_reason if is_whole else FinishReason.ABORT)
        assert journal.tokens[name] == said.token_ids[: len(journal.tokens[name])]
    client.shutdown()
