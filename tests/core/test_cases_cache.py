"""Public faults of block accounting, aborts and the prefix cache, as cases for this core.

As in `test_cases_scheduling.py`, `finish` compares with a plain loop and looks for anything that was left.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from mainspring.base.errors import EngineDeadError
from mainspring.base.messages import GetStats, LoRARef, ResetPrefixCache
from mainspring.base.params import SamplingParams
from mainspring.core import prefix
from mainspring.testing.fake_kv_source import RemotePrefix
from mainspring.testing.simulation import VOCAB_SIZE, Drive, Scenario, guest

TINY = Scenario(
    guests=(),
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)


def text(length: int, seed: int) -> list[int]:
    """A fixed text of its own; a longer one of the same seed goes on where a shorter one ends."""
    dice = random.Random(seed)
    return [dice.randrange(VOCAB_SIZE) for _ in range(length)]


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **more)


def open_house(scenario: Scenario, *guests) -> Drive:
    """An engine that nobody has been handed to yet."""
    return Drive(replace(scenario, guests=tuple(guests)))


def finish(drive: Drive, max_steps: int = 1000) -> None:
    drive.run(max_steps)
    drive.check_promise()
    drive.check_idle()
    drive.check_cache()


def ask(drive: Drive, request_id: str) -> int:
    """Run one request to its end; how many of its tokens were found in the cache."""
    drive.add(request_id)
    drive.run()
    return drive.transcripts[request_id].num_cached_tokens[0]


def eviction_order(drive: Drive) -> list[int]:
    return list(drive.kv.pool._idle)


def refs(drive: Drive) -> Counter[int]:
    """References by block, as the live tables say."""
    return Counter(
        block
        for request in drive.scheduler.requests.values()
        for blocks in request.block_table
        for block in blocks
    )


# -- section 3: aborts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_any_time_keep_the_accounts(seed: int):
    """Case B022: forty requests of one beginning, two hundred aborts; all references are owned throughout."""
    dice = random.Random(seed)
    guests = [guest(f"r{i}", text(64, 0) + text(i % 9, i), params=greedy(20)) for i in range(40)]
    last = guest("last", text(64, 0) + text(9, 99), params=greedy(20))
    drive = open_house(replace(TINY, num_blocks=24, max_model_len=128, depth=1 + seed % 3), *guests, last)
    for i in range(40):
        drive.add(f"r{i}")
        for _ in range(5):
            drive.abort(f"r{dice.randrange(40)}")
        drive.step()
        assert refs(drive).total() == sum(drive.kv.pool._refs)
    finish(drive)
    assert ask(drive, "last") == 64
    finish(drive)


def test_aborting_those_who_wait_changes_no_count():
    """Case B023: what a lookup found for requests that were never admitted is not held for them."""
    case = replace(TINY, block_size=4, num_blocks=16, max_model_len=64, max_num_seqs=6)
    full = guest("full", text(48, 0), params=greedy(14))
    waiting = [guest(f"w{i}", text(48, 0) + text(13, i), params=greedy(3)) for i in range(5)]
    drive = open_house(case, full, *waiting)
    drive.add("full")
    drive.step()
    drive.step()
    before = list(drive.kv.pool._refs)
    for i in range(5):
        drive.add(f"w{i}")
    drive.step()
    assert len(drive.scheduler.waiting) == 5
    for i in range(5):
        drive.abort(f"w{i}")
    assert list(drive.kv.pool._refs) == before
    finish(drive)


def test_a_cut_stream_does_not_hurt_the_next_turn():
    """Case B025: abort after the first token, then at once the longer conversation, five times."""
    first, second = text(120, 1), text(120, 1) + text(10, 2)
    guests = [guest(f"a{i}", first, params=greedy(30)) for i in range(5)]
    guests += [guest(f"b{i}", second, params=greedy(30)) for i in range(5)]
    drive = open_house(TINY, *guests)
    for i in range(5):
        drive.add(f"a{i}")
        while not drive.step():
            pass
        drive.abort(f"a{i}")
        assert ask(drive, f"b{i}") == (112 if i == 0 else 128)
    finish(drive)


# -- section 6: blocks -------------------------------------------------------------------------------------


def test_an_admission_that_fails_takes_nothing():
    """Case B044: one block too few, part of the prompt cached; then one block more; then a complete hit."""
    case = replace(TINY, block_size=4, num_blocks=12, max_model_len=48, max_num_seqs=4)
    warm = guest("warm", text(16, 1), params=greedy(1))
    holder = guest("holder", text(18, 2), params=greedy(8))
    late = guest("late", text(16, 1) + text(14, 3), params=greedy(2))
    again = guest("again", text(16, 1) + text(14, 3), params=greedy(2))
    drive = open_house(case, warm, holder, late, again)
    ask(drive, "warm")
    drive.add("holder")
    drive.step()
    drive.add("late")  # needs 8 blocks; 7 are idle, 4 of them its own prefix
    before, order = list(drive.kv.pool._refs), eviction_order(drive)
    drive.step()
    assert drive.scheduler.requests["late"].block_table == []
    assert (list(drive.kv.pool._refs), eviction_order(drive)) == (before, order)
    finish(drive)
    assert drive.transcripts["late"].num_cached_tokens == [16]
    assert ask(drive, "again") == 28  # every whole block but the one that must be read for its logits
    finish(drive)


@pytest.mark.parametrize("seed", range(20))
def test_families_under_pressure(seed: int):
    """Case B046: thirty requests of three families and too few blocks; nobody's text is another's."""
    dice = random.Random(seed)
    guests = [guest(f"r{i}", [*text(dice.randint(39, 119), i % 3), i], params=greedy(30)) for i in range(30)]
    drive = open_house(replace(TINY, num_blocks=20, max_model_len=160, max_num_batched_tokens=256), *guests)
    for i in range(30):
        drive.add(f"r{i}")
        drive.step()
    finish(drive, 3000)


# -- section 7: the prefix cache -----------------------------------------------------------------------------


def test_adapter_and_salt_keep_texts_apart():
    """Case B047: an adapter "X", a salt "X", neither, an empty salt, both, and a salt that is their sum."""
    keepers = {
        "plain": {},
        "adapter": {"lora": LoRARef("X", 1)},
        "salt": {"cache_salt": "X"},
        "empty": {"cache_salt": ""},
        "both": {"cache_salt": "a", "lora": LoRARef("b", 1)},
        "sum": {"cache_salt": "ab"},
    }
    guests = [
        guest(f"{name}{i}", [*text(48, 1), i], params=greedy(6), **keeper)
        for name, keeper in keepers.items()
        for i in (1, 2)
    ]
    drive = open_house(TINY, *guests)
    assert [ask(drive, f"{name}1") for name in keepers] == [0] * len(keepers)
    assert [ask(drive, f"{name}2") for name in keepers] == [48] * len(keepers)
    finish(drive)


def test_another_adapter_under_an_old_name_finds_nothing():
    """Case B049: the number of the load is part of the name."""
    old, new = (guest(f"v{i}", text(48, 1), params=greedy(6), lora=LoRARef("X", i)) for i in (1, 2))
    drive = open_house(TINY, old, new)
    assert [ask(drive, "v1"), ask(drive, "v2")] == [0, 0]
    finish(drive)


def test_a_weak_hash_would_be_believed(monkeypatch: pytest.MonkeyPatch):
    """Case B050: a hit is not compared with the tokens, so only a strong hash will do; this is why."""
    strong = prefix.block_hash
    monkeypatch.setattr(prefix, "block_hash", lambda parent, tokens: bytes([strong(parent, tokens)[0] & 15]))
    drive = open_house(TINY, *[guest(f"r{i}", text(40, i), params=greedy(3)) for i in range(40)])

    def ask_everybody() -> None:
        for i in range(40):
            ask(drive, f"r{i}")
        drive.check_promise()

    with pytest.raises((AssertionError, EngineDeadError)):
        ask_everybody()


def test_the_cache_is_asked_anew_at_every_attempt():
    """Case B052: a prefix that was there when admission failed is gone when it succeeds."""
    case = replace(TINY, block_size=4, num_blocks=12, max_model_len=48, max_num_seqs=4)
    warm = guest("warm", text(16, 1), params=greedy(1))
    holder = guest("holder", text(22, 2), params=greedy(20))
    late = guest("late", text(16, 1) + text(20, 3), params=greedy(4))
    drive = open_house(case, warm, holder, late)
    ask(drive, "warm")
    drive.add("holder")
    drive.step()
    drive.add("late")
    drive.step()
    assert drive.kv.find_cached_prefix(drive.scheduler.requests["late"]).num_tokens == 16
    finish(drive)
    assert drive.transcripts["late"].num_cached_tokens[0] < 16  # the holder grew over it


@pytest.mark.parametrize("budget", [64, 100, 256])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("aborted", [False, True])
def test_equal_prompts_of_one_step(budget: int, count: int, aborted: bool):
    """Case B053: those that come together share blocks once they are written, also if the writer leaves."""
    guests = [guest(f"r{i}", text(200, 1), params=greedy(6)) for i in range(count)]
    drive = open_house(replace(TINY, threshold=48, max_num_batched_tokens=budget, depth=2), *guests)
    for i in range(count):
        drive.add(f"r{i}")
    drive.step()
    if aborted:
        drive.abort("r0")
    finish(drive)
    assert drive.executor.num_tokens_run["r1"] < 200 + 6, "nothing was shared"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_hold_what_their_names_say_after_a_stop(depth: int):
    """Case B055: a request stops in the middle of a block while the next steps run; a longer one of the same
    beginning says warm what it says cold."""
    start, case = text(37, 1), replace(TINY, depth=depth)
    probe = open_house(case, guest("probe", start, params=greedy(20)))
    ask(probe, "probe")
    said = probe.transcripts["probe"].token_ids
    for cut in range(5, 16):
        stops = guest("stops", start, params=greedy(20), stop_token_ids=[said[cut]])
        seen = said[: said.index(said[cut]) + 1]
        more = guest("more", start + seen + text(20, 9), params=greedy(10))
        drive = open_house(case, stops, more)
        ask(drive, "stops")
        assert ask(drive, "more") >= 32
        finish(drive)


@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_hold_what_their_names_say_after_a_stop_string(depth: int):
    """Case B055: the front end ends the request, when the core has run ahead of the text that counts."""
    start, case = text(37, 1), replace(TINY, depth=depth)
    cut = guest("cut", start, params=greedy(60))
    drive = open_house(case, cut, guest("more", start, params=greedy(10)))
    drive.add("cut")
    while len(drive.transcripts["cut"].token_ids) < 13:
        drive.step()
    drive.abort("cut")
    seen = drive.transcripts["cut"].token_ids[:12]  # the last token is not part of the text
    more = guest("more", start + seen + text(20, 9), params=greedy(10))
    drive.guests["more"] = more
    assert ask(drive, "more") >= 48
    finish(drive)


def test_a_reset_says_what_it_did():
    """Case B056: refused while a request runs, without harm to it; done when idle; then nothing is found."""
    drive = open_house(TINY, *[guest(name, text(48, 1), params=greedy(5)) for name in "abc"])
    drive.add("a")
    drive.step()
    assert not drive.core.call(ResetPrefixCache())
    drive.run()
    assert ask(drive, "b") == 32
    assert drive.core.call(ResetPrefixCache())
    assert ask(drive, "c") == 0
    finish(drive)


def test_a_reset_waits_for_blocks_on_their_way():
    """Case B056: while a load is filling blocks, a forced reset must not forget who owns them."""
    guests = [guest("a", text(40, 1), params=greedy(5), elsewhere=(RemotePrefix(32, delay_steps=4),))]
    drive = open_house(TINY, *guests)
    drive.add("a")
    drive.step()
    assert not drive.core.call(ResetPrefixCache(reset_running_requests=True))
    finish(drive)
    assert drive.core.call(ResetPrefixCache())
    assert drive.core.call(GetStats()).kv_cache_usage == 0.0
