"""How a model writes its answers, found in its template; tools, judged; reasoning, begun and counted."""

from __future__ import annotations

import pytest

from mainspring.base.errors import ConfigError, RequestError
from mainspring.frontend.manner import manner_of, needs_special_tokens
from mainspring.frontend.parsing.formats import HERMES, LLAMA3_JSON, MISTRAL, REASONING_FORMATS
from mainspring.frontend.reasoning import ReasoningCounter, opening
from mainspring.frontend.tools import judged_tools

THINK = REASONING_FORMATS["qwen3"]
F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("template", "calls", "thinks"),
    [
        ("{{ messages }}", None, False),
        ("<tool_call>\n{{ call | tojson }}\n</tool_call>", HERMES, False),
        ("<think>\n{{ reasoning_content }}\n</think>\n\n<tool_call>", HERMES, True),
        ("<tool_call>\n<function={{ name }}>", None, False),  # the same tag around another form
        ("<tool_call>{{ name }}\n<arg_key>", None, False),
        ("[TOOL_CALLS]{{ calls | tojson }}", MISTRAL, False),
        ('Environment: ipython{"name": "{{ name }}", "parameters": ', LLAMA3_JSON, False),
        ("{{ content.split('</think>')[-1] }}", None, True),
    ],
)
def test_what_a_template_shows(template, calls, thinks):
    manner = manner_of(template)
    assert manner.tool_format is calls
    assert (manner.reasoning_format is not None) is thinks


def test_names_go_before_templates():
    manner = manner_of("<tool_call></think>", "mistral", "none")
    assert manner == (MISTRAL, None)
    assert manner_of("", "qwen", "deepseek_r1") == (HERMES, REASONING_FORMATS["deepseek_r1"])
    assert manner_of("<tool_call>", "none").tool_format is None
    with pytest.raises(ConfigError, match="tool_call_parser 'x' is not known; there are hermes, "):
        manner_of("", "x")
    with pytest.raises(ConfigError, match="reasoning_parser 'x' is not known; there are deepseek_r1, "):
        manner_of("", "auto", "x")


def test_tags_that_texts_leave_out():
    assert needs_special_tokens(manner_of("[TOOL_CALLS]"), {"[TOOL_CALLS]"})
    assert needs_special_tokens(manner_of("</think>"), {"</think>", ""})
    assert not needs_special_tokens(manner_of("<tool_call></think>"), {"<s>", ""})


def test_tools_and_choices():
    nothing = ((), "none", None, True)
    assert judged_tools(None) == judged_tools([]) == judged_tools(None, "auto") == nothing
    assert judged_tools([F])[1:] == ("auto", None, True)
    use = judged_tools([F], {"type": "function", "function": {"name": "f"}}, False)
    assert (use.choice, use.name, use.parallel, use.is_forced) == ("named", "f", False, True)
    assert use.tool_choice == {"type": "function", "function": {"name": "f"}}
    for tools, choice, param in (
        ({}, None, "tools"),
        ("f", None, "tools"),
        ([F] * 2000, None, "tools"),
        ([F, F], None, "tools"),
        ([None], None, "tools"),
        (None, "required", "tool_choice"),
        ([F], "f", "tool_choice"),
        ([F], {"type": "function", "function": {"name": "g"}}, "tool_choice"),
        ([F], {"type": "function", "function": {}}, "tool_choice"),
    ):
        with pytest.raises(RequestError) as caught:
            judged_tools(tools, choice)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "begun", "expected"),
    [
        ("assistant\n", None, (THINK, False)),
        ("assistant\n<think>\n", None, (THINK, True)),
        ("assistant\n<think>\n\n</think>\n\n", None, (None, False)),
        ("user: <think>\nassistant\n", None, (THINK, False)),
        ("assistant\nWell", "Well", (None, False)),
        ("assistant\n<think>Well", "<think>Well", (THINK, True)),
        ("assistant\n<think>a</think>b", "<think>a</think>b", (None, False)),
    ],
)
def test_how_an_answer_may_begin(prompt, begun, expected):
    assert opening(THINK, prompt, begun) == expected
    assert opening(None, prompt, begun) == (None, False)


@pytest.mark.parametrize(
    ("text", "is_open", "count"),
    [
        ("<think>ab</think>cd", False, 17),
        (" \n<think>ab</think>cd", False, 19),
        ("<think>ab", False, 9),
        ("<thin", False, 0),
        ("ab<think>ab</think>", False, 0),
        ("ab</think>cd</think>", True, 10),
        ("ab</think", True, 9),
        ("", True, 0),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_tokens_of_reasoning(text, is_open, count, step):
    """Bytes are tokens; however many come at a time."""
    counter = ReasoningCounter(THINK, lambda token: bytes([token]), is_open=is_open)
    tokens = text.encode()
    for first in range(0, len(tokens), step):
        counter.add(tokens[first : first + step])
    assert counter.num_tokens == count


def test_tokens_that_hold_more_than_a_tag():
    pieces = [b"\n<thi", b"nk>a", b"b</th", b"ink>c", b"d"]
    counter = ReasoningCounter(THINK, pieces.__getitem__, is_open=False)
    counter.add(range(5))
    assert counter.num_tokens == 4
