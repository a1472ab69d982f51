"""What stands around the routes, from the outside in: CORS; then the gate, which gives every request an id, a
line in the log, a place in the statistics and its errors their form, and lets in who has a key.

Which entries need no key is written beside them; all other paths need one, also those that do not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import cache, partial
from logging import DEBUG, INFO
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from mainspring.base.log import get_logger
from mainspring.server import messages_errors
from mainspring.server.errors import ApiError, as_api_error
from mainspring.server.http import ClientGone, JSONReply
from mainspring.server.openapi import document
from mainspring.server.reading import SAFE_ID
from mainspring.server.routes import Entry, Routes, entries
from mainspring.server.service import Service

logger = get_logger(__name__)

App = Callable[[Any, Any, Any], Awaitable[None]]
CLIENT_GONE = 499  # nobody reads it; it is for the log


def make_app(service: Service) -> App:
    settings = service.settings
    served = entries(settings)
    service.describe = cache(partial(document, served, bool(settings.api_key)))
    return CORSMiddleware(
        Gate(Routes(served), service),
        allow_origins=settings.allowed_origins or ["*"],
        allow_methods=settings.allowed_methods or ["*"],
        allow_headers=settings.allowed_headers or ["*"],
        allow_credentials=settings.allow_credentials,
        expose_headers=["x-request-id", "request-id"],
    )


class Gate:
    """On plain ASGI: it sees where a reply begins and that it has ended."""

    def __init__(self, routes: Routes, service: Service) -> None:
        settings = service.settings
        self._routes = routes
        self._service = service
        self._keys = [_hashed(key) for key in settings.api_key]
        self._logs = not settings.disable_uvicorn_access_log
        self._silent = set(settings.disable_access_log_for_endpoints)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        passage = _Passage(scope, receive, send)
        refusal = self._judge(passage)
        is_work = refusal is None and passage.entry is not None and passage.entry.is_work
        if is_work:
            self._service.begin()
        try:
            reply = await self._answer(passage) if refusal is None else error_reply(refusal, passage)
            await reply(scope, passage.receive, passage.send)
        finally:
            if is_work:
                self._service.end()
            self._record(passage)

    def _judge(self, passage: _Passage) -> ApiError | None:
        """Why it may not go on. Where it goes is written into `passage`."""
        refusal = None
        scope = passage.scope
        try:
            passage.entry, scope["path_params"] = self._routes.find(scope["method"], passage.path)
        except ApiError as error:
            refusal = error
        return refusal if self._may_enter(passage) else _unauthorized()

    async def _answer(self, passage: _Passage) -> Response:
        assert passage.entry is not None
        try:
            return await passage.entry.endpoint(self._service, Request(passage.scope, passage.receive))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return error_reply(error, passage)

    def _record(self, passage: _Passage) -> None:
        duration_s = time.monotonic() - passage.started_s
        entry, method = passage.entry, passage.scope["method"]
        self._service.metrics.http.record(
            None if entry is None else entry.path,
            method,
            passage.status or CLIENT_GONE,
            duration_s,
            passage.request_bytes,
            passage.response_bytes,
        )
        if self._logs and passage.path not in self._silent:
            # probes come every few seconds
            level = DEBUG if entry is not None and not entry.needs_key else INFO
            where = passage.scope["raw_path"][:200].decode("latin-1")
            took_ms = duration_s * 1e3
            logger.log(
                level, "%s %s %d %.1f ms, %s", method, where, passage.status, took_ms, passage.request_id
            )

    def _may_enter(self, passage: _Passage) -> bool:
        if not self._keys or (passage.entry is not None and not passage.entry.needs_key):
            return True
        scheme, _, token = passage.headers.get("authorization", "").partition(" ")
        offered = [token.strip()] if scheme.lower() == "bearer" else []
        offered.append(passage.headers.get("x-api-key", ""))
        found = False
        for key in map(_hashed, filter(None, offered)):
            for known in self._keys:  # all of them: the time must not tell which one was near
                found |= hmac.compare_digest(key, known)
        return found


class _Passage:
    """One request through the gate: its id, and what went in and out."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        root = scope.get("root_path", "")  # the web server puts it before the path
        self.path: str = scope["path"].removeprefix(root)
        if root and self.path.startswith(root + "/"):  # a proxy that left it there, or none
            self.path = self.path.removeprefix(root)
        self.headers = Headers(scope=scope)
        self.entry: Entry | None = None
        given = self.headers.get("x-request-id", "")
        self.request_id = given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
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
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if messages_errors.is_below(self.path):
                headers["request-id"] = self.request_id  # that API's name for it
        else:
            self.response_bytes += len(message["body"])
        await self._send(message)


def error_reply(error: BaseException, passage: _Passage) -> Response:
    """In the form of the API that was asked."""
    failure = as_api_error(error)
    body: msgspec.Struct = failure.reply
    if messages_errors.is_below(passage.path):
        body = messages_errors.as_reply(failure, passage.request_id)
    return JSONReply(body, failure.status, failure.headers)


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "a key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        headers={"www-authenticate": "Bearer"},
    )
