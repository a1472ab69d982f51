"""What stands around all endpoints: errors, keys, ids, origins, bodies, health. Over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time

import pytest
from server_toys import HELLO, PATIENCE_S, TOY, running, scripted, text_script, wait_until

from mainspring.base.errors import ConfigError, EngineDeadError
from mainspring.server.run import open_socket
from mainspring.server.settings import ServerSettings


@pytest.fixture(scope="module")
def server():
    with scripted(text_script("yes")) as found:
        yield found


# -- the envelope --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nope", None, 404),
        ("GET", "/v1/nope", None, 404),
        ("POST", "/v1/models", None, 405),
        ("GET", "/v1/models/", None, 404),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/v1/chat/completions", None, 405),
        ("PUT", "/v1/completions", {}, 405),
        ("OPTIONS", "/v1/completions", None, 405),
        ("DELETE", "/health", None, 405),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe{}", 400),
        ("POST", "/v1/chat/completions", b"\xef\xbb\xbf{}", 400),
        ("POST", "/v1/chat/completions", [1], 400),
        ("POST", "/v1/chat/completions", "text", 400),
        ("POST", "/v1/chat/completions", {"model": "toy"}, 400),
        ("POST", "/v1/completions", {"model": "zz", "prompt": "x"}, 404),
        ("POST", "/tokenize", {"model": "zz", "prompt": "x"}, 404),
        ("POST", "/tokenize", {}, 400),
        ("POST", "/detokenize", {}, 400),
        ("POST", "/detokenize", {"tokens": [-1]}, 400),
        ("POST", "/detokenize", {"tokens": [10**6]}, 400),
        ("POST", "/v1/responses", {}, 400),
        ("GET", "/reset_prefix_cache", None, 404),
    ],
)
def test_one_envelope(server, method, path, body, status):
    """Case B142: whatever goes wrong has the same form, and an id."""
    reply = server.ask(method, path, body)
    assert reply.status == status
    assert reply.headers["x-request-id"]
    assert "Traceback" not in reply.error["message"]
    if status == 405:
        assert reply.headers["allow"]


def test_types_name_the_status(server):
    assert server.get("/nope").error["type"] == "NotFoundError"
    error = server.complete(model="zz").error
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "toy" in error["message"], "what would be right"
    assert server.complete(5).error["type"] == "BadRequestError"


def test_what_is_no_json_is_refused_by_its_kind(server):
    body = json.dumps({"prompt": "x"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert server.post("/v1/completions", body, content_type=kind).error["param"] == "content-type"
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON"):
        assert server.post("/v1/completions", body, content_type=kind).status == 200
    assert server.post("/v1/completions", body).status == 200, "nothing was said of it"


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "a\ud83e"}',
        rb'{"prompt": "\ud83e b"}',
        rb'{"prompt": "x", "stop": "\udc00"}',
        rb'{"prompt": "x", "user": "\ud83e"}',
        rb'{"prompt": "x", "request_id": "\ud83e"}',
        rb'{"messages": [{"role": "user", "content": "\ud83e"}]}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a\xc0\x80"}',
    ],
)
def test_text_that_is_none(server, body):
    """Case B146: half of a character and bytes that are no UTF-8 are a 400; NUL is as good as any."""
    path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
    assert server.post(path, body, content_type="application/json").status == 400
    server.post(path, body, content_type="application/json").error  # noqa: B018
    assert server.complete("a\0b").status == 200


def test_half_of_a_character_is_said_to_be_one(server):
    """As an escape it is JSON, and no text; what ends too early is something else."""
    path = "/v1/completions"
    half = server.post(path, rb'{"prompt": "\ud83d\ude00 \ud83d"}', content_type="application/json")
    assert r"\ud83d is half of a surrogate pair" in half.error["message"]
    early = server.post(path, rb'{"prompt": "\ud83d\ude00', content_type="application/json")
    assert "truncated" in early.error["message"]


def test_errors_are_small(server):
    """Case B143: a mistake in something large is told in few words, and soon."""
    begun_s = time.monotonic()
    for body in (
        {"messages": [{"role": 5}] * 5000},
        {"messages": [{"role": "user", "content": [{"type": "x" * 10**6}]}]},
        {"messages": "x" * 10**6},
        {"model": "x" * 10**6, "messages": HELLO},
        {"messages": HELLO, "stop": ["x" * 10**6]},
        {"messages": HELLO, "response_format": {"type": "x" * 10**6}},
    ):
        reply = server.post("/v1/chat/completions", body)
        assert reply.status in (400, 404)
        assert len(reply.body) < 1500
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert server.post("/v1/chat/completions", deep).status == 400
    nested: object = "x"
    for _ in range(500):
        nested = [nested]
    reply = server.chat(chat_template_kwargs={"a": nested})
    assert (reply.status, reply.error["param"]) == (400, "body")
    assert time.monotonic() - begun_s < 5.0


def test_unknown_fields_are_told_once(server, caplog):
    with caplog.at_level(logging.WARNING, logger="mainspring"):
        for _ in range(3):
            assert server.chat(no_such_field_a=1, no_such_field_b=2).status == 200
    told = [record.getMessage() for record in caplog.records if "no_such_field" in record.getMessage()]
    assert len(told) == 2


# -- ids -----------------------------------------------------------------------------------------------------


def test_request_ids(server):
    """Case B164: a client's id comes back and is part of the answer's; what cannot be an id is none."""
    reply = server.chat()
    assert reply.headers["x-request-id"]
    given = server.post("/v1/chat/completions", {"messages": HELLO}, x_request_id="abc-123")
    assert (given.headers["x-request-id"], given.json["id"]) == ("abc-123", "chatcmpl-abc-123")
    assert server.chat(request_id="my-own").json["id"] == "chatcmpl-my-own"
    for odd in ("x" * 257, "a b", "a\tb", "é"):
        reply = server.post("/v1/chat/completions", {"messages": HELLO}, x_request_id=odd)
        assert reply.status == 200
        assert reply.headers["x-request-id"] != odd
    for odd in ("x" * 257, "a\nb", "../ x", "é", "\0"):
        assert server.chat(request_id=odd).error["param"] == "request_id"
    assert server.get("/nope", x_request_id="of-an-error").headers["x-request-id"] == "of-an-error"


def test_one_id_for_two_requests(server):
    """Case B164: both are answered, each with its own text."""
    server.core.gate.clear()
    found = {}

    def ask(prompt: str) -> None:
        found[prompt] = server.complete(prompt, request_id="same", max_tokens=3, n=2)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("hello", "the ab")]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.core.inner.live) == 4)
    server.core.gate.set()
    for thread in threads:
        thread.join()
    assert {reply.status for reply in found.values()} == {200}
    assert [found[p].json["usage"]["prompt_tokens"] for p in ("hello", "the ab")] == [
        len(TOY.encode(p)) for p in ("hello", "the ab")
    ]


# -- keys ----------------------------------------------------------------------------------------------------


def test_keys():
    """Every path that gives or takes data is guarded, in either header; probes are not."""
    with scripted(api_key=["k1", "k2"]) as server:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/toy"),
            ("GET", "/nope"),
        ):
            body = {} if method == "POST" else None
            for headers in (
                {},
                {"authorization": "Bearer nope"},
                {"authorization": "Bearer"},
                {"authorization": "Basic k1"},
                {"authorization": "k1"},
                {"x_api_key": "nope"},
                {"x_api_key": ""},
                {"authorization": "Bearer k1k2"},
            ):
                reply = server.ask(method, path, body, **headers)
                assert reply.status == 401, (path, headers)
                assert reply.error["type"] == "AuthenticationError"
                assert reply.headers["www-authenticate"] == "Bearer"
            for headers in (
                {"authorization": "Bearer k1"},
                {"authorization": "bearer k2"},
                {"x_api_key": "k2"},
            ):
                assert server.ask(method, path, body, **headers).status != 401
        for path in (
            "/health",
            "/livez",
            "/readyz",
            "/ping",
            "/version",
            "/load",
            "/metrics",
            "/openapi.json",
        ):
            assert server.get(path).status == 200, path


def test_a_key_that_is_wrong_is_told_without_reading_the_body():
    with scripted(api_key=["k"]) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", str(10**9))
        connection.endheaders()
        assert connection.getresponse().status == 401
        connection.close()


# -- origins -------------------------------------------------------------------------------------------------


def test_pages_of_other_origins():
    with scripted(allowed_origins=["https://a.example"]) as server:
        for path in ("/v1/models", "/nope"):
            assert server.get(path, origin="https://a.example").headers["access-control-allow-origin"] == (
                "https://a.example"
            )
            assert "access-control-allow-origin" not in server.get(path, origin="https://b.example").headers
        asked = server.ask(
            "OPTIONS",
            "/v1/chat/completions",
            origin="https://a.example",
            access_control_request_method="POST",
            access_control_request_headers="authorization",
        )
        assert asked.status == 200
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()


def test_all_origins_by_default(server):
    assert server.get("/v1/models", origin="https://a.example").headers["access-control-allow-origin"] == "*"


# -- bodies --------------------------------------------------------------------------------------------------


def test_bodies_have_a_bound():
    """Case B167: more than that is refused, told or not beforehand; others do not notice."""
    with scripted(max_request_bytes=1000) as server:
        assert server.complete("x" * 900, truncate_prompt_tokens=5).status == 200
        reply = server.complete("x" * 1000)
        assert (reply.status, reply.error["type"]) == (413, "PayloadTooLargeError")
        connection = server.connect()
        connection.request(
            "POST",
            "/v1/completions",
            iter([b"x" * 600] * 2),
            encode_chunked=True,
            headers={"transfer-encoding": "chunked", "content-type": "application/json"},
        )
        assert connection.getresponse().status == 413
        connection.close()
        assert server.complete().status == 200


def test_bodies_have_a_time():
    """Case B167: a body that trickles is not waited for."""
    with scripted(request_timeout=0.2) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n"
        connection.sendall(head + b"{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
        connection.close()
        wait_until(lambda: server.service.num_live == 0)
        assert server.complete().status == 200


def test_heads_have_a_bound_and_a_time():
    """Case B167: before there is a request, nobody fills the memory or holds a connection for ever."""
    with scripted(request_timeout=0.3) as server:

        def answer_to(*pieces: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
                with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(0.02)
                with contextlib.suppress(ConnectionError):
                    return connection.recv(1000)
                return b"reset"

        line = b"GET /health HTTP/1.1\r\nhost: a\r\n"
        assert answer_to(line, b"a: " + b"b" * 30_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        endless = answer_to(line, *[b"a: " + b"b" * 30_000 + b"\r\n"] * 6)
        assert endless == b"reset" or endless.startswith(b"HTTP/1.1 431")
        slow = answer_to(line)
        assert slow.startswith(b"HTTP/1.1 408")
        assert json.loads(slow.partition(b"\r\n\r\n")[2])["error"]["code"] == 408
        assert answer_to() == b""
        other = answer_to(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert json.loads(other.partition(b"\r\n\r\n")[2])["error"]["type"] == "BadRequestError"
        # many on one connection, each in two pieces: a head's time and size are its own
        pieces = [b"HEAD /version HTTP/1.1\r\n", b"host: a\r\na: " + b"b" * 9000 + b"\r\n\r\n"] * 12
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            for piece in pieces:
                connection.sendall(piece)
                if b"host" in piece:
                    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
                else:
                    time.sleep(0.03)
        assert server.complete().status == 200


def test_a_client_that_leaves_in_the_middle_of_its_body(server):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
    wait_until(lambda: server.service.num_live == 1)
    connection.close()
    wait_until(lambda: server.service.num_live == 0)
    assert server.complete().status == 200


# -- what is told --------------------------------------------------------------------------------------------


def test_models():
    with scripted(served_model_name=["first", "org/second"]) as server:
        listed = server.get("/v1/models").json
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["first", "org/second"]
        card = server.get("/v1/models/org/second").json
        assert (card["id"], card["object"], card["root"], card["max_model_len"]) == (
            "org/second",
            "model",
            "toy",
            512,
        )
        for name, shown in ((None, "first"), ("", "first"), ("first", "first"), ("org/second", "org/second")):
            assert server.chat(model=name).json["model"] == shown
        assert server.chat(model="toy").status == 404


def test_tokens(server):
    ids = TOY.encode("the hello")
    reply = server.post("/tokenize", {"prompt": "the hello", "return_token_strs": True}).json
    assert (reply["tokens"], reply["count"], reply["max_model_len"]) == (ids, len(ids), 512)
    assert reply["token_strs"] == [TOY.id_to_token(i) for i in ids]
    assert server.post("/detokenize", {"tokens": ids}).json == {"prompt": "the hello"}
    chat = server.post("/tokenize", {"messages": HELLO}).json
    assert chat["tokens"] == TOY.encode("user: hello\n")
    assert chat["token_strs"] is None
    assert server.chat().json["usage"]["prompt_tokens"] == chat["count"]
    assert server.post("/tokenize", {"messages": HELLO, "prompt": "x"}).status == 400
    assert server.post("/tokenize", {"messages": HELLO, "tools": [{}]}).error["param"] == "tools"


def test_head(server):
    for path in ("/health", "/v1/models", "/version"):
        assert server.ask("HEAD", path).status == 200


def test_small_ones(server):
    assert server.get("/health").body == b""
    assert server.get("/version").json.keys() == {"version"}
    assert server.get("/load").json == {"server_load": 0}
    page = server.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert b'vllm:request_success_total{engine="0",finished_reason="stop",model_name="toy"}' in page.body
    assert b'http_requests_total{handler="/v1/chat/completions"' in page.body


def test_load_counts_what_is_being_answered(server):
    server.core.gate.clear()
    thread = threading.Thread(target=server.chat)
    thread.start()
    wait_until(lambda: server.get("/load").json == {"server_load": 1})
    server.core.gate.set()
    thread.join()
    wait_until(lambda: server.get("/load").json == {"server_load": 0})


def test_load_report(server):
    """ORCA's header, for balancers."""
    body = {"messages": HELLO, "max_tokens": 1}
    found = server.post("/v1/chat/completions", body, endpoint_load_metrics_format="json")
    kind, _, figures = found.headers["endpoint-load-metrics"].partition(" ")
    assert kind == "JSON"
    assert json.loads(figures)["named_metrics"].keys() == {"num_requests_waiting", "kv_cache_usage_perc"}
    found = server.post("/v1/chat/completions", body, endpoint_load_metrics_format="text")
    assert found.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.")
    assert "endpoint-load-metrics" not in server.post("/v1/chat/completions", body).headers


