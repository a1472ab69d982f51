"""Attention over the paged cache: against numpy in float64, and against itself byte by byte.

The twin reads K and V as the cache holds them (rounded to fp16, or to 8-bit codes with a scale), so what
is left is float32 arithmetic. Tolerance: a score of D terms is off by at most D * 2^-24 * sum|q k|, its
exp by that and 1 ulp; a span adds 256 terms, each sum off by at most 256 * 2^-24 of its terms' sizes; the
joins are a handful more. All weights are positive and their sum is divided out, so the result is off by
at most twice that, times the largest value. With K and V in bf16 the twin rounds queries as the kernels do,
and every weight may be off by 2^-9 of itself more.

Equality of bytes is the contract: a row is the same alone, in any chunk, in any batch, behind a shared
prefix, with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

native = pytest.importorskip("mainspring_native", reason="the native kernels are not built")

VARIANTS = native.runnable_variants()
FORMS = {"F32": 0, "F16": 1, "I8": 2, "BF16": 3}
ELEMENTS = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "BF16": np.uint16}
SPAN = 256

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


class Shape(NamedTuple):
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    window: int = 0
    soft_cap: float = 0.0
    causal: bool = True
    form: str = "F16"
    block_size: int = 16

    @property
    def scale(self) -> float:
        return self.head_size**-0.5


@dataclass
class Cache:
    """The cache of one layer, its content as the kernels keep it, and requests that lie in it."""

    variant: str
    shape: Shape
    num_blocks: int = 400
    fill: int = 0xFF  # a NaN in every form: of a float, or of a scale
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        shape = self.shape
        if shape.form == "BF16" and not native.has_bf16(self.variant):
            pytest.skip("no products of bf16 here")
        element_bytes = np.dtype(ELEMENTS[shape.form]).itemsize
        per_token = shape.head_size * element_bytes + (4 if shape.form == "I8" else 0)
        block_bytes = 2 * shape.block_size * shape.num_kv_heads * per_token
        self.data = np.full((self.num_blocks, block_bytes), self.fill, np.uint8)
        self.free = list(self.rng.permutation(self.num_blocks).astype(np.int32))

    def place(self, kv: np.ndarray, prefix: np.ndarray | None = None) -> np.ndarray:
        """Write a request's keys and values; its blocks. `prefix`: blocks with its first tokens."""
        size, num_kept = self.shape.block_size, 0 if prefix is None else len(prefix) * self.shape.block_size
        blocks = [] if prefix is None else list(prefix)
        while len(blocks) * size < len(kv):
            blocks.append(self.free.pop())
        table = np.array(blocks, np.int32)
        tokens = np.arange(num_kept, len(kv))
        slots = table[tokens // size].astype(np.int64) * size + tokens % size
        self.write(kv[num_kept:], slots)
        return table

    def write(self, kv: np.ndarray, slots: np.ndarray) -> None:
        native.write_kv(self.variant, self.data, *self._layout, np.ascontiguousarray(kv), slots)

    @property
    def _layout(self) -> tuple[int, int, int, int]:
        shape = self.shape
        return FORMS[shape.form], shape.block_size, shape.num_kv_heads, shape.head_size

    def attention(
        self, parts: list[Part], num_threads: int = 1, unread: int = 10**9
    ) -> tuple[list[np.ndarray], int]:
        """The rows of every part, and how many spans were read. `unread`: in tables behind a part's end."""
        q = np.concatenate([part.q for part in parts])
        starts = np.cumsum([0] + [len(part.q) for part in parts]).astype(np.int32)
        ends = np.array([part.end for part in parts], np.int32)
        table = np.full((len(parts), max(len(part.blocks) for part in parts) + 1), unread, np.int32)
        for line, part in zip(table, parts, strict=True):
            num_blocks = -(-part.end // self.shape.block_size)
            line[:num_blocks] = part.blocks[:num_blocks]
        out = np.full_like(q, np.nan)
        shape = self.shape
        *_, num_spans = native.attention(
            self.variant, self.data, *self._layout, q, starts, ends, table, shape.scale, shape.window,
            shape.soft_cap, shape.causal, num_threads, 1, out, None, None,
        )  # fmt: skip
        return [out[a:b] for a, b in pairwise(starts)], num_spans


class Part(NamedTuple):
    """Rows of a request: its tokens [end - len(q), end)."""

    q: np.ndarray  # [tokens, heads * head size]
    end: int
    blocks: np.ndarray


class Request(NamedTuple):
    q: np.ndarray  # of every token
    kv: np.ndarray
    blocks: np.ndarray

    def part(self, begin: int, end: int) -> Part:
        return Part(self.q[begin:end], end, self.blocks)


def request(cache: Cache, num_tokens: int, seed: int = 0, prefix: Request | None = None, num_shared: int = 0):
    """`num_shared`: tokens, in whole blocks, that are the prefix's own."""
    shape, rng = cache.shape, np.random.default_rng([seed, num_tokens])
    q = rng.standard_normal((num_tokens, shape.num_heads * shape.head_size), np.float32)
    kv = rng.standard_normal((num_tokens, 2 * shape.num_kv_heads * shape.head_size), np.float32)
    if prefix is None:
        return Request(q, kv, cache.place(kv))
    kv[:num_shared] = prefix.kv[:num_shared]
    return Request(q, kv, cache.place(kv, prefix.blocks[: num_shared // shape.block_size]))


def rounded_to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of bf16 numbers, from finite float32: to nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_kept(x: np.ndarray, form: str) -> np.ndarray:
    """[..., head size] as the cache gives it back, in float64."""
    if form == "BF16":
        return from_bf16(rounded_to_bf16(x)).astype(np.float64)
    if form != "I8":
        return x.astype(ELEMENTS[form]).astype(np.float64)
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        factor = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    return np.rint(x * factor).astype(np.float64) * scale


def expected(shape: Shape, part: Part, kv: np.ndarray) -> tuple[np.ndarray, float]:
    """The twin's rows, and how far from them float32 may be."""
    kv = kv[: part.end].reshape(part.end, 2, shape.num_kv_heads, shape.head_size)
    keys, values = as_kept(kv[:, 0], shape.form), as_kept(kv[:, 1], shape.form)
    num_rows, per_kv = len(part.q), shape.num_heads // shape.num_kv_heads
    q = part.q * np.float32(shape.scale)
    q = as_kept(q, "BF16") if shape.form == "BF16" else part.q.astype(np.float64) * shape.scale
    q = q.reshape(num_rows, shape.num_kv_heads, per_kv, shape.head_size)
    q, keys, values = (
        q.transpose(1, 2, 0, 3),
        keys.transpose(1, 2, 0)[:, None],
        values.transpose(1, 0, 2)[:, None],
    )
    scores = q @ keys  # [KV heads, query heads of it, rows, tokens]
    error = shape.head_size * 2.0**-24 * (np.abs(q) @ np.abs(keys)).max(initial=0)
    if shape.soft_cap:
        scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
        error += 8 * 2.0**-24 * shape.soft_cap
    last = np.arange(part.end - num_rows, part.end) if shape.causal else np.full(num_rows, part.end - 1)
    hidden = np.arange(part.end) > last[:, None]
    if shape.window:
        hidden |= np.arange(part.end) <= last[:, None] - shape.window
    scores[:, :, hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    rows = (weights @ values).transpose(2, 0, 1, 3).reshape(part.q.shape)
    of_weights = 2.0**-9 if shape.form == "BF16" else 0.0
    return rows, (2 * (error + (SPAN + 16) * 2.0**-24) + of_weights) * np.abs(values).max()


def check(cache: Cache, requests: list[Request], parts: list[Part], num_threads: int = 1) -> None:
    rows, _ = cache.attention(parts, num_threads)
    for found, one, part in zip(rows, requests, parts, strict=True):
        right, tolerance = expected(cache.shape, part, one.kv)
        np.testing.assert_allclose(found, right, rtol=0, atol=tolerance)


def same_bytes(found: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), right.view(np.uint32))


# ---------------------------------------------------------------------------------------------------------
# against numpy
# ---------------------------------------------------------------------------------------------------------

SHAPES = [
    Shape(),
    Shape(1, 1, 16),
    Shape(3, 3, 80),
    Shape(5, 1, 96),
    Shape(14, 2, 64),
    Shape(8, 1, 128, form="I8"),
    Shape(16, 1, 256),
    Shape(9, 3, 112, form="F32"),
    Shape(8, 2, 48, block_size=32, form="I8"),
    Shape(4, 2, 64, block_size=48),
    Shape(4, 2, 64, block_size=512),
    Shape(71, 71, 16),
    Shape(64, 1, 32),
    Shape(6, 2, 64, window=100),
    Shape(6, 2, 64, window=1),
    Shape(4, 4, 64, window=256, soft_cap=20.0, form="F32"),
    Shape(6, 2, 64, window=300, soft_cap=50.0, form="I8"),
    Shape(6, 2, 64, causal=False),
    Shape(6, 2, 64, form="BF16"),
    Shape(14, 2, 80, block_size=48, form="BF16"),
    Shape(3, 3, 16, window=101, soft_cap=30.0, form="BF16"),
    Shape(8, 1, 256, causal=False, form="BF16"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_batch(variant, shape):
    """Decodes and chunks of any length at once; ends on both sides of blocks, groups of 16 and spans."""
    cache = Cache(variant, shape)
    spread = [(1, 1), (7, 7), (1, 16), (1, 257), (64, 64), (33, 300), (16, 512), (100, 613), (1, 600)]
    requests = [request(cache, end, seed) for seed, (_, end) in enumerate(spread)]
    parts = [one.part(end - count, end) for one, (count, end) in zip(requests, spread, strict=True)]
    check(cache, requests, parts, num_threads=2)


@pytest.mark.parametrize("per_kv", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_any_ratio_of_heads(variant, per_kv):
    cache = Cache(variant, Shape(2 * per_kv, 2, 32))
    requests = [request(cache, 270, seed) for seed in range(2)]
    check(cache, requests, [requests[0].part(269, 270), requests[1].part(200, 270)])


@pytest.mark.parametrize("form", FORMS)
def test_long_context(variant, form):
    """Many spans, so that a decode is cut into units and its partial results are joined."""
    cache = Cache(variant, Shape(3, 1, 64, form=form))
    requests = [request(cache, 5000, seed) for seed in range(1)]
    check(cache, requests, [requests[0].part(4999, 5000)], num_threads=2)
    check(cache, requests, [requests[0].part(4900, 5000)], num_threads=2)


def test_a_window_ends_inside_a_tile_that_is_cut(variant):
    """The first rows of a chunk see a span more than its last ones, and each span is a job of its own."""
    cache = Cache(variant, Shape(4, 2, 64, window=900))
    one = request(cache, 1165)
    part = one.part(1149, 1165)
    assert 1149 - 899 < SPAN <= 1164 - 899
    check(cache, [one], [part])
    (rows,), _ = cache.attention([part])
    for i in range(16):
        same_bytes(rows[i : i + 1], cache.attention([one.part(1149 + i, 1150 + i)])[0][0])


def test_large_and_equal_scores(variant):
    """The largest score is taken off before the exp: scores of thousands do no harm."""
    cache = Cache(variant, Shape(1, 1, 64, form="F32"))
    kv = np.ones((300, 128), np.float32)
    kv[:, 64:] = np.arange(300)[:, None]
    one = Request(np.full((300, 64), 4000.0, np.float32), kv, cache.place(kv))
    (rows,), _ = cache.attention([one.part(299, 300)])
    np.testing.assert_allclose(rows, np.full((1, 64), 149.5), rtol=1e-6)


def test_nothing_to_do(variant):
    """Requests without a token in this step are passed over; a batch may hold only such."""
    cache = Cache(variant, Shape())
    requests = [request(cache, 40), request(cache, 50, 1)]
    parts = [requests[0].part(40, 40), requests[1].part(49, 50), requests[0].part(40, 40)]
    check(cache, [requests[0], requests[1], requests[0]], parts)
    assert cache.attention([requests[0].part(40, 40)])[1] == 0


# ---------------------------------------------------------------------------------------------------------
# byte by byte
# ---------------------------------------------------------------------------------------------------------

EXACT_SHAPES = [
    Shape(6, 2, 64),
    Shape(7, 1, 80, form="I8"),
    Shape(4, 2, 64, window=200, form="F32"),
    Shape(5, 1, 48, window=300, soft_cap=30.0, block_size=32),
    Shape(32, 1, 128),
    Shape(6, 2, 64, form="BF16"),
    Shape(5, 1, 48, window=301, soft_cap=30.0, block_size=32, form="BF16"),
]


@pytest.mark.parametrize("shape", EXACT_SHAPES, ids=str)
def test_a_chunk_is_its_decodes(variant, shape):
    """A row is the same bytes as a step of its own, in chunks of any size, and in one chunk of all."""
    cache = Cache(variant, shape)
    one = request(cache, 600)
    (whole,), _ = cache.attention([one.part(0, 600)])
    for position in [0, 1, 14, 15, 16, 200, 254, 255, 256, 257, 400, 511, 512, 599]:
        (row,), _ = cache.attention([one.part(position, position + 1)])
        same_bytes(row[0], whole[position])
    for size in [7, 16, 64, 250]:
        for begin in range(0, 600, size):
            end = min(600, begin + size)
            (rows,), _ = cache.attention([one.part(begin, end)])
            same_bytes(rows, whole[begin:end])


@pytest.mark.parametrize("shape", EXACT_SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_batch_is_its_requests(variant, shape, num_threads):
    cache = Cache(variant, shape, num_blocks=800)
    rng = np.random.default_rng(3)
    ends = [int(end) for end in rng.integers(1, 700, 17)]
    requests = [request(cache, end, seed) for seed, end in enumerate(ends)]
    counts = [1 if i % 3 else min(end, 50) for i, end in enumerate(ends)]
    parts = [one.part(end - count, end) for one, count, end in zip(requests, counts, ends, strict=True)]
    alone = [cache.attention([part])[0][0] for part in parts]
    for order in [range(17), range(16, -1, -1), [3, 5]]:
        rows, _ = cache.attention([parts[i] for i in order], num_threads)
        for found, i in zip(rows, order, strict=True):
            same_bytes(found, alone[i])


@pytest.mark.parametrize("shape", EXACT_SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_shared_prefix_changes_nothing(variant, shape, num_threads):
    """Requests that begin with the same blocks, for some of their spans, are what they are alone."""
    cache = Cache(variant, shape, num_blocks=800)
    first = request(cache, 1100)
    others = [request(cache, 560 + 37 * i, i + 1, first, 512) for i in range(12)]
    others += [request(cache, 300 + i, i + 50, first, 256) for i in range(3)]
    requests = [first, *others, request(cache, 700, 99)]
    parts = [one.part(len(one.q) - (i % 3 or 1), len(one.q)) for i, one in enumerate(requests)]
    alone = [cache.attention([part])[0][0] for part in parts]
    rows, _ = cache.attention(parts, num_threads)
    for found, right in zip(rows, alone, strict=True):
        same_bytes(found, right)


def test_a_shared_prefix_is_read_once(variant):
    """16 requests behind 1000 common tokens: their 3 whole spans are read once, the rest by each."""
    cache = Cache(variant, Shape(6, 2, 64))
    first = request(cache, 1020)
    requests = [first, *(request(cache, 1020, i, first, 992) for i in range(1, 16))]
    parts = [one.part(1019, 1020) for one in requests]
    assert cache.attention(parts)[1] == 3 + 16
    assert cache.attention(parts[:1])[1] == 4
    # 33 requests with 2 rows each are more than a job takes at once: two jobs.
    cache = Cache(variant, Shape(2, 1, 64), num_blocks=800)
    first = request(cache, 300)
    requests = [first, *(request(cache, 300, i, first, 272) for i in range(1, 33))]
    assert cache.attention([one.part(299, 300) for one in requests])[1] == 2 + 33


def test_equal_first_blocks_are_not_enough(variant):
    """A span is shared where all its blocks are the same, not only the first."""
    cache = Cache(variant, Shape(2, 1, 32))
    first = request(cache, 300)
    other = request(cache, 300, 1, first, 128)
    parts = [first.part(299, 300), other.part(299, 300)]
    rows, num_spans = cache.attention(parts)
    assert num_spans == 4
    for found, part in zip(rows, parts, strict=True):
        same_bytes(found, cache.attention([part])[0][0])


# ---------------------------------------------------------------------------------------------------------
# what may not be seen
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fill", [0x00, 0x7C, 0xFF])
def test_what_blocks_held_before_has_no_influence(variant, form, fill):
    """Zeros, large numbers or NaN (fp16 0x7c7c and 0xffff are NaN) behind a request's end: the same bytes."""
    results = []
    for content in (0x33, fill):
        cache = Cache(variant, Shape(6, 2, 64, form=form), fill=content)
        requests = [request(cache, 21), request(cache, 270, 1)]
        parts = [requests[0].part(20, 21), requests[1].part(200, 270), requests[1].part(0, 5)]
        rows, _ = cache.attention(parts)
        results.append(np.concatenate(rows))
    same_bytes(results[1], results[0])
    assert np.isfinite(results[0]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_later_tokens_have_no_influence(variant, form, bad):
    """A token whose K and V are broken breaks the rows that see it, and no row of its chunk that does not."""
    cache = Cache(variant, Shape(6, 2, 64, form=form))
    good = request(cache, 100)
    kv = good.kv.copy()
    kv[90] = bad
    broken = Request(good.q, kv, cache.place(kv))
    (right,), _ = cache.attention([good.part(0, 100)])
    with np.errstate(invalid="ignore"):
        (rows,), _ = cache.attention([broken.part(0, 100)])
    same_bytes(rows[:90], right[:90])
    assert not np.isfinite(rows[90:]).any(axis=1).any()


def test_a_window_hides_what_is_before_it(variant):
    """Case B154: a token outside the window has no influence, and its blocks may be another's by now."""
    window = 100
    cache = Cache(variant, Shape(4, 2, 64, window=window))
    one = request(cache, 600)
    part = one.part(570, 600)
    (right,), _ = cache.attention([part])
    first_seen = 570 - window + 1
    gone = np.where(np.arange(len(one.blocks)) < first_seen // 16, 10**9, one.blocks).astype(np.int32)
    (rows,), _ = cache.attention([Part(part.q, 600, gone)])
    same_bytes(rows, right)
    shared = [Part(part.q[i : i + 1], 571 + i, gone) for i in range(30)]
    rows, num_spans = cache.attention(shared)
    same_bytes(np.concatenate(rows), right)
    assert num_spans < 60


# ---------------------------------------------------------------------------------------------------------
# writing, and what comes out
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_layout_of_the_cache(variant, form):
    """Keys stand [group of 16 tokens][element][token], values [token][element], head after head."""
    shape = Shape(4, 2, 48, form=form, block_size=32)
    cache = Cache(variant, shape, num_blocks=3)
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((32, 2 * 2 * 48), np.float32)
    slots = 32 + rng.permutation(32).astype(np.int64)
    cache.write(kv, slots)
    cache.write(kv[:2], np.array([-1, -1], np.int64))  # not kept
    assert (cache.data[[0, 2]] == cache.fill).all()
    by_slot = np.empty_like(kv)
    by_slot[slots - 32] = kv
    wide = by_slot.reshape(32, 2, 2, 48)  # token, key or value, head, element
    heads = cache.data[1].reshape(2, -1)
    size = 32 * 48 * np.dtype(ELEMENTS[form]).itemsize
    for h in range(2):
        keys, values = (heads[h, at : at + size].view(ELEMENTS[form]) for at in (0, size))
        if form == "BF16":
            keys = from_bf16(keys).reshape(2, 24, 16, 2).transpose(0, 2, 1, 3).reshape(32, 48)
            values = from_bf16(values).reshape(16, 48, 2).transpose(0, 2, 1).reshape(32, 48)
        else:
            keys = keys.reshape(2, 48, 16).transpose(0, 2, 1).reshape(32, 48)
            values = values.reshape(32, 48)
        if form == "I8":
            scales = heads[h, 2 * size :].view(np.float32).reshape(2, 32, 1)
            keys, values = keys * scales[0].astype(np.float64), values * scales[1].astype(np.float64)
        np.testing.assert_array_equal(keys, as_kept(wide[:, 0, h], form))
        np.testing.assert_array_equal(values, as_kept(wide[:, 1, h], form))


def test_a_token_of_zeros_in_8_bits(variant):
    cache = Cache(variant, Shape(1, 1, 32, form="I8"))
    kv = np.zeros((20, 64), np.float32)
    kv[:10, 32:] = 1.0
    one = Request(np.ones((20, 32), np.float32), kv, cache.place(kv))
    (rows,), _ = cache.attention([one.part(19, 20)])
    np.testing.assert_allclose(rows, 0.5, rtol=1e-6)


@pytest.mark.parametrize("both", [False, True])
def test_encoded_output(variant, both):
    """The same rows as 8-bit integers with a scale per 32 elements, with the floats or without."""
    cache = Cache(variant, Shape(6, 2, 64))
    one = request(cache, 300)
    (right,), _ = cache.attention([one.part(250, 300)])
    out = np.empty_like(right) if both else None
    codes, scales = np.empty(right.shape, np.int8), np.empty((50, right.shape[1] // 32), np.float32)
    native.attention(
        variant, cache.data, *cache._layout, one.q[250:],
        np.array([0, 50], np.int32), np.array([300], np.int32), one.blocks[None],
        cache.shape.scale, 0, 0.0, True, 1, 1, out, codes, scales,
    )  # fmt: skip
    if out is not None:
        same_bytes(out, right)
    decoded = codes.reshape(50, -1, 32) * scales[:, :, None]
    error = np.abs(decoded - right.reshape(decoded.shape))
    assert (error <= 0.501 * scales[:, :, None]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 24}, "head size must be a multiple of 16 up to 256, not 24"),
        ({"head_size": 272}, "head size must be a multiple of 16 up to 256, not 272"),
        ({"num_heads": 5}, "KV heads must divide"),
        ({"num_heads": 65, "num_kv_heads": 1}, "at most 64 query heads"),
        ({"block_size": 8}, "block size must be a multiple of 16, not 8"),
        ({"window": -1}, "window must be positive"),
        ({"window": 5, "causal": False}, "needs causal attention"),
    ],
)
def test_shapes_that_attention_does_not_have(variant, change, message):
    shape = Shape()._replace(**change)
    cache = Cache(variant, shape, num_blocks=4)
    q = np.zeros((1, shape.num_heads * shape.head_size), np.float32)
    with pytest.raises(ValueError, match=message):
        cache.attention([Part(q, 1, np.array([0], np.int32))])
