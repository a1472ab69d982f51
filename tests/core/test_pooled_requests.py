"""Requests that are read and not continued, beside others: they sample nothing, and end once."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from mainspring.base.config import SchedulerConfig
from mainspring.base.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ModelRunnerOutput,
    Pooling,
    SchedulerOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.core.kv_cache import KVCacheManager
from mainspring.core.scheduler import Scheduler

BLOCK_SIZE, VOCABULARY = 4, 100


class Worker:
    """Reads what plans say. What it pools of a request are the tokens that it has read."""

    def __init__(self) -> None:
        self.stays: dict[int, list] = {}  # by slot: the request, its tokens, how many are read

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for slot in plan.freed_slots:
            self.stays.pop(slot, None)
        for new in plan.new_requests:
            self.stays[new.slot] = [new, list(new.token_ids), new.num_computed_tokens]
        output = ModelRunnerOutput([[] for _ in plan.slots])
        for row, (slot, n) in enumerate(zip(plan.slots, plan.num_scheduled_tokens, strict=True)):
            stay = self.stays[slot]
            new, tokens, read = stay
            assert read + n <= len(tokens)
            stay[2] = read + n
            if new.pooling is not None:
                assert row not in plan.sampling_rows
                if stay[2] == len(tokens):
                    output.pooled[row] = np.float32(tokens)
            elif row in plan.sampling_rows:
                tokens.append(7)
                output.sampled_token_ids[row].append(7)
        return output


class Engine:
    """A scheduler, a worker, and so many steps in flight."""

    def __init__(self, depth: int = 1, num_blocks: int = 64, **settings) -> None:
        given = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64} | settings
        spec = KVCacheSpec(num_kv_heads=1, head_size=4)
        layout = KVCacheConfig(num_blocks, BLOCK_SIZE, (KVCacheGroup((0,), spec),))
        config = SchedulerConfig(**given)
        kv = KVCacheManager(
            layout, enable_caching=True, max_in_flight_tokens=depth * config.max_num_batched_tokens
        )
        self.scheduler = Scheduler(config, kv, clock=lambda: 0.0, vocab_size=VOCABULARY)
        self.worker, self.depth = Worker(), depth
        self.plans: list[SchedulerOutput] = []
        self.said: dict[str, list[EngineCoreOutput]] = {}
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def pool(self, name: str, tokens: list[int], kind: str = "last", **more) -> None:
        skips = kind != "last"
        self._add(name, tokens, SamplingParams(max_tokens=1, skip_reading_prefix_cache=skips), kind, **more)

    def generate(self, name: str, tokens: list[int], max_tokens: int) -> None:
        self._add(name, tokens, SamplingParams(max_tokens=max_tokens), None)

    def _add(self, name: str, tokens: list[int], params: SamplingParams, kind, **more) -> None:
        pooling = None if kind is None else Pooling(kind)
        self.scheduler.add_request(EngineCoreRequest(name, tokens, params, pooling=pooling, **more))

    def step(self) -> bool:
        while len(self._in_flight) < self.depth and (plan := self.scheduler.schedule()) is not None:
            self.plans.append(plan)
            self._in_flight.append((plan, self.worker.run(plan)))
        if self._in_flight:
            outputs = self.scheduler.update_from_output(*self._in_flight.popleft())
        else:
            outputs = self.scheduler.take_outputs()
        for output in outputs[0].outputs if 0 in outputs else ():
            self.said.setdefault(output.request_id, []).append(output)
        self.scheduler.check()
        return self.scheduler.has_requests()

    def run(self) -> None:
        for _ in range(2000):
            if not self.step():
                assert self.scheduler.kv.pool.usage == 0.0
                return
        raise AssertionError("it does not end")


def tokens(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(VOCABULARY) for _ in range(length)]


def check_pooled(engine: Engine, name: str, expected: list[int]) -> None:
    [output] = engine.said[name]
    assert output.finish_reason is FinishReason.STOP
    assert output.new_token_ids == []
    assert output.pooled is not None
    assert output.pooled.tolist() == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 40])
def test_it_ends_when_its_prompt_is_read(depth: int, length: int):
    engine = Engine(depth)
    engine.pool("p", tokens(length))
    engine.run()
    check_pooled(engine, "p", tokens(length))
    assert len(engine.plans) == -(-length // 16)
    assert not any(plan.sampling_rows for plan in engine.plans)
    assert engine.said["p"][0].num_cached_tokens == 0
    assert [event.type.name for event in engine.said["p"][0].events or ()] == ["QUEUED", "SCHEDULED"]


def test_it_may_be_as_long_as_the_model_reads():
    """Nothing follows it, so no place is kept free for an answer."""
    engine = Engine()
    engine.pool("fits", tokens(64))
    engine.pool("too long", tokens(65))
    engine.run()
    check_pooled(engine, "fits", tokens(64))
    [refused] = engine.said["too long"]
    assert refused.finish_reason is FinishReason.ERROR


def test_the_last_tokens_state_may_come_after_a_cached_prefix():
    engine = Engine()
    engine.pool("first", tokens(33))
    engine.run()
    engine.pool("again", tokens(33))
    engine.pool("mean", tokens(33), "mean")
    engine.run()
    assert engine.said["again"][0].num_cached_tokens == 32
    assert engine.said["mean"][0].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_those_who_write_go_on_beside_it(depth: int):
    engine = Engine(depth)
    engine.generate("g", tokens(3), 12)
    for i in range(10):
        engine.pool(f"p{i}", tokens(30, i), "mean")
    engine.run()
    assert sum(len(output.new_token_ids) for output in engine.said["g"]) == 12
    with_row = [plan for plan in engine.plans if plan.sampling_rows]
    assert len(with_row) == 12
    for i in range(10):
        check_pooled(engine, f"p{i}", tokens(30, i))


@pytest.mark.parametrize("seed", range(40))
def test_random_lives(seed: int):
    """Few blocks, preemptions, aborts in flight, priorities: whoever is pooled is pooled whole, and once."""
    dice = random.Random(seed)
    num_stages = dice.choice([1, 1, 2])
    engine = Engine(
        num_stages + dice.choice([0, 1]),
        dice.choice([18, 24, 40]),
        max_num_seqs=dice.choice([2, 8]),
        max_num_batched_tokens=dice.choice([8, 16, 64]),
        policy=dice.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=dice.choice([0, 5]),
        num_stages=num_stages,
    )
    lengths = {f"p{i}": dice.randint(1, 60) for i in range(8)}
    for i, (name, length) in enumerate(lengths.items()):
        engine.pool(name, tokens(length, i), dice.choice(["last", "mean", "all"]), priority=dice.randrange(3))
        engine.generate(f"g{i}", tokens(dice.randint(1, 30), i), dice.randint(1, 20))
    aborted = set(dice.sample(sorted(lengths), 2))
    for _ in range(dice.randrange(6)):
        engine.step()
    live = aborted & engine.scheduler.requests.keys()
    engine.scheduler.finish_requests(live)
    engine.run()
    for i, (name, length) in enumerate(lengths.items()):
        if name in live:
            assert name not in engine.said
        else:
            check_pooled(engine, name, tokens(length, i))
