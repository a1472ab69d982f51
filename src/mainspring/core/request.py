"""One request as the core sees it: its tokens, how far they are computed, where it stands.

Rule 1. There are no phases. A request is (`token_ids`, `num_computed_tokens`); what is left to do is a
        difference.
Rule 2. `num_computed_tokens` runs ahead: it counts tokens whose step was *planned*. `num_booked_tokens`
        counts those whose step has come back. Between them lies what is in flight; nothing else counts it.
Rule 3. A sampled token is in `token_ids` once its step is booked. Until then it has a place and no value: a
        request with `num_computed_tokens >= len(token_ids)` waits for the value, but its next step can be
        planned already.
Rule 4. `generation` names one stay in a slot. Leaving the slot, however it happens, takes it away, and with
        it every result still to come.
"""

from __future__ import annotations

from enum import IntEnum

from mainspring.base.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
)
from mainspring.base.protocols import Grammar

NO_GENERATION = -1
NO_SLOT = -1


class Status(IntEnum):
    WAITING = 0  # in the queue
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1  # parked until it is compiled
    WAITING_FOR_REMOTE_KVS = 2  # parked, holding the blocks that are being filled
    RUNNING = 3  # has a slot
    PREEMPTED = 4  # in the queue again, everything to be computed anew
    FINISHED = 5


MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.WAITING_FOR_REMOTE_KVS, Status.RUNNING, Status.FINISHED}),
    Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: frozenset({Status.WAITING, Status.FINISHED}),
    Status.WAITING_FOR_REMOTE_KVS: frozenset({Status.WAITING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.WAITING_FOR_REMOTE_KVS, Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Request:
    """Made from an `EngineCoreRequest`, which it keeps; every other field is the core's own."""

    __slots__ = (
        "attend_at",
        "block_hashes",
        "block_table",
        "eos_token_id",
        "events",
        "finish_reason",
        "generation",
        "grammar",
        "has_delivered",
        "last_step",
        "max_total_tokens",
        "message",
        "min_total_tokens",
        "num_booked_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "outbox",
        "quiet_until",
        "request_id",
        "sequence",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
        "tried_source",
    )

    def __init__(
        self, message: EngineCoreRequest, max_model_len: int, outbox: list[EngineCoreOutput]
    ) -> None:
        params = message.sampling_params
        self.message = message
        self.request_id = message.request_id
        self.outbox = outbox  # where its client's outputs of this step gather
        self.token_ids = message.prompt_token_ids + message.output_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        limit = max_model_len if params.max_tokens is None else self.num_prompt_tokens + params.max_tokens
        if self.is_pooled:
            limit = self.num_prompt_tokens
        self.max_total_tokens = min(max_model_len, limit)
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens
        self.eos_token_id = message.eos_token_id
        eos = () if message.eos_token_id is None else (message.eos_token_id,)
        self.stop_token_ids = frozenset((*message.stop_token_ids, *eos))
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.sequence = 0  # order of arrival at the scheduler
        self.slot = NO_SLOT
        self.generation = NO_GENERATION
        self.num_computed_tokens = 0
        self.num_booked_tokens = 0
        # Below this many computed tokens the next step of the request is one token into a block it owns, with
        # room left in every limit: nothing to decide. 0 while it has more than one token to read.
        self.quiet_until = 0
        # From this many tokens on booking has more to do than append: a limit, a block that is full. 0:
        # always.
        self.attend_at = 0
        self.block_table: list[list[int]] = []  # per KV group; only the KVCacheManager writes it
        self.block_hashes: list[bytes] = []  # of the full blocks of token_ids, extended when asked for
        self.num_published_blocks = 0
        self.grammar: Grammar | None = None
        # outputs were sent, by this core or an earlier one
        self.has_delivered = bool(message.output_token_ids)
        self.num_cached_tokens: int | None = None  # found at first admission
        self.num_preemptions = 0
        self.last_step = 0  # in which it had a row; kept only where a pipeline of stages runs the steps
        self.tried_source = False  # KV from elsewhere is asked for once
        self.events: list[EngineCoreEvent] = []

    @property
    def num_todo(self) -> int:
        """Tokens to be read before the next one can be sampled; 0 when every one it may have is promised."""
        known, computed = len(self.token_ids), self.num_computed_tokens
        if computed < known:
            return known - computed
        return 1 if computed < self.max_total_tokens - 1 else 0

    @property
    def is_pooled(self) -> bool:
        """It is over when its prompt is read: it samples nothing, so it has no token to wait for."""
        return self.message.pooling is not None

    @property
    def holds_kv(self) -> bool:
        return bool(self.block_table)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.message.sampling_params.prompt_logprobs is not None and not self.has_delivered

    @property
    def may_read_prefix_cache(self) -> bool:
        """Positions found in the cache are not computed, so they have no log-probabilities (case B091)."""
        return not self.wants_prompt_logprobs and not self.message.sampling_params.skip_reading_prefix_cache

    def move(self, to: Status) -> None:
        """The one way a request changes status."""
        assert to in MOVES[self.status], f"{self.request_id}: {self.status.name} -> {to.name}"
        self.status = to

    def note(self, event: EventType, now_s: float) -> None:
        self.events.append(EngineCoreEvent(event, now_s))
