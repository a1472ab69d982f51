"""Tiny models, and requests that drive them through scattered blocks."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.messages import KVCacheConfig, KVCacheGroup
from mainspring.kernels.ops import Batch, Floats
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOWED = TINY | {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
BLOCK_SIZE = 4


def engine_config(model: str, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": model,
        "vocab_size": 256,
        "executor": "uniproc",
        "scheduler": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=128),
        "block_size": BLOCK_SIZE,
        "depth": 1,
        "seed": 5,
        "load_format": "dummy",
    }
    return EngineConfig(**settings | changes)


def kv_config(decoder: Decoder, num_blocks: int = 100) -> KVCacheConfig:
    """A group for each kind of layer."""
    specs = decoder.kv_cache_specs()
    groups = [
        KVCacheGroup(tuple(i for i, spec in enumerate(specs) if spec == kind), kind)
        for kind in dict.fromkeys(specs)
    ]
    return KVCacheConfig(num_blocks, BLOCK_SIZE, tuple(groups))


def tiny(config: dict[str, Any] = TINY) -> Decoder:
    decoder = load_model(engine_config(json.dumps(config)))
    decoder.initialize_kv(kv_config(decoder))
    return decoder


class Requests:
    """Token lists, read in steps through scattered blocks."""

    def __init__(self, lengths: list[int], num_groups: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = [rng.integers(0, 256, length).astype(np.int32) for length in lengths]
        free = iter(rng.permutation(np.arange(1, 100)).tolist())
        self.tables = [
            [[next(free) for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
            for _ in range(num_groups)
        ]
        self.done = [0] * len(lengths)

    def batch(self, counts: list[int]) -> Batch:
        """The next `counts[r]` tokens of request r; those with none are left out."""
        rows = [r for r, count in enumerate(counts) if count]
        positions = [np.arange(self.done[r], self.done[r] + counts[r]) for r in rows]
        tables, slots = [], []
        for group in self.tables:
            width = max(len(group[r]) for r in rows)
            tables.append(np.array([group[r] + [0] * (width - len(group[r])) for r in rows], np.int32))
            slots.append(
                np.concatenate(
                    [
                        np.array(group[r])[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                        for r, p in zip(rows, positions, strict=True)
                    ]
                ).astype(np.int64)
            )
        for r in rows:
            self.done[r] += counts[r]
        return Batch(
            token_ids=np.concatenate([self.tokens[r][p] for r, p in zip(rows, positions, strict=True)]),
            positions=np.concatenate(positions).astype(np.int32),
            query_start_loc=np.array([0, *itertools.accumulate(counts[r] for r in rows)], np.int32),
            seq_lens=np.array([self.done[r] for r in rows], np.int32),
            block_tables=tuple(tables),
            slot_mapping=tuple(slots),
        )


def logits_of(decoder: Decoder, lengths: list[int], steps: list[list[int]], seed: int = 0) -> list[Floats]:
    """Logits at every token of every request."""
    requests = Requests(lengths, len(kv_config(decoder).groups), seed)
    rows: list[list[Floats]] = [[] for _ in lengths]
    for counts in steps:
        hidden = decoder.forward(requests.batch(counts))
        logits = decoder.logits(hidden).copy()
        running = [r for r, count in enumerate(counts) if count]
        parts = np.split(logits, np.cumsum([counts[r] for r in running])[:-1])
        for r, part in zip(running, parts, strict=True):
            rows[r].append(part)
    assert requests.done == lengths, "the steps must cover every token"
    return [np.concatenate(parts) for parts in rows]
