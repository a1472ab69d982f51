"""The fakes themselves: an oracle that is wrong proves nothing."""

import numpy as np
import pytest

from mainspring.base import messages
from mainspring.base.config import EngineConfig, SchedulerConfig
from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import (
    BlockAppend,
    EngineCoreRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    LoRARef,
    NewRequestData,
    ResetPrefixCache,
    SchedulerOutput,
)
from mainspring.base.params import SamplingParams
from mainspring.core.scheduler import Scheduler
from mainspring.engine.build import build_engine
from mainspring.testing import simulation
from mainspring.testing.fake_clock import FakeClock
from mainspring.testing.fake_executor import FakeExecutor
from mainspring.testing.fake_grammar import FakeGrammar, FakeGrammarCompiler
from mainspring.testing.fake_model import FakeModel, History, reference
from mainspring.testing.scenarios import SeededDice, make_scenario
from mainspring.testing.simulation import Scenario, brief, guest, play, smallest

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=12)


def executor(num_blocks: int = 10, window: int | None = None, **options) -> FakeExecutor:
    made = FakeExecutor(FakeModel(windows=(window,)), **options)
    groups = (KVCacheGroup((0,), made.get_kv_cache_specs()[0]),)
    made.initialize(KVCacheConfig(num_blocks, 4, groups), 64)
    return made


def new(slot: int, tokens: list[int], blocks: list[int], num_computed: int = 0, name: str = "r"):
    return NewRequestData(slot, name, tokens, len(tokens), num_computed, (blocks,), GREEDY)


def plan(slots: list[int], counts: list[int], sampling: list[int], **more) -> SchedulerOutput:
    return SchedulerOutput(1, slots, counts, sampling, sum(counts), **more)


def run(made: FakeExecutor, step: SchedulerOutput) -> list[list[int]]:
    forward = made.execute_model(step)
    done = made.sample_tokens(None).result() if step.sampling_rows else forward.result()
    return done.sampled_token_ids


# -- the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_every_token_depends_on_all_before_it_that_are_seen(window):
    model, text = FakeModel(windows=(window,)), list(range(20))

    def logits(tokens):
        history = History(model, model.plain_root)
        for token in tokens:
            history.append(token)
        return history.logits()

    plain = logits(text)
    for position in range(20):
        changed = logits([*text[:position], 60, *text[position + 1 :]])
        seen = window != 1 or position == 19
        assert np.array_equal(plain, changed) == (not seen), position


def test_adapters_and_salts_have_texts_of_their_own():
    model = FakeModel()
    adapters = [{"lora": LoRARef("a", 1)}, {"lora": LoRARef("a", 2)}]
    keepers = [{}, {"cache_salt": "a"}, {"cache_salt": ""}, *adapters]
    requests = [EngineCoreRequest("r", [1, 2], GREEDY, **keeper) for keeper in keepers]
    said = {tuple(reference(request, model, 64).token_ids) for request in requests}
    assert len(said) == len(keepers)


def test_a_journal_is_continued():
    """Penalties and noise at hand, for those are what a wrong beginning would change."""
    params = SamplingParams(temperature=1.5, seed=4, max_tokens=20, frequency_penalty=1.0, min_tokens=15)
    model = FakeModel()
    whole = reference(EngineCoreRequest("r", [1, 2, 3], params, eos_token_id=9), model, 64).token_ids
    for cut in range(1, len(whole)):
        rest = EngineCoreRequest("r", [1, 2, 3], params, eos_token_id=9, output_token_ids=whole[:cut])
        assert reference(rest, model, 64).token_ids == whole[cut:]


@pytest.mark.parametrize(
    ("params", "more"),
    [
        ({"allowed_token_ids": [3, 4]}, lambda tokens: set(tokens) <= {3, 4}),
        ({"logit_bias": {5: 100.0}}, lambda tokens: set(tokens) == {5}),
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, lambda tokens: len(set(tokens)) > 10),
        ({"top_k": 1, "temperature": 5.0}, lambda tokens: tokens == greedy_tokens()),
        ({"top_p": 1e-6, "temperature": 5.0}, lambda tokens: tokens == greedy_tokens()),
        ({"min_p": 1.0, "temperature": 5.0}, lambda tokens: tokens == greedy_tokens()),
    ],
)
def test_stages_of_the_sampler(params, more):
    given = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 12, **params})
    assert more(reference(EngineCoreRequest("r", [1, 2], given), FakeModel(), 64).token_ids)


def greedy_tokens() -> list[int]:
    return reference(EngineCoreRequest("r", [1, 2], GREEDY), FakeModel(), 64).token_ids


