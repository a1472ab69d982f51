"""The real model says what an independent float32 implementation says, whatever the engine's settings.

`tests/data/smollm2_135m_greedy.json` holds greedy continuations, log-probabilities and a perplexity run. The
weights are the same, the order of additions is not: where the two best logits are nearer than `TIE`, either
may win, and the comparison of that continuation ends there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from mainspring import LLM, AsyncLLM, RequestOutput, SamplingParams
from mainspring.base.config import EngineArgs
from mainspring.base.params import RequestOutputKind
from mainspring.engine.client import InprocClient
from mainspring.frontend.llm_engine import LLMEngine

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_135m_greedy.json").read_text())
Cases = Sequence[dict[str, Any]]
CASES: Cases = GOLDEN["chat"] + GOLDEN["raw"]
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
    client: str = "in process"  # or, of a core in a process of its own: sync, async
    depth: int = 1  # steps in flight

    def __str__(self) -> str:
        return (
            f"block{self.block_size}-budget{self.max_num_batched_tokens}-{self.cache}-"
            f"{'together' if self.together else 'alone'}-{'scarce' if self.scarce else 'roomy'}-"
            f"{self.client.replace(' ', '')}-depth{self.depth}"
        )

    def engine_args(self, model: Path, max_model_len: int) -> EngineArgs:
        """A roomy pool holds 2,048 tokens; a scarce one just one sequence of `max_model_len`."""
        tokens = max_model_len if self.scarce else 2048
        return EngineArgs(
            model=str(model),
            kernels="numpy",
            max_model_len=max_model_len,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.cache != "off",
            num_gpu_blocks_override=1 + -(-tokens // self.block_size),
            max_logprobs=5,
            in_process=self.client == "in process",
            async_scheduling=self.depth == 2,
        )


class Engine(NamedTuple):
    """The same for every client."""

    generate: Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]]
    num_preemptions: Callable[[], int]


@contextmanager
def running(setting: Setting, model: Path, max_model_len: int) -> Iterator[Engine]:
    args = setting.engine_args(model, max_model_len)
    if setting.client == "async":
        with asyncio.Runner() as runner:
            async_llm = AsyncLLM.from_engine_args(args)
            try:
                yield Engine(
                    lambda prompts, params: runner.run(all_answers(async_llm, prompts, params)),
                    lambda: runner.run(async_llm.get_stats()).num_preemptions,
                )
            finally:
                runner.run(async_llm.shutdown())
    else:
        with LLM.from_engine(LLMEngine.from_engine_args(args)) as llm:
            assert isinstance(llm.llm_engine.client, InprocClient) == (setting.client == "in process")
            yield Engine(
                lambda prompts, params: llm.generate(prompts, params, use_tqdm=False),
                lambda: llm.get_stats().num_preemptions,
            )


async def all_answers(
    llm: AsyncLLM, prompts: list[dict[str, Any]], params: SamplingParams
) -> list[RequestOutput]:
    """All at once, each of them whole."""
    whole = replace(params, output_kind=RequestOutputKind.FINAL_ONLY)

    async def answer(number: int, prompt: dict[str, Any]) -> RequestOutput:
        (output,) = [output async for output in llm.generate(prompt, whole, str(number))]
        return output

    return await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(prompts)))


COVERING = [
    Setting(16, 2048, "cold", together=True, scarce=False, client="sync", depth=1),
    Setting(32, 16, "warm", together=True, scarce=False, client="async", depth=2),
    pytest.param(  # tokens that are computed again cost as much as two rounds; see `test_seeded.py`, too
        Setting(16, 16, "off", together=True, scarce=True, client="in process", depth=2),
        marks=pytest.mark.slow,
    ),
    pytest.param(  # one after the other takes a minute
        Setting(32, 2048, "warm", together=False, scarce=True, client="async", depth=1),
        marks=pytest.mark.slow,
    ),
]
COVERING_TEXTS = [
    Setting(16, 2048, "cold", together=True, scarce=False, client="sync", depth=2),
    pytest.param(
        Setting(32, 16, "warm", together=True, scarce=False, client="in process", depth=1),
        marks=pytest.mark.slow,
    ),
]
PRODUCT = [
    Setting(*values)
    for values in itertools.product(
        (16, 32), (16, 2048), ("cold", "warm", "off"), (True, False), (False, True)
    )
]
EVERY_CLIENT = [
    Setting(16, 16, "warm", together=True, scarce=True, client=client, depth=depth)
    for client, depth in itertools.product(("in process", "sync", "async"), (1, 2))
]


def generate(setting: Setting, engine: Engine, cases: Cases) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=5, stop_token_ids=[2])
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
    rounds = 2 if setting.cache == "warm" else 1
    for _ in range(rounds):
        if setting.together:
            outputs = engine.generate(prompts, params)
        else:
            outputs = [engine.generate([prompt], params)[0] for prompt in prompts]
    return outputs


def check_continuations(setting: Setting, outputs: list[RequestOutput], cases: Cases) -> None:
    for case, output in zip(cases, outputs, strict=True):
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
            for hit, case in zip(cached, cases, strict=True)
        )


def check_perplexity(engine: Engine) -> float:
    """Returns how far the mean negative log-likelihood is from the golden one."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([{"prompt_token_ids": PERPLEXITY["ids"]}], params)
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


def continuations(setting: Setting, model: Path, cases: Cases = CASES) -> int:
    """Returns how many requests were preempted."""
    with running(setting, model, LONGEST_CONTINUATION) as engine:
        check_continuations(setting, generate(setting, engine, cases), cases)
        num_preemptions = engine.num_preemptions()
    assert num_preemptions or not (setting.scarce and setting.together), "the pool was meant to be too small"
    return num_preemptions


def perplexity(setting: Setting, model: Path) -> float:
    """Returns how far the mean negative log-likelihood is off."""
    with running(setting, model, len(PERPLEXITY["ids"]) + 1) as engine:
        rounds = 2 if setting.cache == "warm" else 1
        return max(check_perplexity(engine) for _ in range(rounds))


@pytest.mark.parametrize("setting", COVERING, ids=str)
def test_continuations(setting: Setting, smollm2: Path) -> None:
    """Every prompt in one setting, every third where prompts are computed twice; `test_every_setting` has
    them all."""
    continuations(setting, smollm2, CASES[::3] if setting.cache == "warm" else CASES)


@pytest.mark.parametrize("setting", COVERING_TEXTS, ids=str)
def test_perplexity(setting: Setting, smollm2: Path) -> None:
    perplexity(setting, smollm2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", PRODUCT + EVERY_CLIENT, ids=str)
def test_every_setting(setting: Setting, smollm2: Path) -> None:
    num_preemptions = continuations(setting, smollm2)
    print(f"{setting}: {num_preemptions} preemptions, nll off by {perplexity(setting, smollm2):.1e}")
