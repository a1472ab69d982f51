"""Fixed-size KV blocks: who holds them, and what they still remember.

Rule 1. A block is *held* (refs > 0) or *idle* (refs == 0 and listed in `_idle`), never both. Block 0, the
        null block, is neither: it pads tables and is never written.
Rule 2. An idle block keeps its content, and its hash if it had one, until it is taken again.
Rule 3. `_idle` is in eviction order: the block at the front is the next to be forgotten. Blocks without a
        hash are put in front, for they are of no use to anybody; the others go to the back as they are
        released.
Rule 4. A hash names at most one block of a group, and a block has at most one hash.

A hash is trusted: tokens are not compared on a hit, so it must be of SHA-256's class (`prefix.py`).

`check()` tests what can be seen from here. It is called after every step in tests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockPool:
    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        """`num_blocks` counts the null block."""
        assert num_blocks >= 2, f"{num_blocks} blocks, of which one is the null block"
        self.num_blocks = num_blocks
        self.num_releases = 0  # grows whenever a block becomes idle: "is it worth trying again?"
        self._refs = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._by_hash: list[dict[bytes, int]] = [{} for _ in range(num_groups)]

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def usage(self) -> float:
        """Blocks held / blocks there are; idle ones count as free whatever they remember."""
        return 1.0 - len(self._idle) / (self.num_blocks - 1)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def take(self, n: int) -> list[int] | None:
        """Hold `n` blocks, forgetting what they remembered; None, and no change, if too few are idle."""
        if n > len(self._idle):
            return None
        return [self._take_one() for _ in range(n)]

    def _take_one(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._refs[block] = 1
        self._forget(block)
        return block

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found by their hash; idle ones among them are idle no more."""
        for block in blocks:
            if block != NULL_BLOCK:
                if self._refs[block] == 0:
                    del self._idle[block]
                self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go. Pass a request's blocks last one first, so that its tail is evicted before its head."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released more often than held"
            if self._refs[block] == 0:
                self._idle[block] = None
                if block not in self._key_of:
                    self._idle.move_to_end(block, last=False)
                self.num_releases += 1

    def remember(self, block: int, group: int, block_hash: bytes) -> None:
        """From now on `block_hash` finds `block`, unless another block has that hash: the first one stays,
        since block tables only grow and are never pointed at a twin."""
        assert self._refs[block] > 0, f"block {block} is not held"
        if block not in self._key_of and block_hash not in self._by_hash[group]:
            self._by_hash[group][block_hash] = block
            self._key_of[block] = (group, block_hash)

    def lookup(self, group: int, block_hash: bytes) -> int | None:
        return self._by_hash[group].get(block_hash)

    def forget_all(self) -> bool:
        """Drop every hash; False, and no change, while any block is held."""
        if len(self._idle) != self.num_blocks - 1:
            return False
        self._key_of.clear()
        for by_hash in self._by_hash:
            by_hash.clear()
        return True

    def _forget(self, block: int) -> None:
        if (key := self._key_of.pop(block, None)) is not None:
            group, block_hash = key
            del self._by_hash[group][block_hash]

    def check(self, held: dict[int, int]) -> None:
        """`held` says how many live tables hold each block."""
        for block in range(1, self.num_blocks):
            refs, idle = self._refs[block], block in self._idle
            assert (refs > 0) != idle, f"rule 1: block {block} has {refs} refs and idle is {idle}"
            assert refs == held.get(block, 0), f"block {block}: {refs} refs, in {held.get(block, 0)} tables"
        assert NULL_BLOCK not in self._idle, "rule 1: the null block is idle"
        assert self._refs[NULL_BLOCK] == 0, "rule 1: the null block is held"
        assert NULL_BLOCK not in self._key_of, "the null block has a hash"
        named = {
            block: (group, block_hash)
            for group, by_hash in enumerate(self._by_hash)
            for block_hash, block in by_hash.items()
        }
        assert named == self._key_of, "rule 4"
