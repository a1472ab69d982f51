"""`LLM.embed`, `encode`, `classify` and `score`: what an independent implementation says of the tiny encoder,
and what every model says whoever else is in the batch."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_encoder import CONFIG, TEXTS, write_encoder

from mainspring import LLM, AsyncLLM, PoolingParams, RequestError, SamplingParams
from mainspring.base.config import EngineArgs
from mainspring.base.errors import CheckpointError
from mainspring.base.messages import FinishReason, Pooling
from mainspring.frontend.input_processor import InputProcessor
from mainspring.frontend.output_processor import OutputProcessor
from mainspring.kernels import native

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "encoders" / "pooled_texts.json").read_text())
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
LAST = {"pooling_mode_lasttoken": True}
SETTINGS = {"in_process": True, "num_gpu_blocks_override": 65, "block_size": 16}
TOLERANCE = 2e-5
DECODER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def open_llm(folder: Path, **given) -> LLM:
    return LLM(str(folder), **{"kernels": "numpy"} | SETTINGS | given)


def vectors(llm: LLM, texts: list[str] = TEXTS, **given) -> np.ndarray:
    return np.float32([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False, **given)])


def unit(rows: object) -> np.ndarray:
    rows = np.asarray(rows)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), pooling=MEAN)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> LLM:
    return open_llm(folder)


@pytest.fixture(scope="module")
def decoder() -> LLM:
    return open_dummy(kernels="numpy")


def open_dummy(**given) -> LLM:
    """A decoder with random weights."""
    given = SETTINGS | {"load_format": "dummy", "skip_tokenizer_init": True} | given
    return LLM(json.dumps(DECODER), **given)


# -- values --------------------------------------------------------------------------------------------------


def test_the_mean_of_a_texts_tokens(encoder: LLM):
    np.testing.assert_allclose(vectors(encoder), unit(EXPECTED["mean"]), atol=TOLERANCE)


@pytest.mark.parametrize(("pooling", "name"), [(MEAN, "mean"), (CLS, "cls"), (LAST, "last")])
def test_the_files_say_how_it_is_pooled(tmp_path: Path, pooling: dict, name: str):
    """And whether the length is made 1: without a module for that it is not."""
    llm = open_llm(write_encoder(tmp_path, pooling=pooling, normalize=False))
    np.testing.assert_allclose(vectors(llm), EXPECTED[name], atol=TOLERANCE)
    asked = vectors(llm, pooling_params=PoolingParams(use_activation=True))
    np.testing.assert_allclose(asked, unit(EXPECTED[name]), atol=TOLERANCE)


def test_an_encoder_whose_files_do_not_say(tmp_path: Path):
    llm = open_llm(write_encoder(tmp_path))
    np.testing.assert_allclose(vectors(llm), unit(EXPECTED["mean"]), atol=TOLERANCE)


def test_a_vector_for_each_token(encoder: LLM):
    [output] = encoder.encode(TEXTS[1], use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    assert output.outputs.data.shape == (len(output.prompt_token_ids), CONFIG["hidden_size"])
    np.testing.assert_allclose(output.outputs.data[0], EXPECTED["cls"][1], atol=TOLERANCE)
    np.testing.assert_allclose(output.outputs.data[-1], EXPECTED["last"][1], atol=TOLERANCE)
    [whole] = encoder.encode(TEXTS[1], use_tqdm=False, pooling_task="embed")
    assert whole.outputs.data.tolist() == encoder.embed(TEXTS[1], use_tqdm=False)[0].outputs.embedding


def test_dimensions(encoder: LLM):
    cut = vectors(encoder, pooling_params=PoolingParams(dimensions=8))
    np.testing.assert_allclose(cut, unit(np.asarray(EXPECTED["mean"])[:, :8]), atol=TOLERANCE)
    with pytest.raises(RequestError, match="dimensions 33 are more than the 32") as refusal:
        encoder.embed("cat", PoolingParams(dimensions=33), use_tqdm=False)
    assert refusal.value.param == "dimensions"


def test_classes(tmp_path: Path):
    llm = open_llm(write_encoder(tmp_path, labels=("sad", "glad", "neither")))
    outputs = llm.classify(TEXTS, use_tqdm=False)
    assert {output.outputs.num_classes for output in outputs} == {3}
    probs = [output.outputs.probs for output in outputs]
    np.testing.assert_allclose(probs, EXPECTED["probs"], atol=TOLERANCE)
    with pytest.raises(RequestError, match="score needs a model of one label, and this one has 3"):
        llm.score("cat", "dog", use_tqdm=False)
    with pytest.raises(RequestError, match=r"this model \(bert\) classifies: use classify or score"):
        llm.embed("cat", use_tqdm=False)


def test_scores_of_pairs_that_are_read_at_once(tmp_path: Path):
    """The second text is of another kind of tokens, which have embeddings of their own."""
    llm = open_llm(write_encoder(tmp_path, labels=("yes",)))
    pairs = EXPECTED["pairs"]
    firsts, seconds = zip(*pairs, strict=True)
    found = [o.outputs.score for o in llm.score(list(firsts), list(seconds), use_tqdm=False)]
    np.testing.assert_allclose(found, np.ravel(EXPECTED["scores"]), atol=TOLERANCE)
    some = [o.outputs.score for o in llm.score(firsts[0], list(seconds[:5]), use_tqdm=False)]
    np.testing.assert_allclose(some, np.ravel(EXPECTED["scores"])[:5], atol=TOLERANCE)
    vocab_size = CONFIG["vocab_size"]
    with pytest.raises(RequestError, match=f"has {vocab_size}, which is no token"):
        llm.classify([[vocab_size]], use_tqdm=False)  # a caller has no tokens of the second kind


def test_scores_of_vectors(encoder: LLM):
    rows = unit(EXPECTED["mean"])
    found = [o.outputs.score for o in encoder.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    np.testing.assert_allclose(found, rows[1:] @ rows[0], atol=TOLERANCE)
    own = [o.outputs.score for o in encoder.score(TEXTS, TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(own, 1.0, atol=1e-6)
    with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 3"):
        encoder.score(TEXTS[:2], TEXTS[:3], use_tqdm=False)


# -- batches, chunks, caches ---------------------------------------------------------------------------------


def test_a_batch_says_what_each_text_says_alone(encoder: LLM):
    """Lengths are mixed. numpy's products round by the size of the batch; native ones do not."""
    alone = np.concatenate([vectors(encoder, [text]) for text in TEXTS])
    np.testing.assert_allclose(vectors(encoder), alone, atol=1e-6)


