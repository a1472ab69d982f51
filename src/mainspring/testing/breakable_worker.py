"""A worker that a test can watch and break: one rank does one deed when it reaches a phase.

It is chosen by `EngineConfig.executor_args`:

    worker          `mainspring.testing.breakable_worker:BreakableWorker`
    rank            which one
    phase, deed     at this phase it does this, once
    nap_s           how long the deed "sleep" lasts
    mark            the path of a file that gets its pid when it has reached the phase
    step_s          every step of every rank takes so long

Phases: start-up is before there is a model, loading after, initialize with the KV pool, prefill a step with a
new request, decode a step that continues, sample the second half of a step, command a `CheckHealth`, idle a
moment after it, shutdown the worker's `close`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from mainspring.base.config import EngineArgs, EngineConfig, ModelFacts, resolve
from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    GrammarOutput,
    KVCacheConfig,
    ModelRunnerOutput,
    SchedulerOutput,
)
from mainspring.kernels.collectives import Collectives
from mainspring.models.parallel import Place
from mainspring.worker.worker import Worker

NAME = "mainspring.testing.breakable_worker:BreakableWorker"

Phase = Literal[
    "start-up", "loading", "initialize", "prefill", "decode", "sample", "command", "idle", "shutdown"
]
Deed = Literal["nothing", "raise", "refuse", "damage", "sleep", "kill", "stop", "exit"]

MODEL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FACTS = ModelFacts(
    path=json.dumps(MODEL),
    architecture="llama",
    max_position_embeddings=512,
    vocab_size=128,
    eos_token_ids=(),
)
DECODES_BEFORE = 3  # steps without a new request, before a deed "decode"
IDLE_AFTER_S = 0.05


class PlannedFailure(Exception):
    """What the deed "raise" raises."""


class BreakableWorker(Worker):
    """The deed "refuse" finds a wrong setting, "damage" a wrong file; "exit" ends it with status 3."""

    def __init__(self, config: EngineConfig, place: Place, collectives: Collectives) -> None:
        args = config.executor_args
        self._phase: Phase | None = args.get("phase") if place.rank == args.get("rank") else None
        self._deed: Deed = args.get("deed", "nothing")
        self._nap_s: float = args.get("nap_s", 600.0)
        self._mark: str | None = args.get("mark")
        self._step_s: float = args.get("step_s", 0.0)
        self._num_decodes = 0
        self._reach("start-up")
        super().__init__(config, place, collectives)
        self._reach("loading")

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self._reach("initialize")
        super().initialize(config, max_model_len)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        time.sleep(self._step_s)
        if plan.new_requests:
            self._reach("prefill")
        elif plan.num_rows:
            self._num_decodes += 1
            if self._num_decodes > DECODES_BEFORE:
                self._reach("decode")
        return super().execute_model(plan)

    def sample_tokens(self, mask: GrammarOutput | None) -> ModelRunnerOutput:
        self._reach("sample")
        return super().sample_tokens(mask)

    def call(self, command: Command) -> CommandResult:
        if isinstance(command, CheckHealth):
            self._reach("command")
            threading.Timer(IDLE_AFTER_S, self._reach, ["idle"]).start()
        return super().call(command)

    def close(self) -> None:
        self._reach("shutdown")
        super().close()

    def _reach(self, phase: Phase) -> None:
        if phase != self._phase:
            return
        self._phase = None
        if self._mark is not None:
            Path(self._mark).write_text(str(os.getpid()))
        match self._deed:
            case "raise":
                raise PlannedFailure(f"at {phase}")
            case "refuse":
                raise ConfigError(f"setting {phase} is wrong")
            case "damage":
                raise CheckpointError(f"file {phase} is damaged")
            case "sleep":
                time.sleep(self._nap_s)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit" if threading.current_thread() is threading.main_thread():
                sys.exit(3)
            case "exit":
                os._exit(3)


def breakable_config(*, settings: dict[str, Any] | None = None, **executor_args: Any) -> EngineConfig:
    """Two workers or more that share a tiny model of random weights. settings: fields of `EngineArgs`."""
    given: dict[str, Any] = {
        "load_format": "dummy",
        "kernels": "numpy",
        "num_gpu_blocks_override": 65,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    config = resolve(EngineArgs(**given | (settings or {})), FACTS)
    return structs.replace(config, executor_args={"worker": NAME, **executor_args})
