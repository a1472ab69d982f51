"""`mainspring bench serve` against a server that says, and shows, what it is told."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mainspring.base.errors import ConfigError, EngineError
from mainspring.bench import plot, serve
from mainspring.bench.arguments import LoadArgs, objectives
from mainspring.bench.http_client import HttpClient, HttpError, server_sent_events
from mainspring.bench.load import Answer, arrival_times, make_samples
from mainspring.bench.serve import Measurement, ServerReading
from mainspring.cli import main
from mainspring.frontend.stats import Histogram

PAGE = """# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total {cpu}
mainspring:event_loop_delay_seconds_bucket{{le="0.001"}} {quick}
mainspring:event_loop_delay_seconds_bucket{{le="0.02"}} {all}
mainspring:event_loop_delay_seconds_bucket{{le="+Inf"}} {all}
"""


class FakeServer:
    """Speaks HTTP/1.1 by hand, in a thread of its own, so that every byte is ours to choose."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.bodies: list[dict] = []  # of requests for answers
        self.heads: list[str] = []
        self.first_token_s = self.gap_s = 0.0
        self.fault: str | None = None  # what goes wrong with each request after the first
        self.slices = 1 << 20  # bytes in a write
        self.most_at_once = self.now = 0
        self.cpu_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.port = 0

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _start(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _stop(self) -> None:
        self._server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                await self._answer(head.split()[1].decode(), body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await self._whole(writer, 200, b'{"data": [{"id": "toy"}]}')
        elif path == "/metrics":
            self.cpu_s += 1.0
            busy = 100 * self.cpu_s
            text = PAGE.format(cpu=self.cpu_s, quick=0.9 * busy, all=busy)
            await self._whole(writer, 200, text.encode())
        else:
            self.bodies.append(json.loads(body))
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            try:
                await self._stream(self.bodies[-1], writer)
            finally:
                self.now -= 1

    async def _whole(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()

    async def _stream(self, body: dict, writer: asyncio.StreamWriter) -> None:
        fault = self.fault if len(self.bodies) > 1 else None
        if fault == "refused":
            await self._whole(writer, 503, b'{"error": {"message": "full"}}')
            return
        is_chat = "messages" in body
        num_tokens = body["max_completion_tokens"] if is_chat else body["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        if is_chat:
            await self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(self.first_token_s)
        for i in range(num_tokens):
            choice = {"delta": {"content": "é"}} if is_chat else {"text": "é"}
            await self._event(writer, {"choices": [choice]})
            if fault == "cut" and i == 1:
                writer.close()
                return
            if fault == "error" and i == 1:
                await self._event(writer, {"error": {"message": "the engine is gone"}})
                break
            if i < num_tokens - 1:
                await asyncio.sleep(self.gap_s)
        if fault != "no end":
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            await self._event(writer, {"choices": [], "usage": usage})
            await self._chunk(writer, b"data: [DONE]\n\n")
        await self._write(writer, b"0\r\n\r\n")

    async def _event(self, writer: asyncio.StreamWriter, event: dict) -> None:
        text = json.dumps(event, ensure_ascii=False).encode()
        await self._chunk(writer, b"data: " + text + b"\n\n")

    async def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        await self._write(writer, b"%x\r\n%s\r\n" % (len(data), data))

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, len(data), self.slices):
            writer.write(data[start : start + self.slices])
            await writer.drain()
            await asyncio.sleep(0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def small(server: FakeServer, **more) -> LoadArgs:
    given = {"num_prompts": 6, "random_input_len": 5, "random_output_len": 4, "base_url": server.url, **more}
    return LoadArgs(**given)


def run(args: LoadArgs) -> Measurement:
    return asyncio.run(asyncio.wait_for(serve.measure(args), 20))


# -- a whole run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_figures_are_those_of_the_server(server, backend):
    """Latencies as long as the server waited, tokens as its usage says, its CPU and its loop's delay."""
    server.first_token_s, server.gap_s = 0.05, 0.02
    found = serve.figures(run(small(server, backend=backend, max_concurrency=2, goodput=["ttft:500"])))
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "toy")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (42, 24)
    assert 50 <= found["p50_ttft_ms"] < 200, "the first event of a chat has no text and is no token"
    assert 20 <= found["p50_itl_ms"] < 100
    assert 20 <= found["p50_tpot_ms"] < 100
    assert found["p50_ttft_ms"] + 60 <= found["p50_e2el_ms"]
    assert found["duration"] >= 3 * 0.11
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["output_throughput"] == pytest.approx(24 / found["duration"])
    assert found["max_concurrent_requests"] == server.most_at_once == 2
    assert server.num_connections <= 3, "kept and used again"
    assert found["server_cpu_us_per_output_token"] == pytest.approx(1e6 / 24)
    assert found["p99_server_loop_delay_ms_at_most"] == 20
    assert found["p99_client_loop_delay_ms_at_most"] > 0


def test_what_is_sent(server):
    args = small(
        server,
        backend="openai",
        header=["X-Team=red"],
        extra_body={"top_k": 3},
        random_prefix_len=3,
        random_range_ratio=0.5,
        num_warmups=2,
    )
    run(args)
    assert len(server.bodies) == 8
    assert all("x-team: red" in head.lower() for head in server.heads)
    measured = server.bodies[2:]
    assert [body["prompt"] for body in measured] == [sample.prompt for sample in make_samples(args)]
    assert len({tuple(body["prompt"][:3]) for body in measured}) == 1, "one beginning"
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 8
    for body in measured:
        assert 3 + 2 <= len(body["prompt"]) <= 3 + 8
        assert 2 <= body["max_tokens"] <= 6
        assert (body["model"], body["stream"], body["ignore_eos"], body["top_k"]) == ("toy", True, True, 3)
        assert body["stream_options"] == {"include_usage": True}


def test_a_key_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    run(small(server, num_prompts=1))
    assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)


@pytest.mark.parametrize("slices", [1, 7])
def test_any_split_of_the_bytes_is_the_same_stream(server, slices):
    server.slices = slices
    found = serve.figures(run(small(server, num_prompts=2)))
    assert (found["completed"], found["total_output_tokens"]) == (2, 8)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("refused", "HTTP 503: .*full"),
        ("cut", "IncompleteReadError|ended"),
        ("error", "in the stream: .*the engine is gone"),
        ("no end", r"without \[DONE\]"),
    ],
)
def test_failed_requests_are_told_and_not_measured(server, fault, says):
    server.fault = fault
    measured = run(small(server, num_warmups=0, max_concurrency=1))
    found = serve.figures(measured)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 5, 4)
    last = serve.table(measured).splitlines()[-1]
    assert last.startswith("5 failed; the first: ")
    assert re.search(says, last)


