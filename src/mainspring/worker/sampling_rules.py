"""From a row of logits to a token: the rules, as pure functions of logits, the request's state and its mask.

These numpy forms are the specification of every other form, and what runs where there is no other.

Theory of operation. One row at a time, through these stages, in this order:

     1  grammar mask          what the grammar forbids is -inf, for logprobs too
     2  raw log-probabilities are read from the row as it is now
     3  allowed_token_ids     everything else is -inf
     4  logit_bias            added
     5  min_tokens            EOS and stop ids are -inf while the output is shorter
     6  penalties             repetition (prompt and output), then frequency and presence (output only)
     7  bad words             the last token of a word whose other tokens end the output is -inf
     8  greedy                argmax, the lowest id among equals; nothing below applies
     9  temperature           divides
    10  min_p, top_k, top_p   in this order, each among what the ones before left; the best token always stays
    11  the draw              Gumbel-max: argmax of logit + noise

Rule 1. Randomness is addressed, not consumed. The noise of a token is a hash of (seed, position, token id),
        where position is the absolute index of the token to be sampled (prompt and output counted), so a
        token drawn again after preemption, in another batch or by another process is the same token.
Rule 2. Rows do not know each other: each is a computation of its own on one row, so its bits cannot depend
        on its neighbours or on its place in the batch.
Rule 3. A row is answered with an id that its masks allow, or with a `SamplingError`. Never with an
        arbitrary id.
Rule 4. The work grows with what a request asks for: a plain greedy row is one argmax, penalties walk the
        request's own distinct tokens, a filter looks at the tokens that survived the one before.

The noise. `key = mix(mix(seed) + position)` with splitmix64's finaliser as `mix` and arithmetic modulo
2**64; its two halves k0, k1 key a 32-bit hash h of the token id (see `noise_bits`), a bijection, so no two
tokens of a row tie; u = (h + 1/2) / 2**32 and the noise is -ln(-ln(u)), within (-3.2, 22.9). The integers
are the same on every platform; the two logarithms, in float64, may differ in their last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.errors import EngineError
from mainspring.base.messages import TokenLogprobs
from mainspring.worker.sampling_state import FloatArray, IdArray, SamplingState, TokenCounts

LOGPROB_FLOOR = -9999.0  # of a token that a mask forbids: JSON has no -Infinity (case B094)
NONE_ALLOWED = (
    "no token is allowed here: the grammar, allowed_token_ids, bad_words and min_tokens together leave none"
)
EDITED_TO_INFINITY = "a penalty or bias makes a logit infinite; choose one nearer to its neutral value"

_UINT64 = 2**64 - 1
_PRUNE_ABOVE = 512  # with fewer tokens, computing every noise is cheaper than deciding which to leave out
_NEG_INF = np.float32(-np.inf)
_NUCLEUS_BUCKETS = 1024
_NUCLEUS_DEPTH = 32.0  # what is this far below the best shares the last bucket
_GROUP = 64


class SamplingError(EngineError):
    """This request cannot go on: its masks leave no token, or its logits are not numbers. Others are fine."""


class Sampled(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None  # of one position, where asked for


def sample_row(
    logits: FloatArray, state: SamplingState, mask: npt.NDArray[np.int32] | None = None
) -> Sampled:
    """The next token of one request.

    logits  [vocab_size] float32, read and never written
    mask    [ceil(vocab_size / 32)] int32, bit t says whether token t may follow; None: all may

    Raises `SamplingError` where no token is left, or the logits are not finite. Changes nothing: recording
    the token is `SamplingState.append`.
    """
    best = int(logits.argmax())  # the first NaN, if there is one
    check_finite(float(logits[best]))
    row = logits if mask is None else masked(logits, mask)
    raw = row
    if state.edits_logits:
        row = raw.copy()
        edit_logits(row, state, has_grammar=mask is not None)
    if row is not logits:
        best = int(row.argmax())
    if row[best] == _NEG_INF:
        raise SamplingError(NONE_ALLOWED)
    if row[best] == np.inf:
        raise SamplingError(EDITED_TO_INFINITY)
    token = best if state.temperature == 0.0 else _draw_filtered(row, best, state)
    if state.num_logprobs is None:
        return Sampled(token, None)
    return Sampled(token, row_logprobs(raw, token, state.num_logprobs))


def check_finite(largest: float) -> None:
    """`largest` is a row's maximum, by argmax, which finds a NaN before anything else."""
    if not largest < math.inf:
        raise SamplingError(not_finite(largest))


