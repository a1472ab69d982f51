"""Prompts wait where ranks step together, and nobody who decodes ever does."""

from __future__ import annotations

import pytest
from test_scheduler import CASE, finish, greedy, rows, start, text

from mainspring.engine.lockstep import should_throttle_prefills
from mainspring.testing.simulation import guest


def test_new_prompts_and_chunks_wait_for_an_aligned_step():
    drive = start(CASE, guest("decoding", text(5, 1), params=greedy(40)))
    drive.step()
    for name in ("long", "short"):
        drive.guests[name] = guest(name, text(150 if name == "long" else 4, len(name)), params=greedy(3))
        drive.executor.roots[name] = drive.model.root(drive.guests[name].message)
        drive.add(name)
    drive.scheduler.throttles_prefills = True
    for _ in range(5):
        drive.step()
        assert rows(drive) == {"decoding": 1}
    drive.scheduler.throttles_prefills = False
    drive.step()
    assert rows(drive) == {"decoding": 1, "long": 63}
    drive.scheduler.throttles_prefills = True
    drive.step()
    assert rows(drive) == {"decoding": 1}, "a prompt that has begun waits as well"
    drive.scheduler.throttles_prefills = False
    finish(drive)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_whoever_decodes_has_a_row_in_every_step(interval: int):
    """Whatever is throttled when: all requests end, and a decoding one misses no step."""
    guests = [
        guest(f"r{n}", text(3 + 29 * (n % 4), n), params=greedy(6 + n % 3), arrives_at=3 * n)
        for n in range(9)
    ]
    drive = start(CASE, *guests)
    scheduler = drive.scheduler
    for step in range(400):
        if not scheduler.has_requests():
            break
        decoding = [request for request in scheduler.running if request.num_todo == 1]
        scheduler.throttles_prefills = should_throttle_prefills(
            step, interval, scheduler.num_decoding(), scheduler.had_no_room
        )
        before = len(drive.executor.plans)
        drive.step()
        if len(drive.executor.plans) > before:
            planned = set(drive.executor.plans[-1].slots)
            still = [request for request in decoding if request.slot >= 0]
            assert all(request.slot in planned for request in still)
    assert not scheduler.has_requests()
