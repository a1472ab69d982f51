"""Public faults of scheduling, preemption, chunks, priorities and run-ahead, as cases for this core.

Numbers are those of `tests/CASES.md`. Every engine here is the real core with the fake worker, whose tokens
tell on a wrong block; `finish` compares what was said with a plain loop and looks for anything that was left.
"""

import random
from dataclasses import replace

import pytest

from mainspring.base.config import EngineArgs, ModelFacts, resolve
from mainspring.base.errors import ConfigError
from mainspring.base.messages import FinishReason, GetStats, ResetPrefixCache, SchedulerOutput
from mainspring.base.params import SamplingParams
from mainspring.testing.fake_kv_source import RemotePrefix
from mainspring.testing.simulation import VOCAB_SIZE, Drive, Scenario, Structure, guest, play

TINY = Scenario(
    guests=(),
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def text(length: int, seed: int) -> list[int]:
    """A fixed text of its own."""
    dice = random.Random(f"{length} {seed}")
    return [dice.randrange(VOCAB_SIZE) for _ in range(length)]


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **more)


def seeded(max_tokens: int, seed: int = 1, **more) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **more)


def start(scenario: Scenario, *guests, added: bool = True) -> Drive:
    drive = Drive(replace(scenario, guests=tuple(guests)))
    for one in guests if added else ():
        drive.add(one.message.request_id)
    return drive


def finish(drive: Drive, max_steps: int = 1000) -> None:
    drive.run(max_steps)
    drive.check_promise()
    drive.check_idle()
    drive.check_cache()


def preempt(drive: Drive, request_id: str) -> None:
    """Make one running request give up its blocks and its slot, between two steps."""
    drive.scheduler._preempt(drive.scheduler.requests[request_id], None)


def rows(drive: Drive, plan: SchedulerOutput) -> dict[str, int]:
    """Tokens by request, for as long as nobody has left its slot."""
    named = {request.slot: request.request_id for request in drive.scheduler.running}
    return {
        named[slot]: n for slot, n in zip(plan.slots, plan.num_scheduled_tokens, strict=True) if slot in named
    }


def last_plan(drive: Drive) -> SchedulerOutput:
    return drive.executor.plans[-1]


# -- section 2: a client waits for ever --------------------------------------------------------------------


def test_whole_prompts_need_a_step_that_holds_them():
    """Case B013: without chunks a step smaller than a prompt is refused when the engine is configured."""
    model = ModelFacts(path="", architecture="fake", max_position_embeddings=128, vocab_size=VOCAB_SIZE)
    args = EngineArgs(enable_chunked_prefill=False, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="must hold a whole prompt of max_model_len 128"):
        resolve(args, model)
    chosen = resolve(EngineArgs(enable_chunked_prefill=False), model)
    assert chosen.scheduler.max_num_batched_tokens >= 128


def test_whole_prompts_that_do_not_fit_beside_others_wait_a_step():
    """Case B013: an indivisible prompt that the rest of a step cannot hold runs in the next one."""
    case = replace(TINY, chunked=False, max_model_len=100, max_num_batched_tokens=100)
    drive = start(case, guest("a", text(90, 1)), guest("b", text(90, 2)), guest("c", text(10, 3)))
    drive.step()
    assert rows(drive, last_plan(drive)) == {"a": 90}
    drive.step()
    assert rows(drive, last_plan(drive)) == {"a": 1, "b": 90}
    drive.step()
    assert rows(drive, last_plan(drive)) == {"a": 1, "b": 1, "c": 10}
    finish(drive)


@pytest.mark.parametrize("kind", ["slow", "failing", "aborted"])
def test_requests_that_wait_for_a_grammar_take_nobodys_place(kind: str):
    """Case B014: more of them than there are slots; plain requests are served meanwhile, and all end."""
    structure = Structure(length=6, compile_steps=60, fails=kind == "failing")
    parked = [guest(f"s{i}", text(20, i), structure=structure, params=greedy(5)) for i in range(10)]
    plain = [guest(f"p{i}", text(20, 50 + i), params=greedy(5)) for i in range(3)]
    drive = start(replace(TINY, max_num_seqs=4), *parked, *plain)
    while not all(drive.transcripts[f"p{i}"].is_over for i in range(3)):
        drive.step()
        assert drive.num_steps < 30, "plain requests wait for other people's grammars"
    assert not any(drive.transcripts[f"s{i}"].is_over for i in range(10))
    if kind == "aborted":
        for i in range(5):
            drive.abort(f"s{i}")
    finish(drive)


