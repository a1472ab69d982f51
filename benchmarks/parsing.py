"""What it costs to read an answer: reasoning, text and calls of tools (`frontend/parsing/`).

1. Microseconds a token, for each format, with pieces of the size of a token: text, reasoning, and calls.
2. The longest that one `feed` takes where the arguments of a call have 100 kB: in one piece, in those of
   `pieces_of`, and in pieces of the size of a token. Arguments are a long text, a table, nested lists, and
   nothing but brackets.

3. The longest that an event loop waits while a thread reads the same, in pieces, as the server does.

The first two are CPU time of this thread, so that other work on the machine does not count; the third is the
wall clock's, for an idle machine. The longest is the shortest of several runs, of the third their median.
The goals are 15 us a token and 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

from mainspring.frontend.parsing.formats import REASONING_FORMATS, REQUIRED, TOOL_FORMATS, ToolFormat, named
from mainspring.frontend.parsing.parser import PIECE_CHARS, AnswerParser, pieces_of

TOKEN_CHARS = 4
LARGE_BYTES = 100_000
NUM_RUNS = 5
LOOK_S = 0.0005  # between two looks of the loop
HOW = ("whole", "in pieces", "in tokens")
PROSE = "The weather in Paris is mild, they say; bring a coat & an umbrella, <just> in case. "
ARGUMENTS = {
    "text": {"code": "def f(x):\n    return {\"a\": [x, '<b>']}  # and so on\n"},
    "table": {"rows": [{"id": 1, "name": "Zürich", "ok": True}, {"id": 2, "name": "北京", "ok": None}]},
}
LARGE: dict[str, Callable[[], str]] = {
    "a text": lambda: json.dumps({"code": str(ARGUMENTS["text"]["code"]) * (LARGE_BYTES // 60)}),
    "a table": lambda: json.dumps({"rows": [ARGUMENTS["table"]["rows"]] * (LARGE_BYTES // 90)}),
    "short lists": lambda: '{"x": [' + ", ".join(["[1, [2]]"] * (LARGE_BYTES // 10)) + "]}",
    "brackets": lambda: '{"x": ' + "[" * (LARGE_BYTES // 2) + "]" * (LARGE_BYTES // 2) + "}",
}


def call(name: str, arguments: str) -> str:
    match name:
        case "hermes":
            return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        case "llama3_json":
            return f'{{"name": "f", "parameters": {arguments}}}'
        case "mistral":
            return f'[TOOL_CALLS][{{"name": "f", "arguments": {arguments}}}]'
        case "pythonic":
            return f"[f({', '.join(f'{k}={v!r}' for k, v in json.loads(arguments).items())})]"
        case "required":
            return f'[{{"name": "f", "parameters": {arguments}}}]'
        case _:
            return arguments


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def feed_all(parser: AnswerParser, pieces: list[str]) -> tuple[float, float]:
    """Seconds in all, and of the longest feed."""
    start = last = time.thread_time()
    longest = 0.0
    for piece in pieces:
        parser.feed(piece)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    parser.finish()
    return time.thread_time() - start, longest


def best(tools: ToolFormat | None, text: str, size: int, reasons: bool = False) -> tuple[float, float]:
    """Microseconds a piece, and milliseconds of the longest."""
    reasoning = REASONING_FORMATS["qwen3"] if reasons else None
    pieces = cut(text, size)
    runs = [feed_all(AnswerParser(tools, reasoning), pieces) for _ in range(NUM_RUNS)]
    return min(total for total, _ in runs) / len(pieces) * 1e6, min(longest for _, longest in runs) * 1e3


async def longest_wait_ms(tools: ToolFormat, text: str) -> float:
    def read() -> None:
        parser = AnswerParser(tools, None)
        for piece in pieces_of(text):
            parser.feed(piece)
        parser.finish()

    reading = asyncio.ensure_future(asyncio.to_thread(read))
    longest, last = 0.0, time.perf_counter()
    while not reading.done():
        await asyncio.sleep(LOOK_S)
        now = time.perf_counter()
        longest, last = max(longest, now - last - LOOK_S), now
    await reading
    return longest * 1e3


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    formats = {known.name: known for known in (*TOOL_FORMATS.values(), REQUIRED, named("f"))}
    result: dict[str, dict[str, float]] = {}
    per_token: dict[str, float] = {}
    print(f"{'us a token':14} {'text':>8} {'reasoning':>10} {'calls':>8}")
    for name, tools in formats.items():
        calls = "\n".join(
            call(name, json.dumps(ARGUMENTS["table"])) for _ in range(1 if tools.is_bare else 50)
        )
        texts = (PROSE * 50, f"<think>{PROSE * 50}</think>", calls)
        costs = [best(tools, text, TOKEN_CHARS, reasons=i == 1)[0] for i, text in enumerate(texts)]
        per_token[name] = max(costs)
        print(f"{name:14} {costs[0]:8.2f} {costs[1]:10.2f} {costs[2]:8.2f}")
    print(f"\n{'ms, longest feed':32} {'whole':>8} {'pieces':>8} {'tokens':>8}")
    for name, tools in formats.items():
        result[name] = {}
        for kind, make in LARGE.items():
            if name == "pythonic" and kind == "brackets":
                continue  # Python itself does not nest so deep
            text = call(name, make())
            longest = [best(tools, text, size)[1] for size in (len(text), PIECE_CHARS, TOKEN_CHARS)]
            result[name] |= {f"{kind}, {how}": ms for how, ms in zip(HOW, longest, strict=True)}
            print(f"{name:14} {kind:17} " + " ".join(f"{ms:8.3f}" for ms in longest))
    print(f"\n{'ms, longest wait of a loop':32} {'thread':>8}")
    waits: dict[str, float] = {}
    for name, tools in formats.items():
        for kind, make in LARGE.items():
            if name == "pythonic" and kind == "brackets":
                continue
            text = call(name, make())
            runs = [asyncio.run(longest_wait_ms(tools, text)) for _ in range(NUM_RUNS)]
            waits[f"{name}, {kind}"] = statistics.median(runs)
            print(f"{name:14} {kind:17} {waits[f'{name}, {kind}']:8.3f}")
    print(json.dumps({"us_per_token": per_token, "longest_feed_ms": result, "longest_wait_ms": waits}))


if __name__ == "__main__":
    main()
