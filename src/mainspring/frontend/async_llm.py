"""The engine as an event loop sees it: one stream per request, one task that feeds them all.

Rules.
1. Every stream ends exactly once: with an output that is finished, or with an exception. Nothing waits for
   ever: when the core or the task that reads it ends, in whatever way, every stream gets `EngineDeadError`
   with the innermost cause, and every later call raises it.
2. A stream holds one item. What comes while its reader sleeps is merged into it, so a slow reader costs the
   memory of its answer, and delays nobody.
3. A request lives as long as its generator: leaving it, in whatever way, is an abort.
4. The caller's id is a label. Inside, a request goes by its *key*, the id of its first sequence in the core,
   which is unique; so the same label may be in use more than once, and an abort by it ends all.
5. The output handler knows the client and the streams, not the `AsyncLLM`: one that is dropped without
   `shutdown` is collected, and takes the core's process with it.

Everything but the construction happens on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args

from mainspring.base.config import EngineArgs, EngineConfig, ModelFacts
from mainspring.base.errors import EngineDeadError, EngineError, QueueOverflowError, RequestError, innermost
from mainspring.base.log import get_logger
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    GetStats,
    IsPaused,
    IsSleeping,
    PauseMode,
    PauseScheduler,
    PrepareGrammars,
    Profile,
    ResetPrefixCache,
    ResumeScheduler,
    SchedulerStats,
    Sleep,
    WakeUp,
)
from mainspring.base.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from mainspring.base.params import PoolingParams, RequestOutputKind, SamplingParams
from mainspring.frontend.input_processor import InputProcessor, Prompt
from mainspring.frontend.llm_engine import make_processors, start_core
from mainspring.frontend.metrics import LoggingStatLogger, StatLogger, log_regularly
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.frontend.pooling import as_pooling

if TYPE_CHECKING:
    from mainspring.engine.client import CacheFacts
    from mainspring.frontend.stats import FinishedRequest, FrontendStats
    from mainspring.frontend.tokenizer import Tokenizer

logger = get_logger(__name__)

# Outputs processed before others on the loop get their turn: some 4 ms. Where messages wait, several are
# processed in one turn, and streams merge them (rule 2): fewer writes for as many tokens, so it catches up.
SLICE = 1024
SHUT_DOWN = "the engine was shut down"

T = TypeVar("T")


class AsyncClient(Protocol):
    """What is asked of a core; `AsyncMPClient` fits. After its end every method but `abort_requests` and
    `shutdown` raises `EngineDeadError`."""

    async def add_request(self, request: EngineCoreRequest) -> None: ...

    async def abort_requests(self, request_ids: list[str]) -> None: ...

    async def call(self, command: Command) -> CommandResult: ...

    async def get_output(self) -> EngineCoreOutputs: ...

    async def shutdown(self) -> None: ...


def _ways_to_start(
    args: EngineArgs, given_up: threading.Event | None
) -> tuple[Callable[[Callable[[], EngineConfig]], Any], Callable[[Any], AsyncClient]]:
    """How to start a core, or one per data-parallel rank, and how to make its client, on a loop."""
    from mainspring.engine.launch import CoreProcess
    from mainspring.engine.mp_client import AsyncMPClient

    timeout_s = args.shutdown_timeout
    if len(args.local_ranks) == 1:
        return partial(CoreProcess, shutdown_timeout_s=timeout_s, given_up=given_up), AsyncMPClient
    from mainspring.engine.dp_client import CoreGroup, DPLBAsyncMPClient

    start = partial(
        CoreGroup.of_alike,
        size=len(args.local_ranks),
        shutdown_timeout_s=timeout_s,
        given_up=given_up,
        lockstep=args.enable_expert_parallel,
    )
    return start, partial(
        DPLBAsyncMPClient,
        routing=args.data_parallel_routing,
        by_priority=args.scheduling_policy == "priority",
    )


# -- one request ---------------------------------------------------------------------------------------------


def merge(older: RequestOutput, newer: RequestOutput, kind: RequestOutputKind) -> RequestOutput:
    """What a caller who missed `older` is to read instead of `newer`. Both are used up."""
    answers = {answer.index: answer for answer in older.outputs}
    for answer in newer.outputs:
        before = answers.get(answer.index)
        if before is not None and kind == RequestOutputKind.DELTA:
            answer = _joined(before, answer)
        answers[answer.index] = answer
    newer.outputs = [answers[index] for index in sorted(answers)]
    if newer.prompt_logprobs is None:
        newer.prompt_logprobs = older.prompt_logprobs  # DELTA says them once
    return newer


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    """Two consecutive pieces of one answer. How it stands is what the second says."""
    second.text = first.text + second.text
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    if second.cumulative_logprob is None:
        second.cumulative_logprob = first.cumulative_logprob
    return second


class _Stream:
    """From the output handler to one reader: at most one item, see rule 2."""

    __slots__ = ("_arrived", "_item", "internal_ids", "is_live", "key", "kind", "request_id")

    def __init__(self, request_id: str, requests: list[EngineCoreRequest]) -> None:
        self.request_id = request_id  # the caller's
        self.key = requests[0].request_id
        self.internal_ids = [request.request_id for request in requests]
        self.kind = requests[0].sampling_params.output_kind
        self.is_live = True  # its last item has not been put
        self._item: RequestOutput | BaseException | None = None
        self._arrived = asyncio.Event()

    def put(self, item: RequestOutput | BaseException) -> None:
        if isinstance(item, BaseException):
            self.is_live = False
        else:
            item.request_id = self.request_id
            self.is_live = not item.finished
            if isinstance(self._item, RequestOutput):
                item = merge(self._item, item, self.kind)
        self._item = item
        self._arrived.set()

    async def get(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        item, self._item = self._item, None
        if isinstance(item, BaseException):
            raise item
        assert item is not None
        return item


class _Admission:
    """Sequences that wait for their first token, and how many may. All of it in constant time."""

    def __init__(
        self, max_num_reqs: int | None, max_num_tokens: int | None, stats: FrontendStats | None
    ) -> None:
        self._max_num_reqs = max_num_reqs
        self._max_num_tokens = max_num_tokens
        self._stats = stats
        self._waiting: dict[str, int] = {}  # internal id -> tokens of its prompt
        self._num_tokens = 0

    def judge(self, num_reqs: int, num_tokens: int) -> None:
        """Raises `QueueOverflowError`. Whoever finds nobody waiting may enter, whatever the size: refused, it
        would be refused for ever."""
        if not self._waiting:
            return
        for name, limit, what, now, more in (
            ("max_num_queued_reqs", self._max_num_reqs, "requests", len(self._waiting), num_reqs),
            ("max_num_queued_tokens", self._max_num_tokens, "prompt tokens", self._num_tokens, num_tokens),
        ):
            if limit is not None and now + more > limit:
                if self._stats is not None:
                    self._stats.rejected(name)
                raise QueueOverflowError(
                    f"{now} {what} wait for their first token, {more} more would exceed {name} {limit}: "
                    f"try again later, or raise {name}"
                )

    def enter(self, requests: Iterable[EngineCoreRequest]) -> None:
        for request in requests:
            self._waiting[request.request_id] = len(request.prompt_token_ids)
            self._num_tokens += len(request.prompt_token_ids)

    def leave(self, internal_id: str) -> None:
        self._num_tokens -= self._waiting.pop(internal_id, 0)


# -- all requests --------------------------------------------------------------------------------------------


class _Streams:
    """What is live, for `AsyncLLM` who opens and the output handler who feeds."""

    def __init__(self, output_processor: OutputProcessor, admission: _Admission) -> None:
        self.admission = admission
        self.cause_of_death: str | None = None  # of a death; a shutdown is none
        self.is_shut_down = False
        self.drained = asyncio.Event()
        self.drained.set()
        self._output_processor = output_processor
        self._by_key: dict[str, _Stream] = {}

    def check_alive(self) -> None:
        if self.is_shut_down or self.cause_of_death is not None:
            raise EngineDeadError(self.cause_of_death or SHUT_DOWN)

    @property
    def num_live(self) -> int:
        return len(self._by_key)

    @property
    def stats(self) -> FrontendStats | None:
        return self._output_processor.stats

    def open(
        self,
        request_id: str,
        prompt: str | None,
        requests: list[EngineCoreRequest],
        trace_headers: Mapping[str, str] | None = None,
    ) -> _Stream:
        stream = _Stream(request_id, requests)
        self.admission.enter(requests)
        self._output_processor.add_request(stream.key, prompt, requests, request_id, trace_headers)
        self._by_key[stream.key] = stream
        self.drained.clear()
        return stream

    def take(self, outputs: list[EngineCoreOutput], timestamp_s: float = 0.0) -> list[str]:
        """News from the core, to the streams. Returns the internal ids that ended here and not there.
        `timestamp_s`: see `OutputProcessor.process_outputs`."""
        for output in outputs:
            if output.new_token_ids or output.finish_reason is not None:
                self.admission.leave(output.request_id)
        processed = self._output_processor.process_outputs(outputs, timestamp_s)
        for given in processed.request_outputs:
            stream = self._by_key[given.request_id]
            stream.put(given)
            if not stream.is_live:
                self._remove(stream)
        return processed.ids_to_abort

    def close(self, stream: _Stream) -> list[str]:
        """Its reader has left. Returns the internal ids that are still live."""
        if not stream.is_live:
            return []
        stream.is_live = False
        self._remove(stream)
        return self._output_processor.abort_requests([stream.key])

    def abort(self, request_ids: Iterable[str] | None) -> list[str]:
        """End the streams under these ids of callers (None: all) with finish reason abort. Returns the
        internal ids that may be live in the core."""
        wanted = None if request_ids is None else set(request_ids)
        found = [s for s in self._by_key.values() if wanted is None or s.request_id in wanted]
        internal_ids = [internal_id for stream in found for internal_id in stream.internal_ids]
        self.take([EngineCoreOutput(internal_id, [], FinishReason.ABORT) for internal_id in internal_ids])
        return internal_ids

    def die(self, cause: str) -> None:
        """The first cause stays."""
        if not self.is_shut_down and self.cause_of_death is None:
            self.cause_of_death = cause
        self._output_processor.forget_all()
        for stream in list(self._by_key.values()):
            self._remove(stream)
            stream.put(EngineDeadError(cause))

    def _remove(self, stream: _Stream) -> None:
        del self._by_key[stream.key]
        for internal_id in stream.internal_ids:
            self.admission.leave(internal_id)
        if not self._by_key:
            self.drained.set()


async def _handle_outputs(
    client: AsyncClient, streams: _Streams, stat_loggers: Sequence[StatLogger] = ()
) -> None:
    """The only reader of `client`, until one of them ends."""
    cause: str | None = "the task that reads the engine core's outputs was cancelled"
    logging = None
    num_taken = 0  # since others had their turn
    if streams.stats is not None:
        logging = _background_task(log_regularly(streams.stats, stat_loggers), "mainspring-stats")
    try:
        while True:
            news = await client.get_output()
            for start in range(0, len(news.outputs), SLICE):
                some = news.outputs[start : start + SLICE]
                if ids := streams.take(some, news.timestamp_s):
                    await client.abort_requests(ids)
                num_taken += len(some)
                if num_taken >= SLICE:
                    num_taken = 0
                    await asyncio.sleep(0)
            if streams.stats is not None:
                streams.stats.message_read(news.scheduler_stats)
    except EngineDeadError as error:
        cause = str(error)
    except Exception as error:
        logger.exception("the outputs of the engine core cannot be handled")
        cause = f"the output handler has failed: {innermost(error)}"
    except GeneratorExit:  # the loop was dropped and will not run again: nobody can be told
        cause = None
        raise
    finally:
        if cause is not None:
            streams.die(cause)
            if logging is not None:
                logging.cancel()
    await client.shutdown()  # nobody will read it again


def _background_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work, name=name)
    # If its loop is dropped instead of closed, the task ends with it, and that is not worth a traceback.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


class RequestStream:
    """The answer to one request as it comes, for one reader: `async for output in stream`, until an output is
    finished. Closing it before that is an abort; after that it does nothing."""

    __slots__ = ("_client", "_is_over", "_stream", "_streams")

    def __init__(self, client: AsyncClient, streams: _Streams, stream: _Stream) -> None:
        self._client = client
        self._streams = streams
        self._stream = stream
        self._is_over = False  # its last item was read

    @property
    def is_live(self) -> bool:
        """Something may still come of it from the core."""
        return self._stream.is_live

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises `EngineDeadError` when the core has ended."""
        if self._is_over:
            raise StopAsyncIteration
        output = await self._stream.get()
        self._is_over = output.finished
        return output

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Idempotent."""
        if internal_ids := self._streams.close(self._stream):
            await self._client.abort_requests(internal_ids)


# -- the engine ----------------------------------------------------------------------------------------------


class AsyncLLM:
    """A model that answers many at once: `async for output in llm.generate(prompt, params, request_id)`.

    May be made without a running event loop, or in another thread; it belongs to the loop of its first use.
    Use it as an async context manager, or call `shutdown`.
    """

    def __init__(
        self,
        attach: Callable[[], AsyncClient],
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        tokenizer: Tokenizer | None = None,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        shutdown_timeout_s: float = 0.0,
        release: Callable[[], None] = lambda: None,
        stat_loggers: Sequence[StatLogger] | None = None,
        cache_facts: CacheFacts | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        ranks: range = range(1),
    ) -> None:
        """`attach` makes the client of a core that runs already; it is called on the loop. `release` ends
        what stands behind it, at the latest when this object is collected; neither may refer to it.
        `stat_loggers` are asked to log if `output_processor` keeps statistics; by default one that writes a
        line. `sampling_defaults` are the model's own, by the names of `SamplingParams`. `ranks`: of the
        data-parallel engines behind the client, among all that there are."""
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults or {}
        self.cache_facts = cache_facts
        self._output_processor = output_processor
        self._stat_loggers = (LoggingStatLogger(),) if stat_loggers is None else stat_loggers
        self._attach = attach
        self._input_processor = input_processor
        admission = _Admission(max_num_queued_reqs, max_num_queued_tokens, output_processor.stats)
        self._streams = _Streams(output_processor, admission)
        self._shutdown_timeout_s = shutdown_timeout_s
        self._client: AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._output_handler: asyncio.Task[None] | None = None
        self._release = weakref.finalize(self, release)

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        stat_loggers: Sequence[StatLogger] | None = None,
        given_up: threading.Event | None = None,
    ) -> AsyncLLM:
        """Find the model, decide the settings, start the core in a process of its own; returns once it can
        serve. Where a loop must go on meanwhile there is `launch`.

        Requests get `args.shutdown_timeout` seconds to finish in `shutdown`. Raises `CheckpointError` for a
        model that is not there or not sound, `ConfigError` for settings, `EngineDeadError` if the core ends
        meanwhile or another thread sets `given_up`.
        """
        start, make_client = _ways_to_start(args, given_up)
        process, facts, tokenizer, defaults = start_core(args, start)
        return cls(
            partial(make_client, process),
            *make_processors(args, facts, tokenizer, process.ready.max_model_len),
            tokenizer,
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
            shutdown_timeout_s=args.shutdown_timeout,
            release=process.close,
            stat_loggers=stat_loggers,
            cache_facts=process.ready.cache_facts,
            sampling_defaults=defaults,
            ranks=args.local_ranks,
        )

    @classmethod
    async def launch(cls, args: EngineArgs, *, stat_loggers: Sequence[StatLogger] | None = None) -> AsyncLLM:
        """`from_engine_args` for a loop, which goes on meanwhile; cancelled, it gives the start up."""
        given_up = threading.Event()
        make = partial(cls.from_engine_args, args, stat_loggers=stat_loggers, given_up=given_up)
        try:
            return await asyncio.to_thread(make)
        except asyncio.CancelledError:
            given_up.set()  # or the interpreter's end would wait for the thread
            raise

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the advice of the model's makers; a new object each time."""
        return SamplingParams(**self.sampling_defaults)

    # --- requests -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue `prompt`. Yields what `sampling_params.output_kind` says until an output is finished; what
        a slow reader misses is merged into what it reads next.

        Leaving the iteration (closing the generator, cancelling its task) aborts the request. Raises
        `RequestError` for what can never be served, `QueueOverflowError` for what cannot be served now (in
        both cases nothing was added), `EngineDeadError` when the core has ended. `trace_headers`: of W3C's
        Trace Context, if a trace is to be continued.
        """
        stream = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            data_parallel_rank=data_parallel_rank,
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
    ) -> RequestStream:
        """`generate` in two steps, for callers who must know that a request was accepted before its first
        output is there. Raises as it does; the stream must be closed."""
        client = self._attached()
        if data_parallel_rank is not None:
            from mainspring.engine.router import engine_of

            data_parallel_rank = engine_of(data_parallel_rank, self.ranks)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        self._streams.admission.judge(1, 1)  # before the text is read: it may be long
        await self._input_processor.check_structure(params)
        text, requests = self._input_processor.process(request_id, prompt, params, priority, cache_salt)
        self._streams.admission.judge(len(requests), sum(len(r.prompt_token_ids) for r in requests))
        for request in requests:
            request.data_parallel_rank = data_parallel_rank
        opened = self._streams.open(request_id, text, requests, trace_headers)
        stream = RequestStream(client, self._streams, opened)
        try:
            for request in requests:
                if stream.is_live:  # it may be aborted while one is sent
                    await client.add_request(request)
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Read `prompt` and yield, once, what `pooling_params.task` gives. Otherwise as `generate`."""
        if not isinstance(pooling_params, PoolingParams):
            raise RequestError(
                f"pooling_params must be PoolingParams, got {type(pooling_params).__name__}", "pooling_params"
            )
        stream = await self.add_request(
            request_id,
            prompt,
            pooling_params,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
        )
        try:
            async for output in stream:
                yield as_pooling(output)
        finally:
            await stream.aclose()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request under this id, or these; its reader gets a last output with finish reason abort.

        Ids that are not live are passed over.
        """
        ids = [request_id] if isinstance(request_id, str) else request_id
        if (internal_ids := self._streams.abort(ids)) and self._client is not None:
            await self._client.abort_requests(internal_ids)

    async def wait_for_requests_to_drain(self, timeout_s: float | None = None) -> None:
        """Returns when no request is live. Raises `TimeoutError` if one still is after `timeout_s` seconds,
        `EngineDeadError` if the core has ended instead."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._streams.drained.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{self._streams.num_live} requests are not finished after {timeout_s} s"
            ) from None
        if self._streams.cause_of_death is not None:
            raise EngineDeadError(self._streams.cause_of_death)

    # --- the core -------------------------------------------------------------------------------------------

    async def call(self, command: Command) -> CommandResult:
        """What the core answers. Raises what the command raised there."""
        return await self._attached().call(command)

    async def check_health(self, timeout_s: float | None = None) -> None:
        """A round trip through the core and every worker. Raises `EngineDeadError` if there is none to make,
        or if it takes longer than `timeout_s` seconds; a core that was only slow or stopped may still go on.
        """
        try:
            async with asyncio.timeout(timeout_s):
                is_healthy = await self.call(CheckHealth())
        except TimeoutError:
            raise EngineDeadError(f"the engine core does not answer within {timeout_s} s") from None
        if not is_healthy:
            raise EngineDeadError("a worker of the engine core is not healthy")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `ResetPrefixCache`; False, and no change, while requests run."""
        return bool(await self.call(ResetPrefixCache(reset_running_requests)))

    async def get_stats(self) -> SchedulerStats:
        """Gauges of now and counters since the start."""
        stats: SchedulerStats = await self.call(GetStats())
        if self.stats is not None:
            self.stats.scheduler = stats
        return stats

    @property
    def stats(self) -> FrontendStats | None:
        """What happened to the requests of this front end; None with `disable_log_stats`. Its `scheduler` is
        what was heard last: `get_stats` brings it up to now."""
        return self._streams.stats

    def on_finished(self, observe: Callable[[FinishedRequest], None]) -> None:
        """`observe` is called at the end of each request from now on, if there are `stats`: see
        `tracing.py`."""
        self._output_processor.on_finished = observe

    async def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = False) -> None:
        """See `PauseScheduler`. Returns when nothing runs any more."""
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode {mode!r} must be one of {', '.join(get_args(PauseMode))}", "mode")
        await self.call(PauseScheduler(mode, clear_cache))

    async def resume_generation(self) -> None:
        await self.call(ResumeScheduler())

    async def is_paused(self) -> bool:
        return bool(await self.call(IsPaused()))

    async def sleep(self, level: int = 1) -> None:
        """See `Sleep`. Live requests end with finish reason abort."""
        await self.call(Sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See `WakeUp`."""
        await self.call(WakeUp(tags))

    async def is_sleeping(self) -> bool:
        return bool(await self.call(IsSleeping()))

    async def prepare_structured_outputs(self) -> bool:
        """Build what they need beforehand, so that the first of them delays nobody: see `PrepareGrammars`.
        For servers, before they say that they are ready."""
        return bool(await self.call(PrepareGrammars()))

    async def start_profile(self) -> None:
        """See `Profile`."""
        await self.call(Profile(True))

    async def stop_profile(self) -> str:
        """Returns the path of the profile, a file of the core's machine."""
        return str(await self.call(Profile(False)))

    # --- life and death -------------------------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        return self._input_processor.facts

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together, as fitted to memory."""
        return self._input_processor.max_model_len

    @property
    def is_running(self) -> bool:
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Shut down or dead."""
        return self._streams.is_shut_down or self.errored

    @property
    def errored(self) -> bool:
        """Dead, and nobody asked for it."""
        return self._streams.cause_of_death is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What calls raise, if `errored`."""
        cause = self._streams.cause_of_death
        return None if cause is None else EngineDeadError(cause)

    async def shutdown(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, give live ones so much time (None: what was set for it), end the others with
        finish reason abort, and the core. Idempotent."""
        self._streams.is_shut_down = True
        if self._client is not None and self._loop is asyncio.get_running_loop():
            assert self._output_handler is not None
            timeout_s = self._shutdown_timeout_s if timeout_s is None else timeout_s
            if timeout_s > 0:
                with contextlib.suppress(TimeoutError, EngineDeadError):
                    await self.wait_for_requests_to_drain(timeout_s)
            self._streams.abort(None)
            self._output_handler.cancel()
            await asyncio.gather(self._output_handler, return_exceptions=True)
            await self._client.shutdown()
        await asyncio.to_thread(self._release)

    async def __aenter__(self) -> AsyncLLM:
        self._attached()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    def _attached(self) -> AsyncClient:
        """The client; made at the first call, with the task that reads it."""
        self._streams.check_alive()
        loop = asyncio.get_running_loop()
        if self._client is None:
            self._loop, self._client = loop, self._attach()
            self._output_handler = _background_task(
                _handle_outputs(self._client, self._streams, self._stat_loggers), "mainspring-output-handler"
            )
        elif self._loop is not loop:
            raise EngineError(
                "this AsyncLLM belongs to another event loop, that of its first use; make another"
            )
        return self._client
