"""The servers of one engine: requests go round those that answer and hold the newest adapter.

A request that fails is sent again, elsewhere where there is an elsewhere, a bounded number of times. A server that went
away is taken back once it answers and has the adapter again; when none is left, they are waited for, up to a limit.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from retrain.errors import RolloutError
from retrain.inference_engine import Progress
from retrain.inference_engine.http.client import KEY_VARIABLE, Client, Refused, Transient, gather_all
from retrain.inference_engine.http.wire import Adapter, Answer, Ask, Lacking, Wire

ATTEMPTS = 5
# Rounding may lift the log-prob of a sure token above 0, by less than this.
LARGEST_LOGPROB = 0.05
FIRST_PAUSE_S = 0.25
POLL_S = 0.5
# Health and adapters answer at once where they answer at all; a first adapter may warm kernels up.
HEALTH_S, LOAD_S = 10.0, 120.0


class NoServerLeft(RolloutError):
    """Every server was waited for in vain."""


class OwnServerEnded(RolloutError):
    """The server that this run started is no more."""


@dataclass
class Server:
    """One address, what it serves, and what we know it to hold."""

    url: str
    model: str = ""
    """The base model's name there."""
    ready: bool = False
    """Whether it answers and holds the newest adapter."""
    loaded: list[str] = field(default_factory=list)
    trouble: str = ""


