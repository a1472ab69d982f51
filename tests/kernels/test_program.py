"""What is fused, what is encoded, and where values lie: `record` is a pure function of the calls."""

from __future__ import annotations

import pytest

from mainspring.kernels.ops import AttentionShape, Call, ExpertShape
from mainspring.kernels.program import Instruction, Reads, Recorded, Storage, Weights, largest, record

SHAPE = AttentionShape(4, 2, 16, 0.25)
PARTS = {"gate_up": [64, 64], "ragged": [64, 32], "odd": [48, 48], "thin": [32, 16]}


def weights(quantised: bool = True, mixed: frozenset[str] = frozenset()) -> Weights:
    return Weights(
        lambda handle: PARTS.get(handle, [64]),
        lambda handle: Reads(True, True) if handle in mixed else Reads(not quantised, quantised),
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
    "rope",
    "write_kv",
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


def test_a_layer_without_what_its_products_do():
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


def test_experts_read_scores_as_floats_and_rows_as_their_weights_want():
    shape = ExpertShape(6, 2, 32, "silu", "softmax", True)
    calls = [
        Call("rms_norm", ("normed", "given", "norm", 1e-5)),
        Call("linear", ("scores", "normed", "router")),
        Call("experts", ("branch", "normed", "scores", "experts", "down", None, shape)),
        Call("linear", ("shared", "normed", "shared")),
        Call("linear", ("gate", "normed", "shared_gate")),
        Call("scale_rows", ("shared", "gate")),
        Call("add", ("branch", "shared")),
        Call("linear", ("out", "branch", "a")),
    ]
    floats = ("router", "shared_gate")
    forms = Weights(lambda handle: [64], lambda handle: Reads(handle in floats, handle not in floats))
    recorded = record(calls, forms, given="given", kept="out")
    assert ops(recorded) == [call.op for call in calls], "what they say is encoded where it is made"
    assert recorded.instructions[2].operands[:3] == (
        Storage("branch", True, True),
        Storage("normed", True, True),
        Storage("scores", True, False),
    )


def test_what_experts_read_is_not_dead():
    """A product that could be added to another buffer at once, were its rows not read by experts later."""
    shape = ExpertShape(6, 2, 32, "silu", "softmax", True)
    for x, scores in (("middle", "given"), ("given", "middle")):
        calls = [
            Call("linear", ("middle", "given", "a")),
            Call("add", ("sum", "middle")),
            Call("experts", ("out", x, scores, "experts", "down", None, shape)),
        ]
        before = [Call("linear", ("sum", "given", "b"))]
        recorded = record([*before, *calls], weights(quantised=False), given="given", kept="out")
        assert ops(recorded) == ["linear", "linear", "add", "experts"]


def test_rounded_rows_are_written_where_encoded_ones_are():
    rounded = Reads(rounded=True)
    reads = {"wqkv": rounded, "gate_up": rounded, "w_down": Reads(encoded=True, rounded=True)}
    forms = Weights(
        lambda handle: PARTS.get(handle, [64]), lambda handle: reads.get(handle, Reads(floats=True))
    )
    recorded = record(MODEL, forms, given=None, kept="normed")
    assert ops(recorded) == ["embedding", *FUSED_LAYER, *FUSED_LAYER, "rms_norm"]
    layer = recorded.instructions[1:10]
    assert [i.operands[1] for i in layer if i.op in ("linear", "linear_add", "gated")] == [
        Storage("normed", False, False, True),
        Storage("attended", True, False, False),
        Storage("normed", False, False, True),
        Storage("activated", False, True, True),
    ]
    given = Storage("given", True, False, True)
    calls = [Call("linear", ("out", "given", "wqkv"))]
    assert record(calls, forms, given="given", kept="out").instructions == [
        Instruction("encode", (given,)),
        Instruction("linear", (Storage("out", True, False), given, "wqkv", ())),
    ]


def test_rows_from_outside_are_encoded_by_a_step_of_their_own_and_products_encode_whole_blocks():
    calls = [Call("linear", ("middle", "given", "a")), Call("linear", ("out", "middle", "b"))]
    given, out = Storage("given", True, True), Storage("out", True, False)
    middle = Storage("middle", False, True)
    assert record(calls, weights(), given="given", kept="out").instructions == [
        Instruction("encode", (given,)),
        Instruction("linear", (middle, given, "a", ())),
        Instruction("linear", (out, middle, "b", ())),
    ]
    calls[0] = Call("linear", ("middle", "given", "thin"))
    middle = Storage("middle", True, True)
    assert record(calls, weights(), given="given", kept="out").instructions == [
        Instruction("encode", (given,)),
        Instruction("linear", (middle, given, "thin", ())),
        Instruction("encode", (middle,)),
        Instruction("linear", (out, middle, "b", ())),
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
        Instruction("argmax", (chosen, "head", ())),
    ]


def test_a_head_s_bias_factor_and_cap_are_the_products_own_for_logits_and_for_the_largest():
    calls = [
        Call("linear", ("logits", "chosen", "head")),
        Call("add_bias", ("logits", "head.bias")),
        Call("scale", ("logits", 0.5)),
        Call("soft_cap", ("logits", 30.0)),
        Call("all_gather", ("logits", "logits")),
    ]
    then = (Call("add_bias", ("head.bias",)), Call("scale", (0.5,)), Call("soft_cap", (30.0,)))
    chosen, logits = Storage("chosen", True, True), Storage("logits", True, False)
    assert largest(calls, weights(), given="chosen").instructions[1:] == [
        Instruction("argmax", (chosen, "head", then)),
    ]
    assert record(calls, weights(), given="chosen", kept="logits").instructions[1:] == [
        Instruction("linear", (logits, chosen, "head", then)),
    ]


def test_what_is_done_to_a_branch_before_it_is_added_is_the_product_s_own():
    calls = [
        Call("embedding", ("hidden", "e")),
        Call("linear", ("branch", "hidden", "w")),
        Call("add_bias", ("branch", "w.bias")),
        Call("scale", ("branch", 0.2)),
        Call("add", ("sum", "branch")),
    ]
    recorded = record([Call("embedding", ("sum", "e")), *calls], weights(False), given=None, kept="sum")
    assert recorded.instructions[-1].op == "linear_add"
    assert recorded.instructions[-1].operands[3] == (Call("add_bias", ("w.bias",)), Call("scale", (0.2,)))


@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_with_and_without_a_gate(bias: bool):
    embedding = Call("embedding", ("x", "e"))
    linear = Call("linear", ("up", "x", "gate_up"))
    biases = [Call("add_bias", ("up", "b"))] if bias else []
    gate, activate = Call("gate", ("activated", "up", "gelu")), Call("activate", ("activated", "up", "gelu"))
    down = Call("linear", ("out", "activated", "down"))
    encoded, x = Storage("activated", False, True), Storage("x", False, True)
    gated = record([embedding, linear, *biases, gate, down], weights(), given=None, kept="out")
    assert gated.instructions[1] == Instruction(
        "gated", (encoded, x, "gate_up", "b" if bias else None, "gelu")
    )
    plain = record([embedding, linear, *biases, activate, down], weights(), given=None, kept="out")
    then = (*([Call("add_bias", ("b",))] if bias else []), Call("activate", ("gelu",)))
    assert plain.instructions[1] == Instruction("linear", (encoded, x, "gate_up", then))
    assert [len(recorded.instructions) for recorded in (gated, plain)] == [3, 3]


def test_an_activation_whose_input_is_read_again_stays_a_step():
    calls = [
        Call("embedding", ("x", "e")),
        Call("linear", ("up", "x", "w")),
        Call("activate", ("activated", "up", "gelu")),
        Call("add", ("activated", "up")),
    ]
    assert ops(record(calls, weights(False), given=None, kept="activated")) == [
        "embedding",
        "linear",
        "activate",
        "add",
    ]


def test_a_stream_that_products_read_is_encoded_anew_after_it_changed():
    """Norms "after": `hidden` is read by products, changed, and read again; whoever changes it encodes it."""
    calls = [
        Call("embedding", ("hidden", "e")),
        Call("linear", ("branch", "hidden", "w")),
        Call("rms_norm", ("branch", "branch", "norm", 1e-5)),
        Call("add", ("hidden", "branch")),
        Call("linear", ("branch", "hidden", "w")),
        Call("head_norm", ("hidden", 0, 1, "norm", 1e-5)),
        Call("linear", ("out", "hidden", "w")),
    ]
    recorded = record(calls, weights(), given=None, kept="out")
    assert ops(recorded) == [
        "embedding", "linear", "rms_norm", "add", "linear", "head_norm", "encode", "linear",
    ]  # fmt: skip
    storages = {o for i in recorded.instructions for o in i.operands if isinstance(o, Storage)}
    assert {storage for storage in storages if storage.buffer == "hidden"} == {
        Storage("hidden", True, True)
    }, "one memory, for it is changed in place"


def test_norms_of_sums():
    """hidden = norm(hidden + branch): the product adds, the norm, in place, encodes."""
    branch = [
        Call("linear", ("up", "hidden", "w")),
        Call("linear", ("branch", "up", "w")),
        Call("add", ("hidden", "branch")),
        Call("layer_norm", ("hidden", "hidden", "norm", "norm.bias", 1e-5)),
    ]
    calls = [Call("embedding", ("hidden", "e")), *branch, *branch]
    recorded = record(calls, weights(), given=None, kept="hidden")
    assert ops(recorded) == ["embedding", *["linear", "linear_add", "layer_norm"] * 2]
    assert recorded.last["hidden"] == Storage("hidden", True, False)


@pytest.mark.parametrize(
    "call", [Call("send", ("x", 1)), Call("all_gather", ("y", "x")), Call("tan", ("x",))]
)
def test_what_has_no_native_step_is_refused_by_name(call: Call):
    with pytest.raises(NotImplementedError, match=call.op):
        record([Call("embedding", ("x", "e")), call], weights(), given=None, kept="x")
