"""Are the property test and its checks able to fail? Each mistake that is planted here must be found out.

A mistake is a change to the core (or to the fake worker, where the mistake would be a worker's), and it is
found when one of a bounded number of scenarios fails that pass without it (`test_seeded_scenarios`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import pytest
from msgspec import structs

from mainspring.base.messages import FinishReason, GetStats, GrammarOutput, SchedulerOutput
from mainspring.base.params import SamplingParams
from mainspring.core import kv_cache, prefix
from mainspring.core.block_pool import BlockPool
from mainspring.core.kv_cache import KVCacheManager, _Group
from mainspring.core.request import Request
from mainspring.core.scheduler import Scheduler
from mainspring.engine.core import EngineCore, _StepInFlight
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_kv_source import RemotePrefix
from mainspring.testing.fake_model import FakeModel
from mainspring.testing.scenarios import SeededDice, make_scenario
from mainspring.testing.simulation import Scenario, guest, play

MAX_SCENARIOS = 300

# A low priority reads its prompt in chunks; in the very step in which two blocks of it are planned already, a
# high one that came later lacks one block, and the low one is preempted. Dice seldom make that.
OVERTAKEN = Scenario(
    guests=(
        guest("low", list(range(40)), priority=5),
        guest("high", list(range(63, 43, -1)), arrives_at=1, params=SamplingParams(max_tokens=1, seed=1)),
    ),
    num_blocks=14,
    max_model_len=47,
    max_num_batched_tokens=16,
    threshold=8,
    policy="priority",
)

# A load goes on after its request was aborted, and another request wants every block there is.
ABANDONED = Scenario(
    guests=(
        guest("gone", list(range(20)), elsewhere=(RemotePrefix(16, delay_steps=6),), aborted_at=2),
        guest("next", list(range(63, 29, -1)), arrives_at=2),
    ),
    num_blocks=12,
    max_model_len=47,
)

Patch = pytest.MonkeyPatch
MISTAKES: dict[str, Callable[[Patch], None]] = {}


def mistake(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MISTAKES[plant.__name__.replace("_", " ")] = plant
    return plant


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around(original, *arguments)` in the place of a function."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


# -- prefix cache --------------------------------------------------------------------------------------------


@mistake
def unchained_hash(patch: Patch) -> None:
    def extend(request: Request, block_size: int, num_blocks: int) -> list[bytes]:
        root, hashes = prefix.root_hash(request.message), request.block_hashes
        while len(hashes) < num_blocks:
            start = len(hashes) * block_size
            hashes.append(prefix.block_hash(root, request.token_ids[start : start + block_size]))
        return hashes

    patch.setattr(prefix, "extend_hashes", extend)
    patch.setattr(kv_cache, "extend_hashes", extend)


@mistake
def salt_and_adapter_confused_in_the_key(patch: Patch) -> None:
    def root(message) -> bytes:
        adapter = message.lora.name if message.lora is not None else ""
        return sha256((adapter + (message.cache_salt or "")).encode()).digest()

    patch.setattr(prefix, "root_hash", root)


@mistake
def adapter_by_name_only(patch: Patch) -> None:
    """Case B049: another adapter loaded under the same name."""

    def root(original, message) -> bytes:
        lora = message.lora and structs.replace(message.lora, load_id=0)
        return original(structs.replace(message, lora=lora))

    wrap(patch, prefix, "root_hash", root)


@mistake
def stale_hash_after_eviction(patch: Patch) -> None:
    patch.setattr(BlockPool, "_forget", lambda self, block: None)


@mistake
def shared_block_evictable(patch: Patch) -> None:
    def touch(self: BlockPool, blocks) -> None:
        for block in blocks:
            if block and self._refs[block] > 0:
                self._refs[block] += 1

    patch.setattr(BlockPool, "touch", touch)


@mistake
def shared_block_let_go_by_the_first(patch: Patch) -> None:
    def release(original, self: BlockPool, blocks) -> None:
        for block in blocks:
            if self._refs[block] > 1:
                self._refs[block] = 1
            original(self, [block])

    wrap(patch, BlockPool, "release", release)


@mistake
def block_published_before_its_writer_is_certain(patch: Patch) -> None:
    """At once when its row is planned: the row may be preempted in the same step."""

    def continue_one(original, self: Scheduler, step, request: Request) -> None:
        original(self, step, request)
        self._publish_known(request)

    wrap(patch, Scheduler, "_continue_one", continue_one)


@mistake
def remote_block_published_before_it_arrived(patch: Patch) -> None:
    def start_load(original, self: Scheduler, request: Request, hit, num_remote: int, reserved: int):
        done = original(self, request, hit, num_remote, reserved)
        if request.holds_kv:
            self.kv.publish(request, hit.num_tokens + num_remote)
        return done

    wrap(patch, Scheduler, "_start_load", start_load)


@mistake
def in_flight_token_hashed(patch: Patch) -> None:
    """A block is named as soon as it is planned full, with 0 for the tokens that have no value yet."""

    def publish_known(self: Scheduler, request: Request) -> None:
        known, computed = request.token_ids, request.num_computed_tokens
        request.token_ids = known + [0] * (computed - len(known))
        self.kv.publish(request, computed)
        request.token_ids = known

    patch.setattr(Scheduler, "_publish_known", publish_known)


@mistake
def hit_leaves_no_token_to_read(patch: Patch) -> None:
    def find(original, self: KVCacheManager, request: Request):
        request.token_ids.append(0)
        hit = original(self, request)
        request.token_ids.pop()
        return hit

    wrap(patch, KVCacheManager, "find_cached_prefix", find)


@mistake
def hit_remembered_from_a_failed_attempt(patch: Patch) -> None:
    """Case B052: by the next attempt the blocks may hold something else."""
    found: dict[int, Any] = {}

    def find(original, self: KVCacheManager, request: Request):
        return found.setdefault(id(request.message), original(self, request))

    wrap(patch, KVCacheManager, "find_cached_prefix", find)


@mistake
def idle_hits_counted_as_free(patch: Patch) -> None:
    """Case B044: blocks that the hit itself takes out of the free ones."""
    wrap(patch, KVCacheManager, "admit", with_nothing_idle)


def with_nothing_idle(original, self: KVCacheManager, *args):
    is_idle, self.pool.is_idle = self.pool.is_idle, lambda block: False
    try:
        return original(self, *args)
    finally:
        self.pool.is_idle = is_idle


# -- blocks --------------------------------------------------------------------------------------------------


@mistake
def one_block_short(patch: Patch) -> None:
    wrap(patch, KVCacheManager, "grow", lambda original, self, request, n: original(self, request, n - 1))


@mistake
def new_blocks_for_the_wrong_group(patch: Patch) -> None:
    def plan(original, self: Scheduler, step):
        step.new_blocks = [append._replace(group=0) for append in step.new_blocks]
        return original(self, step)

    wrap(patch, Scheduler, "_make_plan", plan)


@mistake
def window_freed_by_planned_position(patch: Patch) -> None:
    def trim(original, self: KVCacheManager, request: Request) -> None:
        booked, request.num_booked_tokens = request.num_booked_tokens, request.num_computed_tokens
        original(self, request)
        request.num_booked_tokens = booked

    wrap(patch, KVCacheManager, "_trim", trim)


@mistake
def window_one_token_too_small(patch: Patch) -> None:
    wrap(patch, _Group, "num_passed_blocks", lambda original, self, n: original(self, n + 1))


@mistake
def blocks_of_a_load_given_away_at_abort(patch: Patch) -> None:
    def finish(original, self: Scheduler, request: Request, reason: FinishReason) -> None:
        self._loading.pop(request.request_id, None)
        original(self, request, reason)

    wrap(patch, Scheduler, "_finish", finish)


@mistake
def failed_load_taken_for_an_arrival(patch: Patch) -> None:
    wrap(patch, Scheduler, "_end_load", lambda original, self, name, arrived: original(self, name, True))


# -- slots, generations, order -------------------------------------------------------------------------------


@mistake
def slot_reused_without_a_generation_check(patch: Patch) -> None:
    """A request that comes back looks like its earlier stay."""

    def enter(original, self: Scheduler, request: Request) -> None:
        original(self, request)
        request.generation = request.sequence

    wrap(patch, Scheduler, "_enter_slot", enter)


@mistake
def result_of_a_preempted_row_applied(patch: Patch) -> None:
    def preempt(original, self: Scheduler, request: Request, step) -> None:
        generation = request.generation
        original(self, request, step)
        request.generation = generation

    wrap(patch, Scheduler, "_preempt", preempt)
    patch.setattr(Scheduler, "check", lambda self: None)  # which would say so at once


@mistake
def result_of_a_finished_row_applied(patch: Patch) -> None:
    def finish(original, self: Scheduler, request: Request, reason: FinishReason) -> None:
        generation = request.generation
        original(self, request, reason)
        request.generation = generation

    wrap(patch, Scheduler, "_finish", finish)


@mistake
def workers_not_told_of_freed_slots(patch: Patch) -> None:
    def plan(original, self: Scheduler, step):
        self._freed_slots = []
        return original(self, step)

    wrap(patch, Scheduler, "_make_plan", plan)


@mistake
def two_forwards_before_the_first_sampling(patch: Patch) -> None:
    def fill(self: EngineCore) -> None:
        while len(self._in_flight) < self.depth and (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append(_StepInFlight(plan, self.executor.execute_model(plan)))
        for step in self._in_flight:
            if step.sampling is None:
                self._send_sampling(step)

    patch.setattr(EngineCore, "_fill", fill)


@mistake
def abort_during_a_step_booked_after_its_outputs(patch: Patch) -> None:
    process = EngineCore.process_aborts_queue

    def step(original, self: EngineCore):
        outputs = original(self)
        process(self)
        return outputs

    wrap(patch, EngineCore, "step", step)
    patch.setattr(EngineCore, "process_aborts_queue", lambda self: None)


@mistake
def budget_given_back_twice(patch: Patch) -> None:
    def preempt(original, self: Scheduler, request: Request, step) -> None:
        original(self, request, step)
        if step is not None:
            step.tokens_left += 1

    wrap(patch, Scheduler, "_preempt", preempt)


@mistake
def plan_changed_after_it_was_handed_over(patch: Patch) -> None:
    handed_over = []

    def plan(original, self: Scheduler, step):
        for earlier in handed_over[-1:]:
            earlier.slots.reverse()
        handed_over.append(original(self, step) or SchedulerOutput(0, [], [], [], 0))
        return handed_over[-1] if handed_over[-1].step_id else None

    wrap(patch, Scheduler, "_make_plan", plan)


@mistake
def quiet_for_one_token_too_long(patch: Patch) -> None:
    def advance(original, self: Scheduler, request: Request, n: int) -> None:
        original(self, request, n)
        request.quiet_until += 1 if request.quiet_until else 0

    wrap(patch, Scheduler, "_advance", advance)


@mistake
def one_that_did_not_fit_is_never_tried_again(patch: Patch) -> None:
    def admit(original, self: Scheduler, step) -> None:
        if self._did_not_fit is not None:
            self._did_not_fit = (self._did_not_fit[0], self.kv.pool.num_releases)
        original(self, step)

    wrap(patch, Scheduler, "_admit_waiting", admit)


@mistake
def reset_that_forgets_nothing(patch: Patch) -> None:
    patch.setattr(BlockPool, "forget_all", lambda self: self.num_idle == self.num_blocks - 1)


# -- grammar -------------------------------------------------------------------------------------------------


@mistake
def mask_made_before_its_token_is_booked(patch: Patch) -> None:
    patch.setattr(Scheduler, "is_mask_ready", lambda self, plan: True)


@mistake
def masks_in_another_order_than_rows(patch: Patch) -> None:
    def bitmask(original, self: Scheduler, plan):
        mask = original(self, plan)
        return mask and GrammarOutput(mask.rows, mask.bitmask[::-1])

    wrap(patch, Scheduler, "get_grammar_bitmask", bitmask)


@mistake
def grammar_fed_again_after_preemption(patch: Patch) -> None:
    """Case B133."""

    def preempt(original, self: Scheduler, request: Request, step) -> None:
        original(self, request, step)
        for token in request.token_ids[request.num_prompt_tokens :] if request.grammar is not None else ():
            request.grammar.accept(token)

    wrap(patch, Scheduler, "_preempt", preempt)


@mistake
def journal_not_fed_to_the_grammar(patch: Patch) -> None:
    def set_grammar(original, self: Scheduler, request_id: str, grammar) -> None:
        if (request := self.parked.get(request_id)) is not None:
            message, request.message = request.message, structs.replace(request.message, output_token_ids=[])
            original(self, request_id, grammar)
            request.message = message

    wrap(patch, Scheduler, "set_grammar", set_grammar)


# -- journal and sampling ------------------------------------------------------------------------------------


@mistake
def journal_counted_as_prompt_by_penalties(patch: Patch) -> None:
    def start(original, self: Scheduler, step, request: Request, n: int) -> None:
        original(self, step, request, n)
        new = step.new_requests[-1]
        new.num_prompt_tokens += len(request.message.output_token_ids)

    wrap(patch, Scheduler, "_start_running", start)


@mistake
def journal_counted_as_prompt_by_max_tokens(patch: Patch) -> None:
    def init(original, self: Request, message, max_model_len: int, outbox) -> None:
        original(self, message, max_model_len, outbox)
        longer = self.max_total_tokens + len(message.output_token_ids)
        self.max_total_tokens = min(max_model_len, longer)

    wrap(patch, Request, "__init__", init)


@mistake
def prompt_logprobs_delivered_again(patch: Patch) -> None:
    asks = property(lambda self: self.message.sampling_params.prompt_logprobs is not None)
    patch.setattr(Request, "wants_prompt_logprobs", asks)


@mistake
def noise_addressed_by_step(patch: Patch) -> None:
    class StepModel(FakeModel):
        step = 0

        def noise(self, params, position: int):
            self.step += 1
            return super().noise(params, self.step)

    def init(original, self: FakeExecutor, model: FakeModel, **options) -> None:
        original(self, StepModel(model.vocab_size, model.windows, model.seed), **options)

    wrap(patch, FakeExecutor, "__init__", init)


@mistake
def workers_not_told_of_stop_tokens(patch: Patch) -> None:
    def start(original, self: Scheduler, step, request: Request, n: int) -> None:
        original(self, step, request, n)
        step.new_requests[-1].stop_token_ids = []

    wrap(patch, Scheduler, "_start_running", start)


@mistake
def logprobs_of_another_row(patch: Patch) -> None:
    """Case B061."""

    def attach(original, self: Scheduler, rows, result) -> None:
        given = list(result.logprobs)
        values = [result.logprobs[row] for row in given[1:] + given[:1]]
        result.logprobs = dict(zip(given, values, strict=True))
        original(self, rows, result)

    wrap(patch, Scheduler, "_attach_logprobs", attach)


@mistake
def outputs_sent_to_another_client(patch: Patch) -> None:
    def add(original, self: Scheduler, message) -> None:
        original(self, structs.replace(message, client_index=0))

    wrap(patch, Scheduler, "add_request", add)


# -- the tests -----------------------------------------------------------------------------------------------


def scenarios() -> Iterator[Scenario]:
    yield from (OVERTAKEN, ABANDONED)
    for seed in range(MAX_SCENARIOS):
        yield make_scenario(SeededDice(seed))


def found_after(plant: Callable[[Patch], None]) -> tuple[int, BaseException] | None:
    """How many scenarios pass with the mistake, and how the next one fails."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for passed, scenario in enumerate(scenarios()):
            try:
                play(scenario)
            except Exception as error:
                return passed, error
    return None


def test_without_a_mistake_nothing_is_found():
    assert play(OVERTAKEN).core.call(GetStats()).num_preemptions == 1
    assert play(ABANDONED).transcripts["gone"].token_ids == []


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found(name: str):
    assert found_after(MISTAKES[name]) is not None, f"{MAX_SCENARIOS} scenarios do not see: {name}"
