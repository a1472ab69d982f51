"""Runs plans: forward pass at the first call, sampling at the second.

Theory of operation. `execute_model` brings the slots up to date, runs the model and parks the hidden states
of the rows that sample; `sample_tokens` turns them into tokens. Between the two the scheduler makes the
grammar masks. A sampled token goes into the worker's own state at once, so the next plan can be run before
anybody has read the result of this one; what must not happen is a second forward before the sampling, and
an assert says so.

A request that cannot go on (no token allowed, logits not finite) is reported in `errors` and, because the
scheduler may have planned its next rows already, stays in its slot with a filler token until it is freed.

Logits are computed for a few rows at a time, so their memory does not grow with the batch or the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import EngineError
from mainspring.base.messages import (
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from mainspring.kernels.ops import Batch
from mainspring.worker.input_batch import InputBatch, Slot
from mainspring.worker.sampler import SamplingError, row_logprobs, sample_row

FloatArray = npt.NDArray[np.float32]

PROMPT_LOGITS_ROWS = 64  # rows of prompt logits that exist at once
LOGITS_BYTES = 32 * 2**20  # of sampling logits that exist at once, but at least a row

_FILLER_TOKEN = 0


class Model(Protocol):
    """What a model is to a runner. One that is ever told to clear or copy blocks (`blocks_to_zero`,
    `blocks_to_copy`) also has `zero_blocks(block_ids)` and `copy_blocks(pairs)`."""

    @property
    def vocab_size(self) -> int: ...

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One per layer."""

    def initialize_kv(self, config: KVCacheConfig) -> None:
        """Allocate the pool."""

    def release_kv(self) -> None:
        """Give the pool's memory back; `initialize_kv` makes it anew."""

    def forward(self, batch: Batch) -> FloatArray:
        """[tokens, hidden] float32, valid until the next call."""

    def logits(self, hidden: FloatArray) -> FloatArray:
        """[rows, hidden] -> [rows, vocab_size] float32."""


@dataclass(slots=True)
class _Parked:
    """A step between its forward pass and its sampling."""

    plan: SchedulerOutput
    hidden: FloatArray  # [sampling rows, hidden], a copy
    output: ModelRunnerOutput  # all but what sampling adds


