from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
from frontend_toys import END, EOS, TOY, ScriptedClient, logprobs_of, make_engine, run
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.base.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    EventType,
    FinishReason,
)
from mainspring.base.outputs import CompletionOutput, Logprob, RequestOutput
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.frontend.detokenizer import Detokenizer
from mainspring.frontend.output_processor import OutputProcessor

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def say(tokens, *, chunk=1, prompt="hello", **params) -> list[RequestOutput]:
    """All outputs for one request to which the core answers `tokens`."""
    engine = make_engine(ScriptedClient(tokens, chunk=chunk))
    engine.add_request("r", prompt, SamplingParams(**{"max_tokens": 64, **params}))
    return run(engine)


def answer(*args, **kwargs) -> CompletionOutput:
    """The finished one."""
    last = say(*args, **kwargs)[-1]
    assert last.finished
    return last.outputs[0]


def joined(outputs: list[RequestOutput]) -> CompletionOutput:
    """Deltas put together."""
    pieces = [output.outputs[0] for output in outputs]
    whole = copy.copy(pieces[-1])
    whole.text = "".join(piece.text for piece in pieces)
    whole.token_ids = [i for piece in pieces for i in piece.token_ids]
    if whole.logprobs is not None:
        whole.logprobs = [position for piece in pieces for position in piece.logprobs]
    return whole


def result_of(outputs: list[RequestOutput], kind: RequestOutputKind) -> CompletionOutput:
    return joined(outputs) if kind == DELTA else outputs[-1].outputs[0]


script = st.lists(
    st.sampled_from([*b"abc\xf0\x9f\x8c\xb6", *TOY.special_ids, TOY.id(" the"), 999]), max_size=12
)


@settings(max_examples=300, deadline=None)
@given(script, st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_kind_says_the_same(tokens, chunk, stream_interval, data):
    """Cases B070, B097: deltas joined, the last cumulative one and the only final one are equal: text, ids,
    log-probabilities and reasons, at any interval and any number of tokens per output."""
    params = {
        "chunk": chunk,
        "max_tokens": data.draw(st.integers(1, 12)),
        "stop": data.draw(st.sampled_from([None, ["ab"], ["ca", "b"], ["\U0001f336"]])),
        "include_stop_str_in_output": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
        "ignore_eos": data.draw(st.booleans()),
        "logprobs": data.draw(st.sampled_from([None, 0, 2])),
    }
    final = say(tokens, output_kind=FINAL_ONLY, **params)
    assert len(final) == 1
    assert final[0].finished
    deltas = say(tokens, output_kind=DELTA, stream_interval=stream_interval, **params)
    growing = say(tokens, output_kind=CUMULATIVE, stream_interval=stream_interval, **params)
    assert joined(deltas) == growing[-1].outputs[0] == final[0].outputs[0]
    for outputs in (deltas, growing):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in pairwise(growing):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        assert len(after.outputs[0].token_ids) > len(before.outputs[0].token_ids), (
            "what was given out stays as it was"
        )
        assert after.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids


def test_stream_interval():
    counts = [
        len(output.outputs[0].token_ids)
        for output in say([], max_tokens=8, output_kind=DELTA, stream_interval=3)
    ]
    assert counts == [1, 3, 3, 1]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
@pytest.mark.parametrize("include", [False, True])
def test_stop_token_that_is_a_word(kind, include):
    """Case B073: the token is among the ids; its text is there only if asked for, streamed or not."""
    the = TOY.id(" the")
    wanted = {"stop_token_ids": [the], "include_stop_str_in_output": include, "logprobs": 0}
    result = result_of(say([ord("a"), the], output_kind=kind, **wanted), kind)
    assert result.text == ("a the" if include else "a")
    assert result.token_ids == [ord("a"), the]
    assert (result.finish_reason, result.stop_reason) == ("stop", the)
    assert len(result.logprobs) == 2


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a<eos>")])
def test_eos_with_special_tokens_shown(include, text):
    """Case B073: its text goes by the same rule; it is no reason of its own."""
    result = answer(
        [ord("a"), TOY.eos_token_id], skip_special_tokens=False, include_stop_str_in_output=include
    )
    assert (result.text, result.stop_reason) == (text, None)
    assert result.token_ids == [ord("a"), TOY.eos_token_id]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("stop", "ignore_eos"), [(END, False), (END, True), (EOS, True), (EOS, False)])
