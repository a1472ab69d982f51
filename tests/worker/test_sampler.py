"""Each stage of the sampler against a slow float64 oracle; masks that leave nothing; the noise itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from worker_fakes import bitmask, random_logits, state

from mainspring.base.params import SamplingParams
from mainspring.worker.sampling_rules import (
    LOGPROB_FLOOR,
    SamplingError,
    best_ids,
    bits_below,
    gumbel,
    gumbel_argmax,
    kth_largest,
    mix,
    noise_bits,
    nucleus,
    row_logprobs,
    sample_row,
    surviving_ids,
)
from mainspring.worker.sampling_state import TokenCounts

V = 40
EOS = 39
GREEDY = {"temperature": 0.0}


def pick(logits, params, mask=None, **more) -> int:
    row = np.array(logits, dtype=np.float32)
    before = row.copy()
    token = sample_row(row, state(len(row), params, **more), None if mask is None else mask[0]).token_id
    np.testing.assert_array_equal(row, before)  # logits are the model's: never written
    return token


# ---------------------------------------------------------------------------------------------------------
# the oracle: one stage after another, plain Python, float64
# ---------------------------------------------------------------------------------------------------------


def noise_of(seed: int, position: int, token: int) -> float:
    """The formula of the module's docstring, in Python integers."""
    word = 0xFFFFFFFF
    key = mix(mix(seed + 0x9E3779B97F4A7C15) + position)
    x = (token * 0x9E3779B1 + (key & word)) & word
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & word
    x ^= x >> 13
    x = (x + (key >> 32)) & word
    x = (x * 0xC2B2AE35) & word
    x ^= x >> 16
    x = (x * 0x846CA68B) & word
    x ^= x >> 15
    return -math.log(-math.log((x + 0.5) / 2**32))


def oracle_edit(logits, params, prompt, output, stop_ids, bad_words, allowed_by_grammar=None):
    row = [float(x) for x in logits]
    if allowed_by_grammar is not None:
        row = [x if t in allowed_by_grammar else -math.inf for t, x in enumerate(row)]
    if params.allowed_token_ids is not None:
        row = [x if t in params.allowed_token_ids else -math.inf for t, x in enumerate(row)]
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    if len(output) < params.min_tokens:
        masked = [-math.inf if t in stop_ids else x for t, x in enumerate(row)]
        if allowed_by_grammar is None or any(x > -math.inf for x in masked):
            row = masked
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty
            if row[token] > 0
            else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for word in bad_words:
        head = word[:-1]
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            row[word[-1]] = -math.inf
    return row


def oracle_survivors(row, params):
    """After temperature: each filter on what the one before left."""
    kept = {t: x / params.temperature for t, x in enumerate(row) if x > -math.inf}
    if params.min_p > 0:
        line = max(kept.values()) + math.log(params.min_p)
        kept = {t: x for t, x in kept.items() if x >= line}
    if params.top_k:
        line = sorted(kept.values(), reverse=True)[: params.top_k][-1]
        kept = {t: x for t, x in kept.items() if x >= line}
    if params.top_p < 1:
        best = max(kept.values())
        weight = {t: math.exp(x - best) for t, x in kept.items()}
        total = sum(weight.values())
        mass, inside = 0.0, {}
        for token in sorted(kept, key=lambda t: (-kept[t], t)):
            if mass < params.top_p * total or not inside:
                inside[token] = kept[token]
            mass += weight[token]
        kept = inside
    return kept


def close_call(row, params) -> bool:
    """Whether float32 and float64 may disagree about who survives."""
    kept = {t: x / params.temperature for t, x in enumerate(row) if x > -math.inf}
    best = max(kept.values())
    if params.min_p > 0 and any(abs(x - best - math.log(params.min_p)) < 1e-4 for x in kept.values()):
        return True
    ordered = sorted(kept.values(), reverse=True)
    if params.top_k and any(
        0 < abs(x - ordered[min(params.top_k, len(ordered)) - 1]) < 1e-4 for x in ordered
    ):
        return True
    weights = [math.exp(x - best) for x in ordered]
    for survivors in {
        len(
            oracle_survivors(
                row,
                SamplingParams(
                    top_k=params.top_k, min_p=params.min_p, seed=0, temperature=params.temperature
                ),
            )
        ),
        len(ordered),
    }:
        mass = np.cumsum(weights[:survivors]) / sum(weights[:survivors])
        if (abs(mass - params.top_p) < 1e-5).any():
            return True
    return False


