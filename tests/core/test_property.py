"""No limit, block size, cache hit, preemption, abort, depth, crash or neighbour may change what a request
says.
"""

import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mainspring.base.messages import GetStats
from mainspring.testing.scenarios import Dice, SeededDice, make_scenario
from mainspring.testing.simulation import Drive, Scenario, brief, play, smallest


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
    max_examples=250,  # thousands of seeds are tried when there is time: below
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # failing ones are made small by `smallest`, which is quicker
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenarios())
def test_scheduling_never_changes_what_is_said(scenario: Scenario):
    """Cases B022, B023, B034, B035, B037, B046, B053, B055, B059, B179 and the whole kind: see `play`."""
    play_and_explain(scenario)


def test_seeded_scenarios():
    """The same for scenarios that only a seed chose, bigger ones on average. They must meet everything that
    can happen, or they prove nothing."""
    met: Counter[str] = Counter()
    for seed in range(300):
        drive = play_and_explain(make_scenario(SeededDice(seed)))
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
@pytest.mark.parametrize("first", range(10_000, 30_000, 5_000))
def test_many_more_seeded_scenarios(first: int):
    for seed in range(first, first + 5_000):
        play_and_explain(make_scenario(SeededDice(seed)))


def play_and_explain(scenario: Scenario) -> Drive:
    """A failure comes with the smallest scenario that fails alike, which takes some seconds to find."""
    try:
        return play(scenario)
    except Exception as error:
        kind = kind_of(error)
        small = smallest(scenario, lambda other: kind_of(failure(other)) == kind)
        error.add_note(f"smallest: play({brief(small)})")
        raise


def failure(scenario: Scenario) -> Exception | None:
    try:
        play(scenario)
    except Exception as error:
        return error
    return None


def kind_of(error: Exception | None) -> str:
    """The message without names and numbers."""
    return re.sub(r"\w*\d\w*", "", str(error))
