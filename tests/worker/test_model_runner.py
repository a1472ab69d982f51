"""Plans in, tokens out, with injected logits: what a request says depends on nothing but itself."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_fakes import (
    InjectedModel,
    bitmask,
    generate,
    make_runner,
    new_request,
    plan,
    random_logits,
    run,
)

from mainspring.base.errors import EngineError
from mainspring.base.messages import BlockCopy, GrammarOutput, ModelRunnerOutput, TokenLogprobs
from mainspring.base.params import SamplingParams
from mainspring.worker import model_runner

V = 600  # more than the sampler tries one by one
NUM_TOKENS = 6
GREEDY = {"temperature": 0.0}


def mixed_requests(number: int) -> list[tuple[list[int], SamplingParams, dict]]:
    """32 requests of every kind: prompt, parameters, and what a plan carries beside them."""
    rng = random.Random(number)
    kinds = [
        GREEDY,
        {"seed": 1},
        {"seed": 2, "top_k": 5},
        {"seed": 3, "top_p": 0.8, "temperature": 1.5},
        {"seed": 4, "min_p": 0.1},
        {**GREEDY, "repetition_penalty": 2.0},
        {"seed": 5, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {**GREEDY, "allowed_token_ids": [5, 6, 7, 8]},
        {"seed": 6, "logit_bias": {4: 8.0}, "min_tokens": 3},
        {"seed": 7, "logprobs": 2},
        {**GREEDY, "logprobs": -1},
    ]
    requests = []
    for i in range(32):
        prompt = [rng.randrange(V) for _ in range(rng.randint(1, 20))]
        more = {"stop_token_ids": [4], "bad_words_token_ids": [[3], [5, 6]]} if i % 3 == 0 else {}
        requests.append((prompt, SamplingParams(**kinds[i % len(kinds)]), more))
    return requests


def alone(prompt, params, more, num_tokens=NUM_TOKENS, **how) -> tuple[list[int], list[TokenLogprobs]]:
    runner = make_runner(InjectedModel(V))
    said, results = generate(runner, new_request(0, prompt, params, **more), num_tokens, **how)
    return said, [r.logprobs[0] for r in results if r.logprobs]


def same_logprobs(a: list[TokenLogprobs], b: list[TokenLogprobs]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("number", range(3))
def test_seeded_sampling_is_the_same_alone_and_in_a_mixed_batch(number):
    """Cases B101, B103, B112, B113: 32 requests of every kind, arriving, chunked and ordered at random,
    preempted and taken up again in other slots; tokens and log-probabilities equal those of each alone.
    """
    requests = mixed_requests(number)
    rng = random.Random(100 + number)
    runner = make_runner(InjectedModel(V), max_num_seqs=32)
    said: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
    waiting = list(range(32))
    rng.shuffle(waiting)
    free = list(range(32))
    slot_of: dict[int, int] = {}
    left: dict[int, int] = {}  # unread tokens
    freed: list[int] = []
    while waiting or slot_of:
        entering = []
        for _ in range(min(len(waiting), rng.randint(0, 8))):
            who, slot = waiting.pop(), free.pop(rng.randrange(len(free)))
            prompt, params, more = requests[who]
            entering.append(new_request(slot, prompt, params, output=said[who], **more))
            slot_of[who], left[who] = slot, len(prompt) + len(said[who])
        chosen = [who for who in slot_of if rng.random() < 0.8]
        rng.shuffle(chosen)
        rows = {who: rng.randint(1, left[who]) for who in chosen}
        samples = [who for who in chosen if rows[who] == left[who]]
        step = plan(
            {slot_of[who]: n for who, n in rows.items()},
            [slot_of[who] for who in samples],
            new_requests=entering,
            freed_slots=freed,
        )
        freed = []
        result = run(runner, step)
        for row, who in enumerate(chosen):
            said[who] += result.sampled_token_ids[row]
            left[who] = 1 if who in samples else left[who] - rows[who]
            if row in result.logprobs:
                logprobs[who].append(result.logprobs[row])
            preempted = rng.random() < 0.05
            if len(said[who]) >= NUM_TOKENS or preempted:
                freed.append(slot_of[who])
                free.append(slot_of.pop(who))
                if len(said[who]) < NUM_TOKENS:
                    waiting.append(who)
    for (prompt, params, more), tokens, scores in zip(requests, said, logprobs, strict=True):
        expected, expected_scores = alone(prompt, params, more)
        assert tokens == expected
        assert same_logprobs(scores, expected_scores)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_chunks_of_a_prompt_sample_nothing(chunk):
    """Case B058: a part of a prompt uses no noise, counts no token and asks for no logits."""
    for prompt, params, more in mixed_requests(5)[:11]:
        model = InjectedModel(V)
        runner = make_runner(model)
        said, results = generate(runner, new_request(0, prompt, params, **more), NUM_TOKENS, chunk=chunk)
        assert said == alone(prompt, params, more)[0]
        assert [len(r.sampled_token_ids[0]) for r in results[:-NUM_TOKENS]] == [0] * (
            len(results) - NUM_TOKENS
        )
        assert model.asked_rows == [1] * NUM_TOKENS


def test_output_so_far_counts_as_output_when_a_request_enters_again():
    """After preemption, or from the journal: also cases B076 and B107 after preemption."""
    for prompt, params, more in mixed_requests(6):
        whole, _ = alone(prompt, params, more)
        for cut in (1, 3, NUM_TOKENS - 1):
            runner = make_runner(InjectedModel(V))
            entering = new_request(2, prompt, params, output=whole[:cut], **more)
            assert generate(runner, entering, NUM_TOKENS - cut, chunk=4)[0] == whole[cut:]


def test_steps_may_be_sent_before_any_result_was_read():
    """Case B115: the next step reads the newest token, and penalties count it, though nobody booked it."""
    params = SamplingParams(**GREEDY, repetition_penalty=5.0, frequency_penalty=2.0)
    more = {"bad_words_token_ids": [[5, 6]], "stop_token_ids": [4]}
    runner = make_runner(InjectedModel(V))
    first = run(runner, plan({0: 3}, new_requests=[new_request(0, [1, 2, 3], params, **more)]))
    unread = [run(runner, plan({0: 1}, step_id=n)) for n in range(1, NUM_TOKENS)]
    said = [token for r in [first, *unread] for token in r.sampled_token_ids[0]]
    assert said == alone([1, 2, 3], params, more)[0]
    assert len(set(said)) == NUM_TOKENS  # so heavy a penalty lets nothing come twice


def test_rows_get_their_own_logprobs():
    """Case B061: a chunk, rows with 2, 5 and no log-probabilities, in every order."""
    wishes = {0: (None, [1] * 9), 1: (2, [2, 3]), 2: (5, [4, 5, 6]), 3: (None, [7])}
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]):
        entering = [
            new_request(slot, prompt, SamplingParams(seed=slot, logprobs=k))
            for slot, (k, prompt) in wishes.items()
        ]
        runner = make_runner(InjectedModel(V))
        rows = {slot: 4 if slot == 0 else len(wishes[slot][1]) for slot in order}
        result = run(runner, plan(rows, [1, 2, 3], new_requests=entering))
        assert set(result.logprobs) == {order.index(1), order.index(2)}
        assert result.sampled_token_ids[order.index(0)] == []
        for slot in (1, 2):
            k, prompt = wishes[slot]
            got = result.logprobs[order.index(slot)]
            said, scores = alone(prompt, SamplingParams(seed=slot, logprobs=k), {}, 1)
            assert result.sampled_token_ids[order.index(slot)] == said
            assert got.token_ids.shape == (1, 1 + k)
            assert same_logprobs([got], scores)


# ---------------------------------------------------------------------------------------------------------
# prompt log-probabilities
# ---------------------------------------------------------------------------------------------------------


def prompt_logprobs(prompt, k, chunk, output=()) -> TokenLogprobs:
    runner = make_runner(InjectedModel(V))
    new = new_request(0, prompt, SamplingParams(**GREEDY, prompt_logprobs=k), output=output)
    _, results = generate(runner, new, 2, chunk=chunk)
    told = [r for r in results if r.prompt_logprobs]
    assert len(told) == 1
    index = results.index(told[0])
    assert min(len(prompt), (index + 1) * chunk) == len(prompt)  # not before the prompt's end
    assert index * chunk < len(prompt)  # and not after
    return told[0].prompt_logprobs[0]


@pytest.mark.parametrize("chunk", [1, 3, 16, 69, 70, 1000])
@pytest.mark.parametrize("k", [0, 3, -1])
def test_prompt_logprobs_over_any_chunks_equal_the_whole(k, chunk):
    prompt = np.random.default_rng(1).integers(0, V, 70).tolist()
    got = prompt_logprobs(prompt, k, chunk)
    width = 1 + (V if k == -1 else k)
    assert got.token_ids.shape == got.logprobs.shape == (69, width)
    assert got.token_ids[:, 0].tolist() == prompt[1:]
    for j in range(69):
        logits = random_logits(prompt[j], j, V).astype(np.float64)
        own = logits[prompt[j + 1]]
        assert got.logprobs[j, 0] == pytest.approx(own - math.log(np.exp(logits).sum()), abs=1e-5)
        assert got.ranks[j] == (logits >= own).sum()
        assert got.token_ids[j, 1:].tolist() == np.argsort(-logits, kind="stable")[: width - 1].tolist()


def test_prompt_logprobs_of_one_token_and_before_a_journal():
    alone_token = prompt_logprobs([5], 2, 100)
    assert alone_token.token_ids.shape == alone_token.logprobs.shape == (0, 3)
    assert alone_token.ranks.shape == (0,)
    prompt = [5, 6, 7, 8]
    for chunk in (1, 3, 100):
        with_journal = prompt_logprobs(prompt, 2, chunk, output=[9, 10, 11])
        assert same_logprobs([with_journal], [prompt_logprobs(prompt, 2, 100)])


def test_prompt_logits_exist_a_few_rows_at_a_time(monkeypatch):
    model = InjectedModel(V)
    runner = make_runner(model)
    params = SamplingParams(**GREEDY, prompt_logprobs=1)
    run(runner, plan({0: 150}, new_requests=[new_request(0, [1] * 150, params)]))
    assert model.asked_rows == [64, 64, 21, 1]
    monkeypatch.setattr(model_runner, "LOGITS_BYTES", 4 * V * 3)
    model.asked_rows.clear()
    run(runner, plan(dict.fromkeys(range(1, 8), 1), new_requests=[new_request(s, [s]) for s in range(1, 8)]))
    assert model.asked_rows == [3, 3, 1]


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(4)), st.integers(1, 9), st.booleans())
def test_prompt_logprobs_do_not_depend_on_neighbours_or_order(order, chunk, reuse):
    """Case B092: four overlapping prompts, any order, in slots that others used before: the same bits."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8][: 5 + i] for i in range(4)]
    params = SamplingParams(**GREEDY, prompt_logprobs=2)
    runner = make_runner(InjectedModel(V))
    if reuse:
        generate(runner, new_request(0, [9] * 40, params), 1, chunk=7)
        run(runner, plan({1: 3}, [], new_requests=[new_request(1, [9] * 40, params)]))
        run(runner, plan({}, freed_slots=[1]))
    got: dict[int, TokenLogprobs] = {}
    entering = [new_request(slot, prompts[who], params) for slot, who in enumerate(order)]
    left = {slot: len(prompts[who]) for slot, who in enumerate(order)}
    while left:
        rows = {slot: min(chunk, n) for slot, n in left.items()}
        done = [slot for slot in rows if rows[slot] == left[slot]]
        result = run(runner, plan(rows, done, new_requests=entering))
        entering = []
        for row, slot in enumerate(rows):
            if row in result.prompt_logprobs:
                got[order[slot]] = result.prompt_logprobs[row]
        left = {slot: n - rows[slot] for slot, n in left.items() if n > rows[slot]}
    for who, prompt in enumerate(prompts):
        assert same_logprobs([got[who]], [prompt_logprobs(prompt, 2, 100)])


