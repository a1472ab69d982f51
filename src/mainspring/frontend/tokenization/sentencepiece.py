"""SentencePiece: what it does to a text, and its BPE, from pieces and their scores alone.

A text is normalised, gets a space in front, and spaces become U+2581. Texts that users have defined are found
first. What is between them is cut into pieces by the model: `BytePairs` here, or the library's unigram model.

Byte pairs: of all neighbours whose concatenation is a piece, those with the best score are joined first, the
leftmost among equals, until none are left. What then is no piece becomes its UTF-8 bytes, where the
vocabulary has tokens for bytes, or else the unknown token, one for a whole run.

Tables of merges, which other libraries want, say nearly the same, but not quite: a piece that can be made of
two pairs has one score and would have two ranks. They would take seconds to make for a vocabulary of a
quarter million, and a second to read if they were kept; pieces and scores are there as soon as the file is
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from mainspring.frontend.tokenization.literals import pattern_of
from mainspring.frontend.tokenization.spelling import SPACE

LONGEST_REMEMBERED = 64  # characters
MOST_REMEMBERED = 1 << 16  # words

Cutter = Callable[[str], list[int]]  # a text with U+2581 for spaces -> ids of its pieces


class SentencePieceEncoder:
    def __init__(
        self,
        cutter: Cutter,
        *,
        user_defined: Mapping[str, int],
        add_space_prefix: bool,
        remove_extra_spaces: bool,
        normalise: Callable[[str], str] | None = None,
    ) -> None:
        self._cutter = cutter
        self._user_defined = {text.replace(" ", SPACE): i for text, i in user_defined.items()}
        self._fixed = pattern_of(self._user_defined)
        self._prefix = SPACE if add_space_prefix else ""
        self._remove_extra_spaces = remove_extra_spaces
        self._normalise = normalise

    def encode(self, text: str, is_start: bool) -> list[int]:
        """Every text gets the space in front, whether a special token comes before it or nothing."""
        if self._normalise is not None:
            text = self._normalise(text)
        if self._remove_extra_spaces:
            text = re.sub(" {2,}", " ", text.strip(" "))
        if not text:
            return []
        found: list[int] = []
        for i, piece in enumerate(self._fixed.split(self._prefix + text.replace(" ", SPACE))):
            if i % 2:
                found.append(self._user_defined[piece])
            elif piece:
                found += self._cutter(piece)
        return found


class BytePairs:
    """Immutable but for its memory, safe to use from several threads.

    Text is cut into words first, where no piece could span the cut: before a space, but for the characters
    that some piece has before one. What is joined on one side of such a cut cannot depend on the other. Words
    come again, so their ids are remembered.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        costs: Sequence[float],
        *,
        byte_ids: Mapping[int, int],
        unknown_id: int | None,
    ) -> None:
        """`ids`: of ordinary pieces. `costs`: their scores, negated, by id. `byte_ids`: byte -> id, of all
        bytes or none. `unknown_id` None: what has no id is left out."""
        self._ids = ids
        self._costs = costs
        self._bytes = byte_ids
        self._unknown_id = unknown_id
        joined = {SPACE, *re.findall(f"(?s)(.){SPACE}", "\0".join(ids))}  # what a piece has before a space
        self._cut = re.compile(f"(?<=[^{re.escape(''.join(sorted(joined)))}])(?={SPACE})")
        self._words: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        found: list[int] = []
        for word in self._cut.split(text):
            found += self._word(word)
        return found if self._bytes else self._fused(found)

    def _word(self, word: str) -> list[int]:
        found = self._words.get(word)
        if found is None:
            found = self._ids_of(self._joined(word))
            if len(word) <= LONGEST_REMEMBERED:
                if len(self._words) >= MOST_REMEMBERED:
                    self._words.clear()
                self._words[word] = found
        return found

    def _joined(self, word: str) -> list[str]:
        """The pieces that `word` becomes."""
        find, costs = self._ids.get, self._costs
        pieces = list(word)  # "" for one that was joined to the one on its left
        end = len(pieces)
        after, before = list(range(1, end + 1)), list(range(-1, end - 1))
        heap = [  # cost of joining, where, how long it will be
            (costs[id_], i, 2) for i in range(end - 1) if (id_ := find(word[i : i + 2])) is not None
        ]
        heapify(heap)
        while heap:
            _, i, length = heappop(heap)
            j = after[i]
            if not pieces[i] or j == end or len(pieces[i]) + len(pieces[j]) != length:
                continue  # one of them has been joined to another since
            joined = pieces[i] = pieces[i] + pieces[j]
            pieces[j] = ""
            j = after[i] = after[j]
            if j < end:
                before[j] = i
                if (id_ := find(joined + pieces[j])) is not None:
                    heappush(heap, (costs[id_], i, length + len(pieces[j])))
            if (j := before[i]) >= 0 and (id_ := find(pieces[j] + joined)) is not None:
                heappush(heap, (costs[id_], j, length + len(pieces[j])))
        return [piece for piece in pieces if piece]

    def _ids_of(self, pieces: list[str]) -> list[int]:
        found: list[int] = []
        for piece in pieces:
            if (known := self._ids.get(piece)) is not None:
                found.append(known)
            elif self._bytes:
                found += map(self._bytes.__getitem__, piece.encode())
            elif self._unknown_id is not None:
                found.append(self._unknown_id)
        return found

    def _fused(self, ids: list[int]) -> list[int]:
        unknown = self._unknown_id
        return [i for before, i in zip([None, *ids], ids, strict=False) if i != unknown or before != unknown]