def test_every_client_gets_its_own_outputs():
    """Case B016: eight clients; one of them never looks at what it is sent."""
    guests = [guest(f"r{i}", text(20, i), params=seeded(9, seed=i), client_index=i) for i in range(8)]
    drive = start(TINY, *guests)
    finish(drive)  # `Drive` checks whom each output is sent to, and that none is missing or out of order


def test_a_request_id_in_use_is_refused_at_once():
    """Case B017: the second of the same name gets an error, the first its answer, and nobody waits."""
    drive = start(TINY, guest("a", text(8, 1)))
    drive.step()
    drive.core.add_request(drive.guests["a"].message)
    outputs = [output for message in drive.core.step().values() for output in message.outputs]
    refusal = next(output for output in outputs if output.error is not None)
    assert refusal.finish_reason is FinishReason.ERROR
    assert "in use" in refusal.error
    drive.transcripts["a"].token_ids += [t for output in outputs for t in output.new_token_ids]
    finish(drive)


# -- section 5: preemption ---------------------------------------------------------------------------------


def test_a_rebuild_is_chunked_over_prompt_and_output():
    """Case B034: 60 known tokens come back as 16, 16, 16 and 12, and only the last chunk samples."""
    case = replace(TINY, max_num_batched_tokens=16, caching=False)
    drive = start(case, guest("a", text(10, 1), params=greedy(60)))
    while len(drive.transcripts["a"].token_ids) < 50:
        drive.step()
    assert drive.core.call(ResetPrefixCache(reset_running_requests=True))
    first = len(drive.executor.plans)
    said = [len(drive.step()) for _ in range(4)]
    assert [plan.num_scheduled_tokens for plan in drive.executor.plans[first:]] == [[16], [16], [16], [12]]
    assert said == [0, 0, 0, 1]
    finish(drive)


@pytest.mark.parametrize("with_neighbour", [False, True])
def test_a_resumed_request_is_what_its_tokens_say(with_neighbour: bool):
    """Case B035: a step with nothing new in it may still have a whole text to read."""
    guests = [guest("a", text(30, 1), params=greedy(30)), guest("b", text(5, 2), params=greedy(40))]
    drive = start(replace(TINY, caching=False), *guests[: 1 + with_neighbour])
    for _ in range(10):
        drive.step()
    preempt(drive, "a")
    drive.step()
    assert rows(drive, last_plan(drive)) == {"a": 40} | ({"b": 1} if with_neighbour else {})
    finish(drive)


def test_what_is_left_is_counted_after_the_lookup():
    """Case B037: a resumed request whose blocks are all cached reads only what is not in them."""
    drive = start(TINY, guest("a", text(40, 1), params=greedy(30)))
    for _ in range(12):
        drive.step()
    preempt(drive, "a")
    drive.step()
    plan = last_plan(drive)
    assert [new.num_computed_tokens for new in plan.new_requests] == [48]  # of 52, in blocks of 16
    assert plan.num_scheduled_tokens == [4]
    finish(drive)


def test_many_of_one_family_in_a_small_pool():
    """Case B037: 64 requests with one beginning and hardly any blocks."""
    case = replace(TINY, num_blocks=14, max_model_len=120, max_num_seqs=8)
    guests = [guest(f"r{i}", text(40, 1) + text(i % 7, i), params=seeded(20, i)) for i in range(64)]
    drive = start(case, *guests)
    finish(drive, 5000)
    assert drive.core.call(GetStats()).num_preemptions > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_two_that_do_not_fit_together_take_turns(policy: str):
    """Case B038: a long prompt is not let in by pieces and thrown out again for ever."""
    case = replace(TINY, num_blocks=16, max_model_len=256, policy=policy)
    drive = start(
        case, guest("a", text(150, 1), params=greedy(60)), guest("b", text(200, 1), params=greedy(20))
    )
    finish(drive, 120)
    assert drive.core.call(GetStats()).num_preemptions <= 2


