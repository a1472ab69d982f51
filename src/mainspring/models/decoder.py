"""The forward pass of a decoder, written once against the `Ops` contract.

A layer is x += attention(norm(x)), then x += mlp(norm(x)), on a residual stream `hidden`. Ranks that hold a
share of the heads and of the MLP's width add up their branches (`all_reduce`); ranks that hold a share of the
vocabulary put their logits side by side (`all_gather`). For one rank both are nothing.

`_layers` and `_head` are walks: they issue the same operations for every batch, because they see none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainspring.base.messages import KVCacheConfig, KVCacheSpec
from mainspring.kernels.ops import Backend, Batch, Floats, Ints, Ops
from mainspring.models.spec import ModelSpec
from mainspring.models.weights import rope_handle

Greedy = Callable[..., tuple[Ints, Floats]]


class Decoder:
    """A model on a backend. The weights of `weight_table(spec)` must be in `ops` before the first pass."""

    def __init__(self, spec: ModelSpec, ops: Backend) -> None:
        self.spec = spec
        self.ops = ops
        self.vocab_size = spec.vocab_size
        self.weights_form = "float32"  # or "by layer": dequantised at each use, which is slow
        self._head_weight = "embedding" if spec.tied_embeddings else "head"
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
        """The final hidden states [T, hidden], after the last norm. Writes the KV of the batch's tokens.

        A view, valid until the next `forward`.
        """
        self.ops.run(batch, self._layers)
        return self.ops.read("normed")

    def logits(self, hidden_rows: Floats) -> Floats:
        """The logits [S, vocab] of S chosen rows of what `forward` gave: a view, valid until the next call.

        For many rows call it in tiles: a row of logits is a vocabulary wide.
        """
        self.ops.run_rows("chosen", hidden_rows, self._head)
        return self.ops.read("logits")

    @property
    def greedy(self) -> Greedy | None:
        """(hidden rows [S, hidden], masks) -> ids [S], values [S]: the largest logit of each row, without
        making the logits. masks: per row the words of a bit mask of allowed tokens, or None; or empty. An id
        of -1, and -inf: none is allowed. None where the backend has no such product.
        """
        largest = getattr(self.ops, "run_largest", None)
        if largest is None:
            return None
        return lambda rows, masks=(): largest("chosen", rows, self._head, masks)

    @property
    def sampler(self) -> Any | None:
        """The backend's sampler of rows of logits; None where it has none."""
        make = getattr(self.ops, "row_sampler", None)
        return None if make is None else make(self.vocab_size)

    def _layers(self, ops: Ops) -> None:
        ops.embedding("hidden", "embedding")
        for index, layer in enumerate(self.spec.layers):
            at = f"layers.{index}."
            attn, shape = layer.attn, layer.attn.shape
            ops.rms_norm("normed", "hidden", at + "attn_norm", self.spec.norm_eps)
            ops.linear("qkv", "normed", at + "wqkv")
            ops.rope(
                "qkv",
                rope_handle(attn.rope),
                attn.num_heads + attn.num_kv_heads,
                attn.head_size,
                attn.rope.interleaved,
            )
            ops.write_kv(index, "qkv", shape)
            ops.attention("attended", index, "qkv", shape)
            ops.linear("branch", "attended", at + "wo")
            ops.all_reduce("branch")
            ops.add("hidden", "branch")

            ops.rms_norm("normed", "hidden", at + "mlp_norm", self.spec.norm_eps)
            ops.linear("gate_up", "normed", at + "w_gate_up")
            ops.silu_gate("activated", "gate_up")
            ops.linear("branch", "activated", at + "w_down")
            ops.all_reduce("branch")
            ops.add("hidden", "branch")
        ops.rms_norm("normed", "hidden", "output_norm", self.spec.norm_eps)

    def _head(self, ops: Ops) -> None:
        ops.linear("logits", "chosen", self._head_weight)
        ops.all_gather("logits", "logits")

    def _add_buffers(self) -> None:
        hidden = self.spec.hidden_size
        # All layers of a supported family have one shape, so the first one's widths are everyone's.
        layer = self.spec.layers[0]
        shape, width = layer.attn.shape, layer.mlp.intermediate_size
        for buffer in ("hidden", "normed", "branch", "chosen"):
            self.ops.add_buffer(buffer, hidden)
        self.ops.add_buffer("qkv", shape.q_width + shape.kv_width)
        self.ops.add_buffer("attended", shape.q_width)
        self.ops.add_buffer("gate_up", 2 * width)
        self.ops.add_buffer("activated", width)
        self.ops.add_buffer("logits", self.spec.vocab_size)
