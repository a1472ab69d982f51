"""How many threads numpy's matrix products use.

numpy has no call for it, and the environment variables are read before any of our code runs; but the OpenBLAS
that its wheels bring has one, under a name that says how it was built.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from mainspring.base.log import get_logger

logger = get_logger(__name__)

SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def set_blas_threads(num_threads: int) -> bool:
    """Whether it could be done; if not, a warning says so."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for library in sorted({line.split()[-1] for line in lines if "openblas" in line}):
        loaded = ctypes.CDLL(library)
        for setter in SETTERS:
            if hasattr(loaded, setter):
                getattr(loaded, setter)(num_threads)
                return True
    logger.warning(
        "num_threads %d: this numpy does not let its threads be set; set OMP_NUM_THREADS instead", num_threads
    )
    return False
