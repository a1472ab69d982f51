"""Tensor types: how the weights of a file are stored, and how they become float32.

Theory of operation.
- A tensor is rows of blocks. A type is one entry of `TENSOR_TYPES`: the layout of its block, a numpy dtype,
  and a function that turns an array of such blocks into float32.
- Codes are unpacked as bytes, in the order of the weights, and become floats in the caller's memory. What is
  made on the way is bounded by a tile.
- Values are those of the format, bit for bit: a scale in fp16 times integers of at most 13 bits together fits
  into a float32's 24, so that products are exact in any order, and a minimum is added or taken away in one
  rounding.

Super-blocks (the types named ..._K and IQ4_XS) hold 256 weights in groups of 16 or 32, each with a small
integer that multiplies the one fp16 scale, and perhaps another for the minimum.

In a block all numbers but the fp16 ones are integers, so these decide whether its weights are finite: an
infinite or NaN scale times a code of 0 is NaN, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

TILE_WEIGHTS = 4096 * 32  # decoded at a time: as float32 they are 512 KiB, which stays in a core's L2

Blocks = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorType:
    """How one type is stored. `decode(blocks [n], out [n, block_size])` writes the values of n blocks."""

    name: str
    block_size: int  # weights in a block
    layout: np.dtype[Any]  # one block, little-endian
    decode: Callable[[Blocks, Floats], None]
    # Of a super-block: the scales of its groups and then their minimums, float32 [n, ...].
    group_scales: Callable[[Blocks], tuple[Floats, ...]] | None = None

    @property
    def block_bytes(self) -> int:
        return self.layout.itemsize


def decode_blocks(kind: TensorType, raw: Bytes, out: Floats) -> None:
    """Turn `raw` (uint8, whole blocks) into `out` (float32, C-contiguous, as many weights), in tiles."""
    assert out.flags.c_contiguous
    blocks = raw.view(kind.layout)
    values = out.reshape(len(blocks), kind.block_size)
    tile = TILE_WEIGHTS // kind.block_size
    with np.errstate(all="ignore"):  # a file's scale may be infinite or NaN: its reader's to judge
        for start in range(0, len(blocks), tile):
            kind.decode(blocks[start : start + tile], values[start : start + tile])


def are_finite(kind: TensorType, raw: Bytes) -> bool:
    """Whether every weight of `raw` (uint8, whole blocks) is a number, neither NaN nor infinite."""
    blocks = raw.view(kind.layout)
    if kind.layout.names is None:
        if kind.name == "BF16":  # all ones in the exponent
            return not ((blocks & 0x7F80) == 0x7F80).any()
        return bool(np.isfinite(blocks).all())
    floats = [field for field in kind.layout.names if kind.layout[field].kind == "f"]
    return all(bool(np.isfinite(blocks[field]).all()) for field in floats)


def largest_group_scale(kind: TensorType, raw: Bytes) -> float:
    """The largest magnitude of a scale or minimum of a group; 0 for types that are no super-blocks."""
    if kind.group_scales is None:
        return 0.0
    blocks, largest = raw.view(kind.layout), 0.0
    tile = TILE_WEIGHTS // kind.block_size
    for start in range(0, len(blocks), tile):
        found = kind.group_scales(blocks[start : start + tile])
        largest = max(largest, *(float(np.abs(scales).max()) for scales in found))
    return largest


# ---- codes in the order of the weights ---------------------------------------------------------------------


def _nibbles(packed: Bytes) -> Bytes:
    """[..., m] -> [..., 2 m]: the low halves of m bytes, then the high ones."""
    codes = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0, :])
    np.right_shift(packed, 4, out=codes[..., 1, :])
    return codes.reshape(*packed.shape[:-1], -1)


def _fields(packed: Bytes, bits: int) -> Bytes:
    """[..., m] -> [..., 8 / bits, m]: the lowest `bits` bits of m bytes, then the next, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = packed[..., None, :] >> shifts
    fields &= (1 << bits) - 1
    return fields


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] -> [n, 32], each 0 or 16: the bits of a little-endian word."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    bits <<= 4
    return bits


def _halves(field: Blocks) -> Floats:
    """[n] fp16 -> [n, 1] float32."""
    return field.astype(np.float32)[:, None]


# ---- plain numbers -----------------------------------------------------------------------------------------


def _decode_plain(blocks: Blocks, out: Floats) -> None:
    np.copyto(out[:, 0], blocks)


def _decode_bf16(blocks: Blocks, out: Floats) -> None:
    """A bfloat16 is the upper half of a float32; numpy has no such type."""
    np.left_shift(blocks, 16, out=out.view(np.uint32)[:, 0], dtype=np.uint32)


# ---- blocks of 32 ------------------------------------------------------------------------------------------

