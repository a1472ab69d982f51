"""The loop: order of calls, aborts, grammars, commands, and how it ends."""

from dataclasses import replace

import pytest

from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import CheckHealth, FinishReason, GetStats, ResetPrefixCache, SchedulerStats
from mainspring.base.params import SamplingParams
from mainspring.engine.core import EngineCore
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_kv_source import RemotePrefix
from mainspring.testing.simulation import Drive, Scenario, Structure, guest

CASE = Scenario(guests=(), block_size=4, num_blocks=40, max_model_len=64, max_num_batched_tokens=32)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=10)


class Diary(FakeExecutor):
    """Notes the order of the calls it gets."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []

    def execute_model(self, plan, non_block=True):
        self.calls.append(f"execute {plan.step_id}")
        return super().execute_model(plan, non_block)

    def sample_tokens(self, mask, non_block=True):
        self.calls.append("sample")
        return super().sample_tokens(mask, non_block)


def start(case: Scenario, *guests, executor_class=FakeExecutor) -> Drive:
    drive = Drive(replace(case, guests=tuple(guests)), executor_class)
    for one in guests:
        drive.add(one.message.request_id)
    return drive


def finish(drive: Drive) -> None:
    drive.run()
    drive.check_promise()
    drive.check_idle()


def in_flight(drive: Drive) -> int:
    return len(drive.core._in_flight)


def test_depth_one_books_a_step_before_the_next():
    drive = start(CASE, guest("a", [1, 2, 3], params=GREEDY), executor_class=Diary)
    for _ in range(3):
        assert len(drive.step()) == 1
        assert in_flight(drive) == 0
    assert drive.executor.calls == ["execute 1", "sample", "execute 2", "sample", "execute 3", "sample"]
    finish(drive)


@pytest.mark.parametrize("depth", [2, 3])
def test_deeper_engines_keep_steps_in_flight(depth: int):
    drive = start(replace(CASE, depth=depth), guest("a", [1, 2, 3], params=GREEDY), executor_class=Diary)
    drive.step()
    assert in_flight(drive) == depth - 1
    assert drive.executor.calls == [call for i in range(depth) for call in (f"execute {i + 1}", "sample")]
    finish(drive)


def test_a_chunk_without_samples_is_one_call():
    drive = start(CASE, guest("a", list(range(60)), params=GREEDY), executor_class=Diary)
    assert drive.step() == []
    assert drive.executor.calls == ["execute 1"]
    finish(drive)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_step_whose_mask_is_not_known_holds_the_next(depth: int):
    """The forward pass of the waiting step is sent, its sampling only once the token before is booked."""
    structured = guest("a", [1, 2, 3], params=GREEDY, structure=Structure(9))
    drive = start(replace(CASE, depth=depth), structured, executor_class=Diary)
    drive.step()
    assert drive.executor.calls == ["execute 1", "sample", "execute 2", "sample"]
    finish(drive)


def test_plain_neighbours_of_a_structured_request_say_the_same():
    plain = guest("b", [4, 5], params=GREEDY)
    structured = guest("a", [1, 2, 3], params=GREEDY, structure=Structure(7, compile_steps=3))
    for depth in (1, 2, 3):
        finish(start(replace(CASE, depth=depth), plain, structured))


# -- aborts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_that_arrives_while_a_step_runs_comes_before_its_outputs(depth: int):
    drive = start(
        replace(CASE, depth=depth), guest("a", [1, 2], params=GREEDY), guest("b", [3], params=GREEDY)
    )
    drive.step()
    drive.abort_inside_next_step("a")
    assert [output.request_id for output in drive.step()] == ["b"]
    finish(drive)


def test_an_abort_from_another_thread_reaches_a_parked_request():
    """Nothing runs and nothing will: the abort is honoured all the same."""
    drive = start(CASE, guest("a", [1, 2], params=GREEDY, structure=Structure(5, compile_steps=10**6)))
    drive.step()
    drive.core.aborts_queue.put(["a"])
    drive.step()
    assert not drive.core.has_work()


@pytest.mark.parametrize("ids", [["nobody"], ["a", "a"], ["a", "nobody", "a"], []])
def test_aborts_may_be_repeated_or_mistaken(ids: list[str]):
    drive = start(CASE, guest("a", [1, 2], params=GREEDY), guest("b", [3], params=GREEDY))
    drive.step()
    drive.core.abort_requests(ids)
    drive.core.abort_requests(ids)
    drive.transcripts["a"].aborted = "a" in ids
    finish(drive)


def test_an_abort_while_kv_is_on_its_way_keeps_the_blocks_until_it_came():
    """A load that nobody waits for any more still writes; its blocks are given to nobody before it ended."""
    a = guest("a", list(range(20)), params=GREEDY, elsewhere=(RemotePrefix(16, delay_steps=5),))
    drive = start(CASE, a, guest("b", [3], params=GREEDY))
    drive.step()
    drive.abort("a")
    assert drive.kv.pool.num_idle < drive.kv.pool.num_blocks - 1 - 1
    finish(drive)


# -- grammars ------------------------------------------------------------------------------------------------


def test_a_grammar_that_does_not_compile_ends_its_request_only():
    drive = start(
        CASE,
        guest("bad", [1, 2], params=GREEDY, structure=Structure(5, compile_steps=2, fails=True)),
        guest("good", [1, 2], params=GREEDY, structure=Structure(5, compile_steps=2)),
    )
    finish(drive)
    last = drive.transcripts["bad"].last
    assert last is not None
    assert last.finish_reason is FinishReason.ERROR
    assert "planned failure" in (last.error or "")


def test_a_structure_without_a_compiler_is_an_error_of_the_request():
    drive = start(CASE)
    core = EngineCore(drive.scheduler, drive.executor, sleep=lambda seconds: None)
    core.add_request(guest("a", [1, 2], params=GREEDY, structure=Structure(5)).message)
    [message] = core.step().values()
    assert message.outputs[0].finish_reason is FinishReason.ERROR
    assert "no grammar compiler" in (message.outputs[0].error or "")
    assert not core.has_work()


def test_waiting_for_an_event_yields_the_processor():
    slept: list[float] = []
    drive = start(CASE)
    core = EngineCore(drive.scheduler, drive.executor, grammars=drive.compiler, sleep=slept.append)
    drive.guests["a"] = guest("a", [1, 2], params=GREEDY, structure=Structure(5, compile_steps=3))
    drive.compiler._ticks["a"] = 3
    core.add_request(drive.guests["a"].message)
    core.step()
    assert slept == [0.001]
    for _ in range(3):
        drive.compiler.tick()
    assert core.step()
    assert slept == [0.001]


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
def test_a_step_that_raises_ends_the_core_with_its_cause(depth: int):
    class Failing(FakeExecutor):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options, fail_at_step=3)

    drive = start(replace(CASE, depth=depth), guest("a", [1, 2], params=GREEDY), executor_class=Failing)
    for _ in range(3):
        drive.step()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="RuntimeError: planned failure at step 3"):
            drive.core.step()
    with pytest.raises(EngineDeadError, match="planned failure"):
        drive.core.add_request(drive.guests["a"].message)
    with pytest.raises(EngineDeadError, match="planned failure"):
        drive.core.call(GetStats())


def test_a_worker_that_died_is_reported_by_every_call():
    drive = start(CASE, guest("a", [1, 2], params=GREEDY))
    drive.step()
    drive.executor.die("killed by signal 9")
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        drive.core.step()


def test_a_row_that_fails_ends_its_request_only():
    drive = start(CASE, *[guest(name, [1, 2], params=GREEDY) for name in "abc"])
    drive.step()
    drive.executor.fail_rows.add("b")
    ended = [output for output in drive.step() if output.finish_reason is not None]
    assert [(output.request_id, output.error) for output in ended] == [("b", "planned failure of a row")]
    del drive.guests["b"]
    finish(drive)


# -- commands ------------------------------------------------------------------------------------------------


def test_commands_answer():
    drive = start(CASE, guest("a", [1, 2], params=GREEDY))
    drive.step()
    assert drive.core.call(CheckHealth()) is True
    stats = drive.core.call(GetStats())
    assert isinstance(stats, SchedulerStats)
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 0, 1)
    assert drive.core.call(ResetPrefixCache()) is False
    assert drive.core.call(ResetPrefixCache(reset_running_requests=True)) is True
    assert drive.core.call(GetStats()).num_running == 0
    finish(drive)


def test_shutdown_may_be_repeated():
    drive = start(CASE)
    drive.core.shutdown()
    drive.core.shutdown()
    assert drive.compiler.closed


def test_a_timestamped_history_of_every_request():
    """Events of the core's own clock: queued, scheduled, and so on after a preemption."""
    drive = start(CASE, guest("a", [1, 2], params=GREEDY))
    [first] = drive.step()
    names = [event.type.name for event in first.events or ()]
    assert names == ["QUEUED", "SCHEDULED"]
    assert drive.core.call(ResetPrefixCache(reset_running_requests=True))
    [again] = drive.step()
    assert [event.type.name for event in again.events or ()] == ["PREEMPTED", "SCHEDULED"]
    finish(drive)


def test_iteration_details_are_a_line_for_each_step(caplog: pytest.LogCaptureFixture):
    drive = start(CASE, guest("a", [1, 2, 3], params=GREEDY))
    drive.core._iteration_details = True
    with caplog.at_level("INFO", logger="mainspring"):
        drive.step()
    assert "1 rows, 3 tokens, 1 new" in caplog.text
