"""Native sampling against the numpy rules, token for token, and against itself in other company.

The two add up a nucleus's probabilities in different orders, of exponentials that may differ in their last
bit. So they may part where a token stands on the line: where the mass down to it is within LINE of top_p.
Such rows are counted, and few. Log-probabilities are x - norm, where norm may be one float apart. All else is
equal.
"""

from __future__ import annotations

import numpy as np
import pytest

from mainspring.base.messages import NewRequestData
from mainspring.base.params import SamplingParams
from mainspring.worker.sampler import NativeSampler, NumpySampler, SampledRows
from mainspring.worker.sampling_rules import SamplingError, masked, row_logprobs
from mainspring.worker.sampling_state import SamplingState

native = pytest.importorskip("mainspring_native", reason="the native kernels are not built")

VARIANTS = native.runnable_variants()
LINE = 1e-6  # of the mass: float32's exponentials are within 1.2e-7 each, and their errors hardly add up
POOL = native.Pool(1)


def sampler(variant: str, vocab_size: int, pool: object = POOL) -> NativeSampler:
    return NativeSampler(native.Sampler(pool, variant, vocab_size))


def state(vocab_size: int, params: SamplingParams, prompt=(), output=(), **more) -> SamplingState:
    tokens = [*(prompt or [0]), *output]
    new = NewRequestData(0, "r", tokens, len(tokens) - len(output), 0, ([],), params, **more)
    return SamplingState.of(new, vocab_size)


