"""How fast the matrix kernels are on one thread, beside what this machine can do at best.

Compute: a matrix that stays in the second-level cache, against the products alone (no scales, nothing
stored). Memory: 96 MB of weights and one row, against reading as much. Both are the best of short windows, so
that a busy neighbour is in few of them; what is bound by memory still feels it.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --variant avx2 --activations int16 --json kernels.json
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mainspring_native as native
import numpy as np

SOURCES = {
    "Q4_0": "4 bits",
    "Q4_1": "4 bits, mins",
    "Q8_0": "8 bits",
    "Q5_1": "8 bits, mins",
    "Q6_K": "8 bits, a scale for 16",
    "F16": "fp16",
    "BF16": "bf16",
    "F32": "fp32",
}
NUM_ROWS = (1, 2, 4, 6, 8, 16, 32, 64)
CACHED_SHAPE = (512, 768)
MODEL_BYTES, MODEL_COLUMNS = 96_000_000, 768
ROWS_PER_CALL, PANELS_PER_CALL = 64, 4  # about what a program's unit asks for


class Measurement(NamedTuple):
    source: str
    num_rows: int
    matrix_bytes: int
    operations_per_s: float
    bytes_per_s: float
    share: float  # of the ceiling: of products; of reading 96 MB, where the matrix is that large


def matrix_of(source: str, rows: int, columns: int) -> Any:
    """A matrix of small positive numbers, whatever its type: no byte of it is above 15."""
    matrix = native.Matrix(source, rows, columns)
    memory = np.empty(matrix.num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    matrix.bind(memory[start : start + matrix.num_bytes])
    raw = np.random.default_rng(0).integers(0, 16, 16 * matrix.row_bytes, dtype=np.uint8)
    for begin in range(0, rows, 16):
        matrix.pack(raw, begin, begin + 16)
    return matrix


def measure(
    source: str, matrix: Any, num_rows: int, ceilings: dict[str, float], arguments: Any
) -> Measurement:
    x = np.random.default_rng(1).standard_normal((num_rows, matrix.columns)).astype(np.float32)
    taken_s = native.time_linear(
        matrix,
        x,
        arguments.variant,
        arguments.activations,
        ROWS_PER_CALL,
        PANELS_PER_CALL,
        arguments.seconds,
    )
    operations_per_s = 2 * num_rows * matrix.rows * matrix.columns / taken_s
    bytes_per_s = matrix.num_bytes / taken_s
    if matrix.num_bytes > MODEL_BYTES // 2:
        share = bytes_per_s / ceilings["model_reads"]
    else:
        share = (
            operations_per_s / ceilings["byte_products" if matrix.form in ("Q8", "Q4") else "float_products"]
        )
    return Measurement(source, num_rows, matrix.num_bytes, operations_per_s, bytes_per_s, share)


def measure_all(ceilings: dict[str, float], arguments: Any) -> Iterator[Measurement]:
    for source in SOURCES:
        cached = matrix_of(source, *CACHED_SHAPE)
        for num_rows in NUM_ROWS:
            yield measure(source, cached, num_rows, ceilings, arguments)
        panel_bytes = native.Matrix(source, 16, MODEL_COLUMNS).num_bytes
        large = matrix_of(source, MODEL_BYTES // panel_bytes * 16, MODEL_COLUMNS)
        yield measure(source, large, 1, ceilings, arguments)


def print_ceilings(ceilings: list[dict[str, float]]) -> None:
    print("threads   8-bit GOP/s   fp32 GFLOP/s   GB/s of 96 MB   GB/s of 256 MB")
    for found in ceilings:
        rates = [found[k] / 1e9 for k in ("byte_products", "float_products", "model_reads", "memory_reads")]
        print("{:7} {:13.0f} {:14.0f} {:15.1f} {:16.1f}".format(int(found["num_threads"]), *rates))


def print_table(measurements: list[Measurement]) -> None:
    print("\nGOP/s of one thread by number of rows, in parentheses the share of the ceiling in %;")
    print("last, GB/s of weights with one row and 96 MB of them")
    print(f"{'type':6}{'held as':24}" + "".join(f"{n:>10}" for n in NUM_ROWS) + f"{'96 MB':>12}")
    for source, held_as in SOURCES.items():
        line = f"{source:6}{held_as:24}"
        for m in measurements:
            if m.source == source:
                large = m.matrix_bytes > MODEL_BYTES // 2
                rate = m.bytes_per_s if large else m.operations_per_s
                line += f"{rate / 1e9:.0f} ({m.share * 100:.0f})".rjust(12 if large else 10)
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    variants = native.runnable_variants()
    parser.add_argument("--variant", choices=variants, default=variants[-1], help="instruction set")
    parser.add_argument("--activations", choices=["int8", "int16"], default="int8")
    parser.add_argument("--threads", type=int, default=native.num_usable_cpus(), help="of the ceilings alone")
    parser.add_argument("--seconds", type=float, default=0.03, help="for each measurement")
    parser.add_argument("--json", type=Path, help="write what was measured to this file, too")
    arguments = parser.parse_args()

    print(f"variant {arguments.variant}, activations {arguments.activations}")
    ceilings = native.measure_ceilings(arguments.variant, arguments.threads)
    print_ceilings(ceilings)
    measurements = list(measure_all(ceilings[0], arguments))
    print_table(measurements)
    if arguments.json:
        report = {
            "variant": arguments.variant,
            "activations": arguments.activations,
            "ceilings": ceilings,
            "kernels": [m._asdict() for m in measurements],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
