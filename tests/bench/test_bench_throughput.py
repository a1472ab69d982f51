"""What counts as prefill and what as decode, with an engine that is a script and a clock that ticks."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest

from mainspring.bench import startup, throughput
from mainspring.bench.throughput import SCENARIOS, Scenario


class TickingEngine:
    """Each step takes a second: one prompt is read per step, then every started request says a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.left: dict[str, int] = {}
        self.unread: list[str] = []
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def add_request(self, request_id, prompt, params) -> None:
        assert params.ignore_eos
        self.unread.append(request_id)
        self.left[request_id] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self):
        self.now += 1.0
        if self.unread:
            self.unread.pop(0)
        said = [request_id for request_id in self.left if request_id not in self.unread]
        for request_id in said:
            self.left[request_id] -= 1
            if not self.left[request_id]:
                del self.left[request_id]
        return [SimpleNamespace(request_id=i, outputs=[SimpleNamespace(token_ids=[7])]) for i in said]


def test_rates(monkeypatch: pytest.MonkeyPatch):
    engine = TickingEngine(monkeypatch)
    rates = throughput.run(engine, Scenario("two", 2, 10, 4, "decode"), random.Random(0))
    # Steps 1 and 2 read the prompts; the requests then have 2 and 3 tokens to say, which takes 3 more steps.
    assert rates.prefill == pytest.approx(20 / 2)
    assert rates.decode == pytest.approx(5 / 3)


def test_a_scenario_without_decode(monkeypatch: pytest.MonkeyPatch):
    rates = throughput.run(TickingEngine(monkeypatch), Scenario("one", 1, 10, 1, "prefill"), random.Random(0))
    assert rates == (10.0, 0.0)


def test_table_names_every_scenario():
    figures = {
        "model": "m",
        "kernels": "numpy",
        "repeats": 1,
        "load_s": 1.0,
        "tokens_per_s": {scenario.name: 12.5 for scenario in SCENARIOS},
        "sgemm_gflops": 100.0,
        "peak_memory_bytes": 2**30,
    }
    table = throughput.table(figures)
    assert table.count("12.5 tokens/s") == len(SCENARIOS)
    assert "decode 32 x (512 + 32)" in table
    assert "1.00 GiB" in table


def test_machine_figures():
    assert throughput.sgemm_gflops() > 0.1
    assert throughput.peak_memory_bytes() > 10 * 2**20


def test_the_size_of_an_install(tmp_path, monkeypatch: pytest.MonkeyPatch):
    for name, size in (
        ("numpy/core.so", 700),
        ("mainspring/cli/chat.py", 50),
        ("pip/x.py", 9000),
        ("pip-1.dist-info/y", 9000),
        ("_distutils_hack/z", 9000),
        ("distutils-precedence.pth", 9000),
        ("setuptools-70.dist-info/y", 9000),
        ("typing_extensions.py", 3),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    monkeypatch.setattr(startup.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(sys, "prefix", "/a/venv")
    assert startup.install_bytes() == 753
    (tmp_path / "pytest").mkdir()
    assert startup.install_bytes() is None
    (tmp_path / "pytest").rmdir()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert startup.install_bytes() is None
