"""Tensors that a file has not as such: rows of a fused one, one turned over, one with a constant added.

Theory of operation. `Views` stands before a source and answers for tensors that are made from the source's;
the source's own that were used for them are no longer seen. Rows of a file's type stay in that type, so a
quantised matrix that was fused in the file is packed as if it had never been. What changes the order or the
values of elements is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mainspring.checkpoint.blocks import TYPES_BY_NAME, are_finite, decode_blocks

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class TensorInfo(Protocol):
    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, rows first."""

    @property
    def type(self) -> str: ...


class TensorSource(Protocol):
    """Where tensors come from: `checkpoint.gguf.GGUFFile`, `checkpoint.folder.ModelFolder`, `Views`."""

    @property
    def tensor_names(self) -> list[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        """The values as float32 in `info(name).shape`, into `out` if given."""

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        """Rows [begin, end) of a matrix as float32."""

    def raw(self, name: str) -> Bytes:
        """The bytes of a tensor as the file has them."""

    def is_finite(self, name: str) -> bool:
        """Whether all values are numbers, neither NaN nor infinite."""

    def drop_pages(self) -> None:
        """What was read need not stay in memory."""


@dataclass(frozen=True, slots=True)
class View:
    """Of `tensor`, turned over if `transpose`: rows [begin, end), of these some columns, as a vector if
    `flat`, with `plus` added. A tensor of three dimensions counts as its matrices one below the other.
    """

    tensor: str
    begin: int = 0
    end: int | None = None
    columns: tuple[int, int] | None = None
    transpose: bool = False
    plus: float = 0.0
    flat: bool = False  # a matrix of one row is a vector
    as_row: bool = False  # a vector is a matrix of one row
    # A table of kinds of tokens: all rows follow again, with its second row less its first one added.
    second_kind: str | None = None

    @property
    def is_changed(self) -> bool:
        """More than a piece: its numbers are made anew, as float32."""
        return bool(self.transpose or self.plus or self.flat or self.as_row or self.second_kind)


@dataclass(frozen=True, slots=True)
class _Info:
    shape: tuple[int, ...]
    type: str


class Views:
    """A `TensorSource` of the source's tensors, except those that views are made of, and of the views.

    A view may have the name of its tensor. A view that ends behind its tensor's rows or columns has those
    there are: whoever checks shapes finds too few.
    """

    def __init__(self, source: TensorSource, views: Mapping[str, View]) -> None:
        self._source = source
        self._views = views

    @property
    def tensor_names(self) -> list[str]:
        used = {view.tensor for view in self._views.values()}
        held = set(self._source.tensor_names)
        own = [name for name in self._source.tensor_names if name not in used]
        return own + [name for name, view in self._views.items() if view.tensor in held]

    def info(self, name: str) -> TensorInfo:
        view = self._views.get(name)
        if view is None:
            return self._source.info(name)
        info = self._source.info(view.tensor)
        shape = _as_matrix(info.shape)[:: -1 if view.transpose else 1]
        shape = (_length(shape[0], view.begin, view.end), *shape[1:])
        if view.columns is not None and len(shape) == 2:
            shape = (shape[0], _length(shape[1], *view.columns))
        if view.flat and shape[:1] == (1,):
            shape = shape[1:]
        if view.as_row and len(shape) == 1:
            shape = (1, *shape)
        if view.second_kind is not None:
            shape = (2 * shape[0], *shape[1:])
        cut = view.columns is not None and not _cuts_no_block(view.columns, info)
        return _Info(shape, "F32" if view.is_changed or cut else info.type)

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        view = self._views.get(name)
        if view is None:
            return self._source.dequantise(name, out)
        shape = self.info(name).shape
        if not view.is_changed and len(shape) == 2:
            values = self.dequantise_rows(name, 0, shape[0])
        else:
            values = self._source.dequantise(view.tensor)
            values = values.reshape(_as_matrix(values.shape))
            values = (values.T if view.transpose else values)[view.begin : view.end]
            values = values if view.columns is None else values[:, slice(*view.columns)]
            if view.second_kind is not None:
                kinds = self._source.dequantise(view.second_kind)
                values = np.concatenate([values, values + (kinds[1] - kinds[0])])
            values = values.reshape(shape)
            values = values + np.float32(view.plus) if view.plus else values
        if out is None:
            return np.ascontiguousarray(values)
        out[...] = values
        return out

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        view = self._views.get(name)
        if view is None:
            return self._source.dequantise_rows(name, begin, end)
        if view.is_changed:
            return self.dequantise(name)[begin:end]
        rows = self._source_rows(view.tensor, view.begin + begin, view.begin + end)
        return rows if view.columns is None else np.ascontiguousarray(rows[:, slice(*view.columns)])

    def raw(self, name: str) -> Bytes:
        view = self._views.get(name)
        if view is None:
            return self._source.raw(name)
        info = self._source.info(view.tensor)
        if view.is_changed or self.info(name).type != info.type:
            return self.dequantise(name).reshape(-1).view(np.uint8)
        num_rows = _as_matrix(info.shape)[0]
        rows = self._source.raw(view.tensor).reshape(num_rows, -1)[view.begin : view.end]
        if view.columns is not None:
            row_bytes, num_columns = rows.shape[1], info.shape[-1]
            begin, end, _ = slice(*view.columns).indices(num_columns)
            rows = rows[:, begin * row_bytes // num_columns : end * row_bytes // num_columns]
        return rows.reshape(-1)

    def is_finite(self, name: str) -> bool:
        view = self._views.get(name)
        if view is None or view.is_changed:
            return self._source.is_finite(name if view is None else view.tensor)
        info = self._source.info(view.tensor)
        if len(info.shape) < 3:
            return self._source.is_finite(view.tensor)
        # One matrix of many: each is looked at once, not all of them for each.
        raw = self._source.raw(view.tensor).reshape(_as_matrix(info.shape)[0], -1)[view.begin : view.end]
        return are_finite(TYPES_BY_NAME[info.type], raw.reshape(-1))

    def drop_pages(self) -> None:
        self._source.drop_pages()

    def _source_rows(self, tensor: str, begin: int, end: int) -> Floats:
        info = self._source.info(tensor)
        if len(info.shape) == 2:
            return self._source.dequantise_rows(tensor, begin, end)
        num_rows, width = _as_matrix(info.shape)
        raw = self._source.raw(tensor).reshape(num_rows, -1)[begin:end]
        out = np.empty((len(raw), width), np.float32)
        decode_blocks(TYPES_BY_NAME[info.type], raw.reshape(-1), out)
        return out


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else tuple(shape)


def _length(whole: int, begin: int, end: int | None) -> int:
    return len(range(*slice(begin, end).indices(whole)))


def _cuts_no_block(columns: tuple[int, int], info: TensorInfo) -> bool:
    """Whether these columns are whole blocks of the tensor's type."""
    kind = TYPES_BY_NAME.get(info.type)
    begin, end, _ = slice(*columns).indices(info.shape[-1])
    return kind is not None and begin % kind.block_size == 0 and end % kind.block_size == 0
