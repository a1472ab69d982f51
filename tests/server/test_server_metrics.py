"""The page at /metrics: names, labels and buckets that dashboards know, and figures that are of now."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mainspring.base.config import EngineArgs, ModelFacts, resolve
from mainspring.base.errors import ConfigError, EngineDeadError, QueueOverflowError
from mainspring.base.messages import Command, GetStats
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.engine.build import build_engine
from mainspring.engine.client import InprocClient
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.loop_probe import LoopProbe
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.server import metrics
from mainspring.server.metrics import ServerMetrics
from mainspring.server.service import Service
from mainspring.server.settings import ServerSettings

FACTS = ModelFacts(path="", architecture="toy", max_position_embeddings=256, vocab_size=300, eos_token_ids=())
MAX_MODEL_LEN = 128
EXPECTED = {  # every figure of vLLM's that exists here, with the labels it has beside model_name and engine
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "kv_cache_usage_perc": ("gauge", set()),
    "cache_config_info": (
        "gauge",
        {
            "block_size",
            "num_gpu_blocks",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
            "enable_prefix_caching",
        },
    ),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "prompt_tokens_by_source": ("counter", {"source"}),
    "prompt_tokens_cached": ("counter", set()),
    "generation_tokens": ("counter", set()),
    "request_success": ("counter", {"finished_reason"}),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_inference_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_params_n": ("histogram", set()),
    "request_params_max_tokens": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "request_prefill_kv_computed_tokens": ("histogram", set()),
    "request_num_preemptions": ("histogram", set()),
    "iteration_tokens_total": ("histogram", set()),
}


class StepsHere:
    """An asynchronous client of a core in this process: whoever waits for outputs makes the steps."""

    def __init__(self, client: InprocClient) -> None:
        self.inner = client
        self.is_stuck = False
        self.cause: str | None = None
        self._news = asyncio.Event()

    async def add_request(self, request) -> None:
        self.inner.add_request(request)
        self._news.set()

    async def abort_requests(self, request_ids: list[str]) -> None:
        self.inner.abort_requests(request_ids)

    async def call(self, command: Command):
        if self.is_stuck:
            await asyncio.sleep(3600)
        return self.inner.call(command)

    async def get_output(self):
        while True:
            await asyncio.sleep(0)
            if self.cause is not None:
                raise EngineDeadError(self.cause)
            if self.inner.built.core.has_work() and not self.is_stuck:
                return self.inner.get_output()
            self._news.clear()
            await self._news.wait()

    async def shutdown(self) -> None:
        self.inner.shutdown()

    def die(self, cause: str) -> None:
        self.cause = cause
        self._news.set()


def make(prefix: str = "vllm", log_stats: bool = True, **limits) -> tuple[AsyncLLM, StepsHere, ServerMetrics]:
    args = EngineArgs(
        executor="mainspring.testing.fake_executor:make_fake",
        num_gpu_blocks_override=33,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
    )
    client = StepsHere(InprocClient(build_engine(resolve(args, FACTS))))
    llm = AsyncLLM(
        lambda: client,
        InputProcessor(FACTS, MAX_MODEL_LEN, None),
        OutputProcessor(None, log_stats=log_stats),
        cache_facts=client.inner.cache_facts,
        **limits,
    )
    page = ServerMetrics(prefix)
    page.attach(llm, "toy")
    return llm, client, page


def params(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        output_kind=RequestOutputKind.DELTA,
        ignore_eos=True,
        detokenize=False,
        **more,
    )


def families(text: bytes) -> dict:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """By name, and the value of the one label that tells it from its like."""
    told = {}
    for family in families(text).values():
        for sample in family.samples:
            rest = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            told[sample.name, rest[0] if len(rest) == 1 else ""] = sample.value
    return told


async def read(llm: AsyncLLM, prompt: list[int], given: SamplingParams) -> list:
    return [output async for output in llm.generate({"prompt_token_ids": prompt}, given, "id")]


def test_the_page_has_what_dashboards_read():
    async def body() -> bytes:
        llm, _, page = make()
        async with llm:
            await asyncio.gather(*(read(llm, [i] * 20, params(5)) for i in range(4)))
            text, content_type = await page.page()
            assert content_type.startswith("text/plain; version=")
            return text

    text = asyncio.run(body())
    found = families(text)
    for name, (kind, labels) in EXPECTED.items():
        family = found.pop(f"vllm:{name}")
        assert (family.type, bool(family.documentation)) == (kind, True), name
        for sample in family.samples:
            extra = {"le"} if sample.name.endswith("_bucket") else set()
            assert set(sample.labels) == {"model_name", "engine"} | labels | extra, name
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("toy", "0")
    assert not [name for name in found if name.startswith("vllm:")], "all are in the table"
    assert {"process_cpu_seconds", "python_info", "mainspring:event_loop_delay_seconds"} <= found.keys()
    told = samples(text)
    assert told["vllm:request_success_total", "length"] == 4
    assert {reason for name, reason in told if name == "vllm:request_success_total"} == {
        *("stop", "length", "abort", "error", "repetition")
    }
    assert told["vllm:prompt_tokens_total", ""] == 80
    assert told["vllm:generation_tokens_total", ""] == 20
    assert told["vllm:time_to_first_token_seconds_bucket", "2560.0"] == 4
    assert told["vllm:iteration_tokens_total_sum", ""] == 100
    assert ("vllm:request_prompt_tokens_bucket", "100.0") in told
    assert ("vllm:request_prompt_tokens_bucket", "200.0") not in told, "no model so long"


def test_gauges_are_of_now():
    """Case B170: an abort, which the core does not speak of, is seen at the next look."""

    async def body() -> None:
        llm, _, page = make()
        async with llm:
            stream = llm.generate({"prompt_token_ids": [1] * 20}, params(80), "id")
            await anext(stream)
            told = samples((await page.page())[0])
            assert told["vllm:num_requests_running", ""] == 1
            assert told["vllm:kv_cache_usage_perc", ""] == pytest.approx(2 / 32)
            await stream.aclose()
            told = samples((await page.page())[0])
            assert told["vllm:num_requests_running", ""] == told["vllm:kv_cache_usage_perc", ""] == 0
            assert told["vllm:request_success_total", "abort"] == 1

    asyncio.run(body())


def test_refusals_are_counted():
    async def body() -> None:
        llm, _, page = make(max_num_queued_reqs=1)
        async with llm:
            first = await llm.add_request("a", {"prompt_token_ids": [1]}, params(2))
            for _ in range(2):
                with pytest.raises(QueueOverflowError):
                    await read(llm, [1], params(2))
            told = families((await page.page())[0])["vllm:admission_rejections"].samples
            assert [(s.labels, s.value) for s in told] == [
                ({"model_name": "toy", "reason": "max_num_queued_reqs"}, 2)
            ]
            await first.aclose()

    asyncio.run(body())


def test_a_core_that_is_busy_or_dead_does_not_hold_the_page_up(monkeypatch):
    """Case B011: the page comes at once, with what was heard last."""
    monkeypatch.setattr(metrics, "REFRESH_TIMEOUT_S", 0.05)

    async def body() -> None:
        llm, client, page = make()
        async with llm:
            stream = await llm.add_request("a", {"prompt_token_ids": [1] * 20}, params(80))
            await anext(stream)
            client.is_stuck = True
            start_s = time.monotonic()
            told = samples((await page.page())[0])
            assert time.monotonic() - start_s < 2.0
            assert told["vllm:num_requests_running", ""] == 1
            client.die("it is gone")
            with pytest.raises(EngineDeadError):
                await anext(stream)
            told = samples((await page.page())[0])
            assert told["vllm:num_requests_running", ""] == 0
            assert told["vllm:request_success_total", "error"] == 1
            assert told["vllm:prompt_tokens_total", ""] == 20

    asyncio.run(body())


def test_a_prefix_of_ones_own():
    _, _, page = make(prefix="mine")
    found = families(page.render()[0])
    assert {f"mine:{name}" for name in EXPECTED} <= found.keys()
    assert not [name for name in found if name.startswith("vllm:")]


@pytest.mark.parametrize("is_loading", [True, False])
def test_without_an_engines_statistics(is_loading):
    page = ServerMetrics() if is_loading else make(log_stats=False)[2]
    found = families(page.render()[0])
    assert not [name for name in found if name.startswith("vllm:")]
    assert "process_cpu_seconds" in found


def test_open_metrics_for_who_asks():
    text, content_type = make()[2].render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_http_requests():
    page = ServerMetrics()
    page.http.record("/v1/completions", "POST", 200, 0.3, 100, 2000)
    page.http.record("/v1/completions", "POST", 400, 0.002, 50, 90)
    page.http.record(None, "GET", 404, 0.001, 0, 80)
    page.http.record("/metrics", "GET", 200, 0.001, 0, 9000)
    found = families(page.render()[0])
    assert {
        (s.labels["handler"], s.labels["method"], s.labels["status"]): s.value
        for s in found["http_requests"].samples
        if s.name == "http_requests_total"
    } == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
    }
    totals = {
        (s.name, s.labels.get("handler")): s.value
        for name in ("http_request_size_bytes", "http_response_size_bytes", "http_request_duration_seconds")
        for s in found[name].samples
        if s.name.endswith(("_sum", "_count"))
    }
    assert totals["http_request_size_bytes_sum", "/v1/completions"] == 150
    assert totals["http_response_size_bytes_sum", "/v1/completions"] == 2090
    assert totals["http_request_duration_seconds_count", "/v1/completions"] == 2
    fine = {s.name: s.value for s in found["http_request_duration_highr_seconds"].samples}
    assert fine["http_request_duration_highr_seconds_count"] == 3
    le = {s.labels.get("le") for s in found["http_request_duration_seconds"].samples} - {None}
    assert le == {"0.1", "0.5", "1.0", "+Inf"}


def test_the_probe_sees_a_loop_that_is_held_up():
    async def body() -> LoopProbe:
        busy = [True]
        probe = LoopProbe(lambda: busy[0])
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(0.05)
        time.sleep(0.13)  # noqa: ASYNC251  the fault that is looked for
        await asyncio.sleep(0.03)
        busy[0] = False
        await asyncio.sleep(0.05)
        task.cancel()
        return probe

    probe = asyncio.run(body())
    late = {bound: count for bound, count in probe.delay_s.cumulative()}
    assert 2 <= probe.delay_s.count <= 8, "every 20 ms while busy"
    assert late[float("inf")] - late[0.1] == 1, "one of them late by more than 100 ms"


def test_an_idle_probe_counts_nothing():
    async def body() -> int:
        probe = LoopProbe(lambda: False)
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(0.05)
        task.cancel()
        return probe.delay_s.count

    assert asyncio.run(body()) == 0


def test_the_probe_is_on_the_page():
    async def body() -> bytes:
        llm, _, page = make()
        task = asyncio.create_task(page.run_probe())
        async with llm:
            stream = await llm.add_request("a", {"prompt_token_ids": [1]}, params(100))
            task.cancel()
            task = asyncio.create_task(page.run_probe())
            await asyncio.sleep(0.05)
            text, _ = await page.page()
            await stream.aclose()
            task.cancel()
        return text

    assert samples(asyncio.run(body()))["mainspring:event_loop_delay_seconds_count", ""] >= 1


def test_statistics_are_brought_up_by_get_stats():
    async def body() -> None:
        llm, client, _ = make()
        async with llm:
            await read(llm, [1] * 20, params(5))
            client.inner.call = partial(changed, client.inner.call)
            assert (await llm.get_stats()).num_waiting == llm.stats.scheduler.num_waiting == 7

    def changed(call, command):
        answer = call(command)
        if isinstance(command, GetStats):
            answer.num_waiting = 7
        return answer

    asyncio.run(body())


def test_the_prefix_is_a_setting():
    settings = ServerSettings(metrics_prefix="mine")
    assert Service(settings, "toy").metrics.prefix == "mine"
    with pytest.raises(ConfigError, match="metrics_prefix 'a b' must be letters"):
        ServerSettings(metrics_prefix="a b")
