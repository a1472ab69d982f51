"""A server that speaks the OpenAI API, ours or another: what `complete` and `chat --url` share.

A request that the server refuses is a `RequestError` in its words; whatever else goes wrong is an
`EngineError`, one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mainspring.base.errors import EngineError, RequestError

if TYPE_CHECKING:
    from mainspring.bench.http_client import HttpClient, Response

URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
MAX_SHOWN = 300  # characters of what a server says of a failure


def add_key_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-key", metavar="KEY", help=f"default: {KEY_VARIABLE} of the environment")


@asynccontextmanager
async def connected(url: str, given: argparse.Namespace) -> AsyncIterator[HttpClient]:
    """A client for the server at `url`, whose path is /v1 unless it has one."""
    from mainspring.bench.http_client import HttpClient, HttpError

    key = getattr(given, "api_key", None) or os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base_url = url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"
    try:
        async with HttpClient(base_url, headers) as client:
            yield client
    except BrokenPipeError:
        raise  # of whoever reads our output
    except OSError as error:
        raise EngineError(f"{url}: {error.strerror or error}; `mainspring serve` starts a server") from None
    except asyncio.IncompleteReadError:
        raise EngineError(f"{url}: the connection ended in the middle of an answer") from None
    except HttpError as error:
        raise EngineError(f"{url}: {error}") from None


async def first_model(client: HttpClient, flag: str) -> str:
    """The first that the server lists; `flag` would say which one."""
    async with client.request("GET", "/models") as response:
        listed = await read_json(response)
    try:
        name: str = listed["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise EngineError(f"the server lists no model; give {flag}") from None
    return name


async def chunks(client: HttpClient, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """What a stream is made of, as it comes."""
    from mainspring.bench.http_client import server_sent_events

    encoded = json.dumps({**body, "stream": True}).encode()
    async with client.request("POST", path, encoded) as response:
        await check(response)
        async for data in server_sent_events(response.blocks()):
            if data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(_message(chunk))
            yield chunk


async def read_json(response: Response) -> Any:
    await check(response)
    body = await response.read()
    try:
        return json.loads(body)
    except ValueError:
        raise EngineError(
            f"the server answers no JSON: {body[:MAX_SHOWN].decode(errors='replace')}"
        ) from None


async def check(response: Response) -> None:
    """Raises what the server says of a failure: a `RequestError` where the request is at fault."""
    if response.status < 400:
        return
    said = _message(await response.read())
    kind = RequestError if response.status < 500 else EngineError
    raise kind(f"the server answers {response.status}: {said}")


def _message(body: Any) -> str:
    """The words of an error's envelope, or what there is."""
    found = body
    if isinstance(body, bytes):
        try:
            found = json.loads(body)
        except ValueError:
            return body[:MAX_SHOWN].decode(errors="replace")
    try:
        return str(found["error"]["message"])[:MAX_SHOWN]
    except (KeyError, TypeError):
        return json.dumps(found)[:MAX_SHOWN]
