"""What `generate` and `chat` share: opening a model, showing an answer while it is written, reporting it."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from mainspring.base.errors import EngineError, RequestError
from mainspring.base.log import set_up_logging
from mainspring.base.params import SamplingParams
from mainspring.cli.flags import engine_arguments, log_level

if TYPE_CHECKING:
    from mainspring.base.outputs import CompletionOutput
    from mainspring.frontend.llm import LLM

# The engine draws the seeds of requests from its own, so one flag makes a whole conversation repeatable.
ENGINE_WORDS = {"seed": "same seed, same text; default: another each time"}


class Answer(msgspec.Struct):
    """A finished text and what it took."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str | None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
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


def answer_in_pieces(llm: LLM, prompt: Any, params: SamplingParams) -> Generator[str | Answer, None, None]:
    """The text as it comes, and last the whole `Answer`. Closing the iterator aborts the request."""
    pieces: list[CompletionOutput] = []
    with closing(llm.generate_stream(prompt, params)) as stream:
        for output in stream:
            piece = output.outputs[0]
            pieces.append(piece)
            prompt_token_ids = output.prompt_token_ids
            if piece.text:
                yield piece.text
    last = pieces[-1]
    yield Answer(
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        prompt_token_ids=prompt_token_ids,
        finish_reason=last.finish_reason,
        error=last.error,
    )


def answer(llm: LLM, prompt: Any, params: SamplingParams, *, show: bool) -> Answer:
    """The answer; `show` prints it while it is written. Raises `EngineError` where it failed."""
    result = None
    try:
        with closing(answer_in_pieces(llm, prompt, params)) as pieces:
            for piece in pieces:
                if isinstance(piece, Answer):
                    result = piece
                elif show:
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if show:
            print()  # whatever comes next starts a line of its own
        raise
    assert result is not None
    if show and result.text and not result.text.endswith("\n"):
        print()
    if result.error:
        raise EngineError(result.error)
    if result.finish_reason == "abort":  # not asked for here: Ctrl-C is a KeyboardInterrupt
        raise EngineError("the engine core was told to end in the middle of this answer")
    return result


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


def say_if_odd(answer: Answer, unasked_limit: int | None) -> None:
    """Words for what an answer cannot say itself: that it is empty, or was cut where nobody asked for it."""
    if not answer.text.strip():
        count = len(answer.token_ids)
        tokens = "1 token, which does not show" if count == 1 else f"{count} tokens, none of which shows"
        why = {
            "stop": "the model ended at once; an instruct model may want --chat, or try another prompt",
            "length": f"{tokens} as text; raise --max-tokens",
        }.get(answer.finish_reason or "", f"it ended with {answer.finish_reason}")
        say(f"empty answer: {why}")
    elif answer.finish_reason == "length" and len(answer.token_ids) == unasked_limit:
        say(f"cut after {unasked_limit} tokens; --max-tokens sets the limit")
