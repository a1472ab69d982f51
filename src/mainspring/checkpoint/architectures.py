"""The model families that are read, by the name that a GGUF file gives them.

It is asked first, so that a file of another family is refused as such and not for a key that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted

ARCHITECTURES: Final = (
    "bert",
    "gemma2",
    "gemma3",
    "glm4moe",
    "gpt2",
    "granite",
    "llama",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "smollm3",
)

ENCODERS: Final = ("bert",)  # which have no head: they give hidden states only


def check_architecture(metadata: Mapping[str, Any]) -> str:
    """The file's `general.architecture`. Raises `CheckpointError` unless it is one of `ARCHITECTURES`."""
    found = metadata.get("general.architecture")
    supported = ", ".join(ARCHITECTURES)
    if found is None:
        raise CheckpointError(
            f"key 'general.architecture' is missing: is this a language model? supported: {supported}"
        )
    if not isinstance(found, str) or found not in ARCHITECTURES:
        raise CheckpointError(f"architecture {quoted(found)} is not supported yet; supported: {supported}")
    return found
