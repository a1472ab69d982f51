"""Encoders, in both forms of files: hidden states are what an independent implementation says.

Through the decoder's pass itself: whole texts, each in its own blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_fixtures
import numpy as np
import pytest
from family_files import write_folder, write_gguf
from family_fixtures import ENCODERS, Fixture, Floats
from safetensors.numpy import save_file

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.messages import KVCacheConfig, KVCacheGroup
from mainspring.kernels.native import library, why_not
from mainspring.kernels.ops import Batch
from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model

BLOCK_SIZE, NUM_BLOCKS = 16, 12
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return family_fixtures.load("bert", ENCODERS)


def encoder(path: Path, **changes: Any) -> Decoder:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40)
    settings: dict[str, Any] = {
        "model": str(path),
        "vocab_size": 61,
        "executor": "uniproc",
        "scheduler": scheduler,
        "block_size": BLOCK_SIZE,
        "depth": 1,
        "seed": 0,
        "kernels": "numpy",
    }
    decoder = load_model(EngineConfig(**settings | changes))
    specs = decoder.kv_cache_specs()
    group = KVCacheGroup(tuple(range(len(specs))), specs[0])
    decoder.initialize_kv(KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE, (group,)))
    return decoder


def hidden_states(decoder: Decoder, texts: list[list[int]]) -> list[Floats]:
    """Of whole texts, in one batch."""
    ends = np.cumsum([0, *map(len, texts)])
    tables = np.zeros((len(texts), NUM_BLOCKS), np.int32)
    free = iter(range(1, NUM_BLOCKS))
    slots = []
    for table, text in zip(tables, texts, strict=True):
        for i in range(-(-len(text) // BLOCK_SIZE)):
            table[i] = next(free)
        positions = np.arange(len(text))
        slots.append(table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
    batch = Batch(
        token_ids=np.concatenate(texts).astype(np.int32),
        positions=np.concatenate([np.arange(len(text)) for text in texts]).astype(np.int32),
        query_start_loc=ends.astype(np.int32),
        seq_lens=np.diff(ends).astype(np.int32),
        block_tables=(tables,),
        slot_mapping=(np.concatenate(slots).astype(np.int64),),
    )
    return np.split(decoder.forward(batch).copy(), ends[1:-1])


def check(decoder: Decoder, fixture: Fixture) -> None:
    for found, expected in zip(hidden_states(decoder, fixture.token_ids), fixture.logits, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_folder(fixture: Fixture, tmp_path: Path) -> None:
    check(encoder(write_folder(fixture, tmp_path)), fixture)


def test_gguf(fixture: Fixture, tmp_path: Path) -> None:
    check(encoder(write_gguf(fixture, tmp_path / "model.gguf")), fixture)


def test_a_checkpoint_of_a_model_around_the_encoder(fixture: Fixture, tmp_path: Path) -> None:
    """Its names begin with `bert.`, and it has heads of training, and positions counted."""
    write_folder(fixture, tmp_path)
    tensors = {f"bert.{name}": values for name, values in fixture.tensors().items()}
    tensors["cls.predictions.bias"] = np.zeros(61, np.float32)
    tensors["bert.embeddings.position_ids"] = np.arange(40, dtype=np.float32)[None]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(encoder(tmp_path), fixture)


def test_a_text_alone_is_what_it_is_in_a_batch(fixture: Fixture, tmp_path: Path) -> None:
    decoder = encoder(write_folder(fixture, tmp_path))
    for text, expected in zip(fixture.token_ids, fixture.logits, strict=True):
        np.testing.assert_allclose(hidden_states(decoder, [text])[0], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(library() is None, reason=str(library() is None and why_not()))
def test_native_kernels(fixture: Fixture, tmp_path: Path) -> None:
    path = write_folder(fixture, tmp_path)
    check(encoder(path, kernels="native", kv_cache_dtype="float32"), fixture)
