"""A bounded memory: what was used longest ago is forgotten first. Safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from mainspring.base.params import StructuredOutputsParams

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_LEAST_BYTES = 1 << 10  # an entry costs more than its text


class Remembered(Generic[K, V]):
    """Entries with a weight each, at most `max_weight` together."""

    def __init__(self, max_weight: int) -> None:
        self._max_weight = max_weight
        self._weight = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()  # in order of use
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: K, value: V, weight: int) -> None:
        with self._lock:
            self._drop(key)
            self._entries[key] = (value, weight)
            self._weight += weight
            while self._weight > self._max_weight:
                _, (_, forgotten) = self._entries.popitem(last=False)
                self._weight -= forgotten

    def drop(self, key: K) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: K) -> None:
        if key in self._entries:
            self._weight -= self._entries.pop(key)[1]


def weight(asked: StructuredOutputsParams) -> int:
    """Bytes, about."""
    value = getattr(asked, asked.kind)
    texts = value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
    return _LEAST_BYTES + sum(map(len, texts))
