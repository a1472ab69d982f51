"""Texts that are found in text before anything else is: the first there is, and of those the longest.

As a pattern that shares common beginnings, for a vocabulary may have six thousand of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mainspring.base.errors import CheckpointError

_END = ""  # the key that says that a text may end here
_Trie = dict[str, "_Trie"]


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `texts` at a place; nothing, if there are none. Its one group is the whole.

    Raises `CheckpointError` for texts that begin each other in more levels than a pattern can have.
    """
    trie: _Trie = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    trie.pop(_END, None)  # an empty text is found nowhere
    try:
        return re.compile(f"({_pattern(trie) or '(?!)'})")
    except RecursionError:
        raise CheckpointError("special tokens begin each other in too many levels") from None


def _pattern(node: _Trie) -> str:
    shared = []
    while len(node) == 1 and _END not in node:  # the way on is clear
        [(character, node)] = node.items()
        shared.append(character)
    ways = [re.escape(character) + _pattern(child) for character, child in node.items() if character]
    rest = f"(?:{'|'.join(ways)})" if ways else ""
    return re.escape("".join(shared)) + (f"{rest}?" if rest and _END in node else rest)
