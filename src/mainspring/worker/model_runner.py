"""Runs plans: forward pass at the first call, sampling at the second.

Theory of operation. `execute_model` brings the slots up to date, runs the model and parks the hidden states
of the rows that sample; `sample_tokens` turns them into tokens. Between the two the scheduler makes the
grammar masks. A sampled token goes into the worker's own state at once, so the next plan can be run before
anybody has read the result of this one; what must not happen is a second forward before the sampling, and
an assert says so.

A request that cannot go on (no token allowed, logits not finite) is reported in `errors` and, because the
scheduler may have planned its next rows already, stays in its slot with a filler token until it is freed.

A row that is pooled samples nothing: its hidden states go into its `Pool` at the first call, and the result
is there when its prompt ends.

Sampling rows are of three classes. A row that is greedy and nothing else, be it under a grammar's mask, is
left to the model's head where that finds largest logits itself, without keeping any. Where ranks share the
head, a row that is only drawn is drawn by each of them from its share. All others have their
logits computed, a few rows at a time, so that their memory does not grow with the batch or the chunk, and
handed to the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

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
from mainspring.worker.pooling import Pool
from mainspring.worker.sampler import (
    NativeSampler,
    NumpySampler,
    SampledRows,
    Sampler,
    concatenated,
    greedy_rows,
)
from mainspring.worker.sampling_rules import SamplingError, draw_candidates
from mainspring.worker.stages import Stages

FloatArray = npt.NDArray[np.float32]

# (hidden states [rows, hidden], masks) -> per row the id of the largest logit, the first among equals, and
# that logit. A mask, [ceil(vocab_size / 32)] int32, says which tokens count, and where none does the logit is
# -inf. None: all count; no masks at all: in every row. A NaN that counts is found before any number.
GreedyHead = Callable[[FloatArray, list[Any]], tuple[npt.NDArray[np.int32], FloatArray]]

# (hidden states [rows, hidden], their slots, their masks or none at all) -> their tokens
_SampleRows = Callable[[FloatArray, npt.NDArray[np.intp], list[Any]], SampledRows]

PROMPT_LOGITS_ROWS = 64  # rows of prompt logits that exist at once
LOGITS_BYTES = 32 * 2**20  # of sampling logits that exist at once, but at least a row

_FILLER_TOKEN = 0


class Model(Protocol):
    """What a model is to a runner. One that is ever told to clear or copy blocks (`blocks_to_zero`,
    `blocks_to_copy`) also has `zero_blocks(block_ids)` and `copy_blocks(pairs)`. It may have a `sampler`, a
    `RowSampler` to be used in the place of numpy, a `greedy`, a `GreedyHead`, and a `classifier`, which
    `worker/pooling.py` asks for scores."""

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

    def __init__(self, model: Model, max_num_seqs: int, stages: Stages | None = None) -> None:
        """stages: where the model is one of several."""
        self.model = model
        self._stages = stages
        self._max_num_seqs = max_num_seqs
        rows = getattr(model, "sampler", None)
        self._sampler: Sampler = NumpySampler() if rows is None else NativeSampler(rows)
        self._find_largest: GreedyHead | None = getattr(model, "greedy", None)
        self._choose = getattr(model, "choose", None)
        self._batch: InputBatch | None = None
        self._parked: _Parked | None = None

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the KV pool and the slots. Once, before the first plan."""
        self.model.initialize_kv(config)
        self._batch = InputBatch(
            self._max_num_seqs,
            max_model_len,
            self.model.vocab_size,
            config,
            self._sampler.enter,
            getattr(self.model, "classifier", None),
        )

    @property
    def batch(self) -> InputBatch:
        assert self._batch is not None, "initialize comes first"
        return self._batch

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """The forward pass of a plan; its result if nothing is sampled, else None: `sample_tokens` has it."""
        assert self._parked is None, f"step {plan.step_id} came before the sampling of the step before it"
        if plan.kv_transfer is not None:
            raise EngineError("the plan carries KV transfers, but no KV connector is configured here")
        if self._stages is not None:
            self._stages.catch_up(self.batch, plan)
        self.batch.apply(plan)
        self._zero_and_copy(plan)
        output = ModelRunnerOutput([[] for _ in plan.slots])
        if not plan.slots:
            return output
        batch = self.batch.build(plan)
        hidden = self.model.forward(batch)
        if self.batch.watched and self._samples:
            self._serve_watched(plan, batch, hidden, output)
        self.batch.advance(plan, batch)
        if not plan.sampling_rows:
            return output
        last = batch.query_start_loc[1:][plan.sampling_rows] - 1
        self._parked = _Parked(plan, hidden[last], output)
        return None

    def execute_dummy_batch(self) -> None:
        """A forward pass of no rows."""
        self.model.forward(self.batch.empty())

    def sample_tokens(self, mask: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the rows that the last `execute_model` left, and record their tokens."""
        assert self._parked is not None, "there is no step to sample"
        plan, hidden, output = self._parked.plan, self._parked.hidden, self._parked.output
        self._parked = None
        if self._stages is not None and not self._stages.samples:
            self._stages.skip_sampling(self.batch, np.array(plan.slots)[plan.sampling_rows])
            return output
        masks = {} if mask is None else dict(zip(mask.rows, self._widened(mask.bitmask), strict=True))
        assert masks.keys() >= set(plan.grammar_rows), "a row that needs a mask has none"
        rows = np.array(plan.sampling_rows)
        slots = np.array(plan.slots)[rows]
        for part, sample in self._classes(slots):
            chosen = rows[part].tolist()
            row_masks = [masks.get(row) for row in chosen] if masks else []
            whole = len(chosen) == len(rows)
            sampled = sample(hidden if whole else hidden[part], slots[part], row_masks)
            self._record(chosen, slots[part], sampled, output)
        if self._stages is not None:
            self._stages.send(self.batch.last_token[slots].tolist())
        return output

    @property
    def _samples(self) -> bool:
        return self._stages is None or self._stages.samples

    def _widened(self, bitmask: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """With a bit for every logit: ids beyond a grammar's vocabulary are not allowed."""
        num_missing = -(-self.model.vocab_size // 32) - bitmask.shape[1]
        return bitmask if num_missing <= 0 else np.pad(bitmask, ((0, 0), (0, num_missing)))

    def _classes(self, slots: npt.NDArray[np.intp]) -> list[tuple[npt.NDArray[np.intp], _SampleRows]]:
        """Which of the sampling rows are sampled how."""
        if self._find_largest is None:
            return [(np.arange(len(slots)), self._sample_logits)]
        in_head = self.batch.num_tokens[slots] >= self.batch.greedy_from[slots]
        drawn = np.zeros(len(slots), bool)
        if self._choose is not None:
            drawn[:] = [self.batch.at(slot).sampling.draws_simply for slot in slots.tolist()]
        classes: list[tuple[npt.NDArray[np.intp], _SampleRows]] = [
            (np.flatnonzero(in_head), self._sample_in_head),
            (np.flatnonzero(drawn), self._sample_shares),
            (np.flatnonzero(~in_head & ~drawn), self._sample_logits),
        ]
        return [(part, sample) for part, sample in classes if len(part)]

    def _sample_in_head(
        self, hidden: FloatArray, slots: npt.NDArray[np.intp], masks: list[Any]
    ) -> SampledRows:
        assert self._find_largest is not None
        return greedy_rows(*self._find_largest(hidden, masks))

    def _sample_shares(
        self, hidden: FloatArray, slots: npt.NDArray[np.intp], masks: list[Any]
    ) -> SampledRows:
        """Every rank draws from its share of the logits, and the best of these candidates is the token."""
        assert self._choose is not None
        states = [self.batch.at(slot).sampling for slot in slots.tolist()]
        return greedy_rows(
            *self._choose(hidden, lambda logits, first: draw_candidates(logits, first, states, masks))
        )

    def _sample_logits(
        self, hidden: FloatArray, slots: npt.NDArray[np.intp], masks: list[Any]
    ) -> SampledRows:
        num_rows = max(1, LOGITS_BYTES // (4 * self.model.vocab_size))
        states = [self.batch.at(slot) for slot in slots.tolist()]
        sampled, start = SampledRows([]), 0
        for logits in self._logits(hidden, num_rows):
            some = slice(start, start + len(logits))
            sampled.extend(
                self._sampler.sample(
                    logits,
                    [state.sampling for state in states[some]],
                    [state.sampling_plan for state in states[some]],
                    masks[some],
                )
            )
            start += len(logits)
        return sampled

    def _record(
        self, rows: list[int], slots: npt.NDArray[np.intp], sampled: SampledRows, output: ModelRunnerOutput
    ) -> None:
        """Into the result and into the slots. Who cannot go on, now or since earlier, gets a filler token."""
        for index, error in sampled.errors.items():
            if self.batch.at(slots[index]).error is None:
                self.batch.fail(int(slots[index]), error)
        for index, logprobs in sampled.logprobs.items():
            output.logprobs[rows[index]] = logprobs
        for row, token_id in zip(rows, sampled.token_ids, strict=True):
            output.sampled_token_ids[row].append(token_id)
        for index in self._failed(slots):
            row, cause = rows[index], self.batch.at(slots[index]).error
            assert cause is not None
            output.errors[row] = cause
            output.sampled_token_ids[row].clear()
            output.logprobs.pop(row, None)
            sampled.token_ids[index] = _FILLER_TOKEN
        self.batch.append_tokens(slots, sampled.token_ids)

    def _failed(self, slots: npt.NDArray[np.intp]) -> list[int]:
        """The places of requests that cannot go on: usually none."""
        if not self.batch.watched:
            return []
        return [index for index, slot in enumerate(slots.tolist()) if self.batch.at(slot).error is not None]

    def _logits(self, hidden: FloatArray, num_rows: int) -> Iterator[FloatArray]:
        for start in range(0, len(hidden), num_rows):
            yield self.model.logits(hidden[start : start + num_rows])

    def _serve_watched(
        self, plan: SchedulerOutput, batch: Batch, hidden: FloatArray, output: ModelRunnerOutput
    ) -> None:
        """Prompt log-probabilities of this step's positions, what is pooled of them, and the errors of
        requests that cannot go on."""
        for row, slot in enumerate(plan.slots):
            if slot not in self.batch.watched:
                continue
            state = self.batch.at(slot)
            first, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
            if state.pool is not None:
                state.pool.add(hidden[first:end])
                if batch.seq_lens[row] == self.batch.num_tokens[slot]:
                    self._finish_pool(state.pool, row, output)
                continue
            if state.error is None:
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

    def _finish_pool(self, pool: Pool, row: int, output: ModelRunnerOutput) -> None:
        pooled = pool.result()
        if np.isfinite(pooled).all():
            output.pooled[row] = pooled
        else:
            output.errors[row] = "the model's hidden states are not finite"

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
        tokens = state.sampling.token_ids[start + 1 : min(end + 1, num_prompt_tokens)]
        for logits in self._logits(hidden[: num_prompt_tokens - 1 - start], PROMPT_LOGITS_ROWS):
            scores = self._sampler.score(logits, tokens[: len(logits)], num_logprobs)
            state.prompt_logprobs.append(scores)
            tokens = tokens[len(logits) :]
        if end < num_prompt_tokens:
            return None
        whole = concatenated([_no_positions(num_logprobs, self.model.vocab_size), *state.prompt_logprobs])
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


def _no_positions(num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """What a prompt of one token has."""
    width = 1 + (vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size))
    return TokenLogprobs(
        np.empty((0, width), dtype=np.int32),
        np.empty((0, width), dtype=np.float32),
        np.empty(0, dtype=np.int32),
    )
