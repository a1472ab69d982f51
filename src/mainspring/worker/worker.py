"""One device: loads the model, measures its memory, runs its plans. It knows no scheduler and no sockets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from mainspring.base.config import EngineConfig, execute_timeout_s
from mainspring.base.errors import ConfigError, EngineError
from mainspring.base.log import get_logger
from mainspring.base.memory import free_memory_bytes
from mainspring.base.messages import (
    SLEEP_TAGS,
    CheckHealth,
    Command,
    CommandResult,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    Sleep,
    WakeUp,
)
from mainspring.kernels.collectives import Collectives, PipeCollectives
from mainspring.models.loader import load_model
from mainspring.models.parallel import ALONE, Place, own_kv
from mainspring.worker.model_runner import ModelRunner
from mainspring.worker.stages import Stages

MOST_KV_BYTES = 4 * 2**30  # of the pool on a CPU, unless the settings say otherwise
KV_SHARE = 0.25  # of free memory, likewise

KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB, as users of vLLM on CPUs set it

logger = get_logger(__name__)


def _space_bytes(given: str) -> int:
    try:
        gib = float(given)
    except ValueError:
        gib = 0.0
    if not 0.0 < gib < 2**14:
        raise ConfigError(f"{KV_SPACE} {given!r} in the environment must be a number of GiB above 0")
    logger.info("KV cache: %s GiB, as %s says", given, KV_SPACE)
    return int(gib * 2**30)


def kv_pool_bytes(setting: int | None, free_bytes: int, num_sharing: int = 1) -> int:
    """The setting, else the environment's `VLLM_CPU_KVCACHE_SPACE`, else a quarter of what is free, at most 4
    GiB. What it was, and why, goes to the log."""
    if setting is not None:
        return setting
    if given := os.environ.get(KV_SPACE):
        return _space_bytes(given)
    pool_bytes = min(MOST_KV_BYTES, int(free_bytes * KV_SHARE)) // num_sharing
    logger.info(
        "KV cache: %.2f GiB, %sa quarter of the %.1f GiB of memory that are free, at most 4 GiB; "
        "kv_cache_memory_bytes sets it",
        pool_bytes / 2**30,
        f"one of {num_sharing} equal shares of " if num_sharing > 1 else "",
        free_bytes / 2**30,
    )
    return pool_bytes


def _progress(bar: tqdm) -> Callable[[int, int], None]:
    def show(done_bytes: int, total_bytes: int) -> None:
        bar.total = total_bytes
        bar.update(done_bytes - bar.n)

    return show


class Worker:
    """The CPU's worker. Its methods are those of the `Executor` protocol, run at once."""

    def __init__(
        self,
        config: EngineConfig,
        place: Place = ALONE,
        collectives: Collectives | None = None,
    ) -> None:
        """place, collectives: of this rank, where several share the model."""
        self._config = config
        self._place = place
        self._collectives = collectives
        self._expert_ranks: Collectives | None = None
        if (ranks := config.data_parallel) is not None:
            links = {rank: Connection(descriptor) for rank, descriptor in ranks.links.items()}
            self._expert_ranks = PipeCollectives(ranks.rank, range(ranks.size), links, execute_timeout_s())
            self._place = replace(place, expert_rank=ranks.rank, num_expert_ranks=ranks.size)
        # Outlives the model, as what others have sent does.
        self._stages = Stages(self._place, collectives) if self._place.pipeline_parallel_size > 1 else None
        self._kv_cache_memory_bytes = config.kv_cache_memory_bytes
        self._initialized: tuple[KVCacheConfig, int] | None = None  # with what, for WakeUp
        self._runner: ModelRunner | None = self._make_runner()

    def _make_runner(self) -> ModelRunner:
        if not sys.stderr.isatty():  # even a bar that is disabled starts a thread
            model = load_model(self._config, None, self._place, self._collectives, self._expert_ranks)
        else:
            with tqdm(
                desc="packing weights",
                total=0,
                unit="B",
                unit_scale=True,
                delay=0.5,  # most models are packed before anybody would have looked
                leave=False,
            ) as bar:
                model = load_model(
                    self._config, _progress(bar), self._place, self._collectives, self._expert_ranks
                )
        return ModelRunner(model, self._config.scheduler.max_num_seqs, self._stages)

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("the worker is closed")
        return self._runner

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.runner.model.kv_cache_specs()

    def determine_available_memory(self) -> int:
        """Bytes for the KV pool: see `kv_pool_bytes`."""
        num_sharing = self._place.world_size * self._config.num_local_engines
        return kv_pool_bytes(self._kv_cache_memory_bytes, free_memory_bytes(), num_sharing)

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self._initialized = (own_kv(config, self._place), max_model_len)
        self.runner.initialize(*self._initialized)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(plan)

    def execute_dummy_batch(self) -> None:
        self.runner.execute_dummy_batch()

    def has_any_rank_work(self, has_work: bool) -> bool:
        """See `Executor`."""
        if self._expert_ranks is None:
            return has_work
        flag = np.array([[float(has_work)]], np.float32)
        self._expert_ranks.all_reduce(flag)
        return bool(flag[0, 0] > 0.0)

    def sample_tokens(self, mask: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(mask)

    def call(self, command: Command) -> CommandResult:
        match command:
            case CheckHealth():
                return self.runner is not None
            case Sleep(level):
                return self._fall_asleep(level)
            case WakeUp(tags):
                return self._wake_up(set(tags or SLEEP_TAGS))
            case _:
                raise EngineError(f"{type(command).__name__} is answered by the engine core, not by workers")

    def _fall_asleep(self, level: int) -> bool:
        """Level 1 drops the KV pool; level 2 everything, to be read from the model's file again."""
        if level == 1:
            self.runner.model.release_kv()
        else:
            self._runner = None
        return True

    def _wake_up(self, tags: set[str]) -> bool:
        if "weights" in tags and self._runner is None:
            self._runner = self._make_runner()
        if "kv_cache" in tags:
            if self._initialized is None:
                raise EngineError("wake_up comes before initialize")
            self.runner.initialize(*self._initialized)
        return True

    def close(self) -> None:
        """Let the model and its memory go. Idempotent."""
        self._runner = None
