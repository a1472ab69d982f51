"""Models with experts: what configs say of them, how files hold them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family_fixtures
import gguf
import gguf.quants
import numpy as np
import pytest
from family_files import write_folder, write_gguf
from family_fixtures import Floats, log_softmax
from test_damaged_models import Altered, last_row_of, loaded, refusal
from test_families import PROMPTS_ONLY, opened, row
from test_published_configs import read

from mainspring.base.errors import CheckpointError
from mainspring.kernels.native import library, why_not
from mainspring.models.packing import place_weights
from mainspring.models.spec import ExpertsSpec, MLPSpec, ModelSpec

Change = Callable[[gguf.GGUFWriter], None]


def experts(spec: ModelSpec, layer: int = -1) -> ExpertsSpec:
    mlp = spec.layers[layer].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp


def test_published() -> None:
    mixtral = experts(read("Mixtral-8x7B-v0.1"))
    assert (mixtral.num_experts, mixtral.top_k, mixtral.normalised, mixtral.shared) == (8, 2, True, None)
    qwen2 = experts(read("Qwen1.5-MoE-A2.7B"))
    assert (qwen2.num_experts, qwen2.top_k, qwen2.normalised, qwen2.shared_gate) == (60, 4, False, True)
    assert qwen2.shared == MLPSpec(5632)
    qwen3 = experts(read("Qwen3-30B-A3B"))
    assert (qwen3.num_experts, qwen3.top_k, qwen3.normalised, qwen3.intermediate_size) == (128, 8, True, 768)
    glm = read("GLM-4.5-Air")
    assert [isinstance(layer.mlp, MLPSpec) for layer in glm.layers] == [True] + [False] * 45
    assert (experts(glm).scoring, experts(glm).correction, experts(glm).shared) == (
        "sigmoid",
        True,
        MLPSpec(1408),
    )
    rope = glm.layers[0].attn.rope
    assert rope is not None
    assert rope.rotary_dim == 64


def test_which_layers_have_experts() -> None:
    spec = read("Qwen3-30B-A3B", decoder_sparse_step=3, mlp_only_layers=[2, 5])
    found = [layer for layer, one in enumerate(spec.layers) if isinstance(one.mlp, ExpertsSpec)]
    assert found == list(range(8, 48, 3))
    assert spec.layers[0].mlp == MLPSpec(6144)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}),
        ("Mixtral-8x7B-v0.1", {"hidden_act": "gelu"}),
        ("Mixtral-8x7B-v0.1", {"num_local_experts": 0}),
        ("Qwen3-30B-A3B", {"mlp_only_layers": "all"}),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 49}),
        ("Qwen3-30B-A3B", {"use_sliding_window": True, "sliding_window": 9}),
        ("Qwen3-30B-A3B", {"norm_topk_prob": 1}),
        ("Qwen1.5-MoE-A2.7B", {"shared_expert_intermediate_size": None}),
        ("GLM-4.5-Air", {"n_group": 8}),
        ("GLM-4.5-Air", {"topk_group": 2}),
        ("GLM-4.5-Air", {"first_k_dense_replace": 46}),
        ("GLM-4.5-Air", {"partial_rotary_factor": None}),
        ("GLM-4.5-Air", {"routed_scaling_factor": 0.0}),
        ("GLM-4.5-Air", {"scoring_func": "softmax"}),
    ],
)
def test_what_would_be_another_network_is_refused(name: str, change: dict[str, Any]) -> None:
    """Case B155: a router that would choose otherwise does not load."""
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read(name, **change)


# ---- files -------------------------------------------------------------------------------------------------


def test_experts_in_matrices_of_their_own_in_the_oldest_gguf_files(tmp_path: Path) -> None:
    fixture = family_fixtures.load("mixtral")
    newer = write_gguf(fixture, tmp_path / "newer.gguf")
    older = write_gguf(fixture, tmp_path / "older.gguf", change=_in_matrices)
    np.testing.assert_array_equal(last_row_of(older, fixture), last_row_of(newer, fixture))


def _in_matrices(writer: gguf.GGUFWriter) -> None:
    (tensors,) = writer.tensors
    for name in [name for name in tensors if "_exps" in name]:
        values = tensors.pop(name).tensor
        for expert, matrix in enumerate(values):
            writer.add_tensor(name.replace("_exps", f".{expert}"), np.ascontiguousarray(matrix))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_stacks(kind: str, tmp_path: Path) -> None:
    """Each expert's rows stay in the file's type: numpy computes with what they stand for, and native kernels
    pack them as they are, both nearly alike."""

    def edit(writer: gguf.GGUFWriter) -> None:
        (tensors,) = writer.tensors
        type_ = gguf.GGMLQuantizationType[kind]
        for name in [name for name in tensors if "_exps" in name]:
            values = tensors.pop(name).tensor
            writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)

    fixture = family_fixtures.load("qwen2-moe")
    path = altered_gguf("qwen2-moe", tmp_path, edit)
    expected = log_softmax(last_row_of(path, fixture))
    off = np.abs(expected - fixture.log_probs[0][-1]).max()
    assert 1e-4 < off < (0.1 if kind == "Q8_0" else 1.5), "quantised, and not spoilt"
    if library() is None:
        pytest.skip(why_not())
    native = {"kernels": "native", "block_size": 16, "activations": "int16", "kv_cache_dtype": "float32"}
    with opened(path, **native) as llm:
        (output,) = llm.generate(fixture.token_ids[:1], PROMPTS_ONLY, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    np.testing.assert_allclose(row(output.outputs[0].logprobs[0]), expected, rtol=0, atol=2e-3)


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_experts_in_bfloat16(activations: str, tmp_path: Path) -> None:
    """Rounded activations are gathered as well, and only exact ones are read by what chooses experts."""

    def edit(writer: gguf.GGUFWriter) -> None:
        (tensors,) = writer.tensors
        type_ = gguf.GGMLQuantizationType.BF16
        for name in [name for name in tensors if "_exps" in name or "_gate_inp" in name]:
            values = np.atleast_2d(tensors.pop(name).tensor)
            writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)

    fixture = family_fixtures.load("qwen2-moe")
    path = altered_gguf("qwen2-moe", tmp_path, edit)
    native = {"kernels": "native", "block_size": 16, "activations": activations, "kv_cache_dtype": "float32"}
    with opened(path, **native) as llm:
        (output,) = llm.generate(fixture.token_ids[:1], PROMPTS_ONLY, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    near = 0.03 if activations == "int8" else 2e-3
    expected = log_softmax(last_row_of(path, fixture))
    np.testing.assert_allclose(row(output.outputs[0].logprobs[0]), expected, rtol=0, atol=near)
    placed, _ = place_weights(SimpleNamespace(spec=loaded(path).spec, names={}), lambda _: "BF16", None)  # type: ignore[arg-type]
    widened = {place.part.role for place in placed if place.kind == "F32"}
    assert widened == {f"layers.{i}.{name}" for i in range(3) for name in ("router", "shared_gate")}


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_what_predicts_further_tokens_is_not_read(form: str, tmp_path: Path) -> None:
    """In a folder it is a layer more than there are; a GGUF file, whose fixture has it, counts it."""
    fixture = family_fixtures.load("glm4-moe")
    more = {
        "model.layers.3.eh_proj.weight": np.full((64, 128), np.nan, np.float32),
        "model.layers.3.self_attn.o_proj.weight": np.ones((2, 2), np.float32),
    }
    altered = Altered(**vars(fixture), edit=lambda tensors: tensors.update(more))
    path = (
        write_folder(altered, tmp_path) if form == "folder" else write_gguf(fixture, tmp_path / "model.gguf")
    )
    assert len(loaded(path).spec.layers) == 3
    np.testing.assert_allclose(last_row_of(path, fixture), fixture.logits[0][-1], atol=1e-4)


def altered_gguf(name: str, path: Path, edit: Change) -> Path:
    return write_gguf(family_fixtures.load(name), path / "model.gguf", change=edit)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe"])
def test_stacks_of_another_shape_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Case B152: also those that have as many numbers."""
    for kind in ("gate", "up", "down"):
        tensor = f"blk.1.ffn_{kind}_exps.weight"

        def with_shape(reshape: Callable[[Floats], Floats], tensor: str = tensor) -> str:
            def edit(writer: gguf.GGUFWriter) -> None:
                values = writer.tensors[0].pop(tensor).tensor
                writer.add_tensor(tensor, np.ascontiguousarray(reshape(values)))

            return refusal(altered_gguf(name, tmp_path, edit))

        for reshape in (
            lambda values: values[:-1],
            lambda values: values.reshape(len(values), -1, values.shape[1]),
            lambda values: values.reshape(-1, values.shape[2]),
        ):
            said = with_shape(reshape)
            assert f"tensor '{tensor}' has shape" in said
            assert "expected [" in said
        said = refusal(
            altered_gguf(name, tmp_path, lambda writer, tensor=tensor: writer.tensors[0].pop(tensor))
        )
        assert f"tensor '{tensor}' is missing" in said


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe"])
def test_one_expert_that_is_missing_mis_shaped_or_no_number(name: str, tmp_path: Path) -> None:
    """Case B152: no expert is made up."""
    fixture = family_fixtures.load(name)
    tensor = next(tensor for tensor in fixture.shapes if ".1." in tensor and ".experts.2." in tensor)

    def refused(edit: Callable[[dict[str, Floats]], object]) -> str:
        return refusal(write_folder(Altered(**vars(fixture), edit=edit), tmp_path))

    assert f"tensor '{tensor}' is missing" in refused(lambda tensors: tensors.pop(tensor))
    assert f"tensor '{tensor}' has shape" in refused(
        lambda tensors: tensors.update({tensor: tensors[tensor][:, :-2]})
    )
    assert f"tensor '{tensor}' holds NaN" in refused(
        lambda tensors: tensors.update({tensor: np.full_like(tensors[tensor], np.nan)})
    )
    another = tensor.replace(".experts.2.", ".experts.99.")
    assert f"tensor '{another}' is in the file" in refused(
        lambda tensors: tensors.update({another: tensors[tensor]})
    )


def test_a_number_that_is_none_in_a_stack_is_named_with_its_expert(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0]["blk.1.ffn_up_exps.weight"].tensor[3, 0, 0] = np.inf

    said = refusal(altered_gguf("mixtral", tmp_path, edit))
    assert "tensor 'blk.1.ffn_up_exps.3.weight' holds NaN or infinity" in said


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mixtral", "llama.expert_gating_func", 2),
        ("qwen3-moe", "qwen3moe.expert_gating_func", 2),
        ("glm4-moe", "glm4moe.expert_gating_func", 1),
        ("glm4-moe", "glm4moe.expert_group_count", 4),
        ("mixtral", "llama.expert_used_count", 6),
        ("mixtral", "llama.expert_count", 4),
    ],
)
def test_keys_of_gguf_files_that_would_be_another_network(
    name: str, key: str, value: int, tmp_path: Path
) -> None:
    """Case B155."""

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_uint32(key, value)

    said = refusal(altered_gguf(name, tmp_path, edit))
    assert key in said or "expected [4," in said


def test_a_llama_without_experts_may_say_so(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)

    assert isinstance(loaded(altered_gguf("llama", tmp_path, edit)).spec.layers[0].mlp, MLPSpec)