token_lists = st.lists(st.integers(0, V - 1), max_size=12)
penalties = st.sampled_from([0.0, 0.5, -1.0, 2.0])


@st.composite
def wishes(draw):
    greedy = draw(st.booleans())
    bias = draw(
        st.none()
        | st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -2.0, 1.5, 100.0]), max_size=4)
    )
    allowed = draw(st.none() | st.lists(st.integers(0, V - 1), min_size=1, max_size=20))
    return SamplingParams(
        temperature=0.0 if greedy else draw(st.sampled_from([0.01, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, V, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 2.0, 0.5])),
        frequency_penalty=draw(penalties),
        presence_penalty=draw(penalties),
        min_tokens=draw(st.integers(0, 6)),
        logit_bias=bias,
        allowed_token_ids=allowed,
    )


@settings(max_examples=400, deadline=None)
@given(
    wishes(),
    st.integers(0, 10**6),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=12),
    token_lists,
    st.lists(st.integers(0, V - 1), max_size=3),
    st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), max_size=3),
    st.none() | st.sets(st.integers(0, V - 1), min_size=1, max_size=15),
)
def test_any_mix_of_parameters_equals_the_oracle(params, number, prompt, output, stops, bad_words, grammar):
    """Also case B116: the order of the filters, and that they never leave nothing."""
    logits = random_logits(number, 0, V)
    row = oracle_edit(logits, params, prompt, output, stops, bad_words, grammar)
    mask = None if grammar is None else bitmask(grammar, V)
    more = {"prompt": prompt, "output": output, "stop_token_ids": stops, "bad_words_token_ids": bad_words}
    if max(row) == -math.inf:
        with pytest.raises(SamplingError, match="no token is allowed"):
            pick(logits, params, mask, **more)
        return
    if params.temperature == 0:
        ordered = sorted(row, reverse=True)
        assume(ordered[0] - ordered[1] > 1e-4 or ordered[0] == ordered[1])
        assert pick(logits, params, mask, **more) == row.index(ordered[0])
        return
    assume(not close_call(row, params))
    position = len(prompt) + len(output)
    scores = {t: x + noise_of(params.seed, position, t) for t, x in oracle_survivors(row, params).items()}
    ordered = sorted(scores.values(), reverse=True)
    assume(len(ordered) == 1 or ordered[0] - ordered[1] > 1e-4)
    assert pick(logits, params, mask, **more) == max(scores, key=lambda t: scores[t])


# ---------------------------------------------------------------------------------------------------------
# stages, one by one
# ---------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals():
    assert pick([1.0, 3.0, 3.0, 0.0], SamplingParams(**GREEDY)) == 1


def test_grammar_mask_comes_before_everything_and_ids_beyond_it_are_not_allowed():
    logits = [0.0] * 70
    logits[69] = 9.0
    mask = bitmask([3, 65], 70)
    assert pick(logits, SamplingParams(**GREEDY, logit_bias={69: 100.0, 65: 1.0}), mask) == 65
    short = mask[:, :1]  # 32 ids
    assert pick(logits, SamplingParams(**GREEDY, logit_bias={65: 50.0}), short) == 3


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("params", [{}, {"seed": 5, "temperature": 1.0, "top_k": 2}])
def test_min_tokens_forbids_the_end_exactly_so_long(min_tokens, params):
    """Case B076: with EOS always the best, min_tokens others come first; the prompt does not count."""
    wish = SamplingParams(**{**GREEDY, **params}, min_tokens=min_tokens, logit_bias={EOS: 100.0, 7: -1.0})
    live = state(V, wish, prompt=[EOS, 1, 2], stop_token_ids=[EOS, 7])
    said = []
    while not said or said[-1] not in (EOS, 7):
        said.append(sample_row(random_logits(len(said), 1, V), live).token_id)
        live.append(said[-1])
    assert said[-1] == EOS
    assert len(said) == min_tokens + 1