def test_prompt_logprobs_with_a_computed_beginning_are_refused_not_invented():
    """Case B092: positions that nobody computed have no numbers."""
    params = SamplingParams(**GREEDY, prompt_logprobs=1)
    runner = make_runner(InjectedModel(V))
    entering = [new_request(0, [1, 2, 3, 4, 5], params, computed=4), new_request(1, [1, 2])]
    result = run(runner, plan({0: 1, 1: 2}, new_requests=entering))
    assert "skip_reading_prefix_cache" in result.errors[0]
    assert result.sampled_token_ids[0] == []
    assert len(result.sampled_token_ids[1]) == 1
    assert not result.prompt_logprobs


# ---------------------------------------------------------------------------------------------------------
# grammar masks and errors
# ---------------------------------------------------------------------------------------------------------


def test_masks_go_to_their_rows():
    runner = make_runner(InjectedModel(V))
    entering = [new_request(slot, [slot + 1], SamplingParams(seed=1, logprobs=1)) for slot in range(4)]
    mask = GrammarOutput([3, 1], np.concatenate([bitmask([7], V), bitmask([8], V)]))
    result = run(runner, plan(dict.fromkeys(range(4), 1), new_requests=entering, grammar_rows=[1, 3]), mask)
    assert result.sampled_token_ids[3] == [7]
    assert result.sampled_token_ids[1] == [8]
    assert result.logprobs[1].logprobs[0, 0] == 0.0
    for slot in (0, 2):
        assert result.sampled_token_ids[slot] == alone([slot + 1], SamplingParams(seed=1), {}, 1)[0]


