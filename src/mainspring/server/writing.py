"""What the two endpoints' writers share. A writer is a pure fold: outputs of the engine go in, what is to be
sent comes out; it knows no socket and no clock.

`whole` makes one reply of finished outputs. A stream is `chunks` for each output as it comes, then `last`.
An answer that ended with an error becomes an `ApiError`, in either form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.server.errors import ApiError
from mainspring.server.replies import CachedTokens, CompletionTokens, Usage
from mainspring.server.requests import StreamOptions


class Head(NamedTuple):
    """What every part of an answer begins with."""

    id: str
    created: int
    model: str
    fingerprint: str


class Reporting(NamedTuple):
    """What the server was told to report, and the request's wishes beside it."""

    cached_tokens: bool  # --enable-prompt-tokens-details
    usage_at_end: bool
    usage_always: bool

    @classmethod
    def of(cls, options: StreamOptions | None, *, cached_tokens: bool, force_usage: bool) -> Reporting:
        options = options or StreamOptions()
        at_end = bool(options.include_usage) or force_usage
        return cls(cached_tokens, at_end, at_end and bool(options.continuous_usage_stats))


class Writer(Protocol):
    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """One finished output per prompt."""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[msgspec.Struct]:
        """What is new. Raises `ApiError` for an answer that failed."""

    def last(self) -> Iterator[msgspec.Struct]:
        """What follows when every answer is finished."""


class Tally:
    """Tokens so far. Prompts count once, however many answers they have."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.num_completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        if output.num_cached_tokens is not None and prompt_index not in self._cached:
            self._cached[prompt_index] = output.num_cached_tokens
        if prompt_index not in self._prompts:
            self._prompts[prompt_index] = len(output.prompt_token_ids)
        for answer in output.outputs:
            self.num_completion_tokens += len(answer.token_ids)

    def usage(
        self,
        cached_tokens: CachedTokens | UnsetType | None = UNSET,
        completion_details: CompletionTokens | UnsetType | None = None,
    ) -> Usage:
        num_prompt_tokens = sum(self._prompts.values())
        return Usage(
            num_prompt_tokens,
            num_prompt_tokens + self.num_completion_tokens,
            self.num_completion_tokens,
            cached_tokens,
            completion_details,
        )

    @property
    def num_cached_tokens(self) -> int | None:
        """None where nobody counted: in a beam search."""
        return sum(self._cached.values()) if self._cached else None


def fingerprint_at_end(head: Head, reporting: Reporting) -> str | UnsetType:
    """For the chunk that ends an answer; where the usage comes after it, that chunk has it."""
    return UNSET if reporting.usage_at_end else head.fingerprint


def check_no_error(answer: CompletionOutput) -> None:
    if answer.finish_reason == "error":
        raise ApiError(500, f"the answer failed: {answer.error or 'no cause is known'}")


def best(answers: Sequence[CompletionOutput], n: int) -> list[CompletionOutput]:
    """All, if there are not more than `n`; else (`best_of`) the likeliest by log-probability per token, the
    likeliest first, numbered anew."""
    if len(answers) <= n:
        return list(answers)

    def mean(answer: CompletionOutput) -> float:
        return (answer.cumulative_logprob or 0.0) / max(len(answer.token_ids), 1)

    chosen = sorted(answers, key=mean, reverse=True)[:n]
    for index, answer in enumerate(chosen):
        answer.index = index
    return chosen