def test_a_server_that_refuses_the_warm_up(server):
    server.fault = "refused"
    with pytest.raises(EngineError, match=r"first request .* failed: HTTP 503"):
        run(small(server, num_warmups=3))


def test_no_server(capsys):
    """It is waited for, not silently."""
    with pytest.raises(EngineError, match=r"is not ready: .*(refused|failed)"):
        run(LoadArgs(base_url="http://127.0.0.1:9", ready_check_timeout_sec=0.4))
    told = "waiting for http://127.0.0.1:9, at most 0.4 s: "
    assert capsys.readouterr().err.count(told) == 1


def test_arrivals_are_not_delayed_by_answers(server):
    """Ten requests in a fifth of a second, each answered after a third: all are on their way at once."""
    server.first_token_s = 0.35
    found = serve.figures(run(small(server, num_prompts=10, request_rate=45.0)))
    assert found["max_concurrent_requests"] == 10
    assert 0.2 + 0.35 <= found["duration"] < 1.5


# -- its parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (25.0, 0.2)])
def test_arrivals(burstiness, spread):
    """The mean rate is the one asked for; 1 is Poisson, whose gaps spread as much as their mean."""
    args = LoadArgs(num_prompts=4001, request_rate=8.0, burstiness=burstiness)
    times = np.array(arrival_times(args, np.random.default_rng(0)))
    gaps = np.diff(times)
    assert (times[0], times[-1]) == (0.0, pytest.approx(4000 / 8))
    assert gaps.min() >= 0
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.1)


