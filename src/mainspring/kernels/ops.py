"""The contract between a model and the machine that computes it.

Theory of operation.
- A model is a *walk*: a function that issues operations on an `Ops` and sees nothing else. Operations name
  weights and buffers by handles, and write into buffers. Constants (widths, epsilons, head shapes) are the
  model's.
- A *backend* holds weights and buffers, and makes passes.
- Every size that depends on the batch comes from the one `Batch` given to `run`, never from the walk: a walk
  cannot branch on a batch, for it is not shown one. So a backend may execute the operations as they come
  (`RefOps`), or record them once and replay the list for every batch. `Recorder` is that list, and the proof.
- Ragged attention is one operation: requests of any mix of lengths, one-row decodes and chunks of prompts
  alike.
- Collectives stand where ranks need them and are the identity for one rank.

Buffers are float32 [rows, width]; in `run` a batch of T tokens gives every buffer T rows, in `run_rows` the
given rows do. The checks in this file are what every backend owes to the caller: shapes and types, never
data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import KVCacheConfig

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Walk = Callable[["Ops"], None]
# x * sigmoid(x); x * (the normal distribution up to x), exact or by its usual form with tanh
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: R requests, T tokens.

    Request r owns rows [query_start_loc[r], query_start_loc[r + 1]). A row at position p reads the KV of
    positions <= p through its request's block table. What a table holds behind `seq_lens` has no effect.
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    query_start_loc: Ints  # [R + 1]
    seq_lens: Ints  # [R] tokens of each request after this step
    block_tables: tuple[Ints, ...]  # per KV group [R, max_blocks]
    # per KV group [T]: block id * block size + offset; -1: not kept
    slot_mapping: tuple[npt.NDArray[np.int64], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)


class AttentionShape(NamedTuple):
    """The constants of one attention.

    A row of its `qkv` buffer is query heads, then key heads, then value heads.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # of the dot products
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    causal: bool = True  # False: a token sees all of its request
    soft_cap: float = 0.0  # scores become soft_cap * tanh(scores / soft_cap), unless 0

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Of keys and values together."""
        return 2 * self.num_kv_heads * self.head_size


class ExpertShape(NamedTuple):
    """The constants of one layer of experts, of which each row goes through a few.

    A row's scores are of `scoring`; the `top_k` largest win (by score plus the correction, where there is
    one; the lowest number among equals), and their scores, as shares of their sum if `normalised`, times
    `scale`, are their weights.
    """

    num_experts: int  # that are scored
    top_k: int
    intermediate_size: int  # of each, here
    activation: Activation
    scoring: Literal["softmax", "sigmoid"]
    normalised: bool
    scale: float = 1.0
    first: int = 0  # the experts that are here: of several ranks each may have some
    num_here: int | None = None  # None: all

    @property
    def here(self) -> range:
        return range(self.first, self.first + (self.num_experts if self.num_here is None else self.num_here))


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A matrix that is made again whenever it is used: slow, for weights that do not fit as float32."""

    shape: tuple[int, ...]
    fill: Callable[[Floats], None]  # writes the whole matrix into a float32 array of `shape`


Weight = npt.NDArray[Any] | LazyWeight


class Backend(Protocol):
    """One backend. `name` is what logs and benchmarks print."""

    name: str
    collectives: Any | None  # a `kernels.collectives.Collectives`, where this is one of several ranks

    @property
    def kv_dtype_bytes(self) -> int:
        """Of an element of the KV cache."""

    @property
    def kv_scale_bytes(self) -> int:
        """Beside the elements, per token and KV head, for keys and for values each."""

    # Set-up, once.

    def add_buffer(self, buffer: str, width: int) -> None:
        """Declare a buffer of float32 [rows, width]."""

    def add_weight(self, weight: str, value: Weight) -> None:
        """Hand over a weight: float32; for `rope`, float64 inverse frequencies. It may be filled later."""

    def allocate_kv(self, config: KVCacheConfig) -> None:
        """Make the KV pool; memory may be touched as late as blocks are first written."""

    def release_kv(self) -> None:
        """Give the pool's memory back. Until `allocate_kv` nothing may run."""

    # A pass.

    def run(self, batch: Batch, walk: Walk) -> None:
        """Do for `batch` what `walk` says."""

    def run_rows(self, buffer: str, rows: Floats, walk: Walk) -> None:
        """Put `rows` [S, width] into `buffer`, then walk for S rows: without operations on requests."""

    def read(self, buffer: str) -> Floats:
        """The rows of the last pass: a view, valid until a pass writes the buffer again."""


