"""What a step costs in bookkeeping alone: `schedule` and `update_from_output` around a model that takes no
time.

The load: prompts of 32 to 47 tokens in steady decode, block size 16, prefix caching on, EOS and max_tokens
set on every request and stop ids on one in eight, so that each step one row in sixteen fills a block and
every row passes the checks of a real one. Each step delivers one output struct per request. A figure is the
median of `STEPS` steps, the best of `REPEATS` runs. What the executor and the client would do (making the
lists of tokens, dropping the outputs) is outside the clock.

The garbage collector is on, after `gc.freeze()` on what the set-up made; `gc` says how else it would be.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from mainspring.base.config import SchedulerConfig
from mainspring.base.messages import (
    EngineCoreRequest,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from mainspring.base.params import SamplingParams, StructuredOutputsParams
from mainspring.core.kv_cache import KVCacheManager
from mainspring.core.scheduler import Scheduler

BLOCK_SIZE = 16
SHORTEST, LONGEST = 32, 47  # tokens of a prompt
STEPS, WARM_UP_STEPS, REPEATS = 300, 40, 3
MAX_TOKENS = WARM_UP_STEPS + STEPS + 100  # never reached
NUM_WAITING = 4000
VOCAB_SIZE = 50_000
TOKEN, EOS, STOP_IDS = 7, 2, [3, 4, 5]  # TOKEN is what the model always says
MIX = "a quarter with logprobs, penalties and min_tokens; all with a window group"
RUNNING_COUNTS = (1, 8, 64, 256, 1024)

Waiting = Literal["none", "blocked", "parked"]
Collector = Literal["frozen", "untouched", "off"]


class Case(NamedTuple):
    num_running: int
    waiting: Waiting = "none"
    mixed: bool = False
    collector: Collector = "frozen"


class Load:
    """A scheduler full of running requests, and a model that costs nothing."""

    def __init__(self, num_running: int, waiting: Waiting = "none", *, mixed: bool = False) -> None:
        self.num_running = num_running
        self._mixed = mixed
        self.scheduler = _scheduler(num_running, mixed)
        for i in range(num_running):
            self.scheduler.add_request(_request(f"running-{i}", i, mixed=mixed and i % 4 == 0))
        while len(self.scheduler.running) < num_running:
            self.step()
        if waiting != "none":
            for i in range(NUM_WAITING):
                self.scheduler.add_request(
                    _request(f"waiting-{i}", num_running + i, parked=waiting == "parked")
                )
        for _ in range(WARM_UP_STEPS):
            self.step()
        assert len(self.scheduler.running) == num_running
        assert len(self.scheduler.waiting) == (NUM_WAITING if waiting == "blocked" else 0)
        assert len(self.scheduler.parked) == (NUM_WAITING if waiting == "parked" else 0)

    def step(self) -> float:
        """One step; the seconds spent in the scheduler."""
        clock = time.perf_counter
        start = clock()
        plan = self.scheduler.schedule()
        planned = clock()
        assert plan is not None
        result = self._result(plan)
        sampled = clock()
        outputs = self.scheduler.update_from_output(plan, result)
        end = clock()
        assert sum(len(client.outputs) for client in outputs.values()) == len(plan.sampling_rows)
        return (planned - start) + (end - sampled)

    def _result(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        sampling = set(plan.sampling_rows)
        tokens = [[TOKEN] if row in sampling else [] for row in range(plan.num_rows)]
        logprobs = {row: _LOGPROBS for row in plan.sampling_rows if row % 4 == 0} if self._mixed else {}
        return ModelRunnerOutput(tokens, logprobs)


_LOGPROBS = TokenLogprobs(
    np.full((1, 6), TOKEN, np.int32), np.full((1, 6), -1.0, np.float32), np.ones(1, np.int32)
)


def _scheduler(num_running: int, mixed: bool) -> Scheduler:
    """One with free slots, in which exactly `num_running` requests fit: the watermark holds back the blocks
    these will grow into, so whoever comes later is blocked by capacity.
    """
    window = 128
    specs = [KVCacheSpec(3, 64), *([KVCacheSpec(3, 64, sliding_window=window)] if mixed else [])]
    num_groups = len(specs)
    blocks_at_first = -(-(LONGEST + 1) // BLOCK_SIZE) * num_groups
    blocks_in_the_end = -(-(LONGEST + MAX_TOKENS) // BLOCK_SIZE) * num_groups
    num_held_back = num_running * (blocks_in_the_end - blocks_at_first)
    num_blocks = num_running * blocks_in_the_end + 1
    budget = max(
        2048, num_running * LONGEST
    )  # so that all are admitted in one step, each with its first blocks
    config = SchedulerConfig(
        max_num_seqs=num_running + 8,
        max_num_batched_tokens=budget,
        max_model_len=8192,
        watermark=(num_held_back - 0.5) / (num_blocks - 1),  # the scheduler rounds up
    )
    groups = tuple(KVCacheGroup((i,), spec) for i, spec in enumerate(specs))
    kv = KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, groups=groups),
        enable_caching=True,
        max_in_flight_tokens=budget,
    )
    return Scheduler(config, kv, clock=time.monotonic, vocab_size=VOCAB_SIZE)


def _request(request_id: str, number: int, *, mixed: bool = False, parked: bool = False) -> EngineCoreRequest:
    length = SHORTEST + number % (LONGEST - SHORTEST + 1)
    extras: dict[str, Any] = (
        {"logprobs": 5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": MAX_TOKENS - 1}
        if mixed
        else {}
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[(number * 7919 + i * 31) % VOCAB_SIZE for i in range(length)],
        sampling_params=SamplingParams(max_tokens=MAX_TOKENS, seed=number, **extras),
        eos_token_id=EOS,
        stop_token_ids=STOP_IDS if number % 8 == 0 else [],
        structured_outputs=StructuredOutputsParams(json_object=True) if parked else None,
    )


def median_step_us(load: Load, collector: Collector) -> float:
    gc.collect()
    if collector == "frozen":
        gc.freeze()
    elif collector == "off":
        gc.disable()
    try:
        return statistics.median(load.step() for _ in range(STEPS)) * 1e6
    finally:
        gc.unfreeze()
        gc.enable()


def best_step_us(cases: Iterable[Case]) -> dict[Case, float]:
    """Microseconds of a step, the best of `REPEATS` medians. Cases take turns: a busy minute hurts all."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(REPEATS):
        for case in best:
            load = Load(case.num_running, case.waiting, mixed=case.mixed)
            best[case] = min(best[case], median_step_us(load, case.collector))
    return best


