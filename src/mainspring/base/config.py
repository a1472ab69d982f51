"""Settings: what was typed, what the model says, what the engine will do. Three types and one function.

`EngineArgs` is what a user gives, under vLLM's names; None means "choose for me". `ModelFacts` is what the
front end read from the model's file. `resolve` makes of both the frozen `EngineConfig`, reports everything
that is wrong at once, and records the reason of every automatic choice in `EngineConfig.reasons`. What is
only known after measuring (free memory, the number of blocks) is a result of `engine/build.py`, never a
setting.
"""

from __future__ import annotations

import math
import os
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import msgspec

from mainspring.base import cores
from mainspring.base.errors import ConfigError
from mainspring.base.params import PoolingKind

AUTO_MAX_MODEL_LEN = -1
# What users of vLLM may pass and no field here answers to: the words after its name.
VLLM_ARGUMENTS = {
    **dict.fromkeys(
        (
            "code_revision",
            "config_format",
            "convert",
            "cpu_offload_gb",
            "device",
            "disable_sliding_window",
            "enable_lora",
            "enable_prompt_embeds",
            "enable_sleep_mode",
            "generation_config",
            "guided_decoding_backend",
            "hf_config_path",
            "hf_overrides",
            "kv_events_config",
            "kv_transfer_config",
            "limit_mm_per_prompt",
            "logits_processors",
            "logprobs_mode",
            "lora_dtype",
            "max_lora_rank",
            "max_loras",
            "mm_processor_kwargs",
            "model_loader_extra_config",
            "override_generation_config",
            "reasoning_parser",
            "rope_scaling",
            "rope_theta",
            "scheduler_cls",
            "speculative_config",
            "structured_outputs_config",
            "worker_cls",
            "worker_extension_cls",
        ),
        "is not supported yet; leave it out",
    ),
    **dict.fromkeys(
        (
            "compilation_config",
            "disable_async_output_proc",
            "disable_cascade_attn",
            "disable_custom_all_reduce",
            "max_context_len_to_capture",
            "max_parallel_loading_workers",
            "max_seq_len_to_capture",
            "num_lookahead_slots",
            "prefix_caching_hash_algo",
            "ray_workers_use_nsight",
            "swap_space",
            "use_v2_block_manager",
        ),
        "has no effect here; leave it out",
    ),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision"),
        "is not supported yet: the model's file brings its own; leave it out",
    ),
}
# Beyond these no machine goes; what fits this one is found when the memory is measured.
MOST = {
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 20,
    "num_gpu_blocks_override": 1 << 20,
    "kv_cache_memory_bytes": 1 << 44,
}
MOST_SECONDS = 365 * 86_400
EXECUTE_TIMEOUT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"  # in the environment, as users of vLLM know it
DEFAULT_EXECUTE_TIMEOUT_S = 300.0
MOST_PROCESSES = 256  # of all ranks of all engines
BACKENDS = {"uni": "uniproc", "mp": "multiproc"}  # vLLM's names -> ours
TYPE_WORDS: dict[object, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "None",
}


