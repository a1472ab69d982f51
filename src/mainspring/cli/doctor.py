"""`mainspring doctor`: what it found on this machine, and what that means for a model. It changes nothing.

What was found is numbers and names, which `--json` prints as they are; for people they become sentences.
"""

from __future__ import annotations

import json
import math
import os
import platform
from typing import Any

import msgspec

from mainspring import __version__
from mainspring.base.config import EngineArgs, usable_cores
from mainspring.base.errors import CheckpointError
from mainspring.base.memory import free_memory_bytes
from mainspring.cli.dialect import Parser, add_common_flags, add_engine_flags, engine_arguments


class ModelFound(msgspec.Struct, kw_only=True):
    """A model and the memory that its weights would take."""

    name: str
    problem: str | None = None  # why it cannot be opened; then nothing below is known
    float32_bytes: int | None = None
    allowed_bytes: int | None = None
    fits: bool | None = None  # else its weights are dequantised again in every step, which is slow

    def words(self) -> str:
        if self.float32_bytes is None or self.allowed_bytes is None:
            return str(self.problem)
        sizes = (
            f"{self.float32_bytes / 2**30:.2f} GiB as float32, "
            f"{self.allowed_bytes / 2**30:.1f} GiB may be used"
        )
        if self.fits:
            return f"{self.name}: fits ({sizes})"
        return f"{self.name}: slow, for its weights are dequantised again in every step ({sizes})"


class Found(msgspec.Struct, kw_only=True):
    """Everything, as programs read it."""

    mainspring: str
    python: str
    system: str
    machine: str
    numpy: str
    blas: str
    openblas_coretype: str | None  # set in the environment: OpenBLAS uses the kernels of that processor
    num_usable_cores: int
    num_cores: int | None
    free_memory_bytes: int
    kernels: str  # "native" or "numpy"
    variant: str | None = None  # of the native kernels, the one that would be used
    variants_gops: dict[str, float] = {}  # what a short measurement says of each that runs here
    why_not_native: str | None = None
    model: ModelFound
    cache_dir: str
    cached_models: dict[str, str]  # path by name

    def words(self) -> dict[str, list[str]]:
        """As people read it: lines under a short name."""
        forced = self.openblas_coretype
        note = f", made to use its kernels for {forced} by OPENBLAS_CORETYPE" if forced else ""
        here = [f"{name}: {path}" for name, path in self.cached_models.items()]
        return {
            "mainspring": [self.mainspring],
            "python": [f"{self.python} on {self.system} {self.machine}"],
            "numpy": [f"{self.numpy} with {self.blas}{note}"],
            "cores": [f"{self.num_usable_cores} usable of {self.num_cores}"],
            "memory": [f"{self.free_memory_bytes / 2**30:.1f} GiB free"],
            "kernels": [self._kernels()],
            "model": [self.model.words()],
            "cache": [self.cache_dir, *(here or ["no model yet; mainspring pull lists what there is"])],
        }

    def _kernels(self) -> str:
        if self.variant is None:
            return f"numpy: {self.why_not_native}"
        measured = ", ".join(f"{name} {gops:.0f}" for name, gops in self.variants_gops.items())
        return f"native {self.variant} (GOP/s of one thread, measured now: {measured})"


def run(argv: list[str]) -> int:
    parser = Parser("doctor", "What mainspring found on this machine.", ("", "--model ./my.gguf"), argv)
    add_engine_flags(parser, only=("model",))
    add_common_flags(parser)
    given = parser.read(argv)
    found = examine(EngineArgs(**engine_arguments(given)).model)
    if found.model.problem and hasattr(given, "model"):  # one that was asked for; the default may be missing
        raise CheckpointError(found.model.problem)
    if given.json:
        print(json.dumps(msgspec.to_builtins(found)))
        return 0
    for name, lines in found.words().items():
        for line in lines:
            print(f"{name:<12} {line}")
            name = ""
    return 0


def examine(model: str) -> Found:
    import numpy as np

    from mainspring.checkpoint.catalog import default_cache_dir, list_models

    numpy_config: Any = np.show_config(mode="dicts")
    blas = numpy_config["Build Dependencies"]["blas"]
    return Found(
        mainspring=__version__,
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        numpy=np.__version__,
        blas=f"{blas['name']} {blas['version']}",
        openblas_coretype=os.environ.get("OPENBLAS_CORETYPE") or None,
        num_usable_cores=usable_cores(),
        num_cores=os.cpu_count(),
        free_memory_bytes=free_memory_bytes(),
        **_kernels(),
        model=_model(model),
        cache_dir=str(default_cache_dir()),
        cached_models={entry.name: str(path) for entry, path in list_models() if path},
    )


def _kernels() -> dict[str, Any]:
    from mainspring.kernels.native import library, measured_variants, why_not

    if library() is None:
        return {"kernels": "numpy", "why_not_native": why_not()}
    measured = dict(measured_variants())
    return {
        "kernels": "native",
        "variant": max(measured, key=measured.__getitem__),
        "variants_gops": measured,
    }


def _model(name: str) -> ModelFound:
    """Weights are held as float32 if that fits, else as they are in the file."""
    from mainspring.checkpoint.catalog import resolve_model
    from mainspring.checkpoint.gguf import GGUFFile
    from mainspring.models.weights import MEMORY_SHARE

    try:
        with GGUFFile(resolve_model(name)) as file:
            float32_bytes = 4 * sum(math.prod(file.info(tensor).shape) for tensor in file.tensor_names)
    except CheckpointError as error:
        return ModelFound(name=name, problem=str(error))
    allowed_bytes = int(MEMORY_SHARE * free_memory_bytes())
    return ModelFound(
        name=name,
        float32_bytes=float32_bytes,
        allowed_bytes=allowed_bytes,
        fits=float32_bytes <= allowed_bytes,
    )
