"""Bodies in, replies out, and whether anybody still listens. Nothing here knows what is being said."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mainspring.server.errors import ApiError

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)
Receive = Callable[[], Awaitable[Any]]
encode = msgspec.json.Encoder().encode
_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_PATH = re.compile(r" - at `\$\.?([^.`\[]*)")  # what msgspec says of where a mistake is


class JSONReply(Response):
    """`content` as msgspec encodes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return b"" if content is None else encode(content)


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def read_body(request: Request, most_bytes: int, timeout_s: float) -> bytes:
    """Raises `ApiError` for one that is too large or too slow, `ClientGone` if the client has left."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_all(request.receive, most_bytes)
    except TimeoutError:
        raise ApiError(408, f"the request's body did not come within {timeout_s:g} s") from None


async def _receive_all(receive: Receive, most_bytes: int) -> bytes:
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most_bytes:
            raise _too_large(most_bytes)
        if not message.get("more_body"):
            return b"".join(pieces)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the request's body is above {most_bytes} bytes; send less, or raise --max-request-bytes",
        headers={"connection": "close"},  # what is still to come of it is not read
    )


def check_content_type(request: Request) -> None:
    """JSON, or nothing said of it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"the body must be application/json, not {kind[:60]}", "content-type")


def decode(body: bytes, kind: type[Body]) -> tuple[Body, set[str]]:
    """The body as `kind`, and the names of fields that it does not have. Raises `ApiError` (400)."""
    try:
        read = msgspec.json.decode(body, type=kind)
        named = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {_why(error, body)}", "body") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", "body") from None
    return read, named.keys() - set(kind.__struct_encode_fields__)


def _why(error: Exception, body: bytes) -> str:
    """For half of a surrogate pair msgspec has the words that it has for a body that ends too early."""
    if "truncated" in str(error) and (half := _HALF.search(body)) is not None:
        return f"{half[0].decode()} is half of a surrogate pair and no character"
    return str(error)


def _refused(words: str) -> ApiError:
    """msgspec's words, which say what was expected and where, with the field's name."""
    place = _PATH.search(words)
    name = place[1] if place else ""
    if not name and (missing := re.search(r"missing required field `(\w+)`", words)):
        name = missing[1]
    if not name:
        return ApiError(400, words, "body")
    return ApiError(400, f"{name}: {words}", name)


# -- listeners -----------------------------------------------------------------------------------------------


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; if the client leaves first, `work` is cancelled and `ClientGone` is raised."""
    gone = asyncio.ensure_future(disconnected(receive))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await cancelled(gone, task)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """End these, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
