"""The executor in this process: order, futures, failures, closing."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import ConfigError, EngineDeadError, EngineError
from mainspring.base.messages import (
    CheckHealth,
    GetStats,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    NewRequestData,
    SchedulerOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.executor.base import make_executor
from mainspring.executor.uniproc import UniProcExecutor
from mainspring.worker import worker

SPEC = KVCacheSpec(num_kv_heads=1, head_size=4)
KV = KVCacheConfig(8, 4, (KVCacheGroup((0,), SPEC),))
GREEDY = SamplingParams(temperature=0)
NEXT = 3  # the model's next token is this many after the last one


class CountingModel:
    """Says last token + 3; waits at `gate`; breaks at the token 13."""

    vocab_size = 50

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def kv_cache_specs(self):
        return [SPEC]

    def initialize_kv(self, config):
        pass

    def forward(self, batch):
        assert self.gate.wait(10)
        if 13 in batch.token_ids:
            raise RuntimeError("thirteen")
        return batch.token_ids[:, None].astype(np.float32)

    def logits(self, hidden):
        return np.eye(50, dtype=np.float32)[hidden[:, 0].astype(int) + NEXT]


def make_config(**more) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32)
    base = {"model": "", "executor": "uniproc", "block_size": 4, "depth": 1, "seed": 0, "vocab_size": 50}
    return EngineConfig(scheduler=scheduler, **{**base, **more})


@pytest.fixture
def model(monkeypatch) -> CountingModel:
    made = CountingModel()
    monkeypatch.setattr(worker, "load_model", lambda config, *rest: made)
    return made


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def executor(request, model):
    made = UniProcExecutor(make_config(depth=request.param))
    assert made.get_kv_cache_specs() == [SPEC]
    assert made.determine_available_memory() > 0
    made.initialize(KV, 32)
    yield made
    made.close()


def first_step(token: int = 1) -> SchedulerOutput:
    new = NewRequestData(0, "r", [token], 1, 0, ([1, 2, 3],), GREEDY)
    return SchedulerOutput(0, [0], [1], [0], 1, new_requests=[new])


def next_step() -> SchedulerOutput:
    return SchedulerOutput(1, [0], [1], [0], 1)


def test_steps_run_in_order(executor):
    futures = []
    for n in range(3):
        forward = executor.execute_model(next_step() if n else first_step())
        futures.append(executor.sample_tokens(None))
    assert forward.result() is None
    assert [f.result().sampled_token_ids for f in futures] == [[[4]], [[7]], [[10]]]
    assert executor.call(CheckHealth()) == [True]


def test_one_step_in_flight_is_done_when_the_call_returns(model):
    executor = UniProcExecutor(make_config(depth=1))
    executor.initialize(KV, 32)
    assert executor.execute_model(first_step()).done()
    assert executor.sample_tokens(None).done()
    assert not [t for t in threading.enumerate() if t.name.startswith("mainspring-worker")]
    executor.close()


def test_with_more_in_flight_the_caller_does_not_wait(model):
    executor = UniProcExecutor(make_config(depth=2))
    executor.initialize(KV, 32)
    model.gate.clear()
    futures = [executor.execute_model(first_step()), executor.sample_tokens(None)]
    futures += [executor.execute_model(next_step()), executor.sample_tokens(None)]
    assert not any(f.done() for f in futures)
    model.gate.set()
    assert futures[-1].result(10).sampled_token_ids == [[7]]
    executor.execute_model(next_step(), non_block=False)
    assert executor.sample_tokens(None, non_block=False).done()
    executor.close()


def test_an_exception_is_in_its_future_and_its_cause_in_all_later_ones(executor):
    forward = executor.execute_model(first_step(13))
    sampled = executor.sample_tokens(None, non_block=False)
    later = executor.execute_model(next_step(), non_block=False)
    with pytest.raises(RuntimeError, match="thirteen"):
        forward.result()
    for future in (sampled, later):
        with pytest.raises(
            EngineDeadError, match=r"an earlier step failed: RuntimeError: thirteen \(test_uniproc"
        ):
            future.result()
    with pytest.raises(EngineDeadError, match="thirteen"):
        executor.call(CheckHealth())


def test_a_refused_command_harms_nothing(executor):
    with pytest.raises(EngineError, match="GetStats"):
        executor.call(GetStats())
    assert executor.call(CheckHealth()) == [True]


def test_closing_twice_is_closing_once(executor):
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="executor is closed"):
        executor.execute_model(first_step())
    assert not [t for t in threading.enumerate() if t.name.startswith("mainspring-worker")]


def test_an_executor_left_open_does_not_keep_the_interpreter():
    program = """
from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.executor.uniproc import UniProcExecutor
from mainspring.worker import worker
class Model:
    vocab_size = 5
    def kv_cache_specs(self): return []
worker.load_model = lambda config, *rest: Model()
scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
executor = UniProcExecutor(EngineConfig(
    model="", executor="uniproc", block_size=4, depth=2, seed=0, vocab_size=5, scheduler=scheduler))
print(executor.get_kv_cache_specs())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_executors_are_found_by_name(model):
    assert isinstance(make_executor(make_config()), UniProcExecutor)
    place = "mainspring.executor.uniproc:UniProcExecutor"
    assert isinstance(make_executor(make_config(executor=place)), UniProcExecutor)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ray", "executor 'ray' is unknown; use multiproc, uniproc or module:Class"),
        ("no.such.module:X", "cannot be imported"),
        ("mainspring.executor.uniproc:Nobody", "cannot be imported"),
        (":", "is unknown"),
        (".here:X", "cannot be imported"),
        ("os:path", "'os:path' cannot be called with a configuration .* name a class of executors"),
        ("os:getcwd", "cannot be called with a configuration"),
        ("builtins:repr", "is none: it lacks get_kv_cache_specs, determine_available_memory, "),
    ],
)
def test_executors_that_do_not_exist_are_refused(name, error):
    with pytest.raises(ConfigError, match=error):
        make_executor(make_config(executor=name))
