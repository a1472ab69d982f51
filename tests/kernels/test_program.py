"""What is fused, what is encoded, and where values lie: `record` is a pure function of the calls."""

from __future__ import annotations

import pytest

from mainspring.kernels.ops import AttentionShape, Call
from mainspring.kernels.program import Instruction, Recorded, Storage, Weights, largest, record

SHAPE = AttentionShape(4, 2, 16, 0.25)
PARTS = {"gate_up": [64, 64], "ragged": [64, 32], "odd": [48, 48]}


def weights(quantised: bool = True, mixed: frozenset[str] = frozenset()) -> Weights:
    return Weights(
        lambda handle: PARTS.get(handle, [64]),
        lambda handle: (True, True) if handle in mixed else (not quantised, quantised),
    )


def ops(recorded: Recorded) -> list[str]:
    return [instruction.op for instruction in recorded.instructions]


LAYER = [
    Call("rms_norm", ("normed", "hidden", "norm", 1e-5)),
    Call("linear", ("qkv", "normed", "wqkv")),
    Call("rope", ("qkv", "rope", 6, 16, False)),
    Call("write_kv", (0, "qkv", SHAPE)),
    Call("attention", ("attended", 0, "qkv", SHAPE)),
    Call("linear", ("branch", "attended", "wo")),
    Call("all_reduce", ("branch",)),
    Call("add", ("hidden", "branch")),
    Call("rms_norm", ("normed", "hidden", "norm", 1e-5)),
    Call("linear", ("gate_up", "normed", "gate_up")),
    Call("gate", ("activated", "gate_up", "silu")),
    Call("linear", ("branch", "activated", "w_down")),
    Call("all_reduce", ("branch",)),
    Call("add", ("hidden", "branch")),
]
MODEL = [
    Call("embedding", ("hidden", "embedding")),
    *LAYER,
    *LAYER,
    Call("rms_norm", ("normed", "hidden", "norm", 1e-5)),
]
FUSED_LAYER = [
    "rms_norm",
    "linear",
    "rope_write",
    "attention",
    "linear_add",
    "rms_norm",
    "gated",
    "linear_add",
]


@pytest.mark.parametrize(("num_heads", "itself"), [(4, True), (6, False), (2, False)])
def test_attention_encodes_only_whole_blocks_of_a_kv_head(num_heads: int, itself: bool):
    """Two KV heads share out a row: in parts of 32, 48 or 16 columns, and blocks of 32 share a scale."""
    shape = AttentionShape(num_heads, 2, 16, 0.25)
    calls = [Call("linear", ("qkv", "given", "wqkv")), Call("attention", ("attended", 0, "qkv", shape))]
    calls.append(Call("linear", ("branch", "attended", "wo")))
    recorded = record(calls, weights(), given="given", kept="branch")
    assert ops(recorded)[2:] == ["attention", *([] if itself else ["encode"]), "linear"]
    assert recorded.last["attended"] == Storage("attended", not itself, True)


def test_a_layer_becomes_eight_steps():
    assert ops(record(MODEL, weights(), given=None, kept="normed")) == [
        "embedding",
        *FUSED_LAYER,
        *FUSED_LAYER,
        "rms_norm",
    ]


def test_quantised_products_read_encoded_rows_that_their_producers_wrote():
    recorded = record(MODEL, weights(), given=None, kept="normed")
    inputs = [i.operands[1] for i in recorded.instructions if i.op in ("linear", "linear_add", "gated")]
    assert inputs[:4] == [
        Storage("normed", False, True),
        Storage("attended", False, True),
        Storage("normed", False, True),
        Storage("activated", False, True),
    ]
    assert recorded.last["normed"] == Storage("normed", True, False), "the last norm is read from outside"
    assert recorded.last["hidden"] == Storage("hidden", True, False)


def test_floats_stay_floats():
    recorded = record(MODEL, weights(quantised=False), given=None, kept="normed")
    storages = {o for i in recorded.instructions for o in i.operands if isinstance(o, Storage)}
    assert not any(storage.encoded for storage in storages)


def test_a_weight_of_mixed_types_reads_both():
    recorded = record(MODEL, weights(mixed=frozenset({"wqkv"})), given=None, kept="normed")
    (first, *_) = (i for i in recorded.instructions if i.op == "linear")
    assert first.operands[1] == Storage("normed", True, True)


def test_rows_from_outside_and_products_are_encoded_by_a_step_of_their_own():
    calls = [Call("linear", ("middle", "given", "a")), Call("linear", ("out", "middle", "b"))]
    recorded = record(calls, weights(), given="given", kept="out")
    given, middle, out = (
        Storage("given", True, True),
        Storage("middle", True, True),
        Storage("out", True, False),
    )
    assert recorded.instructions == [
        Instruction("encode", (given,)),
        Instruction("linear", (middle, given, "a")),
        Instruction("encode", (middle,)),
        Instruction("linear", (out, middle, "b")),
    ]


def test_a_product_that_is_read_again_is_not_fused_away():
    branch = Call("linear", ("branch", "x", "w"))
    add = Call("add", ("hidden", "branch"))
    read = Call("rms_norm", ("normed", "branch", "norm", 1e-5))
    again = Call("linear", ("branch", "x", "w"))
    given = [Call("embedding", ("x", "e")), Call("embedding", ("hidden", "e"))]
    assert "linear_add" not in ops(
        record([*given, branch, add, read], weights(False), given=None, kept="normed")
    )
    fused = record([*given, branch, add, again, read], weights(False), given=None, kept="normed")
    assert ops(fused)[2] == "linear_add", "it is written again before it is read"


@pytest.mark.parametrize("handle", ["ragged", "odd"])
def test_gates_that_are_no_two_equal_stacks_of_blocks_are_not_fused(handle: str):
    calls = [
        Call("embedding", ("x", "e")),
        Call("linear", ("gate_up", "x", handle)),
        Call("gate", ("activated", "gate_up", "silu")),
    ]
    assert ops(record(calls, weights(False), given=None, kept="activated")) == [
        "embedding",
        "linear",
        "gate",
    ]


def test_the_largest_output_replaces_the_last_product():
    calls = [Call("linear", ("logits", "chosen", "head")), Call("all_gather", ("logits", "logits"))]
    chosen = Storage("chosen", True, True)
    assert largest(calls, weights(), given="chosen").instructions == [
        Instruction("encode", (chosen,)),
        Instruction("argmax", (chosen, "head")),
    ]


@pytest.mark.parametrize(
    "call", [Call("send", ("x", 1)), Call("all_gather", ("y", "x")), Call("tan", ("x",))]
)
def test_what_has_no_native_step_is_refused_by_name(call: Call):
    with pytest.raises(NotImplementedError, match=call.op):
        record([Call("embedding", ("x", "e")), call], weights(), given=None, kept="x")
