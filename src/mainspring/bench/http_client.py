"""A small HTTP/1.1 client for many streams at once, on asyncio alone.

It measures a server, so it must cost little beside it: one connection per request in flight, kept and used
again; bodies are handed on as they come. It understands what an OpenAI-compatible server answers: a length,
chunks, or a body that ends with the connection. No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from mainspring.base.errors import ConfigError

LINE_LIMIT_BYTES = 1 << 20  # of a line of the head; chunks are read as blocks
READ_BYTES = 1 << 16


class HttpError(Exception):
    """The other side does not speak HTTP, or has stopped in the middle."""


@dataclass(slots=True)
class Response:
    status: int
    headers: Mapping[str, str]  # names in lower case
    _reader: asyncio.StreamReader
    _is_whole: bool = False  # the body was read to its end

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Once."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            async for block in self._chunks():
                yield block
        elif (length := self.headers.get("content-length")) is not None:
            left = int(length)
            while left:
                if not (block := await self._reader.read(min(left, READ_BYTES))):
                    raise HttpError("the connection ended inside a body")
                left -= len(block)
                yield block
        else:
            while block := await self._reader.read(READ_BYTES):
                yield block
        self._is_whole = True

    async def read(self) -> bytes:
        return b"".join([block async for block in self.blocks()])

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await _line(self._reader)
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise HttpError(f"a chunk begins with {line[:20]!r}") from None
            if not size:
                break
            block = await self._reader.readexactly(size + 2)
            yield block[:-2]
        while await _line(self._reader):  # trailers
            pass

    @property
    def leaves_connection_usable(self) -> bool:
        has_length = {"content-length", "transfer-encoding"} & self.headers.keys()
        return self._is_whole and bool(has_length) and self.headers.get("connection", "").lower() != "close"


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n"))[:-2]
    except asyncio.LimitOverrunError:
        raise HttpError("a line of the answer's head is too long") from None


class HttpClient:
    """Requests to one server. Not for several threads."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        """Raises `ConfigError` if `base_url` is not one of http or https."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"base_url {base_url!r} must be like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = "".join(
            f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **(headers or {})}.items()
        )
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Response]:
        """The head of the answer has come; the body may be read inside the block. Leaving it early closes the
        connection. Raises `OSError` or `HttpError`."""
        message = self._message(method, path, body)
        reader, writer, response = await self._send(message)
        try:
            yield response
        finally:
            if response.leaves_connection_usable:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def fetch(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and whole body."""
        async with self.request(method, path, body) as response:
            return response.status, await response.read()

    def _message(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + (body or b"")

    async def _send(self, message: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Response]:
        """On a kept connection if there is one that still works: the server may have closed it meanwhile."""
        while self._idle:
            reader, writer = self._idle.pop()
            if writer.is_closing() or reader.at_eof():
                writer.close()
                continue
            try:
                return reader, writer, await self._exchange(reader, writer, message)
            except (OSError, asyncio.IncompleteReadError):
                continue  # before a word of the answer: it was closed while idle
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._ssl, limit=LINE_LIMIT_BYTES
        )
        try:
            return reader, writer, await self._exchange(reader, writer, message)
        except asyncio.IncompleteReadError:
            raise HttpError("the connection ended before an answer") from None

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes
    ) -> Response:
        try:
            writer.write(message)
            await writer.drain()
            version, _, rest = (await _line(reader)).decode("latin-1").partition(" ")
            if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
                raise HttpError(f"the answer begins with {version[:20]!r}, which is not HTTP/1.1")
            headers = {}
            while line := await _line(reader):
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.strip().lower()] = value.strip()
            return Response(int(rest[:3]), headers, reader)
        except BaseException:
            writer.close()
            raise

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, writer in self._idle:
            writer.close()
        for _, writer in self._idle:
            with suppress(OSError):
                await writer.wait_closed()
        self._idle.clear()


async def server_sent_events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event of a stream, as it is complete."""
    rest = b""
    async for block in blocks:
        rest += block
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
