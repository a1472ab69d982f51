"""Tensors in which a file has several of a layer's matrices, one above the other."""

from __future__ import annotations

from collections.abc import Mapping

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.quoting import quoted
from mainspring.models.families.file import ModelFile
from mainspring.models.views import View


def fused_rows(
    file: ModelFile, tensor: str, rows: Mapping[str, int], *, transpose: bool = False
) -> dict[str, View]:
    """Views, in this order, of rows of `tensor`; names of parts -> how many rows each has.

    Raises `CheckpointError` unless the tensor is there and has exactly these rows (columns, if it is to be
    turned over).
    """
    if file.source is not None:
        if tensor not in file.tensors:
            raise CheckpointError(f"tensor {quoted(tensor)} is missing")
        shape, total = tuple(file.source.info(tensor).shape), sum(rows.values())
        if (shape[-1] if transpose else shape[0]) != total:
            which = "columns" if transpose else "rows"
            raise CheckpointError(
                f"tensor {quoted(tensor)} has shape {list(shape)}; expected {total} {which}"
            )
    views, begin = {}, 0
    for name, count in rows.items():
        views[name] = View(tensor, begin, begin + count, transpose=transpose)
        begin += count
    return views
