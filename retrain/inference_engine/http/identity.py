"""What can be asked of a server without the weights: whether it responds, has the model, and has its tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.builtin import resolve_model
from retrain.config import TrainConfig
from retrain.errors import ConfigError
from retrain.inference_engine.http.client import KEY_VARIABLE, Client, RequestRejected, T, Transient, Work
from retrain.inference_engine.http.fleet import HEALTH_S, POLL_S, Fleet, Server
from retrain.inference_engine.http.spec import ServerSpec
from retrain.modeling.tokens import Tokenizer

PROBE = "What is 17 + 25?"


def identify_servers(spec: ServerSpec, config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Raise if a server of `[inference] url`, all of which respond, cannot be the one for this model."""
    client = Client(config.inference.timeout_s)
    try:
        fleet = Fleet(spec, spec.urls(config.inference.url), client, 0.0, lambda *_: None)
        wanted = str(resolve_model(config.model.model))
        check = Identification(spec, fleet, tokenizer, wanted, config.model.lora_rank)
        for server in fleet.servers:
            check.identify(server, config.training.max_tokens, lambda line: None)
    finally:
        client.close()


class Identification:
    """Asks servers who they are."""

    def __init__(self, spec: ServerSpec, fleet: Fleet, tokenizer: Tokenizer, wanted: str, rank: int) -> None:
        self.spec, self.fleet, self.tokenizer = spec, fleet, tokenizer
        self.wanted, self.rank = wanted, rank

    def identify(self, server: Server, max_tokens: int, log: Callable[[str], None]) -> int:
        """Wait for a server and find its model; returns the context length that it lists, or 0."""
        self._run(self._wait(server, log))
        server.model, listed = self._run(self._find_model(server))
        if listed and listed <= max_tokens:
            raise ConfigError(
                f"{server.url} has a context of {listed} tokens, but [training] max_tokens = {max_tokens}. "
                f"{self._remedy('context')}  Try: max_tokens = {listed // 2}"
            )
        self._run(self._compare_tokenizers(server))
        return listed

    async def _wait(self, server: Server, log: Callable[[str], None]) -> None:
        started, announced = time.monotonic(), False
        while True:
            try:
                await self.fleet.client.call(server.url + self.spec.health, timeout_s=HEALTH_S)
                return
            except RequestRejected as error:
                if error.status in (401, 403):
                    raise self._bad_api_key(server, error) from error
                return
            except Transient as error:
                if error.status not in (0, 502, 503, 504):
                    return
                self.fleet.raise_if_exited()
                waited = time.monotonic() - started
                if waited >= self.fleet.wait_s:
                    raise ConfigError(
                        f"[inference] url: no server responds at {server.url} after {waited:.0f} s ({error}).  "
                        f"Try: {self.fleet.remedy or self._command(server)}"
                    ) from error
            if not announced:
                log(f"Waiting for {server.url}, up to {self.fleet.wait_s:.0f} s ...")
                announced = True
            self.fleet.progress(f"waiting for {server.url} (seconds)", int(waited), int(self.fleet.wait_s))
            await asyncio.sleep(POLL_S)

    async def _find_model(self, server: Server) -> tuple[str, int]:
        """The base model's name on the server, and its context length if listed."""
        if not self.spec.models:
            return self.wanted, 0
        try:
            listed: object = await self.fleet.client.call(server.url + self.spec.models, timeout_s=HEALTH_S)
            models = _read_models(listed)
        except (RequestRejected, Transient) as error:
            if isinstance(error, RequestRejected) and error.status in (401, 403):
                raise self._bad_api_key(server, error) from error
            if self.spec.name == "openai":
                # Not every server lists its models; the samples will show.
                return self.wanted, 0
            text = str(error)
            answer = text.removeprefix("it ") if text.startswith("it ") else f"returned {text}"
            raise ConfigError(
                f"{server.url} is not a {self.spec.name} server: {self.spec.models} {answer}.  "
                f"Try: check the port; {self._command(server)}"
            ) from error
        if not models:
            raise ConfigError(f"{server.url} serves no model.  Try: {self._command(server)}")
        same = [m for m in models if self.wanted in (m["id"], m.get("root")) or m["id"] == Path(self.wanted).name]
        chosen = (same or models)[0]
        return str(chosen["id"]), int(chosen.get("max_model_len") or 0)

    async def _compare_tokenizers(self, server: Server) -> None:
        if not self.spec.tokenize:
            return
        body = {"model": server.model, "prompt": PROBE, "add_special_tokens": False}
        try:
            reply = await self.fleet.client.call(server.url + self.spec.tokenize, body, timeout_s=HEALTH_S)
            theirs = list(reply["tokens"])
        except (RequestRejected, Transient, KeyError, TypeError):
            return
        if theirs != list(self.tokenizer(PROBE, add_special_tokens=False)["input_ids"]):
            raise ConfigError(
                f"{server.url} has a different tokenizer than {self.wanted}: it encodes {PROBE[:16]!r} as "
                f"{theirs[:6]}.  Try: {self._command(server)}"
            )

    def _run(self, work: Work[T]) -> T:
        return self.fleet.client.run(work)

    def _command(self, server: Server) -> str:
        return self.spec.start_command(self.wanted, server.url, self.rank)

    def _remedy(self, miss: str) -> str:
        return self.spec.remedies.get(miss, "").format(rank=self.spec.max_rank(self.rank), model=self.wanted)

    def _bad_api_key(self, server: Server, error: RequestRejected) -> ConfigError:
        return ConfigError(
            f"{server.url} requires a different API key ({error}).  Try: put {KEY_VARIABLE}=... into .env, with the "
            "key that the server was started with"
        )


def _read_models(listed: object) -> list[dict[str, Any]]:
    """The models in a reply, without adapters."""
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
        raise Transient("something else than a list of models")
    return [model for model in models if not model.get("parent")]
