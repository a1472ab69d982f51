"""`bench throughput` with vLLM's flags and `bench latency`: what is asked, and what comes of it."""

from __future__ import annotations

import json
import random

import pytest

from mainspring.base.errors import ConfigError
from mainspring.bench import offline
from mainspring.bench.arguments import LatencyArgs, ThroughputArgs
from mainspring.cli import main

CONFIG = {
    "model_type": "llama",
    "vocab_size": 20_000,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny(tmp_path) -> list[str]:
    """Flags of an engine that costs nothing."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    flags = ["--model", str(path), "--load-format", "dummy", "--skip-tokenizer-init", "--kernels", "numpy"]
    return [*flags, "--in-process", "--num-gpu-blocks-override", "32"]


def test_throughput(tiny, tmp_path, capsys: pytest.CaptureFixture[str]):
    argv = [
        "--num-prompts",
        "5",
        "--input-len",
        "8",
        "--output-len",
        "3",
        "--output-json",
        str(tmp_path / "o.json"),
    ]
    assert main(["bench", "throughput", *argv, "--json", *tiny]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found == json.loads((tmp_path / "o.json").read_text())
    assert found.keys() > {  # vLLM's
        *("elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"),
    }
    assert (found["num_requests"], found["total_num_tokens"], found["num_output_tokens"]) == (5, 55, 15)
    assert found["tokens_per_second"] == pytest.approx(55 / found["elapsed_time"])
    assert "answer tokens            15" in err


def test_latency(tiny, capsys: pytest.CaptureFixture[str]):
    argv = ["--batch-size", "2", "--input-len", "8", "--output-len", "3"]
    argv += ["--num-iters", "3", "--num-iters-warmup", "1", "--json"]
    assert main(["bench", "latency", *argv, *tiny]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.keys() > {"avg_latency", "latencies", "percentiles"}  # vLLM's
    assert len(found["latencies"]) == 3
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == sorted(found["latencies"])[1]
    assert "3 rounds of 2 x (8 + 3)" in err


def test_prompts_do_not_meet_in_the_prefix_cache():
    assert offline.engine_args({}).enable_prefix_caching is False
    assert offline.engine_args({"enable_prefix_caching": True}).enable_prefix_caching is True


class Words:
    """A tokenizer: a token for each word."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


def conversation(question: int, answer: int) -> dict:
    turns = [("human", "q " * question), ("gpt", "a " * answer), ("human", "more")]
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def test_conversations_of_a_file(tmp_path):
    path = tmp_path / "chats.json"
    useless = [conversation(3, 9), conversation(9, 3), conversation(1025, 9), conversation(1000, 1100)]
    path.write_text(json.dumps([*useless, {"conversations": []}, conversation(10, 20), conversation(30, 40)]))
    args = ThroughputArgs(dataset_name="sharegpt", dataset_path=str(path), num_prompts=3)
    samples = offline.sharegpt_samples(args, Words(), random.Random(0))
    shapes = [(len(sample.prompt_token_ids), sample.output_len) for sample in samples]
    assert sorted(set(shapes)) == [(10, 20), (30, 40)]
    assert len(shapes) == 3
    assert shapes[2] == shapes[0], "from the beginning again"
    args = ThroughputArgs(dataset_name="sharegpt", dataset_path=str(path), num_prompts=2, output_len=7)
    assert {sample.output_len for sample in offline.sharegpt_samples(args, Words(), random.Random(0))} == {7}


@pytest.mark.parametrize("text", ["{", "5", "[5]", '[{"a": 1}]', '[{"conversations": [1, 2]}]'])
def test_what_is_no_file_of_conversations(tmp_path, text):
    path = tmp_path / "chats.json"
    path.write_text(text)
    args = ThroughputArgs(dataset_name="sharegpt", dataset_path=str(path))
    with pytest.raises(ConfigError, match="must be a JSON list of objects such as"):
        offline.sharegpt_samples(args, Words(), random.Random(0))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="has no conversation of 4 to 2048 tokens"):
        offline.sharegpt_samples(args, Words(), random.Random(0))
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        offline.sharegpt_samples(args, Words(), random.Random(0))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: ThroughputArgs(num_prompts=0), "num_prompts 0 must be at least 1"),
        (lambda: ThroughputArgs(dataset_name="sharegpt"), "give both or neither"),
        (lambda: ThroughputArgs(dataset_path="x"), "give both or neither"),
        (
            lambda: ThroughputArgs(dataset_name="sharegpt", dataset_path="x", input_len=5),
            "input_len is for random prompts",
        ),
        (lambda: LatencyArgs(batch_size=0, num_iters=0), "batch_size 0 .*\nnum_iters 0 must be at least 1"),
        (lambda: LatencyArgs(num_iters_warmup=-1), "num_iters_warmup -1 must not be negative"),
    ],
)
def test_what_makes_no_sense(make, line):
    with pytest.raises(ConfigError, match=line):
        make()


def test_scenarios_and_requests_are_two_things(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "throughput", "--repeats", "2", "--num-prompts", "3"]) == 2
    assert capsys.readouterr().err == (
        "mainspring: --repeats is for the scenarios; leave it out, or --num-prompts\n"
    )
