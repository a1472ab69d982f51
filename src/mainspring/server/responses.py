"""`/v1/responses`: a request becomes the same question as a chat; its answer is a response that may be
stored, asked for again, gone on from, or made in the background.

Who makes a response. Without `background` the request that asked for it: when its client leaves, the response
is cancelled. With it a task of its own, which neither knows nor needs a client; `GET`, `cancel` and `DELETE`
find it by its id, and its events, if they were asked for, are kept so that a client may come back to them.
A response that is stored is so from the moment in which the engine has accepted it. Where the store has no
room, one that nobody asked to be stored is not.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from mainspring.base.outputs import CompletionOutput
from mainspring.base.params import RequestOutputKind, SamplingParams
from mainspring.frontend.async_llm import AsyncLLM, RequestStream
from mainspring.server.answering import ByteStream, EventStream, Framing, Question, are_long, ask, named_event
from mainspring.server.conversation import Reading, converse
from mainspring.server.errors import ApiError, as_api_error, reworded
from mainspring.server.generating import LOAD, LOAD_FORMAT, generator, load_report, make_question
from mainspring.server.http import JSONReply, cancelled, while_connected
from mainspring.server.logprobs import TokenNames, chat_logprobs
from mainspring.server.prompts import off_loop_if
from mainspring.server.reading import read
from mainspring.server.replies import ChosenLogprob
from mainspring.server.responses_items import as_chat, judged_items, renamed
from mainspring.server.responses_store import StoredResponse
from mainspring.server.responses_types import (
    Deleted,
    InputItemList,
    ResponseEvent,
    ResponsesReply,
    ResponsesRequest,
    name_of,
)
from mainspring.server.responses_writing import LogprobsOf, ResponsesWriter
from mainspring.server.sampling import named
from mainspring.server.service import Service

# field -> what to say where it asks for something
REFUSED = {
    "prompt": "there are no stored templates of prompts; send instructions and input",
    "conversation": "there are no stored conversations; send the items, or previous_response_id",
    "context_management": "conversations are not compacted here; send fewer items, or truncation auto",
    "moderation": "nothing is moderated here; leave it out",
    "enable_response_messages": "messages in a model's own form are not shown; leave it out",
    "previous_input_messages": "messages in a model's own form are not read; send items in input",
}
LOGPROBS = "message.output_text.logprobs"
# The others ask for parts of items that there never are, and for reasoning that a client may send back: its
# text, which is always there.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
DEFAULT_LISTED, MAX_LISTED = 20, 100  # items of a page; OpenAI's


# -- a new one -----------------------------------------------------------------------------------------------


async def create_response(service: Service, request: Request) -> Response:
    llm = generator(service)
    body = await read(service, request, ResponsesRequest)
    model = service.check_model(body.model)
    _judge(service, body)
    before = None if body.previous_response_id is None else _previous(service, body.previous_response_id)
    given = judged_items(body.input, service.responses.item)
    items = given if before is None else [*before.items, *before.said, *given]
    chat = as_chat(body, items, llm.max_model_len)
    if not chat.messages:
        raise ApiError(400, "input says nothing: reasoning without text is no message; send one", "input")
    with reworded(lambda error: renamed(named(error, chat))):
        talk = await converse(service, llm, chat)
        if body.background:
            talk.params.output_kind = RequestOutputKind.DELTA  # whoever asks for it sees how far it is
        response_id = f"resp_{uuid.uuid4().hex}"
        writer = ResponsesWriter(
            _beginning(response_id, model, body, talk.params),
            talk.reading.reader(),
            talk.reading.call_id if talk.reading.short_ids else _call_id,
            _logprobs_of(service, body, talk.reading),
            body.include_reasoning is not False,
        )
        stored = None
        if service.responses.is_on and body.store is not False:
            keeps_events = bool(body.background and body.stream)
            stored = StoredResponse(writer, before, given, keeps_events=keeps_events)
        question = make_question(
            request, response_id, [talk.prompt], talk.params, body.priority, body.cache_salt
        )
        reply = await _answer(service, llm, request, body, question, writer, stored)
    if (load := load_report(llm, request.headers.get(LOAD_FORMAT))) is not None:
        reply.headers[LOAD] = load
    return reply


async def _answer(
    service: Service,
    llm: AsyncLLM,
    request: Request,
    body: ResponsesRequest,
    question: Question,
    writer: ResponsesWriter,
    stored: StoredResponse | None,
) -> Response:
    keep_alive_s = service.settings.sse_keep_alive_interval
    async with AsyncExitStack() as opened:
        [stream] = [await opened.enter_async_context(stream) async for stream in ask(llm, question)]
        must = bool(body.background or body.store)
        if stored is not None and service.responses.add(stored, must=must):
            if body.background:
                service.begin()
                making = _make(service, stream, opened.pop_all(), writer, stored)
                stored.task = asyncio.create_task(making, name=f"mainspring-{stored.id}")
                if not body.stream:
                    return JSONReply(stored.reply)
                return ByteStream(stored.events_from(0), AsyncExitStack(), keep_alive_s)
            opened.callback(service.responses.settle, stored)
        if body.stream:
            return EventStream([stream], opened.pop_all(), writer, keep_alive_s, _framing(writer))
        return JSONReply(await while_connected(request.receive, _whole(stream, writer)))


async def _whole(stream: RequestStream, writer: ResponsesWriter) -> ResponsesReply:
    try:
        outputs = [await anext(stream)]
        return await off_loop_if(are_long(outputs), lambda: writer.whole(outputs))
    except Exception as error:
        for _ in writer.failed(as_api_error(error)):  # as it is stored
            pass
        raise


async def _make(
    service: Service,
    stream: RequestStream,
    opened: AsyncExitStack,
    writer: ResponsesWriter,
    stored: StoredResponse,
) -> None:
    """In the background, until it is over or cancelled."""
    try:
        async with opened:
            async for output in stream:
                stored.tell(writer.chunks(0, output))
    except Exception as error:  # it has nobody else to tell
        stored.tell(writer.failed(as_api_error(error)))
    finally:
        stored.tell(writer.cancelled())
        service.responses.settle(stored)
        service.end()


def _framing(writer: ResponsesWriter) -> Framing:
    def event(what: ResponseEvent) -> bytes:
        return named_event(name_of(what), what)

    return Framing(event, lambda error: b"".join(map(event, writer.failed(error))), b"")


def _previous(service: Service, response_id: str) -> StoredResponse:
    found = service.responses.get(response_id, "previous_response_id")
    if found.reply.status not in ("completed", "incomplete"):
        raise ApiError(
            400,
            f"the response {response_id[:100]!r} is {found.reply.status}; only one that was completed can be "
            "gone on from",
            "previous_response_id",
        )
    return found


def _beginning(
    response_id: str, model: str, body: ResponsesRequest, params: SamplingParams
) -> ResponsesReply:
    """Before anything was said."""
    return ResponsesReply(
        id=response_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        metadata=body.metadata,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=params.temperature,
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_p=params.top_p,
        background=bool(body.background),
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning,
        status="queued" if body.background else "in_progress",
        text=body.text,
        top_logprobs=body.top_logprobs,
        truncation=body.truncation or "disabled",
        user=body.user,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _logprobs_of(service: Service, body: ResponsesRequest, reading: Reading) -> LogprobsOf | None:
    """Raises `ApiError` where an answer may be more than a message: tokens are not told apart by items."""
    if LOGPROBS not in (body.include or ()):
        return None
    if reading.tool_format is not None or reading.reasoning_format is not None:
        raise ApiError(
            400,
            f"include: {LOGPROBS} is for answers without tools and reasoning; leave it out",
            "include",
        )
    tokenizer = service.chats.tokenizer
    names = TokenNames(
        None if tokenizer is None else tokenizer.token_bytes, service.settings.return_tokens_as_token_ids
    )
    num_top = body.top_logprobs or 0

    def logprobs_of(answer: CompletionOutput) -> list[ChosenLogprob]:
        if answer.logprobs is None:
            return []
        return chat_logprobs(answer.logprobs, answer.token_ids, num_top, names).content or []

    return logprobs_of


def _judge(service: Service, body: ResponsesRequest) -> None:
    """What a chat does not judge."""
    for name, words in REFUSED.items():
        if getattr(body, name):
            raise ApiError(400, f"{name}: {words}", name)
    if body.background and body.store is False:
        raise ApiError(400, "background needs store: nobody else could ask for the response", "background")
    if not service.responses.is_on and (body.background or body.store):
        name = "background" if body.background else "store"
        raise ApiError(400, f"{name}: this server stores no responses (--max-stored-responses 0)", name)
    for wish in body.include or ():
        if wish not in INCLUDABLE:
            raise ApiError(400, f"include has {wish[:60]!r}; it may have {', '.join(INCLUDABLE)}", "include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise ApiError(400, f"top_logprobs needs include to have {LOGPROBS}", "top_logprobs")
    summary = body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary)
    if summary not in (None, "auto"):
        raise ApiError(
            400,
            "reasoning.summary: reasoning is not summed up; all of it is in the item's content; leave it out",
            "reasoning.summary",
        )


# -- stored ones ---------------------------------------------------------------------------------------------


async def retrieve_response(service: Service, request: Request) -> Response:
    """A stored response as it stands, or its events."""
    stored = _named(service, request)
    if request.query_params.get("stream") not in ("true", "1"):
        return JSONReply(stored.reply)
    if not stored.keeps_events:
        raise ApiError(400, "only a response made with background and stream can be streamed later", "stream")
    begin = _number(request, "starting_after", -1, least=-1) + 1
    keep_alive_s = service.settings.sse_keep_alive_interval
    return ByteStream(stored.events_from(begin), AsyncExitStack(), keep_alive_s)


async def cancel_response(service: Service, request: Request) -> Response:
    """End a response that is made in the background; one that is over stays as it is."""
    stored = _named(service, request)
    if stored.task is None:
        raise ApiError(
            400, "only a response made with background can be cancelled; leave the others", "response_id"
        )
    await cancelled(stored.task)
    return JSONReply(stored.reply)


async def delete_response(service: Service, request: Request) -> Response:
    """Forget a response; one that is being made in the background ends."""
    stored = _named(service, request)
    await service.responses.delete(stored.id)
    return JSONReply(Deleted(id=stored.id))


async def list_input_items(service: Service, request: Request) -> Response:
    """What a stored response answers: all of the conversation before it, without instructions."""
    items = list(_named(service, request).items)
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order[:20]!r}", "order")
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after: no item has the id {after[:100]!r}", "after")
        items = items[place + 1 :]
    limit = _number(request, "limit", DEFAULT_LISTED, least=1, most=MAX_LISTED)
    shown = items[:limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return JSONReply(
        InputItemList(data=shown, first_id=first_id, last_id=last_id, has_more=len(items) > limit)
    )


def _named(service: Service, request: Request) -> StoredResponse:
    return service.responses.get(request.path_params["response_id"])


def _number(request: Request, name: str, default: int, *, least: int, most: int = 1 << 31) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    try:
        number = int(given[:20])
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ApiError(400, f"{name} must be a whole number from {least} to {most}", name)
    return number
