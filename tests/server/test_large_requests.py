"""What is asked of a server in megabytes delays nobody else: the event loop's longest wait, with a real
vocabulary (slow, for it looks at a clock)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from server_toys import Running, is_idle, running, wait_until

from mainspring.base.config import EngineArgs
from mainspring.frontend.async_llm import AsyncLLM

pytestmark = pytest.mark.slow

MOST_S = 0.25  # a second per megabyte, and more, where the loop's thread waits for the work
TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
WORDS = "Some word. " * 50_000
HELLO = [{"role": "user", "content": "hello"}]


def schema(name: str) -> dict[str, Any]:
    """Of half a megabyte, and none that was seen before."""
    values = [f"{name} {number}" for number in range(50_000)]
    return {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema(name), **fields}}


def named(name: str) -> dict[str, Any]:
    return {"name": "f", "parameters": schema(name)}


REQUESTS = {
    "prompt": ("/v1/completions", {"prompt": WORDS, "truncate_prompt_tokens": 20}),
    "tokenize": ("/tokenize", {"prompt": WORDS * 4}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": WORDS}], "truncate_prompt_tokens": 9},
    ),
    "count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": WORDS}]}),
    "input": ("/v1/responses", {"input": WORDS, "truncation": "auto"}),
    "embeddings": ("/v1/embeddings", {"input": WORDS, "truncate_prompt_tokens": 20}),
    "auto": ("/v1/chat/completions", {"messages": HELLO, "tools": [tool("a")], "truncate_prompt_tokens": 9}),
    "required": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [tool("b")], "tool_choice": "required", "truncate_prompt_tokens": 9},
    ),
    "strict": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [tool("c", strict=True)], "truncate_prompt_tokens": 9},
    ),
    "response_format": (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema("d")}},
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": "hello", "tools": [{"type": "function", **named("e")}], "truncation": "auto"},
    ),
    "messages": (
        "/v1/messages/count_tokens",
        {"messages": HELLO, "tools": [{"name": "f", "input_schema": schema("g")}]},
    ),
}


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[Running]:
    args = EngineArgs(model=str(smollm2), max_model_len=512)
    settings = {"served_model_name": ["smol"], "tool_call_parser": "hermes"}
    with running(partial(AsyncLLM.from_engine_args, args), template=TEMPLATE, **settings) as found:
        yield found
        wait_until(lambda: is_idle(found))


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[list[float]]:
    """How much later than it should each of many tasks had its turn, in seconds."""
    waits: list[float] = []
    ends = threading.Event()

    async def watch() -> None:
        while not ends.is_set():
            due_s = loop.time() + 0.002
            await asyncio.sleep(0.002)
            waits.append(loop.time() - due_s)

    watching = asyncio.run_coroutine_threadsafe(watch(), loop)
    try:
        yield waits
    finally:
        ends.set()
        watching.result()


@pytest.mark.parametrize("name", REQUESTS)
def test_nobody_waits_for_what_is_large(server: Running, name: str) -> None:
    path, fields = REQUESTS[name]
    with watched(server.loop) as waits:
        reply = server.post(path, {"model": "smol", **fields})
    assert reply.status == 200, reply.body
    print(f"{name}: {max(waits) * 1e3:.0f} ms")
    assert max(waits) < MOST_S
