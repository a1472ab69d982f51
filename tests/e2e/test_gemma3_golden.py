"""Gemma 3 270M (Q4_K_M) says what an independent float32 implementation says, whatever the engine's settings.

`tests/data/gemma3_270m_greedy.json` holds 16 greedy continuations, made by `make_gemma3_golden.py`; the last
prompt has 1,500 tokens and passes the window of 512 of most layers. Prompts are ids: no tokenizer is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mainspring import LLM, RequestOutput, SamplingParams

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "gemma3_270m_greedy.json").read_text()
)["raw"]
PROMPTS = [case["prompt_ids"] for case in CASES]
LONGEST = max(map(len, PROMPTS))
NUM_NEW = 32
MAX_MODEL_LEN = LONGEST + NUM_NEW + 4
BLOCK_SIZE = 16
WINDOW = 512
NUM_GROUPS = 6  # three layers each: those that see everything, and five with a window
TIE = 1e-3  # of the golden gap: below it either token may win
LOGPROB_TOLERANCE = 2e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[LLM]:
    defaults: dict[str, Any] = {
        "kernels": "numpy",
        "in_process": True,
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks(2 * MAX_MODEL_LEN),
        "max_logprobs": 5,
    }
    llm = LLM(str(model), **defaults | settings)
    try:
        yield llm
    finally:
        llm.shutdown()


def blocks(num_tokens: int) -> int:
    return 1 + NUM_GROUPS * -(-num_tokens // BLOCK_SIZE)


def generate(llm: LLM, order: slice = slice(None)) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=5, stop_token_ids=[1])
    return llm.generate(PROMPTS[order], params, use_tqdm=False)


def check(outputs: list[RequestOutput], order: slice = slice(None)) -> float:
    """Returns the largest difference of a log-probability among the golden top four."""
    largest = 0.0
    for case, output in zip(CASES[order], outputs, strict=True):
        (answer,) = output.outputs
        compared = next((i for i, gap in enumerate(case["top2_gap"]) if gap < TIE), len(case["greedy_ids"]))
        assert answer.token_ids[:compared] == case["greedy_ids"][:compared], case["text"]
        assert answer.logprobs is not None
        for step, expected in enumerate(case["top5_logprobs"][:compared]):
            for token_id, logprob in expected[:4]:  # the fifth may tie with the sixth
                largest = max(largest, abs(answer.logprobs[step][token_id].logprob - logprob))
    assert largest < LOGPROB_TOLERANCE
    return largest


def test_cold_then_warm(gemma3: Path) -> None:
    """Case B154: a prompt of three windows is as exact as a short one. Every whole block of a prompt but its
    end is found again, for each group what its window still sees."""
    with engine(gemma3, max_num_batched_tokens=2048) as llm:
        cold = generate(llm)
        assert not any(output.num_cached_tokens for output in cold)
        print(f"largest difference: {check(cold):.1e}")
        warm = generate(llm)
    check(warm)
    for prompt, output in zip(PROMPTS, warm, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_chunks_smaller_than_the_window(gemma3: Path) -> None:
    with engine(gemma3, max_num_batched_tokens=200, enable_prefix_caching=False) as llm:
        check(generate(llm))


def test_preempted(gemma3: Path) -> None:
    """A pool that holds the longest, and beside what it keeps when its windows have passed, not the others'
    answers."""
    budget = 256
    in_windows = -(-(WINDOW - 1 + budget) // BLOCK_SIZE) + 1
    longest = -(-MAX_MODEL_LEN // BLOCK_SIZE) + (NUM_GROUPS - 1) * in_windows
    settings = {"num_gpu_blocks_override": longest + 20, "max_num_batched_tokens": budget}
    with engine(gemma3, async_scheduling=False, **settings) as llm:
        check(generate(llm, slice(None, None, -1)), slice(None, None, -1))
        stats = llm.get_stats()
    assert stats.num_preemptions, "the pool was meant to be too small"
