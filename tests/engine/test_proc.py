"""The busy loop with a list for a mailbox and a clock that stands: what comes, what is said, how it ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import (
    Command,
    EngineCoreOutputs,
    FinishReason,
    GetStats,
    IsPaused,
    PauseScheduler,
    ResetPrefixCache,
    ResumeScheduler,
    SchedulerStats,
    Sleep,
    UtilityOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.engine.mailbox import ClientGone, ClientStalled, Refused
from mainspring.engine.proc import SHUTTING_DOWN_TEXT, EngineCoreProc
from mainspring.engine.wire import RequestType, Utility
from mainspring.testing.fake_clock import FakeClock
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.list_mailbox import ListMailbox
from mainspring.testing.simulation import Drive, Guest, Scenario, Structure, guest

CASE = Scenario(guests=(), block_size=4, num_blocks=40, max_model_len=64, max_num_batched_tokens=32)
ADD, ABORT, UTILITY = RequestType.ADD, RequestType.ABORT, RequestType.UTILITY
Event = Callable[[], None] | None


def greedy(name: str, max_tokens: int = 8, **others) -> Guest:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return guest(name, [1 + len(name), 2, 3], params=params, **others)


class Loop:
    """A busy loop that lives through a story: one event each time it looks into its mailbox, and a shutdown
    when nothing is left to happen and to run."""

    def __init__(self, *guests: Guest, timeout_s: float = 0.0, **scenario) -> None:
        self.drive = Drive(replace(CASE, guests=guests, **scenario))
        self.core = self.drive.core
        self.clock = FakeClock()
        self.mailbox = ListMailbox()
        self.proc = EngineCoreProc(self.core, self.mailbox, shutdown_timeout_s=timeout_s, clock=self.clock)
        self.mailbox.on_receive = self._go_on
        self.mailbox.on_wait = self._wait
        self._story: list[Event] = []
        self._num_calls = 0
        self.at_the_end: Event = self.shut_down

    def run(self, *story: Event) -> None:
        self._story = list(story)
        self.proc.run_busy_loop()
        assert not self._story, "the loop ended before its story"
        self.core.check()

    def _go_on(self) -> None:
        self.core.check()
        if self._story and (event := self._story.pop(0)) is not None:
            event()

    def _wait(self) -> None:
        if self._story:
            self.mailbox.put(RequestType.WAKEUP)
        else:
            self.at_the_end()

    # -- events ----------------------------------------------------------------------------------------------

    def add(self, *names: str) -> Event:
        def put() -> None:
            for name in names:
                self.mailbox.put(ADD, self.drive.guests[name].message)

        return put

    def abort(self, *names: str) -> Event:
        return lambda: self.mailbox.put(ABORT, list(names))

    def call(self, *commands: Command) -> Event:
        def put() -> None:
            for command in commands:
                self.mailbox.put(UTILITY, Utility(0, self._num_calls, command))
                self._num_calls += 1

        return put

    def shut_down(self) -> None:
        self.proc.request_shutdown()
        self.mailbox.put(RequestType.WAKEUP)

    # -- what came of it -------------------------------------------------------------------------------------

    def tokens(self, name: str) -> list[int]:
        client = self.drive.guests[name].message.client_index
        return [t for o in self.mailbox.said_to(client) if o.request_id == name for t in o.new_token_ids]

    def reason(self, name: str) -> FinishReason | None:
        """Why it ended; None if nothing was said of an end. Nothing may be said afterwards."""
        client = self.drive.guests[name].message.client_index
        outputs = [o for o in self.mailbox.said_to(client) if o.request_id == name]
        assert all(o.finish_reason is None for o in outputs[:-1]), f"{name}: something is said after the end"
        return outputs[-1].finish_reason if outputs else None

    def assert_whole(self, *names: str) -> None:
        for name in names:
            said = self.drive.said(self.drive.guests[name])
            assert (self.tokens(name), self.reason(name)) == (said.token_ids, said.finish_reason), name

    def assert_beginning(self, name: str) -> None:
        whole = self.drive.said(self.drive.guests[name]).token_ids
        assert self.tokens(name) == whole[: len(self.tokens(name))], name

    @property
    def answers(self) -> list[UtilityOutput]:
        return self.mailbox.answers_to(0)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_are_run_and_the_loop_waits_only_when_idle(depth: int):
    loop = Loop(greedy("a"), greedy("bb"), greedy("ccc"), depth=depth)
    loop.run(loop.add("a"), None, loop.add("bb", "ccc"))
    loop.assert_whole("a", "bb", "ccc")
    assert loop.mailbox.num_waits == 1
    assert loop.mailbox.death is None


def test_a_wakeup_says_nothing():
    loop = Loop()
    loop.run(lambda: loop.mailbox.put(RequestType.WAKEUP), lambda: loop.mailbox.put(RequestType.WAKEUP))
    assert loop.mailbox.delivered == []


def test_an_abort_behind_its_add_is_honoured():
    """The eager copy came too early, when the id was not known yet; the one in order finds it."""
    loop = Loop(greedy("a"), greedy("b"))

    def both() -> None:
        loop.core.aborts_queue.put(["a"])
        loop.add("a", "b")()
        loop.abort("a", "never heard of")()

    loop.run(both)
    assert loop.tokens("a") == []
    assert loop.reason("a") is None
    loop.assert_whole("b")


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_during_a_step_is_honoured_before_its_outputs(depth: int):
    loop = Loop(greedy("a"), greedy("b"), depth=depth)
    spoken: list[int] = []

    def abort_inside() -> None:
        if len(loop.tokens("a")) == 3 and not spoken:
            spoken.append(len(loop.drive.executor.plans))
            loop.core.aborts_queue.put(["a"])

    loop.drive.executor.during_step = abort_inside
    loop.run(loop.add("a", "b"))
    assert len(spoken) == 1
    assert len(loop.tokens("a")) == 3
    assert loop.reason("a") is None
    loop.assert_beginning("a")
    loop.assert_whole("b")


def test_commands_are_answered_by_call():
    loop = Loop(greedy("a"))
    loop.run(loop.add("a"), loop.call(GetStats(), IsPaused()))
    assert [answer.call_id for answer in loop.answers] == [0, 1]
    stats = msgspec.msgpack.decode(loop.answers[0].result, type=SchedulerStats)
    assert stats.num_running == 1
    assert msgspec.msgpack.decode(loop.answers[1].result) is False


def test_a_command_that_fails_hurts_its_caller_alone():
    loop = Loop(greedy("a"))
    loop.run(loop.add("a"), loop.call(Sleep(level=7), GetStats()))
    failed, after = loop.answers
    assert failed.error is not None
    assert "sleep level 7" in failed.error
    assert failed.result == b""
    assert after.error is None
    loop.assert_whole("a")


def test_a_request_that_cannot_be_added_hurts_itself_alone(monkeypatch):
    loop = Loop(greedy("a"), greedy("bad"))
    add_request = loop.core.scheduler.add_request

    def refuse_bad(message) -> None:
        add_request(message)
        if message.request_id == "bad":
            raise ValueError("planned: after it was queued")

    monkeypatch.setattr(loop.core.scheduler, "add_request", refuse_bad)
    loop.run(loop.add("bad", "a"))
    assert loop.reason("bad") is FinishReason.ERROR
    assert "planned: after it was queued" in loop.mailbox.said_to(0)[0].error
    assert loop.tokens("bad") == []
    loop.assert_whole("a")


def test_an_id_in_use_is_refused_to_whoever_comes_second():
    """Cases B017 and B164: two requests of one id; the first is unharmed, the second gets an answer."""
    first = greedy("a")
    loop = Loop(first)
    second = msgspec.structs.replace(first.message, client_index=1)
    loop.run(loop.add("a"), lambda: loop.mailbox.put(ADD, second))
    loop.assert_whole("a")
    [refusal] = loop.mailbox.said_to(1)
    assert refusal.finish_reason is FinishReason.ERROR
    assert "in use" in refusal.error


def test_an_id_may_be_used_again_after_its_end():
    """Case B164."""
    loop = Loop(greedy("a", max_tokens=2))
    loop.run(loop.add("a"), None, None, loop.add("a"))
    assert loop.tokens("a") == 2 * loop.drive.said(loop.drive.guests["a"]).token_ids


def test_requests_of_a_client_that_is_gone_are_freed_and_others_untouched():
    loop = Loop(greedy("a"), greedy("b", client_index=1), greedy("c", client_index=1), max_num_seqs=2)
    loop.run(
        loop.add("a", "b", "c"),
        None,
        lambda: loop.mailbox.put(ABORT, ClientGone(1)),
        loop.call(GetStats()),
    )
    stats = msgspec.msgpack.decode(loop.answers[0].result, type=SchedulerStats)
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert len(loop.tokens("b")) < 8
    assert loop.tokens("c") == []
    loop.assert_whole("a")


def test_requests_of_a_client_that_reads_too_little_end_with_an_error_and_others_are_untouched():
    loop = Loop(greedy("a"), greedy("b", client_index=1), greedy("c", client_index=1), max_num_seqs=2)
    loop.run(
        loop.add("a", "b", "c"),
        None,
        lambda: loop.mailbox.put(ABORT, ClientStalled(1)),
        loop.add("c"),
    )
    loop.assert_beginning("b")
    [told] = {output.error for output in loop.mailbox.said_to(1) if output.error is not None}
    assert "did not read" in told
    assert loop.reason("b") is FinishReason.ERROR
    loop.assert_whole("a")


def test_a_refusal_is_handed_on():
    loop = Loop()
    answer = EngineCoreOutputs(utility_output=UtilityOutput(5, b"", "malformed"))
    loop.run(lambda: loop.mailbox.put(UTILITY, Refused(0, answer)))
    assert loop.answers == [answer.utility_output]


# -- death ---------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_while_the_loop_waits_ends_it_with_the_cause():
    loop = Loop()
    with pytest.raises(RuntimeError, match=r"Executor failed\. worker 3 was killed"):
        loop.run(lambda: loop.mailbox.put(RequestType.EXECUTOR_FAILED, "worker 3 was killed"))
    assert "worker 3 was killed" in loop.mailbox.death


def test_a_step_that_raises_is_announced_with_its_innermost_cause():
    """Case B010, the loop's part: nothing is swallowed; cause and place are told to every client."""

    class Failing(FakeExecutor):
        def execute_model(self, plan, non_block=True):
            if len(self.plans) == 3:
                raise MemoryError("no room for the activations")
            return super().execute_model(plan, non_block)

    loop = Loop(*(greedy(name, client_index=i % 2) for i, name in enumerate("abcde")), max_num_seqs=2)
    loop.core.executor = loop.drive.executor
    loop.drive.executor.__class__ = Failing
    with pytest.raises(EngineDeadError, match="MemoryError"):
        loop.run(loop.add(*"abcde"))
    assert loop.mailbox.death.startswith("MemoryError: no room for the activations (test_proc.py:")


