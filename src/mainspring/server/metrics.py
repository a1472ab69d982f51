"""What a server tells Prometheus: the engine's figures, its HTTP traffic, its own process and event loop.

The engine's figures are read from its statistics at each look (`frontend/metrics.py`); nothing is written per
token. HTTP requests are recorded one by one, under the names of prometheus-fastapi-instrumentator, which vLLM
uses. What neither has is named mainspring.

A server makes a `ServerMetrics` at its start, tells it the engine once that has loaded (`attach`), records
every request at its end (`http.record`), answers GET /metrics with `page`, and runs `run_probe` as a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from mainspring.base.errors import EngineError
from mainspring.frontend import metrics
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.loop_probe import LoopProbe
from mainspring.frontend.metrics import PREFIX, Metric, MetricsOptions
from mainspring.frontend.stats import FrontendStats

LOOP_DELAY = "mainspring:event_loop_delay_seconds"
REFRESH_TIMEOUT_S = 1.0  # a core in a long step answers later; then what it said last is shown
# Asked by machines all day long: recorded, they would drown the rest.
UNRECORDED = frozenset({"/metrics", "/health", "/livez", "/readyz", "/load", "/ping", "/version"})
UNKNOWN_HANDLER = "none"  # of a path that no route has: as many labels as there are routes, not as paths
DURATION_S = (0.1, 0.5, 1.0)
DURATION_FINE_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    *(7.5, 10.0, 30.0, 60.0),
)

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


class HttpMetrics:
    """One `record` for each request that was answered, or left by its client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = prometheus_client.Counter(
            "http_requests", "HTTP requests.", ("handler", "method", "status"), registry=registry
        )
        self._duration = prometheus_client.Histogram(
            "http_request_duration_seconds",
            "From an HTTP request to the end of its answer.",
            ("handler", "method"),
            buckets=DURATION_S,
            registry=registry,
        )
        self._duration_fine = prometheus_client.Histogram(
            "http_request_duration_highr_seconds",
            "The same, of all requests together.",
            buckets=DURATION_FINE_S,
            registry=registry,
        )
        self._request_bytes = prometheus_client.Summary(
            "http_request_size_bytes", "Bodies of HTTP requests.", ("handler",), registry=registry
        )
        self._response_bytes = prometheus_client.Summary(
            "http_response_size_bytes", "Bodies of HTTP answers.", ("handler",), registry=registry
        )

    def record(
        self,
        handler: str | None,
        method: str,
        status: int,
        duration_s: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """`handler` is the route as it was written, such as /v1/models/{id}; None: there is none."""
        if handler in UNRECORDED:
            return
        handler = handler or UNKNOWN_HANDLER
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(duration_s)
        self._duration_fine.observe(duration_s)
        self._request_bytes.labels(handler).observe(request_bytes)
        self._response_bytes.labels(handler).observe(response_bytes)


class ServerMetrics:
    """Everything that is shown at /metrics."""

    def __init__(self, prefix: str = PREFIX) -> None:
        """`prefix` is of the engine's figures: vllm, for all that read them."""
        self.prefix = prefix
        self._llm: AsyncLLM | None = None
        self._registry = CollectorRegistry()
        self.probe = LoopProbe(self._is_busy)
        self.http = HttpMetrics(self._registry)
        self._registry.register(_LoopCollector(self.probe))
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.PlatformCollector(registry=self._registry)
        prometheus_client.GCCollector(registry=self._registry)

    def attach(self, llm: AsyncLLM, model_name: str) -> None:
        """From now on its figures are shown; none, if it keeps no statistics."""
        self._llm = llm
        if llm.stats is not None:
            first = llm.ranks.start
            options = MetricsOptions(model_name, llm.max_model_len, llm.cache_facts, self.prefix, first)
            self._registry.register(_EngineCollector(llm.stats, options))

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, for the request's `Accept`. Gauges are of now if the core says so
        within `REFRESH_TIMEOUT_S`, else as it was heard last; it does not matter whether it lives."""
        if self._llm is not None and self._llm.stats is not None:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(REFRESH_TIMEOUT_S):
                    await self._llm.get_stats()
        return self.render(accept)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """As `page`, of what is known here."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    async def run_probe(self) -> None:
        """A task of the server's loop."""
        await self.probe.run()

    def _is_busy(self) -> bool:
        return self._llm is not None and self._llm.stats is not None and self._llm.stats.num_live > 0


class _EngineCollector(Collector):
    def __init__(self, stats: FrontendStats, options: MetricsOptions) -> None:
        self._stats = stats
        self._options = options

    def collect(self) -> Iterator[Family]:
        for _, group in groupby(metrics.collect(self._stats, self._options), lambda metric: metric.name):
            yield _family(list(group))


def _family(group: list[Metric]) -> Family:
    """Metrics of one name, which have the same labels with other values."""
    first, labels = group[0], list(group[0].labels)
    if isinstance(first, metrics.Histogram):
        histogram = HistogramMetricFamily(first.name, first.help, labels=labels)
        for metric in group:
            assert isinstance(metric, metrics.Histogram)
            histogram.add_metric(list(metric.labels.values()), list(metric.buckets.items()), metric.sum)
        return histogram
    kind = GaugeMetricFamily if isinstance(first, metrics.Gauge) else CounterMetricFamily
    family = kind(first.name, first.help, labels=labels)
    for metric in group:
        assert isinstance(metric, metrics.Gauge | metrics.Counter)
        family.add_metric(list(metric.labels.values()), metric.value)
    return family


class _LoopCollector(Collector):
    def __init__(self, probe: LoopProbe) -> None:
        self._probe = probe

    def collect(self) -> Iterable[Family]:
        delay_s = self._probe.delay_s
        family = HistogramMetricFamily(LOOP_DELAY, "How late the server's event loop was, while busy.")
        family.add_metric([], list(metrics.buckets_of(delay_s).items()), delay_s.sum)
        return [family]
