"""HTTP/1.1 over asyncio with keep-alive: one request at a time per connection, responses read completely.

h11 implements the protocol. httpx, also based on h11, takes three times as long per request; what it adds (redirects,
cookies, proxies, HTTP/2) is not needed here.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import h11
import httpx


@dataclass(frozen=True)
class Response:
    """A complete response."""

    status: int
    headers: dict[str, str]
    """Names are in lower case."""
    body: bytes


@dataclass(frozen=True)
class Origin:
    """Target of a connection."""

    host: str
    port: int
    is_secure: bool


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait for a connection, and for the response."""

    connect_s: float
    response_s: float


class ConnectTimeout(Exception):
    """No connection within the time limit."""


class Connection(asyncio.Protocol):
    """One connection, driven by the event loop."""

    def __init__(self, open_connections: set[Connection]) -> None:
        self.open_connections = open_connections
        """All open connections."""
        self.protocol = h11.Connection(h11.CLIENT)
        self.transport: asyncio.Transport | None = None
        self.waiting: asyncio.Future[Response] | None = None
        self.head: h11.Response | None = None
        self.parts: list[bytes] = []
        self.has_received = False
        """Whether any data was received for the current request."""

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self.transport is not None and not self.transport.is_closing() and self.protocol.our_state is h11.IDLE

    async def send(self, request: h11.Request, body: bytes) -> Response:
        """Send a request and wait for the response."""
        assert self.transport is not None
        self.waiting = asyncio.get_running_loop().create_future()
        self.head, self.parts, self.has_received = None, [], False
        # One packet, one system call.
        parts = [self.protocol.send(request), self.protocol.send(h11.Data(body)) if body else b""]
        self.transport.write(b"".join([*filter(None, parts), self.protocol.send(h11.EndOfMessage()) or b""]))
        return await self.waiting

    def close(self) -> None:
        """Abort the connection."""
        if self.transport:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop once connected."""
        self.transport = cast(asyncio.Transport, transport)
        self.open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Called by the loop with received data."""
        if self.waiting is None or self.waiting.done():
            # No request is pending.
            self.close()
            return
        self.has_received = True
        self.protocol.receive_data(data)
        self._read()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the loop when the connection closes, which may end a response without a length."""
        self.open_connections.discard(self)
        if self.waiting is None or self.waiting.done():
            return
        if error is None and self.has_received:
            self.protocol.receive_data(b"")
            self._read()
        if not self.waiting.done():
            self.waiting.set_exception(error or ConnectionResetError("the connection was closed before a response"))

    def _read(self) -> None:
        assert self.waiting is not None
        try:
            while True:
                event = self.protocol.next_event()
                if isinstance(event, h11.Response):
                    self.head = event
                elif isinstance(event, h11.Data):
                    self.parts.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self._finish()
                    return
                elif not isinstance(event, h11.InformationalResponse):
                    return
        except h11.RemoteProtocolError as error:
            self.waiting.set_exception(error)
            self.close()

    def _finish(self) -> None:
        assert self.waiting is not None and self.head is not None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.head.headers}
        self.waiting.set_result(Response(self.head.status_code, headers, b"".join(self.parts)))
        are_done = self.protocol.our_state is h11.DONE and self.protocol.their_state is h11.DONE
        # What arrived after the response would be taken for the next one.
        if are_done and not self.protocol.trailing_data[0]:
            self.protocol.start_next_cycle()
        else:
            self.close()


class Connections:
    """A pool with one connection per concurrent request, kept alive for later ones."""

    def __init__(self) -> None:
        self.idle: dict[Origin, list[Connection]] = {}
        self.open: set[Connection] = set()
        # Use at most half of the file descriptors that the process may open.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.room = asyncio.Semaphore(max(16, limit // 2) if limit > 0 else 4096)
        self.context: ssl.SSLContext | None = None

    async def send(
        self, method: str, address: str, headers: dict[str, str], body: bytes, timeouts: Timeouts
    ) -> Response:
        """Send a request and read the response. Retried once if a kept-alive connection turns out to be closed."""
        origin, target, host = _parts_of(address)
        named = [("Host", host), *headers.items(), *([("Content-Length", str(len(body)))] if body else [])]
        request = h11.Request(method=method, target=target, headers=named)
        async with self.room:
            kept = self._kept(origin)
            if kept:
                try:
                    return await self._exchange(origin, kept, request, body, timeouts)
                except ConnectionError:
                    # Servers close idle connections after some seconds.
                    if kept.has_received:
                        raise
            return await self._exchange(origin, await self._open(origin, timeouts), request, body, timeouts)

    async def close(self) -> None:
        """Close all connections and wait until they are closed."""
        for connection in self.open:
            connection.close()
        while self.open:
            await asyncio.sleep(0)

    async def _exchange(
        self, origin: Origin, connection: Connection, request: h11.Request, body: bytes, timeouts: Timeouts
    ) -> Response:
        try:
            async with asyncio.timeout(timeouts.response_s):
                response = await connection.send(request, body)
        except BaseException:
            connection.close()
            raise
        if connection.is_usable:
            self.idle.setdefault(origin, []).append(connection)
        return response

    def _kept(self, origin: Origin) -> Connection | None:
        idle = self.idle.get(origin, [])
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _open(self, origin: Origin, timeouts: Timeouts) -> Connection:
        if origin.is_secure and self.context is None:
            self.context = httpx.create_ssl_context()
        loop = asyncio.get_running_loop()
        secure = self.context if origin.is_secure else None
        try:
            async with asyncio.timeout(timeouts.connect_s):
                made = await loop.create_connection(lambda: Connection(self.open), origin.host, origin.port, ssl=secure)
        except TimeoutError as error:
            raise ConnectTimeout from error
        return made[1]


@lru_cache(maxsize=1024)
def _parts_of(address: str) -> tuple[Origin, str, str]:
    """Origin, request target and Host header of an address."""
    parts = urlsplit(address)
    secure = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    port = parts.port or (443 if secure else 80)
    return Origin(parts.hostname or "", port, secure), target, parts.netloc.rpartition("@")[2]