def test_a_missing_mask_is_our_mistake():
    runner = make_runner(InjectedModel(V))
    step = plan({0: 1}, new_requests=[new_request(0, [1])], grammar_rows=[0])
    with pytest.raises(AssertionError, match="needs a mask"):
        run(runner, step)


def test_a_row_without_an_allowed_token_ends_alone():
    """Case B109: it says why; its neighbours say what they would have said; so do later steps."""
    bad = SamplingParams(**GREEDY, allowed_token_ids=[5])
    runner = make_runner(InjectedModel(V))
    entering = [new_request(0, [1]), new_request(1, [2], bad, bad_words_token_ids=[[5]]), new_request(2, [3])]
    results = [run(runner, plan({0: 1, 1: 1, 2: 1}, new_requests=entering))]
    results += [run(runner, plan({2: 1, 1: 1, 0: 1})) for _ in range(2)]  # planned before the error was known
    for result in results:
        assert list(result.errors) == [1]
        assert "no token is allowed" in result.errors[1]
        assert result.sampled_token_ids[1] == []
    for slot, column in ((0, [0, 2, 2]), (2, [2, 0, 0])):
        said = [r.sampled_token_ids[c][0] for r, c in zip(results, column, strict=True)]
        assert said == alone([slot + 1], SamplingParams(**GREEDY), {}, 3)[0]
    generate(runner, new_request(1, [4]), 2)  # the slot is as good as new


