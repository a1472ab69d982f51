"""The real encoder says what an independent float32 implementation says of 200 texts, with both kernels.

`tests/data/minilm_embeddings.json` holds vectors of length 1; `make_embeddings_golden.py` says how they were
made.
"""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from mainspring import LLM, RequestError
from mainspring.kernels import native

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "minilm_embeddings.json").read_text("utf-8"))
TEXTS: list[str] = GOLDEN["texts"]
SOME = slice(0, 200, 8)  # of the texts: those that are asked alone, too

pytestmark = pytest.mark.slow


def golden() -> np.ndarray:
    packed = np.frombuffer(base64.b64decode(GOLDEN["vectors"]), "<f2")
    return packed.reshape(len(TEXTS), -1).astype(np.float64)


def vectors(llm: LLM, texts: list[str]) -> np.ndarray:
    return np.float32([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])


@pytest.fixture(scope="module", params=["numpy", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.library() is None:
        pytest.skip(native.why_not())
    return str(request.param)


@pytest.fixture(scope="module")
def llm(kernels: str, minilm: Path) -> LLM:
    return LLM(str(minilm), kernels=kernels, in_process=True, num_gpu_blocks_override=257)


def test_two_hundred_texts(llm: LLM):
    found, expected = vectors(llm, TEXTS).astype(np.float64), golden()
    assert found.shape == (200, 384)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)
    cosines = (found * expected).sum(axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.999999


def test_each_text_alone(llm: LLM, kernels: str):
    """Natively to the last bit."""
    together = vectors(llm, TEXTS)[SOME]
    alone = np.concatenate([vectors(llm, [text]) for text in TEXTS[SOME]])
    np.testing.assert_allclose(together, alone, rtol=0, atol=0.0 if kernels == "native" else 1e-6)


def test_its_length_is_what_its_makers_say(llm: LLM):
    assert llm.max_model_len == 256
    with pytest.raises(RequestError, match="max_model_len is 256"):
        llm.embed("word " * 255, use_tqdm=False)
    [cut] = llm.embed("word " * 255, use_tqdm=False, truncate_prompt_tokens=-1)
    [whole] = llm.embed("word " * 254, use_tqdm=False)
    assert cut.outputs == whole.outputs


def test_chunks_and_caching_are_off(minilm: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    llm = LLM(str(minilm), in_process=True, num_gpu_blocks_override=65)
    assert "chunked prefill and prefix caching are off" in caplog.text
    assert not llm.llm_engine.client.cache_facts.enable_prefix_caching
    text = TEXTS[30] * 3
    vectors(llm, [text])
    assert llm.embed(text, use_tqdm=False)[0].num_cached_tokens == 0
