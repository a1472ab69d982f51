"""A chat as the engine is asked it, and how its answers are to be read: the same for every API that chats.

    talk = await converse(service, llm, body)     # a request, judged and rendered
    reader = talk.reading.reader()                # one for each answer
    events = reader.read(output)                  # for each output of it, or the finished one

Rules.
1. What binds an answer (a forced call, a structured output) binds what comes after the reasoning.
2. A call that is forced is made of the tool's own schema, strict or not. A model whose template shows no
   tools is not told of them in another way, as in vLLM: the grammar alone makes it call.
3. An answer's reason to end: length, if it was cut, whatever it says; `tool_calls`, if it has called of its
   own accord or had to call some tool; `stop` otherwise, also where it had to call a certain tool (case
   B137), and where a stop string has cut a call: nobody may take that for one that was made.
4. White space beside a call is part of it. Where an answer has one text, whatever stands between its parts
   (`read_as_one`), a line ends there instead.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container
from typing import NamedTuple

import msgspec

from mainspring.base.outputs import CompletionOutput
from mainspring.base.params import SamplingParams, StructuredOutputsParams
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.frontend.bounds import after_reasoning, calls_or
from mainspring.frontend.manner import Manner, needs_special_tokens
from mainspring.frontend.parsing.constraints import Demand, demanded
from mainspring.frontend.parsing.events import CallArguments, CallBegins, CallEnds, Content, Event
from mainspring.frontend.parsing.formats import MISTRAL, ReasoningFormat, ToolFormat
from mainspring.frontend.parsing.parser import AnswerParser, pieces_of
from mainspring.frontend.reasoning import ReasoningCounter, opening
from mainspring.frontend.tools import ToolUse, judged_tools
from mainspring.server.errors import ApiError
from mainspring.server.prompts import Chats, TokenPrompt, chat_prompt, is_long, off_loop_if, truncated
from mainspring.server.refused import refuse_unsupported
from mainspring.server.requests import ChatRequest
from mainspring.server.sampling import chat_params
from mainspring.server.service import Service

MISTRAL_ID = 9  # characters: its template refuses others


class Reading(NamedTuple):
    """How each answer of a chat is read."""

    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    is_reasoning: bool  # the prompt has begun it
    use: ToolUse
    token_bytes: Callable[[int], bytes]
    short_ids: bool = False

    def reader(self) -> AnswerReader:
        """For one answer."""
        return AnswerReader(self)

    def call_id(self) -> str:
        """A new one, as a chat names a call."""
        if self.short_ids:
            return secrets.token_hex(MISTRAL_ID)[:MISTRAL_ID]
        return f"chatcmpl-tool-{secrets.token_hex(8)}"


class AnswerReader:
    """One answer: what it says, how many of its tokens are reasoning, why it ended."""

    def __init__(self, reading: Reading) -> None:
        self._use = reading.use
        self._has_cut_call = False  # by a stop string
        self._has_text = False
        self._is_behind_text = False  # and a call
        self._parser = None  # where all is content
        if reading.tool_format is not None or reading.reasoning_format is not None:
            self._parser = AnswerParser(
                reading.tool_format, reading.reasoning_format, begins_in_reasoning=reading.is_reasoning
            )
        self._counter = None
        if reading.reasoning_format is not None:
            self._counter = ReasoningCounter(
                reading.reasoning_format, reading.token_bytes, is_open=reading.is_reasoning
            )

    def read(self, answer: CompletionOutput) -> list[Event]:
        """What is new: `answer` is a delta, or the whole."""
        if self._parser is None:
            return [Content(answer.text)] if answer.text else []
        events = [event for piece in pieces_of(answer.text) for event in self._parser.feed(piece)]
        if answer.finish_reason is not None:
            self._has_cut_call = self._parser.in_call and isinstance(answer.stop_reason, str)
            events += self._parser.finish()
        if self._counter is not None:
            self._counter.add(answer.token_ids)
        if not self._use.parallel:
            events = [event for event in events if not _is_further_call(event)]
        if self._use.is_forced:  # what stands between calls, or began one before the answer was cut
            events = [event for event in events if not isinstance(event, Content)]
        return events

    def read_as_one(self, answer: CompletionOutput) -> list[Event]:
        """The same, for an API whose answers have one text: see rule 4."""
        events = self.read(answer)
        for number, event in enumerate(events):
            if isinstance(event, CallBegins):
                self._is_behind_text = self._has_text
            elif isinstance(event, Content):
                if self._is_behind_text:
                    events[number] = Content("\n" + event.text)
                self._has_text, self._is_behind_text = True, False
        return events

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.num_tokens

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.has_calls

    def finish_reason(self, given: str | None) -> str | None:
        """See rule 3; `given` is the engine's."""
        is_made = self.has_calls and not self._has_cut_call
        if given == "stop" and is_made and self._use.choice != "named":
            return "tool_calls"
        return given


