"""Gemma 3 270M on native kernels, by the tolerances that each of their forms promises; see
`test_native_golden.py`.

- Activations of 16 bits, and weights of 16 bits: the same tokens, up to the first step at which the two best
  golden logits are nearer than `CLOSE`.
- Activations of 8 bits, the default: asked for the next token after each part of the golden text, the
  likeliest is nearly always the same, and always where it is not close.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gemma3_golden import CASES, engine, generate
from test_native_golden import lower_bound_of_differences

from mainspring import SamplingParams
from mainspring.kernels.native import library, why_not

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

VARIANTS = library().runnable_variants()  # type: ignore[union-attr]
CLOSE = 0.05  # of the golden gap: below it either token may win
MEAN, LARGEST = 0.01, 0.1  # of the differences of the top five log-probabilities, at most
INT8_MEAN, INT8_EQUAL, INT8_GAP = 0.12, 0.95, 1.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "settings",
    [
        *({"activations": "int16", "instruction_set": variant} for variant in VARIANTS),
        {"quantization": "f16"},
        {"activations": "int16", "kv_cache_dtype": "float32", "max_num_batched_tokens": 200},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_exact_forms_give_the_golden_tokens(settings: dict[str, Any], gemma3: Path) -> None:
    found: list[float] = []
    with engine(gemma3, kernels="native", **settings) as llm:
        for case, output in zip(CASES, generate(llm), strict=True):
            (answer,) = output.outputs
            golden, gaps = case["greedy_ids"], case["top2_gap"]
            compared = next((i for i, gap in enumerate(gaps) if gap < CLOSE), len(golden))
            assert answer.token_ids[:compared] == golden[:compared], case["text"]
            assert answer.logprobs is not None
            for step, expected in enumerate(case["top5_logprobs"][:compared]):
                found += lower_bound_of_differences(expected, answer.logprobs[step])
    print(f"{settings}: mean {np.mean(found):.4f}, largest {np.max(found):.4f}")
    assert np.mean(found) < MEAN
    assert np.max(found) < LARGEST


@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_activations_are_close(variant: str, gemma3: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    found: list[float] = []
    equal: list[bool] = []
    with engine(gemma3, kernels="native", instruction_set=variant, max_logprobs=20) as llm:
        for case in CASES:
            golden = case["greedy_ids"]
            prompts = [case["prompt_ids"] + golden[:step] for step in range(len(golden))]
            for step, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
                (answer,) = output.outputs
                assert answer.logprobs is not None
                equal.append(answer.token_ids[0] == golden[step])
                assert equal[-1] or case["top2_gap"][step] <= INT8_GAP, (
                    f"lost a gap of {case['top2_gap'][step]}"
                )
                found += lower_bound_of_differences(case["top5_logprobs"][step], answer.logprobs[0])
    print(f"{variant}: mean {np.mean(found):.4f}, equal {np.mean(equal):.4f}")
    assert np.mean(equal) >= INT8_EQUAL
    assert np.mean(found) <= INT8_MEAN
