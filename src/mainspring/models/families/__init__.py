"""Adapters: what a model's file says of itself -> `ModelSpec` and the names of its tensors.

One function per family, for GGUF files and for Hugging Face folders alike (`file.ModelFile`). A new family is
such a function, its names in the tables below, and a fixture of a tiny network (`docs/add-a-model.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mainspring.checkpoint.architectures import ARCHITECTURES, check_architecture
from mainspring.models.families.bert import bert
from mainspring.models.families.file import ModelFile
from mainspring.models.families.gemma import gemma2, gemma3
from mainspring.models.families.gpt2 import gpt2
from mainspring.models.families.granite import granite
from mainspring.models.families.keys import Keys
from mainspring.models.families.llama import llama, mistral, unnamed
from mainspring.models.families.model import Model
from mainspring.models.families.moe import glm4_moe, llama_of_gguf, mixtral, qwen2_moe, qwen3_moe
from mainspring.models.families.names import CONFIG_NEUTRAL, CONFIG_SILENT, GGUF_KEYS, GGUF_NEUTRAL
from mainspring.models.families.olmo import olmo2, olmo3
from mainspring.models.families.phi3 import phi3
from mainspring.models.families.qwen import qwen2, qwen3
from mainspring.models.families.smollm3 import smollm3
from mainspring.models.spec import ModelSpec
from mainspring.models.views import TensorSource

__all__ = ["Model", "from_config", "from_folder", "from_gguf"]

Adapter = Callable[[ModelFile], Model]

# By general.architecture, and by model_type.
GGUF_FAMILIES: Mapping[str, Adapter] = {
    "bert": bert,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "glm4moe": glm4_moe,
    "granite": granite,
    "llama": llama_of_gguf,
    "olmo2": olmo2,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3moe": qwen3_moe,
    "smollm3": smollm3,
}
CONFIG_FAMILIES: Mapping[str, Adapter] = {
    "bert": bert,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "glm4_moe": glm4_moe,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
}
assert set(GGUF_FAMILIES) == set(ARCHITECTURES)


def from_gguf(metadata: Mapping[str, Any], source: TensorSource, max_model_len: int | None = None) -> Model:
    """Raises `CheckpointError`, one line, for an architecture or a key that is not supported."""
    architecture = check_architecture(metadata)
    keys = Keys(metadata, architecture + ".", GGUF_KEYS)
    model = GGUF_FAMILIES[architecture](ModelFile(keys, source, True, max_model_len))
    keys.refuse_rest(GGUF_NEUTRAL)
    return model


def from_folder(config: Mapping[str, Any], source: TensorSource, max_model_len: int | None = None) -> Model:
    """A folder as Hugging Face writes it: its config.json and its tensors. Raises as `from_gguf`."""
    return _from_config(config, source, max_model_len)


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """A config alone, for `load_format` dummy. It need not name a family.

    Raises `CheckpointError` naming the key that is missing, wrong or unknown.
    """
    return _from_config(config, None, None).spec


def _from_config(config: Mapping[str, Any], source: TensorSource | None, max_model_len: int | None) -> Model:
    keys = Keys(config)
    adapter: Adapter = unnamed
    if "model_type" in keys or source is not None:
        adapter = CONFIG_FAMILIES[keys.one_of("model_type", CONFIG_FAMILIES)]
    model = adapter(ModelFile(keys, source, False, max_model_len))
    keys.refuse_rest(CONFIG_NEUTRAL, CONFIG_SILENT)
    return model
