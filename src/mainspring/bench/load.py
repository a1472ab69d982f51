"""The load of `mainspring bench serve`: what is asked, when, and what came of each request.

The server is any that speaks OpenAI's API: ours, vLLM, another. Requests stream; the flags are those of
`vllm bench serve`.

Arrivals are drawn before the start and are not delayed by answers: a gamma process (`burstiness` 1 is
Poisson; less comes in bursts, more is even), or all at once. `max_concurrency` makes who would be one too
many wait here; that time is nobody's latency.

A request starts when it is sent. A *token's* time is that of the event with text that brought it; events
without any, such as the first of a chat, which has its role alone, are none. How many tokens there were, the
server's usage says; without one, events are counted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mainspring.bench.arguments import ENDPOINTS, LoadArgs
from mainspring.bench.http_client import HttpClient, HttpError, server_sent_events

TOKEN_RANGE = (1000, 20_000)  # ordinary words in any vocabulary; special tokens are at the ends
# Each word is one token, with the space before it, in the vocabularies of today's models.
TEXT = """
the of and to in is that it was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words just where
"""
WORDS = TEXT.split()


# -- what is asked -------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """One request. `prompt` is text for chats, token ids for completions."""

    prompt: str | list[int]
    output_len: int
    arrives_s: float  # after the start


def make_samples(args: LoadArgs) -> list[Sample]:
    """The same for the same seed."""
    rng = np.random.default_rng(args.seed)
    prefix = _prompt(args, rng, args.random_prefix_len)
    arrivals = arrival_times(args, rng)
    inputs = _lengths(rng, args.random_input_len, args.random_range_ratio, args.num_prompts)
    outputs = _lengths(rng, args.random_output_len, args.random_range_ratio, args.num_prompts)
    return [
        Sample(_joined(prefix, _prompt(args, rng, num_input)), num_output, arrives_s)
        for num_input, num_output, arrives_s in zip(inputs, outputs, arrivals, strict=True)
    ]


def arrival_times(args: LoadArgs, rng: np.random.Generator) -> list[float]:
    """Seconds after the start. The first is 0; the mean rate is exactly the one asked for."""
    if math.isinf(args.request_rate):
        return [0.0] * args.num_prompts
    gaps = rng.gamma(args.burstiness, 1.0, args.num_prompts)
    gaps[0] = 0.0
    times = np.cumsum(gaps)
    if times[-1] > 0:
        times *= (args.num_prompts - 1) / args.request_rate / times[-1]
    return [float(value) for value in times]


def _lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return [int(value) for value in rng.integers(low, high + 1, count)]


def _prompt(args: LoadArgs, rng: np.random.Generator, length: int) -> str | list[int]:
    if args.backend == "openai":
        return [int(token) for token in rng.integers(*TOKEN_RANGE, length)]
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), length))


def _joined(prefix: str | list[int], rest: str | list[int]) -> str | list[int]:
    if isinstance(prefix, list) and isinstance(rest, list):
        return prefix + rest
    return f"{prefix} {rest}".strip()


# -- one request ---------------------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of completions
    delta: _Delta | None = None  # of chats

    @property
    def says_something(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta is not None and (delta.content or delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Answer:
    """What came of a request. Times are seconds; those of `token_times_s` are after the start of it all."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)  # one for each event with text
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        times = self.token_times_s
        return [times[i] - times[i - 1] for i in range(1, len(times))]

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token: nothing comes after the first."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def request_body(args: LoadArgs, model: str, sample: Sample) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai":
        body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
    else:
        messages = [{"role": "user", "content": sample.prompt}]
        body |= {"messages": messages, "max_completion_tokens": sample.output_len}
    if args.temperature is not None:
        body["temperature"] = args.temperature
    if args.ignore_eos:
        body["ignore_eos"] = True
    return body | args.extra_body


class Run:
    """Sends samples and writes answers down, by one clock."""

    def __init__(self, args: LoadArgs, client: HttpClient, model: str) -> None:
        self._args = args
        self._client = client
        self._model = model
        self._path = args.endpoint or ENDPOINTS[args.backend]
        self._started_s = time.perf_counter()
        self._decoder = msgspec.json.Decoder(_Event)

    def now_s(self) -> float:
        return time.perf_counter() - self._started_s

    async def all(self, samples: Sequence[Sample], on_done: Callable[[Answer], None]) -> list[Answer]:
        """The answers, in the samples' order."""
        limit = asyncio.Semaphore(self._args.max_concurrency or len(samples))

        async def one(sample: Sample) -> Answer:
            await asyncio.sleep(max(0.0, sample.arrives_s - self.now_s()))
            async with limit:
                answer = await self.ask(sample)
            on_done(answer)
            return answer

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(one(sample)) for sample in samples]
        return [task.result() for task in asked]

    async def ask(self, sample: Sample) -> Answer:
        body = msgspec.json.encode(request_body(self._args, self._model, sample))
        answer = Answer(self.now_s())
        try:
            async with self._client.request("POST", self._path, body) as response:
                if response.status != 200:
                    text = (await response.read()).decode("utf-8", "replace")
                    answer.error = f"HTTP {response.status}: {' '.join(text.split())[:300]}"
                else:
                    await self._listen(answer, server_sent_events(response.blocks()))
        except (OSError, HttpError, EOFError, msgspec.MsgspecError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended_s = self.now_s()
        if answer.error is None and not answer.token_times_s:
            answer.error = "the answer has no text"
        return answer

    async def _listen(self, answer: Answer, events: AsyncIterator[bytes]) -> None:
        is_over, usage = False, None
        async for data in events:
            if data == b"[DONE]":
                is_over = True
                continue
            event = self._decoder.decode(data)
            if event.error is not None:
                answer.error = f"in the stream: {event.error}"
            if event.choices and event.choices[0].says_something:
                answer.token_times_s.append(self.now_s())
            usage = event.usage or usage
        if not is_over and answer.error is None:
            answer.error = "the stream ended without [DONE]"
        answer.output_tokens = len(answer.token_times_s) if usage is None else usage.completion_tokens
        answer.prompt_tokens = 0 if usage is None else usage.prompt_tokens
