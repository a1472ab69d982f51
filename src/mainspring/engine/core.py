"""The inner loop: plan, run, book. `EngineCore.step` is the whole of what happens each step.

With `depth` 1 a step is planned, run and booked before the next. With more, that many are in flight: while
one runs, the next is planned and the last is booked; a pipeline of workers needs as many as it has stages. It
is one loop for all; only a step whose mask needs a token that is not booked yet holds the filling up.

It knows no tokenizer, socket or process: `EngineCoreProc` wraps it where it has a process of its own.
"""

from __future__ import annotations

import cProfile
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import assert_never

from mainspring.base.errors import EngineDeadError, innermost
from mainspring.base.messages import (
    SLEEP_TAGS,
    CheckHealth,
    Command,
    CommandResult,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GetStats,
    IsPaused,
    IsSleeping,
    ModelRunnerOutput,
    PauseMode,
    PauseScheduler,
    PrepareGrammars,
    Profile,
    ResetPrefixCache,
    ResumeScheduler,
    SchedulerOutput,
    Sleep,
    WakeUp,
)
from mainspring.base.protocols import Executor, Grammar, GrammarCompiler
from mainspring.core.scheduler import PauseState, Scheduler

logger = logging.getLogger(__name__)

YIELD_S = 0.001  # what a step that ran nothing leaves to the threads it waits for


@dataclass(slots=True)
class _StepInFlight:
    plan: SchedulerOutput
    forward: Future[ModelRunnerOutput | None]
    sampling: Future[ModelRunnerOutput] | None = None  # None: nothing to sample, or its mask is not ready
    waits_for_mask: bool = False

    def result(self) -> ModelRunnerOutput:
        # also where sampling follows: a failure of the forward pass is the cause
        forward = self.forward.result()
        result = self.sampling.result() if self.sampling is not None else forward
        assert result is not None, f"step {self.plan.step_id} came back without a result"
        return result


