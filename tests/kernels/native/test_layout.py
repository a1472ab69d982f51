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

LAYOUT_VERSION = 3
DIGESTS = {
    "F32": "120b4759f66fe872",
    "F16": "596d09f4725bd5fc",
    "BF16": "9d987be81192755f",
    "Q4_0": "7c9ca80a99fd8105",
    "Q4_1": "391c433e2bc6e877",
    "Q5_0": "862db2f28f0c55dc",
    "Q5_1": "0e817670442e981c",
    "Q8_0": "16e48580533f72c0",
    "IQ4_NL": "f283ed993063825a",
    "IQ4_XS": "bf48d68f8cd77e78",
    "Q3_K": "7bbb9f5caffbbb87",
    "Q4_K": "0e7019d410646fc2",
    "Q5_K": "142fc616ea73c825",
    "Q6_K": "e73a47fb9dbe99be",
    "q8": "2bfa1519fef094cf",
    "q4": "1c33a2e5844651ed",
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
