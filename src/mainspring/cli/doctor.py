"""`mainspring doctor [MODEL]`: what was found on this machine, and what a model would take of it.

What was found is numbers and names, which `--json` prints as they are; for people they become sentences. A
model that would be refused is a mistake to be told: the report comes first, then the line that says so.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mainspring import __version__
from mainspring.base.config import EngineArgs, usable_cores
from mainspring.base.cores import allowed_cores, cpu_quota
from mainspring.base.errors import CheckpointError, ConfigError
from mainspring.base.log import set_up_logging
from mainspring.base.memory import free_memory_bytes
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags, add_engine_flags, log_level, model_argument

if TYPE_CHECKING:
    from mainspring.cli.forecast import Forecast, Work

EXAMPLES = ("", "smollm2-135m", "./my.gguf --quantization q8 --max-model-len 4k --json")
# What kernels care for, as the system names it (x86 in `flags`, ARM in `Features`).
INSTRUCTIONS = re.compile(r"^(sse4_2|avx\w*|fma|f16c|amx_\w+|asimd\w*|sve\w*|bf16|i8mm)$")
AS_FILE = "as the file"  # of the forms of weights, the one that no kernel keeps
MOST_MEASURED_THREADS = 8  # the time that measuring takes grows with them
USED_SHARE = 0.9  # of the parameters: below, it is worth a word
MODEL_BYTES = 96 << 20  # of weights that are read again and again while measuring


class Speed(msgspec.Struct, kw_only=True):
    """What the machine can do at best, measured now with `num_threads`, per second."""

    num_threads: int
    byte_products: float  # operations on 8-bit integers
    float_products: float  # operations on fp32
    model_reads: float  # bytes of `MODEL_BYTES`, again and again
    memory_reads: float  # bytes of more than caches hold


class Found(msgspec.Struct, kw_only=True):
    """Everything, as programs read it."""

    mainspring: str
    python: str
    system: str
    machine: str
    processor: str | None
    instructions: list[str]
    numpy: str
    blas: str
    openblas_coretype: str | None  # set in the environment: OpenBLAS uses the kernels of that processor
    num_usable_cores: int
    num_allowed_cores: int
    cpu_quota: float | None  # cores' worth of time that control groups allow
    num_cores: int | None
    free_memory_bytes: int
    kernels: str  # "native" or "numpy"
    variant: str | None = None  # of the native kernels, the one that would be used
    variants_gops: dict[str, float] = {}  # what a short measurement says of each that runs here
    why_not_native: str | None = None
    speed: Speed | None = None
    cache_dir: str
    cached_models: dict[str, str]  # path by name
    model: Forecast | None = None
    model_problem: str | None = None  # why there is no `model`

    def words(self) -> dict[str, list[str]]:
        """As people read it: lines under a short name."""
        forced = self.openblas_coretype
        note = f", made to use its kernels for {forced} by OPENBLAS_CORETYPE" if forced else ""
        here = [f"{name}: {path}" for name, path in self.cached_models.items()]
        processor = [
            self.processor or self.machine,
            *([" ".join(self.instructions)] if self.instructions else []),
        ]
        return {
            "mainspring": [self.mainspring],
            "python": [f"{self.python} on {self.system} {self.machine}"],
            "numpy": [f"{self.numpy} with {self.blas}{note}"],
            "processor": processor,
            "cores": [self._cores()],
            "memory": [f"{_size(self.free_memory_bytes)} free"],
            "kernels": self._kernels(),
            "cache": [self.cache_dir, *(here or ["no model yet; mainspring models lists what there is"])],
            "model": [self.model_problem or ""]
            if self.model is None
            else model_words(self.model, self.speed),
        }

    def _cores(self) -> str:
        limits = [f"{self.num_allowed_cores} allowed"] if self.num_allowed_cores != self.num_cores else []
        if self.cpu_quota is not None:
            limits.append(f"time of {self.cpu_quota:g} by the control group's quota")
        return f"{self.num_usable_cores} usable of {self.num_cores}" + (
            f" ({', '.join(limits)})" if limits else ""
        )

    def _kernels(self) -> list[str]:
        if self.variant is None:
            return [f"numpy: {self.why_not_native}"]
        measured = ", ".join(f"{name} {gops:.0f}" for name, gops in self.variants_gops.items())
        lines = [f"native {self.variant} (GOP/s of one thread, measured now: {measured})"]
        if (speed := self.speed) is not None:
            threads = "1 thread" if speed.num_threads == 1 else f"{speed.num_threads} threads"
            lines.append(
                f"{threads} at best: {speed.byte_products / 1e9:.0f} GOP/s in 8 bit, "
                f"{speed.float_products / 1e9:.0f} in fp32; memory gives {speed.memory_reads / 1e9:.0f} GB/s"
            )
        return lines


def model_words(model: Forecast, speed: Speed | None) -> list[str]:
    """A model's lines."""
    held = "as they are in the file" if model.weights_form == AS_FILE else f"held as {model.weights_form}"
    per_token = f"{model.kv_bytes_per_token / 1024:.1f} KiB for each token ({model.kv_cache_dtype})"
    work, used = model.work, ""
    if work is not None and work.num_parameters < USED_SHARE * model.num_parameters:
        used = f", of which a token uses {work.num_parameters / 1e6:.0f}"
    lines = [
        f"{model.name}: {model.architecture}, {model.num_parameters / 1e6:.0f} million parameters{used}",
        f"weights: {_size(model.weights_bytes)}, {held} ({model.kernels} kernels)",
        f"keys and values: {per_token}; "
        f"a pool of {_size(model.kv_pool_bytes)} holds {model.num_kv_tokens:,} tokens",
    ]
    if model.max_model_len:
        knows = f"the model knows {model.max_position_embeddings:,}"
        lines.append(
            f"requests: up to {model.max_model_len:,} tokens ({knows}), "
            f"{model.max_concurrency:.1f} of that length at once"
        )
    if not model.is_causal:
        lines.append("chunked prefill and prefix caching are off: it has layers that are not causal")
    if speed is not None and work is not None:
        lines.append(f"at best: {_ceilings(model, work, speed)}")
    lines += [f"warning: {words}" for words in model.warnings]
    return lines + [f"refused: {words}" for words in model.problems]


