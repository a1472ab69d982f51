"""How numpy arrays travel inside msgpack bodies: as (dtype, shape, bytes). Nothing is pickled."""

from __future__ import annotations

from typing import Any, get_origin

import numpy as np


def encode_array(value: object) -> object:
    """msgspec's `enc_hook`. Raises `NotImplementedError` for what is no array."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def decode_array(kind: type, value: Any) -> object:
    """msgspec's `dec_hook`. What it gives is read-only."""
    if (get_origin(kind) or kind) is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    raise NotImplementedError(f"{kind} does not travel")
