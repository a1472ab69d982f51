"""What the front end costs: a whole server around an engine that computes nothing.

The server is the real one, in a process of its own, with its core in another; only the steps are fake. Each
takes `STEP_S` and gives every running request one letter, so all that is left to measure is what a token
costs on its way out (text, JSON, socket; requests come in too), and how late that makes the server's loop.
Streams arrive over a second or two, and then all of them go on together.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mainspring.base.config import EngineConfig
from mainspring.bench import serve
from mainspring.bench.arguments import LoadArgs
from mainspring.bench.process import FakeStepExecutor
from mainspring.checkpoint.gguf import GGUFFile
from mainspring.frontend.tokenizer import Tokenizer

STEP_S = 0.02
NUM_TOKENS = 250  # of an answer: some five seconds
LETTER = "a"
FEW, MANY = 64, 256  # streams
ARRIVALS_PER_S = 128.0
CPU_AIM_US = 40.0  # per token, with few
DELAY_AIM_MS = 20.0  # at the 99th percentile, with many
END_S = 20.0


class LetterExecutor(FakeStepExecutor):
    """For `--executor mainspring.bench.front_end:LetterExecutor`: every token is one letter, whatever is
    asked."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._kind, self.step_s = "sleep", STEP_S
        with GGUFFile(config.model) as file:
            (self.token,) = Tokenizer.from_gguf(file).encode(LETTER, add_special_tokens=False)


@contextmanager
def fake_server(model: str) -> Iterator[str]:
    """Its URL. It may not be ready yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    executor = f"{LetterExecutor.__module__}:{LetterExecutor.__name__}"
    settings = ["--num-gpu-blocks-override", "16385", "--max-num-seqs", str(MANY), "--max-model-len", "1024"]
    words = ["serve", model, "--executor", executor, "--port", str(port), "--quiet", *settings]
    server = subprocess.Popen([sys.executable, "-m", "mainspring", *words], stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(END_S)


def measure(model: str) -> dict[str, Any]:
    """Figures of `bench serve` for few and for many streams, all of them at once."""
    with fake_server(model) as url:
        found = {}
        for num_streams in (FEW, MANY):
            args = LoadArgs(
                base_url=url,
                num_prompts=num_streams,
                num_warmups=8,
                request_rate=ARRIVALS_PER_S,
                random_input_len=32,
                random_output_len=NUM_TOKENS,
            )
            found[str(num_streams)] = serve.figures(asyncio.run(serve.measure(args)))
    return {
        "model": model,
        "step_s": STEP_S,
        "cpu_us_per_token": found[str(FEW)]["server_cpu_us_per_output_token"],
        "cpu_aim_us": CPU_AIM_US,
        "loop_delay_p99_ms_at_most": found[str(MANY)]["p99_server_loop_delay_ms_at_most"],
        "loop_delay_aim_ms": DELAY_AIM_MS,
        "streams": found,
    }


def table(figures: dict[str, Any]) -> str:
    """For people."""
    lines = [f"steps of {1000 * figures['step_s']:g} ms, a letter for each stream", ""]
    lines.append(
        f"{'streams':>8} {'tokens/s':>10} {'CPU per token':>15} {'loop late, p99':>16} {'between tokens':>16}"
    )
    for num_streams, found in figures["streams"].items():
        lines.append(
            f"{num_streams:>8} {found['output_throughput']:>10,.0f} "
            f"{found['server_cpu_us_per_output_token']:>12.1f} us "
            f"{'<= ' + format(float(found['p99_server_loop_delay_ms_at_most']), 'g'):>13} ms "
            f"{found['p99_itl_ms']:>9.1f} ms p99"
        )
    lines.append(f"aims: {CPU_AIM_US:g} us with {FEW} streams, {DELAY_AIM_MS:g} ms with {MANY}")
    return "\n".join(lines)