# -- shutdown ------------------------------------------------------------------------------------------------


def test_without_a_timeout_everything_is_aborted_at_once():
    """Case B031: running and waiting ones alike, each with an output that says so."""
    loop = Loop(greedy("a"), greedy("b"), greedy("c"), max_num_seqs=2)
    loop.run(loop.add("a", "b", "c"), None, loop.shut_down)
    for name in "abc":
        assert loop.reason(name) is FinishReason.ABORT
        loop.assert_beginning(name)
    assert len(loop.tokens("a")) == 3
    assert loop.tokens("c") == []


@pytest.mark.parametrize("depth", [1, 2])
def test_with_a_timeout_everything_that_lives_goes_on(depth: int):
    """Case B031: a drain."""
    loop = Loop(greedy("a"), greedy("b"), greedy("c"), max_num_seqs=2, timeout_s=10.0, depth=depth)
    loop.run(loop.add("a", "b", "c"), None, loop.shut_down)
    loop.assert_whole("a", "b", "c")
    assert loop.mailbox.num_waits == 0


def test_what_still_runs_at_the_deadline_is_aborted():
    """Case B031. A second request to end, in between, does not move the deadline."""
    loop = Loop(greedy("short", 4), greedy("long", 30), timeout_s=10.0)

    def later() -> None:
        loop.clock.advance(6.0)
        loop.shut_down()

    loop.run(loop.add("short", "long"), loop.shut_down, later, None, None, None, later, None)
    loop.assert_whole("short")
    assert loop.reason("long") is FinishReason.ABORT
    assert 5 <= len(loop.tokens("long")) <= 8
    loop.assert_beginning("long")


