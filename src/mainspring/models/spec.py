"""What a network is, as data: filled by a family's adapter, read by the decoder. Nothing here computes.

A field is admitted when a supported family uses it. A new family is an adapter; a new mechanism is a field
here, an operation or constant of the kernels, and a test on a tiny network.

Weights have *roles*; a family's names are mapped to them and occur nowhere else. A *handle* is what the
kernels know a weight by, and may stack several roles by rows: Q, K and V are one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mainspring.base.messages import KVCacheSpec
from mainspring.kernels.ops import Activation, AttentionShape, ExpertShape


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: frequency i of rotary_dim / 2 is theta ** (-2i / rotary_dim), divided by factor i."""

    rotary_dim: int  # leading elements of a head that turn
    theta: float
    interleaved: bool  # pairs are neighbours; else halves
    factors: tuple[float, ...] = ()  # [rotary_dim / 2]; empty: 1
    has_factors: bool = False  # they are a tensor of the file, in the role `rope_factors`
    amplitude: float = 1.0  # what turns is also stretched


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Root mean square, or with the mean taken off and a bias (`is_layer_norm`)."""

    eps: float
    is_layer_norm: bool = False


@dataclass(frozen=True, slots=True)
class AttnSpec:
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeSpec | None  # None: positions do not enter here
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    scale: float | None = None  # of the dot products; None: head_size ** -0.5
    soft_cap: float = 0.0  # of the scores; 0: none
    qkv_bias: bool = False
    out_bias: bool = False
    # A root-mean-square norm of queries and of keys before they turn: of each head, or of all heads' row.
    qk_norm: Literal["head", "row"] | None = None
    causal: bool = True

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def k_width(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def shape(self) -> AttentionShape:
        scale = self.head_size**-0.5 if self.scale is None else self.scale
        return AttentionShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            scale,
            self.sliding_window,
            self.causal,
            self.soft_cap,
        )

    def kv_cache_spec(self, dtype_bytes: int, scale_bytes: int) -> KVCacheSpec:
        return KVCacheSpec(
            self.num_kv_heads,
            self.head_size,
            dtype_bytes,
            sliding_window=self.sliding_window,
            causal=self.causal,
            scale_bytes=scale_bytes,
        )


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated."""

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """In the place of an MLP: each row goes through `top_k` of `num_experts` MLPs (see `ExpertShape`), and,
    beside them, through one that all share.
    """

    num_experts: int
    top_k: int
    intermediate_size: int  # of an expert
    activation: Activation = "silu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    correction: bool = False  # a vector is added to the scores, for the choice alone
    shared: MLPSpec | None = None
    shared_gate: bool = False  # the shared one's output is weighted by a sigmoid of a product of the row
    # Where ranks have experts of their own: which, and how many.
    first: int = 0
    num_here: int | None = None

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(
            self.num_experts,
            self.top_k,
            self.intermediate_size,
            self.activation,
            self.scoring,
            self.normalised,
            self.scale,
            self.first,
            self.num_here,
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """hidden += attention(hidden), then hidden += mlp(hidden), with norms where `norms` says:

    before   hidden += branch(norm(hidden))
    after    hidden += norm(branch(hidden))
    both     hidden += norm(branch(norm(hidden)))
    sum      hidden = norm(hidden + branch(hidden))
    """

    attn: AttnSpec
    mlp: MLPSpec | ExpertsSpec
    norms: Literal["before", "after", "both", "sum"] = "before"
    residual_scale: float = 1.0  # of what a branch adds

    @property
    def norm_before(self) -> bool:
        return self.norms in ("before", "both")

    @property
    def norm_after(self) -> bool:
        return self.norms in ("after", "both")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm: NormSpec  # of every norm but those of queries and keys, which share its eps
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool  # the head is the embedding
    embedding_scale: float = 1.0
    embedding_bias: bool = False  # a vector is added to every embedding
    embedding_norm: bool = False
    num_positions: int = 0  # of a table of positions that is added to the embeddings; 0: there is none
    output_norm: bool = True
    has_head: bool = True  # False: an encoder, which gives hidden states only
    # Where this is a stage of a model (`parallel.py`): the ranks that hidden states come from, and go to.
    receives_from: int | None = None  # None: they begin here, with the embeddings
    sends_to: int | None = None
    head_begin: int = 0  # the token of the first row of the head here, where ranks share it
    head_size: int | None = None  # and how many rows; None: the vocabulary
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # logits become logit_soft_cap * tanh(logits / logit_soft_cap), unless 0

    @property
    def num_logits(self) -> int:
        """That are computed here."""
        return self.vocab_size if self.head_size is None else self.head_size


class Part(NamedTuple):
    """One role's share of a handle."""

    role: str  # "layers.3.wq"
    shape: tuple[int, ...]


Handle = tuple[str, tuple[Part, ...]]


def weight_table(spec: ModelSpec) -> Iterator[Handle]:
    """Every handle the decoder uses, with the parts that are stacked, by rows, into it.

    Matrices are [outputs, inputs]; norms and biases, whose handles end in `norm` and `.bias`, are vectors.
    """
    hidden = spec.hidden_size
    if spec.receives_from is None or (spec.has_head and spec.tied_embeddings):
        yield _one("embedding", spec.vocab_size, hidden)
    if spec.embedding_bias:
        yield _one("embedding.bias", hidden)
    if spec.num_positions:
        yield _one("positions", spec.num_positions, hidden)
    if spec.embedding_norm:
        yield from _norm(spec.norm, "embedding_norm", hidden)
    for index, layer in enumerate(spec.layers):
        yield from _layer(spec, layer, f"layers.{index}.")
    if spec.output_norm:
        yield from _norm(spec.norm, "output_norm", hidden)
    if spec.has_head and not spec.tied_embeddings:
        yield _one("head", spec.num_logits, hidden)
    if spec.head_bias:
        yield _one("head.bias", spec.num_logits)
    with_factors = {rope.rotary_dim // 2 for rope in ropes(spec) if rope.has_factors}
    for length in with_factors:
        assert len(with_factors) == 1, "one tensor of factors, and ropes of several lengths"
        yield _one("rope_factors", length)


def ropes(spec: ModelSpec) -> set[RopeSpec]:
    """The different ones of all layers."""
    return {layer.attn.rope for layer in spec.layers if layer.attn.rope is not None}


def _layer(spec: ModelSpec, layer: LayerSpec, at: str) -> Iterator[Handle]:
    hidden, attn, mlp = spec.hidden_size, layer.attn, layer.mlp
    for branch in ("attn", "mlp"):
        if layer.norm_before:
            yield from _norm(spec.norm, f"{at}{branch}_norm", hidden)
        if not layer.norm_before or layer.norm_after:
            yield from _norm(spec.norm, f"{at}{branch}_post_norm", hidden)
    q_width, k_width = attn.q_width, attn.k_width
    yield from _product(at + "wqkv", attn.qkv_bias, hidden, wq=q_width, wk=k_width, wv=k_width)
    if attn.qk_norm is not None:
        by_head = attn.qk_norm == "head"
        yield _one(at + "q_norm", attn.head_size if by_head else q_width)
        yield _one(at + "k_norm", attn.head_size if by_head else k_width)
    yield from _product(at + "wo", attn.out_bias, q_width, wo=hidden)
    if isinstance(mlp, ExpertsSpec):
        yield from _experts(at, hidden, mlp)
    else:
        yield from _mlp(at, hidden, mlp)


def _mlp(at: str, hidden: int, mlp: MLPSpec) -> Iterator[Handle]:
    width = mlp.intermediate_size
    if mlp.gated:
        yield from _product(at + "w_gate_up", mlp.bias, hidden, w_gate=width, w_up=width)
    else:
        yield from _product(at + "w_up", mlp.bias, hidden, w_up=width)
    yield from _product(at + "w_down", mlp.bias, width, w_down=hidden)


def _experts(at: str, hidden: int, mlp: ExpertsSpec) -> Iterator[Handle]:
    width = mlp.intermediate_size
    yield _one(at + "router", mlp.num_experts, hidden)
    if mlp.correction:
        yield _one(at + "router_correction.bias", mlp.num_experts)
    gate_up, down = [], []
    for expert in mlp.shape.here:
        own = f"{at}experts.{expert}."
        gate_up += [Part(own + "w_gate", (width, hidden)), Part(own + "w_up", (width, hidden))]
        down.append(Part(own + "w_down", (hidden, width)))
    yield at + "experts_gate_up", tuple(gate_up)
    yield at + "experts_down", tuple(down)
    if mlp.shared is not None:
        yield from _mlp(at + "shared.", hidden, mlp.shared)
        if mlp.shared_gate:
            yield _one(at + "shared_gate", 1, hidden)


def _one(handle: str, *shape: int) -> Handle:
    return handle, (Part(handle, shape),)


def _norm(norm: NormSpec, handle: str, width: int) -> Iterator[Handle]:
    yield _one(handle, width)
    if norm.is_layer_norm:
        yield _one(handle + ".bias", width)


def _product(handle: str, bias: bool, inputs: int, **outputs: int) -> Iterator[Handle]:
    """A matrix of stacked roles, and its bias."""
    at = handle.rpartition(".")[0] + "."
    yield handle, tuple(Part(at + role, (rows, inputs)) for role, rows in outputs.items())
    if bias:
        yield handle + ".bias", tuple(Part(f"{at}{role}.bias", (rows,)) for role, rows in outputs.items())
