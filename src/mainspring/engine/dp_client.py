"""Several engine cores as one: data parallelism.

Theory of operation.
- Each rank is a whole engine core in a process of its own. The front end chooses one for each request
  (`router.py`) and knows of every live request where it is; aborts go there.
- The journal is here: of each live request what it asked and the tokens that were passed on. When a rank
  dies, its requests go to others, with those tokens as output that is not said again; so nobody's answer
  loses a token or gets one twice, and greedy and seeded answers go on as they would have. Only the last
  rank's end is the end.
- Each stay of a request in a rank has a number, which is a part of its id there: what is said of a stay that
  is over counts no more, also where the next is in the same rank.
- A request that two deaths have met may be what brought them about: it fails, and the others go on.
- A rank that is asked to end takes nothing more and finishes what it can; what it aborts goes on elsewhere.
- A rank that has work and says nothing for `SILENT_S` gets nothing new until it speaks. Its requests stay: it
  may be in a long step, and who moved what that step runs would do it again and again. The health check,
  which asks every rank, tells of one that never comes back.
- A request that waits for a seat in one rank goes to another where one is free (`router.moves`).
- Ranks whose experts are spread over all step together (`lockstep.py`): then this client coordinates their
  waves, and the death of one is the end of all, for they wait for each other.
- Tasks move news from the ranks to one queue; all else happens in the caller's own calls, in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from mainspring.base.config import DataParallelRank, EngineConfig
from mainspring.base.errors import EngineDeadError, PeerGoneError
from mainspring.base.messages import (
    Command,
    CommandResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GetStats,
    PauseScheduler,
    SchedulerStats,
    Sleep,
)
from mainspring.engine.conversation import CommandFailed
from mainspring.engine.launch import ConfigSource, CoreProcess
from mainspring.engine.lockstep import passes_on
from mainspring.engine.mp_client import AsyncMPClient
from mainspring.engine.proc import Ready
from mainspring.engine.router import EngineLoad, Routing, engine_of, moves, pick_engine
from mainspring.executor.links import Link, close_links, make_links

logger = logging.getLogger(__name__)

T = TypeVar("T")

STAY_MARK = "#"  # before the number of a request's stay
MAX_UNREAD = 64  # messages in the queue; then they stay with the ranks' clients
MOST_DEATHS = 2  # of ranks, that a request may have met: the second time it is the suspect
GATHER_S = 0.5  # for the cause, after the first death in lock-step
SILENT_S = 10.0  # longer than any but the largest step


class CoreGroup:
    """The processes of all ranks. `close` ends them."""

    def __init__(
        self,
        configs: Sequence[ConfigSource],
        *,
        shutdown_timeout_s: float = 0.0,
        given_up: threading.Event | None = None,
        lockstep: bool = False,
    ) -> None:
        """Starts them side by side; lockstep: linked to each other. If one does not start, the others are
        ended and its error is raised."""
        self.is_lockstep = lockstep
        given_up = given_up or threading.Event()
        failures: list[BaseException] = []  # in their order
        start = partial(CoreProcess, shutdown_timeout_s=shutdown_timeout_s, given_up=given_up)
        links = make_links(len(configs)) if lockstep else []
        with ThreadPoolExecutor(len(configs), "mainspring-ranks") as threads:
            starting = [
                threads.submit(_started, start, *_of_one(config, index, links), given_up, failures)
                for index, config in enumerate(configs)
            ]
        close_links(links)
        self.processes = [future.result() for future in starting if future.exception() is None]
        if failures:
            self.close()
            # The first is the cause; but ranks with links may see the end of one before it has said why.
            raise next((error for error in failures if not isinstance(error, EngineDeadError)), failures[0])

    @classmethod
    def of_alike(cls, config: Callable[[], EngineConfig], size: int, **more: Any) -> CoreGroup:
        """So many with the same configuration, which is made once; `more` as for the constructor."""
        return cls([_once(config)] * size, **more)

    @property
    def ready(self) -> Ready:
        """Of all together: the shortest longest request, the blocks of all."""
        all_ready = [process.ready for process in self.processes]
        return structs.replace(
            all_ready[0],
            max_model_len=min(ready.max_model_len for ready in all_ready),
            num_gpu_blocks=sum(ready.num_gpu_blocks for ready in all_ready),
        )

    def close(self) -> None:
        """Idempotent. They end side by side without threads of ours: the interpreter's end allows none."""
        for process in self.processes:
            process.ask_to_end()
        for process in self.processes:
            process.close()


