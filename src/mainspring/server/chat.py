"""`/v1/chat/completions`: outputs of the engine, as an OpenAI client reads them.

The first output of a stream brings a chunk with the role for each answer. A token whose text is held back (it
may be the beginning of a stop string, of a character or of a tag) brings no chunk of its own, unless
log-probabilities or token ids are asked for, and it is not of reasoning that is left out. An output that says
several things brings a chunk for each, and the first of them has what is known of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from mainspring.base.outputs import CompletionOutput, LogprobsOnePosition, RequestOutput
from mainspring.frontend.parsing.events import (
    CallArguments,
    CallBegins,
    Content,
    Event,
    Reasoning,
    joined,
)
from mainspring.server.conversation import AnswerReader, Reading
from mainspring.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mainspring.server.prompts import TokenPrompt
from mainspring.server.replies import (
    CachedTokens,
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    CompletionTokens,
    ToolCall,
    ToolCallDelta,
)
from mainspring.server.requests import ChatRequest
from mainspring.server.writing import Head, Reporting, Tally, best, check_no_error, fingerprint_at_end


class ChatWriter:
    """Fits `writing.Writer`. One conversation, `n` answers."""

    def __init__(
        self,
        body: ChatRequest,
        prompt: TokenPrompt,
        reading: Reading,
        head: Head,
        names: TokenNames,
        reporting: Reporting,
        role: str = "assistant",
    ) -> None:
        self._head = head
        self._prompt = prompt
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}  # by the answer's index, as the engine counts
        self._shows_reasoning = body.include_reasoning is not False
        # Of each answer: tokens that may be a part of a tag yet, and their log-probabilities; None: none may.
        self._held: dict[int, tuple[list[int], list[LogprobsOnePosition]] | None] = {}
        self._names = names
        self._reporting = reporting
        self._n = body.n or 1
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._with_ids = bool(body.return_token_ids)
        self._with_text = bool(body.return_prompt_text)
        self._says_tokens = self._with_ids or self._num_top is not None  # also those without text
        begun = body.messages[-1] if body.messages and not _adds_prompt(body) else None
        self._role = str(begun["role"]) if begun is not None else role
        self._echo = _text(body.messages[-1]) if body.echo and body.messages[-1]["role"] == self._role else ""
        self._tally = Tally()
        self._has_begun = False

    # --- whole ----------------------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatReply:
        [output] = outputs
        self._tally.add(0, output)
        num_cached = self._tally.num_cached_tokens if self._reporting.cached_tokens else None
        cached = None if num_cached is None else CachedTokens(num_cached)
        head = self._head
        choices = [self._choice(answer) for answer in best(output.outputs, self._n)]
        return ChatReply(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            system_fingerprint=head.fingerprint,
            usage=self._tally.usage(cached, self._reasoning_tokens()),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
            prompt_text=self._prompt.text if self._with_text else None,
            warnings=output.warnings or UNSET,
        )

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        check_no_error(answer)
        reader = self._reader(answer.index)
        message = self._message(self._read(reader, answer))
        return ChatChoice(
            answer.index,
            message,
            self._logprobs(answer),
            reader.finish_reason(answer.finish_reason),
            answer.stop_reason,
            answer.token_ids if self._with_ids else None,
        )

    def _message(self, events: Sequence[Event]) -> ChatMessage:
        content, reasoning, calls = self._echo, "", list[ToolCall]()
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegins(_, name):
                    calls.append(ToolCall(id=self._reading.call_id(), function=CalledFunction(name, "")))
                case CallArguments(_, text):
                    calls[-1].function.arguments += text
        says_other = bool(calls or reasoning) and not self._reading.use.is_forced  # as in vLLM
        message = ChatMessage(self._role, content or (None if says_other else ""))
        if calls:
            message.tool_calls = calls
        if reasoning and self._shows_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        return message

    def _logprobs(self, answer: CompletionOutput) -> ChatLogprobs | None:
        if self._num_top is None or answer.logprobs is None:
            return None
        return chat_logprobs(answer.logprobs, answer.token_ids, self._num_top, self._names)

    # --- stream ---------------------------------------------------------------------------------------------

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[ChatChunk]:
        for answer in output.outputs:
            check_no_error(answer)
        if not self._has_begun:
            yield from self._beginning(output)
        self._tally.add(prompt_index, output)
        for answer in output.outputs:
            yield from self._said(answer)

    def last(self) -> Iterator[ChatChunk]:
        if not self._reporting.usage_at_end:
            return
        cached = CachedTokens(self._tally.num_cached_tokens, multimodal_tokens=UNSET)
        chunk = self._chunk()
        chunk.usage = self._tally.usage(
            cached if self._reporting.cached_tokens else UNSET, self._reasoning_tokens() or UNSET
        )
        chunk.system_fingerprint = self._head.fingerprint
        yield chunk

    def _beginning(self, output: RequestOutput) -> Iterator[ChatChunk]:
        self._has_begun = True
        self._tally.add(0, RequestOutput(output.request_id, None, output.prompt_token_ids))
        for index in range(self._n):
            chunk = self._chunk(ChatChunkChoice(index, ChatDelta(self._role, "")))
            chunk.prompt_token_ids = output.prompt_token_ids if self._with_ids else None
            chunk.prompt_text = self._prompt.text if self._with_text else None
            chunk.warnings = output.warnings or UNSET
            yield chunk
        if self._echo:
            for index in range(self._n):
                yield self._chunk(ChatChunkChoice(index, ChatDelta(content=self._echo), token_ids=None))

    def _said(self, answer: CompletionOutput) -> Iterator[ChatChunk]:
        """What is new of one answer, and its end with its last text."""
        reader = self._reader(answer.index)
        deltas = [delta for event in self._read(reader, answer) if (delta := self._delta(event))]
        is_end = answer.finish_reason is not None
        if is_end and (not deltas or not isinstance(deltas[-1].content, str)):
            deltas.append(ChatDelta())
        if not deltas and self._says_tokens and answer.token_ids:
            deltas.append(ChatDelta() if reader.has_calls else ChatDelta(content=""))
        for number, delta in enumerate(deltas):
            is_first = number == 0
            choice = ChatChunkChoice(
                answer.index,
                delta,
                self._logprobs(answer) if is_first else None,
                token_ids=(answer.token_ids if is_first else []) if self._with_ids else None,
            )
            chunk = self._chunk(choice)
            if is_end and number == len(deltas) - 1:
                choice.finish_reason = reader.finish_reason(answer.finish_reason)
                choice.stop_reason = answer.stop_reason
                chunk.system_fingerprint = fingerprint_at_end(self._head, self._reporting)
            yield chunk

    def _delta(self, event: Event) -> ChatDelta | None:
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text) if self._shows_reasoning:
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallBegins(index, name):
                call = ToolCallDelta(
                    id=self._reading.call_id(),
                    type="function",
                    index=index,
                    function=CalledFunctionDelta(name=name),
                )
                return ChatDelta(content=None, tool_calls=[call])
            case CallArguments(index, text):
                function = CalledFunctionDelta(arguments=text)
                return ChatDelta(content=None, tool_calls=[ToolCallDelta(index=index, function=function)])
        return None

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=list(choices),
            usage=self._tally.usage() if self._reporting.usage_always else UNSET,
        )

    # --- both -----------------------------------------------------------------------------------------------

    def _reader(self, index: int) -> AnswerReader:
        if index not in self._readers:
            self._readers[index] = self._reading.reader()
        return self._readers[index]

    def _read(self, reader: AnswerReader, answer: CompletionOutput) -> list[Event]:
        """What is new. Of reasoning that is not shown, `answer` loses its tokens too."""
        num_before = reader.num_reasoning_tokens
        events = joined(reader.read_as_one(answer))
        if self._shows_reasoning or self._reading.reasoning_format is None:
            return events
        num_hidden = reader.num_reasoning_tokens - num_before
        token_ids, logprobs = answer.token_ids, answer.logprobs or []
        if (held := self._held.get(answer.index, ([], []))) is not None:
            token_ids, logprobs = held[0] + token_ids, held[1] + logprobs
            is_known = events or reader.num_reasoning_tokens or answer.finish_reason
            self._held[answer.index] = None if is_known else (token_ids, logprobs)
            num_hidden = num_hidden if is_known else len(token_ids)
        answer.token_ids = token_ids[num_hidden:]
        answer.logprobs = None if answer.logprobs is None else logprobs[num_hidden:]
        return events

    def _reasoning_tokens(self) -> CompletionTokens | None:
        """None of a model that does not reason."""
        if self._reading.reasoning_format is None:
            return None
        return CompletionTokens(sum(reader.num_reasoning_tokens for reader in self._readers.values()))


def _adds_prompt(body: ChatRequest) -> bool:
    """Whether the template begins a new message for the answer."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def _text(message: dict[str, object]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""
