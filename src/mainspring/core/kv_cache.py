"""Which blocks a request owns, per group of layers; what it can take over from the prefix cache.

A request's table of a group lists the blocks of its tokens in order: block i holds tokens [i * block_size,
...). Tables grow at the end only, so workers can be told of additions alone; an entry whose block was given
back because the window has passed it becomes the null block.

Rule 1. All or nothing: an operation that fails for want of blocks changes no table and no count.
Rule 2. A request that waits owns nothing, except blocks brought from elsewhere.
Rule 3. A hit leaves at least one token to be read, for a hit yields no logits.
Rule 4. A window moves with what is *booked*, never with what is planned: a step in flight still reads its
        blocks.
Rule 5. A block is published under its hash only by `publish`, which its caller may call once the step that
        writes it can no longer leave the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mainspring.base.messages import KVCacheConfig, KVCacheSpec
from mainspring.core.block_pool import NULL_BLOCK, BlockPool
from mainspring.core.prefix import extend_hashes
from mainspring.core.request import Request


class PrefixHit(NamedTuple):
    """Blocks found by hash, not held yet: valid until the pool changes, so looked up anew at every
    attempt."""

    block_table: list[list[int]]  # per group, equally long
    num_tokens: int


def max_blocks_of_request(
    spec: KVCacheSpec, block_size: int, num_tokens: int, max_in_flight_tokens: int
) -> int:
    """The most blocks of one group that a request of `num_tokens` ever holds at once.

    With a window it holds what the next row can see, what is in flight, and one more block because a window
    may start in the middle of one.
    """
    whole = -(-num_tokens // block_size)
    if spec.sliding_window is None:
        return whole
    return min(whole, -(-(spec.sliding_window - 1 + max_in_flight_tokens) // block_size) + 1)


class _Group:
    """The rules of one kind of attention."""

    def __init__(self, index: int, spec: KVCacheSpec, block_size: int, pool: BlockPool) -> None:
        self.index = index
        self.spec = spec
        self._window = spec.sliding_window
        self._block_size = block_size
        self._pool = pool

    def num_passed_blocks(self, num_tokens: int) -> int:
        """Leading blocks that no row at position `num_tokens` or later can see."""
        if self._window is None:
            return 0
        return max(0, num_tokens - self._window + 1) // self._block_size

    def longest_hit(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The longest prefix of at most `num_blocks` blocks whose visible blocks are all cached."""
        if self._window is None:
            for i in range(num_blocks):
                if self._pool.lookup(self.index, hashes[i]) is None:
                    return i
            return num_blocks
        end = i = num_blocks  # blocks [i, end) are cached
        while i > self.num_passed_blocks(end * self._block_size):
            i -= 1
            if self._pool.lookup(self.index, hashes[i]) is None:
                end = i
        return end

    def hit_blocks(self, hashes: Sequence[bytes], num_blocks: int) -> list[int]:
        passed = self.num_passed_blocks(num_blocks * self._block_size)
        found = [self._pool.lookup(self.index, block_hash) for block_hash in hashes[passed:num_blocks]]
        assert None not in found
        return [NULL_BLOCK] * passed + [block for block in found if block is not None]


