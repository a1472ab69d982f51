"""A step's rows are parted: what the head decides itself, what is sampled from logits, by whom."""

from __future__ import annotations

import numpy as np
import pytest
from worker_fakes import InjectedModel, bitmask, make_runner, new_request, plan, random_logits, run

from mainspring.base.messages import GrammarOutput, ModelRunnerOutput
from mainspring.base.params import SamplingParams
from mainspring.worker.sampling_rules import masked

try:
    import mainspring_native as native
except ImportError:
    native = None

V = 70
EOS = 69
GREEDY = SamplingParams(temperature=0.0)


class ModelWithHead(InjectedModel):
    """Its head finds the largest logits; the rows that were asked of it are on record."""

    def __init__(self, logits=None) -> None:
        super().__init__(V, logits)
        self.masks_of_head: list[list] = []

    def greedy(self, hidden, masks):
        rows = [self._logits(int(token), int(position)) for token, position in hidden]
        if masks:
            rows = [r if m is None else masked(r, m) for r, m in zip(rows, masks, strict=True)]
        self.masks_of_head.append(masks or [None] * len(rows))
        ids = np.array([row.argmax() for row in rows], dtype=np.int32)
        return ids, np.array([row.max() for row in rows], dtype=np.float32)


def native_sampler():
    if native is None:
        pytest.skip("the native kernels are not built")
    return native.Sampler(native.Pool(2), native.runnable_variants()[-1], V)


WISHES: list[dict] = [
    {},
    {"min_tokens": 2},
    {"logprobs": 3},
    {"frequency_penalty": 1.5},
    {"logit_bias": {5: 3.0}},
    {"allowed_token_ids": [1, 2, 3]},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "logprobs": 0},
    {"temperature": 2.0, "seed": 3, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "min_tokens": 4},
]


def lives(model: InjectedModel, num_steps: int = 6) -> list[ModelRunnerOutput]:
    """All wishes at once, the even ones without a grammar, the odd ones under one; slots change places."""
    runner = make_runner(model, max_num_seqs=16)
    entering = [
        new_request(
            slot, [slot + 1, 7], SamplingParams(**{"temperature": 0.0, **wish}), stop_token_ids=[EOS, 11],
            bad_words_token_ids=[[3, 4]] if slot == 2 else [],
        )
        for slot, wish in enumerate(WISHES)
    ]  # fmt: skip
    results, rng = [], np.random.default_rng(0)
    for _ in range(num_steps):
        order = rng.permutation(len(WISHES)).tolist()
        grammar_rows = [row for row, slot in enumerate(order) if slot % 2]
        allowed = rng.random(V) < 0.8
        allowed[:4] = True
        mask = GrammarOutput(
            grammar_rows, np.repeat(bitmask(np.flatnonzero(allowed), V), len(grammar_rows), 0)
        )
        step = plan(
            {slot: 2 if entering else 1 for slot in order}, new_requests=entering, grammar_rows=grammar_rows
        )
        results.append(run(runner, step, mask))
        entering = []
    runner.batch.check()
    return results


@pytest.mark.parametrize("with_native", [False, True])
def test_every_class_says_what_the_rules_say(with_native):
    model = ModelWithHead()
    if with_native:
        model.sampler = native_sampler()
    for ours, theirs in zip(lives(model), lives(InjectedModel(V)), strict=True):
        assert ours.sampled_token_ids == theirs.sampled_token_ids
        assert ours.errors == theirs.errors == {}
        assert ours.logprobs.keys() == theirs.logprobs.keys()
        for row, expected in theirs.logprobs.items():
            np.testing.assert_array_equal(ours.logprobs[row].token_ids, expected.token_ids)
            np.testing.assert_array_equal(ours.logprobs[row].ranks, expected.ranks)
            np.testing.assert_allclose(ours.logprobs[row].logprobs, expected.logprobs, rtol=1e-6)


def test_the_head_has_the_greedy_rows_and_nothing_else():
    """Masked ones too; those of min_tokens once it is passed."""
    model = ModelWithHead()
    lives(model, num_steps=4)
    assert model.asked_rows == [9, 9, 8, 8]
    assert [len(masks) for masks in model.masks_of_head] == [1, 1, 2, 2]
    model = ModelWithHead()
    runner = make_runner(model)
    entering = [new_request(slot, [slot + 1], GREEDY) for slot in range(3)]
    step = plan({0: 1, 1: 1, 2: 1}, new_requests=entering, grammar_rows=[1])
    result = run(runner, step, GrammarOutput([1], bitmask([8], V)))
    assert result.sampled_token_ids[1] == [8]
    assert model.asked_rows == []
    assert [mask is not None for mask in model.masks_of_head[0]] == [False, True, False]


@pytest.mark.parametrize("num_words", [1, 3, 4])
@pytest.mark.parametrize("in_head", [True, False])
def test_ids_beyond_a_mask_are_not_allowed(num_words, in_head):
    logits = np.zeros(V, dtype=np.float32)
    logits[EOS] = 9.0
    model = ModelWithHead(lambda token, position: logits)
    mask = np.resize(bitmask([5], V), (1, num_words))
    mask[0, 3:] = -1
    new = new_request(0, [1], GREEDY if in_head else SamplingParams(temperature=0.0, logprobs=0))
    result = run(
        make_runner(model), plan({0: 1}, new_requests=[new], grammar_rows=[0]), GrammarOutput([0], mask)
    )
    assert result.sampled_token_ids == [[5]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
def test_a_row_that_the_head_cannot_decide_ends_alone(bad):
    """Case B109: no id is invented, and its neighbours go on."""

    def logits(token: int, position: int) -> np.ndarray:
        row = random_logits(token, position, V)
        if token == 2 and bad is not None:
            row[3] = bad
        return row

    runner = make_runner(ModelWithHead(logits))
    entering = [new_request(slot, [slot + 1], GREEDY) for slot in range(3)]
    step = plan({0: 1, 1: 1, 2: 1}, new_requests=entering, grammar_rows=[1] if bad is None else [])
    result = run(runner, step, GrammarOutput([1], bitmask([], V)) if bad is None else None)
    assert list(result.errors) == [1]
    assert ("no token is allowed" if bad is None else "logits are not finite") in result.errors[1]
    assert [len(tokens) for tokens in result.sampled_token_ids] == [1, 0, 1]
    again = run(runner, plan({1: 1, 2: 1}))  # planned before the error was known
    assert list(again.errors) == [0]
    assert again.sampled_token_ids[0] == []


def test_logits_come_a_few_rows_at_a_time_and_find_their_masks(monkeypatch):
    from mainspring.worker import model_runner

    monkeypatch.setattr(model_runner, "LOGITS_BYTES", 4 * V * 3)
    model = ModelWithHead()
    ours, theirs = lives(model), lives(InjectedModel(V))
    assert model.asked_rows[:3] == [3, 3, 3]
    assert [r.sampled_token_ids for r in ours] == [r.sampled_token_ids for r in theirs]
