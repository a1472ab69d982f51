"""The statistics under the names that people's dashboards know, and as a line in the log.

`collect` turns the numbers of `stats.py` into a list of metrics: vLLM's names, labels and buckets for all
that exists here (docs/metrics.md says what each counts). It needs no library; `server/metrics.py` renders
the list for Prometheus, `LLM.get_metrics` returns it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mainspring.base.log import get_logger
from mainspring.base.messages import SchedulerStats
from mainspring.base.protocols import Clock
from mainspring.frontend.stats import TOKENS, FrontendStats
from mainspring.frontend.stats import Histogram as Observed

if TYPE_CHECKING:
    from mainspring.engine.client import CacheFacts

logger = get_logger(__name__)

WAITS_FOR = "Sequences that wait: capacity, for room; deferred, for an event such as a grammar."
# Of each core: name, help, value, labels.
CORE_GAUGES: tuple[tuple[str, str, Callable[[SchedulerStats], float], Mapping[str, str]], ...] = (
    ("num_requests_running", "Sequences that have a place in the batch.", lambda now: now.num_running, {}),
    (
        "num_requests_waiting",
        "Sequences that wait, for room or for an event.",
        lambda now: now.num_waiting + now.num_parked,
        {},
    ),
    ("num_requests_waiting_by_reason", WAITS_FOR, lambda now: now.num_waiting, {"reason": "capacity"}),
    ("num_requests_waiting_by_reason", WAITS_FOR, lambda now: now.num_parked, {"reason": "deferred"}),
    (
        "kv_cache_usage_perc",
        "Share of the KV blocks that requests hold, 0 to 1.",
        lambda now: now.kv_cache_usage,
        {},
    ),
)
CORE_COUNTERS = (  # fields of `SchedulerStats`
    ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "Tokens found in the prefix cache."),
    ("num_preemptions", "How often a sequence lost its place."),
)
PREFIX = "vllm"
LOG_INTERVAL_S = 10.0


# -- metrics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure: a name, and the labels that tell it from others of that name."""

    name: str
    help: str = field(repr=False, compare=False)
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """Its name goes without the `_total` that Prometheus appends."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """`buckets`: by upper end as text, how many were at most that; the last is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """What is the same at every look."""

    model_name: str
    max_model_len: int
    cache: CacheFacts | None = None  # None: not known, and not shown
    prefix: str = PREFIX
    engine: int = 0  # the core, or the first of several


def collect(stats: FrontendStats, options: MetricsOptions) -> list[Metric]:
    """Everything there is to say, in the order in which it is shown."""
    return list(_Collection(stats, options).all())