def test_min_tokens_yields_to_a_grammar_at_its_end():
    wish = SamplingParams(**GREEDY, min_tokens=5)
    assert pick([0.0] * V, wish, bitmask([EOS], V), stop_token_ids=[EOS]) == EOS
    assert pick([0.0] * V, wish, bitmask([EOS, 4], V), stop_token_ids=[EOS]) == 4


def test_min_tokens_without_an_end_token_forbids_nothing():
    """Case B076, sibling: with ignore_eos there is no EOS, and the last entry is not masked in its place."""
    assert pick([0.0] * (V - 1) + [1.0], SamplingParams(**GREEDY, min_tokens=5), stop_token_ids=[]) == V - 1
    assert pick([0.0] * (V - 1) + [1.0], SamplingParams(**GREEDY, min_tokens=5), stop_token_ids=[-1]) == V - 1


def test_frequency_and_presence_see_only_output():
    logits = [0.0, 0.1, 0.0, 0.0]
    wish = SamplingParams(**GREEDY, presence_penalty=1.0, frequency_penalty=1.0)
    assert pick(logits, wish, prompt=[1, 1, 1]) == 1
    assert pick(logits, wish, prompt=[3], output=[1]) == 0
    assert pick([5.0, 7.4, 5.0, 5.0], wish, prompt=[3], output=[1, 1]) == 0  # 7.4 - 2 - 1 < 5: per occurrence


def test_repetition_sees_prompt_and_output_and_pushes_negative_logits_down():
    wish = SamplingParams(**GREEDY, repetition_penalty=2.0)
    assert pick([3.0, 2.0, 0.0], wish, prompt=[0]) == 1
    assert pick([-1.0, -1.5, -5.0], wish, prompt=[2], output=[0]) == 1


def test_counts_grow_as_tokens_are_sampled():
    """Case B115: the newest token is always counted, and counting as we go equals counting again."""
    rng = np.random.default_rng(0)
    prompt, output = [5, 5, 8], rng.integers(0, 60, 200).tolist()
    growing = TokenCounts(prompt, [])
    for n, token in enumerate(output):
        growing.add(token)
        if n % 20 == 0 or n == 199:
            again = TokenCounts(prompt, output[: n + 1])
            assert dict(zip(growing.ids.tolist(), growing.counts.tolist(), strict=True)) == dict(
                zip(again.ids.tolist(), again.counts.tolist(), strict=True)
            )


def test_counts_grow_from_nothing():
    counts = TokenCounts([], [])
    for token in [9, 9, 0]:
        counts.add(token)
    assert counts.ids.tolist() == [9, 0]
    assert counts.counts.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], [1]), ([2], [1, 3]), ([4], [1]), ([4, 5], [1, 6]), ([2, 4, 5], [1, 6]), ([5, 4], [1])],
)
def test_bad_words_ban_only_the_last_token_of_a_word_begun_in_the_output(output, banned):
    """Case B107: every tokenisation is an entry; what the prompt ends with never begins a word."""
    words = [[1], [2, 3], [4, 5, 6]]
    for token in range(8):
        logits = [0.0] * 8
        logits[token] = 9.0
        prompt = [4, 5]  # would complete 4 5 6 if it counted
        chosen = pick(
            logits, SamplingParams(**GREEDY), prompt=prompt, output=output, bad_words_token_ids=words
        )
        assert (chosen != token) == (token in banned)


@pytest.mark.parametrize(
    ("wish", "more"),
    [
        ({"allowed_token_ids": [4]}, {"bad_words_token_ids": [[4]]}),
        ({"allowed_token_ids": [4]}, {"mask": bitmask([5], V)}),
        ({"allowed_token_ids": [EOS], "min_tokens": 5}, {"stop_token_ids": [EOS]}),
        ({}, {"mask": bitmask([], V)}),
    ],
)
@pytest.mark.parametrize("params", [GREEDY, {"seed": 3}, {"seed": 3, "top_k": 1}, {"seed": 3, "top_p": 0.5}])
def test_masks_that_leave_nothing_are_an_error(wish, more, params):
    """Case B109: never an id outside the allowed ones."""
    with pytest.raises(SamplingError, match="no token is allowed"):
        pick([0.0] * V, SamplingParams(**params, **wish), **more)


