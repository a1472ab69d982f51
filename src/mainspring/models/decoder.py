"""The forward pass of a decoder, written once against the `Ops` contract.

A layer is an attention and then an MLP, each a branch beside a residual stream `hidden` (see `LayerSpec`).
Ranks that hold a share of the heads and of the MLP's width add up their branches (`all_reduce`); ranks that
hold a share of the vocabulary put their logits side by side (`all_gather`). For one rank both are nothing.

`_layers` and `_head` are walks: they issue the same operations for every batch, because they see none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import KVCacheConfig, KVCacheSpec
from mainspring.kernels.ops import Backend, Batch, Floats, Ints, Ops
from mainspring.models.spec import AttnSpec, ExpertsSpec, LayerSpec, MLPSpec, ModelSpec
from mainspring.models.weights import rope_handle

Doubles = npt.NDArray[np.float64]
Greedy = Callable[..., tuple[Ints, Floats]]
Pick = Callable[[Floats, int], tuple[Ints, Doubles]]
Choose = Callable[[Floats, Pick], tuple[Ints, Doubles]]


class Decoder:
    """A model on a backend. The weights of `weight_table(spec)` must be in `ops` before the first pass."""

    def __init__(self, spec: ModelSpec, ops: Backend) -> None:
        self.spec = spec
        self.ops = ops
        self.vocab_size = spec.vocab_size
        self.weights_form = "float32"  # or "by layer": dequantised at each use, which is slow
        # A pooled vector -> the scores of labels; set by who loads a model that has such a head.
        self.classifier: Callable[[Floats], Floats] | None = None
        self._head_weight = "embedding" if spec.tied_embeddings else "head"
        self._all_logits = "logits" if spec.head_size is None else "all_logits"
        self._add_buffers()

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One per layer, in order."""
        ops = self.ops
        return [
            layer.attn.kv_cache_spec(ops.kv_dtype_bytes, ops.kv_scale_bytes) for layer in self.spec.layers
        ]

    def initialize_kv(self, config: KVCacheConfig) -> None:
        """Make the KV pool. Its memory is touched when blocks are first written."""
        self.ops.allocate_kv(config)

    def release_kv(self) -> None:
        """Give the KV pool's memory back, until `initialize_kv`."""
        self.ops.release_kv()

    def forward(self, batch: Batch) -> Floats:
        """The final hidden states [T, hidden], after the last norm; of a stage that is not the last, those
        that it sent on. Writes the KV of the batch's tokens.

        A view, valid until the next `forward`.
        """
        self.ops.run(batch, self._layers)
        normed = self.spec.output_norm and self.spec.sends_to is None
        return self.ops.read("normed" if normed else "hidden")

    def logits(self, hidden_rows: Floats) -> Floats:
        """The logits [S, vocab] of S chosen rows of what `forward` gave: a view, valid until the next call.

        For many rows call it in tiles: a row of logits is a vocabulary wide.
        """
        self.ops.run_rows("chosen", hidden_rows, self._head)
        return self.ops.read(self._all_logits)

    @property
    def greedy(self) -> Greedy | None:
        """(hidden rows [S, hidden], masks) -> ids [S], values [S]: the largest logit of each row, without
        making the logits. masks: per row the words of a bit mask of allowed tokens, or None; or empty. An id
        of -1, and -inf: none is allowed. None where the backend has no such product.

        Where ranks share the head each finds its own, and these candidates are compared: no logits are sent.
        """
        if self.spec.head_size is not None:
            return self._largest_of_ranks
        largest = getattr(self.ops, "run_largest", None)
        if largest is None:
            return None
        return lambda rows, masks=(): largest("chosen", rows, self._head, masks)

    def _largest_of_ranks(self, rows: Floats, masks: Sequence[Ints | None] = ()) -> tuple[Ints, Floats]:
        begin = self.spec.head_begin
        own_masks = [mask if mask is None else mask[begin // 32 :] for mask in masks]
        largest = getattr(self.ops, "run_largest", None)
        if largest is not None:
            ids, values = largest("chosen", rows, self._own_head, own_masks)
        else:
            self.ops.run_rows("chosen", rows, self._own_head)
            ids, values = largest_allowed(self.ops.read("logits"), own_masks)
        best, best_values = self._best_of_ranks(np.where(ids < 0, ids, ids + begin), values)
        return best, best_values.astype(np.float32)

    @property
    def choose(self) -> Choose | None:
        """(hidden rows [S, hidden], pick) -> ids [S], scores [S]: the best of what `pick` finds among the
        logits of each rank. None where one rank has all logits.

        pick: (logits [S, own], the token of the first of them) -> ids [S], scores [S] float64.
        """
        return None if self.spec.head_size is None else self._choose

    def _choose(self, rows: Floats, pick: Pick) -> tuple[Ints, Doubles]:
        self.ops.run_rows("chosen", rows, self._own_head)
        return self._best_of_ranks(*pick(self.ops.read("logits"), self.spec.head_begin))

    def _best_of_ranks(self, ids: Ints, scores: npt.NDArray[Any]) -> tuple[Ints, Doubles]:
        """Candidates of this rank -> the best of all, the same everywhere."""
        assert self.ops.collectives is not None
        # Ids are below 2 ** 24, so float32 holds them; a float64 goes as two of its halves.
        halves = np.ascontiguousarray(scores, np.float64).view(np.float32).reshape(len(ids), 2)
        own = np.column_stack([halves, ids.astype(np.float32)])
        found = np.stack(self.ops.collectives.all_gather(own))  # [ranks, rows, 3]
        values = np.ascontiguousarray(found[:, :, :2]).view(np.float64)[:, :, 0]
        # The first rank's of equals, which is the lowest id; a NaN is larger than anything.
        best = values.argmax(axis=0), np.arange(len(ids))
        return found[:, :, 2][best].astype(np.int32), values[best]

    @property
    def sampler(self) -> Any | None:
        """The backend's sampler of rows of logits; None where it has none."""
        make = getattr(self.ops, "row_sampler", None)
        return None if make is None else make(self.vocab_size)

    def _layers(self, ops: Ops) -> None:
        spec = self.spec
        if spec.receives_from is None:
            self._embed(ops)
        else:
            ops.recv("hidden", spec.receives_from)
        for index, layer in enumerate(spec.layers):
            at = f"layers.{index}."
            self._attention(ops, index, layer.attn, self._before(ops, layer, at + "attn_norm"))
            self._after(ops, layer, at + "attn_post_norm")
            self._mlp(ops, at, layer.mlp, self._before(ops, layer, at + "mlp_norm"))
            self._after(ops, layer, at + "mlp_post_norm")
        if spec.sends_to is not None:
            ops.send("hidden", spec.sends_to)
        elif spec.output_norm:
            self._norm(ops, "normed", "hidden", "output_norm")

    def _embed(self, ops: Ops) -> None:
        spec = self.spec
        ops.embedding("hidden", "embedding")
        if spec.embedding_scale != 1.0:
            ops.scale("hidden", spec.embedding_scale)
        if spec.num_positions:
            ops.add_position("hidden", "positions")
        if spec.embedding_bias:
            ops.add_bias("hidden", "embedding.bias")
        if spec.embedding_norm:
            self._norm(ops, "hidden", "hidden", "embedding_norm")

    def _before(self, ops: Ops, layer: LayerSpec, norm: str) -> str:
        """The buffer that a branch reads."""
        if not layer.norm_before:
            return "hidden"
        self._norm(ops, "normed", "hidden", norm)
        return "normed"

    def _after(self, ops: Ops, layer: LayerSpec, norm: str) -> None:
        """What a branch gave joins the residual stream."""
        if layer.norm_after:
            self._norm(ops, "branch", "branch", norm)
        if layer.residual_scale != 1.0:
            ops.scale("branch", layer.residual_scale)
        ops.add("hidden", "branch")
        if layer.norms == "sum":
            self._norm(ops, "hidden", "hidden", norm)

    def _attention(self, ops: Ops, index: int, attn: AttnSpec, x: str) -> None:
        at, shape = f"layers.{index}.", attn.shape
        self._product(ops, "qkv", x, at + "wqkv", attn.qkv_bias)
        if attn.qk_norm is not None:
            num_q, num_k = (attn.num_heads, attn.num_kv_heads) if attn.qk_norm == "head" else (1, 1)
            ops.head_norm("qkv", 0, num_q, at + "q_norm", self.spec.norm.eps)
            ops.head_norm("qkv", attn.q_width, num_k, at + "k_norm", self.spec.norm.eps)
        if (rope := attn.rope) is not None:
            heads = attn.num_heads + attn.num_kv_heads
            ops.rope("qkv", rope_handle(rope), heads, attn.head_size, rope.interleaved, rope.amplitude)
        ops.write_kv(index, "qkv", shape)
        ops.attention("attended", index, "qkv", shape)
        self._reduced_product(ops, "branch", "attended", at + "wo", attn.out_bias)

    def _mlp(self, ops: Ops, at: str, mlp: MLPSpec | ExpertsSpec, x: str) -> None:
        """Reads x, writes `branch`."""
        if isinstance(mlp, ExpertsSpec):
            self._experts(ops, at, mlp, x)
            return
        activated = self._inner_product(ops, at, mlp, x)
        self._reduced_product(ops, "branch", activated, at + "w_down", mlp.bias)

    def _experts(self, ops: Ops, at: str, mlp: ExpertsSpec, x: str) -> None:
        ops.linear("scores", x, at + "router")
        correction = at + "router_correction.bias" if mlp.correction else None
        ops.experts("branch", x, "scores", at + "experts_gate_up", at + "experts_down", correction, mlp.shape)
        if mlp.shared is not None:
            activated = self._inner_product(ops, at + "shared.", mlp.shared, x)
            ops.linear("shared", activated, at + "shared.w_down")
            if mlp.shared_gate:
                ops.linear("shared_gate", x, at + "shared_gate")
                ops.scale_rows("shared", "shared_gate")
            ops.add("branch", "shared")
        ops.all_reduce("branch")

    def _inner_product(self, ops: Ops, at: str, mlp: MLPSpec, x: str) -> str:
        """The buffer that holds what `w_down` reads."""
        gate_up, activated = _inner_buffers(mlp)
        if mlp.gated:
            self._product(ops, gate_up, x, at + "w_gate_up", mlp.bias)
            ops.gate(activated, gate_up, mlp.activation)
        else:
            self._product(ops, gate_up, x, at + "w_up", mlp.bias)
            ops.activate(activated, gate_up, mlp.activation)
        return activated

    def _product(self, ops: Ops, out: str, x: str, weight: str, bias: bool) -> None:
        ops.linear(out, x, weight)
        if bias:
            ops.add_bias(out, weight + ".bias")

    def _reduced_product(self, ops: Ops, out: str, x: str, weight: str, bias: bool) -> None:
        """A product whose inputs are shared out over ranks: the bias is added once."""
        ops.linear(out, x, weight)
        ops.all_reduce(out)
        if bias:
            ops.add_bias(out, weight + ".bias")

    def _norm(self, ops: Ops, out: str, x: str, weight: str) -> None:
        norm = self.spec.norm
        if norm.is_layer_norm:
            ops.layer_norm(out, x, weight, weight + ".bias", norm.eps)
        else:
            ops.rms_norm(out, x, weight, norm.eps)

    def _head(self, ops: Ops) -> None:
        self._own_head(ops)
        ops.all_gather(self._all_logits, "logits")

    def _own_head(self, ops: Ops) -> None:
        spec = self.spec
        ops.linear("logits", "chosen", self._head_weight)
        if spec.head_bias:
            ops.add_bias("logits", "head.bias")
        if spec.logit_scale != 1.0:
            ops.scale("logits", spec.logit_scale)
        if spec.logit_soft_cap:
            ops.soft_cap("logits", spec.logit_soft_cap)

    def _add_buffers(self) -> None:
        hidden = self.spec.hidden_size
        # The attention of all layers of a supported family has one shape, so the first one's widths are
        # everyone's; but some layers may have experts.
        shape = self.spec.layers[0].attn.shape
        kinds = {layer.mlp for layer in self.spec.layers}
        mlps = [mlp for mlp in kinds if isinstance(mlp, MLPSpec)]
        experts = [mlp for mlp in kinds if isinstance(mlp, ExpertsSpec)]
        mlps += [mlp.shared for mlp in experts if mlp.shared is not None]
        for buffer in ("hidden", "normed", "branch", "chosen"):
            self.ops.add_buffer(buffer, hidden)
        self.ops.add_buffer("qkv", shape.q_width + shape.kv_width)
        self.ops.add_buffer("attended", shape.q_width)
        for mlp in mlps:
            gate_up, activated = _inner_buffers(mlp)
            self.ops.add_buffer(gate_up, (1 + mlp.gated) * mlp.intermediate_size)
            self.ops.add_buffer(activated, mlp.intermediate_size)
        if experts:
            self.ops.add_buffer("scores", experts[0].num_experts)
            self.ops.add_buffer("shared", hidden)
            self.ops.add_buffer("shared_gate", 1)
        self.ops.add_buffer("logits", self.spec.num_logits)
        if self._all_logits != "logits":
            self.ops.add_buffer(self._all_logits, self.spec.vocab_size)


def _inner_buffers(mlp: MLPSpec) -> tuple[str, str]:
    """Layers may have MLPs of several widths."""
    return f"gate_up {mlp.intermediate_size}", f"activated {mlp.intermediate_size}"


def largest_allowed(logits: Floats, masks: Sequence[Ints | None]) -> tuple[Ints, Floats]:
    """Per row the id of the largest logit that its mask allows, the first among equals, and that logit."""
    if any(mask is not None for mask in masks):
        logits = logits.copy()
        for row, mask in zip(logits, masks, strict=True):
            if mask is not None:
                bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")
                allowed = np.zeros(len(row), bool)
                allowed[: len(bits)] = bits[: len(row)]
                row[~allowed] = -np.inf
    ids = logits.argmax(axis=1).astype(np.int32)
    values = logits[np.arange(len(logits)), ids]
    ids[np.isneginf(values)] = -1
    return ids, values
