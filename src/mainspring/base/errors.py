"""What can go wrong, and whose problem it is.

    EngineError
    ├── RequestError        one request is at fault: refuse it, serve the rest   (HTTP 400)
    ├── ConfigError         a setting is wrong: say which, and what to set        (exit status 2)
    ├── CheckpointError     a model file is missing, damaged or not supported     (exit status 2)
    ├── QueueOverflowError  too many requests wait already: try again later      (HTTP 503)
    ├── PeerGoneError       another rank has ended: it, not who raises this, knows the cause
    └── EngineDeadError     nothing can be served any more: every waiting client is told

The first three are a user's to mend, so they are also `ValueError`s and their message is one line that
says what was wrong, what was expected and what to change. Asserts elsewhere are for our own mistakes.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything mainspring raises on purpose."""


class RequestError(EngineError, ValueError):
    """One request cannot be served. `param` is the field at fault, under the name its sender knows."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(EngineError, ValueError):
    """The engine cannot start with these settings. All that is wrong is reported at once, a line each."""


class CheckpointError(EngineError, ValueError):
    """A model file is missing, damaged or of a kind that is not supported."""


class QueueOverflowError(EngineError, RuntimeError):
    """One request is refused, for as many as the settings allow wait for their first token already."""


class PeerGoneError(EngineError):
    """Another rank has ended: it, not who raises this, knows the cause."""


class EngineDeadError(EngineError, RuntimeError):
    """The engine core has ended. The message carries the innermost cause: type, text and place."""


def innermost(error: BaseException) -> str:
    """`Type: message (file:line)` of the first cause of `error`, the part that tells what to mend."""
    seen = {id(error)}
    while (
        cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        if id(cause) in seen:
            break
        seen.add(id(cause))
        error = cause
    if isinstance(error, EngineDeadError):  # its message is a cause in words, perhaps another process's
        return str(error)
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        place = f" ({code.co_filename.rsplit('/', 1)[-1]}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return f"{type(error).__name__}: {error}{place}"
