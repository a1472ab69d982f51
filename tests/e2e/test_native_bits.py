"""A request's logits are the same bits, whatever runs beside it and however its prompt is cut.

Logits are caught where the model gives them to the sampler, as bytes by request and position. Requests differ
in what their rows need (penalties, masks, log-probabilities, seeds, greedy without logits), so the rows of a
step go different ways; the one that is watched is compared with itself alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainspring import LLM, SamplingParams, StructuredOutputsParams
from mainspring.base.messages import SchedulerOutput
from mainspring.engine.client import InprocClient
from mainspring.kernels.native import library, why_not
from mainspring.worker.model_runner import ModelRunner

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

VARIANTS = library().runnable_variants()  # type: ignore[union-attr]
RNG = np.random.default_rng(5)
WATCHED = RNG.integers(1000, 40_000, 300).tolist()
NUM_TOKENS = 8

Bits = dict[int, bytes]  # by position: the logits of the watched request's next token


ALL_KINDS = frozenset({"greedy in the head", "penalties", "logprobs", "a grammar's mask", "random"})


class Watch:
    """A model whose logits are noted: for every row of a step, which request's they are."""

    def __init__(self, runner: ModelRunner, prompt: list[int]) -> None:
        self._runner, self._prompt = runner, prompt
        self.bits: Bits = {}
        self.company: list[set[str]] = []  # of each step that has the watched request: the kinds of its rows
        sample = runner.sample_tokens

        def noting(mask: Any) -> Any:
            parked = runner._parked
            assert parked is not None
            bits_before = len(self.bits)
            for row, slot in enumerate(np.array(parked.plan.slots)[parked.plan.sampling_rows].tolist()):
                tokens = runner.batch.at(slot).sampling.token_ids
                if tokens[: len(prompt)] == prompt:
                    by_itself = runner.model.logits(parked.hidden[row : row + 1])[0].tobytes()
                    together = runner.model.logits(parked.hidden)[row].tobytes()
                    assert by_itself == together, "the head depends on the rows beside"
                    assert self.bits.setdefault(len(tokens), together) == together
            if len(self.bits) > bits_before:
                self.company.append(self._kinds(parked.plan, [] if mask is None else mask.rows))
            return sample(mask)

        runner.sample_tokens = noting  # type: ignore[method-assign]

    def _kinds(self, plan: SchedulerOutput, masked: Sequence[int]) -> set[str]:
        batch, kinds = self._runner.batch, set()
        for row in plan.sampling_rows:
            slot = plan.slots[row]
            state = batch.at(slot).sampling
            found = {
                "greedy in the head": batch.num_tokens[slot] >= batch.greedy_from[slot],
                "penalties": state.counts is not None,
                "logprobs": state.num_logprobs is not None,
                "a grammar's mask": row in masked,
                "random": state.temperature > 0,
            }
            kinds |= {kind for kind, is_so in found.items() if is_so}
        return kinds


@contextmanager
def watching(model: Path, prompt: list[int] = WATCHED, **settings: Any) -> Iterator[tuple[LLM, Watch]]:
    given = {
        "kernels": "native",
        "in_process": True,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 1 + 12_000 // 16,
        "max_num_batched_tokens": 2048,
        **settings,
    }
    with LLM(str(model), **given) as llm:
        client = llm.llm_engine.client
        assert isinstance(client, InprocClient)
        yield llm, Watch(client._core.executor._worker.runner, prompt)  # type: ignore[attr-defined]


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **more)


