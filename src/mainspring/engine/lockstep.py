"""Data-parallel ranks that step together: for models whose experts are spread over them.

Every rank's forward pass meets the others' in collectives, so either all make a step or none does. A rank
without requests makes an empty one. Time is cut into *waves*: in one all ranks step; between them all sleep.

The protocol (after the specification's `DPEngineCoreProc`), as pure functions over `Wave`:
- A request carries the wave that its sender believes in. A sender who believes that all sleep tells the
  other ranks to start that wave.
- A rank that sleeps and gets a request of a wave that is over wakes, and asks the sender to start the others.
- Every `SYNC_INTERVAL` steps the ranks ask each other whether anybody has something to run. If nobody has,
  the wave is over for all of them at once, and rank 0 says so.

What makes it right, and a test explores exhaustively: a message to a rank is read between its steps; a rank
that was told of a later wave has passed the collective that ended the one before; so nobody is told to start
a wave that it is still to end.

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
)
from mainspring.engine.core import EngineCore

SYNC_INTERVAL = 16  # steps; the first one of a wave asks too, in case it was started for nothing


class Wave(NamedTuple):
    """Where a rank, or the sender's belief, stands."""

    number: int = 0
    is_running: bool = False
    num_steps: int = 0  # made in this wave


class Turn(NamedTuple):
    """What an event makes of a rank."""

    wave: Wave
    wakes_others: bool = False  # the sender is to be asked to start the other ranks


def on_request(wave: Wave, request_wave: int) -> Turn:
    """A request has come. If its sender believed in a wave that is over, nobody has told the others."""
    if wave.is_running:
        return Turn(wave)
    is_stale = request_wave < wave.number
    return Turn(Wave(max(wave.number, request_wave), True), is_stale)


def on_start(wave: Wave, number: int) -> Wave:
    """Told to start a wave: late or repeated, that changes nothing."""
    if wave.is_running or number < wave.number:
        return wave
    return Wave(number, True)


def asks_now(wave: Wave) -> bool:
    """Whether the step that was just made ends with the ranks' question to each other."""
    return wave.num_steps == 1 or wave.num_steps % SYNC_INTERVAL == 0


def on_step(wave: Wave) -> Wave:
    return wave._replace(num_steps=wave.num_steps + 1)


def on_answer(wave: Wave, anybody_has_work: bool) -> Wave:
    return wave if anybody_has_work else Wave(wave.number + 1)


class Belief(NamedTuple):
    """What the sender of requests, who also coordinates, believes of all ranks."""

    number: int = 0
    is_running: bool = False


def on_sending(belief: Belief) -> tuple[Belief, bool]:
    """Before a request is sent, with the belief's number: whether the other ranks have to be started."""
    return Belief(belief.number, True), not belief.is_running


def on_wave_complete(belief: Belief, number: int) -> Belief:
    return Belief(number + 1) if number >= belief.number else belief


def on_wake_wish(belief: Belief, number: int) -> tuple[Belief, bool]:
    """A rank has woken for a request of a wave that was over: whether the others have to be started."""
    if number < belief.number or (number == belief.number and belief.is_running):
        return belief, False
    return Belief(number, True), True


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
        rank: int,
        *,
        prefill_schedule_interval: int = 1,
    ) -> None:
        assert core.depth == 1, "ranks in lock-step have one step in flight"
        self.core = core
        self.scheduler = core.scheduler
        self.aborts_queue = core.aborts_queue
        self.wave = Wave()
        self._rank = rank
        self._interval = prefill_schedule_interval
        self._notices: list[EngineCoreOutputs] = []  # for the sender of requests, who is client 0

    # -- what the loop asks of an engine ---------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)
        self.wave, wakes_others = on_request(self.wave, request.current_wave)
        if wakes_others:
            self._notices.append(EngineCoreOutputs(start_wave=self.wave.number))

    def start_wave(self, number: int) -> None:
        self.wave = on_start(self.wave, number)

    def has_work(self) -> bool:
        return self.wave.is_running or bool(self._notices) or self.core.has_work()

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Notices first, for others wait for them while this rank waits for the others; then a step."""
        if self._notices:
            return {0: self._notices.pop(0)}
        if not self.wave.is_running:
            return self.core.step()  # something to say, and nothing to run
        num_tokens = self.scheduler.stats().num_scheduled_tokens
        self._throttle()
        outputs = self.core.step() if self.core.has_work() else {}
        if self.scheduler.stats().num_scheduled_tokens == num_tokens:
            self.core.executor.execute_dummy_batch()
        self._end_step()
        return outputs

    def _throttle(self) -> None:
        scheduler = self.scheduler
        scheduler.throttles_prefills = should_throttle_prefills(
            self.wave.num_steps, self._interval, scheduler.num_decoding(), scheduler.had_no_room
        )

    def _end_step(self) -> None:
        self.wave = on_step(self.wave)
        if not asks_now(self.wave):
            return
        number = self.wave.number
        self.wave = on_answer(self.wave, self.core.executor.has_any_rank_work(self.core.has_work()))
        if not self.wave.is_running and self._rank == 0:
            self._notices.append(EngineCoreOutputs(wave_complete=number))

    # -- and the rest, which is the core's -------------------------------------------------------------------

    def abort_requests(self, request_ids: Iterable[str] | None) -> None:
        self.core.abort_requests(request_ids)

    def call(self, command: Command) -> CommandResult:
        return self.core.call(command)

    def live_requests(self) -> list[EngineCoreRequest]:
        return self.core.live_requests()

    def settle_if_idle(self) -> None:
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
