"""What sampling knows of one request: its wishes, made ready once, and its tokens, which grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import NewRequestData
from mainspring.base.params import SamplingParams

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

NEVER = 2**62  # as a position

_HOTTEST = 1e38  # by which float32 can still divide -inf


class TokenCounts:
    """Distinct tokens of one request and how often each stands in its output, as arrays that grow.

    Tokens of the prompt (given only where there is a repetition penalty) are here with count 0 until they
    are output.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._index: dict[int, int] = {}
        for token in dict.fromkeys([*prompt, *output]):
            self._index[token] = len(self._index)
        self._ids = np.fromiter(self._index, dtype=np.int64, count=len(self._index))
        self._counts = np.zeros(len(self._index), dtype=np.float32)
        for token in output:
            self._counts[self._index[token]] += 1

    def add(self, token: int) -> None:
        """One more in the output."""
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            room = max(16, 2 * at)
            self._ids = np.resize(self._ids, room) if at else np.zeros(room, dtype=np.int64)
            self._counts = np.concatenate([self._counts, np.zeros(room - at, dtype=np.float32)])
        if at == len(self._index) - 1:
            self._ids[at] = token
        self._counts[at] += 1

    @property
    def ids(self) -> IdArray:
        """[distinct tokens]"""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> FloatArray:
        """[distinct tokens], aligned with `ids`."""
        return self._counts[: len(self._index)]


@dataclass(slots=True)
class SamplingState:
    """Token ids that the vocabulary does not have were refused long before; here they are dropped, because an
    index out of range would end the engine for everybody (case B104).
    """

    token_ids: list[int]  # prompt, then output; the worker's own copy
    num_prompt_tokens: int
    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float
    min_p: float
    seed: int
    num_logprobs: int | None  # None: not asked for; -1: all
    min_tokens: int
    stop_ids: IdArray  # what min_tokens forbids
    allowed_ids: IdArray | None
    logit_bias: tuple[IdArray, FloatArray] | None  # ids and what to add to them
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    counts: TokenCounts | None  # only where there is a penalty
    bad_words: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, new: NewRequestData, vocab_size: int) -> SamplingState:
        """The state of a request that enters a slot, for the first time or again."""
        params = new.sampling_params
        assert params.is_greedy or params.seed is not None, (
            f"{new.request_id}: intake gives every request a seed"
        )
        tokens = list(new.token_ids)
        allowed = params.allowed_token_ids
        bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < vocab_size}
        return cls(
            token_ids=tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            temperature=min(params.temperature, _HOTTEST),
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            num_logprobs=params.logprobs,
            min_tokens=params.min_tokens,
            stop_ids=_known_ids(new.stop_token_ids, vocab_size),
            allowed_ids=None if allowed is None else _known_ids(allowed, vocab_size),
            logit_bias=(np.array([*bias]), np.array([*bias.values()], dtype=np.float32)) if bias else None,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            counts=_counts(params, tokens, new.num_prompt_tokens, vocab_size),
            bad_words=[word for word in new.bad_words_token_ids if word and 0 <= word[-1] < vocab_size],
        )

    @property
    def greedy_from(self) -> int:
        """From this position on, all there is to do is to find the largest logit that the grammar allows."""
        edits = (self.allowed_ids, self.logit_bias, self.counts, self.num_logprobs)
        if self.temperature > 0 or self.bad_words or any(edit is not None for edit in edits):
            return NEVER
        return self.stops_from if len(self.stop_ids) else 0

    @property
    def draws_simply(self) -> bool:
        """All there is to do, from now on, is to draw among what the grammar allows: no filter needs to see
        all logits, and nobody wants to."""
        filters = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        wants = self.edits_logits or self.num_logprobs is not None
        return self.temperature > 0 and not filters and not wants

    @property
    def stops_from(self) -> int:
        """Before it, min_tokens forbids the stop ids."""
        return min(NEVER, self.num_prompt_tokens + self.min_tokens)

    @property
    def position(self) -> int:
        """Absolute index of the token to be sampled next."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def edits_logits(self) -> bool:
        """Whether any of stages 3 to 7 changes the row now."""
        return (
            self.allowed_ids is not None
            or self.logit_bias is not None
            or self.num_output_tokens < self.min_tokens
            or self.counts is not None
            or bool(self.bad_words)
        )

    def banned_ids(self) -> list[int]:
        """The last tokens of bad words of which all but them end the output."""
        return [word[-1] for word in self.bad_words if self._ends_with(word[:-1])]

    def _ends_with(self, head: list[int]) -> bool:
        return not head or (
            len(head) <= self.num_output_tokens and self.token_ids[len(self.token_ids) - len(head) :] == head
        )

    def append(self, token_id: int) -> None:
        """A token was sampled: from now on it is output."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)


def _counts(
    params: SamplingParams, tokens: list[int], num_prompt_tokens: int, vocab_size: int
) -> TokenCounts | None:
    repeats = params.repetition_penalty != 1.0
    if not (repeats or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        return None
    prompt = tokens[:num_prompt_tokens] if repeats else []
    output = tokens[num_prompt_tokens:]
    return TokenCounts([t for t in prompt if 0 <= t < vocab_size], [t for t in output if 0 <= t < vocab_size])


def _known_ids(ids: Sequence[int], vocab_size: int) -> IdArray:
    return np.array(sorted({t for t in ids if 0 <= t < vocab_size}), dtype=np.int64)
