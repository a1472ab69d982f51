"""Safetensors files: a table of tensors in JSON, and the tensors, memory-mapped; one file or shards.

Reading happens in two depths: opening walks the table and judges it, in time and memory linear in the file's
size whatever the table says; `dequantise(name)` touches the pages of one tensor.

The table is walked entry by entry, and each entry is decoded as what it must be: a general JSON parser would
build whatever a hostile table holds, and forget a name that occurs twice.

Invariants after a successful open: tensor names are unique; the tensors lie one after another and fill the
file to its last byte, without gaps or overlaps; each is as long as its type and shape say, and of a type in
`ELEMENT_TYPES`.

Weights are float32, float16 or bfloat16 (`dequantise`). Other types are what quantised formats
(`checkpoint/quantised.py`) store numbers in: `elements` gives them.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.blocks import Floats
from mainspring.checkpoint.mapping import MappedFile
from mainspring.checkpoint.quoting import quoted
from mainspring.checkpoint.tensors import Closing, StoredTensors, TensorInfo

LENGTH_BYTES = 8  # of the table's length, before the table
MAX_DIMS = 8
MAX_FILE_NAME = 255  # characters; no file system has more
MAX_LENGTH = 2**48  # of a dimension: a product of MAX_DIMS of them is still a small integer
WEIGHT_TYPES: Final = ("F32", "F16", "BF16")
# Numpy has neither bfloat16 nor 8-bit floats: these are their bits.
ELEMENT_TYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "U16": "<u2", "I16": "<i2",
        "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8",
        "F64": "<f8",
    }.items()
}  # fmt: skip
INDEX_FILE = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"

_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OBJECT = rb'\{[^{}"]*+(?:' + _STRING + rb'[^{}"]*+)*+\}'  # without objects inside
_BEGIN = re.compile(_SPACE + rb"\{")
_ENTRY = re.compile(
    _SPACE + b"(" + _STRING + b")" + _SPACE + b":" + _SPACE + b"(" + _OBJECT + b")" + _SPACE + b"([,}])",
    re.DOTALL,
)
_EMPTY = re.compile(_SPACE + rb"\}")
_END = re.compile(_SPACE)
ENTRY_QUOTES = 8  # quotation marks in a tensor's entry: three keys and the type's name, each once


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_read_entry = msgspec.json.Decoder(_Entry)
_read_text = msgspec.json.Decoder(str)
_read_notes = msgspec.json.Decoder(dict[str, str])


class ElementSource(Protocol):
    """Tensors of Hugging Face form: a `models.families.TensorSource`, and the numbers as they are stored."""

    @property
    def tensor_names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def raw(self, name: str) -> npt.NDArray[np.uint8]: ...

    def elements(self, name: str) -> npt.NDArray[Any]: ...

    def dequantise(self, name: str, out: Floats | None = None) -> Floats: ...

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats: ...

    def is_finite(self, name: str) -> bool: ...

    def drop_pages(self) -> None: ...

    def close(self) -> None: ...


class SafetensorsFile(MappedFile, StoredTensors):
    """One safetensors file, open for reading. Safe to use from several threads until it is closed.

    Raises `CheckpointError`, one line that names the file and the tensor at fault, if anything in its table
    is damaged or not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path), "a safetensors file")
        try:
            self._tensors = _Table(self.path, self.buffer).tensors()
        except BaseException:
            self.close()
            raise

    @property
    def tensor_names(self) -> list[str]:
        """In the order of the file's table."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: no tensor {quoted(name)} among its {len(self._tensors)}")
        return self._tensors[name]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        info = self.info(name)
        return self.bytes[info.offset : info.offset + info.num_bytes]

    def elements(self, name: str) -> npt.NDArray[Any]:
        """A tensor of any type as it is stored: a read-only view in its shape; see `ELEMENT_TYPES`."""
        info = self.info(name)
        return self.raw(name).view(ELEMENT_TYPES[info.type]).reshape(info.shape)

    def weight(self, name: str) -> TensorInfo:
        info = self.info(name)
        if info.type not in WEIGHT_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)} has type {info.type}, "
                f"which is not supported as a weight; supported: {', '.join(WEIGHT_TYPES)}"
            )
        return info


class RoutedTensors(Closing):
    """Tensors that lie in several sources, as one. Methods as `SafetensorsFile`."""

    @property
    @abstractmethod
    def tensor_names(self) -> list[str]: ...

    @abstractmethod
    def source_of(self, name: str) -> ElementSource:
        """Where a tensor is. Raises `CheckpointError` for a name that there is not."""

    @property
    @abstractmethod
    def sources(self) -> Sequence[ElementSource]: ...

    def info(self, name: str) -> TensorInfo:
        return self.source_of(name).info(name)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.source_of(name).raw(name)

    def elements(self, name: str) -> npt.NDArray[Any]:
        return self.source_of(name).elements(name)

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        return self.source_of(name).dequantise(name, out)

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        return self.source_of(name).dequantise_rows(name, begin, end)

    def is_finite(self, name: str) -> bool:
        return self.source_of(name).is_finite(name)

    def drop_pages(self) -> None:
        for source in self.sources:
            source.drop_pages()

    def close(self) -> None:
        for source in self.sources:
            source.close()


class ShardedSafetensors(RoutedTensors):
    """The files that an index (`model.safetensors.index.json`) names, as one.

    Every tensor is where the index says, and every tensor of a shard is in the index.
    """

    def __init__(self, index: str | os.PathLike[str]) -> None:
        self.path = Path(index)
        self._shard_of: dict[str, SafetensorsFile] = {}
        places = _read_index(self.path)
        with ExitStack() as opened:
            shards = {
                name: SafetensorsFile(self.path.parent / name) for name in dict.fromkeys(places.values())
            }
            for shard in shards.values():
                opened.callback(shard.close)
            held = {name: set(shard.tensor_names) for name, shard in shards.items()}
            for tensor, name in places.items():
                if tensor not in held[name]:
                    raise CheckpointError(
                        f"{self.path}: tensor {quoted(tensor)} should be in {name}, which does not have it"
                    )
                held[name].remove(tensor)
                self._shard_of[tensor] = shards[name]
            for name, others in held.items():
                if others:
                    raise CheckpointError(
                        f"{self.path}: tensor {quoted(min(others))} is in {name}, but not in the index"
                    )
            opened.pop_all()
        self._shards = tuple(shards.values())

    @property
    def tensor_names(self) -> list[str]:
        """In the order of the index."""
        return list(self._shard_of)

    @property
    def sources(self) -> Sequence[ElementSource]:
        return self._shards

    def source_of(self, name: str) -> ElementSource:
        if name not in self._shard_of:
            raise CheckpointError(f"{self.path}: no tensor {quoted(name)} among its {len(self._shard_of)}")
        return self._shard_of[name]


def _read_index(path: Path) -> Mapping[str, str]:
    """Tensor -> name of its file, which lies beside the index."""
    try:
        places = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(
            f"{path}: is no index of shards; expected JSON with a weight_map, the file's name for each tensor"
        ) from None
    if not places:
        raise CheckpointError(f"{path}: the weight_map is empty")
    for tensor, name in places.items():
        is_name = name.isprintable() and name != ".." and Path(name).name == name
        if not is_name or len(name) > MAX_FILE_NAME:
            raise CheckpointError(
                f"{path}: tensor {quoted(tensor)} is said to be in {quoted(name)}; "
                "expected the name of a file in the same folder"
            )
    return places


class _Table:
    """The table of one file, walked once."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.start, self.end = LENGTH_BYTES, LENGTH_BYTES  # of the table, bytes from the start of the file

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def tensors(self) -> dict[str, TensorInfo]:
        self.measure()
        found: dict[str, TensorInfo] = {}
        for name, text in self.entries():
            if name == "__metadata__":
                self.check_notes(text)
                continue
            if name in found:
                raise self.error(f"tensor {quoted(name)} occurs twice")
            found[name] = self.tensor(name, text)
        if not found:
            raise self.error("has no tensors")
        self.check_places(found)
        return found

    def measure(self) -> None:
        size = len(self.buffer)
        if size < LENGTH_BYTES:
            raise self.error(f"ends at byte {size}, inside the length of its table: truncated?")
        if self.buffer[: len(LFS_POINTER)] == LFS_POINTER:
            raise self.error("is a pointer of Git LFS, not the file itself; get it with `git lfs pull`")
        (length,) = struct.unpack_from("<Q", self.buffer)
        if length > size - LENGTH_BYTES:
            raise self.error(
                f"announces a table of {length} bytes, and {size - LENGTH_BYTES} are left in the file: "
                "is it no safetensors file, or truncated?"
            )
        self.end += length

    def entries(self) -> Iterator[tuple[str, bytes]]:
        """Each name with the text of its object."""
        begin = _BEGIN.match(self.buffer, self.start, self.end)
        if begin is None:
            raise self.misformed(self.start, "'{'")
        pos, after = begin.end(), b","
        if _EMPTY.match(self.buffer, pos, self.end):
            return
        while after == b",":
            entry = _ENTRY.match(self.buffer, pos, self.end)
            if entry is None:
                raise self.misformed(pos, "a tensor's name and its entry")
            yield self.text(entry[1], pos), entry[2]
            pos, after = entry.end(), entry[3]
        rest = _END.match(self.buffer, pos, self.end)
        assert rest is not None
        if rest.end() != self.end:
            raise self.misformed(rest.end(), "the table's end")

    def misformed(self, pos: int, expected: str) -> CheckpointError:
        found = bytes(self.buffer[pos : min(pos + 20, self.end)])
        return self.error(f"the table has {quoted(found)} at byte {pos}; expected {expected}: damaged?")

    def text(self, token: bytes, pos: int) -> str:
        try:
            return _read_text.decode(token)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self.error(f"the name {quoted(token)} at byte {pos} is not UTF-8: damaged?") from None

    def check_notes(self, text: bytes) -> None:
        try:
            _read_notes.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.error(f"'__metadata__' is no object of texts: {_one_line(error)}") from None

    def tensor(self, name: str, text: bytes) -> TensorInfo:
        shown = f"tensor {quoted(name)}"
        try:
            entry = _read_entry.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.error(f"the entry of {shown} is not as it should be: {_one_line(error)}") from None
        if text.count(b'"') != ENTRY_QUOTES:
            raise self.error(f"the entry of {shown} has a key twice")
        kind = ELEMENT_TYPES.get(entry.dtype)
        if kind is None:
            raise self.error(
                f"{shown} has type {quoted(entry.dtype)}, which is not supported; "
                f"supported: {', '.join(ELEMENT_TYPES)}"
            )
        if len(entry.shape) > MAX_DIMS:
            raise self.error(f"{shown} has {len(entry.shape)} dimensions, expected at most {MAX_DIMS}")
        if not all(1 <= length <= MAX_LENGTH for length in entry.shape):
            raise self.error(f"{shown} has shape {entry.shape}, expected dimensions of 1 or more")
        num_bytes = kind.itemsize
        for length in entry.shape:
            num_bytes *= length
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= len(self.buffer) - self.end:
            raise self.error(
                f"{shown} lies at bytes {begin} to {end} of the data, "
                f"which has {len(self.buffer) - self.end}: truncated?"
            )
        if end - begin != num_bytes:
            raise self.error(
                f"{shown} ({entry.dtype} {entry.shape}) has {end - begin} bytes, expected {num_bytes}"
            )
        return TensorInfo(name, tuple(entry.shape), entry.dtype, num_bytes, self.end + begin)

    def check_places(self, tensors: Mapping[str, TensorInfo]) -> None:
        """One after another from the first byte of the data to the last."""
        pos, before = self.end, "the table"
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            shown = f"tensor {quoted(info.name)}"
            if info.offset < pos:
                raise self.error(f"{shown} at byte {info.offset} overlaps {before}, which ends at {pos}")
            if info.offset > pos:
                raise self.error(
                    f"{shown} begins at byte {info.offset}, expected {pos}, the end of {before}: damaged?"
                )
            pos, before = info.offset + info.num_bytes, shown
        if pos != len(self.buffer):
            raise self.error(
                f"{len(self.buffer) - pos} bytes follow {before}, the last, ending at byte {pos}: damaged?"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