def test_bad_words_and_min_tokens():
    model, plain = FakeModel(), greedy_tokens()
    avoided = EngineCoreRequest("r", [1, 2], GREEDY, bad_words_token_ids=[[plain[2], plain[3]], [plain[7]]])
    said = reference(avoided, model, 64).token_ids
    assert said[:3] == plain[:3]
    assert said[3] != plain[3]
    assert plain[7] not in said
    longer = SamplingParams(temperature=0.0, seed=0, max_tokens=12, min_tokens=6)
    said = reference(EngineCoreRequest("r", [1, 2], longer, stop_token_ids=[plain[2]]), model, 64)
    assert plain[2] not in said.token_ids[:6]
    stopped = reference(EngineCoreRequest("r", [1, 2], GREEDY, stop_token_ids=[plain[2]]), model, 64)
    assert stopped[:3] == (plain[:3], FinishReason.STOP, plain[2])


def test_logprobs_are_those_of_a_distribution():
    model = FakeModel()
    history = History(model, model.plain_root)
    history.append(5)
    all_of_them = model.logprobs(history.logits(), 7, -1)
    assert np.exp(all_of_them.logprobs[0, 1:]).sum() == pytest.approx(1.0, abs=1e-5)
    assert (np.diff(all_of_them.logprobs[0, 1:]) <= 0).all()
    assert all_of_them.logprobs[0, all_of_them.ranks[0]] == all_of_them.logprobs[0, 0]


# -- the executor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["at once", "when collected", "at random"])
def test_blocks_in_any_order_say_what_the_model_says(when):
    made = executor(when=when)
    tokens = list(range(10))
    wanted = reference(EngineCoreRequest("r", tokens, GREEDY), made.model, 64).token_ids
    said = run(made, plan([3], [6], [], new_requests=[new(3, tokens, [7, 2])]))
    said += run(made, plan([3], [4], [0], new_blocks=[BlockAppend(3, 0, [5])]))
    for _ in range(2):
        said += run(made, plan([3], [1], [0]))
    assert [token for row in said for token in row] == wanted[:3]


def test_nothing_runs_before_it_is_collected():
    made = executor()
    made.execute_model(plan([0], [2], [0], new_requests=[new(0, [1, 2], [1])]))
    last = made.sample_tokens(None)
    made.execute_model(plan([0], [1], [0]))
    assert made.slots == {}
    last.result()
    assert made.slots[0].num_computed == 2
    assert len(made.slots[0].tokens) == 3


def test_a_wrong_block_changes_what_is_said():
    first, tokens = executor(), list(range(10))
    right = run(first, plan([0], [10], [0], new_requests=[new(0, tokens, [1, 2, 3])]))
    swapped = executor()
    run(swapped, plan([0], [8], [], new_requests=[new(0, tokens, [1, 2, 3])]))
    swapped.slots[0].tables[0][:2] = [2, 1]
    assert run(swapped, plan([0], [2], [0])) != right


BAD_PLANS = {
    "names slot 1, which is not held": lambda: [plan([1], [1], [])],
    "rule 2: two rows": lambda: [plan([0, 0], [1, 1], [], new_requests=[new(0, [1, 2, 3], [1])])],
    "rule 2: slot 4 is freed": lambda: [plan([], [], [], freed_slots=[4])],
    "rule 2: slot 0 is taken": lambda: [
        plan([0], [1], [], new_requests=[new(0, [1, 2], [1])]),
        plan([0], [1], [], new_requests=[new(0, [1, 2], [2])]),
    ],
    "rule 3: 3 tokens": lambda: [plan([0], [3], [0], new_requests=[new(0, [1, 2], [1])])],
    "rule 3: .* should sample": lambda: [plan([0], [2], [], new_requests=[new(0, [1, 2], [1])])],
    "nothing to compute": lambda: [plan([0], [1], [0], new_requests=[new(0, [1, 2], [1], num_computed=2)])],
    "has 1 blocks for 5 tokens": lambda: [plan([0], [5], [0], new_requests=[new(0, [1] * 5, [1])])],
    "a block twice": lambda: [plan([0], [5], [0], new_requests=[new(0, [1] * 5, [1, 1])])],
    "needs a block that it let go": lambda: [plan([0], [5], [0], new_requests=[new(0, [1] * 5, [0, 1])])],
    "rule 5: .* different texts": lambda: [
        plan([0, 1], [1, 1], [], new_requests=[new(0, [1] * 5, [1, 2]), new(1, [2] * 5, [1, 3], name="q")])
    ],
    "rule 5: .* not full": lambda: [
        plan([0, 1], [1, 1], [], new_requests=[new(0, [1] * 3, [1]), new(1, [1] * 3, [1], name="q")])
    ],
    "rule 5: .* different places": lambda: [
        plan([0, 1], [1, 1], [], new_requests=[new(0, [1] * 9, [1, 2]), new(1, [1] * 9, [3, 1], name="q")])
    ],
}


@pytest.mark.parametrize(("rule", "plans"), BAD_PLANS.items())
def test_a_plan_that_breaks_a_rule_is_found_out(rule: str, plans):
    made = executor()
    futures = []
    for step in plans():
        futures.append(made.execute_model(step))
        if step.sampling_rows:
            made.sample_tokens(None)
    with pytest.raises(AssertionError, match=rule):
        futures[-1].result()


