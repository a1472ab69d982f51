"""Spans: one per request, with what was measured, in the trace its client began."""

from __future__ import annotations

import asyncio
import http.server
import sys
import threading
import time

import pytest
from frontend_toys import FACTS, TOY, ScriptedClient, make_engine, run
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from test_async_llm import AsyncScriptedClient

from mainspring.base.errors import ConfigError
from mainspring.base.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
)
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.frontend.tracing import Tracer

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracer(provider, "toy")


def test_a_span_of_each_request(exporter, tracer):
    engine = make_engine(ScriptedClient(b"abcdef"), log_stats=True)
    engine._output_processor.on_finished = tracer
    given = SamplingParams(max_tokens=4, n=2, temperature=0.5, top_p=0.9)
    engine.add_request("mine", "hello", given)
    before_ns = time.time_ns()
    engine.add_request("left", "hello", given)
    engine.step()
    engine.abort_request("left")
    run(engine)
    left, mine = exporter.get_finished_spans()
    assert (mine.name, mine.kind) == ("llm_request", SpanKind.SERVER)
    attributes = dict(mine.attributes)
    times = {name: attributes.pop(name) for name in list(attributes) if name.startswith("gen_ai.latency.")}
    assert attributes == {
        "gen_ai.response.model": "toy",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 1,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.num_sequences": 2,
    }
    assert 0 <= times["gen_ai.latency.time_to_first_token"] <= times["gen_ai.latency.e2e"] < 5
    assert mine.end_time - mine.start_time == pytest.approx(times["gen_ai.latency.e2e"] * 1e9, abs=1e3)
    assert before_ns - 1e9 < mine.start_time < mine.end_time <= time.time_ns()
    assert left.attributes["gen_ai.response.finish_reasons"] == ("abort", "abort")
    assert left.attributes["gen_ai.usage.completion_tokens"] == 2
    assert engine.stats.ends[FinishReason.ABORT] == 2


def test_times_of_the_core(exporter, tracer):
    processor = OutputProcessor(TOY, clock=lambda: 101.0, log_stats=True)
    processor.on_finished = tracer
    request = EngineCoreRequest("r-1", [1], SamplingParams(seed=1, max_tokens=9), arrival_time_s=100.0)
    processor.add_request("r", None, [request])
    events = [EngineCoreEvent(EventType.QUEUED, 5.0), EngineCoreEvent(EventType.SCHEDULED, 5.25)]
    processor.process_outputs([EngineCoreOutput("r-1", [97], events=events)], timestamp_s=6.0)
    processor.process_outputs([EngineCoreOutput("r-1", [98], FinishReason.STOP)], timestamp_s=8.0)
    (span,) = exporter.get_finished_spans()
    assert {k: v for k, v in span.attributes.items() if k.startswith("gen_ai.latency.")} == {
        "gen_ai.latency.e2e": 1.0,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.75,
    }


def test_the_clients_trace_is_continued(exporter, tracer):
    async def body() -> None:
        llm = AsyncLLM(
            lambda: AsyncScriptedClient(ScriptedClient(b"ab")),
            InputProcessor(FACTS, 512, TOY),
            OutputProcessor(TOY, log_stats=True),
            TOY,
        )
        llm.on_finished(tracer)
        async with llm:
            given = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
            headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
            async for _ in llm.generate("hello", given, "traced", trace_headers=headers):
                pass
            async for _ in llm.generate("hello", given, "alone"):
                pass

    asyncio.run(body())
    traced, alone = exporter.get_finished_spans()
    assert f"{traced.context.trace_id:032x}" == TRACE_ID
    assert f"{traced.parent.span_id:016x}" == SPAN_ID
    assert traced.attributes["gen_ai.request.id"] == "traced", "the caller's id, not ours"
    assert alone.parent is None
    assert f"{alone.context.trace_id:032x}" != TRACE_ID


def test_spans_are_sent():
    """To a collector that speaks OTLP over HTTP."""
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracer = Tracer.to(f"http://127.0.0.1:{server.server_port}/v1/traces", "toy")
        engine = make_engine(ScriptedClient(b"ab"), log_stats=True)
        engine._output_processor.on_finished = tracer
        engine.add_request("mine", "hello", SamplingParams(max_tokens=2))
        run(engine)
        tracer.close()
        server.shutdown()
        thread.join()
    ((path, message),) = got
    assert path == "/v1/traces"
    assert b"llm_request" in message
    assert b"gen_ai.usage.completion_tokens" in message


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'mainspring\[otel\]'"):
        Tracer.to("http://127.0.0.1:1/v1/traces", "toy")