def test_kv_from_elsewhere_does_not_starve_the_one_who_runs():
    """Case B038, its kind: blocks held by one that waits are taken back before the only runner yields."""
    case = replace(TINY, block_size=1, num_blocks=30, max_model_len=30)
    runner = guest("runner", text(15, 1), params=greedy(15))
    waiter = guest("waiter", text(9, 2), params=greedy(2), elsewhere=(RemotePrefix(9, delay_steps=9),))
    drive = start(case, runner, waiter)
    finish(drive, 120)


def test_a_load_that_can_never_fit_is_computed_here():
    """Case B038, its kind: with a window a text is longer than what its request may hold at once."""
    case = replace(
        TINY, block_size=1, num_blocks=17, max_model_len=66, windows=(11,), max_num_batched_tokens=3
    )
    drive = start(case, guest("a", text(40, 1), params=greedy(4), elsewhere=(RemotePrefix(39),)))
    finish(drive, 120)


def test_cached_tokens_are_those_of_the_first_admission():
    """Case B041: the figure a client sees is told once, and no counter goes down when a cache is lost."""
    warm, mine = guest("warm", text(33, 1), params=greedy(1)), text(33, 1) + text(7, 9)
    drive = start(TINY, warm, guest("a", mine, params=greedy(20)), added=False)
    drive.add("warm")
    drive.run()
    drive.add("a")
    before = drive.core.call(GetStats())
    for i in range(15):
        if i == 6:
            assert drive.core.call(ResetPrefixCache(reset_running_requests=True))
        drive.step()
        after = drive.core.call(GetStats())
        for counter in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "num_steps"):
            assert getattr(after, counter) >= getattr(before, counter)
        before = after
    finish(drive)
    assert set(drive.transcripts["a"].num_cached_tokens) == {32}
    assert drive.core.call(GetStats()).prefix_cache_hits == 32


