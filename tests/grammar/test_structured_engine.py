"""Structured requests in a whole engine, with a model whose logits are random: the documents are right,
whatever happens around them, and what fails is one request.

The oracle is `reference`: what a request says alone, in a plain loop.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from structured_toys import (
    CLOSING,
    END,
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    allowed,
    asked,
    fault_of,
    feed,
    finish,
    judge,
    make_core,
    matcher,
    request,
    run,
    text_of,
)

from mainspring.base.messages import FinishReason, PrepareGrammars
from mainspring.grammar import library
from mainspring.grammar.library import make_matcher
from mainspring.grammar.matcher import Matcher
from mainspring.grammar.words import GrammarError
from mainspring.testing.fake_model import FakeModel, reference

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "北京", 'a\n"b']}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = [
    {"json": PERSON},
    {"json_object": True},
    {"regex": r"[A-Z][a-z]{2,5} \d{1,3}(é|北)?"},
    {"choice": ["yes", "no", "no, never"]},
    {"grammar": 'root ::= term (("+" | "*") term)*\nterm ::= [0-9]+ | "(" root ")"'},
]
TIGHT = {"num_gpu_blocks_override": 36, "max_num_batched_tokens": 40, "max_model_len": 512}
LONG_PROMPT = list(range(60))


def alone(message, max_model_len: int = 1024):
    """What it says in a plain loop."""
    structure = message.structured_outputs
    ends = {*message.stop_token_ids, *({message.eos_token_id} - {None})}
    grammar = None
    if structure is not None:
        grammar = Matcher(make_matcher(TOKENIZER, structure).matcher, [EOS, END], ends)
    return reference(message, FakeModel(VOCAB_SIZE), max_model_len, grammar)


def check_document(message, token_ids: list[int], reason: FinishReason) -> None:
    """What has ended fits; what was cut is the beginning of something that does."""
    structure = message.structured_outputs
    kind = {structure.kind: getattr(structure, structure.kind)}
    grammar = matcher(**kind)
    said = [token for token in token_ids if token not in (EOS, END)]
    assert all(grammar.accept(token) for token in said)
    if reason is FinishReason.STOP:
        assert grammar.is_finished() or EOS in allowed(grammar)
        if structure.json is not None:
            assert (fault := fault_of(judge(json.loads(structure.json)), text_of(said))) is None, fault


@pytest.mark.parametrize("preempt_every", [None, 5])
@pytest.mark.parametrize(
    "settings", [{}, {"async_scheduling": True}, TIGHT, TIGHT | {"async_scheduling": True}]
)
def test_documents_are_right_and_the_same_as_alone(settings, preempt_every):
    """Cases B131, B133: with chunks, preemption and steps in flight a structured request says what it says
    alone, in its grammar; a plain one beside it too."""
    core, _ = make_core(**settings)
    messages = [
        request(f"{i}-{next(iter(kind))}", asked(**kind), prompt_token_ids=[i, *LONG_PROMPT])
        for i, kind in enumerate(KINDS * 3)
    ]
    messages += [request(f"plain-{i}", None, max_tokens=40) for i in range(3)]
    ended = run(core, messages, preempt_every)
    assert preempt_every is None or core.scheduler.stats().num_preemptions > 0
    for message in messages:
        said = alone(message, 512 if "max_model_len" in settings else 1024)
        end = ended[message.request_id]
        assert (end.new_token_ids, end.finish_reason) == (said.token_ids, said.finish_reason)
        if message.structured_outputs is not None:
            check_document(message, end.new_token_ids, end.finish_reason)
    assert sum(end.finish_reason is FinishReason.STOP for end in ended.values()) > len(ended) / 2
    core.shutdown()


def test_a_journal_goes_on_where_it_ended():
    """A request that a new core takes over is fed what was said, and ends as it would have."""
    core, _ = make_core()
    whole = request("a", asked(json=PERSON))
    said = alone(whole).token_ids
    for cut in (1, len(said) // 2, len(said) - 1):
        rest = run(core, [request("a", asked(json=PERSON), output_token_ids=said[:cut])])["a"]
        assert rest.new_token_ids == said[cut:]
    wrong = run(core, [request("b", asked(json=PERSON), output_token_ids=[ord("x")])])["b"]
    assert wrong.finish_reason is FinishReason.ERROR
    assert "earlier run" in wrong.error
    core.shutdown()


@pytest.mark.parametrize("given", [{}, {"min_tokens": 10}, {"eos_token_id": None, "stop_token_ids": []}])
def test_a_complete_text_ends(given):
    """Case B122: whatever min_tokens and ignore_eos say, nothing follows a text that is complete."""
    core, _ = make_core()
    ended = run(core, [request(str(i), asked(choice=["yes"]), **given) for i in range(4)])
    for end in ended.values():
        assert (text_of(end.new_token_ids), end.finish_reason, end.error) == ("yes", FinishReason.STOP, None)
    core.shutdown()


def test_ends_come_only_where_the_grammar_ends():
    """However much the model wants to end."""
    core, _ = make_core()
    eager = CLOSING | {EOS: 100.0, END: 90.0}
    ended = run(core, [request(str(i), asked(json=PERSON), logit_bias=eager) for i in range(8)])
    assert all(end.finish_reason is FinishReason.STOP for end in ended.values())
    for end in ended.values():
        assert fault_of(judge(PERSON), text_of(end.new_token_ids)) is None
    core.shutdown()


def test_white_space_does_not_go_on_for_ever():
    """Case B125: a model that would write spaces and line ends only still comes to an end."""
    core, _ = make_core()
    bias = {ord("\n"): 40.0, ord(" "): 40.0, ord('"'): 15.0, ord("}"): 15.0}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1]}},
        "required": ["a", "b"],
    }
    ended = run(
        core,
        [
            request(str(i), asked(json=schema | {"additionalProperties": False}), logit_bias=bias)
            for i in range(4)
        ],
    )
    for end in ended.values():
        assert end.finish_reason is FinishReason.STOP
        assert fault_of(judge(schema), text_of(end.new_token_ids)) is None
    core.shutdown()


def test_a_text_that_is_cut_is_a_beginning():
    """Case B127: a thousand items do not fit into 50 tokens; it says so."""
    core, _ = make_core()
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}
    message = request("a", asked(json=schema), max_tokens=50)
    end = run(core, [message])["a"]
    assert end.finish_reason is FinishReason.LENGTH
    assert len(end.new_token_ids) == 50
    check_document(message, end.new_token_ids, end.finish_reason)
    core.shutdown()


# -- what fails is one request -------------------------------------------------------------------------------


class Fails:
    """A library's matcher that fails at its `count`-th use."""

    def __init__(self, inner, count: int, where: str) -> None:
        self._inner, self._left, self._where = inner, count, where

    def deep_copy(self):
        return Fails(self._inner.deep_copy(), self._left, self._where)

    def _use(self, what: str) -> None:
        if what == self._where:
            self._left -= 1
            if self._left < 0:
                raise GrammarError(f"it has failed at a {what}")

    def unsafe_compute_mask_ptr(self, *given):
        self._use("mask")
        self._inner.unsafe_compute_mask_ptr(*given)

    def try_consume_tokens(self, tokens):
        self._use("token")
        return self._inner.try_consume_tokens(tokens)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}])
