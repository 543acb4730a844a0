"""What is made sure of before any training: the server is up, has the model, says what is needed, takes adapters.

Each miss is one sentence with the server's flag that mends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine.http.client import KEY_VARIABLE, Refused, Transient
from retrain.inference_engine.http.fleet import HEALTH_S, POLL_S, Fleet, NoServerLeft, OwnServerEnded, Server
from retrain.inference_engine.http.proof import PolicyScorer, Row
from retrain.inference_engine.http.wire import Answer, Ask, Lacking, Wire
from retrain.types import IntArray, Sampling

PROBE = "What is 17 + 25?"
PROBE_TOKENS, PROBE_ROWS = 24, 4
# Mean difference of log-probs beyond which a server has another model: by the trainer's precision.
LIMITS = {torch.float32: 0.05}
LIMIT = 0.15


def _untempered(sampling: Sampling) -> Sampling:
    return Sampling(max_tokens=sampling.max_tokens, repetition_penalty=sampling.repetition_penalty)


MEANINGS: dict[str, Callable[[Sampling], Sampling]] = {
    "sampled": lambda s: s,
    "tempered": lambda s: replace(s, top_p=1.0, top_k=0, min_p=0.0),
    "untempered": _untempered,
    "raw": lambda s: Sampling(max_tokens=s.max_tokens),
}
"""What a server's log-probs may be of: the sampled distribution, or one from before a stage of the sampler."""


@dataclass(frozen=True)
class Survey:
    """What was learnt about the servers."""

    context: int
    takes_n: bool = True
    meaning: str = "sampled"
    mismatch: float = 0.0
    """Mean difference of log-probs to the trainer's, under the base model."""

    def reported(self, sampling: Sampling) -> Sampling:
        """The distribution that the servers' log-probs are of, given the one that they sample from."""
        return replace(MEANINGS[self.meaning](sampling), n=1, seed=0)


