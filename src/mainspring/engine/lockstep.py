"""Data-parallel ranks that step together: for models whose experts are spread over them.

Every rank's forward pass meets the others' in collectives, so either all make a step or none does. A rank
without requests makes an empty one. Time is cut into *waves*: in one all ranks step; between them all sleep.

The protocol, as pure functions over `Wave`:
- A rank that sleeps and has something to run wakes into the wave of its number, and before it waits for the
  others asks the sender of requests to start them. What made it wake does not matter: a request, or the end
  of a pause that held some back.
- The sender passes each wave's start on once.
- Every `SYNC_INTERVAL` steps the ranks ask each other whether anybody has something to run. If nobody has,
  the wave is over for all of them at once.
- A rank comes to rest, which who paused it waits for, when it has nothing to run and no wave runs. Only when
  all have may any of them give memory back: then no wave runs, and none can begin before they are resumed.

What makes it right, and a test explores exhaustively: what is sent to several ranks is sent at once, and they
read it in the order of its sending, between their steps. So whoever is asked to start a wave has read every
command that was read by who wished for it.

Deliberate difference to the specification, where senders believe in a wave, say in each request which, and
hear of its end: there are no beliefs here that can be wrong. It costs the first step of a wave one message
more on its way.

`Lockstep` wraps an `EngineCore` and makes it such a rank. It is one loop's, like the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mainspring.base.messages import (
    Command,
    CommandResult,
    EngineCoreOutputs,
    EngineCoreRequest,
    Sleep,
)
from mainspring.core.scheduler import PauseState
from mainspring.engine.core import EngineCore

SYNC_INTERVAL = 16  # steps; the first one of a wave asks too, for it may be the only one


class Wave(NamedTuple):
    """Where a rank stands."""

    number: int = 0
    is_running: bool = False
    num_steps: int = 0  # made in this wave


def on_work(wave: Wave) -> Wave:
    """A rank that sleeps has something to run. The sender is asked to start the others."""
    return Wave(wave.number, True)


def on_start(wave: Wave, number: int) -> Wave:
    """Told to start a wave: late or repeated, that changes nothing."""
    return wave if wave.is_running or number < wave.number else Wave(number, True)


def asks_now(wave: Wave) -> bool:
    """Whether the step that was just made ends with the ranks' question to each other."""
    return wave.num_steps == 1 or wave.num_steps % SYNC_INTERVAL == 0


def on_step(wave: Wave) -> Wave:
    return wave._replace(num_steps=wave.num_steps + 1)


def on_answer(wave: Wave, anybody_has_work: bool) -> Wave:
    return wave if anybody_has_work else Wave(wave.number + 1)


def is_at_rest(wave: Wave, has_work: bool) -> bool:
    return not wave.is_running and not has_work


def passes_on(latest: int, number: int) -> bool:
    """Whether the sender, who has passed the start of wave `latest` on, does it for a wish for `number`."""
    return number > latest


def should_throttle_prefills(num_steps: int, interval: int, num_decoding: int, had_no_room: bool) -> bool:
    """Whether prompts wait in this step: they start on aligned steps of all ranks, so that one rank's prompt
    does not make the others' decodes wait in every step; but never where nothing decodes here, nor after a
    step in which somebody found no room, who is first in line for what was freed since."""
    return interval > 1 and num_steps % interval != 0 and num_decoding > 0 and not had_no_room


class Lockstep:
    """An `EngineCore` as one of several ranks that step together.

    Deliberate difference to the specification, where `DPEngineCoreProc` inherits: the loop around it
    (`EngineCoreProc`) is the same for both.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        prefill_schedule_interval: int = 1,
    ) -> None:
        assert core.depth == 1, "ranks in lock-step have one step in flight"
        self.core = core
        self.scheduler = core.scheduler
        self.aborts_queue = core.aborts_queue
        self.wave = Wave()
        self._interval = prefill_schedule_interval

    # -- what the loop asks of an engine ---------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def start_wave(self, number: int) -> None:
        self.wave = on_start(self.wave, number)

    def has_work(self) -> bool:
        return self.wave.is_running or self.core.has_work()

    def step(self) -> dict[int, EngineCoreOutputs]:
        """What there is to say, without a wave; the wish for one; or a step of it."""
        if not self.wave.is_running:
            return self.scheduler.take_outputs() or self._wake()
        num_tokens = self.scheduler.stats().num_scheduled_tokens
        self._throttle()
        outputs = self.core.step() if self.core.has_work() else {}
        if self.scheduler.stats().num_scheduled_tokens == num_tokens:
            self.core.executor.execute_dummy_batch()
        self._end_step()
        return outputs

    def _wake(self) -> dict[int, EngineCoreOutputs]:
        self.wave = on_work(self.wave)
        return {0: EngineCoreOutputs(start_wave=self.wave.number)}  # client 0 is the sender of requests

    def _throttle(self) -> None:
        scheduler = self.scheduler
        scheduler.throttles_prefills = should_throttle_prefills(
            self.wave.num_steps, self._interval, scheduler.num_decoding(), scheduler.had_no_room
        )

    def _end_step(self) -> None:
        self.wave = on_step(self.wave)
        if asks_now(self.wave):
            anybody = self.core.executor.has_any_rank_work(self.core.has_work())
            self.wave = on_answer(self.wave, anybody)

    # -- and the rest, which is the core's -------------------------------------------------------------------

    def abort_requests(self, request_ids: Iterable[str] | None) -> None:
        self.core.abort_requests(request_ids)

    def call(self, command: Command) -> CommandResult:
        if isinstance(command, Sleep) and self.scheduler.pause_state is PauseState.UNPAUSED:
            raise RuntimeError(
                "ranks in lock-step fall asleep when all are paused, and were resumed meanwhile"
            )
        return self.core.call(command)

    def live_requests(self) -> list[EngineCoreRequest]:
        return self.core.live_requests()

    def settle_if_idle(self) -> None:
        if is_at_rest(self.wave, self.core.has_work()):
            self.core.settle_if_idle()

    def process_aborts_queue(self) -> None:
        self.core.process_aborts_queue()

    @property
    def on_executor_failure(self) -> Callable[[str], None]:
        return self.core.on_executor_failure

    @on_executor_failure.setter
    def on_executor_failure(self, callback: Callable[[str], None]) -> None:
        self.core.on_executor_failure = callback

    def shutdown(self) -> None:
        self.core.shutdown()
