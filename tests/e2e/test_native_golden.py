"""The native kernels against the golden continuations, by the tolerances that each of their forms promises.

- `int16` activations, and weights of 16 bits: the same tokens, up to the first step at which the two best
  golden logits are nearer than `CLOSE`.
- `int8` activations, the default: values are rounded to 255 steps, 32 of them sharing a scale, as other
  engines do, or to bf16 where weights are. Fed with the golden tokens, the likeliest next one is nearly
  always the same, and always where it is not close.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_golden import CASES, PERPLEXITY

from mainspring import LLM, RequestOutput, SamplingParams
from mainspring.kernels.native import library, why_not

if library() is None:
    pytest.skip(why_not(), allow_module_level=True)

VARIANTS = library().runnable_variants()  # type: ignore[union-attr]
CLOSE = 0.02  # of the golden gap: below it either token may win
MEAN, LARGEST = 0.01, 0.1  # of the differences of the top five log-probabilities, at most
INT8_MEAN, INT8_EQUAL, INT8_GAP, INT8_NLL = 0.12, 0.95, 1.0, 0.005

Params = SamplingParams(temperature=0, max_tokens=48, logprobs=5, stop_token_ids=[2])


def engine(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model),
        kernels="native",
        in_process=True,
        max_model_len=1040,
        num_gpu_blocks_override=1 + 4096 // 16,
        max_logprobs=20,
        **settings,
    )


def lower_bound_of_differences(expected: list[list[float]], got: dict[int, Any]) -> list[float]:
    """Of the golden five tokens at a step; one that is not among ours is as far as our least likely."""
    least = min(entry.logprob for entry in got.values())
    return [abs((got[int(t)].logprob if int(t) in got else least) - logprob) for t, logprob in expected]


EXACT = [
    {"activations": "int16", "instruction_set": VARIANTS[-1]},
    {"quantization": "f16", "instruction_set": VARIANTS[-1]},
    *(
        pytest.param(settings, marks=pytest.mark.slow)
        for settings in (
            *({"activations": "int16", "instruction_set": variant} for variant in VARIANTS[:-1]),
            {"quantization": "f16", "instruction_set": VARIANTS[0]},
            {"quantization": "f16", "num_threads": 1},
            {"activations": "int16", "kv_cache_dtype": "float32"},
        )
    ),
]


@pytest.mark.parametrize("settings", EXACT, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_exact_forms_give_the_golden_tokens(settings: dict[str, Any], smollm2: Path) -> None:
    with engine(smollm2, **settings) as llm:
        prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in CASES]
        outputs = llm.generate(prompts, Params, use_tqdm=False)
    differences: list[float] = []
    for case, output in zip(CASES, outputs, strict=True):
        (answer,) = output.outputs
        compared = next((i for i, gap in enumerate(case["top2_gap"]) if gap < CLOSE), len(case["greedy_ids"]))
        assert answer.token_ids[:compared] == case["greedy_ids"][:compared]
        assert answer.logprobs is not None
        for step, expected in enumerate(case["top5_logprobs"][:compared]):
            differences += lower_bound_of_differences(expected, answer.logprobs[step])
    print(f"{settings}: mean {np.mean(differences):.4f}, largest {np.max(differences):.4f}")
    assert np.mean(differences) < MEAN
    assert np.max(differences) < LARGEST


def teacher_forced(llm: LLM) -> Iterator[tuple[dict[str, Any], RequestOutput]]:
    """Every case with its golden continuation as part of the prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    prompts = [{"prompt_token_ids": case["prompt_ids"] + case["greedy_ids"]} for case in CASES]
    yield from zip(CASES, llm.generate(prompts, params, use_tqdm=False), strict=True)


@pytest.mark.parametrize(
    ("variant", "kv_cache_dtype", "quantization"),
    [
        (VARIANTS[-1], "auto", None),
        (VARIANTS[-1], "auto", "bf16"),
        *(pytest.param(variant, "int8", None, marks=pytest.mark.slow) for variant in VARIANTS),
        pytest.param(VARIANTS[0], "auto", None, marks=pytest.mark.slow),
    ],
)
def test_int8_activations_are_close(
    variant: str, kv_cache_dtype: str, quantization: str | None, smollm2: Path
) -> None:
    settings = {"instruction_set": variant, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
    differences: list[float] = []
    equal: list[bool] = []
    with engine(smollm2, activations="int8", **settings) as llm:
        for case, output in teacher_forced(llm):
            assert output.prompt_logprobs is not None
            for step, expected in enumerate(case["top5_logprobs"]):
                got = output.prompt_logprobs[len(case["prompt_ids"]) + step]
                assert got is not None
                (best,) = (token for token, entry in got.items() if entry.rank == 1)
                equal.append(best == case["greedy_ids"][step])
                assert equal[-1] or case["top2_gap"][step] <= INT8_GAP, (
                    f"lost a gap of {case['top2_gap'][step]}"
                )
                differences += lower_bound_of_differences(expected, got)
        nll = mean_nll(llm)
    off = abs(nll / PERPLEXITY["mean_nll"] - 1)
    found = f"mean {np.mean(differences):.4f}, equal {np.mean(equal):.4f}, nll off by {off:.5f}"
    print(f"{variant}, KV {kv_cache_dtype}, weights {quantization}: {found}")
    assert np.mean(equal) >= INT8_EQUAL
    assert np.mean(differences) <= INT8_MEAN
    assert off <= INT8_NLL


def mean_nll(llm: LLM) -> float:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PERPLEXITY["ids"]}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return float(
        np.mean(
            [
                -position[token].logprob
                for token, position in zip(PERPLEXITY["ids"][1:], output.prompt_logprobs[1:], strict=True)
                if position is not None
            ]
        )
    )


@pytest.mark.parametrize("settings", [{"activations": "int16"}, {"quantization": "f16"}], ids=str)
def test_exact_forms_give_the_golden_perplexity(settings: dict[str, Any], smollm2: Path) -> None:
    with engine(smollm2, **settings) as llm:
        assert mean_nll(llm) == pytest.approx(PERPLEXITY["mean_nll"], rel=1e-3)
