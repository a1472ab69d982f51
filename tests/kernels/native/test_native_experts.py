"""Layers of experts on the native kernels choose and weigh as numpy does, whatever the scores are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mainspring.kernels.native import NativeOps, PackedWeight, library, why_not
from mainspring.kernels.ops import Backend, ExpertShape, Floats
from mainspring.kernels.ref import RefOps

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

HIDDEN, WIDTH, NUM_EXPERTS = 32, 48, 6
VARIANTS = library().runnable_variants()  # type: ignore[union-attr]
SHAPE = ExpertShape(NUM_EXPERTS, 2, WIDTH, "silu", "softmax", True)


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


MATRICES = {
    # Rows come from outside in one buffer: what is scored and its scores.
    "x": np.eye(HIDDEN, HIDDEN + NUM_EXPERTS, dtype=np.float32),
    "scores": np.eye(NUM_EXPERTS, HIDDEN + NUM_EXPERTS, HIDDEN, dtype=np.float32),
}
GATES = [random(WIDTH, HIDDEN, seed=i) for i in range(2 * NUM_EXPERTS)]
DOWNS = [random(HIDDEN, WIDTH, seed=99 + i) for i in range(NUM_EXPERTS)]


def packed(*matrices: Floats) -> PackedWeight:
    native = library()
    assert native is not None
    parts = []
    for values in matrices:
        matrix = native.Matrix("F32", *values.shape)
        memory = np.zeros(matrix.num_bytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        matrix.bind(memory[start : start + matrix.num_bytes])
        matrix.pack(np.ascontiguousarray(values).view(np.uint8).reshape(-1), 0, len(values))
        parts.append(matrix)
    return PackedWeight(tuple(parts))


def computed(ops: Any, x: Floats, scores: Floats, shape: ExpertShape, correction: Floats | None) -> Floats:
    is_native = isinstance(ops, NativeOps)
    buffers = {"x": HIDDEN, "out": HIDDEN, "both": HIDDEN + NUM_EXPERTS, "scores": NUM_EXPERTS}
    for name, width in buffers.items():
        ops.add_buffer(name, width)
    here = shape.here
    weights = {
        **{name: [matrix] for name, matrix in MATRICES.items()},
        "gate_up": GATES[2 * here.start : 2 * here.stop],
        "down": DOWNS[here.start : here.stop],
    }
    for name, matrices in weights.items():
        ops.add_weight(name, packed(*matrices) if is_native else np.concatenate(matrices))
    if correction is not None:
        ops.add_weight("correction", correction)

    def walk(o: Any) -> None:
        o.linear("x", "both", "x")
        o.linear("scores", "both", "scores")
        o.experts(
            "out", "x", "scores", "gate_up", "down", correction if correction is None else "correction", shape
        )

    ops.run_rows("both", np.concatenate([x, scores], axis=1), walk)
    return ops.read("out").copy()


def compare(
    variant: str, scores: Floats, shape: ExpertShape = SHAPE, correction: Floats | None = None
) -> Floats:
    """What the native kernels say, the same bits by any number of threads, and near numpy's."""
    x = random(len(scores), HIDDEN, seed=7)
    with np.errstate(all="ignore"):
        expected = computed(RefOps(), x, scores, shape, correction)
    found = [
        computed(NativeOps(8, num_threads=threads, variant=variant), x, scores, shape, correction)
        for threads in (1, 2)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-3)
    return found[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 130])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_any_scores(variant: str, rows: int, top_k: int, scoring: str) -> None:
    """130 rows for 6 experts are more than a kernel is called for at once."""
    scores, correction = random(rows, NUM_EXPERTS), random(NUM_EXPERTS, seed=3)
    for normalised in (True, False):
        shape = SHAPE._replace(top_k=top_k, scoring=scoring, normalised=normalised, scale=1.3)
        compare(variant, scores, shape)
        compare(variant, scores, shape, correction)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ties_and_extremes(variant: str) -> None:
    """The lowest number of equals; scores whose exponentials overflow, or vanish."""
    scores = np.array(
        [
            [0, 1, 1, 1, 0, 1],
            [2, 2, 2, 2, 2, 2],
            [3e4, -3e4, 2.9e4, 0, 0, 0],
            [-200] * 6,
        ],
        np.float32,
    )
    compare(variant, scores)
    for normalised in (True, False):
        compare(variant, scores, SHAPE._replace(scoring="sigmoid", normalised=normalised))


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_row_of_nan_spoils_no_other(variant: str) -> None:
    scores = random(9, NUM_EXPERTS)
    clean = compare(variant, scores)
    scores[4] = np.nan
    spoilt = compare(variant, scores)
    assert np.isnan(spoilt[4]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_rows_through_one_expert_and_none_through_those_here(variant: str) -> None:
    scores = np.zeros((70, NUM_EXPERTS), np.float32)
    scores[:, 5] = 9
    compare(variant, scores, SHAPE._replace(top_k=1))
    elsewhere = compare(variant, scores, SHAPE._replace(top_k=1, first=1, num_here=3))
    assert not elsewhere.any()


def test_no_rows() -> None:
    ops: Backend = NativeOps(8)
    assert computed(ops, random(0, HIDDEN), random(0, NUM_EXPERTS), SHAPE, None).shape == (0, HIDDEN)
