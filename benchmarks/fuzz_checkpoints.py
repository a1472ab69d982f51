"""Damaged model files, by the hundred a second: every one is refused in a line, or read; nothing else.

    python benchmarks/fuzz_checkpoints.py --minutes 10 --seed 1
    python benchmarks/fuzz_checkpoints.py --seed 1 --case 4711      # one case again, in this process

A case is a model of the corpus (tests/data/checkpoints: GGUF files with each type of tensor and of value, one
split over three files, safetensors files, single and sharded) with some of its bytes changed, as the case's
number and the seed say. A child process opens it and reads all that is in it; this process watches. Found is

- any exception but `CheckpointError`, or one whose message has more than one line or is longer than 1,000
  characters;
- an end of the child: a crash of the interpreter or of numpy;
- more than `HANG_S` for a case, of which the corpus takes a thousandth;
- more memory, at its peak, than 8 times the files' size and `SPARE_BYTES`, as Python and numpy allocate it.
  Besides, the child may not take more than `ADDRESS_BYTES` of address space for its cases.

Exit status 1 and the cases' numbers, if anything was found; their files stay in `--keep`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mainspring.base.errors import CheckpointError
from mainspring.checkpoint.opening import open_checkpoint
from mainspring.checkpoint.safetensors import SafetensorsFile

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "checkpoints"
TIMES_SIZE = 8
SPARE_BYTES = 256 << 10  # what small files take, too: objects of Python, messages, what caches keep
ADDRESS_BYTES = 256 << 20
HANG_S = 5.0
MAX_MESSAGE = 1000
NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40)
NUMBERS += (2**53, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)


# ---- cases -------------------------------------------------------------------------------------------------


def models(corpus: Path = CORPUS) -> list[Path]:
    """A file or a folder each."""
    return sorted(corpus.iterdir())


def make_case(seed: int, number: int, folder: Path, corpus: Path = CORPUS) -> Path:
    """Write a case's files into `folder`, which is emptied; what is to be opened."""
    rng = random.Random(f"{seed}/{number}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = rng.choice(models(corpus))
    made = folder / model.name
    if model.is_dir():
        shutil.copytree(model, made)
        files = sorted(made.iterdir())
        opened = rng.choice(files) if files[0].suffix == ".gguf" else made
    else:
        shutil.copy(model, made)
        files, opened = [made], made
    for _ in range(rng.choice((1, 1, 1, 1, 2))):
        file = rng.choice(files)
        file.write_bytes(mutated(file.read_bytes(), rng, corpus))
    if len(files) > 1 and rng.random() < 0.05:
        rng.choice([file for file in files if file != opened]).unlink()
    return opened


def mutated(data: bytes, rng: random.Random, corpus: Path) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 8))):
        if not changed:
            break
        rng.choice(MUTATIONS)(changed, rng, corpus)
    return bytes(changed)


def _place(data: bytearray, rng: random.Random) -> int:
    """Mostly in what comes first, which decides how the rest is read."""
    return min(int(len(data) * rng.random() ** rng.choice((1, 1, 2, 5))), len(data) - 1)


def _cut(data: bytearray, rng: random.Random, corpus: Path) -> None:
    del data[_place(data, rng) :]


