"""What `generate` and `chat` share: opening a model, showing an answer while it is written, reporting it.

What a model thinks before it answers is shown dimmed on a terminal. It is no part of the text: who reads
standard output otherwise gets the answer alone, and with `--json` both.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterable
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from mainspring.base.errors import EngineError, RequestError
from mainspring.base.log import set_up_logging
from mainspring.base.params import SamplingParams
from mainspring.cli.flags import engine_arguments, log_level
from mainspring.frontend.parsing.events import Content, Event, Reasoning

if TYPE_CHECKING:
    from mainspring.base.outputs import CompletionOutput
    from mainspring.frontend.llm import LLM
    from mainspring.frontend.parsing.parser import AnswerParser

# The engine draws the seeds of requests from its own, so one flag makes a whole conversation repeatable.
ENGINE_WORDS = {"seed": "same seed, same text; default: another each time"}
DIM, UNDIM = "\x1b[2m", "\x1b[0m"


class Answer(msgspec.Struct):
    """A finished text and what it took."""

    text: str
    token_ids: list[int] | None  # None: a server has them
    prompt_token_ids: list[int] | None
    finish_reason: str | None
    reasoning: str = ""
    usage: dict[str, Any] | None = None  # as a server counted

    @property
    def num_tokens(self) -> int | None:
        """None where nobody said."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return None if self.usage is None else self.usage.get("completion_tokens")

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"text": self.text}
        if self.reasoning:
            found["reasoning"] = self.reasoning
        if self.token_ids is None or self.prompt_token_ids is None:
            return found | {"finish_reason": self.finish_reason, "usage": self.usage}
        return found | {
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": len(self.prompt_token_ids),
                "completion_tokens": len(self.token_ids),
                "total_tokens": len(self.prompt_token_ids) + len(self.token_ids),
            },
        }


def open_model(given: argparse.Namespace) -> LLM:
    """The engine for the flags that were given; fetches the model if it has a name and is not here yet."""
    set_up_logging(log_level(given))
    from mainspring.frontend.llm import LLM

    return LLM(**({"seed": secrets.randbits(63)} | engine_arguments(given)))


class Screen:
    """Prints an answer while it is written, if it `shows`; keeps what was said."""

    def __init__(self, *, shows: bool) -> None:
        self._shows = shows
        self._dims = shows and sys.stdout.isatty()
        self._texts: dict[type[Event], list[str]] = {Reasoning: [], Content: []}
        self._last = ""  # of what was printed

    @property
    def text(self) -> str:
        return "".join(self._texts[Content])

    @property
    def reasoning(self) -> str:
        return "".join(self._texts[Reasoning])

    def say(self, events: Iterable[Event]) -> None:
        for event in events:
            if not isinstance(event, Reasoning | Content):
                raise TypeError(f"an answer without tools says {event}")
            self._texts[type(event)].append(event.text)
            if isinstance(event, Content):
                if self._dims and self._texts[Reasoning] and len(self._texts[Content]) == 1:
                    print("\n")
                self._print(event.text)
            elif self._dims:
                self._print(event.text, DIM, UNDIM)

    def _print(self, text: str, before: str = "", after: str = "") -> None:
        if self._shows:
            print(before + text + after, end="", flush=True)
            self._last = text

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Whatever comes next starts a line of its own."""
        was_stopped = kind is not None and not issubclass(kind, Exception)  # by Ctrl-C
        if self._shows and (was_stopped or (self._last and not self._last.endswith("\n"))):
            print()


def answer(
    llm: LLM, prompt: Any, params: SamplingParams, *, show: bool, parser: AnswerParser | None = None
) -> Answer:
    """The answer; `show` prints it while it is written. `parser` tells its reasoning from its text. Closing
    aborts the request. Raises `EngineError` where it failed."""
    pieces: list[CompletionOutput] = []
    with Screen(shows=show) as screen, closing(llm.generate_stream(prompt, params)) as stream:
        for output in stream:
            piece = output.outputs[0]
            pieces.append(piece)
            screen.say(_events(piece, parser))
    last = pieces[-1]
    check_end(last.finish_reason, last.error)
    return Answer(
        text=screen.text,
        token_ids=[token for piece in pieces for token in piece.token_ids],
        prompt_token_ids=output.prompt_token_ids,
        finish_reason=last.finish_reason,
        reasoning=screen.reasoning,
    )


def _events(piece: CompletionOutput, parser: AnswerParser | None) -> list[Event]:
    if parser is None:
        return [Content(piece.text)] if piece.text else []
    return parser.feed(piece.text) + ([] if piece.finish_reason is None else parser.finish())


def check_end(finish_reason: str | None, error: str | None = None) -> None:
    """Raises `EngineError` for an answer that did not end by itself or by its limits."""
    if error:
        raise EngineError(error)
    if finish_reason == "abort":  # not asked for here: Ctrl-C is a KeyboardInterrupt
        raise EngineError("the engine core was told to end in the middle of this answer")


def standard_input() -> TextIO:
    """Raises `RequestError` where whoever started the program has closed it."""
    if sys.stdin is None:
        raise RequestError("standard input is closed; open it, or give --prompt TEXT")
    return sys.stdin


def not_utf8(error: UnicodeDecodeError) -> RequestError:
    return RequestError(
        f"standard input is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
    )


def say(words: str) -> None:
    """For the person at the terminal, out of the way of what a program may read."""
    print(f"({words})", file=sys.stderr, flush=True)


def say_if_odd(answer: Answer, unasked_limit: int | None, advice: str = "try another prompt") -> None:
    """Words for what an answer cannot say itself: that it is empty, or was cut where nobody asked for it.
    `advice` is for who gets none at all."""
    count = answer.num_tokens
    if not answer.text.strip():
        tokens = "1 token, which does not show" if count == 1 else f"{count} tokens, none of which shows"
        has_reasoned = bool(answer.reasoning.strip())
        when = "after its reasoning" if has_reasoned else "at once"
        where = "cut before its reasoning ended" if has_reasoned else f"{tokens} as text"
        why = {
            "stop": f"the model ended {when}; {advice}",
            "length": f"{where}; raise --max-tokens",
        }.get(answer.finish_reason or "", f"it ended with {answer.finish_reason}")
        say(f"empty answer: {why}")
    elif answer.finish_reason == "length" and count == unasked_limit is not None:
        say(f"cut after {unasked_limit} tokens; --max-tokens sets the limit")