def test_a_drain_waits_for_a_grammar_but_not_beyond_the_deadline():
    """Case B031: requests parked for an outside event."""
    loop = Loop(greedy("a", structure=Structure(5, compile_steps=1000)), timeout_s=10.0)
    loop.run(loop.add("a"), loop.shut_down, None, None, lambda: loop.clock.advance(11.0))
    assert loop.reason("a") is FinishReason.ABORT


@pytest.mark.parametrize("timeout_s", [0.0, 10.0])
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_shutdown_while_paused_answers_what_the_pause_holds(timeout_s: float, mode: str):
    """Case B175: nothing that is held back can ever run, so it is not waited for."""
    loop = Loop(greedy("a", 4), greedy("b"), max_num_seqs=1, timeout_s=timeout_s)
    loop.run(loop.add("a", "b"), loop.call(PauseScheduler(mode)), *[None] * 3, loop.shut_down)
    assert loop.reason("b") is FinishReason.ABORT
    if mode == "wait":
        loop.assert_whole("a")
    else:
        assert loop.reason("a") is FinishReason.ABORT
    assert [answer.error for answer in loop.answers] == [None]


def test_while_shutting_down_requests_and_commands_are_refused():
    """Case B031: what is taken in would not be finished."""
    loop = Loop(greedy("old"), greedy("new"), timeout_s=10.0)
    loop.run(loop.add("old"), loop.shut_down, loop.add("new"), loop.call(GetStats()), loop.abort("unknown"))
    loop.assert_whole("old")
    assert loop.reason("new") is FinishReason.ABORT
    assert loop.tokens("new") == []
    assert [answer.error for answer in loop.answers] == [SHUTTING_DOWN_TEXT]