def _set_byte(data: bytearray, rng: random.Random, corpus: Path) -> None:
    data[_place(data, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _flip(data: bytearray, rng: random.Random, corpus: Path) -> None:
    data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _set_number(data: bytearray, rng: random.Random, corpus: Path) -> None:
    size = rng.choice((1, 2, 4, 4, 8, 8, 8))
    number = rng.choice((*NUMBERS, len(data), rng.randrange(len(data)), rng.getrandbits(64)))
    at = _place(data, rng)
    data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")


def _nudge_number(data: bytearray, rng: random.Random, corpus: Path) -> None:
    """One that is there, a little larger or smaller, or times a power of two."""
    size, at = rng.choice((4, 8)), _place(data, rng)
    number = int.from_bytes(data[at : at + size], "little")
    number = rng.choice((number + rng.randint(-40, 40), number << rng.randrange(1, 33)))
    data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")


def _set_digits(data: bytearray, rng: random.Random, corpus: Path) -> None:
    """A number in JSON."""
    found = list(re.finditer(rb"\d+", data[:4096]))
    if found:
        where = rng.choice(found)
        number = rng.choice((rng.choice(NUMBERS), -1, 1.5, 1e400, 10**5000))
        data[where.start() : where.end()] = str(number).encode() if number != 10**5000 else b"1" + b"0" * 5000


def _insert(data: bytearray, rng: random.Random, corpus: Path) -> None:
    at = _place(data, rng)
    data[at:at] = rng.choice(
        (rng.randbytes(rng.randrange(1, 64)), b"[" * 3000, b'{"a":' * 2000, b'"', b"\0" * 8)
    )


def _delete(data: bytearray, rng: random.Random, corpus: Path) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice((1, 4, 8, rng.randrange(1, 200)))]


def _repeat(data: bytearray, rng: random.Random, corpus: Path) -> None:
    at = _place(data, rng)
    piece = data[at : at + rng.randrange(1, 200)]
    data[at:at] = piece * rng.choice((1, 1, 2, 50))


def _splice(data: bytearray, rng: random.Random, corpus: Path) -> None:
    """The rest is another file's."""
    other = rng.choice([path for path in sorted(corpus.rglob("*")) if path.is_file()]).read_bytes()
    at = _place(data, rng)
    data[at:] = other[at if rng.random() < 0.5 else rng.randrange(len(other)) :]


Mutation = Callable[[bytearray, random.Random, Path], None]
MUTATIONS: tuple[Mutation, ...] = (
    _cut, _set_byte, _set_byte, _set_byte, _flip, _flip, _flip, _set_number, _set_number, _set_number,
    _nudge_number, _nudge_number, _set_digits, _insert, _delete, _repeat, _splice,
)  # fmt: skip


# ---- one case ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str  # "read", "refused", or what is wrong
    peak_bytes: int = 0
    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.kind in ("read", "refused")


def run_case(path: Path) -> Outcome:
    """Open and read what is at `path`, and judge how that went.

    What takes too much memory is tried once more: a table of the interpreter's own that happens to grow does
    so once.
    """
    size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
    allowed = TIMES_SIZE * size + SPARE_BYTES
    kind, peak, seconds = _measured(path)
    if peak > allowed:
        kind, peak, seconds = _measured(path)
    if peak > allowed:
        kind = f"took {peak} bytes for files of {size}"
    return Outcome(kind, peak, size, seconds)


def _measured(path: Path) -> tuple[str, int, float]:
    """What came of it, bytes at the peak, seconds."""
    tracemalloc.start()
    start_s = time.perf_counter()
    try:
        kind = _read_or_refuse(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return kind, peak, time.perf_counter() - start_s


def _read_or_refuse(path: Path) -> str:
    try:
        read_everything(path)
    except CheckpointError as error:
        message = str(error)
        if len(message.splitlines()) != 1:
            return f"a message of several lines: {message!r}"
        if len(message) > MAX_MESSAGE + len(str(path)):
            return f"a message of {len(message)} characters: {message[:200]!r}"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "read"


def read_everything(path: Path) -> None:
    """Every key's value and every tensor, in all ways that there are."""
    with SafetensorsFile(path) if path.suffix == ".safetensors" else open_checkpoint(path) as file:
        for key in getattr(file, "metadata", ()):
            file.metadata[key]  # type: ignore[union-attr]
        for name in file.tensor_names:
            with _no_weight_is_no_harm():
                _read_tensor(file, name)


@contextmanager
def _no_weight_is_no_harm() -> Iterator[None]:
    """Tensors of integers are refused one by one, as weights, after a good opening."""
    try:
        yield
    except CheckpointError as error:
        if "as a weight" not in str(error):
            raise


def _read_tensor(file: Any, name: str) -> None:
    info = file.info(name)
    assert len(file.raw(name)) == info.num_bytes
    finite, values = file.is_finite(name), file.dequantise(name)
    assert values.shape == info.shape
    assert finite == bool(np.isfinite(values).all()), f"is_finite says {finite} of {name}"
    if len(info.shape) == 2:
        middle = info.shape[0] // 2
        rows = file.dequantise_rows(name, middle, middle + 1)
        assert np.array_equal(rows.view(np.uint32), values[middle : middle + 1].view(np.uint32))


# ---- the child ---------------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> None:
    """Cases from `args.case` on, for ever; each is said before it begins and when it has ended."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = args.case
    while True:
        path = make_case(args.seed, number, args.folder, args.corpus)
        print(number, flush=True)
        if args.plant is not None and number == args.case + 3:
            PLANTS[args.plant]()
        outcome = run_case(path)
        fields = (outcome.kind, outcome.peak_bytes, outcome.size_bytes, outcome.seconds)
        print(json.dumps(fields), flush=True)
        number += 1


def _plant_crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _plant_hang() -> None:
    time.sleep(10 * HANG_S)


def _plant_memory() -> None:
    """What cannot be had is an exception, and that nobody catches it ends the child."""
    np.ones(2 * ADDRESS_BYTES, np.uint8)


# Faults to try the watching itself: `--plant`.
PLANTS: dict[str, Callable[[], None]] = {"crash": _plant_crash, "hang": _plant_hang, "memory": _plant_memory}


# ---- watching ----------------------------------------------------------------------------------------------


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    found: dict[int, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    largest_share: float = 0.0  # of the memory that a case may take
    elapsed_s: float = 0.0

    def add(self, number: int, outcome: Outcome) -> None:
        self.counts[outcome.kind if outcome.is_right else "wrong"] += 1
        self.slowest_s = max(self.slowest_s, outcome.seconds)
        allowed = TIMES_SIZE * outcome.size_bytes + SPARE_BYTES
        self.largest_share = max(self.largest_share, outcome.peak_bytes / allowed)
        if not outcome.is_right:
            self.found[number] = outcome.kind

    def __str__(self) -> str:
        total = self.counts.total()
        return (
            f"{total} cases in {self.elapsed_s:.0f} s ({total / max(self.elapsed_s, 1e-9):.0f} a second): "
            f"{self.counts['refused']} refused, {self.counts['read']} read, {len(self.found)} wrong; "
            f"slowest {self.slowest_s * 1e3:.0f} ms, at most {self.largest_share:.0%} of the memory allowed"
        )


class Child:
    """A process that plays cases from `first` on, and its lines, one by one, with a limit of time each."""

    def __init__(self, args: argparse.Namespace, first: int, folder: Path) -> None:
        command = [sys.executable, __file__, "--child", "--seed", str(args.seed), "--case", str(first)]
        command += ["--folder", str(folder), "--corpus", str(args.corpus)]
        if args.plant is not None and first == args.case:
            command += ["--plant", args.plant]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        self._buffer = b""

    def line(self, limit_s: float) -> str | None:
        """The next line; "" where the child has ended; None where it takes too long."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            if not select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(self._out, 1 << 16)
            if not data:
                return ""
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def end(self) -> str:
        """Kill it, and say how it ended."""
        if self.process.poll() is None:
            self.process.kill()
        _, errors = self.process.communicate()
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"status {self.process.returncode}: {''.join(last)[:200]}"


def watch(args: argparse.Namespace, *, say: Callable[[str], None] = print) -> Report:
    """Children, one after another, until time or cases are used up."""
    report, number = Report(), args.case
    start_s = time.monotonic()
    next_word_s = start_s + 60

    def is_over() -> bool:
        report.elapsed_s = time.monotonic() - start_s
        return report.elapsed_s > 60 * args.minutes or number >= args.case + args.cases

    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(temporary) / "case"
        while not is_over():
            running = Child(args, number, folder)
            limit_s = 60.0  # of the first line, before which much is imported
            while not is_over():
                line = running.line(limit_s)
                limit_s = args.hang_s
                if line and line.startswith("["):
                    outcome = Outcome(*json.loads(line))
                    report.add(number, outcome)
                elif line:
                    number = int(line)
                    continue
                else:
                    ended = "it takes longer than allowed" if line is None else "the child ended"
                    outcome = Outcome(f"{ended}: {running.end()}")
                    report.add(number, outcome)
                if not outcome.is_right:
                    say(f"case {number}: {outcome.kind}")
                    _keep(args, number)
                number += 1
                if time.monotonic() > next_word_s:
                    next_word_s += 60
                    say(str(report))
                if not line:
                    break
            running.end()
    return report


def _keep(args: argparse.Namespace, number: int) -> None:
    if args.keep is not None:
        make_case(args.seed, number, args.keep / str(number), args.corpus)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Read damaged model files; see the head of this file.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="end after this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="play this case alone, in this process")
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--keep", type=Path, help="a folder for the files of what is found")
    parser.add_argument("--hang-s", type=float, default=HANG_S)
    parser.add_argument("--plant", choices=PLANTS, help="a fault in the fourth case, to see it found")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    if args.child:
        child(args)
    if args.case is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
            outcome = run_case(make_case(args.seed, args.case, Path(temporary) / "case", args.corpus))
        print(outcome)
        return 0 if outcome.is_right else 1
    args.case = 0
    report = watch(args)
    print(report)
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main())
