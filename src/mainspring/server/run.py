"""From settings to a server that listens, and to its end.

The port is opened first; then the model is loaded, while `/livez` and `/readyz` already answer.

The end. SIGTERM or Ctrl-C: readiness goes false and new requests are refused; those that are being
answered get `shutdown_timeout` seconds; what is left then ends with finish reason abort, a last chunk and
`[DONE]`; the engine core ends; the port is closed. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.base.log import get_logger
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.chat_template import ChatTemplate
from mainspring.frontend.tracing import Tracer
from mainspring.server.app import make_app
from mainspring.server.connection import connection_class
from mainspring.server.http import cancelled
from mainspring.server.service import Service
from mainspring.server.settings import DEFAULT_HOST, ServerSettings

logger = get_logger(__name__)

BACKLOG = 2048  # connections that wait to be accepted
LAST_WORDS_S = 5.0  # for streams that were aborted, to say so to a slow reader
DESCRIPTORS = 65536


class NeverReady(Exception):
    """The server was told to end while the model was loading."""


def open_socket(settings: ServerSettings) -> socket.socket:
    """Bound and listening. Raises `ConfigError` where that is not possible."""
    host = settings.host or DEFAULT_HOST
    where = settings.uds or f"{host} port {settings.port}"
    found: socket.socket | None = None
    try:
        if settings.uds:
            Path(settings.uds).unlink(missing_ok=True)
            found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            found.bind(settings.uds)
        else:
            family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
            found = socket.socket(family, socket.SOCK_STREAM)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, settings.port))
        found.listen(BACKLOG)
    except OSError as error:
        if found is not None:
            found.close()
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror}; choose another with --host, --port or --uds"
        ) from None
    found.setblocking(False)
    return found


def url_of(settings: ServerSettings, listener: socket.socket) -> str:
    """What to give a client."""
    if settings.uds:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}{settings.root_path}"


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would end before the engine has."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(service: Service) -> uvicorn.Server:
    settings = service.settings
    return _Server(
        uvicorn.Config(
            make_app(service),
            http=connection_class(settings.request_timeout),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            root_path=settings.root_path,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=settings.ssl_cert_reqs,
            ssl_ciphers=settings.ssl_ciphers or "TLSv1",
            timeout_graceful_shutdown=1,  # what is still open has had its time
        )
    )


async def serve(
    service: Service,
    listener: socket.socket,
    open_engine: Callable[[], Coroutine[Any, Any, AsyncLLM]],
    chat_template: str | None = None,
    stop: asyncio.Event | None = None,
    when_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `stop` is set or a signal says so. `open_engine` must let the loop go on.

    Raises what `open_engine` raises, `NeverReady` if the end came before it returned.
    """
    stop = stop or asyncio.Event()
    server = make_server(service)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    probe = asyncio.create_task(service.metrics.run_probe(), name="mainspring-probe")
    with _signals(stop) as impatient:
        try:
            llm = await _load(open_engine, stop, serving)
            try:
                with _tracing(service, llm):
                    service.set_ready(llm, template_for(llm, chat_template))
                    when_ready()
                    await _first(stop.wait(), _wait(serving))
                    await _drain(service, impatient)
            finally:
                await llm.shutdown(timeout_s=0.0)  # requests have had their time
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await service.idle.wait()
        finally:
            service.set_draining()
            server.should_exit = True
            await service.close()
            await cancelled(probe)
            await serving
            for connection in list(server.server_state.connections):  # whose clients never read
                connection.transport.abort()
            await asyncio.sleep(0)


async def _load(
    open_engine: Callable[[], Coroutine[Any, Any, AsyncLLM]], stop: asyncio.Event, serving: asyncio.Task[None]
) -> AsyncLLM:
    """The engine, unless the end comes first: then its start is given up."""
    loading = asyncio.create_task(open_engine())
    try:
        await _first(_wait(loading), stop.wait(), _wait(serving))
        if not loading.done():
            raise NeverReady
        return loading.result()
    finally:
        await cancelled(loading)


@contextlib.contextmanager
def _tracing(service: Service, llm: AsyncLLM) -> Iterator[None]:
    endpoint = service.settings.otlp_traces_endpoint
    if endpoint is None:
        yield
        return
    tracer = Tracer.to(endpoint, service.model_names[0])
    llm.on_finished(tracer)
    try:
        yield
    finally:
        tracer.close()


async def _drain(service: Service, impatient: asyncio.Event) -> None:
    service.set_draining()
    timeout_s = service.settings.shutdown_timeout
    if service.num_live and timeout_s:
        logger.info("%d requests have %g s to finish", service.num_live, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await _first(service.idle.wait(), impatient.wait())
    if service.num_live:
        logger.warning("%d requests are aborted", service.num_live)


def template_for(llm: AsyncLLM, given: str | None) -> ChatTemplate | None:
    """`given`, or the model's own; a model's that is broken is told and does without."""
    tokenizer = llm.tokenizer
    if tokenizer is None or (given is None and tokenizer.chat_template is None):
        return None
    try:
        return ChatTemplate.from_tokenizer(tokenizer, given)
    except CheckpointError as error:
        if given is not None:
            raise ConfigError(f"--chat-template: {error}") from None
        logger.warning("chats are refused, for %s; --chat-template gives another", error)
        return None


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[asyncio.Event]:
    """SIGTERM and SIGINT set `stop`, and another one the event that is given."""
    impatient = asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield impatient
        return

    def note() -> None:
        (impatient if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, note)
    try:
        yield impatient
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Until one of them has returned; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancelled(*tasks)


async def _wait(future: asyncio.Future[Any]) -> None:
    """Until it is done; being cancelled leaves it alone."""
    await asyncio.wait({future})


def raise_descriptor_limit() -> None:
    """Every connection is a descriptor, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
