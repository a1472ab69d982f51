"""Hidden states of a text to a vector: which tokens' states, what a head makes of them, how long it is.

Theory of operation. A prompt may be read in chunks, so a pool takes the states of each step as they come and
is asked for the result in the step that ends the prompt. Nothing of it depends on who else is in the batch:
sums run over one request's rows, in the order of its tokens, in float64, and go on where the chunk before
ended; a head is applied to one vector at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import Pooling

Floats = npt.NDArray[np.float32]
Classifier = Callable[[Floats], Floats]  # a pooled vector [hidden] -> the scores of the labels [labels]


class Pool:
    """Of one stay of one request."""

    def __init__(self, pooling: Pooling, classifier: Classifier | None = None) -> None:
        """classifier: the model's head, where `pooling.classify`."""
        assert classifier is not None or not pooling.classify, "there is no head to classify with"
        self.num_tokens = 0  # whose states were given
        self._pooling = pooling
        self._classifier = classifier
        self._kept: list[Floats] = []  # [tokens, hidden] each
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, hidden: Floats) -> None:
        """The states [tokens, hidden] of the next tokens, which are not kept: what is needed is copied."""
        kind = self._pooling.kind
        if kind == "mean":
            before = hidden[:0] if self._sum is None else self._sum[None]
            self._sum = np.concatenate([before, hidden], dtype=np.float64).sum(axis=0)
        elif kind == "all":
            self._kept.append(hidden.copy())
        elif kind == "last" or not self.num_tokens:
            self._kept = [hidden[-1:].copy() if kind == "last" else hidden[:1].copy()]
        self.num_tokens += len(hidden)

    def result(self) -> Floats:
        """[elements]; of kind all [tokens, elements]."""
        if self._sum is not None:
            rows = (self._sum / self.num_tokens).astype(np.float32)[None]
        else:
            rows = np.concatenate(self._kept)
        found = np.stack([self._finished(row) for row in rows])
        return found if self._pooling.kind == "all" else found[0]

    def _finished(self, vector: Floats) -> Floats:
        pooling = self._pooling
        if pooling.classify:
            assert self._classifier is not None
            vector = self._classifier(vector)
        return activated(vector[: pooling.dimensions], pooling.activation)


def activated(values: Floats, activation: str) -> Floats:
    """Computed in float64, for it costs nothing and sums come out as they should."""
    wide = values.astype(np.float64)
    if activation == "normalize":
        wide = wide / max(float(np.sqrt(np.sum(wide * wide))), 1e-12)
    elif activation == "softmax":
        wide = np.exp(wide - wide.max())
        wide = wide / wide.sum()
    elif activation == "sigmoid":
        wide = 1.0 / (1.0 + np.exp(-wide))
    return wide.astype(np.float32)