@pytest.mark.parametrize("where", ["mask", "token"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_grammar_that_fails_ends_its_own_request(monkeypatch, settings, where, count):
    """Cases B119, B124: in the middle of a step in flight, with its cause, and what was said is kept."""

    def make(tokenizer, structure):
        made = make_matcher(tokenizer, structure)
        return made._replace(matcher=Fails(made.matcher, count, where)) if structure.regex else made

    monkeypatch.setattr(library, "make_matcher", make)
    core, _ = make_core(**settings)
    messages = [
        request("bad", asked(regex="[a-z]{20}")),
        request("good", asked(json=PERSON)),
        request("plain", None, max_tokens=30),
    ]
    ended = run(core, messages)
    assert ended["bad"].finish_reason is FinishReason.ERROR
    assert f"it has failed at a {where}" in ended["bad"].error
    assert len(ended["bad"].new_token_ids) == count
    for message in messages[1:]:
        assert ended[message.request_id].new_token_ids == alone(message).token_ids
    assert run(core, [request("later", asked(choice=["yes"]))])["later"].finish_reason is FinishReason.STOP
    core.shutdown()


def test_a_grammar_that_does_not_compile_ends_its_own_request():
    """Case B119: the core judges again, whatever a front end let through."""
    core, _ = make_core()
    ended = run(core, [request("bad", asked(json={"not": {}})), request("good", asked(choice=["yes"]))])
    assert ended["bad"].finish_reason is FinishReason.ERROR
    assert "does not compile" in ended["bad"].error
    assert "not" in ended["bad"].error
    assert ended["good"].finish_reason is FinishReason.STOP
    core.shutdown()


def test_a_core_without_a_vocabulary_says_so():
    core, _ = make_core()
    core._grammars = None
    end = run(core, [request("a", asked(regex="a"))])["a"]
    assert end.finish_reason is FinishReason.ERROR
    assert "no grammar compiler" in end.error
    assert core.call(PrepareGrammars()) is False
    core.shutdown()


def test_plain_requests_run_while_grammars_are_made(monkeypatch):
    """Case B014: parked ones cost nobody anything, and all are answered but those that are aborted."""
    gate = threading.Event()

    def make(tokenizer, structure):
        assert gate.wait(20.0)
        return make_matcher(tokenizer, structure)

    monkeypatch.setattr(library, "make_matcher", make)
    core, _ = make_core(max_num_seqs=4)
    parked = [request(f"parked-{i}", asked(regex=f"{i}[a-c]+"), max_tokens=10) for i in range(10)]
    for message in parked:
        core.add_request(message)
    plain = run(core, [request(f"plain-{i}", None, max_tokens=10) for i in range(3)])
    assert all(
        len(end.new_token_ids) == 10 or end.finish_reason is FinishReason.STOP for end in plain.values()
    )
    assert core.scheduler.stats().num_parked == 10
    core.abort_requests([message.request_id for message in parked[:5]])
    gate.set()
    ended = finish(core, [message.request_id for message in parked[5:]])
    for message in parked[5:]:
        assert ended[message.request_id].new_token_ids == alone(message).token_ids
    stats = core.scheduler.stats()
    assert (stats.num_parked, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert not core._compiling
    core.shutdown()


def test_the_vocabulary_can_be_prepared():
    core, _ = make_core()
    assert core.call(PrepareGrammars()).result(20.0) is True
    assert core._grammars._made is not None
    core.shutdown()


# -- many ----------------------------------------------------------------------------------------------------


def accepted_schemas() -> list[dict]:
    """Of the test suite's."""
    path = Path(__file__).parents[1] / "data" / "json_schema_test_suite.json"
    found = []
    for _, _, schema, _ in json.loads(path.read_text())["drafts"]["draft2020-12"]:
        text = json.dumps(schema)
        if r"\\W" in text or r"\\D" in text or r"\\p" in text:
            continue
        try:
            make_matcher(TOKENIZER, asked(json=text))
        except GrammarError:
            continue
        found.append(schema)
    return found


@pytest.mark.slow
def test_two_thousand_documents_of_random_logits():
    """Every accepted schema of the suite, many times, through the engine: all that ended validate."""
    schemas, num_whole, round_ = accepted_schemas(), 0, 0
    core, _ = make_core(max_num_seqs=64, num_gpu_blocks_override=4000)
    while num_whole < 2000:
        round_ += 1
        assert round_ < 40
        messages = [
            request(f"{round_}-{i}", asked(json=json.dumps(schema)), max_tokens=200)
            for i, schema in enumerate(schemas)
        ]
        ended = run(core, messages)
        for message, schema in zip(messages, schemas, strict=True):
            end = ended[message.request_id]
            assert end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (schema, end.error)
            if end.finish_reason is FinishReason.STOP:
                said = text_of(end.new_token_ids)
                assert (fault := fault_of(judge(schema), said)) is None, (schema, said, fault)
                num_whole += 1
            else:
                assert feed(
                    matcher(json=json.dumps(schema)), text_of(end.new_token_ids[:-4]).rstrip("\ufffd")
                )
    core.shutdown()
