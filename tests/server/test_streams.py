"""What happens to answers in the middle: clients that leave, that read slowly, engines that fail, a server
that is told to end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_toys import HELLO, PATIENCE_S, fake, is_idle, running, scripted, text_script, wait_until

from mainspring.server.run import NeverReady, raise_descriptor_limit
from mainspring.server.service import Phase

ENDLESS = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True}


def first_event(response) -> bytes:
    """Reads up to the first content of a stream."""
    found = b""
    while b'"content":"' not in found.replace(b'"content":""', b""):
        line = response.readline()
        assert line, found
        found += line
    return found


# -- clients that leave --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_is_an_abort(path, stream, n):
    """Cases B019 and B020: whole or streamed, several answers, several prompts: closing the connection ends
    all of them in the engine."""
    body = ENDLESS | {"stream": stream, "n": n, "prompt": ["hello", "the"]}
    with scripted([]) as server:
        server.core.gate.clear()
        connection = server.connect()
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        count = n * (2 if path == "/v1/completions" else 1)
        wait_until(lambda: len(server.core.inner.live) == count)
        connection.close()
        wait_until(lambda: not server.core.inner.live)
        assert len(server.core.inner.aborted) == count
        wait_until(lambda: server.service.num_live == 0)
        server.core.gate.set()
        assert server.chat().status == 200


def test_leaving_in_the_middle_of_a_stream():
    """Case B020: with a core in its own process, 32 clients at once; then the engine is idle, and answers."""
    with fake({"step_s": 0.002}) as server:

        def leave(_: int) -> None:
            connection, response = server.send("POST", "/v1/chat/completions", ENDLESS | {"stream": True})
            first_event(response)
            connection.close()

        with ThreadPoolExecutor(32) as clients:
            list(clients.map(leave, range(32)))
        wait_until(lambda: is_idle(server))
        assert server.chat(max_tokens=3).status == 200


def test_interrupt_and_ask_again():
    """Case B026: a cut stream, then the same prompt: always the same answer."""
    body = ENDLESS | {"temperature": 0, "max_tokens": 30}
    with fake() as server:
        whole = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
        for _ in range(10):
            connection, response = server.send("POST", "/v1/chat/completions", body | {"stream": True})
            first_event(response)
            connection.close()
            again = server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
            assert again == whole
        wait_until(lambda: is_idle(server))


def test_a_slow_reader_delays_nobody():
    """Case B167: while one client does not read, its answer is kept, once, and others are served."""
    with scripted([]) as server:
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        body = json.dumps(ENDLESS | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        kind = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        slow.sendall(head + kind + body)
        wait_until(lambda: not server.core.inner.live and server.core.inner.seen)
        assert server.chat(max_tokens=50).json["usage"]["completion_tokens"] == 50
        received = b""
        slow.settimeout(PATIENCE_S)
        while piece := slow.recv(1 << 16):
            received += piece
        slow.close()
        assert received.count(b'"content":[{"token"') > 0
        assert received.count(b'{"token":".","logprob"') >= 400, "nothing is lost"
        assert b"data: [DONE]" in received


# -- failures ------------------------------------------------------------------------------------------------


def test_a_fault_of_one_answer_is_its_own(monkeypatch):
    """Cases B008 and B124: a status where there are no headers yet, else the last event; others go on."""
    with scripted(text_script("hello you")) as server:
        processor = server.service.llm._output_processor
        read = processor._read

        def fail(state, token_ids):
            if state.request.sampling_params.seed == 13 and len(state.token_ids) == 3:
                raise KeyError("planned")
            return read(state, token_ids)

        monkeypatch.setattr(processor, "_read", fail)
        whole = server.chat(seed=13)
        assert whole.status == 500
        assert "planned" in whole.error["message"]
        *events, error = server.chat(seed=13, stream=True).events
        assert error["error"]["code"] == 500
        assert "planned" in error["error"]["message"]
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "hello y"
        assert server.chat(seed=14, max_tokens=50).json["choices"][0]["message"]["content"] == "hello you"


def test_too_many_wait():
    """A refusal before the headers, with a time to come back, streamed or not."""
    with scripted([], engine={"max_num_queued_reqs": 1}) as server:
        server.core.gate.clear()
        connection, _ = server.send("POST", "/v1/chat/completions", ENDLESS | {"stream": True})
        for stream in (False, True):
            reply = server.chat(stream=stream)
            assert (reply.status, reply.error["type"]) == (503, "ServiceUnavailableError")
            assert int(reply.headers["retry-after"]) > 0
            assert "max_num_queued_reqs" in reply.error["message"]
        many = server.complete(["a", "b", "c"])
        assert many.status == 503
        assert len(server.core.inner.live) == 1, "nothing of what was refused stays"
        assert server.get("/health").status == server.get("/v1/models").status == 200
        connection.close()


def test_health_under_load():
    """Case B011: with 128 streams open, lists and probes answer at once."""
    with fake({"step_s": 0.005}) as server:
        opened = [server.send("POST", "/v1/chat/completions", ENDLESS | {"stream": True}) for _ in range(128)]
        begun_s = time.monotonic()
        for path in ("/health", "/readyz", "/v1/models", "/metrics", "/load"):
            assert server.get(path).status == 200
        assert time.monotonic() - begun_s < 2.0
        for connection, _ in opened:
            connection.close()
        wait_until(lambda: is_idle(server))


CROWD = """
import asyncio, json, resource, sys

resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
port = int(sys.argv[1])
body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: a\\r\\nconnection: close\\r\\n"
sent = head + b"content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body

async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    reply = await reader.read()
    writer.close()
    return reply.startswith(b"HTTP/1.1 200")

async def all_of_them():
    return await asyncio.gather(*(one() for _ in range(2000)))

print(sum(asyncio.run(all_of_them())))
"""


@pytest.mark.slow
def test_two_thousand_at_once():
    """Case B011: all of them are answered, and probes and lists meanwhile."""
    raise_descriptor_limit()
    with fake() as server:
        crowd = subprocess.Popen([sys.executable, "-c", CROWD, str(server.port)], stdout=subprocess.PIPE)
        slowest_s = 0.0
        while crowd.poll() is None:
            for path in ("/health", "/v1/models", "/metrics"):
                begun_s = time.monotonic()
                assert server.get(path).status == 200
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
            time.sleep(0.05)
        assert crowd.communicate()[0] == b"2000\n"
        assert slowest_s < 5.0, "on an idle machine less than one"
        wait_until(lambda: is_idle(server))


# -- the end -------------------------------------------------------------------------------------------------


def read_stream(server, **fields):
    body = ENDLESS | {"stream": True, "max_tokens": 40} | fields
    return server.post("/v1/chat/completions", body)


@pytest.mark.parametrize(("timeout_s", "reason"), [(30.0, "length"), (0.0, "abort")])
def test_the_end_under_64_streams(timeout_s, reason):
    """Case B031: readiness goes first; new requests are refused; with time every answer becomes whole,
    without it each ends with a last chunk that says so."""
    with fake({"step_s": 0.01}, shutdown_timeout=timeout_s) as server, ThreadPoolExecutor(64) as clients:
        count = 40 if timeout_s else 400
        streams = [clients.submit(read_stream, server, max_tokens=count) for _ in range(63)]
        whole = clients.submit(server.post, "/v1/chat/completions", ENDLESS | {"max_tokens": count})
        wait_until(lambda: server.service.num_live == 64)
        time.sleep(0.1)
        server.tell_to_end()
        if timeout_s:
            wait_until(lambda: server.service.status == "draining")
            assert server.get("/livez").json == {"status": "draining"}
            assert "shutting down" in server.get("/readyz").error["message"]
            refused = server.chat()
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) > 0
        for stream in streams:
            events = stream.result(PATIENCE_S).events
            last = events[-1]["choices"][0]
            assert last["finish_reason"] == reason
            assert sum(event["choices"][0]["finish_reason"] is not None for event in events) == 1
        reply = whole.result(PATIENCE_S)
        assert reply.status == 200, reply.body
        assert reply.json["choices"][0]["finish_reason"] == reason
    with pytest.raises(ConnectionRefusedError):
        server.get("/health")


def test_the_end_comes_after_its_time():
    """Case B031: what is not finished in time is aborted, and nothing waits longer."""
    with fake({"step_s": 0.01}, shutdown_timeout=0.3) as server, ThreadPoolExecutor(4) as clients:
        streams = [clients.submit(read_stream, server, max_tokens=480) for _ in range(4)]
        wait_until(lambda: server.service.num_live == 4)
        begun_s = time.monotonic()
        server.tell_to_end()
        reasons = [s.result(PATIENCE_S).events[-1]["choices"][0]["finish_reason"] for s in streams]
        assert reasons == ["abort"] * 4
        assert 0.25 < time.monotonic() - begun_s < 5.0


def test_a_reader_that_never_reads_does_not_hold_the_end(monkeypatch):
    monkeypatch.setattr("mainspring.server.run.LAST_WORDS_S", 0.3)
    with scripted([], chunk=50) as server:
        stuck = socket.create_connection(("127.0.0.1", server.port))
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        fields = ENDLESS | {"stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 480, "n": 20}
        body = json.dumps(fields).encode()
        stuck.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: server.core.inner.seen and not server.core.inner.live)
        begun_s = time.monotonic()
        server.end()
        assert time.monotonic() - begun_s < 5.0
        stuck.close()


def test_a_signal_while_the_model_loads():

    held = threading.Event()
    with running(lambda: held.wait(PATIENCE_S), wait=False) as server:
        assert server.get("/livez").status == 200
        server.tell_to_end()
        wait_until(lambda: server.service.phase is Phase.DRAINING)
        held.set()  # a thread cannot be cancelled; `AsyncLLM.launch` sees to it that it ends soon
        server.end()
        failure, server.failure = server.failure, None
    assert isinstance(failure, NeverReady)


# -- comments ------------------------------------------------------------------------------------------------


def test_a_silent_stream_says_that_it_lives():
    with scripted(text_script("yes"), sse_keep_alive_interval=0.05) as server:
        server.core.gate.clear()
        connection, response = server.send(
            "POST", "/v1/chat/completions", {"messages": HELLO, "stream": True}
        )
        assert response.readline() == b": keep-alive\n"
        assert response.readline() == b"\n"
        assert response.readline() == b": keep-alive\n"
        server.core.gate.set()
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()


def test_a_stream_is_told_to_proxies():
    with scripted(text_script("yes")) as server:
        headers = server.chat(stream=True).headers
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert headers["transfer-encoding"] == "chunked"


def test_steering():
    """The endpoints of `--server-dev-mode`, on a real core."""
    with fake({"step_s": 0.002}, server_dev_mode=True) as server:
        assert server.get("/is_sleeping").json == {"is_sleeping": False}
        assert server.post("/reset_prefix_cache", None).json == {"success": True}
        assert server.post("/pause?mode=nonsense", None).error["param"] == "mode"
        assert server.post("/pause?mode=wait", None).json == {"success": True}
        assert server.get("/is_paused").json == {"is_paused": True}
        assert server.post("/resume", None).json == {"success": True}
        assert server.post("/sleep?level=5", None).error["param"] == "level"
        with ThreadPoolExecutor(1) as clients:
            stream = clients.submit(read_stream, server, max_tokens=480, request_id="me")
            wait_until(lambda: server.service.num_live == 1)
            wait_until(lambda: not is_idle(server))
            assert server.post("/abort_requests", {"request_ids": ["chatcmpl-me"]}).json == {"success": True}
            assert stream.result(PATIENCE_S).events[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.post("/sleep", None).json == {"success": True}
        assert server.get("/is_sleeping").json == {"is_sleeping": True}
        assert server.post("/wake_up?tags=weights&tags=weight", None).error["param"] == "tags"
        assert server.post("/wake_up", None).json == {"success": True}
        assert server.chat().status == 200
        info = server.get("/server_info").json
        assert info["settings"]["server_dev_mode"] is True
