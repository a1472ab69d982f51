"""Random lives of an engine, and the promise they must keep.

A `Scenario` is all that happens to one engine: settings, and requests with the step at which they come, what
they ask for and what befalls them. `play` drives it through a real `EngineCore` with a `FakeExecutor` and
checks after every step that the bookkeeping is whole, and at the end that

1. every request said exactly what `reference` says, or, if it was aborted, a beginning of that;
2. every request ended once, with the right reason, and nothing was said of it afterwards;
3. nothing is left: no request, no slot, no block is held;
4. all this took no more steps than the requests would take one after another, a few times over.

`scenarios.py` makes them up; `smallest` makes a failing one simple.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
from msgspec import Struct, structs

from mainspring.base.config import SchedulerConfig
from mainspring.base.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KVCacheConfig,
    ResetPrefixCache,
    TokenLogprobs,
)
from mainspring.base.params import SamplingParams, StructuredOutputsParams
from mainspring.core import prefix
from mainspring.core.kv_cache import KVCacheManager
from mainspring.core.request import Request
from mainspring.core.scheduler import Scheduler
from mainspring.engine.build import blocks_for, group_layers
from mainspring.engine.core import EngineCore
from mainspring.testing.fake_clock import FakeClock
from mainspring.testing.fake_executor import FakeExecutor, When
from mainspring.testing.fake_grammar import FakeGrammar, FakeGrammarCompiler
from mainspring.testing.fake_kv_source import FakeKVSource, RemotePrefix
from mainspring.testing.fake_model import (
    FakeModel,
    History,
    Said,
    join_logprobs,
    reference,
    reference_prompt_logprobs,
)

VOCAB_SIZE = 64


@dataclass(frozen=True)
class Structure:
    """A fake grammar: how long its sentences are, and how its compilation goes."""

    length: int
    compile_steps: int = 0
    fails: bool = False


@dataclass(frozen=True)
class Guest:
    """One request, and what befalls it."""

    message: EngineCoreRequest
    arrives_at: int = 0  # step
    aborted_at: int | None = None  # step
    aborted_inside: bool = False  # while that step runs, not before it
    structure: Structure | None = None
    elsewhere: tuple[RemotePrefix, ...] = ()


@dataclass(frozen=True)
class Scenario:
    guests: tuple[Guest, ...]
    windows: tuple[int | None, ...] = (None,)  # per layer; equal ones share a group
    block_size: int = 4
    spare_blocks: int = 8  # beyond what one longest sequence needs
    num_blocks: int | None = None  # instead: how many can be held (the null block comes on top)
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32
    chunked: bool = True
    threshold: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    caching: bool = True
    watermark: float = 0.0
    depth: int = 1
    num_stages: int = 1
    when: When = "when collected"
    crashes: tuple[int, ...] = ()  # steps before which the engine is thrown away
    resets: tuple[tuple[int, bool], ...] = ()  # steps before which the cache is reset, and whether by force
    seed: int = 0


def guest(
    request_id: str,
    prompt_token_ids: list[int],
    *,
    arrives_at: int = 0,
    aborted_at: int | None = None,
    structure: Structure | None = None,
    elsewhere: tuple[RemotePrefix, ...] = (),
    params: SamplingParams | None = None,
    **message: Any,
) -> Guest:
    """A guest in one line; without `params` it is greedy. Other arguments are fields of its
    `EngineCoreRequest`.
    """
    return Guest(
        EngineCoreRequest(
            request_id,
            prompt_token_ids,
            params or SamplingParams(temperature=0.0, seed=0, max_tokens=8),
            arrival_time_s=float(arrives_at),
            structured_outputs=StructuredOutputsParams(regex="fake") if structure is not None else None,
            **message,
        ),
        arrives_at,
        aborted_at,
        structure=structure,
        elsewhere=elsewhere,
    )


# -- the drive -----------------------------------------------------------------------------------------------


@dataclass
class Transcript:
    """What a front end has received of one request: its journal."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    num_cached_tokens: list[int] = field(default_factory=list)
    last: EngineCoreOutput | None = None
    aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.last is not None or self.aborted

    def take(self, output: EngineCoreOutput) -> None:
        name = output.request_id
        assert not self.is_over, f"{name}: something is said after the end"
        assert output.new_token_ids or output.finish_reason is not None, f"{name}: an empty output"
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            assert len(output.new_logprobs.token_ids) == len(output.new_token_ids), (
                f"{name}: logprobs per token"
            )
            self.logprobs.append(output.new_logprobs)
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, f"{name}: prompt logprobs twice"
            self.prompt_logprobs = output.prompt_logprobs
        if output.num_cached_tokens is not None:
            assert output.num_cached_tokens >= 0
            self.num_cached_tokens.append(output.num_cached_tokens)
        if output.finish_reason is not None:
            self.last = output


