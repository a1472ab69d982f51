"""Statistics: what was counted is what the callers saw, however requests end."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import fields
from itertools import groupby

import msgspec
import pytest
from frontend_toys import FACTS, TOY, ScriptedClient, make_engine, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_async_llm import AsyncScriptedClient

from mainspring.base.config import EngineArgs, resolve
from mainspring.base.errors import ConfigError, EngineDeadError, RequestError
from mainspring.base.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    GetStats,
    SchedulerStats,
)
from mainspring.base.outputs import RequestMetrics, RequestOutput
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.engine.build import build_engine
from mainspring.engine.client import InprocClient
from mainspring.engine.dp_client import total
from mainspring.engine.mp_client import SyncMPClient
from mainspring.frontend import metrics
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.llm import LLM
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.metrics import LoggingStatLogger, MetricsOptions, collect
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.frontend.parallel_sampling import _as_it_is
from mainspring.frontend.stats import FrontendStats, Histogram, Times, merged, series_1_2_5

FAKE = "mainspring.testing.fake_executor:make_fake"
STOP, LENGTH, ABORT, ERROR, REPETITION = FinishReason


def params(max_tokens: int, **more) -> SamplingParams:
    more = {"temperature": 0.0, "output_kind": RequestOutputKind.DELTA, "ignore_eos": True, **more}
    return SamplingParams(max_tokens=max_tokens, **more)


def real_engine(**limits) -> LLMEngine:
    """A real core with a fake model; statistics are kept."""
    limits = {
        "num_gpu_blocks_override": 65,
        "max_model_len": 256,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        **limits,
    }
    config = resolve(EngineArgs(executor=FAKE, **limits), FACTS)
    return make_engine(InprocClient(build_engine(config)), log_stats=True)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num_tokens)]


class Seen:
    """What callers saw: tokens and ends of every answer, from deltas."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], int] = {}
        self.ends: list[str] = []
        self.prompt_tokens: dict[str, int] = {}
        self.cached_tokens: dict[str, int] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            for answer in output.outputs:
                key = (output.request_id, answer.index)
                self.tokens[key] = self.tokens.get(key, 0) + len(answer.token_ids)
                if answer.token_ids:
                    self.prompt_tokens[output.request_id] = len(output.prompt_token_ids)
                    self.cached_tokens[output.request_id] = output.num_cached_tokens or 0
                if answer.finish_reason is not None:
                    self.ends.append(answer.finish_reason)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())


def check(stats: FrontendStats, seen: Seen, num_aborted_unseen: int = 0) -> None:
    """Everything that must hold once no request lives, whatever happened."""
    begun = sum(1 for n in seen.tokens.values() if n)
    ends = {str(reason): count for reason, count in stats.ends.items()}
    ends["abort"] -= num_aborted_unseen
    assert ends == {name: seen.ends.count(name) for name in ends}
    assert stats.num_live == 0
    assert stats.num_begun == sum(stats.ends.values()) == stats.e2e_latency_s.count
    assert stats.num_generation_tokens == seen.num_tokens == stats.generation_tokens.sum
    assert stats.num_prompt_tokens == sum(seen.prompt_tokens.values()) == stats.prompt_tokens.sum
    assert stats.num_cached_tokens == sum(seen.cached_tokens.values())
    assert stats.prefill_computed_tokens.sum == stats.num_prompt_tokens - stats.num_cached_tokens
    assert stats.time_to_first_token_s.count == begun == stats.decode_s.count
    assert stats.iteration_tokens.sum == stats.num_prompt_tokens + stats.num_generation_tokens
    for name in FrontendStats.__struct_fields__:
        value = getattr(stats, name)
        if isinstance(value, Histogram):
            assert value.sum >= 0, name
            assert min(value.counts) >= 0, name


def finish(engine: LLMEngine, seen: Seen) -> None:
    for _ in range(10_000):
        if not engine.has_unfinished_requests():
            return
        seen.take(engine.step())
    raise AssertionError("a request never ends")


def value(engine: LLMEngine, name: str, **labels: str) -> float:
    (found,) = [m for m in engine.get_metrics() if m.name == name and labels.items() <= m.labels.items()]
    return found.count if isinstance(found, metrics.Histogram) else found.value


# -- what a histogram is -------------------------------------------------------------------------------------


