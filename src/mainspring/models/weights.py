"""Weights into the kernels: every tensor of a file by its role, each accounted for.

Theory of operation.
- All matrices live in one float32 arena, and a handle that stacks roles is one run of it: parts are
  dequantised straight to where they stay. Two threads do it, longest first; numpy releases the interpreter
  while it computes.
- Where the arena does not fit in memory, matrices stay as they are in the file and are dequantised at each
  use.
- Afterwards the file's own pages are dropped: they would count twice.

Missing, unknown, mis-shaped and non-finite tensors are refused by name, all shapes before any data is read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import CheckpointError
from mainspring.base.log import get_logger
from mainspring.base.memory import free_memory_bytes
from mainspring.checkpoint.quoting import quoted
from mainspring.kernels.ops import Backend, Floats, LazyWeight
from mainspring.models.families import Model
from mainspring.models.spec import ModelSpec, Part, RopeSpec, ropes, weight_table
from mainspring.models.views import TensorSource, Views

logger = get_logger(__name__)

MEMORY_SHARE = 0.7  # of what is free, that weights may take: the KV pool and the rest need some
LOAD_THREADS = 2  # more would wait for memory
ALIGNMENT = 16  # floats: a cache line


class _Job(NamedTuple):
    """A tensor to be read into its place."""

    name: str
    out: Floats


def load_weights(model: Model, source: TensorSource, ops: Backend, *, memory_bytes: int | None = None) -> str:
    """Give every weight of `model` to `ops`; answers "float32", or "by layer" where they stay quantised.

    `source` is what `tensors_of` gave.
    `memory_bytes` is how much float32 weights may take; default: `MEMORY_SHARE` of what is free.
    Raises `CheckpointError` naming the tensor at fault.
    """
    table = dict(weight_table(model.spec))
    needed = _float32_bytes(table)
    allowed = int(MEMORY_SHARE * free_memory_bytes()) if memory_bytes is None else memory_bytes
    by_layer = needed > allowed
    arrays = _arena(table, matrices=not by_layer)
    for handle, parts in table.items():
        ops.add_weight(handle, arrays[handle] if handle in arrays else _lazy(model, parts, source))
    slices = (piece for handle, array in arrays.items() for piece in _slices(table[handle], array))
    _read([_Job(model.names[part.role], rows) for part, rows in slices], source)
    source.drop_pages()
    _add_ropes(model.spec, ops, arrays.get("rope_factors"))
    if by_layer:
        logger.warning(
            "weights stay quantised and are dequantised again in every step, which is slow: as float32 they "
            "would take %.1f GiB, and %.1f GiB of memory may be used",
            needed / 2**30,
            allowed / 2**30,
        )
    return "by layer" if by_layer else "float32"


def load_vectors(model: Model, source: TensorSource, ops: Backend) -> None:
    """Only what is no matrix: norms and frequencies, for a backend that packs matrices itself."""
    table = dict(weight_table(model.spec))
    arrays = _arena(table, matrices=False)
    for handle, array in arrays.items():
        ops.add_weight(handle, array)
    slices = (piece for handle, array in arrays.items() for piece in _slices(table[handle], array))
    _read([_Job(model.names[part.role], rows) for part, rows in slices], source)
    _add_ropes(model.spec, ops, arrays.get("rope_factors"))


def dummy_weights(spec: ModelSpec, ops: Backend, seed: int = 0) -> None:
    """Random weights, the same for the same seed, as float32."""
    model, source = random_model(spec, seed)
    load_weights(model, source, ops, memory_bytes=1 << 62)


def random_model(spec: ModelSpec, seed: int) -> tuple[Model, RandomTensors]:
    """A model without a file."""
    tensors = RandomTensors(spec, seed)
    return Model(spec, {name: name for name in tensors.tensor_names}), tensors


class RandomTensors:
    """A `TensorSource` of numbers drawn from a seed and a role's name: activations stay near unit size."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._shapes = {part.role: part.shape for _, parts in weight_table(spec) for part in parts}
        self._seed = seed

    @property
    def tensor_names(self) -> list[str]:
        return list(self._shapes)

    def info(self, name: str) -> RandomInfo:
        return RandomInfo(self._shapes[name], "F32")

    def dequantise(self, name: str, out: Floats | None = None) -> Floats:
        shape = self._shapes[name]
        if out is None:
            out = np.empty(shape, np.float32)
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        rng.standard_normal(out=out, dtype=np.float32)
        out *= 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        if len(shape) == 1 and not name.endswith(".bias"):
            out += 1.0
        return out

    def dequantise_rows(self, name: str, begin: int, end: int) -> Floats:
        return self.dequantise(name)[begin:end]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        return self.dequantise(name).reshape(-1).view(np.uint8)

    def is_finite(self, name: str) -> bool:
        return True

    def drop_pages(self) -> None:
        """There are none."""


