"""What went wrong, as a client reads it: one envelope for every path and every status. (`messages_errors.py`
has that of an API which has its own.)

    {"error": {"message": ..., "type": ..., "param": ..., "code": <the status>}}

`code` is another thing where clients look for one: `context_length_exceeded`.

Rules.
1. Whatever is raised while a request is served becomes an `ApiError` by `as_api_error`, and that is what is
   sent: before the headers as a response, after them as an event of the stream.
2. A message is bounded and one line. It quotes little of what was sent, so a small mistake in a big request
   has a small answer (case B143).
3. Only what is our own fault is logged with its traceback.
4. A refusal names what was sent. Where a request became another one inside, `reworded` puts the names back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from mainspring.base.errors import (
    EngineDeadError,
    EngineError,
    QueueOverflowError,
    RequestError,
    innermost,
)
from mainspring.base.log import get_logger

logger = get_logger(__name__)

MAX_MESSAGE = 1000  # characters
MAX_QUOTED = 60  # characters of a value that was sent
RETRY_AFTER_S = 1  # for who is refused because others wait
LOADING_RETRY_AFTER_S = 5  # for who is refused because nobody can be served yet, or any more
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None  # the field at fault, where one is
    code: int | str


class ErrorReply(msgspec.Struct):
    error: ErrorInfo


class ApiError(Exception):
    """A refusal or a failure. `param`: the field at fault; `retry_after_s`: when to try again."""

    code: str | None = None  # where it is not the status

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _bounded(message)
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def reply(self) -> ErrorReply:
        kind = TYPES.get(self.status, "Error")
        return ErrorReply(ErrorInfo(self.message, kind, self.param, self.code or self.status))

    def saying(self, message: str, param: str | None) -> ApiError:
        """The same in other words."""
        other = ApiError(self.status, message, param, headers=self.headers)
        other.code = self.code
        return other


class PromptTooLong(ApiError):
    """Clients that know what to do then (to sum a conversation up, say) know it by its code or its words."""

    code = "context_length_exceeded"

    def __init__(self, name: str, num_tokens: int, max_model_len: int, *, is_exact: bool = True) -> None:
        """`num_tokens`: at least so many, unless `is_exact`."""
        count = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
        super().__init__(
            400,
            f"This model's maximum context length is {max_model_len} tokens, and {name} has {count}, which "
            f"leaves no room for an answer; shorten {name}, or raise --max-model-len",
            name,
        )
        self.num_tokens = num_tokens
        self.max_num_tokens = max_model_len - 1  # room for a token of answer


@contextmanager
def reworded(rename: Callable[[ApiError], ApiError]) -> Iterator[None]:
    """Refusals and failures of what is done here, in other words."""
    try:
        yield
    except (ApiError, EngineError) as error:
        raise rename(as_api_error(error)) from None


def as_api_error(error: BaseException) -> ApiError:
    """The one place that knows which exception has which status."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), error.param)
        case QueueOverflowError():
            return ApiError(503, str(error), retry_after_s=RETRY_AFTER_S)
        case EngineDeadError():
            return ApiError(503, str(error), retry_after_s=LOADING_RETRY_AFTER_S)
        case RecursionError():
            return ApiError(
                400, "the request is nested too deeply; expected fewer lists inside of lists", "body"
            )
        case EngineError():
            return ApiError(500, str(error))
    logger.error("a request failed in the server", exc_info=error)
    return ApiError(500, f"the server failed: {innermost(error)}")


def shown(value: object) -> str:
    """What was sent, in a refusal."""
    text = " ".join(repr(value)[: MAX_QUOTED * 2].split())
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 3] + "..."


def _bounded(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."