def test_steering_is_off_by_default(server):
    for path in ("/sleep", "/reset_prefix_cache", "/abort_requests"):
        assert server.post(path, {}).status == 404
    assert server.get("/tokenizer_info").status == 404


def test_tokenizer_info():
    with scripted(enable_tokenizer_info_endpoint=True) as server:
        info = server.get("/tokenizer_info").json
        assert (info["eos_token"], info["bos_token"]) == ("<eos>", "<bos>")
        assert info["chat_template"] == TOY.chat_template


# -- phases --------------------------------------------------------------------------------------------------


def test_the_port_is_open_while_the_model_loads():
    """Probes tell loading from broken; requests are refused with a time to come back."""
    go_on = threading.Event()

    def load():
        assert go_on.wait(PATIENCE_S)
        raise ConfigError("no such setting")

    with running(load, wait=False) as server:
        assert server.get("/livez").json == {"status": "loading"}
        for path in ("/readyz", "/health", "/v1/models"):
            reply = server.get(path)
            assert reply.status == 503
            assert "loading" in reply.error["message"]
        reply = server.chat()
        assert (reply.status, reply.error["type"]) == (503, "ServiceUnavailableError")
        assert int(reply.headers["retry-after"]) > 0
        assert server.get("/version").status == server.get("/metrics").status == 200
        go_on.set()
        server.is_ready.wait(PATIENCE_S)
        failure, server.failure = server.failure, None
    assert isinstance(failure, ConfigError), "it ends the server"


