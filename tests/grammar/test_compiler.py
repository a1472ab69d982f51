"""Compiling beside the loop: who waits for what, what is remembered, and that nobody is kept waiting."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from structured_toys import END, EOS, VOCAB_SIZE, VOCABULARY, allowed, asked, request

from mainspring.base.protocols import Grammar
from mainspring.grammar import compiler as compiler_module
from mainspring.grammar import library
from mainspring.grammar.compiler import MAX_USES, Compiler
from mainspring.grammar.library import make_matcher
from mainspring.grammar.words import GrammarError

WAIT_S = 20.0


class Gate:
    """Stands before the library: counts what is made, and holds it until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.fault: BaseException | None = None
        monkeypatch.setattr(library, "make_matcher", self._make)

    def _make(self, tokenizer, structure):
        assert self.is_open.wait(WAIT_S)
        self.made.append(getattr(structure, structure.kind))
        if self.fault is not None:
            raise self.fault
        return make_matcher(tokenizer, structure)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def compiler():
    made = Compiler(VOCABULARY, VOCAB_SIZE)
    yield made
    made.close()


def begin(compiler: Compiler, name: str, **kind) -> Future[Grammar]:
    return compiler.compile(request(name, asked(**kind)))


def test_requests_do_not_share_where_they_stand(compiler, gate):
    """One compilation for all that want the same, waiting or later; each gets a text of its own."""
    gate.is_open.clear()
    first, second = begin(compiler, "a", regex="ab"), begin(compiler, "b", regex="ab")
    assert not first.done()
    gate.is_open.set()
    one, two = first.result(WAIT_S), second.result(WAIT_S)
    assert one.accept(ord("a"))
    assert allowed(two) == {ord("a")}
    third = begin(compiler, "c", regex="ab")
    assert third.done(), "what is remembered is there at once"
    assert allowed(third.result()) == {ord("a")}
    assert gate.made == ["ab"]


def test_ends_are_the_requests_own(compiler):
    """Case B122: the same grammar, for requests that end by different tokens."""
    plain = compiler.compile(request("a", asked(regex="a*"))).result(WAIT_S)
    assert allowed(plain) == {ord("a"), EOS, END}
    endless = compiler.compile(request("b", asked(regex="a*"), eos_token_id=None, stop_token_ids=[]))
    assert allowed(endless.result(WAIT_S)) == {ord("a")}
    other = compiler.compile(request("c", asked(regex="a*"), eos_token_id=None, stop_token_ids=[ord("x")]))
    assert allowed(other.result(WAIT_S)) == {ord("a"), ord("x")}


def test_a_failure_is_told_to_those_who_wait_for_it(compiler, gate):
    gate.is_open.clear()
    wrong, right = begin(compiler, "a", json={"not": {}}), begin(compiler, "b", regex="a")
    gate.is_open.set()
    with pytest.raises(GrammarError, match="not"):
        wrong.result(WAIT_S)
    assert right.result(WAIT_S)


class Panic(BaseException):
    """What a panic of the library looks like: not an `Exception`."""


def test_a_crash_of_the_library_is_a_failure(compiler, gate):
    gate.fault = Panic("index out of bounds")
    with pytest.raises(GrammarError, match="Panic: index out of bounds"):
        begin(compiler, "a", regex="a").result(WAIT_S)
    gate.fault = None
    assert begin(compiler, "b", regex="a").result(WAIT_S), "failures are not remembered, and threads live on"


def test_time_is_limited(gate):
    """Case B121: who waits is answered in time, though the compilation goes on; later it is remembered."""
    compiler = Compiler(VOCABULARY, VOCAB_SIZE, timeout_s=0.05)
    try:
        compiler.prepare().result(WAIT_S)
        gate.is_open.clear()
        slow = begin(compiler, "a", regex="a")
        with pytest.raises(GrammarError, match=r"longer than 0\.05 s"):
            slow.result(WAIT_S)
        gate.is_open.set()
        compiler._threads.submit(lambda: None).result(WAIT_S)
        compiler._threads.shutdown(wait=True)
        assert begin(compiler, "b", regex="a").done()
    finally:
        gate.is_open.set()
        compiler.close()


def test_what_nobody_waits_for_is_not_begun(compiler, gate):
    """Cases B014, B121: requests that are gone leave no work behind."""
    gate.is_open.clear()
    busy = [begin(compiler, f"busy-{i}", regex=f"busy{i}") for i in range(compiler_module.NUM_THREADS)]
    gone = [begin(compiler, f"gone-{i}", regex="gone") for i in range(2)]
    stays = begin(compiler, "stays", regex="stays")
    assert all(future.cancel() for future in gone)
    gate.is_open.set()
    assert stays.result(WAIT_S)
    assert all(future.result(WAIT_S) for future in busy)
    assert "gone" not in gate.made
    assert begin(compiler, "back", regex="gone").result(WAIT_S)


def test_a_grammar_is_made_anew_after_many_uses(compiler, gate):
    """What copies share grows with use."""
    for i in range(MAX_USES + 1):
        begin(compiler, str(i), regex="a").result(WAIT_S)
    assert gate.made == ["a", "a"]


def test_one_that_failed_is_given_out_no_more(compiler, gate):
    grammar = begin(compiler, "a", regex="a").result(WAIT_S)
    grammar._on_failure()
    begin(compiler, "b", regex="a").result(WAIT_S)
    assert gate.made == ["a", "a"]


def test_memory_is_bounded(compiler, monkeypatch):
    texts = [f"{i:04d}" + "x" * 100_000 for i in range(60)]
    for text in texts:
        begin(compiler, text[:4], choice=[text]).result(WAIT_S)
    assert 10 < len(compiler._compiled) < 60


def test_the_end():
    """Idempotent, and without waiting for anybody."""
    compiler = Compiler(VOCABULARY, VOCAB_SIZE)
    assert compiler.prepare().result(WAIT_S)
    compiler.close()
    compiler.close()
    assert threading.active_count() < 20
