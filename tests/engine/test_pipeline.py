"""A pipeline of stages has work in every stage, and says what one worker says."""

import importlib.util
from pathlib import Path

import pytest

from mainspring.testing.fake_pipeline import timeline

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("pipeline_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_stages_are_worth_more_than_one_and_a_half(benchmark):
    """In time that is counted, not measured: 32 requests, against one batch at a time."""
    by_tokens, half, whole = benchmark.measure(2)
    assert by_tokens["ratio"] >= 1.5
    assert half["ratio"] >= 1.9
    assert whole["ratio"] >= 0.95, "where a pipeline cannot gain, it does not lose"


def test_no_stage_waits_while_requests_decode(benchmark):
    executor = benchmark.run(benchmark.KINDS[0], 2, 2)
    for line in timeline(executor.visits, 6, 8).splitlines():
        visits = line.split()[-1]
        assert "." not in visits.strip("."), line


@pytest.mark.parametrize("depth", [2, 3])
def test_requests_take_turns(benchmark, depth):
    """Half of them in each step, the same one in every second: nobody is held back for another."""
    executor = benchmark.run(benchmark.KINDS[0], 2, depth)
    plans = [plan for plan in executor._inner.plans if len(plan.slots) > 1 and not plan.new_requests]
    steady = plans[4:30]
    assert {len(plan.slots) for plan in steady} == {16}
    for one, other, again in zip(steady, steady[1:], steady[2:], strict=False):
        assert not set(one.slots) & set(other.slots)
        assert set(one.slots) == set(again.slots)