def test_ready(server):
    assert server.get("/livez").json == server.get("/readyz").json == {"status": "ready"}


def test_a_dead_engine_has_a_status_of_its_own():
    """Cases B001 and B002: who waits is told the cause, and so is everybody who asks later."""
    with scripted() as server:
        server.core.gate.clear()
        waiting = server.send("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True})
        replies: list = []
        thread = threading.Thread(target=lambda: replies.append(server.chat()))
        thread.start()
        wait_until(lambda: len(server.core.inner.live) == 2)
        server.core.inner.fail_with = EngineDeadError("the cause")
        thread.join()
        assert (replies[0].status, replies[0].error["message"]) == (503, "the cause")
        assert waiting[1].status == 200
        error, done, _ = waiting[1].read().split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the cause"
        assert done == b"data: [DONE]"
        waiting[0].close()
        for _ in range(3):
            for path in ("/health", "/livez", "/readyz", "/v1/models", "/ping"):
                reply = server.get(path)
                assert (reply.status, "the cause" in reply.error["message"]) == (503, True), path
            assert server.chat().status == 503
        assert server.get("/metrics").status == 200


def test_a_stuck_engine_turns_unhealthy_and_well_again():
    """Case B004: by the age of a question that is not answered, and at once."""
    with scripted(health_timeout=0.1) as server:
        stuck = threading.Event()
        call = server.core.call

        async def wait(command):
            while stuck.is_set():  # noqa: ASYNC110  the test acts from its own thread
                await asyncio.sleep(0.005)
            return await call(command)

        server.core.call = wait
        assert server.get("/health").status == 200
        stuck.set()
        wait_until(lambda: server.get("/health").status == 503)
        assert "not answered" in server.get("/readyz").error["message"]
        stuck.clear()
        wait_until(lambda: server.get("/health").status == 200)


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 70000}, "port 70000"),
        ({"ssl_keyfile": "a"}, "ssl_certfile"),
        ({"uds": "a", "host": "b"}, "uds or host"),
        ({"max_request_bytes": 0}, "max_request_bytes"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"api_key": [""]}, "api_key"),
        ({"override_generation_config": {"beams": 5}}, "'beams'"),
    ],
)
def test_settings_are_judged(given, words):
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**given)


def test_a_port_that_is_taken(server):
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1 port {server.port}: .*--port"):
        open_socket(ServerSettings(port=server.port))


def test_a_unix_socket(tmp_path):
    with scripted(uds=str(tmp_path / "s")) as _:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(tmp_path / "s"))
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_root_path():
    """Behind a proxy that shows the server under a path, which it takes away or leaves there."""
    with scripted(root_path="/llm", api_key=["k"]) as server:
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", x_api_key="k").status == 200
        assert server.get("/llm/v1/models").status == 401
        assert server.get("/llm/v1/models", x_api_key="k").status == 200
        assert server.get("/llm/health").status == 200
        for path in ("/llm/llm/v1/models", "/llmv1/models", "/llm"):
            assert server.get(path).status == 401
            assert server.get(path, x_api_key="k").status == 404
