"""Every operation in numpy: specification and oracle of other backends, and what runs without them.

Theory of operation.
- Operations are executed as they come. Buffers are allocated once for `max_rows` rows (untouched pages cost
  nothing) and grow if a pass has more; a pass works on views of their first rows.
- What depends on the batch alone (rotations, attention plans) is made when first asked for and kept for the
  pass.
- `linear` has three forms that give the same sums in different order, chosen by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import KVCacheConfig
from mainspring.kernels import ops as contract
from mainspring.kernels.attention import Scratch, Tile, attend, plan_attention
from mainspring.kernels.collectives import Collectives
from mainspring.kernels.ops import (
    Activation,
    AttentionShape,
    Batch,
    ExpertShape,
    Floats,
    LazyWeight,
    Walk,
    Weight,
)

# Measured with OpenBLAS 0.3.31 on two cores, matrices of 576 x 576 to 49152 x 576. With few rows a product
# per row wins, if the matrix stays in the cache between; then weights on the left; then rows on the left.
VECTOR_ROWS = 8
CACHED_BYTES = 16 << 20
WEIGHTS_LEFT_ROWS = 48


class RefOps:
    """The numpy backend. Not for use by several threads at once."""

    def __init__(
        self,
        max_rows: int = 0,
        collectives: Collectives | None = None,
        expert_ranks: Collectives | None = None,
    ) -> None:
        """collectives: where this is one of several ranks; expert_ranks: where ranks with rows of their own
        have the experts for the rows of all."""
        self.name = "numpy"
        self.kv_dtype_bytes = 4
        self.kv_scale_bytes = 0
        self._capacity = max_rows
        self.collectives = collectives
        self._expert_ranks = expert_ranks
        self._widths: dict[str, int] = {}
        self._storage: dict[str, Floats] = {}
        self._weights: dict[str, Weight] = {}
        self._scratch = Scratch()
        self._block_size = 0
        self._group_of_layer: dict[int, int] = {}
        self._cache_of_layer: dict[int, Floats] = {}
        # of the pass:
        self._batch: Batch | None = None
        self._views: dict[str, Floats] = {}
        self._plans: dict[tuple[int, AttentionShape], list[Tile]] = {}
        self._turns: dict[tuple[str, float], npt.NDArray[np.complex64]] = {}

    # Set-up.

    def add_buffer(self, buffer: str, width: int) -> None:
        self._widths[buffer] = width
        self._storage[buffer] = np.empty(self._capacity * width, np.float32)

    def add_weight(self, weight: str, value: Weight) -> None:
        self._weights[weight] = value

    def allocate_kv(self, config: KVCacheConfig) -> None:
        # zeros, not empty: both are touched lazily, and only zeros are sure to hold no NaN.
        per_block = config.block_size * max(group.spec.bytes_per_token for group in config.groups) // 4
        tensors = [np.zeros((config.num_blocks, per_block), np.float32) for _ in range(config.num_tensors)]
        self._block_size = config.block_size
        for index, group in enumerate(config.groups):
            assert group.spec.bytes_per_token * config.block_size == per_block * 4, (
                "groups share a pool: equal bytes"
            )
            for j, layer in enumerate(group.layers):
                self._group_of_layer[layer] = index
                self._cache_of_layer[layer] = tensors[j]
        self._num_groups = len(config.groups)

    def release_kv(self) -> None:
        self._cache_of_layer.clear()

    # A pass.

    def run(self, batch: Batch, walk: Walk) -> None:
        contract.check_batch(batch, self._num_groups)
        self._begin(batch.num_tokens, batch)
        self._execute(walk)

    def run_rows(self, buffer: str, rows: Floats, walk: Walk) -> None:
        self._begin(len(rows), None)
        self._views[buffer][...] = rows
        self._execute(walk)

    def read(self, buffer: str) -> Floats:
        return self._views[buffer]

    def _begin(self, num_rows: int, batch: Batch | None) -> None:
        self._batch = batch
        self._plans, self._turns = {}, {}
        if num_rows > self._capacity:
            self._capacity = num_rows
            for buffer, width in self._widths.items():
                self._storage[buffer] = np.empty(num_rows * width, np.float32)
        self._views = {
            buffer: self._storage[buffer][: num_rows * width].reshape(num_rows, width)
            for buffer, width in self._widths.items()
        }

    def _execute(self, walk: Walk) -> None:
        # Overflow is part of silu and of masked scores; a NaN is found, and named, where rows are sampled.
        with np.errstate(all="ignore"):
            walk(self)

    # Operations on every row.

    def embedding(self, out: str, weight: str) -> None:
        rows, table = self._views[out], self._matrix(weight)
        contract.check_embedding(rows.shape[1], table.shape)
        rows[...] = table[self._step.token_ids]

    def add_position(self, out: str, weight: str) -> None:
        rows, table = self._views[out], self._matrix(weight)
        contract.check_embedding(rows.shape[1], table.shape)
        rows += table[self._step.positions]

    def rms_norm(self, out: str, x: str, weight: str, eps: float) -> None:
        rows, source, scale = self._views[out], self._views[x], self._matrix(weight)
        contract.check_norm(rows.shape[1], source.shape[1], scale.shape)
        _rms_norm(rows, source, scale, eps)

    def layer_norm(self, out: str, x: str, weight: str, bias: str, eps: float) -> None:
        rows, source, scale = self._views[out], self._views[x], self._matrix(weight)
        contract.check_norm(rows.shape[1], source.shape[1], scale.shape)
        np.subtract(source, source.mean(axis=1, keepdims=True), out=rows)
        _rms_norm(rows, rows, scale, eps)
        rows += self._matrix(bias)

    def head_norm(self, x: str, first: int, num_heads: int, weight: str, eps: float) -> None:
        source, scale = self._views[x], self._matrix(weight)
        contract.check_head_norm(source.shape[1], first, num_heads, scale.shape)
        for start in range(first, first + num_heads * len(scale), len(scale)):
            head = source[:, start : start + len(scale)]
            _rms_norm(head, head, scale, eps)

    def linear(self, out: str, x: str, weight: str) -> None:
        rows, source, matrix = self._views[out], self._views[x], self._matrix(weight)
        contract.check_linear(rows.shape[1], source.shape[1], matrix.shape)
        num_rows = len(source)
        if num_rows == 1 or (num_rows <= VECTOR_ROWS and matrix.nbytes <= CACHED_BYTES):
            for row, result in zip(source, rows, strict=True):
                np.dot(matrix, row, out=result)
        elif num_rows <= WEIGHTS_LEFT_ROWS:
            rows[...] = np.dot(matrix, source.T, out=self._scratch.take("linear", (len(matrix), num_rows))).T
        else:
            np.dot(source, matrix.T, out=rows)

    def add(self, out: str, x: str) -> None:
        rows, source = self._views[out], self._views[x]
        contract.check_same(rows.shape[1], source.shape[1])
        rows += source

    def add_bias(self, x: str, bias: str) -> None:
        rows, vector = self._views[x], self._matrix(bias)
        contract.check_vector(rows.shape[1], vector.shape)
        rows += vector

    def scale(self, x: str, factor: float) -> None:
        self._views[x][...] *= np.float32(factor)

    def soft_cap(self, x: str, cap: float) -> None:
        rows = self._views[x]
        rows /= np.float32(cap)
        np.tanh(rows, out=rows)
        rows *= np.float32(cap)

    def activate(self, out: str, x: str, activation: Activation) -> None:
        rows, source = self._views[out], self._views[x]
        contract.check_same(rows.shape[1], source.shape[1])
        ACTIVATIONS[activation](source, rows)

    def gate(self, out: str, x: str, activation: Activation) -> None:
        rows, source = self._views[out], self._views[x]
        width = rows.shape[1]
        contract.check_gate(width, source.shape[1])
        ACTIVATIONS[activation](source[:, :width], rows)
        rows *= source[:, width:]

    def experts(
        self,
        out: str,
        x: str,
        scores: str,
        gate_up: str,
        down: str,
        correction: str | None,
        shape: ExpertShape,
    ) -> None:
        rows, source, scored = self._views[out], self._views[x], self._views[scores]
        gates, downs = self._matrix(gate_up), self._matrix(down, "second weight")
        contract.check_experts(
            rows.shape[1], source.shape[1], scored.shape[1], gates.shape, downs.shape, shape
        )
        chosen, weights = route(scored, None if correction is None else self._matrix(correction), shape)
        if self._expert_ranks is None:
            rows[...] = _experts_here(source, chosen, weights, gates, downs, shape)
            return
        ranks = self._expert_ranks
        everything = np.concatenate([source, chosen.astype(np.float32), weights], axis=1)
        parts = []
        for theirs in ranks.all_gather_rows(everything):
            row, choice, weight = np.split(theirs, [source.shape[1], source.shape[1] + shape.top_k], axis=1)
            parts.append(_experts_here(row, choice.astype(np.intp), weight, gates, downs, shape))
        rows[...] = ranks.reduce_rows(parts)

    def scale_rows(self, out: str, x: str) -> None:
        rows, factors = self._views[out], self._views[x]
        contract.check_same(1, factors.shape[1])
        rows *= 1.0 / (1.0 + np.exp(-factors))

    def rope(
        self, x: str, freqs: str, num_heads: int, head_size: int, interleaved: bool, amplitude: float
    ) -> None:
        source, frequencies = self._views[x], self._matrix(freqs)
        contract.check_rope(source.shape[1], num_heads, head_size, frequencies.shape)
        turns = self._turns.get((freqs, amplitude))
        if turns is None:
            angles = self._step.positions[:, None, None] * frequencies
            turns = self._turns[freqs, amplitude] = (amplitude * np.exp(1j * angles)).astype(np.complex64)
        n = len(frequencies)
        heads = source[:, : num_heads * head_size].reshape(len(source), num_heads, head_size)
        if interleaved:
            # A pair of neighbours is a complex number, and turning it is one multiplication.
            pairs = heads[:, :, : 2 * n].view(np.complex64)
            pairs *= turns
        else:
            first, second = heads[:, :, :n], heads[:, :, n : 2 * n]
            turned = (first + 1j * second) * turns
            first[...], second[...] = turned.real, turned.imag

    # Operations on requests.

    def write_kv(self, layer: int, qkv: str, shape: AttentionShape) -> None:
        source = self._views[qkv]
        contract.check_kv(source.shape[1], shape)
        slots = self._step.slot_mapping[self._group_of_layer[layer]]
        cache = self._cache_of_layer[layer].reshape(-1, shape.kv_width)
        if len(slots) and slots.min() < 0:
            kept = slots >= 0
            cache[slots[kept]] = source[kept, shape.q_width :]
        else:
            cache[slots] = source[:, shape.q_width :]

    def attention(self, out: str, layer: int, qkv: str, shape: AttentionShape) -> None:
        rows, source = self._views[out], self._views[qkv]
        contract.check_attention(rows.shape[1], source.shape[1], shape)
        key = (self._group_of_layer[layer], shape)
        tiles = self._plans.get(key)
        if tiles is None:
            tiles = self._plans[key] = plan_attention(self._step, *key, self._block_size)
        query, cache = source[:, : shape.q_width], self._cache_of_layer[layer]
        for tile in tiles:
            attend(tile, query, cache, rows, shape, self._scratch)

    # Collectives.

    def all_reduce(self, x: str) -> None:
        if self.collectives is not None:
            self.collectives.all_reduce(self._views[x])

    def all_gather(self, out: str, x: str) -> None:
        rows, source = self._views[out], self._views[x]
        if out == x:
            return
        parts = [source] if self.collectives is None else self.collectives.all_gather(source)
        contract.check_same(rows.shape[1], sum(part.shape[1] for part in parts))
        np.concatenate(parts, axis=1, out=rows)

    def send(self, x: str, rank: int) -> None:
        self._ranks.send(self._views[x], rank)

    def recv(self, x: str, rank: int) -> None:
        self._ranks.recv(self._views[x], rank)

    @property
    def _ranks(self) -> Collectives:
        assert self.collectives is not None, "one rank has nobody to send to"
        return self.collectives

    # Inside.

    @property
    def _step(self) -> Batch:
        assert self._batch is not None, (
            "this operation needs a batch: it cannot stand in a pass over given rows"
        )
        return self._batch

    def _matrix(self, weight: str, place: str = "weight") -> npt.NDArray[np.float32]:
        """place: where one that is made at each use is, until another is made there."""
        value = self._weights[weight]
        if isinstance(value, LazyWeight):
            array = self._scratch.take(place, value.shape)
            value.fill(array)
            return array
        return value


def _experts_here(
    x: Floats, chosen: npt.NDArray[np.intp], weights: Floats, gates: Floats, downs: Floats, shape: ExpertShape
) -> Floats:
    """chosen, weights: see `route`."""
    width, out_width = shape.intermediate_size, len(downs) // max(1, len(shape.here))
    out = np.zeros((len(x), out_width), np.float32)
    for place, expert in enumerate(shape.here):
        row, at = np.nonzero(chosen == expert)
        if not len(row):
            continue
        both = np.dot(x[row], gates[2 * place * width : 2 * (place + 1) * width].T)
        inner = np.empty((len(row), width), np.float32)
        ACTIVATIONS[shape.activation](both[:, :width], inner)
        inner *= both[:, width:]
        part = np.dot(inner, downs[place * out_width : (place + 1) * out_width].T)
        out[row] += weights[row, at][:, None] * part
    return out


def route(
    scores: Floats, correction: Floats | None, shape: ExpertShape
) -> tuple[npt.NDArray[np.intp], Floats]:
    """Of every row its experts [rows, top_k], and their weights [rows, top_k]. See `ExpertShape`."""
    if shape.scoring == "softmax":
        likely = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        likely /= likely.sum(axis=1, keepdims=True)
    else:
        likely = 1.0 / (1.0 + np.exp(-scores))
    ranked = likely if correction is None else likely + correction
    chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : shape.top_k]
    weights = np.take_along_axis(likely, chosen, axis=1)
    if shape.normalised:
        weights /= weights.sum(axis=1, keepdims=True) + np.float32(1e-20)  # sigmoids may all be 0
    return chosen, (weights * np.float32(shape.scale)).astype(np.float32)


def _rms_norm(out: Floats, x: Floats, scale: Floats, eps: float) -> None:
    """out may be x."""
    squares = np.einsum("tw,tw->t", x, x)
    np.multiply(x, (1.0 / np.sqrt(squares / x.shape[1] + np.float32(eps)))[:, None], out=out)
    out *= scale


def _silu(x: Floats, out: Floats) -> None:
    np.exp(np.negative(x, out=out), out=out)
    out += 1.0
    np.divide(x, out, out=out)


def _gelu(x: Floats, out: Floats) -> None:
    np.copyto(out, x * (0.5 + 0.5 * _error_function(x.astype(np.float64) * 0.5**0.5)))


def _gelu_tanh(x: Floats, out: Floats) -> None:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    inner = x * (np.float32(0.7978845608028654) * (1.0 + np.float32(0.044715) * x * x))
    np.multiply(x, 0.5 * (1.0 + np.tanh(inner)), out=out)


def _error_function(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """erf, which numpy lacks: Abramowitz and Stegun 7.1.5 (series) below 2, 7.1.14 (continued fraction) from
    there on; within 1e-14.
    """
    size = np.minimum(np.abs(x), 6.0)  # 1 - erf(6) is below 1e-16
    square = size * size
    near = term = np.minimum(size, 2.0)
    for n in range(1, 40):
        term = term * -np.minimum(square, 4.0) / n
        near = near + term / (2 * n + 1)
    far = np.maximum(size, 2.0)
    fraction = far
    for n in range(60, 0, -1):
        fraction = far + 0.5 * n / fraction
    tail = 1.0 - np.exp(-far * far) / (fraction * np.pi**0.5)
    result: npt.NDArray[np.float64] = np.copysign(np.where(size < 2.0, near * (2.0 / np.pi**0.5), tail), x)
    return result


ACTIVATIONS: dict[Activation, Callable[[Floats, Floats], None]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