@pytest.mark.skipif(native.library() is None, reason="no native kernels")
def test_natively_a_batch_says_the_same_to_the_last_bit(folder: Path):
    llm = open_llm(folder, kernels="native")
    together = vectors(llm)
    assert together.tobytes() == b"".join(vectors(llm, [text]).tobytes() for text in TEXTS)
    np.testing.assert_allclose(together, unit(EXPECTED["mean"]), atol=2e-3)  # weights and KV in 16 bits


def decoder_prompts() -> list[list[int]]:
    dice = np.random.default_rng(5)
    return [dice.integers(0, 128, length).tolist() for length in (1, 2, 17, 40, 90, 33, 5)]


def test_a_decoder_gives_the_last_tokens_state(decoder: LLM):
    prompts = decoder_prompts()
    states = decoder.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
    last = np.float32([output.outputs.data[-1] for output in states])
    np.testing.assert_allclose(vectors(decoder, prompts), unit(last), atol=1e-6)


@pytest.mark.parametrize("kernels", ["numpy", "native"])
def test_chunks_and_cached_prefixes_of_a_decoder(kernels: str):
    """Cold, warm, in chunks, and beside requests that write."""
    if kernels == "native" and native.library() is None:
        pytest.skip(native.why_not())
    whole = open_dummy(kernels=kernels)
    chunked = open_dummy(kernels=kernels, max_num_batched_tokens=16, max_num_seqs=4)
    prompts = decoder_prompts()
    expected = vectors(whole, prompts)
    tolerance = 0.0 if kernels == "native" else 1e-5
    for found in (vectors(whole, prompts), vectors(chunked, prompts), vectors(chunked, prompts)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)
    assert chunked.embed(prompts[3], use_tqdm=False)[0].num_cached_tokens == 32
    with_writers = chunked.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 4 for output in with_writers)
    states = zip(chunked.encode(prompts, use_tqdm=False), whole.encode(prompts, use_tqdm=False), strict=True)
    for one, other in states:  # of every token, so nothing is taken from the cache
        np.testing.assert_allclose(one.outputs.data, other.outputs.data, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ranks", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_ranks(tmp_path: Path, ranks: dict):
    """The last stage pools, and asks the head; the tensors that only the head needs hurt nobody."""
    settings = {"in_process": False, "num_threads": 1, **ranks}
    with open_llm(write_encoder(tmp_path, labels=("yes",)), **settings) as llm:
        found = [o.outputs.score for o in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    np.testing.assert_allclose(found, np.ravel(EXPECTED["scores"])[:5], atol=TOLERANCE)


def test_layers_that_look_ahead_turn_chunks_and_caching_off(folder: Path, caplog: pytest.LogCaptureFixture):
    """Case B013, of an encoder: its texts are never cut, so a step must hold the longest; said in the log."""
    caplog.set_level(logging.INFO)
    llm = open_llm(folder)
    assert (
        "chunked prefill and prefix caching are off: the model has layers that are not causal" in caplog.text
    )
    facts = llm.llm_engine.client.cache_facts
    assert not facts.enable_prefix_caching
    text = "the red cat sleeps under the tree " * 4
    for _ in range(2):
        [output] = llm.embed(text, use_tqdm=False)
        assert output.num_cached_tokens == 0
    with pytest.raises(Exception, match="layers that are not causal, so max_num_batched_tokens 16 must hold"):
        open_llm(folder, max_num_batched_tokens=16)


# -- refusals ------------------------------------------------------------------------------------------------


def test_an_encoder_does_not_write(encoder: LLM):
    for ask in (
        lambda: encoder.generate("cat", use_tqdm=False),
        lambda: list(encoder.generate_stream("cat")),
    ):
        with pytest.raises(
            RequestError, match=r"this model \(bert\) reads texts and cannot generate: use embed"
        ):
            ask()
    assert encoder.get_stats().num_running == 0


@pytest.mark.parametrize(
    ("ask", "task", "more"), [("classify", None, {}), ("encode", "score", {"pooling_task": "score"})]
)
def test_a_head_that_is_not_there(encoder: LLM, decoder: LLM, ask: str, task: str | None, more: dict):
    words = r"needs a model with a head that classifies, and this one \("
    for llm in (encoder, decoder):
        with pytest.raises(RequestError, match=words):
            getattr(llm, ask)([[1, 2]], PoolingParams(task=task), use_tqdm=False, **more)


def test_a_text_longer_than_the_model(tmp_path: Path):
    """Refused, or cut if that is asked for; what stands around a text stays around what is left of it."""
    llm = open_llm(write_encoder(tmp_path, pooling=MEAN, max_seq_length=12))
    assert llm.max_model_len == 12
    long, fitting = "cat " * 11, "cat " * 10
    [whole] = llm.embed(fitting, use_tqdm=False)
    assert len(whole.prompt_token_ids) == 12
    with pytest.raises(
        RequestError, match="prompt has 13 tokens, and max_model_len is 12; shorten it, or set"
    ):
        llm.embed(["cat", long], use_tqdm=False)
    [cut] = llm.embed(long, use_tqdm=False, truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == whole.prompt_token_ids
    assert cut.outputs == whole.outputs
    ends = llm.embed("dog " + "cat " * 20 + "bird", use_tqdm=False, truncate_prompt_tokens=4)[0]
    left = llm.embed(
        "dog " + "cat " * 20 + "bird",
        PoolingParams(truncate_prompt_tokens=4, truncation_side="left"),
        use_tqdm=False,
    )[0]
    assert ends.prompt_token_ids == llm.get_tokenizer().encode("dog cat")
    assert left.prompt_token_ids == llm.get_tokenizer().encode("cat bird")
    with pytest.raises(RequestError, match="truncate_prompt_tokens must be -1 or from 1 to max_model_len 12"):
        llm.embed(long, use_tqdm=False, truncate_prompt_tokens=13)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"task": "plugin"}, "task"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"use_activation": "yes"}, "use_activation"),
    ],
)
def test_values_that_are_never_right(given: dict, param: str):
    with pytest.raises(RequestError) as refusal:
        PoolingParams(**given)
    assert refusal.value.param == param


