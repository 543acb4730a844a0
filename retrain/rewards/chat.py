"""A client for OpenAI-compatible chat completions, with concurrency, retries and usage counts.

Transient errors (429, 5xx, timeouts, lost connections) are retried after the time the server asks for or with
exponential back-off. Permanent errors (an invalid key, an unknown model, a reply that is not JSON) fail immediately.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from retrain.checks.connections import explain_redirect
from retrain.isolation.redaction import HIDDEN, redact

Messages = Sequence[Mapping[str, str]]

ATTEMPTS = 6
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
LONG_WAIT_S = 5.0
"""Longer waits are reported."""
_MAX_SHOWN = 200
# Transient 4xx codes: timeout, conflict, too early, too many requests.
_TRANSIENT_CODES = (408, 409, 425, 429)


@dataclass(frozen=True)
class Server:
    """The server, with timeout and concurrency. The key is never shown."""

    url: str
    model: str
    key: str = ""
    timeout_s: float = 60.0
    concurrency: int = 32

    def __repr__(self) -> str:
        return f"Server({self.shown_url!r}, {self.model!r})"

    @property
    def shown_url(self) -> str:
        """The URL without password and query."""
        return str(httpx.URL(self.url).copy_with(userinfo=b"", query=None, fragment=None))


class ChatError(Exception):
    """A failed request. `transient` errors may succeed when retried."""

    def __init__(self, message: str, *, transient: bool = False, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(message)
        self.transient = transient
        self.wait_s = wait_s
        self.status = status


class ChatTimeout(ChatError):
    """No reply within the time limit."""


@dataclass
class Usage:
    """Requests and tokens."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answered: int = 0
    latency_s: float = 0.0
    """Sum over successful requests."""


class ChatClient:
    """A client for one model. Everything but the constructor runs in one event loop."""

    def __init__(self, server: Server, log: Callable[[str], None] = lambda line: None) -> None:
        self.server = server
        self._log = log
        self.usage = Usage()
        self.options: dict[str, object] = {"temperature": 0}
        self._slots = asyncio.Semaphore(server.concurrency)
        self._pause_until = 0.0
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
        # An odd cookie, sent back, would make every later request fail.
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=server.timeout_s, cookies=no_cookies)

    async def ask(self, messages: Messages, attempts: int = ATTEMPTS) -> str:
        """Return the model's reply, or raise the last ChatError."""
        for attempt in range(1, attempts + 1):
            try:
                return await self._ask_once(messages)
            except ChatError as error:
                if not error.transient or attempt == attempts:
                    raise
                self.usage.retries += 1
                # Jitter, so that requests that failed together are not retried together.
                growing_s = FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(error.wait_s, growing_s), LONGEST_WAIT_S))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask_once(self, messages: Messages) -> str:
        async with self._slots:
            # A Retry-After applies to all requests.
            while (left_s := self._pause_until - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            self.usage.requests += 1
            began = time.monotonic()
            body = {"model": self.server.model, "messages": list(messages), **self.options}
            try:
                # httpx limits each read; a slow stream must not hold a slot forever.
                async with asyncio.timeout(self.server.timeout_s):
                    reply = await self._http.post(f"{self.server.url.rstrip('/')}/chat/completions", json=body)
            except (TimeoutError, httpx.TimeoutException) as error:
                text = f"no reply from {self.server.shown_url} within {self.server.timeout_s:g} s"
                raise ChatTimeout(text, transient=True) from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                text = f"{self.server.shown_url} cannot be reached: {redact(str(error)) or type(error).__name__}"
                raise ChatError(text, transient=True) from error
            answer = self._read(reply)
            self.usage.answered += 1
            self.usage.latency_s += time.monotonic() - began
            return answer

    def _read(self, reply: httpx.Response) -> str:
        body = _parse_object(reply)
        if not reply.is_success:
            raise self._error(reply, body)
        if body is None:
            raise ChatError(
                f"{self.server.shown_url} returned {self._shorten(_text_of(reply))}, which is not a chat completion; "
                "the URL usually ends in /v1"
            )
        self._count(body.get("usage"))
        choices = body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str):
            raise ChatError(f"{self.server.shown_url} returned no text: {self._shorten(_text_of(reply))}")
        return content

    def _error(self, reply: httpx.Response, body: Mapping[str, object] | None) -> ChatError:
        error = (body or {}).get("error")
        error = error if isinstance(error, dict) else {"message": error or (body or {}).get("message")}
        moved = explain_redirect(self.server.url, reply.headers.get("Location", ""))
        text = moved or self._shorten(str(error.get("message") or _text_of(reply)))
        # An exhausted quota has the code of a rate limit, but is permanent.
        transient = (reply.status_code in _TRANSIENT_CODES or reply.is_server_error) and error.get(
            "code"
        ) != "insufficient_quota"
        wait_s = _read_wait(reply.headers.get("Retry-After", ""))
        if transient and wait_s:
            until = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
            if until > self._pause_until + LONG_WAIT_S:
                pause = until - time.monotonic()
                asked = "as it asks for" if wait_s <= LONGEST_WAIT_S else f"though it asks for {wait_s:,.0f} s"
                self._log(f"{self.server.shown_url} returned {reply.status_code}; waiting {pause:.0f} s, {asked}")
            self._pause_until = max(self._pause_until, until)
        message = f"{self.server.shown_url} returned {reply.status_code} {reply.reason_phrase}: {text}"
        return ChatError(message, transient=transient, wait_s=wait_s, status=reply.status_code)

    def _count(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            self.usage.prompt_tokens += prompt if isinstance(prompt, int) else 0
            self.usage.completion_tokens += completion if isinstance(completion, int) else 0

    def _shorten(self, text: str) -> str:
        # Some servers repeat an invalid key.
        text = " ".join(redact(text.replace(self.server.key, HIDDEN) if self.server.key else text).split())
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _parse_object(reply: httpx.Response) -> dict[str, object] | None:
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _read_wait(text: str) -> float:
    """Seconds of a Retry-After header, which is a number or a date."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _text_of(reply: httpx.Response) -> str:
    """The body, whatever encoding its header names."""
    return reply.content.decode("utf-8", "replace")
