"""Workers of several processes, struck in every phase of their lives: who is told what, and what is left.

The core is in this process, so that descriptors and children can be counted; `tests/engine/` has the same
with a core in a process of its own. Workers break by themselves (`testing/breakable_worker.py`).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from mainspring.base.children import python_path
from mainspring.base.config import EngineConfig
from mainspring.base.errors import CheckpointError, ConfigError, EngineDeadError, EngineError
from mainspring.base.messages import (
    CheckHealth,
    EngineCoreRequest,
    GetStats,
    SchedulerOutput,
    Sleep,
    WakeUp,
)
from mainspring.base.params import SamplingParams
from mainspring.engine.build import build_engine
from mainspring.engine.core import EngineCore
from mainspring.executor import multiproc
from mainspring.executor.multiproc import EXECUTE_TIMEOUT, MultiprocExecutor
from mainspring.testing.breakable_worker import breakable_config
from mainspring.testing.surroundings import Surroundings, wait_until, watched_surroundings
from mainspring.worker.proc import encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

TOLD_BOUND_S = 3.0  # from a death to whoever waits
PATIENCE_S = 20.0
STAGES, SHARERS = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
VICTIMS = {  # what there is, and which rank is struck
    "first stage": (STAGES, 0),
    "last stage": (STAGES, 1),
    "first sharer": (SHARERS, 0),
    "second sharer": (SHARERS, 1),
}


@pytest.fixture
def surroundings() -> Iterator[Surroundings]:
    with watched_surroundings() as surroundings:
        yield surroundings


def make_config(victim: str, phase: str, deed: str, **more: Any) -> EngineConfig:
    settings, rank = VICTIMS[victim]
    return breakable_config(settings=settings, rank=rank, phase=phase, deed=deed, **more)


def request(name: str, max_tokens: int = 12, num_prompt_tokens: int = 9, **params: Any) -> EngineCoreRequest:
    prompt = [(sum(name.encode()) + 7 * i) % 128 for i in range(num_prompt_tokens)]
    return EngineCoreRequest(
        name,
        prompt,
        SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True, **params),
    )


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {message.request_id: [] for message in requests}
    for message in requests:
        core.add_request(message)
    while core.has_work():
        for outputs in core.step().values():
            for output in outputs.outputs:
                assert output.error is None
                said[output.request_id] += output.new_token_ids
    return said


class Watched:
    """A core whose executor's failures are counted."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = build_engine(config).core
        self.told: list[str] = []
        self.core.on_executor_failure = self.told.append

    @property
    def executor(self) -> MultiprocExecutor:
        assert isinstance(self.core.executor, MultiprocExecutor)
        return self.core.executor

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        self.core.shutdown()
        self.core.shutdown()


def cause_of(victim: str, phase: str, deed: str) -> str:
    """A pattern."""
    rank = VICTIMS[victim][1]
    return {
        "raise": rf"worker {rank}: PlannedFailure: at {phase} \(breakable_worker\.py:\d+\)",
        "kill": rf"worker {rank} \(pid \d+\) was killed by SIGKILL",
        "exit": rf"worker {rank} \(pid \d+\) ended with status 3",
        "stop": rf"did not answer within .* s.*; worker {rank} \(pid \d+\) is stopped",
        "sleep": r"worker \d \(pid \d+\) did not answer within .* s",
    }[deed]


def strike(victim: str, phase: str, deed: str, collectives: str = "pipes") -> None:
    """Live until the deed is done, and see that whoever waits is told, once, and what."""
    config, cause = make_config(victim, phase, deed), cause_of(victim, phase, deed)
    config = structs.replace(config, collectives=collectives)
    if phase in ("start-up", "loading", "initialize"):
        started_s = time.monotonic()
        with pytest.raises(EngineDeadError, match=cause):
            build_engine(config)
        assert time.monotonic() - started_s < PATIENCE_S
        return
    with Watched(config) as watched:
        began_s = time.monotonic()
        if phase in ("command", "idle"):
            strike_at_rest(watched, phase, deed, cause)
        else:
            with pytest.raises(EngineDeadError, match=cause):
                run(watched.core, request("a"), request("b"))
        assert time.monotonic() - began_s < TOLD_BOUND_S
        assert_dead(watched, cause)
        closing_s = time.monotonic()
    assert time.monotonic() - closing_s < 1.0, "there is nobody to wait for"
    assert len(watched.told) == 1


