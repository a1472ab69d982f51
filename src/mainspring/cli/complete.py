"""`mainspring complete`: continue texts by a server that speaks the OpenAI API, ours or another."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mainspring.base.errors import EngineError, RequestError
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_help_flag
from mainspring.cli.sampling import DEFAULTS, HELP, add_sampling_flags
from mainspring.cli.session import not_utf8, standard_input

if TYPE_CHECKING:
    from mainspring.bench.http_client import HttpClient, Response

EXAMPLES = (
    '-q "Once upon a time" --max-tokens 40',
    "--url http://127.0.0.1:8000/v1 --temperature 0 < prompts.txt",
)
URL = "http://127.0.0.1:8000/v1"
MAX_SHOWN = 300  # characters of what a server says of a failure


def run(argv: list[str]) -> int:
    given = _parser(argv).read(argv)
    try:
        asyncio.run(_complete(given))
    except OSError as error:
        raise EngineError(
            f"{given.url}: {error.strerror or error}; `mainspring serve` starts a server"
        ) from None
    return 0


def _parser(argv: list[str]) -> Parser:
    parser = Parser(
        "complete", "Continue texts by a server: those of standard input, a line each.", EXAMPLES, argv
    )
    group = parser.add_argument_group("the server")
    group.add_argument("--url", metavar="URL", default=URL, help=f"with its /v1 (default: {URL})")
    group.add_argument("--model-name", metavar="NAME", help="default: the first that the server lists")
    group.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    group = parser.add_argument_group("the text")
    group.add_argument("--quick", "-q", metavar="TEXT", help="continue this one and leave")
    add_sampling_flags(parser)
    parser.hides_flags = True
    group = parser.add_argument_group("and")
    group.add_argument(
        "--json", action="store_true", default=False, help="print for programs, a line for each"
    )
    add_help_flag(group, parser)
    return parser


async def _complete(given: argparse.Namespace) -> None:
    from mainspring.bench.http_client import HttpClient, HttpError

    key = getattr(given, "api_key", None) or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = {name: getattr(given, name) for name in HELP if hasattr(given, name)}
    async with HttpClient(given.url, headers) as client:
        try:
            asked["model"] = getattr(given, "model_name", None) or await _first_model(client)
            for prompt in _prompts(given):
                await _continue(
                    client, {"max_tokens": DEFAULTS["max_tokens"], **asked, "prompt": prompt}, given
                )
        except HttpError as error:
            raise EngineError(f"{given.url}: {error}") from None


def _prompts(given: argparse.Namespace) -> Iterable[str]:
    if hasattr(given, "quick"):
        yield given.quick
        return
    lines = iter(standard_input())
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = next(lines, None)
        except UnicodeDecodeError as error:
            raise not_utf8(error) from None
        if line is None:
            return
        if line.strip():
            yield line.rstrip("\n")


async def _first_model(client: HttpClient) -> str:
    async with client.request("GET", "/models") as response:
        listed = await _read(response)
    try:
        name: str = listed["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise EngineError("the server lists no model; give --model-name") from None
    return name


async def _continue(client: HttpClient, body: dict[str, Any], given: argparse.Namespace) -> None:
    """One text, shown while it is written."""
    from mainspring.bench.http_client import server_sent_events

    encoded = json.dumps({**body, "stream": not given.json}).encode()
    async with client.request("POST", "/completions", encoded) as response:
        if given.json:
            print(json.dumps(await _read(response)), flush=True)
            return
        await _check(response)
        text = ""
        async for data in server_sent_events(response.blocks()):
            if data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(_message(chunk))
            for choice in chunk.get("choices", []):
                text = choice.get("text") or ""
                print(text, end="", flush=True)
    if not text.endswith("\n"):
        print()


async def _read(response: Response) -> Any:
    await _check(response)
    body = await response.read()
    try:
        return json.loads(body)
    except ValueError:
        raise EngineError(
            f"the server answers no JSON: {body[:MAX_SHOWN].decode(errors='replace')}"
        ) from None


async def _check(response: Response) -> None:
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
