"""Several engine cores as one: data parallelism.

Theory of operation.
- Each rank is a whole engine core in a process of its own. The front end chooses one for each request
  (`router.py`) and knows of every live request where it is; aborts go there.
- The journal is here: of each live request what it asked and the tokens that were passed on. When a rank
  dies, its requests go to others, with those tokens as output that is not said again; so nobody's answer
  loses a token or gets one twice, and greedy and seeded answers go on as they would have. Only the last
  rank's end is the end.
- A request that waits for a seat in one rank goes to another where one is free (`router.moves`).
- Ranks whose experts are spread over all step together (`lockstep.py`): then this client coordinates their
  waves, and the death of one is the end of all, for they wait for each other.
- Tasks move news from the ranks to one queue; all else happens in the caller's own calls, in their order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from mainspring.base.config import DataParallelRank, EngineConfig
from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import (
    Command,
    CommandResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    GetStats,
    SchedulerStats,
)
from mainspring.engine.launch import ConfigSource, CoreProcess
from mainspring.engine.lockstep import Belief, on_sending, on_wake_wish, on_wave_complete
from mainspring.engine.mp_client import AsyncMPClient
from mainspring.engine.proc import Ready
from mainspring.engine.router import EngineLoad, Routing, check_rank, moves, pick_engine
from mainspring.executor.links import Link, close_links, make_links

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_UNREAD = 64  # messages in the queue; then they stay with the ranks' clients


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
        start = partial(CoreProcess, shutdown_timeout_s=shutdown_timeout_s, given_up=given_up)
        links = make_links(len(configs)) if lockstep else []
        with ThreadPoolExecutor(len(configs), "mainspring-ranks") as threads:
            starting = [
                threads.submit(_started, start, *_linked(config, rank, links), given_up)
                for rank, config in enumerate(configs)
            ]
        close_links(links)
        errors = [error for future in starting if (error := future.exception()) is not None]
        self.processes = [future.result() for future in starting if future.exception() is None]
        if errors:
            self.close()
            raise next((error for error in errors if not isinstance(error, EngineDeadError)), errors[0])

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


def _linked(config: ConfigSource, rank: int, links: list[dict[int, Link]]) -> tuple[ConfigSource, list[int]]:
    """A rank's configuration with its links, and their descriptors; without links it stays as it is."""
    if not links:
        return config, []
    descriptors = {other: link.descriptor for other, link in links[rank].items()}
    ranks = DataParallelRank(rank=rank, size=len(links), links=descriptors)

    def with_links() -> EngineConfig:
        return structs.replace(config() if callable(config) else config, data_parallel=ranks)

    return with_links, list(descriptors.values())


def _started(
    start: Callable[..., CoreProcess],
    config: ConfigSource,
    inherited: list[int],
    given_up: threading.Event,
) -> CoreProcess:
    try:
        return start(config, inherited=inherited)
    except BaseException:
        given_up.set()  # the others need not go on
        raise


@dataclass(slots=True)
class _Live:
    """A request, with what was passed on of its answer."""

    request: EngineCoreRequest
    engine: int
    num_unread: int  # tokens of the prompt, until the first answer