def test_samples_follow_from_the_seed():
    args = LoadArgs(num_prompts=20, random_range_ratio=0.3, request_rate=5.0)
    assert make_samples(args) == make_samples(args)
    assert make_samples(args) != make_samples(LoadArgs(num_prompts=20, random_range_ratio=0.3, seed=1))
    sample = make_samples(LoadArgs(num_prompts=1, random_input_len=9))[0]
    assert len(sample.prompt.split()) == 9


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"backend": "vllm"}, "backend 'vllm' must be one of openai, openai-chat"),
        ({"num_prompts": 0}, "num_prompts 0 must be at least 1"),
        ({"request_rate": 0.0}, "request_rate 0.0 must be above 0"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"max_concurrency": 0}, "max_concurrency 0"),
        ({"random_range_ratio": 1.0}, "random_range_ratio 1.0"),
        ({"metric_percentiles": [100.0]}, "metric_percentiles"),
        ({"header": ["nothing"]}, "header must be Name=value"),
        ({"goodput": ["speed:3"]}, "goodput 'speed:3' must be like ttft:500"),
        ({"goodput": ["ttft:fast"]}, "goodput 'ttft:fast'"),
        ({"num_warmups": -1}, "num_warmups -1"),
    ],
)
def test_mistakes(given, says):
    with pytest.raises(ConfigError, match=says):
        LoadArgs(**given)


def answer(sent_s: float, *token_times_s: float, output_tokens: int | None = None) -> Answer:
    num = len(token_times_s) if output_tokens is None else output_tokens
    return Answer(sent_s, list(token_times_s), token_times_s[-1] + 0.01, 5, num)


def test_latencies():
    one = answer(1.0, 1.5, 1.7, 2.3)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(1.3)
    assert one.gaps_s == pytest.approx([0.2, 0.6])
    assert one.tpot_s == pytest.approx(0.4)
    assert answer(0.0, 1.0).tpot_s is None
    assert answer(0.0, 1.0, 2.0, output_tokens=6).tpot_s == pytest.approx(0.2), "events may bring several"


def test_goodput_is_of_answers_that_keep_every_limit():
    answers = [answer(0.0, 0.1, 0.2, 0.3), answer(0.0, 0.1, 0.2, 0.5), answer(0.0, 0.4), answer(0.0, 0.1)]
    count = lambda *limits: serve.num_good(answers, objectives(limits))  # noqa: E731
    assert count("ttft:200") == 3
    assert count("itl:150") == 3, "each gap counts"
    assert count("ttft:200", "itl:150") == 2
    assert count("e2el:350", "tpot:150") == 2
    assert count("ttft:1") == 0


def test_most_at_once():
    assert serve.most_at_once([answer(0.0, 1.0), answer(0.5, 2.0), answer(1.5, 3.0)]) == 2
    assert serve.tokens_per_second([answer(0.0, 0.2, 0.9, 2.5), answer(0.0, 0.1)]) == [3, 0, 1]


def test_quantile_of_what_came_between():
    before = {0.001: 90.0, 0.02: 100.0, math.inf: 100.0}
    assert serve.quantile_bound(before, {0.001: 189.0, 0.02: 199.0, math.inf: 200.0}, 0.99) == 0.001
    assert serve.quantile_bound(before, {0.001: 188.0, 0.02: 199.0, math.inf: 200.0}, 0.99) == 0.02
    assert serve.quantile_bound(before, {0.001: 90.0, 0.02: 100.0, math.inf: 102.0}, 0.99) == math.inf
    assert serve.quantile_bound(before, before, 0.99) is None


def test_json_knows_no_infinity():
    late = Histogram.of((1.0,))
    late.observe(9.0)
    measured = Measurement(LoadArgs(), "toy", [answer(0.0, 0.1)], 1.0, ServerReading(), ServerReading(), late)
    found = serve.figures(measured)
    assert found["p99_client_loop_delay_ms_at_most"] == "inf"
    assert found["server_cpu_us_per_output_token"] is None
    json.dumps(found, allow_nan=False)
    assert "p99 of its delay is at most inf ms" in serve.table(measured)


def test_cpu_of_a_process():
    before_s = serve.cpu_seconds(os.getpid())
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
    assert 0.05 <= serve.cpu_seconds(os.getpid()) - before_s < 1.0
    with pytest.raises(ConfigError, match="server_pid 99999999: No such"):
        serve.cpu_seconds(99999999)


# -- the client of it ----------------------------------------------------------------------------------------


