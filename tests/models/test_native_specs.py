"""Whole tiny networks on the native kernels, one for every field of a `ModelSpec`, against numpy.

Weights are random; numpy is given what the packed matrices hold. What is compared are hidden states and
logits of requests of several lengths, cut into steps in two ways: the native ones are the same bits for both,
where a token sees the same in both, and by any number of threads, and near numpy's. `NEAR` bounds the root
mean square of the difference as a part of the values': with matrices of 32 bits hardly more than the order of
additions differs, and with 8-bit ones the rounding of activations to 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_native_models import CUTS, Pages, with_kv

from mainspring.kernels.native import NativeOps, PackedWeight, library, why_not
from mainspring.kernels.ops import Floats
from mainspring.kernels.ref import RefOps
from mainspring.models.decoder import Decoder
from mainspring.models.spec import (
    AttnSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    ropes,
    weight_table,
)
from mainspring.models.weights import rope_handle

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

VARIANTS = library().runnable_variants()  # type: ignore[union-attr]
NEAR = {"F32": 3e-6, "q8": 2e-4}

ROPE = RopeSpec(rotary_dim=16, theta=1000.0, interleaved=False)
ATTN = AttnSpec(num_heads=4, num_kv_heads=2, head_size=16, rope=ROPE)
MLP = MLPSpec(96)
LAYER = LayerSpec(ATTN, MLP)
RMS, LAYER_NORM = NormSpec(1e-5), NormSpec(1e-5, is_layer_norm=True)


def spec(*layers: LayerSpec, **changes: Any) -> ModelSpec:
    """Two layers, if none or one is given."""
    settings: dict[str, Any] = {
        "architecture": "tiny",
        "vocab_size": 130,
        "hidden_size": 64,
        "max_position_embeddings": 512,
        "norm": RMS,
        "layers": (layers or (LAYER,)) * (1 if len(layers) > 1 else 2),
        "tied_embeddings": False,
    }
    return ModelSpec(**settings | changes)


def attn(**changes: Any) -> LayerSpec:
    return replace(LAYER, attn=replace(ATTN, **changes))


def mlp(**changes: Any) -> LayerSpec:
    return replace(LAYER, mlp=replace(MLP, **changes))


def heads(size: int, rotary_dim: int | None = None, **changes: Any) -> AttnSpec:
    rope = replace(ROPE, rotary_dim=rotary_dim or size)
    return replace(ATTN, head_size=size, **{"rope": rope} | changes)


ENCODER = replace(
    LAYER,
    attn=heads(32, rope=None, qkv_bias=True, out_bias=True, causal=False),
    mlp=MLPSpec(96, "gelu", gated=False, bias=True),
    norms="sum",
)
SPECS = {
    "norms before": spec(),
    "norms after": spec(replace(LAYER, norms="after")),
    "norms before and after": spec(replace(LAYER, norms="both")),
    "norms of sums": spec(replace(LAYER, norms="sum")),
    "layer norms before": spec(norm=LAYER_NORM),
    "layer norms after": spec(replace(LAYER, norms="after"), norm=LAYER_NORM),
    "layer norms before and after": spec(replace(LAYER, norms="both"), norm=LAYER_NORM),
    "layer norms of sums": spec(replace(LAYER, norms="sum"), norm=LAYER_NORM),
    "biases of queries, keys and values": spec(attn(qkv_bias=True)),
    "bias of the output": spec(attn(out_bias=True)),
    "norms of heads": spec(attn(qk_norm="head")),
    "norms of rows of heads": spec(attn(qk_norm="row")),
    "no positions in attention": spec(attn(rope=None)),
    "part of a head turns": spec(attn(rope=replace(ROPE, rotary_dim=6))),
    "neighbours turn": spec(attn(rope=replace(ROPE, interleaved=True))),
    "what turns is stretched": spec(attn(rope=replace(ROPE, amplitude=1.19))),
    "two rotations": spec(LAYER, attn(rope=replace(ROPE, theta=50.0, amplitude=0.9))),
    "scores are capped": spec(attn(soft_cap=0.5)),
    "another scale of scores": spec(attn(scale=0.1)),
    "a window": spec(LAYER, attn(sliding_window=9)),
    "not causal": spec(attn(causal=False)),
    "branches are scaled": spec(replace(LAYER, residual_scale=0.22)),
    "norms after, and branches are scaled": spec(replace(LAYER, residual_scale=0.22, norms="after")),
    "a scale of embeddings": spec(embedding_scale=8.0),
    "a bias of embeddings": spec(embedding_bias=True),
    "a norm of embeddings": spec(embedding_norm=True),
    "a table of positions": spec(num_positions=300),
    "all of embeddings": spec(
        embedding_scale=3.0, embedding_bias=True, embedding_norm=True, num_positions=300, norm=LAYER_NORM
    ),
    **{
        f"{activation}, {'gated' if gated else 'no gate'}, {'bias' if bias else 'no bias'}": spec(
            mlp(activation=activation, gated=gated, bias=bias)
        )
        for activation in ("silu", "gelu", "gelu_tanh")
        for gated in (True, False)
        for bias in (True, False)
    },
    "gates that are no whole blocks": spec(mlp(intermediate_size=40, bias=True)),
    "no gate, and no whole blocks": spec(mlp(intermediate_size=40, gated=False, bias=True)),
    "experts": spec(replace(LAYER, mlp=ExpertsSpec(6, 2, 64))),
    "experts by sigmoids, a correction, and one for all": spec(
        replace(
            LAYER,
            mlp=ExpertsSpec(7, 3, 32, scoring="sigmoid", scale=1.7, correction=True, shared=MLPSpec(64)),
        )
    ),
    "all of the experts, unnormalised, and one for all with a gate": spec(
        replace(
            LAYER,
            mlp=ExpertsSpec(5, 5, 32, "gelu_tanh", normalised=False, shared=MLPSpec(96), shared_gate=True),
        )
    ),
    "experts that are no whole blocks": spec(replace(LAYER, mlp=ExpertsSpec(40, 1, 40))),
    "a layer without experts, and one with": spec(LAYER, replace(LAYER, mlp=ExpertsSpec(9, 4, 96))),
    "some experts are elsewhere": spec(replace(LAYER, mlp=ExpertsSpec(6, 3, 64, first=2, num_here=2))),
    "the head is the embedding": spec(tied_embeddings=True),
    "a bias of the head": spec(head_bias=True),
    "a scale of logits": spec(logit_scale=0.125),
    "a negative scale of logits": spec(logit_scale=-1.0),
    "capped logits": spec(logit_soft_cap=2.0),
    "all of the head": spec(head_bias=True, logit_scale=0.5, logit_soft_cap=1.0, vocab_size=67),
    "no last norm": spec(output_norm=False),
    "no head": spec(has_head=False),
    "no last norm and no head": spec(output_norm=False, has_head=False),
    # as families have them together
    "an encoder": spec(
        ENCODER,
        norm=LAYER_NORM,
        num_positions=300,
        embedding_bias=True,
        embedding_norm=True,
        output_norm=False,
        has_head=False,
    ),
    "GPT-2": spec(
        replace(
            LAYER,
            attn=heads(64, num_kv_heads=4, rope=None, qkv_bias=True, out_bias=True),
            mlp=MLPSpec(96, "gelu_tanh", gated=False, bias=True),
        ),
        norm=LAYER_NORM,
        num_positions=300,
        tied_embeddings=True,
    ),
    "Phi-3": spec(replace(LAYER, attn=heads(96, num_kv_heads=4))),
    "Phi-4": spec(replace(LAYER, attn=heads(128, rope=replace(ROPE, rotary_dim=96, amplitude=1.19)))),
    "Gemma": spec(
        *(
            replace(
                LAYER,
                attn=heads(256, qk_norm="head", soft_cap=5.0, sliding_window=window),
                mlp=MLPSpec(96, "gelu_tanh"),
                norms="both",
            )
            for window in (None, 20)
        ),
        embedding_scale=8.0,
        logit_soft_cap=3.0,
        tied_embeddings=True,
    ),
    "Granite": spec(
        replace(LAYER, residual_scale=0.22, attn=replace(ATTN, scale=0.1)),
        embedding_scale=12.0,
        logit_scale=0.125,
    ),
    "OLMo 2": spec(replace(LAYER, norms="after", attn=replace(ATTN, qk_norm="row"))),
    "no width is whole blocks": spec(
        replace(LAYER, mlp=MLPSpec(33, "gelu", gated=False, bias=True), norms="sum"),
        hidden_size=41,
        vocab_size=7,
        head_bias=True,
    ),
}


def random_weights(spec: ModelSpec) -> dict[str, list[Floats]]:
    """The parts of every handle."""
    rng = np.random.default_rng(4)
    weights: dict[str, list[Floats]] = {}
    for handle, parts in weight_table(spec):
        values = [rng.standard_normal(part.shape).astype(np.float32) for part in parts]
        if len(parts[0].shape) == 2:
            values = [value * np.float32(value.shape[1] ** -0.5) for value in values]
        elif not handle.endswith(".bias"):
            values = [np.float32(1.0) + np.float32(0.1) * value for value in values]
        weights[handle] = values
    return weights


def packed(values: Floats, kind: str) -> Any:
    native = library()
    assert native is not None
    if values.shape[1] % 32:
        kind = "F32"
    matrix = native.Matrix(kind, *values.shape)
    memory = np.zeros(matrix.num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    matrix.bind(memory[start : start + matrix.num_bytes])
    if kind == "F32":
        matrix.pack(values.view(np.uint8).reshape(-1), 0, len(values))
    else:
        matrix.pack_floats(values, 0, len(values))
    return matrix


def decoders(spec: ModelSpec, kind: str, **settings: Any) -> tuple[Decoder, Decoder]:
    """One on the native kernels, and one of the same weights in numpy."""
    ops = NativeOps(64, activations="int16", kv_type="float32", **settings)
    native, twin = Decoder(spec, ops), Decoder(spec, RefOps())
    for handle, parts in random_weights(spec).items():
        if parts[0].ndim == 1:
            vector = np.concatenate(parts)
            native.ops.add_weight(handle, vector)
            twin.ops.add_weight(handle, vector)
        else:
            is_exact = handle.endswith(("router", "shared_gate"))  # as `models/packing.py` has it
            matrices = [packed(part, "F32" if is_exact else kind) for part in parts]
            ops.add_weight(handle, PackedWeight(tuple(matrices)))
            twin.ops.add_weight(handle, np.concatenate([matrix.unpack() for matrix in matrices]))
    for rope in ropes(spec):
        frequencies = rope.theta ** -(np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
        native.ops.add_weight(rope_handle(rope), frequencies)
        twin.ops.add_weight(rope_handle(rope), frequencies)
    return with_kv(native), with_kv(twin)


def rows_of(decoder: Decoder, steps: list[list[int]]) -> Floats:
    """For every token of every request: the hidden state, and behind it the logits."""
    pages = Pages(decoder)
    rows: list[list[Floats]] = [[] for _ in steps[0]]
    for counts in steps:
        batch = pages.batch(counts)
        found = [decoder.forward(batch).copy()]
        if decoder.spec.has_head:
            found.append(decoder.logits(found[0]).copy())
        parts = np.split(np.concatenate(found, axis=1), batch.query_start_loc[1:-1])
        for r, part in zip([r for r, count in enumerate(counts) if count], parts, strict=True):
            rows[r].append(part)
    return np.concatenate([part for parts in rows for part in parts])


@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SPECS)
def test_native_is_near_numpy_and_cuts_change_nothing(name: str, variant: str, kind: str) -> None:
    spec = SPECS[name]
    native, twin = decoders(spec, kind, variant=variant)
    found = [rows_of(native, steps) for steps in CUTS]
    causal = all(layer.attn.causal for layer in spec.layers)
    if causal:
        assert found[0].tobytes() == found[1].tobytes()
    for rows, steps in list(zip(found, CUTS, strict=True))[causal:]:
        expected = rows_of(twin, steps)
        off = np.sqrt(np.mean((rows - expected) ** 2) / np.mean(expected**2))
        print(f"off by {off:.2e}")
        assert off < NEAR[kind]
    alone, _ = decoders(spec, kind, variant=variant, num_threads=1)
    assert rows_of(alone, CUTS[0]).tobytes() == found[0].tobytes()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.has_head])
def test_the_largest_logit_is_that_of_the_logits(name: str, variant: str) -> None:
    """Whatever stands between a product and its logits, and for masks too."""
    decoder, _ = decoders(SPECS[name], "q8", variant=variant)
    hidden = decoder.forward(Pages(decoder).batch([5, 1, 60, 0])).copy()
    logits = decoder.logits(hidden).copy()
    assert decoder.greedy is not None
    ids, values = decoder.greedy(hidden)
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))
    np.testing.assert_array_equal(values, logits.max(axis=1))
    vocab = decoder.vocab_size
    words = np.random.default_rng(1).integers(0, 2**32, (len(hidden), -(-vocab // 32)), np.uint32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    ids, values = decoder.greedy(hidden, list(words.view(np.int32)))
    masked = np.where(bits, logits, -np.inf)
    np.testing.assert_array_equal(ids, np.where(bits.any(axis=1), masked.argmax(axis=1), -1))
    np.testing.assert_array_equal(values, masked.max(axis=1))