@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_stop_string_that_is_a_special_token(skip, stop, ignore_eos, kind):
    """Case B080: it ends the answer whether or not special tokens are shown, and is the reason."""
    tokens = [ord("a"), TOY.id(stop), ord("b")]
    outputs = say(tokens, stop=[stop], skip_special_tokens=skip, ignore_eos=ignore_eos, output_kind=kind)
    result = joined(outputs)
    assert (result.text, result.token_ids) == ("a", tokens[:2])
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_stop_string_ends_it_for_the_core_too():
    """Case B070: the core hears of it once, unless it had ended by itself in the same step."""
    client = ScriptedClient(list(b"abSTOPx"))
    engine = make_engine(client)
    engine.add_request("r", "hello", SamplingParams(stop="STOP", max_tokens=64, logprobs=1))
    last = run(engine)[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("ab", "stop", "STOP")
    assert len(last.token_ids) == len(last.logprobs) == 6
    assert client.aborted == [client.seen[0].request_id]
    assert not client.live

    at_the_limit = ScriptedClient(list(b"abSTOP"))
    engine = make_engine(at_the_limit)
    engine.add_request("r", "hello", SamplingParams(stop="STOP", max_tokens=6))
    assert run(engine)[-1].outputs[0].stop_reason == "STOP"
    assert at_the_limit.aborted == []


def test_surplus_of_one_output_is_dropped():
    """Case B070: tokens and log-probabilities after the match, in the same output, never were."""
    result = answer(list(b"aSTOPbcd"), chunk=8, stop=["STOP"], logprobs=1)
    assert result.token_ids == list(b"aSTOP")
    assert [next(iter(position)) for position in result.logprobs] == list(b"aSTOP")
    assert result.cumulative_logprob == pytest.approx(
        sum(position[i].logprob for i, position in zip(result.token_ids, result.logprobs, strict=True))
    )


@pytest.mark.parametrize("end", [{"max_tokens": 3}, {"stop_token_ids": [ord("!")]}, {}])
def test_held_text_is_given_at_the_end(end):
    """Case B071: at length, stop token and EOS alike."""
    tokens = [*b"DEF", ord("!") if "stop_token_ids" in end else TOY.eos_token_id]
    outputs = say(tokens, stop=["DEFG"], output_kind=DELTA, **end)
    assert [output.outputs[0].text for output in outputs[:-1]] == [""] * (len(outputs) - 1)
    assert outputs[-1].outputs[0].text == "DEF"


def test_unfinished_character_at_the_end():
    """Case B086."""
    outputs = say(list("é🌶".encode())[:4], max_tokens=4, output_kind=DELTA)
    assert [output.outputs[0].text for output in outputs] == ["", "é", "", "\ufffd"]


def test_without_text():
    result = answer(list(b"abc"), max_tokens=3, detokenize=False, logprobs=0)
    assert (result.text, result.token_ids, result.finish_reason) == ("", list(b"abc"), "length")
    assert result.logprobs[0][ord("a")].decoded_token == "a"


# --- log-probabilities ------------------------------------------------------------------------------------


def test_logprobs_of_a_position():
    """The chosen token first, with its own rank also where it is among the best; then the best."""
    result = answer([ord("a")], max_tokens=1, logprobs=2)
    (position,) = result.logprobs
    assert list(position) == [ord("a"), ord("b"), ord("c")]
    assert [entry.rank for entry in position.values()] == [3, 1, 2]
    assert position[ord("b")] == Logprob(pytest.approx(-ord("b") / 64 - 0.5), 1, "b")
    assert result.cumulative_logprob == position[ord("a")].logprob


def test_chosen_token_among_the_best_is_one_entry():
    processor = OutputProcessor(TOY)
    request = EngineCoreRequest("r-1", [1], SamplingParams(logprobs=2, max_tokens=4, seed=1))
    processor.add_request("r", None, [request])
    arrays = logprobs_of([ord("a")], 2)
    arrays.token_ids[0] = [ord("b"), ord("b"), ord("c")]
    arrays.ranks[0] = 2  # another logit is as large
    (output,), _ = processor.process_outputs([EngineCoreOutput("r-1", [ord("b")], new_logprobs=arrays)])
    (position,) = output.outputs[0].logprobs
    assert [(i, entry.rank) for i, entry in position.items()] == [(ord("b"), 2), (ord("c"), 2)]


def test_halves_of_characters_do_not_hide_each_other():
    """Case B088: entries that look alike as text stay apart."""
    (position,) = answer([0xF0], max_tokens=1, logprobs=4).logprobs
    assert len(position) == 5
    assert {entry.decoded_token for entry in position.values()} == {"\ufffd"}


def test_logprob_texts_join_to_the_text():
    """Case B089."""
    tokens = [TOY.id(" Paris"), TOY.id(" the"), *b"x\n"]
    result = answer(tokens, max_tokens=4, logprobs=0)
    texts = [position[i].decoded_token for i, position in zip(tokens, result.logprobs, strict=True)]
    assert "".join(texts) == result.text == " Paris thex\n"


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_prompt_logprobs(kind, length):
    """Case B091: one entry per prompt token, the first None; said once in deltas."""
    prompt = list(b"vwxyz")[:length]
    outputs = say([], prompt=prompt, max_tokens=3, prompt_logprobs=1, output_kind=kind)
    expected = [None] + [{i, i + 1} for i in prompt[1:]]
    for number, output in enumerate(outputs):
        if kind == DELTA and number:
            assert output.prompt_logprobs is None
        else:
            assert [p if p is None else set(p) for p in output.prompt_logprobs] == expected


def test_a_batch_where_some_want_logprobs():
    """Case B097: requests with two, none and five do not disturb each other."""
    engine = make_engine(ScriptedClient(list(b"abcdef"), chunk=3))
    for name, num in [("two", 2), ("none", None), ("five", 5)]:
        engine.add_request(name, "hello", SamplingParams(logprobs=num, max_tokens=6, output_kind=DELTA))
    results: dict[str, list[RequestOutput]] = {}
    for output in run(engine):
        results.setdefault(output.request_id, []).append(output)
    assert joined(results["none"]).logprobs is None
    for name, num in [("two", 2), ("five", 5)]:
        whole = joined(results[name])
        assert [list(position) for position in whole.logprobs] == [
            [t, *range(t + 1, t + 1 + num)] for t in b"abcdef"
        ]


# --- faults, and what is not ours -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_fault_of_one_request_is_its_own(monkeypatch, caplog, kind):
    """Case B008: one detokenizer raises at its fourth token; that request ends in error and is aborted, the
    others go on as if nothing had been."""
    client = ScriptedClient(lambda request: list(b"abcdef"))
    engine = make_engine(client)
    for name in ("1", "2", "3"):
        engine.add_request(name, [ord(name)], SamplingParams(max_tokens=6, output_kind=kind))
    original = Detokenizer.update

    def update(self, token_ids):
        if self is broken and self.num_tokens == 3:
            raise ValueError("rubbish")
        return original(self, token_ids)

    broken = engine._output_processor._states[client.seen[1].request_id].detokenizer
    monkeypatch.setattr(Detokenizer, "update", update)
    results: dict[str, list[RequestOutput]] = {}
    for output in run(engine):
        results.setdefault(output.request_id, []).append(output)
    bad = results["2"][-1]
    assert bad.finished
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].error.startswith("ValueError: rubbish (test_output_processor.py:")
    assert client.aborted == [client.seen[1].request_id]
    for name in ("1", "3"):
        assert "".join(output.outputs[0].text for output in results[name][-6:]).endswith("abcdef")
        assert results[name][-1].outputs[0].finish_reason == "length"
    assert "failed in the front end" in caplog.text


