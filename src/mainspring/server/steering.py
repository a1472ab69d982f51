"""Endpoints that steer the engine, under vLLM's names: only with `--server-dev-mode`, for who may send these
can stop everybody else's requests. And `/tokenizer_info`, with a flag of its own."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mainspring import __version__
from mainspring.base.messages import SLEEP_TAGS, PauseMode
from mainspring.server.errors import ApiError
from mainspring.server.http import JSONReply
from mainspring.server.prompts import needed
from mainspring.server.reading import read
from mainspring.server.service import Service


class Success(msgspec.Struct):
    success: bool


class IsSleeping(msgspec.Struct):
    is_sleeping: bool


class IsPaused(msgspec.Struct):
    is_paused: bool


class AbortRequests(msgspec.Struct):
    """`POST /abort_requests`."""

    request_ids: list[str]


class ServerInfo(msgspec.Struct):
    version: str
    models: list[str]
    settings: dict[str, Any]  # of `api_key` only how many there are


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    by_force = request.query_params.get("reset_running_requests", "").lower() in ("1", "true")
    return JSONReply(Success(await service.llm.reset_prefix_cache(by_force)))


async def sleep(service: Service, request: Request) -> Response:
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ApiError(400, "level must be 1 or 2", "level")
    await service.llm.sleep(int(level))
    return JSONReply(Success(True))


async def wake_up(service: Service, request: Request) -> Response:
    tags = request.query_params.getlist("tags")
    if not set(tags) <= set(SLEEP_TAGS):
        raise ApiError(400, f"tags must be of {', '.join(SLEEP_TAGS)}", "tags")
    await service.llm.wake_up(tags or None)
    return JSONReply(Success(True))


async def is_sleeping(service: Service, request: Request) -> Response:
    return JSONReply(IsSleeping(await service.llm.is_sleeping()))


async def pause(service: Service, request: Request) -> Response:
    mode: Any = request.query_params.get("mode", "abort")
    if mode not in get_args(PauseMode):
        raise ApiError(400, f"mode must be one of {', '.join(get_args(PauseMode))}", "mode")
    clears = request.query_params.get("clear_cache", "").lower() in ("1", "true")
    await service.llm.pause_generation(mode, clears)
    return JSONReply(Success(True))


async def resume(service: Service, request: Request) -> Response:
    await service.llm.resume_generation()
    return JSONReply(Success(True))


async def is_paused(service: Service, request: Request) -> Response:
    return JSONReply(IsPaused(await service.llm.is_paused()))


async def abort_requests(service: Service, request: Request) -> Response:
    """By the ids of replies (`chatcmpl-...`, `cmpl-...`)."""
    body = await read(service, request, AbortRequests)
    await service.llm.abort(body.request_ids)
    return JSONReply(Success(True))


async def server_info(service: Service, request: Request) -> Response:
    shown = msgspec.to_builtins(service.settings) | {"api_key": len(service.settings.api_key)}
    return JSONReply(ServerInfo(__version__, service.model_names, shown))


async def tokenizer_info(service: Service, request: Request) -> Response:
    tokenizer = needed(service.llm.tokenizer)
    template = service.chats.template

    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.id_to_token(token_id)

    eos = text(tokenizer.eos_token_id)
    source = None if template is None else template.source
    return JSONReply(TokenizerInfo("Tokenizer", text(tokenizer.bos_token_id), eos, eos, source))
