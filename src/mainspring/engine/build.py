"""Assembles an engine: the one place that knows everybody.

Order, since each step needs the facts of the one before: executor (loads the model) -> KV specs -> free
memory -> KV layout, and with it `max_model_len` -> KV pool -> scheduler -> core. If one fails, what was built
is closed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from msgspec.structs import replace

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import ConfigError
from mainspring.base.messages import KVCacheConfig, KVCacheGroup, KVCacheSpec
from mainspring.base.protocols import Clock, Executor, GrammarCompiler, KVSource
from mainspring.core.kv_cache import KVCacheManager, max_blocks_of_request
from mainspring.core.scheduler import Scheduler
from mainspring.engine.core import EngineCore
from mainspring.executor.base import make_executor
from mainspring.grammar.compiler import Compiler

logger = logging.getLogger(__name__)

MAX_NUM_BLOCKS = 1 << 20  # of bookkeeping, not of memory: more than any CPU's pool holds


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and what was measured while building it."""

    core: EngineCore
    kv_config: KVCacheConfig
    max_model_len: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool


def build_engine(
    config: EngineConfig,
    executor: Executor | None = None,
    *,
    grammars: GrammarCompiler | None = None,
    kv_source: KVSource | None = None,
    clock: Clock = time.monotonic,
) -> Built:
    """Raises `ConfigError` with the numbers where the KV pool cannot hold one sequence of `max_model_len`."""
    with ExitStack() as undo:
        if executor is None:
            executor = make_executor(config)
        undo.callback(executor.close)
        specs = executor.get_kv_cache_specs()
        scheduler_config = adapt_to_model(config.scheduler, specs)
        max_in_flight_tokens = config.depth * scheduler_config.max_num_batched_tokens
        groups = group_layers(specs)
        kv_config = size_kv_cache(config, groups, executor.determine_available_memory())
        max_model_len = fit_max_model_len(config, kv_config, max_in_flight_tokens)
        scheduler_config = replace(scheduler_config, max_model_len=max_model_len)
        executor.initialize(kv_config, max_model_len)
        kv = KVCacheManager(
            kv_config,
            enable_caching=scheduler_config.enable_prefix_caching,
            max_in_flight_tokens=max_in_flight_tokens,
        )
        scheduler = Scheduler(
            scheduler_config, kv, clock=clock, vocab_size=config.vocab_size, kv_source=kv_source
        )
        if grammars is None and config.vocabulary is not None:
            grammars = Compiler(config.vocabulary, config.vocab_size)
        core = EngineCore(
            scheduler,
            executor,
            depth=config.depth,
            grammars=grammars,
            log_iteration_details=config.log_iteration_details,
        )
        undo.pop_all()
    return Built(
        core,
        kv_config,
        max_model_len,
        scheduler_config.enable_prefix_caching,
        scheduler_config.enable_chunked_prefill,
    )


def adapt_to_model(config: SchedulerConfig, specs: Sequence[KVCacheSpec]) -> SchedulerConfig:
    """A layer that looks ahead must see the whole prompt at once: chunks and shared prefixes would be
    wrong."""
    if all(spec.causal for spec in specs):
        return config
    logger.info("chunked prefill and prefix caching are off: the model has layers that are not causal")
    if config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            "the model has layers that are not causal, so max_num_batched_tokens "
            f"{config.max_num_batched_tokens} must hold a whole prompt of max_model_len "
            f"{config.max_model_len}: raise it or lower that"
        )
    return replace(config, enable_chunked_prefill=False, enable_prefix_caching=False)


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers that share a block table. Groups are about equally long, since the j-th layers of all of them
    share tensor j; layers of a kind that is much more frequent are spread over several groups of the rarest
    kind's size."""
    counts = Counter(specs)
    if len({spec.bytes_per_token for spec in counts}) > 1:
        sizes = sorted({spec.bytes_per_token for spec in counts})
        raise ConfigError(f"the model's layers store {sizes} bytes per token; only one size is supported yet")
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    size = most if most < 1.25 * least else least
    groups = []
    for spec in counts:  # in order of first appearance
        layers = [i for i, other in enumerate(specs) if other == spec]
        groups += [KVCacheGroup(tuple(layers[i : i + size]), spec) for i in range(0, len(layers), size)]
    return tuple(groups)


def size_kv_cache(
    config: EngineConfig, groups: tuple[KVCacheGroup, ...], available_bytes: int
) -> KVCacheConfig:
    """As many blocks as the memory holds, or as many as were asked for."""
    unsized = KVCacheConfig(num_blocks=0, block_size=config.block_size, groups=groups)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        num_blocks = min(available_bytes // max(1, unsized.bytes_per_block), MAX_NUM_BLOCKS)
    if num_blocks < 2:
        raise ConfigError(
            f"{available_bytes} bytes for the KV cache hold {num_blocks} blocks of {unsized.bytes_per_block} "
            "bytes, and 2 is the least: raise kv_cache_memory_bytes"
        )
    return replace(unsized, num_blocks=num_blocks)


def blocks_for(kv_config: KVCacheConfig, num_tokens: int, max_in_flight_tokens: int) -> int:
    """Blocks of all groups that a sequence of so many tokens needs at once."""
    return sum(
        max_blocks_of_request(group.spec, kv_config.block_size, num_tokens, max_in_flight_tokens)
        for group in kv_config.groups
    )


def fit_max_model_len(config: EngineConfig, kv_config: KVCacheConfig, max_in_flight_tokens: int) -> int:
    """The longest sequence that one request may have: what was asked for, or, if fitting is allowed, what the
    pool holds."""
    wanted, usable = config.scheduler.max_model_len, kv_config.num_blocks - 1
    fits = _largest_fitting(kv_config, wanted, max_in_flight_tokens)
    if fits == wanted:
        return wanted
    needed = blocks_for(kv_config, wanted, max_in_flight_tokens)
    if not config.fit_max_model_len or fits < 1:
        raise ConfigError(
            f"the KV cache has {usable} usable blocks ({usable * kv_config.bytes_per_block} bytes) and one "
            f"sequence of max_model_len {wanted} takes {needed} ({needed * kv_config.bytes_per_block} "
            f"bytes): set max_model_len to {fits} or less (auto: what fits), or raise kv_cache_memory_bytes "
            "or num_gpu_blocks_override"
        )
    logger.info("max_model_len is lowered from %d to %d, which the KV cache can hold", wanted, fits)
    return fits


def _largest_fitting(kv_config: KVCacheConfig, wanted: int, max_in_flight_tokens: int) -> int:
    """By bisection, for the need only grows with the length."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(kv_config, middle, max_in_flight_tokens) <= kv_config.num_blocks - 1:
            low = middle
        else:
            high = middle - 1
    return low
