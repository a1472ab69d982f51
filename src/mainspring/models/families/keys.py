"""What a model says of itself: keys by one name for all files, values of the type that is asked for.

Adapters ask by the names that Hugging Face configs use; where a file spells them otherwise, a table says how.
Messages use the file's own spelling.

A key that changes the mathematics and is not understood is an error: a model that answers wrongly is worse
than one that does not load. So `Keys` remembers what it was asked for, and `refuse_rest` refuses what is
left, unless its value is known to change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import MAX_QUOTED, quoted

LARGEST_COUNT = 1 << 40
SMALLEST, LARGEST = 1e-30, 1e30  # of numbers: what is made of a few of them is a float32


class Keys:
    def __init__(
        self, values: Mapping[str, Any], prefix: str = "", spelling: Mapping[str, str] | None = None
    ) -> None:
        self._prefix = prefix
        self._spelling = spelling or {}
        self._values = {
            key[len(prefix) :]: value
            for key, value in values.items()
            if key.startswith(prefix) and value is not None
        }
        self._null = {key[len(prefix) :] for key, value in values.items() if value is None}
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._spelled(key) in self._values

    def says(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self or self._spelled(key) in self._null

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; a key whose value is null is not there."""
        spelled = self._spelled(key)
        self._asked.add(spelled)
        return self._values.get(spelled, default)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(key, "a positive integer" if least else "a whole number")
        if value > LARGEST_COUNT:
            raise self.refusal(key, f"at most {LARGEST_COUNT}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(key, "a positive number")
        if not SMALLEST <= value <= LARGEST:
            raise self.refusal(key, f"a number from {SMALLEST} to {LARGEST}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def one_of(self, key: str, known: Collection[Any], default: Any = None) -> Any:
        value = self.get(key, default)
        if not isinstance(value, str | int | float | bool | None) or value not in known:
            raise self.refusal(key, "one of " + ", ".join(map(str, known)))
        return value

    def inner(self, key: str) -> Keys:
        """The keys of an object; of none, if it is not there. What it holds must be asked for on its own."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object")
        inner = Keys(value)
        inner._prefix = f"{self.shown(key)}."
        return inner

    def spelled(self, spelling: Mapping[str, str]) -> None:
        """Adds to how this file spells keys."""
        self._spelling = {**self._spelling, **spelling}

    def refuse_rest(self, neutral: Mapping[str, tuple[Any, ...]], silent: Collection[str] = ()) -> None:
        """Refuse, by name, whatever was not asked for. neutral: values that change nothing; silent: keys of
        which no value does. Both in the file's spelling."""
        for key, value in self._values.items():
            if key not in self._asked and key not in silent and value not in neutral.get(key, ()):
                raise CheckpointError(
                    f"{self._quoted(key)} is {quoted(value)}: not supported, may change the mathematics"
                )

    def refusal(self, key: str, expected: str) -> CheckpointError:
        spelled = self._spelled(key)
        found = f"is {quoted(self._values[spelled])}" if spelled in self._values else "is missing"
        return CheckpointError(f"{self._quoted(spelled)} {found}; expected {expected}")

    def shown(self, key: str) -> str:
        """A key as the file spells it."""
        return self._prefix + self._spelled(key)

    def _spelled(self, key: str) -> str:
        return self._spelling.get(key, key)

    def _quoted(self, spelled: str) -> str:
        name = self._prefix + spelled
        return name if name.isprintable() and len(name) <= MAX_QUOTED else quoted(name)
