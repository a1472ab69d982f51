"""The matrix kernels against their twins in numpy.

What is compared is a matrix as the kernels see it (`Matrix.unpack`) and activations as they are encoded.
Integer sums are exact. For the float steps the twin takes the kernels' order, each fused step as one rounding
of its value in float64: that differs from a true fused step in the last bit once in millions of times, so
ULPS are allowed.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

native = pytest.importorskip("mainspring_native", reason="the native kernels are not built")
gguf = pytest.importorskip("gguf", reason="the package gguf, which makes quantised rows for these tests")

from gguf.quants import dequantize, quantize  # noqa: E402

from mainspring.checkpoint.blocks import TYPES_BY_NAME  # noqa: E402

VARIANTS = native.runnable_variants()
PLAIN = {"F32": np.float32, "F16": np.float16}
EXACT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"]
ROUNDED = ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]  # the product of two scales is rounded to fp16
ULPS = 2


def aligned(num_bytes: int, fill: int = 0xA5) -> np.ndarray:
    memory = np.full(num_bytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + num_bytes]


def packed(source: str, raw: np.ndarray, rows: int, columns: int) -> native.Matrix:
    matrix = native.Matrix(source, rows, columns)
    matrix.bind(aligned(matrix.num_bytes))
    matrix.pack(np.ascontiguousarray(raw).reshape(-1).view(np.uint8), 0, rows)
    return matrix


SCALES_AT = {
    "Q3_K": (108,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # bytes, of others 0


def random_raw(source: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a tensor [rows, bytes] whose scales are small finite numbers and whose codes are any."""
    if source in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        return (
            (values.view(np.uint32) >> 16).astype(np.uint16)
            if source == "BF16"
            else values.astype(PLAIN[source])
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[source]]
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    for at in SCALES_AT.get(source, (0,)):
        put_half(raw, at, rng.uniform(-0.1, 0.1, raw.shape[:2]))
    return raw.reshape(rows, -1)


def put_half(blocks: np.ndarray, at: int, values: np.ndarray | float) -> None:
    """Write fp16 values at byte `at` of blocks [rows, blocks, bytes]."""
    halves = np.broadcast_to(np.float16(values), blocks.shape[:2])
    blocks[:, :, at : at + 2] = np.ascontiguousarray(halves).view(np.uint8).reshape(*blocks.shape[:2], 2)


def get_half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def file_values(source: str, raw: np.ndarray, rows: int, columns: int) -> np.ndarray:
    if source in PLAIN:
        return raw.astype(np.float32)
    if source == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return dequantize(raw, gguf.GGMLQuantizationType[source]).reshape(rows, columns)


def ordered(x: np.ndarray) -> np.ndarray:
    """Floats as integers whose difference counts the floats between them."""
    bits = x.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def assert_close(found: np.ndarray, expected: np.ndarray, ulps: int = ULPS) -> None:
    assert found.shape == expected.shape
    apart = np.abs(ordered(found) - ordered(expected))
    assert apart.max(initial=0) <= ulps, (
        f"{apart.max()} ulps at {np.unravel_index(apart.argmax(), apart.shape)}"
    )


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


# ---- encoding ----------------------------------------------------------------------------------------------


# Scales from 1 to 2 that an encoding may have, in 32nds: sums and differences of two powers of two.
STEPS = np.array([32, 33, 34, 36, 40, 48, 56, 60, 62, 63, 64], np.float32) / np.float32(32)


