"""What went wrong below `/v1/messages`, as clients of that API read it; the rules are those of `errors.py`.

    {"type": "error", "error": {"type", "message"}, "request_id"}

There is no field for the field at fault: the message names it.
"""

from __future__ import annotations

import msgspec

from mainspring.server.errors import ApiError

PATH = "/v1/messages"
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class MessagesErrorInfo(msgspec.Struct):
    type: str
    message: str


class MessagesErrorReply(msgspec.Struct, tag_field="type", tag="error"):
    error: MessagesErrorInfo
    request_id: str


def is_below(path: str) -> bool:
    """Whether errors at this path have this form, also where there is nothing."""
    return path == PATH or path.startswith(PATH + "/")


def as_reply(error: ApiError, request_id: str) -> MessagesErrorReply:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return MessagesErrorReply(MessagesErrorInfo(kind, error.message), request_id)
