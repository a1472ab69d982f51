"""One connection, before there is a request that could be judged: a request's head (its line and headers) has
a bound and a time. The web server has neither, and neither asks for a key, so anybody could fill the memory
or hold descriptors for ever.

A head that is too large gets a 431, one that is too slow a 408, and what is no HTTP a 400, in the one form of
errors; then the connection ends. A new connection on which nothing comes is waited for as long, and closed.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mainspring.server.errors import ApiError
from mainspring.server.http import encode

MAX_HEAD_BYTES = 64 << 10  # beyond the read in which it begins
LINES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    head_timeout_s: ClassVar[float] = 60.0  # see `connection_class`
    _head_bytes = 0
    _in_head = False  # its first byte has come, its last has not
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"the request's headers are above {MAX_HEAD_BYTES} bytes; send less"))

    # --- what the parser says -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_came()
        self._in_head, self._head_bytes = True, 0
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    # --------------------------------------------------------------------------------------------------------

    def _head_came(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a request in HTTP/1.1"))

    def _too_slow(self) -> None:
        if self._in_head:
            words = f"the request's headers did not come within {self.head_timeout_s:g} s"
            self._refuse(ApiError(408, words))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Unless an answer is still being sent: nothing may come in its middle."""
        self._head_came()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = encode(error.reply)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (error.status, LINES[error.status], len(body), body)
            )
        self.transport.close()


def connection_class(head_timeout_s: float) -> type[Connection]:
    return type("Connection", (Connection,), {"head_timeout_s": head_timeout_s})
