"""Every numpy operation against naive float64 loops, over odd sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from mainspring.base.messages import KVCacheConfig, KVCacheGroup, KVCacheSpec
from mainspring.kernels import attention as tiles
from mainspring.kernels.ops import Activation, AttentionShape, Batch, Floats, LazyWeight
from mainspring.kernels.ref import RefOps, _error_function

SIZES = (0, 1, 7, 64)
BLOCK_SIZE = 4
# float32 against float64; values and weights are near 1, sums have at most a few hundred terms.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def ops_with(**widths: int) -> RefOps:
    ops = RefOps()
    for name, width in widths.items():
        ops.add_buffer(name, width)
    return ops


# ---------------------------------------------------------------------------------------------------------
# row-wise operations
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [1, 7, 64])
def test_rms_norm(rows: int, width: int) -> None:
    ops = ops_with(x=width, out=width)
    x, weight = random(rows, width), random(width, seed=1)
    ops.add_weight("w", weight)
    ops.run_rows("x", x, lambda o: o.rms_norm("out", "x", "w", 1e-5))
    expected = [
        [v / np.sqrt(np.mean(r.astype(float) ** 2) + 1e-5) * w for v, w in zip(r, weight, strict=True)]
        for r in x
    ]
    np.testing.assert_allclose(ops.read("out"), np.reshape(expected, (rows, width)), **CLOSE)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [1, 7, 64])
def test_layer_norm(rows: int, width: int) -> None:
    """Also far from 0, and in place."""
    ops = ops_with(x=width, out=width)
    x, weight, bias = random(rows, width) + np.float32(3), random(width, seed=1), random(width, seed=2)
    ops.add_weight("w", weight)
    ops.add_weight("b", bias)
    ops.run_rows(
        "x", x, lambda o: (o.layer_norm("out", "x", "w", "b", 1e-3), o.layer_norm("x", "x", "w", "b", 1e-3))
    )
    expected = []
    for row in x.astype(float):
        mean = sum(row) / width
        variance = sum((v - mean) ** 2 for v in row) / width
        expected.append([(v - mean) / math.sqrt(variance + 1e-3) for v in row] * weight + bias)
    expected = np.reshape(expected, (rows, width))
    np.testing.assert_allclose(ops.read("out"), expected, rtol=2e-5, atol=1e-4)
    np.testing.assert_array_equal(ops.read("x"), ops.read("out"))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(
    ("first", "num_heads", "size"), [(0, 1, 9), (0, 3, 3), (2, 7, 1), (4, 1, 5), (9, 0, 4)]
)
def test_head_norm(rows: int, first: int, num_heads: int, size: int) -> None:
    """Only the pieces that are named change."""
    ops = ops_with(x=9)
    x, weight = random(rows, 9), random(size, seed=1)
    ops.add_weight("w", weight)
    ops.run_rows("x", x, lambda o: o.head_norm("x", first, num_heads, "w", 1e-5))
    expected = x.astype(float)
    for row in expected:
        for head in range(num_heads):
            piece = row[first + head * size : first + (head + 1) * size]
            piece *= weight / math.sqrt(sum(v * v for v in piece) / size + 1e-5)
    np.testing.assert_allclose(ops.read("x"), expected, **CLOSE)


def test_rms_norm_in_place() -> None:
    ops = ops_with(x=7, out=7)
    ops.add_weight("w", random(7))
    x = random(5, 7, seed=1)
    ops.run_rows("x", x, lambda o: (o.rms_norm("out", "x", "w", 1e-5), o.rms_norm("x", "x", "w", 1e-5)))
    np.testing.assert_array_equal(ops.read("x"), ops.read("out"))


@pytest.mark.parametrize("rows", SIZES)
def test_add_bias_scale_and_soft_cap(rows: int) -> None:
    ops = ops_with(x=7)
    x, bias = random(rows, 7), random(7, seed=1)
    ops.add_weight("b", bias)
    ops.run_rows("x", x, lambda o: o.add_bias("x", "b"))
    np.testing.assert_array_equal(ops.read("x"), x + bias)
    ops.run_rows("x", x, lambda o: o.scale("x", 0.3))
    np.testing.assert_array_equal(ops.read("x"), x * np.float32(0.3))
    ops.run_rows("x", 40 * x, lambda o: o.soft_cap("x", 30.0))
    expected = [[30.0 * math.tanh(40.0 * float(v) / 30.0) for v in row] for row in x]
    np.testing.assert_allclose(ops.read("x"), np.reshape(expected, (rows, 7)), rtol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 48, 49, 64])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (5, 7), (64, 33)])
def test_linear(rows: int, out: int, width: int) -> None:
    """The sizes straddle every change of form."""
    ops = ops_with(x=width, out=out)
    x, weight = random(rows, width), random(out, width, seed=1)
    ops.add_weight("w", weight)
    ops.run_rows("x", x, lambda o: o.linear("out", "x", "w"))
    expected = [[sum(float(a) * float(b) for a, b in zip(r, w, strict=True)) for w in weight] for r in x]
    np.testing.assert_allclose(ops.read("out"), np.reshape(expected, (rows, out)), **CLOSE)


def test_a_large_matrix_takes_the_weights_on_the_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainspring.kernels.ref.CACHED_BYTES", 16)
    test_linear(7, 5, 7)


def test_a_lazy_weight_is_made_at_each_use() -> None:
    matrix, made = random(5, 7), []

    def fill(out: Floats) -> None:
        made.append(out.shape)
        out[...] = matrix

    ops = ops_with(x=7, out=5)
    ops.add_weight("w", LazyWeight((5, 7), fill))
    for rows in (1, 3):
        x = random(rows, 7, seed=rows)
        ops.run_rows("x", x, lambda o: o.linear("out", "x", "w"))
        np.testing.assert_allclose(ops.read("out"), x @ matrix.T, **CLOSE)
    assert made == [(5, 7)] * 2


@pytest.mark.parametrize("rows", SIZES)
def test_add(rows: int) -> None:
    ops = ops_with(x=3, out=3)
    ops.run_rows(
        "x", random(rows, 3), lambda o: (o.all_gather("out", "x"), o.add("out", "x"), o.all_reduce("out"))
    )
    np.testing.assert_array_equal(ops.read("out"), 2 * random(rows, 3))


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def _gelu(x: float) -> float:
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def _gelu_tanh(x: float) -> float:
    return x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[Activation, Callable[[float], float]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [1, 7, 64])
def test_activate_and_gate(rows: int, width: int, activation: Activation) -> None:
    """Also far from zero, where exp() overflows: silu is 0 there, not NaN."""
    x = random(rows, 2 * width)
    x[::2] *= np.float32(60.0)
    ops = ops_with(x=2 * width, activated=2 * width, out=width)
    ops.run_rows("x", x, lambda o: (o.activate("activated", "x", activation), o.gate("out", "x", activation)))
    function = ACTIVATIONS[activation]
    activated = np.reshape([[function(float(v)) for v in row] for row in x], x.shape)
    np.testing.assert_allclose(ops.read("activated"), activated, rtol=1e-5, atol=1e-6)
    gated = activated[:, :width] * x[:, width:]
    np.testing.assert_allclose(ops.read("out"), gated, rtol=1e-5, atol=1e-4)


def test_error_function() -> None:
    """Where its two forms meet, too, and beyond where it is 1 in float64."""
    x = np.concatenate([np.linspace(-8, 8, 20_001), [0.0, -0.0, 1e-300, 2.0, np.nextafter(2.0, 0), 1e300]])
    expected = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(_error_function(x), expected, rtol=0, atol=1e-14)
    assert _error_function(np.array([np.inf, -np.inf])).tolist() == [1.0, -1.0]
    assert np.isnan(_error_function(np.array([np.nan])))[0]


# ---------------------------------------------------------------------------------------------------------
# operations that need a batch
# ---------------------------------------------------------------------------------------------------------


def batch_of(
    lengths: list[tuple[int, int]], tables: list[list[int]] | None = None, block_size: int = BLOCK_SIZE
) -> Batch:
    """Requests of (tokens computed before, tokens of this step). Tables: given, or one run of blocks each."""
    if tables is None:
        starts = itertools.accumulate([1, *(-(-(a + b) // block_size) for a, b in lengths)])
        tables = [
            list(range(s, s - (-(a + b) // block_size))) for s, (a, b) in zip(starts, lengths, strict=False)
        ]
    positions = [np.arange(a, a + b) for a, b in lengths]
    width = max([1, *map(len, tables)])
    slots = [
        np.array(t, np.int64)[p // block_size] * block_size + p % block_size
        for t, p in zip(tables, positions, strict=True)
    ]
    num_tokens = sum(b for _, b in lengths)
    return Batch(
        token_ids=(np.arange(num_tokens, dtype=np.int32) * 5) % 11,
        positions=np.concatenate([*positions, np.empty(0)]).astype(np.int32),
        query_start_loc=np.array([0, *itertools.accumulate(b for _, b in lengths)], np.int32),
        seq_lens=np.array([a + b for a, b in lengths], np.int32),
        # What stands behind a request's blocks is old: no block has that number.
        block_tables=(
            np.array([t + [10**6] * (width - len(t)) for t in tables], np.int32).reshape(len(lengths), width),
        ),
        slot_mapping=(np.concatenate([*slots, np.empty(0)]).astype(np.int64),),
    )


@pytest.mark.parametrize("rows", SIZES)
def test_embedding(rows: int) -> None:
    ops = ops_with(out=3)
    ops.add_weight("w", random(11, 3))
    ops.allocate_kv(KVCacheConfig(32, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    batch = batch_of([(0, rows)])
    ops.run(batch, lambda o: o.embedding("out", "w"))
    np.testing.assert_array_equal(ops.read("out"), random(11, 3)[batch.token_ids])


def test_positions_are_added_to_embeddings() -> None:
    """Each request counts its own, from where its chunk begins."""
    ops = ops_with(out=3)
    tokens, positions = random(11, 3), random(40, 3, seed=1)
    ops.add_weight("w", tokens)
    ops.add_weight("p", positions)
    ops.allocate_kv(KVCacheConfig(32, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    batch = batch_of([(0, 1), (5, 7), (39, 1)])
    ops.run(batch, lambda o: (o.embedding("out", "w"), o.add_position("out", "p")))
    expected = [
        tokens[t] + positions[p] for t, p in zip(batch.token_ids, [0, *range(5, 12), 39], strict=True)
    ]
    np.testing.assert_array_equal(ops.read("out"), expected)


@pytest.mark.parametrize("amplitude", [1.0, 1.19])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "size", "n"), [(1, 2, 1), (3, 8, 4), (5, 6, 2)])
def test_rope(rows: int, interleaved: bool, heads: int, size: int, n: int, amplitude: float) -> None:
    """The last case turns only a part of each head; columns behind the heads are values and stay, too.

    Case B154: a far position is turned as exactly as a near one.
    """
    width = heads * size + 5
    ops = ops_with(x=width)
    ops.allocate_kv(KVCacheConfig(64, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    freqs = 1.0 / 100 ** (np.arange(n) / n)
    ops.add_weight("f", freqs)
    x = random(rows, width)
    batch = batch_of([(100_000, rows)])

    def fill_and_turn(o: RefOps) -> None:
        o.read("x")[...] = x
        o.rope("x", "f", heads, size, interleaved, amplitude)

    ops.run(batch, fill_and_turn)
    expected = x.astype(float)
    for row, head, i in itertools.product(range(rows), range(heads), range(n)):
        angle = batch.positions[row] * freqs[i]
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, n + i)
        a, b = head * size + a, head * size + b
        u, v = float(x[row, a]), float(x[row, b])
        expected[row, a], expected[row, b] = (
            amplitude * (u * np.cos(angle) - v * np.sin(angle)),
            amplitude * (u * np.sin(angle) + v * np.cos(angle)),
        )
    np.testing.assert_allclose(ops.read("x"), expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# attention
# ---------------------------------------------------------------------------------------------------------


def naive(history: Floats, shape: AttentionShape) -> npt.NDArray[np.float64]:
    """Attention of one request, whose rows of a qkv buffer are `history`, one product at a time."""
    rows = history.astype(float)
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    q = rows[:, : shape.q_width].reshape(-1, heads, size)
    k, v = (part.reshape(-1, kv_heads, size) for part in np.split(rows[:, shape.q_width :], 2, axis=1))
    out = np.zeros((len(rows), heads, size))
    for t, head in itertools.product(range(len(rows)), range(heads)):
        first = 0 if shape.sliding_window is None else max(0, t - shape.sliding_window + 1)
        seen = range(first, t + 1 if shape.causal else len(rows))
        kv_head = head // (heads // kv_heads)
        scores = [shape.scale * (q[t, head] @ k[s, kv_head]) for s in seen]
        if shape.soft_cap:
            scores = [shape.soft_cap * math.tanh(score / shape.soft_cap) for score in scores]
        weights = np.exp(scores)
        out[t, head] = sum(w * v[s, kv_head] for w, s in zip(weights, seen, strict=True)) / weights.sum()
    return out.reshape(len(rows), shape.q_width)


def paged(
    steps: list[list[int]], histories: list[Floats], shape: AttentionShape, *, poison: float = 0.0
) -> list[Floats]:
    """Run requests through a scattered cache, `steps[i][r]` tokens of request r in step i."""
    needed = [-(-len(history) // BLOCK_SIZE) for history in histories]
    order = np.random.default_rng(3).permutation(sum(needed)) + 1
    tables = [part.tolist() for part in np.split(order, np.cumsum(needed)[:-1])]
    ops = ops_with(qkv=shape.q_width + shape.kv_width, out=shape.q_width)
    spec = KVCacheSpec(shape.num_kv_heads, shape.head_size)
    ops.allocate_kv(KVCacheConfig(1 + sum(needed), BLOCK_SIZE, (KVCacheGroup((0,), spec),)))
    ops._cache_of_layer[0][...] = poison
    done, results = [0] * len(histories), [[] for _ in histories]
    for step in steps:
        running = [r for r, n in enumerate(step) if n]
        rows = [histories[r][done[r] : done[r] + step[r]] for r in running]

        def walk(o: RefOps, rows: list[Floats] = rows) -> None:
            o.read("qkv")[...] = np.concatenate(rows)
            o.write_kv(0, "qkv", shape)
            o.attention("out", 0, "qkv", shape)

        ops.run(batch_of([(done[r], step[r]) for r in running], [tables[r] for r in running]), walk)
        parts = np.split(ops.read("out").copy(), np.cumsum([step[r] for r in running])[:-1])
        for r, part in zip(running, parts, strict=True):
            results[r].append(part)
            done[r] += step[r]
    assert done == [len(history) for history in histories], "the steps must cover every token"
    return [np.concatenate(parts) for parts in results]


def histories_for(shape: AttentionShape, *lengths: int) -> list[Floats]:
    return [random(length, shape.q_width + shape.kv_width, seed=i) for i, length in enumerate(lengths)]


SHAPES = {
    "ratio 1": AttentionShape(3, 3, 5, 0.4),
    "ratio 2": AttentionShape(2, 1, 4, 0.5),
    "ratio 3": AttentionShape(9, 3, 8, 0.3),
    "ratio 7": AttentionShape(14, 2, 3, 0.5),
    "window 1": AttentionShape(4, 2, 4, 0.5, sliding_window=1),
    "window 5": AttentionShape(4, 2, 4, 0.5, sliding_window=5),
    "window 8": AttentionShape(4, 2, 4, 0.5, sliding_window=8),
    "capped": AttentionShape(4, 2, 4, 0.5, soft_cap=0.7),
    "capped, window 5": AttentionShape(4, 2, 4, 0.5, sliding_window=5, soft_cap=2.0),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("small", [True, False])
def test_any_chunking_is_the_naive_loop(
    shape: AttentionShape, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in ragged chunks, and token by token beside others; with tiny tiles and spans, and real ones."""
    if small:
        monkeypatch.setattr(tiles, "MAX_ROWS", 3)
        monkeypatch.setattr(tiles, "MAX_KEYS", 8)
        monkeypatch.setattr(tiles, "MAX_STACKED_KEYS", 40)
    histories = histories_for(shape, 1, 7, 23, 24, 30)
    whole = [[1, 7, 23, 24, 30]]
    ragged = [[0, 3, 10, 1, 1], [1, 0, 1, 1, 0], [0, 4, 5, 15, 20], *[[0, 0, 1, 1, 1]] * 7, [0, 0, 0, 0, 2]]
    single = [[int(i < len(history)) for history in histories] for i in range(30)]
    for steps in (whole, ragged, single):
        for found, history in zip(paged(steps, histories, shape), histories, strict=True):
            np.testing.assert_allclose(found, naive(history, shape), **CLOSE)