class Fleet:
    """Every method but the constructor runs on the client's loop."""

    def __init__(self, wire: Wire, urls: list[str], client: Client, wait_s: float, progress: Progress) -> None:
        self.wire = wire
        self.servers = [Server(url) for url in urls]
        self.client = client
        self.wait_s = wait_s
        self.progress = progress
        self.vocabulary = 0
        self.adapter: Adapter | None = None
        self.turn = 0
        self.reviving = asyncio.Lock()
        self.ended: Callable[[], str] = lambda: ""
        """What became of a server that we started ourselves; empty while it runs, and where we started none."""
        self.remedy = ""
        """What to try when a server that we started ourselves does not come up."""

    async def complete(self, ask: Ask) -> tuple[Server, list[Answer]]:
        """All completions of one request, from one server. Never fewer than were asked for."""
        trouble, server = "", self.servers[0]
        for attempt in range(ATTEMPTS):
            server = await self.pick()
            pause = 0.0
            try:
                return server, await self.ask(server, ask)
            except Transient as error:
                trouble, pause = str(error), error.after or FIRST_PAUSE_S * 2**attempt
                if error.down:
                    server.ready, server.trouble = False, trouble
            except Refused as error:
                trouble = str(error)
                if error.status in (401, 403):
                    trouble += f". The server wants another key than that of {KEY_VARIABLE}."
                if self.adapter is None or self.adapter.name not in error.text:
                    break
                # It restarted and has forgotten its adapter.
                server.ready, server.trouble, server.loaded = False, trouble, []
            except Lacking as error:
                trouble = str(error)
                break
            if len(self.servers) == 1 or not any(other.ready for other in self.servers):
                await asyncio.sleep(pause)
        raise RolloutError(
            f"{server.url} did not complete a prompt of {len(ask.prompt_ids)} tokens, tried {attempt + 1} times. "
            f"Last: {trouble}"
        )

    async def ask(self, server: Server, ask: Ask) -> list[Answer]:
        """One request to one server, its answer checked."""
        body = self.wire.request(server.model, self.adapter, ask)
        reply = await self.client.call(server.url + self.wire.route, body)
        try:
            answers = self.wire.read(reply)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise Transient(f"it sent something else than completions ({error!r})") from error
        problem = self._problem_with(answers, ask)
        if problem:
            raise Transient(problem)
        return answers

    def _problem_with(self, answers: list[Answer], ask: Ask) -> str:
        if len(answers) != ask.sampling.n:
            return f"it sent {len(answers)} of {ask.sampling.n} completions"
        asked = ask.prompt_ids.tolist()
        for answer in answers:
            if answer.prompt_ids is not None and answer.prompt_ids != asked:
                return "it sent the completion of another prompt"
            if len(answer.token_ids) != len(answer.logprobs):
                return f"it sent {len(answer.logprobs)} log-probs for {len(answer.token_ids)} tokens"
            if not 0 < len(answer.token_ids) <= ask.sampling.max_tokens:
                return f"it sent {len(answer.token_ids)} tokens where at most {ask.sampling.max_tokens} were asked for"
            # At C speed: a step has tens of thousands of tokens, and every one is looked at.
            ids, told = answer.token_ids, answer.logprobs
            if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < self.vocabulary:
                return "it sent token ids that the model does not have"
            if not set(map(type, told)) <= {int, float} or not all(map(math.isfinite, told)):
                return "it sent log-probs that are not numbers"
            if max(told) > LARGEST_LOGPROB:
                return f"it sent a log-prob of {max(told):.3g}, and none is above 0"
            if len(answer.token_ids) < ask.sampling.max_tokens and answer.token_ids[-1] not in ask.stop_ids:
                return f"it stopped after token {answer.token_ids[-1]}, which is none of the model's end tokens"
        return ""

    async def pick(self) -> Server:
        """The next server in turn that is ready; waits for one when there is none."""
        started = time.monotonic()
        while True:
            for _ in self.servers:
                self.turn = (self.turn + 1) % len(self.servers)
                if self.servers[self.turn].ready:
                    return self.servers[self.turn]
            async with self.reviving:
                if not any(server.ready for server in self.servers):
                    await self._revive_all()
            if any(server.ready for server in self.servers):
                continue
            self.refuse_ended()
            waited = time.monotonic() - started
            if waited >= self.wait_s:
                told = "; ".join(f"{server.url} ({server.trouble})" for server in self.servers)
                raise NoServerLeft(f"no inference server is left after waiting {waited:.0f} s: {told}.")
            self.progress("waiting for the inference server, s", int(waited), int(self.wait_s))
            await asyncio.sleep(POLL_S)

    def refuse_ended(self) -> None:
        """Nobody comes back where the run's own server has ended."""
        told = self.ended()
        if told:
            raise OwnServerEnded(told)

    async def deliver(self, adapter: Adapter) -> None:
        """Load an adapter on every server that answers, then unload those before it."""
        self.adapter = adapter
        for server in self.servers:
            server.ready = False
        await self._revive_all()
        # Where nobody answers, this waits, and fails in the end.
        await self.pick()
        await gather_all([self._unload(server, keep=adapter.name) for server in self.servers if server.ready])

    async def withdraw(self) -> None:
        """Unload everything of ours from the servers that answer."""
        self.adapter = None
        await gather_all([self._unload(server, keep="") for server in self.servers if server.ready])

    async def _revive_all(self) -> None:
        await gather_all([self._revive(server) for server in self.servers])

    async def _revive(self, server: Server) -> None:
        """Make sure that a server answers and holds the adapter; notes the trouble where it does not."""
        try:
            await self.client.call(server.url + self.wire.health, timeout_s=HEALTH_S)
            await self._load(server)
            server.ready = True
        except Transient as error:
            server.trouble = str(error)
        except Refused as error:
            raise RolloutError(f"{server.url} does not take the adapter: {error}") from error

    async def _load(self, server: Server) -> None:
        if self.adapter is None or not self.wire.load:
            return
        body = {"lora_name": self.adapter.name, "lora_path": str(self.adapter.path)}
        try:
            await self.client.call(server.url + self.wire.load, body, timeout_s=LOAD_S)
        except Refused as error:
            # A load whose answer was lost is loaded all the same; names are never used twice.
            if "already" not in error.text:
                raise
        server.loaded.append(self.adapter.name)

    async def _unload(self, server: Server, keep: str) -> None:
        for name in [name for name in server.loaded if name != keep]:
            try:
                await self.client.call(server.url + self.wire.unload, {"lora_name": name}, timeout_s=LOAD_S)
            except Transient:
                # It stays on the list, and is unloaded after the next delivery.
                continue
            except Refused as error:
                if error.status not in (400, 404):
                    raise RolloutError(f"{server.url} does not unload the adapter {name}: {error}") from error
            server.loaded.remove(name)