def test_a_bias_against_all_allowed_tokens_still_chooses_among_them():
    """Case B109: -100 is a wish, not a mask."""
    wish = SamplingParams(seed=1, allowed_token_ids=[4, 5], logit_bias={4: -100.0, 5: -100.0})
    assert pick([0.0] * V, wish) in (4, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("wish", [GREEDY, {"seed": 1}, {"seed": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_logits_that_are_not_numbers_are_an_error(bad, wish):
    logits = [0.0] * V
    logits[7] = bad
    with pytest.raises(SamplingError, match="logits are not finite"):
        pick(logits, SamplingParams(**wish))
    with pytest.raises(SamplingError, match="logits are not finite"):
        row_logprobs(np.array(logits, dtype=np.float32), 0, 1)


def test_overflow_in_the_stages_is_an_error_too():
    with pytest.raises(SamplingError, match="logits are not finite"):
        pick([1e38, 0.0], SamplingParams(seed=1, temperature=0.01))
    with pytest.raises(SamplingError, match="penalty or bias makes a logit infinite"):
        pick([1e38, 0.0], SamplingParams(**GREEDY, repetition_penalty=1e-3), prompt=[0])


def test_ids_that_do_not_exist_are_dropped():
    """Case B104, inside the core: an index out of range would end the engine for everybody."""
    wish = SamplingParams(
        **GREEDY,
        allowed_token_ids=[3, V, 10**9],
        logit_bias={V: 5.0, 3: 1.0},
        min_tokens=3,
        repetition_penalty=2.0,
    )
    more = {
        "prompt": [V + 5, 2],
        "output": [V],
        "stop_token_ids": [V, -1],
        "bad_words_token_ids": [[V], [], [V, 2]],
    }
    assert pick([0.0] * V, wish, **more) == 3


def test_rows_of_the_head_beyond_the_tokenizer_are_ordinary_tokens():
    """Case B106: the worker's vocabulary is the model's; such an id can be sampled, counted and reported."""
    wish = SamplingParams(**GREEDY, logit_bias={V - 1: 100.0}, frequency_penalty=1.0, logprobs=1)
    live = state(V, wish)
    for _ in range(3):
        sampled = sample_row(np.zeros(V, dtype=np.float32), live)
        assert sampled.token_id == V - 1
        assert sampled.logprobs.token_ids[0, 0] == V - 1
        live.append(sampled.token_id)


# ---------------------------------------------------------------------------------------------------------
# filters
# ---------------------------------------------------------------------------------------------------------

TENTHS = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [2, 3]),
        ({"top_p": 0.5}, [2, 3]),  # 0.4 is not enough: the crossing token stays
        ({"top_k": 2, "top_p": 0.5}, [3]),  # of two, 0.4 / 0.7 is enough
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"top_p": 0.85}, [1, 2, 3]),
        ({"top_p": 1e-9}, [3]),
        ({"top_k": 1}, [3]),
        ({"min_p": 1.0}, [3]),
        ({"min_p": 0.6}, [2, 3]),
        ({"min_p": 0.4, "top_k": 3, "top_p": 0.7}, [2, 3]),  # of 0.2 0.3 0.4 in 0.9, 0.4 / 0.9 is not enough
    ],
)
def test_filters_keep_what_they_should(filters, kept):
    """Case B116: k, then p on the renormalised rest; the boundary is inclusive."""
    wish = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    assert surviving_ids(TENTHS, float(TENTHS.max()), **wish).tolist() == kept


def test_ties_at_top_k_all_stay_and_at_top_p_the_lower_ids_do():
    """Case B116, ties: stated in the docstrings."""
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0], dtype=np.float32)
    assert surviving_ids(logits, 2.0, 1, 1.0, 0.0).tolist() == [1, 2, 3]
    assert surviving_ids(np.zeros(8, dtype=np.float32), 0.0, 0, 0.5, 0.0).tolist() == [0, 1, 2, 3]
    assert surviving_ids(np.zeros(5000, dtype=np.float32), 0.0, 0, 0.5, 0.0).tolist() == list(range(2500))


