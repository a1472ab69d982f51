"""Experts spread over ranks, in processes of their own, say what one process says: ranks that share layers,
and data-parallel ones, which step together."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mainspring import LLM, SamplingParams
from mainspring.base.config import EngineArgs
from mainspring.base.errors import ConfigError
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.kernels.native import library

MODEL: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 48,
    "vocab_size": 256,
}
SETTINGS: dict[str, Any] = {
    "model": json.dumps(MODEL),
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kernels": "numpy",
    "num_threads": 1,
    "seed": 7,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_gpu_blocks_override": 100,
}
PROMPTS = [{"prompt_token_ids": [(7 * i + 11 * j) % 256 for j in range(3 + 5 * i)]} for i in range(6)]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return said()


def said(**settings: Any) -> list[list[int]]:
    with LLM(**SETTINGS | settings) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("expert_parallel", [True, False])
def test_ranks_that_share_layers(expert_parallel: bool, expected: list[list[int]]) -> None:
    assert said(tensor_parallel_size=2, enable_expert_parallel=expert_parallel) == expected


@pytest.mark.skipif(library() is None, reason="no native kernels")
def test_ranks_that_share_layers_on_native_kernels() -> None:
    native = {"kernels": "native", "block_size": 16}
    alone = said(**native, in_process=True)
    assert said(**native, tensor_parallel_size=2, enable_expert_parallel=True) == alone


def test_data_parallel_ranks_in_lock_step(expected: list[list[int]]) -> None:
    """Twice, with a pause between in which they sleep; and one request alone, for which the other rank makes
    empty steps."""

    async def one(llm: AsyncLLM, index: int, name: str) -> list[int]:
        final = None
        async for output in llm.generate(PROMPTS[index], PARAMS, f"{name} {index}"):
            final = output
        assert final is not None
        return final.outputs[0].token_ids

    async def main() -> None:
        args = EngineArgs(**SETTINGS, data_parallel_size=2, enable_expert_parallel=True)
        async with await AsyncLLM.launch(args) as llm:
            for name in ("first", "again"):
                found = await asyncio.gather(*(one(llm, i, name) for i in range(len(PROMPTS))))
                assert found == expected
                await asyncio.sleep(0.2)
            assert await one(llm, 5, "alone") == expected[5]

    asyncio.run(main())


def test_a_model_without_experts_is_refused() -> None:
    plain = {key: value for key, value in MODEL.items() if "expert" not in key and "moe" not in key}
    settings = SETTINGS | {"model": json.dumps(plain | {"model_type": "llama"})}
    with pytest.raises(ConfigError, match="enable_expert_parallel: this model has no experts; leave it out"):
        LLM(**settings, tensor_parallel_size=2, enable_expert_parallel=True)
