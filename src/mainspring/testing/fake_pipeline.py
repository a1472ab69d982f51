"""An executor of several stages in time that is only counted: what a pipeline would take, exactly.

A step enters the first stage when that is free and the tokens that its rows read have been sampled; it enters
each further one when the stage before has ended and that stage is free. Whoever collects a result has waited
until its step left the last stage. What the rows say comes from the executor inside.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from mainspring.base.messages import (
    Command,
    CommandResult,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from mainspring.base.protocols import Executor

T = TypeVar("T")


class Visit(NamedTuple):
    """A step in a stage."""

    step_id: int
    stage: int
    begin_s: float
    end_s: float


class _Waited(Future[T]):
    """The future of an executor inside; whoever takes its result has waited for it."""

    def __init__(self, inner: Future[T], wait: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._wait = inner, wait

    def result(self, timeout: float | None = None) -> T:
        self._wait()
        return self._inner.result(timeout)


class PipelineExecutor:
    """Fits `base.protocols.Executor`. stage_s: a stage's time for a plan."""

    def __init__(self, inner: Executor, num_stages: int, stage_s: Callable[[SchedulerOutput], float]) -> None:
        self._inner = inner
        self._stage_s = stage_s
        self._free_s = [0.0] * num_stages
        self._sampled_s: dict[int, float] = {}  # by slot: when its last token was there
        self._end_s = 0.0  # of the step that was sent last
        self.now_s = 0.0  # of whoever drives this
        self.visits: list[Visit] = []

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        entered = {new.slot for new in plan.new_requests}
        read_s = [self._sampled_s.get(slot, 0.0) for slot in plan.slots if slot not in entered]
        end_s = max(self.now_s, *read_s, 0.0)
        for stage, free_s in enumerate(self._free_s):
            begin_s = max(end_s, free_s)
            end_s = self._free_s[stage] = begin_s + self._stage_s(plan)
            self.visits.append(Visit(plan.step_id, stage, begin_s, end_s))
        self._end_s = end_s
        self._sampled_s.update((plan.slots[row], end_s) for row in plan.sampling_rows)
        return self._waited(self._inner.execute_model(plan, non_block))

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        return self._waited(self._inner.sample_tokens(mask, non_block))

    def _waited(self, inner: Future[T]) -> Future[T]:
        end_s = self._end_s

        def wait() -> None:
            self.now_s = max(self.now_s, end_s)

        return _Waited(inner, wait)

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._inner.get_kv_cache_specs()

    def determine_available_memory(self) -> int:
        return self._inner.determine_available_memory()

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self._inner.initialize(config, max_model_len)

    def execute_dummy_batch(self) -> None:
        self._inner.execute_dummy_batch()

    def has_any_rank_work(self, has_work: bool) -> bool:
        return self._inner.has_any_rank_work(has_work)

    def call(self, command: Command) -> list[CommandResult]:
        return self._inner.call(command)

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        self._inner.register_failure_callback(callback)

    def close(self) -> None:
        self._inner.close()


def timeline(visits: list[Visit], first_step: int, num_steps: int) -> str:
    """Stages as lines and time as columns: which step is where. Steps are shown by their last digit."""
    shown = [visit for visit in visits if first_step <= visit.step_id < first_step + num_steps]
    begin_s, end_s = min(visit.begin_s for visit in shown), max(visit.end_s for visit in shown)
    unit_s = min(visit.end_s - visit.begin_s for visit in shown) / 2
    lines = []
    for stage in sorted({visit.stage for visit in shown}):
        line = ["."] * round((end_s - begin_s) / unit_s)
        for visit in shown:
            if visit.stage == stage:
                span = range(
                    round((visit.begin_s - begin_s) / unit_s), round((visit.end_s - begin_s) / unit_s)
                )
                for column in span:
                    line[column] = str(visit.step_id % 10)
        lines.append(f"stage {stage}  {''.join(line)}")
    return "\n".join(lines)
