"""The routes, and what stands around all of them.

From the outside in: CORS; then the gate, which gives every request an id, a line in the log and the one error
envelope, and lets in who has a key; then the routes. Which paths need no key is a list (`OPEN`); all others
do, also those that do not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import cache, partial
from logging import DEBUG, INFO
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mainspring.base.log import get_logger
from mainspring.server import generating, informing, steering
from mainspring.server.errors import ApiError, as_api_error
from mainspring.server.http import ClientGone, JSONReply
from mainspring.server.openapi import document
from mainspring.server.reading import SAFE_ID
from mainspring.server.replies import (
    ChatChunk,
    ChatReply,
    CompletionChunk,
    CompletionReply,
    DetokenizeReply,
    Document,
    Health,
    Load,
    ModelCard,
    ModelList,
    TokenizeReply,
    Version,
)
from mainspring.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from mainspring.server.service import Service
from mainspring.server.settings import ServerSettings

logger = get_logger(__name__)

App = Callable[[Any, Any, Any], Awaitable[None]]
CLIENT_GONE = 499  # nobody reads it; it is for the log


class Entry(NamedTuple):
    """A path, what answers there, and what is said of it in the API's document."""

    method: str
    path: str
    endpoint: Callable[[Service, Request], Awaitable[Response]]
    takes: type[msgspec.Struct] | None = None  # the body
    gives: tuple[type[msgspec.Struct], ...] = ()  # the answer; then what a stream is made of
    gives_text: bool = False
    needs_key: bool = True
    is_work: bool = False  # counts as load, and is waited for at the end
    fails: tuple[int, ...] = ()  # statuses beside those that follow from the rest


work = partial(Entry, is_work=True)
open_to_all = partial(Entry, needs_key=False)
steer = partial(Entry, fails=(400, 500, 503))

ENTRIES = [
    work(
        "POST", "/v1/chat/completions", generating.create_chat_completion, ChatRequest, (ChatReply, ChatChunk)
    ),
    work(
        "POST",
        "/v1/completions",
        generating.create_completion,
        CompletionRequest,
        (CompletionReply, CompletionChunk),
    ),
    work("POST", "/tokenize", informing.tokenize, TokenizeRequest, (TokenizeReply,)),
    work("POST", "/detokenize", informing.detokenize, DetokenizeRequest, (DetokenizeReply,)),
    Entry("GET", "/v1/models", informing.list_models, None, (ModelList,), fails=(503,)),
    Entry("GET", "/v1/models/{model:path}", informing.retrieve_model, None, (ModelCard,), fails=(404, 503)),
    open_to_all("GET", "/health", informing.health, fails=(503,)),
    open_to_all("GET", "/ping", informing.health, fails=(503,)),
    open_to_all("GET", "/livez", informing.is_live, None, (Health,), fails=(503,)),
    open_to_all("GET", "/readyz", informing.is_ready, None, (Health,), fails=(503,)),
    open_to_all("GET", "/version", informing.version, None, (Version,)),
    open_to_all("GET", "/load", informing.load, None, (Load,)),
    open_to_all("GET", "/metrics", informing.metrics, gives_text=True),
]
OPENAPI = open_to_all("GET", "/openapi.json", informing.openapi, gives=(Document,))
TOKENIZER_INFO = Entry(
    "GET", "/tokenizer_info", steering.tokenizer_info, None, (steering.TokenizerInfo,), fails=(400, 503)
)
STEERING = [
    steer("POST", "/reset_prefix_cache", steering.reset_prefix_cache, None, (steering.Success,)),
    steer("POST", "/sleep", steering.sleep, None, (steering.Success,)),
    steer("POST", "/wake_up", steering.wake_up, None, (steering.Success,)),
    steer("GET", "/is_sleeping", steering.is_sleeping, None, (steering.IsSleeping,)),
    steer("POST", "/pause", steering.pause, None, (steering.Success,)),
    steer("POST", "/resume", steering.resume, None, (steering.Success,)),
    steer("GET", "/is_paused", steering.is_paused, None, (steering.IsPaused,)),
    steer("POST", "/abort_requests", steering.abort_requests, steering.AbortRequests, (steering.Success,)),
    steer("GET", "/server_info", steering.server_info, None, (steering.ServerInfo,)),
]


