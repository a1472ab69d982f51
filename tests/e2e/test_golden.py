"""The real model says what an independent float32 implementation says, whatever the engine's settings.

`tests/data/smollm2_135m_greedy.json` holds greedy continuations, log-probabilities and a perplexity run. The
weights are the same, the order of additions is not: where the two best logits are nearer than `TIE`, either
may win, and the comparison of that continuation ends there.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainspring import LLM, RequestOutput, SamplingParams

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m_greedy.json").read_text())
CASES: list[dict[str, Any]] = GOLDEN["chat"] + GOLDEN["raw"]
PERPLEXITY = GOLDEN["perplexity"]
TIE = 1e-3
LOGPROB_TOLERANCE = 2e-3
NLL_TOLERANCE = 1e-3
LONGEST_CONTINUATION = 96  # tokens of the longest prompt and its answer, and a few more


@dataclass(frozen=True)
class Setting:
    """One way to run the engine."""

    block_size: int
    max_num_batched_tokens: int
    cache: str  # cold, warm or off
    together: bool  # all prompts in one batch, or one after the other
    scarce: bool  # a pool so small that requests are preempted

    def __str__(self) -> str:
        return (
            f"block{self.block_size}-budget{self.max_num_batched_tokens}-{self.cache}-"
            f"{'together' if self.together else 'alone'}-{'scarce' if self.scarce else 'roomy'}"
        )

    def make(self, model: Path, max_model_len: int) -> LLM:
        """A roomy pool holds 2,048 tokens; a scarce one just one sequence of `max_model_len`."""
        tokens = max_model_len if self.scarce else 2048
        return LLM(
            str(model),
            kernels="numpy",
            max_model_len=max_model_len,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.cache != "off",
            num_gpu_blocks_override=1 + -(-tokens // self.block_size),
            max_logprobs=5,
        )


COVERING = [
    Setting(16, 2048, "cold", together=True, scarce=False),
    Setting(32, 16, "warm", together=True, scarce=False),
    Setting(16, 16, "off", together=True, scarce=True),
    Setting(32, 2048, "warm", together=False, scarce=True),
]
PRODUCT = [
    Setting(*values)
    for values in itertools.product(
        (16, 32), (16, 2048), ("cold", "warm", "off"), (True, False), (False, True)
    )
]


def generate(setting: Setting, llm: LLM) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=5, stop_token_ids=[2])
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in CASES]
    rounds = 2 if setting.cache == "warm" else 1
    for _ in range(rounds):
        if setting.together:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        else:
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return outputs


def check_continuations(setting: Setting, outputs: list[RequestOutput]) -> None:
    for case, output in zip(CASES, outputs, strict=True):
        (answer,) = output.outputs
        name = repr(case.get("user", case.get("prompt")))
        compared = next((i for i, gap in enumerate(case["top2_gap"]) if gap < TIE), len(case["greedy_ids"]))
        assert answer.token_ids[:compared] == case["greedy_ids"][:compared], name
        assert answer.logprobs is not None
        for step, expected in enumerate(case["top5_logprobs"][:compared]):
            for token_id, logprob in expected[:4]:  # the fifth may tie with the sixth
                assert answer.logprobs[step][token_id].logprob == pytest.approx(
                    logprob, abs=LOGPROB_TOLERANCE
                ), f"{name}, step {step}, token {token_id}"
            got = sorted((entry.logprob for entry in answer.logprobs[step].values()), reverse=True)[:5]
            assert got == pytest.approx([logprob for _, logprob in expected], abs=LOGPROB_TOLERANCE), name
        if compared == len(case["greedy_ids"]):
            assert answer.text.strip() == case["text"].strip(), name
            assert answer.finish_reason == ("stop" if case["greedy_ids"][-1] == 2 else "length"), name
    cached = [output.num_cached_tokens for output in outputs]
    if setting.cache == "off":
        assert not any(cached)
    elif setting.cache == "warm" and not setting.scarce:
        assert all(
            hit == (len(case["prompt_ids"]) - 1) // setting.block_size * setting.block_size
            for hit, case in zip(cached, CASES, strict=True)
        )


def check_perplexity(llm: LLM) -> float:
    """Returns how far the mean negative log-likelihood is from the golden one."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PERPLEXITY["ids"]}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    nll = [
        -position[token].logprob
        for token, position in zip(PERPLEXITY["ids"][1:], output.prompt_logprobs[1:], strict=True)
        if position is not None
    ]
    assert nll == pytest.approx(PERPLEXITY["nll"], abs=2e-2)
    distance = abs(float(np.mean(nll)) - PERPLEXITY["mean_nll"])
    assert distance < NLL_TOLERANCE
    return distance


def continuations(setting: Setting, model: Path) -> int:
    """Returns how many requests were preempted."""
    with setting.make(model, LONGEST_CONTINUATION) as llm:
        check_continuations(setting, generate(setting, llm))
        num_preemptions = llm.get_stats().num_preemptions
    assert num_preemptions or not (setting.scarce and setting.together), "the pool was meant to be too small"
    return num_preemptions


def perplexity(setting: Setting, model: Path) -> float:
    """Returns how far the mean negative log-likelihood is off."""
    with setting.make(model, len(PERPLEXITY["ids"]) + 1) as llm:
        rounds = 2 if setting.cache == "warm" else 1
        return max(check_perplexity(llm) for _ in range(rounds))


@pytest.mark.parametrize("setting", COVERING, ids=str)
def test_continuations(setting: Setting, smollm2: Path) -> None:
    continuations(setting, smollm2)


@pytest.mark.parametrize("setting", COVERING[:2], ids=str)
def test_perplexity(setting: Setting, smollm2: Path) -> None:
    perplexity(setting, smollm2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", PRODUCT, ids=str)
def test_every_setting(setting: Setting, smollm2: Path) -> None:
    num_preemptions = continuations(setting, smollm2)
    print(f"{setting}: {num_preemptions} preemptions, nll off by {perplexity(setting, smollm2):.1e}")