def company(number: int) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Requests of every kind, of lengths from 1 to 400; some begin as the watched one does."""
    kinds = itertools.cycle(
        [
            lambda: greedy(),
            lambda: SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True),
            lambda: greedy(repetition_penalty=1.3, frequency_penalty=0.5),
            lambda: greedy(logprobs=5),
            lambda: SamplingParams(
                temperature=0,
                max_tokens=20,
                structured_outputs=StructuredOutputsParams(regex="[a-z ]{30,60}"),
            ),
            lambda: SamplingParams(
                temperature=0.8, top_k=20, top_p=0.9, seed=9, max_tokens=9, ignore_eos=True
            ),
        ]
    )
    rng = np.random.default_rng(number)
    prompts = []
    for index in range(number):
        own = rng.integers(1000, 40_000, int(rng.integers(1, 400 if number < 40 else 90))).tolist()
        prompts.append({"prompt_token_ids": WATCHED[:256] + own[:40] if index % 5 == 0 else own})
    return prompts, [next(kinds)() for _ in range(number)]


def alone(model: Path, **settings: Any) -> Bits:
    with watching(model, **settings) as (llm, watch):
        llm.generate([{"prompt_token_ids": WATCHED}], greedy(), use_tqdm=False)
        return watch.bits


def in_company(model: Path, number: int, **settings: Any) -> Bits:
    prompts, params = company(number)
    with watching(model, **settings) as (llm, watch):
        llm.generate([*prompts, {"prompt_token_ids": WATCHED}], [*params, greedy()], use_tqdm=False)
        if number >= 16:
            together = sum(kinds == ALL_KINDS for kinds in watch.company)
            assert together >= NUM_TOKENS // 2, "the batches were meant to be mixed"
        return watch.bits


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(variant, marks=pytest.mark.slow) for variant in VARIANTS[:-1]), VARIANTS[-1]],
)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(smollm2: Path, variant: str) -> Bits:
    bits = alone(smollm2, instruction_set=variant)
    assert sorted(bits) == list(range(len(WATCHED), len(WATCHED) + NUM_TOKENS))
    return bits


@pytest.mark.parametrize(
    ("number", "num_threads"),
    [
        (1, 2),
        (16, 2),
        pytest.param(16, 1, marks=pytest.mark.slow),
        pytest.param(63, 1, marks=pytest.mark.slow),
        pytest.param(63, 2, marks=pytest.mark.slow),
    ],
)
def test_in_a_mixed_batch(number: int, num_threads: int, expected: Bits, variant: str, smollm2: Path) -> None:
    assert in_company(smollm2, number, num_threads=num_threads, instruction_set=variant) == expected


@pytest.mark.parametrize("budget", [16, 64])
def test_in_chunks(budget: int, expected: Bits, variant: str, smollm2: Path) -> None:
    assert alone(smollm2, max_num_batched_tokens=budget, max_num_seqs=16, instruction_set=variant) == expected


@pytest.mark.parametrize("caching", [True, False])
def test_cold_and_warm(caching: bool, expected: Bits, variant: str, smollm2: Path) -> None:
    with watching(smollm2, enable_prefix_caching=caching, instruction_set=variant) as (llm, watch):
        for _ in range(2):
            (output,) = llm.generate([{"prompt_token_ids": WATCHED}], greedy(), use_tqdm=False)
            assert watch.bits == expected
        assert bool(output.num_cached_tokens) == caching


def test_after_preemption(expected: Bits, variant: str, smollm2: Path) -> None:
    blocks = 1 + 28 + 4  # all four are admitted, and the last one has to go when the others grow
    prompts, _ = company(3)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    settings = {"num_gpu_blocks_override": blocks, "max_model_len": 400, "instruction_set": variant}
    with watching(smollm2, **settings) as (llm, watch):
        short = [{"prompt_token_ids": (prompt["prompt_token_ids"] * 40)[:40]} for prompt in prompts]
        llm.generate([*short, {"prompt_token_ids": WATCHED}], params, use_tqdm=False)
        assert llm.get_stats().num_preemptions > 0, "the pool was meant to be too small"
    assert {position: watch.bits[position] for position in expected} == expected


def test_token_by_token_is_as_one_chunk(expected: Bits, variant: str, smollm2: Path) -> None:
    """What was decoded step by step is computed again as the end of a prompt."""
    with watching(smollm2, instruction_set=variant) as (llm, watch):
        (output,) = llm.generate([{"prompt_token_ids": WATCHED}], greedy(), use_tqdm=False)
    tokens = output.outputs[0].token_ids
    for length in (1, NUM_TOKENS - 1):
        with watching(smollm2, enable_prefix_caching=False, instruction_set=variant) as (llm, watch):
            prompt = WATCHED + list(tokens[:length])
            llm.generate(
                [{"prompt_token_ids": prompt}],
                SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
                use_tqdm=False,
            )
            assert watch.bits[len(prompt)] == expected[len(prompt)]


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8", "num_threads": 1},
        {"quantization": "bf16"},
        pytest.param({"quantization": "f16"}, marks=pytest.mark.slow),
        pytest.param({"activations": "int16"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_other_forms(settings: dict[str, Any], smollm2: Path) -> None:
    """16-bit weights, int16 activations and an int8 cache keep the promise as well."""
    by_itself = alone(smollm2, **settings)
    assert in_company(smollm2, 5, **settings) == by_itself
    assert alone(smollm2, max_num_batched_tokens=16, max_num_seqs=16, **settings) == by_itself
