"""No limit, block size, cache hit, preemption, abort, depth, crash or neighbour may change what a request
says.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mainspring.testing.scenarios import Dice, SeededDice, make_scenario
from mainspring.testing.simulation import Scenario, play


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


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_seeded_scenarios(first: int):
    """The same promise for scenarios that only a seed chose: bigger ones on average."""
    for seed in range(first, first + 100):
        play_seed(seed)


@pytest.mark.slow
def test_many_more_seeded_scenarios():
    for seed in range(10_000, 30_000):
        play_seed(seed)


def play_seed(seed: int) -> None:
    try:
        play(make_scenario(SeededDice(seed)))
    except Exception as error:
        error.add_note(f"play(make_scenario(SeededDice({seed})))")
        raise
