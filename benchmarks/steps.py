"""Where a forward pass spends its time: the processor time of each kind of step, of all threads together.

A real model's passes: prompts, chunks, decodes of a batch. Of each step the least of some passes is taken, so
that a busy neighbour, who takes the processor or the cache away, is in few of the figures. What threads wait
for one another is not in them: it is what the wall clock has beyond the sum's share of a thread.

    python benchmarks/steps.py MODEL.gguf
    python benchmarks/steps.py MODEL.gguf --batches 1x512 32x1@144 --threads 1 --quantization f16
"""

import argparse
import re
import time
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.messages import KVCacheConfig
from mainspring.engine.build import group_layers
from mainspring.kernels.native import NativeOps
from mainspring.kernels.ops import Batch
from mainspring.models.loader import load_model

BLOCK_SIZE = 16
NUM_PASSES = 12
BATCHES = ("1x512", "1x128", "1x1@144", "8x1@144", "32x1@144", "64x1@144")


class Shape(NamedTuple):
    """Equal requests: each has `num_tokens` rows in this pass, at the end of `seq_len` tokens."""

    num_requests: int
    num_tokens: int
    seq_len: int

    @property
    def num_blocks(self) -> int:
        return self.num_requests * -(-self.seq_len // BLOCK_SIZE)


class Timing(NamedTuple):
    wall_s: float  # of the fastest pass
    by_kind: dict[str, tuple[int, float]]  # how many steps, their processor seconds

    @property
    def processor_s(self) -> float:
        return sum(taken_s for _, taken_s in self.by_kind.values())


def shape(text: str) -> Shape:
    """From "requests x tokens @ length", without spaces; the length, if it is left out, is the tokens."""
    found = re.fullmatch(r"(\d+)x(\d+)(?:@(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be as 1x512, or 32x1@144")
    requests, tokens, length = found.groups()
    return Shape(int(requests), int(tokens), int(length or tokens))


def loaded(arguments: argparse.Namespace, shapes: list[Shape]) -> Any:
    most_tokens = max(s.num_requests * s.num_tokens for s in shapes)
    model = load_model(
        EngineConfig(
            model=arguments.model,
            vocab_size=0,
            executor="uniproc",
            scheduler=SchedulerConfig(
                max_num_seqs=most_tokens,
                max_num_batched_tokens=most_tokens,
                max_model_len=max(s.seq_len for s in shapes),
            ),
            block_size=BLOCK_SIZE,
            depth=1,
            seed=0,
            kernels="native",
            num_threads=arguments.threads,
            quantization=arguments.quantization,
            activations=arguments.activations,
            kv_cache_dtype=arguments.kv_cache_dtype,
        )
    )
    groups = group_layers(model.kv_cache_specs())
    num_blocks = 1 + len(groups) * max(s.num_blocks for s in shapes)
    model.initialize_kv(KVCacheConfig(num_blocks, BLOCK_SIZE, groups))
    return model


def batch(shape: Shape, num_groups: int, vocab_size: int) -> Batch:
    requests, tokens, length = shape
    per_group = np.arange(shape.num_blocks, dtype=np.int32).reshape(requests, -1)
    tables = tuple(1 + group * shape.num_blocks + per_group for group in range(num_groups))
    positions = np.tile(np.arange(length - tokens, length, dtype=np.int32), requests)
    owners = np.repeat(np.arange(requests), tokens)
    return Batch(
        np.random.default_rng(0).integers(0, vocab_size, requests * tokens, dtype=np.int32),
        positions,
        np.arange(requests + 1, dtype=np.int32) * tokens,
        np.full(requests, length, np.int32),
        tables,
        tuple(
            table[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            for table in tables
        ),
    )


def measure(model: Any, shape: Shape) -> Timing:
    """The passes with and without times kept take turns: keeping them costs a little."""
    given = batch(shape, len(group_layers(model.kv_cache_specs())), model.vocab_size)
    model.forward(given)
    ops: NativeOps = model.ops
    (program,) = ops.programs("batch")
    walls_s, passes = [], []
    for _ in range(NUM_PASSES):
        program.keep_times(False)
        start = time.perf_counter()
        model.forward(given)
        walls_s.append(time.perf_counter() - start)
        program.keep_times(True)
        model.forward(given)
        passes.append(program.times())
    by_kind: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for steps in zip(*passes, strict=True):  # the same step of every pass
        kind = steps[0][0]
        count, taken_s = by_kind[kind]
        by_kind[kind] = (count + 1, taken_s + min(step_s for _, step_s in steps))
    return Timing(min(walls_s), dict(by_kind))


def print_timing(shape: Shape, timing: Timing, num_threads: int) -> None:
    requests, tokens, length = shape
    rate = requests * tokens / timing.wall_s
    print(f"\n{requests} x {tokens} tokens at {length}: {rate:.0f} tokens/s by the wall clock")
    share_ms = 1e3 * timing.processor_s / num_threads
    print(f"  {1e3 * timing.wall_s:.2f} ms; {share_ms:.2f} ms of each thread's processor time are in steps")
    for kind, (count, taken_s) in sorted(timing.by_kind.items(), key=lambda item: -item[1][1]):
        print(f"  {kind:16}{count:4} x {1e3 * taken_s:9.2f} ms {100 * taken_s / timing.processor_s:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--batches", nargs="+", type=shape, default=[shape(text) for text in BATCHES])
    parser.add_argument("--threads", type=int, help="default: all usable processors")
    parser.add_argument("--quantization", choices=["f16", "bf16", "q8", "q4"])
    parser.add_argument("--activations", choices=["int8", "int16"], default="int8")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "float32", "float16", "int8"], default="auto")
    arguments = parser.parse_args()
    model = loaded(arguments, arguments.batches)
    print(f"{model.ops.name}, {model.ops.num_threads} threads, {arguments.activations} activations")
    for given in arguments.batches:
        print_timing(given, measure(model, given), model.ops.num_threads)


if __name__ == "__main__":
    main()
