"""Layers of experts in numpy, against plain float64 loops over rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mainspring.kernels.ops import ExpertShape, Floats, LazyWeight
from mainspring.kernels.ref import RefOps, route

HIDDEN, WIDTH, NUM_EXPERTS = 12, 7, 6
Doubles = npt.NDArray[np.float64]


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def shape_of(**changes: Any) -> ExpertShape:
    return ExpertShape(NUM_EXPERTS, 2, WIDTH, "silu", "softmax", True)._replace(**changes)


GATE_UP, DOWN = random(2 * NUM_EXPERTS * WIDTH, HIDDEN, seed=1), random(NUM_EXPERTS * HIDDEN, WIDTH, seed=2)
CORRECTION = random(NUM_EXPERTS, seed=3)


def computed(x: Floats, scores: Floats, shape: ExpertShape, correction: Floats | None = None) -> Floats:
    """By the operation, of the experts that the shape says are here."""
    ops = RefOps()
    for name, width in (
        ("x", HIDDEN),
        ("out", HIDDEN),
        ("both", HIDDEN + NUM_EXPERTS),
        ("scores", NUM_EXPERTS),
    ):
        ops.add_buffer(name, width)
    here = shape.here
    ops.add_weight("gate_up", GATE_UP[2 * WIDTH * here.start : 2 * WIDTH * here.stop])
    ops.add_weight("down", DOWN[HIDDEN * here.start : HIDDEN * here.stop])
    # Rows come from outside in one buffer: what is scored and its scores.
    ops.add_weight("left", np.eye(HIDDEN, HIDDEN + NUM_EXPERTS, dtype=np.float32))
    ops.add_weight("right", np.eye(NUM_EXPERTS, HIDDEN + NUM_EXPERTS, HIDDEN, dtype=np.float32))
    if correction is not None:
        ops.add_weight("correction", correction)

    def walk(o: Any) -> None:
        o.linear("x", "both", "left")
        o.linear("scores", "both", "right")
        given = None if correction is None else "correction"
        o.experts("out", "x", "scores", "gate_up", "down", given, shape)

    ops.run_rows("both", np.concatenate([x, scores], axis=1), walk)
    return ops.read("out").copy()


def naive(x: Floats, scores: Floats, shape: ExpertShape, correction: Floats | None = None) -> Doubles:
    return np.array(
        [
            sum(
                (
                    weight * one_expert(row, expert)
                    for expert, weight in naive_route(scored, shape, correction)
                ),
                np.zeros(HIDDEN),
            )
            for row, scored in zip(x.astype(float), scores.astype(float), strict=True)
        ]
    ).reshape(len(x), HIDDEN)


def naive_route(scored: Doubles, shape: ExpertShape, correction: Floats | None) -> list[tuple[int, float]]:
    if shape.scoring == "softmax":
        total = sum(math.exp(s) for s in scored)
        likely = [math.exp(s) / total for s in scored]
    else:
        likely = [1.0 / (1.0 + math.exp(-s)) for s in scored]
    ranked = likely if correction is None else [p + float(c) for p, c in zip(likely, correction, strict=True)]
    best = sorted(range(len(scored)), key=lambda expert: (-ranked[expert], expert))[: shape.top_k]
    whole = sum(likely[expert] for expert in best) if shape.normalised else 1.0
    return [(expert, shape.scale * likely[expert] / whole) for expert in sorted(best)]


def one_expert(row: Doubles, expert: int) -> Doubles:
    gate, up = np.split(GATE_UP[2 * WIDTH * expert : 2 * WIDTH * (expert + 1)].astype(float), 2)
    inner = [
        float(g) / (1.0 + math.exp(-float(g))) * float(u) for g, u in zip(gate @ row, up @ row, strict=True)
    ]
    found: Doubles = DOWN[HIDDEN * expert : HIDDEN * (expert + 1)].astype(float) @ np.array(inner)
    return found


@pytest.mark.parametrize("rows", [0, 1, 2, 33])
@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_experts(rows: int, top_k: int, scoring: str, normalised: bool, corrected: bool) -> None:
    x, scores = random(rows, HIDDEN), random(rows, NUM_EXPERTS, seed=4)
    shape = shape_of(top_k=top_k, scoring=scoring, normalised=normalised, scale=1.3)
    correction = CORRECTION if corrected else None
    expected = naive(x, scores, shape, correction)
    np.testing.assert_allclose(computed(x, scores, shape, correction), expected, rtol=2e-5, atol=2e-5)


def test_matrices_that_are_made_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are needed at once."""
    x, scores = random(5, HIDDEN), random(5, NUM_EXPERTS, seed=4)
    expected = computed(x, scores, shape_of())

    def lazily(ops: RefOps, weight: str, value: Any) -> None:
        lazy = LazyWeight(value.shape, lambda out: np.copyto(out, value))
        ops._weights[weight] = lazy

    monkeypatch.setattr(RefOps, "add_weight", lazily)
    np.testing.assert_array_equal(computed(x, scores, shape_of()), expected)


