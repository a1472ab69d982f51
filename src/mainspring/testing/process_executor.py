"""A fake executor for a core in a process of its own: a core that a test can watch, slow down and break.

It is chosen by `EngineConfig.executor` = `mainspring.testing.process_executor:ProcessExecutor` and told what
to do by `executor_args`:

    phase, deed     at this phase do this, once
    nap_s           how long the deed "sleep" lasts
    mark            the path of a file that is written when `phase` is reached
    step_s          every step takes so long
    checked         `EngineCore.check` after every step; a broken rule ends the core
    fake            a mapping: what `make_fake` takes
    around          the name of an executor to use instead of the fake one

Adapters and salts are known to it (`FakeExecutor.roots`), since it looks the requests up in its engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from msgspec import structs

from mainspring.base.config import EngineConfig
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    EngineCoreOutputs,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from mainspring.base.protocols import Executor
from mainspring.engine.core import EngineCore
from mainspring.executor.base import make_executor
from mainspring.testing.fake_executor import FakeExecutor, make_fake

Phase = Literal["start-up", "loading", "idle", "prefill", "decode", "shutdown"]
Deed = Literal["nothing", "raise", "sleep", "kill"]

DECODES_BEFORE = 3  # steps without a new request, before a deed "decode"


class PlannedFailure(Exception):
    """What the deed "raise" raises."""


class ProcessExecutor:
    """Fits `base.protocols.Executor`.

    Phases: start-up is its construction, loading its `initialize`, idle a `CheckHealth` that comes while
    nothing runs, prefill a step with a new request, decode a step that continues, shutdown its `close`.
    """

    def __init__(self, config: EngineConfig) -> None:
        args = dict(config.executor_args)
        self._phase: Phase | None = args.get("phase")
        self._deed: Deed = args.get("deed", "nothing")
        self._nap_s: float = args.get("nap_s", 600.0)
        self._mark: str | None = args.get("mark")
        self._step_s: float = args.get("step_s", 0.0)
        self._is_checked: bool = args.get("checked", False)
        self._engine: EngineCore | None = None
        self._on_failure: list[Callable[[str], None]] = []
        self._num_decodes = 0
        self._reach("start-up")
        around, fake_args = args.get("around"), args.get("fake", {})
        self._inner: Executor = (
            make_fake(structs.replace(config, executor_args=fake_args))
            if around is None
            else make_executor(structs.replace(config, executor=around, executor_args={}))
        )

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._inner.get_kv_cache_specs()

    def determine_available_memory(self) -> int:
        return self._inner.determine_available_memory()

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self._reach("loading")
        self._inner.initialize(config, max_model_len)

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        assert self._engine is not None
        if isinstance(self._inner, FakeExecutor):
            for new in plan.new_requests:
                message = self._engine.scheduler.requests[new.request_id].message
                self._inner.roots[new.request_id] = self._inner.model.root(message)
        time.sleep(self._step_s)
        if plan.new_requests:
            self._reach("prefill")
        elif plan.num_rows:
            self._num_decodes += 1
            if self._num_decodes > DECODES_BEFORE:
                self._reach("decode")
        return self._inner.execute_model(plan, non_block)

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        return self._inner.sample_tokens(mask, non_block)

    def execute_dummy_batch(self) -> None:
        self._inner.execute_dummy_batch()

    def has_any_rank_work(self, has_work: bool) -> bool:
        return self._inner.has_any_rank_work(has_work)

    def call(self, command: Command) -> list[CommandResult]:
        if isinstance(command, CheckHealth) and self._engine is not None and not self._engine.has_work():
            self._reach("idle")
        return self._inner.call(command)

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        self._on_failure.append(callback)
        engine = getattr(callback, "__self__", None)  # whose method it is
        if isinstance(engine, EngineCore):
            self._engine = engine
            if self._is_checked:
                setattr(engine, "step", _checked(engine, engine.step))  # noqa: B010

    def close(self) -> None:
        self._reach("shutdown")
        self._inner.close()

    def _report_failure(self) -> None:
        for callback in self._on_failure:
            callback("PlannedFailure: at idle")

    def _reach(self, phase: Phase) -> None:
        if phase != self._phase:
            return
        self._phase = None
        if self._mark is not None:
            Path(self._mark).write_text(str(os.getpid()))
        match self._deed:
            case "raise" if phase == "idle":  # as a worker that dies while nobody asks it
                threading.Thread(target=self._report_failure, daemon=True).start()
            case "raise":
                raise PlannedFailure(f"at {phase}")
            case "sleep":
                time.sleep(self._nap_s)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def _checked(
    engine: EngineCore, step: Callable[[], dict[int, EngineCoreOutputs]]
) -> Callable[[], dict[int, EngineCoreOutputs]]:
    def checked_step() -> dict[int, EngineCoreOutputs]:
        outputs = step()
        engine.check()
        return outputs

    return checked_step