def test_sampling_comes_between_forward_passes():
    made = executor()
    step = plan([0], [2], [0], new_requests=[new(0, [1, 2], [1])])
    with pytest.raises(AssertionError, match="without a forward pass"):
        made.sample_tokens(None)
    made.execute_model(step)
    with pytest.raises(AssertionError, match="second forward pass"):
        made.execute_model(plan([0], [1], [0]))


def test_after_a_failure_every_result_is_that_failure():
    made = executor(fail_at_step=0)
    made.execute_model(plan([0], [2], [0], new_requests=[new(0, [1, 2], [1])]))
    with pytest.raises(RuntimeError, match="planned failure at step 0"):
        made.sample_tokens(None).result()


def test_a_script_is_followed_by_an_engine_found_by_name():
    """Through preemption too, for what is said next depends on how much was said before."""
    script = [9, 8, 7, 6, 5]
    config = EngineConfig(
        model="",
        vocab_size=64,
        executor="mainspring.testing.fake_executor:make_fake",
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32),
        block_size=4,
        depth=2,
        seed=0,
        executor_args={"scripts": {"a": script}, "windows": [None, 4], "num_blocks": 64},
    )
    core = build_engine(config).core
    core.add_request(EngineCoreRequest("a-1f", [1, 2, 3], GREEDY, stop_token_ids=[5]))
    said: list[int] = []
    for step in range(20):
        if step == 3:
            assert core.call(ResetPrefixCache(reset_running_requests=True))
        for message in core.step().values() if core.has_work() else ():
            said += [token for output in message.outputs for token in output.new_token_ids]
    assert said == script


# -- grammar, clock, scenarios -------------------------------------------------------------------------------


def test_a_grammar_follows_the_whole_output_and_can_go_back():
    grammar, twin = FakeGrammar(64, 2, 5), FakeGrammar(64, 2, 5)
    rows = np.zeros((3, 2), dtype=np.int32)
    grammar.fill(rows[0])
    allowed = [t for t in range(64) if rows[0, t // 32] >> (t % 32) & 1 and t != 2]
    assert not grammar.accept(next(t for t in range(64) if not rows[0, t // 32] >> (t % 32) & 1))
    assert grammar.accept(allowed[0])
    assert twin.accept(allowed[1])
    grammar.fill(rows[1])
    twin.fill(rows[2])
    assert not np.array_equal(rows[1], rows[2])
    grammar.rollback(1)
    grammar.fill(rows[1])
    assert np.array_equal(rows[0], rows[1])


def test_a_compiler_takes_its_time():
    request = EngineCoreRequest("r", [1], GREEDY)
    compiler = FakeGrammarCompiler(lambda message: FakeGrammar(64, 2, 5), {"r": 2, "x": 1}, frozenset({"x"}))
    future, failing = compiler.compile(request), compiler.compile(EngineCoreRequest("x", [1], GREEDY))
    compiler.tick()
    assert not future.done()
    assert isinstance(failing.exception(), ValueError)
    compiler.tick()
    assert isinstance(future.result(), FakeGrammar)
    assert compiler.num_running == 0


def test_a_clock_goes_when_told():
    clock = FakeClock(5.0)
    assert clock() == clock() == 5.0
    clock.advance(2.5)
    assert clock() == 7.5
    assert FakeClock(step_s=1.0)() == 1.0


def test_scenarios_are_made_of_their_dice():
    assert make_scenario(SeededDice(7)) == make_scenario(SeededDice(7))
    assert make_scenario(SeededDice(7)) != make_scenario(SeededDice(8))


def test_a_failing_scenario_is_made_small(monkeypatch: pytest.MonkeyPatch):
    """Here, with a core that forgets to tell workers of new blocks: one request is left."""
    make_plan = Scheduler._make_plan

    def forgetful(self, step):
        step.new_blocks = []
        return make_plan(self, step)

    monkeypatch.setattr(Scheduler, "_make_plan", forgetful)

    def fails(scenario: Scenario) -> bool:
        try:
            play(scenario)
        except (AssertionError, EngineDeadError):
            return True
        return False

    big = make_scenario(SeededDice(3))
    assert fails(big)
    small = smallest(big, fails)
    assert len(small.guests) == 1
    assert (small.depth, small.crashes, small.resets) == (1, (), ())


def test_play_finds_nothing_wrong_with_a_plain_life():
    drive = play(Scenario(guests=(guest("a", [1, 2, 3], params=GREEDY),)))
    assert len(drive.transcripts["a"].token_ids) == 12


@pytest.mark.parametrize("seed", range(5))
def test_a_scenario_can_be_written_down(seed: int):
    scenario = make_scenario(SeededDice(seed))
    names = {**vars(messages), **vars(simulation), "SamplingParams": SamplingParams}
    assert eval(brief(scenario), names) == scenario