# -- section 8: chunks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_a_chunk_that_is_not_the_last_says_nothing(length: int):
    """Case B058: no output before the prompt is read, and a discarded sample leaves no trace in the noise,
    the penalties, min_tokens or the grammar."""
    eos = 5
    params = seeded(3, presence_penalty=1.0, min_tokens=2, logprobs=2)
    drive = start(
        TINY,
        guest("plain", text(length, 1), params=params, eos_token_id=eos),
        guest("structured", text(length, 1), params=seeded(3), structure=Structure(8)),
    )
    said = []
    while drive.core.has_work():
        said.append({output.request_id for output in drive.step()})
    num_chunks = -(-length // 64)
    assert not any("plain" in names for names in said[: num_chunks - 1])
    assert "plain" in said[num_chunks - 1]
    finish(drive)


@pytest.mark.parametrize("depth", [2, 3])
def test_chunks_in_flight_promise_no_token(depth: int):
    """Case B059: run-ahead over a long prompt in chunks, beside requests that come and go."""
    dice = random.Random(59)
    long = guest("long", text(300, 1), params=greedy(10))
    short = [guest(f"r{i}", text(6, i), params=seeded(dice.randint(1, 12), i)) for i in range(12)]
    case = replace(TINY, depth=depth, threshold=32, max_num_seqs=5)
    drive = start(case, *short[:4], long, *short[4:])
    finish(drive)
    chunks = [n for plan in drive.executor.plans for n in plan.num_scheduled_tokens if n > 6]
    assert max(chunks) == 32


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_logprobs_belong_to_their_rows(order: int):
    """Case B061: a chunk in the middle, a decode, a last chunk and a row without, in any order."""
    guests = [
        guest("middle", text(150, 1), params=greedy(4, logprobs=1, prompt_logprobs=1)),
        guest("decode", text(3, 2), params=greedy(12, logprobs=2)),
        guest("last", text(70, 3), params=greedy(4, logprobs=5)),
        guest("without", text(20, 4), params=greedy(9)),
    ]
    finish(start(TINY, *guests[order:], *guests[:order]))


# -- section 25: priorities --------------------------------------------------------------------------------


def test_losing_a_neighbour_costs_nobody_a_step():
    """Case B172: the victim stands earlier in the list than the request it makes room for; all others run."""
    case = replace(TINY, policy="priority", block_size=4, num_blocks=15, max_model_len=60, caching=False)
    lengths = {"a": 8, "b": 8, "c": 8, "d": 7, "e": 8}
    guests = [
        guest(name, text(n, n), params=greedy(10), priority=9 if name == "b" else 0)
        for name, n in lengths.items()
    ]
    drive = start(case, *guests)
    while drive.core.call(GetStats()).num_preemptions == 0:
        running = {request.request_id for request in drive.scheduler.running}
        said = {output.request_id for output in drive.step()}
    assert said == running - {"b"}
    finish(drive)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_partial_work_goes_before_an_equal_that_has_none(policy: str):
    """Case B173: the preempted one is resumed before an equal that waits, though that one may be older."""
    waiting, running = guest("waiting", text(30, 1)), guest("running", text(30, 2), params=greedy(20))
    waiting.message.arrival_time_s, running.message.arrival_time_s = 1.0, 2.0
    drive = start(replace(TINY, policy=policy, max_num_seqs=1), running, waiting, added=False)
    drive.add("running")
    drive.step()
    drive.add("waiting")
    drive.step()
    preempt(drive, "running")
    drive.step()
    assert [request.request_id for request in drive.scheduler.running] == ["running"]
    finish(drive)


def test_a_better_priority_goes_first_and_the_worst_makes_room():
    case = replace(TINY, policy="priority", block_size=4, num_blocks=12, max_model_len=44, max_num_seqs=3)
    worst, middle, best = (
        guest(name, text(12, seed), params=greedy(20), priority=priority)
        for name, seed, priority in (("worst", 1, 2), ("middle", 2, 1), ("best", 3, 0))
    )
    drive = start(case, worst, middle, best)
    drive.step()
    assert drive.scheduler.running[0].request_id == "best"
    finish(drive)
    computed_again = {name for name, n in drive.executor.num_tokens_run.items() if n > 12 + 20 - 1}
    assert "best" not in computed_again
    assert "worst" in computed_again


# -- section 29: run-ahead ---------------------------------------------------------------------------------


def test_running_ahead_reads_nobody_elses_token():
    """Case B179: two hundred short requests through four slots, with one to three steps in flight."""
    dice = random.Random(179)
    guests = [
        guest(f"r{i}", text(dice.randint(1, 3), i), params=seeded(dice.randint(1, 5), i)) for i in range(200)
    ]
    said = []
    for depth in (1, 2, 3):
        drive = start(replace(TINY, max_num_seqs=4, depth=depth), *guests)
        finish(drive, 2000)
        said.append([drive.transcripts[f"r{i}"].token_ids for i in range(200)])
    assert said[0] == said[1] == said[2]


# -- the contract of seeds ---------------------------------------------------------------------------------


def test_seeded_sampling_is_the_same_wherever_it_happens():
    """Alone, in a batch of 32 mixed requests, after preemption, in chunks of any size, from the journal."""
    params = SamplingParams(
        temperature=1.3, seed=7, max_tokens=24, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.2
    )
    me = guest("me", text(50, 7), params=params)
    alone = start(TINY, me)
    finish(alone)
    wanted = alone.transcripts["me"].token_ids
    dice = random.Random(32)
    others = [
        guest(f"r{i}", text(dice.randint(1, 90), i), params=seeded(dice.randint(1, 40), i), priority=i % 3)
        for i in range(31)
    ]
    batch = replace(TINY, max_num_seqs=32, max_num_batched_tokens=256)
    cases = [batch, replace(batch, num_blocks=32, depth=3, policy="priority")]
    cases += [replace(TINY, max_num_batched_tokens=n, max_num_seqs=n) for n in (1, 7, 33)]
    for case in cases:
        drive = start(case, *others[:15], me, *others[15:])
        finish(drive, 10_000)
        assert drive.transcripts["me"].token_ids == wanted
    for crash_at in (1, 2, 9, 20):
        drive = play(replace(TINY, guests=(me,), crashes=(crash_at,)))
        assert drive.transcripts["me"].token_ids == wanted
    forced = start(TINY, me)
    for _ in range(15):
        forced.step()
        preempt(forced, "me")
    finish(forced)
    assert forced.transcripts["me"].token_ids == wanted