def test_what_is_asked_of_the_wrong_method(encoder: LLM):
    asked: list[tuple[Callable[[], object], str]] = [
        (lambda: encoder.embed("cat", PoolingParams(task="classify"), use_tqdm=False), "are for classify"),
        (lambda: encoder.embed("cat", SamplingParams(), use_tqdm=False), "must be PoolingParams"),  # type: ignore[arg-type]
        (lambda: encoder.embed("", PoolingParams(task="encode"), use_tqdm=False), "are for token_embed"),
        (lambda: encoder.embed(["cat", []], use_tqdm=False), "prompt 1 of 2: prompt is empty"),
        (lambda: encoder.embed({"prompt": "cat", "image": 1}, use_tqdm=False), "the key 'image'"),
    ]
    for ask, words in asked:
        with pytest.raises(RequestError, match=re.escape(words)):
            ask()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pools by"),
        ({"1_Pooling/config.json": {**MEAN, "pooling_mode_cls_token": True}}, "pools by"),
        (
            {"modules.json": [{"type": "models.Transformer", "path": ""}, {"type": "x.Dense", "path": "2"}]},
            "Dense",
        ),
        ({"modules.json": {"type": "models.Transformer"}}, "is no list of modules"),
        ({"sentence_bert_config.json": {"max_seq_length": "256"}}, "max_seq_length"),
    ],
)
def test_files_that_say_what_is_not_understood(tmp_path: Path, damage: dict, words: str):
    write_encoder(tmp_path, pooling=MEAN)
    for name, content in damage.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=words) as refusal:
        open_llm(tmp_path)
    assert "\n" not in str(refusal.value)


