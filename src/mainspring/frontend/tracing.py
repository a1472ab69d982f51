"""A span for each request, for OpenTelemetry: the extra `otel`.

A span is made when its request has ended, from what was measured anyway: tracing costs nothing while a
request runs. Names are vLLM's: the span `llm_request` with `gen_ai.*` attributes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mainspring.base.errors import ConfigError
from mainspring.frontend.stats import FinishedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SPAN = "llm_request"
SERVICE = "mainspring"
MISSING = "tracing needs OpenTelemetry, which is not installed: pip install 'mainspring[otel]'"


class Tracer:
    """Give it to `AsyncLLM.on_finished`, and `close` it at the end."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        """Raises `ConfigError` if OpenTelemetry is not installed."""
        try:
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(MISSING) from None
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._model_name = model_name
        self._kind = SpanKind.SERVER
        self._context_of = TraceContextTextMapPropagator().extract

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Tracer:
        """Spans go to a collector that speaks OTLP over HTTP, such as http://localhost:4318/v1/traces, in the
        background. Raises `ConfigError` if OpenTelemetry or its exporter is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(MISSING) from None
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: SERVICE}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model_name)

    def __call__(self, request: FinishedRequest) -> None:
        end_ns = time.time_ns()  # spans want the wall clock; all durations are ours
        span = self._tracer.start_span(
            SPAN,
            context=self._context_of(request.trace_headers),
            kind=self._kind,
            start_time=end_ns - int(request.e2e_latency_s * 1e9),
            attributes=self._attributes(request),
        )
        span.end(end_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _attributes(self, request: FinishedRequest) -> dict[str, str | int | float | list[str]]:
        params, times = request.params, request.times
        attributes: dict[str, str | int | float | list[str] | None] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [str(reason) for reason in request.finish_reasons],
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": request.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": request.num_generation_tokens,
            "gen_ai.usage.num_sequences": request.n,
            "gen_ai.latency.e2e": request.e2e_latency_s,
            "gen_ai.latency.time_to_first_token": request.time_to_first_token_s,
            "gen_ai.latency.time_in_queue": times.queue_s,
            "gen_ai.latency.time_in_model_prefill": times.prefill_s,
            "gen_ai.latency.time_in_model_decode": times.decode_s,
            "gen_ai.latency.time_in_model_inference": times.inference_s,
        }
        return {name: value for name, value in attributes.items() if value is not None}