def test_filters_agree_with_the_oracle_on_wide_rows():
    rng = np.random.default_rng(3)
    for scale in (0.0, 1e-20, 0.01, 1.0, 5.0, 50.0):
        logits = (rng.standard_normal(3001) * scale).astype(np.float32)
        logits[rng.integers(0, 3001, 40)] = -np.inf
        largest = float(logits.max())
        for k in (1, 7, 20, 24, 100, 2900):
            assert kth_largest(logits, k) == np.sort(logits)[-k]
        for top_p in (0.1, 0.5, 0.9, 0.999):
            wish = SamplingParams(top_p=top_p, seed=0)
            if not close_call(logits.tolist(), wish):
                assert nucleus(logits, largest, top_p).tolist() == sorted(
                    oracle_survivors(logits.tolist(), wish)
                )


def test_filtered_draws_have_the_renormalised_probabilities():
    """Case B116: 20,000 draws from .1 .2 .3 .4 with top_k=3; chi-square, 2 degrees of freedom."""
    wish = SamplingParams(seed=0, top_k=3)
    live = state(4, wish)
    counts = np.zeros(4)
    for seed in range(20_000):
        live.seed = seed
        counts[sample_row(TENTHS, live).token_id] += 1
    assert counts[0] == 0
    assert chi_square(counts[1:], np.array([2, 3, 4]) / 9) < 13.8  # 1 in 1,000


# ---------------------------------------------------------------------------------------------------------
# the noise
# ---------------------------------------------------------------------------------------------------------


def chi_square(counts, probabilities) -> float:
    expected = counts.sum() * np.asarray(probabilities)
    return float(((counts - expected) ** 2 / expected).sum())


def winners(logits, seeds, positions):
    return np.bincount(
        [gumbel_argmax(logits, None, s, p) for s in seeds for p in positions], minlength=len(logits)
    )


@pytest.mark.parametrize(
    ("seeds", "positions"), [(range(1), range(20_000)), (range(20_000), [17]), (range(-100, 100), range(100))]
)
def test_draws_follow_the_distribution(seeds, positions):
    """Over positions of one seed, seeds at one position, and both; 6 degrees of freedom."""
    p = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    assert chi_square(winners(np.log(p).astype(np.float32), seeds, positions), p) < 22.5  # 1 in 1,000


def test_draws_from_a_wide_row_follow_the_distribution():
    """With more tokens than are tried one by one, so that the search for rivals is in the way."""
    probabilities = np.repeat([0.5 / 1000, 0.3 / 2000, 0.2 / 5000], [1000, 2000, 5000])
    logits = np.log(probabilities).astype(np.float32)
    counts = winners(logits, range(3), range(1500))
    assert chi_square(np.add.reduceat(counts, [0, 1000, 3000]), [0.5, 0.3, 0.2]) < 13.8
    assert chi_square(np.add.reduceat(counts[3000:], range(0, 5000, 500)), [0.1] * 10) < 27.9  # 9 degrees


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.01, 1.0, 3.0, 12.0, 1000.0]),
    st.sampled_from([0, 3, 1990]),
)
def test_leaving_out_who_cannot_win_changes_nothing(seed, position, scale, num_masked):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(2000) * scale).astype(np.float32)
    logits[rng.permutation(2000)[:num_masked]] = -np.inf
    ids = np.arange(2000) * 7
    multiples = ids.astype(np.uint32) * np.uint32(0x9E3779B1)
    scores = logits + gumbel(noise_bits(multiples, seed, position))
    assert gumbel_argmax(logits, ids, seed, position) == scores.argmax()


def test_a_subset_draws_the_winner_of_the_whole_where_it_holds_it():
    """Noise is by token id, not by place: filters do not move it."""
    logits = random_logits(1, 1, 1000)
    for position in range(20):
        winner = gumbel_argmax(logits, None, 9, position)
        ids = np.unique(np.append(np.arange(0, 1000, 3), winner))
        assert ids[gumbel_argmax(logits[ids], ids, 9, position)] == winner


