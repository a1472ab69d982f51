"""An engine that slept says what it said before, and claims to remember nothing that was dropped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tiny_engine import ask, reference, said, text, tiny_llm

from mainspring import LLM, SamplingParams
from mainspring.base.errors import EngineError
from mainspring.base.messages import Command, CommandResult, IsPaused, IsSleeping, Sleep, WakeUp

PROMPT = text(40, 1)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def tell(llm: LLM, command: Command) -> CommandResult:
    return llm.llm_engine.client.call(command)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one step", "run-ahead"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_answers_after_sleep_are_those_before(level: int, async_scheduling: bool):
    """Case B056: the same answer, and nothing is found where memory was given back; a second sleep and a
    second waking change nothing."""
    wanted = said(reference([PROMPT], [PARAMS]))
    with tiny_llm(async_scheduling=async_scheduling) as llm:
        assert said(ask(llm, [PROMPT], PARAMS)) == wanted
        for _ in range(2):
            assert tell(llm, Sleep(level)) is True
        assert tell(llm, IsSleeping()) is (level > 0)
        for _ in range(2):
            assert tell(llm, WakeUp()) is True
        assert tell(llm, IsSleeping()) is tell(llm, IsPaused()) is False
        for hit in (0 if level else 32, 32):
            (again,) = ask(llm, [PROMPT], PARAMS)
            assert (said([again]), again.num_cached_tokens) == (wanted, hit)


def test_waking_by_parts():
    """Case B056: it serves once both parts are back."""
    with tiny_llm() as llm:
        wanted = said(ask(llm, [PROMPT], PARAMS))
        assert tell(llm, WakeUp()) is True, "without a sleep nothing happens"
        tell(llm, Sleep(2))
        tell(llm, WakeUp(["weights"]))
        assert tell(llm, IsSleeping()) is tell(llm, IsPaused()) is True
        tell(llm, WakeUp(["kv_cache"]))
        assert tell(llm, IsSleeping()) is tell(llm, IsPaused()) is False
        assert said(ask(llm, [PROMPT], PARAMS)) == wanted


@pytest.mark.parametrize("in_process", [True, False], ids=["in process", "in a process of its own"])
def test_a_call_to_a_sleeping_llm_is_refused(in_process: bool, smollm2: Path):
    """Case B056: it would wait for ever, for nobody else may be there to wake the engine; and nothing of it
    is left."""
    limits = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 23}
    with LLM(smollm2, in_process=in_process, **limits) as llm:
        prompt, params = {"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=2)
        (wanted,) = said(llm.generate([prompt], params, use_tqdm=False))
        for sleep in (partial(llm.sleep), partial(llm.sleep, level=2), partial(llm.sleep, level=0)):
            sleep()
            state = "sleeps" if llm.is_sleeping() else "is paused"
            for call in (llm.generate, llm.embed):
                with pytest.raises(
                    EngineError, match=rf"the engine {state} and would not answer; call wake_up"
                ):
                    call(prompt, use_tqdm=False)
            with pytest.raises(EngineError, match="call wake_up"):
                next(llm.generate_stream(prompt, params))
            assert not llm.llm_engine.has_unfinished_requests()
            llm.wake_up()
            assert not llm.is_sleeping()
            assert said(llm.generate([prompt], params, use_tqdm=False)) == [wanted]
        llm.sleep(2)
        llm.wake_up(tags=["weights"])
        assert llm.is_sleeping()
        llm.wake_up(["kv_cache"])
        assert said(llm.generate([prompt], params, use_tqdm=False)) == [wanted]


def test_who_runs_is_aborted_and_who_comes_waits():
    """Case B056: the rule for requests before and during a sleep."""
    with tiny_llm() as llm:
        wanted = said(ask(llm, [PROMPT], PARAMS))
        engine = llm.llm_engine
        engine.add_request("running", {"prompt_token_ids": text(20, 2)}, SamplingParams(max_tokens=100))
        engine.step()
        tell(llm, Sleep(1))
        engine.add_request("waiting", {"prompt_token_ids": PROMPT}, PARAMS)
        ended = engine.step()
        assert [(o.request_id, o.outputs[0].finish_reason) for o in ended] == [("running", "abort")]
        assert engine.step() == []
        tell(llm, WakeUp())
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert (outputs[-1].request_id, outputs[-1].outputs[0].token_ids) == ("waiting", wanted[0])


def test_a_profile_of_what_an_llm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with tiny_llm() as llm:
        llm.start_profile()
        ask(llm, [PROMPT], PARAMS)
        assert Path(llm.stop_profile()).stat().st_size > 0
