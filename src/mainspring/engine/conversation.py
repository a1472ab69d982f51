"""What a front end and a core in another process say to each other, without the socket.

Written once and driven twice: `SyncMPClient` and `AsyncMPClient` only move frames and wait. Death is noticed
here too, whether the core could still say it (`hear`) or somebody who watches the process reports it
(`died`); from then on everything that is asked raises `EngineDeadError` with the cause, and every answer
waited for gets it.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import msgspec

from mainspring.base.errors import EngineDeadError, EngineError
from mainspring.base.messages import (
    Command,
    EngineCoreOutputs,
    EngineCoreRequest,
    GetStats,
    Profile,
    SchedulerStats,
)
from mainspring.engine.wire import ENGINE_CORE_DEAD, Codec, Frames, RequestType, Utility

RESULT_TYPES: dict[type, Any] = {GetStats: SchedulerStats, Profile: str | None}  # of others bool


class Answer(Protocol):
    """A future of either kind: `concurrent.futures` or asyncio."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class CommandFailed(EngineError, RuntimeError):
    """The core could not do what it was told; it goes on."""


class Conversation:
    def __init__(self, client_index: int = 0) -> None:
        self.client_index = client_index
        self.cause_of_death: str | None = None
        self.is_leaving = False  # the core was asked to end: it takes nothing more
        self._codec = Codec()
        self._call_ids = itertools.count()
        self._pending: dict[int, tuple[Command, Answer]] = {}

    def add(self, request: EngineCoreRequest) -> Frames:
        self.check_alive()
        request.client_index = self.client_index
        return [RequestType.ADD.value, self._codec.encode(request)]

    def abort(self, request_ids: list[str]) -> Frames:
        return [RequestType.ABORT.value, self._codec.encode(request_ids)]

    def start_wave(self, number: int) -> Frames:
        self.check_alive()
        return [RequestType.START_DP_WAVE.value, self._codec.encode(number)]

    def call(self, command: Command, answer: Answer) -> Frames:
        self.check_alive()
        call_id = next(self._call_ids)
        self._pending[call_id] = (command, answer)
        return [RequestType.UTILITY.value, self._codec.encode(Utility(self.client_index, call_id, command))]

    def hear(self, frames: Frames) -> EngineCoreOutputs | None:
        """Take one message from the core; answers go to whoever waits for them, news of requests is returned.

        Raises `EngineDeadError` if the message says that the core has ended.
        """
        if frames[0] == ENGINE_CORE_DEAD:
            raise self.died(frames[1].decode("utf-8", "replace"))
        outputs = self._codec.decode_outputs(frames[0])
        self.is_leaving |= outputs.is_leaving
        if outputs.utility_output is not None:
            call_id, result, error = outputs.utility_output
            command, answer = self._pending.pop(call_id)
            if answer.done():
                pass  # given up by who asked
            elif error is not None:
                answer.set_exception(CommandFailed(error))
            else:
                answer.set_result(msgspec.msgpack.decode(result, type=RESULT_TYPES.get(type(command), bool)))
        is_news = outputs.outputs or outputs.scheduler_stats is not None
        return outputs if is_news or outputs.start_wave is not None else None

    def died(self, cause: str) -> EngineDeadError:
        """The core has ended; the first cause stays. Returns what to raise."""
        self.cause_of_death = self.cause_of_death or cause
        for _, answer in self._pending.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(self.cause_of_death))
        self._pending.clear()
        return EngineDeadError(self.cause_of_death)

    def check_alive(self) -> None:
        if self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death)
