"""How fast a real model reads and writes here, through the whole engine, and what memory that takes.

Every prompt is random and new, so the prefix cache finds nothing; answers have a fixed length. A decode rate
counts the tokens that come after every request has its first, over the time they take, whatever the batch has
shrunk to by then. A figure is the median of some runs. Between them the rate of a plain matrix product is
measured, the ceiling of the same minute: a figure means little without it.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mainspring.base.config import EngineArgs
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.kernels.native import choose_variant, library

TOKEN_RANGE = range(1000, 20_000)  # ordinary words in any vocabulary; special tokens are at the ends
SGEMM_SIZE, SGEMM_ROUNDS = 1024, 5


class Scenario(NamedTuple):
    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    figure: str  # the field of `Rates` that is reported

    def __str__(self) -> str:
        return f"{self.num_requests} x ({self.prompt_tokens} + {self.output_tokens})"


class Rates(NamedTuple):
    """Tokens per second."""

    prefill: float
    decode: float


SCENARIOS = (
    Scenario("prefill_512", 1, 512, 1, "prefill"),
    Scenario("decode_1", 1, 32, 64, "decode"),
    Scenario("decode_32x32+64", 32, 32, 64, "decode"),
    Scenario("decode_32x512+32", 32, 512, 32, "decode"),
)


def measure(repeats: int, engine_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All figures; the engine's settings are `EngineArgs` fields."""
    args = EngineArgs.from_mapping(engine_arguments)
    args.in_process = True  # so that the peak of this process is the engine's
    if args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None:
        args.num_gpu_blocks_override = num_blocks(args.block_size)
    rng = random.Random(0)
    start = time.perf_counter()
    with LLMEngine.from_engine_args(args) as engine:
        load_s = time.perf_counter() - start
        run(engine, Scenario("warm-up", 2, 16, 4, "decode"), rng)
        rates: dict[str, list[float]] = {scenario.name: [] for scenario in SCENARIOS}
        sgemm = [sgemm_gflops()]
        for _ in range(repeats):
            for scenario in SCENARIOS:
                rates[scenario.name].append(getattr(run(engine, scenario, rng), scenario.figure))
                sgemm.append(sgemm_gflops())
    return {
        "model": args.model,
        "kernels": kernels_in_use(args),
        "repeats": repeats,
        "load_s": round(load_s, 2),
        "tokens_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "sgemm_gflops": round(statistics.median(sgemm), 1),
        "kv_blocks": args.num_gpu_blocks_override,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def kernels_in_use(args: EngineArgs) -> str:
    """What "auto" came to, in words."""
    if args.kernels == "numpy" or library() is None:
        return "numpy"
    weights = f", weights in {args.quantization}" if args.quantization else ""
    return f"native {choose_variant(args.instruction_set)}, {args.activations} activations{weights}"


def num_blocks(block_size: int) -> int:
    """A KV pool that just holds the largest scenario. In a larger one ever more blocks would be kept for
    their prefixes, and the peak of memory would tell how long the measurement ran.
    """
    return 1 + max(s.num_requests * -(-(s.prompt_tokens + s.output_tokens) // block_size) for s in SCENARIOS)


def run(engine: LLMEngine, scenario: Scenario, rng: random.Random) -> Rates:
    """One round of a scenario."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=scenario.output_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    for i in range(scenario.num_requests):
        prompt = [rng.choice(TOKEN_RANGE) for _ in range(scenario.prompt_tokens)]
        engine.add_request(f"{scenario.name}-{i}", {"prompt_token_ids": prompt}, params)
    started: set[str] = set()
    num_decoded = 0
    start = all_started = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(started) == scenario.num_requests:
            num_decoded += sum(len(output.outputs[0].token_ids) for output in outputs)
        else:
            started.update(output.request_id for output in outputs)
            all_started = time.perf_counter()
    end = time.perf_counter()
    num_read = scenario.num_requests * scenario.prompt_tokens
    return Rates(num_read / (all_started - start), num_decoded / (end - all_started) if num_decoded else 0.0)


def sgemm_gflops() -> float:
    """What numpy's matrix product reaches now, the best of some rounds."""
    a = np.ones((SGEMM_SIZE, SGEMM_SIZE), np.float32)
    out = np.empty_like(a)
    best = float("inf")
    for _ in range(SGEMM_ROUNDS):
        start = time.perf_counter()
        np.matmul(a, a, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * SGEMM_SIZE**3 / best / 1e9


def peak_memory_bytes() -> int:
    """The most memory this process has held so far (VmHWM)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere


def table(figures: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{figures['model']}, kernels {figures['kernels']}, median of {figures['repeats']}", ""]
    for scenario in SCENARIOS:
        what = f"{scenario.figure} {scenario}"
        lines.append(f"{what:<26} {figures['tokens_per_s'][scenario.name]:>8.1f} tokens/s")
    lines += [
        f"{'sgemm, the same minutes':<26} {figures['sgemm_gflops']:>8.1f} GFLOP/s",
        f"{'model loaded in':<26} {figures['load_s']:>8.2f} s",
        f"{'peak memory':<26} {figures['peak_memory_bytes'] / 2**30:>8.2f} GiB",
    ]
    return "\n".join(lines)