class Startup:
    """Looks at every server once."""

    def __init__(
        self, wire: Wire, fleet: Fleet, tokenizer: Any, scorer: PolicyScorer, text_of: Callable[[IntArray], str]
    ) -> None:
        self.wire, self.fleet, self.tokenizer, self.scorer, self.text_of = wire, fleet, tokenizer, scorer, text_of
        policy = scorer.policy
        self.wanted = str(policy.adapted.peft_config["default"].base_model_name_or_path)
        self.rank = policy.rank

    def survey(self, sampling: Sampling, say: Callable[[str], None]) -> Survey:
        """What all servers are; refused where one is not fit, or where they differ."""
        found: list[Survey] = []
        for server in self.fleet.servers:
            one = self._survey(server, sampling, say)
            if found and one.meaning != found[0].meaning:
                raise ConfigError(
                    f"{server.url} and {self.fleet.servers[0].url} report log-probs differently "
                    f"({one.meaning} and {found[0].meaning}); start both with the same flags."
                )
            found.append(one)
        return Survey(
            context=min(one.context for one in found),
            takes_n=all(one.takes_n for one in found),
            meaning=found[0].meaning,
            mismatch=max(one.mismatch for one in found),
        )

    def deliver_first(self, deliver: Callable[[object], None]) -> None:
        """Load an adapter and sample from it once, on every server."""
        try:
            deliver(self.scorer.policy)
            absent = [server for server in self.fleet.servers if not server.ready]
            if absent:
                raise self._lost(absent[0], absent[0].trouble)
            for server in self.fleet.servers:
                self._run(self.fleet.ask(server, self._probe(Sampling(max_tokens=2))))
        except OwnServerEnded:
            raise
        except Transient as error:
            self.fleet.refuse_ended()
            if error.down or error.status >= 500:
                raise self._lost(server, str(error)) from error
            raise self._unfit(server, "does not sample from adapters", error, "lora") from error
        except (Refused, Lacking) as error:
            raise self._unfit(server, "does not sample from adapters", error, "lora") from error
        except NoServerLeft as error:
            raise self._lost(self.fleet.servers[0], self.fleet.servers[0].trouble) from error
        except RolloutError as error:
            refusal = error.__cause__
            if isinstance(refusal, Refused) and refusal.status in (401, 403):
                raise self._keyless(self.fleet.servers[0], refusal) from error
            too_high = "rank" in str(error).lower()
            raise ConfigError(f"{error}  {self._remedy('rank' if too_high else 'lora')}") from error

    def _survey(self, server: Server, sampling: Sampling, say: Callable[[str], None]) -> Survey:
        self._run(self._wait(server, say))
        server.model, listed = self._run(self._look_up(server))
        context = min(self.scorer.policy.context_length, listed or self.scorer.policy.context_length)
        if listed and listed <= sampling.max_tokens:
            raise ConfigError(
                f"{server.url} holds {listed} tokens in all, and [training] max_tokens = {sampling.max_tokens}. "
                f"{self._remedy('context')}  Try: max_tokens = {listed // 2}"
            )
        self._run(self._compare_tokenizers(server))
        takes_n, drawn, probe = self._draw(server, context)
        meaning, mismatch = self._measure(server, drawn, probe)
        one = Survey(context, takes_n, meaning, mismatch)
        say(f"Inference server {server.url}: {self.wire.name}, model {server.model}, context {context}.")
        if one.reported(sampling) != replace(sampling, n=1, seed=0):
            flag = self.wire.remedies.get("processed")
            spare = f"; {flag} on the server spares that" if flag else ""
            say(f"  It reports {meaning} log-probs: those of the sampled distribution are recomputed here{spare}.")
        return one

    async def _wait(self, server: Server, say: Callable[[str], None]) -> None:
        started, said = time.monotonic(), False
        while True:
            try:
                await self.fleet.client.call(server.url + self.wire.health, timeout_s=HEALTH_S)
                return
            except Refused as error:
                if error.status in (401, 403):
                    raise self._keyless(server, error) from error
                return
            except Transient as error:
                if error.status not in (0, 502, 503, 504):
                    return
                self.fleet.refuse_ended()
                waited = time.monotonic() - started
                if waited >= self.fleet.wait_s:
                    raise ConfigError(
                        f"[inference] url: no server answers at {server.url} after {waited:.0f} s ({error}).  "
                        f"Try: {self.fleet.remedy or self._command(server)}"
                    ) from error
            if not said:
                say(f"Waiting for {server.url}, up to {self.fleet.wait_s:.0f} s ...")
                said = True
            self.fleet.progress(f"waiting for {server.url}, s", int(waited), int(self.fleet.wait_s))
            await asyncio.sleep(POLL_S)

    async def _look_up(self, server: Server) -> tuple[str, int]:
        """The base model's name there, and the server's context where it says."""
        if not self.wire.models:
            return self.wanted, 0
        try:
            listed = await self.fleet.client.call(server.url + self.wire.models, timeout_s=HEALTH_S)
            models = [model for model in listed["data"] if not model.get("parent")]
        except (Refused, Transient, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, Refused) and error.status in (401, 403):
                raise self._keyless(server, error) from error
            if self.wire.name == "openai":
                # Not every server has a list; what it samples will tell.
                return self.wanted, 0
            raise ConfigError(
                f"what answers at {server.url} is not a {self.wire.name} server: {self.wire.models} gave {error}.  "
                f"Try: check the port; {self._command(server)}"
            ) from error
        if not models:
            raise ConfigError(f"{server.url} serves no model.  Try: {self._command(server)}")
        same = [m for m in models if self.wanted in (m["id"], m.get("root")) or m["id"] == Path(self.wanted).name]
        chosen = (same or models)[0]
        return str(chosen["id"]), int(chosen.get("max_model_len") or 0)

    async def _compare_tokenizers(self, server: Server) -> None:
        if not self.wire.tokenize:
            return
        body = {"model": server.model, "prompt": PROBE, "add_special_tokens": False}
        try:
            reply = await self.fleet.client.call(server.url + self.wire.tokenize, body, timeout_s=HEALTH_S)
            theirs = list(reply["tokens"])
        except (Refused, Transient, KeyError, TypeError):
            return
        if theirs != list(self.tokenizer(PROBE, add_special_tokens=False)["input_ids"]):
            raise ConfigError(
                f"{server.url} has another tokenizer than {self.wanted}: it turns {PROBE[:16]!r} into {theirs[:6]}.  "
                f"Try: {self._command(server)}"
            )

    def _draw(self, server: Server, context: int) -> tuple[bool, list[Answer], Ask]:
        """Completions of a fixed prompt, and whether the server makes several in one request."""
        options = {"top_p": 0.8, "repetition_penalty": 1.3}
        own = {option: value for option, value in options.items() if option in self.wire.options}
        sampling = Sampling(max_tokens=1, n=PROBE_ROWS, temperature=0.5, seed=1, **own)  # type: ignore[arg-type]
        room = max(1, min(PROBE_TOKENS, context - len(self._probe(sampling).prompt_ids)))
        probe = self._probe(sampling := replace(sampling, max_tokens=room))
        alone = [replace(probe, sampling=replace(sampling, n=1, seed=seed)) for seed in range(1, PROBE_ROWS + 1)]
        try:
            if self.wire.takes_n:
                try:
                    return True, self._run(self.fleet.ask(server, probe)), probe
                except Transient as error:
                    if not str(error).startswith(f"it sent 1 of {PROBE_ROWS}"):
                        raise
            return False, [self._run(self.fleet.ask(server, one))[0] for one in alone], probe
        except Lacking as error:
            miss = "ids" if "ids" in error.what else "logprobs"
            raise self._unfit(server, "cannot be trained with", error, miss) from error
        except Refused as error:
            if error.status in (401, 403):
                raise self._keyless(server, error) from error
            raise self._unfit(server, "does not complete token ids with log-probs", error, "ids") from error
        except Transient as error:
            raise self._unfit(server, "did not complete a first prompt", error, "") from error

    def _measure(self, server: Server, drawn: list[Answer], probe: Ask) -> tuple[str, float]:
        """What the log-probs are of, and how far they are from the trainer's own."""
        rows = [Row(probe.prompt_ids, np.array(a.token_ids, np.int64), np.array(a.logprobs, np.float32)) for a in drawn]
        told = np.concatenate([row.logprobs_T for row in rows])
        apart = {}
        with self.scorer.holding(self.scorer.base()):
            for name, of in MEANINGS.items():
                own = np.concatenate(self.scorer.logprobs(rows, replace(of(probe.sampling), n=1)))
                apart[name] = float(np.abs(own - told).mean())
        meaning, mismatch = min(apart.items(), key=lambda item: item[1])
        if mismatch > LIMITS.get(self.scorer.policy.dtype, LIMIT):
            raise ConfigError(
                f"{server.url} serves {server.model!r}, which is not {self.wanted!r} as the trainer has it: on a fixed "
                f"prompt their log-probs are {mismatch:.2f} apart on average.  Try: {self._command(server)}"
            )
        return meaning, mismatch

    def _probe(self, sampling: Sampling) -> Ask:
        ids = np.array(self.tokenizer(PROBE)["input_ids"], np.int64)
        return Ask(ids, self.text_of(ids), sampling, self.scorer.policy.stop_ids)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.fleet.client.run(work)

    def _command(self, server: Server) -> str:
        return self.wire.command.format(model=self.wanted, port=server.url.rpartition(":")[2].partition("/")[0])

    def _remedy(self, miss: str) -> str:
        return self.wire.remedies.get(miss, "").format(rank=self.rank, model=self.wanted)

    def _unfit(self, server: Server, what: str, error: Exception, miss: str) -> ConfigError:
        return ConfigError(f"{server.url} {what}: {str(error).rstrip('.')}.  {self._remedy(miss)}".rstrip())

    def _lost(self, server: Server, trouble: str) -> ConfigError:
        # To vLLM a rank that is too high is an error of its own, 500.
        hint = self._remedy("rank") if "rank" in trouble.lower() else "Try: see its log, start it again"
        told = trouble.rstrip(".")
        return ConfigError(
            f"{server.url} answered before, and failed when it was given its first adapter: {told}.  {hint}"
        )

    def _keyless(self, server: Server, error: Refused) -> ConfigError:
        return ConfigError(
            f"{server.url} wants a key, or another one ({error}).  Try: put {KEY_VARIABLE}=... into .env, with the key "
            "that the server was started with"
        )
