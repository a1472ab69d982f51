"""A server in a thread of its own, on a free port of the loopback, in front of a core that says what it is
told to say (`scripted`) or of a real one with a fake model, in its own process (`fake`). And a client that
hides nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "frontend"))

from frontend_toys import FACTS, TOY, ScriptedClient

from mainspring.base.config import EngineArgs, resolve
from mainspring.base.messages import EngineCoreOutputs, GetStats, SchedulerStats
from mainspring.engine.launch import CoreProcess
from mainspring.engine.mp_client import AsyncMPClient
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.server.run import open_socket, serve
from mainspring.server.service import Service
from mainspring.server.settings import ServerSettings

PATIENCE_S = 20.0  # nothing in here may take so long
HELLO = [{"role": "user", "content": "hello"}]


# -- a client ------------------------------------------------------------------------------------------------


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Asserts the envelope."""
        assert self.headers["content-type"] == "application/json"
        assert self.json.keys() == {"error"}, self.body
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] in (self.status, "context_length_exceeded")
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended properly, without `[DONE]`. Asserts the framing."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = self.body.decode()
        assert text.endswith("data: [DONE]\n\n")
        frames = text.split("\n\n")[:-2]
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames), text
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@dataclass
class Address:
    """Where a server is, and what is known of it from outside."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def send(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The reply as it begins. `body`: JSON, or bytes as they are; `_` in a header's name is a hyphen."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("content-type", "application/json")
        connection = self.connect()
        connection.request(method, path, body, self.headers | given)
        return connection, connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        connection, response = self.send(method, path, body, **headers)
        try:
            named = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, named, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.ask("POST", path, body, **headers)

    def chat(self, messages: Any = None, **fields: Any) -> Reply:
        given = {"messages": HELLO if messages is None else messages, "max_tokens": 5}
        return self.post("/v1/chat/completions", given | fields)

    def complete(self, prompt: Any = "hello", **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 5} | fields)


def wait_until(is_true: Callable[[], Any], what: str = "it") -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := is_true()):
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.005)
    return found


# -- a server ------------------------------------------------------------------------------------------------


class AsyncScriptedClient:
    """A `ScriptedClient` whose steps are made while somebody reads, if `gate` is open."""

    def __init__(self, inner: ScriptedClient) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()

    async def add_request(self, request: Any) -> None:
        self.inner.add_request(request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        self.inner.abort_requests(request_ids)

    async def call(self, command: Any) -> Any:
        return SchedulerStats() if isinstance(command, GetStats) else self.inner.call(command)

    async def get_output(self) -> EngineCoreOutputs:
        await asyncio.sleep(0)
        while self.inner.fail_with is None and not (self.inner.live and self.gate.is_set()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # a test acts from its own thread
        return self.inner.get_output()

    async def shutdown(self) -> None:
        self.inner.shutdown()


class Running(Address):
    """A server that runs in a thread, and its insides."""

    def __init__(self, settings: ServerSettings, open_engine: Callable[[], AsyncLLM], **options: Any) -> None:
        listener = open_socket(settings)
        super().__init__(listener.getsockname()[1])
        self.failure: BaseException | None = None
        self.is_ready = threading.Event()
        self._begun = threading.Event()
        self._settings, self._open_engine, self._options = settings, open_engine, options
        self._thread = threading.Thread(target=self._run, args=(listener,))
        self._thread.start()
        assert self._begun.wait(PATIENCE_S)

    def _run(self, listener: Any) -> None:
        async def main() -> None:
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self.service = Service(self._settings, "toy")
            self._begun.set()
            await serve(
                self.service,
                listener,
                self._open,
                stop=self._stop,
                when_ready=self.is_ready.set,
                **self._options,
            )

        try:
            asyncio.run(main())
        except BaseException as error:
            self.failure = error
        finally:
            self._begun.set()
            self.is_ready.set()

    async def _open(self) -> AsyncLLM:
        return await asyncio.to_thread(self._open_engine)

    def tell_to_end(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def end(self) -> None:
        if self._thread.is_alive():
            self.tell_to_end()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not end"


@contextmanager
def running(
    open_engine: Callable[[], AsyncLLM], *, wait: bool = True, template=None, **given
) -> Iterator[Running]:
    """At the end it is stopped, and what went wrong in it is raised."""
    server = Running(ServerSettings(**{"port": 0} | given), open_engine, chat_template=template)
    try:
        if wait:
            assert server.is_ready.wait(PATIENCE_S)
        yield server
    finally:
        server.end()
    if server.failure is not None:
        raise server.failure


def echo(request: Any) -> list[int]:
    """Says the prompt backwards."""
    return request.prompt_token_ids[::-1]


def text_script(text: str, end: bool = True) -> list[int]:
    return TOY.encode(text) + ([TOY.eos_token_id] if end else [])


@contextmanager
def scripted(
    script: Any = echo, *, chunk: int = 1, engine: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Running]:
    """`server.core` is the scripted core; `engine`: arguments of `AsyncLLM`."""
    core = AsyncScriptedClient(ScriptedClient(script, chunk=chunk))
    inputs = InputProcessor(FACTS, core.inner.max_model_len, TOY)
    make = partial(
        AsyncLLM, lambda: core, inputs, OutputProcessor(TOY, log_stats=True), TOY, **(engine or {})
    )
    with running(make, **settings) as server:
        server.core = core
        yield server


FAKE = "mainspring.testing.fake_executor:make_fake"
WATCHED = "mainspring.testing.process_executor:ProcessExecutor"
LIMITS = {"num_gpu_blocks_override": 2048, "max_model_len": 512, "max_num_batched_tokens": 512}


def open_fake(executor_args: dict[str, Any] | None = None, **given: Any) -> AsyncLLM:
    """An engine with a core in its own process; `executor_args` choose the executor that can be watched."""
    args = EngineArgs(executor=FAKE if executor_args is None else WATCHED, **LIMITS | given)
    config = msgspec.structs.replace(resolve(args, FACTS), executor_args=executor_args or {})
    process = CoreProcess(config)
    return AsyncLLM(
        partial(AsyncMPClient, process),
        InputProcessor(FACTS, process.ready.max_model_len, TOY),
        OutputProcessor(TOY, log_stats=True),
        TOY,
        release=process.close,
    )


@contextmanager
def fake(executor_args: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    with running(partial(open_fake, executor_args), **settings) as server:
        yield server


def is_idle(server: Running) -> bool:
    """Neither server nor core remembers a request (an abort may be on its way)."""
    stats = asyncio.run_coroutine_threadsafe(server.service.llm.get_stats(), server.loop).result(PATIENCE_S)
    held = (stats.num_running, stats.num_waiting, stats.num_parked, stats.kv_cache_usage)
    return held == (0, 0, 0, 0.0) and server.service.num_live == 0