def entries(settings: ServerSettings) -> list[Entry]:
    """Those that the settings allow."""
    found = list(ENTRIES)
    if settings.enable_tokenizer_info_endpoint:
        found.append(TOKENIZER_INFO)
    if settings.server_dev_mode:
        found += STEERING
    return found if settings.disable_fastapi_docs else [*found, OPENAPI]


def make_app(service: Service) -> App:
    served = entries(service.settings)
    service.describe = cache(partial(document, served, bool(service.settings.api_key)))
    handlers = [(_handler(service, entry), entry) for entry in served]
    routes = [Route(entry.path, handler, methods=[entry.method]) for handler, entry in handlers]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    inner.router.redirect_slashes = False
    settings = service.settings
    return CORSMiddleware(
        Gate(inner, service, served, {handler: entry.path for handler, entry in handlers}),
        allow_origins=settings.allowed_origins or ["*"],
        allow_methods=settings.allowed_methods or ["*"],
        allow_headers=settings.allowed_headers or ["*"],
        allow_credentials=settings.allow_credentials,
        expose_headers=["x-request-id"],
    )


def error_reply(error: BaseException) -> Response:
    failure = as_api_error(error)
    return JSONReply(failure.reply, failure.status, failure.headers)


def _handler(service: Service, entry: Entry) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await entry.endpoint(service, request)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return error_reply(error)

    return handle


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405, from the router."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not possible at {request.url.path[:200]}",
    }.get(error.status_code, error.detail)
    return error_reply(ApiError(error.status_code, words, headers=dict(error.headers or {})))


class Gate:
    """Around all routes, on plain ASGI: it sees where a reply begins and that it has ended."""

    def __init__(self, inner: App, service: Service, served: list[Entry], paths: dict[object, str]) -> None:
        """`paths`: of each route's endpoint, as the route was written."""
        self._inner = inner
        self._service = service
        self._paths = paths
        self._keys = [_hashed(key) for key in service.settings.api_key]
        self._open = {entry.path for entry in served if not entry.needs_key}
        self._work = {(entry.method, entry.path) for entry in served if entry.is_work}
        settings = service.settings
        self._logs = not settings.disable_uvicorn_access_log
        self._silent = set(settings.disable_access_log_for_endpoints)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        passage = _Passage(Headers(scope=scope), receive, send)
        is_work = (scope["method"], path) in self._work
        if is_work:
            self._service.begin()
        try:
            app = self._inner if self._may_enter(path, passage.headers) else _unauthorized
            await app(scope, passage.receive, passage.send)
        except Exception as error:
            if passage.status:  # a reply has begun: what is left is to end the connection
                raise
            await error_reply(error)(scope, passage.receive, passage.send)
        finally:
            if is_work:
                self._service.end()
            self._record(scope, path, passage)

    def _record(self, scope: Any, path: str, passage: _Passage) -> None:
        duration_s = time.monotonic() - passage.started_s
        self._service.metrics.http.record(
            self._paths.get(scope.get("endpoint")),
            scope["method"],
            passage.status or CLIENT_GONE,
            duration_s,
            passage.request_bytes,
            passage.response_bytes,
        )
        if self._logs and path not in self._silent:
            level = DEBUG if path in self._open else INFO  # probes come every few seconds
            where = scope["raw_path"][:200].decode("latin-1")
            logger.log(
                level,
                "%s %s %d %.1f ms, %s",
                scope["method"],
                where,
                passage.status,
                duration_s * 1e3,
                passage.request_id,
            )

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if not self._keys or path in self._open:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = [token.strip()] if scheme.lower() == "bearer" else []
        offered.append(headers.get("x-api-key", ""))
        found = False
        for key in map(_hashed, filter(None, offered)):
            for known in self._keys:  # all of them: the time must not tell which one was near
                found |= hmac.compare_digest(key, known)
        return found


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def _unauthorized(scope: Any, receive: Any, send: Any) -> None:
    error = ApiError(
        401,
        "a key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        headers={"www-authenticate": "Bearer"},
    )
    await error_reply(error)(scope, receive, send)


class _Passage:
    """One request through the gate: its id, and what went in and out."""

    def __init__(self, headers: Headers, receive: Any, send: Any) -> None:
        given = headers.get("x-request-id", "")
        self.headers = headers
        self.request_id = given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        self.status = 0
        self.started_s = time.monotonic()
        self.request_bytes = self.response_bytes = 0
        self._receive, self._send = receive, send

    async def receive(self) -> Any:
        message = await self._receive()
        self.request_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        else:
            self.response_bytes += len(message.get("body", b""))
        await self._send(message)