def encoded(x: np.ndarray, activations: str) -> tuple[np.ndarray, np.ndarray]:
    """Twin of the encoding: integers [rows, columns] and scales [rows, columns / 32]."""
    largest_code = np.float32(127 if activations == "int8" else 127 * 256)
    blocks = x.reshape(len(x), x.shape[1] // 32, 32)
    largest = np.abs(blocks).max(-1)
    tiny = largest < np.float32(2.0**-80)
    mantissas, exponents = np.frexp(np.where(tiny, np.float32(1), largest * (np.float32(1) / largest_code)))
    steps = STEPS[np.searchsorted(STEPS, 2 * mantissas)]
    scales = np.where(tiny, np.float32(0), np.ldexp(steps, exponents - 1))
    inverse = np.where(tiny, np.float32(0), np.ldexp(np.float32(1) / steps, 1 - exponents))
    return np.rint(blocks * inverse[..., None]).astype(np.int64).reshape(x.shape), scales


def found_codes(x: np.ndarray, variant: str, activations: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    high, low, scales, sums = native.encode(x, variant, activations)
    codes = high.astype(np.int64)
    return (codes if activations == "int8" else codes * 256 + low), scales, sums


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("columns", [32, 64, 576])
def test_encoding_is_its_twin(variant, activations, columns):
    rng = np.random.default_rng(columns)
    x = (rng.standard_normal((7, columns)) * 10.0 ** rng.integers(-20, 30, (7, 1))).astype(np.float32)
    x[3] = 0
    x[4, :32] = 1e-26
    x[5, 1] = np.float32(8e34)
    x[6, 0] = np.abs(x[6]).max() * np.float32(1.9)
    codes, scales, sums = found_codes(x, variant, activations)
    expected, expected_scales = encoded(x, activations)
    assert np.array_equal(codes, expected)
    assert np.array_equal(scales, expected_scales)
    assert np.array_equal(sums, expected.reshape(7, -1, 16).sum(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_of_scales_is_met(variant):
    """Whatever a block's largest number: no code is beyond 127, and a product is scale times integer."""
    largest = np.float32(127) * np.exp2(np.linspace(-70, 100, 10371, dtype=np.float32))
    x = np.zeros((len(largest), 32), np.float32)
    x[:, 7] = largest
    codes, scales, _ = found_codes(x, variant, "int8")
    assert set(np.frexp(scales.ravel())[0] * np.float32(2)) == set(STEPS[:-1])
    assert codes.max() == 127
    assert codes[:, 7].min() >= 127 * 3 // 4 - 1  # 48 / 32 where 36 / 32 would do, at worst
    matrix = packed("Q8_0", random_raw("Q8_0", 16, 32, np.random.default_rng(0)), 16, 32)
    weights = matrix.unpack()[:, 7]
    expected = scales * codes[:, 7:8].astype(np.float32) * weights
    for rows in (slice(None), slice(0, 1), slice(700, 703)):
        found = native.linear(matrix, np.ascontiguousarray(x[rows]), variant)
        assert_close(found, expected[rows])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", range(0, 64, 21))
def test_a_nan_or_an_infinity_spoils_its_block_and_what_reads_it(variant, bad, place):
    x = np.ones((2, 64), np.float32)
    x[0, place] = bad
    codes, scales, sums = found_codes(x, variant, "int8")
    block = place // 32
    assert np.isnan(scales[0]).tolist() == [block == 0, block == 1]
    assert not codes[0, block * 32 : block * 32 + 32].any()
    assert not sums[0, block * 2 : block * 2 + 2].any()
    for source in ("Q4_0", "Q4_1", "Q5_1", "Q8_0"):
        matrix = packed(source, random_raw(source, 16, 64, np.random.default_rng(0)), 16, 64)
        out = native.linear(matrix, x, variant)
        assert np.isnan(out[0]).all(), source
        assert np.isfinite(out[1]).all(), source


# ---- packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["F32", "F16", "BF16", *EXACT])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packing_loses_nothing(source, rows):
    raw = random_raw(source, rows, 96, np.random.default_rng(rows))
    matrix = packed(source, raw, rows, 96)
    assert (matrix.rows, matrix.columns, matrix.row_bytes) == (rows, 96, raw[0].nbytes)
    assert_close(matrix.unpack(), file_values(source, raw, rows, 96), ulps=0)


@pytest.mark.parametrize("source", ROUNDED)
def test_packing_rounds_scales_once(source):
    """A scale and a min are each off by 2^-11 of themselves at most, their codes by nothing."""
    raw = random_raw(source, 37, 512, np.random.default_rng(0))
    values = file_values(source, raw, 37, 512).reshape(37, 16, 32).astype(np.float64)
    found = packed(source, raw, 37, 512).unpack().reshape(37, 16, 32).astype(np.float64)
    assert not np.array_equal(found, values)
    # |scale * code| <= |value| + |min|, and the min lies within the block's values and their spread
    spread = np.abs(values).max(-1, keepdims=True) + (
        values.max(-1, keepdims=True) - values.min(-1, keepdims=True)
    )
    assert (np.abs(found - values) <= 3 * 2.0**-11 * spread + 2.0**-24 * 63).all()


@pytest.mark.parametrize("source", ["F32", "BF16", "Q4_1", "Q6_K", "Q8_0"])
def test_packing_in_parts_is_packing_at_once(source):
    raw = random_raw(source, 53, 256, np.random.default_rng(1))
    parts = native.Matrix(source, 53, 256)
    memory = aligned(parts.num_bytes)
    parts.bind(memory)
    for begin, end in [(32, 53), (0, 16), (16, 32)]:
        parts.pack(np.ascontiguousarray(raw[begin:end]).reshape(-1).view(np.uint8), begin, end)
    assert_close(parts.unpack(), packed(source, raw, 53, 256).unpack(), ulps=0)
    # The memory is all of the state, and an image of it, read only, will do.
    image = aligned(len(memory))
    image[:] = memory
    image.flags.writeable = False
    again = native.Matrix(source, 53, 256)
    again.bind(image)
    assert_close(again.unpack(), parts.unpack(), ulps=0)
    with pytest.raises(ValueError, match="read only"):
        again.pack(np.ascontiguousarray(raw[:16]).reshape(-1).view(np.uint8), 0, 16)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="no packed form of tensor type 'Q2_K'"):
        native.Matrix("Q2_K", 16, 256)
    with pytest.raises(ValueError, match="multiple of 256"):
        native.Matrix("Q4_K", 16, 128)
    with pytest.raises(ValueError, match="cannot be packed"):
        native.Matrix("F32", 0, 128)
    matrix = native.Matrix("F32", 20, 8)
    with pytest.raises(ValueError, match="bind it first"):
        matrix.unpack()
    with pytest.raises(ValueError, match="expected 1024"):
        matrix.bind(aligned(1000))
    with pytest.raises(ValueError, match="not 64-byte aligned"):
        matrix.bind(aligned(2048)[4:])
    matrix.bind(aligned(matrix.num_bytes))
    with pytest.raises(ValueError, match="not whole panels"):
        matrix.pack(np.zeros(8 * 4 * 8, np.uint8), 0, 8)
    with pytest.raises(ValueError, match="bytes for 20 rows"):
        matrix.pack(np.zeros(8, np.uint8), 0, 20)
    with pytest.raises(ValueError, match="no variant"):
        native.linear(matrix, np.zeros((1, 8), np.float32), "sse2")
    with pytest.raises(ValueError, match="expected int8 or int16"):
        native.encode(np.zeros((1, 32), np.float32), VARIANTS[0], "int4")


def test_damaged_scales_stay_as_they_are():
    """A scale that is not a number is not made one: who reads the file says so, and where."""
    raw = random_raw("Q4_1", 16, 64, np.random.default_rng(2))
    raw[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
    raw[5, 20:22] = np.array([np.inf], np.float16).view(np.uint8)
    found = packed("Q4_1", raw, 16, 64).unpack()
    assert np.isnan(found[3, :32]).all()
    assert not np.isfinite(found[5, 32:]).any()
    assert np.isfinite(np.delete(found, [3, 5], 0)).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("source", "scales"), [("Q4_0", slice(0, 2)), ("Q4_1", slice(0, 2)), ("Q6_K", slice(192, 200))]
)
def test_weights_with_a_scale_of_zero_are_their_min(variant, source, scales):
    """Whatever their codes: in few rows and in many, where the scale is not multiplied with."""
    columns = 256 if source == "Q6_K" else 32
    raw = random_raw(source, 16, columns, np.random.default_rng(4))
    raw[::2, scales] = 0
    raw[4, scales.start + 1] = 0 if source == "Q6_K" else 0x80  # minus zero
    matrix = packed(source, raw, 16, columns)
    values = file_values(source, raw, 16, columns)
    assert np.abs(matrix.unpack() - values).max() <= 2.0**-11 * np.abs(values).max()
    assert np.ptp(matrix.unpack()[::2, :128], axis=1).max() == 0
    x = np.random.default_rng(5).standard_normal((9, columns)).astype(np.float32)
    alone = [native.linear(matrix, x[i : i + 1], variant) for i in range(9)]
    assert_close(native.linear(matrix, x, variant), np.concatenate(alone), ulps=0)


@pytest.mark.parametrize(("form", "bound"), [("q8", 0.5 / 127), ("q4", 0.6 / 15)])
def test_floats_are_quantised(form, bound):
    """Errors are near half a step of the block's range (q8: magnitude); a search trades some for the rest."""
    values = np.random.default_rng(3).standard_normal((37, 96)).astype(np.float32)
    values[2] = 0
    values[4] = 0.125
    matrix = native.Matrix(form, 37, 96)
    matrix.bind(aligned(matrix.num_bytes))
    matrix.pack_floats(np.ascontiguousarray(values[32:]), 32, 37)
    matrix.pack_floats(np.ascontiguousarray(values[:32]), 0, 32)
    found = matrix.unpack()
    blocks = values.reshape(37, 3, 32)
    extent = np.abs(blocks).max(-1) if form == "q8" else np.ptp(blocks, axis=-1)
    error = np.abs(found.reshape(37, 3, 32) - blocks)
    assert (error.max(-1) <= bound * 1.6 * extent + 1e-6).all()
    assert (error.mean(-1) <= bound * 0.75 * extent + 1e-6).all()
    assert not found[2].any()
    assert np.allclose(found[4], 0.125, rtol=1e-3)
    values[1, 40] = np.nan
    matrix.pack_floats(values, 0, 37)
    assert np.isnan(matrix.unpack()[1, 32:64]).any()


def test_the_search_of_q4_beats_the_plain_range():
    """On normal weights Q4_1's own rule, the block's range cut in fifteen, leaves a larger mean square."""
    values = np.random.default_rng(4).standard_normal((64, 512)).astype(np.float32)
    matrix = native.Matrix("q4", 64, 512)
    matrix.bind(aligned(matrix.num_bytes))
    matrix.pack_floats(values, 0, 64)
    plain = dequantize(quantize(values, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1)
    assert np.square(matrix.unpack() - values).mean() < 0.9 * np.square(plain - values).mean()


# ---- single rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", ["F32", "F16", "BF16", *EXACT, *ROUNDED])
def test_a_single_row_is_a_row(variant, source):
    matrix = packed(source, random_raw(source, 37, 256, np.random.default_rng(5)), 37, 256)
    values = matrix.unpack()
    for row in (0, 15, 16, 36):
        assert_close(native.embed(matrix, row, variant), values[row], ulps=0)
    with pytest.raises(ValueError, match="no such row"):
        native.embed(matrix, 37, variant)


# ---- products ----------------------------------------------------------------------------------------------


def float_twin(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Even and odd columns have a sum each."""
    sums = np.zeros((2, len(x), len(weights)), np.float32)
    for column in range(x.shape[1]):
        sums[column % 2] = fused(x[:, column, None], weights[None, :, column], sums[column % 2])
    return sums[0] + sums[1]


def parts_of(source: str, raw: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes less their offset [rows, groups, columns per scale], scales and mins [rows, groups].

    The codes are what the file's values are where every scale is 1 and every min is 0.
    """
    blocks = raw.reshape(len(raw), -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[source]][1])
    unit = blocks.copy()
    scale_at, *min_at = SCALES_AT.get(source, (0,))
    put_half(unit, scale_at, 1)
    scales, mins = get_half(blocks, scale_at), None
    for at in min_at:
        put_half(unit, at, 0)
        mins = get_half(blocks, at)
    if source == "Q6_K":
        unit[:, :, 192:208] = 1
    if source == "Q3_K":  # 33 less 32, in nibbles and pairs of bits
        unit[:, :, 96:104], unit[:, :, 104:108] = 0x11, 0xAA
    if source in ("Q3_K", "Q6_K"):
        kind = TYPES_BY_NAME[source]
        (groups,) = kind.group_scales(raw.reshape(-1).view(kind.layout))
        scales = groups.astype(np.float16).astype(np.float32).reshape(len(raw), -1)
    return (
        file_values(source, unit.reshape(raw.shape), len(raw), columns).reshape(*scales.shape, -1),
        scales,
        mins,
    )


def quantized_twin(source: str, raw: np.ndarray, x: np.ndarray, activations: str) -> np.ndarray:
    codes, scales, mins = parts_of(source, raw, x.shape[1])
    x_codes, x_scales = encoded(x, activations)
    x_groups = x_codes.reshape(len(x), *codes.shape[1:])
    sums = np.zeros((len(x), len(raw)), np.float32)
    for g in range(codes.shape[1]):
        x_scale = x_scales[:, g * codes.shape[2] // 32, None]
        total = x_groups[:, g] @ codes[:, g].T.astype(np.int64)
        sums = fused(total.astype(np.float32), scales[None, :, g] * x_scale, sums)
        if mins is not None:
            sums = fused(
                mins[None, :, g], x_scale * x_groups[:, g].sum(-1, keepdims=True).astype(np.float32), sums
            )
    return sums


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("source", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q3_K", "Q6_K"])
@pytest.mark.parametrize(
    ("num_rows", "rows", "num_blocks"), [(0, 16, 8), (1, 37, 8), (7, 64, 16), (64, 17, 24)]
)
def test_quantised_products_are_their_twin(variant, activations, source, num_rows, rows, num_blocks):
    """Every way to hold codes: four and eight bits, with offset and with mins, a scale for 32 and for 16."""
    rng = np.random.default_rng(7)
    columns = num_blocks * 32
    raw = random_raw(source, rows, columns, rng)
    x = rng.standard_normal((num_rows, columns)).astype(np.float32)
    found = native.linear(packed(source, raw, rows, columns), x, variant, activations)
    assert_close(found, quantized_twin(source, raw, x, activations))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q6_K"])
def test_the_largest_codes_do_not_overflow(variant, source):
    """Codes and activations at their limits, in both signs: a sum in fewer than 32 bits would saturate."""
    raw = random_raw(source, 16, 512, np.random.default_rng(8))
    blocks = raw.reshape(16, -1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[source]][1])
    kept = [(at, get_half(blocks, at)) for at in SCALES_AT.get(source, (0,))]
    blocks[::2], blocks[1::2] = 255, 0
    if source == "Q8_0":
        blocks[::2], blocks[1::2] = 0x80, 0x7F
    for at, values in kept:
        put_half(blocks, at, values)
    x = np.where(np.arange(512) % 64 < 32, np.float32(1), np.float32(-1)) * np.ones((3, 1), np.float32)
    x[1] *= np.where(np.arange(512) % 2, 1, -1)
    x[2] *= np.float32(32511.5 / 32512)  # of 16 bits a low part of -128
    x[2, ::32] = 1
    for activations in ("int8", "int16"):
        found = native.linear(packed(source, raw, 16, 512), x, variant, activations)
        assert_close(found, quantized_twin(source, raw, x, activations))


@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("source", ["F32", "F16", "BF16", *EXACT, *ROUNDED])
def test_variants_agree_to_the_bit(activations, source):
    if source == "BF16" and activations == "int8" and any(map(native.has_bf16, VARIANTS)):
        pytest.skip("one variant rounds activations, and another does not")
    rng = np.random.default_rng(9)
    matrix = packed(source, random_raw(source, 33, 768, rng), 33, 768)
    x = rng.standard_normal((19, 768)).astype(np.float32)
    outs = [native.linear(matrix, x, variant, activations).tobytes() for variant in VARIANTS]
    assert len(set(outs)) == 1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q6_K"])
@settings(max_examples=10, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    rows=st.integers(1, 100),
    num_blocks=st.integers(1, 3),
    cut_rows=st.integers(1, 64),
    cut_panels=st.integers(1, 8),
    wide=st.booleans(),
)
def test_a_row_is_the_same_in_any_batch(
    variant, source, num_rows, rows, num_blocks, cut_rows, cut_panels, wide
):
    """Bit for bit: however rows and panels are cut into calls, and whatever else is in the batch."""
    rng = np.random.default_rng(num_rows)
    columns, activations = num_blocks * 256, "int16" if wide else "int8"
    matrix = packed(source, random_raw(source, rows, columns, rng), rows, columns)
    x = rng.standard_normal((num_rows, columns)).astype(np.float32)
    whole = native.linear(matrix, x, variant, activations, cut_rows, cut_panels)
    alone = [native.linear(matrix, x[i : i + 1], variant, activations, 1, 1) for i in range(num_rows)]
    assert whole.tobytes() == np.concatenate(alone).tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", ["F16", "BF16", "Q4_1", "Q8_0", "Q6_K"])
def test_a_nan_stays_in_its_row(variant, source):
    rng = np.random.default_rng(10)
    matrix = packed(source, random_raw(source, 33, 256, rng), 33, 256)
    x = rng.standard_normal((13, 256)).astype(np.float32)
    clean = native.linear(matrix, x, variant)
    x[5, 40] = np.nan
    spoilt = native.linear(matrix, x, variant)
    assert np.isnan(spoilt[5]).all()
    assert np.delete(spoilt, 5, 0).tobytes() == np.delete(clean, 5, 0).tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("num_rows", "rows", "columns"), [(0, 16, 8), (1, 37, 7), (7, 64, 64), (64, 17, 1)])
def test_float_products_are_their_twin(variant, source, num_rows, rows, columns):
    rng = np.random.default_rng(6)
    matrix = packed(source, random_raw(source, rows, columns, rng), rows, columns)
    x = rng.standard_normal((num_rows, columns)).astype(np.float32)
    assert_close(native.linear(matrix, x, variant, "int16"), float_twin(matrix.unpack(), x))


PAIRING = [
    pytest.param(v, marks=pytest.mark.skipif(not native.has_bf16(v), reason="no products of bf16 pairs here"))
    for v in VARIANTS
]


def rounded_to_bf16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("variant", PAIRING)
@pytest.mark.parametrize(
    ("num_rows", "rows", "columns"), [(0, 16, 8), (1, 37, 7), (7, 64, 64), (64, 17, 1), (49, 33, 577)]
)
def test_products_of_pairs_are_their_twin(variant, num_rows, rows, columns):
    """Activations are rounded once, and sums are those of fp32: each of at most columns + 1 additions is off
    by 2^-24 of what it gives. And a row is the same bits alone, in any batch, in any cut."""
    rng = np.random.default_rng(12)
    matrix = packed("BF16", random_raw("BF16", rows, columns, rng), rows, columns)
    x = rng.standard_normal((num_rows, columns)).astype(np.float32)
    products = rounded_to_bf16(x).astype(np.float64)[:, None] * matrix.unpack()
    found = native.linear(matrix, x, variant, "int8", 16, 3)
    bound = (columns + 1) * 2.0**-24 * np.abs(products).sum(-1)
    assert (np.abs(found - products.sum(-1)) <= bound).all()
    for cut_rows, cut_panels in [(48, 4), (1, 1)]:
        again = native.linear(matrix, x, variant, "int8", cut_rows, cut_panels)
        assert again.tobytes() == found.tobytes()
    alone = [native.linear(matrix, x[i : i + 1], variant, "int8") for i in range(num_rows)]
    assert b"".join(row.tobytes() for row in alone) == found.tobytes()


@pytest.mark.parametrize("variant", PAIRING)
def test_activations_are_rounded_to_the_nearest_bf16_and_ties_to_even(variant):
    columns = 37
    ones = np.zeros((columns, columns), np.uint16)
    np.fill_diagonal(ones, 0x3F80)
    matrix = packed("BF16", ones, columns, columns)
    ends = np.array([0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001], np.uint32)
    bits = np.uint32(0x3F800000) + ends[:, None] + (np.arange(columns, dtype=np.uint32) << 17)
    bits[::2, ::3] |= 0x80000000
    x = bits.view(np.float32)
    assert np.array_equal(native.linear(matrix, x, variant, "int8"), rounded_to_bf16(x))


# ---- what the machine can do ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_ceilings_are_above_what_kernels_reach(variant):
    found = native.measure_ceilings(variant, 2)
    assert [entry["num_threads"] for entry in found] == [1, 2]
    matrix = packed("F32", random_raw("F32", 64, 64, np.random.default_rng(11)), 64, 64)
    x = np.zeros((8, 64), np.float32)
    reached = 2 * 8 * 64 * 64 / native.time_linear(matrix, x, variant)
    for entry in found:
        assert 0.5 * reached < entry["float_products"] < 1e14
        assert 0.1 * reached < entry["byte_products"] < 1e15
        assert 1e8 < entry["memory_reads"] < 1e13
        assert 1e8 < entry["model_reads"] < 1e13
    with pytest.raises(ValueError, match="at least one thread"):
        native.measure_ceilings(variant, 0)
