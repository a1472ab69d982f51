"""The kernels of single rows against numpy in float64.

Tolerances are counted in units of the last place of the true result (ULP = 2^-23 of it), from the number
of roundings on the way: exp is within 1, so silu (exp, sum, quotient, product) within 4; a turned pair
within 2 of the pair's length; a norm within 6, for its sum of squares has positive terms only.
"""

import numpy as np
import pytest

native = pytest.importorskip("mainspring_native", reason="the native kernels are not built")

VARIANTS = native.runnable_variants()
COUNTS = [0, 1, 7, 16, 17, 64, 100, 576, 1000]
ULP = 2.0**-23

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def row(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count]).standard_normal(count).astype(np.float32)


def guarded(count: int) -> tuple[np.ndarray, np.ndarray]:
    """A row to write, and the memory around it, which must stay 7."""
    memory = np.full(count + 32, 7.0, np.float32)
    return memory[16 : 16 + count], memory


def check_guard(memory: np.ndarray) -> None:
    assert (memory[:16] == 7.0).all()
    assert (memory[-16:] == 7.0).all()


@pytest.mark.parametrize("count", COUNTS)
def test_rms_norm(variant, count):
    x, weight = row(count), row(count, 1)
    out, memory = guarded(count)
    native.rms_norm(variant, x, weight, 1e-5, out)
    if count:
        wide = x.astype(np.float64)
        expected = wide / np.sqrt(np.mean(wide * wide) + np.float32(1e-5)) * weight
        np.testing.assert_allclose(out, expected, rtol=6 * ULP)
    check_guard(memory)


@pytest.mark.parametrize("count", COUNTS)
def test_add(variant, count):
    out, memory = guarded(count)
    out[:] = x = row(count)
    y = row(count, 1)
    native.add(variant, out, y)
    np.testing.assert_array_equal(out, x + y)
    check_guard(memory)


@pytest.mark.parametrize("count", COUNTS)
def test_silu_mul(variant, count):
    gate, up = 8 * row(count), row(count, 1)
    out, memory = guarded(count)
    native.silu_mul(variant, gate, up, out)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=4 * ULP)
    check_guard(memory)


def test_exp_by_way_of_silu(variant):
    """For a gate far below zero silu is gate * e^gate: so e^x is seen over the numbers that it can give."""
    gate = np.linspace(-86.0, -17.0, 100_000, dtype=np.float32)
    out = np.empty_like(gate)
    native.silu_mul(variant, gate, np.ones_like(gate), out)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)), rtol=4 * ULP)


def test_limits_of_silu(variant):
    gate = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e30, -88.9, -110.0, -150.0], np.float32)
    out = np.empty_like(gate)
    native.silu_mul(variant, gate, np.ones_like(gate), out)
    with np.errstate(all="ignore"):
        expected = gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-37)


def turned(heads: np.ndarray, cosines: np.ndarray, sines: np.ndarray, interleaved: bool) -> np.ndarray:
    n, result = len(cosines), heads.astype(np.float64)
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    )
    x, y = result[:, first].copy(), result[:, second].copy()
    result[:, first], result[:, second] = x * cosines - y * sines, x * sines + y * cosines
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_size", "n"), [(64, 32), (64, 8), (80, 10), (128, 64), (16, 8), (96, 33), (2, 1), (64, 0), (7, 3)]
)
@pytest.mark.parametrize("num_heads", [1, 5])
def test_rope(variant, interleaved, head_size, n, num_heads):
    heads = row(num_heads * head_size).reshape(num_heads, head_size)
    angles = np.random.default_rng(n).uniform(-4, 4, n)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    expected = turned(heads, cosines.astype(np.float64), sines.astype(np.float64), interleaved)
    kept = heads[:, 2 * n :].copy()
    native.rope(variant, heads, cosines, sines, interleaved)
    np.testing.assert_allclose(heads, expected, rtol=0, atol=2 * ULP * max(1.0, np.abs(expected).max()))
    np.testing.assert_array_equal(heads[:, 2 * n :], kept)


def test_all_variants_agree_on_a_row(variant):
    """The vectors have as many lanes in all of them, and so the same order of sums."""
    x, weight = row(1000), row(1000, 1)
    results = []
    for name in (variant, VARIANTS[0]):
        norm, gated = np.empty_like(x), np.empty_like(x)
        native.rms_norm(name, x, weight, 1e-5, norm)
        native.silu_mul(name, x, weight, gated)
        results.append((norm.tobytes(), gated.tobytes()))
    assert results[0] == results[1]