class Ops(Protocol):
    """What a walk may issue."""

    # Operations on every row.

    def embedding(self, out: str, weight: str) -> None:
        """out[t] = weight[token_ids[t]]; weight [vocabulary, width of out]."""

    def add_position(self, out: str, weight: str) -> None:
        """out[t] += weight[positions[t]]; weight [positions, width of out]."""

    def rms_norm(self, out: str, x: str, weight: str, eps: float) -> None:
        """out = x / sqrt(mean(x * x) + eps) * weight, row by row; weight [width]. out may be x."""

    def layer_norm(self, out: str, x: str, weight: str, bias: str, eps: float) -> None:
        """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row. out may be x."""

    def head_norm(self, x: str, first: int, num_heads: int, weight: str, eps: float) -> None:
        """`rms_norm`, in place, of each of `num_heads` neighbouring pieces of a row, as long as the weight.

        The first begins at element `first`.
        """

    def linear(self, out: str, x: str, weight: str) -> None:
        """out = x @ weight.T; weight [width of out, width of x]."""

    def add(self, out: str, x: str) -> None:
        """out += x."""

    def add_bias(self, x: str, bias: str) -> None:
        """x += bias, row by row; bias [width]."""

    def scale(self, x: str, factor: float) -> None:
        """x *= factor."""

    def soft_cap(self, x: str, cap: float) -> None:
        """x = cap * tanh(x / cap)."""

    def activate(self, out: str, x: str, activation: Activation) -> None:
        """out = activation(x)."""

    def gate(self, out: str, x: str, activation: Activation) -> None:
        """out = activation(a) * b, where x is [a | b]."""

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
        """out = the weighted sum, in order of their numbers, of the row's experts that are here.

        scores [num_experts]: before softmax or sigmoid. Expert e, the i-th that is here, is
        down_i @ (activation(gate_i @ x) * (up_i @ x)). gate_up: gate and up of each, by rows, one expert
        after the other; down likewise; correction [num_experts].
        """

    def scale_rows(self, out: str, x: str) -> None:
        """out *= sigmoid(x), row by row; x is one wide."""

    def rope(
        self, x: str, freqs: str, num_heads: int, head_size: int, interleaved: bool, amplitude: float
    ) -> None:
        """Turn, in place, the first `num_heads` heads of every row by position * freqs, and stretch them.

        The i-th of the n frequencies turns elements (2i, 2i + 1) of a head if `interleaved`, else (i, n + i).
        Elements from 2n on stay as they are.
        """

    # Operations on requests.

    def write_kv(self, layer: int, qkv: str, shape: AttentionShape) -> None:
        """Keep every row's keys and values in the layer's cache, where `slot_mapping` says."""

    def attention(self, out: str, layer: int, qkv: str, shape: AttentionShape) -> None:
        """out[t] = softmax(scale * q[t] @ keys) @ values over what row t sees, after the layer's `write_kv`.

        Query head h reads KV head h // (num_heads // num_kv_heads).
        """

    # Collectives.

    def all_reduce(self, x: str) -> None:
        """x = the sum of all ranks' x."""

    def all_gather(self, out: str, x: str) -> None:
        """out = all ranks' x, side by side in order of rank."""

    def send(self, x: str, rank: int) -> None: ...

    def recv(self, x: str, rank: int) -> None: ...


# ---------------------------------------------------------------------------------------------------------
# what every backend checks, on every call
# ---------------------------------------------------------------------------------------------------------


def check_batch(batch: Batch, num_groups: int) -> None:
    tokens, requests = batch.num_tokens, batch.num_requests
    assert len(batch.block_tables) == len(batch.slot_mapping) == num_groups, (
        f"{len(batch.block_tables)} KV groups"
    )
    _check_array("token_ids", batch.token_ids, np.int32, (tokens,))
    _check_array("positions", batch.positions, np.int32, (tokens,))
    _check_array("query_start_loc", batch.query_start_loc, np.int32, (requests + 1,))
    _check_array("seq_lens", batch.seq_lens, np.int32, (requests,))
    for table, slots in zip(batch.block_tables, batch.slot_mapping, strict=True):
        _check_array("block_table", table, np.int32, (requests, table.shape[-1]))
        _check_array("slot_mapping", slots, np.int64, (tokens,))