class ModelRunner:
    """One model, its slots, and at most one step waiting for its sampling."""

    def __init__(self, model: Model, max_num_seqs: int) -> None:
        self.model = model
        self._max_num_seqs = max_num_seqs
        self._batch: InputBatch | None = None
        self._parked: _Parked | None = None

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the KV pool and the slots. Once, before the first plan."""
        self.model.initialize_kv(config)
        self._batch = InputBatch(self._max_num_seqs, max_model_len, self.model.vocab_size, config)

    @property
    def batch(self) -> InputBatch:
        assert self._batch is not None, "initialize comes first"
        return self._batch

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """The forward pass of a plan; its result if nothing is sampled, else None: `sample_tokens` has it."""
        assert self._parked is None, f"step {plan.step_id} came before the sampling of the step before it"
        if plan.kv_transfer is not None:
            raise EngineError("the plan carries KV transfers, but no KV connector is configured here")
        self.batch.apply(plan)
        self._zero_and_copy(plan)
        output = ModelRunnerOutput([[] for _ in plan.slots])
        if not plan.slots:
            return output
        batch = self.batch.build(plan)
        hidden = self.model.forward(batch)
        if self.batch.watched:
            self._serve_watched(plan, batch, hidden, output)
        self.batch.advance(plan, batch)
        if not plan.sampling_rows:
            return output
        last = batch.query_start_loc[1:][plan.sampling_rows] - 1
        self._parked = _Parked(plan, hidden[last], output)
        return None

    def sample_tokens(self, mask: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the rows that the last `execute_model` left, and record their tokens."""
        assert self._parked is not None, "there is no step to sample"
        plan, hidden, output = self._parked.plan, self._parked.hidden, self._parked.output
        self._parked = None
        masks = {} if mask is None else dict(zip(mask.rows, mask.bitmask, strict=True))
        assert masks.keys() >= set(plan.grammar_rows), "a row that needs a mask has none"
        num_rows = max(1, LOGITS_BYTES // (4 * self.model.vocab_size))
        rows = iter(plan.sampling_rows)
        for logits in self._logits(hidden, num_rows):
            for row_logits in logits:
                row = next(rows)
                self._sample(row, plan.slots[row], row_logits, masks.get(row), output)
        return output

    def _sample(
        self,
        row: int,
        slot: int,
        logits: FloatArray,
        mask: npt.NDArray[np.int32] | None,
        output: ModelRunnerOutput,
    ) -> None:
        state = self.batch.at(slot)
        if state.error is None:
            try:
                sampled = sample_row(logits, state.sampling, mask)
            except SamplingError as error:
                self.batch.fail(slot, str(error))
            else:
                output.sampled_token_ids[row].append(sampled.token_id)
                if sampled.logprobs is not None:
                    output.logprobs[row] = sampled.logprobs
                self.batch.append_token(slot, sampled.token_id)
                return
        assert state.error is not None
        output.errors[row] = state.error
        self.batch.append_token(slot, _FILLER_TOKEN)

    def _logits(self, hidden: FloatArray, num_rows: int) -> Iterator[FloatArray]:
        for start in range(0, len(hidden), num_rows):
            yield self.model.logits(hidden[start : start + num_rows])

    def _serve_watched(
        self, plan: SchedulerOutput, batch: Batch, hidden: FloatArray, output: ModelRunnerOutput
    ) -> None:
        """Prompt log-probabilities of this step's positions, and the errors of requests that cannot go on."""
        for row, slot in enumerate(plan.slots):
            if slot not in self.batch.watched:
                continue
            state = self.batch.at(slot)
            if state.error is None:
                first, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
                try:
                    scores = self._score_prompt(state, int(batch.positions[first]), hidden[first:end])
                except SamplingError as error:
                    self.batch.fail(slot, str(error))
                else:
                    if scores is not None:
                        output.prompt_logprobs[row] = scores
                        self.batch.watched.discard(slot)
            if state.error is not None:
                output.errors[row] = state.error

    def _score_prompt(self, state: Slot, start: int, hidden: FloatArray) -> TokenLogprobs | None:
        """Row i of `hidden` is position start + i and scores the token after it, if the prompt has one.

        The whole prompt's scores in the step that ends the prompt, else None.
        """
        num_logprobs, num_prompt_tokens = state.num_prompt_logprobs, state.sampling.num_prompt_tokens
        assert num_logprobs is not None
        if start != sum(len(part.ranks) for part in state.prompt_logprobs):
            raise SamplingError(
                "prompt_logprobs need every position of the prompt computed, but the first ones came from "
                "the prefix cache; leave skip_reading_prefix_cache unset"
            )
        end = start + len(hidden)
        tokens = iter(state.sampling.token_ids[start + 1 : min(end + 1, num_prompt_tokens)])
        for logits in self._logits(hidden[: num_prompt_tokens - 1 - start], PROMPT_LOGITS_ROWS):
            rows = [row_logprobs(row, next(tokens), num_logprobs) for row in logits]
            state.prompt_logprobs.append(_concatenated(rows))
        if end < num_prompt_tokens:
            return None
        whole = _concatenated([_no_positions(num_logprobs, self.model.vocab_size), *state.prompt_logprobs])
        state.num_prompt_logprobs, state.prompt_logprobs = None, []
        return whole

    def _zero_and_copy(self, plan: SchedulerOutput) -> None:
        for work, name in ((plan.blocks_to_zero, "zero_blocks"), (plan.blocks_to_copy, "copy_blocks")):
            if not work:
                continue
            method = getattr(self.model, name, None)
            if method is None:
                raise EngineError(f"the plan needs {name}, which {type(self.model).__name__} does not have")
            method(work)


def _concatenated(parts: list[TokenLogprobs]) -> TokenLogprobs:
    return TokenLogprobs(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _no_positions(num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """What a prompt of one token has."""
    width = 1 + (vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size))
    return TokenLogprobs(
        np.empty((0, width), dtype=np.int32),
        np.empty((0, width), dtype=np.float32),
        np.empty(0, dtype=np.int32),
    )
