"""The head of a GGUF file: typed key-values and a table of tensors, read and judged.

Opening walks over all of it and judges it: every offset, count and length is checked against the size of the
file before anything is allocated or sliced, so a hostile file costs time and memory linear in its size. An
array (tokens, merges) is only walked over; `metadata[key]` decodes it the first time it is asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.blocks import OTHER_TYPE_NAMES, TENSOR_TYPES, TYPES_BY_NAME
from mainspring.checkpoint.quoting import quoted
from mainspring.checkpoint.tensors import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4  # arrays of arrays; files in the wild have none
MAX_ALIGNMENT = 1 << 20
MIN_ENTRY_BYTES = 13  # the least a key-value takes: length of the key, type, one byte
MIN_TENSOR_BYTES = 24  # the least a tensor's entry takes: length of the name, n_dims, type, offset


class Head(NamedTuple):
    """What a file says of itself."""

    metadata: Metadata
    tensors: dict[str, TensorInfo]


def read_head(path: Path, buffer: mmap.mmap) -> Head:
    """The head of the file that `buffer` maps. Raises `CheckpointError`, one line that begins with `path`.

    Afterwards: names and keys are unique; every tensor's bytes lie inside the file, start at a multiple of
    the alignment and overlap no other's; its type is in `TENSOR_TYPES` and its rows are whole blocks.
    """
    parser = _Parser(path, buffer)
    num_tensors, num_entries = parser.header()
    metadata = parser.metadata(num_entries)
    return Head(metadata, parser.tensors(num_tensors, metadata))


# ---- metadata ----------------------------------------------------------------------------------------------


class _Array(NamedTuple):
    """An array that nobody has asked for yet."""

    start: int  # of its first element, bytes from the start of the file
    end: int
    kind: int
    length: int


class Metadata(Mapping[str, Any]):
    """Key -> int, float, bool, str or list. Arrays are decoded when first asked for."""

    def __init__(self, parser: _Parser, values: dict[str, Any]) -> None:
        self._parser = parser
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._parser.array(key, value)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS: Final[dict[int, struct.Struct]] = {
    code: struct.Struct("<" + letter)
    for code, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_MIN_ELEMENT_BYTES: Final = {code: form.size for code, form in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}


class _Parser:
    """A position in the file, and what may be read from there. `self.pos` never passes `self.size`."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def header(self) -> tuple[int, int]:
        """How many tensors and how many key-values follow."""
        magic = self.buffer[:4]
        if magic != MAGIC:
            raise self.error(f"is not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
        self.pos = 4
        version = self.number(_U32, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            found = f"{swapped}, big-endian," if swapped in VERSIONS else str(version)
            raise self.error(f"GGUF version {found} is not supported; supported: 2 and 3, little-endian")
        num_tensors = self.number(_U64, "the number of tensors")
        num_entries = self.number(_U64, "the number of key-values")
        self.fits(num_tensors, MIN_TENSOR_BYTES, "the header announces", "tensors")
        self.fits(num_entries, MIN_ENTRY_BYTES, "the header announces", "key-values")
        return num_tensors, num_entries

    def metadata(self, num_entries: int) -> Metadata:
        values: dict[str, Any] = {}
        for index in range(num_entries):
            key = self.string(f"the name of key-value {index}")
            if key in values:
                raise self.error(f"key {quoted(key)} occurs twice")
            values[key] = self.value(self.number(_U32, f"the type of key {quoted(key)}"), key)
        return Metadata(self, values)

    def tensors(self, num_tensors: int, metadata: Metadata) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self.error(
                f"key 'general.alignment' is {quoted(alignment)}, "
                f"expected a power of two up to {MAX_ALIGNMENT}"
            )
        found: dict[str, TensorInfo] = {}
        for index in range(num_tensors):
            info = self.tensor(index)
            if info.name in found:
                raise self.error(f"tensor {quoted(info.name)} occurs twice")
            found[info.name] = info
        return self.placed(found, alignment)

    def tensor(self, index: int) -> TensorInfo:
        """One entry of the table; its offset still counts from the start of the data."""
        name = self.string(f"the name of tensor {index}")
        shown = f"tensor {quoted(name)}"
        num_dims = self.number(_U32, f"n_dims of {shown}")
        if num_dims > MAX_DIMS:
            raise self.error(f"{shown} has {num_dims} dimensions, expected at most {MAX_DIMS}")
        # The file has the fastest dimension first.
        shape = tuple(self.number(_U64, f"the shape of {shown}") for _ in range(num_dims))[::-1]
        type_id = self.number(_U32, f"the type of {shown}")
        offset = self.number(_U64, f"the offset of {shown}")
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            found = OTHER_TYPE_NAMES.get(type_id, f"number {type_id}")
            raise self.error(
                f"{shown} has type {found}, which is not supported; supported: {', '.join(TYPES_BY_NAME)}"
            )
        num_weights = 1
        for length in shape:
            num_weights *= length
        if num_weights == 0:
            raise self.error(f"{shown} has shape {list(shape)}, expected no dimension of 0")
        row = shape[-1] if shape else 1
        if row % kind.block_size:
            raise self.error(
                f"{shown} has rows of {row} weights, "
                f"expected a multiple of {kind.block_size}, the block of {kind.name}"
            )
        return TensorInfo(name, shape, kind.name, num_weights // kind.block_size * kind.block_bytes, offset)

    def placed(self, relative: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors with offsets from the start of the file, none outside it, none over another."""
        data_start = -(-self.pos // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for info in relative.values():
            shown = f"tensor {quoted(info.name)}"
            if info.offset % alignment:
                raise self.error(
                    f"{shown} has offset {info.offset}, expected a multiple of the alignment {alignment}"
                )
            start = data_start + info.offset
            end = start + info.num_bytes
            if end > self.size:
                raise self.error(
                    f"{shown} ({info.type} {list(info.shape)}) ends at byte {end}, "
                    f"and the file ends at {self.size}: truncated?"
                )
            placed[info.name] = replace(info, offset=start)
        in_order = sorted(placed.values(), key=lambda info: info.offset)
        for before, after in pairwise(in_order):
            end = before.offset + before.num_bytes
            if end > after.offset:
                raise self.error(
                    f"tensor {quoted(after.name)} at byte {after.offset} overlaps "
                    f"tensor {quoted(before.name)}, which ends at {end}"
                )
        return placed

    # Values. Each method reads at `self.pos` and moves it, and says what it was reading if that is not there.

    def number(self, form: struct.Struct, what: str) -> Any:
        if self.pos + form.size > self.size:
            raise self.error(f"ends at byte {self.size}, inside {what}: truncated?")
        (value,) = form.unpack_from(self.buffer, self.pos)
        self.pos += form.size
        return value

    def string(self, what: str) -> str:
        length = self.number(_U64, what)
        start = self.pos
        self.skip(length, what)
        return self.text(self.buffer[start : self.pos], what)

    def value(self, kind: int, key: str) -> Any:
        what = f"the value of key {quoted(key)}"
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.unread_array(what)
        if kind not in _SCALARS:
            raise self.error(f"key {quoted(key)} has value type {kind}, expected 0 to 12")
        return self.number(_SCALARS[kind], what)

    def unread_array(self, what: str, depth: int = 1) -> _Array:
        """Walk over an array, checking it, without keeping its elements."""
        if depth > MAX_NESTING:
            raise self.error(f"{what} has arrays nested more than {MAX_NESTING} deep, which is not supported")
        kind = self.number(_U32, what)
        count = self.number(_U64, what)
        if kind not in _MIN_ELEMENT_BYTES:
            raise self.error(f"{what} is an array of type {kind}, expected 0 to 12")
        self.fits(count, _MIN_ELEMENT_BYTES[kind], f"{what} announces", "elements")
        start = self.pos
        if kind == _STRING:
            self.skip_strings(count, what)
        elif kind == _ARRAY:
            for _ in range(count):
                self.unread_array(what, depth + 1)
        else:
            self.skip(count * _SCALARS[kind].size, what)
        return _Array(start, self.pos, kind, count)

    def skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.pos:
            raise self.error(
                f"{what} announces {num_bytes} bytes, and {self.size - self.pos} are left in the file: "
                "damaged or truncated"
            )
        self.pos += num_bytes

    def skip_strings(self, count: int, what: str) -> None:
        """A tight loop: vocabularies have hundreds of thousands of strings, walked over at every start."""
        unpack, buffer, pos, size = _U64.unpack_from, self.buffer, self.pos, self.size
        for index in range(count):
            if pos + 8 > size:
                raise self.error(f"ends at byte {size}, inside element {index} of {what}: truncated?")
            pos += 8 + unpack(buffer, pos)[0]
            if pos > size:
                raise self.error(
                    f"element {index} of {what} reaches past the end of the file: damaged or truncated"
                )
        self.pos = pos

    def fits(self, count: int, min_bytes: int, what: str, things: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything is made of it."""
        left = self.size - self.pos
        if count * min_bytes > left:
            raise self.error(
                f"{what} {count} {things}, more than {left} bytes, the rest of the file, can hold: damaged"
            )

    # Arrays, when somebody wants their elements. They were walked over at opening, so their bounds are right.

    def array(self, key: str, array: _Array) -> list[Any]:
        what = f"the value of key {quoted(key)}"
        if array.kind == _STRING:
            return self.strings(array, what)
        if array.kind == _ARRAY:
            inner = _Parser(
                self.path, self.buffer
            )  # a position of its own: another thread may be reading, too
            inner.pos = array.start
            return [self.array(key, inner.unread_array(what)) for _ in range(array.length)]
        numbers = np.frombuffer(self.buffer, _SCALARS[array.kind].format, array.length, array.start)
        result: list[Any] = numbers.tolist()
        return result

    def strings(self, array: _Array, what: str) -> list[str]:
        data = self.buffer[array.start : array.end]
        unpack, pos, found = _U64.unpack_from, 0, []
        for _ in range(array.length):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            found.append(self.text(data[start:pos], what))
        return found

    def text(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {quoted(data)}") from None
