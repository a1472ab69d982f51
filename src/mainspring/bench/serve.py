"""How a server answers many at once: `mainspring bench serve`.

`load.py` says what is asked; here it is sent, and what came is told. The keys of the JSON are those of
`vllm bench serve`, so that figures can be put side by side:

    ttft   from the start of a request to its first event with text
    itl    from one such event to the next, of all requests
    tpot   from the first to the last, per token after the first
    e2el   from the start to the last

Where the server shows them, its CPU seconds per token and how late its event loop was are read from its page
of metrics before and after. How late our own loop was is told too: where that is long, the client was
measured.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mainspring.base.errors import ConfigError, EngineError
from mainspring.bench.arguments import METRICS, LoadArgs, objectives
from mainspring.bench.http_client import HttpClient, HttpError
from mainspring.bench.load import Answer, Run, make_samples
from mainspring.frontend.loop_probe import LoopProbe
from mainspring.frontend.stats import Histogram

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2el": "whole answer",
}
CPU_SECONDS = "process_cpu_seconds_total"
LOOP_DELAY = "mainspring:event_loop_delay_seconds"
READY_POLL_S = 0.5
MOST_CONNECTIONS = 1 << 16
PROBE_QUANTILE = 0.99


# -- the server's own figures --------------------------------------------------------------------------------


@dataclass(slots=True)
class ServerReading:
    """None: the server does not show it."""

    cpu_s: float | None = None
    loop_delay: dict[float, float] | None = None  # upper ends -> how many were at most that


async def read_server(client: HttpClient, pid: int | None) -> ServerReading:
    try:
        status, page = await client.fetch("GET", "/metrics")
    except (OSError, HttpError, EOFError):
        status, page = 0, b""
    reading = parse_page(page.decode("utf-8", "replace")) if status == 200 else ServerReading()
    if pid is not None:
        reading.cpu_s = cpu_seconds(pid)
    return reading


def parse_page(page: str) -> ServerReading:
    """Of Prometheus' text format, the two that are wanted here."""
    reading = ServerReading()
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name == CPU_SECONDS:
            reading.cpu_s = float(value)
        elif name.startswith(f'{LOOP_DELAY}_bucket{{le="'):
            bound = float(name.split('"')[1].replace("+Inf", "inf"))
            reading.loop_delay = (reading.loop_delay or {}) | {bound: float(value)}
    return reading


def cpu_seconds(pid: int) -> float:
    """User and system time of a process of this machine so far."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError as error:
        raise ConfigError(f"server_pid {pid}: {error.strerror}") from None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile_bound(
    before: Mapping[float, float], after: Mapping[float, float], quantile: float
) -> float | None:
    """The upper end of the bucket in which the quantile of what came between lies; None: nothing came."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts.get(math.inf, 0.0)
    if not total:
        return None
    return next(bound for bound, count in counts.items() if count >= quantile * total)


# -- the whole -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measurement:
    args: LoadArgs
    model: str
    answers: list[Answer]
    duration_s: float
    before: ServerReading
    after: ServerReading
    client_delay: Histogram  # how late the loop of this program was

    @property
    def completed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]