def bitmask(allowed, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def sample(rows, logits: np.ndarray, states: list[SamplingState], masks=()) -> SampledRows:
    return rows.sample(logits, states, [rows.enter(state) for state in states], list(masks))


# ---------------------------------------------------------------------------------------------------------
# the largest logit
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [1, 7, 15, 16, 17, 64, 255, 256, 257, 1000, 49152])
def test_argmax_is_the_first_of_the_largest_that_are_allowed(variant, count):
    rng = np.random.default_rng(count)
    for trial in range(40):
        row = np.round(rng.standard_normal(count) * 3).astype(np.float32)
        if trial % 4 == 1:
            row[rng.integers(0, count, 1 + count // 2)] = -np.inf
        if trial % 4 == 2:
            row[rng.integers(0, count, 2)] = np.nan
        assert_same_place(native.argmax(variant, row), row)
        mask = bitmask(np.flatnonzero(rng.random(count) < 0.5), count)
        allowed = np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").astype(bool)
        if allowed.any():
            places = np.flatnonzero(allowed)
            index, value = native.argmax(variant, row, mask)
            assert_same_place((int(np.searchsorted(places, index)), value), row[places])
            assert allowed[index]


def assert_same_place(got: tuple[int, float], row: np.ndarray) -> None:
    best = int(row.argmax())
    assert got[0] == best
    np.testing.assert_equal(got[1], float(row[best]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_argmax_of_what_cannot_be_chosen(variant):
    row = np.full(40, -np.inf, dtype=np.float32)
    assert native.argmax(variant, row) == (0, -np.inf)
    assert native.argmax(variant, row, bitmask([33], 40)) == (33, -np.inf)
    assert native.argmax(variant, row, bitmask([], 40)) == (-1, -np.inf)


# ---------------------------------------------------------------------------------------------------------
# any row
# ---------------------------------------------------------------------------------------------------------


def random_row(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Flat ones, peaked ones, ties, forbidden and extreme logits, and some that are no numbers."""
    scale = float(rng.choice([0, 1e-20, 0.01, 1, 3, 10, 100]))
    row = (rng.standard_normal(vocab_size) * scale).astype(np.float32)
    if rng.random() < 0.3:
        row = np.round(row)
    if rng.random() < 0.3:
        row[rng.integers(0, vocab_size, max(1, vocab_size // 3))] = -np.inf
    if rng.random() < 0.03:
        row[rng.integers(vocab_size)] = rng.choice([np.nan, np.inf])
    if rng.random() < 0.05:
        row[rng.integers(vocab_size)] = rng.choice([3e38, -3e38])
    return row


def random_state(rng: np.random.Generator, vocab_size: int) -> SamplingState:
    def now(probability: float) -> bool:
        return rng.random() < probability

    def tokens(count: int) -> list[int]:
        return rng.integers(0, vocab_size, count).tolist()

    wish: dict = {
        "temperature": float(rng.choice([0, 0.01, 0.7, 1, 1, 2.5, 1000, 1e300])),
        "seed": int(rng.integers(-(2**63), 2**63 - 1)),
    }
    if now(0.4):
        wish["top_k"] = int(rng.choice([1, 2, 5, 40, vocab_size // 2 + 1, vocab_size, 10 * vocab_size]))
    if now(0.5):
        wish["top_p"] = float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7]))
    if now(0.3):
        wish["min_p"] = float(rng.choice([1e-6, 0.01, 0.1, 0.6, 1]))
    if now(0.2):
        wish["repetition_penalty"] = float(rng.choice([0.5, 1.3, 2, 1e-3]))
    if now(0.2):
        wish["frequency_penalty"] = float(rng.choice([0.1, -1.7, 2]))
    if now(0.2):
        wish["presence_penalty"] = float(rng.choice([0.1, -1.7, 2]))
    if now(0.2):
        wish["logit_bias"] = dict(zip(tokens(4), rng.choice([-100, 1.5, 100, 0.3], 4).tolist(), strict=True))
    if now(0.1):
        wish["allowed_token_ids"] = tokens(int(rng.integers(1, vocab_size + 1)))
    if now(0.3):
        wish["logprobs"] = int(rng.choice([0, 1, 5, 20, vocab_size, -1]))
    if now(0.3):
        wish["min_tokens"] = int(rng.integers(0, 8))
    more: dict = {}
    if now(0.3):
        more["stop_token_ids"] = tokens(int(rng.integers(1, 4)))
    if now(0.2):
        more["bad_words_token_ids"] = [tokens(int(rng.integers(1, 3))) for _ in range(3)]
    output = tokens(int(rng.integers(0, 20)))
    return state(vocab_size, SamplingParams(**wish), tokens(5), output, **more)


def random_mask(rng: np.random.Generator, vocab_size: int, live: SamplingState) -> np.ndarray:
    allowed = [] if rng.random() < 0.05 else rng.integers(0, vocab_size, vocab_size)
    if rng.random() < 0.3 and len(live.stop_ids):
        allowed = live.stop_ids
    mask = bitmask(allowed, vocab_size)
    return mask[: max(1, len(mask) // 2)] if rng.random() < 0.2 else mask


def stands_on_the_line(logits: np.ndarray, live: SamplingState, mask) -> bool:
    """Whether the mass of the nucleus, down to some token, is as good as top_p."""
    if live.top_p == 1.0 or live.temperature == 0.0:
        return False
    rest = SamplingState(**{name: getattr(live, name) for name in live.__slots__})
    rest.top_p = 1.0
    row = masked(logits, mask) if mask is not None else logits
    with np.errstate(over="ignore"):
        values = np.sort(survivors(row, rest))[::-1].astype(np.float64)
    mass = np.exp(values - values[0]).cumsum()
    return bool((np.abs(mass / mass[-1] - live.top_p) < LINE).any())


def survivors(row: np.ndarray, live: SamplingState) -> np.ndarray:
    from mainspring.worker.sampling_rules import edit_logits, surviving_ids

    row = row.copy()
    edit_logits(row, live, has_grammar=False)
    row /= np.float32(live.temperature)
    ids = surviving_ids(row, float(row.max()), live.top_k, 1.0, live.min_p)
    return row if ids is None else row[ids]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(1, 150), (7, 600), (50, 900), (700, 600), (3000, 300), (49152, 40)]
)
def test_any_row_is_answered_as_by_the_rules(variant, vocab_size, num_rows):
    rng = np.random.default_rng([vocab_size, num_rows])
    rows, rules, num_parted = sampler(variant, vocab_size), NumpySampler(), 0
    for _ in range(num_rows):
        logits, live = random_row(rng, vocab_size), random_state(rng, vocab_size)
        masks = [random_mask(rng, vocab_size, live)] if rng.random() < 0.3 else []
        before = logits.copy()
        ours, theirs = sample(rows, logits[None], [live], masks), sample(rules, logits[None], [live], masks)
        np.testing.assert_array_equal(logits, before)
        assert ours.errors == theirs.errors
        assert ours.logprobs.keys() == theirs.logprobs.keys()
        if ours.token_ids != theirs.token_ids:
            assert stands_on_the_line(logits, live, masks[0] if masks else None)
            num_parted += 1
        elif 0 in ours.logprobs:
            raw = masked(logits, masks[0]) if masks else logits
            assert_same_logprobs(ours.logprobs[0], theirs.logprobs[0], raw)
    assert num_parted <= 1


def assert_same_logprobs(ours, theirs, raw: np.ndarray) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_array_equal(ours.ranks, theirs.ranks)
    norm = float(raw.max()) + 11.0  # the logarithm of the vocabulary's size more, at most
    float_apart = np.spacing(np.maximum(np.abs(theirs.logprobs), np.float32(abs(norm))))
    assert (np.abs(ours.logprobs - theirs.logprobs) <= 2 * float_apart).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_draws_from_wide_rows_are_those_of_the_rules(variant):
    """Where few noises are computed, the winner is among them: flat rows, peaked ones, at any temperature."""
    rng = np.random.default_rng(1)
    vocab_size = 20_000
    rows, rules = sampler(variant, vocab_size), NumpySampler()
    for scale in (0.0, 0.3, 1.0, 4.0, 12.0, 1e4):
        logits = (rng.standard_normal(vocab_size) * scale).astype(np.float32)
        for temperature in (0.05, 1.0, 7.0):
            wish = SamplingParams(temperature=temperature, seed=3)
            states = [state(vocab_size, wish, output=[1] * n) for n in range(12)]
            batch = np.repeat(logits[None], len(states), axis=0)
            assert sample(rows, batch, states).token_ids == sample(rules, batch, states).token_ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_ties_on_the_line(variant):
    """Case B116: of equals at top_p the lower ids stay, of equals at top_k all do."""
    rows = sampler(variant, 5000)
    logits = np.repeat(np.zeros((1, 5000), dtype=np.float32), 400, axis=0)
    drawn = sample(rows, logits, [state(5000, SamplingParams(seed=s, top_p=0.5)) for s in range(400)])
    assert 2400 < max(drawn.token_ids) < 2500
    drawn = sample(rows, logits, [state(5000, SamplingParams(seed=s, top_k=3)) for s in range(400)])
    assert max(drawn.token_ids) > 4900


@pytest.mark.parametrize("variant", VARIANTS)
def test_outliers_do_not_hide_the_line(variant):
    """A search that halves the range of values would never end between such numbers."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((1, 3000)) * 1e-6).astype(np.float32)
    logits[0, :3] = -1e38, -1e30, -1e10
    wishes = [
        {"top_k": 1500},
        {"top_k": 2998},
        {"top_p": 0.3},
        {"top_k": 2000, "top_p": 0.7},
        {"logprobs": 400},
    ]
    for wish in wishes:
        live = [state(3000, SamplingParams(seed=1, **wish))]
        ours, theirs = sample(sampler(variant, 3000), logits, live), sample(NumpySampler(), logits, live)
        assert ours.token_ids == theirs.token_ids
        if ours.logprobs:
            assert_same_logprobs(ours.logprobs[0], theirs.logprobs[0], logits[0])


# ---------------------------------------------------------------------------------------------------------
# many rows
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_a_row_is_the_same_bits_in_any_batch_on_any_threads_and_in_any_variant(vocab_size):
    """Cases B101, B112, B113: neighbours, places and threads do not matter; nor does the instruction set."""
    rng = np.random.default_rng(vocab_size)
    logits = np.stack([random_row(rng, vocab_size) for _ in range(64)])
    states = [random_state(rng, vocab_size) for _ in range(64)]
    masks = [random_mask(rng, vocab_size, live) if rng.random() < 0.3 else None for live in states]
    rows = sampler(VARIANTS[0], vocab_size)
    alone = [sample(rows, logits[i : i + 1], [states[i]], [masks[i]]) for i in range(64)]
    for variant in VARIANTS:
        for num_threads in (1, 2, 3):
            rows = sampler(variant, vocab_size, native.Pool(num_threads))
            order = rng.permutation(64)[: 17 * num_threads]
            batch = sample(rows, logits[order], [states[i] for i in order], [masks[i] for i in order])
            for place, i in enumerate(order.tolist()):
                assert batch.token_ids[place] == alone[i].token_ids[0]
                assert batch.errors.get(place) == alone[i].errors.get(0)
                ours, theirs = batch.logprobs.get(place), alone[i].logprobs.get(0)
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("k", [0, 1, 20, 700, -1])
def test_scores_of_prompt_tokens(variant, k):
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((9, 700)) * 4).astype(np.float32)
    logits[3, 100:] = -np.inf
    logits[4] = 1.0
    token_ids = rng.integers(0, 700, 9).tolist()
    got = sampler(variant, 700).score(logits, token_ids, k)
    for i, row in enumerate(logits):
        one = type(got)(*(array[i : i + 1] for array in got))
        assert_same_logprobs(one, row_logprobs(row, token_ids[i], k), row)
    logits[6, 5] = np.nan
    with pytest.raises(SamplingError, match="logits are not finite: the model computed nan"):
        sampler(variant, 700).score(logits, token_ids, k)
    nothing = sampler(variant, 700).score(logits[:0], [], 0)
    assert (nothing.token_ids.shape, nothing.ranks.shape) == ((0, 1), (0,))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_failed_row_fails_alone(variant):
    """Case B109: it says why, and has no log-probabilities."""
    logits = np.zeros((4, 50), dtype=np.float32)
    logits[0, 7] = np.nan
    logits[2, 0] = 1e38
    wishes = [{}, {"logprobs": 2}, {"repetition_penalty": 1e-3, "logprobs": 1}, {"temperature": 0.0}]
    states = [state(50, SamplingParams(seed=1, **wish)) for wish in wishes]
    got = sample(sampler(variant, 50), logits, states, [None, None, None, bitmask([], 50)])
    assert [token == -1 for token in got.token_ids] == [True, False, True, True]
    assert list(got.logprobs) == [1]
    assert "computed nan" in got.errors[0]
    assert "penalty or bias makes a logit infinite" in got.errors[2]
    assert "no token is allowed" in got.errors[3]


def test_plans_change_with_their_request():
    """Counts, bad words and the end of min_tokens reach the plan that was made when the request came."""
    rows = sampler(VARIANTS[-1], 40)
    wish = SamplingParams(temperature=0.0, min_tokens=2, frequency_penalty=1.0)
    live = state(40, wish, stop_token_ids=[9], bad_words_token_ids=[[1, 3]])
    plan = rows.enter(live)
    logits = np.zeros((1, 40), dtype=np.float32)
    logits[0, [9, 1, 3]] = 3.0, 2.5, 2.25
    said = []
    for _ in range(5):
        said += rows.sample(logits, [live], [plan], []).token_ids
        live.append(said[-1])
    assert said == [1, 1, 9, 3, 9]


# ---------------------------------------------------------------------------------------------------------
# what must not be handed over
# ---------------------------------------------------------------------------------------------------------


def test_wrong_shapes_and_ids_are_refused_not_read():
    rows = native.Sampler(POOL, VARIANTS[0], 40)
    plan, positions = rows.plan(), np.zeros(1, dtype=np.int64)
    logits = np.zeros((1, 40), dtype=np.float32)
    for wrong in ((logits[:, :39].copy(), [plan], positions, []), (logits, [], positions[:0], [])):
        with pytest.raises(ValueError, match="logits"):
            rows.sample_rows(*wrong)
    with pytest.raises(ValueError, match="positions"):
        rows.sample_rows(logits, [plan], np.zeros(2, dtype=np.int64), [])
    with pytest.raises(ValueError, match="masks"):
        rows.sample_rows(logits, [plan], positions, [None, None])
    with pytest.raises(ValueError, match="another vocabulary"):
        rows.sample_rows(logits, [native.Sampler(POOL, VARIANTS[0], 41).plan()], positions, [])
    for ids in ([40], [-1]):
        outside = np.array(ids, dtype=np.int64)
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            plan.forbid(outside)
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            plan.count(outside, np.zeros(1, dtype=np.float32))
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            rows.row_logprobs(logits, outside.astype(np.int32), 0)
    with pytest.raises(ValueError, match="no variant avx3"):
        native.Sampler(POOL, "avx3", 40)