def _ceilings(model: Forecast, work: Work, speed: Speed) -> str:
    """Every weight that a token uses is read for one that is written, and multiplied for one that is read."""
    read_s = work.byte_operations / speed.byte_products + work.float_operations / speed.float_products
    read = f"{1 / read_s:,.0f} tokens/s of {'prompts' if model.can_generate else 'texts'} read"
    if not model.can_generate:
        return read
    reads = speed.model_reads if model.weights_bytes <= MODEL_BYTES else speed.memory_reads
    return f"{reads / work.read_bytes:,.0f} tokens/s written by one request, {read}"


def run(argv: list[str]) -> int:
    parser = Parser(
        "doctor", "What mainspring found on this machine, and what a model would take.", EXAMPLES, argv
    )
    parser.usage = "%(prog)s [MODEL] [flags]"
    group = parser.add_argument_group("the model")
    group.add_argument("model_tag", nargs="?", metavar="MODEL", help="to be reckoned with; nothing is loaded")
    add_engine_flags(parser)
    add_common_flags(parser)
    given = parser.read(argv)
    set_up_logging(log_level(given))
    asked = model_argument(given)
    args = EngineArgs.from_mapping(asked)
    found = examine(args)
    if found.model_problem and "model" in asked:  # the default need not be here
        raise CheckpointError(found.model_problem)
    if given.json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        _print(found.words())
    if found.model is not None and found.model.problems:
        raise ConfigError(f"{args.model} would be refused with these settings: {found.model.problems[0]}")
    return 0


def _print(words: dict[str, list[str]]) -> None:
    for name, lines in words.items():
        for line in lines:
            print(f"{name:<12} {line}")
            name = ""


def examine(args: EngineArgs) -> Found:
    import numpy as np

    from mainspring.checkpoint.catalog import default_cache_dir, list_models

    numpy_config: Any = np.show_config(mode="dicts")
    blas = numpy_config["Build Dependencies"]["blas"]
    processor, instructions = read_processor(Path("/proc/cpuinfo"))
    model, problem = _model(args)
    return Found(
        mainspring=__version__,
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        processor=processor,
        instructions=instructions,
        numpy=np.__version__,
        blas=f"{blas['name']} {blas['version']}",
        openblas_coretype=os.environ.get("OPENBLAS_CORETYPE") or None,
        num_usable_cores=usable_cores(),
        num_allowed_cores=allowed_cores(),
        cpu_quota=cpu_quota(),
        num_cores=os.cpu_count(),
        free_memory_bytes=free_memory_bytes(),
        **_kernels(args),
        cache_dir=str(default_cache_dir()),
        cached_models={entry.name: str(path) for entry, path in list_models() if path},
        model=model,
        model_problem=problem,
    )


def read_processor(cpuinfo: Path) -> tuple[str | None, list[str]]:
    """Its name and the instruction sets that kernels care for, of the first core."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:  # not on this system
        return None, []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags: Sequence[str] = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name"), [flag for flag in flags if INSTRUCTIONS.match(flag)]


def _kernels(args: EngineArgs) -> dict[str, Any]:
    from mainspring.kernels.native import library, measured_variants, why_not

    if (native := library()) is None:
        return {"kernels": "numpy", "why_not_native": why_not()}
    measured = dict(measured_variants())
    variant = max(measured, key=measured.__getitem__)
    num_threads = min(args.num_threads or usable_cores(), MOST_MEASURED_THREADS)
    ceilings = native.measure_ceilings(variant, num_threads)[-1]
    return {
        "kernels": "native",
        "variant": variant,
        "variants_gops": measured,
        "speed": Speed(**ceilings),
    }


def _model(args: EngineArgs) -> tuple[Forecast | None, str | None]:
    from mainspring.cli.forecast import forecast

    try:
        return forecast(args), None
    except CheckpointError as error:
        return None, str(error)


def _size(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
