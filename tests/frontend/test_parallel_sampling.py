from __future__ import annotations

import pytest
from frontend_toys import TOY, ScriptedClient, make_engine, run

from mainspring.base.params import MAX_N, MAX_SEED, RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def by_index(request) -> list[int]:
    """Child i says i letters and a stop: they end at different times."""
    child = int(request.request_id.split("_")[0]) if "_" in request.request_id else 0
    return [*range(ord("a"), ord("a") + child), TOY.eos_token_id]


def start(client, **params):
    engine = make_engine(client)
    engine.add_request("r", "hello", SamplingParams(max_tokens=9, **params))
    return engine


@pytest.mark.parametrize("seed", [7, MAX_SEED - 1, -1, None])
def test_children(seed):
    """Each child is the request a caller would have sent alone, with the next seed; the prompt's
    log-probabilities are computed once."""
    client = ScriptedClient()
    start(client, n=4, seed=seed, prompt_logprobs=1, temperature=0.5)
    params = [request.sampling_params for request in client.seen]
    first = params[0].seed
    wrapped = [(first + i + 2**63) % 2**64 - 2**63 for i in range(4)]
    assert [p.seed for p in params] == wrapped
    assert first == seed or seed in (-1, None)
    assert [p.n for p in params] == [1] * 4
    assert [p.prompt_logprobs for p in params] == [1, None, None, None]
    assert [p.skip_reading_prefix_cache for p in params] == [True, False, False, False]
    assert len({request.request_id for request in client.seen}) == 4
    assert len({id(request.output_token_ids) for request in client.seen}) == 4, "each goes on from its own"


def test_final_only_waits_for_all():
    """Case B100: one output with all answers by index, each with its own end."""
    engine = start(ScriptedClient(by_index), n=3, output_kind=FINAL_ONLY, prompt_logprobs=0)
    (output,) = run(engine)
    assert output.finished
    assert [(a.index, a.text, a.finish_reason) for a in output.outputs] == [
        (0, "", "stop"),
        (1, "a", "stop"),
        (2, "ab", "stop"),
    ]
    assert output.prompt_token_ids == TOY.encode("hello"), "counted once, whatever n"
    assert sum(len(answer.token_ids) for answer in output.outputs) == 1 + 2 + 3
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_streams_by_index(kind):
    """Case B100: each answer streams under its index; finished is said once, when all are."""
    outputs = run(start(ScriptedClient(by_index), n=3, output_kind=kind))
    texts = {0: "", 1: "", 2: ""}
    for output in outputs:
        (answer,) = output.outputs
        texts[answer.index] = texts[answer.index] + answer.text if kind == DELTA else answer.text
    assert texts == {0: "", 1: "a", 2: "ab"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"r"}


def test_greedy_answers_are_equal():
    """Case B100: n at temperature 0 is allowed, and gives the same answer n times."""
    (output,) = run(start(ScriptedClient(list(b"abc")), n=3, temperature=0, output_kind=FINAL_ONLY))
    assert len({answer.text for answer in output.outputs}) == 1
    assert len(output.outputs) == 3


@pytest.mark.parametrize("n", [0, -1, 1.5, 10**6, MAX_N + 1, True])
def test_impossible_n(n):
    """Case B100."""
    with pytest.raises(ValueError, match="n must be"):
        SamplingParams(n=n)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_abort_ends_all_children(num_steps):
    """Case B019: also when some have finished already; nothing stays behind."""
    client = ScriptedClient(by_index)
    engine = start(client, n=4, output_kind=DELTA)
    finished = [o for _ in range(num_steps) for o in engine.step() if o.outputs[0].finish_reason]
    assert len(finished) == num_steps
    engine.abort_request("r")
    assert sorted(client.aborted) == sorted(r.request_id for r in client.seen[num_steps:])
    assert not client.live
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    processor = engine._output_processor
    assert (processor._states, processor._ids_of) == ({}, {})


def test_nothing_stays_behind_after_the_end():
    """Case B019."""
    engine = start(ScriptedClient(by_index), n=4)
    run(engine)
    processor = engine._output_processor
    assert (processor._states, processor._ids_of) == ({}, {})


def test_fault_of_one_child(monkeypatch):
    """Case B008: the others finish, and the caller hears of all."""
    engine = start(ScriptedClient(by_index), n=3, output_kind=FINAL_ONLY)
    state = list(engine._output_processor._states.values())[1]
    monkeypatch.setattr(state, "detokenizer", object())
    (output,) = run(engine)
    assert [answer.finish_reason for answer in output.outputs] == ["stop", "error", "stop"]


def test_cached_tokens_are_those_of_the_first():
    engine = start(ScriptedClient(by_index), n=2, output_kind=FINAL_ONLY)
    assert run(engine)[0].num_cached_tokens == 0
