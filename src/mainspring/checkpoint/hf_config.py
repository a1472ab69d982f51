"""A model's config as Hugging Face writes it: a JSON object in a .json file, or its text itself.

Only read here; what its keys mean is for `models/families`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted

# Sampling defaults, by their names in generation_config.json, and what they are called in `SamplingParams`.
GENERATION: Final = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def is_config(model: str) -> bool:
    """Whether `model` is a config rather than a model's file or name."""
    return model.lstrip().startswith("{") or model.endswith(".json")


def read_config(model: str) -> Mapping[str, Any]:
    """Raises `CheckpointError` for what cannot be read or is no JSON object."""
    if not model.lstrip().startswith("{"):
        return read_object(Path(model))
    return _object(model, "the model's config")


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object of a file. Raises `CheckpointError` for what cannot be read or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: cannot be read: it is not UTF-8") from None
    return _object(text, str(path))


def _object(text: str, what: str) -> Mapping[str, Any]:
    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Of values that differ nobody can say which is meant."""
        found: dict[str, Any] = {}
        for key, value in pairs:
            if found.setdefault(key, value) != value:
                shown = f"{quoted(found[key])} and {quoted(value)}"
                raise CheckpointError(f"{what} has the key {quoted(key)} twice, as {shown}; expected it once")
        return found

    try:
        found = json.loads(text, object_pairs_hook=whole)
    except CheckpointError:  # which is a ValueError, too
        raise
    except ValueError as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{what} is not JSON that can be read: it is nested too deep") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is {type(found).__name__}; expected a JSON object")
    return found
