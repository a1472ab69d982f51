"""How fast attention is, beside what this machine can do at best: prompts, decodes, shared prefixes.

Prompts are bound by arithmetic: against the fused products alone. Decodes are bound by reading K and V from
memory: against reading as much. The best of a few passes, so that a busy neighbour is in few of them; what
is bound by memory still feels it.

    python benchmarks/attention.py
    python benchmarks/attention.py --variant avx2 --threads 2 --json attention.json
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import mainspring_native as native
import numpy as np

BLOCK_SIZE = 16
BYTES = {"F32": 4, "F16": 2, "I8": 1}
FORMS = list(BYTES)


class Case(NamedTuple):
    """Equal requests: each has `num_tokens` rows in this step, at the end of `seq_len` tokens."""

    name: str
    num_requests: int
    num_tokens: int
    seq_len: int
    num_shared: int = 0  # leading tokens that all have in common
    num_kv_heads: int = 3
    heads_per_kv: int = 3
    head_size: int = 64
    form: str = "F16"

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.heads_per_kv

    @property
    def block_bytes(self) -> int:
        per_token = self.head_size * BYTES[self.form] + (4 if self.form == "I8" else 0)
        return 2 * BLOCK_SIZE * self.num_kv_heads * per_token

    @property
    def operations(self) -> int:
        """Multiplications and additions of the scores and the values, without the exp."""
        first = self.seq_len - self.num_tokens
        num_pairs = sum(position + 1 for position in range(first, self.seq_len))
        return 4 * self.head_size * self.num_heads * num_pairs * self.num_requests


CASES = [
    Case("prompt of 512", 1, 512, 512),
    Case("prompt of 512, 8-bit K and V", 1, 512, 512, form="I8"),
    Case("prompt of 512, heads of 128", 1, 512, 512, 0, 2, 4, 128),
    Case("chunk of 64 at 4096", 1, 64, 4096),
    Case("64 decodes at 48", 64, 1, 48),
    Case("16 decodes at 1050", 16, 1, 1050),
    Case("16 decodes at 1050, 1008 shared", 16, 1, 1050, 1008),
    Case("32 decodes at 4096", 32, 1, 4096),
    Case("32 decodes at 4096, 8-bit K and V", 32, 1, 4096, form="I8"),
    Case("16 decodes at 4096, one head per KV head", 16, 1, 4096, 0, 4, 1, 128),
]


class Measurement(NamedTuple):
    name: str
    taken_s: float
    plan_s: float
    num_units: int
    operations_per_s: float
    bytes_per_s: float  # of K and V, each block once
    share: float  # of the nearer ceiling


def tables(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Block tables over blocks in random order, and how many blocks there are."""
    per_request, shared = -(-case.seq_len // BLOCK_SIZE), case.num_shared // BLOCK_SIZE
    num_blocks = shared + case.num_requests * (per_request - shared)
    order = rng.permutation(num_blocks).astype(np.int32)
    own = order[shared:].reshape(case.num_requests, per_request - shared)
    return np.concatenate([np.tile(order[:shared], (case.num_requests, 1)), own], axis=1), num_blocks


def measure(case: Case, ceilings: dict[str, float], arguments: Any) -> Measurement:
    rng = np.random.default_rng(0)
    table, num_blocks = tables(case, rng)
    cache = np.zeros((num_blocks, case.block_bytes), np.uint8)
    layout = (FORMS.index(case.form), BLOCK_SIZE, case.num_kv_heads, case.head_size)
    kv = rng.standard_normal((BLOCK_SIZE * num_blocks, 2 * case.num_kv_heads * case.head_size), np.float32)
    native.write_kv(arguments.variant, cache, *layout, kv, np.arange(len(kv), dtype=np.int64))
    q = rng.standard_normal(
        (case.num_requests * case.num_tokens, case.num_heads * case.head_size), np.float32
    )
    starts = np.arange(case.num_requests + 1, dtype=np.int32) * case.num_tokens
    ends = np.full(case.num_requests, case.seq_len, np.int32)
    plan_s, taken_s, num_units, _ = native.attention(
        arguments.variant, cache, *layout, q, starts, ends, table, case.head_size**-0.5, 0, 0.0, True,
        arguments.threads, arguments.passes, np.empty_like(q), None, None,
    )  # fmt: skip
    operations_per_s, bytes_per_s = case.operations / taken_s, cache.nbytes / taken_s
    share = max(operations_per_s / ceilings["float_products"], bytes_per_s / ceilings["model_reads"])
    return Measurement(case.name, taken_s, plan_s, num_units, operations_per_s, bytes_per_s, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    variants = native.runnable_variants()
    parser.add_argument("--variant", choices=variants, default=variants[-1], help="instruction set")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=10, help="of which the fastest counts")
    parser.add_argument("--json", type=Path, help="write what was measured to this file, too")
    arguments = parser.parse_args()

    ceilings = native.measure_ceilings(arguments.variant, arguments.threads)[arguments.threads - 1]
    print(
        f"variant {arguments.variant}, threads {arguments.threads}: "
        f"{ceilings['float_products'] / 1e9:.0f} GFLOP/s, {ceilings['model_reads'] / 1e9:.0f} GB/s of 96 MB"
    )
    print(f"{'':42}{'us':>9}{'GFLOP/s':>9}{'GB/s':>7}{'ceiling':>9}{'units':>7}{'plan us':>9}")
    measurements = []
    for case in CASES:
        m = measure(case, ceilings, arguments)
        measurements.append(m)
        rates = f"{m.taken_s * 1e6:9.0f}{m.operations_per_s / 1e9:9.1f}{m.bytes_per_s / 1e9:7.1f}"
        print(f"{m.name:42}{rates}{m.share * 100:8.0f}%{m.num_units:7}{m.plan_s * 1e6:9.1f}", flush=True)
    if arguments.json:
        report = {**vars(arguments), "ceilings": ceilings, "attention": [m._asdict() for m in measurements]}
        arguments.json.write_text(json.dumps(report, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