@dataclass(slots=True, kw_only=True)
class EngineArgs:
    """Everything an engine can be told. Each field's `metadata["help"]` is the flag's help text."""

    model: str = field(
        default="smollm2-135m",
        metadata={
            "help": "catalogue name, GGUF file, folder, or name on the hub: org/name, org/name:file.gguf"
        },
    )
    revision: str | None = field(
        default=None, metadata={"help": "branch, tag or commit of a model on the hub; default: main"}
    )
    hf_token: str | None = field(
        default=None,
        repr=False,
        metadata={"help": "for the hub's private and gated models; default: HF_TOKEN, or who is logged in"},
    )
    download_dir: str | None = field(
        default=None,
        metadata={"help": "folder for what is fetched; default: MAINSPRING_CACHE, and HF_HOME for the hub"},
    )
    served_model_name: str | None = field(default=None, metadata={"help": "name to show to clients"})
    load_format: Literal["auto", "gguf", "dummy"] = field(
        default="auto", metadata={"help": "auto: by the file; dummy: random weights of the model's shape"}
    )
    dtype: Literal["auto", "float32"] = field(
        default="auto", metadata={"help": "type of the residual stream: float32"}
    )
    quantization: Literal["f16", "bf16", "q8", "q4"] | None = field(
        default=None,
        metadata={"help": "weights in 16, 8 or 4 bits (native kernels); default: as the file has them"},
    )
    activations: Literal["int8", "int16"] = field(
        default="int8",
        metadata={
            "help": "int8: rounded, to 8 bits where weights are quantised and to bf16 where they are bf16; "
            "int16: exact to the token, and slower"
        },
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = field(
        default="auto", metadata={"help": "type of keys and values; auto: 16 bits, in numpy float32"}
    )
    instruction_set: Literal["auto", "avx2", "avx512"] = field(
        default="auto", metadata={"help": "variant of the native kernels; auto: the fastest that runs here"}
    )
    kernels: Literal["auto", "native", "numpy"] = field(
        default="auto", metadata={"help": "auto: native where installed, else numpy"}
    )
    num_threads: int | None = field(
        default=None, metadata={"help": "threads of the kernels; default: all cores allowed"}
    )
    seed: int = field(default=0, metadata={"help": "where seeds of requests without one are drawn from"})
    max_model_len: int | Literal["auto"] | None = field(
        default=None,
        metadata={"help": "longest prompt + output; default: the model's; -1 or auto: what fits in memory"},
    )
    max_num_seqs: int | None = field(default=None, metadata={"help": "requests running at once"})
    max_num_batched_tokens: int | None = field(default=None, metadata={"help": "tokens computed in a step"})
    enable_chunked_prefill: bool = field(default=True, metadata={"help": "split prompts over steps"})
    long_prefill_token_threshold: int = field(
        default=0,
        metadata={"help": "most tokens of one prompt in a step while others are there; 0: no limit"},
    )
    scheduling_policy: Literal["fcfs", "priority"] = field(
        default="fcfs", metadata={"help": "who is served first"}
    )
    async_scheduling: bool = field(
        default=False, metadata={"help": "plan the next step while one runs (two steps in flight)"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens in a KV block; a power of two"})
    enable_prefix_caching: bool | None = field(
        default=None, metadata={"help": "share KV of equal beginnings; default: on"}
    )
    num_gpu_blocks_override: int | None = field(
        default=None, metadata={"help": "KV blocks, instead of measuring memory"}
    )
    kv_cache_memory_bytes: int | None = field(
        default=None,
        metadata={"help": "memory of the KV pool; default on CPU: a quarter of what is free, at most 4 GiB"},
    )
    gpu_memory_utilization: float = field(
        default=0.92, metadata={"help": "share of a GPU's memory; no effect on a CPU"}
    )
    max_num_queued_reqs: int | None = field(
        default=None,
        metadata={"help": "most requests that may wait for their first token (AsyncLLM); default: no limit"},
    )
    max_num_queued_tokens: int | None = field(
        default=None, metadata={"help": "most prompt tokens of such requests together; default: no limit"}
    )
    watermark: float = field(
        default=0.0, metadata={"help": "share of blocks kept free when admitting beside others"}
    )
    max_logprobs: int = field(
        default=20, metadata={"help": "most logprobs a request may ask for; -1: no limit"}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "template or its file, instead of the model's"}
    )
    runner: Literal["auto", "generate", "pooling"] = field(
        default="auto", metadata={"help": "what the model must be able to do; auto: whatever it can"}
    )
    task: Literal["auto", "generate", "embed", "classify", "score"] = field(
        default="auto", metadata={"help": "the same, as older versions of vLLM call it"}
    )
    skip_tokenizer_init: bool = field(default=False, metadata={"help": "token ids in, token ids out"})
    log_iteration_details: bool = field(default=False, metadata={"help": "a log line for each step"})
    shutdown_timeout: float = field(
        default=0.0,
        metadata={"help": "seconds for requests to finish at a shutdown; what is left is aborted"},
    )
    in_process: bool = field(default=False, metadata={"help": "run the engine core in the caller's process"})
    executor: str | None = field(
        default=None,
        metadata={
            "help": "uniproc, multiproc (a process per worker), or module:Class; default: uniproc, multiproc "
            "where there are several ranks"
        },
    )
    distributed_executor_backend: Literal["uni", "mp"] | None = field(
        default=None, metadata={"help": "uniproc or multiproc, by vLLM's names"}
    )
    tensor_parallel_size: int = field(default=1, metadata={"help": "processes that share every layer"})
    pipeline_parallel_size: int = field(
        default=1, metadata={"help": "stages of layers, each with processes of its own"}
    )
    collectives: Literal["pipes", "gloo"] = field(
        default="pipes",
        metadata={"help": "how ranks reach each other; gloo needs torch: mainspring[distributed]"},
    )
    data_parallel_size: int = field(
        default=1, metadata={"help": "engines side by side, each with the whole model"}
    )
    data_parallel_rank: int | None = field(
        default=None,
        metadata={"help": "run this one of the engines; servers of their own run the others (external)"},
    )
    data_parallel_external_lb: bool = field(
        default=False, metadata={"help": "said by data_parallel_rank: a balancer before the servers chooses"}
    )
    data_parallel_hybrid_lb: bool = field(
        default=False,
        metadata={"help": "run and balance data_parallel_size_local of the engines, from the start rank on"},
    )
    data_parallel_size_local: int | None = field(
        default=None, metadata={"help": "engines of this server; default: all"}
    )
    data_parallel_start_rank: int | None = field(
        default=None, metadata={"help": "the first engine of this server (hybrid); default: 0"}
    )
    enable_expert_parallel: bool = field(
        default=False,
        metadata={"help": "each rank has experts of its own, whole ones, instead of a part of each"},
    )
    data_parallel_routing: Literal["load", "prefix"] = field(
        default="load",
        metadata={
            "help": "who gets a request: the least busy; or, by its beginning, who may have that cached"
        },
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "refused: a model is data here"})
    enforce_eager: bool = field(default=False, metadata={"help": "no effect here"})
    disable_log_stats: bool = field(default=True, metadata={"help": "do not fill RequestOutput.metrics"})

    @property
    def balances_some(self) -> bool:
        """Hybrid balancing, which a start rank says too."""
        return self.data_parallel_hybrid_lb or self.data_parallel_start_rank is not None

    @property
    def local_ranks(self) -> range:
        """The data-parallel engines that run here, among all that there are."""
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        if not self.balances_some:
            return range(self.data_parallel_size)
        start, local = self.data_parallel_start_rank or 0, self.data_parallel_size_local
        return range(start, start + (1 if local is None else local))

    def __post_init__(self) -> None:
        """The model alone is judged here: it is opened before `resolve` can judge the rest."""
        if isinstance(self.model, os.PathLike):
            self.model = os.fspath(self.model)
        if not isinstance(self.model, str):
            raise ConfigError(_wrong_type("model", self.model, str))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> EngineArgs:
        """As keyword arguments, but unknown names are a `ConfigError`, each with the way out."""
        import difflib

        known = {f.name for f in fields(cls)}
        wrong = []
        for name in given:
            if name in known:
                continue
            if name in VLLM_ARGUMENTS:
                wrong.append(f"{name} {VLLM_ARGUMENTS[name]}")
                continue
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            wrong.append(f"unknown engine argument {name}{hint}")
        if wrong:
            raise ConfigError("\n".join(wrong))
        return cls(**given)


AsyncEngineArgs = EngineArgs  # the same settings, under the name that users of vLLM's AsyncLLM know


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """How a model makes a vector of a text, as its files say; by default as is usual for decoders."""

    kind: PoolingKind = "last"
    normalize: bool = True
    width: int | None = None  # elements of a vector; None: not known before it is computed
    labels: tuple[str, ...] = ()  # of a head that classifies; empty: there is none
    token_kinds: int = 1  # 2: tokens of a second text have embeddings of their own, behind all others


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the front end must know of a model; the workers read its file themselves."""

    path: str  # the file (empty for fakes)
    architecture: str
    max_position_embeddings: int
    vocab_size: int  # rows of the output head; ids at or above it do not exist
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # the first is *the* EOS, others act as stop tokens
    can_generate: bool = True  # False: an encoder, or a model that classifies
    pooling: PoolingFacts = PoolingFacts()


class SchedulerConfig(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    num_stages: int = 1  # of the pipeline that runs the plans
    prefill_schedule_interval: int = 1  # of ranks in lock-step: prompts start on every n-th step


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """What the grammar room must know of a tokenizer: what its tokens say."""

    tokens: list[bytes]  # by id; empty for what is no token
    special_ids: list[int]  # never part of a text
    end_ids: list[int]  # those that end an answer, the EOS first; at least one


class DataParallelRank(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One of several engines that step together, because the model's experts are spread over them."""

    rank: int
    size: int
    links: dict[int, int]  # to the others: rank -> descriptor


class EngineConfig(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What `build_engine` needs, in any process."""

    model: str  # path of the model's file
    vocab_size: int
    executor: str
    scheduler: SchedulerConfig
    block_size: int
    depth: int  # steps in flight
    seed: int
    load_format: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    activations: str = "int8"
    kv_cache_dtype: str = "auto"
    instruction_set: str = "auto"
    num_threads: int | None = None
    fit_max_model_len: bool = False  # lower max_model_len to what the memory holds, instead of refusing
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    vocabulary: Vocabulary | None = None  # for the grammar room; None: no structured outputs
    executor_args: dict[str, Any] = {}  # for executors named as module:Class
    log_iteration_details: bool = False
    reasons: dict[str, str] = {}  # of automatic choices, for people
    tensor_parallel_size: int = 1  # ranks that share every layer
    pipeline_parallel_size: int = 1  # stages of layers
    enable_expert_parallel: bool = False
    collectives: str = "pipes"
    num_local_engines: int = 1  # that share this machine
    data_parallel: DataParallelRank | None = None  # where ranks step together
    engine_rank: int | None = None  # among all data-parallel engines, where there are several

    @property
    def log_label(self) -> str:
        return "" if self.engine_rank is None else f"engine {self.engine_rank}"


def usable_cores() -> int:
    """Cores that this process may run on, as far as its control groups give it time (`base/cores.py`)."""
    return cores.usable_cores()


def execute_timeout_s() -> float:
    """How long who waits for another process's part of a step does so. Raises `ConfigError` for nonsense."""
    given = os.environ.get(EXECUTE_TIMEOUT)
    if not given:
        return DEFAULT_EXECUTE_TIMEOUT_S
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s < math.inf:
        raise ConfigError(
            f"{EXECUTE_TIMEOUT} {given!r} in the environment must be a number of seconds above 0"
        )
    return timeout_s


def _kinds(annotation: object) -> tuple[object, ...]:
    """The members of a union, or the one type that it is."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


def _is_of(value: object, kind: object) -> bool:
    """Whether `value` is of one type of a setting. True is no number here, and a whole number is a float."""
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else typing.cast(type, kind))


def _wrong_type(name: str, value: object, annotation: object) -> str:
    shown = " ".join(reprlib.repr(value).split())
    *kinds, last = _kinds(annotation)
    if typing.get_origin(last) is Literal:  # alone: a misspelt choice is of the right type
        return f"{name} {shown} must be one of {', '.join(typing.get_args(last))}"
    words = [TYPE_WORDS.get(kind) or ", ".join(typing.get_args(kind)) for kind in [*kinds, last]]
    expected = " or ".join([", ".join(words[:-1]), words[-1]] if kinds else words)
    return f"{name} {shown} must be {expected}, not {type(value).__name__}"


def _judge_types(args: EngineArgs, wrong: list[str]) -> EngineArgs:
    """A line for each setting of a wrong type; the arguments with defaults in their place, so that the
    others can be judged too."""
    mended: dict[str, Any] = {}
    hints = typing.get_type_hints(EngineArgs)
    for setting in fields(args):
        value, annotation = getattr(args, setting.name), hints[setting.name]
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            digits = int(math.log10(abs(value))) + 1  # as text it may be a page
            wrong.append(f"{setting.name} must be a 64-bit integer, not one of {digits} digits")
            mended[setting.name] = setting.default
        elif not any(_is_of(value, kind) for kind in _kinds(annotation)):
            wrong.append(_wrong_type(setting.name, value, annotation))
            mended[setting.name] = setting.default
    return replace(args, **mended)


def _judge_use(args: EngineArgs, model: ModelFacts, require: Callable[[bool, str], None]) -> None:
    """Whether the model can do what it is wanted for."""
    labels, name = model.pooling.labels, f"this model ({model.architecture})"
    for setting in ("runner", "task"):
        wanted = getattr(args, setting)
        shown = f"{setting} {wanted}: {name}"
        require(wanted != "generate" or model.can_generate, f"{shown} reads texts and cannot generate")
        require(wanted != "embed" or not labels, f"{shown} has a head that classifies, and gives no vectors")
        require(wanted not in ("classify", "score") or bool(labels), f"{shown} has no head that classifies")


def judge(args: EngineArgs) -> None:
    """Whatever the model is: so that nothing is fetched or opened for settings that cannot be.

    Raises `ConfigError` with a line for each thing that is wrong.
    """
    wrong: list[str] = []
    args = _judge_types(args, wrong)
    _judge_alone(args, usable_cores(), wrong)
    if wrong:
        raise ConfigError("\n".join(wrong))


def _judge_alone(args: EngineArgs, num_cpus: int, wrong: list[str]) -> None:
    """A line for each setting that is wrong by itself, or does not go with another."""

    def require(right: bool, message: str) -> None:
        if not right:
            wrong.append(message)

    require(
        not args.trust_remote_code,
        "trust_remote_code: models are data here, no code of theirs is run; leave it out",
    )
    block_size = args.block_size
    require(
        1 <= block_size <= 1024 and block_size & (block_size - 1) == 0,
        f"block_size {block_size} must be a power of two up to 1024",
    )
    require(args.long_prefill_token_threshold >= 0, "long_prefill_token_threshold must be 0 (off) or more")
    require(
        0.0 <= args.watermark < 1.0 and math.isfinite(args.watermark),
        f"watermark {args.watermark} must be in [0, 1)",
    )
    require(0.0 < args.gpu_memory_utilization <= 1.0, "gpu_memory_utilization must be above 0 and at most 1")
    for name in ("kv_cache_memory_bytes", "num_threads", "max_num_queued_reqs", "max_num_queued_tokens"):
        value = getattr(args, name)
        require(value is None or value >= 1, f"{name} {value} must be at least 1")
    require(
        args.num_gpu_blocks_override is None or args.num_gpu_blocks_override >= 2,
        f"num_gpu_blocks_override {args.num_gpu_blocks_override} must be at least 2: block 0 is never used",
    )
    for name, most in MOST.items():
        value = getattr(args, name)
        require(value is None or value <= most, f"{name} {value} is beyond any machine: {most} is the most")
    workers = _num_local_workers(args)
    most_threads = max(1, num_cpus // max(1, workers))
    cores_of_each = f"the cores that may be used{f' by each of {workers} workers' if workers > 1 else ''}"
    require(
        args.num_threads is None or args.num_threads <= most_threads,
        f"num_threads {args.num_threads} must be at most {most_threads}, {cores_of_each}: threads that share "
        "a core wait for each other, and every step takes many times as long",
    )
    require(
        0.0 <= args.shutdown_timeout <= MOST_SECONDS,
        f"shutdown_timeout {args.shutdown_timeout} must be from 0 to {MOST_SECONDS} seconds, a year",
    )
    require(args.max_logprobs >= -1, f"max_logprobs {args.max_logprobs} must be -1 (no limit) or more")
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        require(1 <= getattr(args, name) <= 64, f"{name} {getattr(args, name)} must be from 1 to 64")
    dp = args.data_parallel_size
    _judge_balancing(args, require)
    require(
        workers <= MOST_PROCESSES or max(tp, pp, dp) > 64,
        f"tensor_parallel_size {tp} x pipeline_parallel_size {pp} x data_parallel_size {dp} are {workers} "
        f"processes here; {MOST_PROCESSES} are the most",
    )
    require(
        not args.enable_expert_parallel or tp * dp > 1,
        "enable_expert_parallel spreads experts over ranks, and there is one: set tensor_parallel_size or "
        "data_parallel_size",
    )
    require(
        not args.enable_expert_parallel or dp == 1 or tp * pp == 1,
        f"enable_expert_parallel spreads experts over ranks of one kind: set tensor_parallel_size {tp} and "
        f"pipeline_parallel_size {pp}, or data_parallel_size {dp}, to 1",
    )
    is_lockstep = args.enable_expert_parallel and dp > 1
    require(
        not (is_lockstep and args.async_scheduling),
        "async_scheduling keeps two steps in flight; the engines that enable_expert_parallel makes of "
        f"data_parallel_size {dp} step together, and have one: leave one of them out",
    )
    _judge_executor(args, tp * pp, is_lockstep, require)


def _judge_balancing(args: EngineArgs, require: Callable[[bool, str], None]) -> None:
    """Who chooses an engine for a request: this server among all (internal) or some of them (hybrid), or
    whoever stands before servers of one engine each (external)."""
    size, local, rank = args.data_parallel_size, args.data_parallel_size_local, args.data_parallel_rank
    hybrid = args.balances_some
    require(
        rank is None or not hybrid,
        f"data_parallel_rank {rank} is of a server with one engine; data_parallel_hybrid_lb, and a start "
        "rank, are of one with several: give one",
    )
    require(
        rank is not None or not args.data_parallel_external_lb,
        "data_parallel_external_lb needs data_parallel_rank, which of the engines this server runs",
    )
    require(
        local is not None or not hybrid,
        "data_parallel_hybrid_lb, or a start rank, needs data_parallel_size_local, how many of the engines "
        "this server runs",
    )
    here = args.local_ranks
    require(
        local is None or hybrid or local == len(here),
        f"data_parallel_size_local {local} must be {len(here)} here, for a server starts no engines on other "
        "machines: give each machine a server, with data_parallel_hybrid_lb",
    )
    require(
        0 <= here.start < here.stop <= max(size, 1),
        f"the engines of this server, from {here.start} to {here.stop - 1}, must be among those of "
        f"data_parallel_size {size}: from 0 to {size - 1}",
    )
    require(
        not args.enable_expert_parallel or len(here) == size,
        "enable_expert_parallel makes engines step together, which those of several servers cannot: leave "
        "out data_parallel_rank and data_parallel_hybrid_lb",
    )


def _judge_executor(
    args: EngineArgs, num_ranks: int, is_lockstep: bool, require: Callable[[bool, str], None]
) -> None:
    """Whether what was named can run so many ranks, by one name or the other."""
    named = args.distributed_executor_backend
    by_backend = None if named is None else BACKENDS[named]
    require(
        args.executor is None or by_backend in (None, args.executor),
        f"executor {args.executor} and distributed_executor_backend {named} differ; give one",
    )
    require(
        num_ranks == 1 or "uniproc" not in (args.executor, by_backend),
        f"{_executor_setting(args)} is one "
        f"process, and {args.tensor_parallel_size} x {args.pipeline_parallel_size} ranks need one each: "
        "leave it out",
    )
    require(
        not is_lockstep or "multiproc" not in (args.executor, by_backend),
        f"{_executor_setting(args)} starts workers beside an engine, and the engines that "
        f"enable_expert_parallel makes of data_parallel_size {args.data_parallel_size} are one process each: "
        "leave it out",
    )


def _executor_setting(args: EngineArgs) -> str:
    """What named it."""
    if args.executor is not None:
        return f"executor {args.executor}"
    return f"distributed_executor_backend {args.distributed_executor_backend}"


def resolve(args: EngineArgs, model: ModelFacts, num_cpus: int | None = None) -> EngineConfig:
    """Decide everything that can be decided before measuring. `num_cpus`: cores that the kernels may use;
    None: those of this process.

    Raises `ConfigError` with a line for each thing that is wrong.
    """
    wrong: list[str] = []
    reasons: dict[str, str] = {}
    num_cpus = usable_cores() if num_cpus is None else num_cpus
    args = _judge_types(args, wrong)
    _judge_alone(args, num_cpus, wrong)

    def require(right: bool, message: str) -> None:
        if not right:
            wrong.append(message)

    _judge_use(args, model, require)
    max_positions = model.max_position_embeddings
    asked_len = AUTO_MAX_MODEL_LEN if args.max_model_len == "auto" else args.max_model_len
    fit = asked_len == AUTO_MAX_MODEL_LEN
    max_model_len = max_positions if asked_len is None or fit else asked_len
    if asked_len is None:
        reasons["max_model_len"] = f"{max_positions}, the model's"
    require(
        2 <= max_model_len <= max_positions,  # the least: a token that is asked, and one that answers
        f"max_model_len {max_model_len} must be from 2 to {max_positions}, the positions the model knows",
    )
    given_tokens, given_seqs = args.max_num_batched_tokens, args.max_num_seqs
    tokens = given_tokens if given_tokens is not None else 2048
    if given_tokens is None and given_seqs is not None and given_seqs > tokens:
        tokens = given_seqs
        reasons["max_num_batched_tokens"] = f"{tokens}, so that every one of max_num_seqs gets a token"
    if not args.enable_chunked_prefill and given_tokens is None and tokens < max_model_len:
        tokens = max_model_len
        reasons["max_num_batched_tokens"] = f"{tokens}, for without chunks a whole prompt must fit in a step"
    seqs = given_seqs if given_seqs is not None else min(128, max(tokens, 1))
    if given_seqs is None and seqs < 128:
        reasons["max_num_seqs"] = f"{seqs}, for no more than max_num_batched_tokens can run in a step"
    require(tokens >= 1, f"max_num_batched_tokens {tokens} must be at least 1")
    require(seqs >= 1, f"max_num_seqs {seqs} must be at least 1")
    require(
        not (tokens >= 1 and seqs >= 1) or tokens >= seqs,
        f"max_num_batched_tokens {tokens} cannot feed max_num_seqs {seqs}: raise it or lower that",
    )
    require(
        args.enable_chunked_prefill or tokens >= max_model_len,
        f"without chunked prefill max_num_batched_tokens {tokens} must hold a whole prompt of max_model_len "
        f"{max_model_len}: raise the first, lower the second, or allow chunks",
    )
    if wrong:
        raise ConfigError("\n".join(wrong))
    pp = args.pipeline_parallel_size
    return EngineConfig(
        model=model.path,
        vocab_size=model.vocab_size * model.pooling.token_kinds,
        executor=_executor(args),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=max_model_len,
            policy=args.scheduling_policy,
            enable_chunked_prefill=args.enable_chunked_prefill,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            watermark=args.watermark,
            enable_prefix_caching=args.enable_prefix_caching is not False,
            num_stages=pp,
        ),
        block_size=args.block_size,
        depth=pp + args.async_scheduling,
        seed=args.seed,
        load_format=args.load_format,
        kernels=args.kernels,
        quantization=args.quantization,
        activations=args.activations,
        kv_cache_dtype=args.kv_cache_dtype,
        instruction_set=args.instruction_set,
        num_threads=_threads_of_each(args, num_cpus),
        fit_max_model_len=fit,
        num_gpu_blocks_override=args.num_gpu_blocks_override,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        log_iteration_details=args.log_iteration_details,
        reasons=reasons,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=pp,
        enable_expert_parallel=args.enable_expert_parallel,
        collectives=args.collectives,
        num_local_engines=len(args.local_ranks),
        engine_rank=args.local_ranks.start if args.data_parallel_size > 1 else None,
    )


def _executor(args: EngineArgs) -> str:
    if args.executor is not None:
        return args.executor
    several = args.tensor_parallel_size * args.pipeline_parallel_size > 1
    return BACKENDS[args.distributed_executor_backend or ("mp" if several else "uni")]


def _num_local_workers(args: EngineArgs) -> int:
    """Of all engines of this server."""
    return len(args.local_ranks) * args.tensor_parallel_size * args.pipeline_parallel_size


def _threads_of_each(args: EngineArgs, num_cpus: int) -> int | None:
    """Of every worker's kernels; None: all cores are its own."""
    num_workers = _num_local_workers(args)
    if args.num_threads is not None or num_workers == 1:
        return args.num_threads
    return max(1, num_cpus // num_workers)