@pytest.mark.parametrize("soft_cap", [0.0, 0.7])
def test_not_causal(soft_cap: float) -> None:
    shape = AttentionShape(6, 2, 4, 0.5, causal=False, soft_cap=soft_cap)
    histories = histories_for(shape, 1, 70, 7)
    for found, history in zip(paged([[1, 70, 7]], histories, shape), histories, strict=True):
        np.testing.assert_allclose(found, naive(history, shape), **CLOSE)


def test_nobody_reads_what_was_left_in_a_block() -> None:
    """A block may still hold NaN of its last owner; only 0 * NaN would show it."""
    shape = SHAPES["ratio 3"]
    histories = histories_for(shape, 5, 6, 7, 9)
    clean = paged([[4, 5, 6, 8], [1, 1, 1, 1]], histories, shape)
    for found, expected in zip(
        paged([[4, 5, 6, 8], [1, 1, 1, 1]], histories, shape, poison=np.nan), clean, strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_one_request_of_nan_spoils_no_other() -> None:
    shape = SHAPES["ratio 3"]
    histories = histories_for(shape, 5, 6, 7)
    expected = paged([[5, 5, 7], [0, 1, 0]], histories, shape)
    histories[1][:, :] = np.nan
    found = paged([[5, 5, 7], [0, 1, 0]], histories, shape)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[2], expected[2])


