"""The servers of one engine: requests go round-robin to servers that respond and have the newest adapter.

A failed request is retried, on another server if there is one, a bounded number of times. A lost server is used again
once it responds and has loaded the adapter; if none is left, the fleet waits for one, up to a limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from retrain.errors import RolloutError
from retrain.inference_engine import Progress
from retrain.inference_engine.http.client import KEY_VARIABLE, Client, RequestRejected, Transient, gather_all
from retrain.inference_engine.http.spec import (
    Adapter,
    CompletionRequest,
    CompletionResult,
    IncompleteReply,
    ServerSpec,
)

ATTEMPTS = 5
# Rounding may lift a log-prob slightly above 0.
MAX_LOGPROB = 0.05
FIRST_PAUSE_S = 0.25
POLL_S = 0.5
# Health checks respond at once; loading a first adapter may compile kernels.
HEALTH_S, LOAD_S = 10.0, 120.0
# Of a run that ends: a server that hangs keeps the adapter.
FAREWELL_S = 5.0
# A server that hangs this often in a row, while others do not, is left out.
MAX_HANGS = 2


class NoServerAvailable(RolloutError):
    """No server became available in time."""


class LaunchedServerExited(RolloutError):
    """The server that this run started has exited."""


@dataclass(eq=False)
class Server:
    """One server: its address, model and loaded adapters."""

    url: str
    model: str = ""
    """The base model's name on the server."""
    ready: bool = False
    """Whether it responds and has the newest adapter."""
    loaded: list[str] = field(default_factory=list)
    trouble: str = ""
    hangs: int = 0
    """Adapters in a row with which it has left a request without a reply."""
    is_noted: bool = False
    """Whether a failure of it was told."""


