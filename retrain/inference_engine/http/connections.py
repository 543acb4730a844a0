"""HTTP/1.1 over asyncio: connections that are kept, one request on each at a time, answers read whole.

h11 speaks the protocol. httpx, around the same h11, costs three times as much a request; what it adds (redirects,
cookies, proxies, HTTP/2) is not for the machines that one trains with.
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
    """A whole answer."""

    status: int
    headers: dict[str, str]
    """By their names in lower case."""
    body: bytes


@dataclass(frozen=True)
class Place:
    """Where connections go."""

    host: str
    port: int
    is_secure: bool


@dataclass(frozen=True)
class Waits:
    """Seconds that may pass until there is a connection, and until the answer is there."""

    connect_s: float
    answer_s: float


class NoConnection(Exception):
    """Nobody answered in time to open a connection."""


class Connection(asyncio.Protocol):
    """One connection, as the event loop calls it."""

    def __init__(self, among: set[Connection]) -> None:
        self.among = among
        """Those that are open."""
        self.wire = h11.Connection(h11.CLIENT)
        self.transport: asyncio.Transport | None = None
        self.waiting: asyncio.Future[Response] | None = None
        self.head: h11.Response | None = None
        self.parts: list[bytes] = []
        self.has_heard = False
        """Whether anything came back for the request under way."""

    @property
    def is_usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self.transport is not None and not self.transport.is_closing() and self.wire.our_state is h11.IDLE

    async def send(self, request: h11.Request, body: bytes) -> Response:
        """Send a request and wait for its answer."""
        assert self.transport is not None
        self.waiting = asyncio.get_running_loop().create_future()
        self.head, self.parts, self.has_heard = None, [], False
        # One packet, one system call.
        parts = [self.wire.send(request), self.wire.send(h11.Data(body)) if body else b""]
        self.transport.write(b"".join([*filter(None, parts), self.wire.send(h11.EndOfMessage()) or b""]))
        return await self.waiting

    def close(self) -> None:
        """Drop it, whatever is under way."""
        if self.transport:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has opened it."""
        self.transport = cast(asyncio.Transport, transport)
        self.among.add(self)

    def data_received(self, data: bytes) -> None:
        """The loop has read something."""
        if self.waiting is None or self.waiting.done():
            # Nothing was asked for.
            self.close()
            return
        self.has_heard = True
        self.wire.receive_data(data)
        self._read()

    def connection_lost(self, error: Exception | None) -> None:
        """The loop has closed it. To some answers the end of the connection is the end."""
        self.among.discard(self)
        if self.waiting is None or self.waiting.done():
            return
        if error is None and self.has_heard:
            self.wire.receive_data(b"")
            self._read()
        if not self.waiting.done():
            self.waiting.set_exception(error or ConnectionResetError("the connection was closed before an answer"))

    def _read(self) -> None:
        assert self.waiting is not None
        try:
            while True:
                event = self.wire.next_event()
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
        if self.wire.our_state is h11.DONE and self.wire.their_state is h11.DONE:
            self.wire.start_next_cycle()
        else:
            self.close()


class Connections:
    """As many as there are requests under way, kept for the next ones."""

    def __init__(self) -> None:
        self.idle: dict[Place, list[Connection]] = {}
        self.open: set[Connection] = set()
        # A process may have so many files and connections open; half of them are for others.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.room = asyncio.Semaphore(max(16, limit // 2) if limit > 0 else 4096)
        self.context: ssl.SSLContext | None = None

    async def send(self, method: str, address: str, headers: dict[str, str], body: bytes, waits: Waits) -> Response:
        """Send a request, and read the whole answer. One that found its kept connection closed is sent once more."""
        place, target, host = _parts_of(address)
        named = [("Host", host), *headers.items(), *([("Content-Length", str(len(body)))] if body else [])]
        request = h11.Request(method=method, target=target, headers=named)
        async with self.room:
            kept = self._kept(place)
            if kept:
                try:
                    return await self._exchange(place, kept, request, body, waits)
                except ConnectionError:
                    # Servers close idle connections after some seconds, perhaps just now.
                    if kept.has_heard:
                        raise
            return await self._exchange(place, await self._open(place, waits), request, body, waits)

    async def close(self) -> None:
        """Close all of them, and wait until they are closed."""
        for connection in self.open:
            connection.close()
        while self.open:
            await asyncio.sleep(0)

    async def _exchange(
        self, place: Place, connection: Connection, request: h11.Request, body: bytes, waits: Waits
    ) -> Response:
        try:
            async with asyncio.timeout(waits.answer_s):
                response = await connection.send(request, body)
        except BaseException:
            connection.close()
            raise
        if connection.is_usable:
            self.idle.setdefault(place, []).append(connection)
        return response

    def _kept(self, place: Place) -> Connection | None:
        idle = self.idle.get(place, [])
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _open(self, place: Place, waits: Waits) -> Connection:
        if place.is_secure and self.context is None:
            self.context = httpx.create_ssl_context()
        loop = asyncio.get_running_loop()
        secure = self.context if place.is_secure else None
        try:
            async with asyncio.timeout(waits.connect_s):
                made = await loop.create_connection(lambda: Connection(self.open), place.host, place.port, ssl=secure)
        except TimeoutError as error:
            raise NoConnection from error
        return made[1]


@lru_cache(maxsize=1024)
def _parts_of(address: str) -> tuple[Place, str, str]:
    """Where an address leads to, what is asked for there, and the name it goes by."""
    parts = urlsplit(address)
    secure = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    port = parts.port or (443 if secure else 80)
    return Place(parts.hostname or "", port, secure), target, parts.netloc.rpartition("@")[2]
