"""What a worker knows of the requests in its slots, and the `Batch` of one step made from it.

Rule 1. State is indexed by slot and never moves; a batch is a list of slots. A new stay overwrites
        everything that the stay before left, so freeing a slot costs nothing.
Rule 2. The worker's tokens run ahead of the scheduler's: a sampled token is appended here at once, and the
        next step reads it from here. `num_computed_tokens` advances only by what plans say.
Rule 3. A decode row costs no Python: what it needs (last token, number of computed tokens, block table row)
        stands in arrays indexed by slot. Only rows that read several tokens touch their token list.
Rule 4. Block tables are padded with 0, the null block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import KVCacheConfig, NewRequestData, SchedulerOutput, TokenLogprobs
from mainspring.kernels.ops import Batch
from mainspring.worker.pooling import Classifier, Pool
from mainspring.worker.sampling_state import SamplingState


@dataclass(slots=True)
class Slot:
    """One stay of one request."""

    request_id: str
    sampling: SamplingState
    sampling_plan: Any  # what the sampler made of it
    num_prompt_logprobs: int | None  # still wanted; -1: all
    # of the prompt positions computed so far
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # why it cannot go on; it is told with each of its rows until the scheduler ends it
    error: str | None = None
    pool: Pool | None = None  # where it samples nothing: what was read so far


class InputBatch:
    """Slots, and per slot and KV group a row of block ids."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        kv: KVCacheConfig,
        plan_sampling: Callable[[SamplingState], Any] = lambda state: None,
        classifier: Classifier | None = None,
    ) -> None:
        """classifier: the model's head, where it has one."""
        self.vocab_size = vocab_size
        self._classifier = classifier
        self._plan_sampling = plan_sampling
        self.block_size = kv.block_size
        self.slots: list[Slot | None] = [None] * max_num_seqs
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # known here, sampled ones included
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int32)  # whose KV is, or is being, written
        self.last_token = np.zeros(max_num_seqs, dtype=np.int32)  # token num_tokens - 1
        # the position from which its rows are greedy and nothing else
        self.greedy_from = np.zeros(max_num_seqs, dtype=np.int64)
        max_blocks = -(-max_model_len // kv.block_size)
        self.block_tables = [np.zeros((max_num_seqs, max_blocks), dtype=np.int32) for _ in kv.groups]
        self.num_blocks = np.zeros((len(kv.groups), max_num_seqs), dtype=np.int32)
        # slots that want prompt log-probabilities, are pooled or have an error: usually none
        self.watched: set[int] = set()

    def apply(self, plan: SchedulerOutput) -> None:
        """Who leaves, who enters, which blocks were added: before anything is computed."""
        for slot in plan.freed_slots:
            self.slots[slot] = None
            self.watched.discard(slot)
        for new in plan.new_requests:
            self._enter(new)
        for slot, group, block_ids in plan.new_blocks:
            self._append_blocks(slot, group, block_ids)

    def build(self, plan: SchedulerOutput) -> Batch:
        """The kernels' view of the plan's rows, as they are before the step."""
        slots = np.array(plan.slots, dtype=np.intp)
        counts = np.array(plan.num_scheduled_tokens, dtype=np.int32)
        computed = self.num_computed_tokens[slots]
        seq_lens = computed + counts
        known = self.num_tokens[slots]
        assert (seq_lens <= known).all(), "the plan reads tokens that were not sampled yet"
        assert (seq_lens == known)[plan.sampling_rows].all(), (
            "the plan samples rows that do not reach their end"
        )
        query_start_loc = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        if len(slots) == plan.num_tokens:
            positions, slot_of_token = computed, slots
        else:
            first = np.repeat(computed - query_start_loc[:-1], counts)
            positions, slot_of_token = (
                first + np.arange(plan.num_tokens, dtype=np.int32),
                np.repeat(slots, counts),
            )
        width = -(-int(seq_lens.max()) // self.block_size)
        block, offset = np.divmod(positions, self.block_size)
        return Batch(
            token_ids=self._token_ids(slots, computed, seq_lens, query_start_loc),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=tuple(table[slots, :width] for table in self.block_tables),
            slot_mapping=tuple(
                table[slot_of_token, block].astype(np.int64) * self.block_size + offset
                for table in self.block_tables
            ),
        )

    def empty(self) -> Batch:
        """No rows of nobody."""
        nothing = np.zeros(0, dtype=np.int32)
        return Batch(
            token_ids=nothing,
            positions=nothing,
            query_start_loc=np.zeros(1, dtype=np.int32),
            seq_lens=nothing,
            block_tables=tuple(table[:0] for table in self.block_tables),
            slot_mapping=tuple(np.zeros(0, dtype=np.int64) for _ in self.block_tables),
        )

    def advance(self, plan: SchedulerOutput, batch: Batch) -> None:
        """The plan's tokens are computed; `batch` was built from it."""
        self.num_computed_tokens[plan.slots] = batch.seq_lens

    def append_tokens(self, slots: npt.NDArray[np.intp], token_ids: list[int]) -> None:
        """A token was sampled for the request in each slot; no slot comes twice."""
        for slot, token_id in zip(slots.tolist(), token_ids, strict=True):
            self.at(slot).sampling.append(token_id)
        self.num_tokens[slots] += 1
        self.last_token[slots] = token_ids

    def fail(self, slot: int, error: str) -> None:
        """The request in `slot` cannot go on."""
        self.at(slot).error = error
        self.watched.add(slot)

    def at(self, slot: int) -> Slot:
        """The request in `slot`; a plan that names an empty one is our mistake."""
        state = self.slots[slot]
        assert state is not None, f"slot {slot} is empty"
        return state

    def check(self) -> None:
        """The arrays say what the token lists say."""
        for slot, state in enumerate(self.slots):
            if state is None:
                continue
            watched = any(x is not None for x in (state.num_prompt_logprobs, state.error, state.pool))
            assert watched == (slot in self.watched), f"slot {slot}: watched"
            tokens = state.sampling.token_ids
            assert self.num_tokens[slot] == len(tokens), (
                f"slot {slot}: {self.num_tokens[slot]} != {len(tokens)}"
            )
            assert self.last_token[slot] == tokens[-1], f"slot {slot}: last token"
            assert 0 <= self.num_computed_tokens[slot] <= len(tokens), (
                f"slot {slot}: computed beyond its tokens"
            )
            for table, num_blocks in zip(self.block_tables, self.num_blocks, strict=True):
                assert not table[slot, num_blocks[slot] :].any(), f"slot {slot}: block ids of an earlier stay"

    def _enter(self, new: NewRequestData) -> None:
        slot = new.slot
        assert new.token_ids, f"{new.request_id} has no tokens"
        state = SamplingState.of(new, self.vocab_size)
        self.slots[slot] = Slot(new.request_id, state, self._plan_sampling(state), new.num_prompt_logprobs)
        self.greedy_from[slot] = state.greedy_from
        self.watched.discard(slot)
        if new.pooling is not None:
            self.at(slot).pool = Pool(new.pooling, self._classifier)
        if new.num_prompt_logprobs is not None or new.pooling is not None:
            self.watched.add(slot)
        self.num_tokens[slot] = len(new.token_ids)
        self.last_token[slot] = new.token_ids[-1]
        self.num_computed_tokens[slot] = new.num_computed_tokens
        for group, block_ids in enumerate(new.block_ids):
            self.block_tables[group][slot] = 0
            self.num_blocks[group, slot] = 0
            self._append_blocks(slot, group, block_ids)

    def _append_blocks(self, slot: int, group: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[group, slot])
        self.block_tables[group][slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[group, slot] = start + len(block_ids)

    def _token_ids(
        self,
        slots: npt.NDArray[np.intp],
        computed: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        query_start_loc: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        token_ids = np.empty(int(query_start_loc[-1]), dtype=np.int32)
        token_ids[query_start_loc[1:] - 1] = self.last_token[slots]
        longer = (seq_lens - computed > 1) | (seq_lens < self.num_tokens[slots])
        for row in np.flatnonzero(longer).tolist():
            tokens = self.at(int(slots[row])).sampling.token_ids
            start, end = query_start_loc[row], query_start_loc[row + 1]
            token_ids[start:end] = tokens[computed[row] : seq_lens[row]]
        return token_ids