class Drive:
    """An engine with its fakes, stepped by hand. `scenario.guests` are those it may be given."""

    def __init__(self, scenario: Scenario, executor_class: type[FakeExecutor] = FakeExecutor) -> None:
        self.scenario = scenario
        self.model = FakeModel(VOCAB_SIZE, scenario.windows, scenario.seed)
        self.guests = {guest.message.request_id: guest for guest in scenario.guests}
        self.transcripts: dict[str, Transcript] = {}
        self.num_steps = 0
        self._aborts_inside: list[str] = []
        self._executor_class = executor_class
        self.start_engine()

    def start_engine(self) -> None:
        """A new engine that knows nothing of an earlier one."""
        case = self.scenario
        config = SchedulerConfig(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            max_model_len=case.max_model_len,
            policy=case.policy,
            enable_chunked_prefill=case.chunked,
            long_prefill_token_threshold=case.threshold,
            watermark=case.watermark,
            enable_prefix_caching=case.caching,
            num_stages=case.num_stages,
        )
        self.executor = self._executor_class(self.model, when=case.when, seed=case.seed)
        self.executor.roots = {name: self.model.root(guest.message) for name, guest in self.guests.items()}
        self.executor.during_step = self._abort_now
        max_in_flight = case.depth * case.max_num_batched_tokens
        pool = KVCacheConfig(0, case.block_size, group_layers(self.executor.get_kv_cache_specs()))
        num_blocks = case.num_blocks
        if num_blocks is None:
            num_blocks = blocks_for(pool, case.max_model_len, max_in_flight) + case.spare_blocks
        pool = structs.replace(pool, num_blocks=1 + num_blocks)
        self.executor.initialize(pool, case.max_model_len)
        elsewhere = {name: guest.elsewhere for name, guest in self.guests.items() if guest.elsewhere}
        self.kv = KVCacheManager(pool, enable_caching=case.caching, max_in_flight_tokens=max_in_flight)
        self.scheduler = Scheduler(
            config,
            self.kv,
            clock=FakeClock(step_s=0.001),
            vocab_size=VOCAB_SIZE,
            kv_source=FakeKVSource(elsewhere, case.block_size) if elsewhere else None,
        )
        structures = {n: g.structure for n, g in self.guests.items() if g.structure is not None}
        self.compiler = FakeGrammarCompiler(
            lambda message: self.grammar_of(self.guests[message.request_id]),
            {name: structure.compile_steps for name, structure in structures.items()},
            frozenset(name for name, structure in structures.items() if structure.fails),
        )
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            depth=case.depth,
            grammars=self.compiler,
            sleep=lambda seconds: None,
        )

    def grammar_of(self, guest: Guest) -> FakeGrammar:
        assert guest.structure is not None
        return FakeGrammar(VOCAB_SIZE, guest.message.eos_token_id, guest.structure.length, self.scenario.seed)

    def add(self, request_id: str) -> None:
        """Hand over a request, with what is already known of its answer."""
        transcript = self.transcripts.setdefault(request_id, Transcript())
        message = self.guests[request_id].message
        self.core.add_request(structs.replace(message, output_token_ids=list(transcript.token_ids)))

    def abort(self, request_id: str) -> None:
        self._mark_aborted(request_id)
        self.core.abort_requests([request_id])

    def abort_inside_next_step(self, request_id: str) -> None:
        """As another thread does it, while the step runs."""
        self._aborts_inside.append(request_id)

    def _abort_now(self) -> None:
        """The engine waits for a result, and aborts arrive."""
        while self._aborts_inside:
            request_id = self._aborts_inside.pop()
            if request_id in self.scheduler.requests:  # else its end is on the way already
                self._mark_aborted(request_id)
            self.core.aborts_queue.put([request_id])

    def _mark_aborted(self, request_id: str) -> None:
        transcript = self.transcripts.get(request_id)
        if transcript is not None and not transcript.is_over:
            transcript.aborted = True

    def crash(self) -> None:
        """The engine is gone; another gets what the front end knows."""
        self.start_engine()
        for request_id, transcript in self.transcripts.items():
            if not transcript.is_over:
                self.add(request_id)

    def step(self) -> list[EngineCoreOutput]:
        """One step, checked; what it said."""
        self.compiler.tick()
        first = len(self.executor.plans)
        outputs = self.core.step()
        self.num_steps += 1
        self._check_plans(first)
        self.core.check()
        self._take(outputs)
        return [output for message in outputs.values() for output in message.outputs]

    def run(self, max_steps: int = 1000) -> None:
        """Step until there is nothing to do."""
        while self.core.has_work():
            max_steps -= 1
            assert max_steps >= 0, f"no end in sight after {self.num_steps} steps"
            self.step()

    def _check_plans(self, first: int) -> None:
        for plan in self.executor.plans[first:]:
            assert plan.num_tokens <= self.scenario.max_num_batched_tokens, "the token budget is overspent"
            assert plan.num_rows <= self.scenario.max_num_seqs, "more rows than max_num_seqs"
            assert all(0 <= slot < self.scenario.max_num_seqs for slot in plan.slots)

    def _take(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, message in outputs.items():
            for output in message.outputs:
                guest = self.guests[output.request_id]
                assert client == guest.message.client_index, f"{output.request_id}: sent to client {client}"
                self.transcripts[output.request_id].take(output)

    def check_idle(self) -> None:
        """Nothing is left."""
        self.core.check()
        assert not self.core.has_work()
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert not self.scheduler.parked
        assert len(self.scheduler.waiting) == 0
        assert self.kv.pool.num_idle == self.kv.pool.num_blocks - 1, "a block is held by nobody"

    def check_cache(self) -> None:
        """A name in the prefix cache stands for one text that somebody had, and its block holds just that."""
        names: dict[bytes, tuple[History, int]] = {}
        for name, transcript in self.transcripts.items():
            message = structs.replace(self.guests[name].message, output_token_ids=transcript.token_ids)
            request = Request(message, self.scenario.max_model_len, [])
            history = History(self.model, self.model.root(message))
            for token_id in request.token_ids:
                history.append(token_id)
            num_blocks = len(request.token_ids) // self.kv.block_size
            for i, known in enumerate(prefix.extend_hashes(request, self.kv.block_size, num_blocks)):
                other, place = names.setdefault(known, (history, i))
                end = (i + 1) * self.kv.block_size
                assert place == i, "one name for two texts"
                assert other.agrees(history, end), "one name for two texts"
        for group, by_hash in enumerate(self.kv.pool._by_hash):
            for known, block in by_hash.items():
                assert known in names, f"block {block} is remembered for a text that nobody had"
                history, i = names[known]
                held = self.executor.holds(group, block, history, i * self.kv.block_size)
                assert held, f"block {block} does not hold its text"

    def said(self, guest: Guest) -> Said:
        """What the guest has to say, all of it."""
        grammar = self.grammar_of(guest) if guest.structure is not None else None
        return reference(guest.message, self.model, self.scenario.max_model_len, grammar)

    def check_promise(self) -> None:
        for name, guest in self.guests.items():
            transcript = self.transcripts.get(name)
            if transcript is not None:
                self._check_guest(guest, transcript)

    def _check_guest(self, guest: Guest, got: Transcript) -> None:
        name = guest.message.request_id
        if guest.structure is not None and guest.structure.fails:
            assert got.aborted or (got.last is not None and got.last.finish_reason is FinishReason.ERROR)
            assert got.token_ids == []
            return
        said = self.said(guest)
        if got.aborted:
            assert got.token_ids == said.token_ids[: len(got.token_ids)], f"{name} said something else"
            return
        assert got.last is not None, f"{name} got no answer"
        assert got.last.finish_reason is not FinishReason.ERROR, f"{name}: {got.last.error}"
        assert got.token_ids == said.token_ids, f"{name} said something else"
        assert (got.last.finish_reason, got.last.stop_reason) == said[1:3], f"{name} ended for another reason"
        assert_equal_logprobs(got.logprobs, said.logprobs, name)
        wanted = reference_prompt_logprobs(guest.message, self.model)
        prompt_logprobs = [] if got.prompt_logprobs is None else [got.prompt_logprobs]
        assert_equal_logprobs(prompt_logprobs, [] if wanted is None else [wanted], name)
        assert got.num_cached_tokens, f"{name}: num_cached_tokens was never told"


def assert_equal_logprobs(got: list[TokenLogprobs], wanted: list[TokenLogprobs], name: str) -> None:
    assert bool(got) == bool(wanted), f"{name}: {len(got)} logprobs, {len(wanted)} wanted"
    if got:
        pairs = zip(join_logprobs(got), join_logprobs(wanted), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs), f"{name} has other logprobs"


def play(scenario: Scenario, executor_class: type[FakeExecutor] = FakeExecutor) -> Drive:
    """Live through `scenario`; an `AssertionError` says which promise was broken."""
    drive = Drive(scenario, executor_class)
    last_event = max(
        [g.arrives_at for g in scenario.guests]
        + [g.aborted_at or 0 for g in scenario.guests]
        + list(scenario.crashes)
        + [step for step, _ in scenario.resets]
    )
    for now in range(last_event + 1):
        if now in scenario.crashes:
            drive.crash()
        for step, by_force in scenario.resets:
            if step == now:
                reset(drive, by_force)
        for guest in scenario.guests:
            if guest.arrives_at == now:
                drive.add(guest.message.request_id)
            if guest.aborted_at == now and guest.aborted_inside and drive.core.has_work():
                drive.abort_inside_next_step(guest.message.request_id)
            elif guest.aborted_at == now:
                drive.abort(guest.message.request_id)
        if drive.core.has_work():
            drive.step()
    drive.run(most_steps(scenario))
    drive.check_promise()
    drive.check_idle()
    drive.check_cache()
    return drive


def reset(drive: Drive, by_force: bool) -> None:
    """`ResetPrefixCache`, whose answer must be true."""
    held = drive.kv.pool.usage > 0
    done = drive.core.call(ResetPrefixCache(reset_running_requests=by_force))
    assert done == (by_force or not held) or drive.scheduler.has_parked_requests(), (
        "a reset that is misreported"
    )
    assert not done or not any(drive.kv.pool._by_hash), "a reset that forgets nothing"
    drive.core.check()


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Simpler scenarios near this one, the boldest first."""
    for i in range(len(scenario.guests)):
        yield replace(scenario, guests=scenario.guests[:i] + scenario.guests[i + 1 :])
    plain = Scenario(guests=scenario.guests)
    for name in (
        "crashes",
        "resets",
        "windows",
        "depth",
        "num_stages",
        "policy",
        "watermark",
        "threshold",
        "when",
        "caching",
        "seed",
    ):
        if getattr(scenario, name) != getattr(plain, name):
            yield replace(scenario, **{name: getattr(plain, name)})
    for i, guest in enumerate(scenario.guests):
        message = guest.message
        simpler = [
            replace(guest, elsewhere=()),
            replace(guest, aborted_at=None),
            replace(guest, aborted_inside=False),
            replace(guest, arrives_at=0),
            replace(guest, structure=None, message=structs.replace(message, structured_outputs=None)),
            replace(
                guest,
                message=structs.replace(
                    message,
                    sampling_params=SamplingParams(
                        temperature=0.0, seed=0, max_tokens=message.sampling_params.max_tokens
                    ),
                ),
            ),
            replace(
                guest,
                message=structs.replace(
                    message, eos_token_id=None, stop_token_ids=[], bad_words_token_ids=[]
                ),
            ),
            replace(
                guest,
                message=structs.replace(message, lora=None, cache_salt=None, priority=0, client_index=0),
            ),
            replace(
                guest, message=structs.replace(message, prompt_token_ids=message.prompt_token_ids[:-1] or [0])
            ),
        ]
        for other in simpler:
            if other != guest:
                yield replace(scenario, guests=(*scenario.guests[:i], other, *scenario.guests[i + 1 :]))


def smallest(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Simplify a scenario as long as it fails."""
    while (found := next((s for s in smaller(scenario) if s.guests and fails(s)), None)) is not None:
        scenario = found
    return scenario


def brief(thing: object) -> str:
    """A constructor's call that makes `thing` again, without what is default anyway."""
    if type(thing) is tuple:
        return f"({''.join(brief(item) + ', ' for item in thing)})"
    if isinstance(thing, Struct):
        defaults = {f.name: f.default for f in structs.fields(type(thing))}  # lists are made anew: none here
    elif is_dataclass(thing):
        defaults = {f.name: f.default for f in fields(thing)}
    else:
        return repr(thing)
    values = {name: getattr(thing, name) for name in defaults}
    told = [f"{name}={brief(value)}" for name, value in values.items() if value not in (defaults[name], [])]
    return f"{type(thing).__name__}({', '.join(told)})"


def most_steps(scenario: Scenario) -> int:
    """What all guests would need one after another, three times over."""
    chunk = min(scenario.max_num_batched_tokens, scenario.threshold or scenario.max_num_batched_tokens)
    total = 0
    for guest in scenario.guests:
        num_prompt = len(guest.message.prompt_token_ids)
        num_output = min(
            guest.message.sampling_params.max_tokens or 10**9, scenario.max_model_len - num_prompt
        )
        total += math.ceil((num_prompt + num_output) / chunk) + num_output + scenario.depth + 2
        total += (scenario.num_stages - 1) * num_output
        total += guest.structure.compile_steps if guest.structure is not None else 0
        total += sum(prefix.delay_steps + 2 for prefix in guest.elsewhere)
    return 3 * total + 20
