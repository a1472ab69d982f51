"""`AsyncLLM` with a core that says what it is told, and with a real one in its own process, where only the
model is fake."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial

import msgspec
import pytest
from frontend_toys import FACTS, TOY, ScriptedClient, make_engine, run

from mainspring.base.config import EngineArgs, resolve
from mainspring.base.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    QueueOverflowError,
    RequestError,
)
from mainspring.base.messages import EngineCoreOutputs, GetStats
from mainspring.base.outputs import CompletionOutput, Logprob, RequestOutput
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.engine.build import build_engine
from mainspring.engine.client import InprocClient
from mainspring.engine.launch import CoreProcess
from mainspring.engine.mp_client import AsyncMPClient
from mainspring.frontend import async_llm
from mainspring.frontend.async_llm import AsyncLLM, merge
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.output_processor import OutputProcessor

DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)
PATIENCE_S = 20.0  # nothing in here may take so long


def params(**given) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "output_kind": DELTA, "temperature": 0.0, **given})


def endless(**given) -> SamplingParams:
    return params(max_tokens=400, ignore_eos=True, **given)


def echo(request):
    """Says the prompt backwards."""
    return request.prompt_token_ids[::-1]


def on_loop(coroutine):
    """Run it; also assert that it leaves no task behind, and does not hang."""

    async def guarded():
        async with asyncio.timeout(PATIENCE_S):
            result = await coroutine
        for _ in range(5):  # generators that were left are closed by tasks of the loop
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left: {left}"
        return result

    return asyncio.run(guarded())


async def until(condition) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never comes")


async def read(llm: AsyncLLM, prompt, given: SamplingParams, request_id: str = "a", **options) -> list:
    return [output async for output in llm.generate(prompt, given, request_id, **options)]


def joined(outputs: list[RequestOutput], index: int = 0) -> tuple[list[int], str, str | None]:
    """Tokens, text and finish reason of the answer `index`, from deltas."""
    pieces = [answer for output in outputs for answer in output.outputs if answer.index == index]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True], "one end"
    return (
        [token for piece in pieces for token in piece.token_ids],
        "".join(piece.text for piece in pieces),
        pieces[-1].finish_reason,
    )


# -- with a scripted core ------------------------------------------------------------------------------------


class AsyncScriptedClient:
    """A `ScriptedClient` whose steps are made while somebody reads, if `gate` is open."""

    def __init__(self, client: ScriptedClient) -> None:
        self.inner = client
        self.gate = asyncio.Event()
        self.gate.set()
        self.news = asyncio.Event()

    async def add_request(self, request) -> None:
        self.inner.add_request(request)
        self.news.set()

    async def abort_requests(self, request_ids) -> None:
        self.inner.abort_requests(request_ids)

    async def call(self, command):
        return self.inner.call(command)

    async def get_output(self) -> EngineCoreOutputs:
        await asyncio.sleep(0)
        while not self.inner.live and self.inner.fail_with is None:
            self.news.clear()
            await self.news.wait()
        await self.gate.wait()
        return self.inner.get_output()

    async def shutdown(self) -> None:
        self.inner.shutdown()

    def fail(self, error: BaseException) -> None:
        self.inner.fail_with = error
        self.news.set()


def scripted(script=echo, *, tokenizer=TOY, output_processor=None, chunk=1, **options):
    """An AsyncLLM and its client."""
    client = AsyncScriptedClient(ScriptedClient(script, chunk=chunk))
    inputs = InputProcessor(FACTS, client.inner.max_model_len, tokenizer)
    outputs = output_processor or OutputProcessor(tokenizer)
    return AsyncLLM(lambda: client, inputs, outputs, tokenizer, **options), client


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_streams_are_what_the_synchronous_engine_says(kind):
    given = params(output_kind=kind, max_tokens=6, logprobs=1, prompt_logprobs=1, n=2)
    engine = make_engine(ScriptedClient(echo))
    engine.add_request("a", "hello STOP", given)
    expected = run(engine)

    async def body():
        llm, _ = scripted()
        async with llm:
            return await read(llm, "hello STOP", given)

    outputs = on_loop(body())
    assert all(output.request_id == "a" for output in outputs)
    for index in range(2):
        ours, theirs = (
            [answer for output in side for answer in output.outputs if answer.index == index]
            for side in (outputs, expected)
        )
        if kind == DELTA:
            assert [t for a in ours for t in a.token_ids] == [t for a in theirs for t in a.token_ids]
            assert "".join(a.text for a in ours) == "".join(a.text for a in theirs)
            assert [p for a in ours for p in a.logprobs] == [p for a in theirs for p in a.logprobs]
        assert ours[-1].finish_reason == theirs[-1].finish_reason == "length"
        assert ours[-1].cumulative_logprob == theirs[-1].cumulative_logprob
        if kind != DELTA:
            assert ours[-1] == theirs[-1]
    said = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert said[0] == next(o.prompt_logprobs for o in expected if o.prompt_logprobs is not None)
    assert kind != DELTA or len(said) == 1


def test_slow_reader_is_merged():
    """Case B016: what is missed is read at once, and a reader that sleeps delays nobody."""

    async def body():
        llm, _ = scripted(lambda request: list(b"abcdefgh"))
        async with llm:
            slow = llm.generate("hello", params(max_tokens=8, logprobs=0, n=2), "slow")
            first = await anext(slow)
            await read(llm, "hello", params(max_tokens=50), "quick")
            second = await anext(slow)
            assert second.finished
            with pytest.raises(StopAsyncIteration):
                await anext(slow)
            cumulative = llm.generate("hello", params(max_tokens=8, output_kind=CUMULATIVE, n=2), "whole")
            await anext(cumulative)
            await read(llm, "hello", params(max_tokens=50), "quick")
            return first, second, await anext(cumulative)

    first, second, whole = on_loop(body())
    for index in range(2):
        assert joined([first, second], index) == (list(b"abcdefgh"), "abcdefgh", "length")
    assert len(second.outputs[0].logprobs) + len(first.outputs[0].logprobs) == 8
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert [(a.index, a.text, a.finish_reason) for a in whole.outputs] == [
        (0, "abcdefgh", "length"),
        (1, "abcdefgh", "length"),
    ]


def output_of(*answers: CompletionOutput, **given) -> RequestOutput:
    return RequestOutput("a", None, [1], list(answers), **given)


def test_merge():
    one = [{7: Logprob(-0.5)}]
    older = output_of(CompletionOutput(1, "x", [1], -1.0, one), prompt_logprobs=[None])
    newer = output_of(CompletionOutput(0, "y", [2]), CompletionOutput(1, "z", [3], -2.0, one, "stop", "z"))
    merged = merge(older, newer, DELTA)
    assert merged.outputs == [
        CompletionOutput(0, "y", [2]),
        CompletionOutput(1, "xz", [1, 3], -2.0, one + one, "stop", "z"),
    ]
    assert merged.prompt_logprobs == [None]
    assert not merged.finished
    # A fault of ours may end an answer without its log-probabilities: those that came stay.
    failed = merge(
        output_of(CompletionOutput(0, "x", [1], -1.0, one)),
        output_of(CompletionOutput(0, "", [2], finish_reason="error", error="why"), finished=True),
        DELTA,
    )
    assert failed.finished
    assert failed.outputs == [CompletionOutput(0, "x", [1, 2], -1.0, one, "error", None, "why")]
    replaced = merge(
        output_of(CompletionOutput(0, "x", [1]), CompletionOutput(1, "y", [2])),
        output_of(CompletionOutput(0, "xx", [1, 1])),
        CUMULATIVE,
    )
    assert [answer.text for answer in replaced.outputs] == ["xx", "y"]


def test_same_id_twice_and_abort_by_it():
    """Cases B017 and B164: an id may be in use more than once, each use gets its own answer, and an abort
    ends all uses."""

    async def body():
        llm, client = scripted()
        async with llm:
            both = await asyncio.gather(
                read(llm, list(b"abcd"), params(), "a"), read(llm, list(b"wxyz"), params(), "a")
            )
            assert sorted(joined(outputs)[1] for outputs in both) == ["dcba", "zyxw"]
            assert {output.request_id for outputs in both for output in outputs} == {"a"}
            names = ["a", "a", "", "x" * 10_000, "0_a", "line\nbreak", "../x", "b"]
            streams = [llm.generate("hello", endless(n=2), name) for name in names]
            for stream in streams:
                await anext(stream)
            await llm.abort("a")
            await llm.abort([*names[2:-1], "unknown"])
            for stream in streams[:-1]:
                last = [output async for output in stream][-1]
                assert last.finished
                assert {answer.finish_reason for answer in last.outputs} == {"abort"}
            await anext(streams[-1])
            assert len(client.inner.live) == 2, "the other one runs on"
            await streams[-1].aclose()
            assert not client.inner.live

    on_loop(body())


def test_same_id_again_and_again():
    """Case B140."""

    async def body():
        llm, _ = scripted()
        async with llm:
            for i in range(100):
                outputs = await read(llm, [i + 1, 65], params(max_tokens=2))
                assert joined(outputs)[0] == [65, i + 1]

    on_loop(body())


def test_leaving_is_an_abort():
    """Case B019: closing, breaking out, cancelling; of several answers some of which have ended."""

    async def body():
        llm, client = scripted(lambda r: [TOY.eos_token_id] if r.request_id.startswith("1_") else [])
        async with llm:
            stream = llm.generate("hello", params(max_tokens=400, n=3), "closed")
            finished = set()
            while not finished:
                finished = {a.index for a in (await anext(stream)).outputs if a.finish_reason is not None}
            await stream.aclose()
            assert finished == {1}
            assert not client.inner.live
            assert len(client.inner.aborted) == 2

            async for _ in llm.generate("hello", endless(), "broken"):
                break
            del _
            await asyncio.sleep(0.01)  # the generator is closed by the loop
            assert not client.inner.live

            for yields in (0, 1, 5):  # before, while and after it is sent
                task = asyncio.create_task(read(llm, "hello", endless(output_kind=FINAL_ONLY)))
                for _ in range(yields):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not client.inner.live
            await llm.wait_for_requests_to_drain(0.0)

    on_loop(body())


def test_abort_of_final_only_says_what_there_is():
    async def body():
        llm, client = scripted(lambda request: list(b"abc"))
        async with llm:
            task = asyncio.create_task(read(llm, "hello", endless(output_kind=FINAL_ONLY, n=2)))
            await until(lambda: client.inner.live and len(next(iter(client.inner.live.values()))[1]) >= 3)
            await llm.abort("a")
            return await task

    (output,) = on_loop(body())
    assert output.finished
    assert [(a.index, a.text[:3], a.finish_reason) for a in output.outputs] == [
        (0, "abc", "abort"),
        (1, "abc", "abort"),
    ]


def test_abort_while_it_is_sent():
    """Of several answers, those that were not sent yet stay here."""

    async def body():
        llm, client = scripted()
        accept, may_go_on = client.add_request, asyncio.Event()

        async def add(request):
            await accept(request)
            await may_go_on.wait()

        client.add_request = add
        async with llm:
            task = asyncio.create_task(read(llm, "hello", endless(n=3)))
            await until(lambda: client.inner.live)
            await llm.abort("a")
            may_go_on.set()
            (output,) = await task
            assert [answer.finish_reason for answer in output.outputs] == ["abort"] * 3
            assert len(client.inner.seen) == 1
            assert not client.inner.live

    on_loop(body())


def test_stop_string_is_told_to_the_core():
    async def body():
        llm, client = scripted(lambda request: list(b"one. two. three."))
        async with llm:
            outputs = await read(llm, "hello", endless(stop=["two"]))
            assert joined(outputs)[1:] == ("one. ", "stop")
            assert outputs[-1].outputs[0].stop_reason == "two"
            for _ in range(5):
                await asyncio.sleep(0)
            assert not client.inner.live

    on_loop(body())


def test_fault_of_one_request_is_its_own():
    """Case B008."""

    class Breaks(OutputProcessor):
        def _read(self, state, token_ids):
            if state.parent.prompt == "ab" and len(state.token_ids) == 3:
                raise KeyError("planned")
            return super()._read(state, token_ids)

    async def body():
        llm, client = scripted(lambda request: list(b"abcdefgh"), output_processor=Breaks(TOY))
        async with llm:
            prompts = ("hello", "ab", "aab")
            said = await asyncio.gather(*(read(llm, p, params(max_tokens=8), "x") for p in prompts))
            assert [joined(outputs)[1:] for outputs in said] == [
                ("abcdefgh", "length"),
                ("abc", "error"),
                ("abcdefgh", "length"),
            ]
            assert said[1][-1].outputs[0].error.startswith("KeyError: 'planned' (test_async_llm.py:")
            assert not client.inner.live

    on_loop(body())


def test_refusals_are_the_callers_alone():
    async def body():
        llm, client = scripted()
        async with llm:
            other = asyncio.create_task(read(llm, "hello", params(max_tokens=30)))
            await asyncio.sleep(0)
            with pytest.raises(RequestError):
                await read(llm, [], params())
            with pytest.raises(RequestError, match="pooling_params"):
                await anext(llm.encode("hello", "embed", "a"))
            accept, seen = client.add_request, []

            async def add(request):
                seen.append(request.request_id)
                if request.request_id.startswith("2_"):
                    raise RuntimeError("full")
                await accept(request)

            client.add_request = add
            with pytest.raises(RuntimeError, match="full"):
                await read(llm, "hello", endless(n=3))
            assert {*seen[:2]} <= {*client.inner.aborted}
            assert joined(await other)[2] == "length"
            assert not client.inner.live

    on_loop(body())


def test_many_outputs_let_others_have_their_turn(monkeypatch):
    """A message for more requests than a slice holds is worked off in slices."""
    monkeypatch.setattr(async_llm, "SLICE", 128)

    async def body():
        llm, client = scripted()
        async with llm:
            client.gate.clear()
            tasks = [asyncio.create_task(read(llm, "hello", params(max_tokens=1))) for _ in range(300)]
            await until(lambda: len(client.inner.live) == 300)
            client.gate.set()
            counts = [0]
            while counts[-1] < 300:
                await asyncio.sleep(0)
                counts.append(sum(task.done() for task in tasks))
            assert len({*counts}) >= 4, "128, 256, 300"
            await asyncio.gather(*tasks)

    on_loop(body())


def test_messages_that_wait_are_merged():
    """A front end that is behind reads them in one turn, and each stream gets one output of them all."""

    async def body():
        llm, client = scripted(lambda request: list(b"abcdefgh"))
        said, waiting = asyncio.Event(), []

        async def next_of_those() -> EngineCoreOutputs:
            await said.wait()
            return waiting.pop(0) if waiting else await asyncio.Event().wait()

        client.get_output = next_of_those
        async with llm:
            tasks = [asyncio.create_task(read(llm, "hello", params(max_tokens=8))) for _ in range(3)]
            await until(lambda: len(client.inner.live) == 3)
            waiting += [client.inner.get_output() for _ in range(8)]
            said.set()
            return await asyncio.gather(*tasks)

    for outputs in on_loop(body()):
        assert joined(outputs) == (list(b"abcdefgh"), "abcdefgh", "length")
        assert len(outputs) == 1


def with_cause(error: BaseException) -> BaseException:
    try:
        raise KeyError("inner")
    except KeyError as inner:
        error.__cause__ = inner
        return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EngineDeadError("the cause"), "^the cause$"),
        (with_cause(RuntimeError("outer")), r"KeyError: 'inner' \(test_async_llm.py:\d+\)$"),
    ],
)
def test_death_reaches_everybody(error, says):
    """Case B010: those who wait, those who will read later, those who call later. What was not read yet gives
    way."""

    async def body():
        llm, client = scripted()
        assert (llm.is_running, llm.is_stopped, llm.errored, llm.dead_error) == (True, False, False, None)
        async with llm:
            asleep = llm.generate("hello", endless(), "asleep")
            await anext(asleep)
            waiting = [asyncio.create_task(read(llm, "hello", endless(n=2), f"{i}")) for i in range(5)]
            waiting.append(asyncio.create_task(llm.wait_for_requests_to_drain()))
            await asyncio.sleep(0.01)
            client.fail(error)
            for one in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(one, EngineDeadError)
                assert re.search(says, str(one))
            with pytest.raises(EngineDeadError, match=says):
                await anext(asleep)
            for call in (llm.get_stats, llm.check_health, lambda: read(llm, "hello", params())):
                with pytest.raises(EngineDeadError, match=says):
                    await call()
            await llm.abort("asleep")
            assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
            assert str(llm.dead_error)
            assert client.inner.is_shut_down, "nobody will read it again"

    on_loop(body())


def test_cancelled_output_handler_is_a_death():
    """A loop that is torn down, or a stranger who cancels what he finds, leaves nobody waiting."""

    async def body():
        llm, client = scripted()
        async with llm:
            task = asyncio.create_task(read(llm, "hello", endless()))
            await until(lambda: client.inner.live)
            (handler,) = [t for t in asyncio.all_tasks() if t.get_name() == "mainspring-output-handler"]
            handler.cancel()
            with pytest.raises(EngineDeadError, match="cancelled"):
                await task

    on_loop(body())


def test_admission():
    """Requests without a first token are counted, and nobody else."""

    async def body():
        llm, client = scripted(max_num_queued_reqs=3, max_num_queued_tokens=10)
        async with llm:
            client.gate.clear()
            first = asyncio.create_task(read(llm, [1] * 4, params(n=2)))  # 2 requests, 8 tokens
            await asyncio.sleep(0)
            with pytest.raises(QueueOverflowError, match=r"8 prompt tokens .* max_num_queued_tokens 10: try"):
                await read(llm, [1] * 3, params())
            second = asyncio.create_task(read(llm, [1] * 2, params()))
            await asyncio.sleep(0)
            with pytest.raises(QueueOverflowError, match=r"3 requests .* max_num_queued_reqs 3: try"):
                await read(llm, [1], params())
            with pytest.raises(QueueOverflowError):  # and not that the prompt is empty: it is not read
                await read(llm, [], params())
            assert len(client.inner.seen) == 3, "the core does not hear of what is refused"
            second.cancel()  # leaves the queue
            await asyncio.sleep(0)
            third = asyncio.create_task(read(llm, [1] * 2, params(output_kind=FINAL_ONLY, max_tokens=400)))
            await asyncio.sleep(0)
            client.gate.set()
            assert joined(await first)[2] == "length"
            assert not third.done(), "it has its first token, though it said nothing yet"
            client.gate.clear()
            await asyncio.sleep(0)
            # Alone, more than the limit may wait: refused now, it would be refused for ever.
            alone = asyncio.create_task(read(llm, [1] * 20, params(n=4)))
            await asyncio.sleep(0)
            assert len(client.inner.live) == 5
            client.gate.set()
            await asyncio.gather(alone, third)
            assert not llm._streams.admission._waiting
            assert llm._streams.admission._num_tokens == 0

    on_loop(body())


def test_admission_settings_are_judged():
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        with pytest.raises(ConfigError, match=f"{name} 0 must be at least 1"):
            resolve(EngineArgs(**{name: 0}), FACTS)


def test_drain():
    async def body():
        llm, client = scripted()
        async with llm:
            await llm.wait_for_requests_to_drain()
            client.gate.clear()
            task = asyncio.create_task(read(llm, "hello", params(n=2)))
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError, match=r"1 requests are not finished after 0.01 s"):
                await llm.wait_for_requests_to_drain(0.01)
            client.gate.set()
            await llm.wait_for_requests_to_drain(5.0)
            assert joined(await task)[2] == "length"

    on_loop(body())


@pytest.mark.parametrize(("timeout_s", "reason"), [(0.0, "abort"), (5.0, "length"), (0.05, "abort")])
def test_shutdown_ends_every_stream(timeout_s, reason):
    async def body():
        llm, client = scripted(shutdown_timeout_s=timeout_s)
        task = asyncio.create_task(read(llm, "hello", params(max_tokens=20)))
        await until(lambda: client.inner.live)
        if timeout_s == 0.05:
            client.gate.clear()
        ending = asyncio.create_task(llm.shutdown())
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await read(llm, "hello", params())
        await asyncio.gather(ending, llm.shutdown())
        assert joined(await task)[2] == reason
        await llm.shutdown()
        assert client.inner.is_shut_down
        assert (llm.is_stopped, llm.errored, llm.dead_error) == (True, False, None)

    on_loop(body())


def test_belongs_to_one_loop():
    llm, _ = scripted()

    async def use():
        return await read(llm, "hello", params())

    asyncio.run(use())  # its end cancels what runs on it
    with pytest.raises(EngineDeadError, match="cancelled"):
        asyncio.run(use())
    other, _ = scripted()
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(read(other, "hello", params()))
        with pytest.raises(EngineError, match="another event loop"):
            second.run(read(other, "hello", params()))
        first.run(other.shutdown())


# -- with a core in its own process --------------------------------------------------------------------------


FAKE = "mainspring.testing.fake_executor:make_fake"
WATCHED = "mainspring.testing.process_executor:ProcessExecutor"
LIMITS = {"num_gpu_blocks_override": 256, "max_model_len": 512, "max_num_batched_tokens": 256}


def fake_config(**given):
    return resolve(EngineArgs(**{"executor": FAKE, **LIMITS, **given}), FACTS)


def with_core(executor_args=None, **given) -> tuple[AsyncLLM, CoreProcess]:
    process = CoreProcess(msgspec.structs.replace(fake_config(**given), executor_args=executor_args or {}))
    llm = AsyncLLM(
        partial(AsyncMPClient, process),
        InputProcessor(FACTS, process.ready.max_model_len, TOY),
        OutputProcessor(TOY),
        TOY,
        release=process.close,
    )
    return llm, process


@pytest.fixture
def nothing_left(monkeypatch, tmp_path_factory):
    """No process and no directory of sockets stays."""
    tmp_path_factory.getbasetemp()  # made where it belongs, before the place of temporary files changes
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is too long a name for a socket's
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        before = children_of(os.getpid())
        yield
        assert [name for name in os.listdir(directory) if name.startswith("mainspring-")] == []
        assert children_of(os.getpid()) == before


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


async def is_idle(llm: AsyncLLM) -> bool:
    for _ in range(100):  # an abort is on its way
        stats = await llm.get_stats()
        if (stats.num_running, stats.num_waiting, stats.num_parked, stats.kv_cache_usage) == (0, 0, 0, 0.0):
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.usefixtures("nothing_left")
def test_core_in_its_process():
    """Streams equal the synchronous engine's; leaving frees the core; stop strings; statistics; drain. Built
    where no loop runs."""
    prompts = [[1 + i, *b"some prompt that is shared", i % 5] for i in range(12)]
    given = params(max_tokens=12, temperature=1.0, seed=7, logprobs=2, output_kind=FINAL_ONLY)
    config = fake_config()
    with make_engine(InprocClient(build_engine(config))) as engine:
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, given)
        expected = {output.request_id: output.outputs for output in run(engine)}
    # Steps take their time, or endless answers end before they are seen to run.
    llm, process = with_core(executor_args={"step_s": 0.002}, executor=WATCHED)

    async def body():
        async with llm:
            await llm.check_health(timeout_s=10.0)
            said = await asyncio.gather(*(read(llm, p, given, str(i)) for i, p in enumerate(prompts)))
            for i, (output,) in enumerate(said):
                ours, theirs = output.outputs[0], expected[str(i)][0]
                assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
                assert ours.logprobs == theirs.logprobs
            stats = await llm.get_stats()
            assert stats == await llm.call(GetStats())
            assert stats.num_scheduled_tokens > 0
            assert await llm.reset_prefix_cache() is True

            streams = [llm.generate("hello", endless(n=2), "same") for _ in range(4)]
            for stream in streams:
                await anext(stream)
            assert (await llm.get_stats()).num_running == 8
            await streams[0].aclose()
            task = asyncio.create_task(anext(streams[1]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await llm.abort("same")
            for stream in streams[2:]:
                assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"
            assert await is_idle(llm)

            whole = joined(await read(llm, "hello", params(max_tokens=40, ignore_eos=True)))[1]
            stop = next(whole[i] for i in range(5, len(whole)) if whole[i].isascii())
            stopped = await read(llm, "hello", params(max_tokens=40, ignore_eos=True, stop=[stop]))
            assert joined(stopped)[1:] == (whole[: whole.index(stop)], "stop")
            await llm.wait_for_requests_to_drain(5.0)
            assert await is_idle(llm)

    on_loop(body())
    assert process.how_it_ended().endswith("ended with status 0")


@pytest.mark.usefixtures("nothing_left")
def test_pause_sleep_and_profile(tmp_path, monkeypatch):
    """Case B175, from the caller's side: what comes while it is paused waits, what is aborted meanwhile ends,
    the core stays healthy, nobody is forgotten."""
    monkeypatch.chdir(tmp_path)

    async def body():
        llm, _ = with_core(executor_args={"step_s": 0.0005}, executor=WATCHED)
        async with llm:
            with pytest.raises(RequestError, match="'nonsense' must be one of abort, wait, keep"):
                await llm.pause_generation("nonsense")
            running = asyncio.create_task(read(llm, "hello", endless()))
            async for _ in llm.generate("hello", params(), "so that it runs"):
                pass
            await llm.pause_generation()
            assert joined(await running)[2] == "abort"
            assert await llm.is_paused()

            queued = asyncio.create_task(read(llm, "hello", params(), "queued"))
            gone = asyncio.create_task(read(llm, "hello", endless(), "gone"))
            await llm.check_health(timeout_s=10.0)
            await llm.abort("gone")
            assert joined(await gone) == ([], "", "abort")
            with pytest.raises(TimeoutError):
                await llm.wait_for_requests_to_drain(0.05)
            await llm.resume_generation()
            assert joined(await queued)[2] == "length"

            kept = llm.generate("hello", params(max_tokens=100, ignore_eos=True), "kept")
            outputs = [await anext(kept)]
            await llm.pause_generation("keep", clear_cache=True)
            await llm.resume_generation()
            outputs += [output async for output in kept]
            assert len(joined(outputs)[0]) == 100
            assert outputs[0].finished is False

            whole = asyncio.create_task(read(llm, "hello", params(max_tokens=50, ignore_eos=True)))
            async for _ in llm.generate("hello", params(), "so that it runs"):
                pass
            await llm.pause_generation("wait")
            assert joined(await whole)[2] == "length"
            assert not await llm.is_sleeping()
            await llm.sleep(level=1)
            assert await llm.is_sleeping()
            with pytest.raises(EngineError, match="asleep"):
                await llm.resume_generation()
            await llm.wake_up(["kv_cache"])
            assert (await llm.is_sleeping(), await llm.is_paused()) == (False, False)

            await llm.start_profile()
            assert joined(await read(llm, "hello", params(ignore_eos=True)))[2] == "length"
            assert os.path.dirname(await llm.stop_profile()) == str(tmp_path)

    on_loop(body())


@pytest.mark.usefixtures("nothing_left")
def test_many_at_once_half_of_them_aborted():
    """All end exactly once, and the core is empty afterwards."""
    dice = random.Random(1)

    async def one(llm, i, pause_s):
        """How many tokens were read, and how it ended."""
        num, reasons = 0, []
        kind = dice.choice(list(RequestOutputKind))
        stream = llm.generate([1 + i, 2, 3], params(max_tokens=8, ignore_eos=True, output_kind=kind), str(i))
        async for output in stream:
            answer = output.outputs[0]
            num = num + len(answer.token_ids) if kind == DELTA else len(answer.token_ids)
            reasons += [answer.finish_reason] if output.finished else []
            await asyncio.sleep(pause_s)
        return num, reasons

    async def leave(task, after_s):
        await asyncio.sleep(after_s)
        task.cancel()

    async def body():
        llm, _ = with_core(max_num_seqs=32)
        async with llm:
            tasks = [asyncio.create_task(one(llm, i, 0.05 if i % 10 == 0 else 0)) for i in range(200)]
            ends = []
            for i in dice.sample(range(200), 100):
                after_s = dice.random() * 0.5
                if i % 2:
                    ends.append(leave(tasks[i], after_s))
                else:
                    ends.append(abort_later(llm, str(i), after_s))
            await asyncio.gather(*ends)
            counts = {"length": 0, "abort": 0, "cancelled": 0}
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, asyncio.CancelledError):
                    counts["cancelled"] += 1
                    continue
                num, (reason,) = result
                assert reason == "abort" or num == 8
                counts[reason] += 1
            assert sum(counts.values()) == 200
            assert counts["length"] >= 100
            assert await is_idle(llm)
            await llm.wait_for_requests_to_drain(0.0)

    async def abort_later(llm, request_id, after_s):
        await asyncio.sleep(after_s)
        await llm.abort(request_id)

    on_loop(body())


@pytest.mark.usefixtures("nothing_left")
def test_killed_core_is_told_to_everybody():
    """Within 2 s, to those who wait, who sleep and who come later."""

    async def body():
        llm, process = with_core()
        async with llm:
            waiting = [asyncio.create_task(read(llm, "hello", endless(n=2), "w")) for _ in range(8)]
            asleep = llm.generate("hello", endless(), "asleep")
            await anext(asleep)
            call = asyncio.create_task(llm.get_stats())
            os.kill(process.pid, signal.SIGKILL)
            start_s = time.monotonic()
            for error in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert "SIGKILL" in str(error)
            assert time.monotonic() - start_s < 2.0
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                async for _ in asleep:
                    pass
            with contextlib.suppress(EngineDeadError):
                await call
            for later in (llm.check_health, llm.get_stats, lambda: read(llm, "hello", params())):
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await later()
            assert llm.errored

    on_loop(body())


@pytest.mark.usefixtures("nothing_left")
def test_failing_step_is_told_with_its_cause():
    """Case B010, from the forward pass to the streams."""
    llm, _ = with_core(executor_args={"fail_at_step": 3})

    async def body():
        async with llm:
            tasks = [asyncio.create_task(read(llm, "hello", endless())) for _ in range(5)]
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert "RuntimeError: planned failure at step 3 (fake_executor.py:" in str(error)

    on_loop(body())


@pytest.mark.usefixtures("nothing_left")
def test_stopped_core_is_not_healthy():
    async def body():
        llm, process = with_core()
        async with llm:
            await llm.check_health(timeout_s=10.0)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(EngineDeadError, match=r"does not answer within 0.2 s"):
                    await llm.check_health(timeout_s=0.2)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            await llm.check_health(timeout_s=10.0)
            assert joined(await read(llm, "hello", params(ignore_eos=True)))[2] == "length"

    on_loop(body())


@pytest.mark.usefixtures("nothing_left")
def test_dropped_without_shutdown():
    """It is collected, used or not, and the process goes with it."""

    async def body():
        llm, process = with_core()
        await read(llm, "hello", params())
        del llm
        gc.collect()
        assert process.how_it_ended() is not None
        for _ in range(100):
            if len(asyncio.all_tasks()) == 1:
                return
            await asyncio.sleep(0.01)

    on_loop(body())
    llm, process = with_core()
    del llm
    gc.collect()
    assert process.how_it_ended() is not None


@pytest.mark.usefixtures("nothing_left")
def test_script_that_forgets_everything(smollm2):
    """Settings to answer, from a script without a main guard that neither leaves its streams nor shuts down;
    the model is a file, its work is faked."""
    program = f"""
        import asyncio
        from mainspring import AsyncEngineArgs, AsyncLLM, SamplingParams

        args = AsyncEngineArgs(model={str(smollm2)!r}, executor={FAKE!r}, num_gpu_blocks_override=64,
                               max_model_len=256)
        llm = AsyncLLM.from_engine_args(args)

        async def use():
            stream = llm.generate("Hello", SamplingParams(max_tokens=100, ignore_eos=True), "a")
            async for output in stream:
                if len(output.outputs[0].token_ids) >= 5:
                    print("enough")
                    return

        asyncio.run(use())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "enough\n", "")