@pytest.mark.parametrize("timeout_s", [0.0, 10.0])
def test_who_has_something_says_that_it_ends_before_it_aborts(timeout_s: float):
    """So that it can go on elsewhere, where there are others. Who has nothing says nothing: perhaps nobody
    hears it yet, and would be waited for."""
    loop = Loop(greedy("old", 20), timeout_s=timeout_s)
    loop.run(loop.add("old"), None, loop.shut_down)
    said = [news for _, news in loop.mailbox.delivered]
    (at,) = [at for at, news in enumerate(said) if news.is_leaving]
    assert not any(output.finish_reason for news in said[:at] for output in news.outputs)
    assert (len(loop.tokens("old")) == 20) is (timeout_s > 0)
    idle = Loop(timeout_s=timeout_s)
    idle.run(idle.shut_down)
    assert idle.mailbox.delivered == []


def test_an_abort_counts_while_draining():
    loop = Loop(greedy("a", 40), greedy("b"), timeout_s=10.0)
    loop.run(loop.add("a", "b"), loop.shut_down, loop.abort("a"))
    assert loop.reason("a") is None
    assert len(loop.tokens("a")) < 5
    loop.assert_whole("b")


# -- pauses --------------------------------------------------------------------------------------------------


def test_a_pause_that_waits_is_answered_when_the_running_have_ended():
    loop = Loop(greedy("a", 5), greedy("b"))
    marks: list[tuple[int, int]] = []

    def note() -> None:
        marks.append((len(loop.answers), len(loop.tokens("a"))))

    def look() -> None:
        note()
        loop.call(ResumeScheduler())()

    loop.run(loop.add("a"), loop.call(PauseScheduler("wait")), loop.add("b"), note, note, note, note, look)
    assert [count for count, said in marks if said < 5] == [0] * sum(said < 5 for _, said in marks)
    assert marks[-1] == (1, 5)
    assert [msgspec.msgpack.decode(answer.result) for answer in loop.answers] == [True, True]
    loop.assert_whole("a", "b")


