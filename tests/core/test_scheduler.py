"""The rules in the scheduler's header, one by one, and what its plans and outputs hold."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from mainspring.base.messages import (
    EngineCoreRequest,
    FinishReason,
    GetStats,
    ModelRunnerOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.core.kv_cache import KVCacheManager
from mainspring.testing.fake_kv_source import RemotePrefix
from mainspring.testing.simulation import VOCAB_SIZE, Drive, Scenario, Structure, guest

CASE = Scenario(
    guests=(), block_size=16, num_blocks=64, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64
)


def text(length: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB_SIZE) for _ in range(length)]


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **more)


def start(case: Scenario, *guests) -> Drive:
    drive = Drive(replace(case, guests=tuple(guests)))
    for one in guests:
        drive.add(one.message.request_id)
    return drive


def finish(drive: Drive, max_steps: int = 1000) -> None:
    drive.run(max_steps)
    drive.check_promise()
    drive.check_idle()


def running(drive: Drive) -> list[str]:
    return [request.request_id for request in drive.scheduler.running]


def rows(drive: Drive) -> dict[str, int]:
    """Tokens by request in the last plan."""
    plan = drive.executor.plans[-1]
    names = {request.slot: request.request_id for request in drive.scheduler.running}
    return dict(zip((names.get(slot, "?") for slot in plan.slots), plan.num_scheduled_tokens, strict=True))


@pytest.fixture
def kv_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each method of the KV manager is called."""
    calls: Counter[str] = Counter()
    for name in ("find_cached_prefix", "admit", "grow", "can_hold", "free", "publish"):
        original = getattr(KVCacheManager, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(KVCacheManager, name, counted)
    return calls


# -- work is proportional to change --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_quiet_step_asks_the_kv_manager_nothing(kv_calls: Counter[str], depth: int):
    """Rule 2: nothing finishes, starts or crosses a block boundary."""
    drive = start(
        replace(CASE, depth=depth), *[guest(f"r{i}", text(20, i), params=greedy(40)) for i in range(5)]
    )
    drive.step()
    drive.step()
    for _ in range(8):
        kv_calls.clear()
        assert len(drive.step()) == 5
        assert not kv_calls
    finish(drive)


def test_only_those_who_cross_a_boundary_get_a_block(kv_calls: Counter[str]):
    drive = start(CASE, *[guest(f"r{i}", text(8 + i, i), params=greedy(40)) for i in range(5)])
    drive.step()
    for _ in range(30):
        kv_calls.clear()
        drive.step()
        assert kv_calls["grow"] <= 1
    finish(drive)


def test_those_who_are_parked_or_blocked_cost_nothing(kv_calls: Counter[str]):
    """Rule 2: one that did not fit is looked at again when a block was released, not before."""
    case = replace(CASE, block_size=4, num_blocks=16, max_model_len=64)
    drive = start(
        case,
        guest("runs", text(30, 0), params=greedy(20)),
        *[guest(f"s{i}", text(9, i), structure=Structure(3, compile_steps=40)) for i in range(20)],
        *[guest(f"w{i}", text(50, 50 + i)) for i in range(20)],
    )
    drive.step()
    for _ in range(12):
        kv_calls.clear()
        drive.step()
        assert not kv_calls["find_cached_prefix"]
        assert not kv_calls["admit"]
    finish(drive, 3000)


# -- who runs ------------------------------------------------------------------------------------------------


def test_decodes_run_beside_a_long_prompt():
    """Rule 4: those who talk get their token before a prompt gets its chunk."""
    talkers = [guest(f"t{i}", text(4, i), params=greedy(30)) for i in range(4)]
    drive = start(replace(CASE, max_num_batched_tokens=20), *talkers, guest("long", text(300, 9)))
    drive.step()
    for _ in range(10):
        assert {output.request_id for output in drive.step()} == {"t0", "t1", "t2", "t3"}
        assert rows(drive)["long"] == 16
    finish(drive)


def test_nobody_is_overtaken_for_being_big():
    """Rule 5."""
    case = replace(CASE, block_size=4, num_blocks=16, max_model_len=64)
    drive = start(
        case, guest("a", text(40, 1), params=greedy(5)), guest("big", text(50, 2)), guest("small", text(2, 3))
    )
    while "a" in drive.scheduler.requests:
        drive.step()
        assert running(drive) in (["a"], [])
    drive.step()
    assert running(drive) == ["big", "small"]
    finish(drive)


def test_the_youngest_makes_room_and_comes_back_first():
    case = replace(CASE, block_size=4, num_blocks=12, max_model_len=48, caching=False)
    drive = start(case, *[guest(name, text(13, i), params=greedy(12)) for i, name in enumerate("abcd")])
    order = []
    while drive.core.has_work():
        drive.step()
        if running(drive) not in order[-1:]:
            order.append(running(drive))
    assert order[:2] == [["a", "b", "c"], ["a", "b"]]
    admitted = [new.request_id for plan in drive.executor.plans for new in plan.new_requests]
    assert admitted == ["a", "b", "c", "c", "d"]
    finish(drive)


def test_nobody_is_admitted_in_a_step_that_preempted():
    """Rule 4."""
    case = replace(CASE, block_size=4, num_blocks=12, max_model_len=48, caching=False)
    guests = [guest(f"r{i}", text(11 + i % 3, i), params=greedy(14)) for i in range(12)]
    drive = start(case, *guests)
    seen = 0
    while drive.core.has_work():
        before = drive.core.call(GetStats()).num_preemptions
        first = len(drive.executor.plans)
        drive.step()
        if drive.core.call(GetStats()).num_preemptions > before:
            seen += 1
            assert not any(plan.new_requests for plan in drive.executor.plans[first:])
    assert seen > 2
    finish(drive)


def test_a_prompt_alone_is_not_held_to_the_threshold():
    drive = start(replace(CASE, threshold=10), guest("a", text(50, 1)))
    drive.step()
    assert rows(drive) == {"a": 50}
    drive = start(replace(CASE, threshold=10), guest("a", text(50, 1)), guest("b", text(50, 2)))
    drive.step()
    assert rows(drive) == {"a": 10, "b": 10}
    finish(drive)


def test_the_watermark_holds_blocks_back_from_newcomers_only():
    case = replace(CASE, block_size=4, num_blocks=20, max_model_len=80, watermark=0.2)  # 4 blocks
    drive = start(case, guest("a", text(40, 1), params=greedy(20)), guest("b", text(28, 2)))
    drive.step()
    assert running(drive) == ["a"]  # b takes 7 of 10, which leaves fewer than 4
    alone = start(case, guest("a", text(78, 1), params=greedy(1)))
    alone.step()
    assert alone.transcripts["a"].is_over or running(alone) == ["a"]
    finish(drive)


def test_slots_are_dense_and_used_again():
    drive = start(
        replace(CASE, max_num_seqs=3),
        *[guest(f"r{i}", text(3, i), params=greedy(1 + i % 4)) for i in range(12)],
    )
    finish(drive)
    assert {new.slot for plan in drive.executor.plans for new in plan.new_requests} == {0, 1, 2}


# -- plans ---------------------------------------------------------------------------------------------------


def test_a_plan_tells_a_worker_all_it_must_know():
    params = greedy(5, min_tokens=2, prompt_logprobs=3)
    ends = {"eos_token_id": 7, "stop_token_ids": [8]}
    one = guest("a", text(20, 1), params=params, bad_words_token_ids=[[1, 2]], **ends)
    drive = start(CASE, one, guest("b", text(5, 2), structure=Structure(4)))
    drive.step()
    first, second = drive.executor.plans[0].new_requests
    assert (first.request_id, first.num_prompt_tokens, first.num_computed_tokens) == ("a", 20, 0)
    assert sorted(first.stop_token_ids) == [7, 8]
    assert first.bad_words_token_ids == [[1, 2]]
    assert (first.num_prompt_logprobs, second.num_prompt_logprobs) == (3, None)
    assert (first.has_grammar, second.has_grammar) == (False, True)
    assert [len(blocks) for blocks in first.block_ids] == [2]
    drive.scheduler._preempt(drive.scheduler.requests["a"], None)
    drive.step()
    [again] = drive.executor.plans[-1].new_requests
    assert again.num_prompt_logprobs is None, "delivered once"
    assert (len(again.token_ids), again.num_prompt_tokens) == (21, 20)
    finish(drive)


def test_a_resumed_journal_is_output_not_prompt():
    drive = start(CASE, guest("a", text(20, 1), params=greedy(9, prompt_logprobs=1)))
    for _ in range(4):
        drive.step()
    drive.crash()
    drive.step()
    [new] = drive.executor.plans[0].new_requests
    assert (len(new.token_ids), new.num_prompt_tokens, new.num_prompt_logprobs) == (24, 20, None)
    finish(drive)


def test_masks_are_for_rows_that_sample():
    drive = start(
        replace(CASE, max_num_batched_tokens=24),
        guest("plain", text(4, 1)),
        guest("long", text(50, 2), structure=Structure(6)),
        guest("short", text(4, 3), structure=Structure(6)),
    )
    finish(drive)
    assert all(set(plan.grammar_rows) <= set(plan.sampling_rows) for plan in drive.executor.plans)
    assert any(plan.grammar_rows for plan in drive.executor.plans)


# -- outputs -------------------------------------------------------------------------------------------------


def test_the_number_of_cached_tokens_is_said_once():
    drive = start(CASE, guest("a", text(40, 1), params=greedy(6)))
    drive.run()
    drive.guests["b"] = guest("b", text(40, 1), params=greedy(6))
    drive.add("b")
    drive.run()
    assert [drive.transcripts[name].num_cached_tokens for name in "ab"] == [[0], [32]]


def test_loaded_tokens_count_as_cached():
    drive = start(CASE, guest("a", text(40, 1), elsewhere=(RemotePrefix(39),)))
    finish(drive)
    assert drive.transcripts["a"].num_cached_tokens == [32]
    assert drive.executor.num_tokens_run["a"] == 40 - 32 + 7


def test_a_load_that_fails_costs_time_and_nothing_else():
    drive = start(CASE, guest("a", text(40, 1), elsewhere=(RemotePrefix(39, fails=True),)))
    finish(drive)
    assert drive.executor.num_tokens_run["a"] == 40 + 7


def test_what_follows_a_stop_in_one_result_is_dropped():
    """A result is ragged: a verified row may bring several tokens, of which the first end counts."""
    drive = start(CASE, guest("a", text(5, 1), params=greedy(20), stop_token_ids=[7]))
    plan = drive.scheduler.schedule()
    assert plan is not None
    [message] = drive.scheduler.update_from_output(plan, ModelRunnerOutput([[5, 7, 9]])).values()
    [output] = message.outputs
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([5, 7], FinishReason.STOP, 7)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (EngineCoreRequest("x", [], greedy(3)), "no tokens"),
        (EngineCoreRequest("x", [1] * 512, greedy(3)), "max_model_len 512"),
        (EngineCoreRequest("x", [1] * 500, greedy(30), output_token_ids=[2] * 12), "max_model_len 512"),
        (EngineCoreRequest("x", [1], greedy(3), output_token_ids=[4, 5, 6]), "max_tokens 3"),
        (EngineCoreRequest("x", [1, VOCAB_SIZE], greedy(3)), "outside the vocabulary of 64"),
        (EngineCoreRequest("x", [1, -1], greedy(3)), "outside the vocabulary"),
    ],
)
def test_what_would_hurt_others_is_answered_with_an_error(message: EngineCoreRequest, cause: str):
    drive = start(CASE, guest("innocent", text(5, 1)))
    drive.core.add_request(message)
    outputs = [output for sent in drive.core.step().values() for output in sent.outputs]
    [refusal] = [output for output in outputs if output.request_id == "x"]
    assert refusal.finish_reason is FinishReason.ERROR
    assert cause in (refusal.error or "")
    drive.transcripts["innocent"].token_ids += [t for output in outputs for t in output.new_token_ids]
    drive.transcripts["innocent"].num_cached_tokens.append(0)
    finish(drive)


def test_figures_are_those_of_now_and_since_the_start():
    case = replace(CASE, max_num_seqs=2, block_size=4, num_blocks=40, max_model_len=160)
    drive = start(
        case,
        *[guest(f"r{i}", text(8, i), params=greedy(6)) for i in range(4)],
        guest("parked", text(8, 9), structure=Structure(2, compile_steps=50)),
    )
    drive.step()
    stats = drive.core.call(GetStats())
    assert (stats.num_running, stats.num_waiting, stats.num_parked) == (2, 2, 1)
    assert (stats.num_steps, stats.num_scheduled_tokens) == (1, 16)
    assert stats.kv_cache_usage == pytest.approx(4 / 40)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 0)
    finish(drive)
    stats = drive.core.call(GetStats())
    assert (stats.num_running, stats.num_waiting, stats.num_parked, stats.kv_cache_usage) == (0, 0, 0, 0.0)
