"""What a worker measures and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_fakes import InjectedModel, kv_config, new_request, plan

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import EngineError
from mainspring.base.messages import CheckHealth, GetStats, ResetPrefixCache
from mainspring.worker import worker
from mainspring.worker.worker import Worker, free_memory_bytes

GIB = 2**30


def make_config(**more) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    base = {"model": "", "executor": "uniproc", "block_size": 4, "depth": 1, "seed": 0, "vocab_size": 50}
    return EngineConfig(scheduler=scheduler, **{**base, **more})


@pytest.fixture
def model(monkeypatch) -> InjectedModel:
    made = InjectedModel(50)
    monkeypatch.setattr(worker, "load_model", lambda config: made)
    return made


def test_a_worker_loads_measures_runs_and_closes(model):
    made = Worker(make_config())
    assert made.get_kv_cache_specs() == model.kv_cache_specs()
    made.initialize(kv_config(), 64)
    assert made.execute_model(plan({0: 1}, new_requests=[new_request(0, [1])])) is None
    assert len(made.sample_tokens(None).sampled_token_ids[0]) == 1
    assert made.call(CheckHealth()) is True
    for command in (ResetPrefixCache(), GetStats()):
        with pytest.raises(EngineError, match=type(command).__name__):
            made.call(command)
    made.close()
    made.close()
    with pytest.raises(EngineError, match="closed"):
        made.call(CheckHealth())


@pytest.mark.parametrize(("free", "expected"), [(2 * GIB, GIB // 2), (64 * GIB, 4 * GIB)])
def test_the_pool_is_a_quarter_of_what_is_free_and_at_most_4_gib(model, monkeypatch, free, expected):
    monkeypatch.setattr(worker, "free_memory_bytes", lambda: free)
    assert Worker(make_config()).determine_available_memory() == expected


def test_a_setting_decides_before_measuring(model, monkeypatch):
    monkeypatch.delattr(worker, "free_memory_bytes")
    assert Worker(make_config(kv_cache_memory_bytes=12345)).determine_available_memory() == 12345


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal:  99 kB\nMemAvailable:    8388608 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/\n", "cg/memory.max": "max\n", "cg/memory.current": "5\n"}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "cg/a/memory.max": f"{3 * GIB}\n",
                "cg/a/memory.current": f"{2 * GIB}\n",
                "cg/a/memory.stat": f"anon 7\ninactive_file {GIB}\n",
                "cg/a/b/memory.max": "max\n",
                "cg/a/b/memory.current": f"{2 * GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n7:memory:/x\n",
                "cg/memory/x/memory.limit_in_bytes": f"{GIB}\n",
                "cg/memory/x/memory.usage_in_bytes": "1000\n",
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/memory/memory.usage_in_bytes": "2000\n",
            },
            GIB - 1000,
        ),
        (
            {"proc/self/cgroup": "0::/\n", "cg/memory.max": "100\n", "cg/memory.current": "300\n"},
            0,
        ),
    ],
)
def test_free_memory_is_the_least_of_machine_and_control_groups(tmp_path, files, expected):
    write(tmp_path, {**MEMINFO, **files})
    assert free_memory_bytes(tmp_path / "proc", tmp_path / "cg") == expected


def test_free_memory_where_there_is_no_proc(tmp_path):
    assert free_memory_bytes(tmp_path, tmp_path) > 2**20


def test_free_memory_of_this_machine():
    assert free_memory_bytes() > 2**20