@pytest.mark.parametrize("tokens", [[0x80] * 50, [TOY.vocab_size + 3] * 50])
def test_rubbish_is_no_fault(tokens):
    """Cases B008, B106: lone continuation bytes are U+FFFD each; ids that the tokenizer lacks are empty."""
    result = answer(tokens, max_tokens=50, logprobs=1)
    assert result.text == ("\ufffd" * 50 if tokens[0] == 0x80 else "")
    assert (len(result.token_ids), result.finish_reason) == (50, "length")


def test_refusal_by_the_core():
    processor = OutputProcessor(TOY)
    processor.add_request("r", None, [EngineCoreRequest("r-1", [1], SamplingParams(seed=1))])
    core_says = EngineCoreOutput("r-1", [], FinishReason.ERROR, error="ValueError: no (x.py:1)")
    (output,), to_abort = processor.process_outputs([core_says])
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "ValueError: no (x.py:1)")
    assert not to_abort
    assert not processor.num_unfinished


def test_news_without_a_token_waits_for_one():
    processor = OutputProcessor(TOY)
    processor.add_request("r", None, [EngineCoreRequest("r-1", [1], SamplingParams(seed=1))])
    assert processor.process_outputs([EngineCoreOutput("r-1", [], num_cached_tokens=16)]) == ([], [])
    (output,), _ = processor.process_outputs([EngineCoreOutput("r-1", [97])])
    assert (output.num_cached_tokens, output.outputs[0].text) == (16, "a")


