"""The benchmark of the process boundary measures what it says, on few steps and without a clock's verdict."""

from __future__ import annotations

import json
import time

import pytest

from mainspring.bench import process
from mainspring.bench.process import STEP_KINDS, WAYS, FakeStepExecutor, Reading
from mainspring.cli.program import main


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NUM_RUNNING", 8), ("STEPS", 20), ("WARM_UP_STEPS", 5), ("ROUNDS", 1)):
        monkeypatch.setattr(process, name, value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("few")
def test_every_way_reads_every_step_once(way: str):
    began_s = time.monotonic()
    reading = process.read(way, "none")
    assert len(reading.lateness_ms) == 20
    assert all(0 <= late < (time.monotonic() - began_s) * 1000 for late in reading.lateness_ms)
    assert reading.steps_per_s > 20 / (time.monotonic() - began_s)


@pytest.mark.parametrize(
    ("kind", "least_s"), [("none", 0.0), ("busy", process.STEP_S), ("sleep", process.STEP_S)]
)
@pytest.mark.usefixtures("few")
def test_a_step_takes_as_long_as_it_is_said_to(kind: str, least_s: float):
    reading = process.read("in process", kind)
    assert reading.steps_per_s <= (1 / least_s if least_s else float("inf"))


def test_a_busy_step_keeps_the_processor_and_a_sleeping_one_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "STEP_S", 0.05)
    used_s = {}
    for kind in STEP_KINDS:
        began_s, used_before_s = time.monotonic(), time.thread_time()
        FakeStepExecutor(process.config(kind)).spend()
        used_s[kind] = time.thread_time() - used_before_s
        assert kind == "none" or time.monotonic() - began_s >= 0.05
    assert used_s["busy"] > 5 * used_s["sleep"]


def test_shares_are_of_the_same_round_and_figures_medians(monkeypatch: pytest.MonkeyPatch, capsys):
    """By hand: rounds in which the machine is 1, 2 and 4 times as fast, and process mode always at 80 %."""
    taken = {way: 0 for way in WAYS}

    def read(way: str, step: str) -> Reading:
        speed = 2 ** (taken[way] // len(STEP_KINDS))
        taken[way] += 1
        late = [0.1 * speed] * 99 + [5.0]
        return Reading(late, 100.0 * speed if way == "in process" else 80.0 * speed)

    monkeypatch.setattr(process, "read", read)
    monkeypatch.setattr(process, "ROUNDS", 3)
    assert main(["bench", "scheduler", "--process", "--json"]) == 0
    shown = capsys.readouterr()
    figures = json.loads(shown.out)["steps"]["sleep"]
    assert figures["in process"] == {"steps_per_s": 200.0}
    assert figures["sync"]["steps_per_s"] == 160.0
    assert figures["async"]["share_of_in_process"] == 0.8
    assert figures["sync"]["late_ms_median"] == 0.2
    assert figures["sync"]["late_ms_p99"] > 4
    assert "sleeps 2 ms                     sync            160      80% (aim 95%)       0.20 ms" in shown.err
