"""No limit, block size, cache hit, preemption, abort, depth, crash or neighbour may change what a request
says.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mainspring.base.messages import GetStats
from mainspring.testing.scenarios import Dice, SeededDice, make_scenario
from mainspring.testing.simulation import Drive, Scenario, play


class DrawnDice(Dice):
    """Hypothesis chooses."""

    def __init__(self, draw) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def scenarios(draw) -> Scenario:
    return make_scenario(DrawnDice(draw))


@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a failing scenario is made small by `simulation.smallest`, in seconds
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenarios())
def test_scheduling_never_changes_what_is_said(scenario: Scenario):
    """Cases B022, B023, B034, B035, B037, B046, B053, B055, B059, B179 and the whole kind: see `play`."""
    play(scenario)


def test_seeded_scenarios():
    """The same for scenarios that only a seed chose: bigger ones on average. They must meet everything that can
    happen, or they prove nothing."""
    met: Counter[str] = Counter()
    for seed in range(300):
        drive = play_seed(seed)
        stats = drive.core.call(GetStats())
        met["preemptions"] += stats.num_preemptions
        met["scenarios with hits"] += stats.prefix_cache_hits > 0
        met["crashes"] += len(drive.scenario.crashes)
        met["loads"] += sum(plan.kv_transfer is not None for plan in drive.executor.plans)
        met["chunks"] += sum(not plan.sampling_rows for plan in drive.executor.plans)
        for name, transcript in drive.transcripts.items():
            met["aborted"] += transcript.aborted
            met["aborted in the middle"] += transcript.aborted and bool(transcript.token_ids)
            met["structured"] += drive.guests[name].structure is not None
            met["prompt logprobs"] += transcript.prompt_logprobs is not None
            if transcript.last is not None:
                met[str(transcript.last.finish_reason)] += 1
    least = {"preemptions": 100, "scenarios with hits": 80, "crashes": 80, "loads": 80, "chunks": 500}
    least |= {"aborted": 200, "aborted in the middle": 25, "structured": 150, "prompt logprobs": 100}
    least |= {"stop": 150, "length": 500, "error": 10}
    assert {what: n for what, n in least.items() if met[what] < n} == {}, met


@pytest.mark.slow
def test_many_more_seeded_scenarios():
    for seed in range(10_000, 30_000):
        play_seed(seed)


def play_seed(seed: int) -> Drive:
    try:
        return play(make_scenario(SeededDice(seed)))
    except Exception as error:
        error.add_note(f"play(make_scenario(SeededDice({seed})))")
        raise
