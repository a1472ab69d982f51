"""Executors without kernels: one that betrays the mistakes of a scheduler, and one that says what it is told.

Theory of operation.
- `FakeExecutor` is a worker in small: slots with their own tokens and block tables, filled from
  `NewRequestData` and advanced by plans; a KV pool that holds a `FakeModel` value per token and is read
  through the block tables only.
- It answers late. Commands queue up on its own side and run in order; a result exists when its future is
  collected, and how much runs earlier is up to `when`. A plan that is changed after it was handed over, or
  that depends on a token nobody has collected, is therefore found out.
- It asserts what a plan must keep (each assert says which rule). A wrong block that no
  rule forbids changes what is said.
- What a pool holds before anything is written is noise, so reading it is never harmless.

Rules of a plan
1. Between two forward passes the sampling of the first has been sent.
2. A freed slot was held, a new request enters a slot that is not, every other row's slot is held, no slot has
   two rows.
3. A row has at least one token and no more than its slot still holds; `sampling_rows` are exactly the rows
   that end there, but for those that are pooled.
4. Block tables reach as far as the row does; no table holds a block twice; the null block and blocks that a
   load is filling are in no reach of a row.
5. Tables share a block only at one index of one group, with equal texts up to the end of that block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from mainspring.base.config import EngineConfig
from mainspring.base.messages import (
    CheckHealth,
    Command,
    CommandResult,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)
from mainspring.testing.fake_kv_source import NULL_BLOCK, Load, decode_loads
from mainspring.testing.fake_model import FakeModel, History, Logits, Values, join_logprobs

When = Literal["at once", "when collected", "at random"]
T = TypeVar("T")


class LateFuture(Future[T], Generic[T]):
    """A future whose value is made when somebody asks for it; `before` is called first."""

    def __init__(self, before: Callable[[Future[T]], None]) -> None:
        super().__init__()
        self._before = before

    def result(self, timeout: float | None = None) -> T:
        self._before(self)
        return super().result(timeout)


class CommandQueue:
    """Runs commands in order: all that were sent before one, then that one. After a failure every command
    fails alike.
    """

    def __init__(self, when: When, seed: int, on_collect: Callable[[], None]) -> None:
        self._when = when
        self._on_collect = on_collect
        self._random = random.Random(seed)
        self._waiting: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._failure: Exception | None = None

    def send(self, command: Callable[[], T]) -> Future[T]:
        future: LateFuture[T] = LateFuture(self._collect)
        self._waiting.append((command, future))
        if self._when == "at once":
            self._run(len(self._waiting))
        elif self._when == "at random":
            self._run(self._random.randint(0, len(self._waiting)))
        return future

    def _collect(self, future: Future[Any]) -> None:
        self._on_collect()
        while not future.done():
            self._run(1)

    def _run(self, count: int) -> None:
        for _ in range(count):
            command, future = self._waiting.pop(0)
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(command())
            except Exception as error:
                self._failure = error
                future.set_exception(error)


@dataclass(slots=True)
class Slot:
    """What a worker knows of one request."""

    data: NewRequestData
    root: int
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.data.num_prompt_tokens]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.data.num_prompt_tokens :]


class FakeExecutor:
    """Fits `base.protocols.Executor`. One layer per entry of `model.windows`.

    `fail_at_step` makes the forward pass of that many-th plan (from 0) raise; `fail_rows` names requests
    whose next sampling reports an error of their own.
    """

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        when: When = "when collected",
        seed: int = 0,
        fail_at_step: int | None = None,
    ) -> None:
        self.model = model or FakeModel()
        # By request id: a plan does not tell a worker the adapter, so tests do.
        self.roots: dict[str, int] = {}
        self.fail_rows: set[str] = set()
        self.num_tokens_run: dict[str, int] = {}  # by request id, over all its stays
        self.plans: list[SchedulerOutput] = []
        self.num_dummies = 0  # steps of no rows
        self.slots: dict[int, Slot] = {}
        self._num_blocks, self._block_size = num_blocks, block_size
        self._fail_at_step = fail_at_step
        self._random = random.Random(seed)
        self.during_step: Callable[[], None] = lambda: None  # called while somebody waits for a result
        self._queue = CommandQueue(when, seed, lambda: self.during_step())
        self._unsampled: SchedulerOutput | None = None  # sent, its sampling not
        self._forward: tuple[SchedulerOutput, dict[int, Logits]] | None = None  # run, its sampling not
        self._arrived: list[str] = []  # loads that ended in the step that is running
        self._failed: list[str] = []
        self._loads: list[Load] = []
        self._on_failure: list[Callable[[str], None]] = []

    # -- before the first plan ------------------------------------------------------------------------------

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return [KVCacheSpec(1, 1, 4, window) for window in self.model.windows]

    def determine_available_memory(self) -> int:
        return self._num_blocks * self._block_size * sum(s.bytes_per_token for s in self.get_kv_cache_specs())

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        self.config = config
        self.group_of_layer = {layer: g for g, group in enumerate(config.groups) for layer in group.layers}
        self._tensor_of_layer = {layer: j for group in config.groups for j, layer in enumerate(group.layers)}
        noise, num_cells = np.random.default_rng(self.model.seed), config.num_blocks * config.block_size
        self.kv: Values = noise.integers(0, 2**63, (config.num_tensors, num_cells), dtype=np.uint64)

    # -- the calls of a step: nothing but their order is judged here -----------------------------------------

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        assert self._unsampled is None, "rule 1: a second forward pass before the sampling of the first"
        self._unsampled = plan if plan.sampling_rows else None
        self.plans.append(plan)
        step = len(self.plans) - 1
        return self._queue.send(lambda: self._execute(plan, step))

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        plan = self._unsampled
        assert plan is not None, "rule 1: sampling without a forward pass"
        rows = [] if mask is None else list(mask.rows)
        assert rows == list(plan.grammar_rows), f"masks for rows {rows}, the plan names {plan.grammar_rows}"
        self._unsampled = None
        return self._queue.send(lambda: self._sample(mask))

    def execute_dummy_batch(self) -> None:
        self.num_dummies += 1

    def has_any_rank_work(self, has_work: bool) -> bool:
        return has_work

    def call(self, command: Command) -> list[CommandResult]:
        return [isinstance(command, CheckHealth) or None]

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        self._on_failure.append(callback)

    def close(self) -> None:
        pass

    def die(self, cause: str) -> None:
        """As if the worker's process had ended."""
        for callback in self._on_failure:
            callback(cause)

    # -- the worker's side -----------------------------------------------------------------------------------

    def _execute(self, plan: SchedulerOutput, step: int) -> ModelRunnerOutput | None:
        if step == self._fail_at_step:
            raise RuntimeError(f"planned failure at step {step}")
        self._take_changes(plan)
        self._check_rows(plan)
        self._check_sharing()
        logits = {}
        for row, (slot_id, count) in enumerate(zip(plan.slots, plan.num_scheduled_tokens, strict=True)):
            slot = self.slots[slot_id]
            self._run(slot, count)
            if row in plan.sampling_rows:
                logits[row] = self._logits(slot, slot.num_computed)
        self._advance_loads()
        if plan.sampling_rows:
            self._forward = (plan, logits)
            return None
        return self._result(plan, {}, {}, {})

    def _take_changes(self, plan: SchedulerOutput) -> None:
        for slot_id in plan.freed_slots:
            assert self.slots.pop(slot_id, None) is not None, (
                f"rule 2: slot {slot_id} is freed and was not held"
            )
        for new in plan.new_requests:
            assert new.slot not in self.slots, f"rule 2: slot {new.slot} is taken and still held"
            assert 0 <= new.num_computed_tokens < len(new.token_ids), (
                "rule 3: a new request has nothing to compute"
            )
            assert len(new.block_ids) == len(self.config.groups)
            root = self.roots.get(new.request_id, self.model.plain_root)
            tables = [list(ids) for ids in new.block_ids]
            self.slots[new.slot] = Slot(new, root, list(new.token_ids), new.num_computed_tokens, tables)
        for append in plan.new_blocks:
            self.slots[append.slot].tables[append.group].extend(append.block_ids)
        for block in plan.blocks_to_zero:
            self.kv[:, self._cells(block)] = 0
        for src, dst in plan.blocks_to_copy:
            self.kv[:, self._cells(dst)] = self.kv[:, self._cells(src)]
        if plan.kv_transfer is not None:
            for load in decode_loads(plan.kv_transfer):
                self._loads.append(load)
                self._spoil(load)

    def _check_rows(self, plan: SchedulerOutput) -> None:
        assert len(plan.slots) == len(set(plan.slots)), "rule 2: two rows of one slot"
        assert plan.num_tokens == sum(plan.num_scheduled_tokens), "num_tokens is not the sum over rows"
        sampling = []
        loading = {block for load in self._loads for block in load.blocks(self._size)}
        for row, (slot_id, count) in enumerate(zip(plan.slots, plan.num_scheduled_tokens, strict=True)):
            assert slot_id in self.slots, f"rule 2: row {row} names slot {slot_id}, which is not held"
            slot = self.slots[slot_id]
            end = slot.num_computed + count
            assert 1 <= count <= len(slot.tokens) - slot.num_computed, (
                f"rule 3: {count} tokens of {slot.data.request_id}"
            )
            if end == len(slot.tokens) and slot.data.pooling is None:
                sampling.append(row)
            for group in range(len(slot.tables)):
                table = slot.tables[group]
                real = [block for block in table if block != NULL_BLOCK]
                reach = table[self._first_reachable(group, slot.num_computed) : -(-end // self._size)]
                assert len(table) * self._size >= end, (
                    f"rule 4: {slot.data.request_id} has {len(table)} blocks for {end} tokens"
                )
                assert NULL_BLOCK not in reach, f"rule 4: {slot.data.request_id} needs a block that it let go"
                assert not loading.intersection(reach), (
                    f"rule 4: {slot.data.request_id} uses blocks before they arrived"
                )
                if self.config.groups[group].spec.sliding_window is None:
                    assert len(real) == len(set(real)), "rule 4: a block twice in a table"
        assert sampling == list(plan.sampling_rows), f"rule 3: {plan.sampling_rows} should sample {sampling}"
        assert set(plan.grammar_rows) <= set(sampling), "a mask for a row that does not sample"

    def _check_sharing(self) -> None:
        """Rule 5, for the part of each table that its slot can still reach."""
        holder: dict[int, tuple[Slot, int, int]] = {}
        for slot in self.slots.values():
            for group, table in enumerate(slot.tables):
                for index in range(self._first_reachable(group, slot.num_computed), len(table)):
                    block = table[index]
                    other = holder.setdefault(block, (slot, group, index))
                    if block == NULL_BLOCK or other[0] is slot:
                        continue
                    end = (index + 1) * self._size
                    ids = f"{slot.data.request_id} and {other[0].data.request_id} share block {block}"
                    assert other[1:] == (group, index), f"rule 5: {ids} at different places"
                    assert end <= min(len(slot.tokens), len(other[0].tokens)), (
                        f"rule 5: {ids}, which is not full"
                    )
                    assert slot.tokens[:end] == other[0].tokens[:end], f"rule 5: {ids} with different texts"
                    assert slot.root == other[0].root, f"rule 5: {ids} with different adapters or salts"

    @property
    def _size(self) -> int:
        return self.config.block_size

    def _cells(self, block: int) -> slice:
        return slice(block * self._size, (block + 1) * self._size)

    def _first_reachable(self, group: int, position: int) -> int:
        """Index of the first block that the token at `position` or a later one may read."""
        window = self.config.groups[group].spec.sliding_window
        return 0 if window is None else max(0, position - window + 1) // self._size

    def _read(self, slot: Slot, layer: int, first: int, end: int) -> Values:
        """Values of positions [first, end) through the block table."""
        table = slot.tables[self.group_of_layer[layer]]
        cells = [table[p // self._size] * self._size + p % self._size for p in range(first, end)]
        return self.kv[self._tensor_of_layer[layer], cells]

    def _run(self, slot: Slot, count: int) -> None:
        """The forward pass of a row: write the values of its tokens."""
        start = slot.num_computed
        self._write(slot, range(start, start + count))
        slot.num_computed += count
        name = slot.data.request_id
        self.num_tokens_run[name] = self.num_tokens_run.get(name, 0) + count
        if slot.data.num_prompt_logprobs is not None:
            for position in range(start, min(start + count, slot.data.num_prompt_tokens - 1)):
                logits = self._logits(slot, position + 1)
                following = slot.tokens[position + 1]
                slot.prompt_logprobs.append(
                    self.model.logprobs(logits, following, slot.data.num_prompt_logprobs)
                )

    def _write(self, slot: Slot, positions: Iterable[int]) -> None:
        for position in positions:
            for layer, window in enumerate(self.model.windows):
                first, end = self.model.attended(window, position)
                value = self.model.value(
                    slot.root, slot.tokens[position], position, self._read(slot, layer, first, end)
                )
                block = slot.tables[self.group_of_layer[layer]][position // self._size]
                if block != NULL_BLOCK:
                    self.kv[self._tensor_of_layer[layer], block * self._size + position % self._size] = value

    def _logits(self, slot: Slot, num_tokens: int) -> Logits:
        seen = [
            self._read(slot, layer, self.model.visible(window, num_tokens), num_tokens)
            for layer, window in enumerate(self.model.windows)
        ]
        return self.model.logits(seen, num_tokens)

    def _sample(self, mask: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._forward is not None
        plan, logits = self._forward
        self._forward = None
        for row, bits in zip(mask.rows, mask.bitmask, strict=True) if mask is not None else ():
            logits[row] = self.model.mask(logits[row], bits)
        sampled: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        errors: dict[int, str] = {}
        for row in plan.sampling_rows:
            slot = self.slots[plan.slots[row]]
            assert np.isfinite(logits[row]).any(), f"{slot.data.request_id}: a mask that allows nothing"
            if slot.data.request_id in self.fail_rows:
                errors[row] = "planned failure of a row"
                continue
            sampled[row] = self._next_token(slot, logits[row])
            wanted = slot.data.sampling_params.logprobs
            if wanted is not None:
                logprobs[row] = self.model.logprobs(logits[row], sampled[row], wanted)
            slot.tokens.append(sampled[row])
        return self._result(plan, sampled, logprobs, errors)

    def _next_token(self, slot: Slot, logits: Logits) -> int:
        data = slot.data
        return self.model.choose(
            logits,
            data.sampling_params,
            slot.prompt,
            slot.output,
            data.stop_token_ids,
            data.bad_words_token_ids,
        )

    def _result(
        self,
        plan: SchedulerOutput,
        sampled: Mapping[int, int],
        logprobs: dict[int, TokenLogprobs],
        errors: dict[int, str],
    ) -> ModelRunnerOutput:
        prompt_logprobs, pooled = {}, {}
        for row, slot_id in enumerate(plan.slots):
            slot = self.slots[slot_id]
            if slot.data.pooling is not None and slot.num_computed == len(slot.tokens):
                pooled[row] = self._logits(slot, slot.num_computed).astype(np.float32)
            if slot.prompt_logprobs and slot.num_computed >= slot.data.num_prompt_tokens:
                prompt_logprobs[row] = join_logprobs(slot.prompt_logprobs)
                slot.prompt_logprobs = []
        arrived, failed, self._arrived, self._failed = self._arrived, self._failed, [], []
        tokens = [[sampled[row]] if row in sampled else [] for row in range(plan.num_rows)]
        return ModelRunnerOutput(tokens, logprobs, prompt_logprobs, errors, arrived, failed, pooled)

    def holds(self, group: int, block: int, history: History, start: int) -> bool:
        """Whether `block` holds what `history` has from position `start` on. For tests."""
        return all(
            np.array_equal(
                self.kv[self._tensor_of_layer[layer], self._cells(block)],
                history.values[layer][start : start + self._size],
            )
            for layer in self.config.groups[group].layers
        )

    # -- the worker's half of a KV connector -----------------------------------------------------------------

    def _spoil(self, load: Load) -> None:
        """Until a load has arrived its blocks hold nothing of use."""
        for block in load.blocks(self._size):
            noise = [self._random.getrandbits(63) for _ in range(self._size)]
            self.kv[:, self._cells(block)] = np.array(noise, dtype=np.uint64)

    def _advance_loads(self) -> None:
        """One step later some loads have arrived, and some never will."""
        for load in list(self._loads):
            load.delay_steps -= 1
            if load.delay_steps >= 0:
                continue
            self._loads.remove(load)
            if load.fails:
                self._spoil(load)
                self._failed.append(load.request_id)
            else:
                self._fill(load)
                self._arrived.append(load.request_id)

    def _fill(self, load: Load) -> None:
        """Write what computing the tokens [start, start + num_tokens) would have written."""
        history = History(self.model, self.roots.get(load.request_id, self.model.plain_root))
        for token_id in load.token_ids:
            history.append(token_id)
        for layer, values in enumerate(history.values):
            table, tensor = load.block_ids[self.group_of_layer[layer]], self.kv[self._tensor_of_layer[layer]]
            for start in range(load.start, len(load.token_ids), self._size):
                block = table[start // self._size]
                if block != NULL_BLOCK:
                    tensor[self._cells(block)] = values[start : start + self._size]


class ScriptedExecutor(FakeExecutor):
    """Says what it is told: `scripts` gives the output tokens by request id, or by the beginning of one.

    What is said next depends on how much was said before, so a script survives preemption and a new engine;
    masks, penalties and biases do not matter to it. Without a script and after its end the fake model speaks.
    """

    def __init__(
        self, scripts: Mapping[str, list[int]], model: FakeModel | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.scripts = dict(scripts)

    def _next_token(self, slot: Slot, logits: Logits) -> int:
        name = slot.data.request_id
        script = next(
            (s for key, s in self.scripts.items() if name == key or name.startswith(f"{key}-")), None
        )
        said = len(slot.tokens) - slot.data.num_prompt_tokens
        if script is None or said >= len(script):  # an engine that runs ahead asks for more than it will use
            return super()._next_token(slot, logits)
        return script[said]


def make_fake(config: EngineConfig) -> FakeExecutor:
    """For `EngineConfig.executor`, as `mainspring.testing.fake_executor:make_fake`, so in any process.

    `executor_args` may hold `scripts`, `windows`, `model_seed` and every option of `FakeExecutor`.
    """
    options = dict(config.executor_args)
    scripts = options.pop("scripts", None)
    model = FakeModel(config.vocab_size, options.pop("windows", (None,)), options.pop("model_seed", 0))
    options = {"block_size": config.block_size, **options}
    return FakeExecutor(model, **options) if scripts is None else ScriptedExecutor(scripts, model, **options)
