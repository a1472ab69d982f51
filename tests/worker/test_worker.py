"""What a worker measures and answers."""

from __future__ import annotations

import pytest
from worker_fakes import InjectedModel, kv_config, new_request, plan

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import EngineError
from mainspring.base.messages import CheckHealth, GetStats, ResetPrefixCache
from mainspring.worker import worker
from mainspring.worker.worker import Worker

GIB = 2**30


def make_config(**more) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
    base = {"model": "", "executor": "uniproc", "block_size": 4, "depth": 1, "seed": 0, "vocab_size": 50}
    return EngineConfig(scheduler=scheduler, **{**base, **more})


@pytest.fixture
def model(monkeypatch) -> InjectedModel:
    made = InjectedModel(50)
    monkeypatch.setattr(worker, "load_model", lambda config, *rest: made)
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


def test_a_setting_decides_whatever_is_free(model, monkeypatch):
    monkeypatch.setattr(worker, "free_memory_bytes", lambda: 0)
    assert Worker(make_config(kv_cache_memory_bytes=12345)).determine_available_memory() == 12345
