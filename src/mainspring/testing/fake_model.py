"""A model without weights, whose every token depends on all the tokens before it.

Theory of operation.
- The "KV" of a token is one 64-bit number. In a layer with full attention it is a hash of the token and of
  the number of the token before it, a chain; in a layer with a sliding window, a hash of the token and of the
  numbers its window holds. So a number stands for the whole text up to its place, and a single wrong one
  changes everything after it.
- The logits of the next token are a hash of the numbers that it may attend to: all of them, or the window's.
- What starts the chain is the request's *root*, made of its adapter and its salt: texts that are equal but
  must not share blocks have different numbers, so sharing them changes the output.
- Tokens are chosen as the real sampler chooses them, in the same order of stages, with noise addressed by
  (seed, position, token id).

`reference` says with one loop and no blocks what a request has to say. It is the oracle; `FakeExecutor`
computes the same through block tables, slots and plans. What tells the two apart is a mistake of whoever made
the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import EngineCoreRequest, FinishReason, TokenLogprobs
from mainspring.base.params import SamplingParams
from mainspring.base.protocols import Grammar

Values = npt.NDArray[np.uint64]
Logits = npt.NDArray[np.float32]

WORD_BITS = 32  # of a grammar mask
_ALL_ONES = 2**64 - 1
_SPREAD = 0x9E3779B97F4A7C15
_STIR_1, _STIR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MAX_POSITIONS = 4096
_LOGIT_RANGE = 8.0


def mix(state: int, word: int) -> int:
    """A 64-bit hash of two numbers; their order matters."""
    x = (state ^ ((word + 1) * _SPREAD)) & _ALL_ONES
    x = ((x ^ (x >> 30)) * _STIR_1) & _ALL_ONES
    x = ((x ^ (x >> 27)) * _STIR_2) & _ALL_ONES
    return x ^ (x >> 31)


def mix_each(state: int, words: Values) -> Values:
    """`mix(state, word)` for each word."""
    x = np.uint64(state) ^ ((words + np.uint64(1)) * np.uint64(_SPREAD))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_STIR_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_STIR_2)
    return x ^ (x >> np.uint64(31))


def mix_text(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    state = len(text)
    for byte in text.encode():
        state = mix(state, byte)
    return state


class Said(NamedTuple):
    """What a request has to say beyond its journal, and why it ends."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    logprobs: list[TokenLogprobs]  # one position each; empty where none were asked for


