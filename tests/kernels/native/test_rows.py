"""The kernels of single rows against numpy in float64.

Tolerances are counted in units of the last place of the true result (ULP = 2^-23 of it), from the number
of roundings on the way: exp is within 1, so silu (exp, sum, quotient, product) within 4; a turned pair
within 2 of the pair's length; a norm within 6, for its sum of squares has positive terms only. Where the
argument of an exp is rounded first, its result is as much further off as the argument is large.
"""

import math

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
@pytest.mark.parametrize("middle", [0.0, 30.0])
def test_layer_norm(variant, middle, count):
    """The mean is taken off first, so a row far from 0 loses no more than the rounding of its elements."""
    x, weight, bias = row(count) + np.float32(middle), row(count, 1), row(count, 2)
    out, memory = guarded(count)
    native.layer_norm(variant, x, weight, bias, 1e-5, out)
    if count:
        wide = x.astype(np.float64)
        centred = wide - wide.mean()
        expected = centred / np.sqrt(np.mean(centred**2) + np.float32(1e-5)) * weight + bias
        # Of a row of one, or of equal ones, nothing is left but the bias.
        scale = np.abs(wide).max() / np.sqrt(np.mean(centred**2) + 1e-5)
        np.testing.assert_allclose(out, expected, rtol=8 * ULP, atol=4 * ULP * scale * np.abs(weight).max())
    check_guard(memory)


@pytest.mark.parametrize("count", COUNTS)
def test_norms_in_place(variant, count):
    x, weight, bias = row(count), row(count, 1), row(count, 2)
    out, same = np.empty_like(x), x.copy()
    native.rms_norm(variant, x, weight, 1e-5, out)
    native.rms_norm(variant, same, weight, 1e-5, same)
    assert out.tobytes() == same.tobytes()
    same = x.copy()
    native.layer_norm(variant, x, weight, bias, 1e-5, out)
    native.layer_norm(variant, same, weight, bias, 1e-5, same)
    assert out.tobytes() == same.tobytes()


@pytest.mark.parametrize("count", COUNTS)
def test_multiply(variant, count):
    out, memory = guarded(count)
    out[:] = x = row(count)
    native.multiply(variant, out, 0.3)
    np.testing.assert_array_equal(out, x * np.float32(0.3))
    check_guard(memory)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_soft_cap(variant, cap, count):
    """Also near 0, where tanh is as small as its argument."""
    out, memory = guarded(count)
    out[:] = x = (np.float32(40.0) * row(count)) * np.abs(row(count, 1)) ** 5
    native.soft_cap(variant, out, cap)
    np.testing.assert_allclose(out, cap * np.tanh(x.astype(np.float64) / cap), rtol=6 * ULP)
    check_guard(memory)


def test_soft_cap_over_all_arguments(variant):
    x = np.concatenate([np.linspace(-12, 12, 100_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    out = x.copy()
    native.soft_cap(variant, out, 1.0)
    np.testing.assert_allclose(out, np.tanh(x.astype(np.float64)), rtol=4 * ULP)
    limits = np.array([np.inf, -np.inf, np.nan, 0.0, 1e30, -1e30, 1e-30], np.float32)
    native.soft_cap(variant, limits, 1.0)
    np.testing.assert_array_equal(limits, np.array([1, -1, np.nan, 0, 1, -1, 1e-30], np.float32))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * np.array([math.erfc(-v * 0.5**0.5) for v in x.tolist()])


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x / 2 * (1 + tanh(y)), in a form that loses nothing where tanh is near -1."""
    return x / (1 + np.exp(-2 * (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


# The true function, and how many ULP it may be off at x.
ACTIVATIONS = {
    "silu": (silu, lambda x: 3.0 + 0 * x),
    "gelu": (gelu, lambda x: 4.0 + x * x / 4),
    "gelu_tanh": (gelu_tanh, lambda x: 4.0 + 2 * np.abs(x) + 0.1 * np.abs(x) ** 3),
}
LEAST = 1e-35  # what is nearer to 0 may be 0: an exp on the way ends there


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("count", COUNTS)
def test_activate_and_gate(variant, activation, count):
    x, up = 4 * row(count), row(count, 1)
    function, allowed = ACTIVATIONS[activation]
    expected, near = function(x.astype(np.float64)), allowed(x.astype(np.float64)) * ULP
    out, memory = guarded(count)
    native.activate(variant, native.Activation[activation], x, out)
    assert (np.abs(out - expected) <= near * np.abs(expected) + LEAST).all()
    same = x.copy()
    native.activate(variant, native.Activation[activation], same, same)
    assert same.tobytes() == out.tobytes()
    native.gate(variant, native.Activation[activation], x, up, out)
    assert (np.abs(out - expected * up) <= (near + ULP) * np.abs(expected * up) + LEAST).all()
    check_guard(memory)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_all_arguments(variant, activation):
    """Down to where the result leaves the floats: exp is seen over the numbers that it can give."""
    lowest = {"silu": -86.0, "gelu": -13.0, "gelu_tanh": -8.0}[activation]
    x = np.linspace(lowest, 20.0, 100_001, dtype=np.float32)
    function, allowed = ACTIVATIONS[activation]
    out, wide = np.empty_like(x), x.astype(np.float64)
    native.activate(variant, native.Activation[activation], x, out)
    expected = function(wide)
    assert (np.abs(out - expected) <= allowed(wide) * ULP * np.abs(expected)).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_limits_of_activations(variant, activation):
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e30, -88.9, -110.0, -150.0], np.float32)
    out = np.empty_like(x)
    native.activate(variant, native.Activation[activation], x, out)
    with np.errstate(all="ignore"):
        expected = {
            "silu": lambda: x / (1 + np.exp(-x)),
            "gelu": lambda: np.array([np.inf, np.nan, np.nan, 0, 0, 1e30, 0, 0, 0, 0], np.float32),
            "gelu_tanh": lambda: np.array([np.inf, np.nan, np.nan, 0, 0, 1e30, 0, 0, 0, 0], np.float32),
        }[activation]()
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
        out, capped = np.empty((5, 1000), np.float32), x.copy()
        native.rms_norm(name, x, weight, 1e-5, out[0])
        native.layer_norm(name, x, weight, x, 1e-5, out[1])
        for activation, gated in zip(ACTIVATIONS, out[2:], strict=True):
            native.gate(name, native.Activation[activation], x, weight, gated)
        native.soft_cap(name, capped, 2.0)
        results.append((out.tobytes(), capped.tobytes()))
    assert results[0] == results[1]
