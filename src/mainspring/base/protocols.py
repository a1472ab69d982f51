"""Small contracts between rooms that do not know each other. Whoever needs a thing names it here; whoever has
one fits the shape; `engine/build.py` hands it over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mainspring.base.messages import (
    Command,
    CommandResult,
    EngineCoreRequest,
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)

Clock = Callable[[], float]  # seconds, monotonic


class Grammar(Protocol):
    """What one request may still say. Fed the booked tokens, each once and in order."""

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next in `row`, [ceil(vocab_size / 32)] int32, clear the
        others."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and no change, if it may not come here."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted ones."""

    def is_finished(self) -> bool:
        """Nothing but the end may follow."""


class GrammarCompiler(Protocol):
    """Makes matchers off the loop. A future that fails ends its own request only."""

    def compile(self, request: EngineCoreRequest) -> Future[Grammar]: ...

    def prepare(self) -> Future[bool]:
        """Do beforehand what the first compilation would have to."""

    def close(self) -> None: ...


class KVSource(Protocol):
    """The scheduler's half of a KV connector: blocks that exist elsewhere and can be brought here.

    The other half runs in the workers; what passes between them (`metadata`) is opaque to everybody else.
    A worker reports each requested load exactly once, as finished or failed, also when the request is gone:
    until then its blocks are not given to anybody.
    """

    def num_matched_tokens(self, request: EngineCoreRequest, num_local_tokens: int) -> int:
        """How many tokens after the first `num_local_tokens` can be brought, a whole number of blocks."""

    def start_load(
        self, request_id: str, block_ids: tuple[list[int], ...], start: int, num_tokens: int
    ) -> None:
        """Bring the KV of tokens [start, start + num_tokens) into the blocks; told to workers with the next
        plan."""

    def metadata(self) -> bytes | None:
        """What the next plan must carry, or None. Called once per plan: it takes what it returns."""


class Executor(Protocol):
    """One or many workers, seen as one. Calls run in the order given; a future may be resolved late.

    Order of a step: `execute_model(plan)`, then, if `plan.sampling_rows`, `sample_tokens(mask)`. The result
    is the future of the last of them; before the next `execute_model` the sampling of this one has been sent.
    """

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        """One per layer, in order."""

    def determine_available_memory(self) -> int:
        """Bytes that the KV pool may take, the least of all workers."""

    def initialize(self, config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the pool and warm up. Once, before the first plan."""

    def execute_model(
        self, plan: SchedulerOutput, non_block: bool = True
    ) -> Future[ModelRunnerOutput | None]:
        """Run the forward pass; None when sampling is still to come, else (no sampling rows) the step's
        result."""

    def sample_tokens(self, mask: GrammarOutput | None, non_block: bool = True) -> Future[ModelRunnerOutput]:
        """Sample what the last `execute_model` left; the step's result."""

    def execute_dummy_batch(self) -> None:
        """A forward pass of no rows, for ranks that must make every step together."""

    def has_any_rank_work(self, has_work: bool) -> bool:
        """Whether any of the ranks in lock-step has something to run; all of them ask at the same step."""

    def call(self, command: Command) -> list[CommandResult]:
        """Ask every worker; one answer each."""

    def register_failure_callback(self, callback: Callable[[str], None]) -> None:
        """`callback(cause)` is called once, from any thread, when a worker has died."""

    def close(self) -> None:
        """Idempotent."""
