"""`mainspring chat`: a conversation in the terminal. Ctrl-C stops the answer and not the program.

The whole conversation is sent each turn; the engine's prefix cache makes that cheap. When it no longer fits
the model's length, the oldest turns are left out, and that is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from mainspring.base.errors import EngineDeadError, EngineError, RequestError
from mainspring.base.params import SamplingParams
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags, add_engine_flags
from mainspring.cli.sampling import add_sampling_flags, sampling_params, unasked_limit
from mainspring.cli.session import (
    ENGINE_WORDS,
    Answer,
    answer,
    not_utf8,
    open_model,
    say,
    say_if_odd,
    standard_input,
)

if TYPE_CHECKING:
    from mainspring.frontend.llm import LLM

EXAMPLES = (
    "",
    '--system "Answer in one sentence." --temperature 0',
    '--prompt "What is the capital of Germany?" --json',
)
HELP = """/clear  forget the conversation (the system message stays)
/help   this
/exit   leave; so does Ctrl-D. Ctrl-C stops an answer"""


class Conversation:
    """Messages so far, and how the next answer is made of them."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, unasked_limit: int | None
    ) -> None:
        self._llm = llm
        self._params = params
        self._unasked_limit = unasked_limit
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[tuple[str, str]] = []  # (question, answer)

    def clear(self) -> None:
        self._turns.clear()

    def ask(self, question: str, *, show: bool) -> Answer:
        """One turn, which joins the conversation when it is complete; an interrupted one is forgotten."""
        prompt = self._fitting_prompt(question)
        result = answer(self._llm, prompt, self._params, show=show)
        say_if_odd(result, self._unasked_limit)
        self._turns.append((question, result.text))
        return result

    def _fitting_prompt(self, question: str) -> Any:
        """The prompt of the next turn, without as many of the oldest turns as the model's length demands.

        Room is kept for `max_tokens` of answer, or for half of the length where that is less.
        """
        longest = self._llm.max_model_len
        room = longest - min(self._params.max_tokens or longest, longest // 2)
        left_out = 0
        prompt = self._prompt(question)
        while len(prompt["prompt_token_ids"]) > room and self._turns:
            del self._turns[0]
            left_out += 1
            prompt = self._prompt(question)
        if left_out:
            turns = "turn" if left_out == 1 else f"{left_out} turns"
            say(f"the oldest {turns} left out: the model reads {longest} tokens at most")
        return prompt

    def _prompt(self, question: str) -> Any:
        messages = list(self._system)
        for asked, answered in self._turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return self._llm.chat_prompt([*messages, {"role": "user", "content": question}])


def run(argv: list[str]) -> int:
    given = _parser(argv).read(argv)
    params = sampling_params(given)
    system = getattr(given, "system", None)
    questions = None if hasattr(given, "prompt") else standard_input()  # before the model is opened
    conversation = Conversation(open_model(given), params, system, unasked_limit(given))
    if questions is None:
        _turn(conversation, given.prompt, given)
    elif given.json or not questions.isatty():
        _read(conversation, questions, given)
    else:
        _talk(conversation, given)
    return 0


def _read(conversation: Conversation, questions: TextIO, given: argparse.Namespace) -> None:
    """A program's side: one question a line."""
    lines = iter(questions)
    while True:
        try:
            line = next(lines, None)
        except UnicodeDecodeError as error:
            raise not_utf8(error) from None
        if line is None:
            return
        if line.strip():
            _turn(conversation, line.rstrip("\n"), given)


def _parser(argv: list[str]) -> Parser:
    parser = Parser("chat", "Talk with a model. It is fetched on first use.", EXAMPLES, argv)
    group = parser.add_argument_group("the conversation")
    group.add_argument("--prompt", metavar="TEXT", help="ask this one question and leave")
    group.add_argument("--system", metavar="TEXT", help="the system message: how to answer")
    add_sampling_flags(parser)
    add_engine_flags(parser, words=ENGINE_WORDS)
    add_common_flags(parser)
    return parser


def _turn(conversation: Conversation, question: str, given: argparse.Namespace) -> None:
    result = conversation.ask(question, show=not given.json)
    if given.json:
        print(json.dumps(result.as_json()), flush=True)


def _talk(conversation: Conversation, given: argparse.Namespace) -> None:
    import readline  # noqa: F401  arrow keys and history in `input`

    say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            say("Ctrl-D or /exit leaves")
            continue
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                print(HELP)
            case "/clear":
                conversation.clear()
                say("a new conversation")
            case _ if line.startswith("/"):
                say(f"there is no command {line.split()[0]}; /help lists them")
            case _:
                _try_turn(conversation, line, given)


def _try_turn(conversation: Conversation, question: str, given: argparse.Namespace) -> None:
    """A turn whose failure or interruption leaves the conversation as it was."""
    try:
        _turn(conversation, question, given)
    except KeyboardInterrupt:
        say("stopped; this turn is not part of the conversation")
    except EngineDeadError:
        raise
    except (RequestError, EngineError) as error:
        print(f"mainspring: {error}", file=sys.stderr)
