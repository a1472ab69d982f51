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
from logging import DEBUG, INFO
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mainspring.base.log import get_logger
from mainspring.server import generating, informing
from mainspring.server.errors import ApiError, as_api_error
from mainspring.server.http import ClientGone, JSONReply
from mainspring.server.reading import SAFE_ID
from mainspring.server.service import Service

logger = get_logger(__name__)

App = Callable[[Any, Any, Any], Awaitable[None]]
CLIENT_GONE = 499  # nobody reads it; it is for the log


class Entry(NamedTuple):
    """A path and what answers there."""

    method: str
    path: str
    endpoint: Callable[[Service, Request], Awaitable[Response]]
    needs_key: bool = True
    is_work: bool = False  # counts as load, and is waited for at the end


ENTRIES = [
    Entry("POST", "/v1/chat/completions", generating.create_chat_completion, is_work=True),
    Entry("POST", "/v1/completions", generating.create_completion, is_work=True),
    Entry("POST", "/tokenize", informing.tokenize, is_work=True),
    Entry("POST", "/detokenize", informing.detokenize, is_work=True),
    Entry("GET", "/v1/models", informing.list_models),
    Entry("GET", "/v1/models/{model:path}", informing.retrieve_model),
    Entry("GET", "/health", informing.health, needs_key=False),
    Entry("GET", "/livez", informing.is_live, needs_key=False),
    Entry("GET", "/readyz", informing.is_ready, needs_key=False),
    Entry("GET", "/ping", informing.health, needs_key=False),
    Entry("GET", "/version", informing.version, needs_key=False),
    Entry("GET", "/load", informing.load, needs_key=False),
]


def entries(service: Service) -> list[Entry]:
    """Those that the settings allow."""
    return ENTRIES


def make_app(service: Service) -> App:
    served = entries(service)
    routes = [Route(e.path, _handler(service, e), methods=[e.method]) for e in served]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    inner.router.redirect_slashes = False
    settings = service.settings
    return CORSMiddleware(
        Gate(inner, service, served),
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

    def __init__(self, inner: App, service: Service, served: list[Entry]) -> None:
        self._inner = inner
        self._service = service
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
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        status, started_s = 0, time.monotonic()

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        is_work = (scope["method"], path) in self._work
        if is_work:
            self._service.begin()
        try:
            app = self._inner if self._may_enter(path, headers) else _unauthorized
            await app(scope, receive, send_with_id)
        except Exception as error:
            if status:  # a reply has begun: what is left is to end the connection
                raise
            await error_reply(error)(scope, receive, send_with_id)
        finally:
            if is_work:
                self._service.end()
            if self._logs and path not in self._silent:
                took_ms = (time.monotonic() - started_s) * 1e3
                where = scope["raw_path"][:200].decode("latin-1")
                level = DEBUG if path in self._open else INFO  # probes come every few seconds
                logger.log(level, "%s %s %d %.1f ms, %s", scope["method"], where, status, took_ms, request_id)

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
