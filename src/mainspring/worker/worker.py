"""One device: loads the model, measures its memory, runs its plans. It knows no scheduler and no sockets."""

from __future__ import annotations

import os
from pathlib import Path

from mainspring.base.config import EngineConfig
from mainspring.base.errors import EngineError
from mainspring.base.log import get_logger
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
from mainspring.models.loader import load_model
from mainspring.worker.model_runner import ModelRunner

MOST_KV_BYTES = 4 * 2**30  # of the pool on a CPU, unless the settings say otherwise
KV_SHARE = 0.25  # of free memory, likewise

logger = get_logger(__name__)


class Worker:
    """The CPU's worker. Its methods are those of the `Executor` protocol, run at once."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._kv_cache_memory_bytes = config.kv_cache_memory_bytes
        self._initialized: tuple[KVCacheConfig, int] | None = None  # with what, for WakeUp
        self._runner: ModelRunner | None = self._make_runner()

    def _make_runner(self) -> ModelRunner:
        return ModelRunner(load_model(self._config), self._config.scheduler.max_num_seqs)

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
        self._initialized = (config, max_model_len)
        self.runner.initialize(config, max_model_len)

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        return self.runner.execute_model(plan)

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


def free_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still allocate: free on the machine, and free within its control groups."""
    return min([_machine_free_bytes(proc), *_cgroup_free_bytes(proc, cgroups)])


def _machine_free_bytes(proc: Path) -> int:
    if (meminfo := _read(proc / "meminfo")) is not None:
        for line in meminfo.splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    # all there is: nothing better is known here
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_free_bytes(proc: Path, cgroups: Path) -> list[int]:
    """Limit minus use of the process's memory group and of each group above it, where they have limits.

    Page cache that can be dropped (`inactive_file`) counts as free: a model's mapped file is much of it.
    """
    found: list[int] = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, use_name = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, use_name = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(root):
                break
            limit, use = _number(directory / limit_name), _number(directory / use_name)
            if limit is not None and use is not None:
                found.append(max(0, limit - use + _inactive_file_bytes(directory)))
    return found


def _inactive_file_bytes(directory: Path) -> int:
    for line in (_read(directory / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # not there on this platform, or not for us to read: then it says nothing
        return None
