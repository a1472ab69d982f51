"""Layers of experts in files: how they are named, and where in which tensor each expert is.

Hugging Face folders have three matrices per expert. GGUF files have one tensor of three dimensions for all
gates of a layer, one for all ups, one for all downs; the oldest ones have matrices per expert, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted
from mainspring.models.families.file import ModelFile
from mainspring.models.families.model import Model
from mainspring.models.spec import AttnSpec, ExpertsSpec, LayerSpec, MLPSpec
from mainspring.models.views import View

MLP = MLPSpec | ExpertsSpec
# Values of expert_gating_func.
SOFTMAX, SIGMOID = 1, 2

# `{expert}` is an expert's number.
GGUF_EXPERTS: Final = {
    "router": "blk.{}.ffn_gate_inp",
    "router_correction.bias": "blk.{}.exp_probs_b.bias",
    "experts.w_gate": "blk.{}.ffn_gate_exps.{expert}",
    "experts.w_up": "blk.{}.ffn_up_exps.{expert}",
    "experts.w_down": "blk.{}.ffn_down_exps.{expert}",
    "shared.w_gate": "blk.{}.ffn_gate_shexp",
    "shared.w_up": "blk.{}.ffn_up_shexp",
    "shared.w_down": "blk.{}.ffn_down_shexp",
    "shared_gate": "blk.{}.ffn_gate_inp_shexp.row",
}
OLDEST_GGUF_EXPERTS: Final = {
    "experts.w_gate": "blk.{}.ffn_gate.{expert}",
    "experts.w_up": "blk.{}.ffn_up.{expert}",
    "experts.w_down": "blk.{}.ffn_down.{expert}",
}
CONFIG_EXPERTS: Final = {
    "router": "model.layers.{}.mlp.gate",
    "router_correction.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "experts.w_gate": "model.layers.{}.mlp.experts.{expert}.gate_proj",
    "experts.w_up": "model.layers.{}.mlp.experts.{expert}.up_proj",
    "experts.w_down": "model.layers.{}.mlp.experts.{expert}.down_proj",
}


def model_with_experts(
    file: ModelFile,
    architecture: str,
    attns: Sequence[AttnSpec],
    mlps: Sequence[MLP],
    *,
    eps: float = 1e-6,
    ignored: frozenset[str] = frozenset(),
) -> Model:
    """A Llama with an MLP or experts in each layer. eps: of configs that do not say."""
    names: dict[str, str] = {**(GGUF_EXPERTS if file.is_gguf else CONFIG_EXPERTS), **file.own_names}
    views: dict[str, View] = {}
    if file.is_gguf and _has_matrices(file, mlps):
        names |= OLDEST_GGUF_EXPERTS
    elif file.is_gguf:
        hidden = file.keys.count("hidden_size")
        for layer, mlp in enumerate(mlps):
            if isinstance(mlp, ExpertsSpec):
                views |= dict(_views(file, f"blk.{layer}.", mlp, hidden))
    return file.with_names(names).model(
        architecture,
        [LayerSpec(attn, mlp) for attn, mlp in zip(attns, mlps, strict=True)],
        norm=file.norm(default=eps),
        tied=file.is_tied(),
        views=views,
        ignored=ignored,
    )


def experts_of(file: ModelFile, count: str, **more: object) -> ExpertsSpec:
    """What all families say alike. count: the key of the number of experts. more: further fields."""
    keys = file.keys
    num_experts, top_k = keys.count(count), keys.count("num_experts_per_tok")
    if top_k > num_experts:
        raise keys.refusal("num_experts_per_tok", f"at most {keys.shown(count)}, {num_experts}")
    return ExpertsSpec(num_experts, top_k, **more)  # type: ignore[arg-type]


def scores_by(file: ModelFile, gating: int) -> None:
    """Refuses a GGUF file whose router scores otherwise than all of its family."""
    if file.is_gguf:
        file.keys.one_of("expert_gating_func", (gating,), gating)


def _has_matrices(file: ModelFile, mlps: Sequence[MLP]) -> bool:
    first = next(layer for layer, mlp in enumerate(mlps) if isinstance(mlp, ExpertsSpec))
    return f"blk.{first}.ffn_gate.0.weight" in file.tensors


def _views(file: ModelFile, at: str, mlp: ExpertsSpec, hidden: int) -> Iterator[tuple[str, View]]:
    """Each expert's rows of the three tensors. Raises `CheckpointError` for one that has another shape."""
    width = mlp.intermediate_size
    for kind, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        tensor = f"{at}ffn_{kind}_exps"
        _check_shape(file, f"{tensor}.weight", (mlp.num_experts, rows, columns))
        for expert in range(mlp.num_experts):
            rows_of_it = View(f"{tensor}.weight", expert * rows, (expert + 1) * rows)
            yield f"{tensor}.{expert}.weight", rows_of_it
    if mlp.shared_gate:
        yield f"{at}ffn_gate_inp_shexp.row.weight", View(f"{at}ffn_gate_inp_shexp.weight", as_row=True)


def _check_shape(file: ModelFile, tensor: str, shape: tuple[int, ...]) -> None:
    if file.source is None:
        return
    if tensor not in file.tensors:
        raise CheckpointError(f"tensor {quoted(tensor)} is missing; expected shape {list(shape)}")
    found = tuple(file.source.info(tensor).shape)
    if found != shape:
        raise CheckpointError(f"tensor {quoted(tensor)} has shape {list(found)}; expected {list(shape)}")


def tensors_behind(file: ModelFile, first: int, before: str) -> frozenset[str]:
    """Tensors of layers from `first` on, which are in the file and not of the network. before: what precedes
    a layer's number in their names."""

    def is_behind(name: str) -> bool:
        number = name.removeprefix(before).partition(".")[0]
        return name.startswith(before) and number.isdecimal() and int(number) >= first

    return frozenset(filter(is_behind, file.tensors))
