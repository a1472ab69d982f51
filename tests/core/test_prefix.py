"""Names of prefixes: what must differ, differs; what is equal, is found."""

import itertools
import random

import pytest

from mainspring.base.messages import EngineCoreRequest, LoRARef
from mainspring.base.params import SamplingParams
from mainspring.core import prefix
from mainspring.core.request import Request

BLOCK_SIZE = 4
SAME_TEXT = list(range(12))


def request_for(tokens, **fields) -> Request:
    message = EngineCoreRequest("r", list(tokens), SamplingParams(), **fields)
    return Request(message, 1024, [])


def hashes_of(tokens, **fields) -> list[bytes]:
    request = request_for(tokens, **fields)
    return list(prefix.extend_hashes(request, BLOCK_SIZE, len(tokens) // BLOCK_SIZE))


KEEPERS = [
    {},
    {"cache_salt": ""},
    {"cache_salt": "X"},
    {"cache_salt": "ab"},
    {"cache_salt": "a"},
    {"lora": LoRARef("X", 1)},
    {"lora": LoRARef("X", 2)},
    {"lora": LoRARef("X", 12)},
    {"lora": LoRARef("X1", 2)},
    {"lora": LoRARef("b", 1), "cache_salt": "a"},
    {"lora": LoRARef("a", 1), "cache_salt": "b"},
    {"lora": LoRARef("", 1), "cache_salt": "ab"},
    {"features": [b"X"]},
    {"features": [b"X", b"Y"]},
    {"features": [b"XY"]},
    {"features": [b"7:lora id"], "cache_salt": "a"},
]


def test_what_is_kept_apart_shares_no_block():
    """Case B047: adapters, salts and media are fields of their own, in every block of the chain."""
    for one, other in itertools.combinations(KEEPERS, 2):
        assert not set(hashes_of(SAME_TEXT, **one)) & set(hashes_of(SAME_TEXT, **other)), (one, other)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_same_again_is_found(keeper):
    """Case B047."""
    assert hashes_of(SAME_TEXT, **keeper) == hashes_of(SAME_TEXT, **keeper)


def test_a_hash_names_all_tokens_before_it():
    """A block of equal tokens after another beginning is another block."""
    one, other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]


def test_only_whole_blocks_have_names():
    request = request_for(range(11))
    assert len(prefix.extend_hashes(request, BLOCK_SIZE, 2)) == 2
    with pytest.raises(AssertionError, match="rule 3"):
        prefix.extend_hashes(request, BLOCK_SIZE, 3)


def test_no_two_of_a_hundred_thousand_prompts_collide():
    """Case B050: a hit is trusted, so the hash is a cryptographic one; twins of weaker hashes differ."""
    dice = random.Random(50)
    root = prefix.root_hash(request_for([1]).message)
    blocks = {tuple(dice.choices(range(-2, 50_000), k=BLOCK_SIZE)) for _ in range(100_000)}
    blocks |= {(-1, 0, 0, 0), (-2, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)}
    assert len({prefix.block_hash(root, list(block)) for block in blocks}) == len(blocks)


def test_names_are_the_same_in_every_process():
    """Peers and disks speak of the same blocks, so a name depends on nothing but its tokens and keepers."""
    assert hashes_of([1, 2, 3, 4])[0].hex()[:16] == "cbab0f472816b565"


def test_no_text_of_a_client_ends_the_core():
    """Intake refuses half a surrogate pair; should one come through, it is hashed like any text."""
    request = EngineCoreRequest("a", [1], SamplingParams(), cache_salt="\ud800")
    other = EngineCoreRequest("b", [1], SamplingParams(), cache_salt="\ud801")
    assert prefix.root_hash(request) != prefix.root_hash(other)