def test_logits_that_are_not_numbers_end_their_request_alone():
    def logits(token: int, position: int) -> np.ndarray:
        row = random_logits(token, position, V)
        if token == 66:
            row[9] = np.nan
        return row

    params = SamplingParams(**GREEDY, prompt_logprobs=1)
    runner = make_runner(InjectedModel(V, logits))
    entering = [
        new_request(0, [1, 66], SamplingParams(seed=1)),
        new_request(1, [66, 1, 2], params),
        new_request(2, [3]),
    ]
    result = run(runner, plan({0: 2, 1: 2, 2: 1}, [0, 2], new_requests=entering))
    assert sorted(result.errors) == [0, 1]
    assert all("logits are not finite" in error for error in result.errors.values())
    assert result.sampled_token_ids[2] == alone([3], SamplingParams(**GREEDY), {}, 1)[0]
    later = run(runner, plan({1: 1}))
    assert list(later.errors) == [0]
    assert later.sampled_token_ids == [[]]


# ---------------------------------------------------------------------------------------------------------
# the two phases, and what a plan may carry
# ---------------------------------------------------------------------------------------------------------


def test_two_forwards_in_a_row_are_our_mistake():
    runner = make_runner(InjectedModel(V))
    assert runner.execute_model(plan({0: 1}, new_requests=[new_request(0, [1])])) is None
    with pytest.raises(AssertionError, match="before the sampling"):
        runner.execute_model(plan({0: 1}))
    runner.sample_tokens(None)
    with pytest.raises(AssertionError, match="no step to sample"):
        runner.sample_tokens(None)


def test_a_plan_without_sampling_rows_has_its_result_at_once():
    runner = make_runner(InjectedModel(V))
    result = runner.execute_model(plan({0: 1}, [], new_requests=[new_request(0, [1, 2])]))
    assert result == ModelRunnerOutput([[]])
    assert runner.execute_model(plan({}, freed_slots=[0])) == ModelRunnerOutput([])


def test_parked_hidden_states_are_a_copy():
    """A model's hidden states live until its next pass, and the head is one."""
    hidden = np.array([[1.0, 0.0]], dtype=np.float32)
    model = InjectedModel(V)
    model.forward = lambda batch: hidden
    runner = make_runner(model)
    runner.execute_model(plan({0: 1}, new_requests=[new_request(0, [1])]))
    hidden[:] = 7.0
    assert runner.sample_tokens(None).sampled_token_ids == [[int(random_logits(1, 0, V).argmax())]]


def test_kv_transfers_need_a_connector():
    with pytest.raises(EngineError, match="no KV connector is configured"):
        make_runner(InjectedModel(V)).execute_model(plan({}, kv_transfer=b"x"))


def test_blocks_are_cleared_and_copied_before_the_pass():
    model = InjectedModel(V)
    runner = make_runner(model)
    with pytest.raises(EngineError, match="zero_blocks, which InjectedModel does not have"):
        runner.execute_model(plan({}, blocks_to_zero=[3]))
    seen: list = []
    model.zero_blocks = lambda ids: seen.append(("zero", ids, len(model.batches)))
    model.copy_blocks = lambda pairs: seen.append(("copy", pairs, len(model.batches)))
    more = {"blocks_to_zero": [3], "blocks_to_copy": [BlockCopy(1, 2)]}
    run(runner, plan({0: 1}, new_requests=[new_request(0, [1])], **more))
    assert seen == [("zero", [3], 0), ("copy", [BlockCopy(1, 2)], 0)]
