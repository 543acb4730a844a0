"""Questions to a server that speaks OpenAI's chat completions: many at once, patient, and counted.

What may pass (429, 5xx, a time-out, a lost connection) is tried again, after the time the server asks for or a growing
one. What will not pass (a refused key, an unknown model, an answer that is no JSON) fails at once.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from retrain.isolation.redaction import HIDDEN, redact

Messages = Sequence[Mapping[str, str]]

ATTEMPTS = 6
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
_SHOWN = 200
# Codes of 4xx that a later attempt may not meet: time-out, conflict, too early, too many requests.
_PASSING = (408, 409, 425, 429)


@dataclass(frozen=True)
class Server:
    """Where the model is, and how long and how hard it may be asked. The key is never shown."""

    url: str
    model: str
    key: str = ""
    timeout_s: float = 60.0
    concurrency: int = 32

    def __repr__(self) -> str:
        return f"Server({self.shown_url!r}, {self.model!r})"

    @property
    def shown_url(self) -> str:
        """The address without any password or query in it."""
        return str(httpx.URL(self.url).copy_with(userinfo=b"", query=None, fragment=None))


class ChatError(Exception):
    """A question that got no answer. `passing` says that another attempt may succeed."""

    def __init__(self, message: str, *, passing: bool = False, wait_s: float = 0.0, status: int = 0) -> None:
        super().__init__(message)
        self.passing = passing
        self.wait_s = wait_s
        self.status = status


class ChatTimeout(ChatError):
    """No answer within the time given, however often it was tried."""


@dataclass
class Usage:
    """What was asked and what it cost."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answered: int = 0
    latency_s: float = 0.0
    """Sum over the requests that were answered."""


class ChatClient:
    """Asks one model. Everything but the construction happens in one event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.usage = Usage()
        self.options: dict[str, object] = {"temperature": 0}
        self._slots = asyncio.Semaphore(server.concurrency)
        self._pause_until = 0.0
        headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
        limits = httpx.Limits(max_connections=server.concurrency, max_keepalive_connections=server.concurrency)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=server.timeout_s)

    async def ask(self, messages: Messages, attempts: int = ATTEMPTS) -> str:
        """Return what the model answers, or raise the last ChatError."""
        for attempt in range(1, attempts + 1):
            try:
                return await self._ask_once(messages)
            except ChatError as error:
                if not error.passing or attempt == attempts:
                    raise
                self.usage.retries += 1
                # Uneven waits, so that requests which failed together do not come back together.
                growing_s = FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(error.wait_s, growing_s), LONGEST_WAIT_S))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _ask_once(self, messages: Messages) -> str:
        async with self._slots:
            # When the server asks one request to wait, the others need not find out for themselves.
            while (left_s := self._pause_until - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            self.usage.requests += 1
            began = time.monotonic()
            body = {"model": self.server.model, "messages": list(messages), **self.options}
            try:
                # httpx limits each read; a server that trickles must not hold a slot for ever.
                async with asyncio.timeout(self.server.timeout_s):
                    reply = await self._http.post(f"{self.server.url.rstrip('/')}/chat/completions", json=body)
            except (TimeoutError, httpx.TimeoutException) as error:
                text = f"no answer from {self.server.shown_url} within {self.server.timeout_s:g} s"
                raise ChatTimeout(text, passing=True) from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                text = f"{self.server.shown_url} cannot be reached: {redact(str(error)) or type(error).__name__}"
                raise ChatError(text, passing=True) from error
            answer = self._read(reply)
            self.usage.answered += 1
            self.usage.latency_s += time.monotonic() - began
            return answer

    def _read(self, reply: httpx.Response) -> str:
        body = _parse_object(reply)
        if not reply.is_success:
            raise self._refusal(reply, body)
        if body is None:
            raise ChatError(
                f"{self.server.shown_url} answered {self._shorten(reply.text)}, which is not a chat completion; "
                "its address usually ends in /v1"
            )
        self._count(body.get("usage"))
        choices = body.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        message = first.get("message") if isinstance(first, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str):
            raise ChatError(f"{self.server.shown_url} answered without any text: {self._shorten(reply.text)}")
        return content

    def _refusal(self, reply: httpx.Response, body: Mapping[str, Any] | None) -> ChatError:
        error = (body or {}).get("error")
        error = error if isinstance(error, dict) else {"message": error or (body or {}).get("message")}
        text = self._shorten(str(error.get("message") or reply.text))
        # A quota that is used up is answered like a rate limit, but no waiting helps.
        passing = (reply.status_code in _PASSING or reply.is_server_error) and error.get("code") != "insufficient_quota"
        wait_s = _read_wait(reply.headers.get("Retry-After", ""))
        if passing and wait_s:
            self._pause_until = max(self._pause_until, time.monotonic() + min(wait_s, LONGEST_WAIT_S))
        message = f"{self.server.shown_url} answered {reply.status_code} {reply.reason_phrase}: {text}"
        return ChatError(message, passing=passing, wait_s=wait_s, status=reply.status_code)

    def _count(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            self.usage.prompt_tokens += prompt if isinstance(prompt, int) else 0
            self.usage.completion_tokens += completion if isinstance(completion, int) else 0

    def _shorten(self, text: str) -> str:
        # Some servers repeat the key that they refuse.
        text = " ".join(redact(text.replace(self.server.key, HIDDEN) if self.server.key else text).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _parse_object(reply: httpx.Response) -> dict[str, Any] | None:
    try:
        body = reply.json()
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _read_wait(text: str) -> float:
    """Seconds that a Retry-After header asks for: it holds a number or a date."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
