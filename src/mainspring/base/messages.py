"""The words the floors speak: everything that may cross a process boundary.

Theory of operation.
- Every message is a `msgspec.Struct`, encoded as an array and not tracked by the garbage collector. A struct
  grows at its end only, by fields with defaults, so that two versions can still talk; nothing is pickled.
- A request is (tokens, num_computed_tokens). There are no phases: a prompt, a chunk of one, a resumed request
  and the next token are all "tokens the model has not read yet".
- A plan (`SchedulerOutput`) goes down, a `ModelRunnerOutput` comes back, one per step and in order. No field
  of either holds the value of a token that is still on the device.
- A row of a plan names a *slot*: a dense number below `max_num_seqs`, owned by the scheduler and used by
  workers as the index of all their per-request state. A *generation* is the number of one stay in a slot; no
  two stays share one, so a late result whose generation has passed is recognised and dropped.

Arrays that a plan and its successor share (`slots`, `num_scheduled_tokens`) are handed over: never change
them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from mainspring.base.params import PoolingKind, SamplingParams, StructuredOutputsParams


class FinishReason(IntEnum):
    """Why a request ended. The numbers are on the wire; people see `str(reason)`."""

    STOP = 0  # EOS, a stop token, a stop string, a finished grammar
    LENGTH = 1  # max_tokens or max_model_len
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


# ---------------------------------------------------------------------------------------------------------
# front end -> engine core
# ---------------------------------------------------------------------------------------------------------


class LoRARef(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """An adapter, by name and by the number of what was loaded under it: the same name may be loaded
    twice."""

    name: str
    load_id: int


PoolingActivation = Literal["none", "normalize", "softmax", "sigmoid"]


class Pooling(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """What a prompt is read for, where nothing is to be sampled: everything that the model's files or the
    caller leave open is decided.

    kind: of which tokens' hidden states: the last one's, the first one's (cls), the mean of all, or each
    (all). `classify`: the model's head makes scores of it. Then the `activation`.
    """

    kind: PoolingKind
    activation: PoolingActivation = "normalize"
    classify: bool = False
    dimensions: int | None = None  # the first so many elements


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence to run, complete enough to be run again by another core (the journal, see below).

    `sampling_params` is resolved: `seed` and `max_tokens` are set, `n` is 1. Beside `pooling` it only says
    whether the prefix cache may be read.
    """

    request_id: str  # internal, unique: the caller's id and a random tail
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_id: int | None = None  # None where EOS does not end it (ignore_eos)
    stop_token_ids: list[int] = []  # others that end it; EOS is not among them
    bad_words_token_ids: list[list[int]] = []  # every tokenisation of every bad word
    arrival_time_s: float = 0.0  # the front end's monotonic clock
    priority: int = 0  # smaller first
    client_index: int = 0  # which front end receives its outputs
    cache_salt: str | None = None
    # The journal: tokens the front end has already received from an earlier core. They count as output
    # everywhere (penalties, limits, grammar, position of the noise) and are never sent again.
    output_token_ids: list[int] = []
    structured_outputs: StructuredOutputsParams | None = None
    lora: LoRARef | None = None  # refused by name in InputProcessor until adapters exist
    features: list[bytes] | None = None  # multimodal items; refused likewise
    pooling: Pooling | None = None  # the request ends when its prompt is read, and samples nothing
    data_parallel_rank: int | None = None  # which of several engines is to run it, if it lives


# Commands: a type and a `case`, defined once for every client.


