"""Slots: what a plan changes in them, and the batch that is built from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_fakes import kv_config, new_request, plan

from mainspring.base.messages import BlockAppend
from mainspring.worker.input_batch import InputBatch


def make_batch(num_groups: int = 1, max_num_seqs: int = 4) -> InputBatch:
    return InputBatch(max_num_seqs, 64, 100, kv_config(block_size=4, num_groups=num_groups))


def step(batch: InputBatch, a_plan):
    batch.apply(a_plan)
    built = batch.build(a_plan)
    batch.advance(a_plan, built)
    batch.check()
    return built


def test_a_chunk_a_decode_and_a_prompt_in_one_batch():
    batch = make_batch(num_groups=2)
    prompts = {2: list(range(10, 19)), 0: [20, 21, 22], 3: [30, 31]}
    entering = [new_request(slot, prompt, num_groups=2) for slot, prompt in prompts.items()]
    step(batch, plan({2: 5, 0: 3}, [0], new_requests=entering))
    batch.append_tokens(np.array([0]), [77])
    built = step(batch, plan({0: 1, 3: 2, 2: 3}, [0, 3]))
    assert built.token_ids.tolist() == [77, 30, 31, 15, 16, 17]
    assert built.positions.tolist() == [3, 0, 1, 5, 6, 7]
    assert built.query_start_loc.tolist() == [0, 1, 3, 6]
    assert built.seq_lens.tolist() == [4, 2, 8]
    for group, table in enumerate(built.block_tables):
        starts = [1 + 64 * slot + 32 * group for slot in (0, 3, 2)]
        assert table.tolist() == [[start, start + 1] for start in starts]
        blocks = [starts[0], starts[1], starts[1], *[starts[2] + 1] * 3]
        offsets = [3, 0, 1, 1, 2, 3]
        assert built.slot_mapping[group].tolist() == [b * 4 + o for b, o in zip(blocks, offsets, strict=True)]
    for array in (
        built.token_ids,
        built.positions,
        built.query_start_loc,
        built.seq_lens,
        *built.block_tables,
    ):
        assert array.dtype == np.int32
    assert {a.dtype for a in built.slot_mapping} == {np.dtype(np.int64)}


def test_a_new_stay_overwrites_everything():
    batch = make_batch()
    step(batch, plan({1: 9}, new_requests=[new_request(1, range(9), num_prompt_logprobs=1)]))
    batch.fail(1, "broken")
    second = new_request(1, [7, 8], output=[9], computed=2)
    second.block_ids = ([5],)
    built = step(batch, plan({1: 1}, new_requests=[second], freed_slots=[1]))
    assert built.token_ids.tolist() == [9]
    assert built.block_tables[0].tolist() == [[5]]
    assert not batch.block_tables[0][1, 1:].any()
    assert batch.at(1).error is None
    assert not batch.watched


def test_blocks_are_appended_to_their_group():
    batch = make_batch(num_groups=2)
    first = new_request(0, range(4), num_groups=2)
    first.block_ids = ([3], [9])
    step(batch, plan({0: 4}, new_requests=[first]))
    batch.append_tokens(np.array([0]), [5])
    appended = [BlockAppend(0, 1, [10]), BlockAppend(0, 0, [4, 6])]
    built = step(batch, plan({0: 1}, new_blocks=appended))
    assert [table.tolist() for table in built.block_tables] == [[[3, 4]], [[9, 10]]]
    assert [mapping.tolist() for mapping in built.slot_mapping] == [[16], [40]]


def test_a_plan_that_reads_what_was_not_sampled_is_our_mistake():
    batch = make_batch()
    step(batch, plan({0: 2}, new_requests=[new_request(0, [1, 2])]))
    with pytest.raises(AssertionError, match="not sampled yet"):
        batch.build(plan({0: 1}))
    batch.append_tokens(np.array([0]), [5])
    batch.apply(plan({}, new_requests=[new_request(1, [1, 2])]))
    with pytest.raises(AssertionError, match="do not reach their end"):
        batch.build(plan({0: 1, 1: 1}))
    with pytest.raises(AssertionError, match="slot 3 is empty"):
        batch.at(3)


def test_the_workers_tokens_are_its_own():
    """In one process a plan's list is the scheduler's own object."""
    batch = make_batch()
    new = new_request(0, [1, 2])
    step(batch, plan({0: 2}, new_requests=[new]))
    batch.append_tokens(np.array([0]), [3])
    assert new.token_ids == [1, 2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4), st.randoms())
def test_any_chunks_give_each_row_its_own_tokens(requests, random):
    """Every token is read once, at its position, into its own block."""
    batch = make_batch()
    texts = {slot: [slot * 1000 + i for i in range(length)] for slot, (length, _) in enumerate(requests)}
    entering = [new_request(slot, text) for slot, text in texts.items()]
    read: dict[int, list[tuple[int, int, int]]] = {slot: [] for slot in texts}
    left = {slot: len(text) for slot, text in texts.items()}
    while left:
        slots = random.sample(sorted(left), random.randint(1, len(left)))
        rows = {slot: random.randint(1, min(left[slot], requests[slot][1])) for slot in slots}
        done = [slot for slot, n in rows.items() if n == left[slot]]
        built = step(batch, plan(rows, done, new_requests=entering))
        entering = []
        for row, slot in enumerate(slots):
            part = slice(*built.query_start_loc[row : row + 2])
            read[slot] += zip(
                built.token_ids[part].tolist(),
                built.positions[part].tolist(),
                built.slot_mapping[0][part].tolist(),
                strict=True,
            )
            left[slot] -= rows[slot]
        left = {slot: n for slot, n in left.items() if n}
    for slot, text in texts.items():
        assert read[slot] == [(t, i, (1 + 64 * slot) * 4 + i) for i, t in enumerate(text)]