class RandomInfo(NamedTuple):
    shape: tuple[int, ...]
    type: str


def check_memory(spec: ModelSpec) -> None:
    """Raises `CheckpointError` for shapes of which memory cannot hold random weights."""
    needed, free = _float32_bytes(dict(weight_table(spec))), free_memory_bytes()
    if needed > free:
        raise CheckpointError(
            f"random weights of this shape would take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB "
            "of memory are free; use a smaller config"
        )


def rope_handle(rope: RopeSpec) -> str:
    """What a RopeSpec's frequencies are called; equal specs share them."""
    return f"rope {rope}"


def tensors_of(model: Model, source: TensorSource) -> TensorSource:
    """The source as the model's names see it. Every role has a tensor of its shape there, and every tensor a
    role. Raises `CheckpointError` naming the one that is not so.
    """
    if model.views:
        source = Views(source, model.views)
    _check_tensors(model, source)
    return source


def _check_tensors(model: Model, source: TensorSource) -> None:
    known = set(source.tensor_names)
    parts = (part for _, parts in weight_table(model.spec) for part in parts)
    wanted = {model.names[part.role]: part.shape for part in parts}
    for name, shape in wanted.items():
        if name not in known:
            raise CheckpointError(f"tensor {quoted(name)} is missing; expected shape {list(shape)}")
        found = tuple(source.info(name).shape)
        if found != shape:
            raise CheckpointError(f"tensor {quoted(name)} has shape {list(found)}; expected {list(shape)}")
    extra = sorted(known - wanted.keys() - model.ignored)
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise CheckpointError(
            f"tensor {quoted(extra[0])}{more} is in the file; {model.spec.architecture} has no place for it"
        )


def _float32_bytes(table: dict[str, tuple[Part, ...]]) -> int:
    return 4 * sum(math.prod(part.shape) for parts in table.values() for part in parts)


def _arena(table: dict[str, tuple[Part, ...]], *, matrices: bool) -> dict[str, Floats]:
    """An unwritten array for every handle (vectors only, if not `matrices`), all in one allocation.

    One allocation, because numpy asks for huge pages for large ones: fewer faults now, fewer misses later.
    """
    shapes = {
        handle: (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        for handle, parts in table.items()
        if matrices or len(parts[0].shape) == 1
    }
    padded = {handle: -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for handle, shape in shapes.items()}
    memory = np.empty(sum(padded.values()) + ALIGNMENT, np.float32)
    start = -(memory.ctypes.data // 4) % ALIGNMENT
    arrays = {}
    for handle, shape in shapes.items():
        arrays[handle] = memory[start : start + math.prod(shape)].reshape(shape)
        start += padded[handle]
    return arrays


def _slices(parts: tuple[Part, ...], array: Floats) -> Iterator[tuple[Part, Floats]]:
    """Each part with its rows of the stacked array."""
    start = 0
    for part in parts:
        yield part, array[start : start + part.shape[0]]
        start += part.shape[0]


def _lazy(model: Model, parts: tuple[Part, ...], source: TensorSource) -> LazyWeight:
    def fill(out: Floats) -> None:
        for part, rows in _slices(parts, out):
            source.dequantise(model.names[part.role], rows)

    return LazyWeight((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), fill)


def _read(jobs: list[_Job], source: TensorSource) -> None:
    def read(job: _Job) -> None:
        source.dequantise(job.name, job.out)
        with np.errstate(all="ignore"):
            finite = np.isfinite(job.out.sum())
        if not finite:
            raise CheckpointError(
                f"tensor {quoted(job.name)} holds NaN or infinity; expected finite weights: a damaged file?"
            )

    with ThreadPoolExecutor(LOAD_THREADS, "weights") as threads:
        for _ in threads.map(read, sorted(jobs, key=lambda job: -job.out.size)):
            pass


def _add_ropes(spec: ModelSpec, ops: Backend, factors: Floats | None) -> None:
    for rope in ropes(spec):
        exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
        frequencies = rope.theta**-exponents
        if rope.factors:
            frequencies /= rope.factors
        if rope.has_factors:
            assert factors is not None
            if not (factors > 0).all():
                raise CheckpointError("the rope's frequency factors are not all positive: a damaged file?")
            frequencies /= factors
        ops.add_weight(rope_handle(rope), frequencies)
