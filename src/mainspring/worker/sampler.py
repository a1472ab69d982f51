"""The rows of a step, sampled: by numpy, or by a sampler that comes with the model's kernels.

Theory of operation. What a row of logits becomes is ruled by `sampling_rules`; here are two ways to apply
those rules to many rows. `NumpySampler` takes the rules themselves, one row after another. `NativeSampler`
hands all rows of a step to a `RowSampler` in one call, with a plan per request that is made once, when the
request enters a slot; in each step only rows with penalties or bad words cost any Python. Both give the
same tokens, except where a rounding decides which token is the last of a nucleus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import TokenLogprobs
from mainspring.worker.sampling_rules import (
    EDITED_TO_INFINITY,
    NONE_ALLOWED,
    SamplingError,
    not_finite,
    row_logprobs,
    sample_row,
)
from mainspring.worker.sampling_state import FloatArray, SamplingState

MaskArray = npt.NDArray[np.int32]  # [ceil(vocab_size / 32)], bit t: token t may follow

FAILED = -1  # in place of a token


@dataclass(slots=True)
class SampledRows:
    """What became of some rows; indices are theirs."""

    token_ids: list[int]  # FAILED where there is an error
    errors: dict[int, str] = field(default_factory=dict)  # why a request cannot go on
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # of one position, where asked for

    def extend(self, others: SampledRows) -> None:
        """Other rows come after these."""
        start = len(self.token_ids)
        self.token_ids += others.token_ids
        self.errors |= {start + index: error for index, error in others.errors.items()}
        self.logprobs |= {start + index: logprobs for index, logprobs in others.logprobs.items()}


class Sampler(Protocol):
    """Rows of logits -> tokens."""

    def enter(self, state: SamplingState) -> Any:
        """What `sample` wants to be given for this request from now on."""

    def sample(
        self,
        logits: FloatArray,
        states: Sequence[SamplingState],
        entered: Sequence[Any],
        masks: Sequence[Any],
    ) -> SampledRows:
        """[rows, vocab_size] logits; per row a state, what `enter` made of it, and a `MaskArray` or None.
        `masks` is empty where no row has one."""

    def score(self, logits: FloatArray, token_ids: Sequence[int], num_logprobs: int) -> TokenLogprobs:
        """Of token i after row i. Raises `SamplingError` where logits are not finite."""


class NumpySampler:
    """The rules themselves."""

    def enter(self, state: SamplingState) -> None:
        return None

    def sample(
        self,
        logits: FloatArray,
        states: Sequence[SamplingState],
        entered: Sequence[Any],
        masks: Sequence[Any],
    ) -> SampledRows:
        rows = SampledRows([])
        for index, state in enumerate(states):
            try:
                token_id, logprobs = sample_row(logits[index], state, masks[index] if masks else None)
            except SamplingError as error:
                token_id, logprobs = FAILED, None
                rows.errors[index] = str(error)
            rows.token_ids.append(token_id)
            if logprobs is not None:
                rows.logprobs[index] = logprobs
        return rows

    def score(self, logits: FloatArray, token_ids: Sequence[int], num_logprobs: int) -> TokenLogprobs:
        rows = [row_logprobs(row, token, num_logprobs) for row, token in zip(logits, token_ids, strict=True)]
        return concatenated(rows)


class RowPlan(Protocol):
    """What one request asks of each of its rows. Nothing but the largest logit, until it is told more."""

    def draw(self, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None: ...
    def logprobs(self, num_logprobs: int) -> None: ...
    def allow(self, ids: npt.NDArray[np.int64]) -> None: ...
    def bias(self, ids: npt.NDArray[np.int64], bias: FloatArray) -> None: ...
    def stop_from(self, ids: npt.NDArray[np.int64], position: int) -> None: ...
    def penalties(self, repetition: float, frequency: float, presence: float) -> None: ...
    def count(self, ids: npt.NDArray[np.int64], counts: FloatArray) -> None: ...
    def forbid(self, ids: npt.NDArray[np.int64]) -> None: ...


Failures = list[tuple[int, int, float]]  # row, one of the numbers below, a logit


class RowSampler(Protocol):
    """A native sampler, as kernels give it. Its rows run on the kernels' threads, without the interpreter."""

    def plan(self) -> RowPlan: ...

    def sample_rows(
        self, logits: FloatArray, plans: list[Any], positions: npt.NDArray[np.int64], masks: list[Any]
    ) -> tuple[npt.NDArray[np.int32], Failures, dict[int, Any], npt.NDArray[np.int32]]:
        """-> token ids [rows] (-1: failed), failures, {row: (ids, log-probabilities)}, ranks [rows]."""

    def row_logprobs(
        self, logits: FloatArray, token_ids: npt.NDArray[np.int32], num_logprobs: int
    ) -> tuple[npt.NDArray[np.int32], FloatArray, npt.NDArray[np.int32], Failures]: ...


