"""What a network is, as data: filled by a family's adapter, read by the decoder. Nothing here computes.

A field is admitted when a supported family uses it. A new family is an adapter; a new mechanism is a field
here, an operation or constant of the kernels, and a test on a tiny network.

Weights have *roles*; a family's names are mapped to them and occur nowhere else. A *handle* is what the
kernels know a weight by, and may stack several roles by rows: Q, K and V are one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mainspring.base.messages import KVCacheSpec
from mainspring.kernels.ops import AttentionShape


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: frequency i of rotary_dim / 2 is theta ** (-2i / rotary_dim), divided by factor i."""

    rotary_dim: int  # leading elements of a head that turn
    theta: float
    interleaved: bool  # pairs are neighbours; else halves
    has_factors: bool = False  # in the role `rope_factors` [rotary_dim / 2]; else they are 1


@dataclass(frozen=True, slots=True)
class AttnSpec:
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeSpec
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            self.num_heads, self.num_kv_heads, self.head_size, self.head_size**-0.5, self.sliding_window
        )

    def kv_cache_spec(self, dtype_bytes: int, scale_bytes: int) -> KVCacheSpec:
        return KVCacheSpec(
            self.num_kv_heads,
            self.head_size,
            dtype_bytes,
            sliding_window=self.sliding_window,
            scale_bytes=scale_bytes,
        )


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(silu(gate(x)) * up(x))."""

    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    attn: AttnSpec
    mlp: MLPSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool  # the head is the embedding


class Part(NamedTuple):
    """One role's share of a handle."""

    role: str  # "layers.3.wq"
    shape: tuple[int, ...]


def weight_table(spec: ModelSpec) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """Every handle the decoder uses, with the parts that are stacked, by rows, into it."""

    def one(handle: str, *shape: int) -> tuple[str, tuple[Part, ...]]:
        return handle, (Part(handle, shape),)

    hidden = spec.hidden_size
    yield one("embedding", spec.vocab_size, hidden)
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}."
        attn, width = layer.attn, layer.mlp.intermediate_size
        q_width, kv_width = attn.num_heads * attn.head_size, attn.num_kv_heads * attn.head_size
        yield one(at + "attn_norm", hidden)
        yield (
            at + "wqkv",
            (
                Part(at + "wq", (q_width, hidden)),
                Part(at + "wk", (kv_width, hidden)),
                Part(at + "wv", (kv_width, hidden)),
            ),
        )
        yield one(at + "wo", hidden, q_width)
        yield one(at + "mlp_norm", hidden)
        yield at + "w_gate_up", (Part(at + "w_gate", (width, hidden)), Part(at + "w_up", (width, hidden)))
        yield one(at + "w_down", hidden, width)
    yield one("output_norm", hidden)
    if not spec.tied_embeddings:
        yield one("head", spec.vocab_size, hidden)
    ropes = {layer.attn.rope for layer in spec.layers}
    if any(rope.has_factors for rope in ropes):
        (length,) = {rope.rotary_dim // 2 for rope in ropes}
        yield one("rope_factors", length)
