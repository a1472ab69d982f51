"""What readers of model files offer: tensors by name, whole or in rows, as float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from mainspring.checkpoint.blocks import TYPES_BY_NAME, Floats, are_finite, decode_blocks


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how to read it."""

    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    type: str  # "F32", "Q4_1", ...
    num_bytes: int
    offset: int  # bytes from the start of the file that it is in


class Closing(ABC):
    """Left as a context, it is closed."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class StoredTensors(Closing):
    """Tensors that lie in a file as blocks (`blocks.py`)."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Raises `CheckpointError` for a name that the file does not have."""

    @abstractmethod
    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as they are in the file: a read-only view of [num_bytes]."""

    def weight(self, name: str) -> TensorInfo:
        """`info` of a tensor that is a weight. Raises `CheckpointError` for a type that is none."""
        return self.info(name)

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        """The values of a weight, float32 in `info(name).shape`; into `out`, C-contiguous, if given."""
        info = self.weight(name)
        if out is None:
            out = np.empty(info.shape, np.float32)
        assert out.shape == info.shape, f"out {out.shape} != {name} {info.shape}"
        assert out.dtype == np.float32, f"out is {out.dtype}"
        decode_blocks(TYPES_BY_NAME[info.type], self.raw(name), out)
        return out

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        """Rows [begin, end) of a weight with two dimensions, as float32."""
        info = self.weight(name)
        row_bytes = info.num_bytes // info.shape[0]
        out = np.empty((end - begin, info.shape[1]), np.float32)
        decode_blocks(TYPES_BY_NAME[info.type], self.raw(name)[begin * row_bytes : end * row_bytes], out)
        return out

    def is_finite(self, name: str) -> bool:
        """Whether every value of a weight is a number."""
        return are_finite(TYPES_BY_NAME[self.weight(name).type], self.raw(name))