def _check_array(name: str, array: npt.NDArray[Any], dtype: type, shape: tuple[int, ...]) -> None:
    assert array.dtype == dtype and array.shape == shape, (  # noqa: PT018  the words cost more than the checks
        f"{name} is {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}"
    )


def check_linear(out_width: int, x_width: int, weight: tuple[int, ...]) -> None:
    assert weight == (out_width, x_width), f"weight {weight} for {x_width} -> {out_width}"


def check_embedding(out_width: int, weight: tuple[int, ...]) -> None:
    assert weight[1:] == (out_width,), f"weight {weight} for rows of {out_width}"


def check_norm(out_width: int, x_width: int, weight: tuple[int, ...]) -> None:
    assert weight == (out_width,) == (x_width,), f"weight {weight} for {x_width} -> {out_width}"


def check_vector(x_width: int, vector: tuple[int, ...]) -> None:
    assert vector == (x_width,), f"vector {vector} for rows of {x_width}"


def check_head_norm(x_width: int, first: int, num_heads: int, weight: tuple[int, ...]) -> None:
    assert len(weight) == 1, f"weight {weight} of heads"
    assert first + num_heads * weight[0] <= x_width, (
        f"{num_heads} of {weight[0]} from {first} on in {x_width}"
    )


def check_same(out_width: int, x_width: int) -> None:
    assert out_width == x_width, f"{x_width} -> {out_width}"


def check_experts(
    out_width: int,
    x_width: int,
    scores_width: int,
    gate_up: tuple[int, ...],
    down: tuple[int, ...],
    shape: ExpertShape,
) -> None:
    here, width = len(shape.here), shape.intermediate_size
    assert scores_width == shape.num_experts >= shape.top_k, f"scores of {scores_width} for {shape}"
    assert gate_up == (2 * here * width, x_width), f"gate and up {gate_up} for {shape}"
    assert down == (here * out_width, width), f"down {down} for {shape}"


def check_gate(out_width: int, x_width: int) -> None:
    assert x_width == 2 * out_width, f"gate and up of {x_width} for {out_width}"


def check_rope(x_width: int, num_heads: int, head_size: int, freqs: tuple[int, ...]) -> None:
    assert num_heads * head_size <= x_width, f"{num_heads} heads of {head_size} in {x_width}"
    assert 2 * freqs[-1] <= head_size, f"frequencies {freqs} for heads of {head_size}"


def check_kv(qkv_width: int, shape: AttentionShape) -> None:
    assert shape.num_heads % shape.num_kv_heads == 0, (
        f"{shape.num_heads} heads on {shape.num_kv_heads} KV heads"
    )
    assert qkv_width == shape.q_width + shape.kv_width, f"qkv of {qkv_width} for {shape}"


def check_attention(out_width: int, qkv_width: int, shape: AttentionShape) -> None:
    check_kv(qkv_width, shape)
    assert out_width == shape.q_width, f"output of {out_width} for {shape}"
    assert shape.causal or shape.sliding_window is None, "a window needs causal attention"


# ---------------------------------------------------------------------------------------------------------
# recording
# ---------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One recorded operation: its name and its handles and constants, in the contract's order."""

    op: str
    operands: tuple[Any, ...]


