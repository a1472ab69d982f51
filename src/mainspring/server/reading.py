"""A request on its way in: its body as a type, its id, its priority."""

from __future__ import annotations

import re
import uuid
from typing import TypeVar

import msgspec
from starlette.requests import Request

from mainspring.server.errors import ApiError
from mainspring.server.http import check_content_type, decode, read_body
from mainspring.server.service import Service

Body = TypeVar("Body", bound=msgspec.Struct)
SAFE_ID = re.compile(r"[\x21-\x7e]{1,256}")  # what may stand in a header and in a line of a log


async def read(service: Service, request: Request, kind: type[Body]) -> Body:
    """Raises `ApiError` for what is no such thing, `ClientGone` if the client leaves meanwhile."""
    check_content_type(request)
    settings = service.settings
    text = await read_body(request, settings.max_request_bytes, settings.request_timeout)
    body, unknown = decode(text, kind)
    service.warn_of_unknown(unknown)
    return body


def given_id(request: Request) -> str | None:
    """The client's own id for this request, from its header; one that could not be echoed is none."""
    found = request.headers.get("x-request-id", "")
    return found if SAFE_ID.fullmatch(found) else None


def answer_id(request: Request, in_body: str | None) -> str:
    """What the reply's id ends with: the header's, the body's, or a new one."""
    if (header := given_id(request)) is not None:
        return header
    if in_body is not None and not SAFE_ID.fullmatch(in_body):
        raise ApiError(
            400,
            "request_id must be 1 to 256 characters of ASCII without spaces; or leave it out",
            "request_id",
        )
    return in_body or uuid.uuid4().hex[:16]


def priority_of(request: Request, in_body: int | None) -> int:
    """Lower goes first."""
    header = request.headers.get("x-vllm-priority")
    if header is None:
        return in_body or 0
    try:
        return int(header)
    except ValueError:
        raise ApiError(400, "x-vllm-priority must be a whole number", "x-vllm-priority") from None


def data_parallel_rank_of(request: Request) -> int | None:
    """Which of several engines is to answer, if it was said."""
    header = request.headers.get("x-data-parallel-rank")
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) < 6):
        raise ApiError(400, "x-data-parallel-rank must be a whole number from 0 on", "x-data-parallel-rank")
    return int(header)