def test_histogram():
    histogram = Histogram.of((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(observed)
    assert histogram.counts == [2, 2, 1]
    assert list(histogram.cumulative()) == [(1.0, 2), (2.0, 4), (float("inf"), 5)]
    assert (histogram.count, histogram.sum) == (5, 14.0)
    twice = histogram + histogram
    assert (twice.counts, twice.sum, histogram.count) == ([4, 4, 2], 28.0, 5)


def test_series():
    assert series_1_2_5(99) == (1, 2, 5, 10, 20, 50)
    assert series_1_2_5(100) == (1, 2, 5, 10, 20, 50, 100)


def test_times_are_by_the_cores_clock():
    times = Times()
    assert (times.queue_s, times.prefill_s, times.decode_s, times.inference_s) == (None,) * 4
    queued, scheduled, preempted = EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED
    times.note([EngineCoreEvent(queued, 5.0), EngineCoreEvent(scheduled, 6.0)])
    times.first_token_s, times.last_token_s = 8.0, 12.0
    times.note([EngineCoreEvent(preempted, 9.0), EngineCoreEvent(scheduled, 10.0)])
    assert (times.queue_s, times.prefill_s, times.decode_s, times.inference_s) == (1.0, 2.0, 4.0, 6.0)
    assert times.num_preemptions == 1
    whole = Times()
    whole.absorb(times)
    earlier = Times()
    earlier.scheduled_s, earlier.last_token_s, earlier.num_preemptions = 5.5, 11.0, 2
    whole.absorb(earlier)
    assert (whole.queued_s, whole.scheduled_s, whole.first_token_s, whole.last_token_s) == (
        5.0,
        5.5,
        8.0,
        12.0,
    )
    assert whole.num_preemptions == 3


# -- exact counts --------------------------------------------------------------------------------------------


def test_ten_requests_one_after_another():
    """Closed forms for each metric, those of a page of vLLM's after the same ten requests; gauges are 0."""
    num_prompt, num_output = 20, 10
    with real_engine() as engine:
        seen = Seen()
        for i in range(10):
            engine.add_request(str(i), prompt(num_prompt), params(num_output))
            finish(engine, seen)
        check(engine.stats, seen)
        expected = {
            "time_to_first_token_seconds": 10,
            "inter_token_latency_seconds": 10 * (num_output - 1),
            "request_time_per_output_token_seconds": 10,
            "e2e_request_latency_seconds": 10,
            "request_queue_time_seconds": 10,
            "request_prefill_time_seconds": 10,
            "request_decode_time_seconds": 10,
            "request_inference_time_seconds": 10,
            "request_prompt_tokens": 10,
            "request_generation_tokens": 10,
            "request_max_num_generation_tokens": 10,
            "request_params_n": 10,
            "request_params_max_tokens": 10,
            "request_prefill_kv_computed_tokens": 10,
            "request_num_preemptions": 10,
            "iteration_tokens_total": 10 * num_output,
            "prompt_tokens": 10 * num_prompt,
            "prompt_tokens_cached": 9 * 16,  # all but the first find the one whole block
            "generation_tokens": 10 * num_output,
            "prefix_cache_queries": 10 * num_prompt,
            "prefix_cache_hits": 9 * 16,
            "num_preemptions": 0,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
        }
        assert {name: value(engine, f"vllm:{name}") for name in expected} == expected
        assert value(engine, "vllm:request_success", finished_reason="length") == 10
        assert engine.stats.iteration_tokens.sum == 10 * (num_prompt + num_output)
        by_source = {
            m.labels["source"]: m.value
            for m in engine.get_metrics()
            if m.name == "vllm:prompt_tokens_by_source"
        }
        assert by_source == {"local_compute": 56, "local_cache_hit": 144, "external_kv_transfer": 0}


def test_one_observation_per_event():
    """Case B169: ten plain requests, three aborted before and three after their first token, two with three
    answers, four prompts read in chunks, one with one token; two of all are preempted."""
    with real_engine(max_num_batched_tokens=16) as engine:
        core, seen = engine.client.built.core, Seen()
        for i in range(10):
            engine.add_request(f"plain-{i}", prompt(6, i), params(5))
        for i in range(4):
            engine.add_request(f"chunked-{i}", prompt(50, 100 + i), params(4))
        for i in range(2):
            engine.add_request(f"three-{i}", prompt(7, 200 + i), params(3, n=3))
        engine.add_request("one", prompt(5, 300), params(1))
        for i in range(3):
            engine.add_request(f"leaves-early-{i}", prompt(8, 400 + i), params(50))
        engine.abort_request([f"leaves-early-{i}" for i in range(3)])
        finish(engine, seen)
        for i in range(3):
            engine.add_request(f"leaves-late-{i}", prompt(8, 500 + i), params(50))
        while not all(seen.tokens.get((f"leaves-late-{i}", 0), 0) >= 2 for i in range(3)):
            seen.take(engine.step())
        for request in core.scheduler.running[:2]:
            core.scheduler._preempt(request, None)
        for _ in range(4):
            seen.take(engine.step())
        engine.abort_request([f"leaves-late-{i}" for i in range(3)])
        check(engine.stats, seen, num_aborted_unseen=6)
        stats = engine.stats
        assert {str(reason): count for reason, count in stats.ends.items() if count} == {
            "length": 10 + 4 + 2 * 3 + 1,
            "abort": 6,
        }
        assert stats.num_prompt_tokens == 10 * 6 + 4 * 50 + 2 * 7 + 5 + 3 * 8
        assert stats.time_to_first_token_s.count == 10 + 4 + 2 * 3 + 1 + 3, "one per answer that has begun"
        assert stats.prompt_tokens.count == 10 + 4 + 2 + 1 + 3, "one per request"
        assert stats.n.counts[:3] == [10 + 4 + 1 + 6, 0, 2]
        assert (stats.n.sum, stats.max_tokens.sum) == (27, 50 + 16 + 6 + 1 + 300)
        assert stats.longest_answer_tokens.count == 23
        assert stats.num_preemptions.sum == value(engine, "vllm:num_preemptions") == 2
        gaps = sum(n - 1 for n in seen.tokens.values() if n)
        assert stats.inter_token_latency_s.count == gaps


def test_usage_counts_what_is_held():
    """Case B170: 0 when idle, also with cached blocks; a known share while requests run; 0 after an abort."""
    with real_engine(num_gpu_blocks_override=9, max_model_len=128, max_num_batched_tokens=128) as engine:

        def usage() -> float:
            return value(engine, "vllm:kv_cache_usage_perc")

        assert usage() == 0
        engine.add_request("half", prompt(60), params(50))
        assert value(engine, "vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        engine.step()
        assert usage() == 0.5
        assert value(engine, "vllm:num_requests_running") == 1
        engine.abort_request("half")
        assert usage() == 0
        assert value(engine, "vllm:num_requests_running") == value(engine, "vllm:num_requests_waiting") == 0
        engine.add_request("full", prompt(120, 1), params(50))
        engine.step()
        assert usage() == engine.stats.scheduler.kv_cache_usage == 1.0
        run(engine)
        assert usage() == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_lives(data):
    """Case B169: whatever is asked, stopped, left and preempted, counters are the sums of what was seen."""
    draw = data.draw
    engine = real_engine(
        num_gpu_blocks_override=draw(st.integers(5, 12)),
        max_num_batched_tokens=draw(st.sampled_from([8, 32])),
        max_model_len=64,
        block_size=16,
    )
    seen, left = Seen(), 0
    live: set[str] = set()
    with engine:
        for i in range(draw(st.integers(1, 8))):
            given_params = params(
                draw(st.integers(1, 20)),
                n=draw(st.integers(1, 3)),
                ignore_eos=draw(st.booleans()),
                stop=draw(st.sampled_from([[], ["a"], ["b", "the"]])),
            )
            engine.add_request(str(i), prompt(draw(st.integers(1, 30)), i % 3), given_params)
            live.add(str(i))
            for _ in range(draw(st.integers(0, 4))):
                outputs = engine.step()
                seen.take(outputs)
                live -= {output.request_id for output in outputs if output.finished}
            if live and draw(st.booleans()):
                gone = draw(st.sampled_from(sorted(live)))
                num_before = engine.stats.ends[ABORT]
                engine.abort_request(gone)
                left += engine.stats.ends[ABORT] - num_before
                live.discard(gone)
        finish(engine, seen)
        check(engine.stats, seen, left)
        assert engine.stats.prefill_s.count == engine.stats.decode_s.count <= engine.stats.queue_s.count
        now = engine.get_stats()
        assert now.num_preemptions >= engine.stats.num_preemptions.sum, (
            "those of requests that left are not told"
        )
        assert (now.num_running, now.num_waiting, now.kv_cache_usage) == (0, 0, 0.0)


# -- ends of other kinds -------------------------------------------------------------------------------------


def test_a_stop_string_cuts_what_counts():
    engine = make_engine(ScriptedClient(list(b"one STOP two"), chunk=12), log_stats=True)
    engine.add_request("r", "hello", params(50, stop="STOP"))
    seen = Seen()
    finish(engine, seen)
    check(engine.stats, seen)
    assert engine.stats.ends[STOP] == 1
    assert 0 < engine.stats.num_generation_tokens < 12


class FailsLater:
    """A detokenizer that breaks at its fourth output."""

    def __init__(self, inner) -> None:
        self.inner, self.num_calls = inner, 0

    def update(self, token_ids):
        self.num_calls += 1
        if self.num_calls == 4:
            raise UnicodeError("no such byte")
        return self.inner.update(token_ids)

    def take(self) -> str:
        return self.inner.take()


def test_errors_are_ends_too():
    """Case B008: a fault of one request is counted as an error, with the tokens its caller got."""
    engine = make_engine(ScriptedClient(b"abcdefgh"), log_stats=True)
    for name in "xyz":
        engine.add_request(name, "hello", params(8))
    state = next(s for s in engine._output_processor._states.values() if s.parent.request_id == "y")
    state.detokenizer = FailsLater(state.detokenizer)
    seen = Seen()
    finish(engine, seen)
    check(engine.stats, seen)
    assert (engine.stats.ends[ERROR], engine.stats.ends[LENGTH]) == (1, 2)


def test_an_error_of_the_core_is_counted():
    processor = OutputProcessor(TOY, log_stats=True)
    processor.add_request("r", None, [EngineCoreRequest("r-1", [1, 2], SamplingParams(seed=1))])
    processor.process_outputs([EngineCoreOutput("r-1", [], ERROR, error="its grammar does not compile")])
    assert processor.stats.ends[ERROR] == 1
    assert processor.stats.time_to_first_token_s.count == processor.stats.num_prompt_tokens == 0


def test_the_end_of_the_core_ends_every_request():
    client = ScriptedClient()
    engine = make_engine(client, log_stats=True)
    engine.add_request("r", "hello", params(50, n=2))
    engine.step()
    engine.stats.scheduler = SchedulerStats(num_running=2, kv_cache_usage=0.5, num_preemptions=3)
    client.fail_with = EngineDeadError("it is gone")
    with pytest.raises(EngineDeadError):
        engine.step()
    assert engine.stats.ends[ERROR] == 2
    assert engine.stats.scheduler == SchedulerStats(num_preemptions=3), "nothing runs, counters stay"
    engine.shutdown()
    assert engine.stats.ends[ABORT] == 0, "an end is counted once"


def test_shutdown_aborts():
    engine = make_engine(ScriptedClient(), log_stats=True)
    engine.add_request("r", "hello", params(50))
    engine.shutdown()
    assert (engine.stats.ends[ABORT], engine.stats.num_live) == (1, 0)


def test_a_refused_request_was_never_begun():
    engine = make_engine(ScriptedClient(), log_stats=True)
    with pytest.raises(RequestError):
        engine.add_request("r", "", params(5))
    assert engine.stats.num_begun == sum(engine.stats.ends.values()) == 0


def test_a_fault_of_the_counting_hurts_nobody(caplog):
    """Case B041: statistics that fail end no request and no loop; they say so."""
    engine = make_engine(ScriptedClient(b"ab"), log_stats=True)

    def fail(finished):
        raise ArithmeticError("a counter went down")

    engine._output_processor.on_finished = fail
    engine.add_request("r", "hello", params(2))
    outputs = run(engine)
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert "is not counted" in caplog.text


def test_cached_tokens_beyond_the_prompt_make_nothing_negative():
    """Case B041: a core that reports more than there is lowers no counter."""
    processor = OutputProcessor(TOY, log_stats=True)
    processor.add_request("r", None, [EngineCoreRequest("r-1", [1, 2], SamplingParams(seed=1))])
    processor.process_outputs([EngineCoreOutput("r-1", [3], LENGTH, num_cached_tokens=32)])
    assert processor.stats.prefill_computed_tokens.sum == 0
    processor.add_request("s", None, [EngineCoreRequest("s-1", [1, 2], SamplingParams(seed=1))])
    for now_s in (9.0, 5.0):
        processor.process_outputs([EngineCoreOutput("s-1", [3])], timestamp_s=now_s)
    assert processor.stats.inter_token_latency_s.sum == 0, "a clock that went back"


def test_what_an_output_carries_is_a_copy_of_everything():
    """A field that is added to `RequestMetrics` must be copied too."""
    metrics = RequestMetrics(*range(1, 1 + len(fields(RequestMetrics))))
    copied = _as_it_is(metrics)
    assert copied == metrics
    assert copied is not metrics


# -- several front ends --------------------------------------------------------------------------------------


class OneOfTwo:
    """A client of a core that has two: whoever steps brings the other its outputs too."""

    def __init__(self, core, index: int, inboxes: tuple[list, list]) -> None:
        self.core, self.index, self.inboxes = core, index, inboxes
        self.max_model_len = 256

    def add_request(self, request: EngineCoreRequest) -> None:
        request.client_index = self.index
        self.core.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        if not self.inboxes[self.index] and self.core.has_work():
            for index, outputs in self.core.step().items():
                self.inboxes[index].append(outputs)
        return self.inboxes[self.index].pop(0) if self.inboxes[self.index] else EngineCoreOutputs()

    def call(self, command):
        return self.core.call(command)


def test_front_ends_add_up():
    config = resolve(
        EngineArgs(executor=FAKE, num_gpu_blocks_override=65, max_model_len=256, max_num_batched_tokens=32),
        FACTS,
    )
    core, inboxes = build_engine(config).core, ([], [])
    engines = [make_engine(OneOfTwo(core, index, inboxes), log_stats=True) for index in range(2)]
    seen = Seen()
    for i in range(9):
        engines[i % 2].add_request(str(i), prompt(20, i % 4), params(3 + i, n=1 + i % 2))
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine in engines:
            seen.take(engine.step())
    both = [engine.stats for engine in engines]
    assert all(stats.num_generation_tokens > 0 for stats in both)
    total = merged(both)
    check(total, seen)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(both), type=list[FrontendStats])
    assert merged(sent) == total, "they can travel"
    latest = core.call(GetStats())
    assert latest.prefix_cache_queries == total.scheduler.prefix_cache_queries
    assert total.scheduler.num_steps == max(stats.scheduler.num_steps for stats in both)


# -- who looks -----------------------------------------------------------------------------------------------


def test_llm_get_metrics():
    with LLM.from_engine(real_engine()) as llm:
        llm.generate([prompt(20)], params(3), use_tqdm=False)
        by_name = {metric.name: metric for metric in llm.get_metrics()}
    assert by_name["vllm:generation_tokens"].value == 3
    first = by_name["vllm:time_to_first_token_seconds"]
    assert first.count == 1
    assert list(first.buckets)[:2] == ["0.001", "0.005"]
    assert first.buckets["+Inf"] == 1
    lengths = by_name["vllm:request_prompt_tokens"].buckets
    assert list(lengths) == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]
    assert (lengths["10.0"], lengths["20.0"]) == (0, 1)
    cache = by_name["vllm:cache_config_info"]
    assert cache.value == 1
    assert cache.labels == {
        "model_name": "",
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "65",
        "kv_cache_size_tokens": "1024",
        "kv_cache_max_concurrency": "4.0",
        "enable_prefix_caching": "True",
    }


def test_each_of_several_engines_has_its_figures():
    """Those of one name stand together, as Prometheus wants them; what the front end counts is there once."""
    first, second = (
        SchedulerStats(num_running=2, num_preemptions=1),
        SchedulerStats(num_running=3, num_waiting=4, num_parked=5, kv_cache_usage=0.5, prefix_cache_hits=7),
    )
    found = collect(FrontendStats(scheduler=total([first, second], num_alive=2)), MetricsOptions("m", 100))
    names = [name for name, _ in groupby(metric.name for metric in found)]
    assert len(names) == len(set(names))

    def values(name: str, **labels: str) -> dict[str, float]:
        return {
            metric.labels["engine"]: metric.value
            for metric in found
            if metric.name == f"vllm:{name}" and labels.items() <= metric.labels.items()
        }

    assert values("num_requests_running") == {"0": 2, "1": 3}
    assert values("num_requests_waiting") == {"0": 0, "1": 9}
    assert values("num_requests_waiting_by_reason", reason="deferred") == {"0": 0, "1": 5}
    assert values("kv_cache_usage_perc") == {"0": 0.0, "1": 0.5}
    assert values("prefix_cache_hits") == {"0": 0, "1": 7}
    assert values("num_preemptions") == {"0": 1, "1": 0}
    assert values("generation_tokens") == {"0": 0}


def test_no_metrics_without_statistics():
    engine = make_engine(ScriptedClient())
    with pytest.raises(ConfigError, match="disable_log_stats=False"):
        engine.get_metrics()


def test_a_line_while_busy(caplog):
    caplog.set_level(logging.INFO, logger="mainspring")
    now = [0.0]
    lines = LoggingStatLogger(clock=lambda: now[0])
    stats = FrontendStats()
    now[0] = 10.0
    lines.log(stats)
    assert not caplog.records, "idle"
    stats.num_prompt_tokens, stats.num_generation_tokens = 1000, 50
    stats.scheduler = SchedulerStats(
        num_running=3, num_waiting=1, num_parked=1, kv_cache_usage=0.25, prefix_cache_queries=1000
    )
    now[0] = 20.0
    lines.log(stats)
    assert caplog.messages == [
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 0.0%"
    ]
    stats.num_generation_tokens, stats.ends[LENGTH] = 60, 3
    stats.scheduler = SchedulerStats(prefix_cache_queries=1100, prefix_cache_hits=50)
    now[0] = 29.0
    lines.log_if_due(stats)
    assert len(caplog.records) == 1
    now[0] = 30.0
    lines.log_if_due(stats)
    assert "generation throughput: 1.0 tokens/s, Running: 0 reqs" in caplog.messages[1]
    assert caplog.messages[1].endswith("hit rate: 50.0%")
    now[0] = 40.0
    lines.log(stats)
    assert len(caplog.records) == 2


def test_statistics_cross_the_process_boundary():
    args = EngineArgs(executor=FAKE, num_gpu_blocks_override=65, max_model_len=256)
    with make_engine(SyncMPClient(resolve(args, FACTS)), log_stats=True) as engine:
        seen = Seen()
        for i in range(3):
            engine.add_request(str(i), prompt(20, i), params(5))
        finish(engine, seen)
        check(engine.stats, seen)
        heard = engine.stats.scheduler
        assert heard.num_steps >= 5, "it came with the outputs"
        assert heard == engine.get_stats(), "and was the last word"
        assert engine.stats.queue_s.count == engine.stats.inference_s.count == 3
        cache = next(m for m in engine.get_metrics() if m.name == "vllm:cache_config_info")
        assert (cache.labels["num_gpu_blocks"], cache.labels["enable_prefix_caching"]) == ("65", "True")


class CountingLogger:
    def __init__(self) -> None:
        self.looks: list[int] = []

    def log(self, stats: FrontendStats) -> None:
        self.looks.append(stats.num_generation_tokens)


class BrokenLogger(CountingLogger):
    def log(self, stats: FrontendStats) -> None:
        super().log(stats)
        raise OSError("the disk is full")


def test_loggers_of_ones_own(monkeypatch, caplog):
    """They are asked regularly while the engine lives; one that fails is not asked again, and is told."""
    monkeypatch.setattr(metrics, "LOG_INTERVAL_S", 0.01)
    sound, broken = CountingLogger(), BrokenLogger()

    async def body() -> int:
        llm = AsyncLLM(
            lambda: AsyncScriptedClient(ScriptedClient()),
            InputProcessor(FACTS, 512, TOY),
            OutputProcessor(TOY, log_stats=True),
            TOY,
            stat_loggers=[broken, sound],
        )
        async with llm:
            async for _ in llm.generate("hello", params(5), "a"):
                pass
            while len(sound.looks) < 3:  # noqa: ASYNC110  it knows of no event
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        return len(sound.looks)

    num_looks = asyncio.run(body())
    assert sound.looks[-1] == 5
    assert len(sound.looks) == num_looks, "not after the end"
    assert len(broken.looks) == 1
    assert "BrokenLogger has failed" in caplog.text