def allow_connections() -> None:
    """As many as the system lets us have: each is a descriptor, of which the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MOST_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def measure(
    args: LoadArgs,
    on_done: Callable[[Answer], None] = lambda answer: None,
    on_start: Callable[[], None] = lambda: None,
) -> Measurement:
    """Wait for the server, warm it up, send everything, read everything. Raises `EngineError` if the server
    does not answer, or refuses the first request."""
    allow_connections()
    async with HttpClient(args.base_url, args.headers) as client:
        model = await _wait_until_ready(args, client)
        await _warm_up(args, client, model)
        samples = make_samples(args)
        probe = LoopProbe()
        watching = asyncio.create_task(probe.run())
        before = await read_server(client, args.server_pid)
        on_start()
        run = Run(args, client, model)
        try:
            answers = await run.all(samples, on_done)
            duration_s = run.now_s()
        finally:
            watching.cancel()
        after = await read_server(client, args.server_pid)
        return Measurement(args, model, answers, duration_s, before, after, probe.delay_s)


async def _wait_until_ready(args: LoadArgs, client: HttpClient) -> str:
    """The name of the model, once the server lists its models."""
    deadline_s = time.monotonic() + args.ready_check_timeout_sec
    was_told = False
    while True:
        try:
            status, body = await client.fetch("GET", "/v1/models")
            problem = f"GET /v1/models gives HTTP {status}"
            if status == 200:
                return args.model or str(json.loads(body)["data"][0]["id"])
            if status < 500:
                break
        except (OSError, HttpError, EOFError) as error:
            problem = str(error)
        except (ValueError, LookupError, TypeError):
            problem = "GET /v1/models does not list a model; give --model"
            break
        if time.monotonic() > deadline_s:
            break
        if not was_told:
            was_told = True
            patience = f"{args.ready_check_timeout_sec:g} s"
            print(f"waiting for {args.base_url}, at most {patience}: {problem}", file=sys.stderr)
        await asyncio.sleep(READY_POLL_S)
    raise EngineError(f"the server at {args.base_url} is not ready: {problem}")


async def _warm_up(args: LoadArgs, client: HttpClient, model: str) -> None:
    """Requests like those that are measured, with other prompts; they also show whether it works at all."""
    if not args.num_warmups:
        return
    samples = make_samples(
        replace(args, num_prompts=args.num_warmups, seed=args.seed + 1, request_rate=math.inf)
    )
    answers = await Run(args, client, model).all(samples, lambda answer: None)
    if (error := next((answer.error for answer in answers if answer.error is not None), None)) is not None:
        raise EngineError(f"the first request to {args.base_url} failed: {error}")


# -- figures -------------------------------------------------------------------------------------------------


def figures(measured: Measurement) -> dict[str, Any]:
    """For programs: keys as `vllm bench serve` writes them, then the server's own."""
    args, answers = measured.args, measured.completed
    duration_s = measured.duration_s
    num_input = sum(answer.prompt_tokens for answer in answers)
    num_output = sum(answer.output_tokens for answer in answers)
    found: dict[str, Any] = {
        "backend": args.backend,
        "base_url": args.base_url,
        "model_id": measured.model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        "duration": duration_s,
        "completed": len(answers),
        "failed": len(measured.answers) - len(answers),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answers) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": most_at_once(measured.answers),
        "max_output_tokens_per_s": float(max(tokens_per_second(answers), default=0)),
    }
    if args.goodput:
        found["request_goodput"] = num_good(answers, objectives(args.goodput)) / duration_s
    for name, values_ms in milliseconds(answers).items():
        found |= _summary(name, values_ms, args.metric_percentiles)
    return found | _server_figures(measured, num_output)