class ResetPrefixCache(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Forget every cached block. Answers False, and changes nothing, while live requests hold blocks,
    unless `reset_running_requests`: then those are preempted and computed again."""

    reset_running_requests: bool = False


class GetStats(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answers the current `SchedulerStats`."""


class CheckHealth(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A round trip through the core and every worker; answers True."""


PauseMode = Literal["abort", "wait", "keep"]


class PauseScheduler(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Stop running requests; answered, with True, when nothing runs any more. New ones are accepted and
    queued.

    abort: those that live end with finish reason abort. wait: those that run go on to their end. keep: all
    stay where they are, and go on at `ResumeScheduler`. `clear_cache` forgets cached prefixes too; kept
    requests are then computed again.
    """

    mode: PauseMode = "abort"
    clear_cache: bool = False


class ResumeScheduler(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Undo `PauseScheduler`; answers True. While asleep it is refused: wake up first."""


class IsPaused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answers a bool."""


class Sleep(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Give memory back: pause (abort), forget the cache, and drop the KV pool (level 1) and the weights too
    (level 2), which are read again from their file at `WakeUp`. Level 0 only pauses. Answered, with True,
    when it is done; requests that come meanwhile wait."""

    level: int = 1


SLEEP_TAGS = ("weights", "kv_cache")


class WakeUp(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Take back what `tags` name ("weights", "kv_cache"; None: all). Once nothing is missing, requests run
    again. Answers True."""

    tags: list[str] | None = None


class IsSleeping(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Answers a bool: something is not awake yet."""


class PrepareGrammars(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Build what structured outputs need of the vocabulary, which the first of them would do: it holds the
    interpreter's lock for a part of a second. Answered, with True, when it is done; False where there can be
    none."""


class Profile(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Start, or stop, Python's profiler in the loop's thread. Stopping answers the path of the file it
    wrote."""

    is_start: bool = True


Command = (
    ResetPrefixCache
    | GetStats
    | CheckHealth
    | PauseScheduler
    | ResumeScheduler
    | IsPaused
    | Sleep
    | WakeUp
    | IsSleeping
    | PrepareGrammars
    | Profile
)


# ---------------------------------------------------------------------------------------------------------
# engine core -> front end
# ---------------------------------------------------------------------------------------------------------


class TokenLogprobs(NamedTuple):
    """Log-probabilities of consecutive positions, as arrays: objects are made only for who reads them.

    Column 0 is the token that was sampled (for prompts: the token that stands there), then the best ones,
    best first. All of float32's natural logarithms, taken before masks and penalties except the grammar's.
    """

    token_ids: npt.NDArray[np.int32]  # [positions, 1 + k]
    logprobs: npt.NDArray[np.float32]  # [positions, 1 + k]
    # [positions], 1 is the best: how many logits are at least as large as column 0's
    ranks: npt.NDArray[np.int32]


class EventType(IntEnum):
    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(NamedTuple):
    type: EventType
    timestamp_s: float  # the core's monotonic clock: compare only with its own kind


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is new of one request after one step: a message, not a state."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token; None for EOS and everything else
    new_logprobs: TokenLogprobs | None = None  # one position per new token
    prompt_logprobs: TokenLogprobs | None = None  # once, with the first output: prompt positions 1, 2, ...
    events: list[EngineCoreEvent] | None = None
    # once, with the first output: prompt tokens found at first admission
    num_cached_tokens: int | None = None
    error: str | None = None  # the cause, where finish_reason is ERROR
    pooled: npt.NDArray[np.float32] | None = None  # what a request with `pooling` was for; with its end


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Counters since the start and gauges of now. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0  # ready, for want of blocks, slots or budget
    num_parked: int = 0  # for an event: a grammar, KV from elsewhere
    kv_cache_usage: float = 0.0  # blocks held / blocks there are
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up, at first admission
    prefix_cache_hits: int = 0  # tokens found
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    engines: tuple[SchedulerStats, ...] = ()  # of several engines, whose sum this is: each, by its rank


class UtilityOutput(NamedTuple):
    """The answer to a command that came over a socket."""

    call_id: int
    result: bytes  # msgpack of what the command answers; empty where it failed
    error: str | None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Everything one step has to say to one front end, or the answer to one of its commands."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp_s: float = 0.0
    utility_output: UtilityOutput | None = None
    is_leaving: bool = False  # to client 0, once: the core was asked to end, and takes nothing more
    # Of ranks in lock-step (engine/lockstep.py), to who coordinates them:
    start_wave: int | None = None  # of ranks in lock-step: this one has woken for it, start the others


# ---------------------------------------------------------------------------------------------------------
# scheduler -> executor -> workers, and back
# ---------------------------------------------------------------------------------------------------------


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request enters a slot, for the first time or again after preemption: all a worker must know of it.

    Whatever the slot held before is to be forgotten.
    """

    slot: int
    request_id: str  # for logs and error texts only
    token_ids: list[int]  # prompt, then output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # leading tokens whose KV the blocks hold already
    block_ids: tuple[list[int], ...]  # per KV group, as owned now; later steps append
    sampling_params: SamplingParams
    stop_token_ids: list[int] = []  # with EOS: what min_tokens forbids
    bad_words_token_ids: list[list[int]] = []
    num_prompt_logprobs: int | None = None  # still wanted, else None: they are delivered once
    has_grammar: bool = False
    lora: LoRARef | None = None
    pooling: Pooling | None = None  # such a row samples nothing


class BlockAppend(NamedTuple):
    """`block_ids` join the end of the block table of `slot` in KV group `group`."""

    slot: int
    group: int
    block_ids: list[int]


class BlockCopy(NamedTuple):
    src: int
    dst: int


class SchedulerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The plan of one step. Row i runs the next `num_scheduled_tokens[i]` unread tokens of slot `slots[i]`.

    A worker keeps `num_computed_tokens` and the tokens of each slot itself and advances them by what the plan
    says. A row whose tokens reach the last one the slot has samples the next (`sampling_rows` lists them,
    ascending), or is pooled. Order within a step: forget `freed_slots`, take `new_requests`, append
    `new_blocks`, zero, copy, then compute.
    """

    step_id: int
    slots: list[int]
    num_scheduled_tokens: list[int]
    sampling_rows: list[int]
    num_tokens: int  # the sum over rows
    new_requests: list[NewRequestData] = []
    freed_slots: list[
        int
    ] = []  # finished, aborted or preempted since the last plan; may be taken again at once
    new_blocks: list[BlockAppend] = []
    blocks_to_zero: list[int] = []
    blocks_to_copy: list[BlockCopy] = []
    grammar_rows: list[int] = []  # those of sampling_rows that need a mask
    kv_transfer: bytes | None = None  # opaque: between the two halves of a KV connector

    @property
    def num_rows(self) -> int:
        return len(self.slots)


class GrammarOutput(NamedTuple):
    """The mask for a step's sampling: bit t of row i says whether token t may follow (little-endian int32
    words)."""

    rows: list[int]  # indices into the plan's rows
    bitmask: npt.NDArray[np.int32]  # [len(rows), ceil(vocab_size / 32)]


class ModelRunnerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step produced, aligned with the plan's rows. Ragged: a chunk yields none, a verified row
    several."""

    sampled_token_ids: list[list[int]]
    logprobs: dict[int, TokenLogprobs] = {}  # by row, where asked for; one position per sampled token
    prompt_logprobs: dict[int, TokenLogprobs] = {}  # by row, whole, in the step that ends the prompt
    errors: dict[
        int, str
    ] = {}  # by row: this request cannot go on (its token list is empty); others are fine
    finished_recving: list[str] = []  # request ids whose remote KV has arrived
    failed_recving: list[str] = []  # request ids whose remote KV will never arrive
    # by row, of requests with `pooling`, in the step that ends the prompt: [elements], of kind all [tokens,
    # elements]
    pooled: dict[int, npt.NDArray[np.float32]] = {}


# ---------------------------------------------------------------------------------------------------------
# KV cache: what a model needs, what a machine has
# ---------------------------------------------------------------------------------------------------------


class KVCacheSpec(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """What one layer stores per token. Layers with equal specs may share a block table."""

    num_kv_heads: int
    head_size: int
    dtype_bytes: int = 4
    # a token sees itself and the sliding_window - 1 before it; None: all before it
    sliding_window: int | None = None
    causal: bool = True  # False anywhere turns chunked prefill and prefix caching off
    scale_bytes: int = 0  # per token and KV head, of K and of V each: for quantised caches

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * (self.head_size * self.dtype_bytes + self.scale_bytes)


class KVCacheGroup(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Layers that share one block table."""

    layers: tuple[int, ...]
    spec: KVCacheSpec


class KVCacheConfig(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """How the pool is laid out: decided by `engine/build.py` from what the workers reported.

    A block id belongs to one group at a time. The j-th layer of every group keeps its K and V in tensor j,
    so one pool serves all groups. Block 0 is the null block: it pads tables and is never written.
    """

    num_blocks: int  # the null block counted
    block_size: int  # tokens
    groups: tuple[KVCacheGroup, ...]

    @property
    def num_tensors(self) -> int:
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def bytes_per_block(self) -> int:
        """Of all tensors together; specs of all groups have the same bytes per token."""
        return (
            self.num_tensors * self.block_size * max((g.spec.bytes_per_token for g in self.groups), default=0)
        )


CommandResult = Any  # what a command answers stands in its docstring
