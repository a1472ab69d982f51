"""The scheduler's benchmark measures what it says: steady decode; blocked and parked requests stay so."""

from __future__ import annotations

import pytest

from mainspring.bench import scheduler
from mainspring.bench.scheduler import BLOCK_SIZE, NUM_WAITING, TOKEN, Case, Load


@pytest.mark.parametrize("mixed", [False, True])
def test_every_step_is_one_token_of_every_request(mixed: bool):
    load = Load(32, mixed=mixed)
    before = {request.request_id: len(request.token_ids) for request in load.scheduler.running}
    for _ in range(BLOCK_SIZE):
        assert load.step() > 0
    for request in load.scheduler.running:
        assert len(request.token_ids) == before[request.request_id] + BLOCK_SIZE
        assert request.token_ids[-1] == TOKEN
        assert request.eos_token_id is not None
    assert load.scheduler.kv.enable_caching
    assert len({request.request_id for request in load.scheduler.running}) == 32


def test_waiting_requests_stay_where_they_are():
    for waiting, place in (("blocked", "waiting"), ("parked", "parked")):
        load = Load(8, waiting)
        load.step()
        assert len(getattr(load.scheduler, place)) == NUM_WAITING
        assert load.scheduler._free_slots, "they wait for blocks, not for slots"
        load.scheduler.check()


def test_figures_and_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        scheduler, "best_step_us", lambda cases: {case: 2.0 * case.num_running for case in cases}
    )
    figures = scheduler.measure()
    assert figures["us_per_request_step"] == {"1": 2.0, "8": 2.0, "64": 2.0, "256": 2.0, "1024": 2.0}
    assert figures["us_per_step_at_1"] == 2.0
    assert figures["us_added_by_4000_waiting"] == 0.0
    assert "4000 waiting, parked     +0.0 us a step" in scheduler.table(figures)


def test_the_best_of_several_medians_is_kept(monkeypatch: pytest.MonkeyPatch):
    medians = iter([3.0, 5.0, 2.0, 6.0, 4.0, 1.0])
    monkeypatch.setattr(scheduler, "median_step_us", lambda load, collector: next(medians))
    assert scheduler.best_step_us([Case(1), Case(8)]) == {Case(1): 2.0, Case(8): 1.0}
