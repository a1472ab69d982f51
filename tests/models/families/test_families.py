"""Every family, in both forms of files, says what an independent implementation says, through `LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_fixtures
import numpy as np
import pytest
from family_files import write_folder, write_gguf
from family_fixtures import NUM_NEW, Fixture
from gemma_phi_gpt2_configs import MAX_MODEL_LEN
from moe_configs import FOLDERS_ONLY

from mainspring import LLM, SamplingParams
from mainspring.base.outputs import Logprob
from mainspring.checkpoint.folder import ModelFolder
from mainspring.checkpoint.opening import open_checkpoint
from mainspring.kernels.native import library, why_not
from mainspring.models.families import from_folder

TOLERANCE = 1e-4

PROMPTS_ONLY = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
GOING_ON = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, logprobs=-1, ignore_eos=True)


@pytest.fixture(scope="module", params=family_fixtures.names())
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return family_fixtures.load(request.param)


@pytest.fixture(scope="module", params=["folder", "gguf"])
def path(request: pytest.FixtureRequest, fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders have their weights in one, two or three files, by turns."""
    if request.param == "gguf" and fixture.name in FOLDERS_ONLY:
        pytest.skip("no GGUF file can say so")
    place = tmp_path_factory.mktemp(fixture.name)
    if request.param == "gguf":
        return write_gguf(fixture, place / "model.gguf")
    return write_folder(fixture, place, shards=1 + family_fixtures.names().index(fixture.name) % 3)


def opened(path: Path, **changes: Any) -> LLM:
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "in_process": True,
        "kernels": "numpy",
        "num_threads": 1,
        "block_size": 4,
        "num_gpu_blocks_override": 200,
        "max_logprobs": -1,
    }
    return LLM(path, **settings | changes)


@pytest.fixture(scope="module", params=["whole", "chunked", "native"])
def llm(request: pytest.FixtureRequest, fixture: Fixture, path: Path) -> Iterator[LLM]:
    """In numpy, a prompt in one step or in many; and on native kernels, in a few."""
    settings = {
        "whole": {"max_num_batched_tokens": 64},
        "chunked": {"max_num_batched_tokens": 7},
        "native": {
            "max_num_batched_tokens": 19,
            "kernels": "native",
            "block_size": 16,
            "kv_cache_dtype": "float32",
        },
    }[request.param]
    if request.param == "native" and library() is None:
        pytest.skip(why_not())
    llm = opened(path, max_model_len=MAX_MODEL_LEN.get(fixture.name), max_num_seqs=4, **settings)
    yield llm
    llm.shutdown()


def row(position: dict[int, Logprob] | None) -> list[float]:
    """Log-probabilities by token id."""
    assert position is not None
    return [position[token].logprob for token in range(len(position))]


def check(found: list[list[float]], expected: family_fixtures.Floats) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=TOLERANCE)


def test_whole_sequences(fixture: Fixture, llm: LLM) -> None:
    """Case B155: whatever turns positions is what the model was made with. Case B178: rows of Q and K that a
    converter put in another order, factors that it made a tensor of, heads that it left out."""
    outputs = llm.generate(fixture.token_ids, PROMPTS_ONLY, use_tqdm=False)
    for output, expected in zip(outputs, fixture.log_probs, strict=True):
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        check([row(position) for position in output.prompt_logprobs[1:]], expected[:-1])
        check([row(output.outputs[0].logprobs[0])], expected[-1:])


def test_token_by_token_and_with_a_warm_cache(fixture: Fixture, llm: LLM) -> None:
    for cached in (False, True):
        outputs = llm.generate(fixture.prompts, GOING_ON, use_tqdm=False)
        for output, ids, expected in zip(outputs, fixture.token_ids, fixture.log_probs, strict=True):
            answer = output.outputs[0]
            assert answer.token_ids == ids[-NUM_NEW:]
            assert answer.logprobs is not None
            check([row(position) for position in answer.logprobs], expected[-NUM_NEW - 1 : -1])
            assert not cached or output.num_cached_tokens or len(output.prompt_token_ids) <= 16


def test_configs_as_written_today(fixture: Fixture, tmp_path: Path) -> None:
    """Case B155: the older spelling of a config and today's are one network."""
    with open_checkpoint(write_folder(fixture, tmp_path)) as folder:
        assert isinstance(folder, ModelFolder)
        older, newer = (
            from_folder(config, folder, MAX_MODEL_LEN.get(fixture.name))
            for config in (fixture.config, fixture.saved_config)
        )
    assert older == newer
