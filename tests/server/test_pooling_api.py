"""`/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank` over a socket, with tiny encoders whose
texts an independent implementation has read too."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from server_toys import Running, fake, is_idle, running, scripted, wait_until
from tiny_encoder import TEXTS, write_encoder

from mainspring.base.config import EngineArgs
from mainspring.frontend.async_llm import AsyncLLM

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "encoders" / "pooled_texts.json").read_text())
MEAN = {"pooling_mode_mean_tokens": True}
TOLERANCE = 2e-5


def serve(folder: Path) -> Iterator[Running]:
    args = EngineArgs(model=str(folder), kernels="numpy", num_gpu_blocks_override=65)
    with running(partial(AsyncLLM.from_engine_args, args)) as server:
        yield server


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(write_encoder(tmp_path_factory.mktemp("encoder"), pooling=MEAN, max_seq_length=24))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from serve(write_encoder(tmp_path_factory.mktemp("ranker"), labels=("yes",)))


def unit(rows: object) -> np.ndarray:
    rows = np.asarray(rows)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def embed(server: Running, given: object, **fields) -> list:
    reply = server.post("/v1/embeddings", {"input": given, **fields})
    assert reply.status == 200, reply.body
    return [one["embedding"] for one in reply.json["data"]]


def test_embeddings(encoder):
    reply = encoder.post("/v1/embeddings", {"input": TEXTS, "model": "toy"})
    assert reply.status == 200
    body = reply.json
    assert body.keys() == {"id", "object", "created", "model", "usage", "data"}
    assert body["id"].startswith("embd-")
    assert (body["object"], body["model"]) == ("list", "toy")
    assert [one["index"] for one in body["data"]] == list(range(len(TEXTS)))
    assert {one["object"] for one in body["data"]} == {"embedding"}
    found = [one["embedding"] for one in body["data"]]
    np.testing.assert_allclose(found, unit(EXPECTED["mean"]), atol=TOLERANCE)
    num_tokens = sum(len(encoder.post("/tokenize", {"prompt": text}).json["tokens"]) for text in TEXTS)
    assert body["usage"] == {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    wait_until(partial(is_idle, encoder))


def test_forms_of_input(encoder):
    """A text, texts, token ids, lists of these: the same texts have the same vectors."""
    ids = [encoder.post("/tokenize", {"prompt": text}).json["tokens"] for text in TEXTS]
    expected = unit(EXPECTED["mean"])
    for given, rows in ((TEXTS[1], expected[1:2]), (ids[1], expected[1:2]), (ids, expected)):
        np.testing.assert_allclose(embed(encoder, given), rows, atol=TOLERANCE)
    [bare] = embed(encoder, "cat", add_special_tokens=False)
    [as_ids] = embed(encoder, ids[0][1:-1])
    np.testing.assert_allclose(bare, as_ids, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, np.float32),
        ({"endianness": "little"}, "<f4"),
        ({"endianness": "big", "embed_dtype": "float32"}, ">f4"),
        ({"embed_dtype": "float16"}, np.float16),
    ],
)
def test_base64(encoder, fields, dtype):
    """The default of OpenAI's clients: the numbers' bytes."""
    plain = np.float32(embed(encoder, TEXTS))
    packed = embed(encoder, TEXTS, encoding_format="base64", **fields)
    found = [np.frombuffer(base64.b64decode(one), dtype).astype(np.float32) for one in packed]
    np.testing.assert_allclose(found, plain, atol=1e-6 if np.dtype(dtype).itemsize == 4 else 1e-3)


def test_dimensions_and_lengths(encoder):
    cut = embed(encoder, TEXTS, dimensions=8)
    np.testing.assert_allclose(cut, unit(np.asarray(EXPECTED["mean"])[:, :8]), atol=TOLERANCE)
    raw = embed(encoder, TEXTS, use_activation=False)
    np.testing.assert_allclose(raw, EXPECTED["mean"], atol=TOLERANCE)


def test_a_text_longer_than_the_model(encoder):
    long = "cat " * 30
    error = encoder.post("/v1/embeddings", {"input": ["dog", long]}).error
    assert (error["code"], error["param"]) == (400, "input")
    assert "prompt has 32 tokens, and max_model_len is 24" in error["message"]
    [cut] = embed(encoder, long, truncate_prompt_tokens=-1)
    [whole] = embed(encoder, "cat " * 22)
    assert cut == whole
    wait_until(partial(is_idle, encoder))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "two"]}, "input"),
        ({"input": [99999]}, "prompt_token_ids"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "cat", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "cat", "embed_dtype": "bfloat16"}, "embed_dtype"),
        ({"input": "cat", "endianness": "middle"}, "endianness"),
        ({"input": "cat", "dimensions": 33}, "dimensions"),
        ({"input": "cat", "dimensions": 0}, "dimensions"),
        ({"input": "cat", "normalize": True}, "normalize"),
        ({"input": "cat", "truncate_prompt_tokens": 25}, "truncate_prompt_tokens"),
        ({"input": "cat", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "cat", "cache_salt": "a/b"}, "cache_salt"),
        ({"input": "cat", "request_id": "a b"}, "request_id"),
    ],
)
def test_what_is_refused(encoder, fields, param):
    error = encoder.post("/v1/embeddings", fields).error
    assert (error["code"], error["param"]) == (400, param)


def test_another_model_is_not_found(encoder):
    for path, more in (("/v1/embeddings", {"input": "cat"}), ("/score", {"text_1": "a", "text_2": "b"})):
        assert encoder.post(path, {"model": "other", **more}).error["code"] == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_encoder_does_not_write(encoder, ranker, path):
    body = {"messages": [{"role": "user", "content": "cat"}], "prompt": "cat"}
    error = encoder.post(path, body).error
    assert error["code"] == 400
    assert error["message"] == "this model embeds texts and cannot generate; send them to /v1/embeddings"
    assert "this model classifies texts and cannot generate" in ranker.post(path, body).error["message"]


def test_models_are_listed(encoder):
    [card] = encoder.get("/v1/models").json["data"]
    assert (card["id"], card["max_model_len"]) == ("toy", 24)


def test_pooling(encoder):
    reply = encoder.post("/pooling", {"input": TEXTS[:2], "task": "token_embed", "use_activation": False})
    one, two = (data["data"] for data in reply.json["data"])
    assert (len(one), len(one[0])) == (3, 32)
    np.testing.assert_allclose(two[0], EXPECTED["cls"][1], atol=TOLERANCE)
    np.testing.assert_allclose(two[-1], EXPECTED["last"][1], atol=TOLERANCE)
    [whole] = encoder.post("/pooling", {"input": TEXTS[1]}).json["data"]
    np.testing.assert_allclose([whole["data"]], unit(EXPECTED["mean"])[1:2], atol=TOLERANCE)
    assert whole["object"] == "pooling"
    packed = encoder.post("/pooling", {"input": TEXTS[0], "encoding_format": "base64", "task": "token_embed"})
    assert len(base64.b64decode(packed.json["data"][0]["data"])) == 3 * 32 * 4
    assert encoder.post("/pooling", {"input": "cat", "task": "plugin"}).error["param"] == "task"
    assert encoder.post("/pooling", {"input": "cat", "task": "classify"}).error["param"] == "task"


def test_scores_of_an_encoder_are_cosines(encoder):
    rows = unit(EXPECTED["mean"])
    for path in ("/score", "/v1/score"):
        reply = encoder.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
        found = [one["score"] for one in reply.json["data"]]
        np.testing.assert_allclose(found, rows[1:] @ rows[0], atol=TOLERANCE)
    assert reply.json["id"].startswith("score-")
    assert {one["object"] for one in reply.json["data"]} == {"score"}
    assert reply.json["usage"]["prompt_tokens"] > 0
    pairs = encoder.post("/score", {"queries": TEXTS, "documents": TEXTS}).json["data"]
    np.testing.assert_allclose([one["score"] for one in pairs], 1.0, atol=1e-6)


def test_scores_of_a_model_that_reads_both_texts(ranker):
    firsts, seconds = zip(*EXPECTED["pairs"], strict=True)
    reply = ranker.post("/score", {"data_1": firsts, "data_2": seconds})
    found = [one["score"] for one in reply.json["data"]]
    np.testing.assert_allclose(found, np.ravel(EXPECTED["scores"]), atol=TOLERANCE)
    cut = ranker.post("/score", {"text_1": "cat", "text_2": "dog " * 60, "truncate_prompt_tokens": -1})
    assert cut.json["usage"]["prompt_tokens"] == 40
    assert ranker.post("/score", {"text_1": "cat", "text_2": "dog " * 60}).error["code"] == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "text_2": "b", "instruction": "answer"}, "instruction"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
    ],
)
def test_pairs_that_are_refused(encoder, fields, param):
    error = encoder.post("/score", fields).error
    assert (error["code"], error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking(ranker, path):
    scores = np.ravel(EXPECTED["scores"])[:5]
    documents = [TEXTS[1], *({"text": text} for text in TEXTS[2:])]
    reply = ranker.post(path, {"query": TEXTS[0], "documents": documents})
    body = reply.json
    assert body.keys() == {"id", "model", "usage", "results"}
    assert body["usage"].keys() == {"prompt_tokens", "total_tokens"}
    assert [one["index"] for one in body["results"]] == np.argsort(-scores).tolist()
    found = [one["relevance_score"] for one in body["results"]]
    np.testing.assert_allclose(found, np.sort(scores)[::-1], atol=TOLERANCE)
    assert body["results"][0]["document"] == {"text": TEXTS[1 + int(scores.argmax())]}
    best = ranker.post(
        path, {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2, "return_documents": False}
    )
    assert [set(one) for one in best.json["results"]] == [{"index", "relevance_score"}] * 2
    assert ranker.post(path, {"query": "cat", "documents": []}).error["param"] == "documents"
    assert ranker.post(path, {"query": "cat", "documents": ["a"], "top_n": -1}).error["param"] == "top_n"


def test_classes(ranker, encoder):
    [one] = ranker.post("/classify", {"input": "cat"}).json["data"]
    assert (one["index"], one["label"], one["num_classes"], len(one["probs"])) == (0, "yes", 1, 1)
    error = encoder.post("/classify", {"input": "cat"}).error
    assert (error["code"], error["param"]) == (400, "task")
    assert "has none; use embed" in error["message"]


def test_a_model_that_writes_has_no_head_either():
    with scripted() as server:
        assert "has none; use embed" in server.post("/classify", {"input": "hello"}).error["message"]


def test_many_at_once_beside_those_who_write():
    """Of a core whose model depends on every token: chunks, batches and cached prefixes change no number."""
    texts = [f"{'word ' * i}number {i}" for i in range(60)]
    with fake() as server, ThreadPoolExecutor(8) as threads:
        alone = [embed(server, text)[0] for text in texts[:5]]
        writing = [threads.submit(server.complete, "hello", max_tokens=40) for _ in range(4)]
        batches = list(threads.map(lambda _: embed(server, texts), range(4)))
        assert all(batch == batches[0] for batch in batches)
        assert batches[0][:5] == alone
        assert all(len(one.result().json["choices"]) == 1 for one in writing)
        assert len({json.dumps(vector) for vector in batches[0]}) == len(texts)
        wait_until(partial(is_idle, server))


def test_a_chat_is_rendered_first(tmp_path):
    folder = write_encoder(tmp_path, pooling=MEAN)
    args = EngineArgs(model=str(folder), kernels="numpy", num_gpu_blocks_override=65)
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with running(partial(AsyncLLM.from_engine_args, args), template=template) as server:
        chat = [{"role": "user", "content": "the cat"}, {"role": "user", "content": "sleeps"}]
        reply = server.post("/v1/embeddings", {"messages": chat})
        assert reply.status == 200, reply.body
        assert reply.json["usage"]["prompt_tokens"] == 4  # [CLS] the cat sleeps
