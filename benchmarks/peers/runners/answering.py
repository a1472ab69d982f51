"""The loop that every runner has: orders come as JSON lines on standard input, answers go to standard output.

    {"do": "load", ...}  ->  {"ready_s": seconds, "version": ..., "settings": ...}
    {"do": "run", ...}   ->  {"seconds": seconds, "outputs": [[token ids] per request]}

What cannot be done is answered with {"error": text}. Input's end is the runner's, and so is its parent's
death, also while it is stopped. An engine and its libraries may print what they like: their standard output
is sent to standard error.

Only the standard library: a runner runs in its engine's own environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Load(NamedTuple):
    """What an engine is told once."""

    model: str  # file or folder
    num_threads: int
    max_requests: int  # at once
    max_len: int  # tokens of the longest prompt and its answer
    num_kv_tokens: int  # that must be held at once
    settings: dict[str, Any]  # the engine's own, from the command line


class Run(NamedTuple):
    """One round of a workload: all prompts are there at the start. Greedy, an end token ends nothing."""

    prompts: list[list[int]]
    num_output_tokens: int  # of each request
    num_common_tokens: int  # the prompts begin with so many equal tokens


class Loaded(NamedTuple):
    version: str
    settings: dict[str, Any]  # those that matter for speed


class Done(NamedTuple):
    seconds: float
    outputs: Sequence[Sequence[int]]


class Runner(Protocol):
    def load(self, load: Load) -> Loaded: ...

    def run(self, run: Run) -> Done: ...


def answer_orders(runner: Runner) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            try:
                answer = _answer(runner, json.loads(line))
            except Exception as error:  # whatever an engine raises is the answer; it goes on after it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


def _answer(runner: Runner, order: dict[str, Any]) -> dict[str, Any]:
    what = order.pop("do")
    if what == "load":
        start = time.perf_counter()
        loaded = runner.load(Load(**order))
        return {"ready_s": time.perf_counter() - start, **loaded._asdict()}
    done = runner.run(Run(**order))
    return {"seconds": done.seconds, "outputs": [list(map(int, tokens)) for tokens in done.outputs]}