def not_finite(logit: float) -> str:
    return f"logits are not finite: the model computed {logit} for this request"


# ---------------------------------------------------------------------------------------------------------
# stages 1 to 7: masks, bias, penalties
# ---------------------------------------------------------------------------------------------------------


def masked(logits: FloatArray, mask: npt.NDArray[np.int32]) -> FloatArray:
    """A copy in which what the mask does not allow is -inf; ids beyond the mask are not allowed."""
    words = np.ascontiguousarray(mask, dtype="<i4")
    allowed = np.unpackbits(words.view(np.uint8), count=len(logits), bitorder="little").view(np.bool_)
    return np.where(allowed, logits, _NEG_INF)


def edit_logits(row: FloatArray, state: SamplingState, *, has_grammar: bool) -> None:
    """Stages 3 to 7, in place."""
    if state.allowed_ids is not None:
        kept = row[state.allowed_ids]
        row.fill(_NEG_INF)
        row[state.allowed_ids] = kept
    if state.logit_bias is not None:
        ids, bias = state.logit_bias
        row[ids] += bias
    if state.position < state.stops_from and len(state.stop_ids):
        _forbid_stops(row, state.stop_ids, has_grammar)
    if state.counts is not None:
        _penalise(row, state, state.counts)
    if state.bad_words:
        row[state.banned_ids()] = _NEG_INF


def _forbid_stops(row: FloatArray, stop_ids: IdArray, has_grammar: bool) -> None:
    """A grammar that allows nothing but the end is obeyed: it is at its end, and more would be wrong."""
    before = row[stop_ids]
    row[stop_ids] = _NEG_INF
    if has_grammar and row.max() == _NEG_INF:
        row[stop_ids] = before


def _penalise(row: FloatArray, state: SamplingState, counts: TokenCounts) -> None:
    ids, count = counts.ids, counts.counts
    logits = row[ids]
    if state.repetition_penalty != 1.0:
        penalty = state.repetition_penalty
        with np.errstate(over="ignore", divide="ignore"):  # judged after the edits, by check_finite
            logits = np.where(logits > 0, logits / penalty, logits * penalty)
    if state.frequency_penalty != 0.0:
        logits -= state.frequency_penalty * count
    if state.presence_penalty != 0.0:
        logits -= state.presence_penalty * (count > 0)
    row[ids] = logits


# ---------------------------------------------------------------------------------------------------------
# stages 9 to 11: temperature, filters, the draw
# ---------------------------------------------------------------------------------------------------------


def _draw_filtered(row: FloatArray, best: int, state: SamplingState) -> int:
    with np.errstate(over="ignore"):
        logits = row / np.float32(state.temperature)
    check_finite(float(logits[best]))
    if logits[best] == _NEG_INF:
        return best  # divided, all are: the order that is left
    ids = surviving_ids(logits, float(logits[best]), state.top_k, state.top_p, state.min_p)
    if ids is None:
        return gumbel_argmax(logits, None, state.seed, state.position)
    return int(ids[gumbel_argmax(logits[ids], ids, state.seed, state.position)])