# What the codes of IQ4_NL and IQ4_XS stand for: steps that are finer near zero, where most weights are.
_UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _decode_q4_0(blocks: Blocks, out: Floats) -> None:
    """d * (q - 8)."""
    np.subtract(_nibbles(blocks["codes"]), 8, out=out, dtype=np.float32)
    out *= _halves(blocks["scale"])


def _decode_q4_1(blocks: Blocks, out: Floats) -> None:
    """d * q + m."""
    np.copyto(out, _nibbles(blocks["codes"]))
    out *= _halves(blocks["scale"])
    out += _halves(blocks["minimum"])


def _decode_q5_0(blocks: Blocks, out: Floats) -> None:
    """d * (q - 16)."""
    codes = _nibbles(blocks["codes"])
    codes |= _fifth_bits(blocks["fifth"])
    np.subtract(codes, 16, out=out, dtype=np.float32)
    out *= _halves(blocks["scale"])


def _decode_q5_1(blocks: Blocks, out: Floats) -> None:
    """d * q + m."""
    codes = _nibbles(blocks["codes"])
    codes |= _fifth_bits(blocks["fifth"])
    np.copyto(out, codes)
    out *= _halves(blocks["scale"])
    out += _halves(blocks["minimum"])


def _decode_q8_0(blocks: Blocks, out: Floats) -> None:
    """d * q."""
    np.copyto(out, blocks["codes"])
    out *= _halves(blocks["scale"])


def _decode_iq4_nl(blocks: Blocks, out: Floats) -> None:
    """d * uneven[q]."""
    np.take(_UNEVEN, _nibbles(blocks["codes"]), out=out, mode="clip")
    out *= _halves(blocks["scale"])


_Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)])
_Q5_0 = np.dtype([("scale", "<f2"), ("fifth", "u1", 4), ("codes", "u1", 16)])
_Q5_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("fifth", "u1", 4), ("codes", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])


# ---- super-blocks of 256 -----------------------------------------------------------------------------------


def _apply(out: Floats, scales: Floats, minimums: Floats | None = None) -> None:
    """Codes [n, 256] -> weights: each group times its scale [n, groups], less its minimum."""
    groups = out.reshape(*scales.shape, -1)
    groups *= scales[..., None]
    if minimums is not None:
        groups -= minimums[..., None]


def _scales_q2_k(blocks: Blocks) -> tuple[Floats, Floats]:
    """16 groups; a byte each: the scale in its low half, the minimum in its high one."""
    packed = blocks["groups"]
    return _halves(blocks["scale"]) * (packed & 15), _halves(blocks["minimum"]) * (packed >> 4)


def _decode_q2_k(blocks: Blocks, out: Floats) -> None:
    """Of each 32 bytes the lowest two bits are 32 weights, the next two the next 32, and so on."""
    np.copyto(out, _fields(blocks["codes"].reshape(-1, 2, 32), 2).reshape(out.shape))
    _apply(out, *_scales_q2_k(blocks))


def _scales_q3_k(blocks: Blocks) -> tuple[Floats]:
    """16 groups of 6 bits less 32: the low four of two groups in each of 8 bytes, the upper two of four in
    each of the last 4."""
    packed = blocks["groups"]
    codes = _nibbles(packed[:, :8])
    codes |= _fields(packed[:, 8:], 2).reshape(-1, 16) << 4
    return (_halves(blocks["scale"]) * (codes.astype(np.float32) - 32),)


def _decode_q3_k(blocks: Blocks, out: Floats) -> None:
    """Two low bits as in Q2_K; the third is bit i of 32 bytes for the i-th 32 weights. Less 4."""
    codes = _fields(blocks["codes"].reshape(-1, 2, 32), 2).reshape(out.shape)
    codes |= _fields(blocks["third"], 1).reshape(out.shape) << 2
    np.subtract(codes, 4, out=out, dtype=np.float32)
    _apply(out, *_scales_q3_k(blocks))


def _scales_q4_k(blocks: Blocks) -> tuple[Floats, Floats]:
    """8 groups of 6 bits each for scale and minimum, in 12 bytes: those of the first four groups are the low
    six bits of 4 + 4 bytes. Of the last four the low halves share 4 bytes, and the upper two bits are in what
    is left of the first 8."""
    packed = blocks["groups"]
    first, last = packed[:, :8] & 63, _nibbles(packed[:, 8:])
    last |= (packed[:, :8] >> 6) << 4
    scales = np.concatenate([first[:, :4], last[:, :4]], axis=1)
    minimums = np.concatenate([first[:, 4:], last[:, 4:]], axis=1)
    return _halves(blocks["scale"]) * scales, _halves(blocks["minimum"]) * minimums


def _decode_q4_k(blocks: Blocks, out: Floats) -> None:
    """Of each 32 bytes the low halves are 32 weights, the high ones the next 32."""
    np.copyto(out, _nibbles(blocks["codes"].reshape(-1, 4, 32)).reshape(out.shape))
    _apply(out, *_scales_q4_k(blocks))


