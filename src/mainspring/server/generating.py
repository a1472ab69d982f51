"""The two endpoints that generate: a request is read, judged, rendered and asked of the engine; `answering`
does the rest. Texts that are long are rendered in a thread, so nobody else waits for them.

The engine is taken from the service once, at the beginning: a request that has come in is answered, also when
the server is told to end meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mainspring.base.params import PoolingParams, SamplingParams
from mainspring.frontend.async_llm import AsyncLLM
from mainspring.server.answering import Question, answer
from mainspring.server.beam import make_search, search_all
from mainspring.server.chat import ChatWriter
from mainspring.server.completions import CompletionWriter
from mainspring.server.conversation import converse
from mainspring.server.errors import ApiError, reworded
from mainspring.server.http import JSONReply, while_connected
from mainspring.server.logprobs import TokenNames
from mainspring.server.prompts import TokenPrompt, completion_prompts, is_long, off_loop_if
from mainspring.server.reading import answer_id, data_parallel_rank_of, priority_of, read
from mainspring.server.refused import refuse_unsupported
from mainspring.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from mainspring.server.sampling import completion_params, named
from mainspring.server.service import Service
from mainspring.server.writing import Head, Reporting, Writer

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C's
LOAD_FORMAT, LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"  # ORCA's
MAX_SALT = 128
SALT_TABOO = set("@/\\\0")


async def create_chat_completion(service: Service, request: Request) -> Response:
    llm = generator(service)
    body = await read(service, request, ChatRequest)
    model = service.check_model(body.model)
    with reworded(lambda error: named(error, body)):
        talk = await converse(service, llm, body)
        head = _head(service, request, body, "chatcmpl", model)
        writer = ChatWriter(
            body,
            talk.prompt,
            talk.reading,
            head,
            _names(service, body),
            _reporting(service, body),
            service.settings.response_role,
        )
        return await _answer(service, llm, request, body, head, [talk.prompt], talk.params, writer)


async def create_completion(service: Service, request: Request) -> Response:
    llm = generator(service)
    body = await read(service, request, CompletionRequest)
    model = service.check_model(body.model)
    refuse_unsupported(body)

    def render() -> list[TokenPrompt]:
        return completion_prompts(body, service.chats.tokenizer, llm.max_model_len)

    with reworded(lambda error: named(error, body)):
        params = completion_params(body, service.sampling_defaults, llm.max_model_len)
        prompts = await off_loop_if(is_long(body.prompt), render)
        head = _head(service, request, body, "cmpl", model)
        writer = CompletionWriter(
            body, prompts, head, _names(service, body), _reporting(service, body), _decoder(service)
        )
        return await _answer(service, llm, request, body, head, prompts, params, writer)


async def _answer(
    service: Service,
    llm: AsyncLLM,
    request: Request,
    body: GenerationRequest,
    head: Head,
    prompts: list[TokenPrompt],
    params: SamplingParams,
    writer: Writer,
) -> Response:
    question = make_question(request, head.id, prompts, params, body.priority, body.cache_salt)
    if body.use_beam_search:
        search = search_all(llm, question, make_search(body, params, llm))
        return JSONReply(writer.whole(await while_connected(request.receive, search)))
    keep_alive_s = service.settings.sse_keep_alive_interval if body.stream else None
    reply = await answer(llm, request, question, writer, keep_alive_s)
    if (load := load_report(llm, request.headers.get(LOAD_FORMAT))) is not None:
        reply.headers[LOAD] = load
    return reply


def make_question(
    request: Request,
    request_id: str,
    prompts: list[TokenPrompt],
    params: SamplingParams | PoolingParams,
    priority: int | None,
    cache_salt: str | None,
) -> Question:
    """With what the request's headers say. Raises `ApiError`."""
    return Question(
        request_id,
        prompts,
        params,
        priority_of(request, priority),
        _salt(cache_salt),
        {name: value for name in TRACE_HEADERS if (value := request.headers.get(name)) is not None},
        data_parallel_rank_of(request),
    )


def generator(service: Service) -> AsyncLLM:
    """The engine. Raises `ApiError` where its model does not generate."""
    llm = service.llm
    if not llm.facts.can_generate:
        does, where = (
            ("classifies", "/classify") if llm.facts.pooling.labels else ("embeds", "/v1/embeddings")
        )
        raise ApiError(400, f"this model {does} texts and cannot generate; send them to {where}", "model")
    return llm


def _head(service: Service, request: Request, body: GenerationRequest, prefix: str, model: str) -> Head:
    name = f"{prefix}-{answer_id(request, body.request_id)}"
    return Head(name, int(time.time()), model, service.fingerprint)


def _names(service: Service, body: GenerationRequest) -> TokenNames:
    as_ids = body.return_tokens_as_token_ids
    if as_ids is None:
        as_ids = service.settings.return_tokens_as_token_ids
    tokenizer = service.chats.tokenizer
    return TokenNames(None if tokenizer is None else tokenizer.token_bytes, as_ids)


def _reporting(service: Service, body: GenerationRequest) -> Reporting:
    settings = service.settings
    return Reporting.of(
        body.stream_options,
        cached_tokens=settings.enable_prompt_tokens_details,
        force_usage=settings.enable_force_include_usage,
    )


def _decoder(service: Service) -> Callable[[list[int]], str]:
    tokenizer = service.chats.tokenizer
    if tokenizer is None:
        return lambda token_ids: ""
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False)


def _salt(salt: Any) -> str | None:
    if salt is not None and (not salt or len(salt) > MAX_SALT or SALT_TABOO & set(salt)):
        raise ApiError(
            400, f"cache_salt must have 1 to {MAX_SALT} characters and none of @, /, \\ and NUL", "cache_salt"
        )
    return salt


def load_report(llm: AsyncLLM, form: str | None) -> str | None:
    """For load balancers that ask with each request: how full the engine is, as it said last."""
    stats = llm.stats
    if form is None or stats is None:
        return None
    figures = {
        "num_requests_waiting": float(stats.scheduler.num_waiting + stats.scheduler.num_parked),
        "kv_cache_usage_perc": stats.scheduler.kv_cache_usage,
    }
    if form.lower() == "json":
        return "JSON " + json.dumps({"named_metrics": figures})
    if form.lower() == "text":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())
    return None
