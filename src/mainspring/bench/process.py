"""What the process boundary costs: a core in a process of its own beside the same core in this one.

The load: `NUM_RUNNING` requests in steady decode, each with one output per step, and a fake step. Two are
hard on the threads that carry the outputs away, for they never release the interpreter: one that takes no
time, so that bookkeeping and post are all there is, and one that keeps it for `STEP_S`. The third sleeps as
long, as a forward pass in native code does.

Lateness is from the end of the core's step (`EngineCoreOutputs.timestamp_s`, its last act) to the decoded
outputs in the front end. Both read the machine's monotonic clock, which on Linux is one for all processes.
The front end does nothing but read. A round measures each way once, the ways take turns, and a figure is the
median of `ROUNDS`.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.messages import (
    Command,
    CommandResult,
    EngineCoreOutputs,
    EngineCoreRequest,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.engine.client import EngineCoreClient

NUM_RUNNING = 256
STEP_S = 0.002
STEPS, WARM_UP_STEPS, ROUNDS = 300, 100, 3
SHORTEST, LONGEST = 32, 47  # tokens of a prompt: in each step one row in sixteen fills a block
TOKEN, EOS, VOCAB_SIZE = 7, 2, 50_000
MAX_TOKENS = 6000  # not reached while anybody reads, however many steps the sockets hold
BLOCK_SIZE = 16
STEP_KINDS = {
    "none": "takes no time",
    "busy": f"keeps the interpreter for {STEP_S * 1000:.0f} ms",
    "sleep": f"sleeps {STEP_S * 1000:.0f} ms",
}
AIMS = {"none": 0.65, "busy": 0.65, "sleep": 0.95}  # steps per second, of those in process
MEDIAN_MS_AIM, P99_MS_AIM = 1.0, 3.0
WAYS = ("in process", "sync", "async")

T = TypeVar("T")


class FakeStepExecutor:
    """Fits `base.protocols.Executor` and says `TOKEN` for every row; `executor_args` names the fake step."""

    def __init__(self, config: EngineConfig) -> None:
        self.token, self.step_s = TOKEN, STEP_S
        self._kind: str = config.executor_args.get("step", "none")
        self._sampling: Future[ModelRunnerOutput] = Future()

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return [KVCacheSpec(1, 1)]

    def determine_available_memory(self) -> int:
        return 1 << 30  # the number of blocks is set

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        """There is nothing to allocate."""

    def spend(self) -> None:
        """What a forward pass would take."""
        if self._kind == "busy":
            end_s = time.monotonic() + self.step_s
            while time.monotonic() < end_s:
                pass
        elif self._kind == "sleep":
            time.sleep(self.step_s)

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        self.spend()
        sampling = set(plan.sampling_rows)
        tokens = [[self.token] if row in sampling else [] for row in range(plan.num_rows)]
        result = ModelRunnerOutput(tokens)
        self._sampling = _done(result)
        return _done(None if sampling else result)

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        return self._sampling

    def execute_dummy_batch(self) -> None:
        pass

    def has_any_rank_work(self, has_work: bool) -> bool:
        return has_work

    def call(self, command: Command) -> list[CommandResult]:
        return [True]

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """It does not fail."""

    def close(self) -> None:
        """It holds nothing."""


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class Reading(NamedTuple):
    """One way, measured once."""

    lateness_ms: list[float]  # of each step
    steps_per_s: float


def config(step: str) -> EngineConfig:
    max_model_len = LONGEST + MAX_TOKENS
    return EngineConfig(
        model="",
        vocab_size=VOCAB_SIZE,
        executor="mainspring.bench.process:FakeStepExecutor",
        executor_args={"step": step},
        scheduler=SchedulerConfig(
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=NUM_RUNNING * LONGEST,
            max_model_len=max_model_len,
        ),
        block_size=BLOCK_SIZE,
        depth=1,
        seed=0,
        num_gpu_blocks_override=NUM_RUNNING * (-(-max_model_len // BLOCK_SIZE)) + 1,
    )


def requests() -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            request_id=f"running-{number}-0123456789abcdef",  # as long as a real one
            prompt_token_ids=[
                (number * 7919 + i * 31) % VOCAB_SIZE
                for i in range(SHORTEST + number % (LONGEST - SHORTEST + 1))
            ],
            sampling_params=SamplingParams(max_tokens=MAX_TOKENS, seed=number),
            eos_token_id=EOS,
        )
        for number in range(NUM_RUNNING)
    ]


class _Meter:
    """Takes what is read until enough whole steps were."""

    def __init__(self) -> None:
        self._left = WARM_UP_STEPS + STEPS
        self._lateness_ms: list[float] = []
        self._start_s = 0.0
        self._end_s = 0.0

    def wants_more(self, news: EngineCoreOutputs) -> bool:
        now_s = time.monotonic()
        if len(news.outputs) < NUM_RUNNING:
            assert self._left == WARM_UP_STEPS + STEPS, "somebody has ended"
            return True
        self._left -= 1
        if self._left == STEPS:
            self._start_s = now_s
        elif self._left < STEPS:
            self._lateness_ms.append((now_s - news.timestamp_s) * 1000)
            self._end_s = now_s
        return self._left > 0

    @property
    def reading(self) -> Reading:
        return Reading(self._lateness_ms, STEPS / (self._end_s - self._start_s))


def read_sync(step: str, *, in_process: bool) -> Reading:
    client = EngineCoreClient.make_client(config(step), in_process=in_process)
    try:
        meter = _Meter()
        with _frozen():
            for request in requests():
                client.add_request(request)
            while meter.wants_more(client.get_output()):
                pass
        return meter.reading
    finally:
        client.shutdown()


async def read_async(step: str) -> Reading:
    client = await EngineCoreClient.make_async_client(config(step))
    try:
        meter = _Meter()
        with _frozen():
            for request in requests():
                await client.add_request(request)
            while meter.wants_more(await client.get_output()):
                pass
        return meter.reading
    finally:
        await client.shutdown()


@contextmanager
def _frozen() -> Iterator[None]:
    """The collector is on, and passes over what the set-up made."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def read(way: str, step: str) -> Reading:
    if way == "async":
        return asyncio.run(read_async(step))
    return read_sync(step, in_process=way == "in process")


