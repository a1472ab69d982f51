"""What a caller receives. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Logprob(NamedTuple):
    """Of one token at one position: natural logarithm, rank among all (1 is the best), its text alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]  # by token id, the sampled (or prompt's) token first, then the best
SampleLogprobs = list[LogprobsOnePosition]
PromptLogprobs = list[LogprobsOnePosition | None]  # the first is None: nothing stands before it


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's `n` answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None unless logprobs were asked for
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None  # stop, length, abort, error, repetition; None while it goes on
    stop_reason: int | str | None = None  # the stop string or token id that ended it; None for EOS
    error: str | None = None  # the cause, where finish_reason is "error"
    pooled: Floats | None = None  # what `PoolingParams` asked for, instead of a text

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds. `arrival_time_s` is the front end's clock; the durations are None until they are known."""

    arrival_time_s: float
    time_to_first_token_s: float | None = None
    e2e_latency_s: float | None = None
    queue_time_s: float | None = None  # from queued to first scheduled, the core's clock
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """Everything known of one prompt, or what is new of it, by `SamplingParams.output_kind`."""

    request_id: str  # the caller's
    prompt: str | None  # None where ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    metrics: RequestMetrics | None = None
    # structured outputs asked for leniently: what of them is not enforced, a line each
    warnings: list[str] | None = None


# What the methods of models that read and do not write give.


@dataclass(slots=True)
class PoolingOutput:
    data: Floats  # [elements]; of a task that gives one for each token [tokens, elements]


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]  # of the labels, in the order of the model's

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """Of one prompt, or of one pair."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
