"""One worker in this process.

With one step in flight, calls run at once and their futures are done when they return. With more, calls run
in order on one thread of the worker's own, so the engine can plan the next step while a step computes
(kernels release the GIL).

A step that raises ends the executor: its exception is in its future, and whatever was sent after it fails
with the same cause, so the engine sees why, whichever future it looks at first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineDeadError, EngineError, innermost
from mainspring.base.messages import (
    Command,
    CommandResult,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from mainspring.worker.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


class UniProcExecutor:
    """The `Executor` protocol over one `Worker`."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config)
        self._failure: BaseException | None = None  # of the first step that raised
        self._closed = False
        self._thread: ThreadPoolExecutor | None = None
        if config.depth > 1:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mainspring-worker")

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self._submit(self._worker.get_kv_cache_specs).result()

    def determine_available_memory(self) -> int:
        return self._submit(self._worker.determine_available_memory).result()

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self._submit(self._worker.initialize, config, max_model_len).result()

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        return self._step(non_block, self._worker.execute_model, plan)

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        return self._step(non_block, self._worker.sample_tokens, mask)

    def execute_dummy_batch(self) -> None:
        self._step(False, self._worker.execute_dummy_batch).result()

    def has_any_rank_work(self, has_work: bool) -> bool:
        return self._submit(self._worker.has_any_rank_work, has_work).result()

    def call(self, command: Command) -> list[CommandResult]:
        if self._failure is not None:
            raise self._dead(self._failure)
        return [self._submit(self._worker.call, command).result()]

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Never called: this worker cannot die alone, and a step that raises says so in its future."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.close()

    def _step(self, non_block: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = self._submit(self._guarded, call, *args, **kwargs)
        if not non_block:
            future.exception()  # waits; who reads the result gets the exception
        return future

    def _guarded(self, call: Callable[..., T], *args: object) -> T:
        if self._failure is not None:
            raise self._dead(self._failure)
        try:
            return call(*args)
        except Exception as error:
            self._failure = error
            raise

    def _submit(self, call: Callable[..., T], *args: object) -> Future[T]:
        if self._closed:
            raise EngineError("the executor is closed")
        if self._thread is not None:
            return self._thread.submit(call, *args)
        future: Future[T] = Future()
        try:
            future.set_result(call(*args))
        except Exception as error:  # not Ctrl-C, which is the caller's
            future.set_exception(error)
        return future

    @staticmethod
    def _dead(failure: BaseException) -> EngineDeadError:
        dead = EngineDeadError(f"an earlier step failed: {innermost(failure)}")
        dead.__cause__ = failure
        return dead
