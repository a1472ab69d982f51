"""What `generate` and `chat` make of the way an answer ends."""

import pytest

from mainspring.base.errors import EngineError
from mainspring.base.outputs import CompletionOutput, RequestOutput
from mainspring.base.params import SamplingParams
from mainspring.cli.session import answer


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
