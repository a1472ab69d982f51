"""Weights into the native kernels' layout: packed once, by all threads, and kept on disk for the next start.

Theory of operation.
- Where every part of every matrix lies is decided by the model's shape and the file's tensor types alone, so
  an image that was written once can be bound without looking at the file's weights.
- Vectors (norms, frequency factors) are small and stay float32, read from the file each time.
- A file's numbers are judged when they are packed; an image holds judged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mainspring.base.errors import CheckpointError
from mainspring.base.log import get_logger
from mainspring.checkpoint.blocks import TYPES_BY_NAME, largest_group_scale
from mainspring.checkpoint.images import Image, open_image, private_memory
from mainspring.checkpoint.quoting import quoted
from mainspring.kernels.native import NativeOps, PackedWeight, library
from mainspring.kernels.ops import Floats
from mainspring.models.families import Model
from mainspring.models.spec import Part, weight_table
from mainspring.models.views import TensorSource

logger = get_logger(__name__)

PLANE = 64  # bytes: where a matrix may begin
ROWS = 256  # packed by one call: some hundred microseconds of work; a multiple of a panel
KEPT_AS_IS = "as the file"
EXPANDED = {"Q2_K": "q8"}  # no kernel has a minimum for every 16 weights
MOST_HALF = 65504.0  # the largest number in fp16
# The largest magnitude that each quantization holds. Those of 8 and 4 bits have scales and mins in fp16.
LARGEST = {"f32": float("inf"), "f16": MOST_HALF, "bf16": 3.3895e38, "q8": 127 * MOST_HALF, "q4": MOST_HALF}

# Matrices that are never quantised, nor read rounded activations: of a few rows, and what is chosen by them
# changes at once.
CHOOSING = (".router", ".shared_gate")

Progress = Callable[[int, int], None]  # (bytes packed, of how many)


@dataclass(frozen=True, slots=True)
class Placed:
    """One stacked part of a weight, and where it lies in the image."""

    handle: str
    part: Part
    tensor: str  # the file's name of it; "" for random weights
    kind: str  # the tensor type that it is packed from, or "q8" or "q4"
    matrix: Any  # mainspring_native.Matrix
    offset: int


def packed_type(tensor_type: str, quantization: str | None) -> str:
    """What a tensor of `tensor_type` is packed as: a type that the native library knows, or "q8" or "q4"."""
    match quantization:
        case None:
            return EXPANDED.get(tensor_type, tensor_type)
        case "f16" | "bf16":
            return quantization.upper()
        case _:
            return quantization


def place_weights(
    model: Model, type_of: Callable[[str], str], quantization: str | None
) -> tuple[list[Placed], int]:
    """Every matrix of the model with its place, and the bytes of all together.

    Raises `CheckpointError` for a tensor type that has no native form.
    """
    native = library()
    assert native is not None
    placed, end = [], 0
    for handle, parts in weight_table(model.spec):
        for part in parts:
            if len(part.shape) != 2:
                continue
            tensor = model.names.get(part.role, "")
            chooses = part.role.endswith(CHOOSING)
            kind = packed_type(type_of(tensor), None if chooses else quantization)
            if chooses and kind == "BF16":
                kind = "F32"
            try:
                matrix = native.Matrix(kind, *part.shape)
            except ValueError as error:
                raise CheckpointError(
                    f"tensor {quoted(tensor or part.role)}: {error}; use kernels numpy, or quantization f16"
                ) from None
            placed.append(Placed(handle, part, tensor, kind, matrix, end))
            end += -(-matrix.num_bytes // PLANE) * PLANE
    return placed, end


def pack_weights(
    model: Model,
    source: TensorSource,
    ops: NativeOps,
    path: str | None,
    quantization: str | None,
    progress: Progress | None = None,
    share: str = "",
) -> str:
    """Give every matrix of `model` to `ops`; says in a word how: the types that they are held in.

    path: the file, beside whose hash the packed image is kept; None: it is kept nowhere. share: in words,
    which part of the file's model this is, if not all.
    Raises `CheckpointError` naming the tensor that holds NaN or infinity, or what `quantization` cannot hold.
    """
    placed, num_bytes = place_weights(model, lambda tensor: source.info(tensor).type, quantization)
    if path is None:
        image = Image(private_memory(num_bytes), False)
    else:
        image = open_image(path, _packing(quantization) + share, num_bytes)
    _bind(placed, image)
    if not image.is_filled:
        try:
            _pack(placed, source, ops.num_threads, progress)
        except BaseException:
            image.drop()
            raise
        image.keep()
        source.drop_pages()
    _hand_over(placed, ops)
    return _forms(placed)


def _packing(quantization: str | None) -> str:
    """All that the packed bytes depend on, beside the file: what is asked for, and which library packs."""
    native = library()
    assert native is not None
    return f"{quantization or KEPT_AS_IS}, layout {native.LAYOUT_VERSION}"


def _forms(placed: list[Placed]) -> str:
    return ", ".join(sorted({place.matrix.form for place in placed}))


def _bind(placed: list[Placed], image: Image) -> None:
    for place in placed:
        place.matrix.bind(image.memory[place.offset : place.offset + place.matrix.num_bytes])


def _hand_over(placed: list[Placed], ops: NativeOps) -> None:
    parts: dict[str, list[Any]] = {}
    for place in placed:
        parts.setdefault(place.handle, []).append(place.matrix)
    for handle, matrices in parts.items():
        ops.add_weight(handle, PackedWeight(tuple(matrices)))


def _pack(
    placed: list[Placed],
    source: TensorSource,
    num_threads: int,
    progress: Progress | None,
) -> None:
    total, done = sum(place.matrix.num_bytes for place in placed), 0

    def pack(job: tuple[Placed, int, int]) -> int:
        place, begin, end = job
        if source.info(place.tensor).type == place.kind:
            _pack_raw(place, source, begin, end)
        else:
            values = source.dequantise_rows(place.tensor, begin, end)
            _check_magnitudes(place.tensor, values, place.kind.lower())
            _pack_values(place.matrix, values, begin)
        packed: int = place.matrix.num_bytes * (end - begin) // place.part.shape[0]
        return packed

    for place in placed:
        if not source.is_finite(place.tensor):
            raise CheckpointError(
                f"tensor {quoted(place.tensor)} holds NaN or infinity; expected finite weights: "
                "a damaged file?"
            )
    with ThreadPoolExecutor(num_threads, "packing") as threads:
        for num_bytes in threads.map(pack, _jobs(placed)):
            done += num_bytes
            if progress is not None:
                progress(done, total)


def _jobs(placed: list[Placed]) -> Iterator[tuple[Placed, int, int]]:
    for place in placed:
        num_rows = place.part.shape[0]
        for begin in range(0, num_rows, ROWS):
            yield place, begin, min(begin + ROWS, num_rows)


def _pack_raw(place: Placed, source: TensorSource, begin: int, end: int) -> None:
    row_bytes = place.matrix.row_bytes
    raw = source.raw(place.tensor)[begin * row_bytes : end * row_bytes]
    largest = largest_group_scale(TYPES_BY_NAME[place.kind], raw)
    if largest > MOST_HALF:
        raise CheckpointError(
            f"tensor {quoted(place.tensor)} ({place.kind}) has a group with a scale of {largest:.3g}, and "
            f"native kernels hold {MOST_HALF:g} at most; use kernels numpy: or is it a damaged file?"
        )
    place.matrix.pack(raw, begin, end)


def _check_magnitudes(tensor: str, values: Floats, quantization: str) -> None:
    found = max(float(values.max()), -float(values.min()))
    most = LARGEST[quantization]
    if found > most:
        raise CheckpointError(
            f"tensor {quoted(tensor)} holds {found:.3g}, and {quantization} ends at {most:.3g}; "
            "use another quantization, or none: or is it a damaged file?"
        )


def _pack_values(matrix: Any, values: Floats, begin: int) -> None:
    """Floats as they are, or into a 16-bit or a quantised form."""
    end = begin + len(values)
    if matrix.form == "F32":
        matrix.pack(np.ascontiguousarray(values).view(np.uint8).reshape(-1), begin, end)
    elif matrix.form == "F16":
        matrix.pack(values.astype(np.float16).view(np.uint8).reshape(-1), begin, end)
    elif matrix.form == "BF16":
        matrix.pack(_bfloat16(values).view(np.uint8).reshape(-1), begin, end)
    else:
        matrix.pack_floats(values, begin, end)


def _bfloat16(values: Floats) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The upper halves, rounded to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)
