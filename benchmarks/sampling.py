"""What a sampled row costs, natively and in numpy: one thread, microseconds, the best of short windows.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --variant avx2 --vocab-size 151936 --json sampling.json

Two rows are measured: one as a model's are, with a few tokens far above the others; and one that is flat, a
bell of logits of width 1, in which a nucleus of 0.95 holds half of all tokens: the worst there is.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import mainspring_native as native
import numpy as np

from mainspring import SamplingParams
from mainspring.base.messages import NewRequestData
from mainspring.worker.sampler import NativeSampler, NumpySampler, Sampler
from mainspring.worker.sampling_state import SamplingState

NUM_CALLS = 20
NUM_COUNTED = 1000  # distinct tokens that penalties meet
WISHES: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "greedy under a mask": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 40": {"top_k": 40},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 40, top_p 0.95, min_p 0.05": {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    f"greedy, penalties on {NUM_COUNTED} tokens": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, 20 log-probabilities": {"temperature": 0.0, "logprobs": 20},
}


class Measurement(NamedTuple):
    row: str
    wish: str
    native_us: float
    numpy_us: float


def rows_of(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    like_a_model = (rng.standard_normal(vocab_size) * 2.5).astype(np.float32)
    like_a_model[rng.integers(0, vocab_size, 50)] += np.linspace(4, 12, 50).astype(np.float32)
    return {"model": like_a_model, "flat": rng.standard_normal(vocab_size).astype(np.float32)}


def measure(variant: str, vocab_size: int = 49152) -> list[Measurement]:
    """Every wish on every row, natively and in numpy."""
    rows = native.Sampler(native.Pool(1), variant, vocab_size)
    prompt = np.random.default_rng(1).permutation(vocab_size)[:NUM_COUNTED].tolist()
    every_third = np.packbits(np.arange(-(-vocab_size // 32) * 32) % 3 == 0, bitorder="little").view(np.int32)
    found = []
    for row, logits in rows_of(vocab_size).items():
        for wish, params in WISHES.items():
            new = NewRequestData(0, "r", prompt, NUM_COUNTED, 0, ([],), SamplingParams(seed=7, **params))
            state = SamplingState.of(new, vocab_size)
            masks = [every_third] if "mask" in wish else []
            times = [best_us(s, logits[None], state, masks) for s in (NativeSampler(rows), NumpySampler())]
            found.append(Measurement(row, wish, *times))
    return found


def best_us(sampler: Sampler, logits: np.ndarray, state: SamplingState, masks: list) -> float:
    entered, best = [sampler.enter(state)], float("inf")
    for _ in range(NUM_CALLS):
        start = time.perf_counter()
        sampler.sample(logits, [state], entered, masks)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", default=native.runnable_variants()[-1])
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.variant, arguments.vocab_size)
    for row, wish, native_us, numpy_us in found:
        ratio = numpy_us / native_us
        print(f"{row:6} {wish:34} {native_us:8.1f} us   numpy {numpy_us:8.1f} us   {ratio:5.1f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps([m._asdict() for m in found], indent=1))


if __name__ == "__main__":
    main()
