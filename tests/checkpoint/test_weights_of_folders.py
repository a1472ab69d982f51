"""What is computed with a folder's weights, whatever types they have and whether the head is tied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from safetensors.numpy import save_file

from mainspring import LLM, SamplingParams
from mainspring.base.errors import CheckpointError


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packed weights are not kept for anybody."""
    monkeypatch.setenv("MAINSPRING_CACHE", str(tmp_path / "cache"))


def as_bfloat16(path: Path) -> None:
    """float32 whose lower halves are zero, written again as their upper halves."""
    from safetensors.numpy import load_file

    halves = {
        name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in load_file(path).items()
    }
    save_file(halves, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = content[8 : 8 + length].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(table).to_bytes(8, "little") + table + content[8 + length :])


@pytest.mark.parametrize("kernels", ["numpy", "auto"])
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_weights_of_16_bits_compute_as_their_values(kind: str, kernels: str, tmp_path: Path) -> None:
    """Case B154: at far positions as at near ones, for no table of positions has 16 bits: the same tokens as
    with the same numbers in 32 bits, and in numpy the same log-probabilities to the last bit. Native kernels
    round activations otherwise for BF16 than for F32."""
    values = tiny_llama.weights()
    for name, value in values.items():
        bits = value.view(np.uint32)
        values[name] = (
            value.astype(np.float16).astype(np.float32) if kind == "F16" else (bits >> 16 << 16).view("f4")
        )
    plain = tiny_llama.write(tmp_path / "plain", values)
    half = tiny_llama.write(
        tmp_path / "half",
        {name: value.astype(np.float16) for name, value in values.items()} if kind == "F16" else values,
    )
    if kind == "BF16":
        as_bfloat16(half / "model.safetensors")
    assert (half / "model.safetensors").stat().st_size < 0.6 * (plain / "model.safetensors").stat().st_size
    for prompt_len in (5, 900):
        (tokens, logprob), expected = (tiny_llama.said(path, kernels, prompt_len) for path in (half, plain))
        assert tokens == expected[0]
        assert logprob == (expected[1] if kernels == "numpy" else pytest.approx(expected[1], abs=0.06))


@pytest.mark.parametrize("tied", [True, False, None], ids=["tied", "untied", "silent"])
@pytest.mark.parametrize("head", ["none", "equal", "other"])
def test_a_head_and_what_the_config_says_of_it(tied: bool | None, head: str, tmp_path: Path) -> None:
    """Case B152: a head of its own is used, whatever the config says; without one the config must say that it
    is the embedding. Never is there a head of random numbers, nor one that is left out without a word."""
    tensors = tiny_llama.weights()
    embedding = tensors["model.embed_tokens.weight"]
    expected = tiny_llama.said(tiny_llama.write(tmp_path / "tied", tensors))
    if head != "none":
        tensors["lm_head.weight"] = embedding.copy() if head == "equal" else embedding[::-1].copy()
    config = {key: value for key, value in tiny_llama.CONFIG.items() if key != "tie_word_embeddings"}
    if tied is not None:
        config["tie_word_embeddings"] = tied
    folder = tiny_llama.write(tmp_path / "m", tensors, config)
    if head == "none" and not tied:
        with pytest.raises(
            CheckpointError, match=r"tensor 'lm_head\.weight' is missing; expected shape \[40, 64\]"
        ):
            tiny_llama.said(folder)
    elif head == "other":
        tokens, logprob = tiny_llama.said(folder)
        assert (tokens[0], logprob) != (expected[0][0], expected[1])
        assert tokens[0] == tiny_llama.VOCAB - 1 - expected[0][0]  # its rows are the embedding's, turned over
    else:
        assert tiny_llama.said(folder) == expected


def test_what_generation_config_says_holds_where_nothing_is_asked(tmp_path: Path) -> None:
    """Sampling as the makers advise, and an answer ends at any of their end tokens."""
    folder = tiny_llama.write(tmp_path / "m", tiny_llama.weights())
    prompt = {"prompt_token_ids": [1, 2, 3]}
    settings = {"skip_tokenizer_init": True, "in_process": True, "kernels": "numpy", "num_threads": 1}
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    with LLM(folder, **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        (plain,) = llm.generate([prompt], greedy, use_tqdm=False)
    end = plain.outputs[0].token_ids[4]
    advice = {"eos_token_id": [0, end], "top_k": 1, "temperature": 0.7, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    with LLM(folder, **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, temperature=0.7, max_tokens=9)
        (answer,) = llm.generate([prompt], use_tqdm=False)
    found = answer.outputs[0]
    expected = plain.outputs[0].token_ids
    assert found.token_ids == expected[: expected.index(end) + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", end)
