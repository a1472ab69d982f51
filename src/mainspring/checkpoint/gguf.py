"""GGUF files: a model in one memory-mapped file, or split over several.

Reading happens in three depths, each paid for only when asked:
1. opening reads and judges the head of each file (`gguf_head.py`);
2. `metadata[key]` decodes an array (tokens, merges) the first time it is asked for;
3. `dequantise(name)` touches the pages of one tensor (`blocks.py`).

A model may be split into parts named `...-00001-of-00003.gguf`. Each has the keys `split.no` (from 0),
`split.count` and `split.tensors.count`, of all together; the first has the other metadata. Opening any of
them opens all.

Invariants after a successful open: all parts are there and say the same of the whole; tensor names are unique
over all of them; what `gguf_head.read_head` promises holds for each.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.gguf_head import Metadata, read_head
from mainspring.checkpoint.mapping import MappedFile
from mainspring.checkpoint.quoting import quoted
from mainspring.checkpoint.tensors import StoredTensors, TensorInfo

PART_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
OWN_KEYS: Final = ("split.no", "general.alignment")  # of a part; others that it repeats are the model's


class GGUFFile(StoredTensors):
    """A GGUF file, or all parts of a split one, open for reading. Safe to use from several threads until it
    is closed.

    Raises `CheckpointError`, one line that names the file and the tensor or key at fault, if anything in it
    is damaged or not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._parts = _open_parts(Path(path))
        self.path = self._parts[0].path
        self.metadata: Metadata = self._parts[0].metadata
        self._part_of = {name: part for part in self._parts for name in part.tensors}

    @property
    def paths(self) -> list[Path]:
        """The files of which it is made, in their order."""
        return [part.path for part in self._parts]

    @property
    def tensor_names(self) -> list[str]:
        """In the order of the file's table."""
        return list(self._part_of)

    def info(self, name: str) -> TensorInfo:
        return self._part(name).tensors[name]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        part = self._part(name)
        info = part.tensors[name]
        return part.bytes[info.offset : info.offset + info.num_bytes]

    def drop_pages(self) -> None:
        for part in self._parts:
            part.drop_pages()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _part(self, name: str) -> _Part:
        if name not in self._part_of:
            raise CheckpointError(f"{self.path}: no tensor {quoted(name)} among its {len(self._part_of)}")
        return self._part_of[name]


class _Part(MappedFile):
    """One file, mapped, and its head."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a GGUF file")
        try:
            self.metadata, self.tensors = read_head(path, self.buffer)
        except BaseException:
            self.close()
            raise

    def count(self, key: str, default: int) -> int:
        """The value of a key that is a number of parts."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"key {quoted(key)} is {quoted(value)}, expected a count")
        return value


# ---- parts -------------------------------------------------------------------------------------------------


def _open_parts(path: Path) -> tuple[_Part, ...]:
    """The file at `path`, or all parts of the model that it is one of, in order."""
    with ExitStack() as opened:

        def open_part(path: Path) -> _Part:
            part = _Part(path)
            opened.callback(part.close)
            return part

        given = open_part(path)
        paths = _paths_of_parts(given)
        parts = tuple(given if other == path else open_part(other) for other in paths)
        if len(parts) > 1:
            _check_parts(parts)
        opened.pop_all()
    return parts


def _paths_of_parts(given: _Part) -> list[Path]:
    """Where the parts of a model are, of which one is open. Raises `CheckpointError` if one is missing."""
    count = given.count("split.count", 1)
    if count <= 1:
        return [given.path]
    number = given.count("split.no", 0) + 1
    name = PART_NAME.fullmatch(given.path.name)
    if name is None or (int(name["number"]), int(name["count"])) != (number, count):
        raise given.error(
            f"is part {number} of {count} of a model, says 'split.no'; expected a name that ends in "
            f"'-{number:05}-of-{count:05}.gguf', by which the other parts are found"
        )
    paths = [given.path.with_name(f"{name['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for i, path in enumerate(paths):
        if not path.exists():
            raise given.error(f"part {i + 1} of {count} is missing: expected {path.name} beside it")
    return paths


def _check_parts(parts: tuple[_Part, ...]) -> None:
    """All parts are of one model, and no more or less than that."""
    first = parts[0]
    where: dict[str, _Part] = {}
    for i, part in enumerate(parts):
        if part.count("split.no", 0) != i:
            raise part.error(f"key 'split.no' is {part.metadata.get('split.no')}, expected {i} by its name")
        for key in {"split.count", *part.metadata} - set(OWN_KEYS):
            value, expected = part.metadata.get(key), first.metadata.get(key)
            if key in first.metadata and value != expected:
                raise part.error(
                    f"key {quoted(key)} is {quoted(value)}, and in {first.path.name} {quoted(expected)}: "
                    "parts of different models?"
                )
        for name in part.tensors:
            if name in where:
                raise part.error(f"tensor {quoted(name)} is in {where[name].path.name}, too")
            where[name] = part
    expected = first.metadata.get("split.tensors.count", len(where))
    if expected != len(where):
        raise first.error(
            f"the {len(parts)} parts have {len(where)} tensors together, "
            f"and key 'split.tensors.count' is {quoted(expected)}: parts of different models?"
        )
