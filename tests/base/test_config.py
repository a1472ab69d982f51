"""Settings: their types, their bounds, and the names that other engines know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mainspring.base.config import (
    VLLM_ARGUMENTS,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    PoolingFacts,
    judge,
    resolve,
)
from mainspring.base.errors import ConfigError

MODEL = ModelFacts(path="", architecture="fake", max_position_embeddings=128, vocab_size=100)


def decide(num_cpus: int = 2, **settings) -> EngineConfig:
    return resolve(EngineArgs(**settings), MODEL, num_cpus)


def refusals(num_cpus: int = 2, **settings) -> list[str]:
    """What is said, a line for each thing that is wrong."""
    with pytest.raises(ConfigError) as refused:
        decide(num_cpus, **settings)
    return str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_threads", "1", "num_threads '1' must be a whole number or None, not str"),
        ("max_logprobs", "x", "max_logprobs 'x' must be a whole number, not str"),
        ("executor", 5, "executor 5 must be text or None, not int"),
        ("chat_template", 5, "chat_template 5 must be text or None, not int"),
        (
            "enable_prefix_caching",
            "yes",
            "enable_prefix_caching 'yes' must be True or False or None, not str",
        ),
        ("enable_chunked_prefill", 1, "enable_chunked_prefill 1 must be True or False, not int"),
        ("max_num_seqs", True, "max_num_seqs True must be a whole number or None, not bool"),
        ("tensor_parallel_size", True, "tensor_parallel_size True must be a whole number, not bool"),
        (
            "num_gpu_blocks_override",
            2.5,
            "num_gpu_blocks_override 2.5 must be a whole number or None, not float",
        ),
        ("max_model_len", "64", "max_model_len '64' must be a whole number, auto or None, not str"),
        ("watermark", "0.1", "watermark '0.1' must be a number, not str"),
        ("watermark", False, "watermark False must be a number, not bool"),
        ("block_size", None, "block_size None must be a whole number, not NoneType"),
        ("kernels", "fast", "kernels 'fast' must be one of auto, native, numpy"),
        ("scheduling_policy", ["fcfs"], "scheduling_policy ['fcfs'] must be one of fcfs, priority"),
        ("seed", 2**63, "seed must be a 64-bit integer, not one of 19 digits"),
        ("seed", -(2**63) - 1, "seed must be a 64-bit integer, not one of 19 digits"),
        pytest.param(
            "max_num_seqs",
            10**5000,
            "max_num_seqs must be a 64-bit integer, not one of 5001 digits",
            id="many digits",
        ),
        ("shutdown_timeout", 3e38, "shutdown_timeout 3e+38 must be from 0 to 31536000 seconds, a year"),
        (
            "kv_cache_dtype",
            "fp8",
            "kv_cache_dtype 'fp8' must be one of auto, float32, float16, bfloat16, int8",
        ),
    ],
)
def test_a_setting_of_a_wrong_type_is_one_line(name: str, value: object, said: str):
    assert refusals(**{name: value}) == [said]


def test_whole_numbers_are_numbers_too():
    assert decide(watermark=0, gpu_memory_utilization=1).scheduler.watermark == 0


def test_all_that_is_wrong_is_said_together():
    said = refusals(num_threads="1", max_num_seqs=0, block_size=17, dtype="float8")
    assert [line.split()[0] for line in said] == ["dtype", "num_threads", "block_size", "max_num_seqs"]


def test_a_model_is_named_by_text_or_path():
    assert EngineArgs(model=Path("a.gguf")).model == "a.gguf"
    with pytest.raises(ConfigError, match=r"^model 5 must be text, not int$"):
        EngineArgs(model=5)


@pytest.mark.parametrize("word", [-1, "auto"])
def test_the_length_may_be_what_fits(word: object):
    config = decide(max_model_len=word)
    assert (config.fit_max_model_len, config.scheduler.max_model_len) == (True, 128)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_num_batched_tokens", 10**8, r"max_num_batched_tokens 100000000 .* 1048576 is the most"),
        ("num_gpu_blocks_override", 10**9, r"num_gpu_blocks_override 1000000000 .* 1048576 is the most"),
        ("kv_cache_memory_bytes", 99999999999999, r"kv_cache_memory_bytes 99999999999999 .* is the most"),
        ("num_gpu_blocks_override", 0, r"num_gpu_blocks_override 0 must be at least 2"),
        ("num_gpu_blocks_override", -1, r"num_gpu_blocks_override -1 must be at least 2"),
        ("num_threads", 0, r"num_threads 0 must be at least 1"),
        ("max_model_len", 1, r"max_model_len 1 must be from 2 to 128"),
        ("max_model_len", 129, r"max_model_len 129 must be from 2 to 128"),
    ],
)
def test_a_setting_out_of_bounds_is_said_once(name: str, value: int, said: str):
    (line,) = refusals(**{name: value})
    assert re.match(said, line), line


LOCKSTEP = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"executor": "uniproc", "tensor_parallel_size": 2},
            "executor uniproc is one process, and 2 x 1 ranks",
        ),
        (
            {"distributed_executor_backend": "uni", "pipeline_parallel_size": 2},
            "distributed_executor_backend uni is one process, and 1 x 2 ranks",
        ),
        (
            {"executor": "uniproc", "distributed_executor_backend": "mp"},
            "executor uniproc and distributed_executor_backend mp differ; give one",
        ),
        (
            {"executor": "multiproc", "distributed_executor_backend": "uni"},
            "executor multiproc and distributed_executor_backend uni differ; give one",
        ),
        (
            {"tensor_parallel_size": 64, "data_parallel_size": 64},
            "tensor_parallel_size 64 x pipeline_parallel_size 1 x data_parallel_size 64 are 4096 processes",
        ),
        ({"tensor_parallel_size": 10**12}, "tensor_parallel_size 1000000000000 must be from 1 to 64"),
        ({"data_parallel_size": 65}, "data_parallel_size 65 must be from 1 to 64"),
        (
            LOCKSTEP | {"async_scheduling": True},
            "async_scheduling keeps two steps in flight; the engines that",
        ),
        (
            LOCKSTEP | {"distributed_executor_backend": "mp"},
            "distributed_executor_backend mp starts workers beside an engine, and the engines that",
        ),
        (LOCKSTEP | {"executor": "multiproc"}, "executor multiproc starts workers beside an engine"),
    ],
)
def test_ranks_that_cannot_be_run_as_asked(settings: dict, said: str):
    """Nothing that was named is exchanged for something else."""
    (line,) = refusals(**settings)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("settings", "executor"),
    [
        ({}, "uniproc"),
        ({"executor": "uniproc"}, "uniproc"),
        ({"executor": "uniproc", "distributed_executor_backend": "uni"}, "uniproc"),
        ({"distributed_executor_backend": "uni"}, "uniproc"),
        ({"distributed_executor_backend": "mp"}, "multiproc"),
        ({"executor": "multiproc", "distributed_executor_backend": "mp"}, "multiproc"),
        ({"pipeline_parallel_size": 2}, "multiproc"),
        ({"tensor_parallel_size": 2, "executor": "mine:Class"}, "mine:Class"),
    ],
)
def test_who_runs_the_workers(settings: dict, executor: str):
    assert decide(**settings).executor == executor


def test_what_is_wrong_with_any_model_is_said_without_one():
    with pytest.raises(ConfigError) as refused:
        judge(EngineArgs(block_size=17, data_parallel_size=1000, max_model_len=10**40, max_num_seqs="9"))
    said = [line.split()[0] for line in str(refused.value).splitlines()]
    assert said == ["max_model_len", "max_num_seqs", "block_size", "data_parallel_size"]
    judge(EngineArgs(max_model_len=10**9))  # a matter of the model


def test_more_threads_than_cores_are_refused():
    assert decide(num_cpus=4, num_threads=4).num_threads == 4
    (line,) = refusals(num_cpus=4, num_threads=5)
    assert line.startswith("num_threads 5 must be at most 4, the cores")
    assert decide(num_cpus=4, num_threads=2, pipeline_parallel_size=2).num_threads == 2
    (line,) = refusals(num_cpus=4, num_threads=3, pipeline_parallel_size=2)
    assert line.startswith("num_threads 3 must be at most 2, the cores that may be used by each of 2 workers")
    (line,) = refusals(num_cpus=2, num_threads=2, tensor_parallel_size=3)
    assert line.startswith("num_threads 2 must be at most 1, the cores that may be used by each of 3 workers")
    with pytest.raises(ConfigError, match="num_threads 100000 must be at most"):
        resolve(EngineArgs(num_threads=100_000), MODEL)  # the cores of this process


def test_names_of_vllm_that_are_not_here_yet_say_so():
    assert not VLLM_ARGUMENTS.keys() & set(EngineArgs.__dataclass_fields__)
    with pytest.raises(ConfigError) as refused:
        EngineArgs.from_mapping(
            {"speculative_config": {}, "swap_space": 4, "max_num_seq": 4, "enable_lora": True}
        )
    speculative, swap_space, max_num_seqs, enable_lora = str(refused.value).splitlines()
    assert speculative == "speculative_config is not supported yet; leave it out"
    assert swap_space == "swap_space has no effect here; leave it out"
    assert max_num_seqs == "unknown engine argument max_num_seq; did you mean max_num_seqs?"
    assert enable_lora == "enable_lora is not supported yet; leave it out"


@pytest.mark.parametrize(
    ("settings", "can_generate", "labels", "said"),
    [
        (
            {"runner": "generate"},
            False,
            (),
            "runner generate: this model (bert) reads texts and cannot generate",
        ),
        ({"task": "generate"}, False, ("a",), "task generate: this model (bert) reads texts"),
        ({"task": "embed"}, False, ("a",), "task embed: this model (bert) has a head that classifies"),
        ({"task": "classify"}, True, (), "task classify: this model (bert) has no head that classifies"),
        ({"task": "score"}, False, (), "task score: this model (bert) has no head that classifies"),
        ({"runner": "pooling", "task": "embed"}, False, (), None),
        ({"runner": "pooling", "task": "embed"}, True, (), None),
        ({"runner": "pooling", "task": "score"}, False, ("a",), None),
    ],
)
def test_what_a_model_is_wanted_for(settings: dict, can_generate: bool, labels: tuple, said: str | None):
    facts = ModelFacts(
        path="x",
        architecture="bert",
        max_position_embeddings=64,
        vocab_size=100,
        can_generate=can_generate,
        pooling=PoolingFacts(labels=labels),
    )
    if said is None:
        assert resolve(EngineArgs(**settings), facts, 2).vocab_size == 100
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(EngineArgs(**settings), facts, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "there is one: set tensor_parallel_size or data_parallel_size"),
        ({"pipeline_parallel_size": 2}, "there is one: set tensor_parallel_size or data_parallel_size"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 4},
            "ranks of one kind: set tensor_parallel_size 2 and pipeline_parallel_size 1, "
            "or data_parallel_size 4, to 1",
        ),
    ],
)
def test_experts_are_spread_over_ranks_of_one_kind(settings: dict[str, int], said: str) -> None:
    assert refusals(**settings, enable_expert_parallel=True) == [
        f"enable_expert_parallel spreads experts over {'ranks, and ' if 'there' in said else ''}{said}"
    ]


def test_expert_parallel_is_decided() -> None:
    for ranks in ("tensor_parallel_size", "data_parallel_size"):
        assert decide(**{ranks: 2}, enable_expert_parallel=True).enable_expert_parallel
    assert not decide(tensor_parallel_size=2).enable_expert_parallel


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, range(1)),
        ({"data_parallel_size": 3}, range(3)),
        ({"data_parallel_size": 3, "data_parallel_size_local": 3}, range(3)),
        ({"data_parallel_size": 3, "data_parallel_rank": 2, "data_parallel_external_lb": True}, range(2, 3)),
        ({"tensor_parallel_size": 8, "data_parallel_size": 64, "data_parallel_rank": 63}, range(63, 64)),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_hybrid_lb": True,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 1,
            },
            range(1, 3),
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2},
            range(2, 4),
        ),
    ],
)
def test_the_engines_of_this_server(given, ranks):
    args = EngineArgs(**given)
    judge(args)
    assert args.local_ranks == ranks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_parallel_external_lb": True}, "data_parallel_external_lb needs data_parallel_rank"),
        ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb, or a start rank, needs data_parallel_"),
        ({"data_parallel_start_rank": 1}, "data_parallel_hybrid_lb, or a start rank, needs data_parallel_"),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 2},
            "data_parallel_size_local 2 must be 4 here",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_rank": 1, "data_parallel_size_local": 2},
            "data_parallel_size_local 2 must be 1 here",
        ),
        ({"data_parallel_size": 4, "data_parallel_rank": 4}, "from 4 to 4, must be among those of"),
        ({"data_parallel_size": 4, "data_parallel_rank": -1}, "from 0 to 3"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_hybrid_lb": True},
            "data_parallel_rank 0 is of a server with one engine",
        ),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_hybrid_lb": True,
                "data_parallel_size_local": 3,
                "data_parallel_start_rank": 2,
            },
            "from 2 to 4, must be among those of data_parallel_size 4: from 0 to 3",
        ),
        (
            {"data_parallel_hybrid_lb": True, "data_parallel_size_local": 0},
            "the engines of this server, from 0 to -1",
        ),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 0, "enable_expert_parallel": True},
            "leave out data_parallel_rank and data_parallel_hybrid_lb",
        ),
    ],
)
def test_engines_that_are_nobodys(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        judge(EngineArgs(**given))
