"""SmolLM 3: a Llama in which every fourth layer does not turn positions."""

from __future__ import annotations

from dataclasses import replace

from mainspring.models.families.file import ModelFile
from mainspring.models.families.llama import llama_attention, llama_like
from mainspring.models.families.model import Model


def smollm3(file: ModelFile) -> Model:
    turns = _turning(file)
    attn = llama_attention(file, kv_heads=4, theta=10_000.0 if file.is_gguf else 2_000_000.0)
    file.keys.get("max_window_layers")  # has no meaning here
    attns = file.with_switched_windows(attn, [not one for one in turns])
    attns = [each if one else replace(each, rope=None) for each, one in zip(attns, turns, strict=True)]
    return llama_like(file, "smollm3", attns, tied=True)


def _turning(file: ModelFile) -> list[bool]:
    """Whether each layer turns positions. The list in a config has, in spite of its name, a 1 where it does;
    GGUF files do not say."""
    keys, num_layers = file.keys, file.num_layers()
    interval = 4 if file.is_gguf else keys.count("no_rope_layer_interval", 4)
    given = None if file.is_gguf else keys.get("no_rope_layers")
    if given is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or not all(one in (0, 1) for one in given):
        raise keys.refusal("no_rope_layers", f"a list of 0 or 1 for each of {num_layers} layers")
    return [one == 1 for one in given]
