"""`mainspring complete`: continue texts by a server that speaks the OpenAI API, ours or another."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_help_flag
from mainspring.cli.remote import URL, add_key_flag, chunks, connected, first_model, read_json
from mainspring.cli.sampling import DEFAULTS, HELP, add_sampling_flags
from mainspring.cli.session import not_utf8, standard_input

if TYPE_CHECKING:
    from mainspring.bench.http_client import HttpClient

EXAMPLES = (
    '-q "Once upon a time" --max-tokens 40',
    "--url http://127.0.0.1:8000/v1 --temperature 0 < prompts.txt",
)


def run(argv: list[str]) -> int:
    given = _parser(argv).read(argv)
    asyncio.run(_complete(given))
    return 0


def _parser(argv: list[str]) -> Parser:
    parser = Parser(
        "complete", "Continue texts by a server: those of standard input, a line each.", EXAMPLES, argv
    )
    group = parser.add_argument_group("the server")
    group.add_argument("--url", metavar="URL", default=URL, help=f"default: {URL}")
    group.add_argument("--model-name", metavar="NAME", help="default: the first that the server lists")
    add_key_flag(group)
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
    asked = {name: getattr(given, name) for name in HELP if hasattr(given, name)}
    async with connected(given.url, given) as client:
        asked["model"] = getattr(given, "model_name", None) or await first_model(client, "--model-name")
        for prompt in _prompts(given):
            await _continue(client, {"max_tokens": DEFAULTS["max_tokens"], **asked, "prompt": prompt}, given)


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


async def _continue(client: HttpClient, body: dict[str, Any], given: argparse.Namespace) -> None:
    """One text, shown while it is written."""
    if given.json:
        async with client.request("POST", "/completions", json.dumps(body).encode()) as response:
            print(json.dumps(await read_json(response)), flush=True)
        return
    text = ""
    async for chunk in chunks(client, "/completions", body):
        for choice in chunk.get("choices", []):
            text = choice.get("text") or ""
            print(text, end="", flush=True)
    if not text.endswith("\n"):
        print()