@dataclass(slots=True)
class Recorder:
    """A backend that checks and notes what it is asked to do: the first half of a backend that replays.

    `calls` is the program of the last pass. Weights are kept as shapes.
    """

    name: str = "recorder"
    kv_dtype_bytes: int = 4
    kv_scale_bytes: int = 0
    calls: list[Call] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_groups: int = 0
    collectives: Any | None = None

    def add_buffer(self, buffer: str, width: int) -> None:
        self.widths[buffer] = width

    def add_weight(self, weight: str, value: Weight) -> None:
        self.weights[weight] = tuple(value.shape)

    def allocate_kv(self, config: KVCacheConfig) -> None:
        self.num_groups = len(config.groups)

    def release_kv(self) -> None:
        pass

    def run(self, batch: Batch, walk: Walk) -> None:
        check_batch(batch, self.num_groups)
        self.calls = []
        walk(self)

    def run_rows(self, buffer: str, rows: Floats, walk: Walk) -> None:
        assert rows.shape[1] == self.widths[buffer]
        self.calls = []
        walk(self)

    def read(self, buffer: str) -> Floats:
        """No rows: nothing was computed."""
        return np.empty((0, self.widths[buffer]), np.float32)

    def embedding(self, out: str, weight: str) -> None:
        check_embedding(self.widths[out], self.weights[weight])
        self._note("embedding", out, weight)

    def add_position(self, out: str, weight: str) -> None:
        check_embedding(self.widths[out], self.weights[weight])
        self._note("add_position", out, weight)

    def rms_norm(self, out: str, x: str, weight: str, eps: float) -> None:
        check_norm(self.widths[out], self.widths[x], self.weights[weight])
        self._note("rms_norm", out, x, weight, eps)

    def layer_norm(self, out: str, x: str, weight: str, bias: str, eps: float) -> None:
        check_norm(self.widths[out], self.widths[x], self.weights[weight])
        check_vector(self.widths[x], self.weights[bias])
        self._note("layer_norm", out, x, weight, bias, eps)

    def head_norm(self, x: str, first: int, num_heads: int, weight: str, eps: float) -> None:
        check_head_norm(self.widths[x], first, num_heads, self.weights[weight])
        self._note("head_norm", x, first, num_heads, weight, eps)

    def linear(self, out: str, x: str, weight: str) -> None:
        check_linear(self.widths[out], self.widths[x], self.weights[weight])
        self._note("linear", out, x, weight)

    def add(self, out: str, x: str) -> None:
        check_same(self.widths[out], self.widths[x])
        self._note("add", out, x)

    def add_bias(self, x: str, bias: str) -> None:
        check_vector(self.widths[x], self.weights[bias])
        self._note("add_bias", x, bias)

    def scale(self, x: str, factor: float) -> None:
        self._note("scale", x, factor)

    def soft_cap(self, x: str, cap: float) -> None:
        self._note("soft_cap", x, cap)

    def activate(self, out: str, x: str, activation: Activation) -> None:
        check_same(self.widths[out], self.widths[x])
        self._note("activate", out, x, activation)

    def gate(self, out: str, x: str, activation: Activation) -> None:
        check_gate(self.widths[out], self.widths[x])
        self._note("gate", out, x, activation)

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
        widths, weights = self.widths, self.weights
        check_experts(widths[out], widths[x], widths[scores], weights[gate_up], weights[down], shape)
        if correction is not None:
            check_vector(widths[scores], weights[correction])
        self._note("experts", out, x, scores, gate_up, down, correction, shape)

    def scale_rows(self, out: str, x: str) -> None:
        check_same(1, self.widths[x])
        self._note("scale_rows", out, x)

    def rope(
        self, x: str, freqs: str, num_heads: int, head_size: int, interleaved: bool, amplitude: float
    ) -> None:
        check_rope(self.widths[x], num_heads, head_size, self.weights[freqs])
        self._note("rope", x, freqs, num_heads, head_size, interleaved, amplitude)

    def write_kv(self, layer: int, qkv: str, shape: AttentionShape) -> None:
        check_kv(self.widths[qkv], shape)
        self._note("write_kv", layer, qkv, shape)

    def attention(self, out: str, layer: int, qkv: str, shape: AttentionShape) -> None:
        check_attention(self.widths[out], self.widths[qkv], shape)
        self._note("attention", out, layer, qkv, shape)

    def all_reduce(self, x: str) -> None:
        self._note("all_reduce", x)

    def all_gather(self, out: str, x: str) -> None:
        self._note("all_gather", out, x)

    def send(self, x: str, rank: int) -> None:
        self._note("send", x, rank)

    def recv(self, x: str, rank: int) -> None:
        self._note("recv", x, rank)

    def _note(self, op: str, *operands: Any) -> None:
        self.calls.append(Call(op, operands))
