"""Names for prefixes: the hash of a full block names every token up to its end, and for whom they were
computed.

Rule 1. Hashes are chained: that of a block covers the hash of the block before it.
Rule 2. The chain begins with a root that covers everything besides tokens that changes what the KV holds
        (adapter, media) or who may see it (salt). Each such field is tagged and length-prefixed, so that no
        two fields and no two values can stand for one another (case B047).
Rule 3. Only tokens whose value is known are hashed, and only whole blocks.

SHA-256, because a client chooses the tokens and a hit is trusted (case B050).
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from mainspring.base.messages import EngineCoreRequest
from mainspring.core.request import Request

VERSION = b"mainspring kv 1"


def root_hash(message: EngineCoreRequest) -> bytes:
    """What stands before the first block of a request."""
    fields = [VERSION]
    if message.lora is not None:
        fields.append(_field(b"lora", _bytes(message.lora.name)))
        fields.append(_field(b"lora id", str(message.lora.load_id).encode()))
    if message.cache_salt is not None:
        fields.append(_field(b"salt", _bytes(message.cache_salt)))
    fields += [_field(b"media", item) for item in message.features or ()]
    return sha256(b"".join(fields)).digest()


def _bytes(text: str) -> bytes:
    """Whatever a client sent: intake refuses lone surrogates, and here they must not end the core."""
    return text.encode("utf-8", "surrogatepass")


def _field(tag: bytes, value: bytes) -> bytes:
    return b"%d:%b%d:%b" % (len(tag), tag, len(value), value)


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    return sha256(parent + array("i", tokens).tobytes()).digest()


def extend_hashes(request: Request, block_size: int, num_blocks: int) -> list[bytes]:
    """The hashes of the first `num_blocks` blocks at least; their tokens must be known."""
    hashes = request.block_hashes
    assert num_blocks * block_size <= len(request.token_ids), "rule 3: a token without a value is hashed"
    while len(hashes) < num_blocks:
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_hash(request.message)
        hashes.append(block_hash(parent, request.token_ids[start : start + block_size]))
    return hashes