class FakeModel:
    """The mathematics: values, logits, choice. `windows` has one entry per layer, None for full attention."""

    def __init__(self, vocab_size: int = 64, windows: Sequence[int | None] = (None,), seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.windows = tuple(windows)
        self.seed = seed
        self._token_ids = np.arange(vocab_size, dtype=np.uint64)
        self._weights = mix_each(seed, np.arange(_MAX_POSITIONS, dtype=np.uint64)) | np.uint64(1)

    @property
    def plain_root(self) -> int:
        """What the chains of a request without adapter and salt start from."""
        return mix(self.seed, 0)

    def root(self, request: EngineCoreRequest) -> int:
        """What the chains of this request start from."""
        root = self.plain_root
        if request.lora is not None:
            root = mix(mix(root, mix_text(request.lora.name)), request.lora.load_id)
        if request.cache_salt is not None:
            root = mix(mix(root, 1), mix_text(request.cache_salt))
        return root

    def value(self, root: int, token_id: int, position: int, attended: Values) -> int:
        """The KV of a token, from the values of the tokens before it that the layer sees, oldest first."""
        before = root if position == 0 else self._fold(attended, position - len(attended))
        return mix(before, token_id)

    def attended(self, window: int | None, position: int) -> tuple[int, int]:
        """Which earlier positions, first and end, make the value at `position`.

        A full layer needs only the last of them, because that one stands for the others.
        """
        return max(0, position - ((window or 2) - 1)), position

    def visible(self, window: int | None, num_tokens: int) -> int:
        """The first of `num_tokens` positions that the last one attends to."""
        return 0 if window is None else max(0, num_tokens - window)

    def logits(self, values: Sequence[Values], num_tokens: int) -> Logits:
        """[vocab_size], from the values that the last of `num_tokens` tokens sees in each layer."""
        digest = self.seed
        for layer, seen in enumerate(values):
            digest = mix(digest, self._fold(seen, num_tokens - len(seen)) ^ layer)
        return _uniform(mix_each(digest, self._token_ids)) * np.float32(_LOGIT_RANGE)

    def _fold(self, values: Values, first: int) -> int:
        """A sum that knows where each value stands."""
        return int((values * self._weights[first : first + len(values)]).sum(dtype=np.uint64))

    def mask(self, logits: Logits, bitmask_row: npt.NDArray[np.int32]) -> Logits:
        """Forbid the tokens whose bit is clear."""
        bits = np.unpackbits(bitmask_row.view(np.uint8), bitorder="little")[: self.vocab_size]
        return np.where(bits, logits, np.float32(-np.inf))

    def choose(
        self,
        logits: Logits,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> int:
        """The token that follows prompt + output, from masked logits."""
        x = logits.astype(np.float32, copy=True)
        if params.allowed_token_ids is not None:
            kept = np.full_like(x, -np.inf)
            kept[params.allowed_token_ids] = x[params.allowed_token_ids]
            x = kept
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        if len(output) < params.min_tokens and stop_token_ids:
            longer = x.copy()
            longer[list(stop_token_ids)] = -np.inf
            x = longer if np.isfinite(longer).any() else x
        self._penalise(x, params, prompt, output)
        for word in bad_words:
            if (
                list(output[len(output) - len(word) + 1 :]) == list(word[:-1])
                and len(output) >= len(word) - 1
            ):
                x[word[-1]] = -np.inf
        if params.is_greedy:
            return int(np.argmax(x))
        return int(
            np.argmax(
                self._filter(x / np.float32(params.temperature), params)
                + self.noise(params, len(prompt) + len(output))
            )
        )

    def _penalise(
        self, x: Logits, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        if params.repetition_penalty != 1.0:
            seen = list({*prompt, *output})
            x[seen] = np.where(
                x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty
            )
        if params.frequency_penalty or params.presence_penalty:
            counts = np.bincount(output, minlength=self.vocab_size).astype(np.float32)
            x -= np.float32(params.frequency_penalty) * counts
            x -= np.float32(params.presence_penalty) * (counts > 0)

    def _filter(self, x: Logits, params: SamplingParams) -> Logits:
        if params.min_p > 0:
            x = np.where(x >= x.max() + np.float32(np.log(params.min_p)), x, np.float32(-np.inf))
        if 0 < params.top_k < self.vocab_size:
            x = np.where(x >= np.sort(x)[-params.top_k], x, np.float32(-np.inf))
        if params.top_p < 1.0:
            order = np.argsort(x)
            chances = np.exp(x[order] - x.max())
            unlikely = np.cumsum(chances / chances.sum()) <= 1.0 - params.top_p
            unlikely[-1] = False
            x = x.copy()
            x[order[unlikely]] = -np.inf
        return x

    def noise(self, params: SamplingParams, position: int) -> Logits:
        """Gumbel noise of the token at an absolute position: the same whenever and wherever it is drawn."""
        address = mix(mix(self.seed, (params.seed or 0) & _ALL_ONES), position)
        return -np.log(-np.log(_uniform(mix_each(address, self._token_ids))))

    def logprobs(self, logits: Logits, token_id: int, num_best: int) -> TokenLogprobs:
        """One position: `token_id`, then the best ones; -1 means all."""
        shifted = logits - logits.max()
        scores = shifted - np.log(np.exp(shifted).sum())
        best = np.argsort(-scores, kind="stable")[: self.vocab_size if num_best == -1 else num_best]
        ids = np.concatenate(([token_id], best)).astype(np.int32)
        rank = np.array([(logits >= logits[token_id]).sum()], dtype=np.int32)
        return TokenLogprobs(ids[None, :], scores[ids][None, :].astype(np.float32), rank)


def _uniform(words: Values) -> Logits:
    """Hashes to float32 numbers strictly between 0 and 1."""
    return ((words >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def reference(
    request: EngineCoreRequest, model: FakeModel, max_model_len: int, grammar: Grammar | None = None
) -> Said:
    """The promise: what `request` says after its journal, alone, without blocks, chunks or plans.

    `grammar` is a fresh matcher; the journal is fed through it.
    """
    params, prompt, output = request.sampling_params, request.prompt_token_ids, list(request.output_token_ids)
    stop_token_ids = [
        *request.stop_token_ids,
        *([] if request.eos_token_id is None else [request.eos_token_id]),
    ]
    history = History(model, model.root(request))
    for token_id in prompt:
        history.append(token_id)
    for token_id in output:
        history.append(token_id)
        assert grammar is None or grammar.accept(token_id), "the journal breaks the grammar"
    logprobs = []
    while True:
        logits = history.logits()
        if grammar is not None:
            row = np.zeros(-(-model.vocab_size // WORD_BITS), dtype=np.int32)
            grammar.fill(row)
            logits = model.mask(logits, row)
        token_id = model.choose(logits, params, prompt, output, stop_token_ids, request.bad_words_token_ids)
        if params.logprobs is not None:
            logprobs.append(model.logprobs(logits, token_id, params.logprobs))
        output.append(token_id)
        history.append(token_id)
        assert grammar is None or grammar.accept(token_id), "a mask allowed what the grammar refuses"
        reason, stop_reason = _end(request, output, max_model_len, grammar)
        if reason is not None:
            return Said(output[len(request.output_token_ids) :], reason, stop_reason, logprobs)


def reference_prompt_logprobs(request: EngineCoreRequest, model: FakeModel) -> TokenLogprobs | None:
    """Of prompt positions 1, 2, ..., or None where they are not asked for."""
    wanted = request.sampling_params.prompt_logprobs
    if wanted is None:
        return None
    history = History(model, model.root(request))
    rows = []
    for token_id, following in zip(request.prompt_token_ids, request.prompt_token_ids[1:], strict=False):
        history.append(token_id)
        rows.append(model.logprobs(history.logits(), following, wanted))
    return join_logprobs(rows) if rows else None


def join_logprobs(rows: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Consecutive positions as one."""
    return TokenLogprobs(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))


def _end(
    request: EngineCoreRequest, output: list[int], max_model_len: int, grammar: Grammar | None
) -> tuple[FinishReason | None, int | None]:
    """Whether the last token of `output` ends the request: EOS before stop tokens before lengths."""
    last, params = output[-1], request.sampling_params
    if len(output) > params.min_tokens:
        if last == request.eos_token_id:
            return FinishReason.STOP, None
        if last in request.stop_token_ids:
            return FinishReason.STOP, last
    if grammar is not None and grammar.is_finished():
        return FinishReason.STOP, None
    if len(request.prompt_token_ids) + len(output) >= max_model_len:
        return FinishReason.LENGTH, None
    if params.max_tokens is not None and len(output) >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None, None


class History:
    """One text in plain arrays: the values of every layer, position by position."""

    def __init__(self, model: FakeModel, root: int) -> None:
        self.model, self.root, self.num_tokens = model, root, 0
        self.values: list[Values] = [np.zeros(_MAX_POSITIONS, dtype=np.uint64) for _ in model.windows]

    def append(self, token_id: int) -> None:
        position = self.num_tokens
        for window, values in zip(self.model.windows, self.values, strict=True):
            first, end = self.model.attended(window, position)
            values[position] = self.model.value(self.root, token_id, position, values[first:end])
        self.num_tokens += 1

    def logits(self) -> Logits:
        n = self.num_tokens
        seen = [v[self.model.visible(w, n) : n] for w, v in zip(self.model.windows, self.values, strict=True)]
        return self.model.logits(seen, n)

    def agrees(self, other: History, num_tokens: int) -> bool:
        """Whether both begin with the same `num_tokens` tokens, for the same adapter and salt."""
        pairs = zip(self.values, other.values, strict=True)
        return all(np.array_equal(a[:num_tokens], b[:num_tokens]) for a, b in pairs)