def test_old_news_is_passed_over():
    processor = OutputProcessor(TOY)
    processor.add_request("r", None, [EngineCoreRequest("r-1", [1], SamplingParams(seed=1))])
    finished = EngineCoreOutput("r-1", [97], FinishReason.LENGTH)
    assert len(processor.process_outputs([finished, finished]).request_outputs) == 1
    assert processor.process_outputs([finished, EngineCoreOutput("unknown", [1])]) == ([], [])


# --- metrics --------------------------------------------------------------------------------------------


def test_metrics():
    now = [100.0]
    processor = OutputProcessor(TOY, clock=lambda: now[0], log_stats=True)
    request = EngineCoreRequest("r-1", [1], SamplingParams(seed=1), arrival_time_s=100.0)
    processor.add_request("r", None, [request])

    def step(token, *events, end=None):
        now[0] += 1
        events = [EngineCoreEvent(kind, time) for kind, time in events]
        return processor.process_outputs([EngineCoreOutput("r-1", [token], end, events=events)])[0][0].metrics

    first = step(97, (EventType.QUEUED, 5.0), (EventType.SCHEDULED, 5.5))
    assert (first.time_to_first_token_s, first.queue_time_s, first.e2e_latency_s) == (1.0, 0.5, None)
    last = step(98, (EventType.PREEMPTED, 6.0), (EventType.SCHEDULED, 9.0), end=FinishReason.LENGTH)
    assert (last.time_to_first_token_s, last.queue_time_s, last.e2e_latency_s) == (1.0, 0.5, 2.0)
    assert last.num_preemptions == 1
    assert (first.e2e_latency_s, first.num_preemptions) == (None, 0), "what was given out does not change"


def test_no_metrics_unless_asked():
    assert say([], max_tokens=1)[0].metrics is None


# --- the journal ----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(script, st.integers(1, 4), st.lists(st.integers(0, 6), max_size=3), st.data())
def test_another_core_goes_on_from_the_journal(tokens, chunk, deaths, data):
    """The core is thrown away after some steps, several times; what the caller reads is what one core would
    have said: no token, character or log-probability lost or said twice."""
    params = SamplingParams(
        max_tokens=data.draw(st.integers(1, 12)),
        stop=data.draw(st.sampled_from([None, ["ab"], ["ca"]])),
        min_tokens=0,
        logprobs=1,
        prompt_logprobs=0,
        output_kind=data.draw(st.sampled_from(list(RequestOutputKind))),
        seed=3,
    )
    undisturbed = make_engine(ScriptedClient(tokens))
    undisturbed.add_request("r", "hello the", params)
    expected = result_of(run(undisturbed), params.output_kind)

    client = ScriptedClient(tokens, chunk=chunk)
    engine = make_engine(client)
    engine.add_request("r", "hello the", params)
    outputs = []
    for num_steps in deaths:
        for _ in range(num_steps):
            outputs += engine.step()
        engine.client = client = ScriptedClient(tokens, chunk=chunk)
        for request in engine._output_processor.journal():
            received = bool(request.output_token_ids)
            assert request.sampling_params.prompt_logprobs == (None if received else 0)
            client.add_request(request)
    outputs += run(engine)
    got = result_of(outputs, params.output_kind)
    assert (got.text, got.token_ids, got.logprobs) == (expected.text, expected.token_ids, expected.logprobs)
    assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert math.isclose(got.cumulative_logprob, expected.cumulative_logprob, rel_tol=1e-6)
    assert sum(output.prompt_logprobs is not None for output in outputs) == (
        1 if params.output_kind != CUMULATIVE else len(outputs)
    )


def test_journal_is_a_copy():
    engine = make_engine(ScriptedClient(list(b"abc")))
    engine.add_request("r", "hello", SamplingParams(max_tokens=9, prompt_logprobs=1))
    engine.step()
    (entry,) = engine._output_processor.journal()
    (again,) = engine._output_processor.journal()
    assert entry.output_token_ids == again.output_token_ids == [ord("a")]
    entry.output_token_ids.append(5)
    assert again.output_token_ids == [ord("a")]
    assert engine._output_processor.journal()[0].output_token_ids == [ord("a")]
