"""A model's config as Hugging Face writes it: a JSON object in a .json file, or its text itself.

Only read here; what its keys mean is for `models/families.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mainspring.base.errors import CheckpointError


def is_config(model: str) -> bool:
    """Whether `model` is a config rather than a model's file or name."""
    return model.lstrip().startswith("{") or model.endswith(".json")


def read_config(model: str) -> Mapping[str, Any]:
    """Raises `CheckpointError` for what cannot be read or is no JSON object."""
    what, text = "the model's config", model
    if not model.lstrip().startswith("{"):
        what = model
        try:
            text = Path(model).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{model}: cannot be read: {error}") from None
    try:
        config = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{what} is {type(config).__name__}; expected a JSON object")
    return config