def milliseconds(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """All values of each metric."""
    return {
        "ttft": [1000 * answer.ttft_s for answer in answers],
        "tpot": [1000 * value for answer in answers if (value := answer.tpot_s) is not None],
        "itl": [1000 * gap for answer in answers for gap in answer.gaps_s],
        "e2el": [1000 * answer.e2e_s for answer in answers],
    }


def _summary(name: str, values_ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """None where there is nothing to be said."""
    empty = not values_ms
    found = {
        f"mean_{name}_ms": None if empty else float(np.mean(values_ms)),
        f"median_{name}_ms": None if empty else float(np.median(values_ms)),
        f"std_{name}_ms": None if empty else float(np.std(values_ms)),
    }
    for percent in percentiles:
        found[f"p{percent:g}_{name}_ms"] = None if empty else float(np.percentile(values_ms, percent))
    return found


def num_good(answers: Sequence[Answer], limits_ms: dict[str, float]) -> int:
    """Answers that kept every limit; `itl` is of each gap, and what an answer has none of it kept."""

    def worst_ms(answer: Answer, name: str) -> float:
        values = milliseconds([answer])[name]
        return max(values, default=0.0)

    return sum(
        all(worst_ms(answer, name) <= limit for name, limit in limits_ms.items()) for answer in answers
    )


def most_at_once(answers: Sequence[Answer]) -> int:
    changes = sorted([(a.sent_s, 1) for a in answers] + [(a.ended_s, -1) for a in answers])
    now, most = 0, 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def tokens_per_second(answers: Sequence[Answer]) -> list[int]:
    """Events with text in each second since the start."""
    times = [int(time_s) for answer in answers for time_s in answer.token_times_s]
    return np.bincount(times).tolist() if times else []


def _server_figures(measured: Measurement, num_output: int) -> dict[str, Any]:
    before, after = measured.before, measured.after
    cpu_us, server = None, None
    if before.cpu_s is not None and after.cpu_s is not None and num_output:
        cpu_us = 1e6 * (after.cpu_s - before.cpu_s) / num_output
    if after.loop_delay is not None:
        server = quantile_bound(before.loop_delay or {}, after.loop_delay, PROBE_QUANTILE)
    client = quantile_bound({}, dict(measured.client_delay.cumulative()), PROBE_QUANTILE)
    return {
        "server_cpu_us_per_output_token": cpu_us,
        "p99_server_loop_delay_ms_at_most": _in_ms(server),
        "p99_client_loop_delay_ms_at_most": _in_ms(client),
    }


def _in_ms(bound_s: float | None) -> float | str | None:
    """As JSON has it, which knows no infinity."""
    return "inf" if bound_s == math.inf else None if bound_s is None else 1000 * bound_s


def table(measured: Measurement) -> str:
    """For people."""
    return "\n".join(_table_lines(measured, figures(measured)))


def _table_lines(measured: Measurement, found: dict[str, Any]) -> Iterator[str]:
    args = measured.args
    rate = "all at once" if math.isinf(args.request_rate) else f"{args.request_rate:g} requests/s"
    most = "" if args.max_concurrency is None else f", at most {args.max_concurrency} at once"
    yield f"{measured.model} at {args.base_url} ({args.backend}), {rate}{most}, seed {args.seed}"
    yield ""
    yield (
        f"{'requests':<24} {found['completed']} of {args.num_prompts} in {found['duration']:.2f} s, "
        f"{found['request_throughput']:.2f}/s, {found['max_concurrent_requests']} at once"
    )
    yield (
        f"{'tokens':<24} {found['total_input_tokens']:,} read, {found['total_output_tokens']:,} written, "
        f"{found['output_throughput']:,.1f} written/s"
    )
    if args.goodput:
        yield f"{'goodput':<24} {found['request_goodput']:.2f} requests/s keep {' '.join(args.goodput)}"
    percentiles = [f"p{percent:g}" for percent in args.metric_percentiles]
    yield ""
    yield f"{'milliseconds':<24}" + "".join(f"{name:>11}" for name in ("mean", *percentiles))
    for name in METRICS:
        values = [found[f"{column}_{name}_ms"] for column in ("mean", *percentiles)]
        yield f"{TITLES[name]:<24}" + "".join(f"{'-' if v is None else f'{v:,.2f}':>11}" for v in values)
    yield ""
    yield from _server_lines(found)
    if found["failed"]:
        first = next(answer.error for answer in measured.answers if answer.error is not None)
        yield f"{found['failed']} failed; the first: {first}"


def _server_lines(found: dict[str, Any]) -> Iterator[str]:
    if (cpu_us := found["server_cpu_us_per_output_token"]) is not None:
        yield f"{'front end, CPU':<24} {cpu_us:.1f} us per token written"
    for who in ("server", "client"):
        if (delay_ms := found[f"p99_{who}_loop_delay_ms_at_most"]) is not None:
            yield f"{f'event loop, {who}':<24} p99 of its delay is at most {float(delay_ms):g} ms"
