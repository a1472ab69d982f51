"""The pool against a model so plain that it is plainly right."""

import random

import pytest

from mainspring.core.block_pool import NULL_BLOCK, BlockPool


class PlainPool:
    """The same rules with a list: `idle` in eviction order, searched from end to end."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.idle = list(range(1, num_blocks))
        self.hash_of: dict[int, bytes] = {}

    def take(self, n: int) -> list[int] | None:
        if n > len(self.idle):
            return None
        taken, self.idle = self.idle[:n], self.idle[n:]
        for block in taken:
            self.refs[block] = 1
            self.hash_of.pop(block, None)
        return taken

    def touch(self, block: int) -> None:
        if block in self.idle:
            self.idle.remove(block)
        self.refs[block] += 1

    def release(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.idle.insert(len(self.idle) if block in self.hash_of else 0, block)

    def remember(self, block: int, block_hash: bytes) -> None:
        if block not in self.hash_of and block_hash not in self.hash_of.values():
            self.hash_of[block] = block_hash

    def lookup(self, block_hash: bytes) -> int | None:
        return next((block for block, known in self.hash_of.items() if known == block_hash), None)


def eviction_order(pool: BlockPool) -> list[int]:
    return list(pool._idle)


def test_a_hundred_thousand_operations_agree_with_the_plain_model():
    """Case B043: any order of taking, touching, releasing, remembering and forgetting keeps contents and
    order.
    """
    dice = random.Random(43)
    num_blocks = 24
    pool, plain = BlockPool(num_blocks), PlainPool(num_blocks)
    held: list[int] = []  # with repetitions, one per reference
    for step in range(100_000):
        what = dice.random()
        if what < 0.3:
            n = dice.randint(0, 4)
            taken = pool.take(n)
            assert taken == plain.take(n)
            held += taken or []
        elif what < 0.5:
            block_hash = b"%d" % dice.randint(0, 30)
            found = pool.lookup(0, block_hash)
            assert found == plain.lookup(block_hash)
            if found is not None:
                pool.touch([found])
                plain.touch(found)
                held.append(found)
        elif what < 0.8:
            for _ in range(min(len(held), dice.randint(1, 4))):
                block = held.pop(dice.randrange(len(held)))
                pool.release([block])
                plain.release(block)
        elif what < 0.998:
            if held:
                block, block_hash = dice.choice(held), b"%d" % dice.randint(0, 30)
                pool.remember(block, 0, block_hash)
                plain.remember(block, block_hash)
        else:
            assert pool.forget_all() == (not held)
            if not held:
                plain.hash_of.clear()
        assert pool.num_idle == len(plain.idle)
        if step % 50 == 0:
            assert eviction_order(pool) == plain.idle
            pool.check({block: held.count(block) for block in set(held)})


def test_the_tail_of_a_request_is_forgotten_before_its_head():
    """Case B043: released last block first, a cached prefix loses its end first and stays usable."""
    pool = BlockPool(5)
    blocks = pool.take(4)
    assert blocks is not None
    for i, block in enumerate(blocks):
        pool.remember(block, 0, b"%d" % i)
    pool.release(reversed(blocks))
    pool.take(2)
    assert [pool.lookup(0, b"%d" % i) is not None for i in range(4)] == [True, True, False, False]


def test_blocks_that_nobody_can_find_are_used_first():
    pool = BlockPool(5)
    named, nameless = pool.take(2), pool.take(2)
    assert named is not None
    assert nameless is not None
    for i, block in enumerate(named):
        pool.remember(block, 0, b"%d" % i)
    pool.release(reversed(named))
    pool.release(reversed(nameless))
    assert set(pool.take(2) or ()) == set(nameless)
    assert pool.lookup(0, b"0") == named[0]


def test_too_few_blocks_take_nothing():
    """Case B044: a take that fails leaves order, counts and memory as they were."""
    pool = BlockPool(6)
    blocks = pool.take(3)
    assert blocks is not None
    pool.remember(blocks[0], 0, b"kept")
    pool.release([blocks[0]])
    before = eviction_order(pool)
    assert pool.take(4) is None
    assert eviction_order(pool) == before
    assert pool.lookup(0, b"kept") == blocks[0]


def test_a_block_that_is_shared_is_held_until_the_last_lets_go():
    pool = BlockPool(3)
    [block] = pool.take(1) or [NULL_BLOCK]
    pool.remember(block, 0, b"x")
    pool.touch([block])
    pool.release([block])
    assert not pool.is_idle(block)
    pool.release([block])
    assert pool.is_idle(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release([block])


def test_an_evicted_block_is_found_no_more():
    pool = BlockPool(2)
    [block] = pool.take(1) or [NULL_BLOCK]
    pool.remember(block, 0, b"x")
    pool.release([block])
    assert pool.lookup(0, b"x") == block
    pool.take(1)
    assert pool.lookup(0, b"x") is None


def test_forgetting_everything_needs_everything_idle():
    """Case B056: a reset that cannot be done says so and does nothing."""
    pool = BlockPool(4)
    [block] = pool.take(1) or [NULL_BLOCK]
    pool.remember(block, 0, b"x")
    assert not pool.forget_all()
    assert pool.lookup(0, b"x") == block
    pool.release([block])
    assert pool.forget_all()
    assert pool.lookup(0, b"x") is None


def test_groups_have_names_of_their_own():
    pool = BlockPool(4, num_groups=2)
    a, b = pool.take(2) or [0, 0]
    pool.remember(a, 0, b"x")
    assert pool.lookup(1, b"x") is None
    pool.remember(b, 1, b"x")
    assert (pool.lookup(0, b"x"), pool.lookup(1, b"x")) == (a, b)
