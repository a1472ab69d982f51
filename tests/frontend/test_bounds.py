"""Bounds inside of an answer, as a grammar takes them: after reasoning, beside calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "grammar"))

from structured_toys import EOS, VOCAB_SIZE, VOCABULARY, allowed, asked, feed, matcher, request

from mainspring.base.errors import RequestError
from mainspring.base.protocols import Grammar
from mainspring.frontend.bounds import after_reasoning, calls_or
from mainspring.frontend.parsing.formats import HERMES, PYTHONIC, REASONING_FORMATS
from mainspring.frontend.tools import judged_tools
from mainspring.grammar.compiler import Compiler

THINK = REASONING_FORMATS["qwen3"]
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KINDS = [
    ({"json": INTEGER}, '{"a": 1}'),
    ({"json_object": True}, "{}"),
    ({"regex": r"a/b|[}{]+\n|^x$"}, "}{\n"),
    ({"choice": ["yes", "no }"]}, "no }"),
    ({"grammar": 'root ::= "x" y\ny ::= "{"'}, "x{"),
    ({"grammar": 'start: A B\nA: "{"\nB: /[}]/'}, "{}"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "q"}}}, "q"),
]


def takes(bound, text: str) -> bool:
    """The whole of it, and it may end there."""
    grammar = matcher(structural_tag=bound.structural_tag)
    return feed(grammar, text) and (grammar.is_finished() or EOS in allowed(grammar))


@pytest.mark.parametrize(("kind", "good"), KINDS, ids=[next(iter(kind)) for kind, _ in KINDS])
def test_reasoning_is_free_and_what_follows_is_bound(kind, good):
    may = after_reasoning(asked(**kind), THINK, is_open=False)
    for text in (good, f"<think></think>{good}", f"<think>\n{{<thin</th 北\n</think>\n\n{good}"):
        assert takes(may, text)
    must = after_reasoning(asked(**kind), THINK, is_open=True)
    for text in (f"</think>{good}", f"\n{{</th 北\n</think>\n\n{good}"):
        assert takes(must, text)
    for bound, texts in (
        (may, ["?", "<think>a", "<think>a</think>", "<think>a</think>?", f"<think>a</think>{good}?"]),
        (must, [good, "a</think>", "a</think>?", f"a</think>{good}?", f"a</think></think>{good}"]),
    ):
        for text in texts:
            assert not takes(bound, text), text


def test_how_json_is_written_is_kept():
    wanted = asked(json={"type": "array"}, disable_any_whitespace=True, lenient=True)
    bound = after_reasoning(wanted, THINK, is_open=True)
    assert (bound.disable_any_whitespace, bound.lenient) == (True, True)
    grammar = matcher(structural_tag=bound.structural_tag, disable_any_whitespace=True)
    assert feed(grammar, "a</think>[1,")
    assert not feed(grammar, " ")


def limited(bound) -> Grammar:
    """As the core gets it; tokens are bytes and a few pieces."""
    compiler = Compiler(VOCABULARY, VOCAB_SIZE)
    try:
        return compiler.compile(request("r", bound)).result(10)
    finally:
        compiler.close()


def says(grammar: Grammar, text: str) -> bool:
    """Whether every byte may follow, by the masks and by the grammar."""
    return all(byte in allowed(grammar) and grammar.accept(byte) for byte in text.encode())


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_reasoning(budget):
    """In tokens: then the end tag comes, and what is bound after it is."""
    for is_open, begin in ((True, ""), (False, "<think>")):
        bound = after_reasoning(asked(choice=["yes"]), THINK, is_open=is_open, max_tokens=budget)
        for thought in ("a" * budget, "北"[: budget // 3] + "b" * (budget - 3 * (budget // 3))):
            assert says(limited(bound), f"{begin}{thought}</think>\n\nyes")
            grammar = limited(bound)
            assert says(grammar, begin + thought)
            assert allowed(grammar) == {ord("<")}
            assert says(grammar, "</thi")
            assert allowed(grammar) == {ord("n")}
            grammar.rollback(len("</thi") + min(budget, 1))
            assert allowed(grammar) == ({ord("<")} if not budget else allowed(grammar) | {ord("z")})
        assert says(limited(bound), f"{begin}</think>yes")
    assert says(limited(bound), "yes")  # without reasoning


def test_what_has_been_said_of_the_end_tag_counts():
    bound = after_reasoning(None, THINK, is_open=True, max_tokens=3)
    grammar = limited(bound)
    assert says(grammar, "a</")
    assert allowed(grammar) == {ord("t")}
    assert says(grammar, "think>anything </think> 北")


def test_text_after_reasoning_is_free_and_not_limited():
    bound = after_reasoning(None, THINK, is_open=True, max_tokens=3)
    assert says(limited(bound), "ab</think>" + "free " * 10)


def test_nothing_is_bound_where_nothing_is_asked():
    assert after_reasoning(None, THINK, is_open=True) is None


def test_calls_or_an_answer():
    tools = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": INTEGER}},
        {"type": "function", "function": {"name": "g", "parameters": INTEGER}},
    ]

    def call(name, arguments):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    bound = calls_or(judged_tools(tools), HERMES, asked(json=INTEGER))
    for text in ('{"a": 1}', call("f", '{"a": 1}'), call("g", "{}") + "\n" + call("f", '{"a": 2}')):
        assert takes(bound, text)
    for text in ("", "{}", call("f", "{}"), call("f", '{"a": 1, "b": 2}'), call("h", "{}"), call("g", "[]")):
        assert not takes(bound, text), text
    single = calls_or(judged_tools(tools, None, False), HERMES, asked(json=INTEGER))
    assert takes(single, call("g", "{}"))
    assert not takes(single, call("g", "{}") + "\n" + call("g", "{}"))
    with pytest.raises(RequestError, match="pythonic") as caught:
        calls_or(judged_tools(tools), PYTHONIC, asked(json=INTEGER))
    assert caught.value.param == "tool_choice"