def draw_candidates(
    logits: FloatArray,
    first_id: int,
    states: Sequence[SamplingState],
    masks: Sequence[npt.NDArray[np.int32] | None],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """What a rank that has a share of the vocabulary would draw for requests that `draws_simply`, and with
    what score: the best of all ranks' is what one rank would have drawn from all logits.

    logits [rows, share], of tokens first_id, first_id + 1, ...; masks: of the whole vocabulary, or empty. A
    score that is not finite says that there is no candidate: -inf where none is allowed, else what the model
    computed.
    """
    ids = np.full(len(states), -1, np.int32)
    scores = np.full(len(states), -np.inf)
    tokens = np.arange(first_id, first_id + logits.shape[1])
    for index, state in enumerate(states):
        row, mask = logits[index], masks[index] if masks else None
        largest = float(row[row.argmax()])
        if not largest < math.inf:
            scores[index] = largest
            continue
        row = row if mask is None else masked(row, mask[first_id // 32 :])
        with np.errstate(over="ignore"):
            scaled = row / np.float32(state.temperature)
        best = gumbel_argmax(scaled, tokens, state.seed, state.position)
        if row[best] > _NEG_INF:
            noise = gumbel(noise_bits(_multiply(tokens[best : best + 1]), state.seed, state.position))
            ids[index], scores[index] = tokens[best], scaled[best] + noise[0]
    return ids, scores


def surviving_ids(
    logits: FloatArray, largest: float, top_k: int, top_p: float, min_p: float
) -> IdArray | None:
    """Ids, ascending, that min_p, top_k and top_p leave; None where no filter is on."""
    lowest = -math.inf
    if min_p > 0.0:
        lowest = float(np.float32(largest + math.log(min_p)))
    if 0 < top_k < len(logits):
        # Ties at the threshold all stay. That min_p came first changes nothing: the k largest of what it
        # left are the k largest of all, or all it left.
        lowest = max(lowest, float(kth_largest(logits, top_k)))
    ids = None
    if lowest > -math.inf:
        ids = np.flatnonzero(logits >= np.float32(lowest))
    if top_p < 1.0:
        inner = nucleus(logits if ids is None else logits[ids], largest, top_p)
        ids = inner if ids is None else ids[inner]
    return ids


def kth_largest(logits: FloatArray, k: int) -> np.float32:
    """The k-th largest, ties counted, 1 <= k <= len(logits)."""
    num_groups = len(logits) // _GROUP
    if k <= num_groups // 2:
        # The k-th largest of the groups' maxima is a bound: k logits at least are as large.
        maxima = logits[: num_groups * _GROUP].reshape(num_groups, _GROUP).max(axis=1)
        logits = logits[logits >= np.partition(maxima, num_groups - k)[num_groups - k]]
    kth: np.float32 = np.partition(logits, len(logits) - k)[len(logits) - k]
    return kth


def nucleus(logits: FloatArray, largest: float, top_p: float) -> IdArray:
    """Indices, ascending, of the fewest tokens that together have the probability `top_p`.

    The best come first, and the token that crosses the line stays; among equals on the line the lower ids
    do. Only tokens near the line are sorted: buckets of the logits' range say where it is.
    """
    top = np.float32(largest)
    depth = max(1e-30, min(largest - float(logits.min()), _NUCLEUS_DEPTH))
    below = np.minimum(top - logits, np.float32(depth)) * np.float32(_NUCLEUS_BUCKETS / depth)
    bucket = below.astype(np.intp)  # equal logits share one, and a better logit is never in a later one
    mass = np.cumsum(np.bincount(bucket, np.exp(logits - top)))
    needed = top_p * mass[-1]
    crossing = int(np.searchsorted(mass, needed))
    descending = np.sort(logits[bucket == crossing])[::-1]
    mass_above = mass[crossing - 1] if crossing else 0.0
    running = mass_above + np.cumsum(np.exp(descending - top), dtype=np.float64)
    num_kept = min(int(np.searchsorted(running, needed)) + 1, len(descending))
    line = descending[num_kept - 1]
    kept = logits > line
    kept[np.flatnonzero(logits == line)[: num_kept - np.count_nonzero(descending > line)]] = True
    return np.flatnonzero(kept)


def gumbel_argmax(logits: FloatArray, ids: IdArray | None, seed: int, position: int) -> int:
    """The index of the winner of logit + noise, the first among equals.

    `ids` are the token ids of `logits`, ascending; None: 0, 1, 2, ... The noise of a token that cannot win
    is not made into a float: with B the score of any one token, the winner has a logit of at least B minus
    the largest noise there is and a noise of at least B minus the largest logit. B is the better of the
    likeliest token and the one with the largest noise, which leaves few others of a flat row and of a
    peaked one. Margins cover float32.
    """
    bits = noise_bits(_multiples(len(logits)) if ids is None else _multiply(ids), seed, position)
    if len(logits) <= _PRUNE_ABOVE:
        return int((logits + gumbel(bits)).argmax())
    likely, loud = int(logits.argmax()), int(bits.argmax())
    noises = gumbel(bits[[likely, loud]])
    bound = max(float(logits[likely]) + noises[0], float(logits[loud]) + noises[1])
    quietest = bits_below(bound - float(logits[likely]) - 1e-15 * abs(bound))
    lowest = bound - noises[1]
    lowest -= 1e-3 + 1e-6 * abs(lowest)
    rivals = np.flatnonzero((logits >= np.float32(lowest)) & (bits >= np.uint32(quietest)))
    return int(rivals[(logits[rivals] + gumbel(bits[rivals])).argmax()])


def mix(x: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers in which each bit depends on all."""
    x &= _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64
    return x ^ (x >> 31)


def noise_bits(multiples: npt.NDArray[np.uint32], seed: int, position: int) -> npt.NDArray[np.uint32]:
    """32 uniform bits per token, from `_multiply(token_ids)`. Any integers will do as seed and position.

    Both halves of the key enter, at different rounds, so the rows of two positions are not shifted copies.
    """
    key = mix(mix(seed + 0x9E3779B97F4A7C15) + position)
    x = multiples + np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x += np.uint32(key >> 32)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(15)
    return x


def _multiply(token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    return token_ids.astype(np.uint32) * np.uint32(0x9E3779B1)


@lru_cache(maxsize=4)
def _multiples(vocab_size: int) -> npt.NDArray[np.uint32]:
    multiples = _multiply(np.arange(vocab_size))
    multiples.flags.writeable = False
    return multiples


def gumbel(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise of uniform bits; increasing in them."""
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def bits_below(noise: float) -> int:
    """Some bits whose noise is certainly below `noise`, and not far; at least 0."""
    noise -= 1e-6 * (1.0 + abs(noise))
    if noise < -3.5:
        return 0
    return min(2**32 - 1, max(0, int(math.exp(-math.exp(-noise)) * 2.0**32) - 2))


# ---------------------------------------------------------------------------------------------------------
# log-probabilities
# ---------------------------------------------------------------------------------------------------------


def row_logprobs(logits: FloatArray, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Of one position: the token's own, then the `num_logprobs` best (-1: all), lower ids first among equals.

    Masked tokens have `LOGPROB_FLOOR`. Raises `SamplingError` where the logits are not finite.
    """
    vocab_size = len(logits)
    largest = float(logits[logits.argmax()])
    check_finite(largest)
    k = vocab_size if num_logprobs == -1 else min(num_logprobs, vocab_size)
    ids = np.empty(1 + k, dtype=np.int32)
    ids[0] = token_id
    ids[1:] = best_ids(logits, k)
    logprobs = np.full((1, 1 + k), LOGPROB_FLOOR, dtype=np.float32)
    if largest > -math.inf:
        total = float(np.exp(logits - np.float32(largest)).sum(dtype=np.float64))
        logprobs[0] = logits[ids] - (largest + math.log(total))
        np.maximum(logprobs, np.float32(LOGPROB_FLOOR), out=logprobs)
    rank = np.count_nonzero(logits >= logits[token_id])
    return TokenLogprobs(ids[None], logprobs, np.array([rank], dtype=np.int32))


def best_ids(logits: FloatArray, k: int) -> IdArray:
    """The ids of the k largest logits, largest first, lower ids first among equals."""
    if k == 0:
        return np.empty(0, dtype=np.int64)
    vocab_size = len(logits)
    line = kth_largest(logits, k) if k < vocab_size else _NEG_INF
    ids = np.flatnonzero(logits >= line)
    return ids[np.argsort(-logits[ids], kind="stable")[:k]]
