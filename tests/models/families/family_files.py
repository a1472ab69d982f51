"""A fixture's checkpoint as files: a folder as Hugging Face writes it, and GGUF as its converters write it.

Names of GGUF tensors and keys come from the `gguf` package. What a converter does beside renaming (which keys
it writes, rows it reorders, numbers it changes) is said here per family, in `FORMS`, from its description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from family_fixtures import Fixture, Floats
from safetensors.numpy import save_file

Config = Mapping[str, Any]
Tensor = tuple[str, Floats]


def write_folder(fixture: Fixture, folder: Path, *, shards: int = 1, config: Config | None = None) -> Path:
    """config: another one than the fixture's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fixture.config if config is None else config))
    tensors = fixture.tensors()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(values.nbytes for values in tensors.values())
    index_file = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return folder


@dataclass(frozen=True)
class Form:
    """What a converter does for a family. The functions are given the config, with its defaults filled in."""

    arch: gguf.MODEL_ARCH
    keys: Callable[[gguf.GGUFWriter, Config], None] = lambda writer, config: None
    # A checkpoint's tensor as it is before it is renamed.
    tensor: Callable[[Config, str, Floats], Iterable[Tensor]] = lambda config, name, values: [(name, values)]
    # Under their GGUF names.
    extra_tensors: Callable[[Config], Iterable[Tensor]] = lambda config: ()
    # All tensors, where several become one; before `tensor`.
    tensors: Callable[[dict[str, Floats]], dict[str, Floats]] = lambda tensors: tensors


def gguf_architecture(fixture: Fixture) -> str:
    name: str = gguf.MODEL_ARCH_NAMES[FORMS[fixture.saved_config["model_type"]].arch]
    return name


def gguf_name(fixture: Fixture, tensor: str) -> str:
    """What converters call a checkpoint's tensor."""
    config = fixture.saved_config
    num_layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(FORMS[config["model_type"]].arch, num_layers)
    found: str | None = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
    assert found is not None, tensor
    return found