def strike_at_rest(watched: Watched, phase: str, deed: str, cause: str) -> None:
    """Nobody asks anything when it dies, or a command only."""
    if phase == "command":
        with pytest.raises(EngineDeadError, match=cause):
            watched.core.call(CheckHealth())
        return
    assert watched.core.call(CheckHealth())
    if deed in ("stop", "sleep"):  # is seen by who asks next
        time.sleep(0.2)
        with pytest.raises(EngineDeadError, match=cause):
            watched.core.call(CheckHealth())
    wait_until(lambda: len(watched.told) == 1, TOLD_BOUND_S, lambda: "nobody was told")


def assert_dead(watched: Watched, cause: str) -> None:
    """For ever, and at once."""
    wait_until(lambda: bool(watched.told), TOLD_BOUND_S, lambda: "nobody was told")
    assert re.search(cause, watched.told[0])
    with pytest.raises(EngineDeadError, match=cause):
        watched.core.add_request(request("late"))
    with pytest.raises(EngineDeadError, match=cause):
        watched.core.call(CheckHealth())
    with pytest.raises(EngineDeadError, match=cause):
        watched.core.step()
    future = watched.executor.execute_model(SchedulerOutput(99, [], [], [], 0))
    with pytest.raises(EngineDeadError, match=cause):
        future.result(TOLD_BOUND_S)


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when an executor is made."""
    monkeypatch.setenv(EXECUTE_TIMEOUT, "1.5")


@pytest.mark.parametrize(
    ("victim", "phase", "deed"),
    [
        ("last stage", "start-up", "exit"),
        ("first stage", "loading", "kill"),
        ("second sharer", "initialize", "raise"),
        ("first stage", "prefill", "raise"),
        ("second sharer", "decode", "raise"),
        ("first sharer", "decode", "kill"),
        ("last stage", "sample", "kill"),
        ("second sharer", "sample", "exit"),
        ("first stage", "idle", "kill"),
        ("second sharer", "decode", "stop"),
    ],
)
def test_a_worker_breaks(
    surroundings: Surroundings, short_timeout: None, victim: str, phase: str, deed: str
) -> None:
    """Cases B001 and B005, where it is a worker: within a bound, with the rank, and why. Its peers wait for
    it in a collective meanwhile, or say first that it is gone."""
    strike(victim, phase, deed)


PHASES = ("start-up", "loading", "initialize", "prefill", "decode", "sample", "command", "idle")
DEEDS = ("raise", "kill", "exit", "stop", "sleep")


def can_happen(phase: str, deed: str) -> bool:
    """A command that raises is refused, and a timer that raises hurts nobody."""
    return not (deed == "raise" and phase in ("command", "idle")) and (deed, phase) != ("sleep", "idle")


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize(
    ("phase", "deed"), [(phase, deed) for phase in PHASES for deed in DEEDS if can_happen(phase, deed)]
)
def test_any_worker_breaks_in_any_way_at_any_time(
    surroundings: Surroundings,
    short_timeout: None,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
    phase: str,
    deed: str,
) -> None:
    monkeypatch.setattr(multiproc, "LOAD_TIMEOUT_S", 6.0)
    strike(victim, phase, deed)


@pytest.mark.slow
@pytest.mark.parametrize("deed", ["raise", "kill", "stop"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_worker_breaks_among_those_that_talk_by_torch(
    surroundings: Surroundings, short_timeout: None, victim: str, deed: str
) -> None:
    pytest.importorskip("torch", reason="collectives gloo are torch.distributed: mainspring[distributed]")
    strike(victim, "decode", deed, collectives="gloo")


@pytest.mark.parametrize(
    ("deed", "kind", "text"),
    [
        ("refuse", ConfigError, "setting loading is wrong"),
        ("damage", CheckpointError, "file loading is damaged"),
    ],
)
def test_what_is_wrong_for_a_worker_is_said_as_if_there_were_one(
    surroundings: Surroundings, deed: str, kind: type[Exception], text: str
) -> None:
    """Without the rank: all of them would say it."""
    with pytest.raises(kind, match=f"^{text}$"):
        build_engine(make_config("second sharer", "loading", deed))


def test_memory_that_is_not_there_is_a_memory_error(surroundings: Surroundings) -> None:
    with pytest.raises(MemoryError, match="no room"):
        raise multiproc._as_failure(None, multiproc.Failed("_ArrayMemoryError", "no room")).kind("no room")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(EXECUTE_TIMEOUT, given)
    with pytest.raises(
        ConfigError, match=rf"{EXECUTE_TIMEOUT} '{given}' .* must be a number of seconds above 0"
    ):
        MultiprocExecutor(breakable_config(settings=STAGES))


def test_a_command_that_fails_hurts_nobody_else(surroundings: Surroundings) -> None:
    """One answer to each command, whatever the ranks said to the one before."""
    with Watched(make_config("second sharer", "command", "raise")) as watched:
        with pytest.raises(EngineError, match=r"^worker 1: PlannedFailure: at command"):
            watched.core.call(CheckHealth())
        assert watched.core.call(CheckHealth()) is True
        with pytest.raises(EngineError, match="GetStats is answered by the engine core"):
            watched.executor.call(GetStats())
        assert watched.executor.call(CheckHealth()) == [True, True]
        assert len(run(watched.core, request("a"))["a"]) == 12
        assert watched.told == []


@pytest.mark.parametrize(
    "settings", [STAGES | {"async_scheduling": True}, SHARERS], ids=["stages", "sharers"]
)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(surroundings: Surroundings, settings: dict, level: int) -> None:
    """Same weights, same answers; what one stage has sent to another before is not taken for new."""
    with Watched(breakable_config(settings=settings)) as watched:
        core = watched.core
        requests = [request(f"r{i}", 5 + i) for i in range(5)]
        expected = run(core, *requests)
        for _ in range(2):
            asleep = core.call(Sleep(level))
            core.settle_if_idle()
            assert asleep.result(0) is True
            assert core.call(WakeUp()) is True
            assert run(core, *requests) == expected


def test_closing_is_quick_and_silent(surroundings: Surroundings, capfd: pytest.CaptureFixture[str]) -> None:
    """With steps in flight, too."""
    with Watched(breakable_config(settings=STAGES | {"async_scheduling": True})) as watched:
        workers = surroundings.workers
        assert [Path(f"/proc/{pid}/comm").read_text() for pid in workers] == [
            "mainspring-w0\n",
            "mainspring-w1\n",
        ]
        for pid in workers:
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
            assert os.getsid(pid) == pid, "Ctrl-C in our terminal must not reach it"
        for message in (request("a"), request("b")):
            watched.core.add_request(message)
        for _ in range(3):
            watched.core.step()
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 1.0
    assert watched.told == []
    assert capfd.readouterr() == ("", "")


def test_log_lines_say_whose_they_are(
    surroundings: Surroundings, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(logging.getLogger("mainspring"), "level", logging.INFO)
    with Watched(breakable_config(settings=STAGES | {"num_gpu_blocks_override": None, "max_model_len": 64})):
        pass
    said = capfd.readouterr().err.splitlines()
    assert {line[:10] for line in said if "KV cache:" in line} == {"[worker 0]", "[worker 1]"}


@pytest.mark.parametrize(("phase", "deed"), [("idle", "stop"), ("shutdown", "sleep")])
def test_closing_ends_whoever_does_not_end(surroundings: Surroundings, phase: str, deed: str) -> None:
    """Stopped: by a signal that cannot be ignored. Busy: it sees by itself that nobody waits for it."""
    with Watched(make_config("last stage", phase, deed)) as watched:
        assert watched.core.call(CheckHealth())
        time.sleep(0.2)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < multiproc.END_S + multiproc.TERM_S + 1.0


def test_a_start_that_is_given_up_leaves_nobody(surroundings: Surroundings) -> None:
    """Ctrl-C while workers load."""
    config = make_config("last stage", "start-up", "sleep")

    def interrupt() -> None:
        wait_until(lambda: len(surroundings.workers) == 2, PATIENCE_S, lambda: "no workers")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(config)
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, before)


def test_a_process_that_cannot_be_started(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two: the first is ended, and no socket stays open."""
    spawn = multiproc._spawn

    def fail_at_second(number: int, *more: Any) -> Any:
        if number == 1:
            raise OSError("no more processes")
        return spawn(number, *more)

    monkeypatch.setattr(multiproc, "_spawn", fail_at_second)
    with pytest.raises(OSError, match="no more processes"):
        MultiprocExecutor(breakable_config(settings=STAGES))


