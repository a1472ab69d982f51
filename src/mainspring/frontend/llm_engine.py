"""The engine as a synchronous caller sees it: add requests, step, read what came.

One `step` asks the core for the outputs of one of its steps, turns them into text and tells the core which
requests ended here (stop strings, faults). In process that runs the core; with a core elsewhere it waits
for it. Nothing here knows which.

Request ids are the caller's. An id may be in use more than once: each use gets its own answer, and an abort
ends all.

When the core dies every live request is forgotten and the error goes to whoever is stepping; from then on
each call raises it again, so nobody waits for an engine that is not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from mainspring.base.config import EngineArgs, EngineConfig, ModelFacts, Vocabulary, judge, resolve
from mainspring.base.errors import ConfigError, EngineDeadError, innermost
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    FinishReason,
    GetStats,
    IsSleeping,
    ResetPrefixCache,
    SchedulerStats,
    Sleep,
    WakeUp,
)
from mainspring.base.outputs import RequestOutput
from mainspring.base.params import PoolingParams, SamplingParams
from mainspring.base.protocols import Clock
from mainspring.frontend.input_processor import InputProcessor, Prompt
from mainspring.frontend.metrics import LoggingStatLogger, Metric, MetricsOptions, collect
from mainspring.frontend.output_processor import OutputProcessor

if TYPE_CHECKING:
    from mainspring.engine.client import EngineCoreClient
    from mainspring.frontend.stats import FrontendStats
    from mainspring.frontend.tokenizer import Tokenizer

Core = TypeVar("Core")


class Prepared(NamedTuple):
    """What is decided before a core is there."""

    facts: ModelFacts
    config: EngineConfig
    sampling_defaults: Mapping[str, Any] = {}  # the model's own, by the names of `SamplingParams`


class Started(NamedTuple, Generic[Core]):
    """A core, and what a front end must know of its model."""

    core: Core
    facts: ModelFacts
    tokenizer: Tokenizer | None
    sampling_defaults: Mapping[str, Any]


def prepare(args: EngineArgs) -> Prepared:
    """Find the model, fetching it if need be, and decide the settings.

    Raises `CheckpointError` for a model that is not there or not sound, `ConfigError` for settings.
    """
    from mainspring.checkpoint.description import config_facts, describe
    from mainspring.checkpoint.hf_config import is_config, read_config
    from mainspring.checkpoint.opening import open_checkpoint

    judge(args)
    if args.load_format == "dummy" and is_config(args.model):
        if not args.skip_tokenizer_init:
            raise ConfigError("a config has no tokenizer: set skip_tokenizer_init and give token ids")
        facts = config_facts(args.model, read_config(args.model))
        return Prepared(facts, resolve(args, facts))
    with open_checkpoint(_fetched(args)) as checkpoint:
        facts, defaults = describe(checkpoint)
    return Prepared(facts, resolve(args, facts), defaults)


def _fetched(args: EngineArgs) -> Path:
    """Where the model is, once it is there."""
    from mainspring.checkpoint.catalog import resolve_model

    folder = None if args.download_dir is None else Path(args.download_dir)
    return resolve_model(
        args.model, fetch=True, cache_dir=folder, revision=args.revision, token=args.hf_token
    )


def start_core(args: EngineArgs, start: Callable[[Callable[[], EngineConfig]], Core]) -> Started[Core]:
    """`prepare`, and `start` a core. It is given a function for the settings, which builds the tokenizer, for
    its vocabulary is among them; meanwhile a core in a process of its own is imported.

    Raises as `prepare` and `start` do.
    """
    from mainspring.checkpoint.opening import open_checkpoint
    from mainspring.frontend.tokenizer import Tokenizer

    facts, config, defaults = prepare(args)
    tokenizer: Tokenizer | None = None

    def settings() -> EngineConfig:
        nonlocal tokenizer
        if not args.skip_tokenizer_init:
            with open_checkpoint(facts.path) as checkpoint:
                tokenizer = Tokenizer.from_checkpoint(checkpoint)
        return replace(config, vocabulary=_vocabulary(tokenizer, facts))

    return Started(start(settings), facts, tokenizer, defaults)


def _start_client(args: EngineArgs, config: Callable[[], EngineConfig]) -> EngineCoreClient:
    """One core, here or in a process of its own, or one for each data-parallel rank."""
    in_process = args.in_process or os.name != "posix"  # elsewhere the sockets have no place of their own
    if len(args.local_ranks) == 1:
        from mainspring.engine.client import EngineCoreClient

        return EngineCoreClient.make_client(
            config, in_process=in_process, shutdown_timeout_s=args.shutdown_timeout
        )
    if in_process:
        raise ConfigError(
            f"data_parallel_size {len(args.local_ranks)} needs a process for each engine: leave out "
            "in_process, or leave it at 1"
        )
    from mainspring.engine.dp_client import CoreGroup
    from mainspring.engine.sync_dp_client import SyncDPClient

    group = CoreGroup.of_alike(
        config,
        len(args.local_ranks),
        shutdown_timeout_s=args.shutdown_timeout,
        lockstep=args.enable_expert_parallel,
    )
    by_priority = args.scheduling_policy == "priority"
    return SyncDPClient(group, args.data_parallel_routing, by_priority=by_priority)


def _vocabulary(tokenizer: Tokenizer | None, facts: ModelFacts) -> Vocabulary | None:
    """None where there can be no structured outputs: without a tokenizer, or a token that ends a text."""
    if tokenizer is None or not facts.eos_token_ids:
        return None
    return Vocabulary(tokenizer.all_token_bytes(), sorted(tokenizer.special_ids), list(facts.eos_token_ids))


def make_processors(
    args: EngineArgs,
    facts: ModelFacts,
    tokenizer: Tokenizer | None,
    max_model_len: int,
    clock: Clock = time.monotonic,
) -> tuple[InputProcessor, OutputProcessor]:
    """The two sides of a front end, for a core that serves up to `max_model_len`."""
    inputs = InputProcessor(
        facts,
        max_model_len,
        tokenizer,
        max_logprobs=args.max_logprobs,
        seed=args.seed,
        clock=clock,
    )
    return inputs, OutputProcessor(tokenizer, clock=clock, log_stats=not args.disable_log_stats)


class LLMEngine:
    """A client of the core and the two processors around it. Use it from one thread at a time."""

    def __init__(
        self,
        client: EngineCoreClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        tokenizer: Tokenizer | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """sampling_defaults: the model's own, by the names of `SamplingParams`."""
        self.client = client
        self.tokenizer = tokenizer
        self.facts = input_processor.facts
        self._sampling_defaults = sampling_defaults or {}
        self.model_name = ""  # as metrics show it
        self._input_processor = input_processor
        self._output_processor = output_processor
        self._stat_logger = LoggingStatLogger()
        self._cause_of_death: str | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs, clock: Clock = time.monotonic) -> LLMEngine:
        """Find the model, decide the settings, start the core.

        Raises `CheckpointError` for a model that is not there or not sound, `ConfigError` for settings.
        """
        client, facts, tokenizer, defaults = start_core(args, partial(_start_client, args))
        processors = make_processors(args, facts, tokenizer, client.max_model_len, clock)
        engine = cls(client, *processors, tokenizer, defaults)
        engine.model_name = args.served_model_name or args.model
        return engine

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together, as fitted to memory."""
        return self.client.max_model_len

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Raises `RequestError` for what can never be served; then nothing was added."""
        self._raise_if_dead()
        text, requests = self._input_processor.process(
            request_id,
            prompt,
            self.get_default_sampling_params() if params is None else params,
            priority,
            cache_salt,
        )
        self._output_processor.add_request(request_id, text, requests)
        try:
            for request in requests:
                self.client.add_request(request)
        except BaseException:
            self.abort_request(request_id)
            raise

    def judge_length(self, text: str) -> None:
        """Raises `RequestError` for a prompt that is far too long, before it is cut into tokens."""
        self._input_processor.judge_length(text)

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where none are given: the advice of the model's makers; a new object each time."""
        return SamplingParams(**self._sampling_defaults)

    def step(self) -> list[RequestOutput]:
        """What became known in one step of the core; may be empty.

        Raises `EngineDeadError` with the innermost cause when the core has failed.
        """
        self._raise_if_dead()
        try:
            outputs = self.client.get_output()
        except EngineDeadError as error:
            self._die(str(error))
            raise
        except Exception as error:
            self._die(cause := f"the engine core has failed: {innermost(error)}")
            raise EngineDeadError(cause) from error
        processed = self._output_processor.process_outputs(outputs.outputs, outputs.timestamp_s)
        if self.stats is not None:
            self.stats.message_read(outputs.scheduler_stats)
            self._stat_logger.log_if_due(self.stats)
        if processed.ids_to_abort:
            self.client.abort_requests(processed.ids_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without a further output. Ids that are not live are passed over."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        internal = self._output_processor.abort_requests(ids)
        if internal and self._cause_of_death is None:
            self.client.abort_requests(internal)

    def has_unfinished_requests(self) -> bool:
        return self._output_processor.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        """Sequences: a request with `n` answers counts `n` times."""
        return self._output_processor.num_unfinished

    def call(self, command: Command, timeout_s: float | None = None) -> CommandResult:
        """What the core answers. Raises what the command raised there, and `TimeoutError`: see
        `EngineCoreClient.call`."""
        self._raise_if_dead()
        try:
            return self.client.call(command, timeout_s)
        except EngineDeadError as error:
            self._die(str(error))
            raise

    def check_health(self, timeout_s: float | None = None) -> None:
        """A round trip through the core and every worker. Raises `EngineDeadError` if there is none to make,
        or if it takes longer than `timeout_s` seconds; a core that was only slow or stopped may still go on.
        """
        try:
            is_healthy = self.call(CheckHealth(), timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(str(error)) from None
        if not is_healthy:
            raise EngineDeadError("a worker of the engine core is not healthy")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `ResetPrefixCache`; False, and no change, while requests run."""
        return bool(self.call(ResetPrefixCache(reset_running_requests)))

    def sleep(self, level: int = 1) -> None:
        """See `Sleep`. Live requests end with finish reason abort."""
        self.call(Sleep(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """See `WakeUp`."""
        self.call(WakeUp(tags))

    def is_sleeping(self) -> bool:
        return bool(self.call(IsSleeping()))

    def get_stats(self) -> SchedulerStats:
        stats: SchedulerStats = self.call(GetStats())
        if self.stats is not None:
            self.stats.scheduler = stats
        return stats

    @property
    def stats(self) -> FrontendStats | None:
        """What happened to requests; None with `disable_log_stats`. `stats.scheduler` was heard last."""
        return self._output_processor.stats

    def get_metrics(self) -> list[Metric]:
        """As of now, under vLLM's names (docs/metrics.md). Raises `ConfigError` with `disable_log_stats`."""
        if self.stats is None:
            raise ConfigError("there are no metrics: set disable_log_stats=False")
        self.get_stats()
        options = MetricsOptions(self.model_name, self.max_model_len, self.client.cache_facts)
        return collect(self.stats, options)

    @property
    def is_alive(self) -> bool:
        """Neither shut down nor dead."""
        return self._cause_of_death is None

    def shutdown(self) -> None:
        """Idempotent."""
        self._output_processor.forget_all(FinishReason.ABORT)
        self._cause_of_death = self._cause_of_death or "the engine was shut down"
        self.client.shutdown()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _die(self, cause: str) -> None:
        self._output_processor.forget_all()
        self._cause_of_death = cause

    def _raise_if_dead(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)
