"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API. A request becomes the same question as a
chat; its answer is a message, or the events of one."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from mainspring.server.answering import Framing, answer, typed_event
from mainspring.server.conversation import converse
from mainspring.server.errors import ApiError, reworded
from mainspring.server.generating import LOAD, LOAD_FORMAT, generator, load_report, make_question
from mainspring.server.http import JSONReply
from mainspring.server.messages_errors import as_reply
from mainspring.server.messages_input import as_chat, renamed
from mainspring.server.messages_types import CountTokensRequest, MessagesRequest, Ping, TokenCount
from mainspring.server.messages_writing import MessagesWriter
from mainspring.server.prompts import chat_prompt, is_long, off_loop_if
from mainspring.server.reading import answer_id, read
from mainspring.server.sampling import named
from mainspring.server.service import Service


async def create_message(service: Service, request: Request) -> Response:
    """A message that answers a conversation."""
    llm = generator(service)
    body = await read(service, request, MessagesRequest)
    model = service.check_model(body.model)
    chat = as_chat(body)
    # Clients of this API send the limit of a model that they know: one that is too high is no mistake.
    chat.max_tokens = min(body.max_tokens, llm.max_model_len)
    with reworded(lambda error: renamed(named(error, chat), body)):
        talk = await converse(service, llm, chat)
        name = f"msg_{answer_id(request, None)}"
        reading = talk.reading
        writer = MessagesWriter(
            name,
            model,
            reading.reader(),
            reading.call_id if reading.short_ids else _call_id,
            shows_thinking=chat.include_reasoning is not False,
        )
        question = make_question(request, name, [talk.prompt], talk.params, None, body.cache_salt)
        keep_alive_s = service.settings.sse_keep_alive_interval if body.stream else None
        framing = _framing(request.state.request_id)
        reply = await answer(llm, request, question, writer, keep_alive_s, framing)
    if (load := load_report(llm, request.headers.get(LOAD_FORMAT))) is not None:
        reply.headers[LOAD] = load
    return reply


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens a conversation is, with its tools, as a prompt."""
    generator(service)
    body = await read(service, request, CountTokensRequest)
    service.check_model(body.model)
    chat = as_chat(body)
    with reworded(lambda error: renamed(error, body)):
        prompt = await off_loop_if(
            bool(chat.tools) or is_long(chat.messages), lambda: chat_prompt(chat, service.chats)
        )
    return JSONReply(TokenCount(len(prompt.token_ids)))


def _framing(request_id: str) -> Framing:
    def failure(error: ApiError) -> bytes:
        return typed_event(as_reply(error, request_id))

    return Framing(typed_event, failure, b"", keep_alive=typed_event(Ping()))


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
