"""`mainspring doctor`: what it found on this machine, and what that means for a model. It changes nothing."""

from __future__ import annotations

import json
import os
import platform
from importlib.util import find_spec
from typing import Any

from mainspring import __version__
from mainspring.base.config import EngineArgs
from mainspring.base.errors import CheckpointError
from mainspring.base.memory import free_memory_bytes
from mainspring.cli.dialect import Parser, add_common_flags, add_engine_flags, engine_arguments


def run(argv: list[str]) -> int:
    parser = Parser("doctor", "What mainspring found on this machine.", ("", "--model ./my.gguf"), argv)
    add_engine_flags(parser, only=("model",))
    add_common_flags(parser)
    given = parser.read(argv)
    found = examine(EngineArgs(**engine_arguments(given)).model)
    if given.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        for line in value if isinstance(value, list) else [value]:
            print(f"{name:<12} {line}")
            name = ""
    return 0


def examine(model: str) -> dict[str, Any]:
    """Everything, in words."""
    return {
        "mainspring": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "numpy": _numpy(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{free_memory_bytes() / 2**30:.1f} GiB free",
        "kernels": _kernels(),
        "model": _weights(model),
        "cache": _cache(),
    }


def _numpy() -> str:
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    forced = os.environ.get("OPENBLAS_CORETYPE")
    note = f", made to use its kernels for {forced} by OPENBLAS_CORETYPE" if forced else ""
    return f"{np.__version__} with {blas['name']} {blas['version']}{note}"


def _kernels() -> str:
    if find_spec("mainspring_native") is None:
        return "numpy (mainspring-native is not installed)"
    return "native"


def _weights(model: str) -> str:
    """How the model's weights would be held: as float32 if that fits, else as they are, which is slow."""
    import math

    from mainspring.checkpoint.catalog import resolve_model
    from mainspring.checkpoint.gguf import GGUFFile
    from mainspring.models.weights import MEMORY_SHARE

    try:
        with GGUFFile(resolve_model(model)) as file:
            needed = 4 * sum(math.prod(file.info(name).shape) for name in file.tensor_names)
    except CheckpointError as error:
        return str(error)
    allowed = MEMORY_SHARE * free_memory_bytes()
    sizes = f"{needed / 2**30:.2f} GiB as float32, {allowed / 2**30:.1f} GiB may be used"
    if needed <= allowed:
        return f"{model}: fits ({sizes})"
    return f"{model}: slow, for its weights are dequantised again in every step ({sizes})"


def _cache() -> list[str]:
    from mainspring.checkpoint.catalog import default_cache_dir, list_models

    here = [f"{entry.name}: {path}" for entry, path in list_models() if path]
    return [str(default_cache_dir()), *(here or ["no model yet; mainspring pull lists what there is"])]