class DPLBAsyncMPClient:
    """As `AsyncMPClient`, of which it has one per rank."""

    def __init__(self, group: CoreGroup, routing: Routing = "load") -> None:
        self._clients = [AsyncMPClient(process) for process in group.processes]
        self.num_engines = len(self._clients)
        self.max_model_len = group.ready.max_model_len
        self._routing: Routing = routing
        self._alive = set(range(len(self._clients)))
        self._live: dict[str, _Live] = {}
        self._unread_tokens = [0] * len(self._clients)
        self._num_requests = [0] * len(self._clients)
        self._stats = [SchedulerStats() for _ in self._clients]
        self._turn = 0
        self._is_lockstep = group.is_lockstep
        self._belief = Belief()  # in lock-step
        self._cause_of_death: str | None = None
        self._news: asyncio.Queue[tuple[int, EngineCoreOutputs | EngineDeadError]] = asyncio.Queue(MAX_UNREAD)
        self._readers = [
            asyncio.get_running_loop().create_task(_read(client, rank, self._news))
            for rank, client in enumerate(self._clients)
        ]

    @property
    def loads(self) -> list[EngineLoad]:
        return [EngineLoad(*load) for load in zip(self._unread_tokens, self._num_requests, strict=True)]

    async def add_request(self, request: EngineCoreRequest) -> None:
        """A rank that is asked for has the request as long as it lives; then another has it.

        Raises `RequestError` for one that there is not, `EngineDeadError` once all have ended.
        """
        check_rank(request.data_parallel_rank, self.num_engines)
        own = list(request.output_token_ids)  # the journal writes there
        await self._place(structs.replace(request, output_token_ids=own))

    async def _place(self, request: EngineCoreRequest) -> None:
        while True:
            self._check_alive()
            engine = self._choose(request)
            try:
                await self._start_others(engine, request)
                await self._clients[engine].add_request(request)
            except EngineDeadError:  # the reader will say so too, and its requests are moved then
                self._alive.discard(engine)
                continue
            self._enter(request, engine)
            return

    def _enter(self, request: EngineCoreRequest, engine: int) -> None:
        self._live[request.request_id] = _Live(request, engine, len(request.prompt_token_ids))
        self._unread_tokens[engine] += len(request.prompt_token_ids)
        self._num_requests[engine] += 1

    async def _start_others(self, engine: int, request: EngineCoreRequest) -> None:
        """Ranks in lock-step that sleep must wake for a request to one of them."""
        if self._is_lockstep:
            request.current_wave = self._belief.number
            self._belief, starts = on_sending(self._belief)
            if starts:
                await self._start_wave(request.current_wave, engine)

    async def _start_wave(self, number: int, except_for: int) -> None:
        for engine in sorted(self._alive - {except_for}):
            await self._clients[engine].start_wave(number)

    def _choose(self, request: EngineCoreRequest) -> int:
        """A rank that was asked for has it as long as it lives."""
        if request.data_parallel_rank in self._alive:
            return request.data_parallel_rank
        if not self._alive:
            raise EngineDeadError(self._cause_of_death or "all engine cores have ended")
        self._turn += 1
        return pick_engine(self.loads, self._alive, self._turn, request.prompt_token_ids, self._routing)

    async def abort_requests(self, request_ids: list[str]) -> None:
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (live := self._forget(request_id)) is not None:
                by_engine.setdefault(live.engine, []).append(request_id)
        for engine, ids in by_engine.items():
            await self._clients[engine].abort_requests(ids)

    async def call(self, command: Command) -> CommandResult:
        """Of all ranks: their statistics as one, else whether all say yes."""
        self._check_alive()
        ranks = sorted(self._alive)
        answers = await asyncio.gather(*(self._clients[rank].call(command) for rank in ranks))
        if isinstance(command, GetStats):
            for rank, stats in zip(ranks, answers, strict=True):
                self._stats[rank] = stats
            return total(self._stats)
        if all(isinstance(answer, bool) for answer in answers):
            return all(answers)
        return answers[0]

    async def get_output(self) -> EngineCoreOutputs:
        """The next news of any rank. Raises `EngineDeadError` once all have ended."""
        while True:
            self._check_alive()
            engine, news = await self._news.get()
            if isinstance(news, EngineDeadError):
                await self._move_requests_of(engine, news)
                continue
            if news.wave_complete is not None:
                self._belief = on_wave_complete(self._belief, news.wave_complete)
            if news.start_wave is not None:
                self._belief, starts = on_wake_wish(self._belief, news.start_wave)
                if starts:
                    await self._start_wave(news.start_wave, engine)
            if news.scheduler_stats is not None:
                self._stats[engine] = news.scheduler_stats
                news.scheduler_stats = total(self._stats)
            news.outputs = [output for output in news.outputs if self._note(output, engine)]
            await self._rebalance()
            return news

    async def shutdown(self) -> None:
        await asyncio.gather(*(client.shutdown() for client in self._clients))
        for reader in self._readers:
            reader.cancel()
        self._die("the engine was shut down")

    def _note(self, output: EngineCoreOutput, engine: int) -> bool:
        """Into the journal; False for one that is not, or no longer, this rank's to answer."""
        live = self._live.get(output.request_id)
        if live is None:
            return output.finish_reason is not None
        if live.engine != engine:
            return False
        self._unread_tokens[engine] -= live.num_unread
        live.num_unread = 0
        live.request.output_token_ids.extend(output.new_token_ids)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        return True

    def _forget(self, request_id: str) -> _Live | None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._unread_tokens[live.engine] -= live.num_unread
            self._num_requests[live.engine] -= 1
        return live

    async def _move_requests_of(self, engine: int, error: EngineDeadError) -> None:
        self._alive.discard(engine)
        self._stats[engine] = of_the_dead(self._stats[engine])
        orphans = [live.request for live in self._live.values() if live.engine == engine]
        if self._is_lockstep:  # the others wait for it in a collective, or will
            await asyncio.gather(*(self._clients[rank].shutdown() for rank in sorted(self._alive)))
            self._alive.clear()
        if not self._alive:
            self._die(str(error))
            return
        logger.error(
            "rank %d has ended (%s); its %d requests go on in others: %s",
            engine, error, len(orphans), ", ".join(map(str, sorted(self._alive))),
        )  # fmt: skip
        for request in orphans:
            self._forget(request.request_id)
            await self._place(request)

    async def _rebalance(self) -> None:
        """Who waits in one engine for a seat goes to another that has one free, the longest waiting first: no
        engine idles while requests wait elsewhere."""
        for move in moves(self._stats, self._num_requests, self._alive):
            unanswered = [
                live.request
                for live in self._live.values()
                if live.engine == move.source and live.num_unread and live.request.data_parallel_rank is None
            ]
            waiting = unanswered[max(0, len(unanswered) - self._stats[move.source].num_waiting) :]
            for request in waiting[: move.num_requests]:
                self._forget(request.request_id)
                await self._clients[move.source].abort_requests([request.request_id])
                await self._start_others(move.target, request)
                await self._clients[move.target].add_request(request)
                self._enter(request, move.target)
                self._stats[move.source].num_waiting -= 1

    def _die(self, cause: str) -> None:
        self._cause_of_death = self._cause_of_death or cause
        self._alive.clear()

    def _check_alive(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)


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


def of_the_dead(last: SchedulerStats) -> SchedulerStats:
    """Nothing is in it any more; what it has done stays done, for counters only grow."""
    return structs.replace(last, num_running=0, num_waiting=0, num_parked=0, kv_cache_usage=0.0)


def total(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Counters and numbers as sums, the share of blocks as the mean; and each of them."""
    numbers = set(SchedulerStats.__struct_fields__) - {"engines"}
    summed = SchedulerStats(**{name: sum(getattr(one, name) for one in stats) for name in numbers})
    summed.engines = tuple(stats)
    summed.kv_cache_usage /= max(1, len(stats))
    return summed