def _once(make: Callable[[], T]) -> Callable[[], T]:
    """What `make` gives, made when first asked for, by whichever thread asks first."""
    lock = threading.Lock()
    made: list[T] = []

    def get() -> T:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get


def _of_one(config: ConfigSource, index: int, links: list[dict[int, Link]]) -> tuple[ConfigSource, list[int]]:
    """A rank's configuration, with its number and its links, and the descriptors of these."""
    descriptors = {other: link.descriptor for other, link in links[index].items()} if links else {}
    linked = DataParallelRank(rank=index, size=len(links), links=descriptors) if links else None

    def own() -> EngineConfig:
        common = config() if callable(config) else config
        return structs.replace(common, engine_rank=(common.engine_rank or 0) + index, data_parallel=linked)

    return own, list(descriptors.values())


def _started(
    start: Callable[..., CoreProcess],
    config: ConfigSource,
    inherited: list[int],
    given_up: threading.Event,
    failures: list[BaseException],
) -> CoreProcess:
    try:
        return start(config, inherited=inherited)
    except BaseException as error:
        failures.append(error)
        given_up.set()  # the others need not go on
        raise


@dataclass(slots=True)
class _Live:
    """A request, with what was passed on of its answer: the journal's own copy, its tokens included."""

    request: EngineCoreRequest
    engine: int = -1
    id_there: str = ""  # the caller's and the number of this stay
    num_unread: int = 0  # tokens of the prompt, until the first answer
    num_deaths: int = 0  # of ranks, that it was in