_NOT_FINITE, _NONE_ALLOWED, _EDITED_TO_INFINITY = 1, 2, 3


class NativeSampler:
    """All rows in one call."""

    def __init__(self, rows: RowSampler) -> None:
        self._rows = rows

    def enter(self, state: SamplingState) -> RowPlan:
        plan = self._rows.plan()
        if state.temperature > 0.0:
            plan.draw(state.temperature, state.top_k, state.top_p, state.min_p, state.seed)
        if state.num_logprobs is not None:
            plan.logprobs(state.num_logprobs)
        if state.allowed_ids is not None:
            plan.allow(state.allowed_ids)
        if state.logit_bias is not None:
            plan.bias(*state.logit_bias)
        if len(state.stop_ids):
            plan.stop_from(state.stop_ids, state.stops_from)
        if state.counts is not None:
            plan.penalties(state.repetition_penalty, state.frequency_penalty, state.presence_penalty)
        return plan

    def sample(
        self,
        logits: FloatArray,
        states: Sequence[SamplingState],
        entered: Sequence[Any],
        masks: Sequence[Any],
    ) -> SampledRows:
        for state, plan in zip(states, entered, strict=True):
            if state.counts is not None:
                plan.count(state.counts.ids, state.counts.counts)
            if state.bad_words:
                plan.forbid(np.array(state.banned_ids(), dtype=np.int64))
        positions = np.array([state.position for state in states], dtype=np.int64)
        token_ids, failures, logprobs, ranks = self._rows.sample_rows(
            logits, list(entered), positions, list(masks)
        )
        return SampledRows(
            token_ids.tolist(),
            {row: _explanation(status, value) for row, status, value in failures},
            {row: TokenLogprobs(ids, p, ranks[row : row + 1]) for row, (ids, p) in logprobs.items()},
        )

    def score(self, logits: FloatArray, token_ids: Sequence[int], num_logprobs: int) -> TokenLogprobs:
        ids, logprobs, ranks, failures = self._rows.row_logprobs(
            logits, np.array(token_ids, dtype=np.int32), num_logprobs
        )
        for _, status, value in failures:
            raise SamplingError(_explanation(status, value))
        return TokenLogprobs(ids, logprobs, ranks)


def _explanation(status: int, value: float) -> str:
    if status == _NONE_ALLOWED:
        return NONE_ALLOWED
    if status == _EDITED_TO_INFINITY:
        return EDITED_TO_INFINITY
    assert status == _NOT_FINITE, f"a native row ended with status {status}"
    return not_finite(value)


def greedy_rows(token_ids: npt.NDArray[np.int32], values: FloatArray) -> SampledRows:
    """Of rows whose largest logits, `values`, the model's head found itself."""
    rows = SampledRows(token_ids.tolist())
    for row in np.flatnonzero(~np.isfinite(values)).tolist():
        rows.token_ids[row] = FAILED
        value = float(values[row])
        rows.errors[row] = NONE_ALLOWED if value == -np.inf else not_finite(value)
    return rows


def concatenated(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """Of the positions of all parts, in order."""
    return TokenLogprobs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