def measure() -> dict[str, Any]:
    """All figures, for people and programs alike."""
    by_count = best_step_us([Case(n) for n in RUNNING_COUNTS])
    blocked, parked = Case(256, "blocked"), Case(256, "parked")
    mixed = Case(256, mixed=True)
    by_collector: list[Case] = [Case(256, collector=name) for name in ("frozen", "untouched", "off")]
    us = best_step_us([*by_collector, blocked, parked, mixed])
    added = {case.waiting: round(us[case] - us[Case(256)], 2) for case in (blocked, parked)}
    return {
        "us_per_request_step": {str(case.num_running): _each(case, t) for case, t in by_count.items()},
        "us_per_step_at_1": round(by_count[Case(1)], 2),
        "us_added_by_4000_waiting": max(added.values()),
        "us_added": added,
        "us_per_request_step_mixed": _each(mixed, us[mixed]),
        "us_per_request_step_by_gc": {case.collector: _each(case, us[case]) for case in by_collector},
    }


def _each(case: Case, us: float) -> float:
    return round(us / case.num_running, 3)


def table(figures: dict[str, Any]) -> str:
    """For people. Budgets stand beside what they bound."""
    lines = ["running    us per request and step    us per step"]
    for n, us in figures["us_per_request_step"].items():
        lines.append(f"{n:>7}    {us:>23.2f}    {us * int(n):>11.1f}")
    lines.append("budget: 1.00 us per request at 256 and at 1024\n")
    added = figures["us_added"]
    gcs = ", ".join(f"{name} {us:.2f}" for name, us in figures["us_per_request_step_by_gc"].items())
    for what, figure in (
        ("one request alone", f"{figures['us_per_step_at_1']:.1f} us a step (budget 20)"),
        (f"{NUM_WAITING} waiting, blocked", f"{added['blocked']:+.1f} us a step (budget 20)"),
        (f"{NUM_WAITING} waiting, parked", f"{added['parked']:+.1f} us a step (budget 20)"),
        ("256 of a mix", f"{figures['us_per_request_step_mixed']:.2f} us per request: {MIX}"),
        ("garbage collector, 256", gcs),
    ):
        lines.append(f"{what:<24} {figure}")
    return "\n".join(lines)
