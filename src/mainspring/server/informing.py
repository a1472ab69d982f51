"""Endpoints that generate nothing: models, health, tokens, and the few that steer the engine."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from mainspring import __version__
from mainspring.frontend.tools import judged_tools
from mainspring.server.errors import ApiError
from mainspring.server.http import JSONReply
from mainspring.server.prompts import LONG_CHARACTERS, chat_prompt, is_long, needed
from mainspring.server.reading import read
from mainspring.server.refused import refuse_unsupported
from mainspring.server.replies import (
    DetokenizeReply,
    Health,
    Load,
    ModelCard,
    ModelList,
    ModelPermission,
    TokenizeReply,
    Version,
)
from mainspring.server.requests import DetokenizeRequest, TokenizeRequest
from mainspring.server.service import Service

# -- models --------------------------------------------------------------------------------------------------


async def list_models(service: Service, request: Request) -> Response:
    return JSONReply(ModelList(data=[_card(service, name) for name in service.model_names]))


async def retrieve_model(service: Service, request: Request) -> Response:
    return JSONReply(_card(service, service.check_model(request.path_params["model"])))


def _card(service: Service, name: str) -> ModelCard:
    permission = ModelPermission(id=f"modelperm-{uuid.uuid4().hex[:16]}", created=service.created)
    return ModelCard(
        id=name,
        created=service.created,
        root=service.model_root,
        max_model_len=service.llm.max_model_len,
        permission=[permission],
    )


# -- health --------------------------------------------------------------------------------------------------


async def health(service: Service, request: Request) -> Response:
    """Whether requests are answered."""
    await service.check_answering()
    return Response()


async def is_live(service: Service, request: Request) -> Response:
    """Whether there is a sense in waiting: a failure says that only a new process will help."""
    if service.status != "loading":
        await service.check_answering()
    return JSONReply(Health(service.status))


async def is_ready(service: Service, request: Request) -> Response:
    """Whether new requests are welcome."""
    if service.status == "draining":
        raise ApiError(503, "the server is shutting down")
    await service.check_answering()
    return JSONReply(Health(service.status))


async def version(service: Service, request: Request) -> Response:
    return JSONReply(Version(__version__))


async def load(service: Service, request: Request) -> Response:
    return JSONReply(Load(service.num_live))


async def metrics(service: Service, request: Request) -> Response:
    page, content_type = await service.metrics.page(request.headers.get("accept", ""))
    return Response(page, media_type=content_type)


# -- tokens --------------------------------------------------------------------------------------------------


async def tokenize(service: Service, request: Request) -> Response:
    llm = service.llm
    body = await read(service, request, TokenizeRequest)
    service.check_model(body.model)
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", "prompt")
    tokenizer = needed(llm.tokenizer)

    def encode() -> list[int]:
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        judged_tools(body.tools)
        return chat_prompt(body, service.chats).token_ids

    ids = await asyncio.to_thread(encode) if is_long(body.prompt or body.messages) else encode()
    texts = [tokenizer.id_to_token(i) or "" for i in ids] if body.return_token_strs else None
    return JSONReply(TokenizeReply(len(ids), llm.max_model_len, ids, texts))


async def detokenize(service: Service, request: Request) -> Response:
    llm = service.llm
    body = await read(service, request, DetokenizeRequest)
    service.check_model(body.model)
    tokenizer = needed(llm.tokenizer)
    if wrong := [i for i in body.tokens if not 0 <= i < tokenizer.vocab_size][:1]:
        raise ApiError(
            400,
            f"tokens has {wrong[0]}, which is no token: ids go from 0 to {tokenizer.vocab_size - 1}",
            "tokens",
        )
    decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=False)
    text = await asyncio.to_thread(decode) if len(body.tokens) > LONG_CHARACTERS else decode()
    return JSONReply(DetokenizeReply(text))


async def openapi(service: Service, request: Request) -> Response:
    """This document."""
    return JSONReply(service.describe())
