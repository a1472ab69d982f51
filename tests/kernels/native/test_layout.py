"""Packed bytes lie on disks for later starts, so a library that packs in another way must say so.

Images are named by `LAYOUT_VERSION` (native/csrc/pack.h) among other things. Where a digest here changes,
count the version up, and put what this test prints in the place of `DIGESTS`.
"""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import pytest

native = pytest.importorskip("mainspring_native")

LAYOUT_VERSION = 1
DIGESTS = {
    "F32": "120b4759f66fe872",
    "F16": "596d09f4725bd5fc",
    "BF16": "596d09f4725bd5fc",
    "Q4_0": "c2c58b6cdd67b221",
    "Q4_1": "cdcdb4e9a41ca55f",
    "Q5_0": "48ec3d68a5611091",
    "Q5_1": "b570b8d72e89569a",
    "Q8_0": "590751329f91d52f",
    "IQ4_NL": "547cb59a973af1a2",
    "IQ4_XS": "7e45312349508dc6",
    "Q3_K": "7234e5779b9c9644",
    "Q4_K": "89d8a4decce16386",
    "Q5_K": "1be9db0c8abe9ffa",
    "Q6_K": "68a71c7c8516bd5b",
    "q8": "efb13ee83671edc8",
    "q4": "a9f1732cc45ae5a8",
}
ROWS, COLUMNS = 37, 512  # a panel that is not full, two blocks of the longest kind


def packed(source: str) -> np.ndarray:
    """All bytes of a matrix whose source bytes count up."""
    matrix = native.Matrix(source, ROWS, COLUMNS)
    memory = np.zeros(matrix.num_bytes + 64, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: matrix.num_bytes]
    matrix.bind(memory)
    if source in ("q8", "q4"):
        counting = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
        matrix.pack_floats(counting % 97 - 48, 0, ROWS)
    else:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[source]]
        matrix.pack((np.arange(ROWS * COLUMNS // block * block_bytes) % 61).astype(np.uint8), 0, ROWS)
    return memory


SOURCES = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "IQ4_NL",
    "IQ4_XS",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "q8",
    "q4",
]


def test_the_version_is_counted_up_when_bytes_change() -> None:
    found = {source: hashlib.sha256(packed(source)).hexdigest()[:16] for source in SOURCES}
    print(found)
    assert found == DIGESTS
    assert native.LAYOUT_VERSION == LAYOUT_VERSION
