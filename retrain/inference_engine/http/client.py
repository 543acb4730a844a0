"""An asynchronous HTTP client with a connection pool, on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import h11

from retrain.errors import ConfigError
from retrain.inference_engine.http.connections import Connections, ConnectTimeout, Response, Timeouts
from retrain.types import JsonObject

KEY_VARIABLE = "INFERENCE_API_KEY"
CONNECT_S = 10.0
# Status codes worth a retry.
RETRYABLE = (408, 425, 429, 500, 502, 503, 504)
MAX_RETRY_AFTER_S = 60.0

T = TypeVar("T")
Work = Coroutine[object, object, T]


class Transient(Exception):
    """A failure worth a retry. `down`: the connection failed; `status` and `retry_after` are the server's."""

    def __init__(self, text: str, down: bool = False, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.down = down
        self.status = status
        self.retry_after = retry_after


class RequestRejected(Exception):
    """The server rejected the request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it replied {status}: {text}")
        self.status = status
        self.text = text


def read_api_key() -> str:
    """The key of the servers, or ""."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{KEY_VARIABLE} contains invalid characters.  Try: copy it again")
    return key


class Client:
    """Runs coroutines for waiting threads, and makes HTTP calls."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        key = read_api_key()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="retrain-http", daemon=True)
        self.thread.start()
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.connections = Connections()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.loop.is_closed()

    def submit(self, work: Work[T]) -> Future[T]:
        """Schedule a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Work[T]) -> T:
        """Run a coroutine and wait for it; an interrupt cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call(self, address: str, body: JsonObject | None = None, timeout_s: float | None = None) -> Any:
        """GET, or POST a body; returns parsed JSON, or text for any other content type."""
        limit = timeout_s or self.timeout_s
        timeouts = Timeouts(min(CONNECT_S, limit), limit)
        method, content = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        try:
            response = await self.connections.send(method, address, self.headers, content, timeouts)
        except ConnectTimeout as error:
            raise Transient(f"no connection within {timeouts.connect_s:.0f} s", down=True) from error
        except TimeoutError as error:
            raise Transient(f"no reply within {limit:.0f} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise Transient(f"{type(error).__name__}: {error}", down=True) from error
        return _content(response)

    def close(self) -> None:
        """Cancel what is left, close connections and end the thread."""
        self.run(_cancel_others())
        self.run(self.connections.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def gather_all(work: list[Work[T]]) -> list[T]:
    """The results of all, in order; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _content(response: Response) -> Any:
    if response.status in RETRYABLE:
        header = response.headers.get("retry-after", "")
        pause = min(float(header), MAX_RETRY_AFTER_S) if header.isdecimal() else 0.0
        text = f"it replied {response.status}: {_message(response)}"
        raise Transient(text, status=response.status, retry_after=pause)
    if response.status >= 300:
        raise RequestRejected(response.status, _message(response))
    if not response.headers.get("content-type", "").startswith("application/json"):
        return response.body.decode(errors="replace")
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise Transient(f"it sent invalid JSON ({error})") from error


def _message(response: Response) -> str:
    """The server's error message; every kind of server has its own format."""
    try:
        body = json.loads(response.body)
    except (ValueError, RecursionError):
        body = response.body.decode(errors="replace")
    while isinstance(body, dict):
        body = body.get("error") or body.get("message") or body.get("error_message") or body.get("detail") or str(body)
    text = " ".join(str(body).split())[:300]
    return "a web page" if text.lower().startswith(("<!doctype html", "<html")) else text
