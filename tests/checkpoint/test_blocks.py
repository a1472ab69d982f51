"""Tensor types against the reference reader, over any bytes at all: NaN and infinite scales, every code."""

from __future__ import annotations

import gguf
import gguf.quants
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.checkpoint.blocks import (
    OTHER_TYPE_NAMES,
    TENSOR_TYPES,
    TILE_WEIGHTS,
    TYPES_BY_NAME,
    TensorType,
    are_finite,
    decode_blocks,
    largest_group_scale,
)

KINDS = list(TENSOR_TYPES.values())
SUPER_BLOCKS = [kind for kind in KINDS if kind.group_scales]
SCALED = [kind for kind in KINDS if kind.layout.names]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
each_super_block = pytest.mark.parametrize("kind", SUPER_BLOCKS, ids=lambda kind: kind.name)


def decoded(kind: TensorType, raw: np.ndarray) -> np.ndarray:
    out = np.full(raw.size // kind.block_bytes * kind.block_size, 7.0, np.float32)
    decode_blocks(kind, raw.reshape(-1), out)
    return out


def reference(kind: TensorType, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[kind.name])
    return values.astype(np.float32).reshape(-1)


def bits(values: np.ndarray) -> np.ndarray:
    """To compare floats as they are: NaN equals itself, -0 is not 0. Which NaN is not compared."""
    return np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32)


def random_blocks(kind: TensorType, num_blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, kind.block_bytes), np.uint8)


def with_floats(kind: TensorType, raw: np.ndarray, value: float) -> np.ndarray:
    """`raw` with every fp16 of every block set to `value`."""
    blocks = raw.copy().reshape(-1).view(kind.layout)
    for field in kind.layout.names or ():
        if kind.layout[field].kind == "f":
            blocks[field] = value
    return blocks.view(np.uint8)


def test_the_table_agrees_with_the_format() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert kind.name == known.name
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[known]
    for number, name in OTHER_TYPE_NAMES.items():
        assert gguf.GGMLQuantizationType(number).name == name


@each_kind
def test_many_random_blocks_bit_for_bit(kind: TensorType) -> None:
    """Case B178: more than one tile and not a whole number of them."""
    raw = random_blocks(kind, TILE_WEIGHTS // kind.block_size * 2 + 3, seed=1)
    assert np.array_equal(bits(decoded(kind, raw)), bits(reference(kind, raw)))


@each_kind
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_block_bit_for_bit(kind: TensorType, data: st.DataObject) -> None:
    """Case B178: whatever a block holds, and what hypothesis likes best: zeros, ones, single bits."""
    num_blocks = data.draw(st.integers(1, 3))
    raw = data.draw(st.binary(min_size=num_blocks * kind.block_bytes, max_size=num_blocks * kind.block_bytes))
    blocks = np.frombuffer(raw, np.uint8)
    assert np.array_equal(bits(decoded(kind, blocks)), bits(reference(kind, blocks)))


@each_kind
def test_every_value_of_every_byte(kind: TensorType) -> None:
    """Each byte of a block takes each of its values, beside others that are random and finite."""
    raw = with_floats(kind, random_blocks(kind, 256, seed=2), 0.0107)
    for at in range(kind.block_bytes):
        blocks = raw.reshape(256, -1).copy()
        blocks[:, at] = np.arange(256)
        assert np.array_equal(bits(decoded(kind, blocks)), bits(reference(kind, blocks))), at


@each_kind
def test_finite_is_what_the_values_are(kind: TensorType) -> None:
    for seed in range(8):  # of random blocks of 16-bit scales one in 32 is not finite
        for raw in random_blocks(kind, 24, seed).reshape(8, -1):
            assert are_finite(kind, raw) == bool(np.isfinite(decoded(kind, raw)).all())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.name)
def test_one_scale_that_is_no_number(kind: TensorType, value: float) -> None:
    """In any field of any block, also where all codes and group scales are zero."""
    for field in (name for name in kind.layout.names or () if kind.layout[name].kind == "f"):
        blocks = np.zeros(5, kind.layout)
        assert are_finite(kind, blocks.view(np.uint8))
        blocks[field][3] = value
        assert not are_finite(kind, blocks.view(np.uint8))
        assert not np.isfinite(decoded(kind, blocks.view(np.uint8))).all()


@each_super_block
def test_the_largest_scale_of_a_group(kind: TensorType) -> None:
    """It is found in any tile, and bounds the weights: a code is at most 127."""
    raw = with_floats(kind, random_blocks(kind, TILE_WEIGHTS // kind.block_size + 7, seed=3), 0.5)
    before = largest_group_scale(kind, raw)
    assert 0.5 < before <= 64
    assert np.abs(decoded(kind, raw)).max() <= 128 * before
    last = raw.view(kind.layout)[-1:]
    last["scale"] = 1000
    after = largest_group_scale(kind, raw)
    assert after > 1000
    assert after == largest_group_scale(kind, last.view(np.uint8))


def test_other_types_have_no_groups() -> None:
    assert largest_group_scale(TYPES_BY_NAME["Q8_0"], np.full(34, 0x7B, np.uint8)) == 0