def test_scratch_depends_on_neither_chunk_nor_context() -> None:
    shape = AttentionShape(2, 1, 4, 0.5)
    sizes = []
    for length in (2100, 4200):
        ops = ops_with(qkv=shape.q_width + shape.kv_width, out=shape.q_width)
        blocks = 1 + -(-length // 16)
        ops.allocate_kv(KVCacheConfig(blocks, 16, (KVCacheGroup((0,), KVCacheSpec(1, 4)),)))

        def walk(o: RefOps) -> None:
            o.read("qkv")[...] = 1.0
            o.write_kv(0, "qkv", shape)
            o.attention("out", 0, "qkv", shape)

        ops.run(batch_of([(0, length)], block_size=16), walk)
        np.testing.assert_allclose(ops.read("out"), 1.0, rtol=1e-5)
        sizes.append({name: array.size for name, array in ops._scratch._arrays.items()})
    assert sizes[0] == sizes[1]


def test_rows_that_are_not_kept_are_not_written() -> None:
    shape = AttentionShape(1, 1, 2, 1.0)
    ops = ops_with(qkv=6)
    ops.allocate_kv(KVCacheConfig(4, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    batch = batch_of([(0, 3)])
    batch.slot_mapping[0][1] = -1

    def walk(o: RefOps) -> None:
        o.read("qkv")[...] = 1.0
        o.write_kv(0, "qkv", shape)

    ops.run(batch, walk)
    written = np.flatnonzero(ops._cache_of_layer[0].reshape(-1, 4).any(axis=1))
    assert written.tolist() == [BLOCK_SIZE, BLOCK_SIZE + 2]


def test_groups_of_different_heads_share_a_pool() -> None:
    """Layer 0 has two heads of 4, layer 1 one of 8; both keep tensor 0, each its own blocks."""
    shapes = [AttentionShape(2, 2, 4, 0.5), AttentionShape(1, 1, 8, 0.5)]
    ops = ops_with(qkv=24, out=8)
    groups = tuple(KVCacheGroup((i,), KVCacheSpec(s.num_kv_heads, s.head_size)) for i, s in enumerate(shapes))
    ops.allocate_kv(KVCacheConfig(5, BLOCK_SIZE, groups))
    first, second = batch_of([(0, 7)], [[1, 3]]), batch_of([(0, 7)], [[4, 2]])
    batch = Batch(
        first.token_ids,
        first.positions,
        first.query_start_loc,
        first.seq_lens,
        first.block_tables + second.block_tables,
        first.slot_mapping + second.slot_mapping,
    )
    history = random(7, 24)
    for layer, shape in enumerate(shapes):

        def walk(o: RefOps, layer: int = layer, shape: AttentionShape = shape) -> None:
            o.read("qkv")[...] = history
            o.write_kv(0, "qkv", shapes[0])
            o.write_kv(1, "qkv", shapes[1])
            o.attention("out", layer, "qkv", shape)

        ops.run(batch, walk)
        np.testing.assert_allclose(ops.read("out"), naive(history, shape), **CLOSE)


# ---------------------------------------------------------------------------------------------------------
# contracts
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "walk",
    [
        lambda o: o.linear("a", "b", "w"),
        lambda o: o.rms_norm("a", "a", "w", 1e-5),
        lambda o: o.add("a", "b"),
        lambda o: o.gate("a", "b", "silu"),
        lambda o: o.rope("a", "f", 2, 4, True, 1.0),
        lambda o: o.rope("a", "f", 1, 2, True, 1.0),
        lambda o: o.write_kv(0, "a", AttentionShape(1, 1, 3, 1.0)),
        lambda o: o.attention("b", 0, "a", AttentionShape(1, 1, 2, 1.0)),
        lambda o: o.attention("c", 0, "a", AttentionShape(1, 1, 2, 1.0, sliding_window=2, causal=False)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(walk) -> None:  # type: ignore[no-untyped-def]
    ops = ops_with(a=6, b=4, c=2)
    ops.add_weight("w", random(6, 6))
    ops.add_weight("f", np.ones(2))
    ops.allocate_kv(KVCacheConfig(4, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    with pytest.raises(AssertionError):
        ops.run(batch_of([(0, 3)]), walk)


def test_a_batch_of_wrong_types_is_refused() -> None:
    ops = ops_with(a=6)
    ops.allocate_kv(KVCacheConfig(4, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    good = batch_of([(0, 3)])
    bad = Batch(
        good.token_ids.astype(np.int64),
        good.positions,
        good.query_start_loc,
        good.seq_lens,
        good.block_tables,
        good.slot_mapping,
    )
    with pytest.raises(AssertionError, match="token_ids is int64"):
        ops.run(bad, lambda o: None)


def test_operations_on_requests_need_a_batch() -> None:
    ops = ops_with(a=6, b=2)
    ops.allocate_kv(KVCacheConfig(4, BLOCK_SIZE, (KVCacheGroup((0,), KVCacheSpec(1, 2)),)))
    with pytest.raises(AssertionError, match="needs a batch"):
        ops.run_rows("a", random(2, 6), lambda o: o.attention("b", 0, "a", AttentionShape(1, 1, 2, 1.0)))