class Fleet:
    """All methods except the constructor run on the client's event loop."""

    def __init__(self, spec: ServerSpec, urls: list[str], client: Client, wait_s: float, progress: Progress) -> None:
        self.spec = spec
        self.servers = [Server(url) for url in urls]
        self.client = client
        self.wait_s = wait_s
        self.progress = progress
        self.vocabulary = 0
        self.adapter: Adapter | None = None
        self.turn = 0
        self.reviving = asyncio.Lock()
        self.exit_reason: Callable[[], str] = lambda: ""
        """Why the launched server exited; empty while it runs, or if none was launched."""
        self.log: Callable[[str], None] = lambda line: None
        self.remedy = ""
        """What to try if the launched server does not come up."""

    async def complete(self, request: CompletionRequest) -> tuple[Server, list[CompletionResult]]:
        """All completions of one request, from one server."""
        trouble, server = "", self.servers[0]
        failed: list[Server] = []
        for attempt in range(ATTEMPTS):
            server = await self.pick(failed)
            pause = 0.0
            try:
                results = await self.send(server, request)
                server.hangs = 0
                return server, results
            except Transient as error:
                trouble, pause = str(error), error.retry_after or FIRST_PAUSE_S * 2**attempt
                failed.append(server)
                self._lose(server, error)
            except RequestRejected as error:
                trouble = str(error)
                if error.status in (401, 403):
                    trouble += f". The server requires a different API key than the one in {KEY_VARIABLE}."
                if self.adapter is None or self.adapter.name not in error.text:
                    break
                # It restarted and lost its adapter.
                server.ready, server.trouble, server.loaded = False, trouble, []
            except IncompleteReply as error:
                trouble = str(error)
                break
            if not any(other.ready and other not in failed for other in self.servers):
                await asyncio.sleep(pause)
        raise RolloutError(
            f"{server.url} did not complete a prompt of {len(request.prompt_ids)} tokens in {attempt + 1} "
            f"attempt{'s' if attempt else ''}. Last error: {trouble}"
        )

    def _lose(self, server: Server, error: Transient) -> None:
        """Note a failure. A server that is down, or hangs and has others beside it, gets no more requests for now."""
        is_hanging = not error.down and isinstance(error.__cause__, TimeoutError) and len(self.servers) > 1
        if server.ready and (error.down or is_hanging):
            server.ready, server.trouble = False, str(error)
            server.hangs += is_hanging
        if not server.is_noted:
            server.is_noted = True
            self.log(f"Warning: {server.url}: {str(error).rstrip('.')}. Requests that fail are sent again.")

    async def send_patiently(self, server: Server, request: CompletionRequest) -> list[CompletionResult]:
        """As `send`, again while the server replies with an error that may pass."""
        for attempt in range(ATTEMPTS - 1):
            try:
                return await self.send(server, request)
            except Transient as error:
                if not error.status:
                    raise
                await asyncio.sleep(error.retry_after or FIRST_PAUSE_S * 2**attempt)
        return await self.send(server, request)

    async def send(self, server: Server, request: CompletionRequest) -> list[CompletionResult]:
        """Send one request to one server and validate the reply."""
        body = self.spec.request(server.model, self.adapter, request)
        reply = await self.client.call(server.url + self.spec.route, body)
        if isinstance(reply, str):
            raise Transient(f"it sent text instead of completions: {reply[:60]!r}")
        try:
            results = self.spec.read(reply)
            problem = self._problem_with(results, request)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
            raise Transient(f"it did not send completions ({error!r})") from error
        if problem:
            raise Transient(problem)
        return results

    def _problem_with(self, results: list[CompletionResult], request: CompletionRequest) -> str:
        if len(results) != request.sampling.n:
            return f"it sent {len(results)} of {request.sampling.n} completions"
        asked = request.prompt_ids.tolist()
        for result in results:
            if result.prompt_ids is not None and result.prompt_ids != asked:
                return "it sent the completion of another prompt"
            if len(result.token_ids) != len(result.logprobs):
                return f"it sent {len(result.logprobs)} log-probs for {len(result.token_ids)} tokens"
            if not 0 < len(result.token_ids) <= request.sampling.max_tokens:
                return (
                    f"it sent {len(result.token_ids)} tokens where at most {request.sampling.max_tokens} were asked for"
                )
            # Built-ins only, for speed: a step has tens of thousands of tokens.
            ids, logprobs = result.token_ids, result.logprobs
            if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < self.vocabulary:
                return "it sent token ids outside the vocabulary"
            if not set(map(type, logprobs)) <= {int, float} or not all(map(math.isfinite, logprobs)):
                return "it sent log-probs that are not numbers"
            if max(logprobs) > MAX_LOGPROB:
                return f"it sent a log-prob of {max(logprobs):.3g}, above 0"
            if len(result.token_ids) < request.sampling.max_tokens and result.token_ids[-1] not in request.stop_ids:
                return f"it stopped after token {result.token_ids[-1]}, which is not one of the model's stop tokens"
        return ""

    async def pick(self, failed: Sequence[Server] = ()) -> Server:
        """The next ready server, round-robin, one that has not `failed` if there is one; waits if none is ready."""
        started = time.monotonic()
        while True:
            for avoided in (failed, ()):
                for _ in self.servers:
                    self.turn = (self.turn + 1) % len(self.servers)
                    server = self.servers[self.turn]
                    if server.ready and server not in avoided:
                        return server
            async with self.reviving:
                if not any(server.ready for server in self.servers):
                    await self._revive_all()
            if any(server.ready for server in self.servers):
                continue
            self.raise_if_exited()
            waited = time.monotonic() - started
            if waited >= self.wait_s:
                states = "; ".join(f"{server.url} ({server.trouble})" for server in self.servers)
                raise NoServerAvailable(f"no inference server is available after {waited:.0f} s: {states}.")
            self.progress("waiting for the inference server (seconds)", int(waited), int(self.wait_s))
            await asyncio.sleep(POLL_S)

    def raise_if_exited(self) -> None:
        """Raise if the launched server has exited."""
        reason = self.exit_reason()
        if reason:
            raise LaunchedServerExited(reason)

    async def deliver(self, adapter: Adapter) -> None:
        """Load an adapter on every server that responds, then unload older ones."""
        self.adapter = adapter
        for server in self.servers:
            server.ready = False
        await self._revive_all()
        # Waits if no server responds, and fails in the end.
        await self.pick()
        await gather_all([self._unload(server, keep=adapter.name) for server in self.servers if server.ready])

    async def unload_all(self) -> None:
        """Unload our adapters from the servers that respond."""
        self.adapter = None
        await gather_all([self._unload(server, "", FAREWELL_S) for server in self.servers if server.ready])

    async def _revive_all(self) -> None:
        # Those that keep hanging only if there are no others: each of their requests takes as long as allowed.
        sound = [server for server in self.servers if server.hangs < MAX_HANGS]
        await gather_all([self._revive(server) for server in sound])
        if not any(server.ready for server in self.servers):
            await gather_all([self._revive(server) for server in self.servers if server not in sound])

    async def _revive(self, server: Server) -> None:
        """Check that a server responds and load the adapter; records the error otherwise."""
        try:
            await self.client.call(server.url + self.spec.health, timeout_s=HEALTH_S)
            await self._load(server)
            server.ready = True
        except Transient as error:
            server.trouble = str(error)
        except RequestRejected as error:
            raise RolloutError(f"{server.url} does not accept the adapter: {error}") from error

    async def _load(self, server: Server) -> None:
        if self.adapter is None or not self.spec.load:
            return
        body = {"lora_name": self.adapter.name, "lora_path": str(self.adapter.path)}
        try:
            await self.client.call(server.url + self.spec.load, body, timeout_s=LOAD_S)
        except RequestRejected as error:
            # Loaded by a request whose reply was lost; names are never reused.
            if "already" not in error.text:
                raise
        server.loaded.append(self.adapter.name)

    async def _unload(self, server: Server, keep: str, timeout_s: float = LOAD_S) -> None:
        for name in [name for name in server.loaded if name != keep]:
            try:
                await self.client.call(server.url + self.spec.unload, {"lora_name": name}, timeout_s=timeout_s)
            except Transient:
                # It stays on the list and is unloaded after the next delivery.
                continue
            except RequestRejected as error:
                if error.status not in (400, 404):
                    raise RolloutError(f"{server.url} does not unload the adapter {name}: {error}") from error
            server.loaded.remove(name)
