"""What a pipeline of stages is worth: 32 requests through a core whose stages take equal, counted times.

`python benchmarks/pipeline.py [--json]`. Time is virtual (`testing/fake_pipeline.py`), so the figures are
exact and the same on every machine; scheduler, core and its loop are the real ones. One batch at a time
(depth 1) against as many steps in flight as there are stages, and one more.

Three kinds of stage: its time is that of its tokens (compute-bound); it is fixed, and a step takes half the
requests at most (bound by reading weights, with a small `max_num_seqs`); it is fixed, and one step takes all
requests. In the last a pipeline cannot gain: what one step does for all, it does in two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.messages import EngineCoreRequest, SchedulerOutput
from mainspring.base.params import SamplingParams
from mainspring.engine.build import build_engine
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_pipeline import PipelineExecutor, timeline

NUM_REQUESTS, PROMPT_TOKENS, MAX_TOKENS = 32, 12, 40


class Kind(NamedTuple):
    name: str
    stage_s: Callable[[SchedulerOutput], float]
    max_num_seqs: int


KINDS = (
    Kind("by tokens", lambda plan: 1e-4 * plan.num_tokens, NUM_REQUESTS),
    Kind("fixed, half the requests", lambda plan: 2e-3, NUM_REQUESTS // 2),
    Kind("fixed, all requests", lambda plan: 2e-3, NUM_REQUESTS),
)


def run(kind: Kind, num_stages: int, depth: int) -> PipelineExecutor:
    """All requests to their end. With more than one step in flight a step has no more rows than before, and
    as many requests again may run."""
    turns = num_stages if depth > 1 else 1
    config = EngineConfig(
        model="",
        vocab_size=1000,
        executor="",
        scheduler=SchedulerConfig(
            max_num_seqs=min(NUM_REQUESTS, kind.max_num_seqs * turns),
            max_num_batched_tokens=NUM_REQUESTS * PROMPT_TOKENS,
            max_model_len=PROMPT_TOKENS + MAX_TOKENS,
            num_stages=turns,
        ),
        block_size=16,
        depth=depth,
        seed=0,
    )
    executor = PipelineExecutor(FakeExecutor(num_blocks=200), num_stages, kind.stage_s)
    core = build_engine(config, executor).core
    for number in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=number)
        core.add_request(EngineCoreRequest(f"r{number}", [1 + number] * PROMPT_TOKENS, params))
    while core.has_work():
        core.step()
    core.shutdown()
    return executor


def measure(num_stages: int = 2) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for kind in KINDS:
        alone, full, ahead = (run(kind, num_stages, depth) for depth in (1, num_stages, num_stages + 1))
        rows.append(
            {
                "stage time": kind.name,
                "one at a time, ms": 1000 * alone.now_s,
                "in flight, ms": 1000 * full.now_s,
                "one more, ms": 1000 * ahead.now_s,
                "ratio": alone.now_s / full.now_s,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = measure(given.stages)
    if given.json:
        print(json.dumps(rows))
        return
    print(f"{NUM_REQUESTS} requests, {given.stages} stages; milliseconds until the last one ends\n")
    print(f"{'stage time':<26}{'one at a time':>15}{'in flight':>12}{'one more':>12}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['stage time']:<26}{row['one at a time, ms']:>15.1f}{row['in flight, ms']:>12.1f}"
            f"{row['one more, ms']:>12.1f}{row['ratio']:>8.2f}"
        )
    for title, depth in (("one batch at a time", 1), (f"{given.stages} steps in flight", given.stages)):
        print(f"\n{title}: which step is in which stage")
        print(timeline(run(KINDS[0], given.stages, depth).visits, 4, 6))


if __name__ == "__main__":
    main()
