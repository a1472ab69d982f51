"""Arrays of log-probabilities to the dictionaries a caller reads, and their running sum.

Objects are made here and nowhere earlier, for those positions only that somebody gets. Entries are keyed by
token id: tokens that look alike as text (halves of a character) do not overwrite each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from mainspring.base.messages import TokenLogprobs
from mainspring.base.outputs import Logprob, LogprobsOnePosition, PromptLogprobs, SampleLogprobs


class TokenTexts(dict[int, str]):
    """Token id -> the text of that token alone; bytes that are no whole character read U+FFFD."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        super().__init__()
        self._bytes = token_bytes

    def __missing__(self, token_id: int) -> str:
        value = self[token_id] = self._bytes[token_id].decode("utf-8", "replace")
        return value


def to_positions(
    arrays: TokenLogprobs, texts: Mapping[int, str] | None, num_positions: int | None = None
) -> SampleLogprobs:
    """The first `num_positions` positions (None: all), the sampled token first in each, then the best, best
    first.

    `texts` is None where there is no tokenizer: then the entries have no text.
    """
    ids, logprobs = arrays.token_ids[:num_positions].tolist(), arrays.logprobs[:num_positions].tolist()
    ranks = arrays.ranks[:num_positions].tolist()
    return [_position(*row, texts) for row in zip(ids, logprobs, ranks, strict=True)]


def to_prompt_positions(arrays: TokenLogprobs, texts: Mapping[int, str] | None) -> PromptLogprobs:
    """One entry per prompt token; the first is None, for nothing stands before it."""
    return [None, *to_positions(arrays, texts)]


def sum_of_chosen(arrays: TokenLogprobs, num_positions: int) -> float:
    """The log-probability of the first `num_positions` sampled tokens together."""
    return float(sum(arrays.logprobs[:num_positions, 0].tolist()))


def _position(
    ids: list[int], logprobs: list[float], chosen_rank: int, texts: Mapping[int, str] | None
) -> LogprobsOnePosition:
    position: LogprobsOnePosition = {}
    rank = chosen_rank
    for column, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
        # A sampled token that is among the best comes twice; its first entry has the rank that counts ties.
        if token_id not in position:
            position[token_id] = Logprob(logprob, rank, None if texts is None else texts[token_id])
        rank = column
    return position