@contextmanager
def raw_server(*replies: bytes) -> Iterator[str]:
    """Each connection reads one request, gets the next reply and is closed."""
    left = list(replies)
    started = threading.Event()
    ports: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    async def body() -> None:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            started.set()
            while left:  # noqa: ASYNC110  another thread empties it
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(body()))
    thread.start()
    started.wait()
    yield f"http://127.0.0.1:{ports[0]}"
    left.clear()
    thread.join()


def fetch(*replies: bytes) -> list[tuple[int, bytes]]:
    async def body(url: str) -> list[tuple[int, bytes]]:
        async with HttpClient(url) as client:
            return [await client.fetch("GET", "/") for _ in replies]

    with raw_server(*replies) as url:
        return asyncio.run(asyncio.wait_for(body(url), 10))


def test_bodies_of_every_kind():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nTrailer: x\r\n\r\n"
    assert fetch(
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        chunked,
        b"HTTP/1.1 404 Not Found\r\n\r\nuntil the end",
        b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n",
    ) == [(200, b"hello"), (200, b"abc"), (404, b"until the end"), (204, b"")], (
        "closed ones are not used again"
    )


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"SSH-2.0-x\r\n", "not HTTP"),
        (b"", "before an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel", "inside a body"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "a chunk begins with"),
        (b"HTTP/1.1 200 " + b"x" * (1 << 21) + b"\r\n", "too long"),
    ],
)
def test_what_is_no_answer(reply, says):
    with pytest.raises(HttpError, match=says):
        fetch(reply)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_no_url(url):
    with pytest.raises(ConfigError, match="base_url"):
        HttpClient(url)


def test_events():
    async def blocks():
        for block in (b"data: a\n\nda", b"ta:b\r\n\r\n: silent\n\nevent: x\ndata: [DO", b"NE]\n\n"):
            yield block

    async def body() -> list[bytes]:
        return [data async for data in server_sent_events(blocks())]

    assert asyncio.run(body()) == [b"a", b"b", b"[DONE]"]


# -- the command ---------------------------------------------------------------------------------------------


def test_command(server, tmp_path, capsys):
    picture = tmp_path / "load.svg"
    words = ["bench", "serve", "--base-url", server.url, "--num-prompts", "5", "--random-output-len", "3"]
    words += ["--goodput", "ttft:500", "itl:50", "--metric-percentiles", "50,99", "--plot", str(picture)]
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["completed"], found["total_output_tokens"]) == (5, 15)
    assert {"request_goodput", "p99_ttft_ms", "mean_tpot_ms", "median_itl_ms", "std_e2el_ms"} <= found.keys()
    for words in (
        "toy at http://",
        "5 of 5",
        "time to first token",
        "ttft:500 itl:50",
        "us per token",
        "p99",
    ):
        assert words in err
    root = ElementTree.fromstring(picture.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"time to first token, ms", "between tokens, ms", "whole answer, ms", "tokens per second"} <= set(
        texts
    )


def test_command_with_host_and_port(server, capsys):
    assert (
        main(["bench", "serve", "--port", str(server.port), "--num-prompts", "1", "--num-warmups", "0"]) == 0
    )
    assert f"http://127.0.0.1:{server.port}" in capsys.readouterr().out


def test_command_fails_where_a_request_did(server, capsys):
    server.fault = "error"
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "3", "--seed", "4"]) == 1
    assert "3 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--goodput", "ttft"], "goodput 'ttft' must be like ttft:500"),
        (["--plot", "x.png"], r"must end in .svg"),
        (["--backend", "vllm"], "backend"),
        (["--random-input", "5"], "did you mean --random-input-len?"),
        (["--metric-percentiles", "many"], "metric-percentiles"),
    ],
)
def test_mistakes_on_the_command_line(words, says, capsys):
    assert main(["bench", "serve", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "answers", [[], [answer(0.0, 0.1)], [answer(0.1 * i, i + 1.0, i + 1.0) for i in range(600)]]
)
def test_pictures_of_little_and_much(answers):
    nothing = ServerReading()
    measured = Measurement(LoadArgs(), "<toy>", answers, 3.0, nothing, nothing, Histogram.of((1.0,)))
    ElementTree.fromstring(plot.svg(measured))
    assert "&lt;toy&gt;" in plot.svg(measured)
    assert len(plot.svg(measured)) < 100_000
    assert "<toy>" in serve.table(measured)