@pytest.mark.usefixtures("nothing_left")
def test_a_loop_that_is_never_run_again_is_no_traceback(smollm2):
    """Neither closed nor run to the end; a request is live, and its stream is held."""
    program = f"""
        import asyncio
        from mainspring import AsyncEngineArgs, AsyncLLM, SamplingParams

        args = AsyncEngineArgs(model={str(smollm2)!r}, executor={FAKE!r}, num_gpu_blocks_override=64,
                               max_model_len=256, disable_log_stats=False)
        llm = AsyncLLM.from_engine_args(args)
        stream = llm.generate("Hello", SamplingParams(max_tokens=100, ignore_eos=True), "a")
        loop = asyncio.new_event_loop()
        loop.run_until_complete(anext(stream))
        print("enough")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "enough\n", "")


@pytest.mark.usefixtures("nothing_left")
def test_ctrl_c_while_a_core_loads_that_is_stuck(smollm2, tmp_path):
    """Case B007: the thread that waits for it does not keep the program from ending."""
    (tmp_path / "stuck.py").write_text("import time\ndef make(config):\n    time.sleep(600)\n")
    program = f"""
        import asyncio, os, signal, threading, time
        from mainspring import AsyncEngineArgs, AsyncLLM

        signal.signal(signal.SIGINT, signal.default_int_handler)
        args = AsyncEngineArgs(model={str(smollm2)!r}, executor="stuck:make")

        async def main():
            asyncio.get_running_loop().call_later(1.0, os.kill, os.getpid(), signal.SIGINT)
            await AsyncLLM.launch(args)

        print(time.monotonic())
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print(time.monotonic())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    started_s, ended_s = map(float, done.stdout.split())
    assert ended_s - started_s < 1.0 + 5.0
