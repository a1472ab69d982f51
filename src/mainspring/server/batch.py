"""A file of requests answered in this process, in the form of OpenAI's batch files: JSON, one object a line.

    in   {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out  {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}

Rules.
1. A request is served by the application of the HTTP server, so it is judged, answered and refused with the
   same words and the same statuses.
2. A line that cannot be served is answered with the refusal, in `response` and in `error`; the run goes on.
   Only an engine that has died ends it, and that refuses nobody: what was not answered is not written.
3. Answers are written whole, as they come; `custom_id` says whose they are. Each is written before it is
   counted, so a run that was cut off can be resumed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from mainspring.base.errors import RequestError
from mainspring.server.app import App, make_app
from mainspring.server.errors import ApiError, ErrorInfo
from mainspring.server.http import encode
from mainspring.server.routes import entries
from mainspring.server.service import Service

AT_ONCE = 256  # requests in the engine, the least; twice as many as may run keeps it busy

Write = Callable[[bytes], object]  # a line, with its end


class BatchRequest(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct):
    id: str
    custom_id: str | None  # None: the line could not be read so far
    response: BatchResponse
    error: ErrorInfo | None


class _Streaming(msgspec.Struct):
    stream: Any = None


class _FailureInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None = None


class _Failure(msgspec.Struct):
    """What all forms of errors have."""

    error: _FailureInfo


class Tally(NamedTuple):
    num_answered: int = 0
    num_refused: int = 0  # answered with an error
    num_skipped: int = 0  # were answered by an earlier run


class Batch:
    """One run over a file. `answered` are the custom_ids of lines to be left out."""

    def __init__(self, service: Service, write: Write, answered: Iterable[str] = ()) -> None:
        self._service = service
        self._app = make_app(service)
        self._write = write
        self._answered = frozenset(answered)
        self._urls = {e.path for e in entries(service.settings) if e.is_work and e.method == "POST"}
        self._line_of: dict[str, int] = {}  # by custom_id
        self.tally = Tally()

    async def run(
        self, lines: Iterable[bytes], num_at_once: int = AT_ONCE, on_done: Callable[[], object] = lambda: None
    ) -> Tally:
        """Answer every line that is not blank. Raises `EngineDeadError`."""
        room = asyncio.Semaphore(num_at_once)

        async def one(number: int, line: bytes) -> None:
            try:
                await self._answer(number, line)
                on_done()
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        await room.acquire()
                        tasks.create_task(one(number, line))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self.tally

    async def _answer(self, number: int, line: bytes) -> None:
        name, request_id = None, f"batch-{uuid.uuid4().hex}"
        try:
            request = _read(line)
            name = request.custom_id
            if name in self._answered:
                self.tally = self.tally._replace(num_skipped=self.tally.num_skipped + 1)
                return
            self._judge(number, request)
        except ApiError as error:
            refused = ApiError(error.status, f"line {number}: {error.message}", error.param)
            status, body = refused.status, encode(refused.reply)
        else:
            status, body = await post(self._app, request.url, bytes(request.body), request_id)
        if self._service.status == "dead" and status >= 500:
            _ = self._service.llm  # raises what it died of
        failure = None if status < 400 else _failure(status, body)
        response = BatchResponse(status, request_id, msgspec.Raw(body))
        self._write(encode(BatchAnswer(f"batch_req_{uuid.uuid4().hex}", name, response, failure)) + b"\n")
        _, refused_so_far, _ = tally = self.tally
        self.tally = tally._replace(
            num_answered=tally.num_answered + 1, num_refused=refused_so_far + (failure is not None)
        )

    def _judge(self, number: int, request: BatchRequest) -> None:
        """What HTTP would have seen to. Raises `ApiError`."""
        first = self._line_of.setdefault(request.custom_id, number)
        if first != number:
            raise ApiError(
                400, f"custom_id {request.custom_id[:100]!r} is that of line {first} too", "custom_id"
            )
        if request.method != "POST":
            raise ApiError(400, f"method must be POST, got {request.method[:20]!r}", "method")
        if request.url not in self._urls:
            known = ", ".join(sorted(self._urls))
            raise ApiError(400, f"url {request.url[:100]!r} must be one of {known}", "url")
        try:
            asks = msgspec.json.decode(request.body, type=_Streaming)
        except msgspec.ValidationError:
            return  # the endpoint says it better
        if asks.stream:
            raise ApiError(400, "a batch has no streams; leave stream out", "stream")


def _failure(status: int, body: bytes) -> ErrorInfo:
    said = msgspec.json.decode(body, type=_Failure).error
    return ErrorInfo(said.message, said.type, said.param, status)


def _read(line: bytes) -> BatchRequest:
    try:
        return msgspec.json.decode(line, type=BatchRequest)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{error}: expected custom_id, method, url and body") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"no JSON: {error}") from None
    except RecursionError:
        raise ApiError(400, "nested too deeply") from None


def answered_ids(lines: Iterable[bytes]) -> set[str]:
    """The custom_ids of an earlier run's answers. Raises `RequestError` for what is no such file."""
    found = set()
    for number, line in enumerate(lines, 1):
        try:
            answer = msgspec.json.decode(line, type=BatchAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise RequestError(f"line {number} is no answer of a batch") from None
        if answer.custom_id is not None:
            found.add(answer.custom_id)
    return found


async def post(app: App, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """Status and body of the application's reply, as if it had come over HTTP."""
    status, pieces = 0, []
    to_come = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if to_come:
            return to_come.pop()
        return await asyncio.get_running_loop().create_future()  # nobody leaves here

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    return status, b"".join(pieces)
