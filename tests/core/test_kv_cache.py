"""Tables, hits and gates of the KV manager, without a scheduler."""

import pytest

from mainspring.base.messages import EngineCoreRequest, KVCacheConfig, KVCacheGroup, KVCacheSpec
from mainspring.base.params import SamplingParams
from mainspring.core.kv_cache import KVCacheManager, max_blocks_of_request
from mainspring.core.request import Request

FULL, WINDOW = KVCacheSpec(1, 1), KVCacheSpec(1, 1, sliding_window=6)
BLOCK_SIZE = 4


def manager(num_blocks: int, *specs: KVCacheSpec, caching: bool = True) -> KVCacheManager:
    groups = tuple(KVCacheGroup((i,), spec) for i, spec in enumerate(specs or (FULL,)))
    config = KVCacheConfig(num_blocks, BLOCK_SIZE, groups)
    return KVCacheManager(config, enable_caching=caching, max_in_flight_tokens=8)


def request(num_tokens: int, name: str = "r", **params) -> Request:
    message = EngineCoreRequest(name, list(range(num_tokens)), SamplingParams(**params))
    return Request(message, 1024, [])


def admit(kv: KVCacheManager, one: Request, num_tokens: int | None = None, reserved: int = 0) -> bool:
    hit = kv.find_cached_prefix(one)
    return kv.admit(one, hit, num_tokens or len(one.token_ids), reserved)


def compute(one: Request, num_tokens: int) -> None:
    one.num_computed_tokens = one.num_booked_tokens = num_tokens


def test_a_hit_leaves_a_token_to_read():
    """A hit yields no logits, so a prompt of whole blocks, all cached, is short of its last one."""
    kv, first = manager(20), request(12, "a")
    assert admit(kv, first)
    kv.publish(first, 12)
    hits = {n: kv.find_cached_prefix(request(n)).num_tokens for n in (4, 5, 8, 9, 12, 13, 20)}
    assert hits == {4: 0, 5: 4, 8: 4, 9: 8, 12: 8, 13: 12, 20: 12}


def test_a_longer_common_beginning_is_never_a_shorter_hit():
    kv, first = manager(20), request(16, "a")
    assert admit(kv, first)
    kv.publish(first, 16)
    hits = [kv.find_cached_prefix(request(n)).num_tokens for n in range(1, 40)]
    assert hits == sorted(hits)


@pytest.mark.parametrize("params", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_some_requests_do_not_read_the_cache_but_fill_it(params):
    kv, first = manager(20), request(12, "a", **params)
    assert admit(kv, first)
    kv.publish(first, 12)
    assert kv.find_cached_prefix(request(12, **params)).num_tokens == 0
    assert kv.find_cached_prefix(request(12)).num_tokens == 8


def test_without_caching_nothing_is_found():
    kv, first = manager(20, caching=False), request(12, "a")
    assert admit(kv, first)
    kv.publish(first, 12)
    assert kv.find_cached_prefix(request(12)).num_tokens == 0


def test_the_whole_sequence_must_fit_before_its_first_chunk():
    kv = manager(1 + 3)
    assert not admit(kv, request(13), num_tokens=4)
    assert kv.pool.num_idle == 3
    assert admit(kv, request(12), num_tokens=4)
    assert kv.pool.num_idle == 2


def test_reserved_blocks_stay_idle():
    kv = manager(1 + 4)
    assert not admit(kv, request(12), reserved=2)
    assert admit(kv, request(12), reserved=1)


def test_a_hit_that_is_idle_is_not_free_as_well():
    """Case B044: what the hit wakes up cannot be given to the rest of the same prompt."""
    kv, first = manager(1 + 4), request(8, "a")
    assert admit(kv, first)
    kv.publish(first, 8)
    kv.free(first)
    kv.check([])
    long = request(20, "b")
    assert kv.find_cached_prefix(long).num_tokens == 8
    assert not admit(kv, long)
    kv.check([])
    assert admit(kv, request(16, "c"))


def test_growth_that_fails_changes_nothing():
    kv, one = manager(1 + 3), request(8)
    assert admit(kv, one)
    table = [list(blocks) for blocks in one.block_table]
    assert kv.grow(one, 17) is None
    assert one.block_table == table
    assert kv.pool.num_idle == 1
    kv.check([one])


def test_tables_only_grow_at_their_end():
    kv, one = manager(20), request(6)
    assert admit(kv, one)
    before = list(one.block_table[0])
    added = kv.grow(one, 14)
    assert one.block_table[0] == before + (added or [[]])[0]
    assert kv.grow(one, 14) == [[]]


def test_a_window_lets_go_of_what_it_has_passed_once_that_is_booked():
    """With a window of 6 the token at position 10 still sees position 5, which is in block 1."""
    kv, one = manager(20, FULL, WINDOW), request(24)
    assert admit(kv, one)
    one.num_computed_tokens = 20  # planned only
    kv.grow(one, 24)
    assert 0 not in one.block_table[1]
    one.num_booked_tokens = 10
    kv.grow(one, 24)
    assert [block == 0 for block in one.block_table[1]] == [True] + [False] * 5
    one.num_booked_tokens = 13  # now position 8 is the first that is seen
    kv.grow(one, 24)
    assert [block == 0 for block in one.block_table[1]] == [True, True] + [False] * 4
    assert 0 not in one.block_table[0]
    kv.check([one])


def test_a_hit_needs_only_what_the_window_sees():
    """The windowed group may have lost its first blocks; the full one must have all of them."""
    kv, first = manager(40, FULL, WINDOW), request(24, "a")
    assert admit(kv, first)
    kv.publish(first, 24)
    compute(first, 20)
    kv.grow(first, 24)  # gives block 0 to 2 of the windowed group back
    other = request(22, "b")
    hit = kv.find_cached_prefix(other)
    assert hit.num_tokens == 20
    assert [block == 0 for block in hit.block_table[1]] == [True, True, True, False, False]
    assert kv.admit(other, hit, 22, 0)
    compute(other, 20)
    kv.check([first, other])


def test_a_gap_in_the_window_shortens_the_hit_for_all():
    kv, first = manager(40, FULL, WINDOW), request(24, "a")
    assert admit(kv, first)
    kv.publish(first, 24)
    kv.pool._forget(first.block_table[1][4])
    hit = kv.find_cached_prefix(request(24, "b"))
    assert hit.num_tokens == 16
    assert [len(blocks) for blocks in hit.block_table] == [4, 4]


@pytest.mark.parametrize(
    ("window", "num_tokens", "in_flight", "blocks"),
    [(None, 17, 8, 5), (6, 4, 8, 1), (6, 400, 8, 5), (1, 400, 1, 2), (6, 12, 8, 3), (400, 40, 8, 10)],
)
def test_most_blocks_at_once(window, num_tokens, in_flight, blocks):
    spec = KVCacheSpec(1, 1, sliding_window=window)
    assert max_blocks_of_request(spec, BLOCK_SIZE, num_tokens, in_flight) == blocks


def test_a_reset_needs_every_block_idle():
    kv, one = manager(20), request(12)
    assert admit(kv, one)
    kv.publish(one, 12)
    assert not kv.reset_prefix_cache()
    kv.free(one)
    assert kv.reset_prefix_cache()
    assert kv.find_cached_prefix(request(12)).num_tokens == 0