def test_a_pause_that_aborts_says_so_before_it_is_answered():
    loop = Loop(greedy("a"))
    loop.run(loop.add("a"), loop.call(PauseScheduler("abort")), loop.call(IsPaused()))
    kinds = [
        "answer" if said.utility_output else said.outputs[-1].finish_reason
        for _, said in loop.mailbox.delivered
    ]
    assert kinds[-3:] == [FinishReason.ABORT, "answer", "answer"]


def test_a_pause_that_keeps_freezes_everything_where_it_is():
    loop = Loop(greedy("a"))
    seen: list[int] = []
    loop.run(
        loop.add("a"),
        None,
        loop.call(PauseScheduler("keep", clear_cache=True)),
        lambda: seen.append(len(loop.tokens("a"))) or loop.call(IsPaused())(),
        lambda: seen.append(len(loop.tokens("a"))) or loop.call(ResumeScheduler())(),
    )
    assert seen == [2, 2]
    loop.assert_whole("a")


class PausedLoop(Loop):
    """Sees to it that no step is made between the answer to a pause and the next resumption."""

    def __init__(self, dice: random.Random, depth: int) -> None:
        guests = [greedy(f"{'x' * i}{i}", dice.randint(1, 9)) for i in range(6)]
        super().__init__(*guests, depth=depth, max_num_seqs=dice.randint(1, 3))
        self.aborted: set[str] = set()
        self.num_frozen = 0
        self._num_plans_frozen: int | None = None
        self.at_the_end = self._last_resumption
        self.story: list[Event] = []
        names = list(self.drive.guests)
        for name in names:
            self.story.append(self.add(name))
            self.story += [self.any_event(dice, names) for _ in range(dice.randint(0, 3))]

    def any_event(self, dice: random.Random, names: list[str]) -> Event:
        name, mode, by_force = dice.choice(names), dice.choice(["wait", "keep"]), dice.random() < 0.3
        return dice.choice(
            [
                None,
                lambda: self.pause(mode, by_force),
                self.resume,
                self.resume,
                lambda: self.abort_now(name),
                self.call(ResetPrefixCache(by_force)),
                self.call(GetStats()),
            ]
        )

    def abort_now(self, name: str) -> None:
        self.aborted.add(name)
        self.abort(name)()

    def pause(self, mode: str, clear_cache: bool) -> None:
        """Of a second pause, what the first has frozen may run to its end."""
        self._num_plans_frozen = None
        self.call(PauseScheduler(mode, clear_cache))()

    def resume(self) -> None:
        if not self.core._when_idle:  # one that is not answered yet may be undone too, but is not watched
            self.call(ResumeScheduler())()

    def _last_resumption(self) -> None:
        self.call(ResumeScheduler())()
        self.at_the_end = self.shut_down

    def _go_on(self) -> None:
        num_plans = len(self.drive.executor.plans)
        if self.core.scheduler.pause_state.name == "UNPAUSED" or self.core._when_idle:
            self._num_plans_frozen = None
        elif self._num_plans_frozen is None:
            self._num_plans_frozen = num_plans
        else:
            assert num_plans == self._num_plans_frozen, "a step while paused"
            self.num_frozen += 1
        super()._go_on()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_is_made_while_paused_whatever_comes_when(depth: int):
    """Case B175: 250 random interleavings per depth of pauses, resumptions, arrivals, aborts and resets."""
    num_plans = num_frozen = num_aborted = 0
    for seed in range(250):
        loop = PausedLoop(random.Random(seed), depth)
        loop.run(*loop.story)
        for name in loop.drive.guests:
            if name in loop.aborted:
                loop.assert_beginning(name)
            else:
                loop.assert_whole(name)
        loop.drive.check_idle()
        num_plans += len(loop.drive.executor.plans)
        num_frozen += loop.num_frozen
        num_aborted += len(loop.aborted)
    assert num_plans > 1000
    assert num_frozen > 200
    assert num_aborted > 50
