"""Token ids to text, one token at a time, and where a stop string ends it.

Rule 1. The pieces given out, joined, are the text of one decode of all tokens, however the tokens arrive. A
        character whose last byte has not come yet is kept back; U+FFFD is given for it only once it can no
        longer complete.
Rule 2. The text of an answer is decode(prompt + answer) after what it has in common with decode(prompt). A
        prompt that ends inside a character therefore lends its bytes to the first character of the answer,
        and nothing else.
Rule 3. Stop strings are searched character by character, so the end does not depend on how tokens cut the
        text. The first to be complete wins; of those complete at the same character, the first of the list.
Rule 4. What may yet turn out to be the beginning of a stop string is kept back, and no more than that.

Tokens are bytes here: a token costs one table look-up and one call of the UTF-8 codec, whatever came before.
Special tokens that are not shown are empty; nothing is put between tokens. Where decoding takes a space away
from the beginning of a text, it is taken from the answer only if nothing of the prompt is shown.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mainspring.base.params import SamplingParams

if TYPE_CHECKING:
    from mainspring.frontend.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_UNFINISHED = 3  # bytes of a UTF-8 character of which at least one is missing


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, filled on demand and shared by all requests.

    A model's head may have more rows than the tokenizer has tokens; such an id has no bytes (case B106).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = frozenset(tokenizer.special_ids) if skip_special_tokens else frozenset()
        self.adds_space = tokenizer.adds_space

    def __missing__(self, token_id: int) -> bytes:
        known = token_id < self._tokenizer.vocab_size and token_id not in self._hidden
        value = self[token_id] = self._tokenizer.token_bytes(token_id) if known else b""
        return value


class StopHit(NamedTuple):
    """A stop string has come."""

    # how many of the tokens just given belong to the answer; the last one completed the string
    num_tokens: int
    stop: str


class Detokenizer:
    """Of one request. `update` takes tokens, `take` gives the text that is certain, `flush` ends it."""

    __slots__ = (
        "_bytes",
        "_finder",
        "_held",
        "_include_stop",
        "_is_start",
        "_min_tokens",
        "_num_of_prompt",
        "_pieces",
        "_state",
        "_unfinished",
        "num_tokens",
    )

    def __init__(
        self,
        token_bytes: Mapping[int, bytes],
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adds_space: bool = False,
    ) -> None:
        """adds_space: whether the tokenizer puts a space in front of every text."""
        self._bytes = token_bytes
        # The text begins here, with a space that is not of it.
        self._is_start = adds_space and not any(token_bytes[i] for i in prompt_token_ids)
        self._finder = stop_finder(tuple(params.stop)) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._unfinished = _unfinished_end(token_bytes, prompt_token_ids)
        # U+FFFD that decode(prompt) ends in; should they come again, they are not of the answer.
        self._num_of_prompt = len(self._unfinished.decode("utf-8", "replace"))
        self._pieces: list[str] = []  # decoded and not taken
        self._state = 0  # of the finder
        self._held = 0  # characters at the end of `_pieces` that may begin a stop string
        self.num_tokens = 0

    def update(self, token_ids: Sequence[int]) -> StopHit | None:
        """Decode what is new; on a hit the text ends there, and tokens after it count for nothing."""
        unfinished, table = self._unfinished, self._bytes
        for count, token_id in enumerate(token_ids, 1):
            data = unfinished + table[token_id]
            piece, used = utf_8_decode(data, "replace")
            unfinished = data[used:]
            if not piece:
                continue
            if self._is_start:
                piece, self._is_start = piece.removeprefix(" "), False
            if self._num_of_prompt:
                piece = self._without_the_prompts(piece)
            if self._finder is not None:
                stop = self._search(self._finder, piece, self.num_tokens + count > self._min_tokens)
                if stop is not None:
                    self.num_tokens += count
                    self._unfinished = b""
                    return StopHit(count, stop)
            self._pieces.append(piece)
        self._unfinished = unfinished
        self.num_tokens += len(token_ids)
        return None

    def take(self) -> str:
        """The text that is certain and was not taken before."""
        text = "".join(self._pieces)
        if self._held:
            split = len(text) - self._held
            self._pieces = [text[split:]]
            return text[:split]
        self._pieces.clear()
        return text

    def flush(self) -> None:
        """Nothing follows: what was kept back is text, and what is unfinished is U+FFFD."""
        self._pieces.append(self._without_the_prompts(self._unfinished.decode("utf-8", "replace")))
        self._unfinished = b""
        self._held = 0

    def _without_the_prompts(self, piece: str) -> str:
        """The first piece, after what it shares with the end of decode(prompt)."""
        num_leading = len(piece) - len(piece.lstrip(REPLACEMENT))
        num_shared, self._num_of_prompt = min(num_leading, self._num_of_prompt), 0
        return piece[num_shared:]

    def _search(self, finder: StopFinder, piece: str, may_stop: bool) -> str | None:
        """Look for the end of a stop string in `piece`; where one is, `_pieces` is cut accordingly.

        The beginning of the string is in `_pieces` still: it was held from its first character on. A string
        that is complete before `min_tokens` is passed over and cannot be found again (case B074).
        """
        state = self._state
        for end, char in enumerate(piece, 1):
            state = finder.step(state, char)
            if may_stop and (stop := finder.found[state]) is not None:
                text = "".join(self._pieces) + piece[:end]
                self._pieces = [text if self._include_stop else text[: len(text) - len(stop)]]
                self._held = 0
                return stop
        self._state = state
        self._held = finder.held[state]
        return None


class StopFinder:
    """Finds any of several strings in a stream of characters (Aho and Corasick, 1975).

    A state stands for the longest end of the text that begins one of the strings; 0 is "none does". Time per
    character does not depend on how many strings there are, and the state itself says how much to hold back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: list[str | None] = [None]  # by state: the string that is complete here
        self.held: list[int] = [0]  # by state: characters that may begin a string that is not complete
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]  # by state: that of the next shorter end that begins a string
        order = {stop: i for i, stop in reversed(list(enumerate(stops)))}
        for stop in stops:
            self._add(stop)
        queue = deque((state, 0, char) for char, state in self._next[0].items())
        while queue:  # shorter ones first, for each looks at its fallback
            state, parent, char = queue.popleft()
            shorter = self.step(self._fallback[parent], char) if parent else 0
            self._fallback[state] = shorter
            here, there = self.found[state], self.found[shorter]
            if there is not None and (here is None or order[there] < order[here]):
                self.found[state] = there
            if not self._next[state]:  # complete, and no beginning of another
                self.held[state] = self.held[shorter]
            queue.extend((child, state, c) for c, child in self._next[state].items())

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(char)) is None and state:
            state = self._fallback[state]
        return following or 0

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.found.append(None)
                self.held.append(depth)
            state = self._next[state][char]
        self.found[state] = stop


def special_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """The text of each special token -> its id."""
    return {tokenizer.token_bytes(i).decode("utf-8", "replace"): i for i in tokenizer.special_ids}


@lru_cache(maxsize=64)  # clients send the same list with every request
def stop_finder(stops: tuple[str, ...]) -> StopFinder:
    return StopFinder(stops)


def _unfinished_end(token_bytes: Mapping[int, bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes of a character that begins in the last tokens and does not end in them."""
    end = b""
    for token_id in reversed(token_ids):
        end = token_bytes[token_id] + end
        if len(end) >= LONGEST_UNFINISHED:
            break
    _, used = utf_8_decode(end, "replace")
    return end[used:]