# -- what is kept and counted --------------------------------------------------------------------------------


def test_statistics_count_what_is_read(folder: Path):
    llm = open_llm(folder, disable_log_stats=False)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    stats = llm.llm_engine.stats
    assert stats is not None
    assert stats.num_prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert stats.num_generation_tokens == 0
    assert stats.ends[FinishReason.STOP] == len(TEXTS) == stats.num_begun


def test_another_core_is_given_the_same_request(encoder: LLM):
    """What the journal holds of it: nothing was delivered, so all of it is done again."""
    inputs = InputProcessor(encoder.llm_engine.facts, 40, encoder.get_tokenizer())
    outputs = OutputProcessor(encoder.get_tokenizer())
    _, requests = inputs.process("a", TEXTS[0], PoolingParams(task="embed"))
    outputs.add_request("a", TEXTS[0], requests)
    assert outputs.journal() == requests
    assert requests[0].pooling == Pooling("mean", "normalize")
    assert requests[0].sampling_params.skip_reading_prefix_cache


# -- from an event loop, in a process of its own -------------------------------------------------------------


def test_async(folder: Path):
    async def ask() -> list[np.ndarray]:
        args = EngineArgs(model=str(folder), kernels="numpy", num_gpu_blocks_override=65)
        async with await AsyncLLM.launch(args) as llm:

            async def one(i: int) -> np.ndarray:
                found = [o async for o in llm.encode(TEXTS[i], PoolingParams(task="embed"), str(i))]
                [output] = found
                assert output.finished
                assert output.request_id == str(i)
                return output.outputs.data

            return await asyncio.gather(*map(one, range(len(TEXTS))))

    np.testing.assert_allclose(asyncio.run(ask()), unit(EXPECTED["mean"]), atol=TOLERANCE)