class DPLBAsyncMPClient:
    """As `AsyncMPClient`, of which it has one per rank."""

    def __init__(self, group: CoreGroup, routing: Routing = "load", *, by_priority: bool = False) -> None:
        """`by_priority`: so the ranks choose who gets a seat."""
        self._clients = [AsyncMPClient(process) for process in group.processes]
        self.num_engines = len(self._clients)
        self.max_model_len = group.ready.max_model_len
        self._routing: Routing = routing
        self._by_priority = by_priority
        self._alive = set(range(self.num_engines))
        self._live: dict[str, _Live] = {}
        self._stays = itertools.count()
        self._unread_tokens = [0] * self.num_engines
        self._num_requests = [0] * self.num_engines
        self._stats = [SchedulerStats() for _ in self._clients]
        self._heard_s = [0.0] * self.num_engines  # of each the last word, or since when it has had work
        self._turn = 0
        self._is_lockstep = group.is_lockstep
        self._latest_wave = -1  # whose start was passed on, in lock-step
        self._cause_of_death: str | None = None
        self._news: asyncio.Queue[tuple[int, EngineCoreOutputs | EngineDeadError]] = asyncio.Queue(MAX_UNREAD)
        self._readers = [
            asyncio.get_running_loop().create_task(_read(client, rank, self._news))
            for rank, client in enumerate(self._clients)
        ]

    @property
    def loads(self) -> list[EngineLoad]:
        return [EngineLoad(*load) for load in zip(self._unread_tokens, self._num_requests, strict=True)]

    # -- who runs what ---------------------------------------------------------------------------------------

    def _staying(self) -> set[int]:
        """Ranks that nobody has asked to end; where all were, those that still live."""
        return {rank for rank in self._alive if not self._clients[rank].is_leaving} or self._alive

    def _takers(self) -> set[int]:
        """Who gets what is new: of those who stay the ones that speak, if any does."""
        staying, long_ago_s = self._staying(), _now_s() - SILENT_S
        return {r for r in staying if not self._num_requests[r] or self._heard_s[r] > long_ago_s} or staying

    async def add_request(self, request: EngineCoreRequest) -> None:
        """A rank that is asked for has the request as long as it lives; then another has it.

        Raises `RequestError` for one that there is not, `EngineDeadError` once all have ended.
        """
        if request.data_parallel_rank is not None:
            engine_of(request.data_parallel_rank, range(self.num_engines))
        own = list(request.output_token_ids)
        await self._place(_Live(structs.replace(request, output_token_ids=own)), request.data_parallel_rank)

    async def _place(self, live: _Live, wanted: int | None) -> None:
        """Send it to the rank `wanted`, or if that is gone to whom the router chooses; raises
        `EngineDeadError` if nobody is left."""
        while True:
            engine = self._choose(live.request, wanted)
            live.id_there = f"{live.request.request_id}{STAY_MARK}{next(self._stays)}"
            try:
                sent = structs.replace(live.request, request_id=live.id_there)
                await self._clients[engine].add_request(sent)
            except EngineDeadError:  # the reader will say so too, and its requests are moved then
                self._alive.discard(engine)
                if not self._alive:
                    raise
            else:
                self._enter(live, engine)
                return

    def _choose(self, request: EngineCoreRequest, wanted: int | None) -> int:
        self._check_alive()
        if wanted in self._staying():
            return wanted
        self._turn += 1
        return pick_engine(self.loads, self._takers(), self._turn, request.prompt_token_ids, self._routing)

    async def _start_wave(self, number: int, except_for: int) -> None:
        if passes_on(self._latest_wave, number):
            self._latest_wave = number
            for engine in sorted(self._alive - {except_for}):
                await self._clients[engine].start_wave(number)

    def _enter(self, live: _Live, engine: int) -> None:
        self._live[live.request.request_id] = live
        live.engine, live.num_unread = engine, len(live.request.prompt_token_ids)
        self._unread_tokens[engine] += live.num_unread
        if not self._num_requests[engine]:
            self._heard_s[engine] = _now_s()
        self._num_requests[engine] += 1

    def _forget(self, request_id: str) -> _Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._unread_tokens[live.engine] -= live.num_unread
            self._num_requests[live.engine] -= 1
        return live

    async def abort_requests(self, request_ids: list[str]) -> None:
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (live := self._forget(request_id)) is not None:
                by_engine.setdefault(live.engine, []).append(live.id_there)
        for engine, ids in by_engine.items():
            await self._clients[engine].abort_requests(ids)

    async def call(self, command: Command) -> CommandResult:
        """Of all ranks: their statistics as one, else whether all say yes. Those that end, or have been asked
        to, are left out."""
        if self._is_lockstep and isinstance(command, Sleep):  # none may drop what another's steps need
            await self.call(PauseScheduler("abort", clear_cache=False))
        self._check_alive()
        ranks = sorted(self._staying())
        answers = await asyncio.gather(
            *(self._clients[rank].call(command) for rank in ranks), return_exceptions=True
        )
        of_rank = {rank: a for rank, a in zip(ranks, answers, strict=True) if not self._has_gone(rank, a)}
        for answer in of_rank.values() if of_rank else answers:
            if isinstance(answer, BaseException):
                raise answer
        for rank, answer in of_rank.items():
            if isinstance(answer, SchedulerStats):
                self._learn(rank, answer)
        if isinstance(command, GetStats):
            return self._total()
        if all(isinstance(answer, bool) for answer in of_rank.values()):
            return all(of_rank.values())
        return next(iter(of_rank.values()))

    def _has_gone(self, rank: int, answer: object) -> bool:
        is_refused = isinstance(answer, CommandFailed) and self._clients[rank].is_leaving
        return is_refused or isinstance(answer, EngineDeadError)

    # -- what the ranks say ----------------------------------------------------------------------------------

    async def get_output(self) -> EngineCoreOutputs:
        """The next news of any rank. Raises `EngineDeadError` once all have ended."""
        while True:
            if self._cause_of_death is not None:
                raise EngineDeadError(self._cause_of_death)
            engine, news = await self._news.get()
            if isinstance(news, EngineDeadError):
                if failed := await self._move_requests_of(engine, news):
                    return EngineCoreOutputs(outputs=failed)
                continue
            self._heard_s[engine] = _now_s()
            if news.start_wave is not None:
                await self._start_wave(news.start_wave, engine)
            if news.scheduler_stats is not None:
                self._learn(engine, news.scheduler_stats)
                news.scheduler_stats = self._total()
            news.outputs = [output for output in news.outputs if await self._note(output)]
            await self._rebalance()
            return news

    async def _note(self, output: EngineCoreOutput) -> bool:
        """Into the journal; False for what is not to be passed on: it is of a stay that is over, or its rank
        leaves and another goes on."""
        request_id, _, _ = output.request_id.rpartition(STAY_MARK)
        live = self._live.get(request_id)
        if live is None or live.id_there != output.request_id:
            return False
        is_aborted = output.finish_reason is FinishReason.ABORT
        if is_aborted and self._clients[live.engine].is_leaving and live.engine not in self._staying():
            self._forget(request_id)
            await self._place(live, None)
            return False
        output.request_id = request_id
        self._unread_tokens[live.engine] -= live.num_unread
        live.num_unread = 0
        live.request.output_token_ids.extend(output.new_token_ids)
        if output.finish_reason is not None:
            self._forget(request_id)
        return True

    async def _move_requests_of(self, engine: int, error: EngineDeadError) -> list[EngineCoreOutput]:
        """It has ended. Returns the ends of requests that shall end nobody else."""
        self._alive.discard(engine)
        self._stats[engine] = of_the_dead(self._stats[engine])
        if self._is_lockstep:  # the others wait for it in a collective, or will
            error = await self._first_cause(error)
            await asyncio.gather(*(self._clients[rank].shutdown() for rank in sorted(self._alive)))
            self._alive.clear()
        if not self._alive:
            if self._cause_of_death is None:
                logger.error("rank %d has ended (%s); no other is left", engine, error)
            self._die(str(error))
            return []
        orphans = [live for live in self._live.values() if live.engine == engine]
        logger.error(
            "rank %d has ended (%s); its %d requests go on in others: %s",
            engine, error, len(orphans), ", ".join(map(str, sorted(self._alive))),
        )  # fmt: skip
        failed = []
        for live in orphans:
            self._forget(live.request.request_id)
            live.num_deaths += not self._clients[engine].is_leaving
            if live.num_deaths < MOST_DEATHS:
                await self._place(live, None)
            else:
                cause = f"{live.num_deaths} engine cores have ended while they had it, the last one: {error}"
                failed.append(EngineCoreOutput(live.request.request_id, [], FinishReason.ERROR, error=cause))
        return failed

    async def _first_cause(self, error: EngineDeadError) -> EngineDeadError:
        """A rank in lock-step that has only lost a peer says so too, but it is the peer that knows why."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                while PeerGoneError.__name__ in str(error):
                    _, news = await self._news.get()
                    error = news if isinstance(news, EngineDeadError) else error
        return error

    async def _rebalance(self) -> None:
        """Who waits in one engine for a seat goes to another that has one free, the first in line first: no
        engine idles while requests wait elsewhere."""
        for move in moves(self._stats, self._num_requests, self._alive, self._takers()):
            for live in self._waiting_in(move.source)[: move.num_requests]:
                self._forget(live.request.request_id)
                await self._clients[move.source].abort_requests([live.id_there])
                await self._place(live, move.target)
                stats = self._stats[move.source]
                self._stats[move.source] = structs.replace(stats, num_waiting=stats.num_waiting - 1)

    def _waiting_in(self, engine: int) -> list[_Live]:
        """In their order: the last ones of those without an answer, for the first may be being read."""
        unanswered = [
            live
            for live in self._live.values()
            if live.engine == engine and live.num_unread and live.request.data_parallel_rank is None
        ]
        if self._by_priority:
            unanswered.sort(key=lambda live: (live.request.priority, live.request.arrival_time_s))
        return unanswered[max(0, len(unanswered) - self._stats[engine].num_waiting) :]

    def _learn(self, engine: int, stats: SchedulerStats) -> None:
        """Answers overtake news, and counters only grow."""
        if stats.num_steps >= self._stats[engine].num_steps:
            self._stats[engine] = stats if engine in self._alive else of_the_dead(stats)

    def _total(self) -> SchedulerStats:
        return total(self._stats, len(self._alive))

    # -- the end ---------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        await asyncio.gather(*(client.shutdown() for client in self._clients))
        self.close()

    def close(self) -> None:
        """`shutdown` at once, for cores whose processes have ended. Idempotent, also after a `shutdown`."""
        for client in self._clients:
            client.close()
        for reader in self._readers:
            reader.cancel()
        self._die("the engine was shut down")

    def _die(self, cause: str) -> None:
        self._cause_of_death = self._cause_of_death or cause
        self._alive.clear()

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDeadError(self._cause_of_death or "all engine cores have ended")


async def _read(
    client: AsyncMPClient, rank: int, news: asyncio.Queue[tuple[int, EngineCoreOutputs | EngineDeadError]]
) -> None:
    """It knows the client and the queue only, so that a `DPLBAsyncMPClient` that is dropped can be
    collected."""
    try:
        while True:
            await news.put((rank, await client.get_output()))
    except EngineDeadError as error:
        await news.put((rank, error))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def of_the_dead(last: SchedulerStats) -> SchedulerStats:
    """Nothing is in it any more; what it has done stays done, for counters only grow."""
    return structs.replace(last, num_running=0, num_waiting=0, num_parked=0, kv_cache_usage=0.0)


def total(stats: Sequence[SchedulerStats], num_alive: int) -> SchedulerStats:
    """Counters and numbers as sums, the share of blocks as the mean of those that live; and each of them."""
    numbers = set(SchedulerStats.__struct_fields__) - {"engines"}
    summed = SchedulerStats(**{name: sum(getattr(one, name) for one in stats) for name in numbers})
    summed.engines = tuple(stats)
    summed.kv_cache_usage /= max(1, num_alive)
    return summed