class KVCacheManager:
    def __init__(self, config: KVCacheConfig, *, enable_caching: bool, max_in_flight_tokens: int) -> None:
        """`max_in_flight_tokens`: most tokens of a request whose steps are not booked, pipeline depth x step
        budget."""
        self.block_size = config.block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(config.num_blocks, len(config.groups))
        self._groups = [
            _Group(i, group.spec, config.block_size, self.pool) for i, group in enumerate(config.groups)
        ]
        # Full attention first: its hits only ever get shorter, so the search for a common length ends
        # soonest.
        self._search_order = sorted(self._groups, key=lambda group: group.spec.sliding_window is not None)
        self._max_in_flight_tokens = max_in_flight_tokens

    # -- finding -------------------------------------------------------------------------------------------

    def find_cached_prefix(self, request: Request) -> PrefixHit:
        """The longest prefix that every group has, in whole blocks, leaving a token to read. Holds
        nothing."""
        if not self.enable_caching or not request.may_read_prefix_cache:
            return PrefixHit([[] for _ in self._groups], 0)
        num_blocks = (len(request.token_ids) - 1) // self.block_size
        hashes = extend_hashes(request, self.block_size, num_blocks)
        agreed = -1
        while agreed != num_blocks:
            agreed = num_blocks
            for group in self._search_order:
                num_blocks = group.longest_hit(hashes, num_blocks)
        table = [group.hit_blocks(hashes, num_blocks) for group in self._groups]
        return PrefixHit(table, num_blocks * self.block_size)

    def num_blocks_for_whole(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most at once: the admission gate's measure."""
        return sum(
            max_blocks_of_request(group.spec, self.block_size, num_tokens, self._max_in_flight_tokens)
            for group in self._groups
        )

    # -- owning --------------------------------------------------------------------------------------------

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int, num_reserved: int) -> bool:
        """Own the blocks of `hit` and new ones up to `num_tokens` tokens, if the whole sequence as it is now
        would fit and leave `num_reserved` blocks idle; else False and no change (rule 1)."""
        assert not request.block_table, f"{request.request_id} already owns blocks"
        hit_blocks = [block for blocks in hit.block_table for block in blocks if block != NULL_BLOCK]
        # an idle block that is hit is no longer free (case B044)
        revived = sum(map(self.pool.is_idle, hit_blocks))
        whole = max(0, self.num_blocks_for_whole(len(request.token_ids)) - len(hit_blocks))
        now = sum(-(-num_tokens // self.block_size) - len(blocks) for blocks in hit.block_table)
        if max(whole, now) + revived + num_reserved > self.pool.num_idle:
            return False
        self.pool.touch(hit_blocks)  # of all groups, before anything is taken: taking could evict them
        request.block_table = [list(blocks) for blocks in hit.block_table]
        request.num_published_blocks = hit.num_tokens // self.block_size
        grown = self.grow(request, num_tokens)
        assert grown is not None
        return True

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Own blocks for tokens [0, num_tokens): the new ones per group, or None and no change but that
        blocks which the window has passed are given back."""
        self._trim(request)
        num_blocks = -(-num_tokens // self.block_size)
        needs = [max(0, num_blocks - len(blocks)) for blocks in request.block_table]
        taken = self.pool.take(sum(needs))
        if taken is None:
            return None
        added = []
        for blocks, need in zip(request.block_table, needs, strict=True):
            added.append(taken[:need])
            del taken[:need]
            blocks += added[-1]
        return added

    def can_hold(self, request: Request, num_tokens: int, num_reserved: int = 0) -> bool:
        """Whether a request that owns blocks already could grow to `num_tokens` tokens."""
        owned = sum(block != NULL_BLOCK for blocks in request.block_table for block in blocks)
        return self.num_blocks_for_whole(num_tokens) - owned + num_reserved <= self.pool.num_idle

    def could_own(self, num_tokens: int) -> bool:
        """Whether the whole pool has blocks for all of `num_tokens` tokens at once, windows or not."""
        return len(self._groups) * -(-num_tokens // self.block_size) < self.pool.num_blocks

    def num_tokens_owned(self, request: Request) -> int:
        """Tokens that fit into the blocks `request` owns. All groups own equally many, window-passed ones
        included."""
        return len(request.block_table[0]) * self.block_size if request.block_table else 0

    def free(self, request: Request) -> None:
        for blocks in request.block_table:
            self.pool.release(reversed(blocks))
        request.block_table = []
        request.num_published_blocks = 0

    def _trim(self, request: Request) -> None:
        for group, blocks in zip(self._groups, request.block_table, strict=True):
            passed = group.num_passed_blocks(request.num_booked_tokens)
            for i in range(passed - 1, -1, -1):
                if blocks[i] == NULL_BLOCK:
                    break
                self.pool.release((blocks[i],))
                blocks[i] = NULL_BLOCK

    # -- remembering ---------------------------------------------------------------------------------------

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks of the first `num_tokens` tokens (rule 5); those must be known."""
        if not self.enable_caching:
            return
        num_blocks = num_tokens // self.block_size
        first = request.num_published_blocks
        if num_blocks <= first:
            return
        hashes = extend_hashes(request, self.block_size, num_blocks)
        for group, blocks in zip(self._groups, request.block_table, strict=True):
            for i in range(first, num_blocks):
                if blocks[i] != NULL_BLOCK:
                    self.pool.remember(blocks[i], group.index, hashes[i])
        request.num_published_blocks = num_blocks

    def reset_prefix_cache(self) -> bool:
        """Forget all; False, and no change, while any block is held."""
        return self.pool.forget_all()

    # -- checking ------------------------------------------------------------------------------------------

    def check(self, requests: Iterable[Request]) -> None:
        held: dict[int, int] = {}
        for request in requests:
            if not request.block_table:
                continue
            lengths = {len(blocks) for blocks in request.block_table}
            assert len(lengths) == 1, f"{request.request_id}: tables of {lengths} blocks"
            assert request.num_computed_tokens <= self.num_tokens_owned(request), (
                f"{request.request_id}: too few blocks"
            )
            for group, blocks in zip(self._groups, request.block_table, strict=True):
                visible = blocks[group.num_passed_blocks(request.num_booked_tokens) :]
                assert NULL_BLOCK not in visible, (
                    f"rule 4: {request.request_id} lost a block it can still see"
                )
                own = [block for block in blocks if block != NULL_BLOCK]
                assert len(own) == len(set(own)), f"{request.request_id} has a block twice"
                for block in own:
                    held[block] = held.get(block, 0) + 1
        self.pool.check(held)
