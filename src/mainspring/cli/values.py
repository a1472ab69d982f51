"""What a flag's value may look like: each reader takes the text and raises `argparse.ArgumentTypeError`.

Whole numbers may be human: `1k` is 1,000 and `1K` is 1,024, likewise m/M and g/G, also `1.5k`.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from mainspring.base.config import AUTO_MAX_MODEL_LEN

SCALES = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20, "g": 1000**3, "G": 1 << 30}


def human_int(text: str) -> int:
    """A whole number, perhaps with a unit: 512, 1k (1,000), 1K (1,024), 1.5k."""
    scale = SCALES.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    try:
        number = int(digits) if scale == 1 else float(digits) * scale
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"expected a whole number such as 512, 2k or 2K, got {text!r}")


def model_len(text: str) -> int:
    return AUTO_MAX_MODEL_LEN if text == "auto" else human_int(text)


def real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 0.7, got {text!r}") from None


def token_ids(text: str) -> list[int]:
    """Ids with commas or spaces between them, or a JSON list."""
    text = text.strip()
    inside = text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text
    try:
        return [int(word) for word in re.split(r"\s*,\s*|\s+", inside)] if inside else []
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, got {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as '{{\"5\": -100}}', got {text!r}")
    return value
