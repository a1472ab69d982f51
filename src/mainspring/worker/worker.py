"""One device: loads the model, measures its memory, runs its plans. It knows no scheduler and no sockets."""

from __future__ import annotations

from typing import assert_never

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineError
from mainspring.base.log import get_logger
from mainspring.base.memory import free_memory_bytes
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    GetStats,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    ResetPrefixCache,
    SchedulerOutput,
)
from mainspring.models.loader import load_model
from mainspring.worker.model_runner import ModelRunner

MOST_KV_BYTES = 4 * 2**30  # of the pool on a CPU, unless the settings say otherwise
KV_SHARE = 0.25  # of free memory, likewise

logger = get_logger(__name__)


class Worker:
    """The CPU's worker. Its methods are those of the `Executor` protocol, run at once."""

    def __init__(self, config: EngineConfig) -> None:
        self._kv_cache_memory_bytes = config.kv_cache_memory_bytes
        self._runner: ModelRunner | None = ModelRunner(load_model(config), config.scheduler.max_num_seqs)

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("the worker is closed")
        return self._runner

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.runner.model.kv_cache_specs()

    def determine_available_memory(self) -> int:
        """Bytes for the KV pool: the setting, else a quarter of what is free, at most 4 GiB."""
        if self._kv_cache_memory_bytes is not None:
            return self._kv_cache_memory_bytes
        free_bytes = free_memory_bytes()
        logger.info("%.2f GiB of memory are free", free_bytes / 2**30)
        return min(MOST_KV_BYTES, int(free_bytes * KV_SHARE))

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self.runner.initialize(config, max_model_len)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(plan)

    def sample_tokens(self, mask: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(mask)

    def call(self, command: Command) -> CommandResult:
        match command:
            case CheckHealth():
                return self.runner is not None
            case ResetPrefixCache() | GetStats():
                raise EngineError(f"{type(command).__name__} is answered by the engine core, not by workers")
            case forgotten:
                assert_never(forgotten)

    def close(self) -> None:
        """Let the model and its memory go. Idempotent."""
        self._runner = None