def test_what_cannot_be_read_ends_it(surroundings: Surroundings) -> None:
    """An answer from nowhere: whoever waits is told, instead of waiting for a thread that has ended."""
    with Watched(breakable_config(settings=STAGES)) as watched:
        rank = watched.executor._ranks[1]
        rank.orders.send_bytes(b"\xc1")  # no message: it says so, and ends
        with pytest.raises(EngineDeadError, match="worker 1: DecodeError"):
            run(watched.core, request("a"))
        assert len(watched.told) == 1


IN_PROCESS = """
import sys, threading, time
import msgspec
from mainspring.base.config import EngineConfig
from mainspring.engine.build import build_engine
from mainspring.base.messages import EngineCoreRequest
from mainspring.base.params import SamplingParams

config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)

def serve():
    core = build_engine(config).core
    print("ready", flush=True)
    params = SamplingParams(max_tokens=500, ignore_eos=True, seed=0)
    core.add_request(EngineCoreRequest("a", [1, 2, 3], params))
    while True:
        core.step()

if sys.argv[1] == "thread":
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
else:
    serve()
"""


@pytest.mark.parametrize(
    ("where", "deed"),
    [("thread", "nothing"), ("thread", "sleep"), ("main", "stop")],
    ids=["in a step", "in a collective", "one is stopped"],
)
def test_workers_end_with_whoever_started_them(surroundings: Surroundings, where: str, deed: str) -> None:
    """SIGKILL, in the middle of a step, or of a collective whose other side sleeps. From the main thread the
    system takes even a worker that is stopped; from another the closed socket tells."""
    config = make_config("second sharer", "decode", deed, step_s=0.02)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_PROCESS, where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        assert process.stdout.readline() == b"ready\n"
        assert len(surroundings.workers) == 2
        time.sleep(0.4)
        process.kill()
        process.wait()
    surroundings.assert_clean()


def test_plans_and_masks_larger_than_a_socket(surroundings: Surroundings) -> None:
    """A plan of a megabyte goes to workers that are in the middle of a step."""
    settings = STAGES | {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "num_gpu_blocks_override": 4096,
        "enable_prefix_caching": False,
    }
    with Watched(breakable_config(settings=settings, step_s=0.02)) as watched:
        wishes = {i % 128: -1.0 for i in range(128)}
        messages = [request(f"r{i:02d}", 4, 400, logit_bias=wishes) for i in range(64)]
        said = run(watched.core, *messages)
        assert {len(tokens) for tokens in said.values()} == {4}
        plan = SchedulerOutput(10**6, [], [], [], 0, freed_slots=[63] * 2**20)
        assert len(encode(multiproc.Execute(plan))) > 2**20
        watched.executor.execute_model(plan).result(PATIENCE_S)
        assert watched.core.call(CheckHealth())
