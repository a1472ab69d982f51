"""Log-probabilities in the API's two forms.

Rules.
1. Every number is finite: JSON has no other, and a token that is impossible has -9999, as in OpenAI's answers
   (case B094).
2. No entry is lost: tokens that read alike get distinct keys (case B088). A token that is no whole character
   is "bytes:\\xe2\\x9f"; where two still agree, the later one is "token_id:5".
"""

from __future__ import annotations

from collections.abc import Callable

from mainspring.base.outputs import Logprob, LogprobsOnePosition, PromptLogprobs
from mainspring.server.replies import (
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsReply,
    TokenLogprob,
)

LEAST = -9999.0
TokenBytes = Callable[[int], bytes]  # of one token


class TokenNames:
    """How a token is shown beside its log-probability."""

    def __init__(self, token_bytes: TokenBytes | None, as_ids: bool = False) -> None:
        """`token_bytes` is None where there is no tokenizer; `as_ids`: "token_id:5" for every token."""
        self._token_bytes = token_bytes
        self._as_ids = as_ids or token_bytes is None

    def name(self, token_id: int) -> str:
        if self._as_ids or self._token_bytes is None:
            return f"token_id:{token_id}"
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """As `name`, but never the same for two tokens that are not the same bytes."""
        if not self._as_ids and self._token_bytes is not None:
            raw = self._token_bytes(token_id)
            try:
                return raw.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self.name(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        return None if self._token_bytes is None else list(self._token_bytes(token_id))


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # NaN too: no comparison with it is true


def chat_logprobs(
    positions: list[LogprobsOnePosition], token_ids: list[int], num_top: int, names: TokenNames
) -> ChatLogprobs:
    """`num_top`: how many of the likeliest are shown besides, -1 for all of them."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=False):
        top = [
            TokenLogprob(names.name(other), finite(entry.logprob), names.bytes(other))
            for other, entry in _best(position, num_top)
        ]
        logprob = finite(position[token_id].logprob)
        content.append(ChosenLogprob(names.name(token_id), logprob, names.bytes(token_id), top))
    return ChatLogprobs(content)


def _best(position: LogprobsOnePosition, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest, best first: the sampled token stands in front of them and need not be one."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return ranked if num_top == -1 else ranked[:num_top]


class CompletionLogprobsWriter:
    """Collects positions of one choice; `offset` is where the next token's text begins."""

    def __init__(self, names: TokenNames, offset: int = 0) -> None:
        self._names = names
        self.offset = offset

    def write(
        self, positions: list[LogprobsOnePosition | None], token_ids: list[int], num_top: int
    ) -> CompletionLogprobs:
        """The next positions. None stands for a token that nothing stands before."""
        found = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=False):
            name = self._names.name(token_id)
            found.text_offset.append(self.offset)
            found.tokens.append(name)
            self.offset += len(name)
            if position is None:
                found.token_logprobs.append(None)
                found.top_logprobs.append(None)
                continue
            found.token_logprobs.append(finite(position[token_id].logprob))
            found.top_logprobs.append(self._top(token_id, position, num_top))
        return found

    def _top(self, token_id: int, position: LogprobsOnePosition, num_top: int) -> dict[str, float]:
        """The sampled token, then the best that are asked for."""
        shown = [(token_id, position[token_id]), *_best(position, num_top)]
        top: dict[str, float] = {}
        for other, entry in dict(shown).items():
            key = self._names.key(other)
            top[f"token_id:{other}" if key in top else key] = finite(entry.logprob)
        return top


def prompt_logprobs(given: PromptLogprobs | None) -> PromptLogprobsReply | None:
    if given is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in given
    ]