def write_gguf(
    fixture: Fixture, path: Path, *, change: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """change: what else is done to the writer, after everything."""
    config = fixture.saved_config
    form = FORMS[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[form.arch])
    _common_keys(writer, config)
    form.keys(writer, config)
    names = gguf.get_tensor_name_map(form.arch, config.get("num_hidden_layers") or config["n_layer"])
    for name, values in form.tensors(fixture.tensors()).items():
        for changed_name, changed in form.tensor(config, name, values):
            found = names.get_name(changed_name, try_suffixes=(".weight", ".bias"))
            assert found is not None, changed_name
            writer.add_tensor(found, np.ascontiguousarray(changed))
    for name, values in form.extra_tensors(config):
        writer.add_tensor(name, values)
    if change is not None:
        change(writer)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _common_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """Those that are written for every family whose config has them."""
    for adder, *keys in (
        (writer.add_block_count, "num_hidden_layers", "n_layer"),
        (writer.add_context_length, "max_position_embeddings", "n_positions"),
        (writer.add_embedding_length, "hidden_size", "n_embd"),
        (writer.add_feed_forward_length, "intermediate_size", "n_inner"),
        (writer.add_head_count, "num_attention_heads", "n_head"),
        (writer.add_head_count_kv, "num_key_value_heads"),
        (writer.add_layer_norm_rms_eps, "rms_norm_eps"),
        (writer.add_layer_norm_eps, "layer_norm_epsilon", "layer_norm_eps"),
        (writer.add_key_length, "head_dim"),
        (writer.add_value_length, "head_dim"),
    ):
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            adder(value)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    _rope_keys(writer, rope_of(config))


def rope_of(config: Config) -> Config:
    """Of the layers that see everything, where kinds of layers turn differently."""
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _rope_keys(writer: gguf.GGUFWriter, rope: Config) -> None:
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            if (amplitude := rope.get("attention_factor")) is not None:
                writer.add_rope_scaling_yarn_attn_factor(amplitude)
            if (fast := rope.get("beta_fast")) is not None:
                writer.add_rope_scaling_yarn_beta_fast(fast)
            if (slow := rope.get("beta_slow")) is not None:
                writer.add_rope_scaling_yarn_beta_slow(slow)


# ---- Llama and its like ------------------------------------------------------------------------------------


def head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _llama_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(head_size(config))


def _in_pairs(config: Config, name: str, values: Floats) -> Iterator[Tensor]:
    """Rows of Q and K of each head: (0, half, 1, half + 1, ...)."""
    stem = name.rsplit(".", 1)[0]
    if stem.endswith(("q_proj", "k_proj")):
        heads = values.reshape(-1, 2, head_size(config) // 2, *values.shape[1:])
        values = heads.swapaxes(1, 2).reshape(values.shape)
    yield name, values


def _llama3_factors(config: Config) -> Iterator[Tensor]:
    """What frequencies are divided by, as a tensor, where a config has Llama 3.1's scaling."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return
    first, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    size = head_size(config)
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    smooth = (first / wavelengths - low) / (high - low)
    factors = 1.0 / ((1.0 - smooth) / factor + smooth)
    factors = np.where(wavelengths < first / high, 1.0, np.where(wavelengths > first / low, factor, factors))
    yield "rope_freqs.weight", factors.astype(np.float32)


LLAMA = Form(gguf.MODEL_ARCH.LLAMA, _llama_keys, _in_pairs, _llama3_factors)


def _mistral_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """With its window, which converters of Mistral leave out."""
    _llama_keys(writer, config)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _qwen2_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """With its windows, which converters of Qwen leave out: no published model has them on."""
    _pattern_keys(writer, config if config.get("use_sliding_window") else {})


def _pattern_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _granite_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    _llama_keys(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


# ---- Gemma, Phi, GPT-2 and encoders ------------------------------------------------------------------------


def _gemma2_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """Not which layers have the window."""
    writer.add_sliding_window(config["sliding_window"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma3_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """The theta of layers with a window only where positions are scaled, as newer converters do."""
    writer.add_sliding_window(config["sliding_window"])
    if rope_of(config)["rope_type"] != "default":
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _norms_with_one(config: Config, name: str, values: Floats) -> Iterator[Tensor]:
    yield name, values + np.float32(1.0) if name.endswith("norm.weight") else values


def _phi3_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(head_size(config) * rope["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        first = config["original_max_position_embeddings"]
        grown = config["max_position_embeddings"] / first
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1.0 + np.log(grown) / np.log(first))))


def _phi3_factors(config: Config) -> Iterator[Tensor]:
    for kind in ("long", "short"):
        if (factors := config["rope_parameters"].get(f"{kind}_factor")) is not None:
            yield f"rope_factors_{kind}.weight", np.array(factors, np.float32)


def _gpt2_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_feed_forward_length(4 * config["n_embd"])


def _turned_over(config: Config, name: str, values: Floats) -> Iterator[Tensor]:
    ends = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    yield name, values.T if name.endswith(ends) else values


def _bert_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)


def _without_pooler(config: Config, name: str, values: Floats) -> Iterator[Tensor]:
    if not name.startswith("pooler."):
        yield name, values


# ---- experts -----------------------------------------------------------------------------------------------


def _stacked(tensors: dict[str, Floats]) -> dict[str, Floats]:
    """Each layer's gates, ups and downs as tensors of three dimensions."""
    found: dict[str, Floats] = {}
    stacks: dict[str, list[Floats]] = {}
    for name in sorted(tensors, key=_by_expert):
        if (match := EXPERT.fullmatch(name)) is None:
            found[name] = tensors[name]
        else:
            stacks.setdefault(match[1] + match[3], []).append(tensors[name])
    return found | {name: np.stack(stack) for name, stack in stacks.items()}


EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")


def _by_expert(name: str) -> int:
    match = EXPERT.fullmatch(name)
    return int(match[2]) if match else -1


def _expert_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    for adder, *keys in (
        (writer.add_expert_count, "num_local_experts", "num_experts", "n_routed_experts"),
        (writer.add_expert_used_count, "num_experts_per_tok"),
        (writer.add_expert_feed_forward_length, "moe_intermediate_size"),
        (writer.add_expert_shared_feed_forward_length, "shared_expert_intermediate_size"),
    ):
        value = next((config[key] for key in keys if key in config), None)
        if value is not None:
            adder(value)


def _mixtral_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    _llama_keys(writer, config)
    _expert_keys(writer, config)


def _squeezed(config: Config, name: str, values: Floats) -> Iterator[Tensor]:
    yield name, values[0] if name.endswith("shared_expert_gate.weight") else values


def _glm_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """With the layer that predicts further tokens."""
    _expert_keys(writer, config)
    writer.add_block_count(config["num_hidden_layers"] + config["num_nextn_predict_layers"])
    writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    writer.add_rope_dimension_count(
        int(head_size(config) * config["rope_parameters"]["partial_rotary_factor"])
    )
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _glm_names(config: Config, name: str, values: Floats) -> Iterator[Tensor]:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _further_tokens(config: Config) -> Iterator[Tensor]:
    at, hidden = f"blk.{config['num_hidden_layers']}.", config["hidden_size"]
    for name in ("attn_output", "nextn.eh_proj"):
        yield f"{at}{name}.weight", np.ones((hidden, hidden), np.float32)


FORMS: dict[str, Form] = {
    "mixtral": Form(gguf.MODEL_ARCH.LLAMA, _mixtral_keys, _in_pairs, tensors=_stacked),
    "qwen2_moe": Form(gguf.MODEL_ARCH.QWEN2MOE, _expert_keys, _squeezed, tensors=_stacked),
    "qwen3_moe": Form(gguf.MODEL_ARCH.QWEN3MOE, _expert_keys, tensors=_stacked),
    "glm4_moe": Form(gguf.MODEL_ARCH.GLM4_MOE, _glm_keys, _glm_names, _further_tokens, _stacked),
    "bert": Form(gguf.MODEL_ARCH.BERT, _bert_keys, _without_pooler),
    "gemma2": Form(gguf.MODEL_ARCH.GEMMA2, _gemma2_keys, _norms_with_one),
    "gemma3_text": Form(gguf.MODEL_ARCH.GEMMA3, _gemma3_keys, _norms_with_one),
    "phi3": Form(gguf.MODEL_ARCH.PHI3, _phi3_keys, extra_tensors=_phi3_factors),
    "gpt2": Form(gguf.MODEL_ARCH.GPT2, _gpt2_keys, _turned_over),
    "llama": LLAMA,
    "mistral": Form(gguf.MODEL_ARCH.LLAMA, _mistral_keys, _in_pairs),
    "qwen2": Form(gguf.MODEL_ARCH.QWEN2, _qwen2_keys),
    "qwen3": Form(gguf.MODEL_ARCH.QWEN3),
    "smollm3": Form(gguf.MODEL_ARCH.SMOLLM3, _llama_keys, _in_pairs, _llama3_factors),
    "granite": Form(gguf.MODEL_ARCH.GRANITE, _granite_keys, _in_pairs),
    "olmo2": Form(gguf.MODEL_ARCH.OLMO2),
    "olmo3": Form(gguf.MODEL_ARCH.OLMO2, _pattern_keys),
}