def test_of_equal_scores_the_lowest_numbers_win() -> None:
    scores = np.array([[0, 1, 1, 1, 0, 1], [2, 2, 2, 2, 2, 2]], np.float32)
    chosen, weights = route(scores, None, shape_of(top_k=3))
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2]]
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_a_correction_chooses_and_does_not_weigh() -> None:
    scores = np.array([[3, 0, 0, 0, 0, 0]], np.float32)
    correction = np.array([0, 0, 0, 0, 9, 8], np.float32)
    chosen, weights = route(scores, correction, shape_of(scoring="sigmoid"))
    assert chosen.tolist() == [[4, 5]]
    np.testing.assert_allclose(weights, 0.5)


def test_large_scores_overflow_nothing() -> None:
    scores = np.array([[3e4, -3e4, 2.9e4, 0, 0, 0]], np.float32)
    chosen, weights = route(scores, None, shape_of())
    assert chosen[0].tolist() == [0, 1], "all others vanish"
    np.testing.assert_array_equal(weights, [[1, 0]])


def test_scores_that_vanish_are_no_numbers_lost() -> None:
    with np.errstate(over="ignore"):
        _, weights = route(np.full((1, NUM_EXPERTS), -200, np.float32), None, shape_of(scoring="sigmoid"))
    np.testing.assert_array_equal(weights, 0)


@pytest.mark.parametrize("cuts", [(0, 3, 6), (0, 1, 6), (0, 2, 4, 6)])
def test_ranks_with_some_experts_each_sum_to_the_whole(cuts: tuple[int, ...]) -> None:
    """Every rank scores all experts, so that their shares are the same everywhere."""
    x, scores = random(9, HIDDEN), random(9, NUM_EXPERTS, seed=4)
    shape = shape_of(top_k=3)
    parts = [
        computed(x, scores, shape._replace(first=begin, num_here=end - begin))
        for begin, end in itertools.pairwise(cuts)
    ]
    np.testing.assert_allclose(sum(parts), computed(x, scores, shape), rtol=2e-5, atol=2e-5)
    assert [part.any() for part in parts] == [end > begin for begin, end in itertools.pairwise(cuts)]


def test_one_row_of_nan_spoils_no_other() -> None:
    x, scores = random(5, HIDDEN), random(5, NUM_EXPERTS, seed=4)
    clean = computed(x, scores, shape_of())
    x[2], scores[2] = np.nan, np.nan
    spoilt = computed(x, scores, shape_of())
    assert np.isnan(spoilt[2]).all()
    np.testing.assert_allclose(np.delete(spoilt, 2, 0), np.delete(clean, 2, 0), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_scale_rows(rows: int) -> None:
    ops = RefOps()
    ops.add_buffer("x", 3)
    ops.add_buffer("gate", 1)
    gate = random(1, 3, seed=1)
    ops.add_weight("w", gate)
    x = random(rows, 3)
    ops.run_rows("x", x, lambda o: (o.linear("gate", "x", "w"), o.scale_rows("x", "gate")))
    expected = [row / (1.0 + math.exp(-float(row @ gate[0]))) for row in x.astype(float)]
    np.testing.assert_allclose(ops.read("x"), np.reshape(expected, (rows, 3)), rtol=2e-5, atol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, scores = random(2, HIDDEN), random(2, NUM_EXPERTS)
    for shape in (
        shape_of(num_experts=7),
        shape_of(top_k=7),
        shape_of(intermediate_size=8),
        shape_of(num_here=5)._replace(intermediate_size=9),
    ):
        with pytest.raises(AssertionError, match="ExpertShape"):
            computed(x, scores, shape)