class _Collection:
    def __init__(self, stats: FrontendStats, options: MetricsOptions) -> None:
        self._stats = stats
        self._options = options
        self._labels = {"model_name": options.model_name, "engine": str(options.engine)}
        core = stats.scheduler
        # What is known of each core; all else is of the front end, which does not ask who answered.
        self._engines = [
            ({"engine": str(options.engine + rank)}, each)
            for rank, each in enumerate(core.engines or (core,))
        ]

    def all(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        for name, help, read, labels in CORE_GAUGES:
            for engine, now in self._engines:
                yield self._gauge(name, help, read(now), **labels, **engine)
        if (cache := self._options.cache) is not None:
            yield self._gauge(
                "cache_config_info", "How the KV cache is laid out.", 1, **self._cache_labels(cache)
            )

    def _cache_labels(self, cache: CacheFacts) -> dict[str, str]:
        num_tokens = (cache.num_gpu_blocks - 1) * cache.block_size  # the null block holds none
        return {
            "block_size": str(cache.block_size),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "kv_cache_max_concurrency": str(num_tokens / self._options.max_model_len),
            "kv_cache_size_tokens": str(num_tokens),
            "num_gpu_blocks": str(cache.num_gpu_blocks),
        }

    def _counters(self) -> Iterator[Metric]:
        stats, counter = self._stats, self._counter
        for name, help in CORE_COUNTERS:
            for engine, core in self._engines:
                yield counter(name, help, getattr(core, name), **engine)
        yield counter("prompt_tokens", "Tokens of prompts that were read.", stats.num_prompt_tokens)
        for source, value in (
            ("local_compute", stats.num_prompt_tokens - stats.num_cached_tokens),
            ("local_cache_hit", stats.num_cached_tokens),
            ("external_kv_transfer", 0),
        ):
            yield counter(
                "prompt_tokens_by_source",
                "Tokens of prompts that were read, by where their KV came from.",
                value,
                source=source,
            )
        yield counter(
            "prompt_tokens_cached",
            "Tokens of prompts that were read which the prefix cache had.",
            stats.num_cached_tokens,
        )
        yield counter("generation_tokens", "Tokens generated.", stats.num_generation_tokens)
        for reason, value in stats.ends.items():
            yield counter(
                "request_success", "Answers that have ended, by why.", value, finished_reason=str(reason)
            )
        for limit, value in stats.admission_rejections.items():
            yield Counter(
                name=f"{self._options.prefix}:admission_rejections",
                help="Requests refused because too many waited, by the limit that was reached.",
                labels={"model_name": self._options.model_name, "reason": limit},
                value=value,
            )

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        for name, observed, help in (
            ("time_to_first_token_seconds", stats.time_to_first_token_s, "From arrival to the first token."),
            (
                "inter_token_latency_seconds",
                stats.inter_token_latency_s,
                "Between two outputs of an answer.",
            ),
            (
                "request_time_per_output_token_seconds",
                stats.time_per_output_token_s,
                "The mean gap between the tokens of an answer.",
            ),
            ("e2e_request_latency_seconds", stats.e2e_latency_s, "From arrival to the end of an answer."),
            (
                "request_queue_time_seconds",
                stats.queue_s,
                "Until a sequence had its place in the batch.",
            ),
            ("request_prefill_time_seconds", stats.prefill_s, "From then to the first token."),
            ("request_decode_time_seconds", stats.decode_s, "From the first token to the last."),
            (
                "request_inference_time_seconds",
                stats.inference_s,
                "From the place in the batch to the last token.",
            ),
            ("request_prompt_tokens", stats.prompt_tokens, "Tokens of a prompt."),
            (
                "request_prefill_kv_computed_tokens",
                stats.prefill_computed_tokens,
                "Tokens of a prompt that the prefix cache did not have.",
            ),
            ("request_generation_tokens", stats.generation_tokens, "Tokens of an answer."),
            (
                "request_max_num_generation_tokens",
                stats.longest_answer_tokens,
                "Tokens of the longest answer of a request.",
            ),
            ("request_params_max_tokens", stats.max_tokens, "Most tokens that a request allowed."),
            ("request_params_n", stats.n, "Answers that a request asked for."),
            ("request_num_preemptions", stats.num_preemptions, "How often a sequence lost its place."),
            (
                "iteration_tokens_total",
                stats.iteration_tokens,
                "Tokens of prompts and answers that one step of the engine brought.",
            ),
        ):
            yield self._histogram(name, help, observed)

    def _gauge(self, name: str, help: str, value: float, **labels: str) -> Gauge:
        return Gauge(
            name=f"{self._options.prefix}:{name}", help=help, labels=self._labels | labels, value=value
        )

    def _counter(self, name: str, help: str, value: int, **labels: str) -> Counter:
        return Counter(
            name=f"{self._options.prefix}:{name}", help=help, labels=self._labels | labels, value=value
        )

    def _histogram(self, name: str, help: str, observed: Observed) -> Histogram:
        most = self._options.max_model_len if observed.bounds is TOKENS else math.inf
        return Histogram(
            name=f"{self._options.prefix}:{name}",
            help=help,
            labels=self._labels,
            count=observed.count,
            sum=observed.sum,
            buckets=buckets_of(observed, most),
        )


def buckets_of(observed: Observed, most: float = math.inf) -> dict[str, int]:
    """As Prometheus has them, without those whose upper end is above `most`: nothing is in them."""
    return {
        "+Inf" if bound == math.inf else str(bound): count
        for bound, count in observed.cumulative()
        if bound <= most or bound == math.inf
    }


# -- the log -------------------------------------------------------------------------------------------------


class StatLogger(Protocol):
    """Looks at the statistics every `LOG_INTERVAL_S`; it must not keep them."""

    def log(self, stats: FrontendStats) -> None: ...


class LoggingStatLogger:
    """A line in the log, while busy and once after."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._before = FrontendStats()

    def log(self, stats: FrontendStats) -> None:
        """Rates are those since the last look, whether that said anything or not."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._looked_s, 1e-9)
        before, core = self._before, stats.scheduler
        num_read = stats.num_prompt_tokens - before.num_prompt_tokens
        num_written = stats.num_generation_tokens - before.num_generation_tokens
        ended = sum(stats.ends.values()) - sum(before.ends.values())
        num_queries = core.prefix_cache_queries - before.scheduler.prefix_cache_queries
        num_hits = core.prefix_cache_hits - before.scheduler.prefix_cache_hits
        self._looked_s, self._before = now_s, _counters_of(stats)
        if not (num_read or num_written or ended or core.num_running or core.num_waiting or core.num_parked):
            return
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            num_read / elapsed_s,
            num_written / elapsed_s,
            core.num_running,
            core.num_waiting + core.num_parked,
            100 * core.kv_cache_usage,
            100 * num_hits / num_queries if num_queries else 0.0,
        )

    def log_if_due(self, stats: FrontendStats) -> None:
        """For a caller that steps: as `log`, if that is `LOG_INTERVAL_S` ago."""
        if self._clock() - self._looked_s >= LOG_INTERVAL_S:
            self.log(stats)


def _counters_of(stats: FrontendStats) -> FrontendStats:
    """As they are now; without a copy of the histograms."""
    return FrontendStats(
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
        ends=stats.ends.copy(),
        scheduler=copy.copy(stats.scheduler),
    )


async def log_regularly(stats: FrontendStats, loggers: Sequence[StatLogger]) -> None:
    """Until it is cancelled. A logger that fails is left out from then on, and that is logged."""
    import asyncio  # not for those who only step

    active = list(loggers)
    while active:
        await asyncio.sleep(LOG_INTERVAL_S)
        for each in active.copy():
            try:
                each.log(stats)
            except Exception:
                logger.exception("%s has failed and is not asked again", type(each).__name__)
                active.remove(each)
