"""One asynchronous HTTP client with a shared connection pool, on an event loop of its own thread."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import h11

from retrain.inference_engine.http.connections import Connections, NoConnection, Response, Waits

KEY_VARIABLE = "INFERENCE_API_KEY"
CONNECT_S = 10.0
# What may well be gone when the same request is sent again.
PASSING = (408, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE_S = 60.0

T = TypeVar("T")


class Transient(Exception):
    """A failure that may pass. `down`: the connection failed; `status` and `after`: what the server said, if it did."""

    def __init__(self, text: str, down: bool = False, status: int = 0, after: float = 0.0) -> None:
        super().__init__(text)
        self.down = down
        self.status = status
        self.after = after


class Refused(Exception):
    """The server understood the request and will not do it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it answered {status}: {text}")
        self.status = status
        self.text = text


class Client:
    """Runs coroutines for threads that wait for them, and makes the HTTP calls inside."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="retrain-http", daemon=True)
        self.thread.start()
        key = os.environ.get(KEY_VARIABLE, "")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.connections = Connections()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine; an interrupt of the waiting thread cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, address: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """GET, or POST a body; the parsed answer. A plain text answer comes back as text."""
        limit = timeout_s or self.timeout_s
        waits = Waits(min(CONNECT_S, limit), limit)
        method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        try:
            response = await self.connections.send(method, address, self.headers, content, waits)
        except NoConnection as error:
            raise Transient(f"no connection within {waits.connect_s:.0f} s", down=True) from error
        except TimeoutError as error:
            raise Transient(f"no answer within {limit:.0f} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise Transient(f"{type(error).__name__}: {error}", down=True) from error
        return _content(response)

    def close(self) -> None:
        """Close connections and end the thread."""
        self.run(self.connections.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def gather_all(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order; at the first error the others are ended and waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _content(response: Response) -> Any:
    if response.status in PASSING:
        told = response.headers.get("retry-after", "")
        pause = min(float(told), LONGEST_PAUSE_S) if told.isdigit() else 0.0
        text = f"it answered {response.status}: {_message(response)}"
        raise Transient(text, status=response.status, after=pause)
    if response.status >= 300:
        raise Refused(response.status, _message(response))
    if not response.headers.get("content-type", "").startswith("application/json"):
        return response.body.decode(errors="replace")
    try:
        return json.loads(response.body)
    except ValueError as error:
        raise Transient(f"it sent JSON that does not parse ({error})") from error


def _message(response: Response) -> str:
    """What a server says went wrong; every kind has its own shape for that."""
    try:
        told = json.loads(response.body)
    except ValueError:
        told = response.body.decode(errors="replace")
    while isinstance(told, dict):
        told = told.get("error") or told.get("message") or told.get("error_message") or told.get("detail") or str(told)
    return " ".join(str(told).split())[:300]
