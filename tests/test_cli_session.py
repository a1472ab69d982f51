"""What `generate` and `chat` make of an answer: how it is shown, and how it ends."""

import sys

import pytest

from mainspring.base.errors import EngineError
from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.base.params import SamplingParams
from mainspring.cli.session import DIM, UNDIM, Answer, Screen, answer, say_if_odd
from mainspring.frontend.parsing.events import Content, Reasoning
from mainspring.frontend.parsing.formats import reasoning_format
from mainspring.frontend.parsing.parser import AnswerParser


class OneAnswer:
    """An LLM that says one piece and ends for the given reason."""

    def __init__(self, finish_reason: str, error: str | None = None) -> None:
        self._last = CompletionOutput(0, "so far", [1], finish_reason=finish_reason, error=error)

    def generate_stream(self, prompt, params):
        yield RequestOutput("0", prompt, [1], [self._last], finished=True)


def test_an_answer_cut_by_the_end_of_the_core_is_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(EngineError, match="told to end"):
        answer(OneAnswer("abort"), "a", SamplingParams(), show=True)
    assert capsys.readouterr().out == "so far\n"


def test_an_answer_that_failed_says_why():
    with pytest.raises(EngineError, match="no token is allowed"):
        answer(OneAnswer("error", "no token is allowed"), "a", SamplingParams(), show=False)


def test_an_answer_that_ended_is_returned():
    assert answer(OneAnswer("stop"), "a", SamplingParams(), show=False).text == "so far"


class Thinker:
    """An LLM that thinks, a few characters at a time."""

    def __init__(self, text: str, finish_reason: str = "stop") -> None:
        self._text, self._reason = text, finish_reason

    def generate_stream(self, prompt, params):
        for at in range(0, len(self._text), 3):
            piece = self._text[at : at + 3]
            is_last = at + 3 >= len(self._text)
            made = CompletionOutput(0, piece, [at], finish_reason=self._reason if is_last else None)
            yield RequestOutput("0", prompt, [1], [made], finished=is_last)


def thought(text: str, finish_reason: str = "stop") -> Answer:
    parser = AnswerParser(None, reasoning_format("qwen3"))
    return answer(Thinker(text, finish_reason), "a", SamplingParams(), show=True, parser=parser)


TEXT = "<think>\nHm, so.\n</think>\n\nYes."


def test_reasoning_is_dimmed_on_a_terminal(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    result = thought(TEXT)
    shown = capsys.readouterr().out
    assert shown.replace(UNDIM + DIM, "") == f"{DIM}Hm, so.{UNDIM}\n\nYes.\n"
    assert (result.text, result.reasoning) == ("Yes.", "Hm, so.")


def test_reasoning_is_left_out_where_a_program_reads(capsys: pytest.CaptureFixture[str]):
    result = thought(TEXT)
    assert capsys.readouterr().out == "Yes.\n"
    assert result.as_json()["reasoning"] == "Hm, so."
    assert "reasoning" not in thought("Yes.").as_json()


def test_reasoning_that_was_cut_is_said(capsys: pytest.CaptureFixture[str]):
    say_if_odd(thought("<think>\nHm, so", "length"), unasked_limit=None)
    assert capsys.readouterr() == (
        "",
        "(empty answer: cut before its reasoning ended; raise --max-tokens)\n",
    )


@pytest.mark.parametrize(("text", "when"), [("\n", "at once"), ("<think>Hm.</think>", "after its reasoning")])
def test_advice_is_what_the_command_has(text: str, when: str, capsys: pytest.CaptureFixture[str]):
    """`chat` has no --chat."""
    say_if_odd(thought(text, "stop"), unasked_limit=None)
    say_if_odd(thought(text, "stop"), None, "an instruct model may want --chat")
    assert capsys.readouterr().err == (
        f"(empty answer: the model ended {when}; try another prompt)\n"
        f"(empty answer: the model ended {when}; an instruct model may want --chat)\n"
    )


def test_a_terminal_is_never_left_dim(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def stopped() -> None:
        with Screen(shows=True) as screen:
            screen.say([Reasoning("Hm")])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert capsys.readouterr().out == f"{DIM}Hm{UNDIM}\n"
    with Screen(shows=True) as screen:
        screen.say([Content("Yes.\n")])
    assert capsys.readouterr().out == "Yes.\n"
