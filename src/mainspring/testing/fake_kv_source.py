"""KV that exists elsewhere, arrives when a test wants it to, or never does.

`FakeKVSource` is the scheduler's half of a connector; the workers' half is in `FakeExecutor`, and what passes
between them is a list of `Load`s as msgspec bytes. Until a load has arrived its blocks hold noise; when it
fails they hold noise for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from mainspring.base.messages import EngineCoreRequest

NULL_BLOCK = 0


class RemotePrefix(NamedTuple):
    """What exists elsewhere of one request, and how bringing it will go."""

    num_tokens: int
    delay_steps: int = 0  # steps that pass before the outcome is known
    fails: bool = False


class Load(msgspec.Struct, array_like=True):
    """Bring the KV of `token_ids[start:]`, from a block's beginning on, into the blocks of whole tables."""

    request_id: str
    token_ids: list[int]
    block_ids: tuple[list[int], ...]
    start: int
    delay_steps: int
    fails: bool

    def blocks(self, block_size: int) -> set[int]:
        """Those that are being filled, without the null block."""
        return {block for ids in self.block_ids for block in ids[self.start // block_size :]} - {NULL_BLOCK}


def decode_loads(metadata: bytes) -> list[Load]:
    return msgspec.msgpack.decode(metadata, type=list[Load])


class FakeKVSource:
    """Fits `base.protocols.KVSource`. `prefixes` lists by request id what each attempt will find."""

    def __init__(self, prefixes: Mapping[str, Sequence[RemotePrefix]], block_size: int) -> None:
        self._attempts = {request_id: list(prefix) for request_id, prefix in prefixes.items()}
        self._block_size = block_size
        self._tokens: dict[str, list[int]] = {}
        self._pending: list[Load] = []
        self.num_loads = 0

    def num_matched_tokens(self, request: EngineCoreRequest, num_local_tokens: int) -> int:
        attempts = self._attempts.get(request.request_id)
        if not attempts:
            return 0
        tokens = request.prompt_token_ids + request.output_token_ids
        self._tokens[request.request_id] = tokens
        there = min(attempts[0].num_tokens, len(tokens) - 1) // self._block_size * self._block_size
        return max(0, there - num_local_tokens)

    def start_load(
        self, request_id: str, block_ids: tuple[list[int], ...], start: int, num_tokens: int
    ) -> None:
        prefix = self._attempts[request_id].pop(0)
        tokens = self._tokens[request_id][: start + num_tokens]
        self._pending.append(Load(request_id, tokens, block_ids, start, prefix.delay_steps, prefix.fails))
        self.num_loads += 1

    def metadata(self) -> bytes | None:
        if not self._pending:
            return None
        data = msgspec.msgpack.encode(self._pending)
        self._pending.clear()
        return data
