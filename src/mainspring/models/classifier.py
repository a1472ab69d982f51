"""What stands behind the network of a model that classifies: a small head over one vector for each text.

BERT's has a dense layer and tanh before the labels' scores. Matrices are float32, as small as a few labels
are, and computed in numpy, one vector at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.models.views import TensorSource

Floats = npt.NDArray[np.float32]

SCORES = "classifier"
DENSE = ("bert.pooler.dense", "pooler.dense")


@dataclass(frozen=True, slots=True)
class Classifier:
    """scores = labels (tanh (dense x))."""

    dense: tuple[Floats, Floats]  # [hidden, hidden], [hidden]
    labels: tuple[Floats, Floats]  # [labels, hidden], [labels]

    def __call__(self, vector: Floats) -> Floats:
        """[hidden] -> [labels]"""
        matrix, bias = self.dense
        inner = np.tanh(matrix @ vector + bias)
        matrix, bias = self.labels
        scores: Floats = matrix @ inner + bias
        return scores


def read_classifier(source: TensorSource, hidden_size: int) -> Classifier | None:
    """None where the file has none. Raises `CheckpointError` naming a tensor that does not fit."""
    held = set(source.tensor_names)
    if f"{SCORES}.weight" not in held:
        return None
    dense = next((name for name in DENSE if f"{name}.weight" in held), DENSE[0])

    def layer(name: str, num_rows: int | None) -> tuple[Floats, Floats]:
        for tensor in (f"{name}.weight", f"{name}.bias"):
            if tensor not in held:
                raise CheckpointError(f"tensor {tensor!r} is missing, and {SCORES}.weight needs it")
        shape = tuple(source.info(f"{name}.weight").shape)
        rows = shape[0] if num_rows is None else num_rows
        if shape != (rows, hidden_size) or tuple(source.info(f"{name}.bias").shape) != (rows,):
            raise CheckpointError(f"tensor '{name}.weight' has shape {shape}; expected {(rows, hidden_size)}")
        for tensor in (f"{name}.weight", f"{name}.bias"):
            if not source.is_finite(tensor):
                raise CheckpointError(f"tensor {tensor!r} has values that are not finite")
        return np.array(source.dequantise(f"{name}.weight")), np.array(source.dequantise(f"{name}.bias"))

    return Classifier(layer(dense, hidden_size), layer(SCORES, None))
