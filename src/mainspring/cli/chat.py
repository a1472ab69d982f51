"""`mainspring chat`: a conversation in the terminal, with a model that is opened here or that a server has
(`--url`). Ctrl-C stops the answer and not the program.

The whole conversation is sent each turn; the engine's prefix cache makes that cheap. When it no longer fits
the length of a model that is opened here, the oldest turns are left out, and that is said; a server refuses
it in its own words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from mainspring.base.errors import ConfigError, EngineDeadError, EngineError, RequestError
from mainspring.base.params import SamplingParams
from mainspring.cli.dialect import Parser
from mainspring.cli.flags import add_common_flags, add_engine_flags, engine_arguments
from mainspring.cli.remote import add_key_flag, chunks, connected, first_model
from mainspring.cli.sampling import DEFAULTS, add_sampling_flags, sampling_params, unasked_limit
from mainspring.cli.sampling import HELP as SAMPLING
from mainspring.cli.session import (
    ENGINE_WORDS,
    Answer,
    Screen,
    answer,
    check_end,
    not_utf8,
    open_model,
    say,
    say_if_odd,
    standard_input,
)
from mainspring.frontend.parsing.events import Content, Event, Reasoning

if TYPE_CHECKING:
    from mainspring.frontend.llm import LLM
    from mainspring.frontend.parsing.parser import AnswerParser

EXAMPLES = (
    "",
    '--system "Answer in one sentence." --temperature 0',
    '--prompt "What is the capital of Germany?" --json',
    "--url http://127.0.0.1:8000",
)
HELP = """/clear  forget the conversation (the system message stays)
/help   this
/exit   leave; so does Ctrl-D. Ctrl-C stops an answer"""


OF_A_SERVER = {"model", "seed"}  # settings of the engine that say something to a server too


class Conversation(ABC):
    """Messages so far, and how the next answer is made of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._unasked_limit = unasked_limit(given)
        system = getattr(given, "system", None)
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[tuple[str, str]] = []  # (question, answer)

    def clear(self) -> None:
        self._turns.clear()

    def ask(self, question: str, *, show: bool) -> Answer:
        """One turn, which joins the conversation when it is complete; an interrupted one is forgotten."""
        result = self._answer(question, show=show)
        say_if_odd(result, self._unasked_limit)
        self._turns.append((question, result.text))
        return result

    @abstractmethod
    def _answer(self, question: str, *, show: bool) -> Answer: ...

    def _messages(self, question: str) -> list[dict[str, str]]:
        messages = list(self._system)
        for asked, answered in self._turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]


class LocalConversation(Conversation):
    def __init__(self, llm: LLM, params: SamplingParams, given: argparse.Namespace) -> None:
        super().__init__(given)
        self._llm = llm
        self._params = params
        self._shows_specials = getattr(given, "skip_special_tokens", None)

    def _answer(self, question: str, *, show: bool) -> Answer:
        prompt = self._fitting_prompt(question)
        parser, params = self._reading(prompt)
        return answer(self._llm, prompt, params, show=show, parser=parser)

    def _reading(self, prompt: Any) -> tuple[AnswerParser | None, SamplingParams]:
        """What tells reasoning from text, and parameters that let it: its tags may be special tokens."""
        begins = self._llm.chat_opening(prompt)
        if begins.form is None:
            return None, self._params
        from mainspring.frontend.detokenizer import special_texts
        from mainspring.frontend.manner import Manner, needs_special_tokens
        from mainspring.frontend.parsing.parser import AnswerParser

        params = self._params
        specials = special_texts(self._llm.get_tokenizer())
        if self._shows_specials is None and needs_special_tokens(Manner(None, begins.form), specials):
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return AnswerParser(None, begins.form, begins_in_reasoning=begins.is_open), params

    def _fitting_prompt(self, question: str) -> Any:
        """The prompt of the next turn, without as many of the oldest turns as the model's length demands.

        Room is kept for `max_tokens` of answer, or for half of the length where that is less.
        """
        longest = self._llm.max_model_len
        room = longest - min(self._params.max_tokens or longest, longest // 2)
        left_out = 0
        prompt = self._llm.chat_prompt(self._messages(question))
        while len(prompt["prompt_token_ids"]) > room and self._turns:
            del self._turns[0]
            left_out += 1
            prompt = self._llm.chat_prompt(self._messages(question))
        if left_out:
            turns = "turn" if left_out == 1 else f"{left_out} turns"
            say(f"the oldest {turns} left out: the model reads {longest} tokens at most")
        return prompt


class RemoteConversation(Conversation):
    """With a server. A connection for each turn: closing it is how an answer is stopped."""

    def __init__(self, given: argparse.Namespace) -> None:
        """Raises `EngineError` for a server that cannot be reached."""
        super().__init__(given)
        settings = engine_arguments(given)
        if others := sorted(settings.keys() - OF_A_SERVER):
            flag = others[0].replace("_", "-")
            raise ConfigError(f"--{flag} is for an engine that is opened here; leave it out, or --url")
        self._given = given
        self._body: dict[str, Any] = {
            "max_tokens": DEFAULTS["max_tokens"],
            **{name: getattr(given, name) for name in SAMPLING if hasattr(given, name)},
            **settings,
            "stream_options": {"include_usage": True},
        }
        if "model" not in settings:
            self._body["model"] = asyncio.run(self._first_model())

    async def _first_model(self) -> str:
        async with connected(self._given.url, self._given) as client:
            return await first_model(client, "--model")

    def _answer(self, question: str, *, show: bool) -> Answer:
        return asyncio.run(self._ask(question, show=show))

    async def _ask(self, question: str, *, show: bool) -> Answer:
        body = {**self._body, "messages": self._messages(question)}
        finish_reason = usage = None
        with Screen(shows=show) as screen:
            async with connected(self._given.url, self._given) as client:
                async for chunk in chunks(client, "/chat/completions", body):
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or []:
                        screen.say(_said(choice.get("delta") or {}))
                        finish_reason = choice.get("finish_reason") or finish_reason
        if finish_reason is None:
            raise EngineError(f"{self._given.url}: the answer ended without a finish_reason")
        check_end(finish_reason)
        return Answer(screen.text, None, None, finish_reason, screen.reasoning, usage)


def _said(delta: dict[str, Any]) -> list[Event]:
    """Of a chunk; reasoning has two names."""
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    found: list[Event] = [Reasoning(reasoning)] if reasoning else []
    return found + ([Content(delta["content"])] if delta.get("content") else [])


def run(argv: list[str]) -> int:
    given = _parser(argv).read(argv)
    params = sampling_params(given)
    questions = None if hasattr(given, "prompt") else standard_input()  # before the model is opened
    conversation: Conversation
    if hasattr(given, "url"):
        conversation = RemoteConversation(given)
    else:
        conversation = LocalConversation(open_model(given), params, given)
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
    words = "Talk with a model. It is fetched on first use, or a server has it."
    parser = Parser("chat", words, EXAMPLES, argv)
    group = parser.add_argument_group("the conversation")
    group.add_argument("--prompt", metavar="TEXT", help="ask this one question and leave")
    group.add_argument("--system", metavar="TEXT", help="the system message: how to answer")
    group = parser.add_argument_group("a server")
    group.add_argument(
        "--url", metavar="URL", help="talk with a model of this server; --model is its name there"
    )
    add_key_flag(group)
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
