"""Decides, step by step, which request computes how many tokens into which blocks; books what came back.

Theory of operation. Every request is (tokens, num_computed_tokens) and a step brings the second nearer to the
first. `schedule` plans one step in passes over a `StepBuilder`: continue what runs, publish what can no
longer leave the plan, admit what waits. `update_from_output` books the oldest step in flight. Several steps
may be in flight: planning never needs a token's value, only that there will be one.

Rule 1. A known request is in one place: running (with a slot), waiting (in the queue), or parked (for an
        event).
Rule 2. Work is proportional to change. A running request whose next step is one token into a block it owns
        costs one comparison; a parked one costs nothing; a waiting one that did not fit is tried again when a
        block was freed.
Rule 3. Blocks and slots are given away at once, for workers run steps in order. A row whose generation has
        passed is dropped at booking: the token will be drawn again, and be the same, since its noise is
        addressed by position.
Rule 4. Decode rows come first, then chunks in the order of admission; nobody is admitted in a step that
        preempted.
Rule 5. Admission stops at the first request that does not fit: no one is overtaken for being big.
Rule 6. Every request ends exactly once, with one finish reason; nothing is said of it afterwards.

It knows no clock, socket, device or tokenizer; clock, grammars and KV sources are handed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from mainspring.base.config import SchedulerConfig
from mainspring.base.messages import (
    BlockAppend,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from mainspring.base.protocols import Clock, Grammar, KVSource
from mainspring.core.kv_cache import KVCacheManager, PrefixHit
from mainspring.core.queue import RequestQueue
from mainspring.core.request import NO_GENERATION, NO_SLOT, Request, Status
from mainspring.core.step import Chunk, MaskedRow, Rows, StepBuilder, StepRecord
from mainspring.core.stop import Stop, check_stop


class PauseState(Enum):
    UNPAUSED = auto()
    PAUSED_NEW = auto()  # who runs goes on, nobody is admitted but who holds KV already
    PAUSED_ALL = auto()  # nobody runs


class Admission(Enum):
    """What became of an attempt to admit the head of the queue."""

    ADMITTED = auto()
    PARKED = auto()  # its KV is being brought
    NO_BLOCKS = auto()  # not before a block is released
    NEXT_STEP = auto()  # not in what is left of this step


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        clock: Clock,
        vocab_size: int,
        kv_source: KVSource | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.running: list[Request] = []  # in order of admission
        self.waiting = RequestQueue(config.policy)
        self.parked: dict[str, Request] = {}
        self.pause_state = PauseState.UNPAUSED
        self._clock = clock
        self._vocab_size = vocab_size
        self._kv_source = kv_source
        self._loading: dict[str, Request] = {}  # KV on its way into their blocks, which nobody else may have
        self._holding: dict[str, Request] = {}  # waiting, with KV that has arrived
        self._outboxes: dict[int, list[EngineCoreOutput]] = {}  # by client: what the next booking delivers
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # since the last plan
        self._in_flight: deque[StepRecord] = deque()
        self._steady: Rows | None = None  # the rows of a step in which every running request is quiet
        self._slots_were_left = False  # some of `running` do not run any more
        self._did_not_fit: tuple[Request, int] | None = None  # and how often blocks had been released by then
        self.throttles_prefills = False  # prompts wait in the next step: set by whoever keeps ranks in step
        self.had_no_room = False  # in the last step somebody found no block
        self._num_generations = 0
        self._num_arrivals = 0
        self._num_watermark_blocks = math.ceil(config.watermark * (kv.pool.num_blocks - 1))
        self._stats = SchedulerStats()

    # -- requests come and go --------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request, or park it until `set_grammar` if it has a structure to follow.

        What no client should have sent, and would hurt others, is answered with an error output.
        """
        outbox = self._outboxes.setdefault(message.client_index, [])
        if (fault := self._fault_of(message)) is not None:
            outbox.append(EngineCoreOutput(message.request_id, [], FinishReason.ERROR, error=fault))
            return
        request = Request(message, self.config.max_model_len, outbox)
        request.sequence = self._num_arrivals = self._num_arrivals + 1
        request.note(EventType.QUEUED, self._clock())
        self.requests[request.request_id] = request
        if message.structured_outputs is not None:
            request.status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.parked[request.request_id] = request
        else:
            self.waiting.push(request)

    def _fault_of(self, message: EngineCoreRequest) -> str | None:
        tokens = message.prompt_token_ids + message.output_token_ids
        num_tokens = len(tokens)
        if message.request_id in self.requests or message.request_id in self._loading:
            return f"request id {message.request_id!r} is in use"
        if not message.prompt_token_ids:
            return "the prompt has no tokens"
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return f"a token id is outside the vocabulary of {self._vocab_size}"
        if num_tokens + (message.pooling is None) > self.config.max_model_len:
            return f"{num_tokens} tokens leave no room within max_model_len {self.config.max_model_len}"
        max_tokens = message.sampling_params.max_tokens
        if max_tokens is not None and len(message.output_token_ids) >= max_tokens:
            return f"all of max_tokens {max_tokens} were delivered before"
        return None

    def set_grammar(self, request_id: str, grammar: Grammar) -> None:
        """The event a structured request was parked for. Tokens it has already said are fed to `grammar`
        first."""
        request = self.parked.get(request_id)
        if request is None:
            return  # aborted meanwhile
        for token in request.message.output_token_ids:
            if (fault := _grammar_fault(grammar, token)) is not None:
                self.fail_request(request_id, f"token {token} of an earlier run: {fault}")
                return
        request.grammar = grammar
        self._unpark(request)

    def fail_request(self, request_id: str, cause: str) -> None:
        """End one request with an error output; unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            request.outbox.append(EngineCoreOutput(request_id, [], FinishReason.ERROR, error=cause))
            self._finish(request, FinishReason.ERROR)
            self._sweep_running()

    def finish_requests(
        self, request_ids: Iterable[str] | None, reason: FinishReason = FinishReason.ABORT
    ) -> list[str]:
        """End requests wherever they stand, without an output; None means all. Unknown ids are ignored.

        Returns the ids that were ended.
        """
        ids = list(self.requests) if request_ids is None else request_ids
        ended = [request for request_id in ids if (request := self.requests.get(request_id)) is not None]
        for request in ended:
            if request.status is not Status.FINISHED:  # an id may be listed twice
                self._finish(request, reason)
        self._sweep_running()
        return [request.request_id for request in ended]

    def abort_all(self) -> None:
        """End every live request with an output that says abort: it was not its sender who wanted this."""
        for request in list(self.requests.values()):
            request.outbox.append(EngineCoreOutput(request.request_id, [], FinishReason.ABORT))
        self.finish_requests(None)

    def has_requests(self) -> bool:
        """Something to run, to wait for, or to deliver."""
        return bool(self.requests or self._in_flight or self._loading or any(self._outboxes.values()))

    def has_runnable_requests(self) -> bool:
        """As `has_requests`, but for requests that a pause holds back."""
        match self.pause_state:
            case PauseState.UNPAUSED:
                return self.has_requests()
            case PauseState.PAUSED_NEW:
                waited_for: Collection[object] = (*self.running, *self._holding, *self._loading)
            case PauseState.PAUSED_ALL:
                waited_for = self._loading
        return bool(waited_for or self._in_flight or any(self._outboxes.values()))

    def num_decoding(self) -> int:
        """Running requests whose next step is one token."""
        return sum(request.num_todo == 1 for request in self.running)

    def has_parked_requests(self) -> bool:
        return bool(self.parked or self._loading)

    def _unpark(self, request: Request) -> None:
        del self.parked[request.request_id]
        request.move(Status.WAITING)
        self.waiting.push(request)
        if request.holds_kv:
            self._holding[request.request_id] = request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out of its place; of `running` only when `_sweep_running` is called."""
        was = request.status
        request.move(Status.FINISHED)
        request.finish_reason = reason
        del self.requests[request.request_id]
        self._holding.pop(request.request_id, None)
        if was is Status.RUNNING:
            self._leave_slot(request)
        elif self.parked.pop(request.request_id, None) is None:
            self.waiting.note_dead()
        if request.request_id not in self._loading:
            self.kv.free(request)

    def _sweep_running(self) -> None:
        if self._slots_were_left:
            self.running = [request for request in self.running if request.status is Status.RUNNING]
            self._slots_were_left = False

    def _enter_slot(self, request: Request) -> None:
        request.slot = self._free_slots.pop()
        request.generation = self._num_generations = self._num_generations + 1
        self._steady = None

    def _leave_slot(self, request: Request) -> None:
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot, request.generation = NO_SLOT, NO_GENERATION
        self._steady = None
        self._slots_were_left = True

    # -- planning --------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to run. Its effects on the requests are done when it
        returns: every plan must be executed and booked, in order."""
        step = StepBuilder(self.config.max_num_batched_tokens)
        self.had_no_room = False
        if self.pause_state is PauseState.PAUSED_ALL:
            step.skipped.update(self.running)
            return self._make_plan(step)
        self._continue_running(step)
        for request in step.counts:
            self._publish_known(request)
        if not step.num_preempted and not self.throttles_prefills:
            self._admit_waiting(step)
        return self._make_plan(step)

    def _continue_running(self, step: StepBuilder) -> None:
        busy = []
        in_turn = self.running if self.config.num_stages == 1 else self._in_turn(step)
        for request in in_turn:
            computed = request.num_computed_tokens
            if computed < request.quiet_until:
                request.num_computed_tokens = computed + 1
            else:
                busy.append(request)
        step.tokens_left -= len(in_turn) - len(busy)
        step.skipped.update(busy)  # until they have a row
        busy.sort(key=lambda request: request.num_todo > 1)
        for request in busy:
            if self.throttles_prefills and request.num_todo > 1:
                continue
            if request.status is Status.RUNNING:  # and not preempted for one before it
                self._continue_one(step, request)

    def _in_turn(self, step: StepBuilder) -> list[Request]:
        """Who may have a row in this step, where a pipeline of stages runs the steps; the others are skipped.

        A request whose token has not come round to the first stage again would hold that stage up. And those
        that decode share themselves out over as many steps as there are stages, whoever had no row for
        longest first: all in one step would leave every stage but one without work.
        """
        num_stages, this_step = self.config.num_stages, self._stats.num_steps + 1
        in_turn = [request for request in self.running if request.num_todo > 1]
        decoding = [request for request in self.running if request.num_todo <= 1]
        ready = [
            request
            for request in decoding
            if request.num_computed_tokens < len(request.token_ids)
            or request.last_step + num_stages <= this_step
        ]
        ready.sort(key=lambda request: request.last_step)
        in_turn += ready[: -(-len(decoding) // num_stages)]
        step.skipped.update(set(self.running).difference(in_turn))
        for request in in_turn:
            request.last_step = this_step
        return in_turn

    def _continue_one(self, step: StepBuilder, request: Request) -> None:
        n = min(self._chunk_of(request, request.num_todo), step.tokens_left)
        if n <= 0:  # all its tokens are promised, or the budget is spent
            return
        while (added := self.kv.grow(request, request.num_computed_tokens + n)) is None:
            if self._take_back_held_kv():
                continue
            victim = self._pick_victim()
            self._preempt(victim, step)
            if victim is request:
                return
        step.skipped.remove(request)
        for group, blocks in enumerate(added):
            if blocks:
                step.new_blocks.append(BlockAppend(request.slot, group, blocks))
        step.add(request, n)
        self._advance(request, n)

    def _chunk_of(self, request: Request, num_todo: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_todo and self.config.enable_chunked_prefill and len(self.requests) > 1:
            return threshold
        return num_todo

    def _advance(self, request: Request, n: int) -> None:
        """`n` more tokens are planned for `request`, which owns their blocks."""
        request.num_computed_tokens += n
        if request.num_computed_tokens >= len(request.token_ids):
            request.quiet_until = min(self.kv.num_tokens_owned(request), request.max_total_tokens - 1)

    def _pick_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running, key=lambda r: (r.message.priority, r.message.arrival_time_s, r.sequence))
        return self.running[-1]

    def _preempt(self, request: Request, step: StepBuilder | None) -> None:
        """Give up what is computed; it will be computed again, from the cache where that still has it."""
        if step is not None:
            step.drop(request)
        self._leave_slot(request)
        self._give_up_kv(request)
        request.move(Status.PREEMPTED)
        self._sweep_running()
        request.num_preemptions += 1
        request.note(EventType.PREEMPTED, self._clock())
        self._stats.num_preemptions += 1
        self.waiting.push(request)

    def _give_up_kv(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = request.num_booked_tokens = request.quiet_until = request.attend_at = 0

    def _publish_known(self, request: Request) -> None:
        """Blocks of tokens whose value is known and whose step is certain. Sampled ones follow when
        booked."""
        if request.status is Status.RUNNING:
            self.kv.publish(request, min(request.num_computed_tokens, len(request.token_ids)))

    def _admit_waiting(self, step: StepBuilder) -> None:
        while step.tokens_left > 0 and self._free_slots and (request := self.waiting.peek()) is not None:
            if self.pause_state is PauseState.PAUSED_NEW and not request.holds_kv:
                return
            if self._did_not_fit == (request, self.kv.pool.num_releases):
                if self.running or self._loading or not self._take_back_held_kv():
                    return
                continue
            match self._admit(step, request):
                case Admission.NEXT_STEP:
                    return
                case Admission.NO_BLOCKS:
                    self.had_no_room = True
                    self._did_not_fit = (request, self.kv.pool.num_releases)

    def _admit(self, step: StepBuilder, request: Request) -> Admission:
        """Give the head of the queue a slot and its first row, or start bringing its KV from elsewhere."""
        reserved = self._num_watermark_blocks if self.running else 0
        if request.holds_kv:  # brought from elsewhere
            n = self._first_chunk(step, request, request.num_computed_tokens)
            if n == 0:
                return Admission.NEXT_STEP
            if not self.kv.can_hold(request, len(request.token_ids), reserved):
                return Admission.NO_BLOCKS
            if self.kv.grow(request, request.num_computed_tokens + n) is None:
                return Admission.NO_BLOCKS
        else:
            hit = self.kv.find_cached_prefix(request)
            if (num_remote := self._num_remote_tokens(request, hit.num_tokens)) > 0:
                return self._start_load(request, hit, num_remote, reserved)
            n = self._first_chunk(step, request, hit.num_tokens)
            if n == 0:
                return Admission.NEXT_STEP
            if not self.kv.admit(request, hit, hit.num_tokens + n, reserved):
                return Admission.NO_BLOCKS
            self._note_hit(request, hit.num_tokens)
            request.num_computed_tokens = request.num_booked_tokens = hit.num_tokens
        self._start_running(step, request, n)
        return Admission.ADMITTED

    def _first_chunk(self, step: StepBuilder, request: Request, num_computed_tokens: int) -> int:
        """Tokens of a first row; 0 if only a whole prompt will do and this step has no room for it."""
        n = self._chunk_of(request, len(request.token_ids) - num_computed_tokens)
        if n > step.tokens_left:
            return step.tokens_left if self.config.enable_chunked_prefill else 0
        return n

    def _start_running(self, step: StepBuilder, request: Request, n: int) -> None:
        self.waiting.pop()
        self._holding.pop(request.request_id, None)
        request.move(Status.RUNNING)
        self._enter_slot(request)
        self.running.append(request)
        request.note(EventType.SCHEDULED, self._clock())
        message = request.message
        params = message.sampling_params
        step.new_requests.append(
            NewRequestData(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=tuple(list(blocks) for blocks in request.block_table),
                sampling_params=params,
                stop_token_ids=list(request.stop_token_ids),
                bad_words_token_ids=message.bad_words_token_ids,
                num_prompt_logprobs=params.prompt_logprobs if request.wants_prompt_logprobs else None,
                has_grammar=request.grammar is not None,
                lora=message.lora,
                pooling=message.pooling,
            )
        )
        step.add(request, n)
        self._advance(request, n)
        self._publish_known(request)
        request.last_step = self._stats.num_steps + 1

    def _note_hit(self, request: Request, num_cached_tokens: int) -> None:
        """Counted once, at first admission: what is found after a preemption is our own doing (case B041)."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            self._stats.prefix_cache_queries += len(request.token_ids)
            self._stats.prefix_cache_hits += num_cached_tokens

    def _make_plan(self, step: StepBuilder) -> SchedulerOutput | None:
        kv_transfer = self._kv_source.metadata() if self._kv_source is not None else None
        if (
            len(step.skipped) == len(self.running)
            and kv_transfer is None
            and (self._in_flight or not self._loading)
        ):
            return None  # but loads that are on their way are asked after, by one empty step at a time
        rows, chunks = self._rows_of(step)
        masked = [
            MaskedRow(i, request, request.generation, request.num_computed_tokens)
            for i in rows.grammar
            for request in (rows.requests[i],)
        ]
        self._stats.num_steps += 1
        plan = SchedulerOutput(
            step_id=self._stats.num_steps,
            slots=rows.slots,
            num_scheduled_tokens=rows.counts,
            sampling_rows=rows.sampling,
            num_tokens=self.config.max_num_batched_tokens - step.tokens_left,
            new_requests=step.new_requests,
            freed_slots=self._freed_slots,
            new_blocks=step.new_blocks,
            grammar_rows=rows.grammar,
            kv_transfer=kv_transfer,
        )
        self._stats.num_scheduled_tokens += plan.num_tokens
        self._freed_slots = []
        self._in_flight.append(StepRecord(plan.step_id, rows, chunks, masked))
        return plan

    def _rows_of(self, step: StepBuilder) -> tuple[Rows, list[Chunk]]:
        chunks = []
        even = not step.skipped  # every running request has a row, of one token, that samples
        for request, n in step.counts.items():
            if n > 1 or request.num_computed_tokens < len(request.token_ids) or request.is_pooled:
                chunks.append(Chunk(request, request.generation, request.num_computed_tokens))
                even = False
        if even and self._steady is not None:
            return self._steady, chunks
        requests = [request for request in self.running if request not in step.skipped]
        counts = step.counts
        sampling = [
            i
            for i, request in enumerate(requests)
            if request.num_computed_tokens >= len(request.token_ids) and not request.is_pooled
        ]
        rows = Rows(
            requests,
            [request.generation for request in requests],
            [request.slot for request in requests],
            [counts.get(request, 1) for request in requests],
            sampling,
            [i for i in sampling if requests[i].grammar is not None],
        )
        if even:
            self._steady = rows
        return rows, chunks

    # -- KV from elsewhere -----------------------------------------------------------------------------------

    def _num_remote_tokens(self, request: Request, num_local_tokens: int) -> int:
        """Tokens after the local hit that a source has; a token is left to be read. 0 where their blocks
        would not fit into the whole pool: with a window a text may be longer than what its request ever holds
        at once."""
        if self._kv_source is None or request.tried_source or not request.may_read_prefix_cache:
            return 0
        most = (len(request.token_ids) - 1) // self.kv.block_size * self.kv.block_size - num_local_tokens
        num_remote = min(most, self._kv_source.num_matched_tokens(request.message, num_local_tokens))
        return num_remote if self.kv.could_own(num_local_tokens + num_remote) else 0

    def _start_load(self, request: Request, hit: PrefixHit, num_remote: int, reserved: int) -> Admission:
        """Park the head of the queue while its next `num_remote` tokens' KV is brought into blocks of its
        own."""
        assert self._kv_source is not None
        end = hit.num_tokens + num_remote
        if not self.kv.admit(request, hit, end, reserved):
            return Admission.NO_BLOCKS
        self._note_hit(request, end)
        request.tried_source = True
        request.num_computed_tokens = request.num_booked_tokens = hit.num_tokens
        self.waiting.pop()
        request.move(Status.WAITING_FOR_REMOTE_KVS)
        self.parked[request.request_id] = request
        self._loading[request.request_id] = request
        table = tuple(list(blocks) for blocks in request.block_table)
        self._kv_source.start_load(request.request_id, table, hit.num_tokens, num_remote)
        return Admission.PARKED

    def _end_load(self, request_id: str, arrived: bool) -> None:
        request = self._loading.pop(request_id, None)
        if request is None:
            return
        if request.status is Status.FINISHED:  # aborted meanwhile: only now may others have the blocks
            self.kv.free(request)
            return
        if arrived:
            request.num_computed_tokens = self.kv.num_tokens_owned(request)
            request.num_booked_tokens = request.num_computed_tokens
            self.kv.publish(request, request.num_computed_tokens)
        else:
            self._give_up_kv(request)
        self._unpark(request)

    def _take_back_held_kv(self) -> bool:
        """Blocks are short and requests that only wait hold some, with KV from elsewhere: the youngest of
        them loses its own, to be computed here instead. False if there is none."""
        if not self._holding:
            return False
        self._take_back_kv([max(self._holding.values(), key=lambda request: request.sequence)])
        return True

    def _take_back_kv(self, holders: list[Request]) -> None:
        for request in holders:
            del self._holding[request.request_id]
            self._give_up_kv(request)
        self.waiting.reorder()

    # -- masks -----------------------------------------------------------------------------------------------

    def is_mask_ready(self, plan: SchedulerOutput) -> bool:
        """Whether every token that the masks of `plan` depend on is booked."""
        return all(
            request.generation != generation or len(request.token_ids) >= end
            for _, request, generation, end in self._record_of(plan).masked
        )

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """The mask for the sampling of `plan`, made while the device computes; None where no row needs one.

        Rows whose request has gone since allow everything: nobody will see what they sample.
        """
        masked = self._record_of(plan).masked
        if not masked:
            return None
        bitmask = np.full((len(masked), -(-self._vocab_size // 32)), -1, dtype=np.int32)
        for mask, (_, request, generation, _) in zip(bitmask, masked, strict=True):
            if request.generation == generation and request.grammar is not None:
                try:
                    request.grammar.fill(mask)
                except Exception as error:  # it may be too complex to go on: its own request's end
                    self.fail_request(request.request_id, f"the grammar has failed: {error}")
                    mask.fill(-1)
        return GrammarOutput([row.row for row in masked], bitmask)

    def _record_of(self, plan: SchedulerOutput) -> StepRecord:
        for record in reversed(self._in_flight):
            if record.step_id == plan.step_id:
                return record
        raise AssertionError(f"step {plan.step_id} is not in flight")

    # -- booking ---------------------------------------------------------------------------------------------

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Book the oldest step in flight. Returns what there is to say, by client."""
        record = self._in_flight.popleft()
        assert record.step_id == plan.step_id, f"step {plan.step_id} booked before step {record.step_id}"
        for request, generation, end in record.chunks:
            if request.generation == generation:
                request.num_booked_tokens = end
        rows = record.rows
        for request, generation, tokens in zip(
            rows.requests, rows.generations, result.sampled_token_ids, strict=True
        ):
            if request.generation != generation or not tokens:
                continue  # rule 3, or a chunk
            if len(tokens) == 1:
                token_ids = request.token_ids
                num_tokens = len(token_ids) + 1
                if num_tokens < request.attend_at and tokens[0] not in request.stop_token_ids:
                    token_ids.append(tokens[0])
                    request.num_booked_tokens = num_tokens - 1
                    request.outbox.append(EngineCoreOutput(request.request_id, tokens))
                    continue
            self._book(request, tokens)
        for row, pooled in result.pooled.items():
            if rows.requests[row].generation == rows.generations[row]:
                self._book_pooled(rows.requests[row], pooled)
        for row, cause in result.errors.items():
            if rows.requests[row].generation == rows.generations[row]:
                self.fail_request(rows.requests[row].request_id, cause)
        if result.logprobs or result.prompt_logprobs:
            self._attach_logprobs(rows, result)
        for request_id in result.finished_recving:
            self._end_load(request_id, arrived=True)
        for request_id in result.failed_recving:
            self._end_load(request_id, arrived=False)
        self._sweep_running()
        return self.take_outputs()

    def _book(self, request: Request, tokens: list[int]) -> None:
        """Append sampled tokens one by one, until one ends the request, and say so."""
        num_before = len(request.token_ids)
        stop, cause = None, None
        for token in tokens:
            request.token_ids.append(token)
            stop = check_stop(request)
            if request.grammar is not None and (stop is None or stop.reason is FinishReason.LENGTH):
                if (fault := _grammar_fault(request.grammar, token)) is not None:
                    request.token_ids.pop()
                    cause = f"the model chose token {token}: {fault}"
                    stop = Stop(FinishReason.ERROR)
                elif (
                    request.grammar.is_finished()
                ):  # nothing may follow, whatever min_tokens and ignore_eos say
                    stop = Stop(FinishReason.STOP)
            if stop is not None:
                break
        num_kept = len(request.token_ids) - num_before
        # The row read every token there was and, if it was verified, each kept one but the last.
        request.num_booked_tokens = num_before + max(0, num_kept - 1)
        self.kv.publish(request, request.num_booked_tokens)
        output = EngineCoreOutput(request.request_id, tokens[:num_kept], error=cause)
        self._say(request, output)
        if stop is not None:
            output.finish_reason, output.stop_reason = stop
            self._finish(request, stop.reason)
        elif request.grammar is None:
            next_full_block = (request.num_booked_tokens // self.kv.block_size + 1) * self.kv.block_size
            request.attend_at = min(next_full_block + 1, request.max_total_tokens)

    def _book_pooled(self, request: Request, pooled: npt.NDArray[np.float32]) -> None:
        """The prompt is read, and that was all that was wanted of it."""
        output = EngineCoreOutput(request.request_id, [], FinishReason.STOP, pooled=pooled)
        self._say(request, output)
        self._finish(request, FinishReason.STOP)

    def _say(self, request: Request, output: EngineCoreOutput) -> None:
        """With what is said once, or since the last time."""
        if not request.has_delivered:
            output.num_cached_tokens = request.num_cached_tokens
            request.has_delivered = True
        if request.events:
            output.events, request.events = request.events, []
        request.outbox.append(output)

    def _attach_logprobs(self, rows: Rows, result: ModelRunnerOutput) -> None:
        said = {
            output.request_id: output
            for outbox in self._outboxes.values()
            for output in outbox
            if output.new_token_ids
        }
        for row, logprobs in result.logprobs.items():
            if (output := said.get(rows.requests[row].request_id)) is not None:
                n = len(output.new_token_ids)
                output.new_logprobs = TokenLogprobs(
                    logprobs.token_ids[:n], logprobs.logprobs[:n], logprobs.ranks[:n]
                )
        for row, logprobs in result.prompt_logprobs.items():
            if (output := said.get(rows.requests[row].request_id)) is not None:
                output.prompt_logprobs = logprobs

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """What has gathered for each client since the last call."""
        taken = {}
        for client, outbox in self._outboxes.items():
            if outbox:
                taken[client] = EngineCoreOutputs(outputs=outbox.copy(), timestamp_s=self._clock())
                outbox.clear()
        return taken

    # -- the cache and the state as a whole ------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached block; False while live requests hold blocks.

        With `reset_running_requests` those are made to give them up first and are computed again; then it is
        False only while KV is on its way from elsewhere.
        """
        if reset_running_requests:
            for request in list(self.running):
                self._preempt(request, None)
            self._take_back_kv(list(self._holding.values()))
        return self.kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return replace(
            self._stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_parked=len(self.parked),
            kv_cache_usage=self.kv.pool.usage,
        )

    def check(self) -> None:
        """Assert the rules, as far as they can be seen between two steps."""
        places = [*self.running, *self.waiting, *self.parked.values()]
        assert len(places) == len(set(places)), "rule 1: a request is in two places"
        assert set(places) == set(self.requests.values()), "rule 1: a request is in no place"
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.config.max_num_seqs)), (
            "slots are lost or shared"
        )
        generations = [request.generation for request in self.running]
        assert len(set(generations)) == len(generations), "two stays share a generation"
        for request in places:
            known, computed, booked = (
                len(request.token_ids),
                request.num_computed_tokens,
                request.num_booked_tokens,
            )
            assert (request.slot == NO_SLOT) == (request.generation == NO_GENERATION), request.request_id
            assert request.holds_kv or computed == 0, (
                f"{request.request_id} computed {computed} tokens into no blocks"
            )
            assert booked <= computed <= request.max_total_tokens, (
                f"{request.request_id}: {booked}, {computed}"
            )
            assert booked <= known <= request.max_total_tokens, (
                f"{request.request_id}: {booked} of {known} booked"
            )
            holds = request.status is Status.WAITING and request.holds_kv
            assert holds == (request.request_id in self._holding), f"{request.request_id} holds KV unnoticed"
            if request.status is not Status.RUNNING:
                assert booked == computed, f"{request.request_id} has tokens in flight without a slot"
            assert request.status is not Status.PREEMPTED or not request.holds_kv, (
                "a preempted request holds KV"
            )
        if not self._in_flight:
            for request in self.running:
                assert request.num_booked_tokens == request.num_computed_tokens, (
                    "a token in flight came back to nobody"
                )
        assert len(self.running) <= self.config.max_num_seqs
        self.kv.check({*places, *self._loading.values()})


def _grammar_fault(grammar: Grammar, token: int) -> str | None:
    """Feed a booked token to its grammar. What is wrong, if it cannot be taken."""
    try:
        return None if grammar.accept(token) else "the grammar does not allow it"
    except Exception as error:  # it may be too complex to go on
        return f"the grammar has failed: {error}"
