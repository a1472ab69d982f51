"""Tiny networks of every family, with what an independent implementation says of them.

A fixture (`tests/data/families/NAME.json`) has a config, the names and shapes of a checkpoint's tensors, and
sequences of token ids with the logits at every position; the last `NUM_NEW` ids of each are what a greedy
sampler went on with. Weights are not stored: `weight` makes them again from a tensor's name and shape.
`make_fixtures.py` makes fixtures, and is no test.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_NEW = 8  # ids at the end of each sequence that the network itself chose
FOLDER = Path(__file__).parents[2] / "data" / "families"
ENCODERS = FOLDER.with_name("encoders")  # theirs have hidden states for logits, and nothing goes on

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Fixture:
    name: str
    config: dict[str, Any]  # as makers publish it
    saved_config: dict[str, Any]  # the same, as the other implementation writes it today
    shapes: dict[str, tuple[int, ...]]  # of the checkpoint's tensors
    token_ids: list[list[int]]
    logits: list[Floats]  # [tokens, vocabulary], at each position

    @property
    def prompts(self) -> list[list[int]]:
        return [ids[:-NUM_NEW] for ids in self.token_ids]

    @property
    def log_probs(self) -> list[Floats]:
        return [log_softmax(rows) for rows in self.logits]

    def tensors(self) -> dict[str, Floats]:
        return tensors_of(self.config, self.shapes)


def tensors_of(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Floats]:
    norms = 0.0 if config["model_type"].startswith("gemma") else 1.0  # theirs are what is added to 1
    return {name: weight(name, shape, norms) for name, shape in shapes.items()}


def weight(name: str, shape: tuple[int, ...], norms: float = 1.0) -> Floats:
    """Numbers that depend on name and shape alone, in any version of numpy: a counter, mixed (SplitMix64).

    Even over (-1, 1), then scaled so that activations stay near unit size; those of norms are around `norms`.
    """
    counter = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = (counter + (np.uint64(zlib.crc32(name.encode())) << np.uint64(32))) * np.uint64(
            0x9E3779B97F4A7C15
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    values = ((x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(shape)
    if len(shape) > 1:
        return values * np.float32(3.0 / math.sqrt(shape[-1]))
    return np.float32(0.3) * values + np.float32(0.0 if name.endswith(".bias") else norms)


def log_softmax(rows: Floats) -> Floats:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: Floats = (wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))).astype(np.float32)
    return result


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str, folder: Path = FOLDER) -> Fixture:
    given = json.loads((folder / f"{name}.json").read_text())
    width = given["width"]
    return Fixture(
        name,
        given["config"],
        given["saved_config"],
        {tensor: tuple(shape) for tensor, shape in _shapes(given["tensors"])},
        given["token_ids"],
        [np.frombuffer(base64.b85decode(rows), "<f4").reshape(-1, width) for rows in given["logits"]],
    )


def save(fixture: Fixture, folder: Path = FOLDER) -> Path:
    given = {
        "width": fixture.logits[0].shape[1],
        "config": fixture.config,
        "saved_config": fixture.saved_config,
        "tensors": _by_shape(fixture.shapes),
        "token_ids": fixture.token_ids,
        "logits": [base64.b85encode(rows.astype("<f4").tobytes()).decode() for rows in fixture.logits],
    }
    path = folder / f"{fixture.name}.json"
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in given.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def _by_shape(shapes: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Names by shape ("96x64"), which is shorter."""
    found: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        found.setdefault("x".join(map(str, shape)), []).append(name)
    return found


def _shapes(by_shape: dict[str, list[str]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for shape, tensors in by_shape.items():
        for name in tensors:
            yield name, tuple(map(int, shape.split("x")))
