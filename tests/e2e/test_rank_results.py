"""What is said beside tokens is the same with several workers: log-probabilities of answers and prompts,
several answers to a prompt, penalties, masks of grammars; in chunks and from the cache; with numpy's kernels
and native ones.

Stages change no bit of what native kernels say. Ranks that share layers sum in another order, and numpy does
so for batches of other sizes: the last digits may differ there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tiny_engine import END, EOS, FACTS, MODEL, NUM_TOKENS, SETTINGS, TwoLetters, ask, text

from mainspring import LLM, EngineArgs, RequestOutput, SamplingParams
from mainspring.base.config import Vocabulary, resolve
from mainspring.base.params import StructuredOutputsParams
from mainspring.engine.client import EngineCoreClient
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.llm_engine import LLMEngine
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.kernels.native import library


class Tokenizer(TwoLetters):
    adds_space = False


TOKENIZER = Tokenizer()
WIDE = MODEL | {"hidden_size": 64, "intermediate_size": 96}  # native heads have 16 numbers at least
WORDS = [TOKENIZER.token_bytes(i) for i in range(NUM_TOKENS)]
REGEX = "((ak|bl|cm|dz)(hk|gl)?){4,9}"
PROMPTS = [text(9 + 11 * i, i) for i in range(5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, prompt_logprobs=3, ignore_eos=True),
    SamplingParams(n=3, seed=7, max_tokens=10, logprobs=2, ignore_eos=True),
    SamplingParams(
        seed=8, max_tokens=40, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4, logprobs=0
    ),
    SamplingParams(
        temperature=0.0, max_tokens=30, structured_outputs=StructuredOutputsParams(regex=REGEX), logprobs=1
    ),
    SamplingParams(seed=9, max_tokens=30, structured_outputs=StructuredOutputsParams(regex=REGEX)),
]
RANKS = [
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "async_scheduling": True},
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2, "async_scheduling": True}, marks=pytest.mark.slow),
]
TOLERANCE = 1e-4  # of a log-probability, where sums are made in another order


def make_llm(kernels: str, **settings: Any) -> LLM:
    args = EngineArgs(**SETTINGS | {"kernels": kernels, "max_num_batched_tokens": 24} | settings)
    config = structs.replace(
        resolve(args, replace(FACTS, path=json.dumps(WIDE))),
        vocabulary=Vocabulary(WORDS, [EOS, END], [EOS, END]),
    )
    client = EngineCoreClient.make_client(config, in_process=True)
    inputs = InputProcessor(FACTS, client.max_model_len, TOKENIZER, max_logprobs=-1, seed=args.seed)
    return LLM.from_engine(LLMEngine(client, inputs, OutputProcessor(TOKENIZER), TOKENIZER))


def answers(kernels: str, **settings: Any) -> list[RequestOutput]:
    """All at once, twice: the second time from the cache, where that may be read."""
    with make_llm(kernels, **settings) as llm:
        first = ask(llm, PROMPTS, PARAMS)
        again = ask(llm, PROMPTS, PARAMS)
        assert llm.get_stats().prefix_cache_hits > 0
    return first + again


@cache
def alone(kernels: str) -> list[RequestOutput]:
    return answers(kernels)


@pytest.mark.parametrize("kernels", ["numpy", "native"])
@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: "-".join(map(str, ranks.values())))
def test_results_are_those_of_one_worker(kernels: str, ranks: dict[str, Any]) -> None:
    if kernels == "native" and library() is None:
        pytest.skip("the native kernels are not built")
    is_exact = kernels == "native" and "tensor_parallel_size" not in ranks
    compare(alone(kernels), answers(kernels, **ranks), is_exact)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_results_over_gloo(ranks: dict[str, Any]) -> None:
    pytest.importorskip(
        "torch", reason="collectives gloo are torch.distributed: install mainspring[distributed]"
    )
    said = answers("numpy", collectives="gloo", **ranks)
    compare(alone("numpy"), said, is_exact=False)


def compare(ours: list[RequestOutput], theirs: list[RequestOutput], is_exact: bool) -> None:
    tolerance = 0.0 if is_exact else TOLERANCE
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.outputs) == len(other.outputs)
        compare_logprobs(one.prompt_logprobs, other.prompt_logprobs, tolerance)
        for mine, yours in zip(one.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish_reason) == (
                yours.token_ids,
                yours.text,
                yours.finish_reason,
            )
            compare_logprobs(mine.logprobs, yours.logprobs, tolerance)


def compare_logprobs(ours: Iterable[Any] | None, theirs: Iterable[Any] | None, tolerance: float) -> None:
    """Of each position: the same tokens, but for those that may change places at the end of the list."""
    assert (ours is None) == (theirs is None)
    for mine, yours in zip(ours or [], theirs or [], strict=True):
        assert (mine is None) == (yours is None)
        if mine is None:
            continue
        assert len(mine) == len(yours)
        common = [token for token in mine if token in yours]
        assert len(common) >= len(mine) - (tolerance > 0.0)
        np.testing.assert_allclose(
            [mine[token].logprob for token in common],
            [yours[token].logprob for token in common],
            rtol=0,
            atol=tolerance,
        )


def test_what_is_compared_is_worth_it() -> None:
    """Answers that differ from each other, of every kind."""
    said = alone("numpy")
    assert len({tuple(one.token_ids) for one in said[1].outputs}) == 3
    assert said[0].prompt_logprobs is not None
    assert len(said[0].prompt_logprobs) == len(PROMPTS[0])
    for constrained in (said[3], said[4]):
        assert constrained.outputs[0].text[:2] in ("ak", "bl", "cm", "dz")