def test_noise_is_the_documented_formula_and_does_not_change():
    """A journal written by one version is continued by the next: these numbers are a promise."""
    ids = np.array([0, 1, 2, 49151], dtype=np.uint32)
    multiples = ids * np.uint32(0x9E3779B1)
    for seed, position in [(0, 0), (1, 0), (-1, 5), (2**63 - 1, 10**6)]:
        expected = [noise_of(seed, position, int(t)) for t in ids]
        np.testing.assert_allclose(gumbel(noise_bits(multiples, seed, position)), expected, rtol=1e-12)
    assert noise_bits(multiples, 42, 7).tolist() == PINNED_BITS


PINNED_BITS = [88597975, 35384447, 3083782449, 2092870646]


def test_neighbouring_noises_are_independent():
    """Pairs of nibbles of neighbours in token, position and seed: 16 x 16 cells, 255 degrees."""
    num_tokens = 20_000
    multiples = np.arange(num_tokens, dtype=np.uint32) * np.uint32(0x9E3779B1)
    here = noise_bits(multiples, 5, 100)
    neighbours = {
        "token": np.roll(here, 1),
        "position": noise_bits(multiples, 5, 101),
        "seed": noise_bits(multiples, 6, 100),
        "far bit of seed": noise_bits(multiples, 5 + 2**62, 100),
        "seed for position": noise_bits(multiples, 6, 99),
    }
    for name, there in neighbours.items():
        for shift in (0, 12, 28):
            cells = (here >> np.uint32(shift) & np.uint32(15)) * np.uint32(16) + (there >> np.uint32(28))
            statistic = chi_square(np.bincount(cells, minlength=256), np.full(256, 1 / 256))
            assert statistic < 345, (name, shift, statistic)  # 1 in 10,000
    assert len(np.unique(here)) == num_tokens  # a bijection: no ties


@given(st.floats(-4.0, 23.0))
def test_bits_below_is_a_safe_bound(noise):
    bits = np.array([bits_below(noise)], dtype=np.uint32)
    assert bits[0] == 0 or gumbel(bits)[0] < noise


def test_seeds_are_any_integers_of_64_bits():
    logits = np.zeros(50, dtype=np.float32)
    said = {pick(logits, SamplingParams(seed=s)) for s in (-(2**63), -2, 0, 1, 2**32, 2**63 - 1)}
    assert len(said) > 1


# ---------------------------------------------------------------------------------------------------------
# log-probabilities
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5, V, 1000, -1])
def test_logprobs_are_those_of_the_raw_row(k):
    """Case B094: taken before masks, bias and penalties."""
    logits = random_logits(3, 3, V)
    wish = SamplingParams(**GREEDY, logprobs=k, logit_bias={9: 100.0}, repetition_penalty=3.0, bad_words=None)
    token, got = sample_row(logits, state(V, wish, prompt=[3, 4]))
    assert token == 9
    exact = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    best = sorted(range(V), key=lambda t: (-logits[t], t))[: V if k == -1 else k]
    assert got.token_ids.tolist() == [[9, *best]]
    np.testing.assert_allclose(got.logprobs[0], exact[[9, *best]], atol=1e-5)
    assert got.ranks.tolist() == [sum(x >= logits[9] for x in logits)]
    assert (got.token_ids.dtype, got.logprobs.dtype, got.ranks.dtype) == (np.int32, np.float32, np.int32)


def test_logprobs_are_after_the_grammar_and_finite():
    """Case B094: what a mask forbids has a finite floor."""
    wish = SamplingParams(temperature=1.0, seed=1, top_k=1, logprobs=5)
    live = state(V, wish)
    _, got = sample_row(random_logits(3, 3, V), live, bitmask([4, 5], V)[0])
    assert set(got.token_ids[0, 1:3]) == {4, 5}
    np.testing.assert_allclose(np.exp(got.logprobs[0, 1:3]).sum(), 1.0, rtol=1e-5)
    assert (got.logprobs[0, 3:] == LOGPROB_FLOOR).all()
    assert np.isfinite(got.logprobs).all()


def test_ties_are_listed_by_id():
    logits = np.array([0.0, 1.0, 1.0, 2.0, 1.0] + [-1.0] * 200, dtype=np.float32)
    assert best_ids(logits, 3).tolist() == [3, 1, 2]
    got = row_logprobs(logits, 2, 2)
    assert got.token_ids.tolist() == [[2, 3, 1]]
    assert got.ranks.tolist() == [4]  # at least as large: 1 (2.0) and three of 1.0