class EngineCore:
    """`add_request`, `abort_requests`, `call` and `step` are for the thread that runs the loop; another
    thread may only put lists of request ids into `aborts_queue`, and report a dead worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 1,
        grammars: GrammarCompiler | None = None,
        log_iteration_details: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.aborts_queue: SimpleQueue[list[str]] = SimpleQueue()
        self._grammars = grammars
        self._iteration_details = log_iteration_details
        self._compiling: dict[str, Future[Grammar]] = {}
        self._in_flight: deque[_StepInFlight] = deque()
        self._when_idle: list[tuple[Future[bool], bool, Callable[[], None]]] = []
        self._asleep: set[str] = set()  # what was given back: of SLEEP_TAGS
        self._profiler: cProfile.Profile | None = None
        self._sleep = sleep
        self._dead: str | None = None
        self._executor_failure: str | None = None
        self.on_executor_failure: Callable[[str], None] = lambda cause: None  # wakes who waits for work
        executor.register_failure_callback(self._executor_failed)

    # -- requests and commands -------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        self.scheduler.add_request(request)
        if request.structured_outputs is not None and request.request_id in self.scheduler.parked:
            if self._grammars is None:
                self.scheduler.fail_request(request.request_id, "this engine has no grammar compiler")
            else:
                self._compiling[request.request_id] = self._grammars.compile(request)

    def abort_requests(self, request_ids: Iterable[str] | None) -> None:
        """Idempotent, and ids that are not known are ignored; None means all. An aborted request is not
        spoken of again."""
        self.scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def call(self, command: Command) -> CommandResult:
        self._check_alive()
        match command:
            case ResetPrefixCache(reset_running_requests):
                return self.scheduler.reset_prefix_cache(reset_running_requests)
            case GetStats():
                return self.scheduler.stats()
            case CheckHealth():
                return all(self.executor.call(command))
            case PauseScheduler(mode, clear_cache):
                return self._pause(mode, clear_cache)
            case ResumeScheduler():
                if self._asleep:
                    raise RuntimeError(
                        f"{', '.join(sorted(self._asleep))} asleep: WakeUp comes before resuming"
                    )
                self.scheduler.pause_state = PauseState.UNPAUSED
                return True
            case IsPaused():
                return self.scheduler.pause_state is not PauseState.UNPAUSED
            case Sleep(level):
                return self._fall_asleep(level)
            case WakeUp(tags):
                return self._wake_up(tags)
            case IsSleeping():
                return bool(self._asleep)
            case PrepareGrammars():
                return self._grammars.prepare() if self._grammars is not None else False
            case Profile(is_start):
                return self._profile(is_start)
            case forgotten:
                assert_never(forgotten)

    def live_requests(self) -> list[EngineCoreRequest]:
        """What was added and has not ended."""
        return [request.message for request in self.scheduler.requests.values()]

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_runnable_requests()

    def _pause(
        self, mode: PauseMode, clear_cache: bool, then: Callable[[], None] = lambda: None
    ) -> Future[bool]:
        if mode == "abort":
            self.scheduler.abort_all()
        self.scheduler.pause_state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        paused: Future[bool] = Future()
        self._when_idle.append((paused, clear_cache, then))
        return paused

    def settle_if_idle(self) -> None:
        """Answer whoever waits for the engine to have nothing to run. The loop calls this between steps."""
        while self._when_idle and not self.has_work():
            paused, clear_cache, then = self._when_idle.pop(0)
            try:
                if clear_cache and not self.scheduler.reset_prefix_cache(reset_running_requests=True):
                    raise RuntimeError("the prefix cache cannot be cleared: KV is on its way into its blocks")
                then()
            except Exception as error:  # the command's failure, not the engine's
                paused.set_exception(error)
            else:
                paused.set_result(True)

    def _fall_asleep(self, level: int) -> Future[bool]:
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level {level} must be 0, 1 or 2")

        def drop() -> None:
            if self.scheduler.pause_state is PauseState.UNPAUSED:
                raise RuntimeError("the engine was resumed before it could fall asleep")
            if level:
                self.executor.call(Sleep(level))
                self._asleep |= {"kv_cache"} if level == 1 else set(SLEEP_TAGS)

        return self._pause("abort", level > 0, drop)

    def _wake_up(self, tags: list[str] | None) -> bool:
        if unknown := set(tags or ()) - set(SLEEP_TAGS):
            raise ValueError(f"wake_up tags {sorted(unknown)} must be among {', '.join(SLEEP_TAGS)}")
        woken = self._asleep if tags is None else self._asleep & set(tags)
        if woken:
            self.executor.call(WakeUp(sorted(woken, reverse=True)))  # weights first
            self._asleep = self._asleep - woken
        if not self._asleep:
            self.scheduler.pause_state = PauseState.UNPAUSED
        return True

    def _profile(self, is_start: bool) -> str | None:
        if is_start:
            if self._profiler is not None:
                raise RuntimeError("the profiler runs already")
            self._profiler = cProfile.Profile()
            self._profiler.enable()
            return None
        if self._profiler is None:
            raise RuntimeError("the profiler does not run")
        self._profiler.disable()
        path = os.path.abspath(f"mainspring-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.prof")
        self._profiler.dump_stats(path)
        self._profiler = None
        return path

    # -- the loop --------------------------------------------------------------------------------------------

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Run until the oldest step in flight is booked; what there is to say, by client.

        Any exception in here ends the core: it is logged with the plans in flight and raised as
        `EngineDeadError`, now and at every later call.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception as error:
            raise self._die(error) from error

    def _step(self) -> dict[int, EngineCoreOutputs]:
        self.process_aborts_queue()
        self._take_compiled_grammars()
        self._fill()
        if not self._in_flight:
            return self._ran_nothing()
        step = self._in_flight[0]
        started_s = time.monotonic()
        result = step.result()
        self.process_aborts_queue()
        outputs = self.scheduler.update_from_output(step.plan, result)
        if outputs:
            stats = self.scheduler.stats()
            for said in outputs.values():
                said.scheduler_stats = stats
        self._in_flight.popleft()
        if self._in_flight and self._in_flight[-1].waits_for_mask:
            self._send_sampling(self._in_flight[-1])
        if self._iteration_details:
            self._log_iteration_details(step.plan, started_s)
        if step.plan.num_tokens == 0:
            self._sleep(YIELD_S)
        return outputs

    def _fill(self) -> None:
        """Plan and send steps until `depth` are in flight, one waits for its mask, or there is nothing to
        run."""
        while len(self._in_flight) < self.depth and not (
            self._in_flight and self._in_flight[-1].waits_for_mask
        ):
            plan = self.scheduler.schedule()
            if plan is None:
                return
            step = _StepInFlight(plan, self.executor.execute_model(plan, non_block=True))
            self._in_flight.append(step)
            self._send_sampling(step)

    def _send_sampling(self, step: _StepInFlight) -> None:
        """The mask is made while the device runs the forward pass."""
        if not step.plan.sampling_rows:
            return
        step.waits_for_mask = not self.scheduler.is_mask_ready(step.plan)
        if not step.waits_for_mask:
            mask = self.scheduler.get_grammar_bitmask(step.plan)
            step.sampling = self.executor.sample_tokens(mask, non_block=True)

    def _ran_nothing(self) -> dict[int, EngineCoreOutputs]:
        """Requests that wait for an event leave the CPU to whoever brings it."""
        outputs = self.scheduler.take_outputs()
        if not outputs and self.scheduler.has_runnable_requests():
            self._sleep(YIELD_S)
        return outputs

    def process_aborts_queue(self) -> None:
        """Aborts that arrived from another thread; those of while a step ran come before its outputs."""
        while True:
            try:
                self.abort_requests(self.aborts_queue.get_nowait())
            except Empty:
                return

    def _take_compiled_grammars(self) -> None:
        for request_id, future in list(self._compiling.items()):
            if request_id not in self.scheduler.parked:  # aborted meanwhile
                future.cancel()
            elif not future.done():
                continue
            del self._compiling[request_id]
            if future.cancelled():
                continue
            if (error := future.exception()) is not None:
                self.scheduler.fail_request(request_id, f"its grammar does not compile: {innermost(error)}")
            else:
                self.scheduler.set_grammar(request_id, future.result())

    # -- the end ---------------------------------------------------------------------------------------------

    def _executor_failed(self, cause: str) -> None:
        self._executor_failure = cause
        self.on_executor_failure(cause)

    def _check_alive(self) -> None:
        if self._dead is None and self._executor_failure is not None:
            self._dead = f"a worker has died: {self._executor_failure}"
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    def _die(self, error: Exception) -> EngineDeadError:
        self._dead = f"the engine core has ended: {innermost(error)}"
        self.log_error_detail()
        return EngineDeadError(self._dead)

    def log_error_detail(self) -> None:
        """What was in flight when the core ended: in numbers, without a client's text."""
        stats = self.scheduler.stats()
        logger.error(
            "%s; in flight: %s; %d running, %d waiting, %d parked, %.0f %% of the blocks held",
            self._dead,
            [_describe(step.plan) for step in self._in_flight],
            stats.num_running,
            stats.num_waiting,
            stats.num_parked,
            100 * stats.kv_cache_usage,
        )

    def _log_iteration_details(self, plan: SchedulerOutput, started_s: float) -> None:
        logger.info("%s, booked after %.1f ms", _describe(plan), 1000 * (time.monotonic() - started_s))

    def check(self) -> None:
        """Assert what must hold between two steps. For tests."""
        self.scheduler.check()
        assert len(self._in_flight) <= self.depth
        assert not any(step.waits_for_mask for step in list(self._in_flight)[:-1]), (
            "a step overtook a waiting one"
        )

    def shutdown(self) -> None:
        """Idempotent."""
        self._compiling.clear()
        if self._grammars is not None:
            self._grammars.close()
        self.executor.close()


def _describe(plan: SchedulerOutput) -> str:
    """A plan in numbers, without a client's text."""
    return (
        f"step {plan.step_id}: {plan.num_rows} rows, {plan.num_tokens} tokens, {len(plan.new_requests)} new, "
        f"{sum(len(append.block_ids) for append in plan.new_blocks)} new blocks"
    )