def _decode_q5_k(blocks: Blocks, out: Floats) -> None:
    """As Q4_K; bit i of 32 bytes is the fifth one of the i-th 32 weights."""
    codes = _nibbles(blocks["codes"].reshape(-1, 4, 32)).reshape(out.shape)
    codes |= _fields(blocks["fifth"], 1).reshape(out.shape) << 4
    np.copyto(out, codes)
    _apply(out, *_scales_q4_k(blocks))


def _scales_q6_k(blocks: Blocks) -> tuple[Floats]:
    """16 groups, a signed byte each."""
    return (_halves(blocks["scale"]) * blocks["groups"],)


def _decode_q6_k(blocks: Blocks, out: Floats) -> None:
    """Of each 64 bytes the low halves are 64 weights, the high ones the next 64; two more bits as in Q2_K.
    Less 32."""
    codes = _nibbles(blocks["codes"].reshape(-1, 2, 64)).reshape(out.shape)
    codes |= _fields(blocks["upper"].reshape(-1, 2, 32), 2).reshape(out.shape) << 4
    np.subtract(codes, 32, out=out, dtype=np.float32)
    _apply(out, *_scales_q6_k(blocks))


def _scales_iq4_xs(blocks: Blocks) -> tuple[Floats]:
    """8 groups of 6 bits less 32: low halves in 4 bytes, two neighbours in each, upper bits in a word."""
    low = _fields(blocks["groups"], 4).transpose(0, 2, 1).reshape(-1, 8)
    upper = blocks["upper"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return (_halves(blocks["scale"]) * (low + 16.0 * upper - 32).astype(np.float32),)


def _decode_iq4_xs(blocks: Blocks, out: Floats) -> None:
    """The codes of IQ4_NL, in the order of its blocks."""
    np.take(_UNEVEN, _nibbles(blocks["codes"].reshape(-1, 8, 16)).reshape(out.shape), out=out, mode="clip")
    _apply(out, *_scales_iq4_xs(blocks))


_Q2_K = np.dtype([("groups", "u1", 16), ("codes", "u1", 64), ("scale", "<f2"), ("minimum", "<f2")])
_Q3_K = np.dtype([("third", "u1", 32), ("codes", "u1", 64), ("groups", "u1", 12), ("scale", "<f2")])
_Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("groups", "u1", 12), ("codes", "u1", 128)])
_Q5_K = np.dtype(
    [("scale", "<f2"), ("minimum", "<f2"), ("groups", "u1", 12), ("fifth", "u1", 32), ("codes", "u1", 128)]
)
_Q6_K = np.dtype([("codes", "u1", 128), ("upper", "u1", 64), ("groups", "i1", 16), ("scale", "<f2")])
_IQ4_XS = np.dtype([("scale", "<f2"), ("upper", "<u2"), ("groups", "u1", 4), ("codes", "u1", 128)])


# ---- the table ---------------------------------------------------------------------------------------------

# By the number that GGUF files have for it.
TENSOR_TYPES: Final[dict[int, TensorType]] = {
    0: TensorType("F32", 1, np.dtype("<f4"), _decode_plain),
    1: TensorType("F16", 1, np.dtype("<f2"), _decode_plain),
    2: TensorType("Q4_0", 32, _Q4_0, _decode_q4_0),
    3: TensorType("Q4_1", 32, _Q4_1, _decode_q4_1),
    6: TensorType("Q5_0", 32, _Q5_0, _decode_q5_0),
    7: TensorType("Q5_1", 32, _Q5_1, _decode_q5_1),
    8: TensorType("Q8_0", 32, _Q8_0, _decode_q8_0),
    10: TensorType("Q2_K", 256, _Q2_K, _decode_q2_k, _scales_q2_k),
    11: TensorType("Q3_K", 256, _Q3_K, _decode_q3_k, _scales_q3_k),
    12: TensorType("Q4_K", 256, _Q4_K, _decode_q4_k, _scales_q4_k),
    13: TensorType("Q5_K", 256, _Q5_K, _decode_q5_k, _scales_q4_k),
    14: TensorType("Q6_K", 256, _Q6_K, _decode_q6_k, _scales_q6_k),
    20: TensorType("IQ4_NL", 32, _Q4_0, _decode_iq4_nl),
    23: TensorType("IQ4_XS", 256, _IQ4_XS, _decode_iq4_xs, _scales_iq4_xs),
    30: TensorType("BF16", 1, np.dtype("<u2"), _decode_bf16),
}
TYPES_BY_NAME: Final = {kind.name: kind for kind in TENSOR_TYPES.values()}

# Names of types that are not read, so that a refusal can use the word that the file's page uses.
OTHER_TYPE_NAMES: Final = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
