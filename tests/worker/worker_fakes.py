"""A model with injected logits, and a driver that plays scheduler for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mainspring.base.messages import (
    GrammarOutput,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.worker.model_runner import ModelRunner
from mainspring.worker.sampling_state import SamplingState

SPEC = KVCacheSpec(num_kv_heads=1, head_size=4)


def kv_config(num_blocks: int = 256, block_size: int = 4, num_groups: int = 1) -> KVCacheConfig:
    groups = tuple(KVCacheGroup((layer,), SPEC) for layer in range(num_groups))
    return KVCacheConfig(num_blocks, block_size, groups)


def random_logits(token: int, position: int, vocab_size: int, scale: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng([token, position])
    return (rng.standard_normal(vocab_size) * scale).astype(np.float32)


class InjectedModel:
    """Logits are a function of (token, position): a row says what was fed to it, and only that."""

    def __init__(self, vocab_size: int, logits: Callable[[int, int], np.ndarray] | None = None) -> None:
        self.vocab_size = vocab_size
        self.batches: list = []
        self.asked_rows: list[int] = []
        self._logits = logits or (lambda token, position: random_logits(token, position, vocab_size))

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return [SPEC]

    def initialize_kv(self, config: KVCacheConfig) -> None:
        self.config = config

    def forward(self, batch):
        self.batches.append(batch)
        return np.stack([batch.token_ids, batch.positions], axis=1).astype(np.float32)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        self.asked_rows.append(len(hidden))
        return np.stack([self._logits(int(token), int(position)) for token, position in hidden])


def make_runner(model: InjectedModel, max_num_seqs: int = 8, kv: KVCacheConfig | None = None) -> ModelRunner:
    runner = ModelRunner(model, max_num_seqs)
    runner.initialize(kv or kv_config(), max_model_len=256)
    return runner


def new_request(
    slot: int,
    prompt: Sequence[int],
    params: SamplingParams | None = None,
    output: Iterable[int] = (),
    computed: int = 0,
    num_groups: int = 1,
    **more,
) -> NewRequestData:
    """Slot s owns blocks 1 + 64 s and on, so any test can see whose block a number is."""
    params = params or SamplingParams(temperature=0)
    tokens = [*prompt, *output]
    blocks = tuple([1 + 64 * slot + g * 32 + i for i in range(16)] for g in range(num_groups))
    more.setdefault("num_prompt_logprobs", params.prompt_logprobs)
    return NewRequestData(slot, f"r{slot}", tokens, len(prompt), computed, blocks, params, **more)


def plan(
    rows: dict[int, int], sampling: Iterable[int] | None = None, step_id: int = 0, **more
) -> SchedulerOutput:
    """`rows`: slot -> tokens; `sampling`: slots that sample (default: all)."""
    slots = list(rows)
    wanted = slots if sampling is None else list(sampling)
    return SchedulerOutput(
        step_id,
        slots,
        list(rows.values()),
        [row for row, slot in enumerate(slots) if slot in wanted],
        sum(rows.values()),
        **more,
    )


def run(runner: ModelRunner, step: SchedulerOutput, mask: GrammarOutput | None = None) -> ModelRunnerOutput:
    """One whole step, with the invariants looked at after it."""
    result = runner.execute_model(step)
    if result is None:
        result = runner.sample_tokens(mask)
    else:
        assert not step.sampling_rows
    runner.batch.check()
    return result


def generate(
    runner: ModelRunner, new: NewRequestData, num_tokens: int, chunk: int = 1000
) -> tuple[list[int], list[ModelRunnerOutput]]:
    """The request alone: its next `num_tokens` tokens, its unread tokens read in chunks; frees the slot."""
    left = len(new.token_ids) - new.num_computed_tokens
    said: list[int] = []
    results = []
    entering = [new]
    while len(said) < num_tokens:
        n = min(left, chunk)
        left -= n
        step = plan({new.slot: n}, None if left == 0 else [], new_requests=entering)
        results.append(run(runner, step))
        said += results[-1].sampled_token_ids[0]
        entering, left = [], left or 1
        if results[-1].errors:
            break
    run(runner, plan({}, freed_slots=[new.slot]))
    return said, results


def state(vocab_size: int, params: SamplingParams, prompt=(1,), output=(), **more) -> SamplingState:
    return SamplingState.of(new_request(0, prompt, params, output, **more), vocab_size)


def bitmask(allowed: Iterable[int], vocab_size: int) -> np.ndarray:
    """[1, words] int32"""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)[None]