def measure() -> dict[str, Any]:
    """All figures, for people and programs alike."""
    readings: dict[tuple[str, str], list[Reading]] = {(s, w): [] for s in STEP_KINDS for w in WAYS}
    for _ in range(ROUNDS):
        for (step, way), taken in readings.items():
            taken.append(read(way, step))
    return {"num_running": NUM_RUNNING, "steps": {s: _figures(s, readings) for s in STEP_KINDS}}


def _figures(step: str, readings: dict[tuple[str, str], list[Reading]]) -> dict[str, Any]:
    """Of one fake step, by way. A share is of the same round's steps in process."""
    here = readings[step, "in process"]
    figures: dict[str, Any] = {"in process": {"steps_per_s": _median(r.steps_per_s for r in here)}}
    for way in WAYS[1:]:
        taken = readings[step, way]
        figures[way] = {
            "steps_per_s": _median(r.steps_per_s for r in taken),
            "share_of_in_process": _median(
                r.steps_per_s / h.steps_per_s for r, h in zip(taken, here, strict=True)
            ),
            "late_ms_median": _median(statistics.median(r.lateness_ms) for r in taken),
            "late_ms_p99": _median(statistics.quantiles(r.lateness_ms, n=100)[98] for r in taken),
        }
    return figures


def _median(values: Iterable[float]) -> float:
    return float(round(statistics.median(values), 3))


def table(figures: dict[str, Any]) -> str:
    """For people. Aims stand beside what they bound."""
    lines = [
        f"{figures['num_running']} requests run, each with an output per step; late: from the end of",
        "the step to the decoded outputs\n",
        f"{'a step that':<31} {'client':<10} {'steps/s':>8} {'of in process':>20} {'late, median':>13} "
        f"{'99th percentile':>16}",
    ]
    for step, by_way in figures["steps"].items():
        for way, figure in by_way.items():
            line = f"{STEP_KINDS[step]:<31} {way:<10} {figure['steps_per_s']:>8.0f}"
            if way != WAYS[0]:
                line += (
                    f" {figure['share_of_in_process']:>8.0%} (aim {AIMS[step]:.0%}) "
                    f"{figure['late_ms_median']:>10.2f} ms {figure['late_ms_p99']:>13.2f} ms"
                )
            lines.append(line)
    lines.append(
        f"aims of lateness: {MEDIAN_MS_AIM:.0f} ms in the median, {P99_MS_AIM:.0f} ms at the 99th percentile"
    )
    return "\n".join(lines)