def _is_further_call(event: Event) -> bool:
    return isinstance(event, CallBegins | CallArguments | CallEnds) and event.index > 0


class Conversation(NamedTuple):
    prompt: TokenPrompt
    params: SamplingParams
    reading: Reading


async def converse(service: Service, llm: AsyncLLM, body: ChatRequest) -> Conversation:
    """Raises `ApiError` or `RequestError`."""
    refuse_unsupported(body)
    use = await off_loop_if(
        is_long(body.tools), lambda: judged_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    )
    _judge(service, body, use)
    body = msgspec.structs.replace(body, tools=list(use.tools) or None)  # of others the model is not told
    params = chat_params(body, service.sampling_defaults, llm.max_model_len)
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", "messages")

    chats = service.chats

    def make() -> Conversation:
        manner = chats.manner(body.chat_template)
        prompt = chat_prompt(body, chats, llm.max_model_len)
        demand = Demand(None, None)
        if use.tools:
            demand = demanded(use.tools, use.tool_choice, use.parallel, manner.tool_format, chats.specials)
        reading = _reading(chats, manner, body, use, demand.tool_format, prompt.text or "")
        _bind(params, body, reading, demand.structured_outputs, chats.specials)
        return Conversation(truncated(prompt, body, llm.max_model_len), params, reading)

    return await off_loop_if(bool(use.tools) or is_long(body.messages), make)


def _judge(service: Service, body: ChatRequest, use: ToolUse) -> None:
    if use.choice == "auto" and not service.chats.allows_auto_calls:
        raise ApiError(
            400,
            'tool_choice "auto" needs a server with --enable-auto-tool-choice; ask for "required" or "none"',
            "tool_choice",
        )
    given = (
        *(body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice),
        *(body.guided_grammar, body.guided_json_object or None),
    )
    if use.is_forced and any(one is not None for one in given):
        raise ApiError(
            400, "structured_outputs and tool_choice both say what the text must be; give one", "tool_choice"
        )
    budget = body.thinking_token_budget
    if budget is not None and budget < 0:
        raise ApiError(400, f"thinking_token_budget must be 0 or more, got {budget}", "thinking_token_budget")


def _reading(
    chats: Chats, manner: Manner, body: ChatRequest, use: ToolUse, tool_format: ToolFormat | None, prompt: str
) -> Reading:
    if manner.reasoning_format is None and body.thinking_token_budget is not None:
        raise ApiError(
            400, "thinking_token_budget: this model does not reason; leave it out", "thinking_token_budget"
        )
    begun = (body.messages[-1].get("content") or "") if body.continue_final_message else None
    begins = opening(manner.reasoning_format, prompt, begun)
    return Reading(
        tool_format, begins.form, begins.is_open, use, chats.token_bytes, manner.tool_format is MISTRAL
    )


def _bind(
    params: SamplingParams,
    body: ChatRequest,
    reading: Reading,
    of_tools: StructuredOutputsParams | None,
    specials: Container[str],
) -> None:
    """What the answer must be, and what of it must be seen."""
    use, form = reading.use, reading.reasoning_format
    if needs_special_tokens(Manner(reading.tool_format, form), specials) and body.skip_special_tokens is None:
        params.skip_special_tokens = False
    wanted = params.structured_outputs
    if use.is_forced or wanted is None:
        wanted = of_tools
    elif reading.tool_format is not None:
        wanted = calls_or(use, reading.tool_format, wanted)
    if form is not None:
        bound = after_reasoning(
            wanted, form, is_open=reading.is_reasoning, max_tokens=body.thinking_token_budget
        )
        if bound is not None and form.end in specials:
            raise ApiError(
                400,
                f"the model's {form.end} is a special token, which no grammar can say yet, so what follows "
                "it cannot be bound; ask for an answer without reasoning, or without these bounds",
                "thinking_token_budget" if wanted is None else "structured_outputs",
            )
        wanted = bound
    params.structured_outputs = wanted
